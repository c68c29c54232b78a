"""Hidden states to logits at label positions only: no logits that no loss needs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from decode.errors import UserError
from decode.models.families import decoder_layers
from decode.models.heads import some_outputs

MIXTURE = "experts", "gate", "router"
"""Parts of an MLP that is a mixture of experts: what it returns depends on the family, and on all tokens."""


class LMHead(nn.Module):
    """Last hidden states to logits, for rows gathered beforehand, as the model's own forward does it.

    Honours a bias, a multiplier (Cohere), a divisor (Granite) and soft-capping (Gemma). Shares the model's weights.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        linear = model.get_output_embeddings()
        if linear is None:
            raise UserError(f"{type(model).__name__} has no output head, so it is no causal language model: choose one")
        config = model.config.get_text_config()
        self.linear = linear
        self.scale = float(getattr(config, "logit_scale", None) or 1.0) / float(
            getattr(config, "logits_scaling", None) or 1.0
        )
        self.cap = getattr(config, "final_logit_softcapping", None)

    @classmethod
    def of(cls, linear: nn.Linear, scale: float = 1.0, cap: float | None = None) -> LMHead:
        """A head without a model."""
        head = cls.__new__(cls)
        nn.Module.__init__(head)
        head.linear, head.scale, head.cap = linear, scale, cap
        return head

    def only(self, ids: Tensor | None) -> LMHead:
        """The head of these ids only, with a copy of their weights, frozen; of None itself."""
        return self if ids is None else LMHead.of(some_outputs(self.linear, ids), self.scale, self.cap)

    @property
    def vocab(self) -> int:
        """Ids that have a logit."""
        return int(self.linear.weight.shape[0])

    def forward(self, hidden: Tensor) -> Tensor:
        """``[rows, hidden] -> [rows, vocab]``."""
        return self.finish(self.linear(hidden))

    def first(self, hidden: Tensor, vocab: int) -> Tensor:
        """The logits of the first ``vocab`` ids only, ``[rows, vocab]``."""
        if vocab == self.vocab:
            return self(hidden)
        bias = self.linear.bias
        return self.finish(
            functional.linear(hidden, self.linear.weight[:vocab], None if bias is None else bias[:vocab])
        )

    def finish(self, products: Tensor) -> Tensor:
        """Multiplier and soft-capping, on the linear layer's output."""
        logits = products if self.scale == 1.0 else products * self.scale
        return torch.tanh(logits / self.cap) * self.cap if self.cap else logits

    def slope(self, logits: Tensor) -> Tensor | float:
        """Derivative of `finish` where it gave these logits: one number, or as many."""
        return self.scale * (1 - (logits / self.cap).square()) if self.cap else self.scale


def last_hidden(model: PreTrainedModel, input_ids: Tensor, mask: Tensor, positions: Tensor | None = None) -> Tensor:
    """Last hidden states, after the final norm, at the positions ``mask [batch, time]``: ``[rows, hidden]``.

    ``positions [batch, time]`` begin anew where a row holds several texts, which then do not see each other.
    """
    rows = mask.flatten().nonzero()[:, 0]
    packed = {} if positions is None else {"position_ids": positions}
    with _last_mlp_at(model, rows, mask.shape):
        output = model.base_model(input_ids=input_ids, use_cache=False, **packed)
    hidden: Tensor = output.last_hidden_state.flatten(0, 1)
    return hidden.index_select(0, rows.to(hidden.device))  # the last layer may be on another device than the first


@contextmanager
def _last_mlp_at(model: PreTrainedModel, rows: Tensor, shape: torch.Size) -> Iterator[None]:
    """Inside, the last layer's MLP works on these rows alone: nothing reads what it would make of the others.

    On a one-layer draft that saves a tenth of forward and backward. Models whose layers have no module ``mlp``, and
    calls with other shapes, go on as they are.
    """
    mlp = _last_mlp(model)
    if mlp is None or len(rows) in (0, shape.numel()):
        yield
        return
    entered: list[bool] = []

    def gather(_: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...]:
        entered.append(len(given) == 1 and given[0].ndim == 3 and given[0].shape[:2] == shape)
        return (given[0].flatten(0, 1).index_select(0, rows.to(given[0].device))[None],) if entered[-1] else given

    def scatter(_: nn.Module, __: tuple[Any, ...], made: Tensor) -> Tensor:
        if not entered.pop():
            return made
        return (
            made.new_zeros(shape.numel(), made.shape[-1])
            .index_copy(0, rows.to(made.device), made[0])
            .unflatten(0, shape)
        )

    hooks = mlp.register_forward_pre_hook(gather), mlp.register_forward_hook(scatter)
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _last_mlp(model: PreTrainedModel) -> nn.Module | None:
    """The MLP of the last layer, where the family calls it so and it is no mixture of experts."""
    try:
        layer = decoder_layers(model)[-1]
    except UserError:
        return None
    if layer.training and getattr(layer, "gradient_checkpointing", False):
        return None  # it would be computed again without the hooks
    if layer._compiled_call_impl is not None:
        return None  # new hooks every step would have it compiled anew
    mlp = getattr(layer, "mlp", None)
    return mlp if isinstance(mlp, nn.Module) and not any(hasattr(mlp, name) for name in MIXTURE) else None


@torch.no_grad()
def check_head(model: PreTrainedModel, head: LMHead) -> None:
    """Make sure that ``head(last_hidden)`` is what the model's own forward computes.

    Raises:
        UserError: weights that are not numbers, or an architecture whose logits come from somewhere else too.
    """
    was_training = model.training
    model.eval()
    vocab = model.get_input_embeddings().num_embeddings
    ids = (torch.arange(8, device=model.device) * 7 % vocab)[None]
    wanted = model(input_ids=ids, use_cache=False).logits[0].float()
    hidden = last_hidden(model, ids, torch.ones_like(ids, dtype=torch.bool))
    got = head(hidden.to(head.linear.weight.device)).float().to(wanted.device)
    model.train(was_training)
    if not torch.isfinite(wanted).all():
        broken = next((name for name, weight in model.named_parameters() if not weight.isfinite().all()), None)
        raise UserError(
            f"{type(model).__name__} computes logits that are NaN or infinite"
            + (f", since its weights {broken} hold such numbers; take a checkpoint from before" if broken else "")
            + ("" if broken else f" in {model.dtype}; choose float32")
        )
    tolerance = 1e-4 if model.dtype == torch.float32 else 5e-2
    off = (got - wanted).abs().max() / wanted.abs().max().clamp_min(1.0)
    if not off <= tolerance:
        raise UserError(
            f"{type(model).__name__} does not compute its logits as head(last hidden state) (relative difference "
            f"{off:.1e}), so it cannot be distilled here; please report the model's name"
        )
