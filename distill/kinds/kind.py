"""What the rest of distill asks of a kind of draft: everything by which the kinds differ, in one object of one file."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from decode.models.heads.eagle import DraftHead
from decode.models.heads.files import head_kind, load_head
from decode.models.open import load_model
from distill.config.kinds import KINDS, kind_of
from distill.config.models import StudentSettings
from distill.kinds.base import Draft

Rules = list[tuple[object, str, str]]
"""Of `distill.config.base.refuse`."""
Differences = dict[str, tuple[Any, Any]]
"""Settings of a student: what they say, and what a head has."""


@dataclass(kw_only=True, frozen=True)
class Kind:
    """A kind of draft; this one is of heads that read the target's hidden states.

    Attributes:
        name: ``student.kind`` in the settings.
        version: Of `decode.models.heads`, by which files of heads are told apart; None: a language model.
        head: Whether it reads the target's hidden states.
        start: How reports name it before its training.
        decodable: Whether it can draft before its training.
        method: Of decode, that drafts chains with it.
        served: What serving engines call it; of vLLM its method.
        sniffed: Parts of a path from which vLLM derives another method.
        notes: Of the model card.
        no_gguf: Why llama.cpp reads no file of it.
        settings: Sections of the settings of a student that decide its shape.
        of_target: Whether its layers are the target's own.
        from_target: Whether a new one begins as the target's last layers.
        grown: Names of kinds from whose heads it can start too.
    """

    name: str
    version: int | str | None
    served: str
    head: bool = True
    start: str = "untrained"
    decodable: bool = False
    method: str = "eagle"
    sniffed: Sequence[str] = ()
    notes: Sequence[str] = ()
    no_gguf: str = ""
    settings: Sequence[str] = ("unroll",)
    of_target: bool = False
    from_target: bool = False
    grown: Sequence[str] = ()

    def rules(self, settings: Any) -> Rules:
        """What the settings of a run must not be with it."""
        return []

    def steps(self, student: Any) -> int:
        """Drafting steps that are trained at once, of a block its drafted tokens."""
        return int(student.unroll or 1)

    def longest(self, student: Any, wanted: int) -> int:
        """The longest draft out of one of this length."""
        return wanted

    def captured(self, student: Any, config: Any) -> list[int]:
        """The layers whose entering states it reads, of a target of this configuration."""
        return [int(config.num_hidden_layers)]

    def layers(self, student: Any) -> int:
        """How many of the target's last layers it begins with."""
        return 1

    def check_target(self, target: PreTrainedModel) -> None:
        """Refuses a target without weights whose states or output head it cannot read."""

    def shrink(self, student: Any) -> None:
        """Changes the settings of a student to those of a dry run."""
        student.model = None  # a given head does not fit a small target

    def alike(self, student: Any) -> None:
        """Changes the settings of a student so that it drafts as many tokens as a DFlash block of them."""

    def create(self, target: PreTrainedModel, tokenizer: Any, student: Any, seed: int) -> Any:
        """A new model for a target; its random weights depend on the seed alone."""
        raise NotImplementedError

    def check_given(self, model: Any, student: Any) -> Differences:
        """The settings that a given head has to agree with: what they say, and what it has."""
        every = model.config.vocab_size
        drafted = model.config.draft_vocab_size if model.reduced else every
        return {"draft_vocab": (min(student.draft_vocab or every, every), drafted)}

    def grow(self, model: Any, student: Any, seed: int) -> tuple[Any, list[str]]:
        """A head of this kind that continues one of `grown`, and its new parts."""
        raise NotImplementedError

    def draft(self, model: nn.Module, student: Any, *, accepted_only: bool = False) -> Draft:
        """The model in training."""
        raise NotImplementedError


def of_model(model: Any) -> Kind:
    """The kind of a model."""
    version = model.version if isinstance(model, DraftHead) else None
    found: Kind = next(kind for kind in map(kind_of, KINDS) if kind.version == version)
    return found


def open_draft(name: str, target: PreTrainedModel | None = None) -> Draft:
    """The draft in a folder or of the Hub in training; a head needs the ``target`` that it is for.

    Raises:
        decode.errors.UserError: It cannot be read.
    """
    model: Any = load_head(name, target).float() if head_kind(name) else load_model(name, device="cpu", dtype="float32")
    kind = of_model(model)
    return kind.draft(model.train(), StudentSettings(kind=kind.name, model=name))
