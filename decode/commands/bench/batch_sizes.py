"""``python -m decode bench --batch-sizes``: the methods compared on several texts at once."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from decode.commands.bench.settings import BenchSettings
from decode.commands.settings_checks import open_suites
from decode.core.progress import output_console, working
from decode.measure.bench.compare_batch_sizes import FILLED, BatchBenchmark
from decode.measure.bench.method_entries import BenchEntry
from decode.measure.bench.session import Session
from decode.measure.bench.transformers_baselines import TRANSFORMERS_BASELINES
from decode.prompts.prompt_suites import Suite
from decode.report.batch_report import batch_table, conclusions, write_batch_report

METHODS = ("vanilla", "cost-optimal")  # what is compared with the loop without a draft where no method is asked for
LENGTHS = (1, 2, 4, 8)  # draft lengths where none are given


def with_defaults(settings: BenchSettings) -> BenchSettings:
    """The settings with methods and draft lengths for batches where they were left open."""
    methods = settings.methods or ["autoregressive", *(METHODS if settings.draft else ())]
    lengths = settings.draft_lengths or list(LENGTHS)
    return dataclasses.replace(settings, methods=methods, draft_lengths=lengths, peers=False)


def enough_prompts(settings: BenchSettings) -> list[Suite]:
    """The suites with as many prompts as the largest batch needs."""
    limit = None if settings.limit is None else max(settings.limit, FILLED * max(settings.batch_sizes))
    return open_suites(settings.suite, limit=limit, seed=settings.seed, split=settings.split)


def measure(
    session: Session,
    settings: BenchSettings,
    suites: Sequence[Suite],
    entries: Sequence[BenchEntry],
    folder: Path | None,
) -> list[dict[str, Any]]:
    """Measure; where there is a folder, print the tables and write the report, also after Ctrl-C.

    Raises:
        UserError: a draft is missing, no prompt fits, or a model decodes one text at a time only.
    """
    bench = BatchBenchmark(session)
    if folder is None:
        return bench.run(suites, entries, settings.batch_sizes, prompts=settings.limit)
    console = output_console()
    left_out = {e.label for e in entries if e.method in TRANSFORMERS_BASELINES and e.method != "generate"}
    if left_out:
        console.print(f"{', '.join(sorted(left_out))}: transformers decodes one text at a time with these; left out")
    try:
        with working(console, "texts together"):
            bench.run(suites, entries, settings.batch_sizes, prompts=settings.limit)
    finally:
        if bench.rows:
            notes = session.notes(suites)
            files = write_batch_report(bench.rows, session, dataclasses.asdict(settings), folder, notes)
            for table in batch_table(bench.rows):
                console.print(table)
            told = [f"{name}: {note}" for name, note in notes.items()]
            for line in filter(None, [*conclusions(bench.rows), *told, session.load.warning()]):
                console.print(line, soft_wrap=True)
            console.print("wrote " + " and ".join(map(str, files)), soft_wrap=True)
    return bench.rows
