"""Every file in ``configs/`` is read and checked; `python -m distill|probes --config FILE --dry-run` runs any of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from decode.commands import bench as compare
from decode.commands.parsing import parse, read_config
from decode.commands.settings import bench_settings
from distill.__main__ import FOREIGN
from distill.ablation import AblateSettings
from distill.config import Settings
from probes.settings import ProbesSettings

ROOT = Path(__file__).parents[3] / "configs"


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.yaml")), ids=lambda path: str(path.relative_to(ROOT)))
def test_every_file_is_read_by_its_commands(path: Path) -> None:
    content, argv = read_config([path]), ["--config", str(path)]
    commands = {"ablation": AblateSettings, "drafts": Settings, "probes": ProbesSettings}
    for section in commands.keys() & content.keys():
        parse(commands[section], argv, prog="", foreign=FOREIGN - {section}).validate()
    if not commands.keys() & content.keys() or "bench" in content:
        settings = bench_settings(argv)
        assert settings.target
        compare.check_methods(
            settings, settings.methods, has_draft="drafts" in content or bool(settings.draft), has_corpus=True
        )
