import pytest

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


def test_the_vocabulary_is_bounded_and_no_larger_than_the_texts_need(tokenizer):
    assert len(tokenizer) == 600
    assert len(train_tokenizer(["aa aa"], 600)) == 259
    with pytest.raises(UserError, match="258 or more"):
        train_tokenizer(TEXTS, 200)
