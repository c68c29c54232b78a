"""Messages of chats as files hold them, in one plain form."""

import json
from typing import Any

from decode.errors import UserError
from decode.models.tokens import REASONING

SPEAKERS = {
    "user": ("human", "prompter"),
    "assistant": ("gpt", "chatgpt", "bot", "bing", "bard", "model"),
    "tool": ("observation", "function", "function_response", "tool_response"),
}
ROLES = {name: role for role, names in SPEAKERS.items() for name in names}
"""Names of speakers in published chats, in the words of chat templates."""
KEYS = {"role", "content", "tool_calls", "tool_call_id", "name", "from", "value", *REASONING}
"""Keys of a message that are used here; a template may read others."""


class UnusableRow(UserError):
    """A row that no example can be made of; the corpus leaves it out and counts it by its reason.

    Args:
        reason: Completes "3 rows ...".
        detail: What is particular to this row.
    """

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"a row {reason}{f': {detail}' if detail else ''}")
        self.reason, self.detail = reason, detail


def clean_messages(value: Any) -> tuple[list[dict[str, Any]], list[str]]:
    """The messages of a row (see `read_messages`), up to the assistant's last turn, and what is to be noted of it.

    Raises:
        UnusableRow: Messages that cannot be read, no assistant's turn, or none before it.
    """
    messages, notes = read_messages(value)
    turns = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
    if not turns:
        raise UnusableRow("without an assistant's turn", *notes)
    if all(message["role"] in ("system", "developer") for message in messages[: turns[0]]):
        raise UnusableRow("that begin with the assistant")
    return messages[: turns[-1] + 1], notes


def read_messages(value: Any) -> tuple[list[dict[str, Any]], list[str]]:
    """Messages as ``{role, content}``, the content a text, with tool calls whose arguments are objects, and notes.

    Accepts OpenAI's messages, their content parts of text, JSON text of messages (CSV), and ShareGPT's fields, whose
    chats may begin with the assistant. Reasoning stands under its first name. A chat is cut before an assistant's turn
    without content (a server's answer that was cut off within its reasoning).

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
        role, content = message.get("role", message.pop("from", None)), message.get("content", message.pop("value", ""))
        if not isinstance(role, str):
            raise UnusableRow("with a turn that has no role")
        thought, calls = next((str(message[name]) for name in REASONING if message.get(name)), ""), list[Any]()
        called = [{"type": "function", "function": message.pop("function_call", None)}]
        if isinstance(content, list):
            parts: list[Any] = [part.get("text") if isinstance(part, dict) else part for part in content]
            content = "".join(parts) if all(isinstance(part, str) for part in parts) else None
        if not isinstance(content, str):
            raise UnusableRow("with content that is not text")
        if role == "function_call":  # ShareGPT's
            called, role, content = [{"type": "function", "function": _json(content) or {}}], "assistant", ""
        role = ROLES.get(role.lower(), role.lower())
        if place == 0 and role == "assistant" and "from" in raw:
            continue
        if role == "user" and not content.strip():
            raise UnusableRow("with an empty user's turn")
        for call in message.pop("tool_calls", None) or (called if called[0]["function"] is not None else ()):
            function = call.get("function") if isinstance(call, dict) else None
            if not isinstance(function, dict) or not isinstance(function.get("name"), str):
                raise UnusableRow("with a tool call that names no function")
            arguments = function.get("arguments")
            if isinstance(arguments, str) and (arguments := _json(arguments)) is None:
                raise UnusableRow("with tool arguments that are no JSON")
            calls.append({**call, "function": {**function, "arguments": arguments}})
        if role == "assistant" and not content.strip() and not calls:
            return messages, ["cut before an assistant's turn without an answer"]
        message = {key: item for key, item in message.items() if key not in REASONING}
        message |= {"role": role, "content": content} | ({REASONING[0]: thought} if thought.strip() else {})
        messages.append(message | ({"tool_calls": calls} if calls else {}))
    return messages, []


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None
