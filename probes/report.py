"""Tables and the page of ``python -m probes``."""

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from rich.console import Console

from decode.measure import machine, plots
from decode.measure.machine import conditions, doubt
from decode.measure.report import Figure, Row, Section, Table, cell, console_table, write_page

SCORED = ("confidence_probe", "token_probability", "entropy")  # what the probe is compared with
METRICS = ("auroc", "brier", "ece", *(f"auroc_{other}" for other in SCORED))
SPEEDS = (
    "title", "exit_layer", "draft_length", "threshold", "tried", "tokens_per_second", "speedup_vs_layerskip", "speedup",
    "accepted_length", "alpha", "accepted_per_drafted", "identical_to_target",
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
    """Return a sentence on the fastest method of a mode, or why its speedup is no result, and one on its exit.

    The latter gives agreement (not of the label top-p) and speed of the exits that the method was tried at.
    """
    if not (best := best_of(added, mode)):
        return f"{mode}: no method was run."
    if why := doubt(best):
        return f"{mode}: no speedup is given, since {why}."
    rows = [row for row in added["probes"] if row["mode"] == mode and "alpha" in row]
    alphas = {row["layer"]: f"α {row['alpha']:.3f}, " for row in rows}
    speeds = fastest_by_exit(added, mode)[best["method"]]
    facts = [f"exit layer {layer}: {alphas.get(layer, '')}{speed:.2f}" for layer, speed in speeds]
    return (
        f"{mode}: {best['title']} with exit layer {best['exit_layer']} is fastest, {cell(best, 'speedup')} times "
        f"decoding without a draft, {conditions(best)}. Its speedup by exit, on validation prompts: {'; '.join(facts)}."
    )


def fastest_by_exit(added: Row, mode: str) -> dict[str, list[tuple[int, float]]]:
    """Return each method's exit layers with the speedup of the fastest setting tried there on validation prompts."""
    speeds = defaultdict[str, dict[int, float]](dict)
    for row in sorted(of_mode(added["probe_settings"]["tried"], mode), key=lambda row: row["speedup"] or 0.0):
        speeds[row["method"]][row["exit_layer"]] = row["speedup"] or 0.0
    return {method: sorted(by_exit.items()) for method, by_exit in speeds.items()}


def tables(added: Row) -> list[Table]:
    """Return the tables of scores and of speeds."""
    scores, speeds = list[Table](), list[Table]()
    for mode, title in titles(added).items():
        rows = [row for row in added["probes"] if row["mode"] == mode]
        scores.append(Table(("layer", "alpha", "base_rate", *METRICS), rows, f"Scores on test prompts, {title}"))
        runs = of_mode(added["self_speculation"], mode)
        told = "".join(f"; {conditions(row)}" for row in runs[:1])
        speeds.append(Table(SPEEDS, runs, f"Each method at its fastest setting, {title}{told}"))
    return scores + speeds


def show(console: Console, added: Row, page: Path) -> None:
    """Print the tables, the answers, and where the page is."""
    for table in tables(added) if added else ():
        if table.rows:
            console.print(console_table(f"\n{table.title}", table.keys, table.rows))
    console.print("\n".join([*added.get("probe_findings", []), f"  {page}"]), highlight=False, soft_wrap=True)


def write_report(path: Path, name: str, added: Row) -> None:
    """Write the page of a run with what `probes.pipeline` adds to report.json."""
    settings, run = added["probe_settings"], path.parent
    how = "each method at its fastest setting for that exit; few prompts, by which settings are chosen"
    tried, figures, commands = list[Table](), list[Figure](), dict[str, str]()
    for mode in titles(added):
        rows, title = of_mode(settings["tried"], mode), f"Settings tried on validation prompts, {mode}"
        tried.append(Table(SPEEDS, rows, title, True))
        if speeds := fastest_by_exit(added, mode):
            title = f"Speedup by exit on validation prompts, {mode}"
            figures.append((plots.lines(speeds, title, "layers before the exit", "speedup (×)"), how))
        if best := best_of(added, mode):
            where = f"--target {run}/target --probes {run}/probes --method {best['title']}"
            where += f" --temperature {best['temperature']:g} --top-p {best['top_p']:g}" if best["temperature"] else ""
            commands[f"{mode}, {best['title']}"] = f"python -m decode generate {where} --prompt TEXT"
    tokens = [f"{split} {count:,}" for split, count in settings["tokens"].items()]
    sections = [
        Section("Results", tables=tables(added)),
        Section("The choice of the exit", tables=tried, figures=figures),
        Section("Use", code=commands),
        Section("Provenance", facts={"machine": machine.sentence(settings["machine"]), "tokens": tokens}, folded=True),
    ]
    summary = " ".join(added["probe_findings"])
    write_page(path, f"{name}: acceptance probes and self-speculation", summary, sections)
