import io

import pytest
from rich.console import Console

from decode.errors import UserError
from distill.data.chat import (
    IGNORE,
    ChatFormat,
    chat_turns,
    label,
    pair,
    prompt_part,
    show,
    text_blocks,
)
from distill.data.tokenizer import train_tokenizer

TEXTS = ["How many pens are there?\nThere are 2+2 = <<2+2=4>>4 pens.\n#### 4", "user assistant says hello again"] * 9
TEMPLATE = (
    "{% for m in messages %}{{ '[' + m.role + ']' + m.content }}"
    "{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '[assistant]' }}{% endif %}"
)
CHAT = [
    {"role": "system", "content": "be kind"},
    {"role": "user", "content": "hello"},
    {"role": "assistant", "content": "hello to you"},
    {"role": "user", "content": "how many?"},
    {"role": "assistant", "content": "There are 4."},
]


@pytest.fixture
def tokenizer():
    return train_tokenizer(TEXTS, 300)


@pytest.fixture
def chatty(tokenizer):
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def learned(tokenizer, example):
    """The stretches of text that are labels."""
    parts, inside = [], False
    for token, own in zip(example.input_ids, example.labels, strict=True):
        if own != IGNORE:
            assert own == token
            parts.append([token]) if not inside else parts[-1].append(token)
        inside = own != IGNORE
    return [tokenizer.decode(ids) for ids in parts]


def examples_of(tokenizer, messages):
    turns, _ = chat_turns(ChatFormat(tokenizer), messages)
    (found,) = label(tokenizer, [turns], chat=True)
    assert isinstance(found, list)
    return found


def test_a_pair_learns_its_response_and_the_end_only(tokenizer):
    ((example,),) = label(tokenizer, [[pair("How many?\n", "There are 4.")]], chat=False)
    assert tokenizer.decode(example.input_ids) == "How many?\nThere are 4.<|endoftext|>"
    assert learned(tokenizer, example) == ["There are 4.<|endoftext|>"]
    assert prompt_part(example.input_ids, example.labels) == tokenizer("How many?\n")["input_ids"]


def test_the_prompt_keeps_its_ids_where_the_response_would_merge_with_it(tokenizer):
    ((example,),) = label(tokenizer, [[pair("How man", "y pens")]], chat=False)
    alone = tokenizer("How man")["input_ids"]
    assert tokenizer("How many pens")["input_ids"][: len(alone)] != alone
    assert example.input_ids[: len(alone)] == alone
    assert tokenizer.decode(example.input_ids) == "How many pens<|endoftext|>"


def test_a_chat_learns_every_assistant_turn_and_nothing_else(chatty):
    (example,) = examples_of(chatty, CHAT)
    assert learned(chatty, example) == ["hello to you<|endoftext|>", "There are 4.<|endoftext|>"]
    text = chatty.decode(example.input_ids)
    assert text.startswith("[system]be kind\n[user]hello\n[assistant]hello to you<|endoftext|>\n[user]how many?")
    assert example.prompt == "[system]be kind\n[user]hello\n[assistant]"
    assert chatty.decode(prompt_part(example.input_ids, example.labels)) == example.prompt


def test_a_template_that_drops_what_it_adds_to_earlier_turns_gives_an_example_for_each(chatty):
    """As templates of reasoning models do: only the last turn keeps its thoughts."""
    chatty.chat_template = (
        "{% for m in messages %}{{ '[' + m.role + ']' }}"
        "{% if m.role == 'assistant' and loop.last %}{{ '(thinks)' }}{% endif %}"
        "{{ m.content }}{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '[assistant]' }}{% endif %}"
    )
    first, second = examples_of(chatty, CHAT)
    assert learned(chatty, first) == ["(thinks)hello to you<|endoftext|>"]
    assert learned(chatty, second) == ["(thinks)There are 4.<|endoftext|>"]
    assert second.prompt == "[system]be kind[user]hello[assistant]hello to you<|endoftext|>[user]how many?[assistant]"


def test_turns_that_cannot_be_found_in_the_whole_chat_are_examples_of_their_own(chatty):
    chatty.chat_template = (
        "{% for m in messages %}{% if m.role != 'assistant' or loop.last %}{{ '[' + m.role + ']' + m.content }}"
        "{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '[assistant]' }}{% endif %}"
    )
    first, second = examples_of(chatty, CHAT)
    assert learned(chatty, first) == ["hello to you<|endoftext|>"]
    assert learned(chatty, second) == ["There are 4.<|endoftext|>"]


def test_a_template_without_an_end_token_gets_one(chatty):
    chatty.chat_template = TEMPLATE.replace("eos_token", "''")
    first, second = examples_of(chatty, CHAT)  # the next prompt has no end token, so it does not continue the first
    assert learned(chatty, first) == ["hello to you<|endoftext|>"]
    assert learned(chatty, second) == ["There are 4.<|endoftext|>"]


def test_chats_that_cannot_be_masked_are_refused(chatty, tokenizer):
    chatty.chat_template = "{{ messages | length }}{% if add_generation_prompt %}{{ '[assistant]' }}{% endif %}"
    with pytest.raises(UserError, match="with a turn that the chat template does not write: system"):
        examples_of(chatty, CHAT)
    chatty.chat_template = None
    with pytest.raises(UserError, match="no chat template"):
        examples_of(chatty, CHAT)


def test_plain_text_is_cut_into_blocks_that_are_learned_whole(tokenizer):
    texts = ["How many pens are there? " * 3, "hello again " * 5]
    blocks = list(text_blocks(tokenizer, texts, 16))
    assert all(len(block.input_ids) <= 16 and block.labels == block.input_ids for block in blocks)
    joined = tokenizer.decode([token for block in blocks for token in block.input_ids])
    whole = "".join(text + "<|endoftext|>" for text in texts)
    assert whole.startswith(joined)
    assert len(tokenizer(whole)["input_ids"]) - sum(len(b.input_ids) for b in blocks) <= 8
    assert prompt_part(blocks[0].input_ids, blocks[0].labels) == blocks[0].input_ids[:4]
    assert blocks[0].prompt + blocks[0].response == tokenizer.decode(blocks[0].input_ids)


def test_an_example_is_shown_with_its_mask_and_special_tokens(tokenizer):
    ((example,),) = label(tokenizer, [[pair("How many? [dim]\n", "4 pens")]], chat=False)
    row = {"input_ids": example.input_ids, "labels": example.labels}
    stream = io.StringIO()
    show(row, tokenizer, Console(file=stream))
    assert stream.getvalue().startswith("How many? [dim]\n[[4 pens<|endoftext|>]]\n")
    count = sum(label != IGNORE for label in example.labels)
    assert f"{len(example.labels)} tokens, {count} of them learned" in stream.getvalue()
