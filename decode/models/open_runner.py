"""From a model to its runner: which forward serves it, checked once against the model's own before it is trusted."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor
from torch._dynamo.exc import TorchDynamoException
from transformers import PreTrainedModel

from decode.core.errors import UserError
from decode.core.runner import Runner
from decode.models.compiled import check_compile
from decode.models.eagle.head import FeatureHead
from decode.models.eagle.runner import HeadRunner
from decode.models.fast import fast_runner, supports
from decode.models.fast_weights import FAMILIES
from decode.models.foreign import DraftModel, ForeignDraft, ForeignRunner
from decode.models.huggingface import HuggingFaceRunner

LARGEST = {torch.float64: 1e-9, torch.float32: 1e-3}
"""Largest `difference` of a runner's logits from the model's own; 0.1 in 16 bits."""


def open_runner(model: PreTrainedModel, *, fast: bool = True, compile: str = "none") -> Runner:
    """The fastest runner that gives this model's own results.

    A hand-written forward is used for the families it knows, after it has reproduced the model's logits on a few
    tokens; everything else (other families, quantised weights, models spread over devices) goes through the
    ordinary model call. Once the weights have changed, open the model anew.

    Args:
        model: a causal language model.
        fast: use the hand-written forward where it can be.
        compile: send it through torch.compile (a mode of `decode.models.compiled.MODES`).

    Raises:
        UserError: logits that are not finite, or a model that cannot be compiled.
    """
    if compile != "none":
        return _open_compiled(model, compile)
    if fast and supports(model):
        runner = fast_runner(model)
        gap = difference(model, runner)
        if gap < LARGEST.get(model.dtype, 0.1):
            return runner
        warnings.warn(
            f"the fast forward differs from {type(model).__name__} by {gap:.2g} in its logits; "
            "using the ordinary model call",
            stacklevel=2,
        )
    return HuggingFaceRunner(model)


def open_draft_runner(draft: DraftModel, target: PreTrainedModel, compile: str = "none") -> Runner:
    """The runner of a draft model, of one of another vocabulary, or of a feature head (never compiled) over its target.

    Args:
        draft: what drafts.
        target: the model it drafts for.
        compile: see `open_runner`.
    """
    if isinstance(draft, FeatureHead):
        return HeadRunner(draft, target)
    if isinstance(draft, ForeignDraft):
        return ForeignRunner(open_runner(draft.model, compile=compile), draft.vocabulary)
    return open_runner(draft, compile=compile)


def _open_compiled(model: PreTrainedModel, mode: str) -> Runner:
    """A runner that compiles, after it has reproduced the model's logits on a few tokens."""
    name = f"{type(model).__name__} ({model.config.model_type})"
    if not supports(model):
        raise UserError(
            f"{name} cannot be compiled here: only {', '.join(FAMILIES)} on one device, with plain weights; leave "
            "compile at none"
        )
    check_compile(mode, str(model.device))
    runner = fast_runner(model, compile=mode)
    try:
        gap = difference(model, runner)
    except TorchDynamoException as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(f"torch.compile failed for {name}: {reason}; leave compile at none") from error
    if gap >= LARGEST.get(model.dtype, 0.1):
        raise UserError(f"compiled, {name} differs from itself by {gap:.2g} in its logits; leave compile at none")
    return runner


@torch.inference_mode()
def difference(model: PreTrainedModel, runner: Runner) -> float:
    """Largest difference of the logits on a few tokens, relative to their spread."""
    tokens = (torch.arange(6, device=runner.device) * 7919 + 1) % runner.vocab_size
    expected: Tensor = model(input_ids=tokens[None], use_cache=False).logits[0].float()
    seen = torch.cat([runner.read(tokens[:4]), runner.read(tokens[4:5]), runner.read(tokens[5:])]).float()
    runner.truncate(0)
    if not torch.isfinite(expected).all():
        raise UserError(
            f"{type(model).__name__} gives logits that are not finite; check the weights, or load it in float32"
        )
    return ((seen - expected).abs().max() / expected.std().clamp_min(1e-6)).item()
