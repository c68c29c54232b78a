"""``serve-check`` in a simulated engine, the causes that files and numbers show, and what is refused."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from heads import filed_head
from pairs import edit, save_pair
from safetensors.torch import load_file, save_file
from simulated_engine import SimulatedEngine, simulated

from decode.__main__ import main
from decode.commands.serve_check import check_head
from decode.engines.check import (
    Drafts,
    ServedText,
    causes_in_counts,
    causes_in_files,
    causes_in_numbers,
    serving_facts,
    weight_fingerprints,
)
from decode.engines.load import paying_load
from decode.errors import UserError
from decode.models.heads.eagle import FeatureHead, head_config
from decode.models.heads.files import save_head
from decode.models.open import load


@pytest.fixture
def folder(tiny, tmp_path: Path) -> Path:
    """A target and a draft whose profile knows its weights, and prompts."""
    (tmp_path / "prompts.txt").write_text("Tom has 3 apples\nHow many apples\nDas Maß\n")
    save_pair(tmp_path, tiny)
    weights = weight_fingerprints(tmp_path / "draft")
    (tmp_path / "draft" / "speculation_profile.json").write_text(json.dumps({"weights": weights}))
    return tmp_path


def command(folder: Path, *more: str) -> list[str]:
    pair = ["--target", str(folder / "target"), "--draft", str(folder / "draft"), "--device", "cpu"]
    return ["serve-check", *pair, "--suite", f"prompts={folder / 'prompts.txt'}", "--threads", "1", *more]


def checked(folder: Path, monkeypatch: pytest.MonkeyPatch, engine: type[SimulatedEngine] = SimulatedEngine) -> None:
    """The engine is a simulated one of this class."""
    pair = load(folder / "target", folder / "draft")
    monkeypatch.setattr("decode.commands.serve_check.opened", simulated(pair.target, pair.draft, engine))
    monkeypatch.setattr("decode.commands.serve_check.check_engine", lambda *_: None)


def test_a_whole_check_and_where_it_is_recorded(folder: Path, capsys, monkeypatch) -> None:
    """Exactly the predicted acceptance at T = 0, the same texts, and rows in the profile."""
    checked(folder, monkeypatch)
    more = ("--draft-lengths", "3", "--temperatures", "0,1", "--max-new-tokens", "16")
    assert main(command(folder, *more, "--json")) == 0
    found = json.loads(capsys.readouterr().out)
    row, sampled = found["rows"]
    assert (found["engine"], row["identical_share"], found["causes"]) == ("vllm", 1, [])
    assert row["served_length"] == pytest.approx(row["predicted_length"])
    assert len(row["positions"]) == 3
    assert all(at["served"] == at["predicted"] for at in row["positions"])
    assert (sampled["temperature"], sampled["identical_share"]) == (1, None)
    assert row["speedup"] is not None
    assert main(command(folder, *more[:2], *more[4:], "--temperatures", "0", "--url", "http://127.0.0.1:9")) == 0
    assert "3 of 3 texts have the predicted counts" in capsys.readouterr().out
    (kept,) = json.loads((folder / "draft" / "speculation_profile.json").read_text())["served"]  # of the second check
    assert (len(kept["rows"]), kept["rows"][0]["speedup"]) == (1, None)
    assert named(folder) == []


def test_categories_and_loads_have_rows_and_the_card_says_up_to_which_load_the_draft_pays(folder, capsys, monkeypatch):
    rows = [{"prompt": f"Tom has {i} apples", "category": "qa" if i % 2 else "math"} for i in range(8)]
    (folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "draft" / "README.md").write_text("# A draft\n\nUnder load, vllm: of an earlier check\n")
    checked(folder, monkeypatch, Timed)
    more = ("--draft-lengths", "3", "--temperatures", "0", "--max-new-tokens", "6", "--concurrency", "1,4")
    assert main([word.replace("prompts.txt", "prompts.jsonl") for word in command(folder, *more, "--json")]) == 0
    found = json.loads(capsys.readouterr().out)
    (row,) = found["rows"]
    assert [(part["category"], part["texts"]) for part in row["categories"]] == [("math", 4), ("qa", 4)]
    for part in row["categories"]:
        assert part["served_length"] == pytest.approx(part["predicted_length"])
    none, drafted = found["load"][:2], found["load"][2:]
    assert [(at["draft_length"], at["requests"]) for at in none + drafted] == [(None, 1), (None, 4), (3, 1), (3, 4)]
    for at in drafted:  # of all texts, whatever their number at a time
        assert at["served_length"] == pytest.approx(row["served_length"])
        assert at["token_ms"] == pytest.approx(10 * 48 / 40)  # of eight texts of six tokens the five after the first
    assert [at["speedup"] for at in drafted] == [pytest.approx(1.25), pytest.approx(1.25)]
    assert "speedup" not in none[0]
    (line,) = [line for line in (folder / "draft" / "README.md").read_text().splitlines() if "Under load" in line]
    assert line == f"Under load, vllm: {paying_load(found['load'])}" == found["pays"]
    assert "up to a concurrency of 4 (1.25 (1.25–1.25), 3 drafted tokens, T = 0)" in line
    alone, four = ([at | {"speedup_ci95": [0.9, 1.2]} if at["requests"] == n else at for at in drafted] for n in (1, 4))
    assert "up to a concurrency of 1 (" in paying_load(four)
    for doubted in (alone, none, [at | {"speedup": 2.0} for at in drafted]):  # the last is more than is accepted
        assert "not surely faster" in paying_load(doubted)  # a larger number alone is chance


class Timed(SimulatedEngine):
    """It takes four fifths of the time with a draft."""

    def write(self, *args: Any, **options: Any) -> ServedText:
        return replace(super().write(*args, **options), seconds=1.0 if self.draft is None else 0.8)


class Half(SimulatedEngine):
    """It counts half of what it accepts."""

    def write(self, *args: Any, **options: Any) -> ServedText:
        text = super().write(*args, **options)
        return replace(text, drafts=Drafts(text.drafts.rounds, [n // 2 for n in text.drafts.accepted]))


def test_a_difference_without_a_known_cause_fails_the_check(folder: Path, capsys, monkeypatch) -> None:
    checked(folder, monkeypatch, Half)
    more = ("--draft-lengths", "3", "--temperatures", "0", "--max-new-tokens", "16")
    assert main(command(folder, *more)) == 1
    out = " ".join(capsys.readouterr().out.split())
    assert "0 of 3 texts have the predicted counts. The first other one: text 1 has [" in out
    assert "unexplained difference: T = 0, n = 3: text 1 has [" in out
    other_weights(folder)  # a cause
    assert main(command(folder, *more)) == 0
    assert "other weights than measured" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (["--engine", "vlm"], "unknown engine 'vlm'; did you mean 'vllm'?"),
        (["--url", "http://127.0.0.1:9"], "drafts one length"),
        (["--max-new-tokens", "240", "--draft-lengths", "3"], "251 new ones"),  # drafted behind the text
    ],
)
def test_what_is_refused(folder, capsys, monkeypatch, more, sentence) -> None:
    monkeypatch.setattr("decode.commands.serve_check.check_engine", lambda *_: None)
    assert main(command(folder, *more)) == 2
    assert sentence in capsys.readouterr().err


def test_a_block_head_is_checked_where_it_is_run_as_trained_and_no_longer_than_its_block(tiny) -> None:
    target = tiny("llama", num_hidden_layers=6)
    head = filed_head(target, "dspark", draft_vocab=24)
    check_head(head, "vllm", [3, 5])
    with pytest.raises(UserError, match="it drafts 24 of 48 tokens"):
        check_head(head, "sglang", [3])
    with pytest.raises(UserError, match=r"\[3, 6\], and a block of this head drafts 5"):
        check_head(head, "vllm", [3, 6])


def named(folder: Path) -> list[str]:
    return [cause.name for cause in causes_in_files(folder / "target", folder / "draft")]


def other_weights(folder: Path) -> None:
    state = load_file(folder / "draft" / "model.safetensors")
    changed = {name: tensor + 1e-3 for name, tensor in state.items()}
    save_file(changed, folder / "draft" / "model.safetensors", metadata={"format": "pt"})


def test_a_fault_of_the_files_is_named(folder: Path, tiny, tmp_path: Path) -> None:
    assert named(folder) == []
    other_weights(folder)
    assert named(folder) == ["other weights than measured"]
    target = tiny("llama", vocab_size=280, max_position_embeddings=256, num_hidden_layers=3, eos_token_id=0)
    target.save_pretrained(tmp_path / "heads" / "target")
    (tmp_path / "heads" / "draft").mkdir()
    save_head(FeatureHead(head_config(target.config, 3, captured_layers=(0, 1, 2))), tmp_path / "heads" / "draft")
    assert named(tmp_path / "heads") == []
    edit(tmp_path / "heads" / "target" / "config.json", num_hidden_layers=2)
    assert named(tmp_path / "heads") == ["last state captured"]


FACTS = {
    "chat template": lambda target, tokenizer: setattr(tokenizer, "chat_template", tokenizer.chat_template + " "),
    "stop ids": lambda target, tokenizer: setattr(target.generation_config, "eos_token_id", [0, 5]),
    "rope_parameters of the target": lambda target, tokenizer: target.config.rope_parameters.update(rope_theta=5e5),
}


@pytest.mark.parametrize("name", [*FACTS, "weights of the target"])
def test_what_differs_from_training_is_named_with_both_values(folder: Path, name: str) -> None:
    pair = load(folder / "target")
    trained = serving_facts(pair.target, folder / "target", pair.tokenizer, chat=True)
    edit(folder / "draft" / "speculation_profile.json", trained_with=trained)
    if name in FACTS:
        FACTS[name](pair.target, pair.tokenizer)
    else:
        state = load_file(folder / "target" / "model.safetensors")
        save_file({k: v * 1.01 for k, v in state.items()}, folder / "target" / "model.safetensors", {"format": "pt"})
    facts = serving_facts(pair.target, folder / "target", pair.tokenizer, chat=True)
    (cause,) = causes_in_files(folder / "target", folder / "draft", facts)
    assert cause.name == f"other {name}"
    assert cause.evidence == f"training had {trained[name]}, served is {facts[name]}"
    plain = serving_facts(pair.target, folder / "target", pair.tokenizer, chat=False)
    assert plain["chat template"] == "none (plain text)"


def test_answers_show_another_target_and_other_ids() -> None:
    found = causes_in_numbers("of 'Tom', token 0 is [1] there and [2] here", 0.7)
    assert [cause.name for cause in found] == ["another template or start token", "another target"]
    assert causes_in_numbers(None, 0.99) == []


@pytest.mark.parametrize(
    ("wrong", "facts", "names"),
    [
        ([], {}, []),
        ([0.0], {}, ["unexplained difference"]),
        ([0.0], {"numbers": "q8_0"}, ["rounding"]),
        ([0.0], {"explained": True}, []),
    ],
)
def test_counts_show_a_known_cause_or_that_there_is_none(wrong: list[float], facts: dict, names: list[str]) -> None:
    rows = [
        {"temperature": t, "draft_length": 3, "unequal": "text 1" if t in wrong else None, "other_texts": False}
        for t in (0.0, 1.0)
    ]
    given = {"numbers": "float32", "explained": False} | facts
    assert [cause.name for cause in causes_in_counts(rows, **given)] == names
