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

IGNORE = -100
"""Label of a position that no loss is taken on."""


@dataclass(frozen=True)
class Example:
    """Token ids with labels of the same length (not shifted), and the texts they stand for."""

    input_ids: list[int]
    labels: list[int]
    prompt: str
    response: str


def encode_prompts(tokenizer: PreTrainedTokenizerBase, prompts: Sequence[str]) -> list[list[int]]:
    """Ids of prompts as generation sees them: with the tokenizer's own start token, if any, and no end token."""
    encoded: list[list[int]] = tokenizer(list(prompts))["input_ids"]
    end = tokenizer.eos_token_id
    return [ids[:-1] if len(ids) > 1 and ids[-1] == end else ids for ids in encoded]


def encode_responses(tokenizer: PreTrainedTokenizerBase, responses: Sequence[str]) -> list[list[int]]:
    """Ids of responses as a continuation of something, followed by the end-of-text token."""
    end = end_token(tokenizer)
    return [[*ids, end] for ids in encode_continuations(tokenizer, responses)]


def encode_continuations(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[list[int]]:
    """Ids of texts that follow other text: no start token, and no space put before the first word.

    SentencePiece tokenizers write "▁" before the first word of any text. There the texts are encoded after a line
    break, whose ids are taken off again.
    """
    first = tokenizer.convert_ids_to_tokens(_plain(tokenizer, ["a"])[0])[0]
    if not first.startswith("▁"):
        return _plain(tokenizer, texts)
    anchor = _plain(tokenizer, ["\n"])[0]
    encoded = _plain(tokenizer, [f"\n{text}" for text in texts])
    bare = _plain(tokenizer, texts)
    cut = len(anchor)
    return [long[cut:] if long[:cut] == anchor else short for long, short in zip(encoded, bare, strict=True)]


def end_token(tokenizer: PreTrainedTokenizerBase) -> int:
    """Id of the end-of-text token.

    Raises:
        UserError: the tokenizer has none.
    """
    end = tokenizer.eos_token_id
    if not isinstance(end, int):
        raise UserError(
            f"the tokenizer {tokenizer.name_or_path!r} has no end-of-text token, so a model could not learn to stop: "
            "set eos_token in its tokenizer_config.json"
        )
    return end


def pair_examples(tokenizer: PreTrainedTokenizerBase, pairs: Sequence[tuple[str, str]]) -> Iterator[Example]:
    """Examples of (prompt, response); the labels are the response and the end-of-text token."""
    for start in range(0, len(pairs), 1000):
        batch = pairs[start : start + 1000]
        prompts = encode_prompts(tokenizer, [prompt for prompt, _ in batch])
        responses = encode_responses(tokenizer, [response for _, response in batch])
        for (prompt, response), before, after in zip(batch, prompts, responses, strict=True):
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
    cuts = [(_render(tokenizer, messages[:i], True), _render(tokenizer, messages[: i + 1])) for i in turns]
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
        held += [*encode_prompts(tokenizer, [text])[0], end]
        while len(held) >= length:
            yield _block(tokenizer, held[:length])
            held = held[length:]
    if len(held) > length // 2:
        yield _block(tokenizer, held)


def prompt_part(input_ids: Sequence[int], labels: Sequence[int]) -> list[int]:
    """The ids a measurement starts from: those before the first label, or a quarter of a block of plain text."""
    first = next((place for place, label in enumerate(labels) if label != IGNORE), len(labels))
    return list(input_ids[: first or max(1, len(input_ids) // 4)])


def _plain(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[list[int]]:
    ids: list[list[int]] = tokenizer(list(texts), add_special_tokens=False)["input_ids"]
    return ids


def _block(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> Example:
    prompt = prompt_part(ids, ids)
    return Example(ids, list(ids), str(tokenizer.decode(prompt)), str(tokenizer.decode(ids[len(prompt) :])))


def _masked(tokenizer: PreTrainedTokenizerBase, whole: str, marks: list[int]) -> Example:
    """Tokenises ``whole`` in pieces; marks are the beginnings and ends of what is learned, in turn."""
    bounds = [0, *marks]
    pieces = [whole[start:stop] for start, stop in pairwise(bounds)]
    encoded = [*_plain(tokenizer, pieces[:1]), *encode_continuations(tokenizer, pieces[1:])]
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


def _render(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]], ask: bool = False) -> str:
    if tokenizer.chat_template is None:
        raise UserError(
            f"the tokenizer {tokenizer.name_or_path!r} has no chat template: choose an instruction-tuned model's "
            "tokenizer, or kind pairs with prompt_template and response_template"
        )
    return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=ask))
