"""Any Hugging Face causal language model through its own forward, over a cache that rolls back."""

import inspect
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import psutil
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from decode.draft import Draft
from decode.models.rollback_cache import RollbackCache
from decode.models.runner import Output, Runner, WrappedRunner, joined

IMPLEMENTATIONS = ("sdpa", "eager")  # attention implementations that take any mask
CACHES = ("past_key_values", "cache_params", "state")  # arguments of forwards that take what is kept between them
RECURRENT = "it keeps a recurrent state, which is that of one branch"
OWN = "its forward takes no cache but its own, which is that of one branch"
AGAIN = 8  # more tokens to be read again have a forward of their own; states are copied after so many at the latest


@contextmanager
def masks_of_tree(tree: Draft, past: int, config: Any, device: torch.device) -> Iterator[None]:
    """Within it, transformers makes the masks of a forward over a pending token and a tree that follow `past` tokens.

    Not for threads that call other models meanwhile.
    """
    implementation = config._attn_implementation
    allowed = F.pad(tree.visible(), (past, 0), value=True).to(device)[None, None]
    position = torch.cat([torch.arange(past), past + torch.tensor([0, *tree.depths()])]).to(device)
    one = torch.zeros(1, 1, 1, 1, dtype=torch.long, device=device)

    def make(*, mask_function: Callable[..., Tensor], dtype: torch.dtype = torch.float32, **_: Any) -> Tensor:
        seen = mask_function(one, one, position[past:].view(1, 1, -1, 1), position.view(1, 1, 1, -1)) & allowed
        if implementation == "sdpa":
            return seen
        return torch.zeros(seen.shape, dtype=dtype, device=device).masked_fill_(~seen, torch.finfo(dtype).min)

    ALL_MASK_ATTENTION_FUNCTIONS[implementation] = make
    try:
        yield
    finally:
        del ALL_MASK_ATTENTION_FUNCTIONS[implementation]


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


class HuggingFaceRunner(Runner):
    """Calls the model as it is; `decode.models.fast_runner.FastRunner` does the same with less overhead.

    The weights are the model's own, so changes to them are seen.

    Attributes:
        stepwise: read one token at a time once there is a state, as models do need whose scan of several tokens begins
            without one (Mamba's first version).
        own_state: its forward takes no cache but one that it has made (RWKV, xLSTM, MiniMax).
    """

    stepwise = own_state = False

    def __init__(self, model: PreTrainedModel) -> None:
        self.config: Any = model.config.get_text_config()
        numbers = 0  # of a position in the cache, as far as the configuration says
        for layer in self.config.per_layer_config:  # which may differ, as in Gemma 4
            heads = getattr(layer, "num_attention_heads", 0)
            groups = getattr(layer, "num_key_value_heads", None) or heads
            numbers += groups * (getattr(layer, "head_dim", None) or layer.hidden_size // max(1, heads))
        super().__init__(**facts_of(model), cache_bytes_per_token=2 * numbers * model.dtype.itemsize)
        self._capacity, self._arguments = 256, arguments_of(model)
        self._cache_argument = next(name for name in CACHES if name in self._arguments)
        self.recurrent = bool(self.new_cache().recurrent)
        self.tree_refusal = RECURRENT if self.recurrent else tree_refusal(self.config, self._arguments)

    def use_own_state(self) -> None:
        """Pass what the model's own forward makes, and copy it whole."""
        self.own_state, self.recurrent, self.tree_refusal = True, True, OWN

    def new_cache(self) -> RollbackCache:
        """See `Runner.new_cache`."""
        return RollbackCache(self.config, self._capacity, own=self.own_state)

    def reserve(self, *, rows: int = 0, capacity: int = 0) -> None:
        """See `Runner.reserve`; it serves the caches opened from then on."""
        self._capacity = max(self._capacity, capacity)

    def _read(
        self, cache: RollbackCache, tokens: Tensor, tree: Draft | None, capture: tuple[int, ...], last: int | None
    ) -> Output:
        if len(cache.unread) > AGAIN:
            self._append(cache, tokens[:0], None, (), 1)
        return self._append(cache, tokens, tree, capture, last)

    def _append(
        self, cache: RollbackCache, tokens: Tensor, tree: Draft | None, capture: tuple[int, ...], last: int | None
    ) -> Output:
        """Read the unread tokens and these; the output has rows of these."""
        n, past, rows = len(tokens), cache.read, len(tokens) if last is None else last
        extra: dict[str, Any] = {"use_cache": True, "output_hidden_states": bool(capture)}
        if "logits_to_keep" in self._arguments:
            extra["logits_to_keep"] = max(1, rows)
        cache.begin(tokens)
        feed = torch.cat([cache.unread, tokens]) if past < cache.length else tokens
        depths = torch.arange(len(feed)) if tree is None else torch.tensor([0, *tree.depths()])
        position = past + depths.to(self.device)
        steps = [slice(i, i + 1) for i in range(len(feed))] if self.stepwise and past else [slice(None)]
        head_inputs: list[Tensor] = []
        # the states that the head reads, without asking the model to keep those of every layer
        hook = self.model.get_output_embeddings().register_forward_pre_hook(
            lambda module, inputs: head_inputs.append(inputs[0])
        )
        outputs = []
        try:
            with nullcontext() if tree is None else masks_of_tree(tree, past, self.config, self.device):
                for step in steps:
                    if "position_ids" in self._arguments:
                        extra["position_ids"] = position[step][None]
                    extra[self._cache_argument] = cache.passed
                    outputs.append(self.model(input_ids=feed[step][None], **extra))
                    cache.passed = outputs[-1].get(self._cache_argument)
        except BaseException:
            if self.recurrent:  # some layers have read the tokens, some have not
                cache.rewind(cache.length)
            raise
        finally:
            hook.remove()
        cache.end(tokens)
        if last is not None and len(feed) > AGAIN:  # a prompt, not a draft that may be rejected
            cache.save()
        logits, hidden = joined([out.logits[0] for out in outputs]), joined([states[0] for states in head_inputs])
        captured = None
        if capture:
            states = [joined([out.hidden_states[layer][0] for out in outputs]) for layer in capture]
            captured = joined(states, -1)[-n:]
        return Output(logits[len(logits) - rows :], hidden[len(hidden) - rows :], captured)


def facts_of(model: PreTrainedModel) -> dict[str, Any]:
    """What every `Runner` of a model is constructed with."""
    config: Any = model.config.get_text_config()
    embedding: Any = model.get_input_embeddings()
    head: Any = model.get_output_embeddings()
    weights = {id(p): p for p in model.parameters()}
    if embedding.weight is not head.weight:  # reading one token takes all weights but the embedding, of which a row
        weights.pop(id(embedding.weight), None)
    return {
        "model": model,
        "name": f"{type(model).__name__} ({model.config.model_type})",
        "device": embedding.weight.device,
        "dtype": model.dtype,
        "vocab_size": len(head.weight),
        "limit": getattr(config, "max_position_embeddings", 0) or 1 << 30,
        "weight_bytes": sum(p.numel() * p.element_size() for p in weights.values()),
    }


def arguments_of(model: PreTrainedModel) -> set[str]:
    """The named arguments that a model's forward takes; of an adapted model (peft), the adapted one's."""
    adapted: Any = model if isinstance(model, PreTrainedModel) else model.get_base_model()
    return set(inspect.signature(adapted.forward).parameters)


def last_logits(model: PreTrainedModel, count: int, **inputs: Any) -> Any:
    """The output of a model, its logits ``[batch, count, vocab]`` those of the last positions.

    Only a model that names `logits_to_keep` among its arguments computes no others.
    """
    keep = {"logits_to_keep": count} if "logits_to_keep" in arguments_of(model) else {}
    out = model(**inputs, **keep)
    out.logits = out.logits[:, -count:]
    return out


def longrope_boundary(config: Any) -> int | None:
    """Tokens up to which the short factors serve, or None for models without longrope or without longer texts."""
    rope: Any = getattr(config, "rope_parameters", None) or {}
    for one in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        if one.get("rope_type") == "longrope":
            own = getattr(config, "original_max_position_embeddings", None)
            short = one.get("original_max_position_embeddings") or own or 0
            return short if 0 < short < config.max_position_embeddings else None
    return None


class LongRopeRunner(WrappedRunner):
    """A runner whose caches always hold keys of one rotation, that of the sequence's length.

    A cache has two more attributes: `ids`, the tokens that a change of rotation reads again, and `long`.
    """

    def __init__(self, inner: Runner, boundary: int) -> None:
        super().__init__(inner, f"its rotation changes at {boundary} tokens (longrope)")
        self.boundary = boundary

    def new_cache(self) -> Any:
        """See `Runner.new_cache`."""
        cache = self.inner.new_cache()
        cache.ids, cache.long = torch.empty(0, dtype=torch.long, device=self.device), False
        return cache

    def _read(
        self, cache: Any, tokens: Tensor, tree: Draft | None, capture: tuple[int, ...], last: int | None
    ) -> Output:
        """Tokens on both sides of the boundary each get the logits of their own rotation."""
        assert tree is None, self.tree_refusal
        start, n = cache.length, len(tokens)
        short = self.boundary - start
        if 0 < short < n and (last is None or last > n - short or capture):
            before, after = (None, None) if last is None else (max(0, last - (n - short)), min(last, n - short))
            first = self._read(cache, tokens[:short], None, capture, before)
            return Output.join([first, self._read(cache, tokens[short:], None, capture, after)])
        cache.ids = torch.cat([cache.ids[:start], tokens])
        long = start + n > self.boundary
        changed = start and long != cache.long
        if changed:  # all keys are computed again, in one forward: the last position decides its rotation
            cache.truncate(0)
            tokens, last = cache.ids, n if last is None else last
        cache.long = long
        out = self.inner.forward([cache], [tokens], capture=capture, last=last)
        if changed and out.captured is not None:
            out.captured = out.captured[-n:]
        return out


GROWTH = 2.5  # memory that caches take for a moment while they grow, in caches


def rows_that_fit(
    device: torch.device, bytes_per_token: int, lengths: Sequence[int], batch_size: int | None = None
) -> int:
    """How many texts to have at once: as many as asked for, unless memory holds fewer, which a warning says.

    Args:
        device: that holds the caches.
        bytes_per_token: of the caches; 0 where that is unknown.
        lengths: tokens of the texts.
        batch_size: texts asked for; None: all.
    """
    longest, wanted = max(lengths, default=1), max(1, min(batch_size or len(lengths), len(lengths)))
    most = free_memory(device) / (GROWTH * longest * max(1, bytes_per_token))
    if most >= wanted:
        return wanted
    rows = max(1, int(most))
    warnings.warn(
        f"memory holds {rows} texts of {longest} tokens; writing {rows} instead of {wanted} at once", stacklevel=3
    )
    return rows


def free_memory(device: torch.device) -> float:
    """Bytes that can still be allocated on a device."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return float(psutil.virtual_memory().available)
