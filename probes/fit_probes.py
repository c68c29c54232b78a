"""The linear probes of all layers, fitted at once: a Lightning module whose training step is Newton's.

The losses of different probes are independent, so each takes its own Newton step, all of them in the same few batched
products. The gradient is over all tokens, the Hessian over a part of them, another one in each step, at a fraction of
the cost; a line search chooses the length of the step. About ten steps reach the optimum whatever the scale and
correlation of the hidden states.
"""

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.loggers import Logger
from torch import Tensor

from decode.core.errors import UserError
from decode.drafters.acceptance_probe import KINDS, AcceptanceProbe
from distill.training.lightning_trainer import quiet
from probes.hidden_state_features import EXTRAS, Features
from probes.probe_settings import ProbeSettings

CURVATURE_ROWS = 20  # tokens that the curvature is taken from, per input
STEPS = 1.0, 0.5, 0.25, 0.1, 0.02, 0.0  # lengths of a Newton step that are tried; each probe takes the best
EXTRA_PENALTY = 1e-4
"""Penalty on the extras, the same for all penalties on the state, so that a strong one there does not shrink them."""
PROGRESS = 1e-4  # smallest gain in the mean validation loss that counts as one
LARGE = 1 << 28  # numbers in the inputs from which a GPU is used where there is one


def check_labels(features: Features, label: str) -> None:
    """Refuse labels of a single class."""
    for layer, rate in zip(features.exits, features.labels[label].mean(1).tolist()):
        if rate in (0.0, 1.0):
            what = "accepted" if rate else "rejected"
            raise UserError(
                f"every token drafted at exit layer {layer} is {what} (label {label}, {len(features)} tokens): there "
                "is nothing to tell apart. Leave the layer out of probes.layers, or give more prompts"
            )


def train_probes(
    train: Features,
    validation: Features,
    label: str,
    options: ProbeSettings | None = None,
    logger: Logger | None = None,
    *,
    early_stopping: bool = True,
) -> list[AcceptanceProbe]:
    """Fit sigmoid(w·x + b) for every exit, kind and penalty: binary cross-entropy on hard or soft labels.

    Without early stopping the weights are those of the optimum on the data, not the best on the validation texts.

    Args:
        train: what to learn from.
        validation: held-out prompts, for early stopping and the choice of the penalty.
        label: a name in `Features.labels`.
        options: ``l2``, ``max_epochs`` and ``patience`` are read.
        logger: gets the validation loss.
        early_stopping: keep the weights that were best on validation; without, those of the optimum on the data.

    Returns:
        A probe for each exit and kind, with the penalty of the least validation loss.

    Raises:
        UserError: the labels of an exit are all the same.
    """
    options = options or ProbeSettings()
    check_labels(train, label)
    module = ProbeModule(train, validation, label, options, keep_best=early_stopping)
    stop = EarlyStopping("validation_loss", min_delta=PROGRESS, patience=options.patience, check_finite=False)
    with quiet():
        trainer = L.Trainer(
            accelerator="gpu" if module.place.type == "cuda" else "cpu",
            devices=1,
            max_epochs=options.max_epochs,
            callbacks=[stop] if early_stopping else [],
            logger=logger or False,
            log_every_n_steps=1,
            num_sanity_val_steps=0,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            inference_mode=False,
        )
        try:
            trainer.fit(module)
        except SystemExit as end:  # Lightning's way of ending after Ctrl-C
            raise KeyboardInterrupt from end
    return module.probes()


class ProbeModule(L.LightningModule):
    """All probes of one label: their weights, and the data where they are fitted.

    Attributes:
        w: weights on standardised inputs, the bias last, ``[exits, kinds · penalties, width + 4]``.
        kept: of each probe those that were best on the validation texts, or the last ones.
    """

    automatic_optimization = False

    def __init__(
        self, train: Features, validation: Features, label: str, options: ProbeSettings, *, keep_best: bool
    ) -> None:
        super().__init__()
        self.exits, self.count, self.label, self.keep_best = train.exits, len(options.l2), label, keep_best
        self.place = torch.device("cuda" if torch.cuda.is_available() and train.inputs.numel() > LARGE else "cpu")
        self.mean = train.inputs.mean(1, keepdim=True)
        self.scale = train.inputs.std(1, keepdim=True).clamp_min(1e-6)
        self.x, self.validation_x = self._standardised(train.inputs), self._standardised(validation.inputs)
        self.y, self.validation_y = (f.labels[label][:, None].to(self.place) for f in (train, validation))
        exits, width, _ = self.x.shape
        probes = len(KINDS) * self.count
        self.mask = torch.ones(probes, width, device=self.place)
        self.mask[: self.count, -1 - EXTRAS : -1] = 0  # the plain probe does not see the extras
        self.penalty = torch.tensor(options.l2 * len(KINDS), device=self.place)[:, None].repeat(1, width)
        self.penalty[:, -1 - EXTRAS : -1] = EXTRA_PENALTY
        self.penalty[:, -1] = 0
        self.w = torch.zeros(exits, probes, width, device=self.place)
        self.w[..., -1] = torch.logit(self.y.mean(-1), eps=1e-3)
        self.best, self.kept = torch.full_like(self.w[..., 0], torch.inf), torch.zeros_like(self.w)

    def _standardised(self, inputs: Tensor) -> Tensor:
        """``[exits, width + 3, n]`` with a last row of ones: products with few weights then run along memory."""
        x = ((inputs - self.mean) / self.scale).mT
        return torch.cat([x, torch.ones_like(x[:, :1])], 1).to(self.place)

    def train_dataloader(self) -> list[int]:
        """One batch: a Newton step is of all tokens."""
        return [0]

    def val_dataloader(self) -> list[int]:
        """One batch, after every step."""
        return [0]

    def configure_optimizers(self) -> None:
        """None: the training step itself moves the weights."""

    @torch.no_grad()
    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        """One Newton step of every probe, as long as suits its objective: loss and penalty on the training data."""
        z = self.w @ self.x
        p = z.sigmoid()
        gradient = ((p - self.y) @ self.x.mT / self.x.shape[-1] + self.penalty * self.w) * self.mask
        step = -self._solve(p * (1 - p), gradient, self.current_epoch)
        along = step @ self.x
        lengths = torch.tensor(STEPS, device=self.place)
        tried = [(self.w + t * step).square().mul(self.penalty).sum(-1) / 2 for t in lengths]
        tried = [penalty + _losses(z + t * along, self.y) for penalty, t in zip(tried, lengths)]
        self.w += lengths[torch.stack(tried).nan_to_num(torch.inf).argmin(0)][..., None] * step

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        """Logs the mean of the best losses so far, and keeps each probe's weights of its own best."""
        losses = _losses(self.w @ self.validation_x, self.validation_y)
        better = (losses < self.best - 1e-6) | (not self.keep_best)
        self.best = torch.where(better, losses, self.best)
        self.kept = torch.where(better[..., None], self.w, self.kept)
        self.log("validation_loss", self.best.mean(), batch_size=1)

    def _solve(self, curvature: Tensor, gradient: Tensor, epoch: int) -> Tensor:
        """(Hessian)⁻¹·gradient, the Hessian from every k-th token."""
        stride = max(1, self.x.shape[-1] // (CURVATURE_ROWS * self.x.shape[1]))
        x, c = (values[..., epoch % stride :: stride].contiguous() for values in (self.x, curvature))
        step = torch.empty_like(gradient)
        for i in range(gradient.shape[1]):  # one probe of every exit at a time: the weighted copy of x is large
            mask = self.mask[i]
            hessian = (x * c[:, i, None]) @ x.mT / x.shape[-1] * (mask[:, None] * mask)
            floor = 1e-5 * hessian.diagonal(dim1=-2, dim2=-1).mean(-1, keepdim=True) + 1e-7
            hessian = hessian + torch.diag_embed(self.penalty[i] + floor + (1 - mask))
            step[:, i] = torch.cholesky_solve(gradient[:, i, :, None], torch.linalg.cholesky(hessian))[..., 0]
        return step

    def probes(self) -> list[AcceptanceProbe]:
        """The best probe of each exit and kind, for inputs as they are."""
        made, w, losses = [], self.kept.cpu(), self.best.cpu()
        for i, layer in enumerate(self.exits):
            for kind, at in zip(KINDS, range(0, w.shape[1], self.count)):
                best = w[i, at + int(losses[i, at : at + self.count].argmin())]
                weight = best[:-1] / self.scale[i, 0]
                bias = float(best[-1] - weight @ self.mean[i, 0])
                state, extra = weight[:-EXTRAS].clone(), weight[-EXTRAS:].clone()
                made.append(AcceptanceProbe(layer, kind, self.label, state, extra[: EXTRAS * (kind != "probe")], bias))
        return made


def _losses(z: Tensor, y: Tensor) -> Tensor:
    """Mean binary cross-entropy ``[exits, probes]`` of logits ``[exits, probes, n]``."""
    return (F.softplus(z) - z * y).mean(-1)
