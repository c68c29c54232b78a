"""Lookahead decoding: n-grams that the target's own parallel guesses produce (Fu et al., ICML 2024).

A window of guessed tokens rides along with every verification. Level 0 is the pending token and the guesses
after it, level l the target's answers from l rounds ago; a node's parent is the same column one level up, so
each column is a chain that the target extends by one token a round. A column that has grown through all
levels is an n-gram for the pool. The window and the pool's candidates form one deterministic tree, so the
exact verification may accept any part of it.
"""

from dataclasses import dataclass, field
from random import Random

from decode.draft import Draft, Trie
from decode.drafters.base import Drafter
from decode.sampling import Rng
from decode.stopping import StopRule
from decode.trace import Round


@dataclass
class LookaheadDrafter(Drafter):
    """Drafts the window and up to ``guesses`` n-grams of the pool that start with the pending token."""

    level: int = 5  # n-gram size N; the window has N − 1 levels
    window: int = 7  # columns W
    # most n-grams G that the pool keeps for a token (least recently found out first) and that are tried
    guesses: int = 7
    seed: int = 0  # of the generator that fills the first window with tokens of the prompt; never the decoder's
    pool_from_prompt: bool = False  # feed the pool with the text's own n-grams as well
    _pool: dict[int, list[tuple[int, ...]]] = field(default_factory=dict, init=False, repr=False)
    _levels: list[list[int]] = field(default_factory=list, init=False, repr=False)
    _bottom: list[int | None] = field(default_factory=list, init=False, repr=False)
    _pending: int = field(default=-1, init=False, repr=False)
    _pooled: int = field(default=0, init=False, repr=False)

    def start(self, ids: list[int]) -> None:
        """Forget the previous text."""
        self._pool, self._levels, self._bottom, self._pooled = {}, [], [], 0

    def propose(self, ids: list[int], stop: StopRule, max_depth: int, rng: Rng) -> Draft:
        """The window and the pool's n-grams as one tree, at most ``max_depth`` deep."""
        if not self._levels:
            random = Random(self.seed)
            self._levels = [[random.choice(ids) for _ in range(self.window + self.level - 3)]]
        if self.pool_from_prompt:
            self._pool_text(ids)
        self._pending = ids[-1]
        tree = Trie()
        self._bottom = self._add_window(tree, max_depth)
        for gram in reversed(self._pool.get(self._pending, [])):
            node = -1
            for token in gram[:max_depth]:
                node = tree.add(node, token)
        return tree.draft()

    def observe(self, round: Round) -> None:
        """Read the target's answers below the window, pool finished n-grams and move the window on.

        A window that ``max_depth`` has cut stays as it is: the text is about to end.
        """
        bottom = [node for node in self._bottom if node is not None]
        if not bottom or len(bottom) < len(self._bottom):
            return
        answers: list[int] = round.logits[[node + 1 for node in bottom]].argmax(-1).tolist()
        levels = [*self._levels, answers]
        if len(self._levels) < self.level - 1:  # still filling: every level loses the column that the text has passed
            self._levels = [row[1:] for row in levels]
            return
        for column, key in enumerate([self._pending, *self._levels[0]]):
            self._remember(key, tuple(row[column] for row in levels[1:]))
        self._levels = [levels[1][1:], *levels[2:]]

    def _add_window(self, tree: Trie, max_depth: int) -> list[int | None]:
        """Add the window's nodes of depth up to ``max_depth``; the nodes of its last level, None where cut."""
        nodes: list[int | None] = [-1]
        for depth, token in enumerate(self._levels[0], 1):
            above = nodes[-1]
            nodes.append(tree.add(above, token) if above is not None and depth <= max_depth else None)
        for level, row in enumerate(self._levels[1:], 1):
            for column, token in enumerate(row):
                above = nodes[column]
                fits = above is not None and column + level <= max_depth
                nodes[column] = tree.add(above, token) if above is not None and fits else None
        return nodes

    def _pool_text(self, ids: list[int]) -> None:
        for at in range(self._pooled, len(ids) - self.level + 1):
            self._remember(ids[at], tuple(ids[at + 1 : at + self.level]))
            self._pooled = at + 1

    def _remember(self, key: int, gram: tuple[int, ...]) -> None:
        grams = self._pool.setdefault(key, [])
        if gram in grams:
            grams.remove(gram)
        grams.append(gram)
        del grams[: len(grams) - self.guesses]
