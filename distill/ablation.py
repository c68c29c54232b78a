"""``python -m distill ablate``: the drafts of a configuration, each trained with several seeds, compared in one table.

A draft of every name and seed is trained from one target, one student and one reference; the seed decides the order of
the training examples. Acceptance is measured on one set of texts that the target generated, so drafts are compared text
by text. Nothing is decoded. Finished drafts are kept, so a killed run continues.
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from decode.bench import machine
from decode.bench.offline_acceptance import OfflineAlpha, paired
from decode.bench.page import COLUMNS, console_table, markdown
from decode.bench.prediction import offline_accepted_length, paired_lengths
from decode.bench.session import BenchOptions, Session
from decode.errors import UserError, write_text
from decode.method_options import Seed
from decode.models.loading import open_draft
from decode.progress import output_console, working
from distill.config import EvaluationSettings, ExportSettings, Settings
from distill.data.corpus import test_suite
from distill.evaluate import acceptance, target_texts
from distill.files import write_json
from distill.pipeline import prepare_settings
from distill.run import Run, alone_in
from distill.stages import run_stages

Row = dict[str, Any]
Alphas = dict[str, list[OfflineAlpha]]  # by mode, as first, second, … drafted token

MODES = {"sampled": 1.0, "greedy": 0.0}
DEPTH = 7  # drafted tokens of a feature head whose acceptance is measured
TABLE = (
    "name", "seeds", "offline_alpha", "offline_accepted_length", "length_gain", "gain", "greedy_gain", "teacher_tokens",
    "seconds",
)  # fmt: skip


@dataclass
class AblationSettings:
    """The seeds of an ablation."""

    seeds: list[Seed] = field(default_factory=lambda: [1, 2, 3])
    """Seeds of the order of the training examples. Every draft is trained once with each."""


@dataclass
class AblateSettings(Settings):
    """A run's settings, whose `drafts` are compared."""

    ablation: AblationSettings = field(default_factory=AblationSettings)
    """The seeds."""


def ablate(settings: AblateSettings, console: Console | None = None) -> Path:
    """Trains what is missing and measures it. The table is written after each draft.

    Returns:
        The folder of ``ablation.json`` and ``ablation.md``.

    Raises:
        UserError: The settings cannot be used.
    """
    settings.validate()
    seeds, console = settings.ablation.seeds, console or output_console()
    if not seeds or len(set(seeds)) < len(seeds):
        raise UserError(f"ablation.seeds is {seeds}, expected different numbers from 0 up, such as [1, 2, 3]")
    variants = {draft.name: draft for draft in settings.drafts}
    references = [name for name in variants if any(d.selects and d.reference == name for d in settings.drafts)]
    drafts = [replace(v, name=f"{name}-seed{seed}", seed=seed) for seed in seeds for name, v in variants.items()]
    full = replace(settings, drafts=[*(variants[name] for name in references), *drafts], export=ExportSettings())
    full.validate()
    full.trainer = replace(full.trainer, devices=1, num_nodes=1, strategy="auto")
    alphas: dict[str, dict[int, Alphas]] = {}
    used: dict[str, list[Row]] = {}
    run = Run(full, console)
    with alone_in(run):
        run.settings = prepare_settings(full, console)
        run_stages(run, ("target", "initial", *references))
        target = run.load_target("float32" if run.device.type == "cpu" else None)
        measured = full.evaluation or EvaluationSettings()
        options = BenchOptions(
            max_new_tokens=measured.max_new_tokens, seed=full.seed, threads=torch.get_num_threads(), pack="off"
        )
        session = Session(target, None, run.tokenizer, options)
        prompts = test_suite(run.corpus, full.data.source, measured.prompts).prompts
        with working(console, "  the target's answers"):
            texts = {mode: target_texts(session, prompts, temperature) for mode, temperature in MODES.items()}
        for seed in seeds:
            for name in variants:
                draft = f"{name}-seed{seed}"
                run_stages(run, (draft,))
                trust = full.student.trust_remote_code
                models = {draft: open_draft(run.path(draft), target, run.tokenizer, trust_remote_code=trust)}
                with working(console, f"  acceptance of {draft}"):
                    alphas.setdefault(name, {})[seed] = {
                        mode: acceptance(target, models, texts[mode], temperature, DEPTH)[draft]
                        for mode, temperature in MODES.items()
                    }
                record = run.draft_record(draft)
                used.setdefault(name, []).append({**record.account, "seconds": record.seconds})
                rows = [row | {"settings": asdict(variants[row["name"]])} for row in table(alphas, used)]
                write_table(run.folder / "ablation.md", rows, console)
    return run.folder


def table(alphas: Mapping[str, Mapping[int, Alphas]], used: Mapping[str, Sequence[Row]]) -> list[Row]:
    """Returns a row for each draft: α, gains over the first draft, and what it took.

    Args:
        alphas: By name and seed.
        used: By name, what the training with each seed took.
    """
    first, rows = next(iter(alphas)), []
    for name, by_seed in alphas.items():
        mean = _mean([modes["sampled"][0] for modes in by_seed.values()])
        row: Row = {"name": name, "seeds": len(by_seed), "offline_alpha": mean.mean}
        row["offline_alpha_se"] = None if math.isnan(mean.se) else mean.se
        row["offline_accepted_length"] = statistics.fmean(
            offline_accepted_length(modes["sampled"]) for modes in by_seed.values()
        )
        if name != first:
            row |= gain("gain", by_seed, alphas[first], "sampled")
            row |= gain("greedy_gain", by_seed, alphas[first], "greedy")
            row |= gain("length_gain", by_seed, alphas[first], "sampled", paired_lengths)
        keys = ("optimiser_steps", "teacher_tokens", "seconds")
        rows.append(row | {key: statistics.fmean(account[key] for account in used[name]) for key in keys})
    return rows


def gain(
    key: str,
    mine: Mapping[int, Alphas],
    theirs: Mapping[int, Alphas],
    mode: str,
    compare: Callable[..., dict[str, float]] = lambda a, b: paired(a[0], b[0]),
) -> Row:
    """Returns the mean difference over common seeds, paired by seed, with its errors over seeds and prompts."""
    seeds = sorted(mine.keys() & theirs.keys())
    a, b = ([modes[seed][mode] for seed in seeds] for modes in (theirs, mine))
    by_seed = [compare(x, y)["difference"] for x, y in zip(a, b)]
    se_texts = compare(*([_mean(by_depth) for by_depth in zip(*each)] for each in (a, b)))["se"]
    se_seeds = statistics.stdev(by_seed) / math.sqrt(len(seeds)) if len(seeds) > 1 else None
    return {
        key: statistics.fmean(by_seed), f"{key}_se": math.hypot(se_seeds or 0.0, se_texts),
        f"{key}_se_seeds": se_seeds, f"{key}_se_texts": se_texts, f"{key}_by_seed": dict(zip(map(str, seeds), by_seed)),
    }  # fmt: skip


def _mean(alphas: Sequence[OfflineAlpha]) -> OfflineAlpha:
    """Returns the mean of every position over measurements of the same texts."""

    def mean(several: Sequence[list[list[float]]]) -> list[list[float]]:
        return [[statistics.fmean(place) for place in zip(*text)] for text in zip(*several)]

    kept = mean([a.kept for a in alphas if a.kept is not None]) or None
    return OfflineAlpha(mean([a.texts for a in alphas]), alphas[0].prompts, kept)


def write_table(path: Path, rows: Sequence[Row], console: Console) -> None:
    """Writes the table in Markdown with the definitions of its columns, its rows as JSON beside it, and prints it."""
    formulas = {COLUMNS[key].label: COLUMNS[key].formula for key in TABLE if COLUMNS[key].formula}
    created = datetime.now(UTC).isoformat(timespec="seconds")
    content = {"created": created, "formulas": formulas, "drafts": rows, "machine": machine.describe()}
    write_json(path.with_suffix(".json"), content)
    legend = "\n".join(f"- **{name}**: {formula}." for name, formula in formulas.items())
    write_text(path, f"{markdown(TABLE, rows)}\n\n{legend}\n")
    console.print(console_table("", TABLE, rows))
    console.print(str(path), highlight=False)
