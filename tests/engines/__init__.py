"""Tests against real engines. They take minutes and need an installation, so the plain suite leaves them out:

    python3 tests/engines/install.py llama.cpp vllm sglang
    MEASURE_ENGINES=llama.cpp,vllm,sglang python3 -m unittest -v tests.engines
"""
import os

ENGINES = {"llama.cpp": "tests.engines.test_llama_cpp", "vllm": "tests.engines.test_vllm",
           "sglang": "tests.engines.test_sglang"}


def load_tests(loader, standard_tests, pattern):
    """The tests of the engines that MEASURE_ENGINES names; none where it is not set."""
    wanted = [name for name in os.environ.get("MEASURE_ENGINES", "").replace(",", " ").split() if name]
    unknown = [name for name in wanted if name not in ENGINES]
    if unknown:
        raise ValueError(f"MEASURE_ENGINES: no such engine: {', '.join(unknown)}; there are {', '.join(ENGINES)}")
    return loader.suiteClass(loader.loadTestsFromName(ENGINES[name]) for name in wanted)
