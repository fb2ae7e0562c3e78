"""A scripted fake of an OpenAI-compatible server on loopback: healthy like the engine it plays, broken on request.

    with FakeServer(engine="vllm", speculation=Speculation(k=4, accepts=(2, 0, 4))) as server:
        server.script("chat", ["ok", "stall", ("status_429", {"retry_after": 7}), "ok"])
        ...                       # measure server.url
        server.chats              # what it was asked: order, times, connection, headers, parsed body
        server.counters           # what /metrics shows

It generates words (a word is a token), so every count is exact: usage, the engine's own extras, and counters that move
when a healthy answer ends. Nothing sleeps unless a script says so. Leaving the `with` block ends every connection,
every thread and the listening socket at once.

Scripts. `script(where, steps, then="ok")`: `where` is a kind ("chat", "metrics", "models", "props", ...; "connect" is
the moment a connection is accepted; "*" is any request), a path beginning with "/", or a predicate of the Request. Each
matching request takes one step, in order of arrival; after the last step all take `then`. A step is "ok", the name of a
fault, a pair (name, options), or a function of the Connection. The newest matching script wins.

The faults, by name. `whole`: a correct client still has the whole answer. `either`: reasonable clients differ. All
others: the request failed.

  ok                    whole   the healthy answer
  refuse                        reset this connection and close the listening socket: later connects are refused
  hang                          read the request (or, as "connect", nothing) and never answer
  stall                         headers and the first half of the answer, then silence
  stall_head                    half of the headers, then silence
  drip                  whole   the first `limit` bytes one by one, `gap_s` apart, then the rest
  reset_before_head             reset (RST) before any byte of an answer
  reset_mid_head                reset within the headers
  reset_after_head              reset right after the headers
  reset_mid_chunk               reset within a chunk in the middle of the answer
  close_before_head             orderly close before any byte of an answer
  close_mid_head                orderly close within the headers
  length_long                   Content-Length promises more bytes than come
  length_short                  Content-Length promises fewer bytes than come
  cut_chunk                     a chunk promises more bytes than come before the close
  bad_chunk_size                a chunk size that is no number
  no_last_chunk         either  everything but the last, empty chunk; then an orderly close
  endless                       an answer that goes on for ever (bounded by `seconds`)
  endless_comments              comment lines for ever, never a token (bounded by `seconds`)
  huge_body             either  a well-formed answer of `size` bytes (200 MB), made on the fly
  huge_line                     one line (one JSON string) of `size` bytes (200 MB) that never ends
  huge_head             either  a header of `size` bytes (1 MB) before a healthy answer
  endless_head                  headers for ever (bounded by `seconds`)
  garbage                       bytes that are not HTTP
  interim_100           whole   "100 Continue" before the healthy answer
  close_delimited       whole   an HTTP/1.0 answer without length, ended by the close
  connection_close      whole   a healthy answer with "Connection: close", then the close
  close_after           whole   a healthy answer, then a close that nothing announced
  gzip                  whole   gzip although identity was asked for
  gzip_broken                   gzip whose middle is damaged
  gzip_bomb                     a small gzip body that unpacks to `size` bytes (200 MB) of blanks
  wrong_type            either  the healthy answer as application/octet-stream
  html_200                      an HTML page with status 200
  json_for_stream       either  a plain JSON answer although a stream was asked for
  truncated_json                JSON that stops in the middle, though the HTTP around it is whole
  two_objects                   two JSON objects in one data line
  nul_bytes                     a raw NUL inside a JSON string
  invalid_utf8          either  a byte that is no UTF-8 inside a JSON string
  error_object                  an error object within a 200 stream, then the end without [DONE]
  error_object_done             the same, then [DONE]
  error_string                  an error that is a string, without [DONE]
  error_string_done             the same, then [DONE]
  error_event                   "event: error" with a bare object, without [DONE]
  error_event_done              the same, then [DONE]
  error_first                   an error object before any token, then [DONE]
  empty_stream                  status 200 and no byte of body
  only_done                     a stream that is only [DONE]
  no_finish                     the stream ends without a finish_reason, [DONE] included
  no_done               either  finish_reason and usage, but no [DONE]
  cut_off                       the stream ends in the middle of an event
  usage_absent          whole   no usage and none of the engine's own counts
  usage_null            whole   usage is null, and none of the engine's own counts
  usage_wrong           whole   usage counts `extra` tokens more than there were
  status_400                    400 without naming anything
  parameter_refused     either  400 naming `name` while the request has it; else the healthy answer
  status_401                    401 in the engine's words
  status_404_html               404 with an HTML page
  status_429                    429 with Retry-After
  status_500                    500 with a plain text
  status_503                    503 with Retry-After
  loading                       503 "Loading model"
  redirect              either  307 to another path of the same host, which answers
  redirect_308          either  308 to another path of the same host, which answers
  redirect_other                307 to another host (`to`)
  redirect_loop                 307 to itself
  metrics_restart               the server restarts first: counters fall to 0, start time changes
  metrics_restart_hidden        the start time changes, the counters go on rising
  metrics_json_string           the page as one JSON string
  metrics_openmetrics   whole   the page as OpenMetrics
  metrics_huge          either  the page after `size` bytes (50 MB) of other metrics
  metrics_binary                a page of bytes that are no text
  metrics_empty                 an empty page
  metrics_absent                404
  metrics_off                   501, as llama.cpp says it

Not in the table, since they need a file: `replay(path)` makes a step from a `.http` file (the raw response), a `.sse`
file (the body of a stream), a `.timed.jsonl` file (with its times, counted from the moment the request was read), or a
`.json` or `.prom` file; bare names are looked for in tests/data/cases.
"""
from __future__ import annotations

import base64
import gzip
import hashlib
import json
import os
import re
import select
import socket
import ssl
import struct
import threading
import time
import zlib
from collections import deque
from dataclasses import dataclass, field, replace
from functools import partial
from http import HTTPStatus
from typing import Any, Callable, Dict, List, Mapping, NamedTuple, Optional, Sequence, Set, Tuple, Union

DATA = os.path.join(os.path.dirname(os.path.abspath(__file__)), "data")
CASES = os.path.join(DATA, "cases")
CERT = os.path.join(DATA, "tls", "cert.pem")
KEY = os.path.join(DATA, "tls", "key.pem")

MB = 1 << 20
ENGINES = ("llama.cpp", "vllm", "sglang", "plain")
CANARY = "canary-4c1f-never-to-be-seen"     # the secrets that SGLang's /server_info gives away; must reach no output


# ======================================================================================================================
# 1. What is generated (pure): words as tokens, and which of them were drafted
# ======================================================================================================================

WORDS = ("amber birch cedar delta ember field grove harbor island jasper kernel lantern meadow north opal pepper "
         "quartz river sable timber umber valley willow yarrow zephyr anchor bridge copper dune echo glade").split()


def default_answer(messages: Any, body: Mapping[str, Any]) -> str:
    """Twenty to thirty-five words that depend on nothing but the messages: two servers asked the same agree."""
    digest = hashlib.sha256(json.dumps(messages, sort_keys=True).encode()).digest()
    return " ".join(WORDS[byte % len(WORDS)] for byte in (digest * 2)[:20 + digest[0] % 16]) + "."


class Say(NamedTuple):
    """What an `answer` function may return instead of a text: all channels. A tool call is (name, arguments)."""

    content: str = ""
    reasoning: str = ""
    tool_calls: Tuple[Tuple[str, str], ...] = ()
    finish_reason: Optional[str] = None


class Token(NamedTuple):
    """One word with the blanks before it; `call` is the (index, name) of the tool call that it belongs to."""

    channel: str            # content | reasoning | tool
    text: str
    call: Optional[Tuple[int, str]] = None

    @property
    def id(self) -> int:
        return zlib.crc32(self.text.encode("utf-8", "replace")) % 32000


class Speculation(NamedTuple):
    """Draft length, and how many tokens each verify step accepts, over and over; None is a pass without a draft."""

    k: int = 4
    accepts: Sequence[Optional[int]] = (2, 0, 4, 1)
    method: str = "ngram"


@dataclass(frozen=True)
class Generation:
    """One answer as the engine would know it. `steps`: accepted tokens of each pass after the prompt's."""

    id: str
    model: str
    tokens: Tuple[Token, ...]
    prompt_tokens: int
    cached_tokens: int
    steps: Tuple[Optional[int], ...]
    k: int                      # 0: no speculation
    finish_reason: str

    @property
    def completion_tokens(self) -> int:
        return len(self.tokens)

    @property
    def drafts(self) -> int:
        return sum(step is not None for step in self.steps) if self.k else 0

    @property
    def draft_tokens(self) -> int:
        return self.drafts * self.k

    @property
    def accepted_tokens(self) -> int:
        return sum(step or 0 for step in self.steps)

    @property
    def accepted_by_position(self) -> Tuple[int, ...]:
        return tuple(sum((step or 0) > position for step in self.steps) for position in range(self.k))

    def text(self, channel: str = "content") -> str:
        return "".join(token.text for token in self.tokens if token.channel == channel)

    def groups(self) -> List[Tuple[Token, ...]]:
        """The tokens of each target pass: the prompt's pass yields one, each other its accepted ones and one more."""
        groups, start = [], 0
        for size in [1] + [(step or 0) + 1 for step in self.steps]:
            groups.append(self.tokens[start:start + size])
            start += size
        return [group for group in groups if group]


def words_of(text: str) -> List[str]:
    """The text cut into words with the blanks before them; joined they are the text again."""
    return re.findall(r"\s*\S+|\s+", text)


def tokens_of(said: Say) -> Tuple[Token, ...]:
    """All channels as one sequence: reasoning, content, then tool calls."""
    tokens = [Token("reasoning", word) for word in words_of(said.reasoning)]
    tokens += [Token("content", word) for word in words_of(said.content)]
    for index, (name, arguments) in enumerate(said.tool_calls):
        tokens += [Token("tool", word, (index, name)) for word in words_of(arguments) or [""]]
    return tuple(tokens)


def verify_steps(tokens: int, accepts: Sequence[Optional[int]], k: int) -> Tuple[Optional[int], ...]:
    """Accepted tokens of each pass after the first, so that 1 + sum(accepted + 1) is exactly `tokens`."""
    steps: List[Optional[int]] = []
    left = tokens - 1
    while left > 0:
        step = accepts[len(steps) % len(accepts)] if k and accepts else None
        if step is not None:
            step = min(step, k, left - 1)
        steps.append(step)
        left -= (step or 0) + 1
    return tuple(steps)


def prompt_words(messages: Any) -> int:
    """Number of words of all messages, at least one."""
    contents = [message.get("content") for message in messages if isinstance(message, dict)]
    texts = [content if isinstance(content, str) else json.dumps(content) for content in contents]
    return max(1, sum(len(text.split()) for text in texts))


@dataclass
class Counters:
    """What the server counted since it started."""

    started_at: float = 1790000000.25
    requests: int = 0
    streamed: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    streamed_tokens: int = 0
    passes: int = 0             # of the target, the prompts' included
    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    by_position: List[int] = field(default_factory=list)
    finished: Dict[str, int] = field(default_factory=dict)

    def add(self, generation: Generation, streamed: bool) -> None:
        self.requests += 1
        self.streamed += streamed
        self.prompt_tokens += generation.prompt_tokens
        self.cached_tokens += generation.cached_tokens
        self.completion_tokens += generation.completion_tokens
        self.streamed_tokens += generation.completion_tokens * streamed
        self.passes += 1 + len(generation.steps)
        self.drafts += generation.drafts
        self.draft_tokens += generation.draft_tokens
        self.accepted_tokens += generation.accepted_tokens
        self.finished[generation.finish_reason] = self.finished.get(generation.finish_reason, 0) + 1
        longest = max(len(self.by_position), generation.k)
        old = self.by_position + [0] * (longest - len(self.by_position))
        new = list(generation.accepted_by_position) + [0] * (longest - generation.k)
        self.by_position = [a + b for a, b in zip(old, new)]


# ======================================================================================================================
# 2. The engines' dialects (pure): the same generation in each one's words
# ======================================================================================================================

REASONING_KEY = {"llama.cpp": "reasoning_content", "vllm": "reasoning", "sglang": "reasoning_content",
                 "plain": "reasoning_content"}
OWNER = {"llama.cpp": "llamacpp", "vllm": "vllm", "sglang": "sglang", "plain": "somebody"}
SERVER_HEADERS = {"llama.cpp": [("Server", "llama.cpp"), ("Access-Control-Allow-Origin", "")],
                  "vllm": [("date", "Mon, 30 Nov 2026 00:41:58 GMT"), ("server", "uvicorn")],
                  "sglang": [("date", "Mon, 30 Nov 2026 01:57:58 GMT"), ("server", "uvicorn")],
                  "plain": [("Server", "plain/1.0")]}
VERSION = {"llama.cpp": "b11434-fake", "vllm": "0.32.0", "sglang": "0.5.23", "plain": "1"}
CREATED = 1790000000
METRICS_TYPE = {"llama.cpp": "text/plain; version=0.0.4", "vllm": "text/plain; version=1.0.0; charset=utf-8",
                "sglang": "text/plain; version=0.0.4; charset=utf-8", "plain": "text/plain"}

Alternatives = Callable[[Generation, int], Sequence[Tuple[str, float]]]


def default_alternatives(generation: Generation, position: int) -> Sequence[Tuple[str, float]]:
    """(token, logprob) of the candidates at a position, the chosen one first."""
    text = generation.tokens[position].text
    return [(text, -0.1), (text + "~", -2.5), ("?", -6.0)]


def compact(value: Any) -> str:
    """JSON as the engines write it: no blanks, no escapes that are not needed."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def event(value: Any) -> bytes:
    """One server-sent event that holds a JSON value."""
    return b"data: " + compact(value).encode("utf-8", "surrogatepass") + b"\n\n"


DONE = b"data: [DONE]\n\n"


def stream_of(engine: str, made: Generation, body: Mapping[str, Any], alternatives: Alternatives) -> List[bytes]:
    """The events of a healthy stream, one item a write, in the engine's order."""
    wants_usage = bool((body.get("stream_options") or {}).get("include_usage"))
    role = event(chunk_of(engine, made, [choice_of(engine, role_delta(engine))]))
    texts = text_events(engine, made, body, alternatives)
    if engine == "llama.cpp" and texts:     # the role goes out in the same write as the first token
        texts, role = texts[1:], role + texts[0]
    events = [role] + texts
    if engine != "vllm" or not made.tokens:
        extras = own_counts(engine, made, body) if engine == "llama.cpp" and not wants_usage else {}
        last = choice_of(engine, end_delta(engine), made.finish_reason)
        events.append(event({**chunk_of(engine, made, [last]), **extras}))
    if engine == "sglang" and own_counts(engine, made, body):
        events.append(event({**chunk_of(engine, made, []), "usage": None, **own_counts(engine, made, body)}))
    if wants_usage:
        extras = {} if engine == "sglang" else own_counts(engine, made, body)
        events.append(event({**chunk_of(engine, made, []), "usage": usage_of(engine, made), **extras}))
    return events + [DONE]


def text_events(engine: str, made: Generation, body: Mapping[str, Any], alternatives: Alternatives) -> List[bytes]:
    """The events that carry text: llama.cpp sends one a token, vLLM and SGLang one a target pass."""
    groups = made.groups()
    if engine == "llama.cpp":
        groups = [(token,) for token in made.tokens]
    events, position = [], 0
    for number, group in enumerate(groups):
        last = engine == "vllm" and number == len(groups) - 1
        choice = choice_of(engine, delta_of(engine, group), made.finish_reason if last else None)
        if last:
            choice["stop_reason"] = None
        if body.get("logprobs"):
            entries = logprobs_of(engine, made, range(position, position + len(group)), alternatives, streamed=True)
            choice["logprobs"] = {"content": entries} if entries else None
        if engine == "vllm":
            choice["token_ids"] = [token.id for token in group] if body.get("return_token_ids") else None
        events.append(event(chunk_of(engine, made, [choice])))
        position += len(group)
    return events


def chunk_of(engine: str, made: Generation, choices: List[Any]) -> Dict[str, Any]:
    chunk = {"id": made.id, "object": "chat.completion.chunk", "created": CREATED, "model": made.model,
             "choices": choices}
    if engine == "llama.cpp":
        chunk["system_fingerprint"] = VERSION[engine]
    return chunk


def choice_of(engine: str, delta: Mapping[str, Any], finish_reason: Optional[str] = None) -> Dict[str, Any]:
    choice: Dict[str, Any] = {"index": 0, "delta": delta, "finish_reason": finish_reason}
    if engine in ("vllm", "sglang"):
        choice["logprobs"] = None
    if engine == "sglang":
        choice["matched_stop"] = None
    return choice


def role_delta(engine: str) -> Dict[str, Any]:
    delta: Dict[str, Any] = {"role": "assistant", "content": None if engine == "llama.cpp" else ""}
    if engine == "sglang":
        delta["reasoning_content"] = None
    return delta


def end_delta(engine: str) -> Dict[str, Any]:
    return {"reasoning_content": None} if engine == "sglang" else {}


def delta_of(engine: str, group: Sequence[Token]) -> Dict[str, Any]:
    """What a group of tokens adds to each channel."""
    delta: Dict[str, Any] = {"reasoning_content": None} if engine == "sglang" else {}
    for token in group:
        if token.call is None:
            key = "content" if token.channel == "content" else REASONING_KEY[engine]
            delta[key] = (delta.get(key) or "") + token.text
        else:
            add_call(delta.setdefault("tool_calls", []), token)
    return delta


def add_call(calls: List[Dict[str, Any]], token: Token) -> None:
    """Adds a token to its tool call, which is named where its arguments begin."""
    index, name = token.call or (0, "")
    if not calls or calls[-1]["index"] != index:
        calls.append({"index": index, "id": f"call_{index}", "type": "function",
                      "function": {"name": name, "arguments": ""}})
    calls[-1]["function"]["arguments"] += token.text


def logprobs_of(engine: str, made: Generation, positions: Sequence[int], alternatives: Alternatives,
                streamed: bool) -> List[Dict[str, Any]]:
    """The logprobs of content tokens. llama.cpp's are not real for tokens that were drafted: 0.0 alone, or left out."""
    drafted = drafted_positions(made) if engine == "llama.cpp" else set()
    entries = []
    for position in positions:
        token = made.tokens[position]
        if token.channel != "content" or (streamed and position in drafted):
            continue
        candidates = [] if position in drafted else [logprob_entry(t, p) for t, p in alternatives(made, position)]
        chosen = candidates[0] if candidates else logprob_entry(token.text, 0.0)
        extra = {"id": token.id} if engine == "llama.cpp" else {}
        entries.append({**extra, **chosen, "top_logprobs": candidates})
    return entries


def logprob_entry(text: str, logprob: float) -> Dict[str, Any]:
    return {"token": text, "logprob": logprob, "bytes": list(text.encode("utf-8", "replace"))}


def drafted_positions(made: Generation) -> Set[int]:
    """Places of the tokens that a drafter proposed: all of a pass but its last."""
    drafted: Set[int] = set()
    position = 0
    for group in made.groups():
        drafted.update(range(position, position + len(group) - 1))
        position += len(group)
    return drafted


def body_of(engine: str, made: Generation, body: Mapping[str, Any], alternatives: Alternatives) -> Dict[str, Any]:
    """The healthy answer in one piece."""
    calls: List[Dict[str, Any]] = []
    for token in made.tokens:
        if token.call is not None:
            add_call(calls, token)
    message: Dict[str, Any] = {"role": "assistant", "content": made.text() or (None if calls or made.text("reasoning")
                                                                              else "")}
    if made.text("reasoning") or engine in ("vllm", "sglang"):
        message[REASONING_KEY[engine]] = made.text("reasoning") or None
    if calls:
        message["tool_calls"] = calls
    choice: Dict[str, Any] = {"index": 0, "message": message, "finish_reason": made.finish_reason}
    if body.get("logprobs"):
        choice["logprobs"] = {"content": logprobs_of(engine, made, range(len(made.tokens)), alternatives, False)}
    whole = {**chunk_of(engine, made, [choice]), "object": "chat.completion", "usage": usage_of(engine, made)}
    add_token_ids(engine, made, body, whole)
    return {**whole, **own_counts(engine, made, body)}


def add_token_ids(engine: str, made: Generation, body: Mapping[str, Any], whole: Dict[str, Any]) -> None:
    """The token ids where the engine puts them in an answer of one piece, if they were asked for."""
    ids = [token.id for token in made.tokens]
    if engine == "vllm" and body.get("return_token_ids"):
        whole["choices"][0]["token_ids"] = ids
    if engine == "sglang" and body.get("return_token_ids"):
        whole["choices"][0]["response_token_ids"] = ids
    if engine == "llama.cpp" and body.get("return_tokens") and body.get("verbose"):
        whole["__verbose"] = {"tokens": ids, "stop_type": "eos" if made.finish_reason == "stop" else "limit"}


def usage_of(engine: str, made: Generation) -> Dict[str, Any]:
    usage: Dict[str, Any] = {"prompt_tokens": made.prompt_tokens, "completion_tokens": made.completion_tokens,
                             "total_tokens": made.prompt_tokens + made.completion_tokens}
    if engine == "llama.cpp" or made.cached_tokens:
        usage["prompt_tokens_details"] = {"cached_tokens": made.cached_tokens}
    return usage


def own_counts(engine: str, made: Generation, body: Mapping[str, Any]) -> Dict[str, Any]:
    """The engine's own fields of an answer: llama.cpp `timings`, vLLM `metrics`, SGLang `sglext`."""
    if engine == "llama.cpp":
        return {"timings": timings_of(made)}
    if engine == "vllm" and made.k:
        return {"metrics": {"speculative_decoding": vllm_counts(made)}}
    if engine == "sglang":
        extension: Dict[str, Any] = {}
        if body.get("return_spec_tokens_details") and made.k and made.steps:
            extension["spec_tokens_details"] = sglang_counts(made)
        if body.get("return_output_ids_in_sglext"):
            extension["output_ids"] = [[token.id for token in made.tokens]]
        return {"sglext": extension} if extension else {}
    return {}


def timings_of(made: Generation) -> Dict[str, Any]:
    """llama.cpp's timings: 1 ms a prompt token, 10 ms a pass; no draft counts when nothing was drafted."""
    prompt, predicted_ms = made.prompt_tokens - made.cached_tokens, max(10.0 * len(made.steps), 0.001)
    timings = {"cache_n": made.cached_tokens, "prompt_n": prompt, "prompt_ms": float(prompt),
               "prompt_per_token_ms": 1.0, "prompt_per_second": 1000.0,
               "predicted_n": made.completion_tokens, "predicted_ms": predicted_ms,
               "predicted_per_token_ms": predicted_ms / max(made.completion_tokens - 1, 1),
               "predicted_per_second": max(made.completion_tokens - 1, 0) / predicted_ms * 1000}
    if made.draft_tokens:
        timings.update(draft_n=made.draft_tokens, draft_n_accepted=made.accepted_tokens)
    return timings


def histogram_of(made: Generation) -> List[int]:
    """Number of verify steps that accepted exactly 0, 1, 2, ... k tokens."""
    return [sum(step == accepted for step in made.steps) for accepted in range(made.k + 1)]


def vllm_counts(made: Generation) -> Dict[str, Any]:
    drafts = made.drafts
    return {"mean_acceptance_length": 1 + made.accepted_tokens / drafts if drafts else 0.0,
            "draft_acceptance_rate": made.accepted_tokens / made.draft_tokens if drafts else 0.0,
            "acceptance_histogram": histogram_of(made), "num_spec_steps": drafts,
            "num_accepted_draft_tokens": made.accepted_tokens, "num_draft_tokens": made.draft_tokens,
            "num_spec_tokens": made.k}


def sglang_counts(made: Generation) -> Dict[str, Any]:
    """SGLang counts every pass after the prompt's as a verify step, with a nominal draft of k tokens."""
    steps, counts = len(made.steps), [step or 0 for step in made.steps]
    return {"spec_accept_rate": made.accepted_tokens / (steps * made.k),
            "spec_accept_length": made.completion_tokens / steps, "spec_cap_length": 0.0,
            "spec_block_accept_length": 0.0, "spec_num_correct_drafts": made.accepted_tokens,
            "spec_num_proposed_drafts": steps * made.k, "spec_verify_ct": steps,
            "spec_correct_drafts_histogram": [counts.count(n) for n in range(max(counts) + 1)],
            "spec_cap_lens_histogram": []}


def error_of(engine: str, code: int, message: str, kind: str, param: Optional[str] = None) -> Dict[str, Any]:
    """An error in the engine's shape: nested, or flat (SGLang)."""
    if engine == "sglang":
        return {"object": "error", "message": message, "type": kind, "param": param, "code": code}
    error: Dict[str, Any] = {"message": message, "type": kind, "code": code}
    if engine != "llama.cpp" or param:
        error["param"] = param
    return {"error": error}


# ----- /metrics -------------------------------------------------------------------------------------------------------


def metrics_of(engine: str, counters: Counters, model: str, k: int) -> str:
    """The engine's page of metrics; k = 0: no speculation."""
    pages = {"llama.cpp": llama_metrics, "vllm": vllm_metrics, "sglang": sglang_metrics}
    return pages[engine](counters, model, k)


def series(name: str, kind: str, *samples: Tuple[Mapping[str, str], float], number: str = "%r") -> str:
    """One metric with its HELP and TYPE lines."""
    lines = [f"# HELP {name} {name} of a fake", f"# TYPE {name} {kind}"]
    for labels, value in samples:
        shown = ",".join('%s="%s"' % (key, escaped_label(labels[key])) for key in sorted(labels))
        lines.append(f"{name}{{{shown}}} {number % value}" if shown else f"{name} {number % value}")
    return "\n".join(lines) + "\n"


def escaped_label(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def llama_metrics(counters: Counters, model: str, k: int) -> str:
    """llama.cpp: no labels, six significant digits, the speculation counters there even when speculation is off."""
    totals = [("prompt_tokens_total", counters.prompt_tokens - counters.cached_tokens),
              ("prompt_tokens_cached_total", counters.cached_tokens),
              ("tokens_predicted_total", counters.completion_tokens), ("n_decode_total", counters.passes),
              ("spec_decode_num_draft_tokens_total", counters.draft_tokens),
              ("spec_decode_num_accepted_tokens_total", counters.accepted_tokens),
              ("spec_decode_num_drafts_total", counters.drafts)]
    page = "".join(series("llamacpp:" + name, "counter", ({}, value), number="%g") for name, value in totals)
    if counters.drafts:
        positions = [({"position": str(place)}, value) for place, value in enumerate(counters.by_position)]
        page += series("llamacpp:spec_decode_num_accepted_tokens_per_pos_total", "counter", *positions, number="%d")
    gauges = ("prompt_tokens_seconds", "predicted_tokens_seconds", "requests_processing", "requests_deferred")
    return page + "".join(series("llamacpp:" + name, "gauge", ({}, 0), number="%g") for name in gauges)


def vllm_metrics(counters: Counters, model: str, k: int) -> str:
    """vLLM: the speculation counters only when speculation is on, each with its `_created` twin."""
    own = {"model_name": model, "engine": "0"}
    page = series("process_start_time_seconds", "gauge", ({}, counters.started_at))
    cache = {"block_size": "16", "num_gpu_blocks": "1024", "kv_cache_size_tokens": "16384", "cache_dtype": "auto",
             "enable_prefix_caching": "True", "kv_cache_dtype_skip_layers": "[]", "engine": "0",
             "_block_size_resolved": "True", "gpu_memory_utilization": "0.9"}
    page += series("vllm:cache_config_info", "gauge", (cache, 1.0))
    page += series("vllm:num_requests_running", "gauge", (own, 0.0))
    totals = [("prompt_tokens", counters.prompt_tokens), ("prompt_tokens_cached", counters.cached_tokens),
              ("generation_tokens", counters.completion_tokens), ("prefix_cache_queries", counters.prompt_tokens),
              ("prefix_cache_hits", counters.cached_tokens)]
    if k:
        totals += [("spec_decode_num_drafts", counters.drafts),
                   ("spec_decode_num_draft_tokens", counters.draft_tokens),
                   ("spec_decode_num_accepted_tokens", counters.accepted_tokens)]
        by_position = counters.by_position + [0] * (k - len(counters.by_position))
        positions = [({**own, "position": str(place)}, value) for place, value in enumerate(by_position)]
        page += with_created("vllm:spec_decode_num_accepted_tokens_per_pos", counters, positions)
    page += "".join(with_created("vllm:" + name, counters, [(own, value)]) for name, value in totals)
    reasons = {"stop": 0, "length": 0, "abort": 0, "error": 0, **counters.finished}
    done = [({**own, "finished_reason": reason}, value) for reason, value in reasons.items()]
    return page + with_created("vllm:request_success", counters, done)


def with_created(name: str, counters: Counters, samples: Sequence[Tuple[Mapping[str, str], float]]) -> str:
    """A counter and the gauge that tells when it began."""
    total = series(name + "_total", "counter", *[(labels, float(value)) for labels, value in samples])
    return total + series(name + "_created", "gauge", *[(labels, counters.started_at + 9) for labels, _ in samples])


def sglang_metrics(counters: Counters, model: str, k: int) -> str:
    """SGLang: tokens and verify calls as counters, acceptance only as gauges of the last window."""
    own = {"model_name": model, "engine_type": "unified"}
    rank = {**own, "tp_rank": "0", "pp_rank": "0", "moe_ep_rank": "0"}
    gauges = [("max_total_num_tokens", 65536.0), ("context_len", 4096.0), ("fwd_occupancy", float("nan")),
              ("spec_accept_length", 1.25 if k else 0.0), ("spec_accept_rate", 0.0625 if k else 0.0),
              ("spec_num_draft_tokens", k + 1.0 if k else 0.0)]
    page = "".join(series("sglang:" + name, "gauge", (rank, value)) for name, value in gauges)
    tokens = (counters.completion_tokens - counters.streamed_tokens, counters.streamed_tokens)
    requests = (counters.requests - counters.streamed, counters.streamed)
    for name, (whole, streamed) in (("generation_tokens_total", tokens), ("num_requests_total", requests)):
        page += series("sglang:" + name, "counter", ({**own, "is_streaming": "false"}, float(whole)),
                       ({**own, "is_streaming": "true"}, float(streamed)))
    page += series("sglang:prompt_tokens_total", "counter", ({**own, "is_streaming": "true"},
                                                             float(counters.prompt_tokens)))
    if k and counters.drafts:       # no sample before the first speculative request has ended
        page += series("sglang:spec_verify_calls_total", "counter", (own, float(counters.passes - counters.requests)))
    return page


# ----- who are you ----------------------------------------------------------------------------------------------------


def identity_of(engine: str, path: str, facts: "Facts") -> Optional[Any]:
    """The JSON that the engine answers to GET path, b"" for an empty body, None where it has no such page."""
    pages = {"llama.cpp": llama_pages, "vllm": vllm_pages, "sglang": sglang_pages, "plain": plain_pages}
    return pages[engine](facts).get(path)


class Facts(NamedTuple):
    """What an engine tells about itself."""

    model: str
    context: int
    slots: int
    version: str
    speculation: Optional[Speculation]
    dev_mode: bool
    metrics: bool
    used: bool                  # a task has run


def llama_pages(facts: Facts) -> Dict[str, Any]:
    """llama.cpp: /props says "none" even when it speculates; /slots tells, once a task has run by which method."""
    models = {"object": "list", "data": [{
        "id": facts.model, "aliases": [facts.model], "object": "model", "created": CREATED, "owned_by": "llamacpp",
        "meta": {"vocab_type": 2, "n_vocab": 49152, "n_ctx": facts.context, "n_ctx_train": 8192, "n_embd": 576,
                 "n_params": 134515008, "size": 269100288, "ftype": "F16"}}]}
    props = {"default_generation_settings": {"params": {"temperature": 0.8, "speculative.types": "none"},
                                             "n_ctx": facts.context},
             "total_slots": facts.slots, "model_alias": facts.model, "model_ftype": "F16",
             "model_path": f"/models/{facts.model}.gguf", "endpoint_slots": True, "endpoint_metrics": facts.metrics,
             "build_info": facts.version}
    slot: Dict[str, Any] = {"n_ctx": facts.context, "speculative": facts.speculation is not None,
                            "is_processing": False}
    if facts.used:
        methods = "none," + facts.speculation.method if facts.speculation else "none"
        slot["params"] = {"temperature": 0.0, "speculative.types": methods}
    return {"/v1/models": models, "/models": models, "/props": props, "/health": {"status": "ok"},
            "/slots": [{"id": number, **slot} for number in range(facts.slots)]}


def vllm_pages(facts: Facts) -> Dict[str, Any]:
    """vLLM: the version for all, the configuration in development mode only."""
    pages: Dict[str, Any] = {"/v1/models": {"object": "list", "data": [{
        "id": facts.model, "object": "model", "created": CREATED, "owned_by": "vllm", "root": f"/models/{facts.model}",
        "parent": None, "max_model_len": facts.context}]}, "/version": {"version": facts.version}, "/health": b""}
    if facts.dev_mode:
        settings = facts.speculation and {"method": facts.speculation.method, "model": None,
                                          "num_speculative_tokens": facts.speculation.k}
        pages["/server_info"] = {"vllm_config": {"speculative_config": settings,
                                                 "model_config": {"model": f"/models/{facts.model}"}},
                                 "vllm_env": {"VLLM_BATCH_INVARIANT": False, "VLLM_API_KEY": CANARY}}
    return pages


def sglang_pages(facts: Facts) -> Dict[str, Any]:
    """SGLang: everything in /server_info, the keys it was started with among it."""
    spec = facts.speculation
    info = {"model_path": f"/models/{facts.model}", "served_model_name": facts.model, "version": facts.version,
            "dtype": "auto", "quantization": None, "kv_cache_dtype": "auto", "context_length": facts.context,
            "max_total_num_tokens": 65536, "max_running_requests": facts.slots, "disable_radix_cache": False,
            "api_key": CANARY, "admin_api_key": CANARY, "launch_command": f"sglang serve --api-key {CANARY}",
            "speculative_algorithm": spec and spec.method.upper(), "speculative_num_steps": spec and spec.k,
            "speculative_eagle_topk": spec and 1, "speculative_num_draft_tokens": spec and spec.k + 1,
            "speculative_draft_model_path": None, "random_seed": 1, "enable_metrics": facts.metrics,
            "internal_states": [{"memory_usage": {"token_capacity": 65536}}]}
    model = {"model_path": f"/models/{facts.model}", "served_model_name": facts.model, "is_generation": True}
    models = {"object": "list", "data": [{"id": facts.model, "object": "model", "created": CREATED,
                                          "owned_by": "sglang", "root": facts.model, "parent": None,
                                          "max_model_len": facts.context}]}
    return {"/v1/models": models, "/server_info": info, "/get_server_info": info, "/model_info": model,
            "/get_model_info": model, "/health": b""}


def plain_pages(facts: Facts) -> Dict[str, Any]:
    """A server that tells nothing but the name of its model."""
    return {"/v1/models": {"object": "list", "data": [{"id": facts.model, "object": "model", "created": CREATED,
                                                       "owned_by": "somebody"}]}}


# ======================================================================================================================
# 3. HTTP (pure): requests as they were seen, answers and their bytes
# ======================================================================================================================

Headers = Tuple[Tuple[str, str], ...]


@dataclass
class Request:
    """One request as it arrived, and what became of it. Times are time.perf_counter()."""

    order: int                  # 0, 1, 2, ... over all connections
    connection: int             # which connection it came by
    method: str
    target: str                 # as sent, query included
    path: str                   # without query and mount
    kind: str                   # chat | metrics | models | props | ...: the last word of the path
    headers: Headers
    raw: bytes                  # the body
    body: Any                   # the body as JSON, None if it is none
    at: float                   # when its last byte had been read
    step: str = "ok"            # what was done with it
    sent_at: List[float] = field(default_factory=list)      # before each write of the answer's body
    generation: Optional[Generation] = None                 # what was counted, None: nothing
    client_left: bool = False   # the client closed, or reset, before its answer was whole
    over: threading.Event = field(default_factory=threading.Event)      # set when nothing more is done about it

    def header(self, name: str) -> Optional[str]:
        """The first value of a header, in any case."""
        return next((value for key, value in self.headers if key.lower() == name.lower()), None)

    @property
    def streamed(self) -> bool:
        return isinstance(self.body, dict) and bool(self.body.get("stream"))


@dataclass(frozen=True)
class Answer:
    """A response before it is framed. `at_s`: when each piece is due, counted from the moment the request was read."""

    status: int = 200
    headers: Headers = ()
    pieces: Tuple[bytes, ...] = ()      # the writes: events of a stream, or the whole body
    framing: str = "length"             # length | chunked | close
    at_s: Tuple[float, ...] = ()
    generation: Optional[Generation] = None
    version: str = "HTTP/1.1"

    @property
    def streamed(self) -> bool:
        return any(key.lower() == "content-type" and "event-stream" in value for key, value in self.headers)

    @property
    def body(self) -> bytes:
        return b"".join(self.pieces)

    def with_header(self, name: str, value: str) -> "Answer":
        """The answer with one header set, whatever it was before."""
        kept = tuple(item for item in self.headers if item[0].lower() != name.lower())
        return replace(self, headers=kept + ((name, value),))


def head_of(answer: Answer) -> bytes:
    """Status line and headers, those of the framing included unless they are set already."""
    headers = list(answer.headers)
    names = {name.lower() for name, _ in headers}
    if answer.framing == "length" and "content-length" not in names:
        headers.append(("Content-Length", str(len(answer.body))))
    if answer.framing == "chunked":
        headers.append(("Transfer-Encoding", "chunked"))
    try:
        phrase = HTTPStatus(answer.status).phrase
    except ValueError:
        phrase = "Unknown"
    lines = [f"{answer.version} {answer.status} {phrase}"] + [f"{name}: {value}" for name, value in headers]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


def frames_of(answer: Answer) -> List[bytes]:
    """The writes of the body as they go on the wire; the last chunk goes with the last write."""
    if answer.framing != "chunked":
        return list(answer.pieces) or [b""]
    return [chunk(piece) for piece in answer.pieces[:-1]] + [chunk(piece) + LAST_CHUNK for piece in
                                                            answer.pieces[-1:] or (b"",)]


LAST_CHUNK = b"0\r\n\r\n"


def chunk(data: bytes) -> bytes:
    """One HTTP chunk; nothing for no data, since an empty chunk ends the body."""
    return b"%x\r\n%s\r\n" % (len(data), data) if data else b""


def halves(pieces: Sequence[bytes], after: Optional[int] = None) -> Tuple[List[bytes], List[bytes]]:
    """The pieces before and from `after` (default: the middle); a single piece is cut within."""
    if len(pieces) == 1:
        middle = len(pieces[0]) // 2
        return [pieces[0][:middle]], [pieces[0][middle:]]
    middle = len(pieces) // 2 if after is None else after
    return list(pieces[:middle]), list(pieces[middle:])


def edited(answer: Answer, change: Callable[[Dict[str, Any]], Optional[Dict[str, Any]]]) -> Answer:
    """The answer with every JSON object in it changed; an event whose object becomes None is left out."""
    if not answer.streamed:
        return replace(answer, pieces=(compact(change(json.loads(answer.body))).encode(),))
    return replace(answer, pieces=tuple(piece for piece in (edited_events(p, change) for p in answer.pieces) if piece),
                   at_s=())


def edited_events(piece: bytes, change: Callable[[Dict[str, Any]], Optional[Dict[str, Any]]]) -> bytes:
    """A write of whole events, each `data:` object changed."""
    out = b""
    for block in piece.split(b"\n\n")[:-1]:
        if block == b"data: [DONE]":
            out += block + b"\n\n"
        else:
            value = change(json.loads(block[len(b"data: "):]))
            out += b"" if value is None else event(value)
    return out


def spoiled(answer: Answer, bad: bytes) -> Answer:
    """The answer with raw bytes put into a JSON string in its middle."""
    pieces = list(answer.pieces)
    middle = len(pieces) // 2
    piece = pieces[middle]
    mark = next((mark for mark in (b'content":"', b'":"') if mark in piece), None)
    place = piece.index(mark) + len(mark) if mark else len(piece) // 2
    pieces[middle] = piece[:place] + bad + piece[place:]
    return replace(answer, pieces=tuple(pieces))


# ======================================================================================================================
# 4. One connection (I/O)
# ======================================================================================================================


class Connection:
    """One accepted socket: reads requests, takes each one's step, sends. A fault is a function of it."""

    def __init__(self, server: "FakeServer", accepted: socket.socket, number: int) -> None:
        self.server = server
        self.socket = accepted
        self.number = number
        self.request: Request = Request(-1, number, "", "", "", "connect", (), b"", None, time.perf_counter())
        self.open = True
        self.answered = 0
        self._buffer = b""

    def serve(self) -> None:
        """Everything from accept to close."""
        try:
            self.take(self.server.step_for(self.request))
            if self.open and self.server.settings.tls:
                self.socket = self.server.tls_context.wrap_socket(self.socket, server_side=True)
            while self.open and self.read_request():
                self.take(self.server.step_for(self.request))
                self.answered += 1
        except OSError:                 # an end like any other
            pass
        except Exception as problem:    # a mistake in a test's own function: kept, and raised where the test sees it
            self.server.errors.append(problem)
        finally:
            self.close()

    def take(self, step: "Step") -> None:
        """Does what a script says with the current request."""
        self.request.step, do = named(step)
        if self.request.kind == "connect" and step == "ok":
            return
        request = self.request
        try:
            with self.server.in_flight(request):
                do(self)
        except OSError:                 # the client has left, or the server stops
            request.client_left = not self.server.stopping.is_set()
            raise
        finally:
            request.over.set()

    # ----- reading --------------------------------------------------------------------------------------------------

    def read_request(self) -> bool:
        """Reads one request into `self.request`; False when the client has closed or does not speak HTTP."""
        head = self._read_head()
        if head is None:
            return False
        lines = head.decode("latin-1").split("\r\n")
        method, target, _ = lines[0].split(" ", 2)
        headers = tuple((name.strip(), value.strip()) for name, _, value in (line.partition(":") for line in lines[1:]))
        length = next((int(value) for name, value in headers if name.lower() == "content-length"), 0)
        raw = self._read_exactly(length)
        if raw is None:
            return False
        self.request = self.server.log(self.number, method, target, headers, raw)
        return True

    def _read_head(self) -> Optional[bytes]:
        while b"\r\n\r\n" not in self._buffer:
            if self._buffer and not self._buffer[:1].isalpha():     # a TLS hello on a plain port, say
                self.server.strangers.append(self._buffer)
                self.send(head_of(Answer(400, (("Connection", "close"),))))
                return None
            if not self._receive():
                return None
        head, _, self._buffer = self._buffer.partition(b"\r\n\r\n")
        return head

    def _read_exactly(self, length: int) -> Optional[bytes]:
        while len(self._buffer) < length:
            if not self._receive():
                return None
        raw, self._buffer = self._buffer[:length], self._buffer[length:]
        return raw

    def _receive(self) -> bool:
        data = self.socket.recv(65536)
        self._buffer += data
        return bool(data)

    # ----- sending --------------------------------------------------------------------------------------------------

    def healthy(self) -> Answer:
        """What the engine would answer to the current request."""
        return self.server.answer_to(self.request)

    def send(self, data: bytes) -> None:
        if data:
            self.socket.sendall(data)

    def send_answer(self, answer: Answer) -> None:
        """The whole answer, on its schedule if it has one; counted before its last write."""
        answer = self._with_connection_header(answer)
        frames = frames_of(answer)
        if answer.framing == "chunked" and self.server.settings.engine != "sglang":     # SGLang awaits the first piece
            self.send(head_of(answer))
        else:
            frames[0] = head_of(answer) + frames[0]
        for place, frame in enumerate(frames):
            if place < len(answer.at_s):
                self.wait_until(self.request.at + answer.at_s[place])
            if place == len(frames) - 1:
                self.count(answer)
            self.request.sent_at.append(time.perf_counter())
            self.send(frame)
        if answer.framing == "close" or self._is_last():
            self.close()

    def _with_connection_header(self, answer: Answer) -> Answer:
        asked = (self.request.header("connection") or "").lower() == "close"
        return answer.with_header("Connection", "close") if asked or answer.framing == "close" else answer

    def _is_last(self) -> bool:
        """True when the connection ends after this answer: the client asked for it, or it has had its share."""
        share = self.server.settings.requests_per_connection
        asked = (self.request.header("connection") or "").lower() == "close"
        return asked or (share is not None and self.answered + 1 >= share)

    def count(self, answer: Answer) -> None:
        """Lets the server's counters see what the answer generated."""
        if answer.generation is not None and self.request.generation is None:
            self.server.count(self.request, answer.generation)

    def wait_until(self, at: float) -> None:
        """Sleeps until a place on the stopwatch, or until the server stops."""
        left = at - time.perf_counter()
        if left > 0 and self.server.stopping.wait(left):
            raise ConnectionAbortedError("the fake stops")

    def wait(self, seconds: float) -> None:
        self.wait_until(time.perf_counter() + seconds)

    # ----- ending ---------------------------------------------------------------------------------------------------

    def hang(self) -> None:
        """Says nothing more until the client leaves or the server stops."""
        while self.socket.recv(65536):
            pass
        self.request.client_left = not self.server.stopping.is_set()
        self.close()

    def reset(self) -> None:
        """Ends the connection with a RST instead of an orderly FIN."""
        at_once = struct.pack("hh" if os.name == "nt" else "ii", 1, 0)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, at_once)
        self.open = False
        self.socket.close()

    def close(self) -> None:
        """An orderly end; over TLS the client is told."""
        if not self.open:
            return
        self.open = False
        if isinstance(self.socket, ssl.SSLSocket):
            try:
                self.socket.setblocking(False)
                self.socket.unwrap()        # sends close_notify; does not wait for the client's
            except (OSError, ValueError):
                pass
        self.socket.close()

    def interrupt(self) -> None:
        """Wakes whatever the connection's thread waits for; called by another thread."""
        try:
            socket.socket.shutdown(self.socket, socket.SHUT_RDWR)
        except OSError:
            pass


# ======================================================================================================================
# 5. The faults: each a function of the connection whose request is to be spoiled
# ======================================================================================================================


def ok(connection: Connection) -> None:
    connection.send_answer(connection.healthy())


# ----- the connection -------------------------------------------------------------------------------------------------


def refuse(connection: Connection) -> None:
    connection.server.stop_listening()
    connection.reset()


def hang(connection: Connection) -> None:
    connection.hang()


def stall(connection: Connection, after: Optional[int] = None) -> None:
    answer = connection.healthy()
    connection.send(head_of(answer) + b"".join(halves(frames_of(answer), after)[0]))
    connection.hang()


def stall_head(connection: Connection) -> None:
    head = head_of(connection.healthy())
    connection.send(head[:len(head) // 2])
    connection.hang()


def drip(connection: Connection, limit: int = 400, gap_s: float = 0.0) -> None:
    answer = connection.healthy()
    wire = head_of(answer) + b"".join(frames_of(answer))
    for place in range(min(limit, len(wire))):
        connection.wait(gap_s)
        connection.send(wire[place:place + 1])
    connection.count(answer)
    connection.send(wire[limit:])


def reset_before_head(connection: Connection) -> None:
    connection.reset()


def reset_mid_head(connection: Connection) -> None:
    head = head_of(connection.healthy())
    connection.send(head[:len(head) // 2])
    connection.reset()


def reset_after_head(connection: Connection) -> None:
    connection.send(head_of(connection.healthy()))
    connection.reset()


def reset_mid_chunk(connection: Connection, after: Optional[int] = None) -> None:
    send_up_to_mid_piece(connection, connection.healthy(), after)
    connection.reset()


def send_up_to_mid_piece(connection: Connection, answer: Answer, after: Optional[int] = None) -> None:
    """Headers, the pieces before the middle, and half of the next one."""
    first, rest = halves(frames_of(answer), after)
    connection.send(head_of(answer) + b"".join(first) + (rest[0][:len(rest[0]) // 2] if len(first) > 1 else b""))


def close_before_head(connection: Connection) -> None:
    connection.close()


def close_mid_head(connection: Connection) -> None:
    head = head_of(connection.healthy())
    connection.send(head[:len(head) // 2])
    connection.close()


# ----- framing --------------------------------------------------------------------------------------------------------


def lie_about_length(connection: Connection, share: float) -> None:
    """A Content-Length of `share` times the true one, then the true body and the close."""
    answer = replace(connection.healthy(), framing="length")
    answer = answer.with_header("Content-Length", str(int(len(answer.body) * share)))
    connection.send(head_of(answer) + answer.body)
    connection.close()


def cut_chunk(connection: Connection, after: Optional[int] = None) -> None:
    answer = replace(connection.healthy(), framing="chunked")
    send_up_to_mid_piece(connection, answer, after)
    connection.close()


def bad_chunk_size(connection: Connection, after: Optional[int] = None) -> None:
    answer = replace(connection.healthy(), framing="chunked")
    first, rest = halves(answer.pieces, after)
    connection.send(head_of(answer) + b"".join(map(chunk, first)) + b"zz\r\n" + b"".join(rest) + b"\r\n" + LAST_CHUNK)
    connection.close()


def no_last_chunk(connection: Connection) -> None:
    answer = replace(connection.healthy(), framing="chunked")
    connection.count(answer)
    connection.send(head_of(answer) + b"".join(frames_of(answer))[:-len(LAST_CHUNK)])
    connection.close()


def interim_100(connection: Connection) -> None:
    connection.send(b"HTTP/1.1 100 Continue\r\n\r\n")
    ok(connection)


def close_delimited(connection: Connection) -> None:
    connection.send_answer(replace(connection.healthy(), framing="close", version="HTTP/1.0"))


def connection_close(connection: Connection) -> None:
    connection.send_answer(connection.healthy().with_header("Connection", "close"))
    connection.close()


def close_after(connection: Connection) -> None:
    ok(connection)
    connection.close()


def garbage(connection: Connection) -> None:
    connection.send(b"\x15\x03\x01\x00\x02\x02\x16 this is no HTTP at all\r\n\r\n")
    connection.close()


# ----- too much -------------------------------------------------------------------------------------------------------


def endless(connection: Connection, seconds: float = 60.0, gap_s: float = 0.0) -> None:
    answer = replace(connection.healthy(), framing="chunked")
    first, rest = halves(answer.pieces)
    repeat_for(connection, answer, first, rest[0] if answer.streamed else b" and so on" * 100, seconds, gap_s)


def endless_comments(connection: Connection, seconds: float = 60.0, gap_s: float = 0.001) -> None:
    repeat_for(connection, replace(connection.healthy(), framing="chunked"), [], b": keep-alive\n\n", seconds, gap_s)


def repeat_for(connection: Connection, answer: Answer, first: Sequence[bytes], again: bytes, seconds: float,
               gap_s: float) -> None:
    """The head, the first pieces, and one piece again and again until the time is over."""
    end = time.perf_counter() + seconds
    connection.send(head_of(answer) + b"".join(map(chunk, first)))
    while time.perf_counter() < end:
        connection.send(chunk(again))
        connection.wait(gap_s)
    connection.close()


def huge_body(connection: Connection, size: int = 200 * MB) -> None:
    answer = connection.healthy()
    if answer.streamed:
        filler = event({"choices": [{"index": 0, "delta": {"content": "word " * 13000}, "finish_reason": None}]})
    else:
        filler = b"\n" * 65536              # blanks in front: JSON and metrics stay what they are
    send_padded(connection, answer, filler, size)


def send_padded(connection: Connection, answer: Answer, filler: bytes, size: int) -> None:
    """The answer with a filler before its body (a stream: after its first event), repeated up to `size`; never held."""
    first = answer.pieces[0] if answer.streamed else b""
    rest = answer.body[len(first):]
    times = size // len(filler) + 1
    length = len(first) + times * len(filler) + len(rest)
    connection.send(head_of(replace(answer, framing="length").with_header("Content-Length", str(length))) + first)
    for _ in range(times):
        connection.send(filler)
    connection.count(answer)
    connection.send(rest)


def huge_line(connection: Connection, size: int = 200 * MB) -> None:
    answer = replace(connection.healthy(), framing="chunked")
    opening = b'{"choices":[{"index":0,"delta":{"content":"'
    connection.send(head_of(answer) + chunk((b"data: " if answer.streamed else b"") + opening))
    block = chunk(b"x" * 65536)
    for _ in range(size // 65536 + 1):
        connection.send(block)
    connection.send(LAST_CHUNK)
    connection.close()


def huge_head(connection: Connection, size: int = MB) -> None:
    connection.send_answer(connection.healthy().with_header("X-Long", "x" * size))


def endless_head(connection: Connection, seconds: float = 60.0) -> None:
    end = time.perf_counter() + seconds
    connection.send(b"HTTP/1.1 200 OK\r\n")
    while time.perf_counter() < end:
        connection.send(b"X-Again: and again\r\n" * 100)
    connection.close()


# ----- encodings ------------------------------------------------------------------------------------------------------


def gzip_body(connection: Connection) -> None:
    answer = connection.healthy()
    packer = zlib.compressobj(wbits=31)
    pieces = [packer.compress(piece) + packer.flush(zlib.Z_SYNC_FLUSH) for piece in answer.pieces]
    packed = replace(answer, pieces=tuple(pieces[:-1]) + (pieces[-1] + packer.flush(),))
    connection.send_answer(packed.with_header("Content-Encoding", "gzip"))


def gzip_broken(connection: Connection) -> None:
    answer = connection.healthy()
    packed = bytearray(gzip.compress(answer.body))
    middle = len(packed) // 2
    packed[middle:middle + 8] = b"\xff" * 8
    connection.send_answer(replace(answer, pieces=(bytes(packed),), generation=None)
                           .with_header("Content-Encoding", "gzip"))


def gzip_bomb(connection: Connection, size: int = 200 * MB) -> None:
    answer = connection.healthy()
    packer, blanks = zlib.compressobj(9, zlib.DEFLATED, -15), b" " * MB
    block = packer.compress(blanks) + packer.flush(zlib.Z_FULL_FLUSH)       # stands alone, so it can be repeated
    check = 0
    for _ in range(size // MB):
        check = zlib.crc32(blanks, check)
    end = b"\x03\x00" + struct.pack("<II", check, size // MB * MB)
    body = b"\x1f\x8b\x08\0\0\0\0\0\0\x03" + block * (size // MB) + end
    connection.send_answer(replace(answer, framing="length", pieces=(body,), at_s=(), generation=None)
                           .with_header("Content-Encoding", "gzip"))


def wrong_type(connection: Connection) -> None:
    connection.send_answer(connection.healthy().with_header("Content-Type", "application/octet-stream"))


def nul_bytes(connection: Connection) -> None:
    connection.send_answer(spoiled(connection.healthy(), b"\x00"))


def invalid_utf8(connection: Connection) -> None:
    connection.send_answer(spoiled(connection.healthy(), b"\xff\xc3"))


# ----- the wrong content ----------------------------------------------------------------------------------------------

PAGE = b"<!DOCTYPE html><html><head><title>Welcome</title></head><body><script>alert(1)</script></body></html>\n"


def html_200(connection: Connection) -> None:
    connection.send_answer(plain_answer(connection, 200, PAGE, "text/html"))


def plain_answer(connection: Connection, status: int, body: bytes, kind: str, *headers: Tuple[str, str]) -> Answer:
    """An answer of one piece with the engine's usual headers."""
    own = tuple(SERVER_HEADERS[connection.server.settings.engine])
    return Answer(status, own + (("Content-Type", kind),) + headers, (body,))


def json_for_stream(connection: Connection) -> None:
    request = connection.request
    connection.request = replace(request, body={**(request.body or {}), "stream": False})
    answer = connection.healthy()
    connection.request = request
    connection.send_answer(answer)


def truncated_json(connection: Connection) -> None:
    answer = connection.healthy()
    if answer.streamed:
        first, rest = halves(answer.pieces)
        pieces = first + [rest[0][:len(rest[0]) // 2] + b"\n\n"] + rest[1:]
    else:
        pieces = halves([answer.body])[0]
    connection.send_answer(replace(answer, pieces=tuple(pieces)))


def two_objects(connection: Connection) -> None:
    answer = connection.healthy()
    first, rest = halves(answer.pieces)
    if answer.streamed:
        joined = first[-1].rstrip(b"\n") + rest[0][len(b"data: "):]
        pieces = first[:-1] + [joined] + rest[1:]
    else:
        pieces = [answer.body * 2]
    connection.send_answer(replace(answer, pieces=tuple(pieces), at_s=()))


def error_inside(connection: Connection, form: str, done: bool, after: Optional[int] = None) -> None:
    """An error within status 200, after the first half of a stream or in place of an answer of one piece."""
    answer = connection.healthy()
    bad = error_bytes(connection.server.settings.engine, form, answer.streamed)
    pieces = (halves(answer.pieces, after)[0] if answer.streamed else []) + [bad]
    if done and answer.streamed:
        pieces.append(DONE)
    connection.send_answer(replace(answer, pieces=tuple(pieces), at_s=(), generation=None))


def error_bytes(engine: str, form: str, streamed: bool) -> bytes:
    """The error as an object, a string, or an event of its own name."""
    bare = {"code": 500, "message": "boom: the engine has failed", "type": "server_error"}
    if form == "event":
        return b"event: error\n" + event(bare) if streamed else compact(bare).encode()
    error: Any = {"object": "error", **bare} if engine == "sglang" and form == "object" else bare
    value = {"error": "boom: the engine has failed" if form == "string" else error}
    return event(value) if streamed else compact(value).encode()


def empty_stream(connection: Connection) -> None:
    connection.send_answer(replace(connection.healthy(), pieces=(), at_s=(), generation=None))


def only_done(connection: Connection) -> None:
    answer = connection.healthy()
    connection.send_answer(replace(answer, pieces=(DONE if answer.streamed else b"{}",), at_s=(), generation=None))


def no_finish(connection: Connection) -> None:
    connection.send_answer(edited(connection.healthy(), without_finish))


def without_finish(value: Dict[str, Any]) -> Optional[Dict[str, Any]]:
    for choice in value.get("choices", ()):
        choice["finish_reason"] = None
    return value


def no_done(connection: Connection) -> None:
    answer = connection.healthy()
    connection.send_answer(replace(answer, pieces=tuple(piece for piece in answer.pieces if piece != DONE)))


def cut_off(connection: Connection) -> None:
    answer = connection.healthy()
    first, rest = halves(answer.pieces)
    pieces = first + ([rest[0][:len(rest[0]) // 2]] if answer.streamed else [])
    connection.send_answer(replace(answer, pieces=tuple(pieces), at_s=(), generation=None))


COUNTS = ("usage", "timings", "metrics", "sglext")


def usage_absent(connection: Connection) -> None:
    connection.send_answer(edited(connection.healthy(), without_counts))


def without_counts(value: Dict[str, Any]) -> Optional[Dict[str, Any]]:
    kept = {key: item for key, item in value.items() if key not in COUNTS}
    return kept if kept.get("choices") or "choices" not in kept else None


def usage_null(connection: Connection) -> None:
    connection.send_answer(edited(connection.healthy(), with_null_counts))


def with_null_counts(value: Dict[str, Any]) -> Optional[Dict[str, Any]]:
    return {**{key: item for key, item in value.items() if key not in COUNTS}, "usage": None}


def usage_wrong(connection: Connection, extra: int = 7) -> None:
    connection.send_answer(edited(connection.healthy(), partial(with_more_tokens, extra=extra)))


def with_more_tokens(value: Dict[str, Any], extra: int) -> Optional[Dict[str, Any]]:
    if value.get("usage"):
        value["usage"]["completion_tokens"] += extra
    return value


# ----- refusals -------------------------------------------------------------------------------------------------------


def say_error(connection: Connection, status: int, message: str, kind: str, *headers: Tuple[str, str],
              param: Optional[str] = None) -> None:
    """An error status with a body in the engine's shape."""
    engine = connection.server.settings.engine
    body = compact(error_of(engine, status, message, kind, param)).encode()
    connection.send_answer(plain_answer(connection, status, body, "application/json", *headers))


def status_400(connection: Connection) -> None:
    say_error(connection, 400, "this request cannot be served", "invalid_request_error")


def parameter_refused(connection: Connection, name: str = "seed") -> None:
    if isinstance(connection.request.body, dict) and name in connection.request.body:
        say_error(connection, 400, f"Unsupported parameter: {name}", "invalid_request_error", param=name)
    else:
        ok(connection)


def status_401(connection: Connection) -> None:
    connection.send_answer(connection.server.unauthorized())


def status_404_html(connection: Connection) -> None:
    connection.send_answer(plain_answer(connection, 404, b"<html><body>nginx 404</body></html>\n", "text/html"))


def status_429(connection: Connection, retry_after: Union[int, str] = 2) -> None:
    say_error(connection, 429, "slow down", "rate_limit_error", ("Retry-After", str(retry_after)))


def status_500(connection: Connection) -> None:
    connection.send_answer(plain_answer(connection, 500, b"Internal Server Error", "text/plain"))


def status_503(connection: Connection, retry_after: Union[int, str] = 2) -> None:
    say_error(connection, 503, "The request queue is full.", "Service Unavailable", ("Retry-After", str(retry_after)))


def loading(connection: Connection) -> None:
    say_error(connection, 503, "Loading model", "unavailable_error")


def redirect(connection: Connection, status: int = 307, to: Optional[str] = None) -> None:
    request, server = connection.request, connection.server
    if to is None and request.target.startswith(server.settings.mount + MOVED):
        return ok(connection)       # it has come where it was sent to
    place = to or server.root + MOVED + request.target[len(server.settings.mount):]
    connection.send_answer(plain_answer(connection, status, b"", "text/plain", ("Location", place)))


MOVED = "/moved"        # every path answers below this one too


def redirect_other(connection: Connection, to: str = "http://elsewhere.invalid/v1/chat/completions") -> None:
    redirect(connection, 307, to)


def redirect_loop(connection: Connection) -> None:
    redirect(connection, 307, connection.server.origin + connection.request.target)


# ----- /metrics -------------------------------------------------------------------------------------------------------


def metrics_restart(connection: Connection) -> None:
    connection.server.restart()
    ok(connection)


def metrics_restart_hidden(connection: Connection) -> None:
    connection.server.counters.started_at += 1000
    ok(connection)


def metrics_json_string(connection: Connection) -> None:
    answer = connection.healthy()
    connection.send_answer(replace(answer, pieces=(json.dumps(answer.body.decode("utf-8", "replace")).encode(),)))


def metrics_openmetrics(connection: Connection) -> None:
    answer = connection.healthy()
    page = re.sub(rb"(?m)^(# (?:HELP|TYPE) \S+?)_total ", rb"\1 ", answer.body) + b"# EOF\n"
    kind = "application/openmetrics-text; version=1.0.0; charset=utf-8"
    connection.send_answer(replace(answer, pieces=(page,)).with_header("Content-Type", kind))


def metrics_huge(connection: Connection, size: int = 50 * MB) -> None:
    lines = b"".join(b'some_other_bucket{handler="/v1/x%d",le="+Inf"} %d.0\n' % (n, n) for n in range(1200))
    send_padded(connection, connection.healthy(), lines, size)


def metrics_binary(connection: Connection) -> None:
    connection.send_answer(replace(connection.healthy(), pieces=(bytes(range(256)) * 40,)))


def metrics_empty(connection: Connection) -> None:
    connection.send_answer(replace(connection.healthy(), pieces=(b"",)))


def metrics_absent(connection: Connection) -> None:
    connection.send_answer(connection.server.not_found())


def metrics_off(connection: Connection) -> None:
    say_error(connection, 501, "This server does not support metrics endpoint. Start it with `--metrics`",
              "not_supported_error")


# ----- the table ------------------------------------------------------------------------------------------------------

Fault = Callable[..., None]
Step = Union[str, Tuple[str, Mapping[str, Any]], Fault]

FAULTS: Dict[str, Fault] = {
    "ok": ok, "refuse": refuse, "hang": hang, "stall": stall, "stall_head": stall_head, "drip": drip,
    "reset_before_head": reset_before_head, "reset_mid_head": reset_mid_head, "reset_after_head": reset_after_head,
    "reset_mid_chunk": reset_mid_chunk, "close_before_head": close_before_head, "close_mid_head": close_mid_head,
    "length_long": partial(lie_about_length, share=1.5), "length_short": partial(lie_about_length, share=0.5),
    "cut_chunk": cut_chunk, "bad_chunk_size": bad_chunk_size, "no_last_chunk": no_last_chunk,
    "endless": endless, "endless_comments": endless_comments, "huge_body": huge_body, "huge_line": huge_line,
    "huge_head": huge_head, "endless_head": endless_head, "garbage": garbage, "interim_100": interim_100,
    "close_delimited": close_delimited, "connection_close": connection_close, "close_after": close_after,
    "gzip": gzip_body, "gzip_broken": gzip_broken, "gzip_bomb": gzip_bomb, "wrong_type": wrong_type,
    "html_200": html_200, "json_for_stream": json_for_stream, "truncated_json": truncated_json,
    "two_objects": two_objects, "nul_bytes": nul_bytes, "invalid_utf8": invalid_utf8,
    "error_object": partial(error_inside, form="object", done=False),
    "error_object_done": partial(error_inside, form="object", done=True),
    "error_string": partial(error_inside, form="string", done=False),
    "error_string_done": partial(error_inside, form="string", done=True),
    "error_event": partial(error_inside, form="event", done=False),
    "error_event_done": partial(error_inside, form="event", done=True),
    "error_first": partial(error_inside, form="object", done=True, after=0),
    "empty_stream": empty_stream, "only_done": only_done, "no_finish": no_finish, "no_done": no_done,
    "cut_off": cut_off, "usage_absent": usage_absent, "usage_null": usage_null, "usage_wrong": usage_wrong,
    "status_400": status_400, "parameter_refused": parameter_refused, "status_401": status_401,
    "status_404_html": status_404_html, "status_429": status_429, "status_500": status_500, "status_503": status_503,
    "loading": loading, "redirect": redirect, "redirect_308": partial(redirect, status=308),
    "redirect_other": redirect_other, "redirect_loop": redirect_loop,
    "metrics_restart": metrics_restart, "metrics_restart_hidden": metrics_restart_hidden,
    "metrics_json_string": metrics_json_string, "metrics_openmetrics": metrics_openmetrics,
    "metrics_huge": metrics_huge, "metrics_binary": metrics_binary, "metrics_empty": metrics_empty,
    "metrics_absent": metrics_absent, "metrics_off": metrics_off,
}

# What a correct client makes of a fault, as the table at the top says; all others fail the request.
WHOLE = frozenset(re.findall(r"(?m)^  (\w+) +whole  ", __doc__ or ""))
EITHER = frozenset(re.findall(r"(?m)^  (\w+) +either  ", __doc__ or ""))
METRICS_FAULTS = tuple(name for name in FAULTS if name.startswith("metrics_"))     # mean something for /metrics alone
CHAT_FAULTS = tuple(name for name in FAULTS if name not in METRICS_FAULTS)         # mean something for every request
# Only the client's own limits end these.
SILENT = frozenset(("hang", "stall", "stall_head", "endless", "endless_comments", "endless_head"))


def named(step: Step) -> Tuple[str, Fault]:
    """A step's name, for the log, and what it does."""
    if isinstance(step, str):
        return step, FAULTS[step]
    if isinstance(step, tuple):
        name, options = step
        return name, partial(FAULTS[name], **options)
    return getattr(step, "__name__", "function"), step


# ----- recorded answers -----------------------------------------------------------------------------------------------


def replay(name: str, piece_bytes: Optional[int] = None) -> Fault:
    """A step that answers with a recorded file; `piece_bytes` cuts a .sse body into writes of that size."""
    path = name if os.path.exists(name) else os.path.join(CASES, name)
    with open(path, "rb") as file:
        data = file.read()

    def replayed(connection: Connection) -> None:
        if path.endswith(".http"):
            connection.send(data)
            connection.close()
        else:
            connection.send_answer(recorded_answer(path, data, piece_bytes))
    return replayed


def recorded_answer(path: str, data: bytes, piece_bytes: Optional[int] = None) -> Answer:
    """The answer in a recorded file, by the kind of the file."""
    if path.endswith(".timed.jsonl"):
        return timed_answer(data)
    kinds = {".sse": "text/event-stream", ".prom": "text/plain; version=0.0.4", ".json": "application/json"}
    kind = kinds[os.path.splitext(path)[1]]
    size = piece_bytes or len(data) or 1
    pieces = tuple(data[place:place + size] for place in range(0, len(data), size))
    return Answer(200, (("Content-Type", kind),), pieces, "chunked" if path.endswith(".sse") else "length")


def timed_answer(data: bytes) -> Answer:
    """A stream with its times: first line status and headers, then one line a write."""
    first, *writes = [json.loads(line) for line in data.splitlines() if line.strip()]
    return Answer(first["status"], tuple(first["headers"].items()),
                  tuple(base64.b64decode(write["b64"]) for write in writes), "chunked",
                  tuple(write["at_ms"] / 1000 for write in writes))


# ======================================================================================================================
# 6. The server (I/O)
# ======================================================================================================================

Page = Union[bytes, str, Mapping[str, Any], Sequence[Any]]


@dataclass(frozen=True)
class Settings:
    """Everything that may be set when a fake is made; see each field."""

    engine: str = "llama.cpp"
    model: str = "fake-model"
    answer: Callable[[Any, Mapping[str, Any]], Union[str, Say]] = default_answer
    speculation: Optional[Speculation] = None
    alternatives: Alternatives = default_alternatives       # what `logprobs` shows
    cached_tokens: int = 0                  # prompt tokens said to come from the cache
    first_s: float = 0.0                    # from reading a request to its first piece
    gap_s: float = 0.0                      # between two target passes, on an absolute schedule
    context: int = 4096
    slots: int = 4
    version: Optional[str] = None
    dev_mode: bool = False                  # vLLM: /server_info exists
    key: Optional[str] = None               # the API key that is wanted
    refuses: Sequence[str] = ()             # parameters answered with a 400 that names them
    pages: Mapping[str, Page] = field(default_factory=dict)     # path -> what GET answers instead
    metrics: bool = True
    metrics_pages: Sequence[Union[bytes, str]] = ()     # pages (bytes, or files of the cases) instead of the counters
    pages_turn: Optional[int] = None        # the pages turn after so many chat answers; None: at every scrape
    requests_per_connection: Optional[int] = None       # then the connection closes unannounced
    mount: str = ""                         # everything lies below this path
    tls: bool = False
    host: str = "127.0.0.1"
    faults: Mapping[str, Union[str, Sequence[Step]]] = field(default_factory=dict)  # where -> steps; a name: always


Where = Union[str, Callable[[Request], bool]]


class Script:
    """Steps for the requests that match, in order of arrival; `then` for all later ones."""

    def __init__(self, where: Where, steps: Sequence[Step], then: Step) -> None:
        self.where = where
        self.left = deque(steps)
        self.then = then

    def matches(self, request: Request) -> bool:
        if callable(self.where):
            return request.kind != "connect" and self.where(request)
        if self.where.startswith("/"):
            return request.path == self.where
        return self.where == request.kind or (self.where == "*" and request.kind != "connect")

    def next(self) -> Step:
        return self.left.popleft() if self.left else self.then


class FakeServer:
    """A fake on a free port of loopback; see the top of this file."""

    def __init__(self, engine: str = "llama.cpp", **settings: Any) -> None:
        self.settings = Settings(engine=engine, **settings)
        if engine not in ENGINES:
            raise ValueError(f"engine is one of {ENGINES}")
        self.requests: List[Request] = []       # all requests, in order of arrival
        self.counters = Counters()
        self.strangers: List[bytes] = []        # what came instead of HTTP
        self.errors: List[Exception] = []       # raised by a test's own functions, in our threads
        self.connections = 0                    # accepted so far
        self.now_in_flight = 0                  # chat requests being answered
        self.most_in_flight = 0
        self.stopping = threading.Event()
        self.port = 0
        self.cafile = CERT
        self._lock = threading.Lock()
        self._scripts: List[Script] = []
        self._scrapes = 0
        self._open: List[Connection] = []
        self._threads: List[threading.Thread] = []
        for where, steps in self.settings.faults.items():
            self.script(where, [] if isinstance(steps, str) else steps, steps if isinstance(steps, str) else "ok")

    # ----- where it is ----------------------------------------------------------------------------------------------

    @property
    def origin(self) -> str:
        host = f"[{self.settings.host}]" if ":" in self.settings.host else self.settings.host
        return f"{'https' if self.settings.tls else 'http'}://{host}:{self.port}"

    @property
    def root(self) -> str:
        return self.origin + self.settings.mount

    @property
    def url(self) -> str:
        """The base URL as a client wants it."""
        return self.root + "/v1"

    @property
    def chats(self) -> List[Request]:
        """The chat requests, in order of arrival."""
        return [request for request in self.requests if request.kind == "chat"]

    # ----- scripts --------------------------------------------------------------------------------------------------

    def script(self, where: Where, steps: Sequence[Step] = (), then: Step = "ok") -> Script:
        """Plans what happens to the requests that match; the newest matching script wins."""
        script = Script(where, list(steps), then)
        with self._lock:
            self._scripts.insert(0, script)
        return script

    def step_for(self, request: Request) -> Step:
        with self._lock:
            return next((script.next() for script in self._scripts if script.matches(request)), "ok")

    def restart(self) -> None:
        """The counters of a process that has just started again."""
        with self._lock:
            self.counters = Counters(started_at=self.counters.started_at + 1000)

    def strangers_generate(self, tokens: int, requests: int = 1) -> None:
        """Moves the counters as if somebody else had used the server."""
        with self._lock:
            self.counters.requests += requests
            self.counters.completion_tokens += tokens

    # ----- life -----------------------------------------------------------------------------------------------------

    def start(self) -> "FakeServer":
        self._wake, self._woken = socket.socketpair()
        self._listener = bound_socket(self.settings.host, 0)
        self._listener.listen(512)
        self.port = self._listener.getsockname()[1]
        self._listening = self._wanted = True
        self._settled = threading.Event()
        if self.settings.tls:
            self.tls_context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            self.tls_context.load_cert_chain(CERT, KEY)
        self._acceptor = threading.Thread(target=self._accept, name="fake-accept", daemon=True)
        self._acceptor.start()
        return self

    def stop(self) -> None:
        """Ends everything; afterwards no thread and no socket of the fake is left."""
        self.stopping.set()
        self._wake.send(b"!")
        self._acceptor.join(5)
        with self._lock:
            for connection in self._open:
                connection.interrupt()
        for thread in self._threads:
            thread.join(5)
        self._wake.close()
        self._woken.close()
        left = [thread.name for thread in self._threads + [self._acceptor] if thread.is_alive()]
        if left:
            raise RuntimeError(f"the fake's threads do not end: {left}")

    def __enter__(self) -> "FakeServer":
        return self.start()

    def __exit__(self, kind: Any, *_: Any) -> None:
        self.stop()
        if self.errors and kind is None:
            raise self.errors[0]

    def stop_listening(self) -> None:
        """From now on connects are refused; the port stays ours."""
        self._switch(False)

    def listen_again(self) -> None:
        self._switch(True)

    def _switch(self, wanted: bool) -> None:
        """Tells the accepting thread to open or close the listening socket, and waits until it has."""
        self._settled.clear()
        if self.stopping.is_set():
            return
        self._wanted = wanted
        self._wake.send(b"?")
        self._settled.wait(5)

    def _accept(self) -> None:
        while not self.stopping.is_set():
            listening = [self._listener] if self._listening else []
            ready, _, _ = select.select([self._woken] + listening, [], [])
            if listening and listening[0] in ready:
                self._welcome()
            if self._woken in ready:
                self._woken.recv(100)
                self._settle()
        self._settled.set()
        self._listener.close()

    def _settle(self) -> None:
        """Opens or closes the listening socket as wanted. Closed, its port stays bound, so nobody else takes it."""
        if self._listening != self._wanted:
            if self._listening:
                self._listener.close()
                self._listener = bound_socket(self.settings.host, self.port)
            else:
                self._listener.listen(512)
            self._listening = self._wanted
        self._settled.set()

    def _welcome(self) -> None:
        accepted, _ = self._listener.accept()
        accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.connections += 1
        connection = Connection(self, accepted, self.connections)
        thread = threading.Thread(target=self._run, args=(connection,), name=f"fake-{connection.number}", daemon=True)
        with self._lock:
            self._open.append(connection)
            self._threads = [old for old in self._threads if old.is_alive()] + [thread]
            thread.start()

    def _run(self, connection: Connection) -> None:
        connection.serve()
        with self._lock:
            self._open.remove(connection)

    # ----- what it saw ----------------------------------------------------------------------------------------------

    def log(self, connection: int, method: str, target: str, headers: Headers, raw: bytes) -> Request:
        """Writes a request that has just been read into the log."""
        at = time.perf_counter()
        path = target.partition("?")[0]
        path = path[len(self.settings.mount):] if path.startswith(self.settings.mount) else "/outside" + path
        path = path[len(MOVED):] if path.startswith(MOVED + "/") else path
        kind = "chat" if path.endswith("/chat/completions") else path.rstrip("/").rpartition("/")[2]
        try:
            body = json.loads(raw) if raw else None
        except ValueError:
            body = None
        with self._lock:
            request = Request(len(self.requests), connection, method, target, path, kind, headers, raw, body, at)
            self.requests.append(request)
        return request

    def in_flight(self, request: Request) -> "InFlight":
        return InFlight(self, request)

    def count(self, request: Request, generation: Generation) -> None:
        request.generation = generation
        with self._lock:
            self.counters.add(generation, request.streamed)

    # ----- healthy answers ------------------------------------------------------------------------------------------

    def answer_to(self, request: Request) -> Answer:
        """What a healthy server of this engine answers."""
        settings = self.settings
        if settings.key and not self._may_pass(request):
            return self.unauthorized()
        if request.path in settings.pages:
            return self._page(settings.pages[request.path])
        if request.kind == "chat" and request.method == "POST":
            return self._chat(request)
        if request.path == "/metrics" and request.method == "GET":
            return self._metrics()
        facts = Facts(settings.model, settings.context, settings.slots, settings.version or VERSION[settings.engine],
                      settings.speculation, settings.dev_mode, settings.metrics, self.counters.requests > 0)
        page = identity_of(settings.engine, request.path, facts) if request.method == "GET" else None
        return self.not_found() if page is None else self._page(page)

    def _may_pass(self, request: Request) -> bool:
        public = {"llama.cpp": request.path in ("/health", "/v1/health"),
                  "sglang": request.path.startswith(("/health", "/metrics"))}
        free = public.get(self.settings.engine, not request.path.startswith("/v1"))
        return free or request.header("authorization") == f"Bearer {self.settings.key}"

    def unauthorized(self) -> Answer:
        if self.settings.engine in ("vllm", "sglang"):
            return self._page({"error": "Unauthorized"}, 401)
        return self._page(error_of(self.settings.engine, 401, "Invalid API Key", "authentication_error"), 401)

    def not_found(self) -> Answer:
        if self.settings.engine in ("vllm", "sglang"):
            return self._page({"detail": "Not Found"}, 404)
        return self._page(error_of(self.settings.engine, 404, "File Not Found", "not_found_error"), 404)

    def _page(self, page: Page, status: int = 200, kind: str = "application/json") -> Answer:
        text = page if isinstance(page, (bytes, str)) else compact(page)
        data = text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass")
        return Answer(status, tuple(SERVER_HEADERS[self.settings.engine]) + (("Content-Type", kind),), (data,))

    def _metrics(self) -> Answer:
        """The page of metrics: from the files, or from the counters, or the engine's way to say that there is none."""
        engine, kind = self.settings.engine, METRICS_TYPE[self.settings.engine]
        if self.settings.metrics_pages:
            return self._page(self._turned_page(), kind=kind)
        if not self.settings.metrics or engine == "plain":
            if engine != "llama.cpp":
                return self.not_found()
            message = "This server does not support metrics endpoint. Start it with `--metrics`"
            return self._page(error_of(engine, 501, message, "not_supported_error"), 501)
        k = self.settings.speculation.k if self.settings.speculation else 0
        with self._lock:
            answer = self._page(metrics_of(engine, self.counters, self.settings.model, k), kind=kind)
        if engine == "llama.cpp":
            answer = answer.with_header("Process-Start-Time-Unix", str(int(self.counters.started_at)))
        return answer

    def _turned_page(self) -> bytes:
        pages = self.settings.metrics_pages
        with self._lock:
            turn = self._scrapes if self.settings.pages_turn is None else (
                self.counters.requests // max(self.settings.pages_turn, 1))
            self._scrapes += 1
        return page_bytes(pages[min(turn, len(pages) - 1)])

    def _chat(self, request: Request) -> Answer:
        problem = self._problem_of(request)
        if problem is not None:
            return problem
        engine, body = self.settings.engine, request.body
        made = self.generate(request)
        if not request.streamed:
            whole = self._page(body_of(engine, made, body, self.settings.alternatives))
            at_s = (self.settings.first_s + self.settings.gap_s * len(made.steps),)
            return replace(whole, at_s=at_s if any(at_s) else (), generation=made)
        pieces = tuple(stream_of(engine, made, body, self.settings.alternatives))
        kind = "text/event-stream" + ("" if engine == "llama.cpp" else "; charset=utf-8")
        headers = tuple(SERVER_HEADERS[engine]) + (("Content-Type", kind),)
        return Answer(200, headers, pieces, "chunked", self._times(made, len(pieces)), made)

    def _times(self, made: Generation, pieces: int) -> Tuple[float, ...]:
        """When each piece of a stream is due: all tokens of a target pass at once."""
        if not (self.settings.first_s or self.settings.gap_s):
            return ()
        one_by_one = self.settings.engine == "llama.cpp"
        passes = [number for number, group in enumerate(made.groups()) for _ in (group if one_by_one else group[:1])]
        passes = ([] if one_by_one else [0]) + passes
        passes += [passes[-1] if passes else 0] * (pieces - len(passes))
        return tuple(self.settings.first_s + self.settings.gap_s * number for number in passes)

    def _problem_of(self, request: Request) -> Optional[Answer]:
        """The refusal of a request that the engine would not take, None for a good one."""
        engine, body = self.settings.engine, request.body
        if not isinstance(body, dict) or not isinstance(body.get("messages"), list):
            return self._bad_request("'messages' is required, in a JSON object")
        if engine == "vllm" and body.get("model") != self.settings.model:
            message = f"The model `{body.get('model')}` does not exist. Valid aliases: {self.settings.model}."
            return self._page(error_of(engine, 404, message, "NotFoundError", "model"), 404)
        refused = next((name for name in self.settings.refuses if name in body), None)
        if refused is not None:
            return self._bad_request(f"Unsupported parameter: {refused}", refused)
        if engine == "sglang" and request.streamed and body.get("return_token_ids"):
            return self._bad_request("return_token_ids is not supported with stream")
        if engine == "vllm" and self.settings.speculation and body.get("min_p"):
            return self._bad_request("min_p is not supported with speculative decoding", "min_p")
        tokens = prompt_words(body["messages"])
        if tokens > self.settings.context:
            return self._bad_request(f"request ({tokens} tokens) exceeds the available context size "
                                     f"({self.settings.context} tokens)")
        return None

    def _bad_request(self, message: str, param: Optional[str] = None) -> Answer:
        kind = {"vllm": "BadRequestError", "sglang": "BadRequestError"}.get(self.settings.engine,
                                                                         "invalid_request_error")
        return self._page(error_of(self.settings.engine, 400, message, kind, param), 400)

    def generate(self, request: Request) -> Generation:
        """The words of an answer, cut at the request's limit, with the passes that they took."""
        settings, body = self.settings, request.body
        messages, begun = body["messages"], ""
        if settings.engine == "llama.cpp" and messages and messages[-1].get("role") == "assistant":    # it goes on with what is begun
            messages, begun = messages[:-1], messages[-1]["content"]
        said = settings.answer(messages, body)
        said = Say(said) if isinstance(said, str) else said
        tokens = tokens_of(said)[len(words_of(begun)):]
        limit = body.get("max_completion_tokens") or body.get("max_tokens") or settings.context
        reason = said.finish_reason or ("tool_calls" if said.tool_calls else "stop")
        if len(tokens) > limit:
            tokens, reason = tokens[:limit], "length"
        prompt, spec = prompt_words(body["messages"]), settings.speculation
        steps = verify_steps(len(tokens), spec.accepts if spec else (), spec.k if spec else 0)
        model = str(body.get("model")) if settings.engine == "sglang" else settings.model
        return Generation(f"chatcmpl-{request.order:06d}", model, tokens, prompt, min(settings.cached_tokens, prompt),
                          steps, spec.k if spec else 0, reason)


class InFlight:
    """While a chat request is being answered: how many are at once."""

    def __init__(self, server: FakeServer, request: Request) -> None:
        self.server = server
        self.weight = int(request.kind == "chat")

    def __enter__(self) -> None:
        with self.server._lock:
            self.server.now_in_flight += self.weight
            self.server.most_in_flight = max(self.server.most_in_flight, self.server.now_in_flight)

    def __exit__(self, *_: Any) -> None:
        with self.server._lock:
            self.server.now_in_flight -= self.weight


def bound_socket(host: str, port: int) -> socket.socket:
    """A TCP socket bound to an address, not yet listening: connects to it are refused."""
    bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    if os.name != "nt":
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    bound.bind((host, port))
    return bound


def page_bytes(page: Union[bytes, str]) -> bytes:
    """A page given as bytes, or by the name of a file (bare: among the cases)."""
    if isinstance(page, bytes):
        return page
    with open(page if os.path.exists(page) else os.path.join(CASES, page), "rb") as file:
        return file.read()
