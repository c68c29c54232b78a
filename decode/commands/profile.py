"""``python -m decode profile``: can this draft make this target faster on this machine, and with what length?"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from decode.bench import machine
from decode.bench.batch_report import forecast_tables, record_forecast
from decode.bench.pair_profile import PairProfile, profile_pair
from decode.bench.report import TABLES, console_table
from decode.bench.session import Session
from decode.commands.checks import (
    api_settings,
    check_models,
    make_warp,
    measure_options,
    open_pair,
    open_suites,
    told_chat,
    use_chat,
)
from decode.commands.settings import ProfileSettings, required
from decode.models.pair import Pair
from decode.progress import output_console, working
from decode.trace import FORMULAS


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
    return _profile(settings, pair)[0]


def _profile(settings: ProfileSettings, pair: Pair | None = None) -> tuple[PairProfile, Session]:
    check_models(settings)
    required(settings, "draft")
    suites = open_suites(settings.suite, limit=settings.limit, seed=settings.seed, split=settings.split)
    opened = pair is None
    pair = pair or open_pair(settings, settings.draft)
    chat = use_chat(settings, pair.tokenizer)
    if opened and (told := told_chat(settings, chat)):
        print(told, file=sys.stderr)
    assert pair.draft is not None
    warp = make_warp(settings, pair.target, settings.temperature)
    options = measure_options(settings, repeats=1, chat=chat, warp=make_warp(settings, pair.target))
    session = Session(pair.target, {"draft": pair.draft}, pair.tokenizer, options)
    with working(Console(stderr=True), "measuring forwards and acceptance"):
        items = [item for suite in suites for item in session.items(suite)]
        found = profile_pair(session, "draft", items, warp, longest=settings.longest, batch_sizes=settings.batch_sizes)
    return found, session


def run(settings: ProfileSettings) -> None:
    """Profile the pair of the settings and print what was found."""
    found, session = _profile(settings)
    if settings.json:
        how = {"threads": session.threads, "packing": session.packing}
        print(json.dumps(found.to_dict() | how, ensure_ascii=False))
    else:
        show(found, session.threads, session.packing)
    if found.batches is not None:
        for path in record_forecast(found.batches, Path(str(settings.draft)), found.machine):
            print(f"wrote the draft lengths by batch size into {path}", file=sys.stderr)
    for name, vocabulary in session.vocabularies.items():
        print(f"{name}: {vocabulary}", file=sys.stderr)


def show(found: PairProfile, threads: str, packing: Sequence[str] = ()) -> None:
    """The profile for a terminal."""
    console = output_console(highlight=False)
    cost = found.cost
    console.print("\n".join([machine.sentence(found.machine), threads, *packing]), soft_wrap=True)
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
    best = ({"style": "bold green"} if row["draft_length"] == found.best else {} for row in found.lengths)
    console.print(console_table("", TABLES["lengths"], [row | style for row, style in zip(found.lengths, best)]))
    for line in (
        "round cost: c·k + v(k+1). predicted: (1 − α^(k+1)) / ((1 − α)·round cost), the same α at every position.",
        "replayed: tokens / Σ round costs over the texts themselves, whose easy and hard tokens come in runs.",
        "with o: the same with bookkeeping; break-even α counts it too.",
    ):
        console.print(f"[dim]{line}", soft_wrap=True)
    console.print(f"\n{found.verdict}", soft_wrap=True, style="bold")
    if found.batches is not None:
        for part in forecast_tables(found.batches):
            console.print(part, soft_wrap=True)
