"""Texts from outside: of files, settings and standard input, in UTF-8; and rows of files, with what they say.

A lone surrogate, for which no tokenizer has ids, is left out of a setting or a prompt (`whole`), and a row that holds
one is dropped (`usable`); both are named. All else stays as it was written.
"""

import gzip
import io
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

import yaml

from decode.errors import UserError
from decode.files import Fields

SURROGATE = re.compile("[\ud800-\udfff]")


def whole(text: str, name: str) -> str:
    """The text without lone surrogates, which a line on standard error names; pairs of them are joined."""
    if not SURROGATE.search(text):
        return text
    units = text.encode("utf-16-le", "surrogatepass")
    text = units.decode("utf-16-le", "ignore")
    if len(text.encode("utf-16-le")) < len(units):
        print(f"{name} holds a lone surrogate, or a byte that is not UTF-8: left out", file=sys.stderr)
    return text


def is_whole(*values: Any) -> bool:
    """Whether no text in plain data holds a lone surrogate."""
    return not SURROGATE.search(json.dumps(values, ensure_ascii=False, default=str))


class UnusableRow(UserError):
    """A row that no example or prompt can be made of; it is left out and counted by its reason.

    Args:
        reason: Completes "3 rows ...".
        detail: What is particular to this row, or the next step.
    """

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"a row {reason}{f': {detail}' if detail else ''}")
        self.reason, self.detail = reason, detail


LeftOut = list[tuple[str, int, str]]
"""Rows that are not used as they are: reason, number, and what is particular to each."""


def usable(
    rows: Iterable[Fields], left_out: LeftOut, shape: Callable[[Fields], Fields] = lambda row: row
) -> Iterator[tuple[int, Fields]]:
    """The rows in the form that ``shape`` gives them, with their numbers from 1; those that have none are noted."""
    for number, row in enumerate(rows, 1):
        try:
            shaped = shape(row)
        except UnusableRow as error:
            left_out.append((f"{error.reason} dropped", number, error.detail))
            continue
        if is_whole(shaped):
            yield number, shaped
        else:
            left_out.append(("with a lone surrogate dropped", number, ""))


def sentences(source: str, left_out: LeftOut) -> list[str]:
    """One sentence for each reason why rows are left out: how many it concerns, and the first of them."""
    counts, first = Counter(reason for reason, _, _ in left_out), dict[str, str]()
    for reason, number, detail in sorted(left_out):
        first.setdefault(reason, f"row {number}: {detail}".removesuffix(": "))
    return [f"{source}: {count} row{'s' * (count > 1)} {reason} ({first[reason]})" for reason, count in counts.items()]


def columnar_rows(tables: Iterable[Any]) -> Iterator[Fields]:
    """The rows of Arrow's tables or batches as JSON has them.

    A struct has the keys of all others as nulls, which are left out; a map is an object, and a JSON column its value.
    """
    for table in tables:
        kinds = {column.name: column.type for column in table.schema}
        for row in table.to_pylist():
            yield {name: _plain(value, kinds[name]) for name, value in row.items()}


def _plain(value: Any, kind: Any) -> Any:
    if isinstance(value, str) and getattr(kind, "extension_name", "") == "arrow.json":
        return json.loads(value)
    if isinstance(value, dict):
        return {part.name: _plain(value[part.name], part.type) for part in kind if value[part.name] is not None}
    if isinstance(value, list):
        if hasattr(kind, "item_type"):  # a map's pairs
            return {str(key): _plain(item, kind.item_type) for key, item in value}
        return [_plain(item, getattr(kind, "value_type", None)) for item in value]
    return value


def arrow_batches(path: Path) -> list[Any]:
    """The batches of an Arrow file, or of a stream, as `datasets` writes it."""
    import pyarrow

    file = pyarrow.memory_map(str(path))
    opened = pyarrow.ipc.open_file if file.read(6) == b"ARROW1" else pyarrow.ipc.open_stream
    file.seek(0)
    return opened(file).read_all().to_batches(1000)


def text_lines(path: str | Path, newline: str | None = None) -> Iterator[str]:
    """The lines of a text file, which may be compressed with gzip.

    Raises:
        UserError: a byte that is not UTF-8, or a damaged file.
    """
    try:
        opener: Any = gzip.open if Path(path).suffix.lower() == ".gz" else open
        with opener(path, "rt", encoding="utf-8-sig", newline=newline) as file:
            yield from file
    except UnicodeDecodeError as error:
        raise UserError(f"{path} cannot be read: {error}; save it as UTF-8 (iconv -f latin1 -t utf-8)") from error
    except (OSError, EOFError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {error}") from error


def read_stdin() -> str:
    """The text on standard input, whatever the locale's encoding."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(encoding="utf-8-sig", errors="surrogateescape")
    return whole(sys.stdin.read(), "standard input")


# -- chats ------------------------------------------------------------------------------------------------------------

Messages = list[Fields]
"""A chat: its turns as ``{role, content}``, possibly with further keys."""
SPEAKERS = {
    "user": "human prompter",
    "assistant": "gpt chatgpt bot bing bard model function_call",
    "tool": "observation function function_response tool_response",
}
ROLES = {name: role for role, names in SPEAKERS.items() for name in names.split()}
"""Names of speakers in published chats, in the words of chat templates."""
SYSTEM = "system", "developer"
REASONING = "reasoning_content", "reasoning", "thinking"
"""The names under which templates read what an assistant thought before it answered; they mean the same."""
KEYS = {"role", "content", "tool_calls", "tool_call_id", "name", "train", *REASONING}
"""Keys of messages of `read_messages` that are used here; a template may read others."""
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
ASKED = "messages", "conversations", "turns", "instruction", "prompt", "question", "input", "text"
"""Columns in which what is asked may stand, in the order in which they are looked at."""
LEAVE_OUT = "leave the key out, or name its text in data.prompt_template and data.response_template"
EXCLUDED = "that are not to be learned, as a key of theirs says"
UNLISTED = "whose messages are not a list"
NAMELESS = "with a tool call that names no function"


def row_chat(row: Fields, turns: Any, read: Collection[str]) -> tuple[Messages, Fields, str]:
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
    if tools := values.get("tools", variables.get("tools")):
        why = "whose tools are no descriptions with a name"
        variables = variables | {"tools": [_function(tool, why) for tool in _listed(tools)]}
    return messages, variables, note


def asked_chat(row: Fields) -> tuple[Messages, Fields, str]:
    """The chat of a row whose question or questions stand in one of `ASKED`; see `row_chat`."""
    name = next((name for name in ASKED if row.get(name)), "")
    value, read = row.get(name), ["input"] * (name in ("instruction", "input"))
    turns = messages_of(value)
    if name == "instruction":
        value = "\n\n".join(str(part) for part in (value, row.get("input")) if part)
    asked = turns or [{"role": "user", "content": text} for text in (value if isinstance(value, list) else [value])]
    return row_chat(row, asked if name else [], OTHER_TEXTS if turns else read)


def learned_turns(messages: Messages) -> list[int]:
    """The places of the assistant's turns that are learned."""
    return [place for place, turn in enumerate(messages) if turn["role"] == "assistant" and turn.get("train", True)]


def up_to_answer(messages: Messages, note: str = "") -> Messages:
    """The messages up to the assistant's last turn that is learned.

    Raises:
        UnusableRow: No such turn, or none of others before it.
    """
    if not (turns := learned_turns(messages)):
        raise UnusableRow("without an assistant's turn to learn", note)
    if {turn["role"] for turn in messages[: turns[0]]} <= {*SYSTEM, "assistant"}:
        raise UnusableRow("that begin with the assistant", "give a user's turn before, or a column prompt")
    return messages[: turns[-1] + 1]


def speaker(turn: Fields) -> str:
    """The role of a turn in the words of chat templates; empty without one."""
    role = str(turn.get("role") or turn.get("from") or "").lower()
    return ROLES.get(role, role)


def is_learned(item: Fields) -> bool | None:
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


def _function(value: Any, why: str) -> Fields:
    """A tool, or a call of one, as APIs write it; it may be JSON text, or what should be its ``function`` alone."""
    value = parsed(value, why)
    if isinstance(value, dict) and "function" not in value:
        value = {"type": "function", "function": value}
    function = parsed(value["function"], why) if isinstance(value, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise UnusableRow(why)
    if "parameters" in function:
        function = function | {"parameters": parsed(function["parameters"], why)}
    return value | {"function": function}


def read_messages(value: Any) -> tuple[Messages, str]:
    """Messages as ``{role, content}``, the content a text, with tool calls whose arguments are objects, and a note.

    Accepts OpenAI's messages, their content parts of text, and ShareGPT's fields, whose chats may begin with the
    assistant. Reasoning stands under the first of `REASONING`, and ``train`` is False in a turn of the assistant that
    is not learned. A chat is cut before an assistant's turn without content (a server's answer that was cut off within
    its reasoning).

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


def _call(value: Any) -> Fields:
    call, why = _function(value, NAMELESS), "with tool arguments that are no object"
    arguments = parsed(call["function"].get("arguments") or {}, why) or {}  # a call without any
    if not isinstance(arguments, dict):
        raise UnusableRow(why)
    return call | {"function": call["function"] | {"arguments": arguments}}


def messages_of(value: Any) -> list[Any] | None:
    """The messages in a value that is a list of them, or the JSON text of one; None for other values."""
    try:
        messages = json.loads(value) if isinstance(value, str) and value.lstrip().startswith("[") else value
    except ValueError:
        return None
    roles = {"role", "from"}
    chat = isinstance(messages, list) and all(isinstance(item, dict) and roles & item.keys() for item in messages)
    return messages if chat and messages else None


# -- YAML -------------------------------------------------------------------------------------------------------------

NUMBER, DATE = (f"tag:yaml.org,2002:{name}" for name in ("float", "timestamp"))


class _Loader(yaml.SafeLoader):
    """YAML whose numbers may be written as in JSON (1e6), and whose dates are texts."""

    yaml_implicit_resolvers = {  # noqa: RUF012
        first: [(tag, rule) for tag, rule in rules if tag != DATE]
        for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


_Loader.add_implicit_resolver(NUMBER, re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789"))


def read_yaml(content: str) -> Any:
    """Plain data of YAML; a ValueError for what is no YAML."""
    try:
        return yaml.load(content, _Loader)
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from error
