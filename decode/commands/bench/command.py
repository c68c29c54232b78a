"""``python -m decode bench``: from settings to a table, report.json and a page."""

import dataclasses
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from decode.commands.bench.batch_sizes import enough_prompts, measure, with_defaults
from decode.commands.bench.checkpoint import Checkpoint, draft_names
from decode.commands.bench.settings import BenchSettings
from decode.commands.build_datastore import read_corpus, write_stores
from decode.commands.parsing.exit_status import check_writable
from decode.commands.settings_checks import (
    STORES,
    api_settings,
    check_methods,
    check_models,
    make_warp,
    measure_options,
    method_options,
    needs_draft,
    open_pair,
    open_suites,
    store_folders,
    told_chat,
    use_chat,
)
from decode.core.errors import UserError
from decode.core.method_options import split_spec
from decode.core.progress import output_console, working
from decode.drafters.corpus_files import join_documents
from decode.measure.bench.compare_methods import Benchmark
from decode.measure.bench.method_entries import BenchEntry, plan
from decode.measure.bench.session import BenchOptions, Session
from decode.measure.bench.transformers_baselines import NEEDS_DRAFT, TRANSFORMERS_BASELINES
from decode.measure.suite_acceptance import suite_alphas
from decode.method_parts import smaller_store
from decode.methods import HEADED, METHODS, PROBED, SELF_SPECULATIVE
from decode.models.eagle.head_files import is_head
from decode.models.loading.generation_config import described
from decode.models.loading.open_model import load_tokenizer, open_draft, placement
from decode.models.loading.target_and_draft import Pair
from decode.models.other_tokenizer import DraftModel
from decode.prompts.prompt_suites import Suite
from decode.report.bench_report import write_report
from decode.report.bench_tables import (
    ALPHA_COLUMNS,
    by_block,
    category_table,
    console_table,
    drafting,
    mode,
    ratios,
    table,
)


def open_models(settings: BenchSettings) -> tuple[Pair, dict[str, DraftModel]]:
    """The target with its tokenizer, which alone can refuse the settings and is read first; and the drafts by name."""
    use_chat(settings, load_tokenizer(str(settings.target), trust_remote_code=settings.trust_remote_code))
    pair, how = open_pair(settings), {"trust_remote_code": settings.trust_remote_code}
    return pair, {
        name: open_draft(path, pair.target, pair.tokenizer, vocabulary=settings.draft_vocabulary, **how)
        for name, path in draft_names(settings.draft).items()
    }


def check(settings: BenchSettings) -> list[str]:
    """The methods to be compared, after everything has been refused that can be before a model is loaded.

    Raises:
        UserError: something is unknown or missing.
    """
    check_models(settings)
    methods = choose_methods(settings)
    check_methods(settings, methods, has_draft=bool(settings.draft), has_corpus=bool(settings.corpus))
    return methods


def bench(
    pair: Pair, methods: Sequence[str] = (), suite: Sequence[str] = ("arithmetic",), **options: Any
) -> list[dict[str, Any]]:
    """Compare decoding methods on this machine; nothing is printed or written.

    Args:
        pair: from `decode.load`.
        methods: names that ``python -m decode methods`` lists, with options of their own such as ``ears:beta=0.2``;
            none: all that the pair allows, and transformers' own generation.
        suite: prompts, as ``--suite`` takes them.
        options: any other option of ``python -m decode bench``, such as ``limit``, ``repeats`` or ``temperatures``.

    Returns:
        A row for each method and temperature, the fields those of ``methods`` in ``report.json``; with ``batch_sizes``
        a row for each of these too, the fields those of ``batches``.

    Raises:
        UserError: an unknown method, suite or option, a value out of range, prompts that do not fit.
    """
    given = [f"draft={pair.draft_name}"] if pair.draft is not None else []
    options = {"peers": not methods, "methods": list(methods), "suite": list(suite), "draft": given} | options
    settings = api_settings(BenchSettings, pair, **options)
    settings = with_defaults(settings) if settings.batch_sizes else settings
    chosen, suites = check(settings), _suites(settings)
    drafts = {"draft": pair.draft} if pair.draft is not None else {}
    with tempfile.TemporaryDirectory() as folder:
        built = bench_options(settings, chosen, pair, Path(settings.output or folder))
        session, entries = Session(pair.target, drafts, pair.tokenizer, built), plan_entries(settings, chosen, drafts)
        if settings.batch_sizes:
            return measure(session, settings, suites, entries, None)
        benchmark = Benchmark(session)
        benchmark.run(suites, entries)
    return benchmark.rows


def _suites(settings: BenchSettings) -> list[Suite]:
    if settings.batch_sizes:
        return enough_prompts(settings)
    names = ("limit", "seed", "split", "allow_code_execution")
    return open_suites(settings.suite, **{name: getattr(settings, name) for name in names})


def run(settings: BenchSettings) -> None:
    """Measure what the settings ask for; prints the table and writes the report, also after Ctrl-C.

    Raises:
        UserError: before anything is loaded, if something is unknown or missing, or results cannot be written.
        KeyboardInterrupt: passed on, after what was measured has been printed and written.
    """
    console = output_console()
    settings = with_defaults(settings) if settings.batch_sizes else settings
    methods, suites = check(settings), _suites(settings)
    folder = check_writable(settings.output or "runs/bench")
    pair, drafts = open_models(settings)
    entries = plan_entries(settings, methods, drafts)
    options = bench_options(settings, methods, pair, folder)
    console.print(f"{settings.target} {placement(pair.target)}", soft_wrap=True)
    if followed := described(pair.target, options.warp):
        console.print(followed, soft_wrap=True)
    if told := told_chat(settings, options.chat):
        console.print(told, soft_wrap=True)
    session = Session(pair.target, drafts, pair.tokenizer, options)
    benchmark = Benchmark(session)
    console.print(
        f"{session.threads}. {len(entries)} entries, {sum(len(s.prompts) for s in suites)} prompts", soft_wrap=True
    )
    for packing in session.packing:
        console.print(packing, soft_wrap=True)
    if settings.batch_sizes:
        measure(session, settings, suites, entries, folder)
        return
    work = Checkpoint(folder / "work" / "bench.json", settings)
    alphas: list[dict[str, Any]] = []
    try:
        with working(console, "costs of forwards"):
            benchmark.run(suites, entries, finished=work.read(), on_block=work.add)
            names = [s.name for s in suites] if drafts else []
            for name, temperature in [(n, t) for n in names for t in settings.alpha_temperatures]:
                alphas += suite_alphas(session, name, benchmark.items[name], temperature)
        work.clear()
        log_to_wandb_sweep(benchmark.rows)
    finally:  # an interrupt keeps what was measured
        if benchmark.blocks:
            notes = session.notes(suites)
            files = write_report(benchmark, dataclasses.asdict(settings), folder, notes, alphas)
            for block in benchmark.blocks:
                console.print(table(block, console.width))
                if (parts := category_table(block, console.width)) is not None:
                    console.print(parts)
            for (suite, temperature), rows in by_block(alphas).items():
                console.print(console_table(f"offline α, {suite}, {mode(temperature)}", ALPHA_COLUMNS, rows))
            for name, note in notes.items():
                console.print(f"{name}: {note}", soft_wrap=True)
            for line in filter(None, [*ratios(benchmark.rows), session.load.warning()]):
                console.print(line, soft_wrap=True)
            console.print("wrote " + " and ".join(map(str, files)), soft_wrap=True)


SWEPT = (
    "speedup", "speedup_vs_generate", "predicted_speedup", "tokens_per_second", "block_efficiency", "alpha",
    "accepted_per_drafted", "tv_spent", "accuracy", "draft_length",
)  # fmt: skip
"""What a run of a W&B sweep logs."""


def sweep_summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The numbers of the fastest method that drafts, by which W&B compares the runs of a sweep."""
    best = next(iter(drafting(rows)), {})
    return {key: float(best[key]) for key in SWEPT if isinstance(best.get(key), int | float)}


def log_to_wandb_sweep(rows: Sequence[Mapping[str, Any]]) -> None:
    """Under ``wandb agent``, log the summary to the run that the agent started; elsewhere W&B is not even imported."""
    if os.environ.get("WANDB_SWEEP_ID"):
        import wandb

        run = wandb.init(settings=wandb.Settings(console="off", disable_git=True, disable_code=True))
        run.summary.update(sweep_summary(rows))
        run.finish()


def choose_methods(settings: BenchSettings) -> list[str]:
    """The methods asked for, or all that the given models and files allow, and transformers' own."""
    methods = list(settings.methods)
    heads = [is_head(path) for path in draft_names(settings.draft).values()]
    has_head, has_model = any(heads), not all(heads)
    if not methods:
        has = {"datastore": bool(settings.datastore), "trigrams": bool(settings.trigrams or settings.datastore)}
        allowed = {m for m in METHODS if m not in STORES or has[STORES[m]] or settings.corpus}
        own_layers = settings.exit_layer is not None or settings.probes is not None
        allowed -= (SELF_SPECULATIVE if not own_layers else set()) | (PROBED if settings.probes is None else set())
        methods = [m for m in METHODS if m in allowed and (has_model or has_head or not needs_draft(m))]
        methods = [m for m in methods if has_head or m not in HEADED]
    if settings.peers:
        methods += [p for p in TRANSFORMERS_BASELINES if p not in methods and (has_model or p not in NEEDS_DRAFT)]
    return methods


def plan_entries(settings: BenchSettings, methods: Sequence[str], drafts: dict[str, DraftModel]) -> list[BenchEntry]:
    """All combinations that the settings ask for.

    Raises:
        UserError: a method was named that no draft suits.
    """
    entries = plan(
        methods,
        drafts,
        settings.temperatures,
        draft_lengths=settings.draft_lengths,
        options=method_options(settings),
        stop=settings.stop_rule,
        rule=settings.rule,
    )
    unfit = {split_spec(spec)[0] for spec in settings.methods} - {entry.method for entry in entries}
    if unfit:
        raise UserError(
            f"no draft suits {', '.join(sorted(unfit))}: EAGLE's methods want a feature head, transformers' own a "
            "model with the target's tokenizer"
        )
    return entries


def bench_options(settings: BenchSettings, methods: Sequence[str], pair: Pair, folder: Path) -> BenchOptions:
    """Options of the measurement; stores that are needed and not given are built from the corpus."""
    datastore, trigrams = store_folders(settings)
    chosen = [split_spec(method) for method in methods]
    stores = STORES | dict.fromkeys(("hybrid", "hybrid-tree"), "datastore")  # which they can do without
    missing = {stores[m] for m, _ in chosen if m in stores} - {
        name for name, given in (("datastore", datastore), ("trigrams", trigrams)) if given
    }
    if missing and settings.corpus:
        built = folder / "work" / "stores"
        shared: dict[str, Any] = {"order": settings.order or 3, "texts": settings.texts}
        tables = [shared | own for method, own in chosen if STORES.get(method) == "trigrams"]
        for texts in dict.fromkeys([None, *(own["texts"] for own in tables)]):
            orders = {own["order"] for own in tables if own["texts"] == texts}
            if not orders and (texts or "datastore" not in missing):
                continue
            count = texts or settings.corpus_texts
            read = join_documents(read_corpus(settings.corpus, pair.tokenizer, count, settings.seed))
            whole = texts is None and "datastore" in missing
            write_stores(read, smaller_store(built, texts), pair.tokenizer, datastore=whole, orders=orders)
        datastore, trigrams = datastore or built, trigrams or built
    chat, warp = use_chat(settings, pair.tokenizer), make_warp(settings, pair.target)
    return measure_options(settings, chat=chat, warp=warp, datastore=datastore, trigrams=trigrams)
