"""``python -m distill bench``: how fast AdaSPEC trains here, against Hugging Face's Trainer.

Both sides take the same steps from the same weights, on the same batches, with the same optimiser. Trainer runs target,
reference and draft at every step and computes the loss from whole logits; draftsmith caches what the target and the
reference give, once per run, and computes the loss in chunks. The time of that cache is reported apart.
"""

import copy
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from jsonargparse.typing import PositiveInt
from lightning.pytorch.callbacks import Callback
from rich.console import Console
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import SequentialSampler
from transformers import PreTrainedModel, Trainer, TrainingArguments
from transformers.utils import logging as hf_logging

from decode.bench import machine
from decode.bench.report import plain_table
from decode.errors import UserError
from decode.models.loading import load_model, load_tokenizer
from decode.models.runner import synchronize
from decode.progress import output_console, working
from distill.config.drafts import DraftSettings
from distill.config.run import Settings
from distill.data.batches import DistillDataModule, Schedule, TokenDataset
from distill.data.chat import IGNORE
from distill.data.corpus import load_corpus
from distill.files import write_json
from distill.losses.divergences import Divergence
from distill.losses.objective import Objective
from distill.losses.selection import Selection, share
from distill.models.lm_head import LMHead
from distill.models.loading import load_or_build
from distill.models.optimizers import make_optimizer, make_schedule
from distill.modules import DistillModule
from distill.stages import run_of
from distill.teacher import store
from distill.teacher.signals import TargetSignal, Teacher
from distill.trainer import fit

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
    own, student = settings.speed, settings.student
    if own.steps < WARM + 5:
        raise UserError(f"speed.steps is {own.steps}, expected {WARM + 5} or more")
    if student.is_head or settings.data.from_target:
        raise UserError("distill bench measures draft models on a data set's texts: use configs/quickstart.yaml")
    hf_logging.disable_progress_bar()
    console = console or output_console()
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    draft = next((draft for draft in settings.drafts if draft.selects), DraftSettings())
    with working(console, "models and data"):
        models, rows, trained = _prepare(settings, draft)
    training = draft.training_of(settings.training)
    schedule = Schedule(rows.lengths, training.batch_size, training.length_bucket, settings.seed)
    selection = Selection(draft.k, draft.scope, draft.normalisation)
    tokens = sum(rows.labels_of(schedule.batch(step)) for step in range(WARM, own.steps))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found: dict[str, list[dict[str, Any]]] = {"Trainer": [], "draftsmith": []}
    for number in range(own.rounds):
        for side in found:
            target, start, reference = copy.deepcopy(models)
            clock, prepared = StepClock(device), 0.0
            with working(console, f"round {number + 1} of {own.rounds}, {side}"), tempfile.TemporaryDirectory() as name:
                optimizer = make_optimizer(start.train(), training)
                if side == "Trainer":
                    arguments = TrainingArguments(
                        output_dir=name, max_steps=own.steps, per_device_train_batch_size=training.batch_size,
                        max_grad_norm=settings.trainer.gradient_clip, logging_strategy="no", save_strategy="no",
                        report_to=[], disable_tqdm=True, use_cpu=device.type == "cpu", remove_unused_columns=False,
                        dataloader_pin_memory=device.type == "cuda",
                    )  # fmt: skip
                    ThreeModels(
                        target, reference, selection, clock, model=start, args=arguments, data_collator=_collate,
                        train_dataset=_examples(rows, schedule, own.steps),
                        optimizers=(optimizer, make_schedule(optimizer, training, own.steps)),
                    ).train()  # fmt: skip
                else:
                    began = time.perf_counter()
                    signal = TargetSignal.of(settings.teacher, min(LMHead(m).vocab for m in (target, start)))
                    teacher = Teacher(target.to(device), signal)
                    if signal.kind != "online":
                        store.keep_signal(teacher, target, rows, Path(name), "train")
                    rows.signals["reference_loss"] = store.reference_loss(
                        reference.to(device), teacher, rows, Divergence(), folder=Path(name), name="reference"
                    )
                    prepared = time.perf_counter() - began
                    objective = Objective(selection=selection)
                    module = DistillModule(
                        start, training, own.steps, target=teacher, objective=objective, seed=settings.seed
                    )
                    data = DistillDataModule(rows, rows.part(0, min(4, len(rows))), schedule, own.steps, 0)
                    trainer = replace(settings.trainer, validate_every=own.steps)
                    fit(
                        module,
                        data,
                        trainer,
                        Path(name) / "work",
                        name="bench",
                        console=Console(quiet=True),
                        callbacks=(clock,),
                    )
                    rows.signals.clear()
            seconds = clock.ends[-1] - clock.ends[WARM - 1]
            found[side].append(
                {
                    "tokens_per_second": tokens / seconds,
                    "step_ms": 1000 * seconds / (own.steps - WARM),
                    "prepare_seconds": prepared,
                    "losses": [float(loss) for loss in clock.losses],
                }
            )
    result = _summary(found) | {"k": selection.k, "weights": trained, "machine": machine.describe()}
    cells = [
        [side, f"{row['tokens_per_second']:,.0f}", f"{row['step_ms']:.1f} ms", f"{row['prepare_seconds']:.1f} s"]
        for side, row in result["sides"].items()
    ]
    headings = ["", "label tokens/s", "step", "cache, once per run"]
    console.print(plain_table(f"AdaSPEC training, k = {selection.k:g}, weights of {trained}", headings, cells))
    low, high = min(result["speedups"]), max(result["speedups"])
    console.print(
        f"ratio {result['speedup']:.2f} ({low:.2f} to {high:.2f}); largest relative difference of the losses "
        f"{result['loss_difference']:.1e}",
        highlight=False,
    )
    if own.json is not None:
        write_json(Path(own.json), result)
    return result


def _prepare(settings: TrainingBenchSettings, draft: DraftSettings) -> tuple[list[PreTrainedModel], TokenDataset, str]:
    """Returns target, student and reference, the examples, and whose weights the models have."""
    folder = run_of(settings)
    stages = ("target", "initial", draft.reference or "reference")
    trained = all(folder.record(stage) is not None for stage in stages)
    if not trained:
        settings.data.train_examples = min(settings.data.train_limit or 1000, settings.teacher.examples or 1000)
    given, tokenizer = settings.target, None
    if given.model is not None and settings.data.tokenizer is None:
        tokenizer = load_tokenizer(given.model, trust_remote_code=given.trust_remote_code)
    corpus = load_corpus(settings.data, seed=settings.seed, tokenizer=tokenizer)
    models = []
    for number, stage in enumerate(stages):
        if trained:
            models.append(load_model(folder.path(stage), device="cpu", dtype="float32"))
            continue
        source = settings.target if stage == "target" else settings.student
        models.append(load_or_build(source, corpus.tokenizer, len(corpus.tokenizer), number))
    if not trained and settings.student.kind != "scratch":
        for parameter in models[2].parameters():  # a reference that equals the student ranks no token before another
            parameter.data.mul_(1.01)
    rows = TokenDataset.of(corpus.train, settings.teacher.examples)
    return models, rows, str(folder.folder) if trained else "no run"


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

    def compute_loss(
        self, model: Any, inputs: dict[str, Tensor], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Returns the loss of one step."""
        mask = inputs.pop("labels")[:, 1:] != IGNORE
        outputs = model(**inputs, use_cache=False)
        with torch.no_grad():
            target = self.target(**inputs, use_cache=False).logits[:, :-1][mask]
            reference = self.reference(**inputs, use_cache=False).logits[:, :-1][mask]
        loss = selective_loss(outputs.logits[:, :-1][mask], target, reference, self.selection)
        return (loss, outputs) if return_outputs else loss

    def _get_train_sampler(self, *_: Any) -> SequentialSampler:
        assert self.train_dataset is not None
        return SequentialSampler(self.train_dataset)  # the schedule has shuffled already


def selective_loss(draft: Tensor, target: Tensor, reference: Tensor, selection: Selection) -> Tensor:
    """Returns AdaSPEC's loss from the whole logits of label positions, ``[rows, vocab]`` each."""
    p, kl = target.float().softmax(-1), torch.nn.KLDivLoss(reduction="none")
    losses = kl(draft.float().log_softmax(-1), p).sum(-1)
    with torch.no_grad():
        known = kl(reference.float().log_softmax(-1), p).sum(-1)
    count = share(selection.k, len(losses))
    chosen = torch.topk((losses - known).detach(), count).indices
    return losses[chosen].sum() / selection.divisor(count, len(losses))


def _examples(rows: TokenDataset, schedule: Schedule, steps: int) -> list[dict[str, list[int]]]:
    """Returns the examples of all steps, one after the other."""
    spans = [(rows.offsets[i], rows.offsets[i + 1]) for step in range(steps) for i in schedule.batch(step)]
    return [{"input_ids": rows.ids[a:b].tolist(), "labels": rows.labels[a:b].tolist()} for a, b in spans]


def _collate(examples: Sequence[dict[str, list[int]]]) -> dict[str, Tensor]:
    padding = {"input_ids": 0, "labels": IGNORE}
    return {
        name: pad_sequence([torch.tensor(row[name]) for row in examples], batch_first=True, padding_value=value)
        for name, value in padding.items()
    }


def _summary(found: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Returns medians over the rounds, the ratio of each round, and the largest relative difference of the losses."""
    losses = [[one.pop("losses") for one in rounds] for rounds in found.values()]
    apart = [abs(a - b) / abs(a) for both in zip(*losses) for a, b in zip(*both, strict=True)]
    ratios = [b["tokens_per_second"] / a["tokens_per_second"] for a, b in zip(*found.values())]
    return {
        "sides": {
            side: {key: statistics.median(one[key] for one in rounds) for key in rounds[0]}
            for side, rounds in found.items()
        },
        "speedup": statistics.median(ratios),
        "speedups": ratios,
        "loss_difference": max(apart),
    }
