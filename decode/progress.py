"""What a terminal shows: tables that fit it, and the progress of long work.

Progress is bars on a terminal; elsewhere a line every `EVERY` seconds, also while nothing advances.
`working` shows one piece of work, `Progress` several, one after another. Code that is called inside reports through
`current`.
"""

from __future__ import annotations

import os
import textwrap
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, ClassVar

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.progress import BarColumn, MofNCompleteColumn, ProgressColumn, Task, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars
from rich.table import Table
from rich.text import Text

EVERY = 20.0  # seconds between two lines


def output_console(**options: Any) -> Console:
    """A console for standard output; a file or pipe, which has no width of its own, gets one of 130."""
    console = Console(**options)
    return console if console.is_terminal or "COLUMNS" in os.environ else Console(width=130, **options)


@dataclass
class FittingTable:
    """A table whose cells never break: columns for which a terminal has no room are left out, and named below it."""

    headings: Sequence[str]  # of the columns; the first one always stays, and of the others the last goes first
    rows: Sequence[tuple[Sequence[str], str]]  # the texts of cells, and the style of the row
    title: str = ""
    right: Collection[int] = ()  # numbers of the columns that are aligned to the right
    kept: Collection[int] = ()  # numbers of the columns that go last
    elsewhere: str = ""  # what has all columns, as the subject of a sentence
    below: Sequence[str] = ()  # lines below it

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The title, as many columns as fit, and the lines below."""
        shown, wide = list(range(len(self.headings))), options.update(width=10**6)
        while excess := max(0, Measurement.get(console, wide, grid := self._grid(shown)).maximum - options.max_width):
            if len(shown) <= 2:  # the name is cut before the one number
                grid.columns[0].max_width = max(1, max(cell_len(cells[0]) for cells, _ in self.rows) - excess)
                break
            shown.remove(max(shown[1:], key=lambda number: (number not in self.kept, number)))
        yield from [Text(self.title, style="italic")] if self.title else []
        yield grid
        if missing := [heading for number, heading in enumerate(self.headings) if number not in shown]:
            has = f"; {self.elsewhere} has all columns" if self.elsewhere else ""
            yield Text(f"no room for {', '.join(missing)}{has}", style="dim")
        yield from map(Text, self.below)

    def _grid(self, shown: Sequence[int]) -> Table:
        grid = Table(box=None, pad_edge=False)
        for number in shown:
            width = max((cell_len(cells[number]) for cells, _ in self.rows), default=1)
            lines = textwrap.wrap(self.headings[number], width, break_long_words=False, break_on_hyphens=False)
            side: Any = "right" if number in self.right else "left"
            grid.add_column("\n".join(lines), justify=side, no_wrap=True, vertical="bottom")
        for cells, style in self.rows:
            grid.add_row(*(Text(cells[number]) for number in shown), style=style)
        return grid


class Work:
    """A piece of work and how much of it is done; lines show its `detail` too, such as the current loss."""

    def __init__(self, name: str = "", total: float | None = None, bars: Bars | None = None) -> None:
        self._bars, self.detail = bars or Bars(disable=True), ""
        number = self._bars.add_task(name.strip(), total=total)
        self.task, self._from = self._bars.tasks[number], (time.monotonic(), 0.0)
        self.task.fields["work"] = self

    @property
    def done(self) -> float:
        """How much is done."""
        return self.task.completed

    def advance(self, count: float = 1) -> None:
        """Adds to what is done."""
        self.update(done=self.done + count)

    def update(self, *, done: float | None = None, total: float | None = None, name: str | None = None) -> None:
        """Sets what is given; a name removes the detail."""
        if name is not None:
            self.detail = ""
        if total not in (None, self.task.total) or (done is not None and done < self.done):  # another piece of work
            self._from = time.monotonic(), self.done if done is None else done
        self._bars.update(self.task.id, completed=done, total=total, description=name)

    def begin(self, done: float, total: float | None = None) -> None:
        """Counts time from here, with `done` finished before."""
        self._bars.reset(self.task.id, completed=int(done), total=total)
        self._from = time.monotonic(), done

    def left(self) -> float | None:
        """Seconds that the rest will take at the mean speed so far, pauses included: work may advance by batches."""
        began, before = self._from
        if self.task.total is None or self.done <= before:
            return None
        return (self.task.total - self.done) * (time.monotonic() - began) / (self.done - before)

    def line(self) -> str:
        """What is done, how much of it, and how long the rest will take."""
        task, left = self.task, self.left()
        share = "" if task.total is None else f" {task.completed:.0f}/{task.total:.0f}"
        when = f"{duration(task.elapsed or 0.0)} so far" if left is None else f"{duration(left)} left"
        return f"  {task.description}{share}{self.detail and ' ' + self.detail} ({when})"


class _Left(ProgressColumn):
    def render(self, task: Task) -> Text:
        left = task.fields["work"].left() if task.fields else None
        return Text("" if left is None else f"{duration(left)} left", style="progress.remaining")


class Progress(Bars):
    """Shows pieces of work: as bars on a terminal; elsewhere a line about the newest one every `EVERY` seconds.

    The console is standard error if none is given. Transient bars vanish at the end. Lines are printed by the innermost
    `Progress` alone.
    """

    _open: ClassVar[list[Progress]] = []

    def __init__(self, console: Console | None = None, *, transient: bool = False, bars: bool = True) -> None:
        console = console or Console(stderr=True)
        super().__init__(
            TextColumn("  {task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
            _Left(), console=console, transient=transient,
            disable=not (console.is_terminal and bars and not console.quiet),
        )  # fmt: skip
        self._works: list[Work] = []
        self._end = threading.Event()

    def start(self) -> None:
        """Begins to show; in a quiet console, an outer one goes on printing lines."""
        super().start()
        if not self.console.is_terminal and not self.console.quiet:
            self._open.append(self)
            threading.Thread(target=self._print_lines, daemon=True).start()

    def stop(self) -> None:
        """Ends the lines, or the bars."""
        self._end.set()
        if self in self._open:
            self._open.remove(self)
        if not self.disable:
            super().stop()

    def add(self, name: str, total: float | None = None) -> Work:
        """A piece of work that begins now."""
        self._works.append(Work(name, total, self))
        return self._works[-1]

    def _print_lines(self) -> None:
        while not self._end.wait(EVERY):
            going = [work for work in self._works if work.task.total is None or work.done < work.task.total]
            if going and self._open[-1:] == [self]:
                self.console.print(going[-1].line(), highlight=False, markup=False, soft_wrap=True)


UNSHOWN = Work()
_current: ContextVar[Work] = ContextVar("work", default=UNSHOWN)


def current() -> Work:
    """The innermost piece of work begun with `working`; where there is none, one that is not shown."""
    return _current.get()


@contextmanager
def working(console: Console | None, name: str, total: float | None = None, *, bars: bool = True) -> Iterator[Work]:
    """Shows one piece of work; without bars in lines only, for work whose parts draw their own."""
    with Progress(console, transient=True, bars=bars) as progress, as_current(progress.add(name, total)) as work:
        yield work


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
