import json
import random

import numpy as np
import pytest
from pairs import make_tokenizer
from stores import build_datastore
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from decode.commands.datastore import read_corpus
from decode.drafters import rest as datastore
from decode.drafters.corpus_files import join_documents, read_texts, tokenize_files, tokenizer_fingerprint
from decode.drafters.rest import FILE, Datastore, suffix_array
from decode.errors import UserError


def random_documents(source, vocabulary, count=8, longest=60):
    return [[source.randrange(vocabulary) for _ in range(source.randrange(longest))] for _ in range(count)]


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


@pytest.fixture
def store(tmp_path):
    build_datastore([[1, 2, 3, 4], [2, 3, 5], [2, 3, 4, 6]], tmp_path, "tok")
    return Datastore(tmp_path, "tok")


@pytest.mark.parametrize("block", [4, 1 << 20])
@pytest.mark.parametrize("dtype", [np.uint16, np.uint32])
def test_suffix_array_is_in_the_order_of_a_plain_sort(monkeypatch, block, dtype):
    monkeypatch.setattr(datastore, "BLOCK", block)
    source = np.random.default_rng(0)
    for vocabulary in (1, 2, 5, 60_000):
        for n in (1, 2, 3, 7, 64, 333):
            text = np.append(source.integers(1, vocabulary + 1, n - 1), 0).astype(dtype)
            text[n // 2 : min(n // 2 + 1, n - 2)] = 0  # a border inside, never two in a row
            order = suffix_array(text, depth=16)
            assert sorted(order.tolist()) == list(range(n))
            tails = [text[i : i + 16].tolist() for i in order]
            assert tails == sorted(tails)


def test_longest_tail_and_its_continuations_equal_a_scan(tmp_path):
    source = random.Random(2)
    for trial in range(20):
        documents = [*random_documents(source, vocabulary=3), [1, 2, 3]]
        build_datastore(documents, tmp_path / str(trial), "tok")
        store = Datastore(tmp_path / str(trial), "tok")
        for _ in range(30):
            ids = [source.randrange(3) for _ in range(source.randrange(12))]
            spans = [n for n in range(2, min(6, len(ids)) + 1) if occurrences(documents, ids[-n:])]
            span, (low, high) = store.longest(ids, max_span=6)
            assert span == max(spans, default=0)
            want = following(documents, ids[-span:], 5) if span else []
            assert high - low == len(want)
            assert store.continuations(ids, length=5, max_span=6).tolist() == want


def test_too_many_hits_are_thinned_evenly(tmp_path):
    build_datastore([[200, 200, i] for i in range(100)], tmp_path, "tok")
    rows = Datastore(tmp_path, "tok").continuations([200, 200], length=1, limit=10)
    assert rows[:, 0].tolist() == list(range(0, 100, 10))


@pytest.mark.parametrize("top", [65_534, 65_535, 150_000])
def test_ids_of_large_vocabularies_fit(tmp_path, top):
    documents = [[top, 1, 2], [3, top, 1, top]]
    build_datastore(documents, tmp_path, "tok")
    store = Datastore(tmp_path, "tok")
    assert store.continuations([top, 1], length=2).tolist() == [[2, -1], [top, -1]]


def test_ids_the_store_cannot_hold_are_unknown_and_not_an_error(store):
    assert store.longest([70_000, 2, 3])[0] == 2
    assert store.longest([2, 3, 70_000])[0] == 0


def test_missing_truncated_corrupt_and_foreign_files_are_refused(tmp_path, store):
    whole = (tmp_path / FILE).read_bytes()
    cases = {
        "truncated": whole[:-1],
        "is empty": b"",
        "header is damaged": whole[:40],
        "no datastore": b"not a datastore at all, only text",
        "corrupt": whole[:-3] + bytes([whole[-3] ^ 1]) + whole[-2:],
    }
    for message, content in cases.items():
        (tmp_path / "broken").mkdir(exist_ok=True)
        (tmp_path / "broken" / FILE).write_bytes(content)
        with pytest.raises(UserError, match=message):
            Datastore(tmp_path / "broken", "tok")
    with pytest.raises(UserError, match=r"no datastore at .*: build one"):
        Datastore(tmp_path / "nowhere", "tok")


def test_empty_and_negative_input_is_refused():
    with pytest.raises(UserError, match="no tokens"):
        join_documents([[], []])
    with pytest.raises(UserError, match="negative"):
        join_documents([[1, -1]])


def test_text_files_become_documents(tmp_path):
    tokenizer = word_tokenizer(["a", "b", "c", "d"])
    (tmp_path / "one.jsonl").write_text(
        json.dumps({"text": "a b c", "note": "d"}) + "\n\n" + json.dumps({"question": "a b", "answer": "d", "n": 1})
    )
    (tmp_path / "two.txt").write_text("b c\nd\n")
    documents = list(tokenize_files([tmp_path / "one.jsonl", tmp_path / "two.txt"], tokenizer))
    assert documents == [[1, 2, 3], [1, 2, 4], [2, 3, 4]]


def test_missing_and_malformed_text_files_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"no file .*nothing\.txt"):
        list(tokenize_files([tmp_path / "nothing.txt"], word_tokenizer(["a"])))
    for line in ("{broken", '"a string"', "[1]"):
        (tmp_path / "bad.jsonl").write_text('{"text": "a"}\n' + line)
        with pytest.raises(UserError, match="line 2 is not a JSON object"):
            list(read_texts(tmp_path / "bad.jsonl"))


def test_fingerprint_tells_vocabularies_apart():
    one, same, other = word_tokenizer(["a", "b"]), word_tokenizer(["a", "b"]), word_tokenizer(["b", "a"])
    assert tokenizer_fingerprint(one) == tokenizer_fingerprint(same)
    assert tokenizer_fingerprint(one) != tokenizer_fingerprint(other)


def test_a_table_of_rows_is_read_by_its_columns(tmp_path):
    (tmp_path / "own.csv").write_text("question,answer\nWhy?,Because #### 1\n")
    (tmp_path / "own.JSONL").write_text(json.dumps({"text": "Tom"}) + "\n")
    tokenizer = make_tokenizer()
    texts = [tokenizer.decode(ids) for ids in read_corpus([str(tmp_path / "own.csv")], tokenizer, 5)]
    assert len(texts) == 1
    assert "Why?" in texts[0]
    assert "," not in texts[0]
    (ids,) = read_corpus([str(tmp_path / "own.JSONL")], tokenizer, 5)
    assert tokenizer.decode(ids).startswith("Tom")
