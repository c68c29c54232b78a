"""Costs, acceptance and predictions of a pair: can this draft make this target faster here, and with what length?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from decode.core.errors import UserError
from decode.core.options import MethodOptions
from decode.core.sampling import Warp
from decode.measure import machine
from decode.measure.acceptance_offline import OfflineAlpha, offline_alpha
from decode.measure.bench_entries import BenchEntry, EntryRun
from decode.measure.bench_session import Item, Session
from decode.measure.cost import LONGEST, CostModel
from decode.measure.predict import best_length, predict, verdict
from decode.measure.statistics import plain

OVERHEAD_PROMPTS = 4
"""Texts that bookkeeping is measured on."""


@dataclass
class PairProfile:
    """Costs, acceptance and predictions of one target and draft.

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


def profile_pair(
    session: Session, draft: str, items: Sequence[Item], warp: Warp, *, longest: int = LONGEST
) -> PairProfile:
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
    sentence = verdict(alpha.mean, cost, speedups)
    return PairProfile(cost, alpha, rows, best_length(speedups), sentence, machine.describe(session.runner.device))


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
