"""The kinds of drafts: each is an object in one file of `distill.kinds`, registered here in one line."""

from functools import cache
from pkgutil import resolve_name
from typing import Any

TARGETS = ("scratch", "finetune", "lora", "as_is")
KINDS = {
    **dict.fromkeys((*TARGETS, "cut"), "distill.kinds.language_model:LANGUAGE_MODEL"),
    "eagle": "distill.kinds.eagle:EAGLE",
    "eagle3": "distill.kinds.eagle:EAGLE3",
    "mtp": "distill.kinds.eagle:NEXT_LAYERS",
    "dflash": "distill.kinds.block:DFLASH",
    "dspark": "distill.kinds.block:DSPARK",
    "dflash2": "distill.kinds.block:DFLASH2",
}
"""Where the `distill.kinds.kind.Kind` of each ``student.kind`` is; its file is read when it is asked for."""


@cache
def kind_of(name: str) -> Any:
    """The kind of a ``student.kind``."""
    return resolve_name(KINDS[name])
