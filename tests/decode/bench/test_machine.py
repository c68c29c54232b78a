"""The load of other processes beside a measurement."""

import pytest

from decode.bench import machine


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
