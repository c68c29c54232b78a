"""Messages of chats as files hold them, in one plain form."""

import json
from collections.abc import Collection
from typing import Any

from decode.errors import UserError
from decode.files import Fields
from decode.measure.suites import Row, messages_of
from decode.models.tokens import REASONING

Messages = list[Row]
"""A chat: its turns as ``{role, content}``, possibly with further keys."""
SPEAKERS = {
    "user": "human prompter",
    "assistant": "gpt chatgpt bot bing bard model function_call",
    "tool": "observation function function_response tool_response",
}
ROLES = {name: role for role, names in SPEAKERS.items() for name in names.split()}
"""Names of speakers in published chats, in the words of chat templates."""
SYSTEM = "system", "developer"
KEYS = {"role", "content", "tool_calls", "tool_call_id", "name", "from", "value", "train", *REASONING}
"""Keys of a message that are used here; a template may read others."""
MEANINGS = {
    "system": "system system_prompt system_message",
    "history": "history",
    "tools": "tools functions",
    "variables": "chat_template_kwargs",
    "learned": "weight train loss trainable loss_mask step_loss_mask loss_weight loss_scale kto_tag label",
    "left out": "mask masked",
    "text": "input context reasoning_content reasoning thinking",
    "other": "documents image images video videos audio audios train_detail",
}
CHANGES = {name: meaning for meaning, names in MEANINGS.items() for name in names.split()}
"""Columns, and keys of turns, that change an example, by what they hold. Each is used, or the row is refused: an
``other`` always, a ``text`` beside a pair unless templates of the settings leave it out."""
DECIDE = "learned", "left out"
OTHER_TEXTS = MEANINGS["text"].split()
TRUTH = dict.fromkeys(("1", "1.0", "true"), "learned") | dict.fromkeys(("0", "0.0", "false", "user"), "left out")
"""Values of what is learned; ``user`` is NeMo's ``mask``, since only the assistant's turns are learned."""
LEAVE_OUT = "leave the key out, or name its text in data.prompt_template and data.response_template"
EXCLUDED = "that are not to be learned, as a key of theirs says"
UNLISTED = "whose messages are not a list"
NAMELESS = "with a tool call that names no function"


class UnusableRow(UserError):
    """A row that no example can be made of; the corpus leaves it out and counts it by its reason.

    Args:
        reason: Completes "3 rows ...".
        detail: What is particular to this row, or the next step.
    """

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"a row {reason}{f': {detail}' if detail else ''}")
        self.reason, self.detail = reason, detail


def row_chat(row: Row, turns: Any, read: Collection[str]) -> tuple[Messages, Fields, str]:
    """The messages of a row with what its other columns say of them (see `CHANGES`).

    Args:
        row: All columns.
        turns: The chat, see `read_messages`.
        read: Columns whose texts are in it, beside other texts.

    Returns:
        The messages, variables of the chat template such as ``tools``, and what is to be noted.

    Raises:
        UnusableRow: A column that changes the example and cannot be used, or `read_messages`.
    """
    columns, values = {name: value for name, value in row.items() if name not in read}, Fields()
    if is_learned(columns) is False:
        raise UnusableRow(EXCLUDED)
    for name, value in columns.items():
        if (meaning := CHANGES.get(name)) in ("history", "tools", "variables"):
            value = parsed(value or None, f"whose {name} is no JSON")
        if meaning and value not in (None, False, "", [], {}):
            if meaning in ("text", "other"):
                raise unread(name)
            values[meaning] = value
    turns = parsed(turns, UNLISTED)
    messages, note = read_messages([*_history(values["history"]), *turns] if "history" in values and turns else turns)
    if "system" in values:
        opening, _ = read_messages([{"role": "system", "content": values["system"]}])
        messages = messages if messages[:1] == opening else opening + messages
    variables = values.get("variables", {})
    if not isinstance(variables, dict):
        raise UnusableRow("whose chat_template_kwargs are no variables of a template")
    if "tools" in values:
        why = "whose tools are no descriptions with a name"
        variables = variables | {"tools": [_function(tool, why) for tool in _listed(values["tools"])]}
    return messages, variables, note


def up_to_answer(messages: Messages, note: str = "") -> Messages:
    """The messages up to the assistant's last turn that is learned.

    Raises:
        UnusableRow: No such turn, or none of others before it.
    """
    turns = [place for place, turn in enumerate(messages) if turn["role"] == "assistant" and turn.get("train", True)]
    if not turns:
        raise UnusableRow("without an assistant's turn to learn", note)
    if {turn["role"] for turn in messages[: turns[0]]} <= {*SYSTEM, "assistant"}:
        raise UnusableRow("that begin with the assistant", "give a user's turn before, or a column prompt")
    return messages[: turns[-1] + 1]


def speaker(turn: Row) -> str:
    """The role of a turn in the words of chat templates; empty without one."""
    role = str(turn.get("role") or turn.get("from") or "").lower()
    return ROLES.get(role, role)


def is_learned(item: Row) -> bool | None:
    """Whether a row or a turn is learned; None where it does not say.

    Raises:
        UnusableRow: A weight other than 0 and 1.
    """
    says = set()
    for key, value in item.items():
        if CHANGES.get(key) in DECIDE and str(value) not in ("None", "", "nan"):
            if key == "label" and not isinstance(value, bool):  # a class
                continue
            if (truth := TRUTH.get(str(value).lower())) is None:
                raise UnusableRow(f"whose {key} is neither 0 nor 1", LEAVE_OUT)
            says.add(truth == CHANGES[key])
    return all(says) if says else None


def unread(key: str) -> UnusableRow:
    """A row with a key that changes its text and is not used."""
    return UnusableRow(f"whose {key} would change the text and is not read", LEAVE_OUT)


def parsed(value: Any, reason: str) -> Any:
    """A value that a file may hold as JSON text.

    Raises:
        UnusableRow: A text that is no JSON, with this reason.
    """
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError:
        raise UnusableRow(reason) from None


def _history(value: Any) -> list[Any]:
    """Turns before those of a row: messages, or pairs of a question and its answer."""
    if turns := messages_of(value):
        return turns
    if not isinstance(value, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in value):
        raise UnusableRow("whose history is no list of turns")
    return [{"role": role, "content": text} for pair in value for role, text in zip(("user", "assistant"), pair)]


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _function(value: Any, why: str) -> Row:
    """A tool, or a call of one, as APIs write it; it may be JSON text, or what should be its ``function`` alone."""
    value = parsed(value, why)
    if isinstance(value, dict) and "function" not in value:
        value = {"type": "function", "function": value}
    function = parsed(value["function"], why) if isinstance(value, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise UnusableRow(why)
    texts = {key: parsed(text, why) for key, text in function.items() if key == "parameters"}
    return value | {"function": function | texts}


def read_messages(value: Any) -> tuple[Messages, str]:
    """Messages as ``{role, content}``, the content a text, with tool calls whose arguments are objects, and a note.

    Accepts OpenAI's messages, their content parts of text, and ShareGPT's fields, whose chats may begin with the
    assistant. Reasoning stands under its first name, and ``train`` is False in a turn of the
    assistant that is not learned. A chat is cut before an assistant's turn without content (a server's answer that was
    cut off within its reasoning).

    Raises:
        UnusableRow: No messages, content that is no text, a turn without a role, a turn of others that is to be
            learned, or a broken tool call.
    """
    if not isinstance(value, list) or not all(isinstance(message, dict) for message in value):
        raise UnusableRow(UNLISTED)
    messages: Messages = []
    for raw in value:
        learned = is_learned(raw)
        message = {key: item for key, item in raw.items() if item is not None and CHANGES.get(key) not in DECIDE}
        if unused := [key for key in message if key in CHANGES and key not in REASONING]:
            raise unread(unused[0])
        role, content = speaker(message), message.get("content", message.pop("value", ""))
        function, calls = message.pop("function_call", []), message.pop("tool_calls", [])
        if not role:
            raise UnusableRow("with a turn that has no role")
        if isinstance(content, list):
            parts: list[Any] = [part.get("text") if isinstance(part, dict) else part for part in content]
            content = "".join(parts) if all(isinstance(part, str) for part in parts) else None
        if not isinstance(content, str):
            raise UnusableRow("with content that is not text")
        if "function_call" in (message.get("role"), message.pop("from", "")):  # ShareGPT's
            function, content = parsed(content, NAMELESS), ""
        if role == "assistant" and "from" in raw and all(turn["role"] in SYSTEM for turn in messages):
            continue
        if role != "assistant" and learned:
            raise UnusableRow(f"with a turn of the role {role} that is to be learned", "only the assistant's are")
        if role == "user" and not content.strip():
            raise UnusableRow("with an empty user's turn")
        calls = parsed(calls, NAMELESS) or _listed(function)
        if role == "assistant" and not content.strip() and not calls:
            return messages, "cut before an assistant's turn without an answer"
        thought = next((str(message[name]) for name in REASONING if message.get(name)), "")
        message = {key: item for key, item in message.items() if key not in REASONING}
        message |= {"role": role, "content": content}
        if thought.strip():
            message[REASONING[0]] = thought
        if role == "assistant" and learned is False:
            message["train"] = False
        if calls:
            message["tool_calls"] = list(map(_call, calls))
        messages.append(message)
    return messages, ""


def _call(value: Any) -> Row:
    call, why = _function(value, NAMELESS), "with tool arguments that are no object"
    arguments = parsed(call["function"].get("arguments") or {}, why) or {}  # a call without any
    if not isinstance(arguments, dict):
        raise UnusableRow(why)
    return call | {"function": call["function"] | {"arguments": arguments}}
