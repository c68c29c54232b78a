"""``--dry-run``: any configuration, run through to its report in a minute or two, with tiny random models.

Every stage takes the path that the real run will take (from scratch, fine-tuning, LoRA, as it is; the family of each
model; the data's template; precision; selection; comparisons), so a mistake shows before the hours it would cost.
Nothing is downloaded: models of the same families are made on the spot, and rows of data sets that are not local
files are word problems in their place.
"""

from __future__ import annotations

import copy
import json
import shutil
import string
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers import AutoConfig, PreTrainedTokenizerBase

from decode.errors import UserError
from decode.suites.arithmetic import problems
from decode.suites.presets import PRESETS
from distill.data import DataSettings, load_corpus
from distill.models import build_model
from distill.settings import Architecture, ModelSettings, Settings, TrainingSettings

FAMILIES = {
    "pythia": "gpt_neox",
    "neox": "gpt_neox",
    "phi-3": "phi3",
    "phi-4": "phi3",
    "phi": "phi",
    "codegen": "codegen",
    "gpt-j": "gptj",
    "gpt2": "gpt2",
    "opt-": "opt",
    "qwen3": "qwen3",
    "qwen": "qwen2",
    "mixtral": "mixtral",
    "mistral": "mistral",
    "gemma-2": "gemma2",
    "gemma": "gemma",
    "olmo-2": "olmo2",
    "smollm3": "smollm3",
    "stablelm": "stablelm",
    "vicuna": "llama",
    "smollm": "llama",
    "llama": "llama",
}
"""Model family by a part of the name, the first that fits; for models whose configuration is not on this machine."""

STEPS = 4
TEXT_COLUMNS = ("prompt", "question", "instruction", "input", "text", "article", "document")


def shrink(settings: Settings, console: Console | None = None) -> Settings:
    """Settings of the same run in miniature, with the models and rows it needs made under ``<name>-dry-run``.

    Raises:
        UserError: The settings are refused as they are.
    """
    settings.validate()
    console = console or Console()
    small = copy.deepcopy(settings)
    small.name = f"{settings.name}-dry-run"
    folder = Path(small.output_dir) / small.name
    if folder.exists():
        shutil.rmtree(folder)
    console.print(f"dry run of {settings.name}, in {folder}", highlight=False)
    _shrink_data(small.data, folder / "rows", console)
    tokenizer = load_corpus(small.data, seed=small.seed).tokenizer
    for stage, width, layers in (("target", 64, 2), ("initial", 32, 1)):
        model: ModelSettings = getattr(small, stage)
        model.trust_remote_code = False  # no foreign code is needed for models made here
        if model.model is None:
            model.architecture = _shape(model.architecture.model_type, width, layers, model.architecture)
        else:
            family = _family(model.model, console)
            model.model = _save(_shape(family, width, layers), tokenizer, folder / "models" / stage)
        _shorten(model.training)
    _shorten(small.reference.training)
    small.reference.examples = 16
    trainer, evaluation = small.trainer, small.evaluation
    trainer.validate_every, trainer.validation_examples = STEPS // 2, 8
    trainer.devices, trainer.num_nodes, trainer.strategy = 1, 1, "auto"
    if trainer.accelerator not in ("auto", "cpu") and not torch.cuda.is_available():
        trainer.accelerator = "cpu"
    evaluation.prompts, evaluation.accuracy_prompts, evaluation.decode_prompts = 4, 4, 2
    evaluation.max_new_tokens, evaluation.repeats = 8, 1
    evaluation.draft_lengths = sorted(evaluation.draft_lengths)[:2]
    small.tracker.mode = "offline"
    return small


def _shorten(training: TrainingSettings) -> None:
    training.steps, training.epochs, training.batch_size = STEPS, None, 4
    training.warmup_steps = min(1, training.warmup_steps)


def _shape(family: str, width: int, layers: int, like: Architecture | None = None) -> Architecture:
    """A tiny model of a family; grouped-query attention, tying and extra fields as in ``like``."""
    grouped = like is not None and like.kv_heads is not None and like.kv_heads < like.heads
    return Architecture(
        model_type=family,
        hidden_size=width,
        layers=layers,
        heads=4,
        kv_heads=2 if grouped else None,
        positions=2048,
        tie_embeddings=like is None or like.tie_embeddings,
        extra=dict(like.extra) if like else {},
    )


def _family(model: str, console: Console) -> str:
    """The family of a model: from its configuration if it is on this machine, otherwise from its name."""
    try:
        return str(AutoConfig.from_pretrained(model, local_files_only=True).get_text_config().model_type)
    except (OSError, ValueError):
        name = model.lower()
    for part, family in FAMILIES.items():
        if part in name:
            console.print(f"  {model} is not on this machine; a tiny {family} stands for it", highlight=False)
            return family
    console.print(f"  {model} is not on this machine and of a family unknown here; a tiny llama stands for it")
    return "llama"


def _save(shape: Architecture, tokenizer: PreTrainedTokenizerBase, folder: Path) -> str:
    """Writes a tiny random model with its tokenizer; returns the folder."""
    try:
        model = build_model(shape, len(tokenizer), tokenizer, seed=0)
    except UserError as error:
        raise UserError(
            f"no tiny model of the family {shape.model_type} can be made for the dry run: {error}"
        ) from error
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def _shrink_data(data: DataSettings, folder: Path, console: Console) -> None:
    """Few rows and a small tokenizer; word problems in the columns of a data set that would have to be downloaded."""
    data.train_examples, data.validation_examples, data.test_examples = 48, 8, 8
    data.tokenizer, data.tokenizer_vocab_size, data.trust_remote_code = None, 320, False
    data.max_length, data.overlong = 512, "cut"
    local = data.source == "arithmetic" or Path(data.source).exists() or data.train_file is not None
    if local:
        return
    console.print(f"  word problems stand for the rows of {data.source}", highlight=False)
    folder.mkdir(parents=True)
    for split in ("train", "validation", "test"):
        rows = [
            stand_in(data, problem.question, problem.solution, number)
            for number, problem in enumerate(problems(0, split, 48 if split == "train" else 8))
        ]
        if data.source == "mbpp":  # its task numbers say the split
            first = {"test": 11, "validation": 511, "train": 601}[split]
            rows = [row | {"task_id": first + number} for number, row in enumerate(rows)]
        path = folder / f"{split}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        setattr(data, f"{split}_file", str(path))


def stand_in(data: DataSettings, question: str, solution: str, number: int) -> dict[str, Any]:
    """A row with the columns that the data set's template reads."""
    preset = PRESETS.get(data.source)
    columns = list(preset.columns) if preset else _fields(data.prompt_template) + _fields(data.response_template)
    if data.kind == "chat" or (preset and preset.kind == "chat"):
        chat = [{"role": "user", "content": question}, {"role": "assistant", "content": solution}]
        return {data.messages_column: chat, "messages": chat}
    if data.kind == "text":
        return {data.text_column: f"{question}\n{solution}"}
    special = {
        "test_list": ["assert True"],
        "task_id": number,
        "choices": ["1", "2", "3", "4"],
        "turns": [question],
        "category": "word problems",
    }
    row = {name: special.get(name, question if name in TEXT_COLUMNS else solution) for name in columns}
    if data.source == "mmlu":
        row["answer"] = 0
    if "category" in columns:  # the multi-turn sets, whose first turn is the prompt
        row["turns"] = [question]
    return row or {"prompt": question, "response": solution}


def _fields(template: str | None) -> list[str]:
    """Column names in a format string."""
    return [name for _, name, _, _ in string.Formatter().parse(template or "") if name]
