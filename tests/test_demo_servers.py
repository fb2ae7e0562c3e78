"""Section Demo servers: the toy model, its steps (time is data: nothing here waits), what each dialect says, two real children."""
import hashlib
import http.client
import json
import pathlib
import sys
import unittest

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import measure_speculative as m  # noqa: E402

WEATHER = {"type": "function", "function": {
    "name": "get_weather", "description": "Weather of a city", "parameters": {
        "type": "object", "required": ["city", "unit"], "properties": {
            "city": {"type": "string"}, "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]}}}}}
MAIL = {"type": "function", "function": {"name": "send_mail", "description": "Send a message", "parameters": {
    "type": "object", "required": ["to"], "properties": {"to": {"type": "string"}}}}}
BODIES = {
    "copy": {"messages": [{"role": "user", "content": "Rename total to amount and give the function back:\n\n```python\n"
                           "def add_up(values):\n    total = 0\n    for value in values:\n        if value is None:\n"
                           "            continue\n        total += value\n    return total\n```"}]},
    "closed": {"messages": [{"role": "user", "content": "Which planet in the solar system has the most moons?"}]},
    "open": {"messages": [{"role": "user", "content": "Write a short story about a lighthouse keeper and the letter he found."}]},
    "math": {"messages": [{"role": "user", "content": "Tom has 12 boxes with 8 apples each. How many apples has he?"}]},
    "tool": {"messages": [{"role": "user", "content": "What is the weather in Paris, in celsius?"}], "tools": [MAIL, WEATHER]},
}
DIALECTS = {"llama.cpp": m.LlamaCppDialect, "vllm": m.VllmDialect, "sglang": m.SglangDialect}


def prompt_of(kind):
    return m.read_toy_prompt(BODIES[kind]["messages"], BODIES[kind].get("tools", ()))


def run(engine, sequences, concurrency=1):
    """Seconds until a closed loop of this concurrency has all sequences answered; a clock that only adds up."""
    now_s, waiting = 0.0, list(sequences)
    while waiting or engine.active:
        while waiting and len(engine.active) + len(engine.waiting) < concurrency:
            engine.waiting.append(waiting.pop(0))
        step = engine.step()
        begun_s, now_s = now_s, now_s + step.duration_s
        engine.deliver(step, begun_s)
    return now_s


def answers(drafter, kinds=tuple(BODIES), concurrency=1, max_tokens=64, **options):
    """(seconds, sequences) of these kinds of prompt, answered with this drafter."""
    options = m.DemoOptions(drafter=drafter, **options)
    sequences = [m.DemoSequence(prompt_of(kind), options, max_tokens) for kind in kinds]
    return run(m.DemoEngine(options), sequences, concurrency), sequences


def stream(dialect, **extra):
    """The chunks of one streamed chat and the dialect that sent them."""
    speaker = DIALECTS[dialect](m.DemoEngine(m.DemoOptions(dialect=dialect, drafter=extra.pop("drafter", "ngram"))))
    body = {**BODIES[extra.pop("kind", "copy")], "stream": True, "stream_options": {"include_usage": True}, "max_tokens": 64, **extra}
    request = speaker.read(json.dumps(body).encode())
    chunks = []
    request.sequence.heard = lambda emission: chunks.extend(speaker.events(request, emission))
    run(speaker.engine, [request.sequence])
    return chunks, speaker, request


def series(speaker):
    """{(name, position or None): value} of the metrics page, other labels summed."""
    totals = {}
    for name, _, labels, value in speaker.metrics():
        key = name, labels.get("position")
        totals[key] = totals.get(key, 0) + value
    return totals


class ToyModel(unittest.TestCase):
    def test_the_tokens_joined_are_the_text(self):
        for text in ("def f(x):\n\treturn  x_1 ** 2\r\n", "äöü — “naïve” 🚀 ½ ² １２", "", " \n\n  x", json.dumps(WEATHER)):
            self.assertEqual("".join(m.toy_tokens(text)), text)

    def test_each_kind_of_prompt_is_recognised(self):
        self.assertEqual({kind: prompt_of(kind).kind for kind in BODIES}, {kind: kind for kind in BODIES})

    def test_the_answers_are_the_same_everywhere(self):
        """Golden: hash() is salted in each process and random() may change between versions; this must do neither."""
        _, sequences = answers("none")
        digest = hashlib.sha256(json.dumps([sequence.tokens for sequence in sequences]).encode()).hexdigest()[:16]
        self.assertEqual(digest, "db42343475c2e6be")

    def test_a_question_is_taken_up_and_a_sum_is_right(self):
        _, (closed, math) = answers("none", ("closed", "math"))
        self.assertIn("has the most moons: ", "".join(closed.tokens))
        self.assertTrue("".join(math.tokens).endswith("So the answer is 96." + m.TOY_END))   # 12 * 8

    def test_a_planned_answer_returns_to_its_plan_after_a_foreign_token_and_free_prose_does_not(self):
        for kind, returns in (("copy", True), ("open", False)):
            straight, disturbed = m.ToyAnswer(prompt_of(kind)), m.ToyAnswer(prompt_of(kind))
            straight.advance(straight.peek())
            disturbed.advance(" intruder")
            self.assertEqual([straight.peek(i) for i in range(20)] == [disturbed.peek(i) for i in range(20)], returns, kind)

    def test_the_distribution_is_led_by_the_choice_and_sums_to_one(self):
        answer = m.ToyAnswer(prompt_of("open"))
        for _ in range(50):
            distribution = answer.distribution(1)
            self.assertEqual(distribution[0][1], answer.choose(1))
            self.assertEqual(len({token for _, token in distribution}), len(distribution))
            self.assertAlmostEqual(sum(2.718281828459045 ** nats for nats, _ in distribution), 1.0)
            self.assertGreater(distribution[0][0] - distribution[1][0], 0.0009)
            answer.advance(distribution[0][1])

    def test_rounding_flips_near_ties_only_and_only_with_the_width(self):
        flips = 0
        for number in range(300):
            prompt = m.read_toy_prompt([{"role": "user", "content": f"Write a story about door {number}."}])
            exact, rounded = m.ToyAnswer(prompt), m.ToyAnswer(prompt, rounding_nats=0.2)
            self.assertEqual(rounded.choose(1), rounded.choose(1))
            for width in (1, 2, 5, 16):
                if rounded.choose(width) != exact.choose(width):
                    flips += 1
                    margin = exact.distribution(1)[0][0] - exact.distribution(1)[1][0]
                    self.assertLess(margin, 0.4)        # at most the two scores' errors, 0.2 each, apart
        self.assertGreater(flips, 0)


class Steps(unittest.TestCase):
    def test_lossless_drafters_change_nothing(self):
        for concurrency in (1, 4):
            _, plain = answers("none", concurrency=concurrency)
            for drafter in ("ngram", "suffix", "draft"):
                _, drafted = answers(drafter, concurrency=concurrency)
                self.assertEqual([s.tokens for s in drafted], [s.tokens for s in plain], drafter)
                self.assertEqual([s.finish for s in drafted], [s.finish for s in plain], drafter)
                self.assertGreater(sum(s.accepted for s in drafted), 0, drafter)

    def test_the_broken_verifier_changes_something(self):
        kinds = tuple(BODIES) * 1
        _, plain = answers("none", kinds, max_tokens=400)
        _, lossy = answers("lossy", kinds, max_tokens=400)
        self.assertNotEqual([s.tokens for s in lossy], [s.tokens for s in plain])

    def test_a_request_of_t_tokens_with_a_accepted_takes_t_less_1_less_a_passes_after_its_prompt(self):
        for drafter in m.DEMO_DRAFTERS:
            for max_tokens in (1, 2, 7, 64):
                for sequence in answers(drafter, max_tokens=max_tokens)[1]:
                    self.assertEqual(len(sequence.verified), len(sequence.tokens) - 1 - sequence.accepted)
                    self.assertLessEqual(len(sequence.tokens), max_tokens)
                    self.assertTrue(all(accepted <= drafted for drafted, accepted in sequence.verified))

    def test_a_pass_costs_what_the_options_say(self):
        options = m.DemoOptions(pass_s=0.010, prompt_token_s=0.001)
        self.assertAlmostEqual(options.pass_seconds([[]]), 0.010)
        self.assertAlmostEqual(options.pass_seconds([[]], prompt_tokens=3), 0.013)
        self.assertAlmostEqual(options.pass_seconds([["a"] * 4]), 0.0108)            # 4 x 2 %
        self.assertAlmostEqual(options.pass_seconds([[]] * 11), 0.016)               # 10 x 6 %
        self.assertAlmostEqual(options.pass_seconds([["a"]] * 11), 0.0193)           # and 11 x (2 % + 10 x 0.1 %)
        small = m.DemoOptions(pass_s=0.010, drafter="draft")
        self.assertAlmostEqual(small.pass_seconds([["a"] * 4, ["a"]]), 0.01565)      # 1 + 6 % + 5 x 2.1 % + 4 x 10 %

    def test_copying_pays_prose_does_not_and_a_crowd_takes_the_gain(self):
        def speedup(kind, concurrency):
            kinds = (kind,) * concurrency
            return answers("none", kinds, concurrency)[0] / answers("ngram", kinds, concurrency)[0]
        self.assertGreater(speedup("copy", 1), 1.8)
        self.assertTrue(0.9 < speedup("open", 1) < 1.1)
        self.assertGreater(speedup("copy", 1), speedup("copy", 4))
        self.assertGreater(speedup("copy", 4), speedup("copy", 16))

    def test_suffix_remembers_earlier_answers(self):
        _, (first, again) = answers("suffix", ("open", "open"))
        self.assertGreater(again.accepted, 3 * max(1, first.accepted))

    def test_slots_limit_who_is_served(self):
        options = m.DemoOptions(slots=2)
        engine = m.DemoEngine(options)
        engine.waiting.extend(m.DemoSequence(prompt_of("open"), options, 3) for _ in range(5))
        self.assertEqual(len(engine.step().emissions), 2)
        self.assertEqual(len(engine.waiting), 3)

    def test_an_abandoned_request_leaves_the_engine_and_is_counted_once(self):
        options = m.DemoOptions()
        engine, sequence = m.DemoEngine(options), m.DemoSequence(prompt_of("open"), options, 50)
        engine.waiting.append(sequence)
        engine.step()
        engine.release(sequence)
        engine.release(sequence)
        self.assertIsNone(engine.step())
        self.assertEqual((sequence.finish, engine.counts["requests"], engine.counts["tokens", True]), ("abort", 1, 1))


class Dialects(unittest.TestCase):
    def test_llama_cpp_sends_a_chunk_a_token_and_drafts_in_timings(self):
        chunks, _, request = stream("llama.cpp")
        sequence = request.sequence
        self.assertEqual(chunks[0]["choices"][0]["delta"], {"role": "assistant", "content": None})
        self.assertEqual(set(chunks[1]), {"choices", "created", "id", "model", "system_fingerprint", "object"})
        texts = [chunk["choices"][0]["delta"]["content"] for chunk in chunks[1:-2]]
        self.assertEqual(texts, sequence.tokens[:-1])                   # all but the end, which has no text
        self.assertEqual(chunks[-2]["choices"], [{"finish_reason": "stop", "index": 0, "delta": {}}])
        last = chunks[-1]
        self.assertEqual(last["choices"], [])
        self.assertEqual(last["usage"]["completion_tokens"], len(sequence.tokens))
        self.assertEqual(last["usage"]["prompt_tokens_details"], {"cached_tokens": 0})
        self.assertEqual((last["timings"]["draft_n"], last["timings"]["draft_n_accepted"]), (sequence.drafted, sequence.accepted))
        self.assertGreater(sequence.accepted, 10)

    def test_llama_cpp_without_usage_puts_timings_on_the_finish_chunk_and_without_drafts_leaves_them_out(self):
        chunks, _, _ = stream("llama.cpp", drafter="none", stream_options={})
        self.assertEqual(chunks[-1]["choices"][0]["finish_reason"], "stop")
        self.assertIn("predicted_n", chunks[-1]["timings"])
        self.assertNotIn("draft_n", chunks[-1]["timings"])

    def test_llama_cpp_logprobs_of_drafted_tokens_are_not_real(self):
        chunks, _, request = stream("llama.cpp", logprobs=True, top_logprobs=2)
        shown = [chunk["choices"][0].get("logprobs") for chunk in chunks[1:-2]]
        self.assertEqual(sum(logprobs is None for logprobs in shown), request.sequence.accepted)
        entry = shown[0]["content"][0]
        self.assertEqual(set(entry), {"id", "token", "logprob", "bytes", "top_logprobs"})
        self.assertEqual(len(entry["top_logprobs"]), 2)

    def test_vllm_sends_a_chunk_a_step_with_the_finish_reason_on_the_last(self):
        chunks, _, request = stream("vllm", return_token_ids=True)
        sequence = request.sequence
        self.assertEqual(chunks[0]["choices"][0]["delta"], {"role": "assistant", "content": ""})
        self.assertEqual(len(chunks[0]["prompt_token_ids"]), len(sequence.prompt.tokens))
        steps = chunks[1:-1]
        self.assertEqual(len(steps), 1 + len(sequence.verified))
        self.assertEqual(sum(len(chunk["choices"][0]["token_ids"]) for chunk in steps), len(sequence.tokens))
        self.assertEqual("".join(chunk["choices"][0]["delta"]["content"] for chunk in steps), "".join(sequence.tokens[:-1]))
        self.assertEqual([chunk["choices"][0]["finish_reason"] for chunk in steps[-2:]], [None, "stop"])
        drafting = chunks[-1]["metrics"]["speculative_decoding"]
        self.assertEqual(drafting["num_accepted_draft_tokens"], sequence.accepted)
        self.assertEqual(drafting["num_draft_tokens"], sequence.drafted)
        self.assertEqual(sum(i * n for i, n in enumerate(drafting["acceptance_histogram"])), sequence.accepted)
        self.assertEqual(sum(drafting["acceptance_histogram"]), drafting["num_spec_steps"])

    def test_sglang_has_its_own_finish_chunk_and_its_own_acceptance_chunk(self):
        chunks, _, request = stream("sglang", return_spec_tokens_details=True)
        sequence = request.sequence
        self.assertEqual(chunks[0]["choices"][0]["delta"], {"reasoning_content": None, "role": "assistant", "content": ""})
        finish, acceptance, usage = chunks[-3:]
        self.assertEqual(finish["choices"][0]["delta"], {"reasoning_content": None})
        self.assertEqual((finish["choices"][0]["finish_reason"], finish["choices"][0]["matched_stop"]), ("stop", m.toy_token_id(m.TOY_END)))
        self.assertEqual((acceptance["choices"], acceptance["usage"]), ([], None))
        details = acceptance["sglext"]["spec_tokens_details"]
        self.assertEqual(details["spec_verify_ct"], len(sequence.verified))
        self.assertEqual(details["spec_num_correct_drafts"], sequence.accepted)
        self.assertEqual(details["spec_num_proposed_drafts"], 4 * len(sequence.verified))       # nominal: k = 4
        self.assertEqual(sum(details["spec_correct_drafts_histogram"]), details["spec_verify_ct"])
        self.assertEqual(usage["usage"]["completion_tokens"], len(sequence.tokens))
        self.assertFalse(any("sglext" in chunk for chunk in stream("sglang")[0]))               # not asked for
        self.assertFalse(any("sglext" in chunk for chunk in
                             stream("sglang", drafter="none", return_spec_tokens_details=True)[0]))

    def test_a_tool_call_arrives_by_name_and_pieces_of_arguments(self):
        for dialect in m.DEMO_DIALECTS:
            chunks, speaker, request = stream(dialect, kind="tool")
            calls = [call for chunk in chunks for choice in chunk["choices"] for call in choice["delta"].get("tool_calls", ())]
            self.assertEqual([call["function"].get("name") for call in calls if "id" in call], ["get_weather"])
            arguments = "".join(call["function"]["arguments"] for call in calls)
            self.assertEqual(json.loads(arguments), {"city": "Paris", "unit": "celsius"})
            reasons = [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"] if choice["finish_reason"]]
            self.assertEqual(reasons, ["tool_calls"])
            self.assertFalse(any("content" in choice["delta"] and choice["delta"]["content"]
                                 for chunk in chunks for choice in chunk["choices"]))

    def test_a_reply_that_is_not_streamed_says_the_same(self):
        for dialect in m.DEMO_DIALECTS:
            for kind in ("copy", "tool"):
                _, speaker, streamed = stream(dialect, kind=kind)
                request = speaker.read(json.dumps({**BODIES[kind], "max_tokens": 64}).encode())
                run(speaker.engine, [request.sequence])
                whole = json.loads(json.dumps(speaker.whole(request, ())))
                self.assertEqual(request.sequence.tokens, streamed.sequence.tokens)
                self.assertEqual(whole["usage"]["completion_tokens"], len(streamed.sequence.tokens))
                message = whole["choices"][0]["message"]
                if kind == "copy":
                    self.assertEqual(message["content"], "".join(streamed.sequence.tokens[:-1]))
                else:
                    self.assertEqual(message["tool_calls"][0]["function"]["name"], "get_weather")

    def test_the_counters_are_the_sums_over_the_requests(self):
        for dialect in m.DEMO_DIALECTS:
            options = m.DemoOptions(dialect=dialect, drafter="ngram")
            speaker = DIALECTS[dialect](m.DemoEngine(options))
            sequences = [m.DemoSequence(prompt_of(kind), options, 64) for kind in BODIES]
            run(speaker.engine, sequences, concurrency=3)
            totals = series(speaker)
            tokens, accepted = sum(len(s.tokens) for s in sequences), sum(s.accepted for s in sequences)
            drafts = sum(drafted > 0 for s in sequences for drafted, _ in s.verified)
            if dialect == "sglang":
                self.assertEqual(totals["sglang:generation_tokens_total", None], tokens)
                self.assertEqual(totals["sglang:spec_verify_calls_total", None], tokens - len(sequences) - accepted)
                continue
            prefix = {"llama.cpp": "llamacpp:", "vllm": "vllm:"}[dialect]
            name = {"llama.cpp": "tokens_predicted_total", "vllm": "generation_tokens_total"}[dialect]
            self.assertEqual(totals[prefix + name, None], tokens)
            self.assertEqual(totals[prefix + "spec_decode_num_accepted_tokens_total", None], accepted)
            self.assertEqual(totals[prefix + "spec_decode_num_draft_tokens_total", None], sum(s.drafted for s in sequences))
            self.assertEqual(totals[prefix + "spec_decode_num_drafts_total", None], drafts)
            by_position = [totals[prefix + "spec_decode_num_accepted_tokens_per_pos_total", str(i)] for i in range(4)]
            self.assertEqual(sum(by_position), accepted)
            self.assertEqual(by_position, sorted(by_position, reverse=True))

    def test_without_speculation_the_series_are_absent_or_nought_as_in_each_engine(self):
        spec = {dialect: {name: value for (name, _), value in series(stream(dialect, drafter="none")[1]).items()
                          if "spec" in name} for dialect in m.DEMO_DIALECTS}
        self.assertEqual(spec["vllm"], {})
        self.assertEqual(set(spec["llama.cpp"].values()), {0})
        self.assertNotIn("sglang:spec_verify_calls_total", spec["sglang"])

    def test_the_metrics_page_is_in_the_exposition_format(self):
        for dialect in m.DEMO_DIALECTS:
            for line in stream(dialect)[1].pages()["/metrics"]().splitlines():
                self.assertRegex(line, r'^# (HELP|TYPE) \S+ |^[a-z_]+:?[a-z_]+(\{(\w+="[^"]*",?)+\})? [0-9.e+-]+$')

    def test_identity_pages_tell_what_the_engines_tell(self):
        pages = {dialect: stream(dialect)[1].pages() for dialect in m.DEMO_DIALECTS}
        self.assertEqual([pages[dialect]["/v1/models"]()["data"][0]["owned_by"] for dialect in m.DEMO_DIALECTS],
                         ["llamacpp", "vllm", "sglang"])
        props = pages["llama.cpp"]["/props"]()
        self.assertEqual(props["default_generation_settings"]["params"]["speculative.types"], "none")   # as in the real one
        self.assertEqual((props["default_generation_settings"]["n_ctx"], props["total_slots"]), (4096, 16))
        slots = pages["llama.cpp"]["/slots"]()
        self.assertTrue(slots[0]["speculative"])
        self.assertEqual(slots[0]["params"]["speculative.types"], "none,ngram-simple")
        info = pages["sglang"]["/server_info"]()
        self.assertEqual((info["speculative_algorithm"], info["speculative_num_draft_tokens"]), ("NGRAM", 5))
        self.assertEqual(info["api_key"], "demo-secret")

    def test_refusals_have_each_engines_shape(self):
        for dialect in m.DEMO_DIALECTS:
            speaker = stream(dialect)[1]
            long = {"messages": [{"role": "user", "content": "word " * 5000}]}
            for payload in (b'{"messages": [', b"[]", b"{}", b'{"messages": []}', json.dumps(long).encode(),
                            json.dumps({**BODIES["open"], "max_tokens": "many"}).encode()):
                with self.assertRaises(m.DemoRefusal) as caught:
                    speaker.read(payload)
                error = caught.exception.body if dialect == "sglang" else caught.exception.body["error"]
                self.assertEqual((caught.exception.status, error["code"]), (400, 400))
                self.assertTrue(error["message"])
        with self.assertRaises(m.DemoRefusal) as caught:
            stream("vllm", model="another")
        self.assertEqual(caught.exception.status, 404)


class Children(unittest.TestCase):
    def test_a_child_answers_on_one_connection_and_ends_when_its_stdin_closes(self):
        with m.start_demo_server("vllm", "ngram", ("--pass-ms", "0.2")) as server:
            connection = http.client.HTTPConnection(server.url.split("/")[2], timeout=10)
            texts = []
            for _ in range(2):
                connection.request("POST", "/v1/chat/completions", json.dumps({**BODIES["copy"], "stream": True}))
                events = connection.getresponse().read().decode().split("\n\n")
                self.assertEqual(events[-2:], ["data: [DONE]", ""])
                chunks = [json.loads(event[6:]) for event in events[:-2]]
                texts.append("".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks))
            connection.request("POST", "/v1/chat/completions", json.dumps(BODIES["copy"]))
            texts.append(json.loads(connection.getresponse().read())["choices"][0]["message"]["content"])
            connection.request("GET", "/nowhere")
            response = connection.getresponse()
            self.assertEqual((response.status, response.read()), (404, b'{"detail":"Not Found"}'))
            connection.close()
            _, (expected,) = answers("none", ("copy",), max_tokens=4000)
            self.assertEqual(texts, ["".join(expected.tokens[:-1])] * 3)
            server.process.stdin.close()
            self.assertEqual(server.process.wait(5), 0)

    def test_a_child_that_cannot_start_is_an_error_with_a_sentence(self):
        with self.assertRaises(m.MeasureError):
            m.start_demo_server(program=(sys.executable, "-c", "raise SystemExit(3)"))


if __name__ == "__main__":
    unittest.main()
