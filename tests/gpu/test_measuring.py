"""Measuring on a GPU: offline acceptance of every kind of draft, costs, the command profile."""

from __future__ import annotations

import pytest
from families import with_layers
from gpu_tests import DEVICE, GPU, draft, target, there, with_ci
from heads import make_head
from pairs import make_pair, make_suite, make_tokenizer

from decode.commands.profile import profile_pair
from decode.commands.settings import ProfileSettings
from decode.core.sampling import LogitsWarper
from decode.measure.acceptance import offline_alphas
from decode.models.heads.mtp import load_mtp
from decode.models.open import Pair

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


@pytest.mark.parametrize("kind", ["model", "eagle3"])
def test_the_command_profile_measures_the_alpha_of_the_cpu(tiny, kind: str) -> None:
    plain, small = make_pair(tiny)
    if kind == "eagle3":
        small = make_head(plain, 3)
    settings = ProfileSettings(max_new_tokens=8, longest=3, batch_sizes=[2])
    found, wanted = (
        profile_pair(settings, Pair(there(plain, device), make_tokenizer(), there(small, device)), [make_suite()])
        for device in (DEVICE, "cpu")
    )
    assert found.alpha.texts == wanted.alpha.texts  # greedy: 0 or 1
    assert found.cost.rounds.seconds.keys() == {1, 2}
    assert all(seconds > 0 for row in found.cost.rounds.seconds.values() for seconds in row.values())
    assert len(found.lengths) == 3
