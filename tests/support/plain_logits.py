"""Teacher forcing the plain way, one text and one depth at a time: what `teacher_forced` must equal."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from decode.models.heads.eagle import FeatureHead, output_head
from decode.models.texts import rows_of


def after(target: PreTrainedModel) -> Callable[[list[int]], Tensor]:
    """The target's logits after a text, by a forward of its own."""

    @torch.inference_mode()
    def forward(text: list[int]) -> Tensor:
        return target(input_ids=torch.tensor([text]), use_cache=False).logits[0, -1]

    return forward


@torch.inference_mode()
def response_logits(model: PreTrainedModel, ids: Sequence[int], prompt_length: int) -> Tensor:
    """Logits ``[response, vocab]`` that predict each response token of one text."""
    known = model.get_input_embeddings().weight.shape[0]  # a draft of a shorter padded vocabulary reads its last id
    tokens = torch.tensor([list(ids)], device=model.device).clamp_(max=known - 1)
    keep = len(ids) - prompt_length + 1
    return model(input_ids=tokens, use_cache=False, logits_to_keep=keep).logits[0, :-1]


@torch.inference_mode()
def head_logits(head: FeatureHead, target: PreTrainedModel, ids: Sequence[int], start: int, depth: int = 1) -> Tensor:
    """What a head would draft at each response position of one text, by teacher forcing."""
    tokens = torch.tensor([list(ids)], device=target.device)
    out = target(input_ids=tokens, use_cache=False, output_hidden_states=True, logits_to_keep=1)
    features = torch.cat([out.hidden_states[layer] for layer in head.captured_layers], -1)
    embedding = head.embed_tokens or target.get_input_embeddings()
    *_, states = head.unroll(embedding(tokens[:, 1:]), features[:, :-1], depth)
    shared = output_head(target) if head.version == 1 else None
    vocab = int(target.get_output_embeddings().weight.shape[0])
    rows = head.logits(states[0, max(0, start - 1 - depth) : max(0, len(ids) - 1 - depth)], shared)
    return rows_of(head, rows, vocab, slice(start, len(ids)))
