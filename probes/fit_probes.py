"""The linear probes of all layers, fitted at once by Newton's method.

The losses of different probes are independent, so each takes its own Newton step, all of them in the same few batched
products. The gradient is over all tokens, the Hessian over a part of them, another one in each step, at a fraction of
the cost; a line search chooses the length of the step. About ten steps reach the optimum whatever the scale and
correlation of the hidden states.
"""

import torch
import torch.nn.functional as F
from lightning.pytorch.loggers import Logger
from torch import Tensor

from decode.core.errors import UserError
from decode.drafters.acceptance_probe import KINDS, AcceptanceProbe
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


@torch.no_grad()
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
    fit = _Fit(train, validation, label, options)
    best = torch.full_like(fit.w[..., 0], torch.inf)
    kept, least, waited = torch.zeros_like(fit.w), torch.inf, 0
    for epoch in range(options.max_epochs):
        fit.step(epoch)
        losses = fit.validation_loss()
        better = (losses < best - 1e-6) | (not early_stopping)
        best, kept = torch.where(better, losses, best), torch.where(better[..., None], fit.w, kept)
        mean = float(best.mean())
        if logger is not None:
            logger.log_metrics({"validation_loss": mean, "epoch": epoch}, step=epoch)
        least, waited = (mean, 0) if mean + PROGRESS < least else (least, waited + 1)
        if early_stopping and waited >= options.patience:
            break
    return fit.probes(kept.cpu(), best.cpu(), label)


class _Fit:
    """All probes of one label: their weights, and the data on the device.

    Attributes:
        w: weights on standardised inputs, the bias last, ``[exits, kinds · penalties, width + 4]``.
    """

    def __init__(self, train: Features, validation: Features, label: str, options: ProbeSettings) -> None:
        self.exits, self.count = train.exits, len(options.l2)
        self.device = torch.device("cuda" if torch.cuda.is_available() and train.inputs.numel() > LARGE else "cpu")
        self.mean = train.inputs.mean(1, keepdim=True)
        self.scale = train.inputs.std(1, keepdim=True).clamp_min(1e-6)
        self.x, self.validation_x = self._standardised(train.inputs), self._standardised(validation.inputs)
        self.y, self.validation_y = (f.labels[label][:, None].to(self.device) for f in (train, validation))
        exits, width, _ = self.x.shape
        probes = len(KINDS) * self.count
        self.mask = torch.ones(probes, width, device=self.device)
        self.mask[: self.count, -1 - EXTRAS : -1] = 0  # the plain probe does not see the extras
        self.penalty = torch.tensor(options.l2 * len(KINDS), device=self.device)[:, None].repeat(1, width)
        self.penalty[:, -1 - EXTRAS : -1] = EXTRA_PENALTY
        self.penalty[:, -1] = 0
        self.w = torch.zeros(exits, probes, width, device=self.device)
        self.w[..., -1] = torch.logit(self.y.mean(-1), eps=1e-3)

    def _standardised(self, inputs: Tensor) -> Tensor:
        """``[exits, width + 3, n]`` with a last row of ones: products with few weights then run along memory."""
        x = ((inputs - self.mean) / self.scale).mT
        return torch.cat([x, torch.ones_like(x[:, :1])], 1).to(self.device)

    def validation_loss(self) -> Tensor:
        """Of every probe, ``[exits, probes]``."""
        return _losses(self.w @ self.validation_x, self.validation_y)

    def step(self, epoch: int) -> None:
        """One Newton step of every probe, as long as suits its objective: loss and penalty on the training data."""
        z = self.w @ self.x
        p = z.sigmoid()
        gradient = ((p - self.y) @ self.x.mT / self.x.shape[-1] + self.penalty * self.w) * self.mask
        step = -self._solve(p * (1 - p), gradient, epoch)
        along = step @ self.x
        lengths = torch.tensor(STEPS, device=self.device)
        tried = [(self.w + t * step).square().mul(self.penalty).sum(-1) / 2 for t in lengths]
        tried = [penalty + _losses(z + t * along, self.y) for penalty, t in zip(tried, lengths)]
        self.w += lengths[torch.stack(tried).nan_to_num(torch.inf).argmin(0)][..., None] * step

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

    def probes(self, w: Tensor, losses: Tensor, label: str) -> list[AcceptanceProbe]:
        """The best probe of each exit and kind, for inputs as they are."""
        made = []
        for i, layer in enumerate(self.exits):
            for kind, at in zip(KINDS, range(0, w.shape[1], self.count)):
                best = w[i, at + int(losses[i, at : at + self.count].argmin())]
                weight = best[:-1] / self.scale[i, 0]
                bias = float(best[-1] - weight @ self.mean[i, 0])
                state, extra = weight[:-EXTRAS].clone(), weight[-EXTRAS:].clone()
                made.append(AcceptanceProbe(layer, kind, label, state, extra[: EXTRAS * (kind != "probe")], bias))
        return made


def _losses(z: Tensor, y: Tensor) -> Tensor:
    """Mean binary cross-entropy ``[exits, probes]`` of logits ``[exits, probes, n]``."""
    return (F.softplus(z) - z * y).mean(-1)
