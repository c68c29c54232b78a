"""The design command: costs and the acceptance they ask for, forecasts, rounds, and what is written."""

from __future__ import annotations

import io
import itertools
import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import yaml
from rich.console import Console
from tiny_run import run_tiny, tiny_settings
from transformers import LlamaConfig

from decode.bench.costs import CostMeter, CostModel
from decode.bench.offline_acceptance import OfflineAlpha
from decode.bench.prediction import predicted_speedup, replayed_speedup
from decode.commands.parsing import parse
from decode.drafters.prompt_lookup import LookupDrafter
from decode.errors import UserError
from decode.stopping import StopRule
from distill.config.run import Settings
from distill.data.context import StageContext
from distill.experiments.design.command import Design, design
from distill.experiments.design.design_page import Results
from distill.experiments.design.draft_shapes import Shape, default_shape, space
from distill.experiments.design.methods_without_training import draft_along
from distill.experiments.design.predicted_speedup import (
    BEND,
    Forecast,
    Slope,
    common_slope,
    forecast,
    own_slope,
    replayed,
    slope_of,
)
from distill.experiments.design.settings import DesignRunSettings, DesignSettings
from distill.experiments.design.shape_costs import CALM, Price
from distill.experiments.design.shape_table import Entry
from distill.experiments.design.successive_halving import FIXED, Clock, Race
from distill.experiments.design.training_trials import Trial
from distill.experiments.design.verify_predictions import rank_correlation
from distill.pipeline import run_of

PRICE = Price(CostModel(0.1, {1: 1.0, 4: 1.2, 8: 1.6, 16: 2.4}, overhead=0.05, draft_overhead=0.02, step_overhead=0.1))


def alpha_of(mean: float, se_of: int = 40) -> OfflineAlpha:
    """Texts whose acceptances have this mean."""
    generator = np.random.default_rng(0)
    wiggle = generator.normal(0, 0.01, se_of)
    return OfflineAlpha([[float(np.clip(mean + x - wiggle.mean(), 0, 1))] * 5 for x in wiggle])


def test_bookkeeping_counts_in_the_plain_step_too() -> None:
    """A speedup is over plain steps, which have bookkeeping of their own."""
    assert PRICE.c == pytest.approx(0.12 / 1.1)
    assert PRICE.v(4) == pytest.approx((1.2 + 0.1 + 0.05) / 1.1)
    assert PRICE.speedup(0.8, 3) == pytest.approx(
        predicted_speedup(0.8, 3, 0.12, lambda n: PRICE.cost.v(n) + 0.1, 0.05) * 1.1
    )


def test_the_acceptance_needed_is_where_the_best_length_reaches_the_speedup() -> None:
    needed = PRICE.needed(1.5, 15)
    assert needed is not None
    assert PRICE.best(needed, 15) == pytest.approx(1.5, abs=2e-3)
    assert PRICE.best(needed - 1e-3, 15) < 1.5
    assert PRICE.needed(50.0, 15) is None


def test_costs_do_not_follow_a_machine_that_other_work_slows_down_now_and_then() -> None:
    """Half of the target's forwards and a third of the draft's were interrupted."""
    meter = CostMeter.__new__(CostMeter)
    meter.plain, meter.drafting, meter.verifying = [1.0, 1.0, 5.0, 9.0], [0.1, 0.1, 0.8], {4: [1.5, 1.5, 1.5, 7.0]}
    meter.context, meter.batch = 64, 1
    found = meter.cost(CALM)
    assert found.cost_ratio == pytest.approx(0.1)
    assert found.verify_cost == {1: 1.0, 4: pytest.approx(1.5)}


def test_a_replay_with_one_depth_is_that_of_the_cost_model() -> None:
    generator = np.random.default_rng(1)
    texts = [generator.random(n).tolist() for n in (1, 2, 7, 23)]
    plain = Price(CostModel(0.1, {1: 1.0, 4: 1.2, 8: 1.6, 16: 2.4}))
    for length in (1, 3, 10):
        wanted = replayed_speedup(texts, length, 0.1, plain.cost.v)
        assert replayed([OfflineAlpha(texts)], length, plain) == pytest.approx(wanted)


def test_deeper_tokens_have_their_own_acceptance() -> None:
    """A head that never gets a second token right gains from drafts of one token alone."""
    plain = Price(CostModel(0.0, {1: 1.0}))
    first, never = OfflineAlpha([[1.0] * 12]), OfflineAlpha([[0.0] * 12])
    assert replayed([first, never], 1, plain) == pytest.approx(2.0)
    assert replayed([first, never], 5, plain) == pytest.approx(2.0)
    assert replayed([first], 5, plain) == pytest.approx(6.0)


def test_a_curve_that_follows_the_law_is_carried_on_exactly() -> None:
    curves = [{n: alpha_of(1 - a * n**-0.5) for n in (100, 200)} for a in (2.0, 3.0, 4.0)]
    common = common_slope(curves)
    assert common.b == pytest.approx(0.5, abs=1e-6)
    found = forecast([curves[0][200]], 200, 800, slope_of(curves[0], common), PRICE, 15)
    assert found.alpha == pytest.approx(1 - 2.0 * 800**-0.5, abs=1e-3)
    assert found.low < found.alpha < found.high
    assert found.speedup_low < found.speedup < found.speedup_high
    assert own_slope({100: alpha_of(0.5)}) is None


def test_a_single_curve_leans_on_what_the_others_did() -> None:
    noisy = {100: alpha_of(0.5), 200: alpha_of(0.9)}
    alone = own_slope(noisy)
    assert alone is not None
    between = slope_of(noisy, Slope(0.3, 0.01))
    assert 0.3 < between.b < alone.b
    assert BEND < between.sd < math.hypot(0.01, BEND)


def test_a_forecast_is_less_certain_than_the_law_is_known() -> None:
    slope = slope_of({100: alpha_of(0.2), 200: alpha_of(0.25)}, Slope(0.1, 0.001))
    found = forecast([alpha_of(0.25)], 200, 1600, slope, PRICE, 15)
    bent = 1 - 0.75 * 8 ** -(slope.b + BEND)  # where the exponent grows by one standard deviation
    assert found.alpha < bent < found.high


def test_retrieval_goes_along_a_text_as_decoding_would() -> None:
    text = [1, 2, 3, 4, 1, 2, 3, 4, 1, 2, 9]
    rounds = draft_along(LookupDrafter(length=3), StopRule(10), [(text, 5)])
    assert sum(rounds.accepted) + len(rounds.accepted) == len(text) - 5
    assert rounds.drafted[0] == 3
    assert rounds.accepted[0] == 3


def test_the_space_has_the_configured_shape_first_and_thirty_more(tmp_path: Path) -> None:
    settings = tiny_settings(tmp_path)
    config = LlamaConfig(hidden_size=128, num_hidden_layers=8, num_attention_heads=4, vocab_size=900)
    found = space(settings, DesignSettings(), config)
    assert found[0] == default_shape(settings, 8)
    assert len(found) == len({shape.name for shape in found}) == len({shape.slug for shape in found}) > 30
    assert {shape.family for shape in found} == {"model", "cut", "eagle", "eagle3", "exit", "lookup", "rest"}
    with pytest.raises(UserError, match=r"design\.exits has 9 and the target 8 layers"):
        space(settings, DesignSettings(exits=[9]), config)


def test_a_shape_becomes_settings_that_build_it(tmp_path: Path) -> None:
    settings = tiny_settings(tmp_path)
    own = Shape("model", 2, 48, 96, own=True).settings(settings)
    assert own.initial.architecture.tie_embeddings is False
    assert own.initial.architecture.heads == 6
    cut = Shape("cut", kept=(0, 2)).settings(settings)
    assert (cut.initial.kind, cut.initial.layers, cut.initial.trained) == ("cut", [0, 2], False)
    head = Shape("eagle3", vocab=100).settings(settings)
    assert (head.eagle.kind, head.eagle.draft_vocab) == ("eagle3", 100)


@pytest.mark.parametrize("budget", ["30", "10 weeks", "m", "0m", "-3m"])
def test_a_budget_needs_a_number_and_a_unit(budget: str) -> None:
    with pytest.raises(UserError, match="expected a number and a unit: s, m or h"):
        DesignSettings(budget=budget).validate()


def test_a_budget_is_read_in_its_unit() -> None:
    assert [DesignSettings(budget=text).seconds for text in ("90s", "1.5m", "2 h")] == [90, 90, 7200]


def small(folder: Path, **changes: Any) -> DesignRunSettings:
    """A design over a few shapes of a tiny run."""
    settings = tiny_settings(folder, comparisons=[])
    settings.evaluation.max_new_tokens, settings.evaluation.decode_prompts = 8, 2
    settings.evaluation.temperatures = [0.0]
    own = DesignSettings(
        budget="30m", layers=[1], widths=[16], mlp=[2.0], first=[1], spread=[1], heads=["eagle3"],
        draft_vocabs=[60], exits=[1], texts=4, least_steps=3, longest=4,
    )  # fmt: skip
    return DesignRunSettings(**vars(settings), design=replace(own, **changes))


def run_design(settings: DesignRunSettings) -> tuple[dict[str, Any], str, Path]:
    """design.json, what was printed, and the folder."""
    text = io.StringIO()
    folder = design(settings, Console(file=text, width=200))
    return json.loads((folder / "design.json").read_text()), text.getvalue(), folder


def given_costs(folder: Path, settings: DesignRunSettings) -> str:
    """A file of costs, so that which shapes are trained does not hang on the machine's load."""
    text = LlamaConfig(hidden_size=24, num_hidden_layers=2, num_attention_heads=2, vocab_size=300)
    prices = {
        shape.name: Price(
            replace(PRICE.cost, cost_ratio=0.5 if shape.family == "exit" else 0.02, target_seconds=1e-3), 1000
        ).row()
        for shape in space(settings, settings.design, text)
    }
    path = folder / "costs.json"
    path.write_text(json.dumps({"prices": prices}))
    return str(path)


@pytest.fixture(scope="module")
def designed(tmp_path_factory: pytest.TempPathFactory) -> tuple[DesignRunSettings, dict[str, Any], Path]:
    """A finished design whose shapes can all win."""
    folder = tmp_path_factory.mktemp("design")
    settings = small(folder, ceiling=0.9999, longest=15)
    settings.design.costs = given_costs(folder, settings)
    found, _, out = run_design(settings)
    return settings, found, out


Designed = tuple[DesignRunSettings, dict[str, Any], Path]


def test_a_design_trains_the_better_ones_longer_and_writes_what_it_found(designed: Designed) -> None:
    _, found, out = designed
    assert {shape["family"] for shape in found["shapes"]} == {"model", "cut", "eagle3", "exit", "lookup", "rest"}
    trained = {shape["name"]: shape for shape in found["shapes"] if shape["history"]}
    assert {shape["family"] for shape in trained.values()} == {"model", "cut", "eagle3"}
    once, longest = ([s for s in trained.values() if len(s["history"]) == n] for n in (1, len(found["rounds"])))
    assert len(found["rounds"]) > 1
    assert once
    assert found["winner"] in trained
    assert found["configured"] in {shape["name"] for shape in longest}
    steps = [n for n, _, _ in trained[found["winner"]]["history"]]
    assert all(b == min(2 * a, found["full_steps"]) for a, b in itertools.pairwise(steps))
    page = (out / "design.html").read_text()
    for words in ("Cost against acceptance", "Pareto front", "All shapes", found["configured"]):
        assert words in page


def test_the_winner_s_configuration_is_one_that_the_training_command_reads(designed: Designed) -> None:
    _, _, out = designed
    path = out / "winner.yaml"
    settings = parse(Settings, ["--config", str(path)], prog="distill")
    settings.validate()
    assert settings.name == "tiny-designed"
    assert "design" not in yaml.safe_load(path.read_text())
    ran, run, printed = run_tiny(settings)
    assert "draft" in ran
    assert "the same one is in" in printed
    assert run.record("draft") is not None


def test_a_design_that_is_run_again_reads_what_is_there(designed: Designed) -> None:
    settings, found, out = designed
    files = {path: path.stat().st_mtime_ns for path in (out / "work" / "trials").iterdir()}
    again, _, _ = run_design(settings)
    assert [shape["history"] for shape in again["shapes"]] == [shape["history"] for shape in found["shapes"]]
    assert again["winner"] == found["winner"]
    assert {path: path.stat().st_mtime_ns for path in (out / "work" / "trials").iterdir()} == files


def test_a_short_trial_has_the_signals_of_the_examples_that_it_reads_and_no_more(designed: Designed) -> None:
    settings, _, _ = designed
    full = Settings(**{name: getattr(settings, name) for name in Settings.__dataclass_fields__})
    signals = Design(StageContext(full, run_of(full), Console(quiet=True)), settings).trials.signals
    head, own = Shape("eagle3", vocab=60), default_shape(full, 2)
    whole = len(signals.base.examples)
    assert [len(signals.of(head, signals.context(head.settings(full), head), count).train) for count in (2, 1, 3)] == [
        2,
        2,
        3,
    ]
    assert len(signals.of(own, signals.context(full, own), 2).train) == whole  # the run itself will want them
    batch = full.reference.training.batch_size
    assert [signals.examples_of(n) for n in (1, 10 * whole)] == [batch, whole]
    assert signals.seconds([own], 10 * whole) == 0
    assert signals.seconds([head, head, own], 10 * whole) == signals.seconds([head], 10 * whole) > 0


def test_a_budget_too_small_for_one_round_names_the_time_that_is_needed(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"design.budget is 1s, and one round needs about"):
        run_design(small(tmp_path, budget="1s", ceiling=0.9999))


def test_a_budget_takes_the_shapes_it_has_time_for_and_the_same_ones_when_it_is_continued(tmp_path: Path) -> None:
    signals = SimpleNamespace(seconds=lambda shapes, steps: 0.0)
    trained: set[str] = set()
    trials: Any = SimpleNamespace(
        step_seconds=lambda shape: 1.0,
        full_steps=40,
        signals=signals,
        find=lambda shape, steps: object() if shape.name in trained and steps == 5 else None,
    )
    text = io.StringIO()

    def plan(budget: float) -> tuple[list[str], int, list[str]]:
        entries = [Entry(Shape("model", 1, 16 * n, 16), PRICE, at_ceiling=9.0 - n) for n in range(1, 9)]
        own = DesignSettings(least_steps=5)
        clock = Clock(tmp_path / "spent.json", "", budget)
        race = Race(trials, entries, entries[0].shape, own, 4, clock, tmp_path, Console(file=text, width=200))
        taken, steps = race._plan(entries)
        left = [entry.shape.name for entry in entries if entry.status == "not reached"]
        return [entry.shape.name for entry in taken], steps, left

    first, steps, left = plan(82.0)  # a round of n shapes takes n · (5 · 1 s + FIXED)
    assert len(first) == 80 / 2 / (5 * 1.0 + FIXED) == 5
    assert len(left) == 3
    assert "there is time for 5 shapes; the other 3" in text.getvalue()
    (tmp_path / "spent.json").write_text('{"made_from": "", "seconds": 60}')
    assert plan(82.0) == (first, steps, left)
    assert plan(61.0 + 2 * 3 * 8.0) == (first, steps, left)
    trained.update(first)  # and take no more of the budget
    assert plan(62.0 + 2 * 3 * 8.0) == ([*first, *left], steps, [])


def test_longer_trials_of_a_smaller_budget_count_in_the_last_ranking(tmp_path: Path) -> None:
    known = {("a", 10): 0.5, ("a", 20): 0.6, ("a", 40): 0.7, ("b", 10): 0.4, ("b", 40): 0.9}
    shapes = {Shape("model", 1, 16, 16): "a", Shape("model", 1, 32, 16): "b", Shape("model", 1, 48, 16): "c"}

    def find(shape: Shape, steps: int) -> Trial | None:
        mean = known.get((shapes[shape], steps))
        return None if mean is None else Trial(shape.name, steps, 8, 1.0, 1.0, [alpha_of(mean)])

    trials: Any = SimpleNamespace(full_steps=60, find=find)
    entries = [Entry(shape, PRICE) for shape in shapes]
    clock, console = Clock(tmp_path / "spent.json", "", 60.0), Console(quiet=True)
    race = Race(trials, entries, entries[0].shape, DesignSettings(), 4, clock, tmp_path, console)
    for entry in entries[:2]:
        trial = find(entry.shape, 10)
        assert trial is not None
        race._know(entry, trial)
    race._recall()
    assert [[n for n, _, _ in entry.history] for entry in entries] == [[10, 20, 40], [10], []]
    assert entries[0].alpha == pytest.approx(0.7)
    assert entries[0].full is not None
    assert entries[0].full.alpha > 0.7
    assert entries[2].full is None


@pytest.mark.parametrize(
    ("other", "told"),
    [
        (1.1, "It is the configuration's own shape: none of 1 others is predicted to be faster."),
        (1.25, "predicted to be faster (1.25; 95 %: 1.00 to 1.40), but none of 1 others by 10 % or more."),
        (1.5, "after 10 steps instead of 40, 1 × 32, MLP 16 is predicted to be faster (1.50; 95 %: 1.00 to 1.40)."),
    ],
)
def test_a_better_guess_from_fewer_steps_is_told_beside_the_winner(other: float, told: str) -> None:
    def entry(width: int, steps: int, speedup: float) -> Entry:
        full = Forecast(0.5, 0.4, 0.6, speedup, 1.0, 1.4, 2)
        return Entry(Shape("model", 1, width, 16), PRICE, status="left", steps=steps, full=full)

    entries = [entry(16, 40, 1.2), entry(32, 10, other)]
    results = Results("", entries, entries[0].shape, entries[0], 80, 4, 1.0, 1.0, {}, "")
    assert results.verdict().endswith(told)


def test_costs_alone_train_nothing_and_are_measured_for_every_shape(tmp_path: Path) -> None:
    found, printed, out = run_design(small(tmp_path, costs_only=True))
    assert not any(shape["history"] for shape in found["shapes"])
    assert found["winner"] is None
    assert "round 1" not in printed
    prices = json.loads((out / "work" / "costs.json").read_text())["prices"]
    assert all(row["cost_ratio"] > 0 for name, row in prices.items() if "EAGLE" in name or "×" in name)
    assert set(prices) == {shape["name"] for shape in found["shapes"]}


def test_rank_correlation_is_of_ranks() -> None:
    assert rank_correlation([1, 2, 3], [10, 20, 1000]) == pytest.approx(1)
    assert rank_correlation([1, 2, 3], [3, 2, 1]) == pytest.approx(-1)
    assert rank_correlation([1, 2], [3, 2]) is None


def test_the_winner_and_losers_are_trained_in_full_and_measured_beside_the_prediction(designed: Designed) -> None:
    settings, found, out = designed
    again, printed, _ = run_design(replace(settings, design=replace(settings.design, verify=True)))
    rows = again["verified"]
    assert len(rows) == 3
    assert rows[0]["name"] == found["winner"]
    assert found["configured"] in {row["name"] for row in rows}
    assert all(row["identical_to_target"] for row in rows)
    assert all(row["speedup"] > 0 and row["predicted"] > 0 for row in rows)
    known = {shape["name"]: shape for shape in found["shapes"]}
    for row in rows:  # a trial of the full length is the full training
        if known[row["name"]]["steps"] == found["full_steps"]:
            assert row["alpha_measured"] == pytest.approx(known[row["name"]]["alpha"], abs=1e-4)
    assert "Predicted and measured" in (out / "design.html").read_text()
    assert "Predicted and measured" in printed


def test_a_shape_without_costs_is_left_out_and_the_configured_one_is_refused(tmp_path: Path) -> None:
    settings = small(tmp_path, costs_only=True)
    _, _, out = run_design(settings)
    prices = json.loads((out / "work" / "costs.json").read_text())["prices"]
    own = default_shape(settings, 2).name
    other = next(name for name in prices if "×" in name and name != own)
    for missing in (other, own):
        (tmp_path / "costs.json").write_text(json.dumps({"prices": {n: p for n, p in prices.items() if n != missing}}))
        given = replace(settings, design=replace(settings.design, costs=str(tmp_path / "costs.json"), costs_only=False))
        if missing == own:
            with pytest.raises(UserError, match="configuration's own shape, has no costs"):
                run_design(given)
        else:
            found, _, _ = run_design(given)
            assert {shape["name"]: shape["status"] for shape in found["shapes"]}[missing] == "pruned"


def test_a_width_that_no_even_heads_divide_is_refused(tmp_path: Path) -> None:
    config = LlamaConfig(hidden_size=128, num_hidden_layers=8, num_attention_heads=4, vocab_size=900)
    with pytest.raises(UserError, match=r"design\.widths has 33: wanted even"):
        space(tiny_settings(tmp_path), DesignSettings(widths=[32, 33]), config)
