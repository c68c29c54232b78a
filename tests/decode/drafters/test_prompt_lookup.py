import random

import pytest
from reading import Drafting

from decode.drafters.prompt_lookup import LookupDrafter
from decode.stopping import StopRule


def proposed(ids, max_depth=100, window=100, **options):
    draft = Drafting(LookupDrafter(**options), ids).propose(ids, StopRule(window), max_depth)
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


@pytest.mark.parametrize(
    ("ids", "options", "wanted"),
    [
        ([1, 2, 3, 9, 7, 2, 3, 8, 1, 2, 3], {"length": 2}, [9, 7]),  # a longer n-gram before a more recent one
        ([1, 2, 5, 1, 2, 6, 1, 2, 7, 3, 1, 2], {"length": 1}, [7]),  # the most recent of several
        ([4, 5, 6, 1, 4], {"length": 2}, [5, 6]),  # shorter n-grams, down to the minimum
        ([4, 5, 6, 1, 4], {"length": 2, "min_ngram": 2}, []),
        ([0, 1, 2, 1, 2], {"length": 5}, [1, 2, 1, 2, 1]),  # a copy that reaches the end repeats its period
        ([1], {}, []),
        ([1, 2, 3, 4], {}, []),
    ],
)
def test_copies_what_followed_the_longest_and_most_recent_match(ids, options, wanted):
    assert proposed(ids, **options) == wanted


def test_growing_text_gives_what_a_scan_of_the_whole_text_gives():
    source = random.Random(0)
    for _ in range(200):
        low, high = source.choice([(1, 3), (2, 3), (1, 1), (2, 4)])
        ids = [source.randrange(3) for _ in range(source.randrange(1, 5))]
        drafting = Drafting(LookupDrafter(length=4, max_ngram=high, min_ngram=low), ids)
        for _ in range(10):
            assert drafting.propose(ids).tokens.tolist() == brute_force(ids, 4, high, low)
            ids = ids + [source.randrange(3) for _ in range(source.randrange(1, 4))]
