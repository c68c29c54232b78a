"""Functions that torch.compile turns into kernels of the device, where it has a compiler."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Generic, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


class Compiled(Generic[P, R]):
    """A function, compiled when it is first called; as it is, after a warning, where that fails.

    Args:
        function: Pure, of tensors whose first dimension may change from call to call.
        name: What it computes, for the warning.
    """

    def __init__(self, function: Callable[P, R], name: str) -> None:
        self.function, self.name = function, name
        self._made: Callable[P, R] | None = None

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """See ``function``."""
        from torch._dynamo.exc import TorchDynamoException

        if self._made is None:
            self._made = torch.compile(self.function, dynamic=True, fullgraph=True)
        try:
            return self._made(*args, **kwargs)
        except (TorchDynamoException, ImportError) as error:
            self._made = self.function
            why = " ".join(str(error).split("\n\n")[0].split()) or type(error).__name__
            warnings.warn(f"{self.name} is not compiled here ({why}) and takes more time and memory", stacklevel=2)
            return self._made(*args, **kwargs)
