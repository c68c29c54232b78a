import random
from collections import Counter

import pytest
from enumeration import ScriptedRunner, random_table
from reading import Drafting

from decode.drafters.suffix import END, SuffixDrafter
from decode.loop import Method, decode, decode_texts
from decode.sampling import LogitsWarper, TorchRng
from decode.stopping import StopRule

GREEDY = LogitsWarper()


def taught(*texts, **options):
    """A drafter that has seen texts end."""
    drafter = SuffixDrafter(**options)
    for text in texts:
        drafter.close(Drafting(drafter, text).state)
    return drafter


def proposed(drafter, ids, max_depth=100, window=100):
    draft = Drafting(drafter, ids).propose(ids, StopRule(window), max_depth)
    assert draft.is_chain
    assert draft.probs is None
    return draft.tokens.tolist()


@pytest.mark.parametrize(
    ("earlier", "ids", "wanted"),
    [
        ([], [1, 2, 3, 4, 5, 9, 1, 2, 3], [4, 5, 9]),  # from the text itself, as many tokens as match
        ([[1, 2, 3, 4, 5, 6, 7]], [8, 2, 3, 4], [5, 6, 7]),  # from an earlier text, up to its end
        ([[1, 2, 5], [1, 2, 6], [3, 2, 6]], [1, 2], [6]),  # a tie of the longer match: the latest
        ([[1, 2, 5], [1, 2, 5], [1, 2, 6]], [1, 2], [5]),  # the commonest, not the latest
        ([[7, 2, 4, 5], [1, 2, 5], [3, 2, 5], [6, 2, 5]], [8, 2], [5]),
        ([], [1, 2, 3], []),
        ([[4, 5, 6]], [1], []),
    ],
)
def test_drafts_the_commonest_continuation_of_a_match_in_the_text_or_in_earlier_ones(earlier, ids, wanted):
    assert proposed(taught(*earlier), ids) == wanted


def test_a_short_match_that_goes_on_alike_is_preferred_to_a_longer_one_that_does_not():
    """Three tokens match in two texts that differ at once (0.5 expected), two in four of which three agree (1.5)."""
    texts = [[9, 1, 2, 5, 6], [9, 1, 2, 7, 8], [3, 1, 2, 7, 8], [4, 1, 2, 7, 8]]
    assert proposed(taught(*texts), [9, 1, 2]) == [7, 8]


def test_the_draft_is_bounded_by_match_probability_window_and_depth():
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


def test_growing_texts_give_what_a_scan_of_all_texts_gives():
    source = random.Random(0)
    for _ in range(60):
        texts = [source.choices(range(3), k=source.randrange(1, 12)) for _ in range(source.randrange(4))]
        drafter = taught(*texts, longest=6, least=0.2)
        ids = source.choices(range(3), k=3)
        drafting = Drafting(drafter, ids)
        for _ in range(8):
            assert drafting.propose(ids, StopRule(5)).tokens.tolist() == scan(ids, texts, ids, 5, 6, 0.2)
            ids = ids + source.choices(range(3), k=source.randrange(1, 4))
            drafter.update(drafting.state, ids, None)


def test_earlier_requests_shorten_later_ones_and_a_batch_teaches_nothing():
    target = ScriptedRunner(random_table(1, 50), 50)
    system = Method("suffix", SuffixDrafter(), StopRule(24))
    prompt, options = [3, 1, 4], {"max_new_tokens": 30}
    batch = decode_texts(target, system, GREEDY, [prompt] * 2, rngs=[TorchRng(0)] * 2, **options)
    assert not system.drafter.earlier.tokens
    first, second = (decode(target, system, GREEDY, prompt, **options) for _ in range(2))
    assert first.ids == second.ids == batch[0].ids == batch[1].ids
    assert system.drafter.earlier.tokens == [*first.ids, END, *second.ids, END]
    assert first.trace.rounds == batch[0].trace.rounds == batch[1].trace.rounds
    assert second.trace.rounds < first.trace.rounds / 3
    later = decode_texts(target, system, GREEDY, [prompt], rngs=[TorchRng(0)], **options)[0]
    assert later.trace.rounds < first.trace.rounds / 3  # a batch begins with what was learned


def test_of_a_long_session_the_latest_texts_are_remembered():
    texts = [[10 * i, 10 * i + 1, 10 * i + 2, 10 * i + 3] for i in range(100)]
    drafter = taught(*texts, capacity=40)
    assert len(drafter.earlier.tokens) <= 40
    assert proposed(drafter, texts[-1][:2]) == texts[-1][2:]
    assert proposed(drafter, texts[-4][:2]) == texts[-4][2:]
    assert proposed(drafter, texts[0][:2]) == []
    drafter = taught(list(range(100)), capacity=40)
    assert proposed(drafter, [98]) == [99]
    assert proposed(drafter, [10]) == []


def test_of_common_tokens_the_latest_places_are_looked_at():
    drafter = taught(*[[1, 2]] * 5, *[[1, 3]] * 3, newest=4)
    assert proposed(drafter, [1]) == [3]
