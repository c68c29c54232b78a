"""The report of a distillation run: ``report.json``, one HTML page, and the tables that the terminal shows."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Group

from decode.bench import plots
from decode.bench.page import (
    LOSSLESS,
    Badge,
    Block,
    Code,
    Facts,
    Figures,
    Heading,
    Page,
    Sample,
    Samples,
    Table,
    read_columns,
)
from decode.bench.report import console_table, mode
from decode.bench.statistics import plain
from decode.errors import write_text
from distill.export import model_card as card

Row = Mapping[str, Any]
Plot = tuple[str, str]  # SVG and caption

NAMES = {
    "distillspec": "DistillSpec",
    "adaspec": "AdaSPEC",
    "eagle": "EAGLE",
    "eagle-adaspec": "EAGLE + AdaSPEC",
    "eagle-tree": "EAGLE, tree",
    "eagle-adaspec-tree": "EAGLE + AdaSPEC, tree",
    "autoregressive": "no draft",
    "generate": "model.generate",
    "generate-assistant": "generate(assistant_model)",
}
COLOURS = {
    "undistilled": plots.GREY,
    "DistillSpec": plots.ORANGE,
    "reference": plots.ORANGE,
    "AdaSPEC": plots.BLUE,
    "draft": plots.BLUE,
    "target": plots.GREEN,
}
"""Colours of drafts, by the names that are displayed, in all figures."""
IDENTITY = {True: Badge("identical", "good"), False: Badge("differs", "bad"), None: Badge("unchecked", "warn")}
TABLES = read_columns(Path(__file__).with_name("columns.csv"))
NOT_ON_CONSOLE = {"parameters", "offline_alpha_greedy", "seconds", "accepted_per_drafted"}
ORDER = ("name", "created", "target", "drafts", "paired", "decoding", "profile", "analysis", "samples", "exported",
         "settings", "machine", "commands")  # fmt: skip
"""Order of the keys in ``report.json``; others follow."""


def write_report(run_dir: str | Path, report: Row) -> None:
    """Writes ``report.json`` and ``report.html``, each replaced only when complete.

    Args:
        run_dir: The run's folder.
        report: ``name``; ``target`` {parameters, accuracy}; ``drafts`` [{name, offline_alpha, offline_alpha_se,
            optimiser_steps, teacher_tokens}]; ``decoding`` [{draft, temperature, draft_length, tokens_per_second,
            speedup, speedup_ci95, speedup_vs_generate, predicted_speedup, block_efficiency, alpha,
            accepted_per_drafted, identical_to_target}]; None for what was not measured. Optional: ``created``,
            ``paired`` [{a, b, difference, se, p_value, n, label}], ``profile``, ``analysis`` {margins, kl,
            acceptance_by_position, curves, selected_tokens}, ``samples`` [{prompt, tokens: [{text, who}]}],
            ``exported`` {length, token_map, gguf_type}, ``settings``, ``machine``, ``commands``.
    """
    data = plain(dict(report))
    ordered = {key: data[key] for key in (*ORDER, *sorted(set(data) - set(ORDER))) if key in data}
    content = json.dumps(ordered, indent=2, ensure_ascii=False, allow_nan=False, default=str)
    page = build_page(json.loads(content), Path(run_dir))
    write_text(Path(run_dir) / "report.json", content + "\n")
    page.write(Path(run_dir) / "report.html")


def console_tables(report: Row) -> Group:
    """Returns what the terminal shows at the end of a run."""
    report = plain(dict(report))
    best = exported_row(report)
    decoding = [decoding_row(row) | {"style": "bold" if row is best else ""} for row in fastest(report["decoding"])]
    tables = {
        "Drafts": ("drafts", [draft_row(row) for row in report["drafts"]]),
        "\nDifferences": ("paired", paired_rows(report)),
        "\nDecoding, each draft at its fastest length": ("decoding", decoding),
    }
    shown = {
        title: ([c for c in TABLES[name] if c.key not in NOT_ON_CONSOLE], rows)
        for title, (name, rows) in tables.items()
    }
    return Group(*(console_table(title, *table) for title, table in shown.items() if table[1]), f"\n{headline(report)}")


def display(name: str | None) -> str:
    """Returns a draft's name as it is printed."""
    return NAMES.get(name, name) if name else "no draft"


def signed(value: float) -> str:
    """Returns a difference with its sign."""
    return f"{value:+.4f}".replace("-", "−")


def exported(report: Row) -> str:
    """Returns the name of the exported draft."""
    return str((report.get("profile") or {}).get("draft") or "adaspec")


def exported_row(report: Row) -> Row | None:
    """Returns the exported draft's fastest row: greedy if measured, and with the target's output if one has it."""
    names = (exported(report), f"{exported(report)}-tree")
    rows = [row for row in report["decoding"] if row["draft"] in names and row["speedup"]]
    rows = [row for row in rows if row["temperature"] == 0] or rows
    identical = [row for row in rows if row.get("identical_to_target") is not False]
    return max(identical or rows, key=lambda row: row["speedup"], default=None)


def fastest(rows: Iterable[Row]) -> list[Row]:
    """Returns for each temperature and draft the row with the largest speedup, by temperature, then speedup."""
    ordered = sorted(rows, key=lambda row: (row["temperature"], row["speedup"] or 0))
    return sorted(
        {(row["temperature"], row["draft"]): row for row in ordered}.values(),
        key=lambda row: (row["temperature"], row["speedup"] or 0),
    )


def headline(report: Row) -> str:
    """Returns the speed of the exported draft in one line."""
    row = exported_row(report)
    if row is None:
        return "Decoding with the exported draft was not measured."
    interval = row.get("speedup_ci95")
    text = f"{display(row['draft'])}, {row['draft_length']} tokens drafted per round, {mode(row['temperature'])}: "
    text += f"{row['speedup']:.2f} times the speed of the same loop without a draft"
    text += f" (95 % interval {interval[0]:.2f} to {interval[1]:.2f})" if interval else ""
    if row.get("speedup_vs_generate"):
        text += f", {row['speedup_vs_generate']:.2f} times that of `model.generate`"
    return f"{text}; output {_output(row).text}."


def build_page(report: Row, run_dir: Path) -> Page:
    """Returns the page of a report; parts that were not measured are left out."""
    settings, export, profile = (report.get(key) or {} for key in ("settings", "exported", "profile"))
    blocks: list[Block] = [
        Facts(dict(_key_figures(report))),
        Heading("Drafts", "Measured on the same texts, which the target generated for held-out prompts."),
        Table(TABLES["drafts"], [draft_row(row) for row in report["drafts"]]),
    ]
    if pairs := paired_rows(report):
        blocks.append(Table(TABLES["paired"], pairs, "Differences between drafts"))
    if rows := [decoding_row(row) for row in report["decoding"]]:
        blocks.append(Heading("Decoding", "Each draft at its fastest draft length."))
        blocks.append(Table(TABLES["decoding"], fastest(rows)))
        blocks.append(Table(TABLES["decoding"], rows, legend=False, folded=f"All {len(rows)} measurements"))
        if profile:
            blocks.append(Table(TABLES["profile"], [profile], "Costs in target forwards of one token"))
        blocks.append(Figures(list(decoding_figures(report).values())))
    if learned := analysis_figures(report):
        blocks += [Heading("What the drafts learned"), Figures(list(learned.values()))]
    if samples := report.get("samples"):
        shown = [Sample(sample["tokens"], sample.get("prompt", "")) for sample in samples]
        blocks += [Heading("Samples", "The mark of a token shows which model generated it."), Samples(shown)]
    if export:
        target, draft = str(run_dir / "target"), str(run_dir / "export")
        kind = settings.get("student", {}).get("kind")
        kind = kind if kind in card.KINDS.values() else "draft"
        blocks.append(Heading("Use", f"The exported {'draft' if kind == 'draft' else 'head'} is in `{draft}`."))
        blocks += [Code(lines, title) for title, _, lines in card.commands(target, draft, kind=kind, **export)]
    about = {k.replace("_", " "): _fact(v) for k, v in (report.get("machine") or {}).items()}
    blocks.append(Heading("Provenance"))
    blocks.append(Facts({"created": report.get("created"), "seed": settings.get("seed"), **about}))
    if commands := report.get("commands"):
        lines = commands.values() if isinstance(commands, Mapping) else commands
        blocks.append(Code("\n".join(lines), "Commands that reproduce this page"))
    if settings:
        blocks.append(Code(json.dumps(settings, indent=2, ensure_ascii=False), folded="All settings"))
    return Page(f"{report['name']}: draft model report", headline(report), "draftsmith · distill", blocks)


def _key_figures(report: Row) -> Iterable[tuple[str, Any]]:
    target = report["target"]
    yield "target", f"{target['parameters']:,} parameters" if target.get("parameters") else None
    if target.get("accuracy") is not None:
        count = f" of {target['accuracy_n']:,} problems" if target.get("accuracy_n") else ""
        yield "target's exact answers", f"{100 * target['accuracy']:.0f} %{count}"
    yield "exported draft", display(exported(report))
    if (row := exported_row(report)) is not None:
        yield "tokens/s", f"{row['tokens_per_second']:,.0f}"
        yield "accepted length", f"{row['block_efficiency']:.2f}" if row.get("block_efficiency") else None


def draft_row(row: Row) -> dict[str, Any]:
    """Returns a draft with its displayed name."""
    return {**row, "label": display(row["name"])}


def paired_rows(report: Row) -> list[dict[str, Any]]:
    """Returns the paired comparisons with their displayed names."""
    rows = [{**p, "pair": f"{display(p['a'])} − {display(p['b'])}"} for p in report.get("paired") or []]
    for row in rows:
        if (p := row.get("p_value")) is not None:
            row["p"] = "< 0.001" if p < 0.001 else f"{p:.2g}"
    return rows


def decoding_row(row: Row) -> dict[str, Any]:
    """Returns a measurement with its displayed name and a badge for its output."""
    return {**row, "label": display(row["draft"]), "output": _output(row)}


def _output(row: Row) -> Badge:
    same = row.get("identical_to_target")
    return IDENTITY[same] if row["temperature"] == 0 or same is False else LOSSLESS


def _fact(value: Any) -> Any:
    if isinstance(value, Mapping):
        return ", ".join(f"{k} {v}" for k, v in value.items())
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return f"{value:.4g}" if isinstance(value, float) else value


def figures(report: Row) -> dict[str, str]:
    """Returns all plots as SVG by name, for the tracker."""
    return {name: svg for name, (svg, _) in {**decoding_figures(report), **analysis_figures(report)}.items()}


def decoding_figures(report: Row) -> dict[str, Plot]:
    """Returns the plots of speed and acceptance by name."""
    drafts = {name for draft in report["drafts"] for name in (draft["name"], f"{draft['name']}-tree")}
    rows = [row for row in report["decoding"] if row.get("draft") in drafts]
    greedy = [row for row in rows if row["temperature"] == 0 and row.get("speedup")]
    profile, found = report.get("profile") or {}, {}
    best = [{**row, "name": f"{display(row['draft'])}, k = {row['draft_length']}"} for row in fastest(greedy)]
    if len(best) > 1:
        found["speedup"] = (plots.speedup_bars(best[::-1], "Greedy speedup at the best draft length"), "")
    measured = {row["draft_length"]: row for row in greedy if row["draft"] == exported(report)}
    predicted = {int(k): speedup for k, speedup in (profile.get("predicted_speedup") or {}).items()}
    if len(measured.keys() | predicted.keys()) > 1:
        caption = f"{display(exported(report))}, greedy. Predicted: tokens per round ÷ (c·k + v(k + 1))."
        found["speedup_by_length"] = (plots.speedup_by_length(predicted, measured), caption)
    if len(costs := profile.get("verify_cost") or []) > 1:
        found["verify_cost"] = (plots.verify_cost({"v(n)": costs}), "")
    if positions := _named(report, "acceptance_by_position"):
        found["acceptance_by_position"] = (plots.acceptance_by_position(positions, COLOURS), "")
    return found


def analysis_figures(report: Row) -> dict[str, Plot]:
    """Returns the plots of AdaSPEC's analysis by name."""
    found: dict[str, Plot] = {}
    if curves := _named(report, "curves"):
        axes = "optimiser step", "α = mean Σ min(p, q), validation"
        found["curves"] = (plots.lines(curves, "Learning curves", *axes, COLOURS), "")
    if margins := _named(report, "margins"):
        title, xlabel = "Logit margin of the target's token", "z(target's token) − largest other z, z: draft's logits"
        found["margins"] = (plots.histograms(margins, title, xlabel, COLOURS), "Greedy proposals are right of 0.")
    if kl := _named(report, "kl"):
        xlabel = "KL(p‖q) = Σ p·log(p/q) (nats per token)"
        found["kl"] = (plots.histograms(kl, "Divergence per token", xlabel, COLOURS, log_y=True), "")
    if tokens := (report.get("analysis") or {}).get("selected_tokens"):
        bars = [{"name": visible(t["token"]), "value": t["lift"], "note": f"{t['count']:,}"} for t in tokens[:20]]
        svg = plots.bars(bars, "Tokens selected most", "lift = share of the selection ÷ share of all labels")
        found["selected_tokens"] = (svg, "Beside the bars: how often the token was selected.")
    return found


def _named(report: Row, part: str) -> dict[str, Any]:
    """Returns a part of the analysis by the displayed names of its drafts, without empty ones."""
    series = (report.get("analysis") or {}).get(part) or {}
    return {display(name): values for name, values in series.items() if values}


def visible(token: str) -> str:
    """Returns a token as a visible label, with signs for spaces and line ends."""
    shown = token.replace("\n", "⏎").replace("\t", "⇥").replace(" ", "␣")
    return shown if shown.strip() else "''"
