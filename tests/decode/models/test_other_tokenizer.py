"""Vocabularies of different tokenizers: which tokens they share, and how texts are translated."""

from __future__ import annotations

import pytest
from pairs import TEXT, make_tokenizer
from tokenizers import Tokenizer, models
from tokenizers_of_kinds import OTHER, byte_level, sentencepiece, spelled_out
from transformers import PreTrainedTokenizerFast

from decode.errors import UserError
from decode.models import other_tokenizer as vocabulary
from decode.models.other_tokenizer import BOS, CHARACTERS, EOS, Intersection, Vocabulary

KINDS = {"byte-level": byte_level, "sentencepiece": sentencepiece}


def vocabulary_of(tokenizer: PreTrainedTokenizerFast, size: int | None = None) -> Vocabulary:
    return Vocabulary(tokenizer, size or len(tokenizer), "draft")


def between(target: PreTrainedTokenizerFast, draft: PreTrainedTokenizerFast) -> Intersection:
    return Intersection(vocabulary_of(target), vocabulary_of(draft))


@pytest.mark.parametrize("kind", KINDS)
def test_the_tokens_of_a_text_join_to_its_bytes(kind: str) -> None:
    tokenizer = KINDS[kind]()
    known = vocabulary_of(tokenizer)
    for text in (TEXT, OTHER, "日本 ünder", "x\n\ny"):
        ids = tokenizer(text, add_special_tokens=False).input_ids
        joined = b"".join(known.tokens[i] for i in ids)  # type: ignore[misc]
        assert joined == (text if kind == "byte-level" else " " + text).encode()


@pytest.mark.parametrize("kind", KINDS)
def test_shared_tokens_have_one_text_and_special_ones_one_role(kind: str) -> None:
    target, draft = make_tokenizer(), KINDS[kind]()
    both = between(target, draft)
    pairs = {i: both.translate(i)[0] for i in both.shared}
    assert len(set(pairs.values())) == len(pairs)  # one id to one id
    assert pairs.pop(target.eos_token_id) == draft.eos_token_id
    assert both.target_ids.tolist() == sorted(both.shared)
    texts = {ours: target.decode([ours]) for ours in range(len(target))}
    whole = {i for i, text in texts.items() if "\ufffd" not in text and i != target.eos_token_id}
    for ours in whole & pairs.keys():  # SentencePiece's decoder takes a space off the start
        wanted = texts[ours] if kind == "byte-level" else texts[ours].removeprefix(" ")
        assert draft.decode([pairs[ours]]) == wanted
    if kind == "byte-level":
        theirs = {draft.decode([i]) for i in range(len(draft))}
        assert {texts[i] for i in whole - pairs.keys()}.isdisjoint(theirs)
        assert len(whole - pairs.keys()) > 5


def test_a_beginning_that_the_draft_does_not_mark_is_read_as_its_end_token() -> None:
    target, draft = sentencepiece(), byte_level()
    both = between(target, draft)
    assert both.target.ids[BOS] == target.bos_token_id
    assert target.bos_token_id not in both.shared
    assert both.translate(target.bos_token_id) == [draft.eos_token_id]
    one = spelled_out([*CHARACTERS, "<|end|>"], bos_token="<|end|>", eos_token="<|end|>")
    assert vocabulary_of(one).tokens[256] == EOS


@pytest.mark.parametrize(("ours", "theirs"), [(byte_level, sentencepiece), (sentencepiece, byte_level)])
def test_translation_keeps_the_text_and_only_grows_with_it(ours, theirs) -> None:
    target, draft = ours(TEXT), theirs(OTHER)
    both = between(target, draft)
    ids = target(TEXT + " ünder 日 <odd>", add_special_tokens=False).input_ids
    read = [both.translate(i) for i in ids]
    assert {len(piece) for piece in read} >= {1, 2}
    flat = [i for piece in read for i in piece]
    assert b"".join(both.draft.tokens[i] for i in flat) == b"".join(both.target.tokens[i] for i in ids)  # type: ignore[misc]
    for n in range(len(ids)):
        assert [i for token in ids[:n] for i in both.translate(token)] == flat[: sum(map(len, read[:n]))]


def test_an_unshared_token_is_spelled_by_the_drafts_own_merges() -> None:
    """``abc`` by the merges is a + bc, not the longest first piece ab + c."""
    letters = [*CHARACTERS, "bc", "ab"]
    draft = vocabulary_of(spelled_out(letters, [("b", "c"), ("a", "b")]))
    assert draft.spell(b"abc") == [CHARACTERS.index("a"), 256]


def test_every_token_has_a_translation_that_the_draft_knows() -> None:
    target, draft = byte_level(), sentencepiece()
    both = Intersection(vocabulary_of(target), vocabulary_of(draft, len(draft) - 3))  # the model knows fewer ids
    for token in range(len(target) + 5):  # padded ids, which name no token, among them
        piece = both.translate(token)
        assert piece
        assert max(piece) < len(draft) - 3
        assert (len(piece) == 1 and piece[0] in both.draft.tokens) or token not in both.shared


def test_too_little_in_common_is_refused() -> None:
    few = spelled_out(CHARACTERS[: vocabulary.LEAST - 1])
    with pytest.raises(UserError, match=r"99 tokens in common, 256 .* at least 100"):
        between(spelled_out(CHARACTERS), few)


def test_tokenizers_of_other_kinds_are_refused() -> None:
    core = Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    with pytest.raises(UserError, match="neither byte-level nor like SentencePiece"):
        vocabulary_of(PreTrainedTokenizerFast(tokenizer_object=core))
