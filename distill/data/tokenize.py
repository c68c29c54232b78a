"""From texts to token ids with a label mask.

A prompt and its response are tokenised apart and then joined, so that the prompt has the same ids in training as
in generation, where the response is not yet there to merge with its last token.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from transformers import PreTrainedTokenizerBase

from decode.core.errors import UserError
from decode.models.text import continuation_ids, end_token, prompt_ids, render_chat

IGNORE = -100
"""Label of a position that no loss is taken on."""


@dataclass(frozen=True)
class Example:
    """Token ids with labels of the same length (not shifted), and the texts they stand for."""

    input_ids: list[int]
    labels: list[int]
    prompt: str
    response: str


def pair_examples(tokenizer: PreTrainedTokenizerBase, pairs: Sequence[tuple[str, str]]) -> Iterator[Example]:
    """Examples of (prompt, response); the labels are the response and the end-of-text token."""
    end = end_token(tokenizer)
    for start in range(0, len(pairs), 1000):
        batch = pairs[start : start + 1000]
        prompts = [prompt_ids(tokenizer, prompt) for prompt, _ in batch]
        responses = continuation_ids(tokenizer, [response for _, response in batch])
        for (prompt, response), before, after in zip(batch, prompts, responses, strict=True):
            after.append(end)
            yield Example(before + after, [IGNORE] * len(before) + after, prompt, response)


def chat_examples(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]]) -> list[Example]:
    """Examples of one conversation; the labels are what the assistant says, its end-of-turn token included.

    The conversation is rendered up to the beginning and to the end of each assistant turn. Where every such text is
    a beginning of the whole one, the conversation is one example. Where it is not (templates that leave earlier
    turns' reasoning out), every assistant turn is an example of its own.

    Raises:
        UserError: no chat template, no assistant turn, or a template that rewrites what it has already written.
    """
    turns = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
    if not turns or turns[0] == 0:
        raise UserError(f"a chat must have an assistant turn after another one, but has the roles {_roles(messages)}")
    cuts = [
        (render_chat(tokenizer, messages[:i], ask=True), render_chat(tokenizer, messages[: i + 1], ask=False))
        for i in turns
    ]
    whole = cuts[-1][1]
    marks = [place for pair in cuts for place in map(len, pair)]
    if all(whole.startswith(text) for pair in cuts for text in pair) and marks == sorted(marks):
        return [_masked(tokenizer, whole, marks)]
    for before, after in cuts:
        if not after.startswith(before):
            raise UserError(
                "the chat template does not continue its own generation prompt: after\n"
                f"{before[-200:]!r}\nit writes\n{after[-200:]!r}\nUse another template, or kind pairs"
            )
    return [_masked(tokenizer, after, [len(before), len(after)]) for before, after in cuts]


def text_examples(tokenizer: PreTrainedTokenizerBase, texts: Iterable[str], length: int) -> Iterator[Example]:
    """Blocks of ``length`` tokens from texts joined by the end-of-text token; every token is a label.

    ``prompt`` is the text of a block's first quarter (`prompt_part`), for measurements that need a prompt.
    """
    end = end_token(tokenizer)
    held: list[int] = []
    for text in texts:
        held += [*prompt_ids(tokenizer, text), end]
        while len(held) >= length:
            yield _block(tokenizer, held[:length])
            held = held[length:]
    if len(held) > length // 2:
        yield _block(tokenizer, held)


def prompt_part(input_ids: Sequence[int], labels: Sequence[int]) -> list[int]:
    """The ids a measurement starts from: those before the first label, or a quarter of a block of plain text."""
    first = next((place for place, label in enumerate(labels) if label != IGNORE), len(labels))
    return list(input_ids[: first or max(1, len(input_ids) // 4)])


def _block(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> Example:
    prompt = prompt_part(ids, ids)
    return Example(ids, list(ids), str(tokenizer.decode(prompt)), str(tokenizer.decode(ids[len(prompt) :])))


def _masked(tokenizer: PreTrainedTokenizerBase, whole: str, marks: list[int]) -> Example:
    """Tokenises ``whole`` in pieces; marks are the beginnings and ends of what is learned, in turn."""
    bounds = [0, *marks]
    pieces = [whole[start:stop] for start, stop in pairwise(bounds)]
    encoded = [prompt_ids(tokenizer, pieces[0]), *continuation_ids(tokenizer, pieces[1:])]
    input_ids: list[int] = []
    labels: list[int] = []
    for place, ids in enumerate(encoded):
        input_ids += ids
        labels += _until_end(ids, tokenizer.eos_token_id) if place % 2 else [IGNORE] * len(ids)
    if tokenizer.eos_token_id not in encoded[-1]:
        input_ids.append(end_token(tokenizer))
        labels.append(end_token(tokenizer))
    return Example(input_ids, labels, pieces[0], whole[marks[0] :])


def _until_end(ids: list[int], end: int | None) -> list[int]:
    """Labels of a turn: nothing is learned after its end token (a template's line break, say)."""
    stop = ids.index(end) + 1 if end in ids else len(ids)
    return ids[:stop] + [IGNORE] * (len(ids) - stop)


def _roles(messages: list[dict[str, Any]]) -> str:
    return ", ".join(str(message["role"]) for message in messages) or "none"
