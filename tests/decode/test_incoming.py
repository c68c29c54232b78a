"""Texts from outside stay as they were written, but for halves of characters, wherever they come in."""

import io
import json
import random
import re
from pathlib import Path

import pytest

from decode.commands.cli import parse
from decode.commands.settings import GenerateSettings
from decode.commands.stores import read_texts
from decode.incoming import read_stdin, read_yaml
from decode.measure.suites import load_suite

PIECES = [
    "\ud83d", "\udc99", "\udcff", "💙", "\ufeff", "\x00", "\x1b[0m", "\x7f", "\x85", "\u2028", "é", "\n", "\t", " ", "#", "# ",
    "~", "---", "[INST]", "{a: 1}", "- ", ": ", "'", '"', "1e6", "007", "yes", "%", "|", ">", "&a", "*a", "!t", "<<",
    ",", "\\", "`", "@", "-h", ".help", "${x}", "2020-01-01", "{{", "/etc",
]  # fmt: skip


def nasty(count: int = 40, seed: int = 0) -> list[str]:
    chance = random.Random(seed)
    return [*PIECES, *("".join(chance.choices(PIECES, k=chance.randint(2, 6))) for _ in range(count))]


def whole(text: str) -> str:
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "ignore")


def test_a_setting_that_is_text_takes_what_was_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for text in nasty():
        got = parse(GenerateSettings, [f"--prompt={text}", "--system", f" {text}", "--stop", f" {text}, a"], "p")
        assert (got.prompt, got.system, got.stop) == (whole(text), f" {whole(text)}", [f" {whole(text)}, a"])
        quoted = json.dumps(text)  # which is YAML too
        (tmp_path / "c.yaml").write_text(f"prompt: {quoted}\nstop: [{json.dumps(text + 'x')}]\ndraft: {quoted}\n")
        got = parse(GenerateSettings, ["--config", str(tmp_path / "c.yaml")], "p")
        assert (got.prompt, got.stop, got.draft) == (whole(text), [whole(text) + "x"], whole(text))
    assert "the command line holds a lone surrogate" in capsys.readouterr().err


def test_rows_with_half_a_character_are_dropped_and_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = [*nasty(300), "é" * 5_000_000]  # a line of 10 MB
    (tmp_path / "s.jsonl").write_text("".join(f'{{"prompt": {json.dumps(text)}}}\n' for text in texts))
    joined = [text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "surrogatepass") for text in texts]
    kept = [text for text in joined if text == whole(text)]
    assert len(kept) < len(texts) - 30
    asked = [text for text in kept if text.strip()]
    assert [prompt.text for prompt in load_suite(str(tmp_path / "s.jsonl")).prompts] == asked
    assert list(read_texts(tmp_path / "s.jsonl")) == kept
    said = f": {len(texts) - len(kept)} rows with a lone surrogate dropped (row 1)\n"
    told, blank = capsys.readouterr().err, f": {len(kept) - len(asked)} rows with an empty user's turn dropped"
    assert told.startswith(f"suite prompts{said}suite prompts{blank}")
    assert told.endswith(f"{tmp_path}/s.jsonl{said}")


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
def test_standard_input_is_read_whatever_the_locale(encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for text in [*nasty(), "é" * 5_000_000]:
        text = "ab: " + text
        data = io.BufferedReader(io.BytesIO(text.encode(encoding, "surrogatepass")))
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(data, "ascii"))
        assert read_stdin() == re.sub("[\ud800-\udfff]", "", text)


def test_of_yaml_dates_are_texts_and_numbers_may_be_written_as_in_json() -> None:
    assert read_yaml("{a: 1e6, b: 2020-01-01, c: null}") == {"a": 1e6, "b": "2020-01-01", "c": None}
