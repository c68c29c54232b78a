"""The report: parts, plain numbers, the exported draft's row; which drafts are timed."""

import io
import json
import re
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from rich.console import Console
from run_report import FULL, changed, decoding, draft, pair
from tiny_run import begun, bench, run_tiny, tiny_settings

from decode.engines.check import serving_facts
from decode.files import read_json
from distill.config import DraftSettings, EvaluationSettings, Settings
from distill.config.models import StudentSettings
from distill.export.card import export_profile
from distill.pipeline import measure
from distill.results.evaluate import by_position
from distill.results.report import console_tables, draft_rows, opening, write_report
from distill.results.tracking import numbers_of
from distill.run import Run


def written(tmp_path, report) -> str:
    """The text of the page."""
    write_report(tmp_path, report)
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    body = re.sub(r"<style>.*?</style>", "", page, flags=re.S)
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", "", body))


def test_the_opening_has_the_exported_draft_at_its_recommended_length() -> None:
    text, cards = opening(FULL)
    assert [value for value, _ in cards] == ["adaspec", "4.20", "1.62 (1.57–1.67)", "3.89"]
    same = "Its texts are the target's, token by token."
    assert text.endswith(f"Measured: greedy, 2 tokens drafted per round. {same}")
    rows = [*FULL["decoding"], decoding("distillspec", 0.0, 8, 2.5, recommended=False)]
    assert opening(changed(decoding=rows)) == opening(FULL)  # another draft
    other = opening(changed(decoding=rows, profile={**FULL["profile"], "draft": "distillspec"}))[1]
    assert [value for value, _ in other][::2] == ["distillspec", "1.50 (1.45–1.55)"]
    worse = decoding("adaspec", 0.0, 8, 2.5, same=False)
    assert opening(changed(decoding=[worse]))[0].endswith("Its texts differ from the target's.")


def test_a_full_report_has_every_part_and_the_served_acceptance_beside_the_trained_one(tmp_path) -> None:
    known = [{"position": 1, "validation": 0.91, "offline": 0.82, "decoded": 0.83}, {"position": 2, "offline": 0.64}]
    (tmp_path / "export").mkdir()
    rows = [{"temperature": t, "positions": [{"position": 1, "served": at}]} for t, at in ((1.0, 0.1), (0.0, 0.37))]
    profile = {"served": [{"engine": "vllm", "rows": rows}]}
    (tmp_path / "export" / "speculation_profile.json").write_text(json.dumps(profile))
    page = written(tmp_path, changed(drafts=[*FULL["drafts"][:2], FULL["drafts"][2] | {"acceptance": known}]))
    for part in (
        "Training", "Account of the training", "Learning curves", "Speedup over no draft", "Machine and settings",
        "vLLM", "SGLang", "assistant_model=draft", "Some CPU", "draftsmith distill --config", "Definitions",
        "0.9480 ± 0.0010", "81,472", "-0.0019 ± 0.0004***",
        "--speculative-num-steps 3",  # of the export, whatever was fastest
        f"-md {tmp_path}/export/gguf/draft-q8_0.gguf", "10.9100.8200.8300.370 2–0.640––",
    ):  # fmt: skip
        assert part in page
    first = page.split("Account of the training")[0]
    assert "4.20 tokens per target forward" in first
    assert "Its texts are the target" in first


def test_a_draft_stands_in_one_row_with_its_recommended_length_and_its_difference_to_the_exported_one() -> None:
    names = {"a": 0.0009 / 4, "b": 0.009 / 4, "c": 0.049 / 4, "d": 0.05 / 4}  # four comparisons
    pairs = [pair("adaspec", name, 0.01, p) for name, p in names.items()]
    drafts = [draft("adaspec", 0.95), *(draft(name, 0.94) for name in names), draft("unpaired", 0.9)]
    rows = [*FULL["decoding"], decoding("a", 0.0, 3, 1.2), decoding("a", 0.0, 4, 1.3, recommended=False)]
    report = changed(drafts=drafts, paired=pairs, decoding=rows)
    best, a, *rest = draft_rows(report)
    assert (best["difference"], best["draft_length"], best["optimiser_steps"]) == ("exported", 2, 1500)
    assert (a["difference"], a["se"], a["name"], a["speedup"]) == (-0.01, 0.0004, "a", 1.2)
    assert [row.get("significance") for row in (best, a, *rest)] == [None, "***", "**", "*", "n.s.", None]
    assert not {"speedup", "difference"} & rest[-1].keys()
    console = Console(file=io.StringIO(), width=130)
    console.print(console_tables(report))
    assert "-0.0100 ± 0.0004  ***" in console.file.getvalue()


def test_the_speed_beside_the_exported_drafts_stands_with_its_interval() -> None:
    ends = {"undistilled": [0.5, 0.7], "distillspec": [0.93, 1.02], "adaspec": [1.0, 1.0]}
    rows = [
        decoding(name, 0.0, 2, 1.6) | {"prompts": 24, "speedup_vs_exported": 0.98, "speedup_vs_exported_ci95": interval}
        for name, interval in ends.items()
    ]
    console = Console(file=io.StringIO(), width=160)
    console.print(console_tables(changed(decoding=rows)))
    assert "0.98 (0.93–1.02)" in console.file.getvalue()
    assert "(1.00–1.00)" not in console.file.getvalue()


@pytest.mark.parametrize(("change", "why"), [
    ({"cpu_share": 0.94}, "over 5% of the time); measure again"),
    ({"accepted_length": 1.02}, "above the accepted length"), ({"least_cost": 0.26}, "v(n) is below 1"),
    ({"prompts": 2}, "fewer than 6 prompts were timed; time more"),
])  # fmt: skip
def test_a_speedup_that_is_no_result_stands_in_no_sentence_of_page_console_and_card(tmp_path, change, why) -> None:
    report = changed(decoding=[row | change for row in FULL["decoding"]])
    text, cards = opening(report)
    assert "Its speedup is not reliable." in text
    assert len(cards) == 2  # the draft's name, and the accepted length
    page = written(tmp_path, report)
    assert page.count(why) == 1
    assert "Speedup over no draft" not in page
    first, rest = page.split("Offline α is", 1)
    assert "1.62" not in first
    assert "1.62 ?" in rest
    text = io.StringIO()
    Console(file=text, width=999).print(console_tables(report))
    assert text.getvalue().count(why) == 1
    measured = export_profile(report, "adaspec")
    assert why in measured["doubt"]
    assert not [key for key in measured if "speedup" in key]
    logged = numbers_of(report)
    assert "accepted_length" in logged
    assert "speedup" not in logged


def test_what_was_not_measured_is_left_out_and_the_json_is_strict(tmp_path) -> None:
    page = written(tmp_path, changed(paired=[], drafts=FULL["drafts"][:2], exported=None))
    for part in ("-0.0019", "Learning curves", "Samples", "The export is in"):
        assert part not in page
    unmeasured = {**draft("undistilled", None), "offline_alpha_se": None}
    assert "was not measured" in written(tmp_path, changed(decoding=[], drafts=[unmeasured]))
    report = changed(
        target={"parameters": np.int64(5), "accuracy": float("nan")},
        profile={
            "draft": "adaspec",
            "cost_ratio": torch.tensor(0.25),
            "costs": np.array([1.0, np.inf]),
            "folder": tmp_path,
        },
    )
    write_report(tmp_path, report)
    data = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"), parse_constant=int)  # NaN is no integer
    assert data["target"] == {"parameters": 5, "accuracy": None}
    plain = {"draft": "adaspec", "cost_ratio": 0.25, "costs": [1.0, None], "folder": str(tmp_path)}
    assert data["profile"] == plain


# -- what is measured --------------------------------------------------------------------------------------------------


def test_every_draft_is_decoded_at_every_length_beside_the_exported_one(tmp_path) -> None:
    settings = tiny_settings(tmp_path, threads=1)
    few = {"prompts": 3, "accuracy_prompts": 3, "decode_prompts": 4, "max_new_tokens": 12}
    settings.evaluation = EvaluationSettings(**few, draft_lengths=[2, 4])
    run_tiny(begun(settings))
    torch.set_num_threads(2)  # another number than is set
    run = bench(settings)[0]
    report = measure(run)
    assert report["machine"]["threads"] == 1
    drafting = [row for row in report["decoding"] if row["method"] == "vanilla"]
    assert {(row["draft"], row["temperature"], row["draft_length"]) for row in drafting} == set(
        product(run.drafts, (0.0, 1.0), (2, 4))
    )
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
    (row,) = (row for row in report["drafts"] if row["name"] == name)
    assert profile["measured"]["acceptance"] == row["acceptance"]
    offline = row["offline_alpha_greedy"]
    first, *later = row["acceptance"]
    assert (first["offline"], first["validation"]) == (offline, run.best(name)[0]["agreement"])
    assert {row["offline"] for row in later} == {None}  # as many as the fastest length has
    trained = serving_facts(run.load_target(), run.target, run.tokenizer, chat=False)
    assert profile["trained_with"] == report["trained_with"] == trained


@pytest.mark.parametrize(("kind", "kept"), [("scratch", 2), ("eagle3", 3)])
def test_acceptance_by_position_is_that_of_the_weights_that_were_kept(kind: str, kept: int) -> None:
    """Language models are kept by α, heads by accepted length, and never those from before the training."""
    run = Run(Settings(drafts={"head": DraftSettings()}, student=StudentSettings(kind=kind)))
    names = "step", "alpha", "agreement", "agreement_2", "accepted_length"
    values = [(0, 0.8, 0.7, 0.6, 2.2), (1, 0.5, 0.6, 0.5, 1.9), (2, 0.7, 0.8, 0.6, 2.0), (3, 0.6, 0.9, 0.8, 2.1)]
    history = [dict(zip(names, value)) for value in values]
    run.draft_record = lambda name: SimpleNamespace(history=history)
    assert run.best("head")[0] == history[kept]
    made = by_position([0.75, 0.5], run.best("head")[0], [{"conditional": share} for share in (0.7, 0.4, 0.3)])
    rows = [(row["position"], row["validation"], row["offline"], row["decoded"]) for row in made]
    assert rows == [(1, values[kept][2], 0.75, 0.7), (2, values[kept][3], 0.5, 0.4), (3, None, None, 0.3)]
