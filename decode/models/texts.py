"""The logits of a target and its drafts on texts that the target wrote, by teacher forcing."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from decode.files import Fields
from decode.models.heads.block import BlockHead
from decode.models.heads.eagle import DraftHead, FeatureHead, draft_ids, finish_of, finished, output_head
from decode.models.heads.mtp import MtpHead
from decode.models.heads.runner import in_target
from decode.models.huggingface import mask_of, masked, slots_of, states_of

ForcedText = tuple[Sequence[int], int]  # token ids, and how many of them are the prompt
# most tokens of a forward, unless one text has more; no more than the smallest `Model.boundary` of published models, so
# that a text above it, whose keys LongRoPE rotates by other factors, is alone in its forward
TOKENS = 4096
LOGITS = 1 << 25  # most logits of a model that are held at once
States = tuple[Tensor, Callable[[Tensor], Tensor]]  # that an output head reads  # [batch, time, hidden]; to logits


@dataclass
class TeacherForcedLogits:
    """What is predicted at some response tokens of a text; the pieces of a text follow each other."""

    number: int  # of the text
    at: slice  # which of its tokens
    p: Tensor  # the target's logits  # [tokens, vocab]
    # of each draft its logits as first drafted token; of a head then those as second, third, … drafted token, from its
    # own states before it and the text's true tokens, as of a PARD draft from masks before it  # [tokens, vocab] each
    q: dict[str, list[Tensor]]
    length: int  # drafted tokens of a block
    last: bool  # whether the text has no further ones


@torch.no_grad()
def teacher_forced(
    target: PreTrainedModel,
    drafts: Mapping[str, PreTrainedModel | DraftHead],
    texts: Sequence[ForcedText],
    *,
    depth: int = 1,
    shorter: Iterable[int] = (),
) -> Iterator[TeacherForcedLogits]:
    """Read all texts that have a response with the target and with every draft, those of similar length together.

    Texts stand side by side, filled up on the right: attention looks to the left and never sees that. Heads and PARD
    drafts draft `depth` tokens at each position; block heads also as many as `shorter` says, which are other tokens.
    Logits are computed for at most `LOGITS` of a model at once, whatever the length of a text.

    Yields:
        The logits of each text, shortest text first, piece by piece; of each piece then those of the `shorter` blocks.
    """
    shorter, vocab = list(shorter), len(target.get_output_embeddings().weight)
    heads = {name: draft for name, draft in drafts.items() if isinstance(draft, DraftHead)}
    layers = {layer for head in heads.values() for layer in head.captured_layers}
    for numbers in _groups(texts, TOKENS):
        tokens = pad_sequence([torch.tensor(list(texts[i][0])) for i in numbers], batch_first=True).to(target.device)
        (hidden, logits), captured = _states(target, tokens, layers)
        read: dict[str, list[States]] = {}  # by depth
        for name, draft in drafts.items():
            if not isinstance(draft, DraftHead):
                read[name] = _slots(draft, tokens, depth)
            elif not isinstance(draft, BlockHead):
                read[name] = _unrolled(draft, target, tokens, captured, depth)
        for i, number in enumerate(numbers):
            ids, start = texts[number]
            row, pieces = tokens[i : i + 1, : len(ids)], range(start, len(ids), max(1, LOGITS // vocab))
            for begin, length in product(pieces, (depth, *shorter)):
                at, q = slice(begin, min(begin + pieces.step, len(ids))), {}
                for name, draft in drafts.items():
                    if isinstance(draft, BlockHead):
                        if length == depth or draft.drafts > length:
                            q[name] = _blocks(draft, target, row, captured, i, length, at, vocab)
                    elif length == depth:
                        back = 2 if isinstance(draft, DraftHead) else 1
                        q[name] = [
                            rows_of(draft, to_logits(states[i][max(0, at.start - n) : max(0, at.stop - n)]), vocab, at)
                            for n, (states, to_logits) in enumerate(read[name], back)
                        ]
                p = logits(hidden[i, at.start - 1 : at.stop - 1])
                yield TeacherForcedLogits(number, at, p, q, length, at.stop == len(ids))


def _states(
    model: PreTrainedModel, input_ids: Tensor, layers: Collection[int] = (), **more: Tensor
) -> tuple[States, Sequence[Tensor]]:
    """What a model's output head reads of texts and how it becomes logits, and the hidden states of these layers."""
    head, known = model.get_output_embeddings(), model.get_input_embeddings().weight.shape[0]
    input_ids = input_ids.clamp(max=known - 1)  # a draft of a shorter padded vocabulary reads its last id
    inputs: Fields = {"input_ids": input_ids, "use_cache": False, **more}
    read: list[Tensor] = []

    def last_only(module: Any, given: tuple[Tensor]) -> Tensor:
        read.append(given[0])
        return given[0][:, -1:]

    with head.register_forward_pre_hook(last_only):
        out = model(**inputs, output_hidden_states=states_of(layers))
    to_logits, (hidden,) = (lambda rows: finished(head(rows), *finish_of(model))), read
    if not torch.allclose(to_logits(hidden[:, -1:]), out.logits[:, -1:], rtol=1e-3, atol=1e-3):
        hidden, to_logits = model(**inputs).logits, lambda rows: rows  # more follows this model's head
    return (hidden, to_logits), out.hidden_states or ()


def _slots(draft: PreTrainedModel, tokens: Tensor, depth: int) -> list[States]:
    """The states of a language model by depth: those of a PARD draft that begins after each token, or of the first."""
    mask, found = mask_of(draft), [torch.empty(0)] * depth
    if mask is None or depth == 1:
        return [_states(draft, tokens)[0]]
    for part in range(depth):  # so that a forward reads no more than twice the tokens
        lengths = (torch.arange(tokens.shape[1]) % depth == part) * depth
        begin, place, kept = (each.to(tokens.device) for each in slots_of(lengths.expand(tokens.shape)))
        with masked(tokens, begin, place, mask) as inputs:
            (states, to_logits), _ = _states(draft, **inputs)
        for step, at in enumerate(kept.view(depth, len(tokens), -1)):
            found[step] = found[step] if part else states.new_empty(*tokens.shape, states.shape[2])
            found[step][:, part::depth] = states.flatten(0, 1)[at]
    return [(each, to_logits) for each in found]


def _unrolled(
    head: DraftHead, target: PreTrainedModel, tokens: Tensor, captured: Sequence[Tensor], depth: int
) -> list[States]:
    """The states of a feature head by depth, of which the first drafts the second token that it reads."""
    assert isinstance(head, FeatureHead | MtpHead)
    features = torch.cat([captured[layer] for layer in head.captured_layers], -1)
    embeds = (head.embed_tokens or target.get_input_embeddings())(tokens[:, 1:])
    to_logits = partial(head.logits, target_head=output_head(target) if head.version == 1 else None)
    return [(states, to_logits) for states in head.unroll(embeds, features[:, :-1], depth)]


def _blocks(
    head: BlockHead, target: PreTrainedModel, tokens: Tensor, captured: Sequence[Tensor], row: int, depth: int,
    at: slice, vocab: int,
) -> list[Tensor]:  # fmt: skip
    """The logits of a block head by depth: those of each block of `depth` tokens that reaches these tokens of a row."""
    first, width = max(0, at.start - depth), tokens.shape[1]
    features = torch.cat([captured[layer][row : row + 1, :width] for layer in head.captured_layers], -1)
    by_depth = enumerate(head.teacher_forced(target, tokens, features, depth, first, at.stop - 1), first + 1)
    return [rows_of(head, logits[0, max(0, at.start - n) : max(0, at.stop - n)], vocab, at) for n, logits in by_depth]


def rows_of(draft: Any, logits: Tensor, vocab: int, at: slice) -> Tensor:
    """A draft's logits of the last of these tokens for all of them, in the target's vocabulary.

    Tokens before them get an impossible row: all −inf except the first id.
    """
    ids = draft_ids(draft)
    found = in_target(logits if ids is None or isinstance(draft, DraftHead) else logits[:, ids], ids, vocab)
    if len(found) == at.stop - at.start:
        return found
    missing = found.new_full((at.stop - at.start - len(found), found.shape[1]), -torch.inf)
    missing[:, 0] = 0.0
    return torch.cat([missing, found])


def _groups(texts: Sequence[ForcedText], most: int) -> Iterator[list[int]]:
    """Numbers of texts with a response, in the order of their lengths, as many as have `most` tokens when filled up."""
    group: list[int] = []
    answered = [i for i, (ids, start) in enumerate(texts) if len(ids) > start]
    for i in sorted(answered, key=lambda i: len(texts[i][0])):
        if group and (len(group) + 1) * len(texts[i][0]) > most:
            yield group
            group = []
        group.append(i)
    if group:
        yield group
