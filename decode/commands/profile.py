"""``python -m decode profile``: can this draft make this target faster on this machine, and with what length?"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from decode.commands.checks import check_models, draft_options, make_warp, model_options, open_suites
from decode.commands.settings import ProfileSettings, required
from decode.core.errors import UserError
from decode.core.options import MethodOptions
from decode.core.sampling import Warp
from decode.core.trace import FORMULAS
from decode.measure import machine
from decode.measure.acceptance_offline import OfflineAlpha, offline_alpha
from decode.measure.cost import (
    LONGEST,
    CostModel,
    best_length,
    break_even,
    predicted_speedup,
    replayed_speedup,
    verdict,
)
from decode.measure.entries import BenchEntry, EntryRun
from decode.measure.session import BenchOptions, Item, Session
from decode.measure.statistics import plain
from decode.models.open import open_draft, open_target

OVERHEAD_PROMPTS = 4
"""Texts that bookkeeping is measured on."""


@dataclass
class Profile:
    """What `profile` finds out about a pair.

    Attributes:
        cost: c, v(n) and o.
        alpha: offline, over all positions of all texts.
        lengths: draft lengths with their predictions.
        best: the length with the largest predicted speedup; 0 if none gains.
        verdict: in a sentence.
        machine: where it was measured.
    """

    cost: CostModel
    alpha: OfflineAlpha
    lengths: list[dict[str, Any]]
    best: int
    verdict: str
    machine: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """The object that ``--json`` prints."""
        facts = {
            "cost_ratio": self.cost.cost_ratio,
            "verify_cost": [[n, v] for n, v in sorted(self.cost.verify_cost.items())],
            "overhead": self.cost.overhead,
            "draft_overhead": self.cost.draft_overhead,
            "target_seconds": self.cost.target_seconds,
            "draft_seconds": self.cost.draft_seconds,
            "context": self.cost.context,
            "offline_alpha": self.alpha.mean,
            "offline_alpha_se": self.alpha.se,
            "positions": sum(self.alpha.counts),
            "draft_lengths": self.lengths,
            "best_draft_length": self.best,
            "verdict": self.verdict,
            "machine": self.machine,
        }
        return dict(plain(facts))


def measure(session: Session, draft: str, items: Sequence[Item], warp: Warp, *, longest: int = LONGEST) -> Profile:
    """Measure costs and acceptance of a pair, and predict the speedup of every draft length.

    Args:
        session: target and drafts.
        draft: the draft's name there.
        items: prompts; the target answers them, and acceptance is measured on its answers.
        warp: the decoding mode.
        longest: longest draft to predict.
    """
    if longest < 1:
        raise UserError(f"longest is {longest}; give a draft length of at least 1")
    session.measure_costs(items, [draft], longest=longest)
    cost = session.costs[draft]
    cost.overhead, cost.draft_overhead = measure_overhead(session, draft, items, warp, cost)
    texts = [(item.ids + session.answer(item.ids, warp, seed), len(item.ids)) for seed, item in enumerate(items)]
    alpha = offline_alpha(session.model, session.draft_models[draft], texts, warp)
    if not sum(alpha.counts):
        raise UserError("the target wrote nothing, so α cannot be measured; choose other prompts or more new tokens")
    rows = [predict(k, alpha, cost) for k in range(1, longest + 1)]
    speedups = {row["draft_length"]: row["with_bookkeeping"] for row in rows}
    told = verdict(alpha.mean, cost, speedups)
    return Profile(cost, alpha, rows, best_length(speedups), told, machine.describe(session.runner.device))


def predict(k: int, alpha: OfflineAlpha, cost: CostModel) -> dict[str, Any]:
    """One draft length: cost, break-even, and speedup from the mean α and from the texts themselves."""
    c, v, o = cost.cost_ratio, cost.v, cost.overhead
    whole = c + cost.draft_overhead
    return {
        "draft_length": k,
        "round_cost": c * k + v(k + 1),
        "break_even_alpha": break_even(k, whole, v, o),
        "predicted_speedup": predicted_speedup(alpha.mean, k, c, v),
        "replayed_speedup": replayed_speedup(alpha.texts, k, c, v),
        "with_bookkeeping": replayed_speedup(alpha.texts, k, whole, v, o),
    }


def measure_overhead(
    session: Session, draft: str, items: Sequence[Item], warp: Warp, cost: CostModel
) -> tuple[float, float]:
    """Bookkeeping beyond that of a plain step: of a speculative round, and of each drafted token.

    Bookkeeping is what a round takes outside the models' forwards; two draft lengths tell its two parts apart. Only
    measured on the CPU, where a forward has ended when its call returns.

    Returns:
        Both in one-token target forwards; 0 elsewhere than on the CPU.
    """
    if session.runner.device.type != "cpu":
        return 0.0, 0.0
    runs = [EntryRun(session, BenchEntry("autoregressive", temperature=warp.temperature))]
    for k in (2, 8):
        options = MethodOptions(draft_length=k)
        runs.append(EntryRun(session, BenchEntry("vanilla", draft, options, temperature=warp.temperature)))
    spent, rounds, drafted = [0.0] * 3, [0] * 3, [0] * 3
    for item in items[:OVERHEAD_PROMPTS]:
        for i, run in enumerate(runs):
            text = run.write(item.ids, 0, 0, session.options.max_new_tokens)
            assert text.trace is not None
            spent[i] += text.seconds - (text.forward_seconds or 0.0)
            rounds[i] += text.forwards
            drafted[i] += sum(text.trace.drafted)
    plain_step, short, long = (s / max(1, r) / cost.target_seconds for s, r in zip(spent, rounds))
    mean = [d / max(1, r) for d, r in zip(drafted, rounds)]
    slope = max(0.0, (long - short) / (mean[2] - mean[1])) if mean[2] > mean[1] else 0.0
    return max(0.0, short - slope * mean[1] - plain_step), slope


def run(settings: ProfileSettings) -> None:
    """Profile the pair of the settings and print what was found."""
    check_models(settings)
    required(settings, "draft")
    warp = make_warp(settings, settings.temperature)
    suites = open_suites(settings.suite, limit=settings.limit, seed=settings.seed, split=settings.split)
    target, tokenizer = open_target(str(settings.target), **model_options(settings))
    draft = open_draft(str(settings.draft), target, tokenizer, **draft_options(settings))
    options = BenchOptions(
        max_new_tokens=settings.max_new_tokens,
        repeats=1,
        seed=settings.seed,
        chat=settings.chat,
        warp=make_warp(settings),
        threads=settings.threads,
        compile=settings.compile,
    )
    session = Session(target, {"draft": draft}, tokenizer, options)
    with Console(stderr=True).status("measuring forwards and acceptance"):
        items = [item for suite in suites for item in session.items(suite)]
        found = measure(session, "draft", items, warp, longest=settings.longest)
    if settings.json:
        print(json.dumps(found.to_dict() | {"threads": session.threads}, ensure_ascii=False))
    else:
        show(found, session.threads)
    for name, told in session.vocabularies.items():
        print(f"{name}: {told}", file=sys.stderr)


def show(found: Profile, threads: str) -> None:
    """The profile for a terminal."""
    console = Console(highlight=False)
    cost = found.cost
    console.print(f"{machine.sentence(found.machine)}\n{threads}", soft_wrap=True)
    facts = Table(box=None, pad_edge=False, show_header=False)
    for name, value, formula in (
        ("t(1)", f"{1e3 * cost.target_seconds:.3f} ms", f"one-token target forward, {cost.context} tokens before it"),
        ("c", f"{cost.cost_ratio:.3f}", FORMULAS["cost_ratio"]),
        ("o", f"{cost.overhead:.3f}", "bookkeeping of a speculative round beyond a plain step's, in the same unit"),
        ("o/k", f"{cost.draft_overhead:.3f}", "bookkeeping of each drafted token, in the same unit"),
        ("α", f"{found.alpha.mean:.4f}", f"{FORMULAS['offline_alpha']}: {sum(found.alpha.counts)} positions"),
        ("± α", f"{found.alpha.se:.4f}", "standard error, texts as the unit of sampling"),
    ):
        facts.add_row(name, value, f"[dim]{formula}")
    console.print(facts)
    told = "  ".join(f"v({n}) {v:.2f}" for n, v in sorted(cost.verify_cost.items()))
    console.print(f"[dim]{FORMULAS['verify_cost']}[/]\n{told}\n", soft_wrap=True)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for head in ("k", "round cost", "break-even α", "predicted", "replayed", "with o"):
        table.add_column(head, justify="right")
    for row in found.lengths:
        need = row["break_even_alpha"]
        cells = [str(row["draft_length"]), f"{row['round_cost']:.2f}", "none" if need is None else f"{need:.3f}"]
        cells += [f"{row[key]:.2f}" for key in ("predicted_speedup", "replayed_speedup", "with_bookkeeping")]
        table.add_row(*cells, style="bold green" if row["draft_length"] == found.best else "")
    console.print(table)
    for line in (
        "round cost: c·k + v(k+1). predicted: (1 − α^(k+1)) / ((1 − α)·round cost), the same α at every position.",
        "replayed: tokens / Σ round costs over the texts themselves, whose easy and hard tokens come in runs.",
        "with o: the same with bookkeeping; break-even α counts it too.",
    ):
        console.print(f"[dim]{line}", soft_wrap=True)
    console.print(f"\n{found.verdict}", soft_wrap=True, style="bold")
