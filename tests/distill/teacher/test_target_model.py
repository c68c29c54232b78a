"""Where the frozen target is: which of a machine's devices each process takes."""

import pytest
from tiny_run import run_tiny, tiny_settings

from decode.core.errors import UserError
from distill.teacher.target_model import share_of


@pytest.mark.parametrize(
    ("count", "world", "wanted"),
    [(0, 2, [[], []]), (1, 2, [[0], [0]]), (2, 2, [[0], [1]]), (4, 2, [[0, 1], [2, 3]]), (3, 2, [[0], [1, 2]])],
)
def test_devices_are_dealt_out_to_the_processes_of_a_machine(count: int, world: int, wanted: list[list[int]]) -> None:
    assert [share_of(range(count), rank, world) for rank in range(world)] == wanted


def test_a_device_that_is_not_there_is_refused_before_the_first_step(tmp_path) -> None:  # type: ignore[no-untyped-def]
    settings = tiny_settings(tmp_path)
    settings.target.devices = ["cuda:77"]
    with pytest.raises(UserError, match="device is 'cuda:77', but"):
        run_tiny(settings)
    assert not (tmp_path / "tiny" / "target").exists()
