"""Drafts from a corpus. REST: the datastore equals a scan; Adaptix: the n-grams are counted, the search is a plain one."""

import copy
import gzip
import json
import math
import random
from collections import Counter, defaultdict

import numpy as np
import pytest
from reading import Drafting, paths
from scripted import build_datastore, build_trigram_table
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from decode.commands.stores import read_corpus, read_texts
from decode.drafters.adaptix import C1, C2, NgramTable, TrigramDrafter, packed, search
from decode.drafters.base import Prompt
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


def known(drafter, context):
    """Tokens and weights that follow a context, learning included."""
    return drafter.learned.get(context) or drafter.table.successors(context)


def opened_table(path, documents):
    build_trigram_table(documents, path, "tok")
    return NgramTable(path, "tok")


def corpus(seed, vocabulary=6, count=10, longest=80):
    source = random.Random(seed)
    return [[source.randrange(vocabulary) for _ in range(source.randrange(longest))] for _ in range(count)]


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    return opened_table(tmp_path_factory.mktemp("table"), corpus(0))


def test_probabilities_are_count_ratios_within_documents(tmp_path) -> None:
    documents = corpus(1)
    table = opened_table(tmp_path, documents)
    counts = defaultdict(Counter)
    for doc in documents:
        for i in range(len(doc) - 2):
            counts[tuple(doc[i : i + 2])][doc[i + 2]] += 1
    for context, count in counts.items():
        tokens, weights = table.successors(packed(context))
        ranked = sorted(count, key=lambda token: (-count[token], token))
        assert tokens == ranked
        assert weights == pytest.approx([count[token] / count.total() for token in ranked])
    assert table.successors(packed([77, 78])) == ([], [])
    assert packed([1]) is packed([1, 1 << 21]) is None
    # only the most frequent are kept, and not renormalised
    many = opened_table(tmp_path / "many", [[1, 2, token] for token in range(20) for _ in range(token + 1)])
    tokens, weights = many.successors(packed([1, 2]))
    assert tokens == list(range(19, 7, -1))
    assert weights == pytest.approx([(token + 1) / 210 for token in tokens])


def test_a_table_of_another_tokenizer_and_too_large_ids_are_refused(tmp_path) -> None:
    with pytest.raises(UserError, match=r"takes token ids below 2,097,152, the corpus holds 2,097,152"):
        build_trigram_table([[1, 2, 1 << 21]], tmp_path, "tok")
    opened_table(tmp_path, [[1, 2, (1 << 21) - 1, 3]])
    with pytest.raises(UserError, match="another tokenizer"):
        NgramTable(tmp_path, "other")
    with pytest.raises(UserError, match=r"no n-gram table at .*datastore build"):
        NgramTable(tmp_path / "absent", "tok")


def test_recent_ngrams_gain_weight_up_to_the_ceiling(tmp_path) -> None:
    drafter = TrigramDrafter(opened_table(tmp_path, [[1, 2, 3], [1, 2, 4]]))
    context = packed([1, 2])
    ids = [1, 2, 3, 1, 2, 9]
    propose(drafter, ids, 5)
    assert known(drafter, context) == ([3, 4, 9], pytest.approx([0.54, 0.5, 0.04]))
    propose(drafter, ids, 5)  # the same n-grams count again while they are in the window
    assert known(drafter, context)[1] == pytest.approx([0.58, 0.5, 0.08])
    for zeros in (13, 14):  # then it is 17 tokens back
        propose(drafter, [1, 2, 9] + [0] * zeros, 5)
        assert known(drafter, context)[1] == pytest.approx([0.58, 0.5, 0.12])
    for _ in range(100):
        propose(drafter, ids, 5)
    assert known(drafter, context)[1] == pytest.approx([3.0, 0.5, 3.0])
    assert drafter.table.successors(context)[1] == pytest.approx([0.5, 0.5])


def test_what_a_long_session_learns_is_bounded(tmp_path) -> None:
    drafter = TrigramDrafter(opened_table(tmp_path, [[1, 2, 3], [0, 5, 1]]), memory=10, widest=4)
    text = random.Random(0).choices(range(6), k=3000)
    state = drafter.start(Prompt(text))
    for end in range(16, len(text)):
        drafter.learn(state, text[:end])
    assert len(drafter.learned) == 10
    assert all(len(tokens) == len(weights) <= 4 for tokens, weights in drafter.learned.values())
    latest = packed(text[end - 3 : end - 1])
    assert text[end - 1] in known(drafter, latest)[0]


def test_a_text_of_a_batch_reads_what_was_learned_and_keeps_its_own_additions_apart(table) -> None:
    """Nothing is copied where a text begins, and it drafts and learns what it would with a copy of all weights."""
    drafter = TrigramDrafter(table)
    propose(drafter, [0, 1, 2, 3, 0, 1, 4, 0, 1, 5], 9)
    before = copy.deepcopy(drafter.learned)
    texts = [[4, 0, 1, 2, 0, 1, 3, 3, 0, 1], [0, 1, 5, 0, 1]]
    batch = [Drafting(drafter, ids, shares_learning=False) for ids in texts]
    assert all(not text.state.learned and text.state.shared is drafter.learned for text in batch)
    for ids, text in zip(texts, batch):
        alone = TrigramDrafter(table)
        alone.learned = copy.deepcopy(before)
        found, wanted = text.propose(ids, max_depth=9), propose(alone, ids, 9)
        assert (found.ids, found.parents) == (wanted.ids, wanted.parents)
        assert before | text.state.learned == alone.learned
    assert drafter.learned == before


def plain_search(model, root, iterations, depth, source):
    """A second, slow writing of the search: visits by path."""
    visits, score, children = Counter({(): 0}), Counter(), {}

    def distribution(path):
        return model((*root, *path))

    for _ in range(iterations):
        path = ()
        while len(path) < depth and path in children and children[path]:
            unseen = [child for child in children[path] if not visits[child]]
            if unseen:
                path = unseen[0]
                continue
            n, here = visits[path], path

            def puct(child, n=n, here=here):
                prior = dict(zip(*distribution(here)))[child[-1]]
                explore = (C1 + math.log((n + C2 + 1) / C2)) * prior * math.sqrt(n) / (1 + visits[child])
                return score[child] / visits[child] + explore

            path = max(children[path], key=puct)
        if len(path) < depth and path not in children:
            children[path] = [(*path, token) for token in distribution(path)[0]]
            if children[path]:
                path = children[path][0]
        full = path
        while len(full) < depth and distribution(full)[0]:
            tokens, weights = distribution(full)
            left = source.random() * sum(weights)
            at = 0
            while at < len(tokens) - 1 and left >= weights[at]:
                left -= weights[at]
                at += 1
            full = (*full, tokens[at])
        total = 1.0 + sum(dict(zip(*distribution(full[:i])))[full[i]] for i in range(len(full)))
        for i in range(len(path) + 1):
            visits[path[:i]] += 1
            score[path[:i]] += total
    return {path: n for path, n in visits.items() if path and n}


def visited(tokens, parents, visits, contexts):
    known = [()]
    for token, parent in zip(tokens[1:], parents[1:]):
        known.append((*known[parent], token))
    return [(path, count) for path, count in zip(known[1:], visits[1:]) if count]


def test_search_equals_a_plain_writing_of_the_algorithm(table) -> None:
    for seed, root in enumerate([(0, 1), (3, 3), (5, 2)]):
        nodes = search(packed(root), table.successors, iterations=80, depth=3, random=random.Random(seed))
        found = dict(visited(*nodes))
        want = plain_search(lambda text: table.successors(packed(text)), root, 80, 3, random.Random(seed))
        assert found == want


def test_a_draft_is_the_most_visited_nodes_each_extended_by_its_likeliest_successor(table) -> None:
    nodes = search(packed([0, 1]), table.successors, iterations=150, depth=3, random=random.Random(0))
    top = [path for path, _ in sorted(visited(*nodes), key=lambda node: -node[1])[:24]]
    want = set(top)
    for path in top:
        tokens, weights = table.successors(packed((0, 1, *path)))
        want.add((*path, tokens[weights.index(max(weights))]))
    found = paths(propose(TrigramDrafter(table, gain=0), [0, 1], 9))
    assert len(found) == len(set(found))
    assert set(found) == want
    for depth in (0, 1, 3):
        assert max(propose(TrigramDrafter(table), [0, 1], depth).depths(), default=0) == depth
