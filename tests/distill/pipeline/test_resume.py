"""A killed run, started again, ends with the weights of an uninterrupted one, bit by bit."""

import torch
from safetensors.torch import load_file
from tiny_run import STAGES, begun, bench, killed, run_tiny, tiny_settings

from distill.stages import run_stages


def test_every_stage_continues_from_its_checkpoint(tmp_path) -> None:
    settings, undisturbed = (tiny_settings(tmp_path / name) for name in ("killed", "undisturbed"))
    for stage, step in {"target": 7, "initial": 11, "distillspec": 5, "adaspec": 9}.items():
        with killed(stage, step):
            run_tiny(settings)
    made, run, printed = run_tiny(settings)
    assert made == ["adaspec"]
    assert "continuing from step 5" in printed
    wanted = run_tiny(undisturbed)[1]
    for stage in STAGES:
        weights, others = (load_file(each.path(stage) / "model.safetensors") for each in (run, wanted))
        assert weights.keys() == others.keys()
        assert all(torch.equal(weights[name], others[name]) for name in weights), stage
        assert [row["step"] for row in run.record(stage).history] == [0, 5, 10, 12], stage
    assert not list(run.work.glob("checkpoints-*"))


def test_checkpoints_of_other_settings_or_of_a_finished_stage_are_not_continued(tmp_path) -> None:
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


def test_a_continued_run_of_summed_batches_validates_where_an_uninterrupted_one_does(tmp_path) -> None:
    settings = tiny_settings(tmp_path)  # checkpoints at 5, 10 and 12: the last segment is shorter than the others
    settings.trainer.accumulate = 2
    for step in (7, 11):
        with killed("target", step):
            run_tiny(settings)
    run, text = bench(settings)
    with killed("initial", 1):
        run_stages(run)
    assert "continuing from step 10" in text.getvalue()
    assert [row["step"] for row in run.record("target").history] == [0, 5, 10, 12]
