"""Planted faults of an export, each named; a sound one, of which nothing is said."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import torch
from pairs import make_tokenizer, save_pair
from safetensors.torch import load_file, save_file

from decode.bench.served import record, served_page, shown
from decode.bench.session import Item
from decode.bench.suites import Prompt
from decode.engines.gap_causes import causes_in_files, causes_in_numbers, weight_fingerprints
from decode.engines.serve_check import CheckOptions, serve_check
from decode.engines.settings import EngineSettings
from decode.models.heads import FeatureHead, head_config, save_head
from decode.models.pair import load


@pytest.fixture
def folder(tiny, tmp_path: Path) -> Path:
    """A target and a draft whose profile knows its weights."""
    save_pair(tmp_path, tiny)
    profile = {"marginal_accept_rates": None, "weights": weight_fingerprints(tmp_path / "draft")}
    (tmp_path / "draft" / "speculation_profile.json").write_text(json.dumps(profile))
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
    head.config.eagle_config = {"eagle_aux_hidden_state_layer_ids": [-1, 0, 1]}
    (tmp_path / "head").mkdir()
    save_head(head, tmp_path / "head")
    return tmp_path


def named(folder: Path, draft: str = "draft", engine: str = "vllm") -> list[str]:
    return [cause.name for cause in causes_in_files(folder / "target", folder / draft, context=100, engine=engine)]


def edit(path: Path, **fields: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def change(folder: Path, function) -> None:
    state = load_file(folder / "model.safetensors")
    save_file(function(state), folder / "model.safetensors", metadata={"format": "pt"})


def test_a_sound_export_has_no_cause(folder: Path) -> None:
    assert named(folder) == []


def test_permuted_embeddings_are_named(folder: Path) -> None:
    def permute(state):
        name = "model.embed_tokens.weight"
        return state | {name: state[name][torch.randperm(280)].contiguous()}

    change(folder / "draft", permute)
    assert named(folder) == ["embeddings permuted"]


def test_weights_of_another_step_are_named(folder: Path) -> None:
    change(folder / "draft", lambda state: {name: tensor + 1e-3 for name, tensor in state.items()})
    assert named(folder) == ["weights of another step"]


def test_a_short_context_is_named(folder: Path) -> None:
    edit(folder / "draft" / "config.json", max_position_embeddings=64)
    assert named(folder) == ["cut context"]


def test_another_tokenizer_is_named(folder: Path) -> None:
    core = json.loads((folder / "draft" / "tokenizer.json").read_text())
    vocabulary = core["model"]["vocab"]
    a, b = list(vocabulary)[40:42]
    vocabulary[a], vocabulary[b] = vocabulary[b], vocabulary[a]
    (folder / "draft" / "tokenizer.json").write_text(json.dumps(core))
    assert named(folder) == ["another tokenizer"]


def test_a_sound_head_has_no_cause(heads: Path) -> None:
    assert named(heads, "head") == []


def test_a_bias_key_in_an_eagle3_head_is_named(heads: Path) -> None:
    edit(heads / "head" / "config.json", bias=True)
    assert named(heads, "head") == ["bias in an EAGLE-3 head"]


def test_a_head_on_the_last_state_is_named(heads: Path) -> None:
    edit(heads / "target" / "config.json", num_hidden_layers=2)
    assert named(heads, "head") == ["last state captured"]


def test_captured_layers_off_by_one_are_named(heads: Path) -> None:
    edit(heads / "head" / "config.json", eagle_aux_hidden_state_layer_ids=[-1, 0, 1])
    assert named(heads, "head") == ["captured layers off by one"]


def test_a_folder_that_vllm_takes_for_another_method_is_named(folder: Path) -> None:
    shutil.copytree(folder / "draft", folder / "my-eagle3-draft")
    assert named(folder, "my-eagle3-draft") == ["name of the folder"]
    assert named(folder, "my-eagle3-draft", "transformers") == []


ROW = {
    "temperature": 1.0, "draft_length": 5, "fits": False, "served_length": 2.0, "predicted_length": 3.0,
    "predicted_length_se": 0.1, "difference_se": 0.1, "recorded_length": None,
    "recorded_length_se": None,
}  # fmt: skip


def test_greedy_drafting_is_told_by_the_rate_that_it_would_give() -> None:
    fitting = {"greedy drafting": {(1.0, 5): 2.1}, "captured layers off by one (+1)": {(1.0, 5): 2.9}}
    assert [c.name for c in causes_in_numbers([ROW], {"alternatives": fitting})] == ["greedy drafting"]


def test_layers_off_by_one_in_every_key_are_told_by_the_recorded_acceptance() -> None:
    row = ROW | {"fits": True, "recorded_length": 4.1, "recorded_length_se": 0.1}
    shifted = {"captured layers off by one (+1)": {(1.0, 5): 4.0}, "captured layers off by one (-1)": {(1.0, 5): 2.9}}
    assert [c.name for c in causes_in_numbers([row], {"alternatives": shifted})] == ["captured layers off by one (+1)"]


def test_a_profile_of_few_texts_is_taken_with_its_error() -> None:
    row = ROW | {"fits": True, "recorded_length": 3.4}
    assert causes_in_numbers([row | {"recorded_length_se": 0.2}], {}) == []
    (cause,) = causes_in_numbers([row | {"recorded_length_se": 0.1}], {})
    assert cause.name == "another draft than the measured one, or other prompts"


def test_sampling_that_is_not_the_targets_is_named_and_nothing_else() -> None:
    row = ROW | {"lossless": False, "target_logprob": -5.0, "plain_target_logprob": -0.3}
    fitting = {"greedy drafting": {(1.0, 5): 2.1}}
    names = [c.name for c in causes_in_numbers([row], {"alternatives": fitting})]
    assert names == ["the engine's sampling with a draft is not the target's"]


def test_acceptance_that_is_lost_with_several_texts_at_a_time_is_named() -> None:
    row = ROW | {"temperature": 0.0, "fits": True, "served_length": 1.4}
    many = {"batch_size": 4, "draft_length": 5, "served_length": 1.39}
    assert causes_in_numbers([row], {"together": [many]}) == []
    (cause,) = causes_in_numbers([row], {"together": [many, many | {"served_length": 1.1}]})
    assert (cause.name, "accepts 1.10 a round" in cause.told_by) == ("batch", True)


def test_numbers_name_another_target_and_a_draft_worse_than_guessing() -> None:
    facts = {"agreement": 0.7, "logprob": -9.0, "vocabulary": 280}
    names = [c.name for c in causes_in_numbers([ROW | {"fits": True, "predicted_length": 1.05}], facts)]
    assert names == ["another target", "embeddings or head of another tokenizer"]
    confident = [c.name for c in causes_in_numbers([ROW | {"fits": True}], facts)]  # wrong rarely, then by much
    assert confident == ["another target"]


def test_the_whole_check_in_transformers_and_where_it_is_kept(folder: Path) -> None:
    """Exactly the predicted acceptance at T = 0, the same texts, and rows in the profile and the card."""
    draft = folder / "draft"
    (draft / "README.md").write_text("# Draft\n\nNotes.\n")
    (folder / "report.json").write_text('{"name": "run"}')
    pair = load(folder / "target", draft)
    items = [Item(Prompt(str(i), "", None), [5 + i, 9, 17]) for i in range(4)]
    settings = EngineSettings(str(folder / "target"), str(draft))
    options = CheckOptions([2, 4], [0.0], 20)
    found = serve_check("transformers", settings, pair.target, pair.draft, items, [0], options)
    assert [row["draft_length"] for row in found.rows] == [2, 4]
    for row in found.rows:
        assert row["served_length"] == pytest.approx(row["predicted_length"])
        assert (row["fits"], row["identical_share"], row["cut"]) == (True, 1.0, 0)
        assert all(at["within"] for at in row["positions"])
    assert found.causes == []
    for _ in range(2):  # a second check replaces the first
        record(dataclasses.asdict(found), draft, folder)
    for path in (draft / "speculation_profile.json", folder / "report.json"):
        assert [check["engine"] for check in json.loads(path.read_text())["served"]] == ["transformers"]
    card = (draft / "README.md").read_text()
    assert card.startswith("# Draft\n\nNotes.")
    assert card.count("## Served") == 1
    assert named(folder) == []
    html = served_page([dataclasses.asdict(found)], "run").html()
    assert "2 of 2 block efficiencies agree with the predicted ones within" in html


def test_weights_of_another_step_part_from_the_recorded_acceptance(folder: Path, tiny) -> None:
    pair = load(folder / "target", folder / "draft")
    profile = {"marginal_accept_rates": [1.0, 1.0], "measurement_conditions": {"temperature": 0.0}}
    (folder / "draft" / "speculation_profile.json").write_text(json.dumps(profile))
    items = [Item(Prompt(str(i), "", None), [5 + i, 9, 17]) for i in range(3)]
    settings = EngineSettings(str(folder / "target"), str(folder / "draft"))
    found = serve_check("transformers", settings, pair.target, pair.draft, items, [0], CheckOptions([2], [0.0], 20))
    assert [cause.name for cause in found.causes] == ["another draft than the measured one, or other prompts"]


def test_a_check_without_a_whole_round_has_a_row_without_a_difference() -> None:
    assert shown({"served_length": None, "predicted_length": None, "fits": False})["apart"] is None
