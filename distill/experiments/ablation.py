"""``python -m distill ablate``: the drafts of a configuration, each trained with several seeds, compared in one table.

A draft of every name and seed is trained from one target, one student and one reference; the seed decides the order of
the training examples. Acceptance is measured on one set of texts that the target generated, so drafts are compared text
by text. Nothing is decoded. Finished drafts and measurements are kept, so a killed run continues.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from jsonargparse.typing import PositiveInt
from rich.console import Console

from decode.bench import machine
from decode.bench.offline_acceptance import OfflineAlpha, offline_alphas, paired, prompt_numbers
from decode.bench.prediction import replay
from decode.bench.report import markdown_table, plain_table
from decode.errors import UserError, read_json, write_text
from decode.method_options import Seed
from decode.models.loading import open_draft, stop_ids
from decode.models.pair import own_warp
from decode.models.writing import draws_of_loop, write_texts
from decode.progress import output_console, working
from distill.config.run import ExportSettings, Settings
from distill.data.context import StageContext
from distill.files import fingerprint, write_json
from distill.pipeline import alone_in
from distill.report import display, signed
from distill.run_stages import run_stages
from distill.stages import account_of, run_of, stage_fingerprints

Row = dict[str, Any]
Alphas = dict[str, list[OfflineAlpha]]  # by mode, as first, second, … drafted token

MODES = {"sampled": 1.0, "greedy": 0.0}
DRAFTED = 7  # drafted tokens per round of the accepted length
FORMULAS = {
    "α": "offline_alpha: mean of Σₓ min(p(x), q(x)) over the response positions of texts that the target sampled at "
    "T = 1; mean over seeds ± its standard error over prompts",
    "gain": "α minus that of the first draft with the same seed, on the same texts; mean over seeds ± √(variance of "
    "the seeds' gains / seeds + squared standard error of the mean gain over prompts)",
    "greedy gain": "the same at temperature 0: agreement of the argmax on the target's greedy texts",
    "over the 2nd": "gain over the second draft",
    "accepted length": f"tokens / expected rounds of {DRAFTED} drafted tokens, replayed over the sampled texts; mean "
    "over seeds",
    "length gain": "accepted length minus that of the first draft, with the errors of gain",
}
HEADINGS = ("draft", "seeds", *FORMULAS, "teacher tokens", "s")


@dataclass
class AblationSettings:
    """The seeds of an ablation."""

    seeds: list[Seed] = field(default_factory=lambda: [1, 2, 3])
    """Seeds of the order of the training examples. Every draft is trained once with each."""
    batch_size: PositiveInt = 32
    """Test prompts (evaluation.prompts of them) that the target answers at a time."""


@dataclass
class AblateSettings(Settings):
    """A run's settings, whose `drafts` are compared."""

    ablation: AblationSettings = field(default_factory=AblationSettings)
    """The seeds."""


def ablate(settings: AblateSettings, console: Console | None = None) -> Path:
    """Trains and measures what is missing. The table is written after each draft.

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
    with alone_in(run, full, console):
        run_stages(context, ("target", "initial", *references))
        meter, alphas, used = (
            Meter(context, settings.ablation.batch_size),
            dict[str, dict[int, Alphas]](),
            dict[str, list[Row]](),
        )
        for seed in seeds:
            for name in variants:
                draft = f"{name}-seed{seed}"
                run_stages(context, (draft,))
                alphas.setdefault(name, {})[seed] = meter.measure(draft)
                record = run.draft_record(draft)
                used.setdefault(name, []).append({**vars(account_of(record)), "seconds": record.seconds})
                rows = [row | {"settings": asdict(variants[row["name"]])} for row in table(alphas, used)]
                write_table(run.folder, rows, console)
    return run.folder


class Meter:
    """Measures drafts on texts that the target generates once."""

    def __init__(self, context: StageContext, batch_size: int) -> None:
        self.context, self.folder = context, context.run.work / "ablation"
        settings, corpus = context.settings.evaluation, context.corpus
        self.target = context.load_target()
        self.keys = {stage: key for stage, (key, _) in stage_fingerprints(context.settings).items()}
        count, seed = min(settings.prompts, len(corpus.test)), context.settings.seed
        self.texts: dict[str, list[tuple[list[int], int]]] = {}  # by mode, token ids and the length of the prompt
        self.made_from = fingerprint(self.keys["target"], corpus.fingerprint, count, settings.max_new_tokens, seed)
        for mode, temperature in MODES.items():
            kept = read_json(path := self.folder / f"texts-{mode}.json")
            if kept.get("made_from") != self.made_from:
                prompts = list(filter(None, map(prompt_of, corpus.test.select(range(count)))))
                with working(context.console, f"texts of the target, {mode}"):
                    answers = write_texts(
                        self.target,
                        prompts,
                        own_warp(self.target, temperature, {}),
                        budgets=[
                            min(settings.max_new_tokens, context.settings.data.max_length - len(p)) for p in prompts
                        ],
                        stop_ids=stop_ids(self.target, corpus.tokenizer),
                        draws=draws_of_loop(seed),
                        batch_size=batch_size,
                    )
                kept = {"made_from": self.made_from, "texts": [[p + a, len(p)] for p, a in zip(prompts, answers) if a]}
                write_json(path, kept)
            self.texts[mode] = [(ids, start) for ids, start in kept["texts"]]

    def measure(self, draft: str) -> Alphas:
        """Returns the acceptance of a draft in every mode; of a feature head for every depth if sampled."""
        key = fingerprint(self.keys[draft], self.made_from)
        kept = read_json(path := self.folder / f"{draft}.json")
        if kept.get("made_from") != key:
            trust = self.context.settings.student.trust_remote_code
            tokenizer = self.context.corpus.tokenizer
            model = open_draft(self.context.run.path(draft), self.target, tokenizer, trust_remote_code=trust)
            found = {}
            for mode, texts in self.texts.items():
                depth = DRAFTED if self.context.settings.student.is_head and mode == "sampled" else 1
                warp = own_warp(self.target, MODES[mode], {})
                with working(self.context.console, f"  acceptance of {draft}, {mode}"):
                    alphas = offline_alphas(self.target, {draft: model}, texts, warp, depth=depth)[draft]
                found[mode] = [alpha.texts for alpha in alphas]
            kept = {"made_from": key, "alphas": found}
            write_json(path, kept)
        prompts = {mode: prompt_numbers(texts) for mode, texts in self.texts.items()}
        return {mode: [OfflineAlpha(a, prompts[mode]) for a in depths] for mode, depths in kept["alphas"].items()}


def prompt_of(row: Mapping[str, Any]) -> list[int]:
    """Returns the tokens of an example before its first label."""
    start = next((i for i, label in enumerate(row["labels"]) if label >= 0), len(row["labels"]))
    return list(row["input_ids"][:start])


def table(alphas: Mapping[str, Mapping[int, Alphas]], used: Mapping[str, Sequence[Row]]) -> list[Row]:
    """Returns a row for each draft: α, gains over the first and the second draft, accepted length, and what it took.

    Args:
        alphas: By name and seed.
        used: By name, what the training with each seed took.
    """
    (first, *others), rows = alphas, []
    for name, by_seed in alphas.items():
        mean = _mean([of["sampled"][0] for of in by_seed.values()])
        rounds = _mean([_rounds(of["sampled"]) for of in by_seed.values()]).mean
        row: Row = {"name": name, "seeds": len(by_seed), "offline_alpha": mean.mean, "accepted_length": 1 / rounds}
        row["offline_alpha_se"] = None if math.isnan(mean.se) else mean.se
        if name != first:
            row["gain"] = gain(by_seed, alphas[first], lambda of: of["sampled"][0])
            row["greedy_gain"] = gain(by_seed, alphas[first], lambda of: of["greedy"][0])
            base = 1 / _mean([_rounds(of["sampled"]) for of in alphas[first].values()]).mean
            fewer = gain(by_seed, alphas[first], lambda of: _rounds(of["sampled"]))
            slope = base * row["accepted_length"]  # tokens per round by rounds per token, between both
            row["length_gain"] = {"gain": -slope * fewer["gain"], "se": slope * fewer["se"]}
        if name in others[1:]:
            row["over_second"] = gain(by_seed, alphas[others[0]], lambda of: of["sampled"][0])
        keys = ("optimiser_steps", "teacher_tokens", "selected_tokens", "seconds")
        rows.append(row | {key: statistics.fmean(one[key] for one in used[name]) for key in keys})
    return rows


def gain(mine: Mapping[int, Alphas], theirs: Mapping[int, Alphas], of: Any) -> Row:
    """Returns the mean difference over common seeds, paired by seed, with its errors over seeds and prompts."""
    seeds = sorted(mine.keys() & theirs.keys())
    a, b = [of(theirs[seed]) for seed in seeds], [of(mine[seed]) for seed in seeds]
    by_seed = [paired(x, y)["difference"] for x, y in zip(a, b)]
    se_texts = paired(_mean(a), _mean(b))["se"]
    se_seeds = statistics.stdev(by_seed) / math.sqrt(len(seeds)) if len(seeds) > 1 else None
    return {
        "gain": statistics.fmean(by_seed), "se": math.hypot(se_seeds or 0.0, se_texts), "se_seeds": se_seeds,
        "se_texts": se_texts, "by_seed": dict(zip(map(str, seeds), by_seed)),
    }  # fmt: skip


def _mean(alphas: Sequence[OfflineAlpha]) -> OfflineAlpha:
    """Returns the mean of every position over measurements of the same texts."""
    texts = [[statistics.fmean(place) for place in zip(*text)] for text in zip(*(a.texts for a in alphas))]
    return OfflineAlpha(texts, alphas[0].prompts)


def _rounds(alphas: Sequence[OfflineAlpha]) -> OfflineAlpha:
    """Returns the expected rounds of each text, spread over its tokens; their mean is rounds per token."""
    first, *deeper = [alpha.texts for alpha in alphas]
    rounds = [replay(text, DRAFTED, [of[i] for of in deeper])[0] for i, text in enumerate(first)]
    return OfflineAlpha([[n / len(text)] * len(text) for n, text in zip(rounds, first)], alphas[0].prompts)


def write_table(folder: Path, rows: Sequence[Row], console: Console) -> None:
    """Prints the table, and writes ``ablation.json`` and ``ablation.md``."""
    created = datetime.now(UTC).isoformat(timespec="seconds")
    content = {"created": created, "formulas": FORMULAS, "drafts": rows, "machine": machine.describe()}
    write_json(folder / "ablation.json", content)

    def error(row: Row | None, digits: int = 4) -> str:
        return f"{signed(row['gain'])} ± {row['se']:.{digits}f}" if row else "–"

    cells = [
        [
            display(row["name"]),
            str(row["seeds"]),
            f"{row['offline_alpha']:.4f}" + (f" ± {se:.4f}" if (se := row["offline_alpha_se"]) is not None else ""),
            *(error(row.get(key)) for key in ("gain", "greedy_gain", "over_second")),
            f"{row['accepted_length']:.3f}",
            error(row.get("length_gain")),
            f"{row['teacher_tokens']:,.0f}",
            f"{row['seconds']:.0f}",
        ]
        for row in rows
    ]
    legend = "\n".join(f"- **{name}**: {formula}." for name, formula in FORMULAS.items())
    write_text(folder / "ablation.md", f"{markdown_table(HEADINGS, cells)}\n\n{legend}\n")
    console.print(plain_table("", HEADINGS, cells))
    console.print(str(folder / "ablation.md"), highlight=False)
