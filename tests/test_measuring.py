"""Sections 6 to 8 and 16: whole measurements against fake servers that log what they were asked."""
import _thread
import json
import os
import time
import unittest
import unittest.mock
from pathlib import Path

import measure_speculative as ms
from tests.fakes import CASES, FakeServer, Speculation, default_answer, replay
from tests.run import ProgramTest, json_lines

DRAFTING = Speculation(k=4, accepts=(2, 0, 4, None), method="ngram")


def pair(engine="llama.cpp", **settings):
    return FakeServer(engine=engine, **settings), FakeServer(engine=engine, speculation=DRAFTING, **settings)


def questions(server):
    """The user texts that a server was asked, warm-ups left out, in order."""
    texts = [request.body["messages"][-1]["content"] for request in server.chats]
    return [text for text in texts if not text.startswith("Warm-up")]


class WholeRuns(ProgramTest):
    def pair(self, engine="llama.cpp", **settings):
        return tuple(self.starting(server) for server in pair(engine, **settings))

    def test_the_lessons_keys_and_ours(self):
        base, spec = self.pair()
        outcome = self.measure(base, spec, arguments=("--limit", 4, "--label", "lesson"))
        self.assertEqual(outcome.code, 0, outcome.err)
        first, second = (outcome.endpoints(name)[0] for name in ("baseline", "s0"))
        for key in ("label base_url model requests completed failed first_error wall_s latency_s output_tokens output_tokens_per_s "
                    "tokens_counted_by_server server_timings_sample spec_metrics_delta lab engine engine_version max_tokens repeats "
                    "prompt_count recorded_at schema kind workload concurrency prompts_sha256 caveats tool_version run_file ttft_s tpot_s "
                    "e2el_s decode_tokens_per_s acceptance server interrupted").split():
            self.assertIn(key, first)
        self.assertEqual((first["label"], first["lab"], first["requests"], first["completed"]), ("lesson/baseline", "part-17/measure-speculative", 4, 4))
        self.assertEqual(set(first["latency_s"]), {"p50", "mean", "max"})
        self.assertEqual(first["acceptance"]["missing"], "speculation is off")
        counted = [chat.generation for chat in spec.chats][2:]      # the first two are warm-up
        told = second["acceptance"]
        for key in ("drafts", "draft_tokens", "accepted_tokens"):
            self.assertEqual(told[key], sum(getattr(one, key) for one in counted), key)
        self.assertEqual(second["output_tokens"], sum(one.completion_tokens for one in counted))
        comparison = outcome.comparisons[0]
        for key in ("baseline_tokens_per_s speculative_tokens_per_s text_comparison recorded_at baseline_label speculative_label throughput_ratio "
                    "decode_ratio exact_match prefix_agreement noise_floor verdict").split():
            self.assertIn(key, comparison)
        self.assertEqual(comparison["text_comparison"]["identical"], 4)
        self.assertEqual(comparison["verdict"]["answers"], "identical")
        self.assertEqual(ms.schema_problems(first) + ms.schema_problems(comparison), [])

    def test_acceptance_on_every_engine_is_what_the_fake_really_did(self):
        for engine in ("llama.cpp", "vllm", "sglang"):
            with self.subTest(engine):
                base, spec = self.pair(engine)
                outcome = self.measure(base, spec, arguments=("--limit", 3))
                told = outcome.endpoints("s0")[0]["acceptance"]
                counted = [chat.generation for chat in spec.chats][2:]
                self.assertEqual(told["accepted_tokens"], sum(one.accepted_tokens for one in counted), outcome.err)
                steps = [one.steps if engine == "sglang" else one.drafts for one in counted]     # SGLang counts every verify step
                self.assertEqual(told["drafts"], sum(step if isinstance(step, int) else len(step) for step in steps))
                self.assertIn("response", told["source"])

    def test_requests_are_greedy_and_neutral_in_each_engines_words(self):
        wanted = {"llama.cpp": {"cache_prompt": False, "repeat_penalty": 1.0, "min_p": 0.0}, "vllm": {"repetition_penalty": 1.0, "return_token_ids": True},
                  "sglang": {"return_spec_tokens_details": True}, "plain": {}}
        for engine, extras in wanted.items():
            server = self.starting(FakeServer(engine=engine))
            self.measure(server, arguments=("--limit", 1, "--no-think", "--extra-body", '{"top_k": 1}'))
            body = server.chats[-1].body
            with self.subTest(engine):
                for key, value in {"temperature": 0, "top_p": 1, "seed": 0, "max_tokens": 192, "stream": True, "top_k": 1,
                                   "stream_options": {"include_usage": True}, "chat_template_kwargs": {"enable_thinking": False}, **extras}.items():
                    self.assertEqual(body[key], value, key)
                if engine == "plain":
                    self.assertFalse({"cache_prompt", "repetition_penalty", "cache_salt", "return_token_ids"} & set(body))

    def test_every_request_of_a_prefix_caching_engine_starts_cold_and_alike(self):
        base, spec = self.pair("vllm")
        self.measure(base, spec, arguments=("--limit", 3, "--noise-floor", "always"))
        salts = [[chat.body["cache_salt"] for chat in server.chats] for server in (base, spec)]
        self.assertEqual(len(set(salts[0])), len(salts[0]))
        self.assertEqual([salt for salt in salts[1]], salts[0][:len(salts[1])])

    def test_load_kept_is_told_at_every_level(self):
        base, spec = self.pair(gap_s=0.005)
        outcome = self.measure(base, spec, arguments=("--prompts", self.prompt_file(8), "--concurrency", "1,4", "--max-tokens", 8))
        for record in outcome.endpoints() + outcome.endpoints("s0"):
            self.assertTrue(0.5 < record["load_kept"] <= 1.0, record["load_kept"])

    def test_servers_take_turns_prompt_by_prompt(self):
        base, spec = self.pair()
        self.measure(base, spec, arguments=("--limit", 4, "--warmup", 0))
        order = [name for _, name in sorted([(chat.at, "A") for chat in base.chats] + [(chat.at, "B") for chat in spec.chats])]
        self.assertEqual("".join(order), "ABBAABBA")
        base, spec = self.pair()
        self.measure(base, spec, arguments=("--limit", 4, "--warmup", 0, "--order", "sequential"))
        order = [name for _, name in sorted([(chat.at, "A") for chat in base.chats] + [(chat.at, "B") for chat in spec.chats])]
        self.assertEqual("".join(order), "AAAABBBB")

    def test_levels_have_prompts_of_their_own_the_same_on_every_server(self):
        base, spec = self.pair(gap_s=0.01)
        outcome = self.measure(base, spec, arguments=("--prompts", self.prompt_file(78), "--concurrency", "1,4,16", "--max-tokens", 8))
        self.assertEqual(outcome.code, 0, outcome.err)
        for server in (base, spec):
            self.assertEqual(len(questions(server)), 78)
            self.assertEqual(len(set(questions(server))), 78)
        self.assertEqual(sorted(questions(base)), sorted(questions(spec)))
        self.assertEqual(base.most_in_flight, 16)
        self.assertEqual([record["concurrency"] for record in outcome.comparisons], [1, 4, 16])
        self.assertEqual([record["prompts_sha256"] for record in outcome.endpoints()], [record["prompts_sha256"] for record in outcome.endpoints("s0")])

    def test_warm_up_is_outside_the_set_and_as_many_at_once_as_the_level(self):
        base, = (self.starting(FakeServer(gap_s=0.01)),)
        self.measure(base, arguments=("--prompts", self.prompt_file(8), "--concurrency", "8", "--max-tokens", 8))
        warm = [chat for chat in base.chats if chat.body["messages"][-1]["content"].startswith("Warm-up")]
        self.assertGreaterEqual(len(warm), 8)
        self.assertEqual(len(questions(base)), 8)

    def test_a_floor_is_measured_when_something_differs(self):
        base = self.starting(FakeServer())
        other = self.starting(FakeServer(speculation=DRAFTING, answer=lambda messages, body: "other words than those"))
        outcome = self.measure(base, other, arguments=("--prompts", self.prompt_file(6), "--concurrency", "1,2", "--max-tokens", 8))
        floors = outcome.endpoints("baseline", "floor")
        self.assertEqual([(record["concurrency"], record["requests"]) for record in floors], [(1, 3), (2, 3), (2, 3)])
        self.assertEqual(outcome.comparisons[0]["noise_floor"]["exact_match"], 1.0)
        self.assertEqual(outcome.comparisons[0]["exact_match"], 0.0)
        self.assertIn("differ", outcome.err)

    def test_no_floor_where_nothing_differs_or_none_is_wanted(self):
        base, spec = self.pair()
        self.assertEqual(self.measure(base, spec, arguments=("--limit", 2)).endpoints("baseline", "floor"), [])
        self.assertEqual(len(self.measure(base, spec, arguments=("--limit", 2, "--noise-floor", "always")).endpoints("baseline", "floor")), 1)

    def measured_fork(self, **of_the_other):
        """One answer of six forks by its last word; llama.cpp makes the logprobs of nearly all tokens up, since they were drafted."""
        def answer(messages, body):
            text = default_answer(messages, body)
            return text[:-1] + "!" if "number 3:" in str(messages) else text

        spec = self.starting(FakeServer(speculation=Speculation(4, (4,)), answer=answer, **of_the_other))
        outcome = self.measure(self.starting(FakeServer()), spec, arguments=("--prompts", self.prompt_file(6), "--noise-floor", "never"))
        return outcome.comparisons[0], spec

    def test_rounding_where_logprobs_are_made_up(self):
        """It is measured where the server goes on with the baseline's answer; each place is asked for one token."""
        moved = {"alternatives": lambda made, position: [(made.tokens[position].text, -0.1004), ("?", -6.0)]}
        comparison, spec = self.measured_fork(**moved)
        self.assertGreaterEqual(comparison["ruler"]["positions"], 30)
        self.assertAlmostEqual(comparison["ruler"]["p99_nats"], 0.0004)
        self.assertNotIn("makes logprobs up", str(comparison["caveats"]))
        begun = [chat.body for chat in spec.chats if chat.body["messages"][-1]["role"] == "assistant"]
        self.assertEqual({body["max_tokens"] for body in begun}, {1})
        self.assertEqual({body["cache_prompt"] for body in begun}, {False})

    def test_no_rounding_where_nothing_can_be_continued(self):
        with unittest.mock.patch.object(ms, "PLACES_CONTINUED", 0):
            comparison, _ = self.measured_fork()
        self.assertIn("makes logprobs up", str(comparison["caveats"]))
        self.assertIsNone(comparison["ruler"])

    def test_forks_that_were_asked_about_before_an_interruption(self):
        """Ctrl-C at the third of six: two margins are kept, and the run is concluded with them."""
        asked = []

        def answer(messages, body):
            if body.get("logprobs"):
                asked.append(messages[-1]["content"])
                if len(set(asked)) == 3:
                    _thread.interrupt_main()
                    time.sleep(0.2)
            return default_answer(messages, body)

        base = self.starting(FakeServer(answer=answer))
        spec = self.starting(FakeServer(speculation=DRAFTING, answer=lambda messages, body: default_answer(messages, body)[:-1] + "!"))
        outcome = self.measure(base, spec, arguments=("--prompts", self.prompt_file(6), "--noise-floor", "never"))
        self.assertEqual(outcome.code, 130)
        margins = [one["margin_nats"] for one in outcome.comparisons[0]["text_comparison"]["divergences"]]
        self.assertEqual([margin is not None for margin in margins], [True, True, False, False, False])

    def test_the_baseline_is_asked_once_about_a_prompt(self):
        """Not once for each configuration that forks there."""
        base = self.starting(FakeServer())
        others = [self.starting(FakeServer(speculation=DRAFTING, answer=lambda messages, body: default_answer(messages, body)[:-1] + "!")) for _ in range(3)]
        outcome = self.measure(base, *others, arguments=("--prompts", self.prompt_file(4), "--noise-floor", "never"))
        self.assertEqual(sum(bool(chat.body.get("logprobs")) for chat in base.chats), 4)
        for comparison in outcome.comparisons:
            self.assertTrue(all(one["margin_nats"] for one in comparison["text_comparison"]["divergences"]))

    def test_one_server_with_two_bodies_is_its_own_baseline(self):
        server = self.starting(FakeServer(speculation=DRAFTING))
        outcome = self.measure(server, ("on", server), arguments=("--limit", 2, "--baseline-body", '{"x_spec": 0}', "--speculative-body", 'on={"x_spec": 4}'))
        self.assertEqual(outcome.code, 0, outcome.err)
        asked = [chat.body["x_spec"] for chat in server.chats]
        self.assertEqual(asked[-4:], [0, 0, 4, 4])      # one after the other, so that counters stay apart
        halves = [outcome.endpoints(name)[0]["acceptance"]["draft_tokens"] for name in ("baseline", "on")]
        counted = [chat.generation.draft_tokens for chat in server.chats[-4:]]
        self.assertEqual(halves, [sum(counted[:2]), sum(counted[2:])])

    def test_failed_requests_shift_nothing(self):
        base, spec = self.pair()
        spec.script(lambda request: "number 1:" in str(request.body), then="status_429")
        outcome = self.measure(base, spec, arguments=("--prompts", self.prompt_file(4), "--max-tokens", 8))
        self.assertEqual(outcome.code, 1)
        record = outcome.endpoints("s0")[0]
        self.assertEqual((record["completed"], record["failed"]), (3, 1))
        self.assertIn("429", record["first_error"])
        comparison = outcome.comparisons[0]
        self.assertEqual((comparison["text_comparison"]["compared"], comparison["text_comparison"]["identical"]), (3, 3))

    def test_not_streamed(self):
        for engine in ("llama.cpp", "vllm", "sglang"):
            base, spec = self.pair(engine)
            outcome = self.measure(base, spec, arguments=("--limit", 2, "--no-stream"))
            record = outcome.endpoints("s0")[0]
            self.assertEqual((outcome.code, record["ttft_s"], record["tpot_s"]), (0, None, None), outcome.err)
            self.assertGreater(record["output_tokens_per_s"], 0)
            self.assertIsNotNone(record["acceptance"]["accepted_tokens"])

    def test_precision_stops_when_the_interval_is_narrow_enough(self):
        base, spec = (self.starting(FakeServer(gap_s=0.004, speculation=drafting)) for drafting in (None, Speculation(k=3, accepts=(3,))))
        outcome = self.measure(base, spec, arguments=("--prompts", self.prompt_file(60), "--max-tokens", 12, "--precision", "95%"))
        record = outcome.comparisons[0]
        self.assertLess(record["text_comparison"]["compared"], 60)
        self.assertEqual(record["text_comparison"]["compared"] % 6, 0)
        self.assertIn("precision", " ".join(record["verdict"]["reasons"]) + outcome.err)

    def test_json_lines_on_stdout_and_nothing_else(self):
        base, spec = self.pair()
        outcome = self.run_program("--baseline-url", base.url, "--speculative-url", spec.url, "--limit", 2, "--labbook", "-")
        self.assertEqual([record["kind"] for record in json_lines(outcome.out)], ["endpoint", "endpoint", "comparison"])
        self.assertEqual(json_lines(outcome.out)[1]["label"], "speculative-run/speculative")


class SavedRuns(ProgramTest):
    """One server at a time, put together afterwards: the numbers are those of a run with all of them."""

    def test_runs_from_files_equal_the_same_run_live(self):
        base = self.starting(FakeServer())
        others = [(f"k{k}", self.starting(FakeServer(speculation=Speculation(k=k, accepts=(k, 0))))) for k in range(1, 9)]
        live = self.measure(base, *others, arguments=("--prompts", self.prompt_file(6), "--concurrency", "1,2", "--max-tokens", 8, "--noise-floor", "always"))
        whole, _ = ms.read_run(live.run_file)
        parts = []
        for label in whole.servers:
            path = live.folder / f"{label}.jsonl"
            lines = [line for line in json_lines(Path(live.run_file).read_text())
                     if line["record"] in ("run", "prompt") or line.get("server", line.get("label")) == label]
            path.write_text("".join(json.dumps(line) + "\n" for line in lines))
            parts.append(str(path))
        outcome = self.run_program("compare", *parts, "--labbook", live.folder / "joined.md")
        self.assertEqual(outcome.code, 0, outcome.err)
        joined = ms.read_notebook(str(live.folder / "joined.md"))[0]
        leave_out = ("recorded_at", "run_file", "caveats")
        pairs = {(record["workload"], record["concurrency"], record["speculative_label"]): record for record in live.comparisons}
        self.assertEqual(len(joined), 16)
        for record in joined:
            other = pairs[record["workload"], record["concurrency"], record["speculative_label"]]
            for key in record:
                if key not in leave_out:
                    self.assertEqual(record[key], other[key], key)

    def test_the_baseline_from_a_run_file(self):
        base, spec = self.starting(FakeServer()), self.starting(FakeServer(speculation=DRAFTING))
        first = self.measure(base, arguments=("--limit", 3, "--label", "base"))
        second = self.measure(None, ("draft", spec), arguments=("--limit", 3, "--baseline-run", first.run_file))
        self.assertEqual(second.code, 0, second.err)
        self.assertEqual(second.comparisons[0]["text_comparison"]["identical"], 3)
        third = self.run_program("compare", first.run_file, second.run_file)
        self.assertIn("draft against baseline", third.out)

    def test_what_cannot_be_compared_is_refused_with_the_reason(self):
        base = self.starting(FakeServer())
        first = self.measure(base, arguments=("--limit", 2))
        for arguments, words in ((("--limit", 2, "--max-tokens", 9), "max_tokens"), (("--prompts", self.prompt_file(2)), "other prompts"),
                                 (("--limit", 2, "--seed", 3), "seed")):
            other = self.measure(base, arguments=arguments)
            outcome = self.run_program("compare", first.run_file, other.run_file)
            self.assertEqual(outcome.code, 2)
            self.assertIn(words, outcome.err)


class BeforeMeasuring(ProgramTest):
    def refused(self, *arguments, environment=None):
        outcome = self.run_program(*arguments, "--labbook", f"{self.new_folder()}/labbook.md", environment=environment)
        self.assertEqual(outcome.code, 2, outcome.err)
        self.assertNotIn("Traceback", outcome.err)
        self.assertIn("try:", outcome.err)
        return outcome.err

    def test_nobody_listens(self):
        server = FakeServer().start()
        url = server.url
        server.stop()
        self.assertIn("connection refused", self.refused("--baseline-url", url))

    def test_addresses_that_are_none(self):
        self.assertIn("http://[::1]:8000", self.refused("--baseline-url", "http://::1:8000"))
        self.assertIn("does not begin with", self.refused("--baseline-url", "ftp://h/"))
        self.assertIn("no such host", self.refused("--baseline-url", "http://no-such-host.invalid/v1"))

    def test_tls_and_plain_mixed_up(self):
        secure, plain = self.starting(FakeServer(tls=True)), self.starting(FakeServer())
        self.assertIn("https://", self.refused("--baseline-url", f"http://127.0.0.1:{secure.port}/v1"))
        self.assertIn("plain HTTP", self.refused("--baseline-url", f"https://127.0.0.1:{plain.port}/v1"))
        self.assertIn("--cafile", self.refused("--baseline-url", secure.url))

    def test_https_works_with_its_certificate(self):
        secure = self.starting(FakeServer(tls=True))
        outcome = self.measure(secure, arguments=("--limit", 2, "--cafile", secure.cafile))
        self.assertEqual((outcome.code, outcome.endpoints()[0]["completed"]), (0, 2), outcome.err)

    def test_keys(self):
        server = self.starting(FakeServer(key="sesame"))
        self.assertIn("SPEC_API_KEY", self.refused("--baseline-url", server.url))
        outcome = self.measure(server, arguments=("--limit", 1), environment={"SPEC_API_KEY": "sesame"})
        self.assertEqual(outcome.code, 0, outcome.err)
        outcome = self.measure(server, arguments=("--limit", 1, "--api-key-env", "OTHER"), environment={"OTHER": "sesame"})
        self.assertEqual(outcome.code, 0, outcome.err)

    def test_pages_that_are_no_api(self):
        server = self.starting(FakeServer())
        server.script("*", then="html_200")
        self.assertIn("HTML", self.refused("--baseline-url", server.url))
        server.script("*", then=replay("24d-404-html.http"))
        self.assertIn("404", self.refused("--baseline-url", server.url))

    def test_a_loading_server_is_waited_for(self):
        server = self.starting(FakeServer())
        server.script("*", ["loading"] * 2)
        outcome = self.measure(server, arguments=("--limit", 1))
        self.assertEqual(outcome.code, 0, outcome.err)
        self.assertIn("waiting", outcome.err)
        server.script("*", then="loading")
        self.assertIn("--ready-timeout", self.refused("--baseline-url", server.url, "--ready-timeout", "0.6"))

    def test_a_sequence_of_statuses(self):
        statuses = json.loads((Path(CASES) / "24f-sequence.json").read_text())["statuses_in_order"]
        server = self.starting(FakeServer())
        named = {503: "status_503", 429: "status_429", 200: "ok"}
        server.script("chat", ["loading", "loading"] + [named[status] for status in statuses[2:]])
        outcome = self.measure(server, arguments=("--prompts", self.prompt_file(7), "--warmup", 1))
        record = outcome.endpoints()[0]
        self.assertEqual((outcome.code, record["requests"], record["completed"], record["failed"]), (1, 7, 5, 2))

    def test_a_refused_parameter_is_dropped_for_both_servers(self):
        base = self.starting(FakeServer(refuses=("seed", "stream_options")))
        spec = self.starting(FakeServer(speculation=DRAFTING))
        outcome = self.measure(base, spec, arguments=("--limit", 2))
        self.assertEqual(outcome.code, 0, outcome.err)
        for server in (base, spec):
            for chat in server.chats[-2:]:
                self.assertFalse({"seed", "stream_options"} & set(chat.body))
        self.assertIn("'seed'", outcome.err)
        self.assertTrue(any("'seed'" in caveat["sentence"] for caveat in outcome.comparisons[0]["caveats"]))

    def test_a_server_that_takes_no_tools_says_so_before(self):
        server = self.starting(FakeServer(engine="vllm"))
        server.script(lambda request: bool(request.body) and "tools" in request.body, then=("status_500", {}))
        outcome = self.measure(server, arguments=("--prompt-set", "agent", "--limit", 1))
        self.assertIn("refuses prompts with tools", outcome.err)
        self.assertIn("--tool-call-parser", outcome.err)
        self.assertEqual(outcome.code, 1)

    def test_redirects_stay_on_the_host(self):
        server = self.starting(FakeServer())
        server.script("chat", ["redirect"])
        outcome = self.measure(server, arguments=("--limit", 2))
        self.assertEqual(outcome.code, 0, outcome.err)
        other = self.starting(FakeServer())
        server.script("chat", then=("redirect_other", {"to": other.url + "/chat/completions"}))
        self.assertIn(f"127.0.0.1:{other.port}", self.refused("--baseline-url", server.url))
        self.assertEqual(other.requests, [])

    def test_proxy_variables_are_ignored_and_said_once(self):
        variables = json.loads((Path(CASES) / "23-proxy-env.json").read_text())["env"]
        server = self.starting(FakeServer())
        outcome = self.measure(server, arguments=("--limit", 1), environment=variables)
        self.assertEqual(outcome.code, 0, outcome.err)
        self.assertEqual(outcome.err.count("Proxy variables"), 1)

    def test_what_cannot_be_kept_is_found_out_before(self):
        server = self.starting(FakeServer())
        folder = self.new_folder()
        outcome = self.run_program("--baseline-url", server.url, "--labbook", folder)
        self.assertEqual((outcome.code, server.chats), (2, []))
        outcome = self.run_program("--baseline-url", server.url, "--labbook", os.path.join(folder, "a", "\0", "b"))
        self.assertEqual((outcome.code, server.chats), (2, []))

    def test_prompt_files_that_are_none(self):
        server = self.starting(FakeServer())
        self.assertIn("cannot be read", self.refused("--baseline-url", server.url, "--prompts", "/no/such/file"))
        self.assertIn("--prompts FILE", self.refused("--baseline-url", server.url, "--prompt-set", "file"))


class Check(ProgramTest):
    def check(self, base, spec, *arguments):
        return self.run_program("check", "--baseline-url", base.url, "--speculative-url", spec.url, *arguments)

    def test_a_good_pair(self):
        base, spec = (self.starting(server) for server in pair())
        outcome = self.check(base, spec)
        self.assertEqual(outcome.code, 0, outcome.out)
        for words in ("llama.cpp", "ready to measure", "acceptance from", "4,096 tokens"):
            self.assertIn(words, outcome.out)
        self.assertEqual(base.chats + spec.chats, [])

    def test_a_draft_that_does_not_speculate(self):
        base, spec = self.starting(FakeServer()), self.starting(FakeServer())
        outcome = self.check(base, spec)
        self.assertEqual(outcome.code, 1)
        self.assertIn("does not speculate", outcome.out)
        self.assertIn("--spec-type", outcome.out)

    def test_a_baseline_that_speculates(self):
        base, spec = (self.starting(FakeServer(speculation=DRAFTING)) for _ in range(2))
        self.assertIn("speculates itself", self.check(base, spec).out)

    def test_metrics_that_are_off(self):
        for engine, flag in (("llama.cpp", "--metrics"), ("sglang", "--enable-metrics")):
            base, spec = (self.starting(server) for server in pair(engine, metrics=False))
            self.assertIn(flag, self.check(base, spec).out)

    def test_slots_context_and_unlike_servers(self):
        base = self.starting(FakeServer(context=64, slots=1))
        spec = self.starting(FakeServer(context=4096, slots=2, speculation=DRAFTING))
        outcome = self.check(base, spec, "--concurrency", 4)
        for words in ("another context per slot", "fewer than concurrency 4", "64 tokens of context"):
            self.assertIn(words, " ".join(outcome.out.split()))

    def test_secrets_in_identity_answers_are_dropped(self):
        from tests.fakes import CANARY
        for engine, more in (("sglang", {}), ("vllm", {"dev_mode": True})):
            base, spec = (self.starting(server) for server in pair(engine, **more))
            outcome = self.check(base, spec)
            run = self.measure(base, spec, arguments=("--limit", 1))
            everything = outcome.out + outcome.err + run.out + run.err + (run.folder / "labbook.md").read_text() + Path(run.run_file).read_text()
            self.assertNotIn(CANARY, everything)


if __name__ == "__main__":
    unittest.main()
