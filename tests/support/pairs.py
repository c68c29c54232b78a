"""A tiny target and a draft that resembles it, with a byte-level tokenizer, for tests of whole commands."""

import copy
import json
from collections.abc import Callable
from pathlib import Path

from families import resembling
from tokenizers_of_kinds import byte_level
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from decode.measure.suites import Prompt, Suite

TEXT = "Tom has 3 apples and buys 4 more. How many apples does he have? Das Maß ist voll, 日本語."


def make_tokenizer(chat: bool = False) -> PreTrainedTokenizerFast:
    """Byte-level BPE of 280 tokens; characters beyond ASCII take several tokens."""
    fast = byte_level(TEXT, 280, ("<eos>",))
    if chat:
        fast.chat_template = (
            "{% for m in messages %}[{{ m.role }}]{{ m.content }}\n{% endfor %}"
            "{% if add_generation_prompt %}[assistant]{% endif %}"
        )
    return fast


def make_pair(tiny: Callable[..., PreTrainedModel]) -> tuple[PreTrainedModel, PreTrainedModel]:
    """A target, and a draft with its weights a little off, so that about half of what it drafts is accepted."""
    target = copy.deepcopy(tiny("llama", vocab_size=280, max_position_embeddings=256, eos_token_id=0))
    target.generation_config.eos_token_id = 0
    return target, resembling(target, 0.1, seed=5)


def save_pair(folder: Path, tiny: Callable[..., PreTrainedModel]) -> Path:
    """``target`` and ``draft`` as plain folders with their tokenizer."""
    tokenizer = make_tokenizer(chat=True)
    for name, model in zip(("target", "draft"), make_pair(tiny)):
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    return folder


def edit(path: Path, **fields: object) -> None:
    """Change fields of a JSON file."""
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def into_cache(cache: Path, name: str, folder: Path) -> Path:
    """Moves a folder's files into a cache laid out as huggingface_hub does; returns the snapshot, links to blobs."""
    root = cache / f"models--{name.replace('/', '--')}"
    for part in ("blobs", "refs", snapshot := "snapshots/" + "0" * 40):
        (root / part).mkdir(parents=True)
    (root / "refs/main").write_text("0" * 40)
    for number, file in enumerate(sorted(folder.iterdir())):
        blob = file.rename(root / "blobs" / str(number))
        (root / snapshot / file.name).symlink_to(blob)
    return root / snapshot


def make_suite(count: int = 3) -> Suite:
    """Prompts of different lengths; an answer scores whether it has an even number of characters."""
    prompts = [Prompt(f"toy/{i}", f"Tom has {i} apples" + " and more" * i, None) for i in range(count)]
    return Suite("toy", prompts, lambda prompt, text: float(len(text) % 2 == 0))
