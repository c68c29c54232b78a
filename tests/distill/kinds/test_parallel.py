"""Language models that learn to draft in one forward: their rows, which of them are drawn, and a run."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from architectures import build_architecture
from families import in_double
from safetensors.torch import load_file
from some_rows import everything, from_lists
from tiny_run import begun, check_killed_ends_alike, run_tiny, tiny_settings

from decode.commands.serve_check import check_head
from decode.engines.server import ENGINES, Engine
from decode.errors import UserError
from decode.models.open import load_model
from distill.config import DraftSettings, ExportSettings
from distill.config.models import StudentSettings
from distill.data.dataset import IGNORE
from distill.export.draft import export_draft
from distill.kinds.parallel import ParallelDraft
from distill.losses.chunked import compare
from distill.losses.divergences import Divergence
from distill.signal.target import Signal

MASK, STEPS = 47, 4


@pytest.mark.parametrize("family", ["llama", "mistral", "gpt2", "gemma3"])
def test_rows_are_those_of_a_forward_over_each_text_and_its_masks(family: str, double, monkeypatch) -> None:
    """Of texts with labels that a prompt interrupts and of one without; all at once, and in parts."""
    ids = [[3, 4, 5, 6, 7, 2, 9, 8], [2, 9, 5, 1], [4, 4, 3], [7, 1, 11, 0, 5, 10, 13, 8, 2]]
    labels = [[-100, *ids[0][1:5], -100, 9, 8], [-100, -100, 5, 1], [-100] * 3, [-100, -100, *ids[3][2:]]]
    batch, target, model = everything(from_lists(ids, labels)), double(family), in_double(double(family, seed=3))
    monkeypatch.setattr(model.config, "pard_token", MASK, raising=False)
    draft, signal = ParallelDraft(model, STEPS), Signal(target)
    batch = draft.indexed(batch)
    drawn, parts = draft.rows(batch, signal), list(draft.every_row(batch, signal))
    places, found = [(text, at) for text, row in enumerate(labels) for at in range(1, len(row)) if row[at] >= 0], []
    for rows in (*parts, drawn):
        assert rows.groups == rows.step.bincount(minlength=STEPS).tolist()
        assert rows.step.tolist() == sorted(rows.step.tolist())
        assert rows.mass == len(places)
        measured = compare(rows, Divergence())
        for number, (at, step) in enumerate(zip(rows.at.tolist(), rows.step.tolist())):
            text, label = places[at]
            read = [*ids[text][: label - step], *[MASK] * step]
            with torch.no_grad():
                q = model(torch.tensor([read])).logits[0, -1].softmax(-1)
                p = target(torch.tensor([ids[text][:label]])).logits[0, -1].softmax(-1)
            torch.testing.assert_close(measured.alpha[number], torch.minimum(p, q).sum(), rtol=1e-6, atol=1e-6)
            found.append((text, label, step))
    wanted = [
        (text, at, step) for text, at in places for step in range(STEPS)
        if at > step and all(token != IGNORE for token in labels[text][at - step : at])
    ]  # fmt: skip
    every, some = found[: -len(drawn)], found[-len(drawn) :]
    assert sorted(every) == sorted(wanted)
    assert len({*some}) == len(some) < len(wanted)
    assert {*some} < {*wanted}


def test_slots_are_dropped_more_the_deeper_they_are_and_no_draft_has_a_gap(tiny, monkeypatch) -> None:
    labels, model, steps = np.arange(400), tiny("llama"), 8
    monkeypatch.setattr(model.config, "pard_token", MASK, raising=False)
    draft = ParallelDraft(model, steps)
    lengths = np.stack([draft.lengths(labels, np.random.default_rng(seed)) for seed in range(40)])[:, :-1]
    assert (lengths >= 1).all()  # the first slot is that of an ordinary draft
    for step in range(1, steps):
        assert (lengths[:, :-step] > step).mean() == pytest.approx(max(0.7**step, 0.2), abs=0.02)
    index = draft.index({"labels": torch.tensor(labels)[None]}, [np.random.default_rng(5)])
    assert len(index["step"]) == lengths[5].sum()
    rows = set(zip((index["at"] - index["step"]).tolist(), index["step"].tolist()))
    assert len(rows) == len(index["step"])
    assert all((start, step - 1) in rows for start, step in rows if step)


def test_models_that_read_no_masked_slots_are_refused() -> None:
    for name, told in (("LFM2", "it keeps a recurrent state"), ("BLOOM", "no position_ids")):
        with pytest.raises(UserError, match=rf"cannot learn masked slots: .*{told}.*set student\.unroll to null"):
            ParallelDraft(build_architecture(name), 2)


def test_a_run_learns_and_a_killed_one_ends_with_the_same_weights(tmp_path: Path) -> None:
    settings = tiny_settings(tmp_path / "run")
    settings.student.unroll = 3
    settings.drafts["accepted"] = DraftSettings(accepted_only=True, divergence="kl_tv")
    _, run, _ = run_tiny(begun(settings))
    mask = json.loads((run.path("initial") / "config.json").read_text())["pard_token"]
    with pytest.warns(UserWarning, match=r"(sglang|llama\.cpp) does not run this export .* a token in each forward"):
        export_draft(run.path("distillspec"), run.path("target"), run.export, ExportSettings())
    card = (run.export / "README.md").read_text()
    assert f"in one forward, with token {mask} in masked slots" in card
    assert "STANDALONE" not in card
    line = json.loads(card.split("--speculative-config '")[1].split("'")[0])
    assert line.items() >= {"method": "draft_model", "parallel_drafting": True, "num_speculative_tokens": 4}.items()
    command, _ = ENGINES["vllm"].command(Engine("vllm", "target", str(run.export), program="python"), 4, 1)
    assert json.loads(command[command.index("--speculative-config") + 1]) == line
    with pytest.raises(UserError, match=r"llama\.cpp does not run this draft"):
        check_head(load_model(run.export, device="cpu", dtype="auto"), "llama.cpp", [4])
    first = load_file(run.path("initial") / "model.safetensors")
    for stage in run.trained:
        history, weights = run.record(stage).history, load_file(run.path(stage) / "model.safetensors")
        assert "alpha_3" in history[-1]
        assert "alpha_4" not in history[-1]
        assert history[-1]["loss"] < history[0]["loss"], stage
        assert all(not torch.equal(first[name], weight) for name, weight in weights.items()), stage
    plain, chosen = (run.record(stage).account for stage in ("distillspec", "adaspec"))
    assert plain["teacher_tokens"] == chosen["teacher_tokens"]
    assert 0.4 < chosen["selected_tokens"] / chosen["teacher_tokens"] < 0.4 * 2.5  # of about 1 + 0.7 + 0.49 rows
    assert run_tiny(settings)[0] == []
    check_killed_ends_alike(settings, tmp_path / "again", {"accepted": 6})


def test_layers_of_the_target_and_a_published_draft_become_such_drafts(tmp_path: Path) -> None:
    settings = tiny_settings(tmp_path, student=StudentSettings(kind="cut", unroll=3))
    settings.drafts = {"distillspec": DraftSettings(divergence="kl_tv")}
    _, run, _ = run_tiny(begun(settings))
    assert run.best("distillspec")[0]["accepted_length"] > 1
    settings.student = StudentSettings(kind="as_is", unroll=2, model=str(run.path("distillspec")))
    settings.name = "on"
    _, again, _ = run_tiny(begun(settings))
    assert json.loads((again.path("distillspec") / "config.json").read_text())["pard_token"]
    settings.student.unroll = None
    with pytest.raises(UserError, match=r"has a pard_token: set student\.unroll to the tokens"):
        run_tiny(settings)
