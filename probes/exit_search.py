"""The choice of exit layer, stop rule and threshold: speedups are predicted, good settings tried, the fastest run."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from transformers import PreTrainedModel

from decode.core.lengths import RoundCosts
from decode.drafters.probe import KINDS, AcceptanceProbe, save_probes
from decode.files import Fields
from decode.measure import machine
from decode.measure.benchmark import BASELINE, BenchEntry, Benchmark, Record, paired_ratios
from decode.measure.costs import exit_costs, speedup
from decode.measure.session import BenchOptions, Session
from decode.measure.statistics import median_interval, plain
from decode.measure.suites import Prompt, Suite
from decode.methods import kind_of
from decode.models.check import open_runner
from decode.models.fast.forward import FastRunner
from decode.models.open import DraftModel
from decode.options import MethodOptions
from decode.progress import working
from distill.data.corpus import test_suite
from distill.run import Run
from probes.features import Features, collect, exit_layers, read_engine
from probes.fit import evaluate_exits, logits, train_probes
from probes.labels import Mode
from probes.report import answer
from probes.settings import ProbeSettings

STOPPED = dict(zip(("draft-verify", "adaspeed", "adaspeed-probe", "confidence-probe"), ("token", "token", *KINDS)))
"""Methods with a threshold, and the confidence that they compare with it."""
METHODS = ("layerskip", *STOPPED)
WINDOW = 24  # longest draft considered: where nearly every token is accepted, a stop rule needs room to save anything
EXIT_OPTIONS = "exit_layer", "threshold", "target_acceptance"  # of methods, which rows of the benchmark do not have
THRESHOLDS = 0.05, 0.2, 0.4, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98
LENGTHS = 1, 2, 3, 4, 6, 8, 11, 16, WINDOW  # apart enough that the next one is another setting
TRIED = 12  # validation prompts on which settings are tried


@dataclass
class Choice:
    """A setting of a method with its predicted speedup over decoding without a draft."""

    method: str
    exit_layer: int
    window: int  # largest number of tokens drafted in a round
    threshold: float | None  # of the stop rule; None for a constant length
    speedup: float
    accepted: float  # predicted share of the drafted tokens that are accepted


def simulate(
    outcome: Sequence[float], confidence: Sequence[float] | None, most: int, threshold: float = 0, product: bool = False
) -> tuple[list[int], list[int]]:
    """Replay the rounds of decoding one text, whose tokens are accepted as ``outcome`` says if they are drafted.

    A draft ends with ``most`` tokens, or with the token whose confidence is below the threshold; as a ``product`` that
    is all tokens' so far. Returns how many tokens each round drafts, and how many are accepted.
    """
    drafted, accepted, start, n = [], [], 0, len(outcome)
    while start < n:
        k, aggregate = 0, 1.0
        while k < min(most, n - start):
            if confidence is not None:
                aggregate = aggregate * confidence[start + k] if product else confidence[start + k]
            k += 1
            if aggregate < threshold:
                break
        m = 0
        while m < min(k, n - start - 1) and outcome[start + m] > 0:
            m += 1
        drafted.append(k)
        accepted.append(m)
        start += m + 1
    return drafted, accepted


def predict(
    outcomes: Sequence[Sequence[float]],
    confidences: Mapping[str, Sequence[Sequence[float]]],
    exit_layer: int,
    costs: RoundCosts,
    reading: Mapping[str, float],
    window: int,
) -> list[Choice]:
    """Return all settings of an exit layer with their predicted speedups.

    Acceptances are by text and position, and so are confidences for ``token`` and each kind of probe; costs are by exit
    layer. ``reading`` has the seconds that a confidence adds to a drafted token: see `decode.measure.costs.exit_costs`.
    """
    settings: list[tuple[str, int, float | None]] = [("layerskip", k, None) for k in LENGTHS if k <= window]
    settings += [(m, window, t) for m, rule in STOPPED.items() if rule in confidences for t in THRESHOLDS]
    choices = []
    for method, length, threshold in settings:
        rule = STOPPED.get(method, "length")
        drafted, accepted = list[int](), list[int]()
        for i, outcome in enumerate(outcomes):
            confidence = confidences[rule][i] if rule in confidences else None
            d, a = simulate(outcome, confidence, length, threshold or 0.0, product=method != "draft-verify")
            drafted += d
            accepted += a
        more = sum(drafted) * reading.get(rule, 0.0)
        speed = speedup(sum(accepted) + len(accepted), Counter(drafted), costs, exit_layer, more=more)
        choices.append(Choice(method, exit_layer, length, threshold, speed, sum(accepted) / max(1, sum(drafted))))
    return choices


def best_of(choices: Sequence[Choice], method: str, count: int = 1) -> list[Choice]:
    """Return the settings of a method with the largest predicted speedups."""
    return sorted((c for c in choices if c.method == method), key=lambda c: -c.speedup)[:count]


def by_text(values: Tensor, text: Tensor) -> list[list[float]]:
    """Return values of positions ``[n]`` as a list for each text."""
    counts = torch.bincount(text)
    return [part.tolist() for part in values.split(counts[counts > 0].tolist())]


def predict_all(
    runner: FastRunner, mode: Mode, held: Features, probes: Sequence[AcceptanceProbe]
) -> tuple[list[Choice], Fields]:
    """Return predicted speedups of all settings on the validation texts, seen as ``held``, and the measured costs."""
    by_place = {(probe.layer, probe.kind): probe for probe in probes}
    prompts = [ids[: (len(ids) + start) // 2] for ids, start in mode.texts["validation"][:3]]
    timed = {kind: by_place[held.exits[0], kind] for kind in KINDS}
    costs, reading = exit_costs(runner, held.exits, timed, mode.warp, prompts, longest=WINDOW)
    choices: list[Choice] = []
    for i, layer in enumerate(held.exits):
        scores = {"token": held.token_probability[i]}
        scores |= {kind: logits(by_place[layer, kind], held).sigmoid() for kind in KINDS}
        confidences = {name: by_text(values, held.text) for name, values in scores.items()}
        choices += predict(by_text(held.outcome[i], held.text), confidences, layer, costs, reading, WINDOW)
    return choices, {"exits": costs.to_dict(), "confidence": reading}


def candidates(choices: Sequence[Choice], method: str, count: int) -> list[Choice]:
    """Return the settings of a method that are tried: the best predicted of every exit, then the second best, ..."""
    exits = {choice.exit_layer for choice in choices}
    places = (best_of([c for c in choices if c.exit_layer == layer], method, count) for layer in exits)
    ranked = [(rank, -choice.speedup, choice) for at in places for rank, choice in enumerate(at)]
    return [choice for *_, choice in sorted(ranked, key=lambda entry: entry[:2])[:count]]


def open_session(
    run: Run,
    model: PreTrainedModel,
    mode: Mode,
    options: ProbeSettings,
    drafts: Mapping[str, DraftModel] | None = None,
) -> Session:
    """Return a session that decodes each prompt once."""
    threads, seed = run.settings.threads, run.settings.seed
    how = BenchOptions(options.max_new_tokens, 1, seed, warp=mode.warp, threads=threads)
    return Session(model, drafts, run.tokenizer, how)


def test_prompts(run: Run, options: ProbeSettings) -> Suite:
    """Return the prompts of the real runs that are reported."""
    return test_suite(run.corpus, run.settings.data.source, options.bench_prompts)


def bench(session: Session, suite: Suite, entries: Sequence[BenchEntry]) -> tuple[list[Fields], dict[str, Record]]:
    """Return rows as those of `decode bench`, and the records, by name."""
    benchmark = Benchmark(session)
    rows = benchmark.run([suite], entries)
    return rows, {name: record for (*_, name), record in benchmark.records.items()}


def run_best(
    run: Run, model: PreTrainedModel, mode: Mode, choices: Sequence[Choice], options: ProbeSettings
) -> tuple[list[Fields], list[Fields]]:
    """Try settings of every method on validation prompts, and decode the test prompts with the fastest of each.

    Both also decode without a draft and by ``generate``. No method gains by having been tried on the test prompts.

    Returns:
        Rows of the test prompts as those of `decode bench`, with ``title``, ``exit_layer``, ``threshold``,
        ``target_acceptance``, ``predicted_speedup``, ``tried`` (settings of the method that were tried) and
        ``speedup_vs_layerskip`` with its interval; and rows of the settings that were tried.
    """
    entries, chosen = dict[str, BenchEntry](), dict[str, Fields]()
    for choice in (choice for method in METHODS for choice in candidates(choices, method, options.confirm)):
        values: Fields = {"exit_layer": choice.exit_layer, "draft_length": choice.window}
        if choice.threshold is not None:  # the controller starts at the threshold and is steered to its acceptance
            values |= {"threshold": choice.threshold, "target_acceptance": min(0.99, max(0.01, choice.accepted))}
        given = MethodOptions(**values, probes=str(run.folder / "probes"))
        shown = {"E": given.exit_layer, "k": given.draft_length, "γ": given.threshold}
        name = " ".join([choice.method, *(f"{key}{value:g}" for key, value in shown.items() if value is not None)])
        entries[name] = BenchEntry(choice.method, options=given, temperature=mode.warp.temperature, name=name)
        chosen[name] = {key: getattr(given, key) for key in EXIT_OPTIONS} | {"predicted_speedup": choice.speedup}
    session, tables = open_session(run, model, mode, options), list[list[Fields]]()
    texts = mode.texts["validation"][:TRIED]
    validation = Suite(
        "validation", [Prompt(str(i), "", "", ids=tuple(ids[:n])) for i, (ids, n) in enumerate(texts)], None
    )
    counts, fastest = Counter(entry.method for entry in entries.values()), list(entries)
    for suite in (validation, test_prompts(run, options)):
        rows, records = bench(session, suite, [entries[name] for name in fastest])
        speeds = {row["name"]: row["speedup"] or 0.0 for row in rows}
        names = [[name for name in fastest if entries[name].method == method] for method in METHODS]
        fastest = [max(same, key=lambda name: speeds[name]) for same in names if same]
        (reference,) = (records[name] for name in fastest if entries[name].method == "layerskip")
        _, read = records[BASELINE].plain()
        for row in rows:
            row |= {"title": row["method"], "top_p": mode.warp.top_p, "tried": counts.get(row["method"])}
            row |= dict.fromkeys((*EXIT_OPTIONS, "predicted_speedup")) | chosen.get(row["name"], {})
            if expected := row["predicted_speedup"]:  # both sides read the prompts too
                row["predicted_speedup"] = (row["tokens"] + read) / (row["tokens"] / expected + read)
            if records[row["name"]].texts and reference.texts:
                middle, interval = median_interval(paired_ratios(records[row["name"]], reference))
                row |= {"speedup_vs_layerskip": middle, "speedup_vs_layerskip_ci95": interval}
        tables.append([plain(row) for row in rows])
    return tables[1], [row for row in tables[0] if row["name"] in entries]


def fastest_options(table: Sequence[Fields]) -> dict[str, Fields]:
    """Return the options of the run of each method and mode, which decoding uses if none are given."""
    fastest: dict[str, Fields] = {"greedy": {}, "sampled": {}}
    for row in table:
        if kind_of(row["method"]).itself:
            given = {key: row[key] for key in ("draft_length", *EXIT_OPTIONS) if row[key] is not None}
            fastest["greedy" if row["temperature"] == 0 else "sampled"][row["method"]] = given
    return fastest


def exit_experiment(run: Run, model: PreTrainedModel, modes: list[Mode], options: ProbeSettings) -> Fields:
    """Train and judge probes of all exits, and choose an exit and a stop rule; return the parts of the report."""
    folder, exits, seed = run.folder / "probes", exit_layers(model, options.layers), run.settings.seed
    served = run.settings.teacher.in_engine
    read = partial(read_engine, run.states, model) if served else None
    rows, table, probes = list[Fields](), list[Fields](), list[AcceptanceProbe]()
    held = list[tuple[Mode, Features, list[AcceptanceProbe]]]()
    facts: Fields = {
        "tokens": {}, "costs": {}, "predicted": {}, "tried": [],
        "temperature": options.temperature, "top_p": options.top_p,
        "machine": machine.describe(model.device), "labels": {mode.name: mode.label for mode in modes},
    }  # fmt: skip
    for mode in modes:
        answered = sum(len(ids) > start for texts in mode.texts.values() for ids, start in texts)
        with working(run.console, f"{mode.name} texts read", answered):
            seen = {
                split: collect(model, texts, mode, exits, seed=seed + i, sample=split != "validation", read=read)
                for i, (split, texts) in enumerate(mode.texts.items())
            }
        with working(run.console, f"probes, {mode.name}, label {mode.label}"):
            trained = train_probes(seen["train"], seen["validation"], mode.label, options.l2)
            judged = evaluate_exits(trained, seen["validation"], seen["test"])
        rows += [{"mode": mode.name, **row} for row in judged]
        facts["tokens"] |= {f"{mode.name}/{split}": len(features) for split, features in seen.items()}
        held.append((mode, seen["validation"], trained))
        probes += trained
    save_probes(folder, model, probes)
    # with the threads that decode, because how weights are laid out is measured
    torch.set_num_threads(machine.choose_threads(model, run.settings.threads)[0])
    runner = None if served else open_runner(model, pack="auto")
    if isinstance(runner, FastRunner):
        for mode, features, trained in held:
            with working(run.console, f"predicted speedup of every setting, {mode.name}"):
                choices, facts["costs"][mode.name] = predict_all(runner, mode, features, trained)
            with working(run.console, f"real runs of the best settings, {mode.name}", bars=False):
                ran, tried = run_best(run, model, mode, choices, options)
            table += ran
            facts["tried"] += tried
            places = [[choice for choice in choices if choice.exit_layer == layer] for layer in exits]
            facts["predicted"][mode.name] = [vars(best_of(at, method)[0]) for at in places for method in METHODS]
        save_probes(folder, model, probes, fastest_options(table))
    else:
        reason = "decoding with early exits is not supported for this family, so no exit is chosen"
        reason = "the target stands in an engine, so no exit is chosen and nothing is decoded" if served else reason
        run.line(f"[yellow]{model.config.model_type}: {reason}[/yellow]")
    added = plain({"probes": rows, "self_speculation": table, "probe_settings": facts})
    return {**added, "probe_findings": [answer(added, mode.name) for mode in modes]}
