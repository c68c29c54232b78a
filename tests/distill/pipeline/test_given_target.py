"""A target that is given, not trained: a GGUF file or an adapter becomes a plain folder of the run."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from families import WRAPPERS, build_wrapper
from gguf_files import write_gguf
from pairs import make_tokenizer
from peft import LoraConfig, get_peft_model
from tiny_run import bench, run_tiny, tiny_settings
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from decode.models.loading import load_model
from distill.config import DraftSettings, LayerSkipSettings, StudentSettings, TargetSettings, TrainingSettings
from distill.stages import run_stages


@pytest.fixture
def file(tmp_path: Path, tiny: Callable[..., PreTrainedModel]) -> Path:
    model = copy.deepcopy(tiny("llama-tied", vocab_size=280, intermediate_size=64, max_position_embeddings=256))
    model.generation_config.eos_token_id = model.config.eos_token_id = 0
    (tmp_path / "given").mkdir()
    return write_gguf(tmp_path / "given" / "model.gguf", model, make_tokenizer(chat=True), "Q8_0")


def test_a_gguf_file_becomes_a_plain_folder_and_drafts_are_trained_for_it(file: Path, tmp_path: Path) -> None:
    target, drafts = TargetSettings(kind="as_is", model=str(file)), [DraftSettings(name="distillspec")]
    settings = tiny_settings(tmp_path, target=target, drafts=drafts)
    settings.student.architecture.hidden_size = 8
    made, run, _ = run_tiny(settings)
    assert made == ["target", "initial", "distillspec"]
    saved = AutoModelForCausalLM.from_pretrained(run.target)
    assert not run.target.is_symlink()
    assert "quantization_config" not in saved.config.to_dict()
    given = load_model(file, device="cpu", dtype="float32")
    assert all(torch.equal(a, b) for a, b in zip(saved.parameters(), given.parameters(), strict=True))
    assert AutoTokenizer.from_pretrained(run.target).chat_template == make_tokenizer(chat=True).chat_template
    assert run_tiny(settings)[0] == []


def test_the_weights_of_a_file_are_rounded_where_that_is_asked_for(file: Path, tmp_path: Path) -> None:
    target = TargetSettings(kind="as_is", model=str(file), round_to="float16")
    run, _ = bench(tiny_settings(tmp_path, target=target))
    run_stages(run, ("target",))
    given = load_model(file, device="cpu", dtype="float32")
    saved = load_model(run.target, device="cpu", dtype="float32")
    assert any(not torch.equal(a, b) for a, b in zip(saved.parameters(), given.parameters(), strict=True))
    assert all(torch.equal(a, b.half().float()) for a, b in zip(saved.parameters(), given.parameters(), strict=True))


@pytest.mark.parametrize("kind", ["gemma3", "qwen2_5_vl"])
def test_drafts_are_trained_for_the_language_model_of_one_that_sees(kind: str, tmp_path: Path) -> None:
    """Cut from its layers, for the model as it is or trained by LayerSkip's recipe, and as a head."""
    model = build_wrapper(kind, vocab=280)
    model.generation_config.eos_token_id = 0
    model.save_pretrained(tmp_path / "given")
    make_tokenizer(chat=True).save_pretrained(tmp_path / "given")
    given = str(tmp_path / "given")
    few = TrainingSettings(steps=2, batch_size=4)
    recipe = TargetSettings(kind="finetune", model=given, training=few, layerskip=LayerSkipSettings(enabled=True))
    frozen, text = TargetSettings(kind="as_is", model=given), WRAPPERS[kind][2]
    for target, student, made in (
        (frozen, StudentSettings(kind="cut"), text),
        (recipe, StudentSettings(kind="cut"), text),
        (frozen, StudentSettings(kind="eagle3"), "LlamaForCausalLMEagle3"),
    ):
        settings = tiny_settings(tmp_path, target=target, student=student, drafts=[DraftSettings(name="distillspec")])
        settings.training.steps = 2
        names, run, _ = run_tiny(settings)
        assert names[-2:] == ["initial", "distillspec"]
        for stage in ("initial", "distillspec"):
            assert json.loads((run.path(stage) / "config.json").read_text())["architectures"] == [made]


def test_an_adapter_given_as_the_target_becomes_a_plain_folder(
    tmp_path: Path, tiny: Callable[..., PreTrainedModel]
) -> None:
    base = copy.deepcopy(tiny("llama", vocab_size=280, max_position_embeddings=256))
    base.generation_config.eos_token_id = 0
    base.save_pretrained(tmp_path / "base")
    make_tokenizer(chat=True).save_pretrained(tmp_path / "base")
    adapted = get_peft_model(base, LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False))
    adapted.peft_config["default"].base_model_name_or_path = str(tmp_path / "base")
    adapted.save_pretrained(tmp_path / "adapter")
    run, _ = bench(tiny_settings(tmp_path, target=TargetSettings(kind="as_is", model=str(tmp_path / "adapter"))))
    assert run_stages(run, ("target",)) == ["target"]
    saved, ids = AutoModelForCausalLM.from_pretrained(run.target), torch.arange(3, 19)[None]
    torch.testing.assert_close(saved(ids).logits, adapted.eval()(input_ids=ids).logits, atol=1e-4, rtol=1e-4)
