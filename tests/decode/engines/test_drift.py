"""A server's counts beside a profile."""

from __future__ import annotations

import pytest

from decode.core.errors import UserError
from decode.engines.counts import Drafts
from decode.engines.drift import drift
from decode.engines.metrics_text import Metrics

PROFILE = {"marginal_accept_rates": [0.9, 0.8, 0.7], "marginal_accept_rates_se": [0.01, 0.02, 0.02]}


def test_rates_as_in_the_profile_have_not_drifted() -> None:
    found = drift(Metrics("vllm", Drafts(1000, 3000, [905, 790, 700])), None, PROFILE)
    assert (found["drifted"], found["mean_accept_length"]) == (False, pytest.approx(3.395))
    assert found["positions"][0]["difference"] == pytest.approx(0.005)


def test_a_lost_position_has_drifted_since_the_last_reading() -> None:
    before = Metrics("vllm", Drafts(1000, 3000, [905, 790, 700]))
    now = Metrics("vllm", Drafts(1200, 3600, [1085, 950, 760]))
    found = drift(now, before, PROFILE)
    assert (found["rounds"], found["positions"][2]["served"], found["drifted"]) == (200, 0.3, True)


def test_few_rounds_say_nothing() -> None:
    found = drift(Metrics("vllm", Drafts(10, 30, [2, 1, 0])), None, PROFILE)
    assert (found["enough"], found["drifted"]) == (False, False)


def test_a_server_that_was_started_anew_counts_from_its_start() -> None:
    before = Metrics("vllm", Drafts(1000, 3000, [905, 790, 700]))
    assert drift(Metrics("vllm", Drafts(100, 300, [90, 80, 70])), before, PROFILE)["rounds"] == 100


def test_sglang_is_compared_by_its_mean() -> None:
    assert drift(Metrics("sglang", Drafts(), None, 2.0), None, PROFILE)["drifted"] is True
    assert drift(Metrics("sglang", Drafts(), None, 1.9, 1), None, PROFILE)["drifted"] is False  # of one drafted token
    unused = drift(Metrics("sglang", Drafts(), None, 0.0, 3), None, PROFILE)
    assert (unused["enough"], unused["drifted"]) == (False, False)


def test_a_profile_without_rates_is_refused() -> None:
    with pytest.raises(UserError, match="no acceptance rates"):
        drift(Metrics("vllm", Drafts()), None, {"marginal_accept_rates": None})
