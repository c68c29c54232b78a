"""``draftsmith decode bench``: from settings to tables and a page."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from decode.commands.checks import (
    api_settings,
    check_lengths,
    open_pair,
    open_suites,
    parts_of,
    session_options,
    use_chat,
)
from decode.commands.cli import check_writable
from decode.commands.settings import BenchSettings, required
from decode.commands.stores import read_corpus, write_stores
from decode.drafters.corpus import join_documents
from decode.errors import UserError
from decode.files import Fields, scratch_folder
from decode.measure.benchmark import BenchEntry, Benchmark, plan
from decode.measure.report import answers, console_tables, doubts, write_report
from decode.measure.session import Session
from decode.methods import METHODS, USUAL, Parts, kind_of, refusal, with_options
from decode.models.open import DraftModel, Pair, described, load_tokenizer, open_draft, placement, unnamed_ends
from decode.options import split_spec
from decode.progress import output_console, working


def draft_names(items: Sequence[str]) -> dict[str, str]:
    """Names and paths of ``NAME=PATH`` or of plain paths, which are named by their last part.

    Raises:
        UserError: two drafts of one name.
    """
    named = {}
    for item in items:
        name, equals, path = item.partition("=")
        named[name if equals else Path(item).name] = path if equals else item
    if len(named) < len(items):
        raise UserError(f"two of the drafts {', '.join(items)} have one name; name them: --draft one=PATH two=PATH")
    return named


def chosen_methods(settings: BenchSettings, drafts: Sequence[Parts]) -> list[str]:
    """The methods of the settings, by default the usual ones of each draft, and those of a datastore and of probes.

    `drafts` are what there is with each draft, or without any.

    Raises:
        UserError: there is no target, or a method is unknown or lacks something.
    """

    def refused(spec: str) -> str:
        method, options = with_options(spec, settings)
        reasons = [refusal(method, replace(parts, options=options)) for parts in drafts]
        return "" if "" in reasons else reasons[0]

    required(settings, "target")
    for spec in settings.methods:
        if why := refused(spec):
            raise UserError(why)
    early = settings.exit_layer is not None or settings.probes is not None  # without, an exit layer is a guess
    usual = {method for parts in drafts for method in USUAL[parts.draft]}
    usual |= {method for method in METHODS if kind_of(method).store or (early and kind_of(method).itself)}
    return list(settings.methods) or [method for method in METHODS if method in usual and not refused(method)]


def open_session(
    settings: BenchSettings, methods: Sequence[str], pair: Pair, drafts: Mapping[str, DraftModel], folder: Path
) -> tuple[Session, list[BenchEntry]]:
    """The models opened for measurement, and the entries that they allow; a missing datastore is built from the corpus.

    Raises:
        UserError: target and drafts allow no entry of a method that the settings name, or drafts are longer than the
            target's context.
    """
    options, kinds = session_options(settings, pair), [kind_of(split_spec(method)[0]) for method in methods]
    if settings.corpus and not settings.datastore and any(kind.store for kind in kinds):
        documents = read_corpus(settings.corpus, pair.tokenizer, settings.corpus_texts, settings.seed)
        options.datastore = folder / "work" / "stores"
        write_stores(join_documents(documents), options.datastore, pair.tokenizer)
    session = Session(pair.target, drafts, pair.tokenizer, options)
    entries = plan(
        methods, drafts, settings.temperatures, draft_lengths=settings.draft_lengths, options=settings,
        target=session.runner, needed=settings.methods,
    )  # fmt: skip
    check_lengths("draft_length", [entry.options.draft_length for entry in entries], session.model)
    return session, entries


def bench(pair: Pair, methods: Sequence[str] = (), suite: Sequence[str] = (), **options: Any) -> list[Fields]:
    """Compare decoding methods on this machine; nothing is printed or written.

    Args:
        pair: from `decode.load`.
        methods: names that ``draftsmith decode methods`` lists, with options of their own such as ``ears:beta=0.2``;
            none: the usual ones of the draft's kind.
        suite: prompts, as ``--suite`` takes them; none: chat where the tokenizer has a chat template, else arithmetic.
        options: any other option of ``draftsmith decode bench``, such as ``limit``, ``repeats`` or ``temperatures``.

    Returns:
        A row for each method, temperature and batch size, with the fields of ``methods`` in ``bench-DATE.json``.

    Raises:
        UserError: an unknown method, suite or option, a value out of range, prompts that do not fit.
    """
    drafts = {"draft": pair.draft} if pair.draft is not None else {}
    names = [f"{name}={pair.draft_name}" for name in drafts]
    settings = api_settings(BenchSettings, pair, options, draft=names, methods=methods, suite=suite)
    parts = parts_of(settings, None, corpus=bool(settings.corpus))
    chosen = chosen_methods(settings, [Parts.of_draft(pair.draft, parts.options, datastore=parts.datastore)])
    suites = open_suites(settings, chat=use_chat(settings, pair.tokenizer))
    with scratch_folder() as folder:
        session, entries = open_session(settings, chosen, pair, drafts, Path(settings.output or folder))
        return Benchmark(session).run(suites, entries, batch_sizes=settings.batch_sizes)


def run(settings: BenchSettings) -> None:
    """Measure, print the tables and write the report; after Ctrl-C those of what was measured.

    Raises:
        UserError: before anything is loaded, if something is unknown or missing, or results cannot be written.
        KeyboardInterrupt: passed on after the report has been written.
    """
    console, trust = output_console(), settings.trust_remote_code
    named, stores = draft_names(settings.draft), bool(settings.corpus)
    parts = [parts_of(settings, path, corpus=stores) for path in named.values() or [None]]
    methods, folder = chosen_methods(settings, parts), check_writable(settings.folder)
    # the tokenizer alone can refuse the settings, so it is read before the models
    chat = use_chat(settings, load_tokenizer(str(settings.target), trust_remote_code=trust), tell=True)
    suites = open_suites(settings, chat=chat)
    pair = open_pair(settings)
    drafts = {
        name: open_draft(path, pair.target, pair.tokenizer, trust_remote_code=trust) for name, path in named.items()
    }
    session, entries = open_session(settings, methods, pair, drafts, folder)
    lines = [f"{settings.target} {placement(pair.target)}", described(pair.target, session.options.warp)]
    lines += [unnamed_ends(pair.target, pair.tokenizer), *session.how]
    console.print(*filter(None, lines), f"results go to {folder}", sep="\n", soft_wrap=True)
    benchmark = Benchmark(session, lambda line: console.print(line, soft_wrap=True))
    try:
        with working(console, "reading prompts"):
            benchmark.run(suites, entries, batch_sizes=settings.batch_sizes)
    finally:  # an interrupt keeps what was measured
        if benchmark.rows:
            files = write_report(benchmark, asdict(settings), folder)
            console.print(*console_tables(benchmark.rows), sep="\n")
            lines = [f"{benchmark.stopped}: stopped early"] if benchmark.stopped else []
            lines += [f"{name}: {note}" for name, note in session.notes.items()]
            lines += [doubts(benchmark.rows), *answers(benchmark.rows), f"wrote {', '.join(map(str, files))}"]
            console.print(*filter(None, lines), sep="\n", soft_wrap=True)
