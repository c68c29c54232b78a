"""AdaSPEC's selection: exact counts, ties, scopes, normalisations, on hand-made values."""

import pytest
import torch

from distill.losses.selection import Selection, share, top_share


@pytest.mark.parametrize(
    ("k", "n", "wanted"),
    [(0.4, 5, 2), (0.4, 6, 3), (0.4, 1, 1), (0.1, 30, 3), (0.3, 10, 3), (1.0, 7, 7), (0.001, 3, 1), (0.4, 0, 0)],
)
def test_share_is_the_ceiling_of_k_times_n_despite_binary_fractions(k: float, n: int, wanted: int) -> None:
    assert share(k, n) == wanted


def test_the_largest_values_are_chosen_in_ascending_order_of_place() -> None:
    assert top_share(torch.tensor([0.1, 0.9, -1.0, 0.5, 0.7]), 0.6).tolist() == [1, 3, 4]


def test_among_equals_the_lowest_place_wins_and_the_count_stays_exact() -> None:
    assert top_share(torch.zeros(10), 0.4).tolist() == [0, 1, 2, 3]
    assert top_share(torch.tensor([1.0, 2.0, 1.0, 2.0, 1.0]), 0.6).tolist() == [0, 1, 3]


def test_nothing_to_choose_from_gives_nothing() -> None:
    assert Selection(0.4).choose(torch.empty(0)).tolist() == []


def test_an_empty_selection_is_divided_by_one() -> None:
    assert Selection(normalisation="paper").divisor(0, 0) == Selection(normalisation="official").divisor(0, 0) == 1


def test_selecting_everything_is_the_plain_mean_in_both_normalisations() -> None:
    for normalisation in ("paper", "official"):
        selection = Selection(1.0, normalisation=normalisation)  # type: ignore[arg-type]
        chosen = selection.choose(torch.randn(9))
        assert chosen.tolist() == list(range(9))
        assert selection.divisor(len(chosen), 9) == 9


def test_normalisations_by_hand() -> None:
    losses, delta = torch.tensor([4.0, 1.0, 3.0, 2.0, 5.0, 7.0]), torch.tensor([1.0, 0.0, 1.0, 0.0, 0.0, 1.0])

    def loss(normalisation: str) -> float:
        selection = Selection(0.5, normalisation=normalisation)  # type: ignore[arg-type]
        chosen = selection.choose(delta)
        return float(losses[chosen].sum() / selection.divisor(len(chosen), len(losses)))

    assert loss("official") == pytest.approx((4 + 3 + 7) / 6)
    assert loss("paper") == pytest.approx((4 + 3 + 7) / 3)


def test_the_official_quantile_selects_at_most_one_token_more_or_less() -> None:
    pairs = [(k / 20, n) for k in range(1, 20) for n in range(2, 65)]
    values = {n: torch.arange(n, dtype=torch.float64) for _, n in pairs}
    official = [int((values[n] >= torch.quantile(values[n], 1 - k)).sum()) for k, n in pairs]
    apart = [abs(count - share(k, n)) for count, (k, n) in zip(official, pairs)]
    assert set(apart) == {0, 1}
