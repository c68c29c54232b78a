"""Offline acceptance of every kind of draft on a GPU; commands: ``pytest --device auto tests/decode/commands``."""

from __future__ import annotations

import pytest
from families import with_layers
from gpu_tests import DEVICE, GPU, draft, target, there, with_ci

from decode.core.sampling import LogitsWarper
from decode.measure.acceptance import offline_alphas
from decode.models.heads.mtp import load_mtp

pytestmark = GPU
TEXTS = [([3, 7, 1, 9, 12, 40, 2, 5, 9, 9], 4), ([5, 6], 2), ([5, 6, 7], 1), ([8] * 20, 3)]
"""The second has no response."""
KINDS = ["model", "eagle", "eagle3", "dflash", "dspark", "dflash2"]


@pytest.mark.parametrize("temperature", with_ci([0.0, 0.8], 0.8))
def test_offline_alphas_of_every_kind_are_the_cpus(temperature: float) -> None:
    """By draft, depth, text and position."""
    warp, measured = LogitsWarper(temperature, top_p=0.9 if temperature else 1.0), []
    for device in (DEVICE, "cpu"):
        drafts = {kind: there(draft(kind), device) for kind in KINDS}
        measured.append(offline_alphas(there(target(), device), drafts, TEXTS, warp, depth=3))
    for kind in KINDS:
        for mine, other in zip(*(alphas[kind] for alphas in measured), strict=True):
            assert sum(other.counts) == 25
            for a, b in zip([*mine.texts, *mine.kept], [*other.texts, *other.kept], strict=True):
                assert a == pytest.approx(b, abs=1e-4)


def test_offline_alphas_of_a_target_s_own_layers_are_the_cpus(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = with_layers(tmp_path, monkeypatch, "Mellum")
    moved = there(model)
    wanted = offline_alphas(model, {"mtp": load_mtp(model)}, TEXTS, LogitsWarper(), depth=3)["mtp"]
    found = offline_alphas(moved, {"mtp": load_mtp(moved)}, TEXTS, LogitsWarper(), depth=3)["mtp"]
    assert [each.texts for each in found] == [each.texts for each in wanted]
