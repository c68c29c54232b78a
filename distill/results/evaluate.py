"""The measurements of a finished run: acceptance on texts of the target, and decode's benchmark of the drafts."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from itertools import zip_longest
from typing import cast

import numpy as np

from decode.core.draft import Ids
from decode.engines.check import serving_facts
from decode.measure.acceptance import (
    DEPTH,
    LIKELIEST,
    ByDraft,
    as_drafted,
    offline_accepted_length,
    offline_accepted_per_tested,
    offline_alphas,
    paired,
    rounds_of_texts,
)
from decode.measure.benchmark import BenchEntry, Benchmark, speed_ratio
from decode.measure.session import BenchOptions, Session
from decode.measure.suites import Row, Suite
from decode.models.open import DraftModel, described, open_draft, own_warp
from decode.options import MethodOptions
from decode.progress import current, working
from distill.config import EvaluationSettings, Settings
from distill.data.corpus import test_suite
from distill.export.card import recommended_row
from distill.run import Run

Text = tuple[Ids, int]  # token ids, and how many of them are the prompt
MODES = {"sampled": 1.0, "greedy": 0.0}
"""Temperatures at which acceptance is measured on texts of the target."""
ADASPEC = 4  # drafted tokens with which AdaSPEC's authors count α
BATCH = 32  # test prompts that the target answers at a time, before anything is timed


def evaluate(run: Run) -> Row:
    """Measures a run's drafts on the corpus's test prompts, in one process.

    Returns:
        The run's report but for its name and settings. ``decoding`` are rows of the benchmark; without
        ``evaluation.decode_prompts`` there are none. ``texts`` has the numbers of each text by which runs of the same
        target are compared: see `distill.ablation.table`.
    """
    settings, measured = run.settings, cast(EvaluationSettings, run.settings.evaluation)
    best, trust = run.chosen(settings.export.choose), settings.student.trust_remote_code
    target = run.decoding_target()
    models = {
        name: open_draft(path, target, run.tokenizer, trust_remote_code=trust) for name, path in run.drafts.items()
    }
    counts = {"sampled": measured.prompts, "greedy": max(measured.prompts, measured.accuracy_prompts)}
    suite = test_suite(run.corpus, settings.data.source, max(*counts.values(), measured.decode_prompts))
    options = BenchOptions(
        max_new_tokens=measured.max_new_tokens,
        repeats=1,
        seed=settings.seed,
        threads=settings.threads,
        warp=own_warp(target, 0.0, {}),
    )
    session = Session(target, models, run.tokenizer, options)
    texts: dict[str, list[Text]] = {}
    alphas: dict[str, ByDraft] = {}
    student = settings.student
    # the drafted tokens of the reported accepted lengths, and of a block, with which tables compare kinds
    lengths = [student.draft.longest(student, wanted) for wanted in (DEPTH, student.block.size - 1)]
    decoding: list[Row] = []
    if followed := described(target, own_warp(target, 1.0, {})):
        run.console.print(followed, soft_wrap=True)
    for mode, temperature in MODES.items():
        warp, asked = own_warp(target, temperature, {}), [list(prompt.ids) for prompt in suite.prompts[: counts[mode]]]
        with working(run.console, f"texts of the target, {mode}", counts[mode], leave=True):
            written = session.written(asked, warp, BATCH, current().advance)
        texts[mode] = [([*ids, *text], len(ids)) for ids, text in zip(asked, written)]
        judged = texts[mode][: measured.prompts]
        answered = sum(len(ids) > n for ids, n in judged)
        with working(run.console, f"acceptance, {mode}", answered, leave=True):
            alphas[mode] = offline_alphas(
                target, models, judged, warp, depth=max(*lengths, student.steps),
                likeliest=temperature > 0, seen=lambda _: current().advance(),
            )  # fmt: skip
    if measured.decode_prompts:
        timed = Suite(suite.name, suite.prompts[: measured.decode_prompts], suite.score)
        with working(run.console, "decoding", leave=True):
            decoding = _decoded(run, session, timed, best)
    accuracy = None
    if suite.score is not None:
        answers = [session.text(ids[start:]) for ids, start in texts["greedy"][: measured.accuracy_prompts]]
        accuracy = statistics.fmean(map(suite.score, suite.prompts, answers))
    drafts = [_draft(run, name, models[name], alphas, decoding, lengths[0]) for name in models]
    return {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "target": {"parameters": target.num_parameters(), "accuracy": accuracy},
        "drafts": drafts,
        "more_texts": doubled(run.settings, [row for row in drafts if row["name"] in run.settings.drafts]),
        "paired": [
            {"a": best, "b": name, "label": "T = 1"} | paired(alphas["sampled"][name][0], alphas["sampled"][best][0])
            for name in run.drafts
            if name != best
        ],
        "decoding": decoding,
        "profile": {"draft": best},
        "texts": {mode: _texts(models, by_draft, lengths) for mode, by_draft in alphas.items()},
        "machine": session.facts() | {"dtype": str(target.dtype).removeprefix("torch.")},
        "trained_with": serving_facts(target, run.target, run.tokenizer, chat=run.corpus.chat),
    }


def doubled(settings: Settings, rows: Sequence[Row]) -> str:
    """What twice the texts would give, by a line through the accepted lengths over the logarithm of the tokens.

    ± is the standard error of an observation there. Empty unless the drafts differ in ``training.examples`` alone, with
    as many passes, and there are four numbers of tokens, without which the line has no error.
    """
    drafts = settings.drafts.values()
    passes = [replace(draft.training_of(settings.training), examples=None) for draft in drafts]
    others = [replace(draft, training={}, seeds=[]) for draft in drafts]
    if passes[0].epochs is None or any(each != first for first, *more in (passes, others) for each in more):
        return ""
    tokens, lengths = (
        np.array([row[key] for row in rows], float) for key in ("teacher_tokens", "greedy_accepted_length")
    )
    if len({*tokens}) < max(4, len(rows), len(passes)):
        return ""
    line, spread = np.polyfit(x := np.log2(tokens), lengths, 1, cov=True)
    twice, left = np.array([x.max() + 1, 1.0]), lengths - np.polyval(line, x)
    error = float(twice @ spread @ twice + left @ left / (len(x) - 2)) ** 0.5
    return (
        f"Accepted length, greedy = {line[1]:.2f} + {line[0]:.3f} · log2(teacher tokens). Extrapolated, twice the texts"
        f" would give {twice @ line:.2f} ± {error:.2f}."
    )


# -- acceptance -------------------------------------------------------------------------------------------------------


def _draft(
    run: Run, name: str, model: DraftModel, alphas: Mapping[str, ByDraft], decoding: Sequence[Row], length: int
) -> Row:
    record, (best, _) = run.draft_record(name), run.best(name)
    sampled, greedy = alphas["sampled"], alphas["greedy"][name]
    measured = {"": sampled[name], "_likeliest": sampled.get(name + LIKELIEST, greedy), "_greedy": greedy}
    chosen = recommended_row({"decoding": [row for row in decoding if row["temperature"] == 0]}, name)
    return {
        "name": name,
        "parameters": sum(p.numel() for p in model.parameters()),
        **{f"offline_alpha{rule}": first.mean for rule, (first, *_) in measured.items()},
        **{f"offline_alpha{rule}_se": first.se for rule, (first, *_) in measured.items()},
        "offline_accepted_length": offline_accepted_length(as_drafted(sampled, name, model), length),
        "greedy_accepted_length": offline_accepted_length(greedy, length),
        "greedy_accepted_per_tested": offline_accepted_per_tested(greedy, min(ADASPEC, length)),
        "alpha_by_position": [alpha.mean for alpha in sampled[name]],
        **{f"validation_{key}": best.get(key) for key in ("alpha", "accepted_length")},
        **record.account,
        "seconds": record.seconds,
        "acceptance": by_position([alpha.mean for alpha in greedy], best, chosen.get("acceptance_by_position") or []),
        "curve": [[row["step"], row["alpha"]] for row in record.history if "alpha" in row],
    }


def _texts(models: Mapping[str, DraftModel], by_draft: ByDraft, lengths: Sequence[int]) -> Row:
    """Returns positions, prompt, summed acceptance and rounds of every text, by which drafts of runs are compared.

    The rounds are by the length of the drafts.
    """
    (first, *_), *_ = by_draft.values()
    return {
        "counts": first.counts,
        "prompts": first.prompts,
        "drafts": {
            name: {
                "sums": by_draft[name][0].sums,
                "rounds": {
                    length: [sum(text.values()) for text in rounds_of_texts(as_drafted(by_draft, name, model), length)]
                    for length in dict.fromkeys(lengths)
                },
            }
            for name, model in models.items()
        },
    }


def by_position(offline: Sequence[float], validation: Mapping[str, float], decoded: Sequence[Row]) -> list[Row]:
    """Returns the greedy acceptance of each drafted token; offline a language model's is measured for the first one."""
    pairs = zip_longest(offline, (row["conditional"] for row in decoded))
    columns = "position", "validation", "offline", "decoded"
    return [
        dict(zip(columns, (i, validation.get(f"agreement_{i}" if i > 1 else "agreement"), *rates)))
        for i, rates in enumerate(pairs, 1)
    ]


# -- decoding ---------------------------------------------------------------------------------------------------------


def _decoded(run: Run, session: Session, suite: Suite, best: str) -> list[Row]:
    """Returns the benchmark's rows: of every draft at every length asked for, but not of an untrained head."""
    measured, student = cast(EvaluationSettings, run.settings.evaluation), run.settings.student
    longest = student.draft.longest(student, max(measured.draft_lengths))  # a block drafts no more
    lengths = sorted({min(k, longest) for k in measured.draft_lengths})
    method, untrained = student.draft.method, () if student.draft.decodable else (run.start,)
    timed = [
        (method, name, MethodOptions(draft_length=k), f"{name} {k}")
        for name in run.drafts if name not in untrained for k in lengths
    ]  # fmt: skip
    benchmark = Benchmark(session)
    rows = benchmark.run([suite], [
        BenchEntry(method, name, options, temperature=temperature, name=label)
        for temperature in measured.temperatures for method, name, options, label in timed
    ])  # fmt: skip
    measurements = list(zip(rows, benchmark.records.values()))
    for temperature in measured.temperatures:  # beside the exported draft at its recommended length, prompt by prompt
        alike = [(row, record) for row, record in measurements if row["temperature"] == temperature and record.texts]
        for base in (record for row, record in alike if row["draft"] == best and row["recommended"]):
            for row, record in alike:
                row["speedup_vs_exported"], row["speedup_vs_exported_ci95"] = speed_ratio(record, base)
    return rows
