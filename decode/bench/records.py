"""Timed sequences, and the row of a report that is made of them."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from decode.bench.statistics import median_interval, ratio_interval
from decode.trace import Trace

Row = Mapping[str, Any]

BASELINES = {
    "speedup": "autoregressive",
    "speedup_vs_generate": "generate",
    "speedup_vs_assistant": "generate-assistant",
}
"""The method that each ratio of a row divides by; the first is the loop without a drafter."""
DISTINCT = {"alpha", "alpha_se", "accepted_per_tested", "accepted_per_drafted", "tv_spent", "js_distance"}
"""Metrics to which a repeat of a deterministic run adds nothing."""
COLUMNS = (
    "tokens_per_second", "speedup", "speedup_ci95", "speedup_without_prefill",
    "speedup_vs_generate", "speedup_vs_generate_ci95", "speedup_vs_assistant", "speedup_vs_assistant_ci95",
    "predicted_speedup", "accepted_length", "block_efficiency", "block_efficiency_ci95", "alpha", "alpha_se",
    "accepted_per_tested", "accepted_per_drafted", "tv_spent", "js_distance", "accuracy", "accuracy_se",
    "identical_to_target", "identical_share", "drafted_per_round", "rounds", "tokens",
)  # fmt: skip
"""Measured fields of a row; every row has all of them, null if they do not apply."""


@dataclass
class TimedText:
    """One sequence (of a chat all turns) as one method wrote it once."""

    new_ids: list[int] = field(default_factory=list)  # the generated tokens
    seconds: float = 0.0  # from the prompt on; of sequences decoded together, an equal share of each round
    trace: Trace | None = None  # the rounds; None for transformers' own generation
    forwards: int = 0  # target forwards that gave the tokens of transformers' own generation

    def add(self, new_ids: list[int], seconds: float, trace: Trace | None, forwards: int = 0) -> None:
        """Append a turn."""
        self.new_ids, self.seconds = self.new_ids + new_ids, self.seconds + seconds
        self.forwards += forwards
        if self.trace is None or trace is None:
            self.trace = trace
        else:
            self.trace.extend(trace, 0)

    def speed(self, *, prefill: bool = True) -> float:
        """Tokens per second, with or without the reading of the prompt; NaN where that is unknown."""
        if not prefill and self.trace is None:
            return math.nan
        seconds = self.seconds - (0.0 if prefill or self.trace is None else self.trace.prefill_seconds)
        return len(self.new_ids) / seconds if seconds > 0 else math.nan


@dataclass
class Record:
    """All sequences of one method in one suite at one temperature and batch size."""

    texts: list[list[TimedText]] = field(default_factory=list)  # by prompt and repeat
    greedy: bool = False  # equal repeats of a prompt are one observation
    batch_size: int = 1
    # the number of each text's distinct prompt: texts of one prompt are one observation; empty: all prompts differ
    prompts: Sequence[int] = ()

    @property
    def clusters(self) -> Sequence[int]:
        """The number of each text's distinct prompt."""
        return self.prompts or range(len(self.texts))

    def trace(self, *, distinct: bool = False) -> Trace:
        """All rounds, over prompts and repeats; a distinct prompt is one text of standard errors.

        Args:
            distinct: leave out greedy repeats that equal an earlier one of their prompt.
        """
        whole = Trace()
        for cluster, texts in zip(self.clusters, self.texts):
            seen = []
            for text in texts:
                way = text.trace and (text.new_ids, text.trace.drafted, text.trace.accepted)
                if text.trace is None or (distinct and self.greedy and way in seen):
                    continue
                seen.append(way)
                whole.extend(text.trace, cluster)
        return whole

    def sums(self) -> list[list[float]]:
        """Tokens and seconds of each prompt over all repeats."""
        return [[sum(len(t.new_ids) for t in texts), sum(t.seconds for t in texts)] for texts in self.texts]


def paired_ratios(record: Record, base: Record, *, prefill: bool = True) -> list[float]:
    """For each prompt the median over repeats of this method's speed over the other's in the same repeat."""
    return [
        statistics.median(a.speed(prefill=prefill) / b.speed(prefill=prefill) for a, b in zip(ours, theirs))
        for ours, theirs in zip(record.texts, base.texts)
    ]


def measured(record: Record, of: Mapping[str, Record], seed: int) -> dict[str, Any]:
    """The columns of a row that come from the timed sequences: speeds, acceptance and counts.

    At batch size 1 a ratio of speeds is the median over prompts of `paired_ratios`; above, it is the ratio of
    throughputs Σ tokens / Σ seconds. Intervals are over prompts.

    Args:
        record: the method's sequences.
        of: records of the same block by method, for the ratios.
        seed: of the bootstrap.
    """
    every, clusters = [text for texts in record.texts for text in texts], record.clusters
    timed = every
    if record.batch_size == 1:  # of each prompt the repeat of median speed
        timed = [sorted(texts, key=TimedText.speed)[(len(texts) - 1) // 2] for texts in record.texts]
    row: dict[str, Any] = {
        "tokens_per_second": sum(len(text.new_ids) for text in timed) / sum(text.seconds for text in timed),
        "tokens": sum(len(text.new_ids) for text in every),
    }
    for key, base in ((key, of[method]) for key, method in BASELINES.items() if method in of):
        if record.batch_size == 1:
            middle, *ends = median_interval(paired_ratios(record, base), seed=seed)
        else:
            pairs = [a + b for a, b in zip(record.sums(), base.sums())]
            middle, *ends = ratio_interval(clusters, pairs, seed)
        row |= {key: middle, f"{key}_ci95": ends}
        if key == "speedup" and record.batch_size == 1:
            row["speedup_without_prefill"] = median_interval(paired_ratios(record, base, prefill=False))[0]
    if every[0].trace is None:  # of transformers' own methods the length alone is known
        forwards = [[sum(len(t.new_ids) for t in texts), sum(t.forwards for t in texts)] for texts in record.texts]
        middle, *ends = ratio_interval(clusters, forwards, seed)
    else:
        trace = record.trace()
        middle, *ends = ratio_interval(trace.text, [(m + 1, 1) for m in trace.accepted], seed)
        distinct = record.trace(distinct=True).metrics()
        row = trace.metrics() | {key: distinct[key] for key in DISTINCT} | row
    return row | {"accepted_length": middle, "block_efficiency": middle, "block_efficiency_ci95": ends}


def by_category(record: Record, of: Mapping[str, Record], categories: Sequence[str], seed: int) -> list[dict[str, Any]]:
    """`measured` of each category; empty if all prompts are of one."""
    rows: list[dict[str, Any]] = []
    names = list(dict.fromkeys(categories[: len(record.texts)]))
    for name in names if len(names) > 1 else ():
        kept = [i for i in range(len(record.texts)) if categories[i] == name]
        own, *others = [
            Record([one.texts[i] for i in kept], one.greedy, one.batch_size, [one.clusters[i] for i in kept])
            for one in (record, *of.values())
        ]
        rows.append({"category": name, "prompts": len(kept)} | measured(own, dict(zip(of, others)), seed))
    return rows


def analysis(record: Record) -> dict[str, Any]:
    """Acceptance by position and draft lengths, for report.json and plots."""
    trace = record.trace()
    if not trace.rounds:
        return {}
    lengths = {str(k): count for k, count in sorted(Counter(trace.drafted).items())}
    positions = record.trace(distinct=True).acceptance_by_position()
    return {"acceptance_by_position": positions, "draft_lengths": lengths}


def differing(rows: Sequence[Row]) -> list[str]:
    """Names of lossless methods of ours whose greedy texts are not all those of `model.generate`."""
    wrong = (r for r in rows if r["lossless"] and not r["baseline"] and r.get("identical_to_target") is False)
    return list(dict.fromkeys(r["name"] for r in wrong))


def drafting(rows: Sequence[Row], lossless: bool | None = None) -> list[Row]:
    """Our own methods that draft and have a speedup, the fastest first; `lossless` selects exact or relaxed rules."""
    ours = [r for r in rows if r.get("speedup") and not r["baseline"] and r["method"] != "autoregressive"]
    return sorted((r for r in ours if lossless in (None, bool(r["lossless"]))), key=lambda r: -r["speedup"])


def fastest_lossless(rows: Sequence[Row], temperature: float | None = None) -> Row | None:
    """The fastest lossless method that drafts, at one temperature if it is given.

    Methods whose greedy texts differ from `model.generate`'s do not count; none does if the texts of the loop without a
    draft differ, since the forward itself then gives other logits.
    """
    wrong = differing(rows)
    if any(r["method"] == "autoregressive" and r["name"] in wrong for r in rows):
        return None
    known = (r for r in drafting(rows, lossless=True) if r["name"] not in wrong)
    return next((r for r in known if temperature in (None, r["temperature"])), None)
