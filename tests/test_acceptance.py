"""Section 4: metrics pages and response fields become one record. Pages are files in data/cases; numbers are worked out there."""
import json
import unittest
from pathlib import Path

import measure_speculative as ms

CASES = Path(__file__).parent / "data" / "cases"


def page(name, started=None):
    return ms.parse_metrics((CASES / name).read_bytes(), started)


def between(name, model="m", requests=10, tokens=None):
    return ms.acceptance_from_counters(page(f"{name}.before.prom"), page(f"{name}.after.prom"), model, requests, tokens)


class Pages(unittest.TestCase):
    def test_odd_but_legal_lines_are_read_and_one_junk_line_is_skipped(self):
        read = page("07-odd-lines.prom")
        self.assertEqual(read.skipped_lines, 1)
        zeros = ms.MetricsPage(tuple(sample._replace(value=0.0) for sample in read.samples), read.kinds, 0, None, None)
        found = ms.acceptance_from_counters(zeros, read, "m", 10, None)
        self.assertEqual((found.drafts, found.draft_tokens, found.accepted_tokens), (120, 360, 216))
        self.assertAlmostEqual(found.acceptance_rate, 0.6)
        self.assertAlmostEqual(found.acceptance_length, 2.8)

    def test_values_that_are_not_finite_never_get_in(self):
        read = ms.parse_metrics(b"a NaN\nb -nan\nc +Inf\nd 1\n")
        self.assertEqual([sample.name for sample in read.samples], ["d"])

    def test_quotes_that_nobody_escaped(self):
        read = ms.parse_metrics(b'x_total{model_name="ti"ny{x},y",engine="0"} 7\n')
        self.assertEqual(read.samples[0].value, 7.0)
        self.assertEqual(read.samples[0].labels["engine"], "0")

    def test_html_and_emptiness_are_no_pages(self):
        self.assertIn("not in Prometheus", ms.parse_metrics(b"<html><body>no</body></html>").problem)
        self.assertIn("empty", ms.parse_metrics(b"\n\n").problem)
        self.assertIn("larger", ms.parse_metrics(b" " * (ms.MAX_METRICS_BYTES + 1)).problem)

    def test_a_page_that_came_as_a_json_string(self):
        found = between("06-json-escaped")
        self.assertAlmostEqual(found.acceptance_rate, 0.6)
        self.assertAlmostEqual(found.acceptance_length, 2.8)


class Counters(unittest.TestCase):
    def test_created_gauges_stay_out(self):
        for name in ("01-created-gauges", "01b-created-first"):
            with self.subTest(name):
                found = between(name)
                self.assertEqual((found.drafts, found.draft_tokens, found.accepted_tokens), (100, 300, 180))
                self.assertAlmostEqual(found.acceptance_rate, 0.6)
                self.assertAlmostEqual(found.acceptance_length, 2.8)
                self.assertEqual(found.accepted_by_position, (90, 60, 30))

    def test_engines_of_data_parallel_are_added(self):
        found = between("02-data-parallel")
        self.assertEqual((found.drafts, found.draft_tokens, found.accepted_tokens), (86, 344, 120))
        self.assertAlmostEqual(found.acceptance_rate, 0.3488, 4)
        self.assertAlmostEqual(found.acceptance_length, 2.395, 3)

    def test_another_models_series_stay_out(self):
        before = ms.parse_metrics(b'vllm:spec_decode_num_drafts_total{model_name="a"} 0\nvllm:spec_decode_num_drafts_total{model_name="b"} 0\n')
        after = ms.parse_metrics(b'vllm:spec_decode_num_drafts_total{model_name="a"} 5\nvllm:spec_decode_num_drafts_total{model_name="b"} 70\n'
                                 b'vllm:spec_decode_num_draft_tokens_total{model_name="a"} 10\nvllm:spec_decode_num_accepted_tokens_total{model_name="a"} 4\n')
        self.assertEqual(ms.acceptance_from_counters(before, after, "a", 1, None).drafts, 5)

    def test_copies_of_tensor_parallel_ranks_collapse(self):
        text = b"".join(b'sglang:spec_verify_calls_total{tp_rank="%d",model_name="m"} %%d\nsglang:generation_tokens_total{tp_rank="%d",model_name="m"} %%d\n'
                        % (rank, rank) for rank in (0, 1))
        before, after = (ms.parse_metrics(text % (verify, tokens, verify, tokens)) for verify, tokens in ((0, 0), (40, 102)))
        found = ms.acceptance_from_counters(before, after, "m", 2, 102)
        self.assertEqual((found.drafts, found.accepted_tokens), (40, 60))       # 102 tokens - 2 firsts - 40 bonus tokens

    def test_gauges_are_shown_and_never_calculated_with(self):
        read = page("03a-rate-over-one.prom")
        found = ms.acceptance_from_counters(read, read, "m", 10, None)
        self.assertIsNone(found.acceptance_rate)
        self.assertIn("outside 0..1 is refused", found.missing)
        self.assertIn("whole life", found.missing)
        self.assertEqual(found.gauges["sglang:spec_accept_length"], 3.75)

    def test_off_absent_and_appearing_are_three_things(self):
        off = between("04a-spec-off")
        self.assertEqual((off.missing, off.acceptance_rate, off.drafts), ("no drafts in this run", None, 0))
        appears = between("04b-per-pos-appears")
        self.assertAlmostEqual(appears.acceptance_rate, 0.625)
        self.assertAlmostEqual(appears.acceptance_length, 3.5)
        self.assertEqual([round(rate, 3) for rate in appears.rate_by_position], [0.833, 0.667, 0.583, 0.417])
        read = page("04c-no-counters.prom")
        self.assertEqual(ms.acceptance_from_counters(read, read, "m", 1, None).missing, "no acceptance counters on the metrics page")

    def test_a_restart_refuses_the_difference(self):
        for name in ("05a-reset-visible", "05b-reset-hidden"):
            with self.subTest(name):
                found = between(name)
                self.assertEqual(found.missing, "the server restarted during the run")
                self.assertIsNone(found.acceptance_rate)
                self.assertEqual(ms.speculation_delta(page(f"{name}.before.prom"), page(f"{name}.after.prom")), {})

    def test_a_restart_told_by_a_header_alone(self):
        read = page("04a-spec-off.after.prom")
        self.assertTrue(ms.restarted(read._replace(started="1"), read._replace(started="2")))

    def test_six_digits_are_too_few_for_a_difference(self):
        form = "llamacpp:spec_decode_num_drafts_total %s\nllamacpp:spec_decode_num_draft_tokens_total %s\nllamacpp:spec_decode_num_accepted_tokens_total %s\n"
        before, after = (ms.parse_metrics((form % values).encode()) for values in (("9e+05", "1.2e+06", "8e+05"), ("900100", "1.2003e+06", "800200")))
        self.assertIn("six digits", ms.acceptance_from_counters(before, after, "m", 5, None).missing)

    def test_foreign_traffic_is_not_ours(self):
        form = "vllm:spec_decode_num_drafts_total %d\nvllm:spec_decode_num_draft_tokens_total %d\nvllm:spec_decode_num_accepted_tokens_total %d\nvllm:generation_tokens_total %d\n"
        before, after = (ms.parse_metrics((form % values).encode()) for values in ((0, 0, 0, 0), (50, 200, 100, 500)))
        self.assertIn("somebody else used the server", ms.acceptance_from_counters(before, after, "m", 2, 120).missing)
        self.assertIsNone(ms.acceptance_from_counters(before, after, "m", 2, 498).missing)

    def test_the_lessons_delta_keeps_every_series_that_mentions_speculation_but_no_gauge(self):
        delta = ms.speculation_delta(page("01-created-gauges.before.prom"), page("01-created-gauges.after.prom"))
        self.assertTrue(all(0 <= rise < 1e6 for rise in delta.values()), delta)
        self.assertTrue(any("num_draft_tokens" in name for name in delta))
        self.assertFalse(any("created" in name for name in delta))

    def test_prefix_hits(self):
        rate = ms.prefix_hit_rate(page("17b-prefix-cache.before.prom"), page("17b-prefix-cache.after.prom"), "m")
        self.assertAlmostEqual(rate, 0.93, 2)


class Responses(unittest.TestCase):
    def test_the_same_truth_told_in_three_dialects(self):
        told = {entry["from"]: entry["body"] for entry in json.loads((CASES / "03b-bonus-conventions.json").read_text())}
        for name, keys in (("vllm body", "metrics"), ("sglang meta_info", "meta_info"), ("llama.cpp timings", "timings")):
            body = told[name]
            tokens = body.get("usage", {}).get("completion_tokens") or body[keys].get("completion_tokens") or body[keys].get("predicted_n")
            found = ms.acceptance_from_response(body, tokens)
            with self.subTest(name):
                self.assertAlmostEqual(found.acceptance_rate, 0.6)
                if name == "llama.cpp timings":
                    self.assertIsNone(found.acceptance_length)          # it tells no number of steps
                    self.assertAlmostEqual(found.tokens_per_target_pass, 2.8)       # 280 / (280 - 180)
                else:
                    self.assertAlmostEqual(found.acceptance_length, 2.8)

    def test_a_histogram_becomes_positions(self):
        told = {"metrics": {"speculative_decoding": {"acceptance_histogram": [10, 20, 50, 20], "num_spec_steps": 100,
                                                     "num_accepted_draft_tokens": 180, "num_draft_tokens": 300}}}
        # 90 steps accepted at least one, 70 at least two, 20 all three
        self.assertEqual(ms.acceptance_from_response(told, 280).accepted_by_position, (90, 70, 20))

    def test_renamed_keys_of_sglang(self):
        for accepted, drafted in (("spec_accept_token_num", "spec_draft_token_num"), ("spec_accepted_drafts", "spec_proposed_drafts"),
                                  ("spec_num_correct_drafts", "spec_num_proposed_drafts")):
            found = ms.acceptance_from_response({"meta_info": {accepted: 6, drafted: 9, "spec_verify_ct": 3}}, 10)
            self.assertEqual((found.drafts, found.draft_tokens, found.accepted_tokens), (3, 9, 6))

    def test_nonsense_counts_are_no_counts(self):
        for value in (-1, 1.5e300, "12", True, float("nan"), None, [3]):
            self.assertIsNone(ms.acceptance_from_response({"timings": {"draft_n": value, "draft_n_accepted": 1}}, 10), value)

    def test_llama_cpp_replies_without_drafts_count_as_none_drafted(self):
        drafted = ms.Reply("a", completion_tokens=21, acceptance=ms.Acceptance(None, 16, 12, None, 21, 1, "response timings"))
        undrafted = ms.Reply("b", completion_tokens=11)
        found = ms.acceptance_of_pass([drafted, undrafted], ms.Acceptance(missing="x"), True)
        self.assertEqual((found.draft_tokens, found.accepted_tokens), (16, 12))
        self.assertAlmostEqual(found.tokens_per_target_pass, 30 / 18)       # (32 - 2) / (32 - 2 - 12)

    def test_tokens_cut_off_at_the_end_are_no_tokens_of_a_pass(self):
        """Seen on vLLM: 29 drafts of 3, all accepted, 114 tokens of 6 answers: 87 accepted, but only 108 - 29 of them were kept."""
        found = ms.Acceptance(29, 87, 87, (29, 29, 29), completion_tokens=114, requests=6)
        self.assertEqual(found.target_passes, 29)
        self.assertAlmostEqual(found.tokens_per_target_pass, 108 / 29)

    def test_counters_complete_what_responses_tell_only_where_both_agree(self):
        reply = ms.Reply("a", completion_tokens=21, acceptance=ms.Acceptance(None, 16, 12, None, 21, 1, "response timings"))
        counters = ms.Acceptance(4, 16, 12, (4, 4, 2, 2), 21, 1, "metrics counters")
        self.assertEqual(ms.acceptance_of_pass([reply], counters, True).drafts, 4)
        self.assertIsNone(ms.acceptance_of_pass([reply], ms.replace(counters, accepted_tokens=13), True).drafts)


if __name__ == "__main__":
    unittest.main()
