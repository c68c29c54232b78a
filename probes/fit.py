"""The linear probes of all layers, fitted at once: a Lightning module whose training step is Newton's.

The losses of different probes are independent, so each takes its own Newton step, all of them in the same few batched
products. The gradient is over all tokens, the Hessian over a part of them, another one in each step, at a fraction of
the cost; a line search chooses the length of the step. About ten steps reach the optimum whatever the scale and
correlation of the hidden states.
"""

import time
import warnings
from typing import Any

import lightning as L
import numpy as np
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.loggers import Logger
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import average_precision_score, roc_auc_score
from torch import Tensor

from decode.bench.statistics import bootstrap
from decode.drafters.probe import KINDS, AcceptanceProbe
from decode.errors import UserError
from decode.trace import clustered_ratio
from distill.trainer import quiet
from probes.features import EXTRAS, Features
from probes.settings import ProbeSettings

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


def evaluate(probability: Tensor, outcome: Tensor, bins: int = 15) -> dict[str, Any]:
    """A probability ``[n]`` against what happened ``[n]``, 0 or 1.

    Returns:
        auroc: probability that an accepted token scores above a rejected one; None if only one kind occurs.
        average_precision: area under precision against recall, for acceptance; None likewise.
        brier: mean squared error of the probability.
        ece: Σ over bins of share · |mean probability − rate|.
        accuracy: share of tokens whose outcome probability > 0.5 predicts.
        base_rate: share accepted; answering always the more frequent one has accuracy max(base_rate, 1 − base_rate).
        bins: for reliability diagrams, ``[mean probability, rate, count]``.
    """
    p, y = probability.double().clamp(0, 1).numpy(), outcome.round().int().numpy()
    both = 0 < y.sum() < len(y)
    place = np.minimum((p * bins).astype(int), bins - 1)
    filled = [place == i for i in np.unique(place)]
    cells = [[float(p[here].mean()), float(y[here].mean()), int(here.sum())] for here in filled]
    return {
        "auroc": float(roc_auc_score(y, p)) if both else None,
        "average_precision": float(average_precision_score(y, p)) if both else None,
        "brier": float(np.mean((p - y) ** 2)),
        "ece": sum(count * abs(mean - rate) for mean, rate, count in cells) / max(1, len(y)),
        "accuracy": float(np.mean((p > 0.5) == (y == 1))),
        "base_rate": float(y.mean()),
        "bins": cells,
    }


def logits(probe: AcceptanceProbe, features: Features) -> Tensor:
    """Log-odds of every token, ``[n]``."""
    x = features.inputs[features.exits.index(probe.layer)]
    return probe.logit(x[:, :-EXTRAS], x[:, -EXTRAS:])


def probability(probe: AcceptanceProbe, features: Features) -> Tensor:
    """What a probe says of every token, ``[n]``."""
    return logits(probe, features).sigmoid()


def calibrate(probe: AcceptanceProbe, features: Features) -> None:
    """Set the temperature that minimises the log loss on held-out prompts, where that also lowers the error there.

    The label is the one it was trained on; a temperature does not change the ranking.
    """
    at = features.exits.index(probe.layer)
    y, outcome, z = features.labels[probe.label][at], features.outcome[at], logits(probe, features)
    grid = torch.logspace(-1, 1, 81, base=4.0)
    best = float(grid[torch.stack([F.binary_cross_entropy_with_logits(z / t, y) for t in grid]).argmin()])
    if evaluate((z / best).sigmoid(), outcome)["ece"] < evaluate(z.sigmoid(), outcome)["ece"]:
        probe.temperature *= best


def entropy_probability(train: Tensor, outcome: Tensor, test: Tensor) -> Tensor:
    """The entropy as a probability, by a logistic fit on held-out prompts; constant where these have one class."""
    y = outcome.round().int().numpy()
    if not 0 < y.sum() < len(y):
        return torch.full_like(test, float(y.mean()))
    fitted = LogisticRegression().fit(train[:, None].numpy(), y)
    return torch.from_numpy(fitted.predict_proba(test[:, None].numpy())[:, 1])


def auroc_gain(probe: Tensor, other: Tensor, outcome: Tensor, text: Tensor, *, seed: int = 0) -> list[float] | None:
    """95 % interval of AUROC(probe) − AUROC(other) by resampling texts; None where one class is missing."""
    y = outcome.round().bool().numpy()
    owner = np.unique(text.numpy(), return_inverse=True)[1]
    totals = np.stack([np.bincount(owner[y == kind], minlength=owner.max() + 1) for kind in (True, False)])
    if not totals.sum(1).all():
        return None
    won = pairs_won(probe.numpy(), y, owner) - pairs_won(other.numpy(), y, owner)

    def gain(drawn: np.ndarray) -> np.ndarray:
        weight = np.stack([np.bincount(texts, minlength=len(won)) for texts in drawn]).astype(float)
        pairs = (weight @ totals[0]) * (weight @ totals[1])
        return ((weight @ won) * weight).sum(1) / np.where(pairs > 0, pairs, np.nan)

    return list(bootstrap(np.arange(len(won)), gain, seed=seed)[1:])


def pairs_won(scores: np.ndarray, y: np.ndarray, owner: np.ndarray) -> np.ndarray:
    """``[i, j]``: pairs of an accepted token of text i and a rejected one of text j that scores lower, a tie half."""
    count = owner.max() + 1
    rank = np.unique(scores, return_inverse=True)[1]
    at = np.zeros((rank.max() + 2, count))  # rejected tokens by rank and text
    np.add.at(at, (rank[~y] + 1, owner[~y]), 1.0)
    below = at.cumsum(0)
    won = np.zeros((count, count))
    np.add.at(won, owner[y], (below[rank[y]] + below[rank[y] + 1]) / 2)
    return won


def scikit_check(train: Features, test: Features, label: str, l2: float) -> tuple[list[float | None], float, int]:
    """scikit-learn's logistic regression, fit by fit, as the reference for our optimiser's result and its time.

    Args:
        train: what to learn from.
        test: held-out prompts.
        label: a hard label.
        l2: the penalty, on standardised inputs, of the fits of both kinds of probe.

    Returns:
        AUROC of each exit's plain probe, the seconds of all fits, and their number.
    """
    found: list[float | None] = []
    spent = 0.0
    for i in range(len(train.exits)):
        raw, y = train.inputs[i].numpy(), train.labels[label][i].round().int().numpy()
        mean, scale = raw.mean(0), np.maximum(raw.std(0), 1e-6)
        x, held = (raw - mean) / scale, (test.inputs[i].numpy() - mean) / scale
        truth = test.labels[label][i].round().int().numpy()
        # the last inputs are scaled so that their penalty is `EXTRA_PENALTY`
        factor = np.where(np.arange(x.shape[1]) < x.shape[1] - EXTRAS, 1, (l2 / EXTRA_PENALTY) ** 0.5)
        began = time.perf_counter()
        plain, _ = (_scikit_fit(inputs, y, l2) for inputs in (x[:, :-EXTRAS], x * factor))
        spent += time.perf_counter() - began
        both = 0 < truth.sum() < len(truth)
        found.append(float(roc_auc_score(truth, plain.decision_function(held[:, :-EXTRAS]))) if both else None)
    return found, spent, 2 * len(train.exits)


def _scikit_fit(x: np.ndarray, y: np.ndarray, l2: float) -> LogisticRegression:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        return LogisticRegression(C=1 / max(l2 * len(y), 1e-9), max_iter=2000, tol=1e-7).fit(x, y)


def evaluate_exits(
    probes: list[AcceptanceProbe], validation: Features, test: Features, label: str, bins: int
) -> list[dict[str, Any]]:
    """A row for each exit: both probes beside token probability and entropy, on the same tokens.

    Args:
        probes: calibrated, of one label.
        validation: fits the entropy's probability.
        test: what is measured on; hard labels are their own outcome, ``accept`` is compared with the drawn one.
        label: the probes' label.
        bins: of the calibration error.
    """
    rows = []
    for i, layer in enumerate(test.exits):
        outcome, held = test.outcome_of(label)[i], validation.outcome_of(label)[i]
        mine = {p.kind: p for p in probes if p.layer == layer and p.label == label}
        scores = {kind: probability(probe, test) for kind, probe in mine.items()}
        scores["token_probability"] = test.token_probability[i]
        scores["entropy"] = entropy_probability(validation.entropy[i], held, test.entropy[i])
        found = {name: evaluate(score, outcome, bins) for name, score in scores.items()}
        row: dict[str, Any] = {"layer": layer, "label": label, "tokens": len(test)}
        for name, metrics in found.items():
            suffix = "" if name == "probe" else "_" + name.replace("-", "_")
            for key in ("auroc", "average_precision", "brier", "ece", "accuracy"):
                row[key + suffix] = metrics[key]
        for kind, probe in mine.items():
            probe.metrics = {k: v for k, v in found[kind].items() if k != "bins"}
            row["auroc_gain_ci95_" + kind.replace("-", "_")] = auroc_gain(
                scores[kind], scores["token_probability"], outcome, test.text
            )
        row["base_rate"] = found["probe"]["base_rate"]
        if label != "top-p":  # labels that are acceptance probabilities
            row["alpha"], row["alpha_se"] = clustered_ratio(
                test.labels[label][i].tolist(), [1] * len(test), test.text.tolist()
            )
        row["bins"] = {name: metrics["bins"] for name, metrics in found.items()}
        rows.append(row)
    return rows
