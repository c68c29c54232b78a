"""The papers' tables: their numbers, how ours are laid out beside them, and the orderings that they claim."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from decode.papers.results import Ordering, Results, Table

__all__ = ["Ordering", "Paper", "Results", "Table", "papers"]


@dataclass(frozen=True)
class Paper:
    """One paper.

    Attributes:
        title: as printed.
        tables: from the results of its configurations, by name of the file.
        orderings: what it claims, judged on them.
        trains: the results are reports of `python -m distill`, not of `bench`.
        draft_alone: the table has a row for the draft without the target.
    """

    title: str
    tables: Callable[[Mapping[str, Results]], list[Table]]
    orderings: Callable[[Mapping[str, Results]], list[Ordering]]
    trains: bool = False
    draft_alone: bool = False


def papers() -> dict[str, Paper]:
    """All papers by the name that the command takes."""
    from decode.papers import adaptix, adasd, adaspec, adaspeed, ears

    return {
        "adasd": adasd.PAPER,
        "adaptix": adaptix.PAPER,
        "ears": ears.PAPER,
        "adaspeed": adaspeed.PAPER,
        "adaspec": adaspec.PAPER,
    }
