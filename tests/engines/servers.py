"""Real servers as context managers: started on a free loopback port with the flags given, waited for, and stopped whatever happens.

    with llama_server() as baseline, llama_server("--spec-type", "ngram-simple") as speculative:
        ...
"""
import contextlib
import ctypes
import http.client
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time

from tests.engines import install

READY_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 10.0
MODEL = "smollm2"
VLLM_ENVIRONMENT = {"VLLM_TARGET_DEVICE": "cpu", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1",
                    "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}

SGLANG_ENVIRONMENT = {"SGLANG_USE_CPU_ENGINE": "1", "SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK": "1", "OMP_NUM_THREADS": "1",
                      "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "DO_NOT_TRACK": "1"}


class DidNotStart(Exception):
    """A server that ended or never answered, with the end of its log."""


class RunningServer:
    """A server that answers: its address, and what it says of itself."""

    def __init__(self, port, log, process):
        self.port, self.log, self.process = port, log, process

    @property
    def url(self):
        """The base address, as one gives it to the tool."""
        return f"http://127.0.0.1:{self.port}/v1"

    def get(self, path, headers=None):
        """The status and the text of a GET."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            connection.request("GET", path, headers=headers or {})
            response = connection.getresponse()
            return response.status, response.read().decode("utf-8", "replace")
        finally:
            connection.close()

    def counters(self):
        """The samples of /metrics, labels dropped and their values added: read here by other means than the tool's."""
        status, text = self.get("/metrics")
        if status != 200:
            return {}
        totals = {}
        for line in text.splitlines():
            found = re.match(r"([a-zA-Z_:][\w:]*)(\{.*\})? (\S+)$", line)
            if found and not found[1].endswith(("_created", "_bucket")):
                totals[found[1]] = totals.get(found[1], 0.0) + float(found[3])
        return totals

    def log_text(self):
        """What the server wrote so far."""
        return self.log.read_text(encoding="utf-8", errors="replace")


@contextlib.contextmanager
def llama_server(*flags, model=None, metrics=True, slots=1):
    """A llama-server with F16 weights (or others) and `flags` beside the ordinary ones."""
    command = [install.llama_server(), "-m", model or install.weights("f16.gguf"), "--alias", MODEL, "-c", str(1024 * slots), "-np", str(slots),
               "-t", "1", *(["--metrics"] if metrics else []), *flags]      # one thread: two wait for each other by spinning, for seconds where cores are busy
    with started("llama-server", command, {}) as server:
        yield server


@contextlib.contextmanager
def vllm_server(*flags, dtype="float32", environment=None):
    """A vLLM server on the CPU, with `flags` beside the ordinary ones."""
    python = install.vllm_python()
    command = [python, "-m", "vllm.entrypoints.cli.main", "serve", install.weights("hf"), "--served-model-name", MODEL, "--dtype", dtype,
               "--max-model-len", "1024", "--max-num-seqs", "4", "--enforce-eager", *flags]
    path = f"{python.parent}{os.pathsep}{os.environ.get('PATH', '')}"
    with started("vllm", command, {**VLLM_ENVIRONMENT, "PATH": path, **(environment or {})}) as server:
        yield server


@contextlib.contextmanager
def sglang_server(*flags):
    """An SGLang server on the CPU, which computes with plain torch and does not draft, with `flags` beside the ordinary ones."""
    command = [install.vllm_python(), "-m", "sglang.launch_server", "--model-path", install.weights("hf"), "--served-model-name", MODEL,
               "--device", "cpu", "--dtype", "float32", "--attention-backend", "torch_native", "--sampling-backend", "pytorch",
               "--disable-cuda-graph", "--disable-overlap-schedule", "--skip-server-warmup", "--max-total-tokens", "4096", "--context-length", "1024",
               "--max-running-requests", "4", *flags]
    with started("sglang", command, {**SGLANG_ENVIRONMENT, "PYTHONPATH": install.sglang_path()}) as server:
        yield server


@contextlib.contextmanager
def started(name, command, environment):
    """A server of any kind that takes --host and --port and answers /health with 200 when it is ready."""
    with tempfile.TemporaryDirectory(prefix="measure-engines-") as folder:
        port, log = free_port(), pathlib.Path(folder) / f"{name}.log"
        with open(log, "ab") as file:
            process = subprocess.Popen([str(word) for word in (*command, "--host", "127.0.0.1", "--port", port)], stdin=subprocess.DEVNULL,
                                       stdout=file, stderr=subprocess.STDOUT, env={**os.environ, **environment}, start_new_session=True,
                                       preexec_fn=_end_with_parent if sys.platform == "linux" else None)
        server = RunningServer(port, log, process)
        try:
            wait_until_ready(server)
            yield server
        finally:
            stop(process)


def _end_with_parent():
    """In the child, before it becomes the server: have the kernel end it when whoever started it dies (Linux)."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def end_in_order():
    """Let a SIGTERM (that of `timeout`, for example) end this program as an exception does, so that servers are stopped."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))


def free_port():
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_until_ready(server):
    """Until /health says 200; DidNotStart where the server ends or takes too long."""
    deadline = time.monotonic() + READY_TIMEOUT_S
    while time.monotonic() < deadline:
        if server.process.poll() is not None:
            raise DidNotStart(f"it ended with {server.process.returncode}:\n{server.log_text()[-3000:]}")
        with contextlib.suppress(OSError, http.client.HTTPException):
            if server.get("/health")[0] == 200:
                return
        time.sleep(0.1)
    raise DidNotStart(f"not ready after {READY_TIMEOUT_S:g} s:\n{server.log_text()[-3000:]}")


def stop(process):
    """Ask it to end, then end it, and its children with it."""
    _signal(process, signal.SIGTERM)
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        pass
    _signal(process, getattr(signal, "SIGKILL", signal.SIGTERM))     # the group's rest, also where the leader has gone
    process.wait()


def _signal(process, number):
    with contextlib.suppress(OSError):
        if hasattr(os, "killpg"):
            os.killpg(process.pid, number)      # its group has the number of its leader, which is not taken again while one of them lives
        else:
            process.send_signal(number)
