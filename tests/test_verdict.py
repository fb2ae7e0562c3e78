"""Section 11: two words, and what led to them."""
from __future__ import annotations

import json
import math
import random
import unittest
from pathlib import Path

import measure_speculative as ms

CASES = Path(__file__).parent / "data" / "cases"


def case(name):
    return json.loads((CASES / name).read_text(encoding="utf-8"))


# --- Runs to judge


def sentence(number, words=24):
    """An invented answer of its own to each prompt."""
    rng = random.Random(number)
    return " ".join("".join(rng.choice("bdfgklmnprst") + rng.choice("aeiou") for _ in range(3)) for _ in range(words))


def forked(text, share, mark="X"):
    """The text up to this share of it, and something else from there on."""
    at = min(len(text) - 1, int(len(text) * share))
    return text[:at] + mark + text[at + 1:][::-1]


def a_server(label, speculation=None, cache=None):
    return ms.Server(label, "http://127.0.0.1:1/v1", "", (), "m", kv_cache_tokens=cache, speculation=speculation)


def a_run(prompts=12, speed=1.0, other=None, floor=None, concurrency=1, acceptance=None, speculation=None, cache=(None, None),
          categories=None, rulers=(), margins=(), answers=None, floor_concurrency=None, self_speed=1.0):
    """A run of one cell. `other` and `floor` map a prompt's number and the baseline's text to their texts."""
    names = list(categories or {None: speed})
    keys = {f"p{number}": names[number % len(names)] for number in range(prompts)}
    texts = {key: sentence(number) for number, key in enumerate(keys)}
    passes = [timed_pass("baseline", texts, {}, concurrency)]
    passes.append(timed_pass("spec", spoilt(texts, other), {key: (categories or {}).get(name, speed) for key, name in keys.items()},
                             concurrency, acceptance=acceptance or ms.Acceptance(missing="not asked")))
    if floor is not None:
        again = spoilt(texts, floor)
        passes.append(timed_pass("baseline", again, {key: self_speed for key in keys}, floor_concurrency or concurrency, "floor"))
    return ms.Run("test", "", {}, "", {"baseline": a_server("baseline", None, cache[0]),
                                       "spec": a_server("spec", speculation, cache[1])},
                  {key: ms.Prompt(key, "w", (), category=name, answer=answers) for key, name in keys.items()}, tuple(passes),
                  rulers=dict(rulers), margins=dict(margins))


def spoilt(texts, change):
    return {key: change(number, text) if change else text for number, (key, text) in enumerate(texts.items())}


def timed_pass(label, texts, speeds, concurrency, purpose="timed", acceptance=ms.Acceptance(missing="not asked")):
    """Every answer has 41 tokens, the first at once; 40 more take a second at speed 1."""
    replies, at = [], 0.0
    for number, (key, text) in enumerate(texts.items()):
        seconds = (1 + 0.01 * (number % 3)) / speeds.get(key, 1.0)
        replies.append(ms.Reply(key, sent_s=at, first_s=at, last_s=at + seconds, ended_s=at + seconds, completion_tokens=41,
                                content=text, finish_reason="stop"))
        at += seconds
    return ms.Pass(label, "w", concurrency, tuple(replies), at, purpose=purpose, acceptance=acceptance)


def cell_of(run):
    cell, = ms.compare_run(run)
    return cell


def word(run):
    return cell_of(run).verdict.answers


def some(share, every):
    """Forks every so-many-th answer at this share of its text."""
    return lambda number, text: forked(text, share) if number % every == 0 else text


RULER = ms.Ruler(319, 0.00001, 0.005, 0.02)


def margins_of(**nats):
    return {("spec", "w", 1, key, 0): value for key, value in nats.items()}


class Answers(unittest.TestCase):
    def test_identical(self):
        cell = cell_of(a_run())
        self.assertEqual(cell.verdict.answers, "identical")
        self.assertIn("12 of 12 answers are the same, byte for byte", cell.verdict.reasons[0])

    def test_near_ties_are_rounding(self):
        run = a_run(8, other=some(0.5, 4), rulers={"spec": RULER}, margins=margins_of(p0=0.004, p4=0.0))
        cell = cell_of(run)
        self.assertEqual(cell.verdict.answers, "rounding only")
        self.assertIn("2 of 2 forks asked about are near ties", cell.verdict.reasons[1])

    def test_tokens_far_below_are_a_change(self):
        run = a_run(26, other=some(0.5, 5), rulers={"spec": RULER},
                    margins=margins_of(p0=0.004, p5=2.5, p10=0.01, p15=1.2, p20=0.7, p25=3.0))
        self.assertEqual(word(run), "changed")
        self.assertIn("4 of 6 forks asked about take a token more than 0.15 nats below", cell_of(run).verdict.reasons[1])

    def test_one_fork_beyond_all_reach(self):
        self.assertEqual(word(a_run(8, other=some(0.5, 8), rulers={"spec": RULER}, margins=margins_of(p0=5.0))), "changed")

    def test_one_wide_fork_proves_nothing(self):
        run = a_run(8, other=some(0.5, 8), rulers={"spec": RULER}, margins=margins_of(p0=0.3))
        self.assertEqual(word(run), "cannot tell")

    def test_the_gpu_pair_that_was_seen(self):
        # Real vLLM, bfloat16, n-gram: three forks of ten at 0, 1/8 and 1/8 nat; p99 of rounding 0.079, max 0.117.
        run = a_run(10, other=some(0.4, 4), rulers={"spec": ms.Ruler(319, 0.00001, 0.079, 0.117)},
                    margins=margins_of(p0=0.0, p4=0.125, p8=0.125))
        self.assertEqual(word(run), "rounding only")

    def test_a_ruler_in_tenths_of_a_nat(self):
        run = a_run(12, other=some(0.5, 3), rulers={"spec": ms.Ruler(400, 0.1, 0.8, 2.0)}, margins=margins_of(p0=0.1))
        self.assertEqual(word(run), "changed")
        self.assertIn("these two servers do not compute the same function", cell_of(run).verdict.reasons[1])
        same = cell_of(a_run(12, rulers={"spec": ms.Ruler(400, 0.1, 0.8, 2.0)}))
        self.assertEqual(same.verdict.answers, "identical")
        self.assertIn("do not compute the same function", str(same.verdict.caveats[0]))

    def test_no_more_than_the_floor(self):
        run = a_run(26, other=some(0.5, 3), floor=lambda number, text: forked(text, 0.4, "Y") if number % 3 == 1 else text)
        cell = cell_of(run)
        self.assertEqual((cell.verdict.answers, cell.floor.identical, cell.floor_concurrency), ("rounding only", 17, 1))

    def test_far_beyond_the_floor(self):
        run = a_run(26, other=lambda number, text: forked(text, 0.5) if number % 5 else text, floor=some(0.5, 13))
        self.assertEqual(word(run), "changed")
        self.assertIn("McNemar, exact", cell_of(run).verdict.reasons[1])

    def test_a_floor_that_shows_nothing_is_no_yardstick(self):
        # Seen on real llama.cpp with one slot: the baseline equals itself 8 of 8 times, a lossless drafter 5 of 8.
        for floor in (lambda number, text: text, None):
            self.assertEqual(word(a_run(8, other=some(0.5, 3), floor=floor)), "cannot tell")

    def test_garbage_from_the_first_token_is_a_change_even_so(self):
        run = a_run(12, other=lambda number, text: forked(text, 0.02), floor=lambda number, text: text)
        self.assertEqual(word(run), "changed")

    def test_a_baseline_that_never_repeats_itself(self):
        run = a_run(26, other=some(0.5, 1), floor=lambda number, text: forked(text, 0.5, "Y"))
        self.assertEqual(word(run), "cannot tell")
        self.assertIn("disagrees with itself throughout", cell_of(run).verdict.reasons[1])

    def test_nothing_to_compare(self):
        self.assertEqual(word(a_run(4, other=lambda number, text: "")), "changed")      # all empty: damage
        run = a_run(4)
        silent = ms.replace(run, passes=tuple(ms.replace(one, replies=tuple(
            ms.replace(reply, content="") for reply in one.replies)) for one in run.passes))
        self.assertEqual(word(silent), "cannot tell")

    def test_warm_and_cold_prefix_cache(self):
        # Real SGLang at concurrency 1: the baseline equals itself in 8 of 20, speculation equals it in 10 to 12 of 20.
        floor = lambda number, text: forked(text, 0.4, "Y") if number % 5 < 3 else text       # noqa: E731
        for kept in (8, 10, 12):
            run = a_run(20, other=lambda number, text: text if number < kept else forked(text, 0.5), floor=floor)
            self.assertEqual(word(run), "rounding only")
        # With deterministic kernels it repeats itself 20 of 20 times, and speculation still equals it in 10 to 12.
        run = a_run(20, other=lambda number, text: text if number < 10 else forked(text, 0.5), floor=lambda number, text: text)
        self.assertEqual(word(run), "cannot tell")

    def test_repeats_serve_as_a_floor(self):
        run = a_run(4)
        base, spec = run.passes
        again = tuple(ms.replace(reply, repeat=1, content=reply.content[:-1] + "!") for reply in base.replies)
        cell = cell_of(ms.replace(run, passes=(ms.replace(base, replies=base.replies + again), spec)))
        self.assertEqual((cell.floor.pairs, cell.floor.identical, cell.self_ratio), (4, 0, None))

    def test_the_noisier_floor_counts(self):
        run = a_run(26, floor=some(0.5, 13))
        other = a_run(26, floor=some(0.5, 2), floor_concurrency=16)
        cell = cell_of(ms.replace(run, passes=run.passes + other.passes[2:]))
        self.assertEqual((cell.floor.identical, cell.floor_concurrency), (13, 16))
        self.assertIsNotNone(cell.self_ratio)

    def test_right_answers_lost(self):
        numbers = lambda good: lambda number, text: f"{text} so it is {7 if good(number) else 8}"       # noqa: E731
        run = a_run(30, other=numbers(lambda number: number < 18), answers="7")
        passes = list(run.passes)
        passes[0] = ms.replace(passes[0], replies=tuple(ms.replace(reply, content=f"{reply.content} so it is 7")
                                                        for reply in passes[0].replies))
        cell = cell_of(ms.replace(run, passes=tuple(passes)))
        self.assertEqual((cell.baseline_accuracy, cell.speculative_accuracy), ((30, 30), (18, 30)))
        self.assertEqual(cell.verdict.answers, "changed")
        self.assertIn("12 right answers became wrong and 0 wrong ones right", " ".join(cell.verdict.reasons))


class PublishedCases(unittest.TestCase):
    def run_of(self, baseline, spec, floor=None, **more):
        def texts(pairs, label, purpose="timed"):
            return ms.Pass(label, "w", 1, tuple(ms.Reply(key, content=text, **extra) for key, (text, extra) in pairs.items()), 1.0,
                           purpose=purpose)
        passes = [texts(baseline, "baseline"), texts(spec, "spec")] + ([texts(floor, "baseline", "floor")] if floor else [])
        return ms.Run("t", "", {}, "", {label: a_server(label) for label in ("baseline", "spec")}, {}, tuple(passes))

    def test_18_about_the_floor_and_too_small(self):
        prompts = case("18-tie-fork.json")["prompts"]
        sides = [{key: (texts[name], {"finish_reason": "stop"}) for key, texts in prompts.items()}
                 for name in ("baseline_1", "spec", "baseline_2")]
        verdict = cell_of(self.run_of(*sides)).verdict
        self.assertEqual(verdict.answers, "cannot tell")
        self.assertIn("about the noise floor, but 4 pairs are too small a sample", verdict.reasons[1])

    def test_19_a_loop_is_not_praised(self):
        sides = [{"p": (one["text"], {"finish_reason": one["finish_reason"], "completion_tokens": one["completion_tokens"]})}
                 for one in (case("19-loop.json")[name] for name in ("baseline_1", "spec", "baseline_2"))]
        verdict = cell_of(self.run_of(*sides)).verdict
        self.assertEqual((verdict.speed, verdict.answers), ("not comparable", "changed"))
        self.assertIn("period 13", verdict.reasons[1])

    def test_20_foreign_text(self):
        texts = case("20-cross-sequence.json")
        sides = [{key: (text, {}) for key, text in side.items()}
                 for side in (texts["baseline"]["c4"], texts["spec"]["c4"], texts["baseline"]["c4_again"])]
        verdict = cell_of(self.run_of(*sides)).verdict
        self.assertEqual(verdict.answers, "changed")
        self.assertIn("2 of 4 answers: foreign text", verdict.reasons[1])

    def test_21_past_the_stop(self):
        runs = case("21-past-stop.json")
        sides = [{"p": (runs[name]["text"], {"finish_reason": runs[name]["finish_reason"]})} for name in ("baseline", "spec")]
        self.assertEqual(cell_of(self.run_of(*sides)).verdict.answers, "changed")

    def test_one_loop_among_many_forks_may_be_the_models_own(self):
        # Seen on a real small model, without any fault: 13 forks of 20, one of which ends in a loop.
        def other(number, text):
            return text if number < 7 else forked(text, 0.5) + (" over and" * 12 if number == 9 else "")
        self.assertEqual(word(a_run(20, other=other, floor=lambda number, text: forked(text, 0.4, "Y") if number < 12 else text)),
                         "rounding only")


    def test_what_the_baseline_does_to_itself_is_no_damage(self):
        def loops(ends):
            return lambda number, text: forked(text, 0.5, ends[0]) + f" {ends} and" * 12 if number % 4 == 0 else text
        self.assertEqual(word(a_run(26, other=loops("over"), floor=lambda number, text: text)), "changed")
        self.assertEqual(word(a_run(26, other=loops("over"), floor=loops("under"))), "rounding only")

    def test_a_near_tie_can_lead_into_a_loop(self):
        def other(number, text):
            return forked(text, 0.5) + " over and" * 12 if number < 3 else text
        run = a_run(12, other=other, rulers={"spec": RULER})
        self.assertEqual(word(run), "changed")
        self.assertEqual(word(ms.replace(run, margins=margins_of(p0=0.001, p1=0.002, p2=0.0))), "rounding only")


class PublishedFigures(unittest.TestCase):
    """The tutorial's figures, entered as data: its text reads all of them as rounding, at the floor."""

    def passes_with(self, floor, others, prompts=26, seed=0):
        """Runs whose prefix agreement is each of `others` against a floor of `floor`, by fork places of one hazard."""
        for number, agreement in enumerate(others):
            run = a_run(prompts, other=self.cut(agreement, seed + number), floor=self.cut(floor, seed + 50))
            yield agreement, run

    @staticmethod
    def cut(agreement, seed):
        """Answers that fork at the quantiles of an exponential whose mean share of text is `agreement`, in shuffled order."""
        low, high = 1e-6, 100.0
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if (1 - math.exp(-middle)) / middle > agreement else (low, middle)
        places = [-math.log(1 - (place + 0.5) / 26) / low for place in range(26)]
        random.Random(seed).shuffle(places)
        return lambda number, text: text if places[number] >= 1 else forked(text, places[number], "XYZ"[seed % 3])

    def test_all_at_the_floor(self):
        for workload, floor, others in (("chat", 0.50, (0.51, 0.54, 0.57, 0.60, 0.63)), ("agent", 0.99, (0.98, 0.99, 1.0)),
                                        ("math", 0.73, (0.68, 0.70, 0.73, 0.75))):
            for agreement, run in self.passes_with(floor, others):
                cell = cell_of(run)
                self.assertAlmostEqual(cell.agreement.prefix_agreement, agreement, delta=0.03)
                self.assertIn(cell.verdict.answers, ("rounding only", "identical"), (workload, agreement, cell.verdict.reasons))

    def test_accuracy_of_17_and_18_in_26(self):
        for correct in (17, 18):
            run = a_run(26, answers="7")
            base, spec = (ms.replace(one, replies=tuple(ms.replace(reply, content=f"{number} {7 if right(number) else 8}")
                                                        for number, reply in enumerate(one.replies)))
                          for one, right in zip(run.passes, (lambda number: number < 17, lambda number: number >= 26 - correct)))
            floor = ms.replace(base, purpose="floor", replies=tuple(
                ms.replace(reply, content=reply.content.replace(" ", " = " if number % 2 else " "))
                for number, reply in enumerate(base.replies)))
            cell = cell_of(ms.replace(run, passes=(base, spec, floor)))
            self.assertEqual(cell.speculative_accuracy, (correct, 26))
            self.assertNotEqual(cell.verdict.answers, "changed", cell.verdict.reasons)


class Speed(unittest.TestCase):
    def test_faster_and_slower(self):
        self.assertEqual(cell_of(a_run(speed=1.5)).verdict.speed, "faster")
        self.assertEqual(cell_of(a_run(speed=0.8)).verdict.speed, "slower")

    def judge(self, ratio, itself=None, **more):
        return ms.judge_speed(ms.Speeds(ratio, None, itself), **more)

    def test_the_interval_holds_1(self):
        finding = self.judge(ms.Ratio(1.10, 0.95, 1.27, 12))
        self.assertEqual(finding.word, "not distinguishable")
        # half log(1.27 / 0.95) = 0.1452, log 1.1 = 0.0953: 12 x (2.32 - 1) = 15.8
        self.assertIn("about 16 more prompts would settle it", finding.reasons[0])

    def test_it_must_clear_the_baseline_against_itself(self):
        ratio = ms.Ratio(1.10, 1.05, 1.15, 12)
        self.assertEqual(self.judge(ratio).word, "faster")
        self.assertEqual(self.judge(ratio, ms.Ratio(0.89, 0.8, 1.0, 12)).word, "not distinguishable")
        self.assertEqual(self.judge(ratio, ms.Ratio(1.02, 1.0, 1.04, 12)).word, "faster")

    def test_too_few_prompts(self):
        self.assertEqual(self.judge(ms.Ratio(3.0, None, None, 2)).word, "not distinguishable")

    def test_not_comparable(self):
        self.assertEqual(self.judge(None).word, "not comparable")
        run = a_run()
        uncounted = tuple(ms.replace(one, replies=tuple(ms.replace(reply, completion_tokens=None) for reply in one.replies))
                          for one in run.passes)
        verdict = cell_of(ms.replace(run, passes=uncounted)).verdict
        self.assertEqual((verdict.speed, verdict.reasons[-1]), ("not comparable", "baseline did not count its tokens"))
        failed = ms.replace(run.passes[1], replies=tuple(ms.replace(reply, error="HTTP 500") for reply in run.passes[1].replies))
        self.assertEqual(cell_of(ms.replace(run, passes=(run.passes[0], failed))).verdict.reasons[-1], "spec completed nothing")


class Words(unittest.TestCase):
    def test_a_difference_in_a_sentence(self):
        difference = ms.Difference("p17", 0, "fork", "content", 212, 212, 0.5, ", then it", " and then", margin_nats=0.004)
        self.assertEqual(ms.describe(difference, ms.Ruler(300, 0.0, 0.011, 0.02)),
                         "p17 forks at byte 212: `, ` against ` and`; margin 0.004 nats; rounding on this pair reaches 0.02: "
                         "a near tie")

    def test_a_servers_text_is_escaped(self):
        difference = ms.Difference("p1", 0, "fork", "content", 0, 0, 0.0, "\x1b[2J", "\n")
        self.assertEqual(ms.describe(difference), "p1 forks at byte 0: `\\x1b[` against `\\n`")


class Ties(unittest.TestCase):
    """Margins and rulers from what engines answer to `logprobs`."""

    def entry(self, token, logprob, **others):
        listed = {token: logprob, **others}
        return {"token": token, "logprob": logprob, "bytes": list(token.encode()),
                "top_logprobs": [{"token": name, "logprob": value, "bytes": list(name.encode())} for name, value in listed.items()]}

    def setUp(self):
        self.entries = [self.entry("The", -0.1), self.entry(" three", -0.2), self.entry("**", -0.9524, **{"**:": -0.9560, " a": -4.0}),
                        self.entry(" end", -0.3)]

    def test_the_llama_cpp_pair_that_was_seen(self):
        # The texts share "**" too: the fork lies inside the other's longer token.
        self.assertAlmostEqual(ms.margin_from_logprobs(self.entries, "The three**", "The three**: solid"), 0.0036)
        self.assertAlmostEqual(ms.margin_from_logprobs(self.entries[:3], "The three", "The three a"), 3.0476)

    def test_a_token_that_is_not_listed_is_at_least_so_far(self):
        self.assertAlmostEqual(ms.margin_from_logprobs(self.entries, "The three", "The three zebras"), 4.0 - 0.9524)

    def test_the_baseline_chose_as_the_other_this_time(self):
        self.assertEqual(ms.margin_from_logprobs(self.entries, "The thr", "The three** end of it"), 0.0)

    def test_another_way_or_no_logprobs(self):
        self.assertIsNone(ms.margin_from_logprobs(self.entries, "A long other beginning", "A long other beginning!"))
        self.assertIsNone(ms.margin_from_logprobs([{"token": "a", "logprob": 0.0, "top_logprobs": []}], "", "b"))
        self.assertIsNone(ms.margin_from_logprobs([], "a", "ab"))
        self.assertIsNone(ms.margin_from_logprobs([self.entry("a", -0.1)], "", "b"))        # nothing but itself is listed
        self.assertIsNone(ms.margin_from_logprobs(self.entries, "The three** end", "The three** end"))

    def test_an_end_of_the_answer(self):
        entries = self.entries[:2] + [self.entry(" more", -0.5, **{"<|im_end|>": -0.7})]
        self.assertAlmostEqual(ms.margin_from_logprobs(entries, "The three", "The three"), 0.2)
        self.assertIsNone(ms.margin_from_logprobs(self.entries, "The three", "The three"))

    def test_part_of_a_character(self):
        entries = [{"token": "\\xc3", "logprob": -0.1, "bytes": [0xC3], "top_logprobs": []},
                   {"token": "\\xa9", "logprob": -0.2, "bytes": [0xA9], "top_logprobs": [
                       {"token": "\\xa8", "logprob": -0.25, "bytes": [0xA8]}]}]
        self.assertAlmostEqual(ms.margin_from_logprobs(entries, "", "è"), 0.05)

    def test_ruler(self):
        ours = [self.entry("a", -0.10), self.entry("b", -0.20), self.entry("c", -0.30), self.entry("d", -1.0), self.entry("e", -1)]
        theirs = [self.entry("a", -0.11), {"token": "b", "logprob": 0.0, "top_logprobs": []}, self.entry("c", -0.33),
                  self.entry("X", -1.5), self.entry("e", -9)]
        ruler = ms.ruler_of(ms.logprob_changes(ours, theirs))
        self.assertEqual(ruler.positions, 2)        # the made-up one is skipped; behind the fork nothing counts
        self.assertAlmostEqual(ruler.median_nats, 0.02)
        self.assertAlmostEqual(ruler.max_nats, 0.03)
        self.assertIsNone(ms.ruler_of(ms.logprob_changes([], theirs)))

    def test_which_forks_to_ask(self):
        run = a_run(9, other=some(0.5, 3))
        baseline, other = run.passes[0], next(each for each in run.passes if each.server == "spec")
        forks = ms.forks_of(baseline, other, ms.agree(baseline, other))
        self.assertEqual([fork.prompt_id for fork in forks], ["p0", "p3", "p6"])
        text = baseline.replies[0].content
        self.assertEqual(forks[0].prefix, text[:len(text) // 2])
        self.assertEqual(forks[0].key, ("spec", "w", 1, "p0", 0))
        self.assertEqual([fork.prompt_id for fork in ms.forks_of(baseline, other, ms.agree(baseline, other), 2)], ["p0", "p3"])


class HowFar(unittest.TestCase):
    """How far below the baseline's choice rounding may reach."""

    def test_by_an_even_ruler_alone(self):
        """Where rounding moves all positions alike, its 99th percentile tells all: seen on a CPU with 16 bits, over 47 positions."""
        ruler = ms.Ruler(47, 0.00068, 0.0026, 0.0026)
        self.assertAlmostEqual(ms.near_nats(ruler), 4 * 0.0026)
        self.assertAlmostEqual(ms.far_nats(ruler), 10 * 0.0026)

    def test_no_less_than_what_bfloat16_jumps_by(self):
        """Most positions do not move there at all: that a few dozen show no jump does not mean that there is none."""
        for ruler in (ms.Ruler(36, 0.0, 0.0, 0.0), ms.Ruler(319, 0.00001, 0.005, 0.02), ms.Ruler(47, 0.00004, 0.0026, 0.0026)):
            self.assertEqual((ms.near_nats(ruler), ms.far_nats(ruler)), (0.05, 0.15))
        self.assertAlmostEqual(ms.near_nats(ms.Ruler(319, 0.00001, 0.079, 0.117)), 4 * 0.079)

    def test_too_few_positions_are_no_ruler(self):
        self.assertEqual(ms.near_nats(ms.Ruler(29, 0.0007, 0.0026, 0.0026)), ms.near_nats(None))


class Placeholders(unittest.TestCase):
    def test_where_an_answer_can_be_continued(self):
        words = [{"token": token, "bytes": list(token.encode())} for token in (" So", " it", "'s", " raining", ".", "\n", " And", " then", " é", " more")]
        self.assertEqual(ms.places_to_continue(words, 9), [(1, " So"), (3, " So it's"), (7, " So it's raining.\n And"), (8, " So it's raining.\n And then"),
                                                           (9, " So it's raining.\n And then é")])
        self.assertEqual([place for place, _ in ms.places_to_continue(words, 2)], [1, 7])
        self.assertEqual(ms.places_to_continue([], 2), [])

    def test_logprobs_that_are_made_up_make_no_ruler(self):
        real = {"token": "a", "logprob": -0.1, "top_logprobs": [{"token": "a", "logprob": -0.1}]}
        fake = {"token": "b", "logprob": 0.0, "top_logprobs": []}
        self.assertTrue(ms.made_up([real, fake, fake]))
        self.assertFalse(ms.made_up([real, real, fake]))
        self.assertFalse(ms.made_up([]))


if __name__ == "__main__":
    unittest.main()
