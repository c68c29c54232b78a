"""Conversations, prompts with responses, and plain texts to token ids and labels.

`render_row` makes turns of a row (of a conversation by `chat_turns`): prompts as the model is served, each with the
answer that is learned. `label` makes token ids and labels of them, and checks that training sees what serving sees. A
row that cannot be used raises `UnusableRow`; the corpus leaves it out and counts it.
"""

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby, islice, takewhile
from typing import NamedTuple

from rich.console import Console
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from decode.core.draft import Ids
from decode.errors import UserError
from decode.files import Fields
from decode.incoming import KEYS, LEAVE_OUT, REASONING, SYSTEM, Messages, UnusableRow, learned_turns
from decode.measure.suites import Row
from decode.models.tokens import (
    Message,
    batch_prompt_ids,
    continuation_ids,
    control_token,
    end_token,
    plain_ids,
    render_chat,
    start_ids,
)

IGNORE = -100  # label of a position that no loss is taken on
NO_THOUGHT = (
    "without reasoning, for which the chat template has a place (data.template_args: {enable_thinking: false}?)"
)
MARK, THOUGHT, ASKED = (f"\ue000{name}\ue001" for name in ("answer", "thought", "question"))
"""Stand in no text: their places are searched in rendered chats."""


@dataclass(frozen=True)
class Turn:
    """What the model says, and the text that it is given before."""

    prompt: str  # as the model is served
    answer: str  # is learned; empty for a prompt that is to be answered
    said: tuple[str, ...] = ()  # texts of the row that have to stand whole in what is learned


class Example(NamedTuple):
    """Token ids, and labels of the same length (not shifted)."""

    input_ids: Ids
    labels: Ids


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

    def lost(turn: Turn, ids: Ids, text: str) -> str:
        """What is not learned whole of an answer, or the answer where more than its end is a stop token."""
        for said in turn.said:
            if squash(said) not in squash(text):  # the tokenizer may change texts
                (read,) = _decoded(tokenizer, plain_ids(tokenizer, [said]))
                if squash(read) not in squash(text):
                    return said
        return text if any(token in ends for token in ids[:-1]) else ""

    made: list[list[Example] | UnusableRow] = []
    problems = map(lost, turns, answers, _decoded(tokenizer, answers))
    parts = zip(before, answers, problems)
    for row in rows:
        prompt_ids, answer_ids, wrong = zip(*islice(parts, len(row)))
        problem = next(filter(None, wrong), "")[:80]
        why = "whose answer is not learned whole, up to one stop token"
        made.append(UnusableRow(why, repr(problem)) if problem else _joined(prompt_ids, answer_ids))
    return made


def _joined(prompts: Iterable[Ids], answers: Iterable[Ids]) -> list[Example]:
    """Examples of the turns of a conversation, one as long as each prompt continues the example before it."""
    examples: list[Example] = []
    for prompt, answer in zip(prompts, answers):
        labels = [IGNORE] * len(prompt) + answer
        if examples and prompt[: len(examples[-1].input_ids)] == examples[-1].input_ids:
            before = examples.pop().labels
            labels[: len(before)] = before
        examples.append(Example(prompt + answer, labels))
    return examples


def rendered_ids(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], ends: Sequence[int]) -> list[Ids]:
    """Ids of rendered chats, of which parts that many of them have, such as earlier turns, are tokenised once.

    Nothing is merged across a special token, so the ids of parts that begin with one are those of the whole text.
    """
    added = tokenizer.added_tokens_decoder
    plain = [stop for end in ends if (stop := added.get(end)) and stop.special and not (stop.normalized or stop.lstrip)]
    stops = [re.escape(str(stop)) for stop in plain if not any(str(stop) in str(other)[1:] for other in added.values())]
    pattern = re.compile(f"(?={'|'.join(stops) or '(?!)'})")
    parts = [pattern.split(text) for text in texts]
    known = ["", *{part for text in parts for part in text}]
    ids = dict(zip(known, plain_ids(tokenizer, known)))
    return [[token for part in text for token in ids[part]] for text in parts]


def _decoded(tokenizer: PreTrainedTokenizerBase, ids: Sequence[Ids]) -> list[str]:
    return list(tokenizer.batch_decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def squash(text: str) -> str:
    """The text without white space, which templates and tokenizers change."""
    return "".join(text.split())


class Written:
    """What a template has written, without white space, in which messages are looked for in their order.

    A text is searched behind the one before it, so that all of a chat are found in one pass; elsewhere only where it is
    not found there.
    """

    def __init__(self, written: str) -> None:
        self.text, self.end = squash(written), 0

    def holds(self, text: str, *, in_order: bool = True) -> bool:
        """Whether a text stands there as it is or as JSON. One that is not ``in_order`` is looked for everywhere."""
        for form in dict.fromkeys((text, json.dumps(text)[1:-1], json.dumps(text, ensure_ascii=False)[1:-1])):
            place = self.text.find(wanted := squash(form), self.end)
            if place >= 0 and in_order:
                self.end = place + len(wanted)
            if place >= 0 or wanted in self.text[: self.end + len(wanted)]:
                return True
        return False


def prompt_part(input_ids: Sequence[int], labels: Sequence[int]) -> Ids:
    """The ids before the first label; of plain text, whose tokens are all labels, the first quarter."""
    first = next((place for place, token in enumerate(labels) if token != IGNORE), len(labels))
    return list(input_ids[: first or max(1, len(input_ids) // 4)])


def text_blocks(tokenizer: PreTrainedTokenizerBase, texts: Iterable[str], length: int) -> Iterator[Example]:
    """Blocks of ``length`` tokens from texts joined by the end-of-text token; every token is a label."""
    start, end = start_ids(tokenizer), end_token(tokenizer)
    held: Ids = []
    for text in texts:
        held += [*start, *plain_ids(tokenizer, [text])[0], end]
        whole = len(held) - len(held) % length
        for first in range(0, whole, length):
            yield Example(held[first : first + length], held[first : first + length])
        held = held[whole:]
    if len(held) > length // 2:
        yield Example(held, held)


# -- chats ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ChatFormat:
    """How chats become text."""

    tokenizer: PreTrainedTokenizerBase  # with a chat template
    system: str | None = None  # system message of chats that have none
    # Further variables of the template, such as ``enable_thinking``
    template_args: Fields = field(default_factory=dict)
    ends: Sequence[int] = ()  # ids that end the target's texts; none: the tokenizer's end-of-text token

    def render(self, messages: Sequence[Message], *, ask: bool = False) -> str:
        """The messages as the template writes them; with ``ask`` up to the start of the assistant's next turn.

        Raises:
            UnusableRow: The template refuses the messages, or there is none.
        """
        messages = [{key: value for key, value in turn.items() if key != "train"} for turn in messages]
        try:
            return render_chat(self.tokenizer, messages, ask=ask, template_args=self.template_args)
        except UserError as error:
            raise UnusableRow("that the chat template refuses", str(error)) from error

    def ask(self, messages: Messages) -> str:
        """The prompt of the assistant's next turn, in which every earlier turn of others and every tool stands.

        Raises:
            UnusableRow: The template refuses the messages or leaves one out.
        """
        prompt = self.render(messages, ask=True)
        written = Written(prompt)
        for message in messages:
            in_order = message["role"] not in SYSTEM  # a template may write it later (Mistral)
            if message["role"] != "assistant" and not written.holds(message["content"], in_order=in_order):
                raise UnusableRow("with a turn that the chat template does not write", message["role"])
        return prompt

    def prepared(self, messages: Messages) -> Messages:
        """The messages with a system message, and no role developer for templates that do not know it.

        Raises:
            UnusableRow: A message spells a control token.
        """
        if spelt := control_token(self.tokenizer, messages):  # it would be read as one
            raise UnusableRow("with a control token of the tokenizer in their text", repr(spelt))
        if self.system is not None and not (messages and messages[0]["role"] in SYSTEM):
            messages = [{"role": "system", "content": self.system}, *messages]
        if re.search(r"['\"]developer['\"]", str(self.tokenizer.chat_template)):
            return messages
        return [message | {"role": message["role"].replace("developer", "system")} for message in messages]

    def answer_end(self) -> int:
        """The id with which the template ends an answer."""
        turns, _ = chat_turns(self, [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}])
        (examples,) = label(self.tokenizer, [turns], self.ends, chat=True)
        assert isinstance(examples, list)
        return examples[0].labels[-1]


def render_row(row: Row, chat: ChatFormat | None) -> tuple[list[Turn], list[str]]:
    """A row of `distill.data.sources` as turns, and what is to be noted of it.

    Args:
        row: A pair, a conversation, or one that ends with a question, which the target is to answer.
        chat: How conversations and pairs are rendered; None: a pair is its prompt followed by its response.

    Raises:
        UnusableRow: See `chat_turns`.
    """
    messages, variables = json.loads(row["messages"]), json.loads(row["variables"] or "{}")
    if chat is None:
        if len(messages) > 2 or variables:
            raise UnusableRow("with a system message, a history or tools, but no chat template", LEAVE_OUT)
        return [Turn(row["prompt"], row["response"], (row["response"],))], []
    chat = replace(chat, template_args=variables)
    if messages[-1]["role"] != "assistant":
        return [Turn(chat.ask(chat.prepared(messages)), "")], []
    turns, notes = chat_turns(chat, messages)
    return turns, [*filter(None, [row["note"]]), *notes]


def chat_turns(chat: ChatFormat, messages: Messages) -> tuple[list[Turn], list[str]]:
    """The assistant's turns of a conversation that are learned, each behind the prompt that it has when it is served.

    ``messages`` are from `decode.incoming.row_chat`.

    Returns:
        The turns, and what is to be noted of the row.

    Raises:
        UnusableRow: A template that refuses the messages or does not write all of them.
    """
    template, messages = str(chat.tokenizer.chat_template), chat.prepared(messages)
    unread = {key for message in messages for key in message if key not in KEYS and key not in template}
    notes = [f"with a message's {key!r}, which is not used" for key in sorted(unread)]
    turns = []
    for place in learned_turns(messages):
        prompt = chat.ask(messages[:place])
        turn, note = _answered(chat, prompt, messages[:place], messages[place])
        turns.append(turn)
        notes += [note] * bool(note)
    return turns, list(dict.fromkeys(notes))


def _answered(chat: ChatFormat, prompt: str, history: Messages, message: Message) -> tuple[Turn, str]:
    """A turn of the assistant with what is learned of it, and a note.

    The answer is what the template writes behind the prompt, with three exceptions:

    - an empty block of reasoning, which a template adds where a row has none (Qwen3), is no answer of the model;
    - reasoning that the prompt opens and the template then leaves out (DeepSeek-R1) is put back;
    - where the next turn's beginning is the stop token (GLM-4.5), the answer ends with it.
    """
    note, thought, content = "", message.get(REASONING[0], ""), message["content"]
    calls = [call["function"] for call in message.get("tool_calls", [])]
    after = chat.render([*history, message])
    answer = after[len(prompt) :] if after.startswith(prompt) else ""
    complete = bool(answer) and all(text.strip() in answer for text in (thought, content))
    history = last_exchange(history)
    if not complete or not (thought or answer.lstrip().startswith(content.strip() or MARK)):
        if not thought and (inline := re.match(r"\s*<think>(.*?)</think>(.*)", content, re.DOTALL)):
            thought, content = inline[1].strip(), inline[2].strip()
        parts = answer_parts(chat, history, message)
        if thought and parts.opening is None:
            raise UnusableRow("with reasoning that the chat template does not write")
        if not complete:
            lead = f"{parts.opening}{thought}{parts.closing}" if thought else parts.lead
            answer = f"{lead}{content}{parts.tail}"
            if any(call["name"] not in answer for call in calls):
                answer = parts.turn
        if not thought and parts.empty:
            answer = answer.removeprefix(parts.lead) if parts.opening else answer
            note = NO_THOUGHT
    if (ended := _until_stop(chat, answer)) is None:
        follower = {"role": "tool" if calls else "user", "content": THOUGHT}
        tail, closing = (
            chat.render([*history, {**message, "content": MARK}, *next_turn]).partition(MARK)[2]
            for next_turn in ([], [follower])
        )
        ended = (stop := _until_stop(chat, closing.partition(THOUGHT)[0])) and answer.removesuffix(tail) + stop
    answer = ended or answer.rstrip()
    written = Written(answer)
    for call in calls:
        values = call["arguments"].values()
        if not all(written.holds(text, in_order=False) for text in (call["name"], *values) if isinstance(text, str)):
            raise UnusableRow("with tool calls that the chat template does not write")
    return Turn(prompt, answer, (thought, content)), note


def last_exchange(history: Messages) -> Messages:
    """The turns from the user's last one on, after a system message: what a template writes behind them is the same."""
    start = max((place for place, turn in enumerate(history) if turn["role"] == "user"), default=0)
    opening = [turn for turn in history[:1] if start and turn["role"] in SYSTEM]
    return [*opening, *history[start:]]


class AnswerParts(NamedTuple):
    """How a template writes an assistant's turn behind its prompt."""

    opening: str | None  # before reasoning; None: it writes no reasoning
    closing: str  # between reasoning and answer
    tail: str  # after the answer
    lead: str  # before an answer without reasoning
    empty: bool  # the lead is an empty block of reasoning, or the end of one that the prompt opens
    turn: str  # the message itself


def answer_parts(chat: ChatFormat, history: Messages, message: Message) -> AnswerParts:
    """How a template writes an assistant's turn behind its prompt, both seen from the turn before on.

    What is earlier is not compared, because templates rewrite it: reasoning is left out, and a system message moves to
    the last question (Mistral). ``history`` is the `last_exchange`.

    Raises:
        UnusableRow: The template does not write the answer, or writes it behind something else than its prompt.
    """
    shown = {key: value for key, value in message.items() if key not in REASONING}
    names = [call["function"]["name"] for call in message.get("tool_calls", ())]

    def behind_question(*turns: Message) -> str:
        messages = [*history[:-1], {**history[-1], "content": ASKED}, *turns]
        return chat.render(messages, ask=not turns).rpartition(ASKED)[2]

    def written(content: str, *names_of_thought: str) -> tuple[str, str]:
        """What stands before and after the content; both empty where the template does not write it."""
        for base in (shown, {"role": "assistant"}):  # a template may write no text beside tool calls, or after them
            turn = base | dict.fromkeys(names_of_thought, THOUGHT) | {"content": content}
            try:
                before, mark, tail = behind_question(turn).partition(MARK)
            except UnusableRow:
                continue
            if mark and not any(name in before for name in names):
                return before, tail
        return "", ""

    start, (header, tail) = behind_question(), written(MARK)
    if not header + tail:
        raise UnusableRow("whose answer the chat template does not write")
    pieces = [re.findall(r"<[^<>]*>|\[[^\[\]]*\]|.", text, re.DOTALL) for text in (start, header)]
    common = len([*takewhile(lambda pair: pair[0] == pair[1], zip(*pieces))])
    ahead, lead = ("".join(text[common:]) for text in pieces)
    if ahead.endswith(lead) or (squash(header) == squash(start) and not header.startswith(start)):
        lead = ""
    turn = behind_question(message)[len(header) - len(lead) :]
    block = re.fullmatch(r"(\s*[<\[][\w:]+[>\]]\n?|)(\s*[<\[]/[\w:]+[>\]]\s*)", lead)
    inline = "think>" in str(chat.tokenizer.chat_template) and not block  # reasoning may be read from the content
    for content, read in ((MARK, REASONING), *[(f"<think>{THOUGHT}</think>{MARK}", ())] * inline):
        before, end = written(content, *read)
        opening, thinks, closing = before.partition(THOUGHT)
        if thinks and (opening.startswith(start) or squash(opening) == squash(start)):
            opening = opening[len(start) :]
            if opening or not closing.strip():
                return AnswerParts(opening, closing, end, lead, squash(lead) == squash(opening + closing), turn)
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


def show(row: Row, tokenizer: PreTrainedTokenizerBase, console: Console) -> None:
    """Prints one example, masked tokens dim and labels green in [[ ]], and how many of its tokens are learned."""
    text, tokens = Text(), zip(row["input_ids"], row["labels"], strict=True)
    for learned, part in groupby(tokens, lambda token: token[1] != IGNORE):
        piece = str(tokenizer.decode([token for token, _ in part]))
        text.append(f"[[{piece}]]" if learned else piece, style="green" if learned else "dim")
    count = sum(token != IGNORE for token in row["labels"])
    console.print(text)
    console.print(f"{len(row['labels'])} tokens, {count} of them learned (in [[ ]])", style="dim", markup=False)
