"""``draftsmith distill ablate``: the drafts of a configuration, each trained with several seeds, compared in one table.

It is a run whose drafts have these seeds, which decide the order of the training examples (one run for each kind of
draft), and a comparison of the runs' reports on the same texts of the target, text by text (`table`). Nothing is
decoded. A killed run continues.
"""

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from rich.console import Console

from decode.core.round import clustered_ratio
from decode.files import read_json, replaced, write_json, write_text
from decode.measure.report import COLUMNS, comma_separated, console_table, markdown
from decode.measure.statistics import equal_weights, p_value, plain
from decode.measure.suites import Row
from decode.progress import output_console
from distill import ranks
from distill.config import AblateSettings, EvaluationSettings, ExportSettings
from distill.pipeline import run_pipeline
from distill.results.evaluate import doubled

GAINS = {"gain": ("sampled", "sums"), "greedy_gain": ("greedy", "sums"), "length_gain": ("sampled", "rounds")}
"""Columns that compare a draft with another one on the same texts, by decoding mode and what each text has."""
LENGTHS = {"offline_accepted_length": "sampled", "greedy_accepted_length": "greedy"}
WRITTEN = ("corpus", "prompts", "responses")  # folders of a run's work that do not depend on the student
ACCOUNT = (
    "optimiser_steps",
    "teacher_tokens",
    "seconds",
    "offline_alpha",
    "greedy_accepted_per_tested",
    "alpha_by_position",
)
"""Numbers of a draft whose mean over seeds is taken."""
TABLE = (
    "name", "seeds", "offline_alpha", *LENGTHS, "greedy_accepted_per_tested",
    *(key for gain in GAINS for key in (gain, f"{gain}_p")), "teacher_tokens", "seconds",
)  # fmt: skip
Line = tuple[Row, Sequence[str]]
"""A run's report, and the names of a draft's seeds in it, in the same order for all drafts."""


def ablate(settings: AblateSettings, console: Console | None = None) -> Path:
    """Trains what is missing, measures it, and returns the folder of ``ablation.json`` and ``ablation.md``.

    The table is written after each kind of draft. Raises a `UserError` where the settings cannot be used.
    """
    settings.validate()
    seeds, kinds, console = settings.ablation.seeds, settings.ablation.kinds, console or output_console()
    names = {name: [f"{name}-seed{seed}" for seed in seeds] if seeds[1:] else [name] for name in settings.drafts}
    drafts = {
        name: replace(draft, seeds=seeds, reference=draft.reference if draft.selects else None)
        for name, draft in settings.drafts.items()
    }
    evaluation = replace(settings.evaluation or EvaluationSettings(), decode_prompts=0, accuracy_prompts=1)
    alone = replace(settings.trainer, devices=ranks.one_device(settings.trainer), num_nodes=1, strategy="auto")
    full = replace(settings, drafts=drafts, export=ExportSettings(), evaluation=evaluation, trainer=alone)
    folder, lines = Path(full.output_dir) / full.name, dict[str, Line]()
    runs = {f"{kind} ": _of_kind(full, kind) for kind in kinds} or {"": full}
    works = [Path(each.output_dir) / each.name / "work" for each in runs.values()]
    for (kind, each), work in zip(runs.items(), works):
        for part in WRITTEN:
            if (works[0] / part).is_dir() and not (work / part).exists():
                with replaced(work / part) as aside:  # whole or not at all
                    shutil.copytree(works[0] / part, aside)
        report = read_json(run_pipeline(each, console, show=False).folder / "report.json")
        lines |= {f"{kind}{name}": (report, seeded) for name, seeded in names.items()}
        rows = table(lines, full.student.block.size - 1 if kinds else None, settings.ablation.against)
        more = doubled(settings, rows) if len(kinds) < 2 else ""
        write_table(folder / "ablation.md", rows, more)
    console.print(console_table("", TABLE, rows))
    console.print(*filter(None, (more, str(folder / "ablation.md"))), sep="\n", highlight=False)
    return folder


def _of_kind(settings: AblateSettings, kind: str) -> AblateSettings:
    """Returns the settings with another kind of student, in a folder of its own; all blocks draft as many tokens."""
    student = replace(settings.student, kind=kind, block=replace(settings.student.block))
    student.draft.alike(student)
    if not student.draft.head and settings.student.draft.head:
        student.unroll = None  # a head's; a language model's would make it another kind of draft (PARD)
    changed = replace(settings, student=student, output_dir=str(Path(settings.output_dir) / settings.name), name=kind)
    changed.validate()
    return changed


def table(lines: Mapping[str, Line], length: int | None = None, against: str | None = None) -> list[Row]:
    """Returns a row for each line of the table: α, gains over one of the lines, and what the training of a seed took.

    ``length`` is that of the drafts of the accepted lengths; None: as the runs report them. The gains are over the line
    ``against``; None: the first. The p-values are times the number of lines that are compared with it.
    """
    rows = list[Row]()
    base, over = next(iter(lines)) if against is None else against, max(1, len(lines) - 1)
    for label, (report, names) in lines.items():
        seeds = [next(row for row in report["drafts"] if row["name"] == name) for name in names]
        row = seeds[0] | {"name": label, "seeds": len(names)}
        for key in ACCOUNT:
            row[key] = np.mean([each[key] for each in seeds], 0)
        for key, mode in LENGTHS.items():
            rounds = _by_text(report, mode, "rounds", names, length)
            row[key] = np.mean(sum(report["texts"][mode]["counts"]) / rounds.sum(1))
        for gain, (mode, what) in GAINS.items():
            values, texts = _by_text(report, mode, what, names, length), report["texts"][mode]
            if gain == "gain":
                row["offline_alpha_se"] = clustered_ratio(values.mean(0), texts["counts"], texts["prompts"])[1]
            if base in lines and label != base:
                other, others = lines[base]
                row |= _gain(gain, _by_text(other, mode, what, others, length), values, texts, over)
        rows.append(plain(row))
    return rows


def _by_text(report: Row, mode: str, what: str, names: Sequence[str], length: int | None = None) -> np.ndarray:
    """Returns summed acceptance, or rounds of drafts of this length, of ``[drafts, texts]``."""
    found = [report["texts"][mode]["drafts"][name][what] for name in names]
    if what == "rounds":
        found = [each[str(length)] if length else next(iter(each.values())) for each in found]
    return np.array(found)


def _gain(name: str, base: np.ndarray, values: np.ndarray, texts: Row, comparisons: int) -> Row:
    """Returns the mean difference over seeds of ``[seeds, texts]``, with its error over seeds and texts, and p.

    p is the larger one of the seeds' own error and of both together (see `p_value`), times the number of comparisons.
    """
    change, whole = values - base, sum(texts["counts"])
    by_seed, scale = change.sum(1) / whole, 1.0
    if name == "length_gain":  # tokens / rounds change by the rounds per token, times both lengths
        lengths = whole / base.sum(1), whole / values.sum(1)
        by_seed, scale = lengths[1] - lengths[0], float(np.mean(lengths[0] * lengths[1]))
    of_seeds = np.std(by_seed, ddof=1) / len(by_seed) ** 0.5 if len(by_seed) > 1 else 0.0
    of_texts = scale * clustered_ratio(change.mean(0), texts["counts"], texts["prompts"])[1]
    gain, error = by_seed.mean(), np.hypot(of_seeds, of_texts)
    p = p_value(gain, error, equal_weights(np.bincount(texts["prompts"], texts["counts"])))
    if len(by_seed) > 1:
        p = max(p, p_value(gain, of_seeds, len(by_seed)))
    return {name: gain, f"{name}_se": error, f"{name}_by_seed": by_seed, f"{name}_p": min(1.0, p * comparisons)}


def write_table(path: Path, rows: Sequence[Row], more: str) -> None:
    """Writes the table in Markdown with ``more`` and the definitions of its columns, as CSV and JSON."""
    formulas = {COLUMNS[key].label: COLUMNS[key].formula for key in TABLE if COLUMNS[key].formula}
    write_json(path.with_suffix(".json"), {"drafts": rows})
    legend = "\n".join(f"- **{name}**: {formula}." for name, formula in formulas.items())
    write_text(path, f"{markdown(TABLE, rows)}\n\n{more}\n\n{legend}\n")
    write_text(path.with_suffix(".csv"), comma_separated(rows))
