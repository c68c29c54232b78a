"""From timed texts to the rows of a benchmark: medians of paired ratios, bootstrap intervals, the trace's metrics."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from decode.bench.costs import CostModel
from decode.bench.prediction import speedup_of_trace
from decode.trace import Trace

RESAMPLES = 2000
GIVEN_DRAFT = "generate-assistant"
DISTINCT = {"alpha", "alpha_se", "accepted_per_tested", "accepted_per_drafted", "tv_spent", "js_distance"}
"""Metrics to which a greedy repeat adds nothing."""
COLUMNS = (
    "tokens_per_second", "speedup", "speedup_ci95", "speedup_micro", "speedup_without_prefill", "speedup_vs_generate",
    "speedup_vs_generate_ci95", "speedup_vs_assistant", "speedup_vs_assistant_ci95", "predicted_speedup",
    "block_efficiency", "block_efficiency_ci95", "alpha", "alpha_se", "alpha_ci95",
    "accepted_per_tested", "accepted_per_drafted", "tv_spent", "js_distance",
    "accuracy", "accuracy_se", "identical_to_target", "identical_share", "drafted_per_round", "bookkeeping_share",
    "rounds", "tokens",
)  # fmt: skip
"""Measured columns; every row has all of them, null where they do not apply."""


@dataclass
class TimedText:
    """One text as one method wrote it once."""

    new_ids: list[int]  # the generated tokens
    seconds: float  # wall time, prompt included
    prefill: float | None = None  # seconds of it until the first round; None where it is not known
    forwards: int = 0  # target forwards that gave the tokens
    forward_seconds: float | None = None  # time inside the forwards of target and draft; None where it was not taken
    trace: Trace | None = None  # the rounds; None for transformers' own

    @property
    def speed(self) -> float:
        """Tokens per second."""
        return len(self.new_ids) / self.seconds if self.seconds else math.nan

    @classmethod
    def joined(cls, turns: Sequence[TimedText]) -> TimedText:
        """The turns of a chat as one text."""
        if len(turns) == 1:
            return turns[0]
        prefills = [turn.prefill for turn in turns if turn.prefill is not None]
        inside = [turn.forward_seconds for turn in turns if turn.forward_seconds is not None]
        traces = [turn.trace for turn in turns if turn.trace is not None]
        whole = Trace()
        for trace in traces:
            whole.extend(trace, 0)
        return cls(
            [token for turn in turns for token in turn.new_ids],
            sum(turn.seconds for turn in turns),
            sum(prefills) if len(prefills) == len(turns) else None,
            sum(turn.forwards for turn in turns),
            sum(inside) if len(inside) == len(turns) else None,
            whole if traces else None,
        )

    @property
    def decoding_speed(self) -> float:
        """Tokens per second after the prefill."""
        rest = self.seconds - (self.prefill or 0.0)
        return len(self.new_ids) / rest if self.prefill is not None and rest > 0 else math.nan


@dataclass
class Record:
    """Everything one method did in one suite at one temperature."""

    texts: list[list[TimedText]] = field(default_factory=list)  # by prompt and repeat
    greedy: bool = False  # repeats of a prompt draw nothing, so that equal ones are one observation

    def trace(self, *, distinct: bool = False) -> Trace:
        """All rounds, over prompts and repeats; a prompt is one text of its standard errors.

        Args:
            distinct: greedy repeats that went as an earlier one of their prompt are left out.
        """
        whole = Trace()
        for prompt, texts in enumerate(self.texts):
            seen = []
            for text in texts:
                way = text.trace and (text.new_ids, text.trace.drafted, text.trace.accepted)
                if text.trace is None or (distinct and self.greedy and way in seen):
                    continue
                seen.append(way)
                whole.extend(text.trace, prompt)
        return whole

    def typical(self) -> list[TimedText]:
        """Of each prompt the repeat with the median speed."""
        return [sorted(texts, key=lambda text: text.speed)[(len(texts) - 1) // 2] for texts in self.texts]

    def tokens_per_second(self) -> float:
        """Σ tokens / Σ seconds over the typical repeats: the micro average."""
        chosen = self.typical()
        seconds = sum(text.seconds for text in chosen)
        return sum(len(text.new_ids) for text in chosen) / seconds if seconds else math.nan


def bootstrap(
    values: np.ndarray, statistic: Callable[[np.ndarray], np.ndarray], *, seed: int = 0
) -> tuple[float, float, float]:
    """A statistic with its 95 % percentile bootstrap interval over resampled rows.

    Args:
        values: ``[n, ...]``, a row for each independent observation (a prompt).
        statistic: ``[samples, n, ...]`` to ``[samples]``.
        seed: of the resampling.

    Returns:
        The statistic of the values themselves, and the ends of its interval; NaN without values.
    """
    if not len(values):
        return math.nan, math.nan, math.nan
    picks = np.random.default_rng(seed).integers(len(values), size=(RESAMPLES, len(values)))
    drawn = statistic(values[picks])
    low, high = np.quantile(drawn[np.isfinite(drawn)], [0.025, 0.975])
    return float(statistic(values[None])[0]), float(low), float(high)


def ratio_interval(pairs: Iterable[tuple[float, float]], seed: int) -> tuple[float, float, float]:
    """Σ a / Σ b of pairs (a, b), each an independent observation, and its percentile bootstrap interval."""
    values = np.array(list(pairs), dtype=np.float64).reshape(-1, 2)
    with np.errstate(invalid="ignore", divide="ignore"):
        return bootstrap(values, lambda drawn: drawn[..., 0].sum(1) / drawn[..., 1].sum(1), seed=seed)


def sums_by(groups: Sequence[int], a: Sequence[float], b: Sequence[float]) -> Iterable[tuple[float, float]]:
    """Σ a and Σ b of each group."""
    sums: dict[int, tuple[float, float]] = {}
    for group, x, y in zip(groups, a, b):
        known = sums.get(group, (0.0, 0.0))
        sums[group] = known[0] + x, known[1] + y
    return sums.values()


def median_interval(values: Sequence[float], *, seed: int = 0) -> tuple[float, float, float]:
    """Median and its 95 % percentile bootstrap interval over the values.

    Returns:
        The median, and the ends of the interval, which always contains it; NaN without values.
    """
    known = np.array([v for v in values if math.isfinite(v)])
    middle, low, high = bootstrap(known, lambda drawn: np.median(drawn, axis=1), seed=seed)
    return middle, min(middle, low), max(middle, high)


def paired_ratios(record: Record, base: Record, speed: str = "speed") -> list[float]:
    """For each prompt the median over repeats of this method's speed over the other's, taken side by side."""
    return [
        statistics.median(getattr(a, speed) / getattr(b, speed) for a, b in zip(ours, theirs))
        for ours, theirs in zip(record.texts, base.texts)
    ]


def identical_share(record: Record, reference: Record) -> float:
    """Share of the texts that equal the reference's first text of their prompt, token by token."""
    same = [
        float(text.new_ids == theirs[0].new_ids) for ours, theirs in zip(record.texts, reference.texts) for text in ours
    ]
    return statistics.fmean(same) if same else math.nan


def differing(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Names of lossless rows whose greedy texts are not all `model.generate`'s; transformers' own are left out."""
    wrong = (r for r in rows if r["lossless"] and not r["peer"] and r.get("identical_to_target") is False)
    return list(dict.fromkeys(r["name"] for r in wrong))


def fastest_lossless(rows: Sequence[Mapping[str, Any]], temperature: float | None = None) -> Mapping[str, Any] | None:
    """The fastest method that drafts and that no text shows not to be lossless; at one temperature, if it is given.

    A method whose greedy texts differ from `model.generate`'s is not named, whatever its rule promises; none is where
    the loop without a draft differs too, for then the forward itself is another model's.
    """
    wrong = differing(rows)
    if any(r["method"] == "autoregressive" and r["name"] in wrong for r in rows):
        return None
    drafting = (r for r in rows if r["lossless"] and not r["peer"] and r["method"] != "autoregressive")
    drafting = (r for r in drafting if temperature in (None, r["temperature"]))
    known = (r for r in drafting if r.get("speedup") and r["name"] not in wrong)
    return max(known, key=lambda row: float(row["speedup"]), default=None)


def speeds(record: Record, of: Mapping[str, Record], seed: int) -> dict[str, Any]:
    """The timing columns of a row, against the methods of the same block that serve as baselines."""
    row: dict[str, Any] = {"tokens_per_second": record.tokens_per_second()}
    against = {"speedup": "autoregressive", "speedup_vs_generate": "generate", "speedup_vs_assistant": GIVEN_DRAFT}
    for key, method in against.items():
        if method in of:
            middle, low, high = median_interval(paired_ratios(record, of[method]), seed=seed)
            row |= {key: middle, f"{key}_ci95": [low, high]}
    if "autoregressive" in of:
        base = of["autoregressive"]
        row["speedup_micro"] = row["tokens_per_second"] / base.tokens_per_second()
        row["speedup_without_prefill"] = median_interval(paired_ratios(record, base, "decoding_speed"))[0]
    return row


def counts(record: Record, cost: CostModel | None, drafts_with_model: bool) -> dict[str, Any]:
    """The columns that come from the trace; transformers' own methods have only block efficiency."""
    texts = [text for texts in record.texts for text in texts]
    tokens, forwards = sum(len(t.new_ids) for t in texts), sum(t.forwards for t in texts)
    if not texts or texts[0].trace is None:
        return {"tokens": tokens, "block_efficiency": tokens / forwards if forwards else math.nan}
    trace = record.trace()
    row: dict[str, Any] = trace.metrics()
    row |= {key: value for key, value in record.trace(distinct=True).metrics().items() if key in DISTINCT}
    row.pop("tokens_per_second")
    inside = [t.forward_seconds for t in texts if t.forward_seconds is not None]
    if len(inside) == len(texts) and row["total_seconds"]:
        row["bookkeeping_share"] = 1 - sum(inside) / row["total_seconds"]
    if cost is not None:
        row["predicted_speedup"] = speedup_of_trace(trace, cost, drafts_with_model=drafts_with_model)
    elif trace.rounds and not sum(trace.drafted):
        row["predicted_speedup"] = 1.0
    return row


def accuracy(marks: Sequence[float]) -> dict[str, Any]:
    """Mean score of the prompts, with its standard error."""
    if not marks:
        return {}
    error = statistics.stdev(marks) / len(marks) ** 0.5 if len(marks) > 1 else None
    return {"accuracy": statistics.fmean(marks), "accuracy_se": error}


def by_prompt(record: Record, marks: Sequence[float]) -> list[dict[str, Any]]:
    """What paired comparisons of two methods need: for every prompt its repeats, and the mean score of its texts."""
    rows = []
    for i, texts in enumerate(record.texts):
        row: dict[str, Any] = {"tokens": [len(t.new_ids) for t in texts], "seconds": [t.seconds for t in texts]}
        row |= {"forwards": sum(t.forwards for t in texts), "score": marks[i] if marks else None}
        traces = [t.trace for t in texts if t.trace is not None]
        if traces:
            row["accepted"] = sum(sum(trace.accepted) for trace in traces)
        rows.append(row)
    return rows


def analysis(record: Record) -> dict[str, Any]:
    """What a row has no room for: acceptance by position, draft lengths, seconds by phase."""
    trace = record.trace()
    if not trace.rounds:
        return {}
    phases = {
        "prefill": trace.prefill_seconds,
        "draft": sum(trace.draft_seconds),
        "verify": sum(trace.verify_seconds),
        "total": trace.total_seconds,
    }
    histogram = Counter(trace.drafted)
    return {
        "acceptance_by_position": record.trace(distinct=True).acceptance_by_position(),
        "draft_lengths": {str(k): histogram[k] for k in sorted(histogram)},
        "phases": phases,
    }


def plain(value: Any) -> Any:
    """The same value for JSON: numbers that are not finite become null, arrays and tensors lists."""
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
