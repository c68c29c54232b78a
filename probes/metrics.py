"""How good a probability is: ranking, error and calibration, by scikit-learn."""

from __future__ import annotations

import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import average_precision_score, brier_score_loss, roc_auc_score
from torch import Tensor

from decode.drafters.acceptance_probe import AcceptanceProbe
from probes.features import Features
from probes.train import EXTRA_PENALTY, EXTRAS


@dataclass
class Metrics:
    """A probability against what happened.

    Attributes:
        auroc: probability that an accepted token scores above a rejected one; None if only one kind occurs.
        average_precision: area under precision against recall, for acceptance; None likewise.
        brier: mean squared error of the probability.
        ece: Σ over bins of share · |mean probability − rate|.
        accuracy: share of tokens whose outcome probability > 0.5 predicts.
        base_rate: share accepted; answering always the more frequent one has accuracy max(base_rate, 1 − base_rate).
        bins: for reliability diagrams, ``[mean probability, rate, count]``.
    """

    auroc: float | None
    average_precision: float | None
    brier: float
    ece: float
    accuracy: float
    base_rate: float
    bins: list[list[float]]


def evaluate(probability: Tensor, outcome: Tensor, bins: int = 15) -> Metrics:
    """Metrics of probabilities ``[n]`` against outcomes ``[n]`` of 0 and 1."""
    p, y = probability.double().clamp(0, 1).numpy(), outcome.round().int().numpy()
    both = 0 < y.sum() < len(y)
    cells = reliability(p, y, bins)
    return Metrics(
        float(roc_auc_score(y, p)) if both else None,
        float(average_precision_score(y, p)) if both else None,
        float(brier_score_loss(y, p)) if both else float(np.mean((p - y) ** 2)),
        sum(count * abs(mean - rate) for mean, rate, count in cells) / max(1, len(y)),
        float(np.mean((p > 0.5) == (y == 1))),
        float(y.mean()),
        cells,
    )


def reliability(p: np.ndarray, y: np.ndarray, bins: int) -> list[list[float]]:
    """``[mean probability, rate, count]`` of every bin of equal width that is not empty."""
    place = np.minimum((p * bins).astype(int), bins - 1)
    return [
        [float(p[here].mean()), float(y[here].mean()), int(here.sum())]
        for here in (place == i for i in range(bins))
        if here.any()
    ]


def probability(probe: AcceptanceProbe, features: Features) -> Tensor:
    """What a probe says of every token, ``[n]``."""
    x = features.inputs[features.exits.index(probe.layer)]
    return probe.logit(x[:, :-EXTRAS], x[:, -EXTRAS:]).sigmoid()


def calibrate(probe: AcceptanceProbe, features: Features) -> None:
    """Set the temperature that minimises the log loss on held-out prompts, where that also lowers the error there.

    The label is the one it was trained on; a temperature does not change the ranking.
    """
    at = features.exits.index(probe.layer)
    y, x = features.labels[probe.label][at], features.inputs[at]
    z = probe.logit(x[:, :-EXTRAS], x[:, -EXTRAS:]).detach()
    grid = torch.logspace(-1, 1, 81, base=4.0)
    losses = torch.stack([F.binary_cross_entropy_with_logits(z / t, y) for t in grid])
    best = float(grid[losses.argmin()])
    outcome = features.outcome[at]

    def ece(t: float) -> float:
        return evaluate((z / t).sigmoid(), outcome).ece

    if ece(best) < ece(1.0):
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
    y, a, b = outcome.round().int().numpy(), probe.numpy(), other.numpy()
    groups = [np.flatnonzero(text.numpy() == i) for i in np.unique(text.numpy())]
    generator = np.random.default_rng(seed)
    gains = []
    for _ in range(200):
        picked = np.concatenate([groups[i] for i in generator.integers(len(groups), size=len(groups))])
        if 0 < y[picked].sum() < len(picked):
            gains.append(roc_auc_score(y[picked], a[picked]) - roc_auc_score(y[picked], b[picked]))
    return [float(q) for q in np.quantile(gains, [0.025, 0.975])] if gains else None


def scikit_check(
    train: Features, test: Features, label: str, l2: Sequence[float], compared: float
) -> tuple[list[float | None], float, int]:
    """scikit-learn's logistic regression, fit by fit, as the reference for our optimiser's result and its time.

    Args:
        train: what to learn from.
        test: held-out prompts.
        label: a hard label.
        l2: the same penalties as ours, on standardised inputs; all are fitted, for both kinds of probe.
        compared: the one of them whose plain probes are compared.

    Returns:
        AUROC of each exit's plain probe, the seconds of all fits, and their number.
    """
    found: list[float | None] = []
    spent, fits = 0.0, 0
    for i in range(len(train.exits)):
        raw, y = train.inputs[i].numpy(), train.labels[label][i].round().int().numpy()
        truth = test.labels[label][i].round().int().numpy()
        if not 0 < y.sum() < len(y):
            found.append(None)
            continue
        mean, scale = raw.mean(0), np.maximum(raw.std(0), 1e-6)
        x, held = (raw - mean) / scale, (test.inputs[i].numpy() - mean) / scale
        for strength in l2:
            for width in (x.shape[1] - EXTRAS, x.shape[1]):
                began = time.perf_counter()
                fitted = _scikit_fit(x[:, :width], y, strength, EXTRAS if width == x.shape[1] else 0)
                spent += time.perf_counter() - began
                fits += 1
                if strength == compared and width < x.shape[1]:
                    fitted = _scikit_fit(x[:, :width], y, strength, 0, tol=1e-7)
                    score = fitted.decision_function(held[:, :width])
                    found.append(float(roc_auc_score(truth, score)) if 0 < truth.sum() < len(truth) else None)
    return found, spent, fits


def _scikit_fit(x: np.ndarray, y: np.ndarray, l2: float, extras: int, tol: float = 1e-4) -> LogisticRegression:
    """One fit; the last `extras` inputs are scaled so that their penalty is `EXTRA_PENALTY`."""
    if extras:
        x = np.concatenate([x[:, :-extras], x[:, -extras:] * (l2 / EXTRA_PENALTY) ** 0.5], 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        return LogisticRegression(C=1 / max(l2 * len(y), 1e-9), max_iter=2000, tol=tol).fit(x, y)


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
        outcome = test.outcome[i] if label == "accept" else test.labels[label][i]
        held = validation.outcome[i] if label == "accept" else validation.labels[label][i]
        mine = {p.kind: p for p in probes if p.layer == layer and p.label == label}
        scores = {kind: probability(probe, test) for kind, probe in mine.items()}
        scores["token_probability"] = test.token_probability[i]
        scores["entropy"] = entropy_probability(validation.entropy[i], held, test.entropy[i])
        found = {name: evaluate(score, outcome, bins) for name, score in scores.items()}
        row: dict[str, Any] = {"layer": layer, "label": label, "tokens": len(test)}
        for name, metrics in found.items():
            suffix = "" if name == "probe" else "_" + name.replace("-", "_")
            for key in ("auroc", "average_precision", "brier", "ece", "accuracy"):
                row[key + suffix] = getattr(metrics, key)
        row["base_rate"] = found["probe"].base_rate
        row["bins"] = {name: metrics.bins for name, metrics in found.items()}
        rows.append(row)
        for kind, probe in mine.items():
            probe.metrics = {k: v for k, v in vars(found[kind]).items() if k != "bins"}
    return rows
