"""Conversations, prompts with responses, and plain texts to token ids and labels.

`render_row` makes turns of a row (of a conversation by `chat_turns`): prompts as the model is served, each with the
answer that is learned. `label` makes token ids and labels of them, and checks that training sees what serving sees. A
row that cannot be used raises `UnusableRow`; the corpus leaves it out and counts it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, NamedTuple

from rich.console import Console
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from decode.errors import UserError
from decode.models.tokens import (
    REASONING,
    batch_prompt_ids,
    continuation_ids,
    control_token,
    end_token,
    plain_ids,
    render_chat,
    start_ids,
)
from distill.data.messages import KEYS, UnusableRow

IGNORE = -100  # label of a position that no loss is taken on
NO_THOUGHT = (
    "without reasoning, for which the chat template has a place (data.template_args: {enable_thinking: false}?)"
)
MARK, THOUGHT, ASKED = (f"\ue000{name}\ue001" for name in ("answer", "thought", "question"))
"""Stand in no text: their places are searched in rendered chats."""


@dataclass(frozen=True)
class Turn:
    """What the model says, and the text that it is given before.

    Attributes:
        prompt: As the model is served.
        answer: Is learned; empty for a prompt that is to be answered.
        said: Texts of the row that have to stand whole in what is learned.
    """

    prompt: str
    answer: str
    said: tuple[str, ...] = ()


@dataclass
class Example:
    """Token ids, labels of the same length (not shifted), and the texts before and from the first label."""

    input_ids: list[int]
    labels: list[int]
    prompt: str
    response: str


def label(
    tokenizer: PreTrainedTokenizerBase, rows: Sequence[Sequence[Turn]], ends: Sequence[int] = (), *, chat: bool
) -> list[list[Example] | UnusableRow]:
    """Token ids and labels of rows of turns.

    Every answer follows exactly the ids that its prompt has when the model is served, holds the whole of what the row
    says, and ends with its first stop token, which it gets where the text has none. Turns are one example as long as
    each prompt continues the example before it.

    Args:
        tokenizer: Of the target.
        rows: The turns of each row.
        ends: Ids that end the target's texts; none: the tokenizer's end-of-text token.
        chat: The prompts are written by a chat template, which writes the start token itself.

    Returns:
        The examples of each row, or why it cannot be used.

    Raises:
        UserError: The tokenizer has no end-of-text token, or a template writes nothing before an answer.
    """
    if not (turns := [turn for row in rows for turn in row]):
        return []
    ends, prompts = ends or [end_token(tokenizer)], [turn.prompt for turn in turns]
    before = rendered_ids(tokenizer, prompts, ends) if chat else batch_prompt_ids(tokenizer, prompts)
    if chat and not all(before):
        raise UserError("the chat template writes nothing before the assistant's turn: set data.chat_template")
    answers = continuation_ids(tokenizer, [turn.answer for turn in turns])
    last = tokenizer.eos_token_id if tokenizer.eos_token_id in ends else ends[0]
    for turn, ids in zip(turns, answers):
        if turn.answer and not any(token in ends for token in ids):
            ids.append(last)
    written, pieces = iter(_decoded(tokenizer, answers)), map(Piece, before, answers, turns)
    made: list[list[Example] | UnusableRow] = []
    for row in rows:
        answered, problem = [next(pieces) for _ in row], None
        for piece, text in zip(answered, [next(written) for _ in row]):
            missing = [said for said in piece.turn.said if squash(said) not in squash(text)]
            reread = _decoded(tokenizer, plain_ids(tokenizer, missing)) if missing else []
            missing = [said for said, read in zip(missing, reread) if squash(read) not in squash(text)]  # changed by it
            if missing or any(token in ends for token in piece.answer[:-1]):
                detail = repr((missing or [str(tokenizer.decode(piece.answer))])[0][:80])
                problem = problem or UnusableRow("whose answer is not learned whole, up to one stop token", detail)
        made.append(problem or joined(answered))
    return made


class Piece(NamedTuple):
    """The ids of a prompt and of its answer, and both as text."""

    prompt: list[int]
    answer: list[int]
    turn: Turn


def joined(pieces: Iterable[Piece]) -> list[Example]:
    """Examples of the turns of a conversation, one as long as each prompt continues the example before it."""
    examples = list[Example]()
    for prompt, answer, turn in pieces:
        labels, first = [IGNORE] * len(prompt) + answer, turn.prompt
        if examples and prompt[: len(examples[-1].input_ids)] == examples[-1].input_ids:
            labels[: len(examples[-1].labels)] = examples[-1].labels
            first = examples.pop().prompt
        examples.append(Example(prompt + answer, labels, first, (turn.prompt + turn.answer)[len(first) :]))
    return examples


def rendered_ids(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], ends: Sequence[int]) -> list[list[int]]:
    """Ids of rendered chats, of which parts that many of them have, such as earlier turns, are tokenised once.

    Nothing is merged across a special token, so the ids of parts that begin with one are those of the whole text.
    """
    added = tokenizer.added_tokens_decoder
    plain = [token for end in ends if (token := added.get(end)) and token.special and not token.normalized]
    stops = {
        str(stop) for stop in plain if not stop.lstrip and not any(str(stop) in str(t)[1:] for t in added.values())
    }
    pattern = re.compile("(?=" + "|".join(map(re.escape, sorted(stops))) + ")")
    parts = [pattern.split(text) if stops else [text] for text in texts]
    known = list(dict.fromkeys(part for text in parts for part in text if part))
    ids = dict(zip(known, plain_ids(tokenizer, known))) if known else {}
    return [[token for part in text if part for token in ids[part]] for text in parts]


def _decoded(tokenizer: PreTrainedTokenizerBase, ids: Sequence[Sequence[int]]) -> list[str]:
    return list(tokenizer.batch_decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def squash(text: str) -> str:
    """The text without white space, which templates and tokenizers change."""
    return "".join(text.split())


def until_end(response: Sequence[int], ends: Collection[int | None]) -> list[int]:
    """Labels of a response: the ids up to and with the first of ``ends``, then `IGNORE`."""
    stop = next((place + 1 for place, token in enumerate(response) if token in ends), len(response))
    return [*response[:stop], *[IGNORE] * (len(response) - stop)]


def prompt_part(input_ids: Sequence[int], labels: Sequence[int]) -> list[int]:
    """The ids before the first label; of plain text, whose tokens are all labels, the first quarter."""
    first = next((place for place, token in enumerate(labels) if token != IGNORE), len(labels))
    return list(input_ids[: first or max(1, len(input_ids) // 4)])


def pair(prompt: str, response: str) -> Turn:
    """A prompt followed by its response, which is learned."""
    return Turn(prompt, response, (response,))


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
        ends: Ids that end the target's texts; none: the tokenizer's end-of-text token.
    """

    tokenizer: PreTrainedTokenizerBase
    system: str | None = None
    template_args: Mapping[str, Any] = field(default_factory=dict)
    ends: Sequence[int] = ()

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

    def ask(self, messages: list[dict[str, Any]], tools: Any = None, checked: tuple[int, str] = (0, "")) -> str:
        """The prompt of the assistant's next turn, in which every earlier turn of others stands.

        Args:
            messages: The turns so far.
            tools: Descriptions of the tools.
            checked: How many of the messages an earlier prompt of theirs has, and that prompt.

        Raises:
            UnusableRow: The template refuses the messages or leaves one out, or one spells a control token.
        """
        prompt = self.render(messages, ask=True, tools=tools)
        count, known = checked if prompt.startswith(checked[1]) else (0, "")
        if spelt := control_token(self.tokenizer, messages[count:]):
            raise UnusableRow("with a control token of the tokenizer in their text", repr(spelt))
        written = squash(prompt[len(known) :])
        for message in messages[count:]:
            said = message["content"] or ""
            if message["role"] != "assistant" and not any(
                squash(text) in written for text in (said, json.dumps(said, ensure_ascii=False)[1:-1])
            ):
                raise UnusableRow("with a turn that the chat template does not write", message["role"])
        return prompt

    def prepared(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The messages with a system message, and no role developer for templates that do not know it."""
        messages = self.with_system(messages)
        if re.search(r"['\"]developer['\"]", str(self.tokenizer.chat_template)):
            return messages
        return [message | {"role": message["role"].replace("developer", "system")} for message in messages]

    def answer_end(self) -> int:
        """The id with which the template ends an answer."""
        turns, _ = chat_turns(self, [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}])
        (examples,) = label(self.tokenizer, [turns], self.ends, chat=True)
        ends = self.ends or [end_token(self.tokenizer)]
        return ends[0] if isinstance(examples, UnusableRow) else examples[0].labels[-1]


def render_row(row: Mapping[str, Any], chat: ChatFormat | None) -> tuple[list[Turn], list[str]]:
    """A row of `distill.data.sources` as turns, and what is to be noted of it.

    Args:
        row: A pair, a conversation, or one that ends with a question, which the target is to answer.
        chat: How conversations and pairs are rendered; None: a pair is its prompt followed by its response.

    Raises:
        UnusableRow: See `chat_turns`.
    """
    if chat is None:
        return [pair(row["prompt"], row["response"])], []
    if row["messages"]:
        messages = json.loads(row["messages"])
        if messages[-1]["role"] != "assistant":
            return [Turn(chat.ask(chat.prepared(messages)), "")], []
        turns, notes = chat_turns(chat, messages, json.loads(row["tools"] or "null"))
        return turns, [*filter(None, [row["note"]]), *notes]
    said = row["said"] or row["prompt"]  # what only separates a pair's prompt and response is left to the template
    pair_of_turns = {"user": said.strip(), "assistant": row["response"].strip()}
    return chat_turns(chat, [{"role": role, "content": text} for role, text in pair_of_turns.items()])


def chat_turns(chat: ChatFormat, messages: list[dict[str, Any]], tools: Any = None) -> tuple[list[Turn], list[str]]:
    """The assistant's turns of a conversation, each behind the prompt that it has when the model is served.

    Args:
        chat: Template and settings.
        messages: From `clean_messages`.
        tools: Descriptions of the tools, for templates that write them.

    Returns:
        The turns, and what is to be noted of the row.

    Raises:
        UnusableRow: A template that refuses the messages or does not write all of them.
    """
    template, messages = str(chat.tokenizer.chat_template), chat.prepared(messages)
    unread = {key for message in messages for key in message if key not in KEYS and key not in template}
    notes = [f"with a message's {key!r}, which is not used" for key in sorted(unread)]
    turns, checked = list[Turn](), (0, "")
    for place, message in enumerate(messages):
        if message["role"] == "assistant":
            prompt = chat.ask(messages[:place], tools, checked)
            answer, note = _answer(chat, prompt, messages[:place], message, tools)
            turns.append(Turn(prompt, *answer))
            notes.append(note)
            checked = place, prompt
    return turns, list(dict.fromkeys(filter(None, notes)))


def _answer(
    chat: ChatFormat, prompt: str, history: list[dict[str, Any]], message: dict[str, Any], tools: Any
) -> tuple[tuple[str, tuple[str, str]], str]:
    """What is learned of a turn of the assistant, with the texts that have to stand in it, and a note.

    The answer is what the template writes behind the prompt, with three exceptions:

    - an empty block of reasoning, which a template adds where a row has none (Qwen3), is no answer of the model;
    - reasoning that the prompt opens and the template then leaves out (DeepSeek-R1) is put back;
    - where the next turn's beginning is the stop token (GLM-4.5), the answer ends with it.
    """
    note = ""
    if spelt := control_token(chat.tokenizer, [message]):
        raise UnusableRow("with a control token of the tokenizer in their text", repr(spelt))
    thought, content, calls = message.get(REASONING[0], ""), message["content"], message.get("tool_calls", [])
    after = chat.render([*history, message], tools=tools)
    answer = after[len(prompt) :] if after.startswith(prompt) else ""
    complete = bool(answer) and all(text.strip() in answer for text in (thought, content))
    if not complete or not (thought or answer.lstrip().startswith(content.strip() or MARK)):
        if not thought and (inline := re.match(r"\s*<think>(.*?)</think>(.*)", content, re.DOTALL)):
            thought, content = inline[1].strip(), inline[2].strip()
        parts = answer_parts(chat, history, message, tools)
        if thought and parts.opening is None:
            raise UnusableRow("with reasoning that the chat template does not write")
        if not complete:
            lead = f"{parts.opening}{thought}{parts.closing}" if thought else parts.lead
            answer = f"{lead}{content}{parts.tail}"
            if any(call["function"]["name"] not in answer for call in calls):
                answer = parts.turn
        if not thought and parts.empty:
            answer = answer.removeprefix(parts.lead) if parts.opening else answer
            note = NO_THOUGHT
    if (ended := _until_stop(chat, answer)) is None:
        history = last_exchange(history)
        follower = {"role": "tool" if calls else "user", "content": THOUGHT}
        shown = message | {"content": MARK}
        tail = chat.render([*history, shown], tools=tools).partition(MARK)[2]
        closing = chat.render([*history, shown, follower], tools=tools).partition(MARK)[2].partition(THOUGHT)[0]
        ended = (stop := _until_stop(chat, closing)) and answer.removesuffix(tail) + stop
    answer = ended or answer.rstrip()
    for call in (call["function"] for call in calls):
        values = call["arguments"].values() if isinstance(call["arguments"], dict) else ()
        for text in (call["name"], *(value for value in values if isinstance(value, str))):
            forms = text, json.dumps(text)[1:-1], json.dumps(text, ensure_ascii=False)[1:-1]
            if not any(form in answer for form in forms):
                raise UnusableRow("with tool calls that the chat template does not write")
    return (answer, (thought, content)), note


def last_exchange(history: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The turns from the user's last one on, after a system message: what a template writes behind them is the same."""
    start = max((place for place, turn in enumerate(history) if turn["role"] == "user"), default=0)
    return [*(turn for turn in history[: min(start, 1)] if turn["role"] in ("system", "developer")), *history[start:]]


class AnswerParts(NamedTuple):
    """How a template writes an assistant's turn behind its prompt."""

    opening: str | None  # before reasoning; None: it writes no reasoning
    closing: str  # between reasoning and answer
    tail: str  # after the answer
    lead: str  # before an answer without reasoning
    empty: bool  # the lead is an empty block of reasoning, or the end of one that the prompt opens
    turn: str  # the message itself


def answer_parts(
    chat: ChatFormat, history: list[dict[str, Any]], message: Mapping[str, Any], tools: Any = None
) -> AnswerParts:
    """How a template writes an assistant's turn behind its prompt, both seen from the turn before on.

    What is earlier is not compared, because templates rewrite it: reasoning is left out, and a system message moves to
    the last question (Mistral).

    Raises:
        UnusableRow: The template does not write the answer, or writes it behind something else than its prompt.
    """
    shown, history = {key: value for key, value in message.items() if key not in REASONING}, last_exchange(history)
    names = [call["function"]["name"] for call in message.get("tool_calls", ())]

    def behind_question(*turns: Mapping[str, Any]) -> str:
        messages = [*history[:-1], {**history[-1], "content": ASKED}, *turns]
        return chat.render(messages, ask=not turns, tools=tools).rpartition(ASKED)[2]

    def written(content: str, *names_of_thought: str) -> tuple[str, str, str]:
        for base in (shown, {"role": "assistant"}):  # a template may write no text beside tool calls, or after them
            turn = base | dict.fromkeys(names_of_thought, THOUGHT) | {"content": content}
            try:
                before, mark, tail = behind_question(turn).partition(MARK)
            except UnusableRow:
                continue
            if mark and not any(name in before for name in names):
                return before, mark, tail
        return "", "", ""

    start = behind_question()
    header, mark, tail = written(MARK)
    if not mark:
        raise UnusableRow("whose answer the chat template does not write")
    pieces = [re.findall(r"<[^<>]*>|\[[^\[\]]*\]|.", text, re.DOTALL) for text in (start, header)]
    common = next((place for place, pair in enumerate(zip(*pieces)) if pair[0] != pair[1]), min(map(len, pieces)))
    ahead, lead = ("".join(text[common:]) for text in pieces)
    if ahead.endswith(lead) or (squash(header) == squash(start) and not header.startswith(start)):
        lead = ""
    turn = behind_question(message)[len(header) - len(lead) :]
    block = re.fullmatch(r"(\s*[<\[][\w:]+[>\]]\n?|)(\s*[<\[]/[\w:]+[>\]]\s*)", lead)
    inline = "think>" in str(chat.tokenizer.chat_template) and not block  # reasoning may be read from the content
    for content, read in ((MARK, REASONING), *[(f"<think>{THOUGHT}</think>{MARK}", ())] * inline):
        before, _, end = written(content, *read)
        opening, thinks, closing = before.partition(THOUGHT)
        if thinks and (opening.startswith(start) or squash(opening) == squash(start)):
            opening = opening[len(start) :]
            same = squash(lead) == squash(opening + closing)
            if opening or not closing.strip():
                return AnswerParts(opening, closing, end, lead, same, turn)
            return AnswerParts("", closing, end, closing, True, closing.removesuffix(lead) + turn)
    if block:
        return AnswerParts(block[1], block[2], tail, lead, True, turn)
    if ahead.strip() and lead:
        raise UnusableRow("whose chat template does not continue its own generation prompt", repr(start[-200:]))
    if opened := re.search(r"([<\[])([\w:]+)([>\]])(\s*)$", ahead):
        closing = f"{opened[4]}{opened[1]}/{opened[2]}{opened[3]}\n\n"
        return AnswerParts("", closing, tail, closing, True, closing + turn)
    return AnswerParts(None, "", tail, lead, False, turn)


def _until_stop(chat: ChatFormat, text: str) -> str | None:
    """The text up to and with the first stop token in it; None without one."""
    stops = chat.tokenizer.convert_ids_to_tokens(list(chat.ends or [end_token(chat.tokenizer)]))
    places = [text.index(stop) + len(stop) for stop in stops if stop and stop in text]
    return text[: min(places)] if places else None


def show(row: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase, console: Console) -> None:
    """Prints one example, masked tokens dim and labels green in [[ ]], and how many of its tokens are learned."""
    text, tokens = Text(), zip(row["input_ids"], row["labels"], strict=True)
    for learned, part in groupby(tokens, lambda token: token[1] != IGNORE):
        piece = str(tokenizer.decode([token for token, _ in part]))
        text.append(f"[[{piece}]]" if learned else piece, style="green" if learned else "dim")
    count = sum(token != IGNORE for token in row["labels"])
    console.print(text)
    console.print(f"{len(row['labels'])} tokens, {count} of them learned (in [[ ]])", style="dim", markup=False)
