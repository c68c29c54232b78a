"""The commands around real engines, with a simulated engine, and what they refuse."""

from __future__ import annotations

import json

import pytest
from pairs import save_pair
from simulated_engine import simulated

from decode.__main__ import main
from decode.models.pair import load


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


@pytest.mark.parametrize("url", [[], ["--url", "http://127.0.0.1:9"]])
def test_a_whole_check(folder, capsys, monkeypatch, url) -> None:
    pair = load(folder / "target", folder / "draft")
    monkeypatch.setattr("decode.engines.serve_check.opened", simulated(pair.target, pair.draft))
    monkeypatch.setattr("decode.commands.serve_check.check_engine", lambda *_: None)
    more = ("--draft-lengths", "3", "--temperatures", "0", "--max-new-tokens", "16", "--output", str(folder))
    assert main(command(folder, *more, "--json", *url)) == 0
    found = json.loads(capsys.readouterr().out)
    (row,) = found["rows"]
    assert (found["engine"], row["identical_share"], row["fits"]) == ("vllm", 1, True)
    assert (row["speedup"] is None) == bool(url)
    assert json.loads((folder / "report.json").read_text())["served"][0]["rows"] == found["rows"]
    assert main(command(folder, *more, *url)) == 0
    assert "Served and predicted accepted lengths agree" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (["--engine", "vlm"], "did you mean 'vllm'"),
        (["--draft-sampling", "mixed"], "Literal['greedy', 'probabilistic']"),
        (["--url", "http://127.0.0.1:9"], "drafts one length"),
        (["--engine", "vllm", "--python", "/nowhere/python"], "no program that can be run"),
    ],
)
def test_what_is_refused(folder, capsys, more, sentence) -> None:
    assert main(command(folder, *more)) == 2
    assert sentence in capsys.readouterr().err
