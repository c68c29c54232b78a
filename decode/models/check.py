"""The choice of a model's runner, and the check of its logits against the model's own."""

import copy
import math
import warnings
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from decode.core.draft import Draft
from decode.errors import UserError, first_line
from decode.models.api import Model, Read
from decode.models.fast.forward import FastRunner, fast_runner
from decode.models.fast.layout import supports
from decode.models.heads.eagle import DraftHead, draft_ids, some_outputs
from decode.models.heads.files import HEADS
from decode.models.huggingface import CACHES, RECURRENT, HuggingFaceRunner, arguments_of, mask_of
from decode.models.sources import decoder_of

TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.15}
"""Differences of logits, in standard deviations, that rounding explains; also in transformers' float32 parts."""
ROUNDED = 0.1  # the same of drafts whose weights are rounded, and of quantised weights
NO_STEP = 1e-6  # a limit of time steps that changes no more than rounding does
CHOSEN = 2  # keys that sparse attention chooses during the check
WINDOW = 8  # tokens that attention windows see during the check, which reads past their end


def open_runner(model: PreTrainedModel, *, fast: bool = True, pack: str = "off", draft: bool = False) -> Model:
    """The fastest runner that reproduces the model's own logits.

    Families that the hand-written forward knows use it; all other models (other families, adapters, quantised weights,
    models spread over devices) use the ordinary model call. Either is checked first (see `compare`). Where only trees
    fail, `Model.tree_refusal` says why. The hand-written forward may copy weights: open the model anew once they
    have changed.

    Args:
        model: a causal language model, or one with adapters (peft).
        fast: use the hand-written forward where it is possible.
        pack: how weights are laid out for CPUs (one of `decode.models.fast.weights.MODES`).
        draft: it is a draft, whose weights may be rounded to 16 bits where that is faster.

    Raises:
        UserError: a model that cannot be rolled back (a state outside its cache, encoder–decoder, bidirectional), or
            logits that are not finite.
    """
    if model.config.is_encoder_decoder:
        raise _unserved(model, "it is an encoder–decoder")
    if not arguments_of(model).intersection(CACHES):
        raise _unserved(model, f"its forward takes no cache ({', '.join(CACHES)})")
    if fast and (quick := fast_if_equal(model, pack, draft=draft)):
        return quick
    try:
        runner: Model = HuggingFaceRunner(model)
    except NotImplementedError as error:
        raise _unserved(model, str(error)) from error
    tolerance = TOLERANCE[model.dtype] if getattr(model, "hf_quantizer", None) is None else ROUNDED
    try:
        gaps = compare(model, runner)
    except UserError:
        raise
    except Exception as error:  # whatever a forward raises that was not made for a cache that rolls back
        raise _unserved(model, f"its forward fails here ({first_line(error) or type(error).__name__})") from error
    if not gaps.chain < tolerance:
        raise _unserved(
            model,
            f"read in pieces, a text gets other logits than read at once ({gaps.chain:.2g} standard deviations): it is "
            "bidirectional (BERT without is_decoder), keeps a state that is not in its cache, or computes one token "
            "otherwise than several (Mamba's first version; Nemotron-H and Zamba 2 with a time_step_min above 1e-6)",
        )
    if not runner.tree_refusal and not gaps.tree < tolerance:
        runner.tree_refusal = gaps.tree_error or "a tree's branches get other logits than the texts they stand for"
    return runner


def fast_if_equal(model: PreTrainedModel, pack: str, *, draft: bool = False) -> FastRunner | None:
    """The hand-written forward of a model that it knows, once it has reproduced its logits; else None."""
    if not supports(model):
        return None
    quick = fast_runner(model, pack=pack, draft=draft)
    gaps = compare(model, quick)
    gap = max(gaps.chain, gaps.tree)
    if gap < (ROUNDED if quick.rounded else TOLERANCE[model.dtype]):
        return quick
    warnings.warn(
        f"the fast forward differs from {type(model).__name__} by {gap:.2g} in its logits; "
        "using the ordinary model call",
        stacklevel=3,
    )
    return None


def _unserved(model: PreTrainedModel, reason: str) -> UserError:
    return UserError(
        f"{type(model).__name__} ({model.config.model_type}) cannot be decoded here: {reason}. Use model.generate for "
        "it, or another target: a decoder of attention layers alone (Llama, Qwen, Mistral, Gemma, Phi, GPT-NeoX, …)"
    )


def open_draft_runner(draft: PreTrainedModel | DraftHead, target: PreTrainedModel, pack: str = "off") -> Model:
    """The runner of a draft model or of a head; of a draft model's output head those rows that it drafts are read."""
    if isinstance(draft, DraftHead):
        return HEADS[draft.version].runner(draft, target, pack)
    ids, head = draft_ids(draft), draft.get_output_embeddings()
    if ids is not None:
        draft = twin_of(draft)
        draft.set_output_embeddings(some_outputs(head, ids))
    runner = open_runner(draft, pack=pack, draft=True)
    runner.vocab_size, runner.columns = len(head.weight), ids
    if runner.recurrent and mask_of(draft) is not None:
        raise UserError(f"{runner.name} cannot draft several tokens in one forward: {RECURRENT}; remove its pard_token")
    return runner


@dataclass
class Gaps:
    """How far a runner's logits are from those of fresh forwards.

    Root mean squares over the vocabulary, of the worst row, in standard deviations of the logits.
    """

    chain: float = 0.0  # of texts read in pieces, before and after a rollback
    # of a tree's longest branch and of the token behind it once the branch is kept; 0 where none was read
    tree: float = 0.0
    tree_error: str = ""  # what reading the tree raised, if it did


def shorten_windows(model: PreTrainedModel, runner: Model) -> int:
    """Let attention windows of both see at most `WINDOW` tokens; returns the longest one's length, or 0.

    GPT-Neo's are part of its weights and stay as they are. Sparse attention chooses `CHOSEN` keys, but for 16 bits,
    whose rounding may choose others. A limit of Mamba's time steps, which a scan of several tokens keeps in
    transformers and a step of one token does not (Nemotron-H, Zamba 2), leaves one value, so that it shows.
    """
    config = decoder_of(model).config.get_text_config()
    windows = [getattr(config, "window_size", None) or 0]
    for name in ("sliding_window", "attention_chunk_size"):
        if length := getattr(config, name, None):
            windows.append(min(length, WINDOW))
            setattr(config, name, windows[-1])
    if isinstance(runner, FastRunner):
        weights = runner.network.weights
        weights.kinds = [replace(kind, window=kind.window and min(kind.window, WINDOW)) for kind in weights.kinds]
        windows += [kind.window or 0 for kind in weights.kinds]
    for module in model.modules():
        fields = vars(module)
        least, most = fields.get("time_step_limit") or (0.0, math.inf)
        if least > NO_STEP or most < math.inf:
            fields["time_step_limit"] = (1.0, 1.0)
        if model.dtype.itemsize > 2 and (fields.get("index_topk") or 0) > CHOSEN:
            fields["index_topk"] = CHOSEN
    return max(windows)


def twin_of(model: PreTrainedModel) -> PreTrainedModel:
    """The same weights in modules of their own, whose settings may be changed while others use the model."""
    return copy.deepcopy(model, {id(tensor): tensor for tensor in chain(model.parameters(), model.buffers())})


def compare(model: PreTrainedModel, runner: Model) -> Gaps:
    """Read a text in pieces, roll back and read another, then a tree of which a path is kept: against fresh forwards.

    About ten forwards of a few tokens, past the end of attention windows (see `shorten_windows`) of a twin.

    Raises:
        UserError: logits that are not finite.
    """
    model = twin_of(model)
    if isinstance(runner, HuggingFaceRunner):
        runner = copy.copy(runner)
        runner.model = model
    kinds = runner.network.weights.kinds if isinstance(runner, FastRunner) else []
    try:
        return _compare(model, runner, shorten_windows(model, runner))
    finally:
        if isinstance(runner, FastRunner):
            runner.network.weights.kinds = kinds


@torch.inference_mode()
def _compare(model: PreTrainedModel, runner: Model, window: int) -> Gaps:
    start = max(1, min(4 + window, runner.limit - 5))
    end, ids = start + 5, (torch.arange(start + 5, device=runner.device) * 7919 + 1) % runner.vocab_size
    texts = torch.stack([ids, torch.cat([ids[: start + 1], (ids[start + 1 :] + 3) % runner.vocab_size])])
    fresh = model(input_ids=texts, use_cache=False).logits.float()
    if not torch.isfinite(fresh).all():
        raise UserError(
            f"{model.name_or_path or runner.name} gives logits that are not finite; check the weights, or "
            "load it in float32"
        )
    cache, deviation, gaps = runner.new_cache(), fresh.std().clamp_min(1e-6), Gaps()

    def gap(expected: Tensor, tokens: Tensor, tree: Draft | None = None, rows: Any = slice(None)) -> float:
        logits = runner.forward([Read(cache, tokens, tree)]).logits[rows].float()
        return float((logits - expected).square().mean(-1).sqrt().max() / deviation)

    pieces = [(0, 0, start), (0, start, start + 1), (0, start + 1, end), (1, start + 1, end), (1, start + 3, end)]
    for text, begin, stop in pieces:
        cache.truncate(begin)
        gaps.chain = max(gaps.chain, gap(fresh[text, begin:stop], texts[text, begin:stop]))
    if not runner.tree_refusal:
        try:
            cache.truncate(start)
            # below the pending token two branches; the one that is kept lies neither first nor in adjacent slots
            a, b = texts.tolist()
            nodes = [a[start + 1], b[start + 1], a[start + 2], b[start + 2], b[start + 3]]
            tree = Draft(nodes, [-1, -1, 0, 1, 3])
            feed = torch.cat([ids[start : start + 1], torch.tensor(tree.ids).to(runner.device)])
            expected = torch.cat([fresh[0, start : start + 3], fresh[1, start + 1 : start + 4]])
            gaps.tree = gap(expected, feed, tree, [0, 1, 3, 2, 4, 5])
            runner.keep([cache], [start], [[start, start + 2, start + 4, start + 5]])
            gaps.tree = max(gaps.tree, gap(fresh[1, start + 4 :], texts[1, start + 4 :]))
        except Exception as error:  # a family's forward may not be made for trees in many ways
            gaps.tree = torch.inf
            gaps.tree_error = f"its forward fails on trees ({first_line(error) or type(error).__name__})"
    cache.close()
    return gaps
