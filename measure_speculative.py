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
import re
import sys
from dataclasses import dataclass, field, fields, replace
from statistics import NormalDist
from typing import Any, Dict, Iterable, Iterator, List, Mapping, NamedTuple, Optional, Sequence, Tuple, Union

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
    owner = _owner_of(there[_word_start(there, at):], baseline, passages)
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


def _owner_of(tail: str, baseline: Reply, passages: Passages) -> Optional[str]:
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
    most = 2 * len(taken[owner]) > len(words) or len(taken[owner]) >= 5 * PASSAGE_WORDS
    return owner if most and letters >= PASSAGE_LETTERS else None


def agree(baseline: Pass, other: Pass) -> Agreement:
    """How far two passes agree: answers paired by prompt and repeat, never by position."""
    ours = {(reply.prompt_id, reply.repeat): reply for reply in baseline.replies}
    theirs = {(reply.prompt_id, reply.repeat): reply for reply in other.replies}
    left_out = [(key[0], f"no answer from {name}") for side, facing, name in (
        (ours, theirs, other.server), (theirs, ours, baseline.server)) for key in side if key not in facing]
    differences, shares, identical = [], [], 0
    passages: Optional[Passages] = None
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
    return max(0.0, middle - half), min(1.0, middle + half)


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


@functools.lru_cache(maxsize=None)
def smallest_detectable(pairs: int, noise: float, alpha: float, power: float = 0.8) -> Optional[float]:
    """The smallest share of altered answers that McNemar's test would notice with this power, 0..1. None: not even all.

    `noise` is the share of answers that differ without any fault; a fault is taken to alter an answer regardless of it.
    """
    def notices(altered: float) -> bool:
        return _mcnemar_power(pairs, noise, noise + (1 - noise) * altered, alpha) >= power

    if not pairs or not notices(1.0):
        return None
    low, high = 0.0, 1.0
    while high - low > 0.005:
        middle = (low + high) / 2
        low, high = (low, middle) if notices(middle) else (middle, high)
    return high


def _mcnemar_power(pairs: int, noise: float, differing: float, alpha: float) -> float:
    """Probability that the one-sided exact test reaches `alpha`, the two kinds of difference being independent."""
    more, fewer = differing * (1 - noise), noise * (1 - differing)
    discordant = more + fewer
    if discordant <= 0:
        return 0.0
    return math.fsum(binomial(count, pairs, discordant) * binomial_tail(_critical(count, alpha), count, more / discordant)
                     for count in range(pairs + 1) if binomial(count, pairs, discordant) > 1e-6)


@functools.lru_cache(maxsize=None)
def _critical(tosses: int, alpha: float) -> int:
    """The fewest heads of a fair coin whose tail is at most alpha (one more than the tosses: none is)."""
    tail, heads = 0.0, tosses + 1
    while heads > 0 and tail + binomial(heads - 1, tosses, 0.5) <= alpha:
        heads -= 1
        tail += binomial(heads, tosses, 0.5)
    return heads


# --- Ratios of speeds


class Row(NamedTuple):
    """One prompt's share in a ratio: amount over time (or a speed over 1) on either side."""

    baseline_amount: float
    baseline_s: float
    other_amount: float
    other_s: float


def ratio_of_sums(rows: Sequence[Row]) -> Optional[Ratio]:
    """(other amounts / other seconds) / (baseline amounts / baseline seconds), with its 95 % interval over prompts.

    The interval is Student's on the logarithm, its standard error from the jackknife (leaving out a prompt at a time), since
    a ratio of sums is no mean. Prompts that take long weigh more, so the degrees of freedom are those of Kish's effective
    sample size. Coverage is measured in tests/losslessness: 93 to 97 % from 6 prompts on. None: nothing on one side.
    """
    sums = [math.fsum(column) for column in zip(*rows)]
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
    error = math.sqrt((len(rows) - 1) / len(rows) * math.fsum((one - centre) ** 2 for one in without))
    return student_quantile(_effective_rows(rows, sums) - 1) * error


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

    Repeats of a prompt are averaged first: they are one pair. None: not streamed, or tokens not counted.
    """
    ours, theirs = _speeds_by_prompt(baseline), _speeds_by_prompt(other)
    return ratio_of_sums([Row(ours[key], 1.0, theirs[key], 1.0) for key in ours if key in theirs])


def _speeds_by_prompt(replies: Iterable[Reply]) -> Dict[str, float]:
    speeds: Dict[str, List[float]] = {}
    for reply in replies:
        if reply.ok and reply.decode_tokens_per_s is not None:
            speeds.setdefault(reply.prompt_id, []).append(reply.decode_tokens_per_s)
    return {key: math.fsum(values) / len(values) for key, values in speeds.items()}


def throughput_ratio(baseline: Pass, other: Pass) -> Optional[Ratio]:
    """Output throughput of the other pass over the baseline's: tokens of completed requests over wall time.

    The value is the passes'; its interval comes from the prompts that both answered (tokens over seconds to the end of the
    answer), since with a constant number of requests in flight the wall time is their sum over that number.
    """
    if not baseline.output_tokens_per_s or not other.output_tokens_per_s:
        return None
    value = other.output_tokens_per_s / baseline.output_tokens_per_s
    ours, theirs = _work_by_prompt(baseline.replies), _work_by_prompt(other.replies)
    by_prompt = ratio_of_sums([Row(*ours[key], *theirs[key]) for key in ours if key in theirs])
    if by_prompt is None or by_prompt.low is None or by_prompt.high is None:
        return Ratio(value, None, None, by_prompt.pairs if by_prompt else 0)
    return Ratio(value, value * by_prompt.low / by_prompt.value, value * by_prompt.high / by_prompt.value, by_prompt.pairs)


def _work_by_prompt(replies: Iterable[Reply]) -> Dict[str, Tuple[float, float]]:
    work: Dict[str, Tuple[float, float]] = {}
    for reply in replies:
        if reply.ok and reply.completion_tokens is not None and reply.e2el_s is not None:
            tokens, seconds = work.get(reply.prompt_id, (0.0, 0.0))
            work[reply.prompt_id] = (tokens + reply.completion_tokens, seconds + reply.e2el_s)
    return work


def half_width(ratio: Optional[Ratio]) -> Optional[float]:
    """Half the interval, as a share of the ratio itself: 0.02 is plus or minus 2 %. None: no interval."""
    if ratio is None or ratio.low is None or ratio.high is None:
        return None
    return (ratio.high - ratio.low) / 2 / ratio.value


def precise_enough(ratio: Optional[Ratio], precision: float) -> bool:
    """Whether measuring may stop: the interval's half width is at most `precision` (0.02: 2 %) of the ratio."""
    half = half_width(ratio)
    return half is not None and half <= precision


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
# Two small servers of our own: a deterministic toy language model behind an engine's dialect.


# ======================================================================================================================
# 16. Command line (I/O)
# ======================================================================================================================
#
# Verbs; main(argv) -> int.
