"""Shared by all tests: one thread a process, and tiny random models of every family."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from families import build_tiny
from transformers import PreTrainedModel

torch.set_num_threads(1)
transformers.logging.set_verbosity_error()


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
