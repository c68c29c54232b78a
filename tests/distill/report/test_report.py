"""The report: required parts, plain numbers, and what it says in words about the result."""

import copy
import io
import json
import re

import numpy as np
import pytest
import torch
from rich.console import Console

from distill.report import choice, console_tables, figures, findings, write_report


def decoding(draft, temperature, length, speedup, same=True):
    return {
        "draft": draft, "temperature": temperature, "draft_length": length, "tokens_per_second": 594.0 * speedup,
        "speedup": speedup, "speedup_ci95": [speedup - 0.05, speedup + 0.05], "speedup_vs_generate": 2.4 * speedup,
        "predicted_speedup": speedup * 1.05, "block_efficiency": 4.2, "alpha": 0.94, "accepted_per_drafted": 0.7,
        "identical_to_target": same,
    }  # fmt: skip


def draft(name, alpha):
    return {
        "name": name, "parameters": 81_472, "offline_alpha": alpha, "offline_alpha_se": 0.001,
        "optimiser_steps": 1500, "examples": 48_000, "teacher_tokens": 2_900_000, "selected_tokens": 1_160_000,
    }  # fmt: skip


HISTOGRAM = {"edges": [-1.0, 0.0, 1.0], "counts": [3, 9]}
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
    "paired": [{"a": "adaspec", "b": "distillspec", "difference": 0.0019, "se": 0.0004, "p_value": 2e-6, "n": 61_234}],
    "decoding": [
        {
            **decoding("autoregressive", 0.0, None, 1.0),
            "speedup_ci95": None,
            "alpha": None,
            "accepted_per_drafted": None,
        },
        decoding("distillspec", 0.0, 4, 1.50),
        decoding("adaspec", 0.0, 4, 1.55),
        decoding("adaspec", 0.0, 6, 1.62),
        decoding("adaspec", 1.0, 4, 1.40, same=None),
    ],
    "profile": {"cost_ratio": 0.14, "verify_cost": [1, 1.1, 1.3], "best_draft_length": 6, "break_even_alpha": 0.41},
    "analysis": {
        "margins": {"distillspec": HISTOGRAM, "adaspec": HISTOGRAM},
        "kl": {"distillspec": HISTOGRAM, "adaspec": HISTOGRAM},
        "acceptance_by_position": {"adaspec": POSITIONS},
        "curves": {"adaspec": [[0, 0.87], [100, 0.94]]},
        "selected_tokens": [{"token": " $", "count": 12, "share": 0.9, "lift": 2.2}],
    },
    "samples": [{"prompt": "How many?", "tokens": [{"text": "<3", "who": "accepted"}, {"text": ".", "who": "bonus"}]}],
    "exported": {"length": 6, "token_map": False, "gguf_type": "q8_0"},
    "commands": ["python -m distill --config configs/quickstart.yaml"],
}
MINIMAL = {key: FULL[key] for key in ("name", "target", "drafts", "decoding")}


def changed(**parts):
    return {**copy.deepcopy(FULL), **parts}


def said(report) -> str:
    return " ".join(sentence.text for sentence in findings(report))


def text(page: str) -> str:
    body = re.sub(r"<style>.*?</style>", "", page, flags=re.S)
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", "", body))


def written(tmp_path, report) -> str:
    write_report(tmp_path, report)
    return text((tmp_path / "report.html").read_text(encoding="utf-8"))


def headline(tmp_path, report) -> str:
    write_report(tmp_path, report)
    return re.search(r'<p class="headline">(.*?)</p>', (tmp_path / "report.html").read_text(encoding="utf-8"))[1]


def test_the_headline_says_how_much_faster_with_its_interval_whether_identical_and_which_draft_won(tmp_path):
    shown = headline(tmp_path, FULL)
    assert "exported AdaSPEC draft, 6 tokens a round, makes greedy decoding 1.62 times as fast" in shown
    assert "95 % interval 1.57 to 1.67" in shown
    assert "output is identical" in shown
    assert "AdaSPEC is better than DistillSpec: α differs by +0.0019 ± 0.0004 over 61,234 texts" in shown


def test_the_headline_speaks_of_the_exported_draft_even_if_another_was_measured_faster(tmp_path):
    rows = [*FULL["decoding"], decoding("distillspec", 0.0, 6, 1.80)]
    assert "exported AdaSPEC draft, 6 tokens a round, makes greedy decoding 1.62" in headline(
        tmp_path, changed(decoding=rows)
    )
    other = changed(decoding=rows, profile={**FULL["profile"], "draft": "distillspec"})
    assert "exported DistillSpec draft, 6 tokens a round, makes greedy decoding 1.80" in headline(tmp_path, other)


def test_a_full_report_has_every_part(tmp_path):
    page = written(tmp_path, FULL)
    for part in (
        "Drafts", "Paired comparison", "Greedy", "Sampled at T = 1", "Cost model", "What the drafts learned",
        "Samples", "vLLM", "SGLang", "assistant_model=draft", "Some CPU", "python -m distill --config", "seed",
    ):  # fmt: skip
        assert part in page
    for number in ("0.9480 ± 0.0010", "1.62 1.57–1.67", "3.89", "81,472", "+0.0019 ± 0.0004", "0.410"):
        assert number in page
    assert set(figures(FULL)) == {
        "speedup", "speedup_by_length", "verify_cost", "acceptance_by_position", "margins", "kl", "curves",
        "selected_tokens",
    }  # fmt: skip


def test_a_minimal_report_leaves_out_what_was_not_measured(tmp_path):
    page = written(tmp_path, MINIMAL)
    for part in ("Paired comparison", "Cost model", "What the drafts learned", "Samples", "Commands that reproduce"):
        assert part not in page


def test_a_report_without_decoding_or_scores_is_still_a_report(tmp_path):
    report = {**MINIMAL, "decoding": [], "target": {"parameters": 10, "accuracy": None}}
    report["drafts"] = [{**draft("undistilled", None), "offline_alpha_se": None}]
    assert "Decoding was not measured" in written(tmp_path, report)
    Console(file=io.StringIO()).print(console_tables(report))


def test_the_json_is_strict_and_has_numbers_of_every_kind(tmp_path):
    report = changed(
        target={"parameters": np.int64(5), "accuracy": float("nan")},
        profile={"cost_ratio": torch.tensor(0.25), "verify_cost": np.array([1.0, np.inf]), "folder": tmp_path},
        analysis={},
    )
    write_report(tmp_path, report)

    def refuse(value):
        raise AssertionError(value)

    data = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"), parse_constant=refuse)
    assert data["target"] == {"parameters": 5, "accuracy": None}
    assert data["profile"] == {"cost_ratio": 0.25, "verify_cost": [1.0, None], "folder": str(tmp_path)}
    assert data["decoding"][3]["speedup"] == 1.62


def test_the_same_report_gives_the_same_bytes_whatever_the_order_of_its_parts(tmp_path):
    names = ("report.json", "report.html")
    write_report(tmp_path, MINIMAL)
    first = [(tmp_path / name).read_bytes() for name in names]
    write_report(tmp_path, dict(reversed(MINIMAL.items())))
    assert [(tmp_path / name).read_bytes() for name in names] == first
    assert list(json.loads(first[0]))[:2] == ["name", "verdict"]


@pytest.mark.parametrize(
    ("difference", "p_value", "sentence"),
    [
        (0.0019, 2e-6, "AdaSPEC is better than DistillSpec"),
        (-0.0026, 1e-4, "AdaSPEC did not beat DistillSpec; DistillSpec is better"),
        (0.0003, 0.4, "AdaSPEC and DistillSpec cannot be told apart"),
        (-0.0003, None, "AdaSPEC and DistillSpec cannot be told apart"),
    ],
)
def test_it_says_plainly_whether_adaspec_beat_distillspec(difference, p_value, sentence):
    pair = {"a": "adaspec", "b": "distillspec", "difference": difference, "se": 0.0004, "p_value": p_value, "n": 10}
    assert sentence in said(changed(paired=[pair]))


def test_it_says_plainly_that_a_pair_cannot_win():
    report = changed(decoding=[decoding("adaspec", 0.0, 2, 0.81), decoding("adaspec", 0.0, 4, 0.7)])
    assert "does not speed up greedy decoding on this machine" in said(report)


def test_a_gain_within_its_interval_is_called_uncertain():
    report = changed(decoding=[decoding("adaspec", 0.0, 2, 1.03)])
    assert "The interval includes 1" in said(report)


def test_distillation_that_did_not_help_is_called_so():
    report = changed(drafts=[draft("undistilled", 0.95), draft("adaspec", 0.94)])
    assert "did not raise the acceptance rate" in said(report)


def test_the_acceptance_told_is_that_of_the_final_draft_even_if_another_has_more():
    drafts = [draft("undistilled", 0.90), draft("adaspec", 0.94), draft("kl-tv", 0.95), draft("more-data", 0.96)]
    assert "from 0.900 to 0.950 (kl-tv)" in said(changed(drafts=drafts, profile={**FULL["profile"], "draft": "kl-tv"}))
    assert "from 0.900 to 0.940 (AdaSPEC)" in said(changed(drafts=drafts))
    assert "from 0.900 to 0.960 (more-data)" in said(changed(drafts=[drafts[0], *drafts[2:]]))


def test_a_choice_by_validation_is_told_with_its_margin():
    drafts = [
        {"name": "undistilled", "offline_alpha": 0.8, "validation_alpha": 0.99},
        {"name": "distillspec", "offline_alpha": 0.9, "validation_alpha": 0.91},
        {"name": "adaspec", "offline_alpha": 0.9, "validation_alpha": 0.915},
    ]
    report = {"drafts": drafts, "settings": {"export": {"choose": "best"}}}
    (finding,) = choice(report)
    assert "AdaSPEC is exported: of 2 trained drafts" in finding.text
    assert "0.9150, +0.0050 against DistillSpec" in finding.text
    assert choice(report | {"settings": {"export": {"choose": "draft"}}}) == []


def test_a_faster_row_with_other_output_does_not_win():
    report = changed(decoding=[*FULL["decoding"], decoding("adaspec", 0.0, 8, 2.5, same=False)])
    page = said(report)
    assert "1.62 times as fast" in page
    only = changed(decoding=[decoding("adaspec", 0.0, 8, 2.5, same=False)])
    assert "differs from the target" in said(only)


def test_the_console_table_shows_drafts_the_fastest_lengths_and_the_verdict():
    console = Console(file=io.StringIO(), width=140)
    console.print(console_tables(FULL))
    shown = console.file.getvalue()
    for part in ("0.9480", "2,900,000", "1.62", "identical", "AdaSPEC is better than DistillSpec"):
        assert part in shown
    assert "921" not in shown  # tokens/s of AdaSPEC at a slower length


def test_the_lines_to_paste_are_of_the_export_and_its_length_whatever_was_fastest(tmp_path):
    page = written(tmp_path, changed(exported={"length": 3, "token_map": False, "gguf_type": "q8_0"}))
    assert f"The draft is in {tmp_path}/export" in page
    assert "--speculative-num-steps 3" in page
    assert f"-md {tmp_path}/export/gguf/draft-q8_0.gguf" in page
    assert f"{tmp_path}/draft" not in page
    head = changed(exported={"length": 2, "token_map": True, "gguf_type": "f32"}, settings={"eagle": {"kind": "eagle"}})
    assert f"--speculative-token-map {tmp_path}/export/token_map.pt" in written(tmp_path, head)
