"""One file for every system: Python from 3.9 on, no call that one of them lacks, any locale, any console, a clock that jumps."""
from __future__ import annotations

import ast
import itertools
import os
import subprocess
import unittest
from typing import Iterator, Tuple
from unittest import mock

from tests.drive import COMMAND, SCRIPT, Bench, m
from tests.fakes import FakeServer, Say, Speculation

with open(SCRIPT, encoding="utf-8") as source_file:
    SOURCE = source_file.read()
TREE = ast.parse(SOURCE)

# What only some systems have. Allowed: within the named function, where it is guarded.
POSIX_ONLY = {
    "os": "fork forkpty kill killpg getuid geteuid getgid setsid setuid getpgid uname mkfifo mknod chown fchown fchmod lchown nice getloadavg sysconf wait waitpid "
          "statvfs sync pipe2 openpty O_SYNC O_NOFOLLOW O_DIRECTORY O_CLOEXEC O_NONBLOCK sched_getaffinity sched_setaffinity posix_spawn WNOHANG",
    "signal": "SIGKILL SIGHUP SIGALRM SIGUSR1 SIGUSR2 SIGPIPE SIGCHLD SIGQUIT SIGSTOP SIGTSTP SIGWINCH alarm setitimer pause pthread_kill pthread_sigmask sigwait siginterrupt",
    "socket": "AF_UNIX SO_REUSEPORT socketpair TCP_KEEPIDLE sendmsg recvmsg", "time": "clock_gettime CLOCK_MONOTONIC tzset", "fcntl": None, "msvcrt": None}
GUARDED = {"fcntl": {"_locked"}, "msvcrt": {"_locked"}}
MODULES = {"pwd", "grp", "resource", "termios", "tty", "pty", "curses", "readline", "syslog", "winreg", "winsound", "crypt", "nis", "spwd", "ossaudiodev"}

# Names that came after 3.9, by module, and keywords of calls.
NEWER = {
    "itertools": "pairwise batched", "asyncio": "timeout timeout_at TaskGroup Runner Barrier", "datetime": "UTC", "math": "cbrt exp2 sumprod fma",
    "statistics": "correlation covariance linear_regression kde", "contextlib": "aclosing chdir", "hashlib": "file_digest", "sys": "exception orig_argv stdlib_module_names",
    "typing": "Self TypeAlias ParamSpec Concatenate TypeGuard Never LiteralString Required NotRequired Unpack assert_never override ReadOnly",
    "os": "EFD_CLOEXEC process_cpu_count", "operator": "call", "inspect": "get_annotations", "functools": "Placeholder", "dataclasses": "KW_ONLY",
    "types": "EllipsisType NoneType UnionType", "re": "NOFLAG"}
NEWER_METHODS = {"bit_count", "get_identifiers", "is_valid", "hardlink_to", "walk"}
NEWER_KEYWORDS = {"zip": {"strict"}, "dataclass": {"slots", "kw_only", "match_args", "weakref_slot"}, "bisect_left": {"key"}, "bisect_right": {"key"}, "bisect": {"key"},
                  "insort": {"key"}, "iglob": {"root_dir"}, "glob": {"root_dir"}, "ArgumentParser": {"suggest_on_error", "color"}, "mkdtemp": {"delete"}}


def with_homes(tree: ast.Module) -> Iterator[Tuple[str, ast.AST]]:
    """Every node with the name of the function or class at top level that it stands in."""
    for top in tree.body:
        name = getattr(top, "name", "")
        for node in ast.walk(top):
            yield name, node


class TestTheFile(unittest.TestCase):
    def test_its_grammar_is_python_3_9(self):
        ast.parse(SOURCE, feature_version=(3, 9))
        self.assertIn("from __future__ import annotations", SOURCE)

    def test_nothing_that_a_system_lacks(self):
        wrong = []
        for home, node in with_homes(TREE):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in POSIX_ONLY:
                module, names = node.value.id, POSIX_ONLY[node.value.id]
                if (names is None or node.attr in names.split()) and home not in GUARDED.get(module, ()):
                    wrong.append(f"line {node.lineno}: {module}.{node.attr} in {home}")
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                names_of = [node.module] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
                wrong += [f"line {node.lineno}: import {name}" for name in names_of if name in MODULES]
        self.assertEqual(wrong, [])

    def test_nothing_newer_than_3_9(self):
        wrong = []
        for _, node in with_homes(TREE):
            if isinstance(node, ast.Attribute):
                module = node.value.id if isinstance(node.value, ast.Name) else ""
                if node.attr in NEWER.get(module, "").split() or node.attr in NEWER_METHODS and module != "os":
                    wrong.append(f"line {node.lineno}: .{node.attr}")
            if isinstance(node, ast.ImportFrom):
                wrong += [f"line {node.lineno}: {node.module}.{alias.name}" for alias in node.names if alias.name in NEWER.get(node.module or "", "").split()]
            if isinstance(node, ast.Call):
                called = node.func.id if isinstance(node.func, ast.Name) else node.func.attr if isinstance(node.func, ast.Attribute) else ""
                wrong += [f"line {node.lineno}: {called}({word.arg}=)" for word in node.keywords if word.arg in NEWER_KEYWORDS.get(called, ())]
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("isinstance", "issubclass"):
                wrong += [f"line {node.lineno}: isinstance with |" for inner in node.args[1:] if isinstance(inner, ast.BinOp)]
        self.assertEqual(wrong, [])

    def test_every_text_file_is_opened_as_utf_8(self):
        for _, node in with_homes(TREE):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "open":
                mode = next((arg.value for arg in node.args[1:2] if isinstance(arg, ast.Constant)), "r")
                keywords = {word.arg for word in node.keywords}
                self.assertTrue("b" in mode or "encoding" in keywords, f"line {node.lineno}")

    def test_the_files_of_the_tests_are_python_3_9_too(self):
        folder = os.path.dirname(os.path.abspath(__file__))
        for path, _, names in os.walk(folder):
            for name in names:
                if name.endswith(".py"):
                    with self.subTest(name), open(os.path.join(path, name), encoding="utf-8") as file:
                        ast.parse(file.read(), feature_version=(3, 9))


class TestPaths(unittest.TestCase):
    def test_a_run_file_is_found_beside_the_notebook_whatever_system_wrote_the_path(self):
        with Bench() as bench:
            os.mkdir(bench.path("labbook.runs"))
            bench.write(os.path.join("labbook.runs", "a.jsonl"), "")
            for name in (r"C:\Users\me\labbook.runs\a.jsonl", "/home/me/labbook.runs/a.jsonl", "labbook.runs/a.jsonl", r"labbook.runs\a.jsonl"):
                self.assertEqual(m._evidence_of(name, bench.path("labbook.md")), bench.path(os.path.join("labbook.runs", "a.jsonl")), name)

    def test_names_of_run_files_stand_on_every_system(self):
        for label in ("con/prn:a*b?", "../..", "a" * 500, "ünïcödé", "", "tab\tnew\nline"):
            name = os.path.basename(m.run_file_path("labbook.md", label, "2026-01-02T03:04:05Z"))
            self.assertRegex(name, r"\A[A-Za-z0-9][A-Za-z0-9._-]{5,120}\Z")


class TestLocalesAndConsoles(unittest.TestCase):
    """Every verb under a locale of C and on consoles of a code page, in processes of their own."""

    def test_screens_that_cannot_show_everything(self):
        with Bench() as bench, FakeServer(answer=lambda messages, body: Say("Grüße – 你好 → ∞ " + "x" * 9)) as base, FakeServer(
                answer=lambda messages, body: Say("Grüße – 你们 → ∞ " + "x" * 9), speculation=Speculation()) as other:
            book, run = bench.path("Bücher.md"), bench.path("läufe.jsonl")
            environment = {key: value for key, value in os.environ.items() if not key.startswith(("LC_", "LANG", "PYTHON"))}
            plain, windows = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}, {"PYTHONIOENCODING": "cp1252"}
            measure = ["--baseline-url", base.url, "--speculative-url", other.url, "--limit", "2", "--labbook", book, "--run-file", run]
            for extra, verb in ((plain, measure), (plain, ["compare", run]), (plain, ["report", book, "-o", bench.path("Seite.html")]),
                                (windows, measure[:-2]), (windows, ["table", book]), (windows, ["csv", book])):
                with self.subTest(extra=extra, verb=verb[0]):
                    ended = subprocess.run([*COMMAND, *verb], env={**environment, **extra}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=60)
                    self.assertEqual(ended.returncode, 0, ended.stderr.decode("latin-1")[-600:])
                    self.assertNotIn(b"Traceback", ended.stderr)
                    (ended.stdout if verb[0] != "csv" else b"").decode("ascii" if "LC_ALL" in extra else "cp1252")
            run_read, bad = m.read_runs(run)
            self.assertEqual((bad, "你好" in run_read[0].passes[0].replies[0].content), ([], True))
            with open(bench.path("Seite.html"), encoding="utf-8") as file:
                self.assertIn("你", file.read())


class TestClocks(unittest.TestCase):
    def test_a_wall_clock_that_jumps_moves_no_duration(self):
        jumps = itertools.cycle((1e9, -1e9, 0.0, 4e9))
        stamps = itertools.cycle(("2031-01-01T00:00:00Z", "2001-01-01T00:00:00Z"))
        with Bench() as bench, FakeServer() as base, FakeServer(speculation=Speculation()) as other, \
                mock.patch.object(m.time, "time", lambda: 1.8e9 + next(jumps)), mock.patch.object(m, "now_utc", lambda: next(stamps)):
            done = bench.measure(base.url, other.url, prompts=[f"say {n}" for n in range(3)])
        self.assertEqual((done.code, len(done.endpoints)), (0, 2), done.err)
        for record in done.endpoints:
            self.assertTrue(0 < record["wall_s"] < 60 and 0 < record["latency_s"]["max"] < 60 and 0 < record["ttft_s"]["p50"] < 60, record)


if __name__ == "__main__":
    unittest.main()
