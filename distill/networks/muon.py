"""Muon (Jordan et al. 2024; scaled as in 2502.16982): matrices are moved by orthogonal steps, the rest by AdamW."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import AdamW

MOMENTUM, ITERATIONS = 0.95, 5
QUINTIC = 3.4445, -4.7750, 2.0315
"""Coefficients of x, x³ and x⁵, which bring singular values between 0.7 and 1.2 in five iterations."""
SCALE = 0.8
"""Root mean square of a step's elements at a learning rate of 1: heads learned more with it than with 0.2."""


class Muon(AdamW):
    """AdamW, except for the parameters of groups with ``muon`` set, which are matrices."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Takes a step; ``closure`` computes the loss and its gradients."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        groups = self.param_groups
        for group in groups:
            for weight in group["params"] if group["muon"] else ():
                if weight.grad is not None:
                    self._move(weight, group)
        self.param_groups = [group for group in groups if not group["muon"]]
        super().step()
        self.param_groups = groups
        return loss

    def _move(self, weight: Tensor, group: dict[str, Any]) -> None:
        state, grad = self.state[weight], weight.grad
        assert grad is not None
        if not state:  # AdamW asks for the step of every state that it loads
            state |= {"step": torch.zeros(()), "momentum": torch.zeros_like(weight)}
        momentum = state["momentum"].mul_(MOMENTUM).add_(grad)  # Nesterov's
        weight.mul_(1 - group["lr"] * group["weight_decay"])
        step = orthogonal(grad + MOMENTUM * momentum)
        weight.sub_(step.to(weight.dtype), alpha=group["lr"] * SCALE * max(weight.shape) ** 0.5)


def orthogonal(matrix: Tensor) -> Tensor:
    """Returns about U·Vᵀ of a matrix U·Σ·Vᵀ, by Newton–Schulz iterations."""
    x = matrix.float() if matrix.shape[0] <= matrix.shape[1] else matrix.float().T
    x, (linear, cubic, fifth) = x / (x.norm() + 1e-7), QUINTIC
    for _ in range(ITERATIONS):
        gram = x @ x.T
        x = linear * x + (cubic * gram + fifth * gram @ gram) @ x
    return x if matrix.shape[0] <= matrix.shape[1] else x.T
