"""The report of a distillation run: ``report.json``, one HTML page, and the tables that the terminal shows."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich.console import Group

from decode.files import read_json, write_text
from decode.measure import plots
from decode.measure.machine import conditions, doubt
from decode.measure.report import (
    Figure,
    Row,
    Section,
    Table,
    by_length,
    cell,
    console_table,
    mode,
    without_constants,
    write_page,
)
from decode.measure.statistics import plain
from distill.export import card

DRAFTS = (
    "name", "offline_alpha", "speedup", "speedup_vs_exported", "accepted_length", "draft_length", "speedup_vs_generate",
    "difference", "significance",
)  # fmt: skip
TRAINING = (
    "name", "parameters", "offline_accepted_length", "offline_alpha_greedy", "validation_alpha",
    "validation_accepted_length", "optimiser_steps", "examples", "teacher_tokens", "selected_tokens", "seconds",
)  # fmt: skip
DECODING = (
    "draft", "temperature", "draft_length", "tokens_per_second", "speedup", "speedup_vs_generate", "predicted_speedup",
    "accepted_length", "alpha", "accepted_per_drafted", "identical_to_target",
)  # fmt: skip
ACCEPTANCE = ("position", "validation", "offline", "decoded", "served")
PROFILE = ("cost_ratio", "best_draft_length", "alpha", "break_even_alpha")
"""Columns of the tables."""
LEGEND = "Δα: difference to the exported draft. *** p < 0.001, ** p < 0.01, * p < 0.05, n.s. not significant. \
Drafts cannot be told apart in speed where the interval beside `vs exported` holds 1."
FIRST_SCREEN = ("speedup", "acceptance_by_position")
SAME: dict[Any, str] = {True: "✓ Output identical to the target's.", False: "✗ Output differs from the target's."}


def write_report(run_dir: str | Path, report: Row) -> None:
    """Writes ``report.json`` and ``report.html``, each replaced only when complete.

    Args:
        run_dir: The run's folder.
        report: What `Evaluation.report` returns, with ``name``, ``settings``, ``commands`` and optionally ``exported``
            (see `exported_facts`); None for what was not measured.
    """
    folder = Path(run_dir)
    content = json.dumps(plain(dict(report)), indent=2, ensure_ascii=False, allow_nan=False, default=str)
    report = json.loads(content)
    write_text(folder / "report.json", content + "\n")
    title = f"{report['name']}: draft model report"
    write_page(folder / "report.html", title, opening(report)[0], list(sections(report, folder)))


def console_tables(report: Row) -> Group:
    """Returns what the terminal shows at the end of a run."""
    text, cards, same = opening(report)
    lines = [f"{value} {label}" for value, label in cards[1:]]
    table = console_table("Drafts", DRAFTS, draft_rows(report))
    return Group(table, LEGEND, f"\n{text}", *lines, same)


def exported(report: Row) -> str:
    """Returns the name of the exported draft."""
    return str(report["profile"]["draft"])


def fastest(rows: Iterable[Row]) -> list[Row]:
    """Returns for each temperature and draft the row with the largest speedup, by temperature, then speedup."""

    def order(row: Row) -> tuple[float, float]:
        return row["temperature"], row["speedup"] or 0

    return sorted({(r["temperature"], r["draft"]): r for r in sorted(rows, key=order)}.values(), key=order)


def draft_rows(report: Row) -> list[Row]:
    """Returns the drafts, each with its fastest decoding and how its offline α differs from the exported draft's."""
    best, rows = exported(report), []
    paired = [pair for pair in report["paired"] if pair["a"] == best and pair["label"].startswith("T = 1")]
    pairs = {pair["b"]: pair for pair in paired}
    for draft in report["drafts"]:
        row = card.fastest_row(report, draft["name"], f"{draft['name']}-tree") | draft
        if draft["name"] == best:
            row |= {"difference": "exported", "style": "bold", "speedup_vs_exported": None}
        elif pair := pairs.get(draft["name"]):
            mark = "*" * sum(pair["p_value"] < limit for limit in (0.05, 0.01, 0.001))
            row |= {"difference": -pair["difference"], "se": pair["se"], "significance": mark or "n.s."}
        rows.append(row)
    return rows


def not_told_apart(report: Row) -> str:
    """Returns which drafts cannot be told from the exported one in speed and in α, as a sentence; empty without any."""
    rows = [row for row in draft_rows(report) if row["name"] != exported(report)]
    held = [(row, row.get("speedup_vs_exported_ci95") or (2, 2)) for row in rows if not doubt(row)]
    speed = [row["name"] for row, (low, high) in held if low <= 1 <= high]
    alike = {"speed": speed, "α": [row["name"] for row in rows if row.get("significance") == "n.s."]}
    told = [f"in {what} {', '.join(f'`{name}`' for name in names)}" for what, names in alike.items() if names]
    return f" Not told apart from it: {'; '.join(told)}." if told else ""


def opening(report: Row) -> tuple[str, list[tuple[str, str]], str]:
    """Returns what the run did, how fast the exported draft is, as `Section.cards`, and whether its texts differ."""
    name = exported(report)
    size = f"{report['target']['parameters']:,}"
    text = f"This run trained drafts for a target of {size} parameters and exported `{name}`."
    if not (row := card.fastest_row(report, name, f"{name}-tree")):
        return f"{text} Decoding with it was not measured.", [], ""
    length = (cell(row, "accepted_length"), "tokens per target forward (accepted length)")
    same = SAME.get(row.get("identical_to_target"), "")
    where = [f"`{row['draft']}`", mode(row["temperature"]), f"{row['draft_length']} tokens drafted per round"]
    text += f" Measured: {', '.join(filter(None, [*where, conditions(row)]))}.{not_told_apart(report)}"
    over = {"speedup": row["speedup_vs_generate"], "speedup_ci95": row.get("speedup_vs_generate_ci95")}
    if why := doubt(row):
        return f"{text} No speedup is given, since {why}.", [(name, "exported draft"), length], same
    cards = [
        (name, "exported draft"),
        length,
        (cell(row, "speedup"), "times the speed of this loop without a draft"),
        (cell(over, "speedup"), "times the speed of `model.generate`"),
    ]
    return text, cards, same


def sections(report: Row, run_dir: Path) -> Iterable[Section]:
    """Returns the page of a report; parts that were not measured are left out."""
    drafts, rows, drawn, (_, cards, same) = draft_rows(report), report["decoding"], figures(report), opening(report)
    yield Section(text=same, cards=cards, figures=[drawn[key] for key in FIRST_SCREEN if key in drawn])
    tables = [Table(DRAFTS, drafts, note=LEGEND), Table(TRAINING, drafts, "Training and other measurements", True)]
    beside = next((f" ({told})" for told in map(conditions, rows) if told), "")
    text = "Measured on texts that the target generated for held-out prompts, and by decoding at the fastest length k"
    yield Section("Drafts", f"{text}{beside}.", tables=tables)
    if rows:
        tables = [Table(DECODING, fastest(rows)), Table(DECODING, rows, f"All {len(rows)} measurements", True)]
        tables.append(Table(PROFILE, [report["profile"]], "Costs in target forwards of one token", True))
        tables += by_length(fastest(rows))
        for of, positions in acceptance(report, run_dir).items():
            keys, alike = without_constants(ACCEPTANCE, positions)
            title = f"{of}: greedy α by position (accepted ÷ reached)" + (alike and f"; {alike}")
            tables.append(Table(keys, positions, title, True))
        yield Section("Decoding", f"Each draft at its fastest draft length{beside}.", tables=tables)
    if curves := [figure for key, figure in drawn.items() if key not in FIRST_SCREEN]:
        yield Section("Draft length and training", figures=curves)
    if export := report.get("exported"):
        draft = str(run_dir / "export")
        lines = {title: text for title, _, text in card.commands(str(run_dir / "target"), draft, export)}
        yield Section("Use", f"The export is in `{draft}`.", code=lines)
    facts = {f"target's {name}": value for name, value in report["target"].items()}
    facts |= {"created": report["created"], **report["machine"], **report["commands"]}
    code = {"Settings": json.dumps(report["settings"], indent=2, ensure_ascii=False)}
    yield Section("Provenance", facts=facts, code=code, folded=True)


def acceptance(report: Row, run_dir: Path) -> dict[str, list[Row]]:
    """Returns the positions of each draft; of the exported one with what serve-check noted in its profile, greedy."""
    checks = read_json(run_dir / "export" / card.PROFILE).get("served") or []
    counted = [row["positions"] for check in checks for row in check["rows"] if row["temperature"] == 0]
    served = {row["position"]: row.get("served") for row in max(counted, key=len, default=[])}
    return {
        name: [row | {"served": served.get(row["position"]) if name == exported(report) else None} for row in positions]
        for name, positions in report["analysis"].get("acceptance", {}).items()
    }


def figures(report: Row) -> dict[str, Figure]:
    """Returns the plots by name; those without data are left out."""
    analysis, name = report["analysis"], exported(report)
    named = [draft["name"] + form for form in ("", "-tree") for draft in report["drafts"]]
    colours = {name: plots.COLOURS[i % len(plots.COLOURS)] for i, name in enumerate(named)}
    rows = [row for row in report["decoding"] if row["temperature"] == 0 and row["draft_length"] and row["speedup"]]
    greedy = [row for row in rows if not doubt(row)]
    drawn = {}
    best = [{**row, "name": f"{row['draft']}, k = {row['draft_length']}"} for row in fastest(greedy)]
    if len(best) > 1:
        left = ", ".join(dict.fromkeys(row["draft"] for row in fastest(rows) if doubt(row)))
        caption = f"Left out, since their speedups are no results: {left}." if left else ""
        drawn["speedup"] = (plots.speedup_bars(best[::-1], "Greedy speedup at the best draft length"), caption)
    of_export = [row for row in greedy if row["draft"] == name]
    points: dict[str, list[Any]] = {
        "predicted": sorted((int(k), v) for k, v in report["profile"].get("predicted_speedup", {}).items()),
        "measured": sorted(
            (row["draft_length"], row["speedup"], *(row.get("speedup_ci95") or ())) for row in of_export
        ),
    }
    if of_export and sum(map(len, points.values())) > 1:
        axes = "Speedup by draft length", "draft length k (tokens)", "speedup (×)"
        caption = f"{name}, greedy. Predicted from the seconds of real rounds of each length."
        drawn["speedup_by_length"] = (plots.lines(points, *axes, at_one=True), caption)
    if positions := analysis.get("acceptance_by_position"):
        drawn["acceptance_by_position"] = (plots.acceptance_by_position(positions, colours), "")
    if curves := analysis.get("curves"):
        axes = "Learning curves", "optimiser step", "α = mean Σ min(p, q), validation"
        drawn["curves"] = (plots.lines(curves, *axes, colours=colours), "")
    return drawn
