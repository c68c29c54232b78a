"""Settings of ``python -m distill design``: the shapes compared, the time it may take, how speedups are predicted."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from jsonargparse.typing import NonNegativeInt, OpenUnitInterval, PositiveFloat, PositiveInt

from decode.errors import UserError
from decode.method_options import Temperature
from distill.config.run import Settings

UNITS = {"s": 1, "m": 60, "h": 3600}


@dataclass
class DesignSettings:
    """Which drafts are compared, and for how long. Lists left empty are derived from the target's size."""

    budget: str = "30m"
    """Time for measuring and training, such as 90s, 30m or 2h; training the target, where it is not there yet, is not
    part of it. What an interrupted run spent counts when it is continued; a larger budget continues a finished one."""
    batch_size: PositiveInt = 1
    """Batch size: texts decoded at once, for which costs and speedups are measured and predicted."""
    temperature: Temperature | None = None
    """Decoding mode that speedups are predicted for; null: the first of evaluation.temperatures."""
    layers: list[PositiveInt] = field(default_factory=list)
    """Draft models: depths; empty: 1, 2 and a half of the target's layers."""
    widths: list[PositiveInt] = field(default_factory=list)
    """Draft models: widths; empty: a quarter, a half and three quarters of the target's."""
    mlp: list[PositiveFloat] = field(default_factory=lambda: [1.5, 3.0])
    """Draft models: width inside the MLP over the width, rounded to a multiple of 16."""
    embeddings: list[Literal["shared", "own"]] = field(default_factory=lambda: ["shared", "own"])
    """Draft models: one matrix for embedding and output head, or a head of its own."""
    first: list[PositiveInt] = field(default_factory=list)
    """Drafts cut from the target: how many of its first layers; empty: 1, 2, 3, a half."""
    spread: list[PositiveInt] = field(default_factory=list)
    """Drafts cut from the target: how many layers, spread from its first to its last; empty: 2, 3, a half."""
    heads: list[Literal["eagle", "eagle3"]] = field(default_factory=lambda: ["eagle", "eagle3"])
    """Feature heads: which kinds."""
    draft_vocabs: list[PositiveInt] = field(default_factory=list)
    """Feature heads: how many ids they draft; empty: all, a half and a quarter, of large vocabularies all, 16,384 and
    8,192."""
    exits: list[PositiveInt] = field(default_factory=list)
    """Exit layers of the target as it is, not trained here; empty: 1, 2, 3, a half."""
    retrieval: bool = True
    """Compare prompt lookup and REST (over the training texts) too, which need no training."""
    least_steps: PositiveInt = 50
    """Fewest training steps of the first round; with fewer, curves say nothing."""
    keep: OpenUnitInterval = 0.5
    """Share of the shapes that go on to the next round, which trains twice as long. The configuration's own shape
    always goes on."""
    ceiling: OpenUnitInterval = 0.995
    """Acceptance rate that no draft is expected to exceed: a shape that would not win even with it is not trained."""
    longest: PositiveInt | None = None
    """Longest draft considered; null: 15, or the longest of evaluation.draft_lengths."""
    texts: PositiveInt = 64
    """Validation prompts that the target answers; acceptance is measured on the answers."""
    threads: NonNegativeInt | None = None
    """CPU threads while costs are measured; null: evaluation.threads."""
    costs: str | None = None
    """A costs.json that another machine's run wrote, to design for that machine; null: this machine is measured."""
    costs_only: bool = False
    """Stop after the costs: which acceptance each shape would need. Takes a minute or two."""
    verify: bool = False
    """Train the winner and two losers in full, decode with them, and put what was measured beside what was predicted.
    Not part of the budget."""

    @property
    def seconds(self) -> float:
        """The budget in seconds."""
        found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", self.budget.lower())
        if found is None or found[2] not in UNITS or not float(found[1]):
            raise UserError(
                f"design.budget is {self.budget!r}, expected a number and a unit: s, m or h, such as 90s, 30m or 2h"
            )
        return float(found[1]) * UNITS[found[2]]

    def validate(self) -> None:
        """Check the budget and the file of costs."""
        assert self.seconds
        if self.costs is not None and not Path(self.costs).is_file():
            raise UserError(f"design.costs: there is no file {self.costs!r}; a run of this command writes costs.json")


@dataclass
class DesignRunSettings(Settings):
    """A run's settings: its target, data and recipe of training; every shape is trained by that recipe."""

    design: DesignSettings = field(default_factory=DesignSettings)
    """The shapes, and the time."""
