"""What tests of GPUs share: their device, and the same model, random number or run on it and on the CPU."""

import copy
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from devices import DEVICE, PRETENDED
from families import build_tiny, resembling
from heads import make_block_head, make_head
from tiny_run import tiny_settings
from torch import nn
from transformers import PreTrainedModel

from distill.config import Settings

CUDA = DEVICE.startswith("cuda")
REAL = CUDA and not PRETENDED
"""Whether kernels round as a GPU's do: of a pretended device they are the CPU's."""
GPU = [pytest.mark.gpu, pytest.mark.skipif(CUDA and not torch.cuda.is_available(), reason="needs a CUDA device")]
CI = pytest.mark.ci


def with_ci(values: Iterable[Any], *chosen: Any) -> list[Any]:
    """Parameters of a test, of which the chosen ones are part of ``.ci/run``."""
    return [pytest.param(value, marks=CI) if value in chosen else value for value in values]


Module = TypeVar("Module", bound=nn.Module)


def there(module: Module, device: str = DEVICE) -> Module:
    """A copy of the module on a device."""
    return copy.deepcopy(module).to(device)


@cache
def target() -> PreTrainedModel:
    """A target on the CPU."""
    return build_tiny("llama", num_hidden_layers=4)


@cache
def draft(kind: str) -> Any:
    """A draft of a kind for it, some of whose tokens are accepted."""
    if kind == "model":
        return resembling(target(), 0.15)
    versions = {"eagle": 1, "eagle3": 3}
    return make_head(target(), versions[kind]) if kind in versions else make_block_head(target(), kind)


def settings_in(folder: Path, **changes: Any) -> Settings:
    """A run of seconds on the device."""
    settings = tiny_settings(folder, **changes)
    settings.trainer.accelerator, settings.trainer.devices = ("gpu" if CUDA else "cpu"), 1
    settings.trainer.validate_every = 3
    for training in (settings.target.training, settings.student.training, settings.training):
        training.steps = 5
    evaluation: Any = settings.evaluation
    evaluation.prompts = evaluation.accuracy_prompts = 4
    evaluation.decode_prompts, evaluation.max_new_tokens, evaluation.draft_lengths = 1, 6, [2]
    return settings
