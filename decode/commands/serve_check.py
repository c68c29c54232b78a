"""``python -m decode serve-check``: a draft in a real engine, its acceptance as counted beside the predicted one."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from decode.bench import machine
from decode.bench.session import Session
from decode.bench.statistics import plain
from decode.commands.checks import check_models, measure_options, open_pair, open_suites, told_chat, use_chat
from decode.commands.settings import ServeCheckSettings, required
from decode.engines.gap_causes import Cause
from decode.engines.gguf import convert
from decode.engines.launch import COMMANDS, check_engine
from decode.engines.serve_check import CheckOptions, serve_check, time_untrained_draft, write_untrained_draft
from decode.engines.settings import EngineSettings
from decode.errors import UserError, choose, read_json, scratch_folder, write_section, write_text
from decode.models.heads import FeatureHead
from decode.models.loading import stop_ids
from decode.progress import output_console

COLUMNS = {
    "T": "temperature:g", "drafted": "draft_length:d", "accepted length": "served_length:.2f",
    "±": "served_length_se:.2f", "predicted": "predicted_length:.2f", "tokens/s": "tokens_per_second:.1f",
    "without draft": "plain_tokens_per_second:.1f", "speedup": "speedup:.2f", "identical texts": "identical_share:.0%",
    "texts": "texts:d",
}  # fmt: skip
"""Columns of the table, each with the field of a row and its format."""
FORMULA = "accepted length: 1 + Σ accepted / Σ rounds, one request at a time, as the engine counts it and as predicted"


def run(settings: ServeCheckSettings) -> None:
    """Check the pair of the settings in the engine, print what was found, and record it in the draft's folder."""
    check(settings)
    console = Console(stderr=True)
    with scratch_folder() as untrained:
        if settings.draft_shape is not None:
            count = write_untrained_draft(untrained, str(settings.target), settings.draft_shape, settings.seed)
            settings = dataclasses.replace(settings, draft=str(untrained))
        pair = open_pair(settings, settings.draft)
        assert pair.draft is not None
        chat = use_chat(settings, pair.tokenizer)
        if told := told_chat(settings, chat):
            console.print(told, soft_wrap=True)
        suites = open_suites(settings.suite, limit=settings.limit, seed=settings.seed, split=settings.split)
        session = Session(pair.target, {"draft": pair.draft}, pair.tokenizer, measure_options(settings, chat=chat))
        items = [item for suite in suites for item in session.items(suite)]
        head = pair.draft if isinstance(pair.draft, FeatureHead) else None
        method = "draft_model" if head is None else "eagle3" if head.version == 3 else "eagle"
        dtype = str(pair.target.dtype).removeprefix("torch.")  # as in the prediction
        names = ("draft_lengths", "temperatures", "max_new_tokens", "seed")
        options = CheckOptions(**{name: getattr(settings, name) for name in names}, chat=chat)
        with console.status("starting") as status, engine_files(settings, head is not None) as files:
            engine = engine_settings(settings, *files, method=method, dtype=dtype)
            if settings.draft_shape is not None:
                rows = plain(time_untrained_draft(settings.engine, engine, items, options, status.update))
            else:
                checked = serve_check(
                    settings.engine, engine, pair.target, pair.draft, items,
                    sorted(stop_ids(pair.target, pair.tokenizer)), options, status.update,
                    (str(settings.target), str(settings.draft)),
                )  # fmt: skip
    if settings.draft_shape is not None:
        result = {"draft_shape": settings.draft_shape, "parameters": count, "rows": rows}
        return print(json.dumps(result)) if settings.json else show_untrained(result, settings.engine)
    facts = {"suite": settings.suite, "machine": machine.describe(session.runner.device)}
    result = plain(dataclasses.asdict(checked) | facts)
    for path in record(result, Path(str(settings.draft)), Path(settings.output) if settings.output else None):
        console.print(f"[dim]wrote {path}")
    print(json.dumps(result, ensure_ascii=False)) if settings.json else show(checked.rows, checked.causes)


def check(settings: ServeCheckSettings) -> None:
    """Refuse what is known to fail before anything is loaded."""
    check_models(settings)
    required(settings, "target", *([] if settings.draft_shape else ["draft"]))
    choose("engine", settings.engine, COMMANDS)
    if settings.url is None:
        check_engine(settings.engine, engine_settings(settings, "", ""))
    elif len(settings.draft_lengths) != 1 or settings.draft_shape:
        raise UserError("a server that runs already drafts one length; give it alone, such as --draft-lengths 5")


@contextmanager
def engine_files(settings: ServeCheckSettings, head: bool) -> Iterator[tuple[str, str]]:
    """Target and draft as the engine reads them: for llama.cpp, GGUF files, converted where they are not there yet."""
    files = {
        "target": settings.engine_target or str(settings.target),
        "draft": settings.engine_draft or str(settings.draft),
    }
    if settings.engine == "llama.cpp" and settings.url is None:
        exported = Path(files["draft"]) / "gguf"
        with scratch_folder() as folder:
            for name, path in files.items():
                made = exported / f"{name}-{settings.gguf_type}.gguf"
                if made.is_file() and not (name == "target" and settings.engine_target):
                    files[name] = str(made)
                elif Path(path).suffix != ".gguf":
                    of = str(settings.target) if name == "draft" and head else None
                    files[name] = str(convert(path, folder / made.name, settings.gguf_type, target=of))
            yield files["target"], files["draft"]
    else:
        yield files["target"], files["draft"]


def engine_settings(settings: ServeCheckSettings, target: str, draft: str, **more: Any) -> EngineSettings:
    """How the engine is started."""
    names = ("python", "binary", "url", "port", "threads", "draft_sampling")
    shared = {name: getattr(settings, name) for name in names}
    limits = {"seconds": settings.timeout, "request_seconds": settings.request_timeout}
    return EngineSettings(target, draft, **shared | limits | more)


def show_untrained(result: Mapping[str, Any], engine: str) -> None:
    """Print the speedups of an untrained draft."""
    table = Table("drafted", "acceptance rate", "tokens/round", "speedup", box=None)
    for row in result["rows"]:
        low, high = row["speedup_ci95"]
        speed = f"{row['speedup']:.2f} [{low:.2f}, {high:.2f}]"
        table.add_row(str(row["draft_length"]), f"{row['acceptance']:g}", f"{row['tokens_per_round']:.2f}", speed)
    console = output_console(highlight=False)
    console.print(f"an untrained draft of {result['draft_shape']} ({result['parameters']:,} parameters) in {engine}")
    console.print(table)


def cells(row: Mapping[str, Any]) -> list[str]:
    """A row's cells in the order of `COLUMNS`; empty where there is no value."""
    keys = (column.partition(":") for column in COLUMNS.values())
    return ["" if row[key] is None else format(row[key], form) for key, _, form in keys]


def show(rows: Sequence[Mapping[str, Any]], causes: Sequence[Cause]) -> None:
    """Print the tables and the causes."""
    console = output_console(width=150, highlight=False)
    table = Table(*COLUMNS, box=None, pad_edge=False)
    for row in rows:
        table.add_row(*cells(row), style="" if row["fits"] else "yellow")
    console.print(table)
    console.print(f"[dim]{FORMULA}")
    console.print("\nShare of rounds that accept each draft position: served / predicted", style="bold")
    for row in rows:
        marginals = (
            f"{at['served_marginal']:.3f}/{at['predicted_marginal']:.3f}{'' if at['within'] else '!'}"
            for at in row["positions"]
        )
        console.print(f"T {row['temperature']:g}, k {row['draft_length']}: {'  '.join(marginals)}", soft_wrap=True)
    console.print("[dim]! more than two standard errors apart")
    apart = sum(not row["fits"] for row in rows)
    if not causes:
        verdict = f"differ in {apart} rows, for no known cause" if apart else "agree"
        console.print(f"\nServed and predicted accepted lengths {verdict}.", style="yellow" if apart else "green")
    for cause in causes:
        console.print(f"\n[bold yellow]{cause.name}[/]: {cause.evidence}.\n  Next: {cause.remedy}.", soft_wrap=True)


def record(result: Mapping[str, Any], draft: Path, run: Path | None) -> list[Path]:
    """Put a check in place of earlier ones of its engine.

    Args:
        result: a `decode.engines.serve_check.Check` as a dictionary, ready for JSON.
        draft: the draft's folder, whose speculation_profile.json and model card get it.
        run: a run's folder, whose report.json gets it.

    Returns:
        The files written.
    """
    written = []
    profile, card = draft / "speculation_profile.json", draft / "README.md"
    for path in (profile, *([run / "report.json"] if run else [])):
        if content := read_json(path):
            kept = [other for other in content.get("served") or [] if other.get("engine") != result["engine"]]
            content["served"] = [*kept, dict(result)]
            write_text(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")
            written.append(path)
    if card.is_file() and profile in written:
        lines = ["## Served", "", f"| engine | {' | '.join(COLUMNS)} |", f"| --- {'| ---: ' * len(COLUMNS)}|"]
        for served in read_json(profile)["served"]:
            lines += [f"| {served['engine']} | {' | '.join(cells(row))} |" for row in served["rows"]]
        write_section(card, "served", "\n".join([*lines, "", f"{FORMULA}."]))
        written.append(card)
    return written
