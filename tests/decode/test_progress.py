"""Progress in a file: a line every so often, also while nothing advances; on a terminal a bar."""

from __future__ import annotations

import io
import re
import threading
import time

import pytest
from rich.console import Console

from decode import progress
from decode.progress import Progress, current, duration, working


@pytest.fixture
def file(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    monkeypatch.setattr(progress, "EVERY", 0.02)
    return io.StringIO()


def wait_for(text: io.StringIO, pattern: str) -> None:
    end = time.monotonic() + 20
    while not re.search(pattern, text.getvalue()):
        assert time.monotonic() < end, f"{pattern} not in {text.getvalue()!r}"
        time.sleep(0.01)


def test_a_file_gets_lines_with_how_far_and_how_long(file: io.StringIO) -> None:
    with working(Console(file=file), "writing signals [train]", 8) as work:
        wait_for(file, r"  writing signals \[train\] 0/8 \(0 s so far\)\n")
        work.detail = "loss 0.5"
        current().advance(1)
        current().advance(1)
        wait_for(file, r"  writing signals \[train\] 2/8 loss 0\.5 \(\d+ s left\)\n")
        work.update(done=8)
    assert current() is progress.UNSHOWN


def test_the_time_left_counts_pauses_of_work_that_advances_by_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    work = progress.Work("prompts", 600)
    work.begin(0)
    now[0] = 100.0  # a batch is written
    for done in range(1, 201):
        work.update(done=done)
    assert work.left() == 200
    now[0] = 150.0  # the next one is not finished
    assert work.left() == 300
    work.update(name="tokenising", total=10, done=0)
    assert work.left() is None


def test_only_the_innermost_that_is_not_quiet_prints_its_newest_unfinished_piece(file: io.StringIO) -> None:
    with Progress(Console(file=file)) as shown, working(Console(quiet=True), "quiet", 8):
        outer, inner = shown.add("whole", 2), shown.add("part", 1)
        wait_for(file, r"part 0/1")
        assert "whole" not in file.getvalue()
        inner.advance()
        wait_for(file, r"whole 0/2")
        with working(Console(file=file), "innermost"):
            wait_for(file, r"innermost \(0 s so far\)\n")
        outer.update(done=2)
    assert "quiet" not in file.getvalue()


def test_an_error_ends_the_lines(file: io.StringIO) -> None:
    running = threading.active_count()
    with pytest.raises(ZeroDivisionError), working(Console(file=file), "items", 3) as work:  # noqa: PT012
        work.advance()
        wait_for(file, "items 1/3")
        raise ZeroDivisionError
    end = time.monotonic() + 20
    while threading.active_count() > running:
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_terminal_gets_a_bar(file: io.StringIO) -> None:
    with working(Console(file=file, force_terminal=True, width=90), "letters", 3) as work:
        work.advance(3)
    assert "letters" in file.getvalue()
    assert "3/3" in file.getvalue()


def test_durations_are_short_words() -> None:
    assert [duration(s) for s in (0.4, 40, 99, 130, 3540, 3900, 7260)] == [
        "0 s", "40 s", "99 s", "2 min", "59 min", "1 h 05 min", "2 h 01 min",
    ]  # fmt: skip
