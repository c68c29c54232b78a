"""What shapes a prompt travels with the draft: every command asks as the training did, unless an option says otherwise."""

import json
from pathlib import Path
from typing import Any

import pytest
from some_rows import write_rows
from tiny_run import bench, random_target, tiny_settings
from tokenizers_of_kinds import CHAT_TEMPLATES, with_start

from decode.__main__ import main
from decode.commands.checks import use_chat
from decode.commands.settings import BenchSettings
from decode.measure.session import Session
from decode.models.tokens import TRAINED
from distill.config.data import DataSettings
from distill.data.dataset import Examples
from distill.pipeline import export
from distill.run import Run
from distill.stages import run_stages

ASKED = "How many apples?"


def trained(folder: Path, kind: str, template: str | None, **data: Any) -> Run:
    """A run with an exported draft, of pairs with one question."""
    settings = tiny_settings(folder, target=random_target(folder / "model", with_start(template), num_hidden_layers=4))
    files = {}
    for number, split in enumerate(("train", "validation", "test")):
        rows = [{"question": ASKED[number:], "answer": str(n)} for n in range(8)]
        files[split] = write_rows(folder / f"{split}.jsonl", rows)
    settings.data = DataSettings(files=files, max_length=100, **data)
    settings.student.kind, settings.training.steps, settings.student.training.steps = kind, 3, 3
    settings.drafts = {"distillspec": settings.drafts["distillspec"]}
    run, _ = bench(settings)
    run_stages(run)
    export(run)
    return run


def asked(run: Run, monkeypatch: Any, capsys: Any, *more: str) -> tuple[list[list[int]], list[str]]:
    """The ids of the question in generate, bench, profile and serve-check, and the lines that say what is in force."""
    (run.folder / "one.jsonl").write_text(json.dumps({"prompt": ASKED}))
    models = ["--target", str(run.target), "--threads", "1", "--device", "cpu", "--max-new-tokens", "3", *more]
    draft, suite = ["--draft", str(run.export)], ["--suite", f"prompts={run.folder / 'one.jsonl'}"]
    found, lines, items = list[list[int]](), list[str](), Session.items
    monkeypatch.setattr(Session, "items", lambda *of: [found.append(each.ids) or each for each in items(*of)])
    monkeypatch.setattr("decode.commands.serve_check.serve_check", lambda *_: ([], [], []))
    monkeypatch.setattr("decode.commands.serve_check.check_engine", lambda *_: None)
    few = ["--methods", "vanilla", "--output", str(run.folder / "bench")]
    for command in (
        ["generate", *models, *draft, "--prompt", ASKED, "--json"],
        ["bench", *models, *draft, *suite, *few],
        ["profile", *models, *draft, *suite, "--longest", "2", "--json"],
        ["serve-check", *models, *draft, *suite, "--draft-lengths", "2", "--temperatures", "0", "--json"],
    ):
        assert main(command) == 0
        out, error = capsys.readouterr()
        if command[0] == "generate":
            found.append(json.loads(out)["prompt_ids"])
        lines += [line for line in error.splitlines() if line.startswith("prompts are")]
    return found, lines


@pytest.mark.parametrize(("kind", "template"), [("scratch", "thinking"), ("eagle3", None)])
def test_every_command_asks_as_the_draft_was_trained(tmp_path, monkeypatch, capsys, kind, template) -> None:
    shape = {"system": "Be brief", "template_args": [{"enable_thinking": False}]}
    own = {} if template else {"chat_template": CHAT_TEMPLATES["thinking"], "chat": True}
    run = trained(tmp_path, kind, template, **shape, **own)
    prompt = Examples.of(run.corpus.train).prompt(0)
    assert run.tokenizer.decode(prompt).endswith(f"Be brief<user>{ASKED}<assistant><think></think>")
    found, lines = asked(run, monkeypatch, capsys)
    assert found == [prompt] * 4
    assert len(lines) == 4
    assert all("system 'Be brief', template_args {'enable_thinking': False}" in line for line in lines)
    more = ("--system", "Answer", "--template-args", "{enable_thinking: true, other: 1}")
    found, lines = asked(run, monkeypatch, capsys, *more)
    wanted = f"Answer<user>{ASKED}<assistant>"
    assert [run.tokenizer.decode(ids)[-len(wanted) :] for ids in found] == [wanted] * 4
    assert all("Answer" in line and "brief" not in line for line in lines)


def test_a_draft_of_plain_pairs_is_asked_in_plain_text(tmp_path, monkeypatch, capsys) -> None:
    run = trained(tmp_path, "scratch", "thinking", chat=False)
    found, lines = asked(run, monkeypatch, capsys)
    assert found == [run.tokenizer(ASKED)["input_ids"]] * 4
    assert lines == ["prompts are plain text"] * 4


def test_the_draft_whose_prompts_are_followed_is_named_where_others_differ(tmp_path, capsys) -> None:
    drafts = [str(tmp_path / name) for name in "abc"]
    for path, system in zip(drafts, ("Answer", "Answer", "Be brief")):
        Path(path).mkdir()
        shape = {"chat": True, "system": system, "of_a_later_version": 1}
        (Path(path) / "tokenizer_config.json").write_text(json.dumps({TRAINED: shape}))
    for more, lines in (
        ({}, [f"prompts follow the training of {drafts[0]}, not that of {drafts[2]}"]),
        ({"system": "Hi"}, []),
    ):
        use_chat(BenchSettings(target="none", draft=drafts, **more), with_start("thinking"), tell=True)
        assert capsys.readouterr().err.splitlines()[1:] == lines
