"""llama.cpp: a real llama-server without and with every drafting method that it has for plain weights.

Three counts of drafted and accepted tokens are held against each other, to the token: the timings of each response, the
counters of /metrics, and the lines that the server writes into its log after each request.
"""
import contextlib
import json
import re
import subprocess
import sys

from tests.engines import install
from tests.engines.measured import PROMPTS, TOOL, EngineTest, median_of, require
from tests.engines.servers import MODEL, llama_server

NGRAMS = {
    "ngram-simple": ("--spec-ngram-simple-size-n", "3", "--spec-ngram-simple-size-m", "8"),
    "ngram-map-k": ("--spec-ngram-map-k-size-n", "3", "--spec-ngram-map-k-size-m", "8"),
    "ngram-map-k4v": ("--spec-ngram-map-k4v-size-n", "3", "--spec-ngram-map-k4v-size-m", "8"),
    "ngram-mod": ("--spec-ngram-mod-n-match", "3", "--spec-ngram-mod-n-min", "2", "--spec-ngram-mod-n-max", "8"),
    "ngram-cache": (),
}
SHORT = ("--limit", "6", "--max-tokens", "24", "--warmup", "1")
BRIEF = ("--limit", "3", "--max-tokens", "12", "--warmup", "1")

# Client and server share the machine's cores, with whatever else runs: a stamp may be late by a turn of the scheduler.
LATE_S, LATE_SHARE = 0.1, 0.1

_shared = contextlib.ExitStack()


def setUpModule():
    require("llama.cpp")


def tearDownModule():
    _shared.close()


def drafting(*flags):
    """A server that drafts four tokens with the same weights in four bits."""
    return llama_server("--spec-type", "draft-simple", "-md", str(install.weights("q4_1.gguf")), "--spec-draft-n-max", "4", *flags)


class LlamaTest(EngineTest):
    """Tests that share one server without speculation."""

    baseline = None

    @classmethod
    def setUpClass(cls):
        if LlamaTest.baseline is None:
            LlamaTest.baseline = _shared.enter_context(llama_server())

    def assert_counts_agree(self, ran, name, server, logged_before):
        """What the responses, the record, /metrics and the server's log say of the timed requests is the same, to the token."""
        record, replies = ran.endpoint(name), ran.replies(name)
        self.assert_all_answered(record)
        drafted, accepted = (sum(reply["engine_timings"].get(key, 0) for reply in replies) for key in ("draft_n", "draft_n_accepted"))
        told, moved = record["acceptance"], record["spec_metrics_delta"]
        self.note_acceptance(name, told)
        logged = logged_tasks(server)[logged_before + 1:][:len(replies)]       # the first one is the warm-up
        self.assertEqual((told["draft_tokens"], told["accepted_tokens"]), (drafted, accepted))
        self.assertEqual((moved["llamacpp:spec_decode_num_draft_tokens_total"], moved["llamacpp:spec_decode_num_accepted_tokens_total"]),
                         (drafted, accepted))
        self.assertEqual((sum(task["drafted"] for task in logged), sum(task["accepted"] for task in logged)), (drafted, accepted))
        self.assertEqual(told["drafts"], moved["llamacpp:spec_decode_num_drafts_total"])
        self.assertEqual([reply["completion_tokens"] for reply in replies], [task["tokens"] for task in logged])
        self.assertEqual(record["output_tokens"], sum(task["tokens"] for task in logged))
        whole = server.counters()
        self.assertEqual(whole["llamacpp:tokens_predicted_total"], sum(task["tokens"] for task in logged_tasks(server)))
        self.assertEqual(whole["llamacpp:spec_decode_num_draft_tokens_total"], sum(task["drafted"] for task in logged_tasks(server)))
        if drafted:
            self.assertEqual(sum(told["accepted_by_position"]), accepted)
            self.assertAlmostEqual(told["acceptance_rate"], accepted / drafted, 6)
            self.assertIn("timings", told["source"])
            tokens = record["output_tokens"] - record["requests"]
            self.assertAlmostEqual(told["tokens_per_target_pass"], tokens / max(tokens - accepted, told["drafts"]), 6)

    def assert_times_agree(self, ran, name):
        """Our stamps against the server's own clock: prompt_ms ends when the first token is there, predicted_ms with the last."""
        replies = [reply for reply in ran.replies(name) if reply["finish_reason"] == "length"]      # else the last token is unseen
        late = [reply["first_s"] - reply["sent_s"] - reply["engine_timings"]["prompt_ms"] / 1000 for reply in replies]
        self.assertGreater(min(late), -0.001)
        self.assertLess(median_of(late), LATE_S)
        ours = median_of((reply["last_s"] - reply["first_s"]) / (reply["completion_tokens"] - 1) for reply in replies)
        theirs = median_of(reply["engine_timings"]["predicted_ms"] / 1000 / (reply["engine_timings"]["predicted_n"] - 1) for reply in replies)
        self.note(f"  {name}: TTFT {median_of(late) * 1000:.1f} ms above the server's prompt time, TPOT {ours * 1000:.2f} ms against its {theirs * 1000:.2f} ms")
        self.assertAlmostEqual(ours, theirs, delta=LATE_SHARE * theirs)


class Lossless(LlamaTest):
    """Methods that must not change the answers."""

    def test_off_alone(self):
        """One server without speculation: speed, and a reason why there is no acceptance."""
        logged = len(logged_tasks(self.baseline))
        ran = self.measure(self.baseline, *SHORT)
        record = ran.endpoint("baseline")
        self.assert_records_are_whole(ran.records)
        self.assert_counts_agree(ran, "baseline", self.baseline, logged)
        self.assert_times_agree(ran, "baseline")
        self.assertEqual(record["acceptance"]["missing"], "speculation is off")
        self.assertIsNone(record["acceptance"]["acceptance_rate"])
        self.assertEqual((record["engine"], record["engine_version"], record["model"]), ("llama.cpp", f"b{install.LLAMA_CPP}-sdist", MODEL))
        self.assertEqual((record["server"]["slots"], record["server"]["context_tokens"], record["server"]["speculating"]), (1, 1024, False))
        self.assertIn("6 of 6 answered", ran.out)

    def test_draft_model(self):
        """A draft model that is nearly always right."""
        with drafting() as server:
            out, _ = self.tool("check", "--baseline-url", self.baseline.url, "--speculative-url", server.url)
            self.assertIn("ready to measure", out)
            ran = self.measure(self.baseline, *SHORT, "--ties", "always", draft=server)
            self.assert_records_are_whole(ran.records)
            self.assert_counts_agree(ran, "draft", server, 0)
        self.assert_times_agree(ran, "draft")
        self.assert_lossless(ran, "draft")
        told = ran.endpoint("draft")
        self.assertEqual(told["server"]["speculation"]["method"], "draft-simple")
        self.assertGreater(told["acceptance"]["acceptance_rate"], 0.6)      # the same weights, rounded: .92 was seen
        self.assertGreater(told["acceptance"]["tokens_per_target_pass"], 2)
        # Drafted tokens come with made-up logprobs: rounding was measured where the server goes on with the baseline's answers.
        ruler = ran.comparison("draft")["ruler"]
        self.note(f"  ruler {ruler}")
        self.assertGreaterEqual(ruler["positions"], 30)
        self.assertTrue(0 < ruler["p99_nats"] < 0.02, ruler)        # 0.0026 was seen; another tokenization would show tenths

    def test_ngram_methods(self):
        """All n-gram methods beside each other, in one run."""
        with contextlib.ExitStack() as stack:
            running = {name.replace("-", "_"): stack.enter_context(llama_server("--spec-type", name, *flags)) for name, flags in NGRAMS.items()}
            # Answers long enough to repeat themselves: a poem's refrain, a sentence said thrice.
            ran = self.measure(self.baseline, "--limit", "4", "--max-tokens", "72", "--warmup", "1", **running)
            self.assert_records_are_whole(ran.records)
            for name, server in running.items():
                name = name.replace("_", "-")
                with self.subTest(name):
                    self.assert_counts_agree(ran, name, server, 0)
                    self.assertTrue(ran.endpoint(name)["server"]["speculating"])
                    self.assertEqual(ran.endpoint(name)["server"]["speculation"]["method"], name)
                    self.assert_lossless(ran, name)
        drafted = {name: ran.endpoint(name)["acceptance"]["draft_tokens"] for name in NGRAMS}
        for name in ("ngram-simple", "ngram-map-k", "ngram-mod"):
            self.assertGreater(drafted[name], 0, name)
        for name in NGRAMS:
            if not drafted[name]:
                self.assertEqual(ran.endpoint(name)["acceptance"]["missing"], "no drafts in this run")


class Traps(LlamaTest):
    """Servers that are not what they seem."""

    def assert_named(self, server):
        out, _ = self.tool("check", "--baseline-url", self.baseline.url, "--speculative-url", server.url, code=1)
        self.assertRegex(out, r"PROBLEM: speculative at \S+ does not\s+speculate")
        self.assertIn("--spec-type", out)
        self.assertIn("not ready", out)
        ran = self.measure(self.baseline, *BRIEF, idle=server)
        record = ran.endpoint("idle")
        self.assertEqual((record["acceptance"]["missing"], record["acceptance"]["accepted_tokens"]), ("speculation is off", 0))
        self.assertTrue(any("does not speculate" in caveat["sentence"] for caveat in record["caveats"]), record["caveats"])
        self.assertIn("does not speculate", ran.err)
        self.assertFalse(any("does not speculate" in caveat["sentence"] for caveat in ran.endpoint("baseline")["caveats"]))

    def test_draft_model_without_its_type(self):
        """-md alone loads a draft model and leaves it idle."""
        with llama_server("-md", str(install.weights("q4_1.gguf"))) as server:
            self.assert_named(server)

    def test_draft_model_of_another_vocabulary(self):
        """A draft model that does not fit: the server is healthy, and only its log and /slots tell."""
        with llama_server("--spec-type", "draft-simple", "-md", str(install.weights("stranger.gguf"))) as server:
            self.assert_named(server)

    def test_lossy_on_purpose(self):
        """Drafted tokens accepted at random: the answers are changed, also where a close draft model proposed them."""
        with llama_server("--spec-type", "ngram-simple", *NGRAMS["ngram-simple"], "--spec-synth-rates", "0.9,0.8,0.7,0.6,0.5,0.4,0.3,0.2") as far, \
                drafting("--spec-synth-rates", "0.8,0.5,0.3,0.1") as close:
            ran = self.measure(self.baseline, "--max-tokens", "40", "--warmup", "1", lossy=far, lossy_draft=close)
            self.assert_counts_agree(ran, "lossy", far, 0)
            self.assert_counts_agree(ran, "lossy-draft", close, 0)
        for name in ("lossy", "lossy-draft"):
            texts, verdict = ran.comparison(name)["text_comparison"], ran.comparison(name)["verdict"]
            self.note(f"  {name}: {texts['identical']} of {texts['compared']} identical, {verdict['answers']}: {verdict['reasons']}")
            self.assertEqual(verdict["answers"], "changed", name)
        out, _ = self.tool("compare", ran.run_file, "--fail-on", "changed", code=1)
        self.assertIn("CHANGED", out)

    def test_without_metrics(self):
        """No --metrics: how to turn them on is said, and acceptance comes from the responses all the same."""
        with drafting() as counted, llama_server(metrics=False) as baseline:
            self.assertEqual(baseline.get("/metrics")[0], 501)
            out, _ = self.tool("check", "--baseline-url", baseline.url, "--speculative-url", counted.url)
            self.assertIn("--metrics", out)
        with llama_server("--spec-type", "draft-simple", "-md", str(install.weights("q4_1.gguf")), "--spec-draft-n-max", "4", metrics=False) as server:
            ran = self.measure(self.baseline, *BRIEF, blind=server)
            logged = logged_tasks(server)[1:][:3]
        told = ran.endpoint("blind")["acceptance"]
        self.note_acceptance("blind", told)
        self.assertEqual(told["source"], "response timings")
        self.assertEqual((told["draft_tokens"], told["accepted_tokens"]), (sum(task["drafted"] for task in logged), sum(task["accepted"] for task in logged)))
        self.assertIsNone(told["drafts"])
        self.assertEqual(ran.endpoint("blind")["spec_metrics_delta"], {})
        self.assertTrue(any("--metrics" in caveat["remedy"] for caveat in ran.endpoint("blind")["caveats"]))


class Levels(LlamaTest):
    """More than one request at once."""

    def test_four_slots(self):
        """Concurrency 1 and 4 on servers with four slots, each level with prompts of its own."""
        with llama_server(slots=4) as baseline, drafting("-np", "4", "-c", "4096") as server:
            ran = self.measure(baseline, "--max-tokens", "24", "--warmup", "1", "--concurrency", "1,4", draft=server)
            self.assert_records_are_whole(ran.records)
            whole = server.counters()
            logged = logged_tasks(server)
        asked = {level: {reply["prompt_id"] for reply in ran.replies("draft", level)} for level in (1, 4)}
        self.assertEqual((len(asked[1]), len(asked[4]), asked[1] & asked[4]), (4, 4, set()))
        for level in (1, 4):
            record = ran.endpoint("draft", level)
            self.assert_all_answered(record)
            self.note_acceptance(f"draft at {level}", record["acceptance"])
            replies = ran.replies("draft", level)
            self.assertEqual(record["acceptance"]["accepted_tokens"], sum(reply["engine_timings"].get("draft_n_accepted", 0) for reply in replies))
            self.assertEqual(record["acceptance"]["accepted_tokens"], record["spec_metrics_delta"]["llamacpp:spec_decode_num_accepted_tokens_total"])
            self.assertEqual(record["server"]["slots"], 4)
            self.assert_lossless(ran, "draft", level)
        self.assertGreater(ran.endpoint("draft", 4)["load_kept"], 0.9)
        self.assertEqual(whole["llamacpp:tokens_predicted_total"], sum(task["tokens"] for task in logged))

    def test_too_few_slots(self):
        """More at once than there are slots: waiting is in TTFT, and that is said before."""
        out, _ = self.tool("check", "--baseline-url", self.baseline.url, "--concurrency", "1,4")
        self.assertRegex(" ".join(out.split()), "baseline answers 1 request at once, fewer than concurrency 4")


class Commands(LlamaTest):
    """The commands of the README and the issue, as written but for addresses and lengths."""

    def as_written(self, line, *more, code=0, **addresses):
        words = [addresses.get(word, word) for word in line.split()]
        self.assertEqual(words[:2], ["python3", "measure_speculative.py"])
        return self.tool(*words[2:], *more, code=code)

    def test_both_servers_and_the_baseline_alone(self):
        """The lesson's two commands."""
        few = ("--limit", "2", "--max-tokens", "12")        # twelve prompts of 192 tokens, twice, take minutes
        with drafting() as server:
            urls = {"http://127.0.0.1:8080/v1": self.baseline.url, "http://127.0.0.1:8081/v1": server.url}
            self.as_written("python3 measure_speculative.py --baseline-url http://127.0.0.1:8080/v1 --model local-chat --engine llama.cpp "
                            "--label baseline-no-draft --labbook labbook.md", *few, **urls)
            out, err = self.as_written(
                "python3 measure_speculative.py --baseline-url http://127.0.0.1:8080/v1 --speculative-url http://127.0.0.1:8081/v1 "
                "--model local-chat --max-tokens 192 --repeats 2 --label qwen3-8b-draft-0.6b --labbook labbook.md", *few, **urls)
            check, _ = self.as_written("python3 measure_speculative.py check --baseline-url http://127.0.0.1:8080/v1 "
                                       "--speculative-url http://127.0.0.1:8081/v1", **urls)
        records = self.records()
        self.assert_records_are_whole(records)
        self.assertEqual([record["label"] for record in records if record.get("purpose") != "floor"], [
            "baseline-no-draft/baseline", "qwen3-8b-draft-0.6b/baseline", "qwen3-8b-draft-0.6b/speculative", "qwen3-8b-draft-0.6b/comparison"])
        self.assertEqual({record["model"] for record in records}, {"local-chat"})
        self.assertEqual([record["requests"] for record in records if record.get("purpose") == "timed"], [2, 4, 4])
        self.assertIn("identical", out)
        self.assertIn("lists smollm2, not 'local-chat'", " ".join(err.split()))
        self.assertIn("ready to measure", check)

    def test_prompts_of_a_file(self):
        """One prompt a line."""
        (self.folder / "my-prompts.txt").write_text("Name a colour.\nName a river.\n", encoding="utf-8")
        self.as_written("python3 measure_speculative.py --baseline-url http://127.0.0.1:8080/v1 --model local-chat "
                        "--prompts my-prompts.txt --prompt-set file", "--max-tokens", "8", **{"http://127.0.0.1:8080/v1": self.baseline.url})
        record, = self.records()
        self.assertEqual((record["workload"], record["prompt_count"], record["completed"]), ("my-prompts", 2, 2))

    def test_labbook_into_a_pipe(self):
        """--labbook -: nothing but JSON lines on stdout (jq is not everywhere, so Python reads them)."""
        tool = subprocess.Popen([sys.executable, str(TOOL), "--baseline-url", self.baseline.url, "--prompts", str(PROMPTS), *BRIEF, "--labbook", "-"],
                                cwd=str(self.folder), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        reader = subprocess.run([sys.executable, "-c", "import json, sys\nfor line in sys.stdin: print(json.loads(line)['output_tokens_per_s'])"],
                                stdin=tool.stdout, stdout=subprocess.PIPE, check=True)
        tool.stdout.close()
        self.assertEqual(tool.wait(), 0)
        self.assertGreater(float(reader.stdout), 0)
        self.assertEqual(list(self.folder.iterdir()), [])

    def test_one_server_restarted_with_a_draft(self):
        """A machine that holds one server only: measure, restart with a draft, measure again; the run files are compared."""
        with llama_server() as server:
            first = self.measure(server, *SHORT, "--label", "before")
        with drafting() as server:
            alone = self.measure(server, *SHORT, "--label", "after")
            self.tool("--baseline-run", first.run_file, "--speculative-url", f"draft={server.url}", "--prompts", PROMPTS, *SHORT, "--label", "joined")
        joined = self.records()[len(first.records) + len(alone.records):]
        self.assert_records_are_whole(joined)
        record = next(record for record in joined if record["kind"] == "comparison")
        self.assertEqual((record["baseline_label"], record["speculative_label"], record["text_comparison"]["compared"]), ("baseline", "draft", 6))
        self.assertIn(record["verdict"]["answers"], ("identical", "rounding only", "cannot tell"))
        out, _ = self.tool("compare", first.run_file, alone.run_file, "--export-json", "summary.json")
        self.assertIn("after", out)
        self.assertTrue(json.loads((self.folder / "summary.json").read_text(encoding="utf-8")))
        self.assertEqual(alone.endpoint("baseline")["acceptance"]["accepted_tokens"],
                         next(record for record in joined if record["kind"] == "endpoint")["acceptance"]["accepted_tokens"])
        for verb in (("table", "labbook.md"), ("csv", "labbook.md"), ("breakeven", "labbook.md"), ("report", "labbook.md", "-o", "report.html")):
            self.tool(*verb)


def logged_tasks(server):
    """What the server wrote of each finished request, in order: tokens, drafted, accepted."""
    tasks = {}
    for line in server.log_text().splitlines():
        evaluated = re.search(r"task (\d+) \|\s+eval time =.*?/\s+(\d+) tokens", line)
        drafted = re.search(r"task (\d+) \| draft acceptance = .*?\(\s*(\d+) accepted /\s*(\d+) generated\)", line)
        if evaluated:
            tasks[evaluated[1]] = {"tokens": int(evaluated[2]), "drafted": 0, "accepted": 0}
        if drafted:
            tasks[drafted[1]].update(accepted=int(drafted[2]), drafted=int(drafted[3]))
    return list(tasks.values())
