"""Drive the whole program in this process: `main` with its screen caught and its files in a folder of their own.

    with Bench() as bench:
        done = bench.measure(server.url, other.url, "--concurrency", "4", prompts=["one", "two"])
        done.code, done.out, done.err       # exit code, stdout, stderr
        done.endpoints, done.comparisons    # the notebook's records
        done.replies                        # the run file's replies by (server label, prompt id)
"""
from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import sys
import tempfile
from dataclasses import dataclass
from typing import Any, Dict, List, Optional, Sequence, Tuple

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
if ROOT not in sys.path:
    sys.path.insert(0, ROOT)

import measure_speculative as m  # noqa: E402

SCRIPT = os.path.join(ROOT, "measure_speculative.py")
# The program in a process of its own; imported, since Python compiles a script anew each time.
COMMAND = [sys.executable, "-c", f"import sys; sys.path.insert(0, {ROOT!r}); import measure_speculative as m; sys.exit(m.main(sys.argv[1:]))"]
QUICK = ("--ties", "never", "--noise-floor", "never", "--timeout", "5", "--max-tokens", "40", "--ready-timeout", "1")


@dataclass(frozen=True)
class Done:
    """What one run of the program left behind."""

    code: int
    out: str
    err: str
    notebook: str           # its path; "" where none was asked for
    run_file: str
    records: Sequence[Dict[str, Any]] = ()      # of the notebook
    evidence: Sequence[Dict[str, Any]] = ()     # the run file's lines

    @property
    def screen(self) -> str:
        return self.out + self.err

    @property
    def endpoints(self) -> List[Dict[str, Any]]:
        return [record for record in self.records if record["kind"] == "endpoint"]

    @property
    def comparisons(self) -> List[Dict[str, Any]]:
        return [record for record in self.records if record["kind"] == "comparison"]

    @property
    def replies(self) -> Dict[Tuple[str, str], Dict[str, Any]]:
        return {(line["server"], line["reply"]["prompt_id"]): line["reply"] for line in self.evidence if line["record"] == "reply"}


def lines_of(path: str) -> List[Dict[str, Any]]:
    """The records of a file of JSON lines; none where there is no file."""
    if not path or not os.path.exists(path):
        return []
    return [found for _, found in m.read_lines(path) if isinstance(found, dict)]


class Bench:
    """A folder of its own, and the program run in it."""

    def __enter__(self) -> "Bench":
        self.folder = tempfile.mkdtemp(prefix="bench-")
        self._runs = 0
        return self

    def __exit__(self, *_: Any) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def path(self, name: str) -> str:
        return os.path.join(self.folder, name)

    def write(self, name: str, text: str) -> str:
        with open(self.path(name), "w", encoding="utf-8", newline="") as file:
            file.write(text)
        return self.path(name)

    def prompts(self, texts: Sequence[str]) -> str:
        """A prompt file; the prompt's id is its number."""
        self._runs += 1
        return self.write(f"prompts{self._runs}.jsonl", "".join(
            json.dumps({"id": str(number), "prompt": text, "workload": "mine"}) + "\n" for number, text in enumerate(texts)))

    def arguments(self, baseline: str, speculative: Optional[str], *more: str, prompts: Sequence[str] = ("one two", "three")) -> List[str]:
        """The command line of a quick measurement."""
        path = self.prompts(prompts)
        given = ["--baseline-url", baseline, *(["--speculative-url", speculative] if speculative else []), "--prompts", path, *QUICK]
        return given + ["--labbook", self.path(f"book{self._runs}.md"), "--run-file", self.path(f"run{self._runs}.jsonl"), *more]

    def measure(self, baseline: str, speculative: Optional[str] = None, *more: str, prompts: Sequence[str] = ("one two", "three")) -> Done:
        """One measurement, its notebook and its run file its own."""
        arguments = self.arguments(baseline, speculative, *more, prompts=prompts)
        return run_main(arguments, self.path(f"book{self._runs}.md"), self.path(f"run{self._runs}.jsonl"))


def run_main(arguments: Sequence[str], notebook: str = "", run_file: str = "") -> Done:
    """`main`, its exit code and what it said; argparse's exit is an exit code, too."""
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8", newline="") for _ in range(2))
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = m.main(list(arguments))
        except SystemExit as end:
            code = int(end.code or 0)
    said = []
    for stream in (out, err):
        stream.flush()
        said.append(stream.buffer.getvalue().decode("utf-8"))    # type: ignore[attr-defined]
    return Done(code, said[0], said[1], notebook, run_file, lines_of(notebook), lines_of(run_file))
