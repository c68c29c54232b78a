"""The device that tests run on: ``pytest --device auto|cuda|pretended|cpu``; ``--devices`` is how many are pretended."""

import pretended_cuda
import pytest
import torch

DEVICE = "cuda"
"""Of the tests of GPUs."""
ACCELERATOR = "cpu"
"""Of the runs of `tiny_run`, which are for the CPU unless a device is asked for."""

PRETENDED = False
"""Whether `DEVICE` is pretended."""


def add_options(parser: pytest.Parser) -> None:
    """Add the options to pytest's."""
    parser.addoption(
        "--device",
        choices=("auto", "cuda", "pretended", "cpu"),
        help="device of tests/gpu and of the runs of tiny_run.py; auto: a GPU where there is one, else a pretended one",
    )
    parser.addoption("--devices", type=int, default=1, help="number of pretended devices")
    parser.addoption("--record", action="store_true", help="write tests/gpu/counts.yaml anew")


def choose(config: pytest.Config) -> None:
    """Set `DEVICE` and `ACCELERATOR`, and pretend devices where that is asked for.

    Raises:
        UsageError: no such device, and what is missing.
    """
    global DEVICE, ACCELERATOR, PRETENDED
    kind, missing = config.getoption("device"), pretended_cuda.missing()
    if kind == "auto":
        kind = "cuda" if torch.cuda.is_available() else "pretended"
        if kind == "pretended" and missing:
            raise pytest.UsageError(f"nothing was tested: there is no GPU, and to pretend one takes {missing}")
    if kind == "pretended":
        if missing:
            raise pytest.UsageError(f"nothing was tested: to pretend a GPU takes {missing}")
        pretended_cuda.install(config.getoption("devices"))
    PRETENDED = kind == "pretended"
    if kind is not None:
        DEVICE = "cpu" if kind == "cpu" else "cuda"
        ACCELERATOR = "cpu" if kind == "cpu" else "gpu"
