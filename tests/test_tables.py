"""Section Tables: one Table in several renderings, hostile text, the lesson's and the tutorial's tables, the screen."""
from __future__ import annotations

import ast
import pathlib
import unittest

import measure_speculative as ms
from tests import synthetic_records as made

HOSTILE = "\x1b[31mred\x07 \u202egnp.exe | `x` <b> ](http://e) \r\n=1+1 \udcff \x85 \u2028"


def table(*rows: tuple, columns: tuple = ()) -> ms.Table:
    columns = columns or (ms.Column("Name"), ms.number("Speed", "tokens/s", 1), ms.number("Share", "%", 0, 100))
    return ms.Table("A title", columns, rows, ("A footer.",))


class Terminal(unittest.TestCase):
    def test_numbers_stand_right_with_units_and_not_measured_is_a_dash(self):
        self.assertEqual(ms.table_text(table(("a", 1234.56, 0.5), ("bcd", None, 0))), "\n".join((
            "A title", "", "Name  Speed [tokens/s]  Share [%]", "────  ────────────────  ─────────",
            "a              1,234.6         50", "bcd                  –          0", "A footer.", "")))

    def test_ascii_stream_gets_stand_ins_of_the_same_width(self):
        text = ms.table_text(table(("3×", None, None), ("中", 1.0, 0.1)), encoding="ascii")
        text.encode("ascii")
        self.assertIn("3x", text)
        self.assertIn("\\u4e2d", text)
        self.assertNotIn("–", text)

    def test_no_encoding_of_a_console_makes_it_fail(self):
        for encoding in ("cp1252", "cp437", "latin-1", "utf-8", "ascii", "no-such-encoding", None, ""):
            ms.table_text(table((HOSTILE, 1.0, None)), 60, encoding).encode(encoding if encoding in ("cp1252",) else "utf-8")

    def test_no_line_is_wider_than_the_terminal_from_60_columns_on(self):
        tables = ms.tutorial_tables(made.notebook()) + [ms.lesson_table(made.suite_notebook()), table((HOSTILE * 9, 1, 1))]
        for width in range(60, 140, 7):
            for each in tables:
                for line in ms.table_text(each, width).splitlines():
                    self.assertLessEqual(ms.text_width(line), width, line)

    def test_every_cell_survives_the_narrowest_terminal(self):
        text = " ".join(ms.table_text(ms.tutorial_tables(made.notebook())[0], 60).split())
        for name in made.CONFIGURATIONS:
            self.assertEqual(text.count(name), 2)       # two blocks of columns, the name leading each

    def test_an_endless_word_is_cut_and_wide_signs_count_twice(self):
        self.assertEqual(ms.wrapped("a" * 25, 10), ["a" * 10, "a" * 10, "a" * 5])
        self.assertEqual(ms.wrapped("漢字漢", 4), ["漢字", "漢"])
        self.assertEqual(ms.text_width("e\u0301漢"), 3)

    def test_a_number_keeps_its_unit(self):
        self.assertEqual(ms.wrapped("agreement 55 % of", 12), ["agreement", "55 % of"])

    def test_a_table_without_rows_is_a_heading(self):
        self.assertIn("Speed", ms.table_text(table()))


class Escaping(unittest.TestCase):
    def test_terminal_text_moves_nothing_and_says_what_was_there(self):
        text = ms.terminal_text(HOSTILE)
        self.assertTrue(text.isprintable())
        for seen in ("\\x1b[31mred\\x07", "\\u202egnp", "\\x0d\\x0a", "\\udcff", "\\x85", "\\u2028"):
            self.assertIn(seen, text)

    def test_plain_text_of_any_script_is_left_alone(self):
        for text in ("plain", "naïve 🌍", "漢字", "a\\b", ""):
            self.assertEqual(ms.terminal_text(text), text)

    def test_markdown_cell_stays_one_cell(self):
        text = ms.markdown_text(HOSTILE)
        self.assertNotRegex(text, r"(?<!\\)\||[\r\n]|<b>|(?<!\\)`|(?<!\\)\]")
        self.assertEqual(ms.markdown_text("a|b\r\nc\nd"), "a\\|b<br>c<br>d")
        self.assertEqual(ms.markdown_text("qwen3_8b _x_ *y*"), "qwen3_8b \\_x\\_ \\*y\\*")

    def test_html_cannot_be_left(self):
        text = ms.html_text('</script><img src=x onerror="a()">\x00\u202e')
        self.assertNotRegex(text, r"[<>\"\x00\u202e]")

    def test_a_megabyte_of_one_word_is_rendered_in_linear_time(self):
        self.assertEqual(len(ms.terminal_text("\x1b" * 250_000)), 1_000_000)


class Markdown(unittest.TestCase):
    def test_pipe_table_with_alignment_and_units(self):
        self.assertEqual(ms.table_markdown(table(("a|b", 1.25, None))), "\n".join((
            "**A title**", "", "| Name | Speed [tokens/s] | Share [%] |", "| :--- | ---: | ---: |",
            "| a\\|b | 1.2 | – |", "", "A footer.  ", "")))


class LessonTable(unittest.TestCase):
    def test_four_rows_filled_from_the_suite(self):
        rows = ms.lesson_table(made.suite_notebook()).rows
        self.assertEqual([row[0] for row in rows], [words for words, _, _ in ms.LESSON_ROWS])
        self.assertEqual([row[3] for row in rows], ["2.31×", "1.22×", "0.93×", "0.81×"])
        self.assertIn(rows[0][5][:3], ("yes", "no,"))

    def test_footer_names_track_engine_model_context_and_day(self):
        footer = ms.lesson_table(made.suite_notebook()).footer[0]
        for fact in ("nvidia", "vllm 0.32.0", "Qwen3-8B", "4,096 tokens", "2026-01-01", "ngram"):
            self.assertIn(fact, footer)

    def test_rows_without_a_measurement_stay_pending(self):
        for records in ([], made.lesson_lines()):
            self.assertEqual({cell for row in ms.lesson_table(records).rows for cell in row[1:]}, {ms.PENDING})

    def test_latest_comparison_wins(self):
        records = made.suite_notebook()
        newer = dict(records[2], baseline_tokens_per_s=10.0, speculative_tokens_per_s=15.0, throughput_ratio=None)
        row = ms.lesson_table(records + [newer]).rows[0]
        self.assertEqual(row[1:4], ("10.0", "15.0", "1.50×"))

    def test_the_lessons_own_lines_fill_the_mixed_row_at_ten(self):
        records = [dict(record, concurrency=10) for record in made.lesson_lines()]
        self.assertEqual(ms.lesson_table(records).rows[3][1:], ("40.0", "60.0", "1.50×", "–", "no, 11 of 12"))


TEMPLATE = """# My notes\r
\r
| Workload | Baseline tokens/s | With draft tokens/s | Ratio | Acceptance | Completions identical |\r
|---|---|---|---|---|---|\r
| Copy-heavy (quote a function back) | | | | | expected: yes |\r
| Closed questions |  pending           | *pending* | 9.99 | | expected: yes |\r
| Open-ended writing | | | | | expected: yes |\r
| Something else | | | | | |\r
| Concurrency 10, mixed |  |  |  |  | expected: yes |   \r
\r
| Other | table |\r
|---|---|\r
| Copy | |\r
trailing without newline | |"""


class FillPending(unittest.TestCase):
    def test_only_pending_cells_change(self):
        filled = ms.fill_pending(TEMPLATE, made.suite_notebook())
        before, after = TEMPLATE.split("\r\n"), filled.split("\r\n")
        self.assertEqual(len(before), len(after))
        self.assertEqual([i for i in range(len(before)) if before[i] != after[i]], [4, 5, 6, 8])
        self.assertEqual(after[5].split("|")[2], " 38.8               ")      # padded to the cell's own width
        self.assertEqual(after[5].split("|")[4], " 9.99 ")
        self.assertTrue(after[8].endswith("|   "))
        self.assertRegex(after[4], r"^\| Copy-heavy \(quote a function back\) \| 38.8 \| 89.\d \| 2.31× \| 40 % \| (yes|no), ")

    def test_nothing_measured_changes_nothing(self):
        for text in (TEMPLATE, "", "no table", "|", "|||\n|-|\n"):
            self.assertEqual(ms.fill_pending(text, []), text)
            self.assertEqual(ms.fill_pending(text, made.lesson_lines()), text)

    def test_filling_twice_is_filling_once(self):
        once = ms.fill_pending(TEMPLATE, made.suite_notebook())
        self.assertEqual(ms.fill_pending(once, made.suite_notebook()), once)

    def test_a_fenced_table_is_an_example_and_stays(self):
        text = "```\n" + TEMPLATE.replace("\r", "") + "\n```\n"
        self.assertEqual(ms.fill_pending(text, made.suite_notebook()), text)

    def test_our_own_markdown_table_can_be_filled_later(self):
        empty = ms.table_markdown(ms.lesson_table([]))
        filled = ms.fill_pending(empty, made.suite_notebook())
        self.assertNotIn(ms.PENDING, filled)
        whole = ms.table_markdown(ms.lesson_table(made.suite_notebook()))
        self.assertEqual([line.split() for line in filled.splitlines()[2:8]], [line.split() for line in whole.splitlines()[2:8]])

    def test_tables_without_outer_pipes(self):
        text = "Workload | Baseline tokens/s | Ratio\n--- | --- | ---\nCopy | | pending\nOpen | x |\n"
        self.assertEqual(ms.fill_pending(text, made.suite_notebook()),
                         "Workload | Baseline tokens/s | Ratio\n--- | --- | ---\nCopy | 38.8 | 2.31×  \nOpen | x |\n")


class TutorialTables(unittest.TestCase):
    def test_two_tables_a_workload_and_the_noise_floor_first(self):
        tables = ms.tutorial_tables(made.notebook())
        self.assertEqual(len(tables), 6)
        self.assertEqual([row[0] for row in tables[0].rows], list(made.CONFIGURATIONS))
        self.assertEqual([column.name for column in tables[0].columns[2:5]], ["Speedup at 1", "Speedup at 4", "Speedup at 16"])
        self.assertTrue(tables[1].rows[0][0].startswith("noise floor"))
        self.assertRegex(tables[5].rows[1][3], r"^1[78] of 26$")

    def test_missing_levels_are_not_measured(self):
        records = [r for r in made.notebook() if (r.get("server_label") or r.get("speculative_label"), r["concurrency"]) != ("ngram", 4)]
        self.assertIsNone(ms.tutorial_tables(records)[0].rows[0][3])
        self.assertEqual(ms.tutorial_tables([]), [])


class Blocks(unittest.TestCase):
    def test_endpoint_block_is_short_and_every_number_has_a_unit(self):
        record = made.notebook()[1]
        self.assertEqual(ms.endpoint_block(record)[0], "ngram · vllm 0.32.0 · chat · concurrency 1")
        text = "\n".join(ms.endpoint_block(record))
        for fact in ("26 of 26 answered", "tokens/s a request", "TTFT p50", "TPOT p50", "ms", "max 5.68 s", "rate 10.0 %",
                     "bonus token included", "a target pass", "from response fields"):
            self.assertIn(fact, text)
        self.assertLessEqual(len(ms.endpoint_block(record)), 10)

    def test_missing_is_said_never_zero(self):
        record = dict(made.lesson_lines()[0], output_tokens=None, output_tokens_per_s=None)
        text = "\n".join(ms.endpoint_block(record))
        self.assertIn("tokens not measured", text)
        self.assertNotIn("TTFT", text)
        self.assertIn("not measured: no drafts", "\n".join(ms.endpoint_block(
            dict(made.notebook()[1], acceptance={"missing": "no drafts in this run"}))))
        self.assertTrue(ms.endpoint_block({}))

    def test_failures_show_the_first_message_harmlessly(self):
        record = dict(made.notebook()[0], completed=25, failed=1, first_error="HTTP 503 \x1b[2Jbusy")
        self.assertIn("1 failed; first: HTTP 503 \\x1b[2Jbusy", "\n".join(ms.endpoint_block(record)))

    def test_comparison_block_tells_words_reasons_and_places(self):
        text = "\n".join(ms.comparison_block(made.notebook()[2], 120))
        for fact in ("ngram against baseline", "of 26 answers", "noise floor", "at character 318 (byte 318)", "margin 0.0489 nats",
                     "1.38× [1.30, 1.46] from 26 pairs", "FASTER", "ROUNDING ONLY", "its interval excludes 1"):
            self.assertIn(fact, text)
        self.assertTrue(ms.comparison_block({}))
        self.assertIn("11 of 12 answers", "\n".join(ms.comparison_block(made.lesson_lines()[2])))

    def test_caveats_bring_their_remedy(self):
        text = "\n".join(ms.comparison_block(made.notebook()[-1]))
        self.assertIn("  ! The server cannot batch more than its slots.\n    try: Start it with more slots", text)

    def test_blocks_keep_to_the_width(self):
        for record in made.notebook() + made.lesson_lines():
            block = ms.endpoint_block if ms.record_kind(record) == "endpoint" else ms.comparison_block
            self.assertLessEqual(max(map(ms.text_width, block(record, 60))), 60)


class Notebook(unittest.TestCase):
    def test_one_row_a_run(self):
        rows = ms.notebook_listing(made.notebook() + made.suite_notebook() + made.lesson_lines() + [{"other": 1}]).rows
        self.assertEqual([row[0] for row in rows], ["l40s", "lesson", "old-run"])
        self.assertEqual(rows[1][1:4], ("2026-01-01", "vllm 0.32.0", "copy at 1; closed at 1; open at 1; mixed at 10"))
        self.assertEqual(rows[2][4], "speculative")

    def test_runs_measured_apart_are_joined_by_prompts_and_model(self):
        base, spec, compared = made.notebook()[:3]
        spec, compared = dict(spec, run="b", label="b/ngram"), dict(compared, run="c", label="c/comparison")
        cell = ms.result_cells([base, spec, compared])[0]
        self.assertIs(cell.baseline, base)
        self.assertIs(cell.speculative, spec)

    def test_garbage_values_are_not_measured(self):
        record = dict(made.notebook()[2], throughput_ratio=[], decode_ratio="x", text_comparison=None, verdict=7, concurrency="many",
                      break_even=3, noise_floor=True, caveats={"a": 1}, advice="no")
        ms.comparison_block(record)
        ms.tutorial_tables([record])
        ms.lesson_table([record])
        ms.notebook_listing([record])


class OneFile(unittest.TestCase):
    def test_no_name_is_defined_twice(self):
        """In one file of many rooms the later definition would silently replace the earlier."""
        names = [node.name for node in ast.parse(pathlib.Path(ms.__file__).read_text("utf-8")).body
                 if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))]
        self.assertEqual({name for name in names if names.count(name) > 1}, set())


if __name__ == "__main__":
    unittest.main()
