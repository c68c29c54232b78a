"""Messages of chats as files hold them, in one plain form."""

import json
from typing import Any

from decode.errors import UserError
from decode.measure.suites import Row
from decode.models.tokens import REASONING

Messages = list[Row]
"""A chat: its turns as ``{role, content}``, possibly with further keys."""
SPEAKERS = {
    "user": ("human", "prompter"),
    "assistant": ("gpt", "chatgpt", "bot", "bing", "bard", "model"),
    "tool": ("observation", "function", "function_response", "tool_response"),
}
ROLES = {name: role for role, names in SPEAKERS.items() for name in names}
"""Names of speakers in published chats, in the words of chat templates."""
KEYS = {"role", "content", "tool_calls", "tool_call_id", "name", "from", "value", *REASONING}
"""Keys of a message that are used here; a template may read others."""
NAMELESS = "with a tool call that names no function"


class UnusableRow(UserError):
    """A row that no example can be made of; the corpus leaves it out and counts it by its reason.

    Args:
        reason: Completes "3 rows ...".
        detail: What is particular to this row.
    """

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"a row {reason}{f': {detail}' if detail else ''}")
        self.reason, self.detail = reason, detail


def clean_messages(value: Any) -> tuple[Messages, str]:
    """The messages of a row (see `read_messages`), up to the assistant's last turn, and what is to be noted of it.

    Raises:
        UnusableRow: Messages that cannot be read, no assistant's turn, or none before it.
    """
    messages, note = read_messages(value)
    turns = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
    if not turns:
        raise UnusableRow("without an assistant's turn", note)
    if all(message["role"] in ("system", "developer") for message in messages[: turns[0]]):
        raise UnusableRow("that begin with the assistant")
    return messages[: turns[-1] + 1], note


def parsed(value: Any, reason: str) -> Any:
    """A value that a file may hold as JSON text.

    Raises:
        UnusableRow: A text that is no JSON, with this reason.
    """
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError:
        raise UnusableRow(reason) from None


def read_messages(value: Any) -> tuple[Messages, str]:
    """Messages as ``{role, content}``, the content a text, with tool calls whose arguments are objects, and a note.

    Accepts OpenAI's messages, their content parts of text, JSON text of messages (CSV), and ShareGPT's fields, whose
    chats may begin with the assistant. Reasoning stands under its first name. A chat is cut before an assistant's turn
    without content (a server's answer that was cut off within its reasoning).

    Raises:
        UnusableRow: No messages, content that is no text, a turn without a role, or a broken tool call.
    """
    value = parsed(value, reason := "whose messages are not a list")
    if not isinstance(value, list) or not all(isinstance(message, dict) for message in value):
        raise UnusableRow(reason)
    messages: Messages = []
    for place, raw in enumerate(value):
        message = {key: item for key, item in raw.items() if item is not None}
        role, content = message.get("role", message.pop("from", None)), message.get("content", message.pop("value", ""))
        function, calls = message.pop("function_call", None), message.pop("tool_calls", [])
        if not isinstance(role, str):
            raise UnusableRow("with a turn that has no role")
        if isinstance(content, list):
            parts: list[Any] = [part.get("text") if isinstance(part, dict) else part for part in content]
            content = "".join(parts) if all(isinstance(part, str) for part in parts) else None
        if not isinstance(content, str):
            raise UnusableRow("with content that is not text")
        if role == "function_call":  # ShareGPT's
            function, role, content = parsed(content, NAMELESS), "assistant", ""
        role = ROLES.get(role.lower(), role.lower())
        if place == 0 and role == "assistant" and "from" in raw:
            continue
        if role == "user" and not content.strip():
            raise UnusableRow("with an empty user's turn")
        if function is not None and not calls:
            calls = [{"type": "function", "function": function}]
        if role == "assistant" and not content.strip() and not calls:
            return messages, "cut before an assistant's turn without an answer"
        thought = next((str(message[name]) for name in REASONING if message.get(name)), "")
        message = {key: item for key, item in message.items() if key not in REASONING}
        message |= {"role": role, "content": content}
        if thought.strip():
            message[REASONING[0]] = thought
        if calls:
            message["tool_calls"] = list(map(_call, calls))
        messages.append(message)
    return messages, ""


def _call(call: Any) -> Row:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise UnusableRow(NAMELESS)
    arguments = parsed(function.get("arguments"), "with tool arguments that are no JSON")
    return {**call, "function": {**function, "arguments": arguments}}
