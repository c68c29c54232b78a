"""Training, calibration and evaluation of the linear probes of all exit layers."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import Logger
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import brier_score_loss, roc_auc_score
from torch import Tensor
from torch.utils.data import DataLoader

from decode.core.round import clustered_ratio
from decode.drafters.probe import KINDS, AcceptanceProbe
from decode.errors import UserError
from decode.files import Fields, scratch_folder
from distill.config import TrainerSettings
from distill.kinds.block import calibration_error
from distill.training.trainer import quiet
from probes.features import EXTRAS, Features
from probes.module import Batch, ProbeModule

EPOCHS = 15
LARGE = 1 << 28  # numbers in the inputs above which a GPU is used where there is one


def fit(
    module: ProbeModule,
    train: Batch,
    validation: Batch,
    settings: TrainerSettings,
    work: Path,
    logger: Logger | None = None,
) -> None:
    """Train the module by Lightning, from the checkpoint in ``work`` if a killed training has left one.

    The callbacks of the settings take part, and the accelerator is theirs where there is much to read.
    """
    last = work / "last.ckpt"
    keep = ModelCheckpoint(work, "last", save_on_train_epoch_end=True, enable_version_counter=False)
    with quiet():
        trainer = L.Trainer(
            accelerator=settings.accelerator if train[0].numel() > LARGE else "cpu",
            devices=1,
            max_epochs=EPOCHS,
            logger=logger or False,
            callbacks=[*settings.callback_instances(), keep],
            num_sanity_val_steps=0,
            log_every_n_steps=1,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=work,
        )
        tokens, held = (DataLoader([batch], batch_size=None) for batch in (train, validation))  # type: ignore[arg-type, var-annotated]
        trainer.fit(module, tokens, held, ckpt_path=last if last.exists() else None)
        trainer.validate(module, held, verbose=False)  # a training that had ended before the kill validates nothing


def train_probes(
    train: Features,
    validation: Features,
    label: str,
    l2: Sequence[float],
    settings: TrainerSettings | None = None,
    work: Path | None = None,
    logger: Logger | None = None,
) -> list[AcceptanceProbe]:
    """Fit probes by binary cross-entropy for every exit and kind.

    Of the penalties ``l2`` each probe takes the one with the least validation loss, and is calibrated there.

    Args:
        train: Tokens to learn from.
        validation: Tokens of held-out texts.
        label: What the labels are: see `probes.labels`.
        l2: Penalties.
        settings: Accelerator and callbacks.
        work: Folder of checkpoints; None: a temporary one.
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
    with scratch_folder() as scratch:
        fit(module, tokens, held, settings or TrainerSettings(), work or scratch, logger)
    probes = list[AcceptanceProbe]()
    for layer, weights, shift, width in zip(train.exits, module.best(), mean[:, 0], scale[:, 0]):
        for kind, weight in zip(KINDS, weights):
            w, bias = weight[:-1] / width, float(weight[-1] - (weight[:-1] / width) @ shift)
            state, extra = w[:-EXTRAS].clone(), w[-EXTRAS:].clone() if kind == "confidence-probe" else w[:0]
            probes.append(AcceptanceProbe(layer, kind, label, state, extra, bias))
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
        row |= {f"brier{end}": float(brier_score_loss(y, p)), f"ece{end}": calibration_error(p, y)}
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
