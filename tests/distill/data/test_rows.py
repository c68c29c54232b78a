"""A row keeps what it says: in every format, in every layout of columns, and with every key that changes an example."""

import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from datasets import Dataset, DatasetDict
from some_rows import spans
from tokenizers_of_kinds import with_start

from decode.errors import UserError
from decode.incoming import UnusableRow, row_chat
from decode.models.tokens import ARGUMENTS, TRAINED
from distill.config.data import DataSettings
from distill.data.chat import ChatFormat, prompt_part
from distill.data.corpus import Corpus, load_corpus
from distill.data.sources import plain_chat

TEMPLATE = (
    "{% if mood is defined %}<mood>{{ mood }}{% endif %}"
    "{% for t in tools or [] %}<tool>{{ t | tojson }}{% endfor %}"
    "{% for m in messages %}<{{ m.role }}>"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<call>{{ c.function.name }} {{ c.function.arguments | tojson }}{% endfor %}"
    "{{ eos_token if m.role == 'assistant' }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def corpus(source: Path | str, **settings: Any) -> Corpus:
    tokenizer = with_start()
    tokenizer.chat_template = TEMPLATE
    given = DataSettings(source=str(source), max_length=2000, **settings)
    return load_corpus(given, seed=0, folder=None, tokenizer=tokenizer)


def told(made: Corpus) -> list[tuple[str, list[str]]]:
    """The prompt of each example, and the texts that are learned."""
    rows = [row for split in (made.train, made.validation, made.test) for row in split]
    decode = made.tokenizer.decode
    return sorted(
        (
            decode(prompt_part(row["input_ids"], row["labels"])),
            [text for _, text in spans(made.tokenizer, row["input_ids"], row["labels"])],
        )
        for row in rows
    )


def numbered(value: Any, number: int) -> Any:
    """A value in whose texts # is a number, so that rows differ."""
    return json.loads(json.dumps(value, ensure_ascii=False).replace("#", str(number)))


def made_of(tmp_path: Path, *rows: dict[str, Any], **settings: Any) -> Corpus:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(numbered(row, n)) + "\n" for n in range(40) for row in rows))
    return corpus(path, **settings)


def call(arguments: Any, **more: Any) -> dict[str, Any]:
    function = {"name": "sky", "arguments": arguments}
    return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}], **more}


def says(role: str, content: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


TOOL = {"name": "sky", "parameters": {"type": "object", "properties": {"unit": {"type": "string"}}}}
TOOLS = [{"type": "function", "function": TOOL}]
SKY, SUN = says("user", "Sky #?"), says("tool", "sun")
SEVERAL = [
    {
        "messages": [
            says("system", "S"),
            SKY,
            call({"unit": "c", "city": "Rome #"}),
            SUN,
            says("assistant", "Sunny #"),
        ],
        "tools": TOOLS,
    },
    {
        "messages": [
            SKY,
            call({"unit": "c", "day": "one"}, reasoning_content="hm"),
            SUN,
            says("assistant", "So", weight=0),
        ],
        "tools": TOOLS,
        "chat_template_kwargs": {"mood": "good"},
    },
    {"messages": [SKY, says("assistant", "No", weight=0), SKY, says("assistant", "Blue #", weight=1)]},
]


def mapped(kind: pyarrow.DataType, *names: str) -> pyarrow.DataType:
    """The type in which the structs of these fields are maps of texts."""
    if pyarrow.types.is_list(kind):
        return pyarrow.list_(mapped(kind.value_type, *names))
    if not pyarrow.types.is_struct(kind):
        return kind
    texts = pyarrow.map_(pyarrow.string(), pyarrow.string())
    return pyarrow.struct([
        pyarrow.field(part.name, texts if part.name in names else mapped(part.type, *names)) for part in kind
    ])  # fmt: skip


def pairs(value: Any, kind: pyarrow.DataType) -> Any:
    """A value as `pyarrow.array` takes it, whose maps are lists of pairs."""
    if pyarrow.types.is_map(kind) and value is not None:
        return list(value.items())
    if isinstance(value, dict):
        return {part.name: pairs(value.get(part.name), part.type) for part in kind}
    return [pairs(item, kind.value_type) for item in value] if isinstance(value, list) else value


def test_a_row_teaches_the_same_in_every_format(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Arguments in the row's order, no keys of others as nulls, maps as objects, also of a whole message."""
    rows = [numbered(row, n) for n in range(30) for row in SEVERAL]
    filled = [{name: row.get(name) for name in ("messages", "tools", "chat_template_kwargs")} for row in rows]
    table = pyarrow.Table.from_pylist(filled)
    kinds = {name: mapped(table.schema.field(name).type, "arguments") for name in table.column_names}
    columns = {name: [pairs(row.get(name), kinds[name]) for row in rows] for name in kinds}
    maps = pyarrow.table({name: pyarrow.array(columns[name], kind) for name, kind in kinds.items()})
    texts = [
        {name: json.dumps(value) if name == "chat_template_kwargs" else [
            [(key, item if isinstance(item, str) else json.dumps(item)) for key, item in turn.items()] for turn in value
        ] for name, value in row.items()} for row in rows
    ]  # fmt: skip
    turns = pyarrow.list_(pyarrow.map_(pyarrow.string(), pyarrow.string()))
    whole = pyarrow.Table.from_pylist(
        texts, pyarrow.schema([(n, "string" if n == "chat_template_kwargs" else turns) for n in kinds])
    )
    (tmp_path / "r.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "r.json").write_text(json.dumps(rows))
    for name, content in {"structs": table, "maps": maps, "messages": whole}.items():
        pyarrow.parquet.write_table(content, tmp_path / f"{name}.parquet")
    with pyarrow.OSFile(str(tmp_path / "f.arrow"), "wb") as file, pyarrow.ipc.new_file(file, maps.schema) as writer:
        writer.write_table(maps)
    with pyarrow.OSFile(str(tmp_path / "s.arrow"), "wb") as file, pyarrow.ipc.new_stream(file, maps.schema) as writer:
        writer.write_table(maps)
    hub = DatasetDict(train=Dataset.from_list(filled, on_mixed_types="use_json"))
    monkeypatch.setattr("distill.data.sources.load_hub", lambda *_: hub)
    files = "r.json", "structs.parquet", "maps.parquet", "messages.parquet", "f.arrow", "s.arrow"
    plain = told(corpus(tmp_path / "r.jsonl"))
    assert len(plain) == 90
    assert sum(prompt.startswith('<mood>good<tool>{"type": "function"') for prompt, _ in plain) == 30
    answers = [text for _, texts in plain for text in texts]
    assert '<call>sky {"unit": "c", "city": "Rome 7"}</s>' in answers
    assert '<think>hm</think><call>sky {"unit": "c", "day": "one"}</s>' in answers
    assert not any(text.startswith(("No", "So")) for text in answers)
    for source in (*(tmp_path / name for name in files), "somebody/something"):
        assert told(corpus(source)) == plain, source


HUMAN, GPT = {"from": "human", "value": "Why #?"}, {"from": "gpt", "value": "So #."}
ASK, SAY, OLD = says("user", "Why #?"), says("assistant", "So #."), [says("user", "a"), says("assistant", "b")]
CALLING = {"messages": [SKY, call({"b": 1, "a": 2})], "tools": TOOLS}


@pytest.mark.parametrize(
    ("row", "chat"),
    [
        ({"system": "S", "conversations": [HUMAN, GPT]}, {"messages": [says("system", "S"), ASK, SAY]}),
        ({"system_prompt": "S", "messages": [says("system", "S"), ASK, SAY]}, {"messages": [says("system", "S"), ASK, SAY]}),
        (
            {"instruction": "Why #?", "input": "", "output": "So #.", "system": "S", "history": [["a", "b"]]},
            {"messages": [says("system", "S"), *OLD, ASK, SAY]},
        ),
        ({"prompt": "Why #?", "completion": "So #.", "history": json.dumps(OLD)}, {"messages": [*OLD, ASK, SAY]}),
        ({"prompt": [*OLD, ASK], "completion": [SAY]}, {"messages": [*OLD, ASK, SAY]}),
        ({"prompt": [ASK], "chosen": [SAY], "rejected": [SAY]}, {"messages": [ASK, SAY]}),
        ({"prompt": "Why #?", "chosen": [SAY], "rejected": [SAY]}, {"messages": [ASK, SAY]}),
        ({"prompt": [ASK], "completion": "So #."}, {"messages": [ASK, SAY]}),
        (
            {"input": {"messages": [ASK], "tools": TOOLS}, "preferred_output": [SAY], "non_preferred_output": [SAY]},
            {"messages": [ASK, SAY], "tools": TOOLS},
        ),
        ({"conversations": [HUMAN], "chosen": GPT, "rejected": GPT}, {"messages": [ASK, SAY]}),
        ({"messages": [ASK, SAY], "chosen": [ASK, SAY], "answer": "x"}, {"messages": [ASK, SAY]}),
        ({"question": "Why #?", "response": "So #.", "system_prompt": "S"}, {"messages": [says("system", "S"), ASK, SAY]}),
        ({"instruction": "Why", "input": "#?", "response": "So #."}, {"messages": [says("user", "Why\n\n#?"), SAY]}),
        ({"messages": [ASK, SAY], "chat_template_kwargs": {"tools": TOOL}}, {"messages": [ASK, SAY], "tools": TOOLS}),
        ({"prompt": "Why #?", "completion": "So #.", "tools": json.dumps([TOOL])}, {"messages": [ASK, SAY], "tools": TOOLS}),
        ({"messages": [ASK, SAY], "functions": [TOOL | {"parameters": json.dumps(TOOL["parameters"])}]}, {"messages": [ASK, SAY], "tools": TOOLS}),
        ({"messages": [SKY, call('{"b": 1, "a": 2}')], "tools": TOOLS}, CALLING),
        ({"messages": [SKY, call(None)]}, {"messages": [SKY, call({})]}),
        ({"messages": [SKY, call("")]}, {"messages": [SKY, call({})]}),
        ({"messages": [SKY, call(None) | {"tool_calls": [{"name": "sky", "arguments": {"b": 1, "a": 2}}]}], "tools": TOOLS}, CALLING),
        (
            {"conversations": [{"from": "human", "value": "Sky #?"}, {"from": "function_call", "value": '[{"name": "sky", "arguments": {"b": 1, "a": 2}}]'}], "tools": TOOLS},
            CALLING,
        ),
    ],
)  # fmt: skip
def test_other_layouts_become_the_chat_that_they_mean(
    tmp_path: Path, row: dict[str, Any], chat: dict[str, Any]
) -> None:
    made = made_of(tmp_path, row)
    assert told(made) == told(made_of(tmp_path, chat))
    assert len(told(made)) == 40


def test_a_decimal_of_a_table_is_a_number(tmp_path: Path) -> None:
    rows = [{"messages": [numbered(SKY, n), call({"price": Decimal("1.5")})]} for n in range(40)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "d.parquet")
    assert {text for _, (text,) in told(corpus(tmp_path / "d.parquet"))} == {'<call>sky {"price": 1.5}</s>'}


@pytest.mark.parametrize(
    "key", [{"weight": 0}, {"train": False}, {"loss": False}, {"loss_mask": "0"}, {"masked": True}, {"trainable": 0.0}]
)
def test_a_turn_that_is_not_learned_stays_in_the_prompt(tmp_path: Path, key: dict[str, Any]) -> None:
    row = {
        "messages": [
            ASK,
            says("assistant", "No.", **key),
            says("user", "Really?"),
            SAY,
            ASK,
            says("assistant", "z", **key),
        ]
    }
    prompt, learned = told(made_of(tmp_path, row))[0]
    assert prompt == "<user>Why 0?<assistant>No.</s><user>Really?<assistant>"
    assert learned == ["So 0.</s>"]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"messages": [ASK, SAY | {"weight": 0}]}, "without an assistant's turn to learn"),
        ({"messages": [ASK, SAY | {"weight": 0.5}]}, "whose weight is neither 0 nor 1"),
        ({"messages": [ASK | {"train": True}, SAY]}, "with a turn of the role user that is to be learned"),
        ({"messages": [ASK, SAY | {"images": ["a.png"]}]}, "whose images would change the text and is not read"),
        ({"messages": [ASK, SAY], "images": ["a.png"]}, "whose images would change the text and is not read"),
        ({"messages": [ASK, SAY], "train": False}, "that are not to be learned, as a key of theirs says"),
        ({"prompt": "Why #?", "completion": "So.", "label": False}, "that are not to be learned, as a key of theirs says"),
        ({"question": "Why #?", "answer": "So.", "reasoning": "Rain."}, "whose reasoning would change the text"),
        ({"messages": [ASK, SAY], "chat_template_kwargs": ["x"]}, "whose chat_template_kwargs are no variables"),
        ({"messages": [ASK, SAY], "chat_template_kwargs": {"tokenize": True}}, "that the chat template refuses .*tokenize: not a var"),
        ({"messages": [ASK, SAY], "chat_template_kwargs": {"tools": ["sky"]}}, "whose tools are no descriptions"),
        ({"messages": [ASK, SAY], "tools": "sky"}, "whose tools is no JSON"),
        ({"messages": [SKY, call('"{}"')]}, "with tool arguments that are no object"),
        ({"messages": [SKY, call([1])]}, "with tool arguments that are no object"),
        ({"prompt": "Why #?", "completion": "So.", "history": ["a", "bc"]}, "whose history is no list of turns"),
        ({"prompt": [*OLD], "completion": [SAY]}, "whose completion follows an answer in their prompt"),
        ({"chosen": [SAY]}, "that begin with the assistant dropped .row 1: give a user's turn before"),
    ],
)  # fmt: skip
def test_what_would_change_an_example_and_cannot_be_used_is_refused(
    tmp_path: Path, row: dict[str, Any], reason: str
) -> None:
    with pytest.raises(UserError, match=rf"\d+ rows {reason}"):
        made_of(tmp_path, row)


@pytest.mark.parametrize("name", sorted(ARGUMENTS))
def test_no_row_sets_how_its_template_is_called(name: str) -> None:
    """Also where transformers has a new argument."""
    tokenizer = with_start()
    tokenizer.chat_template = TEMPLATE
    variables = json.loads(plain_chat(*row_chat({"chat_template_kwargs": {name: None}}, [ASK], ()))["variables"])
    with pytest.raises(UnusableRow, match=f"{name}: not a variable of the chat template"):
        ChatFormat(tokenizer, template_args=variables).ask([ASK])


def test_tools_that_the_template_does_not_write_drop_the_row(tmp_path: Path) -> None:
    row, template = {"messages": [ASK, SAY], "tools": TOOLS}, TEMPLATE.replace("{{ t | tojson }}", "")
    assert len(told(made_of(tmp_path, row | {"tools": []}, chat_template=template))) == 40
    with pytest.raises(UserError, match=r"\d+ rows that the chat template refuses .* does not write the tools"):
        made_of(tmp_path, row, chat_template=template)


def test_templates_of_the_settings_name_columns_in_braces(tmp_path: Path) -> None:
    row = {"the question": "Why {#}?", "a": "{{ So }} #."}
    made = made_of(tmp_path, row, prompt_template="{{{the question}}} ", response_template="{a}}}", chat=False)
    assert told(made)[0] == ("<s> {Why {0}?} ", ["{{ So }} 0.}</s>"])
    with pytest.raises(UserError, match="need the columns the question, b, and the rows have the question, a"):
        made_of(tmp_path, row, prompt_template="{the question}", response_template="{b}")


def test_a_pair_of_plain_text_has_no_place_for_other_columns_and_templates_may_leave_texts_out(tmp_path: Path) -> None:
    pair = {"question": "Why #?", "answer": "So #.", "context": "Rain."}
    with pytest.raises(UserError, match=r"\d+ rows with a system message, a history or tools, but no chat"):
        made_of(tmp_path, pair | {"system": "S", "context": ""}, chat=False)
    made = made_of(tmp_path, pair, prompt_template="{question} ", response_template="{answer}", chat=False)
    assert told(made)[0] == ("<s> Why 0? ", ["So 0.</s>"])


@pytest.mark.parametrize(("column", "setting", "chat"), [("messages", False, True), ("text", "auto", False)])
def test_models_keep_whether_their_rows_were_chats_whatever_the_setting(tmp_path, column, setting, chat) -> None:
    turns = [[ASK | {"content": f"What is {n}?"}, SAY] for n in range(40)]
    rows = [{column: turn if chat else turn[0]["content"] * 90} for turn in turns]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    made = corpus(tmp_path / "rows.jsonl", chat=setting)
    assert made.tokenizer.init_kwargs[TRAINED]["chat"] is made.chat is chat
