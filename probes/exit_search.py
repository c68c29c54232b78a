"""The choice of exit layer, stop rule and threshold for every method, by real rounds on validation prompts.

All settings decode a few prompts; of each method the fastest ones decode more, and the fastest of these the test
prompts, by which no setting was chosen.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import product

from transformers import PreTrainedModel

from decode.drafters.probe import KINDS
from decode.files import Fields
from decode.measure.benchmark import BenchEntry, Benchmark, speed_ratio
from decode.measure.session import BenchOptions, Session
from decode.measure.statistics import plain
from decode.measure.suites import Prompt, Suite
from decode.methods import kind_of
from decode.options import MethodOptions
from distill.data.corpus import test_suite
from distill.run import Run
from probes.labels import Mode
from probes.settings import ProbeSettings

METHODS = ("layerskip", "draft-verify", "adaspeed", "adaspeed-probe", KINDS[1])
WINDOW = 24  # longest draft of the stop rules: where nearly every token is accepted, they need room to save anything
EXIT_OPTIONS = "exit_layer", "threshold", "target_acceptance"  # of methods, which rows of the benchmark do not have
LENGTHS, THRESHOLDS = (2, 4, 8, 16), (0.3, 0.6, 0.8, 0.95)
EXITS = 3  # exits that all methods try: those at which drafts of LENGTHS[1] tokens were fastest
FEW, TRIED = 3, 12  # validation prompts on which all settings are tried, and the fastest of them


def setting(
    shared: BenchEntry, method: str, exit_layer: int, draft_length: int, threshold: float | None = None
) -> BenchEntry:
    """Return a method with its options as the line of a benchmark; without a threshold drafts have one length."""
    name = f"{method} E{exit_layer} n{draft_length}" + ("" if threshold is None else f" γ{threshold:g}")
    options = replace(shared.options, exit_layer=exit_layer, draft_length=draft_length, threshold=threshold)
    return replace(shared, method=method, options=options, name=name)


def fastest(settings: Sequence[BenchEntry], rows: dict[str, Fields], count: int) -> list[BenchEntry]:
    """Return the fastest settings of each method by their rows; a stop rule is steered to the acceptance it had."""
    kept = list[BenchEntry]()
    for method in dict.fromkeys(entry.method for entry in settings):
        same = [entry for entry in settings if entry.method == method]
        for entry in sorted(same, key=lambda e: rows[e.name]["speedup"] or 0.0, reverse=True)[:count]:
            accepted, options = rows[entry.name]["accepted_per_drafted"], entry.options
            if options.threshold is not None and options.target_acceptance is None and accepted is not None:
                options = replace(options, target_acceptance=min(0.99, max(0.01, accepted)))
            kept.append(replace(entry, options=options))
    return kept


def best_settings(
    run: Run, model: PreTrainedModel, mode: Mode, exits: Sequence[int], options: ProbeSettings
) -> tuple[list[Fields], list[Fields]]:
    """Find the fastest setting of every method on validation prompts, and decode the test prompts with it.

    Returns:
        Rows of the test prompts as those of `decode bench`, with ``title``, ``exit_layer``, ``threshold``,
        ``target_acceptance``, ``tried`` (settings of the method that were tried) and ``speedup_vs_layerskip`` with its
        interval; and rows of the settings that were tried on validation prompts, the last measurement of each.
    """
    warp = mode.warp
    how = BenchOptions(options.max_new_tokens, 1, run.settings.seed, warp=warp, threads=run.settings.threads)
    session, tried = Session(model, None, run.tokenizer, how), dict[str, Fields]()
    folder = MethodOptions(probes=str(run.folder / "probes"))
    shared = BenchEntry("layerskip", options=folder, temperature=warp.temperature)

    def narrowed(settings: Sequence[BenchEntry], count: int, most: int) -> list[BenchEntry]:
        """Return the fastest ones of each method on so many validation prompts."""
        texts = mode.texts["validation"][:count]
        prompts = [Prompt(str(i), "", "", ids=tuple(ids[:n])) for i, (ids, n) in enumerate(texts)]
        rows = {row["name"]: row for row in Benchmark(session).run([Suite("validation", prompts, None)], settings)}
        tried.update({entry.name: described(rows[entry.name], entry) for entry in settings})
        return fastest(settings, rows, most)

    if len(exits) > EXITS:
        kept = narrowed([setting(shared, "layerskip", e, LENGTHS[1]) for e in exits], FEW, EXITS)
        exits = sorted(entry.options.exit_layer or 0 for entry in kept)
    every = [setting(shared, "layerskip", e, k) for e, k in product(exits, LENGTHS)]
    every += [setting(shared, m, e, WINDOW, t) for m, e, t in product(METHODS[1:], exits, THRESHOLDS)]
    settings = narrowed(narrowed(every, FEW, options.confirm), TRIED, 1)
    benchmark = Benchmark(session)
    rows = benchmark.run([test_suite(run.corpus, run.settings.data.source, options.bench_prompts)], settings)
    records = {name: record for (*_, name), record in benchmark.records.items()}
    by_name, counts = {entry.name: entry for entry in settings}, Counter(row["method"] for row in tried.values())
    (reference,) = (records[entry.name] for entry in settings if entry.method == "layerskip")
    for row in rows:
        record = records[row["name"]]
        row |= described(row, by_name.get(row["name"])) | {"top_p": warp.top_p, "tried": counts.get(row["method"])}
        if record.texts and reference.texts:
            row["speedup_vs_layerskip"], row["speedup_vs_layerskip_ci95"] = speed_ratio(record, reference)
    return [plain(row) for row in rows], [plain(row) for row in tried.values()]


def described(row: Fields, entry: BenchEntry | None) -> Fields:
    """Return a row with the title and the options of its setting."""
    options = entry and entry.options
    return row | {"title": row["method"]} | {key: getattr(options, key, None) for key in EXIT_OPTIONS}


def fastest_options(table: Sequence[Fields]) -> dict[str, Fields]:
    """Return the options of the run of each method and mode, which decoding uses if none are given."""
    chosen: dict[str, Fields] = {"greedy": {}, "sampled": {}}
    for row in table:
        if kind_of(row["method"]).itself:
            options = {key: row[key] for key in ("draft_length", *EXIT_OPTIONS) if row[key] is not None}
            chosen["greedy" if row["temperature"] == 0 else "sampled"][row["method"]] = options
    return chosen
