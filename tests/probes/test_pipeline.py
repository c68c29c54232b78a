"""The whole command on a model of a few thousand parameters."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console
from tiny_run import tiny_settings

from decode.errors import UserError
from distill.data.context import StageContext
from distill.pipeline import alone_in
from distill.run_stages import run_stages
from distill.stages import run_of
from probes.__main__ import main
from probes.pipeline import run_probes
from probes.settings import ProbeSettings, ProbesSettings, shrink

SMALL = {
    "prompts": 12,
    "validation_prompts": 6,
    "test_prompts": 6,
    "max_new_tokens": 12,
    "window": 7,
    "confirm": 1,
    "bench_prompts": 2,
    "repeats": 1,
    "subset_prompts": 1,
}


def settings_in(folder: Path, name: str = "tiny", **probes) -> ProbesSettings:
    tiny = tiny_settings(folder, name=name)
    tiny.target.architecture.layers = 3
    tiny.target.layerskip.enabled = True
    return ProbesSettings(**vars(tiny), probes=ProbeSettings(**SMALL | probes))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A finished run and what it printed; another command's report was there before."""
    folder = tmp_path_factory.mktemp("runs")
    run = folder / "tiny"
    run.mkdir()
    (run / "report.json").write_text(json.dumps({"name": "tiny", "drafts": [{"offline_alpha": 0.5}]}))
    said = io.StringIO()
    run_probes(settings_in(folder), Console(file=said, width=120))
    return run, said.getvalue()


def test_the_target_is_trained_if_it_is_not_there_and_the_probes_are_written(finished) -> None:
    run, said = finished
    assert (run / "target" / "model.safetensors").exists()
    assert {"probes.json", "probes.safetensors"} == {p.name for p in (run / "probes").iterdir()}
    note = json.loads((run / "probes" / "probes.json").read_text())
    assert {(p["label"], p["layer"]) for p in note["probes"]} == {(n, e) for n in ("match", "accept") for e in (1, 2)}
    assert note["best"]["greedy"]["layerskip"].keys() >= {"exit_layer", "draft_length"}
    assert "adaspeed-probe" in said


def test_the_report_keeps_what_others_wrote_and_gets_the_rows(finished) -> None:
    report = json.loads((finished[0] / "report.json").read_text())
    assert report["drafts"] == [{"offline_alpha": 0.5}]
    expected = {"layer", "auroc", "brier", "ece", "base_rate", "auroc_token_probability"}
    assert all(expected <= row.keys() for row in report["probes"])
    methods = {row["method"] for row in report["self_speculation"]}
    assert {"autoregressive", "layerskip", "draft-verify", "adaspeed", "adaspeed-probe"} <= methods
    greedy = [row for row in report["self_speculation"] if row["temperature"] == 0]
    assert all(row["identical_to_target"] for row in greedy)
    assert all(row["lossless"] for row in report["self_speculation"])


def test_the_page_holds_tables_and_figures(finished) -> None:
    page = (finished[0] / "probes.html").read_text()
    figures = ("Reliability, greedy", "AUROC by exit", "Predicted speedup by exit")
    for said in (*figures, "adaspeed", "Provenance"):
        assert said in page


def test_a_target_is_used_as_it_is_while_its_settings_are_the_same_and_else_trained_anew(finished) -> None:
    run, _ = finished
    weights = run / "target" / "model.safetensors"
    before = weights.read_bytes()
    texts = run / "work" / "probes" / "sampled-train.jsonl"
    written = texts.read_text().splitlines(keepends=True)
    texts.write_text("".join(written[:-1]))  # as a kill leaves it
    settings = settings_in(run.parent, subset_prompts=0)
    run_probes(settings, Console(file=io.StringIO()))
    assert weights.read_bytes() == before
    assert texts.read_text().splitlines(keepends=True) == written
    settings.target.training.steps = 13
    run_probes(settings, Console(file=io.StringIO()))
    assert weights.read_bytes() != before
    assert texts.read_text().splitlines(keepends=True) != written


def test_a_given_target_is_trained_on_its_own_answers_and_compared_with_what_it_was(finished, tmp_path: Path) -> None:
    settings = settings_in(tmp_path)
    settings.target.kind, settings.target.model = "lora", str(finished[0] / "target")
    settings.target.layerskip.own_answers = True
    settings.teacher.responses.max_new_tokens = 8
    settings.validate()
    run = run_of(settings)
    run_stages(StageContext(settings, run, Console(quiet=True)), only=("target",))
    answers = (run.work / "original" / "train.jsonl").read_text().splitlines()
    assert all(len(json.loads(line)["ids"]) <= 8 for line in answers)
    history = run.record("target").history
    assert {"recipe_loss", "accuracy"} <= history[0].keys()
    settings.target.kind, settings.target.model = "scratch", None
    with pytest.raises(UserError, match=r"own_answers is for a given target.*kind is scratch"):
        settings.validate()


def test_a_folder_in_which_another_process_works_is_left_alone(tmp_path: Path) -> None:
    settings = settings_in(tmp_path)
    with alone_in(run_of(settings), settings), pytest.raises(UserError, match="tiny"):
        run_probes(settings, Console(file=io.StringIO()))
    assert not (tmp_path / "tiny" / "target").exists()


@pytest.mark.parametrize("arguments", [["--tracker", "none"], ["--tracker=none"]])
def test_the_tracker_is_chosen_by_its_short_form_as_for_distill(arguments, monkeypatch) -> None:
    seen = []
    monkeypatch.setattr("probes.pipeline.run_probes", seen.append)
    main([*arguments, "--name", "short"])
    assert (seen[0].name, seen[0].tracker.kind) == ("short", "none")


def test_families_without_a_layer_by_layer_forward_get_probes_of_the_modes_wanted_and_no_table(tmp_path: Path) -> None:
    settings = settings_in(tmp_path, modes=["greedy"])
    settings.target.architecture.model_type = "gpt2"
    said = io.StringIO()
    added = run_probes(settings, Console(file=said, width=120))
    assert added["self_speculation"] == []
    assert {(row["mode"], row["layer"]) for row in added["probes"]} == {("greedy", 1), ("greedy", 2)}
    assert "not supported for this family" in said.getvalue()


def test_settings_for_a_deep_target_are_shrunk_with_it(tmp_path: Path) -> None:
    settings = settings_in(tmp_path, layers=[20])
    assert shrink(settings, Console(quiet=True)).probes.layers == []


def test_bad_settings_are_refused_by_name(tmp_path: Path) -> None:
    wrong = {"prompts": 0, "top_p": 0.0, "temperature": 0.0, "l2": [], "modes": []}
    for change in ({name: value} for name, value in wrong.items()):
        with pytest.raises(UserError, match=rf"probes\.{next(iter(change))}"):
            settings_in(tmp_path, **change).validate()
    with pytest.raises(UserError, match=r"nearest known key is 'probes\.temperature'"):
        main(["--probes.temprature", "1"])
