"""The shape of the one file: standard library only, sections in order, each using only what stands above it."""
import ast
import re
import sys
import unittest
from pathlib import Path

import measure_speculative as ms

PATH = Path(ms.__file__)
SOURCE = PATH.read_text(encoding="utf-8")
BANNER = re.compile(r"^# =+\n# (\d+)\. ([^\n(]+?) \(([^\n]*)\)\n# =+$", re.MULTILINE)
IO_MODULES = {"asyncio", "socket", "subprocess", "signal", "shutil", "tempfile", "threading", "time", "fcntl", "msvcrt"}
PURE_SECTIONS = (1, 2, 4, 5, 9, 10, 11, 12, 14)


def banners():
    """(first line, number, title, kind) of every section, in order."""
    return [(SOURCE.count("\n", 0, match.start()) + 1, int(match.group(1)), match.group(2), match.group(3)) for match in BANNER.finditer(SOURCE)]


def section_of(line):
    return max((number for start, number in HOMES if start <= line), default=0)


def defined(node):
    """The names that a top-level statement defines."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)]


HOMES = [(start, number) for start, number, _, _ in banners()]


class Shape(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.tree = ast.parse(SOURCE)

    @classmethod
    def tearDownClass(cls):
        del cls.tree        # half a million objects, which every collection before a measured pass would walk

    def test_sections_come_in_order_and_say_their_kind(self):
        numbers = [number for _, number, _, _ in banners()]
        self.assertEqual(numbers, list(range(1, 17)))
        for _, number, title, kind in banners():
            self.assertRegex(kind, "pure|I/O", title)

    def test_a_section_uses_only_what_stands_above_it(self):
        home = {name: section_of(node.lineno) for node in self.tree.body for name in defined(node)}
        wrong = []
        for node in self.tree.body:
            here = section_of(node.lineno)
            own = {name.arg for name in ast.walk(node) if isinstance(name, ast.arg)}
            own |= {name.id for name in ast.walk(node) if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store)}
            for name in ast.walk(node):
                if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Load) and name.id not in own and home.get(name.id, 0) > here:
                    wrong.append(f"section {here}, line {name.lineno}: {name.id} is of section {home[name.id]}")
        self.assertEqual(wrong, [])

    def test_pure_sections_touch_no_clock_file_or_socket(self):
        wrong = []
        for node in self.tree.body:
            if section_of(node.lineno) not in PURE_SECTIONS:
                continue
            for name in ast.walk(node):
                used = name.value.id if isinstance(name, ast.Attribute) and isinstance(name.value, ast.Name) else name.id if isinstance(name, ast.Name) else ""
                if used in IO_MODULES | {"open", "print"}:
                    wrong.append(f"line {name.lineno}: {used}")
        self.assertEqual(wrong, [])

    def test_nothing_but_the_standard_library(self):
        if not hasattr(sys, "stdlib_module_names"):
            self.skipTest("Python before 3.10 does not list its library")
        for path in [PATH, *Path(__file__).parent.rglob("*.py")]:
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else (
                    [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else [])
                for name in names:
                    self.assertIn(name.split(".")[0], sys.stdlib_module_names | {"measure_speculative", "tests"}, path)

    def test_public_functions_say_what_their_value_is(self):
        silent = []
        said = {one.name for node in self.tree.body if isinstance(node, ast.ClassDef) and not node.bases for one in node.body
                if isinstance(one, ast.FunctionDef) and ast.get_docstring(one)}     # an override means what its base says
        for node in self.tree.body:
            methods = node.body if isinstance(node, ast.ClassDef) else []
            for one in [node, *methods]:
                named = isinstance(one, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
                if named and not one.name.startswith("_") and not node.name.startswith("_") and (
                        not ast.get_docstring(one) and not (one is not node and node.bases and one.name in said)):
                    silent.append(f"line {one.lineno}: {one.name}")
        self.assertEqual(silent, [])

    def test_the_manual_names_every_verb(self):
        for verb in ms.VERBS:
            if verb not in ("", "demo-server"):
                self.assertIn(verb, ms.__doc__)


if __name__ == "__main__":
    unittest.main()
