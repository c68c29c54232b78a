"""Chats of others: brought into one form, rendered by the target's chat template, masked turn by turn.

A row that cannot be used raises `UnusableRow`; the corpus leaves it out and counts it, as it does overlong rows.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from os.path import commonprefix
from typing import Any

from datasets import Dataset
from rich.console import Console
from rich.text import Text
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from decode.errors import UserError
from decode.models.tokens import (
    batch_prompt_ids,
    continuation_ids,
    end_token,
    plain_ids,
    render_chat,
    start_ids,
    written_ids,
)
from decode.progress import output_console

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


SHAREGPT = {"human": "user", "gpt": "assistant"}  # shareGPT's roles in the usual words
MARK = "\ue000answer\ue001"
"""Stands for an answer while its place in a rendered chat is looked for; no text contains these characters."""


@dataclass(frozen=True)
class ChatFormat:
    """How chats become text."""

    tokenizer: PreTrainedTokenizerBase  # with a chat template
    system: str | None = None  # a system message for chats that have none
    # further variables of the template, such as ``enable_thinking``
    template_args: Mapping[str, Any] = field(default_factory=dict)

    def render(self, messages: Sequence[Mapping[str, Any]], *, ask: bool = False, tools: Any = None) -> str:
        """The messages as the template writes them; with ``ask`` up to the beginning of the assistant's next turn."""
        extra = dict(self.template_args) | ({"tools": tools} if tools else {})
        try:
            return render_chat(self.tokenizer, messages, ask=ask, template_args=extra)
        except UserError as error:
            if not self.tokenizer.chat_template:
                raise
            raise UnusableRow("that the chat template refuses", str(error)) from error


def clean_messages(value: Any) -> list[dict[str, Any]]:
    """The messages of a row as ``{role, content}``, the content a text, with the tool calls as objects.

    Read are OpenAI's messages, their content parts of text, JSON text of messages (csv), and ShareGPT's fields, whose
    chats may begin halfway. A chat is cut before an assistant's turn that says nothing.

    Raises:
        UnusableRow: no messages, content that is no text, nothing that the assistant says, or nothing before it.
    """
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            raise UnusableRow("whose messages are not a list") from None
    if not isinstance(value, Sequence) or not all(isinstance(m, Mapping) for m in value):
        raise UnusableRow("whose messages are not a list")
    raw = [{key: item for key, item in message.items() if item is not None} for message in value]
    if raw and "from" in raw[0]:
        raw = [{"role": SHAREGPT.get(str(m.get("from")), m.get("from")), "content": m.get("value")} for m in raw]
        raw = raw[1:] if raw[0]["role"] == "assistant" else raw
    messages: list[dict[str, Any]] = []
    for message in map(_clean, raw):
        if message["role"] == "assistant" and not message["content"].strip() and not message.get("tool_calls"):
            break
        messages.append(message)
    turns = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
    if not turns:
        raise UnusableRow("without an assistant's turn")
    if all(message["role"] in ("system", "developer") for message in messages[: turns[0]]):
        raise UnusableRow("that begin with the assistant")
    return messages[: turns[-1] + 1]


def chat_examples(chat: ChatFormat, messages: list[dict[str, Any]], tools: Any = None) -> list[Example]:
    """Examples of one conversation; the labels are what the assistant says, its end-of-turn token included.

    The conversation is one example, as long as the place of every assistant's turn can be found in what the template
    writes. Templates that rewrite earlier turns (Qwen3 leaves their reasoning out) are met by rendering the whole
    conversation, in which earlier turns are learned as the template shows them. Where a turn cannot be found there,
    every assistant's turn becomes an example of its own, with all turns before it.

    Args:
        chat: template and settings.
        messages: from `clean_messages`.
        tools: descriptions of the tools, for templates that write them.

    Raises:
        UnusableRow: no assistant's turn, or a template that refuses the messages, does not write tool calls or does
            not continue its own generation prompt.
        UserError: the tokenizer has no chat template.
    """
    if chat.system is not None and messages[0]["role"] not in ("system", "developer"):
        messages = [{"role": "system", "content": chat.system}, *messages]
    turns = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
    if not turns:
        raise UnusableRow("without an assistant's turn")
    cuts = [
        (chat.render(messages[:i], ask=True, tools=tools), chat.render(messages[: i + 1], tools=tools)) for i in turns
    ]
    whole = cuts[-1][1]
    for name in (call["function"]["name"] for i in turns for call in messages[i].get("tool_calls", ())):
        if name not in whole:
            raise UnusableRow("with tool calls that the chat template does not write")
    before = messages[: turns[0]]
    marks = [place for pair in cuts for place in map(len, pair)]
    if not all(whole.startswith(text) for pair in cuts for text in pair) or marks != sorted(marks):
        marks = _places(chat, messages, turns, whole, cuts, tools)
    if marks:
        return [_masked(chat.tokenizer, whole, marks, before)]
    if not all(after.startswith(prompt) for prompt, after in cuts):
        raise UnusableRow("whose chat template does not continue its own generation prompt", repr(cuts[0][1][-200:]))
    return [
        _masked(chat.tokenizer, after, [len(prompt), len(after)], messages[:i])
        for i, (prompt, after) in zip(turns, cuts, strict=True)
    ]


def prompt_example(chat: ChatFormat, messages: list[dict[str, Any]]) -> Example:
    """A chat that the assistant has yet to answer: nothing is a label.

    Raises:
        UnusableRow: a template that refuses the messages.
    """
    if chat.system is not None and messages[0]["role"] not in ("system", "developer"):
        messages = [{"role": "system", "content": chat.system}, *messages]
    text = chat.render(messages, ask=True)
    ids = written_ids(chat.tokenizer, text)
    return Example(ids, [IGNORE] * len(ids), text, "", messages)


def _clean(message: dict[str, Any]) -> dict[str, Any]:
    """One message with its content as text and the arguments of its tool calls as objects."""
    content = message.get("content", "")
    if isinstance(content, Sequence) and not isinstance(content, str):
        content = "".join(map(_part, content))
    if not isinstance(content, str):
        raise UnusableRow("with content that is not text")
    if not isinstance(message.get("role"), str):
        raise UnusableRow("with a turn that has no role")
    if not content.strip() and message["role"] == "user":
        raise UnusableRow("with an empty user's turn")
    cleaned = message | {"content": content}
    if cleaned.pop("tool_calls", None):
        cleaned["tool_calls"] = [_call(call) for call in message["tool_calls"]]
    return cleaned


def _part(part: Any) -> str:
    """The text of one of OpenAI's content parts."""
    text = part.get("text") if isinstance(part, Mapping) and part.get("type", "text") == "text" else part
    if not isinstance(text, str):
        raise UnusableRow("with content that is not text")
    return text


def _call(call: Any) -> dict[str, Any]:
    """A tool call whose arguments are an object, as templates expect; OpenAI writes them as JSON text."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise UnusableRow("with a tool call that names no function")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            raise UnusableRow("with tool arguments that are no JSON") from None
    return {**call, "function": {**function, "arguments": arguments}}


def _places(
    chat: ChatFormat,
    messages: list[dict[str, Any]],
    turns: list[int],
    whole: str,
    cuts: list[tuple[str, str]],
    tools: Any,
) -> list[int]:
    """Beginnings and ends of the assistant's turns in ``whole``, in turn; none where one of them cannot be found.

    An answer is where the rendered text changes when another one stands in its place; what the template writes after
    the answer belongs to the turn (the end-of-turn token).
    """
    places: list[int] = []
    for i, (prompt, after) in zip(turns, cuts, strict=True):
        other = {"role": "assistant", "content": MARK}
        changed = chat.render([*messages[:i], other, *messages[i + 1 :]], tools=tools)
        start, stop = _difference(whole, changed)
        if whole.startswith(prompt):
            start = len(prompt)
        end = _difference(after, chat.render([*messages[:i], other], tools=tools))[1]
        after_answer = after[end:]
        if not start < stop or not whole.startswith(after_answer, stop) or (places and start < places[-1]):
            return []
        places += [start, stop + len(after_answer)]
    return places


def _difference(one: str, other: str) -> tuple[int, int]:
    """Where the first text begins and ceases to differ from the second."""
    start = len(commonprefix([one, other]))  # noqa: RUF071
    tail = len(commonprefix([one[start:][::-1], other[start:][::-1]]))  # noqa: RUF071
    return start, len(one) - tail


def _masked(
    tokenizer: PreTrainedTokenizerBase, whole: str, marks: list[int], before: Sequence[dict[str, Any]]
) -> Example:
    """Tokenises ``whole`` in pieces; marks are the beginnings and ends of what is learned, in turn."""
    pieces = [whole[start:stop] for start, stop in pairwise([0, *marks])]
    encoded = [written_ids(tokenizer, pieces[0]), *continuation_ids(tokenizer, pieces[1:])]
    input_ids: list[int] = []
    labels: list[int] = []
    for place, ids in enumerate(encoded):
        input_ids += ids
        labels += _until_end(ids, tokenizer.eos_token_id) if place % 2 else [IGNORE] * len(ids)
    if tokenizer.eos_token_id not in encoded[-1]:
        input_ids.append(end_token(tokenizer))
        labels.append(end_token(tokenizer))
    return Example(input_ids, labels, pieces[0], whole[marks[0] :], list(before))


def _until_end(ids: list[int], end: int | None) -> list[int]:
    """Labels of a turn: nothing is learned after its end token (a template's line break, say)."""
    stop = ids.index(end) + 1 if end in ids else len(ids)
    return ids[:stop] + [IGNORE] * (len(ids) - stop)


def check_masks(rows: Dataset | Sequence[Mapping[str, Any]], tokenizer: PreTrainedTokenizerBase, kind: str) -> None:
    """Checks that some tokens are labels, and that prompts are not.

    Raises:
        UserError: all tokens of all examples are masked, or (pairs and chat) none are; one example is shown.
    """
    if all(label == IGNORE for row in rows for label in row["labels"]):
        problem = "every token is masked, so there is nothing to learn"
    elif kind != "text" and all(label != IGNORE for row in rows for label in row["labels"]):
        problem = "no token is masked, so prompts would be learned as if they were answers"
    else:
        return
    shown = render(rows[0], tokenizer).plain
    raise UserError(
        f"label masks: {problem} in all {len(rows)} examples. The first ([[...]] is learned):\n{shown}\n"
        "Check data.kind, the templates and, for chats, the roles"
    )


def render(row: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase) -> Text:
    """One example as text: what is masked dim, what is learned green in [[ ]], special tokens in reverse."""
    text = Text()
    learned = False
    special = set(tokenizer.all_special_ids)
    for ids, is_label, is_special in _runs(row["input_ids"], row["labels"], special):
        if is_label != learned:
            text.append("[[" if is_label else "]]", style="bold green")
            learned = is_label
        style = "green" if is_label else "dim"
        text.append(str(tokenizer.decode(ids)), style=f"{style} reverse" if is_special else style)
    if learned:
        text.append("]]", style="bold green")
    return text


def show(row: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase, console: Console | None = None) -> None:
    """Prints one example with its mask, and how many of its tokens are learned."""
    console = console or output_console()
    learned = sum(label != IGNORE for label in row["labels"])
    console.print(render(row, tokenizer))
    console.print(f"{len(row['labels'])} tokens, {learned} of them learned (in [[ ]])", style="dim", markup=False)


def _runs(input_ids: Sequence[int], labels: Sequence[int], special: set[int]) -> list[tuple[list[int], bool, bool]]:
    """Neighbouring tokens of one sort: ids, whether they are labels, whether they are special tokens."""
    runs: list[tuple[list[int], bool, bool]] = []
    for token, label in zip(input_ids, labels, strict=True):
        sort = (label != IGNORE, token in special)
        if runs and runs[-1][1:] == sort:
            runs[-1][0].append(token)
        else:
            runs.append(([token], *sort))
    return runs


EOS = "<|endoftext|>"


PAD = "<|pad|>"


SMALLEST = 256 + 2  # every byte and the two special tokens


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Trains a tokenizer that encodes any text without loss.

    Words with their leading space are the largest pieces. Every digit is a token of its own, so that numbers are
    copied and computed digit by digit. The same texts give the same tokenizer.

    Args:
        texts: what to learn the pieces from.
        vocab_size: tokens at most, special tokens and the 256 bytes included; fewer where the texts hold no more
            repeated pieces.

    Returns:
        A tokenizer with ``<|endoftext|>`` (id 0) as end of text and ``<|pad|>`` (id 1); it adds neither by itself.

    Raises:
        UserError: ``vocab_size`` has no room for the bytes.
    """
    if vocab_size < SMALLEST:
        raise UserError(
            f"tokenizer_vocab_size is {vocab_size}, but {SMALLEST} tokens are the least that can write any text: "
            f"set it to {SMALLEST} or more, 1024 for example"
        )
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=[EOS, PAD],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    core.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token=EOS, pad_token=PAD, clean_up_tokenization_spaces=False
    )
