"""``python -m distill ablate``: variations of AdaSPEC against DistillSpec, or on EAGLE heads, over several seeds.

A draft for every variant and seed is trained as any other draft for comparison, from one target, one initial draft and
one reference; the seed decides the order of the training examples. Acceptance is measured on one set of texts, so all
drafts can be compared text by text. Nothing is decoded.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from jsonargparse.typing import PositiveInt
from rich.console import Console

from decode.core.errors import UserError
from decode.core.method_options import Seed
from decode.core.progress import output_console, working
from decode.measure.offline_acceptance import OfflineAlpha, offline_alphas, prompt_numbers
from decode.models.loading.generation_config import own_warp
from decode.models.loading.open_model import open_draft
from distill.config.drafts import ComparisonSettings
from distill.config.responses import ResponseSettings
from distill.config.run_settings import Settings
from distill.core.file_fingerprints import fingerprint
from distill.core.run_dir import account_of
from distill.data.stage_context import StageContext
from distill.experiments.ablation_table import DRAFTED, Measured, write_table
from distill.experiments.target_texts import Text, target_texts
from distill.pipeline.run_pipeline import alone_in, run_of
from distill.pipeline.run_stages import run_stages
from distill.pipeline.stage_fingerprint import stage_fingerprints
from distill.pipeline.stages_of_other_runs import adopt, siblings
from distill.teacher.stored_arrays import Array, cached

MODES = {"sampled": 1.0, "greedy": 0.0}  # decoding modes and their temperatures


@dataclass
class AblationSettings:
    """How often each variant is trained."""

    seeds: list[Seed] = field(default_factory=lambda: [1, 2, 3])
    """Seeds of the order of the training examples. Every variant is trained once with each; the target, the initial
    draft, the reference and the texts measured on are the same for all."""
    batch_size: PositiveInt = 32
    """Test prompts (evaluation.prompts of them) that the target answers at a time."""

    def validate(self) -> None:
        """Check the seeds."""
        if not self.seeds or len(set(self.seeds)) < len(self.seeds):
            raise UserError(f"ablation.seeds is {self.seeds}, expected different numbers from 0 up, such as [1, 2, 3]")


@dataclass
class AblateSettings(Settings):
    """A run's settings, of which `draft` and `comparisons` are the variants."""

    ablation: AblationSettings = field(default_factory=AblationSettings)
    """Over which seeds."""


def ablate(settings: AblateSettings, console: Console | None = None) -> Path:
    """Train and measure what is not there yet; the table is written after each draft.

    Returns:
        The folder of ``ablation.json`` and ``ablation.md``.

    Raises:
        UserError: Settings that cannot be used.
    """
    settings.validate()
    settings.ablation.validate()
    console, made = console or output_console(), variants(settings)
    drafts = [
        replace(variant, name=drafted(name, seed), seed=seed)
        for seed in settings.ablation.seeds
        for name, variant in made.items()
    ]
    full = replace(settings, comparisons=drafts)
    full.validate()
    run = run_of(full)
    bench = StageContext(full, run, console)
    with alone_in(run, full, console):
        taken = adopt(run, full, siblings(run))
        if taken:
            console.print(f"already made: {', '.join(taken)}", highlight=False)
        run_stages(bench, ("target", "initial", "reference"))
        meter, measured = Meter(bench, settings.ablation.batch_size), Measured(list(made))
        for seed in settings.ablation.seeds:
            for name, variant in made.items():
                draft = drafted(name, seed)
                run_stages(bench, (draft,))
                record = run.draft_record(draft)
                used = {**vars(account_of(record)), "seconds": record.seconds}
                measured.add(name, asdict(variant), seed, meter.measure(draft), used)
                write_table(run.folder, measured, console)
    return run.folder


def variants(settings: Settings) -> dict[str, ComparisonSettings]:
    """By name: DistillSpec as long as the reference (EAGLE), the settings' draft (AdaSPEC), and the comparisons."""
    names = run_of(settings).names
    shared = {key: getattr(settings.draft, key) for key in ("epochs", "lr")}
    plain = ComparisonSettings(name=names["reference"], method="distillspec", k=1.0, iso="epochs", **shared)
    draft = ComparisonSettings(**asdict(settings.draft) | {"name": names["draft"]})
    return {variant.name: variant for variant in (plain, draft, *settings.comparisons)}


def drafted(name: str, seed: int) -> str:
    """Name of the draft of a variant and seed."""
    return f"{name}-seed{seed}"


class Meter:
    """Measures drafts on texts that the target wrote once."""

    def __init__(self, bench: StageContext, batch_size: int) -> None:
        self.bench, self.folder = bench, bench.run.work / "ablation"
        self.target = bench.load_target(bench.settings.evaluation.dtype)
        self.keys = {stage: key for stage, (key, _) in stage_fingerprints(bench.settings).items()}
        self.made_from: dict[str, str] = {}  # of each mode's texts
        self.texts = {mode: self._texts(mode, temperature, batch_size) for mode, temperature in MODES.items()}

    def _texts(self, mode: str, temperature: float, batch_size: int) -> list[Text]:
        """What the target answers to the test prompts."""
        settings, corpus = self.bench.settings.evaluation, self.bench.corpus
        how = ResponseSettings(temperature=temperature, max_new_tokens=settings.max_new_tokens, batch_size=batch_size)
        made_from = {"target": self.keys["target"], "corpus": corpus.fingerprint}
        texts, self.made_from[mode] = target_texts(
            self.bench, self.target, corpus.test, settings.prompts, how, self.folder / f"{mode}.jsonl", made_from
        )
        return texts

    def measure(self, draft: str) -> dict[str, list[OfflineAlpha]]:
        """Acceptance of a draft in every mode, of a feature head's sampled one as first, second, … drafted token."""
        depth = DRAFTED if self.bench.settings.eagle.enabled else 1
        return {mode: self._alphas(draft, mode, depth if mode == "sampled" else 1) for mode in MODES}

    def _alphas(self, draft: str, mode: str, depth: int) -> list[OfflineAlpha]:
        texts = [text for text in self.texts[mode] if len(text[0]) > text[1]]
        ends = np.cumsum([len(ids) - start for ids, start in texts])

        def parts() -> Iterator[tuple[slice, Array]]:
            bench, trust = self.bench, self.bench.settings.initial.trust_remote_code
            model = open_draft(bench.run.path(draft), self.target, bench.corpus.tokenizer, trust_remote_code=trust)
            warp = own_warp(self.target, MODES[mode], {})
            with working(self.bench.console, f"  acceptance of {draft}, {mode}"):
                found = offline_alphas(self.target, {draft: model}, texts, warp, depth=depth)[draft]
            yield slice(None), np.stack([np.concatenate([np.asarray(text) for text in of.texts]) for of in found], 1)

        made_from = fingerprint(self.keys[draft], self.made_from[mode], depth)
        shape = (int(ends[-1]), depth)
        values: Any = cached(self.folder / f"{draft}-{mode}.npy", made_from, shape, parts(), "float64")
        prompts = prompt_numbers(texts)
        return [OfflineAlpha([part.tolist() for part in np.split(of, ends[:-1])], prompts) for of in values.T]
