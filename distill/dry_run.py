"""``--dry-run``: any configuration, run through to its report in a minute or two, with tiny random models.

Every stage takes the path that the real run will take (from scratch, fine-tuning, LoRA, as it is; the family of each
model; the data's template; precision; selection), so a mistake shows before the hours it would cost.
Nothing is downloaded: models of the same families are made on the spot, and rows of data sets that are not local
files are word problems in their place.
"""

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers.utils import logging as hf_logging

from decode.bench.arithmetic import problems
from decode.bench.datasets import PRESETS
from decode.errors import UserError
from decode.models.loading import family_of
from decode.progress import output_console
from distill.config.data import DataSettings
from distill.config.run import Settings
from distill.config.training import ModelSettings, TrainingSettings
from distill.data.corpus import load_corpus
from distill.models.loading import build_model

STEPS = 4
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
    if settings.student.kind == "mtp":
        raise UserError("student.kind is mtp, and a target made for a dry run has no next-token layers: use --estimate")
    console = console or output_console()
    hf_logging.disable_progress_bar()
    small = copy.deepcopy(settings)
    small.name = f"{settings.name}-dry-run"
    folder = Path(small.output_dir) / small.name
    if folder.exists():
        shutil.rmtree(folder)
    console.print(f"dry run of {settings.name}, in {folder}", highlight=False)
    _shrink_data(small.data, folder / "rows", console)
    tokenizer = load_corpus(small.data, seed=small.seed).tokenizer
    for stage, width, layers in (("target", 64, 2), ("student", 32, 1)):
        model: ModelSettings = getattr(small, stage)
        model.trust_remote_code = False  # no foreign code is needed for models made here
        tied = not (untie and stage == "target")
        name = model.package.file if model.package else model.model
        model.package, model.lora.quantization, shape = None, None, model.architecture
        shape.hidden_size, shape.layers, shape.heads, shape.intermediate_size = width, layers, 4, None
        shape.positions = 2048
        if name is None:
            shape.extra |= {} if tied else {"tie_word_embeddings": False}
            if "num_key_value_heads" in shape.extra:
                shape.extra["num_key_value_heads"] = 2
        else:
            shape.model_type, grouped, note = family_of(name)
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
    block = small.student.block
    block.target_layers, block.layers, block.markov_rank, block.mask_token = [], 1, block.markov_rank and 8, None
    small.student.layers = [1]  # the last of two, without which Gemma 4 cannot be cut
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


def _shrink_data(data: DataSettings, folder: Path, console: Console) -> None:
    """Ask for few rows and a small tokenizer; word problems replace what would have to be downloaded or written."""
    data.train_examples, data.validation_examples, data.test_examples = 48, 8, 8
    data.tokenizer, data.tokenizer_vocab_size, data.max_length, data.overlong = None, 320, 512, "cut"
    preset = PRESETS.get(data.source)
    kind = preset.kind if preset is not None and data.kind == "auto" else data.kind
    if kind == "chat" or data.from_target:
        data.chat_template = data.chat_template or PLAIN_CHAT  # the target's own comes with its tokenizer
    here = data.source == "arithmetic" or (preset is None and Path(data.source).exists()) or data.train_file is not None
    if here and not data.from_target:
        return
    console.print(f"  word problems stand for the rows of {data.source}", highlight=False)
    if kind not in ("chat", "text") and not data.from_target:
        data.source, data.prompt_template, data.response_template = "arithmetic", None, None
        return
    folder.mkdir(parents=True, exist_ok=True)
    for split, count in {"train": 48, "validation": 8, "test": 8}.items():
        rows: list[dict[str, Any]] = []
        for problem in problems(0, split, count):
            turns = {"user": problem.question, "assistant": problem.solution}
            chat = [{"role": role, "content": content} for role, content in turns.items()]
            rows.append({"text": "\n".join(turns.values())} if kind == "text" else {"messages": chat})
        file = folder / f"{split}.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        if not data.from_target:
            setattr(data, f"{split}_file", str(file))
    if data.from_target:
        data.prompts.file, data.prompts.file_share = str(folder / "train.jsonl"), 1.0
