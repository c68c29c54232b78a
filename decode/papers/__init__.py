"""The papers' published numbers (CSV files), ours laid out beside them, and their claims judged; nothing imports it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from decode.papers.claims import Ordering
from decode.papers.results import PaperTable, Results


@dataclass(frozen=True)
class Paper:
    """One paper.

    Attributes:
        title: as printed.
        tables: from the results of its configurations, by name of the file.
        orderings: what it claims, judged on them.
        trains: the results are reports of a training, not of ``bench``.
        draft_alone: the table has a row for the draft without the target.
    """

    title: str
    tables: Callable[[Mapping[str, Results]], list[PaperTable]]
    orderings: Callable[[Mapping[str, Results]], list[Ordering]]
    trains: bool = False
    draft_alone: bool = False


def papers() -> dict[str, Paper]:
    """All papers by the name that the command takes."""
    from decode.papers import adaptix, adasd, adaspec, adaspeed, ears

    return {module.__name__.rpartition(".")[2]: module.PAPER for module in (adasd, adaptix, ears, adaspeed, adaspec)}
