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
    place = (record_server(record), record_workload(record), record_level(record))
    passes[(record_run(record), *place)] = record
    passes[(text_at(record, "prompts_sha256"), text_at(record, "model"), *place)] = record


def _pass_of(record: Record, server: str, passes: Mapping[Tuple[Any, ...], Record]) -> Record:
    place = (server, record_workload(record), record_level(record))
    apart = (text_at(record, "prompts_sha256"), text_at(record, "model"), *place)
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
              ("ratio", _ratio_line(value_at(record, "throughput_ratio"), cell.throughput_ratio))]
    if number_at(record, "decode_ratio", "value") is not None:
        facts.append(("decode speed", _ratio_line(record["decode_ratio"], None)))
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
    return [step * i for i in range(math.ceil(high / step - 1e-9) + 1)]


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
    places = [(x.at(point.x) + aside, y.at(point.y), point) for point in series.known]
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
    tops = spread([y.at(each.known[-1].y) for each in series], 14, 206)
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


def _expected_tokens(alpha: float, k: int) -> float:
    """E = (1 - alpha^(k+1)) / (1 - alpha): tokens that a verify step yields on average, the bonus token included."""
    return k + 1.0 if alpha >= 1 else (1 - alpha ** (k + 1)) / (1 - alpha)


def _predicted_speedup(alpha: float, k: int, cost: float) -> float:
    """S = E / (1 + k c): a prediction of the model, not a measurement."""
    return _expected_tokens(alpha, k) / (1 + k * cost)


def _alpha_at(speedup: float, k: int, cost: float) -> float:
    """The acceptance rate at which E / (1 + k c) is the speedup; 1 where it is out of reach, 0 where it is passed at once."""
    low, high = 0.0, 1.0
    for _ in range(20):
        middle = (low + high) / 2
        low, high = (middle, high) if _predicted_speedup(middle, k, cost) < speedup else (low, middle)
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


def _document(title: str, header: str, sections: Sequence[Tuple[str, str, str]]) -> str:
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
            f"one request at best ({_place(cell)}).")


def _speed_sentence(cells: Sequence[ResultCell]) -> Tuple[str, str, str]:
    words = [text_at(cell.comparison, "verdict", "speed") for cell in cells]
    faster, slower = words.count("faster"), words.count("slower")
    known = [cell for cell in cells if cell.speedup is not None]
    best = max(known, key=lambda cell: cell.speedup or 0) if known else None
    ratio = f"{best.speedup:.2f} times the baseline's speed ({best.configuration} on {_place(best)})" if best else "no ratio"
    of = f"of {len(cells)} measurements" if len(cells) > 1 else "the one measurement"
    if not any(words):
        return ("plain", "A ratio, no verdict", f"The best ratio is {ratio}; these records carry no interval that would tell it from chance.")
    loss = _known(f"{cell.configuration} on {_place(cell)}" for cell, word in zip(cells, words) if word == "slower")
    if faster == len(cells):
        return ("good", "Yes, it pays", f"With speculation every measurement is faster, at best {ratio}.")
    if faster:
        mostly = faster >= 0.8 * len(cells) and slower <= 0.1 * len(cells)
        kind, word = ("good", "Yes, nearly everywhere") if mostly else ("mixed", "It depends")
        less = f" and slower in {slower} ({_listed(loss, 2)})" if slower else ""
        return (kind, word, f"Speculation is faster in {faster} {of}{less}; at best it reaches {ratio}.")
    if slower:
        return ("bad", "No, it costs", f"Speculation is slower in {slower} {of} and faster in none; its best is {ratio}.")
    return ("plain", "No difference to be seen", f"In {of} the speed cannot be told from the baseline's; the best is {ratio}.")


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
        return ("plain", "Cannot tell about the answers", f"{counts}; in {unknown} of {len(cells)} measurements it cannot be told whether the rest is rounding.")
    if "rounding only" in words:
        return ("good", "Same answers, within rounding", f"{counts}, and where they differ it is rounding, as the baseline's own repeats show or near-ties explain.")
    return ("good", "Same answers", f"{counts}.")


def _listed(names: Sequence[str], most: int = 3) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _place(cell: ResultCell) -> str:
    """'agent, one request at a time', 'chat, 16 requests at once'."""
    level = "one request at a time" if cell.concurrency == 1 else f"{cell.concurrency} requests at once"
    return f"{cell.workload}, {level}"


# The conditions under which all of it holds.


def _conditions(cells: Sequence[ResultCell]) -> Tuple[str, str, str]:
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
    told = [text_at(record, "client", "platform"), text_at(record, "client", "python") and "Python " + text_at(record, "client", "python")]
    return ", ".join(_known(told))


_SERVER_COLUMNS = (Column("Server"), Column("Engine"), Column("Method"), number("Draft length"), Column("Drafter"),
                   number("Context", "tokens"), number("Slots"), number("KV cache", "tokens"), Column("Address"))


def _server_table(passes: Sequence[Record]) -> Table:
    latest = {record_server(record): record for record in passes}
    rows = [(name, _engine_words(record) or None, text_at(record, "server", "speculation", "method") or None,
             number_at(record, "server", "speculation", "draft_tokens"), text_at(record, "server", "speculation", "drafter") or None,
             number_at(record, "server", "context_tokens"), number_at(record, "server", "slots"),
             number_at(record, "server", "kv_cache_tokens"), text_at(record, "base_url") or None)
            for name, record in latest.items()]
    return Table("The servers, as they or the user told", _SERVER_COLUMNS, tuple(rows))


def _caveat_list(records: Sequence[Record]) -> str:
    """Each caveat once, with its remedy and how many records carry it."""
    counts: Dict[Tuple[str, str], int] = {}
    for record in records:
        for caveat in list_at(record, "caveats"):
            key = (text_at(caveat, "sentence") or str(caveat), text_at(caveat, "remedy"))
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


def _best_section(cells: Sequence[ResultCell], styles: Mapping[str, int]) -> Optional[Tuple[str, str, str]]:
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
                 floors: Mapping[str, Optional[Tuple[float, str]]] = {}) -> List[Tuple[str, str]]:
    """A chart a workload; one chart of all workloads where each has a single bar. `floors` are the charts' own lines."""
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


def _speedup_section(cells: Sequence[ResultCell], styles: Mapping[str, int]) -> Optional[Tuple[str, str, str]]:
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
            said.setdefault(str(advice), []).append(f"{cell.configuration} on {_place(cell)}")
    items = "".join(f'<li>{html_text(advice)} <span class="note">({html_text(_listed(places, 2))})</span></li>'
                    for advice, places in said.items())
    return f'<div class="advice"><h3>What to try</h3><ul>{items}</ul></div>' if items else ""


_RATES = ((("decode_tokens_per_s", "mean"), "decode speed [tokens/s]"), (("output_tokens_per_s",), "throughput [tokens/s]"))


def _rates_section(cells: Sequence[ResultCell], styles: Mapping[str, int]) -> Optional[Tuple[str, str, str]]:
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
    return (record_workload(record), record_server(record), record_level(record), *[number_at(record, *path) for path in paths],
            text_at(record, "acceptance", "source") or text_at(record, "acceptance", "missing") or None)


def _position_section(cells: Sequence[ResultCell], styles: Mapping[str, int]) -> Optional[Tuple[str, str, str]]:
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
    accepted = list_at(cell.speculative, "acceptance", "accepted_by_position")
    shares = stored or ([count / drafts for count in accepted] if drafts else [])
    return shares if all(isinstance(share, (int, float)) for share in shares) else []


def _answers_section(cells: Sequence[ResultCell], styles: Mapping[str, int]) -> Optional[Tuple[str, str, str]]:
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


def _accuracy_section(cells: Sequence[ResultCell], styles: Mapping[str, int]) -> Optional[Tuple[str, str, str]]:
    """Right answers of the workloads that are graded, the baseline's first."""
    graded = {workload: _graded(own) for workload, own in _workloads(cells).items()}
    graded = {workload: own for workload, own in graded.items() if own}
    if not graded:
        return None
    bars = {workload: [_share_bar(name, styles, _share(found), counts_words(found) or "") for name, found in own.items()]
            for workload, own in graded.items()}
    rows = [(workload, name, counts_words(found), _share(found)) for workload, own in graded.items()
            for name, found in own.items()]
    columns = (Column("Workload"), Column("Server"), number("Right"), number("Share", "%", 0, 100))
    figures = _bar_figures(bars, Chart("right answers [%]", "share", " %", 100))
    return ("accuracy", "Accuracy", "<p>Right answers among those that could be graded: the check that matters most.</p>"
            + _grid(figures) + _behind([Table("Right answers", columns, tuple(rows))]))


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


def _map_section(cells: Sequence[ResultCell], styles: Mapping[str, int]) -> Optional[Tuple[str, str, str]]:
    """A map for each draft length that was measured, with the measured points on it."""
    by_length: Dict[int, List[Tuple[ResultCell, MapPoint]]] = {}
    for cell in cells:
        point = _map_point(cell, styles)
        if point and cell.concurrency == _levels(cells)[0]:
            by_length.setdefault(int(number_at(cell.comparison, "break_even", "draft_length") or 0), []).append((cell, point))
    if not by_length:
        return None
    maps = "".join(_map_figure(length, found) for length, found in sorted(by_length.items()))
    lead = ("<p>A model of the speedup for each draft length: S = E / (1 + k c), with E = (1 − α<sup>k+1</sup>) / (1 − α) tokens a step. "
            "Right of the heavy line speculation pays. The numbers on the map are measurements at the lowest concurrency; the bands are predictions.</p>")
    return ("map", "Break-even map", lead + f'<div class="grid">{maps}</div>' + _behind([_cost_table(cells)]))


def _map_point(cell: ResultCell, styles: Mapping[str, int]) -> Optional[MapPoint]:
    alpha, cost = number_at(cell.comparison, "break_even", "acceptance_rate"), number_at(cell.comparison, "break_even", "draft_cost", "value")
    length = number_at(cell.comparison, "break_even", "draft_length")
    if alpha is None or cost is None or not length:
        return None
    return MapPoint(alpha, cost, styles[cell.configuration], f"{cell.configuration}, {cell.workload}")


def _map_figure(length: int, found: Sequence[Tuple[ResultCell, MapPoint]]) -> str:
    items = "".join(f"<li>{html_text(point.name)}: {times(cell.speedup)} "
                    f"(predicted {times(_predicted_speedup(point.alpha, length, point.cost))})</li>" for cell, point in found)
    points = heat_map(f"Break-even map for draft length {length}", length, [point for _, point in found])
    return f"<figure><figcaption>draft length {length}</figcaption>{points}<ol>{items}</ol></figure>"


_COST_COLUMNS = (
    Column("Workload"), Column("Configuration"), number("Concurrency"), number("Draft length"), number("Acceptance rate", "", 2),
    number("Break-even acceptance", "", 2), number("Cost of a drafted token", "target steps", 3), number("Cost of a step", "target steps", 2),
    number("Best draft length"), number("Speedup predicted there", "", 2), number("Gain ends at concurrency", "", 1), number("KV cache lost", "tokens"))


def _cost_table(cells: Sequence[ResultCell]) -> Table:
    paths = (("draft_length",), ("acceptance_rate",), ("break_even_acceptance",), ("draft_cost", "value"), ("step_cost", "value"),
             ("best_draft_length",), ("best_speedup",), ("crossover", "concurrency"), ("kv_cache_tokens_lost",))
    rows = [(cell.workload, cell.configuration, cell.concurrency, *[number_at(cell.comparison, "break_even", *path) for path in paths]) for cell in cells]
    return Table("What drafting costs and what it would need", _COST_COLUMNS, tuple(rows))


# Where answers part: the same prompt on both servers, side by side.


def _differences_section(cells: Sequence[ResultCell], runs: Sequence[Run]) -> Optional[Tuple[str, str, str]]:
    """The first differences of each measurement, as many as a reader can take in."""
    texts = _answers_by_place(runs)
    shown_now, groups = 0, []
    for cell in sorted(cells, key=lambda cell: cell.concurrency):
        found = list_at(cell.comparison, "text_comparison", "divergences")[:_DIFFERENCES_SHOWN]
        found = [each for each in found if isinstance(each, Mapping)][:max(0, _DIFFERENCES_IN_ALL - shown_now)]
        shown_now += len(found)
        if found:
            pairs = "".join(_difference_figure(cell, each, texts) for each in found)
            groups.append(f"<details{' open' if not groups else ''}><summary>{html_text(cell.configuration)} on {html_text(_place(cell))}: "
                          f"{_decimal(cell.identical, 0)} of {_decimal(cell.compared, 0)} identical</summary>{pairs}</details>")
    if not groups:
        return None
    lead = ("<p>Marked is where the texts part, from the first differing character on. The margin tells how far the other server's token lies below the baseline's own "
            "choice: thousandths of a nat are a coin that rounding flips, whole nats are not.</p>")
    return ("differences", "Where answers part", lead + "".join(groups))


_Place = Tuple[str, str, int]       # server, workload, level


def _answers_by_place(runs: Sequence[Run]) -> Dict[_Place, List[Tuple[Run, Reply]]]:
    found: Dict[_Place, List[Tuple[Run, Reply]]] = {}
    for run in runs:
        for each in run.passes:
            if each.purpose == "timed":
                found.setdefault((each.server, each.workload, each.concurrency), []).extend((run, reply) for reply in each.replies)
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
    first = re.match(r"\s*\S{0,24}", after).group() or after[:1]
    marked = f"<mark>{html_text(first)}</mark>{html_text(after[len(first):])}" if after else "<mark>(the text ends here)</mark>"
    return f'<div><p class="side">{html_text(name)}</p><p class="text">{html_text(before)}{marked}</p></div>'


def _around(divergence: Record, tail: str, answers: Sequence[Tuple[Run, Reply]]) -> Tuple[str, str]:
    """The text before and from the first difference on. A run's text counts only if it goes on as the record says."""
    place = number_at(divergence, "first_difference_at_char")
    for _, reply in answers if place is not None else ():
        text = (reply.reasoning if text_at(divergence, "channel") == "reasoning" else reply.content) or ""
        at = int(place)
        if reply.prompt_id == text_at(divergence, "prompt_id") and text[at:at + len(tail)] == tail and text:
            return ("…" if at > _BEFORE else "") + text[max(0, at - _BEFORE):at], _shortened(text[at:], _AFTER)
    return ("… " if place else ""), _shortened(tail, _AFTER)


def _shortened(text: str, most: int) -> str:
    return text if len(text) <= most else text[:most] + "…"


def _category_section(cells: Sequence[ResultCell]) -> Optional[Tuple[str, str, str]]:
    rows = [(cell.workload, text_at(each, "category"), cell.configuration, cell.concurrency, number_at(each, "pairs"),
             number_at(each, "decode_ratio", "value"), number_at(each, "decode_ratio", "low"), number_at(each, "decode_ratio", "high"),
             number_at(each, "acceptance_rate"), number_at(each, "exact_match"))
            for cell in cells for each in list_at(cell.comparison, "break_even", "by_category") if isinstance(each, Mapping)]
    columns = (Column("Workload"), Column("Category"), Column("Configuration"), number("Concurrency"), number("Pairs"),
               number("Speedup", "", 2), number("Low", "", 2), number("High", "", 2), number("Acceptance", "%", 0, 100), number("Exact match", "%", 0, 100))
    if not rows:
        return None
    table = Table("Speed and agreement by category of prompt", columns, tuple(rows))
    return ("categories", "By category", table_html(table) if len(rows) <= 30 else _behind([table], f"{len(rows)} rows"))


def _others_section(everything: Sequence[ResultCell], shown_cells: Sequence[ResultCell]) -> Optional[Tuple[str, str, str]]:
    """What the notebook holds besides: other models, and older results of the same cell."""
    rest = [cell for cell in everything if cell not in shown_cells]
    rows = [(cell.run, _when(cell)[:10] or None, text_at(cell.newest, "model") or None, cell.workload, cell.configuration or BASELINE,
             cell.concurrency, cell.speedup) for cell in rest]
    columns = (Column("Run"), Column("Date"), Column("Model"), Column("Workload"), Column("Configuration"), number("Concurrency"), number("Speedup", "", 2))
    lead = "<p>This page shows the latest results of the model that was measured last. The notebook also holds these.</p>"
    return ("others", "Also in the notebook", lead + table_html(Table("Other results", columns, tuple(rows)))) if rows else None


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
# Two small servers of our own: a deterministic toy language model behind an engine's dialect.


# ======================================================================================================================
# 16. Command line (I/O)
# ======================================================================================================================
#
# Verbs; main(argv) -> int.
