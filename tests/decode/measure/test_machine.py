"""What is told of the machine beside a measurement."""

import os
import subprocess
import sys
import time

import pytest

from decode.bench import machine

SPIN = "import time; end = time.monotonic() + {}\nwhile time.monotonic() < end: pass"


def test_what_another_process_computes_is_told_and_what_this_one_does_is_not() -> None:
    load = machine.Load()
    with subprocess.Popen([sys.executable, "-c", SPIN.format(1.5)]):
        began, own = time.monotonic(), time.process_time()  # children count as this process's own once they have ended
        while time.monotonic() < began + 1:
            pass
        share = load.others()
        own = (time.process_time() - own) / (time.monotonic() - began)
    cores = os.cpu_count() or 1
    assert 0.3 / cores < share <= 1.05 - own / cores


@pytest.mark.parametrize(("busy", "own", "told"), [(30, 26, 0.04), (30, 6, 0.24), (3, 4, 0.0)])
def test_the_share_is_of_all_processors_and_a_large_one_is_warned_of(
    monkeypatch: pytest.MonkeyPatch, busy: float, own: float, told: float
) -> None:
    now = [7.0, 2.0, 50.0]
    monkeypatch.setattr(machine, "_processor_seconds", lambda: tuple(now))
    load = machine.Load()
    now = [7.0 + busy, 2.0 + own, 150.0]
    assert load.others() == pytest.approx(told)
    assert bool(load.warning()) == (told > machine.BUSY)
    facts = machine.describe() | {"other_processes_share": told}
    assert ("taken by other processes" in machine.sentence(facts)) == (told > machine.BUSY)
