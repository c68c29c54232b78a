"""``--dry-run``: any configuration, run through to its export in a minute or two, with tiny random models.

Every stage takes the path that the real run will take (from scratch, fine-tuning, LoRA, as it is; the family of each
model; the data's template; precision; selection), so a mistake shows before the hours it would cost. Nothing is
downloaded: models of the same families are made on the spot, and word problems stand for prompts that the target has
yet to write and for the rows of data sets that are not local files. What is on this machine is used or checked as in
the run: files of data and prompts, the tokenizer with its template, the target's number format, a head to start from.
"""

import copy
import json
import shutil
from pathlib import Path
from typing import Any, cast

import torch
from huggingface_hub import try_to_load_from_cache
from rich.console import Console
from transformers import AutoConfig, PreTrainedTokenizerBase
from transformers.utils import logging as hf_logging

from decode.errors import UserError
from decode.files import replaced
from decode.measure.arithmetic import problems
from decode.measure.suites import PRESETS, iter_rows
from decode.models.open import load_tokenizer
from decode.models.sources import language_config, located, pinned
from decode.progress import output_console
from distill.checks import check_given
from distill.config import Settings
from distill.config.base import Split, Values, change
from distill.config.models import ModelSettings
from distill.data.corpus import load_corpus
from distill.data.prompts import prompt_of
from distill.networks.models import build_model
from distill.run import Run

STEPS = 4
ROWS = {"train": 48, "validation": 8, "test": 8}
PLAIN_CHAT = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
"""Chat template where the target's is not on this machine; pairs stay plain there."""
SMALL: Values = {
    **{f"data__{split}_examples": count for split, count in ROWS.items()},
    "data__max_length": 512, "data__overlong": "cut",
    "target__quantization": None,
    "target__trust_remote_code": False, "student__trust_remote_code": False,  # models made here need no foreign code
    "teacher__examples": 16, "teacher__engine__urls": [], "teacher__engine__arguments": [],
    "teacher__responses__batch_size": 8, "teacher__responses__max_new_tokens": 8,
    "teacher__responses__refresh_every": STEPS // 2,
    "trainer__validate_every": STEPS // 2, "trainer__validation_examples": 8, "trainer__strategy": "auto",
    "trainer__devices": 1, "trainer__num_nodes": 1, "tracker": "none",
}  # fmt: skip
"""Settings of every dry run; ``__`` stands for a dot."""


def shrink(settings: Settings, console: Console | None = None, *, untie: bool = False) -> Settings:
    """Return settings of the same run in miniature; its models and rows are written under ``<name>-dry-run``.

    ``untie`` gives the target an output head apart from its embedding: random models with a tied one repeat the last
    token at every layer.

    Raises:
        UserError: The settings are refused as they are.
    """
    settings.validate()
    if settings.student.draft.of_target:
        raise UserError("student.kind is mtp, and a target made for a dry run has no next-token layers: use --estimate")
    console, small = console or output_console(), copy.deepcopy(settings)
    hf_logging.disable_progress_bar()
    small.name = f"{settings.name}-dry-run"
    folder = Path(small.output_dir) / small.name
    shutil.rmtree(folder, ignore_errors=True)
    console.print(f"dry run of {settings.name}, in {folder}", highlight=False)
    check_given(Run(settings, console), _here)
    change(small, **copy.deepcopy(SMALL))
    small.student.draft.shrink(small.student)
    if settings.teacher.in_engine or settings.teacher.engine.urls:
        console.print("  the target made here stands in no engine: it answers and gives states itself", highlight=False)
        small.teacher.signal = settings.teacher.kept
    data, tokenizer = small.data, None
    if (named := data.tokenizer or small.target.model) is not None and _here(named):
        tokenizer = load_tokenizer(named, trust_remote_code=settings.target.trust_remote_code)
    elif named is not None and data.chat_template is None:
        data.chat_template, data.chat = PLAIN_CHAT, data.chat if data.from_target or data.chat != "auto" else False
    data.tokenizer = data.tokenizer if tokenizer else None
    _shrink_data(small, folder / "rows", console)
    tokenizer = tokenizer or load_corpus(data, seed=small.seed, folder=None).tokenizer
    _shrink_model(small.target, folder / "models/target", tokenizer, console, tied=not untie, width=64, layers=2)
    _shrink_model(small.student, folder / "models/student", tokenizer, console, width=32, layers=1)
    shorten(small, steps=STEPS, epochs=None, batch_size=4, warmup_steps=1)
    for training in (small.target.training, small.student.training, small.training):
        if not torch.cuda.is_available() and "bitsandbytes" in str(training.optimizer):
            training.optimizer = "adamw"
    small.trainer.accumulate = min(2, small.trainer.accumulate)
    if not torch.cuda.is_available():
        change(small.trainer, accelerator="cpu", attention="auto")
    if small.evaluation:
        lengths = sorted(small.evaluation.draft_lengths)[:2]
        few = {"prompts": 4, "accuracy_prompts": 4, "decode_prompts": 2, "max_new_tokens": 8}
        change(small.evaluation, **few, draft_lengths=lengths)
    return small


def shorten(settings: Settings, **values: Any) -> None:
    """Give every training these values of the section ``training``, in place of those that it has."""
    for section in (settings.target.training, settings.student.training, settings.training):
        if section.steps != section.epochs:  # both are null where a model is not trained
            change(section, **values)
    for draft in settings.drafts:
        draft.training = {key: value for key, value in draft.training.items() if key not in values}


def _shrink_model(
    model: ModelSettings, folder: Path, tokenizer: PreTrainedTokenizerBase, console: Console, *,
    tied: bool = True, width: int, layers: int,
) -> None:  # fmt: skip
    """Make a model small; one that is given is replaced by a random one of its family, written to ``folder``."""
    shape = model.architecture
    grouped = "num_key_value_heads" in shape.extra
    if model.model is not None:
        shape.model_type, grouped, note = _family_of(model.model)
        shape.extra = {}
        if note:
            console.print(f"  {note}", highlight=False)
        if shape.model_type.startswith(("gemma3n", "gemma4")):
            shape.extra["vocab_size_per_layer_input"] = len(tokenizer)
    change(shape, hidden_size=width, layers=layers, heads=4, intermediate_size=None, positions=2048)
    shape.extra |= ({} if tied else {"tie_word_embeddings": False}) | ({"num_key_value_heads": 2} if grouped else {})
    if model.model is not None:
        made = build_model(shape, len(tokenizer), tokenizer, 0)
        made.generation_config.eos_token_id = tokenizer.eos_token_id
        model.model = str(folder)
        with replaced(folder) as aside:
            made.save_pretrained(aside)
            tokenizer.save_pretrained(aside)


def _shrink_data(small: Settings, folder: Path, console: Console) -> None:
    """Let word problems replace rows that would have to be downloaded, or prompts that the target would write."""
    data, files = small.data, small.data.files
    preset = PRESETS.get(data.source)
    kind = "chat" if data.from_target else "pairs" if preset is None else preset.kind
    path, chats = Path(data.source), list[list[Values]]()
    if data.from_target and data.prompts.file is not None:
        chats = [chat for chat in map(prompt_of, iter_rows(data.prompts.file)) if chat]
        if not chats:
            return  # which the run refuses in its own words
    elif data.source == "arithmetic" or (preset is None and path.exists()) or "train" in files:
        return
    if path.suffix in (".jsonl", ".json", ".csv", ".parquet", ".txt") or path.is_absolute():
        raise UserError(f"data.source {data.source!r}: there is no such file or folder; correct the path")
    console.print(f"  word problems stand for the rows of {data.source}", highlight=False)
    if kind == "pairs":
        change(data, source="arithmetic", prompt_template=None, response_template=None)
        return
    folder.mkdir(parents=True)
    rows: list[Values] = [{"messages": chat} for chat in chats]
    for split, count in ROWS.items():
        for problem in problems(0, split, 2 * count):
            turns = {"user": problem.question, "assistant": problem.solution}
            chat = [{"role": role, "content": content} for role, content in turns.items()]
            rows.append({"text": "\n".join(turns.values())} if kind == "text" else {"messages": chat})
        file = folder / f"{split}.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        if data.from_target:
            data.prompts.file = str(file)  # at last the file of all
        else:
            files[cast(Split, split)], rows = str(file), []


def _here(model: str) -> bool:
    """Whether a model is on this machine. A path that leads nowhere counts, so that it is refused as in the run."""
    if Path(model).exists() or model.startswith((".", "/", "~")):
        return True
    name, at = pinned(model)
    try:
        return isinstance(try_to_load_from_cache(name, "config.json", **at), str)
    except ValueError:  # a path
        return False


def _family_of(model: str) -> tuple[str, bool, str]:
    """The family of a model by its configuration, where that is on this machine; else Llama's.

    Returns:
        ``model_type``, whether several query heads share a key head, and a note where the model is not here.
    """
    try:
        folder, at = located(model)
        config = AutoConfig.from_pretrained(folder, **at | {"local_files_only": True})
    except (OSError, ValueError):
        return "llama", True, f"{model} is not on this machine; a tiny llama stands for it"
    layer = language_config(config).per_layer_config[0]
    heads = int(layer.num_attention_heads)
    return str(layer.model_type), heads > int(getattr(layer, "num_key_value_heads", None) or heads), ""
