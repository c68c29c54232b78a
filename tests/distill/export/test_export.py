"""The exported draft: what is in the folder, who can load it, what is refused, and what is added once it is measured."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from families import build_tiny
from pairs import make_tokenizer
from run_report import FULL, changed, decoding
from safetensors.torch import load_file, save_file
from tiny_run import tiny_settings
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

from decode.errors import UserError
from distill.config import ExportSettings
from distill.config.models import TargetSettings
from distill.export import draft as export
from distill.export.card import add_measurements, export_profile, exported_facts
from distill.export.draft import DRAFTED, export_draft, fit_context, fit_vocabulary
from distill.pipeline import training_facts


def make(folder: Path, family: str = "llama", vocabulary: int = 288, **more) -> Path:
    build_tiny(family, vocab_size=vocabulary, eos_token_id=1, pad_token_id=0, **more).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


def run_export(draft: Path, target: Path, name: str = "draft") -> Path:
    return export_draft(draft, target, target.parent / name, ExportSettings(), about={"name": "adaspec"})


USER_SCRIPT = """
import sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
for folders in sys.argv[1:]:
    target, *drafts = [AutoModelForCausalLM.from_pretrained(folder) for folder in folders.split(":")]
    AutoTokenizer.from_pretrained(folders.split(":")[-1])
    ids = torch.tensor([[40, 41, 7, 7, 7, 30]])
    options = dict(attention_mask=torch.ones_like(ids), max_new_tokens=16, do_sample=False)
    alone = target.generate(ids, **options)
    for draft in drafts:
        assert alone.equal(target.generate(ids, assistant_model=draft, **options))
assert not [name for name in sys.modules if name.split(".")[0] in ("distill", "decode", "probes")]
"""


def test_a_script_with_only_transformers_uses_it_as_assistant_with_identical_tokens(tmp_path) -> None:
    """The target as its own draft, drafts of its size, of smaller vocabularies, and of a larger one."""
    command, there = [sys.executable, "-c", USER_SCRIPT], {"HF_HUB_OFFLINE": "1", "PYTHONPATH": ""}
    vocabularies = {"llama": ((280, True), (296, False)), "gpt_neox": ((280, False),)}
    for family, sizes in vocabularies.items():
        target = make(tmp_path / family / "target", family)
        folders = [target, run_export(target, target, "self")]
        for size, tied in sizes:
            trained = make(tmp_path / family / f"{size}{tied}", family, size, tie_word_embeddings=tied, seed=2)
            folders.append(run_export(trained, target, f"export{size}{tied}"))
        command.append(":".join(map(str, folders)))
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=os.environ | there)
    assert result.returncode == 0, result.stderr[-2000:]


def test_the_folder_holds_what_engines_read(tmp_path) -> None:
    scaled = {"rope_type": "linear", "factor": 2.0, "rope_theta": 5000.0}
    draft = make(tmp_path / "draft", max_position_embeddings=48, rope_parameters=scaled)
    folder = export_draft(draft, make(tmp_path / "target"), draft, ExportSettings())  # a draft may be put onto itself
    assert {"README.md", "tokenizer.json"} <= {path.name for path in folder.iterdir()}
    generation, written = (
        json.loads((folder / f"{name}_config.json".lstrip("_")).read_text()) for name in ("generation", "")
    )
    wanted = {"num_assistant_tokens": 4, "num_assistant_tokens_schedule": "constant", "eos_token_id": 1}
    assert generation.items() >= (wanted | {"pad_token_id": 0, "assistant_confidence_threshold": 0}).items()
    assert written["dtype"] == "float32"
    assert (written["eos_token_id"], written["max_position_embeddings"]) == (1, 64)  # the target's
    assert written["rope_parameters"] == scaled
    target = make(tmp_path / "neox", "gpt_neox")
    neox = json.loads((run_export(target, target, "other") / "config.json").read_text())
    assert neox["rotary_pct"] == 0.5


def test_what_is_written_as_tied_is_one_matrix(tmp_path, monkeypatch) -> None:
    """A config that ties over a file with another head: transformers keeps both, engines would tie."""
    draft, target = make(tmp_path / "trained"), make(tmp_path / "target", seed=2)

    def tie(path: Path) -> None:
        path.write_text(json.dumps(json.loads(path.read_text()) | {"tie_word_embeddings": True}))

    def damage(path: Path) -> None:
        state = load_file(path.parent / "model.safetensors")
        state["model.norm.weight"] *= 2
        save_file(state, path.parent / "model.safetensors", metadata={"format": "pt"})

    def full(path: Path) -> None:
        raise OSError(28, "No space left on device")

    tie(draft / "config.json")
    folder = run_export(draft, target)
    assert json.loads((folder / "config.json").read_text())["tie_word_embeddings"] is False
    trained, exported = (AutoModelForCausalLM.from_pretrained(path) for path in (draft, folder))
    assert torch.equal(trained.lm_head.weight, exported.lm_head.weight)
    assert not torch.equal(exported.lm_head.weight, exported.model.embed_tokens.weight)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    card = export.write_card
    for change, error in ((tie, "head are two"), (damage, "other logits"), (full, "No space")):

        def write_card(folder: Path, *given: Any, change: Any = change) -> None:
            card(folder, *given)
            change(folder / "config.json")

        monkeypatch.setattr(export, "write_card", write_card)
        with pytest.raises((UserError, OSError), match=error):
            run_export(draft, target)
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == before  # a failure leaves the earlier one
        assert not list(tmp_path.glob(".draft*"))


@pytest.mark.parametrize(
    ("family", "norm"),
    [("llama", "model.norm"), ("gpt_neox", "gpt_neox.final_layer_norm"), ("phi", "model.final_layernorm")],
)
@pytest.mark.parametrize("tied", [False, True])
def test_padded_ids_are_never_the_most_likely_even_if_all_other_logits_are_negative(family, norm, tied) -> None:
    model, ids = build_tiny(family, vocab_size=40, tie_word_embeddings=tied), torch.arange(400).view(8, 50) % 40
    with torch.no_grad():
        for layer in (model.get_input_embeddings(), model.get_output_embeddings()):
            layer.weight += 30
        for name, weight in model.get_submodule(norm).named_parameters():
            weight.fill_(-1 if family == "llama" or name == "bias" else 1)
    before = model(ids).logits
    assert before.max() < 0
    assert fit_vocabulary(model, 64) == 40
    after = model(ids).logits
    assert model.config.vocab_size == after.shape[-1] == 64
    assert torch.allclose(after[..., :40], before)
    assert int(after.argmax(-1).max()) < 40


@pytest.mark.parametrize(("kind", "fitted"), [("default", 96), ("linear", 96), ("yarn", 48)])
def test_a_context_is_extended_only_where_positions_can_be(kind, fitted) -> None:
    rope = {"rope_type": kind, "rope_theta": 1e4, "factor": 2.0}
    draft, target = (LlamaConfig(max_position_embeddings=n, rope_parameters=rope) for n in (48, 96))
    assert ("cannot be extended" in fit_context(draft, target)) == (fitted == 48)
    assert draft.max_position_embeddings == fitted


def test_a_path_that_vllm_takes_for_another_method_and_another_tokenizer_are_refused(tmp_path) -> None:
    for name in ("eagle-arithmetic", "runs-dspark"):
        with pytest.raises(UserError, match="Choose a name"):  # before anything is loaded
            export_draft(tmp_path / "no", tmp_path / "no", tmp_path / name / "draft", ExportSettings())
    other = make_tokenizer()
    fields = json.loads(other.backend_tokenizer.to_str())
    ids = fields["model"]["vocab"]
    ids["e"], ids["f"] = ids["f"], ids["e"]
    other = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(fields)))
    draft, target = make(tmp_path / "trained"), make(tmp_path / "target")
    other.save_pretrained(draft)
    with pytest.raises(UserError, match=r"id 69 is 'e' and 'f'"):
        run_export(draft, target)
    assert not (tmp_path / "draft").exists()


def test_a_report_becomes_the_profile_of_its_recommended_greedy_row() -> None:
    other = [decoding("adaspec", 0.0, 8, 2.0, recommended=False), decoding("adaspec", 1.0, 9, 3.0, same=None)]
    measured = export_profile(changed(decoding=[*FULL["decoding"], *other]), "adaspec")
    assert (measured["best_draft_length"], measured["speedup"]) == (2, 1.62)
    assert "best_draft_length" not in export_profile(FULL, "undistilled")
    sampled = [decoding("adaspec", temperature, 4, 1.5, same=None) for temperature in (0.7, 1.0)]
    assert export_profile({"drafts": [], "decoding": sampled}, "adaspec")["conditions"]["temperature"] == 0.7


def test_the_card_names_a_target_of_the_hub_the_recipe_and_the_dropped_rows_but_no_text_of_them(tmp_path) -> None:
    settings = tiny_settings(tmp_path, target=TargetSettings(kind="as_is", model="someone/Model-1B@main"))
    notes = ["train: 2 rows without a prompt dropped (row 3: a secret)", "columns that are not read: 'topic'"]
    run: Any = SimpleNamespace(settings=settings, examples=range(7), as_it_is=True, corpus=SimpleNamespace(notes=notes))
    facts = training_facts(run, "distillspec")
    models = make(tmp_path / "trained"), make(tmp_path / "target")
    folder = export_draft(*models, tmp_path / "draft", ExportSettings(), about=facts)
    card, profile = ((folder / name).read_text() for name in ("README.md", "speculation_profile.json"))
    assert yaml.safe_load(card.split("---")[1])["base_model"] == "someone/Model-1B"
    for text in ("# Draft model for someone/Model-1B\n", "vllm serve someone/Model-1B", ": texts 7, max_length 256"):
        assert text in card
    assert "- train: 2 rows without a prompt dropped\n" in card
    assert "secret" not in card + profile


def test_an_export_is_complete_before_it_is_measured_and_tells_the_best_length_after(tmp_path) -> None:
    """The draft is a plain model for a target of one layer, from which no head could take three states."""
    draft, target = make(tmp_path / "trained", "llama", 280), make(tmp_path / "target", num_hidden_layers=1)
    folder = run_export(draft, target)
    readme, path, weights = (folder / name for name in ("README.md", "speculation_profile.json", "model.safetensors"))
    card, before, made = readme.read_text(), json.loads(path.read_text()), weights.stat().st_mtime_ns
    for text in ("Nothing was measured yet", f'"num_speculative_tokens": {DRAFTED}', "280 to 287 are padding"):
        assert text in card
    assert f"# Draft model for {tmp_path.name}\n" in card  # of a local path no more than the last name
    assert (before["measured"], before["num_speculative_tokens"], before["export"]["name"]) == ({}, 4, "adaspec")
    assert "4 tokens a round, a length that was not measured" in card
    path.write_text(json.dumps(before | {"served": [{"pays": "Under load, vllm: it pays"}, {}], "round_costs": {}}))
    for _ in range(2):
        add_measurements(folder, FULL, "adaspec")
    assert json.loads((folder / "generation_config.json").read_text())["num_assistant_tokens"] == 2
    assert weights.stat().st_mtime_ns == made
    after, card = json.loads(path.read_text()), readme.read_text()
    assert (after["measured"]["speedup"], after["round_costs"]) == (1.62, {})
    assert after["weights"] == before["weights"]
    assert exported_facts(folder)["length"] == 2
    line = card.split("--speculative-config '")[1].split("'")[0]
    assert json.loads(line) == {"method": "draft_model", "model": str(folder), "num_speculative_tokens": 2}
    for text in (
        "**1.62 times**", "assistant_model=draft", "--speculative-algorithm STANDALONE",
        "--speculative-num-steps 2", "--speculative-num-draft-tokens 3", "| 1 | 0.910 | 0.920 |",
        "2 tokens a round, the shortest length that was as fast as the fastest one in draftsmith's own decoder",
        "\n\nUnder load, vllm: it pays\n",
    ):  # fmt: skip
        assert text in card
    busy = [row | {"cpu_share": 0.5, "prompts": 12} for row in FULL["decoding"]]
    for rows, told in (
        (busy, "No speedup is given, since the machine was busy"),
        ([], "length: 2."),
    ):
        add_measurements(folder, changed(decoding=rows), "adaspec")
        card = readme.read_text()
        assert told in card
        assert not re.search(r"1\.62|\*\*.* times\*\*", card)
    add_measurements(folder, changed(decoding=[]), "adaspec")  # decoding was not measured
    assert (exported_facts(folder)["length"], "speedup" in json.loads(path.read_text())["measured"]) == (2, False)
