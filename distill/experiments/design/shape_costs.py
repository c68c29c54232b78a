"""What every shape costs, measured with random weights; from it the acceptance that each needs to win."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from decode.bench import machine
from decode.bench.costs import CostMeter, CostModel
from decode.bench.exit_costs import measure
from decode.bench.pair_profile import add_overhead
from decode.bench.prediction import least_alpha, predicted_speedup
from decode.bench.session import WIDE, BenchOptions, Item, Session
from decode.bench.suites import Prompt
from decode.errors import UserError, read_json
from decode.models.choose_runner import open_draft_runner
from decode.models.fast_runner import self_speculating
from decode.models.heads import FeatureHead
from decode.models.runner import Runner
from decode.progress import track
from decode.sampling import Warp
from distill.config.run import Settings
from distill.experiments.design.draft_shapes import Shape
from distill.files import write_json

PRICED = (3, 6)  # widths between which drafts are timed
TURNS, SECONDS = 5, 0.3  # most measurements of a shape in a pass, and seconds after which no second one begins
PASSES = 3  # over all shapes, so that a disturbance of the machine affects each of them once at most
EXIT_SECONDS = 4.0  # for all early exits together, in turn
CALM = 0.25  # the quantile of the times that is taken for the cost
BOOKED_PROMPTS, BOOKED_TOKENS = 4, 32
"""Texts, and most tokens of each, on which the bookkeeping of a family of drafts is measured."""


@dataclass
class Price:
    """Costs of a shape, in plain decoding steps of the target, bookkeeping included."""

    cost: CostModel  # as measured
    parameters: int = 0  # of the draft

    @property
    def unit(self) -> float:
        """A plain step, in one-token target forwards."""
        return 1 + self.cost.step_overhead

    @property
    def c(self) -> float:
        """A drafted token."""
        return (self.cost.cost_ratio + self.cost.draft_overhead) / self.unit

    def v(self, n: float) -> float:
        """A round's target forward over n tokens."""
        return (self.cost.v(n) + self.cost.step_overhead + self.cost.overhead) / self.unit

    def speedup(self, alpha: float, length: int) -> float:
        """At an acceptance rate that is the same at every position."""
        return predicted_speedup(alpha, length, self.c, self.v)

    def best(self, alpha: float, longest: int) -> float:
        """The same with the best draft length."""
        return max(self.speedup(alpha, k) for k in range(1, longest + 1))

    def needed(self, speedup: float, longest: int) -> float | None:
        """The acceptance rate from which this speedup is reached with the best draft length; None if not even by 1."""
        return least_alpha(lambda alpha: self.best(alpha, longest) >= speedup)

    def row(self) -> dict[str, Any]:
        """As data."""
        return {"parameters": self.parameters, **self.cost.to_dict()}

    @classmethod
    def of(cls, row: dict[str, Any]) -> Price:
        """From a `row`."""
        return cls(CostModel.from_dict({k: v for k, v in row.items() if k != "parameters"}), row["parameters"])


@contextmanager
def threads(count: int | None) -> Iterator[None]:
    """Inside, torch computes with so many threads; None: as it is."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Pricing:
    """Measures shapes against one target.

    Args:
        target: the target.
        tokenizer: its tokenizer.
        prompts: token ids of some prompts.
        full: the run's settings.
        batch_size: texts at once.
        longest: longest draft.
        count: CPU threads; None: as it is.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        prompts: Sequence[Sequence[int]],
        full: Settings,
        *,
        batch_size: int,
        longest: int,
        count: int | None,
    ) -> None:
        self.target, self.full, self.batch = target, full, batch_size
        options = BenchOptions(max_new_tokens=BOOKED_TOKENS, threads=count, costs=False)
        self.session = Session(target, {}, tokenizer, options)
        self.items = [Item(Prompt(str(i), "", None), list(ids)) for i, ids in enumerate(prompts[:BOOKED_PROMPTS])]
        self.context = int(statistics.median(map(len, prompts))) + full.evaluation.max_new_tokens // 2
        self.widths = [*range(1, longest + 2), *WIDE]
        meter = CostMeter(self.session.runner, widths=self.widths, context=self.context, batch=batch_size)
        meter.run()
        self.verify = meter.cost(CALM)
        self.booked: dict[str, CostModel] = {}

    def price(self, shape: Shape) -> Price:
        """What a shape costs."""
        if shape.family in ("lookup", "rest"):
            return Price(replace(self.verify))
        runner = self.session.runner
        if shape.family == "exit" and self.batch == 1:
            return Price(self.exits[shape.layers])
        draft = shape.random(self.full, self.target)
        opened = open_draft_runner(draft, self.target, pack="auto")
        meter = CostMeter(runner, opened, widths=PRICED, context=self.context, batch=self.batch)
        meter.run(TURNS, SECONDS, least=1)
        found = meter.cost(CALM)
        cost = replace(self.verify, cost_ratio=found.cost_ratio, draft_seconds=found.draft_seconds)
        parameters = 0 if shape.family == "exit" else sum(p.numel() for p in draft.parameters())
        return Price(self._book(shape, draft, opened, cost), parameters)

    @cached_property
    def exits(self) -> dict[int, CostModel]:
        """Costs of drafting with the target's first layers, whose work verification takes over; by exit layer."""
        runner = self_speculating(self.session.runner)
        length = min(self.context, runner.limit // 2)
        texts = [(item.ids * (length // len(item.ids) + 1))[:length] for item in self.items]
        return measure(runner, range(1, runner.depth), {}, Warp(0.0), texts, seconds=EXIT_SECONDS).exits

    def parameters(self, shape: Shape) -> int:
        """Weights of a draft."""
        return sum(p.numel() for p in shape.random(self.full, self.target).parameters())

    def _book(self, shape: Shape, model: Any, runner: Runner, cost: CostModel) -> CostModel:
        """With the bookkeeping of the shape's family, measured on the first of it."""
        family = shape.family if shape.is_head else "model"
        if family not in self.booked:
            self.session.draft_models = {"draft": model}
            self.session.drafts = {"draft": runner}
            booked = replace(cost)
            if not isinstance(model, FeatureHead) or self.batch == 1:
                add_overhead(self.session, "draft", self.items, Warp(0.0), booked)
            self.booked[family] = booked
        parts = ("overhead", "draft_overhead", "step_overhead")
        return replace(cost, **{part: getattr(self.booked[family], part) for part in parts})


@dataclass
class Prices:
    """The prices of shapes, and why others have none."""

    by_shape: dict[Shape, Price]  # what each costs
    refused: dict[Shape, str]  # shapes that cannot be measured here, with the reason


def price_all(
    path: Path, made_from: str, shapes: Sequence[Shape], begin: Callable[[], Pricing], given: str | None = None
) -> Prices:
    """The prices of all shapes, kept in a file; what is there already is not measured again.

    Args:
        path: the file.
        made_from: fingerprint of the target, the draft's settings and how is measured; another one begins anew.
        shapes: which.
        begin: opens the target for measuring, if anything has to be measured.
        given: another machine's file, in place of measuring.

    Raises:
        UserError: the given file is none of this command's.
    """
    content = read_json(Path(given) if given else path)
    known: dict[str, Any] = content.get("prices", {}) if given or content.get("made_from") == made_from else {}
    if given and not known:
        raise UserError(f"design.costs: {given} holds no costs; expected a costs.json that this command wrote")
    unknown = [shape for shape in shapes if shape.name not in known]
    if given:
        known |= {shape.name: {"refused": f"{given} has no costs of it"} for shape in unknown}
    elif unknown:
        known |= _measured(begin(), unknown)
        write_json(path, {"made_from": made_from, "machine": machine.describe(), "prices": known})
    found = {shape: Price.of(known[shape.name]) for shape in shapes if "refused" not in known[shape.name]}
    return Prices(found, {shape: known[shape.name]["refused"] for shape in shapes if shape not in found})


def _measured(pricing: Pricing, shapes: Sequence[Shape]) -> dict[str, Any]:
    """A row for each shape: of the passes the one with the median cost ratio, or why it cannot be measured."""
    rows: dict[Shape, list[dict[str, Any]]] = {shape.costs_as: [] for shape in shapes}
    refused: dict[Shape, str] = {}
    for shape in track(PASSES * list(rows), "costs of the shapes"):
        if shape not in refused:
            try:
                rows[shape].append(pricing.price(shape).row())
            except UserError as error:
                refused[shape] = str(error)
    found: dict[str, Any] = {}
    for shape in shapes:
        like = shape.costs_as
        if like in refused:
            found[shape.name] = {"refused": refused[like]}
            continue
        median = sorted(rows[like], key=lambda row: row["cost_ratio"])[PASSES // 2]
        found[shape.name] = median if shape == like else {**median, "parameters": pricing.parameters(shape)}
    return found
