"""A row keeps what it says: in every format, in every layout of columns, and with every key that changes an example."""

import json
from decimal import Decimal
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from datasets import Dataset, DatasetDict
from some_rows import made_of, made_of_plain, taught, write_rows
from tokenizers_of_kinds import with_start

from decode.errors import UserError
from decode.models.tokens import ARGUMENTS, TRAINED
from distill.config.data import DataSettings
from distill.data.corpus import load_corpus
from distill.data.sources import load_rows

TEMPLATE = (
    "{% if mood is defined %}<mood>{{ mood }}{% endif %}"
    "{% for t in tools or [] %}<tool>{{ t | tojson }}{% endfor %}"
    "{% for m in messages %}<{{ m.role }}>"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<call>{{ c.function.name }} {{ c.function.arguments | tojson }}{% endfor %}"
    "{{ eos_token if m.role == 'assistant' }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def tokenizer_of(template: str = TEMPLATE) -> Any:
    tokenizer = with_start()
    tokenizer.chat_template = template
    return tokenizer


def told(row: dict[str, Any], *, template: str = TEMPLATE, **settings: Any) -> list[tuple[str, list[str]]]:
    """The prompt of each example of a row, and the texts that are learned.

    Raises:
        UserError: The row is dropped, for this reason.
    """
    tokenizer = tokenizer_of(template)
    examples, notes = made_of(row, tokenizer, **settings)
    if not examples:
        raise UserError(": ".join(notes[0]))
    return taught(tokenizer, examples)


def call(arguments: Any, **more: Any) -> dict[str, Any]:
    function = {"name": "sky", "arguments": arguments}
    return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}], **more}


def says(role: str, content: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def dialogue(*turns: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"messages": list(turns), **more}


TOOL = {"name": "sky", "parameters": {"type": "object", "properties": {"unit": {"type": "string"}}}}
TOOLS = [{"type": "function", "function": TOOL}]
SKY, SUN = says("user", "Sky?"), says("tool", "sun")
ROME, DAY = call({"unit": "c", "city": "Rome"}), call({"unit": "c", "day": "one"}, reasoning_content="hm")
SEVERAL = [
    dialogue(says("system", "S"), SKY, ROME, SUN, says("assistant", "Sunny"), tools=TOOLS),
    dialogue(SKY, DAY, SUN, says("assistant", "So", weight=0), tools=TOOLS, chat_template_kwargs={"mood": "good"}),
    dialogue(SKY, says("assistant", "No", weight=0), SKY, says("assistant", "Blue", weight=1)),
]


TEXT = pyarrow.string()
MAP = pyarrow.map_(TEXT, TEXT)
CALL = pyarrow.struct({"type": TEXT, "function": pyarrow.struct({"name": TEXT, "arguments": MAP})})
TURN = {"role": TEXT, "content": TEXT, "tool_calls": pyarrow.list_(CALL), "reasoning_content": TEXT, "weight": "int8"}


def with_maps(rows: list[dict[str, Any]]) -> pyarrow.Table:
    """The table of rows in which the arguments of calls are maps."""

    def listed(value: dict[str, Any]) -> dict[str, Any]:
        return value | {"arguments": [*value["arguments"].items()]} if "arguments" in value else value

    schema = pyarrow.Table.from_pylist(rows).schema
    schema = schema.set(
        schema.get_field_index("messages"), pyarrow.field("messages", pyarrow.list_(pyarrow.struct(TURN)))
    )
    return pyarrow.Table.from_pylist(json.loads(json.dumps(rows), object_hook=listed), schema)


def with_mapped_messages(rows: list[dict[str, Any]]) -> pyarrow.Table:
    """The table of rows whose messages and tools are maps of texts, some of them JSON."""
    texts = [
        {name: json.dumps(value) if name == "chat_template_kwargs" else [
            [(key, item if isinstance(item, str) else json.dumps(item)) for key, item in turn.items()] for turn in value
        ] for name, value in row.items()} for row in rows
    ]  # fmt: skip
    kinds = {"messages": pyarrow.list_(MAP), "tools": pyarrow.list_(MAP), "chat_template_kwargs": TEXT}
    return pyarrow.Table.from_pylist(texts, pyarrow.schema(kinds))


def told_of(source: Path | str) -> list[tuple[str, list[str]]]:
    """The same of all rows of a source, which has the column messages."""
    settings, tokenizer = DataSettings(source=str(source), max_length=2000), tokenizer_of()
    with TemporaryDirectory() as folder:
        splits = load_rows(settings, 0, Path(folder)).splits.values()
        return sorted(taught(tokenizer, made_of_plain([*chain(*splits)], tokenizer, settings)[0]))


def test_a_row_teaches_the_same_in_every_format(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Arguments in the row's order, no keys of others as nulls, maps as objects, also of a whole message."""
    filled = [{name: row.get(name) for name in ("messages", "tools", "chat_template_kwargs")} for row in SEVERAL]
    maps = with_maps(filled)
    parquet = {"structs": pyarrow.Table.from_pylist(filled), "maps": maps, "messages": with_mapped_messages(SEVERAL)}
    write_rows(tmp_path / "r.json", SEVERAL)
    for name, content in parquet.items():
        pyarrow.parquet.write_table(content, tmp_path / f"{name}.parquet")
    for name, new in {"f": pyarrow.ipc.new_file, "s": pyarrow.ipc.new_stream}.items():
        with pyarrow.OSFile(str(tmp_path / f"{name}.arrow"), "wb") as file, new(file, maps.schema) as writer:
            writer.write_table(maps)
    hub = DatasetDict(train=Dataset.from_list(filled, on_mixed_types="use_json"))
    monkeypatch.setattr("distill.data.sources.load_hub", lambda *_: hub)
    plain = told_of(write_rows(tmp_path / "r.jsonl", SEVERAL))
    assert len(plain) == 3
    assert sum(prompt.startswith('<mood>good<tool>{"type": "function"') for prompt, _ in plain) == 1
    answers = [text for _, texts in plain for text in texts]
    assert '<call>sky {"unit": "c", "city": "Rome"}</s>' in answers
    assert '<think>hm</think><call>sky {"unit": "c", "day": "one"}</s>' in answers
    assert not any(text.startswith(("No", "So")) for text in answers)
    files = "r.json", "structs.parquet", "maps.parquet", "messages.parquet", "f.arrow", "s.arrow"
    for source in (*(tmp_path / name for name in files), "somebody/something"):
        assert told_of(source) == plain, source


HUMAN, GPT = {"from": "human", "value": "Why?"}, {"from": "gpt", "value": "So."}
ASK, SAY, OLD = says("user", "Why?"), says("assistant", "So."), [says("user", "a"), says("assistant", "b")]
CALLING = {"messages": [SKY, call({"b": 1, "a": 2})], "tools": TOOLS}


@pytest.mark.parametrize(
    ("row", "chat"),
    [
        ({"system": "S", "conversations": [HUMAN, GPT]}, {"messages": [says("system", "S"), ASK, SAY]}),
        ({"system_prompt": "S", "messages": [says("system", "S"), ASK, SAY]}, {"messages": [says("system", "S"), ASK, SAY]}),
        (
            {"instruction": "Why?", "input": "", "output": "So.", "system": "S", "history": [["a", "b"]]},
            {"messages": [says("system", "S"), *OLD, ASK, SAY]},
        ),
        ({"prompt": "Why?", "completion": "So.", "history": json.dumps(OLD)}, {"messages": [*OLD, ASK, SAY]}),
        ({"prompt": [*OLD, ASK], "completion": [SAY]}, {"messages": [*OLD, ASK, SAY]}),
        ({"prompt": [ASK], "chosen": [SAY], "rejected": [SAY]}, {"messages": [ASK, SAY]}),
        ({"prompt": "Why?", "chosen": [SAY], "rejected": [SAY]}, {"messages": [ASK, SAY]}),
        ({"prompt": "Why?", "chosen": [ASK, SAY], "rejected": [ASK, SAY]}, {"messages": [ASK, SAY]}),
        ({"prompt": "Why?", "chosen": "So.", "rejected": "No."}, {"messages": [ASK, SAY]}),
        ({"prompt": [ASK], "completion": "So."}, {"messages": [ASK, SAY]}),
        ({"dialog": [ASK, SAY], "id": 3}, {"messages": [ASK, SAY]}),
        (
            {"input": {"messages": [ASK], "tools": TOOLS}, "preferred_output": [SAY], "non_preferred_output": [SAY]},
            {"messages": [ASK, SAY], "tools": TOOLS},
        ),
        ({"conversations": [HUMAN], "chosen": GPT, "rejected": GPT}, {"messages": [ASK, SAY]}),
        ({"messages": [ASK, SAY], "chosen": [ASK, SAY], "answer": "x"}, {"messages": [ASK, SAY]}),
        ({"question": "Why?", "response": "So.", "system_prompt": "S"}, {"messages": [says("system", "S"), ASK, SAY]}),
        ({"instruction": "Why", "input": "?", "response": "So."}, {"messages": [says("user", "Why\n\n?"), SAY]}),
        ({"messages": [ASK, SAY], "chat_template_kwargs": {"tools": TOOL}}, {"messages": [ASK, SAY], "tools": TOOLS}),
        ({"prompt": "Why?", "completion": "So.", "tools": json.dumps([TOOL])}, {"messages": [ASK, SAY], "tools": TOOLS}),
        ({"messages": [ASK, SAY], "functions": [TOOL | {"parameters": json.dumps(TOOL["parameters"])}]}, {"messages": [ASK, SAY], "tools": TOOLS}),
        ({"messages": [SKY, call('{"b": 1, "a": 2}')], "tools": TOOLS}, CALLING),
        ({"messages": [SKY, call(None)]}, {"messages": [SKY, call({})]}),
        ({"messages": [SKY, call("")]}, {"messages": [SKY, call({})]}),
        ({"messages": [SKY, call(None) | {"tool_calls": [{"name": "sky", "arguments": {"b": 1, "a": 2}}]}], "tools": TOOLS}, CALLING),
        (
            {"conversations": [{"from": "human", "value": "Sky?"}, {"from": "function_call", "value": '[{"name": "sky", "arguments": {"b": 1, "a": 2}}]'}], "tools": TOOLS},
            CALLING,
        ),
    ],
)  # fmt: skip
def test_other_layouts_become_the_chat_that_they_mean(row: dict[str, Any], chat: dict[str, Any]) -> None:
    assert told(row) == told(chat)


def test_a_decimal_of_a_table_is_a_number(tmp_path: Path) -> None:
    table = pyarrow.Table.from_pylist([dialogue(SKY, call({"price": Decimal("1.5")}))])
    pyarrow.parquet.write_table(table, tmp_path / "d.parquet")
    assert told_of(tmp_path / "d.parquet")[0][1] == ['<call>sky {"price": 1.5}</s>']


@pytest.mark.parametrize(
    "key", [{"weight": 0}, {"train": False}, {"loss": False}, {"loss_mask": "0"}, {"masked": True}, {"trainable": 0.0}]
)
def test_a_turn_that_is_not_learned_stays_in_the_prompt(key: dict[str, Any]) -> None:
    left_out = (says("assistant", text, **key) for text in ("No.", "z"))
    row = dialogue(ASK, next(left_out), says("user", "Really?"), SAY, ASK, next(left_out))
    assert told(row) == [("<user>Why?<assistant>No.</s><user>Really?<assistant>", ["So.</s>"])]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"title": "a", "body": "b"}, r"columns 'title', 'body'.*--data.prompt_template '{COLUMN}'"),
        ({"question": ["a", "b"], "answer": "c"}, "that do not fit the template dropped: a list where a text is expected"),
        ({"messages": [ASK, SAY | {"weight": 0}]}, "without an assistant's turn to learn"),
        ({"messages": [ASK, SAY | {"weight": 0.5}]}, "whose weight is neither 0 nor 1"),
        ({"messages": [ASK | {"train": True}, SAY]}, "with a turn of the role user that is to be learned"),
        ({"messages": [ASK, SAY | {"images": ["a.png"]}]}, "whose images would change the text and is not read"),
        ({"messages": [ASK, SAY], "images": ["a.png"]}, "whose images would change the text and is not read"),
        ({"messages": [ASK, SAY], "train": False}, "that are not to be learned, as a key of theirs says"),
        ({"prompt": "Why?", "completion": "So.", "label": False}, "that are not to be learned, as a key of theirs says"),
        ({"question": "Why?", "answer": "So.", "reasoning": "Rain."}, "whose reasoning would change the text"),
        ({"messages": [ASK, SAY], "chat_template_kwargs": ["x"]}, "whose chat_template_kwargs are no variables"),
        ({"messages": [ASK, SAY], "chat_template_kwargs": {"tokenize": True}}, "that the chat template refuses .*tokenize: not a var"),
        ({"messages": [ASK, SAY], "chat_template_kwargs": {"tools": ["sky"]}}, "whose tools are no descriptions"),
        ({"messages": [ASK, SAY], "tools": "sky"}, "whose tools is no JSON"),
        ({"messages": [SKY, call('"{}"')]}, "with tool arguments that are no object"),
        ({"messages": [SKY, call([1])]}, "with tool arguments that are no object"),
        ({"prompt": "Why?", "completion": "So.", "history": ["a", "bc"]}, "whose history is no list of turns"),
        ({"prompt": [*OLD], "completion": [SAY]}, "whose completion follows an answer in their prompt"),
        ({"chosen": [SAY]}, "that begin with the assistant dropped: give a user's turn before"),
    ],
)  # fmt: skip
def test_what_would_change_an_example_and_cannot_be_used_is_refused(row: dict[str, Any], reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        told(row)


@pytest.mark.parametrize("name", sorted(ARGUMENTS))
def test_no_row_sets_how_its_template_is_called(name: str) -> None:
    """Also where transformers has a new argument."""
    with pytest.raises(UserError, match=f"{name}: not a variable of the chat template"):
        told(dialogue(ASK, SAY, chat_template_kwargs={name: None}))


def test_tools_that_the_template_does_not_write_drop_the_row() -> None:
    template = TEMPLATE.replace("{{ t | tojson }}", "")
    assert told(dialogue(ASK, SAY, tools=[]), template=template)
    with pytest.raises(UserError, match=r"that the chat template refuses .* does not write the tools"):
        told(dialogue(ASK, SAY, tools=TOOLS), template=template)


def test_templates_of_the_settings_name_columns_in_braces() -> None:
    row = {"the question": "Why {0}?", "a": "{{ So }} 0."}
    made = told(row, prompt_template="{{{the question}}} ", response_template="{a}}}", chat=False)
    assert made == [("{Why {0}?} ", ["{{ So }} 0.}</s>"])]
    with pytest.raises(UserError, match="need the columns the question, b, and the rows have the question, a"):
        told(row, prompt_template="{the question}", response_template="{b}")


def test_a_pair_of_plain_text_has_no_place_for_other_columns_and_templates_may_leave_texts_out() -> None:
    pair = {"question": "Why?", "answer": "So.", "context": "Rain."}
    with pytest.raises(UserError, match=r"with a system message, a history or tools, but no chat"):
        told(pair | {"system": "S", "context": ""}, chat=False)
    made = told(pair, prompt_template="{question} ", response_template="{answer}", chat=False)
    assert made == [("Why? ", ["So.</s>"])]


@pytest.mark.parametrize(("column", "setting", "chat"), [("messages", False, True), ("text", "auto", False)])
def test_models_keep_whether_their_rows_were_chats_whatever_the_setting(tmp_path, column, setting, chat) -> None:
    turns = [[ASK | {"content": f"What is {n}?"}, SAY] for n in range(40)]
    rows = [{column: turn if chat else turn[0]["content"] * 90} for turn in turns]
    settings = DataSettings(source=write_rows(tmp_path / "rows.jsonl", rows), max_length=2000, chat=setting)
    made = load_corpus(settings, seed=0, folder=None, tokenizer=tokenizer_of())
    assert made.tokenizer.init_kwargs[TRAINED]["chat"] is made.chat is chat
