"""Random choices of decoding: the draw of a token, and the first rejection of a draft.

Decoding uses torch's generators; tests put an enumerator in their place and so prove losslessness on the loop itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, SupportsInt

import torch
from torch import Tensor

from decode.core.sampling import Rows, argmax


class Rng(Protocol):
    """Source of every random choice in decoding."""

    def draw(self, weights: Tensor) -> Tensor:
        """One token id (0-d long) from non-negative weights ``[vocab]``, normalised or not."""
        ...

    def draw_rows(self, weights: Rows) -> Sequence[int]:
        """One token id for each row of ``[rows, vocab]``; rows that are not read need not be drawn."""
        ...

    def first_reject(self, accept: Tensor) -> SupportsInt:
        """Index of the first rejection given acceptance probabilities ``[k]``; k if there is none."""
        ...


BLOCK = 256  # uniform numbers drawn at once on the CPU


def inverse(weights: Tensor, u: Tensor) -> Tensor:
    """The token at which the cumulative weights pass the share ``u`` of their sum.

    Args:
        weights: ``[..., vocab]``, not negative, normalised or not.
        u: ``[..., 1]`` in float64, from [0, 1).

    Returns:
        Token ids ``[...]`` (long); never one of zero weight.
    """
    cdf = weights.cumsum(-1, dtype=torch.float64)
    # right=True: the first index whose cdf exceeds u·total
    index = torch.searchsorted(cdf, u * cdf[..., -1:], right=True)
    return index.clamp_(max=weights.shape[-1] - 1).squeeze(-1)


class TorchRng:
    """Inverse-transform sampling in float64; no draw makes the host wait for an accelerator."""

    def __init__(self, seed: int | None = None, device: torch.device | str = "cpu"):
        self.generator = torch.Generator(device=device)
        self._ready: list[float] = []
        if seed is None:
            self.generator.seed()
        else:
            self.generator.manual_seed(seed)

    def _uniform(self) -> float:
        """The next number from [0, 1) of a CPU's generator, which gives a block of them in the time of one."""
        if not self._ready:
            self._ready = torch.rand(
                BLOCK, generator=self.generator, dtype=torch.float64, device=self.generator.device
            ).tolist()
        return self._ready.pop()

    def uniforms(self, count: int) -> list[float]:
        """The next numbers from [0, 1) of a CPU's generator, as so many draws take them."""
        return [self._uniform() for _ in range(count)]

    def _inverse(self, weights: Tensor) -> Tensor:
        u = torch.rand((*weights.shape[:-1], 1), generator=self.generator, dtype=torch.float64, device=weights.device)
        return inverse(weights, u)

    def draw(self, weights: Tensor) -> Tensor:
        """See `Rng.draw`."""
        if not weights.is_cpu:
            return self._inverse(weights)
        # as `inverse`, in half of its time where there is no device to be kept busy
        cdf = weights.cumsum(-1, dtype=torch.float64).numpy()
        token = int(cdf.searchsorted(self._uniform() * cdf.item(-1), side="right"))
        return torch.full((), min(token, len(cdf) - 1))

    def draw_rows(self, weights: Rows) -> Sequence[int]:
        """See `Rng.draw_rows`; on an accelerator one draw for all rows and one transfer to the host."""
        if isinstance(weights, Tensor) and not weights.is_cpu:
            return self._inverse(weights).tolist()
        return _Draws(self, weights)

    def first_reject(self, accept: Tensor) -> SupportsInt:
        """See `Rng.first_reject`; accepts where u < a, so that a = 0 is never accepted."""
        if not accept.is_cpu:
            u = torch.rand(len(accept), generator=self.generator, dtype=accept.dtype, device=accept.device)
            return (u < accept).cumprod(0).sum()
        rates = accept.tolist()
        return next((i for i, a in enumerate(rates) if not self._uniform() < a), len(rates))

    def for_greedy(self) -> TorchRng:
        """The same source for one-hot weights only, whose draw is their argmax whatever the uniform."""
        greedy = object.__new__(_OneHotRng)
        greedy.generator, greedy._ready = self.generator, self._ready
        return greedy


class _Draws(Sequence[int]):
    """A draw of each row, made when it is read."""

    def __init__(self, rng: TorchRng, weights: Rows) -> None:
        self._rng, self._weights = rng, weights

    def __len__(self) -> int:
        return len(self._weights)

    def __getitem__(self, row: Any) -> Any:
        return int(self._rng.draw(self._weights[row]))


class _OneHotRng(TorchRng):
    def _inverse(self, weights: Tensor) -> Tensor:
        return argmax(weights)

    draw = _inverse
