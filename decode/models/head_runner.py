"""A feature head in the role of a draft model: `FastForward` with one layer, on features of the target."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from decode.draft import Draft
from decode.models.families import Kind, Shape, Weights, decoder_layer, tunable
from decode.models.fast_forward import FastForward, Placed
from decode.models.fast_runner import RowRunner
from decode.models.heads import DraftHead, FeatureHead, output_head
from decode.models.ragged_batch import KVCache, NewTokens, Row
from decode.models.runner import Output, joined
from decode.models.weights import Linears, norm


class HeadCache(Row):
    """The cache of one sequence: pairs of a token x(t + 1) and the feature of x(t), the target's or an estimate.

    Attributes:
        length: tokens that are known; the first one makes no pair.
        settled: how many of them are paired with features of the target.
        unread: features ``[n, feature width]`` of the target that wait for the token after theirs.
        state: the head's latest state ``[1, hidden]``, the estimate that the next token is paired with.
    """

    def __init__(self, memory: KVCache, row: int, unread: Tensor, state: Tensor) -> None:
        super().__init__(memory, row)
        self.unread, self.state, self.settled = unread, state, 0

    def settle(self, features: Tensor) -> None:
        """Drop all pairs with estimated features, and queue these features of the target, ``[n, feature width]``."""
        self.length = self.settled
        self.unread = torch.cat([self.unread, features]) if len(self.unread) else features

    def truncate(self, length: int) -> None:
        """Know the first `length` tokens only; 0 forgets the queued features too."""
        self.length = length
        if not length:
            self.settled, self.state = 0, torch.zeros_like(self.state)
            self.unread = self.unread.new_empty(0, self.unread.shape[1])  # a view would keep all features

    def pairs(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """The tokens that are read, without a sequence's first, and the feature that each is paired with."""
        if not self.length and len(tokens):
            tokens, self.length = tokens[1:], 1
        n = len(tokens)
        if not len(self.unread):
            return tokens, self.state.expand(n, -1)
        assert n <= len(self.unread), (n, len(self.unread))
        x, self.unread = self.unread[:n], self.unread[n:]
        return tokens, x


class DraftHeadRunner(RowRunner):
    """What the runners of all heads have: the layers' facts, and the way from the head's vocabulary to the target's.

    Args:
        name: of the head, for messages.
        network: its layers.
        head: the module.
        target: the model that it drafts for.
        make: made its products.
        tree_refusal: see `Runner`.

    Attributes:
        draft_ids: see `DraftHead.draft_ids`.
    """

    def __init__(
        self,
        name: str,
        network: FastForward,
        head: DraftHead,
        target: PreTrainedModel,
        make: Linears,
        tree_refusal: str,
    ) -> None:
        self.network = network
        super().__init__(
            name,
            device=network.device,
            dtype=network.dtype,
            vocab_size=len(target.get_output_embeddings().weight),
            limit=head.config.max_position_embeddings,
            model=head,
            cache_bytes_per_token=network.cache.bytes_per_token,
            packing=make.sentence(),
            tree_refusal=tree_refusal,
        )
        self.draft_ids = head.draft_ids()

    def expand(self, logits: Tensor) -> Tensor:
        """From the head's vocabulary to the target's; tokens outside the head's are impossible."""
        if self.draft_ids is None:
            return logits
        return logits.new_full((len(logits), self.vocab_size), -torch.inf).index_copy_(1, self.draft_ids, logits)


class HeadRunner(DraftHeadRunner):
    """Reads tokens as a draft model does.

    A token is paired with the target's feature where it is among `HeadCache.unread`, otherwise with the head's own
    latest state. `HeadCache.settle` drops what the head drafted and queues the target's features instead.

    Args:
        head: the feature head.
        target: the model whose embedding (and EAGLE-1's output head) it uses.
        pack: see `decode.models.choose_runner.open_runner`.
    """

    def __init__(self, head: FeatureHead, target: PreTrainedModel, pack: str = "off") -> None:
        embedding, layer, config = head.embed_tokens or target.get_input_embeddings(), head.layer, head.config
        linear = output_head(target, head.draft_ids()) if head.version == 1 else head.lm_head
        tuned, heads, d = tunable(head), config.num_attention_heads, config.head_dim
        shape = Shape(heads, config.num_key_value_heads, d, d, tuned=tuned, folded=tuned)
        make = Linears(pack, copies=tuned, half=pack == "auto")
        weights = Weights(
            shape,
            [decoder_layer("llama", layer, shape, make, normed=True)],
            F.silu if config.hidden_act == "silu" else layer.mlp.act_fn,
            gated=True,
            parallel=False,
            kinds=[Kind()],
            embedding=embedding.weight,
            final_norm=norm(head.norm) if head.version == 3 and not head.normed_states else lambda x: x,
            head=make(linear.weight, linear.bias),
        )
        network, self.fuse = FastForward(weights, head.rotary), make(head.fc.weight, head.fc.bias)
        # Gemma's embedding is more than its table
        self._embed = network.embed if type(embedding) is nn.Embedding else embedding
        name = f"the EAGLE-{head.version} head"
        super().__init__(name, network, head, target, make, "levels of a tree are read by forward_level")
        self.feature_head, self.version = head, head.version
        # drafting a token reads the shared output head too; EAGLE-3's fusion only reads the pairs of the text
        read = [p.numel() for name, p in head.named_parameters() if not name.startswith("embed_tokens")]
        read += [linear.weight.numel()] * (head.version == 1)
        self.weight_bytes = sum(read) * self.dtype.itemsize - make.bytes["in float16"]
        if head.version == 3:
            self.weight_bytes -= self.fuse.bytes
            self.norm_embedded, self.norm_state = norm(layer.input_layernorm), norm(layer.hidden_norm)
            self.norm_output = norm(head.norm)

    def new_cache(self) -> HeadCache:
        """See `Runner.new_cache`."""
        like, head = self.network.weights.embedding, self.feature_head
        state = like.new_zeros(1, head.config.hidden_size)
        return self.network.cache.new_row(HeadCache, like.new_zeros(0, head.feature_width), state)

    def forward(
        self,
        caches: Sequence[HeadCache],
        tokens: Sequence[Tensor],
        trees: Sequence[Draft | None] | None = None,
        *,
        capture: tuple[int, ...] = (),
        last: int | None = None,
    ) -> Output:
        """See `Runner.forward`; with features in the queue, as many as tokens have to be there."""
        out = self.forward_pairs(caches, tokens, last)
        return Output(self.expand(out.logits), out.hidden)

    def forward_pairs(self, caches: Sequence[HeadCache], tokens: Sequence[Tensor], last: int | None = None) -> Output:
        """`forward` of chains; logits are over the head's own vocabulary ``[rows, draft vocab]``."""
        true = [len(cache.unread) > 0 for cache in caches]
        if len(caches) > 1 and (len(set(true)) > 1 or any(c.length + len(own) < 2 for c, own in zip(caches, tokens))):
            return Output.join([self.forward_pairs([c], [own], last) for c, own in zip(caches, tokens)])
        read, features = zip(*(cache.pairs(own) for cache, own in zip(caches, tokens)))
        counts = [len(own) for own in read]
        if not sum(counts):
            return Output(caches[0].state.new_empty(0, self.network.weights.head.rows), caches[0].state[:0])
        x = joined(features)
        x = self.fuse(self.feature_head.normed(x)) if true[0] and self.version == 3 else x
        new = [NewTokens(cache, cache.length - 1, n) for cache, n in zip(caches, counts)]
        hidden = self._layer(joined(read), x, self.network.place(new))
        ends = hidden.split(counts)
        for cache, n, own in zip(caches, counts, ends):
            cache.length, cache.state = cache.length + n, own[-1:]
            if true[0]:
                cache.settled = cache.length
        if last is not None:
            hidden = joined([own[len(own) - last :] for own in ends])
        return Output(self.network.project(hidden)[0], hidden)

    def forward_level(
        self,
        caches: Sequence[HeadCache],
        tokens: Sequence[Tensor],
        states: Sequence[Tensor],
        seen: Sequence[Tensor],
        depth: int,
    ) -> Output:
        """Read one level of draft trees, which follow the pairs of their sequences.

        Args:
            caches: one of each sequence.
            tokens: of each, long ``[w]``.
            states: the states that drafted them, ``[w, hidden]`` of each.
            seen: bool ``[w, drafted]`` of each, on the host: which of the earlier levels' slots are ancestors of each
                token.
            depth: levels above this one.

        Returns:
            Logits over the head's own vocabulary ``[w, draft vocab]`` of each, and the new states.
        """
        new = []
        for cache, own, before in zip(caches, tokens, seen):
            w, slot = len(own), cache.length - 1
            mask = torch.cat([before, torch.eye(w, dtype=torch.bool)], 1)
            new.append(NewTokens(cache, slot, w, [cache.settled - 1 + depth - slot] * w, mask))
        hidden = self._layer(joined(tokens), joined(states), self.network.place(new))
        for cache, own in zip(caches, tokens):
            cache.length += len(own)
        return Output(self.network.project(hidden)[0], hidden)

    def _layer(self, tokens: Tensor, x: Tensor, placed: Placed) -> Tensor:
        """The layer on embeddings of the tokens and states ``x [n, hidden]``."""
        network = self.network
        e, layer = self._embed(tokens), network.layers[0]
        if self.version == 1:
            x = y = self.fuse(torch.cat([e, x], -1))
        else:
            state = self.norm_state(x)
            x, y = state if self.feature_head.normed_residual else x, torch.cat([self.norm_embedded(e), state], -1)
        (slots,) = network.slots(0, 1, placed)
        x = layer.out.add_to(x, network.attention(layer, layer.qkv(y), placed, slots))
        assert layer.norm2 is not None
        x = layer.down.add_to(x, network.mlp(layer, layer.norm2(x)))
        return self.norm_output(x) if self.feature_head.normed_states else x

    def reduce(self, logits: Tensor) -> Tensor:
        """From the target's vocabulary to the head's."""
        return logits if self.draft_ids is None else logits.index_select(1, self.draft_ids)
