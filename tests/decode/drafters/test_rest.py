import random
from collections import Counter

import numpy as np
import pytest
from reading import Drafting
from stores import build_datastore
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from decode.draft import Trie, heaviest_tree
from decode.drafters.corpus_files import tokenizer_fingerprint
from decode.drafters.rest import Datastore, RetrievalDrafter
from decode.errors import UserError


def propose(drafter, ids, max_depth):
    return Drafting(drafter, ids).propose(ids, max_depth=max_depth)


def opened(tmp_path, documents):
    build_datastore(documents, tmp_path, "tok")
    return Datastore(tmp_path, "tok")


def paths(draft):
    return [tuple(draft.text_before([], node)) for node in range(len(draft))]


def test_trie_merges_prefixes_and_keeps_siblings_apart():
    trie = Trie()
    for sequence in ([1, 2, 3], [1, 2, 4], [5], [1, 2, 3]):
        node = -1
        for token in sequence:
            node = trie.add(node, token)
    assert (trie.tokens, trie.parents) == ([1, 2, 3, 4, 5], [-1, 0, 1, 1, -1])


def test_heaviest_tree_takes_the_most_frequent_prefixes():
    source = random.Random(0)
    for _ in range(100):
        length, nodes = source.randrange(1, 6), source.randrange(1, 30)
        rows = sorted([source.randrange(3) for _ in range(length)] for _ in range(source.randrange(1, 40)))
        weight = Counter(tuple(row[: n + 1]) for row in rows for n in range(length))
        draft = heaviest_tree(np.array(rows), nodes)
        found = paths(draft)
        assert len(set(found)) == len(found) == min(nodes, len(weight))
        assert [weight[path] for path in found] == sorted(weight.values(), reverse=True)[: len(found)]
        assert all(len(path) == 1 or path[:-1] in found[:i] for i, path in enumerate(found))


def test_draft_is_the_tree_of_what_followed_the_longest_tail(tmp_path):
    store = opened(tmp_path, [[9, 1, 2, 3, 4], [8, 1, 2, 3, 5], [1, 2, 3, 5], [7, 2, 3, 6]])
    drafter = RetrievalDrafter(store)
    draft = propose(drafter, [0, 1, 2, 3], 100)
    assert (draft.tokens.tolist(), draft.parents) == ([5, 4], [-1, -1])
    draft = propose(drafter, [0, 0, 2, 3], 100)
    assert (draft.tokens.tolist(), draft.parents) == ([5, 4, 6], [-1, -1, -1])
    assert draft.probs is None


def test_draft_is_no_deeper_than_room_and_no_larger_than_nodes(tmp_path):
    source = random.Random(0)
    store = opened(tmp_path, [[source.randrange(4) for _ in range(3000)]])
    for max_depth in (0, 1, 3, 50):
        draft = propose(RetrievalDrafter(store, nodes=20), [1, 2], max_depth)
        assert max(draft.depths(), default=0) <= min(max_depth, 10)
        assert len(draft) == (0 if max_depth == 0 else 4 if max_depth == 1 else 20)


def test_unknown_context_gives_an_empty_draft(tmp_path):
    drafter = RetrievalDrafter(opened(tmp_path, [[1, 2, 3]]))
    for ids in ([3], [3, 1], [2, 3], [5, 6, 7]):
        assert len(propose(drafter, ids, 100)) == 0


def test_rest_opens_only_with_the_tokenizer_it_was_built_with(tmp_path):
    words = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words)
    build_datastore([[0, 1, 0]], tmp_path, tokenizer_fingerprint(tokenizer))
    drafter = RetrievalDrafter(Datastore(tmp_path, tokenizer_fingerprint(tokenizer)))
    assert propose(drafter, [0, 1], 5).tokens.tolist() == [0]
    other = Tokenizer(models.WordLevel({"b": 0, "a": 1}, unk_token="a"))
    with pytest.raises(UserError, match="another tokenizer"):
        Datastore(tmp_path, tokenizer_fingerprint(PreTrainedTokenizerFast(tokenizer_object=other)))
    with pytest.raises(UserError, match="needs the target's tokenizer"):
        tokenizer_fingerprint(None)
