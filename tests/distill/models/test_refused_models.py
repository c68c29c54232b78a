"""Models that cannot be trained are refused with the reason, before anything is trained."""

from __future__ import annotations

import pytest
import torch
from families import build_tiny

from decode.errors import UserError
from distill.models.lm_head import LMHead, check_head


def test_weights_that_are_not_numbers_are_named() -> None:
    model = build_tiny("llama")
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[0, 0] = torch.nan
    with pytest.raises(UserError, match=r"NaN or infinite, as are its weights .*layers\.0\.mlp\.up_proj\.weight"):
        check_head(model, LMHead(model))
