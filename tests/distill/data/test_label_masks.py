"""What is a label: the response of a pair, every answer of a chat, all of a plain text."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console
from transformers import PreTrainedTokenizerBase

from decode.errors import UserError
from distill.data.chat import IGNORE, ChatFormat, Example, Turn, chat_turns, label, pair, prompt_part, show, text_blocks
from distill.data.corpus import train_tokenizer

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
def tokenizer() -> PreTrainedTokenizerBase:
    made = train_tokenizer(TEXTS, 300)
    made.chat_template = TEMPLATE
    return made


def learned(tokenizer: PreTrainedTokenizerBase, example: Example) -> list[str]:
    """The stretches of text that are labels."""
    parts: list[list[int]] = []
    before = IGNORE
    for token, labelled in zip(example.input_ids, example.labels, strict=True):
        assert labelled in (token, IGNORE)
        if labelled != IGNORE:
            parts += [[]] * (before == IGNORE)
            parts[-1] = [*parts[-1], token]
        before = labelled
    return [str(tokenizer.decode(ids)) for ids in parts]


def labelled(tokenizer: PreTrainedTokenizerBase, turns: list[Turn], **how: Any) -> list[Example]:
    (examples,) = label(tokenizer, [turns], **how)
    assert isinstance(examples, list)
    return examples


def test_a_pair_learns_its_response_and_the_end_only(tokenizer: PreTrainedTokenizerBase) -> None:
    (example,) = labelled(tokenizer, [pair("How many?\n", "There are 4.")], chat=False)
    assert tokenizer.decode(example.input_ids) == "How many?\nThere are 4.<|endoftext|>"
    assert learned(tokenizer, example) == ["There are 4.<|endoftext|>"]
    assert prompt_part(example.input_ids, example.labels) == tokenizer("How many?\n")["input_ids"]


def test_the_prompt_keeps_its_ids_where_the_response_would_merge_with_it(tokenizer: PreTrainedTokenizerBase) -> None:
    (example,) = labelled(tokenizer, [pair("How man", "y pens")], chat=False)
    alone = tokenizer("How man")["input_ids"]
    assert tokenizer("How many pens")["input_ids"][: len(alone)] != alone
    assert example.input_ids[: len(alone)] == alone
    assert tokenizer.decode(example.input_ids) == "How many pens<|endoftext|>"


def test_a_chat_learns_every_assistant_turn_and_nothing_else(tokenizer: PreTrainedTokenizerBase) -> None:
    (example,) = labelled(tokenizer, chat_turns(ChatFormat(tokenizer), CHAT)[0], chat=True)
    assert learned(tokenizer, example) == ["hello to you<|endoftext|>", "There are 4.<|endoftext|>"]
    assert example.prompt == "[system]be kind\n[user]hello\n[assistant]"
    text = str(tokenizer.decode(example.input_ids))
    assert text.startswith(f"{example.prompt}hello to you<|endoftext|>\n[user]how many?")
    assert tokenizer.decode(prompt_part(example.input_ids, example.labels)) == example.prompt


@pytest.mark.parametrize(
    ("change", "lead"),
    [
        (("{{ eos_token }}", ""), ""),  # the next prompt has no end token, so it does not continue the first
        (("+ m.content", "+ ('(thinks)' if m.role == 'assistant' and loop.last else '') + m.content"), "(thinks)"),
        (("in messages %}", "in messages if m.role != 'assistant' or m == messages[-1] %}"), ""),
    ],
)
def test_turns_that_later_prompts_rewrite_are_examples_of_their_own(
    tokenizer: PreTrainedTokenizerBase, change: tuple[str, str], lead: str
) -> None:
    tokenizer.chat_template = TEMPLATE.replace(*change)
    examples = labelled(tokenizer, chat_turns(ChatFormat(tokenizer), CHAT)[0], chat=True)
    texts = [learned(tokenizer, example) for example in examples]
    assert texts == [[f"{lead}hello to you<|endoftext|>"], [f"{lead}There are 4.<|endoftext|>"]]


def test_a_chat_without_a_template_is_refused(tokenizer: PreTrainedTokenizerBase) -> None:
    tokenizer.chat_template = None
    with pytest.raises(UserError, match="no chat template"):
        chat_turns(ChatFormat(tokenizer), CHAT)


def test_plain_text_is_cut_into_blocks_that_are_learned_whole(tokenizer: PreTrainedTokenizerBase) -> None:
    texts = ["How many pens are there? " * 3, "hello again " * 5]
    blocks = list(text_blocks(tokenizer, texts, 16))
    assert all(len(block.input_ids) <= 16 and block.labels == block.input_ids for block in blocks)
    joined, everything = (
        str(tokenizer.decode([token for block in blocks for token in block.input_ids])),
        "".join(text + "<|endoftext|>" for text in texts),
    )
    assert everything.startswith(joined)
    assert len(tokenizer(everything)["input_ids"]) - sum(len(b.input_ids) for b in blocks) <= 8
    assert prompt_part(blocks[0].input_ids, blocks[0].labels) == blocks[0].input_ids[:4]


def test_an_example_is_shown_with_its_mask_and_special_tokens(tokenizer: PreTrainedTokenizerBase) -> None:
    (example,) = labelled(tokenizer, [pair("How many? [dim]\n", "4 pens")], chat=False)
    stream = io.StringIO()
    show(vars(example), tokenizer, Console(file=stream))
    assert stream.getvalue().startswith("How many? [dim]\n[[4 pens<|endoftext|>]]\n")
    count = sum(token != IGNORE for token in example.labels)
    assert f"{len(example.labels)} tokens, {count} of them learned" in stream.getvalue()
