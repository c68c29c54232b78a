"""The hand-written forward as a runner, which can also read ahead with a subset of its layers (self-speculation)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from decode.draft import Draft
from decode.errors import UserError
from decode.models.families import FAMILIES, is_small, layer_kinds, model_weights, published_in_half, tunable
from decode.models.fast_forward import FastForward, LayerSubset, Placed, cos_and_sin
from decode.models.huggingface_runner import facts_of, free_memory
from decode.models.ragged_batch import NewTokens, Row
from decode.models.runner import Output, Runner, joined
from decode.models.weights import Linears

ROOM = 1.5  # memory that has to be free before a large model's weights are copied, in their sizes


def fast_runner(model: PreTrainedModel, *, pack: str = "off", draft: bool = False) -> FastRunner:
    """A runner of a model that `supports` knows.

    Args:
        model: the model.
        pack: of `decode.models.weights.MODES`; ``auto`` packs large models (`COPIED`) only where float16
            holds their weights and memory has room for a second copy.
        draft: it is a draft, whose weights may be rounded to 16 bits.
    """
    facts, rotary = facts_of(model), model.base_model.rotary_emb
    first = layer_kinds(model.config.get_text_config())[0][0]
    rotated = cos_and_sin(rotary, 1, facts["dtype"], facts["device"], first.rope)[0].shape[-1]
    tuned, large = tunable(model), not is_small(model)
    if pack == "auto" and large and free_memory(model.device) <= ROOM * facts["weight_bytes"]:
        pack = "off"
    kept = pack != "off" and not draft and published_in_half(model)
    if pack == "auto" and large:
        pack = "on" if kept else "off"
    half = kept or (draft and pack == "auto")
    make = Linears(pack, model.config.get_text_config().num_hidden_layers, copies=tuned, half=half)
    network = FastForward(model_weights(model, rotated, make, tuned=tuned, folded=not kept), rotary)
    saved = make.bytes["in float16"]
    facts |= {"packing": make.sentence(), "weight_bytes": facts["weight_bytes"] - saved}
    return FastRunner(network, facts, rounded=draft and saved > 0)


class RowRunner(Runner):
    """A runner whose sequences are rows of the cache of a `FastForward`.

    Attributes:
        network: the layers and their cache.
    """

    network: FastForward

    def new_cache(self) -> Any:
        """See `Runner.new_cache`."""
        return self.network.cache.new_row(Row)

    def reserve(self, *, rows: int = 0, capacity: int = 0) -> None:
        """See `Runner.reserve`."""
        self.network.reserve(rows=rows, capacity=capacity)


class FastRunner(RowRunner):
    """A model by `FastForward`, equal to its own forward to rounding.

    Where weights are copied (see `decode.models.families`), later changes to the model are not seen: open it anew.

    Args:
        network: the layers and their cache.
        facts: of the model, see `Runner`.
        rounded: whether weights were rounded to 16 bits.
    """

    def __init__(self, network: FastForward, facts: dict[str, Any], *, rounded: bool) -> None:
        super().__init__(**facts, cache_bytes_per_token=network.cache.bytes_per_token)
        self.network, self.rounded = network, rounded

    @property
    def depth(self) -> int:
        """Number of layers."""
        return len(self.network.layers)

    def forward(
        self,
        caches: Sequence[Row],
        tokens: Sequence[Tensor],
        trees: Sequence[Draft | None] | None = None,
        *,
        capture: tuple[int, ...] = (),
        last: int | None = None,
        layers: LayerSubset | None = None,
    ) -> Output:
        """See `Runner.forward`.

        With `layers` a subset of the layers reads the tokens ahead of the sequence: what the shared layers computed is
        kept, and the next whole forward, which has to begin with the same tokens, takes it up. `Cache.truncate` drops
        it. Logits are then those of the model's own final norm and head after the subset.
        """
        network, counts = self.network, [len(own) for own in tokens]
        starts = [cache.length if layers is None else cache.known for cache in caches]
        new = list(map(NewTokens, caches, starts, counts))
        for one, tree in zip(new, trees or ()):
            if tree is not None:
                one.depths, one.seen = [0, *tree.depths()], tree.visible()
        placed, captured = network.place(new), None
        if layers is not None:
            x = self._sublayers(self._read_ahead(new, tokens, placed, layers.shared), layers, placed)
        elif caches[0].ahead or (len(caches) > 1 and any(cache.ahead for cache in caches)):
            shared = next(cache.shared for cache in caches if cache.ahead)
            rest = [own[cache.known - cache.length :] for cache, own in zip(caches, tokens)]
            late = [(NewTokens(cache, cache.known, len(own)), own) for cache, own in zip(caches, rest) if len(own)]
            if late:
                some = [one for one, _ in late]
                self._read_ahead(some, [own for _, own in late], network.place(some), shared)
            x = joined([joined(cache.ahead)[:n] for cache, n in zip(caches, counts)])
            for cache in caches:
                cache.ahead = []
            x = network.run(x, shared, self.depth, placed)
        else:
            x, captured = network.run_tokens(joined(tokens), placed, capture)
        if last is not None and (len(caches) > 1 or last < counts[0]):
            several = placed.batch is not None and len(caches) > 1 and last > 0
            x = x.index_select(0, placed.batch.last) if several else x[len(x) - last :]  # type: ignore[union-attr]
        logits, hidden = network.project(x)
        if layers is None:
            for one in new:
                one.cache.length = one.end
        return Output(logits, hidden, captured)

    def _read_ahead(self, new: Sequence[NewTokens], tokens: Sequence[Tensor], placed: Placed, shared: int) -> Tensor:
        """The states of tokens after the first `shared` layers, which the caches keep for the next whole forward."""
        x = self.network.run(self.network.embed(joined(tokens)), 0, shared, placed)
        for one, own in zip(new, x.split([len(own) for own in tokens])):
            one.cache.shared = shared
            one.cache.ahead.append(own)
        return x

    def _sublayers(self, x: Tensor, subset: LayerSubset, placed: Placed) -> Tensor:
        """The sub-layers of a subset after the shared layers."""
        network = self.network
        for i in range(subset.shared, self.depth) if subset.attention or subset.mlp else ():
            layer, a = network.layers[i], x
            if i in subset.attention:
                (slot,) = network.slots(i, i + 1, placed)
                a = layer.out.add_to(x, network.attention(layer, layer.qkv(layer.norm1(x)), placed, slot))
            if i in subset.mlp:
                z = (layer.norm2 or layer.norm1)(x if network.parallel else a)
                a = layer.down.add_to(a, network.mlp(layer, z))
            x = a
        return x


def self_speculating(runner: Runner) -> FastRunner:
    """The target's runner, if a subset of its layers can draft.

    Raises:
        UserError: naming the model and the families that can.
    """
    if isinstance(runner, FastRunner):
        return runner
    raise UserError(
        f"{runner.name} cannot draft with its own layers: that takes a model of {', '.join(FAMILIES)} on one device, "
        "with plain weights and layers of one kind; use another drafter (vanilla with --draft, prompt-lookup)"
    )
