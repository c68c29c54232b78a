"""A killed run, started again, ends with the weights of an uninterrupted one, bit by bit."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_run import bench, killed, run_tiny, tiny_settings

from distill.config.run import Settings
from distill.run_stages import run_stages
from distill.stages import RunDir, run_of

STAGES = ["target", "initial", "distillspec", "adaspec"]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """A run that nothing disturbed."""
    return run_tiny(tiny_settings(tmp_path_factory.mktemp("whole")))[1]


@pytest.fixture(scope="module")
def whole(undisturbed: RunDir) -> dict[str, dict[str, torch.Tensor]]:
    """The weights of its stages."""
    return {stage: load_file(undisturbed.path(stage) / "model.safetensors") for stage in STAGES}


@pytest.fixture
def finished(undisturbed: RunDir, tmp_path: Path) -> tuple[Settings, RunDir]:
    """A copy of that run, and its settings."""
    settings = tiny_settings(tmp_path)
    shutil.copytree(undisturbed.folder, tmp_path / settings.name, symlinks=True)
    return settings, run_of(settings)


def finish_target(settings: Settings) -> tuple[RunDir, str]:
    """Runs the target stage to its end and stops in the next one; returns the run and what was printed."""
    made, text = bench(settings)
    with killed("initial", 1):
        run_stages(made)
    return made.run, text.getvalue()


def assert_same(whole: dict[str, dict[str, torch.Tensor]], run: RunDir, *stages: str) -> None:
    for stage in stages or STAGES:
        weights = load_file(run.path(stage) / "model.safetensors")
        assert weights.keys() == whole[stage].keys()
        assert all(torch.equal(weights[name], whole[stage][name]) for name in weights), stage


def test_every_stage_continues_from_its_checkpoint(whole: dict[str, dict[str, torch.Tensor]], tmp_path: Path) -> None:
    settings = tiny_settings(tmp_path)
    steps = {"target": 7, "initial": 11, "distillspec": 5, "adaspec": 9}
    for stage, step in steps.items():
        with killed(stage, step):
            run_tiny(settings)
    ran, run, printed = run_tiny(settings)
    assert ran == ["adaspec"]
    assert "continuing from step 5" in printed
    assert_same(whole, run)
    for stage in STAGES:
        record = run.record(stage)
        assert record is not None
        assert [row["step"] for row in record.history] == [0, 5, 10, 12], stage


def test_a_damaged_checkpoint_falls_back_to_the_one_before(
    whole: dict[str, dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    settings = tiny_settings(tmp_path)
    with killed("target", 11):
        run_tiny(settings)
    newest = max((tmp_path / "tiny/work/checkpoints-target").glob("step-*.ckpt"))
    newest.write_bytes(newest.read_bytes()[:-100])
    run, printed = finish_target(settings)
    assert "step-00000010.ckpt is damaged or incomplete and is not used" in printed
    assert "continuing from step 5" in printed
    assert_same(whole, run, "target")


def test_checkpoints_of_other_settings_are_not_continued(tmp_path: Path) -> None:
    settings = tiny_settings(tmp_path)
    with killed("target", 7):
        run_tiny(settings)
    settings.seed = 1
    with killed("target", 2):
        run_tiny(settings)
    assert not list((tmp_path / "tiny/work/checkpoints-target").glob("step-*"))


def test_no_more_than_two_checkpoints_are_kept(tmp_path: Path) -> None:
    settings = tiny_settings(tmp_path)
    settings.trainer.validate_every = 2
    with killed("target", 11):
        run_tiny(settings)
    folder = tmp_path / "tiny/work/checkpoints-target"
    assert sorted(path.name for path in folder.glob("step-*.ckpt")) == ["step-00000008.ckpt", "step-00000010.ckpt"]
    assert not list(folder.glob(".tmp-*"))


def test_a_stage_altered_without_a_change_of_size_is_made_again_and_said_so(
    whole: dict[str, dict[str, torch.Tensor]], finished: tuple[Settings, RunDir]
) -> None:
    settings, run = finished
    weights = run.path("adaspec") / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    ran, run, printed = run_tiny(settings)
    assert ran == ["adaspec"]
    assert f"{run.path('adaspec')} is not as it was written, and is made again" in printed
    assert_same(whole, run)


def test_checkpoints_that_a_kill_left_beside_a_finished_stage_are_cleared_away(
    finished: tuple[Settings, RunDir],
) -> None:
    settings, run = finished
    left = run.work / "checkpoints-adaspec"
    left.mkdir()
    (left / "step-00000010.ckpt").write_bytes(b"half")
    assert run_tiny(settings)[0] == []
    assert not left.exists()


def test_a_continued_run_of_summed_batches_validates_where_an_uninterrupted_one_does(tmp_path: Path) -> None:
    settings = tiny_settings(tmp_path)  # checkpoints at 5, 10 and 12: the last segment is shorter than the others
    settings.trainer.accumulate = 2
    for step in (7, 11):
        with killed("target", step):
            run_tiny(settings)
    run, printed = finish_target(settings)
    assert "continuing from step 10" in printed
    assert [row["step"] for row in run.record("target").history] == [0, 5, 10, 12]  # type: ignore[union-attr]
