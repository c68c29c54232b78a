"""Drafters that tests steer, and the drafters of the package built on a small random corpus."""

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from decode.core.draft import Draft
from decode.drafters.adaptix import NgramTable, TrigramDrafter, save_ngram_table
from decode.drafters.base import Drafter, DraftRequest, NoDrafter, Prompt
from decode.drafters.corpus import join_documents
from decode.drafters.lookahead import LookaheadDrafter
from decode.drafters.lookup import END, LookupDrafter, SuffixDrafter
from decode.drafters.rest import Datastore, RetrievalDrafter, save_datastore


@dataclass
class RandomTree(NoDrafter):
    """A deterministic tree of any shape, another one for every text."""

    trees = True
    vocab: int
    nodes: int = 6
    seed: int = 0

    def draft(self, request: DraftRequest) -> Draft:
        """Up to `nodes` nodes, no deeper than `max_depth`; siblings may repeat a token."""
        generator = random.Random(f"{self.seed} {request.ids}")
        parents: list[int] = []
        depths: list[int] = []
        for i in range(generator.randrange(self.nodes + 1)):
            parent = generator.randrange(-1, i)
            depth = 1 if parent < 0 else depths[parent] + 1
            if depth > request.max_depth:
                break
            parents.append(parent)
            depths.append(depth)
        return Draft([generator.randrange(self.vocab) for _ in parents], parents)


@dataclass
class Oracle(NoDrafter):
    """Knows the text that greedy decoding will produce and drafts from it, well or badly."""

    trees = True
    text: list[int]
    how: str
    vocab: int
    rounds: int = field(default=0, init=False)

    def start(self, prompt: Prompt) -> None:
        self.rounds = 0

    def draft(self, request: DraftRequest) -> Draft:
        self.rounds += 1
        future = self.text[len(request.ids) :]
        return WAYS[self.how](self, future, request.max_depth)

    def wrong(self, token: int, by: int = 1) -> int:
        return (token + by) % self.vocab


def _tree(oracle: Oracle, future: list[int], max_depth: int) -> Draft:
    """The right path hidden among wrong branches, its nodes neither first nor adjacent."""
    generator = random.Random(f"{oracle.rounds} {future}")
    tokens: list[int] = []
    parents: list[int] = []
    above = -1
    for depth, token in enumerate(future[: min(4, max_depth)]):
        sides = [oracle.wrong(token, 1 + j) for j in range(generator.randrange(3))]
        children = [*sides, token]
        generator.shuffle(children)
        right = -1
        for child in children:
            if child == token:
                right = len(tokens)
            tokens.append(child)
            parents.append(above)
        if depth + 1 < max_depth and sides:  # a subtree below a wrong branch
            wrong = next(i for i in range(len(tokens) - len(children), len(tokens)) if i != right)
            tokens += [generator.randrange(oracle.vocab)]
            parents += [wrong]
        if generator.random() < 0.2:
            break
        above = right
    return Draft(tokens, parents)


WAYS: dict[str, Callable[[Oracle, list[int], int], Draft]] = {
    "perfect": lambda oracle, future, depth: _chain(future[: min(5, depth)]),
    "wrong": lambda oracle, future, depth: _chain([oracle.wrong(t) for t in future[: min(4, depth)]]),
    "alternating": lambda oracle, future, depth: _chain(
        [t if i % 3 or oracle.rounds % 2 == 0 else oracle.wrong(t) for i, t in enumerate(future[: min(6, depth)])]
    ),
    "empty": lambda oracle, future, depth: Draft(()),
    "tree": _tree,
}


def _chain(tokens: list[int]) -> Draft:
    return Draft(tokens, list(range(-1, len(tokens) - 1)))


Documents = Iterable[Sequence[int] | np.ndarray]


def build_datastore(documents: Documents, path: str | Path, fingerprint: str) -> Path:
    return save_datastore(join_documents(documents), Path(path), fingerprint)


def build_trigram_table(documents: Documents, path: str | Path, fingerprint: str) -> Path:
    return save_ngram_table(join_documents(documents), Path(path), fingerprint)


def corpus_drafters(folder: Path, vocab: int, extra: list[list[int]] | None = None) -> dict[str, Callable[[], Drafter]]:
    """The drafters that read a text or a corpus, over random documents (and `extra` ones)."""
    generator = random.Random(0)
    documents = [[generator.randrange(vocab) for _ in range(40)] for _ in range(5)] + (extra or [])
    build_datastore(documents, folder, "test")
    build_trigram_table(documents, folder, "test")
    store, table = Datastore(folder, "test"), NgramTable(folder, "test")

    def suffix() -> SuffixDrafter:
        drafter = SuffixDrafter()
        for document in documents:
            drafter.earlier.extend([*document, END])
        return drafter

    return {
        "none": NoDrafter,
        "prompt-lookup": lambda: LookupDrafter(length=3),
        "suffix": suffix,
        "rest": lambda: RetrievalDrafter(store, nodes=8, max_span=4, min_span=1, length=3),
        "adaptix": lambda: TrigramDrafter(table, nodes=8, searches=20, depth=2, sequences=4),
        "lookahead": lambda: LookaheadDrafter(level=3, window=3, guesses=3),
        "random-tree": lambda: RandomTree(vocab),
    }
