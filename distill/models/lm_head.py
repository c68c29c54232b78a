"""The output head on gathered rows, so that logits are computed only where a loss needs them."""

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
"""Attributes of an MLP that is a mixture of experts, whose output depends on the family, and on all tokens."""


class LMHead(nn.Module):
    """Maps last hidden states of gathered rows to logits, as the model's own forward does.

    It applies a bias, a multiplier (Cohere), a divisor (Granite) and soft-capping (Gemma), and shares the model's
    weights.

    Attributes:
        trained: A weight whose copy is the last columns of the linear layer's, and which gets their gradient; the
            other columns are frozen. None: the layer's own weight gets it.
    """

    trained: Tensor | None = None

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        linear = model.get_output_embeddings()
        if linear is None:
            raise UserError(f"{type(model).__name__} has no output head: choose a causal language model")
        config = model.config.get_text_config()
        self.linear = linear
        self.scale = float(getattr(config, "logit_scale", None) or 1.0) / float(
            getattr(config, "logits_scaling", None) or 1.0
        )
        self.cap = getattr(config, "final_logit_softcapping", None)

    @classmethod
    def of(
        cls, linear: nn.Linear, scale: float = 1.0, cap: float | None = None, trained: Tensor | None = None
    ) -> LMHead:
        """Returns a head without a model."""
        head = cls.__new__(cls)
        nn.Module.__init__(head)
        head.linear, head.scale, head.cap = linear, scale, cap
        object.__setattr__(head, "trained", trained)  # a part of another module, not a parameter of this one
        return head

    def only(self, ids: Tensor | None) -> LMHead:
        """Returns the head of some ids, with a frozen copy of their weights. None: the head itself."""
        return self if ids is None else LMHead.of(some_outputs(self.linear, ids), self.scale, self.cap)

    @property
    def vocab(self) -> int:
        """Number of ids that have a logit."""
        return int(self.linear.weight.shape[0])

    def forward(self, hidden: Tensor) -> Tensor:
        """Returns logits ``[rows, vocab]`` of hidden states ``[rows, hidden]``."""
        return self.finish(self.linear(hidden))

    def first(self, hidden: Tensor, vocab: int) -> Tensor:
        """Returns the logits of the first ``vocab`` ids, ``[rows, vocab]``."""
        if vocab == self.vocab:
            return self(hidden)
        bias = self.linear.bias
        return self.finish(
            functional.linear(hidden, self.linear.weight[:vocab], None if bias is None else bias[:vocab])
        )

    def finish(self, products: Tensor) -> Tensor:
        """Applies multiplier and soft-capping to the linear layer's output."""
        logits = products if self.scale == 1.0 else products * self.scale
        return torch.tanh(logits / self.cap) * self.cap if self.cap else logits

    def slope(self, logits: Tensor) -> Tensor | float:
        """Returns the derivative of `finish` where it gave these logits: a number, or one per logit."""
        return self.scale * (1 - (logits / self.cap).square()) if self.cap else self.scale


def last_hidden(model: PreTrainedModel, input_ids: Tensor, mask: Tensor, positions: Tensor | None = None) -> Tensor:
    """Returns the last hidden states after the final norm, ``[rows, hidden]``, at the positions of a mask.

    Args:
        model: The model.
        input_ids: Token ids, ``[batch, time]``.
        mask: Positions of the rows, ``[batch, time]``.
        positions: Position ids, ``[batch, time]``, which restart at 0 where a row holds several texts, so that these do
            not attend to each other. None: one text per row.
    """
    rows = mask.flatten().nonzero()[:, 0]
    packed = {} if positions is None else {"position_ids": positions}
    with _last_mlp_at(model, rows, mask.shape):
        output = model.base_model(input_ids=input_ids, use_cache=False, **packed)
    hidden: Tensor = output.last_hidden_state.flatten(0, 1)
    return hidden.index_select(0, rows.to(hidden.device))  # the last layer may be on another device than the first


@contextmanager
def _last_mlp_at(model: PreTrainedModel, rows: Tensor, shape: torch.Size) -> Iterator[None]:
    """Restricts the last layer's MLP inside to some rows, since the output of the others is not used.

    This saves a tenth of forward and backward of a one-layer draft. Not changed are models whose last layer has no
    module ``mlp``, or one that is a mixture of experts; layers under gradient checkpointing, which recomputes them
    without the hooks; compiled ones, which new hooks at every step would compile again; and calls with other shapes.
    """
    try:
        layer = decoder_layers(model)[-1]
    except UserError:
        yield
        return
    mlp = getattr(layer, "mlp", None)
    recomputed = layer.training and getattr(layer, "gradient_checkpointing", False)
    fixed = recomputed or layer._compiled_call_impl is not None or any(hasattr(mlp, name) for name in MIXTURE)
    if fixed or not isinstance(mlp, nn.Module) or len(rows) in (0, shape.numel()):
        yield
        return
    entered: list[bool] = []

    def gather(_: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...]:
        entered.append(len(given) == 1 and given[0].ndim == 3 and given[0].shape[:2] == shape)
        return (given[0].flatten(0, 1).index_select(0, rows.to(given[0].device))[None],) if entered[-1] else given

    def scatter(_: nn.Module, __: tuple[Any, ...], made: Tensor) -> Tensor:
        if not entered.pop():
            return made
        whole = made.new_zeros(shape.numel(), made.shape[-1]).index_copy(0, rows.to(made.device), made[0])
        return whole.unflatten(0, shape)

    with mlp.register_forward_pre_hook(gather), mlp.register_forward_hook(scatter):
        yield


@torch.no_grad()
def check_head(model: PreTrainedModel, head: LMHead) -> None:
    """Checks that ``head(last_hidden)`` is what the model's own forward computes.

    Raises:
        UserError: Weights are NaN or infinite, or the architecture computes its logits in another way.
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
        advice = (
            f", as are its weights {broken}: use an earlier checkpoint" if broken else f" in {model.dtype}: use float32"
        )
        raise UserError(f"{type(model).__name__} computes logits that are NaN or infinite{advice}")
    tolerance = 1e-4 if model.dtype == torch.float32 else 5e-2
    off = (got - wanted).abs().max() / wanted.abs().max().clamp_min(1.0)
    if not off <= tolerance:
        raise UserError(
            f"{type(model).__name__} does not compute its logits as head(last hidden state) (relative difference "
            f"{off:.1e}), so it cannot be distilled; please report the model's name"
        )
