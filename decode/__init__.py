"""The speculative decoder: one loop for every method, and its measurements.

    from decode import load, generate, bench, profile

    pair = load("runs/quickstart/target", "runs/quickstart/export")
    print(generate(pair, "Eva is 9 years old. Leo is 4 years older than Eva. How old is Leo now?", method="adasd").text)
    rows = bench(pair, ["vanilla", "prompt-lookup"], suite=["arithmetic"], limit=4)
    print(profile(pair).verdict)

The names are imported when they are first used, so that ``import decode`` itself loads neither torch nor transformers.
"""

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from decode.commands.bench import bench
    from decode.commands.generate import Generation, generate
    from decode.commands.profile import profile
    from decode.errors import UserError
    from decode.models.open import Pair, load

__all__ = ["Generation", "Pair", "UserError", "bench", "generate", "load", "profile"]

# OpenMP's threads spin for milliseconds before they sleep, which takes a core from the work wherever another process
# runs. Every command and worker imports this package before torch, which reads the variable when it is loaded.
# The second variable says that the first is ours, so that engines do not inherit it.
if not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & os.environ.keys():
    os.environ |= {"GOMP_SPINCOUNT": "200", "DRAFTSMITH_SPINCOUNT": "200"}

_HOMES = {
    "Generation": "decode.commands.generate",
    "Pair": "decode.models.open",
    "UserError": "decode.errors",
    "bench": "decode.commands.bench",
    "generate": "decode.commands.generate",
    "load": "decode.models.open",
    "profile": "decode.commands.profile",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'decode' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
