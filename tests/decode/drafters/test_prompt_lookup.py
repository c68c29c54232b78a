import random

import pytest

from decode.drafters.prompt_lookup import LookupDrafter
from decode.sampling import TorchRng
from decode.stopping import StopRule

RNG = TorchRng(seed=0)
WIDE = StopRule(window=100)


def proposed(drafter, ids, max_depth=100, stop=WIDE):
    draft = drafter.propose(ids, stop, max_depth, RNG)
    assert draft.is_chain
    assert draft.probs is None
    return draft.tokens.tolist()


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


def test_longer_ngram_wins_over_a_more_recent_shorter_one():
    ids = [1, 2, 3, 9, 7, 2, 3, 8, 1, 2, 3]
    drafter = LookupDrafter(length=2)
    drafter.start(ids)
    assert proposed(drafter, ids) == [9, 7]


def test_most_recent_of_several_matches_is_copied():
    ids = [1, 2, 5, 1, 2, 6, 1, 2, 7, 3, 1, 2]
    drafter = LookupDrafter(length=1)
    drafter.start(ids)
    assert proposed(drafter, ids) == [7]


def test_falls_back_to_shorter_ngrams_down_to_the_minimum():
    ids = [4, 5, 6, 1, 4]
    drafter = LookupDrafter(length=2)
    drafter.start(ids)
    assert proposed(drafter, ids) == [5, 6]
    drafter = LookupDrafter(length=2, min_ngram=2)
    drafter.start(ids)
    assert proposed(drafter, ids) == []


def test_copy_that_reaches_the_end_repeats_its_period():
    ids = [0, 1, 2, 1, 2]
    drafter = LookupDrafter(length=5)
    drafter.start(ids)
    assert proposed(drafter, ids) == [1, 2, 1, 2, 1]


def test_nothing_matches_in_a_text_without_repeats_or_of_one_token():
    drafter = LookupDrafter()
    for ids in ([1], [1, 2, 3, 4]):
        drafter.start(ids)
        assert proposed(drafter, ids) == []


@pytest.mark.parametrize(("max_depth", "window", "want"), [(3, 100, 3), (100, 4, 4), (0, 100, 0), (100, 100, 10)])
def test_draft_is_no_longer_than_length_room_and_cap(max_depth, window, want):
    ids = [*range(20), 0]
    drafter = LookupDrafter(length=10)
    drafter.start(ids)
    assert len(proposed(drafter, ids, max_depth, StopRule(window=window))) == want


def test_growing_text_gives_what_a_scan_of_the_whole_text_gives():
    source = random.Random(0)
    for _ in range(200):
        low, high = source.choice([(1, 3), (2, 3), (1, 1), (2, 4)])
        drafter = LookupDrafter(length=4, max_ngram=high, min_ngram=low)
        ids = [source.randrange(3) for _ in range(source.randrange(1, 5))]
        drafter.start(ids)
        for _ in range(10):
            assert proposed(drafter, ids) == brute_force(ids, 4, high, low)
            ids = ids + [source.randrange(3) for _ in range(source.randrange(1, 4))]


def test_a_new_text_knows_nothing_of_the_last_one():
    drafter = LookupDrafter()
    drafter.start([1, 2, 3])
    drafter.start([4, 1])
    assert proposed(drafter, [4, 1]) == []
