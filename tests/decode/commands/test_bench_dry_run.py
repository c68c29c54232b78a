"""``bench --dry-run``: benchmarks in miniature, without network, with everything they need made on the spot."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from heads import make_head

from decode.__main__ import main
from decode.bench.datasets import PRESETS
from decode.bench.suites import load_suite
from decode.commands.dry_run import preset_row, shrink, write_rows
from decode.commands.settings import BenchSettings
from decode.errors import UserError
from decode.models.heads import save_head
from decode.models.shapes import family_of


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever asks the network fails at once."""
    monkeypatch.setattr("socket.socket.connect", lambda *_: pytest.fail("the network was used"))


def test_a_benchmark_of_models_suites_stores_and_probes_that_are_not_here_runs_through(tmp_path, capsys):
    config = tmp_path / "c.yaml"
    bench = {
        "target": "Qwen/Qwen2.5-72B-Instruct",
        "draft": ["Qwen/Qwen2.5-7B-Instruct"],
        "methods": ["vanilla:draft_length=3", "adaptix:texts=4000:order=2", "rest", "adaspeed-probe:exit_layer=5"],
        "suite": ["mt_bench", "gsm8k"],
        "corpus": ["ultrachat", "missing.txt"],
        "probes": "runs/none/probes",
        "baselines": False,
        "chat": True,
        "output": str(tmp_path / "out"),
    }
    config.write_text(yaml.safe_dump({"bench": bench}))
    assert main(["bench", "--config", str(config), "--dry-run"]) == 0
    told = capsys.readouterr().out
    assert "a tiny qwen2 stands for it" in told
    assert not (tmp_path / "out").exists()
    report = json.loads((tmp_path / "out-dry-run/report.json").read_text())
    ran = {row["name"]: row for row in report["methods"] if row["suite"] == "gsm8k"}
    assert {"vanilla draft_length=3", "adaptix texts=24 order=2", "rest", "adaspeed-probe exit_layer=5"} < set(ran)
    assert ran["vanilla draft_length=3"]["draft_length"] == 3
    assert all(row["identical_to_target"] for row in ran.values())


def test_what_cannot_be_measured_is_refused_before_anything_is_made(tmp_path):
    with pytest.raises(UserError, match="--target is missing"):
        shrink(BenchSettings(output=str(tmp_path / "x")))
    with pytest.raises(UserError, match="did you mean 'beta'"):
        shrink(BenchSettings(target="t", methods=["ears:bet=1"], output=str(tmp_path / "x")))


@pytest.mark.parametrize("source", [name for name in PRESETS if name != "arithmetic"])
def test_stand_in_rows_can_be_read_as_every_suite_and_split(source, tmp_path):
    files = write_rows(tmp_path, source, lambda *problem: preset_row(source, *problem))
    for split in ("train", "test"):
        suite = load_suite(f"{source}={files[split]}", split=split, limit=2)
        assert len(suite.prompts) == 2
        assert suite.prompts[0].text


@pytest.mark.parametrize(
    ("name", "family", "grouped"),
    [
        ("meta-llama/Llama-3.1-70B-Instruct", "llama", True),
        ("lmsys/vicuna-13b-v1.3", "llama", False),
        ("Qwen/Qwen3-32B", "qwen3", True),
        ("EleutherAI/pythia-31m", "gpt_neox", False),
        ("Salesforce/codegen-350M-mono", "codegen", False),
        ("microsoft/phi-2", "phi", False),
        ("facebook/layerskip-llama3.2-1B", "llama", True),
    ],
)
def test_the_papers_models_are_known_by_name(name, family, grouped):
    assert family_of(name)[:2] == (family, grouped)


def test_a_model_on_this_machine_tells_its_own_family(tmp_path):
    (Path(tmp_path) / "config.json").write_text(
        '{"model_type": "gpt_neox", "num_attention_heads": 4, "hidden_size": 8}'
    )
    assert family_of(str(tmp_path)) == ("gpt_neox", False, "")


def test_a_feature_head_is_stood_in_for_by_one(tiny, tmp_path, capsys):
    save_head(make_head(tiny("llama"), 3), tmp_path)
    options = ["--target", "Qwen/Qwen2.5-72B-Instruct", "--draft", str(tmp_path), "--output", str(tmp_path / "out")]
    assert main(["bench", *options, "--methods", "eagle,eagle-tree", "--no-baselines", "--dry-run"]) == 0
    rows = json.loads((tmp_path / "out-dry-run/report.json").read_text())["methods"]
    assert {"eagle", "eagle-tree"} <= {row["name"] for row in rows}
