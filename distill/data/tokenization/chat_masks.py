"""Chats of others: brought into one form, rendered by the target's chat template, masked turn by turn.

A row that cannot be used raises `UnusableRow`; the corpus leaves it out and counts it, as it does overlong rows.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from os.path import commonprefix
from typing import Any

from transformers import PreTrainedTokenizerBase

from decode.core.errors import UserError
from decode.models.prompt_tokens import continuation_ids, end_token, render_chat, written_ids
from distill.data.tokenization.label_masks import IGNORE, Example, UnusableRow

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
