"""Progress of long work: bars on a terminal; elsewhere a line every `EVERY` seconds, also while nothing advances.

`working` shows one piece of work, `Progress` several, one after another. Code that is called inside reports through
`current`.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, ClassVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

EVERY = 20.0  # seconds between two lines


def output_console(width: int = 130, **options: Any) -> Console:
    """A console for standard output; `width` is that of a file or pipe, which has none of its own."""
    console = Console(**options)
    return console if console.is_terminal or "COLUMNS" in os.environ else Console(width=width, **options)


class Work:
    """A piece of work and how much of it is done.

    Attributes:
        name: the work, for people.
        total: its extent; None: unknown.
        done: how much is done.
        detail: shown after it in lines, such as the current loss.
    """

    def __init__(self, name: str = "", total: float | None = None, bars: Bars | None = None) -> None:
        self.name, self.total, self.done, self.detail = name, total, 0.0, ""
        self._started, self._first = time.monotonic(), 0.0
        self._bars = bars
        self._task = None if bars is None else bars.add_task(name.strip(), total=total)

    def advance(self, count: float = 1) -> None:
        """Adds to what is done."""
        self.update(done=self.done + count)

    def update(self, *, done: float | None = None, total: float | None = None, name: str | None = None) -> None:
        """Sets what is given; another name removes the detail."""
        if name is not None and name != self.name:
            self.name, self.detail = name, ""
        self.total = self.total if total is None else total
        self.done = self.done if done is None else done
        if self._bars is not None and self._task is not None:
            self._bars.update(self._task, completed=self.done, total=self.total, description=self.name.strip())

    def begin(self, done: float, total: float | None = None) -> None:
        """Counts time from here, with `done` finished before."""
        self._started, self._first = time.monotonic(), done
        self.update(done=done, total=total)

    def line(self) -> str:
        """What is done, how much of it, and how long the rest will take."""
        spent, gained = time.monotonic() - self._started, self.done - self._first
        share, when = "", f"{duration(spent)} so far"
        if self.total is not None:
            share = f" {self.done:.0f}/{self.total:.0f}"
            when = f"{duration((self.total - self.done) * spent / gained)} left" if gained > 0 else when
        return f"  {self.name.strip()}{share}{self.detail and ' ' + self.detail} ({when})"


class Progress:
    """Shows pieces of work: as bars on a terminal; elsewhere a line about the newest one every `EVERY` seconds.

    Args:
        console: console to print to; None: standard error.
        transient: whether bars vanish at the end.
        bars: whether bars are drawn at all; lines are printed by the innermost `Progress` alone.
    """

    _open: ClassVar[list[Progress]] = []

    def __init__(self, console: Console | None = None, *, transient: bool = False, bars: bool = True) -> None:
        self.console = console or Console(stderr=True)
        self._bars: Bars | None = None
        if self.console.is_terminal and bars and not self.console.quiet:
            columns = TextColumn("  {task.description}"), BarColumn(), MofNCompleteColumn()
            times = TimeElapsedColumn(), TimeRemainingColumn()
            self._bars = Bars(*columns, *times, console=self.console, transient=transient)
        self._works: list[Work] = []
        self._end = threading.Event()

    def __enter__(self) -> Progress:
        if self._bars is not None:
            self._bars.start()
        elif not self.console.is_terminal and not self.console.quiet:  # in a quiet one, the outer one prints lines
            self._open.append(self)
            threading.Thread(target=self._print_lines, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        if self in self._open:
            self._open.remove(self)
        if self._bars is not None:
            self._bars.stop()

    def add(self, name: str, total: float | None = None) -> Work:
        """A piece of work that begins now."""
        self._works.append(Work(name, total, self._bars))
        return self._works[-1]

    def _print_lines(self) -> None:
        while not self._end.wait(EVERY):
            going = [work for work in self._works if work.total is None or work.done < work.total]
            if going and self._open[-1:] == [self]:
                self.console.print(going[-1].line(), highlight=False, markup=False, soft_wrap=True)


_current: ContextVar[Work | None] = ContextVar("work", default=None)


def current() -> Work:
    """The innermost piece of work begun with `working`; where there is none, one that is not shown."""
    return _current.get() or Work()


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
