"""The papers' published numbers (CSV files), ours laid out beside them, and their claims judged; nothing imports it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from decode.papers.claims import Ordering, PaperTable, Results


@dataclass(frozen=True)
class Paper:
    """One paper."""

    title: str  # as printed
    # from the results of its configurations, by name of the file
    tables: Callable[[Mapping[str, Results]], list[PaperTable]]
    orderings: Callable[[Mapping[str, Results]], list[Ordering]]  # what it claims, judged on them
    trains: bool = False  # the results are reports of a training, not of ``bench``
    draft_alone: bool = False  # the table has a row for the draft without the target


def papers() -> dict[str, Paper]:
    """All papers by the name that the command takes."""
    from decode.papers import adaptix, adasd, adaspec, adaspeed, ears

    return {module.__name__.rpartition(".")[2]: module.PAPER for module in (adasd, adaptix, ears, adaspeed, adaspec)}
