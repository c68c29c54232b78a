"""The report of a distillation run: ``report.json``, one HTML page, and the tables that the terminal shows."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Group

from decode.bench import plots
from decode.bench.page import Figure, Sample, Section, Table, cell, console_table, write_page
from decode.bench.report import mode
from decode.bench.statistics import plain
from decode.errors import read_json, write_text
from distill.export import model_card as card

Row = Mapping[str, Any]

DRAFTS = (
    "name", "parameters", "offline_alpha", "offline_accepted_length", "offline_alpha_greedy", "validation_alpha",
    "validation_accepted_length", "optimiser_steps", "examples", "teacher_tokens", "selected_tokens", "seconds",
)  # fmt: skip
PAIRED = ("a", "b", "label", "difference", "p_value", "n")
DECODING = (
    "draft", "temperature", "draft_length", "tokens_per_second", "speedup", "speedup_vs_generate", "predicted_speedup",
    "accepted_length", "alpha", "accepted_per_drafted", "identical_to_target",
)  # fmt: skip
ACCEPTANCE = ("name", "position", "validation", "offline", "decoded", "served")
PROFILE = ("cost_ratio", "best_draft_length", "measured_best_draft_length", "alpha", "break_even_alpha")
"""Columns of the tables; `NOT_ON_CONSOLE` are those that the terminal goes without."""
NOT_ON_CONSOLE = {"parameters", "offline_alpha_greedy", "seconds", "accepted_per_drafted"}


def write_report(run_dir: str | Path, report: Row) -> None:
    """Writes ``report.json`` and ``report.html``, each replaced only when complete.

    Args:
        run_dir: The run's folder.
        report: What `Evaluation.report` returns, with ``name`` and optionally ``settings``, ``commands`` and
            ``exported`` {length, token_map, gguf_type}; None for what was not measured.
    """
    folder = Path(run_dir)
    content = json.dumps(plain(dict(report)), indent=2, ensure_ascii=False, allow_nan=False, default=str)
    report = json.loads(content)
    write_text(folder / "report.json", content + "\n")
    title = f"{report['name']}: draft model report"
    write_page(folder / "report.html", title, headline(report), list(sections(report, folder)))


def console_tables(report: Row) -> Group:
    """Returns what the terminal shows at the end of a run."""
    tables = (
        ("Drafts", DRAFTS, report["drafts"]),
        ("\nDifferences", PAIRED, report.get("paired")),
        ("\nDecoding, each draft at its fastest length", DECODING, fastest(report["decoding"])),
    )
    shown = [
        console_table(name, [key for key in keys if key not in NOT_ON_CONSOLE], rows)
        for name, keys, rows in tables
        if rows
    ]
    return Group(*shown, f"\n{headline(report)}")


def exported(report: Row) -> str:
    """Returns the name of the exported draft."""
    return str((report.get("profile") or {}).get("draft") or "adaspec")


def fastest(rows: Iterable[Row]) -> list[Row]:
    """Returns for each temperature and draft the row with the largest speedup, by temperature, then speedup."""

    def order(row: Row) -> tuple[float, float]:
        return row["temperature"], row["speedup"] or 0

    return sorted({(r["temperature"], r["draft"]): r for r in sorted(rows, key=order)}.values(), key=order)


def headline(report: Row) -> str:
    """Returns the speed of the exported draft in one line."""
    row = card.fastest_row(report, exported(report), f"{exported(report)}-tree")
    if not row:
        return "Decoding with the exported draft was not measured."
    text = f"{row['draft']}, {row['draft_length']} tokens drafted per round, {mode(row['temperature'])}: "
    text += f"{cell(row, 'speedup')} times the speed of the same loop without a draft"
    if row.get("speedup_vs_generate"):
        text += f", {row['speedup_vs_generate']:.2f} times that of `model.generate`"
    if (same := row.get("identical_to_target")) is not None:
        text += f"; texts {'identical to' if same else 'different from'} the target's"
    return f"{text}."


def sections(report: Row, run_dir: Path) -> Iterable[Section]:
    """Returns the page of a report; parts that were not measured are left out."""
    settings = report.get("settings") or {}
    best, drawn = card.fastest_row(report, exported(report), f"{exported(report)}-tree"), figures(report)
    known = {name: value for name, value in report["target"].items() if value is not None}
    target = {f"target's {name.replace('_n', ' prompts').replace('_', ' ')}": f"{known[name]:,}" for name in known}
    speed = {"exported draft": exported(report), "tokens/s": cell(best, "tokens_per_second")}
    yield Section(facts=target | speed | {"accepted length": cell(best, "accepted_length")})
    tables = [Table(DRAFTS, report["drafts"]), Table(PAIRED, report.get("paired") or [], "Differences between drafts")]
    text = "Measured on the same texts, which the target generated for held-out prompts."
    yield Section("Drafts", text, tables=tables)
    if rows := report["decoding"]:
        tables = [Table(DECODING, fastest(rows)), Table(DECODING, rows, f"All {len(rows)} measurements", folded=True)]
        tables.append(Table(PROFILE, [report.get("profile") or {}], "Costs in target forwards of one token"))
        tables.append(Table(ACCEPTANCE, list(acceptance(report, run_dir)), "Greedy acceptance by position", True))
        text = "Each draft at its fastest draft length."
        yield Section("Decoding", text, tables=tables, figures=[drawn[key] for key in DECODING_FIGURES if key in drawn])
    if "curves" in drawn:
        yield Section("Training", figures=[drawn["curves"]])
    if samples := report.get("samples"):
        shown = [Sample(sample["tokens"], sample.get("prompt", "")) for sample in samples]
        yield Section("Samples", "The mark of a token shows which model generated it.", samples=shown)
    if export := report.get("exported"):
        draft, kind = str(run_dir / "export"), settings.get("student", {}).get("kind")
        kind = kind if kind in card.KINDS.values() else "draft"
        lines = {title: text for title, _, text in card.commands(str(run_dir / "target"), draft, kind=kind, **export)}
        yield Section("Use", f"The export is in `{draft}`.", code=lines)
    facts = {"created": report.get("created"), **(report.get("machine") or {}), **(report.get("commands") or {})}
    yield Section("Provenance", facts=facts, code={"Settings": json.dumps(settings, indent=2, ensure_ascii=False)})


def acceptance(report: Row, run_dir: Path) -> Iterable[Row]:
    """Returns the positions of each draft; of the exported one with what serve-check noted in its profile, greedy."""
    rows = read_json(run_dir / "export" / "speculation_profile.json").get("served") or []
    counted: list[list[Row]] = [row["positions"] for of in rows for row in of["rows"] if row["temperature"] == 0]
    served = {at["position"]: at.get("served") for at in max(counted, key=len, default=[])}
    for name, positions in ((report.get("analysis") or {}).get("acceptance") or {}).items():
        for at in positions:
            yield {"name": name, **at, "served": served.get(at["position"]) if name == exported(report) else None}


DECODING_FIGURES = ("speedup", "speedup_by_length", "acceptance_by_position")


def figures(report: Row) -> dict[str, Figure]:
    """Returns the plots by name; those without data are left out."""
    drafts, profile, analysis = report["drafts"], report.get("profile") or {}, report.get("analysis") or {}
    named = [name for draft in drafts for name in (draft["name"], f"{draft['name']}-tree")]
    colours = {draft["name"]: plots.COLOURS[i % len(plots.COLOURS)] for i, draft in enumerate(drafts)}
    greedy = [row for row in report["decoding"] if row["temperature"] == 0 and row["draft"] in named and row["speedup"]]
    found: dict[str, Figure] = {}

    best = [{**row, "name": f"{row['draft']}, k = {row['draft_length']}"} for row in fastest(greedy)]
    if len(best) > 1:
        found["speedup"] = (plots.speedup_bars(best[::-1], "Greedy speedup at the best draft length"), "")
    points = {
        "predicted": sorted((int(k), v) for k, v in (profile.get("predicted_speedup") or {}).items()),
        "measured": sorted(
            (row["draft_length"], row["speedup"], *(row.get("speedup_ci95") or ()))
            for row in greedy
            if row["draft"] == exported(report)
        ),
    }
    if sum(map(len, points.values())) > 1:
        axes = "draft length k (tokens)", "speedup (×)"
        caption = f"{exported(report)}, greedy. Predicted: tokens per round ÷ (c·k + v(k + 1))."
        found["speedup_by_length"] = (plots.lines(points, "Speedup by draft length", *axes, at_one=True), caption)
    if positions := analysis.get("acceptance_by_position"):
        found["acceptance_by_position"] = (plots.acceptance_by_position(positions, colours), "")
    if curves := analysis.get("curves"):
        axes = "optimiser step", "α = mean Σ min(p, q), validation"
        found["curves"] = (plots.lines(curves, "Learning curves", *axes, colours=colours), "")
    return found
