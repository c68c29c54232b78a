"""Counts events of the pretended device by the line of code that caused each."""

import sys
from collections import Counter
from pathlib import Path
from typing import Any

HERE = str(Path(__file__).parent)
WAITS = ("sync", "h2d", "event")
watches: list["Watch"] = []


def heard(kind: str, op: str) -> None:
    """Tells all watches of an event."""
    for watch in watches:
        watch.hear(kind, op)


class Watch:
    """Counts events while it is entered.

    Args:
        root: the folder of the code whose lines are counted; an event is counted at the innermost one of them.
        lines: False counts events by kind and operator alone, which is faster; ``"all"`` counts the lines of launches
            too, not only those of waits and copies.

    Attributes:
        kinds: number of events by kind.
        ops: number of events by kind and operator.
        places: number of events by kind, line and operator.
    """

    def __init__(self, root: str | Path = "/", lines: bool | str = True) -> None:
        self.root, self.lines = str(root).rstrip("/") + "/", lines
        self.kinds: Counter[str] = Counter()
        self.ops: Counter[tuple[str, str]] = Counter()
        self.places: Counter[tuple[str, str, str]] = Counter()

    def __enter__(self) -> "Watch":
        from pretended_cuda import device

        watches.append(self)
        device.kernels().listen(heard)
        return self

    def __exit__(self, *_: Any) -> None:
        from pretended_cuda import device

        watches.remove(self)
        if not watches:
            device.kernels().listen(None)

    def hear(self, kind: str, op: str) -> None:
        """Counts an event."""
        self.kinds[kind] += 1
        self.ops[kind, op] += 1
        if self.lines == "all" or (self.lines and kind != "launch"):
            self.places[kind, self.place(), op] += 1

    def place(self) -> str:
        """The innermost line below the root, and the line of another package that it called, if it did."""
        frame, package = sys._getframe(2), ""
        while frame is not None:
            file = frame.f_code.co_filename
            if file.startswith(self.root) and not file.startswith(HERE) and "site-packages" not in file:
                return f"{file.removeprefix(self.root)}:{frame.f_lineno}{package}"
            if not package and "site-packages" in file and "/torch/" not in file:
                package = f" < {file.rpartition('site-packages/')[2]}:{frame.f_lineno}"
            frame = frame.f_back  # type: ignore[assignment]
        return f"backward{package}"  # PyTorch's thread for the device has no frame of ours

    @property
    def launches(self) -> int:
        """Kernels that were launched."""
        return self.kinds["launch"]

    @property
    def waits(self) -> int:
        """How often the host waited for the device: for results, for uploads and for events."""
        return sum(self.kinds[kind] for kind in WAITS)

    def table(self, per: float = 1, most: int = 40) -> str:
        """Events by kind, and the lines with most of them; numbers are divided by ``per`` rounds or steps."""
        head = ", ".join(f"{kind} {count / per:.1f}" for kind, count in self.kinds.most_common())
        lines = [f"  {count / per:8.2f}  {' '.join(place)}" for place, count in self.places.most_common(most)]
        return "\n".join([head, *lines])
