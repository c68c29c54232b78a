"""Which drafts are timed, at which lengths, and the acceptance of texts that are read together."""

from types import SimpleNamespace

import pytest
import torch
from families import resembling
from heads import make_head
from plain_logits import head_logits, offline_alpha, response_logits
from tiny_run import begun, bench, run_tiny, tiny_settings

from decode.core.lengths import RoundCosts
from decode.core.sampling import LogitsWarper
from decode.core.verify import overlap
from decode.engines.check import serving_facts
from decode.files import read_json
from decode.measure.acceptance import OfflineAlpha
from distill.config import DraftSettings, EvaluationSettings, Settings
from distill.pipeline import measure
from distill.results.evaluate import Evaluation, acceptance
from distill.results.report import draft_rows
from distill.run import Run


def test_every_predicted_speedup_of_a_run_follows_from_its_report(tmp_path) -> None:
    """Tokens over the seconds of real rounds, with the costs in the report."""
    settings = tiny_settings(tmp_path, threads=2)
    settings.evaluation = EvaluationSettings(prompts=3, accuracy_prompts=3, max_new_tokens=12, draft_lengths=[2])
    run_tiny(begun(settings))
    run = bench(settings)[0]
    report = measure(run)
    assert report["machine"]["threads"] == 2
    drafting = [row for row in report["decoding"] if row["method"] == "vanilla"]
    assert {row["temperature"] for row in drafting} == {0.0, 1.0}
    for row in drafting:
        costs = RoundCosts.from_dict(report["analysis"]["costs"][row["draft"]]["round_costs"])
        spent = sum(n * costs.round(1, int(k)) for k, n in row["draft_lengths"].items())
        read = row["prompt_rounds"]
        expected = (row["tokens"] + read) / (spent / costs.round(1, 0) + read)
        assert row["predicted_speedup"] == pytest.approx(expected)
    best = {row["draft_length"] for row in drafting if row["draft"] == run.chosen("best")}
    assert 2 in best  # which is asked for, beside the best one
    # what serve-check compares with
    name = report["profile"]["draft"]
    over = [(row["temperature"], row["draft"], row["speedup_vs_exported"]) for row in drafting]
    assert {(t, ratio) for t, draft, ratio in over if draft == name and ratio == 1} == {(0.0, 1.0), (1.0, 1.0)}
    assert all(ratio > 0 for *_, ratio in over)
    others = {row["name"] for row in report["drafts"]} - {name}  # the student before distillation too
    assert "undistilled" in others
    assert others <= {pair["b"] for pair in report["paired"] if pair["a"] == name}
    assert {row["name"] for row in draft_rows(report) if row.get("significance")} == others
    profile = read_json(run.export / "speculation_profile.json")
    assert profile["acceptance"] == report["analysis"]["acceptance"][name]
    (offline,) = (row["offline_alpha_greedy"] for row in report["drafts"] if row["name"] == name)
    first, *later = profile["acceptance"]
    assert (first["offline"], first["validation"]) == (offline, run.best(name)[0]["agreement"])
    assert all(row["offline"] == offline for row in later)
    trained = serving_facts(run.load_target(), run.target, run.tokenizer, chat=False)
    assert profile["trained_with"] == report["trained_with"] == trained


@pytest.mark.parametrize(("start", "kept"), [("undistilled", 1), ("untrained", 2)])
def test_acceptance_by_position_is_that_of_the_weights_that_were_kept(start: str, kept: int) -> None:
    """Language models are kept by α, heads by accepted length."""
    evaluation, run = Evaluation.__new__(Evaluation), Run(Settings(drafts=[DraftSettings(name="head")]))
    values = [(0.5, 0.6, 0.5, 1.9), (0.7, 0.8, 0.6, 2.0), (0.6, 0.9, 0.8, 2.1)]
    history = [dict(zip(("alpha", "agreement", "agreement_2", "accepted_length"), value)) for value in values]
    evaluation.run, run.start = run, start
    run.draft_record = lambda name: SimpleNamespace(history=history)
    assert run.best("head")[0] == history[kept]
    decoded = {"head": [{"conditional": share} for share in (0.7, 0.4, 0.3)]}
    made = evaluation._acceptance({"head": [OfflineAlpha([[0.75]]), OfflineAlpha([[0.5]])]}, decoded)["head"]
    rows = [(row["position"], row["validation"], row["offline"], row["decoded"]) for row in made]
    assert rows == [(1, values[kept][1], 0.75, 0.7), (2, values[kept][2], 0.5, 0.4), (3, None, 0.5, 0.3)]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_acceptance_on_texts_read_together_is_that_of_each_text(temperature: float, tiny) -> None:
    target = tiny("llama")
    drafts = {"model": resembling(target, 0.2), "head": make_head(target, 3)}
    texts = [([3, 7, 1, 9, 12, 40, 2, 5], 4), ([5, 6], 2), ([9, 9, 4] * 6, 11), ([8] * 30, 3)]
    measured = acceptance(target, drafts, texts, temperature)
    warp = LogitsWarper(temperature)
    assert {name: len(by_depth) for name, by_depth in measured.items()} == {"model": 1, "head": 5}
    for name, draft in drafts.items():
        alone = offline_alpha(target, draft, texts, warp)
        for seen, wanted in zip(measured[name][0].texts, alone.texts, strict=True):
            assert seen == pytest.approx(wanted, abs=1e-4)
        assert measured[name][0].se == pytest.approx(alone.se, abs=1e-4)
    with torch.no_grad():
        p, q = response_logits(target, *texts[3]), head_logits(drafts["head"], target, *texts[3], 5)
    assert measured["head"][4].texts[2] == pytest.approx(overlap(warp(p), warp(q)).tolist(), abs=1e-4)
