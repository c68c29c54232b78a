"""Stages beside each other yield what they yield one after another, and fail, log and end as these do."""

import csv
import multiprocessing
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_run import begun, bench, run_tiny, tiny_settings

from decode.errors import UserError
from distill.config.run import TrackerSettings
from distill.config.training import InitialDraftSettings
from distill.data.context import StageContext
from distill.files import RunDir
from distill.parallel import _share_out, _workers, may_run_beside, run_beside
from distill.tracking import make_logger

STAGES = ["target", "initial", "reference", "draft", "equal-tokens"]


@pytest.fixture(autouse=True)
def no_process_is_left() -> Iterator[None]:
    yield
    assert multiprocessing.active_children() == []


def test_stages_beside_each_other_are_the_same_and_tracked_and_found_again(tmp_path: Path) -> None:
    alone = run_tiny(begun(tiny_settings(tmp_path / "alone")))[1]
    context, text = bench(tiny_settings(tmp_path / "beside", stages_at_once=2))
    assert may_run_beside(context)
    context.logger = make_logger(TrackerSettings(kind="csv"), context.run.folder, "tiny", {})
    run_beside(context)
    for stage in STAGES:
        made, wanted = (load_file(run.path(stage) / "model.safetensors") for run in (context.run, alone))
        assert all(torch.equal(made[name], wanted[name]) for name in wanted), stage
        assert context.run.record(stage).history == alone.record(stage).history  # type: ignore[union-attr]
        assert [row["loss"] for row in metrics(context.run, stage) if row.get("loss")]
        assert context.seen[stage].tokens > 0
    assert "  equal-tokens | LlamaForCausalLM" in text.getvalue()
    assert text.getvalue().count("to compute") == 1  # the signal is announced by who makes it

    context, text = bench(tiny_settings(tmp_path / "beside", stages_at_once=2))
    run_beside(context)
    assert text.getvalue().count("up to date") == len(STAGES)
    assert context.seen == {}


def metrics(run: RunDir, stage: str) -> list[dict[str, str]]:
    (file,) = (run.folder / "csv" / stage).glob("version_*/metrics.csv")
    return list(csv.DictReader(file.open()))


@pytest.mark.parametrize(("kill", "reason"), [(False, "missing"), (True, "initial has ended, status -9")])
def test_what_another_process_fails_with_is_what_the_run_fails_with(tmp_path: Path, kill: bool, reason: str) -> None:
    settings = tiny_settings(tmp_path, stages_at_once=2)
    settings.initial = InitialDraftSettings(kind="as_is", model=str(tmp_path / "missing"))
    context, text = bench(settings)
    done: list[int] = []
    with _workers(context, 1) as workers:

        def first(_: StageContext) -> None:
            if kill:
                os.kill(workers[0]._process.pid, signal.SIGKILL)
            done.append(1)

        with pytest.raises(UserError, match=reason):
            _share_out(context, ["initial"], workers, first)
    assert done, "what this process does is done to its end"
    assert ("initial | initial draft (as_is)" in text.getvalue()) is not kill


@pytest.mark.parametrize("changes", [{"stages_at_once": 1}, {"devices": 2}])
def test_stages_follow_one_another_unless_wanted_otherwise_and_where_several_processes_train(
    tmp_path: Path, changes: dict[str, int]
) -> None:
    settings = tiny_settings(tmp_path, stages_at_once=2)
    settings.trainer.devices = changes.get("devices", "auto")
    settings.stages_at_once = changes.get("stages_at_once", 2)
    assert not may_run_beside(bench(settings)[0])


def test_an_initial_draft_that_alone_is_missing_is_made_again(tmp_path: Path) -> None:
    run = run_tiny(begun(tiny_settings(tmp_path)))[1]
    (run.path("initial") / "model.safetensors").unlink()
    context, _ = bench(tiny_settings(tmp_path, stages_at_once=2))
    run_beside(context)
    assert (run.path("initial") / "model.safetensors").exists()
