"""A target that is given, not trained: from a GGUF file it becomes a plain folder of the run."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from gguf_files import write_gguf
from pairs import make_tokenizer
from tiny_run import run_tiny, tiny_settings
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from decode.errors import UserError
from decode.models.loading import load_model
from distill.config.training import TargetSettings


@pytest.fixture
def file(tmp_path: Path, tiny: Callable[..., PreTrainedModel]) -> Path:
    model = copy.deepcopy(tiny("llama-tied", vocab_size=280, intermediate_size=64, max_position_embeddings=256))
    model.generation_config.eos_token_id = model.config.eos_token_id = 0
    (tmp_path / "given").mkdir()
    return write_gguf(tmp_path / "given" / "model.gguf", model, make_tokenizer(chat=True), "Q8_0")


def test_a_gguf_file_becomes_a_plain_folder_and_drafts_are_trained_for_it(file: Path, tmp_path: Path) -> None:
    settings = tiny_settings(tmp_path, target=TargetSettings(kind="as_is", model=str(file)))
    settings.student.architecture.hidden_size = 8
    ran, run, _ = run_tiny(settings)
    assert ran == ["target", "initial", "distillspec", "adaspec"]
    saved = AutoModelForCausalLM.from_pretrained(run.target)
    assert not run.target.is_symlink()
    assert "quantization_config" not in saved.config.to_dict()
    given = load_model(file, device="cpu", dtype="float32")
    assert all(torch.equal(a, b) for a, b in zip(saved.parameters(), given.parameters(), strict=True))
    assert AutoTokenizer.from_pretrained(run.target).chat_template == make_tokenizer(chat=True).chat_template
    assert run_tiny(settings)[0] == []


def test_the_weights_of_a_file_are_rounded_where_that_is_asked_for(file: Path, tmp_path: Path) -> None:
    target = TargetSettings(kind="as_is", model=str(file), round_to="float16")
    settings = tiny_settings(tmp_path, target=target)
    settings.student.architecture.hidden_size = 8
    _, run, _ = run_tiny(settings)
    given = load_model(file, device="cpu", dtype="float32")
    saved = load_model(run.target, device="cpu", dtype="float32")
    assert any(not torch.equal(a, b) for a, b in zip(saved.parameters(), given.parameters(), strict=True))
    assert all(torch.equal(a, b.half().float()) for a, b in zip(saved.parameters(), given.parameters(), strict=True))
    with pytest.raises(UserError, match=r"round_to is for a target with kind as_is, and target.kind is finetune"):
        TargetSettings(kind="finetune", model="a", round_to="float16").validate("target")
