"""The whole command on a model of a few thousand parameters."""

import io
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console
from tiny_run import tiny_settings

from decode.errors import UserError
from distill.run import Run, alone_in
from probes import exit_search, fit
from probes.__main__ import main
from probes.features import exit_layers
from probes.pipeline import run_probes
from probes.settings import ProbeSettings, ProbesSettings, shrink

COUNTS = {"prompts": 12, "validation_prompts": 6, "test_prompts": 6, "bench_prompts": 2, "confirm": 2}


def settings_in(folder: Path, name: str = "tiny", **probes) -> ProbesSettings:
    tiny = tiny_settings(folder, name=name)
    tiny.target.architecture.layers = 3
    tiny.target.layerskip.enabled = True
    return ProbesSettings(**vars(tiny), probes=ProbeSettings(**COUNTS | {"max_new_tokens": 8} | probes))


def test_exits_outside_the_target_are_refused_before_it_is_trained(tmp_path) -> None:
    with pytest.raises(UserError, match=r"probes\.layers has 3; the model has 3 layers, so exits are 1 to 2"):
        run_probes(settings_in(tmp_path, layers=[3]), Console(quiet=True))
    assert not (tmp_path / "tiny").exists()
    assert exit_layers(4, [3, 1]) == [1, 3]
    with pytest.raises(UserError, match="no early exit"):
        exit_layers(1)


@pytest.fixture(scope="module", autouse=True)
def few_settings() -> Iterator[None]:
    """Two thresholds and lengths are tried, by probes of a few epochs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exit_search, "THRESHOLDS", (0.3, 0.8))
        patch.setattr(exit_search, "LENGTHS", (2, 4))
        patch.setattr(fit, "EPOCHS", 5)
        yield


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> tuple[Path, str]:
    """A finished run and what it printed; another command's report was there before."""
    run, said = tmp_path_factory.mktemp("runs") / "tiny", io.StringIO()
    run.mkdir()
    (run / "report.json").write_text(json.dumps({"name": "tiny", "drafts": [{"offline_alpha": 0.5}]}))
    run_probes(settings_in(run.parent), Console(file=said, width=120))
    return run, said.getvalue()


def test_the_target_is_trained_if_it_is_not_there_and_probes_and_rows_are_written(finished) -> None:
    run, said = finished
    assert (run / "target" / "model.safetensors").exists()
    assert {"probes.json", "probes.safetensors", "tokenizer_config.json"} <= {
        p.name for p in (run / "probes").iterdir()
    }
    note, report = (json.loads((run / name).read_text()) for name in ("probes/probes.json", "report.json"))
    assert {(p["label"], p["layer"]) for p in note["probes"]} == {(n, e) for n in ("match", "accept") for e in (1, 2)}
    assert note["best"]["greedy"]["layerskip"].keys() >= {"exit_layer", "draft_length"}
    assert "adaspeed-probe" in said
    assert report["drafts"] == [{"offline_alpha": 0.5}]
    expected = {"layer", "auroc", "brier", "ece", "base_rate", "auroc_token_probability"}
    assert all(expected <= row.keys() for row in report["probes"])
    methods = {row["method"] for row in report["self_speculation"]}
    assert {"autoregressive", "layerskip", "draft-verify", "adaspeed", "adaspeed-probe"} <= methods
    assert all(row["lossless"] for row in report["self_speculation"])
    assert all(row["identical_to_target"] for row in report["self_speculation"] if row["temperature"] == 0)
    assert {row["tried"] for row in report["self_speculation"]} == {4, None}
    assert len(report["probe_settings"]["tried"]) == 4 * 2 * 5  # settings, modes, methods
    page = (run / "probes.html").read_text()
    tables = "Settings tried on validation prompts", "Scores on test prompts"
    command = f"draftsmith decode generate --target {run}/target --probes {run}/probes --method "
    for part in (*(f"{table}, greedy" for table in tables), "Provenance", command):
        assert part in page
    for finding in report["probe_findings"]:
        assert "the probe ranks tokens better than their probability does (AUROC) at " in finding
        assert finding.endswith("No speedup is reliable.")
    assert page.count("fewer than 6 prompts were timed") == said.count("fewer than 6 prompts") == 1
    assert page.index("AUROC") < page.index("tokens/s")
    assert "<svg" not in page  # the speeds of a few prompts choose settings, and are no results


def test_a_target_is_used_as_it_is_while_its_settings_are_the_same_and_else_trained_anew(finished) -> None:
    run, _ = finished
    weights = run / "target" / "model.safetensors"

    def texts() -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in (run / "work" / "probes").glob("greedy-train-*/*.safetensors")}

    before, written = weights.read_bytes(), texts()
    next(iter(written)).unlink()  # as a kill leaves it
    settings = settings_in(run.parent, modes=["greedy"], layers=[1])
    for changed in (False, True):
        settings.target.training.steps += changed
        run_probes(settings, Console(quiet=True))
        assert (weights.read_bytes() == before, texts() == written) == (not changed, not changed)


def test_settings_are_those_of_distill_and_of_probes_and_bad_ones_are_refused(tmp_path, monkeypatch) -> None:
    seen = []
    monkeypatch.setattr("probes.pipeline.run_probes", lambda settings, **_: seen.append(settings))
    main(["--tracker", "none", "--name", "short", "--target.training.steps", "1", "--probes.layers", "1,2"])
    assert seen[0].probes.layers == [1, 2]
    assert (seen[0].name, seen[0].tracker) == ("short", "none")
    assert shrink(settings_in(tmp_path, layers=[20]), Console(quiet=True)).probes.layers == []
    for name, value in {"prompts": "0", "top-p": "0", "temperature": "0", "l2": "[]", "modes": "[]"}.items():
        with pytest.raises(UserError, match=rf"probes\.{name.replace('-', '_')}"):
            main(["--target.training.steps", "1", f"--probes.{name}", value])
    with pytest.raises(UserError, match=r"nearest known key is 'probes\.temperature'"):
        main(["--probes.temprature", "1"])
    settings = settings_in(tmp_path)  # a folder in which another process works is left alone
    with alone_in(Run(settings)), pytest.raises(UserError, match="tiny"):
        run_probes(settings, Console(quiet=True))


def test_families_without_a_layer_by_layer_forward_get_probes_of_the_modes_wanted_and_no_table(tmp_path) -> None:
    settings, said = settings_in(tmp_path, modes=["greedy"]), io.StringIO()
    settings.target.architecture.model_type = "gpt2"
    added = run_probes(settings, Console(file=said, width=120))
    assert added["self_speculation"] == []
    assert {(row["mode"], row["layer"]) for row in added["probes"]} == {("greedy", 1), ("greedy", 2)}
    assert "not supported for this family" in said.getvalue()
