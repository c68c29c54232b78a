"""Logits of a target and its drafts on texts that the target wrote, by teacher forcing, several texts a forward.

Texts of similar length stand side by side, filled up on the right: attention looks to the left and never sees that.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from decode.models.block_head import BlockHead
from decode.models.heads import DraftHead, FeatureHead, output_head, rows_of
from decode.models.huggingface_runner import last_logits
from decode.models.mtp import MtpHead
from decode.models.other_tokenizer import DraftModel, ForeignDraft, foreign_logits

Text = tuple[Sequence[int], int]  # token ids, and how many of them are the prompt
TOKENS, LOGITS = 4096, 1 << 25  # most tokens and most logits of a forward, unless one text has more


@dataclass
class TeacherForcedLogits:
    """What is predicted at the response tokens of a text."""

    number: int  # of the text
    p: Tensor  # the target's logits ``[response, vocab]``
    # of each draft its logits ``[response, vocab]`` as first drafted token; of a feature head then those as second,
    # third, … drafted token, from its own states before it and the text's true tokens
    q: dict[str, list[Tensor]]


@torch.no_grad()
def teacher_forced(
    target: PreTrainedModel, drafts: Mapping[str, DraftModel], texts: Sequence[Text], *, depth: int = 1
) -> Iterator[TeacherForcedLogits]:
    """Read all texts that have a response with the target and with every draft, those of similar length together.

    Args:
        target: p.
        drafts: q, by name.
        texts: token ids, and how many of them are the prompt.
        depth: drafted tokens that feature heads are asked about.

    Yields:
        The logits of each text, shortest text first.
    """
    heads = {name: draft for name, draft in drafts.items() if isinstance(draft, DraftHead)}
    shared = {n: output_head(target, head.draft_ids()) if head.version == 1 else None for n, head in heads.items()}
    vocab = len(target.get_output_embeddings().weight)
    for numbers in _groups(texts, min(TOKENS, LOGITS // vocab)):
        group = [texts[i] for i in numbers]
        tokens = pad_sequence([torch.tensor(list(ids)) for ids, _ in group], batch_first=True).to(target.device)
        p, states = _logits(target, tokens, group, states=bool(heads))
        q: dict[str, list[list[Tensor]]] = {}  # by draft, depth and text
        for name, draft in drafts.items():
            if isinstance(draft, ForeignDraft):
                q[name] = [[foreign_logits(draft, ids, start) for ids, start in group]]
            elif isinstance(draft, FeatureHead | MtpHead):
                embeds = (draft.embed_tokens or target.get_input_embeddings())(tokens[:, 1:])
                features = torch.cat([states[layer] for layer in draft.captured_layers], -1)[:, :-1]
                found = enumerate(draft.unroll(embeds, features, depth), 1)
                by_depth = []
                for at, rows in found:
                    spans = [slice(max(0, start - 1 - at), max(0, len(ids) - 1 - at)) for ids, start in group]
                    logits = [draft.logits(own[span], shared[name]) for own, span in zip(rows, spans)]
                    by_depth.append([rows_of(draft, own, vocab, text) for own, text in zip(logits, group)])
                q[name] = by_depth
            elif isinstance(draft, BlockHead):
                features = torch.cat([states[layer] for layer in draft.captured_layers], -1)
                q[name] = [
                    [
                        rows_of(draft, own[max(0, start - at) : max(0, len(ids) - at)], vocab, (ids, start))
                        for own, (ids, start) in zip(found, group)
                    ]
                    for at, found in enumerate(draft.teacher_forced(target, tokens, features, depth), 1)
                ]
            else:
                q[name] = [_logits(draft, tokens, group)[0]]
        for i, number in enumerate(numbers):
            yield TeacherForcedLogits(
                number, p[i], {name: [rows[i] for rows in by_depth] for name, by_depth in q.items()}
            )


def _groups(texts: Sequence[Text], most: int) -> Iterator[list[int]]:
    """Numbers of texts with a response, in the order of their lengths, as many as have `most` tokens when filled up."""
    group: list[int] = []
    for i in sorted(range(len(texts)), key=lambda i: len(texts[i][0])):
        ids, start = texts[i]
        if len(ids) <= start:
            continue
        if group and (len(group) + 1) * len(ids) > most:
            yield group
            group = []
        group.append(i)
    if group:
        yield group


def _logits(
    model: PreTrainedModel, tokens: Tensor, group: Sequence[Text], *, states: bool = False
) -> tuple[list[Tensor], tuple[Tensor, ...]]:
    """Logits ``[response, vocab]`` of each text, and the hidden states ``[batch, time, hidden]`` where asked for."""
    known = model.get_input_embeddings().weight.shape[0]  # a draft of a shorter padded vocabulary reads its last id
    first = min(start for _, start in group) - 1
    keep = tokens.shape[1] - first
    out = last_logits(model, keep, input_ids=tokens.clamp(max=known - 1), use_cache=False, output_hidden_states=states)
    rows = [logits[start - 1 - first : len(ids) - 1 - first] for logits, (ids, start) in zip(out.logits, group)]
    return rows, out.hidden_states or ()
