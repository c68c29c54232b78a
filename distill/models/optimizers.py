"""The optimisers: AdamW, and Muon for weight matrices with AdamW for everything else."""

import math
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from decode.errors import UserError
from distill.config.training import TrainingSettings
from distill.models.loading import multiplies_bfloat16


def make_optimizer(model: nn.Module, settings: TrainingSettings, *, precision: str = "32-true") -> Optimizer:
    """Returns the optimiser of the trainable parameters, with weight decay on the matrices inside the layers only.

    Embeddings and the output head of a language model are not among these, the head of a feature head is. AdamW is
    PyTorch's fused one except under 16-mixed, whose scaled gradients Lightning cannot clip with it. Muon's matrix
    products are in bfloat16 under a ``precision`` of bfloat16, and with ``muon_bfloat16`` on processors that have
    instructions for them.
    """
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}  # a tied head shares it
    head = getattr(model, "get_output_embeddings", lambda: None)()
    embeddings |= {id(head.weight)} if head is not None else set()
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    matrices = [p for p in trainable if p.ndim == 2 and id(p) not in embeddings]
    others = [p for p in trainable if p.ndim != 2 or id(p) in embeddings]
    half = "bf16" in precision
    if settings.optimizer == "muon_bfloat16" and matrices:
        half = multiplies_bfloat16(matrices[0].device)
    groups: list[dict[str, Any]] = [
        {"params": matrices, "weight_decay": settings.weight_decay, "muon": settings.uses_muon, "bfloat16": half},
        {"params": others, "weight_decay": 0.0, "muon": False},
    ]
    groups = [group for group in groups if group["params"]]
    if settings.optimizer == "adamw_8bit":
        return adamw_8bit()(groups, lr=settings.lr, betas=(0.9, settings.beta2))
    kind = MuonAdamW if settings.uses_muon else AdamW
    optimizer = kind(groups, lr=settings.lr, betas=(0.9, settings.beta2), fused=precision != "16-mixed")
    optimizer._step_supports_amp_scaling = False  # otherwise Lightning refuses to clip gradients that are not scaled
    return optimizer


def adamw_8bit() -> Any:
    """Returns AdamW with a state of 8 bits, of bitsandbytes."""
    try:
        return import_module("bitsandbytes.optim").AdamW8bit
    except ImportError as error:
        raise UserError(
            "training.optimizer is adamw_8bit, which needs the package bitsandbytes: pip install bitsandbytes, or "
            "choose adamw"
        ) from error


def check_optimizer(settings: TrainingSettings, device: torch.device) -> None:
    """Refuses an optimiser that does not run here."""
    if settings.optimizer == "adamw_8bit":
        if device.type != "cuda":
            raise UserError(
                f"training.optimizer is adamw_8bit, which runs on GPUs, and the training runs on {device}: choose adamw"
            )
        adamw_8bit()


def make_schedule(optimizer: Optimizer, settings: TrainingSettings, steps: int) -> LambdaLR:
    """Returns the learning-rate schedule, which is stepped once per optimiser step."""

    def factor(step: int) -> float:
        if step < settings.warmup_steps:
            return (step + 1) / (settings.warmup_steps + 1)
        left = 1 - (step - settings.warmup_steps) / max(1, steps - settings.warmup_steps)
        if settings.schedule == "linear":
            return max(0.0, left)
        if settings.schedule == "cosine":
            return 0.5 * (1 - math.cos(math.pi * min(1.0, max(0.0, left))))
        return 1.0

    return LambdaLR(optimizer, factor)


class MuonAdamW(AdamW):
    """AdamW in which groups with ``muon=True`` are updated by orthogonalised momentum (Jordan et al., 2024).

    The update of a matrix is its Nesterov momentum with all singular values brought near 1, scaled by
    0.2·√max(rows, columns), so that its root mean square is that of an AdamW step and one learning rate serves both.

    Matrices of one shape are orthogonalised in one batch of matrix products, in float32 or bfloat16.
    `torch.optim.Muon` updates one matrix at a time, always in bfloat16. Milliseconds of a step on one core of an EPYC,
    7 matrices per layer:

    ======  ======  ===================  ====================  ====================  ===========================
    width   layers  float32, this class  bfloat16, this class  torch.optim.Muon      torch.optim.Muon, AVX2 only
    ======  ======  ===================  ====================  ====================  ===========================
    64      4       4.6                  7.0                   19.8                  90.6
    128     6       37.2                 60.3                  75.0                  961
    256     4       203                  298                   290                   not measured
    ======  ======  ===================  ====================  ====================  ===========================
    """

    momentum = 0.95

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Updates all groups."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        every = self.param_groups
        for group in every:
            if group["muon"]:
                self._muon(group)
        try:  # AdamW's own step on the other groups
            self.param_groups = [group for group in every if not group["muon"]]
            super().step()
        finally:
            self.param_groups = every
        return loss

    def _muon(self, group: dict[str, Any]) -> None:
        by_shape: dict[tuple[int, ...], list[Tensor]] = {}
        for parameter in group["params"]:
            if parameter.grad is not None:
                by_shape.setdefault(tuple(sorted(parameter.shape)), []).append(parameter)
        for (_, columns), parameters in by_shape.items():
            for parameter in parameters:
                if not self.state[parameter]:  # AdamW's loading of a checkpoint expects a step in every state
                    self.state[parameter] = {"step": torch.tensor(0.0), "momentum": torch.zeros_like(parameter)}
            gradients = torch.stack([_wide(p.grad) for p in parameters if p.grad is not None])
            momenta = [_wide(self.state[parameter]["momentum"]) for parameter in parameters]
            torch._foreach_lerp_(momenta, list(gradients), 1 - self.momentum)
            update = gradients.lerp(torch.stack(momenta), self.momentum)
            update = orthogonalise(update, dtype=torch.bfloat16 if group.get("bfloat16") else update.dtype)
            torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
            scale = -group["lr"] * 0.2 * math.sqrt(columns)
            torch._foreach_add_([_wide(parameter) for parameter in parameters], list(update), alpha=scale)


def _wide(matrix: Tensor) -> Tensor:
    """Returns the matrix or its transpose, with no more rows than columns."""
    return matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T


def orthogonalise(wide: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Returns U·Vᵀ, approximately, of each U·S·Vᵀ in ``[batch, rows, columns]``, by five quintic Newton-Schulz steps.

    The coefficients trade exactness for speed: singular values end between about 0.7 and 1.2.

    Args:
        wide: Matrices with no more rows than columns, which takes the fewest operations.
        dtype: Number format of the products. None: that of the matrices.
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    own = wide.dtype
    wide = (wide / (wide.norm(dim=(1, 2), keepdim=True) + 1e-7)).to(dtype or own)
    for _ in range(5):
        gram = wide @ wide.mT
        wide = torch.baddbmm(wide, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), wide, beta=a)
    return wide.to(own)
