"""Whatever a server does, the run ends by itself, says what happened, and the other requests count as if nothing had.

The table below says for every fault of tests/fakes.py what becomes of the request; tests/FAULTS.md is this table with the
words of the fake's manual beside it. `python3 -m tests.test_faults` writes it anew.
"""
from __future__ import annotations

import contextlib
import os
import re
import time
import unittest
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Sequence
from unittest import mock

from tests import fakes
from tests.drive import Bench, Done, m
from tests.fakes import CHAT_FAULTS, EITHER, METRICS_FAULTS, MB, SILENT, WHOLE, FakeServer, Speculation, edited

TABLE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "FAULTS.md")


# ======================================================================================================================
# 1. The table: what becomes of a request
# ======================================================================================================================

TIMEOUT, MIDDLE, RESET = "no whole answer within", "closed the connection in the middle of the answer", "broke: reset by the server"
CLOSED, TOO_LARGE, NO_JSON = "closed the connection without an answer", "the reply is larger than", "an event is no JSON"
NO_WHOLE_JSON, BOOM, HEAD = "the body is no whole JSON", "the server reported: boom: the engine has failed", "head is larger than 64 KiB"
EMPTY, NO_CHOICES, CUT = "the stream was empty", "the answer has no choices", "without finish_reason (its last event is cut off)"
REDIRECT = "(it redirects to http://127.0.0.1:"


class Fate(NamedTuple):
    """What a fault does to its own request, streamed and in one piece: the error, or None where the answer counts."""

    streamed: Optional[str] = None
    whole: Optional[str] = None
    caveat: str = ""        # what is said although the answer counts


def fails(error: str, whole: str = "") -> Fate:
    return Fate(error, whole or error)


FATES: Dict[str, Fate] = {
    "ok": Fate(), "refuse": fails(RESET), "hang": fails(TIMEOUT), "stall": fails(TIMEOUT), "stall_head": fails(TIMEOUT),
    "drip": Fate(), "reset_before_head": fails(RESET), "reset_mid_head": fails(RESET), "reset_after_head": fails(RESET),
    "reset_mid_chunk": fails(RESET), "close_before_head": fails(CLOSED), "close_mid_head": fails(MIDDLE),
    "length_long": fails(MIDDLE), "length_short": fails(CUT, NO_WHOLE_JSON), "cut_chunk": fails(MIDDLE),
    "bad_chunk_size": fails("a chunk's size is no number"), "no_last_chunk": fails(MIDDLE), "endless": fails(TOO_LARGE),
    "endless_comments": fails(TIMEOUT), "huge_body": fails(TOO_LARGE), "huge_line": fails(TOO_LARGE), "huge_head": fails(HEAD),
    "endless_head": fails(HEAD), "garbage": fails("the answer is not HTTP"), "interim_100": Fate(), "close_delimited": Fate(),
    "connection_close": Fate(), "close_after": Fate(), "gzip": Fate(), "gzip_broken": fails("the gzip body is damaged"),
    "gzip_bomb": fails("the body is larger than"), "wrong_type": Fate(), "html_200": fails("an HTML page instead of JSON"),
    "json_for_stream": Fate(), "truncated_json": fails(NO_JSON, NO_WHOLE_JSON), "two_objects": fails(NO_JSON, NO_WHOLE_JSON),
    "nul_bytes": fails(NO_JSON, NO_WHOLE_JSON), "invalid_utf8": Fate(caveat="no UTF-8"), "error_object": fails(BOOM),
    "error_object_done": fails(BOOM), "error_string": fails(BOOM), "error_string_done": fails(BOOM),
    "error_event": fails(BOOM, NO_CHOICES + ": boom"), "error_event_done": fails(BOOM, NO_CHOICES + ": boom"),
    "error_first": fails(BOOM), "empty_stream": fails(EMPTY, "an empty body"), "only_done": fails(EMPTY, NO_CHOICES),
    "no_finish": Fate("the stream ended without finish_reason"), "no_done": Fate(), "cut_off": fails(CUT, NO_WHOLE_JSON),
    "usage_absent": Fate(caveat="did not count its tokens"), "usage_null": Fate(caveat="did not count its tokens"),
    "usage_wrong": Fate(caveat="usage disagrees"), "status_400": fails("HTTP 400: this request cannot be served"),
    "parameter_refused": fails("HTTP 400: Unsupported parameter: seed"), "status_401": fails("HTTP 401: Invalid API Key"),
    "status_404_html": fails("HTTP 404: an HTML page instead of JSON"), "status_429": fails("HTTP 429: slow down (Retry-After: 2)"),
    "status_500": fails("HTTP 500: Internal Server Error"),
    "status_503": fails("HTTP 503: The request queue is full. (Retry-After: 2)"), "loading": fails("HTTP 503: Loading model"),
    "redirect": fails("HTTP 307 " + REDIRECT), "redirect_308": fails("HTTP 308 " + REDIRECT),
    "redirect_other": fails("HTTP 307 (it redirects to http://elsewhere.invalid/"), "redirect_loop": fails("HTTP 307 " + REDIRECT),
}

# What a fault of the page after a pass does to acceptance that rests on counters: the reason; None where it is measured.
METRICS_FATES: Dict[str, Optional[str]] = {
    "metrics_restart": "the server restarted during the run", "metrics_restart_hidden": "the server restarted during the run",
    "metrics_json_string": None, "metrics_openmetrics": None, "metrics_huge": "the metrics page is larger than",
    "metrics_binary": "not in Prometheus' text format", "metrics_empty": "the metrics page is empty",
    "metrics_absent": "there is no metrics page (HTTP 404)", "metrics_off": "there is no metrics page (HTTP 501)",
    "hang": "the metrics page cannot be read (no whole answer within", "reset_mid_chunk": "cannot be read (the connection broke",
    "length_long": "cannot be read (the server closed", "garbage": "cannot be read (the answer is not HTTP)", "gzip": None,
    "html_200": "not in Prometheus' text format", "redirect_other": "there is no metrics page (HTTP 307)",
}
SIZES = {"huge_body": 2 * MB, "huge_line": 2 * MB, "gzip_bomb": 3 * MB, "metrics_huge": MB // 2}


def step(name: str) -> Any:
    """A fault as a step of a script, small enough for a quick test."""
    return (name, {"size": SIZES[name]}) if name in SIZES else name


def table_text() -> str:
    """tests/FAULTS.md."""
    told = dict(re.findall(r"(?m)^  (\w+) +(?:whole |either)? +(\S.*)$", fakes.__doc__ or ""))
    lines = [
        "# What becomes of a request that a server spoils", "",
        "Made by `python3 -m tests.test_faults`, held to by `tests/test_faults.py`. In every case the run ends by itself,",
        "the other requests are untouched, rates, counters and comparisons leave the failed request out, and the fault is named",
        "in the run file, in the record (`first_error`, `caveats`) and on the screen. Exit code 1 where a request failed, else 0.", "",
        "## An answer to a prompt", "", "| fault | what the server does | streamed | in one piece |", "|:---|:---|:---|:---|"]
    for name in CHAT_FAULTS:
        fate = FATES[name]
        cells = [f"fails: {error}" if error else "counts" + (f"; said: {fate.caveat}" if fate.caveat else "")
                 for error in (fate.streamed, fate.whole)]
        lines.append(f"| `{name}` | {told.get(name, 'the healthy answer')} | {cells[0]} | {cells[1]} |")
    lines += ["", "`invalid_utf8`, `no_finish` and `wrong_type` are judgements: bytes that are no UTF-8 are kept escaped and said; an",
              "answer in one piece is whole by its framing, also without a finish_reason; a stream is told by its look.", "",
              "## The page of metrics after a pass", "", "| fault | acceptance from counters |", "|:---|:---|"]
    lines += [f"| `{name}` | {'not measured: ' + reason if reason else 'measured'} |" for name, reason in METRICS_FATES.items()]
    return "\n".join(lines) + "\n"


# ======================================================================================================================
# 2. The bench: every fault has its prompt, and a healthy one stands beside it
# ======================================================================================================================


@contextlib.contextmanager
def small_limits() -> Iterator[None]:
    with mock.patch.multiple(m, MAX_REPLY_BYTES=MB, MAX_METRICS_BYTES=MB // 2, ASK_TIMEOUT_S=2.0, SETTLE_S=0.01, KINDS_OF_FAILURES_TOLD=99):
        yield


def spoil(server: FakeServer, names: Sequence[str]) -> List[str]:
    """Have the prompt "[name] ..." meet its fault; the prompts, a healthy one behind each."""
    prompts = []
    for name in names:
        mark = f"[{name}]"
        server.script(lambda request, mark=mark: request.kind == "chat" and mark in request.raw.decode("utf-8", "replace"), then=step(name))
        prompts += [f"{mark} tell me some words", f"beside {name} tell me some words"]
    return prompts


class FaultCase(unittest.TestCase):
    """What holds in every run."""

    def check_run(self, done: Done, names: Sequence[str], streamed: bool) -> None:
        """Every request has its own fate, the record says so, and rates and counters rest on the completed ones alone."""
        fates = [FATES[name].streamed if streamed else FATES[name].whole for name in names]
        record, replies = done.endpoints[0], done.replies
        for place, (name, error) in enumerate(zip(names, fates)):
            with self.subTest(name):
                self.check_reply(replies["baseline", str(2 * place)], error)
                self.assertIsNone(replies["baseline", str(2 * place + 1)].get("error"), "its neighbour is untouched")
                if error:
                    self.assertTrue(any(error in caveat["sentence"] for caveat in record["caveats"]), record["caveats"])
                    self.assertIn(error, " ".join(done.out.split()))
                elif FATES[name].caveat:
                    self.assertTrue(any(FATES[name].caveat in caveat["sentence"] for caveat in record["caveats"]), record["caveats"])
        failed = sum(error is not None for error in fates)
        self.assertEqual((record["requests"], record["failed"], record["completed"]), (2 * len(names), failed, 2 * len(names) - failed))
        self.assertEqual(record["first_error"] is None, failed == 0)
        self.assertEqual(done.code, m.EXIT_FAILED if failed else m.EXIT_OK)
        completed = [reply for reply in replies.values() if not reply.get("error")]
        counts = [reply.get("completion_tokens") for reply in completed]
        self.assertEqual(record["output_tokens"], None if None in counts else sum(counts))

    def check_reply(self, reply: Dict[str, Any], error: Optional[str]) -> None:
        if error is None:
            self.assertIsNone(reply.get("error"))
            self.assertGreater(len(reply["content"].split()), 10)
        else:
            told = reply.get("error") or "no error"
            self.assertTrue(error in told or error == TOO_LARGE and TIMEOUT in told, told)   # a busy machine may be slow to send that much


TOGETHER = [name for name in CHAT_FAULTS if name not in ("refuse", "usage_absent", "usage_null", "usage_wrong")]
COUNTS = ["usage_absent", "usage_null", "usage_wrong"]      # they take the whole pass's token count away, or bend it


# ======================================================================================================================
# 3. Answers to prompts
# ======================================================================================================================


class TestAnswers(FaultCase):
    def run_all(self, streamed: bool, level: int) -> None:
        more = ["--concurrency", str(level), "--warmup", "0", "--timeout", "3" if level > 1 else "0.8", *([] if streamed else ["--no-stream"])]
        names = [name for name in TOGETHER if level > 1 or name not in SILENT or name == ("stall" if streamed else "hang")]    # each costs its limit
        with Bench() as bench, small_limits(), FakeServer(speculation=Speculation()) as server:
            began = time.perf_counter()
            done = bench.measure(server.url, None, *more, prompts=spoil(server, names))
            self.assertLess(time.perf_counter() - began, 30)
            self.check_run(done, names, streamed)

    def test_streamed_one_by_one(self):
        self.run_all(True, 1)

    def test_streamed_sixteen_at_once(self):
        self.run_all(True, 16)

    def test_in_one_piece_one_by_one(self):
        self.run_all(False, 1)

    def test_in_one_piece_sixteen_at_once(self):
        self.run_all(False, 16)

    def test_counts_that_are_missing_or_wrong(self):
        for streamed in (True, False):
            for name in COUNTS:
                with self.subTest(name, streamed=streamed), Bench() as bench, small_limits(), FakeServer(speculation=Speculation()) as server:
                    done = bench.measure(server.url, None, "--warmup", "0", *([] if streamed else ["--no-stream"]), prompts=spoil(server, [name]))
                    self.check_run(done, [name], streamed)

    def test_one_after_the_other_on_kept_connections(self):
        """With a warm-up, connections are known to stay open and are used again; a spoiled one never is."""
        last = ["close_before_head", "reset_before_head", "close_after"]    # after these, this server's connections are not kept any more
        names = [name for name in TOGETHER if name not in SILENT and name not in last] + last
        for engine in ("vllm",):
            with Bench() as bench, small_limits(), FakeServer(engine, speculation=Speculation()) as server:
                done = bench.measure(server.url, None, "--concurrency", "4", "--timeout", "5", prompts=spoil(server, names))
            self.assertLess(server.connections, 2 * len(names), "connections are used again")
            for place, name in enumerate(names):
                reply, beside = done.replies["baseline", str(2 * place)], done.replies["baseline", str(2 * place + 1)]
                self.assertEqual(reply.get("error") is None, FATES[name].streamed is None, (engine, name, reply.get("error")))
                self.assertIsNone(beside.get("error"), (engine, name, beside.get("error")))

    def test_the_server_goes_away(self):
        for level in ("1", "16"):
            with self.subTest(level=level), Bench() as bench, FakeServer(speculation=Speculation()) as server:
                server.script("chat", ["ok"] * 5 + ["refuse"])
                done = bench.measure(server.url, None, "--warmup", "0", "--concurrency", level, prompts=[f"say {n}" for n in range(40)])
                record = done.endpoints[0]
                self.assertEqual((done.code, record["requests"]), (1, 40))
                self.assertGreaterEqual(record["completed"], 5)
                self.assertIn("connection refused", str(record["caveats"]))
                self.assertIn("metrics page cannot be read", record["acceptance"]["missing"] or "from the responses: metrics page cannot be read")

    def test_only_one_of_two_servers_fails(self):
        """The other server's numbers, and the pairs that are whole, stay what they are."""
        with Bench() as bench, small_limits(), FakeServer() as base, FakeServer(speculation=Speculation()) as other:
            names = ["stall", "reset_mid_chunk", "error_object_done", "status_503"]
            done = bench.measure(base.url, other.url, "--warmup", "0", "--timeout", "1", prompts=spoil(other, names))
        ours, theirs = done.endpoints
        self.assertEqual((ours["failed"], theirs["failed"], done.code), (0, 4, 1))
        compared = done.comparisons[0]
        self.assertEqual((compared["text_comparison"]["compared"], compared["text_comparison"]["identical"]), (4, 4))
        self.assertEqual(sorted(pair[0] for pair in compared["incomparable"]), ["0", "2", "4", "6"])
        self.assertEqual(theirs["acceptance"]["draft_tokens"],
                         sum(request.generation.draft_tokens for request in other.chats if request.generation and "beside" in str(request.body)))

    def test_a_failed_request_is_not_sent_again(self):
        with Bench() as bench, FakeServer() as server:
            done = bench.measure(server.url, None, "--warmup", "0", prompts=spoil(server, ["status_429", "status_503", "close_before_head", "reset_before_head"]))
        self.assertEqual(len(server.chats), 8)
        self.assertEqual(done.endpoints[0]["failed"], 4)

    def test_a_server_that_closes_kept_connections_unannounced(self):
        """A request on a connection that the server has just closed is no failed request; it is sent again, and said."""
        with Bench() as bench, small_limits(), FakeServer("vllm", requests_per_connection=3) as server:
            done = bench.measure(server.url, None, prompts=[f"say {n}" for n in range(30)])
        record = done.endpoints[0]
        self.assertEqual((done.code, record["failed"], len(done.replies)), (0, 0, 30))
        again = sum(reply.get("resent", False) for reply in done.replies.values())
        self.assertLessEqual(again, 2, "once it was seen, every request has a connection of its own")
        self.assertEqual("sent twice" in str(record["caveats"]), again > 0)

    def test_encodings_that_nobody_asked_for(self):
        def brotli(connection: Any) -> None:
            connection.send_answer(connection.healthy().with_header("Content-Encoding", "br"))

        with Bench() as bench, FakeServer() as server:
            server.script("chat", then=brotli)
            done = bench.measure(server.url, None, "--warmup", "0")
        self.assertIn("an encoding that nobody asked for: br", done.endpoints[0]["first_error"])

    def test_more_ways_to_fail_than_can_be_told(self):
        def numbered(connection: Any) -> None:
            fakes.say_error(connection, 500, f"incident {connection.request.order}", "server_error")

        with Bench() as bench, FakeServer() as server:
            server.script("chat", then=numbered)
            done = bench.measure(server.url, None, "--warmup", "0", "--concurrency", "4", prompts=[f"say {n}" for n in range(30)])
        sentences = [caveat["sentence"] for caveat in done.endpoints[0]["caveats"]]
        self.assertEqual(sum("incident" in sentence for sentence in sentences), m.KINDS_OF_FAILURES_TOLD)
        self.assertIn("22 more of 30 requests failed, in 22 more ways.", sentences)


# ======================================================================================================================
# 4. Connections, and servers that cannot be asked at all
# ======================================================================================================================


class TestConnections(FaultCase):
    def cannot_start(self, server: FakeServer, *more: str) -> Done:
        with Bench() as bench, small_limits(), mock.patch.object(m, "CONNECT_TIMEOUT_S", 0.3):
            done = bench.measure(server.url, None, "--timeout", "0.5", *more)
        self.assertEqual((done.code, done.endpoints, done.out), (2, [], ""))
        self.assertIn("measure_speculative: error: ", done.err)
        self.assertIn("  try: ", done.err)
        self.assertNotIn("Traceback", done.err)
        self.assertFalse(os.path.exists(done.run_file) or os.path.exists(done.notebook), "no empty file is left behind")
        return done

    def test_accepted_and_nothing_more(self):
        for name, words in (("hang", "no whole answer within"), ("reset_before_head", "reset by the server"), ("garbage", "not HTTP"),
                            ("close_before_head", ""), ("refuse", "reset")):
            with self.subTest(name), FakeServer(faults={"connect": name}) as server:
                self.assertIn(words, self.cannot_start(server).err)

    def test_the_list_of_models(self):
        for name, words in (("hang", "no whole answer within"), ("html_200", "an HTML page"), ("status_500", "HTTP 500"), ("garbage", "not HTTP"),
                            ("status_401", "refuses the key"), ("status_404_html", "HTTP 404"), ("loading", "still answers 503"),
                            ("redirect_other", "redirects to http://elsewhere.invalid"), ("redirect_loop", "redirected in a loop"),
                            ("truncated_json", "names no model"), ("huge_body", "names no model"), ("empty_stream", "names no model"),
                            ("gzip_bomb", "names no model"), ("endless_head", "head is larger")):
            with self.subTest(name), FakeServer() as server:
                server.script("models", then=step(name))
                self.assertIn(words, " ".join(self.cannot_start(server, "--ready-timeout", "0.1").err.split()))

    def test_the_rehearsal(self):
        for name, words in (("status_400", "does not take our request"), ("status_401", "refuses the key"), ("status_404_html", "HTTP 404"),
                            ("html_200", "an HTML page"), ("redirect_other", "redirects to http://elsewhere.invalid"),
                            ("redirect_loop", "does not take our request: HTTP 307")):
            with self.subTest(name), FakeServer() as server:
                server.script("chat", then=name)
                self.assertIn(words, " ".join(self.cannot_start(server).err.split()))

    def test_a_redirect_to_and_fro_ends(self):
        def to_and_fro(connection: Any) -> None:
            place = "/b/v1/chat/completions" if connection.request.target.startswith("/a") else "/a/v1/chat/completions"
            fakes.redirect(connection, 307, connection.server.origin + place)

        with FakeServer() as server:
            server.script(lambda request: request.kind == "chat", then=to_and_fro)
            self.assertIn("HTTP 307", self.cannot_start(server).err)
            self.assertLess(len(server.chats), 10)

    def test_redirects_on_the_same_host_are_resolved_before_measuring(self):
        for name in ("redirect", "redirect_308"):
            with self.subTest(name), Bench() as bench, FakeServer(faults={"chat": name}) as server:
                done = bench.measure(server.url)
                self.assertEqual((done.code, done.endpoints[0]["failed"]), (0, 0))
                self.assertIn("/moved/", server.chats[-1].target)

    def test_rehearsal_that_fails_is_no_reason_to_stop(self):
        """What may pass (a stall, a full queue) is measured, and told by the measured requests."""
        with Bench() as bench, small_limits(), FakeServer() as server:
            server.script("chat", ["stall", "status_500"])
            done = bench.measure(server.url, None, "--timeout", "1")
        self.assertEqual((done.code, done.endpoints[0]["completed"]), (0, 2))

    def test_connections_that_break_while_measuring(self):
        """At concurrency 1 and 16, with connections opened ahead: closed at accept, reset at accept, never answered."""
        for name, levels in (("close_before_head", ("1", "16")), ("reset_before_head", ("1", "16")), ("hang", ("16",))):
            for level in levels:
                with self.subTest(name, level=level), Bench() as bench, small_limits(), FakeServer() as server:
                    server.script("connect", ["ok"] * 3 + [name] * 3)
                    began = time.perf_counter()
                    done = bench.measure(server.url, None, "--warmup", "0", "--timeout", "1.5", "--concurrency", level,
                                         prompts=[f"say {n}" for n in range(20)])
                    self.assertLess(time.perf_counter() - began, 20)
                    self.assertEqual(len(done.replies), 20)
                    self.assertLessEqual(done.endpoints[0]["failed"], 3)

    def test_bytes_behind_an_answer_are_not_the_next_answer(self):
        """A server that says more than it announced: the surplus must not be read as the answer to the next request."""
        def surplus(connection: Any) -> None:
            answer = connection.healthy()
            stale = fakes.replace(answer, framing="length")
            stale = fakes.head_of(stale) + stale.body
            connection.count(answer)
            connection.send(fakes.head_of(answer) + b"".join(fakes.frames_of(answer)) + stale[:100])
            connection.wait(0.02)       # by now the next request may be on its way over the same connection
            connection.send(stale[100:])

        with Bench() as bench, FakeServer("vllm", answer=lambda messages, body: messages[0]["content"] + " and so on") as server:
            server.script("chat", ["ok"], then=surplus)
            done = bench.measure(server.url, None, "--warmup", "1", prompts=[f"say {n}" for n in range(6)])
        self.assertEqual([done.replies["baseline", str(n)]["content"] for n in range(6)], [f"say {n} and so on" for n in range(6)])

    def test_names_that_no_resolver_takes(self):
        for url in ("http://a..b:1/v1", f"http://{'x' * 64}.example:1/v1", "http://nowhere.invalid:1/v1"):
            with self.subTest(url), Bench() as bench:
                done = bench.measure(url)
                self.assertEqual(done.code, 2)
                self.assertNotIn("Traceback", done.err)


# ======================================================================================================================
# 5. The page of metrics
# ======================================================================================================================


def without_own_counts(connection: Any) -> None:
    """A healthy answer without what vLLM adds to it, so that acceptance has to come from the page."""
    connection.send_answer(edited(connection.healthy(), lambda value: {key: item for key, item in value.items() if key != "metrics"}))


class TestMetrics(FaultCase):
    def test_the_page_after_a_pass(self):
        for name, reason in METRICS_FATES.items():
            with self.subTest(name), Bench() as bench, small_limits(), FakeServer("vllm") as base, \
                    FakeServer("vllm", speculation=Speculation()) as server:
                server.script("chat", then=without_own_counts)
                server.script("metrics", ["ok", "ok"], then=step(name))
                done = bench.measure(base.url, server.url, "--warmup", "0")
                record = done.endpoints[1]
                self.assertEqual((done.code, record["completed"]), (0, 2), "answers count, whatever becomes of the page")
                self.assertIsNotNone(record["output_tokens_per_s"])
                acceptance = record["acceptance"]
                if reason is None:
                    self.assertEqual(acceptance["accepted_tokens"], server.counters.accepted_tokens)
                else:
                    self.assertIn(reason, acceptance["missing"] or "")
                    self.assertEqual((acceptance["drafts"], acceptance["acceptance_rate"], record["spec_metrics_delta"]), (None, None, {}))
                    self.assertIn(reason.split("(")[0].strip()[:40], " ".join(done.screen.split()))

    def test_the_page_never_answers(self):
        with Bench() as bench, small_limits(), FakeServer("vllm", speculation=Speculation(), faults={"metrics": "hang"}) as server:
            began = time.perf_counter()
            done = bench.measure(server.url, None, "--warmup", "0", "--timeout", "0.5")
            self.assertLess(time.perf_counter() - began, 8)
        self.assertEqual(done.code, 0)
        self.assertIn("metrics page cannot be read", done.err)

    def test_failed_requests_are_not_taken_for_strangers(self):
        """A server that generated more than completed requests tell: with failures it may have been our own."""
        with Bench() as bench, small_limits(), FakeServer("vllm", speculation=Speculation()) as server:
            server.script("chat", then=without_own_counts)
            names = ["no_last_chunk"]       # counted by the server, failed for us
            done = bench.measure(server.url, None, "--warmup", "0", prompts=spoil(server, names))
        self.assertEqual(done.endpoints[0]["failed"], 1)
        self.assertNotIn("somebody else", str(done.endpoints[0]))

    def test_strangers(self):
        def foreign(connection: Any) -> None:
            connection.server.strangers_generate(500)
            without_own_counts(connection)

        with Bench() as bench, FakeServer("vllm", speculation=Speculation()) as server:
            server.script("chat", then=foreign)
            done = bench.measure(server.url, None, "--warmup", "0")
        self.assertIn("somebody else used the server", done.endpoints[0]["acceptance"]["missing"])

    def test_absurd_numbers(self):
        """Counters that no counter can have: not measured, never a traceback."""
        for value in ("1e308", "1e999", "NaN", "-5", "9007199254740993", "1.5"):
            with self.subTest(value):
                page = "\n".join(f'{name}{{engine="{n}"}} {value}' for name in (
                    "vllm:spec_decode_num_drafts_total", "vllm:spec_decode_num_draft_tokens_total", "vllm:spec_decode_num_accepted_tokens_total",
                    "sglang:spec_verify_calls_total", "sglang:num_requests_total", "sglang:generation_tokens_total",
                    'vllm:spec_decode_num_accepted_tokens_per_pos_total', "sglang:max_total_num_tokens") for n in range(2)).encode()
                page += f'\nvllm:cache_config_info{{num_gpu_blocks="{value}",block_size="{value}"}} 1'.encode()
                page += f'\nvllm:spec_decode_num_accepted_tokens_per_pos_total{{position="0"}} {value}'.encode()
                zeros = m.parse_metrics(page.replace(value.encode(), b"0") + b"\n")
                for before, after in ((zeros, m.parse_metrics(page)), (m.parse_metrics(page), m.parse_metrics(page))):
                    for names in (b"vllm:", b"sglang:"):
                        only = after._replace(samples=tuple(s for s in after.samples if s.name.encode().startswith(names)))
                        m.json_line(m.as_json(m.acceptance_from_counters(before, only, "", 2, 10)))
                    m.json_line(m.as_json(m.speculation_delta(before, after)))
                    m.kv_cache_tokens(after)


# ======================================================================================================================
# 6. The table itself
# ======================================================================================================================


class TestTheTable(unittest.TestCase):
    def test_every_fault_has_its_fate(self):
        self.assertEqual(sorted(FATES), sorted(CHAT_FAULTS))
        self.assertLessEqual(set(METRICS_FAULTS), set(METRICS_FATES))

    def test_fates_agree_with_the_fakes_manual(self):
        for name, fate in FATES.items():
            if name in WHOLE:
                self.assertEqual((fate.streamed, fate.whole), (None, None), name)
            elif name not in EITHER and name not in ("ok", "no_finish"):
                self.assertTrue(fate.streamed and fate.whole, name)

    def test_the_file_is_up_to_date(self):
        with open(TABLE, encoding="utf-8") as file:
            self.assertEqual(file.read(), table_text(), "python3 -m tests.test_faults writes it anew")


if __name__ == "__main__":
    with open(TABLE, "w", encoding="utf-8", newline="\n") as table_file:
        table_file.write(table_text())
