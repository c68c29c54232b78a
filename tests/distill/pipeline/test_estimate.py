"""What a run will write and take: exact where the configuration says it, proportional to the work elsewhere."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from pathlib import Path

from gguf_files import write_gguf
from pairs import make_tokenizer
from rich.console import Console
from tiny_run import tiny_settings
from transformers import PreTrainedModel

from distill.config.eagle import EagleSettings
from distill.config.models import TargetSettings
from distill.config.package import PackageSettings
from distill.config.settings import Settings
from distill.models.package import package_path
from distill.pipeline.dry_run import tell_size
from distill.pipeline.estimate import Machine, estimate, measure_machine

HERE = Machine(1e11, 1e10)


def given(tmp_path: Path, tiny: Callable[..., PreTrainedModel]) -> Settings:
    """An EAGLE-3 head for a tiny model out of a package that is downloaded already."""
    package = PackageSettings("tiny-model==1.0", "tiny_model/tiny.gguf", "0" * 64, 1000)
    settings = tiny_settings(tmp_path, target=TargetSettings(kind="as_is", package=package))
    settings.eagle, settings.reference.signal = EagleSettings(kind="eagle3", draft_vocab=64), "hidden"
    settings.reference.responses.source = "target"
    path = package_path(package, str(tmp_path))
    path.parent.mkdir(parents=True)
    model = copy.deepcopy(tiny("llama-tied", vocab_size=280, num_hidden_layers=6, max_position_embeddings=256))
    write_gguf(path, model, make_tokenizer())
    settings.target.model = str(path)
    return settings


def test_sizes_follow_from_the_configuration(tmp_path: Path, tiny: Callable[..., PreTrainedModel]) -> None:
    settings = given(tmp_path, tiny)
    found = {step.name.split(",")[0]: step for step in estimate(settings, HERE)}
    model = tiny("llama-tied", vocab_size=280, num_hidden_layers=6, max_position_embeddings=256)
    assert list(found) == ["package", "target", "28 answers", "signal (hidden)", "reference", "adaspec", "equal-tokens",
                           "evaluation and export"]  # fmt: skip
    assert found["target"].bytes == 4 * model.num_parameters()
    assert found["target"].seconds == 0
    assert found["signal (hidden)"].bytes == 28 * 256 * 4 * 32 * 4  # three states that are fused, and the last
    settings.reference.training.steps *= 2
    longer = {step.name.split(",")[0]: step for step in estimate(settings, HERE)}
    assert longer["reference"].seconds == 2 * found["reference"].seconds > 0
    assert longer["28 answers"] == found["28 answers"]


def test_the_dry_run_tells_what_the_real_run_takes(tmp_path: Path, tiny: Callable[..., PreTrainedModel]) -> None:
    settings, text = given(tmp_path, tiny), io.StringIO()
    tell_size(settings, Console(file=text, width=100))
    assert "signal (hidden)" in text.getvalue()
    assert "in all" in text.getvalue()
    package_path(settings.target.package, str(tmp_path)).unlink()
    tell_size(settings, Console(file=text, width=100))
    assert "can be told once" in text.getvalue()


def test_the_machine_is_measured() -> None:
    found = measure_machine()
    assert found.flops > 1e6
    assert found.bytes > 1e6
