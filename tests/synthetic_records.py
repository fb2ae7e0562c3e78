"""Notebook records and runs as eight configurations would leave them: invented, the same on every call.

Not a test. `notebook()` gives the records of the tutorial's experiment (7 configurations and the baseline, 3 workloads,
3 levels), `suite_notebook()` those of the lesson's four rows, `runs()` the evidence with texts behind `notebook()`.
"""
from __future__ import annotations

import functools
import random
from typing import Any, Dict, List, Optional, Sequence

import measure_speculative as ms

MODEL = "Qwen3-8B"
DIGEST = "3f1c" * 16
# name: (method, k, cost of a drafted token in target steps, acceptance rate on chat / agent / math)
CONFIGURATIONS = {
    "ngram": ("ngram", 4, 0.004, (0.10, 0.42, 0.20)),
    "suffix": ("suffix", 16, 0.002, (0.05, 0.20, 0.12)),
    "eagle3-public": ("eagle3", 3, 0.08, (0.48, 0.52, 0.50)),
    "eagle3-finetuned": ("eagle3", 3, 0.08, (0.52, 0.60, 0.55)),
    "dflash-public": ("dflash", 15, 0.006, (0.33, 0.48, 0.46)),
    "dflash-finetuned": ("dflash", 15, 0.006, (0.34, 0.66, 0.46)),
    "dspark-trained": ("dspark", 7, 0.05, (0.30, 0.55, 0.34)),
}
WORKLOADS = ("chat", "agent", "math")
LEVELS = (1, 4, 16)
PROMPTS = 26


def notebook(configurations: Sequence[str] = tuple(CONFIGURATIONS), levels: Sequence[int] = LEVELS) -> List[Dict[str, Any]]:
    """The records of one run: a pass a line, a comparison a line."""
    luck = random.Random(17)
    records = []
    for workload in WORKLOADS:
        for level in levels:
            base = endpoint("baseline", workload, level, 46.0 / (1 + 0.03 * level), luck)
            records.append(base)
            for name in configurations:
                speedup = _speedup(name, workload, level)
                spec = endpoint(name, workload, level, base["decode_tokens_per_s"]["mean"] * speedup, luck)
                records += [spec, comparison(base, spec, speedup, luck)]
    return records


def suite_notebook() -> List[Dict[str, Any]]:
    """The records of the lesson's suite: copy, closed and open at 1, mixed at 10."""
    luck = random.Random(5)
    records = []
    for workload, level, speedup in (("copy", 1, 2.31), ("closed", 1, 1.22), ("open", 1, 0.93), ("mixed", 10, 0.81)):
        base = endpoint("baseline", workload, level, 41.7, luck, run="lesson")
        spec = endpoint("ngram", workload, level, 41.7 * speedup, luck, run="lesson")
        for record in (base, spec):
            record["server"]["context_tokens"] = 4096
        records += [base, spec, comparison(base, spec, speedup, luck)]
    return records


def lesson_lines() -> List[Dict[str, Any]]:
    """Three records with the keys of the lesson's own script and no other."""
    shared = {"lab": ms.LAB, "engine": "llama.cpp", "engine_version": "b6000", "model": "local-chat",
              "recorded_at": "2025-05-02T09:00:00Z"}
    records = []
    for name, speed in (("baseline", 40.0), ("speculative", 60.0)):
        records.append(dict(
            shared, label=f"old-run/{name}", base_url="http://127.0.0.1:8080/v1", requests=12, completed=12, failed=0,
            first_error=None, wall_s=2304 / speed, latency_s={"p50": 4.6, "mean": 4.7, "max": 4.9}, output_tokens=2304,
            output_tokens_per_s=speed, tokens_counted_by_server=12, server_timings_sample=None, spec_metrics_delta={},
            max_tokens=192, repeats=1, prompt_count=12))
    divergence = {"prompt_index": 4, "first_difference_at_char": 31, "baseline_tail": "the sea", "speculative_tail": "a sea"}
    records.append(dict(
        shared, label="old-run/comparison", baseline_tokens_per_s=40.0, speculative_tokens_per_s=60.0,
        text_comparison={"compared": 12, "identical": 11, "divergent": 1, "divergences": [divergence]}))
    return records


def endpoint(name: str, workload: str, level: int, speed: float, luck: random.Random, run: str = "l40s") -> Dict[str, Any]:
    """One pass of one server at `speed` tokens a second and request."""
    tokens = PROMPTS * 230 + luck.randrange(400)
    throughput = speed * level * 0.93
    method, k, _, rates = CONFIGURATIONS.get(name, (None, None, None, None))
    return {
        "schema": 1, "kind": "endpoint", "lab": ms.LAB, "label": f"{run}/{name}", "run": run, "server_label": name,
        "purpose": "timed", "base_url": "http://127.0.0.1:8000/v1", "model": MODEL, "engine": "vllm",
        "engine_version": "0.32.0", "workload": workload, "concurrency": level, "prompts_sha256": DIGEST,
        "requests": PROMPTS, "completed": PROMPTS, "failed": 0, "first_error": None,
        "wall_s": round(tokens / throughput, 4), "latency_s": _spread(230 / speed, luck),
        "e2el_s": _spread(230 / speed, luck), "ttft_s": _spread(0.035 + 0.004 * level, luck),
        "tpot_s": _spread(1 / speed, luck), "decode_tokens_per_s": {"mean": round(speed, 3), "p50": round(speed * 0.99, 3)},
        "output_tokens": tokens, "output_tokens_per_s": round(throughput, 3), "tokens_counted_by_server": PROMPTS,
        "server_timings_sample": None, "spec_metrics_delta": {}, "max_tokens": 256, "repeats": 1, "prompt_count": PROMPTS,
        "acceptance": _acceptance(rates[WORKLOADS.index(workload)] if rates and workload in WORKLOADS else 0.4, k, tokens)
        if k else {"source": None, "missing": "the server does not speculate"},
        "accuracy": {"correct": 17 + luck.randrange(2), "of": PROMPTS} if workload == "math" else None,
        "server": {"engine": "vllm", "version": "0.32.0", "context_tokens": 8192, "slots": 64, "kv_cache_tokens": 201000,
                   "speculating": bool(k), "speculation": {"method": method, "draft_tokens": k, "drafter": None}},
        "interrupted": False, "load_kept": 0.997, "client": {"python": "3.12.4", "platform": "Linux x86_64"},
        "track": "nvidia", "caveats": [], "tool_version": "1.0.0", "run_file": "labbook.runs/20260101T120000Z-l40s.jsonl",
        "recorded_at": "2026-01-01T12:00:00Z"}


def comparison(base: Dict[str, Any], spec: Dict[str, Any], speedup: float, luck: random.Random) -> Dict[str, Any]:
    """One configuration against the baseline."""
    name, workload, level = spec["server_label"], spec["workload"], spec["concurrency"]
    agreement = {"agent": 0.99, "math": 0.71, "chat": 0.57}.get(workload, 0.97)
    identical = min(PROMPTS, round(PROMPTS * (agreement ** 3) + luck.randrange(2)))
    differences = [divergence(i, luck) for i in range(min(5, PROMPTS - identical))]
    shared = {key: base[key] for key in ("lab", "engine", "engine_version", "model", "recorded_at", "prompts_sha256",
                                         "tool_version", "run_file", "workload", "concurrency", "run", "schema")}
    throughput = spec["output_tokens_per_s"] / base["output_tokens_per_s"]
    return dict(
        shared, kind="comparison", label=f"{base['run']}/comparison", baseline_label="baseline", speculative_label=name,
        baseline_tokens_per_s=base["output_tokens_per_s"], speculative_tokens_per_s=spec["output_tokens_per_s"],
        text_comparison={"compared": PROMPTS, "identical": identical, "divergent": PROMPTS - identical,
                         "divergences": differences},
        throughput_ratio=_ratio(throughput), decode_ratio=_ratio(speedup), self_ratio=_ratio(1.002),
        exact_match=round(identical / PROMPTS, 4), prefix_agreement=agreement,
        noise_floor={"exact_match": round(agreement ** 3, 4), "prefix_agreement": agreement - 0.02, "concurrency": LEVELS[-1]},
        verdict={"speed": "faster" if speedup > 1.05 else "slower" if speedup < 0.95 else "not distinguishable",
                 "answers": "rounding only" if differences else "identical",
                 "reasons": [f"decode speed ratio {speedup:.2f}, its interval excludes 1",
                             "every fork lies within the ruler (p99 0.079 nats)"]},
        baseline_accuracy=base["accuracy"], speculative_accuracy=spec["accuracy"],
        ruler={"positions": 319, "median_nats": 0.00001, "p99_nats": 0.079, "max_nats": 0.117},
        smallest_detectable_change=0.23, advice=_advice(name), caveats=_caveats(level),
        break_even=_break_even(name, workload, speedup, spec["acceptance"]))


def divergence(index: int, luck: random.Random) -> Dict[str, Any]:
    """A fork at the place where the answers of `reply` part."""
    before, after = reply(3 * index, "baseline").content or "", reply(3 * index, "ngram").content or ""
    place = next(i for i, (one, other) in enumerate(zip(before, after)) if one != other)
    return {"prompt_index": 3 * index, "prompt_id": f"p{3 * index:02d}", "kind": "fork", "channel": "content",
            "first_difference_at_char": place, "first_difference_at_byte": place, "baseline_tail": before[place:place + 60],
            "speculative_tail": after[place:place + 60], "margin_nats": round(luck.random() * 0.06, 4), "detail": ""}


def runs(configurations: Sequence[str] = tuple(CONFIGURATIONS)) -> List[ms.Run]:
    """One run with the texts of every request."""
    passes = [ms.Pass(name, workload, level, tuple(reply(i, name) for i in range(PROMPTS)), 60.0)
              for workload in WORKLOADS for level in LEVELS for name in ("baseline", *configurations)]
    servers = {name: ms.Server(name, "http://127.0.0.1:8000/v1", "", (), MODEL, "vllm", "0.32.0")
               for name in ("baseline", *configurations)}
    prompts = {f"p{i:02d}": ms.Prompt(f"p{i:02d}", "chat", ({"role": "user", "content": f"Question {i}: what keeps the harbour calm?"},))
               for i in range(PROMPTS)}
    return [ms.Run("l40s", "2026-01-01T12:00:00Z", {}, DIGEST, servers, prompts, tuple(passes),
                   path="labbook.runs/20260101T120000Z-l40s.jsonl")]


@functools.lru_cache(maxsize=None)
def reply(index: int, name: str, words: int = 180) -> ms.Reply:
    """An answer of `words` words; every server but the baseline takes another word a third of the way in."""
    luck = random.Random(index)
    answer = [luck.choice(("harbour", "pilot", "winter", "calm", "the", "and", "a", "keeps", "under")) for _ in range(words)]
    if name != "baseline" and index % 3 == 0:
        answer[words // 3] = "otherwise"
    return ms.Reply(f"p{index:02d}", sent_s=float(index), first_s=index + 0.04, first_answer_s=index + 0.04,
                    last_s=index + 5.0, ended_s=index + 5.001, chunk_at_s=(index + 0.04, index + 5.0), prompt_tokens=30,
                    completion_tokens=230, token_source="usage", content=" ".join(answer), finish_reason="length")


def _speedup(name: str, workload: str, level: int) -> float:
    _, k, cost, rates = CONFIGURATIONS[name]
    yielded = 1 + rates[WORKLOADS.index(workload)] * k
    return round(yielded / (1 + k * cost) / (1 + 0.04 * (level - 1) * (0.5 + k / 16)), 4)


def _ratio(value: float) -> Dict[str, Any]:
    return {"value": round(value, 4), "low": round(value * 0.94, 4), "high": round(value * 1.06, 4), "pairs": PROMPTS}


def _spread(middle: float, luck: random.Random) -> Dict[str, float]:
    middle *= 1 + luck.random() / 50
    return {"p50": round(middle, 6), "p90": round(middle * 1.2, 6), "p99": round(middle * 1.4, 6),
            "mean": round(middle * 1.03, 6), "max": round(middle * 1.5, 6)}


def _acceptance(rate: float, k: int, tokens: int) -> Dict[str, Any]:
    drafts = round(tokens / (1 + rate * k))
    accepted = round(drafts * k * rate)
    falling = [0.8 ** i for i in range(k)]
    by_position = [min(drafts, round(accepted * share / sum(falling))) for share in falling]
    return {"source": "response fields", "drafts": drafts, "draft_tokens": drafts * k, "accepted_tokens": accepted,
            "accepted_by_position": by_position, "acceptance_rate": round(accepted / (drafts * k), 4),
            "acceptance_length": round(1 + accepted / drafts, 4),
            "tokens_per_target_pass": round(tokens / max(1, tokens - accepted), 4), "missing": None}


def _break_even(name: str, workload: str, speedup: float, acceptance: Dict[str, Any]) -> Dict[str, Any]:
    _, k, cost, _ = CONFIGURATIONS[name]
    rate = acceptance["acceptance_rate"]
    drafts = acceptance["drafts"]
    categories = [{"category": category, "pairs": 6, "decode_ratio": _ratio(speedup * share), "acceptance_rate": rate,
                   "exact_match": 0.67} for category, share in (("writing", 0.9), ("coding", 1.15), ("extraction", 1.05))]
    return {"acceptance_by_position": [round(a / drafts, 4) for a in acceptance["accepted_by_position"]],
            "tokens_per_target_pass": acceptance["tokens_per_target_pass"],
            "step_cost": {"value": 1 + k * cost, "low": 1 + k * cost * 0.8, "high": 1 + k * cost * 1.2},
            "draft_cost": {"value": cost, "low": cost * 0.8, "high": cost * 1.2}, "draft_length": k,
            "acceptance_rate": min(0.95, rate + 0.25), "break_even_acceptance": 0.08, "predicted_speedup": {"1": 1.3, "2": 1.5},
            "best_draft_length": 2, "best_speedup": round(speedup * 1.05, 2),
            "crossover": {"concurrency": 22.5, "below": 16, "above": 32} if speedup < 1.2 else None,
            "kv_cache_tokens_lost": 8192, "by_category": categories if workload == "chat" else []}


def _advice(name: str) -> List[str]:
    return ["A draft length of 2 is predicted at 1.41 times; you run 3."] if name.startswith("eagle3") else []


def _caveats(level: int) -> List[Dict[str, Optional[str]]]:
    return [] if level == 1 else [{"sentence": "The server cannot batch more than its slots.",
                                   "remedy": "Start it with more slots, or measure lower levels."}]
