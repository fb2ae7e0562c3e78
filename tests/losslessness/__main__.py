"""python3 -m tests.losslessness [--runs N] [--sizes 26,78,200] [--jobs N] [--coverage]"""
from __future__ import annotations

import argparse
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from typing import List, Optional

from tests.losslessness import benchmark, coverage


def main(arguments: Optional[List[str]] = None) -> int:
    parser = argparse.ArgumentParser(prog="python3 -m tests.losslessness", description=__doc__)
    parser.add_argument("--runs", type=int, default=1000, help="honest runs a size; of each fault a tenth (default 1000)")
    parser.add_argument("--sizes", default="26,78,200", help="prompts a run (default 26,78,200)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes (default: one a core)")
    parser.add_argument("--coverage", action="store_true", help="the intervals' coverage instead")
    options = parser.parse_args(arguments)
    started = time.perf_counter()
    lines = coverage.table(4000) if options.coverage else _tables(options)
    for line in lines:
        print(line)
    print(f"{time.perf_counter() - started:.0f} s", file=sys.stderr)
    return 0


def _tables(options: argparse.Namespace) -> List[str]:
    sizes = [int(size) for size in options.sizes.split(",")]
    jobs = benchmark.honest_jobs(options.runs, sizes) + benchmark.fault_jobs(max(3, options.runs // 10), sizes)
    with ProcessPoolExecutor(options.jobs) as pool:
        outcomes = list(pool.map(benchmark.run_job, sorted(jobs, key=lambda job: -job.prompts * job.runs)))
    honest = [one for one in outcomes if not one.job.name]
    return [*benchmark.honest_table(honest, sizes), "", *benchmark.fault_table([one for one in outcomes if one.job.name], sizes)]


if __name__ == "__main__":
    sys.exit(main())
