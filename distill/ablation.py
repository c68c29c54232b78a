"""``python -m distill ablate``: the drafts of a configuration, each trained with several seeds, compared in one table.

Every draft is trained with each of the seeds, which decide the order of the training examples, from one target, one
student and one reference, by a run for each kind of draft. Acceptance is measured on the same texts of the target, so
that runs are compared text by text (`table`). Nothing is decoded. A killed run continues.
"""

import math
import shutil
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
from rich.console import Console

from decode.core.round import clustered_ratio
from decode.errors import UserError
from decode.files import read_json, replaced, write_json, write_text
from decode.measure import machine
from decode.measure.report import COLUMNS, comma_separated, console_table, latex, markdown
from decode.measure.suites import Row
from decode.progress import output_console
from distill.config import AblateSettings, EvaluationSettings, ExportSettings
from distill.pipeline import run_pipeline

GAINS = {"gain": ("sampled", "sums"), "greedy_gain": ("greedy", "sums"), "length_gain": ("sampled", "rounds")}
"""Columns that compare a draft with the first one on the same texts, by decoding mode and what each text has."""
WRITTEN = ("corpus", "prompts", "responses")  # folders of a run's work that do not depend on the student
TABLE = (
    "name",
    "seeds",
    "offline_alpha",
    "offline_accepted_length",
    "greedy_accepted_length",
    *GAINS,
    "teacher_tokens",
    "seconds",
)


def ablate(settings: AblateSettings, console: Console | None = None) -> Path:
    """Trains what is missing, measures it, and returns the folder of ``ablation.json`` and ``ablation.md``.

    The table is written after each kind of draft. Raises a `UserError` where the settings cannot be used.
    """
    settings.validate()
    seeds, kinds, console = settings.ablation.seeds, settings.ablation.kinds, console or output_console()
    if not seeds or len(set(seeds)) < len(seeds):
        raise UserError(f"ablation.seeds is {seeds}, expected different numbers from 0 up, such as [1, 2, 3]")
    if kinds and (len(set(kinds)) < len(kinds) or settings.target.trained):
        raise UserError(
            f"ablation.kinds is {kinds}, expected different kinds for a finished target (target.kind as_is; it is "
            f"{settings.target.kind})"
        )
    variants = {name: d if d.selects else replace(d, reference=None) for name, d in settings.drafts.items()}
    full = replace(
        settings,
        drafts={name: replace(draft, seeds=seeds) for name, draft in variants.items()},
        export=ExportSettings(),
        evaluation=replace(settings.evaluation or EvaluationSettings(), decode_prompts=0, accuracy_prompts=1),
        trainer=replace(settings.trainer, devices=1, num_nodes=1, strategy="auto"),
    )
    folder, reports = Path(full.output_dir) / full.name, dict[str, Row]()
    runs = {f"{kind} ": _of_kind(full, kind) for kind in kinds} or {"": full}
    texts = [Path(each.output_dir) / each.name / "work" for each in runs.values()]
    for (kind, each), work in zip(runs.items(), texts):
        for source in (texts[0] / part for part in WRITTEN):
            if source.is_dir() and not (work / source.name).exists():
                with replaced(work / source.name) as aside:  # whole or not at all
                    shutil.copytree(source, aside)
        reports[kind] = read_json(run_pipeline(each, console).folder / "report.json")
        drafts = {
            f"{kind}{name}": [f"{name}-seed{seed}" for seed in seeds] if seeds[1:] else [name]
            for kind in reports
            for name in variants
        }
        owners = {f"{kind}{name}": report for kind, report in reports.items() for name in variants}
        length = full.student.block.size - 1 if kinds else None
        write_table(folder / "ablation.md", table(owners, drafts, length), console)
    return folder


def _of_kind(settings: AblateSettings, kind: str) -> AblateSettings:
    """Returns the settings with another kind of student, in a folder of its own; all blocks draft as many tokens."""
    student = replace(settings.student, kind=kind, block=replace(settings.student.block))
    student.draft.alike(student)
    made = replace(settings, student=student, output_dir=str(Path(settings.output_dir) / settings.name), name=kind)
    made.validate()
    return made


def table(reports: Mapping[str, Row], drafts: Mapping[str, Sequence[str]], length: int | None = None) -> list[Row]:
    """Returns a row for each line of the table: α, gains over the first line, and what the training of a seed took.

    Args:
        reports: Content of the run's report.json of each line.
        drafts: The names of each line's drafts there, in the same order of seeds.
        length: Drafted tokens of the accepted lengths; None: as the runs report them.
    """
    rows, first = list[Row](), dict[str, np.ndarray]()
    for label, names in drafts.items():
        report = reports[label]
        trained = [next(row for row in report["drafts"] if row["name"] == name) for name in names]
        row = trained[0] | {"name": label, "seeds": len(names)}
        for key in ("optimiser_steps", "teacher_tokens", "seconds", "offline_alpha"):
            row[key] = statistics.fmean(each[key] for each in trained)
        row["alpha_by_position"] = np.mean([each["alpha_by_position"] for each in trained], 0).tolist()
        for mode, key in (("sampled", "offline_accepted_length"), ("greedy", "greedy_accepted_length")):
            rounds = _by_text(report, mode, "rounds", names, length)
            row[key] = float(np.mean(sum(report["texts"][mode]["counts"]) / rounds.sum(1)))
        texts, sums = report["texts"]["sampled"], _by_text(report, "sampled", "sums", names)
        error = clustered_ratio(sums.mean(0), texts["counts"], texts["prompts"])[1]
        row["offline_alpha_se"] = None if math.isnan(error) else error
        for gain, (mode, what) in GAINS.items():
            values = _by_text(report, mode, what, names, length)
            base = first.setdefault(gain, values)
            if base is not values:
                row |= _gain(gain, base, values, report["texts"][mode])
        rows.append(row)
    return rows


def _by_text(report: Row, mode: str, what: str, names: Sequence[str], length: int | None = None) -> np.ndarray:
    """Returns summed acceptance, or rounds of drafts of this length, of ``[drafts, texts]``."""
    found = [report["texts"][mode]["drafts"][name][what] for name in names]
    if what == "rounds":
        found = [each[str(length)] if length else next(iter(each.values())) for each in found]
    return np.array(found)


def _gain(name: str, base: np.ndarray, values: np.ndarray, texts: Row) -> Row:
    """Returns the mean difference over seeds of ``[seeds, texts]``, with errors over seeds and over texts."""
    change, whole = values - base, sum(texts["counts"])
    by_seed, scale = change.sum(1) / whole, 1.0
    if name == "length_gain":  # tokens / rounds change by the rounds per token, times both lengths
        lengths = whole / base.sum(1), whole / values.sum(1)
        by_seed, scale = lengths[1] - lengths[0], float(np.mean(lengths[0] * lengths[1]))
    se_texts = scale * clustered_ratio(change.mean(0), texts["counts"], texts["prompts"])[1]
    se_seeds = float(np.std(by_seed, ddof=1)) / math.sqrt(len(by_seed)) if len(by_seed) > 1 else 0.0
    return {
        name: float(by_seed.mean()),
        f"{name}_se": math.hypot(se_seeds, se_texts),
        f"{name}_by_seed": by_seed.tolist(),
    }


def write_table(path: Path, rows: Sequence[Row], console: Console) -> None:
    """Writes the table in Markdown with the definitions of its columns, as CSV, LaTeX and JSON, and prints it."""
    formulas = {COLUMNS[key].label: COLUMNS[key].formula for key in TABLE if COLUMNS[key].formula}
    created = datetime.now(UTC).isoformat(timespec="seconds")
    content = {"created": created, "formulas": formulas, "drafts": rows, "machine": machine.describe()}
    write_json(path.with_suffix(".json"), content)
    legend = "\n".join(f"- **{name}**: {formula}." for name, formula in formulas.items())
    write_text(path, f"{markdown(TABLE, rows)}\n\n{legend}\n")
    write_text(path.with_suffix(".csv"), comma_separated(TABLE, rows))
    write_text(path.with_suffix(".tex"), latex(TABLE, rows))
    console.print(console_table("", TABLE, rows))
    console.print(str(path), highlight=False)
