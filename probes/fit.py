"""Training, calibration and evaluation of the linear probes of all exit layers."""

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from torch import Tensor

from decode.core.round import clustered_ratio
from decode.drafters.probe import KINDS, AcceptanceProbe
from decode.errors import UserError
from decode.files import Fields
from distill.kinds.block import calibration_error
from probes.features import EXTRAS, Features

EXTRA_PENALTY = 1e-4  # L2 penalty on the confidence features, whatever the penalty on the state
ITERATIONS = 300  # of LBFGS at most, over all tokens
LARGE = 1 << 28  # numbers in the inputs above which a GPU is used where there is one


def train_probes(train: Features, validation: Features, label: str, l2: Sequence[float]) -> list[AcceptanceProbe]:
    """Fit probes by binary cross-entropy for every exit and kind.

    Of the penalties ``l2`` each probe takes the one with the least validation loss, and is calibrated there.

    Raises:
        UserError: All labels of an exit are the same.
    """
    for layer, rate in zip(train.exits, train.labels.mean(1).tolist()):
        if rate in (0.0, 1.0):
            raise UserError(
                f"each of {len(train)} tokens drafted at exit layer (or slot) {layer} is "
                f"{'accepted' if rate else 'rejected'} (label {label}): give more prompts, or leave the layer out of "
                "probes.layers"
            )
    mean, scale = train.inputs.mean(1, keepdim=True), train.inputs.std(1, keepdim=True).clamp_min(1e-6)
    x, held = (((features.inputs - mean) / scale).mT.contiguous() for features in (train, validation))
    penalty = torch.tensor([*l2] * len(KINDS))[:, None].repeat(1, x.shape[1] + 1)  # of weights, the bias is the last
    penalty[:, -1 - EXTRAS :] = torch.tensor([EXTRA_PENALTY] * EXTRAS + [0.0])
    mask = torch.ones_like(penalty)
    mask[: len(l2), -1 - EXTRAS : -1] = 0  # the plain probe does not see the confidence features
    weight = torch.zeros(len(train.exits), *mask.shape)
    weight[..., -1] = torch.logit(train.labels.mean(1, keepdim=True), eps=1e-3)
    device = "cuda" if torch.cuda.is_available() and x.numel() > LARGE else "cpu"
    x, y, penalty, mask, weight = (t.to(device) for t in (x, train.labels[:, None], penalty, mask, weight))
    optimizer = torch.optim.LBFGS([weight.requires_grad_()], max_iter=ITERATIONS, line_search_fn="strong_wolfe")

    def losses(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
        z = torch.baddbmm(w[..., -1:], w[..., :-1], x)
        return (F.softplus(z) - z * y).mean(-1)  # [exits, probes], none of which depends on the weights of another

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (losses(x, y, weight * mask) + (penalty * weight.square()).sum(-1) / 2).sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    weight = (weight * mask).detach().cpu()
    best = losses(held, validation.labels[:, None], weight).unflatten(1, (len(KINDS), -1)).argmin(2)
    probes = list[AcceptanceProbe]()
    for i, layer in enumerate(train.exits):
        for number, kind in enumerate(KINDS):
            chosen = weight[i, number * len(l2) + int(best[i, number])]
            w = chosen[:-1] / scale[i, 0]
            state, extra, bias = w[:-EXTRAS].clone(), w[-EXTRAS:].clone(), float(chosen[-1] - w @ mean[i, 0])
            probes.append(AcceptanceProbe(layer, kind, label, state, extra if number else extra[:0], bias))
            calibrate(probes[-1], validation)
    return probes


def logits(probe: AcceptanceProbe, features: Features) -> Tensor:
    """Return the log-odds that a probe gives to every token, ``[n]``."""
    x = features.inputs[features.exits.index(probe.layer)]
    return probe.logit(x[:, :-EXTRAS], x[:, -EXTRAS:])


def calibrate(probe: AcceptanceProbe, features: Features) -> None:
    """Set the temperature that minimises the log loss on held-out texts, if it also lowers the calibration error."""
    at = features.exits.index(probe.layer)
    y, outcome, z = features.labels[at], features.outcome[at], logits(probe, features)
    grid = torch.logspace(-1, 1, 81, base=4.0)
    best = float(grid[torch.stack([F.binary_cross_entropy_with_logits(z / t, y) for t in grid]).argmin()])
    if calibration_error((z / best).sigmoid(), outcome) < calibration_error(z.sigmoid(), outcome):
        probe.temperature *= best


def judged(scores: Mapping[str, Tensor], outcome: Tensor) -> Fields:
    """Compare predicted probabilities ``[n]`` with the outcome ``[n]`` of 0 and 1.

    Returns:
        ``base_rate`` (share accepted), and of each score ``auroc`` (None where there is one outcome), ``brier`` and
        ``ece``, with its name behind unless that is ``probe``.
    """
    y = outcome.double()
    row: Fields = {"base_rate": float(y.mean())}
    for name, score in scores.items():
        p, end = score.double().clamp(0, 1), "" if name == "probe" else f"_{name}"
        row[f"auroc{end}"] = float(roc_auc_score(y, p)) if 0 < row["base_rate"] < 1 else None
        row |= {f"brier{end}": float((p - y).square().mean()), f"ece{end}": calibration_error(p, y)}
    return row


def scores_of(probes: Sequence[AcceptanceProbe], validation: Features, test: Features) -> dict[str, Tensor]:
    """Return acceptance probabilities ``[exits, n]`` of test texts; validation texts give the entropy's meaning."""
    scores = {
        kind.replace("-", "_"): torch.stack([logits(probe, test).sigmoid() for probe in probes if probe.kind == kind])
        for kind in KINDS
    }
    entropies = zip(validation.entropy, validation.outcome, test.entropy)
    entropy = torch.stack([_entropy_probability(*values) for values in entropies])
    return scores | {"token_probability": test.token_probability, "entropy": entropy}


def evaluate_exits(probes: Sequence[AcceptanceProbe], validation: Features, test: Features) -> list[Fields]:
    """Return a row for each exit with all scores on the same tokens, and note the metrics in the probes."""
    rows, scores = list[Fields](), scores_of(probes, validation, test)
    for i, layer in enumerate(test.exits):
        row = {"layer": layer, "label": probes[0].label, "tokens": len(test)}
        row |= judged({name: score[i] for name, score in scores.items()}, test.outcome[i])
        if probes[0].label != "top-p":  # the other labels are acceptance probabilities
            labels = test.labels[i].tolist()
            row["alpha"], row["alpha_se"] = clustered_ratio(labels, [1] * len(test), test.text.tolist())
        for probe in (probe for probe in probes if probe.layer == layer):
            probe.metrics = judged({"probe": scores[probe.kind.replace("-", "_")][i]}, test.outcome[i])
        rows.append(row)
    return rows


def _entropy_probability(train: Tensor, outcome: Tensor, test: Tensor) -> Tensor:
    """Return the entropy as a probability, by a logistic fit on held-out texts; constant if these have one outcome."""
    if not 0 < outcome.mean() < 1:
        return torch.full_like(test, float(outcome.mean()))
    fitted = LogisticRegression().fit(train[:, None].numpy(), outcome.numpy())
    return torch.from_numpy(fitted.predict_proba(test[:, None].numpy())[:, 1])
