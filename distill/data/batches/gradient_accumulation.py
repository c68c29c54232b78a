"""What a micro-batch knows of the optimiser step that it is a part of: enough to normalise by all its label tokens.

A step's examples are dealt out to ranks, and each rank's to its micro-batches. Since every rank can name all examples,
the numbers of label tokens are known everywhere without asking; only ΔL has to be exchanged to select among all.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

LONGEST = 1 << 24  # label tokens of an example, at most


class OptimizerStep:
    """A micro-batch's place in its optimiser step. Kept on the host: no tensor, so it is not moved to the device.

    Args:
        counts: Label tokens of every example, ``[ranks x micro-batches, examples]``, filled up with 0.
        rank: Whose micro-batch it is, of ``world`` ranks.
        micro: Which of the rank's ``micros`` it is.
        ahead: All the rank's micro-batches of the step, with its first one, where the selection needs them at once.
    """

    def __init__(
        self,
        counts: NDArray[np.int64],
        rank: int = 0,
        world: int = 1,
        micro: int = 0,
        micros: int = 1,
        ahead: Sequence[dict[str, Any]] = (),
    ) -> None:
        self.counts, self.rank, self.world, self.micro, self.micros = counts, rank, world, micro, micros
        self.ahead = ahead

    @property
    def parts(self) -> int:
        """Micro-batches of the step, over all ranks. Gradients are averaged over them."""
        return self.world * self.micros

    @property
    def part(self) -> int:
        """Number of this one."""
        return self.rank * self.micros + self.micro

    @property
    def tokens(self) -> int:
        """Label tokens of the step."""
        return int(self.counts.sum())

    @property
    def responses(self) -> int:
        """Examples of the step that have label tokens."""
        return int((self.counts > 0).sum())

    @property
    def weight(self) -> float:
        """What a mean over this part's label tokens is multiplied by, so that the average over parts is the step's."""
        return self.parts * int(self.counts[self.part].sum()) / max(1, self.tokens)

    def order(self, micro: int, sequence: Tensor) -> Tensor:
        """A number for every label token of a micro-batch that does not depend on how the step is dealt out, ``[n]``.

        Args:
            micro: Which of this rank's micro-batches.
            sequence: The example of the micro-batch that each token belongs to, ascending.
        """
        starts = torch.searchsorted(sequence, sequence)
        offset = torch.arange(len(sequence), device=sequence.device) - starts
        place = self.rank + self.world * (micro + self.micros * sequence)
        return place * LONGEST + offset

    def choose(
        self, deltas: Sequence[Tensor], sequences: Sequence[Tensor], select: Callable[[Tensor], Tensor]
    ) -> list[Tensor]:
        """Select among all label tokens of the step by their ΔL, in the step's own order.

        Args:
            deltas: ΔL of the label tokens of each of this rank's micro-batches.
            sequences: The examples they belong to.
            select: Indices of the selected among ΔL ``[n]`` of the whole step (`losses.token_selection.top_share`).

        Returns:
            Indices, ascending, for each of the micro-batches.
        """
        own = [self.order(micro, sequence) for micro, sequence in enumerate(sequences)]
        order, delta = self._gathered(torch.cat(own)), self._gathered(torch.cat(list(deltas)))
        sort = order.argsort()
        chosen = order[sort][select(delta[sort])]
        return [torch.isin(part, chosen).nonzero()[:, 0] for part in own]

    def _gathered(self, values: Tensor) -> Tensor:
        """The values of all ranks, one after the other."""
        if self.world == 1:
            return values
        size = torch.tensor([len(values)], device=values.device)
        counts = [torch.empty_like(size) for _ in range(self.world)]
        dist.all_gather(counts, size)
        sizes = [int(count) for count in counts]
        padded = values.new_zeros(max(sizes))
        padded[: len(values)] = values
        found = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(found, padded)
        return torch.cat([part[:size] for part, size in zip(found, sizes)])
