"""vLLM on the CPU: without speculation, with n-grams, suffixes and a draft model, in float32 and bfloat16.

Three counts of drafted and accepted tokens are held against each other, to the token: the metrics of each response, the
tool's own reading of /metrics, and this test's. Starting a server takes most of a minute, so the tests share them.
"""
import contextlib
import json

from tests.engines import install
from tests.engines.measured import EngineTest, median_of, require
from tests.engines.servers import MODEL, vllm_server

NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 2}
SUFFIX = {"method": "suffix", "num_speculative_tokens": 8}
DRAFT = {"method": "draft_model", "model": str(install.weights("hf")), "num_speculative_tokens": 3}
# Nothing but the timed requests, so that counters read before and after the whole run hold those of the run.
EXACT = ("--limit", "6", "--max-tokens", "24", "--warmup", "0", "--ties", "never", "--noise-floor", "never")
LATE_S, LATE_SHARE = 0.25, 0.15     # two servers and the client share two cores

_shared = contextlib.ExitStack()
_running = {}


def setUpModule():
    require("vllm")


def tearDownModule():
    _shared.close()


def speculative(config, *flags):
    """The flags of a server that drafts."""
    return ("--speculative-config", json.dumps(config), *flags)


def shared(name, *flags, **more):
    """A server that several tests ask; started once, asked something once, since the first request pays for others."""
    if name not in _running:
        _running[name] = _shared.enter_context(vllm_server(*flags, **more))
    return _running[name]


def baseline():
    """Without speculation, in float32."""
    return shared("baseline")


def suffix():
    """Drafts what earlier answers went on with."""
    return shared("suffix", *speculative(SUFFIX, "--per-request-spec-decode-metrics", "detailed"))


class VllmTest(EngineTest):
    """What is checked of every pass."""

    def assert_counts_agree(self, ran, name, moved, responses=True, concurrency=1):
        """Responses, record, the tool's delta and `moved`, what this test saw the counters move by, are the same to the token."""
        record, replies = ran.endpoint(name, concurrency), ran.replies(name, concurrency)
        self.assert_all_answered(record)
        told = record["acceptance"]
        self.note_acceptance(name, told)
        counted = {key: int(moved[f"vllm:spec_decode_num_{key}_total"]) for key in ("drafts", "draft_tokens", "accepted_tokens")}
        self.assertEqual({key: told[key] for key in counted}, counted)
        for key, count in counted.items():
            self.assertEqual(sum(value for series, value in record["spec_metrics_delta"].items()
                                 if series.startswith(f"vllm:spec_decode_num_{key}_total")), count)
        if responses:
            self.assertIn("response metrics", told["source"])
            self.assertEqual({key: sum(reply["acceptance"][key] for reply in replies) for key in counted}, counted)
        else:
            self.assertEqual(told["source"], "metrics counters")
        if counted["accepted_tokens"]:
            self.assertEqual(sum(told["accepted_by_position"]), counted["accepted_tokens"])
        self.assert_tokens_agree(ran, name, moved, concurrency)

    def assert_tokens_agree(self, ran, name, moved, concurrency=1):
        """Tokens and requests as the server counts them are those of our replies."""
        record, replies = ran.endpoint(name, concurrency), ran.replies(name, concurrency)
        self.assertEqual(moved["vllm:generation_tokens_total"], sum(reply["completion_tokens"] for reply in replies))
        self.assertEqual(moved["vllm:generation_tokens_total"], record["output_tokens"])
        self.assertEqual(moved["vllm:request_success_total"], len(replies))
        for reply in replies:       # token ids came: a chunk is not a token, and usage counts what they count
            self.assertEqual(len(reply["token_ids"]), reply["completion_tokens"])

    def moved(self, before, server):
        """What the counters moved by since `before`."""
        after = server.counters()
        return {name: value - before.get(name, 0) for name, value in after.items()}


class Float32(VllmTest):
    """Where rounding is small: speculation changes nothing."""

    def test_methods(self):
        """Off, n-grams, suffixes and a draft model in one run; acceptance from responses and, without their flag, from counters."""
        with vllm_server(*speculative(NGRAM, "--per-request-spec-decode-metrics", "summary", "--enable-per-request-metrics"),
                         environment={"VLLM_SERVER_DEV_MODE": "1"}) as ngram, vllm_server(*speculative(DRAFT)) as draft:
            servers = {"ngram": ngram, "suffix": suffix(), "draft": draft}
            out, _ = self.tool("check", "--baseline-url", baseline().url, "--speculative-url", f"ngram={ngram.url}")
            self.assertIn("ready to measure", out)
            before = {name: server.counters() for name, server in {**servers, "baseline": baseline()}.items()}
            ran = self.measure(baseline(), *EXACT, **servers)
            moved = {name: self.moved(before[name], server) for name, server in {**servers, "baseline": baseline()}.items()}
            status, version = ngram.get("/version")
        self.assert_records_are_whole(ran.records)
        self.assert_tokens_agree(ran, "baseline", moved["baseline"])
        self.assertEqual(ran.endpoint("baseline")["acceptance"]["missing"], "speculation is off")
        self.assert_counts_agree(ran, "ngram", moved["ngram"])
        self.assert_counts_agree(ran, "suffix", moved["suffix"])
        self.assert_counts_agree(ran, "draft", moved["draft"], responses=False)
        for name in servers:
            self.assert_lossless(ran, name)
        told = ran.endpoint("ngram")
        self.assertEqual((status, told["engine"], told["engine_version"], told["model"]), (200, "vllm", json.loads(version)["version"], MODEL))
        self.assertEqual((told["server"]["context_tokens"], told["server"]["speculating"]), (1024, True))
        self.assertEqual(told["server"]["speculation"], {"method": "ngram", "draft_tokens": 4, "drafter": None})
        self.assertGreater(told["server"]["kv_cache_tokens"], 1024)
        self.assertFalse(ran.endpoint("baseline")["server"]["speculating"])
        self.assertEqual(ran.endpoint("draft")["server"]["speculation"]["draft_tokens"], 3)
        self.assertGreater(ran.endpoint("draft")["acceptance"]["acceptance_rate"], 0.9)     # the target itself
        self.assertGreater(told["acceptance"]["draft_tokens"], 0)
        self.assert_times_agree(ran)

    def assert_times_agree(self, ran):
        """Our stamps against the server's own: time to first token, and from there to the last."""
        replies = [reply for reply in ran.replies("ngram") if (reply.get("engine_timings") or {}).get("generation_time_ms")]
        self.assertTrue(replies, "the server told no times")
        late = median_of(reply["first_s"] - reply["sent_s"] - reply["engine_timings"]["time_to_first_token_ms"] / 1000 for reply in replies)
        ours = median_of(reply["last_s"] - reply["first_s"] for reply in replies if reply["finish_reason"] == "length")
        theirs = median_of(reply["engine_timings"]["generation_time_ms"] / 1000 for reply in replies if reply["finish_reason"] == "length")
        self.note(f"  ngram: TTFT {late * 1000:.1f} ms above the server's, first to last token {ours * 1000:.0f} ms against its {theirs * 1000:.0f} ms")
        self.assertGreater(late, -0.001)
        self.assertLess(late, LATE_S)
        self.assertAlmostEqual(ours, theirs, delta=LATE_SHARE * theirs)

    def test_suffixes_remember(self):
        """The same prompts at a second level look far better than prompts of its own: that is said, and is why each has its own."""
        server = suffix()
        for name in ("own", "shared"):
            (self.folder / f"{name}.txt").write_text("".join(f"{line} ({name})\n" for line in (
                "Name three colours of the sea.", "Describe a cat in one sentence.", "Write two lines about bread.", "Say what a clock does.")))
        levels = ("--concurrency", "1,2", "--max-tokens", "24", "--warmup", "0")
        self.tool("--baseline-url", server.url, "--prompts", "own.txt", "--labbook", "own.md", *levels)
        _, err = self.tool("--baseline-url", server.url, "--prompts", "shared.txt", "--labbook", "shared.md", *levels, "--share-prompts")
        self.assertIn("Every level asks the same prompts again", " ".join(err.split()))
        rates = {}
        for name in ("own", "shared"):
            for record in self.records(f"{name}.md"):
                rates[name, record["concurrency"]] = record["acceptance"]["tokens_per_target_pass"]
        self.note(f"  tokens a target pass at (prompts, level): {rates}")
        self.assertGreater(rates["shared", 2], 1.5 * rates["shared", 1])
        self.assertGreater(rates["shared", 2], 1.2 * rates["own", 2])

    def test_two_api_servers(self):
        """Two processes in front of one engine: their page holds the sums, and nothing is counted twice."""
        with vllm_server(*speculative(NGRAM, "--per-request-spec-decode-metrics", "summary", "--api-server-count", "2")) as server:
            before = server.counters()
            ran = self.measure(baseline(), *EXACT, "--concurrency", "2", two=server)
            moved = self.moved(before, server)
        self.assert_counts_agree(ran, "two", moved, concurrency=2)
        self.assertIn(ran.comparison("two", 2)["verdict"]["answers"], ("identical", "rounding only", "cannot tell"))


class Bfloat16(VllmTest):
    """Where rounding is large: what differs is a near tie, and is told as one."""

    def test_ngram(self):
        """Forks, if there are any, lie within what rounding does on this very pair."""
        with vllm_server(dtype="bfloat16") as base, vllm_server(*speculative(NGRAM), dtype="bfloat16") as server:
            ran = self.measure(base, "--max-tokens", "48", "--warmup", "1", "--ties", "always", ngram=server)
        self.assert_lossless(ran, "ngram")
        self.assertIsNotNone(ran.comparison("ngram")["ruler"])
        self.note(f"  ruler {ran.comparison('ngram')['ruler']}")
        self.assertEqual(ran.endpoint("ngram")["acceptance"]["source"], "metrics counters")
