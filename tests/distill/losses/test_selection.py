"""AdaSPEC's choice of tokens, the slots of blocks that it ranks, and drafts that end where a token is rejected."""

import pytest
import torch
from torch import nn

from distill.losses.chunked import Rows
from distill.losses.divergences import Divergence, TargetRows
from distill.losses.selection import accepted_rows, by_reach, reach, share, top_k
from distill.networks.lm_head import LMHead

NAN = float("nan")


@pytest.mark.parametrize(
    ("delta", "k", "wanted"),
    [
        ([0.1, 0.9, -1.0, 0.5, 0.7], 0.6, [1, 3, 4]),
        ([0.0] * 10, 0.4, [0, 1, 2, 3]),  # of equal ones the first
        ([1.0, 2.0, 1.0, 2.0, 1.0], 0.6, [0, 1, 3]),
        ([0.1, NAN, 5.0], 0.3, [1]),  # so that it shows in the loss
        ([], 0.4, []),
    ],
)
def test_the_largest_differences_are_chosen_in_ascending_order_of_place(delta, k: float, wanted) -> None:
    """Their number is the ceiling of k·n, despite binary fractions; each drafting step has a share of its own."""
    given, steps = torch.tensor(delta), torch.zeros(len(delta), dtype=torch.long)
    assert top_k(given, k).tolist() == top_k(given, k, steps).tolist() == wanted
    both = top_k(torch.cat([given, given + 9]), k, torch.cat([steps, steps + 1])).tolist()
    assert both == [*wanted, *(len(delta) + place for place in wanted)]
    counts = [(0.07, 100), (0.28, 25), (0.4, 5), (0.4, 6), (0.1, 30), (1.0, 7), (0.001, 3), (0.4, 0)]
    assert [share(k, n) for k, n in counts] == [7, 7, 2, 3, 3, 7, 1, 0]


def test_a_slot_is_reached_where_those_before_it_in_its_block_are_accepted() -> None:
    slots = torch.tensor([0, 1, 2, 0, 0, 1])
    alpha = torch.tensor([0.5, 0.4, 0.8, 0.9, 0.3, 0.6], dtype=torch.float64)
    assert reach(alpha, slots).tolist() == pytest.approx([1, 0.5, 0.2, 1, 1, 0.3])
    assert len(by_reach(alpha[:0], alpha[:0], slots[:0])) == 0


def test_slots_that_are_never_reached_are_not_chosen_before_reached_ones() -> None:
    """ΔL times the chance to be reached would choose −5 at 1e-4 before −0.1 at 0.9."""
    slots = torch.tensor([0, 1, 2, 0, 1])
    alpha = torch.tensor([0.9, 1e-4, 0.5, 0.9, 0.9])
    delta = torch.tensor([0.3, -0.1, -5.0, -0.2, -0.1])
    assert top_k(by_reach(delta, alpha, slots), 0.8).tolist() == [0, 1, 3, 4]


def unrolled(alphas: list[list[float]], at: list[list[int]]) -> Rows:
    """Rows of several drafting steps with these acceptance rates."""
    steps = torch.repeat_interleave(torch.arange(len(at)), torch.tensor([len(step) for step in at]))
    alpha, places = (torch.tensor([value for step in values for value in step]) for values in (alphas, at))
    linear = nn.Linear(3, 3, bias=False)
    nn.init.eye_(linear.weight)
    q = torch.stack([alpha, 1 - alpha, torch.zeros_like(alpha)], 1).clamp_min(1e-30)
    p = torch.tensor([1.0, 1e-30, 1e-30]).log().expand(max(map(max, at)) + 1, 3)
    return Rows(q.log(), LMHead.of(linear), TargetRows(p, 3), len(p), places, steps)


def test_a_drafting_step_goes_on_where_every_token_before_it_was_accepted(monkeypatch) -> None:
    """Label tokens 0 to 3 of a text, then 4 and 5 of another one; a token is accepted above a chance of one half."""
    monkeypatch.setattr(torch, "rand_like", lambda alpha: torch.full_like(alpha, 0.5))
    place = torch.tensor([1, 2, 3, 4, 8, 9])
    first, second, third = [0.9, 0.1, 0.9, 0.9, 0.9, 0.9], [0.9, 0.9, 0.2, 0.9], [0.9, 0.9]
    rows = unrolled([first, second, third], [[0, 1, 2, 3, 4, 5], [1, 2, 3, 5], [2, 3]])
    chosen = accepted_rows(rows, place, Divergence())
    # of the second step: 1 follows 0, 2 follows the rejected 1, 3 follows 2, 5 follows 4; of the third: 2 follows 0, 1
    assert chosen.tolist() == [0, 1, 2, 3, 4, 5, 6, 8, 9, 10]
    empty = Rows(rows.hidden[:0], rows.head, rows.target, 0, rows.at[:0], rows.step[:0])
    assert accepted_rows(empty, place[:0], Divergence()).tolist() == []
