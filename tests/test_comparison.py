"""Section 9: where two answers part, what kind of parting it is, and whether an answer is right."""
from __future__ import annotations

import hashlib
import json
import time
import unittest
from pathlib import Path

import measure_speculative as ms

CASES = Path(__file__).parent / "data" / "cases"


def case(name):
    return json.loads((CASES / name).read_text(encoding="utf-8"))


def reply(text="", prompt_id="p1", **more):
    return ms.Reply(prompt_id=prompt_id, content=text, **more)


def a_pass(texts, label="x", **more):
    return ms.Pass(label, "w", 1, tuple(reply(text, key) for key, text in texts.items()), 1.0, **more)


class CommonPrefix(unittest.TestCase):
    def test_every_length(self):
        for length in range(9):
            self.assertEqual(ms.common_prefix("abcdefgh"[:length] + "X", "abcdefgh"[:length] + "Y"), length)
        self.assertEqual(ms.common_prefix("abc", "abc"), 3)
        self.assertEqual(ms.common_prefix("abc", "abcd"), 3)
        self.assertEqual(ms.common_prefix("", "a"), 0)
        self.assertEqual(ms.common_prefix((1, 2, 3), (1, 2, 4)), 2)

    def test_a_megabyte_takes_no_time(self):
        started = time.perf_counter()
        long = "word " * 200_000
        self.assertEqual(ms.differ(reply(long + "a"), reply(long + "b")).first_char, 1_000_000)
        self.assertLess(time.perf_counter() - started, 2.0)


class PublishedCases(unittest.TestCase):
    def test_18_forks_in_bytes_and_characters(self):
        prompts = case("18-tie-fork.json")["prompts"]
        first = a_pass({key: texts["baseline_1"] for key, texts in prompts.items()})
        again = a_pass({key: texts["baseline_2"] for key, texts in prompts.items()})
        other = a_pass({key: texts["spec"] for key, texts in prompts.items()})
        self.assertEqual((ms.agree(first, again).identical, ms.agree(first, again).pairs), (3, 4))
        agreement = ms.agree(first, other)
        self.assertEqual((agreement.identical, agreement.pairs), (2, 4))
        p1, p3 = agreement.differences
        self.assertEqual((p1.prompt_id, p1.kind, p1.first_byte, p1.prefix_share), ("p1", "fork", 60, 0.5))
        self.assertEqual((p3.first_char, p3.first_byte), (13, 15))      # two umlauts before it: two bytes more
        self.assertAlmostEqual(agreement.prefix_agreement, (0.5 + 1 + 13 / 19 + 1) / 4)

    def test_19_loop(self):
        runs = case("19-loop.json")
        first, spec = (reply(runs[name]["text"], finish_reason=runs[name]["finish_reason"],
                             completion_tokens=runs[name]["completion_tokens"]) for name in ("baseline_1", "spec"))
        difference = ms.differ(first, spec)
        self.assertEqual((difference.kind, difference.first_byte), ("loop", 18))
        self.assertEqual(difference.detail, "tail repeats (period 13), 42 copies; stop -> length, 27 -> 512 tokens")
        self.assertEqual(difference.finish_reasons, ("stop", "length"))

    def test_20_another_requests_text(self):
        texts = case("20-cross-sequence.json")
        one = ms.agree(a_pass(texts["baseline"]["c1"]), a_pass(texts["spec"]["c1"]))
        four = ms.agree(a_pass(texts["baseline"]["c4"]), a_pass(texts["spec"]["c4"]))
        self.assertEqual((one.identical, four.identical, four.pairs), (4, 2, 4))
        p2, p3 = four.differences
        self.assertEqual((p2.kind, p2.first_byte, p2.detail), ("foreign text", 8, "as in the baseline's answer to p3"))
        self.assertEqual((p3.kind, p3.detail), ("foreign text", "as in the baseline's answer to p4"))
        self.assertEqual(ms.agree(a_pass(texts["baseline"]["c4"]), a_pass(texts["baseline"]["c4_again"])).identical, 4)

    def test_21_past_the_stop(self):
        runs = case("21-past-stop.json")
        difference = ms.differ(*(reply(runs[name]["text"], finish_reason=runs[name]["finish_reason"])
                                 for name in ("baseline", "spec")))
        self.assertEqual((difference.kind, difference.first_byte, difference.prefix_share), ("surplus", 30, 1.0))
        self.assertEqual(difference.detail, "13 surplus bytes: continues past the stop; stop -> length")


class Kinds(unittest.TestCase):
    def kind(self, baseline, other):
        return ms.differ(baseline, other).kind

    def test_equal_is_none(self):
        self.assertIsNone(ms.differ(reply("a"), reply("a")))

    def test_reasoning_is_compared_too(self):
        difference = ms.differ(reply("42", reasoning="six by seven"), reply("42", reasoning="six by eight"))
        self.assertEqual((difference.channel, difference.first_char), ("reasoning", 7))
        self.assertAlmostEqual(difference.prefix_share, 7 / 14)     # of 12 characters of reasoning and 2 of content

    def test_a_byte_inside_a_character(self):
        difference = ms.differ(reply("aé"), reply("aè"))     # C3 A9 against C3 A8
        self.assertEqual((difference.first_char, difference.first_byte), (1, 2))

    def test_bytes_that_are_no_utf8(self):
        self.assertEqual(ms.differ(reply("ok \udcff!"), reply("ok \udcff?")).first_byte, 4)     # one raw byte FF
        self.assertIsNotNone(ms.differ(reply("\ud83d"), reply("x")))        # half a surrogate pair from JSON

    def test_the_baseline_cut_by_its_limit_has_no_stop_to_pass(self):
        self.assertEqual(self.kind(reply("abc", finish_reason="length"), reply("abcd", finish_reason="length")), "fork")

    def test_the_other_stops_first(self):
        difference = ms.differ(reply("One. Two.", finish_reason="stop"), reply("One.", finish_reason="stop"))
        self.assertEqual((difference.kind, difference.detail), ("surplus", "ends 5 bytes before the baseline"))
        self.assertLess(difference.prefix_share, 1)

    def test_empty(self):
        self.assertEqual(self.kind(reply("a"), reply("")), "empty")

    def test_special_tokens(self):
        for mark in ("<|im_end|>", "</s>", "<|eot_id|>", "<end_of_turn>", "[INST]", "</think>"):
            self.assertEqual(self.kind(reply("Yes."), reply(f"Yes.{mark}")), "special tokens", mark)
        self.assertEqual(self.kind(reply("ends with </s>."), reply("ends in </s>.")), "fork")

    def test_tool_calls(self):
        def call(arguments, finish="tool_calls", name="look"):
            return reply("", tool_calls=(ms.ToolCall(name, arguments),), finish_reason=finish)
        whole = call('{"city": "Ulm"}')
        self.assertEqual(self.kind(whole, call("")), "lost arguments")
        self.assertEqual(self.kind(whole, call('{"city": "Ul')), "lost arguments")
        self.assertEqual(self.kind(whole, call('{"city": "Ul', "length")), "fork")      # cut by the limit, honestly
        self.assertEqual(self.kind(whole, call('{"city": "Ulm" }')), "fork")
        self.assertEqual(self.kind(whole, call("", name="other")), "fork")      # another call has other arguments
        self.assertEqual(self.kind(whole, reply("I would look it up.")), "channel")
        difference = ms.differ(whole, call('{"city": "Bonn"}'))
        self.assertEqual((difference.channel, difference.first_char), ("tool_calls", len('look({"city": "')))

    def test_a_loop_that_the_baseline_has_too_is_none(self):
        here, there = "Once: " + "na na na. " * 8, "Twice: " + "na na na. " * 8
        self.assertEqual(self.kind(reply(here), reply(there)), "fork")

    def test_smallest_period(self):
        self.assertEqual(ms.tail_loop("x" + "ab" * 40), ms.Loop("ab", 40))
        self.assertEqual(len(ms.tail_loop("start " + "one two two three, " * 6).unit), len("one two two three, "))
        self.assertIsNone(ms.tail_loop("ha ha ha"))
        self.assertIsNone(ms.tail_loop("All work and no play. " * 3))

    def test_stock_phrases_are_nobodys(self):
        others = [reply("Take a coat. Let me know if you have any questions.", "p2")]
        self.assertEqual(ms.differ(reply("It will rain over most of the north today."),
                                   reply("It will rain over most of the north. Let me know if you have any questions."),
                                   others).kind, "fork")

    def test_short_answers_are_everybodys(self):
        self.assertEqual(ms.differ(reply("Yes, I think so."), reply("No, it is not."), [reply("No, it is not.", "p2")]).kind, "fork")

    def test_a_piece_dropped_or_doubled(self):
        self.assertIn("'ban' is missing", ms.differ(reply("an urban myth"), reply("an ur myth")).detail)
        self.assertIn("is doubled", ms.differ(reply("an urban myth"), reply("an ururban myth")).detail)

    def test_token_ids_are_a_detail(self):
        self.assertIsNone(ms.differ(reply("ab", token_ids=(1, 2)), reply("ab", token_ids=(3,))))
        self.assertIn("token 2", ms.differ(reply("ab", token_ids=(1, 2)), reply("ac", token_ids=(1, 3))).detail)


class WithoutTexts(unittest.TestCase):
    def kept(self, text, **more):
        digests = {channel: ms.digest_of(text if channel == "content" else "") for channel in ms.CHANNELS}
        return ms.Reply("p1", content=None, reasoning=None, tool_calls=None, digests=digests, **more)

    def test_digest(self):
        self.assertEqual(ms.digest_of("Ä"), {"sha256": hashlib.sha256(b"\xc3\x84").hexdigest(), "bytes": 2, "chars": 1})

    def test_equality_is_all_that_is_known(self):
        self.assertIsNone(ms.differ(self.kept("a"), self.kept("a")))
        self.assertIsNone(ms.differ(self.kept("a"), reply("a")))
        difference = ms.differ(self.kept("a"), self.kept("b"))
        self.assertEqual((difference.kind, difference.first_byte, difference.channel), ("fork", None, "content"))

    def test_no_prefix_agreement_is_invented(self):
        first, other = (ms.Pass("x", "w", 1, (self.kept(text),), 1.0) for text in "ab")
        agreement = ms.agree(first, other)
        self.assertEqual((agreement.pairs, agreement.identical, agreement.prefix_agreement), (1, 0, None))


class Pairs(unittest.TestCase):
    def test_by_prompt_and_repeat_never_by_position(self):
        first = ms.Pass("baseline", "w", 1, (reply("one", "a"), reply("two", "b"), reply("three", "b", repeat=1)), 1.0)
        other = ms.Pass("x", "w", 1, (reply("three", "b", repeat=1), reply("two", "b"), reply("one", "a")), 1.0)
        self.assertEqual(ms.agree(first, other).identical, 3)

    def test_failures_and_silence_are_left_out_with_their_reason(self):
        first = ms.Pass("baseline", "w", 1, (reply("", "a"), reply("x", "b"), reply("y", "c"), reply("z", "d")), 1.0)
        other = ms.Pass("x", "w", 1, (reply("", "a"), reply("x", "b", error="HTTP 503"), reply("y", "c")), 1.0)
        agreement = ms.agree(first, other)
        self.assertEqual((agreement.pairs, agreement.identical), (1, 1))
        self.assertEqual(dict(agreement.incomparable), {
            "a": "both answers are empty: nothing to compare", "b": "other failed: HTTP 503", "d": "no answer from x"})

    def test_answers_cut_while_thinking_are_compared_by_their_reasoning(self):
        self.assertIsNone(ms.incomparable(reply("", reasoning="hm"), reply("", reasoning="hm")))

    def test_thousands_of_pairs(self):
        texts = {f"p{number}": f"{number} " + " ".join(str(number * word) for word in range(60)) for number in range(1000)}
        started = time.perf_counter()
        agreement = ms.agree(a_pass(texts), a_pass({key: text[:50] + "!" + text[50:] for key, text in texts.items()}))
        self.assertEqual(len(agreement.differences), 1000)
        self.assertLess(time.perf_counter() - started, 5.0)


class Grades(unittest.TestCase):
    def grade(self, answer, text, workload="math", **more):
        return ms.grade(ms.Prompt("p1", workload, (), answer=answer, **more), reply(text))

    def test_the_last_number_counts(self):
        for text in ("18 + 24 = 42", "#### 42", "The total is $42.", "**42**", "42.00", "It is \\boxed{42}.", "42 %"):
            self.assertIs(self.grade("42", text), True, text)
        for text in ("42 or 43", "none", "", "-42", "4.2", "1, 2, 3"):
            self.assertIs(self.grade("42", text), False, text)

    def test_thousands_and_signs(self):
        self.assertIs(self.grade("1,234", "so 1234 apples"), True)
        self.assertIs(self.grade("1234", "so $1,234."), True)
        self.assertIs(self.grade("1234", "1{,}234"), True)
        self.assertIs(self.grade(-3.5, "−3.50"), True)
        self.assertIs(self.grade("5", "10-5"), True)        # a range, no minus

    def test_behind_the_hashes(self):
        self.assertIs(self.grade("7", "work\n#### 7"), True)

    def test_closed_questions_are_answered_in_a_sentence(self):
        text = "Neil Armstrong did in 1969, with Apollo 11."
        self.assertIs(self.grade("1969", text, "closed"), True)
        self.assertIs(self.grade("1969", text, "builtin", category="closed"), True)
        self.assertIs(self.grade("1969", text, "math"), False)

    def test_words_whole_and_in_any_case(self):
        self.assertIs(self.grade("Paris", "It is paris."), True)
        self.assertIs(self.grade("Paris", "Comparison"), False)
        self.assertIs(self.grade(["H2O", "water"], "Water, of course"), True)
        self.assertIs(self.grade("New York", "in New\nYork"), True)

    def test_tool_calls(self):
        tools = ({"type": "function", "function": {"name": "look", "parameters": {"required": ["city"]}}},)
        prompt = ms.Prompt("p1", "agent", (), tools=tools, answer={"function": "look", "arguments": {}})

        def grade(*calls):
            return ms.grade(prompt, reply("", tool_calls=tuple(ms.ToolCall(*call) for call in calls)))
        self.assertIs(grade(("look", '{"city": "Ulm"}'), ("other", "")), True)
        self.assertIs(grade(("look", '{"town": "Ulm"}')), False)
        self.assertIs(grade(("look", '{"city": ')), False)
        self.assertIs(grade(("look", '["city"]')), False)
        self.assertIs(grade(("find", '{"city": "Ulm"}')), False)
        self.assertIs(grade(), False)

    def test_what_cannot_be_graded_is_none(self):
        self.assertIsNone(self.grade(None, "42"))
        self.assertIsNone(ms.grade(ms.Prompt("p1", "math", (), answer="4"), reply("4", error="cut off")))
        self.assertIsNone(ms.grade(ms.Prompt("p1", "math", (), answer="4"), ms.Reply("p1", content=None)))

    def test_accuracy(self):
        prompts = {key: ms.Prompt(key, "math", (), answer=answer) for key, answer in (("a", "1"), ("b", "2"), ("c", None))}
        replies = [reply("1", "a"), reply("3", "b"), reply("x", "c")]
        self.assertEqual(ms.accuracy(prompts, replies), (1, 2))
        self.assertIsNone(ms.accuracy(prompts, replies[2:]))


if __name__ == "__main__":
    unittest.main()
