"""The Lightning modules: next-token training, and distillation of every kind of draft."""

import math
import operator
from collections.abc import Iterator
from dataclasses import asdict
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal

import lightning as L
import numpy as np
import torch
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor

from decode.errors import UserError
from decode.models.heads.eagle import DraftHead
from decode.models.open import load_model
from distill import ranks
from distill.config import DraftSettings
from distill.config.base import Values
from distill.config.models import TrainingSettings
from distill.data.dataset import PLACES, Batch, completed, places
from distill.engine.check import FIRST
from distill.kinds.base import GROUPS, Draft
from distill.kinds.kind import open_draft
from distill.losses.chunked import Compared, Rows, chunked_loss, compare, next_token_hits, next_token_loss
from distill.losses.divergences import Divergence
from distill.losses.selection import accepted_rows, share
from distill.networks.layers import decoder_layers
from distill.networks.layerskip import LayerSkip
from distill.networks.lm_head import LMHead, last_hidden
from distill.networks.models import make_optimizer, make_schedule
from distill.signal.target import Signal

Metrics = dict[str, float]
"""Means by name, of a validation with its ``step``."""


class TrainingModule(L.LightningModule):
    """Base of the modules.

    A subclass computes what it needs of a batch in `forward`, inside which sharded weights are complete.

    A batch has ``input_ids``, ``labels`` (-100 where none is learned) and perhaps ``attention_mask``, from any loader.

    Args:
        model: The model to train, or its folder or Hub name.
        training: Optimiser and length, of which checkpoints keep the values.
        steps: Optimiser steps in all.
        seed: All randomness of step i is drawn from (seed, i, rank), so a resumed run needs no saved state of it.

    Attributes:
        history: Every validation's metrics with its step.
        selected: Rows that entered the loss under a selection, by this rank.
        monitor: The logged metric by which checkpoints are compared, and ``mode`` which way is better.
    """

    monitor = "validation_loss"
    mode: Literal["min", "max"] = "min"
    model: Any
    selected = 0

    def __init__(
        self, model: Any, training: TrainingSettings | Values, steps: int, *, seed: int = 0, **kept: Any
    ) -> None:
        super().__init__()
        training = TrainingSettings(**training) if isinstance(training, dict) else training
        kept |= {"training": asdict(training), "steps": steps, "seed": seed}
        if isinstance(model, str | Path):
            kept["model"] = str(model)
            model = load_model(model, device="cpu", dtype="float32").train()
        self.save_hyperparameters(kept, logger=False)
        self.model, self.training_settings, self.steps, self.seed = model, training, steps, seed
        self.history: list[Metrics] = []
        self.sums: dict[str, Tensor] = {}  # of a validation's metrics: sum and count
        self.bad_step = torch.tensor(-1)  # the first whose loss was no number, on the device, so that no step waits
        self.examples: dict[int, list[int]] = {}  # of the steps whose losses have yet to be checked
        self.strict_loading = all(weight.requires_grad for weight in self.model.parameters())  # Lightning's

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """The settings' optimiser and its learning-rate schedule."""
        optimizer = make_optimizer(self.model, self.training_settings, precision=str(self.trainer.precision))
        schedule = make_schedule(optimizer, self.training_settings, self.steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def configure_model(self) -> None:
        """Spreads the weights over the ranks under FSDP, once: Lightning calls this for validation and training."""
        if self.device_mesh is None or hasattr(self, "unshard"):  # a method of sharded modules
            return
        from torch.distributed.fsdp import fully_shard

        mesh = self.device_mesh["data_parallel"]
        for layer in decoder_layers(self.model):
            fully_shard(layer, mesh=mesh)
        fully_shard(self, mesh=mesh)

    def on_before_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        """Adds what a batch of any other loader lacks, while it is on the host."""
        return completed(batch)

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        """Makes dropout a function of (seed, step, part of the step)."""
        seed = (self.seed * 1_000_003 + self.global_step) * 1_009 + int(batch.get("part", 0))
        torch.default_generator.manual_seed(seed)  # torch.manual_seed asks every backend, which takes 0.1 ms a step
        if self.device.type == "cuda":
            torch.cuda.manual_seed(seed)

    @property
    def logs_this_step(self) -> bool:
        """Whether Lightning's loggers take this step's values; only then are further values computed and read."""
        every = self.trainer.log_every_n_steps  # type: ignore[attr-defined]
        return every > 0 and (self.global_step + 1) % every == 0

    def log_step(self, batch: Batch, loss: Tensor, values: dict[str, Tensor]) -> None:
        """Logs a step's values if it is to be logged, and notes whether the loss is finite: see `check_finite`."""
        self.examples.setdefault(self.global_step, []).extend(batch.get("examples", ()))
        loss, bad = loss.detach(), self.bad_step
        if bad.device != loss.device:
            bad = bad.new_full((), -1, device=loss.device)
        self.bad_step = torch.where((bad < 0) & ~loss.isfinite(), self.global_step, bad)
        if self.logs_this_step:
            self.check_finite()
            self.log("loss", loss, prog_bar=True, sync_dist=True)
            self.log_dict({"lr": self.optimizers().param_groups[0]["lr"], **values})  # type: ignore[union-attr]

    def check_finite(self) -> None:
        """Checks that all losses so far were numbers.

        Raises:
            UserError: One was not, with the step, its examples and the likely cause.
        """
        seen, self.examples = self.examples, {}
        if (step := int(self.bad_step)) < 0:
            return
        numbers, training = ", ".join(map(str, sorted(seen.get(step, []))[:16])), self.training_settings
        raise UserError(
            f"the loss is NaN or infinite at step {step}{f' (training examples {numbers})' if numbers else ''}, "
            f"precision {self.trainer.precision}: lower the learning rate (its peak is {training.lr:.2g}), raise "
            f"warmup_steps ({training.warmup_steps}), set a smaller gradient_clip_val in trainer.extra, or train "
            "with precision 32-true or bf16-mixed if it is another one"
        )

    # -- validation -------------------------------------------------------------------------------------------------

    def on_validation_epoch_start(self) -> None:
        """Begins new means. Weights whose training loss was not finite are neither validated nor saved."""
        self.sums = {}
        self.check_finite()

    def measure(self, name: str, total: Tensor, count: Tensor | int) -> None:
        """Adds a batch's sum and count to the mean of a metric, over all batches and ranks."""
        both = torch.stack([total.double(), torch.as_tensor(count, dtype=torch.double, device=total.device)])
        self.sums[name] = self.sums[name] + both if name in self.sums else both

    def on_validation_epoch_end(self) -> None:
        """Adds the means over all batches and ranks to the history, and logs them as ``validation_<name>``.

        Raises:
            UserError: One of them is not finite.
        """
        totals = torch.stack(ranks.exchange(torch.stack([*self.sums.values()]).cpu())).sum(0)
        means = (total / max(count, 1e-30) for total, count in totals.tolist())  # the mean of nothing is 0
        values = self.further(dict(zip(self.sums, means)))
        if not all(map(math.isfinite, values.values())):
            raise UserError(
                f"validation at step {self.global_step} gave {values}: the model's output is not finite. Before the "
                "first step that is the model as loaded: try another dtype. Later, lower the learning rate"
            )
        if not self.trainer.sanity_checking:
            self.history.append({"step": self.global_step, **values})
        for name, value in values.items():
            shown = name in ("alpha", "accepted_length") or f"validation_{name}" == self.monitor
            self.log(f"validation_{name}", value, prog_bar=shown)

    def further(self, values: Metrics) -> Metrics:
        """Adds what follows from the means."""
        return values

    # -- what checkpoints hold ----------------------------------------------------------------------------------------

    def on_save_checkpoint(self, checkpoint: Values) -> None:
        """Saves the learning curve and the selected rows of all ranks; of a partly frozen model the trained weights."""
        checkpoint |= {"history": self.history, "selected": sum(ranks.exchange(self.selected))}
        if not self.strict_loading:
            trained = {name for name, weight in self.named_parameters() if weight.requires_grad}
            checkpoint["state_dict"] = {n: w for n, w in checkpoint["state_dict"].items() if n in trained}

    def on_load_checkpoint(self, checkpoint: Values) -> None:
        """Restores the learning curve, and on the first rank the number of selected rows."""
        self.history = list(checkpoint["history"])
        self.selected = checkpoint["selected"] if ranks.is_first() else 0


class CausalLMModule(TrainingModule):
    """Next-token training; the best checkpoint has the smallest validation loss.

    Under LayerSkip that is the recipe's, over some exits and the last layer: of a model that is trained already, the
    last layer's loss is the smallest where the exits have learned least.

    Args:
        layerskip: LayerSkip's recipe, where the model is trained with it.
        arguments: Those of `TrainingModule`.
    """

    def __init__(self, *arguments: Any, layerskip: LayerSkip | None = None, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.layerskip = layerskip
        if layerskip is not None:
            self.monitor = "validation_recipe_loss"

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """The loss to train on, that of the last layer alone, and how many labels are the most probable token.

        The first is the mean cross-entropy over the batch's labels; under LayerSkip together with that of the early
        exits. The last is counted in evaluation only.
        """
        batch = completed(batch)
        place = batch[PLACES]
        hidden = last_hidden(self.model, batch["input_ids"], place)
        head, labels = LMHead(self.model), batch["labels"].flatten().index_select(0, place + 1)
        loss = next_token_loss(hidden, head, labels)
        total, hits = loss, labels.new_zeros(()) if self.training else next_token_hits(hidden, head, labels)
        if self.layerskip is not None:
            total = self.layerskip.combine(loss, lambda rows: next_token_loss(rows, head, labels), place)
        return total, loss, hits

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """The batch's loss, weighted by its share of the step's labels."""
        if self.layerskip is not None:
            self.layerskip.begin(self.global_step)
        total, last, _ = self(batch)
        self.log_step(batch, total, {} if self.layerskip is None else {"last_layer_loss": last.detach()})
        return total * batch.get("weight", 1.0)

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Adds up losses and top-1 hits."""
        if self.layerskip is not None:
            self.layerskip.watch()
        batch = completed(batch)
        total, loss, hits = self(batch)
        count = len(batch[PLACES])
        self.measure("loss", loss * count, count)
        self.measure("accuracy", hits, count)
        if self.layerskip is not None:
            self.measure("recipe_loss", total * count, count)


class DistillModule(TrainingModule):
    """DistillSpec; with a reference, AdaSPEC. The best checkpoint has the draft's largest ``monitor``.

    The loss is Σ w·D(p, q) over the chosen rows, divided by Σ w (see `Rows.mass`). EAGLE-1 adds the distance of its
    states from the target's, DSpark the cross-entropy of its confidences, DFlash 2 the loss of its choice.

    What is given by name is read again by ``load_from_checkpoint``; what is given as an object has to be given to it.

    Args:
        draft: Makes rows of batches; its model is trained. Or its folder or Hub name.
        signal: The target, or its folder or Hub name.
        arguments: Those of `TrainingModule` after the model.
        settings: Divergence and selection. None: forward KL of all tokens.
        reference: Of AdaSPEC, where batches have no ``reference_loss``; or its folder or Hub name.
    """

    mode = "max"

    def __init__(
        self, draft: Draft | str, signal: Signal | str, *arguments: Any, settings: DraftSettings | Values | None = None,
        reference: Draft | str | None = None, **options: Any,
    ) -> None:  # fmt: skip
        settings = DraftSettings(**settings) if isinstance(settings, dict) else settings or DraftSettings()
        names = {"draft": draft, "signal": signal, "reference": reference}
        kept: Values = {name: value for name, value in names.items() if isinstance(value, str)}
        kept["settings"] = asdict(settings)
        target = load_model(signal, device="cpu", dtype="float32") if isinstance(signal, str) else None
        draft = open_draft(draft, target) if isinstance(draft, str) else draft
        super().__init__(draft.model, *arguments, **(options | kept))
        if isinstance(signal, str):
            vocab = None if isinstance(draft.model, DraftHead) else LMHead(draft.model).vocab
            signal = Signal(target, reader=draft.model, vocab=vocab)
        self.draft, self.signal, self.settings = draft, signal, settings
        self.reference = open_draft(reference, target) if isinstance(reference, str) else reference
        if self.reference is not None:
            self.reference.model.eval().requires_grad_(False)
        self.monitor, self.divergence = draft.monitor, Divergence(settings.divergence)

    @classmethod
    def of(
        cls, draft: str, target: str, *, reference: str | None = None, k: float = 0.4, divergence: str = "forward_kl",
        steps: int = 1000, lr: float = 1e-3, seed: int = 0, **training: Any,
    ) -> "DistillModule":  # fmt: skip
        """A module from folders or Hub names; ``training`` are further fields of `TrainingSettings`."""
        values = asdict(TrainingSettings(steps=steps, lr=lr, **training))
        settings = {"reference": reference and "reference", "k": k, "divergence": divergence}
        return cls(draft, target, training=values, steps=steps, settings=settings, reference=reference, seed=seed)

    def setup(self, stage: str) -> None:
        """Moves frozen models, too, to this rank's device: before the first validation."""
        self.signal.to(self.trainer.strategy.root_device)
        if self.reference is not None:
            self.reference.model.to(self.trainer.strategy.root_device)

    def on_before_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        """Adds what a batch of any other loader lacks, while it is on the host."""
        return self.indexed(batch)

    def indexed(self, batch: Batch) -> Batch:
        """The batch with its rows; those of a training batch that has none yet are drawn from (seed, step, text)."""
        if GROUPS in batch:
            return batch
        place = [self.seed, 6, self.global_step, int(batch.get("part", 0))] if self.training else []
        texts = range(len(batch["labels"]))
        chance = [np.random.default_rng([*place, text]) for text in texts] if self.training else None
        return self.draft.indexed(completed(batch), chance)

    def check_finite(self) -> None:
        """Checks the losses, and the answers of servers that were trained on (`UserError`: no samples)."""
        super().check_finite()
        if self.signal.check is not None:
            self.signal.check.judge(FIRST)

    def forward(self, batch: Batch, *, training: bool) -> tuple[Tensor, Rows, Compared]:
        """The loss of a training batch, or the measures of a validation batch with its rows."""
        rows = self.draft.rows(batch, self.signal, training=training)
        if not training:
            return rows.hidden.new_zeros(()), rows, compare(rows, self.divergence)
        warm = self.global_step < round(self.settings.kl_first * self.steps)
        divergence, chosen, compared, mass = Divergence() if warm else self.divergence, None, None, rows.mass
        if self.settings.selects:
            if rows.reference is None and self.reference is not None:
                with torch.no_grad():
                    rows.reference = compare(self.reference.rows(batch, self.signal), self.divergence).losses
            compared = compare(rows, self.divergence, metrics=rows.confidence is not None)
            chosen = self.draft.chosen(rows, compared, self.settings.k)
            mass *= share(self.settings.k, len(rows)) / max(1, len(rows))
            self.selected += len(chosen)
        elif self.settings.accepted_only:
            alive = accepted_rows(rows, batch[PLACES], batch["labels"].numel(), self.divergence)
            rows.weight = alive if rows.weight is None else alive * rows.weight
            if alive.is_cpu and not self.logs_this_step:  # elsewhere the host would wait; what is logged is of all rows
                chosen = places(alive)
        metrics, compiled = self.logs_this_step or rows.confidence is not None, rows.hidden.is_cuda
        total, measured = chunked_loss(rows, divergence, chosen, metrics=metrics, compiled=compiled)
        loss = total / (mass or 1.0)
        if rows.distance is not None:
            loss = loss + rows.distance.sum() / (rows.mass or 1.0)
        if rows.confidence is not None:
            loss = loss + self.draft.confidence_loss(rows, (measured if compared is None else compared).alpha)
        return loss, rows, measured

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """The batch's loss, weighted by its share of the step's labels."""
        batch = self.indexed(batch)
        loss, rows, measured = self(batch, training=True)
        loss = loss * batch.get("weight", 1.0)
        if self.device_mesh is None and (self.trainer.world_size > 1 or not len(rows)):
            # DDP waits for a gradient of every weight, and AdamW skips one without; FSDP has language models alone
            loss = loss + 0.0 * sum(weight.sum() for weight in self.model.parameters() if weight.requires_grad)
        values = {"alpha": measured.alpha, "chosen_loss": measured.losses} if self.logs_this_step else {}
        self.log_step(batch, loss, {name: each.mean() for name, each in values.items()})
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Adds up divergence, and acceptance by position in the draft, whatever the selection: see `Compared`."""
        batch = self.indexed(batch)
        _, rows, measured = self(batch, training=False)
        place = batch[PLACES]
        first = measured.losses[rows.step == 0]
        self.measure("loss", first.sum(), len(first))
        for name in ("alpha", "likeliest", "agreement"):
            positions = acceptance_by_position(rows, getattr(measured, name), place, self.draft.depth)
            for position, (total, count) in enumerate(positions, 1):
                self.measure(name if position == 1 else f"{name}_{position}", total, count)

    def further(self, values: Metrics) -> Metrics:
        """Adds the accepted length 1 + α₁ + α₁·α₂ + … of tokens that are drafted as `Draft.accepted` says."""
        name, deeper = self.draft.accepted, range(2, self.draft.depth + 1)
        alphas = [values[name], *(values[f"{name}_{i}"] for i in deeper)]
        return values | {"accepted_length": 1 + sum(accumulate(alphas, operator.mul))}


def acceptance_by_position(rows: Rows, accepted: Tensor, place: Tensor, depth: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields Σ wᵢ·aᵢ and Σ wᵢ for each position i of a draft, over the drafts that begin at any label token.

    aᵢ is the acceptance of a draft's i-th token and wᵢ the product of those before it, so that their ratio is the
    acceptance of position i given that the draft is accepted up to there. Drafts that a text's end cuts short count
    up to that end. A language model without drafting steps drafts a token alike at every position.

    Args:
        rows: Of a batch.
        accepted: Acceptance of each row, ``[rows]``.
        place: Where each of the batch's label tokens lies among all its tokens, ``[label tokens]``, ascending.
        depth: Positions of a draft.
    """
    reached = torch.ones(int(place[-1:].sum()) + depth, dtype=torch.float64, device=place.device)
    for i in range(depth):
        some = places(rows.step == (i if rows.groups else 0))
        starts = place[rows.at[some]] - i + depth - 1  # shifted: none is negative
        weight = reached[starts]
        walked = weight * accepted[some]
        yield walked.sum(), weight.sum()
        reached = torch.zeros_like(reached).index_copy(0, starts, walked)
