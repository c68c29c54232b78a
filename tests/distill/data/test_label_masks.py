"""What is a label where a text is joined to its prompt, and in plain text; `test_awkward_rows` has the rest."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from transformers import PreTrainedTokenizerBase

from distill.data.chat import Example, label, pair, prompt_part, show, text_blocks
from distill.data.corpus import train_tokenizer

TEXTS = ["How many pens are there?\nThere are 2+2 = <<2+2=4>>4 pens.\n#### 4", "user assistant says hello again"] * 9


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return train_tokenizer(TEXTS, 300)


def labelled(tokenizer: PreTrainedTokenizerBase, prompt: str, response: str) -> Example:
    (examples,) = label(tokenizer, [[pair(prompt, response)]], chat=False)
    assert isinstance(examples, list)
    return examples[0]


def test_the_prompt_keeps_its_ids_where_the_response_would_merge_with_it(tokenizer: PreTrainedTokenizerBase) -> None:
    example, alone = labelled(tokenizer, "How man", "y pens"), tokenizer("How man")["input_ids"]
    assert tokenizer("How many pens")["input_ids"][: len(alone)] != alone
    assert example.input_ids[: len(alone)] == alone == prompt_part(example.input_ids, example.labels)
    assert tokenizer.decode(example.input_ids) == "How many pens<|endoftext|>"
    assert example.labels[len(alone) :] == example.input_ids[len(alone) :]


def test_plain_text_is_cut_into_blocks_that_are_learned_whole(tokenizer: PreTrainedTokenizerBase) -> None:
    texts = ["How many pens are there? " * 3, "hello again " * 5]
    blocks = list(text_blocks(tokenizer, texts, 16))
    assert all(len(block.input_ids) <= 16 and block.labels == block.input_ids for block in blocks)
    joined = str(tokenizer.decode([token for block in blocks for token in block.input_ids]))
    everything = "".join(text + "<|endoftext|>" for text in texts)
    assert everything.startswith(joined)
    assert len(tokenizer(everything)["input_ids"]) - sum(len(b.input_ids) for b in blocks) <= 8
    assert prompt_part(blocks[0].input_ids, blocks[0].labels) == blocks[0].input_ids[:4]


def test_an_example_is_shown_with_its_mask_and_special_tokens(tokenizer: PreTrainedTokenizerBase) -> None:
    stream = io.StringIO()
    show(vars(labelled(tokenizer, "How many? [dim]\n", "4 pens")), tokenizer, Console(file=stream))
    assert stream.getvalue().startswith("How many? [dim]\n[[4 pens<|endoftext|>]]\n")
