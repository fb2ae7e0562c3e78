"""Kill writers of one notebook, again and again, and count what is lost: nothing may be.

    python3 -m tests.crash --kills 200 --writers 8

Each writer is a process of its own that appends records with the program's own Journal and says, after each append has
returned, which record it was. It is killed with SIGKILL at a random moment and replaced. In the end every record that was
said to be written must be in the file, whole, and every line must be whole or told as damaged.
"""
from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from typing import Dict, List, NamedTuple, Tuple

from tests.drive import ROOT, m

WRITER = """
import sys, time
sys.path.insert(0, sys.argv[1])
import measure_speculative as m
journal = m.Journal(sys.argv[2])
number = 0
while True:
    records = [{"lab": m.LAB, "kind": "endpoint", "writer": sys.argv[3], "number": number + k, "fill": "x" * (37 * (number + k) % 9000)} for k in range(1 + number % 3)]
    journal.append(records, durable=number % 4 == 0)
    number += len(records)
    print(number, flush=True)
    time.sleep(0.002)
"""


class Toll(NamedTuple):
    """What a round of kills left behind."""

    kills: int
    promised: int       # records whose append had returned
    lost: int           # of these, not in the file
    torn: int           # damaged lines, told as such
    twice: int          # records that are there more than once
    seconds: float


def writer(path: str, name: str) -> "subprocess.Popen[str]":
    return subprocess.Popen([sys.executable, "-c", WRITER, ROOT, path, name], stdout=subprocess.PIPE, text=True)


def kill_writers(path: str, kills: int, writers: int, chance: random.Random, pause_s: Tuple[float, float] = (0.0, 0.05)) -> Toll:
    """Run `writers` at once on one file, kill them one by one, replace each, and count."""
    began = time.perf_counter()
    running = {f"w{place}.0": writer(path, f"w{place}.0") for place in range(writers)}
    for process in running.values():
        process.stdout.readline()           # it has begun to write
    promised: Dict[str, int] = {}
    for turn in range(kills):
        time.sleep(chance.uniform(*pause_s))
        name = chance.choice(sorted(running))
        promised[name] = end_of(running.pop(name))
        place, number = name.split(".")
        again = f"{place}.{int(number) + 1 + turn}"
        running[again] = writer(path, again)
    for name, process in running.items():
        promised[name] = end_of(process)
    records, bad = m.read_notebook(path)
    seen: Dict[str, List[int]] = {}
    for record in records:
        seen.setdefault(record["writer"], []).append(record["number"])
    lost = sum(len(set(range(count)) - set(seen.get(name, ()))) for name, count in promised.items())
    twice = sum(len(numbers) - len(set(numbers)) for numbers in seen.values())
    return Toll(kills, sum(promised.values()), lost, len(bad), twice, time.perf_counter() - began)


def end_of(process: "subprocess.Popen[str]") -> int:
    """Kill a writer; how many records it had said to have written."""
    process.kill()
    said = [line for line in process.communicate()[0].splitlines(keepends=True) if line.endswith("\n")]
    return int(said[-1]) if said else 0


def main() -> int:
    parser = argparse.ArgumentParser("python3 -m tests.crash")
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--writers", type=int, default=8)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "labbook.md")
        toll = kill_writers(path, options.kills, options.writers, random.Random(options.seed), (0.0, 0.3))
        print(json.dumps({**toll._asdict(), "writers": options.writers, "bytes": os.path.getsize(path)}))
    return 1 if toll.lost or toll.twice else 0


if __name__ == "__main__":
    sys.exit(main())
