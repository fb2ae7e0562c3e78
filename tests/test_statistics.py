"""Section 10: quantiles, intervals, exact tests, ratios of speeds."""
from __future__ import annotations

import itertools
import json
import unittest
from pathlib import Path

import measure_speculative as ms

CASES = Path(__file__).parent / "data" / "cases"


def timed(prompt_id, tokens, seconds, sent_s=0.0, **more):
    """A reply whose first chunk came at once, so that decode speed is (tokens - 1) / seconds."""
    return ms.Reply(prompt_id, sent_s=sent_s, first_s=sent_s, last_s=sent_s + seconds, ended_s=sent_s + seconds,
                    completion_tokens=tokens, **more)


class Basics(unittest.TestCase):
    def test_quantile_is_type_7(self):
        self.assertEqual(ms.quantile([4, 1, 3, 2], 0.5), 2.5)
        self.assertEqual(ms.quantile([1, 2, 3, 4], 0.9), 3.7)       # 1 + 0.9 * 3
        self.assertEqual(ms.quantile([5], 0.99), 5)
        self.assertIsNone(ms.quantile([], 0.5))

    def test_16_warm_up_shows_in_means_not_in_medians(self):
        times = json.loads((CASES / "16-warmup.requests.json").read_text(encoding="utf-8"))
        first, spec = times["baseline_ttft"], times["spec_ttft"]
        self.assertEqual((ms.quantile(first, 0.5), ms.quantile(spec, 0.5)), (59.5, 59.5))
        self.assertAlmostEqual(ms.spread_of(first[1:])["mean"], 59.0)
        self.assertAlmostEqual(ms.spread_of(spec[1:])["mean"], 59.0)
        self.assertAlmostEqual(ms.spread_of(spec)["mean"], 237.875)

    def test_wilson(self):
        low, high = ms.wilson(17, 26)       # (17 + 1.92) / (26 + 3.84) = 0.634, half width 0.172
        self.assertAlmostEqual(low, 0.462, 3)
        self.assertAlmostEqual(high, 0.806, 3)
        self.assertEqual(ms.wilson(0, 10)[0], 0.0)
        self.assertIsNone(ms.wilson(0, 0))

    def test_binomial_tail(self):
        self.assertAlmostEqual(ms.binomial_tail(2, 3, 0.5), 0.5)
        self.assertAlmostEqual(ms.binomial_tail(1, 10, 0.1), 1 - 0.9 ** 10)
        self.assertEqual(ms.binomial_tail(0, 0, 0.5), 1.0)

    def test_student(self):         # printed tables
        for freedom, wanted in ((1, 12.706), (2, 4.303), (3, 3.182), (5, 2.571), (11, 2.201), (25, 2.060), (77, 1.991)):
            self.assertAlmostEqual(ms.student_quantile(freedom), wanted, 3)
        self.assertAlmostEqual(ms.student_quantile(5.5), (2.571 + 2.447) / 2, 3)
        self.assertAlmostEqual(ms.student_quantile(1000), 1.960, 3)


class ExactTests(unittest.TestCase):
    def test_mcnemar(self):
        self.assertAlmostEqual(ms.mcnemar_p(8, 0), 2 / 256)
        self.assertAlmostEqual(ms.mcnemar_p(1, 3), 2 * 5 / 16)      # (4 + 1) of 16 outcomes, twice
        self.assertEqual(ms.mcnemar_p(0, 0), 1.0)

    def test_sign_flips_by_hand(self):
        # Sums of +-1 +-2 +-3: 6, 4, 2, 0, 0, -2, -4, -6; at least 4: two of eight.
        self.assertAlmostEqual(ms.sign_flip_p([1, 3, 0, 2]), 2 / 8)
        self.assertAlmostEqual(ms.sign_flip_p([-1, 2, 3]), 4 / 8)
        self.assertEqual(ms.sign_flip_p([]), 1.0)
        self.assertEqual(ms.sign_flip_p([1, -1]), 1.0)

    def test_sign_flips_against_enumeration(self):
        values = [0.31, -0.12, 0.5, 0.27, 0.08, -0.05, 0.44, 0.19, 0.02, 0.36]
        total = abs(sum(values))
        sums = (abs(sum(sign * value for sign, value in zip(signs, values)))
                for signs in itertools.product((1, -1), repeat=len(values)))
        self.assertAlmostEqual(ms.sign_flip_p(values), sum(one >= total - 1e-9 for one in sums) / 1024)

    def test_many_sign_flips_agree_with_the_exact_count(self):
        values = [((number * 37) % 19 - 6) / 19 for number in range(26)]
        exact = 2 * ms._exact_sign_tail([abs(value) for value in values if value], abs(sum(values)))
        self.assertAlmostEqual(ms.sign_flip_p(values) / exact, 1, delta=0.08)
        self.assertAlmostEqual(ms.sign_flip_p([1] * 40 + [-1] * 10) / ms.mcnemar_p(40, 10), 1, delta=0.15)
        self.assertAlmostEqual(ms.sign_flip_p([0.5] * 30), 2 * 0.5 ** 30)

    def test_null_share(self):
        self.assertEqual(ms.null_share(0.3, 1.0), 0.5)
        # 1 - 0.7^2 = 0.51; 0.51 * 0.7 = 0.357 against 0.3 * 0.49 = 0.147
        self.assertAlmostEqual(ms.null_share(0.3, 2.0), 0.357 / 0.504)

    def test_smallest_detectable(self):
        # Without noise McNemar needs 9 discordant pairs at 0.0033 (1/512); of 78 prompts 80 % power is at about 14 %.
        self.assertAlmostEqual(ms.smallest_detectable(78, 0.0, 1 / 300), 0.145, delta=0.01)
        self.assertIsNone(ms.smallest_detectable(6, 0.0, 1 / 300))
        self.assertGreater(ms.smallest_detectable(78, 0.5, 1 / 300), ms.smallest_detectable(200, 0.5, 1 / 300))


class Ratios(unittest.TestCase):
    def test_equal_ratios_have_no_width(self):
        ratio = ms.ratio_of_sums([ms.Row(10, 1, 20, 1), ms.Row(5, 1, 10, 1), ms.Row(8, 1, 16, 1)])
        self.assertAlmostEqual(ratio.value, 2)
        self.assertAlmostEqual(ratio.low, 2)
        self.assertAlmostEqual(ratio.high, 2)

    def test_interval_by_hand(self):
        # Speeds over a baseline of 1: 1, 2, 3. Without one: log 2.5, log 2, log 1.5; mean 0.67191, squared deviations
        # 0.05970 + 0.00045 + 0.07096 = 0.13112; error sqrt(2/3 * 0.13112) = 0.29565. A prompt's weight: a third in three of
        # four sums, and 1, 2, 3 sixths in one: as 7, 8, 9 -> 24^2 / (49 + 64 + 81) = 2.9691, 1.9691 degrees of freedom:
        # 12.7062 + 0.9691 * (4.3027 - 12.7062) = 4.5622; half 1.34880.
        ratio = ms.ratio_of_sums([ms.Row(1, 1, speed, 1) for speed in (1, 2, 3)])
        self.assertAlmostEqual(ratio.value, 2)
        self.assertAlmostEqual(ratio.high / 2, 2.71828 ** 1.34880, 2)
        self.assertAlmostEqual(ratio.low * ratio.high, 4)

    def test_too_few_pairs_have_no_interval(self):
        ratio = ms.ratio_of_sums([ms.Row(1, 1, 2, 1), ms.Row(1, 1, 3, 1)])
        self.assertEqual((ratio.value, ratio.low, ratio.high, ratio.pairs), (2.5, None, None, 2))
        self.assertIsNone(ms.ratio_of_sums([]))
        self.assertIsNone(ms.ratio_of_sums([ms.Row(1, 1, 0, 1)]))

    def test_what_goes_with_the_order_is_taken_out_of_the_error(self):
        rows = [ms.Row(1, 1, 2.0 * (1.1 if first else 1 / 1.1), 1, first) for first in (True, False) * 4]
        known, unknown = ms.ratio_of_sums(rows), ms.ratio_of_sums([row._replace(baseline_first=None) for row in rows])
        self.assertAlmostEqual(known.value, unknown.value)
        self.assertLess(ms.half_width(known), 0.001)
        self.assertGreater(ms.half_width(unknown), 0.05)

    def test_decode_ratio_pairs_by_prompt(self):
        first = [timed("a", 11, 1.0), timed("b", 21, 1.0), timed("c", 31, 1.0, error="cut off")]
        other = [timed("b", 41, 1.0), timed("a", 21, 1.0), timed("d", 99, 1.0)]
        ratio = ms.decode_ratio(first, other)
        self.assertAlmostEqual(ratio.value, 2.0)        # (20 + 40) / (10 + 20)
        self.assertEqual(ratio.pairs, 2)

    def test_17_repeats_from_a_cache_are_not_averaged_with_the_first(self):
        first = [timed("a", 51, 1.0, prompt_tokens=512)]
        other = [timed("a", 51, 1.0, prompt_tokens=512)] + [
            timed("a", 153, 1.0, repeat=number, prompt_tokens=512, cached_tokens=511) for number in (1, 2, 3)]
        self.assertAlmostEqual(ms.decode_ratio(first, other).value, 1.0)

    def test_throughput_is_the_passes_own(self):
        first = ms.Pass("baseline", "w", 1, tuple(timed(key, 10, 1.0) for key in "abc"), 3.5)
        other = ms.Pass("x", "w", 1, tuple(timed(key, 10, 0.5) for key in "abc"), 1.75)
        ratio = ms.throughput_ratio(first, other)
        self.assertAlmostEqual(ratio.value, 2.0)
        self.assertAlmostEqual(ratio.low, 2.0)
        self.assertIsNone(ms.throughput_ratio(first, ms.Pass("x", "w", 1, (ms.Reply("a"),), 1.0)))     # not counted


class WhenToStop(unittest.TestCase):
    def test_precise_enough(self):
        ratio = ms.Ratio(2.0, 1.96, 2.04, 40)       # half width 0.04, 2 % of 2
        self.assertTrue(ms.precise_enough(ratio, 0.02))
        self.assertFalse(ms.precise_enough(ratio, 0.019))
        self.assertFalse(ms.precise_enough(ms.Ratio(2.0, None, None, 2), 0.5))
        self.assertFalse(ms.precise_enough(None, 0.5))

    def test_pairs_needed(self):
        # log interval half 0.2, distance from 1 is 0.1: four times as many prompts, 30 more than the 10.
        e = 2.718281828459045
        ratio = ms.Ratio(e ** 0.1, e ** -0.1, e ** 0.3, 10)
        self.assertEqual(ms.pairs_needed(ratio), 30)
        self.assertEqual(ms.pairs_needed(ms.Ratio(e ** 0.4, e ** 0.3, e ** 0.5, 10)), 0)
        # log 1.02 = 0.0198026: (0.2 / 0.0198026)^2 = 102.0; 10 x 102.0 - 10 = 1010.02, rounded up
        self.assertEqual(ms.pairs_needed(ratio, precision=0.02), 1011)
        self.assertIsNone(ms.pairs_needed(ms.Ratio(1.0, 0.9, 1.1, 10)))
        self.assertIsNone(ms.pairs_needed(ms.Ratio(1.5, None, None, 2)))


if __name__ == "__main__":
    unittest.main()
