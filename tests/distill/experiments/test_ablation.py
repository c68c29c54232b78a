"""Drafts compared over seeds."""

import io
import json
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from scipy.special import stdtr
from tiny_run import begun, tiny_settings

from decode.errors import UserError
from decode.measure.acceptance import OfflineAlpha, paired, prompt_numbers, rounds_of_texts
from distill.ablation import ACCOUNT, AblateSettings, ablate, table
from distill.config import DraftSettings
from distill.results.evaluate import doubled


def test_the_ablation_compares_seed_by_seed_and_goes_on_where_it_was(tmp_path) -> None:
    tiny = begun(tiny_settings(tmp_path))
    tiny.drafts["late-tv"] = DraftSettings(divergence="tv")
    tiny.evaluation.prompts, tiny.evaluation.max_new_tokens = 4, 6
    settings, drafts = AblateSettings(**vars(tiny)), []
    tiny.drafts["late-tv"] = DraftSettings("distillspec", 1.0, "tv")  # which selects nothing, and needs no reference
    settings.ablation.seeds = [3, 4]
    for finished in (2, 3 + 6 + 1):  # then the report too
        text = io.StringIO()
        folder = ablate(AblateSettings(**vars(settings)), Console(file=text, width=200))
        assert text.getvalue().count("up to date") == finished
        assert text.getvalue().count("greedy gain") == 1
        assert "Δα" not in text.getvalue()
        drafts.append(json.loads((folder / "ablation.json").read_text())["drafts"])
    assert drafts[0] == drafts[1]
    assert [(row["name"], row["seeds"]) for row in drafts[0]] == [("distillspec", 2), ("adaspec", 2), ("late-tv", 2)]
    assert len(drafts[0][2]["gain_by_seed"]) == 2
    assert (folder / "ablation.md").read_text().count("\n| ") == 4
    assert (folder / "ablation.csv").read_text().count("\n") == 4
    weights = [(folder / f"distillspec-seed{seed}" / "model.safetensors").read_bytes() for seed in (3, 4)]
    assert weights[0] != weights[1]


def test_the_gain_is_the_mean_over_seeds_with_errors_over_seeds_and_over_texts() -> None:
    noise, drafts = np.array([0.001, -0.001, 0.002, -0.002]), {}
    rows: list[dict[str, Any]] = []
    for name, gains in {"distillspec": [0.0] * 3, "adaspec": [0.01, 0.02, 0.03]}.items():
        for seed, gain in enumerate(gains):
            alpha = OfflineAlpha([[0.5 + gain + (gain != 0) * wiggle] * 3 for wiggle in noise])
            rounds = [sum(text.values()) for text in rounds_of_texts([alpha], 5)]
            drafts[f"{name}{seed}"] = {"sums": alpha.sums, "rounds": {"5": rounds}}
            row = {"name": f"{name}{seed}", "alpha_by_position": [alpha.mean]}
            rows.append(dict.fromkeys(ACCOUNT, alpha.mean) | row)
    texts = {"counts": [3] * 4, "prompts": [0, 1, 2, 3], "drafts": drafts}
    report = {"drafts": rows, "texts": {"sampled": texts, "greedy": texts}}
    names = {name: [f"{name}{seed}" for seed in range(3)] for name in ("distillspec", "adaspec")}
    lines = {name: (report, seeds) for name, seeds in names.items()}
    first, row = table(lines)
    assert row["gain"] == pytest.approx(0.02)
    assert row["gain_se"] == pytest.approx(np.hypot(0.01 / 3**0.5, np.std(noise, ddof=1) / 2))
    p = 2 * stdtr(2, -0.02 / (0.01 / 3**0.5))  # of three seeds, which is larger than that of four prompts
    assert row["gain_p"] == pytest.approx(p)
    assert table(lines | {"again": lines["adaspec"]})[1]["gain_p"] == pytest.approx(2 * p)  # two are compared
    over, other = table(lines, None, "adaspec")
    assert (over["gain"], "gain" in other) == (pytest.approx(-0.02), False)
    assert "gain" not in first
    assert row["length_gain"] == pytest.approx(row["offline_accepted_length"] - first["offline_accepted_length"])


def test_what_twice_the_tokens_would_give_is_told_of_a_curve_alone() -> None:
    rows = [{"teacher_tokens": 100 * 2**i, "greedy_accepted_length": 1 + 0.25 * i} for i in range(4)]
    drafts = {f"{n}": DraftSettings(training={"epochs": 2, "examples": n}) for n in (8, 16, 32, 64)}
    curve = AblateSettings(drafts=drafts)
    assert "twice the texts would give 2.00 ± 0.00" in doubled(curve, rows)
    bent = [row | {"greedy_accepted_length": 1 + 0.1 * i**2} for i, row in enumerate(rows)]
    assert "twice the texts would give 2.10 ± 0.22" in doubled(curve, bent)
    assert doubled(curve, rows[:3]) == doubled(curve, [*rows, rows[0]]) == ""
    for other in (DraftSettings(training={"epochs": 3}), DraftSettings("8", training={"epochs": 2})):
        assert doubled(AblateSettings(drafts=drafts | {"128": other}), rows) == ""
    assert doubled(AblateSettings(drafts={n: DraftSettings(training={"steps": 9}) for n in drafts}), rows) == ""


def test_texts_of_one_prompt_are_one_observation() -> None:
    """A deterministic answer to a prompt that is there twice adds nothing to the errors."""
    once = [OfflineAlpha([[a] * 3 for a in alphas]) for alphas in ((0.2, 0.5, 0.9), (0.3, 0.5, 0.8))]
    twice = [OfflineAlpha(alpha.texts * 2, [0, 1, 2, 0, 1, 2]) for alpha in once]
    assert [a.mean for a in twice] == pytest.approx([a.mean for a in once])
    assert [a.se for a in twice] == pytest.approx([a.se for a in once])
    assert paired(*twice)["se"] == pytest.approx(paired(*once)["se"])
    assert prompt_numbers([([1, 2, 3], 2), ([1, 3, 3], 2), ([1, 2, 4], 2)]) == [0, 1, 0]


def test_kinds_are_compared_on_one_target_with_as_many_drafted_tokens(tmp_path) -> None:
    tiny = begun(tiny_settings(tmp_path))
    tiny.evaluation.prompts, tiny.evaluation.max_new_tokens, tiny.drafts = 3, 6, {"kl": DraftSettings()}
    settings = AblateSettings(**vars(tiny))
    settings.ablation.seeds, settings.ablation.kinds = [3], ["dflash2", "eagle3"]
    settings.student.draft_vocab, settings.student.block.markov_rank, settings.student.block.layers = 50, 2, 1
    settings.ablation.against = "kl"
    with pytest.raises(UserError, match=r"ablation\.against is 'kl', expected one of dflash2 kl, eagle3 kl"):
        ablate(settings, Console(file=io.StringIO()))
    settings.ablation.against = "eagle3 kl"
    with pytest.raises(UserError, match=r"target\.kind is 'scratch'.* take as_is"):
        ablate(settings, Console(file=io.StringIO()))
    settings.target.kind, settings.target.model = "as_is", str(tmp_path / "tiny" / "target")
    settings.teacher.responses.source, settings.teacher.responses.max_new_tokens = "target", 8
    text = io.StringIO()
    folder = ablate(settings, Console(file=text, width=200))
    rows = json.loads((folder / "ablation.json").read_text())["drafts"]
    assert [row["name"] for row in rows] == ["dflash2 kl", "eagle3 kl"]
    assert len(rows[0]["alpha_by_position"]) == settings.student.block.size - 1
    assert all((folder / kind / "kl" / "model.safetensors").is_file() for kind in settings.ablation.kinds)
    assert rows[0]["optimiser_steps"] == rows[1]["optimiser_steps"]
    report = json.loads((folder / "eagle3" / "report.json").read_text())
    assert report["decoding"] == []
    length = str(settings.student.block.size - 1)  # to which all kinds are drafted
    texts = report["texts"]["sampled"]
    rounds = texts["drafts"]["kl"]["rounds"]
    assert rows[1]["offline_accepted_length"] == pytest.approx(sum(texts["counts"]) / sum(rounds[length]))
    assert [row.get("gain") is None for row in rows] == [False, True]
    assert text.getvalue().count(" new)") == 2  # of training and validation, for all kinds
