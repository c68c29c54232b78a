"""The hand-written forward as a runner, which can also read ahead with a subset of its layers (self-speculation)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor
from transformers import PreTrainedModel

from decode.draft import Draft
from decode.errors import UserError
from decode.models.families import FAMILIES, is_small, model_weights, published_in_half, tunable
from decode.models.fast_forward import FastForward, LayerSubset, Mask, cos_and_sin
from decode.models.huggingface_runner import facts_of, free_memory, weight_bytes
from decode.models.ragged_batch import NewTokens, TextsTogether
from decode.models.runner import Runner
from decode.models.weights import Linears


class RowRunner(Runner):
    """A runner over a row of a `FastForward`'s cache."""

    forward: FastForward  # the layers and their cache
    _row = 0
    _texts: list[Self]
    """By row, once the cache is shared."""

    @property
    def row(self) -> int:
        """See `Runner.row`; it changes when a text in a lower one is closed."""
        return self._row

    @property
    def slots_used(self) -> int:
        """Slots of the cache that are in use."""
        return self.length

    @property
    def cache_bytes_per_token(self) -> int:
        """See `Runner.cache_bytes_per_token`."""
        cache = self.forward.cache
        return cache.shape[0] * cache.shape[2] * cache.shape[4] * cache.element_size()

    def share(self, forks: list[Self]) -> None:
        """Give runners of the same forward rows of the cache behind those in use."""
        self._texts.extend([] if self._texts else [self])
        self.forward.reserve_rows(len(self._texts) + len(forks))
        for fork in forks:
            fork._row, fork._texts = len(self._texts), self._texts
            self._texts.append(fork)

    def close(self) -> None:
        """Leave the cache; the text in its last row moves into the free one. The memory goes with the last but one.

        A text that has left or never shared is left as it is.
        """
        if not self._texts:
            return
        last = self._texts.pop()
        if last is not self:
            self.forward.move_row(last._row, self._row, last.slots_used)
            last._row, self._texts[self._row] = self._row, last
        if len(self._texts) == 1:
            self._texts.clear()
            self.forward.reserve_rows(1)
        self._texts = []


def hand_out(texts: Sequence[Runner], hidden: Tensor, counts: Sequence[int]) -> None:
    """Give each text its rows of the last hidden states, text after text."""
    for text, own in zip(texts, hidden.split(list(counts))):
        text.hidden = own


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
    rotated = cos_and_sin(rotary, 1, facts["dtype"], facts["device"])[0].shape[-1]
    tuned, large = tunable(model), not is_small(model)
    if pack == "auto" and large and free_memory(model.device) <= ROOM * weight_bytes(model):
        pack = "off"
    kept = pack != "off" and not draft and published_in_half(model)
    if pack == "auto" and large:
        pack = "on" if kept else "off"
    half = kept or (draft and pack == "auto")
    make = Linears(pack, model.config.get_text_config().num_hidden_layers, copies=tuned, half=half)
    forward = FastForward(model_weights(model, rotated, make, tuned=tuned, folded=not kept), rotary)
    runner = FastRunner(forward, facts["name"], facts["limit"], model=model)
    runner.packing, runner.saved_bytes = make.sentence(), make.bytes["float16"]
    return runner


class FastRunner(RowRunner):
    """A model by `FastForward`, equal to its own forward to rounding.

    Where weights are copied (see `fast_architectures`), later changes to the model are not seen: open
    it anew.

    Args:
        forward: the layers and their cache.
        name: of the model, for messages.
        limit: positions of its context.
        model: see `Runner`.
    """

    def __init__(self, forward: FastForward, name: str, limit: int, *, model: Any = None) -> None:
        vocab = forward.weights.head.rows
        super().__init__(name, device=forward.device, dtype=forward.dtype, vocab_size=vocab, limit=limit, model=model)
        self.forward = forward
        self._length = self.saved_bytes = 0  # by which what is read is smaller than the model's weights
        self._texts = []
        self._ahead: list[Tensor] = []  # states behind the shared layers of the tokens read ahead
        self._shared = 0

    @property
    def length(self) -> int:
        """See `Runner.length`; what was read ahead does not count."""
        return self._length

    @property
    def length_ahead(self) -> int:
        """Tokens read ahead by `read_subset`, which the next `read` takes up."""
        return sum(map(len, self._ahead))

    @property
    def slots_used(self) -> int:
        """See `RowRunner.slots_used`."""
        return self._length + self.length_ahead

    @property
    def depth(self) -> int:
        """Number of layers."""
        return len(self.forward.layers)

    @property
    def weight_bytes(self) -> int:
        """See `Runner.weight_bytes`."""
        return 0 if self.model is None else weight_bytes(self.model) - self.saved_bytes

    def first_layers(self, exit_layer: int) -> FastRunner:
        """The first layers as a draft model with a cache of its own, sharing the weights.

        Raises:
            UserError: an exit outside the model.
        """
        count = LayerSubset.early_exit(self.depth, exit_layer).shared
        return FastRunner(self.forward.first_layers(count), self.name, self.limit)

    def fork(self, count: int) -> list[FastRunner]:  # type: ignore[override]
        """See `Runner.fork`: in rows of the same cache."""
        forks = [FastRunner(self.forward, self.name, self.limit, model=self.model) for _ in range(count)]
        self.share(forks)
        return forks

    def reserve(self, capacity: int) -> None:
        """See `Runner.reserve`."""
        self.forward.reserve(capacity)

    def truncate(self, length: int) -> None:
        """See `Runner.truncate`; what was read ahead is dropped too. Slots past `length` are written before read."""
        self._ahead = []
        if length <= self._length:
            self._length = length

    def gather(self, base: int, slots: list[int]) -> None:
        """See `Runner.gather`."""
        self.forward.gather(base, torch.tensor(slots, device=self.device), self._row)

    def read(self, tokens: Tensor, tree: Draft | None = None, head: int | None = None) -> Tensor:
        """See `Runner.read`."""
        n, start, forward = tokens.shape[0], self._length, self.forward
        if self._ahead:
            assert tree is None, "what was read ahead is a chain"
            x = self._behind_ahead(tokens, start)
        else:
            placed = forward.place(n, tree, start, self._row)
            if self.captured_layers:
                x = self._capturing(forward.embed(tokens), start, *placed)
            else:
                x = forward.run_tokens(tokens, start, *placed)
        logits, self.hidden = forward.project(x if head is None or head >= n else x[n - head :])
        self._length = start + n
        return logits

    def read_texts(
        self,
        texts: Sequence[FastRunner],
        tokens: Tensor,
        counts: Sequence[int],
        trees: Sequence[Draft | None] | None = None,
        *,
        last_only: bool = False,
    ) -> Tensor:
        """See `Runner.read_texts`: in one forward; texts in the order of their rows attend in the fewest calls."""
        trees, forward = trees or [None] * len(texts), self.forward
        new = [NewTokens.of(text._row, text._length, n, tree) for text, n, tree in zip(texts, counts, trees)]
        rotary, together = forward.place_texts(new)
        if any(text._ahead for text in texts):
            x = self._behind_what_was_read_ahead(texts, tokens.split(list(counts)), rotary, together)
        elif self.captured_layers:
            x = self._capturing(forward.embed(tokens), 0, rotary, together)
            for text, own in zip(texts, self.features.split(list(counts))):
                text.features = own
        else:
            x = forward.run_tokens(tokens, 0, rotary, together)
        logits, hidden = forward.project(x.index_select(0, together.last) if last_only else x)
        hand_out(texts, hidden, [1] * len(texts) if last_only else counts)
        for text, n in zip(texts, counts):
            text._length += n
        return logits

    def _behind_what_was_read_ahead(
        self, texts: Sequence[FastRunner], tokens: Sequence[Tensor], rotary: Tensor, together: TextsTogether
    ) -> Tensor:
        """All layers for the tokens of texts of which some were read ahead, ``[tokens, hidden]``."""
        forward, shared = self.forward, next(text._shared for text in texts if text._ahead)
        none = forward.embed(tokens[0][:0])
        states = [torch.cat(text._ahead or [none])[: len(own)] for text, own in zip(texts, tokens)]
        behind = [i for i, (known, own) in enumerate(zip(states, tokens)) if len(known) < len(own)]
        for text in texts:
            text._ahead = []
        if behind:
            rest = [tokens[i][len(states[i]) :] for i in behind]
            x = forward.embed(torch.cat(rest))
            if shared:
                new = [
                    NewTokens(texts[i]._row, texts[i]._length + len(states[i]), len(own))
                    for i, own in zip(behind, rest)
                ]
                x = forward.run(x, 0, shared, 0, *forward.place_texts(new))
            for i, own in zip(behind, x.split(list(map(len, rest)))):
                states[i] = torch.cat([states[i], own])
        x = torch.cat(states)
        return x if shared == self.depth else forward.run(x, shared, self.depth, 0, rotary, together)

    def read_subset(self, tokens: Tensor, subset: LayerSubset) -> Tensor:
        """Read tokens with a subset of the layers, ahead of the text that is held.

        The next `read` has to begin with the same tokens; anything else has to `truncate` first.

        Args:
            tokens: long ``[n]``, following the text and the tokens read ahead before.
            subset: which layers; the same until the next `read`.

        Returns:
            Logits ``[n, vocab]`` by the model's own final norm and head; `hidden` is what the head saw.
        """
        start = self.slots_used
        placed = self.forward.place(len(tokens), None, start, self._row)
        x, shared = self._run_subset(self.forward.embed(tokens), subset, start, *placed)
        self._shared = subset.shared
        self._ahead.append(shared)
        logits, self.hidden = self.forward.project(x)
        return logits

    def read_subset_of_texts(
        self, texts: Sequence[FastRunner], tokens: Tensor, counts: Sequence[int], subset: LayerSubset
    ) -> Tensor:
        """`read_subset` of several texts in one forward; logits of each text's last token, ``[texts, vocab]``."""
        forward, new = self.forward, [NewTokens(text._row, text.slots_used, n) for text, n in zip(texts, counts)]
        rotary, together = forward.place_texts(new)
        x, shared = self._run_subset(forward.embed(tokens), subset, 0, rotary, together)
        for text, own in zip(texts, shared.split(list(counts))):
            text._shared = subset.shared
            text._ahead.append(own)
        logits, hidden = forward.project(x.index_select(0, together.last))
        hand_out(texts, hidden, [1] * len(texts))
        return logits

    def _run_subset(
        self, x: Tensor, subset: LayerSubset, start: int, rotary: Tensor, mask: Mask
    ) -> tuple[Tensor, Tensor]:
        """States behind a subset of the layers, and those behind the layers that it shares with the whole model."""
        shared = self.forward.run(x, 0, subset.shared, start, rotary, mask) if subset.shared else x
        if subset.attention or subset.mlp:
            return self._run_sublayers(shared, subset, start, rotary, mask), shared
        return shared, shared

    def _capturing(self, x: Tensor, start: int, rotary: Tensor, mask: Mask) -> Tensor:
        """All layers, in pieces between the captured ones (ascending)."""
        forward, done, kept = self.forward, 0, []
        for layer in self.captured_layers:
            x = forward.run(x, done, layer, start, rotary, mask) if layer > done else x
            done = layer
            kept.append(forward.weights.final_norm(x) if layer == self.depth else x)
        self.features = kept[0] if len(kept) == 1 else torch.cat(kept, -1)
        return forward.run(x, done, self.depth, start, rotary, mask) if done < self.depth else x

    def _run_sublayers(self, x: Tensor, subset: LayerSubset, start: int, rotary: Tensor, mask: Mask) -> Tensor:
        """The sub-layers of a subset behind the shared layers."""
        forward, n = self.forward, len(x)
        for i in range(subset.shared, self.depth):
            layer, a = forward.layers[i], x
            if i in subset.attention:
                (slot,) = forward.slots(i, i + 1, start, n, mask)
                y = forward.attention(layer, layer.qkv(layer.norm1(x)), rotary, mask, slot)
                a = layer.out.add_to(x, y)
            if i in subset.mlp:
                z = (layer.norm2 or layer.norm1)(x if forward.parallel else a)
                a = layer.down.add_to(a, forward.mlp(layer, z))
            x = a
        return x

    def _behind_ahead(self, tokens: Tensor, start: int) -> Tensor:
        """All layers for tokens that were read ahead in the shared ones, and for those that follow them."""
        forward, shared = self.forward, self._shared
        x = torch.cat(self._ahead)[: len(tokens)]
        self._ahead = []
        n, known = len(tokens), len(x)
        if known < n:
            new, at = forward.embed(tokens[known:]), start + known
            if shared:
                new = forward.run(new, 0, shared, at, *forward.place(n - known, None, at, self._row))
            x = torch.cat([x, new])
        if shared == self.depth:
            return x
        return forward.run(x, shared, self.depth, start, *forward.place(n, None, start, self._row))


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
