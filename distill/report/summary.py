"""What a report amounts to, in sentences: how much faster, whether identical, which draft, and what failed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from decode.report.page import Tone

Row = Mapping[str, Any]

NAMES = {
    "distillspec": "DistillSpec",
    "adaspec": "AdaSPEC",
    "eagle": "EAGLE",
    "eagle-adaspec": "EAGLE + AdaSPEC",
    "eagle-tree": "EAGLE, tree",
    "eagle-adaspec-tree": "EAGLE + AdaSPEC, tree",
    "autoregressive": "no draft",
    "generate": "model.generate",
    "generate-assistant": "generate(assistant_model)",
}


UNTRAINED = ("undistilled", "untrained")
"""Drafts as they are before distillation."""


@dataclass(frozen=True)
class Verdict:
    """A sentence and whether it is good news (`good`, `warn`, `bad`, `plain`)."""

    text: str
    tone: Tone


def display(name: str | None) -> str:
    """A draft's name as printed."""
    return NAMES.get(name, name) if name else "no draft"


def final(report: Row) -> str:
    """The draft that the run was made for."""
    return str((report.get("profile") or {}).get("draft") or "adaspec")


def drafted(report: Row) -> list[Row]:
    """The decoding rows in which one of the report's drafts took part; the others are baselines."""
    names = {name for draft in report["drafts"] for name in (draft["name"], f"{draft['name']}-tree")}
    return [row for row in report["decoding"] if row.get("draft") in names]


def best_row(report: Row, *, greedy: bool = True) -> Row | None:
    """The fastest row; rows whose greedy output differs from the target's count only if all differ."""
    rows = [row for row in drafted(report) if (row["temperature"] == 0) == greedy and row.get("speedup")]
    honest = [row for row in rows if row.get("identical_to_target") is not False]
    return max(honest or rows, key=lambda row: row["speedup"], default=None)


def fastest(rows: Iterable[Any]) -> list[Any]:
    """For each temperature and draft the row with the largest speedup; by temperature, then speedup."""
    found: dict[tuple[Any, Any], Any] = {}
    for row in rows:
        key = (row["temperature"], row["draft"])
        if key not in found or (row["speedup"] or 0) > (found[key]["speedup"] or 0):
            found[key] = row
    return sorted(found.values(), key=lambda row: (row["temperature"], row["speedup"] or 0))


def speed(report: Row) -> Verdict:
    """How much faster, with which draft and length, and whether the output is the target's own."""
    row = best_row(report) or best_row(report, greedy=False)
    if row is None:
        return Verdict("Decoding was not measured.", "plain")
    kind = "greedy decoding" if row["temperature"] == 0 else f"sampling at temperature {row['temperature']:g}"
    how = f"the {display(row['draft'])} draft at draft length {row['draft_length']}"
    low, high = row.get("speedup_ci95") or (row["speedup"],) * 2
    interval = f" (95 % interval {low:.2f} to {high:.2f})" if row.get("speedup_ci95") else ""
    against = row.get("speedup_vs_generate")
    generate = f", and {against:.2f} times as fast as `model.generate`" if against else ""
    if row["speedup"] <= 1:
        text = (
            f"No draft speeds up {kind} on this machine: the best, {how}, reaches {row['speedup']:.2f} times the speed "
            f"of the same loop without a draft{interval}."
        )
        return Verdict(f"{text} {_identity(row)}", "bad")
    text = (
        f"With {how}, {kind} is {row['speedup']:.2f} times as fast as the same loop without a draft"
        f"{interval}{generate}."
    )
    if row.get("identical_to_target") is False:
        return Verdict(f"{text} {_identity(row)}", "bad")
    if low <= 1:
        return Verdict(f"{text} The interval includes 1, so the gain is not certain. {_identity(row)}", "warn")
    return Verdict(f"{text} {_identity(row)}", "good")


def _identity(row: Row) -> str:
    same = row.get("identical_to_target")
    if row["temperature"] > 0:
        return "Sampled output follows the target's distribution (exact rule)."
    if same is None:
        return "Whether the output is identical was not checked."
    return "The output is identical to the target's." if same else "The output differs from the target's."


def comparisons(report: Row) -> list[Verdict]:
    """For each paired comparison of the final draft, or of AdaSPEC: which is better, or that the data cannot tell."""
    told = {final(report), "adaspec"}
    return [_comparison(pair) for pair in report.get("paired") or [] if told & {pair["a"], pair["b"]}]


def _comparison(pair: Row) -> Verdict:
    a, b = display(pair["a"]), display(pair["b"])
    difference, error = pair["difference"], pair.get("se") or 0.0
    count = f" over {pair['n']:,} texts" if pair.get("n") else ""
    p_value = f", p {chance(pair['p_value'])}" if pair.get("p_value") is not None else ""
    numbers = f"α differs by {signed(difference)} ± {error:.4f}{count}{p_value}"
    under = f" ({pair['label']})" if pair.get("label") else ""
    certain = pair["p_value"] < 0.05 if pair.get("p_value") is not None else abs(difference) > 2 * error
    if not certain:
        return Verdict(f"{a} and {b} cannot be told apart{under}: {numbers}.", "warn")
    if difference > 0:
        return Verdict(f"{a} is better than {b}{under}: {numbers}.", "good")
    return Verdict(f"{a} did not beat {b}{under}; {b} is better: {numbers}.", "bad")


def chance(p: float) -> str:
    """A p-value; a very small one only as a bound."""
    return "< 0.001" if p < 0.001 else f"= {p:.2g}"


def signed(value: float, digits: int = 4) -> str:
    """A difference with its sign, minus as a minus."""
    return f"{value:+.{digits}f}".replace("-", "−")


def distillation(report: Row) -> Verdict | None:
    """Whether training raised α at all."""
    start = next((d.get("offline_alpha") for d in report["drafts"] if d["name"] in UNTRAINED), None)
    draft = judged(report)
    if start is None or draft is None:
        return None
    name, after = display(draft["name"]), draft["offline_alpha"]
    if after <= start:
        return Verdict(f"Distillation did not raise the acceptance rate: {start:.4f} before, {after:.4f} after.", "bad")
    return Verdict(f"Distillation raised the acceptance rate from {start:.3f} to {after:.3f} ({name}).", "good")


def judged(report: Row) -> Row | None:
    """The draft that stands for the run: the final one, or without it the one of the highest α."""
    trained = [d for d in report["drafts"] if d["name"] not in UNTRAINED and d.get("offline_alpha") is not None]
    best = max(trained, key=lambda d: d["offline_alpha"], default=None)
    return next((d for d in trained if d["name"] == final(report)), best)
