"""Conversations, prompts with responses, and plain texts to token ids and labels.

`render_row` renders a row into texts with the character spans that are learned (a conversation by `chat_turns`), and
`label` makes token ids and labels of them. A row that cannot be used raises `UnusableRow`; the corpus leaves it out and
counts it.
"""

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, groupby, pairwise
from os.path import commonprefix
from typing import Any

from rich.console import Console
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from decode.errors import UserError
from decode.models.tokens import batch_prompt_ids, continuation_ids, end_token, plain_ids, render_chat, start_ids
from decode.progress import output_console

IGNORE = -100  # label of a position that no loss is taken on
SHAREGPT = {"human": "user", "gpt": "assistant"}  # ShareGPT's roles in the usual words
MARK = "\ue000answer\ue001"  # replaces an answer while its place in a rendered chat is searched; in no text


class UnusableRow(UserError):
    """A row that no example can be made of; the corpus leaves it out and counts it by its reason.

    Args:
        reason: Completes "3 rows ...".
        detail: What is particular to this row.
    """

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"a row {reason}{f': {detail}' if detail else ''}")
        self.reason, self.detail = reason, detail


@dataclass(frozen=True)
class Rendered:
    """A text with the character spans that are learned.

    Attributes:
        text: Prompt and response, or a whole chat.
        spans: Start and end of each span, ascending; empty for a prompt that is to be answered.
    """

    text: str
    spans: Sequence[tuple[int, int]] = ()


@dataclass
class Example:
    """Token ids, labels of the same length (not shifted), and the texts before and from the first label."""

    input_ids: list[int]
    labels: list[int]
    prompt: str
    response: str


def label(tokenizer: PreTrainedTokenizerBase, rendered: Sequence[Rendered], *, chat: bool) -> list[Example]:
    """Tokenises texts; the labels are their spans, each up to its first end-of-text token.

    The text before, between and inside the spans is tokenised piece by piece, so that a prompt has the ids it has when
    the model is served. A last span without an end-of-text token gets one. Text after the last span is left out.

    Args:
        tokenizer: Of the target.
        rendered: Texts and spans.
        chat: The texts are written by a chat template, which writes the start token itself.

    Raises:
        UserError: The tokenizer has no end-of-text token, or a template writes nothing before the first span.
    """
    prompts = [one.text[: one.spans[0][0]] if one.spans else one.text for one in rendered]
    heads = plain_ids(tokenizer, prompts) if chat else batch_prompt_ids(tokenizer, prompts)
    if chat and not all(heads):
        raise UserError("the chat template writes nothing before the assistant's turn: set data.chat_template")
    parts = [one.text[start:stop] for one in rendered for start, stop in pairwise(chain(*one.spans))]
    pieces, examples = iter(continuation_ids(tokenizer, parts) if parts else []), []
    for one, prompt, ids in zip(rendered, prompts, heads, strict=True):
        labels, piece = [IGNORE] * len(ids), list[int]()
        for place in range(2 * len(one.spans) - 1):
            piece = next(pieces)
            ids += piece
            labels += [IGNORE] * len(piece) if place % 2 else until_end(piece, {tokenizer.eos_token_id})
        if one.spans and tokenizer.eos_token_id not in piece:
            ids.append(end_token(tokenizer))
            labels.append(ids[-1])
        examples.append(Example(ids, labels, prompt, one.text[len(prompt) :]))
    return examples


def until_end(response: Sequence[int], ends: Collection[int | None]) -> list[int]:
    """Labels of a response: the ids up to and with the first of ``ends``, then `IGNORE`."""
    stop = next((place + 1 for place, token in enumerate(response) if token in ends), len(response))
    return [*response[:stop], *[IGNORE] * (len(response) - stop)]


def prompt_part(input_ids: Sequence[int], labels: Sequence[int]) -> list[int]:
    """The ids before the first label; of plain text, whose tokens are all labels, the first quarter."""
    first = next((place for place, token in enumerate(labels) if token != IGNORE), len(labels))
    return list(input_ids[: first or max(1, len(input_ids) // 4)])


def pair(prompt: str, response: str) -> Rendered:
    """A prompt followed by its response, which is learned."""
    return Rendered(prompt + response, [(len(prompt), len(prompt) + len(response))])


def text_blocks(tokenizer: PreTrainedTokenizerBase, texts: Iterable[str], length: int) -> Iterator[Example]:
    """Blocks of ``length`` tokens from texts joined by the end-of-text token; every token is a label."""
    start, end = start_ids(tokenizer), end_token(tokenizer)
    held: list[int] = []

    def block(ids: list[int]) -> Example:
        prompt = prompt_part(ids, ids)
        return Example(ids, ids, str(tokenizer.decode(prompt)), str(tokenizer.decode(ids[len(prompt) :])))

    for text in texts:
        held += [*start, *plain_ids(tokenizer, [text])[0], end]
        while len(held) >= length:
            yield block(held[:length])
            held = held[length:]
    if len(held) > length // 2:
        yield block(held)


# -- chats ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ChatFormat:
    """How chats become text.

    Attributes:
        tokenizer: With a chat template.
        system: System message of chats that have none.
        template_args: Further variables of the template, such as ``enable_thinking``.
    """

    tokenizer: PreTrainedTokenizerBase
    system: str | None = None
    template_args: Mapping[str, Any] = field(default_factory=dict)

    def with_system(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The messages, after the system message if there is one and they have none."""
        if self.system is None or (messages and messages[0]["role"] in ("system", "developer")):
            return messages
        return [{"role": "system", "content": self.system}, *messages]

    def render(self, messages: Sequence[Mapping[str, Any]], *, ask: bool = False, tools: Any = None) -> str:
        """The messages as the template writes them; with ``ask`` up to the start of the assistant's next turn.

        Raises:
            UnusableRow: The template refuses the messages.
        """
        extra = dict(self.template_args) | ({"tools": tools} if tools else {})
        try:
            return render_chat(self.tokenizer, messages, ask=ask, template_args=extra)
        except UserError as error:
            if not self.tokenizer.chat_template:
                raise
            raise UnusableRow("that the chat template refuses", str(error)) from error


def render_row(row: Mapping[str, Any], chat: ChatFormat | None) -> list[Rendered]:
    """A row of `distill.data.sources` as texts: ``{prompt, response}``, ``{messages, tools}``, or a prompt's messages.

    Args:
        row: A pair, a conversation, or with ``ask`` the turns that the target is to answer.
        chat: How conversations and pairs are rendered; None: a pair is its prompt followed by its response.

    Raises:
        UnusableRow: See `chat_turns`.
    """
    if chat is None:
        return [pair(row["prompt"], row["response"])]
    if row.get("ask"):
        return [Rendered(chat.render(chat.with_system(row["messages"]), ask=True))]
    if "messages" in row:
        return chat_turns(chat, row["messages"], row["tools"])
    said = row.get("said") or row["prompt"]  # what only separates a pair's prompt and response is left to the template
    turns = [{"role": "user", "content": said.strip()}, {"role": "assistant", "content": row["response"].strip()}]
    return chat_turns(chat, turns)


def chat_turns(chat: ChatFormat, messages: list[dict[str, Any]], tools: Any = None) -> list[Rendered]:
    """One conversation as text; the spans are the assistant's turns with their end-of-turn tokens.

    The conversation is one text, as long as every assistant's turn can be found in what the template writes for all of
    it. Templates that rewrite earlier turns (Qwen3 removes their reasoning) have these learned as written there: an
    answer is where the rendered text changes if another answer replaces it, with what the template writes after it.
    Where a turn cannot be found, every assistant's turn becomes a text of its own, with all turns before it.

    Args:
        chat: Template and settings.
        messages: From `clean_messages`.
        tools: Descriptions of the tools, for templates that write them.

    Raises:
        UnusableRow: No assistant's turn, or a template that refuses the messages, does not write the tool calls or
            does not continue its own generation prompt.
    """
    messages = chat.with_system(messages)
    turns = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
    if not turns:
        raise UnusableRow("without an assistant's turn")
    cuts = [
        (chat.render(messages[:i], ask=True, tools=tools), chat.render(messages[: i + 1], tools=tools)) for i in turns
    ]
    whole, spans, other = cuts[-1][1], list[tuple[int, int]](), {"role": "assistant", "content": MARK}
    if any(call["function"]["name"] not in whole for i in turns for call in messages[i].get("tool_calls", ())):
        raise UnusableRow("with tool calls that the chat template does not write")
    for i, (prompt, after) in zip(turns, cuts):
        start, stop = len(prompt), len(after)
        if not (whole.startswith(prompt) and whole.startswith(after)):
            begin, stop = _difference(whole, chat.render([*messages[:i], other, *messages[i + 1 :]], tools=tools))
            start = start if whole.startswith(prompt) else begin
            tail = after[_difference(after, chat.render([*messages[:i], other], tools=tools))[1] :]
            if start >= stop or not whole.startswith(tail, stop):
                break
            stop += len(tail)
        if start > stop or (spans and start < spans[-1][1]):
            break
        spans.append((start, stop))
    else:
        return [Rendered(whole, spans)]
    if not all(after.startswith(prompt) for prompt, after in cuts):
        raise UnusableRow("whose chat template does not continue its own generation prompt", repr(cuts[0][1][-200:]))
    return [Rendered(after, [(len(prompt), len(after))]) for prompt, after in cuts]


def _difference(one: str, other: str) -> tuple[int, int]:
    """Start and end of the part of the first text that differs from the second."""
    start = len(commonprefix([one, other]))  # noqa: RUF071
    tail = len(commonprefix([one[start:][::-1], other[start:][::-1]]))  # noqa: RUF071
    return start, len(one) - tail


def clean_messages(value: Any) -> list[dict[str, Any]]:
    """The messages of a row (see `read_messages`), up to the assistant's last turn.

    Raises:
        UnusableRow: Messages that cannot be read, no assistant's turn, or none before it.
    """
    messages = read_messages(value)
    turns = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
    if not turns:
        raise UnusableRow("without an assistant's turn")
    if all(message["role"] in ("system", "developer") for message in messages[: turns[0]]):
        raise UnusableRow("that begin with the assistant")
    return messages[: turns[-1] + 1]


def read_messages(value: Any) -> list[dict[str, Any]]:
    """Messages as ``{role, content}``, the content a text, with tool calls whose arguments are objects.

    Accepts OpenAI's messages, their content parts of text, JSON text of messages (CSV), and ShareGPT's fields, whose
    chats may begin with the assistant. A chat is cut before an assistant's turn without content.

    Raises:
        UnusableRow: No messages, content that is no text, a turn without a role, or a broken tool call.
    """
    try:
        value = json.loads(value) if isinstance(value, str) else value
    except ValueError:
        value = None
    if not isinstance(value, list) or not all(isinstance(message, dict) for message in value):
        raise UnusableRow("whose messages are not a list")
    messages: list[dict[str, Any]] = []
    for place, raw in enumerate(value):
        message = {key: item for key, item in raw.items() if item is not None}
        if "from" in value[0]:
            message = {"role": SHAREGPT.get(raw.get("from"), raw.get("from")), "content": raw.get("value")}
            if place == 0 and message["role"] == "assistant":
                continue
        role, content, calls = message.get("role"), message.get("content", ""), list[Any]()
        if isinstance(content, list):
            parts: list[Any] = [part.get("text") if isinstance(part, dict) else part for part in content]
            content = "".join(parts) if all(isinstance(part, str) for part in parts) else None
        if not isinstance(content, str):
            raise UnusableRow("with content that is not text")
        if not isinstance(role, str):
            raise UnusableRow("with a turn that has no role")
        if role == "user" and not content.strip():
            raise UnusableRow("with an empty user's turn")
        for call in message.pop("tool_calls", ()):
            function = call.get("function") if isinstance(call, dict) else None
            if not isinstance(function, dict) or not isinstance(function.get("name"), str):
                raise UnusableRow("with a tool call that names no function")
            arguments = function.get("arguments")
            try:
                arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
            except ValueError:
                raise UnusableRow("with tool arguments that are no JSON") from None
            calls.append({**call, "function": {**function, "arguments": arguments}})
        if role == "assistant" and not content.strip() and not calls:
            break
        messages.append(message | {"content": content} | ({"tool_calls": calls} if calls else {}))
    return messages


def render(row: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase) -> Text:
    """One example as text: masked tokens dim, labels green in [[ ]]."""
    text, tokens = Text(), zip(row["input_ids"], row["labels"], strict=True)
    for learned, part in groupby(tokens, lambda token: token[1] != IGNORE):
        piece = str(tokenizer.decode([token for token, _ in part]))
        text.append(f"[[{piece}]]" if learned else piece, style="green" if learned else "dim")
    return text


def show(row: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase, console: Console | None = None) -> None:
    """Prints one example with its mask, and how many of its tokens are learned."""
    console = console or output_console()
    learned = sum(token != IGNORE for token in row["labels"])
    console.print(render(row, tokenizer))
    console.print(f"{len(row['labels'])} tokens, {learned} of them learned (in [[ ]])", style="dim", markup=False)
