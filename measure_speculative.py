#!/usr/bin/env python3
# /// script
# requires-python = ">=3.9"
# dependencies = []
# ///
"""Does speculative decoding pay here, and did the answers stay the same?

(The manual is written last.)
"""
from __future__ import annotations

import argparse
import bisect
import hashlib
import json
import math
import os
import re
import sys
import threading
import time
from collections import Counter, deque
from dataclasses import dataclass, field, fields, replace
from typing import (
    Any, Callable, Deque, Dict, Iterable, Iterator, List, Mapping, NamedTuple, Optional, Sequence, Tuple, Union)

__version__ = "1.0.0"


# ======================================================================================================================
# 1. Words and errors (pure)
# ======================================================================================================================
#
# The clock rule: every duration and every place on the stopwatch is time.perf_counter(), in seconds; wall time appears
# only as an ISO-8601 UTC string. "Not measured" is None, never 0 and never NaN, and the reason is kept beside it.

SCHEMA = 1
LAB = "part-17/measure-speculative"   # the lesson's tag: its notebooks and ours are told apart from other JSON lines by it
BASELINE = "baseline"                 # the name of the server that all others are held against


class MeasureError(Exception):
    """What a user can meet: one sentence on what happened, one on what to try. Caught once, in main."""

    def __init__(self, sentence: str, hint: str = "") -> None:
        super().__init__(sentence)
        self.sentence = sentence
        self.hint = hint


@dataclass(frozen=True)
class Caveat:
    """One sentence on what a number does not mean here, and one remedy. Stored in the record, printed under the table."""

    sentence: str
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.sentence} {self.remedy}".strip()


# ======================================================================================================================
# 2. The data (pure): one frozen dataclass for each thing that has a name; JSON keys equal field names
# ======================================================================================================================


@dataclass(frozen=True)
class Prompt:
    """One conversation to be answered, with what a right answer would be where that is known."""

    id: str
    workload: str
    messages: Tuple[Mapping[str, Any], ...]
    category: Optional[str] = None
    tools: Optional[Tuple[Mapping[str, Any], ...]] = None
    answer: Any = None                  # str | list of str | {"function": name, "arguments": {...}} | None: not graded
    max_tokens: Optional[int] = None    # the prompt's own limit, below the run's


@dataclass(frozen=True)
class Speculation:
    """How a server drafts, as it or the user told; None where nobody did. Never guessed."""

    method: Optional[str] = None
    draft_tokens: Optional[int] = None  # draft length k
    drafter: Optional[str] = None


@dataclass(frozen=True)
class Server:
    """Whom we ask. No key and no URL credential is ever in it."""

    label: str                          # BASELINE or the configuration's name
    base_url: str
    chat_url: str
    metrics_urls: Tuple[str, ...]       # empty: none known
    model: str
    engine: str = "unknown"             # llama.cpp | vllm | sglang | tensorrt-llm | unknown | what --engine says
    version: Optional[str] = None
    context_tokens: Optional[int] = None    # of one slot: prompt and answer together
    slots: Optional[int] = None             # requests that it answers at once
    kv_cache_tokens: Optional[int] = None
    speculating: Optional[bool] = None      # None: the server does not tell
    speculation: Optional[Speculation] = None
    answers: Mapping[str, Any] = field(default_factory=dict)   # whitelisted identity facts, for the record


class ToolCall(NamedTuple):
    """One call of a tool: its function's name and its arguments, as the bytes that came."""

    name: str
    arguments: str


@dataclass(frozen=True)
class Acceptance:
    """What became of the drafted tokens, one meaning on every engine. `missing` is the reason when nothing was measured."""

    drafts: Optional[int] = None            # verify steps that had a draft
    draft_tokens: Optional[int] = None      # tokens drafted
    accepted_tokens: Optional[int] = None   # of these accepted, without the bonus token
    accepted_by_position: Optional[Tuple[int, ...]] = None  # accepted at draft position 1, 2, ...; falls along the chain
    completion_tokens: Optional[int] = None     # of the requests covered
    requests: Optional[int] = None              # number of requests covered
    source: Optional[str] = None
    missing: Optional[str] = None

    @property
    def acceptance_rate(self) -> Optional[float]:
        """Accepted share of the drafted tokens, 0..1 (alpha)."""
        if not self.draft_tokens or self.accepted_tokens is None:
            return None
        return self.accepted_tokens / self.draft_tokens

    @property
    def acceptance_length(self) -> Optional[float]:
        """Tokens of a verify step that had a draft, the bonus token included: 1 + accepted/drafts (tau)."""
        if not self.drafts or self.accepted_tokens is None:
            return None
        return 1 + self.accepted_tokens / self.drafts

    @property
    def tokens_per_target_pass(self) -> Optional[float]:
        """Tokens that one pass of the target yields over the whole answer, passes without a draft included.

        (T - n) / (T - n - accepted) over n requests with T tokens in all: each request's first token comes from the
        prompt's pass, and every other pass yields its accepted tokens and one more.
        """
        if self.completion_tokens is None or self.requests is None or self.accepted_tokens is None:
            return None
        decoded = self.completion_tokens - self.requests
        passes = decoded - self.accepted_tokens
        return decoded / passes if passes > 0 else None

    @property
    def rate_by_position(self) -> Optional[Tuple[float, ...]]:
        """Share of the drafts whose i-th token was accepted, for i = 1, 2, ..."""
        if not self.drafts or self.accepted_by_position is None:
            return None
        return tuple(accepted / self.drafts for accepted in self.accepted_by_position)


@dataclass(frozen=True)
class Reply:
    """One request's answer, understood. All places on the stopwatch are seconds since the run began.

    Texts are None only where they were not kept (`--no-texts`); then `digests` stands for them.
    """

    prompt_id: str
    repeat: int = 0
    due_s: Optional[float] = None           # when its slot was free to send it
    connected_s: Optional[float] = None     # how long connecting took, TLS included; None: the connection was open
    sent_s: Optional[float] = None          # the request's bytes were handed over
    first_s: Optional[float] = None         # first non-empty text of any channel
    first_answer_s: Optional[float] = None  # first non-empty content or tool call
    last_s: Optional[float] = None          # last non-empty text of any channel
    ended_s: Optional[float] = None         # last byte, or the failure
    chunk_at_s: Tuple[float, ...] = ()      # arrival of every chunk that carried text; a chunk is not a token
    first_chunk_tokens: Optional[int] = None    # tokens in the first such chunk, where token ids tell
    prompt_tokens: Optional[int] = None
    cached_tokens: Optional[int] = None
    completion_tokens: Optional[int] = None
    token_source: Optional[str] = None      # usage | timings | None
    content: Optional[str] = ""
    reasoning: Optional[str] = ""
    tool_calls: Optional[Tuple[ToolCall, ...]] = ()
    token_ids: Optional[Tuple[int, ...]] = None
    finish_reason: Optional[str] = None
    acceptance: Optional[Acceptance] = None
    engine_timings: Optional[Mapping[str, Any]] = None
    digests: Optional[Mapping[str, Any]] = None     # {channel: {"sha256", "bytes", "chars"}}, with --no-texts
    damaged: bool = False                   # bytes that are no UTF-8: kept escaped (surrogateescape)
    error: Optional[str] = None

    @property
    def ok(self) -> bool:
        """Whether the request was answered to its end."""
        return self.error is None

    @property
    def ttft_s(self) -> Optional[float]:
        """Seconds from handing the request over to its first non-empty text, connecting excluded. None: not streamed."""
        return None if self.first_s is None or self.sent_s is None else self.first_s - self.sent_s

    @property
    def e2el_s(self) -> Optional[float]:
        """Seconds from handing the request over to the end of the answer."""
        return None if self.ended_s is None or self.sent_s is None else self.ended_s - self.sent_s

    @property
    def tpot_s(self) -> Optional[float]:
        """Seconds a token after the first chunk: (last - first) / (tokens - tokens in the first chunk)."""
        span_s = self._decode_span_s
        return None if span_s is None else span_s / self._tokens_after_first_chunk

    @property
    def decode_tokens_per_s(self) -> Optional[float]:
        """Tokens a second after the first chunk, the prompt's processing excluded."""
        span_s = self._decode_span_s
        return None if not span_s else self._tokens_after_first_chunk / span_s

    @property
    def chunk_gaps_s(self) -> Tuple[float, ...]:
        """Seconds between neighbouring chunks. Not a time a token: under speculation a chunk holds several."""
        return tuple(later - earlier for earlier, later in zip(self.chunk_at_s, self.chunk_at_s[1:]))

    @property
    def _tokens_after_first_chunk(self) -> int:
        return (self.completion_tokens or 0) - (self.first_chunk_tokens or 1)

    @property
    def _decode_span_s(self) -> Optional[float]:
        if self.first_s is None or self.last_s is None or self._tokens_after_first_chunk <= 0:
            return None
        return self.last_s - self.first_s


@dataclass(frozen=True)
class Pass:
    """One server answering one slice of one workload at one level, and what was seen meanwhile."""

    server: str                 # its label
    workload: str
    concurrency: int
    replies: Tuple[Reply, ...]
    wall_s: float               # seconds in which this server had requests of the pass to answer
    purpose: str = "timed"      # timed | floor (the baseline again: its agreement with itself)
    started_at: str = ""        # ISO-8601 UTC
    acceptance: Acceptance = Acceptance(missing="not asked")
    counters_delta: Mapping[str, float] = field(default_factory=dict)   # every speculation series that moved
    hiccup_p99_s: Optional[float] = None    # how late our own idle task woke: what our stamps are worth
    load_kept: Optional[float] = None       # achieved share of the nominal concurrency, 0..1
    interrupted: bool = False
    caveats: Tuple[Caveat, ...] = ()

    @property
    def completed(self) -> Tuple[Reply, ...]:
        """The replies that came to their end: the only ones that enter rates and comparisons."""
        return tuple(reply for reply in self.replies if reply.ok)

    @property
    def output_tokens(self) -> Optional[int]:
        """Completion tokens of the completed requests; None where any of them was not counted."""
        counts = [reply.completion_tokens for reply in self.completed]
        return None if not counts or None in counts else sum(counts)

    @property
    def output_tokens_per_s(self) -> Optional[float]:
        """Output throughput: tokens of the completed requests over the pass's wall time."""
        tokens = self.output_tokens
        return None if tokens is None or self.wall_s <= 0 else tokens / self.wall_s


@dataclass(frozen=True)
class Difference:
    """Where and how two answers to one prompt part. Offsets are into the text of `channel`."""

    prompt_id: str
    repeat: int
    kind: str                       # fork | surplus | loop | foreign text | special tokens | channel | empty | lost arguments
    channel: str                    # content | reasoning | tool_calls
    first_byte: Optional[int]
    first_char: Optional[int]
    prefix_share: float             # share of the baseline's characters reproduced before the first difference, 0..1
    baseline_tail: str              # 60 characters from the difference on
    other_tail: str
    detail: str = ""                # in words: "tail repeats (period 13)", "13 surplus bytes; stop -> length", ...
    margin_nats: Optional[float] = None     # how far the other's token lies below the baseline's own choice


@dataclass(frozen=True)
class Agreement:
    """How far two passes over the same prompts agree."""

    pairs: int                              # pairs of answers that could be compared
    identical: int
    prefix_agreement: Optional[float]       # mean share of the baseline's text reproduced before the first difference
    differences: Tuple[Difference, ...] = ()
    incomparable: Tuple[Tuple[str, str], ...] = ()  # (prompt id, why): a failed request, two empty answers, ...
    prefix_shares: Tuple[Tuple[str, int, float], ...] = ()  # (prompt id, repeat, share) of every pair

    @property
    def exact_match(self) -> Optional[float]:
        """Share of the pairs whose answers are the same, byte for byte on every channel."""
        return self.identical / self.pairs if self.pairs else None


@dataclass(frozen=True)
class Ratio:
    """A quotient of speeds, speculative over baseline, with its 95 % interval from `pairs` pairs (None: too few)."""

    value: float
    low: Optional[float]
    high: Optional[float]
    pairs: int


@dataclass(frozen=True)
class Verdict:
    """Two words with their reasons."""

    speed: str      # faster | slower | not distinguishable | not comparable
    answers: str    # identical | rounding only | changed | cannot tell
    reasons: Tuple[str, ...] = ()
    caveats: Tuple[Caveat, ...] = ()


@dataclass(frozen=True)
class Ruler:
    """Rounding on one pair of servers: |difference of logprob| of the chosen token where their texts still agree, in nats."""

    positions: int
    median_nats: float
    p99_nats: float
    max_nats: float


@dataclass(frozen=True)
class Run:
    """What a run file holds: the evidence from which every number can be rebuilt."""

    label: str
    started_at: str
    settings: Mapping[str, Any]             # max_tokens, seed, stream, extra bodies, ...: what must be equal to compare
    prompts_sha256: str
    servers: Mapping[str, Server]           # by label, the baseline first
    prompts: Mapping[str, Prompt]           # by id
    passes: Tuple[Pass, ...]
    rulers: Mapping[str, Ruler] = field(default_factory=dict)            # by the speculative server's label
    margins: Mapping[Tuple[str, str, int, str, int], float] = field(default_factory=dict)
    # ^ nats at the fork, by (server label, workload, concurrency, prompt id, repeat)
    tool_version: str = __version__
    client: Mapping[str, Any] = field(default_factory=dict)
    path: str = ""


# ======================================================================================================================
# 3. Prompts (pure, and one reader)
# ======================================================================================================================
#
# What will be asked, in which order, with which digest.


# ======================================================================================================================
# 4. One request on the wire (pure)
# ======================================================================================================================
#
# Bytes out; stamped bytes in -> Reply.


# ======================================================================================================================
# 5. The client (I/O)
# ======================================================================================================================
#
# How bytes are sent, stamped as they arrive, and kept; it understands nothing.


# ======================================================================================================================
# 6. Acceptance (pure)
# ======================================================================================================================
#
# Counters and response fields -> one engine-neutral record.


# ======================================================================================================================
# 7. Servers (I/O at the edge)
# ======================================================================================================================
#
# Whom we ask: engine, version, model, context, cache, draft settings; what would spoil the run.


# ======================================================================================================================
# 8. A timed pass (I/O)
# ======================================================================================================================
#
# How load is replayed, and what Ctrl-C does.


# ======================================================================================================================
# 9. Comparison (pure)
# ======================================================================================================================
#
# Same bytes? Where do they first differ? What kind of difference?


@dataclass(frozen=True)
class Comparison:
    """One result cell: a configuration against the baseline, on one workload at one level."""

    workload: str
    concurrency: int
    baseline_label: str
    speculative_label: str
    agreement: Agreement
    floor: Optional[Agreement]              # the baseline against itself, on the same prompts
    floor_concurrency: Optional[int]
    throughput_ratio: Optional[Ratio]
    decode_ratio: Optional[Ratio]
    self_ratio: Optional[Ratio]             # the baseline's second pass over its first
    verdict: Verdict
    baseline_accuracy: Optional[Tuple[int, int]] = None     # (correct, of)
    speculative_accuracy: Optional[Tuple[int, int]] = None
    ruler: Optional[Ruler] = None
    smallest_change: Optional[float] = None     # the smallest share of altered answers this run had detected with 80 % power
    why: Mapping[str, Any] = field(default_factory=dict)    # section Break-even: cost, best k, crossover, ...
    advice: Tuple[str, ...] = ()


# ======================================================================================================================
# 10. Statistics (pure)
# ======================================================================================================================
#
# Quantiles, intervals, paired ratios, exact tests.


# ======================================================================================================================
# 11. Verdict (pure)
# ======================================================================================================================
#
# Speed: one word; answers: one word; each with reasons.


# ======================================================================================================================
# 12. Break-even (pure)
# ======================================================================================================================
#
# S(alpha, k, c), the measured cost of drafting, the best draft length, the crossover concurrency.


# ======================================================================================================================
# 13. Notebook and run files (pure, and append)
# ======================================================================================================================
#
# What is kept, how it survives a crash, how it is read back.


# ======================================================================================================================
# 14. Tables, CSV, page (pure)
# ======================================================================================================================
#
# One Table, several renderings.


# ======================================================================================================================
# 15. Demo servers (I/O)
# ======================================================================================================================
#
# Small servers of our own, so that the tool can be tried (and tested) without an engine. A simulation, in four parts: a toy
# target model, which is a deterministic function of the prompt and of the tokens so far; drafters and the step loop, with time
# as data; what three engines say on the wire; sockets and child processes. Nothing about speculation is made up: drafts are
# really looked up, really verified token by token, and rejected ones cost their time, so that yield, speedup and identity are
# earned. Everything is seeded by hashes of the text, hence the same in every process and on every Python.

DEMO_MODEL = "toy-target"
DEMO_DIALECTS = ("llama.cpp", "vllm", "sglang")
DEMO_DRAFTERS = ("none", "ngram", "suffix", "draft", "lossy")

# ---------------------------------------------------------------------------------------------- the toy target model (pure)

TOY_END = "<|end|>"             # the three special tokens carry no text
TOY_CALL = "<tool_call>"
TOY_CALL_END = "</tool_call>"
TOY_SPECIAL = (TOY_END, TOY_CALL, TOY_CALL_END)

_TOY_PIECE = r" ?[^\W\d_]{1,9}| ?\d{1,3}|\n[ \t]*| ?[^\w\s]|_|\s"
_TOY_FENCE = r"(?s)```[^\n]*\n.*?```"
_TOY_NUMBER = r"\d+(?:,\d{3})+|\d+(?:\.\d+)?"
# Signs of what a request wants, good enough for prompts people write; a wrong guess only makes a duller demonstration.
_TOY_COUNT = r"(?i)how (many|much|long|far|old)|total|altogether|average|percent|answer:|step by step"
_TOY_COPY = r"(?i)\b(repeat|cop(y|ied)|correct(ed)?|rewrite|rename|reformat|quote|extract|verbatim|unchanged|taken|convert)\b"
_TOY_FREE = r"(?i)\b(story|poem|essay|ballad|elegy|letter that|compose|pitch|sketch|think up|describe an?|write a)\b"
_TOY_SHORT = (r"(?i)\b(one|two|three|four|a) (short |plain )?(word|sentence|reason)s?\b|\b(word|number|label|output|it|one) first\b"
              r"|answer with|first line|on one line|exactly one|\bdefin|which one|\b(list|name|state) (the|these|them)\b"
              r"|^(what|which|who|when|where|how|is|are|does|in which|convert|name|state)\b|\bin order\b")
_TOY_ASKING = (r"(?i)^(?:what|which|who|whose|where|when|why|how|name|state|give)\b\s*"
               r"(?:(?:many|much|long|far)\s+)?(?:(?:is|are|was|were|do|does|did|has|have|can)\s+)?")

_TOY_ADJECTIVES = """amber bitter brisk broken careful cold copper crooked curious dim distant drowsy faded fearless frozen gentle
golden hollow hungry idle jagged lonely narrow nimble patient quiet restless rusty salted silver slender solemn stubborn sudden
tangled tender velvet weary windy wooden""".split()
_TOY_NOUNS = """anchor archive autumn bakery barley beacon bridge cellar chapel clockmaker compass cottage courier drum ferry
festival fiddler forest fountain gardener glacier granary harbor hillside hunter island kettle ladder lantern ledger letter
library lighthouse mapmaker market meadow miller mirror mountain needle notebook orchard painter parcel pigeon quarry railway
river sailor satchel schoolyard shepherd signal sparrow station stranger summer teacup thicket tinker traveler tunnel valley
violin wagon weaver whistle window winter workshop""".split()
_TOY_VERBS = """answered borrowed carried circled counted crossed drew drifted faced fetched followed forgot gathered guarded
hid hummed ignored kept leaned lifted lit listened mended missed moved named opened painted passed planted promised reached
remembered returned saved sold studied traced turned waited watched woke""".split()
_TOY_LINKS = "above across after against along around before behind below beside beyond inside near past toward under".split()
_TOY_MANNERS = """again alone already away early forever gladly halfway hardly indeed instead later never often once quickly
rarely seldom slowly somehow somewhere soon still together twice""".split()
_TOY_SENTENCES = """The {a} {n} {v} {l} the {n}.|A {n} {v} {m}, and the {a} {n} {v}.|{m}, {l} the {n}, a {a} {n} {v} its {n}.
The {n} {v} what every {n} {v} {l} {t}.|No {n} {v} {l} that {a} {n}, yet {t} {v}.|{l} {t} stood one {a}, {a} {n}.
Each {n} {v} a {n} {m}; the {n} {v} it.|So the {n} {v} {t} {l} {a} {n}s.|{a} and {a}, the {n} {v} {m} {l} another {n}.
When {t} {v}, some {a} {n} {v} {l} our {n}.|Its {n} {v} her {n}, {m} {a}.|Nobody {v} this {n} until the {a} {n} {v}.""".replace(
    "\n", "|").split("|")
_TOY_WORDS = {"a": _TOY_ADJECTIVES, "n": _TOY_NOUNS, "v": _TOY_VERBS, "l": _TOY_LINKS, "m": _TOY_MANNERS}
_TOY_RIVALS = tuple(" " + word for word in _TOY_NOUNS + _TOY_ADJECTIVES + _TOY_VERBS)
_TOY_RIVALS_SEEN = 20           # tokens of the pseudo-distribution beside the model's own choice


def toy_tokens(text: str) -> List[str]:
    """The text cut into pieces, words with their leading blank; joined they are the text again."""
    return re.findall(_TOY_PIECE, text)


def toy_token_id(token: str) -> int:
    """A token's number, by its text alone."""
    return int(_toy_unit("id", token) * 0x7FFFFF)


def _toy_unit(*parts: object) -> float:
    """A number in [0, 1), the same for the same parts everywhere (hash() is salted in each process)."""
    digest = hashlib.sha256("\x1f".join(map(str, parts)).encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:6], "big") / (1 << 48)


def _toy_pick(choices: Sequence[Any], *parts: object) -> Any:
    return choices[int(_toy_unit(*parts) * len(choices))]


@dataclass(frozen=True)
class ToyPrompt:
    """What the toy model reads: the conversation's tokens, and what kind of answer its last message asks for."""

    tokens: Tuple[str, ...]
    kind: str                               # copy | closed | open | math | tool
    request: str                            # the last user message
    tools: Tuple[Mapping[str, Any], ...]    # function schemas
    seed: str


def read_toy_prompt(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> ToyPrompt:
    """The conversation as the toy model sees it, the tools' schemas included."""
    functions = tuple(tool.get("function") or {} for tool in tools)
    texts = [_toy_text_of(message) for message in messages]
    rendered = "".join(f"<|{message.get('role')}|>\n{text}\n" for message, text in zip(messages, texts))
    rendered = "".join(json.dumps(function) + "\n" for function in functions) + rendered
    asked = [text for message, text in zip(messages, texts) if message.get("role") == "user"]
    request = asked[-1] if asked else rendered
    seed = hashlib.sha256(rendered.encode("utf-8", "surrogatepass")).hexdigest()[:16]
    return ToyPrompt(tuple(toy_tokens(rendered)), _toy_kind(request, functions), request, functions, seed)


def _toy_text_of(message: Mapping[str, Any]) -> str:
    content = message.get("content") or ""
    return content if isinstance(content, str) else "".join(str(part.get("text") or "") for part in content)


def _toy_kind(request: str, functions: Sequence[Mapping[str, Any]]) -> str:
    if functions:
        return "tool"
    quoted = _toy_quoted(request)
    asked = request.replace(quoted, "").strip()
    if not quoted and len(re.findall(_TOY_NUMBER, request)) >= 2 and re.search(_TOY_COUNT, request):
        return "math"
    if quoted and (re.search(_TOY_COPY, asked) or not re.search(_TOY_SHORT, asked)):
        return "copy"
    return "closed" if re.search(_TOY_SHORT, asked) and not re.search(_TOY_FREE, asked) else "open"


def _toy_quoted(request: str) -> str:
    """The part of the request that is to be given back: its longest fenced block, else what stands apart. '': none."""
    fences = re.findall(_TOY_FENCE, request)
    if fences:
        return max(fences, key=len)
    for mark in ("\n\n", "\n", ": ") if re.search(_TOY_COPY, request) else ("\n\n", "\n"):
        rest = request.partition(mark)[2].strip()
        if len(toy_tokens(rest)) >= 12:
            return rest
    return ""


# Writers: the answer that the model gives when nobody interferes, token by token.


def _toy_copy(prompt: ToyPrompt) -> Iterator[str]:
    """The quoted text again, with one word in twelve renamed throughout."""
    yield from toy_tokens("Here it is:\n\n")
    for token in toy_tokens(_toy_quoted(prompt.request)):
        word = token.strip()
        renamed = len(word) > 3 and word.isalpha() and _toy_unit(prompt.seed, "rename", word) < 1 / 12
        yield token.replace(word, _toy_pick(_TOY_NOUNS, prompt.seed, word)) if renamed else token
    yield from toy_tokens("\n\nOnly what had to change was changed.")


def _toy_closed(prompt: ToyPrompt) -> Iterator[str]:
    """One sentence that takes up the question's words, and sometimes says it again."""
    sentences = [part for part in re.split(r"(?<=[.:!?])\s+", prompt.request.strip()) if part]
    asked = ([part for part in sentences if part.endswith("?")] or sentences or ["it"])[-1]
    subject = re.sub(_TOY_ASKING, "", asked, count=1).strip(" .?!:") or "it"
    answer = _toy_pick(_TOY_NOUNS, prompt.seed, "answer").capitalize()
    yield from toy_tokens(f"{subject[:1].upper()}{subject[1:]}: {answer}.")
    if _toy_unit(prompt.seed, "again") < 0.6:
        yield from toy_tokens(f" To be precise, {subject}: {answer}, not {_toy_pick(_TOY_NOUNS, prompt.seed, 'other')}.")


def _toy_math(prompt: ToyPrompt) -> Iterator[str]:
    """The numbers of the question, taken together in the way its words suggest; the last number is the answer."""
    numbers = [float(number.replace(",", "")) for number in re.findall(_TOY_NUMBER, prompt.request)] or [0.0]
    words = prompt.request.lower()
    first = re.split(r"(?<=[.?!])\s", prompt.request.strip())[0].rstrip("?!.")
    yield from toy_tokens(f"{first}. Step by step:\n")
    total = numbers[0]
    for number in numbers[1:]:
        sign, result = _toy_operation(words, total, number)
        yield from toy_tokens(f"{total:g} {sign} {number:g} = {result:g}.\n")
        total = result
    yield from toy_tokens(f"So the answer is {total:g}.")


def _toy_operation(words: str, left: float, right: float) -> Tuple[str, float]:
    if re.search(r"\b(left|remain|gave|gives|spent|spends|lost|fewer|less|sold|ate)", words):
        return "-", left - right
    if right and re.search(r"\b(share|split|equally|divided|half)", words):
        return "/", round(left / right, 2)
    if re.search(r"\b(each|every|per|times|twice)\b", words):
        return "*", left * right
    return "+", left + right


def _toy_call(prompt: ToyPrompt) -> Iterator[str]:
    """A call of the function whose words the request shares most, its required arguments taken from the request."""
    asked = set(re.findall(r"[a-z]{3,}", prompt.request.lower()))
    overlap = [len(asked & set(re.findall(r"[a-z]{3,}", json.dumps(function).lower()))) for function in prompt.tools]
    function = prompt.tools[overlap.index(max(overlap))]
    schema = function.get("parameters") or {}
    properties = schema.get("properties") or {}
    names = [name for name in schema.get("required") or properties if name in properties]
    numbers = iter(re.findall(_TOY_NUMBER, prompt.request))
    arguments = {name: _toy_argument(prompt, name, properties[name], numbers) for name in names}
    yield TOY_CALL
    yield from toy_tokens(str(function.get("name")))
    yield "\n"
    yield from toy_tokens(json.dumps(arguments, ensure_ascii=False))
    yield TOY_CALL_END


def _toy_argument(prompt: ToyPrompt, name: str, schema: Mapping[str, Any], numbers: Iterator[str]) -> Any:
    kind = schema.get("type")
    choices = schema.get("enum")
    if choices:
        named = [choice for choice in choices if str(choice).lower() in prompt.request.lower()]
        return (named or choices)[0]
    if kind in ("integer", "number"):
        number = float(next(numbers, "1").replace(",", ""))
        return int(number) if kind == "integer" or number.is_integer() else number
    if kind == "boolean":
        return _toy_unit(prompt.seed, name) < 0.5
    if kind == "array":
        return [_toy_argument(prompt, name, schema.get("items") or {}, numbers)]
    if kind == "object":
        return {}
    quoted = re.findall(r"[\"“']([^\"”']{2,60})[\"”']", prompt.request)
    proper = re.findall(r"(?<=[a-z,] )[A-Z][\w-]+(?: [A-Z][\w-]+)*", prompt.request)
    return _toy_pick(quoted or proper or [" ".join(prompt.request.split()[-4:]).strip(".?!")], prompt.seed, name)


def _toy_prose(prompt: ToyPrompt, seed: str = "") -> Iterator[str]:
    """Sentences whose words repeat rarely, with now and then a word of the request; 6 to 17 of them."""
    seed = seed or prompt.seed
    topics = sorted(set(re.findall(r"\b(?:an?|the) ([a-z]{4,})\b", prompt.request))) or ["morning"]
    for number in range(6 + int(_toy_unit(seed, "length") * 12)):
        sentence = _toy_pick(_TOY_SENTENCES, seed, number)
        words = re.sub(r"\{(.)\}", lambda slot: _toy_word(slot, topics, seed, number), sentence)
        yield from toy_tokens((" " if number or seed != prompt.seed else "") + words[:1].upper() + words[1:])


def _toy_word(slot: "re.Match[str]", topics: Sequence[str], seed: str, number: int) -> str:
    if slot[1] == "t":
        return "the " + _toy_pick(topics, seed, number, slot.start())
    return _toy_pick(_TOY_WORDS[slot[1]], seed, number, slot.start())


_TOY_WRITERS = {"copy": _toy_copy, "closed": _toy_closed, "math": _toy_math, "tool": _toy_call, "open": _toy_prose}


class ToyAnswer:
    """The target model part-way through one answer: a function of the prompt and of the tokens it was advanced by.

    `rounding_nats` is the largest error of a score; it depends on how many tokens the pass holds, as in real kernels.
    """

    def __init__(self, prompt: ToyPrompt, rounding_nats: float = 0.0) -> None:
        self._prompt = prompt
        self._seed = prompt.seed
        self._rounding_nats = rounding_nats
        self._place = 0
        self._plan = _TOY_WRITERS[prompt.kind](prompt)
        self._ahead: Deque[str] = deque()

    def peek(self, distance: int = 0) -> str:
        """The token that the model would choose `distance` tokens on if it went on undisturbed and exactly."""
        while len(self._ahead) <= distance:
            self._ahead.append(next(self._plan, TOY_END))
        return self._ahead[distance]

    def choose(self, width: int) -> str:
        """The model's greedy token here, in a pass that holds `width` tokens."""
        if self._margin_nats() > 2 * self._rounding_nats:
            return self.peek()
        return self.distribution(width)[0][1]

    def advance(self, token: str) -> None:
        """Take `token` as the next one. After a foreign one free prose goes on in other words, a planned answer to plan."""
        own = self.peek()
        self._ahead.popleft()
        self._place += 1
        if token == own:
            return
        self._seed = hashlib.sha256(f"{self._seed} {self._place} {token}".encode("utf-8", "surrogatepass")).hexdigest()[:16]
        if own == TOY_END or self._prompt.kind == "open":
            self._ahead.clear()
            self._plan = _toy_prose(self._prompt, self._seed)

    def distribution(self, width: int) -> List[Tuple[float, str]]:
        """The likeliest tokens here with their log-probabilities in nats, best first, in a pass of `width` tokens."""
        own, level = self.peek(), -self._margin_nats()
        scores = [(self._rounding(own, width), own)]
        start = int(_toy_unit(self._seed, self._place, "rival") * len(_TOY_RIVALS))
        for step in range(_TOY_RIVALS_SEEN):
            rival = _TOY_RIVALS[(start + 7 * step) % len(_TOY_RIVALS)]
            if rival != own:
                scores.append((level + self._rounding(rival, width), rival))
                level -= 0.2 + 1.3 * _toy_unit(self._seed, self._place, step)
        total = math.log(sum(math.exp(score) for score, _ in scores))
        return sorted(((score - total, token) for score, token in scores), reverse=True)

    def _margin_nats(self) -> float:
        """How far the best other token lies below the model's own: 0.001 to 5 nats, seldom little where it has a plan."""
        unit = _toy_unit(self._seed, self._place, "margin")
        return 0.001 + 4.999 * (unit if self._prompt.kind == "open" else math.sqrt(unit))

    def _rounding(self, token: str, width: int) -> float:
        if not self._rounding_nats:
            return 0.0
        return self._rounding_nats * (2 * _toy_unit(self._seed, self._place, token, width) - 1) ** 5   # mostly tiny


# --------------------------------------------------------------------------------------- drafters and steps (time is data)

TOY_AGREEMENT = 0.75            # share of tokens on which the small draft model agrees with the target
TOY_CARELESSNESS = 0.08         # share of wrong drafts that the broken verifier of `lossy` lets pass
CROWD_COST = 0.06               # one more sequence in a pass, in passes of one sequence
DRAFTED_COST = 0.02             # one drafted token more to verify, in passes of one sequence ...
DRAFTED_CROWD_COST = 0.001      # ... and more for each further sequence, as the spare arithmetic is used up
DRAFTING_COST = 0.10            # one token of the small draft model, in target passes


@dataclass(frozen=True)
class DemoOptions:
    """One demo server: what it pretends to be, how it drafts, and what a pass costs."""

    dialect: str = "llama.cpp"
    drafter: str = "none"
    draft_length: int = 4
    slots: int = 16
    context_tokens: int = 4096
    pass_s: float = 0.006               # one target pass over one token of one sequence
    prompt_token_s: float = 0.00002     # one token of a prompt
    rounding_nats: float = 0.0

    @property
    def speculates(self) -> bool:
        return self.drafter != "none"

    def pass_seconds(self, drafts: Sequence[Sequence[str]], prompt_tokens: int = 0) -> float:
        """Seconds of one target pass over the sequences with these drafts, the drafting included."""
        crowd = len(drafts) - 1
        verified = sum(map(len, drafts)) * (DRAFTED_COST + DRAFTED_CROWD_COST * crowd)
        drafting = max(map(len, drafts)) * DRAFTING_COST if self.drafter == "draft" else 0.0
        return self.pass_s * (1 + CROWD_COST * crowd + verified + drafting) + prompt_tokens * self.prompt_token_s


class NgramIndex:
    """A text that knows what followed each of its n-grams when it last occurred."""

    def __init__(self, shortest: int, longest: int) -> None:
        self._lengths = range(longest, shortest - 1, -1)
        self._next: Dict[Tuple[str, ...], int] = {}
        self.tokens: List[str] = []

    def extend(self, tokens: Iterable[str]) -> None:
        for token in tokens:
            place = len(self.tokens)
            for length in self._lengths:
                if length <= place:
                    self._next[tuple(self.tokens[place - length:])] = place
            self.tokens.append(token)

    def continuation(self, text: Sequence[str], count: int) -> List[str]:
        """What followed the longest known n-gram that `text` ends with: at most `count` tokens, none if none is known."""
        for length in self._lengths:
            place = self._next.get(tuple(text[-length:])) if length <= len(text) else None
            if place is not None:
                return self.tokens[place:place + count]
        return []


class DemoSequence:
    """One request in the engine: what was asked, what is answered so far, and what became of its drafts."""

    def __init__(self, prompt: ToyPrompt, options: DemoOptions, max_tokens: int, top_logprobs: Optional[int] = None) -> None:
        self.prompt = prompt
        self.answer = ToyAnswer(prompt, options.rounding_nats)
        self.max_tokens = max_tokens
        self.top_logprobs = top_logprobs        # None: not asked for
        self.streamed = True
        self.tokens: List[str] = []
        self.verified: List[Tuple[int, int]] = []   # (drafted, accepted) of every target pass after the prompt's
        self.finish: Optional[str] = None           # stop | length | abort
        self.started_s = self.first_s = self.last_s = 0.0
        self.heard: Callable[[DemoEmission], None] = lambda emission: None
        self.seen = NgramIndex(2, 4)
        self.seen.extend(prompt.tokens if options.speculates else ())

    @property
    def drafted(self) -> int:
        return sum(drafted for drafted, _ in self.verified)

    @property
    def accepted(self) -> int:
        return sum(accepted for _, accepted in self.verified)


class DemoLogprob(NamedTuple):
    """One token's log-probability and the likeliest tokens at its place."""

    token: str
    nats: float
    top: Sequence[Tuple[float, str]]
    drafted: bool


class DemoEmission(NamedTuple):
    """What one pass adds to one sequence; the first `accepted` of the tokens were drafted."""

    sequence: DemoSequence
    tokens: Tuple[str, ...]
    accepted: int
    logprobs: Tuple[DemoLogprob, ...]

    @property
    def first(self) -> bool:
        """Whether this is the sequence's first token."""
        return len(self.tokens) == len(self.sequence.tokens)


class DemoStep(NamedTuple):
    """One pass of the target over all active sequences: how long it takes, and what it yields when it ends."""

    duration_s: float
    emissions: Tuple[DemoEmission, ...]


class DemoEngine:
    """The target with its drafter, answering all active requests in common steps. It neither waits nor looks at a clock."""

    def __init__(self, options: DemoOptions) -> None:
        self.options = options
        self.active: List[DemoSequence] = []
        self.waiting: Deque[DemoSequence] = deque()
        self.counts: Counter[Any] = Counter()       # over the sequences released
        self.steps = 0
        self._memory = NgramIndex(3, 8)             # earlier answers, for `suffix`

    def step(self) -> Optional[DemoStep]:
        """The next pass; None: nothing to do."""
        while self.waiting and len(self.active) < self.options.slots:
            self.active.append(self.waiting.popleft())
        if not self.active:
            return None
        drafts = [self._draft(sequence) for sequence in self.active]
        fresh = sum(len(sequence.prompt.tokens) for sequence in self.active if not sequence.tokens)
        width = len(drafts) + sum(map(len, drafts))
        emissions = tuple(self._verify(sequence, draft, width) for sequence, draft in zip(self.active, drafts))
        self.steps += 1
        return DemoStep(self.options.pass_seconds(drafts, fresh), emissions)

    def deliver(self, step: DemoStep, begun_s: float) -> None:
        """Tell everybody what the step, which is over now, has yielded."""
        ended_s = begun_s + step.duration_s
        for emission in step.emissions:
            sequence = emission.sequence
            sequence.started_s = begun_s if emission.first else sequence.started_s
            sequence.first_s = ended_s if emission.first else sequence.first_s
            sequence.last_s = ended_s
            if sequence.finish:
                self.release(sequence)
            sequence.heard(emission)

    def release(self, sequence: DemoSequence) -> None:
        """Take a sequence out of the engine, finished or abandoned; the counters hold it from now on."""
        for queue in (self.active, self.waiting):
            if sequence in queue:
                queue.remove(sequence)
                self._count(sequence)

    def _count(self, sequence: DemoSequence) -> None:
        sequence.finish = sequence.finish or "abort"
        counts = {"requests": 1, "prompt": len(sequence.prompt.tokens), "tokens": len(sequence.tokens)}
        self.counts.update({**counts, **{(name, sequence.streamed): count for name, count in counts.items()}})
        self.counts.update({
            ("finish", sequence.finish): 1, "passes": len(sequence.verified),
            "drafts": sum(drafted > 0 for drafted, _ in sequence.verified), "drafted": sequence.drafted,
            "accepted": sequence.accepted, "prompt_s": sequence.first_s - sequence.started_s,
            "decode_s": sequence.last_s - sequence.first_s})
        self.counts.update(("position", place) for _, accepted in sequence.verified for place in range(accepted))
        if self.options.drafter == "suffix":
            self._memory.extend(sequence.tokens)

    def _draft(self, sequence: DemoSequence) -> List[str]:
        """Tokens guessed beyond the sequence's end: none before its first token, none past its limit or an end."""
        count = min(self.options.draft_length, sequence.max_tokens - len(sequence.tokens) - 1)
        if not sequence.tokens or count < 1 or not self.options.speculates:
            return []
        if self.options.drafter == "draft":
            draft = _small_model_draft(sequence, count)
        else:
            draft = sequence.seen.continuation(sequence.seen.tokens, count)
        if self.options.drafter == "suffix":
            draft = self._memory.continuation(sequence.tokens, count) or draft
        return draft[:draft.index(TOY_END)] if TOY_END in draft else draft

    def _verify(self, sequence: DemoSequence, draft: Sequence[str], width: int) -> DemoEmission:
        """The drafted tokens that the target would have chosen itself, and one of its own."""
        answer, tokens, logprobs = sequence.answer, [], []
        for guess in [*draft, None]:
            own = answer.choose(width)
            wrong = guess is not None and guess != own and self._passes_wrong(sequence, len(tokens))
            token = guess if wrong else own
            if sequence.top_logprobs is not None:
                logprobs.append(_demo_logprob(answer.distribution(width), token, sequence.top_logprobs, token == guess))
            answer.advance(token)
            tokens.append(token)
            if token != guess or token == TOY_END:
                break
        if sequence.tokens:
            sequence.verified.append((len(draft), len(tokens) - 1))
        self._append(sequence, tokens)
        return DemoEmission(sequence, tuple(tokens), len(tokens) - 1, tuple(logprobs))

    def _passes_wrong(self, sequence: DemoSequence, offset: int) -> bool:
        place = len(sequence.tokens) + offset
        return self.options.drafter == "lossy" and _toy_unit(sequence.prompt.seed, "lossy", place) < TOY_CARELESSNESS

    def _append(self, sequence: DemoSequence, tokens: Sequence[str]) -> None:
        sequence.tokens.extend(tokens)
        sequence.seen.extend(tokens)
        if tokens[-1] == TOY_END:
            sequence.finish = "stop"
        elif len(sequence.tokens) >= sequence.max_tokens:
            sequence.finish = "length"


def _small_model_draft(sequence: DemoSequence, count: int) -> List[str]:
    """What a smaller model would say: often the target's own next tokens, and nonsense from its first error on."""
    draft: List[str] = []
    place = len(sequence.tokens)
    while len(draft) < count and _toy_unit(sequence.prompt.seed, "small", place + len(draft)) < TOY_AGREEMENT:
        draft.append(sequence.answer.peek(len(draft)))
    while len(draft) < count:
        draft.append(_toy_pick(_TOY_RIVALS, sequence.prompt.seed, "nonsense", place + len(draft)))
    return draft


def _demo_logprob(distribution: Sequence[Tuple[float, str]], token: str, count: int, drafted: bool) -> DemoLogprob:
    nats = {text: nats for nats, text in distribution}.get(token, distribution[-1][0] - 5)
    return DemoLogprob(token, nats, distribution[:count], drafted)


# ------------------------------------------------------------------------------------- what three engines say (pure)


class DemoRefusal(Exception):
    """A request that an engine answers with an error: HTTP status and body."""

    def __init__(self, status: int, body: Mapping[str, Any]) -> None:
        super().__init__(status)
        self.status = status
        self.body = body


class DemoRequest:
    """One chat request on its way to a reply: its body, its sequence, and how far the text has been told."""

    def __init__(self, body: Mapping[str, Any], prompt: ToyPrompt, options: DemoOptions) -> None:
        room = options.context_tokens - len(prompt.tokens)
        wanted = body.get("max_completion_tokens") or body.get("max_tokens") or room
        top = int(body.get("top_logprobs") or 0) if body.get("logprobs") else None
        self.body = body
        self.sequence = DemoSequence(prompt, options, max(1, min(wanted, room)), top)
        self.streamed = self.sequence.streamed = bool(body.get("stream"))
        self.usage_wanted = bool((body.get("stream_options") or {}).get("include_usage"))
        self.created = int(time.time())
        self.id = "%016x" % int(_toy_unit(prompt.seed, time.time()) * (1 << 62))
        self._function: Optional[str] = None        # name of the tool called, as far as it has come; None: no call
        self._in_arguments = False

    @property
    def finish_reason(self) -> Optional[str]:
        called = self.sequence.finish == "stop" and self._function is not None
        return "tool_calls" if called else self.sequence.finish

    @property
    def usage(self) -> Dict[str, Any]:
        prompt, completion = len(self.sequence.prompt.tokens), len(self.sequence.tokens)
        return {"prompt_tokens": prompt, "total_tokens": prompt + completion, "completion_tokens": completion}

    def message(self) -> Dict[str, Any]:
        """The whole message's channels: content, and the tool call if there is one."""
        deltas = self.deltas(self.sequence.tokens, merge=True)
        content = "".join(delta.get("content", "") for delta in deltas)
        if self._function is None:
            return {"content": content}
        pieces = [delta["tool_calls"][0]["function"]["arguments"] for delta in deltas if "tool_calls" in delta]
        return {"content": content or None, "tool_calls": [self._call("".join(pieces))]}

    def deltas(self, tokens: Iterable[str], merge: bool) -> List[Dict[str, Any]]:
        """What the tokens add to the message, as OpenAI deltas; `merge`: neighbours of one kind in one delta."""
        deltas: List[Dict[str, Any]] = []
        for delta in filter(None, map(self._delta, tokens)):
            if not (merge and deltas and _joined(deltas[-1], delta)):
                deltas.append(delta)
        return deltas

    def _delta(self, token: str) -> Optional[Dict[str, Any]]:
        if token == TOY_CALL:
            self._function = ""
        if token in TOY_SPECIAL:
            return None
        if self._function is None:
            return {"content": token}
        if self._in_arguments:
            return {"tool_calls": [{"index": 0, "function": {"arguments": token}}]}
        self._in_arguments = token.startswith("\n")
        self._function += token.strip()
        return {"tool_calls": [{"index": 0, **self._call("")}]} if self._in_arguments else None

    def _call(self, arguments: str) -> Dict[str, Any]:
        return {"id": f"call_{self.id}", "type": "function", "function": {"name": self._function, "arguments": arguments}}


def _joined(before: Dict[str, Any], delta: Mapping[str, Any]) -> bool:
    """Whether `delta` could be put into the delta `before` it."""
    if "content" in before and "content" in delta:
        before["content"] += delta["content"]
        return True
    if "tool_calls" in before and "tool_calls" in delta and "id" not in delta["tool_calls"][0]:
        before["tool_calls"][0]["function"]["arguments"] += delta["tool_calls"][0]["function"]["arguments"]
        return True
    return False


class DemoDialect:
    """How one engine speaks. The subclasses differ in everything that a client could stumble over."""

    headers: Mapping[str, str] = {"server": "uvicorn", "vary": "Origin"}
    owner = ""
    methods: Mapping[str, str] = {}     # the engine's name of each drafter
    ids_in_logprobs = False
    too_long = "The input ({tokens} tokens) is longer than the model's context length ({context} tokens)."

    def __init__(self, engine: DemoEngine) -> None:
        self.engine = engine
        self.options = engine.options
        self.started_at = time.time()

    def pages(self) -> Dict[str, Callable[[], Any]]:
        """What GET answers, by path: a text, or a value to be sent as JSON."""
        return {"/health": str, "/v1/models": self.models, "/metrics": lambda: _exposition(self.metrics())}

    def models(self) -> Dict[str, Any]:
        return {"object": "list", "data": [{
            "id": DEMO_MODEL, "object": "model", "created": int(self.started_at), "owned_by": self.owner,
            "root": DEMO_MODEL, "parent": None, "max_model_len": self.options.context_tokens}]}

    def metrics(self) -> Iterator[DemoSample]:
        """Every sample of the metrics page, those of one name together."""
        raise NotImplementedError

    def events(self, request: DemoRequest, emission: DemoEmission) -> List[Mapping[str, Any]]:
        """The chunks of a stream that one step's tokens cause; those that close it, after the last step."""
        raise NotImplementedError

    def whole(self, request: DemoRequest, logprobs: Sequence[DemoLogprob]) -> Dict[str, Any]:
        """The reply that is not streamed."""
        choice = {"index": 0, "message": {"role": "assistant", **request.message()}, "logprobs": self.logprobs(logprobs),
                  "finish_reason": request.finish_reason}
        return {"id": f"chatcmpl-{request.id}", "object": "chat.completion", "created": request.created,
                "model": DEMO_MODEL, "choices": [choice], "usage": request.usage}

    def read(self, payload: bytes) -> DemoRequest:
        """The request that a POST to the chat address holds; DemoRefusal if the engine would not answer it."""
        try:
            body = json.loads(payload)
        except ValueError as error:
            raise self.refusal(400, f"JSON decode error: {error}", "Bad Request", "body")
        messages = body.get("messages") if isinstance(body, dict) else None
        if not isinstance(messages, list) or not messages or not all(isinstance(message, dict) for message in messages):
            raise self.refusal(400, "1 validation error: 'messages': Field required", "Bad Request", "body.messages")
        for name in ("max_tokens", "max_completion_tokens"):
            if not isinstance(body.get(name, 1), (int, type(None))):
                raise self.refusal(400, f"1 validation error: '{name}': not an integer", "Bad Request", f"body.{name}")
        self.check(body)
        prompt, context = read_toy_prompt(messages, body.get("tools") or ()), self.options.context_tokens
        if len(prompt.tokens) >= context:
            sentence = self.too_long.format(tokens=len(prompt.tokens), context=context)
            raise self.refusal(400, sentence, "BadRequestError", "input_tokens")
        return DemoRequest(body, prompt, self.options)

    def check(self, body: Mapping[str, Any]) -> None:
        """Refuse what only this engine refuses."""

    def refusal(self, status: int, sentence: str, kind: str, param: Optional[str] = None) -> DemoRefusal:
        """An error in the engine's own shape."""
        return DemoRefusal(status, {"error": {"message": sentence, "type": kind, "param": param, "code": status}})

    def not_found(self) -> DemoRefusal:
        return DemoRefusal(404, {"detail": "Not Found"})

    def chunk(self, request: DemoRequest, choices: Sequence[Mapping[str, Any]], **more: Any) -> Dict[str, Any]:
        return {"id": f"chatcmpl-{request.id}", "object": "chat.completion.chunk", "created": request.created,
                "model": DEMO_MODEL, "choices": choices, **more}

    def logprobs(self, logprobs: Iterable[DemoLogprob]) -> Optional[Dict[str, Any]]:
        """The logprobs of a choice; None: there are none."""
        entries = [{**self._logprob(one.token, one.nats), "top_logprobs": [self._logprob(token, nats) for nats, token in one.top]}
                   for one in logprobs]
        return {"content": entries} if entries else None

    def _logprob(self, token: str, nats: float) -> Dict[str, Any]:
        number = {"id": toy_token_id(token)} if self.ids_in_logprobs else {}
        return {**number, "token": token, "logprob": nats, "bytes": list(token.encode("utf-8", "surrogatepass"))}


class DemoSample(NamedTuple):
    """One sample of a metrics page."""

    name: str
    kind: str
    labels: Mapping[str, str]
    value: float


def _exposition(samples: Iterable[DemoSample]) -> str:
    """A Prometheus page."""
    lines: List[str] = []
    before = ""
    for name, kind, labels, value in samples:
        if name != before:
            lines += [f"# HELP {name} Of the demo server.", f"# TYPE {name} {kind}"]
        before = name
        shown = ",".join(f'{label}="{text}"' for label, text in labels.items())
        lines.append(f"{name}{{{shown}}} {value}" if shown else f"{name} {value}")
    return "\n".join(lines) + "\n"


class LlamaCppDialect(DemoDialect):
    """llama-server: one chunk a token, in bursts; drafts in `timings`; logprobs that are not real for drafted tokens."""

    headers = {"Server": "llama.cpp", "Access-Control-Allow-Origin": ""}
    owner = "llamacpp"
    methods = {"ngram": "ngram-simple", "lossy": "ngram-simple", "suffix": "ngram-cache", "draft": "draft-simple"}
    ids_in_logprobs = True
    too_long = "request ({tokens} tokens) exceeds the available context size ({context} tokens), try increasing it"
    build = "b11434-demo"

    def pages(self) -> Dict[str, Callable[[], Any]]:
        return {**super().pages(), "/health": lambda: {"status": "ok"}, "/props": self.props, "/slots": self.slots}

    def models(self) -> Dict[str, Any]:
        card = super().models()["data"][0]
        context = card.pop("max_model_len")
        return {"models": [{"name": DEMO_MODEL, "model": DEMO_MODEL, "type": "model"}], "object": "list",
                "data": [{**card, "meta": {"n_ctx": context, "n_ctx_train": context, "ftype": "toy"}}]}

    def props(self) -> Dict[str, Any]:
        """As in the real one, the methods said here are always "none"."""
        return {"default_generation_settings": {"params": {"speculative.types": "none"}, "n_ctx": self.options.context_tokens},
                "total_slots": self.options.slots, "model_alias": DEMO_MODEL, "model_ftype": "toy",
                "model_path": "/models/toy-target.gguf", "endpoint_slots": True, "endpoint_metrics": True,
                "build_info": self.build}

    def slots(self) -> List[Dict[str, Any]]:
        types = ",".join(filter(None, ("none", self.methods.get(self.options.drafter))))
        params = {"params": {"speculative.types": types}} if self.engine.counts["requests"] else {}
        return [{"id": number, "n_ctx": self.options.context_tokens, "speculative": self.options.speculates,
                 "is_processing": number < len(self.engine.active), **params} for number in range(self.options.slots)]

    def metrics(self) -> Iterator[DemoSample]:
        counts = self.engine.counts
        for name, value in (("prompt_tokens", counts["prompt"]), ("prompt_tokens_cached", 0),
                            ("prompt_seconds", counts["prompt_s"]), ("tokens_predicted", counts["tokens"]),
                            ("tokens_predicted_seconds", counts["decode_s"]), ("n_decode", self.engine.steps),
                            ("spec_decode_num_draft_tokens", counts["drafted"]),
                            ("spec_decode_num_accepted_tokens", counts["accepted"]),
                            ("spec_decode_num_drafts", counts["drafts"])):
            yield DemoSample(f"llamacpp:{name}_total", "counter", {}, value)
        for name, value in (("requests_processing", len(self.engine.active)), ("requests_deferred", len(self.engine.waiting))):
            yield DemoSample(f"llamacpp:{name}", "gauge", {}, value)
        for place in range(self.options.draft_length if counts["drafts"] else 0):
            yield DemoSample("llamacpp:spec_decode_num_accepted_tokens_per_pos_total", "counter",
                             {"position": str(place)}, counts["position", place])

    def refusal(self, status: int, sentence: str, kind: str, param: Optional[str] = None) -> DemoRefusal:
        kind = "exceed_context_size_error" if param == "input_tokens" else "invalid_request_error"
        return DemoRefusal(status, {"error": {"code": status, "message": sentence, "type": kind}})

    def not_found(self) -> DemoRefusal:
        return DemoRefusal(404, {"error": {"message": "File Not Found", "type": "not_found_error", "code": 404}})

    def events(self, request: DemoRequest, emission: DemoEmission) -> List[Mapping[str, Any]]:
        def choice(delta: Mapping[str, Any], finish: Optional[str] = None, **more: Any) -> Dict[str, Any]:
            return self.chunk(request, [{"finish_reason": finish, "index": 0, "delta": delta, **more}], system_fingerprint=self.build)

        events = [choice({"role": "assistant", "content": None})] if emission.first else []
        for place, token in enumerate(emission.tokens):
            real = emission.logprobs and place >= emission.accepted     # a drafted token's are absent
            more = {"logprobs": self.logprobs(emission.logprobs[place:place + 1])} if real else {}
            events += [choice(delta, **more) for delta in request.deltas([token], merge=False)]
        if request.sequence.finish and request.usage_wanted:
            account = self._account(request)
            events += [choice({}, request.finish_reason), self.chunk(request, [], system_fingerprint=self.build, **account)]
        elif request.sequence.finish:
            events.append({**choice({}, request.finish_reason), "timings": self._account(request)["timings"]})
        return events

    def whole(self, request: DemoRequest, logprobs: Sequence[DemoLogprob]) -> Dict[str, Any]:
        whole = super().whole(request, [one._replace(nats=0.0, top=()) if one.drafted else one for one in logprobs])
        if not logprobs:
            del whole["choices"][0]["logprobs"]
        return {**whole, "system_fingerprint": self.build, **self._account(request)}

    def _account(self, request: DemoRequest) -> Dict[str, Any]:
        sequence, usage = request.sequence, request.usage
        predicted, decode_ms = len(sequence.tokens), max(0.001, (sequence.last_s - sequence.first_s) * 1e3)
        timings = {"cache_n": 0, "prompt_n": usage["prompt_tokens"], "prompt_ms": (sequence.first_s - sequence.started_s) * 1e3,
                   "predicted_n": predicted, "predicted_ms": decode_ms, "predicted_per_token_ms": decode_ms / predicted,
                   "predicted_per_second": (predicted - 1) / decode_ms * 1e3}
        if sequence.drafted:        # absent, not nought
            timings.update(draft_n=sequence.drafted, draft_n_accepted=sequence.accepted)
        return {"usage": {**usage, "prompt_tokens_details": {"cached_tokens": 0}}, "timings": timings}


class VllmDialect(DemoDialect):
    """vLLM: all tokens of a step in one chunk, the finish reason on the last of them, acceptance beside the usage."""

    owner = "vllm"
    too_long = ("This model's maximum context length is {context} tokens. However, your prompt contains at least {tokens} "
                "input tokens. (parameter=input_tokens, value={tokens})")
    version = "0.32.0"

    def pages(self) -> Dict[str, Callable[[], Any]]:
        return {**super().pages(), "/version": lambda: {"version": self.version}}

    def metrics(self) -> Iterator[DemoSample]:
        plain = {"engine": "0", "model_name": DEMO_MODEL}
        for name, samples in self._counters(self.engine.counts).items():
            for more, value in samples:
                yield DemoSample(f"vllm:{name}_total", "counter", {**plain, **more}, float(value))
            for more, _ in samples:
                yield DemoSample(f"vllm:{name}_created", "gauge", {**plain, **more}, self.started_at)
        capacity = self.options.context_tokens * self.options.slots
        cache = {"block_size": "16", "cache_dtype": "auto", "enable_prefix_caching": "False", "engine": "0",
                 "gpu_memory_utilization": "0.9", "kv_cache_dtype_skip_layers": "[]", "kv_cache_size_tokens": str(capacity),
                 "num_gpu_blocks": str(capacity // 16)}
        yield DemoSample("vllm:num_requests_running", "gauge", plain, float(len(self.engine.active)))
        yield DemoSample("vllm:cache_config_info", "gauge", cache, 1.0)
        yield DemoSample("process_start_time_seconds", "gauge", {}, self.started_at)

    def _counters(self, counts: Mapping[Any, float]) -> Dict[str, List[Tuple[Mapping[str, str], float]]]:
        """Samples by counter, the labels beyond the common ones told apart; those of drafts only when speculating."""
        reasons = [({"finished_reason": reason}, counts["finish", reason]) for reason in ("stop", "length", "abort")]
        counters: Dict[str, List[Tuple[Mapping[str, str], float]]] = {
            "prompt_tokens": [({}, counts["prompt"])], "generation_tokens": [({}, counts["tokens"])], "request_success": reasons}
        if self.options.speculates:
            positions = range(self.options.draft_length)
            counters.update({
                "spec_decode_num_drafts": [({}, counts["drafts"])], "spec_decode_num_draft_tokens": [({}, counts["drafted"])],
                "spec_decode_num_accepted_tokens": [({}, counts["accepted"])],
                "spec_decode_num_accepted_tokens_per_pos": [({"position": str(i)}, counts["position", i]) for i in positions]})
        return counters

    def check(self, body: Mapping[str, Any]) -> None:
        if body.get("model") not in (None, DEMO_MODEL):
            sentence = f"The model `{body.get('model')}` does not exist. Valid aliases: {DEMO_MODEL}."
            raise self.refusal(404, sentence, "NotFoundError", "model")
        if body.get("max_tokens", 1) == 0:
            sentence = "max_tokens must be at least 1, got 0. (parameter=max_tokens, value=0)"
            raise self.refusal(400, sentence, "BadRequestError", "max_tokens")

    def events(self, request: DemoRequest, emission: DemoEmission) -> List[Mapping[str, Any]]:
        finish = request.sequence.finish
        ids = self._ids(request, emission.tokens)
        opening = {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        prompt_ids = self._ids(request, request.sequence.prompt.tokens)
        events = [self.chunk(request, [opening], prompt_token_ids=prompt_ids, prompt_text=None)] if emission.first else []
        deltas = request.deltas(emission.tokens, merge=True) or ([{"content": ""}] if ids or finish else [])
        choices = [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": None, "token_ids": None} for delta in deltas]
        if choices:
            choices[-1].update(logprobs=self.logprobs(emission.logprobs), token_ids=ids)
        if finish:
            choices[-1].update(finish_reason=request.finish_reason, stop_reason=None)
        events += [self.chunk(request, [choice]) for choice in choices]
        if finish and request.usage_wanted:
            events.append(self.chunk(request, [], usage=request.usage, **self._account(request.sequence)))
        return events

    def _ids(self, request: DemoRequest, tokens: Sequence[str]) -> Optional[List[int]]:
        return list(map(toy_token_id, tokens)) if request.body.get("return_token_ids") else None

    def whole(self, request: DemoRequest, logprobs: Sequence[DemoLogprob]) -> Dict[str, Any]:
        whole = super().whole(request, logprobs)
        whole["choices"][0].update(stop_reason=None, token_ids=self._ids(request, request.sequence.tokens))
        whole["choices"][0]["message"].update(refusal=None, reasoning=None)
        prompt_ids = self._ids(request, request.sequence.prompt.tokens)
        return {**whole, "prompt_token_ids": prompt_ids, "metrics": None, **self._account(request.sequence)}

    def _account(self, sequence: DemoSequence) -> Dict[str, Any]:
        taken = [accepted for drafted, accepted in sequence.verified if drafted]    # passes without a draft do not count
        fingerprint = {"system_fingerprint": f"vllm-{self.version}-demo"}
        if not self.options.speculates:
            return fingerprint
        return {**fingerprint, "metrics": {"speculative_decoding": {
            "mean_acceptance_length": 1 + sum(taken) / len(taken) if taken else 0.0,
            "draft_acceptance_rate": sum(taken) / sequence.drafted if taken else 0.0,
            "acceptance_histogram": [taken.count(place) for place in range(self.options.draft_length + 1)],
            "num_spec_steps": len(taken), "num_accepted_draft_tokens": sum(taken), "num_draft_tokens": sequence.drafted,
            "num_spec_tokens": self.options.draft_length}}}


class SglangDialect(DemoDialect):
    """SGLang: nominal proposals, lengths over every pass, acceptance in a chunk of its own, a talkative server_info."""

    owner = "sglang"
    methods = {"ngram": "NGRAM", "lossy": "NGRAM", "suffix": "NGRAM", "draft": "STANDALONE"}

    def pages(self) -> Dict[str, Callable[[], Any]]:
        model = {"model_path": "/models/toy-target", "served_model_name": DEMO_MODEL, "is_generation": True, "model_type": "toy"}
        return {**super().pages(), "/server_info": self.server_info, "/get_server_info": self.server_info,
                "/model_info": lambda: model, "/get_model_info": lambda: model}

    def server_info(self) -> Dict[str, Any]:
        """Every server argument; as in the real one a secret among them, which no client may keep."""
        k = self.options.draft_length if self.options.speculates else None
        return {"model_path": "/models/toy-target", "served_model_name": DEMO_MODEL, "dtype": "auto", "quantization": None,
                "kv_cache_dtype": "auto", "context_length": self.options.context_tokens, "api_key": "demo-secret",
                "admin_api_key": "demo-secret", "launch_command": "sglang serve --api-key demo-secret",
                "max_running_requests": self.options.slots, "disable_radix_cache": True, "random_seed": 1,
                "enable_metrics": True, "enable_deterministic_inference": False, "attention_backend": "triton",
                "speculative_algorithm": self.methods.get(self.options.drafter),
                "speculative_draft_model_path": "/models/toy-draft" if self.options.drafter == "draft" else None,
                "speculative_num_steps": k, "speculative_eagle_topk": k and 1, "speculative_num_draft_tokens": k and k + 1,
                "max_total_num_tokens": self.options.context_tokens * self.options.slots, "version": "0.5.20"}

    def metrics(self) -> Iterator[DemoSample]:
        counts, plain = self.engine.counts, {"engine_type": "unified", "model_name": DEMO_MODEL}
        gauges = {"max_total_num_tokens": self.options.context_tokens * self.options.slots,
                  "context_len": self.options.context_tokens, "num_running_reqs": len(self.engine.active),
                  "spec_accept_length": 0, "spec_accept_rate": 0}       # windows that no short run fills
        for name, value in gauges.items():
            yield DemoSample(f"sglang:{name}", "gauge", {**plain, "moe_ep_rank": "0", "pp_rank": "0", "tp_rank": "0"}, float(value))
        for name, key in (("prompt_tokens", "prompt"), ("generation_tokens", "tokens"), ("num_requests", "requests")):
            for streamed in filter(lambda streamed: counts["requests", streamed], (False, True)):
                labels = {**plain, "is_streaming": str(streamed).lower()}
                yield DemoSample(f"sglang:{name}_total", "counter", labels, float(counts[key, streamed]))
        if self.options.speculates and counts["requests"]:
            yield DemoSample("sglang:spec_verify_calls_total", "counter", plain, float(counts["passes"]))

    def refusal(self, status: int, sentence: str, kind: str, param: Optional[str] = None) -> DemoRefusal:
        return DemoRefusal(status, {"object": "error", "message": sentence, "type": kind, "param": None, "code": status})

    def check(self, body: Mapping[str, Any]) -> None:
        for name in ("return_token_ids", "return_meta_info"):
            if body.get("stream") and body.get(name):
                raise self.refusal(400, f"{name} is not supported with streaming. Please set stream=false.", "BadRequest")

    def events(self, request: DemoRequest, emission: DemoEmission) -> List[Mapping[str, Any]]:
        def choice(delta: Mapping[str, Any], finish: Optional[str] = None, **more: Any) -> Dict[str, Any]:
            return {**self.chunk(request, [{"index": 0, "delta": {"reasoning_content": None, **delta}, "logprobs": None,
                                            "finish_reason": finish, **self._stopped(finish), **more}]), "id": request.id}

        events = [choice({"role": "assistant", "content": ""})] if emission.first else []
        shown = [one._replace(top=emission.logprobs[0].top) for one in emission.logprobs]   # as seen: the first one's for all
        events += [choice(delta, logprobs=self.logprobs(shown)) for delta in request.deltas(emission.tokens, merge=True)]
        if request.sequence.finish:
            account = self._account(request)
            events.append(choice({}, request.finish_reason))
            events += [self.chunk(request, [], usage=None, **account)] if account else []
            events += [self.chunk(request, [], usage=self._usage(request))] if request.usage_wanted else []
        return events

    def whole(self, request: DemoRequest, logprobs: Sequence[DemoLogprob]) -> Dict[str, Any]:
        whole = {**super().whole(request, logprobs), "id": request.id, "usage": self._usage(request)}
        choice = whole["choices"][0]
        choice.update(self._stopped(request.finish_reason))
        choice["message"] = {"reasoning_content": None, "tool_calls": None, **choice["message"]}
        if request.body.get("return_token_ids"):
            choice["response_token_ids"] = list(map(toy_token_id, request.sequence.tokens))
        return {**whole, "model": request.body.get("model") or DEMO_MODEL, **self._account(request)}

    @staticmethod
    def _stopped(finish: Optional[str]) -> Dict[str, Any]:
        return {"matched_stop": toy_token_id(TOY_END) if finish == "stop" else None}

    def _usage(self, request: DemoRequest) -> Dict[str, Any]:
        return {**request.usage, "prompt_tokens_details": None, "reasoning_tokens": 0}

    def _account(self, request: DemoRequest) -> Dict[str, Any]:
        taken = [accepted for _, accepted in request.sequence.verified]
        if not (request.body.get("return_spec_tokens_details") and self.options.speculates and taken):
            return {}
        proposed = len(taken) * self.options.draft_length       # nominal: also for passes without a draft
        return {"sglext": {"spec_tokens_details": {
            "spec_accept_rate": sum(taken) / proposed, "spec_accept_length": len(request.sequence.tokens) / len(taken),
            "spec_cap_length": 0.0, "spec_block_accept_length": 0.0, "spec_num_correct_drafts": sum(taken),
            "spec_num_proposed_drafts": proposed, "spec_verify_ct": len(taken),
            "spec_correct_drafts_histogram": [taken.count(place) for place in range(max(taken) + 1)],
            "spec_cap_lens_histogram": []}}}


# ------------------------------------------------------------------------------------------- sockets and children (I/O)

_DEMO_SPEAKERS = {"llama.cpp": LlamaCppDialect, "vllm": VllmDialect, "sglang": SglangDialect}


def add_demo_server_options(parser: argparse.ArgumentParser) -> None:
    """The flags of the hidden verb `demo-server`."""
    default = DemoOptions()
    parser.add_argument("--port", type=int, default=0, help="0: any free one; it is printed as the first line")
    parser.add_argument("--dialect", choices=DEMO_DIALECTS, default=default.dialect)
    parser.add_argument("--drafter", choices=DEMO_DRAFTERS, default=default.drafter)
    parser.add_argument("--draft-length", type=int, default=default.draft_length, metavar="K")
    parser.add_argument("--slots", type=int, default=default.slots, metavar="N", help="requests answered at once")
    parser.add_argument("--context", type=int, default=default.context_tokens, metavar="TOKENS")
    parser.add_argument("--pass-ms", type=float, default=default.pass_s * 1e3, metavar="MS", help="one target pass")
    parser.add_argument("--rounding", type=float, default=0.0, metavar="NATS", help="largest rounding error of a score")


def demo_server(options: argparse.Namespace) -> int:
    """Serve on loopback until stdin closes (a terminal's does not count) or the process is ended. Exit status."""
    import asyncio
    engine = DemoEngine(DemoOptions(options.dialect, options.drafter, options.draft_length, options.slots, options.context,
                                    options.pass_ms / 1e3, rounding_nats=options.rounding))
    if sys.stdin is not None and not sys.stdin.isatty():
        threading.Thread(target=_end_with_stdin, daemon=True).start()
    try:
        asyncio.run(_serve_demo(_DEMO_SPEAKERS[options.dialect](engine), options.port))
    except KeyboardInterrupt:
        pass
    return 0


def _end_with_stdin() -> None:
    """The pipe from our parent closes when the parent closes it or dies, on every system; then we end."""
    while sys.stdin.buffer.read(4096):
        pass
    os._exit(0)


async def _serve_demo(dialect: DemoDialect, port: int) -> None:
    import asyncio
    work = asyncio.Event()
    server = await asyncio.start_server(
        lambda reader, writer: _serve_connection(DemoConnection(dialect, work, reader, writer)), "127.0.0.1", port)
    print(server.sockets[0].getsockname()[1], flush=True)
    await _serve_steps(dialect.engine, work)


async def _serve_steps(engine: DemoEngine, work: asyncio.Event) -> None:
    """Let the engine's passes last as long as they say, on a schedule that late wake-ups do not stretch."""
    import asyncio
    due_s = time.perf_counter()
    while True:
        step = engine.step()
        if step is None:
            work.clear()
            await work.wait()
            due_s = time.perf_counter()
            continue
        begun_s = max(due_s, time.perf_counter() - 0.05)
        due_s = begun_s + step.duration_s
        await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
        engine.deliver(step, begun_s)


class DemoConnection(NamedTuple):
    """One client's connection, with whom it talks to."""

    dialect: DemoDialect
    work: asyncio.Event     # set: there is something to answer
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    @property
    def gone(self) -> bool:
        """Whether the client has hung up."""
        return self.writer.transport.is_closing() or self.reader.at_eof()


async def _serve_connection(connection: DemoConnection) -> None:
    """Answer one connection's requests in turn, until it closes."""
    import asyncio
    head = ""
    try:
        while not re.search(r"(?im)^connection:\s*close", head):
            head = (await connection.reader.readuntil(b"\r\n\r\n")).decode("latin-1")
            length = re.search(r"(?im)^content-length:\s*(\d+)", head)
            payload = await connection.reader.readexactly(int(length[1])) if length else b""
            method, target, _ = head.split(" ", 2)
            await _answer(connection, method, target.partition("?")[0].rstrip("/"), payload)
            await connection.writer.drain()
    except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, ConnectionError, ValueError):
        pass        # it has closed, or does not speak HTTP
    finally:
        connection.writer.close()


async def _answer(connection: DemoConnection, method: str, path: str, payload: bytes) -> None:
    dialect = connection.dialect
    try:
        if (method, path) == ("POST", "/v1/chat/completions"):
            await _answer_chat(connection, dialect.read(payload))
        elif method != "GET" or path not in dialect.pages():
            raise dialect.not_found()
        else:
            connection.writer.write(_response(dialect, 200, dialect.pages()[path]()))
    except DemoRefusal as refusal:
        connection.writer.write(_response(dialect, refusal.status, refusal.body))


async def _answer_chat(connection: DemoConnection, request: DemoRequest) -> None:
    """Put the request into the engine and write what its steps yield, each step's chunks in one write."""
    import asyncio
    dialect, writer = connection.dialect, connection.writer
    done = asyncio.Event()
    logprobs: List[DemoLogprob] = []

    def hear(emission: DemoEmission) -> None:
        logprobs.extend(emission.logprobs)
        if request.streamed and not connection.gone:
            writer.write(b"".join(_http_chunk(b"data: %b\n\n" % _json_bytes(event)) for event in dialect.events(request, emission)))
        if connection.gone:
            dialect.engine.release(request.sequence)
        if request.sequence.finish:
            done.set()

    request.sequence.heard = hear
    if request.streamed:
        writer.write(_response_head(dialect, 200, "text/event-stream; charset=utf-8", "Transfer-Encoding: chunked"))
    dialect.engine.waiting.append(request.sequence)
    connection.work.set()
    await done.wait()
    closing = _http_chunk(b"data: [DONE]\n\n") + _http_chunk(b"")
    writer.write(closing if request.streamed else _response(dialect, 200, dialect.whole(request, logprobs)))


def _response(dialect: DemoDialect, status: int, body: Any) -> bytes:
    """A whole HTTP response: a text as it is, anything else as JSON."""
    kind, payload = "application/json", _json_bytes(body)
    if isinstance(body, str):
        kind, payload = "text/plain; version=0.0.4; charset=utf-8", body.encode()
    return _response_head(dialect, status, kind, f"Content-Length: {len(payload)}") + payload


def _response_head(dialect: DemoDialect, status: int, kind: str, framing: str) -> bytes:
    reason = {200: "OK", 400: "Bad Request", 404: "Not Found"}[status]
    headers = [f"{name}: {value}" for name, value in dialect.headers.items()]
    return "\r\n".join([f"HTTP/1.1 {status} {reason}", *headers, f"Content-Type: {kind}", framing, "", ""]).encode("latin-1")


def _http_chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def _json_bytes(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "replace")


@dataclass(frozen=True)
class DemoServer:
    """A demo server that runs as our child; as a context manager it is stopped at the end."""

    url: str                # base URL, ending in /v1
    dialect: str
    drafter: str
    process: subprocess.Popen

    def __enter__(self) -> DemoServer:
        return self

    def __exit__(self, *error: object) -> None:
        stop_demo_server(self)


def start_demo_server(dialect: str = "llama.cpp", drafter: str = "none", flags: Sequence[str] = (),
                      program: Sequence[str] = ()) -> DemoServer:
    """A demo server that is ready to be asked. `flags`: further ones of the verb; `program`: what is run in its place."""
    import subprocess
    command = [*(program or (sys.executable, os.path.abspath(__file__), "demo-server")),
               "--dialect", dialect, "--drafter", drafter, *flags]
    # A Ctrl-C at the terminal is ours alone: the pass under way is still to be recorded.
    apart: Dict[str, Any] = {"start_new_session": True}
    if os.name == "nt":
        apart = {"creationflags": subprocess.CREATE_NEW_PROCESS_GROUP}
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, **apart)
    port = process.stdout.readline().strip().decode()
    server = DemoServer(f"http://127.0.0.1:{port}/v1", dialect, drafter, process)
    if not port.isdigit():
        stop_demo_server(server)
        raise MeasureError(f"a demo server did not start (exit status {process.returncode})", "run demo-server by hand to see why")
    return server


def stop_demo_server(server: DemoServer) -> None:
    """End the child: ask by closing its stdin, insist after two seconds."""
    import subprocess
    server.process.stdin.close()
    try:
        server.process.wait(2)
    except subprocess.TimeoutExpired:
        server.process.kill()
        server.process.wait()
    server.process.stdout.close()


# ======================================================================================================================
# 16. Command line (I/O)
# ======================================================================================================================
#
# Verbs; main(argv) -> int.
