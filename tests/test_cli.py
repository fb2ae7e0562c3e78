"""Section 16: the commands as they are written in README and --help, their exit codes, and what they print."""
import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
import unittest
from pathlib import Path

import measure_speculative as ms
from tests.fakes import FakeServer
from tests.run import ProgramTest

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "measure_speculative.py"


def commands(text):
    """The command lines in a text that run this program, continuation lines joined, placeholders taken out."""
    text = text.replace("\\\n", " ")
    found = re.findall(r"^[ $]*(?:[A-Z_]+=\S+ )*python3? measure_speculative\.py(.*)$", text, re.MULTILINE)
    return [re.split(r"\s(?:\||>|&&|#)\s?", line)[0].strip() for line in found]


class Commands(ProgramTest):
    def test_every_example_in_help_is_read(self):
        for make_parser, _ in ms.VERBS.values():
            for command in commands(make_parser().format_help()):
                with self.subTest(command):
                    ms.parse_arguments(shlex.split(command))

    def test_every_command_in_the_readme_is_read(self):
        found = commands((ROOT / "README.md").read_text(encoding="utf-8"))
        self.assertGreater(len(found), 10)
        for command in found:
            with self.subTest(command):
                self.assertNotIn("...", command)
                ms.parse_arguments(shlex.split(command))

    def test_help_is_short_and_every_option_has_its_line(self):
        for verb, (make_parser, _) in ms.VERBS.items():
            text = make_parser().format_help()
            self.assertLess(len(text.splitlines()), 110, verb)
            if verb != "demo-server":
                self.assertLess(text.index("examples:"), text.index("options:"), verb)

    def test_the_version(self):
        for verb in ((), ("check",), ("report",)):
            outcome = self.run_program(*verb, "--version")
            self.assertEqual((outcome.code, outcome.out), (0, f"measure_speculative.py {ms.__version__}\n"))

    def test_the_lessons_options_keep_name_and_default(self):
        _, options = ms.parse_arguments(["--baseline-url", "h"])
        wanted = {"max_tokens": 192, "seed": 0, "repeats": 1, "timeout": 300.0, "label": "speculative-run", "api_key_env": "SPEC_API_KEY",
                  "labbook": "labbook.md", "speculative_url": [], "model": None, "prompts": None, "prompt_set": None}
        for name, value in wanted.items():
            self.assertEqual(getattr(options, name), value, name)

    def test_usage_errors_exit_with_2(self):
        for arguments in ([], ["--concurrency", "0"], ["--baseline-url", "h", "--max-tokens", "none"], ["--baseline-url", "h", "--prompt-set", "best"],
                          ["--baseline-url", "h", "--extra-body", "[1]"], ["--baseline-url", "h", "--precision", "200%"],
                          ["--baseline-url", "h", "--no-such-option"], ["demo", "--drafter", "none"]):
            outcome = self.run_program(*arguments)
            self.assertEqual(outcome.code, 2, arguments)
            self.assertIn("error", outcome.err)
            self.assertNotIn("Traceback", outcome.err)

    def test_named_servers(self):
        _, options = ms.parse_arguments(["--baseline-url", "h", "--speculative-url", "ngram=http://a:1/v1", "--speculative-url", "http://b:2/v1",
                                         "--speculative-url", "http://c:3/v1", "--speculative-body", 'ngram={"a": 1}', "--speculative-body", '{"b": 2}'])
        targets = ms.targets_of(options)
        self.assertEqual([target.label for target in targets], ["baseline", "ngram", "speculative", "speculative-2"])
        self.assertEqual([target.own_body for target in targets], [{}, {"a": 1}, {"b": 2}, {"b": 2}])


class Verdicts(ProgramTest):
    def test_a_difference_is_a_result_unless_a_limit_is_set(self):
        base = self.starting(FakeServer())
        other = self.starting(FakeServer(answer=lambda messages, body: "quite other words " * 5))
        prompts = self.prompt_file(12)
        self.assertEqual(self.measure(base, other, arguments=("--prompts", prompts, "--ties", "never")).code, 0)
        outcome = self.measure(base, other, arguments=("--prompts", prompts, "--ties", "never", "--fail-on", "changed,rounding-only,cannot-tell"))
        self.assertEqual(outcome.code, 1)

    def test_nothing_completed_is_exit_1(self):
        server = self.starting(FakeServer())
        server.script("chat", ["ok", "ok"], then="status_503")
        outcome = self.measure(server, arguments=("--limit", 2))
        self.assertEqual((outcome.code, outcome.endpoints()[0]["completed"]), (1, 0))


class Streams(ProgramTest):
    def run_script(self, *arguments, **more):
        return subprocess.run([sys.executable, str(SCRIPT), *map(str, arguments)], capture_output=True, timeout=60, **more)

    def test_head_ends_quietly(self):
        process = subprocess.Popen([sys.executable, str(SCRIPT), "breakeven", "--table"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        process.stdout.close()      # a reader that has had enough
        self.assertEqual(process.stderr.read(), b"")
        process.stderr.close()
        self.assertIn(process.wait(timeout=30), (0, 141))

    def test_consoles_that_cannot_show_everything(self):
        for encoding in ("cp1252", "ascii"):
            done = self.run_script("breakeven", env={**os.environ, "PYTHONIOENCODING": encoding})
            self.assertEqual((done.returncode, done.stderr), (0, b""), encoding)

    def test_importing_it_does_nothing(self):
        done = subprocess.run([sys.executable, "-c", "import measure_speculative as m; print(m.main.__name__)"], cwd=ROOT, capture_output=True, timeout=60)
        self.assertEqual((done.stdout.strip(), done.stderr), (b"main", b""))


class Screens(unittest.TestCase):
    def test_a_bar_only_on_a_terminal(self):
        with contextlib.redirect_stderr(io.StringIO()) as err:
            screen = ms.Screen()
            self.assertFalse(screen.bar_is_due(10.0))
            screen.say("words \x1b[31m red")
        self.assertNotIn("\x1b", err.getvalue())


if __name__ == "__main__":
    unittest.main()
