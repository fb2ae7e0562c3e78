"""Section 12: the arithmetic of speculation, and what a measurement says about its cost."""
from __future__ import annotations

import unittest

import measure_speculative as ms
from tests.test_verdict import a_run, cell_of


class Formulas(unittest.TestCase):
    def test_expected_tokens(self):
        self.assertAlmostEqual(ms.expected_tokens(0.5, 3), 1.875)       # 1 + 1/2 + 1/4 + 1/8
        self.assertAlmostEqual(ms.expected_tokens(0.8, 4), (1 - 0.8 ** 5) / (1 - 0.8))
        self.assertEqual(ms.expected_tokens(1.0, 4), 5)
        self.assertEqual(ms.expected_tokens(0.0, 4), 1)

    def test_speedup(self):
        self.assertAlmostEqual(ms.speedup(0.6, 4, 0.1), 2.3056 / 1.4)       # 1 + .6 + .36 + .216 + .1296
        self.assertEqual(ms.speedup(0.9, 0, 0.2), 1.0)

    def test_the_lessons_table(self):
        # The exact values of 0.48 and 0.45 there are 0.4747 and 0.4447: rounded up once more than once.
        published = {2: (0.17, 0.31, 0.48), 4: (0.29, 0.46, 0.62), 8: (0.45, 0.62, 0.76)}
        for k, row in published.items():
            for c, theirs in zip((0.10, 0.20, 0.35), row):
                self.assertAlmostEqual(ms.break_even_alpha(k, c), theirs, delta=0.0055)

    def test_break_even_by_hand(self):
        # k = 2, c = 0.1: 1 + a + a^2 = 1.2, so a = (sqrt(1.8) - 1) / 2
        self.assertAlmostEqual(ms.break_even_alpha(2, 0.1), (1.8 ** 0.5 - 1) / 2)
        self.assertIsNone(ms.break_even_alpha(4, 1.0))
        for k, c in ((1, 0.3), (5, 0.25), (16, 0.05)):
            self.assertAlmostEqual(ms.speedup(ms.break_even_alpha(k, c), k, c), 1.0)

    def test_the_best_length_as_the_lesson_says(self):
        for c in (0.10, 0.20, 0.35):
            self.assertIn(ms.best_draft_length(0.5, c)[0], (1, 2))
        for c in (0.10, 0.20):
            self.assertIn(ms.best_draft_length(0.9, c)[0], range(6, 11))
        self.assertEqual(ms.best_draft_length(0.2, 0.5), (0, 1.0))

    def test_the_map(self):
        rows = ms.speedup_rows(0.1, (0.5, 0.9), (1, 2))
        self.assertEqual([alpha for alpha, _ in rows], [0.5, 0.9])
        self.assertAlmostEqual(rows[0][1][1], 1.75 / 1.2)

    def test_alpha_of_rate(self):
        # alpha 0.5, k = 3: (0.5 + 0.25 + 0.125) / 3
        self.assertAlmostEqual(ms.alpha_of_rate(0.875 / 3, 3), 0.5)


class Measured(unittest.TestCase):
    # 1000 tokens of 10 requests, 300 drafts of 4, accepted 240 + 150 + 60 + 30 = 480: 990 decoded in 510 passes.
    acceptance = ms.Acceptance(drafts=300, draft_tokens=1200, accepted_tokens=480, accepted_by_position=(240, 150, 60, 30),
                               completion_tokens=1000, requests=10, source="timings")

    def test_step_and_draft_cost(self):
        step = ms.step_cost(self.acceptance.tokens_per_target_pass, ms.Ratio(1.5, 1.2, 2.0, 10))
        self.assertAlmostEqual(step["value"], 990 / 510 / 1.5)
        self.assertAlmostEqual(step["low"], 990 / 510 / 2.0)
        self.assertAlmostEqual(step["high"], 990 / 510 / 1.2)
        cost = ms.draft_cost(step, ms.drafted_per_pass(self.acceptance, 4))
        self.assertAlmostEqual(cost["value"], (990 / 510 / 1.5 - 1) / (1200 / 510))
        self.assertIsNone(ms.step_cost(None, ms.Ratio(1, 1, 1, 3)))
        self.assertEqual(ms.step_cost(2.0, ms.Ratio(1.5, None, None, 2))["low"], None)

    def test_predictions_end_at_what_was_measured(self):
        ratio = ms.Ratio(1.5, 1.2, 2.0, 10)
        step = ms.step_cost(self.acceptance.tokens_per_target_pass, ratio)
        cost = ms.draft_cost(step, ms.drafted_per_pass(self.acceptance, 4))["value"]
        predicted = ms.predicted_speedups(self.acceptance, 4, cost)
        self.assertEqual(list(predicted), ["1", "2", "3", "4"])
        self.assertAlmostEqual(predicted["4"], 1.5)
        # One token a draft: 300/510 of the passes yield 0.8 more; the drafting costs a quarter.
        self.assertAlmostEqual(predicted["1"], (1 + 240 / 510) / (1 + (step["value"] - 1) / 4))

    def test_without_positions_alpha_is_taken_as_constant(self):
        half = ms.Acceptance(draft_tokens=300, accepted_tokens=150, completion_tokens=None)
        alpha = ms.alpha_of_rate(0.5, 2)
        self.assertAlmostEqual(ms.predicted_speedups(half, 2, 0.1)["2"], (1 + alpha + alpha ** 2) / 1.2)
        self.assertIsNone(ms.predicted_speedups(ms.Acceptance(missing="no counters"), None, 0.1))

    def test_crossover(self):
        def at(**values):
            return ms.crossover({int(key[1:]): ms.Ratio(value, None, None, 9) for key, value in values.items()})
        # From 1.2 at 4 to 0.8 at 16: half way over log2, 2^3.
        self.assertEqual(at(c1=1.9, c4=1.2, c16=0.8), {"concurrency": 8.0, "below": 4, "above": 16})
        self.assertIsNone(at(c1=1.9, c4=1.2))
        self.assertIsNone(at(c1=0.9, c4=0.8))


class Why(unittest.TestCase):
    def test_the_keys_are_always_these(self):
        self.assertEqual(tuple(cell_of(a_run()).why), ms.WHY_KEYS)

    def test_a_measured_cell(self):
        speculation = ms.Speculation("draft", 4, "small")
        run = a_run(speed=1.5, acceptance=Measured.acceptance, speculation=speculation, cache=(10_000, 8_000))
        cell = cell_of(run)
        self.assertAlmostEqual(cell.why["step_cost"]["value"], 990 / 510 / cell.decode_ratio.value)
        self.assertEqual(cell.why["draft_length"], 4)
        self.assertEqual(cell.why["acceptance_by_position"], [0.8, 0.5, 0.2, 0.1])
        self.assertEqual(cell.why["kv_cache_tokens_lost"], 2_000)
        # 0.8 of 300 drafts for a quarter of the cost: 1 + .47 over 1.07 at k = 1, 1.76 / 1.15 at k = 2, 1.88 / 1.22, 1.94 / 1.29
        self.assertEqual(cell.why["best_draft_length"], 3)
        self.assertIn("takes 2000 tokens", " ".join(cell.advice))

    def test_a_shorter_chain_is_advised_with_its_prediction(self):
        acceptance = ms.Acceptance(drafts=500, draft_tokens=4000, accepted_tokens=450, completion_tokens=1000, requests=10,
                                   accepted_by_position=(350, 60, 20, 10, 5, 3, 1, 1))
        cell = cell_of(a_run(speed=0.9, acceptance=acceptance, speculation=ms.Speculation("draft", 8)))
        self.assertEqual(cell.why["best_draft_length"], 1)
        self.assertRegex(" ".join(cell.advice), r"k = 1 is predicted at 1\.\d\dx on w at concurrency 1; you run k = 8 at 0\.90x")
        self.assertRegex(" ".join(cell.advice), r"k = 8 pays from 0\.\d\d on")

    def test_the_crossover_is_on_every_cell(self):
        run = a_run(speed=1.4)
        more = a_run(speed=0.7, concurrency=4)
        both = ms.compare_run(ms.replace(run, passes=run.passes + more.passes))
        self.assertEqual([cell.why["crossover"]["above"] for cell in both], [4, 4])
        self.assertIn("stops paying between 1 and 4", " ".join(both[0].advice))

    def test_categories_that_differ(self):
        run = a_run(speed=1.0, categories={"list": 2.0, "essay": 0.9})
        rows = {row["category"]: row for row in cell_of(run).why["by_category"]}
        self.assertAlmostEqual(rows["list"]["decode_ratio"]["value"], 2.0)
        self.assertAlmostEqual(rows["essay"]["decode_ratio"]["value"], 0.9)
        self.assertEqual(rows["list"]["exact_match"], 1.0)
        self.assertIsNone(cell_of(a_run(speed=1.0, categories={"list": 1.0, "essay": 1.1})).why["by_category"])


if __name__ == "__main__":
    unittest.main()
