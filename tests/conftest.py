"""Shared by all tests: one thread a process, and tiny random models of every family."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import devices
import noise
import pytest
import torch
import transformers
from families import build_tiny, in_double
from huggingface_hub import constants
from transformers import PreTrainedModel

from decode.measure import costs as cost_model
from decode.measure import machine
from decode.models.fast import weights as choose_linear
from decode.models.fast.forward import FastForward

torch.set_num_threads(1)
transformers.logging.set_verbosity_error()

# no test depends on how exact a time is
cost_model.TURNS, cost_model.ROUNDS, choose_linear.TURNS = 2, 2, 1


LONGEST = ("test_fsdp_and_ddp.py", "test_main.py", "test_export.py")


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--noise SEED``, which ``make test ARGS='--noise 1'`` hands to every process; so does the variable.

    ``--device`` and ``--devices`` are those of `devices`.
    """
    devices.add_options(parser)
    parser.addoption(
        "--noise", type=int, help="seed of a rounding on the weights of every tiny model (DRAFTSMITH_NOISE)"
    )


def pytest_configure(config: pytest.Config) -> None:
    """The device is there before the first test is imported; processes that tests start find the seed by the variable."""
    devices.choose(config)
    if seed := config.getoption("noise"):
        os.environ[noise.VARIABLE] = str(seed)
    noise.install()
    if capability := os.environ.get("ATEN_CPU_CAPABILITY"):  # kernels that are compiled for another one crash
        user = os.getuid() if hasattr(os, "getuid") else ""  # the folder belongs to whoever made it
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{tempfile.gettempdir()}/torchinductor-{user}-{capability}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files first, so that at the end no process works alone."""
    items.sort(key=lambda item: item.path.parent.name != "probes" and item.path.name not in LONGEST)


@pytest.fixture(autouse=True)
def _idle_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """What other programs do decides nothing, nor how wide the terminal is that pytest-xdist tells its workers."""
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setattr(machine, "timed", lambda _: nullcontext({"cpu_share": 1.0}))


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """A test that sets torch's threads does not change the rounding of those that follow."""
    yield
    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def _no_ones_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What is kept of GGUF files lies in the tests' own folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(constants, "HF_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def tiny() -> Callable[..., PreTrainedModel]:
    """`build_tiny`, each model built once a session; treat the models as constants."""
    built: dict[str, PreTrainedModel] = {}

    def get(family: str, **options: Any) -> PreTrainedModel:
        key = repr((family, sorted(options.items(), key=str)))
        if key not in built:
            built[key] = build_tiny(family, **options)
        return built[key]

    return get


@pytest.fixture(scope="session")
def double(tiny: Callable[..., PreTrainedModel]) -> Callable[..., PreTrainedModel]:
    """`tiny` in float64, norms included."""
    return lambda family, **options: in_double(tiny(family, dtype=torch.float64, **options))


@pytest.fixture
def count_forwards(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one with every hand-written forward, of a target, a draft model or a head."""
    seen: list[int] = []
    project = FastForward.project

    def counted(self: FastForward, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        seen.append(len(x))
        return project(self, x)

    monkeypatch.setattr(FastForward, "project", counted)
    return seen
