"""The training benchmark: both sides train the same thing, and the numbers are of what they claim to be."""

import io
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from tiny_run import tiny_settings

from decode.errors import UserError
from distill.__main__ import main
from distill.experiments import speed as bench
from distill.experiments import speed as loss_benchmark
from distill.experiments.speed import SpeedSettings, TrainingBenchSettings, selective_loss
from distill.losses.chunked import LossRequest, fused_loss
from distill.losses.divergences import Divergence
from distill.losses.selection import top_share
from distill.models.lm_head import LMHead
from distill.teacher.signals import HiddenRows


def here(work: Any, argument: Any, threads: int) -> Any:
    """In this process: a fresh one costs seconds."""
    return work(argument)


def test_both_sides_train_alike_and_the_table_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (bench, loss_benchmark):
        monkeypatch.setattr(module, "alone", here)
    both = {"plain": loss_benchmark.plain, "chunked": loss_benchmark.chunked}
    monkeypatch.setattr(loss_benchmark, "ways", lambda k: both)  # without a compiler's minute
    base = vars(tiny_settings(tmp_path))
    speed = SpeedSettings(
        steps=12, rounds=2, rows=96, vocabularies=[500], hidden_size=8, json=str(tmp_path / "out.json")
    )
    text = io.StringIO()
    result = bench.run(TrainingBenchSettings(**base, speed=speed), Console(file=text, width=160))
    assert json.loads((tmp_path / "out.json").read_text()) == json.loads(json.dumps(result))
    training = result["training"]
    assert training["loss_difference"] < 1e-4
    plain, ours = training["straightforward"], training["draftsmith"]
    assert len(training["speedups"]) == 2
    assert training["speedup"] == pytest.approx(sum(training["speedups"]) / 2)
    assert "k = 0.4" in result["pair"]
    assert ours["prepare_seconds"] > 0 == plain["prepare_seconds"]
    assert [(row["k"], row["way"]) for row in result["loss"]] == [(k, way) for k in (1.0, 0.4) for way in both]
    assert all(row["measured_rows"] == 96 and row["seconds"] > 0 for row in result["loss"])
    assert [row["speedup"] for row in result["loss"] if row["way"] == "plain"] == [1.0, 1.0]
    assert "weights of no run" in result["pair"]
    printed = text.getvalue()
    assert f"{training['speedup']:.2f}" in printed
    assert "the loss alone, 96 tokens" in printed


def test_the_straightforward_loss_is_the_fused_one() -> None:
    generator = torch.Generator().manual_seed(0)
    linears = [torch.nn.Linear(6, 40, bias=False) for _ in range(3)]
    rows = [torch.randn(30, 6, generator=generator) for _ in range(3)]
    wanted = selective_loss(*(linear(hidden) for linear, hidden in zip(linears, rows)), k=0.4, mean=True)
    target = HiddenRows(rows[1], LMHead.of(linears[1]))
    known = fused_loss(rows[2], LMHead.of(linears[2]), target, LossRequest(Divergence())).losses.detach()
    task = LossRequest(Divergence(), lambda values: top_share(values - known, 0.4))
    assert (fused_loss(rows[0], LMHead.of(linears[0]), target, task).total / 12).item() == pytest.approx(
        wanted.item(), rel=1e-5
    )


def test_a_loss_that_does_not_fit_is_measured_on_a_share_and_scaled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_benchmark, "free_memory", lambda device: 2 * 200 * 100 * 4 * loss_benchmark.BUFFERS)
    monkeypatch.setattr(loss_benchmark, "alone", here)
    monkeypatch.setattr(loss_benchmark, "_once", lambda way, sides, device: (1.0, len(sides.hidden[0]) * 10))
    plain, chunked, *_ = loss_benchmark.loss_table(512, [100], 8, [1.0], 1, 1)
    assert (plain["measured_rows"], chunked["measured_rows"]) == (128, 512)
    assert (plain["peak_bytes"], plain["seconds"], chunked["speedup"]) == (5120, 4.0, 4.0)
    assert chunked["memory_ratio"] == 1.0


@pytest.mark.parametrize("k", [1.0, 0.4])
def test_the_table_s_ways_compute_one_loss_and_one_gradient(k: float) -> None:
    """Liger's, too, where it is installed."""
    made, found = loss_benchmark.ways(k), []
    del made["compiled"]  # `test_chunked_kl`
    for way in made.values():
        sides = loss_benchmark.Sides.of(40, 300, 8, k, torch.device("cpu"))
        loss = way(sides)
        loss.backward()
        found.append((loss.detach(), sides.hidden[0].grad, sides.linears[0].weight.grad))
    for other in found[1:]:
        for ours, theirs in zip(found[0], other, strict=True):
            assert (ours - theirs).abs().max() <= 1e-5 * ours.abs().max()


def test_settings_that_measure_nothing_are_refused(tmp_path: Path) -> None:
    import yaml

    config = tmp_path / "tiny.yaml"
    config.write_text(yaml.safe_dump(asdict(tiny_settings(tmp_path))))
    with pytest.raises(UserError, match=r"speed.steps is 3, wanted 10 or more"):
        main(["bench", "--config", str(config), "--speed.steps", "3"])
    with pytest.raises(UserError, match=r"nearest known key is 'speed.steps'"):
        main(["bench", "--config", str(config), "--speed.step", "3"])
    with pytest.raises(UserError, match=r"these settings are of a feature head"):
        main(["bench", "--config", str(config), "--student.kind", "eagle"])
