"""``python -m distill ablate``: the drafts of a configuration, each trained with several seeds, compared in one table.

A draft of every name and seed is trained from one target, one student and one reference; the seed decides the order of
the training examples. Acceptance is measured on one set of texts that the target generated, so drafts are compared text
by text. Nothing is decoded. Finished drafts and measurements are kept, so a killed run continues.
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from decode.bench import machine
from decode.bench.offline_acceptance import OfflineAlpha, offline_alphas, paired, prompt_numbers
from decode.bench.page import COLUMNS, console_table, markdown
from decode.bench.prediction import offline_accepted_length, paired_lengths
from decode.errors import UserError, read_json, write_text
from decode.method_options import Seed
from decode.models.loading import open_draft, stop_ids
from decode.models.pair import own_warp
from decode.models.writing import draws_of_loop, write_texts
from decode.progress import output_console, working
from distill.config.run import ExportSettings, Settings
from distill.data.context import StageContext
from distill.data.corpus import test_suite
from distill.files import fingerprint, write_json
from distill.pipeline import alone_in
from distill.run_stages import run_stages
from distill.stages import run_of, stage_fingerprints

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
    run = run_of(full)
    context = StageContext(full, run, console)
    alphas: dict[str, dict[int, Alphas]] = {}
    used: dict[str, list[Row]] = {}
    with alone_in(run, full, console):
        run_stages(context, ("target", "initial", *references))
        meter = Meter(context)
        for seed in seeds:
            for name in variants:
                draft = f"{name}-seed{seed}"
                run_stages(context, (draft,))
                alphas.setdefault(name, {})[seed] = meter.measure(draft)
                record = run.draft_record(draft)
                used.setdefault(name, []).append({**record.account, "seconds": record.seconds})
                rows = [row | {"settings": asdict(variants[row["name"]])} for row in table(alphas, used)]
                created = datetime.now(UTC).isoformat(timespec="seconds")
                write_table(run.folder / "ablation.md", TABLE, rows, console, created=created)
    return run.folder


class Meter:
    """Measures drafts on texts that the target generates once. Texts and measurements are kept in the run's folder."""

    def __init__(self, context: StageContext) -> None:
        self.context = context
        settings, corpus = context.settings.evaluation, context.corpus
        self.target = context.load_target()
        self.keys = {stage: key for stage, (key, _) in stage_fingerprints(context.settings).items()}
        dtype, seed = context.settings.target.dtype, context.settings.seed
        self.made_from = fingerprint(
            self.keys["target"], dtype, corpus.fingerprint, settings.prompts, settings.max_new_tokens, seed
        )
        self.texts = {mode: self.kept(f"texts-{mode}", self.made_from, partial(self.answers, mode)) for mode in MODES}

    def kept(self, name: str, key: str, make: Callable[[], Any]) -> Any:
        """Returns what was made from the inputs of this key; makes it where it is missing or they have changed."""
        content = read_json(path := self.context.run.work / "ablation" / f"{name}.json")
        if content.get("made_from") != key:
            with working(self.context.console, f"  ablation: {name}"):
                content = {"made_from": key, "content": make()}
            write_json(path, content)
        return content["content"]

    def answers(self, mode: str) -> list[tuple[list[int], int]]:
        """Returns the target's answers to the test prompts: ids of prompt and answer, and the prompt's length."""
        settings, corpus = self.context.settings, self.context.corpus
        suite = test_suite(corpus, settings.data.source, settings.evaluation.prompts)
        prompts = [list(prompt.ids) for prompt in suite.prompts if prompt.ids]
        answers = write_texts(
            self.target,
            prompts,
            own_warp(self.target, MODES[mode], {}),
            budgets=[min(settings.evaluation.max_new_tokens, settings.data.max_length - len(p)) for p in prompts],
            stop_ids=stop_ids(self.target, corpus.tokenizer),
            draws=draws_of_loop(settings.seed),
            batch_size=settings.evaluation.batch_size,
        )
        return [(p + a, len(p)) for p, a in zip(prompts, answers) if a]

    @property
    def depth(self) -> int:
        """Drafted tokens whose acceptance is measured: all of a block, some of a feature head, the first of a model."""
        student = self.context.settings.student
        return student.steps if student.is_block else DEPTH if student.is_head else 1

    def acceptance(self, draft: str) -> dict[str, list[Any]]:
        """Returns `OfflineAlpha`'s texts and what is kept of them, by mode and drafted token."""
        student, found = self.context.settings.student, {}
        trust, tokenizer = student.trust_remote_code, self.context.corpus.tokenizer
        model = open_draft(self.context.run.path(draft), self.target, tokenizer, trust_remote_code=trust)
        for mode, texts in self.texts.items():
            warp = own_warp(self.target, MODES[mode], {})
            alphas = offline_alphas(self.target, {draft: model}, texts, warp, depth=self.depth)
            found[mode] = [(alpha.texts, alpha.kept) for alpha in alphas[draft]]
        return found

    def measure(self, draft: str) -> Alphas:
        """Returns the acceptance of a draft in every mode; of a head at every depth."""
        made_from = fingerprint(self.keys[draft], self.made_from, self.depth)
        found = self.kept(draft, made_from, partial(self.acceptance, draft))
        prompts = {mode: prompt_numbers(texts) for mode, texts in self.texts.items()}
        return {
            mode: [OfflineAlpha(texts, prompts[mode], kept) for texts, kept in depths] for mode, depths in found.items()
        }


def table(alphas: Mapping[str, Mapping[int, Alphas]], used: Mapping[str, Sequence[Row]]) -> list[Row]:
    """Returns a row for each draft: α, gains over the first draft, and what it took.

    Args:
        alphas: By name and seed.
        used: By name, what the training with each seed took.
    """
    first, rows = next(iter(alphas)), []
    for name, by_seed in alphas.items():
        mean = _mean([of["sampled"][0] for of in by_seed.values()])
        row: Row = {"name": name, "seeds": len(by_seed), "offline_alpha": mean.mean}
        row["offline_alpha_se"] = None if math.isnan(mean.se) else mean.se
        row["offline_accepted_length"] = statistics.fmean(
            offline_accepted_length(of["sampled"]) for of in by_seed.values()
        )
        if name != first:
            row |= gain("gain", by_seed, alphas[first], "sampled")
            row |= gain("greedy_gain", by_seed, alphas[first], "greedy")
            row |= gain("length_gain", by_seed, alphas[first], "sampled", paired_lengths)
        keys = ("optimiser_steps", "teacher_tokens", "seconds")
        rows.append(row | {key: statistics.fmean(one[key] for one in used[name]) for key in keys})
    return rows


def first_token(a: Sequence[OfflineAlpha], b: Sequence[OfflineAlpha]) -> dict[str, float]:
    """Returns the difference in α of first drafted tokens (see `paired`)."""
    return paired(a[0], b[0])


def gain(
    key: str,
    mine: Mapping[int, Alphas],
    theirs: Mapping[int, Alphas],
    mode: str,
    compare: Callable[..., dict[str, float]] = first_token,
) -> Row:
    """Returns the mean difference over common seeds, paired by seed, with its errors over seeds and prompts."""
    seeds = sorted(mine.keys() & theirs.keys())
    a, b = ([of[seed][mode] for seed in seeds] for of in (theirs, mine))
    by_seed = [compare(x, y)["difference"] for x, y in zip(a, b)]
    se_texts = compare(*([_mean(by_depth) for by_depth in zip(*of)] for of in (a, b)))["se"]
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


def write_table(path: Path, keys: Sequence[str], rows: Sequence[Row], console: Console | None, **more: Any) -> None:
    """Writes a table of drafts in Markdown with the definitions of its columns, its rows as JSON, and prints it.

    Args:
        path: Of the Markdown file, beside which the JSON file is.
        keys: Of the columns, see `decode.bench.page.COLUMNS`.
        rows: Of the table.
        console: None: nothing is printed.
        more: Further values of the JSON file.
    """
    formulas = {COLUMNS[key].label: COLUMNS[key].formula for key in keys if COLUMNS[key].formula}
    content = {**more, "formulas": formulas, "drafts": rows, "machine": machine.describe()}
    write_json(path.with_suffix(".json"), content)
    legend = "\n".join(f"- **{name}**: {formula}." for name, formula in formulas.items())
    write_text(path, f"{markdown(keys, rows)}\n\n{legend}\n")
    if console is not None:
        console.print(console_table("", keys, rows))
        console.print(str(path), highlight=False)
