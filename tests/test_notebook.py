"""Section 13: what is kept, how it survives, how it is read back."""
import json
import os
import unittest
from pathlib import Path

import measure_speculative as ms
from tests.fakes import FakeServer, Speculation
from tests.run import ProgramTest

LESSON_ENDPOINT = {"label": "qwen3/baseline", "base_url": "http://127.0.0.1:8080/v1", "model": "local-chat", "requests": 12, "completed": 12,
                   "failed": 0, "first_error": None, "wall_s": 61.2, "latency_s": {"p50": 5.0, "mean": 5.1, "max": 7.7}, "output_tokens": 2001,
                   "output_tokens_per_s": 32.7, "tokens_counted_by_server": True, "server_timings_sample": None, "spec_metrics_delta": {},
                   "lab": "part-17/measure-speculative", "engine": "llama.cpp", "engine_version": "unknown", "max_tokens": 192, "repeats": 1,
                   "prompt_count": 12, "recorded_at": "2026-03-01T10:00:00Z"}
LESSON_COMPARISON = {"lab": "part-17/measure-speculative", "label": "qwen3/comparison", "engine": "llama.cpp", "engine_version": "unknown",
                     "model": "local-chat", "baseline_tokens_per_s": 32.7, "speculative_tokens_per_s": 50.1,
                     "text_comparison": {"compared": 12, "identical": 12, "divergent": 0, "divergences": []}, "recorded_at": "2026-03-01T10:00:00Z"}


class RoundTrip(unittest.TestCase):
    def test_a_reply_comes_back_as_it_was(self):
        reply = ms.Reply("p1", 2, 0.1, None, 0.2, 0.3, 0.35, 1.1, 1.2, (0.3, 0.7, 1.1), 2, 12, 4, 30, "usage", "text \udc80\x00é", "thought",
                         (ms.ToolCall("f", '{"a": 1}'),), (5, 6), "stop", ms.Acceptance(3, 9, 6, (3, 2, 1), 30, 1, "response metrics"),
                         {"x": 1.5}, None, True, None)
        again = ms.reply_from_json(json.loads(ms.json_line(ms.as_json(reply))))
        self.assertEqual(again, reply)

    def test_defaults_are_left_out_and_numbers_stay_whole(self):
        self.assertEqual(ms.as_json(ms.Reply("p")), {"prompt_id": "p"})
        self.assertEqual(ms.as_json(0.1 + 0.2), 0.1 + 0.2)
        self.assertIsNone(ms.as_json(float("nan")))

    def test_texts_can_be_left_out(self):
        kept = ms.without_texts(ms.Reply("p", content="secret words", token_ids=(1, 2)))
        self.assertNotIn("secret", ms.json_line(ms.as_json(kept)).decode())
        self.assertEqual(kept.digests["content"]["chars"], 12)

    def test_keys_of_later_versions_are_left_aside(self):
        self.assertEqual(ms.reply_from_json({"prompt_id": "p", "new_key": 1}), ms.Reply("p"))


class Appending(ProgramTest):
    def test_a_torn_last_line_is_sealed(self):
        path = self.new_folder() / "labbook.md"
        path.write_bytes(b"# prose\n" + json.dumps(LESSON_ENDPOINT).encode() + b'\n{"label": "torn')
        journal = ms.Journal(str(path))
        journal.append([LESSON_COMPARISON])
        journal.close()
        records, bad = ms.read_notebook(str(path))
        self.assertEqual([ms.record_kind(record) for record in records], ["endpoint", "comparison"])
        self.assertEqual([(line.number, line.path) for line in bad], [(3, str(path))])

    def test_the_folder_is_made(self):
        path = self.new_folder() / "a" / "b" / "labbook.md"
        ms.Journal(str(path)).close()
        self.assertTrue(path.exists())

    def test_run_files_never_collide(self):
        folder = self.new_folder()
        first = ms.run_file_path(str(folder / "labbook.md"), "a/b c", "2026-01-02T03:04:05Z")
        self.assertEqual(Path(first).name, "20260102T030405Z-a-b-c.jsonl")
        ms.Journal(first).close()
        self.assertNotEqual(ms.run_file_path(str(folder / "labbook.md"), "a/b c", "2026-01-02T03:04:05Z"), first)


class ReadingBack(ProgramTest):
    def notebook(self, *lines):
        path = self.new_folder() / "labbook.md"
        path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
        return path

    def test_the_lessons_own_lines_prose_and_unknown_keys(self):
        path = self.notebook("# My notebook", "some prose { with braces", json.dumps(LESSON_ENDPOINT), json.dumps({**LESSON_COMPARISON, "mood": "fine"}))
        records, bad = ms.read_notebook(str(path))
        self.assertEqual((len(records), bad), (2, []))
        outcome = self.run_program("notebook", "--check", path)
        self.assertEqual(outcome.code, 0, outcome.out)
        self.assertIn("qwen3", outcome.out)

    def test_check_tells_bad_lines(self):
        path = self.notebook(json.dumps({**LESSON_ENDPOINT, "requests": "twelve"}), '{"label": "x", ')
        outcome = self.run_program("notebook", "--check", path)
        self.assertEqual(outcome.code, 1)
        self.assertIn("'requests'", outcome.out)
        self.assertIn("line 2", outcome.out)

    def test_a_killed_runs_file_is_usable(self):
        base, spec = self.starting(FakeServer()), self.starting(FakeServer(speculation=Speculation(k=3, accepts=(2,))))
        outcome = self.measure(base, spec, arguments=("--prompts", self.prompt_file(4), "--max-tokens", 8))
        whole = Path(outcome.run_file).read_bytes().splitlines(keepends=True)
        replies = [place for place, line in enumerate(whole) if b'"record": "reply"' in line]
        cut = outcome.folder / "cut.jsonl"
        cut.write_bytes(b"".join(whole[:replies[5]]) + whole[replies[5]][:40])
        run, bad = ms.read_run(str(cut))
        self.assertEqual(len(bad), 1)
        self.assertTrue(all(one.interrupted for one in run.passes))
        again = self.run_program("compare", cut)
        self.assertEqual(again.code, 0, again.err)
        self.assertIn("2 of 2", again.out)

    def test_a_run_read_back_is_the_run(self):
        base, spec = self.starting(FakeServer()), self.starting(FakeServer(speculation=Speculation(k=3, accepts=(2,))))
        outcome = self.measure(base, spec, arguments=("--limit", 3, "--noise-floor", "always"))
        run, bad = ms.read_run(outcome.run_file)
        self.assertEqual(bad, [])
        again = [ms.endpoint_record(run, one) for one in run.passes]
        live = [record for record in outcome.records if record["kind"] == "endpoint"]

        def key(record):
            return record["server_label"], record["purpose"]

        for one, other in zip(sorted(again, key=key), sorted(live, key=key)):
            for name in one:
                if name not in ("recorded_at", "caveats"):
                    self.assertEqual(one[name], other[name], name)

    def test_files_that_are_no_run_files(self):
        outcome = self.run_program("compare", self.notebook("prose"))
        self.assertEqual(outcome.code, 2)
        self.assertIn("no run file", outcome.err)

    @unittest.skipIf(os.name == "nt", "umask is POSIX's")
    def test_files_are_created_with_the_users_umask(self):
        before = os.umask(0o027)
        try:
            path = self.new_folder() / "labbook.md"
            ms.Journal(str(path)).close()
        finally:
            os.umask(before)
        self.assertEqual(path.stat().st_mode & 0o777, 0o640)


if __name__ == "__main__":
    unittest.main()
