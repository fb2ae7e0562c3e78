"""Synthetic engines: a toy language, near ties that rounding flips, and the faults that speculation can have.

An answer is a list of words (a word is a token). Along each baseline answer lie *ties*: places where the two best tokens are
so close that rounding decides. Every pass flips each tie by its own coin; the way on from a flipped tie is the same in every
pass, as it is with real models. That makes the baseline's agreement with itself and speculation's agreement with it the same
kind of thing, and lets both fork at the same place.
"""
from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Callable, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

import measure_speculative as ms

LIMIT = 192                 # tokens an answer may have
LOOP_RATE = 0.01            # of the ways on after a flipped tie, and of the baseline's answers: small models loop by themselves
STOCK_RATE = 0.4            # answers that close with a stock phrase, as assistants do
STOCK = [phrase.split() for phrase in (
    "Let me know if you have any further questions.", "I hope this helps you get started.", "In conclusion, it depends on the case.",
    "Would you like me to explain any of these steps?", "Please let me know if you need anything else.",
    "Feel free to ask if something is unclear.", "Overall, this is a matter of taste and budget.",
    "If you share more detail I can be more precise.", "These are only a few of the many possibilities.",
    "It is best to consult a professional first.", "Remember to test it before you rely on it.",
    "I can also write this as a table if you prefer.")]
_SYLLABLES = [a + b for a in "b c d f g k l m n p r s t v w".split() for b in "a e i o u ai ou en or".split()]
_seeded = random.Random(7)
COMMON = ["the", "of", "and", "to", "a", "in", "is", "that", "it", "for", "as", "with", "on", "are", "be", "this", "by", "or",
          "from", "which", "can", "not", "have", "more", "when", "one", "each", "you", "also", "but"]
RARE = ["".join(_seeded.choice(_SYLLABLES) for _ in range(_seeded.choice((2, 2, 3)))) for _ in range(4000)]


@dataclass(frozen=True)
class Honest:
    """How an honest pair of servers rounds."""

    prefix_agreement: float         # of the baseline with itself, as published: 0.50, 0.73, 0.99
    floor_visible: bool = True      # False: one slot, nothing batches, the baseline always equals itself
    workload: str = "chat"          # chat | agent (tool calls)


class Tie(NamedTuple):
    """A near tie: where, how near, and the way on if it is flipped."""

    at: int
    margin_nats: float
    way_on: Tuple[str, ...]


class Answer(NamedTuple):
    """An answer under way: its words, its end, and the margin of the first token that is not the baseline's."""

    words: Tuple[str, ...]
    finish: str
    margin_nats: Optional[float] = None
    altered: bool = False           # by a fault, not by rounding


@dataclass
class World:
    """One run's prompts with the baseline's answers, and how far rounding moves log-probabilities on this pair."""

    rng: random.Random
    honest: Honest
    answers: Dict[str, Answer]
    ties: Dict[str, List[Tie]]
    topics: Dict[str, List[str]]
    sigma_nats: float
    flip: float                     # probability that a pass flips a given tie


def hazard_for(prefix_agreement: float, length: float) -> float:
    """Forks a token that give this mean prefix agreement: (1 - exp(-h L)) / (h L)."""
    low, high = 1e-7, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if (1 - math.exp(-middle * length)) / (middle * length) > prefix_agreement else (low, middle)
    return low


def make_world(rng: random.Random, honest: Honest, prompts: int) -> World:
    """A fresh set of prompts and baseline answers; rounding is anything from a float16 CPU's to a bfloat16 GPU's."""
    world = World(rng, honest, {}, {}, {}, 10 ** rng.uniform(-3.3, -1.3), 0.5)
    hazard = hazard_for(honest.prefix_agreement, 110 if honest.workload == "chat" else 12) / world.flip
    for number in range(prompts):
        name = f"p{number}"
        world.topics[name] = rng.sample(RARE, 60)
        world.answers[name] = _answer(world, name)
        world.ties[name] = _ties(world, name, hazard)
    return world


def _answer(world: World, name: str) -> Answer:
    length = max(6, min(LIMIT, int(world.rng.lognormvariate(math.log(110), 0.6))))
    if world.honest.workload == "agent":
        length = world.rng.randint(6, 18)
    return _ended(_written(world, name, length))


def _written(world: World, name: str, length: int) -> List[str]:
    """Words on the prompt's topic, every third a common one; now and then a loop, often a stock phrase at the end."""
    rng, topic = world.rng, world.topics[name]
    words = rng.choices(topic, k=length)
    words[::3] = rng.choices(COMMON, k=len(words[::3]))
    if world.honest.workload == "agent":
        return words
    if rng.random() < LOOP_RATE and length > 20:
        unit = words[10:10 + rng.randint(1, 6)]
        return (words[:10] + unit * LIMIT)[:LIMIT]
    if rng.random() < STOCK_RATE:
        words += rng.choice(STOCK)
    return words


def _ended(words: Sequence[str]) -> Answer:
    return Answer(tuple(words[:LIMIT]), "length" if len(words) >= LIMIT else "stop")


def _ties(world: World, name: str, hazard: float) -> List[Tie]:
    """Near ties along the answer, its end included: there, going on and stopping are often equally good."""
    length, ties, at = len(world.answers[name].words), [], 0.0
    while True:
        at += world.rng.expovariate(hazard)
        if at >= length:
            break
        ties.append(Tie(int(at), _tie_margin(world), ()))
    if world.answers[name].finish == "stop" and world.rng.random() < 3 * hazard:
        ties.append(Tie(length, _tie_margin(world), ()))
    return ties


def _noise(world: World) -> float:
    """How far rounding moves a log-probability at an open position, in nats: heavy tails, and once in a thousand a jump."""
    rng = world.rng
    size = abs(rng.gauss(0, 1)) / math.sqrt(rng.gammavariate(2, 0.5))      # Student's t, 4 degrees of freedom
    return world.sigma_nats * size * (8 if rng.random() < 0.001 else 1)


def _tie_margin(world: World) -> float:
    """A tie is flipped if the noise exceeds its margin: large noises flip more of them."""
    sizes = [_noise(world) for _ in range(4)]
    return world.rng.random() * world.rng.choices(sizes, sizes)[0]


def rounded(world: World, name: str, zeal: float = 1.0) -> Answer:
    """The answer as one more pass gives it: at the first tie that this pass flips, it goes the other way."""
    answer = world.answers[name]
    for place, tie in enumerate(world.ties[name]):
        if world.rng.random() < world.flip * zeal:
            if not tie.way_on:
                tie = tie._replace(way_on=_way_on(world, name, tie.at))
                world.ties[name][place] = tie
            return _forked(answer, tie.at, tie.way_on, tie.margin_nats)
    return answer


def _way_on(world: World, name: str, at: int) -> Tuple[str, ...]:
    """What follows a flipped tie: another word, and other text of about the length that was left; or the end."""
    if world.rng.random() < 0.03:
        return ("",)                # stops here
    left = max(3, int((len(world.answers[name].words) - at) * world.rng.uniform(0.7, 1.3)))
    return tuple(_written(world, name, left))


def _forked(answer: Answer, at: int, way_on: Sequence[str], margin: Optional[float], altered: bool = False) -> Answer:
    if tuple(way_on) == ("",):
        return answer._replace(words=answer.words[:at], finish="stop", margin_nats=margin, altered=altered)
    ended = _ended(answer.words[:at] + tuple(way_on))
    return ended._replace(margin_nats=margin, altered=altered)


# --- Faults: each takes an honest answer of the speculative server and spoils it, or not

Fault = Callable[[World, str, Answer], Answer]


def wrong_token_every(tokens: int) -> Fault:
    """A drafted token is accepted against the target's choice once in so many tokens."""
    def spoil(world: World, name: str, answer: Answer) -> Answer:
        at = int(world.rng.expovariate(1 / tokens))
        if at >= _reach(world, name, answer):
            return answer
        return _forked(world.answers[name], at, _written(world, name, len(answer.words) - at + 1),
                       world.rng.expovariate(1 / 1.5), altered=True)
    return spoil


def _reach(world: World, name: str, answer: Answer) -> int:
    """Where the answer leaves the baseline's by itself: a fault behind that place is not its first difference."""
    ours = world.answers[name].words
    same = ms.common_prefix(ours, answer.words)
    return same


def sometimes(share: float, spoil: Fault) -> Fault:
    """The fault in this share of the answers that have any text."""
    def spoil_some(world: World, name: str, answer: Answer) -> Answer:
        return spoil(world, name, answer) if world.rng.random() < share and answer.words else answer
    return spoil_some


def past_the_stop(world: World, name: str, answer: Answer) -> Answer:
    if answer.finish != "stop":
        return answer
    more = _written(world, name, world.rng.randint(3, 40))
    return _ended(answer.words + tuple(more))._replace(altered=True, margin_nats=answer.margin_nats)


def looping(world: World, name: str, answer: Answer) -> Answer:
    at = world.rng.randrange(len(answer.words))
    unit = answer.words[at:at + world.rng.randint(1, 6)] or answer.words[-1:]
    margin = answer.margin_nats if at >= _reach(world, name, answer) else world.rng.expovariate(1 / 3)
    return Answer((answer.words[:at] + unit * LIMIT)[:LIMIT], "length", margin, True)


def foreign(world: World, name: str, answer: Answer) -> Answer:
    """From some place on, the answer of another request."""
    other = world.answers[world.rng.choice([one for one in world.answers if one != name])]
    at = world.rng.randrange(min(len(answer.words), len(other.words)))
    margin = answer.margin_nats if at >= _reach(world, name, answer) else world.rng.expovariate(1 / 6)
    return Answer(answer.words[:at] + other.words[at:], other.finish, margin, True)


def dropped(world: World, name: str, answer: Answer) -> Answer:
    return _respliced(world, name, answer, lambda words, at: words[:at] + words[at + 1:])


def doubled(world: World, name: str, answer: Answer) -> Answer:
    return _respliced(world, name, answer, lambda words, at: words[:at] + words[at - 1:])


def _respliced(world: World, name: str, answer: Answer, splice: Callable[[Tuple[str, ...], int], Tuple[str, ...]]) -> Answer:
    """One piece lost or sent twice at a border of two chunks (four tokens each)."""
    borders = range(4, len(answer.words), 4)
    if not borders:
        return answer
    at = world.rng.choice(borders)
    margin = answer.margin_nats if at >= _reach(world, name, answer) else world.rng.expovariate(1 / 4)
    return answer._replace(words=splice(answer.words, at), altered=True, margin_nats=margin)


def special_token(world: World, name: str, answer: Answer) -> Answer:
    at = world.rng.choice((len(answer.words), world.rng.randrange(len(answer.words) + 1)))
    return answer._replace(words=answer.words[:at] + ("<|im_end|>",) + answer.words[at:], altered=True)


def lost_arguments(world: World, name: str, answer: Answer) -> Answer:
    return answer._replace(words=answer.words + ("<lost>",), altered=True)


def other_quantisation(world: World, name: str, answer: Answer) -> Answer:
    """The speculative server's target is another quantisation: it parts about every 60 tokens, by up to a nat."""
    at = int(world.rng.expovariate(1 / 60))
    if at >= _reach(world, name, answer):
        return answer
    return _forked(world.answers[name], at, _written(world, name, len(answer.words) - at + 1),
                   world.rng.random() * abs(world.rng.gauss(0, 0.5)), altered=True)


def higher_temperature(world: World, name: str, answer: Answer) -> Answer:
    """The speculative server samples at temperature 0.3: tokens lower by m nats are drawn exp(-m / 0.3) as often."""
    at = int(world.rng.expovariate(1 / 120))
    if at >= _reach(world, name, answer):
        return answer
    return _forked(world.answers[name], at, _written(world, name, len(answer.words) - at + 1),
                   world.rng.expovariate(1 / 0.3), altered=True)


FAULTS: Mapping[str, Fault] = {
    "wrong token every 200 tokens": wrong_token_every(200),
    "wrong token every 500 tokens": wrong_token_every(500),
    "wrong token every 2000 tokens": wrong_token_every(2000),
    "text past the stop, 1 in 4": sometimes(0.25, past_the_stop),
    "loops, 1 in 4": sometimes(0.25, looping),
    "another request's text, 1 in 4": sometimes(0.25, foreign),
    "a dropped token, 1 in 4": sometimes(0.25, dropped),
    "a doubled token, 1 in 4": sometimes(0.25, doubled),
    "special token leaks, 1 in 4": sometimes(0.25, special_token),
    "lost tool arguments, 1 in 4": sometimes(0.25, lost_arguments),
    "target with another quantisation": other_quantisation,
    "temperature 0.3 instead of 0": higher_temperature,
}


# --- From words to the tool's own evidence


def reply_of(world: World, name: str, answer: Answer) -> ms.Reply:
    """An answer as the tool sees it."""
    if world.honest.workload != "agent":
        return ms.Reply(prompt_id=name, content=" ".join(answer.words), finish_reason=answer.finish,
                        completion_tokens=len(answer.words))
    arguments = '{"query": "' + " ".join(answer.words) + '"}'
    if answer.words and answer.words[-1] == "<lost>":
        arguments = arguments[:len(arguments) // 2] if len(answer.words) % 2 else ""
    return ms.Reply(prompt_id=name, content="", tool_calls=(ms.ToolCall("search", arguments),), finish_reason="tool_calls",
                    completion_tokens=len(answer.words))


class Trial(NamedTuple):
    """One simulated run: what the tool has to judge, with all yardsticks."""

    agreement: ms.Agreement
    floor: ms.Agreement
    ruler: ms.Ruler
    loops: float
    altered: float          # share of the prompts whose first difference is the fault's, and not rounding's


def make_trial(rng: random.Random, honest: Honest, prompts: int, fault: Optional[Fault] = None) -> Trial:
    """The baseline, its second pass, and a speculative server that rounds a little more or less than batching does."""
    world = make_world(rng, honest, prompts)
    zeal = math.exp(rng.uniform(-math.log(1.25), math.log(1.25)))
    baseline = [reply_of(world, name, answer) for name, answer in world.answers.items()]
    again = [reply_of(world, name, rounded(world, name) if honest.floor_visible else answer)
             for name, answer in world.answers.items()]
    sound = {name: rounded(world, name, zeal) for name in world.answers}
    spoiled = {name: fault(world, name, answer) for name, answer in sound.items()} if fault else sound
    theirs = [reply_of(world, name, answer) for name, answer in spoiled.items()]
    first, second, other = (ms.Pass("x", "w", 1, tuple(replies), 1.0) for replies in (baseline, again, theirs))
    passages = ms.passages_of(baseline)
    agreement = with_margins(ms.agree(first, other, passages), world, spoiled)
    looping_answers = sum(ms.tail_loop(reply.content or "") is not None for reply in baseline)
    return Trial(agreement, ms.agree(first, second, passages), make_ruler(world, fault is other_quantisation),
                 looping_answers / prompts, sum(altered_first(world, name, sound[name], spoiled[name]) for name in sound) / prompts)


def altered_first(world: World, name: str, sound: Answer, spoiled: Answer) -> bool:
    """Whether the fault parts from the baseline before rounding did."""
    return spoiled.altered and (sound.words == world.answers[name].words
                                or _reach(world, name, spoiled) < _reach(world, name, sound))


def with_margins(agreement: ms.Agreement, world: World, answers: Mapping[str, Answer]) -> ms.Agreement:
    """Each fork's margin as the baseline tells it when asked again: not for tool calls, and one in ten takes another way."""
    def asked(one: ms.Difference) -> ms.Difference:
        margin = answers[one.prompt_id].margin_nats
        if margin is None or one.channel != "content" or world.rng.random() < 0.1:
            return one
        return ms.replace(one, margin_nats=margin)
    return ms.replace(agreement, differences=tuple(asked(one) for one in agreement.differences))


def make_ruler(world: World, quantised: bool) -> ms.Ruler:
    """|difference of logprob| over some hundred positions: three in four are all but certain, and move hardly at all."""
    rng, changes = world.rng, []
    for _ in range(rng.randint(100, 600)):
        open_position = rng.random() < 0.25
        share = rng.uniform(0.2, 1) if open_position else 10 ** rng.uniform(-5, -1)
        changes.append(share * (abs(rng.gauss(0, 0.5)) if quantised else _noise(world)))
    return ms.ruler_of(changes)


YARDSTICKS = ("floor and logprobs", "floor alone", "logprobs alone", "neither")


def word_of(trial: Trial, yardsticks: str) -> str:
    """The tool's word on the answers, with these yardsticks only."""
    logprobs, floor = "logprobs" in yardsticks, "floor" in yardsticks
    agreement = trial.agreement if logprobs else ms.replace(
        trial.agreement, differences=tuple(ms.replace(one, margin_nats=None) for one in trial.agreement.differences))
    return ms.judge_answers(ms.Evidence(agreement=agreement, floor=trial.floor if floor else None,
                                        ruler=trial.ruler if logprobs else None, baseline_loops=trial.loops)).word
