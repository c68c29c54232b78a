"""Prompt lookup and suffix decoding, each against a scan of the texts, and lookahead's window and pool."""

import random
from collections import Counter

import pytest
import torch
from enumeration import ScriptedRunner, random_table
from reading import Drafting, paths, text_before

from decode.core.draft import Draft
from decode.core.round import Round
from decode.core.sampling import LogitsWarper, TorchRng
from decode.core.stop import StopRule
from decode.drafters import lookup
from decode.drafters.lookahead import LookaheadDrafter
from decode.drafters.lookup import END, LookupDrafter, SuffixDrafter
from decode.loop import Method, decode, decode_texts
from decode.models.api import Out

GREEDY = LogitsWarper()


def proposed(drafter, ids, max_depth=100, window=100):
    draft = Drafting(drafter, ids).propose(ids, StopRule(window), max_depth)
    assert draft.is_chain
    return draft.ids


def brute_force(ids, length, max_ngram, min_ngram):
    """The definition: longest n first, rightmost earlier occurrence, the copy goes on into itself."""
    for n in range(max_ngram, min_ngram - 1, -1):
        for end in range(len(ids) - 1, n - 1, -1):
            if len(ids) > n and ids[end - n : end] == ids[-n:]:
                text = list(ids)
                for i in range(length):
                    text.append(text[end + i])
                return text[len(ids) :]
    return []


def test_growing_text_gives_what_a_scan_of_the_whole_text_gives() -> None:
    source = random.Random(0)
    for _ in range(200):
        low, high = source.choice([(1, 3), (2, 3), (1, 1), (2, 4)])
        ids = [source.randrange(3) for _ in range(source.randrange(1, 5))]
        drafting = Drafting(LookupDrafter(length=4, max_ngram=high, min_ngram=low), ids)
        for _ in range(10):
            assert drafting.propose(ids).ids == brute_force(ids, 4, high, low)
            ids = ids + [source.randrange(3) for _ in range(source.randrange(1, 4))]


def taught(*texts, **options):
    drafter = SuffixDrafter(**options)
    for text in texts:
        drafter.close(Drafting(drafter, text).state)
    return drafter


def test_the_draft_is_bounded_by_match_probability_window_and_depth() -> None:
    text = list(range(20))
    assert proposed(taught(text), [50, 3, 4]) == [5, 6]
    assert proposed(taught(text, factor=1.5), [50, 3, 4]) == [5, 6, 7]
    assert proposed(taught(text, longest=4), text[:10]) == [10, 11, 12, 13]
    assert proposed(taught(text), text[:10], window=3) == [10, 11, 12]
    assert proposed(taught(text), text[:10], max_depth=2) == [10, 11]
    assert proposed(taught(text), text[:10], max_depth=0) == []
    branching = [[1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 6, 7], [1, 2, 8, 9]]  # shares 0.5 and 0.25 after 1, 2
    assert proposed(taught(*branching, least=0.25), [1, 2]) == [3, 5]
    assert proposed(taught(*branching, least=0.3), [1, 2]) == [3]
    assert proposed(taught(*branching, least=0.6), [1, 2]) == []


def scan(own, earlier, ids, most, longest, least):
    """The definition: every suffix in either source, the highest sum of products of frequencies."""
    best, score = [], 0.0
    for n in range(min(longest, len(ids)), 0, -1):
        for texts, last in (([own], 0), (earlier, 1)):  # the end of an earlier text is a continuation too: none
            rows = [t[e:] for t in texts for e in range(n, len(t) + last) if t[e - n : e] == ids[-n:]][::-1]
            total, chain, shares = len(rows), [], []
            while len(chain) < min(most, n):
                counts = Counter(row[len(chain)] for row in rows if len(row) > len(chain))
                if not counts or counts.most_common(1)[0][1] / total < least:
                    break
                chain.append(counts.most_common(1)[0][0])
                shares.append(counts[chain[-1]] / total)
                rows = [row for row in rows if row[: len(chain)] == chain]
            if sum(shares) > score:
                best, score = chain, sum(shares)
    return best


def test_growing_texts_give_what_a_scan_of_all_texts_gives() -> None:
    source = random.Random(0)
    for _ in range(60):
        texts = [source.choices(range(3), k=source.randrange(1, 12)) for _ in range(source.randrange(4))]
        drafter = taught(*texts, longest=6, least=0.2)
        ids = source.choices(range(3), k=3)
        drafting = Drafting(drafter, ids)
        for _ in range(8):
            assert drafting.propose(ids, StopRule(5)).ids == scan(ids, texts, ids, 5, 6, 0.2)
            ids = ids + source.choices(range(3), k=source.randrange(1, 4))
            drafting.update(ids, Round(Draft(()), [], 0, []), Out(torch.empty(0), torch.empty(0)))


def test_earlier_requests_shorten_later_ones_and_a_batch_teaches_nothing() -> None:
    target = ScriptedRunner(random_table(1, 50), 50)
    system = Method("suffix", SuffixDrafter(), StopRule(24))
    prompt, options = [3, 1, 4], {"max_new_tokens": 30}
    batch = decode_texts(target, system, GREEDY, [prompt] * 2, rngs=[TorchRng(0)] * 2, **options)
    assert not system.drafter.earlier.tokens
    first, second = (decode(target, system, GREEDY, prompt, **options) for _ in range(2))
    assert first.ids == second.ids == batch[0].ids == batch[1].ids
    assert system.drafter.earlier.tokens == [*first.ids, END, *second.ids, END]
    assert len(first.rounds) == len(batch[0].rounds) == len(batch[1].rounds)
    assert len(second.rounds) < len(first.rounds) / 3
    later = decode_texts(target, system, GREEDY, [prompt], rngs=[TorchRng(0)], **options)[0]
    assert len(later.rounds) < len(first.rounds) / 3  # a batch begins with what was learned


def test_of_a_long_session_the_latest_texts_are_remembered() -> None:
    texts = [[10 * i, 10 * i + 1, 10 * i + 2, 10 * i + 3] for i in range(100)]
    drafter = taught(*texts, capacity=40)
    assert len(drafter.earlier.tokens) <= 40
    assert proposed(drafter, texts[-1][:2]) == texts[-1][2:]
    assert proposed(drafter, texts[-4][:2]) == texts[-4][2:]
    assert proposed(drafter, texts[0][:2]) == []
    drafter = taught(list(range(100)), capacity=40)
    assert proposed(drafter, [98]) == [99]
    assert proposed(drafter, [10]) == []


def test_of_common_tokens_the_latest_places_are_looked_at(monkeypatch) -> None:
    """In earlier texts and in the text itself, so that a draft takes as long in a long text as in a short one."""
    monkeypatch.setattr(lookup, "NEWEST", 4)
    assert proposed(taught(*[[1, 2]] * 5, *[[1, 3]] * 3), [1]) == [3]
    assert proposed(SuffixDrafter(), [*[1, 2] * 5, *[1, 3] * 3, 1])[0] == 3


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


@pytest.mark.parametrize("max_depth", [0, 1, 5, 8, 9])
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
