"""The speculative decoder: one loop for every method, and its measurements.

    from decode import load, generate, bench, profile

    pair = load("runs/quickstart/target", "runs/quickstart/export")
    print(generate(pair, "Tom has 3 apples and buys 4 more.", method="adasd", temperature=0.7).text)
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
    from decode.models.pair import Pair, load

__all__ = ["Generation", "Pair", "UserError", "bench", "generate", "load", "profile"]

# A thread that waits for the others of a parallel region spins before it sleeps. OpenMP's default is milliseconds of
# spinning, which takes a core from the work itself wherever another process runs; a short spin is faster there.
# It is set here because every command and worker imports this package before torch, which reads it when it is loaded.
if not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & os.environ.keys():
    os.environ["GOMP_SPINCOUNT"] = "200"

_HOMES = {
    "Generation": "decode.commands.generate",
    "Pair": "decode.models.pair",
    "UserError": "decode.errors",
    "bench": "decode.commands.bench",
    "generate": "decode.commands.generate",
    "load": "decode.models.pair",
    "profile": "decode.commands.profile",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'decode' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
