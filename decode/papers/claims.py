"""What a paper claims, judged on our results: estimates paired by prompt with their intervals, and the reasons."""

from __future__ import annotations

import csv
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from decode.bench.costs import CostModel
from decode.bench.report import markdown_table, mode
from decode.bench.statistics import bootstrap, median_interval

Row = Mapping[str, Any]
Block = tuple[str, float]  # a suite and a temperature


def published(name: str) -> list[dict[str, str]]:
    """Rows of ``NAME.csv``, the numbers that a paper printed; what it left empty is a dash."""
    with (Path(__file__).parent / "published" / f"{name}.csv").open(newline="", encoding="utf-8") as file:
        return [{key: value or "–" for key, value in row.items()} for row in csv.DictReader(file)]


@dataclass
class PaperTable:
    """A table in the paper's layout."""

    title: str
    columns: Sequence[str]
    rows: list[list[str]] = field(default_factory=list)
    note: str = ""

    def markdown(self) -> str:
        """As GitHub shows it."""
        note = f"\n\n{self.note}" if self.note else ""
        return f"**{self.title}**\n\n{markdown_table(self.columns, self.rows)}{note}"


@dataclass(frozen=True)
class Result:
    """A method in one suite at one temperature."""

    row: Row
    prompts: Sequence[Row]
    extra: Row
    cost: CostModel | None

    @property
    def name(self) -> str:
        """As in the bench's table."""
        return str(self.row["name"])


class Results:
    """The report of one configuration (`decode.bench.report.write_report`, or a report of ``distill``)."""

    def __init__(self, report: Row, alone: Results | None = None, stores: Mapping[str, int] | None = None) -> None:
        self.report = report  # the whole report
        self.alone = alone  # the draft's own results, where they were measured
        self.stores = dict(stores or {})  # bytes of the files that retrieval drafts from, by name
        self.rows: list[Row] = report.get("methods") or []

    @property
    def blocks(self) -> list[Block]:
        """Suites and temperatures, in order."""
        return list(dict.fromkeys((row["suite"], row["temperature"]) for row in self.rows))

    def find(self, name: str, block: Block) -> Result | None:
        """The first row whose name is this one, or begins with it and an option; None if it was not measured."""
        named = [row for row in self.rows if (row["suite"], row["temperature"]) == block and row.get("prompts")]
        exact = [row for row in named if row["name"] == name]
        row = next(iter(exact or [row for row in named if str(row["name"]).startswith(f"{name} ")]), None)
        if row is None:
            return None
        bench = self.report["bench"]
        here = (row["name"], row["suite"], row["temperature"])
        extra: Row = next((d for d in bench["analysis"] if (d["name"], d["suite"], d["temperature"]) == here), {})
        return Result(row, extra.get("prompts") or [], extra, _cost(bench, row))

    def where(self, block: Block) -> str:
        """Suite, mode and size of the sample."""
        rows = [row for row in self.rows if (row["suite"], row["temperature"]) == block]
        return f"{block[0]}, {mode(block[1])}, {max(row['prompts'] for row in rows)} prompts × {rows[0]['repeats']}"

    @property
    def setting(self) -> str:
        """Models and machine in one line."""
        settings, machine = self.report["bench"]["settings"], self.report["machine"]
        sizes = list(self.report["bench"]["parameters"].values())
        parts = [f"target {settings['target']}{_millions(sizes[0])}"]
        parts += [f"draft {path}{_millions(size)}" for path, size in zip(settings["draft"], sizes[1:])]
        where = machine.get("accelerator") or f"{machine['cpu']}, {machine['threads']} threads"
        return f"ours: {', '.join(parts)}; {where}"


def _millions(count: float) -> str:
    return f" ({count / 1e6:.1f} M)"


def _cost(bench: Row, row: Row) -> CostModel | None:
    """The costs that the row's prediction was computed from."""
    blocks = (
        b["costs"] for b in bench.get("blocks", ()) if all(b[key] == row[key] for key in ("suite", "temperature"))
    )
    found = next(blocks, bench["costs"]).get(row.get("draft") or "")
    return CostModel.from_dict(found) if found else None


def number(value: Any, spec: str) -> str:
    """A number for a table; a dash where there is none."""
    return format(value, spec) if isinstance(value, int | float) and not math.isnan(value) else "–"


Verdict = Literal["held", "not held", "within error"]


@dataclass(frozen=True)
class Estimate:
    """A value with its 95 % interval over ``n`` prompts; an exact one has no width."""

    value: float
    low: float
    high: float
    n: int = 0


@dataclass(frozen=True)
class Ordering:
    """A claim ``value > bound``, and what was measured."""

    claim: str  # in words
    estimate: Estimate  # what was measured; None where a row is missing
    bound: float = 0.0  # what the value has to exceed (or reach, if not strict)
    # how the value is printed: ratio, difference or points (a share, in points of 100)
    unit: Literal["ratio", "difference", "points"] = "difference"
    reason: str = ""  # costs that explain a claim that does not hold
    where: str = ""  # suite, temperature and configuration

    @property
    def verdict(self) -> Verdict:
        """Held if the whole interval is beyond the bound, not held if it is wholly short of it."""
        if self.estimate.low > self.bound:
            return "held"
        return "not held" if self.estimate.high < self.bound else "within error"

    def sentence(self) -> str:
        """The claim, the verdict and the numbers, and the reason where it does not hold."""
        e = self.estimate
        show: Callable[[float], str] = {
            "ratio": lambda v: f"{v:.3f} ×",
            "difference": lambda v: f"{v:+.4f}",
            "points": lambda v: f"{100 * v:+.2f} points",
        }[self.unit]
        exact = "" if e.low == e.high else f" (95 % {show(e.low)} to {show(e.high)}, {e.n} prompts)"
        bound = f"; expected above {show(self.bound)}" if self.bound != {"ratio": 1.0}.get(self.unit, 0.0) else ""
        why = f". {self.reason}" if self.reason and self.verdict != "held" else ""
        text = f"{self.verdict}: {self.claim}: {show(e.value)}{exact}{bound}"
        return f"{text} [{self.where}]{why}" if self.where else text + why


@dataclass(frozen=True)
class Claim:
    """Method ``a`` before method ``b`` in one block.

    Attributes:
        a, b: names of rows; one that holds options has to be there with exactly these.
        by: speed (the ratio has to exceed 1), length (tokens a target forward) or score (the difference has to exceed
            `bound`).
    """

    text: str  # what the paper says
    a: str
    b: str
    by: Literal["speed", "length", "score"] = "speed"
    bound: float = 0.0  # of the difference


def judge(
    runs: Mapping[str, Results], claims: Callable[[Results, Block], Iterable[Claim]] | Sequence[Claim]
) -> list[Ordering]:
    """The claims on every block of every configuration, where both methods were measured."""
    return [
        ordering
        for results in runs.values()
        for block in results.blocks
        for claim in (claims(results, block) if callable(claims) else claims)
        if (ordering := _judge(claim, results, block)) is not None
    ]


def _judge(claim: Claim, results: Results, block: Block) -> Ordering | None:
    a, b, where = results.find(claim.a, block), results.find(claim.b, block), results.where(block)
    if a is None or b is None or a.name == b.name or (" " in claim.b and b.name != claim.b):
        return None
    if claim.by == "speed":
        ratio = speed_ratio(a, b)
        reason = "; ".join(filter(None, (accounting(a), accounting(b))))
        if ratio is None or math.isnan(ratio.value):
            return None
        return Ordering(claim.text, ratio, 1.0, "ratio", reason, where)
    gained = difference(a, b, accepted_length if claim.by == "length" else score)
    if gained is None:
        return None
    if claim.by == "score":
        return Ordering(claim.text, gained, claim.bound, "points", where=where)
    return Ordering(claim.text, gained, claim.bound, reason="; ".join(filter(None, map(reach, (a, b)))), where=where)


def speed_ratio(a: Result | None, b: Result | None) -> Estimate | None:
    """Median over prompts of a's tokens/s over b's, the runs of a repeat side by side."""
    if a is None or b is None:
        return None
    ratios = [statistics.median(_speeds(x) / _speeds(y)) for x, y in zip(a.prompts, b.prompts) if sum(x["tokens"]) > 0]
    return Estimate(*median_interval(ratios), len(ratios))


def _speeds(prompt: Row) -> np.ndarray:
    return np.array(prompt["tokens"]) / np.array(prompt["seconds"])


def accepted_length(prompt: Row) -> tuple[float, float]:
    """Tokens that rounds emitted, and target forwards: Σ(m + 1) and rounds, for block efficiency."""
    return prompt["accepted"] + prompt["forwards"], prompt["forwards"]


def score(prompt: Row) -> tuple[float, float]:
    """The prompt's mean score, and 1."""
    return prompt["score"], 1.0


def difference(a: Result | None, b: Result | None, of: Callable[[Row], tuple[float, float]]) -> Estimate | None:
    """Difference of two ratios of sums, Σx/Σn of ``of``, with a bootstrap interval over the prompts they share."""
    if a is None or b is None or any(p.get("score") is None for p in a.prompts if of is score):
        return None
    pairs = np.array([[*of(x), *of(y)] for x, y in zip(a.prompts, b.prompts)])

    def gap(drawn: np.ndarray) -> np.ndarray:
        a_sum, a_count, b_sum, b_count = np.moveaxis(drawn.sum(1), -1, 0)
        return np.asarray(a_sum / a_count - b_sum / b_count)

    return Estimate(*bootstrap(pairs, gap), len(pairs))


def accounting(result: Result | None) -> str:
    """What a round of a method costs and gives, in one-token target forwards, from the measured costs."""
    if result is None or result.cost is None or not result.row.get("drafted_per_round"):
        return ""
    row, cost = result.row, result.cost
    k = float(row["drafted_per_round"])
    if row.get("draft"):
        c, drafts = cost.cost_ratio, f"{k:.1f} × c {cost.cost_ratio:.2f}"
    else:  # drafting without a model of its own: its measured time
        c = row["draft_seconds"] / (k * row["rounds"]) / cost.target_seconds
        drafts = f"{k:.1f} × {c:.2f} of drafting"
    verify = cost.v(k + 1)
    spent, gained = c * k + verify, float(row["block_efficiency"])
    return (
        f"{result.name}: {gained:.2f} tokens for {spent:.2f} one-token forwards a round ({drafts} + v({k + 1:.0f}) "
        f"{verify:.2f}), predicted {gained / spent:.2f} ×"
    )


def reach(result: Result | None) -> str:
    """How deep a method's drafts go and how often their tokens are kept, by position."""
    positions = result.extra.get("acceptance_by_position") if result is not None else None
    if result is None or not positions:
        return ""
    kept = ", ".join(f"{p['conditional']:.2f}" for p in positions[:4] if p["conditional"] is not None)
    return f"{result.name}: drafts of up to {len(positions)} tokens, kept at positions 1, 2, ... with {kept}"


def ratio_text(estimate: Estimate | None) -> str:
    """A speed ratio with its interval."""
    return "–" if estimate is None else f"{estimate.value:.3f} [{estimate.low:.2f}, {estimate.high:.2f}]"
