"""Adaptix: a corpus's n-gram model that learns from the text, searched for the draft tree (AAAI 2025)."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from transformers import PreTrainedTokenizerBase

from decode.core.drafter_base import Drafter
from decode.core.proposal import Draft
from decode.core.rng import Rng
from decode.core.runner_protocol import Runner
from decode.core.stopping.stop_rules import StopRule
from decode.drafters.adaptix.ngrams import NgramTable
from decode.drafters.adaptix.search import best_tree, most_visited, search
from decode.drafters.corpus_files import require_fingerprint

DEPTHS = {"mcts": 3, "best-first": 8}


@dataclass
class TrigramDrafter(Drafter):
    """Drafts a tree of likely continuations under an n-gram model.

    Before each search every n-gram of the last ``recent`` tokens gains ``gain`` in weight, so the model moves
    towards what the target writes. What is learned stays for later texts; `reset` forgets it.
    """

    table: NgramTable  # the corpus's n-grams
    method: str = "mcts"  # ``mcts``, the paper's search, or ``best-first``, the exact best tree
    nodes: int = 64  # most nodes in the tree
    searches: int = 150  # Monte Carlo iterations
    # deepest node searched; null takes 3 for MCTS, whose sequences grow by one more token, and 8 for best-first
    depth: int | None = None
    sequences: int = 24  # most visited sequences taken from MCTS, each then extended
    gain: float = 0.04  # weight added to a recent n-gram; 0 turns learning off
    ceiling: float = 3.0  # the weight that learning stops at
    recent: int = 16  # tokens of the text whose n-grams are learned each time
    memory: int = 1 << 16  # contexts whose learned weights are kept, those met last
    widest: int = 64  # successors that a context keeps while it learns; the lightest leaves first
    seed: int = 0  # of the search's own generator, which restarts with every text and never touches the decoder's
    _learned: dict[int, tuple[list[int], list[float]]] = field(default_factory=dict, init=False, repr=False)
    _begin: dict[int, tuple[list[int], list[float]]] | None = field(default=None, init=False, repr=False)
    _random: Random = field(default_factory=Random, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.depth is None:
            self.depth = DEPTHS[self.method]
        self._random.seed(self.seed)

    def start(self, ids: list[int]) -> None:
        """Restart the search's generator; learned weights stay, but in a fork those of its texts."""
        self._random.seed(self.seed)
        if self._begin is not None:
            self._learned = {context: (list(t), list(w)) for context, (t, w) in self._begin.items()}

    def fork(self, targets: Sequence[Runner]) -> list[Drafter]:
        """See `Drafter.fork`."""
        forks = [copy.copy(self) for _ in targets]
        for fork in forks:
            fork._begin, fork._random = self._learned, Random()
        return list(forks)

    def reset(self) -> None:
        """Forget what was learned from texts."""
        self._learned.clear()
        self._random.seed(self.seed)

    def propose(self, ids: list[int], stop: StopRule, max_depth: int, rng: Rng) -> Draft:
        """The searched tree, at most ``max_depth`` deep; empty where the context is unknown."""
        self._learn(ids)
        root = self.table.context(ids)
        if root is None or max_depth < 1:
            return Draft.empty()
        assert self.depth is not None
        bits, mask, depth = self.table.bits, self.table.mask, min(self.depth, max_depth)
        if self.method == "best-first":
            tree = best_tree(root, self.successors, bits=bits, mask=mask, nodes=self.nodes, depth=depth)
            return tree.draft()
        found = search(
            root, self.successors, bits=bits, mask=mask, iterations=self.searches, depth=depth, random=self._random
        )
        tree = most_visited(*found, self.successors, sequences=self.sequences, nodes=self.nodes, max_depth=max_depth)
        return tree.draft()

    def successors(self, context: int) -> tuple[list[int], list[float]]:
        """Tokens and weights that follow a packed context, learning included."""
        return self._learned.get(context) or self.table.successors(context)

    def _learn(self, ids: list[int]) -> None:
        """Raise the weight of each n-gram among the last ``recent`` tokens."""
        size = self.table.order - 1
        window = ids[-self.recent :]
        for end in range(size, len(window)) if self.gain else ():
            context, token = self.table.context(window[end - size : end]), window[end]
            if context is None or token >> self.table.bits:
                continue
            learned = self._learned.pop(context, None)
            tokens, weights = learned if learned is not None else self.table.successors(context)
            if learned is None:
                tokens, weights = tokens.copy(), weights.copy()
            self._learned[context] = tokens, weights  # the latest at the end
            if token not in tokens:
                if len(tokens) >= self.widest:
                    lightest = weights.index(min(weights))
                    del tokens[lightest], weights[lightest]
                tokens.append(token)
                weights.append(0.0)
            at = tokens.index(token)
            weights[at] = min(self.ceiling, weights[at] + self.gain)
        while len(self._learned) > self.memory:
            del self._learned[next(iter(self._learned))]


def open_adaptix(
    folder: str | Path, tokenizer: PreTrainedTokenizerBase | None, *, order: int = 3, best_first: bool = False
) -> TrigramDrafter:
    """Adaptix with the paper's settings over the n-gram table in ``folder``.

    Raises:
        UserError: no tokenizer, or a table that is missing, damaged, or of another tokenizer.
    """
    table = NgramTable.open(folder, require_fingerprint(tokenizer), order=order)
    return TrigramDrafter(table, "best-first" if best_first else "mcts")
