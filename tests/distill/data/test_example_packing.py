"""Several examples in a row give the losses and gradients of one a row, with hardly any padding."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from families import build_tiny, in_double
from some_rows import every_token
from torch import Tensor

from distill.config.training import TrainingSettings
from distill.data.batches import TokenDataset, dealt_to_rows, keeps_apart
from distill.data.chat import IGNORE
from distill.data.loader import Schedule, TrainLoader
from distill.losses.objective import Objective, Selection
from distill.modules import CausalLMModule, DistillModule, TrainingModule
from distill.teacher.signals import Teacher

LENGTHS = [9, 3, 14, 5, 7, 11, 4]


def rows() -> TokenDataset:
    """Examples whose prompts are of different lengths, with a reference's losses."""
    ids = [[(7 * n + 3 * i) % 40 + 2 for i in range(n)] for n in LENGTHS]
    made = TokenDataset.from_lists(ids, [[IGNORE] * (1 + n % 3) + row[1 + n % 3 :] for n, row in zip(LENGTHS, ids)])
    made.signals["reference_loss"] = np.random.default_rng(1).random(made.label_count).astype(np.float32)
    return made


def gradients(module: TrainingModule, loader: TrainLoader) -> tuple[float, list[Tensor]]:
    """The loss and the gradients of the loader's step, averaged over its batches as Lightning does."""
    module.zero_grad()
    total = 0.0
    for batch in loader:
        loss = module.training_step(batch, 0) / loader.micros  # type: ignore[call-arg, attr-defined]
        loss.backward()
        total += float(loss.detach())
    return total, [p.grad.clone() for p in module.parameters() if p.grad is not None]


def is_same(module: TrainingModule, made: TokenDataset | None = None, **options: Any) -> bool:
    """Whether a step of the module has the same loss and gradients packed and not; packed it has less padding."""
    made = made or rows()
    schedule = Schedule(made.lengths, len(LENGTHS), seed=1)
    plain, packed = (TrainLoader(made, schedule, 1, row_length=n, **options) for n in (None, 20))
    (loss, wanted), (packed_loss, found) = gradients(module, plain), gradients(module, packed)
    assert packed.seen.places < plain.seen.places
    assert packed.seen.tokens == plain.seen.tokens == sum(LENGTHS)
    alike = all(torch.allclose(a, b, atol=1e-7, rtol=1e-5) for a, b in zip(found, wanted, strict=True))
    return alike and packed_loss == pytest.approx(loss, rel=1e-6)


def distillation(family: str, scope: Any = None, normalisation: Any = "paper") -> DistillModule:
    target, draft = (in_double(build_tiny(family, seed=n, dtype=torch.float64)) for n in (4, 5))
    selection = None if scope is None else Selection(0.4, scope, normalisation)
    return DistillModule(draft, TrainingSettings(), 4, target=Teacher(target), objective=Objective(selection=selection))


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3", "phi", "gpt_neox"])
def test_a_packed_step_is_the_step(family: str) -> None:
    assert is_same(distillation(family))


@pytest.mark.parametrize("scope", ["microbatch", "global"])
@pytest.mark.parametrize("micros", [1, 3])
def test_the_same_tokens_are_selected(scope: str, micros: int) -> None:
    module = distillation("llama", scope, "official")
    assert is_same(module, micros=micros, look_ahead=scope == "global" and micros > 1)


def test_the_first_token_of_a_text_is_not_learned_from_the_end_of_the_one_before() -> None:
    module = CausalLMModule(in_double(build_tiny("llama", seed=5, dtype=torch.float64)), TrainingSettings(), 4)
    assert is_same(module, every_token(rows()))


@pytest.mark.parametrize("row_length", [1024, 2048, 8192])
def test_rows_are_of_nearly_the_same_length(row_length: int) -> None:
    lengths = np.random.default_rng(0).integers(40, 512, 128).tolist()
    made = dealt_to_rows(lengths, row_length)
    assert sorted(i for row in made for i in row) == list(range(128))
    filled = [sum(lengths[i] for i in row) for row in made]
    assert 1 - sum(filled) / (len(filled) * max(filled)) < 0.05
    assert max(filled) < row_length + 512


def test_a_model_that_ignores_positions_is_not_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build_tiny("llama")
    assert keeps_apart(model)
    forward = model.base_model.forward
    monkeypatch.setattr(model.base_model, "forward", lambda position_ids=None, **given: forward(**given))
    assert not keeps_apart(model)
