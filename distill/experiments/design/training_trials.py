"""Trials: a shape trained for a number of steps by the run's own recipe, every length of it scaled, then measured.

A trial of n steps is a whole training: learning rates rise and fall within it, and next tokens come before the
distillation in the share that they have in the run. Trials of one shape are therefore points of one curve, whose end,
at the run's own number of steps, is what the run itself would train.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

from rich.console import Console
from transformers import PreTrainedModel

from decode.bench.offline_acceptance import DEPTH, OfflineAlpha, offline_alphas
from decode.models.heads import FeatureHead
from decode.sampling import Warp
from distill import run_stages as eagle_heads
from distill.checks import plan_reference
from distill.config.run import Settings
from distill.config.training import TrainingSettings
from distill.data.batches import Schedule, TrainLoader
from distill.data.context import StageContext
from distill.experiments.design.draft_shapes import Shape
from distill.experiments.design.trial_signals import TrialSignals
from distill.experiments.target_texts import Text
from distill.files import fingerprint, read_sealed, remove, sealed, write_json
from distill.losses.objective import Objective, divergence_of
from distill.models.loading import ready_to_save
from distill.models.optimizers import make_optimizer
from distill.modules import DistillModule, HeadModule
from distill.stages import Distillation, distil, language_model, stage_fingerprints
from distill.teacher.signals import DistillData

TIMED = 4  # training steps that are timed
Model: TypeAlias = "PreTrainedModel | FeatureHead"


@dataclass
class Trial:
    """A shape's training, and what came of it."""

    shape: str  # its name
    steps: int  # of distillation
    examples: int  # trained on
    seconds: float  # of training
    measuring: float  # seconds of measuring its acceptance
    alphas: list[OfflineAlpha]  # acceptance on the target's texts, as first, second, … drafted token
    fingerprint: str = ""  # of everything that it was made from

    @property
    def alpha(self) -> OfflineAlpha:
        """As first drafted token."""
        return self.alphas[0]

    def row(self) -> dict[str, Any]:
        """As data."""
        found = [[[round(a, 5) for a in text] for text in alpha.texts] for alpha in self.alphas]
        return {**vars(self), "alphas": found, "prompts": self.alpha.prompts}

    @classmethod
    def of(cls, row: dict[str, Any]) -> Trial:
        """From a `row`."""
        prompts = row.pop("prompts")
        return cls(**row | {"alphas": [OfflineAlpha(texts, prompts) for texts in row["alphas"]]})


class Trials:
    """Trains and measures shapes; what is there already is read from its file.

    Args:
        base: the run's own settings, data and folder, whose target is there.
        folder: of the design.
        target: the target, as it decodes.
        texts: of the target.
        texts_key: their fingerprint.
        warp: the decoding mode.
    """

    def __init__(
        self,
        base: StageContext,
        folder: Path,
        target: PreTrainedModel,
        texts: list[Text],
        texts_key: str,
        warp: Warp,
    ) -> None:
        self.base, self.folder, self.target, self.texts = base, folder, target, texts
        self.texts_key, self.warp = texts_key, warp
        self.full_steps = plan_reference(base.settings.reference.training, len(base.examples)).steps
        self.signals = TrialSignals(base, folder, target.config.get_text_config())

    def key(self, shape: Shape) -> str:
        """Fingerprint of a shape's full training."""
        return self._key(self.settings(shape, self.full_steps), None)

    def find(self, shape: Shape, steps: int, examples: int | None = None) -> Trial | None:
        """A trial that is there."""
        found = read_sealed(self._file(shape, steps, examples))
        key = self._key(self.settings(shape, steps), examples)
        return Trial.of(found) if found is not None and found.get("fingerprint") == key else None

    def run(self, shape: Shape, steps: int, examples: int | None = None) -> Trial:
        """Train and measure, unless it is there."""
        if (found := self.find(shape, steps, examples)) is not None:
            return found
        settings = self.settings(shape, steps)
        model, seconds = self.train(shape, steps, examples)
        began, used = time.monotonic(), self.signals.examples_of(steps, examples)
        alphas = self.measure(model)
        measuring = time.monotonic() - began
        trial = Trial(shape.name, steps, used, seconds, measuring, alphas, self._key(settings, examples))
        write_json(self._file(shape, steps, examples), sealed(trial.row()))
        return trial

    def train(
        self, shape: Shape, steps: int, examples: int | None = None, console: Console | None = None
    ) -> tuple[Model, float]:
        """A trained draft, and the seconds its training took; silent without a console."""
        settings = self.settings(shape, steps)
        context, key = self.signals.context(settings, shape, console), fingerprint(self._key(settings, examples))
        count = self.signals.examples_of(steps, examples)
        data = self.signals.of(shape, context, count)
        began, rows = time.monotonic(), data.train.part(0, count)
        initial = self._initial(context, shape, key)

        def begin(
            context: StageContext, objective: Objective, share: float, training: TrainingSettings, steps: int, seed: int
        ) -> Distillation:
            module = self._module(context, initial, training, steps, seed, data)
            parameters = sum(p.numel() for p in initial.parameters())
            return Distillation(module, rows, data.validation, parameters, finished)

        def finished() -> Model:
            if isinstance(initial, FeatureHead):
                return initial.eval().cpu()
            return ready_to_save(initial, context.corpus.tokenizer)

        made = distil(context, "reference", key, begin)
        for stage in ("initial", "reference"):
            remove(context.run.work / f"checkpoints-{stage}")
        assert made.model is not None
        return made.model, time.monotonic() - began

    def measure(self, model: Model) -> list[OfflineAlpha]:
        """Acceptance on the texts, by depth for a head."""
        moved = model.to(self.target.device, self.target.dtype).eval()
        return offline_alphas(self.target, {"": moved}, self.texts, self.warp, depth=DEPTH)[""]

    def step_seconds(self, shape: Shape) -> float:
        """Seconds that a training step takes, from a few."""
        settings = self.settings(shape, self.full_steps)
        context = self.signals.context(settings, shape)
        data = self.signals.of(shape, context, self.signals.examples_of(TIMED + 1))
        draft = shape.random(settings, self.target).float().train()
        training = settings.reference.training
        module = self._module(context, draft, training, TIMED + 1, settings.seed, data)
        module.to(context.device)
        module.target.to(context.device)
        optimizer = make_optimizer(draft, training, precision=settings.trainer.precision)
        schedule = Schedule(data.train.lengths, training.batch_size, training.length_bucket, settings.seed)
        times = []
        for batch in TrainLoader(data.train, schedule, TIMED + 1, context.pad_id):
            began = time.perf_counter()
            moved = module.transfer_batch_to_device(batch, context.device, 0)
            module.training_step(moved, 0).backward()
            optimizer.step()
            optimizer.zero_grad()
            times.append(time.perf_counter() - began)
        share = self._next_token_steps(settings) / self.full_steps
        return statistics.median(times[1:]) * (1 + share)

    def settings(self, shape: Shape, steps: int) -> Settings:
        """The run's settings with this shape, and with every length scaled to so many steps of distillation."""
        full = shape.settings(self.base.settings)
        share = steps / self.full_steps

        def scaled(training: TrainingSettings, steps: int) -> TrainingSettings:
            return replace(
                training, steps=max(1, steps), epochs=None, warmup_steps=round(training.warmup_steps * share)
            )

        reference = replace(full.reference, training=scaled(full.reference.training, steps))
        if shape.is_head and reference.signal == "log_probs":  # its states are kept anyway
            reference = replace(reference, signal="hidden")
        initial = full.initial
        if not shape.is_head and initial.trained:
            initial = replace(initial, training=scaled(initial.training, round(self._next_token_steps(full) * share)))
        trainer = replace(full.trainer, callbacks=[])
        if steps < self.full_steps:  # done again sooner than resumed
            trainer = replace(trainer, validate_every=max(1, steps), checkpoint_every=None)
        return replace(full, initial=initial, reference=reference, trainer=trainer)

    def _key(self, settings: Settings, examples: int | None) -> str:
        plain = Settings(**{name: getattr(settings, name) for name in Settings.__dataclass_fields__})
        return fingerprint(stage_fingerprints(plain)["reference"][0], examples, self.texts_key)

    def _file(self, shape: Shape, steps: int, examples: int | None) -> Path:
        part = "" if examples is None else f"-of-{examples}"
        return self.folder / "work" / "trials" / f"{shape.slug}-{steps}{part}.json"

    # -- training ----------------------------------------------------------------------------------------------------

    def _initial(self, context: StageContext, shape: Shape, key: str) -> Model:
        made = eagle_heads.initial(context, key) if shape.is_head else language_model(context, "initial", key)
        if made.model is None:  # a model that is taken as it is
            return shape.random(context.settings, self.target).float()
        return made.model

    def _module(
        self,
        context: StageContext,
        model: Model,
        training: TrainingSettings,
        steps: int,
        seed: int,
        data: DistillData[Any],
    ) -> DistillModule:
        settings = context.settings
        rest: dict[str, Any] = {
            "target": data.target,
            "objective": Objective(divergence_of(settings.reference)),
            "fused": settings.trainer.fused_loss,
            "seed": seed,
        }
        model = model.float().train().requires_grad_(True)
        if isinstance(model, FeatureHead):
            return HeadModule(model, training, steps, settings=settings.eagle, **rest)
        return DistillModule(model, training, steps, **rest)

    def _next_token_steps(self, settings: Settings) -> int:
        """Of a draft model, before its distillation, in the whole run."""
        if settings.eagle.enabled or not settings.initial.trained:
            return 0
        return plan_reference(settings.initial.training, len(self.base.corpus.train)).steps
