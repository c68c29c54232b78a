"""The shapes that are compared, and the settings and random weights of each."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from transformers import PretrainedConfig, PreTrainedModel

from decode.errors import UserError
from decode.models.heads import FeatureHead, head_config, random_head
from decode.models.loading import load_model
from distill.config.run import Settings
from distill.config.training import Architecture
from distill.experiments.design.settings import DesignSettings
from distill.models.layers import cut, kept_layers
from distill.models.loading import build_model

Family = Literal["model", "cut", "eagle", "eagle3", "given", "exit", "lookup", "rest"]

HEADS = ("eagle", "eagle3")
UNTRAINED = ("exit", "lookup", "rest")
SHOWN = 6  # most layers that a name lists
LARGE = 32_768  # A vocabulary of which a head drafts a fixed number of ids rather than a share


@dataclass(frozen=True)
class Shape:
    """A draft that could be trained, or a method that needs no training; fields of other families are left alone."""

    family: Family  # what it is
    layers: int = 0  # of a draft model; of an exit the layer
    width: int = 0  # of a draft model
    inner: int = 0  # width inside its MLP
    own: bool = False  # it has an output head of its own
    kept: tuple[int, ...] = ()  # the target's layers that a draft is cut from, counted from 0
    vocab: int | None = None  # ids that a head drafts; None: all

    @property
    def name(self) -> str:
        """What tables call it."""
        if self.family == "model":
            return f"{self.layers} × {self.width}, MLP {self.inner}{', own head' * self.own}"
        if self.family == "cut":
            first = self.kept == tuple(range(len(self.kept)))
            numbers = [str(i + 1) for i in self.kept]
            if len(numbers) > SHOWN:
                numbers = [f"{len(numbers)} of them", *numbers[:2], "…", numbers[-1]]
            return f"target's layers: {f'first {len(self.kept)}' if first else ', '.join(numbers)}"
        if self.family in HEADS:
            ids = "" if self.vocab is None else f", {self.vocab:,} ids"
            return f"EAGLE-{3 if self.family == 'eagle3' else 1}{ids}"
        names = {"given": "the draft given", "lookup": "prompt lookup", "rest": "REST"}
        return names.get(self.family, f"early exit after layer {self.layers}")

    @property
    def slug(self) -> str:
        """The name as a part of a file's."""
        return re.sub(r"[^a-z0-9]+", "-", self.name.lower().replace("×", "x")).strip("-")

    @property
    def trained(self) -> bool:
        """Whether it has weights of its own to be trained."""
        return self.family not in UNTRAINED

    @property
    def costs_as(self) -> Shape:
        """A shape whose forwards take as long: an output head of its own is as large, other layers are as deep."""
        return replace(self, own=False, kept=tuple(range(len(self.kept))))

    @property
    def is_head(self) -> bool:
        """Whether it is a feature head."""
        return self.family in HEADS

    def settings(self, full: Settings) -> Settings:
        """The run's settings with this draft in place of its own."""
        if self.family == "eagle" or self.family == "eagle3":
            own = full.eagle.layers if self.family == full.eagle.kind else []
            return replace(full, eagle=replace(full.eagle, kind=self.family, draft_vocab=self.vocab, layers=own))
        eagle = replace(full.eagle, kind="none", layers=[])
        if self.family == "given":
            return replace(full, eagle=eagle)
        training, initial = full.initial.training, replace(full.initial, model=None, package=None)
        if self.family == "cut":
            if full.initial.kind != "cut":  # next tokens are for drafts that start from nothing
                training = replace(training, steps=None, epochs=None)
            initial = replace(initial, kind="cut", layers=list(self.kept), training=training)
        else:
            if training.steps is None and training.epochs is None:  # the configuration trains no draft from scratch
                training = full.reference.training
            initial = replace(initial, kind="scratch", architecture=self._architecture(full), training=training)
        return replace(full, eagle=eagle, initial=initial)

    def _architecture(self, full: Settings) -> Architecture:
        base = full.initial.architecture
        heads = heads_of(self.width, base.hidden_size // base.heads)
        return replace(
            base,
            hidden_size=self.width,
            layers=self.layers,
            heads=heads,
            kv_heads=base.kv_heads if (base.kv_heads or heads) <= heads and not heads % (base.kv_heads or 1) else None,
            intermediate_size=self.inner,
            tie_embeddings=not self.own,
        )

    def random(self, full: Settings, target: PreTrainedModel) -> PreTrainedModel | FeatureHead:
        """It with weights that are not trained: forwards take as long with them."""
        text = target.config.get_text_config()
        made = self.settings(full)
        if self.family == "given":
            return load_model(str(made.initial.model), device="cpu", dtype=str(target.dtype).removeprefix("torch."))
        if self.family in ("cut", "exit"):
            return cut(target, list(self.kept or range(self.layers))).eval()
        if not self.is_head:
            model = build_model(made.initial.architecture, int(text.vocab_size), None, 0)
            return model.to(target.device, target.dtype).eval()
        own = made.eagle
        head = random_head(head_config(text, own.version, **own.shape()))
        return head.to(target.device, target.dtype)

    def row(self) -> dict[str, Any]:
        """As data."""
        return {"name": self.name, **{key: value for key, value in asdict(self).items() if value}}


def heads_of(width: int, size: int) -> int:
    """Attention heads of about this size that divide a width into even parts."""
    return next(n for n in range(max(1, width // size), 0, -1) if width % n == 0 and (width // n) % 2 == 0)


def default_shape(full: Settings, layers: int) -> Shape:
    """The shape of the draft that the configuration names.

    Args:
        full: the settings.
        layers: of the target.
    """
    if full.eagle.enabled:
        return Shape("eagle3" if full.eagle.version == 3 else "eagle", vocab=full.eagle.draft_vocab)
    own = full.initial.architecture
    if full.initial.kind == "cut":
        return Shape("cut", kept=tuple(kept_layers(full.initial.layers, layers)))
    if full.initial.kind != "scratch":
        return Shape("given")
    inner = own.intermediate_size or -(-own.hidden_size * 8 // 96) * 32
    return Shape("model", own.layers, own.hidden_size, inner, own=not own.tie_embeddings)


def space(full: Settings, design: DesignSettings, config: PretrainedConfig) -> list[Shape]:
    """All shapes, the configuration's own first.

    Args:
        full: the settings.
        design: which shapes; empty lists are derived.
        config: the target's text configuration.

    Raises:
        UserError: layers that the target does not have, odd widths, or no shape at all.
    """
    odd = [n for n in design.widths if n % 2]
    if odd:
        raise UserError(f"design.widths has {odd[0]}: wanted even widths, which attention heads can divide")
    depth, width, vocab = int(config.num_hidden_layers), int(config.hidden_size), int(config.vocab_size)
    for key in ("first", "spread", "exits"):
        wrong = [n for n in getattr(design, key) if n >= depth]
        if wrong:
            raise UserError(f"design.{key} has {wrong[0]} and the target {depth} layers: wanted 1 to {depth - 1}")
    few = [n for n in (1, 2, 3, depth // 2) if 0 < n < depth]
    found = [default_shape(full, depth), *_models(design, depth, width)]
    found += [Shape("cut", kept=tuple(range(n))) for n in design.first or few]
    found += [Shape("cut", kept=tuple(kept_layers(n, depth))) for n in design.spread or few[1:]]
    shares = [vocab, 16_384, 8_192] if vocab > LARGE else [vocab, vocab // 2, vocab // 4]
    vocabs = [None if n >= vocab else n for n in design.draft_vocabs or shares]
    found += [Shape(kind, vocab=ids) for kind in design.heads for ids in vocabs]
    found += [Shape("exit", layers=n) for n in design.exits or few]
    found += [Shape("lookup"), Shape("rest")] if design.retrieval else []
    return list(dict.fromkeys(found))


def _models(design: DesignSettings, depth: int, width: int) -> Iterator[Shape]:
    """Draft models of every combination."""
    step = 16 if width <= 256 else 64
    widths = design.widths or [max(step, width * n // 4 // step * step) for n in (1, 2, 3)]
    layers = design.layers or [n for n in dict.fromkeys((1, 2, depth // 2)) if n]
    for count in layers:
        for size in widths:
            for share in design.mlp:
                for kind in design.embeddings:
                    yield Shape("model", count, size, max(16, round(size * share / 16) * 16), own=kind == "own")
