"""Timed sequences and the rows that reports show of them."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from decode.bench.statistics import median_interval, ratio_interval, throughput_interval
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
    "tokens_per_second", "tokens_per_second_ci95", "speedup", "speedup_ci95",
    "speedup_without_prefill", "speedup_vs_generate", "speedup_vs_generate_ci95", "speedup_vs_assistant",
    "speedup_vs_assistant_ci95", "predicted_speedup", "accepted_length", "block_efficiency", "block_efficiency_ci95",
    "alpha", "alpha_se", "alpha_ci95", "accepted_per_tested", "accepted_per_drafted", "tv_spent", "js_distance",
    "accuracy", "accuracy_se", "identical_to_target", "identical_share", "drafted_per_round",
    "seconds_per_token", "rounds", "tokens",
)  # fmt: skip
"""Measured fields of a row; every row has all of them, null if they do not apply."""


@dataclass
class TimedText:
    """One sequence as one method wrote it once."""

    new_ids: list[int]  # the generated tokens
    seconds: float  # wall time from the prompt on; of sequences decoded together, an equal share of each round
    prefill: float | None = None  # seconds until the first round; None if unknown
    forwards: int = 0  # target forwards that gave the tokens
    trace: Trace | None = None  # the rounds; None for transformers' own generation
    latency: float = math.nan  # wall time from the prompt to the end, other sequences included

    @property
    def speed(self) -> float:
        """Tokens per second."""
        return len(self.new_ids) / self.seconds if self.seconds else math.nan

    @property
    def decoding_speed(self) -> float:
        """Tokens per second after the prefill."""
        rest = self.seconds - (self.prefill or 0.0)
        return len(self.new_ids) / rest if self.prefill is not None and rest > 0 else math.nan

    @classmethod
    def joined(cls, turns: Sequence[TimedText]) -> TimedText:
        """The turns of a chat as one sequence."""
        if len(turns) == 1:
            return turns[0]
        whole, known = Trace(), turns[0]
        for turn in turns:
            if turn.trace is not None:
                whole.extend(turn.trace, 0)
        return cls(
            [token for turn in turns for token in turn.new_ids],
            sum(turn.seconds for turn in turns),
            None if known.prefill is None else sum(turn.prefill or 0.0 for turn in turns),
            sum(turn.forwards for turn in turns),
            None if known.trace is None else whole,
            sum(turn.latency for turn in turns),
        )


@dataclass
class Record:
    """All sequences of one method in one suite at one temperature and batch size."""

    texts: list[list[TimedText]] = field(default_factory=list)  # by prompt and repeat
    greedy: bool = False  # equal repeats of a prompt are one observation
    batch_size: int = 1
    clusters: list[int] = field(
        default_factory=list
    )  # of each text, the number of its distinct prompt; empty: all differ

    def cluster(self, i: int) -> int:
        """Number of the distinct prompt of text i: texts of one prompt are one observation."""
        return self.clusters[i] if self.clusters else i

    def part(self, kept: Sequence[int]) -> Record:
        """The record of some of the prompts."""
        clusters = [self.clusters[i] for i in kept] if self.clusters else []
        return Record([self.texts[i] for i in kept], self.greedy, self.batch_size, clusters)

    def trace(self, *, distinct: bool = False) -> Trace:
        """All rounds, over prompts and repeats; a distinct prompt is one text of standard errors.

        Args:
            distinct: leave out greedy repeats that equal an earlier one of their prompt.
        """
        whole = Trace()
        for i, texts in enumerate(self.texts):
            seen = []
            for text in texts:
                way = text.trace and (text.new_ids, text.trace.drafted, text.trace.accepted)
                if text.trace is None or (distinct and self.greedy and way in seen):
                    continue
                seen.append(way)
                whole.extend(text.trace, self.cluster(i))
        return whole

    def tokens_per_second(self) -> float:
        """Σ tokens / Σ seconds; at batch size 1 over the repeat of median speed of each prompt."""
        chosen = [text for texts in self.texts for text in texts]
        if self.batch_size == 1:
            chosen = [sorted(texts, key=lambda text: text.speed)[(len(texts) - 1) // 2] for texts in self.texts]
        seconds = sum(text.seconds for text in chosen)
        return sum(len(text.new_ids) for text in chosen) / seconds if seconds else math.nan

    def cells(self) -> np.ndarray:
        """Tokens and seconds of each distinct prompt in each repeat, ``[prompts, repeats, 2]``."""
        numbers = [self.cluster(i) for i in range(len(self.texts))]
        rows = {number: place for place, number in enumerate(dict.fromkeys(numbers))}
        table = np.zeros((len(rows), len(self.texts[0]), 2))
        for number, texts in zip(numbers, self.texts):
            for repeat, text in enumerate(texts):
                table[rows[number], repeat] += len(text.new_ids), text.seconds
        return table


def paired_ratios(record: Record, base: Record, speed: str = "speed") -> list[float]:
    """For each prompt the median over repeats of this method's speed over the other's in the same repeat."""
    return [
        statistics.median(getattr(a, speed) / getattr(b, speed) for a, b in zip(ours, theirs))
        for ours, theirs in zip(record.texts, base.texts)
    ]


def speeds(record: Record, of: Mapping[str, Record], seed: int) -> dict[str, Any]:
    """The timing columns of a row.

    At batch size 1 a ratio is the median over prompts of `paired_ratios`; above, it is the ratio of throughputs.

    Args:
        record: the method's sequences.
        of: records of the same block by method, for the ratios.
        seed: of the bootstrap.
    """
    row: dict[str, Any] = {"tokens_per_second": record.tokens_per_second()}
    if record.batch_size > 1:
        row["tokens_per_second_ci95"] = list(throughput_interval(record.cells(), seed)[1:])
    for key, method in BASELINES.items():
        if method in of:
            if record.batch_size == 1:
                middle, *ends = median_interval(paired_ratios(record, of[method]), seed=seed)
            else:
                middle, *ends = throughput_interval(np.concatenate([record.cells(), of[method].cells()], 2), seed)
            row |= {key: middle, f"{key}_ci95": ends}
    if (base := of.get(BASELINES["speedup"])) is not None and record.batch_size == 1:
        row["speedup_without_prefill"] = median_interval(paired_ratios(record, base, "decoding_speed"))[0]
    per_token = [
        statistics.median(text.latency for text in texts) / tokens
        for texts in record.texts
        if (tokens := statistics.fmean(len(text.new_ids) for text in texts))
    ]
    row["seconds_per_token"] = statistics.median(per_token) if per_token else None
    return row


def acceptance(record: Record, seed: int) -> dict[str, Any]:
    """Accepted length and α with bootstrap intervals over prompts; of transformers' own methods the length alone."""
    numbers, trace = [record.cluster(i) for i in range(len(record.texts))], record.trace()
    if record.texts[0][0].trace is None:
        tokens = [sum(len(text.new_ids) for text in texts) for texts in record.texts]
        middle, *ends = ratio_interval(
            numbers, tokens, [sum(t.forwards for t in texts) for texts in record.texts], seed
        )
    else:
        middle, *ends = ratio_interval(trace.text, [m + 1 for m in trace.accepted], [1.0] * trace.rounds, seed)
    row = {"accepted_length": middle, "block_efficiency": middle, "block_efficiency_ci95": ends}
    distinct = record.trace(distinct=True)
    overlaps = [torch.as_tensor([] if part is None else part).double() for part in distinct.overlap]
    if any(part.numel() for part in overlaps):
        sums, counts = [part.sum().item() for part in overlaps], [part.numel() for part in overlaps]
        middle, *ends = ratio_interval(distinct.text, sums, counts, seed)
        row |= {"alpha": middle, "alpha_ci95": ends}
    return row


def counts(record: Record) -> dict[str, Any]:
    """The columns that come from the rounds; of transformers' own methods the tokens alone."""
    texts = [text for texts in record.texts for text in texts]
    if texts[0].trace is None:
        return {"tokens": sum(len(text.new_ids) for text in texts)}
    row: dict[str, Any] = record.trace().metrics()
    row |= {key: value for key, value in record.trace(distinct=True).metrics().items() if key in DISTINCT}
    del row["tokens_per_second"]
    return row


def by_category(record: Record, of: Mapping[str, Record], categories: Sequence[str], seed: int) -> list[dict[str, Any]]:
    """Speeds and acceptance of each category; empty if all prompts are of one."""
    names = list(dict.fromkeys(categories[: len(record.texts)]))
    rows = []
    for name in names if len(names) > 1 else ():
        kept = [i for i in range(len(record.texts)) if categories[i] == name]
        part, base = record.part(kept), {method: theirs.part(kept) for method, theirs in of.items()}
        rows.append({"category": name, "prompts": len(kept), **speeds(part, base, seed), **acceptance(part, seed)})
    return rows


def analysis(record: Record) -> dict[str, Any]:
    """Acceptance by position, draft lengths and seconds by phase, for report.json and plots."""
    trace = record.trace()
    if not trace.rounds:
        return {}
    histogram = Counter(trace.drafted)
    return {
        "acceptance_by_position": record.trace(distinct=True).acceptance_by_position(),
        "draft_lengths": {str(k): histogram[k] for k in sorted(histogram)},
        "phases": {
            "prefill": trace.prefill_seconds,
            "draft": sum(trace.draft_seconds),
            "verify": sum(trace.verify_seconds),
            "total": trace.total_seconds,
        },
    }


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
