"""``python -m distill ablate``: the drafts of a configuration, each trained with several seeds, compared in one table.

A draft of every name, seed and kind is trained from one target, one student of that kind and one reference; the seed
decides the order of the training examples. Acceptance is measured on one set of texts that the target generated, so
drafts are compared text by text. Nothing is decoded. Finished drafts are kept, so a killed run continues.
"""

import math
import shutil
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path

import torch
from rich.console import Console

from decode.errors import UserError
from decode.files import write_json, write_text
from decode.measure import machine
from decode.measure.acceptance import OfflineAlpha, offline_accepted_length, paired, paired_lengths
from decode.measure.plots import lines
from decode.measure.report import COLUMNS, comma_separated, console_table, latex, markdown
from decode.measure.session import BenchOptions, Session
from decode.measure.suites import Row
from decode.models.open import open_draft
from decode.progress import output_console, working
from distill.config import AblateSettings, EvaluationSettings, ExportSettings
from distill.config.base import StudentKind
from distill.data.corpus import test_suite
from distill.pipeline import prepare_settings
from distill.results.evaluate import Text, acceptance, target_texts
from distill.run import Run, alone_in
from distill.stages import run_stages

Alphas = dict[str, list[list[OfflineAlpha]]]  # by mode, of each seed, as first, second, … drafted token

MODES = {"sampled": 1.0, "greedy": 0.0}
GAINS = {"gain": "sampled", "greedy_gain": "greedy", "length_gain": "sampled"}
"""Columns that compare a draft with the first one on the same texts, by the decoding mode."""
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

    The table is written after each draft. Raises a `UserError` where the settings cannot be used.
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
    variants = {d.name: d if d.selects else replace(d, reference=None) for d in settings.drafts}
    references = [name for name in variants if any(d.selects and d.reference == name for d in settings.drafts)]
    drafts = [replace(v, name=f"{name}-seed{seed}", seed=seed) for seed in seeds for name, v in variants.items()]
    full = replace(settings, drafts=[*(variants[name] for name in references), *drafts], export=ExportSettings())
    full.validate()
    full.trainer = replace(full.trainer, devices=1, num_nodes=1, strategy="auto")
    folder = Path(full.output_dir) / full.name
    runs: dict[str, Run] = {kind: Run(_of_kind(full, kind), console) for kind in kinds} or {"": Run(full, console)}
    length = full.student.block.size - 1 if kinds else None
    alphas, used, texts = dict[str, Alphas](), dict[str, list[Row]](), dict[str, list[Text]]()
    for kind, run in runs.items():
        with alone_in(run):
            for part in WRITTEN:
                source, copied = next(iter(runs.values())).work / part, run.work / part
                if source.is_dir() and not copied.exists():
                    shutil.copytree(source, copied)
            prepare_settings(run)
            run_stages(run, ("target", "initial", *references))
            target = run.load_target("float32" if run.device.type == "cpu" else None)
            if not texts:
                measured, threads = full.evaluation or EvaluationSettings(), torch.get_num_threads()
                options = BenchOptions(measured.max_new_tokens, seed=full.seed, threads=threads, pack="off")
                session = Session(target, None, run.tokenizer, options)
                prompts = test_suite(run.corpus, full.data.source, measured.prompts).prompts
                with working(console, "  the target's answers"):
                    texts = {mode: target_texts(session, prompts, heat) for mode, heat in MODES.items()}
            for seed in seeds:
                for name, variant in variants.items():
                    draft, trust = f"{name}-seed{seed}", full.student.trust_remote_code
                    found = alphas.setdefault(label := f"{kind} {name}".strip(), {mode: [] for mode in MODES})
                    run_stages(run, (draft,))
                    models = {draft: open_draft(run.path(draft), target, run.tokenizer, trust_remote_code=trust)}
                    with working(console, f"  acceptance of {kind} {draft}"):
                        for mode, temperature in MODES.items():
                            found[mode] += acceptance(target, models, texts[mode], temperature).values()
                    record = run.draft_record(draft)
                    account = {**record.account, "seconds": record.seconds, "settings": asdict(variant)}
                    used.setdefault(label, []).append(account)
                    write_table(folder / "ablation.md", table(alphas, used, length), console)
    return folder


def _of_kind(settings: AblateSettings, kind: StudentKind) -> AblateSettings:
    """Returns the settings with another kind of student, in a folder of its own; all blocks draft as many tokens."""
    block = settings.student.block
    rank = None if kind == "dflash" else block.markov_rank
    block = replace(block, size=block.size - (kind == "dspark"), markov_rank=rank)
    student = replace(settings.student, kind=kind, block=block)
    made = replace(settings, student=student, output_dir=str(Path(settings.output_dir) / settings.name), name=kind)
    made.validate()
    return made


def table(alphas: Mapping[str, Alphas], used: Mapping[str, Sequence[Row]], length: int | None = None) -> list[Row]:
    """Returns a row for each measured draft: α, gains over the first draft, and what the training of a seed took.

    Accepted lengths are of drafts of `length` tokens: see `offline_accepted_length`.
    """
    first, *_ = alphas.values()

    def compare(key: str, a: list[OfflineAlpha], b: list[OfflineAlpha]) -> dict[str, float]:
        return paired_lengths(a, b, length) if key == "length_gain" else paired(a[0], b[0])

    rows = []
    for name, accounts in used.items():
        sampled = alphas[name]["sampled"]
        mean = _mean([depths[0] for depths in sampled])
        row = accounts[0] | {"name": name, "seeds": len(accounts), "offline_alpha": mean.mean}
        row["offline_alpha_se"] = None if math.isnan(mean.se) else mean.se
        for key, mode in (("offline_accepted_length", "sampled"), ("greedy_accepted_length", "greedy")):
            row[key] = statistics.fmean(offline_accepted_length(depths, length) for depths in alphas[name][mode])
        row["alpha_by_position"] = [_mean(each).mean for each in zip(*sampled)]
        for key in ("optimiser_steps", "teacher_tokens", "seconds"):
            row[key] = statistics.fmean(account[key] for account in accounts)
        for key, mode in GAINS.items() if alphas[name] is not first else ():
            before, after = first[mode][: len(accounts)], alphas[name][mode]
            gains = [compare(key, x, y)["difference"] for x, y in zip(before, after)]
            se_texts = compare(key, *([_mean(by_depth) for by_depth in zip(*each)] for each in (before, after)))["se"]
            se_seeds = statistics.stdev(gains) / math.sqrt(len(gains)) if len(gains) > 1 else 0.0
            row |= {key: statistics.fmean(gains), f"{key}_se": math.hypot(se_seeds, se_texts), f"{key}_by_seed": gains}
        rows.append(row)
    return rows


def _mean(alphas: Sequence[OfflineAlpha]) -> OfflineAlpha:
    """Returns the mean of every position over measurements of the same texts."""

    def mean(several: Sequence[list[list[float]]]) -> list[list[float]]:
        return [[statistics.fmean(place) for place in zip(*text)] for text in zip(*several)]

    return OfflineAlpha(mean([a.texts for a in alphas]), alphas[0].prompts, mean([a.kept for a in alphas]))


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
    write_text(path.with_name("positions.svg"), by_position(rows))
    console.print(str(path), highlight=False)


def by_position(rows: Sequence[Row]) -> str:
    """Draws α of every drafted token; that of a language model does not depend on the position."""
    deepest, points = max(len(row["alpha_by_position"]) for row in rows), {}
    for row in rows:
        alphas = row["alpha_by_position"]
        points[row["name"]] = list(enumerate(alphas if len(alphas) > 1 else alphas * deepest, 1))
    return lines(points, "Acceptance by position", "position in the draft (token)", "α, mean of Σ min(p, q)")
