"""Section Tables: the charts, the page, and golden files made from stored records.

The golden files in tests/data/records are made again by one command, and its difference is then read:

    python3 -m tests.test_page write
"""
from __future__ import annotations

import html.parser
import json
import pathlib
import re
import sys
import time
import unittest
from typing import Any, Dict, List, Tuple

import measure_speculative as ms
from tests import synthetic_records as made

DATA = pathlib.Path(__file__).parent / "data" / "records"
STORED = ("tutorial", "suite", "lesson", "single")     # names of the stored notebooks: NAME.jsonl


def stored(name: str) -> List[Dict[str, Any]]:
    return [json.loads(line) for line in (DATA / f"{name}.jsonl").read_text("utf-8").splitlines()]


def golden(name: str) -> Dict[str, str]:
    """What is kept for a stored notebook: file name -> text. The tool's version is left open."""
    records = stored(name)
    tables = [ms.lesson_table(records), *ms.tutorial_tables(records), ms.notebook_listing(records)]
    blocks = [ms.endpoint_block(each) if ms.record_kind(each) == "endpoint" else ms.comparison_block(each) for each in records]
    return {f"{name}.html": ms.report_page(records).replace(ms.__version__, "VERSION"), f"{name}.csv": ms.csv_text(records),
            f"{name}.md": "\n".join(map(ms.table_markdown, tables)), f"{name}.txt": "\n".join(map(ms.table_text, tables)),
            f"{name}.screen.txt": "\n\n".join("\n".join(block) for block in blocks) + "\n",
            f"{name}.json": json.dumps(ms.export_json(records), indent=1, ensure_ascii=False) + "\n"}


def write_golden() -> None:
    notebooks = {"tutorial": made.notebook(["ngram", "dflash-public"], (1, 16)), "suite": made.suite_notebook(),
                 "lesson": made.lesson_lines(), "single": made.notebook([], (1, 4))}
    for name, records in notebooks.items():
        lines = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
        (DATA / f"{name}.jsonl").write_bytes(lines.encode("utf-8"))
        for file, text in golden(name).items():
            (DATA / file).write_bytes(text.encode("utf-8"))


class Reader(html.parser.HTMLParser):
    """What a browser would find: elements with their attributes, the text, and tags that do not nest."""

    EMPTY = {"meta", "path", "rect", "circle", "br"}

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: List[Tuple[str, Dict[str, Any]]] = []
        self.open: List[str] = []
        self.words: List[str] = []
        self.faults: List[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: List[Tuple[str, Any]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in self.EMPTY:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: List[Tuple[str, Any]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.faults.append(tag)

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())

    def count(self, tag: str) -> int:
        return sum(name == tag for name, _ in self.elements)


class Golden(unittest.TestCase):
    maxDiff = 2000

    def test_stored_records_give_the_stored_outputs(self):
        for name in STORED:
            for file, text in golden(name).items():
                with self.subTest(file):
                    self.assertEqual(text, (DATA / file).read_bytes().decode("utf-8"))


class Whole(unittest.TestCase):
    @classmethod
    def setUpClass(cls) -> None:
        began = time.perf_counter()
        cls.page = ms.report_page(made.notebook(), made.runs())
        cls.took_s = time.perf_counter() - began
        cls.read = Reader(cls.page)

    def test_size_and_time_of_the_tutorials_experiment(self):
        self.assertLess(len(self.page.encode("utf-8")), 1_500_000)
        self.assertLess(self.took_s, 5)

    def test_elements_nest_and_ids_are_unique(self):
        self.assertEqual((self.read.faults, self.read.open), ([], []))
        ids = [attrs["id"] for _, attrs in self.read.elements if "id" in attrs]
        self.assertEqual(len(ids), len(set(ids)))
        links = [attrs["href"][1:] for tag, attrs in self.read.elements if tag == "a"]
        self.assertLessEqual(set(links), set(ids))

    def test_no_script_no_network_no_handler(self):
        self.assertEqual([self.read.count(tag) for tag in ("script", "link", "img", "iframe", "object")], [0] * 5)
        self.assertNotRegex(self.page, r"url\(|@import|src=")
        self.assertFalse([key for _, attrs in self.read.elements for key in attrs if key.startswith("on")])

    def test_every_chart_has_words_and_every_table_a_box_that_scrolls(self):
        self.assertGreater(self.read.count("svg"), 15)
        self.assertEqual(self.read.count("svg"), self.page.count('role="img"><title>'))
        self.assertEqual(self.read.count("svg"), self.read.count("desc"))
        self.assertEqual(self.read.count("table"), self.page.count('<div class="scroll" tabindex="0" role="region"'))

    def test_every_section_of_the_issue_is_there(self):
        keys = [attrs["id"] for tag, attrs in self.read.elements if tag == "section"]
        self.assertEqual(keys, ["conditions", "best", "speedup", "rates", "position", "answers", "accuracy", "map",
                                "differences", "categories"])

    def test_verdict_stands_first_in_two_sentences(self):
        text = self.read.text
        self.assertLess(text.index("Yes, nearly everywhere"), text.index("Conditions"))
        self.assertIn("faster in 61 of 63 measurements and slower in 1 (suffix on chat, 16 requests at once)", text)
        self.assertIn("Same answers, within rounding", text)

    def test_first_difference_is_marked_with_what_stood_before_it(self):
        self.assertRegex(self.page, r"keeps pilot the under <mark>the</mark> pilot under")
        self.assertRegex(self.page, r"keeps pilot the under <mark>otherwise</mark> pilot under")
        self.assertIn("Asked: Question 3: what keeps the harbour calm?", self.page)

    def test_not_every_difference_is_shown(self):
        self.assertLessEqual(self.page.count('class="pair"'), 60)


class Pages(unittest.TestCase):
    def test_one_server_alone(self):
        text = Reader(ms.report_page(made.notebook([]))).text
        self.assertIn("One server, measured", text)
        self.assertIn("Nothing to compare", text)
        self.assertIn("44.7 tokens/s", text)

    def test_the_lessons_own_lines_are_not_judged(self):
        text = Reader(ms.report_page(made.lesson_lines())).text
        self.assertIn("A ratio, no verdict", text)
        self.assertIn("11 of 12 answers are the same byte for byte", text)

    def test_changed_answers_are_said_first(self):
        records = made.notebook(["ngram"], [1])
        records[2]["verdict"]["answers"] = "changed"
        text = Reader(ms.report_page(records)).text
        self.assertIn("Answers changed", text)
        self.assertIn("more than rounding differs with ngram on chat", text)

    def test_words_of_the_speed_verdict(self):
        for words, headline in ((["faster"] * 3, "Yes, it pays"), (["slower"] * 3, "No, it costs"),
                                (["faster", "slower", "slower"], "It depends"), (["not distinguishable"] * 3, "No difference")):
            records = made.notebook(["ngram"], [1])
            for record, word in zip(records[2::3], words):
                record["verdict"]["speed"] = word
            self.assertIn(headline, Reader(ms.report_page(records)).text)

    def test_an_empty_notebook_is_a_page(self):
        self.assertIn("Nothing measured yet", Reader(ms.report_page([])).text)

    def test_other_models_and_older_results_are_listed_apart(self):
        old = [dict(record, model="other", recorded_at="2025-01-01T00:00:00Z") for record in made.notebook(["ngram"], [1])]
        text = Reader(ms.report_page(old + made.notebook(["ngram"], [1]))).text
        self.assertIn("Also in the notebook", text)
        self.assertIn("3 results", text)

    def test_hostile_text_creates_nothing(self):
        hostile = '"></title></svg></script><svg onload=alert(1)><img src=x>\x1b[2J\u202e\x00'
        records = json.loads(json.dumps(made.notebook(["ngram"], [1]) + made.notebook(["ngram"], [1])))
        for record in records:
            for key in ("run", "model", "workload", "server_label", "speculative_label", "engine", "track", "base_url", "run_file"):
                record[key] = hostile
            record["caveats"] = [{"sentence": hostile, "remedy": hostile}]
            record["advice"] = [hostile]
            for each in record.get("text_comparison", {}).get("divergences", []):
                each.update(baseline_tail=hostile, speculative_tail=hostile * 9, prompt_id=hostile, kind=hostile)
        page = ms.report_page(records)
        read = Reader(page)
        self.assertEqual((read.faults, read.open), ([], []))
        self.assertEqual(read.count("img") + read.count("script"), 0)
        self.assertFalse([key for _, attrs in read.elements for key in attrs if key.startswith("on")])
        self.assertNotRegex(page, "[\x00-\x08\x0b-\x1f\u202e]")

    def test_differences_are_shortened_and_kept_as_the_notebook_has_them_without_run_files(self):
        records = made.notebook(["ngram"], [1])[:3]
        records[2]["text_comparison"]["divergences"][0]["baseline_tail"] = "x" * 1_000_000
        self.assertLess(len(ms.report_page(records)), 100_000)

    def test_a_run_file_that_tells_another_story_is_not_shown(self):
        records = made.notebook(["ngram"], [1])[:3]
        records[2]["text_comparison"]["divergences"][0]["baseline_tail"] = "not what the run file holds"
        page = ms.report_page(records, made.runs(["ngram"]))
        self.assertIn("… <mark>not</mark> what the run file holds", page)


class Charts(unittest.TestCase):
    def test_ticks_are_round_and_reach_the_top(self):
        self.assertEqual(ms.nice_ticks(1.0), [0.0, 0.2, 0.4, 0.6, 0.8, 1.0])
        self.assertEqual(ms.nice_ticks(10.6), [0.0, 2.5, 5.0, 7.5, 10.0, 12.5])
        self.assertEqual(ms.nice_ticks(0), [0.0, 1.0])
        for high in (0.003, 0.7, 1.01, 7, 99, 1234, 1e15):
            ticks = ms.nice_ticks(high)
            self.assertTrue(high <= ticks[-1] < 2.1 * high and len(ticks) <= 6, (high, ticks))

    def test_a_scale_places_values_and_holds_those_beyond_its_ends(self):
        self.assertEqual([ms.Scale(0, 10, 100, 200).at(v) for v in (0, 5, 10, 99, -1)], [100, 150, 200, 200, 100])
        self.assertAlmostEqual(ms.Scale(1, 16, 0, 100, log=True).at(4), 50)
        self.assertEqual(ms.Scale(3, 3, 0, 100).at(3), 50)

    def test_labels_are_moved_apart_and_stay_inside(self):
        self.assertEqual(ms.spread([10, 11, 50], 14, 100), [10, 24, 50])
        self.assertEqual(ms.spread([95, 99, 100], 14, 100), [72, 86, 100])
        self.assertEqual(ms.spread([], 14, 100), [])

    def test_a_logarithmic_chart_has_powers_of_two(self):
        self.assertEqual(ms.Chart("", "", "", 10.6, low=0.5).value_ticks, [0.5, 1, 2, 4, 8, 16])

    def test_unmeasured_points_are_left_out_and_an_empty_chart_is_said(self):
        chart = ms.Chart("Speed", "requests", "", 5)
        series = ms.Series("a", 0, (ms.Point(1, 2.0), ms.Point(4, None), ms.Point(16, 3.0, 2.5, 3.5)))
        drawn = ms.line_chart(chart, [series])
        self.assertEqual(drawn.count('class="mark"'), 3)        # two points, and the one beside the name
        self.assertIn("2 at 1, 3 at 16", drawn)
        self.assertIn("not measured", ms.line_chart(chart, [ms.Series("a", 0, (ms.Point(1, None),))]))
        self.assertIn("not measured", ms.bar_chart(chart, []))

    def test_styles_differ_in_more_than_colour(self):
        def look(style: int) -> Tuple[str, str]:
            drawn = ms.line_chart(ms.Chart("", "", "", 5), [ms.Series("a", style, (ms.Point(1, 2.0), ms.Point(2, 2.0)))])
            return (re.findall(r'transform="[^"]*" d="([^"]*)"', drawn)[0], str(re.findall(r'stroke-dasharray="([^"]*)"', drawn)))
        looks = [look(style) for style in range(8)]
        self.assertEqual(len({marker for marker, _ in looks}), 8)
        self.assertEqual(len({dash for _, dash in looks}), 8)

    def test_break_even_line_of_the_map_is_where_the_model_gives_one(self):
        # The lesson's table: k = 4, c = 0.20 breaks even at 0.46; k = 8, c = 0.35 at 0.76.
        self.assertAlmostEqual(ms._alpha_at(1.0, 4, 0.20), 0.46, places=2)
        self.assertAlmostEqual(ms._alpha_at(1.0, 8, 0.35), 0.76, places=2)
        self.assertIn("eagle, chat, acceptance 0.60, cost 0.100", ms.heat_map("Map", 4, [ms.MapPoint(0.6, 0.1, 0, "eagle, chat")]))

    def test_circles_of_the_map_do_not_cover_each_other(self):
        drawn = ms.heat_map("Map", 4, [ms.MapPoint(0.6, 0.05, 0, str(i)) for i in range(5)])
        tops = [float(top) for top in re.findall(r'class="point" cx="[\d.]+" cy="([\d.]+)"', drawn)]
        self.assertTrue(all(abs(a - b) >= 16 for a, b in zip(tops, tops[1:])), tops)


if __name__ == "__main__":
    if sys.argv[1:] == ["write"]:
        write_golden()
    else:
        unittest.main()
