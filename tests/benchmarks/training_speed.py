"""How fast AdaSPEC trains here, against a straightforward implementation over Hugging Face's Trainer.

Both sides take the same steps from the same weights, on the same batches, with the same optimiser. Trainer runs target,
reference and draft at every step and computes the loss from whole logits; draftsmith keeps what the target and the
reference give, once per run, and computes the loss in chunks. The time of the former is reported apart.

    python tests/benchmarks/training_speed.py [--steps N] [--rounds N] [--config C and other settings]
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import Callback
from rich.console import Console
from torch import Tensor
from transformers import PreTrainedModel, Trainer, TrainingArguments
from transformers.utils import logging as hf_logging

from decode.commands.cli import run_main
from decode.errors import UserError
from decode.files import scratch_folder
from decode.measure.report import console_table
from decode.models.api import synchronize
from decode.progress import output_console, working
from distill.__main__ import read_settings
from distill.config import DraftSettings, Settings
from distill.data.chat import IGNORE
from distill.data.dataset import DistillDataModule, Examples, Schedule, TrainingBatches
from distill.kept import Kept
from distill.kinds.base import reference_losses
from distill.kinds.language_model import LanguageModelDraft
from distill.losses.divergences import Divergence
from distill.losses.selection import share
from distill.networks.models import load_or_build, make_optimizer, make_schedule
from distill.pipeline import with_formats
from distill.run import Run
from distill.signal.kept import keep_columns
from distill.signal.target import Signal
from distill.training.modules import DistillModule
from distill.training.trainer import fit

WARM = 5  # steps that are not timed


class StepClock(Callback):
    """The end of every step, in seconds, and its loss."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.ends, self.losses = device, list[float](), list[Tensor]()

    def tick(self, loss: Tensor) -> None:
        synchronize(self.device)
        self.ends.append(time.perf_counter())
        self.losses.append(loss.detach())

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.tick(outputs["loss"])


class ThreeModels(Trainer):
    """Hugging Face's Trainer with AdaSPEC's loss from three forward passes."""

    def __init__(self, frozen: list[PreTrainedModel], k: float, clock: StepClock, **options: Any) -> None:
        super().__init__(**options)
        self.frozen, self.k, self.clock = [model.eval().to(self.args.device) for model in frozen], k, clock

    def training_step(self, *args: Any, **options: Any) -> Tensor:
        loss = super().training_step(*args, **options)
        self.clock.tick(loss)
        return loss

    def compute_loss(self, model: Any, inputs: dict[str, Tensor], *_: Any, **__: Any) -> Tensor:
        mask = inputs.pop("labels")[:, 1:] != IGNORE
        draft = model(**inputs, use_cache=False).logits[:, :-1][mask]
        with torch.no_grad():
            target, reference = (each(**inputs, use_cache=False).logits[:, :-1][mask] for each in self.frozen)
        return selective_loss(draft, target, reference, self.k)


def selective_loss(draft: Tensor, target: Tensor, reference: Tensor, k: float) -> Tensor:
    """AdaSPEC's loss from the whole logits of label positions, ``[rows, vocab]`` each."""
    p, kl = target.softmax(-1), torch.nn.KLDivLoss(reduction="none")
    losses = kl(draft.log_softmax(-1), p).sum(-1)
    with torch.no_grad():
        delta = losses - kl(reference.log_softmax(-1), p).sum(-1)
    return losses[torch.topk(delta, share(k, len(delta))).indices].mean()


def measure(settings: Settings, steps: int, rounds: int, console: Console) -> dict[str, dict[str, float]]:
    """Measures both sides of a run's first draft with a reference, in turn, and prints a table; the medians by side."""
    settings = with_formats(settings)
    settings.validate()
    if settings.student.draft.head or settings.student.kind == "cut" or settings.data.from_target or steps < 2 * WARM:
        raise UserError(
            f"student.kind is {settings.student.kind}, data.source {settings.data.source}, --steps {steps}: expected a "
            f"draft model of its own, a data set's texts, and {2 * WARM} steps or more: use configs/quickstart.yaml"
        )
    hf_logging.disable_progress_bar()
    chosen = next((each for each in settings.drafts.values() if each.selects), DraftSettings())
    draft, training = DraftSettings("reference", k=chosen.k), chosen.training_of(settings.training)
    with scratch_folder() as folder:
        limit = min(settings.data.limits["train"] or 1000, settings.teacher.examples or 1000)
        data = replace(settings.data, train_examples=limit)
        run = Run(replace(settings, output_dir=str(folder), data=data), console)
        examples, tokenizer = Examples.of(run.corpus.train), run.tokenizer
    sources = (settings.target, settings.student, settings.student)  # of target, draft and reference
    models = [load_or_build(source, tokenizer, len(tokenizer), seed) for seed, source in enumerate(sources)]
    if settings.student.kind != "scratch":
        for parameter in models[2].parameters():  # a reference that equals the draft ranks no token above another
            parameter.data.mul_(1.01)
    if settings.trainer.precision == "64-true":
        models = [model.double() for model in models]
    schedule = Schedule(examples.lengths, training.batch_size, training.length_bucket, settings.seed)
    device = run.device
    tokens = sum(examples.labels_of(schedule.batch(step)) for step in range(WARM, steps))

    def with_trainer(clock: StepClock, folder: Path) -> float:
        (target, student, reference), cpu = copy.deepcopy(models), device.type == "cpu"
        optimizer = make_optimizer(student.train(), training, precision=settings.trainer.precision)
        arguments = TrainingArguments(
            output_dir=str(folder), max_steps=steps, per_device_train_batch_size=1,  # an item is a whole batch
            max_grad_norm=1.0, logging_strategy="no", save_strategy="no", report_to=[],
            disable_tqdm=True, use_cpu=cpu, remove_unused_columns=False, dataloader_pin_memory=not cpu,
            bf16=settings.trainer.precision == "bf16-mixed",
            train_sampling_strategy="sequential",  # the schedule has shuffled the examples already
        )  # fmt: skip
        ThreeModels(
            [target, reference], draft.k, clock, model=student, args=arguments, train_dataset=list(range(steps)),
            data_collator=lambda items: examples.batch(schedule.batch(items[0])),
            optimizers=(optimizer, make_schedule(optimizer, training, steps)),
        ).train()  # fmt: skip
        return 0.0

    def here(clock: StepClock, folder: Path) -> float:
        (target, student, reference), began = copy.deepcopy(models), time.perf_counter()
        kept, kind = replace(examples, columns={}), settings.teacher.signal
        vocab = int(student.config.get_text_config().vocab_size)
        signal = Signal(target.to(device), kind, vocab=vocab, k=settings.teacher.signal_k)
        if signal.kind != "online":
            keep_columns(Kept(signal.columns, folder / "signal"), [kept], signal.kept)
        frozen, precision = LanguageModelDraft(reference.to(device), 1), settings.trainer.precision
        shapes, losses = reference_losses(frozen, signal, Divergence(draft.divergence), precision)
        keep_columns(Kept(shapes, folder / "losses"), [kept], losses)
        prepared = time.perf_counter() - began
        module = DistillModule(
            LanguageModelDraft(student.train(), 1), signal, training, steps, settings=draft, seed=settings.seed
        )
        batches = DistillDataModule(TrainingBatches(kept, schedule, steps), kept)
        trainer = replace(settings.trainer, validate_every=steps, devices=1, strategy="auto")
        trainer.callback_instances = lambda: [clock]
        fit(module, batches, trainer, folder / "work", name="bench", console=Console(quiet=True))
        return prepared

    sides, losses = {"Trainer": with_trainer, "draftsmith": here}, dict[str, list[float]]()
    measured: dict[str, list[dict[str, float]]] = {side: [] for side in sides}
    for number in range(rounds):
        for side, train in sides.items():
            clock = StepClock(device)
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(device)
            with working(console, f"round {number + 1} of {rounds}, {side}"), scratch_folder() as folder:
                prepared = train(clock, folder)
            seconds, losses[side] = clock.ends[-1] - clock.ends[WARM - 1], [float(loss) for loss in clock.losses]
            step = 1000 * seconds / (steps - WARM)
            row = {"tokens_per_second": tokens / seconds, "step_ms": step, "prepare_seconds": prepared}
            memory = {"memory_gb": torch.cuda.max_memory_allocated(device) / 1e9} if device.type == "cuda" else {}
            measured[side].append(row | memory)
    ratios = [ours["tokens_per_second"] / theirs["tokens_per_second"] for theirs, ours in zip(*measured.values())]
    medians = {side: {k: statistics.median(row[k] for row in rows) for k in rows[0]} for side, rows in measured.items()}
    theirs, ours = (values[0] for values in losses.values())  # later ones differ where rounding changes a selection
    columns = ("name", "tokens_per_second", "step_ms", "memory_gb", "prepare_seconds")
    table = [{"name": side, **row} for side, row in medians.items()]
    console.print(console_table(f"AdaSPEC training, k = {draft.k:g}, in label tokens", columns, table))
    console.print(f"ratio {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})", highlight=False)
    console.print(f"relative difference of the first step's loss {abs(theirs - ours) / theirs:.1e}", highlight=False)
    return medians


def main() -> None:
    """Parses the arguments and measures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100, help="of each side and round; the first five are not timed")
    parser.add_argument("--rounds", type=int, default=3, help="in which both sides train in turn")
    arguments, rest = parser.parse_known_args()
    if "--config" not in rest:
        rest = ["--config", "configs/quickstart.yaml", "--teacher.signal", "hidden", *rest]  # topk is no equal loss
    measure(read_settings(rest), arguments.steps, arguments.rounds, output_console())


if __name__ == "__main__":
    sys.exit(run_main(main))
