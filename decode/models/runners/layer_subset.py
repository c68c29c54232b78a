"""Which sub-layers of the target a self-speculative draft runs: early exit, or any subset.

Up to the first skipped sub-layer the draft's states and cache entries are the target's own, so they are kept:
verification runs those layers for the tokens that were not read yet, and only the layers behind them for all tokens
(LayerSkip, arXiv 2404.16710, section 4.3). Behind the first skipped sub-layer (Draft & Verify, arXiv 2309.08168) the
draft attends to the target's entries of the text, and writes its own into the slots past it, where verification
overwrites them. `decode.models.runners.fast_runner.FastRunner.read_subset` runs them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from decode.core.errors import UserError


@dataclass(frozen=True)
class LayerSubset:
    """The sub-layers that a self-speculative draft runs; ``LayerSubset(E)`` exits behind the first E layers."""

    shared: int  # layers before the first skipped sub-layer; all of them run
    attention: frozenset[int] = frozenset()  # layers from `shared` on whose attention runs
    mlp: frozenset[int] = frozenset()  # layers from `shared` on whose MLP runs

    @classmethod
    def skipping(cls, layers: int, attention: Iterable[int], mlp: Iterable[int]) -> LayerSubset:
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

    @classmethod
    def early_exit(cls, layers: int, exit_layer: int) -> LayerSubset:
        """The first `exit_layer` of a model's layers.

        Raises:
            UserError: a layer outside the model, or its last one, which would be the target itself.
        """
        if not 1 <= exit_layer < layers:
            raise UserError(
                f"exit_layer is {exit_layer}; the model has {layers} layers, so it has to be 1 to {layers - 1} "
                "(the number of layers that the draft runs)"
            )
        return cls(exit_layer)

    @property
    def sublayers(self) -> int:
        """How many attention and MLP sub-layers run."""
        return 2 * self.shared + len(self.attention) + len(self.mlp)
