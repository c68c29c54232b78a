"""Costs, acceptance and predictions of a pair: can this draft make this target faster here, and with what length?"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from decode.bench import machine
from decode.bench.costs import LONGEST, CostMeter, CostModel, time_forwards
from decode.bench.entries import BenchEntry, EntryRun
from decode.bench.offline_acceptance import DEPTH, OfflineAlpha, offline_alphas
from decode.bench.prediction import BatchForecast, best_length, forecast, predict, verdict
from decode.bench.session import Item, Session
from decode.bench.statistics import plain
from decode.errors import UserError
from decode.loop import Target, decode_texts
from decode.method_options import MethodOptions
from decode.progress import current
from decode.sampling import LogitsWarper, TorchRng

OVERHEAD_PROMPTS = 4  # texts that bookkeeping is measured on, one after another
OVERHEAD_TOKENS = 24  # most new tokens of each of them where several are decoded at once
BATCH_WIDTHS = (2, 3, 4, 5, 6, 8, 11, 16, 24)
"""The n of v(n) for several texts at once; what is between them is interpolated."""


@dataclass
class PairProfile:
    """Costs, acceptance and predictions of one target and draft."""

    cost: CostModel  # c, v(n) and o
    alpha: OfflineAlpha  # offline, over all positions of all texts
    lengths: list[dict[str, Any]]  # draft lengths with their predictions
    best: int  # the length with the largest predicted speedup; 0 if none gains
    verdict: str  # in a sentence
    machine: dict[str, Any]  # where it was measured
    batches: BatchForecast | None = None  # predictions by batch size, where they were asked for

    def to_dict(self) -> dict[str, Any]:
        """The object that ``--json`` prints."""
        facts = (
            self.cost.to_dict()
            | {
                "offline_alpha": self.alpha.mean,
                "offline_alpha_se": self.alpha.se,
                "positions": sum(self.alpha.counts),
                "draft_lengths": self.lengths,
                "best_draft_length": self.best,
                "verdict": self.verdict,
                "machine": self.machine,
            }
            | (self.batches.to_dict() if self.batches is not None else {})
        )
        return dict(plain(facts))


def profile_pair(
    session: Session,
    draft: str,
    items: Sequence[Item],
    warp: LogitsWarper,
    *,
    longest: int = LONGEST,
    batch_sizes: Sequence[int] = (),
) -> PairProfile:
    """Measure costs and acceptance of a pair, and predict the speedup of every draft length.

    Args:
        session: target and drafts.
        draft: the draft's name there.
        items: prompts; the target answers them, and acceptance is measured on its answers.
        warp: the decoding mode.
        longest: longest draft to predict.
        batch_sizes: also measure the costs of so many texts at once, and predict the speedups at these batch sizes.

    Raises:
        UserError: a model that decodes one text at a time, or a target that wrote nothing.
    """
    session.measure_costs(items, [draft], longest=longest)
    cost = session.costs[draft]
    add_overhead(session, draft, items, warp, cost)
    texts = [(item.ids + session.answer(item.ids, warp, seed), len(item.ids)) for seed, item in enumerate(items)]
    alphas = offline_alphas(session.model, {draft: session.draft_models[draft]}, texts, warp, depth=DEPTH)[draft]
    alpha = alphas[0]
    if not sum(alpha.counts):
        raise UserError("the target wrote nothing, so α cannot be measured; choose other prompts or more new tokens")
    rows = [predict(k, alphas, cost) for k in range(1, longest + 1)]
    speedups = {row["draft_length"]: row["with_bookkeeping"] for row in rows}
    sentence = verdict(alpha.mean, cost, speedups)
    found = PairProfile(cost, alpha, rows, best_length(speedups), sentence, machine.describe(session.runner.device))
    if batch_sizes:
        others = [size for size in batch_sizes if size > 1]
        more = batch_costs(session, draft, items, warp, others, longest=longest, context=cost.context)
        found.batches = forecast([cost] * (1 in batch_sizes) + more, alphas, longest)
    return found


def batch_costs(
    session: Session,
    draft: str,
    items: Sequence[Item],
    warp: LogitsWarper,
    sizes: Iterable[int],
    *,
    longest: int,
    context: int,
) -> list[CostModel]:
    """Costs of a pair with bookkeeping at several batch sizes."""
    found: list[CostModel] = []
    widths = [n for n in BATCH_WIDTHS if n <= longest + 1]
    for size in sorted(set(sizes)):
        current().update(name=f"costs of forwards at batch {size}")
        runners = session.runner, session.drafts[draft]
        found.append(CostMeter(*runners, widths=widths, context=context, batch=size).run(9))
        add_overhead(session, draft, items, warp, found[-1])
    return found


def add_overhead(session: Session, draft: str, items: Sequence[Item], warp: LogitsWarper, cost: CostModel) -> None:
    """Measure bookkeeping at the batch size of the costs.

    It is that of a plain step, of a speculative round beyond a plain one, and of a drafted token of every text.
    Bookkeeping is what a round takes outside the models' forwards; two draft lengths tell its parts apart. Only
    measured on the CPU, where a forward has ended when its call returns; 0 elsewhere.
    """
    if session.runner.device.type != "cpu":
        return
    lengths, budget = (0, 2, 8), session.options.max_new_tokens
    if cost.batch > 1:
        items, budget = [items[i % len(items)] for i in range(cost.batch)], min(budget, OVERHEAD_TOKENS)
    runs = [
        EntryRun(session, BenchEntry("vanilla", draft, MethodOptions(draft_length=k), temperature=warp.temperature))
        if k
        else EntryRun(session, BenchEntry("autoregressive", temperature=warp.temperature))
        for k in lengths
    ]
    spent, rounds, drafted = zip(
        *(_bookkeeping(session, run, items[: max(cost.batch, OVERHEAD_PROMPTS)], budget, cost.batch) for run in runs)
    )
    plain_step, short, long = (s / max(1, r) / cost.target_seconds for s, r in zip(spent, rounds))
    mean = [d / max(1, r) / cost.batch for d, r in zip(drafted, rounds)]
    slope = max(0.0, (long - short) / (mean[2] - mean[1])) if mean[2] > mean[1] else 0.0
    cost.step_overhead, cost.draft_overhead = plain_step, slope
    cost.overhead = max(0.0, short - slope * mean[1] - plain_step)


def _bookkeeping(
    session: Session, run: EntryRun, items: Sequence[Item], budget: int, batch: int
) -> tuple[float, int, int]:
    """Seconds of all rounds outside the forwards, target forwards after the prompts, and drafted tokens."""
    runner = session.runner
    with time_forwards(runner, *session.drafts.values()) as timer:
        texts = decode_texts(
            Target(runner),
            run.systems[0],
            run.warp,
            [item.ids for item in items],
            rngs=[TorchRng(i, runner.device) for i in range(len(items))],
            batch_size=batch,
            max_new_tokens=budget,
            stop_ids=session.stop_ids,
        )
    spent = sum(text.trace.total_seconds - text.trace.prefill_seconds for text in texts)
    return spent - timer.seconds + timer.prompt_seconds, timer.forwards, sum(sum(text.trace.drafted) for text in texts)
