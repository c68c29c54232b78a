"""Responses written by the target: the right ones, masked rightly, kept line by line, the same again after a kill."""

import json
import shutil
from itertools import pairwise
from pathlib import Path

import pytest
from tiny_run import bench, run_tiny, tiny_settings
from transformers import PreTrainedTokenizerBase

from distill import ranks
from distill.config.drafts import ResponseSettings
from distill.data.chat import IGNORE, until_end
from distill.data.response_file import ResponseFile
from distill.data.tokenizer import train_tokenizer
from distill.responses import texts as response_texts
from distill.responses.texts import answered_by_target
from distill.run_stages import run_stages


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return train_tokenizer(["Mia has 3 pens and 4 more pens"] * 2, 280)


# -- labels -----------------------------------------------------------------------------------------------------------


def test_nothing_after_the_first_end_token_is_learned_whichever_of_several_it_is() -> None:
    assert until_end([4, 5, 1, 6, 1], {1}) == [4, 5, 1, IGNORE, IGNORE]
    assert until_end([4, 3, 5, 1], {1, 3}) == [4, 3, IGNORE, IGNORE]
    assert until_end([4, 5], {1}) == [4, 5]  # cut by the budget: no end is learned


# -- the file ---------------------------------------------------------------------------------------------------------


def test_a_kill_costs_the_line_being_written_and_an_altered_line_is_written_again(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    path = tmp_path / "train.jsonl"
    file = ResponseFile(path, {"a": 1})
    file.open()
    writing = file.fill(((number, [number, 1]) for number in range(5)), tokenizer)
    for _ in range(3):
        next(writing)
    lines = path.read_bytes().splitlines(keepends=True)
    assert len(lines) == 3  # written at once, not when all are done
    altered = json.loads(lines[1])
    altered["ids"][0] += 1
    path.write_bytes(lines[0] + json.dumps(altered).encode() + b"\n" + lines[2][:-1])
    file = ResponseFile(path, {"a": 1})
    file.open()
    assert list(file.found) == [0]
    assert path.read_bytes().splitlines(keepends=True)[:1] == lines[:1]
    again = file.fill(((number, [number, 1]) for number in range(5)), tokenizer)  # whole batches are answered again
    assert [example for example, _ in again] == [1, 2, 3, 4]
    assert len(ResponseFile(path, {"a": 1}).read()) == 5
    assert not ResponseFile(path, {"a": 2}).read()
    other = ResponseFile(path, {"a": 2})
    other.open()  # made from something else: set aside
    assert not other.found
    assert not path.exists()
    assert path.with_suffix(".old.jsonl").exists()


def test_texts_that_another_run_made_from_the_same_are_taken_over(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    first, second = (tmp_path / run / "work" / "responses" / "train.jsonl" for run in ("first", "second"))
    for run, made_from in (("first", {"a": 1}), ("other", {"a": 2})):
        file = ResponseFile(tmp_path / run / "work" / "responses" / "train.jsonl", made_from)
        file.open()
        assert list(file.fill([(0, [7, run == "first"])], tokenizer))
    file = ResponseFile(second, {"a": 1})
    file.open()
    assert file.found == {0: [7, True]}
    assert list(file.fill([(0, [7, 1]), (1, [8])], tokenizer)) == [(1, [8])]
    assert len(ResponseFile(first, {"a": 1}).read()) == 1  # the other run's file is not written to


# -- a whole run ------------------------------------------------------------------------------------------------------


def test_the_draft_learns_from_what_the_target_wrote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(response_texts, "GROUP", 1)
    settings = tiny_settings(tmp_path)
    settings.teacher.responses = ResponseSettings(source="target", max_new_tokens=10, batch_size=8)
    ran, run, printed = run_tiny(settings)
    assert ran == ["target", "initial", "distillspec", "adaspec"]
    assert "the target's responses, train: 20, 20 of them written now" in printed
    lines = [json.loads(line) for line in (run.work / "responses/train.jsonl").read_text().splitlines()]
    assert sorted(line["example"] for line in lines) == list(range(20))
    manifest = json.loads((run.work / "responses/train.json").read_text())
    assert manifest["responses"]["temperature"] == 1.0
    account = run.record("distillspec").account  # type: ignore[union-attr]
    assert account["teacher_tokens"] <= 12 * 4 * 10
    before = (run.work / "responses/train.jsonl").read_bytes()
    (run.work / "responses/train.jsonl").write_bytes(before[:-20])  # the last line is torn
    settings.drafts[1].k = 0.5  # another draft of the same texts
    _, _, printed = run_tiny(settings)
    assert "train: 20, 1 of them written now" in printed
    after = (run.work / "responses/train.jsonl").read_bytes()
    assert sorted(after.splitlines()) == sorted(before.splitlines())


def test_several_processes_write_what_one_does_each_its_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(response_texts, "GROUP", 1)
    settings = tiny_settings(tmp_path)
    settings.teacher.responses = ResponseSettings(source="target", max_new_tokens=4, batch_size=8)
    run_stages(bench(settings)[0], only=("target",))

    def rows() -> list[list[int]]:
        made, _ = answered_by_target(bench(settings)[0])
        return [made.ids[a:b].tolist() for a, b in pairwise(made.offsets)]

    whole = rows()
    folder = tmp_path / "tiny" / "work" / "responses"
    once = {line for path in folder.glob("*.jsonl") for line in path.read_text().splitlines()}
    shutil.rmtree(folder)
    monkeypatch.setattr(ranks, "started", lambda: 2)
    with monkeypatch.context() as second:
        second.setattr(ranks, "rank", lambda: 1)
        second.setattr(ranks, "wait_for", lambda *_: pytest.fail("process 0 has yet to write"))
        with pytest.raises(pytest.fail.Exception):
            rows()
    assert rows() == whole
    assert len((folder / "train-1.jsonl").read_text().splitlines()) == 8  # the second of the groups of 8, 8 and 4
    assert {line for path in folder.glob("*.jsonl") for line in path.read_text().splitlines()} == once
