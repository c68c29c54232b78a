"""The HTML report of a distillation run: the answer first, then tables with formulas, plots, use, provenance."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.text import Text as RichText

from decode.bench import plots
from decode.bench.page import (
    LOSSLESS,
    Badge,
    Block,
    Code,
    Column,
    Facts,
    Figures,
    Heading,
    Page,
    Sample,
    Samples,
    Table,
    Text,
    Tile,
    Tiles,
    Tone,
    read_columns,
)
from decode.bench.report import console_table, mode
from decode.bench.statistics import plain
from decode.errors import write_text
from distill.export import model_card as card

Row = Mapping[str, Any]

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
UNTRAINED = ("undistilled", "untrained")  # drafts as they are before distillation


@dataclass(frozen=True)
class Finding:
    """A sentence and whether it is good news (`good`, `warn`, `bad`, `plain`)."""

    text: str
    tone: Tone


def display(name: str | None) -> str:
    """A draft's name as printed."""
    return NAMES.get(name, name) if name else "no draft"


def exported(report: Row) -> str:
    """The draft that the run was made for, which is the one that is exported."""
    return str((report.get("profile") or {}).get("draft") or "adaspec")


def drafted(report: Row) -> list[Row]:
    """The decoding rows in which one of the report's drafts took part; the others are baselines."""
    names = {name for draft in report["drafts"] for name in (draft["name"], f"{draft['name']}-tree")}
    return [row for row in report["decoding"] if row.get("draft") in names]


def exported_row(report: Row, *, greedy: bool = True) -> Row | None:
    """The exported draft at its fastest length; rows whose greedy output differs count only if all differ."""
    names = (exported(report), f"{exported(report)}-tree")
    rows = [r for r in drafted(report) if r["draft"] in names and (r["temperature"] == 0) == greedy and r["speedup"]]
    identical = [row for row in rows if row.get("identical_to_target") is not False]
    return max(identical or rows, key=lambda row: row["speedup"], default=None)


def fastest(rows: Iterable[Row]) -> list[Row]:
    """For each temperature and draft the row with the largest speedup; by temperature, then speedup."""
    found: dict[tuple[Any, Any], Row] = {}
    for row in sorted(rows, key=lambda row: row["speedup"] or 0):
        found[row["temperature"], row["draft"]] = row
    return sorted(found.values(), key=lambda row: (row["temperature"], row["speedup"] or 0))


def findings(report: Row) -> list[Finding]:
    """The report in sentences: the exported draft's speed, what training gained, and each paired comparison."""
    return [speed(report), *choice(report), *distillation(report), *comparisons(report)]


def speed(report: Row) -> Finding:
    """How much faster the exported draft makes decoding, at which length, and whether the output is the target's."""
    row = exported_row(report) or exported_row(report, greedy=False)
    if row is None:
        what = (
            "Decoding with the exported draft was not measured." if report["decoding"] else "Decoding was not measured."
        )
        return Finding(what, "plain")
    draft = f"The exported {display(row['draft'])} draft, {row['draft_length']} tokens a round,"
    kind = "greedy decoding" if row["temperature"] == 0 else f"sampling at {mode(row['temperature'])}"
    interval = row.get("speedup_ci95")
    speedup = f"{row['speedup']:.2f} times as fast as the same loop without a draft"
    speedup += f" (95 % interval {interval[0]:.2f} to {interval[1]:.2f})" if interval else ""
    if row.get("speedup_vs_generate"):
        speedup += f" and {row['speedup_vs_generate']:.2f} times as fast as `model.generate`"
    differs = row.get("identical_to_target") is False
    if row["speedup"] <= 1:
        return Finding(f"{draft} does not speed up {kind} on this machine: it is {speedup}. {_identity(row)}", "bad")
    text = f"{draft} makes {kind} {speedup}."
    if interval and interval[0] <= 1:
        return Finding(
            f"{text} The interval includes 1, so the gain is not certain. {_identity(row)}",
            "bad" if differs else "warn",
        )
    return Finding(f"{text} {_identity(row)}", "bad" if differs else "good")


def _identity(row: Row) -> str:
    if row["temperature"] > 0:
        return "Sampled output follows the target's distribution (exact rule)."
    return {
        None: "Whether the output is identical was not checked.",
        True: "The output is identical to the target's.",
        False: "The output differs from the target's.",
    }[row.get("identical_to_target")]


def comparisons(report: Row) -> list[Finding]:
    """For each paired comparison of the exported draft, or of AdaSPEC: which is better, if that can be told."""
    named = {exported(report), "adaspec"}
    return [_comparison(pair) for pair in report.get("paired") or [] if named & {pair["a"], pair["b"]}]


def _comparison(pair: Row) -> Finding:
    a, b = display(pair["a"]), display(pair["b"])
    difference, error, p = pair["difference"], pair.get("se") or 0.0, pair.get("p_value")
    count = f" over {pair['n']:,} texts" if pair.get("n") else ""
    numbers = f"α differs by {signed(difference)} ± {error:.4f}{count}" + (f", {p_value(p)}" if p is not None else "")
    under = f" ({pair['label']})" if pair.get("label") else ""
    if not (p < 0.05 if p is not None else abs(difference) > 2 * error):
        return Finding(f"{a} and {b} cannot be told apart{under}: {numbers}.", "warn")
    if difference > 0:
        return Finding(f"{a} is better than {b}{under}: {numbers}.", "good")
    return Finding(f"{a} did not beat {b}{under}; {b} is better: {numbers}.", "bad")


def p_value(p: float) -> str:
    """A p-value; a very small one only as a bound."""
    return "p < 0.001" if p < 0.001 else f"p = {p:.2g}"


def signed(value: float) -> str:
    """A difference with its sign, minus as a minus."""
    return f"{value:+.4f}".replace("-", "−")


def choice(report: Row) -> list[Finding]:
    """By what the exported draft was chosen, if by its acceptance on the validation examples."""
    if ((report.get("settings") or {}).get("export") or {}).get("choose") != "best":
        return []
    trained = [d for d in report["drafts"] if d["name"] not in UNTRAINED and d.get("validation_alpha")]
    best, *others = sorted(trained, key=lambda d: d["validation_alpha"], reverse=True)
    if not others:
        return []
    ahead = best["validation_alpha"] - others[0]["validation_alpha"]
    text = (
        f"{display(best['name'])} is exported: of {len(trained)} trained drafts it has the highest α on the validation "
        f"examples, {best['validation_alpha']:.4f}, {signed(ahead)} against {display(others[0]['name'])}. All other "
        "figures are of the test examples."
    )
    return [Finding(text, "plain")]


def distillation(report: Row) -> list[Finding]:
    """Whether training raised α; nothing where it was not measured."""
    start = next((d.get("offline_alpha") for d in report["drafts"] if d["name"] in UNTRAINED), None)
    draft = judged(report)
    if start is None or draft is None:
        return []
    after = draft["offline_alpha"]
    if after <= start:
        text = f"Distillation did not raise the acceptance rate: {start:.4f} before, {after:.4f} after."
        return [Finding(text, "bad")]
    name = display(draft["name"])
    return [Finding(f"Distillation raised the acceptance rate from {start:.3f} to {after:.3f} ({name}).", "good")]


def judged(report: Row) -> Row | None:
    """The draft that stands for the run: the exported one, or without it the one of the highest α."""
    trained = [d for d in report["drafts"] if d["name"] not in UNTRAINED and d.get("offline_alpha") is not None]
    best = max(trained, key=lambda d: d["offline_alpha"], default=None)
    return next((d for d in trained if d["name"] == exported(report)), best)


Plot = tuple[str, str]  # SVG and caption

COLOURS = {
    display(name): colour
    for name, colour in {
        "undistilled": plots.GREY, "distillspec": plots.ORANGE, "reference": plots.ORANGE, "adaspec": plots.BLUE,
        "draft": plots.BLUE, "target": plots.GREEN,
    }.items()
}  # fmt: skip
"""A draft keeps its colour through the whole report."""


def figures(report: Row) -> dict[str, str]:
    """All plots of the report, name to SVG, for the tracker."""
    return {name: svg for name, (svg, _) in {**decoding_figures(report), **analysis_figures(report)}.items()}


def decoding_figures(report: Row) -> dict[str, Plot]:
    """Speed and acceptance, name to plot."""
    greedy = [row for row in drafted(report) if row["temperature"] == 0 and row.get("speedup")]
    profile, found = report.get("profile") or {}, {}
    best = [{**row, "name": f"{display(row['draft'])}, k = {row['draft_length']}"} for row in fastest(greedy)]
    if len(best) > 1:
        found["speedup"] = (plots.speedup_bars(best[::-1], "Greedy speedup at the best draft length"), "")
    measured = {row["draft_length"]: row for row in greedy if row["draft"] == exported(report)}
    predicted = {k: row["predicted_speedup"] for k, row in measured.items() if row.get("predicted_speedup")}
    predicted = {int(k): speedup for k, speedup in (profile.get("predicted_speedup") or predicted).items()}
    if len(measured.keys() | predicted.keys()) > 1:
        caption = f"{display(exported(report))}, greedy. Predicted: tokens per round ÷ (c·k + v(k + 1))."
        found["speedup_by_length"] = (plots.speedup_by_length(predicted, measured), caption)
    if len(costs := profile.get("verify_cost") or []) > 1:
        found["verify_cost"] = (plots.verify_cost({"v(n)": costs}), "Drafting pays as long as this stays flat.")
    if positions := _named(report, "acceptance_by_position"):
        svg = plots.acceptance_by_position(positions, COLOURS)
        found["acceptance_by_position"] = (svg, "How the acceptance rate falls along a draft.")
    return found


def analysis_figures(report: Row) -> dict[str, Plot]:
    """What the drafts learned, as in the AdaSPEC paper's analysis, name to plot."""
    found: dict[str, Plot] = {}
    if curves := _named(report, "curves"):
        xlabel, ylabel = "optimiser step", "α = mean Σ min(p, q), validation"
        found["curves"] = (plots.lines(curves, "Learning curves", xlabel, ylabel, COLOURS), "")
    if margins := _named(report, "margins"):
        title, xlabel = "Logit margin of the target's token", "z(target's token) − largest other z, z: draft's logits"
        caption = "Tokens left of 0 would not be proposed greedily."
        found["margins"] = (plots.histograms(margins, title, xlabel, COLOURS), caption)
    if kl := _named(report, "kl"):
        xlabel = "KL(p‖q) = Σ p·log(p/q) (nats per token)"
        caption = "The long tail holds the tokens that a small draft cannot learn."
        found["kl"] = (plots.histograms(kl, "Divergence per token", xlabel, COLOURS, log_y=True), caption)
    if tokens := (report.get("analysis") or {}).get("selected_tokens"):
        bars = [
            {"name": visible(row["token"]), "value": row["lift"], "note": f"{row['count']:,}"} for row in tokens[:20]
        ]
        svg = plots.bars(bars, "Tokens selected most", "lift = share of the selection ÷ share of all labels")
        caption = "Lift 2: twice as often as at random. Beside the bars: how often it was selected."
        found["selected_tokens"] = (svg, caption)
    return found


def _named(report: Row, part: str) -> dict[str, Any]:
    series = (report.get("analysis") or {}).get(part) or {}
    return {display(name): values for name, values in series.items() if values}


def visible(token: str) -> str:
    """A token as a visible label: spaces and line ends get signs."""
    shown = token.replace("\n", "⏎").replace("\t", "⇥").replace(" ", "␣")
    return shown if shown.strip() else "''"


TABLES = read_columns(Path(__file__).with_name("columns.csv"))
IDENTITY = {True: Badge("identical", "good"), False: Badge("differs", "bad"), None: Badge("unchecked", "warn")}


def build_page(report: Row, run_dir: Path) -> Page:
    """The page of a report (`write_report.write_report` says what is in it); absent parts are left out."""
    compared = comparisons(report)
    headline = " ".join(finding.text for finding in [speed(report), *compared[:1]])
    others = [*choice(report), *distillation(report), *compared[1:]]
    blocks: list[Block] = [
        Tiles(list(_tiles(report))),
        *(Text(finding.text, finding.tone) for finding in others),
        *_drafts(report),
        *_decoding(report),
    ]
    if learned := analysis_figures(report):
        blocks += [Heading("What the drafts learned"), Figures(list(learned.values()))]
    if samples := report.get("samples"):
        shown = [Sample(sample["tokens"], sample.get("prompt", "")) for sample in samples]
        blocks += [Heading("Samples", "Who wrote each token."), Samples(shown)]
    blocks += [*_use(report, run_dir), *_provenance(report)]
    return Page(f"{report['name']}: draft model report", headline, "draftsmith · distill", blocks)


def _tiles(report: Row) -> Iterable[Tile]:
    if (row := exported_row(report)) is not None:
        interval = row.get("speedup_ci95")
        note = f"95 %: {interval[0]:.2f} to {interval[1]:.2f}; " if interval else ""
        tone: Tone = "good" if row["speedup"] > 1 else "bad"
        yield Tile("greedy speedup", f"{row['speedup']:.2f}×", f"{note}same loop, no draft", tone)
        if row.get("speedup_vs_generate"):
            speed = f"{row['tokens_per_second']:,.0f} tokens/s"
            yield Tile("over model.generate", f"{row['speedup_vs_generate']:.2f}×", speed)
        same = IDENTITY[row.get("identical_to_target")]
        yield Tile("greedy output", same.text, "to the target's, token for token", same.tone)
        name = f"{display(row['draft'])} draft; the fastest length measured"
        yield Tile("draft length", f"{row['draft_length']} tokens", name)
        if row.get("block_efficiency"):
            yield Tile("block efficiency", f"{row['block_efficiency']:.2f}", "tokens per target forward")
    if (draft := judged(report)) is not None:
        error = f" ± {draft['offline_alpha_se']:.4f}" if draft.get("offline_alpha_se") else ""
        yield Tile("α offline", f"{draft['offline_alpha']:.3f}", f"{display(draft['name'])}{error}")
    target = report["target"]
    if target.get("accuracy") is not None:
        count = f"{target['accuracy_n']:,} problems" if target.get("accuracy_n") else "exact answers"
        yield Tile("target accuracy", f"{100 * target['accuracy']:.0f} %", count)
    if target.get("parameters"):
        yield Tile("target", _size(target["parameters"]), "parameters")


def _drafts(report: Row) -> Iterable[Block]:
    yield Heading("Drafts", "All drafts are judged on the same texts, which the target wrote for held-out prompts.")
    yield Table(TABLES["drafts"], [draft_row(row) for row in report["drafts"]])
    if pairs := report.get("paired"):
        named = [{**p, "pair": f"{display(p['a'])} − {display(p['b'])}"} for p in pairs]
        for pair in [pair for pair in named if pair.get("p_value") is not None]:
            pair["p"] = p_value(pair["p_value"]).removeprefix("p ").removeprefix("= ")
        yield Table(TABLES["paired"], named, "Paired comparison")


def _decoding(report: Row) -> Iterable[Block]:
    rows = [decoding_row(row) for row in report["decoding"]]
    if not rows:
        return
    yield Heading("Decoding", "Each draft at its fastest draft length; the exact rule keeps the target's distribution.")
    best, columns = fastest(rows), TABLES["decoding"]
    temperatures = sorted({row["temperature"] for row in rows})
    for temperature in temperatures:
        chosen = [row for row in best if row["temperature"] == temperature]
        caption = "Greedy" if temperature == 0 else f"Sampled at {mode(temperature)}"
        yield Table(
            [c for c in columns if c.key != "temperature"], chosen, caption, legend=temperature == temperatures[-1]
        )
    if len(rows) > len(best):
        yield Table(columns, rows, legend=False, folded=f"All {len(rows)} measurements")
    if profile := report.get("profile"):
        yield Table(TABLES["profile"], [profile], "Cost model")
        if sentence := profile.get("verdict"):
            yield Text(sentence[:1].upper() + sentence[1:].rstrip(".") + ".")
    yield Figures(list(decoding_figures(report).values()))


def draft_row(row: Row) -> dict[str, Any]:
    """A draft with what tables show besides the numbers."""
    return {**row, "label": display(row["name"])}


def decoding_row(row: Row) -> dict[str, Any]:
    """A measurement with what tables show besides the numbers."""
    same = row.get("identical_to_target")
    output = IDENTITY[same] if row["temperature"] == 0 or same is False else LOSSLESS
    return {**row, "label": display(row["draft"]), "output": output}


def _use(report: Row, run_dir: Path) -> Iterable[Block]:
    export = report.get("exported")
    if not export:
        return
    target, draft = str(run_dir / "target"), str(run_dir / "export")
    kind = (report.get("settings") or {}).get("eagle", {}).get("kind")
    if kind in card.KINDS.values():
        yield Heading("Use the exported head", f"The feature head is in `{draft}`, in the layout that engines read.")
    else:
        kind = "draft"
        yield Heading("Use the exported draft", f"The draft is in `{draft}`, a plain Hugging Face folder.")
    yield from (Code(lines, title) for title, _, lines in card.commands(target, draft, kind=kind, **export))


def _provenance(report: Row) -> Iterable[Block]:
    settings = report.get("settings") or {}
    about = {k.replace("_", " "): _fact(v) for k, v in (report.get("machine") or {}).items()}
    yield Heading("Provenance")
    yield Facts({"created": report.get("created"), "seed": settings.get("seed"), **about})
    if commands := report.get("commands"):
        lines = commands.values() if isinstance(commands, Mapping) else commands
        yield Code("\n".join(lines), "Commands that reproduce this page")
    if settings:
        yield Code(json.dumps(settings, indent=2, ensure_ascii=False), folded="All settings")


def _fact(value: Any) -> Any:
    if isinstance(value, Mapping):
        return ", ".join(f"{k} {v}" for k, v in value.items())
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return f"{value:.4g}" if isinstance(value, float) else value


def _size(parameters: int) -> str:
    for unit, name in ((1e9, " B"), (1e6, " M"), (1e3, " k")):
        if parameters >= unit:
            return f"{parameters / unit:.3g}{name}"
    return str(parameters)


ORDER = ("name", "created", "verdict", "target", "drafts", "paired", "decoding", "profile", "analysis", "samples",
         "exported", "settings", "machine", "commands")  # fmt: skip
"""Order of the keys in report.json; others follow."""
CONSOLE = {"parameters", "offline_alpha_greedy", "seconds", "accepted_per_drafted"}
"""Columns of the page that the console's tables go without."""


def write_report(run_dir: str | Path, report: Row) -> None:
    """Write `report.json` and `report.html` below `run_dir`, each replaced only when complete.

    Args:
        run_dir: the run's folder.
        report: `name`; `target` {parameters, accuracy}; `drafts` [{name, offline_alpha, offline_alpha_se,
            optimiser_steps, teacher_tokens}]; `decoding` [{draft, temperature, draft_length, tokens_per_second,
            speedup, speedup_ci95, speedup_vs_generate, predicted_speedup, block_efficiency, alpha,
            accepted_per_drafted, identical_to_target}]; each of these keys, None where it was not measured.
            Optional: `created`, `paired` [{a, b, difference, se, p_value, n, label}], `profile`, `analysis`
            {margins, kl, acceptance_by_position, curves, selected_tokens}, `samples` [{prompt, tokens: [{text,
            who}]}], `exported` {length, token_map, gguf_type}, with which engines take the export, `settings`,
            `machine`, `commands`.
    """
    data = plain(dict(report))
    data["verdict"] = [finding.text for finding in findings(data)]
    ordered = {key: data[key] for key in (*ORDER, *sorted(set(data) - set(ORDER))) if key in data}
    content = json.dumps(ordered, indent=2, ensure_ascii=False, allow_nan=False, default=str)
    folder = Path(run_dir)
    page = build_page(json.loads(content), folder)
    write_text(folder / "report.json", content + "\n")
    page.write(folder / "report.html")


def console_tables(report: Row) -> Group:
    """What the terminal shows at the end of a run: drafts, decoding, and the findings in sentences."""
    report = plain(dict(report))
    best = exported_row(report)
    rows = [decoding_row(row) | {"style": "bold" if row is best else ""} for row in fastest(report["decoding"])]
    colours = {"good": "green", "warn": "yellow", "bad": "red"}
    return Group(
        console_table("Drafts", _short("drafts"), [draft_row(row) for row in report["drafts"]]),
        console_table("\nDecoding, each draft at its fastest length", _short("decoding"), rows),
        *(RichText(f.text.replace("`", ""), style=colours.get(f.tone, "")) for f in findings(report)),
    )


def _short(table: str) -> list[Column]:
    return [column for column in TABLES[table] if column.key not in CONSOLE]
