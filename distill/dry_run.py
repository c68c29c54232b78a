"""``--dry-run``: any configuration, run through to its export in a minute or two, with tiny random models.

Every stage takes the path that the real run will take (from scratch, fine-tuning, LoRA, as it is; the family of each
model; the data's template; precision; selection), so a mistake shows before the hours it would cost. Nothing is
downloaded: models of the same families are made on the spot, and word problems stand for the rows of data sets that are
not local files. The tokenizer of a local target renders its chats; other targets have a plain template here.
"""

import copy
import json
import shutil
from pathlib import Path
from typing import Any, cast

import torch
from rich.console import Console
from transformers.utils import logging as hf_logging

from decode.bench.arithmetic import problems
from decode.bench.datasets import PRESETS
from decode.errors import UserError
from decode.models.loading import family_of, load_tokenizer
from decode.progress import output_console
from distill.config import ModelSettings, Settings, Split, TrainingSettings
from distill.data.corpus import load_corpus
from distill.models import build_model

STEPS = 4
ROWS = {"train": 48, "validation": 8, "test": 8}
PLAIN_CHAT = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
"""Chat template where the target's is not on this machine."""


def shrink(settings: Settings, console: Console | None = None, *, untie: bool = False) -> Settings:
    """Return settings of the same run in miniature; its models and rows are written under ``<name>-dry-run``.

    Args:
        settings: Of the run.
        console: Told what stands for what.
        untie: Give the target an output head apart from its embedding; random models with a tied one repeat the last
            token at every layer.

    Raises:
        UserError: The settings are refused as they are.
    """
    settings.validate()
    if settings.student.kind == "mtp":
        raise UserError("student.kind is mtp, and a target made for a dry run has no next-token layers: use --estimate")
    console, small = console or output_console(), copy.deepcopy(settings)
    hf_logging.disable_progress_bar()
    small.name = f"{settings.name}-dry-run"
    folder = Path(small.output_dir) / small.name
    shutil.rmtree(folder, ignore_errors=True)
    console.print(f"dry run of {settings.name}, in {folder}", highlight=False)
    _shrink_data(small, folder / "rows", console)
    tokenizer = load_corpus(small.data, seed=small.seed, folder=None).tokenizer
    for stage, width, layers in (("target", 64, 2), ("student", 32, 1)):
        model: ModelSettings = getattr(small, stage)
        model.trust_remote_code, shape = False, model.architecture  # models made here need no foreign code
        shape.hidden_size, shape.layers, shape.heads, shape.intermediate_size = width, layers, 4, None
        shape.positions = 2048
        tied = not (untie and stage == "target")
        if model.model is None:
            shape.extra |= {} if tied else {"tie_word_embeddings": False}
            if "num_key_value_heads" in shape.extra:
                shape.extra["num_key_value_heads"] = 2
        else:
            shape.model_type, grouped, note = family_of(model.model)
            if note:
                console.print(f"  {note}", highlight=False)
            shape.extra = {"tie_word_embeddings": tied} | ({"num_key_value_heads": 2} if grouped else {})
            if shape.model_type.startswith(("gemma3n", "gemma4")):
                shape.extra["vocab_size_per_layer_input"] = len(tokenizer)
            made = build_model(shape, len(tokenizer), tokenizer, 0)
            made.generation_config.eos_token_id = tokenizer.eos_token_id
            model.model = str(folder / "models" / stage)
            made.save_pretrained(model.model)
            tokenizer.save_pretrained(model.model)
        if model.trained:
            _shorten(model.training)
    _shorten(small.training)
    for draft in small.drafts:  # as long as the section training, with its batches
        draft.training = {key: v for key, v in draft.training.items() if key not in ("steps", "epochs", "batch_size")}
    small.student.layers = [1]  # the last of two, without which Gemma 4 cannot be cut
    block = small.student.block
    block.target_layers, block.layers, block.markov_rank = [], 1, block.markov_rank and 8
    _shrink_machine(small, console)
    return small


def _shorten(training: TrainingSettings) -> None:
    training.steps, training.epochs, training.batch_size = STEPS, None, 4
    training.warmup_steps = min(1, training.warmup_steps)
    if not torch.cuda.is_available() and "bitsandbytes" in str(training.optimizer):
        training.optimizer = "adamw"


def _shrink_machine(small: Settings, console: Console) -> None:
    """Use one device of this machine, answer here whatever server is meant to, and measure next to nothing."""
    target, trainer, responses, measured = small.target, small.trainer, small.teacher.responses, small.evaluation
    target.devices, target.sharded, target.quantization = [], False, None
    small.teacher.examples = 16
    responses.max_new_tokens, responses.batch_size, responses.refresh_every = 8, 8, STEPS // 2
    if responses.server.answers:
        console.print(f"  the target made here answers in place of {', '.join(responses.server.urls)}", highlight=False)
        responses.server.urls = []
    trainer.validate_every, trainer.validation_examples = STEPS // 2, 8
    trainer.devices, trainer.num_nodes, trainer.strategy, trainer.accumulate = 1, 1, "auto", min(2, trainer.accumulate)
    if not torch.cuda.is_available():
        trainer.accelerator, trainer.attention = "cpu", "auto"
    if measured:
        measured.prompts, measured.accuracy_prompts, measured.decode_prompts, measured.max_new_tokens = 4, 4, 2, 8
        measured.draft_lengths = sorted(measured.draft_lengths)[:2]
    small.tracker = "none"


def _shrink_data(small: Settings, folder: Path, console: Console) -> None:
    """Ask for few rows and a small tokenizer; word problems replace what would have to be downloaded or written."""
    data, model = small.data, small.target.model
    data.train_examples, data.validation_examples, data.test_examples = ROWS.values()
    data.tokenizer, data.max_length, data.overlong = None, 512, "cut"
    preset = PRESETS.get(data.source)
    kind = "chat" if data.from_target else "pairs" if preset is None else preset.kind
    if model is not None and Path(model).exists() and data.chat_template is None:
        data.chat_template = load_tokenizer(model, trust_remote_code=False).chat_template
    if kind == "chat" and data.chat_template is None:
        data.chat_template = PLAIN_CHAT
    here = data.source == "arithmetic" or (preset is None and Path(data.source).exists()) or "train" in data.files
    if here and not data.from_target:
        return
    console.print(f"  word problems stand for the rows of {data.source}", highlight=False)
    if kind == "pairs":
        data.source, data.prompt_template, data.response_template = "arithmetic", None, None
        return
    folder.mkdir(parents=True)
    for split, count in ROWS.items():
        rows: list[dict[str, Any]] = []
        for problem in problems(0, split, count):
            turns = {"user": problem.question, "assistant": problem.solution}
            chat = [{"role": role, "content": content} for role, content in turns.items()]
            rows.append({"text": "\n".join(turns.values())} if kind == "text" else {"messages": chat})
        file = folder / f"{split}.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        if not data.from_target:
            data.files[cast(Split, split)] = str(file)
    if data.from_target:  # which random models cannot be: the prompts are those of the rows
        data.source = str(folder)
