"""The commands around real engines, with transformers as the engine, and what they refuse."""

from __future__ import annotations

import json

import pytest
from pairs import save_pair

from decode.__main__ import main


@pytest.fixture
def folder(tiny, tmp_path):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("Tom has 3 apples\nHow many apples\nDas Maß\n")
    save_pair(tmp_path, tiny)
    (tmp_path / "report.json").write_text('{"name": "tiny"}')
    return tmp_path


def command(folder, *more: str) -> list[str]:
    pair = ["--target", str(folder / "target"), "--draft", str(folder / "draft"), "--device", "cpu"]
    return ["serve-check", *pair, "--suite", f"prompts={folder / 'prompts.txt'}", "--threads", "1", *more]


def test_a_whole_check_in_transformers(folder, capsys) -> None:
    more = ("--draft-lengths", "3", "--temperatures", "0", "--max-new-tokens", "16", "--output", str(folder), "--json")
    assert main(command(folder, *more)) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["engine"], found["rows"][0]["identical_share"], found["rows"][0]["fits"]) == ("transformers", 1, True)
    assert found["rows"][0]["tokens_per_second"] > 0
    assert json.loads((folder / "report.json").read_text())["served"][0]["rows"] == found["rows"]


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (["--engine", "vlm"], "did you mean 'vllm'"),
        (["--draft-sampling", "mixed"], "Literal['greedy', 'probabilistic']"),
        (["--url", "http://127.0.0.1:9"], "drafts one length"),
        (["--draft-shape", "32x1x2"], "is timed in a serving engine"),
        (["--engine", "vllm", "--python", "/nowhere/python"], "no program that can be run"),
    ],
)
def test_what_is_refused(folder, capsys, more, sentence) -> None:
    assert main(command(folder, *more)) == 2
    assert sentence in capsys.readouterr().err
