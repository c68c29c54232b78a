"""``python -m decode bench``: from settings to tables, report.json and a page."""

import dataclasses
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from decode.bench import machine
from decode.bench.baselines import NEEDS_DRAFT, TRANSFORMERS_BASELINES
from decode.bench.benchmark import BenchEntry, Benchmark, plan
from decode.bench.records import drafting
from decode.bench.report import answers, console_tables, write_report
from decode.bench.session import BenchOptions, Session
from decode.bench.suites import Suite
from decode.commands.checks import (
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
    use_chat,
)
from decode.commands.datastore import read_corpus, write_stores
from decode.commands.parsing import check_writable
from decode.commands.settings import BenchSettings
from decode.drafters.corpus_files import join_documents
from decode.errors import UserError
from decode.method_options import split_spec
from decode.methods import HEADED, METHODS, PROBED, SELF_SPECULATIVE, smaller_store
from decode.models.head_files import is_head
from decode.models.loading import load_tokenizer, open_draft, placement
from decode.models.other_tokenizer import DraftModel
from decode.models.pair import Pair, described
from decode.progress import output_console, working

BATCHED = ("autoregressive", "vanilla", "cost-optimal")  # default methods of batches, the last two with a draft
BATCHED_LENGTHS = (1, 2, 4, 8)  # default draft lengths of batches
SWEPT = (
    "speedup", "speedup_vs_generate", "predicted_speedup", "tokens_per_second", "accepted_length", "alpha",
    "accepted_per_drafted", "tv_spent", "accuracy", "draft_length",
)  # fmt: skip
"""Fields that a run of a W&B sweep logs."""


def draft_names(given: Sequence[str]) -> dict[str, str]:
    """Names and paths of ``NAME=PATH`` or of plain paths, which are named by their last part.

    Raises:
        UserError: two drafts of one name.
    """
    named: dict[str, str] = {}
    for item in given:
        name, path = item.split("=", 1) if "=" in item else (Path(item).name, item)
        if name in named:
            raise UserError(f"two drafts are called {name!r}; name them: --draft one=PATH two=PATH")
        named[name] = path
    return named


def check(settings: BenchSettings) -> tuple[BenchSettings, list[str], list[Suite]]:
    """Refuse invalid settings before a model is loaded.

    Returns:
        The settings with the defaults of batches, the methods, and the suites.

    Raises:
        UserError: something is unknown or missing.
    """
    if max(settings.batch_sizes, default=1) > 1:
        methods = settings.methods or BATCHED[: 3 if settings.draft else 1]
        lengths = settings.draft_lengths or BATCHED_LENGTHS
        settings = dataclasses.replace(settings, methods=list(methods), draft_lengths=list(lengths), baselines=False)
    check_models(settings)
    methods = choose_methods(settings)
    check_methods(settings, methods, has_draft=bool(settings.draft), has_corpus=bool(settings.corpus))
    return settings, methods, open_suites(settings)


def choose_methods(settings: BenchSettings) -> list[str]:
    """The methods of the settings, by default all that the models and files allow, and transformers' own."""
    methods, heads = list(settings.methods), [is_head(path) for path in draft_names(settings.draft).values()]
    if not methods:
        methods = [
            m
            for m in METHODS
            if (m not in STORES or settings.corpus or settings.datastore or getattr(settings, STORES[m]))
            and (settings.exit_layer is not None or settings.probes is not None or m not in SELF_SPECULATIVE)
            and (settings.probes is not None or m not in PROBED)
            and (heads or not needs_draft(m))
            and (any(heads) or m not in HEADED)
        ]
    if settings.baselines:
        methods += [m for m in TRANSFORMERS_BASELINES if m not in methods and (not all(heads) or m not in NEEDS_DRAFT)]
    return methods


def plan_entries(settings: BenchSettings, methods: Sequence[str], drafts: dict[str, DraftModel]) -> list[BenchEntry]:
    """Entries of all combinations of the settings.

    Raises:
        UserError: no draft fits a named method.
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
    """Options of the measurement; missing stores are built from the corpus."""
    datastore, trigrams = store_folders(settings)
    chosen, built = [split_spec(method) for method in methods], folder / "work" / "stores"
    # the store is optional for hybrids
    copied = not datastore and any(method == "rest" or method.startswith("hybrid") for method, _ in chosen)
    orders: dict[int | None, set[int]] = {None: set()} if copied else {}  # of n-gram tables, by their number of texts
    for own in (own for method, own in chosen if method == "adaptix" and not trigrams):
        orders.setdefault(own.get("texts", settings.texts), set()).add(own.get("order", settings.order))
    for texts, some in orders.items() if settings.corpus else ():
        read = read_corpus(settings.corpus, pair.tokenizer, texts or settings.corpus_texts, settings.seed)
        place, whole = smaller_store(built, texts), copied and texts is None
        write_stores(join_documents(read), place, pair.tokenizer, datastore=whole, orders=some)
    if settings.corpus and orders:
        datastore, trigrams = datastore or built, trigrams or built
    return measure_options(
        settings,
        chat=use_chat(settings, pair.tokenizer),
        warp=make_warp(settings, pair.target),
        datastore=datastore,
        trigrams=trigrams,
    )


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
        A row for each method, temperature and batch size, with the fields of ``methods`` in ``report.json``.

    Raises:
        UserError: an unknown method, suite or option, a value out of range, prompts that do not fit.
    """
    given = [f"draft={pair.draft_name}"] if pair.draft is not None else []
    options = {"baselines": not methods, "methods": list(methods), "suite": list(suite), "draft": given} | options
    settings, chosen, suites = check(api_settings(BenchSettings, pair, **options))
    drafts = {"draft": pair.draft} if pair.draft is not None else {}
    with tempfile.TemporaryDirectory() as folder:
        built = bench_options(settings, chosen, pair, Path(settings.output or folder))
        benchmark = Benchmark(Session(pair.target, drafts, pair.tokenizer, built))
        entries = plan_entries(settings, chosen, drafts)
        return benchmark.run(suites, entries, batch_sizes=settings.batch_sizes)


def run(settings: BenchSettings) -> None:
    """Measure, print the tables and write the report; after Ctrl-C those of what was measured.

    Raises:
        UserError: before anything is loaded, if something is unknown or missing, or results cannot be written.
        KeyboardInterrupt: passed on after the report has been written.
    """
    console = output_console()
    settings, methods, suites = check(settings)
    folder = check_writable(settings.output or "runs/bench")
    trust = settings.trust_remote_code
    # the tokenizer alone can refuse the settings, so it is read before the models
    use_chat(settings, load_tokenizer(str(settings.target), trust_remote_code=trust), tell=True)
    pair, vocabulary = open_pair(settings), settings.draft_vocabulary
    drafts = {
        name: open_draft(path, pair.target, pair.tokenizer, vocabulary=vocabulary, trust_remote_code=trust)
        for name, path in draft_names(settings.draft).items()
    }
    entries = plan_entries(settings, methods, drafts)
    options = bench_options(settings, methods, pair, folder)
    session = Session(pair.target, drafts, pair.tokenizer, options)
    lines = [f"{settings.target} {placement(pair.target)}", described(pair.target, options.warp)]
    lines.append(f"{session.threads}. {len(entries)} entries, {sum(len(s.prompts) for s in suites)} prompts")
    console.print("\n".join(filter(None, [*lines, *session.packing])), soft_wrap=True)
    benchmark = Benchmark(session)
    try:
        with working(console, "costs of forwards"):
            benchmark.run(suites, entries, batch_sizes=settings.batch_sizes)
        if os.environ.get("WANDB_SWEEP_ID"):  # the process was started by `wandb agent`
            import wandb

            with wandb.init(settings=wandb.Settings(console="off", disable_git=True, disable_code=True)) as tracked:
                tracked.summary.update(sweep_summary(benchmark.rows))
    finally:  # an interrupt keeps what was measured
        if benchmark.rows:
            files = write_report(benchmark, dataclasses.asdict(settings), folder)
            for table in console_tables(benchmark.rows, console.width):
                console.print(table)
            lines = [f"{benchmark.stopped}: stopped early"] if benchmark.stopped else []
            lines += [f"{name}: {note}" for name, note in session.notes.items()]
            lines += [*answers(benchmark.rows), machine.load_warning(), f"wrote {' and '.join(map(str, files))}"]
            console.print("\n".join(filter(None, lines)), soft_wrap=True)


def sweep_summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The numbers of the fastest method that drafts, by which W&B compares the runs of a sweep."""
    best = next(iter(drafting(rows)), {})
    return {key: float(best[key]) for key in SWEPT if isinstance(best.get(key), int | float)}
