"""``python -m distill design``: which draft to train for a target.

Costs do not depend on weights, so every candidate is timed with random ones, and the acceptance rate that it needs
follows. Those that can gain are trained briefly in rungs: the faster half of a rung, by predicted speedup, goes on with
twice the steps. Finished trainings and measurements are kept, so a killed design continues.
"""

import statistics
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import torch
import yaml
from jsonargparse.typing import PositiveInt
from rich.console import Console
from transformers import PreTrainedModel

from decode.bench.costs import CostModel, measure_costs
from decode.bench.prediction import best_length, offline_accepted_length, predicted_speedup, speedups_by_length
from decode.errors import UserError, read_json, write_text
from decode.models.choose_runner import open_draft_runner, open_runner
from decode.progress import output_console, working
from distill.config.drafts import DraftSettings
from distill.config.run import ExportSettings, Settings
from distill.config.training import HEADS, Architecture, StudentKind, StudentSettings
from distill.data.context import StageContext
from distill.experiments.ablation import MODES, Alphas, Meter, write_table
from distill.files import fingerprint
from distill.models.layers import cut
from distill.models.loading import build_model
from distill.pipeline import alone_in
from distill.run_stages import new_head, run_stages
from distill.stages import run_of, stage_fingerprints

GAINS = (1.0, 1.5, 2.0)
RUNGS = 2  # each further one trains the better half of the candidates for twice as many steps
TABLE = (
    "name", "parameters", "cost_ratio", "v4", *(f"needed_{gain:g}" for gain in GAINS), "optimiser_steps",
    "offline_alpha", "offline_alpha_greedy", "offline_accepted_length", "predicted_speedup",
)  # fmt: skip


@dataclass
class DesignSettings:
    """The candidates of a design and how long they are trained."""

    shapes: list[str] = field(default_factory=list)
    """Candidates: eagle, eagle3, dflash, dspark, cut:LAYERS (layers of the target), or LAYERSxWIDTH (from scratch, such
    as 2x128); empty: a choice that fits the target."""
    steps: PositiveInt = 200
    """Optimiser steps of every candidate, for the draft and for a student that is trained on next tokens before it. The
    better half is then trained for twice as many."""


@dataclass
class DesignRunSettings(Settings):
    """A run's settings; `student` and `drafts` are replaced by the candidates."""

    design: DesignSettings = field(default_factory=DesignSettings)
    """The candidates."""


def design(settings: DesignRunSettings, console: Console | None = None) -> Path:
    """Cost, try and compare drafts. The table is written after each measurement.

    Returns:
        The folder ``<output_dir>/<name>-design`` of ``design.json``, ``design.md`` and ``winner.yaml``, which a
        second ``--config`` reads.

    Raises:
        UserError: The settings cannot be used.
    """
    settings.validate()
    console, options, longest = console or output_console(), settings.design, max(settings.evaluation.draft_lengths)
    full = replace(settings, name=f"{settings.name}-design", export=ExportSettings(), stages_at_once=1)
    run = run_of(full)
    with alone_in(run, full, console):
        context = StageContext(full, run, console)
        run_stages(context, ("target",))
        target = context.load_target()
        students = {shape: student_of(shape, full, target) for shape in options.shapes or shapes_for(target)}
        costed = full.target.dtype, full.trainer.accelerator, full.student.draft_vocab, full.evaluation.threads
        key = fingerprint(stage_fingerprints(full)["target"][0], longest, *costed)
        kept = read_json(run.folder / "design.json")
        known = {row["name"]: row for row in kept.get("drafts", [])} if kept.get("made_from") == key else {}
        rows, path = list[dict[str, Any]](), run.folder / "design.md"
        for shape, student in students.items():  # costs are measured once, so that a killed design goes on with them
            rows.append(known.get(shape) or _costed(context, target, shape, student, longest))
            write_table(path, TABLE, rows, None, made_from=key)
        rows.sort(key=lambda row: row["cost_ratio"])
        left = [row for row in rows if row["needed_1"] is not None]
        for rung in range(RUNGS):
            for row in left:
                row |= _tried(context, students[row["name"]], row, options.steps * 2**rung)
                write_table(path, TABLE, rows, None, made_from=key)
            left = sorted(left, key=lambda row: -row["predicted_speedup"])[: (len(left) + 1) // 2]
        write_table(path, TABLE, rows, console, made_from=key)
        if not left or left[0]["predicted_speedup"] <= 1:
            console.print("no candidate is predicted to gain: train longer (design.steps), or decode without a draft")
            return run.folder
        best, path = left[0], run.folder / "winner.yaml"
        winner = students[best["name"]]
        given: dict[str, Any] = {"kind": winner.kind, "model": None, "package": None}
        if winner.kind == "scratch":
            given["architecture"] = asdict(winner.architecture)
        if winner.kind == "cut":
            given["layers"] = winner.layers
        if winner.trained and settings.student.training.steps is settings.student.training.epochs:
            given["training"] = {"steps": best["optimiser_steps"]}
        write_text(path, yaml.safe_dump({"student": given}, sort_keys=False))
        console.print(f"{best['name']} is predicted fastest; train it with --config CONFIG --config {path}")
    return run.folder


def shapes_for(target: PreTrainedModel) -> list[str]:
    """Return candidates for a target: heads, and drafts of one or two layers that are at most half as wide as it."""
    config = target.config.get_text_config()
    width, layers = int(config.hidden_size), int(config.num_hidden_layers)
    narrow = [f"{depth}x{width // part}" for part in (4, 2) for depth in (1, 2) if depth < layers]
    return ["eagle", "eagle3", "dspark", *narrow, *(["cut:1"] if layers > 3 else [])]


def student_of(shape: str, settings: DesignRunSettings, target: PreTrainedModel) -> StudentSettings:
    """Return the student that a shape names.

    Raises:
        UserError: It names none.
    """
    steps = settings.design.steps
    training = replace(settings.training, steps=steps, epochs=None)
    if shape in HEADS:
        given = settings.student if settings.student.is_head else StudentSettings()
        return replace(given, kind=cast(StudentKind, shape), training=training)
    if shape.startswith("cut:") and shape[4:].isdigit():
        return StudentSettings(kind="cut", layers=int(shape[4:]), training=training)
    depth, _, width = shape.partition("x")
    if not (depth.isdigit() and width.isdigit() and int(depth) * int(width)):
        raise UserError(
            f"design.shapes has {shape!r}, expected {', '.join(HEADS)}, cut:LAYERS or LAYERSxWIDTH, such as cut:1 or "
            "2x128"
        )
    config = target.config.get_text_config()
    a_head = int(config.hidden_size) // int(config.num_attention_heads)
    heads = max(1, int(width) // a_head)
    shown = Architecture(
        model_type=settings.target.architecture.model_type if settings.target.kind == "scratch" else "llama",
        hidden_size=int(width),
        layers=int(depth),
        heads=heads if int(width) % heads == 0 else 1,
        positions=int(getattr(config, "max_position_embeddings", 512)),
    )
    return StudentSettings(kind="scratch", architecture=shown, training=training)


def _costed(
    context: StageContext, target: PreTrainedModel, shape: str, student: StudentSettings, longest: int
) -> dict[str, Any]:
    """Return a candidate's row: its size, its costs with random weights, and the acceptance rates that it needs."""
    config = target.config.get_text_config()
    with working(context.console, f"costs of {shape}"), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        draft: Any
        if student.version is not None:
            draft = new_head(target, context.corpus.tokenizer, student, 0)
        elif student.kind == "cut":
            draft = cut(target, student.layers)
        else:
            draft = build_model(student.architecture, int(config.vocab_size), context.corpus.tokenizer, 0)
        draft = draft.to(target.device, target.dtype).eval()
        threads = torch.get_num_threads()
        torch.set_num_threads(context.settings.evaluation.threads or threads)
        try:
            pair = open_runner(target), open_draft_runner(draft, target)
            cost = measure_costs(*pair, widths=range(1, longest + 2))
        finally:
            torch.set_num_threads(threads)
    parameters = sum(p.numel() for p in draft.parameters())
    return {
        "name": shape,
        "parameters": parameters,
        "cost_ratio": cost.cost_ratio,
        "v4": cost.v(4),
        "cost": cost.to_dict(),
        **{f"needed_{gain:g}": needed_alpha(gain, cost, longest) for gain in GAINS},
    }


def needed_alpha(gain: float, cost: CostModel, longest: int) -> float | None:
    """Return the least α, to 1e-3, at which some draft length up to ``longest`` is predicted to gain so much.

    Returns:
        None where even α = 1 does not reach it.
    """
    rates = (thousandths / 1000 for thousandths in range(1001))
    lengths = range(1, longest + 1)
    return next((rate for rate in rates if max(predicted_speedup(rate, k, cost) for k in lengths) >= gain), None)


def _tried(context: StageContext, student: StudentSettings, row: dict[str, Any], steps: int) -> dict[str, Any]:
    """Train a candidate and return what was measured: acceptance rates and the predicted speedup."""
    settings = context.settings
    first = next((draft for draft in settings.drafts if not draft.selects), DraftSettings(name="draft"))
    length: dict[str, Any] = {"steps": steps, "epochs": None}
    draft = replace(first, name=f"{row['name'].replace(':', '')}-{steps}", training=first.training | length)
    student = replace(student, training=replace(student.training, steps=steps))
    small = replace(settings, student=student, drafts=[draft], training=replace(settings.training, **length))
    trial = StageContext(small, run_of(small), context.console)
    small.validate()
    if trial.run.record(draft.name, stage_fingerprints(small)[draft.name][0]) is None:
        run_stages(trial, ("initial", draft.name))
    alphas: Alphas = Meter(trial).measure(draft.name)
    cost, longest = CostModel.from_dict(row["cost"]), len(row["cost"]["verify_cost"]) - 1
    speeds = {mode: speedups_by_length(alphas[mode], cost, longest) for mode in MODES}
    return {
        "optimiser_steps": steps,
        "offline_alpha": alphas["sampled"][0].mean,
        "offline_alpha_greedy": alphas["greedy"][0].mean,
        "offline_accepted_length": offline_accepted_length(alphas["sampled"]),
        "draft_length": {mode: best_length(found) for mode, found in speeds.items()},
        "predicted_speedup": statistics.fmean(max(found.values()) for found in speeds.values()),
    }
