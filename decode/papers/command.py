"""``python -m decode paper``: a paper's experiments at a scale, its table with ours beside it, its orderings judged."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from decode.bench.report import plain_table
from decode.commands import bench as compare
from decode.commands.bench import draft_names, fingerprint
from decode.commands.dry_run import shrink
from decode.commands.settings import BenchSettings, PaperSettings, bench_settings
from decode.errors import UserError, choose, write_text
from decode.methods import PROBED
from decode.papers import Paper, papers
from decode.papers.claims import Ordering, PaperTable, Results
from decode.progress import output_console

SCALES = ("quickstart", "gpu-small", "full")
RUNS = {"quickstart": "runs/quickstart", "gpu-small": "runs/gpu-small"}
RECIPES = {"quickstart": "configs/quickstart.yaml", "gpu-small": "configs/papers/gpu-small.yaml"}
COLOURS = {"held": "green", "not held": "red", "within error": "yellow"}


def run(settings: PaperSettings) -> None:
    """Measure what is missing, print the tables and the orderings, write report.json and table.md.

    Raises:
        UserError: an unknown paper or scale, no GPU where one is needed, or a run that has to be made first.
    """
    if not settings.paper:
        raise UserError(f"no paper is named; give one of {', '.join(papers())}: python -m decode paper adasd")
    name, paper = str(settings.paper), choose("paper", str(settings.paper), papers())
    choose("scale", settings.scale, dict.fromkeys(SCALES))
    console = output_console(width=200)
    if settings.scale == "gpu-small" and not settings.dry_run and not torch.cuda.is_available():
        raise UserError("gpu-small measures on a GPU, and torch sees none here; take --scale quickstart")
    folder = Path(settings.output or f"runs/papers/{name}-{settings.scale}{'-dry-run' * settings.dry_run}")
    if paper.trains:
        results = _trained(settings)
    else:
        results = {
            path.stem: _measure(path, paper, settings, folder, console) for path in _configurations(name, settings)
        }
    tables, orderings = paper.tables(results), paper.orderings(results)
    show(tables, orderings, console)
    for file in write(name, settings, paper, tables, orderings, folder):
        console.print(f"wrote {file}", highlight=False)


def _configurations(name: str, settings: PaperSettings) -> list[Path]:
    """The files of a paper at a scale."""
    folder = Path(settings.configs) / name
    found = {path.stem: path for path in sorted(folder.glob("*.yaml"))}
    if not found:
        raise UserError(
            f"there are no configurations in {folder}; run this where the repository lies, or --configs DIR"
        )
    if settings.scale != "full":
        return [choose("configuration", settings.scale, found)]
    chosen = settings.only or [stem for stem in found if stem not in SCALES]
    return [choose("configuration", stem, found) for stem in chosen]


# -- decoding ----------------------------------------------------------------------------------------------------------


def _measure(path: Path, paper: Paper, given: PaperSettings, folder: Path, console: Console) -> Results:
    """The benchmark of one configuration, unless the same one is there already; and the draft by itself."""
    settings = _settings(path, given)
    settings.output = str(folder / path.stem)
    if given.dry_run:
        settings = shrink(settings, console)
    else:
        _check_runs(settings, given, console)
    report = _bench(settings, given.again, console)
    alone = None
    if paper.draft_alone and settings.draft:
        target = next(iter(draft_names(settings.draft).values()))
        single = dataclasses.replace(
            settings, target=target, draft=[], methods=["autoregressive"], output=f"{settings.output}/draft-alone"
        )
        alone = Results(_bench(single, given.again, console))
    return Results(report, alone, _stores(Path(str(settings.output))))


def _settings(path: Path, given: PaperSettings) -> BenchSettings:
    settings = bench_settings(["--config", str(path)])
    settings.limit = given.limit or settings.limit
    settings.repeats = given.repeats or settings.repeats
    standard = RUNS.get(given.scale)
    if given.run and standard:
        settings.target = str(settings.target).replace(standard, given.run)
        settings.draft = [draft.replace(standard, given.run) for draft in settings.draft]
        settings.probes = settings.probes and settings.probes.replace(standard, given.run)
    return settings


def _check_runs(settings: BenchSettings, given: PaperSettings, console: Console) -> None:
    """Refuse what has to be trained first; leave out the methods that want probes where there are none."""
    recipe = RECIPES.get(given.scale)
    for path in (str(settings.target), *draft_names(settings.draft).values()):
        if recipe is not None and not Path(path).is_dir():
            raise UserError(f"there is no model in {path}; train it first: python -m distill --config {recipe}")
    if settings.probes is not None and not Path(settings.probes).is_dir():
        left_out = [spec for spec in settings.methods if spec.split(":")[0] in PROBED]
        console.print(
            f"[yellow]no probes in {settings.probes}: {', '.join(left_out)} are left out, and the others run with "
            f"settings that were not tuned; train them with python -m probes --config "
            f"{recipe or 'configs/layerskip-llama.yaml'}[/yellow]",
            soft_wrap=True,
        )
        settings.methods = [spec for spec in settings.methods if spec not in left_out]
        settings.probes = None


def _bench(settings: BenchSettings, again: bool, console: Console) -> dict[str, Any]:
    """The report of a benchmark; it is run unless it was, with these settings and weights."""
    folder = Path(str(settings.output))
    made_from, report = folder / "fingerprint", folder / "report.json"
    key = fingerprint(settings)
    if again or not report.is_file() or not made_from.is_file() or made_from.read_text() != key:
        made_from.unlink(missing_ok=True)
        compare.run(settings)
        write_text(made_from, key)
    else:
        console.print(f"{folder} is up to date", highlight=False)
    content: dict[str, Any] = json.loads(report.read_text(encoding="utf-8"))
    return content


def _stores(folder: Path) -> dict[str, int]:
    """Bytes of the files that retrieval drafts from; they are mapped into memory whole."""
    root = folder / "work" / "stores"
    return {str(file.relative_to(root).with_suffix("")): file.stat().st_size for file in root.rglob("*.safetensors")}


# -- training ----------------------------------------------------------------------------------------------------------


def _trained(settings: PaperSettings) -> dict[str, Results]:
    """Reports of trainings: of --run (or this scale's run), or of all of the paper's runs that are there."""
    if settings.dry_run:
        raise UserError(
            "this paper's numbers come from training; a dry run of it: python -m distill --dry-run --config "
            f"{RECIPES.get(settings.scale, 'configs/papers/adaspec/FILE.yaml')}"
        )
    if settings.scale != "full":
        run = Path(settings.run or RUNS[settings.scale])
        commands = {run: f"python -m distill --config {RECIPES[settings.scale]}"}
    else:
        files = _configurations("adaspec", settings)
        commands = {Path("runs") / f"adaspec-{f.stem}": f"python -m distill --config {f}" for f in files}
    found = {}
    for run in commands:
        report = run / "report.json"
        content = json.loads(report.read_text(encoding="utf-8")) if report.is_file() else {}
        if content.get("drafts"):
            found[run.name.removeprefix("adaspec-")] = Results(content)
    if not found:
        missing = "\n  ".join(commands.values())
        raise UserError(f"there is no report of a training in {', '.join(map(str, commands))}; run first\n  {missing}")
    return found


# -- output ------------------------------------------------------------------------------------------------------------


def show(tables: list[PaperTable], orderings: list[Ordering], console: Console) -> None:
    """Tables, then the orderings with the verdict in colour."""
    for table in tables:
        console.print(plain_table(f"\n{table.title}", table.columns, table.rows))
        if table.note:
            console.print(table.note, style="dim", soft_wrap=True, highlight=False, markup=False)
    console.print("\nThe paper's orderings, here", style="bold")
    for ordering in orderings:
        console.print(
            ordering.sentence(), style=COLOURS[ordering.verdict], soft_wrap=True, highlight=False, markup=False
        )


def write(
    name: str,
    settings: PaperSettings,
    paper: Paper,
    tables: list[PaperTable],
    orderings: list[Ordering],
    folder: Path,
) -> list[Path]:
    """Write report.json and table.md; returns them."""
    content = {
        "paper": name,
        "title": paper.title,
        "scale": settings.scale,
        "command": f"python -m decode paper {name} --scale {settings.scale}",
        "tables": [dataclasses.asdict(table) for table in tables],
        "orderings": [dataclasses.asdict(o) | {"verdict": o.verdict, "sentence": o.sentence()} for o in orderings],
    }
    lines = [f"### {paper.title}, scale {settings.scale}", "", f"`{content['command']}`", ""]
    lines += [text for table in tables for text in (table.markdown(), "")]
    lines += [f"- {ordering.sentence()}" for ordering in orderings]
    files = [folder / "report.json", folder / "table.md"]
    write_text(files[0], json.dumps(content, indent=1, ensure_ascii=False) + "\n")
    write_text(files[1], "\n".join(lines) + "\n")
    return files
