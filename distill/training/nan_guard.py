"""A training whose loss is no number: at which step, on which examples, and what the likely cause is."""

from typing import cast

import lightning as L
import numpy as np
import torch
from torch import Tensor

from decode.core.errors import UserError
from distill.config.training import TrainingSettings

SHOWN = 16  # examples named in the message at most


class FirstBad:
    """The first step whose loss was no number, noted on the device, so that no step has to wait for it."""

    def __init__(self) -> None:
        self._step: Tensor | None = None

    def note(self, loss: Tensor, step: int) -> None:
        """A step's loss, a scalar."""
        if self._step is None:
            self._step = torch.full((), -1, device=loss.device)
        self._step = torch.where((self._step < 0) & ~loss.isfinite(), step, self._step)

    def step(self) -> int | None:
        """That step, if there was one; waits for the device."""
        found = -1 if self._step is None else int(self._step)
        return found if found >= 0 else None


def explain(module: L.LightningModule, step: int) -> UserError:
    """The error for a loss that was no number at a step."""
    data = getattr(module.trainer, "datamodule", None)
    schedule, rows = getattr(data, "schedule", None), getattr(data, "train", None)
    examples = [] if schedule is None else sorted(int(i) for i in schedule.batch(step))
    where = f" (training examples {', '.join(map(str, examples[:SHOWN]))}{', …' if len(examples) > SHOWN else ''})"
    return UserError(
        f"the loss is NaN or infinite at step {step}{where if examples else ''}: {_cause(module, rows, examples)}"
    )


def _cause(module: L.LightningModule, rows: object, examples: list[int]) -> str:
    """What to try: what is broken if that can be seen, otherwise the usual suspect."""
    for name, values in getattr(rows, "signals", {}).items():
        for example in examples:
            kept = values[rows.label_offsets[example] : rows.label_offsets[example + 1]]  # type: ignore[attr-defined]
            if kept.dtype == np.float32 and not np.isfinite(kept).all():
                return (
                    f"the kept {name} of example {example} is not finite. Remove the run's work/signals, and set "
                    "target.dtype to float32 or bfloat16 if it was float16"
                )
    precision = str(module.trainer.precision)
    if precision.startswith("16"):
        return f"trainer.precision is {precision}, whose numbers end at 65504; train with bf16-mixed or 32-true"
    rate = cast(TrainingSettings, module.training_settings)
    return (
        f"lower the learning rate (its peak is {rate.lr:.2g}) or raise warmup_steps ({rate.warmup_steps}); "
        f"trainer.gradient_clip (1.0 is usual) holds back single large steps"
        + ("" if precision == "32-true" else f"; or train with precision 32-true instead of {precision}")
    )
