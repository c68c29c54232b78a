"""Every file in ``configs/``: read, checked, and run through with tiny random models of its families, without network.

Every file is read and checked. So many of them are run that every value that a file states and that decides which path
a run takes (a family, a kind of rows, a method, a kind of training; not a number) is in one of them; `python -m
distill|probes --config FILE --dry-run` runs any other.
"""

from __future__ import annotations

from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from decode.bench.datasets import PRESETS
from decode.commands import bench as compare
from decode.commands.parsing import parse, read_config
from decode.commands.settings import BenchSettings, bench_settings
from decode.models.loading import family_of
from distill.__main__ import FOREIGN
from distill.config.run import Settings
from distill.data.context import StageContext
from distill.dry_run import shrink as shrink_run
from distill.pipeline import complete_settings
from distill.run_stages import run_stages
from distill.stages import run_of
from probes.pipeline import run_probes
from probes.settings import ProbesSettings
from probes.settings import shrink as shrink_probes

ROOT = Path(__file__).parents[3] / "configs"
CONFIGS = sorted(ROOT.rglob("*.yaml"))
MACHINE = ("device", "dtype", "device_map", "threads", "name", "output", "output_dir")


@cache
def sections(path: Path) -> tuple[str, dict[str, Any]]:
    """The command that the file is for, and what it says to it."""
    content = read_config([path])
    if "drafts" in content:
        return "distill", {key: value for key, value in content.items() if key not in FOREIGN}
    if "probes" in content:
        return "probes", {key: value for key, value in content.items() if key != "bench"}
    return "bench", content.get("bench", {})


@cache
def load(path: Path) -> Settings | ProbesSettings | BenchSettings:
    """The settings of that command."""
    command, argv = sections(path)[0], ["--config", str(path)]
    if command == "distill":
        return parse(Settings, argv, prog="distill", description="", foreign=FOREIGN)
    if command == "probes":
        return parse(ProbesSettings, argv, prog="probes", description="", foreign={"bench"})
    return bench_settings(argv)


def placed(path: Path, folder: Path) -> Settings | ProbesSettings | BenchSettings:
    """The same, with its results in another folder and nothing tracked."""
    settings = deepcopy(load(path))
    if isinstance(settings, BenchSettings):
        settings.output = str(folder / str(settings.output))
    else:
        settings.output_dir, settings.tracker.kind = str(folder), "none"
    return settings


def features(value: Any, key: str) -> set[str]:
    """What decides the path that a run takes: no numbers, families for models, kinds of rows for data sets."""
    if isinstance(value, dict):
        return {found for k, v in value.items() if k not in MACHINE for found in features(v, f"{key}.{k}")}
    if isinstance(value, list):
        return {found for v in value for found in features(v, key)}
    if value is None or (isinstance(value, int | float) and not isinstance(value, bool)):
        return set()
    if isinstance(value, str) and "/" in value and "{" not in value:
        return {f"{key}={family_of(value)[:2]}"}
    name = value.split(":")[0] if isinstance(value, str) else value
    if name in PRESETS:  # the rows of every preset are read in test_dry_run
        name = PRESETS[name].kind
    return {f"{key}={name}"}


def covering() -> list[Path]:
    """Few files that have every feature of all that are trained."""
    found = {path: features(*reversed(sections(path))) for path in CONFIGS if sections(path)[0] != "bench"}
    chosen: list[Path] = []
    seen: set[str] = set()
    while seen != set().union(*found.values()):
        chosen.append(max(found, key=lambda path: len(found[path] - seen)))
        seen |= found[chosen[-1]]
    return chosen


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever asks the network fails at once."""
    monkeypatch.setattr("socket.socket.connect", lambda *_: pytest.fail("the network was used"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: str(p.relative_to(ROOT)))
def test_every_file_is_read_and_belongs_to_a_command(path: Path) -> None:
    settings = load(path)
    if isinstance(settings, BenchSettings):
        assert settings.target
        compare.check_methods(settings, settings.methods, has_draft=bool(settings.draft), has_corpus=True)
    else:
        settings.validate()


@pytest.mark.parametrize("path", covering(), ids=lambda p: str(p.relative_to(ROOT)))
def test_files_with_all_that_any_file_asks_for_run_through(path: Path, tmp_path: Path) -> None:
    settings, quiet = placed(path, tmp_path), Console(quiet=True)
    assert not isinstance(settings, BenchSettings)
    if isinstance(settings, ProbesSettings):
        report = run_probes(shrink_probes(settings, quiet), quiet)
        assert report["probes"]
    else:
        run = shrink_run(settings, quiet)
        complete_settings(run, quiet)
        ran = run_stages(StageContext(run, run_of(run), quiet))
        assert ran == ["target", "initial", *(draft.name for draft in run.drafts)]
