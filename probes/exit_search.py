"""The choice of exit layer, stop rule and threshold for every method, by real rounds on validation prompts.

All settings decode a few prompts; of each method the fastest ones decode more, and the fastest of these the test
prompts, by which no setting was chosen.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product

from transformers import PreTrainedModel

from decode.drafters.probe import KINDS
from decode.files import Fields
from decode.measure.benchmark import BenchEntry, Benchmark, Record, paired_ratios
from decode.measure.session import BenchOptions, Session
from decode.measure.statistics import median_interval, plain
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


@dataclass(frozen=True)
class Setting:
    """A method with its options; steered to the acceptance that it was measured to have."""

    method: str
    exit_layer: int
    draft_length: int
    threshold: float | None = None  # of the stop rule; None for drafts of one length
    target_acceptance: float | None = None

    @property
    def name(self) -> str:
        """The name in rows."""
        name = f"{self.method} E{self.exit_layer} k{self.draft_length}"
        return name if self.threshold is None else f"{name} γ{self.threshold:g}"

    def entry(self, probes: str, temperature: float) -> BenchEntry:
        """The line of a benchmark."""
        values = {key: value for key, value in vars(self).items() if key != "method"}
        options = MethodOptions(**values, probes=probes)
        return BenchEntry(self.method, options=options, temperature=temperature, name=self.name)


def settings_of(method: str, exits: Sequence[int]) -> list[Setting]:
    """Return all settings of a method that are tried at these exits."""
    if method == "layerskip":
        return [Setting(method, e, k) for e, k in product(exits, LENGTHS)]
    return [Setting(method, e, WINDOW, t) for e, t in product(exits, THRESHOLDS)]


def fastest(settings: Sequence[Setting], rows: Sequence[Fields], count: int) -> list[Setting]:
    """Return the fastest settings of each method, with the acceptance that their rows had."""
    by_name = {row["name"]: row for row in rows}
    kept: list[Setting] = []
    for method in dict.fromkeys(setting.method for setting in settings):
        same = [setting for setting in settings if setting.method == method]
        for setting in sorted(same, key=lambda s: by_name[s.name]["speedup"] or 0.0, reverse=True)[:count]:
            accepted = by_name[setting.name]["accepted_per_drafted"]
            if setting.threshold is not None and setting.target_acceptance is None and accepted is not None:
                setting = replace(setting, target_acceptance=min(0.99, max(0.01, accepted)))
            kept.append(setting)
    return kept


class Trials:
    """Decodes prompts without a draft, by ``generate`` and with settings, once each."""

    def __init__(self, run: Run, model: PreTrainedModel, mode: Mode, options: ProbeSettings) -> None:
        how = BenchOptions(options.max_new_tokens, 1, run.settings.seed, warp=mode.warp, threads=run.settings.threads)
        self.session = Session(model, None, run.tokenizer, how)
        self.probes, self.mode = str(run.folder / "probes"), mode

    def __call__(self, suite: Suite, settings: Sequence[Setting]) -> tuple[list[Fields], dict[str, Record]]:
        """Return rows as those of `decode bench`, and the records, by name."""
        benchmark = Benchmark(self.session)
        rows = benchmark.run([suite], [s.entry(self.probes, self.mode.warp.temperature) for s in settings])
        return rows, {name: record for (*_, name), record in benchmark.records.items()}

    def validation(self, count: int) -> Suite:
        """Return prompts by which settings are chosen."""
        texts = self.mode.texts["validation"][:count]
        prompts = [Prompt(str(i), "", "", ids=tuple(ids[:n])) for i, (ids, n) in enumerate(texts)]
        return Suite("validation", prompts, None)


def best_settings(
    run: Run, model: PreTrainedModel, mode: Mode, exits: Sequence[int], options: ProbeSettings
) -> tuple[list[Fields], list[Fields]]:
    """Find the fastest setting of every method on validation prompts, and decode the test prompts with it.

    Returns:
        Rows of the test prompts as those of `decode bench`, with ``title``, ``exit_layer``, ``threshold``,
        ``target_acceptance``, ``tried`` (settings of the method that were tried) and ``speedup_vs_layerskip`` with its
        interval; and rows of the settings that were tried on validation prompts, the last measurement of each.
    """
    trials, tried = Trials(run, model, mode, options), dict[str, Fields]()

    def narrowed(settings: Sequence[Setting], prompts: int, count: int) -> list[Setting]:
        rows, _ = trials(trials.validation(prompts), settings)
        for setting in settings:
            (row,) = (row for row in rows if row["name"] == setting.name)
            tried[setting.name] = described(row, setting)
        return fastest(settings, rows, count)

    if len(exits) > EXITS:
        chosen = narrowed([Setting("layerskip", e, LENGTHS[1]) for e in exits], FEW, EXITS)
        exits = sorted(setting.exit_layer for setting in chosen)
    settings = [setting for method in METHODS for setting in settings_of(method, exits)]
    settings = narrowed(narrowed(settings, FEW, options.confirm), TRIED, 1)
    rows, records = trials(test_suite(run.corpus, run.settings.data.source, options.bench_prompts), settings)
    by_name = {setting.name: setting for setting in settings}
    (reference,) = (records[setting.name] for setting in settings if setting.method == "layerskip")
    counts = Counter(row["method"] for row in tried.values())
    for row in rows:
        row |= described(row, by_name.get(row["name"])) | {"top_p": mode.warp.top_p, "tried": counts.get(row["method"])}
        if records[row["name"]].texts and reference.texts:
            middle, interval = median_interval(paired_ratios(records[row["name"]], reference))
            row |= {"speedup_vs_layerskip": middle, "speedup_vs_layerskip_ci95": interval}
    return [plain(row) for row in rows], [plain(row) for row in tried.values()]


def described(row: Fields, setting: Setting | None) -> Fields:
    """Return a row with the title and the options of its setting."""
    return row | {"title": row["method"]} | {key: getattr(setting, key, None) for key in EXIT_OPTIONS}


def fastest_options(table: Sequence[Fields]) -> dict[str, Fields]:
    """Return the options of the run of each method and mode, which decoding uses if none are given."""
    chosen: dict[str, Fields] = {"greedy": {}, "sampled": {}}
    for row in table:
        if kind_of(row["method"]).itself:
            options = {key: row[key] for key in ("draft_length", *EXIT_OPTIONS) if row[key] is not None}
            chosen["greedy" if row["temperature"] == 0 else "sampled"][row["method"]] = options
    return chosen
