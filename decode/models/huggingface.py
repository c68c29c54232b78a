"""Any Hugging Face causal language model through its own forward, over a cache that rolls back."""

import inspect
from collections import UserDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, cast

import torch
import torch.nn.functional as F
import transformers
from packaging.version import Version
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils._pytree import tree_map_only
from transformers import Cache as TransformersCache
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionLayer
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from decode.core.draft import Draft
from decode.files import Fields
from decode.models.api import Cache, Capture, Model, Out, Read

# -- the cache ---------------------------------------------------------------------------------------------------------

OTHERS = ("LinearAttentionLayer", "DummyLayer")
"""transformers' layers that are taken as they are, beside those that a layer of this module stands for."""
LEAST = 256  # positions that a layer has memory for at first
States = dict[str, dict[Any, Any]]  # of a layer beside its keys and values, by attribute and place
UNLIMITED = 1 << 60  # a window that is never full


class RollbackLayer(DynamicLayer):
    """transformers' growing layer over memory that is allocated in advance, so that appending copies nothing held.

    Sliding-window layers keep everything too: the mask hides what lies outside the window, so that any rollback stays
    possible. `keys`, `values` and the keys by which an indexer chooses among them are views ``[..., length, width]`` of
    the first positions of `memory`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.memory: Any = UserDict()  # by name; `_states` are dictionaries

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append, and return views of all that is held."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        return self._append("keys", key_states), self._append("values", value_states)

    def update_indexer(self, indexer_key_states: Tensor) -> Tensor:
        """The same of an indexer's keys."""
        return self._append("indexer_keys", indexer_key_states)

    def _append(self, name: str, states: Tensor) -> Tensor:
        memory = self.memory.get(name)
        start = 0 if memory is None else getattr(self, name).shape[-2]
        end = start + states.shape[-2]
        if memory is None or memory.shape[-2] < end:
            memory = states.new_empty(*states.shape[:-2], max(end, start + start // 4, LEAST), states.shape[-1])
            if start:
                memory[..., :start, :] = getattr(self, name)
            self.memory[name] = memory
        memory[..., start:end, :] = states
        held: Tensor = memory[..., :end, :]
        setattr(self, name, held)
        return held

    def keep(self, length: int) -> None:
        """Hold the first positions, also of what an interrupted forward has read in part."""
        for name in self.memory:
            setattr(self, name, getattr(self, name)[..., :length, :])


class HybridLayer(LinearAttentionLayer, RollbackLayer):
    """A layer that has keys and values beside a state."""

    is_compileable = False

    def __init__(self, states: int) -> None:
        RollbackLayer.__init__(self)
        LinearAttentionLayer.__init__(self, number_of_states=states)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Of keys and values, which come without names, or of states, which have some."""
        (RollbackLayer if args else LinearAttentionLayer).lazy_initialization(self, *args, **kwargs)


class RollbackCache(TransformersCache, Cache):
    """A cache of which any rollback is possible; its layers hold keys and values, a state, both, or nothing.

    Keys and values are cut. A recurrent or convolutional state cannot be: it is saved before tokens are read that may
    be rejected, a rollback restores it, and accepted tokens are read again with the next input. So a rejection costs
    the reading of the accepted tokens, not another forward.

    Attributes:
        length: positions held; an interrupted forward may have left more in some layers.
        read: positions whose keys, values and states the layers hold; fewer than `length` after some rollbacks.
        recurrent: layers with a state.

    Raises:
        NotImplementedError: layers that are not known here.
    """

    def __init__(self, config: Any) -> None:
        TransformersCache.__init__(self, layers=list(map(_rolling, DynamicCache(config=config).layers)))
        self.recurrent = [layer for layer in self.layers if _states(layer)]
        self.length = self.read = self._saved_at = 0
        self._ids, self._saved = torch.empty(0, dtype=torch.long), list[States]()

    @property
    def unread(self) -> Tensor:
        """Tokens that a rollback left to be read again, ``[n]``."""
        return self._ids[self.read : self.length]

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
            self._saved = [_copied(_states(layer)) for layer in self.recurrent]

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
        """Restore the saved states, or none if they are of a position after `length`; the rest is `unread`."""
        if length < self._saved_at:
            self._saved_at = 0
        self.read = self._saved_at
        for i, layer in enumerate(self.recurrent):
            if self.read:
                vars(layer).update(_copied(self._saved[i]))
            else:
                layer.reset()
        self._crop(self.read)

    def _crop(self, length: int) -> None:
        for layer in self.layers:
            if isinstance(layer, RollbackLayer):
                layer.keep(length)
            elif isinstance(layer, DynamicLayer) and layer.get_seq_length() > length:
                layer.crop(length - layer.get_seq_length())

    def gather(self, base: int, slots: list[int]) -> None:
        """See `Cache.gather`."""
        index = torch.tensor(slots)
        for layer in self.layers:
            for states in layer.memory.values() if isinstance(layer, RollbackLayer) else ():
                index = index.to(states.device)  # layers may stand on several devices
                states[..., base : base + len(slots), :] = states.index_select(-2, index)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Positions held in a layer; in one without keys, those that were read."""
        layer = self.layers[layer_idx]
        return int(layer.get_seq_length()) if isinstance(layer, DynamicLayer) else self.read

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Keys of a forward over `query_length` tokens, and the first one's position."""
        return self.get_seq_length(layer_idx) + query_length, 0


def _states(layer: Any) -> States:
    """The states of a layer beside keys and values, which transformers keeps in dictionaries."""
    return {name: value for name, value in vars(layer).items() if isinstance(value, dict)}


def _copied(states: States) -> States:
    """A copy: some layers change their states in place, others replace them."""
    return cast(States, tree_map_only(Tensor, torch.clone, states))


def _rolling(layer: Any) -> Any:
    """The layer that rolls back in place of one that transformers would make."""
    kind = type(layer).__name__
    if kind in ("DynamicLayer", "DynamicSlidingWindowLayer", "DynamicIndexedLayer"):
        return RollbackLayer()
    if isinstance(layer, LinearAttentionLayer) and isinstance(layer, DynamicLayer):
        return HybridLayer(layer.number_of_states)
    if isinstance(layer, DynamicSlidingWindowLayer) and _states(layer):  # a window's keys, and earlier ones compressed
        layer.sliding_window = UNLIMITED
        return layer
    if kind not in OTHERS:
        raise NotImplementedError(f"layers of kind {kind} hold something that is not known here")
    return layer


# -- trees -------------------------------------------------------------------------------------------------------------

IMPLEMENTATIONS = ("sdpa", "eager")  # attention implementations that take any mask
RECURRENT = "it keeps a recurrent state, which is that of one branch"

_SEEN: ContextVar[tuple[Tensor, Tensor] | None] = ContextVar("seen", default=None)
"""Of this thread's forward over tokens that are no chain: the arguments of `attending`."""


@contextmanager
def attending(allowed: Tensor, positions: Tensor) -> Iterator[None]:
    """Within it, tokens of this thread's forwards see those that the family's masks and `allowed` let them see.

    Args:
        allowed: bool, of the tokens that are read among all  # [batch or 1, 1, n, past + n]
        positions: of all tokens  # [batch or 1, past + n]
    """
    before = _SEEN.set((allowed, positions))
    try:
        yield
    finally:
        _SEEN.reset(before)


def masks_of_tree(tree: Draft, past: int, device: torch.device) -> AbstractContextManager[None]:
    """Within it, masks of this thread are those of a pending token and a tree that follow `past` tokens."""
    allowed = F.pad(tree.visible(), (past, 0), value=True).to(device)[None, None]
    positions = torch.cat([torch.arange(past), past + torch.tensor([0, *tree.depths()])]).to(device)
    return attending(allowed, positions[None])


def _reading_trees(implementation: str) -> Callable[..., Any]:
    """transformers' function that makes masks, which makes those of trees and masked slots within `attending`."""
    plain = ALL_MASK_ATTENTION_FUNCTIONS[implementation]

    def masks(**given: Any) -> Any:
        if (tokens := _SEEN.get()) is None:
            return plain(**given)
        allowed, positions = tokens
        zero = torch.zeros(1, 1, 1, 1, dtype=torch.long, device=allowed.device)
        queries, keys = positions[:, None, -allowed.shape[2] :, None], positions[:, None, None]
        seen = given["mask_function"](zero, zero, queries, keys) & allowed  # the family's windows and chunks
        if implementation == "sdpa":
            return seen
        dtype = given.get("dtype", torch.float32)
        return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, torch.finfo(dtype).min)

    return masks


for _name in IMPLEMENTATIONS:
    ALL_MASK_ATTENTION_FUNCTIONS[_name] = _reading_trees(_name)


def tree_refusal(config: PreTrainedConfig, arguments: set[str]) -> str:
    """Why trees cannot be read, as far as the configuration says; empty if they can."""
    implementation = getattr(config, "_attn_implementation", None)
    if implementation not in IMPLEMENTATIONS:
        return f"its attention implementation {implementation} takes no tree mask; load it with sdpa or eager"
    if "position_ids" not in arguments or getattr(config, "alibi", False):
        return "it takes a token's position from its place in the cache (no position_ids)"
    if getattr(config, "attn_temperature_tuning", False):
        return "it scales attention by a token's place in the cache (attn_temperature_tuning)"
    window = getattr(config, "window_size", None)
    if isinstance(window, int) and "local" in str(getattr(config, "attention_layers", "")):
        return f"its local attention (window_size {window}) counts places in the cache, not positions"
    return ""


# -- masked slots ------------------------------------------------------------------------------------------------------
# A language model drafts several tokens in one forward: mask tokens stand for those before them (PARD, 2504.18583).
# Slot 0 of a draft is the text's last token, slot i the i-th mask token behind it. Each slot gives the distribution of
# the token that follows it, which does not depend on the tokens that are drawn in the slots before.


def mask_of(draft: Any) -> int | None:
    """The id of the mask token of a draft, opened or as it was loaded; None: it drafts a token in each forward."""
    token: int | None = getattr(getattr(getattr(draft, "model", draft), "config", None), "pard_token", None)
    return token


def slots_of(lengths: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The layout of texts whose tokens are each followed by a draft of so many slots, ``[texts, time]``, on the host.

    Returns:
        Of each token and of each masked slot behind the text the last token before its draft (of a token itself, of
        what fills up ``time``) and its place in the draft, both ``[texts, width]``; and where the slots are among all
        of these, ordered by their place.
    """
    drafts = [(torch.arange(int(row.max()))[:, None] + 1 < row).nonzero() for row in lengths]
    time, columns = lengths.shape[1], [[draft[:, i] for draft in drafts] for i in (0, 1)]
    starts = pad_sequence(columns[1], batch_first=True, padding_value=time)
    begin = torch.cat([torch.arange(time).expand(len(lengths), -1), starts], 1)
    place = F.pad(pad_sequence(columns[0], batch_first=True) + 1, (time, 0))
    there = (F.pad(lengths, (0, 1)).gather(1, begin) > place).flatten().nonzero()[:, 0]
    return begin, place, there[place.flatten()[there].argsort(stable=True)]


@contextmanager
def masked(tokens: Tensor, begin: Tensor, place: Tensor, mask: int | None) -> Iterator[dict[str, Tensor]]:
    """Within it, a model's forward with the inputs that are given reads texts, and behind them masked slots of drafts.

    A slot sees the text up to the last token before its draft, and the slots of its draft up to itself.

    Args:
        tokens: of the texts  # [batch, time]
        begin: see `slots_of`.
        place: the same.
        mask: id of the mask token.
    """
    query, key, time = begin[:, :, None], begin[:, None], tokens.shape[1]
    allowed = ((place == 0)[:, None] & (key <= query)) | (key == query)  # attention is causal by position besides
    positions = (begin + place).clamp_max(time - 1)  # what follows a text's end is not asked for
    with attending(allowed[:, None], positions):
        yield {"input_ids": F.pad(tokens, (0, begin.shape[1] - time), value=mask), "position_ids": positions}


# -- the model ---------------------------------------------------------------------------------------------------------

CACHES = ("past_key_values", "cache_params")  # arguments of forwards that take what is kept between them
AGAIN = 8  # more tokens to be read again have a forward of their own; states are copied after so many at the latest


class HuggingFaceRunner(Model):
    """Calls the model as it is; `decode.models.fast.forward.FastRunner` does the same with less overhead.

    The weights are the model's own, so changes to them are seen.

    Raises:
        NotImplementedError: see `RollbackCache`.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.config = model.config.get_text_config()
        super().__init__(**facts_of(model))
        self._arguments = arguments_of(model)
        self._cache_argument = cache_argument(model)
        self.recurrent = bool(self.new_cache().recurrent)
        self.tree_refusal = RECURRENT if self.recurrent else tree_refusal(self.config, self._arguments)

    def new_cache(self) -> RollbackCache:
        """See `Model.new_cache`."""
        return RollbackCache(self.config)

    def _read(self, read: Read, capture: Capture, last: int | None) -> Out:
        if len(read.cache.unread) > AGAIN:
            self._append(Read(read.cache, read.tokens[:0]), (), 1)
        return self._append(read, capture, last)

    def _append(self, read: Read, capture: Capture, last: int | None) -> Out:
        """Read the unread tokens and these; the output has rows of these."""
        cache, tokens, tree = read.cache, read.tokens, read.tree
        n, past, rows = len(tokens), cache.read, len(tokens) if last is None else last
        cache.begin(tokens)
        feed = torch.cat([cache.unread, tokens]) if past < cache.length else tokens
        extra = {"use_cache": True, "output_hidden_states": states_of(capture), self._cache_argument: cache}
        if "logits_to_keep" in self._arguments:
            extra["logits_to_keep"] = max(1, rows)
        if "position_ids" in self._arguments:
            depths = torch.arange(len(feed)) if tree is None else torch.tensor([0, *tree.depths()])
            extra["position_ids"] = (past + depths).to(self.device)[None]
        head_inputs = []
        reading = self.model.get_output_embeddings().register_forward_pre_hook(
            lambda module, inputs: head_inputs.append(inputs[0][0])
        )
        try:
            with reading, nullcontext() if tree is None else masks_of_tree(tree, past, self.device):
                out = self.model(input_ids=feed[None], **extra)
        except BaseException:
            if self.recurrent:  # some layers have read the tokens, some have not
                cache.rewind(cache.length)
            raise
        cache.end(tokens)
        if last is not None and len(feed) > AGAIN:  # a prompt, not a draft that may be rejected
            cache.save()
        logits, (hidden,) = out.logits[0], head_inputs
        captured = torch.cat([out.hidden_states[i][0] for i in capture], -1)[-n:] if capture else None
        return Out(logits[len(logits) - rows :], hidden[len(hidden) - rows :], captured)


def facts_of(model: PreTrainedModel) -> Fields:
    """What every `Model` of a model is constructed with."""
    config = model.config.get_text_config()
    embedding = model.get_input_embeddings()
    head = model.get_output_embeddings()
    # reading one token takes all weights but the embedding, of which a row
    unread = 0 if embedding.weight is head.weight else embedding.weight.nbytes
    cached = 0
    for layer in config.per_layer_config:  # which may differ, as in Gemma 4
        heads = getattr(layer, "num_attention_heads", 0)
        groups = getattr(layer, "num_key_value_heads", None) or heads
        cached += groups * (getattr(layer, "head_dim", None) or layer.hidden_size // max(1, heads))
    return {
        "model": model,
        "name": f"{type(model).__name__} ({model.config.model_type})",
        "device": embedding.weight.device,
        "dtype": model.dtype,
        "vocab_size": len(head.weight),
        "limit": context_of(config),
        "boundary": next(
            (
                each["original_max_position_embeddings"]
                for each in rotations(config)
                if each.get("rope_type") == "longrope"
            ),
            0,
        ),
        "weight_bytes": sum(p.nbytes for p in model.parameters()) - unread,
        "cache_bytes_per_token": 2 * cached * model.dtype.itemsize,
    }


REASONS = {
    "dynamic": " (behind them its rope_type dynamic rotates all keys anew with each token, which is not done here)",
    "longrope": " (where the prompt is longer than original_max_position_embeddings, and that many otherwise, since "
    "behind them its rope_type longrope rotates all keys anew, which is not done here)",
}
"""By `rope_type` why a text ends where transformers goes on: a forward rotates by its largest position."""


class Context(int):
    """A number of positions, which messages show with the reason why texts end there."""

    reason = ""

    def __str__(self) -> str:
        return f"{int(self)}{self.reason}"


def context_of(config: Any) -> Context:
    """The most positions that a language model of this configuration reads."""
    limit = Context(
        getattr(config, "max_position_embeddings", 0)
        or getattr(config, "max_seq_len", 0)  # MPT
        or 1 << 30
    )
    limit.reason = REASONS.get(rotations(config)[0].get("rope_type", ""), "")
    return limit


def rotations(config: Any) -> list[Fields]:
    """The settings of a model's rotation, or of the one of each kind of layers."""
    rope = getattr(config, "rope_parameters", None) or {}
    return [value for value in rope.values() if isinstance(value, dict)] or [rope]


def arguments_of(model: PreTrainedModel) -> set[str]:
    """The named arguments that a model's forward takes; of an adapted model (peft), the adapted one's."""
    adapted = model if isinstance(model, PreTrainedModel) else model.get_base_model()
    return set(inspect.signature(adapted.forward).parameters)


def cache_argument(model: PreTrainedModel) -> str:
    """The argument of a model's forward that takes its cache."""
    return next(name for name in CACHES if name in arguments_of(model))


def states_of(layers: Iterable[int]) -> list[int] | bool:
    """The argument ``output_hidden_states`` that keeps these states: of them alone, or before transformers 5.23 all."""
    wanted = sorted(layers)
    return bool(wanted) and (Version(transformers.__version__) < Version("5.23") or wanted)


def last_logits(model: PreTrainedModel, count: int, **inputs: Any) -> Any:
    """The output of a model, its logits ``[batch, count, vocab]`` those of the last positions.

    Only a model that names `logits_to_keep` among its arguments computes no others.
    """
    keep = {"logits_to_keep": count} if "logits_to_keep" in arguments_of(model) else {}
    out = model(**inputs, **keep)
    out.logits = out.logits[:, -count:]
    return out
