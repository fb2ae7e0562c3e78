"""The fake server is what the script says: healthy like its engine, broken as planned, and gone when it is over."""
from __future__ import annotations

import ast
import http.client
import json
import os
import re
import socket
import ssl
import threading
import time
import unittest
import zlib
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Dict, List, Mapping, Optional, Tuple

from tests import fakes
from tests.fakes import CASES, CHAT_FAULTS, EITHER, ENGINES, FAULTS, SILENT, WHOLE, FakeServer, Say, Speculation, replay

QUESTION: Dict[str, Any] = {"model": "fake-model", "messages": [{"role": "user", "content": "Tell me three words."}],
                            "stream_options": {"include_usage": True}, "return_spec_tokens_details": True}
SMALL = {"huge_body": 3 << 20, "huge_line": 3 << 20, "gzip_bomb": 3 << 20, "metrics_huge": 3 << 20, "huge_head": 5000}

Got = Tuple[int, Dict[str, str], bytes]


def fetch(server: FakeServer, path: str, body: Optional[Mapping[str, Any]] = None, timeout: float = 10.0,
          headers: Mapping[str, str] = {}) -> Got:
    """One request on a connection of its own: status, headers (names in lower case), body."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=timeout)
    try:
        connection.request("POST" if body else "GET", path, json.dumps(body) if body else None, dict(headers))
        response = connection.getresponse()
        return response.status, {k.lower(): v for k, v in response.getheaders()}, response.read()
    finally:
        connection.close()


def chat(server: FakeServer, stream: bool = True, timeout: float = 10.0, **more: Any) -> Got:
    return fetch(server, "/v1/chat/completions", {**QUESTION, "stream": stream, **more}, timeout)


def objects(body: bytes) -> List[Dict[str, Any]]:
    """The JSON objects of a stream."""
    return [json.loads(block[6:]) for block in body.split(b"\n\n") if block.startswith(b"data: {")]


def text_of(body: bytes, key: str = "content") -> str:
    """The text of a stream's, or a whole answer's, channel."""
    found = objects(body) or [json.loads(body)]
    choices = [choice for value in found for choice in value["choices"]]
    return "".join((choice.get("delta") or choice.get("message") or {}).get(key) or "" for choice in choices)


def unpacked(got: Got) -> bytes:
    if got[1].get("content-encoding") == "gzip":
        return zlib.decompressobj(wbits=31).decompress(got[2])
    return got[2]


def samples(page: bytes) -> Dict[str, float]:
    """Series without their labels, summed."""
    found: Dict[str, float] = {}
    for name, value in re.findall(rb"(?m)^([a-zA-Z_:]+)(?:\{.*\})? (\S+)$", page):
        found[name.decode()] = found.get(name.decode(), 0.0) + float(value)
    return found


class TestTheTable(unittest.TestCase):
    def test_the_manual_names_every_fault_and_no_other(self):
        listed = re.findall(r"(?m)^  ([a-z]\w+) {2,}\S", fakes.__doc__)
        self.assertEqual(sorted(listed), sorted(FAULTS))

    def test_marks(self):
        self.assertIn("gzip", WHOLE)
        self.assertIn("wrong_type", EITHER)
        self.assertFalse(WHOLE & EITHER)
        self.assertLessEqual(SILENT, set(FAULTS))

    def test_it_is_python_3_9(self):
        with open(fakes.__file__, encoding="utf-8") as file:
            ast.parse(file.read(), feature_version=(3, 9))


class TestHealthy(unittest.TestCase):
    def test_stream_and_whole_answer_say_the_same(self):
        texts = set()
        for engine in ENGINES:
            with self.subTest(engine), FakeServer(engine, speculation=Speculation()) as server:
                streamed, whole = chat(server), chat(server, stream=False)
                texts |= {text_of(streamed[2]), text_of(whole[2])}
                self.assertTrue(streamed[2].endswith(b"data: [DONE]\n\n"))
                self.assertEqual(objects(streamed[2])[-1]["usage"], json.loads(whole[2])["usage"])
        self.assertEqual(len(texts), 1)     # the same question: the same words from all

    def test_usage_counts_the_words(self):
        with FakeServer("vllm", answer=lambda messages, body: "one two three") as server:
            usage = objects(chat(server)[2])[-1]["usage"]
        self.assertEqual(usage, {"prompt_tokens": 4, "completion_tokens": 3, "total_tokens": 7})

    def test_max_tokens_cuts(self):
        with FakeServer("sglang", answer=lambda messages, body: "one two three") as server:
            choice = json.loads(chat(server, stream=False, max_tokens=2)[2])["choices"][0]
        self.assertEqual((choice["message"]["content"], choice["finish_reason"]), ("one two", "length"))

    def test_steps_add_up(self):
        # 12 tokens: 1 of the prompt's pass; then 2+1, 0+1, 4+1 and, of 3 possible, 1+1 that are left
        self.assertEqual(fakes.verify_steps(12, (2, 0, 4, 3), 4), (2, 0, 4, 1))
        # a pass without a draft, and an acceptance that cannot be above k
        self.assertEqual(fakes.verify_steps(8, (None, 9), 2), (None, 2, None, 1))

    def test_engines_tell_their_counts(self):
        spec = Speculation(k=4, accepts=(2, 0, 4, 3))       # as above: 4 drafts, 16 drafted, 7 accepted
        say = lambda messages, body: "a b c d e f g h i j k l"      # noqa: E731
        with FakeServer("llama.cpp", answer=say, speculation=spec) as server:
            timings = objects(chat(server)[2])[-1]["timings"]
        self.assertEqual((timings["predicted_n"], timings["draft_n"], timings["draft_n_accepted"]), (12, 16, 7))
        with FakeServer("vllm", answer=say, speculation=spec) as server:
            counts = objects(chat(server)[2])[-1]["metrics"]["speculative_decoding"]
        self.assertEqual((counts["num_spec_steps"], counts["acceptance_histogram"]), (4, [1, 1, 1, 0, 1]))
        with FakeServer("sglang", answer=say, speculation=spec) as server:
            counts = objects(chat(server)[2])[-2]["sglext"]["spec_tokens_details"]
        self.assertEqual((counts["spec_verify_ct"], counts["spec_num_correct_drafts"]), (4, 7))

    def test_counters_move_with_the_answers(self):
        names = {"llama.cpp": ("llamacpp:tokens_predicted_total", "llamacpp:spec_decode_num_accepted_tokens_total"),
                 "vllm": ("vllm:generation_tokens_total", "vllm:spec_decode_num_accepted_tokens_total"),
                 "sglang": ("sglang:generation_tokens_total", "sglang:spec_verify_calls_total")}
        for engine, (tokens, moved) in names.items():
            with self.subTest(engine), FakeServer(engine, speculation=Speculation()) as server:
                chat(server)
                before = samples(fetch(server, "/metrics")[2])
                chat(server, stream=False)
                after = samples(fetch(server, "/metrics")[2])
                made = server.chats[1].generation
                self.assertEqual(after[tokens] - before[tokens], made.completion_tokens)
                expected = len(made.steps) if engine == "sglang" else made.accepted_tokens
                self.assertEqual(after[moved] - before[moved], expected)

    def test_without_speculation(self):
        with FakeServer("vllm") as server:
            chat(server)
            self.assertNotIn(b"spec_decode", fetch(server, "/metrics")[2])
        with FakeServer("llama.cpp") as server:
            self.assertNotIn("draft_n", objects(chat(server)[2])[-1]["timings"])
            self.assertEqual(samples(fetch(server, "/metrics")[2])["llamacpp:spec_decode_num_drafts_total"], 0)

    def test_who_are_you(self):
        pages = {"llama.cpp": ("/props", "/slots", "/health"), "vllm": ("/version", "/health"),
                 "sglang": ("/server_info", "/model_info", "/health"), "plain": ()}
        for engine, paths in pages.items():
            with self.subTest(engine), FakeServer(engine) as server:
                owner = json.loads(fetch(server, "/v1/models")[2])["data"][0]["owned_by"]
                self.assertEqual(owner, fakes.OWNER[engine])
                self.assertEqual([fetch(server, path)[0] for path in paths], [200] * len(paths))
                self.assertEqual(fetch(server, "/nowhere")[0], 404)

    def test_all_channels(self):
        said = Say("Well.", reasoning="Let me think.", tool_calls=(("look", '{"at": "it"}'),))
        for engine in ENGINES:
            with self.subTest(engine), FakeServer(engine, answer=lambda messages, body: said) as server:
                body = chat(server)[2]
                self.assertEqual(text_of(body), "Well.")
                self.assertEqual(text_of(body, fakes.REASONING_KEY[engine]), "Let me think.")
                message = json.loads(chat(server, stream=False)[2])["choices"][0]["message"]
                self.assertEqual(message["tool_calls"][0]["function"], {"name": "look", "arguments": '{"at": "it"}'})
                pieces = [call["function"]["arguments"] for value in objects(body) for choice in value["choices"]
                          for call in choice["delta"].get("tool_calls", ())]
                self.assertEqual("".join(pieces), '{"at": "it"}')

    def test_logprobs(self):
        with FakeServer("vllm", answer=lambda messages, body: "one two") as server:
            content = json.loads(chat(server, stream=False, logprobs=True)[2])["choices"][0]["logprobs"]["content"]
        self.assertEqual([entry["token"] for entry in content], ["one", " two"])

    def test_refusals_of_the_healthy(self):
        with FakeServer("vllm", key="k", refuses=("cache_prompt",), mount="/llm") as server:
            key = {"Authorization": "Bearer k"}
            path = "/llm/v1/chat/completions"
            self.assertEqual(fetch(server, path, QUESTION)[0], 401)
            self.assertEqual(fetch(server, path, QUESTION, headers=key)[0], 200)
            self.assertEqual(fetch(server, path, {**QUESTION, "model": "nope"}, headers=key)[0], 404)
            refused = fetch(server, path, {**QUESTION, "cache_prompt": False}, headers=key)
            self.assertEqual((refused[0], json.loads(refused[2])["error"]["param"]), (400, "cache_prompt"))
            self.assertEqual(fetch(server, "/v1/models", headers=key)[0], 404)


class TestScripts(unittest.TestCase):
    def statuses(self, server: FakeServer, count: int) -> List[int]:
        return [chat(server)[0] for _ in range(count)]

    def test_steps_in_order_of_arrival(self):
        with FakeServer(faults={"chat": ["ok", "status_429", ("status_503", {"retry_after": 9})]}) as server:
            self.assertEqual(self.statuses(server, 4), [200, 429, 503, 200])
            self.assertEqual([request.step for request in server.chats], ["ok", "status_429", "status_503", "ok"])

    def test_predicate_path_and_newest_first(self):
        with FakeServer(faults={"*": "status_500"}) as server:
            server.script("/metrics", then="metrics_absent")
            server.script(lambda request: request.streamed, ["loading", "loading"])
            self.assertEqual(self.statuses(server, 3), [503, 503, 200])
            self.assertEqual(fetch(server, "/metrics")[0], 404)
            self.assertEqual(chat(server, stream=False)[0], 500)

    def test_until_the_parameter_is_left_out(self):
        with FakeServer() as server:
            server.script("chat", then=("parameter_refused", {"name": "seed"}))
            self.assertEqual([chat(server, seed=1)[0], chat(server)[0]], [400, 200])

    def test_the_log(self):
        with FakeServer() as server:
            begun = time.perf_counter()
            connection = http.client.HTTPConnection("127.0.0.1", server.port)
            for number in (1, 2):
                connection.request("POST", "/v1/chat/completions?x=1", json.dumps(QUESTION), {"X-Number": str(number)})
                connection.getresponse().read()
            connection.close()
            fetch(server, "/props")
            self.assertEqual([(r.order, r.kind, r.connection) for r in server.requests],
                             [(0, "chat", 1), (1, "chat", 1), (2, "props", 2)])
            first = server.requests[0]
            self.assertEqual((first.method, first.path), ("POST", "/v1/chat/completions"))
            self.assertEqual(first.header("x-number"), "1")
            self.assertEqual(first.body, QUESTION)
            self.assertLess(begun, first.at)

    def test_a_mistake_in_a_test_is_not_lost(self):
        def mistake(messages: Any, body: Any) -> str:
            raise KeyError("no such prompt")
        with self.assertRaises(KeyError):
            with FakeServer(answer=mistake) as server:
                with self.assertRaises(http.client.RemoteDisconnected):
                    chat(server)


class TestFaults(unittest.TestCase):
    def test_every_fault_by_name(self):
        """Whole answers stay whole; everything else can be seen to be wrong; nothing outlives the server."""
        with FakeServer("vllm") as server:
            for name in CHAT_FAULTS:
                for stream in (True, False):
                    with self.subTest(name, stream=stream):
                        self.check(server, name, stream)

    def check(self, server: FakeServer, name: str, stream: bool) -> None:
        options = {"size": SMALL[name]} if name in SMALL else {"seconds": 0.05} if name.startswith("endless") else {}
        server.script(lambda request: request.body.get("user") == name, then=(name, options))
        text = None
        try:
            got = chat(server, stream, timeout=0.05 if name in SILENT else 5.0, user=name)
            text = unpacked(got)
        except (OSError, http.client.HTTPException, zlib.error):
            pass
        server.listen_again()
        expected = chat(server, stream)
        if name in WHOLE:
            self.assertEqual(text_of(text or b"null"), text_of(expected[2]))
        elif name not in EITHER and text is not None:
            self.assertNotEqual((got[0], text), (200, expected[2]))

    def test_the_others_are_untouched(self):
        hurt = ("reset_mid_chunk", "cut_chunk", "close_mid_head", "status_429")
        with FakeServer(faults={"chat": ["ok", *hurt] * 8}) as server, ThreadPoolExecutor(16) as pool:
            for future in [pool.submit(self.attempt, server) for _ in range(40)]:
                future.result()
            whole = [request for request in server.chats if request.generation]
            self.assertEqual([request.step for request in whole], ["ok"] * 8)
            self.assertEqual(server.counters.requests, 8)
            self.assertGreater(server.most_in_flight, 1)

    def attempt(self, server: FakeServer) -> None:
        try:
            chat(server)
        except (OSError, http.client.HTTPException):
            pass

    def test_reset_is_a_reset(self):
        with FakeServer(faults={"chat": ["reset_before_head"]}) as server:
            with self.assertRaises(ConnectionResetError):
                chat(server)

    def test_refused_until_it_listens_again(self):
        with FakeServer() as server:
            server.stop_listening()
            with self.assertRaises(ConnectionRefusedError):
                chat(server)
            server.listen_again()
            self.assertEqual(chat(server)[0], 200)

    def test_hang_at_connect(self):
        with FakeServer(faults={"connect": ["hang"]}) as server:
            with self.assertRaises(socket.timeout):
                chat(server, timeout=0.05)
            self.assertEqual(chat(server)[0], 200)
            self.assertEqual(len(server.requests), 1)

    def test_who_left(self):
        with FakeServer(faults={"chat": ["stall"]}) as server:
            with self.assertRaises(OSError):
                chat(server, timeout=0.05)
            chat(server)
            self.assertTrue(all(request.over.wait(5) for request in server.chats))
        self.assertEqual([request.client_left for request in server.chats], [True, False])

    def test_keep_alive_that_ends(self):
        with FakeServer(requests_per_connection=2) as server:
            connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=5)
            for _ in range(2):
                connection.request("GET", "/props")
                response = connection.getresponse()
                response.read()
                self.assertNotIn("Connection", response.headers)
            self.assertEqual(connection.sock.recv(1), b"")
            connection.close()

    def test_redirects(self):
        with FakeServer(faults={"chat": "redirect"}) as server:
            status, headers, _ = chat(server)
            self.assertEqual((status, headers["location"]), (307, server.root + "/moved/v1/chat/completions"))
            self.assertEqual(fetch(server, "/moved/v1/chat/completions", QUESTION)[0], 200)


class TestMetrics(unittest.TestCase):
    def scrape(self, server: FakeServer) -> bytes:
        return fetch(server, "/metrics")[2]

    def test_restart_falls_and_starts_anew(self):
        with FakeServer("vllm", faults={"metrics": ["ok", "metrics_restart", "metrics_restart_hidden"]}) as server:
            chat(server)
            pages = [samples(self.scrape(server)) for _ in range(3)]
        self.assertGreater(pages[0]["vllm:generation_tokens_total"], 0)
        self.assertEqual(pages[1]["vllm:generation_tokens_total"], 0)
        starts = [page["process_start_time_seconds"] for page in pages]
        self.assertEqual([starts[1] - starts[0], starts[2] - starts[1]], [1000, 1000])

    def test_other_formats(self):
        steps = ["metrics_json_string", "metrics_openmetrics", "html_200", ("metrics_huge", {"size": 1 << 20})]
        with FakeServer("vllm", faults={"metrics": steps}) as server:
            self.assertIn("vllm:generation_tokens_total", json.loads(self.scrape(server)))
            page = self.scrape(server)
            self.assertIn(b"# TYPE vllm:generation_tokens counter", page)
            self.assertTrue(page.endswith(b"# EOF\n"))
            self.assertIn(b"<html>", self.scrape(server))
            self.assertGreater(len(self.scrape(server)), 1 << 20)

    def test_every_fault_has_an_answer_for_every_engine(self):
        for engine in ENGINES:
            with FakeServer(engine) as server:
                for name in fakes.METRICS_FAULTS:
                    with self.subTest(name, engine=engine):
                        server.script("metrics", [(name, {"size": SMALL[name]} if name in SMALL else {})])
                        self.assertIn(fetch(server, "/metrics")[0], (200, 404, 501))

    def test_pages_from_files(self):
        names = ["02-data-parallel.before.prom", "02-data-parallel.after.prom"]
        expected = [fakes.page_bytes(name) for name in names]
        with FakeServer("vllm", metrics_pages=names) as server:
            self.assertEqual([self.scrape(server) for _ in range(3)], expected + expected[1:])
        with FakeServer("vllm", metrics_pages=names, pages_turn=2) as server:
            seen = []
            for _ in range(3):
                seen.append(self.scrape(server))
                chat(server)
        self.assertEqual(seen, [expected[0], expected[0], expected[1]])

    def test_switched_off(self):
        expected = {"llama.cpp": 501, "vllm": 404, "sglang": 404, "plain": 404}
        for engine, status in expected.items():
            with self.subTest(engine), FakeServer(engine, metrics=False) as server:
                self.assertEqual(fetch(server, "/metrics")[0], status)

    def test_somebody_else(self):
        with FakeServer("vllm") as server:
            server.strangers_generate(500)
            self.assertEqual(samples(self.scrape(server))["vllm:generation_tokens_total"], 500)


class TestReplays(unittest.TestCase):
    def test_sse_byte_for_byte(self):
        with open(os.path.join(CASES, "13a-framing.sse"), "rb") as file:
            expected = file.read()
        for size in (None, 1, 7):
            with self.subTest(size), FakeServer(faults={"chat": [replay("13a-framing.sse", size)]}) as server:
                self.assertEqual(chat(server)[2], expected)

    def test_raw_response(self):
        with FakeServer(faults={"chat": [replay("24b-429.http")]}) as server:
            status, headers, body = chat(server)
        self.assertEqual((status, headers["retry-after"], json.loads(body)["error"]["code"]), (429, "2", 429))

    def test_times_are_kept(self):
        with FakeServer(faults={"chat": [replay("12b-split-utf8.timed.jsonl")]}) as server:
            self.assertEqual(text_of(chat(server)[2].replace(b"data: [DONE]\n\n", b"")),
                             json.loads(fakes.page_bytes("12b-split-utf8.expected.json"))["text"])
            request = server.chats[0]
        due = (0.1, 0.12, 0.14, 0.16, 0.18)
        self.assertEqual(fakes.timed_answer(fakes.page_bytes("12b-split-utf8.timed.jsonl")).at_s, due)
        for due_s, sent_at in zip(due, request.sent_at):        # a busy machine may be late, never early
            self.assertGreaterEqual(sent_at - request.at, due_s)

    def test_a_pace_of_its_own(self):
        with FakeServer("vllm", first_s=0.02, gap_s=0.01, answer=lambda m, b: "one two three") as server:
            chat(server)
            request = server.chats[0]
        due = (0.02, 0.02, 0.03, 0.04, 0.04, 0.04)      # role, three passes, usage, [DONE]
        self.assertEqual(len(request.sent_at), len(due))
        for due_s, sent_at in zip(due, request.sent_at):
            self.assertGreaterEqual(sent_at - request.at, due_s)


class TestLife(unittest.TestCase):
    def test_tls(self):
        context = ssl.create_default_context(cafile=fakes.CERT)
        context.verify_flags |= ssl.VERIFY_X509_STRICT      # the default from Python 3.13 on
        with FakeServer(tls=True) as server:
            self.assertTrue(server.url.startswith("https://127.0.0.1:"))
            connection = http.client.HTTPSConnection("localhost", server.port, timeout=5, context=context)
            connection.request("POST", "/v1/chat/completions", json.dumps(QUESTION))
            self.assertEqual(connection.getresponse().status, 200)
            connection.close()
            with self.assertRaises((OSError, http.client.HTTPException)):
                chat(server)                                # plain where TLS is spoken
        with FakeServer() as server:
            with self.assertRaises(ssl.SSLError):           # TLS where plain is spoken
                with socket.create_connection(("127.0.0.1", server.port), 5) as plain:
                    context.wrap_socket(plain, server_hostname="localhost")
            self.assertTrue(server.strangers)

    def test_nothing_is_left(self):
        before = threading.active_count()
        with FakeServer(faults={"chat": "hang"}) as server:
            idle = socket.create_connection(("127.0.0.1", server.port))
            with self.assertRaises(OSError):
                chat(server, timeout=0.02)
            begun = time.perf_counter()
        self.assertLess(time.perf_counter() - begun, 1.0)
        self.assertEqual(threading.active_count(), before)
        idle.close()
        with self.assertRaises(OSError):
            socket.create_connection(("127.0.0.1", server.port), 1).close()


if __name__ == "__main__":
    unittest.main()
