"""The sets in prompts/: sizes, ids, duplicates, schemas, and the arithmetic of every word problem."""
import ast
import json
import re
import unittest
from fractions import Fraction
from pathlib import Path

import measure_speculative as ms

ROOT = Path(__file__).parent.parent
CALCULATIONS = Path(__file__).parent / "math_calculations.json"
JSON_TYPES = {"string": str, "integer": int, "number": (int, float), "boolean": bool, "array": list, "object": dict}


def records(name):
    return [json.loads(line) for line in (ROOT / "prompts" / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]


def text_of(record):
    return record.get("prompt") or record["messages"][-1]["content"]


def passages(text):
    words = re.findall(r"\w+", text.lower())
    return {tuple(words[place:place + 5]) for place in range(len(words) - 4)}


def exactly(expression):
    """The value of an arithmetic expression in exact fractions."""
    operations = {ast.Add: lambda a, b: a + b, ast.Sub: lambda a, b: a - b, ast.Mult: lambda a, b: a * b, ast.Div: lambda a, b: a / b,
                  ast.FloorDiv: lambda a, b: Fraction(a // b), ast.Mod: lambda a, b: a % b, ast.Pow: lambda a, b: a ** b}

    def value(node):
        if isinstance(node, ast.Constant):
            return Fraction(ast.get_source_segment(expression, node))
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -value(node.operand)
        return operations[type(node.op)](value(node.left), value(node.right))

    return value(ast.parse(expression, mode="eval").body)


class Sets(unittest.TestCase):
    def test_sizes_ids_and_the_programs_own_reading(self):
        for name in ms.SETS:
            with self.subTest(name):
                found = records(name)
                self.assertGreaterEqual(len(found), 78)
                self.assertEqual([record["id"] for record in found], [f"{name}-{number:03d}" for number in range(1, len(found) + 1)])
                read = ms.read_prompt_file(str(ROOT / "prompts" / f"{name}.jsonl"))
                self.assertEqual((len(read.prompts), read.caveats), (len(found), ()))
                self.assertEqual({prompt.workload for prompt in read.prompts}, {name})

    def test_no_duplicates_and_no_near_duplicates(self):
        for name in ms.SETS:
            found = records(name)
            seen = [passages(text_of(record).rsplit("\n\n", 1)[0] if name == "math" else text_of(record)) for record in found]
            self.assertEqual(len({text_of(record)[:40] for record in found}), len(found), name)
            for place, one in enumerate(seen):
                for other in range(place):
                    shared = len(one & seen[other]) / max(1, len(one | seen[other]))
                    self.assertLess(shared, 0.5, (found[place]["id"], found[other]["id"]))

    def test_lengths_vary(self):
        for name in ms.SETS:
            lengths = sorted(len(text_of(record)) for record in records(name))
            self.assertGreater(lengths[-1], 3 * lengths[0], name)

    def test_mixed_is_drawn_evenly_from_the_others(self):
        others = {record["id"]: record for name in ms.SETS if name != "mixed" for record in records(name)}
        drawn = [record["drawn_from"] for record in records("mixed")]
        self.assertEqual({name: sum(identity.startswith(name) for identity in drawn) for name in ms.SETS[:-1]}, dict.fromkeys(ms.SETS[:-1], 16))
        for record in records("mixed"):
            self.assertEqual(text_of(record), text_of(others[record["drawn_from"]]))

    def test_the_suites_find_prompts_that_nobody_has_asked(self):
        for suite in ms.SUITES:
            _, options = ms.parse_arguments(["demo", "--suite", suite])
            plan = ms.plan_of(ms.wishes_of(options)[0], False)
            digests = [ms.prompt_sha256(prompt) for block in plan.blocks for prompt in block.prompts]
            self.assertEqual(len(digests), len(set(digests)))
            if suite == "tutorial":
                self.assertEqual([len(block.prompts) for block in plan.blocks], [26] * 9)


class Intents(unittest.TestCase):
    def test_every_word_problem_by_calculation(self):
        expressions = json.loads(CALCULATIONS.read_text())
        found = records("math")
        self.assertEqual(set(expressions), {record["id"] for record in found})
        for record in found:
            self.assertEqual(exactly(expressions[record["id"]]), Fraction(record["answer"]), record["id"])

    def test_closed_answers_are_words_that_can_be_looked_for(self):
        graded = [record for record in records("closed") if "answer" in record]
        self.assertGreaterEqual(len(graded), 50)
        for record in graded:
            for choice in record["answer"] if isinstance(record["answer"], list) else [record["answer"]]:
                self.assertTrue(choice.strip() and len(choice) < 120, record["id"])

    def test_copy_prompts_hold_something_to_copy(self):
        for record in records("copy"):
            self.assertIn("\n", record["prompt"], record["id"])
            self.assertGreater(len(record["prompt"]), 200)

    def test_agent_prompts_have_tools_and_their_answer_fits_the_schema(self):
        for record in records("agent"):
            with self.subTest(record["id"]):
                self.assertEqual([message["role"] for message in record["messages"]], ["system", "user"])
                functions = {tool["function"]["name"]: tool["function"] for tool in record["tools"]}
                self.assertEqual(len(functions), len(record["tools"]))
                for name, function in functions.items():
                    self.assertRegex(name, r"\A[A-Za-z0-9_-]{1,64}\Z")
                    schema = function["parameters"]
                    self.assertLessEqual(set(schema.get("required", ())), set(schema["properties"]))
                wanted = functions[record["answer"]["function"]]["parameters"]["properties"]
                for key, value in record["answer"]["arguments"].items():
                    self.assertIsInstance(value, JSON_TYPES[wanted[key]["type"]])
                    self.assertIn(value, wanted[key].get("enum", [value]))


if __name__ == "__main__":
    unittest.main()
