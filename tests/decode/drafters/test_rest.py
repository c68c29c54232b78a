"""REST: the datastore equals a scan of the documents, and the draft is the tree of what followed the longest tail."""

import gzip
import json
import random
from collections import Counter

import numpy as np
import pytest
from reading import Drafting, paths
from scripted import build_datastore
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from decode.commands.stores import read_corpus, read_texts
from decode.drafters.corpus import join_documents, tokenizer_fingerprint
from decode.drafters.rest import FILE, Datastore, RetrievalDrafter, heaviest_tree, suffix_array
from decode.errors import UserError


def occurrences(documents, pattern):
    n = len(pattern)
    return sum(doc[i : i + n] == pattern for doc in documents for i in range(len(doc) - n + 1))


def following(documents, pattern, length):
    """Every continuation of ``pattern``, padded with -1 at the end of its document, sorted."""
    n, rows = len(pattern), []
    for doc in documents:
        for i in range(len(doc) - n + 1):
            if doc[i : i + n] == pattern:
                rest = doc[i + n : i + n + length]
                rows.append(rest + [-1] * (length - len(rest)))
    return sorted(rows)


def word_tokenizer(words):
    vocabulary = {word: i for i, word in enumerate(["<unk>", *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


def opened(path, documents):
    build_datastore(documents, path, "tok")
    return Datastore(path, "tok")


def propose(drafter, ids, max_depth=100):
    return Drafting(drafter, ids).propose(ids, max_depth=max_depth)


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32])
def test_suffix_array_is_in_the_order_of_a_plain_sort(dtype) -> None:
    source = np.random.default_rng(0)
    for vocabulary in (1, 2, 5, 60_000):
        for n in (1, 2, 3, 7, 64, 333):
            text = np.append(source.integers(1, vocabulary + 1, n - 1), 0).astype(dtype)
            text[n // 2 : min(n // 2 + 1, n - 2)] = 0  # a border inside, never two in a row
            order = suffix_array(text, depth=16)
            assert sorted(order.tolist()) == list(range(n))
            tails = [text[i : i + 16].tolist() for i in order]
            assert tails == sorted(tails)


def test_longest_tail_and_its_continuations_equal_a_scan(tmp_path) -> None:
    source = random.Random(2)
    for trial in range(6):
        documents = [[source.randrange(3) for _ in range(source.randrange(60))] for _ in range(8)] + [[1, 2, 3]]
        store = opened(tmp_path / str(trial), documents)
        for _ in range(30):
            ids = [source.randrange(3) for _ in range(source.randrange(12))]
            spans = [n for n in range(2, min(6, len(ids)) + 1) if occurrences(documents, ids[-n:])]
            span, (low, high) = store.longest(ids, max_span=6)
            assert span == max(spans, default=0)
            want = following(documents, ids[-span:], 5) if span else []
            assert high - low == len(want)
            assert store.continuations(ids, length=5, max_span=6).tolist() == want

    rows = opened(tmp_path, [[200, 200, i] for i in range(100)]).continuations([200, 200], length=1, limit=10)
    assert rows[:, 0].tolist() == list(range(0, 100, 10))  # too many are thinned evenly


def test_ids_of_large_vocabularies_fit_and_others_are_unknown(tmp_path) -> None:
    for top in (65_534, 65_535, 150_000):
        store = opened(tmp_path, [[top, 1, 2], [3, top, 1, top]])
        assert store.continuations([top, 1], length=2).tolist() == [[2, -1], [top, -1]]
    small = opened(tmp_path, [[1, 2, 3]])
    assert small.longest([70_000, 2, 3])[0] == 2
    assert small.longest([2, 3, 70_000])[0] == 0


def test_missing_truncated_and_foreign_files_are_refused(tmp_path) -> None:
    opened(tmp_path, [[1, 2, 3]])
    whole = (tmp_path / FILE).read_bytes()
    for content in (whole[:-1], b"", whole[:40], b"not a datastore at all, only text"):
        (tmp_path / "broken").mkdir(exist_ok=True)
        (tmp_path / "broken" / FILE).write_bytes(content)
        with pytest.raises(UserError, match="truncated or damaged"):
            Datastore(tmp_path / "broken", "tok")
    with pytest.raises(UserError, match=r"no datastore at .*: build one"):
        Datastore(tmp_path / "nowhere", "tok")
    with pytest.raises(UserError, match="another tokenizer"):
        Datastore(tmp_path, "other")
    with pytest.raises(UserError, match="no tokens"):
        join_documents([[], []])
    one, same, other = word_tokenizer(["a", "b"]), word_tokenizer(["a", "b"]), word_tokenizer(["b", "a"])
    assert tokenizer_fingerprint(one) == tokenizer_fingerprint(same) != tokenizer_fingerprint(other)


def test_text_files_become_documents(tmp_path) -> None:
    tokenizer = word_tokenizer(["a", "b", "c", "d"])
    (tmp_path / "one.jsonl").write_text('{"text": "a b c", "note": "d"}\n\n{"question": "a b", "answer": "d", "n": 1}')
    chat = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "turns": ["c", "d"]}
    (tmp_path / "chats.jsonl.gz").write_bytes(gzip.compress(json.dumps(chat).encode()))
    assert list(read_corpus([f"{tmp_path}/chats.jsonl.gz"], tokenizer, 9)) == [[1, 2, 3, 4]]
    (tmp_path / "own.csv").write_text("question,answer\na b,d\n")  # a table, read by its columns
    assert list(read_corpus([f"{tmp_path}/own.csv"], tokenizer, 9)) == [[1, 2]]
    (tmp_path / "two.txt").write_text("b c\nd\n")
    documents = list(read_corpus([f"{tmp_path}/one.jsonl", f"{tmp_path}/two.txt"], tokenizer, 9))
    assert documents == [[1, 2, 3], [1, 2, 4], [2, 3, 4]]
    for line in ("{broken", '"a string"', "[1]"):
        (tmp_path / "bad.jsonl").write_text('{"text": "a"}\n' + line)
        with pytest.raises(UserError, match="near row 2"):
            list(read_texts(tmp_path / "bad.jsonl"))


def test_heaviest_tree_takes_the_most_frequent_prefixes() -> None:
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


def test_a_draft_is_the_tree_of_what_followed_the_longest_tail_within_room_and_nodes(tmp_path) -> None:
    drafter = RetrievalDrafter(opened(tmp_path, [[9, 1, 2, 3, 4], [8, 1, 2, 3, 5], [1, 2, 3, 5], [7, 2, 3, 6]]))
    for ids, drafted in (([0, 1, 2, 3], [5, 4]), ([0, 0, 2, 3], [5, 4, 6]), ([3], []), ([3, 1], []), ([5, 6, 7], [])):
        draft = propose(drafter, ids)
        assert (draft.ids, list(draft.parents)) == (drafted, [-1] * len(drafted))
    source = random.Random(0)
    store = opened(tmp_path, [[source.randrange(4) for _ in range(3000)]])
    for max_depth in (0, 1, 3, 50):
        draft = propose(RetrievalDrafter(store, nodes=20), [1, 2], max_depth)
        assert max(draft.depths(), default=0) <= min(max_depth, 10)
        assert len(draft) == (0 if max_depth == 0 else 4 if max_depth == 1 else 20)
