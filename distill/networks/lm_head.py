"""The output head on gathered rows, so that logits are computed only where a loss needs them."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel, masking_utils

from decode.errors import UserError
from decode.models.heads.eagle import finish_of, finished, some_outputs
from distill.networks.layers import probe_ids

IMPOSSIBLE = 40.0  # what logits of ids that are no candidates are lowered by, so that divergences stay finite


class LMHead(nn.Module):
    """Maps last hidden states of gathered rows to logits, as the model's own forward does.

    It applies a bias, a multiplier (Cohere), a divisor (Granite) and soft-capping (Gemma), and shares the model's
    weights.

    Attributes:
        linear: The output layer.
        markov: A second weight ``[vocab, rank]``, which is trained while the linear layer's is frozen. It multiplies
            the last ``rank`` numbers of hidden states, and the linear layer's weight those before. None: there is none.
        candidates: Number of the linear layer's best ids, to which alone the second weight's products are added, and
            which alone are drafted. 0: all ids.
    """

    markov: Tensor | None = None
    candidates = 0

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        linear = model.get_output_embeddings()
        if linear is None:
            raise UserError(f"{type(model).__name__} has no output head: choose a causal language model")
        self.linear = linear
        self.scale, self.cap = finish_of(model)

    @classmethod
    def of(
        cls, linear: nn.Linear, scale: float = 1.0, cap: float | None = None, markov: Tensor | None = None,
        candidates: int = 0,
    ) -> "LMHead":  # fmt: skip
        """Return a head without a model."""
        head = cls.__new__(cls)
        nn.Module.__init__(head)
        head.linear, head.scale, head.cap, head.candidates = linear, scale, cap, candidates
        object.__setattr__(head, "markov", markov)  # a parameter of another module, not of this one
        return head

    def only(self, ids: Tensor | None) -> "LMHead":
        """Return the head of some ids; of None, the head itself.

        It has a frozen copy of their weights, or of a head that is trained their rows, with a graph to the head.
        """
        if ids is None:
            return self
        linear = some_outputs(self.linear, ids)
        for name, values in self.linear.named_parameters():
            if values.requires_grad:
                delattr(linear, name)
                setattr(linear, name, values.index_select(0, ids))
        return LMHead.of(linear, self.scale, self.cap)

    @property
    def vocab(self) -> int:
        """Number of ids that have a logit."""
        return int(self.linear.weight.shape[0])

    def forward(self, hidden: Tensor, vocab: int | None = None) -> Tensor:
        """Return logits ``[rows, vocab]`` of the first ``vocab`` ids, for states ``[rows, width (+ Markov rank)]``."""
        return self.finish(self.products(hidden, vocab or self.vocab))

    def products(self, hidden: Tensor, vocab: int) -> Tensor:
        """Return the linear layer's output for the first ``vocab`` ids, with the Markov weight's added."""
        rank = 0 if self.markov is None else self.markov.shape[1]
        states, conditions = hidden.split([hidden.shape[-1] - rank, rank], -1)
        if vocab == self.vocab:
            products: Tensor = self.linear(states)  # by the module, which may have an adapter
        else:
            bias = None if self.linear.bias is None else self.linear.bias[:vocab]
            products = functional.linear(states, self.linear.weight[:vocab], bias)
        if self.markov is None:
            return products
        if not self.candidates:
            return products.addmm(conditions, self.markov[:vocab].T.to(products.dtype))
        best, kept = products.topk(min(self.candidates, vocab), -1)
        scores = best + (self.markov[kept].to(best.dtype) @ conditions[..., None])[..., 0]
        return (products - IMPOSSIBLE).scatter(1, kept, scores)

    def finish(self, products: Tensor) -> Tensor:
        """Apply multiplier and soft-capping to the linear layer's output."""
        return finished(products, self.scale, self.cap)


@contextmanager
def one_text_a_row(model: nn.Module, places: Tensor) -> Iterator[None]:
    """Within it, a model reads texts that begin their rows as where each is read alone.

    The rotations of LongRoPE and dynamic ropes do not depend on the longest text of a batch. transformers does not look
    for several texts in a row: its search lets the host wait for the device.

    Args:
        model: of any family.
        places: what is used of the output, among all positions of the batch: a text ends with its last one.
    """

    def alone(rope: Any, args: Any, more: Any, _: Any) -> Any:
        x, positions = chain(args, more.values())
        rows, parts = positions.expand(len(x), -1), []
        ends = rows[:, 0].scatter_reduce(0, places // rows.shape[1], rows.flatten()[places], "amax")
        for row in rows.minimum(ends[:, None]):
            rope.max_seq_len_cached = 0  # dynamic ropes keep the frequencies of the longest text so far
            parts.append(rope.forward(x[:1], row[None]))
        return tuple(map(torch.cat, zip(*parts)))

    with ExitStack() as undoing:
        for part in model.modules():
            if getattr(part, "rope_type", None) in ("longrope", "dynamic"):
                undoing.enter_context(part.register_forward_hook(alone, with_kwargs=True))
        search = masking_utils.find_packed_sequence_indices
        undoing.callback(setattr, masking_utils, "find_packed_sequence_indices", search)
        masking_utils.find_packed_sequence_indices = lambda position_ids: None
        yield


def last_hidden(model: PreTrainedModel, input_ids: Tensor, places: Tensor, **inputs: Tensor) -> Tensor:
    """Return the last hidden states after the final norm at some ``places [rows]`` among all of a batch's positions."""
    with one_text_a_row(model, places):
        hidden: Tensor = model.base_model(input_ids=input_ids, use_cache=False, **inputs).last_hidden_state
    return hidden.flatten(0, 1).index_select(0, places)


@torch.no_grad()
def check_head(model: PreTrainedModel, head: LMHead) -> None:
    """Check that ``head(last_hidden)`` is what the model's own forward computes.

    Raises:
        UserError: Weights are NaN or infinite, or the architecture computes its logits in another way.
    """
    was_training = model.training
    model.eval()
    ids = probe_ids(model)
    expected = model(input_ids=ids, use_cache=False).logits[0].float()
    hidden = last_hidden(model, ids, torch.arange(ids.numel(), device=ids.device))
    logits = head(hidden.to(head.linear.weight.device)).float().to(expected.device)
    model.train(was_training)
    if not torch.isfinite(expected).all():
        broken = next((name for name, weight in model.named_parameters() if not weight.isfinite().all()), None)
        cause = f", as are its weights {broken}: use an earlier checkpoint" if broken else ": use float32"
        raise UserError(f"{type(model).__name__} in {model.dtype} computes logits that are NaN or infinite{cause}")
    tolerance = 1e-4 if model.dtype == torch.float32 else 5e-2
    difference = (logits - expected).abs().max() / expected.abs().max().clamp_min(1.0)
    if not difference <= tolerance:
        raise UserError(
            f"{type(model).__name__} does not compute its logits as head(last hidden state) (relative difference "
            f"{difference:.1e}), so it cannot be distilled; please report the model's name"
        )
