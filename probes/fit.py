"""Training, calibration and evaluation of the linear probes of all exit layers."""

from collections.abc import Sequence
from pathlib import Path

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import Logger
from sklearn.metrics import brier_score_loss, roc_auc_score
from torch import Tensor
from torch.utils.data import DataLoader

from decode.core.round import clustered_ratio
from decode.drafters.probe import KINDS, AcceptanceProbe
from decode.errors import UserError
from decode.files import Fields
from distill import ranks
from distill.config import TrainerSettings
from distill.training.trainer import quiet
from probes.features import EXTRAS, Features
from probes.module import ProbeModule

EPOCHS = 15
BINS = 15  # of the calibration error


def train_probes(
    train: Features,
    validation: Features,
    label: str,
    l2: Sequence[float],
    settings: TrainerSettings,
    work: Path,
    logger: Logger | None = None,
) -> list[AcceptanceProbe]:
    """Fit probes by binary cross-entropy for every exit and kind, by Lightning, from a checkpoint that a kill has left.

    Of the penalties ``l2`` each probe takes the one with the least validation loss, and is calibrated there.

    Args:
        train: Tokens to learn from.
        validation: Tokens of held-out texts.
        label: What the labels are: see `probes.labels`.
        l2: Penalties.
        settings: Accelerator and callbacks.
        work: Folder of the checkpoint.
        logger: Where the losses are logged.

    Raises:
        UserError: All labels of an exit are the same.
    """
    rates = train.labels.mean(1).tolist()
    for layer, rate in zip(train.exits, rates):
        if rate in (0.0, 1.0):
            raise UserError(
                f"each of {len(train)} tokens drafted at exit layer {layer} is {'accepted' if rate else 'rejected'} "
                f"(label {label}): give more prompts, or leave the layer out of probes.layers"
            )
    mean, scale = train.inputs.mean(1, keepdim=True), train.inputs.std(1, keepdim=True).clamp_min(1e-6)
    tokens, held = (((part.inputs - mean) / scale, part.labels) for part in (train, validation))
    module = ProbeModule(len(train.exits), train.inputs.shape[-1] - EXTRAS, l2, rates)
    last = work / "last.ckpt"
    keep = ModelCheckpoint(work, "last", save_on_train_epoch_end=True, enable_version_counter=False)
    with quiet():
        trainer = L.Trainer(
            accelerator=settings.accelerator,
            devices=ranks.one_device(settings),
            max_epochs=EPOCHS,
            logger=logger or False,
            callbacks=[*settings.callback_instances(), keep],
            num_sanity_val_steps=0,
            log_every_n_steps=1,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=work,
        )
        learned, judging = (DataLoader([batch], batch_size=None) for batch in (tokens, held))  # type: ignore[arg-type, var-annotated]
        trainer.fit(module, learned, judging, ckpt_path=last if last.exists() else None)
        trainer.validate(module, judging, verbose=False)  # a training that had ended before the kill validates nothing
    weights = module.best()
    weights[..., :-1] /= scale
    weights[..., -1] -= (weights[..., :-1] * mean).sum(-1)
    probes = list[AcceptanceProbe]()
    for layer, of_exit in zip(train.exits, weights):
        for kind, weight in zip(KINDS, of_exit):
            state, extra, bias = weight.split([len(weight) - EXTRAS - 1, EXTRAS, 1])
            extra = extra.clone() if kind == KINDS[1] else extra[:0]
            probes.append(AcceptanceProbe(layer, kind, label, state.clone(), extra, float(bias)))
            calibrate(probes[-1], validation)
    return probes


def logits(probe: AcceptanceProbe, features: Features) -> Tensor:
    """Return the log-odds that a probe gives to every token, ``[n]``."""
    x = features.inputs[features.exits.index(probe.layer)]
    return probe.logit(x[:, :-EXTRAS], x[:, -EXTRAS:])


def calibration_error(probability: Tensor, outcome: Tensor) -> float:
    """Returns the expected calibration error of probabilities ``[n]`` against outcomes in [0, 1], in equal bins."""
    place = (probability * BINS).long().clamp_max(BINS - 1)
    gaps = torch.zeros(BINS, dtype=torch.float64).index_add_(0, place, (probability - outcome).double())
    return float(gaps.abs().sum()) / max(1, len(outcome))


def calibrate(probe: AcceptanceProbe, features: Features) -> None:
    """Set the temperature that minimises the log loss on held-out texts, if it also lowers the calibration error."""
    at = features.exits.index(probe.layer)
    y, outcome, z = features.labels[at], features.outcome[at], logits(probe, features)
    grid = torch.logspace(-1, 1, 81, base=4.0)
    best = float(grid[torch.stack([F.binary_cross_entropy_with_logits(z / t, y) for t in grid]).argmin()])
    if calibration_error((z / best).sigmoid(), outcome) < calibration_error(z.sigmoid(), outcome):
        probe.temperature *= best


def ranked(score: Tensor, outcome: Tensor) -> float | None:
    """Return the AUROC of a score ``[n]`` of the outcome ``[n]`` of 0 and 1; None where there is one outcome."""
    return float(roc_auc_score(outcome, score)) if 0 < outcome.mean() < 1 else None


def judged(score: Tensor, outcome: Tensor) -> Fields:
    """Compare predicted probabilities ``[n]`` with the outcome ``[n]`` of 0 and 1: ``auroc``, ``brier`` and ``ece``."""
    p, y = score.double().clamp(0, 1), outcome.double()
    return {"auroc": ranked(p, y), "brier": float(brier_score_loss(y, p)), "ece": calibration_error(p, y)}


def evaluate_exits(probes: Sequence[AcceptanceProbe], test: Features) -> list[Fields]:
    """Return a row for each exit with all scores on the same tokens, and note the metrics in the probes.

    The names of the metrics of a score that is not the probe's end with the score's name.
    """
    rows = list[Fields]()
    for i, layer in enumerate(test.exits):
        outcome = test.outcome[i]
        rate = {"base_rate": float(outcome.double().mean())}
        metrics = {"token-probability": judged(test.token_probability[i], outcome)}
        for probe in (probe for probe in probes if probe.layer == layer):
            metrics[probe.kind] = judged(logits(probe, test).sigmoid(), outcome)
            probe.metrics = rate | metrics[probe.kind]
        row: Fields = {"layer": layer, "label": probes[0].label, "tokens": len(test)} | rate | metrics.pop(KINDS[0])
        for name, values in metrics.items():
            row |= {f"{key}_{name.replace('-', '_')}": value for key, value in values.items()}
        row["auroc_entropy"] = ranked(-test.entropy[i], outcome)
        if probes[0].label != "top-p":  # the other labels are acceptance probabilities
            labels = test.labels[i].tolist()
            row["alpha"], row["alpha_se"] = clustered_ratio(labels, [1] * len(test), test.text.tolist())
        rows.append(row)
    return rows
