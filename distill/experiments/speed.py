"""``python -m distill bench``: how fast AdaSPEC trains here, against Hugging Face's Trainer.

Both sides take the same steps from the same weights, on the same batches, with the same optimiser. Trainer runs target,
reference and draft at every step and computes the loss from whole logits; draftsmith caches what the target and the
reference give, once per run, and computes the loss in chunks. The time of that cache is reported apart.
"""

from __future__ import annotations

import copy
import statistics
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from jsonargparse.typing import PositiveInt
from lightning.pytorch.callbacks import Callback
from rich.console import Console
from torch import Tensor
from transformers import PreTrainedModel, Trainer, TrainingArguments
from transformers.utils import logging as hf_logging

from decode.bench import machine
from decode.bench.page import console_table
from decode.errors import UserError, scratch_folder
from decode.models.runner import synchronize
from decode.progress import output_console, working
from distill.config.drafts import DraftSettings
from distill.config.run import Settings
from distill.data.chat import IGNORE
from distill.data.context import StageContext
from distill.data.loader import DistillDataModule, Schedule, TrainLoader
from distill.files import write_json
from distill.losses.divergences import Divergence
from distill.losses.objective import Objective, Selection, share
from distill.models.lm_head import LMHead
from distill.models.loading import load_or_build
from distill.models.optimizers import make_optimizer, make_schedule
from distill.modules import DistillModule
from distill.pipeline import complete_settings
from distill.stages import run_of
from distill.teacher import store
from distill.teacher.signals import TargetSignal, Teacher
from distill.trainer import fit, peak_memory, reset_peak_memory

WARM = 5  # steps that are not timed


@dataclass
class SpeedSettings:
    """The benchmark of training steps."""

    steps: int = 100
    """Training steps of each side and round; the first five are not timed."""
    rounds: PositiveInt = 3
    """Number of times that both sides train, in turn. The ratio is the median over rounds."""
    json: str | None = None
    """File for the numbers; null: none."""


@dataclass
class TrainingBenchSettings(Settings):
    """A run's settings, of which the models, the data and the training of its first draft with a reference are used."""

    speed: SpeedSettings = field(default_factory=SpeedSettings)
    """The benchmark."""


def run(settings: TrainingBenchSettings, console: Console | None = None) -> dict[str, Any]:
    """Measures both sides, prints a table, and writes the numbers.

    Raises:
        UserError: The settings cannot be used.
    """
    settings.validate()
    speed, console = settings.speed, console or output_console()
    if speed.steps < WARM + 5:
        raise UserError(f"speed.steps is {speed.steps}, expected {WARM + 5} or more")
    if settings.student.is_head or settings.student.kind == "cut" or settings.data.from_target:
        raise UserError(
            f"distill bench measures draft models of their own on a data set's texts, and student.kind is "
            f"{settings.student.kind}, data.source {settings.data.source}: use configs/quickstart.yaml"
        )
    complete_settings(settings, console)
    hf_logging.disable_progress_bar()
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    draft = next((draft for draft in settings.drafts if draft.selects), DraftSettings())
    training, selection = draft.training_of(settings.training), Selection(draft.k, draft.scope, draft.normalisation)
    limit = min(settings.data.train_limit or 1000, settings.teacher.examples or 1000)
    shorter = replace(settings, data=replace(settings.data, train_examples=limit))
    context = StageContext(shorter, run_of(shorter), console, keep_corpus=False)
    corpus, rows = context.corpus, context.examples
    sources = (settings.target, settings.student, settings.student)  # of target, draft and reference
    models = [
        load_or_build(source, corpus.tokenizer, len(corpus.tokenizer), seed) for seed, source in enumerate(sources)
    ]
    if settings.student.kind != "scratch":
        for parameter in models[2].parameters():  # a reference that equals the draft ranks no token above another
            parameter.data.mul_(1.01)
    schedule = Schedule(rows.lengths, training.batch_size, training.length_bucket, settings.seed)
    tokens = sum(rows.labels_of(schedule.batch(step)) for step in range(WARM, speed.steps))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    def with_trainer(clock: StepClock, folder: Path) -> float:
        (target, student, reference), cpu = copy.deepcopy(models), device.type == "cpu"
        optimizer = make_optimizer(student.train(), training)
        arguments = TrainingArguments(
            output_dir=str(folder), max_steps=speed.steps, per_device_train_batch_size=1,  # an item is a whole batch
            max_grad_norm=1.0, logging_strategy="no", save_strategy="no", report_to=[],
            disable_tqdm=True, use_cpu=cpu, remove_unused_columns=False, dataloader_pin_memory=not cpu,
            bf16=settings.trainer.precision == "bf16-mixed",
            train_sampling_strategy="sequential",  # the schedule has shuffled the examples already
        )  # fmt: skip
        ThreeModels(
            target, reference, selection, clock, model=student, args=arguments, train_dataset=list(range(speed.steps)),
            data_collator=lambda items: rows.batch(schedule.batch(items[0])),
            optimizers=(optimizer, make_schedule(optimizer, training, speed.steps)),
        ).train()  # fmt: skip
        return 0.0

    def here(clock: StepClock, folder: Path) -> float:
        (target, student, reference), began = copy.deepcopy(models), time.perf_counter()
        own = replace(rows, signals={})
        signal = TargetSignal.of(settings.teacher, min(LMHead(model).vocab for model in (target, student)))
        teacher = Teacher(target.to(device), signal)
        if signal.kind != "online":
            store.keep_signal(teacher, target, own, folder, "train")
        own.signals["reference_loss"] = store.reference_loss(
            reference.to(device), teacher, own, Divergence(), folder=folder, name="reference"
        )
        prepared, objective = time.perf_counter() - began, Objective(selection=selection)
        module = DistillModule(
            student.train(), training, speed.steps, target=teacher, objective=objective, seed=settings.seed
        )
        data = DistillDataModule(TrainLoader(own, schedule, speed.steps), own.part(0, min(4, len(own))))
        trainer, quiet = replace(settings.trainer, validate_every=speed.steps), Console(quiet=True)
        fit(module, data, trainer, folder / "work", name="bench", console=quiet, callbacks=(clock,))
        return prepared

    sides = {"Trainer": with_trainer, "draftsmith": here}
    found: dict[str, list[dict[str, float]]] = {side: [] for side in sides}
    losses: dict[str, list[float]] = {}
    for number in range(speed.rounds):
        for side, train in sides.items():
            clock = StepClock(device)
            reset_peak_memory(device)
            with working(console, f"round {number + 1} of {speed.rounds}, {side}"), scratch_folder() as folder:
                prepared = train(clock, folder)
            seconds, losses[side] = clock.ends[-1] - clock.ends[WARM - 1], [float(loss) for loss in clock.losses]
            step = 1000 * seconds / (speed.steps - WARM)
            found[side].append({"tokens_per_second": tokens / seconds, "step_ms": step, "prepare_seconds": prepared})
            if device.type == "cuda":
                found[side][-1]["memory_gb"] = peak_memory(device) / 1e9
    ratios = [b["tokens_per_second"] / a["tokens_per_second"] for a, b in zip(*found.values())]
    medians = {side: {key: statistics.median(one[key] for one in of) for key in of[0]} for side, of in found.items()}
    result = {
        "k": selection.k,
        "sides": medians,
        "speedup": statistics.median(ratios),
        "speedups": ratios,
        "loss_difference": max(abs(a - b) / abs(a) for a, b in zip(*losses.values(), strict=True)),
        "machine": machine.describe(),
    }
    shown = [{"name": side, **row} for side, row in medians.items()]
    columns = ("name", "tokens_per_second", "step_ms", "memory_gb", "prepare_seconds")
    console.print(console_table(f"AdaSPEC training, k = {selection.k:g}, in label tokens", columns, shown))
    console.print(
        f"ratio {result['speedup']:.2f} ({min(ratios):.2f} to {max(ratios):.2f}); largest relative difference of the "
        f"losses {result['loss_difference']:.1e}",
        highlight=False,
    )
    if speed.json is not None:
        write_json(Path(speed.json), result)
    return result


class StepClock(Callback):
    """The end of every step, in seconds, and its loss."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.ends, self.losses = device, list[float](), list[Tensor]()

    def tick(self, loss: Tensor) -> None:
        """Notes that a step has ended."""
        synchronize(self.device)
        self.ends.append(time.perf_counter())
        self.losses.append(loss.detach())

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        """Notes the end of one of Lightning's steps."""
        self.tick(module.last_loss)


class ThreeModels(Trainer):
    """Hugging Face's Trainer with AdaSPEC's loss from three forward passes."""

    def __init__(
        self,
        target: PreTrainedModel,
        reference: PreTrainedModel,
        selection: Selection,
        clock: StepClock,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.target, self.reference = (model.eval().to(self.args.device) for model in (target, reference))
        self.selection, self.clock = selection, clock

    def training_step(self, *args: Any, **options: Any) -> Tensor:
        """Takes a step, whose end is the beginning of the next one."""
        loss = super().training_step(*args, **options)
        self.clock.tick(loss)
        return loss

    def compute_loss(self, model: Any, inputs: dict[str, Tensor], *_: Any, **__: Any) -> Tensor:
        """Returns the loss of one step."""
        mask = inputs.pop("labels")[:, 1:] != IGNORE
        draft = model(**inputs, use_cache=False).logits[:, :-1][mask]
        with torch.no_grad():
            target = self.target(**inputs, use_cache=False).logits[:, :-1][mask]
            reference = self.reference(**inputs, use_cache=False).logits[:, :-1][mask]
        return selective_loss(draft, target, reference, self.selection)


def selective_loss(draft: Tensor, target: Tensor, reference: Tensor, selection: Selection) -> Tensor:
    """Returns AdaSPEC's loss from the whole logits of label positions, ``[rows, vocab]`` each."""
    p, kl = target.float().softmax(-1), torch.nn.KLDivLoss(reduction="none")
    losses = kl(draft.float().log_softmax(-1), p).sum(-1)
    with torch.no_grad():
        known = kl(reference.float().log_softmax(-1), p).sum(-1)
    count = share(selection.k, len(losses))
    chosen = torch.topk((losses - known).detach(), count).indices
    return losses[chosen].sum() / selection.divisor(count, len(losses))
