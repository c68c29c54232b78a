"""A target's own next-token layers draft what transformers drafts with them, exactly, and roll back."""

from pathlib import Path

import pytest
import torch
from architectures import ARCHITECTURES, build_architecture
from enumeration import Experiment
from families import NEEDED, published, with_layers, written
from greedy import generate, together
from plain_logits import after
from reading import on_host, watched
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForMultimodalLM, PreTrainedModel
from transformers.generation.candidate_generator import MTPCandidateGenerator
from transformers.modeling_layers import MtpModel

from decode.core.sampling import LogitsWarper, TorchRng
from decode.errors import UserError
from decode.loop import Method, decode
from decode.measure.benchmark import plan
from decode.methods import MethodInputs, build
from decode.models.check import open_draft_runner, open_runner
from decode.models.heads.files import head_kind, load_head, save_head
from decode.models.heads.mtp import MtpRunner, load_mtp
from decode.models.open import load_model
from decode.models.texts import teacher_forced
from decode.options import MethodOptions

pytestmark = NEEDED

PROMPT = [3, 17, 5, 9, 22, 31, 8]


def method(target: PreTrainedModel, length: int, temperature: float = 0.0) -> tuple[Method, LogitsWarper, MtpRunner]:
    runner = open_draft_runner(load_mtp(target), target)
    assert isinstance(runner, MtpRunner)
    warp = LogitsWarper(temperature)
    inputs = MethodInputs(open_runner(target), warp, runner, options=MethodOptions(draft_length=length))
    return build("eagle", inputs), warp, runner


KINDS = ["DeepSeek-V3", "Qwen3-Next"]


@pytest.fixture
def target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> PreTrainedModel:
    """Of the kind that the test names."""
    return with_layers(tmp_path, monkeypatch, kind, vocab_size=5)


@pytest.mark.parametrize("kind", ["DeepSeek-V3"])
def test_drafts_are_transformers_own(target: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = {}
    own = MTPCandidateGenerator.get_candidates

    def noted(self, input_ids, **given):
        found, logits = own(self, input_ids, **given)
        theirs[input_ids.shape[1]] = found[0, input_ids.shape[1] :].tolist()
        return found, logits

    monkeypatch.setattr(MTPCandidateGenerator, "get_candidates", noted)
    prompt = [i % 5 for i in PROMPT]
    text = generate(target, prompt, 40, use_mtp=True)
    ours = {}
    system, warp, _ = method(target, 1)
    watched(system.drafter, lambda requests, drafts: ours.update({len(requests[0].ids): on_host(drafts)[0].ids}))
    out = decode(open_runner(target), system, warp, prompt, max_new_tokens=40)
    assert out.ids == text
    shared = [at for at, drafted in theirs.items() if drafted and ours.get(at)]
    assert len(shared) > 20
    assert {at: ours[at] for at in shared} == {at: theirs[at][: len(ours[at])] for at in shared}
    assert sum(r.accepted for r in out.rounds) > 3


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_texts_are_generates(target: PreTrainedModel) -> None:
    """Alone and three at once."""
    prompts = [[i % 5 for i in PROMPT], [2, 0, 4], [1]]
    expected = [generate(target, prompt, 20) for prompt in prompts]
    for length in (2, 4):
        system, _, _ = method(target, length)
        found = together(open_runner(target), system, prompts, max_new_tokens=20)
        assert [text.ids for text in found] == expected
        assert max(r.drafted for text in found for r in text.rounds) == length
        assert sum(sum(r.accepted for r in text.rounds) for text in found) > 2


@pytest.mark.parametrize("kind", [*KINDS, "Mellum"])
def test_drafts_after_rollbacks_are_those_of_fresh_layers(target: PreTrainedModel) -> None:
    """Every drafted token was drawn from what teacher forcing gives after the same text, whatever was dropped before."""
    system, warp, runner = method(target, 3, temperature=1.0)
    rounds = []
    watched(system.drafter, lambda requests, d: rounds.append((list(requests[0].ids), on_host(d)[0].ids, d.probs)))
    prompt = [i % 5 for i in PROMPT]
    out = decode(open_runner(target), system, warp, prompt, max_new_tokens=30, rng=TorchRng(1))
    assert {0, 1} <= {r.accepted for r in out.rounds}
    for ids, drafted, probs in (made for made in rounds if made[1]):
        whole = [*ids, *drafted]
        (forced,) = teacher_forced(target, {"mtp": runner.model}, [(whole, len(ids))], depth=3)
        for depth, row in enumerate(probs[0, : len(drafted)]):
            torch.testing.assert_close(row[None], warp(forced.q["mtp"][depth][depth : depth + 1]), atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_sampled_texts_are_distributed_as_the_targets(target: PreTrainedModel) -> None:
    system, _, _ = method(target, 2)
    system.drafter.warp = warp = LogitsWarper(temperature=1.3, top_k=2)

    experiment = Experiment(open_runner(target), warp, [i % 5 for i in PROMPT], 3, forward=after(target))
    assert experiment.bias(system) < 1e-4  # routers and rotations compute in float32
    assert experiment.drafted == {0, 1, 2}
    experiment.tokens = 2
    watched(system.drafter, lambda requests, drafts: drafts.probs is not None and drafts.probs.fill_(1 / 5))
    assert experiment.bias(system) > 0.01


def test_targets_without_layers_and_methods_that_want_others_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A family whose layers transformers does not know, several of them, and a file that lacks those of its config."""
    with pytest.raises(UserError, match=r"MTP\) of DeepseekV3ForCausalLM .* 3 of them, expected one"):
        load_mtp(with_layers(tmp_path / "several", monkeypatch, "DeepSeek-V3", 3))
    with pytest.raises(UserError, match=r"MTP\) of LlamaForCausalLM .*num_mtp_layers"):
        load_mtp(build_architecture("Llama"))
    target = with_layers(tmp_path, monkeypatch, "Qwen3-Next")
    # trees and blocks want other heads, transformers' own generation wants a model
    methods = ["vanilla", "eagle", "eagle-tree", "hybrid-tree", "block", "generate-assistant"]
    assert [entry.method for entry in plan(methods, {"mtp": load_mtp(target)}, [0.0])] == ["vanilla", "eagle"]
    target.save_pretrained(tmp_path)  # which drops them
    with pytest.raises(UserError, match=r"MTP\) of Qwen3NextForCausalLM .* missing"):
        load_mtp(load_model(tmp_path, device="cpu", dtype="float32"))


def test_layers_beside_a_vision_tower_are_found(tmp_path: Path) -> None:
    """Qwen3.5's files hold a model with images, of which the language model alone is decoded."""
    settings = ARCHITECTURES["Qwen3-Next"][1]
    vision = {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16, "out_hidden_size": 32}
    config = AutoConfig.for_model("qwen3_5", text_config=settings | {"vocab_size": 16}, vision_config=vision)
    AutoModelForMultimodalLM.from_config(config).save_pretrained(tmp_path)
    target = load_model(tmp_path, device="cpu", dtype="float32")
    target.config.num_mtp_layers, target.config.mtp_layer_types = 1, ["full_attention"]
    expected = published(MtpModel(target, 1), target.config.get_text_config().num_hidden_layers)
    file = tmp_path / "model.safetensors"
    save_file(load_file(file) | expected, file, metadata={"format": "pt"})
    found = load_mtp(load_model(tmp_path, device="cpu", dtype="float32"))
    torch.testing.assert_close(found.tensors(), expected, rtol=0, atol=0)


NAMES = (  # as published; of DeepSeek-V3 transformers reads the file itself
    "mtp.fc.weight",
    "mtp.pre_fc_norm_hidden.weight",
    "mtp.norm.weight",
    "mtp.layers.0.self_attn.q_norm.weight",
    "mtp.layers.0.mlp.experts.1.down_proj.weight",
    "mtp.layers.0.mlp.shared_expert_gate.weight",
)


@pytest.mark.parametrize("kind", [*KINDS, "GLM-4.5", "Mellum"])
def test_written_layers_take_the_place_of_the_targets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """From their own folder and from a target's file in which they replace the others, to the last bit."""
    target = with_layers(tmp_path / "target", monkeypatch, kind)
    head, folder = load_mtp(target), tmp_path / "tuned"
    before = written(head)
    with torch.no_grad():
        for weight in head.parameters():
            weight += 0.1
    folder.mkdir()
    save_head(head, folder)
    tuned = load_file(folder / "model.safetensors")
    assert tuned.keys() == before.keys() >= (set(NAMES) if kind == "Qwen3-Next" else set())
    assert head_kind(folder)
    assert not head_kind(tmp_path / "target")
    found = [load_head(folder, target)]
    torch.testing.assert_close(written(load_mtp(target)), before, rtol=0, atol=0)
    file = tmp_path / "target" / "model.safetensors"
    whole = load_file(file)
    assert tuned.keys() < whole.keys()
    save_file(whole | tuned, file, metadata={"format": "pt"})
    rewritten = load_model(tmp_path / "target", device="cpu", dtype="float32")
    found.append(load_mtp(rewritten))
    open_draft_runner(found[0], rewritten)  # which may lie on another device than the target of the training
    assert found[0].embed_tokens is rewritten.get_input_embeddings()
    for again in found:
        torch.testing.assert_close(written(again), written(head), rtol=0, atol=0)
    with pytest.raises(UserError, match="next-token layers of a target; load them together with it"):
        load_head(folder)
