"""A feature head in the role of a draft model: `FastForward` with one layer, on features of the target."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from decode.draft import Draft
from decode.errors import UserError
from decode.models.families import Shape, Weights, decoder_layer, tunable
from decode.models.fast_forward import FastForward, Mask, cos_and_sin
from decode.models.fast_runner import RowRunner, hand_out
from decode.models.heads import FeatureHead, output_head
from decode.models.ragged_batch import NewTokens
from decode.models.weights import Linears, norm

Level = tuple[Tensor, Tensor, Tensor]
"""Tokens, states and ancestors of one level of a draft tree; see `HeadRunner.read_level`."""


class HeadRunner(RowRunner):
    """Reads tokens as a draft model does, `length` counting all that are known; the first token makes no pair.

    A token x(t + 1) is paired with the feature of x(t): with the target's where it is among `unread`, otherwise with
    the head's own latest state. `settle` takes what the head drafted back and queues the target's features instead.

    Attributes:
        hidden: states ``[n, hidden]`` of the latest read.

    Args:
        head: the feature head.
        target: the model whose embedding (and EAGLE-1's output head) it uses.
        pack: see `decode.models.choose_runner.open_runner`.
    """

    unread: Tensor  # features ``[n, feature width]`` of the target that wait for the token after theirs
    settled: int

    def __init__(self, head: FeatureHead, target: PreTrainedModel, pack: str = "off") -> None:
        embedding, layer, config = head.embed_tokens or target.get_input_embeddings(), head.layer, head.config
        if head.version == 1 and embedding.weight.shape[1] != config.hidden_size:
            raise UserError(
                f"the EAGLE-1 head has width {config.hidden_size} and the target's embedding "
                f"{embedding.weight.shape[1]}; give the target that the head was trained for"
            )
        linear = output_head(target, head.draft_ids()) if head.version == 1 else head.lm_head
        rotated = cos_and_sin(head.rotary, 1, embedding.weight.dtype, embedding.weight.device)[0].shape[-1]
        tuned = tunable(head) and config.head_dim % 2 == 0
        shape = Shape(
            config.num_attention_heads, config.num_key_value_heads, config.head_dim, rotated, tuned=tuned, folded=tuned
        )
        make = Linears(pack, copies=tuned, half=pack == "auto")
        weights = Weights(
            shape,
            [decoder_layer("llama", layer, shape, make, normed=True)],
            F.silu,
            gated=True,
            parallel=False,
            window=None,
            embedding=embedding.weight,
            final_norm=norm(head.norm) if head.version == 3 else lambda x: x,
            head=make(linear.weight, linear.bias),
        )
        self.forward, self._texts = FastForward(weights, head.rotary), []
        # Gemma's embedding is more than its table
        self._embed = self.forward.embed if type(embedding) is nn.Embedding else embedding
        super().__init__(
            f"the EAGLE-{head.version} head",
            device=self.forward.device,
            dtype=self.forward.dtype,
            vocab_size=int(target.get_output_embeddings().weight.shape[0]),
            limit=int(config.max_position_embeddings),
            model=head,
        )
        self.tree_refusal = "levels of a tree are read by read_level"
        self.feature_head, self.version = head, head.version
        self.fuse = make(head.fc.weight, head.fc.bias)
        self.packing, self._saved = make.sentence(), make.bytes["float16"]
        if head.version == 3:
            self.norm_embedded, self.norm_state = norm(layer.input_layernorm), norm(layer.hidden_norm)
        self.draft_ids = head.draft_ids()
        self.truncate(0)

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that drafting one token reads, the shared output head among them."""
        own = sum(p.numel() for name, p in self.feature_head.named_parameters() if not name.startswith("embed_tokens"))
        shared = self.forward.weights.head.rows * self.feature_head.config.hidden_size if self.version == 1 else 0
        total = (own + shared) * self.dtype.itemsize - self._saved
        # only the pairs of the text go through EAGLE-3's fusion
        return total - self.fuse.bytes if self.version == 3 else total

    @property
    def length(self) -> int:
        """Tokens that are known."""
        return self._length

    def fork(self, count: int) -> list[HeadRunner]:  # type: ignore[override]
        """See `Runner.fork`: in rows of the same cache."""
        forks = [copy.copy(self) for _ in range(count)]
        for fork in forks:  # a method that is wrapped to be timed stays this one's
            for name in [name for name in vars(fork) if hasattr(HeadRunner, name)]:
                vars(fork).pop(name)
        self.share(forks)
        for fork in forks:
            fork.truncate(0)
        return forks

    # -- the text ------------------------------------------------------------------------------------------------

    def settle(self, features: Tensor) -> None:
        """Drop all pairs with estimated features, and queue these features of the target, ``[n, feature width]``."""
        self._length = self.settled
        self.unread = features if not len(self.unread) else torch.cat([self.unread, features])

    def truncate(self, length: int) -> None:
        """Know the first `length` tokens only; 0 forgets the queued features too."""
        self._length = length
        if not length:
            self.settled = 0
            self.unread = torch.empty(0, self.feature_head.feature_width, dtype=self.dtype, device=self.device)
            self.hidden = torch.zeros(1, self.feature_head.config.hidden_size, dtype=self.dtype, device=self.device)

    def read(self, tokens: Tensor, tree: Draft | None = None, head: int | None = None) -> Tensor:
        """See `Runner.read`; with features in the queue, as many as tokens have to be there."""
        assert tree is None, self.tree_refusal
        return self.expand(self.read_own(tokens, head))

    def read_own(self, tokens: Tensor, head: int | None = None) -> Tensor:
        """`read` a chain; logits over the head's own vocabulary ``[n or head, draft vocab]``."""
        true = len(self.unread) > 0
        tokens, x = self._pairs(tokens)
        n = len(tokens)
        if not n:
            return self.hidden.new_empty(0, self.forward.weights.head.rows)
        if true and self.version == 3:
            x = self.fuse(x)
        slot = self.length - 1
        self.hidden = self._run(tokens, x, slot, *self.forward.place(n, None, slot, self._row))
        self._grow(n, true)
        return self.forward.project(self.hidden if head is None else self.hidden[n - head :])[0]

    def read_texts(
        self,
        texts: Sequence[HeadRunner],
        tokens: Tensor,
        counts: Sequence[int],
        trees: Sequence[Draft | None] | None = None,
        *,
        last_only: bool = False,
    ) -> Tensor:
        """See `Runner.read_texts`: in one forward where all texts have features in the queue, or none has."""
        true = len(texts[0].unread) > 0
        if any((len(text.unread) > 0) != true or text.length + n < 2 for text, n in zip(texts, counts)):
            return super().read_texts(texts, tokens, counts, trees, last_only=last_only)
        fed, states = zip(*(text._pairs(own) for text, own in zip(texts, tokens.split(list(counts)))))
        counts = list(map(len, fed))
        x = torch.cat(states)
        if true and self.version == 3:
            x = self.fuse(x)
        new = [NewTokens(text._row, text.length - 1, n) for text, n in zip(texts, counts)]
        rotary, together = self.forward.place_texts(new)
        hidden = self._run(torch.cat(fed), x, 0, rotary, together)
        hand_out(texts, hidden, counts)
        for text, n in zip(texts, counts):
            text._grow(n, true)
        return self.expand(self.forward.project(hidden.index_select(0, together.last) if last_only else hidden)[0])

    def _pairs(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """The tokens that are read, without a text's first, and the state or feature that each is paired with."""
        if not self._length and len(tokens):
            tokens, self._length = tokens[1:], 1
        n = len(tokens)
        if not len(self.unread):
            return tokens, self.hidden[-1:].expand(n, -1)
        assert n <= len(self.unread), (n, len(self.unread))
        x, self.unread = self.unread[:n], self.unread[n:]
        return tokens, x

    def _grow(self, count: int, true: bool) -> None:
        """So many pairs have been read, with the target's features or with estimates."""
        self._length += count
        if true:
            self.settled = self._length

    def read_level(self, tokens: Tensor, states: Tensor, seen: Tensor, depth: int) -> Tensor:
        """One level of a draft tree, below the pairs of the text.

        Args:
            tokens: long ``[w]``.
            states: the state that drafted each, ``[w, hidden]``.
            seen: bool ``[w, drafted]``, which of the earlier levels' slots are the ancestors of each.
            depth: levels above this one.

        Returns:
            Logits over the head's own vocabulary ``[w, draft vocab]``; `hidden` holds the states.
        """
        if self.forward.rows > 1:
            return self.read_levels([self], [(tokens, states, seen)], depth)[0]
        w, slot, past = len(tokens), self.length - 1, self.settled - 1
        self.forward.reserve(slot + w)
        own = torch.eye(w, dtype=torch.bool, device=self.device)
        mask = self.forward.mask_behind(past, torch.cat([seen, own], 1))
        self.hidden = self._run(tokens, states, slot, self.forward.rotary_factors.narrow(0, past + depth, 1), mask)
        self._length += w
        return self.forward.project(self.hidden)[0]

    def read_levels(self, texts: Sequence[HeadRunner], levels: Sequence[Level], depth: int) -> list[Tensor]:
        """`read_level` of several texts in one forward, given (tokens, states, seen) of each.

        Returns:
            Logits ``[w, draft vocab]`` of each.
        """
        tokens, states, _ = zip(*levels)
        counts = list(map(len, tokens))
        new = [text._level(seen, n, depth) for text, (_, _, seen), n in zip(texts, levels, counts)]
        hidden = self._run(torch.cat(tokens), torch.cat(states), 0, *self.forward.place_texts(new))
        hand_out(texts, hidden, counts)
        for text, n in zip(texts, counts):
            text._length += n
        return list(self.forward.project(hidden)[0].split(counts))

    def _level(self, seen: Tensor, count: int, depth: int) -> NewTokens:
        """Where the tokens of a level belong; see `read_level`."""
        slot, past = self.length - 1, self.settled - 1
        text = torch.ones(count, past, dtype=torch.bool, device=self.device)
        own = torch.eye(count, dtype=torch.bool, device=self.device)
        return NewTokens(self._row, slot, count, [past + depth - slot] * count, torch.cat([text, seen, own], 1))

    # -- the forward ---------------------------------------------------------------------------------------------

    def _run(self, tokens: Tensor, x: Tensor, slot: int, rotary: Tensor, mask: Mask) -> Tensor:
        """The layer on embeddings of the tokens and states ``x [n, hidden]``, in the cache slots from `slot` on."""
        forward = self.forward
        e, layer = self._embed(tokens), forward.layers[0]
        if self.version == 1:
            x = y = self.fuse(torch.cat([e, x], -1))
        else:
            y = torch.cat([self.norm_embedded(e), self.norm_state(x)], -1)
        (slots,) = forward.slots(0, 1, slot, len(tokens), mask)
        x = layer.out.add_to(x, forward.attention(layer, layer.qkv(y), rotary, mask, slots))
        assert layer.norm2 is not None
        return layer.down.add_to(x, forward.mlp(layer, layer.norm2(x)))

    def expand(self, logits: Tensor) -> Tensor:
        """From the head's vocabulary to the target's; tokens outside the head's are impossible."""
        if self.draft_ids is None:
            return logits
        return logits.new_full((len(logits), self.vocab_size), -torch.inf).index_copy_(1, self.draft_ids, logits)

    def reduce(self, logits: Tensor) -> Tensor:
        """From the target's vocabulary to the head's."""
        return logits if self.draft_ids is None else logits.index_select(1, self.draft_ids)
