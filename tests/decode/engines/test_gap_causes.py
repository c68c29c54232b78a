"""Faults of an export that the files or the numbers show, and the whole check on a sound one."""

from __future__ import annotations

import dataclasses
import json
import shutil
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from pairs import make_tokenizer, save_pair
from safetensors.torch import load_file, save_file
from simulated_engine import simulated
from transformers import AutoModelForCausalLM

from decode.bench.session import Item
from decode.bench.statistics import plain
from decode.bench.suites import Prompt
from decode.commands.serve_check import COLUMNS, cells, record
from decode.engines.acceptance import Drafts, ServedText
from decode.engines.gap_causes import causes_in_files, causes_in_numbers, weight_fingerprints
from decode.engines.serve_check import CheckOptions, serve_check, time_untrained_draft, write_untrained_draft
from decode.engines.settings import EngineSettings
from decode.errors import UserError
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


def test_other_weights_than_the_measured_ones_are_named(folder: Path) -> None:
    change(folder / "draft", lambda state: {name: tensor + 1e-3 for name, tensor in state.items()})
    assert named(folder) == ["other weights than measured"]


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
    assert named(folder, "my-eagle3-draft", "llama.cpp") == []


def test_numbers_show_another_target_other_ids_and_sampling_that_is_not_the_targets() -> None:
    row = {"temperature": 1.0, "lossless": False, "target_logprob": -5.0, "plain_target_logprob": -0.3, "cut": 0}
    found = causes_in_numbers([row], other_ids="of 'Tom', token 0 is [1] there and [2] here", agreement=0.7)
    assert [cause.name for cause in found] == [
        "another template or start token",
        "another target",
        "the engine's sampling with a draft is not the target's",
    ]
    assert causes_in_numbers([row | {"lossless": True}], agreement=0.99) == []


def test_the_whole_check_in_a_simulated_engine_and_where_it_is_recorded(folder: Path, monkeypatch) -> None:
    """Exactly the predicted acceptance at T = 0, the same texts, and rows in the profile and the card."""
    draft = folder / "draft"
    (draft / "README.md").write_text("# Draft\n\nNotes.\n")
    (folder / "report.json").write_text('{"name": "run"}')
    pair = load(folder / "target", draft)
    monkeypatch.setattr("decode.engines.serve_check.opened", simulated(pair.target, pair.draft))
    items = [Item(Prompt(str(i), "", None), [5 + i, 9, 17]) for i in range(4)]
    settings = EngineSettings(str(folder / "target"), str(draft))
    options = CheckOptions([2, 4], [0.0], 20)
    found = serve_check("vllm", settings, pair.target, pair.draft, items, [0], options)
    assert [row["draft_length"] for row in found.rows] == [2, 4]
    for row in found.rows:
        assert row["served_length"] == pytest.approx(row["predicted_length"])
        assert (row["fits"], row["identical_share"], row["cut"]) == (True, 1.0, 0)
        assert all(at["within"] for at in row["positions"])
    assert found.causes == []
    for _ in range(2):  # a second check replaces the first
        record(plain(dataclasses.asdict(found)), draft, folder)
    for path in (draft / "speculation_profile.json", folder / "report.json"):
        assert [check["engine"] for check in json.loads(path.read_text())["served"]] == ["vllm"]
    card = (draft / "README.md").read_text()
    assert card.startswith("# Draft\n\nNotes.")
    assert card.count("## Served") == 1
    assert named(folder) == []


def test_a_check_without_a_whole_round_is_recorded_without_a_length() -> None:
    row = dict.fromkeys(column.partition(":")[0] for column in COLUMNS.values())
    assert cells(row) == [""] * len(COLUMNS)


def test_an_untrained_draft_has_the_targets_vocabulary_and_context(tiny, tmp_path: Path) -> None:
    save_pair(tmp_path, tiny)
    count = write_untrained_draft(tmp_path / "untrained", str(tmp_path / "target"), "32x1x2", 0)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "untrained")
    assert (model.config.vocab_size, model.config.max_position_embeddings) == (280, 256)
    assert sum(weight.numel() for weight in model.parameters()) == count
    for wrong in ("192x2", "192x0x3", "100x2x3"):
        with pytest.raises(UserError, match="draft_shape is"):
            write_untrained_draft(tmp_path, str(tmp_path / "target"), wrong, 0)


def test_speedups_of_an_untrained_draft_follow_from_the_time_of_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    class Timed:
        def write(self, ids, **options: object) -> ServedText:
            seconds, drafts = (6.0, Drafts(10, 30, [0, 0, 0])) if self.length else (2.0, Drafts())
            return ServedText([1] * 11, 9.0, seconds, drafts)  # ten steps of 0.2 s, ten rounds of 0.6 s

    def opened(name: str, settings: EngineSettings, length: int | None):
        writer = Timed()
        writer.length = length
        return nullcontext(writer)

    monkeypatch.setattr("decode.engines.serve_check.opened", opened)
    items = [Item(Prompt("", "", None), [5, 9, 17])]
    rows = time_untrained_draft("vllm", EngineSettings("t", "d"), items, CheckOptions([3]))
    half = next(row for row in rows if row["acceptance"] == 0.5)
    assert (half["tokens_per_round"], half["speedup"]) == (1.875, pytest.approx(1.875 / 3))
