"""Feature heads whose drafts are accepted now and then: random ones, and ones that know a few texts by heart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import blocks
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from decode.models.block_head import BlockHead
from decode.models.heads import FeatureHead, attend, head_config

MASK = 47  # the token in the slots of a block


def make_head(target: PreTrainedModel, version: int, seed: int = 3) -> FeatureHead:
    """A random head, biased towards repeating what the target's own layers say, so that some drafts are accepted."""
    vocab = int(target.config.vocab_size)
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        head = FeatureHead(head_config(target.config.get_text_config(), version, draft_vocab=vocab // 2))
        for weight in head.parameters():
            weight += 0.2 * weight.std(correction=0).nan_to_num() * torch.randn(weight.shape, generator=generator)
        if version == 3:
            head.set_vocabulary(torch.arange(0, vocab, 2))
            head.lm_head.weight.copy_(target.get_output_embeddings().weight[::2])
    return head.to(target.dtype).eval()


def learned_head(
    target: PreTrainedModel, prompts: Sequence[Sequence[int]], *, captured_layers: tuple[int, ...], steps: int = 80
) -> FeatureHead:
    """An EAGLE-3 head trained on the target's greedy answers to these prompts."""
    torch.manual_seed(0)
    head = FeatureHead(head_config(target.config, 3, captured_layers=captured_layers))
    examples = []
    with torch.no_grad():
        for prompt in prompts:
            ids = torch.tensor([list(prompt)])
            tokens = target.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False)
            states = target(tokens, output_hidden_states=True).hidden_states
            features = torch.cat([states[layer] for layer in captured_layers], -1)
            examples.append((tokens, target.get_input_embeddings()(tokens[:, 1:]), features[:, :-1]))
    optimiser = torch.optim.Adam(head.parameters(), 5e-3)
    for _ in range(steps):
        loss = torch.zeros(())
        for tokens, embeds, features in examples:
            for depth, states in enumerate(head.unroll(embeds, features, 3)):
                count = tokens.shape[1] - 2 - depth
                loss = loss + F.cross_entropy(head.logits(states[0, :count], None), tokens[0, 2 + depth :])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return head.eval().requires_grad_(False)


def make_block_head(target: PreTrainedModel, version: str, **options: Any) -> BlockHead:
    """A random head whose files are told apart by every field; DSpark with all that it may have."""
    given: dict[str, Any] = {"block": 5, "mask_id": MASK, "target_layers": [1, 2, 4]}
    given |= {"markov_rank": 8} if version == "dspark" else {}
    return blocks.make_block_head(target, version, 5, **(given | options))


@torch.no_grad()
def drafted(head: BlockHead, target: PreTrainedModel) -> Tensor:
    """Logits of all drafted tokens of a text."""
    ids = (torch.arange(12)[None] * 7 + 1) % 40
    states = target(ids, output_hidden_states=True).hidden_states
    features = torch.cat([states[layer] for layer in head.captured_layers], -1)
    return torch.stack(head.teacher_forced(target, ids, features, head.drafts))


def check_chain_attention(time: int = 40, device: str = "cpu", dtype: torch.dtype = torch.float64) -> int:
    """`attend` finds what one softmax over all keys finds, with its gradients; returns the bytes kept for these."""
    generator = torch.Generator().manual_seed(0)
    heads, kv, d, steps = 4, 2, 12, 3

    def some(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype).requires_grad_(True)

    q, k, v = some(2, heads, time, d), some(2, kv, time, d), some(2, kv, time, d)
    given = [q, k, v, *(some(2, kv, time, d) for _ in range(2 * steps))]
    kept: dict[int, int] = {}

    def keep(values: Tensor) -> Tensor:
        kept[values.data_ptr()] = values.nbytes
        return values

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda values: values):
        found = attend(q, *given[1:])
    plain = [values.detach().cpu().double().requires_grad_(True) for values in given]
    q, k, v, *chain = [values.repeat_interleave(heads // values.shape[1], 1) for values in plain]
    scores = (q @ k.mT).masked_fill(~torch.ones(time, time).tril().bool(), -torch.inf)
    own = torch.stack([(q * key).sum(-1) for key in chain[::2]], -1)
    weights = (torch.cat([scores, own], -1) * d**-0.5).softmax(-1)
    wanted = weights[..., :-steps] @ v
    for i, value in enumerate(chain[1::2]):
        wanted = wanted + weights[..., i - steps, None] * value
    close = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 4e-2}[dtype]
    assert (found.cpu().double() - wanted).abs().max() < close * 5
    seed = torch.randn(wanted.shape, generator=generator, dtype=torch.float64)
    theirs = torch.autograd.grad(wanted, plain, seed)
    for ours, other in zip(torch.autograd.grad(found, given, seed.to(device, dtype)), theirs, strict=True):
        assert (ours.cpu().double() - other).abs().max() < close * other.abs().max()
    return sum(kept.values())
