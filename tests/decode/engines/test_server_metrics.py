"""Metrics pages as the engines write them, and their counts beside a profile."""

from __future__ import annotations

import pytest

from decode.engines.acceptance import Drafts
from decode.engines.server import Metrics, drift, parse_metrics
from decode.errors import UserError

VLLM = """# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="a b"} 207.0
vllm:spec_decode_num_drafts_created{engine="0",model_name="a b"} 1.7e+09
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="a b"} 621.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="a b"} 595.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="a b",position="0"} 206.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="a b",position="1"} 199.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="a b",position="2"} 190.0
vllm:request_decode_time_seconds_sum{engine="0",model_name="a b"} 12.5
"""
LLAMA = """# HELP llamacpp:spec_decode_num_drafts_total Speculative: Total speculative decoding verification steps
# TYPE llamacpp:spec_decode_num_drafts_total counter
llamacpp:spec_decode_num_drafts_total 11
llamacpp:spec_decode_num_draft_tokens_total 44
llamacpp:spec_decode_num_accepted_tokens_per_pos_total{position="0"} 11
llamacpp:spec_decode_num_accepted_tokens_per_pos_total{position="1"} 10
"""


def test_vllm() -> None:
    found = parse_metrics(VLLM)
    assert (found.engine, found.drafts) == ("vllm", Drafts(207, 621, [206, 199, 190]))
    assert found.decode_seconds == 12.5


def test_llama_server() -> None:
    found = parse_metrics(LLAMA)
    assert (found.engine, found.drafts) == ("llama.cpp", Drafts(11, 44, [11, 10]))
    assert found.decode_seconds is None


def test_sglang_publishes_a_mean_only() -> None:
    found = parse_metrics('sglang:spec_accept_length{model_name="m"} 3.25\n')
    assert (found.engine, found.mean_length) == ("sglang", 3.25)
    for without in ("num_running_reqs", "spec_accept_length"):
        with pytest.raises(UserError, match="started without a draft"):
            parse_metrics(f'sglang:{without}{{model_name="m"}} 0.0\n')


def test_replicas_of_sglang_are_averaged() -> None:
    page = "".join(
        f'sglang:spec_accept_length{{dp_rank="{i}"}} {mean}\nsglang:spec_num_steps{{dp_rank="{i}"}} 4\n'
        for i, mean in enumerate((3.0, 2.0, 0.0))
    )
    found = parse_metrics(page)
    assert (found.mean_length, found.steps) == (2.5, 4)


def test_another_page_is_refused() -> None:
    with pytest.raises(UserError, match=r"not vLLM's, SGLang's or llama\.cpp's"):
        parse_metrics("<html>404</html>")


def test_a_later_reading_less_an_earlier_one_is_what_happened_between() -> None:
    assert Drafts(5, 15, [4, 3]) - Drafts(2, 6, [2]) == Drafts(3, 9, [2, 3])


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
