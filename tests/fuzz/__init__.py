"""Mutated inputs for everything that reads what others wrote: no traceback but MeasureError, no hang, no quadratic time.

    python3 -m tests.fuzz --inputs 1000000              every reader, that many inputs each
    python3 -m tests.fuzz --inputs 100000 --only http   one of them; --seed N for others

Seeds are captures of real engines (tests/data/captures), the cases (tests/data/cases) and a run of the program against the
fake server. What was found by it is a test in tests/test_fuzz.py.
"""
from __future__ import annotations

import glob
import json
import os
import random
import time
from array import array
from typing import Any, Callable, Dict, List, Sequence, Tuple

from tests.drive import Bench, m
from tests.fakes import DATA, FakeServer, Speculation

CAPTURES = os.path.join(DATA, "captures")
CASES = os.path.join(DATA, "cases")


# ======================================================================================================================
# 1. Mutation
# ======================================================================================================================

WORDS = [b"\r\n", b"\n", b"\r", b"\n\n", b"\0", b'"', b"\\", b"{", b"}", b"[", b"]", b",", b":", b" ", b"\t", b"=", b"\xff", b"\xef\xbb\xbf", b"\xe2\x80\xa8",
         b"0\r\n\r\n", b"data: ", b"data: [DONE]\n\n", b"event: error\n", b"HTTP/1.1 100 Continue\r\n\r\n", b"Content-Length: 5\r\n",
         b"Transfer-Encoding: chunked\r\n", b"Content-Encoding: gzip\r\n", b"null", b"true", b"NaN", b"Infinity", b"-Infinity", b"1e999", b"-1", b"0",
         b"1e308", b"9007199254740993", b"99999999999999999999999", b"\\ud800", b"\\u0000", b"\\", b'""', b"[]", b"{}", b"[[[[[[[[[[[[[[[[", b"@", b"#", b"?",
         b"//", b"%", b"%00", b"::", b"[::1]", b"/v1", b"http://", b"https://", b"-----", b"# TYPE x counter\n", b"_total", b"_created", b'{le="', b"timings",
         b"usage", b"error", b"choices", b"delta", b"content", b"tool_calls", b"index", b"function", b"arguments", b"finish_reason", b"record", b"reply",
         b"\xed\xa0\x80", "é".encode(), "😀".encode(), b"0x10", b"1_0", b"ffffffffffff"]


def mutated(data: bytes, others: Sequence[bytes], chance: random.Random) -> bytes:
    """The bytes with one to four small accidents, or a graft from another seed."""
    buffer = bytearray(data)
    for _ in range(chance.choice((1, 1, 2, 4))):
        size = len(buffer)
        place = chance.randrange(size + 1)
        kind = chance.randrange(9)
        if kind == 0 and size:
            buffer[place - 1] ^= 1 << chance.randrange(8)
        elif kind == 1:
            del buffer[place:place + chance.choice((1, 2, 5, 40))]
        elif kind in (2, 3):
            buffer[place:place] = chance.choice(WORDS)
        elif kind == 4:
            word = chance.choice(WORDS)
            buffer[place:place + len(word)] = word
        elif kind == 5:
            piece = buffer[place:place + chance.choice((1, 8, 80))]
            buffer[place:place] = piece * chance.choice((1, 2, 9))
        elif kind == 6:
            other = chance.choice(others)
            start = chance.randrange(len(other) + 1)
            buffer[place:place + chance.choice((0, 20, 200))] = other[start:start + chance.choice((5, 50, 300))]
        elif kind == 7:
            del buffer[place:]
        elif size:
            at = chance.randrange(size)
            buffer[at:at + 1] = bytes([chance.randrange(256)])
    return bytes(buffer[:20000])


def spoiled_value(value: Any, chance: random.Random) -> Any:
    """A JSON value with one of its parts replaced by one of another kind."""
    odd = chance.choice((None, True, 0, -1, 1.5, 1e308, 2 ** 64, "", "x", "\ud800", [], {}, [[]], [None], {"a": {}}, ["a", 1]))
    if isinstance(value, dict) and value and chance.random() < 0.85:
        key = chance.choice(list(value))
        copy = dict(value)
        if chance.random() < 0.1:
            del copy[key]
        else:
            copy[key] = spoiled_value(value[key], chance)
        return copy
    if isinstance(value, list) and value and chance.random() < 0.85:
        copy = list(value)
        place = chance.randrange(len(copy))
        copy[place] = spoiled_value(copy[place], chance)
        return copy
    return odd


def json_mutated(data: bytes, others: Sequence[bytes], chance: random.Random) -> bytes:
    """A JSON text with a part replaced, or with accidents to its bytes."""
    if chance.random() < 0.5:
        return mutated(data, others, chance)
    try:
        return json.dumps(spoiled_value(json.loads(data), chance)).encode()
    except (ValueError, RecursionError):
        return mutated(data, others, chance)


# ======================================================================================================================
# 2. Seeds
# ======================================================================================================================


def files(*patterns: str) -> List[bytes]:
    """The files that fit."""
    found = []
    for pattern in patterns:
        for path in sorted(glob.glob(os.path.join(DATA, pattern))):
            with open(path, "rb") as file:
                found.append(file.read())
    return found


def streams() -> List[bytes]:
    """The bodies of captured streams, whole."""
    return files("captures/*/*.sse", "captures/*/v_rust_s.txt", "cases/*.sse")


def short_stream(body: bytes, first: int = 3, last: int = 3) -> bytes:
    """A stream's first and last events: where everything that is no plain text stands."""
    blocks = body.split(b"\n\n")
    return body if len(blocks) <= first + last else b"\n\n".join(blocks[:first] + blocks[-last:])


def answers() -> List[bytes]:
    """Captured answers in one piece, and refusals."""
    return [data for data in files("captures/*/*.json", "cases/10*.json", "cases/17c*.json") if 0 < len(data) < 2500]


def pages() -> List[bytes]:
    """Pages of metrics, those of engines cut down to the lines that are looked at."""
    short = []
    for page in files("captures/*/*metrics*.txt", "captures/*/om.txt"):
        lines = [line for line in page.split(b"\n") if any(word in line for word in (b"spec", b"generation_tokens", b"cache_config", b"process_start", b"predicted"))
                 and b"_bucket" not in line]
        short.append(b"\n".join(lines[:16]) + b"\n")
    return short + [page for page in files("cases/*.prom") if len(page) < 2000]


def framed(body: bytes, chunk_bytes: int = 0, kind: bytes = b"text/event-stream", status: bytes = b"200 OK") -> bytes:
    """A response around a body; chunked where a chunk's size is given."""
    head = b"HTTP/1.1 " + status + b"\r\nServer: test\r\nContent-Type: " + kind + b"\r\n"
    if not chunk_bytes:
        return head + b"Content-Length: %d\r\n\r\n" % len(body) + body
    chunks = (body[place:place + chunk_bytes] for place in range(0, len(body), chunk_bytes))
    return head + b"Transfer-Encoding: chunked\r\n\r\n" + b"".join(b"%x\r\n%s\r\n" % (len(chunk), chunk) for chunk in chunks) + b"0\r\n\r\n"


def run_files() -> Tuple[bytes, bytes]:
    """A small run file and its notebook, as the program writes them."""
    with Bench() as bench, FakeServer() as base, FakeServer(speculation=Speculation()) as other:
        done = bench.measure(base.url, other.url, "--warmup", "0", "--max-tokens", "8", prompts=["one", "two"])
        with open(done.run_file, "rb") as run_file, open(done.notebook, "rb") as notebook:
            return run_file.read(), notebook.read()


# ======================================================================================================================
# 3. The readers, each a function of one input (or of a file of many)
# ======================================================================================================================


def exchange_of(data: bytes, cuts: Sequence[int] = (), error: Any = None) -> m.Exchange:
    """Bytes as they arrived: cut at these places, a thousandth of a second apart."""
    ends = array("Q", [*sorted({cut for cut in cuts if 0 < cut < len(data)}), len(data)] if data else [])
    return m.Exchange(0.0, None, 0.0, 1.0, bytearray(data), ends, array("d", [0.001 * (place + 1) for place in range(len(ends))]), error)


def check_reply(reply: m.Reply, chance: random.Random) -> None:
    """What is done to every reply must be possible with this one."""
    assert reply.error is None or isinstance(reply.error, str) and len(reply.error) < 1500, reply.error
    if chance.random() < 0.8:       # the rest takes most of the time
        return
    line = m.json_line(m.reply_record("s", "w", 1, "timed", reply))
    back = m.reply_from_json(json.loads(line)["reply"])
    assert (back.content, back.reasoning, back.tool_calls, back.error) == (reply.content, reply.reasoning, reply.tool_calls, reply.error)
    m.json_line(m.as_json(m.without_texts(reply)))


def read_http(data: bytes, chance: random.Random) -> None:
    """A whole response: followed piece by piece as a connection does, then read."""
    cuts = sorted(chance.randrange(len(data) + 1) for _ in range(3))
    framing, so_far, ended = m.Framing(), bytearray(), False
    for start, end in zip([0, *cuts], [*cuts, len(data)]):
        so_far += data[start:end]
        ended = ended or framing.complete(so_far)
        if ended or framing.broken:
            break
    whole = m.Framing()
    assert whole.complete(bytearray(data[:len(so_far)])) == ended or framing.broken or whole.broken
    assert not ended or 0 < framing.end <= len(so_far)
    check_reply(m.read_reply(exchange_of(bytes(so_far), cuts), "p"), chance)


def read_stream(data: bytes, chance: random.Random) -> None:
    """A stream's body."""
    events = m.split_events(data)
    assert all(0 <= event.end <= len(data) for event in events)
    check_reply(m.read_reply(exchange_of(framed(data), [chance.randrange(len(data) + 200)]), "p"), chance)


def read_answer(data: bytes, chance: random.Random) -> None:
    """An answer in one piece, a refusal, an identity page."""
    check_reply(m.read_reply(exchange_of(framed(data, kind=b"application/json", status=chance.choice((b"200 OK", b"200 OK", b"400 Bad")))), "p"), chance)
    if chance.random() < 0.7:
        return
    response = m.Response(200, {}, data, (), (), None)
    value = m.json_of(response)
    models = m._listed_models(value)
    for engine, tell in m._TELLERS.items():
        told = tell(m._dict(value), {path.split("?")[0]: value for path in m._IDENTITY_PATHS[engine]}, m.no_page("none"))
        m.json_line(m.as_json({"told": told, "models": [model["id"] for model in models]}))


def page_reader(zero: m.MetricsPage) -> Callable[[bytes, random.Random], None]:
    def read_page(data: bytes, chance: random.Random) -> None:
        page = m.parse_metrics(data)
        for before, after in chance.choice((((zero, page),), ((page, page),), ())):
            counted = m.acceptance_from_counters(before, after, "smol", 2, chance.choice((None, 10)))
            m.json_line({"a": m.as_json(counted), "b": m.acceptance_record(counted), "c": m.speculation_delta(before, after)})
            m.prefix_hit_rate(before, after, "smol")
        m.kv_cache_tokens(page)
        m.server_gauges(page)
    return read_page


def read_prompts(data: bytes, chance: random.Random) -> None:
    """A prompt file: prompts, or a MeasureError."""
    try:
        read = m.parse_prompts(data, "prompts.jsonl", "file", chance.choice((None, None, "text")))
    except m.MeasureError as error:
        assert len(error.sentence) < 2000
        return
    assert len({prompt.id for prompt in read.prompts}) == len(read.prompts)
    server = m.Server("baseline", "", "", (), "model", chance.choice(("vllm", "llama.cpp", "unknown")))
    origin = m.Origin("http", "localhost", 80)
    for prompt in read.prompts[:5]:
        m.request_bytes(origin, "/", m.request_body(server, prompt, m.Asking(), {}, prompt.id))
        m.json_line(m.as_json(prompt))


def read_address(data: bytes, chance: random.Random) -> None:
    """An address, as a base and as a redirect's target: understood, or a MeasureError that shows no credentials."""
    text = data.decode("utf-8", "surrogateescape")
    try:
        base = m.parse_base_url(text)
        assert b"\n" not in m.request_bytes(base.origin, base.base_path).split(b"\r\n")[0]
        assert base.origin.url("/").isascii() and base.origin.host
        assert isinstance(base.origin.secrets, tuple)
    except m.MeasureError as error:
        assert "hunter2" not in error.sentence + error.hint or "@" not in text.rpartition("hunter2")[2]
    try:
        m.redirect_path(m.Origin("http", "host", 80), m.Response(307, {"location": data.decode("latin-1")}, b"", (), (), None))
    except m.MeasureError:
        pass


def read_files(lines: Sequence[bytes], chance: random.Random, folder: str) -> None:
    """Many lines as a run file and as a notebook."""
    path = os.path.join(folder, "lines")
    with open(path, "wb") as file:
        file.write(b"".join(lines))
    try:
        runs, _ = m.read_runs(path)
    except m.MeasureError:
        runs = []
    for run in runs:
        records = [m.endpoint_record(run, one) for one in run.passes]
        m.json_line({"records": records})
        if m.BASELINE in run.servers and chance.random() < 0.3:
            m.json_line({"records": [m.comparison_record(run, cell) for cell in m.compare_run(run)]})
    for record in m.read_notebook(path)[0]:
        m.schema_problems(record)


Target = Tuple[List[bytes], Callable[..., bytes], Callable[[bytes, random.Random], None]]


def targets(folder: str) -> Dict[str, Target]:
    """By name: the seeds, the mutation, the reader. The reader of lines takes a file of them."""
    short = [short_stream(body) for body in streams()]
    whole = answers()
    responses = [framed(body, size) for body in short for size in (0, 333)] + [framed(body, kind=b"application/json") for body in whole]
    responses += files("cases/*.http", "captures/*/*.headers.txt")
    prompts = [data[:1500].rpartition(b"\n")[0] or data[:1500] for data in files("prompts/*", "../../prompts/*.jsonl")]
    prompts += [b'prompt,answer\n"one, two",3\nthree,4\n', b"one\ntwo\n", b'[{"prompt": "a"}, {"messages": [{"role": "user", "content": "b"}]}]',
                b'{"data": [{"question": [[{"role": "user", "content": "x"}]], "function": [{"name": "f", "parameters": {"type": "dict", "properties": {}}}]}]}',
                b'{"conversations": [{"from": "human", "value": "x"}, {"from": "gpt", "value": "y"}], "tools": "[]"}']
    urls = [b"http://127.0.0.1:8080/v1", b"https://user:hunter2@host.example:8443/a/b/v1/chat/completions", b"[::1]:80", b"http://[fe80::1%25eth0]:80/v1/",
            "http://müller.example/v1".encode(), b"host", b"/v1/chat/completions", b"//host/x", b"http://host/v1?key=hunter2#f"]
    run_file, notebook = run_files()
    lines = [line + b"\n" for line in (run_file + notebook).split(b"\n") if line]
    zero = m.parse_metrics(b'vllm:spec_decode_num_drafts_total{model_name="smol"} 0\nllamacpp:tokens_predicted_total 0\n')
    return {
        "http": (responses, mutated, read_http), "sse": (short, mutated, read_stream), "reply": (whole, json_mutated, read_answer),
        "metrics": (pages(), mutated, page_reader(zero)), "prompts": (prompts, json_mutated, read_prompts),
        "files": (lines, json_mutated, lambda data, chance: read_files([data], chance, folder)), "url": (urls, mutated, read_address)}


def run_target(name: str, target: Target, inputs: int, chance: random.Random, folder: str, slow_s: float,
               found: Callable[[str, bytes, BaseException], None]) -> None:
    """That many mutated inputs through one reader; what goes wrong is handed over."""
    seeds, mutate, read = target
    if name == "files":
        for start in range(0, inputs, 60):
            begun = chance.randrange(len(seeds))
            batch = [(mutate(seed, seeds, chance).replace(b"\n", b" ") + b"\n") if chance.random() < 0.9 else seed
                     for seed in (seeds[(begun + place) % len(seeds)] for place in range(min(60, inputs - start)))]
            tried(name, b"".join(batch), lambda: read_files(batch, chance, folder), slow_s * 10, found, time.process_time)
        return
    for _ in range(inputs):
        data = mutate(chance.choice(seeds), seeds, chance)
        tried(name, data, lambda: read(data, chance), slow_s, found, time.process_time)


def tried(name: str, data: bytes, work: Callable[[], None], slow_s: float, found: Callable[[str, bytes, BaseException], None],
          clock: Callable[[], float]) -> None:
    began = clock()
    try:
        work()
    except Exception as error:      # whatever it is: that is what is looked for
        found(name, data, error)
    took = clock() - began
    if took > slow_s:
        found(name, data, TimeoutError(f"{took:.2f} s for {len(data)} bytes"))
