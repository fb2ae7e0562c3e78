"""How often the printed 95 % interval of a speed ratio holds the true ratio, on machines that drift, stall and vary.

Also what the order of measuring is worth: on a machine that slows down by a fifth, alternating servers prompt by prompt
(A B, B A, ...) keeps the ratio, and one server after the other does not.
"""
from __future__ import annotations

import functools
import math
import random
from typing import Callable, Dict, Iterator, List, NamedTuple, Sequence, Tuple

import measure_speculative as ms

PAIRS = (6, 12, 26, 78)
DRIFT = 0.20            # speed lost from the first request to the last


class Machine(NamedTuple):
    """What varies: the way texts differ, the spread of speedups over prompts, and the noise of a single request."""

    name: str
    same_text: float            # share of the prompts with the same number of tokens on both sides
    length_spread: float        # sigma of the logarithm of the tokens
    gain: Callable[[random.Random], float]      # tokens a target pass, over the cost of the pass
    noise: Callable[[random.Random], float]     # factor on a request's time


def _calm(rng: random.Random) -> float:
    return math.exp(rng.gauss(0, 0.02))


def _stalls(rng: random.Random) -> float:
    """Two per cent of jitter, and one request in twenty stalls by a third on average."""
    return _calm(rng) * (1 + rng.expovariate(3) if rng.random() < 0.05 else 1.0)


def _heavy(rng: random.Random) -> float:
    """Student's t with 3 degrees of freedom on 4 %: rare and very late answers."""
    return 1 + 0.04 * min(20.0, abs(rng.gauss(0, 1)) / math.sqrt(rng.gammavariate(1.5, 2 / 3)))


MACHINES = (
    Machine("same texts, calm", 1.0, 0.4, lambda rng: 1.5, _calm),
    Machine("gain differs by prompt, stalls", 1.0, 0.6, lambda rng: (1 + 3 * rng.betavariate(1.2, 2)) / 1.3, _stalls),
    Machine("gain and texts differ, stalls", 0.6, 0.6, lambda rng: (1 + 3 * rng.betavariate(1.2, 2)) / 1.3, _stalls),
    Machine("heavy tails", 1.0, 0.4, lambda rng: 1.6, _heavy),
)


def measure(rng: random.Random, machine: Machine, pairs: int, order: str = "alternating") -> List[ms.Row]:
    """One run: tokens and seconds of each prompt on both servers, while the machine slows down by a fifth."""
    prompts = [_prompt(rng, machine) for _ in range(pairs)]
    rows = [[0.0] * 4 for _ in prompts]
    first: List[int] = []
    for turn, (place, side) in enumerate(_turns(pairs, order)):
        tokens, seconds_each = prompts[place][side]
        if len(first) == place:
            first.append(side)
        slowness = 1 / (1 - DRIFT * turn / (2 * pairs - 1))
        rows[place][2 * side:2 * side + 2] = [tokens, tokens * seconds_each * machine.noise(rng) * slowness]
    return [ms.Row(*row, baseline_first=side == 0) for row, side in zip(rows, first)]


def _prompt(rng: random.Random, machine: Machine) -> Tuple[Tuple[int, float], Tuple[int, float]]:
    tokens = _tokens(rng, machine)
    return (tokens, 0.020), (tokens if rng.random() < machine.same_text else _tokens(rng, machine), 0.020 / machine.gain(rng))


def _tokens(rng: random.Random, machine: Machine) -> int:
    return max(8, min(192, int(rng.lognormvariate(math.log(110), machine.length_spread))))


def _turns(pairs: int, order: str) -> Iterator[Tuple[int, int]]:
    if order == "sequential":
        yield from ((place, side) for side in (0, 1) for place in range(pairs))
        return
    for place in range(pairs):
        yield from ((place, side) for side in ((0, 1) if place % 2 == 0 else (1, 0)))


def speeds(rows: Sequence[ms.Row]) -> List[ms.Row]:
    """The same run as decode speeds: each prompt counts alike."""
    return [ms.Row(row.baseline_amount / row.baseline_s, 1.0, row.other_amount / row.other_s, 1.0,
                   row.baseline_first) for row in rows]


NUMBERS: Dict[str, Callable[[Sequence[ms.Row]], List[ms.Row]]] = {"throughput": list, "decode speed": speeds}


@functools.lru_cache(maxsize=None)
def true_ratio(machine: Machine, number: str) -> float:
    """The ratio that endless measuring would give: of 8,000 prompts."""
    rng = random.Random(11)
    sums = [[sum(column) for column in zip(*(row[:4] for row in NUMBERS[number](measure(rng, machine, 1000))))] for _ in range(8)]
    baseline, baseline_s, other, other_s = (sum(column) for column in zip(*sums))
    return other / other_s / (baseline / baseline_s)


def covered(machine: Machine, number: str, pairs: int, runs: int, seed: int = 1) -> float:
    """Share of the runs whose interval holds the ratio that endless measuring would give."""
    rng = random.Random(seed)
    truth = true_ratio(machine, number)
    intervals = (ms.ratio_of_sums(NUMBERS[number](measure(rng, machine, pairs))) for _ in range(runs))
    return sum(ratio.low <= truth <= ratio.high for ratio in intervals) / runs


def table(runs: int) -> Iterator[str]:
    """Coverage by machine and number of pairs, then both orders on a drifting machine."""
    yield f"| coverage of the 95 % interval ({runs} runs each) | " + " | ".join(f"{pairs} pairs" for pairs in PAIRS) + " |"
    yield "|---|" + "---|" * len(PAIRS)
    for machine in MACHINES:
        for number in NUMBERS:
            yield (f"| {number}: {machine.name} | "
                   + " | ".join(f"{100 * covered(machine, number, pairs, runs):.1f} %" for pairs in PAIRS) + " |")
    yield ""
    yield f"| true ratio 1.500, the machine slows down by {DRIFT:.0%} | " + " | ".join(f"{pairs} pairs" for pairs in PAIRS) + " |"
    yield "|---|" + "---|" * len(PAIRS)
    for order in ("alternating", "sequential"):
        yield f"| {order} | " + " | ".join(f"{typical_ratio(pairs, order):.3f}" for pairs in PAIRS) + " |"


def typical_ratio(pairs: int, order: str, runs: int = 200) -> float:
    """The mean throughput ratio measured in this order on the calm machine, whose true ratio is 1.5."""
    rng = random.Random(3)
    return sum(ms.ratio_of_sums(measure(rng, MACHINES[0], pairs, order)).value for _ in range(runs)) / runs
