"""``python -m decode serve-check``: a draft in a real engine beside what is predicted of it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console

from decode.bench import machine
from decode.bench.costs import CostMeter, round_costs
from decode.bench.report import TABLES, console_table
from decode.bench.served import record, served_page, shown
from decode.bench.session import Session
from decode.bench.statistics import plain
from decode.commands.checks import check_models, measure_options, open_pair, open_suites, told_chat, use_chat
from decode.commands.settings import ServeCheckSettings, required
from decode.engines.gap_causes import causes_in_files
from decode.engines.gguf import convert
from decode.engines.launch import ENGINES, check_engine
from decode.engines.serve_check import Check, CheckOptions, serve_check
from decode.engines.settings import EngineSettings
from decode.errors import UserError, choose, read_json, scratch_folder
from decode.models.heads import FeatureHead, is_head
from decode.models.loading import stop_ids
from decode.progress import output_console


def run(settings: ServeCheckSettings) -> None:
    """Check the pair of the settings in the engine, print what was found, and record it beside the draft."""
    check(settings)
    console = Console(stderr=True)
    try:
        pair = open_pair(settings, settings.draft)
    except UserError as error:  # the files may say why
        causes = causes_in_files(str(settings.target), str(settings.draft), context=0, engine=settings.engine)
        if not causes:
            raise
        told = "".join(f"\n{cause.name}: {cause.told_by}; {cause.remedy}" for cause in causes)
        raise UserError(f"the draft cannot be served: {error}{told}") from error
    assert pair.draft is not None
    chat = use_chat(settings, pair.tokenizer)
    if told := told_chat(settings, chat):
        console.print(told, soft_wrap=True)
    suites = open_suites(settings.suite, limit=settings.limit, seed=settings.seed, split=settings.split)
    session = Session(pair.target, {"draft": pair.draft}, pair.tokenizer, measure_options(settings, chat=chat))
    items = [item for suite in suites for item in session.items(suite)]
    options = CheckOptions(
        settings.draft_lengths,
        settings.temperatures,
        settings.max_new_tokens,
        settings.batch_sizes,
        settings.seed,
        settings.draft_sampling,
        chat,
    )
    with console.status("measuring forwards") as status, engine_files(settings, pair.draft) as files:
        session.measure_costs(items, ["draft"], longest=max(settings.draft_lengths))
        costs = [session.costs["draft"]]
        for size in settings.batch_sizes if max(settings.batch_sizes) > 1 else []:
            widths = sorted({n + 1 for n in settings.draft_lengths})
            forwards = session.runner, session.drafts["draft"]
            costs.append(CostMeter(*forwards, widths=widths, context=costs[0].context, batch=size).run(9))
        found = serve_check(
            settings.engine,
            engine_settings(settings, pair.draft, *files),
            pair.target,
            pair.draft,
            items,
            sorted(stop_ids(pair.target, pair.tokenizer)),
            options,
            costs[0],
            status.update,
            (str(settings.target), str(settings.draft)),
            round_costs(costs),
        )
    result = plain(
        dataclasses.asdict(found) | {"suite": settings.suite, "machine": machine.describe(session.runner.device)}
    )
    for path in record(result, Path(str(settings.draft)), Path(settings.output) if settings.output else None):
        console.print(f"[dim]written to {path}")
    if settings.output and (report := read_json(Path(settings.output) / "report.json")):
        page = Path(settings.output) / "served.html"
        served_page(report["served"], str(report.get("name", "run"))).write(page)
        console.print(f"[dim]written to {page}")
    print(json.dumps(result, ensure_ascii=False)) if settings.json else show(found)


def check(settings: ServeCheckSettings) -> None:
    """Refuse what can be told before anything is loaded."""
    check_models(settings)
    required(settings, "draft")
    choose("engine", settings.engine, dict.fromkeys(ENGINES))
    if settings.engine != "transformers" and settings.url is None:
        check_engine(settings.engine, EngineSettings("", "", python=settings.python, binary=settings.binary,
                                                     port=settings.port))  # fmt: skip
    if settings.engine == "transformers" and is_head(str(settings.draft)):
        raise UserError(
            f"{settings.draft} holds a feature head, which transformers cannot draft with; take --engine vllm, or "
            "python -m decode bench"
        )
    if settings.draft_p_min and settings.engine != "llama.cpp":
        raise UserError(f"draft_p_min is a setting of llama.cpp; leave it out with --engine {settings.engine}")
    if max(settings.batch_sizes) > 1 and (settings.engine == "transformers" or 0 not in settings.temperatures):
        raise UserError("batch_sizes above 1 are measured greedily in vllm or llama.cpp; give --temperatures 0")
    if settings.url is not None and max(settings.batch_sizes) > 1:
        raise UserError("batch_sizes above 1 are compared with the engine without a draft; leave out --url")
    if settings.url is not None and len(settings.draft_lengths) != 1:
        raise UserError("a server that runs already drafts one length; give it alone, such as --draft-lengths 5")


@contextmanager
def engine_files(settings: ServeCheckSettings, draft: Any) -> Iterator[tuple[str, str]]:
    """Target and draft as the engine reads them; llama.cpp's are converted where they are no GGUF yet."""
    target, head = settings.engine_target or str(settings.target), settings.engine_draft or str(settings.draft)
    if settings.engine != "llama.cpp" or settings.url is not None:
        yield target, head
        return
    with scratch_folder() as folder:
        found = []
        for name, path in (("target", target), ("draft", head)):
            made = Path(head) / "gguf" / f"{name}-{settings.gguf_type}.gguf"
            if Path(path).suffix != ".gguf":
                of = str(settings.target) if name == "draft" and isinstance(draft, FeatureHead) else None
                file = folder / made.name
                ready = made.is_file() and not (name == "target" and settings.engine_target)
                path = str(made if ready else convert(path, file, settings.gguf_type, target=of))
            found.append(path)
        yield found[0], found[1]


def engine_settings(settings: ServeCheckSettings, draft: Any, target_file: str, draft_file: str) -> EngineSettings:
    """How the engine is started."""
    method = "draft_model"
    if isinstance(draft, FeatureHead):
        method = "eagle3" if draft.version == 3 else "eagle"
    shared = {f.name for f in dataclasses.fields(EngineSettings)} & vars(settings).keys()
    named = {name: getattr(settings, name) for name in shared} | {"target": target_file, "draft": draft_file}
    return EngineSettings(**named, method=method, seconds=settings.timeout, request_seconds=settings.request_timeout)


def show(found: Check) -> None:
    """The tables and the causes, for a terminal."""
    console = output_console(width=170, highlight=False)
    console.print(console_table("", TABLES["served"], list(map(shown, found.rows))))
    console.print("[dim]tokens a round: 1 + Σ accepted / Σ rounds, as the engine counts, and as predicted from p and q")
    console.print("\nAccepted at each draft position, of all rounds: served / predicted", style="bold")
    for row in found.rows:
        cells = (
            f"{at['served_marginal']:.3f}/{at['predicted_marginal']:.3f}{'' if at['within'] else '!'}"
            for at in row["positions"]
        )
        console.print(f"T {row['temperature']:g}, k {row['draft_length']}: {'  '.join(cells)}", soft_wrap=True)
    console.print("[dim]! more than two standard errors apart")
    if found.together:
        console.print(console_table("Several texts at a time", TABLES["together"], found.together))
    if not found.causes:
        apart = [row for row in found.rows if not row["fits"]]
        console.print(
            f"\nServed and predicted differ in {len(apart)} rows, and no known cause explains it."
            if apart
            else "\nServed as predicted: every block efficiency agrees within two standard errors, or within 0.02.",
            style="yellow" if apart else "green",
        )
    for cause in found.causes:
        console.print(f"\n[bold yellow]{cause.name}[/]: {cause.told_by}.\n  Next: {cause.remedy}.", soft_wrap=True)
