"""A target's own next-token layers are fine-tuned on its answers: a run from its settings to its export."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from mtp_targets import NEEDED, mtp_settings, with_layers
from pairs import make_pair, make_tokenizer
from rich.console import Console
from safetensors.torch import load_file
from tiny_run import bench, run_tiny

from decode.errors import UserError
from decode.loop import decode
from decode.method_options import MethodOptions
from decode.methods import MethodInputs, build
from decode.models.choose_runner import open_draft_runner, open_runner
from decode.models.head_files import load_head
from decode.models.loading import load_model
from decode.models.mtp import load_mtp
from decode.sampling import LogitsWarper, TorchRng
from distill.config.drafts import DraftSettings
from distill.config.run import Settings
from distill.dry_run import shrink
from distill.modules import HeadModule
from distill.pipeline import run_pipeline
from distill.stages import run_of
from distill.teacher.signals import TargetSignal, Teacher

pytestmark = NEEDED


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Settings]:
    """Settings of a finished run."""
    settings = mtp_settings(tmp_path_factory.mktemp("mtp"))
    run_pipeline(settings, Console(file=io.StringIO()))
    return settings


def test_tuned_layers_are_accepted_more_often(run: Settings) -> None:
    report = json.loads((run_of(run).folder / "report.json").read_text())
    alpha = {draft["name"]: draft["offline_alpha"] for draft in report["drafts"]}
    assert alpha.keys() == {"untuned", "distillspec", "adaspec"}
    assert min(alpha["distillspec"], alpha["adaspec"]) > alpha["untuned"] + 0.05
    assert {row["draft"] for row in report["decoding"]} >= alpha.keys()  # the untuned ones are decoded with too
    assert all(row["identical_to_target"] for row in report["decoding"] if row["temperature"] == 0)
    history = run_of(run).record("distillspec").history  # type: ignore[union-attr]
    assert history[-1]["accepted_length"] > history[0]["accepted_length"] + 0.05
    assert run_tiny(run)[0] == []


def test_the_exported_layers_draft_as_those_that_were_trained(run: Settings) -> None:
    folder = run_of(run)
    target = load_model(folder.target, device="cpu", dtype="float32")
    texts, warp = [], LogitsWarper(1.0)
    for path in (folder.path(folder.chosen("best")), folder.export):
        runner = open_draft_runner(load_head(path, target), target)
        system = build("eagle", MethodInputs(open_runner(target), warp, runner, options=MethodOptions(draft_length=3)))
        made = decode(open_runner(target), system, warp, [5, 9, 3, 7], max_new_tokens=24, rng=TorchRng(3))
        texts.append((made.ids, made.trace.drafted, made.trace.accepted))
    assert texts[0] == texts[1]
    given = load_file(folder.target / "model.safetensors")
    tuned = load_file(folder.export / "model.safetensors")
    assert tuned.keys() == {name for name in given if name.startswith("mtp.")}
    assert not any(torch.equal(tuned[name], given[name]) for name in tuned if name.endswith("proj.weight"))
    config = json.loads((folder.export / "config.json").read_text())
    assert config["model_type"] == "mellum"
    assert "_name_or_path" not in config
    card = (folder.export / "README.md").read_text()
    assert "Tuned next-token layers (MTP)" in card
    assert "--method eagle --prompt" in card


def test_gradients_reach_the_layers_alone(run: Settings) -> None:
    """Steps are weighted by 0.6^(k − 1); the target's embedding and output head stay as they are."""
    made, _ = bench(run)
    target = load_model(run_of(run).target, device="cpu", dtype="float32")
    head = load_mtp(target).train()
    rows = replace(made.examples, signals={}, tokens={})
    source = Teacher(target, TargetSignal(), head)
    module = HeadModule(head, run.training, 1, settings=run.student, target=source)
    found = module(rows.batch(torch.arange(3).numpy()))
    assert [draft.weight for draft, _ in found] == pytest.approx([1, 0.6, 0.36])
    assert [name for name, _ in module.named_parameters()] == [f"model.{name}" for name, _ in head.named_parameters()]
    sum(draft.weight * rows.total for draft, rows in found).backward()
    experts = ("experts", "gate.weight")  # of some experts no row may be
    assert all(w.grad is not None and w.grad.any() for name, w in head.named_parameters() if not name.endswith(experts))
    assert not any(weight.grad is not None or weight.requires_grad for weight in target.parameters())


def test_several_layers_are_trained_for_one_token_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mixed precision, accepted tokens alone, the target's own states beside it, on texts of the draft's own."""
    settings = mtp_settings(tmp_path)
    with_layers(tmp_path / "given", monkeypatch, "DeepSeek-V3", 2, vocab_size=280, max_position_embeddings=256)
    settings.drafts = [DraftSettings(name="accepted", accepted_only=True, on_policy=0.5)]
    settings.student.unroll = 5
    settings.training.steps, settings.trainer.precision, settings.teacher.signal = 4, "bf16-mixed", "online"
    _, folder, _ = run_tiny(settings)
    last = folder.record("accepted").history[-1]  # type: ignore[union-attr]
    assert "alpha_2" in last
    assert "alpha_3" not in last
    tuned = load_file(folder.path("accepted") / "model.safetensors")
    assert {name.split(".")[2] for name in tuned} == {"2", "3"}
    bias = [name for name in tuned if name.endswith("e_score_correction_bias")]
    given = load_file(tmp_path / "given" / "model.safetensors")
    assert bias
    assert all(torch.equal(tuned[name], given[name]) for name in bias)  # the router's state is no weight


def test_what_cannot_be_tuned_is_refused_by_name(tmp_path: Path, tiny) -> None:  # type: ignore[no-untyped-def]
    settings = mtp_settings(tmp_path)
    with pytest.raises(UserError, match="a target made for a dry run has no next-token layers"):
        shrink(settings)
    make_pair(tiny)[0].save_pretrained(tmp_path / "plain")
    make_tokenizer().save_pretrained(tmp_path / "plain")
    settings.target.model = str(tmp_path / "plain")
    with pytest.raises(UserError, match=r"layers \(MTP\) of LlamaForCausalLM \(llama\) are not loaded"):
        run_tiny(settings)
    settings.target.round_to = "float16"
    with pytest.raises(UserError, match=r"target.kind is as_is, target.round_to float16, whose files have none"):
        settings.validate()
    settings.student.draft_vocab = 64
    with pytest.raises(UserError, match=r"student.draft_vocab is 64, and mtp drafts all tokens"):
        settings.validate()
