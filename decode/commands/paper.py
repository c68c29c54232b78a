"""``draftsmith decode paper NAME``: the numbers that a paper published, with ours among them."""

import csv
from pathlib import Path

from rich.table import Table

from decode.commands.settings import PaperSettings, bench_settings
from decode.errors import UserError, choose
from decode.files import Fields, read_json
from decode.measure.report import latest
from decode.progress import fitting_table, output_console

PUBLISHED = {file.stem: file for file in sorted(Path(__file__).with_name("published").glob("*.csv"))}
"""One CSV a paper: setting, method (of `decode.methods.METHODS`, with options as in reports), columns of `measured`."""
BASELINES = {"adasd": "vanilla", "adaspeed": "layerskip", "ears": "vanilla"}  # by which the column ``ratio`` divides


def measured(row: Fields, baseline: Fields) -> dict[str, float | None]:
    """The published columns from a row of our report, and from that of the paper's baseline.

    AdaSPEC's authors count α as accepted / (accepted + rejected) of greedy decoding with four drafted tokens, where a
    round adds one rejected token unless all four were accepted: our Σm / Σt at that length.
    """
    speed, length, alpha = map(row.get, ("tokens_per_second", "accepted_length", "greedy_accepted_per_tested"))
    return {
        "tokens/s": speed,
        "ms/token": speed and 1000 / speed,
        "ratio": speed / baseline["tokens_per_second"] if speed and baseline else None,
        "accepted length": length,
        "drafted": row.get("drafted_per_round"),
        "accepted": length and length - 1,
        "accepted/drafted": row.get("accepted_per_drafted"),
        "threshold": row.get("verification_threshold"),
        "accuracy": row.get("accuracy"),
        "alpha, %": alpha and 100 * alpha,
    }


def rows_of(paper: str, folder: Path) -> list[Fields]:
    """The methods of the last benchmark in a folder; for AdaSPEC the drafts of the training there."""
    if paper != "adaspec":
        return list(latest(folder).get("methods", []))
    texts = {"suite": "texts of the target", "temperature": 0.0}
    return [draft | texts for draft in read_json(folder / "report.json").get("drafts", [])]


def table_of(paper: str, rows: list[Fields]) -> Table:
    """The paper's rows and ours, by method."""
    with PUBLISHED[paper].open(newline="", encoding="utf-8") as file:
        published = list(csv.DictReader(file))
    columns = [key for key in measured({}, {}) if key in published[0]]
    lines = [(row["method"], row["setting"], *(row[key] or "–" for key in columns)) for row in published]
    baselines = {(r["suite"], r["temperature"]): r for r in rows if r["name"].split()[0] == BASELINES.get(paper)}
    for row in rows:
        place = row["suite"], row["temperature"]
        values = measured(row, baselines.get(place, {}))
        numbers = ("–" if values[key] is None else f"{values[key]:.3f}" for key in columns)
        lines.append((row["name"], "ours: {}, T = {:g}".format(*place), *numbers))
    lines.sort(key=lambda line: line[0].split()[0])
    title, right = f"{paper}: published numbers and ours", range(2, 2 + len(columns))
    return fitting_table(["method", "setting", *columns], [(line, "") for line in lines], title=title, right=right)


def run(settings: PaperSettings) -> None:
    """Measure a configuration of the paper, or read the report of a finished run, and print both side by side."""
    paper, folder = settings.paper, Path(settings.run or "runs/quickstart")
    if not paper:
        raise UserError(f"no paper is named; choose one: draftsmith decode paper {'|'.join(PUBLISHED)}")
    choose("paper", paper, PUBLISHED)
    if settings.run is None and paper != "adaspec":  # whose numbers are those of a training
        from decode.commands import bench

        config = f"configs/papers/{paper}/{settings.scale}.yaml"
        benchmark = bench_settings(["--config", config])
        benchmark.output = str(folder := Path(settings.output or f"runs/papers/{paper}-{settings.scale}"))
        line = f"{config} is measured now; later, --run {folder} prints its results without measuring"
        output_console(highlight=False).print(line, soft_wrap=True)
        bench.run(benchmark)
    if not (rows := rows_of(paper, folder)):
        raise UserError(f"{folder} has no bench-DATE.json (for adaspec no report.json); give such a folder with --run")
    output_console(highlight=False).print(table_of(paper, rows))
