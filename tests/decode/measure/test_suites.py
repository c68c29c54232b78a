"""Rows of files as people have them, prompts of every data set, scores, and problems of arithmetic."""

import gzip
import hashlib
import json
import re
from collections import Counter
from dataclasses import replace
from fractions import Fraction

import pandas
import pyarrow
import pyarrow.parquet
import pytest

from decode.commands.checks import open_suites
from decode.commands.settings import ProfileSettings
from decode.errors import UserError
from decode.incoming import ASKED
from decode.measure.arithmetic import problem, problems, split_of, tables
from decode.measure.suites import PRESETS, SCORERS, final_number, held_out, iter_rows, load_suite

ROWS = [{"question": f"What is {n} plus {n}?", "answer": f"{n}+{n}={2 * n}\n#### {2 * n}"} for n in range(20)]


def write(path, rows):
    """The rows in the format of the path's ending."""
    if path.suffix == ".parquet":
        pandas.DataFrame(rows).to_parquet(path)
    elif path.suffix == ".csv":
        pandas.DataFrame(rows).to_csv(path, index=False)
    else:
        path.write_text(json.dumps(rows) if path.suffix == ".json" else "\n".join(map(json.dumps, rows)))
    return str(path)


@pytest.mark.parametrize("ending", ["json", "jsonl", "csv", "parquet"])
def test_every_local_format_gives_the_same_prompts(tmp_path, ending):
    suite = load_suite(f"gsm8k={write(tmp_path / f'rows.{ending}', ROWS)}")
    assert [p.id for p in suite.prompts] == [f"gsm8k/{n}" for n in range(20)]
    assert suite.prompts[3].text.startswith("What is 3 plus 3?\nAnswer the above question.")
    assert suite.prompts[3].reference == "3+3=6\nThe final answer is:  6"
    assert suite.score(suite.prompts[3], "So 3+3=6. The final answer is: 6") == 1.0
    assert suite.score(suite.prompts[3], "So 3+3=7. The final answer is: 7") == 0.0
    rows = [{"question": "2020-01-01", "answer": "1.50"}, {"question": "007", "answer": "NA"}]
    assert list(iter_rows(write(tmp_path / f"r.{ending}", rows))) == rows  # no text becomes a date or a number


def test_spec_bench_rows_with_references_of_all_shapes_are_read(tmp_path):
    rows = [
        {"question_id": 81, "category": "writing", "turns": ["Write.", "Again."]},
        {"question_id": 82, "category": "qa", "turns": ["Who?"], "reference": ["Ann"]},
        {"question_id": 83, "category": "rag", "turns": ["Where?"], "reference": [["Rome", "Roma"], ["Italy"]]},
    ]
    suite = load_suite(f"spec_bench={write(tmp_path / 'question.jsonl', rows)}")
    assert [(p.id, p.reference, p.category) for p in suite.prompts] == [  # MT-Bench's categories are one
        ("spec_bench/81", None, "multi-turn"), ("spec_bench/82", "Ann", "qa"), ("spec_bench/83", "Rome", "rag"),
    ]  # fmt: skip
    assert suite.prompts[0].turns == ("Write.", "Again.")
    for name, number in {"rag": 83, "multi-turn": 81, "writing": 81}.items():
        (only,) = load_suite(f"spec_bench:{name}={tmp_path / 'question.jsonl'}").prompts
        assert only.category == ("rag" if name == "rag" else "writing")
        assert only.id == f"spec_bench/{number}"
    with pytest.raises(UserError, match="choose one of multi-turn, qa, rag, writing"):
        load_suite(f"spec_bench:cooking={tmp_path / 'question.jsonl'}")


def test_the_chat_suite_has_sixteen_prompts_in_each_of_six_categories():
    suite = load_suite("chat")
    assert len(suite.prompts) == len({p.id for p in suite.prompts}) == len({p.turns for p in suite.prompts}) == 96
    categories = {"multi-turn", "translation", "summarization", "qa", "math_reasoning", "rag"}
    assert Counter(p.category for p in suite.prompts) == dict.fromkeys(categories, 16)
    assert all(len(p.turns) == 1 + (p.category == "multi-turn") for p in suite.prompts)
    assert {p.category for p in load_suite("chat:qa").prompts} == {"qa"}
    for limit in (4, 12):  # a sample takes evenly from the categories
        counts = Counter(p.category for p in load_suite("chat", limit=limit).prompts)
        assert sum(counts.values()) == limit
        assert max(counts.values()) - min(counts.get(name, 0) for name in categories) <= 1


def test_a_path_alone_gives_other_prompts(tmp_path):
    rows = [{"prompt": "Say.", "weight": 3}, {"question": "2+2?", "answer": "4"}, {"turns": ["One.", "Two."]}]
    path = write(tmp_path / "mine.jsonl", rows)
    for spec in (path, f"prompts={path}"):
        suite = load_suite(spec)
        assert [p.text for p in suite.prompts] == ["Say.", "2+2?", "One."]
        assert suite.prompts[2].turns == ("One.", "Two.")
    assert [suite.name for suite in open_suites(ProfileSettings(suite=[path]), chat=False)] == ["mine"]
    for chat, name in ((True, "chat"), (False, "arithmetic")):  # none is named
        settings = ProfileSettings()
        assert [suite.name for suite in open_suites(settings, chat=chat)] == settings.suite == [name]


TOOL = {"name": "sky", "parameters": {"type": "object"}}
WHY, SKY = {"role": "user", "content": "Why?"}, {"role": "assistant", "tool_calls": [{"function": TOOL}]}


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_a_row_of_prompts_keeps_what_it_says_or_is_refused(tmp_path, capsys, ending):
    """Also a column of maps, as Spark writes one."""
    path = tmp_path / f"mine.{ending}"
    rows = [
        {"prompt": "Why?", "system": "S", "history": [["a", "b"]], "functions": [TOOL]},
        {"messages": [{"role": "system", "content": "S"}, WHY]},
        {"question": "Why?", "chat_template_kwargs": {"mood": "good"}},
        {"question": "Why?", "context": "Rain."},
        {"prompt": "Why?", "images": ["a.png"]},
        {"messages": [WHY, SKY, {"role": "tool", "content": "sun"}]},
    ]
    write(path, rows)
    if ending == "parquet":
        kinds = pyarrow.map_(pyarrow.string(), pyarrow.string())
        maps = pyarrow.array([list(row.get("chat_template_kwargs", {}).items()) for row in rows], kinds)
        columns = {name: [row.get(name) for row in rows] for name in dict.fromkeys(key for row in rows for key in row)}
        pyarrow.parquet.write_table(pyarrow.table(columns | {"chat_template_kwargs": maps}), path)
    many, opened, moody = load_suite(str(path)).prompts
    assert (many.said, many.system) == (("a", "Why?"), "S")
    assert many.variables == {"tools": [{"type": "function", "function": TOOL}]}
    assert (opened.said, opened.system, opened.variables) == (("Why?",), "S", {})
    assert (moody.said, moody.system, moody.variables) == (("Why?",), "", {"mood": "good"})
    notes = capsys.readouterr().err.splitlines()
    assert [re.search(r"1 row (.*) dropped \(row (\d)", note).groups() for note in notes] == [
        ("whose context would change the text and is not read", "4"),
        ("whose images would change the text and is not read", "5"),
        ("whose prompt is neither a text nor a user's turns in " + ", ".join(ASKED), "6"),
    ]
    path = write(tmp_path / "gsm8k.jsonl", [{"question": "Why?", "answer": "So.", "system": "S", "context": "Rain."}])
    (only,) = load_suite(f"gsm8k={path}").prompts
    assert (only.system, only.turns) == ("S", ())


PUBLISHED = {  # a row with the published columns, and the prompt's id, first words, category and turns
    "mt_bench": (
        {"question_id": 81, "category": "writing", "turns": ["One.", "Two."], "reference": ["a", "b"]},
        ("mt_bench/81", "One.", "writing", ("One.", "Two.")),
    ),
    "mt_bench from the Hub": (
        {"category": "math", "prompt": ["One.", "Two."], "prompt_id": 7, "reference": []},
        ("mt_bench/0", "One.", "math", ("One.", "Two.")),
    ),
    "humaneval": (
        {"task_id": "HumanEval/0", "prompt": "def f():", "canonical_solution": "", "test": "", "entry_point": "f"},
        ("humaneval/HumanEval/0", "def f():", "", ("Complete this Python function:\n```python\ndef f():\n```",)),
    ),
    "math_500": (
        {"problem": "$1+1$?", "solution": "$2$", "answer": "2", "subject": "Algebra", "level": 1, "unique_id": "t/1"},
        ("math_500/t/1", "$1+1$?\nThink step by step, and put the final answer into \\boxed{}.", "Algebra", ()),
    ),
    "speed_bench": (
        {"question_id": "q1", "category": "rag", "sub_category": "hle", "messages": [{"role": "user", "content": "One."}]},
        ("speed_bench/q1", "One.", "rag", ("One.",)),
    ),
    "livecodebench": (
        {"question_content": "Sum.", "question_id": "1", "starter_code": "class S:", "difficulty": "easy", "metadata": "{}"},
        ("livecodebench/1", "Sum.\n\nWrite a Python program that completes this code:\n```python\nclass S:", "easy", ()),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_suite_is_read_as_published(tmp_path, name):
    row, (key, text, category, turns) = PUBLISHED[name]
    path = write(tmp_path / "question.jsonl", [row])
    (found,) = load_suite(f"{name.split()[0]}={path}").prompts
    assert (found.id, found.category, found.turns) == (key, category, turns)
    assert found.text.startswith(text)


def test_rows_without_prompts_are_refused_with_what_is_needed(tmp_path):
    path = tmp_path / "mine.jsonl"
    write(path, [{"id": 1, "query": "Who?"}])
    for name in ("prompts", "mt_bench"):
        with pytest.raises(UserError, match=r"rows with id, query .* whose prompt is .* in messages, conv"):
            load_suite(f"{name}={path}")
    with pytest.raises(UserError, match=r"rows with id, query that are not .* which need question, answer"):
        load_suite(f"gsm8k={path}")
    strange = {
        "speed_bench": {"category": "qa", "turns": ["FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING X"]},
        "prompts": {"turns": [1]},
        "mmlu": {"question": "?", "choices": list("abcde"), "answer": 1},
        "mbpp": {"question": "Add.", "task_id": "HumanEval/7"},
    }
    for name, row in strange.items():
        with pytest.raises(UserError, match=rf"the suite '{name}=.* has rows with .* that are not as those of {name}"):
            load_suite(f"{name}={write(path, [row])}")


def test_mbpp_rows_go_to_their_official_split_and_have_no_scorer(tmp_path):
    row = {"text": "Add.", "code": "def add(a, b):\r\n    return a + b", "test_list": ["assert add(1, 2) == 3"]}
    path = write(tmp_path / "mbpp.jsonl", [row | {"task_id": n} for n in (5, 11, 510, 511, 601)])
    suite = load_suite(f"mbpp={path}")
    assert [p.id for p in suite.prompts] == ["mbpp/11", "mbpp/510"]
    assert suite.score is None
    assert [p.id for p in load_suite(f"mbpp={path}", split="train").prompts] == ["mbpp/601"]


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("arithmatic", "did you mean 'arithmetic'"),
        ("arithmetic:4", "difficulty '4'"),
        ("open:2", "no category '2'"),
        ("gsm8k=missing.jsonl", "no file 'missing.jsonl'"),
        ("prompts", "--suite prompts=PATH"),
        ("spec_bench", "--suite spec_bench=PATH, a copy of data/spec_bench/question.jsonl"),
    ],
)
def test_a_wrong_spec_is_answered_with_the_next_step(spec, said):
    with pytest.raises(UserError, match=said):
        load_suite(spec)


PAIRS = [{"question": "Où?", "answer": "Là."}, {"question": "Qui?", "answer": "Toi."}]
LINES = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in PAIRS)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl", LINES.replace("\n", "\r\n\r\n").encode("utf-8-sig")),
        ("a.JSONL.GZ", gzip.compress(LINES.encode(), mtime=0)),
        ("a.json", LINES.encode()),
        ("a.json.gz", gzip.compress(json.dumps(PAIRS, indent=1).encode(), mtime=0)),
        ("a.csv", "question,answer\nOù?,Là.\nQui?,Toi.\n".encode("utf-8-sig")),
    ],
)
def test_a_file_is_read_in_the_encoding_and_the_form_it_has(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    assert list(iter_rows(tmp_path / name)) == PAIRS


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.jsonl", LINES.encode("latin-1"), "can't decode byte 0xf9 .*iconv"),
        ("a.csv", b"q\na\ncaf\xe9\n", "can't decode byte 0xe9"),
        ("a.txt", b"a\n\ncaf\xe9\n", "can't decode byte 0xe9"),
        ("a.jsonl.gz", gzip.compress(LINES.encode() * 99, mtime=0)[:-9], "cannot be read: Compressed file ended"),
        ("a.jsonl.gz", LINES.encode(), "cannot be read: Not a gzipped file"),
        ("a.csv", b"question,answer\nWhy?,Yes, so\n", "near row 1: its 3 fields are not the header's"),
        ("a.csv", b"question,answer,answer\nWhy?,Yes,No\n", "near row 1: its 2 fields are not the header's"),
        ("a.csv", b'question,answer\n"Why?,So\n', "near row 1: unexpected end of data"),
        ("a.json", b'"text"', "named columns"),
        ("a.jsonl", b'{"a": 1}\n\n["b"]', "near row 2: .*named columns"),
        ("a.json", b'[{"a": 1}', "near row 1: Expecting ',' delimiter"),
        ("a.jsonl", b"", "no rows"),
        ("a.parquet", b"not parquet", "cannot be read"),
        ("a.xlsx.gz", b"", r"ends in '.gz': rows are read from .csv, .json"),
    ],
)
def test_a_file_that_cannot_be_read_is_refused_with_the_place(tmp_path, name, content, said):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=said):
        list(iter_rows(tmp_path / name))


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A local folder that the Hub's libraries read in the place of a preset's repository."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "hub"
    folder.mkdir()

    def serve(name, **files):
        for split, rows in files.items():
            write(folder / f"{split}.jsonl", rows)
        monkeypatch.setitem(PRESETS, name, replace(PRESETS[name], hub=str(folder), config=None))

    return serve


def test_a_split_is_read_from_the_hub(hub):
    hub("gsm8k", train=ROWS[:15], test=ROWS[15:])
    assert [p.reference[:2] for p in load_suite("gsm8k").prompts] == ["15", "16", "17", "18", "19"]
    hub("humaneval", test=ROWS)
    with pytest.raises(UserError, match=r"no split 'train'.*it has test"):
        load_suite("humaneval", split="train")


def test_a_hub_data_set_without_a_test_split_asks_what_training_leaves_out(hub):
    rows = [{"instruction": f"Count to {n}.", "output": "..."} for n in range(200)]
    hub("alpaca", train=rows)
    asked = {split: {p.text for p in load_suite("alpaca", split=split).prompts} for split in ("train", "test")}
    assert asked["test"] == {t for t in (PRESETS["alpaca"].prompt(r) for r in rows) if held_out(t) == "test"}
    assert asked["test"]
    assert not asked["test"] & asked["train"]


def test_without_the_hub_the_error_names_the_local_alternative(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match=r"suite 'gsm8k'.*HF_HUB_OFFLINE.*--suite gsm8k=PATH"):
        load_suite("gsm8k")


def test_the_final_number_and_the_chosen_letter_are_scored():
    numbers = {
        "5+5=10\n#### 10": "10", "The final answer is: $1,234.50.": "1234.5", "The final answer is:  -7\n\nWait, 8.": "-7",
        "#### 3 and then #### 4": "4", "It costs 12 dollars, or 13.": "13", "half: .5": "0.5",
        "She needs 3-4 apples.": "4", "(15-7)-8, that is 16 - 8 = -8": "-8",
    }  # fmt: skip
    for text, number in numbers.items():
        assert final_number(text) == final_number(number)
    assert final_number("no digits") is None
    assert SCORERS["number"]("#### 3", "The final answer is: 3.00") == 1.0
    assert SCORERS["number"]("#### 3", "The final answer is: 30") == SCORERS["number"]("none", "none") == 0.0
    right = (
        " B", "B. four", "(B)", "The answer is B", "A careful look: the answer is (B)", "The answer is a bee, so B",
        "The answer is b.", "Answer: b\nSince A",
    )  # fmt: skip
    assert [SCORERS["letter"](" B", output) for output in right] == [1] * len(right)
    assert [SCORERS["letter"](" B", output) for output in (" C", "Because", "")] == [0] * 3


MARK = re.compile(r"<<(\d+)([-+*/])(\d+)=(\d+)>>(\d+)")


def check_solution(solution):
    """The answer, after every calculator mark and the last line of a solution were verified."""
    marks = MARK.findall(solution)
    assert solution.count("<<") == len(marks) > 0
    for left, op, right, result, copied in marks:
        a, b = Fraction(left), Fraction(right)
        value = a / b if op == "/" else {"+": a + b, "-": a - b, "*": a * b}[op]
        assert value == int(result) == int(copied), solution
    answer = solution.rpartition("\n#### ")[2]
    assert answer == marks[-1][3]
    return int(answer)


@pytest.mark.parametrize("difficulty", [1, 2, 3])
def test_problems_are_right_complete_and_of_their_difficulty(difficulty):
    size = tables()["sizes"][str(difficulty)]
    for split in ("train", "validation", "test"):
        made = list(problems(7, split, 300, difficulty))
        for one in made:
            assert check_solution(one.solution) == one.answer
            assert one.solution.count("<<") == one.steps
            assert one.solution.endswith(f"\n#### {one.answer}")
            assert split_of(one.question) == split
            assert one.question.endswith("?")
            assert not re.search(r"[{}\[\]|()]|  ", one.question + one.solution)
        results = [int(r) for one in made for r in re.findall(r"=(\d+)>>", one.solution)]
        assert min(results) >= 2
        assert max(results) <= size["limit"]
        assert {one.steps for one in made} == set(size["steps"])


def test_the_problems_of_a_seed_never_change():
    again = [problem(3, "test", index, 2) for index in (5, 0, 9)]
    assert [list(problems(3, "test", 10, 2))[index] for index in (5, 0, 9)] == again
    digest = hashlib.sha256()
    for seed, split, difficulty in ((0, "train", 1), (7, "validation", 2), (7, "test", 3)):
        digest.update("".join(repr(vars(one)) for one in problems(seed, split, 200, difficulty)).encode())
    assert digest.hexdigest() == "842d6c5558d6199c2e9a081078a0b411e4f5560c0bcf2eb30790b72661fd61db"
