"""Drafts from settings to saved weights: each one learns, is continued after a kill, and is made once; those cut from a target."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from families import NEEDED, build_tiny, in_double, with_layers
from pairs import make_tokenizer
from safetensors.torch import load_file
from tiny_run import STAGES, begun, bench, check_killed_ends_alike, given, run_tiny, tiny_settings
from transformers import AutoModelForCausalLM

from decode.core.sampling import LogitsWarper
from decode.measure.acceptance import offline_alphas
from decode.models.heads.eagle import draft_ids
from decode.models.heads.files import load_head
from distill.config import DraftSettings, ExportSettings, Settings
from distill.config.models import BlockSettings, StudentSettings, TargetSettings, TrainingSettings
from distill.config.teacher import ResponseSettings
from distill.export.card import exported_facts
from distill.export.draft import export_draft
from distill.kinds.language_model import cut, kept_layers
from distill.networks.layers import decoder_layers, final_norm
from distill.networks.lm_head import LMHead, check_head
from distill.run import Run
from distill.stages import run_stages

STUDENTS = {
    "dspark": StudentSettings(kind="dspark", draft_vocab=64, block=BlockSettings(size=3, anchors=6, markov_rank=4)),
    "dflash2": StudentSettings(
        kind="dflash2", draft_vocab=64, block=BlockSettings(size=4, anchors=6, markov_rank=4, window=8)
    ),
    "eagle3": StudentSettings(kind="eagle3", unroll=2, draft_vocab=64),
}


def settings_of(kind: str, folder: Path) -> Settings:
    """EAGLE-3 with a top-k signal, mixed precision and micro-batches, Muon, and accepted tokens alone."""
    settings = tiny_settings(folder, student=STUDENTS[kind])
    settings.target.architecture.layers = 4
    settings.target.training.lr, settings.training.lr = 1e-2, 5e-4  # a target that says something
    settings.training.steps, settings.trainer.validate_every = 8, 4
    for draft in settings.drafts.values():
        draft.divergence = "dspark" if kind == "dspark" else "kl_tv"
    if kind == "eagle3":
        settings.teacher.signal, settings.teacher.signal_k = "topk", 16
        settings.trainer.accumulate, settings.trainer.precision = 2, "bf16-mixed"
        settings.training.optimizer = "muon"
        settings.drafts["accepted"] = DraftSettings(accepted_only=True)
    return settings


@pytest.fixture(scope="module", params=STUDENTS)
def run(request, tmp_path_factory) -> tuple[Settings, Any]:
    settings = begun(settings_of(request.param, tmp_path_factory.mktemp(request.param)))
    return settings, run_tiny(settings)[1]


def test_a_run_makes_every_head_and_learns(run) -> None:
    settings, made = run
    first = load_head(made.path("initial")).state_dict()
    assert len(load_head(made.path("initial")).draft_ids()) == 64
    for stage in settings.drafts:
        head, history = load_head(made.path(stage)), made.record(stage).history
        weights = head.state_dict()
        assert {n for n in first if torch.equal(weights[n], first[n])} <= {"d2t", "t2d"}, stage
        if settings.student.draft.method == "block":  # an EAGLE-3 head from the target's layer has little to learn here
            assert history[-1]["loss"] < history[0]["loss"], stage
            assert {"alpha", "alpha_2", "alpha_3"} <= history[-1].keys()
            assert "alpha_4" not in history[-1]  # a block drafts three tokens, the likeliest at any temperature
            kept = np.cumprod([history[-1][f"likeliest{i}"] for i in ("", "_2", "_3")])
            assert history[-1]["accepted_length"] == pytest.approx(1 + kept.sum())
            assert {window for window, _ in head.kinds} == {settings.student.block.window}
    plain, chosen = (made.record(stage).account for stage in ("distillspec", "adaspec"))
    assert plain["selected_tokens"] == plain["teacher_tokens"] == chosen["teacher_tokens"]
    assert 0 < chosen["selected_tokens"] < 0.5 * settings.student.steps * chosen["teacher_tokens"]
    assert run_tiny(settings)[0] == []  # nothing has changed


def test_a_killed_training_ends_with_the_weights_of_an_undisturbed_one(run, tmp_path) -> None:
    """Of AdaSPEC, whose reference a later stage of the same process has read, and of accepted tokens alone."""
    check_killed_ends_alike(run[0], tmp_path, {"accepted": 7} if "accepted" in run[0].drafts else {"adaspec": 6})


def test_another_run_goes_on_from_the_trained_head(run, tmp_path) -> None:
    settings, made = run
    student = replace(settings.student, model=str(made.path("distillspec")))
    target = TargetSettings(kind="as_is", model=str(made.path("target")))
    again, told = bench(replace(settings, output_dir=str(tmp_path), student=student, target=target))
    run_stages(again, only=("target", "initial"))
    first, last = (load_head(path).state_dict() for path in (again.path("initial"), made.path("distillspec")))
    assert all(torch.equal(value, last[key]) for key, value in first.items())
    assert "starts from the head in" in told.getvalue()


@NEEDED
def test_a_target_s_layer_is_tuned_and_learns(tmp_path, monkeypatch) -> None:
    tokenizer, folder = make_tokenizer(), tmp_path / "given"
    with_layers(folder, monkeypatch, "Mellum", vocab_size=len(tokenizer), max_position_embeddings=256)
    target, student = given(folder, tokenizer), StudentSettings(kind="mtp")
    settings = tiny_settings(tmp_path, target=target, student=student, drafts={"distillspec": DraftSettings()})
    settings.data.max_length, settings.data.overlong = 96, "cut"
    settings.training.lr, settings.trainer.validate_every = 1e-2, 6
    settings.teacher.responses = ResponseSettings(source="target", max_new_tokens=16)
    _, made, _ = run_tiny(settings)
    history = made.draft_record("distillspec").history
    assert history[-1]["accepted_length"] > history[0]["accepted_length"]
    assert run_tiny(settings)[0] == []


@pytest.mark.parametrize("family", ["llama-tied", "gemma3", "qwen2-sliding", "phi", "gpt_neox", "gpt2", "opt"])
def test_a_cut_draft_is_the_target_with_the_other_layers_passed_over(family: str, tmp_path) -> None:
    model = build_tiny(family, dtype=torch.float64, **{"n_layer" if family == "gpt2" else "num_hidden_layers": 4})
    draft, ids = in_double(cut(in_double(model), [1, 3])), torch.arange(2, 12)[None]  # longer than the sliding windows
    check_head(draft, LMHead(draft))
    assert draft.config.get_text_config().num_hidden_layers == 2

    def pass_over(layer: object, args: tuple, kwargs: dict, output: object) -> object:
        state = args[0] if args else kwargs["hidden_states"]
        return (state, *output[1:]) if isinstance(output, tuple) else state

    whole = model(input_ids=ids, use_cache=False).logits
    hooks = [decoder_layers(model)[i].register_forward_hook(pass_over, with_kwargs=True) for i in (0, 2)]
    wanted = model(input_ids=ids, use_cache=False).logits
    assert torch.allclose(draft(input_ids=ids, use_cache=False).logits, wanted, atol=1e-5)
    assert not torch.allclose(wanted, whole, atol=1e-2)
    for hook in hooks:
        hook.remove()
    next(iter(decoder_layers(draft).parameters())).data.fill_(0)  # the draft's own, not the target's
    assert torch.equal(model(input_ids=ids, use_cache=False).logits, whole)
    draft.save_pretrained(tmp_path)
    assert len(decoder_layers(AutoModelForCausalLM.from_pretrained(tmp_path))) == 2
    assert final_norm(draft) is not final_norm(model)


@pytest.mark.parametrize("kind", ["cut", "as_is"])
def test_a_language_model_that_drafts_some_tokens_learns_these_and_says_so_in_its_file(kind: str, tmp_path) -> None:
    settings = begun(tiny_settings(tmp_path, student=StudentSettings(kind="cut", draft_vocab=64)))
    settings.teacher.signal = "topk" if kind == "cut" else "hidden"
    if kind == "as_is":
        words = Run(settings).tokenizer
        shape = {"max_position_embeddings": 256, "hidden_size": 16, "num_hidden_layers": 1}
        given(tmp_path / "draft", build_tiny("llama", seed=3, vocab_size=len(words) + 4, **shape), words)
        settings.student = StudentSettings(kind="as_is", model=str(tmp_path / "draft"), draft_vocab=64)
    _, run, printed = run_tiny(settings)
    assert "64 tokens drafted, " in printed
    target, *made = map(AutoModelForCausalLM.from_pretrained, map(run.path, STAGES))
    ids = draft_ids(made[0])
    assert all(ids.equal(draft_ids(each)) for each in made)
    assert ids.tolist() == sorted({*ids.tolist()})
    text = torch.tensor([run.corpus.test[0]["input_ids"][:20]])
    p, q = (model(input_ids=text).logits[0, 3:19].softmax(-1) for model in (target, made[1]))
    q = torch.zeros_like(p).index_copy(1, ids, q[:, ids] / q[:, ids].sum(-1, keepdim=True))
    alphas = offline_alphas(target, {"draft": made[1]}, [(text[0].tolist(), 4)], LogitsWarper(1.0))["draft"]
    torch.testing.assert_close(torch.tensor(alphas[0].texts[0]).float(), torch.minimum(p, q).sum(-1).detach())
    losses = [row["loss"] for row in run.record("distillspec").history]
    assert losses[-1] < losses[0]
    with pytest.warns(UserWarning, match="as it was trained"):
        folder = export_draft(run.path("adaspec"), run.path("target"), tmp_path / "export", ExportSettings())
    assert draft_ids(AutoModelForCausalLM.from_pretrained(folder)).equal(ids)
    assert exported_facts(folder)["unserved"].keys() == {"vllm", "sglang", "llama.cpp"}
    assert "It drafts 64 of the " in (folder / "README.md").read_text()


def test_a_cut_draft_is_distilled_with_or_without_training_of_its_own(tmp_path) -> None:
    settings = tiny_settings(tmp_path, student=StudentSettings(kind="cut"))
    ran, run, _ = run_tiny(settings)
    assert ran == STAGES
    spread = {1: [0], 2: [0, 7], 3: [0, 4, 7], 4: [0, 2, 5, 7]}
    assert [kept_layers(n, 8) for n in (*spread, [1, 6])] == [*spread.values(), [1, 6]]
    target, initial = (load_file(run.path(stage) / "model.safetensors") for stage in ("target", "initial"))
    kept = [name for name in initial if "layers.1." not in name]
    assert all(torch.equal(initial[name], target[name]) for name in kept)
    assert run.record("initial").history == []
    settings.student.training = TrainingSettings(steps=2, batch_size=4)
    ran, run, _ = run_tiny(settings)
    assert ran == ["initial", "distillspec", "adaspec"]
    assert [row["step"] for row in run.record("initial").history] == [0, 2]
