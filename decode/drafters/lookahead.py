"""Lookahead decoding: n-grams that the target's own parallel guesses produce (Fu et al., ICML 2024).

A window of guessed tokens rides along with every verification. Level 0 is the pending token and the guesses
after it, level l the target's answers from l steps ago; a node's parent is the same column one level up, so
each column is a chain that the target extends by one token a step. A column that has grown through all
levels is an n-gram for the pool. The window and the pool's candidates form one deterministic tree, so the
exact verification may accept any part of it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

from decode.core.draft import Draft, Ids, Trie, upload
from decode.core.round import Round
from decode.core.sampling import argmax
from decode.drafters.base import Drafter, DraftRequest, Prompt
from decode.models.api import Out


@dataclass
class LookaheadState:
    """The window and the pool of a sequence."""

    levels: list[Ids]
    pool: dict[int, list[tuple[int, ...]]] = field(default_factory=dict)
    bottom: list[int | None] = field(default_factory=list)  # nodes of the window's last level; None where it was cut
    pending: int = -1


@dataclass
class LookaheadDrafter(Drafter):
    """Drafts the window and up to `guesses` n-grams of the pool that start with the pending token."""

    trees = True
    level: int = 5  # n-gram size N; the window has N − 1 levels
    window: int = 7  # columns W
    # most n-grams G that the pool keeps for a token (the least recent leaves first) and that are tried
    guesses: int = 7
    seed: int = 0  # of the generator that fills the first window with tokens of the prompt; never the decoder's

    def start(self, prompt: Prompt) -> LookaheadState:
        """The window begins with random tokens of the prompt."""
        random = Random(self.seed)
        return LookaheadState([[random.choice(prompt.ids) for _ in range(self.window + self.level - 3)]])

    def draft(self, request: DraftRequest) -> Draft:
        """The window and the pool's n-grams as one tree, at most `max_depth` deep."""
        state, depth = request.state, request.max_depth
        state.pending = request.ids[-1]
        tree = Trie()

        def add(above: int | None, token: int, level: int) -> int | None:
            return None if above is None or level > depth else tree.add(above, token)

        nodes: list[int | None] = [-1]
        for at, token in enumerate(state.levels[0], 1):
            nodes.append(add(nodes[-1], token, at))
        for level, row in enumerate(state.levels[1:], 1):
            for column, token in enumerate(row):
                nodes[column] = add(nodes[column], token, column + level)
        state.bottom = nodes
        for gram in reversed(state.pool.get(state.pending, [])):
            tree.grow(gram[:depth])
        return tree.draft()

    def update(
        self, requests: Sequence[DraftRequest], rounds: Sequence[Round], out: Out, rows: Sequence[Sequence[int]]
    ) -> None:
        """Read the target's answers after all windows at once, pool finished n-grams and move the windows on.

        A window that `max_depth` has cut stays as it is: the text is about to end.
        """
        whole = [(r.state, of[0] + 1) for r, of in zip(requests, rows) if r.state.bottom and None not in r.state.bottom]
        if whole:
            places = [first + node for state, first in whole for node in state.bottom]
            answers = argmax(out.logits.index_select(0, upload(places, out.logits.device))).tolist()
            for state, _ in whole:
                self._move(state, answers[: len(state.bottom)])
                del answers[: len(state.bottom)]

    def _move(self, state: LookaheadState, answers: Ids) -> None:
        """Move a window on to these answers."""
        levels = [*state.levels, answers]
        if len(state.levels) < self.level - 1:  # still filling: every level loses the column that the text has passed
            state.levels = [row[1:] for row in levels]
            return
        for column, key in enumerate([state.pending, *state.levels[0]]):
            grams, gram = state.pool.setdefault(key, []), tuple(row[column] for row in levels[1:])
            if gram in grams:
                grams.remove(gram)
            grams.append(gram)
            del grams[: len(grams) - self.guesses]
        state.levels = [levels[1][1:], *levels[2:]]
