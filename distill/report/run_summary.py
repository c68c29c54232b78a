"""What a report amounts to, in sentences: how much faster, whether identical, which draft, and what failed."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from decode.report.bench_tables import mode
from decode.report.html_page import Tone

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
UNTRAINED = ("undistilled", "untrained")  # drafts as they are before distillation


@dataclass(frozen=True)
class Finding:
    """A sentence and whether it is good news (`good`, `warn`, `bad`, `plain`)."""

    text: str
    tone: Tone


def display(name: str | None) -> str:
    """A draft's name as printed."""
    return NAMES.get(name, name) if name else "no draft"


def exported(report: Row) -> str:
    """The draft that the run was made for, which is the one that is exported."""
    return str((report.get("profile") or {}).get("draft") or "adaspec")


def drafted(report: Row) -> list[Row]:
    """The decoding rows in which one of the report's drafts took part; the others are baselines."""
    names = {name for draft in report["drafts"] for name in (draft["name"], f"{draft['name']}-tree")}
    return [row for row in report["decoding"] if row.get("draft") in names]


def exported_row(report: Row, *, greedy: bool = True) -> Row | None:
    """The exported draft at its fastest length; rows whose greedy output differs count only if all differ."""
    names = (exported(report), f"{exported(report)}-tree")
    rows = [r for r in drafted(report) if r["draft"] in names and (r["temperature"] == 0) == greedy and r["speedup"]]
    identical = [row for row in rows if row.get("identical_to_target") is not False]
    return max(identical or rows, key=lambda row: row["speedup"], default=None)


def fastest(rows: Iterable[Row]) -> list[Row]:
    """For each temperature and draft the row with the largest speedup; by temperature, then speedup."""
    found: dict[tuple[Any, Any], Row] = {}
    for row in sorted(rows, key=lambda row: row["speedup"] or 0):
        found[row["temperature"], row["draft"]] = row
    return sorted(found.values(), key=lambda row: (row["temperature"], row["speedup"] or 0))


def findings(report: Row) -> list[Finding]:
    """The report in sentences: the exported draft's speed, what training gained, and each paired comparison."""
    return [speed(report), *choice(report), *distillation(report), *comparisons(report)]


def speed(report: Row) -> Finding:
    """How much faster the exported draft makes decoding, at which length, and whether the output is the target's."""
    row = exported_row(report) or exported_row(report, greedy=False)
    if row is None:
        what = (
            "Decoding with the exported draft was not measured." if report["decoding"] else "Decoding was not measured."
        )
        return Finding(what, "plain")
    draft = f"The exported {display(row['draft'])} draft, {row['draft_length']} tokens a round,"
    kind = "greedy decoding" if row["temperature"] == 0 else f"sampling at {mode(row['temperature'])}"
    interval = row.get("speedup_ci95")
    speedup = f"{row['speedup']:.2f} times as fast as the same loop without a draft"
    speedup += f" (95 % interval {interval[0]:.2f} to {interval[1]:.2f})" if interval else ""
    if row.get("speedup_vs_generate"):
        speedup += f" and {row['speedup_vs_generate']:.2f} times as fast as `model.generate`"
    differs = row.get("identical_to_target") is False
    if row["speedup"] <= 1:
        return Finding(f"{draft} does not speed up {kind} on this machine: it is {speedup}. {_identity(row)}", "bad")
    text = f"{draft} makes {kind} {speedup}."
    if interval and interval[0] <= 1:
        return Finding(
            f"{text} The interval includes 1, so the gain is not certain. {_identity(row)}",
            "bad" if differs else "warn",
        )
    return Finding(f"{text} {_identity(row)}", "bad" if differs else "good")


def _identity(row: Row) -> str:
    if row["temperature"] > 0:
        return "Sampled output follows the target's distribution (exact rule)."
    return {
        None: "Whether the output is identical was not checked.",
        True: "The output is identical to the target's.",
        False: "The output differs from the target's.",
    }[row.get("identical_to_target")]


def comparisons(report: Row) -> list[Finding]:
    """For each paired comparison of the exported draft, or of AdaSPEC: which is better, if that can be told."""
    named = {exported(report), "adaspec"}
    return [_comparison(pair) for pair in report.get("paired") or [] if named & {pair["a"], pair["b"]}]


def _comparison(pair: Row) -> Finding:
    a, b = display(pair["a"]), display(pair["b"])
    difference, error, p = pair["difference"], pair.get("se") or 0.0, pair.get("p_value")
    count = f" over {pair['n']:,} texts" if pair.get("n") else ""
    numbers = f"α differs by {signed(difference)} ± {error:.4f}{count}" + (f", {p_value(p)}" if p is not None else "")
    under = f" ({pair['label']})" if pair.get("label") else ""
    if not (p < 0.05 if p is not None else abs(difference) > 2 * error):
        return Finding(f"{a} and {b} cannot be told apart{under}: {numbers}.", "warn")
    if difference > 0:
        return Finding(f"{a} is better than {b}{under}: {numbers}.", "good")
    return Finding(f"{a} did not beat {b}{under}; {b} is better: {numbers}.", "bad")


def p_value(p: float) -> str:
    """A p-value; a very small one only as a bound."""
    return "p < 0.001" if p < 0.001 else f"p = {p:.2g}"


def signed(value: float) -> str:
    """A difference with its sign, minus as a minus."""
    return f"{value:+.4f}".replace("-", "−")


def choice(report: Row) -> list[Finding]:
    """By what the exported draft was chosen, if by its acceptance on the validation examples."""
    if ((report.get("settings") or {}).get("export") or {}).get("choose") != "best":
        return []
    trained = [d for d in report["drafts"] if d["name"] not in UNTRAINED and d.get("validation_alpha")]
    best, *others = sorted(trained, key=lambda d: d["validation_alpha"], reverse=True)
    if not others:
        return []
    ahead = best["validation_alpha"] - others[0]["validation_alpha"]
    text = (
        f"{display(best['name'])} is exported: of {len(trained)} trained drafts it has the highest α on the validation "
        f"examples, {best['validation_alpha']:.4f}, {signed(ahead)} against {display(others[0]['name'])}. All other "
        "figures are of the test examples."
    )
    return [Finding(text, "plain")]


def distillation(report: Row) -> list[Finding]:
    """Whether training raised α; nothing where it was not measured."""
    start = next((d.get("offline_alpha") for d in report["drafts"] if d["name"] in UNTRAINED), None)
    draft = judged(report)
    if start is None or draft is None:
        return []
    after = draft["offline_alpha"]
    if after <= start:
        text = f"Distillation did not raise the acceptance rate: {start:.4f} before, {after:.4f} after."
        return [Finding(text, "bad")]
    name = display(draft["name"])
    return [Finding(f"Distillation raised the acceptance rate from {start:.3f} to {after:.3f} ({name}).", "good")]


def judged(report: Row) -> Row | None:
    """The draft that stands for the run: the exported one, or without it the one of the highest α."""
    trained = [d for d in report["drafts"] if d["name"] not in UNTRAINED and d.get("offline_alpha") is not None]
    best = max(trained, key=lambda d: d["offline_alpha"], default=None)
    return next((d for d in trained if d["name"] == exported(report)), best)
