"""Where files cannot be written: one line, status 2, and nothing half-written. The failures are real ones."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from pairs import save_pair

from decode.__main__ import main

ROOT = Path(__file__).parents[3]
FULL = "/dev/full"


@pytest.fixture(scope="module")
def folder(tiny, tmp_path_factory):
    return save_pair(tmp_path_factory.mktemp("pair"), tiny)


@pytest.mark.skipif(not os.path.exists(FULL), reason="needs /dev/full")
def test_standard_output_on_a_full_disk(folder):
    with open(FULL, "w") as full:
        command = ["-m", "decode", "generate", "--target", str(folder / "target"), "--prompt", "a", "--json"]
        done = subprocess.run([sys.executable, *command], cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 2
    assert "No space left on device" in done.stderr.splitlines()[-1]


def test_a_limit_on_file_sizes_leaves_nothing_half_written_and_the_next_run_goes_through(folder, tmp_path):
    own = tmp_path / "own.txt"
    own.write_text("".join(f"Tom has {n} apples and buys {n * n} more.\n" for n in range(2000)))
    out = tmp_path / "store"
    command = ["datastore", "build", "--tokenizer", str(folder / "target"), "--input", str(own), "--output", str(out)]

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, resource.RLIM_INFINITY))

    failed = subprocess.run(
        [sys.executable, "-m", "decode", *command], cwd=ROOT, preexec_fn=limited, text=True, capture_output=True
    )
    assert failed.returncode == 2, failed.stderr
    assert "ulimit -f" in failed.stderr.splitlines()[-1]
    assert "Traceback" not in failed.stderr
    assert not [file for file in out.rglob("*") if file.suffix == ".safetensors"]
    assert main(command) == 0


@pytest.mark.parametrize("occupied", ["here", "here/below"])
def test_a_benchmark_whose_output_cannot_be_written_is_refused_before_models_are_loaded(
    folder, tmp_path, capsys, monkeypatch, occupied
):
    monkeypatch.setattr("decode.models.loading.load_model", lambda *_, **__: pytest.fail("loaded a model"))
    (tmp_path / "here").write_text("a file")
    argv = ["bench", "--target", str(folder / "target"), "--suite", "open", "--methods", "prompt-lookup"]
    assert main([*argv, "--output", str(tmp_path / occupied)]) == 2
    assert "choose another output" in capsys.readouterr().err


def test_chat_without_a_template_is_refused_before_models_are_loaded(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("decode.models.loading.load_model", lambda *_, **__: pytest.fail("loaded a model"))
    bare = tmp_path / "bare"
    bare.mkdir()
    for file in (folder / "target").iterdir():
        if file.name != "chat_template.jinja":
            (bare / file.name).write_bytes(file.read_bytes())
    content = json.loads((bare / "tokenizer_config.json").read_text())
    content.pop("chat_template", None)
    (bare / "tokenizer_config.json").write_text(json.dumps(content))
    argv = ["bench", "--target", str(bare), "--suite", "open", "--methods", "prompt-lookup", "--chat"]
    assert main([*argv, "--output", str(tmp_path / "out")]) == 2
    assert "no chat template" in capsys.readouterr().err
