"""What the loop and the drafters need of a model: read tokens, roll back, keep one path of a tree."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import repeat
from typing import Any

import torch
from torch import Tensor

from decode.draft import Draft
from decode.errors import UserError


class Runner(ABC):
    """A causal language model over a key-value cache of one text that rolls back in O(1).

    Implementations are in `decode.models`; they set `hidden` (and `features`) in `read`.

    Attributes:
        name: of the model, for messages: class and architecture.
        device: where it computes.
        dtype: of its weights and states.
        vocab_size: ids that it reads, and columns of its logits.
        limit: positions of its context.
        model: the Hugging Face model that is run, for what else is known of it; None where there is none.
        packing: how its weights were laid out for the processor, and why; empty where there was nothing to choose.
        tree_refusal: why it cannot read token trees; empty where it can.
        captured_layers: hidden states to keep of all rows read, for drafters that build on them: i is the state that
            enters layer i, the number of layers the last one, after the final norm.
        hidden: last hidden states ``[n, width]`` of the latest read, as the output head sees them.
        features: the captured states of the latest read, side by side ``[n, captured layers · width]``.
    """

    def __init__(
        self,
        name: str,
        *,
        device: torch.device,
        dtype: torch.dtype,
        vocab_size: int,
        limit: int,
        model: Any = None,
    ) -> None:
        self.name, self.device, self.dtype, self.model = name, device, dtype, model
        self.vocab_size, self.limit = vocab_size, limit
        self.packing = ""
        self.tree_refusal = ""
        self.captured_layers: tuple[int, ...] = ()
        self.hidden = torch.empty(0)
        self.features = torch.empty(0)

    @property
    @abstractmethod
    def length(self) -> int:
        """Positions held in the cache."""

    @property
    def row(self) -> int:
        """The text's place among those that share a cache; texts in this order are read together fastest."""
        return 0

    @abstractmethod
    def read(self, tokens: Tensor, tree: Draft | None = None, head: int | None = None) -> Tensor:
        """Append tokens to the cache.

        Args:
            tokens: long ``[n]``; with a tree, the pending token followed by the tree's nodes.
            tree: gives positions (by depth) and mask (by ancestry) where the tokens are no chain.
            head: for how many of the last rows logits are computed; None for all, 0 for none.

        Returns:
            Logits ``[n or head, vocab]``.
        """

    @abstractmethod
    def truncate(self, length: int) -> None:
        """Hold the first `length` positions only (no effect if fewer are held)."""

    def fork(self, count: int) -> list[Runner]:
        """Runners of the same model on so many more texts; `close` gives their memory back.

        Raises:
            UserError: a runner that serves one text only.
        """
        raise UserError(f"{self.name} decodes one text at a time; give a batch size of 1")

    def close(self) -> None:  # noqa: B027 (what holds no shared memory has nothing to give back)
        """Give back the memory of a fork."""

    def read_texts(
        self,
        texts: Sequence[Any],
        tokens: Tensor,
        counts: Sequence[int],
        trees: Sequence[Draft | None] | None = None,
        *,
        last_only: bool = False,
    ) -> Tensor:
        """Append tokens to several texts, in one forward where the runner can, else text by text.

        Args:
            texts: forks of one runner (or itself), each once.
            tokens: long ``[tokens]``, text after text.
            counts: how many of them each text has; at least 1.
            trees: see `read`, of each text.
            last_only: compute logits of each text's last token only.

        Returns:
            Logits ``[tokens or texts, vocab]``.
        """
        head, parts = 1 if last_only else None, tokens.split(list(counts))
        return torch.cat([t.read(part, tree, head) for t, part, tree in zip(texts, parts, trees or repeat(None))])

    def keep(self, base: int, slots: list[int]) -> None:
        """Keep the first `base` positions and then those at `slots` (ascending), dropping the rest."""
        if slots != list(range(base, base + len(slots))):
            self.gather(base, slots)
        self.truncate(base + len(slots))

    def gather(self, base: int, slots: list[int]) -> None:
        """Move the cache entries at `slots` (ascending) to `base` and the slots behind it; only trees need it."""
        raise NotImplementedError(f"{self.name} reads no trees")

    def reserve(self, capacity: int) -> None:  # noqa: B027 (a cache that needs no preparation is fine)
        """Allocate for `capacity` positions up front, so that nothing grows on the way."""

    def room(self, ids: Sequence[int]) -> int:
        """How many tokens fit behind this text, whose first `length` tokens are held; negative if it does not fit."""
        return self.limit - len(ids)

    @property
    def supports_trees(self) -> bool:
        """Whether `read` takes token trees."""
        return not self.tree_refusal

    @property
    def cache_bytes_per_token(self) -> int:
        """Bytes of cache that a position takes; 0 where that is unknown, or the cache is another runner's."""
        return 0

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that reading one token takes; 0 where that is unknown."""
        return 0


class WrappedRunner(Runner):
    """A runner that reads chains through another one, whose cache it has; as long as that one unless it says otherwise.

    Args:
        inner: the other one.
        tree_refusal: why it reads no trees.
        vocab_size: columns of its logits; None: those of the other one.
    """

    def __init__(self, inner: Runner, tree_refusal: str, vocab_size: int | None = None) -> None:
        places = {"device": inner.device, "dtype": inner.dtype}
        size = vocab_size or inner.vocab_size
        super().__init__(inner.name, **places, vocab_size=size, limit=inner.limit, model=inner.model)  # type: ignore
        self.inner, self.packing, self.tree_refusal = inner, inner.packing, tree_refusal

    @property
    def length(self) -> int:
        """See `Runner.length`."""
        return self.inner.length

    @property
    def weight_bytes(self) -> int:
        """See `Runner.weight_bytes`."""
        return self.inner.weight_bytes

    @property
    def cache_bytes_per_token(self) -> int:
        """See `Runner.cache_bytes_per_token`; a token of another vocabulary may be several of the inner one's."""
        return self.inner.cache_bytes_per_token

    def close(self) -> None:
        """See `Runner.close`."""
        self.inner.close()

    def reserve(self, capacity: int) -> None:
        """See `Runner.reserve`."""
        self.inner.reserve(capacity)

    def truncate(self, length: int) -> None:
        """See `Runner.truncate`."""
        self.inner.truncate(length)


def synchronize(device: torch.device) -> None:
    """Wait for the device, so that a clock read on the host means something."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
