"""The tables: false alarms over honest runs, detection by fault, and the coverage of intervals."""
from __future__ import annotations

import random
import zlib
from collections import Counter
from typing import Dict, Iterator, List, NamedTuple, Sequence, Tuple

from tests.losslessness import engines
from tests.losslessness.engines import FAULTS, YARDSTICKS, Honest

SIZES = (26, 78, 200)
HONEST = {
    "chat, prefix agreement 50 %": Honest(0.50),
    "math, 73 %": Honest(0.73),
    "agent, 99 %": Honest(0.99, workload="agent"),
    "chat 50 %, no floor shows": Honest(0.50, floor_visible=False),
    "math 73 %, no floor shows": Honest(0.73, floor_visible=False),
    "agent 99 %, no floor shows": Honest(0.99, floor_visible=False, workload="agent"),
}


class Job(NamedTuple):
    """One engine at one size, simulated so many times."""

    name: str           # a fault's, or "" for an honest engine
    honest: Honest
    prompts: int
    runs: int


class Outcome(NamedTuple):
    """How often each word was said, by yardsticks, and how many answers the fault altered (mean share)."""

    job: Job
    words: Dict[str, Counter]
    altered: float


def run_job(job: Job) -> Outcome:
    """Simulate and judge; the seed depends on the job alone."""
    words: Dict[str, Counter] = {one: Counter() for one in YARDSTICKS}
    altered = 0.0
    seed = zlib.crc32(repr(job[:3]).encode())
    for number in range(job.runs):
        trial = engines.make_trial(random.Random(seed * 100_000 + number), job.honest, job.prompts, FAULTS.get(job.name))
        altered += trial.altered / job.runs
        for one in YARDSTICKS:
            words[one][engines.word_of(trial, one)] += 1
    return Outcome(job, words, altered)


def honest_jobs(runs: int, sizes: Sequence[int] = SIZES) -> List[Job]:
    """`runs` honest runs a size, spread evenly over the honest engines."""
    each = -(-runs // len(HONEST))
    return [Job("", honest, prompts, each) for prompts in sizes for honest in HONEST.values()]


def fault_jobs(runs: int, sizes: Sequence[int] = SIZES) -> List[Job]:
    """`runs` runs of each fault a size, spread over the three amounts of noise, the floor showing."""
    jobs = []
    for name in FAULTS:
        workloads = ["agent"] if name.startswith("lost tool") else ["chat"]
        for prompts in sizes:
            jobs += [Job(name, Honest(prefix, workload=one), prompts, -(-runs // 3))
                     for prefix in (0.50, 0.73, 0.99) for one in workloads]
    return jobs


def merged(outcomes: Sequence[Outcome]) -> Tuple[Dict[str, Counter], int, float]:
    words: Dict[str, Counter] = {one: Counter() for one in YARDSTICKS}
    for outcome in outcomes:
        for one in YARDSTICKS:
            words[one].update(outcome.words[one])
    runs = sum(outcome.job.runs for outcome in outcomes)
    return words, runs, sum(outcome.altered * outcome.job.runs for outcome in outcomes) / runs


def share(words: Counter, runs: int, word: str = "changed") -> str:
    return f"{100 * words[word] / runs:.1f} %"


def honest_table(outcomes: Sequence[Outcome], sizes: Sequence[int]) -> Iterator[str]:
    """False alarms: how often an honest engine is called `changed`, by yardsticks."""
    yield "| honest engine | runs | " + " | ".join(f"`changed` with {one}" for one in YARDSTICKS) + " | `cannot tell` with both |"
    yield "|---|---|" + "---|" * (len(YARDSTICKS) + 1)
    rows = [(f"{name}", [one for one in outcomes if one.job.honest == honest]) for name, honest in HONEST.items()]
    rows += [(f"**all, {size} prompts**", [one for one in outcomes if one.job.prompts == size]) for size in sizes]
    for name, some in rows + [("**all**", list(outcomes))]:
        words, runs, _ = merged(some)
        yield (f"| {name} | {runs} | " + " | ".join(share(words[one], runs) for one in YARDSTICKS)
               + f" | {share(words[YARDSTICKS[0]], runs, 'cannot tell')} |")


def fault_table(outcomes: Sequence[Outcome], sizes: Sequence[int]) -> Iterator[str]:
    """Detection: how often a broken engine is called `changed`, with both yardsticks if nothing else is said."""
    middle = sizes[len(sizes) // 2]
    yield ("| fault | " + " | ".join(f"noise {name}: altered, found" for name in NOISE) + " | "
           + " | ".join(f"{size} prompts" for size in sizes) + f" | {middle}: floor alone | logprobs alone | neither |")
    yield "|---|" + "---|" * (len(NOISE) + len(sizes) + 3)
    for name in FAULTS:
        here = [one for one in outcomes if one.job.name == name]
        yield f"| {name} | " + " | ".join([*_by_noise(here, middle), *_by_size(here, sizes), *_by_yardstick(here, middle)]) + " |"


NOISE = {"50 %": 0.50, "73 %": 0.73, "99 %": 0.99}


def _by_noise(outcomes: Sequence[Outcome], size: int) -> Iterator[str]:
    for prefix in NOISE.values():
        words, runs, altered = merged([one for one in outcomes
                                       if one.job.prompts == size and one.job.honest.prefix_agreement == prefix])
        yield f"{100 * altered:.0f} %, {share(words[YARDSTICKS[0]], runs)}"


def _by_size(outcomes: Sequence[Outcome], sizes: Sequence[int]) -> Iterator[str]:
    for size in sizes:
        words, runs, _ = merged([one for one in outcomes if one.job.prompts == size])
        yield share(words[YARDSTICKS[0]], runs)


def _by_yardstick(outcomes: Sequence[Outcome], size: int) -> Iterator[str]:
    words, runs, _ = merged([one for one in outcomes if one.job.prompts == size])
    for one in YARDSTICKS[1:]:
        yield share(words[one], runs)
