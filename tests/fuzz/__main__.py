"""The long run: python3 -m tests.fuzz --inputs 1000000."""
from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import random
import sys
import tempfile
import time
import traceback
from typing import Any, Dict, List, Tuple

from tests.fuzz import run_target, targets


def portion(task: Tuple[str, int, int, str]) -> Tuple[str, int, float, Dict[str, str]]:
    """A portion of one reader's inputs in a process of its own: how many, seconds of a processor, and each kind of finding once."""
    name, inputs, seed, keep = task
    findings: Dict[str, str] = {}

    def found(where: str, data: bytes, error: BaseException) -> None:
        frames = traceback.extract_tb(error.__traceback__)
        place = next((f"{frame.name}:{frame.lineno}" for frame in reversed(frames) if "measure_speculative" in frame.filename), "")
        kind = f"{where} {error.__class__.__name__} {place}"
        if kind not in findings:
            path = os.path.join(keep, f"{where}-{hashlib.sha256(data).hexdigest()[:10]}")
            with open(path, "wb") as file:
                file.write(data)
            findings[kind] = f"{str(error)[:200]}  ({path})"

    with tempfile.TemporaryDirectory() as folder:
        target = targets(folder)[name]
        began = time.process_time()
        run_target(name, target, inputs, random.Random(seed), folder, 0.5, found)
        return name, inputs, time.process_time() - began, findings


def main() -> int:
    parser = argparse.ArgumentParser("python3 -m tests.fuzz")
    parser.add_argument("--inputs", type=int, default=20000, help="inputs a reader (default: 20000)")
    parser.add_argument("--only", help="one reader: http, sse, reply, metrics, prompts, files, url")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--progress", action="store_true", help="a line a portion on stderr")
    parser.add_argument("--keep", default=tempfile.gettempdir(), help="where inputs that went wrong are kept")
    options = parser.parse_args()
    names = [options.only] if options.only else ["http", "sse", "reply", "metrics", "prompts", "files", "url"]
    size = max(1, min(20000, options.inputs // options.processes))
    tasks = [(name, min(size, options.inputs - start), options.seed * 1000003 + start, options.keep)
             for start in range(0, options.inputs, size) for name in names]      # in turn, so that a run cut short has tried all alike
    totals: Dict[str, List[Any]] = {name: [0, 0.0, {}] for name in names}
    with multiprocessing.Pool(options.processes) as pool:
        for name, inputs, seconds, findings in pool.imap_unordered(portion, tasks):
            total = totals[name]
            total[0], total[1] = total[0] + inputs, total[1] + seconds
            total[2].update(findings)
            if options.progress:
                print(json.dumps({"reader": name, "inputs": total[0], "seconds": round(total[1], 1), "findings": len(total[2])}), file=sys.stderr, flush=True)
    for name, (inputs, seconds, findings) in totals.items():
        print(json.dumps({"reader": name, "inputs": inputs, "seconds": round(seconds, 1), "findings": findings}), flush=True)
    return 1 if any(total[2] for total in totals.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
