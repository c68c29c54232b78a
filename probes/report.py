"""Tables and the page of ``draftsmith probe``."""

from collections.abc import Iterable
from pathlib import Path

from rich.console import Console

from decode.measure import machine
from decode.measure.machine import conditions, doubt
from decode.measure.report import Row, Section, Table, cell, console_table, doubts, write_page
from decode.measure.statistics import finite

METRICS = "auroc", "auroc_token_probability", "auroc_confidence_probe", "auroc_entropy", "brier", "ece"
SPEEDS = (
    "title", "speedup", "speedup_vs_layerskip", "accepted_length", "alpha", "exit_layer", "draft_length", "threshold",
    "tried", "tokens_per_second", "accepted_per_drafted", "identical_to_target",
)  # fmt: skip


def titles(added: Row) -> dict[str, str]:
    """Return the decoding modes that were measured, with their sampling settings and labels as a title."""
    settings = added["probe_settings"]
    sampling = {"sampled": f", T = {settings['temperature']:g}, top-p {settings['top_p']:g}"}
    return {mode: f"{mode}{sampling.get(mode, '')}; label {label}" for mode, label in settings["labels"].items()}


def of_mode(rows: Iterable[Row], mode: str) -> list[Row]:
    """Return the rows of a decoding mode."""
    return [row for row in rows if (row["temperature"] == 0) == (mode == "greedy")]


def best_of(added: Row, mode: str) -> Row:
    """Return the fastest run of a mode that drafts; empty if there is none."""
    rows = [row for row in of_mode(added["self_speculation"], mode) if row["exit_layer"] and row["speedup"]]
    return max(rows, key=lambda row: row["speedup"], default={})


def answer(added: Row, mode: str) -> str:
    """Return a sentence on what the probes of a mode can do, and one on the fastest method."""
    rows = [row for row in added["probes"] if row["mode"] == mode and finite(row["auroc"])]
    better = sum(row["auroc"] > row["auroc_token_probability"] for row in rows)
    text = (
        f"{mode}: the probe ranks tokens better than their probability does (AUROC) at {better} of {len(rows)} exits."
    )
    if not (best := best_of(added, mode)):
        return f"{text} No method was run."
    if doubt(best):
        return f"{text} No speedup is reliable."
    low, high = best.get("speedup_vs_layerskip_ci95") or (1, 1)
    same = ", not significantly different from layerskip" if low < 1 < high else ""
    how = f"{best['title']} with exit layer {best['exit_layer']} is fastest{same}: {cell(best, 'speedup')} times"
    return f"{text} {how} decoding without a draft, {conditions(best)}."


def tables(added: Row) -> list[Table]:
    """Return the tables of scores and of speeds."""
    scores, timed = list[Table](), list[Table]()
    for mode, title in titles(added).items():
        rows = [row for row in added["probes"] if row["mode"] == mode]
        scores.append(Table(("layer", *METRICS, "alpha", "base_rate"), rows, f"Scores on test prompts, {title}"))
        runs = of_mode(added["self_speculation"], mode)
        timed.append(Table(SPEEDS, runs, f"Each method at its fastest setting, {title}"))
    return scores + timed


def show(console: Console, added: Row, page: Path) -> None:
    """Print the tables, the answers, why speedups are no results, and where the page is."""
    for table in tables(added) if added else ():
        if table.rows:
            console.print(console_table(f"\n{table.title}", table.keys, table.rows))
    lines = [*added.get("probe_findings", []), doubts(added.get("self_speculation", [])), f"  {page}"]
    console.print("\n".join(filter(None, lines)), highlight=False, soft_wrap=True)


def write_report(path: Path, name: str, added: Row) -> None:
    """Write the page of a run with what `probes.pipeline` adds to report.json."""
    settings, run = added["probe_settings"], path.parent
    tried, commands = list[Table](), dict[str, str]()
    for mode in titles(added):
        # that these are few prompts is no doubt
        rows: list[Row] = [{**row, "prompts": None} for row in of_mode(settings["tried"], mode)]
        tried.append(Table(SPEEDS, rows, f"Settings tried on validation prompts, {mode}", True))
        if best := best_of(added, mode):
            where = f"--target {run}/target --probes {run}/probes --method {best['title']}"
            where += f" --temperature {best['temperature']:g} --top-p {best['top_p']:g}" if best["temperature"] else ""
            title = f"{mode}, {best['title']}{', not reliably the fastest' * bool(doubt(best))}"
            commands[title] = f"draftsmith decode generate {where} --prompt TEXT"
    tokens = [f"{split} {count:,}" for split, count in settings["tokens"].items()]
    sections = [
        Section("Results", tables=tables(added)),
        Section("The choice of the exit", tables=tried),
        Section("Use", code=commands),
        Section("Provenance", facts={"machine": machine.sentence(settings["machine"]), "tokens": tokens}, folded=True),
    ]
    summary = " ".join(added["probe_findings"])
    write_page(path, f"{name}: acceptance probes and self-speculation", summary, sections)
