"""The training benchmark: both sides train the same thing."""

import io
import json
from pathlib import Path

import pytest
import torch
from rich.console import Console
from tiny_run import tiny_settings

from decode.errors import UserError
from distill.experiments.speed import SpeedSettings, TrainingBenchSettings, run, selective_loss
from distill.losses.chunked import LossRequest, fused_loss
from distill.losses.divergences import Divergence, TargetRows
from distill.losses.objective import Selection
from distill.models.lm_head import LMHead


def test_both_sides_train_alike(tmp_path: Path) -> None:
    speed = SpeedSettings(steps=12, rounds=2, json=str(tmp_path / "out.json"))
    text = io.StringIO()
    settings = TrainingBenchSettings(**vars(tiny_settings(tmp_path)), speed=speed)
    result = run(settings, Console(file=text, width=160))
    assert json.loads((tmp_path / "out.json").read_text()) == json.loads(json.dumps(result))
    assert result["loss_difference"] < 1e-4
    assert result["k"] == 0.4
    assert result["speedup"] == pytest.approx(sum(result["speedups"]) / 2)
    assert result["sides"]["draftsmith"]["prepare_seconds"] > 0 == result["sides"]["Trainer"]["prepare_seconds"]
    assert f"ratio {result['speedup']:.2f}" in text.getvalue()


def test_the_straightforward_loss_is_the_fused_one() -> None:
    generator = torch.Generator().manual_seed(0)
    linears = [torch.nn.Linear(6, 40, bias=False) for _ in range(3)]
    rows = [torch.randn(30, 6, generator=generator) for _ in range(3)]
    selection = Selection(0.4, normalisation="paper")
    wanted = selective_loss(*(linear(hidden) for linear, hidden in zip(linears, rows)), selection)
    target = TargetRows(rows[1], 40, LMHead.of(linears[1]))
    known = fused_loss(rows[2], LMHead.of(linears[2]), target, LossRequest(Divergence())).losses.detach()
    task = LossRequest(Divergence(), lambda values, _: selection.choose(values - known))
    found = fused_loss(rows[0], LMHead.of(linears[0]), target, task).total / 12
    assert found.item() == pytest.approx(wanted.item(), rel=1e-5)


def test_settings_that_measure_nothing_are_refused(tmp_path: Path) -> None:
    settings = TrainingBenchSettings(**vars(tiny_settings(tmp_path)), speed=SpeedSettings(steps=3))
    with pytest.raises(UserError, match=r"speed.steps is 3, expected 10 or more"):
        run(settings)
    settings.speed.steps = 10
    for kind in ("eagle", "cut"):
        settings.student.kind = kind
        with pytest.raises(UserError, match=f"student.kind is {kind}"):
            run(settings)
