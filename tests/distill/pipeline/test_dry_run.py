"""``--dry-run`` and ``--estimate``: every kind in miniature, without network, and what a run will take."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from pairs import make_tokenizer
from rich.console import Console
from some_rows import prompts_of, write_rows
from tiny_run import bench, random_target, tiny_settings

from decode.commands.cli import parse
from decode.errors import UserError
from distill.config import DraftSettings, Settings
from distill.config.data import DataSettings
from distill.config.models import StudentSettings, TargetSettings, TrainingSettings
from distill.config.teacher import ResponseSettings
from distill.pipeline import show_example, with_formats
from distill.rehearse import PLAIN_CHAT, estimate, shrink
from distill.stages import run_stages

HEAD = str(Path(__file__).parents[3] / "configs" / "head.yaml")


@pytest.fixture(autouse=True)
def offline(monkeypatch) -> None:
    monkeypatch.setattr("socket.socket.connect", lambda *_: pytest.fail("the network was used"))


def test_models_from_the_hub_take_the_path_of_their_kind(tmp_path) -> None:
    once = TrainingSettings(epochs=1)
    settings = Settings(
        output_dir=str(tmp_path),
        target=TargetSettings(kind="lora", model="lmsys/vicuna-7b-v1.3@refs/pr/1", training=once),
        student=StudentSettings(kind="as_is", model="double7/vicuna-68m"),
        drafts={"longer": DraftSettings(training={"epochs": 3, "batch_size": 64})},
        training=once,
    )
    run = bench(shrink(settings, Console(quiet=True)))[0]
    assert run_stages(run) == ["target", "initial", "longer"]
    assert run.path("initial").is_symlink()
    assert run.record("target").history


@pytest.mark.parametrize("source", ["ultrachat", "target"])
def test_chats_are_rendered_by_the_template_of_a_local_target(source: str, tmp_path) -> None:
    settings = Settings(output_dir=str(tmp_path), data=DataSettings(source=source), training=TrainingSettings(steps=1))
    settings.target, settings.drafts = TargetSettings(kind="as_is", model="some/chat-model"), {"a": DraftSettings()}
    settings.student, settings.teacher.responses.source = StudentSettings(kind="eagle"), "target"
    assert shrink(settings, Console(quiet=True)).data.chat_template == PLAIN_CHAT
    tokenizer = make_tokenizer()
    tokenizer.chat_template = PLAIN_CHAT.replace("<", "[").replace(">", "]")
    settings.target = random_target(tmp_path / "target", tokenizer)
    small = shrink(settings, Console(quiet=True))
    corpus = bench(small)[0].corpus
    assert "[assistant]" in prompts_of(corpus, corpus.train)[0]


@pytest.mark.parametrize("kind", ["given", "prompts", "elsewhere"])
def test_files_of_chats_and_prompts_are_read_as_in_the_run(kind: str, tmp_path) -> None:
    settings, count = tiny_settings(tmp_path), 80 if kind == "prompts" else 400
    asked = [{"role": "user", "content": "Why is it seven?"}, {"role": "assistant", "content": "It is fine."}]
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
    more = {"tools": [tool]} if kind == "elsewhere" else {}  # which the template that stands for the model's writes
    asked[-1] |= {"reasoning_content": "Let me add."} if more else {}
    chats = (json.dumps({"messages": asked} | more).replace("seven", str(number)) for number in range(count))
    (tmp_path / "chats.jsonl").write_text("\n".join(chats))
    tokenizer = make_tokenizer(chat=True)
    settings.target = random_target(tmp_path / "target", tokenizer)
    settings.data.source = str(tmp_path / "chats.jsonl")
    if kind == "prompts":
        settings.teacher.responses.source = settings.data.source = "target"
        settings.data.prompts.file = str(tmp_path / "chats.jsonl")
    if kind == "elsewhere":
        settings.target.model = "some/chat-model"
    corpus = bench(shrink(settings, Console(quiet=True)))[0].corpus
    assert (len(corpus.train), corpus.chat, corpus.answered) == (48, True, kind != "prompts")
    own = ["Why is it" in prompt for prompt in prompts_of(corpus, corpus.train, corpus.validation, corpus.test)]
    assert all(own)
    assert (tokenizer.get_vocab() == corpus.tokenizer.get_vocab()) == (kind != "elsewhere")


def test_layers_that_the_target_does_not_have_are_refused_before_it_writes_prompts(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("distill.data.writing.write_texts", lambda *_, **__: pytest.fail("a text was written"))
    settings = tiny_settings(tmp_path, target=random_target(tmp_path / "given", make_tokenizer(chat=True)))
    settings.data, settings.teacher.responses.source = DataSettings(source="target", max_length=128), "target"
    settings.student = StudentSettings(kind="cut", layers=[0, 9])
    with pytest.raises(UserError, match=r"student\.layers"):
        run_stages(bench(settings)[0])


def test_what_is_here_is_checked_as_in_the_run(tmp_path) -> None:
    with pytest.raises(UserError, match="no such file or folder"):
        shrink(tiny_settings(tmp_path, data=DataSettings(source="nothere.jsonl")))
    tokenizer, settings = make_tokenizer(), tiny_settings(tmp_path)
    settings.target = random_target(tmp_path / "target", tokenizer)
    settings.student = StudentSettings(kind="eagle3", model=str(tmp_path / "nothere"))
    with pytest.raises(UserError, match=r"there is no folder '.*nothere'"):
        shrink(settings, Console(quiet=True))


def test_every_part_is_estimated_in_a_folder_that_is_removed(tmp_path) -> None:
    settings = tiny_settings(tmp_path)
    settings.evaluation.temperatures = [0.0]
    settings.teacher.responses.source, settings.teacher.responses.max_new_tokens = "target", 4
    console = Console(record=True, width=120)
    parts = estimate(settings, console)
    assert list(parts) == ["the data", "target", "answers", "initial", "distillspec", "adaspec"]
    assert all(seconds > 0 for seconds, _ in parts.values())
    assert parts["distillspec"][1] == pytest.approx(12 * 4 * parts["answers"][1] / 20, rel=0.5)  # padding is counted
    printed = console.export_text()
    assert "total" in printed
    assert re.search(
        r"disk: 0\.\d\d GB, of \d+ GB that are free: texts 0\.\d\d, signals \(hidden\) at most \d",
        printed.replace("\n", " "),
    )
    assert [path.name for path in (tmp_path / "tiny").iterdir()] == ["work"]
    assert [path.name for path in (tmp_path / "tiny/work").iterdir()] == ["corpus"]


def test_no_more_prompts_than_a_batch_are_written(tmp_path, monkeypatch) -> None:
    tokenizer, written = make_tokenizer(chat=True), []

    def sample(model: Any, asked: list[list[int]], *_: Any, **__: Any) -> list[list[int]]:
        written.append(len(asked))
        texts = (f"What is {sum(written)} plus {number}?" for number in range(len(asked)))
        return [[*tokenizer.encode(text), 0] for text in texts]

    monkeypatch.setattr("distill.data.writing.write_texts", sample)
    settings = tiny_settings(tmp_path, target=random_target(tmp_path / "given", tokenizer), evaluation=False)
    settings.data = DataSettings(source="target", train_examples=1000, max_length=128)
    settings.teacher.responses = ResponseSettings(source="target", max_new_tokens=4)
    settings.student.architecture.hidden_size = 8
    del settings.drafts["adaspec"]
    show_example(settings, console := Console(record=True, width=120))
    assert "0 of them learned" not in console.export_text()
    assert written == [8, 1, 1]  # prompts, and the answers of two splits
    assert list(estimate(settings, console)) == ["the data", "answers", "initial", "distillspec"]
    assert max(written) == 64


def test_the_recipe_for_ones_own_model_and_file_takes_another_kind_of_head(tmp_path) -> None:
    target = random_target(tmp_path / "own", make_tokenizer(chat=True)).model
    turns = ([{"from": "human", "value": f"Why {n}?"}, {"from": "gpt", "value": f"It is {n}."}] for n in range(200))
    chats = write_rows(tmp_path / "chats.jsonl", [{"conversations": turn} for turn in turns])
    argv = ["--config", HEAD, "--data.source", chats, f"--target.model={target}"]
    argv += ["--student.kind", "dspark", "--output-dir", str(tmp_path)]
    argv += ["--trainer.precision", "bf16-mixed", "--target.dtype", "bfloat16"]  # what auto is where it is fast
    settings = parse(Settings, argv, foreign={"bench"})
    run = bench(with_formats(shrink(settings, Console(quiet=True))))[0]
    assert run_stages(run) == ["target", "initial", "kl-tv"]
