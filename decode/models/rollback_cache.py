"""The cache of one sequence for a Hugging Face model's own forward: any rollback is possible.

Keys and values are cut. A recurrent or convolutional state has no positions to cut: it is copied before tokens are read
that may be rejected, a rollback puts the copy back, and the tokens since then that stay are read again together with
the next ones. So a round that is rejected costs the reading of its accepted tokens, not another forward.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from transformers import Cache as TransformersCache
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionLayer

from decode.models.runner import Cache

OTHERS = ("LinearAttentionLayer", "DummyLayer")
"""transformers' layers that are taken as they are, beside those that a layer of this module stands for."""
WHOLE = 1 << 60  # a window that is never full


class RollbackLayer(DynamicLayer):
    """transformers' growing layer over memory that is allocated in advance, so that appending copies nothing held.

    Sliding-window layers are held whole too: the mask hides what lies outside the window, so that any rollback stays
    possible. `keys` and `values` are views ``[batch, heads, length, width]`` of the first positions of `memory`.
    """

    keys: Any
    values: Any

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self.capacity, self.memory = capacity, list[Tensor]()

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append, and return views of all that is held."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start = self.get_seq_length()
        end = start + key_states.shape[2]
        if not self.memory or end > self.capacity:
            self.capacity = max(end, 2 * self.capacity if self.memory else self.capacity)
            new = key_states, value_states
            grown = [states.new_empty(*states.shape[:2], self.capacity, states.shape[3]) for states in new]
            for memory, held in zip(grown, (self.keys, self.values)):
                if start:
                    memory[:, :, :start] = held
            self.memory = grown
        for memory, states in zip(self.memory, (key_states, value_states)):
            memory[:, :, start:end] = states
        self.keys, self.values = self.memory[0][:, :, :end], self.memory[1][:, :, :end]
        return self.keys, self.values


class HybridLayer(LinearAttentionLayer, RollbackLayer):
    """A layer that has keys and values beside a state."""

    is_compileable = False

    def __init__(self, states: int, capacity: int) -> None:
        RollbackLayer.__init__(self, capacity)
        LinearAttentionLayer.__init__(self, number_of_states=states)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Of keys and values, which come without names, or of states, which have some."""
        (RollbackLayer if args else LinearAttentionLayer).lazy_initialization(self, *args, **kwargs)

    def crop(self, tokens_to_remove: int) -> None:
        """Cut keys and values."""
        RollbackLayer.crop(self, tokens_to_remove)


class IndexedLayer(RollbackLayer):
    """A layer whose attention reads the keys that an indexer chooses by keys of its own, ``[batch, length, width]``."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.indexer = RollbackLayer(capacity)

    def update_indexer(self, indexer_key_states: Tensor) -> Tensor:
        """Append the indexer's keys, and return all."""
        states = indexer_key_states[:, None]
        return self.indexer.update(states, states[..., :0])[0][:, 0]

    def crop(self, tokens_to_remove: int) -> None:
        """Cut both to one length; after an interrupted forward they may differ."""
        length = self.get_seq_length() + tokens_to_remove
        super().crop(tokens_to_remove)
        self.indexer.crop(min(0, length - self.indexer.get_seq_length()))


class OwnState:
    """What a model keeps in an object that only it knows, which its first forward makes: it is copied whole."""

    def __init__(self) -> None:
        self.states: dict[str, Any] = {"own": None}

    def reset(self) -> None:
        """Let the next forward make another one."""
        self.states["own"] = None


class RollbackCache(TransformersCache, Cache):
    """One layer a layer of the model: a `RollbackLayer`, a state of its kind, both, or nothing.

    Attributes:
        length: positions held; an interrupted forward may have left more in some layers.
        read: positions whose keys, values and states the layers hold; fewer than `length` after some rollbacks.
        recurrent: layers with a state.

    Args:
        config: of the model.
        capacity: positions to allocate memory for.
        own: for a forward that takes no cache but its own (`OwnState`).

    Raises:
        NotImplementedError: layers that are not known here.
    """

    def __init__(self, config: Any, capacity: int = 256, *, own: bool = False) -> None:
        layers = [] if own else [_layer(layer, capacity) for layer in DynamicCache(config=config).layers]
        TransformersCache.__init__(self, layers=layers or [OwnState()])
        self.recurrent = [layer for layer in self.layers if _states(layer)]
        self.length = self.read = self._saved_at = 0
        self._ids, self._saved = torch.empty(0, dtype=torch.long), list[dict[str, dict[Any, Any]]]()

    @property
    def unread(self) -> Tensor:
        """Tokens that a rollback left to be read again, ``[n]``."""
        return self._ids[self.read : self.length]

    @property
    def passed(self) -> Any:
        """What a forward takes: this cache, or what the forward before it has made (None at first)."""
        first = self.layers[0]
        return first.states["own"] if isinstance(first, OwnState) else self

    @passed.setter
    def passed(self, made: Any) -> None:
        if isinstance(self.layers[0], OwnState):
            self.layers[0].states["own"] = made

    def begin(self, tokens: Tensor) -> None:
        """Prepare for a forward that appends ``tokens [n]`` behind `unread`."""
        if not self.recurrent:
            return
        if len(tokens) > 1:
            self.save()
        self._ids = torch.cat([self._ids[: self.length].to(tokens.device), tokens])

    def save(self) -> None:
        """Copy the states, if they are those of `length`."""
        if self.recurrent and self.read == self.length:
            self._saved_at = self.read
            self._saved = [_states(layer, copied=True) for layer in self.recurrent]

    def end(self, tokens: Tensor) -> None:
        """Hold ``tokens [n]``, which the forward has read."""
        self.length += len(tokens)
        self.read = self.length

    def truncate(self, length: int) -> None:
        """See `Cache.truncate`."""
        self.length = min(length, self.length)
        if self.recurrent and self.length < self.read:
            self.rewind(self.length)
        self.read = min(self.read, self.length)
        self._crop(self.read)

    def rewind(self, length: int) -> None:
        """Put the copied states back, or none if they are of a position after `length`; the rest is `unread`."""
        if length < self._saved_at:
            self._saved_at = 0
        self.read = self._saved_at
        for layer in () if self.read else self.recurrent:
            layer.reset()
        for layer, saved in zip(self.recurrent, self._saved) if self.read else ():
            _put_back(layer, saved)
        self._crop(self.read)

    def _crop(self, length: int) -> None:
        for layer in self.layers:
            if isinstance(layer, DynamicLayer) and layer.get_seq_length() > length:
                layer.crop(length - layer.get_seq_length())

    def gather(self, base: int, slots: list[int]) -> None:
        """See `Cache.gather`."""
        for layer in self.layers:
            for held in (layer, getattr(layer, "indexer", None)):
                for states in (
                    (held.keys, held.values) if isinstance(held, RollbackLayer) and held.is_initialized else ()
                ):
                    states[:, :, base : base + len(slots)] = states[:, :, slots]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Positions held in a layer; in one without keys, those that were read."""
        layer = self.layers[layer_idx]
        return int(layer.get_seq_length()) if isinstance(layer, DynamicLayer) else self.read

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Keys of a forward over `query_length` tokens, and the first one's position."""
        return self.get_seq_length(layer_idx) + query_length, 0


def _states(layer: Any, *, copied: bool = False) -> dict[str, dict[Any, Any]]:
    """The states of a layer, beside keys and values: transformers keeps them in dictionaries.

    `LinearAttentionLayer` changes them in place, as `OwnState` may; others replace them, so holding them is a copy.
    """
    states = {name: dict(own) for name, own in vars(layer).items() if isinstance(own, dict)}
    if copied and isinstance(layer, OwnState):
        return copy.deepcopy(states)
    if copied and isinstance(layer, LinearAttentionLayer):
        for own in states.values():
            own.update({i: state.clone() for i, state in own.items() if isinstance(state, Tensor)})
    return states


def _put_back(layer: Any, saved: dict[str, dict[Any, Any]]) -> None:
    """Put back what `_states` has copied."""
    for name, states in (copy.deepcopy(saved) if isinstance(layer, OwnState) else saved).items():
        own = getattr(layer, name)
        for i, state in states.items():
            if isinstance(layer, LinearAttentionLayer) and isinstance(state, Tensor):
                own[i].copy_(state)
            else:
                own[i] = state


def _layer(own: Any, capacity: int) -> Any:
    """The layer that rolls back in place of one that transformers would make."""
    kind = type(own).__name__
    if kind in ("DynamicLayer", "DynamicSlidingWindowLayer"):
        return RollbackLayer(capacity)
    if kind == "DynamicIndexedLayer":
        return IndexedLayer(capacity)
    if isinstance(own, LinearAttentionLayer) and isinstance(own, DynamicLayer):
        return HybridLayer(own.number_of_states, capacity)
    if isinstance(own, DynamicSlidingWindowLayer) and _states(own):  # keys of a window, and compressed ones before it
        own.sliding_window = WHOLE
        return own
    if kind not in OTHERS:
        raise NotImplementedError(f"layers of kind {kind} hold something that is not known here")
    return own
