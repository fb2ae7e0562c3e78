"""Load, measured; see the package."""
from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from typing import Any

from tests.drive import COMMAND, Bench, lines_of, m

CHUNK = b'data: {"choices":[{"index":0,"delta":{"content":"%d "},"finish_reason":null}]}\n\n'
LAST = b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}],"usage":{"prompt_tokens":5,"completion_tokens":%d}}\n\ndata: [DONE]\n\n'
MODELS = b'{"object":"list","data":[{"id":"load","owned_by":"somebody"}]}'


# ======================================================================================================================
# 1. A server whose streams tick: every stream is numbered words at a fixed pace, all streams on one clock
# ======================================================================================================================


class Ticking:
    """One event loop in a process of its own; a chunk of a stream is due every 1/rate seconds after its request."""

    def __init__(self, rate: float, chunks: int) -> None:
        self.rate, self.chunks = rate, chunks

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = next((int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:")), 0)
                body = json.loads(await reader.readexactly(length)) if length else {}
                if head.startswith(b"POST"):
                    await self.stream(writer, min(self.chunks, body.get("max_tokens", self.chunks)))
                elif b"/models" in head.split(b"\r\n")[0]:
                    writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(MODELS) + MODELS)
                else:
                    writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    async def stream(self, writer: asyncio.StreamWriter, chunks: int) -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        for number in range(chunks):
            await asyncio.sleep(max(0.0, began + (number + 1) / self.rate - loop.time()))
            data = CHUNK % number
            writer.write(b"%x\r\n%s\r\n" % (len(data), data))
        data = LAST % chunks
        writer.write(b"%x\r\n%s\r\n0\r\n\r\n" % (len(data), data))
        await writer.drain()


def serve(rate: float, chunks: int) -> None:
    """Run a ticking server until stdin ends; its port is the first line of stdout."""
    async def run() -> None:
        server = await asyncio.start_server(Ticking(rate, chunks).answer, "127.0.0.1", 0, limit=1 << 20, backlog=4096)
        print(server.sockets[0].getsockname()[1], flush=True)
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
        os._exit(0)

    asyncio.run(run())


def streams(options: Any) -> int:
    """Every chunk of every stream arrives, in order; the client says how late it was; memory stays within the pass's limit."""
    chunks = int(options.chunks_per_s * options.seconds)
    child = subprocess.Popen([sys.executable, "-m", "tests.load", "serve", str(options.chunks_per_s), str(chunks)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    url = f"http://127.0.0.1:{int(child.stdout.readline())}/v1" if not options.url else options.url
    with Bench() as bench:
        prompts = bench.prompts([f"stream {n}" for n in range(options.streams)])
        book, run = bench.path("labbook.md"), bench.path("run.jsonl")
        given = ["--baseline-url", url, "--prompts", prompts, "--concurrency", str(options.streams), "--max-tokens", str(chunks), "--warmup", "0", "--timeout",
                 str(60 + 4 * options.seconds), "--noise-floor", "never", "--ties", "never", "--labbook", book, "--run-file", run]
        began = time.perf_counter()
        ended = subprocess.run([*COMMAND, *given], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        peak_kib = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
        record = lines_of(book)[0]
        replies = [line["reply"] for line in lines_of(run) if line["record"] == "reply"]
        wanted = "".join(f"{number} " for number in range(chunks))
        whole = sum(not reply.get("error") if options.url else reply.get("content") == wanted and len(reply["chunk_at_s"]) == chunks for reply in replies)
        print(json.dumps({
            "streams": options.streams, "chunks_a_stream": chunks, "chunks": sum(len(reply.get("chunk_at_s", ())) for reply in replies), "whole": whole,
            "failed": record["failed"], "seconds": round(time.perf_counter() - began, 1), "wall_s": round(record["wall_s"], 2),
            "hiccup_p99_ms": round(1000 * (record["hiccup_p99_s"] or 0), 2), "peak_MiB": peak_kib // 1024, "caveats": [caveat["sentence"] for caveat in record["caveats"]],
            "exit": ended.returncode}))
    child.stdin.close()
    child.wait()
    return 0 if whole == options.streams else 1


# ======================================================================================================================
# 2. Run files of many requests
# ======================================================================================================================


def made_run_file(path: str, requests: int, chunks: int = 60) -> None:
    """A run file of two servers with that many requests in all, at two levels, differing in a few answers."""
    prompts = requests // 4
    text = " ".join(f"word{number % 97}" for number in range(120))
    with open(path, "wb") as file:
        file.write(m.json_line({"record": "run", "schema": m.SCHEMA, "label": "load", "started_at": "2026-01-02T03:04:05Z", "settings": {"max_tokens": 192, "texts": True}}))
        for label in ("baseline", "speculative"):
            file.write(m.json_line({"record": "server", **m.as_json(m.Server(label, "http://h/v1", "http://h/v1/chat/completions", (), "model", "vllm", "1"))}))
        for number in range(2 * prompts):
            file.write(m.json_line({"record": "prompt", **m.as_json(m.Prompt(f"p{number}", "w", ({"role": "user", "content": f"say {number}"},)))}))
        for place, level in enumerate((1, 16)):
            for label in ("baseline", "speculative"):
                for number in range(prompts):
                    began, gap = number * 0.5, 0.02 if label == "baseline" else 0.012
                    stamps = tuple(began + 0.1 + gap * k for k in range(chunks))
                    content = f"{number} {text}" + (" and more" if label != "baseline" and number % 50 == 0 else "")
                    reply = m.Reply(f"p{place * prompts + number}", 0, began, None, began, stamps[0], stamps[0], stamps[-1], stamps[-1], stamps, 1, 20, 0, chunks, "usage", content,
                                    finish_reason="stop")
                    file.write(m.json_line(m.reply_record(label, "w", level, "timed", reply)))
                done = m.Pass(label, "w", level, (), prompts * 0.5)
                for record in m.pass_records(done):
                    file.write(m.json_line(record))


def run_files(options: Any) -> int:
    """Seconds and memory of the verbs against the number of requests."""
    with tempfile.TemporaryDirectory() as folder:
        for requests in map(int, options.requests.split(",")):
            path = os.path.join(folder, f"run{requests}.jsonl")
            made_run_file(path, requests)
            for verb in options.verbs.split(","):
                words = {"compare": ["compare", path], "report": ["report", path, "-o", os.path.join(folder, "page.html")], "table": ["table", path],
                         "csv": ["csv", "--requests", path, "-o", os.path.join(folder, "requests.csv")]}[verb]
                began = time.perf_counter()
                measured = subprocess.run([sys.executable, "-c", "import resource, subprocess, sys; code = subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL).returncode; "
                                           "use = resource.getrusage(resource.RUSAGE_CHILDREN); print(use.ru_maxrss // 1024, use.ru_utime + use.ru_stime, code)",
                                           *COMMAND, *words], stdout=subprocess.PIPE, text=True, timeout=1800)
                peak, cpu, code = measured.stdout.split()
                print(json.dumps({"verb": verb, "requests": requests, "file_MB": os.path.getsize(path) // 1000000, "seconds": round(time.perf_counter() - began, 1),
                                  "cpu_s": round(float(cpu), 1), "peak_MiB": int(peak), "exit": int(code)}), flush=True)
    return 0


def main() -> int:
    if sys.argv[1:2] == ["serve"]:
        serve(float(sys.argv[2]), int(sys.argv[3]))
    parser = argparse.ArgumentParser("python3 -m tests.load")
    verbs = parser.add_subparsers(dest="verb", required=True)
    one = verbs.add_parser("streams")
    one.add_argument("--streams", type=int, default=64)
    one.add_argument("--chunks-per-s", type=float, default=50)
    one.add_argument("--seconds", type=float, default=5)
    one.add_argument("--url", help="a server that runs already, instead of our own")
    other = verbs.add_parser("files")
    other.add_argument("--requests", default="3000,10000,30000")
    other.add_argument("--verbs", default="compare,report")
    options = parser.parse_args()
    return streams(options) if options.verb == "streams" else run_files(options)


if __name__ == "__main__":
    sys.exit(main())
