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
import json
import math
import sys
from dataclasses import dataclass, field, fields, replace
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
# What a formatter may do with a number: scale its unit and round it. What is derived is derived above, in the records.

import re
import unicodedata

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
    """The finite number at `path` of a record; None where it, or anything on the way to it, is missing."""
    value = value_at(record, *path)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
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


def record_kind(record: Record) -> str:
    """endpoint | comparison | '' (no record of ours). The lesson's own lines name no kind; their keys tell."""
    named = text_at(record, "kind")
    if named:
        return named
    return "comparison" if "text_comparison" in record else "endpoint" if "latency_s" in record else ""


def record_run(record: Record) -> str:
    """The run that a record belongs to: the label that the user gave it."""
    return text_at(record, "run") or text_at(record, "label").rpartition("/")[0] or text_at(record, "label")


def record_workload(record: Record) -> str:
    """The workload of a record; the lesson's own lines know only the built-in prompts."""
    return text_at(record, "workload") or "builtin"


def record_level(record: Record) -> int:
    """The concurrency of a record; the lesson's own lines are single-stream."""
    return int(number_at(record, "concurrency") or 1)


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
    place = (record_server(record), record_workload(record), record_level(record))
    passes[(record_run(record), *place)] = record
    passes[(record.get("prompts_sha256"), record.get("model"), *place)] = record


def _pass_of(record: Record, server: str, passes: Mapping[Tuple[Any, ...], Record]) -> Record:
    place = (server, record_workload(record), record_level(record))
    apart = (record.get("prompts_sha256"), record.get("model"), *place)
    return passes.get((record_run(record), *place)) or (passes.get(apart, {}) if apart[0] else {})


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
    line_end = re.search(r"[\r\n]*$", piece).group()     # a last cell without a closing pipe holds the line's end
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
    rows = []
    for name, by_level in _by_configuration(cells).items():
        at = [by_level.get(level) for level in levels]
        rows.append((name, at[0] and at[0].acceptance_length, *[cell and cell.speedup for cell in at],
                     *[cell and cell.speculative_tokens_per_s for cell in at]))
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
    """What became of the drafts, one line a meaning; the reason where nothing was measured; nothing for a plain server."""
    found = value_at(record, "acceptance") or {}
    measured = (("rate", percent(number_at(found, "acceptance_rate"), 1)),
                ("length", _tokens_words(number_at(found, "acceptance_length"), "a step, bonus token included")),
                ("yield", _tokens_words(number_at(found, "tokens_per_target_pass"), "a target pass")))
    lines = [f"{name} {value}" for name, value in measured if value != DASH]
    source = text_at(found, "source")
    if lines:
        return [", ".join(lines) + (f" (from {source})" if source else "")]
    missing = text_at(found, "missing")
    plain = record_server(record) == BASELINE and value_at(record, "server", "speculating") is not True
    return [f"not measured: {missing}"] if missing and not plain else []


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
              ("ratio", _ratio_words(value_at(record, "throughput_ratio"), cell.throughput_ratio))]
    if number_at(record, "decode_ratio", "value") is not None:
        facts.append(("decode speed", _ratio_words(record["decode_ratio"], None)))
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


def _ratio_words(ratio: Any, otherwise: Optional[float]) -> str:
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
    server, prompt, drafted = run.servers.get(of.server), run.prompts.get(reply.prompt_id), reply.acceptance or Acceptance()
    return (run.label, run.started_at, of.server, server and server.engine, server and server.version,
            server and server.model, of.workload, prompt and prompt.category, of.concurrency, of.purpose,
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
