#!/usr/bin/env python3
# /// script
# requires-python = ">=3.9"
# dependencies = []
# ///
"""measure_speculative.py: does speculative decoding pay here, and did the answers stay the same?

It points at servers that already run (llama.cpp, vLLM, SGLang, any OpenAI-compatible one), asks them the same prompts at
temperature 0, and answers two questions for this model, on this machine, for this kind of work:

1. Does it pay? Tokens a second, time to first token (TTFT), time per output token (TPOT) and acceptance, per workload and
   per concurrency, as a ratio to the baseline with a 95 % interval; where it stops paying; which draft length would pay more.
2. Did the answers stay the same? Completions compared byte for byte with the baseline's, held against how well the baseline
   agrees with itself (the noise floor), how near a tie each fork was (the margin), and how large rounding is on this very
   pair of servers (the ruler): so that rounding is not called a bug, and a bug is not called rounding.

    python3 measure_speculative.py demo
    python3 measure_speculative.py check --baseline-url URL --speculative-url URL
    python3 measure_speculative.py --baseline-url URL --speculative-url [NAME=]URL ... [--suite lesson]
    python3 measure_speculative.py compare RUN RUN ...      table | csv | report | notebook | breakeven      (each: --help)

Words. target: the model that answers. drafter: what proposes tokens to it. draft length k: tokens proposed a step. verify
step: one pass of the target over a draft. accepted tokens: proposed ones that the target would have chosen (the bonus token,
which it adds itself, not counted). acceptance rate: accepted/drafted. acceptance length: 1 + accepted/drafts, bonus token
included, over steps that had a draft. tokens per target pass: the yield over all passes, also those without a draft; it means
the same on every engine, and it is what speed follows. TTFT: from handing the request over to the first text of any channel.
TPOT: (last - first)/(tokens - tokens in the first chunk). chunk gap: time between stream chunks; under speculation a chunk
holds several tokens, so it is no time per token. decode speed: tokens a second of one request after its first chunk. output
throughput: tokens of all completed requests over the wall time of their pass. level: concurrency. floor, margin, ruler: above.

What its numbers do not mean. Throughput at concurrency 1 is the lesson's number; the tutorial's speedup is the ratio of decode
speeds: both are printed, never mixed. A ratio holds for the prompts that were asked. Acceptance falls along the chain and
differs by workload. A gauge that a server shows for its whole life is shown as such and never calculated with.

Files. Results are appended to a notebook (labbook.md) as JSON lines; every reply with its text and its stamps goes into a run
file beside it, from which every number can be rebuilt and runs of different days or machines be compared. No key is ever
written, no proxy used, no request retried. Exit codes: 0 measured, 1 something failed, 2 cannot start, 130 interrupted.

The file reads top to bottom; a section uses only what stands above it:
 1 words and errors    2 the data           3 prompts             4 acceptance          5 one request on the wire
 6 the client          7 servers            8 a timed pass        9 comparison         10 statistics
11 verdict            12 break-even        13 notebook, run files 14 tables, CSV, page 15 demo servers     16 command line
Sections 1 to 5 and 9 to 14 are pure (13 also reads and appends): time is data there. Importing the file does nothing; its
functions may be used, and may change with any version.
"""
from __future__ import annotations

import argparse
import asyncio
import base64
import bisect
import codecs
import contextlib
import csv
import datetime
import errno
import functools
import gc
import hashlib
import io
import itertools
import json
import math
import operator
import os
import platform
import re
import secrets
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import unicodedata
import urllib.parse
import zlib
from array import array
from collections import Counter, deque
from dataclasses import dataclass, field, MISSING, replace
from statistics import NormalDist
from typing import (
    Any, Callable, Deque, Dict, FrozenSet, Iterable, Iterator, List, Mapping, NamedTuple, Optional, Sequence, Set,
    Tuple, Union,
)

try:
    import fcntl
except ImportError:         # Windows
    fcntl = None            # type: ignore[assignment]
try:
    import msvcrt
except ImportError:         # everywhere else
    msvcrt = None           # type: ignore[assignment]

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
# 2. The data (pure)
# ======================================================================================================================
#
# One frozen dataclass for each thing that has a name; JSON keys equal field names, units stand in the names.


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
    sha256: Optional[str] = None        # its digest, where its text was not kept (--no-texts)


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
    gauges: Mapping[str, float] = field(default_factory=dict)   # the server's own gauges: shown, never calculated with

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
        """Tokens that one pass of the target yields over the whole answer, passes without a draft included."""
        passes = self.target_passes
        if passes is None or self.completion_tokens is None or self.requests is None:
            return None
        return (self.completion_tokens - self.requests) / passes

    @property
    def target_passes(self) -> Optional[int]:
        """Passes of the target after the prompts': T - n - accepted over n requests with T tokens in all, but no fewer than drafts.

        Each request's first token comes from the prompt's pass, and every other pass yields its accepted tokens and one more.
        Engines count accepted tokens that the end of the answer then cuts off; each draft was a pass all the same.
        """
        if self.completion_tokens is None or self.requests is None or self.accepted_tokens is None:
            return None
        passes = max(self.completion_tokens - self.requests - self.accepted_tokens, self.drafts or 0)
        return passes if passes > 0 else None

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
    resent: bool = False                    # the kept connection turned out to be closed: it was sent again over a new one

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
    of_level: Optional[int] = None  # a floor's: the level whose prompts are asked again
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
        known = [count for count in counts if count is not None]
        return sum(known) if known and len(known) == len(counts) else None

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
    finish_reasons: Tuple[Optional[str], Optional[str]] = (None, None)  # the baseline's, the other's


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
# Prompts come from the built-in dozen, from the sets in `prompts/` beside this file, or from a file that somebody already
# has, whose shape is told by its content. A prompt's identity is what is sent (messages, tools), never its place in a file.

BUILTIN = "builtin"
SETS = ("copy", "closed", "open", "agent", "math", "mixed")
MAX_PROMPT_FILE_BYTES = 256 << 20

_BUILTIN_COPY = (
    "Return this function complete and unchanged except that `total` is renamed to `amount`. Code only.\n\n"
    "def invoice(lines, discount=0.0):\n    total = 0.0\n    for name, price, count in lines:\n        if count < 1:\n"
    "            raise ValueError(f\"no items of {name}\")\n        total += price * count\n"
    "    total -= total * discount\n    return round(total, 2)\n",
    "Turn this list into a JSON array of objects with the keys name, platform and minutes. Keep every value as it is.\n\n"
    "harbour line, platform 4, 12 minutes\nairport express, platform 1, 7 minutes\nvalley local, platform 6, 31 minutes\n"
    "night sleeper, platform 2, 55 minutes\ncoast shuttle, platform 9, 18 minutes\n",
    "Correct only the spelling in the following note and return the whole note.\n\n"
    "The greenhous was watered at six. The tomatos in the second row are ripe, the peppers in the thrid row are not. "
    "Please pick the ripe ones befor noon and leave the crates beside the door, since the van arives at one.",
    "Repeat the following minutes word for word, then add one line that begins with NEXT: and names the next step.\n\n"
    "Anna reported that the boiler was inspected on Monday. Ben ordered two valves and a gauge. Carla will be on site on "
    "Thursday when the valves arrive. The gauge is late and is expected a week after the valves.",
)
_BUILTIN_CLOSED = (
    "Which gas do plants take up from the air for photosynthesis? Answer in one sentence.",
    "List the seven days of the week in order, starting with Monday, one a line.",
    "What is the boiling point of water at sea level, in degrees Celsius and in degrees Fahrenheit?",
    "Explain in two sentences what a binary search does and what it needs of its input.",
)
_BUILTIN_OPEN = (
    "Write a short story about a lighthouse keeper who finds that the light answers questions.",
    "Describe a market on a moon that has no atmosphere, as a traveller would in a letter home.",
    "Write a dialogue between a retired clock and the child who inherits it.",
    "Invent three festivals for a town that lives on a bridge, and say how each began.",
)
# Outside every workload, so that warming a server up never shows it a prompt that will be measured.
_WARM_UP = "Warm-up request {number}: describe what a {thing} is for, in a few plain sentences."
_WARM_UP_THINGS = ("kettle", "ladder", "compass", "sieve", "hinge", "bellows", "funnel", "anvil", "pulley", "loom")


def builtin_prompts() -> Tuple[Prompt, ...]:
    """The dozen prompts of the lesson's kind that need no file: four copy-heavy, four closed, four open."""
    groups = (("copy", _BUILTIN_COPY), ("closed", _BUILTIN_CLOSED), ("open", _BUILTIN_OPEN))
    return tuple(Prompt(f"builtin-{category}-{number}", BUILTIN, _user(text), category)
                 for category, texts in groups for number, text in enumerate(texts, 1))


def warm_up_prompt(number: int) -> Prompt:
    """The number-th warm-up prompt; no two share their text, and none belongs to a workload."""
    thing = _WARM_UP_THINGS[number % len(_WARM_UP_THINGS)]
    return Prompt(f"warm-up-{number}", "warm-up", _user(_WARM_UP.format(number=number + 1, thing=thing)))


def _user(text: str) -> Tuple[Mapping[str, Any], ...]:
    return ({"role": "user", "content": text},)


def prompt_sha256(prompt: Prompt) -> str:
    """Digest of what is sent for a prompt (messages, tools, its own token limit), whatever its id."""
    if prompt.sha256 is not None:
        return prompt.sha256
    sent = {"messages": list(prompt.messages), "tools": prompt.tools and list(prompt.tools), "max_tokens": prompt.max_tokens}
    return hashlib.sha256(json.dumps(sent, sort_keys=True).encode("utf-8", "surrogatepass")).hexdigest()


def prompts_sha256(prompts: Iterable[Prompt]) -> str:
    """Digest of a list of prompts, in order: two measurements are comparable only where it is equal."""
    return hashlib.sha256("\n".join(map(prompt_sha256, prompts)).encode("utf-8", "surrogatepass")).hexdigest()


def take(prompts: Sequence[Prompt], limit: Optional[int]) -> Tuple[Prompt, ...]:
    """The first `limit` prompts, spread evenly over the categories, in file order; all of them for None."""
    if limit is None or limit >= len(prompts):
        return tuple(prompts)
    turn: Dict[Optional[str], int] = {}     # how many of its category come before each prompt
    ranked = []
    for place, prompt in enumerate(prompts):
        turn[prompt.category] = turn.get(prompt.category, -1) + 1
        ranked.append((turn[prompt.category], place))
    chosen = sorted(place for _, place in sorted(ranked)[:limit])
    return tuple(prompts[place] for place in chosen)


def without_repeats(prompts: Iterable[Prompt], seen: Iterable[str] = ()) -> Tuple[Prompt, ...]:
    """The prompts whose text is neither in `seen` (digests) nor earlier in the list."""
    known = set(seen)
    kept = []
    for prompt in prompts:
        digest = prompt_sha256(prompt)
        if digest not in known:
            known.add(digest)
            kept.append(prompt)
    return tuple(kept)


def slice_for_level(prompts: Sequence[Prompt], level_index: int, levels: int) -> Tuple[Prompt, ...]:
    """The prompts of one of `levels` concurrency levels: items[i::levels], so that no level repeats another's."""
    return tuple(prompts[level_index::levels])


class PromptFile(NamedTuple):
    """What was read from a prompt file: its prompts, its bytes' digest, its shape in words and what was left out."""

    prompts: Tuple[Prompt, ...]
    sha256: str
    shape: str
    caveats: Tuple[Caveat, ...]


def read_prompt_file(path: str, workload: Optional[str] = None, prompt_key: Optional[str] = None) -> PromptFile:
    """The prompts of a file in any of the shapes that people have. MeasureError names file, record and what was found."""
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_PROMPT_FILE_BYTES + 1)
    except OSError as error:
        raise MeasureError(f"The prompt file {path} cannot be read: {error.strerror or error}.",
                           "check the path; --prompts takes a file with one prompt a line, JSON lines, JSON or CSV") from None
    if len(data) > MAX_PROMPT_FILE_BYTES:
        raise MeasureError(f"The prompt file {path} is larger than {MAX_PROMPT_FILE_BYTES >> 20} MiB.",
                           "cut the prompts that you want to measure out of it")
    stem = os.path.basename(path).split(".")[0] or "file"
    return parse_prompts(data, path, workload or stem, prompt_key)


def parse_prompts(data: bytes, name: str, workload: str, prompt_key: Optional[str] = None) -> PromptFile:
    """The prompts in the bytes of a file called `name`: the shape is told by the content, never by the name."""
    sha256 = hashlib.sha256(data).hexdigest()
    text = _text_of(_unzipped(data, name), name)
    shape, records = _records_of(text, name)
    stem = os.path.basename(name).split(".")[0] or "file"
    prompts, caveats, ids = [], [], {}      # type: List[Prompt], List[Caveat], Dict[str, int]
    digests: Dict[str, str] = {}
    for place, record in records:
        try:
            prompt = _prompt_of(record, f"{name}, {place}", workload, prompt_key)
            refuse_depth([prompt.messages, prompt.tools, prompt.answer])
            digest = prompt_sha256(prompt)
        except RecursionError:
            raise MeasureError(f"{name}, {place}: objects within objects, too deep to be read.", "remove the record") from None
        identity = prompt.id or f"{stem}-{len(prompts)}"
        if identity in ids:
            renamed = _free_id(identity, ids)
            caveats.append(Caveat(f"{name}, {place}: the id {identity!r} was used before; it is called {renamed!r} here.",
                                  "Give every record an id of its own."))
            identity = renamed
        ids[identity] = 1
        prompt = replace(prompt, id=identity)
        first = digests.setdefault(digest, identity)
        if first != identity:
            caveats.append(Caveat(f"{name}, {place}: the same prompt as {first}; it is left out.",
                                  "A prompt asked twice is answered from caches."))
            continue
        prompts.append(prompt)
    if not prompts:
        raise MeasureError(f"The prompt file {name} holds no prompt.", "put one prompt on each line")
    return PromptFile(tuple(prompts), sha256, shape, tuple(caveats))


DEEPEST = 100       # objects within objects: more is no data of anybody, and calculating with it would end in the interpreter's limit


def refuse_depth(value: Any, left: int = DEEPEST) -> None:
    """RecursionError for lists and objects within each other deeper than DEEPEST."""
    if left == 0:
        raise RecursionError
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ():
        if isinstance(inner, (dict, list, tuple)):
            refuse_depth(inner, left - 1)


def _free_id(identity: str, ids: Dict[str, int]) -> str:
    """`identity` with a number behind it that nobody has; `ids` counts how often each one was wanted."""
    while True:
        ids[identity] += 1
        if f"{identity}-{ids[identity]}" not in ids:
            return f"{identity}-{ids[identity]}"


def _unzipped(data: bytes, name: str) -> bytes:
    if data[:2] != b"\x1f\x8b":
        return data
    parts, room = [], MAX_PROMPT_FILE_BYTES
    while data[:2] == b"\x1f\x8b":      # a gzip file may be several, one behind the other
        reader = zlib.decompressobj(wbits=31)
        try:
            parts.append(reader.decompress(data, room + 1))
        except zlib.error as error:
            raise MeasureError(f"The prompt file {name} begins like gzip but cannot be unpacked: {error}.",
                               "fetch the file again, or unpack it yourself") from None
        room -= len(parts[-1])
        if not reader.eof or room < 0:
            raise MeasureError(f"The gzip file {name} is cut short or unpacks to more than {MAX_PROMPT_FILE_BYTES >> 20} MiB.",
                               "fetch the file again, or cut the prompts that you want to measure out of it")
        data = reader.unused_data
    return b"".join(parts)


def _text_of(data: bytes, name: str) -> str:
    marks = ((codecs.BOM_UTF8, "utf-8-sig"), (codecs.BOM_UTF16_LE, "utf-16"), (codecs.BOM_UTF16_BE, "utf-16"))
    encoding = next((encoding for mark, encoding in marks if data.startswith(mark)), "utf-8")
    try:
        text = data.decode(encoding)
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise MeasureError(f"{name}, line {line}: the byte 0x{data[error.start]:02x} is not {encoding.upper()}.",
                           "save the file as UTF-8") from None
    if "\x00" in text:
        raise MeasureError(f"{name}, line {text.count(chr(10), 0, text.index(chr(0))) + 1}: a NUL character; this is no text file.",
                           "save the file as UTF-8 text")
    return text


FileRecord = Union[str, Dict[str, Any]]


def _records_of(text: str, name: str) -> Tuple[str, List[Tuple[str, FileRecord]]]:
    """The shape in words, and each record with its place. Lines end at LF only: U+2028 may stand inside a JSON string."""
    lines = [line[:-1] if line.endswith("\r") else line for line in text.split("\n")]
    filled = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not filled:
        raise MeasureError(f"The prompt file {name} is empty.", "put one prompt on each line")
    first = filled[0][1].lstrip()
    if first[0] == "[":
        return _array_records(text, name)
    if first[0] == "{":
        return _json_line_records(text, filled, name)
    if _looks_like_csv(first):
        return _csv_records(text, name)
    return "plain text, one prompt a line", [(f"line {number}", line.strip()) for number, line in filled]


def _array_records(text: str, name: str) -> Tuple[str, List[Tuple[str, FileRecord]]]:
    try:
        array = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise MeasureError(f"{name} begins like a JSON array but is none: {error}.", "check the file with a JSON tool") from None
    return "a JSON array", [(f"record {number}", record) for number, record in enumerate(array, 1)]


def _json_line_records(text: str, filled: Sequence[Tuple[int, str]], name: str) -> Tuple[str, List[Tuple[str, FileRecord]]]:
    records: List[Tuple[str, FileRecord]] = []
    for number, line in filled:
        try:
            records.append((f"record {len(records) + 1} (line {number})", json.loads(line)))
        except (ValueError, RecursionError) as error:
            whole = _one_object(text) if len(records) == 0 else None
            if whole is not None:
                return "one JSON object", whole
            raise MeasureError(f"{name}, record {len(records) + 1} (line {number}) is no JSON: {error}.",
                               f"mend or remove the line; it begins {shorten(line, 40)!r}") from None
    return "JSON lines", records


def _one_object(text: str) -> Optional[List[Tuple[str, FileRecord]]]:
    try:
        whole = json.loads(text)
    except (ValueError, RecursionError):
        return None
    inner = next((whole[key] for key in ("data", "prompts", "questions", "items") if isinstance(whole.get(key), list)), [whole])
    return [(f"record {number}", record) for number, record in enumerate(inner, 1)]


_CSV_COLUMNS = ("prompt", "question", "text", "instruction")


def _looks_like_csv(header: str) -> bool:
    cells = [cell.strip().strip('"').lower() for cell in re.split("[,;\t]", header)]
    return any(column in cells for column in _CSV_COLUMNS) and all(len(cell) <= 40 for cell in cells) and (
        len(cells) > 1 or cells[0] == "prompt")


def _csv_records(text: str, name: str) -> Tuple[str, List[Tuple[str, FileRecord]]]:
    header = text.split("\n", 1)[0]
    delimiter = max(",;\t", key=header.count)
    csv.field_size_limit(MAX_PROMPT_FILE_BYTES)
    try:
        rows = list(csv.DictReader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True))
    except csv.Error as error:
        raise MeasureError(f"{name} begins like CSV but cannot be read: {error}.", "check the quotes") from None
    records: List[Tuple[str, FileRecord]] = []
    for number, row in enumerate(rows, 1):
        record = {str(key).strip().lower(): value for key, value in row.items() if key is not None and value is not None}
        if any(str(value).strip() for value in record.values()):
            records.append((f"record {number}", record))
    return "CSV", records


_TEXT_KEYS = ("messages", "turns", "conversations", "question", "prompt", "text", "instruction")
_ID_KEYS = ("id", "question_id", "task_id", "custom_id")


def _prompt_of(record: Any, place: str, workload: str, prompt_key: Optional[str]) -> Prompt:
    """The prompt that one record of any known shape asks for; its id is "" where the record has none."""
    if isinstance(record, str):
        record = {"prompt": record}
    if not isinstance(record, dict):
        raise MeasureError(f"{place}: a {type(record).__name__}, not an object or a text.", "give one object a prompt")
    body = record.get("body")
    source = {**body, **record} if isinstance(body, dict) else record       # OpenAI batch
    key = prompt_key or next((key for key in _TEXT_KEYS if source.get(key) not in (None, "", [])), None)
    if key is None or key not in source:
        empty = next((key for key in _TEXT_KEYS if key in source), None)
        if empty and not prompt_key:
            raise MeasureError(f"{place}: the prompt is empty (key {empty!r}).", "fill it in or remove the record")
        raise MeasureError(f"{place}: no prompt found among the keys {', '.join(map(repr, list(record)[:12])) or '(none)'}.",
                           f"use one of {', '.join(_TEXT_KEYS)}, or name the key with --prompt-key")
    messages = _messages_of(key, source, place)
    tools = _tools_of(source, place)
    identity = next((str(record[key]) for key in _ID_KEYS if record.get(key) not in (None, "")), "")
    category = record.get("category")
    limit = source.get("max_tokens")
    return Prompt(identity, str(record.get("workload") or workload), messages, None if category is None else str(category), tools,
                  _answer_of(source, tools), limit if isinstance(limit, int) and not isinstance(limit, bool) and limit > 0 else None)


def _messages_of(key: str, source: Mapping[str, Any], place: str) -> Tuple[Mapping[str, Any], ...]:
    value = source[key]
    if key == "conversations":
        value = _first_human(value, place)
    elif key == "turns" and isinstance(value, list):
        value = value[0]            # a second turn needs the model's own answer to the first
    elif key == "question" and isinstance(value, list):
        value = value[0] if value and isinstance(value[0], list) else value     # BFCL: a list of turns of messages
    elif key == "instruction" and source.get("input"):
        value = f"{value}\n\n{source['input']}"
    elif key == "prompt" and "entry_point" in source and isinstance(value, str):
        return _user(_HUMAN_EVAL.format(code=value))
    if isinstance(value, list):
        return _checked_messages(value, place)
    if not isinstance(value, str):
        raise MeasureError(f"{place}: the key {key!r} holds a {type(value).__name__}, not a text.", "name the right key with --prompt-key")
    if not value.strip():
        raise MeasureError(f"{place}: the prompt is empty (key {key!r}).", "fill it in or remove the record")
    system = source.get("system")
    return ({"role": "system", "content": system}, *_user(value)) if isinstance(system, str) and system.strip() else _user(value)


# HumanEval's prompts are the beginning of a file, meant for plain completion; a chat model has to be told so.
_HUMAN_EVAL = "Complete this Python function. Return the whole function, code only.\n\n```python\n{code}\n```"


def _first_human(turns: Any, place: str) -> str:
    for turn in turns if isinstance(turns, list) else ():
        if isinstance(turn, dict) and turn.get("from", turn.get("role")) in ("human", "user"):
            text = turn.get("value", turn.get("content"))
            if isinstance(text, str) and text.strip():
                return text
    raise MeasureError(f"{place}: the conversation has no turn of a human.", "remove the record")


def _checked_messages(messages: Sequence[Any], place: str) -> Tuple[Mapping[str, Any], ...]:
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise MeasureError(f"{place}: a message is no object with a role.", 'write {"role": "user", "content": "..."}')
    end = len(messages)
    while end and messages[end - 1]["role"] == "assistant":
        end -= 1                    # a recorded answer is not part of the question
    messages = messages[:end]
    if not any(message["role"] == "user" and message.get("content") for message in messages):
        raise MeasureError(f"{place}: no user message with content.", "fill it in or remove the record")
    return tuple(dict(message) for message in messages)


_BFCL_TYPES = {"dict": "object", "float": "number", "tuple": "array", "double": "number", "hashmap": "object", "arraylist": "array"}


def _tools_of(source: Mapping[str, Any], place: str) -> Optional[Tuple[Mapping[str, Any], ...]]:
    """The tools in OpenAI's schema, whatever dialect they were written in; None without tools."""
    given = source.get("tools") or source.get("function") or source.get("functions")
    if isinstance(given, str):
        try:
            given = json.loads(given)       # ToolACE-like sets keep the schemas as a JSON text
        except (ValueError, RecursionError):
            raise MeasureError(f"{place}: the tools are no JSON.", "give a list of OpenAI tool schemas") from None
    if not given:
        return None
    tools = []
    for tool in given if isinstance(given, list) else [given]:
        function = tool.get("function", tool) if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise MeasureError(f"{place}: a tool has no function name.", "give a list of OpenAI tool schemas")
        parameters = _openai_schema(function.get("parameters") or function.get("arguments") or {})
        if not isinstance(parameters, dict):
            raise MeasureError(f"{place}: the parameters of the tool {shorten(function['name'], 60)!r} are no object.", "give a JSON schema")
        parameters = parameters if "type" in parameters else {"type": "object", **parameters}
        tools.append({"type": "function", "function": {"name": tool_name(function["name"]),
                                                       "description": str(function.get("description", "")), "parameters": parameters}})
    return tuple(tools)


def tool_name(name: str) -> str:
    """The function name as OpenAI's API takes it: [A-Za-z0-9_-]{1,64}, every other character replaced by "_"."""
    return re.sub(r"[^A-Za-z0-9_-]", "_", name)[:64] or "_"


def _openai_schema(schema: Any) -> Any:
    """A JSON schema with BFCL's type names mapped to JSON's at every depth ("any" means no type at all)."""
    if isinstance(schema, list):
        return [_openai_schema(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    mapped: Dict[str, Any] = {}
    for key, value in schema.items():
        if key == "properties" and isinstance(value, dict):
            mapped[key] = {name: _openai_schema(inner) for name, inner in value.items()}    # a property may be called "type"
        elif key == "type" and isinstance(value, str):
            if value.lower() != "any":
                mapped[key] = _BFCL_TYPES.get(value.lower(), value.lower())
        elif key in ("enum", "default", "const", "example", "examples"):
            mapped[key] = value
        else:
            mapped[key] = _openai_schema(value)
    return mapped


def _answer_of(source: Mapping[str, Any], tools: Optional[Sequence[Mapping[str, Any]]]) -> Any:
    """What a right answer is, where the record tells: its `answer` (after GSM8K's "####"), or the only tool there is."""
    answer = source.get("answer")
    if isinstance(answer, str):
        return answer.rsplit("####", 1)[-1].strip() or None
    if isinstance(answer, (int, float)) and not isinstance(answer, bool):
        return str(answer)
    if isinstance(answer, list) and answer and all(isinstance(choice, str) for choice in answer):
        return answer
    if isinstance(answer, dict) and isinstance(answer.get("function"), str):
        return {**answer, "function": tool_name(answer["function"])}
    if tools and len(tools) == 1:
        return {"function": tools[0]["function"]["name"]}
    return None


def shorten(text: str, length: int) -> str:
    """The text, cut with an ellipsis of three dots where it is longer than `length` characters."""
    return text if len(text) <= length else text[:max(0, length - 3)] + "..."


# ======================================================================================================================
# 4. Acceptance (pure)
# ======================================================================================================================
#
# Two sources: fields of each response, and Prometheus counters read before and after a pass. Both end in one record that
# means the same on every engine. Gauges are whole-life averages or the last window's value: shown as such, never
# differenced, never averaged. What an engine calls what: its own documentation and pages, seen on real servers.

MAX_METRICS_BYTES = 8 << 20
MAX_METRICS_LINE = 1 << 16


class Sample(NamedTuple):
    """One line of a metrics page."""

    name: str
    labels: Mapping[str, str]
    value: float


class MetricsPage(NamedTuple):
    """A metrics page, understood. `problem` says why there are no samples to be had; None for a good page."""

    samples: Tuple[Sample, ...]
    kinds: Mapping[str, str]        # metric name -> counter | gauge | histogram | ...
    skipped_lines: int
    started: Optional[str]          # what tells a restart besides the samples: a header
    problem: Optional[str]


def no_page(problem: str) -> MetricsPage:
    """The page that could not be had, with the reason."""
    return MetricsPage((), {}, 0, None, problem)


# A label value may hold any character, also the closing brace and (escaped) quotes, so labels are walked, never split.
_SAMPLE_NAME = re.compile(r"\s*([A-Za-z_:][A-Za-z0-9_:.]*)\s*")
_LABEL = re.compile(r'\s*([A-Za-z_][A-Za-z0-9_.:-]*)\s*=\s*"((?:[^"\\]|\\.)*)"\s*(?:,|(?=\}))')
_BETWEEN_LABELS = re.compile(r'",\s*(?=[A-Za-z_][A-Za-z0-9_]*=")')
_UNESCAPED = {"\\n": "\n", '\\"': '"', "\\\\": "\\"}


def parse_metrics(data: bytes, started: Optional[str] = None) -> MetricsPage:
    """A Prometheus text or OpenMetrics page; lines that are none are counted and skipped, values that are not finite too."""
    if len(data) > MAX_METRICS_BYTES:
        return no_page(f"the metrics page is larger than {MAX_METRICS_BYTES >> 20} MiB")
    text = data.decode("utf-8-sig", "replace")
    if text[:1] == '"':             # one engine's builds sent the page as a JSON string
        try:
            text = json.loads(text)
        except (ValueError, RecursionError):
            return no_page("the metrics page is not in Prometheus' text format")
    samples: List[Sample] = []
    kinds: Dict[str, str] = {}
    skipped = 0
    for line in text.split("\n"):
        line = line.strip("\r \t")
        if line.startswith("#"):
            words = line.split(None, 4)
            if len(words) >= 4 and words[1] == "TYPE":
                kinds[words[2]] = words[3]
        elif line:
            sample = _sample(line) if len(line) <= MAX_METRICS_LINE else None
            if sample is None:
                skipped += 1
            elif math.isfinite(sample.value):
                samples.append(sample)
    if not samples:
        return no_page("the metrics page is not in Prometheus' text format" if skipped else "the metrics page is empty")
    return MetricsPage(tuple(samples), kinds, skipped, started, None)


def _sample(line: str) -> Optional[Sample]:
    match = _SAMPLE_NAME.match(line)
    if not match:
        return None
    name, rest = match.group(1), line[match.end():]
    labels: Mapping[str, str] = {}
    if rest.startswith("{"):
        walked = _labels(rest)
        value = _value(rest[walked[1]:]) if walked else None
        if walked is None or value is None:     # quotes that nobody escaped: all up to the last brace is labels
            end = rest.rfind("}")
            if end < 0:
                return None
            return _sample_of(name, _loose_labels(rest[1:end]), _value(rest[end + 1:]))
        labels = walked[0]
        return Sample(name, labels, value)
    return _sample_of(name, labels, _value(rest))


def _sample_of(name: str, labels: Mapping[str, str], value: Optional[float]) -> Optional[Sample]:
    return None if value is None else Sample(name, labels, value)


def _labels(text: str) -> Optional[Tuple[Mapping[str, str], int]]:
    labels: Dict[str, str] = {}
    position = 1
    while True:
        match = _LABEL.match(text, position)
        if not match:
            break
        raw = match.group(2)
        labels[match.group(1)] = re.sub(r'\\[n"\\]', lambda part: _UNESCAPED[part.group()], raw) if "\\" in raw else raw
        position = match.end()
    while position < len(text) and text[position] in " \t":
        position += 1
    return (labels, position + 1) if text[position:position + 1] == "}" else None


def _loose_labels(text: str) -> Dict[str, str]:
    """Labels whose values hold quotes that nobody escaped: a value ends where another label begins, or at the end."""
    text = text.rstrip(", \t")
    pairs = (part.strip().partition('="') for part in _BETWEEN_LABELS.split(text[:-1] if text.endswith('"') else text))
    return {key: value for key, quote, value in pairs if quote}


def _value(text: str) -> Optional[float]:
    """The value before an optional timestamp and exemplar; None where there is none."""
    words = text.split(None, 2)
    if not words or (len(words) > 1 and not words[1].startswith("#") and not re.fullmatch(r"-?\d+(\.\d+)?", words[1])):
        return None
    try:
        return float(words[0])
    except ValueError:
        return None


# The families that carry acceptance, by what they count. vLLM's and llama.cpp's count verify steps that had a draft,
# drafted tokens, and accepted tokens without the bonus token.
_DRAFTS = ("vllm:spec_decode_num_drafts", "llamacpp:spec_decode_num_drafts")
_DRAFT_TOKENS = ("vllm:spec_decode_num_draft_tokens", "llamacpp:spec_decode_num_draft_tokens", "trtllm_spec_decode_num_draft_tokens")
_ACCEPTED = ("vllm:spec_decode_num_accepted_tokens", "llamacpp:spec_decode_num_accepted_tokens", "trtllm_spec_decode_num_accepted_tokens")
_BY_POSITION = ("vllm:spec_decode_num_accepted_tokens_per_pos", "llamacpp:spec_decode_num_accepted_tokens_per_pos")
_VERIFY_CALLS = ("sglang:spec_verify_calls",)
_GENERATED = ("vllm:generation_tokens", "llamacpp:tokens_predicted", "sglang:generation_tokens")
_FINISHED = ("vllm:request_success", "sglang:num_requests")
_PREFIX_QUERIES = ("vllm:prefix_cache_queries",)
_PREFIX_HITS = ("vllm:prefix_cache_hits",)
_LENGTH_GAUGES = ("sglang:spec_accept_length", "trtllm_spec_decode_acceptance_length")
_RATE_GAUGES = ("sglang:spec_accept_rate", "vllm:spec_decode_draft_acceptance_rate")
NO_DRAFTS = "no drafts in this run"
NO_COUNTERS = "no acceptance counters on the metrics page"
NOT_SPECULATING = "speculation is off"
# llama.cpp prints its counters with six significant digits: from a million on, a difference of two is rounding.
_SIX_DIGITS = 1_000_000
_LABELS_OF_COPIES = ("tp_rank", "pp_rank", "moe_ep_rank")   # the same count told by every rank of one replica


def _series(page: MetricsPage, families: Sequence[str], model: str) -> Dict[Tuple[Tuple[str, str], ...], float]:
    """The samples of the first family that the page has, by label set; exact names only, with or without `_total`."""
    for family in families:
        found = [sample for sample in page.samples if sample.name in (family, family + "_total")]
        if not found:
            continue
        models = {sample.labels.get("model_name") for sample in found}
        if model in models and len(models) > 1:
            found = [sample for sample in found if sample.labels.get("model_name") == model]
        series: Dict[Tuple[Tuple[str, str], ...], float] = {}
        for sample in found:
            labels = tuple(sorted((key, value) for key, value in sample.labels.items() if key not in _LABELS_OF_COPIES))
            series[labels] = max(series.get(labels, -math.inf), sample.value)
        return series
    return {}


class Delta(NamedTuple):
    """What a counter family rose by between two pages: in all and by label set; None where the page has no such family."""

    total: Optional[float]
    by_labels: Mapping[Tuple[Tuple[str, str], ...], float]
    highest: float          # the largest single value seen: what the printed digits are worth


def _delta(before: MetricsPage, after: MetricsPage, families: Sequence[str], model: str) -> Delta:
    later = _series(after, families, model)
    if not later:
        return Delta(None, {}, 0.0)
    earlier = _series(before, families, model)
    rises = {labels: value - earlier.get(labels, 0.0) for labels, value in later.items()}
    return Delta(sum(rises.values()), rises, max(later.values()))


def restarted(before: MetricsPage, after: MetricsPage) -> bool:
    """Whether the server began anew between two pages: a start time that changed, or a counter that fell."""
    if before.started != after.started:
        return True
    starts = [{(s.name, tuple(sorted(s.labels.items()))): s.value for s in page.samples
               if s.name.endswith("_created") or s.name == "process_start_time_seconds"} for page in (before, after)]
    if any(after_value != starts[0][key] for key, after_value in starts[1].items() if key in starts[0]):
        return True
    later = {(s.name, tuple(sorted(s.labels.items()))): s.value for s in after.samples}
    for sample in before.samples:
        key = (sample.name, tuple(sorted(sample.labels.items())))
        if _is_counter(sample.name, before.kinds) and later.get(key, math.inf) < sample.value:
            return True
    return False


_NOT_ADDITIVE = ("llamacpp:n_tokens_max",)      # typed a counter, but a high-water mark


def _is_counter(name: str, kinds: Mapping[str, str]) -> bool:
    if name in _NOT_ADDITIVE or name.endswith("_created"):
        return False
    base = name[:-6] if name.endswith("_total") else name
    kind = kinds.get(name, kinds.get(base))
    return kind == "counter" or (kind is None and name.endswith("_total"))


_SPECULATION_WORDS = ("spec_decode", "speculat", "draft", "accept", "spec_verify")


def speculation_delta(before: MetricsPage, after: MetricsPage) -> Dict[str, float]:
    """What the run added to every counter whose name mentions speculation, by series; engines rename theirs, so all are kept."""
    if before.problem or after.problem or restarted(before, after):
        return {}
    earlier = {(s.name, tuple(sorted(s.labels.items()))): s.value for s in before.samples}
    rises: Dict[str, float] = {}
    for sample in after.samples:
        if any(word in sample.name for word in _SPECULATION_WORDS) and _is_counter(sample.name, after.kinds):
            labels = tuple(sorted(sample.labels.items()))
            shown = ",".join(f'{key}="{value}"' for key, value in labels)
            rises[f"{sample.name}{{{shown}}}" if shown else sample.name] = sample.value - earlier.get((sample.name, labels), 0.0)
    return rises


def server_gauges(page: MetricsPage) -> Dict[str, float]:
    """The server's own acceptance gauges, whole life or last window: to be shown, never to be calculated with."""
    return {sample.name: sample.value for sample in page.samples if sample.name in _LENGTH_GAUGES + _RATE_GAUGES}


def kv_cache_tokens(page: MetricsPage) -> Optional[int]:
    """Tokens that the key-value cache holds, where the page tells; summed over data-parallel engines."""
    sizes: Dict[str, float] = {}
    for sample in page.samples:
        if sample.name == "vllm:cache_config_info":
            told = _finite(sample.labels.get("kv_cache_size_tokens"))
            blocks, size = _finite(sample.labels.get("num_gpu_blocks")), _finite(sample.labels.get("block_size"))
            tokens = told if told is not None else blocks * size if blocks is not None and size is not None else None
            if tokens is not None:
                sizes[sample.labels.get("engine", "0")] = tokens
        elif sample.name == "sglang:max_total_num_tokens":
            sizes[sample.labels.get("dp_rank", "0")] = sample.value
    return _count(sum(sizes.values())) if sizes else None


def _finite(text: Optional[str]) -> Optional[float]:
    try:
        return float(text) if text is not None and math.isfinite(float(text)) else None
    except ValueError:
        return None


def acceptance_from_counters(before: MetricsPage, after: MetricsPage, model: str, requests: int,
                             completion_tokens: Optional[int]) -> Acceptance:
    """Acceptance of what ran between two pages; nothing but a reason where it cannot be told.

    `requests` and `completion_tokens` are our own completed requests and their tokens: if the server generated clearly
    more, somebody else used it too, and the counters are not ours.
    """
    gauges = server_gauges(after)
    problem = before.problem or after.problem
    if problem:
        return Acceptance(missing=problem)
    if restarted(before, after):
        return Acceptance(missing="the server restarted during the run", gauges=gauges)
    drafts, drafted, accepted, verified, generated = (
        _delta(before, after, families, model) for families in (_DRAFTS, _DRAFT_TOKENS, _ACCEPTED, _VERIFY_CALLS, _GENERATED))
    if drafted.total is None and verified.total is None:
        return Acceptance(missing=_no_counters(gauges), gauges=gauges)
    foreign = _foreign_tokens(generated, completion_tokens)
    if foreign:
        return Acceptance(missing=f"somebody else used the server: it generated {foreign:.0f} tokens more than our requests", gauges=gauges)
    if drafted.total is None:
        return _acceptance_from_verify_calls(before, after, model, verified, generated, requests)
    by_position = _positions(_delta(before, after, _BY_POSITION, model))
    exact = {"drafts": drafts.total, "accepted": accepted.total}
    if drafted.highest >= _SIX_DIGITS and any(name.startswith("llamacpp:") for name in (s.name for s in after.samples)):
        return Acceptance(missing="the counters are past a million, where llama.cpp prints only six digits", gauges=gauges)
    if not drafted.total:
        return Acceptance(0, 0, 0, None, completion_tokens, requests, "metrics counters", NO_DRAFTS, gauges)
    return Acceptance(_count(exact["drafts"]), _count(drafted.total), _count(exact["accepted"]), by_position, completion_tokens,
                      requests, "metrics counters", None, gauges)


def _no_counters(gauges: Mapping[str, float]) -> str:
    reason = NO_COUNTERS
    if not gauges:
        return reason
    told = ", ".join(f"{name} {value:g}" for name, value in gauges.items())
    odd = any(name in _RATE_GAUGES and not 0 <= value <= 1 for name, value in gauges.items())
    return f"{reason}, only server gauges for its whole life ({told}{'; a rate outside 0..1 is refused' if odd else ''})"


def _foreign_tokens(generated: Delta, ours: Optional[int]) -> Optional[float]:
    """Tokens generated beyond our own, where that is clearly more than rounding and the odd token past a stop."""
    if generated.total is None or ours is None:
        return None
    excess = generated.total - ours
    allowed = 8 + 0.05 * ours + (10 * 10 ** (math.floor(math.log10(generated.highest)) - 5) if generated.highest >= _SIX_DIGITS else 0)
    return excess if excess > allowed else None


def _acceptance_from_verify_calls(before: MetricsPage, after: MetricsPage, model: str, verified: Delta, generated: Delta,
                                  requests: int) -> Acceptance:
    """SGLang counts verify calls and tokens: accepted is what is left of the tokens after each request's first and each
    call's own token. Tokens cut off at a stop are not seen, so it is a lower bound."""
    gauges = server_gauges(after)
    finished = _delta(before, after, _FINISHED, model).total
    if not verified.total or generated.total is None:
        return Acceptance(0, None, None, None, None, requests, "metrics counters", NO_DRAFTS, gauges)
    count = _count(finished)
    count = requests if count is None else count
    accepted = max(0.0, generated.total - count - verified.total)
    return Acceptance(_count(verified.total), None, _count(accepted), None, _count(generated.total), count,
                      "metrics counters (verify calls; accepted tokens are a lower bound)", None, gauges)


def _positions(delta: Delta) -> Optional[Tuple[int, ...]]:
    """Accepted tokens by draft position, summed over engines; positions may come in any order."""
    sums: Dict[int, float] = {}
    for labels, rise in delta.by_labels.items():
        position = _finite(dict(labels).get("position"))
        if position is not None and 0 <= position < 4096:
            sums[int(position)] = sums.get(int(position), 0.0) + rise
    counts = [_count(sums.get(place, 0)) for place in range(max(sums) + 1)] if sums else [None]
    return None if None in counts else tuple(count or 0 for count in counts)


def _count(value: Any) -> Optional[int]:
    """A count from a page or a reply: a whole number from 0 on, else None. Nothing a server says is taken on trust."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 2 ** 53:
        return None
    return int(round(value))


def _first_count(source: Mapping[str, Any], *keys: str) -> Optional[int]:
    return next((count for count in (_count(source.get(key)) for key in keys) if count is not None), None)


def acceptance_from_response(extras: Mapping[str, Any], completion_tokens: Optional[int]) -> Optional[Acceptance]:
    """Acceptance of one request from the fields that its engine added to the response; None where it added none."""
    for key, read in (("timings", _from_timings), ("metrics", _from_vllm), ("sglext", _from_sglext), ("meta_info", _from_meta_info)):
        source = extras.get(key)
        found = read(source) if isinstance(source, dict) else None
        if found is not None:
            return replace(found, completion_tokens=completion_tokens, requests=1)
    return None


def _from_timings(timings: Mapping[str, Any]) -> Optional[Acceptance]:
    """llama.cpp: drafted and accepted, no number of steps; the fields are left out where nothing was drafted."""
    drafted, accepted = _count(timings.get("draft_n")), _count(timings.get("draft_n_accepted"))
    if drafted is None or accepted is None or accepted > drafted:
        return None
    return Acceptance(None, drafted, accepted, None, source="response timings")


def _from_vllm(metrics: Mapping[str, Any]) -> Optional[Acceptance]:
    """vLLM: steps, drafted and accepted; histogram index j counts the steps that accepted exactly j."""
    told = metrics.get("speculative_decoding")
    if not isinstance(told, dict):
        return None
    drafts, drafted = _first_count(told, "num_spec_steps"), _first_count(told, "num_draft_tokens")
    accepted = _first_count(told, "num_accepted_draft_tokens")
    if accepted is None:
        return None
    return Acceptance(drafts, drafted, accepted, _positions_of_histogram(told.get("acceptance_histogram")), source="response metrics")


def _from_sglext(sglext: Mapping[str, Any]) -> Optional[Acceptance]:
    told = sglext.get("spec_tokens_details")
    told = told[0] if isinstance(told, list) and told else told
    return _from_meta_info(told, "response sglext") if isinstance(told, dict) else None


def _from_meta_info(told: Mapping[str, Any], source: str = "response meta_info") -> Optional[Acceptance]:
    """SGLang: verify steps and accepted drafts are exact; proposed tokens are nominal (steps x chain length). Its keys were
    renamed twice (0.5.11, 0.5.12)."""
    accepted = _first_count(told, "spec_num_correct_drafts", "spec_accepted_drafts", "spec_accept_token_num")
    steps = _first_count(told, "spec_verify_ct")
    if accepted is None or steps is None:
        return None
    drafted = _first_count(told, "spec_num_proposed_drafts", "spec_proposed_drafts", "spec_draft_token_num")
    histogram = told.get("spec_correct_drafts_histogram", told.get("spec_accept_histogram"))
    return Acceptance(steps, drafted, accepted, _positions_of_histogram(histogram), source=source)


def _positions_of_histogram(histogram: Any) -> Optional[Tuple[int, ...]]:
    """Accepted at each draft position, from how many steps accepted exactly 0, 1, 2, ...: position i counts all above i."""
    if not isinstance(histogram, list) or len(histogram) < 2:
        return None
    counts = [_count(entry) for entry in histogram]
    if None in counts:
        return None
    return tuple(sum(count or 0 for count in counts[place:]) for place in range(1, len(counts)))


def pooled_acceptance(parts: Sequence[Acceptance]) -> Acceptance:
    """One record for several requests: counts are added, a count that one of them lacks is None."""
    def added(values: Sequence[Optional[int]]) -> Optional[int]:
        return None if None in values else sum(value or 0 for value in values)

    positions = [part.accepted_by_position for part in parts]
    longest = max((len(each) for each in positions if each), default=0)
    by_position = None if None in positions or not longest else tuple(
        sum(each[place] for each in positions if each is not None and place < len(each)) for place in range(longest))
    return Acceptance(added([part.drafts for part in parts]), added([part.draft_tokens for part in parts]),
                      added([part.accepted_tokens for part in parts]), by_position, added([part.completion_tokens for part in parts]),
                      len(parts), parts[0].source if parts else None)


def acceptance_of_pass(replies: Sequence[Reply], counters: Acceptance, speculating: Optional[bool]) -> Acceptance:
    """Acceptance of a whole pass: from the responses where they tell, completed by the counters where both agree, else
    from the counters; with the reason where neither tells."""
    done = [reply for reply in replies if reply.ok]
    told = [reply.acceptance for reply in done if reply.acceptance is not None]
    if told and told[0].source == "response timings":
        # llama.cpp leaves the fields out of replies that drafted nothing: those count as zero drafted, not as unknown.
        told = [reply.acceptance or Acceptance(None, 0, 0, None, reply.completion_tokens, 1, "response timings") for reply in done]
    nothing_drafted = (counters.missing or NO_DRAFTS).startswith((NO_DRAFTS, NO_COUNTERS)) and not counters.drafts
    if speculating is False and nothing_drafted and not any(part.draft_tokens for part in told):
        return replace(counters, missing=NOT_SPECULATING)
    if not told or len(told) < len(done):
        return counters
    pooled = pooled_acceptance(told)
    if pooled.draft_tokens == 0 or pooled.drafts == 0:
        pooled = replace(pooled, missing=NO_DRAFTS)
    same = counters.missing is None and counters.accepted_tokens == pooled.accepted_tokens and (
        counters.draft_tokens in (None, pooled.draft_tokens))
    if not same:
        return replace(pooled, gauges=counters.gauges)
    source = pooled.source if pooled.drafts is not None else f"{pooled.source}; drafts and positions from metrics counters"
    return replace(pooled, drafts=counters.drafts if pooled.drafts is None else pooled.drafts,
                   accepted_by_position=pooled.accepted_by_position or counters.accepted_by_position, source=source, gauges=counters.gauges)


def cached_share(replies: Sequence[Reply]) -> Optional[float]:
    """Share of the prompt tokens that came from a cache, 0..1; None where the server does not tell."""
    told = [(reply.cached_tokens, reply.prompt_tokens) for reply in replies if reply.ok and reply.cached_tokens is not None and reply.prompt_tokens]
    total = sum(prompt or 0 for _, prompt in told)
    return sum(cached or 0 for cached, _ in told) / total if total else None


def prefix_hit_rate(before: MetricsPage, after: MetricsPage, model: str) -> Optional[float]:
    """Share of the queried prompt tokens that the prefix cache held during a pass, 0..1; None where the page does not tell."""
    queries, hits = _delta(before, after, _PREFIX_QUERIES, model), _delta(before, after, _PREFIX_HITS, model)
    return hits.total / queries.total if queries.total and hits.total is not None else None


# ======================================================================================================================
# 5. One request on the wire (pure)
# ======================================================================================================================
#
# Everything here is a function of bytes and stamps: it can be run years later, cut at every byte, with the same result.

MAX_HEAD_BYTES = 64 << 10
MAX_REPLY_BYTES = 64 << 20


@dataclass(frozen=True)
class Origin:
    """Where a server listens, and what opens its door. The authorization is never shown."""

    scheme: str
    host: str           # without brackets
    port: int
    authorization: Optional[str] = field(default=None, repr=False)

    @property
    def netloc(self) -> str:
        """host:port as the Host header says it, with brackets around IPv6."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == (443 if self.scheme == "https" else 80) else f"{host}:{self.port}"

    @property
    def secrets(self) -> Tuple[str, ...]:
        """What of the authorization a server might repeat in an error; a key of a few letters hides nothing."""
        kind, _, word = (self.authorization or "").partition(" ")
        words = [word] if kind != "Basic" else [word, base64.b64decode(word).decode().partition(":")[2]]
        return tuple(word for word in words if len(word) >= 6)

    def url(self, path: str) -> str:
        """The full address of a path here, without credentials."""
        return f"{self.scheme}://{self.netloc}{path}"


class BaseUrl(NamedTuple):
    """A base address in any form that people paste, understood."""

    origin: Origin
    base_path: str                  # ends in /v1 or another /vN
    metrics_path: Optional[str]     # None: the server's root is not known


_URL_FORMS = "give it like http://127.0.0.1:8080/v1, http://[::1]:8080/v1 or https://host/path/v1"


def parse_base_url(text: str, key: Optional[str] = None) -> BaseUrl:
    """Where requests and metrics go for a pasted address; MeasureError (without the text's credentials) for what is none."""
    origin, path = parse_address(text, key)
    path = re.sub(r"/(chat/completions|completions|models)$", "", path.rstrip("/"))
    if not re.search(r"/v\d+$", path):
        path += "/v1"
    return BaseUrl(origin, path, path[:-3] + "/metrics" if path.endswith("/v1") else None)


def parse_address(text: str, key: Optional[str] = None) -> Tuple[Origin, str]:
    """Who listens at a pasted address, and its path, fit for a request; MeasureError (without credentials) for what is none."""
    given = text.strip()
    if "://" not in given:
        given = "http://" + given
    shown = without_credentials(given)
    try:
        parts = urllib.parse.urlsplit(given)
        if "@" in parts.path + parts.query + parts.fragment:    # the host is then half of a name and password: nothing of it is shown
            raise MeasureError(f"{shown!r} is no server address.", "inside a name or password, / ? # and @ are written %2F %3F %23 and %40")
        netloc = parts.netloc.rpartition("@")[2]
        if netloc.count(":") > 1 and not netloc.startswith("["):
            address, _, last = netloc.rpartition(":")
            raise MeasureError(f"{shown!r}: an IPv6 address needs brackets.", f"write http://[{address}]:{last}")
        host, port, path = parts.hostname or "", parts.port, url_path(parts.path)
        given.encode("utf-8")                       # bytes of a command line that are no text
        host = host.encode("ascii" if ":" in host else "idna").decode("ascii")
    except ValueError:                              # UnicodeError is one
        raise MeasureError(f"{shown!r} is no server address.", _URL_FORMS) from None
    if parts.scheme not in ("http", "https"):
        raise MeasureError(f"{shown!r} does not begin with http:// or https://.", _URL_FORMS)
    if not host or netloc.endswith(":") or re.search(r"[\s\x00-\x20\x7f]", netloc + parts.path) or parts.query or parts.fragment or port == 0:
        raise MeasureError(f"{shown!r} is no server address.", _URL_FORMS)
    return Origin(parts.scheme, host, port or (443 if parts.scheme == "https" else 80), _authorization(parts, key)), path


def without_credentials(url: str) -> str:
    """An address as it may be shown, also one that is none: nothing before its last "@", nothing of its query."""
    return re.sub(r"(?s)[?#].*", "?...", re.sub(r"(?s)\A([A-Za-z][A-Za-z0-9+.-]*://)?.*@", r"\1", url))


def url_path(path: str) -> str:
    """A path as it may stand in a request line: what no URL can hold is escaped."""
    return urllib.parse.quote(path, safe="/%~:@!$&'()*+,;=")


def _authorization(parts: Any, key: Optional[str]) -> Optional[str]:
    if key:
        if not re.fullmatch(r"[\x21-\x7e]+", key.strip()):
            raise MeasureError("The API key holds characters that no HTTP header can carry.", "set the variable anew; mind blanks and line breaks in it")
        return f"Bearer {key.strip()}"
    if parts.username is None and parts.password is None:
        return None
    pair = f"{urllib.parse.unquote(parts.username or '')}:{urllib.parse.unquote(parts.password or '')}"
    return "Basic " + base64.b64encode(pair.encode()).decode("ascii")


def request_bytes(origin: Origin, path: str, body: Optional[Mapping[str, Any]] = None, accept: str = "*/*") -> bytes:
    """The whole request as it goes over the wire: a GET, or a POST where there is a body."""
    content = b"" if body is None else json.dumps(body, ensure_ascii=True, separators=(",", ":")).encode("ascii")
    head = [f"{'GET' if body is None else 'POST'} {path} HTTP/1.1", f"Host: {origin.netloc}", f"User-Agent: measure_speculative/{__version__}",
            f"Accept: {accept}", "Accept-Encoding: identity", "Connection: keep-alive"]
    if origin.authorization:
        head.append(f"Authorization: {origin.authorization}")
    if body is not None:
        head += ["Content-Type: application/json", f"Content-Length: {len(content)}"]
    return "\r\n".join(head).encode("latin-1") + b"\r\n\r\n" + content


class Framing:
    """Where one response ends, followed as its bytes arrive (RFC 9112, section 6.3). It looks at frames, never at content.

    `broken` is the reason why no end will come; `closes` says that the connection is of no use afterwards.
    """

    __slots__ = ("head_end", "end", "status", "headers", "length", "chunked", "closes", "broken", "_frame", "_frame_end")

    def __init__(self) -> None:
        self.head_end = 0           # where the body begins; 0: the head is not complete
        self.end = 0                # where the whole response ended; 0: it has not
        self.status = 0
        self.headers: Dict[str, str] = {}
        self.length: Optional[int] = None
        self.chunked = False
        self.closes = False
        self.broken: Optional[str] = None
        self._frame = 0             # where the head or chunk that is not whole yet begins, and where the chunk will end
        self._frame_end = 0

    def complete(self, data: bytearray) -> bool:
        """Whether `data`, all that has arrived so far, holds the whole response."""
        if not self.head_end and not self.read_head(data):
            return False
        if self.chunked:
            return len(data) >= self._frame_end and self._walk(data)
        if self.length is None or len(data) < self.head_end + self.length:
            return False
        self.end = self.head_end + self.length
        return True

    def read_head(self, data: bytearray) -> bool:
        """Whether the response's head is whole; if so, it is read."""
        start = self._frame
        while True:                 # the limit holds for all heads together: interim ones may come for ever
            end = data.find(b"\r\n\r\n", start, MAX_HEAD_BYTES)
            if end < 0:
                if len(data) >= MAX_HEAD_BYTES:
                    self.broken = f"the response's head is larger than {MAX_HEAD_BYTES >> 10} KiB"
                elif len(data) > start and not b"HTTP/1.".startswith(bytes(data[start:start + 7])):
                    self.broken = ("the server speaks TLS, not plain HTTP: use https://" if data[:2] in (b"\x15\x03", b"\x16\x03")
                                   else "the answer is not HTTP")
                return False
            lines = bytes(data[start:end]).decode("latin-1").split("\r\n")
            status = re.match(r"HTTP/1\.([01]) ([1-5]\d\d)( |$)", lines[0])
            if not status:
                self.broken = "the answer is not HTTP"
                return False
            start = self._frame = end + 4
            if status.group(2) >= "200":
                break               # 1xx: an interim answer; the real one follows
        self.head_end, self.status = start, int(status.group(2))
        self._read_headers(lines[1:], old=status.group(1) == "0")
        self._frame_end = start
        return True

    def _read_headers(self, lines: Sequence[str], old: bool) -> None:
        for line in lines:
            name, colon, value = line.partition(":")
            if colon:
                self.headers[name.strip().lower()] = value.strip()
        connection = self.headers.get("connection", "").lower()
        self.closes = "close" in connection or (old and "keep-alive" not in connection)
        self.chunked = "chunked" in self.headers.get("transfer-encoding", "").lower()
        if self.status in (204, 304):
            self.length = 0
        elif not self.chunked:
            told = self.headers.get("content-length", "")
            self.length = int(told) if re.fullmatch(r"\d{1,15}", told) else None
            self.closes = self.closes or self.length is None

    def _walk(self, data: bytearray) -> bool:
        """Step over the chunks that are whole; whether the last one is among them."""
        available, position = len(data), self._frame
        while position < available:
            line_end = data.find(b"\r\n", position, position + MAX_CHUNK_LINE_BYTES)
            if line_end < 0:
                if available > position + MAX_CHUNK_LINE_BYTES:
                    self.broken = "a chunk's size line does not end"
                self._frame = position
                return False
            size = chunk_size(data[position:line_end])
            if size is None:
                self.broken = "a chunk's size is no number"
                return False
            if size == 0:           # trailers, if any, end with an empty line
                self._frame = position
                end = data.find(b"\r\n\r\n", line_end, line_end + MAX_HEAD_BYTES)
                if end >= 0:
                    self.end = end + 4
                elif available >= line_end + MAX_HEAD_BYTES:
                    self.broken = "the response's trailers do not end"
                return end >= 0
            frame_end = line_end + size + 4
            if frame_end > available:
                self._frame_end = frame_end
                break
            position = frame_end
        self._frame = position
        return False


MAX_CHUNK_LINE_BYTES = 4096


def chunk_size(line: bytearray) -> Optional[int]:
    """The size that a chunk begins with (RFC 9112, section 7.1), extensions left aside; None for what is no size."""
    try:
        size = int(line, 16)
    except ValueError:
        try:
            size = int(line.partition(b";")[0], 16)
        except ValueError:
            return None
    return size if 0 <= size < 1 << 48 else None


@dataclass(frozen=True)
class Exchange:
    """One request's raw evidence: all bytes that came, and when each piece of them did. Seconds since the run began."""

    due_s: float
    connected_s: Optional[float]    # how long connecting took; None: the connection was open already
    sent_s: Optional[float]
    ended_s: float
    data: bytearray
    ends: Sequence[int]             # where in `data` each piece ends
    at_s: Sequence[float]           # when it arrived
    error: Optional[str] = None     # why the connection gave no whole response
    secrets: Sequence[str] = field(default=(), repr=False)      # what was sent as key: it must stand in no error
    resent: bool = False            # sent over a new connection, since the kept one had been closed


class Response(NamedTuple):
    """A response taken out of its frames; `marks` are the places in the body up to which had arrived at `at_s`."""

    status: int
    headers: Mapping[str, str]
    body: bytes
    marks: Sequence[int]
    at_s: Sequence[float]
    error: Optional[str]


def read_response(exchange: Exchange) -> Response:
    """The response in an exchange's bytes, whole or as far as it came, with the reason where it is not whole."""
    framing, data = Framing(), exchange.data
    framing.read_head(data)
    error = exchange.error or framing.broken
    if not framing.head_end:
        return Response(0, {}, b"", (), (), error or "the server closed the connection without an answer")
    if framing.chunked:
        body, raw_ends, ends, problem = _unchunked(data, framing.head_end)
        marks: Sequence[int] = ends
        at_s: Sequence[float] = _arrivals(exchange, raw_ends)
    else:
        end = len(data) if framing.length is None else min(len(data), framing.head_end + framing.length)
        body, problem = bytes(data[framing.head_end:end]), None
        if framing.length is not None and end < framing.head_end + framing.length:
            problem = f"the body was cut short: {len(body)} of {framing.length} bytes came"
        first = bisect.bisect_right(exchange.ends, framing.head_end)
        marks, at_s = [piece - framing.head_end for piece in exchange.ends[first:]], exchange.at_s[first:]
    packed = framing.headers.get("content-encoding", "").lower()
    if "gzip" in packed:
        body, marks, at_s, problem = _ungzipped(body, marks, at_s, problem)
    elif packed not in ("", "identity"):
        body, marks, at_s, problem = b"", (), (), f"the body came in an encoding that nobody asked for: {shorten(packed, 40)}"
    headers = framing.headers
    if framing.status != 200:       # refusals like to repeat the key that they refuse
        body = hidden(body.decode("latin-1"), exchange.secrets).encode("latin-1")
        headers = {name: hidden(value, exchange.secrets) for name, value in headers.items()}
    return Response(framing.status, headers, body, marks, at_s, error or problem)


def hidden(text: str, secrets: Sequence[str]) -> str:
    """The text without any of the secrets."""
    for secret in secrets:
        text = text.replace(secret, "***")
    return text


def _unchunked(data: bytearray, start: int) -> Tuple[bytes, List[int], List[int], Optional[str]]:
    """The body without its frames, where each chunk ends in the data and in the body, and what is wrong with it."""
    parts: List[bytearray] = []
    raw_ends: List[int] = []
    position, available = start, len(data)
    problem: Optional[str] = "the body was cut short: its last chunk is missing"
    while position < available:
        line_end = data.find(b"\r\n", position, position + MAX_CHUNK_LINE_BYTES)
        size = chunk_size(data[position:line_end]) if line_end >= 0 else None
        if not size:
            problem = problem if line_end < 0 else None if size == 0 else "a chunk's size is no number"
            break
        begin = line_end + 2
        part = data[begin:begin + size]
        parts.append(part)
        position = begin + size
        raw_ends.append(position if position < available else available)
        position += 2
    return b"".join(parts), raw_ends, list(itertools.accumulate(map(len, parts))), problem


def _arrivals(exchange: Exchange, raw_ends: Sequence[int]) -> List[float]:
    """When the bytes up to each of these places had arrived."""
    ends, at_s, find = list(exchange.ends), exchange.at_s, bisect.bisect_left
    return [at_s[find(ends, raw_end)] for raw_end in raw_ends]


def _ungzipped(body: bytes, marks: Sequence[int], at_s: Sequence[float], problem: Optional[str],
               ) -> Tuple[bytes, Sequence[int], Sequence[float], Optional[str]]:
    """A gzip body that came although identity was asked for, unpacked chunk by chunk, so that stamps stay right."""
    reader = zlib.decompressobj(wbits=31)
    parts, new_marks, begin, length = [], [], 0, 0
    try:
        for mark in marks:
            part = reader.decompress(body[begin:mark], MAX_REPLY_BYTES - length + 1)
            begin, length = mark, length + len(part)
            if length > MAX_REPLY_BYTES:
                return b"", (), (), f"the body is larger than {MAX_REPLY_BYTES >> 20} MiB"
            parts.append(part)
            new_marks.append(length)
    except zlib.error as error:
        return b"", (), (), f"the gzip body is damaged: {error}"
    if body and not reader.eof and problem is None:
        problem = "the gzip body was cut short"
    return b"".join(parts), new_marks, at_s, problem


class Event(NamedTuple):
    """One server-sent event: its data, the place in the body where its data ended, and its name ("" is the usual)."""

    data: bytes
    end: int
    name: str


def split_events(body: bytes) -> List[Event]:
    """The events of a stream (WHATWG HTML, section 9.2), also a last one without its empty line."""
    events: List[Event] = []
    data: List[bytes] = []
    name, end = "", 0
    position = 3 if body[:3] == codecs.BOM_UTF8 else 0
    while position < len(body):
        match = _LINE.match(body, position)
        assert match is not None            # the pattern matches the empty string
        line, position = match.group(1), match.end()
        if not line:
            if data:
                events.append(Event(b"\n".join(data), end, name))
            data, name = [], ""
            continue
        field_name, _, value = line.partition(b":")
        value = value[1:] if value[:1] == b" " else value
        if field_name == b"data":
            data.append(value)
            end = match.end(1)
        elif field_name == b"event":
            name = value.decode("utf-8", "replace")
    if data:
        events.append(Event(b"\n".join(data), end, name))
    return events


_LINE = re.compile(rb"([^\r\n]*)(\r\n|\n|\r|$)")


def plain_events(body: bytes) -> Optional[Tuple[List[bytes], List[int]]]:
    """The data of every event and where it ends, for a stream of the usual form: LF, one data line an event, no names.

    It is what nearly every stream is, and split_events would say the same of it, ten times slower. None: another form.
    """
    if body[:6] != b"data: " or body[-2:] != b"\n\n" or b"\r" in body:
        return None
    data = body[6:-2].split(b"\n\ndata: ")
    if body.count(b"\n") != 2 * len(data):
        return None
    return data, [end - 2 for end in itertools.accumulate(len(one) + 8 for one in data)]


DONE = b"[DONE]"


class Message(NamedTuple):
    """One event's JSON object and when it had arrived; `problem` where it was none."""

    value: Any
    at_s: Optional[float]
    name: str
    problem: Optional[str]


def read_messages(response: Response) -> Tuple[Iterable[Tuple[Any, Optional[float], str, Optional[str]]], bool]:
    """The stream's messages in order (as Message or a tuple like it), and whether its bytes were damaged (no UTF-8: kept
    as surrogate escapes)."""
    plain = plain_events(response.body)
    if plain is not None:
        data, ends = plain
        if data[-1] == DONE:
            del data[-1], ends[-1]
        text, damaged = _text_or_escaped(b",".join(data))
        try:
            values = _JSON.decode(f"[{text}]")      # one call for the whole stream costs a third of a call an event
        except (ValueError, RecursionError):
            values = []
        if len(values) == len(data):
            return zip(values, _stamps(ends, response), itertools.repeat(""), itertools.repeat(None)), damaged
    events = [event for event in split_events(response.body) if event.data.strip() != DONE]
    stamps = _stamps([event.end for event in events], response)
    damaged = _text_or_escaped(response.body)[1]
    return [message for event, at_s in zip(events, stamps) for message in _one_by_one(event, at_s)], damaged


def _text_or_escaped(data: bytes) -> Tuple[str, bool]:
    try:
        return data.decode("utf-8"), False
    except UnicodeDecodeError:
        return data.decode("utf-8", "surrogateescape"), True


_JSON = json.JSONDecoder(parse_constant=lambda name: None)      # NaN and Infinity are no numbers here


def _stamps(ends: Sequence[int], response: Response) -> List[Optional[float]]:
    """When the bytes up to each place in the body had arrived; None for places behind the last that did."""
    marks, at_s, find = response.marks, [*response.at_s, None], bisect.bisect_left
    return [at_s[find(marks, end)] for end in ends]


def _one_by_one(event: Event, at_s: Optional[float]) -> List[Message]:
    """An event's messages where the stream as a whole is no JSON: usually one; several data lines may be several."""
    try:
        return [Message(_JSON.decode(event.data.decode("utf-8", "surrogateescape")), at_s, event.name, None)]
    except (ValueError, RecursionError) as error:
        lines = [line for line in event.data.split(b"\n") if line.strip() and line.strip() != DONE]
        if len(lines) > 1 or (lines and lines[0] != event.data):
            return [message for line in lines for message in _one_by_one(event._replace(data=line), at_s)]
        return [Message(None, at_s, event.name, f"an event is no JSON ({error.__class__.__name__})")]


_BESIDE_CHOICES = frozenset(("usage", "timings", "metrics", "sglext"))


def _token_ids(ids: Sequence[Any]) -> List[int]:
    """What of a list can be ids of tokens: whole numbers from 0 on, as the run file will want them back."""
    return [token for token in ids if type(token) is int and 0 <= token < 2 ** 53]


class _Draft:
    """A reply while its messages are read, in order."""

    def __init__(self) -> None:
        self.chunk_at_s: List[float] = []
        self.content: List[str] = []
        self.reasoning: List[str] = []
        self.calls: Dict[int, Tuple[List[str], List[str]]] = {}     # tool calls by index: pieces of name and arguments
        self.token_ids: List[int] = []
        self.first_chunk_tokens: Optional[int] = None
        self.first_answer_s: Optional[float] = None
        self.finish_reason: Optional[str] = None
        self.usage: Mapping[str, Any] = {}
        self.extras: Dict[str, Any] = {}
        self.error: Optional[str] = None

    def take(self, value: Any, at_s: Optional[float], name: str, problem: Optional[str]) -> None:
        """Read one message. Runs once a chunk, so the usual chunk's way through it is short."""
        if not isinstance(value, dict):
            self.error = self.error or problem or "an event is no JSON object"
            return
        if name == "error" or value.get("error") or value.get("object") == "error":
            self.error = self.error or f"the server reported: {error_text(value)}"
            return
        if not _BESIDE_CHOICES.isdisjoint(value):
            self.take_extras(value)
        choices = value.get("choices")
        if choices and isinstance(choices, list) and isinstance(choices[0], dict):
            self.take_choice(choices[0], at_s)

    def take_extras(self, value: Mapping[str, Any]) -> None:
        """Keep what stands beside the choices: the usage and what the engine adds."""
        if isinstance(value.get("usage"), dict):
            self.usage = value["usage"]
        for key in ("timings", "metrics", "sglext"):
            if isinstance(value.get(key), dict):
                self.extras.setdefault(key, {}).update(value[key])

    def take_choice(self, choice: Mapping[str, Any], at_s: Optional[float]) -> None:
        """Read one chunk's choice: its text on any channel, its token ids, its finish reason."""
        delta = choice.get("delta") or choice.get("message") or {"content": choice.get("text")}
        ids = choice.get("token_ids")
        answered = self.take_text(delta) if isinstance(delta, dict) else None
        if answered is not None and at_s is not None:
            if not self.chunk_at_s:
                self.first_chunk_tokens = len(ids) if isinstance(ids, list) and ids else None
            self.chunk_at_s.append(at_s)
            if answered and self.first_answer_s is None:
                self.first_answer_s = at_s
        if ids and isinstance(ids, list):
            self.token_ids += _token_ids(ids)
        if isinstance(choice.get("finish_reason"), str):
            self.finish_reason = choice["finish_reason"]

    def take_text(self, delta: Mapping[str, Any]) -> Optional[bool]:
        """Keep a delta's text. True: it holds a piece of the answer; False: only of the reasoning; None: nothing."""
        answered = None
        content = delta.get("content")
        if content and isinstance(content, str):
            self.content.append(content)
            answered = True
            if len(delta) == 1:
                return True
        thought = delta.get("reasoning_content") or delta.get("reasoning")
        if thought and isinstance(thought, str):
            self.reasoning.append(thought)
            answered = answered or False
        if delta.get("tool_calls"):
            answered = self.take_calls(delta["tool_calls"]) or answered
        return answered

    def take_calls(self, calls: Any) -> Optional[bool]:
        """Keep pieces of tool calls, joined by their index."""
        found = None
        for place, call in enumerate(calls if isinstance(calls, list) else ()):
            function = call.get("function") if isinstance(call, dict) else None
            if not isinstance(function, dict):
                continue
            index = call.get("index")
            parts = self.calls.setdefault(index if isinstance(index, int) else place, ([], []))
            for slot, key in enumerate(("name", "arguments")):
                piece = function.get(key)
                piece = _json_text(piece) if isinstance(piece, dict) else piece
                if piece and isinstance(piece, str):
                    parts[slot].append(piece)
                    found = True
        return found


def error_text(value: Any) -> str:
    """What an error body says, whatever its shape: nested, flat or a bare text; at most 300 characters."""
    told = value
    if isinstance(told, dict):
        told = told.get("error") or told.get("message") or told.get("detail") or told
    if isinstance(told, dict):
        told = told.get("message") or told.get("error") or told.get("type") or told
    return shorten(told if isinstance(told, str) else _json_text(told), 300)


def _json_text(value: Any) -> str:
    try:
        return json.dumps(value)
    except RecursionError:
        return "(objects within objects, too deep to be shown)"


def read_reply(exchange: Exchange, prompt_id: str, repeat: int = 0) -> Reply:
    """What an exchange's bytes say, understood; a failure of any kind is in its `error`."""
    response = read_response(exchange)
    draft = _Draft()
    damaged = False
    error = response.error
    streamed = _is_stream(response)
    if response.status and response.status != 200:
        error = status_error(response)
    elif streamed:
        messages, damaged = read_messages(response)
        for message in messages:
            draft.take(*message)
        error = _stream_error(draft, error)
    elif response.status:
        damaged, error = _take_whole(draft, response, error)
    return _finished(draft, exchange, prompt_id, repeat, damaged, error)


def _is_stream(response: Response) -> bool:
    """Whether the body is an event stream: by its content type, or by its look where the type says nothing."""
    start = response.body[:64].lstrip(b"\xef\xbb\xbf\r\n")
    if start[:1] in (b"{", b"[", b"<", b'"'):
        return False
    return "event-stream" in response.headers.get("content-type", "") or start.startswith((b"data:", b":", b"event:", b"id:", b"retry:"))


def _stream_error(draft: _Draft, error: Optional[str]) -> Optional[str]:
    if draft.error and draft.finish_reason is None and draft.error.startswith("an event is no JSON"):
        return error or "the stream ended without finish_reason (its last event is cut off)"
    if draft.error or error:
        return draft.error or error
    if draft.finish_reason is None:
        return "the stream ended without finish_reason" if draft.chunk_at_s or draft.usage else "the stream was empty"
    if draft.finish_reason in ("error", "abort"):
        return f"the server ended the answer with finish_reason {draft.finish_reason!r}"
    return None


def _take_whole(draft: _Draft, response: Response, error: Optional[str]) -> Tuple[bool, Optional[str]]:
    """Read an answer that came in one JSON body; whether its bytes were damaged, and what is wrong with it."""
    try:
        text, damaged = response.body.decode("utf-8"), False
    except UnicodeDecodeError:
        text, damaged = response.body.decode("utf-8", "surrogateescape"), True
    try:
        value = _JSON.decode(text)
    except (ValueError, RecursionError):
        return damaged, error or body_error(response)
    draft.take(value, None, "", None)
    choice = _first_choice(value)
    if isinstance(choice.get("meta_info"), dict):
        draft.extras["meta_info"] = choice["meta_info"]
    verbose = value.get("__verbose") if isinstance(value, dict) else None
    ids = choice.get("response_token_ids") or (verbose.get("tokens") if isinstance(verbose, dict) else None)
    if isinstance(ids, list) and not draft.token_ids:
        draft.token_ids = _token_ids(ids)
    if not choice and not draft.error:
        told = f": {error_text(value)}" if isinstance(value, dict) and isinstance(value.get("message"), str) else ""
        return damaged, error or f"the answer has no choices{told}"
    return damaged, draft.error or error


def _first_choice(value: Any) -> Mapping[str, Any]:
    choices = value.get("choices") if isinstance(value, dict) else None
    return choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else {}


def status_error(response: Response) -> str:
    """One line on a response that is no success: its status and what the server says, never a dump of HTML."""
    text = response.body.decode("utf-8", "replace")
    try:
        told = error_text(_JSON.decode(text))
    except (ValueError, RecursionError):
        plain = response.headers.get("content-type", "").startswith("text/plain")
        told = shorten(" ".join(text[:1000].split()), 300) if plain else body_error(response) if text else ""
    after, place = response.headers.get("retry-after"), response.headers.get("location")
    return (f"HTTP {response.status}" + (f": {told}" if told else "") + (f" (Retry-After: {shorten(after, 40)})" if after else "")
            + (f" (it redirects to {shorten(without_credentials(place), 200)})" if place and 300 <= response.status < 400 else ""))


def body_error(response: Response) -> str:
    """What a body is that is no JSON, in a few words."""
    start = response.body[:512].lstrip().lower()
    if start.startswith((b"<!doctype", b"<html", b"<head", b"<body")):
        return "an HTML page instead of JSON"
    if not start:
        return "an empty body"
    if start.startswith((b"{", b"[")):
        return "the body is no whole JSON"
    return f"{shorten(response.headers.get('content-type', 'a body of no type'), 60)} instead of JSON"


def _finished(draft: _Draft, exchange: Exchange, prompt_id: str, repeat: int, damaged: bool, error: Optional[str]) -> Reply:
    timings = draft.extras.get("timings") or {}
    tokens, source = _count(draft.usage.get("completion_tokens")), "usage"
    if tokens is None:
        tokens, source = _count(timings.get("predicted_n")), "timings"
    details = draft.usage.get("prompt_tokens_details")
    cached = _count(details.get("cached_tokens")) if isinstance(details, dict) else None
    own = next((draft.extras[key] for key in ("timings", "metrics", "meta_info") if draft.extras.get(key)), None)
    error = hidden(joined_text([error]), exchange.secrets) if error else error
    return Reply(
        prompt_id, repeat, exchange.due_s, exchange.connected_s, exchange.sent_s,
        draft.chunk_at_s[0] if draft.chunk_at_s else None, draft.first_answer_s, draft.chunk_at_s[-1] if draft.chunk_at_s else None,
        exchange.ended_s, tuple(draft.chunk_at_s), draft.first_chunk_tokens, _count(draft.usage.get("prompt_tokens")),
        _count(timings.get("cache_n")) if cached is None else cached, tokens, None if tokens is None else source,
        joined_text(draft.content), joined_text(draft.reasoning),
        tuple(ToolCall(*map(joined_text, draft.calls[index])) for index in sorted(draft.calls)),
        tuple(draft.token_ids) or None, draft.finish_reason, acceptance_from_response(draft.extras, tokens),
        _numbers_of(own), None, damaged, error, exchange.resent)


def joined_text(pieces: Iterable[str]) -> str:
    """The pieces as one text. Halves of a surrogate pair that came in two pieces become the character that they are, as they
    will when the text is read back from a file."""
    text = "".join(pieces)
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "surrogatepass")
    return text


def _numbers_of(source: Any, depth: int = 2) -> Optional[Dict[str, Any]]:
    """The numbers of an engine's own fields, one object within another at most."""
    if not isinstance(source, dict):
        return None
    kept: Dict[str, Any] = {}
    for key, value in itertools.islice(source.items(), 100):
        if isinstance(value, dict) and depth > 1:
            kept[key] = _numbers_of(value, depth - 1)
        elif isinstance(value, (int, float)) and abs(value) < 2 ** 63 or value is None:
            kept[key] = value
        elif isinstance(value, list) and len(value) <= 100 and all(isinstance(item, (int, float)) and abs(item) < 2 ** 63 for item in value):
            kept[key] = value
    return kept or None


# ======================================================================================================================
# 6. The client (I/O)
# ======================================================================================================================
#
# One event loop for everything that is asked. A `Tap` is one connection's ear: it hands out its own buffer, stamps what
# arrives, and follows the frames just far enough to know the end, so that the connection can be used again. The loop runs
# all ready reads before it wakes any coroutine: everything is stamped first, and thought about later.

CONNECT_TIMEOUT_S = 20.0
IDLE_LIMIT_S = 1.0          # engines close idle connections after 5 s; one idle for longer than this is replaced before use
INTERRUPTED = "interrupted"
_BUFFER_BYTES = 16 << 10


class Tap(asyncio.BufferedProtocol):
    """One connection. It stamps and understands nothing."""

    def __init__(self, clock: Clock, secrets: Sequence[str] = ()) -> None:
        self._clock = clock
        self._secrets = secrets
        self._view = memoryview(bytearray(_BUFFER_BYTES))   # a memoryview: a bytearray over TLS yields NULs on Python >= 3.11
        self.transport: Any = None
        self.limit_bytes = MAX_REPLY_BYTES
        self.open = False
        self.idle_since_s = 0.0
        self.error: Optional[str] = None
        self._begin()

    def _begin(self) -> None:
        self.data = bytearray()
        self.ends = array("Q")
        self.at_s = array("d")
        self.framing = Framing()
        self.whole = False
        self.left_by_server = False     # it closed before a byte of an answer
        self.finished: Any = None

    def connection_made(self, transport: Any) -> None:
        """The connection stands."""
        self.transport, self.open = transport, True

    def get_buffer(self, sizehint: int) -> memoryview:
        """Where the next bytes go: always the same place."""
        return self._view

    def buffer_updated(self, nbytes: int) -> None:
        """Stamp what came, keep it, and see whether that was the end."""
        now_s = self._clock()
        data = self.data
        if self.whole or self.finished is None:     # what comes now could not be told from the next answer
            self.error = "the server spoke without being asked: this is not HTTP"
            return
        data += self._view[:nbytes]
        self.ends.append(len(data))
        self.at_s.append(now_s)
        if self.framing.complete(data):
            self.whole = True
            self._finish(None)
        elif self.framing.broken:
            self._finish(self.framing.broken)
        elif len(data) > self.limit_bytes:
            self._finish(f"the reply is larger than {self.limit_bytes >> 20} MiB")

    def eof_received(self) -> bool:
        """The server sends no more; for a body without a length that is its end."""
        return False

    def connection_lost(self, error: Optional[BaseException]) -> None:
        """The connection is gone: an end, or a failure in the middle."""
        self.open = False
        framing = self.framing
        if self.whole:
            return
        self.left_by_server = self.error is None and not self.data
        if framing.head_end and framing.length is None and not framing.chunked and error is None:
            self.whole = True
            self._finish(None)
        elif error is not None:
            self._finish(f"the connection broke: {reason_of(error)}")
        else:
            self._finish("the server closed the connection in the middle of the answer" if self.data
                         else "the server closed the connection without an answer")

    def _finish(self, error: Optional[str]) -> None:
        self.idle_since_s = self._clock()
        if error and not self.error:
            self.error = error
        if self.finished is not None and not self.finished.done():
            self.finished.set_result(None)

    def abort(self, error: str) -> None:
        """Give the request up, for the reason given."""
        if not self.whole:
            self._finish(error)
        self.close()

    def close(self) -> None:
        """Drop the connection at once."""
        self.open = False
        if self.transport is not None:
            self.transport.abort()

    @property
    def fresh(self) -> bool:
        """Whether no request has been sent on it yet."""
        return self.finished is None

    def usable(self) -> bool:
        """Whether a next request may be sent on it."""
        return self.open and not self.framing.closes and self.error is None and not self.transport.is_closing() and (
            len(self.data) == self.framing.end) and (self._clock() - self.idle_since_s < IDLE_LIMIT_S)

    async def exchange(self, request: bytes, due_s: float, connected_s: Optional[float], timeout_s: float,
                       limit_bytes: Optional[int] = None) -> Exchange:
        """Send a request and listen until its end, however it ends. The stamp of sending is taken as the bytes are handed over."""
        if not self.open or self.error:     # closed by the server, or given up, since it was opened
            return Exchange(due_s, connected_s, None, self._clock(), bytearray(), (), (),
                            self.error or "the server closed the connection without an answer")
        self._begin()
        self.limit_bytes = MAX_REPLY_BYTES if limit_bytes is None else limit_bytes
        loop = asyncio.get_running_loop()
        self.finished = loop.create_future()
        timer = loop.call_later(timeout_s, self.abort, f"no whole answer within {timeout_s:g} s")
        sent_s = self._clock()
        self.transport.write(request)
        try:
            await self.finished
        finally:
            timer.cancel()
        if not self.whole:
            self.close()
        return Exchange(due_s, connected_s, sent_s, self.idle_since_s, self.data, self.ends, self.at_s, self.error, self._secrets)


def reason_of(error: BaseException) -> str:
    """A failure of the network in a few plain words."""
    if isinstance(error, ConnectionRefusedError):
        return "connection refused"
    if isinstance(error, ConnectionResetError):
        return "reset by the server"
    if isinstance(error, (asyncio.TimeoutError, TimeoutError)):
        return "no connection in time"
    if isinstance(error, socket.gaierror):
        return "no such host name"
    if error.__class__.__name__ == "SSLCertVerificationError":
        return f"its certificate is not trusted ({getattr(error, 'verify_message', '') or error}); --cafile FILE names one that is"
    if error.__class__.__name__.startswith("SSL"):
        return "TLS failed: the server speaks plain HTTP, or no TLS version of ours"
    return getattr(error, "strerror", None) or str(error) or error.__class__.__name__


class Clock:
    """Seconds since the run began, on the one stopwatch (time.perf_counter)."""

    def __init__(self) -> None:
        self._zero = time.perf_counter()

    def __call__(self) -> float:
        return time.perf_counter() - self._zero


class Client:
    """Everything that goes over the network goes through here: no proxy, no retry, no redirect followed unseen."""

    def __init__(self, timeout_s: float = 300.0, cafile: Optional[str] = None) -> None:
        self.clock = Clock()
        self.timeout_s = timeout_s
        self.loop = asyncio.new_event_loop()
        self._cafile = cafile
        self._tls: Any = None
        self._addresses: Dict[Tuple[str, int], Any] = {}    # resolved once; the address that answered comes first
        self._taps: Dict[Origin, List[Tap]] = {}            # open connections between two requests
        self._keeping: Set[Origin] = set()                  # servers seen to keep a connection open after an answer
        self.in_flight: Set[Tap] = set()                    # connections that wait for an answer

    def close(self) -> None:
        """Drop every connection and whatever still runs, end the loop."""
        left = asyncio.all_tasks(self.loop)
        for task in left:
            task.cancel()
        for tap in [*itertools.chain.from_iterable(self._taps.values()), *self.in_flight]:
            tap.close()
        self.loop.run_until_complete(asyncio.gather(*left, return_exceptions=True) if left else asyncio.sleep(0))
        self.loop.close()

    def run(self, work: Any) -> Any:
        """The result of a coroutine, run to its end."""
        return self.loop.run_until_complete(work)

    def ask(self, origin: Origin, request: bytes, timeout_s: Optional[float] = None) -> Exchange:
        """One request, outside any timed pass."""
        return self.run(self.send(origin, request, self.clock(), timeout_s or self.timeout_s))

    def ask_all(self, requests: Sequence[Tuple[Origin, bytes]], timeout_s: float) -> List[Exchange]:
        """Several requests at once, outside any timed pass; answers in the requests' order."""
        async def together() -> List[Exchange]:
            return list(await asyncio.gather(*(self.send(origin, request, self.clock(), timeout_s) for origin, request in requests)))

        return self.run(together()) if requests else []

    async def send(self, origin: Origin, request: bytes, due_s: float, timeout_s: float, limit_bytes: Optional[int] = None,
                   given_up: Callable[[], bool] = bool) -> Exchange:
        """One request over a connection that is open already, or over a new one; none if it was `given_up` while connecting."""
        tap, connected_s, error = await self.connection(origin)
        if tap is not None and given_up():
            self.put_back(origin, tap)
            tap, error = None, INTERRUPTED
        if tap is None:
            return Exchange(due_s, connected_s, None, self.clock(), bytearray(), (), (), error)
        exchange = await self._exchange(tap, request, due_s, connected_s, timeout_s, limit_bytes)
        if connected_s is None and tap.left_by_server and not given_up():
            # It was used before, and the server had closed it while the request was on its way: not this request's failure.
            # Told in the reply; from now on this server is asked over new connections only.
            self._keeping.discard(origin)
            for idle in self._taps.pop(origin, ()):
                idle.close()
            return replace(await self.send(origin, request, due_s, timeout_s, limit_bytes, given_up), resent=True)
        self.put_back(origin, tap)
        return exchange

    async def _exchange(self, tap: Tap, request: bytes, due_s: float, connected_s: Optional[float], timeout_s: float,
                        limit_bytes: Optional[int] = None) -> Exchange:
        self.in_flight.add(tap)
        try:
            return await tap.exchange(request, due_s, connected_s, timeout_s, limit_bytes)
        finally:
            self.in_flight.discard(tap)

    def give_up(self, error: str) -> None:
        """End every request that is in flight, for the reason given; may be called by a signal's handler."""
        for tap in list(self.in_flight):
            tap.abort(error)
        self.loop.call_soon_threadsafe(lambda: None)    # wakes a loop that waits for nothing but the answer

    def learn_keeping(self, origin: Origin, request: bytes, timeout_s: float) -> Exchange:
        """One untimed request that also shows whether the server keeps its connection open afterwards.

        llama.cpp promises to (Keep-Alive: timeout=5) and closes after every stream: a request sent on such a connection
        gets no answer. So connections are used again only where they were seen to stay open.
        """
        async def send_and_look() -> Exchange:
            tap, connected_s, error = await self.connection(origin)
            if tap is None:
                return Exchange(self.clock(), connected_s, None, self.clock(), bytearray(), (), (), error)
            exchange = await self._exchange(tap, request, self.clock(), connected_s, timeout_s)
            await asyncio.sleep(max(0.02, 2 * (connected_s or 0.0)))
            if tap.usable():
                self._keeping.add(origin)
            self.put_back(origin, tap)
            return exchange

        return self.run(send_and_look())

    def put_back(self, origin: Origin, tap: Tap) -> None:
        """Keep a connection for the next request, where it can serve one."""
        if tap.usable() and (tap.fresh or origin in self._keeping):
            self._taps.setdefault(origin, []).append(tap)
        else:
            tap.close()

    async def connection(self, origin: Origin) -> Tuple[Optional[Tap], Optional[float], Optional[str]]:
        """An open connection; how many seconds opening took (None: it was open); the reason where there is none."""
        idle = self._taps.get(origin, [])
        while idle:
            tap = idle.pop()
            if tap.usable():
                return tap, None, None
            tap.close()
        began_s = self.clock()
        try:
            tap = await asyncio.wait_for(self._connect(origin), CONNECT_TIMEOUT_S)
        except (OSError, ValueError, asyncio.TimeoutError) as error:    # ssl.SSLError is an OSError; ValueError: no name for a host
            return None, self.clock() - began_s, f"cannot connect: {reason_of(error)}"
        tap.idle_since_s = self.clock()
        return tap, self.clock() - began_s, None

    async def open_ahead(self, origin: Origin, count: int) -> None:
        """Have `count` connections open before they are due; those that fail will fail again, and be told, when used."""
        opened = await asyncio.gather(*(self.connection(origin) for _ in range(count)))
        for tap, _, _ in opened:
            if tap is not None:
                self.put_back(origin, tap)

    async def _connect(self, origin: Origin) -> Tap:
        key = (origin.host, origin.port)
        if key not in self._addresses:
            self._addresses[key] = await self.loop.getaddrinfo(origin.host, origin.port, type=socket.SOCK_STREAM)
        failure: OSError = OSError("no address")
        for info in list(self._addresses[key]):
            try:
                _, tap = await self.loop.create_connection(
                    lambda: Tap(self.clock, origin.secrets), info[4][0], info[4][1], family=info[0], ssl=self._tls_context(origin),
                    server_hostname=origin.host if origin.scheme == "https" else None)
            except OSError as error:
                failure = error
                continue
            self._addresses[key] = [info]       # "localhost" may mean ::1 and 127.0.0.1: stay with the one that answers
            return tap
        raise failure

    def _tls_context(self, origin: Origin) -> Any:
        if origin.scheme != "https":
            return None
        if self._tls is None:
            import ssl  # only where it is needed: it doubles the start-up time
            try:
                self._tls = ssl.create_default_context(cafile=self._cafile)
            except (OSError, ValueError) as error:
                raise MeasureError(f"The certificate file {self._cafile} cannot be used: {error}.", "give a PEM file with --cafile") from None
        return self._tls


# ======================================================================================================================
# 7. Servers (I/O at the edge)
# ======================================================================================================================
#
# A server is asked who it is before anything is measured. What it says is taken over by whitelist only: identity answers
# hold paths, environment variables and keys. What it does not say stays None.

READY_TIMEOUT_S = 300.0
ASK_TIMEOUT_S = 15.0
_OWNERS = {"llamacpp": "llama.cpp", "vllm": "vllm", "vllm-frontend-rs": "vllm", "sglang": "sglang", "tensorrt_llm": "tensorrt-llm"}
_PREFIXES = {"llamacpp:": "llama.cpp", "vllm:": "vllm", "sglang:": "sglang", "trtllm_": "tensorrt-llm"}
_IDENTITY_PATHS = {"llama.cpp": ("/props", "/slots"), "vllm": ("/version", "/server_info?config_format=json"),
                   "sglang": ("/server_info", "/model_info"), "tensorrt-llm": ("/version",)}
PROXY_VARIABLES = ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")


@dataclass(frozen=True)
class Target:
    """A server as the user named it."""

    label: str
    url: str
    metrics_url: Optional[str] = None
    own_body: Mapping[str, Any] = field(default_factory=dict)   # request fields for this server alone


@dataclass(frozen=True)
class Arm:
    """A server that is ready to be asked: what is known of it, and the doors to its chat and its metrics."""

    server: Server
    origin: Origin
    chat_path: str
    metrics_doors: Tuple[Tuple[Origin, str], ...]
    own_body: Mapping[str, Any]
    models: Tuple[str, ...]         # the names that it serves
    page: MetricsPage               # its metrics when it was identified


@dataclass(frozen=True)
class Remark:
    """What a look at the servers brought up: one sentence, one remedy. `grave`: the run would not mean what it says."""

    sentence: str
    remedy: str = ""
    grave: bool = False
    about: str = ""         # the server or the workload that it is about; "": all of them

    def caveat(self) -> Caveat:
        """The remark as a caveat of the run."""
        return Caveat(self.sentence, self.remedy)


def get(client: Client, origin: Origin, path: str, accept: str = "*/*") -> Response:
    """The answer to a GET; up to three redirects are followed on the same host, never to another."""
    for _ in range(4):
        response = read_response(client.ask(origin, request_bytes(origin, path, accept=accept), min(ASK_TIMEOUT_S, client.timeout_s)))
        moved = redirect_path(origin, response)
        if moved is None:
            return response
        path = moved
    return response._replace(status=0, error="redirected in a loop")


def redirect_path(origin: Origin, response: Response) -> Optional[str]:
    """Where a redirect leads on the same host; None for no redirect. MeasureError names a target elsewhere: no key goes there."""
    location = response.headers.get("location")
    if response.status not in (301, 302, 307, 308) or not location:
        return None
    try:
        target = urllib.parse.urlsplit(urllib.parse.urljoin(origin.url("/"), location))
        same = (target.scheme, target.hostname) == (origin.scheme, origin.host) and (
            target.port or (443 if target.scheme == "https" else 80)) == origin.port
        path = url_path(target.path or "/") + (f"?{urllib.parse.quote(target.query, safe='/%~:@!$&()*+,;=?')}" if target.query else "")
    except ValueError:
        same, path = False, ""
    if not same:
        raise MeasureError(f"{origin.url('')} redirects to {shorten(without_credentials(location), 200)}.",
                           "give that address yourself if you trust it")
    return path


def json_of(response: Response) -> Any:
    """The JSON of a successful answer; None for anything else."""
    if response.status != 200 or response.error:
        return None
    try:
        return _JSON.decode(response.body.decode("utf-8", "replace"))
    except (ValueError, RecursionError):
        return None


def wait_until_ready(client: Client, origin: Origin, path: str, limit_s: float, say: Any) -> Response:
    """The first answer to GET `path` that is not 503: a server that loads its model is waited for, within the limit.

    MeasureError where nobody listens, or where it is still loading after `limit_s` seconds.
    """
    began_s = client.clock()
    told = False
    while True:
        response = get(client, origin, path)
        if response.status != 503:
            break
        if client.clock() - began_s >= limit_s:
            raise MeasureError(f"{origin.url('')} still answers 503 after {limit_s:g} s: {status_error(response)}.",
                               "wait until it has loaded its model, or raise --ready-timeout")
        if not told:
            say(f"waiting for {origin.url('')}: {status_error(response)}")
            told = True
        client.run(asyncio.sleep(0.5))
    if response.error and not response.status:
        raise MeasureError(f"{origin.url(path)}: {response.error}.", unreachable_hint(origin, response.error))
    return response


def unreachable_hint(origin: Origin, error: str) -> str:
    """What to try when a server could not be talked to."""
    if "TLS" in error or "certificate" in error:
        other = "http" if origin.scheme == "https" else "https"
        return "give the authority's certificate with --cafile FILE" if "certificate" in error else f"try {other}://{origin.netloc}"
    if "not HTTP" in error or "without an answer" in error or "reset" in error:
        return f"is it an HTTP server? If it speaks TLS, use https://{origin.netloc}"
    return "start the server, or check host and port"


def identify(client: Client, target: Target, key: Optional[str], options: Any, say: Any) -> Tuple[Arm, List[Remark]]:
    """Who a server is, as far as it tells, and what was found wrong on the way."""
    base = parse_base_url(target.url, key)
    response = wait_until_ready(client, base.origin, base.base_path + "/models", options.ready_timeout, say)
    if response.status in (401, 403):
        raise MeasureError(f"{base.origin.url(base.base_path)} refuses the key: {status_error(response)}.",
                           f"put the key into the environment variable {options.api_key_env} (or name another with --api-key-env)")
    listed = json_of(response)
    models = _listed_models(listed)
    if not models and not options.model:
        raise MeasureError(f"{base.origin.url(base.base_path + '/models')} names no model: {_what_came(response)}.",
                           "check that the address is an OpenAI-compatible one, or name the model with --model")
    doors = _metrics_doors(base, target, key)
    page = scrape(client, doors)
    engine = options.engine or _engine_of(models, response, page)
    facts = _identity_facts(client, base, engine)
    arm = _arm(base, target, options, engine, models, facts, doors, page)
    return arm, _identity_remarks(arm)


def _what_came(response: Response) -> str:
    if response.status == 200:
        return "no list of models" if response.body[:1] in (b"{", b"[") else body_error(response)
    return status_error(response)


def _listed_models(listed: Any) -> List[Mapping[str, Any]]:
    entries = listed.get("data") if isinstance(listed, dict) else None
    return [entry for entry in entries if isinstance(entry, dict) and isinstance(entry.get("id"), str) and len(entry["id"]) <= 1000
            ] if isinstance(entries, list) else []


def _metrics_doors(base: BaseUrl, target: Target, key: Optional[str]) -> Tuple[Tuple[Origin, str], ...]:
    """Where the metrics are: the addresses given, else /metrics at the root of an address that ends in /v1."""
    if target.metrics_url:
        doors = []
        for text in target.metrics_url.split(","):
            origin, path = parse_address(text)
            own = (origin.scheme, origin.host, origin.port) == (base.origin.scheme, base.origin.host, base.origin.port)
            doors.append((base.origin if own and not origin.authorization else origin, path if path.strip("/") else "/metrics"))
        return tuple(doors)
    return ((base.origin, base.metrics_path),) if base.metrics_path else ()


def scrape(client: Client, doors: Sequence[Tuple[Origin, str]]) -> MetricsPage:
    """The metrics behind all doors as one page; the reason where any of them gives none."""
    if not doors:
        return no_page("no metrics address is known for a base address that does not end in /v1 (--metrics-url gives one)")
    exchanges = client.ask_all([(origin, request_bytes(origin, path, accept="text/plain")) for origin, path in doors],
                               min(ASK_TIMEOUT_S, client.timeout_s))
    pages = [_page_of(read_response(exchange)) for exchange in exchanges]
    if len(pages) == 1 or any(page.problem for page in pages):
        return next((page for page in pages if page.problem), pages[0])
    samples = tuple(sample._replace(labels={**sample.labels, "address": str(number)})
                    for number, page in enumerate(pages) for sample in page.samples)
    return MetricsPage(samples, pages[0].kinds, sum(page.skipped_lines for page in pages), str([page.started for page in pages]), None)


def _page_of(response: Response) -> MetricsPage:
    if response.status == 0 or response.error:
        return no_page(f"the metrics page cannot be read ({response.error})")
    if response.status != 200:
        return no_page(f"there is no metrics page (HTTP {response.status})")
    return parse_metrics(response.body, response.headers.get("process-start-time-unix"))


def _engine_of(models: Sequence[Mapping[str, Any]], response: Response, page: MetricsPage) -> str:
    owner = str(models[0].get("owned_by", "")).lower() if models else ""
    if owner in _OWNERS:
        return _OWNERS[owner]
    if "llama.cpp" in response.headers.get("server", "").lower():
        return "llama.cpp"
    return next((engine for prefix, engine in _PREFIXES.items() for sample in page.samples if sample.name.startswith(prefix)), "unknown")


def _identity_facts(client: Client, base: BaseUrl, engine: str) -> Dict[str, Any]:
    """The JSON of the engine's identity pages, by path; {} where the server's root is not known. Never kept whole."""
    if base.metrics_path is None:
        return {}
    root = base.base_path[:-3]
    paths = _IDENTITY_PATHS.get(engine, ())
    exchanges = client.ask_all([(base.origin, request_bytes(base.origin, root + path)) for path in paths], min(ASK_TIMEOUT_S, client.timeout_s))
    return {path.split("?")[0]: json_of(read_response(exchange)) for path, exchange in zip(paths, exchanges)}


def _arm(base: BaseUrl, target: Target, options: Any, engine: str, models: Sequence[Mapping[str, Any]], facts: Mapping[str, Any],
         doors: Tuple[Tuple[Origin, str], ...], page: MetricsPage) -> Arm:
    model = options.model or str(models[0]["id"])
    entry = next((entry for entry in models if entry["id"] == model), models[0] if models else {})
    told = _TELLERS.get(engine, _told_by_others)(entry, facts, page)
    known: Dict[str, Any] = {key: told[key] for key in _TOLD if key in told}
    chat_path = base.base_path + "/chat/completions"
    server = Server(target.label, base.origin.url(base.base_path), base.origin.url(chat_path),
                    tuple(origin.url(path) for origin, path in doors), model, engine,
                    options.engine_version or told.get("version"), **known)
    return Arm(server, base.origin, chat_path, doors, target.own_body, tuple(str(entry["id"]) for entry in models), page)


_TOLD = ("context_tokens", "slots", "kv_cache_tokens", "speculating", "speculation", "answers")


def _told_by_llama_cpp(entry: Mapping[str, Any], facts: Mapping[str, Any], page: MetricsPage) -> Dict[str, Any]:
    """llama.cpp: /props for build, context of a slot and slots; /slots for speculation (/props always says "none" there)."""
    props, slots = _dict(facts.get("/props")), facts.get("/slots")
    meta = _dict(entry.get("meta"))
    slot = slots[0] if isinstance(slots, list) and slots and isinstance(slots[0], dict) else {}
    context = _first_count(_dict(props.get("default_generation_settings")), "n_ctx") or _first_count(meta, "n_ctx") or _first_count(slot, "n_ctx")
    count = _first_count(props, "total_slots") or (len(slots) if isinstance(slots, list) and slots else None)
    speculating = slot.get("speculative") if isinstance(slot.get("speculative"), bool) else None
    types = [name for name in str(_dict(slot.get("params")).get("speculative.types") or "").split(",") if name not in ("", "none")]
    answers = _kept(props, "build_info", "model_alias", "model_ftype", "total_slots")
    answers.update(_kept(meta, "n_params", "size", "n_ctx_train", "ftype"))
    if isinstance(props.get("model_path"), str):
        answers["model_file"] = _file_name(props["model_path"])
    return {"version": _text(props.get("build_info")), "context_tokens": context, "slots": count,
            "kv_cache_tokens": context * count if context and count else None, "speculating": speculating,
            "speculation": Speculation(_text(",".join(types))) if types else None, "answers": answers}


def _told_by_vllm(entry: Mapping[str, Any], facts: Mapping[str, Any], page: MetricsPage) -> Dict[str, Any]:
    """vLLM: speculation shows as counters that exist; its length as their positions; its method in development mode only."""
    config = _dict(_dict(facts.get("/server_info")).get("vllm_config"))
    told = _dict(config.get("speculative_config"))
    drafting = any(sample.name.startswith("vllm:spec_decode_") for sample in page.samples)
    positions = {sample.labels.get("position") for sample in page.samples
                 if sample.name in (_BY_POSITION[0], _BY_POSITION[0] + "_total")}
    cache = next((sample.labels for sample in page.samples if sample.name == "vllm:cache_config_info"), {})
    method, drafter = _text(told.get("method")), _file_name(told.get("model"))
    speculation = Speculation(method, _first_count(told, "num_speculative_tokens") or len(positions) or None,
                              None if drafter == method else drafter)       # n-grams are called a model of that name there
    known = any(sample.name.startswith("vllm:") for sample in page.samples)
    answers = _kept(cache, "block_size", "num_gpu_blocks", "cache_dtype", "enable_prefix_caching", "gpu_memory_utilization")
    return {"version": _text(_dict(facts.get("/version")).get("version")), "context_tokens": _first_count(entry, "max_model_len"),
            "slots": _first_count(_dict(config.get("scheduler_config")), "max_num_seqs"), "kv_cache_tokens": kv_cache_tokens(page),
            "speculating": drafting if known else None, "speculation": speculation if drafting else None, "answers": answers}


_SGLANG_FACTS = ("version", "dtype", "quantization", "kv_cache_dtype", "attention_backend", "disable_radix_cache", "random_seed",
                 "enable_deterministic_inference", "speculative_algorithm", "speculative_num_steps", "speculative_eagle_topk",
                 "speculative_num_draft_tokens", "max_running_requests", "max_total_num_tokens", "context_length", "tp_size", "dp_size")


def _told_by_sglang(entry: Mapping[str, Any], facts: Mapping[str, Any], page: MetricsPage) -> Dict[str, Any]:
    """SGLang: /server_info tells all, its keys and its command line included, so only these facts are ever looked at."""
    info = _kept(_dict(facts.get("/server_info")), *_SGLANG_FACTS)
    algorithm = _text(info.get("speculative_algorithm"))
    drafted = _first_count(info, "speculative_num_draft_tokens")
    drafter = _file_name(_dict(facts.get("/server_info")).get("speculative_draft_model_path"))
    return {"version": _text(info.get("version")),
            "context_tokens": _first_count(entry, "max_model_len") or _first_count(info, "context_length"),
            "slots": _first_count(info, "max_running_requests"),
            "kv_cache_tokens": kv_cache_tokens(page) or _first_count(info, "max_total_num_tokens"),
            "speculating": algorithm is not None if info else None,
            "speculation": Speculation(algorithm, drafted - 1 if drafted else None, drafter) if algorithm else None, "answers": info}


def _told_by_others(entry: Mapping[str, Any], facts: Mapping[str, Any], page: MetricsPage) -> Dict[str, Any]:
    return {"version": _text(_dict(facts.get("/version")).get("version")), "context_tokens": _first_count(entry, "max_model_len")}


_TELLERS = {"llama.cpp": _told_by_llama_cpp, "vllm": _told_by_vllm, "sglang": _told_by_sglang}


def _dict(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _text(value: Any) -> Optional[str]:
    return shorten(value, 120) if isinstance(value, str) and value else None


def _file_name(value: Any) -> Optional[str]:
    return _text(re.split(r"[\\/]", value.rstrip("/\\"))[-1]) if isinstance(value, str) else None


def _kept(source: Mapping[str, Any], *keys: str) -> Dict[str, Any]:
    """The named facts of an identity answer, where they are short texts, numbers or truth values."""
    return {key: shorten(value, 120) if isinstance(value, str) else value for key, value in source.items()
            if key in keys and isinstance(value, (str, int, float, bool))}


def _identity_remarks(arm: Arm) -> List[Remark]:
    server, remarks = arm.server, []
    if arm.models and server.model not in arm.models and server.engine != "sglang":
        remarks.append(Remark(f"{server.label}: the server lists {', '.join(arm.models[:4])}, not {server.model!r}.",
                                "llama.cpp answers all the same; vLLM refuses: check --model"))
    if arm.page.problem:
        remarks.append(Remark(f"{server.label}: {arm.page.problem}.", _metrics_remedy(server.engine), about=server.label))
    elif server.engine == "vllm" and not any(sample.name.startswith("vllm:") for sample in arm.page.samples):
        remarks.append(Remark(f"{server.label}: the metrics page has no vllm: series.", "start vLLM without --disable-log-stats", about=server.label))
    return remarks


def _metrics_remedy(engine: str) -> str:
    return {"llama.cpp": "start llama-server with --metrics", "sglang": "start SGLang with --enable-metrics",
            "vllm": "start vLLM without --disable-log-stats"}.get(engine, "acceptance is then told by response fields only, if at all")


def examine(arms: Sequence[Arm], levels: Sequence[int], longest_prompt_chars: int, max_tokens: int,
            environment: Mapping[str, str]) -> List[Remark]:
    """Everything about a set of servers, the baseline first, that would spoil a comparison; pure."""
    remarks = []
    set_proxies = [name for name in PROXY_VARIABLES if environment.get(name)]
    if set_proxies:
        remarks.append(Remark(f"Proxy variables are set ({', '.join(set_proxies)}) and ignored: every request goes straight to its server."))
    base = arms[0].server
    if base.speculating and len(arms) > 1 and not arms[0].own_body:
        remarks.append(Remark(f"The baseline at {base.base_url} speculates itself.", "start it without any drafting option", grave=True))
    for arm in arms[1:]:
        remarks += _pair_remarks(base, arm.server)
    for arm in arms:
        remarks += _load_remarks(arm.server, levels, longest_prompt_chars, max_tokens)
    return remarks


def _pair_remarks(base: Server, other: Server) -> List[Remark]:
    remarks = []
    if other.speculating is False:
        remarks.append(Remark(f"{other.label} at {other.base_url} does not speculate.", _idle_remedy(other.engine), True, other.label))
    if _same_address(base, other):
        remarks.append(Remark(f"{other.label} is the same server as the baseline: they are measured one after the other, so that counters stay apart."))
    for name, mine, theirs in _told_of_both(base, other):
        if mine is not None and theirs is not None and mine != theirs:
            remarks.append(Remark(f"{other.label} has another {name} than the baseline: {theirs} against {mine}.",
                                    "start both servers alike but for speculation", name == "model", other.label))
    return remarks


def _told_of_both(base: Server, other: Server) -> List[Tuple[str, Any, Any]]:
    facts = [("engine", base.engine, other.engine), ("engine version", base.version, other.version), ("model", base.model, other.model),
             ("context per slot", base.context_tokens, other.context_tokens), ("number of slots", base.slots, other.slots)]
    for key, name in (("n_params", "model"), ("model_ftype", "model"), ("dtype", "model"), ("quantization", "model"),
                      ("kv_cache_dtype", "cache type"), ("attention_backend", "attention backend"), ("disable_radix_cache", "prefix cache setting")):
        facts.append((name, base.answers.get(key), other.answers.get(key)))
    return facts


def _same_address(base: Server, other: Server) -> bool:
    return base.chat_url == other.chat_url or bool(set(base.metrics_urls) & set(other.metrics_urls))


def _idle_remedy(engine: str) -> str:
    if engine == "llama.cpp":
        return ("-md alone loads a draft model and does not use it: add --spec-type draft-simple (draft-eagle3, draft-mtp, ngram-simple ...); "
                "if that is set, its log says why the draft was refused (another vocabulary, for example)")
    return {"vllm": "start vLLM with --speculative-config", "sglang": "start SGLang with --speculative-algorithm"}.get(engine, "check its start command")


def _load_remarks(server: Server, levels: Sequence[int], longest_prompt_chars: int, max_tokens: int) -> List[Remark]:
    remarks = []
    if server.slots and max(levels) > server.slots:
        remarks.append(Remark(f"{server.label} answers {server.slots} request{'s' * (server.slots != 1)} at once, fewer than concurrency {max(levels)}: "
                                "the others wait, and their waiting is in TTFT.", f"use --concurrency {server.slots} or less, or give the server more slots", about=server.label))
    about = longest_prompt_chars // 4 + max_tokens      # English has about four characters a token
    if server.context_tokens and about > server.context_tokens:
        remarks.append(Remark(f"{server.label} has {server.context_tokens} tokens of context a request; the longest prompt with its answer takes about {about}.",
                                "lower --max-tokens, shorten the prompts, or start the server with more context", True, server.label))
    return remarks


# ----------------------------------------------------------------------------------------------------------------------
# How prompts are asked: greedy, and the same for every server but for the engine's own words


@dataclass(frozen=True)
class Asking:
    """How every prompt of a run is asked."""

    max_tokens: int = 192
    seed: int = 0
    stream: bool = True
    no_think: bool = False
    extra_body: Mapping[str, Any] = field(default_factory=dict)
    dropped: FrozenSet[str] = frozenset()       # refused by one server, so sent to none
    token_key: str = "max_tokens"
    salt: str = ""                              # makes every request's prefix-cache key its own: all start cold


# Whatever the server's own defaults are (the model's generation_config, GGUF keys), these make temperature 0 plain greedy.
_NEUTRAL: Mapping[str, Mapping[str, Any]] = {
    "llama.cpp": {"cache_prompt": False, "repeat_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "dry_multiplier": 0.0,
                  "xtc_probability": 0.0, "mirostat": 0, "min_p": 0.0},
    "vllm": {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "min_p": 0.0, "return_token_ids": True},
    "sglang": {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "min_p": 0.0,
               "return_spec_tokens_details": True, "return_cached_tokens_details": True},
}
_WHOLE_ANSWERS: Mapping[str, Mapping[str, Any]] = {      # what only an answer in one piece can carry
    "llama.cpp": {"return_tokens": True, "verbose": True}, "sglang": {"return_meta_info": True, "return_token_ids": True}}
_SALTED = ("vllm", "sglang")
_NEEDED = ("model", "messages", "tools", "stream", "temperature")


def request_body(server: Server, prompt: Prompt, asking: Asking, own_body: Mapping[str, Any], salt: str) -> Dict[str, Any]:
    """The JSON of one request: greedy, neutral, and with everything asked for that this engine can tell about acceptance."""
    body: Dict[str, Any] = {"model": server.model, "messages": list(prompt.messages),
                            asking.token_key: min(prompt.max_tokens or asking.max_tokens, asking.max_tokens),
                            "temperature": 0, "top_p": 1, "seed": asking.seed, "stream": asking.stream}
    if asking.stream:
        body["stream_options"] = {"include_usage": True}
    if prompt.tools:
        body["tools"] = list(prompt.tools)
    body.update(_NEUTRAL.get(server.engine, {}))
    if not asking.stream:
        body.update(_WHOLE_ANSWERS.get(server.engine, {}))
    if server.engine in _SALTED:
        body["cache_salt"] = f"{asking.salt}-{salt}"
    if asking.no_think:
        body["chat_template_kwargs"] = {"enable_thinking": False}
    for name in asking.dropped:
        body.pop(name, None)
    return overlaid(overlaid(body, asking.extra_body), own_body)


def overlaid(body: Mapping[str, Any], extra: Mapping[str, Any]) -> Dict[str, Any]:
    """`body` with `extra` laid over it; objects are merged, everything else replaced; a null removes."""
    result = dict(body)
    for key, value in extra.items():
        if value is None:
            result.pop(key, None)
        elif isinstance(value, dict) and isinstance(result.get(key), dict):
            result[key] = overlaid(result[key], value)
        else:
            result[key] = value
    return result


def refused_parameter(error: str, body: Mapping[str, Any]) -> Optional[str]:
    """The optional parameter of `body` that a 400's text names; None where it names none."""
    if not error.startswith(("HTTP 400", "HTTP 422")):
        return None
    names = sorted((name for name in body if name not in _NEEDED), key=len, reverse=True)
    return next((name for name in names if re.search(rf"(?<![A-Za-z0-9_]){re.escape(name)}(?![A-Za-z0-9_])", error)), None)


def rehearse(client: Client, arms: Sequence[Arm], asking: Asking, say: Any, ready_timeout_s: float,
             ) -> Tuple[List[Arm], Asking, List[Reply], List[Remark]]:
    """One untimed request to every server, until all of them take it: redirects are resolved, a server that still loads is
    waited for, a parameter that one of them refuses is dropped for all. MeasureError where a server cannot be asked at all."""
    arms, remarks = list(arms), []
    deadline_s = client.clock() + ready_timeout_s
    replies: List[Reply] = []
    place = moves = 0
    while place < len(arms):
        arm = arms[place]
        prompt = warm_up_prompt(0)
        body = request_body(arm.server, prompt, replace(asking, max_tokens=min(asking.max_tokens, 16)), arm.own_body, "rehearsal")
        exchange = client.learn_keeping(arm.origin, request_bytes(arm.origin, arm.chat_path, body), client.timeout_s)
        moved = redirect_path(arm.origin, read_response(exchange))
        reply = read_reply(exchange, prompt.id)
        name = refused_parameter(reply.error or "", body)
        if moved and moves < 4 * len(arms):
            moves += 1
            arms[place] = replace(arm, chat_path=moved, server=replace(arm.server, chat_url=arm.origin.url(moved)))
        elif name:
            asking = _without(asking, name)
            remarks.append(Remark(f"{arm.server.label} refused the parameter {name!r}: it is sent to no server in this run.",
                                    "" if name not in _SPOILING else "without it the servers' own defaults apply"))
            place, replies = 0, []
        elif (reply.error or "").startswith("HTTP 503") and client.clock() < deadline_s:
            say(f"waiting for {arm.server.label}: {reply.error}")
            client.run(asyncio.sleep(0.5))
        else:
            _refuse(arm, reply)
            replies.append(reply)
            place += 1
    return arms, asking, replies, remarks


_WARM_UP_TOOL = {"type": "function", "function": {"name": "note", "description": "Keep a note.", "parameters": {
    "type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}}}


def rehearse_tools(client: Client, arms: Sequence[Arm], asking: Asking) -> List[Remark]:
    """What every server says to a request with a tool, before prompts with tools are measured: some need a flag for it."""
    remarks = []
    for arm in arms:
        prompt = replace(warm_up_prompt(1), tools=(_WARM_UP_TOOL,))
        body = request_body(arm.server, prompt, replace(asking, max_tokens=min(asking.max_tokens, 16)), arm.own_body, "tools")
        reply = read_reply(client.ask(arm.origin, request_bytes(arm.origin, arm.chat_path, body)), prompt.id)
        if reply.error:
            remedy = {"vllm": "start vLLM with --enable-auto-tool-choice --tool-call-parser NAME (hermes, llama3_json, ...)",
                      "llama.cpp": "start llama-server with --jinja", "sglang": "start SGLang with --tool-call-parser NAME"}
            remarks.append(Remark(f"{arm.server.label} refuses prompts with tools: {reply.error}.", remedy.get(arm.server.engine, "leave the workload out"),
                                  True, arm.server.label))
    return remarks


_SPOILING = ("seed", "top_p", "repetition_penalty", "repeat_penalty", "presence_penalty", "frequency_penalty", "min_p")


def _without(asking: Asking, name: str) -> Asking:
    if name == "max_tokens" and asking.token_key == "max_tokens":
        return replace(asking, token_key="max_completion_tokens")
    if name in asking.dropped or name in asking.extra_body:
        raise MeasureError(f"A server refuses the parameter {name!r} that you asked for.", "leave it out of --extra-body")
    return replace(asking, dropped=asking.dropped | {name})


def _refuse(arm: Arm, reply: Reply) -> None:
    """MeasureError for an answer that says that no request of ours will ever be answered here."""
    error = reply.error or ""
    where = arm.server.chat_url
    if error.startswith(("HTTP 401", "HTTP 403")):
        raise MeasureError(f"{where} refuses the key: {error}.", "put the key into the variable that --api-key-env names (default SPEC_API_KEY)")
    if error.startswith("HTTP 404"):
        raise MeasureError(f"{where}: {error}.", f"check the address and the model's name (--model; the server lists {', '.join(arm.models[:4]) or 'none'})")
    if error.startswith(("HTTP 400", "HTTP 405", "HTTP 422", "HTTP 3")):
        raise MeasureError(f"{where} does not take our request: {error}.", "check --extra-body, --max-tokens and the model")
    if error.startswith(("an HTML page", "cannot connect")) or "instead of JSON" in error:
        raise MeasureError(f"{where}: {error}.", "check that the address is an OpenAI-compatible one")


def speculation_after_a_task(client: Client, arm: Arm) -> Arm:
    """The arm with what only a server tells that has answered once: llama.cpp's drafting method (/slots)."""
    if arm.server.engine != "llama.cpp" or not arm.metrics_doors or arm.server.speculation:
        return arm
    told = _told_by_llama_cpp({}, {"/slots": json_of(get(client, arm.origin, arm.chat_path.rpartition("/v1")[0] + "/slots"))}, arm.page)
    return replace(arm, server=replace(arm.server, speculation=told["speculation"])) if told["speculation"] else arm


# ======================================================================================================================
# 8. A timed pass (I/O)
# ======================================================================================================================
#
# Closed loop: as many requests in flight as the level says, the next one sent when one ends. All request bytes are built
# before a pass, all answers understood after it.

PASS_MEMORY_BYTES = 512 << 20
SMALLEST_REPLY_LIMIT = 4 << 20      # some ten thousand chunks: no answer that anybody waits for is longer
HICCUP_INTERVAL_S = 0.01
SLOTS_OPENED_AHEAD = 128
KINDS_OF_FAILURES_TOLD = 8
SETTLE_S = 0.2              # counters that do not hold our tokens yet are read again after that long


class Job(NamedTuple):
    """One request to be sent."""

    prompt: Prompt
    repeat: int
    request: bytes


class Lane(NamedTuple):
    """One server's jobs of a pass."""

    arm: Arm
    jobs: Sequence[Job]


class Interrupt:
    """What Ctrl-C (or SIGTERM) does: the first stops sending and gives up what is in flight, the second stops at once.

    As long as nothing is measured (`measuring` is not set), the first one stops at once, too.
    """

    def __init__(self, client: Client) -> None:
        self.requested = False
        self.measuring = True
        self._client = client
        self._previous: Dict[int, Any] = {}

    def __enter__(self) -> "Interrupt":
        for number in (signal.SIGINT, signal.SIGTERM):
            try:
                self._previous[number] = signal.signal(number, self._on_signal)
            except ValueError:
                pass                # not the main thread: whoever embeds us handles signals
        return self

    def __exit__(self, *_: Any) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _on_signal(self, number: int, frame: Any) -> None:
        if self.requested or not self.measuring:
            raise KeyboardInterrupt
        self.requested = True
        self._client.give_up(INTERRUPTED)


class Played(NamedTuple):
    """What replaying a lane brought: its replies in the jobs' order, and what the client saw of itself."""

    replies: Tuple[Reply, ...]
    wall_s: float
    hiccup_p99_s: Optional[float]
    load_kept: Optional[float]
    decoded_early: bool


async def _hiccups(lateness_s: array, clock: Clock) -> None:
    """An idle task that only measures how late it wakes: how far our own stamps can be trusted."""
    while True:
        due_s = clock() + HICCUP_INTERVAL_S
        await asyncio.sleep(HICCUP_INTERVAL_S)
        lateness_s.append(max(0.0, clock() - due_s))


def _p99(values: Sequence[float]) -> Optional[float]:
    return sorted(values)[min(len(values) - 1, int(len(values) * 0.99))] if values else None


@contextlib.contextmanager
def quiet_collector() -> Iterator[None]:
    """Garbage is collected before and not within: a collection in the middle of a pass would stamp late."""
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class _Evidence:
    """The exchanges of one lane, understood after the pass, or earlier where they would fill the memory."""

    def __init__(self, jobs: Sequence[Job], slots: int) -> None:
        self.jobs = jobs
        self.limit_bytes = min(MAX_REPLY_BYTES, max(SMALLEST_REPLY_LIMIT, PASS_MEMORY_BYTES // slots))  # all replies that grow at once
        self.replies: List[Optional[Reply]] = [None] * len(jobs)
        self.decoded_early = False
        self._waiting: Dict[int, Exchange] = {}
        self._bytes = 0

    def keep(self, index: int, exchange: Exchange) -> None:
        self._waiting[index] = exchange
        self._bytes += len(exchange.data)
        if self._bytes > PASS_MEMORY_BYTES:
            self.decoded_early = True
            self.understand()

    def understand(self) -> None:
        for index in list(self._waiting):
            job = self.jobs[index]
            self.replies[index] = read_reply(self._waiting.pop(index), job.prompt.id, job.repeat)
        self._bytes = 0

    def finished(self) -> Tuple[Reply, ...]:
        self.understand()
        return tuple(reply for reply in self.replies if reply is not None)


async def _slot(client: Client, lane: Lane, todo: Iterator[int], evidence: _Evidence, interrupt: Interrupt, notice: Any) -> Tuple[float, float]:
    """One slot of the closed loop: seconds busy, and seconds from its first request's turn to its last one's end."""
    began_s = busy_s = ended_s = None
    for index in todo:
        if interrupt.requested:
            break
        due_s = client.clock() if ended_s is None else ended_s
        began_s = due_s if began_s is None else began_s
        exchange = await client.send(lane.arm.origin, lane.jobs[index].request, due_s, client.timeout_s, evidence.limit_bytes,
                                     lambda: interrupt.requested)
        ended_s = exchange.ended_s
        busy_s = (busy_s or 0.0) + (ended_s - exchange.sent_s if exchange.sent_s is not None else 0.0)
        evidence.keep(index, exchange)
        notice(lane, exchange)
    return busy_s or 0.0, (ended_s - began_s) if ended_s is not None and began_s is not None else 0.0


async def _play(client: Client, lane: Lane, concurrency: int, interrupt: Interrupt, notice: Any) -> Played:
    slots = min(concurrency, len(lane.jobs)) or 1
    await client.open_ahead(lane.arm.origin, min(slots, SLOTS_OPENED_AHEAD))
    evidence, lateness_s = _Evidence(lane.jobs, slots), array("d")
    monitor = asyncio.ensure_future(_hiccups(lateness_s, client.clock))
    todo = iter(range(len(lane.jobs)))
    began_s = client.clock()
    spans = await asyncio.gather(*(_slot(client, lane, todo, evidence, interrupt, notice) for _ in range(slots)))
    monitor.cancel()
    wall_s = client.clock() - began_s
    span_s = sum(span for _, span in spans)
    return Played(evidence.finished(), wall_s, _p99(lateness_s), sum(busy for busy, _ in spans) / span_s if span_s else None, evidence.decoded_early)


def play(client: Client, lane: Lane, concurrency: int, interrupt: Interrupt, notice: Any) -> Played:
    """Replay one lane, `concurrency` requests at a time."""
    with quiet_collector():
        return client.run(_play(client, lane, concurrency, interrupt, notice))


async def _play_in_turn(client: Client, lanes: Sequence[Lane], interrupt: Interrupt, notice: Any, keep: Any) -> List[Played]:
    for lane in lanes:
        await client.open_ahead(lane.arm.origin, 1)
    kept: List[List[Reply]] = [[] for _ in lanes]
    wall_s, busy_s, lateness_s = [0.0] * len(lanes), [0.0] * len(lanes), array("d")
    monitor = asyncio.ensure_future(_hiccups(lateness_s, client.clock))
    for turn in range(max(len(lane.jobs) for lane in lanes)):
        order = range(len(lanes)) if turn % 2 == 0 else range(len(lanes) - 1, -1, -1)
        for place in order:
            lane = lanes[place]
            if interrupt.requested or turn >= len(lane.jobs):
                continue
            job = lane.jobs[turn]
            exchange = await client.send(lane.arm.origin, job.request, client.clock(), client.timeout_s, None, lambda: interrupt.requested)
            wall_s[place] += exchange.ended_s - exchange.due_s
            busy_s[place] += exchange.ended_s - exchange.sent_s if exchange.sent_s is not None else 0.0
            reply = read_reply(exchange, job.prompt.id, job.repeat)     # nothing is in flight: understanding disturbs nobody
            kept[place].append(reply)
            keep(lane, reply)
            notice(lane, exchange)
    monitor.cancel()
    hiccup_s = _p99(lateness_s)
    return [Played(tuple(replies), wall, hiccup_s, busy / wall if wall else None, False) for replies, wall, busy in zip(kept, wall_s, busy_s)]


def play_in_turn(client: Client, lanes: Sequence[Lane], interrupt: Interrupt, notice: Any, keep: Any) -> List[Played]:
    """Replay several lanes one request at a time, prompt by prompt: A B, B A, ... so that drift cancels in each pair.

    A lane's wall time is the time in which its own server had a request to answer.
    """
    with quiet_collector():
        return client.run(_play_in_turn(client, lanes, interrupt, notice, keep))


def now_utc() -> str:
    """The wall time as ISO-8601 UTC: for labels, never for durations."""
    return datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def pass_of(client: Client, lane: Lane, played: Played, facts: Mapping[str, Any], before: MetricsPage) -> Pass:
    """A replayed lane with its acceptance; the counters are read again until they hold our requests' tokens."""
    replies = played.replies
    done = [reply for reply in replies if reply.ok]
    counts = [reply.completion_tokens for reply in done]
    tokens = None if None in counts or not counts else sum(count or 0 for count in counts)
    model = lane.arm.server.model
    after = _settled(client, lane.arm, before, model, tokens)
    counters = acceptance_from_counters(before, after, model, len(done), tokens if len(done) == len(replies) else None)
    acceptance = acceptance_of_pass(replies, counters, lane.arm.server.speculating)
    caveats = pass_caveats(replies, played, before, after, model)
    return Pass(lane.arm.server.label, replies=replies, wall_s=played.wall_s, acceptance=acceptance,
                counters_delta=speculation_delta(before, after), hiccup_p99_s=played.hiccup_p99_s, load_kept=played.load_kept,
                caveats=tuple(caveats), **facts)


def _settled(client: Client, arm: Arm, before: MetricsPage, model: str, tokens: Optional[int]) -> MetricsPage:
    page = scrape(client, arm.metrics_doors)
    for _ in range(5):
        generated = _delta(before, page, _GENERATED, model).total
        if page.problem or before.problem or tokens is None or generated is None or generated >= tokens or restarted(before, page):
            break
        client.run(asyncio.sleep(SETTLE_S))
        page = scrape(client, arm.metrics_doors)
    return page


def pass_caveats(replies: Sequence[Reply], played: Played, before: MetricsPage, after: MetricsPage, model: str) -> List[Caveat]:
    """What the numbers of a pass do not mean, from what was seen in it; pure."""
    caveats = []
    done = [reply for reply in replies if reply.ok]
    failures = Counter(reply.error for reply in replies if reply.error is not None)
    for message, count in failures.most_common(KINDS_OF_FAILURES_TOLD):
        caveats.append(Caveat(f"{count} of {len(replies)} requests failed: {message}.", "They are left out of rates and comparisons."))
    if len(failures) > KINDS_OF_FAILURES_TOLD:
        others = sum(failures.values()) - sum(count for _, count in failures.most_common(KINDS_OF_FAILURES_TOLD))
        caveats.append(Caveat(f"{others} more of {len(replies)} requests failed, in {len(failures) - KINDS_OF_FAILURES_TOLD} more ways.", "Look at the run file."))
    if done and all(not reply.content and not reply.tool_calls and reply.reasoning for reply in done):
        caveats.append(Caveat("No answer text: thinking used up the tokens of every request.", "Raise --max-tokens, or use --no-think for both servers."))
    if any(reply.completion_tokens is None for reply in done):
        caveats.append(Caveat("The server did not count its tokens: tokens a second are left out.", "Let it send usage (stream_options.include_usage)."))
    if any(_counts_disagree(reply) for reply in done):
        caveats.append(Caveat("The server's usage disagrees with its own count or with the token ids that it sent.",
                              "Tokens a second rest on its usage; ask its makers."))
    if any(reply.damaged for reply in done):
        caveats.append(Caveat("Some answers hold bytes that are no UTF-8; they are kept escaped.", "Look at the run file."))
    resent = sum(reply.resent for reply in replies)
    if resent:
        caveats.append(Caveat(f"{resent} of {len(replies)} requests were sent twice: the server had closed the connection kept for them.",
                              "Their times count from the second sending; its counters may hold them twice."))
    share = cached_share(replies)
    hit_rate = prefix_hit_rate(before, after, model) if not (before.problem or after.problem) else None
    cached = max(share or 0.0, hit_rate or 0.0)
    if cached > 0.5:
        caveats.append(Caveat(f"{cached:.0%} of the prompt tokens came from a cache: TTFT is a repeat's.", "Use fresh prompts, or switch the prompt cache off on both servers."))
    if played.decoded_early:
        caveats.append(Caveat(f"The pass's answers filled {PASS_MEMORY_BYTES >> 20} MiB: some were understood while others ran.", "Use fewer prompts a level."))
    return caveats + _hiccup_caveats(done, played.hiccup_p99_s)


def _counts_disagree(reply: Reply) -> bool:
    """Whether the usage is held against by more token ids than it counts, or by another count of llama.cpp's own timings."""
    own = _count((reply.engine_timings or {}).get("predicted_n"))
    return reply.token_source == "usage" and (len(reply.token_ids or ()) > (reply.completion_tokens or 0)
                                              or own is not None and own != reply.completion_tokens)


def _hiccup_caveats(done: Sequence[Reply], hiccup_s: Optional[float]) -> List[Caveat]:
    gaps = sorted(gap for reply in done[:64] for gap in reply.chunk_gaps_s if gap > 0.0005)
    limit_s = min(0.005, max(0.002, gaps[len(gaps) // 2] / 10)) if gaps else 0.005     # 2 ms is what an idle loop is late anyway
    if hiccup_s is None or hiccup_s <= limit_s:
        return []
    return [Caveat(f"This client itself woke up to {hiccup_s * 1000:.1f} ms late (p99): stamps are no better than that.",
                   "Close other programs, or measure from another machine.")]


# ======================================================================================================================
# 9. Comparison (pure)
# ======================================================================================================================
#
# Same bytes? Where do they first differ? What kind of difference?

CHANNELS = ("reasoning", "content", "tool_calls")   # in the order in which a model writes them
TAIL_CHARS = 60

# Marks that steer a chat template: a reader never sees one of them unless something has gone wrong.
SPECIAL_TOKEN = re.compile(r"<\|[\w/-]{1,40}\|>|</s>|\[/?INST\]|<(?:start|end)_of_turn>|<(?:eos|bos|pad|unk)>|</?think>"
                           r"|</?tool_calls?>")
LOOP_COPIES = 4         # a tail of fewer copies is emphasis or a refrain
LOOP_CHARS = 40         # "........" under a heading is no loop
LOOP_PROBE_CHARS = 16   # a loop is looked for where the last 16 characters stand once more
PASSAGE_WORDS = 4       # the shortest passage by which another prompt's answer is recognised
PASSAGE_LETTERS = 15    # "No, it is not" is four words, and everybody's
PASSAGE_SURE_WORDS = 20     # "Let me know if you have any other questions" closes many an answer: short proves nothing
# Words; scripts that are written without blanks count each character as one.
WORD = re.compile(r"[぀-ヿ㐀-鿿가-힯]|[^\W぀-ヿ㐀-鿿가-힯]+")

Passages = Mapping[Tuple[str, ...], Optional[str]]


def channel_text(reply: Reply, channel: str) -> Optional[str]:
    """One channel's text as it is compared; tool calls as one line `name(arguments)` each. None: it was not kept."""
    if channel == "tool_calls":
        calls = reply.tool_calls
        return None if calls is None else "\n".join(f"{call.name}({call.arguments})" for call in calls)
    return reply.content if channel == "content" else reply.reasoning


def text_bytes(text: str) -> bytes:
    """The bytes that came from the server: UTF-8, and what was no UTF-8 as it was."""
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:      # half of a surrogate pair, escaped in the server's JSON
        return text.encode("utf-8", "surrogatepass")


def digest_of(text: str) -> Dict[str, Any]:
    """What stands for a channel's text that is not kept: its SHA-256 and its length in bytes and characters."""
    data = text_bytes(text)
    return {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data), "chars": len(text)}


def common_prefix(one: Sequence[Any], other: Sequence[Any]) -> int:
    """How many leading items two strings (or tuples) share. Halves slices, so a megabyte costs about a megabyte."""
    low, high = 0, min(len(one), len(other))
    if one[:high] == other[:high]:
        return high
    while high - low > 1:       # all before `low` is equal; a difference lies before `high`
        middle = (low + high) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle
    return low


def incomparable(baseline: Reply, other: Reply) -> Optional[str]:
    """Why two answers cannot be held against each other; None: they can.

    Two empty answers prove nothing. Two that ran out of tokens while thinking are compared by their reasoning.
    """
    for reply, name in ((baseline, BASELINE), (other, "other")):
        if not reply.ok:
            return f"{name} failed: {reply.error}"
    if _is_empty(baseline) and _is_empty(other):
        return "both answers are empty: nothing to compare"
    return None


def _is_empty(reply: Reply) -> bool:
    return not any(_channel_digest(reply, channel)["bytes"] for channel in CHANNELS)


def _texts_kept(*replies: Reply) -> bool:
    return all(channel_text(reply, channel) is not None for reply in replies for channel in CHANNELS)


def _channel_digest(reply: Reply, channel: str) -> Mapping[str, Any]:
    """A channel's digest, from its text or as it was kept; a channel without either was empty."""
    text = channel_text(reply, channel)
    if text is None and reply.digests and channel in reply.digests:
        return reply.digests[channel]
    return digest_of(text or "")


def differ(baseline: Reply, other: Reply, others_baselines: Sequence[Reply] = ()) -> Optional[Difference]:
    """Where and how `other` parts from the baseline's answer to the same prompt. None: not at all, byte for byte.

    `others_baselines` are the baseline's answers to other prompts: with them, text that belongs to another request is
    recognised. Whether the two can be compared at all is `incomparable`'s question.
    """
    if _same(baseline, other):
        return None
    return _difference(baseline, other, passages_of(others_baselines))


def _same(baseline: Reply, other: Reply) -> bool:
    if _texts_kept(baseline, other):
        return all(channel_text(baseline, channel) == channel_text(other, channel) for channel in CHANNELS)
    return all(_channel_digest(baseline, channel)["sha256"] == _channel_digest(other, channel)["sha256"]
               for channel in CHANNELS)


def _difference(baseline: Reply, other: Reply, passages: Passages) -> Difference:
    if not _texts_kept(baseline, other):
        return _difference_of_digests(baseline, other)
    channel = next(name for name in CHANNELS if channel_text(baseline, name) != channel_text(other, name))
    here, there = channel_text(baseline, channel) or "", channel_text(other, channel) or ""
    at = common_prefix(here, there)
    kind, detail = _kind(baseline, other, channel, at, passages)
    return Difference(
        prompt_id=baseline.prompt_id, repeat=baseline.repeat, kind=kind, channel=channel,
        first_byte=len(text_bytes(here[:at])) + common_prefix(text_bytes(here[at:at + 1]), text_bytes(there[at:at + 1])),
        first_char=at, prefix_share=_prefix_share(baseline, channel, at),
        baseline_tail=here[at:at + TAIL_CHARS], other_tail=there[at:at + TAIL_CHARS],
        detail="; ".join(filter(None, [detail, _token_detail(baseline, other), _finish_detail(baseline, other)])),
        finish_reasons=(baseline.finish_reason, other.finish_reason))


def _difference_of_digests(baseline: Reply, other: Reply) -> Difference:
    channel = next(name for name in CHANNELS
                   if _channel_digest(baseline, name)["sha256"] != _channel_digest(other, name)["sha256"])
    kind = "empty" if _is_empty(baseline) or _is_empty(other) else "fork"
    return Difference(prompt_id=baseline.prompt_id, repeat=baseline.repeat, kind=kind, channel=channel, first_byte=None,
                      first_char=None, prefix_share=0.0, baseline_tail="", other_tail="",
                      detail="; ".join(filter(None, ["the texts were not kept: only that they differ is known",
                                                     _finish_detail(baseline, other)])),
                      finish_reasons=(baseline.finish_reason, other.finish_reason))


def _prefix_share(baseline: Reply, channel: str, at: int) -> float:
    """Share of the baseline's characters, all channels in the order of writing, before the first difference."""
    lengths = {name: len(channel_text(baseline, name) or "") for name in CHANNELS}
    before = sum(lengths[name] for name in CHANNELS[:CHANNELS.index(channel)])
    total = sum(lengths.values())
    return (before + at) / total if total else 0.0


def _token_detail(baseline: Reply, other: Reply) -> str:
    if baseline.token_ids is None or other.token_ids is None:
        return ""
    return f"token {common_prefix(baseline.token_ids, other.token_ids) + 1}"


def _finish_detail(baseline: Reply, other: Reply) -> str:
    """`stop -> length, 27 -> 512 tokens`, where the two ends differ."""
    parts = []
    if baseline.finish_reason != other.finish_reason:
        parts.append(f"{baseline.finish_reason} -> {other.finish_reason}")
        if None not in (baseline.completion_tokens, other.completion_tokens):
            parts.append(f"{baseline.completion_tokens} -> {other.completion_tokens} tokens")
    return ", ".join(parts)


def _kind(baseline: Reply, other: Reply, channel: str, at: int, passages: Passages) -> Tuple[str, str]:
    """What happened, and in words. The most telling kind first: a leaked mark is also a fork."""
    here, there = channel_text(baseline, channel) or "", channel_text(other, channel) or ""
    if _is_empty(other) or _is_empty(baseline):
        return "empty", "the other answer is empty" if _is_empty(other) else "the baseline's answer is empty"
    mark = _leaked_mark(baseline, other)
    if mark:
        return "special tokens", f"{mark} in the text"
    if _arguments_lost(baseline, other):
        return "lost arguments", "a tool call's arguments are missing or no longer parse"
    if not here or not there:
        return "channel", f"{channel} only from the {'other' if there else 'baseline'}"
    loop = tail_loop(there)
    if loop and not tail_loop(here) and loop.unit * 3 not in here:
        return "loop", f"tail repeats (period {len(loop.unit)}), {loop.copies} copies"
    owner = _owner_of(there[_word_start(there, at):], baseline, other, passages)
    if owner:
        return "foreign text", f"as in the baseline's answer to {owner}"
    if at == len(here):
        return _kind_past_the_end(baseline, len(text_bytes(there[at:])))
    if at == len(there) and other.finish_reason != "length":
        return "surplus", f"ends {len(text_bytes(here[at:]))} bytes before the baseline"
    return "fork", _splice_detail(here, there, at)


def _kind_past_the_end(baseline: Reply, surplus_bytes: int) -> Tuple[str, str]:
    if baseline.finish_reason == "length":      # no stop was passed: the baseline was cut
        return "fork", f"{surplus_bytes} bytes more; the baseline was cut by its token limit"
    return "surplus", f"{surplus_bytes} surplus bytes: continues past the stop"


def _splice_detail(here: str, there: str, at: int) -> str:
    """A piece dropped, doubled or put in, where all before and behind it is the same."""
    short, long = (there, here) if len(there) < len(here) else (here, there)
    piece = long[at:at + len(long) - len(short)]
    if not piece or long[at + len(piece):] != short[at:]:
        return ""
    if long is here:
        return f"only {piece[:TAIL_CHARS]!r} is missing"
    return f"only {piece[:TAIL_CHARS]!r} is {'doubled' if there[:at].endswith(piece) else 'put in'}"


def _leaked_mark(baseline: Reply, other: Reply) -> Optional[str]:
    """The first template mark in the other's text that the baseline's text does not have."""
    for channel in CHANNELS:
        there = channel_text(other, channel) or ""
        if "<" in there or "[" in there:
            known = set(SPECIAL_TOKEN.findall(channel_text(baseline, channel) or ""))
            leaked = next((mark for mark in SPECIAL_TOKEN.findall(there) if mark not in known), None)
            if leaked:
                return leaked
    return None


def _arguments_lost(baseline: Reply, other: Reply) -> bool:
    """Whether a call that both make has arguments that parse at the baseline's and do not at the other's.

    An answer cut by the token limit loses arguments honestly.
    """
    if other.finish_reason == "length":
        return False
    return any(ours.name == theirs.name and ours.arguments.strip() not in ("", "{}")
               and _json_object(ours.arguments) is not None and _json_object(theirs.arguments) is None
               for ours, theirs in zip(baseline.tool_calls or (), other.tool_calls or ()))


def _json_object(text: str) -> Optional[Dict[str, Any]]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


class Loop(NamedTuple):
    """A tail that repeats: its smallest unit, and how many whole copies of it end the text."""

    unit: str
    copies: int


def tail_loop(text: str) -> Optional[Loop]:
    """The unit that a text's end repeats at least 4 times over at least 40 characters. None: its end is no loop."""
    probe = text[-LOOP_PROBE_CHARS:]
    end = len(text) - 1
    for _ in range(8):      # a unit may hold its own last 16 characters twice: then the next place is the period
        place = text.rfind(probe, 0, end)
        if place < 0:
            return None
        period = len(text) - len(probe) - place
        length = period + _common_suffix(text, text[:-period])
        if length >= max(LOOP_COPIES * period, LOOP_CHARS):
            return Loop(text[-period:], length // period)
        end = place + len(probe) - 1
    return None


def _common_suffix(one: str, other: str) -> int:
    return common_prefix(one[::-1], other[::-1])


def passages_of(replies: Iterable[Reply]) -> Passages:
    """Every run of four words in these answers, with the one prompt whose answer has it; None: several have it."""
    owners: Dict[Tuple[str, ...], Optional[str]] = {}
    for reply in replies:
        for passage in _passages(_words_of(reply)):
            if owners.setdefault(passage, reply.prompt_id) != reply.prompt_id:
                owners[passage] = None
    return owners


def _passages(words: Sequence[str]) -> Iterator[Tuple[str, ...]]:
    return zip(*(words[start:] for start in range(PASSAGE_WORDS)))


def _words_of(reply: Reply) -> List[str]:
    return WORD.findall("\n".join(channel_text(reply, channel) or "" for channel in CHANNELS))


def _word_start(text: str, at: int) -> int:
    while at > 0 and text[at - 1].isalnum():
        at -= 1
    return at


def _owner_of(tail: str, baseline: Reply, other: Reply, passages: Passages) -> Optional[str]:
    """The prompt whose baseline answer most of this tail is taken from, none of it being in the prompt's own answer."""
    if not passages:
        return None
    words = WORD.findall(tail)
    own = set(_passages(_words_of(baseline)))
    taken: Dict[str, set] = {}
    for place, passage in enumerate(_passages(words)):
        owner = passages.get(passage)
        if owner is not None and owner != baseline.prompt_id and passage not in own:
            taken.setdefault(owner, set()).update(range(place, place + PASSAGE_WORDS))
    owner = max(taken, key=lambda name: len(taken[name]), default=None)
    if owner is None:
        return None
    letters = sum(len(words[place]) for place in taken[owner])
    if letters < PASSAGE_LETTERS or 2 * len(taken[owner]) <= len(words):
        return None
    most_of_the_answer = 2 * len(taken[owner]) > len(_words_of(other))
    return owner if most_of_the_answer or len(taken[owner]) >= PASSAGE_SURE_WORDS else None


def agree(baseline: Pass, other: Pass, passages: Optional[Passages] = None) -> Agreement:
    """How far two passes agree: answers paired by prompt and repeat, never by position.

    `passages` are those of all the baseline's answers; left out, they are made where something differs.
    """
    ours, theirs = by_key(baseline.replies), by_key(other.replies)
    left_out = [(key[0], f"no answer from {name}") for side, facing, name in (
        (ours, theirs, other.server), (theirs, ours, baseline.server)) for key in side if key not in facing]
    differences, shares, identical = [], [], 0
    for key in (key for key in ours if key in theirs):
        reason = incomparable(ours[key], theirs[key])
        if reason:
            left_out.append((key[0], reason))
            continue
        if _same(ours[key], theirs[key]):
            identical += 1
            shares.append((*key, 1.0))
            continue
        passages = passages_of(baseline.completed) if passages is None else passages
        differences.append(_difference(ours[key], theirs[key], passages))
        shares.append((*key, differences[-1].prefix_share))
    where_known = all(difference.first_char is not None for difference in differences)
    return Agreement(pairs=len(shares), identical=identical,
                     prefix_agreement=sum(share for *_, share in shares) / len(shares) if shares and where_known else None,
                     differences=tuple(differences), incomparable=tuple(left_out),
                     prefix_shares=tuple(shares) if where_known else ())


def by_key(replies: Iterable[Reply]) -> Dict[Tuple[str, int], Reply]:
    """Replies by prompt id and repeat; the first one where there are several."""
    found: Dict[Tuple[str, int], Reply] = {}
    for reply in replies:
        found.setdefault((reply.prompt_id, reply.repeat), reply)
    return found


# --- Task accuracy

NUMBER = re.compile(r"(?<![\w.])[-+]?\$?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|(?<![\w.])[-+]?\$?\.\d+")


def grade(prompt: Prompt, reply: Reply) -> Optional[bool]:
    """Whether an answer is right. None: it cannot be graded (no answer known, a failed request, texts not kept).

    A number is right when it is the last one in the text, as GSM8K is graded (arXiv 2110.14168); for closed questions,
    which are answered in a sentence, anywhere in it. Words are right as a whole word or phrase, in any case. A tool call is
    right when the first call names the function and brings a JSON object with the keys that the tool requires.
    """
    if not reply.ok or prompt.answer is None:
        return None
    if isinstance(prompt.answer, Mapping):
        return _grade_call(prompt, reply)
    if reply.content is None:
        return None
    wanted = prompt.answer if isinstance(prompt.answer, (list, tuple)) else [prompt.answer]
    anywhere = "closed" in (prompt.workload, prompt.category)
    return any(_says(reply.content, str(one), anywhere) for one in wanted)


def _says(text: str, wanted: str, anywhere: bool) -> bool:
    number = _number(wanted)
    if number is None:
        phrase = r"\s+".join(re.escape(word) for word in wanted.split())
        return bool(phrase) and re.search(rf"(?<!\w){phrase}(?!\w)", text, re.IGNORECASE) is not None
    found = _numbers(text.rpartition("####")[2])
    return any(_close(number, one) for one in (found if anywhere else found[-1:]))


def _close(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=1e-9, abs_tol=1e-9)


def _numbers(text: str) -> List[float]:
    """The numbers in a text: 1,234 and $5 and -3.50 and LaTeX's 1{,}000; a full stop behind one is not part of it."""
    plain = text.replace("{,}", ",").replace("\\$", "$").replace("−", "-")
    return [float(found.replace("$", "").replace(",", "")) for found in NUMBER.findall(plain)]


def _number(text: str) -> Optional[float]:
    found = _numbers(text)
    bare = re.fullmatch(r"[-+$\s\d.,{}\\−%]+", text)
    return found[0] if bare and len(found) == 1 else None


def _grade_call(prompt: Prompt, reply: Reply) -> Optional[bool]:
    if reply.tool_calls is None or "function" not in prompt.answer:
        return None
    if not reply.tool_calls or reply.tool_calls[0].name != prompt.answer["function"]:
        return False
    arguments = _json_object(reply.tool_calls[0].arguments)
    return arguments is not None and all(key in arguments for key in _required_keys(prompt))


def _required_keys(prompt: Prompt) -> Sequence[str]:
    for tool in prompt.tools or ():
        function = tool.get("function", tool)
        if function.get("name") == prompt.answer["function"]:
            return (function.get("parameters") or {}).get("required") or ()
    return ()


def grades(prompts: Mapping[str, Prompt], replies: Iterable[Reply]) -> Dict[Tuple[str, int], bool]:
    """Right or wrong, by prompt id and repeat, of every reply that can be graded."""
    marks = {(reply.prompt_id, reply.repeat): grade(prompts[reply.prompt_id], reply)
             for reply in replies if reply.prompt_id in prompts}
    return {key: mark for key, mark in marks.items() if mark is not None}


def accuracy(prompts: Mapping[str, Prompt], replies: Iterable[Reply]) -> Optional[Tuple[int, int]]:
    """(correct, of) over the replies that can be graded; None: none can."""
    marks = grades(prompts, replies)
    return (sum(marks.values()), len(marks)) if marks else None


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

CONFIDENCE = 0.95
FEWEST_PAIRS = 3        # two pairs have one degree of freedom: their interval says nothing
EXACT_SIGNS = 20        # up to here every assignment of signs is counted, in two halves of 2^10


def quantile(values: Iterable[float], share: float) -> Optional[float]:
    """The value below which `share` (0..1) of the values lie, interpolated linearly between neighbours.

    Hyndman and Fan's type 7, as NumPy and spreadsheets compute it; None: no values.
    """
    ordered = sorted(values)
    if not ordered:
        return None
    place = share * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


def normal_cdf(z: float) -> float:
    """Share of a standard normal distribution below z, exact also far out in the lower tail."""
    return 0.5 * math.erfc(-z / math.sqrt(2))


def wilson(correct: int, of: int, confidence: float = CONFIDENCE) -> Optional[Tuple[float, float]]:
    """The interval for a share of which `correct` of `of` were seen (Wilson 1927), within 0..1. None: nothing was seen."""
    if not of:
        return None
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    share, weight = correct / of, 1 + z * z / of
    middle = (share + z * z / (2 * of)) / weight
    half = z * math.sqrt(share * (1 - share) / of + z * z / (4 * of * of)) / weight
    return 0.0 if not correct else middle - half, 1.0 if correct == of else middle + half


def binomial_tail(successes: int, of: int, share: float) -> float:
    """Probability of at least `successes` in `of` independent tries that each succeed with probability `share`."""
    if successes <= 0:
        return 1.0
    return min(1.0, math.fsum(binomial(k, of, share) for k in range(successes, of + 1)))


def binomial(successes: int, of: int, share: float) -> float:
    """Probability of exactly so many successes, 0..1."""
    if share <= 0 or share >= 1:
        return float(successes == (of if share >= 1 else 0))
    log_ways = math.lgamma(of + 1) - math.lgamma(successes + 1) - math.lgamma(of - successes + 1)
    return math.exp(log_ways + successes * math.log(share) + (of - successes) * math.log1p(-share))


def mcnemar_p(only_one: int, only_other: int) -> float:
    """Two-sided exact p of McNemar's test: would a fair coin split the discordant pairs so unevenly? (McNemar 1947)"""
    return min(1.0, 2 * binomial_tail(max(only_one, only_other), only_one + only_other, 0.5))


def sign_flip_p(differences: Sequence[float]) -> float:
    """Two-sided p of the paired sign-flip test: is the sum so far from 0 if each difference's sign were a coin's?

    Fisher's randomisation test for pairs. Exact up to 20 differences other than 0; beyond, the saddlepoint
    approximation of the same distribution (Lugannani and Rice 1980), which is deterministic and good far out in the tail.
    """
    sizes = [abs(difference) for difference in differences if difference]
    total = abs(math.fsum(differences))
    if not sizes or total <= 1e-12 * math.fsum(sizes):
        return 1.0
    tail = _exact_sign_tail if len(sizes) <= EXACT_SIGNS else _saddlepoint_sign_tail
    return min(1.0, 2 * tail(sizes, total))


def _exact_sign_tail(sizes: Sequence[float], total: float) -> float:
    """Share of all 2^n sums of signed sizes that reach `total`: pairs of half sums, one half sorted."""
    half = len(sizes) // 2
    left, right = _signed_sums(sizes[:half]), sorted(_signed_sums(sizes[half:]))
    reach = total - 1e-9 * math.fsum(sizes)     # a tie counts as reached, whatever the order of summation
    count = sum(len(right) - bisect.bisect_left(right, reach - one) for one in left)
    return count / 2 ** len(sizes)


def _signed_sums(sizes: Sequence[float]) -> List[float]:
    sums = [0.0]
    for size in sizes:
        sums = [one + sign for one in sums for sign in (size, -size)]
    return sums


def _saddlepoint_sign_tail(sizes: Sequence[float], total: float) -> float:
    """P(sum >= total), from the cumulants' function K(t) = sum of log cosh(t size) at the point where K'(t) = total."""
    if total >= math.fsum(sizes) * (1 - 1e-12):
        return 0.5 ** len(sizes)
    total -= min(sizes)     # sums of equal sizes lie 2 sizes apart: count from half way to the sum below
    low, high = 0.0, 1.0 / max(sizes)
    while _tilted_sum(sizes, high) < total:
        low, high = high, 2 * high
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if _tilted_sum(sizes, middle) < total else (low, middle)
    bent = math.fsum(low * size + math.log1p(math.exp(-2 * low * size)) - math.log(2) for size in sizes)
    spread = math.fsum((size / math.cosh(min(low * size, 300.0))) ** 2 for size in sizes)
    root, lattice = math.sqrt(max(0.0, 2 * (low * total - bent))), low * math.sqrt(spread)
    if root < 1e-3 or lattice == 0:
        return normal_cdf(-total / math.sqrt(math.fsum(size * size for size in sizes)))
    density = math.exp(-root * root / 2) / math.sqrt(2 * math.pi)
    return min(1.0, max(0.5 ** len(sizes), normal_cdf(-root) + density * (1 / lattice - 1 / root)))


def _tilted_sum(sizes: Sequence[float], tilt: float) -> float:
    return math.fsum(size * math.tanh(tilt * size) for size in sizes)


def null_share(noise: float, excess: float) -> float:
    """Of the answers that only one of two passes alters, the share that is the second's, if it alters `excess` times as often.

    `noise` is the share of answers that the first alters; "times as often" is meant a token: (1 - noise)^excess stay as they
    are. With excess 1 this is McNemar's fair coin.
    """
    if noise >= 1:
        return 0.5
    more = 1 - (1 - noise) ** excess
    only_second, only_first = more * (1 - noise), noise * (1 - more)
    return only_second / (only_second + only_first) if only_second + only_first else 0.5


@functools.lru_cache(maxsize=None)
def smallest_detectable(pairs: int, noise: float, alpha: float, excess: float = 1.0, power: float = 0.8) -> Optional[float]:
    """The smallest share of altered answers that McNemar's test would notice with this power, 0..1. None: not even all.

    `noise` is the share of answers that differ without any fault, up to `excess` times as often is tolerated, and a fault is
    taken to alter an answer regardless of it.
    """
    coin = null_share(noise, excess)

    def notices(altered: float) -> bool:
        return _mcnemar_power(pairs, noise, noise + (1 - noise) * altered, coin, alpha) >= power

    if not pairs or not notices(1.0):
        return None
    low, high = 0.0, 1.0
    while high - low > 0.005:
        middle = (low + high) / 2
        low, high = (low, middle) if notices(middle) else (middle, high)
    return high


def _mcnemar_power(pairs: int, noise: float, differing: float, coin: float, alpha: float) -> float:
    """Probability that the one-sided exact test reaches `alpha`, the two kinds of difference being independent."""
    more, fewer = differing * (1 - noise), noise * (1 - differing)
    discordant = more + fewer
    if discordant <= 0:
        return 0.0
    return math.fsum(binomial(count, pairs, discordant)
                     * binomial_tail(_critical(count, coin, alpha), count, more / discordant)
                     for count in range(pairs + 1) if binomial(count, pairs, discordant) > 1e-6)


@functools.lru_cache(maxsize=None)
def _critical(tosses: int, coin: float, alpha: float) -> int:
    """The fewest heads whose tail is at most alpha (one more than the tosses: none is)."""
    tail, heads = 0.0, tosses + 1
    while heads > 0 and tail + binomial(heads - 1, tosses, coin) <= alpha:
        heads -= 1
        tail += binomial(heads, tosses, coin)
    return heads


# --- Ratios of speeds


class Row(NamedTuple):
    """One prompt's share in a ratio: amount over time (or a speed over 1) on either side, and who was asked first."""

    baseline_amount: float
    baseline_s: float
    other_amount: float
    other_s: float
    baseline_first: Optional[bool] = None


def ratio_of_sums(rows: Sequence[Row]) -> Optional[Ratio]:
    """(other amounts / other seconds) / (baseline amounts / baseline seconds), with its 95 % interval over prompts.

    The interval is Student's on the logarithm, its standard error from the jackknife (leaving out a prompt at a time), since
    a ratio of sums is no mean. Prompts that take long weigh more, so the degrees of freedom are those of Kish's effective
    sample size. What a drifting machine gives to whoever is asked first cancels in the ratio, and is taken out of its error.
    Coverage is measured in tests/losslessness: 93 to 97 % from 6 prompts on. None: nothing on one side.
    """
    sums = [math.fsum(column) for column in zip(*(row[:4] for row in rows))]
    if not rows or min(sums) <= 0:
        return None
    value = math.exp(_log_ratio(sums))
    half = _half_width(rows, sums) if len(rows) >= FEWEST_PAIRS else None
    if half is None:
        return Ratio(value, None, None, len(rows))
    return Ratio(value, value * math.exp(-half), value * math.exp(min(half, 700.0)), len(rows))


def _log_ratio(sums: Sequence[float]) -> float:
    return math.log(sums[2]) - math.log(sums[3]) - math.log(sums[0]) + math.log(sums[1])


def _half_width(rows: Sequence[Row], sums: Sequence[float]) -> Optional[float]:
    rests = [[total - one for total, one in zip(sums, row[:4])] for row in rows]
    if min(min(rest) for rest in rests) <= 0:       # one prompt is all there is of a sum
        return None
    without = [_log_ratio(rest) for rest in rests]
    centre = math.fsum(without) / len(rows)
    deviations = [one - centre for one in without]
    taken = _take_out_order(deviations, [row.baseline_first for row in rows])
    spread = math.fsum(one * one for one in deviations) * (len(rows) - 1) / (len(rows) - 1 - taken)
    freedom = _effective_rows(rows, sums) - 1 - taken
    return student_quantile(freedom) * math.sqrt((len(rows) - 1) / len(rows) * spread)


def _take_out_order(deviations: List[float], baseline_first: Sequence[Optional[bool]]) -> int:
    """Removes from the deviations what goes with the order of asking; the degrees of freedom that took (0 or 1)."""
    if len(deviations) < 2 * FEWEST_PAIRS or None in baseline_first or len(set(baseline_first)) < 2:
        return 0
    middle = sum(map(bool, baseline_first)) / len(deviations)
    signs = [first - middle for first in map(bool, baseline_first)]
    slope = math.fsum(map(operator.mul, signs, deviations)) / math.fsum(sign * sign for sign in signs)
    deviations[:] = [one - slope * sign for one, sign in zip(deviations, signs)]
    return 1


def _effective_rows(rows: Sequence[Row], sums: Sequence[float]) -> float:
    """How many equal prompts these unequal ones are worth: (sum of weights)^2 / sum of squared weights (Kish 1965)."""
    weights = [math.fsum(one / total for one, total in zip(row[:4], sums)) for row in rows]
    return math.fsum(weights) ** 2 / math.fsum(weight * weight for weight in weights)


def student_quantile(freedom: float, confidence: float = CONFIDENCE) -> float:
    """How many standard errors the interval spans to each side, by degrees of freedom (>= 1, interpolated)."""
    below = max(1, math.floor(freedom))
    low = _student_quantile(below, confidence)
    return low + max(0.0, freedom - below) * (_student_quantile(below + 1, confidence) - low)


@functools.lru_cache(maxsize=None)
def _student_quantile(freedom: int, confidence: float) -> float:
    if freedom > 400:
        return NormalDist().inv_cdf((1 + confidence) / 2)
    low, high = 0.0, 1000.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _student_within(middle, freedom) < confidence else (low, middle)
    return high


def _student_within(t: float, freedom: int) -> float:
    """P(|T| <= t) for whole degrees of freedom (Abramowitz and Stegun 26.7.3 and 26.7.4)."""
    angle = math.atan(t / math.sqrt(freedom))
    square = math.cos(angle) ** 2
    odd = freedom % 2
    term = total = math.cos(angle) if odd else 1.0
    for step in range(2 + odd, freedom - 1, 2):
        term *= square * (step - 1) / step
        total += term
    if freedom == 1:
        total = 0.0
    return 2 / math.pi * (angle + math.sin(angle) * total) if odd else math.sin(angle) * total


def decode_ratio(baseline: Iterable[Reply], other: Iterable[Reply]) -> Optional[Ratio]:
    """Mean decode speed of the other server over the baseline's, on the prompts that both answered.

    Repeats of a prompt are averaged first: they are one pair. Repeats that came from a cache are left out: a drafter that
    remembers has seen them. None: not streamed, or tokens not counted.
    """
    ours, theirs = (_by_prompt(side, _fresh_speed) for side in (baseline, other))
    return ratio_of_sums([Row(_mean_amount(ours[key]), 1.0, _mean_amount(theirs[key]), 1.0,
                              _asked_first(ours[key], theirs[key])) for key in ours if key in theirs])


def _by_prompt(replies: Iterable[Reply], number: Callable[[Reply], Optional[float]]) -> Dict[str, List[Reply]]:
    """The completed replies for which this number is known, by prompt."""
    found: Dict[str, List[Reply]] = {}
    for reply in replies:
        if reply.ok and number(reply) is not None:
            found.setdefault(reply.prompt_id, []).append(reply)
    return found


def _fresh_speed(reply: Reply) -> Optional[float]:
    cached = reply.repeat > 0 and 2 * (reply.cached_tokens or 0) > (reply.prompt_tokens or 0)
    return None if cached else reply.decode_tokens_per_s


def _mean_amount(replies: Sequence[Reply]) -> float:
    return math.fsum(reply.decode_tokens_per_s or 0.0 for reply in replies) / len(replies)


def _asked_first(baseline: Sequence[Reply], other: Sequence[Reply]) -> Optional[bool]:
    """Whether the baseline was asked a prompt before the other was; None: unknown, or over several repeats neither."""
    if len(baseline) > 1 or len(other) > 1 or baseline[0].sent_s is None or other[0].sent_s is None:
        return None
    return baseline[0].sent_s < other[0].sent_s


def throughput_ratio(baseline: Pass, other: Pass) -> Optional[Ratio]:
    """Output throughput of the other pass over the baseline's: tokens of completed requests over wall time.

    The value is the passes'; its interval comes from the prompts that both answered (tokens over seconds to the end of the
    answer), since with a constant number of requests in flight the wall time is their sum over that number.
    """
    if not baseline.output_tokens_per_s or not other.output_tokens_per_s:
        return None
    value = other.output_tokens_per_s / baseline.output_tokens_per_s
    ours, theirs = (_by_prompt(side.replies, _timed_tokens) for side in (baseline, other))
    rows = [Row(*_work(ours[key]), *_work(theirs[key]), _asked_first(ours[key], theirs[key])) for key in ours if key in theirs]
    by_prompt = ratio_of_sums(rows)
    if by_prompt is None or by_prompt.low is None or by_prompt.high is None:
        return Ratio(value, None, None, len(rows))
    return Ratio(value, value * by_prompt.low / by_prompt.value, value * by_prompt.high / by_prompt.value, len(rows))


def _timed_tokens(reply: Reply) -> Optional[float]:
    return None if reply.e2el_s is None else reply.completion_tokens


def _work(replies: Sequence[Reply]) -> Tuple[float, float]:
    """Tokens, and seconds to the ends of the answers."""
    return (math.fsum(reply.completion_tokens or 0 for reply in replies), math.fsum(reply.e2el_s or 0.0 for reply in replies))


def half_width(ratio: Optional[Ratio]) -> Optional[float]:
    """Half the interval, as a share of the ratio itself: 0.02 is plus or minus 2 %. None: no interval."""
    if ratio is None or ratio.low is None or ratio.high is None:
        return None
    return (ratio.high - ratio.low) / 2 / ratio.value


def precise_enough(ratio: Optional[Ratio], precision: float) -> bool:
    """Whether measuring may stop: the interval's half width is at most `precision` (0.02: 2 %) of the ratio."""
    half = half_width(ratio)
    return half is not None and half <= precision * (1 + 1e-9)


def pairs_needed(ratio: Optional[Ratio], precision: Optional[float] = None, against: float = 1.0) -> Optional[int]:
    """How many more prompts would settle what is open; 0: nothing is. None: cannot be told from this.

    With a precision: until the half width is that small. Without: until the interval leaves `against` out, if the ratio
    stays where it is. Intervals shrink with the square root of the number of prompts.
    """
    if ratio is None or ratio.low is None or ratio.high is None:
        return None
    half = math.log(ratio.high / ratio.low) / 2
    wanted = math.log1p(precision) if precision else abs(math.log(ratio.value / against))
    if wanted <= 0:
        return None
    return max(0, math.ceil(ratio.pairs * ((half / wanted) ** 2 - 1)))


# ======================================================================================================================
# 11. Verdict (pure)
# ======================================================================================================================
#
# Speed: one word; answers: one word; each with reasons.
#
# Three yardsticks, since none suffices alone. The floor: how far the baseline agrees with itself. The margin: how far, at
# a fork, the other's token lies below the baseline's own choice. The ruler: how far rounding moves a log-probability on
# this very pair of servers. On doubt the word is `cannot tell`.

ALPHA = 0.01            # what chance may do to all tests of one cell together
TESTS = 3               # differing answers, prefix agreement, accuracy
NEAR_RULERS, NEAR_NATS = 4, 0.05    # a margin up to this many 99th percentiles of rounding, or nats, is a near tie
FAR_RULERS, FAR_NATS = 10, 0.15     # beyond this many (and nats) rounding does not reach
BLIND_NEAR_NATS, BLIND_FAR_NATS = 0.25, 1.0     # without a ruler: bfloat16 has moved logits by an eighth and a quarter
LONE_RULERS, LONE_NATS = 50, 1.0    # one fork so far down needs no company
STRAY_SHARE = 0.005     # of an honest server's forks, what may lie far all the same (a routing flip, an expert changed)
WIDE_SHARE = 0.02       # of an honest server's forks, what may lie beyond a near tie
EXCESS = 1.25           # verifying may round so many times as often as batching does (published: 68 % against 73 %)
FEWEST_POSITIONS = 30   # a ruler of fewer is none
EVEN_RULER = 50         # 99th percentile over median, of rounding that moves all positions alike (seen: 4 to 10 on a CPU, thousands in bfloat16)
FEWEST_TO_CONDEMN, OTHER_FUNCTION_NATS = 100, 0.3   # tenths of a nat, over enough positions: not the same function
FEWEST_FLOOR_PAIRS = 12
FEWEST_TEXTS = 6
# Of an honest server's differences, the share that look like each damage: a small model loops by itself, and the end of
# an answer is a near tie more often than its middle. (Seen on real servers: one loop and one surplus in about 40 forks.)
DAMAGE = {"loop": 0.03, "surplus": 0.03, "foreign text": 0.003, "empty": 0.003, "lost arguments": 0.003,
          "special tokens": 0.0003}
ROUNDING_LEADS_TO = ("loop", "surplus", "empty", "foreign text")    # damage that a near tie can start


@dataclass(frozen=True)
class Evidence:
    """All that the word on the answers of one cell rests on."""

    agreement: Agreement                # its forks carry their margins where the baseline was asked for them
    floor: Optional[Agreement] = None
    floor_seen: bool = False            # the baseline has disagreed with itself anywhere in the run: batching does show
    ruler: Optional[Ruler] = None
    lost: int = 0                       # answers right at the baseline and wrong at the other
    won: int = 0                        # the reverse
    baseline_loops: float = 0.0         # share of the baseline's own answers that end in a loop


class Finding(NamedTuple):
    """A word on the answers and what led to it."""

    word: str
    reasons: Tuple[str, ...]
    caveats: Tuple[Caveat, ...] = ()


def judge_answers(evidence: Evidence) -> Finding:
    """identical | rounding only | changed | cannot tell, with the numbers that led there."""
    agreement, ruler = evidence.agreement, evidence.ruler
    if not agreement.pairs:
        return Finding("cannot tell", ("no pair of answers could be compared",))
    if agreement.identical == agreement.pairs:
        words = f"{_of(agreement)} answers are the same, byte for byte{_left_out_words(agreement)}"
        return Finding("identical", (words,), _ruler_caveat(ruler))
    seen = (f"{_of(agreement)} answers are the same{_floor_words(evidence.floor)}{_left_out_words(agreement)}",)
    changed = tuple(filter(None, (_damage(evidence), _other_function(ruler), _far_forks(evidence), _other_text(evidence),
                                  _accuracy_lost(evidence), _beyond_floor(evidence))))
    if changed:
        return Finding("changed", seen + changed + _examples(evidence))
    return _without_proof_of_change(evidence, seen)


def _without_proof_of_change(evidence: Evidence, seen: Tuple[str, ...]) -> Finding:
    """Nothing says `changed`: is every difference explained, then?"""
    margins = _margin_word(evidence)
    if margins:
        return Finding(margins.word, seen + margins.reasons + _examples(evidence), margins.caveats)
    by_floor = _floor_word(evidence)
    return Finding(by_floor.word, seen + by_floor.reasons + _examples(evidence), by_floor.caveats)


def _of(agreement: Agreement) -> str:
    return f"{agreement.identical} of {agreement.pairs}"


def _floor_words(floor: Optional[Agreement]) -> str:
    return "" if floor is None or not floor.pairs else f"; the baseline equals itself in {_of(floor)}"


def _left_out_words(agreement: Agreement) -> str:
    count = len(agreement.incomparable)
    return f"; {count} could not be compared ({agreement.incomparable[0][1]})" if count else ""


# --- Damage: what rounding does not do, or not so often


def _damage(evidence: Evidence) -> Optional[str]:
    """Which damage is more frequent than an honest server's differences show, or the floor's; None: none is."""
    found = []
    for kind, usual in DAMAGE.items():
        damaged = [one for one in evidence.agreement.differences if _is_damage(one, kind, evidence.ruler)]
        if damaged and _more_than_usual(damaged, _usual(kind, usual, evidence), evidence) and _beyond_the_floors(kind, damaged, evidence):
            found.append(f"{len(damaged)} of {evidence.agreement.pairs} answers: {kind} ({_place(damaged[0])})")
    return "; ".join(found) or None


def _is_damage(difference: Difference, kind: str, ruler: Optional[Ruler]) -> bool:
    if difference.kind != kind or (kind == "surplus" and difference.prefix_share < 1):     # the other stopped first
        return False
    if kind == "empty" and difference.baseline_tail == "" and difference.other_tail:       # the baseline's is empty
        return False
    near_tie = difference.margin_nats is not None and difference.margin_nats <= near_nats(ruler)
    return not (kind in ROUNDING_LEADS_TO and near_tie)


def _usual(kind: str, share: float, evidence: Evidence) -> float:
    """The share of an honest server's differences that look like this: a model that loops by itself loops here, too."""
    return max(share, evidence.baseline_loops) if kind == "loop" else share


def _beyond_the_floors(kind: str, damaged: Sequence[Difference], evidence: Evidence) -> bool:
    """Whether the baseline does the same to itself less often, beyond chance."""
    floor = evidence.floor
    if floor is None or not floor.pairs:
        return True
    own = sum(_is_damage(one, kind, evidence.ruler) for one in floor.differences)
    fair = evidence.agreement.pairs / (evidence.agreement.pairs + floor.pairs)
    return not own or binomial_tail(len(damaged), len(damaged) + own, fair) <= ALPHA


def _more_than_usual(damaged: Sequence[Difference], usual: float, evidence: Evidence) -> bool:
    differences = len(evidence.agreement.differences)
    if binomial_tail(len(damaged), differences, min(1.0, usual)) <= ALPHA:
        return True
    # Where nothing differs but what ran past its stop into the token limit, there is no rounding to lay it on.
    steady = evidence.floor is not None and evidence.floor.identical == evidence.floor.pairs > 0 or differences == 1
    return (steady and not evidence.floor_seen and len(damaged) == differences and usual <= DAMAGE[damaged[0].kind]
            and all(one.finish_reasons == ("stop", "length") for one in damaged))


# --- Margins and the ruler


def near_nats(ruler: Optional[Ruler]) -> float:
    """Up to this margin, in nats, a fork is a near tie that rounding flips."""
    usable = usable_ruler(ruler)
    return max(NEAR_RULERS * usable.p99_nats, 0.0 if _even(usable) else NEAR_NATS) if usable else BLIND_NEAR_NATS


def far_nats(ruler: Optional[Ruler]) -> float:
    """Beyond this margin, in nats, rounding on this pair does not reach."""
    usable = usable_ruler(ruler)
    return max(FAR_RULERS * usable.p99_nats, 0.0 if _even(usable) else FAR_NATS) if usable else BLIND_FAR_NATS


def _even(ruler: Ruler) -> bool:
    """Whether rounding moves every log-probability a little and none by far more, as with 16 or 32 bits on a CPU: its 99th
    percentile then tells all. In bfloat16 most do not move at all and some jump by an eighth of a nat, so that few positions
    may show none of these: there the nats above are the least."""
    return EVEN_RULER * ruler.median_nats >= ruler.p99_nats > 0


def usable_ruler(ruler: Optional[Ruler]) -> Optional[Ruler]:
    """The ruler, if it is one: enough positions to tell how far rounding reaches."""
    return ruler if ruler is not None and ruler.positions >= FEWEST_POSITIONS else None


def _other_function(ruler: Optional[Ruler]) -> Optional[str]:
    """The two servers do not compute the same function: rounding does not move log-probabilities by tenths of a nat.

    The 99th percentile tells, not the middle: most positions are all but certain, whatever the weights.
    """
    if ruler is None or ruler.positions < FEWEST_TO_CONDEMN or ruler.p99_nats < OTHER_FUNCTION_NATS:
        return None
    return (f"these two servers do not compute the same function: over {ruler.positions} positions with the same text the "
            f"log-probabilities differ by {ruler.p99_nats:.2g} nats at the 99th percentile and {ruler.max_nats:.2g} at most "
            "(other weights, quantisation or template?)")


def _ruler_caveat(ruler: Optional[Ruler]) -> Tuple[Caveat, ...]:
    reason = _other_function(ruler)
    return (Caveat(f"The texts are the same, but {reason}."),) if reason else ()


def _margins(evidence: Evidence) -> List[float]:
    return [one.margin_nats for one in evidence.agreement.differences if one.margin_nats is not None]


def _far_forks(evidence: Evidence) -> Optional[str]:
    """More forks lie beyond a near tie, or far beyond, than rounding leaves there; or one lies beyond all reach."""
    margins, near, far = _margins(evidence), near_nats(evidence.ruler), far_nats(evidence.ruler)
    ruler = usable_ruler(evidence.ruler)
    lone = max(LONE_NATS, LONE_RULERS * ruler.p99_nats) if ruler else 4 * BLIND_FAR_NATS
    for limit, usual in ((far, STRAY_SHARE), (near, WIDE_SHARE)):
        beyond = [margin for margin in margins if margin > limit]
        if beyond and (max(beyond) >= lone or binomial_tail(len(beyond), len(margins), usual) <= ALPHA / 5):
            return (f"{len(beyond)} of {len(margins)} forks asked about take a token more than {limit:.2g} nats below the "
                    f"baseline's own choice (up to {max(beyond):.2g}): rounding on this pair does not reach so far")
    return None


def _margin_word(evidence: Evidence) -> Optional[Finding]:
    """What the margins say where none proves a change. None: too few are known to say anything."""
    margins, differences = _margins(evidence), len(evidence.agreement.differences)
    if len(margins) < min(FEWEST_FLOOR_PAIRS, math.ceil(differences / 2)):
        return None
    near, far = near_nats(evidence.ruler), far_nats(evidence.ruler)
    beyond = sum(margin > near for margin in margins)
    known = f"{len(margins) - beyond} of {len(margins)} forks asked about are near ties (within {near:.2g} nats)"
    if max(margins) > far or beyond and binomial_tail(beyond, len(margins), WIDE_SHARE) <= ALPHA:
        return Finding("cannot tell", (f"{known}; the widest margin is {max(margins):.2g} nats, which is neither rounding "
                                       "for certain nor proof of a fault",))
    caveats = () if usable_ruler(evidence.ruler) else (Caveat(
        "How large rounding is on this pair was not measured; a quarter of a nat was taken.",
        "Both servers must give logprobs for that."),)
    return Finding("rounding only", (known,), caveats)


# --- The floor


class Discordance(NamedTuple):
    """The speculative answers and the floor's, both against the baseline's first, on the prompts that both have."""

    only_other: int         # differs only from the speculative server's
    only_floor: int         # differs only from the baseline's own second
    share_losses: Tuple[float, ...]     # how much less of the baseline's text the other reproduces than the floor does


def discordance(agreement: Agreement, floor: Agreement) -> Discordance:
    """What the two paired tests are fed with: answers that only one of them alters, and the prefix shares' differences."""
    left_out = {prompt_id for prompt_id, _ in agreement.incomparable + floor.incomparable}
    covered = {(prompt_id, repeat): share for prompt_id, repeat, share in floor.prefix_shares}
    theirs, ours = (_differing(one, left_out) for one in (agreement, floor))
    losses = tuple(covered[prompt_id, repeat] - share for prompt_id, repeat, share in agreement.prefix_shares
                   if (prompt_id, repeat) in covered)
    only_other = {key for key in theirs - ours if not covered or key in covered}
    return Discordance(len(only_other), len(ours - theirs), losses)


def _differing(agreement: Agreement, left_out: Iterable[str]) -> set:
    return {(one.prompt_id, one.repeat) for one in agreement.differences if one.prompt_id not in left_out}


def _floor_shows(evidence: Evidence) -> bool:
    """Whether the floor is a yardstick at all: a server that cannot batch equals itself whatever rounding does."""
    floor = evidence.floor
    return floor is not None and floor.pairs > 0 and (floor.identical < floor.pairs or evidence.floor_seen)


def _beyond_floor(evidence: Evidence) -> Optional[str]:
    """The speculative server differs more than the baseline does from itself, beyond chance. None: not shown.

    Where enough forks have margins they decide: verifying several tokens at once may round more often than batching does.
    """
    floor = evidence.floor
    if floor is None or not _floor_shows(evidence) or _margin_word(evidence):
        return None
    counts = discordance(evidence.agreement, floor)
    coin = null_share(1 - floor.identical / floor.pairs, EXCESS)
    p = binomial_tail(counts.only_other, counts.only_other + counts.only_floor, coin)
    if p <= ALPHA / TESTS:
        return (f"{counts.only_other} answers differ only from the speculative server's, {counts.only_floor} only from the "
                f"baseline's own second (McNemar, exact: p = {mcnemar_p(counts.only_other, counts.only_floor):.2g})")
    return _less_reproduced(evidence.agreement, floor, counts.share_losses)


def _less_reproduced(agreement: Agreement, floor: Agreement, losses: Sequence[float]) -> Optional[str]:
    """Less of the text is reproduced than rounding, even a little more frequent than the floor's, leaves. None: not shown."""
    if not losses or floor.prefix_agreement is None:
        return None
    tolerated = floor.prefix_agreement - prefix_at(floor.prefix_agreement, EXCESS)
    beyond = [loss - tolerated for loss in losses]
    if math.fsum(beyond) <= 0 or sign_flip_p(beyond) / 2 > ALPHA / TESTS:
        return None
    return (f"{_percent(agreement.prefix_agreement)} of the baseline's text is reproduced before the first difference, "
            f"{_percent(floor.prefix_agreement)} by the baseline itself (sign flips: p = {sign_flip_p(losses):.2g})")


def prefix_at(prefix_agreement: float, excess: float) -> float:
    """The prefix agreement, 0..1, if forks came `excess` times as often: (1 - e^-x) / x with x forks to be expected a text."""
    low, high = 1e-9, 1e4
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if -math.expm1(-middle) / middle > prefix_agreement else (low, middle)
    return min(prefix_agreement, -math.expm1(-excess * low) / (excess * low))


def _other_text(evidence: Evidence) -> Optional[str]:
    """Nearly every answer parts at its beginning, from a baseline that equals itself. None: not so.

    Rounding forks about one token in a hundred at worst: half of the text is reproduced then, not a fifth.
    """
    agreement, floor = evidence.agreement, evidence.floor
    if floor is None or not floor.pairs or floor.identical < 0.8 * floor.pairs or agreement.pairs < FEWEST_TEXTS:
        return None
    if agreement.prefix_agreement is None or agreement.prefix_agreement > 0.2 or agreement.identical > 0.2 * agreement.pairs:
        return None
    return (f"only {_percent(agreement.prefix_agreement)} of the baseline's text is reproduced before the first difference: "
            "rounding does not fork so early")


def _percent(share: Optional[float]) -> str:
    return "–" if share is None else f"{100 * share:.0f} %"


def _floor_word(evidence: Evidence) -> Finding:
    """What the floor says where nothing proves a change."""
    floor = evidence.floor
    if floor is None or not floor.pairs:
        return Finding("cannot tell", ("no yardstick: neither the baseline's agreement with itself nor the forks' margins "
                                       "are known",))
    if not _floor_shows(evidence):
        return Finding("cannot tell", ("the baseline equals itself everywhere, as a server that cannot batch does whatever "
                                       "rounding would do; without the forks' margins that is no yardstick",))
    if floor.pairs < FEWEST_FLOOR_PAIRS:
        return Finding("cannot tell", (f"about the noise floor, but {floor.pairs} pairs are too small a sample",))
    if floor.identical / floor.pairs < 0.05:
        return Finding("cannot tell", ("the baseline disagrees with itself throughout",))
    return Finding("rounding only", (
        f"no more than the baseline differs from itself ({_percent(evidence.agreement.prefix_agreement)} of its text is "
        f"reproduced before the first difference, {_percent(floor.prefix_agreement)} by itself)",), _power_caveat(evidence))


def _power_caveat(evidence: Evidence) -> Tuple[Caveat, ...]:
    share = smallest_change(evidence)
    if share is not None and share <= 0.25:
        return ()
    unseen = "could not have been noticed" if share is None else f"in less than {_percent(share)} of them may go unnoticed"
    return (Caveat(f"With so few answers and so much noise a fault {unseen}.", "Measure more prompts, or get logprobs."),)


def smallest_change(evidence: Evidence) -> Optional[float]:
    """The smallest share of altered answers that this cell would have shown as `changed` with 80 % power. None: no share.

    By margins where forks have them: three far forks suffice, and about seven in ten wrong tokens lie far. Else by McNemar's
    test against the floor.
    """
    pairs = evidence.agreement.pairs
    if not pairs:
        return None
    if usable_ruler(evidence.ruler) or _margins(evidence):
        return next((share / 200 for share in range(1, 201) if binomial_tail(3, pairs, 0.7 * share / 200) >= 0.8), None)
    if not evidence.floor or not _floor_shows(evidence):
        return None
    noise = 1 - evidence.floor.identical / evidence.floor.pairs
    return smallest_detectable(pairs, round(noise, 2), ALPHA / TESTS, EXCESS)


# --- Accuracy


def _accuracy_lost(evidence: Evidence) -> Optional[str]:
    """Right answers were lost beyond chance; None: not shown."""
    p = binomial_tail(evidence.lost, evidence.lost + evidence.won, 0.5)
    if evidence.lost <= evidence.won or p > ALPHA / TESTS:
        return None
    return f"{evidence.lost} right answers became wrong and {evidence.won} wrong ones right (McNemar, exact: p = {2 * p:.2g})"


# --- Reasons in words


def _examples(evidence: Evidence, most: int = 3) -> Tuple[str, ...]:
    """The most telling differences in words: damage first, then the widest margins."""
    order = sorted(evidence.agreement.differences,
                   key=lambda one: (one.kind == "fork", -(one.margin_nats if one.margin_nats is not None else -1.0)))
    return tuple(describe(one, evidence.ruler) for one in order[:most])


def describe(difference: Difference, ruler: Optional[Ruler] = None) -> str:
    """One difference in a sentence: where, what against what, the margin, and what rounding reaches."""
    words = f"{_place(difference)}: {_quoted(difference.baseline_tail)} against {_quoted(difference.other_tail)}"
    if difference.first_byte is None:
        words = _place(difference)
    if difference.margin_nats is None:
        return words
    words += f"; margin {difference.margin_nats:.2g} nats"
    usable = usable_ruler(ruler)
    if usable:
        words += f"; rounding on this pair reaches {usable.max_nats:.2g}"
    near = difference.margin_nats <= near_nats(ruler)
    return words + (": a near tie" if near else ": far below" if difference.margin_nats > far_nats(ruler) else ": wide")


def _place(difference: Difference) -> str:
    verb = "forks" if difference.kind == "fork" else f"({difference.kind})"
    where = "" if difference.first_byte is None else f" at byte {difference.first_byte}"
    channel = "" if difference.channel == "content" else f" of {difference.channel}"
    detail = f", {difference.detail}" if difference.detail else ""
    return f"{difference.prompt_id} {verb}{where}{channel}{detail}"


def _quoted(tail: str) -> str:
    """The first word or mark of a text, with what does not print escaped; the end of an answer in words."""
    piece = re.match(r"\s*(?:\w+|[^\w\s]+\s*)?", tail)
    text = piece.group()[:20] if piece else ""
    return f"`{''.join(c if c.isprintable() else ascii(c)[1:-1] for c in text)}`" if text else "the end"


# --- Speed


class Speeds(NamedTuple):
    """The ratios that the word on the speed rests on."""

    throughput: Optional[Ratio]
    decode: Optional[Ratio]
    itself: Optional[Ratio]     # the baseline's second pass over its first


def judge_speed(speeds: Speeds, obstacle: Optional[str] = None) -> Finding:
    """faster | slower | not distinguishable | not comparable. Output throughput decides; decode speed where it is missing.

    Faster or slower only if the interval leaves 1 out and clears the ratio that the baseline reached against itself.
    """
    ratio = speeds.throughput or speeds.decode
    if obstacle or ratio is None:
        return Finding("not comparable", (obstacle or "no speed on one side",))
    name = "output throughput" if speeds.throughput else "decode speed"
    words = f"{name} {_ratio_words(ratio)}"
    if ratio.low is None or ratio.high is None:
        return Finding("not distinguishable", (f"{words}: too few prompts for an interval",))
    drift = max(speeds.itself.value, 1 / speeds.itself.value) if speeds.itself else 1.0
    if ratio.low > drift or ratio.high < 1 / drift:
        return Finding("faster" if ratio.low > drift else "slower", (words,))
    if ratio.low <= 1 <= ratio.high:
        return Finding("not distinguishable", (f"{words}: the interval holds 1{_more_prompts(ratio)}",))
    return Finding("not distinguishable", (
        f"{words}: the baseline against itself already differs by {abs(drift - 1):.1%}, which this does not clear",))


def _ratio_words(ratio: Ratio) -> str:
    interval = "" if ratio.low is None or ratio.high is None else f" (95 %: {ratio.low:.2f} to {ratio.high:.2f})"
    return f"{ratio.value:.2f}x{interval}, {ratio.pairs} prompts"


def _more_prompts(ratio: Ratio) -> str:
    more = pairs_needed(ratio)
    if more is None or more > 10_000:
        return ""
    return f"; about {max(1, more)} more prompts would settle it, if the ratio stays" if more else ""


def speed_obstacle(baseline: Pass, other: Pass, agreement: Agreement) -> Optional[str]:
    """Why two passes' speeds cannot be held against each other; None: they can."""
    for one in (baseline, other):
        if not one.completed:
            return f"{one.server} completed nothing"
        if one.output_tokens is None and not any(reply.decode_tokens_per_s for reply in one.completed):
            return f"{one.server} did not count its tokens"
    loops = sum(one.kind == "loop" for one in agreement.differences)
    if 10 * loops >= agreement.pairs > 0 and loops > 1 or loops == agreement.pairs == 1:
        return f"{loops} of {agreement.pairs} speculative answers run in a loop: its tokens are not the baseline's"
    ours, theirs = (_by_prompt(side.replies, _timed_tokens) for side in (baseline, other))
    tokens = [math.fsum(_work(side[key])[0] for key in ours if key in theirs) for side in (ours, theirs)]
    if min(tokens) > 0 and max(tokens) > 2 * min(tokens):
        return f"the answers are not alike: {tokens[0]:.0f} tokens against {tokens[1]:.0f} on the same prompts"
    return None


# --- Asking for margins and rulers: which forks, and what the engines' logprobs say

Entries = Sequence[Mapping[str, Any]]   # OpenAI chat `logprobs.content`: {token, logprob, bytes, top_logprobs}


class Fork(NamedTuple):
    """A fork whose margin the baseline can be asked for: its prompt again, greedily, with logprobs."""

    server: str
    workload: str
    concurrency: int
    prompt_id: str
    repeat: int
    prefix: str         # the text that both share
    other_text: str     # the other server's whole text

    @property
    def key(self) -> Tuple[str, str, int, str, int]:
        """Where its margin belongs in Run.margins."""
        return (self.server, self.workload, self.concurrency, self.prompt_id, self.repeat)


def forks_of(baseline: Pass, other: Pass, agreement: Agreement, most: Optional[int] = None) -> Tuple[Fork, ...]:
    """The forks of a cell whose margin can be asked for, at most `most` of them, spread evenly over the prompts.

    Only in the content, and only without reasoning before it: tool calls and reasoning come back parsed, and their tokens
    cannot be walked. (An early or late end is a fork at the token that ends the answer.)
    """
    ours, theirs = by_key(baseline.replies), by_key(other.replies)
    forks = []
    for one in agreement.differences:
        key = (one.prompt_id, one.repeat)
        text = theirs[key].content
        if one.channel == "content" and one.first_char is not None and text is not None and not ours[key].reasoning:
            forks.append(Fork(other.server, other.workload, other.concurrency, *key, text[:one.first_char], text))
    step = max(1.0, len(forks) / most) if most else 1.0
    return tuple(forks[int(place * step)] for place in range(int(len(forks) / step)))


def margin_from_logprobs(entries: Entries, prefix: str, other_text: str) -> Optional[float]:
    """Nats by which the other's token lies below the baseline's own choice where their texts part, >= 0.

    `entries` are the baseline's when asked again. 0: this time it chose as the other did. Where the other's token is not
    among the listed ones, the distance to the last listed is returned: the true margin is at least that. None: the baseline
    did not come by the same way this time, or logprobs are missing there.
    """
    wanted, shared = text_bytes(other_text), len(text_bytes(prefix))
    parted = shared + len(text_bytes(other_text[len(prefix):len(prefix) + 1]))      # whole characters: tokens may split one
    at = 0
    spanning: List[float] = []
    for entry in entries:
        token = _token_bytes(entry)
        if not token or wanted[at:at + len(token)] != token:
            margins = spanning + _margins_at(entry, wanted[at:])
            return min(margins) if margins and at + len(token) >= shared else None
        spanning += _spanning_margins(entry, wanted[at:], shared - at)
        at += len(token)
        if at >= parted > shared:
            return 0.0
    return None


def _token_bytes(entry: Mapping[str, Any]) -> bytes:
    listed = entry.get("bytes")
    return bytes(listed) if isinstance(listed, list) else text_bytes(str(entry.get("token", "")))


def _margins_at(entry: Mapping[str, Any], continuation: bytes) -> List[float]:
    """The margin of the longest listed token that the other's text goes on with; else of the last listed. Empty: unknown."""
    own, listed = _logprob(entry), _alternatives(entry)
    if own is None or not listed:
        return []
    matching = [one for one in listed if _continues(one, continuation)]
    if matching:
        return [max(0.0, own - max(matching, key=lambda one: len(_token_bytes(one)))["logprob"])]
    # The end of an answer has no text to look for; it is not always listed by a name that we know.
    return [max(0.0, own - min(one["logprob"] for one in listed))] if continuation else []


def _spanning_margins(entry: Mapping[str, Any], continuation: bytes, shared: int) -> List[float]:
    """Margins of listed tokens that begin where the baseline's own does and reach past the fork: `**:` against `**`."""
    own = _logprob(entry)
    return [max(0.0, own - one["logprob"]) for one in _alternatives(entry)
            if own is not None and len(_token_bytes(one)) > shared and continuation and _continues(one, continuation)]


def _alternatives(entry: Mapping[str, Any]) -> List[Mapping[str, Any]]:
    own = _token_bytes(entry)
    return [one for one in entry.get("top_logprobs") or () if _logprob(one) is not None and _token_bytes(one) != own]


def _continues(entry: Mapping[str, Any], continuation: bytes) -> bool:
    token = _token_bytes(entry)
    if continuation:
        return bool(token) and continuation.startswith(token)
    return not token or SPECIAL_TOKEN.fullmatch(str(entry.get("token", ""))) is not None


def _logprob(entry: Mapping[str, Any]) -> Optional[float]:
    """A log-probability in nats, or None where it is missing or a placeholder (vLLM's -9999)."""
    value = entry.get("logprob")
    return float(value) if isinstance(value, (int, float)) and -1000 < value <= 1e-6 else None


def logprob_changes(baseline: Entries, other: Entries) -> List[float]:
    """|difference of logprob| of the chosen tokens, in nats, over the positions up to where the two texts part."""
    changes = []
    for ours, theirs in zip(baseline, other):
        if _token_bytes(ours) != _token_bytes(theirs):
            break
        one, two = _real_logprob(ours), _real_logprob(theirs)
        if one is not None and two is not None:
            changes.append(abs(one - two))
    return changes


def _real_logprob(entry: Mapping[str, Any]) -> Optional[float]:
    """None where llama.cpp makes it up: drafted tokens come with 0.0 and an empty list of alternatives."""
    value = _logprob(entry)
    return None if value == 0 and not entry.get("top_logprobs") else value


def made_up(entries: Entries) -> bool:
    """Whether most of these logprobs are placeholders: a ruler from the few real ones would measure nothing."""
    return 2 * sum(_real_logprob(entry) is None for entry in entries) > len(entries)


def places_to_continue(entries: Entries, most: int) -> List[Tuple[int, str]]:
    """Places of an answer, spread over it, where it can be broken off and continued: (number of tokens before, their text).

    The next token there begins a word, so that the server, given the text alone, cuts it into the same tokens.
    """
    text, places = b"", []
    for place, entry in enumerate(entries):
        token = _token_bytes(entry)
        if place and token.startswith(b" ") and not text.endswith((b" ", b"\n")):
            places.append((place, text))
        text += token
    spread = [places[number * len(places) // most] for number in range(most)] if len(places) > most else places
    return [(place, before.decode("utf-8", "replace")) for place, before in spread]


def ruler_of(changes: Sequence[float]) -> Optional[Ruler]:
    """The ruler that these changes of logprobs make, from any number of prompts. None: there are none."""
    if not changes:
        return None
    return Ruler(len(changes), quantile(changes, 0.5) or 0.0, quantile(changes, 0.99) or 0.0, max(changes))


# ======================================================================================================================
# 12. Break-even (pure)
# ======================================================================================================================
#
# S(alpha, k, c), the measured cost of drafting, the best draft length, the crossover concurrency.
#
# alpha: probability that a drafted token is accepted, given that those before it were; k: draft length; c: what drafting a
# token costs, in steps of the target. Leviathan, Kalman and Matias (arXiv 2211.17192); Chen et al. (arXiv 2302.01318).


def expected_tokens(alpha: float, k: int) -> float:
    """E: tokens that one verify step yields, the target's own included, 1..k+1 (2211.17192, equation 1)."""
    return math.fsum(alpha ** drafted for drafted in range(k + 1))


def speedup(alpha: float, k: int, c: float) -> float:
    """S: how many times faster than the target alone, E / (1 + k c) (2211.17192, theorem 3.8). Verifying is taken to cost
    what one step of the target costs: true for one stream at a time, less so the fuller the batch is."""
    return expected_tokens(alpha, k) / (1 + k * c)


def break_even_alpha(k: int, c: float) -> Optional[float]:
    """The acceptance at which speculation neither gains nor loses, 0..1. None: it loses even if all is accepted (c >= 1)."""
    if k < 1 or c >= 1:
        return None
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if speedup(middle, k, c) >= 1 else (middle, high)
    return high


def best_draft_length(alpha: float, c: float, longest: int = 32) -> Tuple[int, float]:
    """The k of 0..longest with the highest speedup, and that speedup; (0, 1.0): no draft pays."""
    return max(((k, speedup(alpha, k, c)) for k in range(longest + 1)), key=lambda choice: (choice[1], -choice[0]))


def speedup_rows(c: float, alphas: Sequence[float], ks: Sequence[int]) -> List[Tuple[float, List[float]]]:
    """The map S(alpha, k) at one draft cost: a row an acceptance, a column a draft length."""
    return [(alpha, [speedup(alpha, k, c) for k in ks]) for alpha in alphas]


def alpha_of_rate(rate: float, k: int) -> float:
    """The alpha at which k-token drafts are accepted at this rate (accepted / drafted), 0..1.

    The two are not the same: a rejected token takes all behind it along, so the rate is the mean of alpha, alpha^2, ...
    """
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if (expected_tokens(middle, k) - 1) / k >= rate else (middle, high)
    return high


# --- From a measurement

WHY_KEYS = ("acceptance_by_position", "tokens_per_target_pass", "step_cost", "draft_cost", "draft_length", "acceptance_rate",
            "break_even_acceptance", "predicted_speedup", "best_draft_length", "best_speedup", "crossover",
            "kv_cache_tokens_lost", "by_category")
WIDE_SPREAD = 1.2       # categories are shown where the best one's ratio is at least this many times the worst's


def step_cost(yield_per_pass: Optional[float], ratio: Optional[Ratio]) -> Optional[Dict[str, Optional[float]]]:
    """What a speculative step costs, in steps of the target alone: tokens it yields / speedup. {value, low, high}"""
    if yield_per_pass is None or ratio is None:
        return None
    return {"value": yield_per_pass / ratio.value,
            "low": yield_per_pass / ratio.high if ratio.high else None,
            "high": yield_per_pass / ratio.low if ratio.low else None}


def draft_cost(step: Optional[Mapping[str, Optional[float]]], drafted_per_pass: Optional[float]
               ) -> Optional[Dict[str, Optional[float]]]:
    """c: what drafting and verifying a token adds, in target steps: (step cost - 1) / tokens drafted a pass. {value, low, high}

    Drafting and the wider verify step cannot be told apart from outside; both are in it. Noise can take it below 0.
    """
    if step is None or not drafted_per_pass:
        return None
    return {name: None if value is None else (value - 1) / drafted_per_pass for name, value in step.items()}


def drafted_per_pass(acceptance: Acceptance, k: Optional[int]) -> Optional[float]:
    """Tokens drafted for a pass of the target, passes without a draft included; k where only that is known."""
    passes = acceptance.target_passes
    if acceptance.draft_tokens and passes:
        return acceptance.draft_tokens / passes
    return float(k) if k else None


def predicted_speedups(acceptance: Acceptance, k: Optional[int], cost: float) -> Optional[Dict[str, float]]:
    """PREDICTED speedup for each draft length up to the measured one, from acceptance by position. Keys "1", "2", ...

    A shorter chain yields what its positions yielded and drafts so much less; that the share of passes with a draft stays as
    it was is assumed. Without acceptance by position, alpha is taken to be the same at every position.
    """
    rates = _chain_rates(acceptance, k)
    per_pass = drafted_per_pass(acceptance, k)
    passes = acceptance.target_passes
    if not rates or not per_pass:
        return None
    drafted_share = min(1.0, acceptance.drafts / passes) if acceptance.drafts and passes else 1.0
    predicted = {}
    for length in range(1, len(rates) + 1):
        step = 1 + cost * per_pass * length / len(rates)
        if step > 0:
            predicted[str(length)] = (1 + drafted_share * math.fsum(rates[:length])) / step
    return predicted or None


def _chain_rates(acceptance: Acceptance, k: Optional[int]) -> Sequence[float]:
    if acceptance.rate_by_position:
        return acceptance.rate_by_position
    if acceptance.acceptance_rate is None or not k:
        return ()
    alpha = alpha_of_rate(acceptance.acceptance_rate, k)
    return [alpha ** position for position in range(1, k + 1)]


def crossover(ratios: Mapping[int, Optional[Ratio]]) -> Optional[Dict[str, float]]:
    """The concurrency at which the speed ratio falls through 1, by concurrency's ratios. {concurrency, below, above}

    Interpolated linearly over log2 of the concurrency between the two levels that bracket it. None: it never does.
    """
    levels = [(level, ratio.value) for level, ratio in sorted(ratios.items()) if ratio is not None]
    for (below, high), (above, low) in zip(levels, levels[1:]):
        if high > 1 >= low:
            share = (high - 1) / (high - low)
            place = math.log2(below) + share * (math.log2(above) - math.log2(below))
            return {"concurrency": 2 ** place, "below": below, "above": above}
    return None


def by_category(baseline: Pass, other: Pass, agreement: Agreement, prompts: Mapping[str, Prompt]
                ) -> Optional[List[Dict[str, Any]]]:
    """The cell taken apart by the prompts' categories, where they differ widely in speed; None: they do not, or are unknown."""
    category = {key: prompt.category for key, prompt in prompts.items() if prompt.category}
    rows = [_category_row(name, [_only(side, name, category) for side in (baseline, other)], agreement, category)
            for name in sorted(set(category.values()))]
    rows = [row for row in rows if row["decode_ratio"] and row["pairs"] >= FEWEST_PAIRS]
    ratios = [row["decode_ratio"]["value"] for row in rows]
    return rows if len(rows) > 1 and max(ratios) >= WIDE_SPREAD * min(ratios) else None


def _only(one: Pass, name: str, category: Mapping[str, str]) -> List[Reply]:
    return [reply for reply in one.replies if category.get(reply.prompt_id) == name]


def _category_row(name: str, sides: Sequence[List[Reply]], agreement: Agreement, category: Mapping[str, str]) -> Dict[str, Any]:
    ratio = decode_ratio(*sides)
    pairs = sum(category.get(prompt_id) == name for prompt_id, _, _ in agreement.prefix_shares)
    differing = sum(category.get(one.prompt_id) == name for one in agreement.differences)
    return {"category": name, "pairs": ratio.pairs if ratio else pairs, "decode_ratio": _interval(ratio),
            "acceptance_rate": _pooled([reply.acceptance for reply in sides[1]]).acceptance_rate,
            "exact_match": (pairs - differing) / pairs if pairs else None}


def _interval(ratio: Optional[Ratio]) -> Optional[Dict[str, Optional[float]]]:
    return None if ratio is None else {"value": ratio.value, "low": ratio.low, "high": ratio.high}


def _pooled(parts: Iterable[Optional[Acceptance]]) -> Acceptance:
    """Several acceptances as one: counts add up; a count that one of them lacks is unknown for all."""
    known = [part for part in parts if part is not None and part.missing is None]
    if not known:
        return Acceptance(missing="not measured")
    if len(known) == 1:
        return known[0]
    sums: Dict[str, Any] = {name: _sum_or_none([getattr(part, name) for part in known])
                            for name in ("drafts", "draft_tokens", "accepted_tokens", "completion_tokens", "requests")}
    chains = [part.accepted_by_position for part in known if part.accepted_by_position is not None]
    longest = max(map(len, chains), default=0)
    by_position = None if len(chains) < len(known) else tuple(
        sum(chain[place] for chain in chains if place < len(chain)) for place in range(longest))
    return Acceptance(accepted_by_position=by_position, source=known[0].source, **sums)


def _sum_or_none(counts: Sequence[Optional[int]]) -> Optional[int]:
    known = [count for count in counts if count is not None]
    return sum(known) if len(known) == len(counts) else None


# --- The whole run: every cell with its verdict, and why


def compare_run(run: Run) -> Tuple[Comparison, ...]:
    """Every result cell of a run: each workload, level and speculative server against the baseline, in the run's order."""
    cells = [_compare_cell(run, *key) for key in _cell_keys(run)]
    return tuple(_with_crossover(cell, cells) for cell in cells)


def baseline_label(run: Run) -> str:
    """The label of the server that the others are held against: `baseline`, else the first one."""
    return BASELINE if BASELINE in run.servers or not run.servers else next(iter(run.servers))


def _cell_keys(run: Run) -> List[Tuple[str, int, str]]:
    baseline = baseline_label(run)
    timed = {(one.workload, one.concurrency, one.server): None for one in run.passes if one.purpose == "timed"}
    return [key for key in timed if key[2] != baseline and (*key[:2], baseline) in timed]


def merged(passes: Sequence[Pass]) -> Pass:
    """Passes of one server, workload and level as one: replies in order, wall times and counts added up."""
    if len(passes) == 1:
        return passes[0]
    return replace(passes[0], replies=tuple(reply for one in passes for reply in one.replies),
                   wall_s=math.fsum(one.wall_s for one in passes), acceptance=_pooled([one.acceptance for one in passes]),
                   interrupted=any(one.interrupted for one in passes))


def _timed(run: Run, workload: str, concurrency: int, server: str) -> Pass:
    return merged([one for one in run.passes if one.purpose == "timed"
                   and (one.workload, one.concurrency, one.server) == (workload, concurrency, server)])


def _compare_cell(run: Run, workload: str, concurrency: int, label: str) -> Comparison:
    baseline, other = _timed(run, workload, concurrency, baseline_label(run)), _timed(run, workload, concurrency, label)
    passages = passages_of(baseline.completed)
    agreement = _with_margins(agree(baseline, other, passages), run, other)
    floor, floor_concurrency, itself = _floor(run, baseline, passages)
    evidence = _evidence(run, baseline, other, agreement, floor)
    speeds = Speeds(throughput_ratio(baseline, other), decode_ratio(baseline.replies, other.replies), itself)
    speed, answers = judge_speed(speeds, speed_obstacle(baseline, other, agreement)), judge_answers(evidence)
    why = _why(run, baseline, other, speeds, agreement)
    return Comparison(
        workload=workload, concurrency=concurrency, baseline_label=baseline.server, speculative_label=label,
        agreement=agreement, floor=floor, floor_concurrency=floor_concurrency, throughput_ratio=speeds.throughput,
        decode_ratio=speeds.decode, self_ratio=itself,
        verdict=Verdict(speed.word, answers.word, answers.reasons + speed.reasons, answers.caveats + speed.caveats),
        baseline_accuracy=accuracy(run.prompts, baseline.completed),
        speculative_accuracy=accuracy(run.prompts, other.completed),
        ruler=run.rulers.get(label), smallest_change=smallest_change(evidence), why=why)


def _with_margins(agreement: Agreement, run: Run, other: Pass) -> Agreement:
    cell = (other.server, other.workload, other.concurrency)
    return replace(agreement, differences=tuple(
        replace(one, margin_nats=run.margins.get((*cell, one.prompt_id, one.repeat))) for one in agreement.differences))


def _floor(run: Run, baseline: Pass, passages: Passages) -> Tuple[Optional[Agreement], Optional[int], Optional[Ratio]]:
    """The baseline against itself on this cell's prompts: the agreement where it differs most, the level of that, the ratio.

    Verifying k tokens makes a batch somewhere between the level itself and the highest one, so the noisier floor is the fair
    one. The ratio of speeds is from the level itself. Without a floor pass, a prompt's repeats serve for agreement.
    """
    keys = set(by_key(baseline.replies))
    again = [one for one in run.passes if one.purpose == "floor" and (one.server, one.workload) == (
        baseline.server, baseline.workload) and keys & set(by_key(one.replies))]
    floors = [(agree(_on(baseline, one), one, passages), one.concurrency) for one in again] or _floor_of_repeats(baseline)
    floors = [(floor, level) for floor, level in floors if floor.pairs]
    floor, level = min(floors, key=lambda one: one[0].exact_match or 0.0, default=(None, None))
    same_level = [one for one in again if one.concurrency == baseline.concurrency]
    return floor, level, throughput_ratio(_on(baseline, same_level[0]), same_level[0]) if same_level else None


def _on(baseline: Pass, again: Pass) -> Pass:
    """The baseline's pass on the prompts that the second pass asked; its wall time shrinks with the time of its requests."""
    asked = set(by_key(again.replies))
    replies = tuple(reply for reply in baseline.replies if (reply.prompt_id, reply.repeat) in asked)
    whole, part = (math.fsum(reply.e2el_s or 0.0 for reply in some) for some in (baseline.replies, replies))
    return replace(baseline, replies=replies, wall_s=baseline.wall_s * part / whole if whole else baseline.wall_s)


def _floor_of_repeats(baseline: Pass) -> List[Tuple[Agreement, Optional[int]]]:
    first = [reply for reply in baseline.replies if reply.repeat == 0]
    second = [replace(reply, repeat=0) for reply in baseline.replies if reply.repeat == 1]
    if not first or not second:
        return []
    return [(agree(replace(baseline, replies=tuple(first)), replace(baseline, replies=tuple(second))), baseline.concurrency)]


def _evidence(run: Run, baseline: Pass, other: Pass, agreement: Agreement, floor: Optional[Agreement]) -> Evidence:
    ours, theirs = grades(run.prompts, baseline.completed), grades(run.prompts, other.completed)
    both = [(ours[key], theirs[key]) for key in ours if key in theirs]
    loops = [bool(tail_loop(reply.content or reply.reasoning or "")) for reply in baseline.completed]
    return Evidence(agreement=agreement, floor=floor, floor_seen=_floor_seen(run), ruler=run.rulers.get(other.server),
                    lost=sum(one and not two for one, two in both), won=sum(two and not one for one, two in both),
                    baseline_loops=sum(loops) / len(loops) if loops else 0.0)


def _floor_seen(run: Run) -> bool:
    """Whether the baseline disagrees with itself anywhere in the run: then a floor of nothing is a measurement, too."""
    label = baseline_label(run)
    timed = [one for one in run.passes if one.purpose == "timed" and one.server == label]
    again = [one for one in run.passes if one.purpose == "floor" and one.server == label]
    return any(agree(_on(one, two), two).differences for one in timed for two in again
               if one.workload == two.workload and set(by_key(one.replies)) & set(by_key(two.replies)))


def _why(run: Run, baseline: Pass, other: Pass, speeds: Speeds, agreement: Agreement) -> Dict[str, Any]:
    """What explains a cell's speed; the keys are WHY_KEYS, None where unknown. Predictions are predictions."""
    acceptance, servers = other.acceptance, (run.servers.get(baseline.server), run.servers.get(other.server))
    speculation = servers[1].speculation if servers[1] else None
    k = (speculation.draft_tokens if speculation else None) or len(acceptance.accepted_by_position or ()) or None
    step = step_cost(acceptance.tokens_per_target_pass, speeds.decode)
    cost = draft_cost(step, drafted_per_pass(acceptance, k))
    one_token = cost["value"] if cost else None
    predicted = predicted_speedups(acceptance, k, one_token) if one_token is not None else None
    best = max([("0", 1.0), *(predicted or {}).items()], key=lambda choice: choice[1])
    return {
        "acceptance_by_position": list(acceptance.rate_by_position) if acceptance.rate_by_position else None,
        "tokens_per_target_pass": acceptance.tokens_per_target_pass, "step_cost": step, "draft_cost": cost,
        "draft_length": k, "acceptance_rate": acceptance.acceptance_rate,
        "break_even_acceptance": break_even_alpha(k, max(0.0, one_token)) if k and one_token is not None else None,
        "predicted_speedup": predicted, "best_draft_length": int(best[0]) if predicted else None,
        "best_speedup": best[1] if predicted else None, "crossover": None,
        "kv_cache_tokens_lost": _cache_lost(*servers),
        "by_category": by_category(baseline, other, agreement, run.prompts)}


def _cache_lost(baseline: Optional[Server], other: Optional[Server]) -> Optional[int]:
    mine, theirs = (server.kv_cache_tokens if server else None for server in (baseline, other))
    return None if mine is None or theirs is None else mine - theirs


def _with_crossover(cell: Comparison, cells: Sequence[Comparison]) -> Comparison:
    """The cell with what only all levels together tell, and with its advice."""
    levels = {one.concurrency: one.throughput_ratio or one.decode_ratio for one in cells
              if (one.workload, one.speculative_label) == (cell.workload, cell.speculative_label)}
    cell = replace(cell, why={**cell.why, "crossover": crossover(levels)})
    return replace(cell, advice=advice(cell))


def advice(cell: Comparison) -> Tuple[str, ...]:
    """One line for each thing worth doing, only where the data carry it. Predictions say that they are."""
    return tuple(filter(None, (_advice_on_length(cell), _advice_on_acceptance(cell), _advice_on_load(cell),
                               _advice_on_cache(cell), _advice_on_categories(cell))))


def _advice_on_length(cell: Comparison) -> Optional[str]:
    best, speed, k = (cell.why.get(key) for key in ("best_draft_length", "best_speedup", "draft_length"))
    ratio = cell.decode_ratio
    if best is None or speed is None or not k or ratio is None or best == k or speed < 1.05 * ratio.value:
        return None
    if best == 0:
        return f"No draft length up to {k} is predicted to pay on {cell.workload} at concurrency {cell.concurrency}."
    return (f"k = {best} is predicted at {speed:.2f}x on {cell.workload} at concurrency {cell.concurrency}; "
            f"you run k = {k} at {ratio.value:.2f}x.")


def _advice_on_acceptance(cell: Comparison) -> Optional[str]:
    rate, needed, k = (cell.why.get(key) for key in ("acceptance_rate", "break_even_acceptance", "draft_length"))
    ratio, cost = cell.decode_ratio, cell.why.get("draft_cost")
    if rate is None or needed is None or k is None or cost is None or ratio is None or ratio.high is None or ratio.high >= 1:
        return None
    return (f"A drafted token is accepted with probability {alpha_of_rate(rate, k):.2f} once those before it are; at "
            f"{cost['value']:.2f} target steps a token, k = {k} pays from {needed:.2f} on.")


def _advice_on_load(cell: Comparison) -> Optional[str]:
    place = cell.why.get("crossover")
    if not place:
        return None
    return (f"On {cell.workload} speculation stops paying between {place['below']} and {place['above']} requests at once "
            f"(about {place['concurrency']:.0f}).")


def _advice_on_cache(cell: Comparison) -> Optional[str]:
    lost = cell.why.get("kv_cache_tokens_lost")
    if not lost or lost < 0:
        return None
    return f"Speculation takes {lost} tokens of the KV cache: fewer or shorter requests fit at once."


def _advice_on_categories(cell: Comparison) -> Optional[str]:
    rows = cell.why.get("by_category")
    if not rows:
        return None
    worst, best = (choose(rows, key=lambda row: row["decode_ratio"]["value"]) for choose in (min, max))
    return (f"Within {cell.workload}, {best['category']} gains most ({best['decode_ratio']['value']:.2f}x) and "
            f"{worst['category']} least ({worst['decode_ratio']['value']:.2f}x).")


# ======================================================================================================================
# 13. Notebook and run files (pure, and append)
# ======================================================================================================================
#
# The notebook keeps the numbers: prose lines may stand in it, records are one JSON object a line. The run file keeps the
# evidence: every reply with its text and its stamps, so that every number can be rebuilt. Both are only ever appended to.

RECORD_PROMPT, RECORD_REPLY, RECORD_PASS = "prompt", "reply", "pass"


def as_json(value: Any) -> Any:
    """A dataclass as JSON: keys equal field names, fields at their default left out; tuples are lists."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, (str, int)):
        return value
    if hasattr(value, "__dataclass_fields__"):
        return {name: as_json(getattr(value, name)) for name, spec in value.__dataclass_fields__.items()
                if not _is_default(getattr(value, name), spec)}
    if isinstance(value, dict):
        return {str(key): as_json(inner) for key, inner in value.items()}
    if value and isinstance(value[0], float):       # stamps, by the hundred
        return list(value)
    return [as_json(inner) for inner in value]


def _is_default(value: Any, spec: Any) -> bool:
    if spec.default_factory is not MISSING:
        return bool(value == spec.default_factory())
    return spec.default is not MISSING and type(value) is type(spec.default) and bool(value == spec.default)


def json_line(record: Mapping[str, Any]) -> bytes:
    """One record as one line: ASCII only, no NaN, ended by LF."""
    return json.dumps(as_json(record), ensure_ascii=True, allow_nan=False, separators=(", ", ": ")).encode("ascii") + b"\n"


def _fields_of(kind: Any, data: Mapping[str, Any]) -> Dict[str, Any]:
    return {key: value for key, value in data.items() if key in kind.__dataclass_fields__}


def _made(kind: Any, known: Mapping[str, Any]) -> Any:
    """A dataclass from what a file says of it; TypeError where a field holds what it cannot hold."""
    for key, value in known.items():
        if not _fits(value, kind.__dataclass_fields__[key].type):
            raise TypeError(f"{key} holds {shorten(repr(value), 40)}")
    return kind(**known)


_JSON_KINDS: Dict[str, Any] = {"str": str, "bool": bool, "int": int, "float": (int, float)}
_LARGEST = 2.0 ** 63


def _fits(value: Any, kind: str) -> bool:
    """Whether a value from JSON may stand in a field that is annotated `kind`. Whole numbers are counts, so none is below 0."""
    if kind.startswith("Optional["):
        return value is None or _fits(value, kind[9:-1])
    if kind.startswith("Tuple[") and kind.endswith(", ...]"):
        return isinstance(value, (list, tuple)) and _all_fit(value, kind[6:-6])
    if kind.startswith("Mapping["):
        inner = kind[8:-1].partition(", ")[2]
        return isinstance(value, dict) and (inner == "Any" or _all_fit(list(value.values()), inner))
    if kind in ("int", "float"):
        return isinstance(value, _JSON_KINDS[kind]) and not isinstance(value, bool) and (0 if kind == "int" else -_LARGEST) <= value < _LARGEST
    return isinstance(value, _JSON_KINDS.get(kind, object))


def _all_fit(values: Sequence[Any], kind: str) -> bool:
    if kind == "float":         # the stamps of every chunk: many
        return set(map(type, values)) <= {int, float} and (not values or -_LARGEST < min(values) and max(values) < _LARGEST)
    return all(_fits(value, kind) for value in values)


def reply_from_json(data: Mapping[str, Any]) -> Reply:
    """A reply as it was written; keys of later versions are left aside. TypeError or ValueError for what is none."""
    known = _fields_of(Reply, data)
    for key in ("chunk_at_s", "token_ids"):
        if known.get(key) is not None:
            known[key] = tuple(known[key])
    if known.get("tool_calls") is not None:
        known["tool_calls"] = tuple(ToolCall(str(name), str(arguments)) for name, arguments in known["tool_calls"])
    if known.get("acceptance") is not None:
        known["acceptance"] = acceptance_from_json(known["acceptance"])
    for digest in (known.get("digests") or {}).values():
        if not (isinstance(digest["sha256"], str) and _fits(digest["bytes"], "int") and _fits(digest["chars"], "int")):
            raise TypeError("digests hold no digest")
    return _made(Reply, known)


def acceptance_from_json(data: Mapping[str, Any]) -> Acceptance:
    """An acceptance as it was written."""
    known = _fields_of(Acceptance, data)
    if known.get("accepted_by_position") is not None:
        known["accepted_by_position"] = tuple(known["accepted_by_position"])
    return _made(Acceptance, known)


def prompt_from_json(data: Mapping[str, Any]) -> Prompt:
    """A prompt as it was written."""
    known = _fields_of(Prompt, data)
    known["messages"] = tuple(known.get("messages") or ())
    known["tools"] = tuple(known["tools"]) if known.get("tools") else None
    if known["messages"]:
        known.pop("sha256", None)       # what can be calculated is not believed
    return _made(Prompt, known)


def server_from_json(data: Mapping[str, Any]) -> Server:
    """A server as it was written."""
    known = _fields_of(Server, data)
    known["metrics_urls"] = tuple(known.get("metrics_urls") or ())
    if known.get("speculation") is not None:
        known["speculation"] = _made(Speculation, _fields_of(Speculation, known["speculation"]))
    return _made(Server, known)


def pass_from_json(data: Mapping[str, Any]) -> Pass:
    """The facts of a pass as they were written, without its replies."""
    known = {**_fields_of(Pass, data), "replies": ()}
    known["acceptance"] = acceptance_from_json(known.get("acceptance") or {})
    known["caveats"] = tuple(_made(Caveat, _fields_of(Caveat, caveat)) for caveat in known.get("caveats") or ())
    return _made(Pass, known)


def without_texts(reply: Reply) -> Reply:
    """The reply with digests and lengths in place of its texts."""
    channels = {"content": reply.content or "", "reasoning": reply.reasoning or "",
                "tool_calls": json.dumps([list(call) for call in reply.tool_calls]) if reply.tool_calls else ""}
    return replace(reply, content=None, reasoning=None, tool_calls=None, token_ids=None,
                   digests={name: digest_of(text) for name, text in channels.items()})


# ----------------------------------------------------------------------------------------------------------------------
# Appending


class Journal:
    """A file that records are appended to, one whole line at a time, by any number of processes at once.

    A torn last line (a crash, a full disk) is sealed with a line break before the next record, so that it spoils nothing.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.is_new = True      # made by us: no other process had this name
        how = os.O_RDWR | os.O_APPEND | os.O_CREAT | getattr(os, "O_BINARY", 0)
        try:
            folder = os.path.dirname(path)
            if folder:
                os.makedirs(folder, exist_ok=True)
            try:
                self._file = os.open(path, how | os.O_EXCL, 0o666)
            except FileExistsError:
                self.is_new = False
                self._file = os.open(path, how, 0o666)
        except (OSError, ValueError) as error:
            raise MeasureError(f"{path} cannot be written: {getattr(error, 'strerror', None) or error}.",
                               "name another file, or mend its permissions") from None

    def append(self, records: Iterable[Mapping[str, Any]], durable: bool = True) -> None:
        """Append records in one write under a lock; `durable` waits until they are on the disk. MeasureError if it fails."""
        data = b"".join(map(json_line, records))
        try:
            with _locked(self._file):
                size = os.lseek(self._file, 0, os.SEEK_END)
                if size and self._last_byte(size) != b"\n":
                    data = b"\n" + data
                written = os.write(self._file, data)
                while written < len(data):
                    written += os.write(self._file, data[written:])
            if durable:
                _sync(self._file)
        except OSError as error:
            raise MeasureError(f"{self.path} cannot be written any more: {error.strerror or error}.",
                               "make room on the disk; all lines before are whole") from None

    def _last_byte(self, size: int) -> bytes:
        os.lseek(self._file, size - 1, os.SEEK_SET)
        return os.read(self._file, 1)

    def close(self, unless_empty: bool = False) -> None:
        """Let the file go; `unless_empty`: a file that we made and nobody wrote to is taken away again."""
        empty = unless_empty and self.is_new and os.fstat(self._file).st_size == 0
        os.close(self._file)
        if empty:
            with contextlib.suppress(OSError):
                os.unlink(self.path)


def _sync(file: int) -> None:
    try:
        os.fsync(file)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):    # /dev/null and its like have no disk behind them
            raise


@contextlib.contextmanager
def _locked(file: int) -> Iterator[None]:
    """The file, locked against other writers where the system knows how; an append is one write all the same."""
    if fcntl is not None:
        with contextlib.suppress(OSError):      # some file systems know no locks
            fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_UN)
    elif msvcrt is not None:
        os.lseek(file, 0x7FFFFFFF, os.SEEK_SET)     # a byte far behind the end: locking it keeps no reader out
        msvcrt.locking(file, msvcrt.LK_LOCK, 1)
        try:
            yield
        finally:
            os.lseek(file, 0x7FFFFFFF, os.SEEK_SET)
            msvcrt.locking(file, msvcrt.LK_UNLCK, 1)
    else:
        yield


class StreamJournal:
    """Records written as JSON lines to a stream (`--labbook -`)."""

    def __init__(self, stream: Any) -> None:
        self.path = "-"
        self._stream = stream

    def append(self, records: Iterable[Mapping[str, Any]], durable: bool = True) -> None:
        """Write records at once, so that a reader at the other end of a pipe sees them."""
        for record in records:
            self._stream.write(json_line(record).decode("ascii"))
        self._stream.flush()

    def close(self) -> None:
        """Nothing to let go of: the stream is not ours."""


# ----------------------------------------------------------------------------------------------------------------------
# Reading back


class BadLine(NamedTuple):
    """A line that looks like a record and is none."""

    path: str
    number: int
    problem: str

    def __str__(self) -> str:
        return f"{self.path}, line {self.number}: {self.problem}"


def read_lines(path: str) -> Iterator[Tuple[int, Union[Dict[str, Any], BadLine]]]:
    """The JSON objects of a file with their line numbers; prose is passed over, torn or spoiled lines are BadLine."""
    try:
        file = sys.stdin.buffer if path == "-" else open(path, "rb")
    except OSError as error:
        raise MeasureError(f"{path} cannot be read: {error.strerror or error}.", "check the path") from None
    with file:
        for number, raw in enumerate(file, 1):
            if number == 1 and raw.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
                raise MeasureError(f"{path} is UTF-16, not UTF-8.", "save it as UTF-8 (an editor's or PowerShell's > may have changed it)")
            text = raw[3:].strip() if number == 1 and raw.startswith(codecs.BOM_UTF8) else raw.strip()
            if text.startswith(b"\0"):      # what a file system leaves of a write that a power failure cut off
                yield number, BadLine(path, number, "zero bytes where a record was to be")
                text = text.lstrip(b"\0")
            if not text.startswith(b"{"):
                continue
            try:
                record = _JSON.decode(text.decode("utf-8"))
                if text.count(b"[") + text.count(b"{") > DEEPEST:
                    refuse_depth(record)
            except (ValueError, RecursionError):
                whole = raw.endswith(b"\n")
                yield number, BadLine(path, number, "no whole JSON object" + ("" if whole else " (the file ends in the middle of it)"))
                continue
            if isinstance(record, dict):
                yield number, record


def read_notebook(path: str) -> Tuple[List[Dict[str, Any]], List[BadLine]]:
    """The records of a notebook, the lesson's own ones included, and the lines that are damaged."""
    records, bad = [], []
    for number, found in read_lines(path):
        if isinstance(found, BadLine):
            bad.append(found)
        elif record_kind(found) in ("endpoint", "comparison"):
            records.append(found)
        elif found.get("lab") == LAB:
            bad.append(BadLine(path, number, "a record of no known kind"))
    return records, bad


def record_kind(record: Mapping[str, Any]) -> Optional[str]:
    """endpoint | comparison, for the lesson's records too, which do not say it; None for other JSON."""
    kind = record.get("kind")
    if isinstance(kind, str):
        return kind
    if isinstance(record.get("text_comparison"), dict):
        return "comparison"
    return "endpoint" if isinstance(record.get("latency_s"), dict) else None


def read_run(path: str) -> Tuple[Run, List[BadLine]]:
    """The run of a file that holds one, also one that was cut off in the middle: what it holds is used, what is torn is told."""
    runs, bad = read_runs(path)
    if len(runs) > 1:
        raise MeasureError(f"{path} holds {len(runs)} runs.", "name a file that holds one; each run begins at its line with \"record\": \"run\"")
    return runs[0], bad


def read_runs(path: str) -> Tuple[List[Run], List[BadLine]]:
    """The runs of a file, in order: several where files were put one behind the other, or one file was named twice."""
    parts = [_RunParts(path)]
    bad: List[BadLine] = []
    for number, found in read_lines(path):
        if isinstance(found, BadLine):
            bad.append(found)
            continue
        if found.get("record") == "run" and parts[-1].begun:
            parts.append(_RunParts(path))
        try:
            parts[-1].take(found)
        except (TypeError, ValueError, KeyError, AttributeError, RecursionError) as error:
            bad.append(BadLine(path, number, f"no record of a run file ({error.__class__.__name__}: {shorten(str(error), 80)})"))
    runs = [part.run() for part in parts if part.begun]
    if not runs:
        raise MeasureError(f"{path} is no run file.", "run files are what a measurement writes beside its notebook, in <notebook>.runs/")
    return runs, bad


PassKey = Tuple[str, str, int, str, Optional[int]]      # server label, workload, concurrency, purpose, of which level


class _RunParts:
    """A run while its file is read."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.header: Mapping[str, Any] = {}
        self.servers: Dict[str, Server] = {}
        self.prompts: Dict[str, Prompt] = {}
        self.replies: Dict[PassKey, List[Reply]] = {}
        self.passes: Dict[PassKey, Pass] = {}
        self.rulers: Dict[str, Ruler] = {}
        self.margins: Dict[Tuple[str, str, int, str, int], float] = {}

    @property
    def begun(self) -> bool:
        """Whether there is anything of a run."""
        return bool(self.header or self.replies)

    def take(self, record: Mapping[str, Any]) -> None:
        """Read one record. TypeError, ValueError, KeyError or AttributeError for what is none."""
        kind = record.get("record")
        if kind == "run":
            if not all(isinstance(record.get(key) or {}, dict) for key in ("settings", "client")):
                raise TypeError("settings and client are no objects")
            self.header = record
        elif kind == "server":
            server = server_from_json(record)
            self.servers[server.label] = server
        elif kind == RECORD_PROMPT:
            prompt = prompt_from_json(record)
            self.prompts[prompt.id] = prompt
        elif kind == RECORD_REPLY:
            key, reply = _pass_key(record), reply_from_json(record["reply"])
            self.replies.setdefault(key, []).append(reply)
        elif kind == RECORD_PASS:
            self.passes[_pass_key(record)] = pass_from_json(record)
        elif kind == "ruler":
            self.rulers[str(record["server"])] = _made(Ruler, _fields_of(Ruler, record))
        elif kind == "margin":
            place = (*_pass_key(record)[:3], str(record["prompt_id"]), int(record["repeat"]))
            if not _fits(record["margin_nats"], "float"):
                raise TypeError("margin_nats is no number")
            self.margins[place] = float(record["margin_nats"])

    def run(self) -> Run:
        """What was read, as a run. A server whose own line is lost is known by its answers alone."""
        header = self.header
        model = next((server.model for server in self.servers.values()), "unknown")
        for label, *_ in self.replies:
            self.servers.setdefault(label, Server(label, "", "", (), model))
        order = {label: place for place, label in enumerate(self.servers)}
        keys = sorted(self.replies, key=lambda key: order.get(key[0], len(order)))
        return Run(str(header.get("label", "")), str(header.get("started_at", "")), header.get("settings") or {},
                   str(header.get("prompts_sha256", "")), self.servers, self.prompts, tuple(self._pass(key) for key in keys),
                   self.rulers, self.margins, str(header.get("tool_version", "")), header.get("client") or {}, self.path)

    def _pass(self, key: PassKey) -> Pass:
        replies = tuple(self.replies[key])
        if key in self.passes:
            return replace(self.passes[key], replies=replies)
        server, workload, concurrency, purpose, of_level = key      # killed before its end: its counters were never read
        spans = [(reply.due_s or 0.0, reply.ended_s or 0.0) for reply in replies]
        wall_s = max(end for _, end in spans) - min(due for due, _ in spans)
        return Pass(server, workload, concurrency, replies, wall_s, purpose, of_level, interrupted=True,
                    acceptance=acceptance_of_pass(replies, Acceptance(missing="the run ended before the counters were read"), None))


def _pass_key(record: Mapping[str, Any]) -> PassKey:
    server, workload, concurrency = record["server"], record["workload"], record["concurrency"]
    purpose, of_level = record.get("purpose", "timed"), record.get("of_level")
    if not (_all_fit((server, workload, purpose), "str") and _fits(concurrency, "int") and concurrency and _fits(of_level, "Optional[int]")):
        raise TypeError("server, workload, concurrency, purpose or of_level is none")
    return server, workload, concurrency, purpose, of_level


def pass_records(done: Pass) -> Iterator[Dict[str, Any]]:
    """The facts of a pass as a run file keeps them; its replies stand before it as records of their own."""
    yield {"record": RECORD_PASS, "acceptance": as_json(done.acceptance), **as_json(replace(done, replies=()))}


def reply_record(server: str, workload: str, concurrency: int, purpose: str, reply: Reply, of_level: Optional[int] = None) -> Dict[str, Any]:
    """One reply as a run file keeps it."""
    return {"record": RECORD_REPLY, "server": server, "workload": workload, "concurrency": concurrency, "purpose": purpose,
            "of_level": of_level, "reply": as_json(reply)}


def run_records(run: Run, no_texts: bool) -> Iterator[Dict[str, Any]]:
    """How a run file begins: the run's facts, its servers, its prompts (by digest alone with --no-texts)."""
    yield {"record": "run", "schema": SCHEMA, "tool_version": run.tool_version, "label": run.label, "started_at": run.started_at,
           "settings": run.settings, "prompts_sha256": run.prompts_sha256, "client": run.client}
    for server in run.servers.values():
        yield {"record": "server", **as_json(server)}
    for prompt in run.prompts.values():
        yield {"record": RECORD_PROMPT, "sha256": prompt_sha256(prompt), **as_json(replace(prompt, messages=(), tools=None, answer=None) if no_texts else prompt)}


# ----------------------------------------------------------------------------------------------------------------------
# The records of the notebook. The lesson's keys keep name and meaning; ours stand beside them.


def spread_of(values: Iterable[Optional[float]], names: Sequence[str] = ("p50", "p90", "p99", "mean")) -> Optional[Dict[str, Optional[float]]]:
    """Quantiles and mean of what was measured; None where nothing was."""
    known = sorted(value for value in values if value is not None)
    if not known:
        return None
    made = {"mean": sum(known) / len(known), "max": known[-1]}
    return {name: made[name] if name in made else quantile(known, int(name[1:]) / 100) for name in names}


def endpoint_record(run: Run, done: Pass) -> Dict[str, Any]:
    """One pass as a notebook record."""
    server = run.servers[done.server]
    replies, completed = done.replies, done.completed
    rate = done.output_tokens_per_s
    speeds = spread_of((reply.decode_tokens_per_s for reply in completed), ("mean", "p50"))
    first_error = next((reply.error for reply in replies if reply.error), None)
    timings = next((reply.engine_timings for reply in completed if reply.engine_timings), None)
    return {
        "label": f"{run.label}/{done.server}", "base_url": server.base_url, "model": server.model, "requests": len(replies),
        "completed": len(completed), "failed": len(replies) - len(completed), "first_error": first_error, "wall_s": done.wall_s,
        "latency_s": spread_of((reply.e2el_s for reply in completed), ("p50", "mean", "max")) or {"p50": None, "mean": None, "max": None},
        "output_tokens": done.output_tokens, "output_tokens_per_s": rate, "tokens_counted_by_server": done.output_tokens is not None,
        "server_timings_sample": timings, "spec_metrics_delta": done.counters_delta, **_shared_keys(run, done.server),
        "prompt_count": len({reply.prompt_id for reply in replies}), "schema": SCHEMA, "kind": "endpoint", "run": run.label,
        "server_label": done.server, "purpose": done.purpose, "workload": done.workload, "concurrency": done.concurrency,
        "prompts_sha256": _pass_digest(run, done), "caveats": [as_json(caveat) for caveat in done.caveats], "tool_version": run.tool_version,
        "run_file": run.path or None, "ttft_s": spread_of(reply.ttft_s for reply in completed),
        "tpot_s": spread_of(reply.tpot_s for reply in completed), "e2el_s": spread_of(reply.e2el_s for reply in completed),
        "chunk_gap_s": spread_of(gap for reply in completed for gap in reply.chunk_gaps_s),
        "decode_tokens_per_s": speeds, "acceptance": acceptance_record(done.acceptance),
        "token_source": next((reply.token_source for reply in completed), None),
        "cached_share": cached_share(replies), "connect_s": spread_of((reply.connected_s for reply in replies), ("p50", "max")),
        "accuracy": _accuracy_record(accuracy(run.prompts, done.replies)), "server": server_record(server), "interrupted": done.interrupted,
        "load_kept": done.load_kept, "hiccup_p99_s": done.hiccup_p99_s, "started_at": done.started_at, "client": dict(run.client),
        "settings": dict(run.settings), "track": run.settings.get("track"),
    }


def _shared_keys(run: Run, label: str) -> Dict[str, Any]:
    server = run.servers[label]
    return {"lab": LAB, "engine": server.engine, "engine_version": server.version or "unknown", "max_tokens": run.settings.get("max_tokens"),
            "repeats": run.settings.get("repeats"), "recorded_at": now_utc()}


def _pass_digest(run: Run, done: Pass) -> str:
    ids = dict.fromkeys(reply.prompt_id for reply in done.replies)
    return prompts_sha256(sorted((run.prompts[key] for key in ids if key in run.prompts), key=lambda prompt: prompt.id))


def acceptance_record(acceptance: Acceptance) -> Dict[str, Any]:
    """Acceptance with its derived rates; the convention is in each name."""
    return {"source": acceptance.source, "drafts": acceptance.drafts, "draft_tokens": acceptance.draft_tokens,
            "accepted_tokens": acceptance.accepted_tokens,
            "accepted_by_position": None if acceptance.accepted_by_position is None else list(acceptance.accepted_by_position),
            "acceptance_rate": acceptance.acceptance_rate, "acceptance_length": acceptance.acceptance_length,
            "tokens_per_target_pass": acceptance.tokens_per_target_pass, "missing": acceptance.missing,
            "server_gauges": dict(acceptance.gauges) or None}


def server_record(server: Server) -> Dict[str, Any]:
    """What a notebook record keeps of a server."""
    return {"engine": server.engine, "version": server.version, "context_tokens": server.context_tokens, "slots": server.slots,
            "kv_cache_tokens": server.kv_cache_tokens, "speculating": server.speculating,
            "speculation": None if server.speculation is None else {"method": server.speculation.method,
                                                                   "draft_tokens": server.speculation.draft_tokens,
                                                                   "drafter": server.speculation.drafter},
            "answers": dict(server.answers) or None}


def _accuracy_record(counted: Optional[Tuple[int, int]]) -> Optional[Dict[str, int]]:
    return None if counted is None else {"correct": counted[0], "of": counted[1]}


def comparison_record(run: Run, cell: Comparison, caveats: Sequence[Caveat] = ()) -> Dict[str, Any]:
    """One result cell as a notebook record."""
    base, other = _timed_pass(run, cell, cell.baseline_label), _timed_pass(run, cell, cell.speculative_label)
    index = {key: place for place, key in enumerate(dict.fromkeys(reply.prompt_id for reply in base.replies))}
    agreement, floor = cell.agreement, cell.floor
    shared = _shared_keys(run, cell.speculative_label)
    return {
        "lab": LAB, "label": f"{run.label}/comparison", "engine": shared["engine"], "engine_version": shared["engine_version"],
        "model": run.servers[cell.baseline_label].model, "baseline_tokens_per_s": base.output_tokens_per_s,
        "speculative_tokens_per_s": other.output_tokens_per_s,
        "text_comparison": {"compared": agreement.pairs, "identical": agreement.identical, "divergent": agreement.pairs - agreement.identical,
                            "divergences": [_divergence(difference, index) for difference in agreement.differences[:5]]},
        "recorded_at": shared["recorded_at"], "schema": SCHEMA, "kind": "comparison", "run": run.label, "workload": cell.workload,
        "concurrency": cell.concurrency, "prompts_sha256": _pass_digest(run, base),
        "caveats": [as_json(caveat) for caveat in (*caveats, *cell.verdict.caveats)],
        "tool_version": run.tool_version, "run_file": run.path or None, "baseline_label": cell.baseline_label,
        "speculative_label": cell.speculative_label, "throughput_ratio": _ratio_record(cell.throughput_ratio),
        "decode_ratio": _ratio_record(cell.decode_ratio), "self_ratio": _ratio_record(cell.self_ratio),
        "exact_match": agreement.exact_match, "prefix_agreement": agreement.prefix_agreement,
        "incomparable": [list(pair) for pair in agreement.incomparable],
        "noise_floor": None if floor is None else {"exact_match": floor.exact_match, "prefix_agreement": floor.prefix_agreement,
                                                   "concurrency": cell.floor_concurrency, "pairs": floor.pairs},
        "verdict": {"speed": cell.verdict.speed, "answers": cell.verdict.answers, "reasons": list(cell.verdict.reasons)},
        "baseline_accuracy": _accuracy_record(cell.baseline_accuracy), "speculative_accuracy": _accuracy_record(cell.speculative_accuracy),
        "ruler": None if cell.ruler is None else as_json(cell.ruler), "smallest_detectable_change": cell.smallest_change,
        "advice": list(cell.advice), "break_even": dict(cell.why), "max_tokens": shared["max_tokens"], "track": run.settings.get("track"),
    }


def _timed_pass(run: Run, cell: Comparison, label: str) -> Pass:
    return next(done for done in run.passes if (done.server, done.workload, done.concurrency, done.purpose) == (
        label, cell.workload, cell.concurrency, "timed"))


def _divergence(difference: Difference, index: Mapping[str, int]) -> Dict[str, Any]:
    return {"prompt_index": index.get(difference.prompt_id), "first_difference_at_char": difference.first_char,
            "baseline_tail": difference.baseline_tail, "speculative_tail": difference.other_tail, "prompt_id": difference.prompt_id,
            "repeat": difference.repeat, "kind": difference.kind, "channel": difference.channel,
            "first_difference_at_byte": difference.first_byte, "margin_nats": difference.margin_nats, "detail": difference.detail}


def without_words(record: Mapping[str, Any]) -> Dict[str, Any]:
    """A comparison's record with no word of any answer in it (--no-texts): places and kinds of the differences stay."""
    told = record["text_comparison"]
    divergences = [{**one, "baseline_tail": "", "speculative_tail": "", "detail": _WORDS.sub("(not kept)", one["detail"])}
                   for one in told["divergences"]]
    verdict = {**record["verdict"], "reasons": [_WORDS.sub("(not kept)", reason) for reason in record["verdict"]["reasons"]]}
    return {**record, "text_comparison": {**told, "divergences": divergences}, "verdict": verdict}


# What reasons quote: `words` in their marks (from the first mark to the last, whatever stands between), a piece as repr() writes it.
_WORDS = re.compile(r"`.*`|(?<=only )(?:'.*'|\".*\")(?= is )", re.DOTALL)


def _ratio_record(ratio: Optional[Ratio]) -> Optional[Dict[str, Any]]:
    return None if ratio is None else {"value": ratio.value, "low": ratio.low, "high": ratio.high, "pairs": ratio.pairs}


# ----------------------------------------------------------------------------------------------------------------------
# Several run files as one run


_MUST_BE_EQUAL = ("max_tokens", "seed", "repeats", "no_think", "extra_body", "share_prompts")


def joined(first: Run, others: Sequence[Run]) -> Run:
    """One run out of several, the first one's baseline being the baseline: as if all had been measured together.

    MeasureError where they cannot be compared: another model, other prompts, another token limit or sampling.
    """
    if BASELINE not in first.servers:
        raise MeasureError(f"{first.path} holds no baseline.", "name the baseline's run file first")
    servers, passes = dict(first.servers), list(first.passes)
    prompts, rulers, margins = dict(first.prompts), dict(first.rulers), dict(first.margins)
    for other in others:
        _refuse_unlike(first, other)
        names = _names_in(other, set(servers))
        for label, name in names.items():
            servers[name] = replace(other.servers[label], label=name)
        passes += [replace(done, server=names[done.server]) for done in other.passes if done.server in names]
        rulers.update({names[label]: ruler for label, ruler in other.rulers.items() if label in names})
        margins.update({(names[key[0]], *key[1:]): margin for key, margin in other.margins.items() if key[0] in names})
        prompts.update(other.prompts)
    return replace(first, servers=servers, passes=tuple(passes), prompts=prompts, rulers=rulers, margins=margins)


def _names_in(other: Run, taken: set) -> Dict[str, str]:
    """What each configuration of a run is called among the others: a run of one server goes by the run's label."""
    labels = [label for label in other.servers if label != BASELINE] or [BASELINE]
    names = {}
    for label in labels:
        wanted = other.label if label == BASELINE else label
        wanted = wanted or os.path.splitext(os.path.basename(other.path))[0]
        name, number = wanted, 2
        while name in taken:
            name, number = f"{wanted}-{number}", number + 1
        taken.add(name)
        names[label] = name
    return names


def _refuse_unlike(first: Run, other: Run) -> None:
    mine, theirs = first.servers[BASELINE].model, next(iter(other.servers.values())).model if other.servers else ""
    if mine != theirs:
        raise MeasureError(f"{other.path} measured another model: {theirs!r}, not {mine!r}.", "compare runs of one model")
    for key in _MUST_BE_EQUAL:
        if first.settings.get(key) != other.settings.get(key):
            raise MeasureError(f"{other.path} was measured with another {key}: {other.settings.get(key)!r}, not {first.settings.get(key)!r}.",
                               "measure both with the same options")
    shared = [key for key in other.prompts if key in first.prompts]
    unlike = next((key for key in shared if prompt_sha256(first.prompts[key]) != prompt_sha256(other.prompts[key])), None)
    if unlike or not shared:
        raise MeasureError(f"{other.path} was measured with other prompts{f' (its {unlike} is another)' if unlike else ''}.",
                           "measure both with the same --prompts, --prompt-set and --limit")


_ENDPOINT_TYPES = {"label": str, "model": str, "requests": int, "completed": int, "failed": int, "wall_s": (int, float), "latency_s": dict,
                   "lab": str, "recorded_at": str}
_COMPARISON_TYPES = {"label": str, "model": str, "text_comparison": dict, "lab": str, "recorded_at": str}
_OUR_TYPES = {"workload": str, "concurrency": int, "prompts_sha256": str, "caveats": list, "tool_version": str}


def schema_problems(record: Mapping[str, Any]) -> List[str]:
    """What is wrong with a notebook record, a sentence each; nothing for a good one. Unknown keys are welcome."""
    wanted: Dict[str, Any] = dict(_ENDPOINT_TYPES if record_kind(record) == "endpoint" else _COMPARISON_TYPES)
    if "schema" in record:
        wanted.update(_OUR_TYPES)
        if record["schema"] != SCHEMA:
            return [f"schema {record['schema']!r} is not known here (this version writes {SCHEMA})"]
    name = f"{record.get('label', 'a record')} of {record.get('recorded_at', 'no day')}"
    problems = [f"{name}: the key {key!r} is missing" for key in wanted if key not in record]
    for key, kind in wanted.items():
        if key in record and (not isinstance(record[key], kind) or isinstance(record[key], bool)):
            problems.append(f"{name}: the key {key!r} holds a {type(record[key]).__name__}")
    return problems


# ======================================================================================================================
# 14. Tables, CSV, page (pure)
# ======================================================================================================================
#
# One Table, several renderings.
# What a formatter may do with a number: scale its unit and round it. What is derived is derived above, in the records.


Cell = Union[None, str, int, float]     # None: not measured
Record = Mapping[str, Any]              # one JSON line of a notebook

DASH = "–"                              # "not measured" where a person reads; '-' where the stream knows ASCII only


@dataclass(frozen=True)
class Column:
    """What stands in one column: its name, the unit, and how its numbers are shown (value x scale, so many decimals)."""

    name: str
    unit: str = ""
    align: str = "left"             # left: text | right: numbers
    decimals: int = 0
    scale: float = 1

    @property
    def heading(self) -> str:
        """The name with its unit: 'TTFT p50 [ms]'."""
        return f"{self.name} [{self.unit}]" if self.unit else self.name


@dataclass(frozen=True)
class Table:
    """Results as rows of cells, rendered for a terminal, Markdown, a spreadsheet or a browser."""

    title: str
    columns: Tuple[Column, ...]
    rows: Tuple[Tuple[Cell, ...], ...]
    footer: Tuple[str, ...] = ()


def number(name: str, unit: str = "", decimals: int = 0, scale: float = 1) -> Column:
    """A column of numbers, on the right."""
    return Column(name, unit, "right", decimals, scale)


def shown(cell: Cell, column: Column) -> str:
    """A cell as a person reads it: scaled to the column's unit, thousands set apart, a dash for what was not measured."""
    if cell is None:
        return DASH
    if isinstance(cell, str):
        return cell
    return f"{cell * column.scale:,.{column.decimals}f}"


# --- Escaping: text of a server, a label or a prompt is hostile until it went through one of these ---------------------

_INVISIBLE = {"Cc", "Cf", "Cs", "Zl", "Zp"}     # control, format (bidi among them), lone surrogates, separators
_ASCII = str.maketrans({
    "–": "-", "—": "-", "−": "-", "×": "x", "·": "|", "→": ">", "τ": "t", "α": "a", "…": "~", "±": "~", "≥": ">",
    "≤": "<", "“": '"', "”": '"', "‘": "'", "’": "'", "µ": "u", "─": "-", "█": "#", "\u202f": " ", "\u00a0": " "})


def _visible(character: str) -> str:
    if unicodedata.category(character) not in _INVISIBLE:
        return character
    code = ord(character)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def visible_text(text: str, keep: str = "") -> str:
    """The text with every control, bidi and otherwise invisible character written out (\\x1b, \\u202e), save `keep`."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(c if c in keep else _visible(c) for c in text)


def terminal_text(text: str) -> str:
    """The text on one line, unable to move a cursor, change a colour or turn the reading direction."""
    return visible_text(text)


def encodable(text: str, encoding: Optional[str]) -> str:
    """The text as `encoding` can carry it: typographic signs by their ASCII stand-ins, all else as \\u....

    Every stand-in is one character wide, so that aligned columns stay aligned.
    """
    encoding = encoding or "ascii"
    try:
        text.encode(encoding)
        return text
    except (UnicodeEncodeError, LookupError):
        plain = text.translate(_ASCII)
    try:
        return plain.encode(encoding, "backslashreplace").decode(encoding)
    except LookupError:
        return plain.encode("ascii", "backslashreplace").decode("ascii")


def markdown_text(text: str) -> str:
    """The text as one cell of a Markdown table: no pipe, line break, link, image, emphasis or HTML of its own."""
    text = visible_text(text, keep="\n\r")
    text = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    text = re.sub(r"([\\`*\[\]|~])", r"\\\1", text)
    text = re.sub(r"(?<![^\W_])_|_(?![^\W_])", r"\\_", text)     # inside a word an underscore is only itself
    return re.sub(r"\r\n|\r|\n", "<br>", text)


def csv_safe_text(text: str) -> str:
    """The text as a cell that no spreadsheet takes for a formula: ' before a leading = + - @ TAB CR."""
    text = visible_text(text, keep="\n\r\t")
    return "'" + text if text[:1] in ("=", "+", "-", "@", "\t", "\r") and text else text


def html_text(text: str) -> str:
    """The text as HTML content or attribute value; line breaks and tabs stay."""
    text = visible_text(text, keep="\n\t")
    for sign, entity in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;"), ('"', "&quot;"), ("'", "&#39;")):
        text = text.replace(sign, entity)
    return text


# --- A table on a terminal ---------------------------------------------------------------------------------------------

_GAP = 2                # blanks between columns
_LONGEST_WORD = 24      # a longer word may be cut: names of configurations stay whole, digests need not
_BREAK = re.compile(r"(?<!\d) | (?!(?:%|×|s|ms|nats|tokens/s)(?:\W|$))")    # a number and its unit stay on one line


def text_width(text: str) -> int:
    """How many columns of a terminal the text takes: wide East Asian signs two, combining marks none."""
    if text.isascii():
        return len(text)
    return sum(0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


def _split_word(word: str, width: int) -> List[str]:
    parts, part = [], ""
    for character in word:
        if part and text_width(part + character) > width:
            parts.append(part)
            part = ""
        part += character
    return parts + [part]


def wrapped(text: str, width: int) -> List[str]:
    """The text in lines of at most `width` columns, broken at blanks, and inside a word only where it must be."""
    lines: List[str] = []
    line = ""
    for word in _BREAK.split(text):
        joined = f"{line} {word}" if line else word
        if text_width(joined) <= width:
            line = joined
            continue
        lines += [line] if line else []
        *full, line = _split_word(word, max(1, width))
        lines += full
    return lines + [line]


def _padded(text: str, width: int, align: str) -> str:
    blanks = " " * max(0, width - text_width(text))
    return blanks + text if align == "right" else text + blanks


def _column_widths(grid: Sequence[Sequence[str]], columns: Sequence[Column], room: int) -> List[int]:
    """Widths that fit `room` where they can: room goes to the cells first, then to headings on one line."""
    stacks = [[row[i] for row in grid] for i in range(len(columns))]
    widths = [_least_width(stack, column) for stack, column in zip(stacks, columns)]
    widths = _widened(widths, [max(map(text_width, stack[1:] + [""])) for stack in stacks], room)
    return _widened(widths, [text_width(stack[0]) for stack in stacks], room)


def _least_width(stack: Sequence[str], column: Column) -> int:
    """No narrower than a word of the heading, nor than a number, nor than a word of the text."""
    words = _BREAK.split(stack[0])
    for cell in stack[1:]:
        pieces = [cell] if column.align == "right" else _BREAK.split(cell)
        words += [piece[:_LONGEST_WORD] for piece in pieces]
    return max(map(text_width, words))


def _widened(widths: List[int], wanted: List[int], room: int) -> List[int]:
    """The widths grown towards the wanted ones as far as `room` goes, the modest wishes first."""
    grown = list(widths)
    for i in sorted(range(len(wanted)), key=lambda i: wanted[i]):
        grown[i] += max(0, min(wanted[i] - grown[i], room - _total(grown)))
    return grown


def _total(widths: Sequence[int]) -> int:
    return sum(widths) + _GAP * (len(widths) - 1)


def _column_groups(widths: Sequence[int], room: int) -> List[List[int]]:
    """Columns in blocks that fit, the first column leading each block."""
    groups: List[List[int]] = [[0]]
    for i in range(1, len(widths)):
        if len(groups[-1]) > 1 and _total([widths[j] for j in groups[-1] + [i]]) > room:
            groups.append([0])
        groups[-1].append(i)
    return groups


def _row_lines(cells: Sequence[str], widths: Sequence[int], columns: Sequence[Column]) -> List[str]:
    stacks = [wrapped(cell, width) for cell, width in zip(cells, widths)]
    height = max(len(stack) for stack in stacks)
    lines = []
    for line in range(height):
        parts = [_padded(stack[line] if line < len(stack) else "", width, column.align)
                 for stack, width, column in zip(stacks, widths, columns)]
        lines.append((" " * _GAP).join(parts).rstrip())
    return lines


def _text_block(grid: List[List[str]], columns: Sequence[Column], room: int, rule: str) -> List[str]:
    widths = [min(width, room) for width in _column_widths(grid, columns, room)]
    lines = _row_lines(grid[0], widths, columns)
    lines.append((" " * _GAP).join(rule * width for width in widths))
    for row in grid[1:]:
        lines += _row_lines(row, widths, columns)
    return lines


def table_text(table: Table, width: int = 80, encoding: Optional[str] = "utf-8") -> str:
    """The table for a terminal of `width` columns: wrapped, and split into blocks where it is too wide even then."""
    def fit(text: str) -> str:
        return encodable(terminal_text(text), encoding)

    grid = [[fit(column.heading) for column in table.columns]]
    grid += [[fit(shown(cell, column)) for cell, column in zip(row, table.columns)] for row in table.rows]
    least = [_least_width([row[i] for row in grid], column) for i, column in enumerate(table.columns)]
    lines = wrapped(fit(table.title), width) if table.title else []
    for group in _column_groups(least, width):
        lines += [""] if lines else []
        lines += _text_block([[row[i] for i in group] for row in grid], [table.columns[i] for i in group], width, fit("─"))
    for sentence in table.footer:
        lines += wrapped(fit(sentence), width)
    return "\n".join(lines) + "\n"


# --- The same table for other readers ----------------------------------------------------------------------------------


def table_markdown(table: Table) -> str:
    """The table as a GitHub pipe table: numbers on the right, units in the heading, the footer as lines below."""
    def line(cells: Iterable[str]) -> str:
        return "| " + " | ".join(cells) + " |"

    lines = [f"**{markdown_text(table.title)}**", ""] if table.title else []
    lines.append(line(column.heading for column in table.columns))      # headings are our own words
    lines.append(line("---:" if column.align == "right" else ":---" for column in table.columns))
    for row in table.rows:
        lines.append(line(markdown_text(shown(cell, column)) for cell, column in zip(row, table.columns)))
    lines += [""] + [markdown_text(sentence) + "  " for sentence in table.footer] if table.footer else []
    return "\n".join(lines) + "\n"


def _csv_cell(cell: Cell, decimal_comma: bool) -> str:
    """One cell, quoted where RFC 4180 wants it. Numbers stay numbers; what was not measured is empty."""
    if cell is None or isinstance(cell, float) and not math.isfinite(cell):
        return ""
    if isinstance(cell, bool):
        return "true" if cell else "false"
    if not isinstance(cell, str):
        return repr(cell).replace(".", ",") if decimal_comma else repr(cell)
    text = csv_safe_text(cell)
    return '"' + text.replace('"', '""') + '"' if re.search(r'[",;\r\n\t]|^\s|\s$', text) else text


def table_csv(table: Table, decimal_comma: bool = False, bom: bool = False) -> str:
    """The table as RFC 4180 text with raw numbers; with `decimal_comma` for spreadsheets that read 1,5 and part by ';'."""
    separator = ";" if decimal_comma else ","
    grid: List[Sequence[Cell]] = [[column.heading for column in table.columns], *table.rows]
    lines = [separator.join(_csv_cell(cell, decimal_comma) for cell in row) for row in grid]
    return ("\ufeff" if bom else "") + "".join(line + "\r\n" for line in lines)


def table_html(table: Table) -> str:
    """The table in a box of its own, which scrolls sideways so that the page does not."""
    head = "".join(f'<th scope="col"{_side(column)}>{html_text(column.heading)}</th>' for column in table.columns)
    body = "".join(_html_row(row, table.columns) for row in table.rows)
    foot = "".join(f'<p class="note">{html_text(sentence)}</p>' for sentence in table.footer)
    title = html_text(table.title)
    return (f'<div class="scroll" tabindex="0" role="region" aria-label="{title}"><table><caption>{title}</caption>'
            f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>{foot}\n")


def _side(column: Column) -> str:
    return ' class="n"' if column.align == "right" else ""


def _html_row(row: Sequence[Cell], columns: Sequence[Column]) -> str:
    first, rest = html_text(shown(row[0], columns[0])), zip(row[1:], columns[1:])
    cells = "".join(f"<td{_side(column)}>{html_text(shown(cell, column))}</td>" for cell, column in rest)
    return f'<tr><th scope="row">{first}</th>{cells}</tr>'


# --- From records to result cells --------------------------------------------------------------------------------------


def number_at(record: Record, *path: Any) -> Optional[float]:
    """The number at `path` of a record; None where it, or anything on the way to it, is missing or beyond measuring."""
    value = value_at(record, *path)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not -1e18 < value < 1e18:
        return None
    return value


def text_at(record: Record, *path: Any) -> str:
    """The text at `path` of a record, '' where there is none."""
    value = value_at(record, *path)
    return value if isinstance(value, str) else ""


def list_at(record: Record, *path: Any) -> List[Any]:
    """The list at `path` of a record, empty where there is none."""
    value = value_at(record, *path)
    return list(value) if isinstance(value, (list, tuple)) else []


def value_at(record: Any, *path: Any) -> Any:
    """What stands at `path` of a record, None where anything on the way is missing."""
    for key in path:
        if not isinstance(record, Mapping) or key not in record:
            return None
        record = record[key]
    return record


def record_run(record: Record) -> str:
    """The run that a record belongs to: the label that the user gave it."""
    return text_at(record, "run") or text_at(record, "label").rpartition("/")[0] or text_at(record, "label")


def record_workload(record: Record) -> str:
    """The workload of a record; the lesson's own lines know only the built-in prompts."""
    return text_at(record, "workload") or "builtin"


def record_level(record: Record) -> int:
    """The concurrency of a record; the lesson's own lines are single-stream."""
    return max(1, int(number_at(record, "concurrency") or 1))


def record_server(record: Record) -> str:
    """The label of the server that an endpoint record is about."""
    return text_at(record, "server_label") or text_at(record, "label").rpartition("/")[2] or BASELINE


@dataclass(frozen=True)
class ResultCell:
    """One configuration on one workload at one level, with the records that tell of it (empty where there is none)."""

    run: str
    workload: str
    concurrency: int
    configuration: str              # '' for a baseline that nothing was held against
    baseline: Record
    speculative: Record
    comparison: Record

    @property
    def newest(self) -> Record:
        """The record that tells most and last."""
        return self.comparison or self.speculative or self.baseline

    @property
    def baseline_tokens_per_s(self) -> Optional[float]:
        """Output throughput of the baseline."""
        return _first_known(number_at(self.comparison, "baseline_tokens_per_s"),
                            number_at(self.baseline, "output_tokens_per_s"))

    @property
    def speculative_tokens_per_s(self) -> Optional[float]:
        """Output throughput of the configuration."""
        return _first_known(number_at(self.comparison, "speculative_tokens_per_s"),
                            number_at(self.speculative, "output_tokens_per_s"))

    @property
    def throughput_ratio(self) -> Optional[float]:
        """Speculative over baseline output throughput: the lesson's ratio."""
        stored = number_at(self.comparison, "throughput_ratio", "value")
        before, after = self.baseline_tokens_per_s, self.speculative_tokens_per_s
        return stored if stored is not None or not before or after is None else after / before

    @property
    def speedup(self) -> Optional[float]:
        """Speculative over baseline decode speed of a request; of throughput where no decode speed was measured."""
        return _first_known(number_at(self.comparison, "decode_ratio", "value"), self.throughput_ratio)

    @property
    def speedup_interval(self) -> Tuple[Optional[float], Optional[float]]:
        """The 95 % interval of the speedup."""
        kind = "decode_ratio" if value_at(self.comparison, "decode_ratio", "value") is not None else "throughput_ratio"
        return number_at(self.comparison, kind, "low"), number_at(self.comparison, kind, "high")

    @property
    def acceptance_rate(self) -> Optional[float]:
        """Accepted share of the drafted tokens, 0..1."""
        return _first_known(number_at(self.speculative, "acceptance", "acceptance_rate"),
                            number_at(self.comparison, "break_even", "acceptance_rate"))

    @property
    def acceptance_length(self) -> Optional[float]:
        """Tokens of a verify step that had a draft, the bonus token included."""
        return number_at(self.speculative, "acceptance", "acceptance_length")

    @property
    def compared(self) -> Optional[float]:
        """Pairs of answers that could be compared."""
        return number_at(self.comparison, "text_comparison", "compared")

    @property
    def identical(self) -> Optional[float]:
        """Pairs of answers that are the same byte for byte."""
        return number_at(self.comparison, "text_comparison", "identical")

    @property
    def exact_match(self) -> Optional[float]:
        """Share of the pairs that are identical, 0..1."""
        stored = number_at(self.comparison, "exact_match")
        if stored is not None or not self.compared or self.identical is None:
            return stored
        return self.identical / self.compared


def _first_known(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)


def result_cells(records: Iterable[Record]) -> List[ResultCell]:
    """Every result in the notebook's order: a comparison with the two passes before it that it compares, or a pass alone."""
    cells: List[ResultCell] = []
    passes: Dict[Tuple[Any, ...], Record] = {}
    told: set = set()
    for record in records:
        kind = record_kind(record)
        if kind == "endpoint" and text_at(record, "purpose") in ("", "timed"):
            _remember(passes, record)
        elif kind == "comparison":
            cells.append(_compared_cell(record, passes))
            told.update((id(cells[-1].baseline), id(cells[-1].speculative)))
    alone = {id(record): record for record in passes.values() if id(record) not in told}
    return cells + _cells_alone(list(alone.values()), passes)


def _remember(passes: Dict[Tuple[Any, ...], Record], record: Record) -> None:
    """Keep the pass under its run, and under its prompts and model for comparisons of runs measured apart."""
    for key in _keys(record, record_server(record)):
        passes[key] = record


def _keys(record: Record, server: str) -> List[Tuple[Any, ...]]:
    """Under what a server's pass is found for this record: its run; its prompts and model, where the prompts are told."""
    place = (server, record_workload(record), record_level(record))
    prompts = text_at(record, "prompts_sha256")
    return [(record_run(record),) + place] + ([(prompts, text_at(record, "model")) + place] if prompts else [])


def _pass_of(record: Record, server: str, passes: Mapping[Tuple[Any, ...], Record]) -> Record:
    return next((passes[key] for key in _keys(record, server) if key in passes), {})


def _compared_cell(record: Record, passes: Mapping[Tuple[Any, ...], Record]) -> ResultCell:
    name = text_at(record, "speculative_label") or "speculative"
    baseline = _pass_of(record, text_at(record, "baseline_label") or BASELINE, passes)
    return ResultCell(record_run(record), record_workload(record), record_level(record), name,
                      baseline, _pass_of(record, name, passes), record)


def _cells_alone(alone: Sequence[Record], passes: Mapping[Tuple[Any, ...], Record]) -> List[ResultCell]:
    """Passes that no comparison tells of: a single server, or a run that ended before it could compare."""
    drafted = [record for record in alone if record_server(record) != BASELINE]
    cells = [ResultCell(record_run(record), record_workload(record), record_level(record), record_server(record),
                        _pass_of(record, BASELINE, passes), record, {}) for record in drafted]
    paired = {id(cell.baseline) for cell in cells}
    return cells + [ResultCell(record_run(record), record_workload(record), record_level(record), "", record, {}, {})
                    for record in alone if record_server(record) == BASELINE and id(record) not in paired]


def latest_cells(cells: Iterable[ResultCell]) -> List[ResultCell]:
    """The last result for each configuration, workload and level, of the model that was measured last."""
    cells = list(cells)
    model = text_at(max(cells, key=_when).newest, "model") if cells else ""
    latest: Dict[Tuple[str, str, int], ResultCell] = {}
    for cell in cells:
        if text_at(cell.newest, "model") == model:
            latest[(cell.workload, cell.configuration, cell.concurrency)] = cell
    return list(latest.values())


def _when(cell: ResultCell) -> str:
    return text_at(cell.newest, "recorded_at")


def _known(values: Iterable[Any]) -> List[Any]:
    """The values that are known, each once, in their order."""
    return list(dict.fromkeys(value for value in values if value not in (None, "")))


# --- The lesson's table ------------------------------------------------------------------------------------------------

PENDING = "pending"
LESSON_ROWS = (     # the row's words, its workloads, its level
    ("Copy-heavy (quote a function back)", ("copy",), 1),
    ("Closed questions", ("closed",), 1),
    ("Open-ended writing", ("open",), 1),
    ("Concurrency 10, mixed", ("mixed", "builtin"), 10),
)
_LESSON_COLUMNS = (Column("Workload"), number("Baseline tokens/s"), number("With draft tokens/s"), number("Ratio"),
                   number("Acceptance"), Column("Completions identical"))


def lesson_table(records: Iterable[Record], configuration: Optional[str] = None) -> Table:
    """The lesson's four rows, each from its latest comparison; a row that was never measured stays pending."""
    cells = _lesson_cells(result_cells(records), configuration)
    rows = [(words, *_lesson_row(cell)) for (words, _, _), cell in zip(LESSON_ROWS, cells)]
    return Table("Speculative decoding: the four workloads", _LESSON_COLUMNS, tuple(rows),
                 _lesson_footer([cell for cell in cells if cell]))


def _lesson_cells(cells: Sequence[ResultCell], configuration: Optional[str]) -> List[Optional[ResultCell]]:
    """For each row its latest comparison, None where there is none."""
    compared = [cell for cell in cells if cell.comparison and configuration in (None, cell.configuration)]
    return [next((cell for cell in reversed(compared)
                  if cell.workload in workloads and cell.concurrency == level), None)
            for _, workloads, level in LESSON_ROWS]


def _lesson_row(cell: Optional[ResultCell]) -> Tuple[str, ...]:
    if cell is None:
        return (PENDING,) * (len(_LESSON_COLUMNS) - 1)
    return (_decimal(cell.baseline_tokens_per_s, 1), _decimal(cell.speculative_tokens_per_s, 1),
            times(cell.throughput_ratio), percent(cell.acceptance_rate), _identical_words(cell))


def _identical_words(cell: ResultCell) -> str:
    """'yes, 24 of 24', or 'no, 5 of 8 (rounding only)'."""
    if not cell.compared or cell.identical is None:
        return DASH
    counts = f"{cell.identical:.0f} of {cell.compared:.0f}"
    if cell.identical == cell.compared:
        return f"yes, {counts}"
    word = text_at(cell.comparison, "verdict", "answers")
    return f"no, {counts} ({word})" if word else f"no, {counts}"


def _lesson_footer(cells: Sequence[ResultCell]) -> Tuple[str, ...]:
    """What makes the rows reproducible: track, engine and build, model, context, day."""
    if not cells:
        return ("Nothing measured yet.",)
    facts = (("Track", [text_at(cell.speculative, "track") or text_at(cell.comparison, "track") for cell in cells]),
             ("engine", [_engine_words(cell.comparison) for cell in cells]),
             ("model (the same on both servers)", [text_at(cell.comparison, "model") for cell in cells]),
             ("configuration", [cell.configuration for cell in cells]),
             ("context", [_context_words(cell) for cell in cells]),
             ("day", [_when(cell)[:10] for cell in cells]))
    told = [f"{name}: {', '.join(_known(values)) or DASH}" for name, values in facts]
    return (" · ".join(told),)


def _engine_words(record: Record) -> str:
    return " ".join(_known([text_at(record, "engine"), text_at(record, "engine_version")]))


def _context_words(cell: ResultCell) -> str:
    tokens = _first_known(number_at(cell.speculative, "server", "context_tokens"),
                          number_at(cell.baseline, "server", "context_tokens"))
    return "" if tokens is None else f"{tokens:,.0f} tokens"


def _decimal(value: Optional[float], decimals: int) -> str:
    return DASH if value is None else f"{value:,.{decimals}f}"


def times(value: Optional[float]) -> str:
    """A ratio as a person reads it: '1.62×'."""
    return DASH if value is None else f"{value:.2f}×"


def percent(value: Optional[float], decimals: int = 0) -> str:
    """A share as a person reads it: '62 %'."""
    return DASH if value is None else f"{value * 100:.{decimals}f} %"


def duration(seconds: Optional[float]) -> str:
    """Seconds as a person reads them: '0.52 ms', '123 ms', '4.87 s'."""
    if seconds is None:
        return DASH
    if seconds >= 1:
        return f"{seconds:,.2f} s"
    return f"{seconds * 1000:.0f} ms" if seconds >= 0.1 else f"{seconds * 1000:.3g} ms"


# --- Filling in somebody's own Markdown table --------------------------------------------------------------------------

_FILLABLE = (   # a heading's words -> the place in a lesson row
    (r"baseline.*tok", 0), (r"(draft|specul).*tok", 1), (r"ratio|speed-?up", 2), (r"acceptance", 3), (r"identical", 4))
_UNFILLED = re.compile(r"[\s*_]*(pending|tbd|expected:? *(yes|no)?)?[\s*_]*", re.IGNORECASE)


def fill_pending(markdown: str, records: Iterable[Record], configuration: Optional[str] = None) -> str:
    """The Markdown with the empty and pending cells of the lesson's table filled in; every other byte as it was."""
    cells = _lesson_cells(result_cells(records), configuration)
    lines = re.split(r"(?<=\n)", markdown)
    places: List[Optional[int]] = []        # of the table that the line stands in: what each column takes
    fenced = False
    for i, line in enumerate(lines):
        fenced ^= bool(re.match(r" {0,3}(```|~~~)", line))
        if fenced or "|" not in line:
            places = []
        elif _is_rule(line) and i:
            places = _column_places(lines[i - 1])
        elif places:
            lines[i] = _filled_row(line, places, cells)
    return "".join(lines)


def _is_rule(line: str) -> bool:
    return bool(re.fullmatch(r"\s*\|?(\s*:?-+:?\s*\|)+\s*(:?-+:?)?\s*", line))


def _split_row(line: str) -> List[str]:
    """The cells of a pipe row, with the pieces before the first and after the last pipe as they are."""
    return re.split(r"(?<!\\)\|", line)


def _column_places(heading: str) -> List[Optional[int]]:
    """For each piece of the heading the place in a lesson row that fills it; empty where this is another table."""
    places = [next((place for words, place in _FILLABLE if re.search(words, piece, re.IGNORECASE)), None)
              for piece in _split_row(heading)]
    return places if re.search("workload", heading, re.IGNORECASE) and any(p is not None for p in places) else []


def _filled_row(line: str, places: Sequence[Optional[int]], cells: Sequence[Optional[ResultCell]]) -> str:
    pieces = _split_row(line)
    leading = 1 if line.lstrip().startswith("|") else 0
    cell = _row_cell(pieces[leading] if leading < len(pieces) else "", cells)
    if cell is None:
        return line
    values = _lesson_row(cell)
    last = len(pieces) - 1 if pieces[-1].strip() == "" else len(pieces)     # what follows the closing pipe is no cell
    for i, place in enumerate(places[:last]):
        if i > leading and place is not None and values[place] != DASH and _UNFILLED.fullmatch(pieces[i]):
            pieces[i] = _in_place_of(pieces[i], markdown_text(values[place]))
    return "|".join(pieces)


def _row_cell(words: str, cells: Sequence[Optional[ResultCell]]) -> Optional[ResultCell]:
    """The measurement that a row asks for by its first cell."""
    marks = (r"\bcopy", r"\bclosed", r"\bopen", r"concurrency *10\b")
    return next((cell for mark, cell in zip(marks, cells) if re.search(mark, words, re.IGNORECASE)), None)


def _in_place_of(piece: str, value: str) -> str:
    """The value, padded to the cell's own width where it fits, so that a neat table stays neat."""
    line_end = piece[len(piece.rstrip("\r\n")):]     # a last cell without a closing pipe holds the line's end
    return f" {value} ".ljust(len(piece) - len(line_end)) + line_end


# --- The tutorial's tables ---------------------------------------------------------------------------------------------


def tutorial_tables(records: Iterable[Record]) -> List[Table]:
    """For each workload: acceptance length and speedup by level; outputs and accuracy, the noise floor first."""
    cells = [cell for cell in latest_cells(result_cells(records)) if cell.configuration]
    tables: List[Table] = []
    for workload in _known(cell.workload for cell in cells):
        own = [cell for cell in cells if cell.workload == workload]
        tables += [_speed_table(workload, own), _outputs_table(workload, own)]
    return tables


def _levels(cells: Iterable[ResultCell]) -> List[int]:
    return sorted({cell.concurrency for cell in cells})


def _by_configuration(cells: Iterable[ResultCell]) -> Dict[str, Dict[int, ResultCell]]:
    """Cells of one workload by configuration, then by level."""
    table: Dict[str, Dict[int, ResultCell]] = {}
    for cell in cells:
        table.setdefault(cell.configuration, {})[cell.concurrency] = cell
    return table


def _speed_table(workload: str, cells: Sequence[ResultCell]) -> Table:
    levels = _levels(cells)
    columns = [Column("Configuration"), number(f"Acceptance length at {levels[0]}", "tokens", 2)]
    columns += [number(f"Speedup at {level}", "", 2) for level in levels]
    columns += [number(f"Throughput at {level}", "tokens/s", 1) for level in levels]
    rows: List[Tuple[Cell, ...]] = []
    for name, by_level in _by_configuration(cells).items():
        at = [by_level.get(level) for level in levels]
        rows.append((name, at[0].acceptance_length if at[0] else None, *[cell.speedup if cell else None for cell in at],
                     *[cell.speculative_tokens_per_s if cell else None for cell in at]))
    return Table(f"{workload}: acceptance and speed", tuple(columns), tuple(rows),
                 ("Acceptance length counts the bonus token. Speedup: decode speed of a request over the baseline's at "
                  "the same concurrency.",))


_OUTPUT_COLUMNS = (Column("Configuration"), number("Exact match", "%", 0, 100), number("Prefix agreement", "%", 0, 100),
                   number("Accuracy"), Column("Answers"))


def _outputs_table(workload: str, cells: Sequence[ResultCell]) -> Table:
    """Outputs against the baseline at the lowest level, under the baseline's agreement with itself."""
    lowest = _levels(cells)[0]
    rows: List[Tuple[Cell, ...]] = [_floor_row([cell for cell in cells if cell.concurrency == lowest])]
    for name, by_level in _by_configuration(cells).items():
        record = by_level[lowest].comparison if lowest in by_level else {}
        rows.append((name, by_level[lowest].exact_match if record else None, number_at(record, "prefix_agreement"),
                     counts_words(value_at(record, "speculative_accuracy")),
                     text_at(record, "verdict", "answers") or None))
    return Table(f"{workload}: outputs and accuracy", _OUTPUT_COLUMNS, tuple(rows),
                 (f"Held against the baseline's answers at concurrency {lowest}.",))


def _floor_row(cells: Sequence[ResultCell]) -> Tuple[Cell, ...]:
    """The baseline against itself: what disagreement costs nothing."""
    floor = _first_known(*[value_at(cell.comparison, "noise_floor") for cell in cells])
    accuracy = _first_known(*[value_at(cell.comparison, "baseline_accuracy") for cell in cells])
    level = number_at(floor or {}, "concurrency")
    name = "noise floor: baseline again" + (f", at {level:.0f}" if level else "")
    return (name, number_at(floor or {}, "exact_match"), number_at(floor or {}, "prefix_agreement"),
            counts_words(accuracy), None)


def counts_words(accuracy: Any) -> Optional[str]:
    """'17 of 26', None where nothing was graded."""
    correct, of = number_at(accuracy or {}, "correct"), number_at(accuracy or {}, "of")
    return None if correct is None or not of else f"{correct:.0f} of {of:.0f}"


# --- What is on screen after a run -------------------------------------------------------------------------------------

_NAME_WIDTH = 16


def _fact(name: str, value: str, width: int) -> List[str]:
    """One named fact, wrapped under itself. Names are ours, values may be a server's."""
    lines = wrapped(terminal_text(value), max(20, width - _NAME_WIDTH - 2))
    return [f"  {name if i == 0 else '':<{_NAME_WIDTH}}{line}".rstrip() for i, line in enumerate(lines)]


def endpoint_block(record: Record, width: int = 80) -> List[str]:
    """One server's pass in a few lines, every number with its unit, and the caveats with their remedies below."""
    where = [record_server(record), _engine_words(record), record_workload(record),
             f"concurrency {record_level(record)}"]
    lines = wrapped(terminal_text(" · ".join(_known(where))), width)
    for name, value in _endpoint_facts(record):
        lines += _fact(name, value, width)
    return lines + caveat_lines(record, width)


def _endpoint_facts(record: Record) -> List[Tuple[str, str]]:
    facts = [("requests", _requests_words(record)), ("output", _output_words(record))]
    timed = (("decode speed", _rate_words(number_at(record, "decode_tokens_per_s", "mean"), " a request (mean)")),
             ("TTFT p50", duration(number_at(record, "ttft_s", "p50"))),
             ("TPOT p50", duration(number_at(record, "tpot_s", "p50"))))
    facts += [(name, value) for name, value in timed if value != DASH or "ttft_s" in record]
    facts.append(("latency", f"p50 {duration(number_at(record, 'latency_s', 'p50'))}, "
                             f"max {duration(number_at(record, 'latency_s', 'max'))}"))
    facts += [("acceptance", words) for words in _acceptance_words(record)]
    accuracy = counts_words(value_at(record, "accuracy"))
    return facts + ([("right answers", accuracy)] if accuracy else [])


def _requests_words(record: Record) -> str:
    words = f"{_decimal(number_at(record, 'completed'), 0)} of {_decimal(number_at(record, 'requests'), 0)} answered"
    if number_at(record, "failed"):
        words += f", {record['failed']:.0f} failed; first: {text_at(record, 'first_error') or 'no message'}"
    return words + (" (interrupted)" if value_at(record, "interrupted") is True else "")


def _output_words(record: Record) -> str:
    tokens = number_at(record, "output_tokens")
    if tokens is None:
        return "tokens not measured (the server counts none)"
    return f"{tokens:,.0f} tokens, {_rate_words(number_at(record, 'output_tokens_per_s'))}"


def _rate_words(value: Optional[float], of: str = "") -> str:
    return DASH if value is None else f"{value:,.1f} tokens/s{of}"


def _acceptance_words(record: Record) -> List[str]:
    """What became of the drafts, one line a meaning; the reason where nothing was measured; nothing where nobody drafts."""
    found = value_at(record, "acceptance") or {}
    measured = (("rate", percent(number_at(found, "acceptance_rate"), 1)),
                ("length", _tokens_words(number_at(found, "acceptance_length"), "a step, bonus token included")),
                ("yield", _tokens_words(number_at(found, "tokens_per_target_pass"), "a target pass")))
    if text_at(found, "missing") == NOT_SPECULATING:
        return []
    lines = [f"{name} {value}" for name, value in measured if value != DASH]
    source, missing = text_at(found, "source"), text_at(found, "missing")
    if lines:
        return [", ".join(lines) + (f" (from {source})" if source else "")]
    return [f"not measured: {missing}"] if missing else []


def _tokens_words(value: Optional[float], of: str) -> str:
    return DASH if value is None else f"{value:.2f} tokens {of}"


def caveat_lines(record: Record, width: int = 80) -> List[str]:
    """The record's caveats, each with what to do about it."""
    lines: List[str] = []
    for caveat in list_at(record, "caveats"):
        sentence, remedy = text_at(caveat, "sentence") or str(caveat), text_at(caveat, "remedy")
        lines += _hanging("  ! ", sentence, width) + (_hanging("    try: ", remedy, width) if remedy else [])
    return lines


def _hanging(mark: str, text: str, width: int) -> List[str]:
    lines = wrapped(terminal_text(text), max(20, width - len(mark)))
    return [(mark if i == 0 else " " * len(mark)) + line for i, line in enumerate(lines)]


def comparison_block(record: Record, width: int = 80) -> List[str]:
    """One configuration against the baseline: answers, speed, the two words with their reasons, advice, caveats."""
    cell = _compared_cell(record, {})
    where = [f"{cell.configuration} against {text_at(record, 'baseline_label') or BASELINE}", cell.workload,
             f"concurrency {cell.concurrency}"]
    lines = wrapped(terminal_text(" · ".join(where)), width)
    for name, value in _comparison_facts(cell):
        lines += _fact(name, value, width)
    for reason in list_at(record, "verdict", "reasons"):
        lines += _hanging("    - ", str(reason), width)
    lines += _tails(record, cell.configuration, width)
    for advice in list_at(record, "advice"):
        lines += _hanging("  > ", str(advice), width)
    return lines + caveat_lines(record, width)


def _comparison_facts(cell: ResultCell) -> List[Tuple[str, str]]:
    record = cell.comparison
    facts = [("identical", _agreement_words(cell))]
    floor = value_at(record, "noise_floor")
    if floor:
        facts.append(("noise floor", f"baseline against itself: exact match {percent(number_at(floor, 'exact_match'))}, "
                                     f"prefix agreement {percent(number_at(floor, 'prefix_agreement'))}"))
    facts += [("throughput", f"{_rate_words(cell.baseline_tokens_per_s)} to {_rate_words(cell.speculative_tokens_per_s)}"),
              ("ratio", _ratio_line(value_at(record, "throughput_ratio"), cell.throughput_ratio))]
    if number_at(record, "decode_ratio", "value") is not None:
        facts.append(("decode ratio", _ratio_line(record["decode_ratio"], None)))
    accuracy = [counts_words(value_at(record, side)) for side in ("baseline_accuracy", "speculative_accuracy")]
    facts += [("right answers", f"{accuracy[0]} to {accuracy[1]}")] if all(accuracy) else []
    return facts + [(word, text_at(record, "verdict", word).upper()) for word in ("speed", "answers")
                    if text_at(record, "verdict", word)]


def _agreement_words(cell: ResultCell) -> str:
    if cell.compared is None:
        return "nothing compared"
    words = f"{_decimal(cell.identical, 0)} of {cell.compared:.0f} answers"
    prefix = number_at(cell.comparison, "prefix_agreement")
    return words if prefix is None else f"{words}, prefix agreement {percent(prefix)}"


def _ratio_line(ratio: Any, otherwise: Optional[float]) -> str:
    """'1.54× [1.40, 1.68] from 24 pairs'."""
    value, low, high = (number_at(ratio or {}, key) for key in ("value", "low", "high"))
    words = times(value if value is not None else otherwise)
    if low is not None and high is not None:
        words += f" [{low:.2f}, {high:.2f}]"
    pairs = number_at(ratio or {}, "pairs")
    return f"{words} from {pairs:.0f} pairs" if pairs else words


def _tails(record: Record, other: str, width: int) -> List[str]:
    """Where the first answers part, and how each goes on, a line a server."""
    lines: List[str] = []
    for divergence in list_at(record, "text_comparison", "divergences")[:3]:
        lines += _fact("difference", divergence_words(divergence), width)
        for name, side in ((BASELINE, "baseline_tail"), (other, "speculative_tail")):
            tail = terminal_text(f'{name}: "{text_at(divergence, side)}"')
            lines.append(" " * (_NAME_WIDTH + 2) + abbreviated(tail, max(20, width - _NAME_WIDTH - 2)))
    return lines


def abbreviated(text: str, width: int) -> str:
    """The text, cut to `width` columns with an ellipsis where it is longer."""
    return text if text_width(text) <= width else _split_word(text, width - 1)[0] + "…"


def divergence_words(divergence: Record) -> str:
    """'prompt copy-07, fork at character 13 (byte 15), margin 0.004 nats'."""
    prompt = text_at(divergence, "prompt_id") or f"number {_decimal(number_at(divergence, 'prompt_index'), 0)}"
    place, byte = (number_at(divergence, key) for key in ("first_difference_at_char", "first_difference_at_byte"))
    words = [f"prompt {prompt}, {text_at(divergence, 'kind') or 'difference'}"]
    words[0] += "" if place is None else f" at character {place:.0f}" + ("" if byte is None else f" (byte {byte:.0f})")
    channel = text_at(divergence, "channel")
    words += [f"in {channel}"] if channel not in ("", "content") else []
    margin = number_at(divergence, "margin_nats")
    words += [] if margin is None else [f"margin {margin:.3g} nats"]
    return ", ".join(words + _known([text_at(divergence, "detail")]))


# --- What is in a notebook ---------------------------------------------------------------------------------------------


def notebook_listing(records: Iterable[Record]) -> Table:
    """One row a run: its label, day, engine, what was asked, and the verdict."""
    runs: Dict[str, List[Record]] = {}
    for record in records:
        if record_kind(record):
            runs.setdefault(record_run(record), []).append(record)
    columns = (Column("Label"), Column("Date"), Column("Engine"), Column("Workloads"), Column("Configurations"),
               Column("Verdict"))
    return Table("", columns, tuple(_listing_row(label, own) for label, own in runs.items()))


def _listing_row(label: str, records: Sequence[Record]) -> Tuple[Cell, ...]:
    """A run in words; its verdict counts the cells of each word where there are several."""
    asked: Dict[str, List[int]] = {}
    for record in records:
        asked.setdefault(record_workload(record), []).append(record_level(record))
    workloads = "; ".join(f"{name} at {', '.join(map(str, sorted(set(levels))))}" for name, levels in asked.items())
    cells = [cell for cell in result_cells(records)]
    names = ", ".join(_known(cell.configuration for cell in cells)) or "baseline alone"
    return (label, max(text_at(record, "recorded_at")[:10] for record in records) or None,
            ", ".join(_known(_engine_words(record) for record in records)) or None, workloads, names,
            _verdict_counts([cell for cell in cells if cell.comparison]))


def _verdict_counts(cells: Sequence[ResultCell]) -> Optional[str]:
    words = [", ".join(_known(text_at(cell.comparison, "verdict", side) for side in ("speed", "answers")))
             for cell in cells]
    counts = {word: words.count(word) for word in _known(words)}
    return "; ".join(word if len(words) == 1 else f"{count} × {word}" for word, count in counts.items()) or None


# --- A spreadsheet -----------------------------------------------------------------------------------------------------
#
# One row a result cell, the baseline and the configuration side by side. The order is stable and new columns join at the
# end. Units are in the names (_s seconds, _tokens_per_s), shares are 0..1, what was not measured is empty.

_SIDE_COLUMNS = (   # of each server: the column's name after 'baseline_' or 'speculative_', and its place in the record
    ("engine", ("engine",)), ("engine_version", ("engine_version",)), ("requests", ("requests",)),
    ("completed", ("completed",)), ("failed", ("failed",)), ("wall_s", ("wall_s",)), ("output_tokens", ("output_tokens",)),
    ("output_tokens_per_s", ("output_tokens_per_s",)), ("decode_mean_tokens_per_s", ("decode_tokens_per_s", "mean")),
    ("decode_p50_tokens_per_s", ("decode_tokens_per_s", "p50")), ("ttft_p50_s", ("ttft_s", "p50")),
    ("ttft_p99_s", ("ttft_s", "p99")), ("tpot_p50_s", ("tpot_s", "p50")), ("tpot_p99_s", ("tpot_s", "p99")),
    ("latency_p50_s", ("latency_s", "p50")), ("latency_mean_s", ("latency_s", "mean")), ("latency_max_s", ("latency_s", "max")),
    ("accuracy_correct", ("accuracy", "correct")), ("accuracy_of", ("accuracy", "of")),
    ("context_tokens", ("server", "context_tokens")), ("slots", ("server", "slots")),
    ("kv_cache_tokens", ("server", "kv_cache_tokens")), ("interrupted", ("interrupted",)), ("run_file", ("run_file",)))
_DRAFT_COLUMNS = (
    ("method", ("server", "speculation", "method")), ("draft_length", ("server", "speculation", "draft_tokens")),
    ("drafts", ("acceptance", "drafts")), ("draft_tokens", ("acceptance", "draft_tokens")),
    ("accepted_tokens", ("acceptance", "accepted_tokens")), ("accept_rate", ("acceptance", "acceptance_rate")),
    ("accept_len_incl_bonus", ("acceptance", "acceptance_length")),
    ("tokens_per_target_pass", ("acceptance", "tokens_per_target_pass")),
    ("acceptance_source", ("acceptance", "source")), ("acceptance_missing", ("acceptance", "missing")))
_COMPARED_COLUMNS = (
    ("throughput_ratio_low", ("throughput_ratio", "low")), ("throughput_ratio_high", ("throughput_ratio", "high")),
    ("decode_ratio", ("decode_ratio", "value")), ("decode_ratio_low", ("decode_ratio", "low")),
    ("decode_ratio_high", ("decode_ratio", "high")), ("ratio_pairs", ("decode_ratio", "pairs")),
    ("self_ratio", ("self_ratio", "value")), ("compared", ("text_comparison", "compared")),
    ("identical", ("text_comparison", "identical")), ("divergent", ("text_comparison", "divergent")),
    ("prefix_agreement", ("prefix_agreement",)), ("noise_floor_exact_match", ("noise_floor", "exact_match")),
    ("noise_floor_prefix_agreement", ("noise_floor", "prefix_agreement")),
    ("noise_floor_concurrency", ("noise_floor", "concurrency")), ("ruler_p99_nats", ("ruler", "p99_nats")),
    ("smallest_detectable_change", ("smallest_detectable_change",)), ("verdict_speed", ("verdict", "speed")),
    ("verdict_answers", ("verdict", "answers")), ("step_cost", ("break_even", "step_cost", "value")),
    ("draft_cost", ("break_even", "draft_cost", "value")),
    ("break_even_acceptance", ("break_even", "break_even_acceptance")),
    ("best_draft_length", ("break_even", "best_draft_length")), ("best_speedup", ("break_even", "best_speedup")),
    ("crossover_concurrency", ("break_even", "crossover", "concurrency")),
    ("kv_cache_tokens_lost", ("break_even", "kv_cache_tokens_lost")))
_NEWEST_COLUMNS = (("recorded_at", ("recorded_at",)), ("model", ("model",)), ("prompts_sha256", ("prompts_sha256",)),
                   ("tool_version", ("tool_version",)))
_ASKED_COLUMNS = (("track", ("track",)), ("max_tokens", ("max_tokens",)), ("repeats", ("repeats",)),
                  ("prompt_count", ("prompt_count",)))

CSV_COLUMNS = (
    "run", "workload", "configuration", "concurrency", *(name for name, _ in _NEWEST_COLUMNS + _ASKED_COLUMNS),
    *(f"baseline_{name}" for name, _ in _SIDE_COLUMNS), *(f"speculative_{name}" for name, _ in _SIDE_COLUMNS),
    *(name for name, _ in _DRAFT_COLUMNS), "throughput_ratio", "exact_match", *(name for name, _ in _COMPARED_COLUMNS),
    "caveats")


def csv_text(records: Iterable[Record], decimal_comma: bool = False, bom: bool = False) -> str:
    """One row a result cell (workload, configuration, level) as RFC 4180 text, columns as in CSV_COLUMNS."""
    rows = tuple(_csv_row(cell) for cell in result_cells(records))
    return table_csv(Table("", tuple(map(Column, CSV_COLUMNS)), rows), decimal_comma, bom)


def _csv_row(cell: ResultCell) -> Tuple[Cell, ...]:
    asked = cell.speculative or cell.baseline
    row: List[Cell] = [cell.run, cell.workload, cell.configuration or None, cell.concurrency]
    row += _picked(cell.newest, _NEWEST_COLUMNS) + _picked(asked, _ASKED_COLUMNS)
    row += _picked(_with_throughput(cell.baseline, cell.baseline_tokens_per_s), _SIDE_COLUMNS)
    row += _picked(_with_throughput(cell.speculative, cell.speculative_tokens_per_s), _SIDE_COLUMNS)
    row += _picked(cell.speculative, _DRAFT_COLUMNS) + [cell.throughput_ratio, cell.exact_match]
    caveats = [text_at(caveat, "sentence") for record in (cell.baseline, cell.speculative, cell.comparison)
               for caveat in list_at(record, "caveats")]
    return tuple(row + _picked(cell.comparison, _COMPARED_COLUMNS) + [" ".join(_known(caveats)) or None])


def _with_throughput(record: Record, tokens_per_s: Optional[float]) -> Record:
    """The pass, its throughput told by the comparison where the pass itself is in another notebook."""
    return {**record, "output_tokens_per_s": tokens_per_s}


def _picked(record: Record, columns: Sequence[Tuple[str, Tuple[str, ...]]]) -> List[Cell]:
    values = [value_at(record, *path) for _, path in columns]
    return [value if isinstance(value, (str, int, float)) and value != "" else None for value in values]


REQUEST_COLUMNS = (
    "run", "started_at", "server", "engine", "engine_version", "model", "workload", "category", "concurrency", "purpose",
    "prompt_id", "repeat", "ok", "error", "finish_reason", "sent_s", "connect_s", "ttft_s", "first_answer_at_s", "tpot_s",
    "e2el_s", "decode_tokens_per_s", "chunks", "prompt_tokens", "cached_tokens", "completion_tokens", "token_source",
    "drafts", "draft_tokens", "accepted_tokens", "answer_chars", "reasoning_chars", "tool_calls", "run_file")


def requests_csv(runs: Iterable[Run], decimal_comma: bool = False, bom: bool = False) -> str:
    """One row a request as RFC 4180 text, columns as in REQUEST_COLUMNS; no text of an answer is in it."""
    rows = tuple(_request_row(run, each, reply) for run in runs for each in run.passes for reply in each.replies)
    return table_csv(Table("", tuple(map(Column, REQUEST_COLUMNS)), rows), decimal_comma, bom)


def _request_row(run: Run, of: Pass, reply: Reply) -> Tuple[Cell, ...]:
    prompt, drafted = run.prompts.get(reply.prompt_id), reply.acceptance or Acceptance()
    server = run.servers.get(of.server) or Server(of.server, "", "", (), "")
    return (run.label, run.started_at, of.server, server.engine, server.version,
            server.model, of.workload, prompt.category if prompt else None, of.concurrency, of.purpose,
            reply.prompt_id, reply.repeat, reply.ok, reply.error, reply.finish_reason, reply.sent_s, reply.connected_s,
            reply.ttft_s, reply.first_answer_s, reply.tpot_s, reply.e2el_s, reply.decode_tokens_per_s,
            len(reply.chunk_at_s), reply.prompt_tokens, reply.cached_tokens, reply.completion_tokens, reply.token_source,
            drafted.drafts, drafted.draft_tokens, drafted.accepted_tokens, _length(reply.content),
            _length(reply.reasoning), _length(reply.tool_calls), run.path or None)


def _length(text: Optional[Sequence[Any]]) -> Optional[int]:
    return None if text is None else len(text)


# --- The tutorial's summary --------------------------------------------------------------------------------------------


def export_json(records: Iterable[Record]) -> Dict[str, Any]:
    """The latest results in the shape of the tutorial's summary: for each workload a row a configuration, baseline first.

    Levels are keys of JSON objects, hence text. Shares are 0..1, null is "not measured".
    """
    cells = latest_cells(result_cells(records))
    named = _known(cell.configuration for cell in cells)
    return {"schema": SCHEMA, "model": text_at(cells[0].newest, "model") if cells else None,
            "configs": [BASELINE, *named] if any(cell.baseline for cell in cells) else named,
            "concurrencies": _levels(cells),
            "workloads": {workload: _workload_summary([cell for cell in cells if cell.workload == workload])
                          for workload in _known(cell.workload for cell in cells)}}


def _workload_summary(cells: Sequence[ResultCell]) -> Dict[str, Any]:
    lowest = _levels(cells)[0]
    floor = _first_known(*[value_at(cell.comparison, "noise_floor") for cell in cells if cell.concurrency == lowest])
    baseline = {cell.concurrency: cell.baseline for cell in cells if cell.baseline}
    rows = [_baseline_summary(cells, baseline)] if baseline else []
    rows += [_row_summary(name, by_level) for name, by_level in _by_configuration(cells).items() if name]
    return {"noise_floor_exact_match": number_at(floor or {}, "exact_match"),
            "noise_floor_prefix_agreement": number_at(floor or {}, "prefix_agreement"), "rows": rows}


def _baseline_summary(cells: Sequence[ResultCell], by_level: Mapping[int, Record]) -> Dict[str, Any]:
    accuracy = _first_known(value_at(by_level[min(by_level)], "accuracy"),
                            *[value_at(cell.comparison, "baseline_accuracy") for cell in cells])
    throughput = {str(level): number_at(record, "output_tokens_per_s") for level, record in sorted(by_level.items())}
    return {"config": BASELINE, "acceptance_length": None, "speedup": {level: 1.0 for level in throughput},
            "throughput_tok_s": throughput, **_lowest_times(by_level[min(by_level)]), "exact_match": None,
            "prefix_agreement": None, "gsm8k_accuracy": _share(accuracy)}


def _row_summary(name: str, by_level: Mapping[int, ResultCell]) -> Dict[str, Any]:
    lowest = by_level[min(by_level)]
    ordered = sorted(by_level.items())
    accuracy = _first_known(value_at(lowest.comparison, "speculative_accuracy"), value_at(lowest.speculative, "accuracy"))
    return {"config": name, "acceptance_length": lowest.acceptance_length,
            "speedup": {str(level): cell.speedup for level, cell in ordered},
            "throughput_tok_s": {str(level): cell.speculative_tokens_per_s for level, cell in ordered},
            **_lowest_times(lowest.speculative), "exact_match": lowest.exact_match,
            "prefix_agreement": number_at(lowest.comparison, "prefix_agreement"), "gsm8k_accuracy": _share(accuracy)}


def _lowest_times(record: Record) -> Dict[str, Optional[float]]:
    tpot_s = number_at(record, "tpot_s", "p50")
    return {"tpot_p50_ms": None if tpot_s is None else tpot_s * 1000, "ttft_p50_s": number_at(record, "ttft_s", "p50")}


def _share(accuracy: Any) -> Optional[float]:
    """Correct answers of a graded workload, 0..1. The name gsm8k_accuracy is the tutorial's; any graded workload has it."""
    correct, of = number_at(accuracy or {}, "correct"), number_at(accuracy or {}, "of")
    return None if correct is None or not of else correct / of


# --- Charts: small pure functions that return SVG ----------------------------------------------------------------------
#
# Drawn 360 units wide and shown at about that many pixels, on a telephone and as one of three on a desk alike, so that
# their text keeps its size. Colour is never the only sign: a series has its marker, its dash pattern and its name.

_WIDE = 360
_LABEL_ROOM = 112       # right of a line chart for the names of its lines, left of a bar chart for those of its bars
_MARKERS = (
    "M-4 0a4 4 0 1 0 8 0a4 4 0 1 0-8 0z", "M-3.5-3.5h7v7h-7z", "M0-4.5L4.5 3.5h-9z", "M0-5L5 0 0 5-5 0z",
    "M0 4.5L4.5-3.5h-9z", "M-1.5-4.5h3v3h3v3h-3v3h-3v-3h-3v-3h3z", "M-4.5-2.5L0-5l4.5 2.5v5L0 5l-4.5-2.5z",
    "M-4.5-1.5h9v3h-9z")
_DASHES = ("", "7 3", "2 3", "9 3 2 3", "12 4", "4 2", "1 4", "3 3")
_COLOURS = 7            # then they come again, with another marker and dash pattern
BASELINE_STYLE = 7


class Point(NamedTuple):
    """One value of a series with its interval, where it has one."""

    x: float
    y: Optional[float]
    low: Optional[float] = None
    high: Optional[float] = None


@dataclass(frozen=True)
class Series:
    """A named line; `style` gives its colour, marker and dash pattern."""

    name: str
    style: int
    points: Tuple[Point, ...]

    @property
    def known(self) -> Tuple[Point, ...]:
        """The points that were measured."""
        return tuple(point for point in self.points if point.y is not None)

    @property
    def values(self) -> List[float]:
        """The values of the points that were measured."""
        return [point.y for point in self.points if point.y is not None]


@dataclass(frozen=True)
class Chart:
    """What a chart says around its data. `reference` is a line to hold values against.

    The value axis goes from `low` to `high`; a `low` above 0 makes it logarithmic: each grid line is twice the one below.
    """

    title: str
    x_name: str
    unit: str
    high: float
    x_ticks: Tuple[float, ...] = ()
    reference: Optional[Tuple[float, str]] = None
    low: float = 0

    @property
    def value_ticks(self) -> List[float]:
        """The values that have a grid line."""
        if not self.low:
            return nice_ticks(self.high)
        steps = range(math.floor(math.log2(self.low)), math.ceil(math.log2(max(self.high, self.low * 2))) + 1)
        return [2.0 ** step for step in steps]


@dataclass(frozen=True)
class Scale:
    """A stretch of numbers laid over a stretch of the drawing."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def at(self, value: float) -> float:
        """Where the value is drawn; values beyond the ends are drawn at the ends."""
        low, high, value = (math.log2(max(n, 1e-9)) if self.log else n for n in (self.low, self.high, value))
        share = 0.5 if high <= low else min(1.0, max(0.0, (value - low) / (high - low)))
        return self.start + share * (self.end - self.start)


def nice_ticks(high: float, most: int = 5) -> List[float]:
    """Round numbers from 0 to at least `high`, at most `most` steps apart."""
    if high <= 0 or not math.isfinite(high):
        return [0.0, 1.0]
    power = 10 ** math.floor(math.log10(high / most))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10, 20) if high <= power * factor * most * (1 + 1e-9))
    return [round(step * i, 12) for i in range(math.ceil(high / step - 1e-9) + 1)]     # 0.6, not 0.6000000000000001


def spread(wanted: Sequence[float], gap: float, high: float) -> List[float]:
    """The wanted places moved as little as makes them `gap` apart, none beyond `high`: labels that do not collide."""
    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    placed = list(wanted)
    for before, i in zip(order, order[1:]):
        placed[i] = max(placed[i], placed[before] + gap)
    limit = high
    for i in reversed(order):
        placed[i] = min(placed[i], limit)
        limit = placed[i] - gap
    return placed


def line_chart(chart: Chart, series: Sequence[Series]) -> str:
    """Lines with interval whiskers over levels or positions, each named at its right end."""
    series = [each for each in series if each.known]
    if not series:
        return _nothing(chart.title)
    ticks = chart.x_ticks or tuple(sorted({point.x for each in series for point in each.known}))
    x = Scale(min(ticks), max(ticks), 58, _WIDE - _LABEL_ROOM - 14, log=bool(chart.x_ticks))
    y = Scale(chart.value_ticks[0], chart.value_ticks[-1], 206, 12, log=bool(chart.low))
    parts = [_value_axis(chart, y), _level_axis(chart, x, ticks), _reference_line(chart, y)]
    parts += [_line(each, x, y, _dodge(i, len(series))) for i, each in enumerate(series)]
    return _svg(240, chart.title, _described(chart, series), parts + [_line_names(series, y)])


def _dodge(i: int, count: int) -> float:
    """A few units aside, so that the whiskers of neighbours can be told apart."""
    return (i - (count - 1) / 2) * min(2.5, 12 / count)


def _value_axis(chart: Chart, y: Scale) -> str:
    lines = [f'<path class="grid" d="M42 {_at(y.at(tick))}H{_WIDE - _LABEL_ROOM}"/>'
             f'<text x="37" y="{_at(y.at(tick) + 4)}" text-anchor="end">{_tick(tick)}</text>'
             for tick in chart.value_ticks]
    return "".join(lines)


def _level_axis(chart: Chart, x: Scale, ticks: Sequence[float]) -> str:
    shown_ticks = [tick for i, tick in enumerate(ticks) if len(ticks) <= 8 or i % math.ceil(len(ticks) / 8) == 0]
    texts = [f'<text x="{_at(x.at(tick))}" y="221" text-anchor="middle">{_tick(tick)}</text>' for tick in shown_ticks]
    middle = (x.start + x.end) / 2
    return "".join(texts) + f'<text class="soft" x="{_at(middle)}" y="236" text-anchor="middle">{html_text(chart.x_name)}</text>'


def _reference_line(chart: Chart, y: Scale) -> str:
    if chart.reference is None:
        return ""
    value, words = chart.reference
    return (f'<path class="ref" d="M42 {_at(y.at(value))}H{_WIDE - _LABEL_ROOM}"/>'
            f'<text class="soft" x="44" y="{_at(y.at(value) - 4)}">{html_text(words)}</text>')


def _line(series: Series, x: Scale, y: Scale, aside: float) -> str:
    places = [(x.at(point.x) + aside, y.at(value), point) for point, value in zip(series.known, series.values)]
    path = "M" + "L".join(f"{_at(left)} {_at(top)}" for left, top, _ in places)
    dash = f' stroke-dasharray="{_dash(series.style)}"' if _dash(series.style) else ""
    whiskers = "".join(_whisker(left, y.at(point.low), y.at(point.high)) for left, _, point in places
                       if point.low is not None and point.high is not None)
    markers = "".join(_marker(series.style, left, top) for left, top, _ in places)
    return f'<g class="{_colour(series.style)}"><path class="line" d="{path}"{dash}/>{whiskers}{markers}</g>'


def _whisker(left: float, low: float, high: float) -> str:
    return f'<path class="whisker" d="M{_at(left)} {_at(low)}V{_at(high)}m-2.5 0h5M{_at(left - 2.5)} {_at(low)}h5"/>'


def _marker(style: int, left: float, top: float) -> str:
    shape = _MARKERS[style % len(_MARKERS) if style <= BASELINE_STYLE else (style + style // _COLOURS) % len(_MARKERS)]
    return f'<path class="mark" transform="translate({_at(left)} {_at(top)})" d="{shape}"/>'


def _dash(style: int) -> str:
    return _DASHES[style % len(_DASHES)]


def _colour(style: int) -> str:
    return "c7" if style == BASELINE_STYLE else f"c{style % (_COLOURS + 1) if style < BASELINE_STYLE else style % _COLOURS}"


def _line_names(series: Sequence[Series], y: Scale) -> str:
    """The name of each line beside its end, with its marker, moved apart where lines end close together."""
    left = _WIDE - _LABEL_ROOM + 11
    tops = spread([y.at(each.values[-1]) for each in series], 14, 206)
    return "".join(f'<g class="{_colour(each.style)}">{_marker(each.style, left, top)}'
                   f'<text class="name" x="{left + 7}" y="{_at(top + 4)}">{html_text(abbreviated(each.name, 16))}</text></g>'
                   for each, top in zip(series, tops))


class Bar(NamedTuple):
    """One bar: its name, its value with interval, and what is written beside it."""

    name: str
    style: int
    value: Optional[float]
    low: Optional[float]
    high: Optional[float]
    words: str


def bar_chart(chart: Chart, bars: Sequence[Bar]) -> str:
    """Bars that lie, one a configuration, names on the left and values in words at their ends."""
    if not any(bar.value is not None for bar in bars):
        return _nothing(chart.title)
    ticks = nice_ticks(chart.high)
    x, bottom = Scale(0, ticks[-1], _LABEL_ROOM, _WIDE - 84), 12 + 24 * len(bars)
    parts = [f'<path class="grid" d="M{_at(x.at(tick))} 8V{bottom}"/>'
             f'<text x="{_at(x.at(tick))}" y="{bottom + 14}" text-anchor="middle">{_tick(tick)}</text>' for tick in ticks]
    parts += [_bar(bar, x, 12 + 24 * i) for i, bar in enumerate(bars)]
    parts += [_upright_reference(chart.reference, x, bottom)] if chart.reference else []
    parts += [_bar_words(bar, x, 12 + 24 * i) for i, bar in enumerate(bars)]
    words = "; ".join(f"{bar.name} {bar.words}" for bar in bars)
    return _svg(bottom + (34 if chart.reference else 20), chart.title, words, parts)


def _upright_reference(reference: Tuple[float, str], x: Scale, bottom: float) -> str:
    left, side = x.at(reference[0]), "end" if x.at(reference[0]) > _WIDE / 2 + 20 else "start"
    return (f'<path class="ref" d="M{_at(left)} 4V{bottom + 20}"/><text class="soft" text-anchor="{side}" '
            f'x="{_at(left + (-3 if side == "end" else 3))}" y="{bottom + 29}">{html_text(reference[1])}</text>')


def _bar(bar: Bar, x: Scale, top: float) -> str:
    name = (f'<text class="name" x="{_LABEL_ROOM - 8}" y="{_at(top + 14)}" text-anchor="end">'
            f'{html_text(abbreviated(bar.name, 17))}</text>')
    if bar.value is None:
        return name
    whisker = ""
    if bar.low is not None and bar.high is not None:
        whisker = (f'<path class="whisker over" d="M{_at(x.at(bar.low))} {_at(top + 10)}H{_at(x.at(bar.high))}'
                   f'm0-2.5v5M{_at(x.at(bar.low))} {_at(top + 7.5)}v5"/>')
    return (f'<g class="{_colour(bar.style)}">{name}<rect class="bar" x="{_LABEL_ROOM}" y="{_at(top + 2)}" '
            f'width="{_at(max(x.at(bar.value) - _LABEL_ROOM, 0.5))}" height="16" rx="2"/>{whisker}</g>')


def _bar_words(bar: Bar, x: Scale, top: float) -> str:
    """The value beside the bar, drawn last so that no line crosses it."""
    if bar.value is None:
        return f'<text class="soft" x="{_LABEL_ROOM + 5}" y="{_at(top + 14)}">not measured</text>'
    beyond = max(x.at(bar.value), x.at(bar.high or 0))
    return f'<text class="value" x="{_at(beyond + 5)}" y="{_at(top + 14)}">{html_text(bar.words)}</text>'


# The break-even map: where in the plane of acceptance rate and draft cost a chain of k drafted tokens pays.

_BANDS = (0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0)      # speedups at the borders of the map's bands


_MAP_STEPS = 48


class MapPoint(NamedTuple):
    """One measurement on the map: acceptance rate, cost of a drafted token in target steps, and which series it is of."""

    alpha: float
    cost: float
    style: int
    name: str


def heat_map(title: str, draft_length: int, points: Sequence[MapPoint]) -> str:
    """Predicted speedup over acceptance rate and draft cost for one draft length, with the measured points numbered."""
    top_cost = nice_ticks(max([0.2] + [point.cost * 1.15 for point in points]), 4)[-1]
    x, y = Scale(0, 1, 44, _WIDE - 12), Scale(0, top_cost, 226, 12)
    costs = [top_cost * i / _MAP_STEPS for i in range(_MAP_STEPS + 1)]
    edges = [[(_alpha_at(speed, draft_length, cost), cost) for cost in costs] for speed in _BANDS]
    parts = [f'<rect class="b0" x="{x.start}" y="{y.end}" width="{x.end - x.start}" height="{y.start - y.end}"/>']
    parts += [_band(i + 1, edge, x, y) for i, edge in enumerate(edges)]
    parts += [_contour(i, edge, x, y) for i, edge in enumerate(edges)]
    parts += [_map_axes(x, y, top_cost)] + _map_points(points, x, y)
    words = "; ".join(f"{i}: {point.name}, acceptance {point.alpha:.2f}, cost {point.cost:.3f}"
                      for i, point in enumerate(points, 1))
    return _svg(262, title, f"Speedup predicted for draft length {draft_length}. Measured: {words or 'none'}.", parts)


def _alpha_at(wanted: float, k: int, cost: float) -> float:
    """The acceptance rate with the wanted speedup; 1 where it is out of reach, 0 where it is passed at once."""
    low, high = 0.0, 1.0
    for _ in range(20):
        middle = (low + high) / 2
        low, high = (middle, high) if speedup(middle, k, cost) < wanted else (low, middle)
    return high


def _band(number_of: int, edge: Sequence[Tuple[float, float]], x: Scale, y: Scale) -> str:
    """All that is right of the border, painted over what is left of it."""
    outline = "L".join(f"{_at(x.at(alpha))} {_at(y.at(cost))}" for alpha, cost in edge)
    return f'<path class="b{number_of}" d="M{outline}H{_at(x.end)}V{_at(y.start)}z"/>'


def _contour(i: int, edge: Sequence[Tuple[float, float]], x: Scale, y: Scale) -> str:
    """The border of a band with its speedup written on it, neighbours at different heights."""
    at_once = [alpha for alpha, _ in edge if alpha < 1e-4]        # here even no acceptance reaches the speedup
    inside = [(x.at(alpha), y.at(cost)) for alpha, cost in edge[max(0, len(at_once) - 1):] if alpha < 1 - 1e-4]
    if len(inside) < 8:
        return ""
    line = "M" + "L".join(f"{_at(left)} {_at(top)}" for left, top in inside)
    left, top = inside[-2 - 3 * (i % 3)]
    return (f'<path class="{"even" if _BANDS[i] == 1 else "contour"}" d="{line}"/><text class="on-map" '
            f'x="{_at(min(left, x.end - 14))}" y="{_at(top + 9)}" text-anchor="middle">{_tick(_BANDS[i])}×</text>')


def _map_axes(x: Scale, y: Scale, top_cost: float) -> str:
    parts = [f'<text x="{_at(x.at(share))}" y="241" text-anchor="middle">{_tick(share)}</text>'
             for share in (0, 0.25, 0.5, 0.75, 1)]
    parts += [f'<text x="40" y="{_at(y.at(cost) + 4)}" text-anchor="end">{_tick(cost)}</text>'
              for cost in nice_ticks(top_cost, 4)]
    parts.append(f'<text class="soft" x="{_at((x.start + x.end) / 2)}" y="256" text-anchor="middle">'
                 "acceptance rate of a drafted token</text>")
    parts.append('<text class="soft" transform="translate(10 119) rotate(-90)" text-anchor="middle">'
                 "cost of a drafted token [target steps]</text>")
    return "".join(parts)


def _map_points(points: Sequence[MapPoint], x: Scale, y: Scale) -> List[str]:
    """Numbered circles, each tied to its place where it had to step aside."""
    parts = []
    for i, (point, (left, top)) in enumerate(zip(points, _apart(points, x, y)), 1):
        true_left, true_top = _at(x.at(point.alpha)), _at(y.at(point.cost))
        parts.append(f'<g class="{_colour(point.style)}"><path class="tie" d="M{true_left} {true_top}L{_at(left)} {_at(top)}"/>'
                     f'<circle class="spot" cx="{true_left}" cy="{true_top}" r="2.5"/>'
                     f'<circle class="point" cx="{_at(left)}" cy="{_at(top)}" r="8"/>'
                     f'<text class="digit" x="{_at(left)}" y="{_at(top + 3.9)}" text-anchor="middle">{i}</text></g>')
    return parts


def _apart(points: Sequence[MapPoint], x: Scale, y: Scale) -> List[Tuple[float, float]]:
    """Where the circles are drawn: above their places, and above a circle that is there already."""
    placed: List[Tuple[float, float]] = []
    for point in points:
        left, top = x.at(point.alpha), y.at(point.cost) - 16
        while any(math.hypot(left - other, top - height) < 17 for other, height in placed) and top > 20:
            top -= 4
        placed.append((left, top))
    return placed


def _svg(height: float, title: str, words: str, parts: Sequence[str]) -> str:
    return (f'<svg viewBox="0 0 {_WIDE} {_at(height)}" role="img"><title>{html_text(title)}</title>'
            f'<desc>{html_text(words)}</desc>{"".join(parts)}</svg>')


def _nothing(title: str) -> str:
    return f'<p class="note">{html_text(title)}: not measured.</p>'


def _described(chart: Chart, series: Sequence[Series]) -> str:
    """The chart in words, for those who do not see it."""
    lines = [f"{each.name}: " + ", ".join(f"{point.y:.4g}{chart.unit} at {_tick(point.x)}" for point in each.known)
             for each in series]
    return f"{chart.x_name} against {chart.unit.strip() or 'ratio'}. " + "; ".join(lines) + "."


def _at(value: float) -> str:
    """A place on the drawing, to a tenth of a unit."""
    return f"{value:.1f}".rstrip("0").rstrip(".")


def _tick(value: float) -> str:
    return f"{value:,.6g}" if abs(value) < 1e6 else f"{value:.3g}"


# --- The page ----------------------------------------------------------------------------------------------------------
#
# One file that needs no network and no script. Everything in it comes from notebook and run files: it can be made again.

_DIFFERENCES_SHOWN = 3          # for each configuration, workload and level
_DIFFERENCES_IN_ALL = 60
_BEFORE, _AFTER = 90, 160       # characters shown before and from the first difference on
_LONGEST_DRAFT = 64             # no map is drawn for a draft length that nobody runs

Section = Tuple[str, str, str]  # its id, its heading, its HTML


def report_page(records: Iterable[Record], runs: Iterable[Run] = ()) -> str:
    """The whole page: the verdict, the conditions, then each question with its charts and the numbers behind them."""
    everything = result_cells(records)
    cells = latest_cells(everything)
    compared = [cell for cell in cells if cell.comparison]
    styles = {name: _style_of(i) for i, name in enumerate(_known(cell.configuration for cell in cells))}
    sections = [_conditions(cells), _best_section(compared, styles), _speedup_section(compared, styles),
                _rates_section(cells, styles), _position_section(cells, styles), _answers_section(compared, styles),
                _accuracy_section(cells, styles), _map_section(compared, styles), _differences_section(compared, list(runs)),
                _category_section(compared), _others_section(everything, cells)]
    title = "Does speculative decoding pay here?" if compared else "One server, measured"
    return _document(title, _verdict_header(title, cells), [section for section in sections if section])


def _style_of(i: int) -> int:
    """The i-th configuration's style; the baseline's own is left out."""
    return i if i < BASELINE_STYLE else i + 1


def _document(title: str, header: str, sections: Sequence[Section]) -> str:
    links = "".join(f'<a href="#{key}">{html_text(name)}</a>' for key, name, _ in sections)
    body = "".join(f'<section id="{key}" aria-labelledby="{key}-h"><h2 id="{key}-h">{html_text(name)}</h2>{inner}</section>\n'
                   for key, name, inner in sections)
    return (f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{html_text(title)}</title>\n'
            '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
            "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\n"
            f'<style>{_STYLE}</style></head>\n<body>{header}<nav aria-label="On this page">{links}</nav>\n'
            f"<main>{body}</main>\n<footer><p>Made by measure_speculative.py {html_text(__version__)} from its notebook"
            " and run files; it can be made again from them.</p></footer></body></html>\n")


# The verdict, in two sentences that a colleague understands.


def _verdict_header(title: str, cells: Sequence[ResultCell]) -> str:
    model = text_at(cells[0].newest, "model") if cells else ""
    facts = _known([model, *_known(_engine_words(cell.newest) for cell in cells), *_days(cells)])
    cards = "".join(f'<div class="card {kind}"><p class="word">{html_text(word)}</p><p>{html_text(sentence)}</p></div>'
                    for kind, word, sentence in verdict_sentences(cells))
    return (f'<header><p class="eyebrow">Speculative decoding, measured</p><h1>{html_text(title)}</h1>'
            f'<p class="facts">{html_text(" · ".join(facts))}</p><div class="cards">{cards}</div></header>\n')


def _days(cells: Sequence[ResultCell]) -> List[str]:
    days = sorted(_known(_when(cell)[:10] for cell in cells))
    return days if len(days) < 2 else [f"{days[0]} to {days[-1]}"]


def verdict_sentences(cells: Sequence[ResultCell]) -> List[Tuple[str, str, str]]:
    """Two of (kind, word, sentence): what became of the speed, and what of the answers."""
    compared = [cell for cell in cells if cell.comparison]
    if not compared:
        return [_alone_sentence(cells), ("plain", "Nothing to compare", "Measure a second server, the same model with "
                                         "speculation, to learn whether it pays and whether the answers stay the same.")]
    return [_speed_sentence(compared), _answers_sentence(compared)]


def _alone_sentence(cells: Sequence[ResultCell]) -> Tuple[str, str, str]:
    speeds = [(cell, _first_known(number_at(record, "decode_tokens_per_s", "mean"), number_at(record, "output_tokens_per_s")))
              for cell in cells for record in [cell.speculative or cell.baseline]]
    known = [(cell, speed) for cell, speed in speeds if speed is not None]
    if not known:
        return ("plain", "No speed measured", "The server's answers carried no token counts, so that no speed can be told.")
    cell, speed = max(known, key=lambda pair: pair[1])
    return ("plain", f"{speed:,.1f} tokens/s", f"{record_server(cell.newest)} writes {speed:,.1f} tokens a second for "
            f"one request at best ({_where(cell)}).")


def _speed_sentence(cells: Sequence[ResultCell]) -> Tuple[str, str, str]:
    words = [text_at(cell.comparison, "verdict", "speed") for cell in cells]
    faster, slower = words.count("faster"), words.count("slower")
    ratio = _best_words(cells)
    of = f"of {len(cells)} measurements" if len(cells) > 1 else "the one measurement"
    if not any(words):
        return ("plain", "A ratio, no verdict", f"The best ratio is {ratio}; these records carry no interval that would "
                "tell it from chance.")
    loss = _known(f"{cell.configuration} on {_where(cell)}" for cell, word in zip(cells, words) if word == "slower")
    if faster == len(cells):
        how = "all measurements are faster, at best" if faster > 1 else "the server writes at"
        return ("good", "Yes, it pays", f"With speculation {how} {ratio}.")
    if faster:
        mostly = faster >= 0.8 * len(cells) and slower <= 0.1 * len(cells)
        kind, word = ("good", "Yes, nearly everywhere") if mostly else ("mixed", "It depends")
        less = f" and slower in {slower} ({_listed(loss, 2)})" if slower else ""
        return (kind, word, f"Speculation is faster in {faster} {of}{less}; at best it reaches {ratio}.")
    if slower:
        return ("bad", "No, it costs", f"Speculation is slower in {slower} {of} and faster in none; its best is {ratio}.")
    return ("plain", "No difference to be seen", f"In {of} the speed cannot be told from the baseline's; the best is {ratio}.")


def _best_words(cells: Sequence[ResultCell]) -> str:
    """The greatest speedup in words: '1.95 times the baseline's decode speed (ngram on chat, one request at a time)'."""
    known = [cell for cell in cells if cell.speedup is not None]
    if not known:
        return "no known ratio"
    best = max(known, key=lambda cell: cell.speedup or 0)
    decoded = number_at(best.comparison, "decode_ratio", "value") is not None
    low, high = best.speedup_interval
    interval = "" if low is None or high is None else f"; 95 % interval {low:.2f} to {high:.2f}"
    return (f"{_decimal(best.speedup, 2)} times the baseline's {'decode speed' if decoded else 'throughput'} "
            f"({best.configuration} on {_where(best)}{interval})")


def _answers_sentence(cells: Sequence[ResultCell]) -> Tuple[str, str, str]:
    words = [text_at(cell.comparison, "verdict", "answers") for cell in cells]
    pairs = sum(cell.compared or 0 for cell in cells)
    same = sum(cell.identical or 0 for cell in cells)
    counts = f"{same:,.0f} of {pairs:,.0f} answers are the same byte for byte"
    changed = _known(f"{cell.configuration} on {cell.workload}" for cell, word in zip(cells, words) if word == "changed")
    if changed:
        return ("bad", "Answers changed", f"{counts}, and more than rounding differs with {_listed(changed)}.")
    if not any(words) or "cannot tell" in words:
        unknown = sum(word in ("", "cannot tell") for word in words)
        where = f"in {unknown} of {len(cells)} measurements " if len(cells) > 1 else ""
        return ("plain", "Cannot tell about the answers", f"{counts}; {where}it cannot be told whether the rest is rounding.")
    if "rounding only" in words:
        return ("good", "Same answers, within rounding", f"{counts}, and where they differ it is rounding, as the "
                "baseline's own repeats show or near-ties explain.")
    return ("good", "Same answers", f"{counts}.")


def _listed(names: Sequence[str], most: int = 3) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _where(cell: ResultCell) -> str:
    """'agent, one request at a time', 'chat, 16 requests at once'."""
    level = "one request at a time" if cell.concurrency == 1 else f"{cell.concurrency} requests at once"
    return f"{cell.workload}, {level}"


# The conditions under which all of it holds.


def _conditions(cells: Sequence[ResultCell]) -> Section:
    passes = [record for cell in cells for record in (cell.baseline, cell.speculative) if record]
    records = passes + [cell.comparison for cell in cells if cell.comparison]
    facts = (("Model", _known(text_at(record, "model") for record in records)),
             ("Workloads", _known(cell.workload for cell in cells)),
             ("Concurrency", [str(level) for level in _levels(cells)]),
             ("Prompts of a pass", _counts_seen(passes, "prompt_count")),
             ("Repeats", _counts_seen(passes, "repeats")),
             ("Answer limit", [f"{count} tokens" for count in _counts_seen(passes, "max_tokens")]),
             ("Prompts digest", _known(text_at(record, "prompts_sha256")[:16] for record in records)),
             ("Track", _known(text_at(record, "track") for record in records)),
             ("Measured", _days(cells)),
             ("Client", _known(_client_words(record) for record in passes)),
             ("Run files", _known(text_at(record, "run_file") for record in records)))
    listed = "".join(f"<div><dt>{name}</dt><dd>{html_text(', '.join(values))}</dd></div>" for name, values in facts if values)
    return ("conditions", "Conditions", f"<dl>{listed}</dl>{_caveat_list(records)}{table_html(_server_table(passes))}"
            if records else '<p class="note">Nothing measured yet.</p>')


def _counts_seen(records: Sequence[Record], key: str) -> List[str]:
    return [f"{count:,.0f}" for count in sorted(_known(number_at(record, key) for record in records))]


def _client_words(record: Record) -> str:
    python = text_at(record, "client", "python")
    return ", ".join(_known([text_at(record, "client", "platform"), python and f"Python {python}"]))


_SERVER_COLUMNS = (Column("Server"), Column("Engine"), Column("Method"), number("Draft length"), Column("Drafter"),
                   number("Context", "tokens"), number("Slots"), number("KV cache", "tokens"), Column("Address"))


def _server_table(passes: Sequence[Record]) -> Table:
    latest = {record_server(record): record for record in passes}
    rows = []
    for name, record in latest.items():
        drafting = value_at(record, "server", "speculation") or {}
        rows.append((name, _engine_words(record) or None, text_at(drafting, "method") or None,
                     number_at(drafting, "draft_tokens"), text_at(drafting, "drafter") or None,
                     *[number_at(record, "server", key) for key in ("context_tokens", "slots", "kv_cache_tokens")],
                     text_at(record, "base_url") or None))
    return Table("The servers, as they or the user told", _SERVER_COLUMNS, tuple(rows))


_NUMBER_IN_WORDS = re.compile(r"\d[\d.,]*")


def _caveat_list(records: Sequence[Record]) -> str:
    """Each caveat once, with its remedy and how many records carry it; those that differ in a number alone are one."""
    counts: Dict[Tuple[str, str], int] = {}
    alike: Dict[str, Tuple[str, str]] = {}
    for record in records:
        for caveat in list_at(record, "caveats"):
            sentence = text_at(caveat, "sentence") or str(caveat)
            key = alike.setdefault(_NUMBER_IN_WORDS.sub("#", sentence), (sentence, text_at(caveat, "remedy")))
            counts[key] = counts.get(key, 0) + 1
    items = "".join(f"<li><strong>{html_text(sentence)}</strong> {html_text(remedy)} "
                    f'<span class="note">({count} of {len(records)} records)</span></li>'
                    for (sentence, remedy), count in counts.items())
    return f'<div class="caveats"><h3>Caveats</h3><ul>{items}</ul></div>' if items else ""


# The questions, each with its charts and, behind them, its tables.


def _grid(figures: Iterable[Tuple[str, str]]) -> str:
    inner = "".join(f"<figure><figcaption>{html_text(caption)}</figcaption>{svg}</figure>" for caption, svg in figures)
    return f'<div class="grid">{inner}</div>'


def _behind(tables: Sequence[Table], words: str = "The numbers") -> str:
    return f"<details><summary>{html_text(words)}</summary>{''.join(map(table_html, tables))}</details>" if tables else ""


def _workloads(cells: Iterable[ResultCell]) -> Dict[str, List[ResultCell]]:
    grouped: Dict[str, List[ResultCell]] = {}
    for cell in cells:
        grouped.setdefault(cell.workload, []).append(cell)
    return grouped


def _highest(values: Iterable[Optional[float]]) -> float:
    return max([value for value in values if value is not None], default=1.0)


_BEST_COLUMNS = (Column("Workload"), Column("Configuration"), number("Concurrency"), number("Speedup", "", 2),
                 number("Low", "", 2), number("High", "", 2), Column("Verdict"))


def _best_section(cells: Sequence[ResultCell], styles: Mapping[str, int]) -> Optional[Section]:
    """The best level of each configuration, a chart a workload, the fastest first."""
    if not cells:
        return None
    best = {workload: _best_cells(own) for workload, own in _workloads(cells).items()}
    bars = {workload: [Bar(cell.configuration, styles[cell.configuration], cell.speedup, *cell.speedup_interval,
                           f"{times(cell.speedup)} at {cell.concurrency}") for cell in own]
            for workload, own in best.items()}
    chart = Chart("best speedup", "speedup", "×", _highest_speedup(cells), reference=(1.0, "1: no gain"))
    rows = [(workload, cell.configuration, cell.concurrency, cell.speedup, *cell.speedup_interval,
             text_at(cell.comparison, "verdict", "speed") or None) for workload, own in best.items() for cell in own]
    lead = ("<p>Decode speed of a request over the baseline's at the same concurrency, with the concurrency at which it "
            "is best; whiskers are 95 % intervals.</p>")
    table = Table("Best speedup of each configuration", _BEST_COLUMNS, tuple(rows))
    return ("best", "Best speedup", lead + _grid(_bar_figures(bars, chart)) + _behind([table]))


def _best_cells(cells: Sequence[ResultCell]) -> List[ResultCell]:
    """Of each configuration the level where it gains most, the greatest gain first."""
    best = [max(by_level.values(), key=lambda cell: cell.speedup or 0) for by_level in _by_configuration(cells).values()]
    return sorted(best, key=lambda cell: -(cell.speedup or 0))


def _highest_speedup(cells: Sequence[ResultCell]) -> float:
    return _highest([cell.speedup_interval[1] for cell in cells] + [cell.speedup for cell in cells])


def _bar_figures(bars: Mapping[str, Sequence[Bar]], chart: Chart,
                 floors: Optional[Mapping[str, Optional[Tuple[float, str]]]] = None) -> List[Tuple[str, str]]:
    """A chart a workload; one chart of all workloads where each has a single bar. `floors` are the charts' own lines."""
    floors = floors or {}
    if len(bars) > 1 and all(len(own) == 1 for own in bars.values()):
        named = [own[0]._replace(name=workload, words=_beside(own[0].words, floors.get(workload)))
                 for workload, own in bars.items()]
        return [(f"{chart.title}: {_listed(_known(own[0].name for own in bars.values()))}", bar_chart(chart, named))]
    return [(f"{workload}: {chart.title}", bar_chart(
        replace(chart, title=f"{workload}: {chart.title}", reference=floors.get(workload) or chart.reference), own))
        for workload, own in bars.items()]


def _beside(words: str, floor: Optional[Tuple[float, str]]) -> str:
    return words if floor is None else f"{words} ({floor[0]:.0f})"


def _level_lines(cells: Sequence[ResultCell], styles: Mapping[str, int], of: str) -> List[Series]:
    """One line a configuration over the levels, of a property of ResultCell."""
    return [Series(name, styles[name], tuple(
        Point(level, getattr(cell, of), *(cell.speedup_interval if of == "speedup" else ()))
        for level, cell in sorted(by_level.items()))) for name, by_level in _by_configuration(cells).items() if name]


def _speedup_section(cells: Sequence[ResultCell], styles: Mapping[str, int]) -> Optional[Section]:
    """Speedup over the levels with intervals; without a second level only the verdicts are left to tell."""
    if not cells:
        return None
    if not _has_levels(cells):
        return ("speedup", "Verdicts", table_html(_verdict_table(cells)) + _advice_list(cells))
    lows = [value for cell in cells for value in (cell.speedup, cell.speedup_interval[0]) if value]
    figures = [(workload, line_chart(
        Chart(f"Speedup by concurrency on {workload}", "requests at once", "×", _highest_speedup(cells),
              tuple(_levels(own)), (1.0, ""), max(0.125, min([0.5] + lows))), _level_lines(own, styles, "speedup")))
        for workload, own in _workloads(cells).items()]
    lead = ("<p>Above the dashed line at 1 speculation pays; each grid line is twice the one below. Gains shrink as more "
            "requests share the target's passes.</p>")
    return ("speedup", "Speedup by concurrency", lead + _grid(figures) + _behind([_verdict_table(cells)])
            + _advice_list(cells))


def _has_levels(cells: Sequence[ResultCell]) -> bool:
    """Whether any workload was measured at more than one level."""
    return any(len(_levels(own)) > 1 for own in _workloads(cells).values())


_VERDICT_COLUMNS = (Column("Workload"), Column("Configuration"), number("Concurrency"), number("Decode ratio", "", 2),
                    number("Low", "", 2), number("High", "", 2), number("Throughput ratio", "", 2), Column("Speed"),
                    Column("Answers"), Column("Reasons"))


def _verdict_table(cells: Sequence[ResultCell]) -> Table:
    rows = [(cell.workload, cell.configuration, cell.concurrency, number_at(cell.comparison, "decode_ratio", "value"),
             number_at(cell.comparison, "decode_ratio", "low"), number_at(cell.comparison, "decode_ratio", "high"),
             cell.throughput_ratio, text_at(cell.comparison, "verdict", "speed") or None,
             text_at(cell.comparison, "verdict", "answers") or None,
             "; ".join(map(str, list_at(cell.comparison, "verdict", "reasons"))) or None) for cell in cells]
    return Table("Every measurement and its verdict", _VERDICT_COLUMNS, tuple(rows))


def _advice_list(cells: Sequence[ResultCell]) -> str:
    said: Dict[str, List[str]] = {}
    for cell in cells:
        for advice in list_at(cell.comparison, "advice"):
            said.setdefault(str(advice), []).append(f"{cell.configuration} on {_where(cell)}")
    items = "".join(f'<li>{html_text(advice)} <span class="note">({html_text(_listed(places, 2))})</span></li>'
                    for advice, places in said.items())
    return f'<div class="advice"><h3>What to try</h3><ul>{items}</ul></div>' if items else ""


_RATES = ((("decode_tokens_per_s", "mean"), "decode speed [tokens/s]"), (("output_tokens_per_s",), "throughput [tokens/s]"))


def _rates_section(cells: Sequence[ResultCell], styles: Mapping[str, int]) -> Optional[Section]:
    """Decode speed of a request and output throughput of the server, the baseline among them."""
    if not cells:
        return None
    figures: List[Tuple[str, str]] = []
    for path, words in _RATES:
        lines = {workload: _pass_lines(own, styles, path) for workload, own in _workloads(cells).items()}
        high = _highest(point.y for series in lines.values() for each in series for point in each.points)
        if _has_levels(cells):
            figures += [(f"{workload}: {words}", line_chart(_rate_chart(workload, words, high, cells), series))
                        for workload, series in lines.items()]
        elif any(each.known for series in lines.values() for each in series):
            figures += _bar_figures({workload: [_rate_bar(each) for each in series] for workload, series in lines.items()},
                                    Chart(words, "tokens/s", " tokens/s", high))
    lead = ("<p>Two numbers, never mixed: how fast one answer is written, and how many tokens the server gives in all its "
            "answers together.</p>")
    return ("rates", "Speed and throughput", lead + _grid(figures) + _behind([_pass_table(cells)]))


def _rate_chart(workload: str, words: str, high: float, cells: Sequence[ResultCell]) -> Chart:
    levels = tuple(_levels(_workloads(cells)[workload]))
    return Chart(f"{workload}: {words}", "requests at once", " tokens/s", high, levels)


def _rate_bar(series: Series) -> Bar:
    value = series.points[-1].y
    return Bar(series.name, series.style, value, None, None, _decimal(value, 1))


def _pass_lines(cells: Sequence[ResultCell], styles: Mapping[str, int], path: Sequence[str]) -> List[Series]:
    """One line a server over the levels, of a number in its records."""
    found: Dict[str, Dict[int, Optional[float]]] = {}
    for cell in cells:
        for record in (cell.baseline, cell.speculative):
            if record:
                found.setdefault(record_server(record), {})[cell.concurrency] = number_at(record, *path)
    return [Series(name, styles.get(name, BASELINE_STYLE), tuple(Point(level, value) for level, value in sorted(values.items())))
            for name, values in found.items()]


_PASS_COLUMNS = (
    Column("Workload"), Column("Server"), number("Concurrency"), number("Answered"), number("Failed"),
    number("Decode speed", "tokens/s", 1), number("Throughput", "tokens/s", 1), number("TTFT p50", "ms", 1, 1000),
    number("TTFT p99", "ms", 1, 1000), number("TPOT p50", "ms", 2, 1000), number("Latency p50", "s", 2),
    number("Latency max", "s", 2), number("Acceptance", "%", 1, 100), number("Acceptance length", "tokens", 2),
    number("Tokens a target pass", "", 2), Column("Acceptance from"))


def _pass_table(cells: Sequence[ResultCell]) -> Table:
    passes = {id(record): record for cell in cells for record in (cell.baseline, cell.speculative) if record}
    return Table("Every pass", _PASS_COLUMNS, tuple(map(_pass_row, passes.values())),
                 ("Acceptance length counts the bonus token and only steps that had a draft; tokens a target pass count all.",))


def _pass_row(record: Record) -> Tuple[Cell, ...]:
    paths = (("completed",), ("failed",), ("decode_tokens_per_s", "mean"), ("output_tokens_per_s",), ("ttft_s", "p50"),
             ("ttft_s", "p99"), ("tpot_s", "p50"), ("latency_s", "p50"), ("latency_s", "max"),
             ("acceptance", "acceptance_rate"), ("acceptance", "acceptance_length"), ("acceptance", "tokens_per_target_pass"))
    return (record_workload(record), record_server(record), record_level(record),
            *[number_at(record, *path) for path in paths],
            text_at(record, "acceptance", "source") or text_at(record, "acceptance", "missing") or None)


def _position_section(cells: Sequence[ResultCell], styles: Mapping[str, int]) -> Optional[Section]:
    """Acceptance along the chain at the lowest level of each workload."""
    shares = {workload: {cell.configuration: _position_shares(cell) for cell in _lowest(own) if _position_shares(cell)}
              for workload, own in _workloads(cells).items()}
    shares = {workload: own for workload, own in shares.items() if own}
    if not shares:
        return None
    figures = [(workload, line_chart(
        Chart(f"Acceptance by position on {workload}", "position in the draft", " %", 100),
        [Series(name, styles[name], tuple(Point(i, share * 100) for i, share in enumerate(values, 1)))
         for name, values in own.items()])) for workload, own in shares.items()]
    lead = ("<p>Per cent of the drafts whose token at that position was accepted, at the lowest concurrency. It falls along "
            "the chain: a longer draft buys less and less.</p>")
    return ("position", "Acceptance by position", lead + _grid(figures) + _behind([_position_table(shares)]))


def _position_table(shares: Mapping[str, Mapping[str, Sequence[float]]]) -> Table:
    longest = max(len(values) for own in shares.values() for values in own.values())
    rows = [(workload, name, *values, *[None] * (longest - len(values)))
            for workload, own in shares.items() for name, values in own.items()]
    columns = [number(f"{i}", "%", 0, 100) for i in range(1, longest + 1)]
    return Table("Share of the drafts whose token at this position was accepted",
                 (Column("Workload"), Column("Configuration"), *columns), tuple(rows))


def _lowest(cells: Sequence[ResultCell]) -> List[ResultCell]:
    """The cells of the lowest level."""
    return [cell for cell in cells if cell.concurrency == _levels(cells)[0]]


def _position_shares(cell: ResultCell) -> List[float]:
    """Accepted at position i over drafts; empty where it was not measured."""
    stored = list_at(cell.comparison, "break_even", "acceptance_by_position")
    drafts = number_at(cell.speculative, "acceptance", "drafts")
    accepted = list_at(cell.speculative, "acceptance", "accepted_by_position") if drafts else []
    known = [share for share in stored or accepted if isinstance(share, (int, float))]
    shares = known if stored else [count / (drafts or 1) for count in known]
    return shares if len(known) == len(stored or accepted) and all(0 <= share <= 1 for share in shares) else []


def _answers_section(cells: Sequence[ResultCell], styles: Mapping[str, int]) -> Optional[Section]:
    """Exact match and prefix agreement at the lowest level, beside the baseline's agreement with itself."""
    if not cells:
        return None
    figures: List[Tuple[str, str]] = []
    for key, words in (("exact_match", "exact match [%]"), ("prefix_agreement", "prefix agreement [%]")):
        bars = {workload: [_share_bar(cell.configuration, styles, _agreement_share(cell, key)) for cell in _lowest(own)]
                for workload, own in _workloads(cells).items()}
        floors = {workload: _floor_line(_lowest(own), key) for workload, own in _workloads(cells).items()}
        figures += _bar_figures(bars, Chart(words, "share", " %", 100), floors)
    lead = ("<p>Exact match: answers that are the same byte for byte. Prefix agreement: share of the baseline's text "
            "reproduced before the first difference. The dashed line (or the number in brackets) is the noise floor, the "
            "baseline against itself: what disagreement costs nothing.</p>")
    tables = [_outputs_table(workload, own) for workload, own in _workloads(cells).items()]
    return ("answers", "Did the answers stay the same?", lead + _grid(figures) + _behind(tables))


def _agreement_share(cell: ResultCell, key: str) -> Optional[float]:
    return cell.exact_match if key == "exact_match" else number_at(cell.comparison, key)


def _floor_line(cells: Sequence[ResultCell], key: str) -> Optional[Tuple[float, str]]:
    share = _first_known(*[number_at(cell.comparison, "noise_floor", key) for cell in cells])
    return None if share is None else (share * 100, f"noise floor {percent(share)}")


def _share_bar(name: str, styles: Mapping[str, int], share: Optional[float], words: str = "") -> Bar:
    value = None if share is None else share * 100
    return Bar(name, styles.get(name, BASELINE_STYLE), value, None, None, words or percent(share))


def _accuracy_section(cells: Sequence[ResultCell], styles: Mapping[str, int]) -> Optional[Section]:
    """Right answers of the workloads that are graded, the baseline's first."""
    graded = {workload: _graded(own) for workload, own in _workloads(cells).items()}
    graded = {workload: own for workload, own in graded.items() if own}
    if not graded:
        return None
    bars = {workload: [_graded_bar(name, styles, found) for name, found in own.items()]
            for workload, own in graded.items()}
    rows = [(workload, name, counts_words(found), _share(found)) for workload, own in graded.items()
            for name, found in own.items()]
    columns = (Column("Workload"), Column("Server"), number("Right"), number("Share", "%", 0, 100))
    figures = _bar_figures(bars, Chart("right answers [%]", "share", " %", 100))
    return ("accuracy", "Accuracy", "<p>Right answers among those that could be graded: the check that matters most. Whiskers "
            "are 95 % intervals.</p>"
            + _grid(figures) + _behind([Table("Right answers", columns, tuple(rows))]))


def _graded_bar(name: str, styles: Mapping[str, int], accuracy: Any) -> Bar:
    """The share of right answers with its 95 % interval (Wilson)."""
    bar = _share_bar(name, styles, _share(accuracy), counts_words(accuracy) or "")
    interval = wilson(int(number_at(accuracy, "correct") or 0), int(number_at(accuracy, "of") or 0))
    return bar._replace(low=interval[0] * 100, high=interval[1] * 100) if interval else bar


def _graded(cells: Sequence[ResultCell]) -> Dict[str, Any]:
    """Each server's {correct, of} at the lowest level, of those that were graded."""
    found: Dict[str, Any] = {}
    for cell in _lowest(cells):
        found.setdefault(BASELINE, _first_known(value_at(cell.comparison, "baseline_accuracy"),
                                                value_at(cell.baseline, "accuracy")))
        if cell.configuration:
            found[cell.configuration] = _first_known(value_at(cell.comparison, "speculative_accuracy"),
                                                     value_at(cell.speculative, "accuracy"))
    return {name: accuracy for name, accuracy in found.items() if _share(accuracy) is not None}


def _map_section(cells: Sequence[ResultCell], styles: Mapping[str, int]) -> Optional[Section]:
    """A map for each draft length that was measured, with the measured points on it."""
    by_length: Dict[int, List[Tuple[ResultCell, MapPoint]]] = {}
    for cell in _lowest(cells) if cells else ():
        length, point = number_at(cell.comparison, "break_even", "draft_length"), _map_point(cell, styles)
        if point and length and 1 <= length <= _LONGEST_DRAFT:
            by_length.setdefault(int(length), []).append((cell, point))
    if not by_length:
        return None
    maps = "".join(_map_figure(length, found) for length, found in sorted(by_length.items()))
    lead = ("<p>A model of the speedup for each draft length: S = E / (1 + k c), with E = (1 − α<sup>k+1</sup>) / (1 − α) "
            "tokens a step. Right of the heavy line speculation pays. The numbers on the map are measurements at the lowest "
            "concurrency; the bands are predictions.</p>")
    return ("map", "Break-even map", lead + f'<div class="grid">{maps}</div>' + _behind([_cost_table(cells)]))


def _map_point(cell: ResultCell, styles: Mapping[str, int]) -> Optional[MapPoint]:
    alpha = number_at(cell.comparison, "break_even", "acceptance_rate")
    cost = number_at(cell.comparison, "break_even", "draft_cost", "value")
    if alpha is None or cost is None or not 0 <= alpha <= 1 or not 0 <= cost < 100:
        return None
    return MapPoint(alpha, cost, styles[cell.configuration], f"{cell.configuration}, {cell.workload}")


def _map_figure(length: int, found: Sequence[Tuple[ResultCell, MapPoint]]) -> str:
    items = "".join(f"<li>{html_text(point.name)}: {times(cell.speedup)} "
                    f"(predicted {times(speedup(point.alpha, length, point.cost))})</li>" for cell, point in found)
    points = heat_map(f"Break-even map for draft length {length}", length, [point for _, point in found])
    return f"<figure><figcaption>draft length {length}</figcaption>{points}<ol>{items}</ol></figure>"


_COST_COLUMNS = (
    Column("Workload"), Column("Configuration"), number("Concurrency"), number("Draft length"),
    number("Acceptance rate", "", 2), number("Break-even acceptance", "", 2),
    number("Cost of a drafted token", "target steps", 3), number("Cost of a step", "target steps", 2),
    number("Best draft length"), number("Speedup predicted there", "", 2), number("Gain ends at concurrency", "", 1),
    number("KV cache lost", "tokens"))


def _cost_table(cells: Sequence[ResultCell]) -> Table:
    paths = (("draft_length",), ("acceptance_rate",), ("break_even_acceptance",), ("draft_cost", "value"), ("step_cost", "value"),
             ("best_draft_length",), ("best_speedup",), ("crossover", "concurrency"), ("kv_cache_tokens_lost",))
    rows = [(cell.workload, cell.configuration, cell.concurrency,
             *[number_at(cell.comparison, "break_even", *path) for path in paths]) for cell in cells]
    return Table("What drafting costs and what it would need", _COST_COLUMNS, tuple(rows))


# Where answers part: the same prompt on both servers, side by side.


def _differences_section(cells: Sequence[ResultCell], runs: Sequence[Run]) -> Optional[Section]:
    """The first differences of each measurement, as many as a reader can take in."""
    texts = _answers_by_place(runs)
    left, groups = _DIFFERENCES_IN_ALL, []
    for cell in sorted(cells, key=lambda cell: cell.concurrency):
        found = [each for each in list_at(cell.comparison, "text_comparison", "divergences") if isinstance(each, Mapping)]
        found = found[:min(left, _DIFFERENCES_SHOWN)]
        left -= len(found)
        groups += [_difference_group(cell, found, texts)] if found else []
    if not groups:
        return None
    lead = ("<p>Marked is where the texts part, from the first differing character on. The margin tells how far the other "
            "server's token lies below the baseline's own choice: thousandths of a nat are a coin that rounding flips, "
            "whole nats are not.</p>")
    return ("differences", "Where answers part", lead + "".join(groups).replace("<details>", "<details open>", 1))


def _difference_group(cell: ResultCell, found: Sequence[Record], texts: Mapping[_Place, List[Tuple[Run, Reply]]]) -> str:
    counts = f"{_decimal(cell.identical, 0)} of {_decimal(cell.compared, 0)} identical"
    pairs = "".join(_difference_figure(cell, each, texts) for each in found)
    return (f"<details><summary>{html_text(cell.configuration)} on {html_text(_where(cell))}: {counts}</summary>"
            f"{pairs}</details>")


_Place = Tuple[str, str, int]       # server, workload, level


def _answers_by_place(runs: Sequence[Run]) -> Dict[_Place, List[Tuple[Run, Reply]]]:
    found: Dict[_Place, List[Tuple[Run, Reply]]] = {}
    for run in runs:
        for each in run.passes:
            if each.purpose == "timed":
                place = (each.server, each.workload, each.concurrency)
                found.setdefault(place, []).extend((run, reply) for reply in each.replies)
    return found


def _difference_figure(cell: ResultCell, divergence: Record, texts: Mapping[_Place, List[Tuple[Run, Reply]]]) -> str:
    sides = ((text_at(cell.comparison, "baseline_label") or BASELINE, "baseline_tail"),
             (cell.configuration, "speculative_tail"))
    answers = {name: texts.get((name, cell.workload, cell.concurrency), []) for name, _ in sides}
    boxes = "".join(_side_box(name, divergence, text_at(divergence, tail), answers[name]) for name, tail in sides)
    asked = _question(text_at(divergence, "prompt_id"), answers[sides[0][0]])
    return (f'<figure class="pair"><figcaption>{html_text(divergence_words(divergence))}</figcaption>'
            f'{asked}<div class="sides">{boxes}</div></figure>')


def _question(prompt_id: str, answers: Sequence[Tuple[Run, Reply]]) -> str:
    """What was asked last, where a run file tells."""
    found = next((run.prompts.get(prompt_id) for run, reply in answers if reply.prompt_id == prompt_id), None)
    words = text_at(found.messages[-1], "content") if found and found.messages else ""
    return f'<p class="note">Asked: {html_text(_shortened(" ".join(words.split()), 200))}</p>' if words else ""


def _side_box(name: str, divergence: Record, tail: str, answers: Sequence[Tuple[Run, Reply]]) -> str:
    """One server's text around the first difference; only what the notebook kept where no run file tells more."""
    before, after = _around(divergence, tail, answers)
    first = re.sub(r"(?s)(?<=\S)\s.*", "", after)[:24] or after[:1]       # the first word, with blanks before it
    marked = f"<mark>{html_text(first)}</mark>{html_text(after[len(first):])}" if after else "<mark>(the text ends here)</mark>"
    return f'<div><p class="side">{html_text(name)}</p><p class="text">{html_text(before)}{marked}</p></div>'


def _around(divergence: Record, tail: str, answers: Sequence[Tuple[Run, Reply]]) -> Tuple[str, str]:
    """The text before and from the first difference on. A run's text counts only if it goes on as the record says."""
    place = number_at(divergence, "first_difference_at_char")
    at = int(place or 0)
    for _, reply in answers if place is not None else ():
        text = (reply.reasoning if text_at(divergence, "channel") == "reasoning" else reply.content) or ""
        if reply.prompt_id == text_at(divergence, "prompt_id") and text[at:at + len(tail)] == tail and text:
            return ("…" if at > _BEFORE else "") + text[max(0, at - _BEFORE):at], _shortened(text[at:], _AFTER)
    return ("… " if place else ""), _shortened(tail, _AFTER)


def _shortened(text: str, most: int) -> str:
    return text if len(text) <= most else text[:most] + "…"


_CATEGORY_COLUMNS = (
    Column("Workload"), Column("Category"), Column("Configuration"), number("Concurrency"), number("Pairs"),
    number("Speedup", "", 2), number("Low", "", 2), number("High", "", 2), number("Acceptance", "%", 0, 100),
    number("Exact match", "%", 0, 100))


def _category_section(cells: Sequence[ResultCell]) -> Optional[Section]:
    rows = [_category_cells(cell, each) for cell in cells for each in list_at(cell.comparison, "break_even", "by_category")]
    if not rows:
        return None
    table = Table("Speed and agreement by category of prompt", _CATEGORY_COLUMNS, tuple(rows))
    return ("categories", "By category", table_html(table) if len(rows) <= 30 else _behind([table], f"{len(rows)} rows"))


def _category_cells(cell: ResultCell, found: Any) -> Tuple[Cell, ...]:
    paths = (("pairs",), ("decode_ratio", "value"), ("decode_ratio", "low"), ("decode_ratio", "high"),
             ("acceptance_rate",), ("exact_match",))
    return (cell.workload, text_at(found, "category") or None, cell.configuration, cell.concurrency,
            *[number_at(found, *path) for path in paths])


_OTHER_COLUMNS = (Column("Run"), Column("Date"), Column("Model"), Column("Workload"), Column("Configuration"),
                  number("Concurrency"), number("Speedup", "", 2))


def _others_section(everything: Sequence[ResultCell], shown_cells: Sequence[ResultCell]) -> Optional[Section]:
    """What the notebook holds besides: other models, and older results of the same cell."""
    on_page = {id(cell) for cell in shown_cells}
    rows = [(cell.run, _when(cell)[:10] or None, text_at(cell.newest, "model") or None, cell.workload,
             cell.configuration or BASELINE, cell.concurrency, cell.speedup)
            for cell in everything if id(cell) not in on_page]
    if not rows:
        return None
    lead = "<p>This page shows the latest results of the model that was measured last. The notebook also holds these.</p>"
    return ("others", "Also in the notebook", lead + _behind([Table("Other results", _OTHER_COLUMNS, tuple(rows))],
                                                             f"{len(rows)} results"))


_STYLE = """
:root{color-scheme:light dark;--bg:#fff;--ink:#1c2128;--soft:#57606a;--line:#d8dee4;--panel:#f6f8fa;--link:#0b57b0;
--good:#116329;--bad:#a40e26;--mixed:#7d4e00;--mark:#ffe08a;--mark-ink:#1c2128;
--s0:#0b5fc4;--s1:#b3470a;--s2:#1a7035;--s3:#7a3bd1;--s4:#b3216f;--s5:#0d6d80;--s6:#84610a;--s7:#505a66;
--b0:#f0b48a;--b1:#f6ccae;--b2:#fbe6d6;--b3:#e3eefa;--b4:#c5dcf5;--b5:#a1c6ee;--b6:#7fb0e5;--b7:#5e99db}
@media screen and (prefers-color-scheme:dark){:root{--bg:#0f1318;--ink:#e6eaef;--soft:#9ba6b2;--line:#2d353f;--panel:#171c23;--link:#7ab7ff;
--good:#63d184;--bad:#ff8f8f;--mixed:#f0b352;--mark:#6b5200;--mark-ink:#fff3cf;
--s0:#6cb0ff;--s1:#ff9b5e;--s2:#5fd07f;--s3:#c3a1ff;--s4:#ff8ac4;--s5:#4fd0e2;--s6:#e3c04c;--s7:#b4bfca;
--b0:#6b3a17;--b1:#553119;--b2:#3a281c;--b3:#172a3f;--b4:#1b3a5c;--b5:#204b7a;--b6:#265d98;--b7:#2d70b8}}
*{box-sizing:border-box}
html{-webkit-text-size-adjust:100%;scroll-padding-top:1rem}
body{margin:0 auto;max-width:1160px;padding:2rem 1.25rem 3rem;background:var(--bg);color:var(--ink);
font:16px/1.55 system-ui,-apple-system,"Segoe UI",Roboto,"Noto Sans",sans-serif;overflow-wrap:break-word}
h1{font-size:clamp(1.6rem,4vw,2.3rem);line-height:1.2;margin:.1rem 0 .4rem;letter-spacing:-.015em}
h2{font-size:1.3rem;margin:0 0 .4rem;letter-spacing:-.01em}
h3{font-size:1rem;margin:0 0 .3rem}
p{margin:.3rem 0 .8rem;max-width:46rem}
a{color:var(--link)}
.eyebrow{margin:0;color:var(--soft);font-size:.85rem}
.facts,.note{color:var(--soft)}
.note{font-size:.875rem}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,20rem),1fr));gap:1rem;margin:1.2rem 0}
.card{border:1px solid var(--line);border-left:4px solid var(--soft);border-radius:8px;padding:1rem 1.2rem;background:var(--panel)}
.card p{margin:0}
.card .word{font-size:1.35rem;font-weight:650;line-height:1.25;margin-bottom:.35rem}
.good{border-left-color:var(--good)}.good .word{color:var(--good)}
.bad{border-left-color:var(--bad)}.bad .word{color:var(--bad)}
.mixed{border-left-color:var(--mixed)}.mixed .word{color:var(--mixed)}
nav{display:flex;flex-wrap:wrap;gap:.2rem 1.1rem;padding:.7rem 0;border-block:1px solid var(--line);font-size:.9rem}
nav a{text-decoration:none;padding:.2rem 0}nav a:hover{text-decoration:underline}
section{margin-top:2.6rem}
dl{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,9.5rem),1fr));gap:.7rem 1.5rem;margin:.6rem 0 1.2rem}
dt{color:var(--soft);font-size:.8rem}dd{margin:0;font-size:.95rem;overflow-wrap:anywhere}
.caveats,.advice{border-left:4px solid var(--mixed);background:var(--panel);border-radius:0 8px 8px 0;padding:.8rem 1.1rem;margin:1rem 0}
.advice{border-left-color:var(--link)}
.caveats ul,.advice ul{margin:.2rem 0;padding-left:1.2rem}
.grid{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,330px),1fr));gap:1.4rem 1.6rem;margin:1rem 0}
figure{margin:0;min-width:0}
figcaption{font-weight:600;font-size:.95rem;margin-bottom:.35rem}
figure ol{margin:.3rem 0 0;padding-left:1.6rem;font-size:.85rem;color:var(--soft)}
svg{display:block;width:100%;max-width:480px;height:auto;font:11px system-ui,-apple-system,"Segoe UI",Roboto,"Noto Sans",sans-serif}
svg text{fill:var(--ink);font-variant-numeric:tabular-nums}svg .soft{fill:var(--soft)}
.c0{--c:var(--s0)}.c1{--c:var(--s1)}.c2{--c:var(--s2)}.c3{--c:var(--s3)}.c4{--c:var(--s4)}.c5{--c:var(--s5)}.c6{--c:var(--s6)}.c7{--c:var(--s7)}
svg .grid{stroke:var(--line);stroke-width:1;fill:none}
svg .ref{stroke:var(--ink);stroke-width:1.4;stroke-dasharray:5 3;fill:none}
svg .line{stroke:var(--c);stroke-width:1.8;fill:none;stroke-linejoin:round}
svg .whisker{stroke:var(--c);stroke-width:1;fill:none;opacity:.75}svg .over{stroke:var(--ink);opacity:.9}
svg .mark{fill:var(--c);stroke:var(--bg);stroke-width:1}
svg .bar{fill:var(--c)}svg .value{font-weight:600;paint-order:stroke;stroke:var(--bg);stroke-width:4px;stroke-linejoin:round}
.b0{fill:var(--b0)}.b1{fill:var(--b1)}.b2{fill:var(--b2)}.b3{fill:var(--b3)}.b4{fill:var(--b4)}.b5{fill:var(--b5)}.b6{fill:var(--b6)}.b7{fill:var(--b7)}
svg .contour{stroke:var(--ink);stroke-width:.6;opacity:.55;fill:none}svg .even{stroke:var(--ink);stroke-width:2.4;fill:none}
svg .on-map{font-weight:600}
svg .point{fill:var(--bg);stroke:var(--c);stroke-width:2.2}svg .tie{stroke:var(--ink);stroke-width:1}svg .spot{fill:var(--ink)}svg .digit{font-weight:700}
.scroll{overflow-x:auto;border:1px solid var(--line);border-radius:8px;margin:.8rem 0}
.scroll:focus-visible,summary:focus-visible,a:focus-visible{outline:2px solid var(--link);outline-offset:2px}
table{border-collapse:collapse;width:100%;font-size:.875rem;font-variant-numeric:tabular-nums}
caption{text-align:left;font-weight:600;padding:.6rem .75rem}
th,td{padding:.38rem .75rem;text-align:left;border-top:1px solid var(--line);vertical-align:top;white-space:nowrap}
td:last-child{white-space:normal;min-width:9rem}td.n:last-child{min-width:0}
thead th{color:var(--soft);font-weight:600;vertical-align:bottom;white-space:normal}
tbody th{font-weight:600}.n{text-align:right}
tbody tr:nth-child(even){background:var(--panel)}
details{margin:.5rem 0;border-top:1px solid var(--line)}
summary{cursor:pointer;padding:.55rem 0;font-weight:600;font-size:.92rem}
.pair{margin:.4rem 0 1.2rem}.pair figcaption{font-weight:500;color:var(--soft);font-size:.875rem}
.sides{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,19rem),1fr));gap:.8rem}
.sides>div{border:1px solid var(--line);border-radius:8px;padding:.6rem .9rem;min-width:0}
.side{font-size:.8rem;color:var(--soft);margin:0 0 .2rem}
.text{margin:0;font:13px/1.55 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;white-space:pre-wrap;overflow-wrap:anywhere}
mark{background:var(--mark);color:var(--mark-ink);font-weight:700;text-decoration:underline;text-underline-offset:3px;border-radius:2px}
footer{margin-top:3rem;border-top:1px solid var(--line);padding-top:.8rem;color:var(--soft);font-size:.875rem}
@media print{body{max-width:none;padding:0;font-size:11pt}nav,details:not([open]){display:none}
h2{break-after:avoid}figure,.card,tr{break-inside:avoid}section{margin-top:1.4rem}
.scroll{overflow:visible;border:0}th,td{white-space:normal;padding:.2rem .4rem}table{font-size:8pt}.grid{grid-template-columns:1fr 1fr}}
"""


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
        """Whether it drafts at all."""
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
        """Remember these tokens as what came next."""
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
        """Tokens drafted for it so far."""
        return sum(drafted for drafted, _ in self.verified)

    @property
    def accepted(self) -> int:
        """Of these accepted."""
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
        self.counts.update(counts)
        self.counts.update({(name, sequence.streamed): count for name, count in counts.items()})
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
        answer = sequence.answer
        tokens: List[str] = []
        logprobs: List[DemoLogprob] = []
        for guess in [*draft, None]:
            own = answer.choose(width)
            token = own
            if guess is not None and guess != own and self._passes_wrong(sequence, len(tokens)):
                token = guess
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
        """Why the answer ended, in OpenAI's words; None: it has not."""
        called = self.sequence.finish == "stop" and self._function is not None
        return "tool_calls" if called else self.sequence.finish

    @property
    def usage(self) -> Dict[str, Any]:
        """Its tokens, counted."""
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
        """The page /v1/models."""
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
            raise self.refusal(400, f"JSON decode error: {error}", "Bad Request", "body") from None
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
        """What it says of a path that it does not have."""
        return DemoRefusal(404, {"detail": "Not Found"})

    def chunk(self, request: DemoRequest, choices: Sequence[Mapping[str, Any]], **more: Any) -> Dict[str, Any]:
        """One chunk of a stream."""
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
        """The page /slots."""
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

        events: List[Mapping[str, Any]] = [choice({"role": "assistant", "content": None})] if emission.first else []
        for place, token in enumerate(emission.tokens):
            real = emission.logprobs and place >= emission.accepted     # a drafted token's are absent
            more: Dict[str, Any] = {"logprobs": self.logprobs(emission.logprobs[place:place + 1])} if real else {}
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
        reasons: List[Tuple[Mapping[str, str], float]] = [
            ({"finished_reason": reason}, counts["finish", reason]) for reason in ("stop", "length", "abort")]
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
        events: List[Mapping[str, Any]] = (
            [self.chunk(request, [opening], prompt_token_ids=prompt_ids, prompt_text=None)] if emission.first else [])
        deltas = request.deltas(emission.tokens, merge=True) or ([{"content": ""}] if ids or finish else [])
        choices: List[Dict[str, Any]] = [
            {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None, "token_ids": None} for delta in deltas]
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

        events: List[Mapping[str, Any]] = [choice({"role": "assistant", "content": ""})] if emission.first else []
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
    work = asyncio.Event()
    server = await asyncio.start_server(
        lambda reader, writer: _serve_connection(DemoConnection(dialect, work, reader, writer)), "127.0.0.1", port)
    print(server.sockets[0].getsockname()[1], flush=True)
    await _serve_steps(dialect.engine, work)


async def _serve_steps(engine: DemoEngine, work: asyncio.Event) -> None:
    """Let the engine's passes last as long as they say, on a schedule that late wake-ups do not stretch."""
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
    process: Any            # subprocess.Popen

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
        apart = {"creationflags": subprocess.CREATE_NEW_PROCESS_GROUP}     # type: ignore[attr-defined]
    process: Any = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, **apart)
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
# A verb is a parser and a function that returns the exit code: 0 measured and all requests answered, 1 something failed,
# 2 cannot start, 130 interrupted. stdout carries the result, stderr the progress.

EXIT_OK, EXIT_FAILED, EXIT_CANNOT_START, EXIT_INTERRUPTED = 0, 1, 2, 130


class Screen:
    """Where results and progress go, what the stream can show, and how wide it is."""

    def __init__(self, quiet: bool = False, result: Any = None) -> None:
        self.result = result or sys.stdout
        self.progress = sys.stderr
        self.quiet = quiet
        self._bar_shown = False
        self._bar_at_s = -1.0

    def width(self) -> int:
        """Columns of the terminal, at least 60; 80 where there is none."""
        return max(60, shutil.get_terminal_size((80, 24)).columns)

    def show(self, lines: Union[str, Iterable[str]]) -> None:
        """Result lines, in whatever characters the stream can encode."""
        self._write(self.result, lines if isinstance(lines, str) else "\n".join(lines))

    def say(self, line: str) -> None:
        """One line of progress or warning, escaped: servers' words are in it."""
        if not self.quiet:
            self.clear_bar()
            self._write(self.progress, terminal_text(line))

    def _write(self, stream: Any, text: str) -> None:
        encoding = getattr(stream, "encoding", None) or "utf-8"
        stream.write(encodable(text, encoding) + "\n")
        stream.flush()

    def bar_is_due(self, now_s: float) -> bool:
        """Whether the bar may be drawn again: four times a second, so that drawing disturbs no stamp."""
        if self.quiet or now_s - self._bar_at_s < 0.25 or not self._is_terminal():
            return False
        self._bar_at_s = now_s
        return True

    def bar(self, done: int, of: int, words: str, left_s: Optional[float]) -> None:
        """The progress so far: one line that is written over, on a terminal only."""
        filled = "#" * int(20 * done / max(of, 1))
        eta = f", about {_clock_words(left_s)} left" if left_s is not None else ""
        self.progress.write(f"\r\x1b[K[{filled:<20}] {done}/{of} {terminal_text(words)}{eta}")
        self.progress.flush()
        self._bar_shown = True

    def clear_bar(self) -> None:
        """Take the bar away, so that a line can stand there."""
        if self._bar_shown:
            self.progress.write("\r\x1b[K")
            self._bar_shown = False

    def _is_terminal(self) -> bool:
        return bool(getattr(self.progress, "isatty", lambda: False)()) and os.environ.get("TERM") != "dumb"


def _clock_words(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


# ----------------------------------------------------------------------------------------------------------------------
# The plan: what will be asked, where, how often


class Block(NamedTuple):
    """One workload at one level: its slice of the prompts."""

    workload: str
    concurrency: int
    prompts: Tuple[Prompt, ...]


@dataclass(frozen=True)
class Plan:
    """Everything that will be asked, in order, and what is to be said about it beforehand."""

    blocks: Tuple[Block, ...]
    remarks: Tuple[Remark, ...] = ()

    @property
    def prompts(self) -> Tuple[Prompt, ...]:
        """All prompts, each once, in order."""
        return tuple({prompt.id: prompt for block in self.blocks for prompt in block.prompts}.values())

    @property
    def levels(self) -> Tuple[int, ...]:
        """The concurrency levels, each once, rising."""
        return tuple(sorted({block.concurrency for block in self.blocks}))


class Wish(NamedTuple):
    """A workload as it was asked for: where its prompts come from, at which levels, how many of them."""

    workload: str
    prompts: Tuple[Prompt, ...]
    levels: Tuple[int, ...]
    limit: Optional[int]


SUITES = ("lesson", "tutorial")
_LESSON_LIMITS = {"copy": 12, "closed": 12, "open": 12, "mixed": 40}
_TUTORIAL_LEVELS = (1, 4, 16)
_TUTORIAL_LIMIT = 78


def plan_of(wishes: Sequence[Wish], share_prompts: bool) -> Plan:
    """The blocks that a list of wishes comes to: no prompt is asked twice on a server, unless prompts are to be shared."""
    blocks: List[Block] = []
    remarks: List[Remark] = []
    seen: Set[str] = set()
    names: Set[str] = set()
    for wish in wishes:
        prompts = _with_own_names(take(without_repeats(wish.prompts, seen), wish.limit), wish.workload, names)
        seen.update(map(prompt_sha256, prompts))
        if len(prompts) < len(wish.levels) and not share_prompts or not prompts:
            raise MeasureError(f"The workload {wish.workload} has {len(prompts)} prompts for {len(wish.levels)} concurrency levels.",
                               "give it more prompts, or name fewer levels: each level needs prompts of its own")
        for place, level in enumerate(wish.levels):
            own = prompts if share_prompts else slice_for_level(prompts, place, len(wish.levels))
            blocks.append(Block(wish.workload, level, own))
            if len(own) < level:
                remarks.append(Remark(f"{wish.workload} has {len(own)} prompts for concurrency {level}: never {level} requests at once.",
                                      f"give it at least {level * len(wish.levels)} prompts, or raise --limit", about=wish.workload))
    if share_prompts and any(len(wish.levels) > 1 for wish in wishes):
        remarks.append(Remark("Every level asks the same prompts again: a drafter or cache that remembers answers looks far better than it is.",
                              "leave --share-prompts out; suffix decoding's acceptance length once went from 1.5 to 8.5 that way"))
    return Plan(tuple(blocks), tuple(remarks))


def _with_own_names(prompts: Sequence[Prompt], workload: str, taken: Set[str]) -> Tuple[Prompt, ...]:
    """The prompts under ids that no other workload uses: answers are matched by them."""
    named = []
    for prompt in prompts:
        identity, number_ = prompt.id, 2
        while identity in taken:
            identity, number_ = f"{workload}:{prompt.id}" if number_ == 2 else f"{workload}:{prompt.id}-{number_}", number_ + 1
        taken.add(identity)
        named.append(replace(prompt, id=identity))
    return tuple(named)


def wishes_of(options: Any) -> Tuple[List[Wish], List[Remark]]:
    """The workloads that the command line asks for, their files read."""
    remarks: List[Remark] = []
    if options.suite == "lesson":
        return [Wish(name, _set_of(name), (10,) if name == "mixed" else (1,), options.limit or limit)
                for name, limit in _LESSON_LIMITS.items()], remarks
    if options.suite == "tutorial":
        chat = _prompts_of_file(options, "chat", remarks) if options.prompts else _set_of("open")
        sets = (("chat", chat), ("agent", _set_of("agent")), ("math", _set_of("math")))
        return [Wish(name, prompts, options.concurrency or _TUTORIAL_LEVELS, options.limit or _TUTORIAL_LIMIT) for name, prompts in sets], remarks
    names = options.prompt_set or (("file",) if options.prompts else (BUILTIN,))
    levels = options.concurrency or (1,)
    wishes = []
    for name in names:
        prompts = _prompts_of_file(options, None, remarks) if name == "file" else _set_of(name)
        workload = prompts[0].workload if name == "file" and len({prompt.workload for prompt in prompts}) == 1 else name
        wishes.append(Wish(workload, prompts, levels, options.limit))
    return wishes, remarks


def _set_of(name: str) -> Tuple[Prompt, ...]:
    if name == BUILTIN:
        return builtin_prompts()
    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), "prompts", f"{name}.jsonl")
    if not os.path.exists(path):
        raise MeasureError(f"The prompt set {name!r} is not there: {path} does not exist.",
                           "copy the folder prompts/ next to the script, or use --prompt-set builtin")
    return tuple(replace(prompt, workload=name) for prompt in read_prompt_file(path).prompts)


def _prompts_of_file(options: Any, workload: Optional[str], remarks: List[Remark]) -> Tuple[Prompt, ...]:
    if not options.prompts:
        raise MeasureError("--prompt-set file needs a file.", "name it with --prompts FILE")
    read = read_prompt_file(options.prompts, workload, options.prompt_key)
    for caveat in read.caveats[:5]:
        remarks.append(Remark(caveat.sentence, caveat.remedy))
    if len(read.caveats) > 5:
        remarks.append(Remark(f"{options.prompts}: {len(read.caveats) - 5} more records like these."))
    remarks.append(Remark(f"{options.prompts}: {len(read.prompts)} prompts, {read.shape}."))
    return read.prompts


# ----------------------------------------------------------------------------------------------------------------------
# Measuring


class Session:
    """One measurement under way: its servers, its journals, and what has been measured so far."""

    def __init__(self, options: Any, screen: Screen, plan: Plan) -> None:
        self.options, self.screen, self.plan = options, screen, plan
        self.client = Client(options.timeout, options.cafile)
        self.arms: List[Arm] = []
        self.asking = Asking(options.max_tokens, options.seed, not options.no_stream, options.no_think, options.extra_body,
                             salt=secrets.token_hex(6))
        self.started_at = now_utc()
        self.passes: List[Pass] = []
        self.rulers: Dict[str, Ruler] = {}
        self.margins: Dict[Tuple[str, str, int, str, int], float] = {}
        self.remarks: List[Remark] = []     # what is to be kept with the records
        self.interrupt = Interrupt(self.client)
        self.notebook: Any = None
        self.evidence: Optional[Journal] = None
        self.baseline_run: Optional[Run] = None
        self.failed = False             # a request failed, or something could not be written down
        self.failed_writes = False
        self.warm_speeds: Dict[str, Tuple[float, float]] = {}   # TTFT and TPOT of an untimed request, by server
        self.total = 0                  # timed requests to be sent, and sent so far
        self.sent = 0
        self.sending_since_s = 0.0

    def run_alone(self) -> Run:
        """What this measurement has brought so far, as a run."""
        return Run(self.options.label, self.started_at, self.settings, prompts_sha256(self.plan.prompts),
                   {arm.server.label: arm.server for arm in self.arms}, {prompt.id: prompt for prompt in self.plan.prompts},
                   tuple(self.passes), self.rulers, self.margins, client=client_facts(), path=self.evidence.path if self.evidence else "")

    def run(self) -> Run:
        """What has been measured so far, together with a baseline that was measured before (--baseline-run)."""
        own = self.run_alone()
        return own if self.baseline_run is None else replace(joined(self.baseline_run, [own]), label=own.label, path=own.path)

    def caveats_about(self, workload: str, *labels: str) -> List[Caveat]:
        """The caveats of the whole run that concern a workload and these servers."""
        return [remark.caveat() for remark in self.remarks if remark.about in ("", workload, *labels)]

    def prompt(self, identity: str) -> Prompt:
        """The planned prompt of that id."""
        return next(prompt for prompt in self.plan.prompts if prompt.id == identity)

    @property
    def settings(self) -> Dict[str, Any]:
        """What must be equal for two runs to be comparable, and what is good to know later."""
        options = self.options
        return {"max_tokens": options.max_tokens, "seed": options.seed, "repeats": options.repeats, "stream": not options.no_stream,
                "no_think": options.no_think, "extra_body": options.extra_body, "share_prompts": options.share_prompts,
                "dropped": sorted(self.asking.dropped), "own_bodies": {arm.server.label: arm.own_body for arm in self.arms if arm.own_body},
                "order": options.order, "warmup": options.warmup, "suite": options.suite, "track": options.track,
                "texts": not options.no_texts}


def client_facts() -> Dict[str, Any]:
    """Who measured: Python and platform, nothing that names a person or a machine."""
    return {"python": platform.python_version(), "platform": f"{platform.system()} {platform.machine()}", "cpus": os.cpu_count()}


def measure(options: Any) -> int:
    """The verb without a name: measure, compare, write down, show."""
    screen = Screen(options.quiet, sys.stderr if options.labbook == "-" else None)
    wishes, notes = wishes_of(options)
    plan = plan_of(wishes, options.share_prompts)
    session = Session(options, screen, plan)
    try:
        if options.baseline_run:
            session.baseline_run, bad = read_run(options.baseline_run)
            _tell_bad(bad, screen)
        with session.interrupt as interrupt:
            interrupt.measuring = False
            _open_journals(session)
            _meet_servers(session, notes)
            _warm_up(session, 1)
            _append(session, session.evidence, run_records(session.run_alone(), options.no_texts))
            _tell_plan(session)
            interrupt.measuring = True
            for block in plan.blocks:
                if not interrupt.requested:
                    _measure_block(session, block)
            if not interrupt.requested:
                _ask_ties(session)
            return _conclude(session)
    finally:
        session.client.close()
        if session.notebook is not None:
            session.notebook.close()
        if session.evidence is not None:
            session.evidence.close(unless_empty=True)   # nothing was measured: no file to trip over later


def _read_runs_aloud(path: str, screen: Screen) -> List[Run]:
    runs, bad = read_runs(path)
    _tell_bad(bad, screen)
    return runs


def _tell_bad(bad: Sequence[BadLine], screen: Screen) -> None:
    for line in bad[:20]:
        screen.say(f"skipped: {line}")
    if len(bad) > 20:
        screen.say(f"skipped: {len(bad) - 20} more lines of {bad[0].path}")


def _open_journals(session: Session) -> None:
    """Notebook and run file are opened before anything is measured: what cannot be kept is not worth measuring."""
    options = session.options
    session.notebook = StreamJournal(sys.stdout) if options.labbook == "-" else Journal(options.labbook)
    if options.labbook == "-" and not options.run_file:
        return
    while session.evidence is None:
        journal = Journal(options.run_file or run_file_path(options.labbook, options.label, session.started_at))
        if journal.is_new or options.run_file:
            session.evidence = journal
        else:
            journal.close()     # another process took the name in the same moment


def run_file_path(labbook: str, label: str, started_at: str) -> str:
    """Where the evidence of a run goes: <notebook stem>.runs/<UTC>-<label>.jsonl, a name that is not taken."""
    stem = os.path.splitext(labbook)[0] + ".runs"
    name = f"{started_at.replace(':', '').replace('-', '')}-{re.sub(r'[^A-Za-z0-9._-]+', '-', label)[:80] or 'run'}"
    path, number_ = os.path.join(stem, name + ".jsonl"), 2
    while os.path.exists(path):
        path, number_ = os.path.join(stem, f"{name}-{number_}.jsonl"), number_ + 1
    return path


def _meet_servers(session: Session, notes: Sequence[Remark]) -> None:
    """Identify every server, look them over, rehearse; all remarks are said before the first timed request."""
    options, screen = session.options, session.screen
    remarks: List[Remark] = list(notes) + list(session.plan.remarks)
    for target in targets_of(options):
        arm, found = identify(session.client, target, os.environ.get(options.api_key_env), options, screen.say)
        session.arms.append(arm)
        remarks += found
    remarks += examine(_arms_in_order(session), session.plan.levels, _longest(session.plan), options.max_tokens, os.environ)
    if options.repeats > 1 and not options.share_prompts:
        remarks.append(Remark(f"Every prompt is asked {options.repeats} times: drafters and caches that remember answers gain by it.",
                              "use --repeats 1 and more prompts to measure those"))
    if options.warmup:
        session.arms, session.asking, replies, found = rehearse(session.client, session.arms, session.asking, screen.say, options.ready_timeout)
        remarks += found
        if any(prompt.tools for prompt in session.plan.prompts):
            remarks += rehearse_tools(session.client, session.arms, session.asking)
        for arm, reply in zip(session.arms, replies):
            _remember_speed(session, arm, reply)
    _tell(screen, remarks)
    session.remarks = [remark for remark in remarks if remark.remedy or remark.grave]
    if session.baseline_run is not None:
        _refuse_unlike(session.baseline_run, replace(session.run_alone(), path="this run"))


def _arms_in_order(session: Session) -> List[Arm]:
    return sorted(session.arms, key=lambda arm: arm.server.label != BASELINE)


def _longest(plan: Plan) -> int:
    return max(len(json.dumps([list(prompt.messages), prompt.tools], ensure_ascii=False)) for prompt in plan.prompts)


def _tell(screen: Screen, remarks: Iterable[Remark]) -> None:
    for remark in remarks:
        screen.say(f"{'warning' if remark.grave else 'note'}: {remark.sentence}" + (f"  Try: {remark.remedy}." if remark.remedy else ""))


def targets_of(options: Any) -> List[Target]:
    """The servers that the command line names, the baseline first, each with its own label."""
    targets = []
    if options.baseline_url:
        targets.append(Target(BASELINE, options.baseline_url, options.baseline_metrics_url, options.baseline_body))
    given = [_named(text) for text in options.speculative_url]
    metrics = dict(_named(text) for text in options.speculative_metrics_url)
    bodies = dict(options.speculative_body)
    taken = {BASELINE}
    for name, url in given:
        label, number_ = name or "speculative", 2
        while label in taken:
            label, number_ = f"{name or 'speculative'}-{number_}", number_ + 1
        taken.add(label)
        targets.append(Target(label, url, metrics.get(name) or metrics.get(""), bodies.get(name) or bodies.get("") or {}))
    if not targets:
        raise MeasureError("No server is named.", "give --baseline-url http://127.0.0.1:8080/v1, or try the verb demo")
    return targets


_NAMED = re.compile(r"([A-Za-z0-9][A-Za-z0-9_.+-]*)=(.*)", re.DOTALL)


def _named(text: str) -> Tuple[str, str]:
    match = _NAMED.fullmatch(text.strip())
    return (match.group(1), match.group(2)) if match else ("", text)


def _warm_up(session: Session, level: int) -> None:
    """Untimed requests outside every workload, as many at once as the level: what a first request pays is nobody's speed."""
    options = session.options
    count = max(options.warmup - 1, 0) if level == 1 else max(options.warmup, level)
    if not options.warmup:
        return
    for arm in session.arms:
        prompts = [warm_up_prompt(number_) for number_ in range(1, count + 1)]
        asking = replace(session.asking, max_tokens=min(options.max_tokens, 32))
        jobs = [_job(arm, prompt, 0, asking, f"warm-up-{level}") for prompt in prompts]
        for reply in play(session.client, Lane(arm, jobs), level, session.interrupt, lambda lane, exchange: None).replies:
            _remember_speed(session, arm, reply)
    session.arms = [speculation_after_a_task(session.client, arm) for arm in session.arms]


def _remember_speed(session: Session, arm: Arm, reply: Reply) -> None:
    if reply.ok and reply.tpot_s is not None:
        session.warm_speeds[arm.server.label] = (reply.ttft_s or 0.0, reply.tpot_s)


def _job(arm: Arm, prompt: Prompt, repeat: int, asking: Asking, salt: str) -> Job:
    body = request_body(arm.server, prompt, asking, arm.own_body, f"{salt}-{prompt.id}-{repeat}")
    return Job(prompt, repeat, request_bytes(arm.origin, arm.chat_path, body))


def _tell_plan(session: Session) -> None:
    """What will be sent and about how long it takes, from the warm-up's speed, before the first timed request."""
    plan, options, arms = session.plan, session.options, session.arms
    requests = sum(len(block.prompts) for block in plan.blocks) * options.repeats * len(arms)
    words = f"{requests} requests to {len(arms)} server{'s' * (len(arms) != 1)}, at most {options.max_tokens} tokens each"
    about_s = _about_seconds(session)
    if about_s is not None:
        words += f", at most about {_clock_words(about_s)}"
        if about_s > 600:
            words += "; shorter with --limit N (prompts a workload), fewer levels in --concurrency or a lower --max-tokens"
    session.screen.say(words)
    session.total = requests


def _about_seconds(session: Session) -> Optional[float]:
    """Upper guess of the timed passes' length: every answer as long as allowed, at the speed of one untimed request."""
    seconds = 0.0
    for arm in session.arms:
        speed = session.warm_speeds.get(arm.server.label)
        if speed is None:
            return None
        ttft_s, tpot_s = speed
        for block in session.plan.blocks:
            rounds = math.ceil(len(block.prompts) * session.options.repeats / block.concurrency)
            seconds += rounds * (ttft_s + session.options.max_tokens * tpot_s)
    return seconds


def _measure_block(session: Session, block: Block) -> None:
    """All servers' passes over one block, the floor where it is wanted, and everything written down as it ends."""
    if block.concurrency > 1:
        _warm_up(session, block.concurrency)
    done = _passes_of_block(session, block)
    for one in done:
        _keep_pass(session, one)
    if _floor_wanted(session, done) and not session.interrupt.requested:
        for level in sorted({block.concurrency, max(session.plan.levels)}):
            _measure_floor(session, block, level)


def _passes_of_block(session: Session, block: Block) -> List[Pass]:
    """One pass a server: prompt by prompt in turn at concurrency 1, whole passes in turn above; in batches for --precision."""
    arms = session.arms
    facts = {"workload": block.workload, "concurrency": block.concurrency, "started_at": now_utc()}
    in_turn = block.concurrency == 1 and (len(arms) == 1 or session.options.order == "alternate" and not _share_a_door(arms))
    before = {arm.server.label: scrape(session.client, arm.metrics_doors) for arm in arms}
    played: Dict[str, List[Played]] = {arm.server.label: [] for arm in arms}
    passes: List[Pass] = []
    for number_, prompts in enumerate(_batches(session, block)):
        lanes = [_lane(session, arm, prompts, block.workload, f"{block.workload}-{block.concurrency}") for arm in arms]
        if in_turn:
            for lane, one in zip(lanes, _play_lanes_in_turn(session, lanes, block)):
                played[lane.arm.server.label].append(one)
        else:
            for lane in _order(session, lanes, number_):
                if _share_a_door(arms):
                    before[lane.arm.server.label] = scrape(session.client, lane.arm.metrics_doors)
                played[lane.arm.server.label].append(_play_lane(session, lane, block))
                if _share_a_door(arms):
                    passes.append(_whole_pass(session, lane, played, before, facts))
        if session.interrupt.requested or _precise(session, played, block):
            break
    _tell_precision(session, played, block)
    if passes:
        return sorted(passes, key=lambda one: [arm.server.label for arm in arms].index(one.server))
    return [_whole_pass(session, lane, played, before, facts) for lane in lanes]


def _share_a_door(arms: Sequence[Arm]) -> bool:
    doors = [door for arm in arms for door in (set(arm.metrics_doors) | {(arm.origin, arm.chat_path)})]
    return len(doors) != len(set(doors))


def _batches(session: Session, block: Block) -> List[Tuple[Prompt, ...]]:
    """The block's prompts in one piece, or in small ones where measuring may stop early (--precision)."""
    if session.options.precision is None or _share_a_door(session.arms) or len(session.arms) < 2:
        return [block.prompts]
    size = max(6, 2 * block.concurrency)
    return [block.prompts[start:start + size] for start in range(0, len(block.prompts), size)]


def _lane(session: Session, arm: Arm, prompts: Sequence[Prompt], workload: str, salt: str) -> Lane:
    return Lane(arm, [_job(arm, prompt, repeat, session.asking, salt) for repeat in range(session.options.repeats) for prompt in prompts])


def _order(session: Session, lanes: Sequence[Lane], number_: int) -> Sequence[Lane]:
    """Whole passes in turn: A B, then B A, ... unless the order is to stay."""
    flip = session.options.order == "alternate" and (len(session.passes) // max(len(lanes), 1) + number_) % 2 == 1
    return list(reversed(lanes)) if flip else list(lanes)


def _play_lane(session: Session, lane: Lane, block: Block) -> Played:
    if session.interrupt.requested:
        return Played((), 0.0, None, None, False)
    played = play(session.client, lane, block.concurrency, session.interrupt, _noticer(session, block))
    for reply in played.replies:
        _keep_reply(session, lane.arm.server.label, block, "timed", reply)
    return played


def _play_lanes_in_turn(session: Session, lanes: Sequence[Lane], block: Block) -> List[Played]:
    def keep(lane: Lane, reply: Reply) -> None:
        _keep_reply(session, lane.arm.server.label, block, "timed", reply)

    return play_in_turn(session.client, lanes, session.interrupt, _noticer(session, block), keep)


def _noticer(session: Session, block: Block) -> Any:
    """What moves the progress bar: one request has ended."""
    def notice(lane: Lane, exchange: Exchange) -> None:
        session.sent += 1
        if session.screen.bar_is_due(session.client.clock()):
            elapsed_s = session.client.clock() - session.sending_since_s
            left_s = elapsed_s / session.sent * max(session.total - session.sent, 0)
            session.screen.bar(session.sent, session.total, f"{block.workload} at {block.concurrency}, {lane.arm.server.label}", left_s)

    if not session.sent:
        session.sending_since_s = session.client.clock()
    return notice


def _whole_pass(session: Session, lane: Lane, played: Mapping[str, Sequence[Played]], before: Mapping[str, MetricsPage],
                facts: Mapping[str, Any]) -> Pass:
    label = lane.arm.server.label
    parts = played[label]
    kept = [part.load_kept for part in parts if part.load_kept is not None]
    hiccups = [part.hiccup_p99_s for part in parts if part.hiccup_p99_s is not None]
    whole = Played(tuple(reply for part in parts for reply in part.replies), sum(part.wall_s for part in parts),
                   max(hiccups) if hiccups else None, min(kept) if kept else None, any(part.decoded_early for part in parts))
    return pass_of(session.client, lane, whole, {**facts, "interrupted": session.interrupt.requested}, before[label])


def _ratios_so_far(played: Mapping[str, Sequence[Played]]) -> List[Optional[Ratio]]:
    first, *others = ([reply for part in parts for reply in part.replies if reply.ok] for parts in played.values())
    return [decode_ratio(first, other) for other in others]


def _precise(session: Session, played: Mapping[str, Sequence[Played]], block: Block) -> bool:
    """Whether every configuration's interval is as narrow as --precision asks."""
    wanted = session.options.precision
    ratios = [] if wanted is None else _ratios_so_far(played)
    return bool(ratios) and all(precise_enough(ratio, wanted) for ratio in ratios)


def _tell_precision(session: Session, played: Mapping[str, Sequence[Played]], block: Block) -> None:
    """Why measuring for --precision ended: narrow enough, or no prompts left."""
    if session.options.precision is None or session.interrupt.requested or len(played) < 2:
        return
    asked = len({reply.prompt_id for parts in played.values() for part in parts for reply in part.replies})
    where = f"precision, {block.workload} at {block.concurrency}: {asked} of {len(block.prompts)} prompts asked"
    widths = [half_width(ratio) for ratio in _ratios_so_far(played)]
    told = max((width for width in widths if width is not None), default=None)
    shown_width = "no interval yet" if told is None else f"the widest interval is +-{told:.1%} of its ratio"
    end = "narrow enough" if _precise(session, played, block) else "no prompts are left"
    session.screen.say(f"{where}; {shown_width}: {end}")


def _floor_wanted(session: Session, done: Sequence[Pass]) -> bool:
    """Whether the baseline answers its slice again: always, never, or where a configuration differs from it."""
    mode = session.options.noise_floor
    base = next((one for one in done if one.server == BASELINE), None)
    if base is None or mode == "never":
        return False
    if mode == "always":
        return True
    return any(differ(one, other) is not None for rest in done if rest is not base
               for one, other in reply_pairs(base, rest) if incomparable(one, other) is None)


def reply_pairs(one: Pass, other: Pass) -> List[Tuple[Reply, Reply]]:
    """The two passes' replies to the same prompt and repeat, in the first one's order."""
    by_place = {(reply.prompt_id, reply.repeat): reply for reply in other.replies}
    return [(reply, by_place[place]) for reply in one.replies for place in [(reply.prompt_id, reply.repeat)] if place in by_place]


def _measure_floor(session: Session, block: Block, level: int) -> None:
    """The baseline against itself: the same prompts again, at the level itself or at the highest one."""
    arm = next(arm for arm in session.arms if arm.server.label == BASELINE)
    if level > block.concurrency:
        _warm_up(session, level)
    lane = _lane(session, arm, block.prompts, block.workload, f"floor-{block.workload}-{block.concurrency}-{level}")
    before = scrape(session.client, arm.metrics_doors)
    facts = {"workload": block.workload, "concurrency": level, "started_at": now_utc(), "purpose": "floor", "of_level": block.concurrency}
    session.total += len(lane.jobs)
    played = play(session.client, lane, level, session.interrupt, _noticer(session, block))
    for reply in played.replies:
        _keep_reply(session, BASELINE, block._replace(concurrency=level), "floor", reply, block.concurrency)
    _keep_pass(session, pass_of(session.client, lane, played, {**facts, "interrupted": session.interrupt.requested}, before))


def _keep_reply(session: Session, label: str, block: Block, purpose: str, reply: Reply, of_level: Optional[int] = None) -> None:
    """A reply into the run file, the moment it is understood."""
    kept = without_texts(reply) if session.options.no_texts else reply
    _append(session, session.evidence, [reply_record(label, block.workload, block.concurrency, purpose, kept, of_level)], durable=False)


def _keep_pass(session: Session, one: Pass) -> None:
    """A pass into run file, notebook and onto the screen, the moment it ends."""
    if not one.replies:
        return
    session.passes.append(one)
    session.failed = session.failed or any(not reply.ok for reply in one.replies)
    _append(session, session.evidence, pass_records(one))
    record = endpoint_record(session.run_alone(), one)
    record["caveats"] += [as_json(caveat) for caveat in session.caveats_about(one.workload, one.server)]
    _append(session, session.notebook, [record])
    session.screen.clear_bar()
    session.screen.show(endpoint_block(record, session.screen.width()) + [""])


def _append(session: Session, journal: Any, records: Iterable[Mapping[str, Any]], durable: bool = True) -> None:
    """Write records down; if that fails in the middle of a run it is said, and measuring goes on: the screen still shows it."""
    if journal is None:
        return
    try:
        journal.append(records, durable)
    except MeasureError as error:
        if not session.failed_writes:
            session.screen.say(f"error: {error.sentence}  Try: {error.hint}.")
        session.failed_writes = session.failed = True


# ----------------------------------------------------------------------------------------------------------------------
# Near ties and the ruler: asked after the timed passes


MAX_FORKS_ASKED = 20        # a configuration; more would tell no more
MIN_PROMPTS_RULED = 6
PLACES_CONTINUED = 8        # a prompt, so that six make a ruler
TOP_LOGPROBS = 20           # the most that every engine gives


def _ask_ties(session: Session) -> None:
    """Logprobs at every fork, and rounding on this pair, untimed; where the engine gives none, that is said."""
    mode = session.options.ties
    base = next((arm for arm in session.arms if arm.server.label == BASELINE), None)
    others = [arm for arm in session.arms if arm.server.label != BASELINE]
    if base is None or not others or mode == "never" or session.options.no_texts and mode == "auto":
        return
    run = session.run()
    told: Dict[str, Entries] = {}       # the baseline's logprobs by prompt: asked once for all configurations
    for arm in others:
        forks = _forks(run, arm.server.label)
        if forks or mode == "always":
            session.screen.say(f"asking about {len(forks)} fork{'s' * (len(forks) != 1)} of {arm.server.label}, untimed")
            if not _ask_about(session, base, arm, forks, told):
                return


def _forks(run: Run, label: str) -> List[Fork]:
    """A configuration's forks over all its cells, no more than are worth asking about."""
    timed = {(one.server, one.workload, one.concurrency): one for one in run.passes if one.purpose == "timed"}
    forks: List[Fork] = []
    for (server, workload, concurrency), other in timed.items():
        base = timed.get((BASELINE, workload, concurrency))
        if server == label and base is not None:
            forks += forks_of(base, other, agree(base, other), MAX_FORKS_ASKED)
    return forks


def _ask_about(session: Session, base: Arm, arm: Arm, forks: Sequence[Fork], told: Dict[str, Entries]) -> bool:
    """The margin of each fork from the baseline, and the ruler of the pair from the answers of both to the same prompts.

    Whether to go on with the next server. What was learned before Ctrl-C is kept.
    """
    changes: List[float] = []
    placeholders = False
    for prompt in _with_progress(session, _prompts_to_ask(session, forks), arm.server.label):
        mine = told.get(prompt.id) or _logprobs(session, base, prompt)
        if session.interrupt.requested:
            break
        if mine is None:
            session.screen.say(f"note: {base.server.label} gives no logprobs: near ties cannot be told, the noise floor alone decides.")
            session.remarks.append(Remark("The baseline gives no logprobs: near ties cannot be told.", "The noise floor alone decides."))
            return False
        told[prompt.id] = mine
        _keep_margins(session, [fork for fork in forks if fork.prompt_id == prompt.id], mine)
        theirs = _logprobs(session, arm, prompt) or ()
        placeholders = placeholders or made_up(theirs)
        changes += _continued_changes(session, arm, prompt, mine) if made_up(theirs) else logprob_changes(mine, theirs)
    ruler = ruler_of(changes)
    if placeholders and not usable_ruler(ruler):
        session.remarks.append(Remark(f"{arm.server.label} makes logprobs up for tokens that it drafted: rounding on this pair was measured at few places or none.",
                                      "The margins alone tell near ties; hold them against 0.25 nats.", about=arm.server.label))
    if ruler is not None:
        session.rulers[arm.server.label] = ruler
        _append(session, session.evidence, [{"record": "ruler", "server": arm.server.label, **as_json(ruler)}])
    return not session.interrupt.requested


def _prompts_to_ask(session: Session, forks: Sequence[Fork]) -> List[Prompt]:
    """The prompts that forked, and as many others as a ruler needs."""
    ids = list(dict.fromkeys(fork.prompt_id for fork in forks))
    ids += [prompt.id for prompt in session.plan.prompts if prompt.id not in ids and not prompt.tools][:max(0, MIN_PROMPTS_RULED - len(ids))]
    return [session.prompt(identity) for identity in ids]


def _with_progress(session: Session, prompts: Sequence[Prompt], label: str) -> Iterator[Prompt]:
    """The prompts one by one, with a bar that says how long the rest will take, until Ctrl-C."""
    began_s = session.client.clock()
    for asked, prompt in enumerate(prompts):
        if session.interrupt.requested:
            return
        if asked and session.screen.bar_is_due(session.client.clock()):
            left_s = (session.client.clock() - began_s) / asked * (len(prompts) - asked)
            session.screen.bar(asked, len(prompts), f"forks of {label}", left_s)
        yield prompt


def _continued_changes(session: Session, arm: Arm, prompt: Prompt, mine: Entries) -> List[float]:
    """Rounding where a server makes the logprobs of drafted tokens up (llama.cpp): it is given the baseline's answer up to a
    place and asked for one token more, whose logprob is real, and which it computed from many tokens at once, not one by one.
    From its cache it would take them as it computed them before: nothing is taken from there (cache_prompt stays off)."""
    changes: List[float] = []
    can_begin = arm.server.engine == "llama.cpp" and not prompt.tools      # a call of a tool is no text to go on with
    for place, before in places_to_continue(mine, PLACES_CONTINUED) if can_begin else ():
        if session.interrupt.requested:
            break
        begun = replace(prompt, messages=(*prompt.messages, {"role": "assistant", "content": before}), max_tokens=1)
        changes += logprob_changes(mine[place:place + 1], _logprobs(session, arm, begun) or ())
    return changes


def _keep_margins(session: Session, forks: Sequence[Fork], told: Entries) -> None:
    for fork in forks:
        margin = margin_from_logprobs(told, fork.prefix, fork.other_text)
        if margin is not None:
            session.margins[fork.key] = margin
            place = dict(zip(("server", "workload", "concurrency", "prompt_id", "repeat"), fork.key))
            _append(session, session.evidence, [{"record": "margin", **place, "margin_nats": margin}], durable=False)


def _logprobs(session: Session, arm: Arm, prompt: Prompt) -> Optional[List[Mapping[str, Any]]]:
    """The logprobs of a prompt's answer, token by token, as OpenAI's chat API gives them; None where there are none."""
    asking = replace(session.asking, stream=False, extra_body={**session.asking.extra_body, "logprobs": True, "top_logprobs": TOP_LOGPROBS})
    body = request_body(arm.server, prompt, asking, arm.own_body, f"ties-{prompt.id}")
    for unneeded in ("return_tokens", "verbose", "return_meta_info"):
        body.pop(unneeded, None)
    value = json_of(read_response(session.client.ask(arm.origin, request_bytes(arm.origin, arm.chat_path, body))))
    entries = _dict(_first_choice(value).get("logprobs")).get("content")
    return [entry for entry in entries if isinstance(entry, dict)] if isinstance(entries, list) and entries else None


# ----------------------------------------------------------------------------------------------------------------------
# The end of a measurement


def _conclude(session: Session) -> int:
    """Comparisons into the notebook and onto the screen; the exit code."""
    session.screen.clear_bar()
    run = session.run()
    records = [comparison_record(run, cell, session.caveats_about(cell.workload, cell.baseline_label, cell.speculative_label))
               for cell in compare_run(run)]
    records = [without_words(record) for record in records] if session.options.no_texts else records
    _append(session, session.notebook, records)
    show_comparisons(session.screen, records)
    if len(records) > 1:
        _show_tables(session, records)
    if session.evidence is not None:
        session.screen.say(f"notebook: {session.notebook.path}")
        session.screen.say(f"evidence: {session.evidence.path}")
    if session.options.export_json:
        write_text(session.options.export_json, json.dumps(export_json(_notebook_records(session, records)), indent=2) + "\n", session.screen)
    if session.interrupt.requested:
        return EXIT_INTERRUPTED
    return EXIT_FAILED if session.failed or _fails_on(session.options.fail_on, records) else EXIT_OK


def _show_tables(session: Session, records: Sequence[Mapping[str, Any]]) -> None:
    """The cells of a large run side by side: the lesson's table for its suite, else the tutorial's."""
    whole = _notebook_records(session, records)
    for made in [lesson_table(whole)] if session.options.suite == "lesson" else tutorial_tables(whole):
        session.screen.show(table_text(made, session.screen.width(), _encoding(session.screen)) + "\n")


def _notebook_records(session: Session, comparisons: Sequence[Mapping[str, Any]]) -> List[Mapping[str, Any]]:
    run = session.run()
    return [endpoint_record(run, one) for one in run.passes] + list(comparisons)


def _fails_on(words: Sequence[str], records: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a verdict is one that the user set as a limit (--fail-on)."""
    return any(word in (record["verdict"]["speed"], record["verdict"]["answers"]) for record in records for word in words)


def show_comparisons(screen: Screen, records: Sequence[Mapping[str, Any]]) -> None:
    """The comparisons' blocks on the result stream, and the divergences on stderr, as the lesson's script says them."""
    for record in records:
        screen.show(comparison_block(record, screen.width()) + [""])
        divergent = record["text_comparison"]["divergent"]
        if divergent:
            screen.say(f"{record['speculative_label']}: {divergent} of {record['text_comparison']['compared']} completions differ from the "
                       f"baseline's ({record['workload']} at {record['concurrency']}): {record['verdict']['answers']}")


def write_text(path: str, text: str, screen: Screen) -> None:
    """A whole file, or stdout for "-"; MeasureError where it cannot be written."""
    if path == "-":
        screen.show(text.rstrip("\n"))
        return
    try:
        with open(path, "w", encoding="utf-8", newline="") as file:
            file.write(text)
    except OSError as error:
        raise MeasureError(f"{path} cannot be written: {error.strerror or error}.", "name another file") from None
    screen.say(f"written: {path}")


# ----------------------------------------------------------------------------------------------------------------------
# The other verbs


def check(options: Any) -> int:
    """The verb check: who the servers are, and everything that would spoil a run. Nothing is measured."""
    screen = Screen(False)
    wishes, notes = wishes_of(options)
    plan = plan_of(wishes, options.share_prompts)
    client = Client(options.timeout, options.cafile)
    try:
        found = [identify(client, target, os.environ.get(options.api_key_env), options, screen.say) for target in targets_of(options)]
    finally:
        client.close()
    arms = sorted((arm for arm, _ in found), key=lambda arm: arm.server.label != BASELINE)
    remarks = [remark for _, told in found for remark in told] + list(notes) + list(plan.remarks)
    remarks += examine(arms, plan.levels, _longest(plan), options.max_tokens, os.environ)
    for arm in arms:
        screen.show(server_lines(arm))
    for remark in remarks:
        mark = "PROBLEM" if remark.grave else "note"
        screen.show(wrapped(terminal_text(f"{mark}: {remark.sentence}"), screen.width()))
        if remark.remedy:
            screen.show(wrapped(terminal_text(f"  try: {remark.remedy}"), screen.width()))
    grave = any(remark.grave for remark in remarks)
    screen.show("not ready: see the problems above" if grave else "ready to measure")
    return EXIT_FAILED if grave else EXIT_OK


def server_lines(arm: Arm) -> List[str]:
    """What is known of a server, a fact a line; what it does not tell is said to be untold."""
    server, speculation = arm.server, arm.server.speculation
    told = "off" if server.speculating is False else "not told" if server.speculating is None else "on"
    if speculation:
        details = [speculation.method, speculation.draft_tokens and f"draft length {speculation.draft_tokens}", speculation.drafter]
        told = ", ".join(["on", *(str(detail) for detail in details if detail)])
    facts = [("engine", f"{server.engine} {server.version or ''}".strip()), ("model", server.model),
             ("context of a request", _tokens(server.context_tokens)), ("slots", str(server.slots or "not told")),
             ("KV cache", _tokens(server.kv_cache_tokens)), ("speculation", told), ("acceptance from", acceptance_sources(arm))]
    return [terminal_text(f"{server.label}  {server.base_url}")] + [terminal_text(f"  {name:<21} {value}") for name, value in facts] + [""]


def _tokens(count: Optional[int]) -> str:
    return "not told" if count is None else f"{count:,} tokens"


def acceptance_sources(arm: Arm) -> str:
    """Where acceptance will come from, in order of trust."""
    told = {"llama.cpp": "the timings of each response", "vllm": "the metrics of each response, if --per-request-spec-decode-metrics is on",
              "sglang": "sglext of each response (0.5.19 or newer)"}.get(arm.server.engine)
    counters = None if arm.page.problem else "counters of the metrics page"
    return ", then ".join(source for source in (told, counters) if source) or "nowhere: this server tells nothing"


def compare(options: Any) -> int:
    """The verb compare: saved runs, as if they had been measured together."""
    screen = Screen(False)
    runs = [run for path in options.files for run in _read_runs_aloud(path, screen)]
    run = joined(runs[0], runs[1:])
    records = [comparison_record(run, cell) for cell in compare_run(run)]
    if not records:
        raise MeasureError("There is nothing to compare: only one server's answers are there.", "name a second run file")
    endpoints = [endpoint_record(run, one) for one in run.passes]
    for record in endpoints if options.verbose else ():
        screen.show(endpoint_block(record, screen.width()) + [""])
    show_comparisons(screen, records)
    for table in tutorial_tables(endpoints + records):
        screen.show(table_text(table, screen.width(), _encoding(screen)) + "\n")
    if options.labbook:
        journal = Journal(options.labbook)
        journal.append(records)
        journal.close()
    if options.export_json:
        write_text(options.export_json, json.dumps(export_json(endpoints + records), indent=2) + "\n", screen)
    return EXIT_FAILED if _fails_on(options.fail_on, records) else EXIT_OK


def _encoding(screen: Screen) -> str:
    return getattr(screen.result, "encoding", None) or "utf-8"


def records_of_files(paths: Sequence[str], screen: Screen) -> Tuple[List[Dict[str, Any]], List[Run]]:
    """The notebook records of notebooks and run files alike, and the runs that hold their evidence, where they are there."""
    records: List[Dict[str, Any]] = []
    runs: Dict[str, List[Run]] = {}
    for path in paths:
        if _is_run_file(path):
            runs[path] = _read_runs_aloud(path, screen)
            for run in runs[path]:
                records += [endpoint_record(run, one) for one in run.passes]
                records += [comparison_record(run, cell) for cell in (compare_run(run) if BASELINE in run.servers else ())]
            continue
        found, bad = read_notebook(path)
        _tell_bad(bad, screen)
        records += found
        for name in dict.fromkeys(record.get("run_file") for record in found):
            place = _evidence_of(name, path)
            if place and place not in runs:
                runs[place] = _read_runs_aloud(place, screen)
    return records, [run for found in runs.values() for run in found]


def _is_run_file(path: str) -> bool:
    return path != "-" and any(isinstance(record, dict) and "record" in record for _, record in itertools.islice(read_lines(path), 20))


def _evidence_of(name: Any, notebook: str) -> Optional[str]:
    """Where a record's run file is: as written, or beside the notebook; None where it is gone."""
    if not isinstance(name, str) or not name:
        return None
    beside = os.path.join(os.path.dirname(notebook), *re.split(r"[\\/]", name)[-2:])      # as any system writes a path
    return next((place for place in (name, beside) if os.path.isfile(place)), None)


def table(options: Any) -> int:
    """The verb table: the lesson's table or the tutorial's tables, in Markdown; or a Markdown file's pending cells filled in."""
    screen = Screen(False)
    records, _ = records_of_files(options.files, screen)
    if options.into:
        text = read_text(options.into)
        filled = fill_pending(text, records, options.configuration)
        if filled != text:
            write_text(options.into, filled, screen)
        else:
            screen.say(f"{options.into}: no pending cell that a measurement could fill")
        return EXIT_OK
    made = tutorial_tables(records) if options.tutorial else [lesson_table(records, options.configuration)]
    screen.show("\n".join(table_markdown(one) for one in made).rstrip("\n"))
    return EXIT_OK


def read_text(path: str) -> str:
    """A text file as it is, line ends included; MeasureError where it cannot be read."""
    try:
        with open(path, encoding="utf-8", newline="") as file:
            return file.read()
    except (OSError, UnicodeDecodeError) as error:
        raise MeasureError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}.", "check the path; it is to be UTF-8") from None


def csv_verb(options: Any) -> int:
    """The verb csv: one row a result cell, or one a request."""
    screen = Screen(False)
    records, runs = records_of_files(options.files, screen)
    text = requests_csv(runs, options.decimal_comma, options.bom) if options.requests else csv_text(records, options.decimal_comma, options.bom)
    if options.output == "-":
        sys.stdout.flush()
        sys.stdout.buffer.write(text.encode("utf-8"))
        sys.stdout.buffer.flush()
    else:
        write_text(options.output, text, screen)
    return EXIT_OK


def report(options: Any) -> int:
    """The verb report: one self-contained page."""
    screen = Screen(False)
    records, runs = records_of_files(options.files, screen)
    if not records:
        raise MeasureError("There is no record in " + ", ".join(options.files) + ".", "measure first, or name another notebook")
    write_text(options.output, report_page(records, runs), screen)
    return EXIT_OK


def notebook(options: Any) -> int:
    """The verb notebook: what is in it, and which lines are damaged."""
    screen = Screen(False)
    problems = 0
    for path in options.files:
        records, bad = read_notebook(path)
        wrong = [BadLine(path, 0, problem) for record in records for problem in schema_problems(record)] if options.check else []
        for line in bad + wrong:
            screen.show(terminal_text(str(line)))
        problems += len(bad) + len(wrong)
        screen.show(table_text(notebook_listing(records), screen.width(), _encoding(screen)))
    return EXIT_FAILED if options.check and problems else EXIT_OK


def breakeven(options: Any) -> int:
    """The verb breakeven: the arithmetic of when drafting pays, from numbers, or from what was measured."""
    screen = Screen(False)
    if options.files:
        records, _ = records_of_files(options.files, screen)
        return _show_measured_costs(screen, [record for record in records if record_kind(record) == "comparison"])
    if options.acceptance is not None and options.draft_cost is not None:
        screen.show(breakeven_lines(options.acceptance, options.draft_cost, options.draft_length))
        return EXIT_OK
    if options.table:
        screen.show(table_text(breakeven_table(), screen.width(), _encoding(screen)))
        return EXIT_OK
    cost = 0.1 if options.draft_cost is None else options.draft_cost
    screen.show(table_text(speedup_map_table(cost), screen.width(), _encoding(screen)))
    return EXIT_OK


def breakeven_lines(alpha: float, cost: float, k: int) -> List[str]:
    """What the arithmetic says of one acceptance, draft cost and draft length, a fact a line."""
    gain, threshold = speedup(alpha, k, cost), break_even_alpha(k, cost)
    best, best_gain = best_draft_length(alpha, cost)
    return [f"acceptance {alpha:.2f}, draft cost {cost:.2f} target steps a token, draft length {k}",
            f"  tokens a target pass   E = {expected_tokens(alpha, k):.3f}",
            f"  predicted speedup      S = {gain:.3f}x: drafting {'pays' if gain > 1 else 'does not pay'}",
            f"  break-even acceptance  {'none: it never pays' if threshold is None else f'{threshold:.2f}'} at this cost and length",
            f"  best draft length      {best}" + (f", predicted {best_gain:.3f}x" if best else ": do not draft")]


def breakeven_table() -> Table:
    """The lesson's table: the acceptance from which drafting pays, by draft length and draft cost."""
    costs = (0.10, 0.20, 0.35)
    columns = (Column("k", align="right"), *(number(f"c = {cost:.2f}", decimals=2) for cost in costs))
    rows = tuple((str(k), *(_first_even(k, cost) for cost in costs)) for k in (2, 4, 8))
    return Table("Break-even acceptance", columns, rows, (
        "The smallest acceptance, in hundredths, whose speedup S reads 1.00 or more.", "Leviathan et al., arXiv 2211.17192; Chen et al., arXiv 2302.01318"))


def _first_even(k: int, cost: float) -> Optional[float]:
    """As the lesson's table counts: acceptances in hundredths, speedups with two decimals."""
    return next((step / 100 for step in range(1, 100) if round(speedup(step / 100, k, cost), 2) >= 1), None)


def speedup_map_table(cost: float) -> Table:
    """The map S(a, k) at one draft cost; the best length of each row is marked."""
    lengths = (1, 2, 3, 4, 6, 8, 12, 16)
    columns = (number("acceptance", decimals=2), *(Column(f"k = {k}", align="right") for k in lengths))
    rows: List[Tuple[Cell, ...]] = []
    for alpha, gains in speedup_rows(cost, [step / 10 for step in range(1, 10)] + [0.95], lengths):
        best = max(gains)
        rows.append((alpha, *(f"{gain:.2f}{'*' if gain == best and gain > 1 else ' '}" for gain in gains)))
    return Table(f"Predicted speedup at draft cost {cost:g} target steps a token", columns, tuple(rows),
                 ("* the best length of the row, where any pays; below 1.00 drafting costs time",))


def _show_measured_costs(screen: Screen, records: Sequence[Mapping[str, Any]]) -> int:
    """What was measured, cell by cell: acceptance, cost of a draft, break-even, best length; predictions are called so."""
    columns = (Column("workload"), Column("configuration"), number("level"), number("acceptance", decimals=2), number("draft cost", "target steps", 3),
               number("break-even", "acceptance", 2), number("k"), number("decode ratio", "x", 2), number("best k (predicted)"),
               number("at best k (predicted)", "x", 2))
    rows = []
    for record in records:
        told = _dict(record.get("break_even"))
        rows.append((text_at(record, "workload"), text_at(record, "speculative_label"), number_at(record, "concurrency"), told.get("acceptance_rate"),
                     _dict(told.get("draft_cost")).get("value"), told.get("break_even_acceptance"), told.get("draft_length"),
                     number_at(record, "decode_ratio", "value"), told.get("best_draft_length"), told.get("best_speedup")))
    if not rows:
        raise MeasureError("There is no comparison in these files.", "measure a baseline and a server with speculation first")
    screen.show(table_text(Table("Break-even, from what was measured", columns, tuple(rows)), screen.width(), _encoding(screen)))
    advised = [f"{text_at(record, 'workload')}, {text_at(record, 'speculative_label')}: {line}" for record in records for line in list_at(record, "advice")]
    screen.show([""] + [terminal_text(line) for line in advised] if advised else [])
    return EXIT_OK


# ----------------------------------------------------------------------------------------------------------------------
# The demo


def demo(options: Any) -> int:
    """The verb demo: two or more small servers of our own, measured through the normal path."""
    screen = Screen(options.quiet, sys.stderr if options.labbook == "-" else None)
    screen.say("demo: a simulation. The servers are toys on this machine's loopback; what is real is how they are measured.")
    with contextlib.ExitStack() as stack:
        if options.labbook is None:
            options.labbook = os.path.join(tempfile.mkdtemp(prefix="measure_speculative-"), "labbook.md")
        servers = [stack.enter_context(start_demo_server(options.dialect, drafter)) for drafter in ("none", *options.drafter)]
        options.baseline_url = servers[0].url
        options.speculative_url = [f"{drafter}={server.url}" for drafter, server in zip(options.drafter, servers[1:])]
        return measure(options)


# ----------------------------------------------------------------------------------------------------------------------
# Options


def _argument(kind: str, accepted: str) -> Any:
    """A decorator: the function reads an option's text, and argparse's complaint tells the accepted form."""
    def wrap(read: Any) -> Any:
        def checked(text: str) -> Any:
            try:
                return read(text)
            except (ValueError, TypeError, RecursionError):
                raise argparse.ArgumentTypeError(f"{shorten(text, 60)!r} is no {kind}: {accepted}") from None

        checked.__name__ = kind
        return checked

    return wrap


def _inside(value: float, low: float, high: float) -> float:
    if not low <= value <= high:
        raise ValueError
    return value


@_argument("count", "a whole number from 1 on, such as 12")
def count(text: str) -> int:
    """A whole number from 1 on."""
    return int(_inside(int(text), 1, 10 ** 9))


@_argument("number", "a whole number from 0 on, such as 2")
def count_or_zero(text: str) -> int:
    """A whole number from 0 on."""
    return int(_inside(int(text), 0, 10 ** 9))


@_argument("duration", "seconds, such as 300 or 0.5")
def seconds(text: str) -> float:
    """Seconds, above 0."""
    return _inside(float(text), 1e-3, 1e7)


@_argument("list of levels", "concurrencies from 1 to 4096, such as 1,4,16")
def levels(text: str) -> Tuple[int, ...]:
    """Concurrency levels, each once, in the order given."""
    return tuple(dict.fromkeys(int(_inside(int(part), 1, 4096)) for part in text.split(",")))


@_argument("share", "per cent or a fraction, such as 2%% or 0.02")
def share(text: str) -> float:
    """A share above 0 and below 1, from per cent or a fraction."""
    text = text.strip()
    return _inside(float(text[:-1]) / 100 if text.endswith("%") else float(text), 1e-6, 0.999999)


@_argument("list of prompt sets", f"of {', '.join((BUILTIN, 'file') + SETS)}, such as copy,closed,open")
def prompt_sets(text: str) -> Tuple[str, ...]:
    """Names of prompt sets."""
    names = tuple(dict.fromkeys(part.strip() for part in text.split(",")))
    if not set(names) <= {BUILTIN, "file", *SETS}:
        raise ValueError
    return names


@_argument("JSON object", """such as '{"top_k": 1}'""")
def json_object(text: str) -> Dict[str, Any]:
    """A JSON object."""
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError
    return value


@_argument("JSON object", """such as '{"speculative.n_max": 0}' or NAME='{...}'""")
def named_json_object(text: str) -> Tuple[str, Dict[str, Any]]:
    """A JSON object for one server, or for all unnamed ones: (name or "", object)."""
    name, value = _named(text)
    value = json.loads(value)
    if not isinstance(value, dict):
        raise ValueError
    return name, value


@_argument("list of verdicts", "such as changed,slower")
def verdict_words(text: str) -> Tuple[str, ...]:
    """Words of verdicts that make the exit code 1."""
    words = tuple(part.strip().replace("-", " ") for part in text.split(","))
    if not set(words) <= {"changed", "cannot tell", "rounding only", "slower", "not distinguishable", "not comparable"}:
        raise ValueError
    return words


@_argument("list of drafters", f"of {', '.join(DEMO_DRAFTERS[1:])}, such as ngram,suffix")
def drafters(text: str) -> Tuple[str, ...]:
    """Names of the demo's drafters."""
    names = tuple(dict.fromkeys(part.strip() for part in text.split(",")))
    if not set(names) <= set(DEMO_DRAFTERS) - {"none"}:
        raise ValueError
    return names


class _Help(argparse.RawDescriptionHelpFormatter):
    """Examples first, options in narrow columns, as wide as the terminal."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=30, width=max(60, min(110, shutil.get_terminal_size((100, 24)).columns)))


def _parser(verb: str, description: str, examples: Sequence[str]) -> argparse.ArgumentParser:
    shown = "\n".join(f"  python3 measure_speculative.py {example}" for example in examples)
    prog = "measure_speculative.py" + (f" {verb}" if verb else "")
    parser = argparse.ArgumentParser(prog, usage=f"{prog} [options]", description=f"{description}\n\nexamples:\n{shown}",
                                     formatter_class=_Help, allow_abbrev=False)
    parser._optionals.title = "options"     # Python 3.9 calls them optional arguments
    parser.add_argument("--version", action="version", version=f"measure_speculative.py {__version__}", help="show the version and exit")
    return parser


_VERB_LINES = """other verbs (each with --help):
  demo          measure two small servers that it starts itself: a simulation to try it out
  check         ask the servers who they are and what would spoil a run; measure nothing
  compare       compare saved runs; their servers need never have been up together
  table         the lesson's table from a notebook, in Markdown; or fill one in
  csv           one row a result, for a spreadsheet
  report        one self-contained page with charts
  notebook      list a notebook, or check it
  breakeven     the arithmetic: when drafting pays, and which draft length"""


def measure_parser() -> argparse.ArgumentParser:
    """The parser of the verb without a name."""
    parser = _parser("", "Does speculative decoding pay here, and did the answers stay the same?", (
        "--baseline-url http://127.0.0.1:8080/v1 --speculative-url http://127.0.0.1:8081/v1",
        "--baseline-url http://127.0.0.1:8080/v1 --speculative-url ngram=http://127.0.0.1:8081/v1 --prompt-set copy,open --concurrency 1,4",
        "--suite lesson --baseline-url http://127.0.0.1:8080/v1 --speculative-url http://127.0.0.1:8081/v1"))
    parser.epilog = _VERB_LINES
    _add_server_options(parser)
    _add_measuring_options(parser)
    return parser


def _add_server_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("servers (they must be running)").add_argument
    add("--baseline-url", metavar="URL", help="the server without speculation; any form that ends in host, /v1 or an endpoint")
    add("--speculative-url", metavar="[NAME=]URL", action="append", default=[],
        help="a server with speculation; may be given several times (default: none, one server is measured alone)")
    add("--baseline-run", metavar="FILE", help="take the baseline from a run file instead (default: none)")
    add("--model", metavar="NAME", help="model name sent with each request (default: the first that the server lists)")
    add("--api-key-env", metavar="VAR", default="SPEC_API_KEY", help="environment variable that holds the key; it is never written (default: SPEC_API_KEY)")
    add("--engine", metavar="NAME", default="unknown", help="llama.cpp, vllm, sglang, ... (default: detected)")
    add("--engine-version", metavar="TEXT", default="unknown", help="recorded version (default: detected)")
    add("--baseline-metrics-url", metavar="URL", help="metrics page, several with commas (default: /metrics at the root)")
    add("--speculative-metrics-url", metavar="[NAME=]URL", action="append", default=[], help="the same for a speculative server")
    add("--cafile", metavar="FILE", help="certificates to trust for https, PEM (default: the system's)")
    add("--ready-timeout", metavar="S", type=seconds, default=READY_TIMEOUT_S, help="seconds to wait while a server loads its model (default: 300)")


def _add_prompt_options(add: Any) -> None:
    add("--prompt-set", metavar="SETS", type=prompt_sets, help="builtin, file, copy, closed, open, agent, math, mixed; several with commas "
                                                               "(default: builtin, or file with --prompts)")
    add("--prompts", metavar="FILE", help="prompts of your own: text, JSON lines, JSON, CSV, gzip; known shapes are recognised")
    add("--prompt-key", metavar="KEY", help="key that holds the prompt, for JSON of an unknown shape")
    add("--limit", metavar="N", type=count, help="prompts of each workload (default: all)")
    add("--share-prompts", action="store_true", help="ask the same prompts at every level (default: each level has its own)")
    add("--suite", choices=SUITES, help="a whole experiment: lesson (copy, closed, open at 1; mixed at 10) or tutorial "
                                        "(chat, agent, math at 1, 4, 16; 256 tokens, thinking off)")


def _add_measuring_options(parser: argparse.ArgumentParser) -> None:
    _add_prompt_options(parser.add_argument_group("what is asked").add_argument)
    add = parser.add_argument_group("how it is asked (greedy: temperature 0)").add_argument
    add("--max-tokens", metavar="N", type=count, help="tokens of an answer at most (default: 192; suite tutorial: 256)")
    add("--seed", metavar="N", type=int, default=0, help="sent with each request (default: 0)")
    add("--no-think", action="store_true", help="switch thinking off, for all servers alike (default: the server's)")
    add("--no-stream", action="store_true", help="answers in one piece: no TTFT, no TPOT (default: streamed)")
    add("--extra-body", metavar="JSON", type=json_object, default={}, help="merged into every request")
    add("--baseline-body", metavar="JSON", type=json_object, default={}, help="merged into the baseline's requests alone")
    add("--speculative-body", metavar="[NAME=]JSON", type=named_json_object, action="append", default=[], help="the same for a speculative server")
    add("--timeout", metavar="S", type=seconds, default=300.0, help="seconds for a whole answer (default: 300)")
    add = parser.add_argument_group("how it is measured").add_argument
    add("--concurrency", metavar="N[,N]", type=levels, help="requests at once, one or several levels (default: 1)")
    add("--repeats", metavar="N", type=count, default=1, help="times that all prompts are asked (default: 1)")
    add("--warmup", metavar="N", type=count_or_zero, default=2, help="untimed requests a server first (default: 2)")
    add("--order", choices=("alternate", "sequential"), default="alternate", help="servers in turn, or one after the other (default: alternate)")
    add("--precision", metavar="P", type=share, help="stop early once the ratio's interval is that narrow, such as 2%% (default: ask all)")
    add("--noise-floor", choices=("auto", "always", "never"), default="auto",
        help="let the baseline answer again and hold it against itself (default: auto, when something differs)")
    add("--ties", choices=("auto", "always", "never"), default="auto", help="ask for logprobs where answers part (default: auto)")
    _add_output_options(parser.add_argument_group("what is kept").add_argument)


def _add_output_options(add: Any) -> None:
    add("--label", metavar="TEXT", default="speculative-run", help="tag in the notebook (default: speculative-run)")
    add("--track", metavar="TEXT", help="your kind of machine, for the table's footer: spark, strix, mac, nvidia, ... (default: none)")
    add("--labbook", metavar="FILE", default="labbook.md", help="notebook that JSON lines are appended to; - is stdout (default: labbook.md)")
    add("--run-file", metavar="FILE", help="evidence: every reply with its text (default: <notebook>.runs/<UTC>-<label>.jsonl)")
    add("--no-texts", action="store_true", help="keep digests and lengths instead of texts in the run file")
    add("--export-json", metavar="FILE", help="also write a summary of all configurations as JSON")
    add("--fail-on", metavar="WORDS", type=verdict_words, default=(), help="exit 1 on these verdicts, such as changed,slower (default: none)")
    add("--quiet", action="store_true", help="no progress on stderr")


def demo_parser() -> argparse.ArgumentParser:
    """The parser of the verb demo."""
    parser = _parser("demo", "Measure small servers of its own on loopback: a simulation, through the normal path.", (
        "demo", "demo --dialect vllm --drafter ngram,lossy", "demo --suite lesson --labbook labbook.md"))
    add = parser.add_argument_group("the demo's servers").add_argument
    add("--dialect", choices=("llama.cpp", "vllm", "sglang"), default="llama.cpp", help="whose API they speak (default: llama.cpp)")
    add("--drafter", metavar="NAMES", type=drafters, default=("ngram",), help="ngram, suffix, draft, lossy; several with commas (default: ngram)")
    _add_measuring_options(parser)
    _add_server_options(parser)
    parser.set_defaults(labbook=None, max_tokens=64, label="demo")
    return parser


def check_parser() -> argparse.ArgumentParser:
    """The parser of the verb check."""
    parser = _parser("check", "Ask the servers who they are, and say everything that would spoil a run. Nothing is measured.", (
        "check --baseline-url http://127.0.0.1:8080/v1 --speculative-url http://127.0.0.1:8081/v1",))
    _add_server_options(parser)
    _add_measuring_options(parser)
    return parser


def _files_parser(verb: str, description: str, examples: Sequence[str], files: str, default: Optional[List[str]] = None) -> argparse.ArgumentParser:
    parser = _parser(verb, description, examples)
    parser.usage = f"measure_speculative.py {verb} [options] [FILE ...]"
    parser.add_argument("files", metavar="FILE", nargs="*" if default is not None else "+", default=default, help=files)
    return parser


def compare_parser() -> argparse.ArgumentParser:
    """The parser of the verb compare."""
    parser = _files_parser("compare", "Compare saved runs as if they had been measured together; the first one holds the baseline.", (
        "compare base.jsonl eagle3.jsonl dflash.jsonl", "compare labbook.runs/*.jsonl --export-json summary.json"), "run files")
    parser.add_argument("--verbose", action="store_true", help="a block for every pass, too")
    parser.add_argument("--labbook", metavar="FILE", help="append the comparisons to this notebook (default: to none)")
    parser.add_argument("--export-json", metavar="FILE", help="write a summary of all configurations as JSON")
    parser.add_argument("--fail-on", metavar="WORDS", type=verdict_words, default=(), help="exit 1 on these verdicts, such as changed,slower")
    return parser


def table_parser() -> argparse.ArgumentParser:
    """The parser of the verb table."""
    parser = _files_parser("table", "The lesson's table, filled in from the notebook; what was not measured stays pending.", (
        "table labbook.md", "table --tutorial labbook.md", "table --into lesson.md labbook.md"), "notebooks or run files (default: labbook.md)", ["labbook.md"])
    parser.add_argument("--tutorial", action="store_true", help="the tutorial's tables instead: by workload, configuration and level")
    parser.add_argument("--into", metavar="FILE.md", help="fill the pending cells of this Markdown file, and touch nothing else")
    parser.add_argument("--configuration", metavar="NAME", help="which speculative server, where there are several (default: the latest)")
    return parser


def csv_parser() -> argparse.ArgumentParser:
    """The parser of the verb csv."""
    parser = _files_parser("csv", "One row a result (workload x configuration x level), for a spreadsheet.", (
        "csv labbook.md > results.csv", "csv --requests labbook.runs/*.jsonl -o requests.csv"), "notebooks or run files (default: labbook.md)", ["labbook.md"])
    parser.add_argument("--requests", action="store_true", help="one row a request instead, from run files")
    parser.add_argument("--decimal-comma", action="store_true", help="decimal commas and ; between cells")
    parser.add_argument("--bom", action="store_true", help="begin with a byte order mark, for Excel")
    parser.add_argument("-o", "--output", metavar="FILE", default="-", help="where to (default: stdout)")
    return parser


def report_parser() -> argparse.ArgumentParser:
    """The parser of the verb report."""
    parser = _files_parser("report", "One self-contained page: verdict, charts, tables, and where answers part.", (
        "report labbook.md -o report.html",), "notebooks or run files (default: labbook.md)", ["labbook.md"])
    parser.add_argument("-o", "--output", metavar="FILE", default="report.html", help="the page (default: report.html)")
    return parser


def notebook_parser() -> argparse.ArgumentParser:
    """The parser of the verb notebook."""
    parser = _files_parser("notebook", "What a notebook holds, and which of its lines are damaged.", ("notebook labbook.md", "notebook --check labbook.md"),
                           "notebooks (default: labbook.md)", ["labbook.md"])
    parser.add_argument("--check", action="store_true", help="hold every record against the schema; exit 1 if one fails")
    return parser


def breakeven_parser() -> argparse.ArgumentParser:
    """The parser of the verb breakeven."""
    parser = _files_parser("breakeven", "When drafting pays: S = E / (1 + k c), E = (1 - a^(k+1)) / (1 - a).", (
        "breakeven --acceptance 0.6 --draft-cost 0.1 --draft-length 4", "breakeven --table", "breakeven labbook.md"),
                           "notebooks or run files (default: none, the map of S)", [])
    parser.add_argument("--acceptance", metavar="A", type=share, help="acceptance of a drafted token, 0..1")
    parser.add_argument("--draft-cost", metavar="C", type=float, help="cost of drafting a token, in target steps (map: 0.1)")
    parser.add_argument("--draft-length", metavar="K", type=count, default=4, help="tokens drafted a step (default: 4)")
    parser.add_argument("--table", action="store_true", help="the lesson's table of break-even acceptances")
    return parser


def demo_server_parser() -> argparse.ArgumentParser:
    """The parser of the hidden verb that the demo's children run."""
    parser = _parser("demo-server", "One of the demo's servers.", ("demo-server --port 0",))
    add_demo_server_options(parser)
    return parser


VERBS = {"": (measure_parser, measure), "demo": (demo_parser, demo), "check": (check_parser, check), "compare": (compare_parser, compare),
         "table": (table_parser, table), "csv": (csv_parser, csv_verb), "report": (report_parser, report),
         "notebook": (notebook_parser, notebook), "breakeven": (breakeven_parser, breakeven),
         "demo-server": (demo_server_parser, demo_server)}


def parse_arguments(argv: Sequence[str]) -> Tuple[Any, Any]:
    """The verb's function and its options; argparse ends the program with 2 for what it cannot read."""
    verb = argv[0] if argv and argv[0] in VERBS else ""
    make_parser, run = VERBS[verb]
    parser = make_parser()
    options = parser.parse_args(argv[1:] if verb else argv)
    if verb in ("", "demo", "check"):
        _complete(options, parser, verb)
    return run, options


def _complete(options: Any, parser: argparse.ArgumentParser, verb: str) -> None:
    """Defaults that depend on other options, and what cannot go together."""
    if verb != "demo" and not options.baseline_url and not (options.baseline_run and options.speculative_url):
        parser.error("--baseline-url is needed (or --baseline-run with --speculative-url); the verb demo needs no server at all")
    if options.baseline_url and options.baseline_run:
        parser.error("--baseline-url and --baseline-run cannot go together")
    if options.prompts and options.prompt_set and "file" not in options.prompt_set:
        parser.error("--prompts FILE needs --prompt-set file (or no --prompt-set)")
    tutorial = options.suite == "tutorial"
    options.max_tokens = (256 if tutorial else 192) if options.max_tokens is None else options.max_tokens
    options.no_think = options.no_think or tutorial
    options.engine = None if options.engine == "unknown" else options.engine
    options.engine_version = None if options.engine_version == "unknown" else options.engine_version


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run a verb; the exit code. The one place where errors are caught and said."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")   # a console of another code page must not end a measurement
    try:
        run, options = parse_arguments(list(sys.argv[1:] if argv is None else argv))
        return int(run(options))
    except MeasureError as error:
        print(terminal_text(f"measure_speculative: error: {error.sentence}"), file=sys.stderr)
        if error.hint:
            print(terminal_text(f"  try: {error.hint}"), file=sys.stderr)
        return EXIT_CANNOT_START
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:             # `| head` has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
