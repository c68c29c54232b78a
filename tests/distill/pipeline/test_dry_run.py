"""``--dry-run``: every family and kind in miniature, without network; `test_main` runs the quickstart's to its end."""

from pathlib import Path

import pytest
from rich.console import Console
from tiny_run import bench
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from distill.config import (
    Architecture,
    DataSettings,
    DraftSettings,
    Settings,
    StudentSettings,
    TargetSettings,
    TrainingSettings,
)
from distill.dry_run import PLAIN_CHAT, shrink
from distill.lm_head import LMHead, check_head
from distill.models import build_model, count_parameters
from distill.stages import run_stages


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever asks the network fails at once."""
    monkeypatch.setattr("socket.socket.connect", lambda *_: pytest.fail("the network was used"))


@pytest.mark.parametrize("kind", ["finetune", "lora", "as_is"])
def test_models_from_the_hub_take_the_path_of_their_kind(kind: str, tmp_path: Path) -> None:
    settings = Settings(
        output_dir=str(tmp_path),
        target=TargetSettings(kind=kind, model="lmsys/vicuna-7b-v1.3", training=TrainingSettings(epochs=1)),  # type: ignore[arg-type]
        student=StudentSettings(kind=kind, model="double7/vicuna-68m", training=TrainingSettings(epochs=1)),  # type: ignore[arg-type]
        drafts=[DraftSettings(name="longer", training={"epochs": 3, "batch_size": 64})],
        training=TrainingSettings(epochs=1),
    )
    small = shrink(settings, Console(quiet=True))
    assert small.target.kind == kind
    assert run_stages(bench(small)[0]) == ["target", "initial", "longer"]


@pytest.mark.parametrize("source", ["ultrachat", "target"])
def test_chats_are_rendered_by_the_template_of_a_local_target(source: str, tmp_path: Path) -> None:
    settings = Settings(output_dir=str(tmp_path), data=DataSettings(source=source), training=TrainingSettings(steps=1))
    settings.target, settings.drafts = TargetSettings(kind="as_is", model="some/chat-model"), [DraftSettings(name="a")]
    settings.student, settings.teacher.responses.source = StudentSettings(kind="eagle"), "target"
    assert shrink(settings, Console(quiet=True)).data.chat_template == PLAIN_CHAT
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0, "</s>": 1}, "a")))
    tokenizer.eos_token, tokenizer.chat_template = "</s>", PLAIN_CHAT.replace("<", "[").replace(">", "]")
    tokenizer.save_pretrained(tmp_path / "target")
    build_model(Architecture(), 2, tokenizer, 0).save_pretrained(tmp_path / "target")
    settings.target.model = str(tmp_path / "target")
    small = shrink(settings, Console(quiet=True))
    assert small.data.chat_template == tokenizer.chat_template
    run, _ = bench(small)
    assert "[assistant]" in run.corpus.train[0]["prompt"]


@pytest.mark.parametrize(
    "family",
    ["codegen", "gemma", "gemma2", "gpt2", "gpt_neox", "mistral", "mixtral", "opt", "phi", "phi3", "qwen2", "qwen3"],
)
def test_a_tiny_model_of_every_family_can_be_built_and_distilled(family: str) -> None:
    shape = Architecture(model_type=family, hidden_size=32, layers=2, heads=4, positions=2048)
    model = build_model(shape, 320, None, seed=0)
    assert model.config.model_type == family
    assert model.num_parameters() < 1_000_000
    check_head(model, LMHead(model))
    assert count_parameters(TargetSettings(architecture=shape), 320) == model.num_parameters()
