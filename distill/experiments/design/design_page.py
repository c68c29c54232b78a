"""design.json and design.html: what was found, in sentences, figures and a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from decode.bench import machine
from decode.bench.page import Block, Code, Column, Facts, Figures, Heading, Page, Table, Text, Tile, Tiles
from decode.progress import duration
from distill.experiments.design.design_figures import cost_against_acceptance, front, pareto, trials
from distill.experiments.design.draft_shapes import Shape
from distill.experiments.design.predicted_speedup import Slope
from distill.experiments.design.shape_table import COLUMNS, TABLES, Entry, ranked

MARGIN = 1.1
"""What a winner has to be over the configuration's own shape to be called faster."""

VERIFIED = TABLES["verified"]

LAW = (
    "A trial of n steps is a whole training in small: learning rates rise and fall within it. Trials of one shape are "
    "extrapolated with 1 − α(n) = a · n^(−b), through the longest one. b is the mean of the shape's own slope between "
    "its two longest trials and of all shapes' ({b:.2f} ± {sd:.2f} here), weighted by their certainty. Intervals are "
    "95 %: of α over texts, and of b, which changes along a curve. Every rejection on the texts is scaled alike, and "
    "rounds over the texts are replayed with the costs measured (round cost: c·k + v(k + 1) + bookkeeping), at the "
    "best draft length."
)


@dataclass
class Results:
    """All that is shown."""

    name: str  # of the run
    entries: Sequence[Entry]  # every shape
    default: Shape  # the configuration's own
    winner: Entry | None  # the best trained shape; None before anything was trained
    full_steps: int  # of the full training
    longest: int  # longest draft
    spent: float  # seconds
    budget: float  # seconds
    facts: dict[str, Any]  # how it was measured
    created: str  # when
    slope: Slope | None = None  # the common exponent of the curves; None before two rounds
    rounds: Sequence[str] = ()  # what happened in each
    more: Sequence[str] = ()  # what longer training and more data would bring, in sentences
    verified: Sequence[dict[str, Any]] = ()  # what was measured of the shapes trained in full
    correlations: dict[str, float | None] = field(default_factory=dict)  # rank correlations, by what of

    @property
    def own(self) -> Entry:
        """The configuration's shape."""
        return next(entry for entry in self.entries if entry.shape == self.default)

    @property
    def margin(self) -> float | None:
        """Predicted speedup of the winner over that of the configuration's shape."""
        if self.winner is None or not self.own.forecast:
            return None
        return self.winner.forecast / self.own.forecast

    def headline(self) -> str:
        """The answer."""
        best = self.winner
        if best is None or best.full is None:
            return "No shape was trained: see which acceptance each would need, and why others were left out."
        ends = f"{best.full.speedup_low:.2f} to {best.full.speedup_high:.2f}"
        told = (
            f"Train {best.shape.name}: after a full training it should decode {best.full.speedup:.2f} times as fast as "
            f"without a draft (95 %: {ends}), drafting {best.full.length} token{'s' * (best.full.length > 1)} a round."
        )
        free = max((e for e in self.entries if not e.shape.trained), key=lambda e: e.forecast, default=None)
        if free is not None and free.forecast > best.forecast:
            name = free.shape.name[0].upper() + free.shape.name[1:]
            told += f" {name} needs no training and is faster here: {free.forecast:.2f}."
        return told

    def verdict(self) -> str:
        """The winner against the configuration's own shape."""
        own, best = self.own, self.winner
        if best is None or own.full is None or best.full is None:
            return ""
        late = sum(entry.status == "not reached" for entry in self.entries)
        judged = sum(entry.price is not None for entry in self.entries) - late
        more = f" For {late} more there was no time: raise the budget." if late else ""
        if self.rounds and "not reached" in self.rounds[-1]:
            more = f" The last round is not complete.{more or ' Raise the budget.'}"
        if best is own:
            return f"It is the configuration's own shape{self._others(judged - 1)}.{more}"
        gain = f"{100 * (best.forecast / own.forecast - 1):.0f} %"
        told = f"{own.shape.name}, the configuration's own, has {own.full.speedup:.2f}"
        if len(self.rounds) < 2:
            told = f"After one round no curve is known, so this is a guess: raise the budget. {told}"
        if best.forecast >= MARGIN * own.forecast:
            return f"{told}: the winner is predicted to be {gain} faster.{more}{self._decoded()}"
        told += f": the winner is predicted to be only {gain} faster, and none of {judged} shapes 10 % faster."
        return told + more + self._decoded()

    def _others(self, count: int) -> str:
        """What is foreseen of the shapes beside the winner, of which some may have been tried for fewer steps."""
        assert self.winner is not None
        faster = max((e for e in self.entries if e.shape.trained), key=lambda e: e.forecast)
        if faster is self.winner or faster.full is None:
            return f": none of {count} others is predicted to be faster"
        low, high = faster.full.speedup_low, faster.full.speedup_high
        none = (
            f", but none of {count} others by 10 % or more" if faster.forecast < MARGIN * self.winner.forecast else ""
        )
        return (
            f"; after {faster.steps} steps instead of {self.winner.steps}, {faster.shape.name} is predicted to be "
            f"faster ({faster.forecast:.2f}; 95 %: {low:.2f} to {high:.2f}){none}"
        )

    def _decoded(self) -> str:
        """What decoding with the winner and with the configuration's own shape says to the prediction."""
        assert self.winner is not None
        found = {row["name"]: row for row in self.verified}
        pair = [found[entry.shape.name] for entry in (self.winner, self.own) if entry.shape.name in found]
        if len(pair) < 2:
            return ""
        (a, b), (low, high) = [row["speedup"] for row in pair], [row["speedup_ci95"] for row in pair]
        told = " and ".join(f"{x:.2f} ({ends[0]:.2f} to {ends[1]:.2f})" for x, ends in ((a, low), (b, high)))
        apart = low[0] > high[1] or high[0] > low[1]
        return f" Decoded, they have {told}" + (": the intervals do not overlap." if apart else ", not told apart.")

    def to_dict(self) -> dict[str, Any]:
        """design.json."""
        return {
            "name": self.name,
            "created": self.created,
            "headline": self.headline(),
            "verdict": self.verdict(),
            "more": list(self.more),
            "winner": None if self.winner is None else self.winner.shape.name,
            "configured": self.default.name,
            "margin": self.margin,
            "full_steps": self.full_steps,
            "seconds": self.spent,
            "budget": self.budget,
            "rounds": list(self.rounds),
            "law": None if self.slope is None else {"b": self.slope.b, "sd": self.slope.sd},
            "pareto": [entry.shape.name for entry in self.front()],
            "shapes": [entry.row() for entry in ranked(self.entries)],
            "verified": list(self.verified),
            "rank_correlations": self.correlations,
            "facts": self.facts,
            "machine": machine.describe(),
        }

    def front(self) -> list[Entry]:
        """The Pareto front."""
        return front([entry for entry in self.entries if entry.forecast > 0], self.full_steps)

    def page(self) -> Page:
        """design.html."""
        trained = [entry for entry in self.entries if entry.history]
        pruned = [entry for entry in self.entries if entry.price is None or entry.status == "pruned"]
        blocks: list[Block] = [Text(self.verdict())] if self.verdict() else []
        blocks += [self._tiles(len(trained), len(pruned)), self._figures()]
        if self.more:
            blocks += [Heading("What more would bring"), *map(Text, self.more)]
        if self.verified:
            blocks += self._verification()
        rows = [self._row(entry) for entry in ranked(self.entries) if entry not in pruned]
        wide = {"parameters", "speedup_at_ceiling", "draft_length"}
        blocks += [Heading("All shapes"), Table([c for c in COLUMNS if c.key not in wide], rows)]
        if pruned:
            keys = ("name", "parameters", "c", "needed_alpha", "speedup_at_ceiling", "steps", "alpha", "speedup")
            columns = [c for c in COLUMNS if c.key in keys] + [Column("reason", "why")]
            lead = "Left out before training, or between rounds, because they could not win."
            table = Table(columns, [self._row(e) for e in ranked(pruned)], legend=False)
            blocks += [Heading("Pruned", lead), table]
        if self.slope is not None:
            blocks += [Heading("How it was predicted", LAW.format(b=self.slope.b, sd=self.slope.sd))]
        blocks += [
            Heading("Rounds"),
            Facts({f"round {i}": text for i, text in enumerate(self.rounds, 1)}),
            Facts(self.facts | {"machine": machine.sentence(machine.describe())}),
        ]
        if self.winner is not None:
            blocks.append(Code("python -m distill --config winner.yaml", "train the winner"))
        return Page(f"Which draft to train: {self.name}", self.headline(), "draftsmith design", blocks)

    def _row(self, entry: Entry) -> dict[str, Any]:
        mark = " (as configured)" * (entry.shape == self.default)
        return entry.row() | {"name": entry.shape.name + mark}

    def _tiles(self, trained: int, pruned: int) -> Tiles:
        found = []
        if self.winner is not None:
            found = [
                Tile("winner", self.winner.shape.name, "", "good"),
                Tile("predicted speedup", f"{self.winner.forecast:.2f} ×", "after a full training"),
            ]
            if self.margin is not None:
                found.append(Tile("over the configured", f"{self.margin:.2f} ×", self.default.name))
        count = Tile("shapes", str(len(self.entries)), f"{trained} trained, {pruned} pruned")
        return Tiles([*found, count, Tile("time", duration(self.spent), f"of {duration(self.budget)}")])

    def _figures(self) -> Figures:
        price = self.own.price or next(e.price for e in self.entries if e.price is not None)
        lines = cost_against_acceptance(self.entries, price, self.longest, self.winner, self.default)
        told = (
            "Dashed: equal speedup at the best draft length. A draft moves up by training and to the left by being "
            "smaller. Effective α: the rate, equal at every position, that gives the predicted speedup; texts whose "
            "hard tokens come in runs have a higher one than their mean."
        )
        figures = [(lines, told), (pareto(self.entries, self.full_steps, self.winner), "")]
        tried = [entry for entry in self.entries if entry.history]
        if tried:
            caption = "Each point is a training of its own; bold: the shapes left at the end, with 95 % intervals."
            figures.append((trials(tried, self.full_steps), caption))
        return Figures(figures)

    def _verification(self) -> list[Block]:
        told = [f"{what}: {value:.2f}" for what, value in self.correlations.items() if value is not None]
        lead = "Trained in full and decoded, beside what was predicted." + (
            f" Rank correlations: {', '.join(told)}." if told else ""
        )
        return [Heading("Predicted and measured", lead), Table(VERIFIED, list(self.verified))]
