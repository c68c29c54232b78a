"""A feature head in the role of a draft model: the forward of `FastRunner`, one layer, on features of the target."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from decode.core.errors import UserError
from decode.core.proposal import Draft
from decode.models.eagle.head import FeatureHead, output_head
from decode.models.fast import FastRunner, onto
from decode.models.fast_weights import by_columns, llama_layer, norm, tunable
from decode.models.foreign import DraftModel, ForeignDraft, ForeignRunner
from decode.models.huggingface import Runner, open_runner


def open_draft_runner(draft: DraftModel, target: PreTrainedModel, compile: str = "none") -> Runner:
    """The runner of a draft model, of one of another vocabulary, or of a feature head (never compiled) over its target.

    Args:
        draft: what drafts.
        target: the model it drafts for.
        compile: see `open_runner`.
    """
    if isinstance(draft, FeatureHead):
        return HeadRunner(draft, target)
    if isinstance(draft, ForeignDraft):
        return ForeignRunner(open_runner(draft.model, compile=compile), draft.vocabulary)
    return open_runner(draft, compile=compile)


class HeadRunner(FastRunner):
    """Reads tokens as a draft model does, `length` counting all that are known; the first token makes no pair.

    A token x(t + 1) is paired with the feature of x(t): with the target's where it is among `unread`, otherwise with
    the head's own latest state. `settle` takes what the head drafted back and queues the target's features instead.

    Args:
        head: the feature head.
        target: the model whose embedding (and EAGLE-1's output head) it uses.

    Attributes:
        unread: features ``[n, feature width]`` of the target that wait for the token after theirs.
        hidden: states ``[n, hidden]`` of the latest read.
    """

    unread: Tensor

    def __init__(self, head: FeatureHead, target: PreTrainedModel) -> None:
        self.model: Any = head
        self.source = target
        self.config: Any = head.config
        embedding = head.embed_tokens or target.get_input_embeddings()
        self.embedding = embedding.weight
        self.device, self.dtype = self.embedding.device, self.embedding.dtype
        self.vocab_size = int(target.get_output_embeddings().weight.shape[0])
        self.limit = int(head.config.max_position_embeddings)
        self.taps = head.taps
        self._open()
        if head.version == 1 and embedding.weight.shape[1] != head.config.hidden_size:
            raise UserError("an embedding of another width than the hidden states cannot be shared with a feature head")

    def _open(self) -> None:
        head, config = self.model, self.config
        layer = head.layer
        self.version = head.version
        self.gated, self.parallel, self.window = True, False, None
        self.activation = F.silu
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        self._shape_of(heads, kv_heads, config.head_dim, head.rotary, tunable(head), False)
        if self.version == 3:
            self.norm_embedded, self.norm_state = norm(layer.input_layernorm), norm(layer.hidden_norm)
        self.norm_out = norm(head.norm) if self.version == 3 else None
        self.layers = [llama_layer(layer.self_attn, layer.mlp, None, layer.post_attention_layernorm, self.shape)]
        if self.version == 1:
            linear = output_head(self.source)
            self.head, self.head_bias = linear.weight, linear.bias
        else:
            self.head, self.head_bias = head.lm_head.weight, None
        if self.shape.tuned:
            self.head = by_columns(self.head)
        self.ids = head.draft_ids()
        self.reserve(256)
        self.truncate(0)

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that drafting one token reads, the shared output head among them."""
        own = sum(p.numel() for name, p in self.model.named_parameters() if not name.startswith("embed_tokens"))
        shared = self.head.numel() if self.version == 1 else 0
        if self.version == 3:  # only the pairs of the text go through the fusion
            own -= self.model.fc.weight.numel()
        return (own + shared) * self.dtype.itemsize

    # -- the text ------------------------------------------------------------------------------------------------

    def settle(self, features: Tensor) -> None:
        """Drop all pairs with estimated features, and queue these features of the target, ``[n, feature width]``."""
        self.length = self.settled
        self.unread = features if not len(self.unread) else torch.cat([self.unread, features])

    def truncate(self, length: int) -> None:
        """Know the first `length` tokens only; 0 forgets the queued features too."""
        self.length = length
        if not length:
            self.settled = 0
            self.unread = torch.empty(0, self.model.feature_width, dtype=self.dtype, device=self.device)
            self.hidden = torch.zeros(1, self.config.hidden_size, dtype=self.dtype, device=self.device)

    def read(self, tokens: Tensor, tree: Draft | None = None, head: int | None = None) -> Tensor:
        """See `Runner.read`; with features in the queue, as many as tokens have to be there."""
        assert tree is None, "levels of a tree are read by read_level"
        if not self.length and len(tokens):
            tokens, self.length = tokens[1:], 1
        n = len(tokens)
        if not n:
            return self.embedding.new_empty(0, self.vocab_size)
        true = len(self.unread) > 0
        if true:
            assert n <= len(self.unread), (n, len(self.unread))
            x, self.unread = self.unread[:n], self.unread[n:]
            x = x if self.version == 1 else F.linear(x, self.model.fc.weight)
        else:
            x = self.hidden[-1:].expand(n, -1)
        slot = self.length - 1
        self.hidden = self._run(tokens, x, slot, *self._place(n, None, slot))
        self.length += n
        if true:
            self.settled = self.length
        return self._rows(self.hidden if head is None else self.hidden[n - head :])

    def read_level(self, tokens: Tensor, states: Tensor, seen: Tensor, depth: int) -> Tensor:
        """One level of a draft tree, below the pairs of the text.

        Args:
            tokens: long ``[w]``.
            states: the state that drafted each, ``[w, hidden]``.
            seen: bool ``[w, drafted]``, which of the earlier levels' slots are the ancestors of each.
            depth: levels above this one.

        Returns:
            Logits ``[w, vocab]``; `hidden` holds the states.
        """
        w, slot, past = len(tokens), self.length - 1, self.settled - 1
        self.reserve(slot + w)
        mask = torch.zeros(w, slot + w, dtype=self.dtype, device=self.device)
        own = torch.eye(w, dtype=torch.bool, device=self.device)
        mask[:, past:].masked_fill_(~torch.cat([seen, own], 1), -torch.inf)
        mask = mask.repeat(self.shape.heads // self.shape.kv_heads, 1)
        self.hidden = self._run(tokens, states, slot, self.turns.narrow(0, past + depth, 1), mask)
        self.length += w
        return self._rows(self.hidden)

    # -- the forward ---------------------------------------------------------------------------------------------

    def _run(self, tokens: Tensor, x: Tensor, slot: int, turn: Tensor, mask: Tensor | None) -> Tensor:
        """The layer on embeddings of the tokens and states ``x [n, hidden]``, in the cache slots from `slot` on."""
        e, w = self.embedding.index_select(0, tokens), self.layers[0]
        if self.version == 1:
            x = y = F.linear(torch.cat([e, x], -1), self.model.fc.weight, self.model.fc.bias)
        else:
            y = torch.cat([self.norm_embedded(e), self.norm_state(x)], -1)
        (room,) = self._room(0, 1, slot, len(tokens))
        x = onto(x, self._attention(w, y, turn, mask, *room), w.out, None)
        assert w.norm2 is not None
        return onto(x, self._mlp(w, w.norm2(x)), w.down, None)

    def _rows(self, x: Tensor) -> Tensor:
        """Logits over the target's vocabulary; tokens outside the head's are impossible."""
        logits = F.linear(x if self.norm_out is None else self.norm_out(x), self.head, self.head_bias)
        if self.ids is None:
            return logits
        return logits.new_full((len(x), self.vocab_size), -torch.inf).index_copy_(1, self.ids, logits)
