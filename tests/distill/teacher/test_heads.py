"""Feature heads: the training-time test, selection on the cross-entropy, the stages of a run, resuming, the export."""

from __future__ import annotations

import copy
import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from pairs import make_tokenizer
from plain_logits import head_logits
from safetensors.torch import load_file, save_file
from some_rows import every_token
from tiny_run import begun, bench, check_killed_ends_alike, run_tiny, tiny_settings

from decode.loop import decode
from decode.method_options import MethodOptions
from decode.methods import MethodInputs, build
from decode.models.choose_runner import open_runner
from decode.models.head_files import load_head
from decode.models.head_runner import HeadRunner
from decode.models.heads import FeatureHead, head_config
from decode.models.loading import load_model
from decode.sampling import LogitsWarper, TorchRng
from distill.config.drafts import DraftSettings
from distill.config.run import ExportSettings
from distill.config.training import StudentSettings, TrainingSettings
from distill.data.batches import TokenDataset, example_of_rows, label_mask
from distill.export.head import check_files, export_head, write_head
from distill.losses.chunked import LossRequest, fused_loss
from distill.losses.divergences import Divergence
from distill.losses.objective import Objective
from distill.models.layers import start_from_target
from distill.modules import HeadModule
from distill.run_stages import frequent, run_stages
from distill.stages import run_of
from distill.teacher.drafting import drafting_steps
from distill.teacher.signals import TargetSignal, Teacher

STAGES = ["target", "initial", "distillspec", "adaspec", "kl-tv"]


def head_settings(folder: Path, kind: str, **changes):  # type: ignore[no-untyped-def]
    settings = tiny_settings(folder, **changes)
    settings.target.architecture.layers = 4
    settings.student = StudentSettings(kind=kind, unroll=2, draft_vocab=64 if kind == "eagle3" else None)  # type: ignore[arg-type]
    settings.drafts.append(DraftSettings(name="kl-tv", divergence="kl_tv"))
    return settings


@pytest.fixture(scope="module", params=["eagle", "eagle3"])
def run(request, tmp_path_factory):  # type: ignore[no-untyped-def]
    """A finished run of heads, with its settings."""
    settings = head_settings(tmp_path_factory.mktemp(request.param), request.param)
    run_tiny(begun(settings))
    return settings, run_of(settings)


def rows_and_source(settings, run, head):  # type: ignore[no-untyped-def]
    made, _ = bench(settings)
    target = load_model(run.target, device="cpu", dtype="float32")
    return replace(made.examples, signals={}, tokens={}), Teacher(target, TargetSignal(), head), target


def test_a_run_makes_every_head_and_learns(run) -> None:
    settings, folder = run
    heads = {stage: load_head(folder.path(stage)) for stage in STAGES[1:]}
    first = heads["initial"].state_dict()
    for stage in STAGES[2:]:
        weights = heads[stage].state_dict()
        assert any(not torch.equal(weights[name], first[name]) for name in first), stage
        history = folder.record(stage).history
        assert history[-1]["loss"] < history[0]["loss"], stage
    assert not torch.equal(heads["adaspec"].fc.weight, heads["distillspec"].fc.weight)
    account = {stage: folder.record(stage).account for stage in STAGES[2:]}
    assert account["adaspec"]["selected_tokens"] < account["adaspec"]["teacher_tokens"]
    assert account["distillspec"]["selected_tokens"] == account["distillspec"]["teacher_tokens"]
    assert account["adaspec"]["cumulative_teacher_tokens"] > account["adaspec"]["teacher_tokens"]
    assert run_tiny(settings)[0] == []  # nothing has changed


def test_training_sees_what_decoding_will_draft(run) -> None:
    """The rows of every drafting step are what the head gives by teacher forcing, with the target's true features."""
    settings, folder = run
    head = load_head(folder.path("distillspec"))
    rows, source, target = rows_and_source(settings, folder, head)
    example = rows.batch(torch.arange(3).numpy())
    mask = label_mask(example["labels"])
    for step, drafted in enumerate(drafting_steps(head, source, example, 3)):
        seen, asked = [], mask.clone()
        asked[:, : step + 1] = False
        found = fused_loss(drafted.hidden, drafted.head, drafted.target, LossRequest(Divergence(), mass=drafted.mass))
        for row in range(3):
            ids = example["input_ids"][row].tolist()
            places = asked[row].nonzero()[:, 0].tolist()
            q = head_logits(head, target, ids, places[0] + 1, step + 1).softmax(-1)
            with torch.no_grad():
                p = target(input_ids=torch.tensor([ids])).logits[0].softmax(-1)
            seen += [torch.minimum(p[place], q[place - places[0]]).sum() for place in places]
        torch.testing.assert_close(found.alpha, torch.stack(seen), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("all_tokens", [False, True])
def test_a_chain_goes_on_from_the_tokens_that_are_accepted(
    run, monkeypatch: pytest.MonkeyPatch, all_tokens: bool
) -> None:
    """Every second token is accepted, by a coin just below its acceptance. What follows is as if all had been."""
    settings, folder = run
    head = load_head(folder.path("distillspec"))
    rows, source, _ = rows_and_source(settings, folder, head)
    batch = (every_token(rows) if all_tokens else rows).batch(torch.arange(4).numpy())
    eagle = replace(settings.student, unroll=4)
    objective = Objective(Divergence("kl_tv"), accepted_only=True)
    module = HeadModule(head, TrainingSettings(), 1, settings=eagle, target=source, objective=objective)
    coins = lambda alpha: alpha + torch.where(torch.arange(len(alpha)) % 2 == 0, -1e-3, 1e-3)  # noqa: E731
    monkeypatch.setattr(torch, "rand_like", coins)
    found = [drafted for drafted, _ in module.eval()(batch)]
    monkeypatch.undo()
    sequence = example_of_rows(batch, label_mask(batch["labels"]))
    whole = list(drafting_steps(head, source, batch, 4, learnable_only=True))
    assert torch.equal(found[0].rows, whole[0].rows)
    for before, now, all_of_it in zip(found, found[1:], whole[1:]):
        following = {row + 1 for row in before.rows[::2].tolist() if sequence[row : row + 2].unique().numel() == 1}
        place = [index for index, row in enumerate(all_of_it.rows.tolist()) if row in following]
        assert place
        assert torch.equal(now.rows, all_of_it.rows[place])
        torch.testing.assert_close(now.hidden, all_of_it.hidden[place])
    assert len(found[3].rows) < len(found[2].rows) < len(found[1].rows)
    assert len({drafted.weight for drafted in found}) == 1  # a row counts by being reached


def test_a_target_beside_the_head_trains_the_same_one(run, tmp_path: Path) -> None:
    settings, folder = run
    again = copy.deepcopy(settings)
    again.name, again.output_dir = "online", str(tmp_path)
    again.teacher.signal, again.target.devices = "online", ["cpu"]
    run_tiny(again)
    for stage in STAGES[2:]:
        kept, beside = (each.record(stage).history for each in (folder, run_of(again)))
        # the first steps are the same to rounding; Adam and the selection make more of a last digit in later ones
        assert kept[0]["loss"] == pytest.approx(beside[0]["loss"], rel=1e-4), stage
        assert kept[-1]["loss"] == pytest.approx(beside[-1]["loss"], rel=0.02), stage


def test_a_killed_training_ends_with_the_weights_of_an_undisturbed_one(run, tmp_path: Path) -> None:
    check_killed_ends_alike(run[0], tmp_path, {"distillspec": 7, "adaspec": 9})


def test_the_exported_head_decodes_like_the_trained_one(run, tmp_path: Path) -> None:
    settings, folder = run
    out = export_head(
        folder.path("adaspec"), folder.target, tmp_path / "head", {"best_draft_length": 3}, ExportSettings()
    )
    target = load_model(folder.target, device="cpu", dtype="float32")
    runner = open_runner(target)
    texts = []
    for path in (folder.path("adaspec"), out):
        head = HeadRunner(load_head(path, target), target)
        for method in ("eagle", "eagle-tree"):
            options = MethodOptions(draft_length=3, tree_width=3, tree_nodes=8)
            system = build(method, MethodInputs(runner, LogitsWarper(1.0), head, options=options))
            made = decode(runner, system, LogitsWarper(1.0), [5, 9, 3, 7], max_new_tokens=24, rng=TorchRng(3))
            texts.append((method, made.ids, made.trace.drafted, made.trace.accepted))
    assert texts[:2] == texts[2:]
    config = json.loads((out / "config.json").read_text())
    assert config["num_assistant_tokens"] == 3
    assert config["torch_dtype"] == "float32"
    if settings.student.kind == "eagle3":
        assert config["architectures"] == ["LlamaForCausalLMEagle3"]
        assert (config["vocab_size"], config["draft_vocab_size"]) == (target.config.vocab_size, 64)
        assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [
            tap - 1 for tap in config["eagle_aux_hidden_state_layer_ids"]
        ]
        state = load_file(out / "model.safetensors")
        assert (state["d2t"].dtype, state["t2d"].dtype) == (torch.int64, torch.bool)
        assert state["midlayer.self_attn.q_proj.weight"].shape[1] == 2 * config["hidden_size"]
    assert "Measured" in (out / "README.md").read_text()


def test_a_head_over_the_whole_vocabulary_is_exported_as_engines_load_it(tmp_path: Path) -> None:
    settings = head_settings(tmp_path, "eagle3")
    settings.target.training = settings.student.training = TrainingSettings(steps=1, batch_size=4)
    settings.student.draft_vocab = None
    made, _ = bench(settings)
    assert run_stages(made, ("target", "initial")) == ["target", "initial"]
    folder = made.run
    out = export_head(
        folder.path("initial"), folder.target, tmp_path / "head", {"best_draft_length": 3}, ExportSettings()
    )
    state, config = load_file(out / "model.safetensors"), json.loads((out / "config.json").read_text())
    assert {"d2t", "t2d"}.isdisjoint(state)
    assert "bias" not in config
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 2, 3]
    assert json.loads((out / "tokenizer_config.json").read_text())["tokenizer_class"] == "PreTrainedTokenizerFast"
    head = load_head(out, load_model(folder.target, device="cpu", dtype="float32"))
    assert head.draft_ids() is None
    for name, tensors in (("bias", {}), ("d2t, t2d", {"d2t": head.d2t, "t2d": head.t2d})):
        (out / "config.json").write_text(json.dumps(config | ({} if tensors else {"bias": True})))
        save_file(state | tensors, out / "model.safetensors")
        with pytest.raises(RuntimeError, match=name):
            check_files(out)
    (out / "config.json").write_text(json.dumps({k: v for k, v in config.items() if k != "rms_norm_eps"}))
    with pytest.raises(RuntimeError, match="rms_norm_eps"):
        check_files(out)


WIDE = {  # the width of a head is not the model's width over its heads
    "qwen3": {"hidden_size": 60, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32},
    "llama": {"hidden_size": 90, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64},
    "gpt2": {"n_embd": 30, "n_head": 2},  # 15, which cannot be rotated
}


@pytest.mark.parametrize("version", [1, 3])
@pytest.mark.parametrize(("family", "head_dim"), [("qwen3", 32), ("llama", 64), ("gpt2", 16)])
def test_a_head_takes_its_targets_head_dim(family: str, head_dim: int, version: int, tiny, tmp_path) -> None:
    layers = {"n_layer": 4} if family == "gpt2" else {"num_hidden_layers": 4}
    target = tiny(family, **WIDE[family], **layers)
    head = FeatureHead(head_config(target.config, version, draft_vocab=24)).eval()
    head.set_vocabulary(torch.arange(24))
    assert head.config.head_dim == head_dim
    if version == 3:
        with torch.no_grad():
            left = start_from_target(head, target)
        if family != "gpt2":
            assert left == []
            for name in ("q_proj", "k_proj", "v_proj"):  # attention reads the embedding before the state
                weight, own = (getattr(of.self_attn, name).weight for of in (target.model.layers[-1], head.layer))
                assert torch.equal(own[:, weight.shape[1] :], weight)
    write_head(head, tmp_path, make_tokenizer(), 3, torch.float32)
    check_files(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["head_dim"] == head_dim
    runner, warp = open_runner(target), LogitsWarper(0.0)
    inputs = MethodInputs(runner, warp, HeadRunner(load_head(tmp_path, target), target))
    ids = decode(runner, build("eagle-tree", inputs), warp, [5, 9, 3, 7], max_new_tokens=12).ids
    wanted = target.generate(torch.tensor([[5, 9, 3, 7]]), do_sample=False, max_new_tokens=12, eos_token_id=-1)
    assert ids == wanted[0].tolist()


def test_the_reduced_vocabulary_is_the_most_frequent_label_tokens() -> None:
    rows = TokenDataset.from_lists([[1, 2, 3, 3], [4, 3, 2, 9]], [[-100, 2, 3, 3], [-100, 3, 2, 9]])
    ids, share = frequent(rows, 3, 12)
    assert (ids.tolist(), share) == ([2, 3, 9], 1.0)
    assert frequent(rows, 2, 12)[1] == 5 / 6
    assert frequent(rows, 5, 12)[0].tolist() == [0, 1, 2, 3, 9]  # never seen: the lowest ids


def test_unrolled_steps_are_a_chain_over_the_heads_own_states(tiny) -> None:
    """Step s at index t equals a forward that was given the head's own states of the s tokens before."""
    target = tiny("llama", num_hidden_layers=4)
    head = FeatureHead(head_config(target.config, 3)).eval()
    generator = torch.Generator().manual_seed(0)
    embeds = torch.randn(1, 7, 32, generator=generator)
    features = torch.randn(1, 7, 96, generator=generator)
    with torch.no_grad():
        steps = list(head.unroll(embeds, features, 3))
        for t in (2, 4):  # one row alone, its chain appended to the true pairs
            hidden, keys = head.fuse(features)[:, : t + 1], embeds[:, : t + 1]
            for step in range(3):
                state = next(iter(_plain(head, keys, hidden)))[:, -1:]
                torch.testing.assert_close(steps[step][:, t], state[:, 0], rtol=1e-4, atol=1e-5)
                hidden = torch.cat([hidden, state], 1)
                keys = embeds[:, : t + 2 + step]


@pytest.mark.parametrize("version", [1, 3])
def test_rows_drafted_together_are_those_drafted_alone(tiny, version: int) -> None:
    """Only the rows that are asked for, packed, of texts of several lengths: states and gradients of one at a time."""
    target = tiny("llama", num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2)
    head = FeatureHead(head_config(target.config, version)).double()
    generator = torch.Generator().manual_seed(0)
    rows = torch.tensor([[0, 0, 1, 1, 1, 0, 0, 0], [0, 1, 0, 0, 0, 1, 0, 0], [0] * 8]).bool()
    embeds = torch.randn(3, 8, 32, generator=generator, dtype=torch.float64)
    features = torch.randn(3, 8, head.feature_width, generator=generator, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(3, int(rows.sum()), 32, generator=generator, dtype=torch.float64)
    found = torch.stack(list(head.unroll(embeds, features, 3, rows)))
    (gradient,) = torch.autograd.grad((found * weights).sum(), features, retain_graph=True)
    alone = []
    for text, place in rows.nonzero().tolist():  # everything behind the chain's last token is cut off
        end = place + 3
        whole = head.unroll(embeds[text : text + 1, :end], features[text : text + 1, :end], 3)
        alone.append(torch.stack([states[0, place] for states in whole]))
    wanted = torch.stack(alone, 1)
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(gradient, torch.autograd.grad((wanted * weights).sum(), features)[0])


def _plain(head: FeatureHead, embeds: torch.Tensor, hidden: torch.Tensor):  # type: ignore[no-untyped-def]
    """One causal forward on states that need no fusion."""
    fuse, head.fuse = head.fuse, lambda states: states  # type: ignore[method-assign]
    try:
        yield from head.unroll(embeds, hidden, 1)
    finally:
        head.fuse = fuse  # type: ignore[method-assign]


def test_heads_are_trained_with_everything_that_drafts_are(tmp_path: Path) -> None:
    """Top-k signals, another divergence, Muon, bfloat16, a selection over accumulated batches."""
    settings = head_settings(tmp_path, "eagle3")
    teacher, plain, wide = settings.teacher, *settings.drafts[:2]
    plain.divergence, wide.scope, wide.divergence = "lk_hybrid", "global", "kl_tv"
    teacher.signal, teacher.signal_k, settings.training.optimizer = "topk", 16, "muon"
    settings.trainer.accumulate, settings.trainer.precision = 2, "bf16-mixed"
    _, folder, printed = run_tiny(begun(settings))
    assert re.search(r"the target's signal \(topk\): [\d.]+ MB", printed)
    account = folder.record("adaspec").account
    assert 0 < account["selected_tokens"] < account["teacher_tokens"]
    kept = np.load(folder.work / "signals" / "target_topk_train.npy")
    assert kept.shape == (bench(settings)[0].examples.label_count, 2, 16)
    for stage in ("distillspec", "adaspec"):
        history = folder.record(stage).history
        assert history[-1]["loss"] < history[0]["loss"], stage


def test_a_head_writes_texts_of_its_own(tmp_path: Path) -> None:
    drafts = [DraftSettings(name="accepted", accepted_only=True, on_policy=1.0)]
    settings = tiny_settings(tmp_path, drafts=drafts, student=StudentSettings(kind="eagle3", unroll=2, draft_vocab=64))
    settings.target.architecture.layers, settings.training.steps = 4, 8
    settings.teacher.responses.max_new_tokens, settings.teacher.responses.refresh_every = 8, 6
    _, folder, _ = run_tiny(begun(settings))
    account = folder.record("accepted").account
    assert 0 < account["teacher_tokens"] <= 9 * account["examples"]  # of eight tokens and an end


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_a_head_of_some_tokens_starts_from_its_target_and_is_lossless(kind: str, tmp_path: Path) -> None:
    settings = head_settings(tmp_path, kind)
    settings.target.training = settings.student.training = TrainingSettings(steps=1, batch_size=4)
    settings.student.draft_vocab = 32
    made, _ = bench(settings)
    run_stages(made, ("target", "initial"))
    head = load_head(made.run.path("initial"))
    target = load_model(made.run.target, device="cpu", dtype="float32")
    assert len(head.draft_ids()) == 32
    out = export_head(
        made.run.path("initial"), made.run.target, tmp_path / "head", {"best_draft_length": 3}, ExportSettings()
    )
    if kind == "eagle":
        assert torch.load(out / "token_map.pt", weights_only=True) == head.draft_ids().tolist()
        assert "--speculative-token-map" in (out / "README.md").read_text()
    runner, warp = open_runner(target), LogitsWarper(0.0)
    texts = []
    for path in (made.run.path("initial"), out):  # a draft of some tokens alone leaves the output the target's
        inputs = MethodInputs(
            runner, warp, HeadRunner(load_head(path, target), target), options=MethodOptions(draft_length=3)
        )
        made_text = decode(runner, build("eagle", inputs), warp, [5, 9, 3, 7], max_new_tokens=12, rng=TorchRng(0))
        texts.append(made_text.ids)
    wanted = target.generate(torch.tensor([[5, 9, 3, 7]]), do_sample=False, max_new_tokens=12, eos_token_id=-1)
    assert texts == [wanted[0].tolist()] * 2
    if kind == "eagle3":
        assert torch.equal(head.lm_head.weight, target.lm_head.weight[head.draft_ids()])
        assert torch.equal(head.norm.weight, target.model.norm.weight)
        last, width = target.model.layers[-1], head.config.hidden_size
        assert torch.equal(head.layer.mlp.down_proj.weight, last.mlp.down_proj.weight)
        assert torch.equal(head.layer.self_attn.v_proj.weight[:, -width:], last.self_attn.v_proj.weight)
        assert torch.equal(head.fc.weight[:, -width:], torch.eye(width))
        assert not head.fc.weight[:, :-width].any()
