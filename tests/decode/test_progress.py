"""Progress in a file: lines, at most one every so often; on a terminal a bar."""

import io
import time

import pytest
from rich.console import Console

from decode import progress
from decode.progress import current, duration, working


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_file_gets_lines_with_how_far_and_how_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "EVERY", 0.02)
    file = io.StringIO()
    with working(Console(file=file), "writing signals [train]", 8) as work:
        work.tell("loss 0.5")
        for _ in range(2):
            time.sleep(0.03)
            current().advance(2)
        work.update(name="validation", total=3, done=0)
        work.advance(3)
    lines = file.getvalue().splitlines()
    assert lines[0].startswith("  writing signals [train] 0/8 (00:00 so far")
    assert lines[2].startswith("  writing signals [train] 4/8 (00:00 so far, 00:00 left, loss 0.5")
    assert lines[-1].startswith("  validation 3/3 (00:00 so far")  # its time begins with it
    assert current() is progress.UNSHOWN


def test_lines_are_rare_and_a_quiet_console_gets_none() -> None:
    file, quiet = io.StringIO(), io.StringIO()
    consoles = Console(file=file), Console(file=quiet, quiet=True)
    with working(consoles[0], "part", 1000) as work, working(consoles[1], "quiet", 8) as unshown:
        for _ in range(1000):
            work.advance()
            unshown.advance()
    assert [line.split(" (")[0] for line in file.getvalue().splitlines()] == ["  part 0/1000", "  part 1000/1000"]
    assert (quiet.getvalue(), unshown.done) == ("", 1000)


def test_work_that_goes_on_after_an_interruption_counts_what_was_done_before() -> None:
    file = io.StringIO()
    with working(Console(file=file), "steps") as work:
        work.begin(40, 100)
        work.update(done=100)
    assert "  steps 40/100 (" in file.getvalue()
    assert "  steps 100/100 (" in file.getvalue()


def test_a_terminal_gets_a_bar() -> None:
    file = Terminal()
    with working(Console(file=file, force_terminal=True, width=90), "letters", 3, leave=True) as work:
        work.advance(3)
    assert "letters: 100%" in file.getvalue()
    with working(Console(file=(silent := Terminal()), force_terminal=True), "whole", bars=False):
        pass
    assert silent.getvalue() == ""


def test_durations_are_short_words() -> None:
    words = {0.4: "0 s", 99: "99 s", 130: "2 min", 3540: "59 min", 3900: "1 h 05 min", 7260: "2 h 01 min"}
    assert {s: duration(s) for s in words} == words


def test_without_a_terminal_pieces_with_new_names_add_no_lines() -> None:
    out = io.StringIO()
    with working(Console(file=out), "evaluation") as work:
        for number in range(9):
            work.update(name=f"prompt {number}", total=9)
            work.advance()
    lines = [line.split("(")[0].strip() for line in out.getvalue().splitlines()]
    assert lines == ["evaluation", "prompt 0 0/9", "prompt 8 9/9"]
