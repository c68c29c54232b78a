"""``--dry-run``: every family and kind in miniature, without network; `test_configs` runs what is shipped."""

from pathlib import Path

import pytest
from rich.console import Console

from decode.commands.parsing import parse
from distill.__main__ import FOREIGN
from distill.config.drafts import DraftSettings
from distill.config.run import Settings
from distill.config.training import Architecture, StudentSettings, TargetSettings, TrainingSettings
from distill.data.context import StageContext
from distill.dry_run import shrink
from distill.models.lm_head import LMHead, check_head
from distill.models.loading import build_model, count_parameters
from distill.pipeline import run_pipeline
from distill.run_stages import run_stages
from distill.stages import run_of

QUICKSTART = Path(__file__).parents[3] / "configs" / "quickstart.yaml"


def load(config: Path, folder: Path) -> Settings:
    argv = ["--config", str(config), "--output_dir", str(folder), "--tracker.kind", "none"]
    return parse(Settings, argv, prog="distill", description="", foreign=FOREIGN)


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever asks the network fails at once."""
    monkeypatch.setattr("socket.socket.connect", lambda *_: pytest.fail("the network was used"))


def test_a_dry_run_goes_on_to_report_and_export(tmp_path: Path) -> None:
    settings = load(QUICKSTART, tmp_path)
    run = run_pipeline(shrink(settings, Console(quiet=True)), Console(quiet=True))
    for path in ("report.json", "report.html", "export/model.safetensors", "export/speculation_profile.json"):
        assert (run.folder / path).stat().st_size > 0


@pytest.mark.parametrize("kind", ["finetune", "lora", "as_is"])
def test_models_from_the_hub_take_the_path_of_their_kind(kind: str, tmp_path: Path) -> None:
    settings = Settings(
        output_dir=str(tmp_path),
        target=TargetSettings(kind=kind, model="lmsys/vicuna-7b-v1.3", training=TrainingSettings(epochs=1)),  # type: ignore[arg-type]
        student=StudentSettings(kind=kind, model="double7/vicuna-68m", training=TrainingSettings(epochs=1)),  # type: ignore[arg-type]
        drafts=[DraftSettings(name="own", training={"epochs": 3, "batch_size": 64})],
    )
    settings.training.epochs = 1
    small = shrink(settings, Console(quiet=True))
    assert small.target.kind == kind
    ran = run_stages(StageContext(small, run_of(small), Console(quiet=True)))
    assert ran == ["target", "initial", "own"]


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
