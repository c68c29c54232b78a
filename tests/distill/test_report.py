"""The report: required parts, plain numbers, the row that stands for the exported draft."""

import copy
import io
import json
import re

import numpy as np
import torch
from rich.console import Console

from distill.report import console_tables, figures, headline, write_report


def decoding(draft, temperature, length, speedup, same=True):
    return {
        "draft": draft, "temperature": temperature, "draft_length": length, "tokens_per_second": 594.0 * speedup,
        "speedup": speedup, "speedup_ci95": [speedup - 0.05, speedup + 0.05], "speedup_vs_generate": 2.4 * speedup,
        "predicted_speedup": speedup * 1.05, "accepted_length": 4.2, "alpha": 0.94, "accepted_per_drafted": 0.7,
        "identical_to_target": same,
    }  # fmt: skip


def draft(name, alpha):
    return {
        "name": name, "parameters": 81_472, "offline_alpha": alpha, "offline_alpha_se": 0.001,
        "optimiser_steps": 1500, "examples": 48_000, "teacher_tokens": 2_900_000, "selected_tokens": 1_160_000,
    }  # fmt: skip


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


def test_the_headline_has_the_exported_draft_at_its_fastest_length_with_the_target_s_texts():
    wanted = (
        "adaspec, 6 tokens drafted per round, greedy: 1.62 (1.57–1.67) times the speed of the same loop without a draft"
    )
    assert headline(FULL).startswith(wanted)
    assert headline(FULL).endswith("; texts identical to the target's.")
    worse = decoding("adaspec", 0.0, 8, 2.5, same=False)
    rows = [*FULL["decoding"], decoding("distillspec", 0.0, 6, 1.80), worse]
    assert headline(changed(decoding=rows)) == headline(FULL)  # another draft is faster, and so are other texts
    other = changed(decoding=rows, profile={**FULL["profile"], "draft": "distillspec"})
    assert headline(other).startswith("distillspec, 6 tokens drafted per round, greedy: 1.80")
    assert headline(changed(decoding=[worse])).endswith("texts different from the target's.")


def test_a_full_report_has_every_part(tmp_path):
    page = written(tmp_path, FULL)
    for part in (
        "Drafts", "Differences between drafts", "Decoding", "Costs in target forwards", "Training",
        "Samples", "vLLM", "SGLang", "assistant_model=draft", "Some CPU", "python -m distill --config", "seed",
    ):  # fmt: skip
        assert part in page
    for number in ("0.9480 ± 0.0010", "1.62 (1.57–1.67)", "3.89", "81,472", "+0.0019 ± 0.0004", "&lt; 0.001", "0.410"):
        assert number in page
    assert "--speculative-num-steps 3" in page  # of the export, whatever was fastest
    assert f"-md {tmp_path}/export/gguf/draft-q8_0.gguf" in page
    drawn = ("speedup", "speedup_by_length", "acceptance_by_position", "curves")
    assert tuple(figures(FULL)) == drawn


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
    for part in ("Differences", "Costs in", "Training", "Samples"):
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


def test_the_console_shows_drafts_differences_and_the_fastest_lengths():
    console = Console(file=io.StringIO(), width=140)
    console.print(console_tables(FULL))
    shown = console.file.getvalue()
    for part in ("0.9480", "2,900,000", "adaspec", "distillspec", "+0.0019", "1.62", "yes"):
        assert part in shown
    assert "921" not in shown  # tokens/s of adaspec at a slower length
