"""Training, calibration and evaluation of the linear probes of all exit layers.

The losses of different probes are independent, so every probe takes its own Newton step, and all of them share a few
batched products. The gradient uses all tokens; the Hessian uses another subset of them in each step; a line search
chooses the length of the step. About ten steps reach the optimum whatever the scale of the hidden states.
"""

from collections.abc import Sequence
from typing import Any

import lightning as L
import numpy as np
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.loggers import Logger
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from torch import Tensor

from decode.drafters.probe import KINDS, AcceptanceProbe
from decode.errors import UserError
from decode.trace import clustered_ratio
from distill.trainer import quiet
from probes.features import EXTRAS, Features
from probes.settings import ProbeSettings

CURVATURE_ROWS = 20  # tokens per input from which the Hessian is computed
STEPS = 1.0, 0.5, 0.25, 0.1, 0.02, 0.0  # lengths of a Newton step that the line search tries
EXTRA_PENALTY = 1e-4  # L2 penalty on the confidence features, whatever the penalty on the state
EPOCHS = 20  # at most; one is a Newton step of every probe over all data
PROGRESS, PATIENCE = 1e-4, 2  # smallest gain in validation loss that counts, and epochs without one before the end
LARGE = 1 << 28  # size of the inputs above which a GPU is used where there is one
BINS = 15  # bins of the calibration error


def train_probes(
    train: Features,
    validation: Features,
    label: str,
    options: ProbeSettings | None = None,
    logger: Logger | None = None,
    *,
    early_stopping: bool = True,
) -> list[AcceptanceProbe]:
    """Fit sigmoid(w·x + b) by binary cross-entropy for every exit, kind of probe and penalty.

    Args:
        train: what to learn from.
        validation: held-out texts, for early stopping, the choice of the penalty and the calibration.
        label: name of the labels, which the probes carry.
        options: ``l2`` is read.
        logger: gets the validation loss.
        early_stopping: keep the weights that are best on validation; False keeps those of the optimum on the data.

    Returns:
        A calibrated probe for each exit and kind, with the penalty of the least validation loss.

    Raises:
        UserError: all labels of an exit are the same.
    """
    options = options or ProbeSettings()
    for layer, rate in zip(train.exits, train.labels.mean(1).tolist()):
        if rate in (0.0, 1.0):
            raise UserError(
                f"every token drafted at exit layer {layer} is {'accepted' if rate else 'rejected'} (label {label}, "
                f"{len(train)} tokens), so there is nothing to learn; leave the layer out of probes.layers, or give "
                "more prompts"
            )
    module = ProbeModule(train, validation, options, keep_best=early_stopping)
    stop = EarlyStopping("validation_loss", min_delta=PROGRESS, patience=PATIENCE, check_finite=False)
    with quiet():
        trainer = L.Trainer(
            accelerator="gpu" if module.place.type == "cuda" else "cpu",
            devices=1,
            max_epochs=EPOCHS,
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
        except SystemExit as end:  # Lightning ends so after Ctrl-C
            raise KeyboardInterrupt from end
    probes = module.probes(label)
    for probe in probes:
        calibrate(probe, validation)
    return probes


class ProbeModule(L.LightningModule):
    """All probes of one label: their weights, and the data on the device where they are fitted.

    Attributes:
        w: weights on standardised inputs, the bias last, ``[exits, kinds · penalties, width + 4]``.
        kept: weights of each probe that were best on the validation texts, or the last ones.
    """

    automatic_optimization = False

    def __init__(self, train: Features, validation: Features, options: ProbeSettings, *, keep_best: bool) -> None:
        super().__init__()
        self.exits, self.count, self.keep_best = train.exits, len(options.l2), keep_best
        self.place = torch.device("cuda" if torch.cuda.is_available() and train.inputs.numel() > LARGE else "cpu")
        self.mean = train.inputs.mean(1, keepdim=True)
        self.scale = train.inputs.std(1, keepdim=True).clamp_min(1e-6)
        self.x, self.validation_x = self._standardised(train.inputs), self._standardised(validation.inputs)
        self.y, self.validation_y = (f.labels[:, None].to(self.place) for f in (train, validation))
        exits, width, _ = self.x.shape
        probes = len(KINDS) * self.count
        self.mask = torch.ones(probes, width, device=self.place)
        self.mask[: self.count, -1 - EXTRAS : -1] = 0  # the plain probe does not see the confidence features
        self.penalty = torch.tensor(options.l2 * len(KINDS), device=self.place)[:, None].repeat(1, width)
        self.penalty[:, -1 - EXTRAS : -1] = EXTRA_PENALTY
        self.penalty[:, -1] = 0
        self.w = torch.zeros(exits, probes, width, device=self.place)
        self.w[..., -1] = torch.logit(self.y.mean(-1), eps=1e-3)
        self.best, self.kept = torch.full_like(self.w[..., 0], torch.inf), torch.zeros_like(self.w)

    def _standardised(self, inputs: Tensor) -> Tensor:
        """``[exits, width + 3, n]`` with a last row of ones, so that products with few weights run along memory."""
        x = ((inputs - self.mean) / self.scale).mT
        return torch.cat([x, torch.ones_like(x[:, :1])], 1).to(self.place)

    def train_dataloader(self) -> list[int]:
        """One batch, since a Newton step uses all tokens."""
        return [0]

    val_dataloader = train_dataloader

    def configure_optimizers(self) -> None:
        """No optimiser; the training step moves the weights itself."""

    @torch.no_grad()
    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        """Take one Newton step of every probe, of the length that lowers its loss and penalty most."""
        z = self.w @ self.x
        p = z.sigmoid()
        gradient = ((p - self.y) @ self.x.mT / self.x.shape[-1] + self.penalty * self.w) * self.mask
        step = -self._solve(p * (1 - p), gradient, self.current_epoch)
        along = step @ self.x
        lengths = torch.tensor(STEPS, device=self.place)
        tried = [
            (self.w + t * step).square().mul(self.penalty).sum(-1) / 2 + _losses(z + t * along, self.y) for t in lengths
        ]
        self.w += lengths[torch.stack(tried).nan_to_num(torch.inf).argmin(0)][..., None] * step

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        """Log the mean of the best losses so far, and keep the weights of each probe's own best."""
        losses = _losses(self.w @ self.validation_x, self.validation_y)
        better = (losses < self.best - 1e-6) | (not self.keep_best)
        self.best = torch.where(better, losses, self.best)
        self.kept = torch.where(better[..., None], self.w, self.kept)
        self.log("validation_loss", self.best.mean(), batch_size=1)

    def _solve(self, curvature: Tensor, gradient: Tensor, epoch: int) -> Tensor:
        """(Hessian)⁻¹·gradient, with the Hessian of every k-th token."""
        stride = max(1, self.x.shape[-1] // (CURVATURE_ROWS * self.x.shape[1]))
        x, c = (values[..., epoch % stride :: stride].contiguous() for values in (self.x, curvature))
        step = torch.empty_like(gradient)
        for i in range(gradient.shape[1]):  # one probe of every exit at a time, because the weighted copy of x is large
            mask = self.mask[i]
            hessian = (x * c[:, i, None]) @ x.mT / x.shape[-1] * (mask[:, None] * mask)
            floor = 1e-5 * hessian.diagonal(dim1=-2, dim2=-1).mean(-1, keepdim=True) + 1e-7
            hessian = hessian + torch.diag_embed(self.penalty[i] + floor + (1 - mask))
            step[:, i] = torch.cholesky_solve(gradient[:, i, :, None], torch.linalg.cholesky(hessian))[..., 0]
        return step

    def probes(self, label: str) -> list[AcceptanceProbe]:
        """The best probe of each exit and kind, for inputs that are not standardised."""
        made, w, losses = [], self.kept.cpu(), self.best.cpu()
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


def logits(probe: AcceptanceProbe, features: Features) -> Tensor:
    """Log-odds that a probe gives to every token, ``[n]``."""
    x = features.inputs[features.exits.index(probe.layer)]
    return probe.logit(x[:, :-EXTRAS], x[:, -EXTRAS:])


def calibrate(probe: AcceptanceProbe, features: Features) -> None:
    """Set the temperature that minimises the log loss on held-out texts, if it also lowers the calibration error."""
    at = features.exits.index(probe.layer)
    y, outcome, z = features.labels[at], features.outcome[at], logits(probe, features)
    grid = torch.logspace(-1, 1, 81, base=4.0)
    best = float(grid[torch.stack([F.binary_cross_entropy_with_logits(z / t, y) for t in grid]).argmin()])
    if evaluate((z / best).sigmoid(), outcome)["ece"] < evaluate(z.sigmoid(), outcome)["ece"]:
        probe.temperature *= best


def evaluate(probability: Tensor, outcome: Tensor, bins: int = BINS) -> dict[str, Any]:
    """Compare a predicted probability ``[n]`` with the outcome ``[n]`` of 0 and 1.

    Returns:
        ``auroc`` (None if only one outcome occurs), ``brier``, ``ece``, ``base_rate`` (share accepted), and ``bins`` of
        ``[mean probability, rate, count]``.
    """
    p, y = probability.double().clamp(0, 1).numpy(), outcome.round().int().numpy()
    both = 0 < y.sum() < len(y)
    place = np.minimum((p * bins).astype(int), bins - 1)
    filled = [place == i for i in np.unique(place)]
    cells = [[float(p[here].mean()), float(y[here].mean()), int(here.sum())] for here in filled]
    return {
        "auroc": float(roc_auc_score(y, p)) if both else None,
        "brier": float(np.mean((p - y) ** 2)),
        "ece": sum(count * abs(mean - rate) for mean, rate, count in cells) / max(1, len(y)),
        "base_rate": float(y.mean()),
        "bins": cells,
    }


def evaluate_exits(probes: Sequence[AcceptanceProbe], validation: Features, test: Features) -> list[dict[str, Any]]:
    """A row for each exit: both probes beside the token probability and the entropy, on the same tokens.

    Args:
        probes: calibrated probes of one label.
        validation: held-out texts, on which the entropy is mapped to a probability.
        test: the texts that the metrics are computed on.
    """
    rows = []
    for i, layer in enumerate(test.exits):
        outcome = test.outcome[i]
        mine = {probe.kind: probe for probe in probes if probe.layer == layer}
        scores = {kind: logits(probe, test).sigmoid() for kind, probe in mine.items()}
        scores["token_probability"] = test.token_probability[i]
        scores["entropy"] = _entropy_probability(validation.entropy[i], validation.outcome[i], test.entropy[i])
        found = {name: evaluate(score, outcome) for name, score in scores.items()}
        row: dict[str, Any] = {"layer": layer, "label": probes[0].label, "tokens": len(test)}
        for name, metrics in found.items():
            suffix = "" if name == "probe" else "_" + name.replace("-", "_")
            row |= {key + suffix: value for key, value in metrics.items() if key not in ("bins", "base_rate")}
        for kind, probe in mine.items():
            probe.metrics = {key: value for key, value in found[kind].items() if key != "bins"}
        row["base_rate"], row["bins"] = found["probe"]["base_rate"], {name: m["bins"] for name, m in found.items()}
        if probes[0].label != "top-p":  # the other labels are acceptance probabilities
            labels = test.labels[i].tolist()
            row["alpha"], row["alpha_se"] = clustered_ratio(labels, [1] * len(test), test.text.tolist())
        rows.append(row)
    return rows


def _entropy_probability(train: Tensor, outcome: Tensor, test: Tensor) -> Tensor:
    """The entropy as a probability, by a logistic fit on held-out texts; constant if these have one outcome."""
    y = outcome.round().int().numpy()
    if not 0 < y.sum() < len(y):
        return torch.full_like(test, float(y.mean()))
    fitted = LogisticRegression().fit(train[:, None].numpy(), y)
    return torch.from_numpy(fitted.predict_proba(test[:, None].numpy())[:, 1])
