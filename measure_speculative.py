#!/usr/bin/env python3
# /// script
# requires-python = ">=3.9"
# dependencies = []
# ///
"""Does speculative decoding pay here, and did the answers stay the same?

(The manual is written last.)
"""
from __future__ import annotations

import bisect
import functools
import hashlib
import json
import math
import operator
import re
import sys
from dataclasses import dataclass, field, fields, replace
from statistics import NormalDist
from typing import Any, Callable, Dict, Iterable, Iterator, List, Mapping, NamedTuple, Optional, Sequence, Tuple, Union

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


def mean(values: Iterable[float]) -> Optional[float]:
    """The arithmetic mean; None: no values."""
    known = list(values)
    return math.fsum(known) / len(known) if known else None


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
    rests = [[total - one for total, one in zip(sums, row)] for row in rows]
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
    weights = [math.fsum(one / total for one, total in zip(row, sums)) for row in rows]
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
    return max(NEAR_RULERS * ruler.p99_nats, NEAR_NATS) if _usable(ruler) else BLIND_NEAR_NATS


def far_nats(ruler: Optional[Ruler]) -> float:
    """Beyond this margin, in nats, rounding on this pair does not reach."""
    return max(FAR_RULERS * ruler.p99_nats, FAR_NATS) if _usable(ruler) else BLIND_FAR_NATS


def _usable(ruler: Optional[Ruler]) -> bool:
    return ruler is not None and ruler.positions >= FEWEST_POSITIONS


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
    lone = max(LONE_NATS, LONE_RULERS * evidence.ruler.p99_nats) if _usable(evidence.ruler) else 4 * BLIND_FAR_NATS
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
    caveats = () if _usable(evidence.ruler) else (Caveat(
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
    if _usable(evidence.ruler) or _margins(evidence):
        return next((share / 200 for share in range(1, 201) if binomial_tail(3, pairs, 0.7 * share / 200) >= 0.8), None)
    if not _floor_shows(evidence):
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
    if _usable(ruler):
        words += f"; rounding on this pair reaches {ruler.max_nats:.2g}"
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


def ruler_of(changes: Sequence[float]) -> Optional[Ruler]:
    """The ruler that these changes of logprobs make, from any number of prompts. None: there are none."""
    if not changes:
        return None
    return Ruler(len(changes), quantile(changes, 0.5) or 0.0, quantile(changes, 0.99) or 0.0, max(changes))


def ruler_from_logprobs(baseline: Entries, other: Entries) -> Optional[Ruler]:
    """The ruler from one prompt's answers; for several, `ruler_of` their `logprob_changes` in one list."""
    return ruler_of(logprob_changes(baseline, other))


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


def break_even_rows(ks: Sequence[int] = (2, 4, 8), cs: Sequence[float] = (0.10, 0.20, 0.35)
                    ) -> List[Tuple[int, List[Optional[float]]]]:
    """The lesson's table: for each draft length, the break-even acceptance at each draft cost."""
    return [(k, [break_even_alpha(k, c) for c in cs]) for k in ks]


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
    passes = _target_passes(acceptance)
    if acceptance.draft_tokens and passes:
        return acceptance.draft_tokens / passes
    return float(k) if k else None


def _target_passes(acceptance: Acceptance) -> Optional[int]:
    if acceptance.completion_tokens is None or acceptance.requests is None or acceptance.accepted_tokens is None:
        return None
    passes = acceptance.completion_tokens - acceptance.requests - acceptance.accepted_tokens
    return passes if passes > 0 else None


def predicted_speedups(acceptance: Acceptance, k: Optional[int], cost: float) -> Optional[Dict[str, float]]:
    """PREDICTED speedup for each draft length up to the measured one, from acceptance by position. Keys "1", "2", ...

    A shorter chain yields what its positions yielded and drafts so much less; that the share of passes with a draft stays as
    it was is assumed. Without acceptance by position, alpha is taken to be the same at every position.
    """
    rates = _chain_rates(acceptance, k)
    per_pass = drafted_per_pass(acceptance, k)
    passes = _target_passes(acceptance)
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
    sums = {name: _sum_or_none([getattr(part, name) for part in known])
            for name in ("drafts", "draft_tokens", "accepted_tokens", "completion_tokens", "requests")}
    chains = [part.accepted_by_position for part in known]
    longest = max((len(chain) for chain in chains if chain is not None), default=0)
    by_position = None if None in chains else tuple(
        sum(chain[place] for chain in chains if place < len(chain)) for place in range(longest))
    return Acceptance(accepted_by_position=by_position, source=known[0].source, **sums)


def _sum_or_none(counts: Sequence[Optional[int]]) -> Optional[int]:
    return None if None in counts else sum(counts)


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
    predicted = predicted_speedups(acceptance, k, cost["value"]) if cost and cost["value"] is not None else None
    best = max([("0", 1.0), *(predicted or {}).items()], key=lambda choice: choice[1])
    return {
        "acceptance_by_position": list(acceptance.rate_by_position) if acceptance.rate_by_position else None,
        "tokens_per_target_pass": acceptance.tokens_per_target_pass, "step_cost": step, "draft_cost": cost,
        "draft_length": k, "acceptance_rate": acceptance.acceptance_rate,
        "break_even_acceptance": break_even_alpha(k, max(0.0, cost["value"])) if k and cost else None,
        "predicted_speedup": predicted, "best_draft_length": int(best[0]) if predicted else None,
        "best_speedup": best[1] if predicted else None, "crossover": None,
        "kv_cache_tokens_lost": _cache_lost(*servers),
        "by_category": by_category(baseline, other, agreement, run.prompts)}


def _cache_lost(baseline: Optional[Server], other: Optional[Server]) -> Optional[int]:
    if baseline is None or other is None or None in (baseline.kv_cache_tokens, other.kv_cache_tokens):
        return None
    return baseline.kv_cache_tokens - other.kv_cache_tokens


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
    if best is None or not k or ratio is None or best == k or speed < 1.05 * ratio.value:
        return None
    if best == 0:
        return f"No draft length up to {k} is predicted to pay on {cell.workload} at concurrency {cell.concurrency}."
    return (f"k = {best} is predicted at {speed:.2f}x on {cell.workload} at concurrency {cell.concurrency}; "
            f"you run k = {k} at {ratio.value:.2f}x.")


def _advice_on_acceptance(cell: Comparison) -> Optional[str]:
    rate, needed, k = (cell.why.get(key) for key in ("acceptance_rate", "break_even_acceptance", "draft_length"))
    ratio, cost = cell.decode_ratio, cell.why.get("draft_cost")
    if None in (rate, needed, k, cost) or ratio is None or ratio.high is None or ratio.high >= 1:
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


def forks_to_ask(run: Run, most: int = 24) -> Tuple[Fork, ...]:
    """The forks of every cell whose margin is not known yet, at most `most` a cell: ask the baseline these prompts again."""
    forks: List[Fork] = []
    for workload, concurrency, label in _cell_keys(run):
        baseline, other = _timed(run, workload, concurrency, baseline_label(run)), _timed(run, workload, concurrency, label)
        forks += forks_of(baseline, other, agree(baseline, other), most)
    return tuple(fork for fork in forks if fork.key not in run.margins)


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
# Two small servers of our own: a deterministic toy language model behind an engine's dialect.


# ======================================================================================================================
# 16. Command line (I/O)
# ======================================================================================================================
#
# Verbs; main(argv) -> int.
