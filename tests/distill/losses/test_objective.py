"""The objective that settings describe, AdaSPEC's selection, and the tokens that a loss is divided by."""

from typing import Any

import numpy as np
import pytest
import torch
from families import build_tiny, in_double

from decode.models.heads import FeatureHead, head_config
from distill.config.drafts import DraftSettings, Scope
from distill.config.training import StudentSettings, TrainingSettings
from distill.data.batches import TokenDataset
from distill.data.loader import Schedule, TrainLoader
from distill.losses.divergences import Divergence
from distill.losses.objective import Objective, Selection, objective_of, share
from distill.modules import HeadModule
from distill.teacher.signals import TargetSignal, Teacher

STEPS, OPTIMISER_STEPS = 2, 10


@pytest.mark.parametrize(
    ("k", "n", "wanted"),
    [(0.4, 5, 2), (0.4, 6, 3), (0.1, 30, 3), (0.3, 10, 3), (1.0, 7, 7), (0.001, 3, 1), (0.4, 0, 0)],
)
def test_share_is_the_ceiling_of_k_times_n_despite_binary_fractions(k: float, n: int, wanted: int) -> None:
    assert share(k, n) == wanted


@pytest.mark.parametrize(
    ("delta", "k", "wanted"),
    [
        ([0.1, 0.9, -1.0, 0.5, 0.7], 0.6, [1, 3, 4]),
        ([0.0] * 10, 0.4, [0, 1, 2, 3]),  # of equal ones the first
        ([1.0, 2.0, 1.0, 2.0, 1.0], 0.6, [0, 1, 3]),
        ([], 0.4, []),
    ],
)
def test_the_largest_differences_are_chosen_in_ascending_order_of_place(
    delta: list[float], k: float, wanted: list[int]
) -> None:
    assert Selection(k).choose(torch.tensor(delta)).tolist() == wanted


def test_normalisations_by_hand() -> None:
    losses, delta = torch.tensor([4.0, 1.0, 3.0, 2.0, 5.0, 7.0]), torch.tensor([1.0, 0.0, 1.0, 0.0, 0.0, 1.0])

    def loss(selection: Selection) -> float:
        chosen = selection.choose(delta)
        return float(losses[chosen].sum() / selection.divisor(len(chosen), len(losses)))

    assert loss(Selection(0.5, normalisation="official")) == pytest.approx((4 + 3 + 7) / 6)
    assert loss(Selection(0.5, normalisation="paper")) == pytest.approx((4 + 3 + 7) / 3)
    for normalisation in ("paper", "official"):
        whole = Selection(1.0, normalisation=normalisation)  # type: ignore[arg-type]
        assert loss(whole) == pytest.approx(losses.mean().item())
        assert whole.divisor(0, 0) == 1


def test_the_official_quantile_selects_at_most_one_token_more_or_less() -> None:
    pairs = [(k / 20, n) for k in range(1, 20) for n in range(2, 65)]
    values = {n: torch.arange(n, dtype=torch.float64) for _, n in pairs}
    official = [int((values[n] >= torch.quantile(values[n], 1 - k)).sum()) for k, n in pairs]
    assert {abs(count - share(k, n)) for count, (k, n) in zip(official, pairs)} == {0, 1}


@pytest.mark.parametrize(("scope", "micros"), [("microbatch", 1), ("global", 1), ("global", 2)])
def test_the_paper_s_normalisation_divides_by_the_selected_rows_and_by_none_that_were_left_out(
    scope: Scope, micros: int
) -> None:
    """A head of 16 of 48 ids leaves out the rows whose most probable token it cannot draft."""
    target = in_double(build_tiny("llama", num_hidden_layers=4, vocab_size=48, seed=4, dtype=torch.float64)).eval()
    torch.manual_seed(0)
    head = FeatureHead(head_config(target.config, 3, draft_vocab=16)).double()
    head.set_vocabulary(torch.arange(16))
    generator = np.random.default_rng(0)
    texts = [generator.integers(0, 48, n) for n in (12, 7, 15, 9)]
    rows = TokenDataset.from_lists(texts, [np.where(np.arange(len(text)) < 3, -100, text) for text in texts])
    rows.signals["reference_loss"] = generator.random((rows.label_count, STEPS)).astype(np.float32)
    module = HeadModule(
        head,
        TrainingSettings(),
        1,
        settings=StudentSettings(kind="eagle3", unroll=STEPS),
        target=Teacher(target, TargetSignal("online"), head),
        objective=Objective(selection=Selection(0.5, scope, "paper")),
    )
    totals, chosen, found = torch.zeros(STEPS, dtype=torch.float64), [0] * STEPS, 0.0
    loader = TrainLoader(rows, Schedule(rows.lengths, 4, seed=1), 1, micros=micros, look_ahead=micros > 1)
    for batch in loader:
        found += module.training_step(batch, 0).item() / micros
        for number, (drafted, losses) in enumerate(module(batch)):
            assert losses.chosen is not None
            totals[number] += losses.total.item()
            chosen[number] += len(losses.chosen)
            assert len(drafted.hidden) < int((batch["labels"][:, 1:] != -100).sum())  # some are left out
    assert found == pytest.approx(sum(0.8**i * totals[i].item() / chosen[i] for i in range(STEPS)), rel=1e-6)


def objective(**settings: Any) -> Any:
    return objective_of(DraftSettings(name="variant", **settings), OPTIMISER_STEPS)


def test_a_reference_selects_its_share_of_tokens_and_no_reference_all() -> None:
    assert objective().selection is None
    assert objective(reference="other", k=1.0).selection is None
    plain = objective(reference="other", divergence="jsd")
    assert (plain.divergence, plain.selection) == (Divergence("jsd"), Selection(0.4, normalisation="paper"))


def test_the_loss_switches_after_the_share_of_forward_kl_and_the_ranking_does_not() -> None:
    switched = objective(divergence="tv", kl_first=0.3)
    names = [switched.divergence_at(step).name for step in range(OPTIMISER_STEPS)]
    assert names == ["forward_kl"] * 3 + ["tv"] * 7
    assert switched.divergence.name == "tv"
