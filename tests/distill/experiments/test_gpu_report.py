"""``gpu-report``: the page with all parts, a part that fails, and a machine without a GPU."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from decode.bench import costs
from decode.errors import UserError
from distill.__main__ import main
from distill.experiments import gpu_report
from distill.experiments.gpu_report import GpuReportSettings, Row, pytest_rows

TINY = ["gpu-report", "--device", "cpu", "--scale", "tiny"]


def breaks(settings: GpuReportSettings) -> Iterator[Row]:
    yield {"test": "one", "result": "measured before the error"}
    raise RuntimeError("first line\nno kernel for this card")


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts have no process of their own, whose start takes seconds, and measure little."""
    monkeypatch.setattr(gpu_report, "ProcessPoolExecutor", lambda count, context: ThreadPoolExecutor(count))
    monkeypatch.setattr(costs, "MOST_SECONDS", 0.0)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def test_a_page_has_every_part_and_the_error_of_one_that_fails(
    tmp_path: Path, in_this_process: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(gpu_report.PARTS, "Tests", (breaks, "About."))
    monkeypatch.setattr(gpu_report, "BATCHES", (1, 2))
    with pytest.raises(UserError, match=r"1 of 5 parts failed: Tests; .*gpu.md says why"):
        main([*TINY, "--output", str(tmp_path / "gpu.md")])
    page = (tmp_path / "gpu.md").read_text()
    assert [path.name for path in tmp_path.iterdir()] == ["gpu.md"]
    assert torch.__version__ in page
    tests, drafts, heads, loss, decoding = re.split(r"^## .*$", page, flags=re.MULTILINE)[1:]
    assert "| one | measured before the error |" in tests
    assert "**Failed**: no kernel for this card" in tests
    assert page.count("**Failed**") == 1
    for name in ("AdaSPEC, Trainer", "AdaSPEC, draftsmith"):
        assert re.search(rf"\| {name} \| [\d,]+ \| \d+\.\d% \|", drafts)
    assert re.findall(r"^\| (\w+), 7 tokens deep \| [\d,]+ \| \d+\.\d% \|", heads, re.MULTILINE) == ["eagle3", "dspark"]
    assert re.findall(r"^\| 64 × 512, (.*?) \| \d+\.\d\d \|", loss, re.MULTILINE) == ["in chunks", "whole logits"]
    assert re.findall(r"^\| (\S.*?) \| (\d+) \| ", decoding, re.MULTILINE) == [
        (draft, batch) for draft in ("Qwen3-0.6B", "EAGLE-3 head") for batch in "12"
    ]


def test_the_tests_that_failed_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tests" / "gpu").mkdir(parents=True)
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = -q\nmarkers =\n    gpu: needs a GPU\n")
    (tmp_path / "tests" / "gpu" / "test_it.py").write_text(
        "import pytest\npytestmark = pytest.mark.gpu\n"
        "def test_good(): pass\n"
        "def test_bad(): raise ValueError('wrong device')\n"
    )
    monkeypatch.chdir(tmp_path)
    rows = list[Row]()
    with pytest.raises(UserError, match="pytest ended with status 1"):
        rows.extend(row for row in pytest_rows(GpuReportSettings(device="cpu")))
    assert "1 failed, 1 passed" in rows[0]["result"]
    assert rows[1] == {"test": "tests/gpu/test_it.py::test_bad", "result": "ValueError: wrong device"}


def test_without_a_gpu_one_line_says_so_and_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as ended:
        main(["gpu-report", "--output", str(tmp_path / "gpu.md")])
    assert ended.value.code == 1
    assert capsys.readouterr().err.splitlines() == [
        "gpu-report needs a CUDA device, and PyTorch finds none here: nothing was measured"
    ]
    assert not list(tmp_path.iterdir())
