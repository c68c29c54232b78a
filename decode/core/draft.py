"""What a drafter hands to the target: a token tree below the pending token."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

Ids = list[int]  # token ids


def id_tensor(ids: Ids) -> Tensor:
    """Token ids, long ``[n]``, in half of `torch.tensor`'s time."""
    return torch.from_numpy(np.asarray(ids, dtype=np.int64))


def foreign(ids: Iterable[int], rows: int, held: str = "the prompt holds", whose: str = "the target's") -> str:
    """What is wrong with ids that have no row in an embedding; empty where all have."""
    unknown = next((i for i in ids if not 0 <= i < rows), None)
    if unknown is None:
        return ""
    return (
        f"{held} token id {unknown}, but {whose} ids are 0 to {rows - 1}; was it tokenised with another model's "
        "tokenizer, or with a token whose row the model was not given (model.resize_token_embeddings)?"
    )


def until_end(ids: Ids, ends: Collection[int | None]) -> Ids:
    """The ids up to and with the first of `ends`."""
    return ids[: next((count for count, token in enumerate(ids, 1) if token in ends), None)]


@dataclass
class Draft:
    """A proposed token tree; a chain is the tree with parents ``-1, 0, 1, …``."""

    tokens: Tensor  # token ids, long ``[n]``; ``n`` may be 0
    parents: list[int]  # for each node the index of its parent, smaller than its own; -1 is the pending token
    # float ``[n, vocab]``, the warped distribution that each token was drawn from, the very tensor that was sampled.
    # ``None`` means that the draft is deterministic.
    probs: Tensor | None = None
    logits: Tensor | None = None  # the raw draft logits ``[n, vocab]``, for rules that look at unwarped distributions
    confidence: list[float] = field(default_factory=list)  # what the stop rule read at each token

    @classmethod
    def chain(
        cls,
        tokens: Tensor,
        probs: Tensor | None = None,
        logits: Tensor | None = None,
        confidence: list[float] | None = None,
    ) -> Draft:
        """A chain below the pending token."""
        return cls(tokens, list(range(-1, tokens.shape[0] - 1)), probs, logits, confidence or [])

    @classmethod
    def tree(cls, tokens: Ids, parents: Sequence[int]) -> Draft:
        """A deterministic tree. Raises ValueError where a parent does not precede its child."""
        if len(tokens) != len(parents) or any(not -1 <= p < i for i, p in enumerate(parents)):
            raise ValueError(f"parents must precede their children, got {list(parents)}")
        return cls(id_tensor(tokens), list(parents))

    @classmethod
    def empty(cls) -> Draft:
        """Nothing proposed: the round becomes a plain autoregressive step."""
        return cls(torch.empty(0, dtype=torch.long), [])

    def with_branch(self, tokens: Ids) -> Draft:
        """This deterministic tree and a chain below the pending token; what both hold is drafted once."""
        tree = Trie(self)
        tree.grow(tokens)
        return tree.draft() if len(tree.tokens) > len(self) else self

    def __len__(self) -> int:
        return len(self.parents)

    @cached_property
    def is_chain(self) -> bool:
        """Whether every node is the only child of the one before it."""
        return self.parents == list(range(-1, len(self.parents) - 1))

    @cached_property
    def ids(self) -> Ids:
        """The tokens on the host, fetched once."""
        return self.tokens.tolist()

    @cached_property
    def depth(self) -> int:
        """Length of the longest path; the number of tokens of a chain."""
        return len(self) if self.is_chain else max(self.depths(), default=0)

    def depths(self) -> list[int]:
        """Distance of every node from the pending token (a root-level node has depth 1)."""
        depths: list[int] = []
        for p in self.parents:
            depths.append(1 if p < 0 else depths[p] + 1)
        return depths

    @cached_property
    def children(self) -> list[dict[int, int]]:
        """``children[i + 1][token]`` is the child of node i with that token (index 0: the pending token)."""
        table: list[dict[int, int]] = [{} for _ in range(len(self) + 1)]
        for node, (token, parent) in enumerate(zip(self.ids, self.parents)):
            table[parent + 1].setdefault(token, node)
        return table

    def visible(self) -> Tensor:
        """bool ``[n + 1, n + 1]`` of the pending token and the nodes: which of them each attends to."""
        seen = np.eye(len(self) + 1, dtype=bool)
        seen[:, 0] = True
        for i, p in enumerate(self.parents):
            seen[i + 1] |= seen[p + 1]
        return torch.from_numpy(seen)

    def prefixes(self, ids: Ids) -> list[Tensor]:
        """The text before each row of the target: of the pending token `ids`, of a node also the path down to it."""
        texts = [id_tensor(ids)]
        for token, parent in zip(self.tokens.cpu().split(1), self.parents):
            texts.append(torch.cat([texts[parent + 1], token]))
        return texts


class Trie:
    """A token tree under construction; node -1 is the pending token, siblings carry different tokens."""

    def __init__(self, draft: Draft | None = None) -> None:
        self.tokens, self.parents = (list(draft.ids), list(draft.parents)) if draft else ([], [])
        self._index: dict[tuple[int, int], int] = {}
        for node, place in enumerate(zip(self.parents, self.tokens)):
            self._index.setdefault(place, node)

    def add(self, parent: int, token: int) -> int:
        """The child of ``parent`` that carries ``token``, made if it is missing."""
        node = self._index.setdefault((parent, token), len(self.tokens))
        if node == len(self.tokens):
            self.tokens.append(token)
            self.parents.append(parent)
        return node

    def grow(self, tokens: Iterable[int]) -> None:
        """Hold this chain below the pending token; what the tree holds already is held once."""
        node = -1
        for token in tokens:
            node = self.add(node, token)

    def draft(self) -> Draft:
        """The deterministic draft of this tree."""
        return Draft.tree(self.tokens, self.parents)
