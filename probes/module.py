"""The linear probes of all layers, trained at once.

The losses of different probes share nothing, so one optimiser minimises their sum. L-BFGS works in coordinates in
which the curvature is close to the identity: at first the inputs are whitened, since the curvature of a logistic loss
is bounded by a quarter of their second moment, then the curvature found on the way takes its place. A few dozen passes
over the data reach the optimum, whatever the scale and correlation of the hidden states.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.loggers import Logger
from torch import Tensor, nn

from decode.errors import UserError
from decode.probe import KINDS, AcceptanceProbe
from distill.fit import quiet
from probes.features import Features

EXTRAS = 3
ITERATIONS = 6
"""L-BFGS iterations of an epoch."""
RENEWALS = 2
"""Epochs after which the coordinates are fitted to the curvature anew."""
EXTRA_PENALTY = 1e-4
"""Penalty on the extras, which is not part of the choice: a strong one on the state leaves them free to speak."""


@dataclass
class Training:
    """How probes are fitted.

    Attributes:
        l2: strengths λ of the penalty λ/2·‖w‖² on the standardised state; each probe takes the best on validation.
        max_epochs: most epochs of `ITERATIONS` iterations.
        patience: epochs without a better validation loss.
        class_balance: weigh both classes equally, and shift the bias back afterwards.
        early_stopping: keep the weights that were best on validation; without, those of the optimum on the data.
    """

    l2: tuple[float, ...] = (1e-3, 1e-2, 1e-1, 1.0)
    max_epochs: int = 20
    patience: int = 2
    class_balance: bool = False
    early_stopping: bool = True


class ProbeModule(L.LightningModule):
    """sigmoid(w·x + b) for every exit, kind and penalty: binary cross-entropy on hard or soft labels.

    Args:
        train: what to learn from.
        validation: held-out prompts.
        label: which of the labels.
        training: see `Training`.

    Attributes:
        best: validation loss ``[exits, kinds · penalties]`` of the best epoch of each probe.
    """

    def __init__(self, train: Features, validation: Features, label: str, training: Training) -> None:
        super().__init__()
        self.training_options = training
        x = train.inputs
        self.register_buffer("mean", x.mean(1, keepdim=True))
        self.register_buffer("scale", x.std(1, keepdim=True).clamp_min(1e-6))
        # tokens last: products with a few columns of weights then run along memory
        self.x = ((x - self.mean) / self.scale).mT.contiguous()
        self.validation_x = ((validation.inputs - self.mean) / self.scale).mT.contiguous()
        self.y, self.validation_y = train.labels[label], validation.labels[label]
        exits, width, n = self.x.shape
        moment = self.x @ self.x.mT / n
        probes = len(KINDS) * len(training.l2)
        mask = torch.ones(1, width, probes)
        mask[:, width - EXTRAS :, : len(training.l2)] = 0  # the plain probe does not see the extras
        self.register_buffer("mask", mask)
        penalty = torch.tensor(list(training.l2) * len(KINDS)).repeat(width, 1)
        penalty[width - EXTRAS :] = EXTRA_PENALTY
        self.register_buffer("penalty", penalty)
        self.register_buffer("white", self._whitener(moment / 4))
        rate = self.y.mean(1).clamp(1e-3, 1 - 1e-3)
        self.register_buffer("rate", rate)
        self.v = nn.Parameter(torch.zeros(exits, width, probes))
        self.b = nn.Parameter(torch.logit(rate)[:, None].repeat(1, probes))
        if training.class_balance:
            self.b.data.zero_()
        self.register_buffer("best", torch.full((exits, probes), torch.inf))
        self.register_buffer("best_w", torch.zeros_like(self.v))
        self.register_buffer("best_b", torch.zeros_like(self.b))

    best: Tensor
    mean: Tensor
    scale: Tensor
    white: Tensor
    mask: Tensor
    penalty: Tensor
    rate: Tensor
    best_w: Tensor
    best_b: Tensor

    @property
    def weights(self) -> Tensor:
        """Weights on standardised inputs, ``[exits, width + 3, kinds · penalties]``."""
        return self._change(self.v * self.mask, lambda v: self.white @ v)

    def _change(self, values: Tensor, how: Callable[[Tensor], Tensor]) -> Tensor:
        """Change the coordinates of ``[exits, width, kinds · penalties]`` by ``[penalties, exits, width, kinds]``."""
        exits, width, probes = values.shape
        apart = values.view(exits, width, len(KINDS), -1).permute(3, 0, 1, 2)
        return how(apart).permute(1, 2, 3, 0).reshape(exits, width, probes)

    def _whitener(self, curvature: Tensor) -> Tensor:
        """Upper triangular A ``[penalties, exits, width, width]`` with Aᵀ·(curvature + penalty)·A near the identity.

        Triangular, so that it does the same for the leading inputs alone, which are those of the plain probe.
        """
        penalties = self.penalty[:, -len(self.training_options.l2) :].T
        floor = 1e-4 * curvature.diagonal(dim1=-2, dim2=-1).mean(-1)[:, None, None] + 1e-7
        damped = curvature + floor * torch.eye(curvature.shape[-1], device=curvature.device)
        whole = damped[None] + torch.diag_embed(penalties)[:, None]
        return torch.linalg.inv(torch.linalg.cholesky(whole)).mT.contiguous()

    def on_fit_start(self) -> None:
        """Moves the data to the device."""
        for name in ("x", "y", "validation_x", "validation_y"):
            setattr(self, name, getattr(self, name).to(self.device))

    def _losses(self, x: Tensor, y: Tensor, w: Tensor, b: Tensor) -> Tensor:
        """Mean binary cross-entropy ``[exits, kinds · penalties]``."""
        z = w.mT @ x + b[..., None]
        target = y[:, None].expand_as(z)
        if not self.training_options.class_balance:
            return F.binary_cross_entropy_with_logits(z, target, reduction="none").mean(-1)
        rate = self.rate[:, None, None]
        weight = target / (2 * rate) + (1 - target) / (2 * (1 - rate))
        return F.binary_cross_entropy_with_logits(z, target, weight, reduction="none").mean(-1)

    def on_train_epoch_end(self) -> None:
        """Fits the coordinates to the curvature at the present weights, during the first epochs."""
        if self.current_epoch >= RENEWALS:
            return
        with torch.no_grad():
            w = self.weights
            middle = [i * len(self.training_options.l2) for i in range(len(KINDS))]
            p = (w[..., middle].mT @ self.x + self.b[:, middle, None]).sigmoid()
            curvature = (p * (1 - p)).mean(1, keepdim=True)
            self.white = self._whitener(self.x * curvature @ self.x.mT / self.x.shape[-1])
            solve = torch.linalg.solve_triangular
            self.v.copy_(self._change(w, lambda apart: solve(self.white, apart, upper=True)))
        self.optimizers().optimizer.state.clear()  # type: ignore[union-attr]

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """The sum over all probes of loss and penalty, on all data."""
        w = self.weights
        penalty = (w.square() * self.penalty).sum() / 2
        return self._losses(self.x, self.y, w, self.b).sum() + penalty

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        """Keeps each probe's weights where its loss on held-out prompts is the best so far."""
        w = self.weights.detach()
        losses = self._losses(self.validation_x, self.validation_y, w, self.b.detach())
        better = (losses < self.best - 1e-6) | (not self.training_options.early_stopping)
        self.best = torch.where(better, losses, self.best)
        self.best_w = torch.where(better[:, None], w, self.best_w)
        self.best_b = torch.where(better, self.b.detach(), self.best_b)
        self.log("validation_loss", self.best.mean(), batch_size=1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """L-BFGS with a line search; an epoch is `ITERATIONS` of its iterations."""
        return torch.optim.LBFGS(self.parameters(), max_iter=ITERATIONS, history_size=20, line_search_fn="strong_wolfe")

    def train_dataloader(self) -> list[Tensor]:
        """One step an epoch, over all data."""
        return [torch.empty(1)]

    def val_dataloader(self) -> list[Tensor]:
        """One step."""
        return [torch.empty(1)]

    def probes(self, features: Features, label: str) -> list[AcceptanceProbe]:
        """The trained probes, one for each exit and kind, for inputs as they are."""
        count = len(self.training_options.l2)
        scale, mean = self.scale.cpu()[:, 0], self.mean.cpu()[:, 0]
        made = []
        for i, layer in enumerate(features.exits):
            for k, kind in enumerate(KINDS):
                at = k * count + int(self.best[i, k * count : (k + 1) * count].argmin())
                w = self.best_w[i, :, at].cpu() / scale[i]
                bias = float(self.best_b[i, at].cpu() - w @ mean[i])
                if self.training_options.class_balance:
                    bias += float(torch.logit(self.rate[i].cpu()))
                extra = w[-EXTRAS:] if kind != "probe" else torch.empty(0)
                made.append(AcceptanceProbe(layer, kind, label, w[:-EXTRAS].clone(), extra.clone(), bias))
        return made


def check_labels(features: Features, label: str) -> None:
    """Refuse labels of a single class.

    Raises:
        UserError: naming the exits and the class.
    """
    rates = features.labels[label].mean(1)
    for layer, rate in zip(features.exits, rates.tolist()):
        if rate in (0.0, 1.0):
            what = "accepted" if rate else "rejected"
            raise UserError(
                f"every token drafted at exit layer {layer} is {what} (label {label}, {len(features)} tokens): there "
                "is nothing to tell apart. Leave the layer out of probes.layers, or give more prompts"
            )


def train_probes(
    train: Features, validation: Features, label: str, training: Training | None = None, logger: Logger | None = None
) -> list[AcceptanceProbe]:
    """Fit the probes of all exits and both kinds.

    Args:
        train: what to learn from.
        validation: held-out prompts, for early stopping and the choice of the penalty.
        label: a name in `Features.labels`.
        training: see `Training`.
        logger: gets the validation loss.

    Raises:
        UserError: the labels of an exit are all the same.
    """
    training = training or Training()
    check_labels(train, label)
    module = ProbeModule(train, validation, label, training)
    stop = EarlyStopping("validation_loss", min_delta=1e-4, patience=training.patience, check_on_train_epoch_end=False)
    with quiet():
        trainer = L.Trainer(
            accelerator="auto" if train.inputs.numel() > 1 << 28 else "cpu",
            devices=1,
            max_epochs=training.max_epochs,
            callbacks=[stop] if training.early_stopping else [],
            logger=logger or False,
            log_every_n_steps=1,
            num_sanity_val_steps=0,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(module)
    return module.probes(train, label)
