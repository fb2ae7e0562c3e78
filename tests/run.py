"""How tests run the program: in this process, with a notebook of their own, and everything that it says."""
import contextlib
import io
import json
import os
import tempfile
import unittest
from pathlib import Path

import measure_speculative as ms


class Outcome:
    """What a run of the program left behind."""

    def __init__(self, code, out, err, folder):
        self.code, self.out, self.err, self.folder = code, out, err, Path(folder)

    @property
    def records(self):
        """The notebook's records."""
        path = self.folder / "labbook.md"
        return ms.read_notebook(str(path))[0] if path.exists() else []

    def endpoints(self, server="baseline", purpose="timed"):
        """The records of one server's passes."""
        return [record for record in self.records if record["kind"] == "endpoint" and (record["server_label"], record["purpose"]) == (server, purpose)]

    @property
    def comparisons(self):
        """The records of comparisons."""
        return [record for record in self.records if record["kind"] == "comparison"]

    @property
    def run_file(self):
        """The path of the evidence."""
        return str(next(iter(sorted((self.folder / "labbook.runs").glob("*.jsonl")))))


class ProgramTest(unittest.TestCase):
    """A test that runs the program."""

    def run_program(self, *arguments, environment=None, folder=None):
        """Run it with these arguments; measurements write into a folder of their own."""
        folder = folder or self.new_folder()
        out, err = io.StringIO(), io.StringIO()
        before = dict(os.environ)
        os.environ.update(environment or {})
        try:
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                try:
                    code = ms.main([str(argument) for argument in arguments])
                except SystemExit as end:       # argparse
                    code = end.code
        finally:
            os.environ.clear()
            os.environ.update(before)
        return Outcome(code, out.getvalue(), err.getvalue(), folder)

    def measure(self, baseline, *others, arguments=(), environment=None):
        """Measure fake servers with short answers; `others` are (name, server) or servers."""
        folder = self.new_folder()
        named = [other if isinstance(other, tuple) else (f"s{place}", other) for place, other in enumerate(others)]
        urls = [part for name, server in named for part in ("--speculative-url", f"{name}={server.url}")]
        base = ["--baseline-url", baseline.url] if baseline else []
        return self.run_program(*base, *urls, "--labbook", folder / "labbook.md", "--timeout", 10, *arguments,
                                environment=environment, folder=folder)

    def new_folder(self):
        """A folder that goes when the test ends."""
        holder = tempfile.TemporaryDirectory()
        self.addCleanup(holder.cleanup)
        return Path(holder.name)

    def prompt_file(self, count):
        """A file of that many different prompts."""
        path = self.new_folder() / "my-prompts.txt"
        path.write_text("".join(f"Question number {number}: what is it?\n" for number in range(count)))
        return path

    def starting(self, server):
        """A fake server, started, and stopped when the test ends."""
        server.start()
        self.addCleanup(server.stop)
        return server


def json_lines(text):
    """The objects of a text of JSON lines."""
    return [json.loads(line) for line in text.splitlines()]
