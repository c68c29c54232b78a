"""A rehearsal: the whole run on few examples and for few steps (`few`), as ``--dry-run`` or ``--estimate``.

- `shrink` also replaces the models by tiny random ones of the same families, so that the run needs no network and takes
  a minute or two. Every stage takes the path of the real run (from scratch, fine-tuning, LoRA, as it is; the data's
  template; precision; selection). What is on this machine is used or checked: files of data and prompts, the tokenizer,
  a head to start from. Word problems stand for rows that would have to be downloaded, and for prompts that the target
  has yet to write.
- `estimate` takes the run's own models and data, and scales up times, memory and files.
"""

import copy
import shutil
import time
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from lightning.pytorch.callbacks import Callback
from rich.console import Console
from transformers import PreTrainedTokenizerBase
from transformers.utils import logging as hf_logging

from decode.errors import UserError
from decode.files import replaced, scratch_folder
from decode.incoming import LeftOut, usable
from decode.measure.suites import PRESETS, file_format, iter_rows
from decode.models.open import load_config, load_tokenizer
from decode.models.sources import is_path, located, offline, weight_files
from decode.progress import duration, output_console, working
from distill import ranks
from distill.checks import check_given, signal_sizes
from distill.config import Settings
from distill.config.base import Values, change
from distill.config.models import ModelSettings
from distill.data.corpus import load_corpus
from distill.data.dataset import Examples
from distill.data.prompts import prompt_of
from distill.engine.vllm import server_gpus
from distill.files import free_bytes, sizes
from distill.networks.models import build_model
from distill.pipeline import measure, with_formats
from distill.responses.target import answered_texts
from distill.run import Run
from distill.stages import run_stages
from distill.training.trainer import peak_memory

STEPS, TIMED = 4, 8  # of every training, with tiny models and the run's own
ROWS = {"train_examples": 48, "validation_examples": 8, "test_examples": 8}  # made or written for a rehearsal
FEW: Values = {
    "trainer__devices": 1, "trainer__num_nodes": 1, "trainer__strategy": "auto", "tracker": "none", "upload": False,
    "trainer__validate_every": 10**6, "trainer__validation_examples": 8,
}  # fmt: skip
"""Settings of every rehearsal; ``__`` stands for a dot."""
MEASURED: Values = {"prompts": 4, "accuracy_prompts": 4, "decode_prompts": 2, "max_new_tokens": 8}
"""Its evaluation."""


def few(settings: Settings, **training: Any) -> Settings:
    """Return settings of the run on few examples, in one process and untracked.

    Every training has these values of the section ``training`` in place of those that it has.
    """
    small = copy.deepcopy(settings)
    change(small, **FEW)
    for section in (small.target.training, small.student.training, small.training):
        if section.steps != section.epochs:  # both are null where a model is not trained
            change(section, **training)
    for draft in small.drafts.values():
        draft.training = {key: value for key, value in draft.training.items() if key not in training}
    if small.evaluation:
        change(small.evaluation, **MEASURED, draft_lengths=sorted(small.evaluation.draft_lengths)[:2])
    return small


# -- in miniature -----------------------------------------------------------------------------------------------------

PLAIN_CHAT = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<{{ m.role }}>"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}"
    "{% for call in m.tool_calls or [] %}{{ call | tojson }}{% endfor %}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
"""Chat template where the target's is not on this machine, which writes all of a chat; pairs stay plain there."""
SMALL: Values = {
    **{f"data__{key}": count for key, count in ROWS.items()},
    "data__max_length": 512, "data__overlong": "cut",
    "target__trust_remote_code": False, "student__trust_remote_code": False,  # models made here need no foreign code
    "teacher__examples": 16, "teacher__engine__urls": [], "teacher__engine__arguments": [],
    "teacher__responses__batch_size": 8, "teacher__responses__max_new_tokens": 8,
    "teacher__responses__refresh_every": STEPS // 2,
    "trainer__validate_every": STEPS // 2,
}  # fmt: skip
"""Settings of every dry run."""


def shrink(settings: Settings, console: Console | None = None) -> Settings:
    """Return settings of the same run in miniature; its models are written under ``<name>-dry-run``.

    Raises:
        UserError: The settings are refused as they are.
    """
    settings.validate()
    if settings.student.draft.of_target:
        raise UserError("student.kind is mtp, and a target made for a dry run has no next-token layers: use --estimate")
    console, small = console or output_console(), few(settings, steps=STEPS, epochs=None, batch_size=4, warmup_steps=1)
    hf_logging.disable_progress_bar()
    small.name = f"{settings.name}-dry-run"
    folder = Path(small.output_dir) / small.name
    shutil.rmtree(folder, ignore_errors=True)
    console.print(f"dry run of {settings.name}, in {folder}", highlight=False)
    with offline():
        check_given(Run(settings, console), partial(_here, weights=True))
    change(small, **copy.deepcopy(SMALL))
    small.student.draft.shrink(small.student)
    if settings.teacher.in_engine or settings.teacher.engine.urls:
        server_gpus(settings.teacher.engine, *ranks.gpus(settings.trainer))
        console.print("  the target made here stands in no engine: it answers and gives states itself", highlight=False)
        small.teacher.signal = settings.teacher.kept
    data, tokenizer = small.data, None
    if (named := data.tokenizer or small.target.model) is not None and _here(named):
        tokenizer = load_tokenizer(named, trust_remote_code=settings.target.trust_remote_code)
    elif named is not None and data.chat_template is None:
        unknown = "so its chat template is not known: whether that writes tools and reasoning is not checked"
        console.print(f"  {named} is not on this machine, {unknown}", highlight=False, soft_wrap=True)
        data.chat_template, data.chat = PLAIN_CHAT, data.chat if data.from_target or data.chat != "auto" else False
    data.tokenizer = data.tokenizer if tokenizer else None
    _shrink_data(small, console)
    tokenizer = tokenizer or load_corpus(data, seed=small.seed, folder=None).tokenizer
    _shrink_model(small.target, folder / "models/target", tokenizer, console, width=64, layers=4)
    _shrink_model(small.student, folder / "models/student", tokenizer, console, width=32, layers=1)
    small.trainer.accumulate = min(2, small.trainer.accumulate)
    if not torch.cuda.is_available():
        change(small.trainer, accelerator="cpu", attention="auto")
    return small


def _shrink_model(
    model: ModelSettings, folder: Path, tokenizer: PreTrainedTokenizerBase, console: Console, *, width: int, layers: int
) -> None:
    """Make a model small; one that is given is replaced by a random one of its family, written to ``folder``."""
    shape = model.architecture
    grouped = "num_key_value_heads" in shape.extra
    if model.model is not None:
        shape.model_type, grouped = _family_of(model.model, console)
        shape.extra = {}
    change(shape, hidden_size=width, layers=layers, heads=4, intermediate_size=None, positions=2048)
    shape.extra |= {"num_key_value_heads": 2} if grouped else {}
    if model.model is not None:
        made = build_model(shape, len(tokenizer), tokenizer, 0)
        made.generation_config.eos_token_id = tokenizer.eos_token_id
        model.model = str(folder)
        with replaced(folder) as aside:
            made.save_pretrained(aside)
            tokenizer.save_pretrained(aside)


def _shrink_data(small: Settings, console: Console) -> None:
    """Let word problems replace rows that would have to be downloaded, or prompts that the target would write."""
    data = small.data
    if data.from_target and data.prompts.file is not None:
        prompts = len([*usable(iter_rows(data.prompts.file), LeftOut(), prompt_of)])
        if prompts >= sum(ROWS.values()) or not prompts:  # without any the run refuses it in its own words
            return
    elif not data.from_target and (data.source == "arithmetic" or "train" in data.files or Path(data.source).exists()):
        return
    elif data.source not in PRESETS and (file_format(data.source) or Path(data.source).is_absolute()):
        raise UserError(f"data.source {data.source!r}: there is no such file or folder; correct the path")
    console.print(f"  word problems stand for the rows of {data.source}", highlight=False)
    change(data, source="arithmetic", prompt_template=None, response_template=None)


def _here(model: str, *, weights: bool = False) -> bool:
    """Whether a model, with its ``weights``, is on this machine; so is a path to nowhere, which the run refuses."""
    if is_path(model):
        return True
    try:
        with offline():
            folder = located(model)
    except UserError:
        return False
    files = weight_files(folder)
    return not weights or (files != [] and all(map(Path.is_file, files)))


def _family_of(model: str, console: Console) -> tuple[str, bool]:
    """The family of a model, and whether several query heads share a key head; Llama's where it is not here."""
    try:
        with offline():
            layer = load_config(model).per_layer_config[0]
    except UserError:
        console.print(f"  {model} is not on this machine; a tiny llama stands for it", highlight=False)
        return "llama", True
    heads = int(layer.num_attention_heads)
    return str(layer.model_type), heads > int(getattr(layer, "num_key_value_heads", None) or heads)


# -- with the run's models ---------------------------------------------------------------------------------------------

ADAM = 4  # copies of the weights that training holds and a checkpoint has: with gradients or the best ones, and moments


class StepTimes(Callback):
    """Notes when every batch has been trained on, and the tokens that it has."""

    ends: ClassVar[list[tuple[float, int]]] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Note a batch."""
        if pl_module.device.type == "cuda":
            torch.cuda.synchronize(pl_module.device)
        self.ends.append((time.perf_counter(), batch["input_ids"].numel()))


def estimate(settings: Settings, console: Console) -> dict[str, tuple[float, float]]:
    """Run a little of everything, and print and return the seconds and tokens of every part of the run.

    Tokenised data are kept for the run itself.
    """
    hf_logging.disable_progress_bar()
    full, parts = with_formats(settings), {}
    with scratch_folder() as folder:
        run, whole = Run(_timed(full, str(folder)), Console(quiet=True)), Run(full, console)
        run.prompts_together = sum(ROWS.values())
        began, written = time.perf_counter(), full.data.from_target
        if not written:
            run.corpus = whole.corpus
        here = len(run.corpus.train)
        train = full.data.limits["train"] or here if written else here
        parts["the data"] = (time.perf_counter() - began) * train / here, 0.0
        count = min(train, full.teacher.examples or train)
        trainings = {"target": (full.target.training, train), "initial": (full.student.training, train)}
        trainings |= {name: (draft.training_of(full.training), count) for name, draft in full.drafts.items()}
        for stage, (training, examples) in trainings.items():
            if stage == "initial" and full.teacher.responses.from_target:  # which may be trained on the answers
                parts["answers"] = _answers(run, count, console)
            StepTimes.ends.clear()
            with working(console, f"a few steps of {stage}"):
                run_stages(run, (stage,), check=stage == "initial")
            if len(StepTimes.ends) > 1:
                (first, _), (last, _) = StepTimes.ends[0], StepTimes.ends[-1]  # the first step is not counted
                batches = training.steps_for(examples) * full.trainer.accumulate / (len(StepTimes.ends) - 1)
                parts[stage] = (last - first) * batches, sum(size for _, size in StepTimes.ends[1:]) * batches
        with working(console, "export and evaluation"):
            measure(run)
        whole.corpus = run.corpus
        exported = sum(sizes(run.export).values())
        kept = {(run if written else whole).work / "corpus": train / here}
        kept |= {run.work / "prompts": train / here, run.work / "responses": count / len(run.examples)}
        texts = sum(share * sum(sizes(place, ["**/*"]).values()) for place, share in kept.items())
        models = [sum(sizes(run.path(stage)).values()) for stage in trainings if not run.path(stage).is_symlink()]
        kind = full.teacher.kept
        signals = signal_sizes(whole)[kind] * (count / len(whole.examples) if written else 1)
    for part, (seconds, tokens) in parts.items():
        console.print(f"{part:<20} {tokens / 1e6:10.2f} M tokens {duration(seconds):>12}", highlight=False)
    memory, host = (peak_memory(torch.device(device)) / 1e9 for device in (run.device, "cpu"))
    checkpoints, free = ADAM * max(models, default=0), free_bytes(whole.folder) / 1e9
    disk = {
        "texts": texts, f"signals ({kind}) at most": signals, "models": sum(models), "checkpoints": checkpoints,
        "export": exported,
    }  # fmt: skip
    each = ", ".join(f"{name} {size / 1e9:.2f}" for name, size in disk.items())
    for line in (
        f"total {duration(sum(seconds for seconds, _ in parts.values()))}, without signals, validations and evaluation",
        f"memory of each process: {host:.2f} GB" + f", {memory:.2f} GB on {run.device}" * (run.device.type != "cpu"),
        f"disk: {sum(disk.values()) / 1e9:.2f} GB, of {free:.0f} GB that are free: {each}",
    ):
        console.print(line, highlight=False, soft_wrap=True)
    return parts


def _answers(run: Run, count: int, console: Console) -> tuple[float, float]:
    """The seconds and tokens of so many answers of the target, after those of a few."""
    target, began = None if run.settings.teacher.served else run.frozen, time.perf_counter()
    with working(console, "one batch of answers"):
        rows = Examples.of(answered_texts(run, target)[0])
    more = count / len(rows)
    return (time.perf_counter() - began) * more, more * float(rows.lengths.sum())


def _timed(full: Settings, folder: str) -> Settings:
    """Return settings of a rehearsal with the run's own models, whose steps are timed."""
    small = few(full, steps=TIMED, epochs=None, warmup_steps=0)
    if small.data.from_target:
        change(small.data, **ROWS)
    largest = max(draft.training_of(small.training).batch_size for draft in small.drafts.values())
    change(
        small, output_dir=folder, trainer__devices=ranks.one_device(full.trainer), export__gguf=[],
        teacher__examples=max(full.teacher.responses.batch_size, 2 * largest),
        trainer__callbacks=[*full.trainer.callbacks, {"class_path": "distill.rehearse.StepTimes"}],
    )  # fmt: skip
    return small
