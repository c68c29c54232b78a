"""Types that settings share, and what refuses and changes them."""

from functools import reduce
from operator import attrgetter
from typing import Any, Literal

from decode.errors import UserError

Values = dict[str, Any]
"""Plain data by name."""
Attention = Literal["auto", "eager", "sdpa", "flex_attention", "flash_attention_2", "flash_attention_3"]
Precision = Literal[
    "auto", "32-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true", "64-true", "transformer-engine",
    "transformer-engine-float16",
]  # fmt: skip
Signal = Literal["hidden", "topk", "online", "vllm"]
Split = Literal["train", "validation", "test"]

SHARDED = ("fsdp",)
"""Strategies that spread a model's weights over devices."""
RESERVED = (
    "target", "initial", "export", "probes", "work", "wandb", "csv", "undistilled", "untrained", "untuned",
    "report", "corpus", "signal", "signals", "responses", "prompts", "original", "ablation", "lock",
)  # fmt: skip
"""Folders of a run, names in reports and files under ``work/``, which no draft may have as its name."""


def refuse(settings: Any, *rules: tuple[object, str, str], where: str = "") -> None:
    """Raise a `UserError` for the first of the rules (is it broken, dotted key, what follows the key's value)."""
    for broken, key, message in rules:
        if broken:
            raise UserError(f"{where}{key} is {attrgetter(key)(settings)!r}, {message}")


def change(settings: Any, **values: Any) -> None:
    """Set values by their keys, in which ``__`` stands for a dot: ``trainer__devices=1``."""
    for key, value in values.items():
        *sections, name = key.split("__")
        setattr(reduce(getattr, sections, settings), name, value)
