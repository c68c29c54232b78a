"""``python -m distill bench``: how fast, and in how much memory, AdaSPEC trains here.

Two measurements, each side in a process of its own, on the same weights, batches and optimiser:

- training steps with everything cached (every epoch but the first), against `distill.experiments.huggingface_trainer`;
- the loss alone at large vocabularies, its time and peak memory with gradients.
"""

import statistics
import tempfile
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from jsonargparse.typing import PositiveFloat, PositiveInt
from lightning.pytorch.callbacks import Callback
from rich.box import HEAVY_HEAD
from rich.console import Console
from transformers import PreTrainedModel
from transformers.utils import logging as hf_logging

from decode.core.errors import UserError
from decode.core.progress import output_console, working
from decode.core.runner_protocol import synchronize
from decode.measure.costs import machine
from decode.models.loading.open_model import load_model, load_tokenizer
from decode.report.bench_tables import plain_table
from distill.config.drafts import AdaSpecSettings
from distill.config.run_settings import Settings
from distill.core.file_fingerprints import write_json
from distill.core.run_dir import RunDir
from distill.data.batches.batch_schedule import Schedule
from distill.data.batches.datamodule import DistillDataModule
from distill.data.batches.token_dataset import TokenDataset
from distill.data.corpus import load_corpus
from distill.experiments.huggingface_trainer import TrainingCase, trainer
from distill.experiments.loss_benchmark import Memory, alone, bytes_of, loss_table, show_losses
from distill.losses.objective import Objective
from distill.losses.token_selection import Selection
from distill.models.lm_head import LMHead
from distill.models.loading import load_or_build
from distill.pipeline.training_budget import plan_draft, plan_reference
from distill.teacher import hidden_state_store as signals
from distill.teacher.target_distribution import TargetSignal, TargetSource
from distill.training.distillation import DistillModule
from distill.training.lightning_trainer import fit

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
    if settings.eagle.enabled or settings.data.from_target:
        raise UserError(
            "distill bench measures the training of draft models on a data set's texts, and these settings are of "
            f"{'a feature head' if settings.eagle.enabled else 'texts that the target writes'}: take "
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
    trained = all(run.record(name) is not None for name in names)
    if not trained:
        settings.data.train_examples = min(settings.data.train_limit or 1000, settings.reference.examples or 1000)
    given, tokenizer = settings.target, None
    if given.model is not None and settings.data.tokenizer is None:
        tokenizer = load_tokenizer(given.model, trust_remote_code=given.trust_remote_code)
    corpus = load_corpus(settings.data, seed=settings.seed, tokenizer=tokenizer)
    vocab = len(corpus.tokenizer)
    for number, name in enumerate(names):
        if trained:
            (folder / name).symlink_to(run.path(name).resolve())
        else:
            source = settings.target if name == "target" else settings.initial
            model = load_or_build(source, corpus.tokenizer, vocab, number)
            if name == "reference" and source.kind != "scratch":
                for parameter in model.parameters():  # not the draft itself, or there is nothing to rank by
                    parameter.data.mul_(1.01)
            model.save_pretrained(folder / name)
    rows = TokenDataset.of(corpus.train, settings.reference.examples)
    drafts = [settings.draft, *(other for other in settings.comparisons if other.method == "adaspec")]
    # AdaSPEC as the run has it: its draft, or the first comparison without a variation of our own
    draft = next((draft for draft in drafts if not draft.variations), AdaSpecSettings())
    reference = settings.reference.training
    plan = plan_draft(plan_reference(reference, len(rows)), draft.k, draft.iso)
    selection = Selection(draft.k, draft.scope, draft.normalisation)
    models = [load_model(folder / name, device="cpu", dtype="float32") for name in ("target", "initial")]
    signal = TargetSignal.of(settings.reference, min(LMHead(model).vocab for model in models))
    schedule = Schedule(rows.lengths, plan.batch_size, reference.length_bucket, settings.seed)
    job = TrainingCase(
        str(folder), rows, reference, settings.trainer, selection, signal, settings.speed.steps, schedule,
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
        path = folder / f"{signal.name}.npy"
        rows.signals[signal.name] = signals.target_signal(model.to(device), signal, rows, path, "")
    target = TargetSource(model, signal)
    rows.signals["reference_loss"] = signals.reference_loss(
        reference.to(device), target, rows, folder / "reference.npy", ""
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
