"""``python -m decode profile``: costs c and v(n), acceptance, and the predicted speedup of every draft length."""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from decode.bench import machine
from decode.bench.costs import CostModel
from decode.bench.offline_acceptance import DEPTH, OfflineAlpha, offline_alphas
from decode.bench.page import console_table
from decode.bench.prediction import (
    SCHEDULE,
    best_length,
    break_even,
    forecast,
    predicted_speedup,
    speedups_by_length,
    verdict,
)
from decode.bench.session import Session
from decode.bench.statistics import plain
from decode.bench.suites import Suite
from decode.commands.checks import (
    api_settings,
    check_models,
    make_warp,
    measure_options,
    open_pair,
    open_suites,
    use_chat,
)
from decode.commands.settings import ProfileSettings, required
from decode.errors import UserError, read_json, write_text
from decode.models.pair import Pair
from decode.progress import output_console, working
from decode.trace import FORMULAS

LENGTHS = ("draft_length", "round_cost", "break_even_alpha", "predicted_speedup", "with_bookkeeping")
FORECAST = (
    "batch_size", "ms", "cost_ratio", "v2", "v5", "overhead", "step_overhead", "goodput_without_draft",
    "best_draft_length", "best_speedup", "best_goodput",
)  # fmt: skip
"""Columns of the tables by draft length and by batch size."""


@dataclass
class PairProfile:
    """Costs, acceptance and predictions of one target and draft."""

    cost: CostModel
    alpha: OfflineAlpha  # offline, over all positions of all texts
    lengths: list[dict[str, Any]]  # predictions by draft length
    best: int  # the length with the largest predicted speedup; 0 if none gains
    verdict: str  # in a sentence
    batches: dict[str, Any]  # `forecast` by batch size; empty if no batch sizes were asked for
    session: Session
    machine: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """The object that ``--json`` prints."""
        alpha = {"offline_alpha": self.alpha.mean, "offline_alpha_se": self.alpha.se}
        alpha["positions"] = sum(self.alpha.counts)
        found = {"draft_lengths": self.lengths, "best_draft_length": self.best, "verdict": self.verdict}
        found |= {"machine": self.machine, "threads": self.session.threads, "packing": self.session.packing}
        return dict(plain(self.cost.to_dict() | alpha | found | self.batches))


def profile_pair(
    settings: ProfileSettings, pair: Pair, suites: Sequence[Suite], allowed: int | None = None
) -> PairProfile:
    """Measure costs and acceptance of a pair, and predict the speedup of every draft length.

    Args:
        settings: of the measurement.
        pair: with a draft.
        suites: prompts; acceptance is measured on the target's answers.
        allowed: largest draft length of the schedule by batch size.

    Raises:
        UserError: a target that wrote nothing.
    """
    if pair.draft is None:
        required(settings, "draft")
    assert pair.draft is not None
    warp, longest = make_warp(settings, pair.target, settings.temperature), settings.longest
    chat = use_chat(settings, pair.tokenizer)
    options = measure_options(settings, repeats=1, chat=chat, warp=make_warp(settings, pair.target))
    session = Session(pair.target, {"draft": pair.draft}, pair.tokenizer, options)
    with working(Console(stderr=True), "measuring forwards and acceptance"):
        items = [item for suite in suites for item in session.items(suite)]
        sizes = settings.batch_sizes
        session.measure_costs(items, ["draft"], longest=longest, batch_sizes=sizes, bookkeeping=["draft"], warp=warp)
        answers = session.written([item.ids for item in items], warp)
        texts = [(item.ids + answer, len(item.ids)) for item, answer in zip(items, answers)]
        alphas = offline_alphas(pair.target, {"draft": pair.draft}, texts, warp, depth=DEPTH)["draft"]
    costs, alpha = session.costs["draft"], alphas[0]
    if not sum(alpha.counts):
        raise UserError("the target wrote nothing, so α cannot be measured; choose other prompts or more new tokens")
    cost = costs[1]
    forwards = replace(cost, overhead=0.0, draft_overhead=0.0, step_overhead=0.0)
    speedups = speedups_by_length(alphas, cost, longest)
    lengths = [
        {
            "draft_length": k,
            "round_cost": forwards.of_round(k),
            "break_even_alpha": break_even(k, cost),
            "predicted_speedup": predicted_speedup(alpha.mean, k, forwards),
            "with_bookkeeping": replayed,
        }
        for k, replayed in speedups.items()
    ]
    batches = forecast([costs[size] for size in sorted(set(sizes))], alphas, longest, allowed) if sizes else {}
    about, where = verdict(alpha.mean, cost, speedups), machine.describe(session.runner.device)
    return PairProfile(cost, alpha, lengths, best_length(speedups), about, batches, session, where)


def profile(pair: Pair, suite: Sequence[str] = ("arithmetic",), **options: Any) -> PairProfile:
    """Measure costs and acceptance of a pair on this machine, and predict the speedup of every draft length.

    Args:
        pair: from `decode.load`, with a draft.
        suite: prompts that α is measured on, as ``--suite`` takes them.
        options: any other option of ``python -m decode profile``, such as ``limit`` or ``temperature``.

    Raises:
        UserError: a pair without a draft, an unknown option, a value out of range, prompts that do not fit.
    """
    settings = api_settings(ProfileSettings, pair, draft=pair.draft_name, suite=list(suite), **options)
    return profile_pair(settings, pair, open_suites(settings))


def run(settings: ProfileSettings) -> None:
    """Profile the pair of the settings and print the result.

    A forecast by batch size is also written into the draft's speculation_profile.json, if there is one.
    """
    check_models(settings)
    required(settings, "draft")
    path, suites = Path(str(settings.draft)) / "speculation_profile.json", open_suites(settings)
    pair, content = open_pair(settings, settings.draft), read_json(path)
    use_chat(settings, pair.tokenizer, tell=True)
    found = profile_pair(settings, pair, suites, content.get("num_speculative_tokens"))
    print(json.dumps(found.to_dict())) if settings.json else show(found)
    if found.batches and content:
        content |= plain(found.batches) | {"batch_size_conditions": found.machine}
        write_text(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")
        print(f"wrote the draft lengths by batch size into {path}", file=sys.stderr)
    for name, note in found.session.notes.items():
        print(f"{name}: {note}", file=sys.stderr)


def show(found: PairProfile) -> None:
    """Print the profile as tables, below the machine and the conditions of the measurement."""
    console, cost, alpha = output_console(highlight=False), found.cost, found.alpha
    facts = (
        ("t(1)", 1e3 * cost.target_seconds, f"ms: a one-token target forward, {cost.context} tokens before it"),
        ("c", cost.cost_ratio, FORMULAS["cost_ratio"]),
        ("b", cost.step_overhead, "bookkeeping of a plain step, in the same unit"),
        ("o", cost.overhead, "bookkeeping of a speculative round beyond a plain step's"),
        ("o/k", cost.draft_overhead, "bookkeeping of each drafted token"),
        ("α", alpha.mean, f"± {alpha.se:.4f}, {sum(alpha.counts)} positions: {FORMULAS['offline_alpha']}"),
    )
    lines = [machine.sentence(found.machine), found.session.threads, *found.session.packing]
    lines += [f"{name:<5} {value:>9.4f}  [dim]{formula}[/]" for name, value, formula in facts]
    costs = "  ".join(f"v({n}) {v:.2f}" for n, v in sorted(cost.verify_cost.items()))
    console.print("\n".join([*lines, f"[dim]{FORMULAS['verify_cost']}[/]", f"{costs}\n"]), soft_wrap=True)
    styles = {found.best: "bold green"}
    rows = [row | {"style": styles.get(row["draft_length"], "")} for row in found.lengths]
    console.print(console_table("", LENGTHS, rows))
    console.print(
        "[dim]round cost: c·k + v(k+1). predicted: (1 − α^(k+1)) / ((1 − α)·round cost), one α at every position.\n"
        "with o: tokens·(1 + b) / Σ (round cost + (o/k)·k + o + b), with the acceptance of each position of the texts; "
        "break-even α includes bookkeeping too.",
        soft_wrap=True,
    )
    console.print(f"\n{found.verdict}", soft_wrap=True, style="bold")
    if not found.batches:
        return
    console.print(console_table("\nby batch size", FORECAST, found.batches["batches"]))
    schedule = found.batches[SCHEDULE]
    console.print(
        "[dim]c(B), v(nB): a forward of the draft over B tokens, of the target over n·B, in target forwards over B "
        "tokens. speedup: tokens per round and sequence · (1 + b) / (k·(c(B) + o/k) + v((k+1)·B) + o + b)[/]\n"
        f'vLLM: "{SCHEDULE}": {json.dumps(schedule)}'.replace("[[", r"\[["),
        soft_wrap=True,
    )
    if schedule[-1][2] == 0:
        console.print(f"no draft length gains from batch size {schedule[-1][0]} on", style="bold")
