"""Heads whose drafts are accepted now and then, a block head's plain twin, and drafts of every kind in training."""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from families import build_tiny, in_double
from some_rows import everything, from_lists
from torch import Tensor
from transformers import PreTrainedModel

from decode.models.heads.block import BlockHead
from decode.models.heads.block_config import BLOCK_ARCHITECTURES, block_config
from decode.models.heads.eagle import FeatureHead, attend, head_config
from distill.config.kinds import kind_of
from distill.data.chat import IGNORE
from distill.kinds.base import Draft
from distill.kinds.block import BlockDraft
from distill.kinds.eagle import FeatureDraft
from distill.kinds.language_model import LanguageModelDraft
from distill.kinds.parallel import ParallelDraft
from distill.losses.chunked import chunked_loss
from distill.losses.divergences import Divergence
from distill.signal.target import Signal

MASK = 47  # the token in the slots of a block


def make_head(target: PreTrainedModel, version: int, seed: int = 2) -> FeatureHead:
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


def learned(draft: Draft, target: PreTrainedModel, prompts: Sequence[Sequence[int]], steps: int, lr: float) -> Any:
    """The draft's model after so many steps on the target's greedy answers to these prompts."""
    texts, optimiser = list[list[int]](), torch.optim.Adam(draft.model.parameters(), lr)
    for prompt in prompts:
        ids = torch.tensor([list(prompt)])
        texts += target.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False).tolist()
    examples = from_lists(texts, [[IGNORE] * len(ids) + text[len(ids) :] for ids, text in zip(prompts, texts)])
    signal, batch = Signal(copy.deepcopy(target), reader=draft.model), draft.indexed(everything(examples))
    for _ in range(steps):
        optimiser.zero_grad()
        chunked_loss(draft.rows(batch, signal), Divergence("cross_entropy"))[0].backward()
        optimiser.step()
    return draft.model.eval().requires_grad_(False)


def learned_head(
    target: PreTrainedModel, prompts: Sequence[Sequence[int]], *, captured_layers: tuple[int, ...], steps: int = 80,
    norms: bool = False,
) -> FeatureHead:  # fmt: skip
    """An EAGLE-3 head, or with norms an EAGLE-3.1 head, trained on the target's greedy answers to these prompts."""
    torch.manual_seed(0)
    head = FeatureHead(head_config(target.config, 3, captured_layers=captured_layers, norms=norms))
    return learned(FeatureDraft(head, 3, 3, 1.0), target, prompts, steps, 5e-3)


def learned_block(target: PreTrainedModel, prompts: Sequence[Sequence[int]], kind: str, steps: int) -> BlockHead:
    """A block head of two layers, longer than what is drafted, trained on the target's greedy answers."""
    head = make_block_head(target, kind, block=6, mask_id=7, target_layers=[0, 1, 2]).requires_grad_(True)
    with torch.no_grad():  # keys of the second layer normed by the weights of the first are others
        head.layers[1].self_attn.k_norm.weight.mul_(3)
    return learned(BlockDraft(head, 99), target, prompts, steps, 5e-3)


def make_block_head(target: PreTrainedModel, version: str = "dspark", seed: int = 3, **shape: Any) -> BlockHead:
    """A random head on the target, whose vocabulary is the whole one unless `shape` says otherwise."""
    spark = version == "dspark"
    rank = 0 if version == "dflash" else 3
    given = {"layers": 2, "block": 4, "mask_id": 0, "markov_rank": rank, "confidence": spark} | shape
    other = {"sample_from_anchor": given.pop("from_anchor", spark)}
    if version == "dflash2":
        other["selector_top_k"] = given.pop("candidates", 3)
    other |= {key: given.pop(key) for key in ("layer_types", "is_causal", "conv_kernel_size") if key in given}
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        config = block_config(target.config.get_text_config(), version, **given)
        config.update(other)
        head = BlockHead(config)
        for name, weight in head.named_parameters():  # norms and the bias by the token before are no identity
            noise = 1.0 if "markov_w2" in name else 0.2
            weight += noise * torch.randn_like(weight)
        if head.reduced:
            head.set_vocabulary(torch.arange(0, 2 * head.config.draft_vocab_size, 2))
    return head.to(target.dtype).eval()


def filed_head(target: PreTrainedModel, version: str, **options: Any) -> BlockHead:
    """A random head whose files are told apart by every field; with all that its kind may have."""
    given = {"block": 5, "mask_id": MASK, "target_layers": [1, 2, 4], "markov_rank": 8 * (version != "dflash")}
    return make_block_head(target, version, 5, **given | options)


def plain_conv(conv: Any, side: int, read: Tensor, x: Tensor) -> Tensor:
    """One side of a convolution over the slots of a block ``[slots, width]``, number by number."""
    if conv is None:
        return x
    made = (read @ conv.kernel_projection.weight.T).view(len(x), *conv.base_kernel.shape[:2], -1)
    out = torch.zeros_like(x)
    for k in range(len(x)):
        for i in range(min(k + 1, conv.base_kernel.shape[1])):
            for channel in range(x.shape[1]):
                weight = conv.base_kernel[side, i, channel] + made[k, side, i, channel // conv.group]
                out[k, channel] += weight * x[k - i, channel]
    return out


def plain_visible(layer: Any, p: int, slots: int) -> Tensor:
    """Which of p positions of context and the slots after them each slot sees, as vLLM has it, bool."""
    rows = []
    for k in range(slots):
        context = [layer.window is None or (p + k) - j < layer.window for j in range(p)]
        rows.append(context + [not layer.causal or j <= k for j in range(slots)])
    return torch.tensor(rows)


def _norm(x: Tensor, module: Any) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + module.variance_epsilon).sqrt() * module.weight


@torch.no_grad()
def plain_block(head: BlockHead, target: PreTrainedModel, ids: list[int], drafts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Logits ``[drafts, draft vocab]`` without a scorer, and states ``[drafts, width]``, of a block after a text.

    After them come the normed features before the anchor.

    The last id is the anchor; no mask, cache or fused attention is used.
    """
    states = target(input_ids=torch.tensor([ids]), output_hidden_states=True).hidden_states
    p, d = len(ids) - 1, head.config.head_dim
    group = head.config.num_attention_heads // head.config.num_key_value_heads
    features = torch.cat([states[layer][0, :p] for layer in head.captured_layers], -1)
    tokens = [ids[-1]] + [head.mask_id] * (drafts - 1 if head.from_anchor else drafts)
    x = target.get_input_embeddings().weight[torch.tensor(tokens)]
    context = _norm(features @ head.fc.weight.T, head.hidden_norm)
    theta = head.config.rope_parameters["rope_theta"] ** (-torch.arange(0, d, 2, dtype=x.dtype) / d)
    angles = torch.arange(p + len(tokens), dtype=x.dtype)[:, None] * theta

    def by_head(rows: Tensor, projection: Any, norm: Any = None) -> Tensor:
        vectors = (rows @ projection.weight.T).unflatten(-1, (-1, d)).transpose(0, 1)  # [heads, rows, d]
        if norm is None:
            return vectors
        a, b = _norm(vectors, norm).split(d // 2, -1)
        cos, sin = angles[-len(rows) :].cos(), angles[-len(rows) :].sin()
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    layer: Any
    for layer in head.layers:
        attention, read = layer.self_attn, _norm(x, layer.input_layernorm)
        y = plain_conv(layer.attention_conv, 0, read, read)
        both = torch.cat([context, y])
        q = by_head(y, attention.q_proj, attention.q_norm)
        k, v = by_head(both, attention.k_proj, attention.k_norm), by_head(both, attention.v_proj)
        scores = q @ k.repeat_interleave(group, 0).mT / d**0.5
        weights = scores.masked_fill(~plain_visible(layer, p, len(tokens)), -torch.inf).softmax(-1)
        mixed = (weights @ v.repeat_interleave(group, 0)).transpose(0, 1).flatten(1) @ attention.o_proj.weight.T
        x = x + plain_conv(layer.attention_conv, 1, read, mixed)
        read = _norm(x, layer.post_attention_layernorm)
        z = plain_conv(layer.mlp_conv, 0, read, read)
        gate = z @ layer.mlp.gate_proj.weight.T
        mapped = (gate * gate.sigmoid() * (z @ layer.mlp.up_proj.weight.T)) @ layer.mlp.down_proj.weight.T
        x = x + plain_conv(layer.mlp_conv, 1, read, mapped)
    hidden = _norm(x, head.norm)[-drafts:]
    output, kept = target.get_output_embeddings().weight, head.draft_ids()
    return hidden @ (output if kept is None else output[kept]).T, hidden, context


@torch.no_grad()
def plain_scores(head: BlockHead, target: PreTrainedModel, ids: list[int], path: list[int], drafts: int) -> Tensor:
    """Logits ``[len(path) + 1, draft vocab]`` of a block's slots after a text and drafted tokens, −∞ of no candidates."""
    logits, hidden, _ = plain_block(head, target, ids, drafts)
    text, rows = ids + path, []
    for slot in range(min(len(path) + 1, drafts)):
        row, before = logits[slot], text[len(ids) - 1 + slot]
        best = row.sort(descending=True, stable=True).indices[: head.candidates or len(row)]
        if head.markov_head is not None:
            markov: Any = head.markov_head
            row = row + markov.markov_w2(markov(hidden[slot], markov.markov_w1(torch.tensor(before))))
        rows.append(torch.full_like(row, -torch.inf).index_copy(0, best, row[best]))
    return torch.stack(rows)


@torch.no_grad()
def drafted(head: BlockHead, target: PreTrainedModel) -> Tensor:
    """Logits of all drafted tokens of a text."""
    ids = (torch.arange(12)[None] * 7 + 1) % 40
    states = target(ids, output_hidden_states=True).hidden_states
    features = torch.cat([states[layer] for layer in head.captured_layers], -1)
    return torch.stack(head.teacher_forced(target, ids, features, head.drafts))


def draft_of(kind: str, target: Any, steps: int = 2, **shape: Any) -> tuple[Draft, Signal]:
    """A draft in training, from which nothing is drawn by chance, and what the target in float64 says beside it."""
    if kind.startswith("language model"):
        model = in_double(build_tiny("llama", seed=7, dtype=torch.float64))
        if kind.endswith("some tokens"):
            model.config.draft_ids = list(range(0, 48, 2))
        return LanguageModelDraft(model.train(), 5), Signal(target, reader=model)
    if kind == "parallel":
        model = in_double(build_tiny("llama", seed=7, dtype=torch.float64))
        model.config.pard_token, model.config.draft_ids = 47, list(range(0, 48, 2))
        return ParallelDraft(model.train(), steps), Signal(target, reader=model)
    if kind in BLOCK_ARCHITECTURES:
        block: Any = make_block_head(target, kind, **{"layers": 1, "block": 3} | shape)
        return BlockDraft(block.train(), 99), Signal(target, reader=block)  # a block at every label token
    head = make_head(target, kind_of(kind).version)
    draft = FeatureDraft(head.train(), steps, steps, 0.8)
    draft.noise = 0.0
    return draft, Signal(target, reader=head)


def check_chain_attention(time: int = 40, device: str = "cpu", dtype: torch.dtype = torch.float64) -> int:
    """`attend` finds what one softmax over all keys finds, with its gradients; returns the bytes kept for these."""
    generator = torch.Generator().manual_seed(0)
    d, steps, kept = 12, 3, dict[int, int]()

    def keep(values: Tensor) -> Tensor:
        kept[values.data_ptr()] = values.nbytes
        return values

    # queries; the text's keys and values, then the chain's
    plain = [torch.randn(2, 4, time, d, generator=generator, dtype=torch.float64) for _ in range(3 + 2 * steps)]
    given = [values.to(device, dtype).requires_grad_(True) for values in plain]
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda values: values):
        found = attend(given[0], *given[1:])
    plain = [values.detach().cpu().double().requires_grad_(True) for values in given]
    q, k, v, *chain = plain
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
