"""What the tests of all engines share: the tool run as a user runs it, and its records held against what servers say."""
import contextlib
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import unittest

from tests.engines import install, servers

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
TOOL = ROOT / "measure_speculative.py"
PROMPTS = pathlib.Path(__file__).resolve().parent / "prompts.jsonl"
TOOL_TIMEOUT_S = 900

# DESIGN's keys: what every record has, and what each kind has besides.
SHARED_KEYS = {"lab", "label", "engine", "engine_version", "model", "recorded_at", "schema", "kind", "workload", "concurrency",
               "prompts_sha256", "caveats", "tool_version", "run_file", "max_tokens"}
ENDPOINT_KEYS = SHARED_KEYS | {
    "base_url", "requests", "completed", "failed", "first_error", "wall_s", "latency_s", "output_tokens", "output_tokens_per_s",
    "tokens_counted_by_server", "server_timings_sample", "spec_metrics_delta", "repeats", "prompt_count", "ttft_s", "tpot_s", "e2el_s",
    "decode_tokens_per_s", "acceptance", "accuracy", "server", "interrupted"}
COMPARISON_KEYS = SHARED_KEYS | {
    "baseline_tokens_per_s", "speculative_tokens_per_s", "text_comparison", "baseline_label", "speculative_label", "throughput_ratio",
    "decode_ratio", "exact_match", "prefix_agreement", "noise_floor", "verdict"}


class Ran:
    """One run of the tool: its exit code, its words, its notebook's records and its run file's replies."""

    def __init__(self, code, out, err, folder, records):
        self.code, self.out, self.err, self.folder, self.records = code, out, err, folder, records

    def endpoint(self, server, concurrency=1, purpose="timed"):
        """The record of a server's pass."""
        return next(record for record in self.records if record["kind"] == "endpoint" and record["server_label"] == server
                    and record["concurrency"] == concurrency and record["purpose"] == purpose)

    def comparison(self, server, concurrency=1):
        """The record of a comparison."""
        return next(record for record in self.records if record["kind"] == "comparison" and record["speculative_label"] == server
                    and record["concurrency"] == concurrency)

    @property
    def run_file(self):
        """The evidence."""
        return self.folder / self.records[0]["run_file"]

    def replies(self, server, concurrency=1, purpose="timed"):
        """A pass's replies as the run file holds them, in the order in which they were sent."""
        lines = [json.loads(line) for line in self.run_file.read_text(encoding="utf-8").splitlines()]
        return [line["reply"] for line in lines if line["record"] == "reply" and line["server"] == server
                and line["concurrency"] == concurrency and line["purpose"] == purpose]


class EngineTest(unittest.TestCase):
    """A test that runs the tool in a folder of its own."""

    def setUp(self):
        self.folder = pathlib.Path(self.enterContext_(tempfile.TemporaryDirectory(prefix="measure-engines-")))
        self.note("")

    def enterContext_(self, context):
        """Enter it now, leave it when the test ends (TestCase.enterContext came with Python 3.11)."""
        value = context.__enter__()
        self.addCleanup(context.__exit__, None, None, None)
        return value

    def note(self, line):
        """A line for whoever reads the log: what was measured, in numbers."""
        print(line, file=sys.stderr, flush=True)

    def tool(self, *arguments, code=0, stdin=None):
        """The tool's exit code, which must be `code`, stdout and stderr."""
        ran = subprocess.run([sys.executable, str(TOOL), *map(str, arguments)], cwd=str(self.folder), input=stdin, stdout=subprocess.PIPE,
                             stderr=subprocess.PIPE, timeout=TOOL_TIMEOUT_S)
        out, err = ran.stdout.decode("utf-8"), ran.stderr.decode("utf-8")
        self.assertEqual(ran.returncode, code, f"{arguments}\n{out}\n{err}")
        self.assertNotIn("Traceback", err)
        return out, err

    def measure(self, baseline, *arguments, code=0, labbook="labbook.md", **speculative):
        """Measure with the tests' prompts; speculative servers by the name they are to have."""
        named = [word for name, server in speculative.items() for word in ("--speculative-url", f"{name.replace('_', '-')}={server.url}")]
        before = self.records(labbook)
        out, err = self.tool("--baseline-url", baseline.url, *named, "--prompts", PROMPTS, "--labbook", labbook, *arguments, code=code)
        return Ran(code, out, err, self.folder, self.records(labbook)[len(before):])

    def records(self, labbook="labbook.md"):
        """The notebook's records."""
        path = self.folder / labbook
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("{")] if path.exists() else []

    def assert_records_are_whole(self, records):
        """Every key that the lesson's script and DESIGN name is there, and no NaN."""
        for record in records:
            wanted = ENDPOINT_KEYS if record["kind"] == "endpoint" else COMPARISON_KEYS
            self.assertEqual(wanted - set(record), set(), record["label"])
            json.dumps(record, allow_nan=False)
        self.tool("notebook", "--check", "labbook.md")

    def assert_all_answered(self, record):
        """Nothing failed, and the server counted its tokens."""
        self.assertEqual((record["failed"], record["first_error"], record["interrupted"]), (0, None, False))
        self.assertTrue(record["tokens_counted_by_server"])

    def assert_lossless(self, ran, server, concurrency=1):
        """`identical`, or differences that are near ties on the ruler of this very pair; never `changed`. What was seen is said."""
        record = ran.comparison(server, concurrency)
        verdict, texts = record["verdict"], record["text_comparison"]
        margins = [each["margin_nats"] for each in texts["divergences"]]
        self.note(f"  {server} at {concurrency}: {texts['identical']} of {texts['compared']} identical, {verdict['answers']}"
                  + (f"; margins {margins}, ruler {record['ruler']}" if texts["divergent"] else ""))
        self.assertIn(verdict["answers"], ("identical", "rounding only"), verdict["reasons"])
        self.assertEqual(verdict["answers"] == "identical", texts["divergent"] == 0)
        if texts["divergent"]:
            self.assertNotIn(None, margins)

    def note_acceptance(self, server, acceptance):
        """Acceptance in one line."""
        shown = {key: round(value, 3) if isinstance(value, float) else value for key, value in acceptance.items() if value is not None}
        self.note(f"  {server}: {shown}")


def require(engine):
    """What a module of tests needs to be there: skipped where it is not, but for CI, which never skips it."""
    servers.end_in_order()
    lacking = install.missing(engine)
    if lacking and os.environ.get("CI"):
        raise AssertionError(f"{engine} is not installed: {'; '.join(lacking)}")
    if lacking:
        raise unittest.SkipTest(f"{engine} is not installed (python3 tests/engines/install.py {engine})")


def median_of(values):
    """The median of what is known."""
    return statistics.median([value for value in values if value is not None])
