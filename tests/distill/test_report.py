"""The report: required parts, plain numbers, the row that stands for the exported draft."""

import copy
import io
import json
import re

import numpy as np
import torch
from rich.console import Console

from distill.report import console_tables, draft_rows, figures, opening, write_report


def decoding(draft, temperature, length, speedup, same=True):
    return {
        "draft": draft, "temperature": temperature, "draft_length": length, "tokens_per_second": 594.0 * speedup,
        "speedup": speedup, "speedup_ci95": [speedup - 0.05, speedup + 0.05], "speedup_vs_generate": 2.4 * speedup,
        "speedup_vs_generate_ci95": [3.7, 4.1],
        "predicted_speedup": speedup * 1.05, "accepted_length": 4.2, "alpha": 0.94, "accepted_per_drafted": 0.7,
        "identical_to_target": same,
    }  # fmt: skip


def draft(name, alpha):
    return {
        "name": name, "parameters": 81_472, "offline_alpha": alpha, "offline_alpha_se": 0.001,
        "optimiser_steps": 1500, "examples": 48_000, "teacher_tokens": 2_900_000, "selected_tokens": 1_160_000,
    }  # fmt: skip


def pair(a, b, difference, p_value, label="T = 1; equal steps"):
    return {"a": a, "b": b, "label": label, "difference": difference, "se": 0.0004, "p_value": p_value, "n": 200}


POSITIONS = [
    {"position": 1, "tested": 100, "conditional": 0.9, "marginal": 0.9},
    {"position": 2, "tested": 80, "conditional": 0.75, "marginal": 0.6},
]
FULL = {
    "name": "quickstart",
    "created": "2025-11-21 09:40 UTC",
    "machine": {"cpu": "Some CPU", "cores": 2},
    "settings": {"seed": 7, "data": {"source": "arithmetic"}},
    "target": {"parameters": 1_938_432, "accuracy": 0.64, "accuracy_n": 400},
    "drafts": [draft("undistilled", 0.8751), draft("distillspec", 0.9461), draft("adaspec", 0.9480)],
    "paired": [pair("adaspec", "distillspec", 0.0019, 2e-6), pair("adaspec", "distillspec", 0.5, 0.9, "greedy")],
    "decoding": [
        {**decoding("autoregressive", 0.0, None, 1.0), "speedup_ci95": None, "alpha": None},
        decoding("distillspec", 0.0, 4, 1.50),
        decoding("adaspec", 0.0, 4, 1.55),
        decoding("adaspec", 0.0, 6, 1.62),
        decoding("adaspec", 1.0, 4, 1.40, same=None),
    ],
    "profile": {"cost_ratio": 0.14, "verify_cost": [1, 1.1, 1.3], "best_draft_length": 6, "break_even_alpha": 0.41},
    "analysis": {
        "acceptance_by_position": {"adaspec": POSITIONS},
        "curves": {"adaspec": [[0, 0.87], [100, 0.94]]},
    },
    "samples": [{"prompt": "How many?", "tokens": [{"text": "<3", "who": "accepted"}, {"text": ".", "who": "bonus"}]}],
    "exported": {"length": 3, "token_map": False, "gguf_type": "q8_0"},
    "commands": {"reproduce": "python -m distill --config configs/quickstart.yaml"},
}
MINIMAL = {key: FULL[key] for key in ("name", "target", "drafts", "decoding")}


def changed(**parts):
    return {**copy.deepcopy(FULL), **parts}


def written(tmp_path, report) -> str:
    """The text of the page."""
    write_report(tmp_path, report)
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    body = re.sub(r"<style>.*?</style>", "", page, flags=re.S)
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", "", body))


def figures_of(report):
    """The values of the cards, and the two sentences."""
    text, cards, same = opening(report)
    return [value for value, _ in cards], text, same


def test_the_opening_has_the_exported_draft_at_its_fastest_length_with_the_target_s_texts():
    values, text, same = figures_of(FULL)
    assert values == ["adaspec", "4.20", "1.62 (1.57–1.67)", "3.89 (3.70–4.10)"]
    assert "a target of 1,938,432 parameters and exported `adaspec`." in text
    assert text.endswith("Measured: `adaspec`, greedy, 6 tokens drafted per round.")
    assert same == "✓ Output identical to the target's."
    worse = decoding("adaspec", 0.0, 8, 2.5, same=False)
    rows = [*FULL["decoding"], decoding("distillspec", 0.0, 6, 1.80), worse]
    assert opening(changed(decoding=rows)) == opening(FULL)  # another draft is faster, and so are other texts
    other = changed(decoding=rows, profile={**FULL["profile"], "draft": "distillspec"})
    assert figures_of(other)[0][::2] == ["distillspec", "1.80 (1.75–1.85)"]
    assert figures_of(changed(decoding=[worse]))[2] == "✗ Output differs from the target's."
    tree = decoding("adaspec-tree", 1.0, 5, 2.5, same=None)
    assert "Measured: `adaspec-tree`, T = 1, 5 tokens" in figures_of(changed(decoding=[tree]))[1]


def test_a_full_report_has_every_part(tmp_path):
    page = written(tmp_path, FULL)
    for part in (
        "Drafts", "Training and other measurements", "Decoding", "Costs in target forwards", "Draft length and training",
        "Samples", "vLLM", "SGLang", "assistant_model=draft", "Some CPU", "python -m distill --config", "seed",
        "Definitions",
    ):  # fmt: skip
        assert part in page
    for number in ("0.9480 ± 0.0010", "1.62 (1.57–1.67)", "3.89", "81,472", "-0.0019 ± 0.0004***", "0.410"):
        assert number in page
    assert "--speculative-num-steps 3" in page  # of the export, whatever was fastest
    assert f"-md {tmp_path}/export/gguf/draft-q8_0.gguf" in page
    drawn = ("speedup", "speedup_by_length", "acceptance_by_position", "curves")
    assert tuple(figures(FULL)) == drawn


def test_the_first_screen_has_the_speed_of_the_exported_draft_and_two_pictures(tmp_path):
    first = written(tmp_path, FULL).split("Drafts")[0]
    for part in (
        "exported adaspec.", "4.20 tokens per target forward", "✓ Output identical",
        "1.62 times the speed of this loop without a draft (1.57–1.67)", "3.89 times the speed of model.generate",
        "Greedy speedup at the best draft length", "Acceptance by position",
    ):  # fmt: skip
        assert part in first
    assert "Learning curves" not in first


def test_a_draft_stands_in_one_row_with_its_fastest_decoding_and_its_difference_to_the_exported_one():
    names = {"a": 0.0009, "b": 0.009, "c": 0.049, "d": 0.05}
    pairs = [pair("adaspec", name, 0.01, p) for name, p in names.items()]
    pairs += [pair("adaspec", "a", 0.02, 0.9, "greedy"), pair("c", "a", 0.03, 0.9)]
    drafts = [draft("adaspec", 0.95), *(draft(name, 0.94) for name in names), draft("unpaired", 0.9)]
    rows = [*FULL["decoding"], decoding("a", 0.0, 3, 1.2), decoding("a-tree", 0.0, 4, 1.3)]
    best, a, *rest = draft_rows(changed(drafts=drafts, paired=pairs, decoding=rows))
    assert (best["difference"], best["draft_length"], best["optimiser_steps"]) == ("exported", 6, 1500)
    assert (a["difference"], a["se"]) == (-0.01, 0.0004)
    assert (a["name"], a["speedup"], a["accepted_length"]) == ("a", 1.3, 4.2)
    assert [row.get("significance") for row in (best, a, *rest)] == [None, "***", "**", "*", "n.s.", None]
    assert not {"speedup", "difference"} & rest[-1].keys()


def test_training_offline_and_served_acceptance_stand_in_one_table(tmp_path):
    known = [{"position": 1, "validation": 0.91, "offline": 0.82, "decoded": 0.83}, {"position": 2, "offline": 0.64}]
    report = changed(analysis={"acceptance": {"adaspec": known, "distillspec": known}})
    (tmp_path / "export").mkdir()
    rows = [
        {"temperature": t, "positions": [{"position": 1, "served": share}]} for t, share in ((1.0, 0.1), (0.0, 0.37))
    ]
    profile = {"served": [{"engine": "vllm", "rows": rows}]}
    (tmp_path / "export" / "speculation_profile.json").write_text(json.dumps(profile))
    page = written(tmp_path, report)
    assert "Greedy acceptance by position namepositionvalidationofflinedecodedserved" in page
    assert "adaspec10.9100.8200.8300.370 adaspec2–0.640–– distillspec10.9100.8200.830–" in page


def test_what_was_not_measured_is_left_out(tmp_path):
    page = written(tmp_path, MINIMAL)
    for part in ("-0.0019", "Costs in", "Learning curves", "Samples"):
        assert part not in page
    report = {**MINIMAL, "decoding": [], "target": {"parameters": 10, "accuracy": None}}
    report["drafts"] = [{**draft("undistilled", None), "offline_alpha_se": None}]
    assert "was not measured" in written(tmp_path, report)
    Console(file=io.StringIO()).print(console_tables(report))


def test_the_json_is_strict_and_has_numbers_of_every_kind(tmp_path):
    report = changed(
        target={"parameters": np.int64(5), "accuracy": float("nan")},
        profile={"cost_ratio": torch.tensor(0.25), "verify_cost": np.array([1.0, np.inf]), "folder": tmp_path},
        analysis={},
    )
    write_report(tmp_path, report)
    data = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"), parse_constant=int)  # NaN is no integer
    assert data["target"] == {"parameters": 5, "accuracy": None}
    assert data["profile"] == {"cost_ratio": 0.25, "verify_cost": [1.0, None], "folder": str(tmp_path)}
    assert data["decoding"][3]["speedup"] == 1.62


def test_the_console_shows_each_draft_in_a_row_and_cuts_no_name():
    long = "distillspec-of-reverse-kl"
    drafts, rows = [draft(long, 0.9461), draft("adaspec", 0.9480)], [*FULL["decoding"], decoding(long, 0.0, 4, 1.5)]
    console = Console(file=io.StringIO(), width=130)
    console.print(console_tables(changed(drafts=drafts, paired=[pair("adaspec", long, 0.0019, 0.03)], decoding=rows)))
    shown = console.file.getvalue()
    for part in (long, "0.9480", "-0.0019 ± 0.0004  * ", "* p < 0.05", "1.62 (1.57–1.67) times the speed", "✓ Output"):
        assert part in shown
    narrow = Console(file=io.StringIO(), width=76)
    narrow.print(console_tables(changed(drafts=drafts)))
    assert "…" not in narrow.file.getvalue()
