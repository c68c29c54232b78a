"""AdaSPEC as one writes it down first, on Hugging Face's `Trainer`: what ``python -m distill bench`` measures against.

The structure is that of the method's published scripts: at every step all three models run over the batch, whole
logits of the three are cut to the label positions, both divergences are computed on them, and autograd goes back
through everything. Two things differ from those scripts, so that the comparison is about speed alone: exactly ⌈k·n⌉
tokens are selected (they threshold at a quantile), and no model computes the next-token loss that they never use.
"""

import time
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.data import SequentialSampler
from transformers import PreTrainedModel, Trainer, TrainerCallback, TrainingArguments

from decode.core.runner_protocol import synchronize
from distill.config.training import TrainerSettings, TrainingSettings
from distill.data.batches.batch_schedule import Schedule
from distill.data.batches.token_dataset import TokenDataset
from distill.data.corpus import collate
from distill.data.tokenization.label_masks import IGNORE
from distill.losses.token_selection import Selection, share
from distill.models.optimizers import make_optimizer, make_schedule
from distill.teacher.target_distribution import TargetSignal


def examples(rows: TokenDataset, schedule: Schedule, steps: int) -> list[dict[str, list[int]]]:
    """The examples of a schedule's steps, one after the other."""
    found = []
    for i in (int(i) for step in range(steps) for i in schedule.batch(step)):
        span = slice(int(rows.offsets[i]), int(rows.offsets[i + 1]))
        found.append({"input_ids": rows.ids[span].tolist(), "labels": rows.labels[span].tolist()})
    return found


def selective_loss(draft: Tensor, target: Tensor, reference: Tensor, k: float, *, mean: bool) -> Tensor:
    """AdaSPEC's loss from whole logits of label positions, ``[rows, vocab]`` each; their mean, or over all rows.

    Args:
        draft: Logits that carry the gradient.
        target: Of the frozen target.
        reference: Of the frozen reference.
        k: Share of the rows that is selected.
        mean: Divide by the selected rows instead of by all.
    """
    p = functional.softmax(target.float(), dim=-1)
    kl = torch.nn.KLDivLoss(reduction="none")
    actual = kl(functional.log_softmax(draft.float(), dim=-1), p).sum(-1)
    with torch.no_grad():
        known = kl(functional.log_softmax(reference.float(), dim=-1), p).sum(-1)
    count = share(k, len(actual))
    chosen = torch.topk((actual - known).detach(), count).indices
    return actual[chosen].sum() / (count if mean else len(actual))


class _TrainerClock(TrainerCallback):
    def __init__(self, ends: list[float], device: torch.device) -> None:
        self.ends, self.device = ends, device

    def on_step_end(self, *_: Any, **__: Any) -> None:
        synchronize(self.device)
        self.ends.append(time.perf_counter())


class ThreeModels(Trainer):
    """Hugging Face's trainer with the loss of three forward passes."""

    def __init__(
        self, *, target: PreTrainedModel, reference: PreTrainedModel, k: float, mean: bool, **options: Any
    ) -> None:
        super().__init__(**options)
        self.target, self.reference = (m.eval().to(self.args.device) for m in (target, reference))
        self.k, self.mean = k, mean
        self.losses: list[Tensor] = []  # Every step's loss
        self.ends: list[float] = []  # When each step ended, in seconds
        self.add_callback(_TrainerClock(self.ends, self.args.device))

    def compute_loss(
        self, model: Any, inputs: dict[str, Tensor], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """One step's loss."""
        labels = inputs.pop("labels")
        outputs = model(**inputs, use_cache=False)
        with torch.no_grad():
            target = self.target(**inputs, use_cache=False).logits
            reference = self.reference(**inputs, use_cache=False).logits
        mask = labels[:, 1:] != IGNORE
        draft, target, reference = (logits[:, :-1][mask] for logits in (outputs.logits, target, reference))
        loss = selective_loss(draft, target, reference, self.k, mean=self.mean)
        self.losses.append(loss.detach())
        return (loss, outputs) if return_outputs else loss

    def _get_train_sampler(self, *_: Any) -> SequentialSampler:
        assert self.train_dataset is not None
        return SequentialSampler(self.train_dataset)  # the schedule has shuffled already


@dataclass
class TrainingCase:
    """A training that both sides do."""

    folder: str  # of the three models
    rows: TokenDataset
    training: TrainingSettings
    trainer: TrainerSettings
    selection: Selection
    signal: TargetSignal
    steps: int
    schedule: Schedule
    seed: int


def trainer(job: TrainingCase, draft: Any, target: PreTrainedModel, reference: PreTrainedModel) -> ThreeModels:
    """The trainer for the same batches, optimiser and learning rates as draftsmith's own training."""
    optimizer, cpu = make_optimizer(draft, job.training), not torch.cuda.is_available()
    arguments = TrainingArguments(
        output_dir=f"{job.folder}/hf", max_steps=job.steps, per_device_train_batch_size=job.schedule.batch_size,
        max_grad_norm=job.trainer.gradient_clip, logging_strategy="no", save_strategy="no", report_to=[],
        disable_tqdm=True, use_cpu=cpu, remove_unused_columns=False, dataloader_pin_memory=not cpu,
    )  # fmt: skip
    return ThreeModels(
        target=target, reference=reference, k=job.selection.k, mean=job.selection.normalisation == "paper",
        model=draft, args=arguments, train_dataset=examples(job.rows, job.schedule, job.steps),
        data_collator=partial(collate, pad_id=0),
        optimizers=(optimizer, make_schedule(optimizer, job.training, job.steps)),
    )  # fmt: skip
