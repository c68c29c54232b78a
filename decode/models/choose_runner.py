"""The choice of a model's runner, and the check of its logits against the model's own."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from decode.draft import Draft
from decode.errors import UserError
from decode.models.block_head import BlockHead
from decode.models.block_runner import BlockRunner
from decode.models.families import supports
from decode.models.fast_runner import FastRunner, fast_runner
from decode.models.head_runner import HeadRunner
from decode.models.heads import FeatureHead
from decode.models.huggingface_runner import CACHES, HuggingFaceRunner, LongRopeRunner, arguments_of, longrope_boundary
from decode.models.mtp import MtpHead, MtpRunner
from decode.models.other_tokenizer import DraftModel, ForeignDraft, ForeignRunner
from decode.models.runner import Runner

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3}
"""Differences of logits, in standard deviations, that rounding explains on every processor."""
ROUNDINGS = 3.0
"""Larger differences pass up to this many times the model's own rounding, measured here (`rounding`)."""
UNMEASURED = 0.1
"""Tolerated where rounding says nothing: drafts whose weights are rounded, quantised weights, adapters, offloading."""
WINDOW = 8  # tokens that attention windows see during the check, which reads past their end


def open_runner(model: PreTrainedModel, *, fast: bool = True, pack: str = "off", draft: bool = False) -> Runner:
    """The fastest runner that reproduces the model's own logits.

    Families that the hand-written forward knows use it; all other models (other families, adapters, quantised weights,
    models spread over devices) use the ordinary model call. Either is checked first: it reads a few tokens in pieces,
    rolls back, reads a tree and keeps a path of it, and has to give the logits of fresh forwards. Where only trees
    fail, `Runner.supports_trees` is false. The hand-written forward may copy weights: open the model anew once they
    have changed.

    Args:
        model: a causal language model, or one with adapters (peft).
        fast: use the hand-written forward where it is possible.
        pack: how weights are laid out for CPUs (one of `decode.models.weights.MODES`).
        draft: the model is a draft, whose weights may be rounded to 16 bits where that is faster.

    Raises:
        UserError: a model that cannot be rolled back (a state outside its cache, encoder–decoder, bidirectional), or
            logits that are not finite.
    """
    config: Any = model.config
    text, name = config.get_text_config(), f"{type(model).__name__} ({config.model_type})"
    if config.is_encoder_decoder:
        raise _unserved(name, "it is an encoder–decoder")
    if not arguments_of(model).intersection(CACHES):
        raise _unserved(name, f"its forward takes no cache ({', '.join(CACHES)})")
    quick = fast_if_equal(model, pack, draft=draft) if fast else None
    if quick is not None:
        return quick
    try:
        runner: Runner = HuggingFaceRunner(model)
    except NotImplementedError as error:
        raise _unserved(name, str(error)) from error
    boundary = longrope_boundary(text)
    if boundary is not None:
        runner = LongRopeRunner(runner, boundary)
    try:
        found = _settled(model, runner)
    except UserError:
        raise
    except Exception as error:  # whatever a forward raises that was not made for a cache that rolls back
        raise _unserved(runner.name, f"its forward fails here ({_reason(error)})") from error
    if not found.chain < found.tolerance:
        raise _unserved(
            runner.name,
            f"read in pieces, a text gets other logits than read at once ({found.chain:.2g} standard deviations): it "
            "is bidirectional (BERT without is_decoder), keeps a state that is not in its cache, or computes one token "
            "otherwise than several",
        )
    if runner.supports_trees and not found.tree < found.tolerance:
        runner.tree_refusal = found.tree_error or "a tree's branches get other logits than the texts they stand for"
    return runner


def _settled(model: PreTrainedModel, runner: Runner) -> RunnerCheck:
    """The check of an ordinary runner, which settles how it keeps and reads states."""
    try:
        found = compare(model, runner)
    except Exception as error:
        if isinstance(error, UserError) or not isinstance(runner, HuggingFaceRunner):
            raise
        runner.use_own_state()
        found = compare(model, runner)
    if isinstance(runner, HuggingFaceRunner) and runner.recurrent and not found.chain < found.tolerance:
        runner.stepwise = True
        found = compare(model, runner)
    return found


def fast_if_equal(model: PreTrainedModel, pack: str = "off", *, draft: bool = False) -> FastRunner | None:
    """The hand-written forward of a model that it knows, once it has reproduced its logits; else None."""
    if not supports(model):
        return None
    quick = fast_runner(model, pack=pack, draft=draft)
    found = compare(model, quick)
    gap = max(found.chain, found.tree)
    if gap < (UNMEASURED if quick.rounded else found.tolerance):
        return quick
    warnings.warn(
        f"the fast forward differs from {type(model).__name__} by {gap:.2g} in its logits; "
        "using the ordinary model call",
        stacklevel=3,
    )
    return None


def _reason(error: Exception) -> str:
    """The first line of an error's message, or its type."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _unserved(name: str, reason: str) -> UserError:
    return UserError(
        f"{name} cannot be decoded here: {reason}. Use model.generate for it, or another target: a decoder of "
        "attention layers alone (Llama, Qwen, Mistral, Gemma, Phi, GPT-NeoX, …)"
    )


def open_draft_runner(draft: DraftModel, target: PreTrainedModel, pack: str = "off") -> Runner:
    """The runner of a draft model, of one of another vocabulary, or of a head."""
    if isinstance(draft, FeatureHead):
        return HeadRunner(draft, target, pack)
    if isinstance(draft, BlockHead):
        return BlockRunner(draft, target, pack)
    if isinstance(draft, MtpHead):
        return MtpRunner(draft, target)
    if isinstance(draft, ForeignDraft):
        return ForeignRunner(open_runner(draft.model, pack=pack, draft=True), draft.vocabulary)
    return open_runner(draft, pack=pack, draft=True)


@dataclass
class RunnerCheck:
    """How far a runner's logits are from those of fresh forwards.

    Differences are root mean squares over the vocabulary, of the worst row, in standard deviations of the logits.
    """

    chain: float  # of texts read in pieces, before and after a rollback
    # of a tree's longest branch and of the token behind it once the branch is kept; 0 where none was read
    tree: float = 0.0
    tree_error: str = ""  # what reading the tree raised, if it did
    tolerance: float = 0.0  # differences that rounding explains


@contextmanager
def short_windows(model: PreTrainedModel, runner: Runner) -> Iterator[int]:
    """Within it, attention windows see at most `WINDOW` tokens; yields the longest one's length, or 0.

    GPT-Neo's are part of its weights and stay as they are.
    """
    own = vars(model.get_decoder().config.get_text_config())
    places = [(own, "sliding_window"), (own, "attention_chunk_size")]
    if isinstance(runner, FastRunner):
        places += [(vars(kind), "window") for kind in runner.network.weights.kinds]
    before = [(fields, name, fields[name]) for fields, name in places if fields.get(name)]
    for fields, name, length in before:
        fields[name] = min(length, WINDOW)
    try:
        yield max([own.get("window_size") or 0, *(fields[name] for fields, name, _ in before)])
    finally:
        for fields, name, length in before:
            fields[name] = length


@torch.inference_mode()
def compare(model: PreTrainedModel, runner: Runner) -> RunnerCheck:
    """Read a text in pieces, roll back and read another, then a tree of which a path is kept: against fresh forwards.

    About ten forwards of a few tokens, past the end of attention windows (see `short_windows`).

    Raises:
        UserError: logits that are not finite.
    """
    with short_windows(model, runner) as window:
        start = max(1, min(4 + window, runner.limit - 5))
        ids = (torch.arange(start + 5, device=runner.device) * 7919 + 1) % runner.vocab_size
        other = torch.cat([ids[: start + 1], (ids[start + 1 :] + 3) % runner.vocab_size])
        fresh = model(input_ids=torch.stack([ids, other]), use_cache=False).logits.float()
        if not torch.isfinite(fresh).all():
            raise UserError(
                f"{type(model).__name__} gives logits that are not finite; check the weights, or load it in float32"
            )

        cache = runner.new_cache()

        def read(tokens: Tensor, tree: Draft | None = None) -> Tensor:
            return runner.forward([cache], [tokens], [tree]).logits

        def gap(expected: Tensor, *seen: Tensor) -> float:
            return _difference(torch.cat(seen), expected, fresh)

        one, two = fresh
        whole = gap(one, read(ids[:start]), read(ids[start : start + 1]), read(ids[start + 1 :]))
        cache.truncate(start + 1)
        found = RunnerCheck(max(whole, gap(two[start + 1 :], read(other[start + 1 :]))))
        cache.truncate(start + 3)
        found.chain = max(found.chain, gap(two[start + 3 :], read(other[start + 3 :])))
        if runner.supports_trees:
            try:
                cache.truncate(start)
                # below the pending token two branches; the one that is kept lies neither first nor in adjacent slots
                a, b = ids.tolist(), other.tolist()
                nodes = [a[start + 1], b[start + 1], a[start + 2], b[start + 2], b[start + 3]]
                tree = Draft.tree(nodes, [-1, -1, 0, 1, 3])
                rows = read(torch.cat([ids[start : start + 1], tree.tokens.to(runner.device)]), tree)
                branches = (
                    gap(one[start : start + 3], rows[[0, 1, 3]]),
                    gap(two[start + 1 : start + 4], rows[[2, 4, 5]]),
                )
                cache.keep(start, [start, start + 2, start + 4, start + 5])
                found.tree = max(*branches, gap(two[start + 4 :], read(other[start + 4 :])))
            except Exception as error:  # a family's forward may not be made for trees in many ways
                found.tree, found.tree_error = torch.inf, f"its forward fails on trees ({_reason(error)})"
        cache.close()
        found.tolerance = TOLERANCE.get(model.dtype, 0.0)
        if max(found.chain, found.tree) >= found.tolerance:
            widened = (  # its weights can be: they are its own, neither quantised nor offloaded
                isinstance(model, PreTrainedModel)
                and getattr(model, "hf_quantizer", None) is None
                and not getattr(model, "_hf_peft_config_loaded", False)
                and all(p.is_floating_point() and p.device == model.device for p in model.parameters())
                and model.device.type != "meta"
            )
            try:
                measured = ROUNDINGS * rounding(model, torch.stack([ids, other])) if widened else UNMEASURED
            except RuntimeError:  # a forward that computes some of it in float32, whatever the weights are
                measured = 0.0 if model.dtype in TOLERANCE else UNMEASURED
            found.tolerance = max(found.tolerance, measured)
        return found


def _difference(seen: Tensor, expected: Tensor, all: Tensor) -> float:
    """Root mean square of the worst row, in standard deviations of all logits."""
    return float((seen.float() - expected).square().mean(-1).sqrt().max() / all.std().clamp_min(1e-6))


@torch.no_grad()
def rounding(model: PreTrainedModel, ids: Tensor) -> float:
    """How much the rounding of a model's own forward changes its logits on texts ``[batch, n]``.

    The reference is the forward of the same weights in a wider format: float32 for 16 bits, else float64. The
    difference is measured as in `RunnerCheck`.
    """
    own = model(input_ids=ids, use_cache=False).logits
    narrow: dict[nn.Parameter, Tensor] = {}
    wider = torch.float64 if model.dtype in TOLERANCE else torch.float32

    def widen(module: nn.Module, _: Any) -> None:
        for p in module.parameters(recurse=False):
            if p not in narrow:  # a module may run inside another one that holds the same parameter
                narrow[p], p.data = p.data, p.data.to(wider)

    def restore(module: nn.Module, *_: Any) -> None:
        for p in module.parameters(recurse=False):
            p.data = narrow.pop(p, p.data)

    # each module's weights are widened while it runs, so that memory holds one of them twice at most
    holding = [module for module in model.modules() if any(True for _ in module.parameters(recurse=False))]
    hooks = [module.register_forward_pre_hook(widen) for module in holding]
    hooks += [module.register_forward_hook(restore, always_call=True) for module in holding]
    try:
        exact = model(input_ids=ids, use_cache=False).logits
    finally:
        for hook in hooks:
            hook.remove()
    return _difference(own, exact, exact)
