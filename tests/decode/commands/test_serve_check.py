"""``serve-check`` in a simulated engine, the causes that files and numbers show, and what is refused."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from heads import filed_head
from pairs import make_tokenizer, save_pair
from safetensors.torch import load_file, save_file
from simulated_engine import simulated
from transformers import AutoModelForCausalLM

from decode.__main__ import main
from decode.commands.serve_check import check_block, write_untrained_draft
from decode.engines.acceptance import Drafts, ServedText
from decode.engines.gap_causes import causes_in_files, causes_in_numbers, serving_facts, weight_fingerprints
from decode.errors import UserError
from decode.models.head_files import save_head
from decode.models.heads import FeatureHead, head_config
from decode.models.pair import load


@pytest.fixture
def folder(tiny, tmp_path: Path) -> Path:
    """A target and a draft whose profile knows its weights, and prompts."""
    (tmp_path / "prompts.txt").write_text("Tom has 3 apples\nHow many apples\nDas Maß\n")
    save_pair(tmp_path, tiny)
    known = [
        {"position": 1, "validation": 0.4, "offline": 0.375},
        {"position": 2, "validation": None, "offline": 0.25},
    ]
    weights = weight_fingerprints(tmp_path / "draft")
    profile = {"marginal_accept_rates": None, "weights": weights, "acceptance": known}
    (tmp_path / "draft" / "speculation_profile.json").write_text(json.dumps(profile))
    (tmp_path / "draft" / "README.md").write_text("# Draft\n\nNotes.\n")
    return tmp_path


@pytest.fixture
def heads(tiny, tmp_path: Path) -> Path:
    """A target and an EAGLE-3 head as exported."""
    target = tiny("llama", vocab_size=280, max_position_embeddings=256, num_hidden_layers=3, eos_token_id=0)
    target.save_pretrained(tmp_path / "target")
    make_tokenizer().save_pretrained(tmp_path / "target")
    torch.manual_seed(0)
    head = FeatureHead(head_config(target.config, 3, captured_layers=(0, 1, 2)))
    head.config.eagle_aux_hidden_state_layer_ids = [0, 1, 2]
    (tmp_path / "draft").mkdir()
    save_head(head, tmp_path / "draft")
    return tmp_path


def command(folder: Path, *more: str) -> list[str]:
    pair = ["--target", str(folder / "target"), "--draft", str(folder / "draft"), "--device", "cpu"]
    return ["serve-check", *pair, "--suite", f"prompts={folder / 'prompts.txt'}", "--threads", "1", *more]


@pytest.mark.parametrize("url", [[], ["--url", "http://127.0.0.1:9"]])
def test_a_whole_check_and_where_it_is_recorded(folder: Path, capsys, monkeypatch, url) -> None:
    """Exactly the predicted acceptance at T = 0, the same texts, and rows in the profile and the card."""
    pair = load(folder / "target", folder / "draft")
    monkeypatch.setattr("decode.commands.serve_check.opened", simulated(pair.target, pair.draft))
    monkeypatch.setattr("decode.commands.serve_check.check_engine", lambda *_: None)
    more = ("--draft-lengths", "3", "--temperatures", "0,1", "--max-new-tokens", "16")
    assert main(command(folder, *more, "--json", *url)) == 0
    found = json.loads(capsys.readouterr().out)
    row, sampled = found["rows"]
    assert (found["engine"], row["identical_share"], row["fits"], found["causes"]) == ("vllm", 1, True, [])
    assert row["served_length"] == pytest.approx(row["predicted_length"])
    assert len(row["positions"]) == 3
    assert all(at["served_marginal"] == at["predicted_marginal"] for at in row["positions"])
    first, second, _ = row["positions"]
    assert (first["validation"], first["offline"], second["offline"]) == (0.4, 0.375, 0.25)
    assert first["served"] == first["served_marginal"]
    assert second["served"] == pytest.approx(second["served_marginal"] / first["served_marginal"])
    assert sampled["lossless"]
    assert (row["speedup"] is None) == bool(url)
    assert main(command(folder, *more, *url)) == 0  # a second check replaces the first
    assert "Served and predicted accepted lengths agree" in capsys.readouterr().out
    (kept,) = json.loads((folder / "draft" / "speculation_profile.json").read_text())["served"]
    assert kept["rows"][0]["served_length"] == row["served_length"]
    card = (folder / "draft" / "README.md").read_text()
    assert card.startswith("# Draft\n\nNotes.")
    assert card.count("## Served") == 1
    assert "| engine | T | k | position | validation | offline | predicted | served |" in card
    assert f"| vllm | 0 | 3 | 1 | 0.400 | 0.375 | {first['served']:.3f} | {first['served']:.3f} |" in card
    assert named(folder) == []


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (["--engine", "vlm"], "did you mean 'vllm'"),
        (["--url", "http://127.0.0.1:9"], "drafts one length"),
        (["--engine", "vllm", "--python", "/nowhere/python"], "no program /nowhere/python that can be run"),
    ],
)
def test_what_is_refused(folder, capsys, more, sentence) -> None:
    assert main(command(folder, *more)) == 2
    assert sentence in capsys.readouterr().err


def test_a_block_head_is_checked_where_it_is_run_as_trained_and_no_longer_than_its_block(tiny) -> None:
    target = tiny("llama", num_hidden_layers=6)
    head = filed_head(target, "dspark", markov_kind="gated")
    check_block(head, "sglang", [3, 5])
    with pytest.raises(UserError, match="its Markov head is gated"):
        check_block(head, "vllm", [3])
    with pytest.raises(UserError, match=r"\[3, 6\], and a block of this head drafts 5"):
        check_block(head, "sglang", [3, 6])


def test_an_untrained_draft_has_the_targets_vocabulary_and_context(folder: Path) -> None:
    write_untrained_draft(folder / "untrained", str(folder / "target"), "32x1x2", 0)
    model = AutoModelForCausalLM.from_pretrained(folder / "untrained")
    assert (model.config.vocab_size, model.config.max_position_embeddings) == (280, 256)
    for wrong in ("192x2", "192x0x3", "100x2x3"):
        with pytest.raises(UserError, match="draft_shape is"):
            write_untrained_draft(folder, str(folder / "target"), wrong, 0)


def test_speedups_of_an_untrained_draft_follow_from_the_time_of_a_round(folder: Path, capsys, monkeypatch) -> None:
    class Timed:
        def __init__(self, length: int | None) -> None:
            self.length = length

        def differs_in_ids(self, *_: object) -> None:
            return None

        def write(self, ids, **options: object) -> ServedText:
            seconds, drafts = (6.0, Drafts(10, [0, 0, 0])) if self.length else (2.0, Drafts())
            return ServedText([1] * 11, 9.0, seconds, drafts)  # ten steps of 0.2 s, ten rounds of 0.6 s

    monkeypatch.setattr("decode.commands.serve_check.opened", lambda engine, length: nullcontext(Timed(length)))
    monkeypatch.setattr("decode.commands.serve_check.check_engine", lambda *_: None)
    assert main(command(folder, "--draft-shape", "32x1x2", "--draft-lengths", "3", "--json")) == 0
    half = json.loads(capsys.readouterr().out)["rows"][0]
    assert (half["acceptance"], half["tokens_per_round"]) == (0.5, 1.875)
    assert half["speedup"] == pytest.approx(1.875 / 3)


# -- causes ------------------------------------------------------------------------------------------------------------


def named(folder: Path) -> list[str]:
    return [cause.name for cause in causes_in_files(folder / "target", folder / "draft", context=100)]


def edit(path: Path, **fields: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def other_weights(folder: Path) -> None:
    state = load_file(folder / "draft" / "model.safetensors")
    changed = {name: tensor + 1e-3 for name, tensor in state.items()}
    save_file(changed, folder / "draft" / "model.safetensors", metadata={"format": "pt"})


def other_tokenizer(folder: Path) -> None:
    core = json.loads((folder / "draft" / "tokenizer.json").read_text())
    vocabulary = core["model"]["vocab"]
    a, b = list(vocabulary)[40:42]
    vocabulary[a], vocabulary[b] = vocabulary[b], vocabulary[a]
    (folder / "draft" / "tokenizer.json").write_text(json.dumps(core))


@pytest.mark.parametrize(
    ("pair", "fault", "names"),
    [
        ("folder", lambda folder: None, []),
        ("folder", other_weights, ["other weights than measured"]),
        ("folder", other_tokenizer, ["another tokenizer"]),
        (
            "folder",
            lambda folder: edit(folder / "draft" / "config.json", max_position_embeddings=64),
            ["cut context"],
        ),
        ("folder", lambda folder: edit(folder / "draft" / "config.json", vocab_size=64), ["vocabulary"]),
        (
            "folder",
            lambda folder: edit(folder / "target" / "config.json", quantization_config={"quant_method": "awq"}),
            ["quantisation"],
        ),
        ("heads", lambda folder: None, []),
        ("heads", lambda folder: edit(folder / "target" / "config.json", num_hidden_layers=2), ["last state captured"]),
        (
            "heads",
            lambda folder: edit(folder / "draft" / "config.json", eagle_aux_hidden_state_layer_ids=[-1, 0, 1]),
            ["captured layers off by one"],
        ),
    ],
)
def test_a_fault_of_the_files_is_named(request, pair: str, fault, names: list[str]) -> None:
    place = request.getfixturevalue(pair)
    fault(place)
    assert named(place) == names


FACTS = {
    "chat template": lambda target, tokenizer: setattr(tokenizer, "chat_template", tokenizer.chat_template + " "),
    "stop ids": lambda target, tokenizer: setattr(target.generation_config, "eos_token_id", [0, 5]),
    "number format": lambda target, tokenizer: target.to(torch.bfloat16),
    "rope_parameters of the target": lambda target, tokenizer: target.config.rope_parameters.update(rope_theta=5e5),
    "rms_norm_eps of the target": lambda target, tokenizer: setattr(target.config, "rms_norm_eps", 1e-3),
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
    (cause,) = causes_in_files(folder / "target", folder / "draft", context=100, facts=facts)
    assert cause.name == f"other {name}"
    assert cause.evidence == f"training had {trained[name]}, served is {facts[name]}"
    plain = serving_facts(pair.target, folder / "target", pair.tokenizer, chat=False)
    assert plain["chat template"] == "none (plain text)"


@pytest.mark.parametrize(
    ("at", "name"),
    [
        ({"validation": 0.8, "offline": 0.5, "predicted": 0.5}, "trained on other texts than the target writes"),
        ({"validation": 0.8, "offline": 0.8, "predicted": 0.5}, "other prompts than those of training"),
        ({"validation": 0.8, "offline": 0.75, "predicted": 0.7}, None),
        ({"predicted": 0.2}, None),
    ],
)
def test_the_stage_after_which_less_is_accepted_is_named(at: dict, name: str | None) -> None:
    found = causes_in_numbers([{"temperature": 0.0, "positions": [at]}])
    assert [cause.name for cause in found] == [name] * (name is not None)


def test_numbers_show_another_target_other_ids_and_sampling_that_is_not_the_targets() -> None:
    row = {"temperature": 1.0, "lossless": False, "target_logprob": -5.0, "plain_target_logprob": -0.3}
    found = causes_in_numbers([row], other_ids="of 'Tom', token 0 is [1] there and [2] here", agreement=0.7)
    assert [cause.name for cause in found] == [
        "another template or start token",
        "another target",
        "the engine's sampling with a draft is not the target's",
    ]
    assert causes_in_numbers([row | {"lossless": True}], agreement=0.99) == []
