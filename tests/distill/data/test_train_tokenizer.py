import pytest
from transformers import AutoTokenizer

from decode.bench.arithmetic import problems
from decode.errors import UserError
from distill.data.tokenizer import train_tokenizer

TEXTS = [f"{p.question}\n{p.solution}" for p in problems(0, "train", 300)]
STRANGE = "Zażółć 漢字 🙂 a  b\t\r\n 12 345. <|endoftext|> don't , . x\x00\u200b\n\n  end "


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(TEXTS, 600)


@pytest.mark.parametrize("text", [STRANGE, "", " ", "\n", *TEXTS[:20]])
def test_any_text_comes_back_unchanged(tokenizer, text):
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_every_digit_is_a_token(tokenizer):
    pieces = [tokenizer.decode([token]) for token in tokenizer("12+305 = 317")["input_ids"]]
    assert "".join(pieces) == "12+305 = 317"
    assert [piece for piece in pieces if any(c.isdigit() for c in piece)] == list("12305317")


def test_special_tokens_are_fixed_and_never_added(tokenizer):
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("<|endoftext|>", 0)
    assert (tokenizer.pad_token, tokenizer.pad_token_id) == ("<|pad|>", 1)
    assert not set(tokenizer("Tom has 2 pens.")["input_ids"]) & {0, 1}
    assert tokenizer("<|endoftext|>")["input_ids"] == [0]


def test_the_same_texts_give_the_same_tokenizer(tokenizer):
    again = train_tokenizer(iter(TEXTS), 600)
    assert again.backend_tokenizer.to_str() == tokenizer.backend_tokenizer.to_str()


def test_a_saved_tokenizer_is_reloaded_identically(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert loaded.get_vocab() == tokenizer.get_vocab()
    assert loaded(STRANGE)["input_ids"] == tokenizer(STRANGE)["input_ids"]
    assert loaded.decode(loaded(STRANGE)["input_ids"]) == STRANGE
    assert (loaded.eos_token_id, loaded.pad_token_id) == (0, 1)


def test_the_vocabulary_is_bounded_and_no_larger_than_the_texts_need(tokenizer):
    assert len(tokenizer) == 600
    assert len(train_tokenizer(["aa aa"], 600)) == 259
    with pytest.raises(UserError, match="258 or more"):
        train_tokenizer(TEXTS, 200)
