import random

import pytest
import torch
from reading import Drafting, paths, text_before

from decode.core.round import Round
from decode.drafters.lookahead import LookaheadDrafter
from decode.models.api import Out

VOCAB = 50


def answered(draft, ids, target):
    """The round in which a deterministic target verified ``draft``: its answers, the path it agrees with."""
    rows = [target(text_before(draft, ids, node)) for node in range(-1, len(draft))]
    logits = torch.nn.functional.one_hot(torch.tensor(rows), VOCAB).float()
    table, path, row = draft.children(), [], 0
    while rows[row] in table[row]:
        path.append(table[row][rows[row]])
        row = path[-1] + 1
    return Round(draft, path, rows[row], []), Out(logits, logits)


def hashed(ids):
    return random.Random(str(ids[-2:])).randrange(VOCAB)


def counting(ids):
    return (ids[-1] + 1) % VOCAB


def test_window_and_guesses_form_the_expected_tree() -> None:
    drafting = Drafting(LookaheadDrafter(level=4, window=3, guesses=2), [9])
    drafting.state.levels = [[1, 2], [11, 12, 13], [21, 22, 23]]
    drafting.state.pool = {9: [(1, 2, 5), (7, 8, 6)], 1: [(3, 3, 3)]}
    draft = drafting.propose([9])
    assert paths(draft) == [
        (1,),
        (1, 2),
        (11,),  # level 1: the pending token's child, then a child of each guess of level 0
        (1, 12),
        (1, 2, 13),
        (11, 21),  # level 2: the same columns, one deeper
        (1, 12, 22),
        (1, 2, 13, 23),
        (7,),  # the newest guess first; the other shares the window's nodes
        (7, 8),
        (7, 8, 6),
        (1, 2, 5),
    ]
    assert list(draft.parents) == [-1, 0, -1, 0, 1, 2, 3, 4, -1, 8, 9, 1]


def test_window_fills_moves_on_and_feeds_the_pool() -> None:
    drafter = LookaheadDrafter(level=3, window=2, guesses=2)
    drafting, ids = Drafting(drafter, [9]), [9]
    state = drafting.state
    state.levels = [[20, 30]]
    expected = [
        # the answer after the pending token is dropped with the first column: the text has passed it
        ([(20,), (20, 30)], [[30], [21, 31]], {}),
        ([(30,), (21,), (30, 31)], [[31], [22, 32]], {10: [(21, 22)], 30: [(31, 32)]}),
        ([(31,), (22,), (31, 32)], [[32], [23, 33]], {10: [(21, 22)], 30: [(31, 32)], 11: [(22, 23)], 31: [(32, 33)]}),
    ]
    for drafted, levels, pool in expected:
        draft = drafting.propose(ids)
        assert paths(draft) == drafted
        drafting.update(ids, *answered(draft, ids, counting))
        assert (state.levels, state.pool) == (levels, pool)
        ids = [*ids, ids[-1] + 1]


@pytest.mark.parametrize("max_depth", [0, 1, 2, 5, 8, 9])
def test_draft_is_never_deeper_than_room_and_a_cut_window_stays(max_depth) -> None:
    drafter = LookaheadDrafter()
    ids = [1, 2, 3, 4]
    drafting = Drafting(drafter, ids)
    for _ in range(6):  # fill the window
        draft = drafting.propose(ids)
        ids = [*ids, hashed(ids)]
        drafting.update(ids, *answered(draft, ids, hashed))
    before = [row.copy() for row in drafting.state.levels]
    draft = drafting.propose(ids, max_depth=max_depth)
    assert max(draft.depths(), default=0) == max_depth
    drafting.update(ids, *answered(draft, ids, hashed))
    assert (drafting.state.levels == before) == (max_depth < 9)
