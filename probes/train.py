"""The linear probes of all layers, trained at once by Newton's method.

The losses of different probes share nothing, so each takes its own Newton step, all of them in the same few batched
products. The gradient sees all tokens, the curvature a part of them that moves on from step to step: enough of a
direction, at a fraction of its cost, and the line search does the rest. About ten steps reach the optimum whatever
the scale and correlation of the hidden states.
"""

from __future__ import annotations

from dataclasses import dataclass

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.loggers import Logger
from torch import Tensor, nn

from decode.core.errors import UserError
from decode.drafters.acceptance_probe import KINDS, AcceptanceProbe
from distill.training.trainer import quiet
from probes.features import Features

EXTRAS = 3
CURVATURE_ROWS = 20
"""Tokens that the curvature is taken from, per input."""
STEPS = 1.0, 0.5, 0.25, 0.1, 0.02
"""Lengths of a Newton step that are tried; each probe takes the best."""
EXTRA_PENALTY = 1e-4
"""Penalty on the extras, which is not part of the choice: a strong one on the state leaves them free to speak."""


@dataclass
class Training:
    """How probes are fitted.

    Attributes:
        l2: strengths λ of the penalty λ/2·‖w‖² on the standardised state; each probe takes the best on validation.
        max_epochs: most Newton steps.
        patience: steps without a better validation loss.
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
        w: weights on standardised inputs, the bias last, ``[exits, kinds · penalties, width + 4]``.
        best: validation loss ``[exits, kinds · penalties]`` of the best step of each probe.
        best_w: the weights then.
    """

    automatic_optimization = False
    best: Tensor
    best_w: Tensor
    mean: Tensor
    scale: Tensor
    mask: Tensor
    penalty: Tensor
    rate: Tensor

    def __init__(self, train: Features, validation: Features, label: str, training: Training) -> None:
        super().__init__()
        self.training_options = training
        x = train.inputs
        self.register_buffer("mean", x.mean(1, keepdim=True))
        self.register_buffer("scale", x.std(1, keepdim=True).clamp_min(1e-6))
        self.x, self.validation_x = self._standardised(x), self._standardised(validation.inputs)
        self.y, self.validation_y = train.labels[label][:, None], validation.labels[label][:, None]
        exits, width, _ = self.x.shape
        count = len(training.l2)
        probes = len(KINDS) * count
        mask = torch.ones(probes, width)
        mask[:count, -1 - EXTRAS : -1] = 0  # the plain probe does not see the extras
        self.register_buffer("mask", mask)
        penalty = torch.tensor(list(training.l2) * len(KINDS))[:, None].repeat(1, width)
        penalty[:, -1 - EXTRAS : -1] = EXTRA_PENALTY
        penalty[:, -1] = 0
        self.register_buffer("penalty", penalty)
        self.register_buffer("rate", self.y.mean(-1).clamp(1e-3, 1 - 1e-3))
        self.w = nn.Parameter(torch.zeros(exits, probes, width))
        if not training.class_balance:
            self.w.data[..., -1] = torch.logit(self.rate)
        self.register_buffer("best", torch.full((exits, probes), torch.inf))
        self.register_buffer("best_w", torch.zeros_like(self.w))

    def _standardised(self, inputs: Tensor) -> Tensor:
        """``[exits, width + 3, n]`` with a last row of ones: products with few weights then run along memory."""
        x = ((inputs - self.mean) / self.scale).mT
        return torch.cat([x, torch.ones_like(x[:, :1])], 1)

    def on_fit_start(self) -> None:
        """Moves the data to the device."""
        for name in ("x", "y", "validation_x", "validation_y"):
            setattr(self, name, getattr(self, name).to(self.device))

    def _balance(self, y: Tensor) -> Tensor | None:
        """Weights that make both classes count the same, where that is asked for."""
        if not self.training_options.class_balance:
            return None
        rate = self.rate[..., None]
        return y / (2 * rate) + (1 - y) / (2 * (1 - rate))

    def _losses(self, z: Tensor, y: Tensor) -> Tensor:
        """Mean binary cross-entropy ``[exits, probes]`` of logits ``[exits, probes, n]``."""
        losses = F.softplus(z) - z * y
        weight = self._balance(y)
        return (losses if weight is None else losses * weight).mean(-1)

    @torch.no_grad()
    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        """One Newton step of every probe."""
        x, w, n = self.x, self.w, self.x.shape[-1]
        z = w @ x
        p = z.sigmoid()
        weight = self._balance(self.y)
        residual, curvature = p - self.y, p * (1 - p)
        if weight is not None:
            residual, curvature = residual * weight, curvature * weight
        gradient = (residual @ x.mT / n + self.penalty * w) * self.mask
        step = -self._solve(curvature, gradient)
        along = step @ x
        lengths = torch.tensor([*STEPS, 0.0], device=self.device)
        tried = torch.stack([self._objective(z + t * along, w + t * step) for t in lengths])
        self.w.add_(lengths[tried.nan_to_num(torch.inf).argmin(0)][..., None] * step)

    def _objective(self, z: Tensor, w: Tensor) -> Tensor:
        """Loss and penalty of every probe on the training data, ``[exits, probes]``."""
        return self._losses(z, self.y) + (w.square() * self.penalty).sum(-1) / 2

    def _solve(self, curvature: Tensor, gradient: Tensor) -> Tensor:
        """(Hessian)⁻¹·gradient, the Hessian from every k-th token."""
        stride = max(1, self.x.shape[-1] // (CURVATURE_ROWS * self.x.shape[1]))
        first = self.current_epoch % stride
        x, c = self.x[..., first::stride].contiguous(), curvature[..., first::stride]
        step = torch.empty_like(gradient)
        for i in range(gradient.shape[1]):  # one probe of every exit at a time: the weighted copy of x is large
            mask = self.mask[i]
            hessian = (x * c[:, i, None]) @ x.mT / x.shape[-1] * (mask[:, None] * mask)
            floor = 1e-5 * hessian.diagonal(dim1=-2, dim2=-1).mean(-1, keepdim=True) + 1e-7
            hessian = hessian + torch.diag_embed(self.penalty[i] + floor + (1 - mask))
            step[:, i] = torch.cholesky_solve(gradient[:, i, :, None], torch.linalg.cholesky(hessian))[..., 0]
        return step

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        """Keeps each probe's weights where its loss on held-out prompts is the best so far."""
        losses = self._losses(self.w.detach() @ self.validation_x, self.validation_y)
        better = (losses < self.best - 1e-6) | (not self.training_options.early_stopping)
        self.best = torch.where(better, losses, self.best)
        self.best_w = torch.where(better[..., None], self.w.detach(), self.best_w)
        self.log("validation_loss", self.best.mean(), batch_size=1)

    def configure_optimizers(self) -> None:
        """None: the steps are taken here."""

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
                w = self.best_w[i, at, :-1].cpu() / scale[i]
                bias = float(self.best_w[i, at, -1].cpu() - w @ mean[i])
                if self.training_options.class_balance:
                    bias += float(torch.logit(self.rate[i, 0].cpu()))
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
