"""``python -m decode bench``: from settings to a table, report.json and a page."""

import dataclasses
import hashlib
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from decode.bench.baselines import NEEDS_DRAFT, TRANSFORMERS_BASELINES
from decode.bench.batch_report import batch_table, conclusions, write_batch_report
from decode.bench.batch_sizes import FILLED, BatchBenchmark
from decode.bench.benchmark import Benchmark, ResultBlock
from decode.bench.entries import BenchEntry, plan
from decode.bench.report import (
    ALPHA_COLUMNS,
    by_block,
    category_table,
    console_table,
    drafting,
    mode,
    ratios,
    table,
    write_report,
)
from decode.bench.session import BenchOptions, Session
from decode.bench.suite_acceptance import suite_alphas
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
    told_chat,
    use_chat,
)
from decode.commands.datastore import read_corpus, write_stores
from decode.commands.parsing import check_writable
from decode.commands.settings import BenchSettings
from decode.drafters.corpus_files import join_documents
from decode.errors import UserError, read_json, write_text
from decode.method_options import split_spec
from decode.methods import HEADED, METHODS, PROBED, SELF_SPECULATIVE, smaller_store
from decode.models.heads import is_head
from decode.models.loading import load_tokenizer, open_draft, placement
from decode.models.other_tokenizer import DraftModel
from decode.models.pair import Pair, described
from decode.progress import output_console, working


def draft_names(given: Sequence[str]) -> dict[str, str]:
    """Names and paths of ``NAME=PATH`` or plain paths, which are called by their last parts.

    Raises:
        UserError: two drafts of one name.
    """
    named: dict[str, str] = {}
    for item in given:
        name, equals, path = item.partition("=")
        if not equals:
            parts, path = Path(item).parts, item
            name = parts[-1] if parts[-1] not in named else "/".join(parts[-2:])
        if name in named:
            raise UserError(f"two drafts are called {name!r}; name them: --draft one=PATH two=PATH")
        named[name] = path
    return named


class Checkpoint:
    """Finished blocks of a run that was stopped, kept as long as settings and weights are the same."""

    def __init__(self, path: Path, settings: BenchSettings) -> None:
        self.path = path
        self.key = fingerprint(settings)
        self.blocks: list[ResultBlock] = []

    def read(self) -> list[ResultBlock]:
        """Blocks that need not be measured again."""
        content = read_json(self.path)
        if content.get("key") == self.key:
            self.blocks = [ResultBlock(**block) for block in content["blocks"]]
        return list(self.blocks)

    def add(self, block: ResultBlock) -> None:
        """Keep a block that is complete."""
        self.blocks.append(block)
        content = {"key": self.key, "blocks": [dataclasses.asdict(block) for block in self.blocks]}
        write_text(self.path, json.dumps(content))

    def clear(self) -> None:
        """Everything is measured: the next run starts afresh."""
        self.path.unlink(missing_ok=True)


def fingerprint(settings: BenchSettings) -> str:
    """Of the settings, and of the weights that lie in the models' folders."""
    facts: dict[str, Any] = dataclasses.asdict(settings)
    for name in filter(None, (settings.target, *draft_names(settings.draft).values(), settings.probes)):
        path = Path(name)
        files = [path] if path.is_file() else sorted([*path.glob("*.safetensors"), *path.glob("*.gguf")])
        weights = {file: file.stat() for file in files}
        facts[f"weights of {name}"] = [(str(file), state.st_size, state.st_mtime_ns) for file, state in weights.items()]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


COMPARED = ("vanilla", "cost-optimal")  # what is compared with the loop without a draft where no method is asked for
LENGTHS = (1, 2, 4, 8)  # draft lengths where none are given


def with_defaults(settings: BenchSettings) -> BenchSettings:
    """The settings with methods and draft lengths for batches where they were left open."""
    methods = settings.methods or ["autoregressive", *(COMPARED if settings.draft else ())]
    lengths = settings.draft_lengths or list(LENGTHS)
    return dataclasses.replace(settings, methods=methods, draft_lengths=lengths, peers=False)


def enough_prompts(settings: BenchSettings) -> list[Suite]:
    """The suites with as many prompts as the largest batch needs."""
    limit = None if settings.limit is None else max(settings.limit, FILLED * max(settings.batch_sizes))
    return open_suites(settings.suite, limit=limit, seed=settings.seed, split=settings.split)


def measure(
    session: Session,
    settings: BenchSettings,
    suites: Sequence[Suite],
    entries: Sequence[BenchEntry],
    folder: Path | None,
) -> list[dict[str, Any]]:
    """Measure; where there is a folder, print the tables and write the report, also after Ctrl-C.

    Raises:
        UserError: a draft is missing, no prompt fits, or a model decodes one text at a time only.
    """
    bench = BatchBenchmark(session)
    if folder is None:
        return bench.run(suites, entries, settings.batch_sizes, prompts=settings.limit)
    console = output_console()
    left_out = {e.label for e in entries if e.method in TRANSFORMERS_BASELINES and e.method != "generate"}
    if left_out:
        console.print(f"{', '.join(sorted(left_out))}: transformers decodes one text at a time with these; left out")
    try:
        with working(console, "texts together"):
            bench.run(suites, entries, settings.batch_sizes, prompts=settings.limit)
    finally:
        if bench.rows:
            notes = session.notes(suites)
            files = write_batch_report(bench.rows, session, dataclasses.asdict(settings), folder, notes)
            for table in batch_table(bench.rows):
                console.print(table)
            told = [f"{name}: {note}" for name, note in notes.items()]
            for line in filter(None, [*conclusions(bench.rows), *told, session.load.warning()]):
                console.print(line, soft_wrap=True)
            console.print("wrote " + " and ".join(map(str, files)), soft_wrap=True)
    return bench.rows


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
    return open_suites(settings.suite, limit=settings.limit, seed=settings.seed, split=settings.split)


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
