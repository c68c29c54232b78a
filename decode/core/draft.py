"""What drafters hand to the target: for each text a token tree below its pending token."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

Ids = list[int]  # token ids


def upload(values: Any, device: torch.device, dtype: torch.dtype = torch.long) -> Tensor:
    """Numbers from the host on a device; an accelerator is not waited for."""
    held = torch.as_tensor(values, dtype=dtype)
    if device.type == "cpu" or not held.is_cpu:
        return held
    return held.pin_memory().to(device, non_blocking=True)


def upload_all(lists: Sequence[Sequence[int]], device: torch.device) -> list[Tensor]:
    """Lists of integers as tensors on a device, by one copy."""
    return list(upload([*chain(*lists)], device).split(list(map(len, lists))))


def fetch(*tensors: Tensor) -> list[Any]:
    """The values of tensors on one device, as lists; an accelerator is waited for once."""
    if tensors[0].is_cpu:
        return [values.tolist() for values in tensors]
    packed = torch.cat([values.flatten().double() for values in tensors]).cpu()
    parts = packed.split([values.numel() for values in tensors])
    return [part.view(values.shape).to(values.dtype).tolist() for part, values in zip(parts, tensors)]


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


class Draft:
    """The tokens proposed for one text, on the host: a tree below the pending token, which never changes.

    A chain is the tree with parents ``-1, 0, 1, …``. Numbers are kept in arrays: a trace holds many drafts.
    """

    __slots__ = ("_ids", "confidence", "is_chain", "parents")

    def __init__(
        self, ids: Iterable[int], parents: Sequence[int] | None = None, confidence: Sequence[float] = ()
    ) -> None:
        self._ids, self.confidence = array("i", ids), confidence  # what the stop rule read at each token
        chain = range(-1, len(self._ids) - 1)
        if parents is not None and (
            len(parents) != len(chain) or any(not -1 <= parent < i for i, parent in enumerate(parents))
        ):
            raise ValueError(f"parents must precede their children, got {list(parents)}")
        # whether every node is the only child of the one before it
        self.is_chain = parents is None or list(parents) == list(chain)
        # of each node the index of its parent, smaller than its own; -1 is the pending token
        self.parents: Sequence[int] = chain if self.is_chain else array("i", parents)  # type: ignore[arg-type]

    def __len__(self) -> int:
        return len(self._ids)

    @property
    def ids(self) -> Ids:
        """The tokens."""
        return self._ids.tolist()

    @property
    def depth(self) -> int:
        """Length of the longest path; the number of tokens of a chain."""
        return len(self) if self.is_chain else max(self.depths(), default=0)

    def depths(self) -> list[int]:
        """Distance of every node from the pending token (a root-level node has depth 1)."""
        depths: list[int] = []
        for p in self.parents:
            depths.append(1 if p < 0 else depths[p] + 1)
        return depths

    def children(self) -> list[dict[int, int]]:
        """``children[i + 1][token]`` is the child of node i with that token (index 0: the pending token)."""
        table: list[dict[int, int]] = [{} for _ in range(len(self) + 1)]
        for node, (token, parent) in enumerate(zip(self._ids, self.parents)):
            table[parent + 1].setdefault(token, node)
        return table

    def with_branch(self, tokens: Ids) -> Draft:
        """This tree and a chain below the pending token; what both hold is drafted once."""
        tree = Trie(self)
        tree.grow(tokens)
        return tree.draft() if len(tree.tokens) > len(self) else self

    def cut(self, ends: Collection[int], depth: int) -> tuple[Draft, dict[int, int]]:
        """The part that a text can hold: no deeper than `depth`, and nothing below a token that ends it.

        Returns:
            The part, and the place in it of each of its nodes.
        """
        ids, place = self._ids, {-1: -1}
        for node, (parent, deep) in enumerate(zip(self.parents, self.depths())):
            if deep <= depth and parent in place and (parent < 0 or ids[parent] not in ends):
                place[node] = len(place) - 1
        kept = list(place)[1:]
        parents = [place[self.parents[node]] for node in kept]
        return Draft((ids[node] for node in kept), parents, self.confidence[: len(kept)]), place

    def visible(self) -> Tensor:
        """bool ``[n + 1, n + 1]`` of the pending token and the nodes: which of them each attends to."""
        seen = np.eye(len(self) + 1, dtype=bool)
        seen[:, 0] = True
        for i, p in enumerate(self.parents):
            seen[i + 1] |= seen[p + 1]
        return torch.from_numpy(seen)

    def paths(self) -> list[list[int]]:
        """For the pending token (0) and each node (its index + 1) the nodes down to it, counted alike."""
        found: list[list[int]] = [[]]
        for node, parent in enumerate(self.parents):
            found.append([*found[parent + 1], node + 1])
        return found


@dataclass
class Drafts:
    """What is proposed for the texts of a round, on the target's device.

    Deterministic drafts have no probabilities. Those of drawn tokens are the very tensor that was sampled.
    """

    tokens: Tensor  # long ``[B, k]``, filled up behind a text's own length; k may be 0
    lengths: list[int]  # tokens proposed for each text
    trees: list[Draft] | None = None  # the drafts of a drafter of trees, which the host has; None: all are chains
    # the warped distributions that tokens were drawn from, and the raw draft logits, for rules that look at these,
    # ``[B, k, vocab]`` each
    probs: Tensor | None = None
    logits: Tensor | None = None
    copied: set[int] = field(default_factory=set)  # the texts of which these say nothing, since they were copied
    confidence: list[Sequence[float]] | None = None  # what the stop rule read at each token

    @classmethod
    def of(cls, drafts: Sequence[Draft], device: torch.device, *, trees: bool = False) -> Drafts:
        """Deterministic drafts that the host made.

        Raises:
            ValueError: one is a tree, and the drafter does not say that it drafts trees.
        """
        if not trees and not all(draft.is_chain for draft in drafts):
            raise ValueError("a drafter of trees has to say so by its attribute `trees`")
        lengths = list(map(len, drafts))
        longest = max(lengths)
        filled = [draft.ids + [0] * (longest - n) for draft, n in zip(drafts, lengths)]
        return cls(upload(filled, device).view(len(drafts), longest), lengths, list(drafts) if trees else None)

    def to(self, device: torch.device) -> Drafts:
        """On a device."""
        probs, logits = (None if values is None else values.to(device) for values in (self.probs, self.logits))
        return replace(self, tokens=self.tokens.to(device), probs=probs, logits=logits)

    def spread(self, texts: Sequence[int], count: int) -> Drafts:
        """These drafts as those of some texts among so many; the others have none."""
        if len(texts) == count:
            return self
        at = upload(texts, self.tokens.device)

        def among(values: Tensor | None) -> Tensor | None:
            return None if values is None else values.new_zeros(count, *values.shape[1:]).index_copy_(0, at, values)

        def listed(values: Any, empty: Any) -> Any:
            by_text = dict(zip(texts, values or ()))
            return None if values is None else [by_text.get(i, empty) for i in range(count)]

        tokens, probs, logits = (among(values) for values in (self.tokens, self.probs, self.logits))
        trees, confidence = listed(self.trees, Draft(())), listed(self.confidence, ())
        return Drafts(tokens, listed(self.lengths, 0), trees, probs, logits, confidence=confidence)  # type: ignore[arg-type]

    def with_copies(self, copies: Sequence[Ids]) -> Drafts:
        """These drafts with copies in the place of chains, or as branches of trees; an empty copy changes nothing."""
        device, longest = self.tokens.device, max(map(len, copies))
        if self.trees is not None:
            return Drafts.of([tree.with_branch(copy) for tree, copy in zip(self.trees, copies)], device, trees=True)
        copied = [i for i, copy in enumerate(copies) if copy]
        if not copied:
            return self
        more = max(0, longest - self.tokens.shape[1])
        tokens = F.pad(self.tokens, (0, more))
        filled = [[*copies[i], *[0] * (tokens.shape[1] - len(copies[i]))] for i in copied]
        probs, logits = (None if x is None else F.pad(x, (0, 0, 0, more)) for x in (self.probs, self.logits))
        tokens = tokens.index_copy(0, upload(copied, device), upload(filled, device))
        lengths = [len(copy) or n for copy, n in zip(copies, self.lengths)]
        return Drafts(tokens, lengths, None, probs, logits, set(copied), self.confidence)

    def on_host(self, ids: Sequence[Ids]) -> list[Draft]:
        """The draft of each text, whose `tokens` have come to the host."""
        if self.trees is not None:
            return self.trees
        confidence = self.confidence or [()] * len(self.lengths)
        return [Draft(row[:n], None, seen) for row, n, seen in zip(ids, self.lengths, confidence)]


class Trie:
    """A token tree under construction; node -1 is the pending token, siblings carry different tokens."""

    def __init__(self, draft: Draft | None = None) -> None:
        self.tokens, self.parents = (draft.ids, list(draft.parents)) if draft else ([], [])
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
        return Draft(self.tokens, self.parents)
