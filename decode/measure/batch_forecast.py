"""Speedup and goodput by batch size and draft length, predicted from measured costs and acceptances.

At batch size B every round of B texts that draft γ tokens each takes γ draft forwards over B tokens, a target forward
over (γ + 1)·B tokens, and the bookkeeping of both. With c(B) and v(n·B) in target forwards over B tokens:

    speedup(B, γ) = tokens per round and text · (1 + b) / (γ·c(B) + v((γ + 1)·B) + o + b)
    goodput(B, γ) = speedup(B, γ) · B / seconds of a round without a draft

o is the bookkeeping of a speculative round beyond that of a plain one, b. Tokens per round come from `replay` of the
acceptances, position by position; a text's rounds do not depend on its neighbours.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from decode.core.stopping.batch_draft_length import RoundCosts
from decode.measure.costs.cost_model import CostModel, round_costs
from decode.measure.offline_acceptance import OfflineAlpha
from decode.measure.predicted_speedup import best_length, replay

EVEN = 0.01  # share of the speedup by which lengths may differ that count as equally fast
Schedule = list[list[int]]
"""vLLM's ``num_speculative_tokens_per_batch_size``: entries [first batch size, last batch size, drafted tokens], which
begin at 1, are sorted and do not overlap. Beyond the last entry vLLM drafts as in it."""


@dataclass
class BatchForecast:
    """Predictions of one pair by batch size."""

    costs: Sequence[CostModel]  # measured, one a batch size
    # for each draft length the tokens of the texts, and how many rounds draft so many tokens
    rounds: Mapping[int, tuple[int, Mapping[int, float]]]
    longest: int  # longest draft that is predicted

    @cached_property
    def seconds(self) -> RoundCosts:
        """The parts of a round by batch size."""
        return round_costs(self.costs)

    def speedups(self, batch: int, longest: int | None = None) -> dict[int, float]:
        """Predicted speedup of every draft length over the same batch without a draft; between measured sizes too."""
        costs, found = self.seconds, {}
        draft, plain = costs.drafting(batch), costs.plain(batch)
        for k in range(1, min(longest or self.longest, self.longest) + 1):
            tokens, lengths = self.rounds[k]
            spent = sum(r * (draft * n + costs.verifying(batch, n + 1)) for n, r in lengths.items())
            found[k] = tokens * plain / spent
        return found

    def best(self, batch: int, longest: int | None = None) -> int:
        """The draft length with the largest predicted speedup; 0 where none gains."""
        return best_length(self.speedups(batch, longest))

    @property
    def sizes(self) -> list[int]:
        """The measured batch sizes."""
        return [cost.batch for cost in self.costs]

    @property
    def losing_from(self) -> int | None:
        """The batch size from which no draft length gains, up to the largest measured; None where one does there."""
        losing = None
        for size in range(self.sizes[-1], 0, -1):
            if self.best(size):
                break
            losing = size
        return losing

    def schedule(self, longest: int | None = None) -> Schedule:
        """vLLM's ``num_speculative_tokens_per_batch_size`` up to the largest measured batch size.

        The length of the batch size before stays where it is within `EVEN` of the best one.
        """
        entries: Schedule = []
        for size in range(1, self.sizes[-1] + 1):
            speedups = self.speedups(size, longest)
            best = best_length(speedups)
            before = entries[-1][2] if entries else 0
            if best and before and speedups[before] >= max(1.0, (1 - EVEN) * speedups[best]):
                best = before
            if entries and entries[-1][2] == best:
                entries[-1][1] = size
            else:
                entries.append([size, size, best])
        return entries

    def rows(self) -> list[dict[str, Any]]:
        """For each measured batch size its costs, and speedup and goodput of every draft length."""
        found = []
        for cost in self.costs:
            plain, speedups = cost.batch / self.seconds.plain(cost.batch), self.speedups(cost.batch)
            best = best_length(speedups)
            lengths = [{"draft_length": k, "predicted_speedup": s, "goodput": s * plain} for k, s in speedups.items()]
            found.append(
                cost.to_dict()
                | {
                    "batch_size": cost.batch,
                    "goodput_without_draft": plain,
                    "best_draft_length": best,
                    "best_speedup": speedups.get(best, 1.0),
                    "best_goodput": plain * speedups.get(best, 1.0),
                    "draft_lengths": lengths,
                }
            )
        return found

    def verdict(self) -> str:
        """In a sentence: what to draft at which batch size, and from which on nothing."""
        parts = [
            f"{k} tokens at batch {first}{f' to {last}' if last > first else ''}"
            for first, last, k in self.schedule()
            if k
        ]
        if not parts:
            return f"drafting loses at every batch size up to {self.sizes[-1]}"
        end = f"drafting loses from batch {self.losing_from} on" if self.losing_from else ""
        return (
            f"best draft length: {', '.join(parts)}; {end or f'drafting gains up to batch {self.sizes[-1]} at least'}"
        )

    def to_dict(self, longest: int | None = None) -> dict[str, Any]:
        """For JSON: the rows, vLLM's schedule of drafts up to `longest`, from where drafting loses, and the costs.

        Args:
            longest: the schedule's longest draft: vLLM wants none above ``num_speculative_tokens``.
        """
        return {
            "batches": self.rows(),
            "num_speculative_tokens_per_batch_size": self.schedule(longest),
            "drafting_loses_from_batch_size": self.losing_from,
            "round_costs": self.seconds.to_dict(),
        }


def forecast(costs: Iterable[CostModel], alphas: Sequence[OfflineAlpha], longest: int) -> BatchForecast:
    """Predictions from the costs of several batch sizes and acceptances position by position, by depth in the draft."""
    alpha, *deeper = alphas
    rounds: dict[int, tuple[int, Mapping[int, float]]] = {}
    for k in range(1, longest + 1):
        lengths: dict[int, float] = {}
        for i, text in enumerate(alpha.texts):
            for n, r in replay(text, k, [of.texts[i] for of in deeper])[1].items():
                lengths[n] = lengths.get(n, 0.0) + r
        rounds[k] = sum(alpha.counts), lengths
    return BatchForecast(sorted(costs, key=lambda cost: cost.batch), rounds, longest)
