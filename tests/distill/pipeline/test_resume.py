"""A killed run, started again, ends with the weights of an uninterrupted one, bit by bit."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_run import STAGES, begun, bench, killed, run_tiny, tiny_settings

from distill.config import DraftSettings
from distill.stages import run_stages

Weights = dict[str, dict[str, torch.Tensor]]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Weights:
    """The weights of the stages of a run that nothing disturbed."""
    run = run_tiny(tiny_settings(tmp_path_factory.mktemp("undisturbed")))[1]
    return {stage: load_file(run.path(stage) / "model.safetensors") for stage in STAGES}


def test_every_stage_continues_from_its_checkpoint(undisturbed: Weights, tmp_path: Path) -> None:
    settings = tiny_settings(tmp_path)
    steps = {"target": 7, "initial": 11, "distillspec": 5, "adaspec": 9}
    for stage, step in steps.items():
        with killed(stage, step):
            run_tiny(settings)
    made, run, printed = run_tiny(settings)
    assert made == ["adaspec"]
    assert "continuing from step 5" in printed
    for stage in STAGES:
        weights = load_file(run.path(stage) / "model.safetensors")
        assert weights.keys() == undisturbed[stage].keys()
        assert all(torch.equal(weights[name], undisturbed[stage][name]) for name in weights), stage
        record = run.record(stage)
        assert record is not None
        assert [row["step"] for row in record.history] == [0, 5, 10, 12], stage
    assert not list(run.work.glob("checkpoints-*"))


@pytest.mark.parametrize("accepted", [False, True], ids=["texts of its own", "steps after accepted tokens"])
def test_what_chance_decides_goes_on_as_it_would_have(tmp_path: Path, accepted: bool) -> None:
    """Texts that the draft writes, and the drafting steps of a head, come out alike after a kill."""
    draft = DraftSettings(name="own", on_policy=0.0 if accepted else 0.5, accepted_only=accepted)
    runs = []
    for name in ("undisturbed", "killed"):
        settings = tiny_settings(tmp_path / name, drafts=[draft])
        settings.teacher.responses.max_new_tokens, settings.teacher.responses.refresh_every = 4, 3
        if accepted:
            settings.target.architecture.layers = 4
            settings.student.kind, settings.student.unroll = "eagle3", 2
        if name == "killed":
            with killed("own", 8):
                run_tiny(begun(settings))
        runs.append(run_tiny(begun(settings))[1])
    weights = [load_file(run.path("own") / "model.safetensors") for run in runs]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    assert runs[0].draft_record("own").account == runs[1].draft_record("own").account


def test_checkpoints_of_other_settings_or_of_a_finished_stage_are_not_continued(tmp_path: Path) -> None:
    settings = tiny_settings(tmp_path)
    with killed("target", 7):
        run_tiny(settings)
    left = tmp_path / "tiny/work/checkpoints-target"
    assert list(left.glob("*.ckpt"))
    settings.seed = 1
    run, text = bench(settings)
    with killed("target", 2):
        run_stages(run)
    assert "continuing" not in text.getvalue()
    begun(tiny_settings(tmp_path))  # whose checkpoints a kill has left
    assert run_stages(bench(tiny_settings(tmp_path))[0], ("target",)) == []
    assert not left.exists()


def test_a_continued_run_of_summed_batches_validates_where_an_uninterrupted_one_does(tmp_path: Path) -> None:
    settings = tiny_settings(tmp_path)  # checkpoints at 5, 10 and 12: the last segment is shorter than the others
    settings.trainer.accumulate = 2
    for step in (7, 11):
        with killed("target", step):
            run_tiny(settings)
    run, text = bench(settings)
    with killed("initial", 1):
        run_stages(run)
    assert "continuing from step 10" in text.getvalue()
    assert [row["step"] for row in run.record("target").history] == [0, 5, 10, 12]  # type: ignore[union-attr]


@pytest.mark.slow
def test_a_run_killed_three_times_ends_bit_by_bit_as_an_undisturbed_one() -> None:
    # in a process of its own: one that has used threads must not be forked
    script = Path(__file__).parents[2] / "support" / "soak.py"
    paths = os.pathsep.join([str(script.parents[2]), os.environ.get("PYTHONPATH", "")])
    ended = subprocess.run(
        [sys.executable, str(script), "--seed", "1", "--kills", "3", "--short"],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": paths}, capture_output=True, text=True, timeout=400,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "sound: after 3 kills" in ended.stdout
