"""``python -m probes --dry-run``: the whole experiment in miniature, with a tiny random target and no network."""

from __future__ import annotations

from rich.console import Console

from distill.pipeline.dry_run import shrink as shrink_run
from probes.settings import Settings


def shrink(settings: Settings, console: Console | None = None) -> Settings:
    """Settings of the same experiment in miniature, under ``<name>-dry-run`` (see `distill.pipeline.dry_run`).

    Raises:
        UserError: the settings are refused as they are.
    """
    small = shrink_run(settings, console, untie=True)
    assert isinstance(small, Settings)
    probes = small.probes
    probes.layers = []  # those of the tiny target
    probes.draft = probes.draft and small.initial.model
    probes.prompts, probes.validation_prompts, probes.test_prompts = 16, 8, 8
    probes.max_new_tokens, probes.positions, probes.batch_size = 12, None, 8
    probes.max_epochs, probes.window, probes.thresholds = 2, 4, probes.thresholds[:2]
    probes.confirm, probes.bench_prompts, probes.repeats, probes.threads = 1, 2, 1, 1
    probes.subset_prompts = min(probes.subset_prompts, 2)
    return small
