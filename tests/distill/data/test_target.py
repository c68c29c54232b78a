"""Where the frozen target is, and in what format: devices dealt out, what is refused before the first step."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_run import bench, run_tiny, tiny_settings

from decode.errors import UserError
from distill.data.target import share_of
from distill.stages import stage_fingerprints


@pytest.mark.parametrize(
    ("count", "world", "wanted"),
    [(0, 2, [[], []]), (1, 2, [[0], [0]]), (2, 2, [[0], [1]]), (4, 2, [[0, 1], [2, 3]]), (3, 2, [[0], [1, 2]])],
)
def test_devices_are_dealt_out_to_the_processes_of_a_machine(count: int, world: int, wanted: list[list[int]]) -> None:
    assert [share_of(range(count), rank, world) for rank in range(world)] == wanted


def test_a_device_that_is_not_there_is_refused_before_the_first_step(tmp_path: Path) -> None:
    settings = tiny_settings(tmp_path)
    settings.target.devices = ["cuda:77"]
    with pytest.raises(UserError, match="device is 'cuda:77', but"):
        run_tiny(settings)
    assert not (tmp_path / "tiny" / "target").exists()


def test_the_quantisation_is_asked_of_transformers_and_the_signals_are_those_of_another_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = tiny_settings(tmp_path)
    plain = stage_fingerprints(settings)
    settings.target.quantization = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    assert settings.target.placed
    seen: dict[str, Any] = {}
    monkeypatch.setattr("distill.data.target.load_model", lambda *_, **options: seen.update(options))
    bench(settings)[0].open_target()
    assert seen["quantization_config"].load_in_8bit
    assert seen["device"] == torch.device("cpu")
    keys = stage_fingerprints(settings)
    assert [stage for stage in keys if keys[stage] == plain[stage]] == ["target", "initial"]
