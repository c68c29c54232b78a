"""Prompts and chats have the same ids wherever they are read; only prompts get a start token by the tokenizer."""

import pytest
from pairs import make_tokenizer
from tokenizers_of_kinds import CHAT_TEMPLATES, byte_level, sentencepiece, with_start

from decode.errors import UserError
from decode.models.tokens import (
    StopStrings,
    chat_ids,
    check_template,
    continuation_ids,
    prompt_ids,
    render_chat,
    start_ids,
)
from distill.data.chat import Turn, label, prompt_part

HELLO = [{"role": "user", "content": "Hi"}]


@pytest.mark.parametrize("adds", [True, False])
@pytest.mark.parametrize("template", sorted(CHAT_TEMPLATES))
def test_a_chat_is_what_its_template_writes_with_and_without_a_start_token(template: str, adds: bool) -> None:
    """Engines send the template's text with add_special_tokens=False, as transformers does."""
    tokenizer = with_start(template, adds=adds)
    ids = chat_ids(tokenizer, HELLO)
    assert ids == tokenizer.apply_chat_template(HELLO, tokenize=True, add_generation_prompt=True, return_dict=False)
    written = "bos_token" in CHAT_TEMPLATES[template]
    assert ids.count(tokenizer.bos_token_id) == (1 if written else 0)
    assert tokenizer.decode(ids[-len("<assistant>") :]) == "<assistant>"


def test_whether_contents_are_parts_is_decided_by_the_template_and_never_by_what_a_text_says() -> None:
    parts = make_tokenizer()
    parts.chat_template = (
        "{% for m in messages %}<{{ m.role }}>{% for c in m.content %}{% if c.type == 'text' %}{{ c.text }}{% endif %}"
        "{% endfor %}{% endfor %}"
    )
    assert render_chat(parts, [*HELLO, {"role": "assistant", "content": "a"}], ask=False) == "<user>Hi<assistant>a"
    changed = make_tokenizer()
    changed.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content.split('-')[-1] | upper }}{% endfor %}"
    assert render_chat(changed, HELLO, ask=False) == "<user>HI"


def test_a_prompt_has_the_same_ids_in_training_and_in_decoding() -> None:
    for tokenizer in (with_start(), with_start(end=True), with_start(adds=False), byte_level(), sentencepiece()):
        ((example,),) = label(tokenizer, [[Turn("a b", "c", ("c",))]], chat=False)
        assert prompt_part(example.input_ids, example.labels) == prompt_ids(tokenizer, "a b")
        assert example.input_ids[-1] == tokenizer.eos_token_id
        assert tokenizer.eos_token_id not in prompt_ids(tokenizer, "a b")


def test_a_prompt_that_begins_with_the_start_token_gets_no_second_one() -> None:
    tokenizer = with_start()
    assert start_ids(tokenizer) == [1]
    assert prompt_ids(tokenizer, "ab")[:2] == [1, 2]
    assert prompt_ids(tokenizer, "<s>ab").count(1) == 1
    assert prompt_ids(tokenizer, "") == [1]
    with pytest.raises(UserError, match="the prompt is empty"):
        prompt_ids(with_start(adds=False), "")


def test_a_continuation_gets_neither_start_token_nor_space() -> None:
    tokenizer = with_start(end=True)
    pieces = [tokenizer.convert_ids_to_tokens(ids) for ids in continuation_ids(tokenizer, ["ab", " c"])]
    assert pieces == [["a", "b"], ["▁", "c"]]


def test_chats_that_a_template_refuses_or_does_not_write_are_an_error() -> None:
    with pytest.raises(UserError, match=r"does not accept these messages.*turns must alternate"):
        chat_ids(with_start("strict"), [*HELLO, *HELLO])
    with pytest.raises(UserError, match="no chat template"):
        chat_ids(make_tokenizer(), HELLO)
    for name in CHAT_TEMPLATES:
        check_template(with_start(name))
    check_template(with_start("plain"), "Be brief.")
    with pytest.raises(UserError, match=r"refuses a system message .*no system messages.*leave out --system"):
        check_template(with_start("strict"), "Be brief.")
    for role, message in (("assistant", "does not write the assistant's turns"), ("system", "leaves the system")):
        deaf = with_start("plain")
        deaf.chat_template = f"{{% for m in messages if m.role != '{role}' %}}{{{{ m.content }}}}{{% endfor %}}"
        with pytest.raises(UserError, match=message):
            check_template(deaf, "Be brief.")


@pytest.mark.parametrize("tokenizer", [byte_level(), sentencepiece()], ids=["byte-level", "sentencepiece"])
def test_a_text_ends_with_the_token_that_completes_a_stop_string_whatever_stands_before(tokenizer) -> None:
    ids = tokenizer("how many more apples. Are there, apples?\nOn the farm", add_special_tokens=False).input_ids
    for string in ("apple", ".", "?\n", "more a", "the farm", "farms"):
        stop = StopStrings(tokenizer, ["never", string])
        first = next((n for n in range(1, len(ids) + 1) if string in tokenizer.decode(ids[:n])), None)
        for before in ([], [5] * 4000):
            ends = [n for n in range(1, len(ids) + 1) if stop.ends(before + ids[:n])]
            assert ends[:1] == ([] if first is None else [first])
