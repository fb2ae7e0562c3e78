"""Section 3: files that people have become prompts; levels get slices of their own. Samples are made up in the files' shapes."""
import codecs
import gzip
import json
import unittest
from pathlib import Path

import measure_speculative as ms

DATA = Path(__file__).parent / "data" / "prompts"


def parse(data, name="some.jsonl", **options):
    return ms.parse_prompts(data if isinstance(data, bytes) else data.encode(), name, "file", **options)


def lines(*records):
    return "".join(json.dumps(record) + "\n" for record in records)


def asked(read):
    return [prompt.messages[-1]["content"] for prompt in read.prompts]


class Shapes(unittest.TestCase):
    def test_plain_text(self):
        read = parse("first prompt\n\n  second, with commas; and more  \n", "my-prompts.txt")
        self.assertEqual(asked(read), ["first prompt", "second, with commas; and more"])
        self.assertEqual([prompt.id for prompt in read.prompts], ["my-prompts-0", "my-prompts-1"])

    def test_mt_bench_asks_the_first_turn(self):
        read = parse(lines({"question_id": 81, "category": "writing", "turns": ["Compose", "Shorten"]},
                           {"question_id": 82, "category": "math", "turns": ["Add"], "reference": ["3"]}))
        self.assertEqual(asked(read), ["Compose", "Add"])
        self.assertEqual([(prompt.id, prompt.category) for prompt in read.prompts], [("81", "writing"), ("82", "math")])

    def test_gsm8k_is_graded_by_what_follows_the_marks(self):
        read = parse(lines({"question": "How many?", "answer": "First 2*3=<<2*3=6>>6.\n#### 1,006"}), "gsm8k_test.jsonl")
        self.assertEqual((read.prompts[0].id, read.prompts[0].answer), ("gsm8k_test-0", "1,006"))

    def test_human_eval_is_wrapped_for_chat_and_keeps_its_blanks(self):
        code = "def f(x):\n    \"\"\"Return x.\"\"\"\n"
        data = gzip.compress(lines({"task_id": "HumanEval/0", "prompt": code, "entry_point": "f", "test": "", "canonical_solution": ""}).encode())
        read = parse(data, "HumanEval.jsonl.gz")
        self.assertEqual(read.prompts[0].id, "HumanEval/0")
        self.assertIn(code, asked(read)[0])
        self.assertTrue(asked(read)[0].startswith("Complete this Python function"))

    def test_bfcl_schemas_become_openais_at_every_depth(self):
        record = {"id": "simple_0", "question": [[{"role": "user", "content": "Area?"}]], "function": [
            {"name": "geometry.area", "description": "d", "parameters": {"type": "dict", "required": ["base"], "properties": {
                "base": {"type": "float"}, "points": {"type": "tuple", "items": {"type": "any"}},
                "type": {"type": "dict", "properties": {"unit": {"type": "string", "default": "dict"}}}}}}]}
        prompt = parse(lines(record)).prompts[0]
        function = prompt.tools[0]["function"]
        self.assertEqual(function["name"], "geometry_area")
        self.assertEqual(function["parameters"], {"type": "object", "required": ["base"], "properties": {
            "base": {"type": "number"}, "points": {"type": "array", "items": {}},
            "type": {"type": "object", "properties": {"unit": {"type": "string", "default": "dict"}}}}})
        self.assertEqual(prompt.answer, {"function": "geometry_area"})

    def test_tools_as_text_and_a_system_message(self):
        tools = json.dumps([{"name": "f", "parameters": {"type": "dict", "properties": {}}}])
        prompt = parse(lines({"system": "Be brief.", "conversations": [{"from": "user", "value": "Do it"}, {"from": "assistant", "value": "ok"}],
                              "tools": tools})).prompts[0]
        self.assertEqual(prompt.messages[-1]["content"], "Do it")
        self.assertEqual(prompt.tools[0]["function"]["name"], "f")

    def test_sharegpt_takes_the_first_human_turn(self):
        array = json.dumps([{"id": "a", "conversations": [{"from": "gpt", "value": "Hi"}, {"from": "human", "value": "Who?"}]},
                            {"id": "b", "conversations": [{"from": "human", "value": "What?"}, {"from": "gpt", "value": "That."}]}])
        self.assertEqual(asked(parse(array, "share.json")), ["Who?", "What?"])

    def test_openai_batches_messages_prompts_and_instructions(self):
        read = parse(lines({"custom_id": "r1", "method": "POST", "url": "/v1/chat/completions",
                            "body": {"messages": [{"role": "user", "content": "one"}], "max_tokens": 7}},
                           {"messages": [{"role": "user", "content": "two"}, {"role": "assistant", "content": "said"}]},
                           {"prompt": "three"}, {"instruction": "four", "input": "five"}, {"text": "six"}))
        self.assertEqual(asked(read), ["one", "two", "three", "four\n\nfive", "six"])
        self.assertEqual((read.prompts[0].id, read.prompts[0].max_tokens), ("r1", 7))

    def test_csv_with_a_prompt_column(self):
        read = parse('id,prompt,category\r\n7,"Say ""hi"", twice\nplease",chat\r\n8,Bye,chat\r\n', "p.csv")
        self.assertEqual(asked(read), ['Say "hi", twice\nplease', "Bye"])
        self.assertEqual(read.prompts[0].id, "7")

    def test_one_object_over_several_lines(self):
        self.assertEqual(asked(parse(json.dumps({"prompts": [{"prompt": "a"}, {"prompt": "b"}]}, indent=2))), ["a", "b"])

    def test_a_key_of_ones_own(self):
        self.assertEqual(asked(parse(lines({"frage": "Wie?"}), prompt_key="frage")), ["Wie?"])


class PublicFiles(unittest.TestCase):
    """Files that people really have, as they are (data/prompts/LICENSES.md)."""

    COUNTS = {"mt_bench_question.jsonl.gz": 80, "vicuna_bench_question.jsonl.gz": 80, "gsm8k_test.jsonl.gz": 1319, "HumanEval.jsonl.gz": 164,
              "BFCL_v4_simple_python.json.gz": 400, "BFCL_v4_parallel.json.gz": 200}

    def test_every_record_becomes_a_prompt(self):
        for name, count in self.COUNTS.items():
            with self.subTest(name):
                read = ms.read_prompt_file(str(DATA / name))
                self.assertEqual(len(read.prompts) + len([c for c in read.caveats if "left out" in c.sentence]), count)
                self.assertGreaterEqual(len(read.prompts), count - 1)

    def test_gsm8k_answers_are_all_numbers(self):
        for prompt in ms.read_prompt_file(str(DATA / "gsm8k_test.jsonl.gz")).prompts:
            float(prompt.answer.replace(",", ""))

    def test_bfcl_tools_are_openais(self):
        text = json.dumps([prompt.tools for prompt in ms.read_prompt_file(str(DATA / "BFCL_v4_simple_python.json.gz")).prompts])
        for kind in ("dict", "float", "tuple", "any"):
            self.assertNotIn(f'"type": "{kind}"', text)

    def test_the_tutorials_limit(self):
        read = ms.read_prompt_file(str(DATA / "mt_bench_question.jsonl.gz"))
        self.assertEqual(len(ms.take(read.prompts, 78)), 78)


class Encodings(unittest.TestCase):
    def test_marks_and_line_ends_do_not_matter(self):
        text = lines({"prompt": "Grüße"}, {"prompt": "a\u2028b"}).replace("\n", "\r\n")
        for encode in (lambda: text.encode("utf-8"), lambda: codecs.BOM_UTF8 + text.encode("utf-8"), lambda: text.encode("utf-16")):
            self.assertEqual(asked(parse(encode())), ["Grüße", "a\u2028b"])

    def test_raw_separators_inside_json_do_not_end_a_line(self):
        self.assertEqual(asked(parse('{"prompt": "a\u2028b"}\n')), ["a\u2028b"])


class Complaints(unittest.TestCase):
    """Every complaint names file, record and what was found."""

    def complaint(self, data, name="p.jsonl"):
        with self.assertRaises(ms.MeasureError) as caught:
            parse(data, name)
        self.assertTrue(caught.exception.hint)
        return caught.exception.sentence

    def test_what_is_said(self):
        for data, words in (
                (b"gut\nGr\xfc\xdfe\n", ("p.jsonl, line 2", "0xfc", "UTF-8")),
                (b"", ("p.jsonl", "empty")), (b"\n \n", ("empty",)),
                (lines({"prompt": "a"}, {"frage": "b", "x": 1}), ("record 2", "'frage', 'x'")),
                (lines({"prompt": "a"}, {"prompt": "  "}), ("record 2", "empty")),
                (lines({"prompt": "a"}) + '{"prompt": "b"\n', ("record 2 (line 2)", "no JSON")),
                (lines({"prompt": "a"}) + "[1]\n", ("record 2", "list")),
                (b"\x1f\x8bnope", ("gzip",)), (gzip.compress(b"abc")[:-4], ("cut short",)),
                (b"a\x00b", ("NUL", "line 1")), (lines({"prompt": 5}), ("record 1", "int")),
                (lines({"messages": [{"content": "x"}]}), ("record 1", "role"))):
            sentence = self.complaint(data if isinstance(data, bytes) else data.encode())
            for word in words:
                self.assertIn(word, sentence)

    def test_duplicates_are_said_aloud_and_asked_once(self):
        read = parse(lines({"id": "a", "prompt": "x"}, {"id": "a", "prompt": "y"}, {"id": "c", "prompt": "x"}))
        self.assertEqual([prompt.id for prompt in read.prompts], ["a", "a-2"])
        self.assertEqual(len(read.caveats), 2)


class Choice(unittest.TestCase):
    def prompts(self, count, categories=1):
        return [ms.Prompt(f"p{number}", "w", ({"role": "user", "content": str(number)},), f"c{number // (count // categories)}")
                for number in range(count)]

    def test_a_limit_is_spread_over_the_categories(self):
        taken = ms.take(self.prompts(80, 8), 78)
        self.assertEqual(len(taken), 78)
        counts = sorted(sum(prompt.category == f"c{number}" for prompt in taken) for number in range(8))
        self.assertEqual(counts, [9, 9, 10, 10, 10, 10, 10, 10])
        self.assertEqual([prompt.id for prompt in ms.take(self.prompts(10), 3)], ["p0", "p1", "p2"])

    def test_levels_never_share_a_prompt(self):
        prompts = self.prompts(78)
        slices = [ms.slice_for_level(prompts, place, 3) for place in range(3)]
        self.assertEqual([len(each) for each in slices], [26, 26, 26])
        self.assertEqual(len({prompt.id for each in slices for prompt in each}), 78)

    def test_too_few_prompts_for_the_levels_is_said_before_measuring(self):
        with self.assertRaises(ms.MeasureError):
            ms.plan_of([ms.Wish("w", tuple(self.prompts(2)), (1, 4, 16), None)], False)
        plan = ms.plan_of([ms.Wish("w", tuple(self.prompts(12)), (1, 4, 16), None)], False)
        self.assertIn("never 16 requests at once", " ".join(remark.sentence for remark in plan.remarks))

    def test_a_second_workload_never_repeats_the_first_ones_prompts(self):
        prompts = tuple(self.prompts(12))
        plan = ms.plan_of([ms.Wish("a", prompts[:8], (1,), None), ms.Wish("b", prompts, (1,), None)], False)
        self.assertEqual([len(block.prompts) for block in plan.blocks], [8, 4])

    def test_prompts_of_two_workloads_never_share_an_id(self):
        one = self.prompts(2)
        two = [ms.replace(prompt, messages=({"role": "user", "content": f"other {prompt.id}"},)) for prompt in one]
        plan = ms.plan_of([ms.Wish("a", tuple(one), (1,), None), ms.Wish("b", tuple(two), (1,), None)], False)
        self.assertEqual([prompt.id for prompt in plan.prompts], ["p0", "p1", "b:p0", "b:p1"])

    def test_the_digest_is_of_what_is_sent(self):
        one, two = self.prompts(2)
        self.assertEqual(ms.prompt_sha256(one), ms.prompt_sha256(ms.replace(one, id="other", category="other")))
        self.assertNotEqual(ms.prompt_sha256(one), ms.prompt_sha256(two))
        self.assertNotEqual(ms.prompts_sha256([one, two]), ms.prompts_sha256([two, one]))


if __name__ == "__main__":
    unittest.main()
