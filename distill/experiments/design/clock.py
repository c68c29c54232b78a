"""The budget: seconds spent on a design, those of interrupted runs included."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from decode.core.files import read_json
from decode.core.progress import duration
from distill.core.files import write_json


class Clock:
    """Counts time on disk, so that a run that is continued has what is left.

    Args:
        path: the file.
        made_from: fingerprint of what the time is spent on; for something else it begins at 0.
        budget: seconds in all.
    """

    def __init__(self, path: Path, made_from: str, budget: float) -> None:
        self.path, self.made_from, self.budget = path, made_from, budget
        known = read_json(path)
        self.spent = float(known.get("seconds", 0.0)) if known.get("made_from") == made_from else 0.0

    @property
    def left(self) -> float:
        """Seconds left; below 0 where the last piece of work took longer than foreseen."""
        return self.budget - self.spent

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Counts what is done inside, once it is done."""
        began = time.monotonic()
        try:
            yield
        finally:
            self.spent += time.monotonic() - began
            write_json(self.path, {"made_from": self.made_from, "seconds": self.spent})

    def __str__(self) -> str:
        return f"{duration(max(0.0, self.left))} of {duration(self.budget)} left"
