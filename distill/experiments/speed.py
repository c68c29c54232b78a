"""``python -m distill bench``: how fast, and in how much memory, AdaSPEC trains here.

Two measurements, each side in a process of its own, on the same weights, batches and optimiser:

- training steps with everything cached (every epoch but the first), against `distill.experiments.speed`;
- the loss alone at large vocabularies, its time and peak memory with gradients.
"""

import ctypes
import gc
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from jsonargparse.typing import PositiveFloat, PositiveInt
from lightning.pytorch.callbacks import Callback
from rich.box import HEAVY_HEAD
from rich.console import Console
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import SequentialSampler
from transformers import PreTrainedModel, Trainer, TrainerCallback, TrainingArguments
from transformers.utils import logging as hf_logging

from decode.bench import machine
from decode.bench.report import plain_table
from decode.errors import UserError
from decode.models.huggingface_runner import free_memory
from decode.models.loading import load_model, load_tokenizer
from decode.models.runner import synchronize
from decode.progress import output_console, working
from distill.config.drafts import DraftSettings
from distill.config.run import Settings
from distill.config.training import TrainerSettings, TrainingSettings
from distill.data.batches import DistillDataModule, Schedule, TokenDataset
from distill.data.chat import IGNORE
from distill.data.corpus import load_corpus
from distill.files import write_json
from distill.losses.chunked import LossRequest, fused_loss
from distill.losses.divergences import Divergence
from distill.losses.objective import Objective
from distill.losses.selection import Selection, share, top_share
from distill.models.lm_head import LMHead
from distill.models.loading import load_or_build
from distill.models.optimizers import make_optimizer, make_schedule
from distill.modules import DistillModule
from distill.stages import RunDir
from distill.teacher import store
from distill.teacher.signals import HiddenRows, TargetSignal, Teacher
from distill.trainer import fit, quiet


def examples(rows: TokenDataset, schedule: Schedule, steps: int) -> list[dict[str, list[int]]]:
    """The examples of a schedule's steps, one after the other."""
    found = []
    for i in (int(i) for step in range(steps) for i in schedule.batch(step)):
        span = slice(int(rows.offsets[i]), int(rows.offsets[i + 1]))
        found.append({"input_ids": rows.ids[span].tolist(), "labels": rows.labels[span].tolist()})
    return found


def selective_loss(draft: Tensor, target: Tensor, reference: Tensor, k: float, *, mean: bool) -> Tensor:
    """AdaSPEC's loss from whole logits of label positions, ``[rows, vocab]`` each; their mean, or over all rows.

    Args:
        draft: Logits that carry the gradient.
        target: Of the frozen target.
        reference: Of the frozen reference.
        k: Share of the rows that is selected.
        mean: Divide by the selected rows instead of by all.
    """
    p = functional.softmax(target.float(), dim=-1)
    kl = torch.nn.KLDivLoss(reduction="none")
    actual = kl(functional.log_softmax(draft.float(), dim=-1), p).sum(-1)
    with torch.no_grad():
        known = kl(functional.log_softmax(reference.float(), dim=-1), p).sum(-1)
    count = share(k, len(actual))
    chosen = torch.topk((actual - known).detach(), count).indices
    return actual[chosen].sum() / (count if mean else len(actual))


class _TrainerClock(TrainerCallback):
    def __init__(self, ends: list[float], device: torch.device) -> None:
        self.ends, self.device = ends, device

    def on_step_end(self, *_: Any, **__: Any) -> None:
        synchronize(self.device)
        self.ends.append(time.perf_counter())


class ThreeModels(Trainer):
    """Hugging Face's trainer with the loss of three forward passes."""

    def __init__(
        self, *, target: PreTrainedModel, reference: PreTrainedModel, k: float, mean: bool, **options: Any
    ) -> None:
        super().__init__(**options)
        self.target, self.reference = (m.eval().to(self.args.device) for m in (target, reference))
        self.k, self.mean = k, mean
        self.losses: list[Tensor] = []  # Every step's loss
        self.ends: list[float] = []  # When each step ended, in seconds
        self.add_callback(_TrainerClock(self.ends, self.args.device))

    def compute_loss(
        self, model: Any, inputs: dict[str, Tensor], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """One step's loss."""
        labels = inputs.pop("labels")
        outputs = model(**inputs, use_cache=False)
        with torch.no_grad():
            target = self.target(**inputs, use_cache=False).logits
            reference = self.reference(**inputs, use_cache=False).logits
        mask = labels[:, 1:] != IGNORE
        draft, target, reference = (logits[:, :-1][mask] for logits in (outputs.logits, target, reference))
        loss = selective_loss(draft, target, reference, self.k, mean=self.mean)
        self.losses.append(loss.detach())
        return (loss, outputs) if return_outputs else loss

    def _get_train_sampler(self, *_: Any) -> SequentialSampler:
        assert self.train_dataset is not None
        return SequentialSampler(self.train_dataset)  # the schedule has shuffled already


@dataclass
class TrainingCase:
    """A training that both sides do."""

    folder: str  # of the three models
    rows: TokenDataset
    training: TrainingSettings
    trainer: TrainerSettings
    selection: Selection
    signal: TargetSignal
    steps: int
    schedule: Schedule
    seed: int


def trainer(job: TrainingCase, draft: Any, target: PreTrainedModel, reference: PreTrainedModel) -> ThreeModels:
    """The trainer for the same batches, optimiser and learning rates as draftsmith's own training."""
    optimizer, cpu = make_optimizer(draft, job.training), not torch.cuda.is_available()
    arguments = TrainingArguments(
        output_dir=f"{job.folder}/hf", max_steps=job.steps, per_device_train_batch_size=job.schedule.batch_size,
        max_grad_norm=job.trainer.gradient_clip, logging_strategy="no", save_strategy="no", report_to=[],
        disable_tqdm=True, use_cpu=cpu, remove_unused_columns=False, dataloader_pin_memory=not cpu,
    )  # fmt: skip
    return ThreeModels(
        target=target, reference=reference, k=job.selection.k, mean=job.selection.normalisation == "paper",
        model=draft, args=arguments, train_dataset=examples(job.rows, job.schedule, job.steps),
        data_collator=partial(collate, pad_id=0),
        optimizers=(optimizer, make_schedule(optimizer, job.training, job.steps)),
    )  # fmt: skip


def collate(rows: Sequence[Mapping[str, Any]], pad_id: int) -> dict[str, Tensor]:
    """A batch for Hugging Face's Trainer, padded on the right to its longest row."""
    time = max(len(row["input_ids"]) for row in rows)
    fills = {"input_ids": pad_id, "labels": IGNORE}
    batch = {key: torch.full((len(rows), time), fill, dtype=torch.long) for key, fill in fills.items()}
    batch["attention_mask"] = torch.zeros(len(rows), time, dtype=torch.long)
    for place, row in enumerate(rows):
        length = len(row["input_ids"])
        for key in fills:
            batch[key][place, :length] = torch.as_tensor(row[key], dtype=torch.long)
        batch["attention_mask"][place, :length] = 1
    return batch


BUFFERS = 14
"""Copies of all rows times the vocabulary that the plain loss may have alive at once, for a guess of its needs; the
figure reported is measured."""


@dataclass
class Sides:
    """Hidden states ``[rows, width]`` and output layers of draft, target and reference; the draft's have gradients."""

    hidden: list[Tensor]
    linears: list[nn.Linear]
    k: float  # Share of the rows that is selected; 1: all, without a reference

    @classmethod
    def of(cls, rows: int, vocab: int, width: int, k: float, device: torch.device) -> "Sides":
        """Random ones, the same for the same arguments."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            linears = [nn.Linear(width, vocab, bias=False).requires_grad_(i == 0).to(device) for i in range(3)]
            hidden = [torch.randn(rows, width, device=device).requires_grad_(i == 0) for i in range(3)]
        return cls(hidden, linears, k)

    def first(self, rows: int) -> "Sides":
        """The same with fewer rows."""
        hidden = [values[:rows].detach().requires_grad_(i == 0) for i, values in enumerate(self.hidden)]
        return Sides(hidden, self.linears, self.k)


def plain(sides: Sides) -> Tensor:
    """Whole logits, PyTorch's KLDivLoss, autograd."""
    draft, target = (linear(hidden) for linear, hidden in zip(sides.linears[:2], sides.hidden))
    if sides.k == 1:
        loss = torch.nn.KLDivLoss(reduction="none")(draft.log_softmax(-1), target.softmax(-1))
        return loss.sum(-1).mean()
    return selective_loss(draft, target, sides.linears[2](sides.hidden[2]), k=sides.k, mean=True)


def chunked(sides: Sides, *, compiled: bool = False) -> Tensor:
    """The one that trains here."""
    heads = [LMHead.of(linear) for linear in sides.linears]
    target, fused = HiddenRows(sides.hidden[1], heads[1]), partial(fused_loss, compiled=compiled)
    if sides.k == 1:
        return fused(sides.hidden[0], heads[0], target, LossRequest(Divergence(), metrics=False)).total / len(
            sides.hidden[0]
        )
    with torch.no_grad():  # once per run in training, and cached; here it is part of the time
        known = fused(sides.hidden[2], heads[2], target, LossRequest(Divergence(), metrics=False)).losses
    task = LossRequest(Divergence(), lambda values: top_share(values - known, sides.k), metrics=False)
    found = fused(sides.hidden[0], heads[0], target, task)
    assert found.chosen is not None
    return found.total / len(found.chosen)


def _liger() -> Iterator[tuple[str, Callable[[Sides], Tensor]]]:
    """Liger's losses of all rows, as far as they are installed: in PyTorch, and as Triton kernels on a GPU."""
    try:
        from liger_kernel.chunked_loss import LigerFusedLinearJSDLoss
    except ImportError:
        return
    chunks = LigerFusedLinearJSDLoss(weight_hard_loss=0.0, weight_soft_loss=1.0, beta=0.0)

    def in_pytorch(sides: Sides) -> Tensor:
        labels = torch.zeros(len(sides.hidden[0]), dtype=torch.long, device=sides.hidden[0].device)
        pairs = [part for i in (0, 1) for part in (sides.hidden[i], sides.linears[i].weight)]
        loss: Tensor = chunks(*pairs, labels)
        return loss

    yield "Liger, PyTorch", in_pytorch
    if not torch.cuda.is_available():
        return
    from liger_kernel.transformers import LigerFusedLinearJSD

    kernel = LigerFusedLinearJSD(jsd_beta=0.0)
    yield (
        "Liger, Triton",
        lambda sides: kernel(sides.hidden[0], sides.linears[0].weight, sides.hidden[1], sides.linears[1].weight),
    )


def ways(k: float) -> dict[str, Callable[[Sides], Tensor]]:
    """How the mean loss of the selected rows can be computed here; those of others know no selection."""
    own: dict[str, Callable[[Sides], Tensor]] = {
        "plain": plain,
        "chunked": chunked,
        "compiled": partial(chunked, compiled=True),
    }
    return own | (dict(_liger()) if k == 1 else {})


def loss_table(
    rows: int, vocabularies: list[int], width: int, shares: list[float], rounds: int, threads: int
) -> list[dict[str, Any]]:
    """Seconds, peak memory and their ratios to the plain loss, for each vocabulary, share of the rows and way."""
    return [
        line
        for vocab in vocabularies
        for k in shares
        for line in alone(_loss_benchmark_measured, (rows, vocab, width, k, rounds), threads)
    ]


def show_losses(lines: list[dict[str, Any]], console: Console) -> None:
    """Prints the table."""
    if not lines:
        return
    cells = [
        [
            f"{line['vocab']:,}",
            f"{line['k']:g}",
            line["way"],
            f"{line['seconds']:.2f} s",
            f"{line['speedup']:.2f}",
            bytes_of(line["peak_bytes"]),
            "" if line["memory_ratio"] is None else f"{line['memory_ratio']:.1f}",
        ]
        for line in lines
    ]
    headings = ["ids", "selected", "computed", "time", "plain / it", "peak memory", "plain / it"]
    title = f"the loss alone, {lines[0]['rows']:,} tokens, with gradients"
    console.print(plain_table(title, headings, cells, HEAVY_HEAD))
    for line in lines:
        if line["measured_rows"] < line["rows"]:
            console.print(
                f"  {line['way']} does not fit here at {line['vocab']:,} ids: measured on {line['measured_rows']:,} "
                "tokens and scaled",
                highlight=False,
            )


def bytes_of(count: int | None) -> str:
    """For the table."""
    return "unknown" if count is None else f"{count / 1e6:,.0f} MB"


def _loss_benchmark_measured(case: tuple[int, int, int, float, int]) -> list[dict[str, Any]]:
    """The lines of one vocabulary and share. In turn, so that other work on the machine affects all ways alike."""
    rows, vocab, width, k, rounds = case
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    whole = Sides.of(rows, vocab, width, k, device)
    fits = rows
    while fits > 64 and fits * vocab * 4 * BUFFERS > free_memory(device) / 2:
        fits //= 2
    made = ways(k)
    sides = {name: whole.first(fits if name == "plain" else rows) for name in made}
    found: dict[str, list[tuple[float, int | None]]] = {name: [] for name in made}
    for number in range(rounds + 1):
        for name, way in made.items():
            one = _once(way, sides[name], device)
            if number:  # the first time kernels are compiled and memory is taken
                scale = rows / len(sides[name].hidden[0])
                found[name].append((one[0] * scale, None if one[1] is None else int(one[1] * scale)))
    lines = []
    for name, measured in found.items():
        seconds, peaks = zip(*measured)
        ratios = [first[0] / own[0] for first, own in zip(found["plain"], measured)]
        peak, first = (None if None in of else max(of) for of in (peaks, [peak for _, peak in found["plain"]]))
        line = {"vocab": vocab, "k": k, "way": name, "rows": rows, "measured_rows": len(sides[name].hidden[0])}
        line |= {"seconds": statistics.median(seconds), "speedup": statistics.median(ratios), "peak_bytes": peak}
        lines.append(line | {"memory_ratio": first / peak if first and peak else None})
    return lines


def _once(way: Callable[[Sides], Tensor], sides: Sides, device: torch.device) -> tuple[float, int | None]:
    """Seconds (of the processor, where it computes) and peak bytes of a loss with its gradients."""
    sides.hidden[0].grad = sides.linears[0].weight.grad = None
    gc.collect()
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)  # or the next peak begins in memory that is kept
    clock = time.process_time if device.type == "cpu" else time.perf_counter
    synchronize(device)
    memory, started = Memory(device), clock()
    way(sides).backward()
    synchronize(device)
    return clock() - started, memory.peak()


class Memory:
    """Peak memory from now on, over what is in use now: the device's, or the process's on Linux."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            self.before = torch.cuda.memory_allocated(device)
            return
        try:
            Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts anew
        except OSError:
            self.before = -1
            return
        self.before = _status("VmRSS")

    def peak(self) -> int | None:
        """Bytes; None where this system does not say."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device) - self.before
        return None if self.before < 0 else _status("VmHWM") - self.before


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def alone(work: Callable[[Any], Any], argument: Any, threads: int) -> Any:
    """The result of ``work(argument)`` in a fresh process, so that memory is its own."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_quietly, (work, argument, threads))


def _quietly(work: Callable[[Any], Any], argument: Any, threads: int) -> Any:
    hf_logging.disable_progress_bar()
    torch.set_num_threads(threads)
    with quiet():
        return work(argument)


SIDES = ("straightforward", "draftsmith")

WARM = 5  # steps that are not timed


@dataclass
class SpeedSettings:
    """What is measured."""

    steps: int = 100
    """Training steps of each side and round; the first five are not timed."""
    rounds: PositiveInt = 3
    """Times that both sides train, in turn: the ratio is the median over rounds, so a machine that other work slows
    down for a while does not decide it."""
    rows: int = 4096
    """Label tokens of the loss alone."""
    vocabularies: list[PositiveInt] = field(default_factory=lambda: [32000, 151936])
    """Vocabularies of the loss alone; none: it is not measured."""
    shares: list[PositiveFloat] = field(default_factory=lambda: [1.0, 0.4])
    """Shares of the label tokens that are selected: 1 is a loss of all, as other libraries have it."""
    hidden_size: PositiveInt = 64
    """Width of the hidden states of the loss alone; it matters little, and memory is for the logits here."""
    json: str | None = None
    """File for the numbers; null: none."""

    def validate(self) -> None:
        """Check counts that have a least value of their own."""
        for key, least in (("steps", WARM + 5), ("rows", 64)):
            if getattr(self, key) < least:
                raise UserError(f"speed.{key} is {getattr(self, key)}, wanted {least} or more")


@dataclass
class TrainingBenchSettings(Settings):
    """A run's settings, of which the models' shapes, the data and the training matter here."""

    speed: SpeedSettings = field(default_factory=SpeedSettings)
    """The measurement."""


def run(settings: TrainingBenchSettings, console: Console | None = None) -> dict[str, Any]:
    """Measures, prints a table, writes the numbers.

    Raises:
        UserError: Settings that cannot be used.
    """
    settings.validate()
    settings.speed.validate()
    if settings.student.is_head or settings.data.from_target:
        raise UserError(
            "distill bench measures the training of draft models on a data set's texts, and these settings are of "
            f"{'a feature head' if settings.student.is_head else 'texts that the target writes'}: take "
            "configs/quickstart.yaml or configs/gsm8k-pythia.yaml"
        )
    hf_logging.disable_progress_bar()
    console, threads = console or output_console(), settings.threads or torch.get_num_threads()
    with tempfile.TemporaryDirectory() as folder:
        with working(console, "models and data"):
            job, about = _prepare(settings, Path(folder))
        console.print(f"  {about}", highlight=False)
        training: dict[str, list[dict[str, Any]]] = {side: [] for side in SIDES}
        for number in range(settings.speed.rounds):
            for side, work in zip(SIDES, (_train_straightforward, _train_here)):
                with working(console, f"training, round {number + 1} of {settings.speed.rounds}, {side}"):
                    training[side].append(alone(work, job, threads))
    with working(console, "the loss alone"):
        own = settings.speed
        loss = loss_table(own.rows, own.vocabularies, own.hidden_size, own.shares, own.rounds, threads)
    result = {"pair": about, "training": _judge(training), "loss": loss, "machine": machine.describe()}
    _show(result, console)
    if settings.speed.json is not None:
        write_json(Path(settings.speed.json), result)
    return result


# -- training ----------------------------------------------------------------------------------------------------------


def _prepare(settings: TrainingBenchSettings, folder: Path) -> tuple[TrainingCase, str]:
    """The three models in folders, and what to train on: the run's own if it is finished, else random weights."""
    run, names = RunDir(Path(settings.output_dir) / settings.name), ("target", "initial", "reference")
    # AdaSPEC as the run has it: its first draft with a reference
    draft = next((draft for draft in settings.drafts if draft.selects), DraftSettings())
    stages = ("target", "initial", draft.reference or "reference")
    trained = all(run.record(stage) is not None for stage in stages)
    if not trained:
        settings.data.train_examples = min(settings.data.train_limit or 1000, settings.teacher.examples or 1000)
    given, tokenizer = settings.target, None
    if given.model is not None and settings.data.tokenizer is None:
        tokenizer = load_tokenizer(given.model, trust_remote_code=given.trust_remote_code)
    corpus = load_corpus(settings.data, seed=settings.seed, tokenizer=tokenizer)
    vocab = len(corpus.tokenizer)
    for number, (name, stage) in enumerate(zip(names, stages)):
        if trained:
            (folder / name).symlink_to(run.path(stage).resolve())
        else:
            source = settings.target if name == "target" else settings.student
            model = load_or_build(source, corpus.tokenizer, vocab, number)
            if name == "reference" and source.kind != "scratch":
                for parameter in model.parameters():  # not the draft itself, or there is nothing to rank by
                    parameter.data.mul_(1.01)
            model.save_pretrained(folder / name)
    rows = TokenDataset.of(corpus.train, settings.teacher.examples)
    training = draft.training_of(settings.training)
    selection = Selection(draft.k, draft.scope, draft.normalisation)
    models = [load_model(folder / name, device="cpu", dtype="float32") for name in ("target", "initial")]
    signal = TargetSignal.of(settings.teacher, min(LMHead(model).vocab for model in models))
    schedule = Schedule(rows.lengths, training.batch_size, training.length_bucket, settings.seed)
    job = TrainingCase(
        str(folder), rows, training, settings.trainer, selection, signal, settings.speed.steps, schedule,
        settings.seed,
    )  # fmt: skip
    sizes = [model.num_parameters() for model in models]
    weights = f"weights of {run.folder}" if trained else "weights of no run (train one to measure on it)"
    pair = f"target {sizes[0]:,} and draft {sizes[1]:,} parameters, vocabulary {vocab:,}"
    return job, f"{pair}, k = {selection.k:g}, the target's signal {signal.kind}, {weights}"


def _models(job: TrainingCase, *names: str) -> list[PreTrainedModel]:
    return [load_model(Path(job.folder) / name, device="cpu", dtype="float32") for name in names]


class _StepClock(Callback):
    """When each step ended, and its loss."""

    def __init__(self, module: DistillModule) -> None:
        self.module = module
        self.ends: list[float] = []
        self.losses: list[torch.Tensor] = []

    def on_train_batch_end(self, *_: Any) -> None:
        synchronize(self.module.device)
        self.ends.append(time.perf_counter())
        assert self.module.last_loss is not None
        self.losses.append(self.module.last_loss)


def _train_straightforward(job: TrainingCase) -> dict[str, Any]:
    target, draft, reference = _models(job, "target", "initial", "reference")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    memory = Memory(device)
    made = trainer(job, draft.train(), target, reference)
    made.train()
    return _measured(job, made.ends, made.losses, memory.peak(), 0.0)


def _train_here(job: TrainingCase) -> dict[str, Any]:
    folder = Path(tempfile.mkdtemp(dir=job.folder))  # nothing is there from an earlier round
    model, draft, reference = _models(job, "target", "initial", "reference")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    memory, rows, started = Memory(device), job.rows, time.perf_counter()
    signal = job.signal
    if signal.kind != "online":
        store.keep_signal(Teacher(model.to(device), signal), model, rows, folder, "train")
    target = Teacher(model, signal)
    rows.signals["reference_loss"] = store.reference_loss(
        reference.to(device), target, rows, Divergence(), folder=folder, name="reference"
    )
    del model, reference
    prepared = time.perf_counter() - started
    module = DistillModule(
        draft.train(), job.training, job.steps, target=target, objective=Objective(selection=job.selection),
        seed=job.seed,
    )  # fmt: skip
    clock = _StepClock(module)
    data = DistillDataModule(rows, rows.part(0, min(4, len(rows))), job.schedule, job.steps, 0)
    settings = replace(job.trainer, validate_every=job.steps)
    fit(module, data, settings, folder / "work", name="bench", console=Console(quiet=True), callbacks=(clock,))
    return _measured(job, clock.ends, clock.losses, memory.peak(), prepared)


def _measured(
    job: TrainingCase, ends: list[float], losses: list[torch.Tensor], peak: int | None, prepared: float
) -> dict[str, Any]:
    tokens = sum(job.rows.labels_of(job.schedule.batch(step)) for step in range(WARM, job.steps))
    seconds = ends[-1] - ends[WARM - 1]
    return {
        "tokens_per_second": tokens / seconds,
        "step_ms": 1000 * seconds / (job.steps - WARM),
        "step_ms_median": 1000 * statistics.median(b - a for a, b in zip(ends[WARM - 1 :], ends[WARM:])),
        "peak_bytes": peak,
        "prepare_seconds": prepared,
        "losses": [float(loss) for loss in losses],
    }


def _judge(training: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Medians over the rounds, and the ratio of each round."""
    losses = [[found.pop("losses") for found in training[side]] for side in SIDES]
    apart = [abs(a - b) / abs(a) for round in zip(*losses) for a, b in zip(*round, strict=True)]
    rates = ([found["tokens_per_second"] for found in training[side]] for side in SIDES)
    ratios = [ours / theirs for theirs, ours in zip(*rates)]

    def median(side: str, key: str) -> Any:
        values = [found[key] for found in training[side]]
        return None if None in values else statistics.median(values)

    return {side: {key: median(side, key) for key in training[side][0]} for side in SIDES} | {
        "speedup": statistics.median(ratios),
        "speedups": ratios,
        "loss_difference": max(apart),
        "loss_difference_mean": statistics.fmean(apart),
    }


def _show(result: dict[str, Any], console: Console) -> None:
    training, loss = result["training"], result["loss"]
    low, high = min(training["speedups"]), max(training["speedups"])
    spread = f" ({low:.2f} to {high:.2f})" if low < high else ""
    cells = [
        [side, f"{row['tokens_per_second']:,.0f}", f"{row['step_ms']:.1f} ms", bytes_of(row["peak_bytes"])]
        for side, row in ((side, training[side]) for side in SIDES)
    ]
    cells.append(["ratio", f"{training['speedup']:.2f}{spread}", "", ""])
    headings = ["", "label tokens/s", "step", "peak memory"]
    console.print(plain_table("AdaSPEC training, epochs after the first", headings, cells, HEAVY_HEAD))
    console.print(
        f"  largest relative difference of the losses {training['loss_difference']:.1e}; signals cached once in "
        f"{training['draftsmith']['prepare_seconds']:.1f} s",
        highlight=False,
    )
    show_losses(loss, console)
