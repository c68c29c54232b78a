"""Heads in decoding: features of the target that wait to be read, caches, and the runner of an EAGLE head."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from decode.models.api import Capture, Out, Read, joined
from decode.models.fast.cache import KVCache, NewTokens, Row
from decode.models.fast.forward import FastForward, RowRunner
from decode.models.fast.layout import Kind, Shape, Weights, decoder_layer, tunable
from decode.models.fast.weights import Function, Linears, norm
from decode.models.heads.eagle import FeatureHead, output_head


class Features:
    """The target's features of a text ``[n, width]`` that wait to be read, in the pieces that came.

    They are joined when they are read: a text may be decoded for long without a draft.
    """

    def __init__(self) -> None:
        self.clear()

    def __len__(self) -> int:
        return self._count

    def put(self, features: Tensor) -> None:
        """Add features at the end."""
        self._pieces.append(features)
        self._count += len(features)

    def take(self, count: int) -> Tensor:
        """The first `count` features, which wait no longer."""
        every = joined(self._pieces)
        self.clear()
        if count < len(every):
            self.put(every[count:])
        return every[:count]

    def clear(self) -> None:
        """Drop all features."""
        self._pieces, self._count = list[Tensor](), 0


class FeatureRow(Row):
    """The cache of a head's sequence, and the features of the target ``[n, feature width]`` that it has not read."""

    def __init__(self, memory: KVCache, row: int) -> None:
        super().__init__(memory, row)
        self.unread = Features()

    def settle(self, features: Tensor) -> None:
        """Queue the target's features of tokens that the sequence will keep."""
        self.unread.put(features)

    def truncate(self, length: int) -> None:
        """See `Cache.truncate`; 0 forgets the queued features too."""
        super().truncate(length)
        if not length:
            self.unread.clear()


class HeadCache(FeatureRow):
    """Pairs of a token x(t + 1) and the feature of x(t), the target's or an estimate.

    Attributes:
        length: tokens that are known; the first one makes no pair.
        settled: how many of them are paired with features of the target.
        state: the head's latest state ``[1, hidden]``, the estimate that the next token is paired with.
    """

    state: Tensor
    settled = 0

    @property
    def known(self) -> int:
        """See `Row.known`; the first token takes no slot."""
        return max(0, self.length - 1)

    def settle(self, features: Tensor) -> None:
        """Drop all pairs with estimated features, and queue these features of the target."""
        self.length = self.settled
        super().settle(features)

    def truncate(self, length: int) -> None:
        """See `Cache.truncate`."""
        super().truncate(length)
        self.settled = min(self.settled, length)


def in_target(logits: Tensor, ids: Tensor | None, vocab: int) -> Tensor:
    """Logits ``[rows, draft vocab]`` over the target's vocabulary, cut or filled; ids that it lacks are impossible."""
    if ids is not None:
        return logits.new_full((len(logits), vocab), -torch.inf).index_copy_(1, ids, logits)
    missing = vocab - logits.shape[1]
    return F.pad(logits, (0, missing), value=-torch.inf) if missing else logits


class DraftHeadRunner(RowRunner):
    """The layers of a head in the role of a draft model: `FastForward` on the target's embedding and output head.

    `make` chooses the layout of each weight, as subclasses do for those outside the layers; `windows` are those of the
    layers' attention, by default none.
    """

    def __init__(
        self,
        head: Any,
        target: PreTrainedModel,
        layers: Sequence[Any],
        pack: str,
        name: str,
        refusal: str,
        windows: Sequence[int | None] = (None,),
    ) -> None:
        config, self.head, columns = head.config, head, head.draft_ids()
        bare = isinstance(head, FeatureHead)  # `FeatureHead.pairs` norms what attention reads
        linear = head.lm_head if hasattr(head, "lm_head") else output_head(target, columns, block=not bare)
        final = hasattr(head, "norm") and not getattr(head, "normed_states", False)
        tuned, heads, d = tunable(head), config.num_attention_heads, config.head_dim
        self.shape = Shape(heads, config.num_key_value_heads, d, d, tuned=tuned, folded=tuned and bare)
        self.make = make = Linears(pack, copies=tuned, half=pack == "auto")
        of_layers = [decoder_layer("llama", layer, self.shape, make, normed=bare) for layer in layers]
        kinds = list(dict.fromkeys(windows))
        for layer, window in zip(of_layers, windows):
            layer.kind = kinds.index(window)
        self.network = FastForward(
            Weights(
                self.shape,
                of_layers,
                F.silu if config.hidden_act == "silu" else layers[0].mlp.act_fn,
                gated=True,
                parallel=False,
                kinds=list(map(Kind, kinds)),
                embedding=(getattr(head, "embed_tokens", None) or target.get_input_embeddings()).weight,
                final_norm=norm(head.norm) if final else lambda x: x,
                head=make(linear.weight, linear.bias),
            ),
            head.rotary,
        )
        read = sum(p.numel() for layer in layers for p in layer.parameters()) + linear.weight.numel()
        super().__init__(
            name,
            device=self.network.device,
            dtype=self.network.dtype,
            vocab_size=len(target.get_output_embeddings().weight),
            limit=config.max_position_embeddings,
            model=head,
            weight_bytes=read * self.network.dtype.itemsize - make.bytes["in float16"],
            cache_bytes_per_token=self.network.cache.bytes_per_token,
            columns=columns,
            tree_refusal=refusal,
        )

    def target_ids(self, tokens: Tensor) -> Tensor:
        """Tokens from the head's vocabulary to the target's."""
        return tokens if self.columns is None else self.columns[tokens]


class HeadRunner(DraftHeadRunner):
    """Reads tokens as a draft model does.

    A token is paired with the target's feature where it is among `HeadCache.unread`, otherwise with the head's own
    latest state. `HeadCache.settle` drops what the head drafted and queues the target's features instead.
    """

    head: FeatureHead
    row = HeadCache

    def __init__(self, head: FeatureHead, target: PreTrainedModel, pack: str = "off") -> None:
        refusal = "levels of a tree are read by `read_levels`"
        super().__init__(head, target, [head.layer], pack, f"the EAGLE-{head.version} head", refusal)
        self.fc = self.make(head.fc.weight, head.fc.bias)
        self.parts: tuple[Function, ...] = (self.fc,) if head.version == 1 else tuple(map(norm, head.parts))
        # EAGLE-1 reads its fusion for each token, EAGLE-3 for the text's only
        self.weight_bytes += self.fc.bytes if head.version == 1 else 0
        self.packing = self.make.sentence()
        embedding = head.embed_tokens or target.get_input_embeddings()
        # Gemma's embedding is more than its table
        self._embed = self.network.embed if type(embedding) is nn.Embedding else embedding
        self._norm = norm(head.norm) if head.normed_states else None

    def forward(self, reads: Sequence[Read], *, capture: Capture = (), last: int | None = None) -> Out:
        """See `Model.forward`; features wait for all of the texts, as many as tokens are read, or for none."""
        true, new, tokens, states = len(reads[0].cache.unread) > 0, [], [], []
        for read in reads:
            cache, ids = read.cache, read.tokens
            if not cache.length:
                ids, cache.length = ids[1:], 1
            n = ids.shape[0]
            new.append(NewTokens(cache, cache.length - 1, n))
            tokens.append(ids)
            states.append(cache.unread.take(n) if true else cache.state.expand(n, -1))
        x = self.head.fuse(joined(states), self.fc) if true else joined(states)
        every = self._layer(joined(tokens), x, new)
        ends = [every] if len(new) == 1 else list(every.split([text.count for text in new]))
        for i, text in enumerate(new):
            cache, n = text.cache, text.count
            cache.length, cache.state = cache.length + n, ends[i][-1:]
            if true:
                cache.settled = cache.length
            if last is not None and last < n:
                ends[i] = ends[i][n - last :]
        return self._out(joined(ends) if last is not None else every)

    def read_level(self, caches: Sequence[HeadCache], tokens: Tensor, states: Tensor, seen: Tensor, above: int) -> Out:
        """Read a level of a tree of each text, which follows its pairs; logits as of `forward`.

        Args:
            caches: of the texts.
            tokens: of the level, ``[texts, n]``.
            states: that drafted them, ``[texts, n, hidden]``.
            seen: which of the earlier levels' slots, and of its own, each sees, bool ``[texts, n, drafted + n]``.
            above: number of earlier levels.
        """
        new, n = [], tokens.shape[1]
        for cache, mine in zip(caches, seen):
            slot = cache.length - 1
            new.append(NewTokens(cache, slot, n, [cache.settled - 1 + above - slot] * n, mine))
        hidden = self._layer(tokens.flatten(), states.flatten(0, 1), new)
        for text in new:
            text.cache.length += n
        return self._out(hidden)

    def _layer(self, tokens: Tensor, x: Tensor, new: Sequence[NewTokens]) -> Tensor:
        """The states of tokens that are paired with states ``x [n, hidden]``."""
        network = self.network
        x, y = self.head.pairs(self._embed(tokens), x, self.parts)
        x = network.run(x, 0, 1, network.place(new), network.layers[0].qkv(y))
        return x if self._norm is None else self._norm(x)

    def _out(self, hidden: Tensor) -> Out:
        """The output of these states."""
        return Out(self.network.project(hidden)[0], hidden)
