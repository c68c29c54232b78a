import csv
import json
from collections import Counter
from dataclasses import replace

import pyarrow
import pyarrow.parquet
import pytest

from decode.bench import suites
from decode.bench.datasets import PRESETS, held_out, load_hub, read_rows
from decode.bench.suites import final_number, letter_score, load_suite, number_score, rouge_score
from decode.commands.checks import open_suites
from decode.commands.settings import ProfileSettings
from decode.errors import UserError

ROWS = [{"question": f"What is {n} plus {n}?", "answer": f"{n}+{n}={2 * n}\n#### {2 * n}"} for n in range(20)]


def write(path, rows):
    """The rows in the format of the path's ending."""
    path = str(path)
    if path.endswith(".parquet"):
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
        return path
    with open(path, "w", encoding="utf-8", newline="") as file:
        if path.endswith(".csv"):
            table = csv.DictWriter(file, list(rows[0]))
            table.writeheader()
            table.writerows(rows)
        elif path.endswith(".json"):
            json.dump(rows, file)
        else:
            file.writelines(json.dumps(row) + "\n" for row in rows)
    return path


@pytest.fixture
def offline(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


@pytest.mark.parametrize("ending", ["json", "jsonl", "csv", "parquet"])
def test_every_local_format_gives_the_same_prompts(tmp_path, ending):
    suite = load_suite(f"gsm8k={write(tmp_path / f'rows.{ending}', ROWS)}")
    assert [p.id for p in suite.prompts] == [f"gsm8k/{n}" for n in range(20)]
    assert suite.prompts[3].text.startswith("What is 3 plus 3?\nAnswer the above question.")
    assert suite.prompts[3].reference == "3+3=6\nThe final answer is:  6"
    assert suite.score(suite.prompts[3], "So 3+3=6. The final answer is: 6") == 1.0
    assert suite.score(suite.prompts[3], "So 3+3=7. The final answer is: 7") == 0.0
    rows = [{"question": "2020-01-01", "answer": "1.50"}, {"question": "007", "answer": "NA"}]
    assert read_rows(write(tmp_path / f"r.{ending}", rows)) == rows  # no text becomes a date or a number


def test_spec_bench_rows_with_references_of_all_shapes_are_read(tmp_path):
    rows = [
        {"question_id": 81, "category": "writing", "turns": ["Write.", "Again."]},
        {"question_id": 82, "category": "qa", "turns": ["Who?"], "reference": ["Ann"]},
        {"question_id": 83, "category": "rag", "turns": ["Where?"], "reference": [["Rome", "Roma"], ["Italy"]]},
    ]
    suite = load_suite(f"spec_bench={write(tmp_path / 'question.jsonl', rows)}")
    assert [p.id for p in suite.prompts] == ["spec_bench/81", "spec_bench/82", "spec_bench/83"]
    assert [p.reference for p in suite.prompts] == [None, "Ann", "Rome"]
    assert suite.prompts[0].turns == ("Write.", "Again.")
    assert [p.category for p in suite.prompts] == ["multi-turn", "qa", "rag"]  # MT-Bench's are one
    only = load_suite(f"spec_bench:rag={tmp_path / 'question.jsonl'}")
    assert [p.id for p in only.prompts] == ["spec_bench/83"]
    for name in ("multi-turn", "writing"):
        assert [p.id for p in load_suite(f"spec_bench:{name}={tmp_path / 'question.jsonl'}").prompts] == [
            "spec_bench/81"
        ]
    with pytest.raises(UserError, match="choose one of multi-turn, qa, rag, writing"):
        load_suite(f"spec_bench:cooking={tmp_path / 'question.jsonl'}")


CATEGORIES = {"multi-turn", "translation", "summarization", "qa", "math_reasoning", "rag"}


def test_the_chat_suite_has_sixteen_prompts_in_each_of_six_categories():
    suite = load_suite("chat")
    assert len(suite.prompts) == len({p.id for p in suite.prompts}) == len({p.turns for p in suite.prompts}) == 96
    assert Counter(p.category for p in suite.prompts) == dict.fromkeys(CATEGORIES, 16)
    assert all(len(p.turns) == 1 + (p.category == "multi-turn") for p in suite.prompts)
    passages = [p.text for p in suite.prompts if p.category in ("summarization", "rag")]
    assert all(80 <= len(text.split()) <= 250 for text in passages)
    assert {p.category for p in load_suite("chat:qa").prompts} == {"qa"}


@pytest.mark.parametrize("limit", [4, 12])
def test_a_limited_suite_takes_evenly_from_its_categories(limit):
    chosen = load_suite("chat", limit=limit).prompts
    counts = Counter(p.category for p in chosen)
    assert sum(counts.values()) == limit
    assert max(counts.values()) - min(counts.get(name, 0) for name in CATEGORIES) <= 1


@pytest.mark.parametrize(
    ("row", "prompt", "turns"),
    [
        ({"question": "2+2?", "answer": "2+2=4\n#### 4"}, "2+2?\nAnswer the above question.", ()),
        ({"instruction": "Add.", "input": "1, 2", "output": "3"}, "Instruction:\nAdd.", ("Add.\n\n1, 2",)),
        ({"prompt": "def f():", "canonical_solution": "", "test": "", "entry_point": "f"}, "def f():", None),
        ({"category": "writing", "turns": ["One.", "Two."], "question_id": 81}, "One.", ("One.", "Two.")),
        ({"prompt": "Say something.", "weight": 3}, "Say something.", ()),
    ],
)
def test_a_file_is_recognised_by_its_columns(tmp_path, row, prompt, turns):
    path = write(tmp_path / "mine.jsonl", [row])
    for spec in (path, f"mine={path}"):
        (found,) = load_suite(spec).prompts
        assert found.text.startswith(prompt)
        assert turns is None or found.turns == turns
    assert [suite.name for suite in open_suites(ProfileSettings(suite=[path]))] == ["mine"]


SPEED = {"question_id": "0" * 64, "category": "coding", "sub_category": "c", "source": "s", "src_id": "1"}
PUBLISHED = {  # a row with the published columns, and the prompt's id, first words, category and turns
    "MT-Bench": (
        {"question_id": 81, "category": "writing", "turns": ["One.", "Two."], "reference": ["a", "b"]},
        ("mt_bench/81", "One.", "writing", ("One.", "Two.")),
    ),
    "mt_bench": (  # the Hub's copy
        {"category": "math", "prompt": ["One.", "Two."], "prompt_id": 7, "reference": []},
        ("mt_bench/0", "One.", "math", ("One.", "Two.")),
    ),
    "spec-bench": (
        {"question_id": 321, "category": "rag", "turns": ["Where?"], "reference": [["Rome"]]},
        ("spec_bench/321", "Where?", "rag", ("Where?",)),
    ),
    "HumanEval": (
        {"task_id": "HumanEval/0", "prompt": "def f():", "canonical_solution": "", "test": "", "entry_point": "f"},
        ("humaneval/HumanEval/0", "def f():", "", ("Complete this Python function:\n```python\ndef f():\n```",)),
    ),
    "GSM8K": ({"question": "2+2?", "answer": "2+2=<<2+2=4>>4\n#### 4"}, ("gsm8k/0", "2+2?", "", ())),
    "MATH-500": (
        {"problem": "$1+1$?", "solution": "$2$", "answer": "2", "subject": "Algebra", "level": 1, "unique_id": "t/1"},
        ("math_500/t/1", "$1+1$?\nThink step by step, and put the final answer into \\boxed{}.", "Algebra", ()),
    ),
    "LiveCodeBench": (
        {"question_title": "A", "question_content": "Sum.", "platform": "leetcode", "question_id": "1", "contest_id": "w",
         "contest_date": "2024", "starter_code": "class S:", "difficulty": "easy", "metadata": "{}"},
        ("livecodebench/1", "Sum.\n\nWrite a Python program that completes this code:\n```python\nclass S:", "easy", ()),
    ),
    "nvidia/SPEED-Bench": (
        SPEED | {"turns": ["One.", "Two."], "difficulty": None, "multiturn": True},
        (f"speed_bench/{'0' * 64}", "One.", "coding", ("One.", "Two.")),
    ),
    "speed-bench": (  # what its own prepare.py writes
        SPEED | {"messages": [{"role": "user", "content": "One."}, {"role": "user", "content": "Two."}]},
        (f"speed_bench/{'0' * 64}", "One.", "coding", ("One.", "Two.")),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_suite_is_read_as_published(tmp_path, name):
    row, (key, text, category, turns) = PUBLISHED[name]
    path = write(tmp_path / "question.jsonl", [row])
    for spec in (path, f"{name}={path}"):
        (found,) = load_suite(spec).prompts
        assert (found.id, found.category, found.turns) == (key, category, turns)
        assert found.text.startswith(text)


def test_placeholders_of_speed_bench_are_left_out_and_counted(tmp_path):
    empty = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING SPECDEC_BENCH"
    rows = [SPEED | {"turns": [turn]} for turn in ("One.", empty, f"{empty}\n\nYou are {{role_name}}.")]
    suite = load_suite(f"speed-bench={write(tmp_path / 'some.jsonl', rows)}")
    assert [prompt.text for prompt in suite.prompts] == ["One."]
    assert suite.note.startswith("2 of 3 rows are left out, which hold a placeholder")
    with pytest.raises(UserError, match=r"no prompt: 2 of 2 rows .*--suite speed_bench=PATH"):
        load_suite(f"speed-bench={write(tmp_path / 'none.jsonl', rows[1:])}")


def test_a_configuration_of_the_hub_stands_after_the_name(hub, monkeypatch):
    hub("speed_bench", test=[SPEED | {"category": c, "turns": [c]} for c in ("low_entropy", "mixed")])
    asked = []
    monkeypatch.setattr(
        suites, "load_hub", lambda name, config, split: asked.append(config) or load_hub(name, None, split)
    )
    assert [p.category for p in load_suite("SPEED-Bench:throughput_1k").prompts] == ["low_entropy", "mixed"]
    assert [p.category for p in load_suite("speed_bench:mixed").prompts] == ["mixed"]
    assert asked == ["throughput_1k", None]


def test_a_file_of_unknown_columns_is_refused_with_what_is_known(tmp_path):
    path = write(tmp_path / "mine.jsonl", [{"id": 1, "query": "Who?"}])
    with pytest.raises(UserError, match=r"columns id, query are of no known data set.*rename.*--suite NAME=.*gsm8k"):
        load_suite(path)
    path = write(tmp_path / "near.jsonl", [{"question_content": "Sum.", "difficulty": "easy"}])
    with pytest.raises(UserError, match=r"nearest, livecodebench, has question_content, starter_code, difficulty"):
        load_suite(path)
    path = write(tmp_path / "question.jsonl", [{"question_id": 81, "category": "writing", "question": "One."}])
    with pytest.raises(UserError, match=r"column turns, prompt or messages; it has question_id, category, question"):
        load_suite(f"mt-bench={path}")
    with pytest.raises(UserError, match="there is no file"):
        load_suite("missing.jsonl")
    with pytest.raises(UserError, match="turns as a list of texts"):
        load_suite(f"prompts={write(tmp_path / 'turns.jsonl', [{'turns': 'One.'}])}")


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
        ("arithmetic:4", "arithmetic:1, :2 or :3"),
        ("open:2", "no option '2'"),
        ("gsm8k=missing.jsonl", "no file 'missing.jsonl'"),
        ("prompts", "--suite prompts=PATH"),
        ("spec-bench", "--suite spec_bench=PATH, a copy of data/spec_bench/question.jsonl"),
    ],
)
def test_a_wrong_spec_is_answered_with_the_next_step(spec, said):
    with pytest.raises(UserError, match=said):
        load_suite(spec)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("e.jsonl", "", "no rows"),
        ("b.jsonl", '{"question": "a"}\n{broken', "row 2"),
        ("b.parquet", "not parquet", "cannot be read"),
        ("b.xlsx", "?", "ends in '.xlsx'"),
        ("l.jsonl", "[1, 2]\n", "named columns"),
        ("c.jsonl", '{"q": "a", "answer": "b"}\n', "question is missing from q, answer"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_with_the_reason(tmp_path, name, content, said):
    (tmp_path / name).write_text(content, encoding="utf-8")
    with pytest.raises(UserError, match=said):
        load_suite(f"gsm8k={tmp_path / name}")


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
    suite = load_suite("gsm8k")
    assert [p.reference[:2] for p in suite.prompts] == ["15", "16", "17", "18", "19"]
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


def test_without_the_hub_the_error_names_the_local_alternative(offline):
    with pytest.raises(UserError, match=r"suite 'gsm8k'.*HF_HUB_OFFLINE.*--suite gsm8k=PATH"):
        load_suite("gsm8k")


@pytest.mark.parametrize(
    ("spec", "row"),
    [
        ("ultrachat", {"messages": [{"from": "human", "value": "Hi"}]}),
        ("mmlu", {"question": "?", "choices": list("abcde"), "answer": 1}),
    ],
)
def test_a_row_that_is_not_as_its_data_sets_is_a_mistake_that_is_told(tmp_path, spec, row):
    path = write(tmp_path / "mine.jsonl", [row])
    with pytest.raises(UserError, match=rf"the suite '{spec}=.* has rows that are not as those of {spec}"):
        load_suite(f"{spec}={path}")


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("5+5=10\n#### 10", "10"),
        ("The final answer is: $1,234.50.", "1234.5"),
        ("The final answer is:  -7\n\nWait, 8.", "-7"),
        ("#### 3 and then #### 4", "4"),
        ("It costs 12 dollars, or 13.", "13"),
        ("half: .5", "0.5"),
        ("no digits", None),
    ],
)
def test_the_final_number_is_found(text, number):
    found = final_number(text)
    assert found is None if number is None else found == final_number(number)


def test_numbers_are_compared_by_value():
    assert number_score("#### 3", "The final answer is: 3.00") == 1.0
    assert number_score("#### 3", "The final answer is: 30") == 0.0
    assert number_score("none", "none") == 0.0


@pytest.mark.parametrize(
    ("output", "score"),
    [(" B", 1), ("B. four", 1), ("(B)", 1), ("The answer is B", 1), ("A careful look: the answer is (B)", 1),
     ("The answer is a bee, so B", 1), ("The answer is b.", 1), ("Answer: b\nSince A", 1),
     (" C", 0), ("Because", 0), ("", 0)],
)  # fmt: skip
def test_the_chosen_letter_counts(output, score):
    assert letter_score(" B", output) == score


def test_rouge_agrees_with_values_worked_out_by_hand():
    assert rouge_score("The cat sat on the mat.", "the cat lay on a mat") == pytest.approx(4 / 6)
    assert rouge_score("b a", "a b") == pytest.approx(1 / 2)
    assert rouge_score("same words", "Same words!") == 1.0
    assert rouge_score("", "anything") == 0.0
