"""Started by `test_on_a_gpu`: trains, or decodes, on the GPU that `pretend_gpu` pretends.

Usage: pretend_gpu_run.py FOLDER WAY. In a process of its own, since PyTorch knows of the device until the process ends.
"""

import sys
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.strategies import SingleDeviceStrategy
from pretend_gpu import GPU, pretended_gpu
from safetensors.torch import load_file
from tiny_run import run_tiny, tiny_settings

from distill import ranks
from distill.config.run import Settings
from distill.config.training import StudentSettings


def settings_of(way: str, folder: Path) -> Settings:
    """A short run, in one of the ways to train."""
    settings = tiny_settings(folder)
    if way == "mtp":
        from mtp_targets import mtp_settings  # after pretend_gpu, which has to come before all of decode

        settings = mtp_settings(folder)
    for training in (settings.target.training, settings.student.training, settings.training):
        training.steps = 4
    settings.trainer.validate_every = 2
    teacher, adaspec = settings.teacher, settings.drafts[1]
    if way == "hidden":
        teacher.signal, adaspec.scope, settings.trainer.accumulate = "hidden", "global", 2
    elif way == "topk":
        teacher.signal, adaspec.normalisation = "topk", "official"
    elif way == "packed":
        teacher.signal, settings.trainer.packing = "log_probs", 300
    elif way == "own":
        responses, teacher.signal = teacher.responses, "online"
        responses.max_new_tokens, responses.batch_size, responses.refresh_every = 6, 4, 2
        for draft in settings.drafts:
            draft.on_policy = 0.5
        settings.target.layerskip.enabled = True
    elif way != "mtp":
        settings.target.architecture.layers = 4
        vocabulary = 64 if way == "eagle3" else None
        settings.student = StudentSettings(kind=way, unroll=2, draft_vocab=vocabulary)  # type: ignore[arg-type]
    return settings


class Accelerator(CPUAccelerator):
    """One whose device is the pretended GPU."""

    def setup_device(self, device: torch.device) -> None:
        """Nothing has to be set up."""


def train(folder: Path, way: str) -> None:
    """The same run on the CPU and on the pretended GPU; the drafts have to be the same."""
    _, one, _ = run_tiny(settings_of(way, folder / "cpu"))
    trainer = L.Trainer

    def on_gpu(**options: Any) -> L.Trainer:
        del options["accelerator"]
        return trainer(**options | {"strategy": SingleDeviceStrategy(GPU, accelerator=Accelerator())})

    with pytest.MonkeyPatch.context() as patch, pretended_gpu():
        patch.setattr(ranks, "local_device", lambda *_: GPU)
        patch.setattr(L, "Trainer", on_gpu)
        with pytest.raises(RuntimeError, match=r"a tensor of \[2\] is on the CPU, others are on the GPU"):
            torch.ones(2, device=GPU) + torch.ones(2)
        _, other, _ = run_tiny(settings_of(way, folder / "gpu"))
    for stage in ("target", "distillspec", "adaspec"):
        ours, theirs = (load_file(run.path(stage) / "model.safetensors") for run in (one, other))
        gap = max(float((ours[name].float() - theirs[name].float()).abs().max()) for name in ours)
        print(f"{way} {stage}: the largest difference of a weight is {gap:.1e}")
        assert gap < 1e-3, stage


if __name__ == "__main__":
    torch.set_num_threads(1)
    for chosen in sys.argv[2].split(","):
        train(Path(sys.argv[1]) / chosen, chosen)
