"""How good a probability is: ranking, error and calibration, by scikit-learn."""

import time
import warnings
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import average_precision_score, roc_auc_score
from torch import Tensor

from decode.core.trace_metrics import clustered_ratio
from decode.drafters.acceptance_probe import AcceptanceProbe
from decode.measure.bootstrap_statistics import bootstrap
from probes.fit_probes import EXTRA_PENALTY
from probes.hidden_state_features import EXTRAS, Features


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
