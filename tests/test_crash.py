"""What was written stays written: kills, torn files, full disks, forbidden folders, signals in the middle of a run."""
from __future__ import annotations

import contextlib
import errno
import json
import os
import random
import signal
import subprocess
import sys
import time
import unittest
from typing import Any, Iterator, List
from unittest import mock

from tests.crash import kill_writers
from tests.drive import COMMAND, SCRIPT, Bench, Done, lines_of, m, run_main
from tests.fakes import FakeServer, Speculation

POSIX = os.name == "posix"


class TestWriters(unittest.TestCase):
    def test_two_and_four_writers_are_killed(self):
        for writers, kills in ((2, 1), (4, 2)):
            with self.subTest(writers=writers), Bench() as bench:
                toll = kill_writers(bench.path("labbook.md"), kills, writers, random.Random(writers))
                self.assertEqual((toll.lost, toll.twice), (0, 0), toll)
                self.assertGreater(toll.promised, writers)
                self.assertLessEqual(toll.torn, toll.kills + writers)

    def test_two_runs_in_the_same_second_have_a_run_file_each(self):
        with Bench() as bench:
            book = bench.path("labbook.md")
            options = mock.Mock(labbook=book, run_file=None, label="same")
            sessions = [mock.Mock(options=options, evidence=None, started_at="2026-01-02T03:04:05Z") for _ in range(3)]
            with mock.patch.object(m, "run_file_path", side_effect=[bench.path("a.jsonl"), bench.path("a.jsonl"), bench.path("b.jsonl"),
                                                                    bench.path("b.jsonl"), bench.path("c.jsonl")]):
                for session in sessions:
                    m._open_journals(session)
            self.assertEqual(len({session.evidence.path for session in sessions}), 3)
            for session in sessions:
                session.evidence.close()
                session.notebook.close()

    def test_files_of_no_lock_and_no_disk(self):
        def no_lock(*_: Any) -> None:
            raise OSError(errno.ENOLCK, "No locks available")

        with Bench() as bench:
            with mock.patch.object(m.fcntl, "flock", no_lock) if m.fcntl else contextlib.nullcontext():
                journal = m.Journal(bench.path("labbook.md"))
                journal.append([{"a": 1}])
                journal.close()
            self.assertEqual(lines_of(bench.path("labbook.md")), [{"a": 1}])
        if POSIX:
            journal = m.Journal("/dev/null")
            journal.append([{"a": 1}])
            journal.close()


class TestTornFiles(unittest.TestCase):
    """A file that ends, or is spoiled, anywhere gives all records that are whole, and says what is not."""

    @classmethod
    def setUpClass(cls) -> None:
        with Bench() as bench, FakeServer() as base, FakeServer(speculation=Speculation()) as other:
            done = bench.measure(base.url, other.url, "--warmup", "0", prompts=["one", "two"])
            with open(done.run_file, "rb") as file:
                cls.run_bytes = file.read()
            with open(done.notebook, "rb") as file:
                cls.book_bytes = b"# My notebook\n\nProse.\n" + file.read()

    def test_a_notebook_cut_at_every_byte(self):
        lines = self.book_bytes.splitlines(keepends=True)
        with Bench() as bench:
            path = bench.path("cut.md")
            for cut in self.cuts(self.book_bytes):
                with open(path, "wb") as file:
                    file.write(self.book_bytes[:cut])
                journal = m.Journal(path)
                journal.append([json.loads(lines[-1])], durable=False)
                journal.close()
                records, bad = m.read_notebook(path)
                whole = sum(line.startswith(b"{") and self.is_json(line) for line in self.book_bytes[:cut].split(b"\n"))
                self.assertEqual(len(records), whole + 1, cut)
                self.assertLessEqual(len(bad), 1)

    @staticmethod
    def cuts(data: bytes) -> List[int]:
        """Where to cut: around every line's ends, and at every 53rd byte between (SPEC_TEST_EVERY=1: at every byte)."""
        every = int(os.environ.get("SPEC_TEST_EVERY", "53"))
        ends = [place for place, byte in enumerate(data) if byte == 10]
        return sorted({*range(0, len(data), every), *(max(0, min(end + off, len(data))) for end in ends for off in (-2, -1, 0, 1, 2, 3))})

    @staticmethod
    def is_json(line: bytes) -> bool:
        try:
            json.loads(line)
        except ValueError:
            return False
        return True

    def test_a_run_file_cut_at_every_byte(self):
        """Every prefix is a run with all its whole replies, or no run at all; never a traceback."""
        with Bench() as bench:
            path = bench.path("cut.jsonl")
            for cut in self.cuts(self.run_bytes):
                with open(path, "wb") as file:
                    file.write(self.run_bytes[:cut])
                whole = self.run_bytes[:cut].count(b'"record": "reply"') - (
                    b'"record": "reply"' in self.run_bytes[:cut].rpartition(b"\n")[2] and not self.is_json(self.run_bytes[:cut].rpartition(b"\n")[2]))
                try:
                    run, bad = m.read_run(path)
                except m.MeasureError:
                    self.assertEqual(whole, 0, cut)
                    continue
                self.assertEqual(sum(len(one.replies) for one in run.passes), whole, cut)
                self.assertLessEqual(len(bad), 1)
                for one in run.passes:
                    m.json_line(m.endpoint_record(run, one))

    def test_every_line_of_a_run_file_may_be_lost(self):
        lines = self.run_bytes.splitlines(keepends=True)
        for place in range(len(lines)):
            for torn in (b"", lines[place][:len(lines[place]) // 2] + b"\n", b"\0" * 100 + b"\n", b"\0" * 100):
                with self.subTest(line=place), Bench() as bench:
                    path = bench.path("run.jsonl")
                    with open(path, "wb") as file:
                        file.write(b"".join(lines[:place]) + torn + b"".join(lines[place + 1:]))
                    done = run_main(["compare", path])
                    self.assertIn(done.code, (0, 2), done.err)
                    self.assertNotIn("Traceback", done.err)
                    if torn and done.code == 0:
                        self.assertIn("skipped", done.err)

    def test_zero_bytes_before_a_good_record_hide_nothing(self):
        with Bench() as bench:
            path = bench.path("labbook.md")
            with open(path, "wb") as file:
                file.write(b"\xef\xbb\xbf" + self.book_bytes.splitlines(keepends=True)[-1] + b"\0" * 4096 + self.book_bytes.splitlines(keepends=True)[-1])
            records, bad = m.read_notebook(path)
            self.assertEqual((len(records), len(bad)), (2, 1))
            with open(path, "wb") as file:
                file.write(self.book_bytes.decode().encode("utf-16"))
            done = run_main(["table", path])
            self.assertEqual((done.code, "UTF-16" in done.err), (2, True))

    def test_runs_put_one_behind_the_other_are_several(self):
        with Bench() as bench:
            path = bench.path("both.jsonl")
            with open(path, "wb") as file:
                file.write(self.run_bytes + self.run_bytes)
            runs, bad = m.read_runs(path)
            self.assertEqual(([sum(len(one.replies) for one in run.passes) for run in runs], bad), ([4, 4], []))
            done = run_main(["compare", path])
            self.assertEqual(done.code, 0, done.err)

    def test_spoiled_values_are_told_and_left_out(self):
        """Every value of every line replaced by one of another kind: a verb may refuse the file, never fall over it."""
        lines = [json.loads(line) for line in self.run_bytes.splitlines()]
        chance = random.Random(5)
        with Bench() as bench:
            path = bench.path("run.jsonl")
            for line in range(len(lines)):
                for spoiled in spoilings(lines[line], chance):
                    with open(path, "w", encoding="ascii") as file:
                        file.write("".join(json.dumps(one) + "\n" for one in lines[:line] + [spoiled] + lines[line + 1:]))
                    done = run_main(["compare", path])
                    self.assertIn(done.code, (0, 2), done.err)


def spoilings(record: Any, chance: random.Random, most: int = 6) -> Iterator[Any]:
    """The record with one value of it, at any depth, replaced."""
    places = list(places_of(record))
    for place in chance.sample(places, min(most, len(places))):
        yield replaced(record, place, chance.choice([None, [], {}, "x", -1, 1e400, 2 ** 70, True, [None], [["a"]], {"a": []}]))


def places_of(value: Any, here: tuple = ()) -> Iterator[tuple]:
    if here:
        yield here
    if isinstance(value, dict):
        for key in value:
            yield from places_of(value[key], here + (key,))
    elif isinstance(value, list):
        for key in range(len(value)):
            yield from places_of(value[key], here + (key,))


def replaced(value: Any, place: tuple, new: Any) -> Any:
    if not place:
        return new
    copy = list(value) if isinstance(value, list) else dict(value)
    copy[place[0]] = replaced(copy[place[0]], place[1:], new)
    return copy


class TestPlacesThatCannotBeWritten(unittest.TestCase):
    def measure(self, *more: str) -> Done:
        with Bench() as bench, FakeServer() as server:
            bench.write("a-file", "")
            given = bench.arguments(server.url, None, "--warmup", "0")
            done = run_main(given + [word.replace("{folder}", bench.folder) for word in more])
            self.assertNotIn("Traceback", done.err)
            return done

    def test_a_folder_that_is_a_file(self):
        for option in ("--labbook", "--run-file"):
            done = self.measure(option, "{folder}/a-file/below/labbook.md")
            self.assertEqual((done.code, "cannot be written" in done.err), (2, True), done.err)

    def test_a_file_that_is_a_folder(self):
        for option in ("--labbook", "--run-file"):
            self.assertEqual(self.measure(option, "{folder}").code, 2)

    def test_a_name_with_a_zero_byte(self):
        self.assertEqual(self.measure("--labbook", "{folder}/a\0b").code, 2)

    @unittest.skipUnless(POSIX and os.geteuid() != 0, "root may write anywhere; a folder that is a file stands for it")
    def test_a_folder_without_permission(self):
        with Bench() as bench, FakeServer() as server:
            os.chmod(bench.folder, 0o500)
            try:
                done = run_main(["--baseline-url", server.url, "--labbook", bench.path("labbook.md")])
            finally:
                os.chmod(bench.folder, 0o700)
        self.assertEqual(done.code, 2)

    def test_the_disk_is_full(self):
        """In the middle of a run: measuring goes on, it is said once, the exit code is 1, all lines before are whole."""
        real, room = os.write, [6000]

        def scarce(file: int, data: bytes) -> int:
            if file <= 2:
                return real(file, data)
            part = data[:room[0]]
            room[0] -= len(part)
            if not part:
                raise OSError(errno.ENOSPC, "No space left on device")
            return real(file, part)

        with Bench() as bench, FakeServer() as server, mock.patch.object(m.os, "write", scarce):
            done = bench.measure(server.url, None, "--warmup", "0", prompts=[f"say {n}" for n in range(12)])
            self.assertEqual((done.code, done.err.count("No space left on device")), (1, 1))
            self.assertIn("12 of 12 answered", " ".join(done.out.split()))
            room[0] = 10 ** 6       # there is room again: the torn line spoils nothing
            journal = m.Journal(done.run_file)
            journal.append([{"record": "reply"}])
            journal.close()
            lines = [found for _, found in m.read_lines(done.run_file)]
        self.assertEqual(sum(isinstance(line, m.BadLine) for line in lines), 1)
        self.assertEqual(lines[-1], {"record": "reply"})

    @unittest.skipUnless(POSIX, "RLIMIT_FSIZE is POSIX's")
    def test_a_file_that_may_not_grow(self):
        """The same with the system's own refusal, in a process of its own."""
        limit = ("import resource, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); resource.setrlimit(resource.RLIMIT_FSIZE, (4000, 4000)); "
                 f"sys.path.insert(0, {os.path.dirname(SCRIPT)!r}); import measure_speculative as m; sys.exit(m.main(sys.argv[1:]))")
        with Bench() as bench, FakeServer() as server:
            given = bench.arguments(server.url, None, "--warmup", "0", prompts=[f"say {n}" for n in range(12)])
            ended = subprocess.run([sys.executable, "-c", limit, *given], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, timeout=60)
        self.assertEqual(ended.returncode, 1, ended.stderr)
        self.assertEqual(ended.stderr.count("cannot be written any more"), 1, ended.stderr)
        self.assertNotIn("Traceback", ended.stderr)


@unittest.skipUnless(POSIX, "signals are sent as POSIX does")
class TestSignals(unittest.TestCase):
    """Ctrl-C, SIGTERM and SIGKILL in the middle of a pass, to a process of its own."""

    def run_until(self, number: int, level: int, twice: bool = False) -> Any:
        """Start a measurement whose answers never end after the fourth, send a signal then; what was left behind."""
        with Bench() as bench, FakeServer(speculation=Speculation()) as server:
            server.script("chat", ["ok"] * 4, then="stall")
            given = bench.arguments(server.url, None, "--warmup", "0", "--timeout", "30", "--concurrency", str(level),
                                    prompts=[f"say {n}" for n in range(10)])
            process = subprocess.Popen([*COMMAND, *given], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            self.wait_for(lambda: len(server.chats) >= 4 + level and all(request.sent_at or request.step == "stall" for request in server.chats))
            time.sleep(0.05)
            began = time.perf_counter()
            process.send_signal(number)
            if twice:
                server.script("metrics", then="hang")   # the first is polite: it reads the counters; the second does not wait
                time.sleep(0.3)
                process.send_signal(number)
            out, err = process.communicate(timeout=20)
            took = time.perf_counter() - began
            run_file = given[given.index("--run-file") + 1]
            book = given[given.index("--labbook") + 1]
            compared = run_main(["compare", run_file, run_file]) if lines_of(run_file) else None
            return process.returncode, out, err, took, lines_of(book), lines_of(run_file), compared

    def wait_for(self, ready: Any) -> None:
        end = time.perf_counter() + 15
        while not ready():
            self.assertLess(time.perf_counter(), end, "the program did not come so far")
            time.sleep(0.01)

    def test_ctrl_c_and_sigterm(self):
        for number, level in ((signal.SIGINT, 1), (signal.SIGTERM, 3)):
            with self.subTest(number):
                code, out, err, took, records, evidence, _ = self.run_until(number, level)
                self.assertEqual(code, 130, err)
                self.assertLess(took, 8)
                self.assertEqual((records[0]["interrupted"], records[0]["completed"], records[0]["first_error"]), (True, 4, "interrupted"))
                self.assertEqual(records[0]["failed"], level)
                self.assertEqual(sum(line["record"] == "reply" for line in evidence), 4 + level)
                self.assertIn("interrupted", out)
                self.assertNotIn("Traceback", err)

    def test_twice_stops_at_once(self):
        code, out, err, took, records, evidence, _ = self.run_until(signal.SIGINT, 1, twice=True)
        self.assertEqual(code, 130, err)
        self.assertLess(took, 6)
        self.assertGreaterEqual(sum(line["record"] == "reply" for line in evidence), 4)
        for word in ("Traceback", "never retrieved", "was destroyed", "Exception ignored"):
            self.assertNotIn(word, err)

    def test_a_killed_run_is_usable(self):
        code, _, _, _, records, evidence, compared = self.run_until(signal.SIGKILL, 1)
        self.assertEqual((code, records), (-signal.SIGKILL, []))
        self.assertEqual(sum(line["record"] == "reply" for line in evidence), 4)
        self.assertEqual(compared.code, 0, compared.err)
        self.assertIn("4 of 4", compared.out)

    def test_before_anything_is_measured_the_first_signal_ends_it(self):
        for number in (signal.SIGINT, signal.SIGTERM):
            with self.subTest(number), Bench() as bench, FakeServer(faults={"models": "hang"}) as server:
                given = bench.arguments(server.url, None)
                process = subprocess.Popen([*COMMAND, *given], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
                self.wait_for(lambda: server.requests)
                process.send_signal(number)
                out, err = process.communicate(timeout=10)
                self.assertEqual((process.returncode, out), (130, ""), err)
                self.assertNotIn("Traceback", err)


if __name__ == "__main__":
    unittest.main()
