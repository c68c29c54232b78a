"""From texts to token ids with a label mask.

A prompt and its response are tokenised apart and then joined, so that the prompt has the same ids in training as
in generation, where the response is not yet there to merge with its last token.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedTokenizerBase

from decode.core.errors import UserError
from decode.models.prompt_tokens import batch_prompt_ids, continuation_ids, end_token, plain_ids, start_ids

IGNORE = -100  # label of a position that no loss is taken on


class UnusableRow(UserError):
    """A row that no example can be made of; the corpus leaves it out and counts it by its reason.

    Args:
        reason: completes "3 rows ...".
        detail: what is particular to this row.
    """

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"a row {reason}{f': {detail}' if detail else ''}")
        self.reason, self.detail = reason, detail


@dataclass(frozen=True)
class Example:
    """Token ids with labels of the same length (not shifted), and the texts they stand for."""

    input_ids: list[int]
    labels: list[int]
    prompt: str
    response: str
    # of a chat, the turns before the response, as a server's chat endpoint takes them
    messages: list[dict[str, Any]] = field(default_factory=list)


def pair_examples(tokenizer: PreTrainedTokenizerBase, pairs: Sequence[tuple[str, str]]) -> Iterator[Example]:
    """Examples of (prompt, response); the labels are the response and the end-of-text token."""
    end = end_token(tokenizer)
    for start in range(0, len(pairs), 1000):
        batch = pairs[start : start + 1000]
        prompts = batch_prompt_ids(tokenizer, [prompt for prompt, _ in batch])
        responses = continuation_ids(tokenizer, [response for _, response in batch])
        for (prompt, response), before, after in zip(batch, prompts, responses, strict=True):
            after.append(end)
            yield Example(before + after, [IGNORE] * len(before) + after, prompt, response)


def text_examples(tokenizer: PreTrainedTokenizerBase, texts: Iterable[str], length: int) -> Iterator[Example]:
    """Blocks of ``length`` tokens from texts joined by the end-of-text token; every token is a label.

    ``prompt`` is the text of a block's first quarter (`prompt_part`), for measurements that need a prompt.
    """
    start, end = start_ids(tokenizer), end_token(tokenizer)
    held: list[int] = []
    for text in texts:
        held += [*start, *plain_ids(tokenizer, [text])[0], end]
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
