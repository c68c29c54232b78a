"""Counts events of the pretended device by the lines of code that caused them."""

import sys
from collections import Counter
from pathlib import Path
from typing import Any

HERE, PACKAGES, UNFUSED = str(Path(__file__).parent), "site-packages/", "/flex_attention.py"
watches: list["Watch"] = []


def heard(kind: str, op: str) -> None:
    """Tells all watches of an event."""
    for watch in watches:
        watch.hear(kind, op)


class Watch:
    """Counts events while it is entered.

    Args:
        root: folder of the code whose lines are named.

    Attributes:
        kinds: number of events by kind.
        places: number of waits and copies by kind, line and operator.
    """

    def __init__(self, root: Path) -> None:
        self.root = f"{root}/"
        self.kinds: Counter[str] = Counter()
        self.places: Counter[tuple[str, str, str]] = Counter()

    def __enter__(self) -> "Watch":
        from pretended_cuda import device

        watches.append(self)
        device.kernels.listen(heard)
        return self

    def __exit__(self, *_: Any) -> None:
        from pretended_cuda import device

        watches.remove(self)
        if not watches:
            device.kernels.listen(None)

    def hear(self, kind: str, op: str) -> None:
        """Counts an event."""
        if kind != "launch":
            place, fusible = self.place()
            kind = "unfused" if fusible and kind in ("sync", "h2d", "event") else kind
            self.places[kind, place, op] += 1
        self.kinds[kind] += 1

    def place(self) -> tuple[str, bool]:
        """The innermost line below the root, with the line of another package that it called; if in flex attention."""
        frame: Any = sys._getframe(3)
        package, fusible = "", False
        while frame is not None:
            file = frame.f_code.co_filename
            fusible |= file.endswith(UNFUSED)
            if PACKAGES not in file and file.startswith(self.root) and not file.startswith(HERE):
                return f"{file.removeprefix(self.root)}:{frame.f_lineno}{package}", fusible
            if not package and PACKAGES in file and "/torch/" not in file:
                package = f" < {file.rpartition(PACKAGES)[2]}:{frame.f_lineno}"
            frame = frame.f_back
        return f"backward{package}", fusible  # the thread in which PyTorch computes gradients has no line of ours

    def table(self, per: float) -> str:
        """The events by kind, and the lines that caused most, divided by ``per``."""
        head = ", ".join(f"{kind} {count / per:.1f}" for kind, count in self.kinds.most_common())
        lines = [f"{count / per:9.2f}  {' '.join(place)}" for place, count in self.places.most_common(40)]
        return "\n".join([head, *lines])
