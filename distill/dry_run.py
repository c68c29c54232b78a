"""``--dry-run``: any configuration, run through to its report in a minute or two, with tiny random models.

Every stage takes the path that the real run will take (from scratch, fine-tuning, LoRA, as it is; the family of each
model; the data's template; precision; selection), so a mistake shows before the hours it would cost.
Nothing is downloaded: models of the same families are made on the spot, and rows of data sets that are not local
files are word problems in their place.
"""

import copy
import json
import shutil
import string
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase
from transformers.utils import logging as hf_logging

from decode.bench.arithmetic import problems
from decode.bench.datasets import PRESETS
from decode.models.loading import config_for, family_of
from decode.progress import output_console
from distill.config.data import DataSettings
from distill.config.run import Settings
from distill.config.training import ModelSettings, TrainingSettings
from distill.data.corpus import load_corpus

STEPS = 4
FIRST_NUMBER = {"train": 601, "validation": 511, "test": 11}  # MBPP's task numbers define its splits
TEXT_COLUMNS = ("prompt", "question", "instruction", "input", "text", "article", "document")

PLAIN_CHAT = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
"""Chat template of the tokenizer made here, where the run's own target brings one."""


def shrink(settings: Settings, console: Console | None = None, *, untie: bool = False) -> Settings:
    """Settings of the same run in miniature, with the models and rows it needs made under ``<name>-dry-run``.

    Args:
        settings: of the run.
        console: told what stands for what.
        untie: give the target a head of its own; random models with a tied one repeat the last token at every layer.

    Raises:
        UserError: The settings are refused as they are.
    """
    settings.validate()
    console = console or output_console()
    small = copy.deepcopy(settings)
    small.name = f"{settings.name}-dry-run"
    folder = Path(small.output_dir) / small.name
    if folder.exists():
        shutil.rmtree(folder)
    console.print(f"dry run of {settings.name}, in {folder}", highlight=False)
    _shrink_data(small.data, folder / "rows", 48, console)
    tokenizer = load_corpus(small.data, seed=small.seed).tokenizer
    for stage, width, layers in (("target", 64, 2), ("student", 32, 1)):
        model: ModelSettings = getattr(small, stage)
        model.trust_remote_code = False  # no foreign code is needed for models made here
        own_head = untie and stage == "target"
        name = model.package.file if model.package else model.model
        model.package, model.lora.quantization = None, None
        if name is None:
            shape = model.architecture
            grouped = {"num_key_value_heads": 2} if "num_key_value_heads" in shape.extra else {}
            untied = {"tie_word_embeddings": False} if own_head else {}
            model.architecture = replace(
                shape, hidden_size=width, layers=layers, heads=4, intermediate_size=None, positions=2048,
                extra=shape.extra | grouped | untied,
            )  # fmt: skip
        else:
            place = folder / "models" / stage
            model.model = save_tiny_model(name, tokenizer, place, width, layers, console, not own_head)
        if model.trained:
            _shorten(model.training)
    small.student.layers, small.target.layerskip.exits = 1, []
    small.stages_at_once = 1  # another process takes longer to start than the stages do
    if small.target.stacking is not None:
        small.target.stacking.layers = 1
    small.target.devices, small.target.sharded, small.target.quantization = [], False, None
    _shorten(small.training)
    for draft in small.drafts:  # as long as the section training, with its batches
        draft.training = {key: v for key, v in draft.training.items() if key not in ("steps", "epochs", "batch_size")}
    small.teacher.examples = 16
    responses = small.teacher.responses  # short, and written here whatever server is meant to
    responses.max_new_tokens, responses.batch_size, responses.refresh_every = 8, 8, STEPS // 2
    if responses.server.answers:
        others = ", ".join(responses.server.urls) or responses.server.engine
        console.print(f"  the target made here answers in place of {others}", highlight=False)
        responses.server.urls, responses.server.engine = [], None
    trainer, evaluation = small.trainer, small.evaluation
    trainer.validate_every, trainer.validation_examples = STEPS // 2, 8
    trainer.devices, trainer.num_nodes, trainer.strategy, trainer.accumulate = 1, 1, "auto", min(2, trainer.accumulate)
    if trainer.accelerator not in ("auto", "cpu") and not torch.cuda.is_available():
        trainer.accelerator = "cpu"
    if not torch.cuda.is_available():
        trainer.attention = "auto"
        for training in (small.target.training, small.student.training, small.training):
            training.optimizer = "adamw" if training.optimizer == "adamw_8bit" else training.optimizer
    evaluation.prompts, evaluation.accuracy_prompts, evaluation.decode_prompts = 4, 4, 2
    evaluation.max_new_tokens, evaluation.repeats = 8, 1
    evaluation.draft_lengths = sorted(evaluation.draft_lengths)[:2]
    small.tracker.mode, small.export.hub = "offline", None
    return small


def _shorten(training: TrainingSettings) -> None:
    training.steps, training.epochs, training.batch_size = STEPS, None, 4
    training.warmup_steps = min(1, training.warmup_steps)


def _shrink_data(data: DataSettings, folder: Path, count: int, console: Console) -> None:
    """Few rows and a small tokenizer; word problems in the columns of a data set that would have to be downloaded."""
    data.train_examples, data.validation_examples, data.test_examples = count, 8, 8
    data.tokenizer, data.tokenizer_vocab_size = None, 320
    data.max_length, data.overlong = 512, "cut"
    preset = PRESETS.get(data.source)
    if data.kind == "chat" or (preset is not None and preset.kind == "chat"):
        data.chat_template = data.chat_template or PLAIN_CHAT  # the target's own comes with its tokenizer
    if data.from_target:
        console.print("  word problems stand for the prompts that the target writes", highlight=False)
        files = write_rows(folder, lambda question, *_: {"question": question}, train=count)
        data.prompts.file, data.prompts.file_share = str(files["train"]), 1.0
        data.chat_template = data.chat_template or PLAIN_CHAT
        return
    path_exists = data.source not in PRESETS and Path(data.source).exists()  # the name of a preset wins over a path
    local = data.source == "arithmetic" or path_exists or data.train_file is not None
    if local:
        return
    console.print(f"  word problems stand for the rows of {data.source}", highlight=False)
    files = write_rows(folder, lambda *problem: stand_in(data, *problem), train=count)
    data.train_file, data.validation_file, data.test_file = (str(files[s]) for s in ("train", "validation", "test"))


def stand_in(data: DataSettings, question: str, solution: str, number: int) -> dict[str, Any]:
    """A row with the columns that the data set's template reads."""
    preset = PRESETS.get(data.source)
    columns = list(preset.columns) if preset else _fields(data.prompt_template) + _fields(data.response_template)
    if data.kind == "chat" or (preset and preset.kind == "chat"):
        chat = [{"role": "user", "content": question}, {"role": "assistant", "content": solution}]
        return {"messages": chat}
    if data.kind == "text":
        return {"text": f"{question}\n{solution}"}
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
    if "category" in row:  # the multi-turn sets, whose first turn is the prompt
        row["turns"] = [question]
    return row or {"prompt": question, "response": solution}


def _fields(template: str | None) -> list[str]:
    """Column names in a format string."""
    return [name for _, name, _, _ in string.Formatter().parse(template or "") if name]


def save_tiny_model(
    name: str, tokenizer: PreTrainedTokenizerBase, folder: Path, width: int, layers: int, console: Console, tied: bool
) -> str:
    """Write a random model of the named one's family, whose embedding and head may be tied; returns the folder."""
    family, grouped, note = family_of(name)
    if note:
        console.print(f"  {note}", highlight=False)
    shape: dict[str, Any] = {"hidden_size": width, "layers": layers, "heads": 4, "kv_heads": 2 if grouped else None}
    vocab = len(tokenizer)
    config = config_for(family, **shape, vocab=vocab, positions=4096, tie_embeddings=tied, tokenizer=tokenizer)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    bars = hf_logging.is_progress_bar_enabled()
    hf_logging.disable_progress_bar()
    model.save_pretrained(folder)
    if bars:
        hf_logging.enable_progress_bar()
    tokenizer.save_pretrained(folder)
    return str(folder)


def write_rows(folder: Path, row: Callable[[str, str, int], dict[str, Any]], *, train: int) -> dict[str, Path]:
    """Write stand-in rows, one file for each split; `row` makes one of a question, its solution and a number."""
    folder.mkdir(parents=True, exist_ok=True)
    files = {}
    for split, count in {"train": train, "validation": 8, "test": 8}.items():
        made = enumerate(problems(0, split, count), FIRST_NUMBER[split])
        rows = [row(problem.question, problem.solution, number) for number, problem in made]
        files[split] = folder / f"{split}.jsonl"
        files[split].write_text("".join(json.dumps(content) + "\n" for content in rows), encoding="utf-8")
    return files
