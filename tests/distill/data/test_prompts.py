"""Prompts that the target writes: the user's turn of a template, the filter's rules, splits, seeds, kills, errors."""

import io
import json
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import pytest
from some_rows import prompts_of, write_rows
from tiny_run import Killed, bench, random_target, tiny_settings
from tokenizers_of_kinds import with_start

from decode.errors import UserError
from decode.incoming import UnusableRow
from distill.config.data import DataSettings, PromptSettings
from distill.config.teacher import ResponseSettings
from distill.data import prompts as prompts_module
from distill.data import writing
from distill.data.chat import ChatFormat
from distill.data.prompts import ORDER, Sample, problem_of, prompt_of, prompt_rows, user_turn
from distill.responses.target import answered_texts
from distill.run import Run
from distill.stages import run_stages

CHAT_ML = (
    "{% if messages[0].role != 'system' %}<s>system\nBe kind.</s>\n{% endif %}"
    "{% for m in messages %}<s>{{ m.role }}\n{{ m.content }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)


def chat(template: str | None, **options: str) -> ChatFormat:
    tokenizer = with_start(adds=False)
    tokenizer.chat_template = template
    return ChatFormat(tokenizer, **options)


def test_the_users_turn_is_what_the_template_writes_before_the_words() -> None:
    text, ends, markers = user_turn(chat(CHAT_ML))
    assert (text, ends) == ("<s>system\nBe kind.</s>\n<s>user\n", {0})
    assert "<s>user" in markers
    assert "Be short." in user_turn(chat(CHAT_ML, system="Be short."))[0]
    for template, told in ((None, "no chat template"), ("{{ messages[0].content }}", "writes no user's turn")):
        with pytest.raises(UserError, match=rf"{told}.*teacher.responses.source target"):
            user_turn(chat(template))


# -- the filter -------------------------------------------------------------------------------------------------------

GOOD = "Can you explain how rain is made in the clouds above the sea?"
OTHERS = [
    "Расскажи мне о погоде в Москве", "请告诉我北京的天气", "天気はどうですか？", "12345 + 67890 = ?",
    "मुझे दिल्ली की बारिश के बारे में बताओ", "मुझे दिल्ली की बारिश के गीत सुनाओ",
]  # fmt: skip

HALF = {"question": "What is \ud83d?"}


@pytest.mark.parametrize(
    ("text", "tokens", "ended", "reason"),
    [
        (GOOD, 160, False, "unfinished after 160 tokens"),
        ("Hi", 1, True, "shorter than 4 tokens"),
        ("What is this \ufffd sign for?", 9, True, "broken characters"),
        ("What is <|im_start|>user for?", 9, True, "template markers inside"),
        ("can you explain, how rain is made in the clouds above the sea", 9, True, "repeated"),
        ("Can you explain how rain is made in the clouds? Be brief", 9, True, "repeated"),
        *((text, 9, True, "repeated") for text in OTHERS),
    ],
)
def test_each_rule_drops_what_it_is_for_in_any_language(text: str, tokens: int, ended: bool, reason: str) -> None:
    few = settings()
    few.train_examples = few.validation_examples = 1
    few.test_examples = len(OTHERS) + 1
    good = [Sample(good, problem_of(good, 9, True)) for good in (GOOD, *OTHERS)]
    bad = Sample(text, problem_of(text, tokens, ended, {"<|im_start|>"}))
    splits, notes = prompt_rows(few, 0, iter([*good, bad, Sample("And then?"), Sample("Who?")]))
    assert texts(splits["test"]) == [GOOD, *OTHERS]
    assert notes[0].endswith(f"dropped: 1 {reason}")
    assert problem_of("写一首诗", 2, True) == ""  # a whole question in two tokens


def test_what_is_dropped_is_named_after_the_first_batch_with_the_setting(monkeypatch) -> None:
    monkeypatch.setattr(prompts_module, "BATCH", 9)
    said: list[str] = []
    prompt_rows(settings(), 0, samples(), said.append)
    assert len(said) == 1
    assert said[0].startswith("3 repeated of the first 9 prompts of the target are dropped (data.prompts.openings")


def samples() -> Iterator[Sample]:
    """Every third repeats the one before it."""
    numbers = (number - (number % 3 == 2) for number in count())
    texts = (f" Tell me all about topic{n} and topic{n}s friend topic{n}a\n" for n in numbers)
    return map(Sample, texts)


def settings(**changes: Any) -> DataSettings:
    prompts = PromptSettings(**changes)
    return DataSettings(source="target", train_examples=12, validation_examples=3, test_examples=4, prompts=prompts)


def texts(rows: Any) -> list[str]:
    return [json.loads(row["messages"])[-1]["content"] for row in rows]


def test_splits_have_as_many_prompts_as_asked_for_none_twice_and_more_training_leaves_the_others() -> None:
    splits, notes = prompt_rows(settings(), 0, samples())
    assert [len(splits[split]) for split in ORDER] == [4, 3, 12]
    assert len({text for split in ORDER for text in texts(splits[split])}) == 19
    assert notes == ["prompts of the target: 28 written, 68% kept; dropped: 9 repeated"]
    more = settings()
    more.train_examples = 30
    grown = prompt_rows(more, 0, samples())[0]
    assert all(texts(grown[split])[: len(splits[split])] == texts(splits[split]) for split in ORDER)


def test_each_split_has_its_share_of_a_files_prompts_and_the_target_writes_the_rest(tmp_path) -> None:
    mine = [{"question": f"What would you do with {i} kinds of wood number {i * i}?"} for i in range(5, 14)]
    rows = [*mine, mine[3], {"other": 1}, HALF, {"question": "Tell me all about topic0 and topic0s friend topic0a!"}]
    path = write_rows(tmp_path / "mine.jsonl", rows)
    splits, notes = prompt_rows(settings(file=path), 0, samples())
    assert [len(splits[split]) for split in ORDER] == [4, 3, 12]
    of_file = [sum("wood" in text or text.endswith("!") for text in texts(splits[split])) for split in ORDER]
    assert of_file == [2, 2, 6]
    assert sum("topic0 " in text for split in ORDER for text in texts(splits[split])) <= 1
    told = "1 row without a prompt dropped (row 11)", "1 row with a lone surrogate dropped (row 12)"
    assert notes[:3] == [f"data.prompts.file: {note}" for note in (*told, "10 used, 1 dropped as repetitions")]
    few = settings(file=path)
    few.train_examples, few.validation_examples, few.test_examples = 4, 2, 2
    alone, other = (prompt_rows(few, seed, None)[0] for seed in (0, 1))
    assert [len(alone[split]) for split in ORDER] == [2, 2, 4]
    assert texts(other["train"]) != texts(alone["train"])
    with pytest.raises(UserError, match=r"no target is named: give target\.model"):
        prompt_rows(settings(file=path), 0, None)


@pytest.mark.parametrize(
    ("row", "prompt"),
    [
        ({"instruction": "Add.", "input": "1 2", "output": "3"}, "Add.\n\n1 2"),
        ({"question": "Why? "}, "Why?"),
        ({"conversations": [{"from": "human", "value": "Why?"}]}, "Why?"),
        ({"turns": ["Why?", "And then?"]}, "Why?"),
        ({"messages": [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}]}, "Why?"),
        ({"messages": [{"role": "assistant", "content": "So."}]}, None),
        ({"text": "Why?"}, "Why?"),
        ({"question": "Why?", "context": "Rain."}, None),
    ],
)
def test_rows_of_the_usual_shapes_hold_a_prompt(row: dict[str, object], prompt: str | None) -> None:
    if prompt is None:
        with pytest.raises(UnusableRow):
            prompt_of(row)
    else:
        assert json.loads(prompt_of(row)["messages"])[-1]["content"] == prompt


def test_an_opening_belongs_to_the_prompt_and_makes_no_two_of_them_alike() -> None:
    opening = "Please answer the following question in ten words or in even fewer of them: Where"
    made = (Sample(f" is the {i} of {i * i}?", "", opening) for i in count())
    splits, _ = prompt_rows(settings(), 0, made)
    assert texts(splits["test"])[1] == f"{opening} is the 1 of 1?"
    assert [PromptSettings(openings=["a", "b"]).opening(number) for number in range(5)] == ["", "a", "", "b", ""]


@pytest.fixture
def run_of_target(tmp_path, monkeypatch) -> Callable[..., Any]:
    """Runs whose target, a random model over characters, writes prompts."""
    for name, value in {"SHORTEST": 2, "LONGEST": 60, "BATCH": 8, "TRIES": 60, "GROUP": 1}.items():
        monkeypatch.setattr(prompts_module, name, value)
    target = random_target(tmp_path / "model", chat(CHAT_ML).tokenizer)

    def made(name: str, **changes: Any) -> tuple[Run, io.StringIO]:
        run = tiny_settings(tmp_path, target=target, name=name, data=settings(), **changes)
        run.data.train_examples, run.data.validation_examples, run.data.max_length = 9, 3, 128
        run.teacher.responses = ResponseSettings(source="target", max_new_tokens=12)
        run.teacher.examples, run.training.steps, run.student.training.steps = None, 3, 3
        return bench(run)

    return made


def test_the_same_seed_gives_the_same_prompts_a_killed_run_goes_on_with_them_and_a_student_trains_on_their_answers(
    run_of_target, monkeypatch
) -> None:
    run, said = run_of_target("first")
    corpus = run.corpus
    assert [len(corpus.train), len(corpus.validation), len(corpus.test)] == [9, 3, 4]
    assert not corpus.answered
    assert "prompts of the target:" in said.getvalue()
    prompts = {*prompts_of(corpus, corpus.train, corpus.validation, corpus.test)}
    assert len(prompts) == 16
    assert all(prompt.startswith("<s>system\nBe kind.") and prompt.endswith("<s>assistant\n") for prompt in prompts)
    calls = []

    def dying(*args: Any, write: Any = writing.write_texts, **options: Any) -> list[list[int]]:
        calls.append(1)
        if len(calls) == 2:
            raise Killed
        return write(*args, **options)

    second, _ = run_of_target("second")
    with monkeypatch.context() as patch:
        patch.setattr(writing, "write_texts", dying)
        with pytest.raises(Killed):
            _ = second.corpus
    files = sorted((second.work / "prompts").rglob("*.safetensors"))
    assert len(files) == 1
    before = files[0].stat().st_mtime_ns
    assert run_of_target("second")[0].corpus.fingerprint == corpus.fingerprint
    assert files[0].stat().st_mtime_ns == before
    ours, theirs = (
        sorted(path.read_bytes() for path in (r.work / "prompts").rglob("*.safetensors")) for r in (run, second)
    )
    assert ours == theirs
    third = run_of_target("third", seed=1)[0].corpus
    assert len({*prompts_of(third, third.train)} - prompts) > 6
    run.settings.validate()
    assert run_stages(run, ("target", "initial")) == ["target", "initial"]
    train, validation, _ = answered_texts(run)
    assert (len(train), len(validation)) == (9, 3)
    assert "the target's responses, train: 9 (9 new)" in said.getvalue()
