"""``draftsmith decode profile``: costs of real rounds, acceptance, and the predicted speedup of every draft length."""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from decode.commands.checks import (
    api_settings,
    check_lengths,
    make_warp,
    open_pair,
    open_suites,
    session_options,
    use_chat,
)
from decode.commands.settings import ProfileSettings, required
from decode.core.round import FORMULAS
from decode.errors import UserError
from decode.files import Fields, read_json, write_json
from decode.measure import machine
from decode.measure.acceptance import OfflineAlpha, as_drafted, offline_alphas
from decode.measure.costs import SCHEDULE, Costs, best_length, break_even, forecast, speedups_by_length, verdict
from decode.measure.report import console_table
from decode.measure.session import Session
from decode.measure.statistics import plain
from decode.measure.suites import Suite
from decode.models.open import Pair, load_tokenizer
from decode.progress import output_console, working

BY_LENGTH = ("draft_length", "ms", "break_even_alpha", "predicted_speedup")
BY_BATCH = ("batch_size", "ms", "best_draft_length", "best_speedup")
"""Columns of the tables by draft length and by batch size."""


@dataclass
class PairProfile:
    """Costs, acceptance and predictions of one target and draft."""

    cost: Costs
    conditions: Fields  # prompts, load and the like, by which the predictions may be no result
    alpha: OfflineAlpha  # offline, over all positions of all texts
    lengths: list[Fields]  # predictions by draft length
    best: int  # the length with the largest predicted speedup; 0 if none gains
    verdict: str  # in a sentence
    batches: Fields  # `forecast` by batch size; empty if no batch sizes were asked for
    session: Session

    def to_dict(self) -> Fields:
        """The object that ``--json`` prints."""
        alpha = {"offline_alpha": self.alpha.mean, "offline_alpha_se": self.alpha.se}
        rest = {"draft_lengths": self.lengths, "best_draft_length": self.best, "verdict": self.verdict}
        rest |= {"machine": self.session.facts(), **self.batches}
        return plain(self.cost.to_dict() | alpha | self.conditions | rest)


def profile_pair(
    settings: ProfileSettings, pair: Pair, suites: Sequence[Suite], allowed: int | None = None
) -> PairProfile:
    """Measure costs and acceptance of a pair on the target's answers, and predict the speedup of every draft length.

    `allowed` is the largest draft length by batch size: vLLM takes none above its ``num_speculative_tokens``.

    Raises:
        UserError: a pair without a draft, or a target that wrote nothing.
    """
    if pair.draft is None:
        raise UserError("profile predicts what a draft gains; give one with --draft (load(target, draft) in Python)")
    check_lengths("longest", [settings.longest], pair.target)
    warp = make_warp(settings, pair.target, settings.temperature)
    longest = min(settings.longest, getattr(pair.draft, "drafts", None) or settings.longest)  # a block drafts no more
    session = Session(pair.target, {"draft": pair.draft}, pair.tokenizer, session_options(settings, pair))
    with working(None, "timing rounds, measuring acceptance"):
        items = [item for suite in suites for item in session.items(suite)]
        sizes = {1, *settings.batch_sizes}
        how = {"longest": longest, "batch_sizes": sizes, "temperature": settings.temperature}
        with machine.timed(session.runner.device) as load:
            session.measure_costs(items, ["draft"], **how)
        answers = session.written([item.ids for item in items], warp)
        if not any(answers):
            raise UserError(
                "the target wrote nothing, so α cannot be measured; choose other prompts or more new tokens"
            )
        texts = [(item.ids + answer, len(item.ids)) for item, answer in zip(items, answers)]
        both = offline_alphas(pair.target, {"": pair.draft}, texts, warp, depth=longest, likeliest=True)
        alphas = as_drafted(both, "", pair.draft)
    cost = session.costs["draft"]
    rounds, gains = cost.rounds, speedups_by_length(alphas, cost.rounds, longest)
    rows = [(k, 1e3 * rounds.round(1, k), break_even(k, rounds), gain) for k, gain in gains.items()]
    batches = forecast(rounds, alphas, min(longest, allowed or longest)) if settings.batch_sizes else {}
    lengths, about = [dict(zip(BY_LENGTH, row)) for row in rows], verdict(alphas[0].mean, rounds, gains)
    drafted = "drawn" if alphas is both[""] and not warp.greedy else "likeliest"
    conditions = {"prompts": len(items), "least_cost": cost.least, "drafted_tokens": drafted, **load}
    if allowed in gains:
        about += f"; {gains[allowed]:.2f} at draft length {allowed}, which the draft was exported with"
    if why := machine.doubt(conditions | {"speedup": gains[1]}):
        about = f"no speedup is predicted, since {why}"
    return PairProfile(cost, conditions, alphas[0], lengths, best_length(gains), about, batches, session)


def profile(pair: Pair, suite: Sequence[str] = (), **options: Any) -> PairProfile:
    """Measure costs and acceptance of a pair on this machine, and predict the speedup of every draft length.

    Args:
        pair: from `decode.load`, with a draft.
        suite: prompts that α is measured on, as ``--suite`` takes them; none: as in `decode.bench`.
        options: any other option of ``draftsmith decode profile``, such as ``limit`` or ``temperature``.

    Raises:
        UserError: a pair without a draft, an unknown option, a value out of range, prompts that do not fit.
    """
    settings = api_settings(ProfileSettings, pair, options, draft=pair.draft_name, suite=suite)
    return profile_pair(settings, pair, open_suites(settings, chat=use_chat(settings, pair.tokenizer)))


def run(settings: ProfileSettings) -> None:
    """Profile the pair of the settings and print the result.

    A forecast by batch size is also written into the draft's speculation_profile.json, if there is one.
    """
    required(settings, "target", "draft")
    tokenizer = load_tokenizer(str(settings.target), trust_remote_code=settings.trust_remote_code)
    suites = open_suites(settings, chat=use_chat(settings, tokenizer, tell=True))
    path = Path(str(settings.draft)) / "speculation_profile.json"
    pair, content = open_pair(settings, settings.draft), read_json(path)
    result = profile_pair(settings, pair, suites, content.get("num_speculative_tokens"))
    print(json.dumps(result.to_dict())) if settings.json else show(result)
    if result.batches and content:
        content |= plain(result.batches) | {"batch_size_conditions": result.session.facts()}
        write_json(path, content)
        print(f"wrote the draft lengths by batch size into {path}", file=sys.stderr)
    for name, note in result.session.notes.items():
        print(f"{name}: {note}", file=sys.stderr)


def show(result: PairProfile) -> None:
    """Print the profile as tables, below the machine and the conditions of the measurement."""
    console, cost, alpha = output_console(highlight=False), result.cost, result.alpha
    formulas = [
        FORMULAS["cost_ratio"],
        FORMULAS["verify_cost"],
        f"α: {FORMULAS['offline_alpha']}",
        f"predicted: {FORMULAS['predicted_speedup']}",
    ]
    costs = ", ".join(f"v({n}) {v:.2f}" for n, v in sorted(cost.verify_cost.items()))
    of = result.conditions
    measured = f"α of {of['drafted_tokens']} tokens {alpha.mean:.4f} ± {alpha.se:.4f}"
    line = f"{machine.conditions(of)}; {measured}, c {cost.cost_ratio:.3f}, {costs}"
    console.print(machine.sentence(result.session.facts()), *result.session.how, *formulas, line, sep="\n")
    console.print(console_table("", BY_LENGTH, [of | row for row in result.lengths]))
    console.print(f"\n[bold]{result.verdict}", soft_wrap=True)
    if result.batches:
        rows = [of | row for row in result.batches["batches"]]
        console.print(console_table("\nby batch size", BY_BATCH, rows))
        console.print(f'vLLM: "{SCHEDULE}": {json.dumps(result.batches[SCHEDULE])}', markup=False, soft_wrap=True)
