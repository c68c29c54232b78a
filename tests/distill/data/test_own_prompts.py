"""Prompts that the target writes: the user's turn of a template, the filter's rules, splits, seeds, kills, errors."""

import io
import json
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import pytest
from rich.console import Console
from tiny_run import tiny_settings
from tokenizers_of_kinds import with_start
from transformers import PreTrainedModel

from decode.errors import UserError
from distill.config.data import DataSettings, PromptSettings
from distill.config.run import Settings
from distill.config.training import TargetSettings
from distill.data import own_prompts as sampler_module
from distill.data.chat import ChatFormat
from distill.data.context import StageContext
from distill.data.own_prompts import ORDER, PromptFilter, Sample, prompt_of, prompt_rows, user_turn
from distill.responses.texts import answered_by_target
from distill.run_stages import run_stages
from distill.stages import RunDir, run_of

Tiny = Callable[..., PreTrainedModel]
CHAT_ML = (
    "{% if messages[0].role != 'system' %}<s>system\nBe kind.</s>\n{% endif %}"
    "{% for m in messages %}<s>{{ m.role }}\n{{ m.content }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)


def chat(template: str, **options: str) -> ChatFormat:
    tokenizer = with_start(adds=False)
    tokenizer.chat_template = template
    return ChatFormat(tokenizer, **options)


# -- the user's turn --------------------------------------------------------------------------------------------------


def test_the_users_turn_is_what_the_template_writes_before_the_words() -> None:
    one = chat(CHAT_ML)
    turn = user_turn(one)
    assert one.tokenizer.decode(turn.before) == one.tokenizer.decode(
        one.tokenizer("<s>system\nBe kind.</s>\n<s>user\n", add_special_tokens=False)["input_ids"]
    )
    assert turn.ends == {0}
    assert "<s>user" in turn.markers
    other = user_turn(chat(CHAT_ML, system="Be short."))
    assert "Be short." in one.tokenizer.decode(other.before)


@pytest.mark.parametrize(
    ("template", "told"),
    [
        (None, "no chat template"),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", "writes no user's turn"),
        ("{{ raise_exception('never') }}", "refuses"),
    ],
)
def test_a_template_without_a_users_turn_is_refused_with_the_next_step(template: str | None, told: str) -> None:
    with pytest.raises(UserError, match=told) as error:
        user_turn(chat(template))  # type: ignore[arg-type]
    assert "teacher.responses.source target" in str(error.value)


# -- the filter -------------------------------------------------------------------------------------------------------

GOOD = "Can you explain how rain is made in the clouds above the sea?"


@pytest.mark.parametrize(
    ("text", "tokens", "ended", "reason"),
    [
        (GOOD, 160, False, "unfinished after 160 tokens"),
        ("Hi", 1, True, "shorter than 4 tokens"),
        ("  \n  ", 9, True, "shorter than 4 tokens"),
        ("What is this \ufffd sign for?", 9, True, "broken characters"),
        ("What is <|im_start|>user for?", 9, True, "template markers inside"),
        ("Расскажи мне о погоде в Москве", 9, True, "less than 90% ASCII letters"),
        ("12345 + 67890 = ?", 9, True, "less than 90% ASCII letters"),
        ("can you explain, how rain is made in the clouds above the sea", 9, True, "repeated"),
        ("Can you explain how rain is made in the clouds? Be brief", 9, True, "nearly repeated"),
        ("Please, can you explain how rain is made in the clouds above a hill?", 9, True, "nearly repeated"),
    ],
)
def test_each_rule_drops_what_it_is_for(text: str, tokens: int, ended: bool, reason: str) -> None:
    kept = PromptFilter(PromptSettings(), {"<|im_start|>"})
    assert kept.is_usable(Sample(GOOD, 14, True))
    assert not kept.is_usable(Sample(text, tokens, ended))
    assert dict(kept.dropped) == {reason: 1}


# -- rows -------------------------------------------------------------------------------------------------------------


def samples() -> Iterator[Sample]:
    """Every third repeats the one before it."""
    for number in count():
        topic = f"topic{number - (number % 3 == 2)}"
        yield Sample(f" Tell me all about {topic} and {topic}s friend {topic}a\n", 12, True)


def settings(**changes: object) -> DataSettings:
    prompts = PromptSettings(**changes)  # type: ignore[arg-type]
    return DataSettings(source="target", train_examples=12, validation_examples=3, test_examples=4, prompts=prompts)


def texts(rows: list[dict[str, object]]) -> list[str]:
    return [row["messages"][-1]["content"] for row in rows]  # type: ignore[index]


def test_splits_have_as_many_prompts_as_asked_for_none_twice_and_more_training_leaves_the_others() -> None:
    splits, notes = prompt_rows(settings(), 0, samples())
    assert [len(splits[split]) for split in ORDER] == [4, 3, 12]
    everything = [text for split in ORDER for text in texts(splits[split])]
    assert len(set(everything)) == 19
    assert notes == ["prompts of the target: 28 written, 19 kept (68%); dropped: 9 repeated"]
    more = settings()
    more.train_examples = 30
    grown = prompt_rows(more, 0, samples())[0]
    assert all(grown[split][: len(splits[split])] == splits[split] for split in ORDER)


def test_prompts_of_a_file_are_mixed_in_and_none_is_near_a_written_one(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    own = [{"question": f"What would you do with {i} kinds of wood number {i * i}?"} for i in range(5, 15)]
    rows = [*own, own[3], {"other": 1}, {"question": "Tell me all about topic0 and topic0s friend topic0a!"}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    splits, notes = prompt_rows(settings(file=str(path), file_share=0.5), 0, samples())
    assert [len(splits[split]) for split in ORDER] == [4, 3, 12]
    everything = [text for split in ORDER for text in texts(splits[split])]
    assert sum("wood" in text or text.endswith("!") for text in everything) == 2 + 2 + 6
    assert sum("topic0 " in text for text in everything) <= 1
    assert notes[0].startswith(f"prompts from {path}: 10 used")
    alone, _ = prompt_rows(settings(file=str(path), file_share=1), 0, None)
    assert [len(alone[split]) for split in ORDER] == [4, 3, 4]
    assert prompt_rows(settings(file=str(path), file_share=1), 0, None)[0] == alone
    assert prompt_rows(settings(file=str(path), file_share=1), 1, None)[0] != alone


@pytest.mark.parametrize(
    ("row", "prompt"),
    [
        ({"instruction": "Add.", "input": "1 2", "output": "3"}, "Add.\n\n1 2"),
        ({"instruction": "Add 1 and 2.", "input": ""}, "Add 1 and 2."),
        ({"question": "Why? "}, "Why?"),
        ({"prompt": "Why?"}, "Why?"),
        ({"turns": ["Why?", "And then?"]}, "Why?"),
        ({"messages": [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}]}, "Why?"),
        ({"conversations": [{"from": "human", "value": "Why?"}]}, "Why?"),
        ({"messages": [{"role": "assistant", "content": "So."}]}, None),
        ({"messages": "Why?"}, None),
        ({"prompt": "  "}, None),
        ({"text": "Why?"}, None),
    ],
)
def test_rows_of_the_usual_shapes_hold_a_prompt(row: dict[str, object], prompt: str | None) -> None:
    found = prompt_of(row)
    assert (None if found is None else found[-1]["content"]) == prompt


def test_an_opening_belongs_to_the_prompt_and_makes_no_two_of_them_alike() -> None:
    opening = "Please answer the following question in ten words or in even fewer of them: Where"
    made = (Sample(f" is the {i} of {i * i}?", 9, True, opening) for i in count())
    splits, notes = prompt_rows(settings(), 0, made)
    assert texts(splits["test"])[1] == f"{opening} is the 1 of 1?"
    assert notes == ["prompts of the target: 19 written, 19 kept (100%); dropped: none"]


# -- a real, tiny target ----------------------------------------------------------------------------------------------

LOOSE = {"max_tokens": 60, "batch_size": 8}


@pytest.fixture(autouse=True)
def loose_rules(request: pytest.FixtureRequest) -> Iterator[None]:
    """A random model writes no English."""
    with pytest.MonkeyPatch.context() as patch:
        if "tiny" in request.fixturenames:
            for name, value in {"MIN_TOKENS": 2, "ASCII_LETTERS": 0.0, "TRIES": 60}.items():
                patch.setattr(sampler_module, name, value)
        yield


def own_run(folder: Path, tiny: Tiny, **changes: object) -> Settings:
    """A run whose target, a random model over characters, writes prompts."""
    tokenizer = with_start(adds=False)
    tokenizer.chat_template = CHAT_ML
    model = folder / "model"
    tiny("llama", vocab_size=len(tokenizer), max_position_embeddings=256, eos_token_id=0).save_pretrained(model)
    tokenizer.save_pretrained(model)
    made = tiny_settings(folder, target=TargetSettings(kind="as_is", model=str(model)))
    made.data = DataSettings(
        source="target", train_examples=16, validation_examples=8, test_examples=4, max_length=128,
        prompts=PromptSettings(**(LOOSE | changes)),  # type: ignore[arg-type]
    )  # fmt: skip
    made.teacher.responses.source = "target"
    made.teacher.responses.max_new_tokens = 12
    made.teacher.examples = None
    return made


def context(settings: Settings, run: str = "tiny") -> tuple[StageContext, io.StringIO]:
    settings.name = run
    text = io.StringIO()
    return StageContext(settings, run_of(settings), Console(file=text, width=200)), text


def test_the_same_seed_gives_the_same_prompts_and_a_killed_run_goes_on_with_them(
    tmp_path: Path, tiny: Tiny, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    groups = pytest.MonkeyPatch()
    groups.setattr(sampler_module, "GROUP", 1)
    request.addfinalizer(groups.undo)
    made = own_run(tmp_path, tiny)
    first, said = context(made, "first")
    whole = first.corpus
    assert [len(whole.train), len(whole.validation), len(whole.test)] == [16, 8, 4]
    assert not whole.answered
    assert "prompts of the target:" in said.getvalue()
    assert "tokens/s" in said.getvalue()
    prompts = [*whole.train["prompt"], *whole.validation["prompt"], *whole.test["prompt"]]
    assert len(set(prompts)) == 28
    assert all(prompt.startswith("<s>system\nBe kind.") and prompt.endswith("<s>assistant\n") for prompt in prompts)

    class Killed(Exception):
        pass

    write, calls = sampler_module.write_texts, []

    def dying(*args: object, **options: object) -> list[list[int]]:
        calls.append(1)
        if len(calls) == 2:
            raise Killed
        return write(*args, **options)  # type: ignore[arg-type]

    made.output_dir = str(tmp_path / "elsewhere")  # where no run has written these prompts yet
    second, _ = context(made, "second")
    monkeypatch.setattr(sampler_module, "write_texts", dying)
    with pytest.raises(Killed):
        _ = second.corpus
    monkeypatch.undo()
    file = second.run.work / "prompts" / "samples.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    assert len(lines) == 8
    file.write_bytes(b"".join(lines[:-1]) + lines[-1][:-9])  # the last line is torn
    assert context(made, "second")[0].corpus.fingerprint == whole.fingerprint
    assert file.read_bytes() == (first.run.work / "prompts" / "samples.jsonl").read_bytes()

    monkeypatch.setattr(sampler_module, "write_texts", lambda *_, **__: pytest.fail("they are on disk"))
    assert context(made, "second")[0].corpus.fingerprint == whole.fingerprint
    monkeypatch.undo()
    made.seed = 1
    assert len(set(context(made, "third")[0].corpus.train["prompt"]) - set(prompts)) > 12


def test_a_run_on_prompts_of_the_target_trains_every_stage_on_its_answers(tmp_path: Path, tiny: Tiny) -> None:
    made = own_run(tmp_path, tiny)
    made.validate()
    made.training.steps = made.student.training.steps = 2
    one, said = context(made)
    assert run_stages(one) == ["target", "initial", "distillspec", "adaspec"]
    train, validation = answered_by_target(one)
    assert len(train) == 16
    assert train.label_count > 16
    assert validation.label_count > 8
    assert "the target's responses, train: 16, 16 of them written now" in said.getvalue()
    assert isinstance(one.run, RunDir)
