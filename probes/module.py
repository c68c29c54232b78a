"""The Lightning module of the probes: logistic regressions of all exits, kinds and penalties, trained together."""

from collections.abc import Sequence

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from decode.drafters.probe import KINDS
from probes.features import EXTRAS

EXTRA_PENALTY = 1e-4  # L2 penalty on the confidence features, whatever the penalty on the state
ITERATIONS = 20  # of LBFGS in a training step, which reads all tokens

Batch = tuple[Tensor, Tensor]
"""Standardised inputs ``[exits, n, width + 3]`` and labels ``[exits, n]`` in [0, 1]."""


class ProbeModule(L.LightningModule):
    """Linear probes for every exit, kind of `KINDS` and penalty, fitted by binary cross-entropy.

    No loss depends on the weights of another probe, so that one optimiser finds the optimum of each. A batch holds all
    tokens, and an epoch is one training step. ``train_loss`` and ``validation_loss`` are logged, the means of the
    probes' losses without their penalties.

    Args:
        exits: Number of exits.
        width: Width of the hidden state.
        l2: Penalties λ/2·‖w‖² on the weights of the standardised state; each is a probe of its own.
        rates: Share of accepted tokens at each exit, from which the biases start.
    """

    penalty: Tensor  # ``[probes, width + 4]``
    visible: Tensor  # ``[probes, width + 4]`` of 0 and 1: what a probe reads

    def __init__(self, exits: int, width: int, l2: Sequence[float], rates: Sequence[float]) -> None:
        super().__init__()
        self.save_hyperparameters()
        penalty = torch.tensor([*l2] * len(KINDS))[:, None].repeat(1, width + EXTRAS + 1)
        penalty[:, width:] = torch.tensor([EXTRA_PENALTY] * EXTRAS + [0.0])  # the bias is the last
        visible = torch.ones_like(penalty)
        visible[: len(l2), width:-1] = 0  # the plain probe does not see the confidence features
        weight = torch.zeros(exits, *penalty.shape)
        weight[..., -1] = torch.logit(torch.tensor([*rates]), eps=1e-3)[:, None]
        self.weight = nn.Parameter(weight)
        self.register_buffer("penalty", penalty, persistent=False)
        self.register_buffer("visible", visible, persistent=False)
        self.validation = torch.zeros(weight.shape[:2])

    def losses(self, batch: Batch) -> Tensor:
        """Binary cross-entropy ``[exits, probes]`` of each probe, in nats."""
        inputs, labels = batch
        weight = self.weight * self.visible
        z = torch.baddbmm(weight[..., -1:], weight[..., :-1], inputs.mT)
        return (F.softplus(z) - z * labels[:, None]).mean(-1)

    def training_step(self, batch: Batch, _: int) -> Tensor:
        """The sum of all penalised losses."""
        losses = self.losses(batch)
        self.log("train_loss", losses.detach().mean(), on_step=False, on_epoch=True, batch_size=1)
        return (losses + (self.penalty * self.weight.square()).sum(-1) / 2).sum()

    def validation_step(self, batch: Batch, _: int) -> None:
        """Note the loss of each probe."""
        self.validation = self.losses(batch).cpu()
        self.log("validation_loss", self.validation.mean(), prog_bar=True, batch_size=1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """LBFGS over all tokens."""
        return torch.optim.LBFGS([self.weight], max_iter=ITERATIONS, line_search_fn="strong_wolfe")

    @torch.no_grad()
    def best(self) -> Tensor:
        """Weights ``[exits, kinds, width + 4]`` of the penalty with the least validation loss, the bias last."""
        weight = (self.weight * self.visible).cpu().unflatten(1, (len(KINDS), -1))
        at = self.validation.unflatten(1, (len(KINDS), -1)).argmin(2)
        return weight.take_along_dim(at[:, :, None, None], 2).squeeze(2)
