"""What was measured of several texts at once, and what is foreseen of it.

Of ``bench --batch-sizes``: ``batches`` in report.json, and a page with speedup over batch size. Of ``profile
--batch-sizes``: tables for a terminal, and what speculation_profile.json and the model card say of the forecast.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.table import Table as Grid

from decode.bench import machine, plots
from decode.bench.page import Block, Column, Facts, Figures, Heading, Page, Table, Text
from decode.bench.prediction import BatchForecast
from decode.bench.report import TABLES, by_block, console_table, drafting, markdown_table, mode, shown
from decode.bench.session import Session
from decode.bench.statistics import plain
from decode.errors import read_json, write_section, write_text

Row = Mapping[str, Any]

COLUMNS = TABLES["batch"]
SHORT = [column for column in COLUMNS if column.key not in ("seconds_per_text", "alpha")]  # for a terminal
SPEEDUP = "speedup", "Speedup by batch size", "tokens/s ÷ tokens/s without a draft (×)"
THROUGHPUT = "tokens_per_second", "Tokens per second by batch size", "Σ tokens ÷ seconds"
FAIRNESS = (
    "At batch size B a method decodes B texts at once; a finished text's place is taken by a waiting one. All methods "
    "decode the same prompts one after another; the order rotates with each repeat. transformers' generate gets "
    "batches of B, sorted by length. Intervals are 95 % bootstrap intervals over prompts and repeats. Time includes "
    "reading the prompts."
)


def write_batch_report(
    rows: Sequence[Row],
    session: Session,
    settings: Mapping[str, Any],
    folder: Path,
    notes: Mapping[str, str] | None = None,
) -> tuple[Path, Path]:
    """Write the rows into report.json, whose other keys stay, and the page batches.html."""
    path, page = folder / "report.json", folder / "batches.html"
    created = datetime.now(UTC).isoformat(timespec="seconds")
    facts = {"settings": dict(settings), "machine": session.facts(), "notes": dict(notes or {})}
    batches = {"created": created, **facts, "rows": list(rows)}
    content = read_json(path) | {"batches": batches}
    write_text(path, json.dumps(content, indent=1, ensure_ascii=False) + "\n")
    batch_page(batches).write(page)
    return path, page


def batch_page(batches: Mapping[str, Any]) -> Page:
    """The page, from the key ``batches`` of report.json."""
    headline, *others = conclusions(batches["rows"]) or [""]
    blocks: list[Block] = [Text(line) for line in others]
    for (suite, temperature), rows in by_block(batches["rows"]).items():
        blocks += [
            Heading(f"{suite}, {mode(temperature)}"),
            Figures(
                [
                    (plots.by_batch(by_method(rows), *SPEEDUP), "Bars are 95 % intervals."),
                    (plots.by_batch(by_method(rows, baselines=True), *THROUGHPUT, log_y=True), ""),
                ]
            ),
            *(
                Table(COLUMNS, some, f"batch size {size}", legend=size == rows[-1]["batch_size"])
                for size, some in by_size(rows)
            ),
        ]
    blocks += [
        Heading("How this was measured", FAIRNESS),
        *(Text(f"{name}: {note}", "warn") for name, note in batches.get("notes", {}).items()),
        Facts({"machine": machine.sentence(batches["machine"]), "threads": batches["machine"].get("note")}),
        Facts({name: value for name, value in batches["settings"].items() if value != []}),
    ]
    return Page("Decoding several texts at once", headline, "draftsmith bench", blocks)


def by_size(rows: Iterable[Row]) -> list[tuple[int, list[dict[str, Any]]]]:
    """The rows of one suite and temperature by batch size, as tables show them."""
    keys = ("ms_per_token", "ms_per_token_ci95")

    def made(row: Row) -> dict[str, Any]:
        middle, ends = row["seconds_per_token"], row["seconds_per_token_ci95"]
        values = (1e3 * middle, [1e3 * end for end in ends]) if middle is not None else (None, None)
        return shown({**row, **dict(zip(keys, values))})

    return [(size, [made(row) for row in some]) for size, some in groupby(rows, key=lambda row: row["batch_size"])]


def by_method(rows: Iterable[Row], *, baselines: bool = False) -> dict[str, list[Row]]:
    """The rows of one suite and temperature by method, those without a draft if asked for."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        if baselines or not (row["peer"] or row["method"] == "autoregressive"):
            found.setdefault(row["name"], []).append(row)
    return found


def batch_table(rows: Sequence[Row]) -> list[Grid]:
    """A table for a terminal for each suite, temperature and batch size."""
    return [
        console_table(f"{suite}, {mode(temperature)}, batch size {size}", SHORT, made)
        for (suite, temperature), some in by_block(rows).items()
        for size, made in by_size(some)
    ]


def conclusions(rows: Sequence[Row]) -> list[str]:
    """For each suite and temperature the fastest lossless method of every batch size, and where drafting loses."""
    lines = []
    for (suite, temperature), some in by_block(rows).items():
        parts, losing = [], None
        for size, of_size in by_size(some):
            if (best := next(iter(drafting(of_size, lossless=True)), None)) is not None:
                parts.append(f"{best['speedup']:.2f} × at batch {size} ({best['name']})")
                losing = None if best["speedup"] >= 1 else losing or size
        if parts:
            end = f"; drafting loses from batch {losing} on" if losing else ""
            lines.append(f"{suite}, {mode(temperature)}: " + ", ".join(parts) + end)
    return lines


FIELD = "num_speculative_tokens_per_batch_size"  # vLLM's name of the draft lengths by batch size
CARD = ("texts at once", "draft length", "predicted speedup", "tokens/s", "tokens/s without")
WIDE = 8  # most draft lengths in the terminal's table


def forecast_tables(forecast: BatchForecast) -> Iterator[Grid | str]:
    """Costs and best lengths by batch size, speedups by draft length, the verdict, and what vLLM takes."""
    rows = forecast.rows()
    more = [
        row | {"ms": 1e3 * row["target_seconds"], "v2": cost.v(2), "v5": cost.v(5)}
        for row, cost in zip(rows, forecast.costs)
    ]
    yield console_table("\nby batch size", TABLES["forecast"], more)
    lengths = [row["draft_length"] for row in rows[0]["draft_lengths"]]
    chosen = sorted(
        {
            *lengths[: WIDE // 2],
            *lengths[:: max(1, len(lengths) // (WIDE // 2))],
            *(row["best_draft_length"] for row in rows),
        }
        - {0}
    )
    yield console_table(
        "\npredicted speedup by draft length",
        [Column("batch_size", "batch", format="d"), *(Column(str(k), f"k = {k}", format=".2f") for k in chosen)],
        [
            {"batch_size": row["batch_size"]}
            | {str(at["draft_length"]): at["predicted_speedup"] for at in row["draft_lengths"]}
            for row in rows
        ],
    )
    yield (
        "[dim]c(B), v(nB): a forward of the draft over B tokens, of the target over n·B, in target forwards over B "
        "tokens; b: bookkeeping of a round without a draft, o: of a speculative round beyond it.\n"
        "speedup: tokens per round and text · (1 + b) / (k·c(B) + v((k+1)·B) + o + b)"
    )
    yield f"\n[bold]{forecast.verdict()}"
    yield f'vLLM: "{FIELD}": {json.dumps(forecast.schedule())}'.replace("[", r"\[")


def record_forecast(forecast: BatchForecast, draft: Path, machine: Mapping[str, Any]) -> list[Path]:
    """Write the forecast into the draft's speculation_profile.json and model card, where there are any.

    Draft lengths above the profile's ``num_speculative_tokens`` are none that vLLM takes, and are not written.

    Returns:
        The files written.
    """
    path, card = draft / "speculation_profile.json", draft / "README.md"
    content = read_json(path)
    if not content:
        return []
    longest = content.get("num_speculative_tokens")
    found = plain(forecast.to_dict(longest)) | {"batch_size_conditions": dict(machine)}
    write_text(path, json.dumps(content | found, indent=2, ensure_ascii=False) + "\n")
    if not card.is_file():
        return [path]
    write_section(card, "batches", card_section(forecast, longest, machine))
    return [path, card]


def card_section(forecast: BatchForecast, longest: int | None, machine: Mapping[str, Any]) -> str:
    """The card's section of draft lengths by batch size, as Markdown."""
    lines = [
        "## Several texts at once",
        "",
        "Predicted from the costs of forwards and the acceptance measured on one machine"
        f" ({machine.get('accelerator') or machine.get('cpu')}, {machine.get('threads')} threads); measure yours with "
        "`python -m decode profile --batch-sizes 1,2,4,8`.",
        "",
    ]
    cells = []
    for row in forecast.rows():
        speedups = forecast.speedups(row["batch_size"], longest)
        best = forecast.best(row["batch_size"], longest)
        speedup, without = speedups.get(best, 1.0), row["goodput_without_draft"]
        numbers = f"{speedup:.2f}", f"{speedup * without:.0f}", f"{without:.0f}"
        cells.append([str(row["batch_size"]), str(best), *numbers])
    lines.append(markdown_table(CARD, cells))
    lines += ["", "vLLM takes these lengths in its `--speculative-config`:", "", "```json"]
    lines += [json.dumps({FIELD: forecast.schedule(longest)})[1:-1], "```"]
    return "\n".join(lines)
