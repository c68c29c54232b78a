"""What a terminal shows: tables that fit it, and the progress of long work.

Progress is bars on a terminal; elsewhere a line at the start, then at most one every `EVERY` seconds. `working` shows
a piece of work; code that is called inside reports through `current`.
"""

from __future__ import annotations

import os
import textwrap
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text
from tqdm import tqdm

EVERY = 20.0  # seconds between two lines


def output_console(**options: Any) -> Console:
    """A console for standard output; a file or pipe, which has no width of its own, gets one of 130."""
    console = Console(**options)
    return console if console.is_terminal or "COLUMNS" in os.environ else Console(width=130, **options)


def fitting_table(
    headings: Sequence[str],
    rows: Sequence[tuple[Sequence[str], str]],
    *,
    title: str = "",
    right: Collection[int] = (),
    below: Sequence[str] = (),
) -> Table:
    """A table for any terminal: cells are cut with an ellipsis where it is narrow.

    Args:
        headings: of the columns.
        rows: the texts of the cells, and the style of the row.
        title: above it.
        right: numbers of the columns that are aligned to the right.
        below: lines below it.
    """
    grid = Table(title=Text(title) if title else None, caption=Text("\n".join(below)) if below else None, box=None)
    grid.title_justify = grid.caption_justify = "left"
    grid.pad_edge = False
    for number, heading in enumerate(headings):
        width = max((cell_len(cells[number]) for cells, _ in rows), default=1)
        lines = textwrap.fill(heading, width, break_long_words=False, break_on_hyphens=False)
        side: Any = "right" if number in right else "left"
        grid.add_column(lines, justify=side, no_wrap=True, vertical="bottom")
    for cells, style in rows:
        grid.add_row(*map(Text, cells), style=style)
    return grid


class _Bar(tqdm):
    """A bar that is a line where it cannot be drawn over; of work of unknown size the name alone."""

    _line = ""

    def display(self, msg: str | None = None, pos: int | None = None) -> None:
        if self.fp.isatty():
            super().display(msg, pos)
            return
        line = self.desc if self.total is None else str(self).strip("\r")
        if line != self._line:
            print(line, file=self.fp, flush=True)
        self._line = line


class Work:
    """A piece of work and how much of it is done; shown as a bar of tqdm, of which these are options, or not at all."""

    def __init__(self, name: str = "", total: float | None = None, **options: Any) -> None:
        self.name, self.total, self._options = name.strip(), total, options or {"disable": True}
        self._bar: Any = None
        self.begin(0)

    def begin(self, done: float, total: float | None = None) -> None:
        """Shows a new bar, which counts time from here, with `done` finished before."""
        self.close()
        self.done, self.total = done, total or self.total
        self._bar = _Bar(desc=f"  {self.name}", total=self.total, initial=done, **self._options)

    def close(self) -> None:
        """Show nothing any more."""
        if self._bar is not None:
            self._bar.close()

    def advance(self, count: float = 1) -> None:
        """Adds to what is done."""
        self.update(done=self.done + count)

    def update(self, *, done: float | None = None, total: float | None = None, name: str | None = None) -> None:
        """Sets what is given."""
        done, self.name = self.done if done is None else done, name or self.name
        if (total or self.total) != self.total or done < self.done:
            return self.begin(done, total)
        more, self.done = done - self.done, done
        self._bar.set_description_str(f"  {self.name}", refresh=False)
        self._bar.update(more)

    def tell(self, detail: str) -> None:
        """Shows a detail beside it from now on, such as the current loss."""
        self._bar.set_postfix_str(detail, refresh=False)


UNSHOWN = Work()
_current: ContextVar[Work] = ContextVar("work", default=UNSHOWN)


def current() -> Work:
    """The innermost piece of work begun with `working`; where there is none, one that is not shown."""
    return _current.get()


@contextmanager
def working(
    console: Console | None, name: str, total: float | None = None, *, bars: bool = True, leave: bool = False
) -> Iterator[Work]:
    """Shows one piece of work on a console, by default standard error, and makes it the `current` one.

    On a terminal nothing is shown without `bars`, for work whose parts draw their own; a bar vanishes at the end unless
    `leave` is set.
    """
    console = console or Console(stderr=True)
    drawn = console.is_terminal
    work = Work(
        name, total, file=console.file, disable=console.quiet or (drawn and not bars), leave=drawn and leave,
        mininterval=0.1 if drawn else EVERY, maxinterval=EVERY, dynamic_ncols=drawn,
        smoothing=0,  # the time left is by the mean speed: work may advance by batches
        bar_format=None if drawn else "{desc} {n_fmt}/{total_fmt} ({elapsed} so far, {remaining} left{postfix})",
    )  # fmt: skip
    with as_current(work):
        try:
            yield work
        finally:
            work.close()


@contextmanager
def as_current(work: Work) -> Iterator[Work]:
    """Makes a piece of work the `current` one."""
    token = _current.set(work)
    try:
        yield work
    finally:
        _current.reset(token)


def duration(seconds: float) -> str:
    """Seconds, minutes or hours in words, such as 40 s, 12 min, 1 h 05 min."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"
