"""The forecast by batch size: tables for a terminal, and what speculation_profile.json and the model card say of it."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.table import Table

from decode.core.files import read_json, write_section, write_text
from decode.measure.batch_forecast import BatchForecast
from decode.measure.statistics import plain
from decode.report.page import Column
from decode.report.tables import TABLES, console_table

FIELD = "num_speculative_tokens_per_batch_size"  # vLLM's name of the draft lengths by batch size
WIDE = 8  # most draft lengths in the terminal's table


def forecast_tables(forecast: BatchForecast) -> Iterator[Table | str]:
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
        "| texts at once | draft length | predicted speedup | tokens/s | tokens/s without |",
        "| ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in forecast.rows():
        speedups = forecast.speedups(row["batch_size"], longest)
        best = forecast.best(row["batch_size"], longest)
        speedup, without = speedups.get(best, 1.0), row["goodput_without_draft"]
        lines.append(f"| {row['batch_size']} | {best} | {speedup:.2f} | {speedup * without:.0f} | {without:.0f} |")
    lines += ["", "vLLM takes these lengths in its `--speculative-config`:", "", "```json"]
    lines += [json.dumps({FIELD: forecast.schedule(longest)})[1:-1], "```"]
    return "\n".join(lines)
