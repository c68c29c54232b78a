"""Reading with a part of the model's own layers, on the model's own cache: early exit and layer subsets.

A self-speculative draft runs some sub-layers of the target. Up to the first skipped one its states and cache entries
are the target's own, so they are kept: verification runs those layers for the tokens that were not read yet, and only
the layers behind them for all tokens (LayerSkip, arXiv 2404.16710, section 4.3). Behind the first skipped sub-layer
(Draft & Verify, arXiv 2309.08168) the draft attends to the target's entries of the text, and writes its own into the
slots past it, where verification overwrites them.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from decode.core.errors import UserError
from decode.core.proposal import Draft
from decode.models.fast import LLAMA_LIKE, FastRunner, onto
from decode.models.huggingface import Runner

FAMILIES = (*sorted(LLAMA_LIKE), "phi", "gpt_neox")


@dataclass(frozen=True)
class Part:
    """The sub-layers that a self-speculative draft runs.

    Attributes:
        shared: layers before the first skipped sub-layer; all of them run.
        attention: layers from `shared` on whose attention runs.
        mlp: layers from `shared` on whose MLP runs.
    """

    shared: int
    attention: frozenset[int] = frozenset()
    mlp: frozenset[int] = frozenset()

    @classmethod
    def skipping(cls, layers: int, attention: Iterable[int], mlp: Iterable[int]) -> Part:
        """The model without the attention and the MLP sub-layers of these layers.

        Raises:
            UserError: a layer outside the model.
        """
        no_attention, no_mlp = frozenset(attention), frozenset(mlp)
        outside = [i for i in sorted(no_attention | no_mlp) if not 0 <= i < layers]
        if outside:
            raise UserError(f"layer {outside[0]} cannot be skipped: the model has layers 0 to {layers - 1}")
        shared = min(no_attention | no_mlp, default=layers)
        rest = frozenset(range(shared, layers))
        return cls(shared, rest - no_attention, rest - no_mlp)

    @property
    def sublayers(self) -> int:
        """How many attention and MLP sub-layers run."""
        return 2 * self.shared + len(self.attention) + len(self.mlp)


class PartialRunner(FastRunner):
    """A `FastRunner` that can also read ahead with a part of its layers.

    Attributes:
        ahead: states ``[n, width]`` after the shared layers of the tokens read ahead, which the next `read` takes up.
    """

    ahead: list[Tensor]

    def _open(self) -> None:
        self.ahead = []
        self._shared = 0
        super()._open()

    @property
    def depth(self) -> int:
        """Number of layers."""
        return len(self.layers)

    def read_part(self, tokens: Tensor, part: Part) -> Tensor:
        """Read tokens with a part of the layers, ahead of the text that is held.

        The next `read` has to begin with the same tokens; anything else has to `truncate` first.

        Args:
            tokens: long ``[n]``, following the text and the tokens read ahead before.
            part: which layers; the same until the next `read`.

        Returns:
            Logits ``[n, vocab]`` by the model's own final norm and head; `hidden` is what the head saw.
        """
        start = self.length + sum(map(len, self.ahead))
        place = self._place(len(tokens), None, start)
        x = self.embedding.index_select(0, tokens)
        if part.shared:
            x = self.run_layers(x, 0, part.shared, start, *place)
        self._shared = part.shared
        self.ahead.append(x)
        if part.attention or part.mlp:
            x = self._run_rest(x, part, start, *place)
        return self._logits(x)

    def _run_rest(self, x: Tensor, part: Part, start: int, turn: Tensor, mask: Tensor | None) -> Tensor:
        """The sub-layers of `part` behind the shared layers."""
        n = len(x)
        for i in range(part.shared, self.depth):
            w, a = self.layers[i], x
            if i in part.attention:
                (room,) = self._room(i, i + 1, start, n)
                a = onto(x, self._attention(w, w.norm1(x), turn, mask, *room), w.out, w.out_bias)
            if i in part.mlp:
                z = (w.norm2 or w.norm1)(x if self.parallel else a)
                a = onto(a, self._mlp(w, z), w.down, w.down_bias)
            x = a
        return x

    def _forward(self, tokens: Tensor, tree: Draft | None, head: int | None) -> Tensor:
        if not self.ahead:
            return super()._forward(tokens, tree, head)
        assert tree is None, "what was read ahead is a chain"
        x, shared, start = torch.cat(self.ahead)[: len(tokens)], self._shared, self.length
        self.ahead = []
        n, known = len(tokens), len(x)
        if known < n:
            new, at = self.embedding[tokens[known:]], start + known
            if shared:
                new = self.run_layers(new, 0, shared, at, *self._place(n - known, None, at))
            x = torch.cat([x, new])
        if shared < self.depth:
            x = self.run_layers(x, shared, self.depth, start, *self._place(n, None, start))
        return self._logits(x if head is None else x[max(0, n - head) :])

    def truncate(self, length: int) -> None:
        """See `Runner.truncate`; what was read ahead is dropped too."""
        self.ahead = []
        super().truncate(length)


class PartReader(Runner):
    """A part of a model's layers in the role of a draft model, on the model's own cache."""

    def __init__(self, runner: PartialRunner, part: Part) -> None:
        self.whole, self.part = runner, part
        self.device, self.dtype = runner.device, runner.dtype
        self.vocab_size, self.limit = runner.vocab_size, runner.limit

    @property
    def length(self) -> int:  # type: ignore[override]
        """Positions read, those read ahead among them."""
        return self.whole.length + sum(map(len, self.whole.ahead))

    @property
    def hidden(self) -> Tensor:  # type: ignore[override]
        """What the head saw in the latest read."""
        return self.whole.hidden

    def read(self, tokens: Tensor, tree: Draft | None = None, head: int | None = None) -> Tensor:
        """See `PartialRunner.read_part`."""
        return self.whole.read_part(tokens, self.part)

    def truncate(self, length: int) -> None:
        """The whole model's cache is its target's to roll back."""


def walkable(runner: Runner) -> PartialRunner:
    """The runner, if its layers can be run one by one.

    Raises:
        UserError: naming the family and those that can.
    """
    if isinstance(runner, PartialRunner):
        return runner
    name, kind = type(runner.model).__name__, runner.config.model_type
    why = (
        "its weights are quantised, spread over devices, its layers differ in kind, or its forward is not reproduced"
        if kind in FAMILIES
        else "the families that can: " + ", ".join(FAMILIES)
    )
    raise UserError(
        f"{name} ({kind}) cannot draft with its own layers: {why}; use another drafter (vanilla with --draft, "
        "prompt-lookup)"
    )


def early_exit(runner: PartialRunner, layer: int) -> Part:
    """The first `layer` layers.

    Raises:
        UserError: a layer outside the model, or its last one, which would be the target itself.
    """
    if not 1 <= layer < runner.depth:
        raise UserError(
            f"exit_layer is {layer}; the model has {runner.depth} layers, so it has to be 1 to {runner.depth - 1} "
            "(the number of layers that the draft runs)"
        )
    return Part(layer)


def separate_copy(runner: PartialRunner, layer: int) -> PartialRunner:
    """The first layers as a draft model with a cache of its own, sharing the weights: what a shared cache saves."""
    early_exit(runner, layer)
    own = copy.copy(runner)
    own.layers, own.length, own.capacity, own.ahead = runner.layers[:layer], 0, 0, []
    del own.kv
    own.reserve(256)
    return own


def cache_bytes(runner: PartialRunner, layers: int) -> int:
    """Bytes of cache that a text position takes in this many layers."""
    return layers * 2 * runner.shape.kv_heads * runner.shape.width * runner.kv.element_size()
