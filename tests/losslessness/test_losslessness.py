"""The losslessness benchmark in small: seeded, a few seconds. The tables come from `python3 -m tests.losslessness`."""
from __future__ import annotations

import random
import statistics
import unittest

from tests.losslessness import benchmark, coverage
from tests.losslessness.engines import FAULTS, YARDSTICKS, Honest, make_trial, word_of


class TheSimulator(unittest.TestCase):
    """The engines do what they claim; the detector is not asked here."""

    def test_prefix_agreement_is_the_published(self):
        for prefix in (0.50, 0.73, 0.99):
            trials = [make_trial(random.Random(seed), Honest(prefix), 26) for seed in range(6)]
            seen = statistics.fmean(trial.floor.prefix_agreement for trial in trials)
            self.assertAlmostEqual(seen, prefix, delta=0.06)

    def test_a_server_that_cannot_batch_shows_no_floor(self):
        trial = make_trial(random.Random(1), Honest(0.73, floor_visible=False), 26)
        self.assertEqual(trial.floor.identical, trial.floor.pairs)
        self.assertLess(trial.agreement.identical, trial.agreement.pairs)

    def test_every_fault_alters_something(self):
        for name, fault in FAULTS.items():
            workload = "agent" if name.startswith("lost tool") else "chat"
            trial = make_trial(random.Random(4), Honest(0.99, workload=workload), 26, fault)
            self.assertGreater(trial.altered, 0, name)

    def test_one_seed_is_one_run(self):
        one, two = (make_trial(random.Random(5), Honest(0.5), 26) for _ in range(2))
        self.assertEqual(one, two)


class TheVerdict(unittest.TestCase):
    def test_honest_engines_are_not_accused(self):
        words = [word_of(make_trial(random.Random(seed), honest, 26), yardsticks)
                 for honest in benchmark.HONEST.values() for seed in range(3) for yardsticks in YARDSTICKS]
        self.assertEqual(words.count("changed"), 0)

    def test_faults_are_found_with_both_yardsticks(self):
        for name, fault in FAULTS.items():
            if "2000" in name:      # alters one answer in twenty
                continue
            honest = Honest(0.99, workload="agent" if name.startswith("lost tool") else "chat")
            self.assertEqual(word_of(make_trial(random.Random(2), honest, 78, fault), YARDSTICKS[0]), "changed", name)

    def test_without_any_yardstick_a_wrong_token_cannot_be_told(self):
        trial = make_trial(random.Random(3), Honest(0.73), 26, FAULTS["wrong token every 200 tokens"])
        self.assertEqual(word_of(trial, "neither"), "cannot tell")

    def test_the_tables_are_markdown(self):
        outcomes = [benchmark.run_job(job._replace(runs=1)) for job in benchmark.honest_jobs(6, [4])]
        rows = list(benchmark.honest_table(outcomes, [4]))
        self.assertEqual(len({row.count("|") for row in rows}), 1)


class Intervals(unittest.TestCase):
    def test_coverage(self):
        """Of 300 runs each: 95 % is 285, three standard errors are 11 runs."""
        for machine in coverage.MACHINES[2:]:
            for pairs in (6, 26):
                self.assertAlmostEqual(coverage.covered(machine, "decode speed", pairs, 300), 0.95, delta=0.04)

    def test_alternating_keeps_the_ratio_on_a_machine_that_slows_down(self):
        for pairs in (12, 78):
            self.assertAlmostEqual(coverage.typical_ratio(pairs, "alternating", 20) / 1.5, 1, delta=0.01)
            self.assertLess(coverage.typical_ratio(pairs, "sequential", 20) / 1.5, 0.92)


if __name__ == "__main__":
    unittest.main()
