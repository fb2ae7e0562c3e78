"""Text that attacks whoever reads it: neutralised on the screen, in Markdown, CSV and HTML, exact in the run file."""
from __future__ import annotations

import csv
import html.parser
import io
import json
import os
import re
import unittest
from typing import Any, List
from unittest import mock

from tests import fakes
from tests.drive import Bench, Done, m, run_main
from tests.fakes import FakeServer, Say, Speculation

ESCAPES = "\x1b]0;owned\x07\x1b[31mred\x1b[2J\x9b2K\x08\x08\x7f"
BIDI = "\u202eevil\u202c \u2066hidden\u2069 \u200b\u200e\ufeff"
SCRIPT = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"' onmouseover='alert(3)"
MARKDOWN = "| a | b |\n|---|---|\n[link](javascript:alert(4)) ![x](http://evil.example/x.png) `code` <b>"
FORMULA = "=cmd|'/C calc'!A0"
LINES = "one\rtwo\u2028three\u2029four\u0085five\x0bsix"
WORD = "W" * 1_000_000
HOSTILE = {"escapes": ESCAPES, "bidi": BIDI, "script": SCRIPT, "markdown": MARKDOWN, "formula": FORMULA, "lines": LINES, "half a pair": "\ud800 and \udfff", "nul": "a\0b"}
FORBIDDEN = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u200b-\u200f\u202a-\u202e\u2028\u2029\u2066-\u2069\ufeff\ud800-\udfff]")


class Tags(html.parser.HTMLParser):
    """What a browser would see of a page: its tags, its event attributes, its addresses."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: List[str] = []
        self.handlers: List[str] = []
        self.addresses: List[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attributes: Any) -> None:
        self.tags.append(tag)
        self.handlers += [name for name, _ in attributes if name.startswith("on")]
        self.addresses += [value or "" for name, value in attributes if name in ("src", "href", "xlink:href", "action")]


class HostileCase(unittest.TestCase):
    def measure(self, bench: Bench, text: str, *more: str, where: str = "content") -> Done:
        """Two servers whose answers are that text, and differ behind it."""
        def answer(tail: str) -> Any:
            def say(messages: Any, body: Any) -> Say:
                return Say(**{"content": "x" + tail, where: f"begin {text} {tail}"}) if where != "tool_calls" else Say("x" + tail, "", ((text[:50], text + tail),))
            return say

        with FakeServer("plain", answer=answer("left " + text)) as base, FakeServer("plain", answer=answer("right " + text)) as other:
            return bench.measure(base.url, other.url, "--ties", "never", *more, prompts=["tell me"])

    def check_text(self, text: str, what: str) -> None:
        found = FORBIDDEN.search(text)
        if found:
            self.fail(f"{what}: {found.group()!r} in {text[max(0, found.start() - 60):found.end() + 20]!r}")

    def check_everything(self, bench: Bench, done: Done) -> None:
        """Every rendering of what was measured."""
        self.check_text(done.screen, "screen")
        book, run = done.notebook, done.run_file
        for words in (["notebook", book], ["notebook", "--check", book], ["compare", run], ["compare", "--verbose", run], ["breakeven", book]):
            said = run_main(words)
            self.assertNotIn("Traceback", said.err, words)
            self.check_text(said.screen, str(words))
        for words in (["table", book], ["table", "--tutorial", book], ["table", run]):
            said = run_main(words)
            self.check_text(said.screen, str(words))
            self.assertNotRegex(said.out, r"(?<!\\)\]\(|<(script|img|b)\b|!\[(?!x)", words)
            rows = [line for line in said.out.splitlines() if line.startswith("|")]
            columns = {len(re.findall(r"(?<!\\)\|", row)) for row in rows}
            self.assertLessEqual(len(columns), 3, "no cell breaks out of its row")
        for words in (["csv", book], ["csv", "--requests", run]):
            said = run_main(words)
            self.assertEqual(said.code, 0, said.err)
            self.check_text(said.out, str(words))
            for row in csv.reader(io.StringIO(said.out, newline="")):
                for cell in row:
                    self.assertFalse(cell[:1] in ("=", "@", "\t", "\r") or cell[:1] in ("+", "-") and not re.fullmatch(r"[-+]?[\d.,eE+-]+", cell), cell[:60])
        page = bench.path("report.html")
        said = run_main(["report", book, "-o", page])
        self.assertEqual(said.code, 0, said.err)
        with open(page, encoding="utf-8") as file:
            text = file.read()
        self.check_text(text, "page")
        seen = Tags(text)
        self.assertEqual((seen.handlers, [tag for tag in seen.tags if tag in ("img", "iframe", "object", "embed", "form")]), ([], []))
        self.assertLessEqual(seen.tags.count("script"), 1)
        self.assertFalse([address for address in seen.addresses if not address.startswith("#")], seen.addresses)
        self.assertNotIn("<script>alert", text)


class TestAnswers(HostileCase):
    def test_on_every_channel(self):
        together = " ".join(HOSTILE.values())
        for where in ("content", "reasoning", "tool_calls"):
            with self.subTest(where), Bench() as bench:
                done = self.measure(bench, together, where=where)
                self.assertEqual(done.code, 0, done.err)
                self.assertEqual(done.comparisons[0]["text_comparison"]["divergent"], 1)
                self.check_everything(bench, done)

    def test_each_by_itself_is_exact_in_the_run_file(self):
        for name in ("escapes", "lines", "half a pair", "nul"):
            text = HOSTILE[name]
            with self.subTest(name), Bench() as bench:
                done = self.measure(bench, text, "--warmup", "0")
                kept = done.replies["baseline", "0"]["content"].encode("utf-8", "surrogateescape")
                self.assertEqual(kept, f"begin {text} left {text}".encode("utf-8", "surrogatepass"), "byte for byte")
                self.check_text(done.screen, name)
                with open(done.run_file, "rb") as file:
                    self.assertTrue(file.read().isascii())

    def test_a_word_of_a_megabyte(self):
        with Bench() as bench:
            done = self.measure(bench, WORD)
            self.assertEqual((done.code, len(done.replies["baseline", "0"]["content"])), (0, 2 * len(WORD) + 12))
            self.assertLess(len(done.screen), 6000)
            self.assertLess(os.path.getsize(done.notebook), 30000)
            self.check_everything(bench, done)
            self.assertLess(os.path.getsize(bench.path("report.html")), 3_000_000)


class TestNames(HostileCase):
    """Everything else that comes from a server, a file or a command line: models, versions, errors, ids, workloads, labels."""

    def test_a_server_with_such_names(self):
        together = " ".join(text for name, text in HOSTILE.items() if name != "half a pair")    # no server finds a model by that

        def fail(connection: Any) -> None:
            fakes.say_error(connection, 500, together, "x")

        pages = {"/v1/models": {"object": "list", "data": [{"id": together, "owned_by": "vllm"}]}, "/version": {"version": together}}
        with Bench() as bench, FakeServer("vllm", model=together, pages=pages) as base, FakeServer("vllm", model=together, pages=pages, speculation=Speculation(
                method=together)) as other:
            other.script(lambda request: request.kind == "chat" and b"[fail]" in request.raw, then=fail)
            done = bench.measure(base.url, other.url, "--label", together.replace("\0", ""), "--track", FORMULA, prompts=["[fail] one", "two"])
            self.assertEqual(done.code, 1, done.err)
            self.assertEqual(done.endpoints[0]["model"], together)
            self.check_everything(bench, done)
            self.check_text(run_main(["check", "--baseline-url", base.url, "--speculative-url", other.url]).screen, "check")

    def test_prompts_with_such_names(self):
        together = " ".join(HOSTILE.values())
        with Bench() as bench, FakeServer() as base, FakeServer() as other:
            path = bench.write("prompts.jsonl", json.dumps({"id": together, "category": together, "workload": together, "prompt": together}) + "\n")
            done = bench.measure(base.url, other.url, "--prompts", path)
            self.assertEqual(done.code, 0, done.err)
            self.check_everything(bench, done)

    def test_a_notebook_that_somebody_else_wrote(self):
        """Lines that no version of ours has written."""
        with Bench() as bench, FakeServer() as base, FakeServer(speculation=Speculation()) as other:
            done = bench.measure(base.url, other.url)
            records = [dict(record) for record in done.records]
            for record in records:
                for key, value in record.items():
                    if isinstance(value, str) and key not in ("kind", "lab", "run_file", "purpose", "server_label", "baseline_label", "speculative_label"):
                        record[key] = " ".join(HOSTILE.values())
            with open(done.notebook, "w", encoding="ascii") as file:
                file.write("".join(json.dumps(record) + "\n" for record in records))
            self.check_everything(bench, done)


class TestTheBar(HostileCase):
    def test_the_progress_bar_shows_no_raw_name(self):
        class Terminal(io.StringIO):
            def isatty(self) -> bool:
                return True

        stream = Terminal()
        with mock.patch.object(m.sys, "stderr", stream), mock.patch.dict(os.environ, {"TERM": "xterm"}):
            screen = m.Screen()
            screen.bar(1, 2, ESCAPES + BIDI, None)
            screen.say("done")
        self.assertEqual(re.sub(r"\r\x1b\[K", "", stream.getvalue()).count("\x1b"), 0)
        self.check_text(re.sub(r"\r\x1b\[K", "", stream.getvalue()), "bar")


if __name__ == "__main__":
    unittest.main()
