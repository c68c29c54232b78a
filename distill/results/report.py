"""The report of a distillation run: ``report.json``, and decode's page of a benchmark after a section on training."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich.console import Group

from decode.files import read_json, write_text
from decode.measure import plots
from decode.measure import report as decoding
from decode.measure.machine import conditions, doubt
from decode.measure.report import Row, Section, Table, cell, console_table, doubts, mode, write_page
from decode.measure.statistics import plain
from distill.export import card

DRAFTS = (
    "name", "offline_alpha", "speedup", "speedup_vs_exported", "accepted_length", "draft_length", "speedup_vs_generate",
    "difference", "significance",
)  # fmt: skip
TRAINING = (
    "name", "parameters", "offline_accepted_length", "offline_alpha_likeliest", "offline_alpha_greedy",
    "greedy_accepted_per_tested", "validation_alpha", "validation_accepted_length", "optimiser_steps", "examples",
    "teacher_tokens", "selected_tokens", "seconds",
)  # fmt: skip
ACCEPTANCE = ("position", "validation", "offline", "decoded", "served")
"""Columns of the tables."""
MORE_TEXTS = "What more texts would give is not known from one number of them: name drafts of all, 1/2, 1/4 and 1/8 \
of the texts (training.examples of a draft), with as many epochs."
"""Below the account of a training whose drafts do not show it."""
LEGEND = "Δα: difference from the exported draft. *** p < 0.001, ** p < 0.01, * p < 0.05, n.s. not significant, \
p times the number of drafts compared (Bonferroni). Where the interval beside `vs exported` holds 1, the difference in \
speed is not significant, whatever the order of the speedups, which are medians over other pairs."
SAME: dict[Any, str] = {
    True: " Its texts are the target's, token by token.",
    False: " Its texts differ from the target's.",
}


def write_report(run_dir: str | Path, report: Row) -> Row:
    """Writes ``report.json`` and ``report.html``, each replaced only when complete.

    Args:
        run_dir: The run's folder.
        report: What `distill.results.evaluate.evaluate` returns, with ``name``, ``settings``, ``commands`` and
            optionally ``exported`` (see `exported_facts`); None for what was not measured.

    Returns:
        The report as it is in the file.
    """
    folder = Path(run_dir)
    content = json.dumps(plain(dict(report)), indent=2, ensure_ascii=False, allow_nan=False, default=str)
    report = json.loads(content)
    write_text(folder / "report.json", content + "\n")
    text, cards = opening(report)
    title = f"{report['name']}: draft model report"
    write_page(folder / "report.html", title, text, [Section(cards=cards), *sections(report, folder)])
    return report


def console_tables(report: Row) -> Group:
    """Returns what the terminal shows at the end of a run."""
    text, cards = opening(report)
    lines = [f"{value} {label}" for value, label in cards[1:]]
    table = console_table("Drafts", DRAFTS, draft_rows(report))
    return Group(table, LEGEND, f"\n{text}", *lines, doubts(draft_rows(report)))


def exported(report: Row) -> str:
    """Returns the name of the exported draft."""
    return str(report["profile"]["draft"])


def draft_rows(report: Row) -> list[Row]:
    """Returns the drafts, each at its recommended draft length and with the difference of α to the exported draft."""
    best, rows = exported(report), []
    pairs = {pair["b"]: pair for pair in report["paired"]}
    for draft in report["drafts"]:
        row = card.recommended_row(report, draft["name"]) | draft
        if draft["name"] == best:
            row |= {"difference": "exported", "style": "bold", "speedup_vs_exported": None}
        elif pair := pairs.get(draft["name"]):
            mark = "*" * sum(pair["p_value"] * len(pairs) < limit for limit in (0.05, 0.01, 0.001))
            row |= {"difference": -pair["difference"], "se": pair["se"], "significance": mark or "n.s."}
        rows.append(row)
    return rows


def opening(report: Row) -> tuple[str, list[tuple[str, str]]]:
    """Returns what the run did and whether the draft's texts differ, and how fast it is, as `Section.cards`."""
    name = exported(report)
    size = f"{report['target']['parameters']:,}"
    text = f"This run trained drafts for a target of {size} parameters and exported `{name}`."
    if not (row := card.recommended_row(report, name)):
        return f"{text} Decoding with it was not measured.", []
    where = mode(row["temperature"]), f"{row['draft_length']} tokens drafted per round", conditions(row)
    text += f" Measured: {', '.join(filter(None, where))}."
    cards = [(name, "exported draft"), (cell(row, "accepted_length"), "tokens per target forward (accepted length)")]
    if doubt(row):
        text += " Its speedup is not reliable."
    else:
        cards.append((cell(row, "speedup"), "times as fast as the same decoder without a draft"))
        cards.append((cell(row, "speedup_vs_generate"), "times as fast as `model.generate`"))
    return text + SAME.get(row.get("identical_to_target"), ""), cards


def sections(report: Row, run_dir: Path) -> Iterable[Section]:
    """Returns the page of a report below its opening; parts that were not measured are left out."""
    drafts, best = draft_rows(report), exported(report)
    text = (
        "Offline α is measured on texts that the target wrote for held-out prompts. Tables, plots, card and commands "
        "have the shortest draft length whose speed does not differ significantly from the fastest one's."
    )
    account = Table(TRAINING, drafts, "Account of the training", True, note=report.get("more_texts") or MORE_TEXTS)
    tables = [Table(DRAFTS, drafts, note=LEGEND), account]
    for draft in drafts:
        served = served_rates(run_dir) if draft["name"] == best else {}
        positions = [row | {"served": served.get(row["position"])} for row in draft.get("acceptance") or []]
        title = f"{draft['name']}: greedy α by position (accepted ÷ reached)"
        tables += [Table(ACCEPTANCE, positions, title, True)] if positions else []
    curves = {draft["name"]: draft["curve"] for draft in drafts if draft.get("curve")}
    axes = "Learning curves", "optimiser step", "α = mean Σ min(p, q), validation"
    yield Section("Training", text, tables=tables, figures=[plots.lines(curves, *axes)] if curves else [])
    reproduce = {"settings": report["commands"], "notes": {}}
    yield from decoding.sections(report["decoding"], report["machine"], reproduce)
    if report.get("exported"):
        folder = str(run_dir / "export")
        lines = {title: text for title, _, text in card.commands(str(run_dir / "target"), folder, report["exported"])}
        yield Section("Use", f"The export is in `{folder}`.", code=lines)
    facts = {f"target's {name}": value for name, value in report["target"].items()} | {"created": report["created"]}
    code = {"Settings": json.dumps(report["settings"], indent=2, ensure_ascii=False)}
    yield Section("Provenance", facts=facts, code=code, folded=True)


def served_rates(run_dir: Path) -> dict[int, float]:
    """Returns the greedy acceptance of the exported draft by position that serve-check noted in its profile."""
    checks = read_json(run_dir / "export" / card.PROFILE).get("served") or []
    counted = [row["positions"] for check in checks for row in check["rows"] if row["temperature"] == 0]
    return {row["position"]: row["served"] for row in max(counted, key=len, default=[])}
