"""Tables and the page of ``python -m probes``."""

from collections.abc import Iterable, Iterator
from pathlib import Path

from rich.console import Console

from decode.core.lengths import RoundCosts
from decode.measure import machine, plots
from decode.measure.machine import conditions, doubt
from decode.measure.report import Figure, Row, Section, Table, cell, console_table, write_page

SCORED = ("confidence_head", "confidence_probe", "token_probability", "entropy")  # what the probe is compared with
METRICS = ("auroc", "brier", "ece", *(f"auroc_{other}" for other in SCORED))
FURTHER = tuple(f"{metric}_{other}" for metric in ("brier", "ece") for other in SCORED)
SPEEDS = (
    "title", "exit_layer", "draft_length", "threshold", "tried", "tokens_per_second", "speedup_vs_layerskip", "speedup",
    "predicted_speedup", "accepted_length", "alpha", "accepted_per_drafted", "identical_to_target",
)  # fmt: skip
SLOTS = ("mode", "slot", "tokens", "base_rate", *METRICS[:-1])
STOPS = ("name", "temperature", "speedup", "accepted_length", "draft_length", "alpha", "predicted_speedup")
PRODUCTS = ("mode", "estimate", "auroc", "brier", "ece", "worst_slot_ece")


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
    """Return a sentence on the fastest method of a mode, or why its speedup is no result, and one on its exit."""
    if not (best := best_of(added, mode)):
        return f"{mode}: no method was run."
    if why := doubt(best):
        return f"{mode}: no speedup is given, since {why}."
    place = f"{mode}: {best['title']} with exit layer {best['exit_layer']}"
    place += f" is fastest, {cell(best, 'speedup')} times decoding without a draft, {conditions(best)}."
    return f"{place} {why_exit(added, mode, best)}"


def why_exit(added: Row, mode: str, best: Row) -> str:
    """Return a sentence: why the exit of a row is best for its method, by agreement, cost and what was tried."""
    costs = RoundCosts.from_dict(added["probe_settings"]["costs"][mode]["exits"])
    known = [row for row in added["probes"] if row["mode"] == mode and "alpha" in row]  # not of the label top-p
    alphas = {row["layer"]: f"α {row['alpha']:.3f}" for row in known}
    speeds: dict[int, float] = {}
    for row in of_mode(added["probe_settings"]["tried"], mode):
        if row["method"] == best["method"]:
            speeds[row["exit_layer"]] = max(row["speedup"] or 0.0, speeds.get(row["exit_layer"], 0.0))
    prices, here = {at: f"{costs.prices(at)[0]:.2f}" for at in speeds}, best["exit_layer"]
    told = {at: ", ".join(filter(None, [alphas.get(at), prices[at], f"{speeds[at]:.2f}"])) for at in sorted(speeds)}
    del told[here]
    others = "; ".join(f"exit layer {at}: {facts}" for at, facts in told.items())
    return (
        f"Exit layer {here} is best for it: {alphas[here] + ', ' if here in alphas else ''}{prices[here]} of a round "
        f"without a draft for each further drafted token, speedup {speeds[here]:.2f} when tried"
        + (f" ({others})." if others else ".")
    )


def commands(added: Row, run: Path) -> dict[str, str]:
    """Return a command for each mode that decodes with its fastest setting, which the probes' folder keeps."""
    told = {}
    for mode in titles(added):
        if best := best_of(added, mode):
            where = f"--target {run}/target --probes {run}/probes --method {best['title']}"
            where += f" --temperature {best['temperature']:g} --top-p {best['top_p']:g}" if best["temperature"] else ""
            told[f"{mode}, {best['title']}"] = f"python -m decode generate {where} --prompt TEXT"
    return told


def tables(added: Row) -> list[Table]:
    """Return the tables of scores and of speeds: of exits, or of a block head."""
    if "probes" not in added:
        stops = added["block_stop_rules"]
        told = "".join(f"; {conditions(row)}" for row in stops[:1])
        return [
            Table(SLOTS, added["block_slots"], "Each slot of blocks that were right before it"),
            Table(PRODUCTS, added["block_products"], "The product up to a slot: whether the block is right that far"),
            Table(STOPS, stops, f"How much of a block is verified{told}"),
        ]
    scores, speeds = list[Table](), list[Table]()
    for mode, title in titles(added).items():
        rows = [row for row in added["probes"] if row["mode"] == mode]
        scores.append(Table(("layer", "alpha", "base_rate", *METRICS), rows, f"Scores on test prompts, {title}"))
        scores.append(Table(("layer", *FURTHER), rows, f"Brier and ECE of other confidences, {mode}", folded=True))
        runs = of_mode(added["self_speculation"], mode)
        told = "".join(f"; {conditions(row)}" for row in runs[:1])
        speeds.append(Table(SPEEDS, runs, f"Each method at its fastest setting, {title}{told}"))
    return scores + speeds


def show(console: Console, added: Row, page: Path) -> None:
    """Print the tables, the answers, and where the page is."""
    for table in tables(added) if added else ():
        if table.rows and not table.folded:
            console.print(console_table(f"\n{table.title}", table.keys, table.rows))
    console.print("\n".join([*added.get("probe_findings", []), f"  {page}"]), highlight=False, soft_wrap=True)


def write_report(path: Path, name: str, added: Row) -> None:
    """Write the page of a run with what `probes.pipeline` adds to report.json."""
    sections = [Section("Results", tables=tables(added))]
    if "probes" in added:
        settings, every = added["probe_settings"], "Settings tried on validation prompts"
        tried = [Table(SPEEDS, of_mode(settings["tried"], mode), f"{every}, {mode}", True) for mode in titles(added)]
        sections.append(Section("The choice of the exit", tables=tried, figures=list(predictions(added))))
        sections.append(Section("Use", code=commands(added, path.parent)))
        tokens = [f"{split} {count:,}" for split, count in settings["tokens"].items()]
        facts = {"machine": machine.sentence(settings["machine"]), "tokens": tokens}
        sections.append(Section("Provenance", facts=facts, folded=True))
    title = "acceptance probes and self-speculation" if "probes" in added else "acceptance probes inside a block head"
    write_page(path, f"{name}: {title}", " ".join(added.get("probe_findings", [])), sections)


def predictions(added: Row) -> Iterator[Figure]:
    """Yield a plot for each mode: the speedups that were expected, by exit."""
    for mode, choices in added["probe_settings"]["predicted"].items():
        series: dict[str, list[tuple[float, float]]] = {}
        for choice in choices:
            series.setdefault(choice["method"], []).append((choice["exit_layer"], choice["speedup"]))
        axes = "layers before the exit", "predicted speedup (×)"
        svg = plots.lines(series, f"Predicted speedup by exit, {mode}", *axes)
        yield svg, "tokens over the seconds of real rounds, each method at its best setting for that exit"
