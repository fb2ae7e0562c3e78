"""Section Tables: the spreadsheet, and the summary in the tutorial's shape."""
from __future__ import annotations

import csv
import io
import json
import pathlib
import unittest
from typing import List

import measure_speculative as ms
from tests import synthetic_records as made

DATA = pathlib.Path(__file__).parent / "data" / "records"


def parsed(text: str, delimiter: str = ",") -> List[List[str]]:
    return list(csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True))


class FormulaCells(unittest.TestCase):
    """Public report sharkdp/hyperfine#914: labels that run as formulas; naive escaping also spoils negative numbers."""

    def setUp(self) -> None:
        self.records = [json.loads(line) for line in (DATA / "formula-cells.jsonl").read_text("utf-8").splitlines()]
        columns = tuple(ms.Column(name) for name in self.records[0])
        self.table = ms.Table("", columns, tuple(tuple(record.values()) for record in self.records))

    def test_text_is_guarded_and_numbers_stay_numbers(self):
        rows = parsed(ms.table_csv(self.table))[1:]
        self.assertEqual(len(rows), 12)
        for record, row in zip(self.records, rows):
            guard = "'" if record["n"] <= 5 else ""
            self.assertEqual(row[1], guard + record["label"])
            self.assertEqual(row[2:4], ["-3.25", "1.5"])
            self.assertEqual(row[4], "" if record["accept_rate"] is None else "0.6")

    def test_lines_end_as_rfc_4180_says(self):
        text = ms.table_csv(self.table)
        self.assertEqual(text.count("\r\n"), 13)
        self.assertIn('"quote "" inside"', text)
        self.assertTrue(ms.table_csv(self.table, bom=True).startswith("\ufeffn,label"))

    def test_decimal_comma_parts_cells_by_semicolon(self):
        rows = parsed(ms.table_csv(self.table, decimal_comma=True), ";")
        self.assertEqual(rows[1], ["0", "'=1+1", "-3,25", "1,5", ""])
        self.assertEqual(rows[7][1], "plain, with comma")


class ResultRows(unittest.TestCase):
    def test_one_row_a_cell_with_both_servers_side_by_side(self):
        rows = list(csv.DictReader(io.StringIO(ms.csv_text(made.notebook()), newline="")))
        self.assertEqual(len(rows), 7 * 3 * 3)
        first = rows[0]
        records = made.notebook()
        self.assertEqual((first["run"], first["workload"], first["configuration"], first["concurrency"]), ("l40s", "chat", "ngram", "1"))
        self.assertEqual(float(first["baseline_wall_s"]), records[0]["wall_s"])
        self.assertEqual(float(first["speculative_tpot_p50_s"]), records[1]["tpot_s"]["p50"])
        self.assertEqual(float(first["decode_ratio"]), records[2]["decode_ratio"]["value"])
        self.assertEqual(int(first["accepted_tokens"]), records[1]["acceptance"]["accepted_tokens"])
        self.assertEqual(first["baseline_accuracy_of"], "")

    def test_every_number_returns_exactly(self):
        value = 0.1 + 0.2
        records = made.notebook()
        records[0]["wall_s"] = value
        row = next(csv.DictReader(io.StringIO(ms.csv_text(records), newline="")))
        self.assertEqual(float(row["baseline_wall_s"]), value)

    def test_columns_are_stable_and_unique(self):
        header = parsed(ms.csv_text([]))[0]
        self.assertEqual(header, list(ms.CSV_COLUMNS))
        self.assertEqual(len(set(header)), len(header))
        self.assertEqual(header[:4], ["run", "workload", "configuration", "concurrency"])
        self.assertTrue(all(len(row) == len(header) for row in parsed(ms.csv_text(made.notebook() + made.lesson_lines()))))

    def test_the_lessons_own_lines_and_a_server_alone(self):
        rows = list(csv.DictReader(io.StringIO(ms.csv_text(made.lesson_lines()), newline="")))
        self.assertEqual([(row["configuration"], row["throughput_ratio"], row["identical"]) for row in rows], [("speculative", "1.5", "11")])
        rows = list(csv.DictReader(io.StringIO(ms.csv_text(made.notebook()[:1]), newline="")))
        self.assertEqual([(row["configuration"], row["speculative_wall_s"]) for row in rows], [("", "")])
        self.assertNotEqual(rows[0]["baseline_wall_s"], "")

    def test_nothing_infinite_and_no_nan_reaches_a_cell(self):
        records = made.notebook()[:3]
        records[0]["wall_s"], records[1]["wall_s"] = float("nan"), float("inf")
        row = next(csv.DictReader(io.StringIO(ms.csv_text(records), newline="")))
        self.assertEqual((row["baseline_wall_s"], row["speculative_wall_s"]), ("", ""))

    def test_hostile_labels_are_harmless(self):
        records = [dict(record, run="=cmd|'/c calc'!A1\x00\x1b[2J\udcff") for record in made.notebook()[:3]]
        cell = next(csv.DictReader(io.StringIO(ms.csv_text(records), newline="")))["run"]
        self.assertEqual(cell, "'=cmd|'/c calc'!A1\\x00\\x1b[2J\\udcff")


class RequestRows(unittest.TestCase):
    def test_one_row_a_request_without_its_text(self):
        text = ms.requests_csv(made.runs(["ngram"]))
        rows = list(csv.DictReader(io.StringIO(text, newline="")))
        self.assertEqual(len(rows), 2 * 3 * 3 * made.PROMPTS)
        self.assertEqual((rows[1]["prompt_id"], rows[1]["completion_tokens"], rows[1]["ok"], rows[1]["error"]), ("p01", "230", "true", ""))
        self.assertEqual(float(rows[1]["ttft_s"]), 1.04 - 1.0)
        self.assertNotIn("harbour", text)


class Summary(unittest.TestCase):
    def test_shape_of_the_tutorial(self):
        summary = ms.export_json(made.notebook())
        self.assertEqual(summary["configs"], ["baseline", *made.CONFIGURATIONS])
        self.assertEqual(summary["concurrencies"], [1, 4, 16])
        self.assertEqual(list(summary["workloads"]), ["chat", "agent", "math"])
        chat, math = summary["workloads"]["chat"], summary["workloads"]["math"]
        self.assertEqual(set(chat), {"noise_floor_exact_match", "noise_floor_prefix_agreement", "rows"})
        self.assertEqual(set(chat["rows"][1]), {
            "config", "acceptance_length", "speedup", "throughput_tok_s", "tpot_p50_ms", "ttft_p50_s", "exact_match",
            "prefix_agreement", "gsm8k_accuracy"})
        self.assertEqual(list(chat["rows"][1]["speedup"]), ["1", "4", "16"])
        self.assertIsNone(chat["rows"][0]["gsm8k_accuracy"])
        self.assertIn(math["rows"][0]["gsm8k_accuracy"], (17 / 26, 18 / 26))
        json.dumps(summary, allow_nan=False)

    def test_empty_notebook(self):
        self.assertEqual(ms.export_json([])["workloads"], {})


if __name__ == "__main__":
    unittest.main()
