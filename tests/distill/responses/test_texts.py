"""Responses written by the target: the right ones, masked rightly, kept line by line, the same again after a kill."""

import json
import shutil
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import pytest
from tiny_run import bench, run_tiny, tiny_settings
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from distill import ranks
from distill.config.drafts import ResponseSettings
from distill.data.chat import IGNORE, until_end
from distill.data.response_file import Response, ResponseFile
from distill.data.tokenizer import train_tokenizer
from distill.responses import texts as response_texts
from distill.responses.server import Job
from distill.responses.texts import answered_by_target, answered_here
from distill.run_stages import run_stages

Tiny = Callable[..., PreTrainedModel]
PROMPTS = [[5, 9, 3], [7], [2, 11, 13, 17, 19, 23, 4, 8], [30, 31]]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return train_tokenizer(["Mia has 3 pens and 4 more pens"] * 2, 280)


# -- labels -----------------------------------------------------------------------------------------------------------


def test_nothing_after_the_first_end_token_is_learned_whichever_of_several_it_is() -> None:
    assert until_end([4, 5, 1, 6, 1], {1}) == [4, 5, 1, IGNORE, IGNORE]
    assert until_end([4, 3, 5, 1], {1, 3}) == [4, 3, IGNORE, IGNORE]
    assert until_end([4, 5], {1}) == [4, 5]  # cut by the budget: no end is learned


# -- the file ---------------------------------------------------------------------------------------------------------


JOBS = [Job(i, [5, 6 + i], "", 4) for i in range(5)]
EVERY = range(5)


def plain(jobs: Sequence[Job], missing: Collection[int]) -> Iterator[Response]:
    return ((job.example, [job.example, 1]) for job in jobs if job.example in missing)


def test_a_kill_costs_the_line_being_written_and_an_altered_line_is_written_again(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    path = tmp_path / "train.jsonl"
    file = ResponseFile(path, {"a": 1})
    file.open()
    writing = file.fill(plain(JOBS, EVERY), tokenizer)
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
    again = file.fill(plain(JOBS, EVERY), tokenizer)  # whole batches are answered again
    assert [example for example, _ in again] == [1, 2, 3, 4]
    assert len(ResponseFile(path, {"a": 1}).read()) == 5
    assert not ResponseFile(path, {"a": 2}).read()
    other = ResponseFile(path, {"a": 2})
    other.open()  # made from something else: set aside
    assert not other.found
    assert not path.exists()
    assert path.with_suffix(".old.jsonl").exists()


def test_what_is_missing_is_written_as_it_was_before(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(response_texts, "GROUP", 1)
    settings = ResponseSettings(source="target", batch_size=2)
    jobs = [Job(i, prompt, "", 6) for i, prompt in enumerate(PROMPTS)]
    answers = answered_here(tiny("llama"), settings, 3, ())
    whole = dict(answers(jobs, range(4)))
    again = dict(answers(jobs, {2}))
    assert set(again) == {0, 2}  # the group it was in, and no other
    assert all(whole[example] == ids for example, ids in again.items())


# -- a whole run ------------------------------------------------------------------------------------------------------


def test_the_draft_learns_from_what_the_target_wrote(tmp_path: Path) -> None:
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
    (run.work / "responses/train.jsonl").write_bytes(before[: len(before) // 2])
    settings.drafts[1].k = 0.5  # another draft of the same texts
    _, _, printed = run_tiny(settings)
    assert "of them written now" in printed
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
