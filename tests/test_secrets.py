"""Keys and passwords reach no output, whoever repeats them; --no-texts keeps no text."""
from __future__ import annotations

import json
import os
import unittest
from typing import Any, Iterator, List
from unittest import mock

from tests import fakes
from tests.drive import Bench, Done, m, run_main
from tests.fakes import CANARY, FakeServer, Say, Speculation

KEY = "sk-canary-key-7f3a9c"
PASSWORD = "canary-password-51d0"
VERBS = (("compare", "{run}", "{run}"), ("compare", "--verbose", "{run}", "{run}"), ("table", "{book}"), ("table", "{run}"), ("csv", "{book}"), ("csv", "--requests", "{run}"),
         ("report", "{book}", "-o", "{folder}/report.html"), ("notebook", "{book}"), ("notebook", "--check", "{book}"), ("breakeven", "{book}"))


def everything(bench: Bench, done: Done, verbs: bool = True) -> Iterator[str]:
    """All that a run, and every other verb on its files, left: screens, files, names of files."""
    yield done.screen
    for verb in VERBS if verbs and os.path.exists(done.notebook) else ():
        words = [word.format(run=done.run_file, book=done.notebook, folder=bench.folder) for word in verb]
        later = run_main(words)
        if "Traceback" in later.err or later.code not in (0, 1, 2):
            raise AssertionError(f"{words}: {later.err}")
        yield later.screen
    for folder, _, names in os.walk(bench.folder):
        for name in names:
            yield name
            with open(os.path.join(folder, name), "rb") as file:
                yield file.read().decode("utf-8", "replace")


class SecretsCase(unittest.TestCase):
    def check(self, bench: Bench, done: Done, *secrets: str, verbs: bool = True) -> None:
        for text in everything(bench, done, verbs):
            for secret in secrets:
                if secret in text:
                    place = text.index(secret)
                    self.fail(f"{secret} in ...{text[max(0, place - 80):place + 60]!r}...")


class TestKeys(SecretsCase):
    def measure(self, bench: Bench, base: FakeServer, other: Any = None, *more: str, url: str = "") -> Done:
        with mock.patch.dict(os.environ, {"SPEC_API_KEY": KEY}):
            return bench.measure(url or base.url, other.url if other else None, "--export-json", bench.path("summary.json"), *more)

    def test_a_key_is_sent_and_never_seen(self):
        for engine in ("vllm", "sglang"):      # those whose identity pages tell secrets
            with self.subTest(engine), Bench() as bench, FakeServer(engine, key=KEY, dev_mode=True) as base, \
                    FakeServer(engine, key=KEY, speculation=Speculation(), dev_mode=True) as other:
                done = self.measure(bench, base, other)
                self.assertEqual((done.code, len(done.endpoints)), (0, 2), done.err)
                self.assertTrue(all(request.header("authorization") == f"Bearer {KEY}" for request in base.chats))
                self.check(bench, done, KEY, CANARY)

    def test_servers_that_repeat_the_key(self):
        """In refusals, error events, redirects and identity pages."""
        def echo(connection: Any) -> None:
            fakes.say_error(connection, 500, f"Incorrect API key provided: {connection.request.header('authorization')}", "auth")

        def inside(connection: Any) -> None:
            bad = fakes.event({"error": {"message": f"key {connection.request.header('authorization')} is over its quota"}})
            connection.send_answer(fakes.replace(connection.healthy(), pieces=(bad,), at_s=(), generation=None))

        def moved(connection: Any) -> None:
            fakes.redirect(connection, 307, f"http://user:{PASSWORD}@elsewhere.invalid/{KEY}?key={KEY}")

        def plain(connection: Any) -> None:
            text = f"Forbidden for {connection.request.header('authorization')}".encode()
            connection.send_answer(fakes.plain_answer(connection, 403, text, "text/plain"))

        for where, steps in (("chat", (echo, inside, moved, plain)), ("models", (echo, moved, plain)), ("metrics", (echo, moved)), ("version", (plain,))):
            for step in steps:
                with self.subTest(where, step=step.__name__), Bench() as bench, FakeServer("vllm") as server:
                    server.script(where, then=step)
                    self.check(bench, self.measure(bench, server, None, "--warmup", "0"), KEY, PASSWORD, verbs=(where, step) == ("chat", inside))
                    if where == "chat":
                        self.check(bench, self.measure(bench, server), KEY, PASSWORD, verbs=False)

    def test_a_key_goes_to_no_other_host(self):
        with Bench() as bench, FakeServer() as server, FakeServer(key="another") as elsewhere:
            for step in (lambda connection: fakes.redirect(connection, 307, elsewhere.url + "/chat/completions"),
                         lambda connection: fakes.redirect(connection, 301, elsewhere.url + "/models")):
                for where, more in (("chat", ["--warmup", "0"]), ("chat", []), ("models", []), ("metrics", ["--warmup", "0"])):
                    server.script(where, then=step)
                    self.measure(bench, server, None, *more)
                    server.script(where)
            done = self.measure(bench, server, None, "--baseline-metrics-url", elsewhere.root + "/metrics")
            self.assertEqual(done.code, 0)
        self.assertTrue(elsewhere.requests, "the metrics were asked for there")
        self.assertEqual([request.header("authorization") for request in elsewhere.requests], [None] * len(elsewhere.requests))

    def test_credentials_in_addresses(self):
        with Bench() as bench, FakeServer("vllm", speculation=Speculation()) as server:
            address = server.url.replace("http://", f"http://user:{PASSWORD}@")
            done = bench.measure(address, None, "--baseline-metrics-url", address.replace("/v1", "/metrics"))
            self.assertEqual(done.code, 0, done.err)
            self.assertTrue(server.chats[0].header("authorization").startswith("Basic "))
            coded = server.chats[0].header("authorization")[6:]
            self.check(bench, done, PASSWORD, coded)
            for spoiled in (address.replace("127.0.0.1", "127.0.0.1x y"), address + "?q=1", address.replace("http:", "ftp:"), address.replace(":", "::", 3),
                            address.replace("127.0.0.1", "nowhere.invalid"), address.replace(PASSWORD, PASSWORD + "/x")):
                for done in (run_main(["--baseline-url", spoiled, "--labbook", bench.path("b.md")]), run_main(["check", "--baseline-url", spoiled])):
                    self.check(bench, done, PASSWORD)

    def test_the_other_verbs(self):
        with Bench() as bench, FakeServer("sglang", key=KEY) as server, mock.patch.dict(os.environ, {"SPEC_API_KEY": KEY}):
            self.check(bench, run_main(["check", "--baseline-url", server.url]), KEY, CANARY)
        with Bench() as bench, mock.patch.dict(os.environ, {"SPEC_API_KEY": KEY + "\x01\n"}):
            done = run_main(["check", "--baseline-url", "http://127.0.0.1:9/v1"])
            self.assertEqual(done.code, 2)
            self.check(bench, done, KEY)

    @unittest.skipUnless(os.path.isdir("/proc/self"), "reads /proc")
    def test_the_list_of_processes(self):
        """While it measures, and while the demo runs its servers, no argument of any process holds the key."""
        seen: List[str] = []

        def look(*_: Any) -> None:
            for process in filter(str.isdigit, os.listdir("/proc")):
                try:
                    with open(f"/proc/{process}/cmdline", "rb") as file:
                        seen.append(file.read().decode("utf-8", "replace"))
                except OSError:
                    pass

        with Bench() as bench, mock.patch.dict(os.environ, {"SPEC_API_KEY": KEY}), mock.patch.object(m, "_tell_plan", side_effect=look):
            done = run_main(["demo", "--limit", "2", "--max-tokens", "4", "--labbook", bench.path("labbook.md"), "--noise-floor", "never", "--ties", "never"])
        self.assertEqual(done.code, 0, done.err)
        self.assertTrue(any("demo-server" in line for line in seen))
        self.assertFalse([line for line in seen if KEY in line])

    @unittest.skipIf(os.name == "nt", "umask is POSIX's")
    def test_files_have_the_users_umask(self):
        before = os.umask(0o077)
        try:
            with Bench() as bench, FakeServer() as server:
                done = bench.measure(server.url, None, "--export-json", bench.path("summary.json"))
                run_main(["report", done.notebook, "-o", bench.path("report.html")])
                for path in (done.notebook, done.run_file, bench.path("summary.json"), bench.path("report.html")):
                    self.assertEqual(os.stat(path).st_mode & 0o777, 0o600, path)
        finally:
            os.umask(before)


class TestNoTexts(SecretsCase):
    """With --no-texts: digests, lengths and places of first difference, and nothing that anybody wrote."""

    WORDS = ("zanzibar", "quixotic", "palimpsest")

    def test_no_text_is_kept(self):
        def answer(word: str) -> Any:
            return lambda messages, body: Say(f"The same beginning {word} and an end.", reasoning=f"Thinking of {word}",
                                              tool_calls=(("look", json.dumps({"for": word})),))

        with Bench() as bench, FakeServer("vllm", answer=answer(self.WORDS[0])) as base, \
                FakeServer("vllm", answer=answer(self.WORDS[1]), speculation=Speculation()) as other:
            done = bench.measure(base.url, other.url, "--no-texts", "--noise-floor", "always", "--ties", "auto", "--export-json", bench.path("summary.json"),
                                 prompts=["tell me", "tell me more"])
            self.assertEqual(done.code, 0, done.err)
            self.check(bench, done, *self.WORDS, "Thinking of", "same beginning")
            divergence = done.comparisons[0]["text_comparison"]["divergences"][0]
            self.assertIsNotNone(divergence["first_difference_at_byte"])
            self.assertEqual((divergence["baseline_tail"], divergence["speculative_tail"]), ("", ""))
            reply = done.replies["baseline", "0"]
            self.assertIsNone(reply["content"])
            self.assertEqual(len(reply["digests"]["content"]["sha256"]), 64)
            compared = run_main(["compare", done.run_file])
            self.assertEqual(compared.code, 0, compared.err)
            self.assertIn("0 of 2", compared.out)

    def test_prompts_are_known_by_digest(self):
        """Runs without texts are still refused when their prompts were others, and go together with one that has texts."""
        with Bench() as bench, FakeServer() as base, FakeServer(speculation=Speculation()) as other:
            runs = {}
            for name, server, more, prompts in (("base", base, ["--no-texts"], ["one", "two"]), ("same", other, ["--no-texts"], ["one", "two"]),
                                                ("texts", other, [], ["one", "two"]), ("others", other, ["--no-texts"], ["one", "palimpsest"])):
                done = bench.measure(server.url, None, "--label", name, *more, prompts=prompts)
                self.assertEqual(done.code, 0)
                runs[name] = done.run_file
            same = run_main(["compare", runs["base"], runs["same"]])
            self.assertEqual(same.code, 0, same.err)
            mixed = run_main(["compare", runs["base"], runs["texts"]])
            self.assertEqual(mixed.code, 0, mixed.err)
            self.assertIn("2 of 2", mixed.out)
            refused = run_main(["compare", runs["base"], runs["others"]])
            self.assertEqual((refused.code, "other prompts" in refused.err), (2, True), refused.err)
            with open(runs["others"], encoding="utf-8") as file:
                self.assertNotIn("palimpsest", file.read())


if __name__ == "__main__":
    unittest.main()
