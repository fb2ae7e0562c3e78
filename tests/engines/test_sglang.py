"""SGLang on the CPU, computing with plain torch and without speculation (its drafting needs kernels that exist for GPUs only).

HTTP, streams, metrics and identity answers are the real ones. One server is started with a key, which its /server_info
repeats; the other without metrics.
"""
import contextlib
import json
import os
import unittest.mock

from tests.engines import install
from tests.engines.measured import EngineTest, require
from tests.engines.servers import MODEL, sglang_server

KEY = "canary-of-a-key-7d0e"
SHORT = ("--limit", "4", "--max-tokens", "12", "--ties", "never")

_shared = contextlib.ExitStack()
_running = {}


def setUpModule():
    require("sglang")
    _shared.enter_context(unittest.mock.patch.dict(os.environ, SPEC_API_KEY=KEY))
    _running["counted"] = _shared.enter_context(sglang_server("--enable-metrics", "--api-key", KEY))
    _running["uncounted"] = _shared.enter_context(sglang_server("--disable-radix-cache"))
    for server in _running.values():        # the first request pays for what the others find there
        server.get("/health_generate")


def tearDownModule():
    _shared.close()


class SglangTest(EngineTest):
    """Two servers that do the same."""

    def setUp(self):
        super().setUp()
        self.counted, self.uncounted = _running["counted"], _running["uncounted"]

    def measured(self, *arguments):
        """A run against both, its record of the server with counters, and what those moved by."""
        before = self.counted.counters()
        ran = self.measure(self.counted, *SHORT, *arguments, again=self.uncounted)
        after = self.counted.counters()
        return ran, {name: value - before.get(name, 0) for name, value in after.items()}

    def assert_sound(self, ran, moved):
        """Tokens and requests as the server counts them, in all passes over it; nothing called changed that is the same model."""
        for name in ("baseline", "again"):
            self.assert_all_answered(ran.endpoint(name))
        passes = [ran.replies("baseline", purpose=purpose) for purpose in ("timed", "floor")]
        replies = [reply for replies in passes for reply in replies]
        self.assertEqual(len(replies), 8)
        self.assertEqual(moved["sglang:generation_tokens_total"], sum(reply["completion_tokens"] for reply in replies))
        self.assertEqual(moved["sglang:num_requests_total"], len(replies))
        verdict, floor = ran.comparison("again")["verdict"], ran.comparison("again")["noise_floor"]
        texts = ran.comparison("again")["text_comparison"]
        self.note(f"  {texts['identical']} of {texts['compared']} identical, {verdict['answers']}; the baseline agrees with itself in {floor['exact_match']:.0%}")
        self.assertIn(verdict["answers"], ("identical", "rounding only", "cannot tell"))

    def test_streamed(self):
        ran, moved = self.measured("--warmup", "0", "--noise-floor", "always")
        self.assert_records_are_whole(ran.records)
        self.assert_sound(ran, moved)
        told = ran.endpoint("baseline")
        self.assertEqual((told["engine"], told["engine_version"], told["model"]), ("sglang", install.SGLANG, MODEL))
        self.assertEqual((told["server"]["context_tokens"], told["server"]["slots"], told["server"]["kv_cache_tokens"]), (1024, 4, 4096))
        self.assertIs(told["server"]["speculating"], False)
        self.assertEqual(told["acceptance"]["missing"], "speculation is off")
        self.assertIn("does not speculate", " ".join(caveat["sentence"] for caveat in ran.endpoint("again")["caveats"]))
        for reply in ran.replies("baseline"):
            self.assertGreater(reply["last_s"], reply["first_s"])

    def test_in_one_piece(self):
        """Without streaming SGLang tells more: the ids of its tokens, which its usage must count."""
        ran, moved = self.measured("--warmup", "0", "--noise-floor", "always", "--no-stream")
        self.assert_sound(ran, moved)
        for reply in ran.replies("baseline"):
            self.assertEqual(len(reply["token_ids"]), reply["completion_tokens"])
            self.assertNotIn("first_s", reply)

    def test_check(self):
        """What is wrong with the pair, each with its remedy."""
        out, err = self.tool("check", "--baseline-url", self.counted.url, "--speculative-url", self.uncounted.url, code=1)
        said = " ".join((out + err).split())
        for words in (f"sglang {install.SGLANG}", "4,096 tokens", "does not speculate", "--speculative-algorithm", "--enable-metrics"):
            self.assertIn(words, said)

    def test_the_key_is_nowhere(self):
        """It is in the server's own answer, and in nothing that the tool writes or says; without it the server is closed."""
        status, told = self.counted.get("/server_info", {"Authorization": f"Bearer {KEY}"})
        self.assertEqual((status, KEY in told), (200, True))
        out, err = self.tool("--baseline-url", self.counted.url, "--limit", "1", "--max-tokens", "4", "--warmup", "0", "--labbook", "key.md")
        self.tool("report", "key.md", "-o", "page.html")
        written = [path for path in self.folder.rglob("*") if path.is_file()]
        self.assertEqual(len(written), 3)
        for path in written:
            self.assertNotIn(KEY.encode(), path.read_bytes(), path)
        self.assertNotIn(KEY, out + err)
        with unittest.mock.patch.dict(os.environ, SPEC_API_KEY="another-key-altogether"):
            _, err = self.tool("--baseline-url", self.counted.url, "--limit", "1", code=2)
        self.assertIn("refuses the key", err)
        self.assertNotIn("another-key-altogether", err)

    def test_a_prompt_too_long(self):
        """One request of two fails, by name; the other is measured."""
        (self.folder / "long.jsonl").write_text(json.dumps({"id": "long", "prompt": "again and " * 2000}) + "\n"
                                                + json.dumps({"id": "short", "prompt": "Say a word."}) + "\n")
        self.tool("--baseline-url", self.counted.url, "--prompts", "long.jsonl", "--max-tokens", "8", "--warmup", "0", "--labbook", "long.md", code=1)
        record = self.records("long.md")[0]
        self.assertEqual((record["completed"], record["failed"]), (1, 1))
        self.assertIn("HTTP 400", record["first_error"])
        self.note(f"  {record['first_error']}")
