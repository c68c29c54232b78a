"""Which kind of signal is kept of the target, by what it takes and what room there is."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import cast, get_args

from decode.core.atomic_files import read_json
from decode.core.errors import UserError
from decode.core.progress import duration
from distill.config.distillation import Signal
from distill.core import ranks
from distill.core.file_fingerprints import fingerprint, write_json
from distill.data.stage_context import StageContext

ROOM = 0.9
"""Share of the free disk that signals may take."""


def choose_signal(context: StageContext, size_of: Callable[[Signal], int], key: str) -> Signal:
    """The kind of signal that the settings name, or under ``auto`` the first that there is room for.

    The choice is noted on disk: a later draft of the run, and every other process, has the same, however little room
    the first one's signal has left.

    Args:
        context: Settings, folder and console.
        size_of: Bytes of a kind.
        key: Fingerprint of the texts and the target.
    """
    settings, note = context.settings.reference, context.run.work / "signals" / "kind.json"
    if settings.signal != "auto":
        return settings.signal
    about = fingerprint(key, settings.signal_dtype, settings.signal_k, settings.signal_limit_gb)

    def noted() -> Signal | None:
        known = read_json(note)
        sound = known.get("made_from") == about and known["kind"] in get_args(Signal)
        return cast(Signal, known["kind"]) if sound else None

    if (found := noted()) is not None:
        return found
    if not ranks.is_first():
        return ranks.wait_for(noted, "the kind of signal")
    note.parent.mkdir(parents=True, exist_ok=True)
    room = min(settings.signal_limit_gb * 1e9, ROOM * shutil.disk_usage(note.parent).free)
    kinds: tuple[Signal, ...] = ("hidden", "topk")
    kind: Signal = next((kind for kind in kinds if size_of(kind) <= room), "online")
    if kind != kinds[0]:
        sizes = ", ".join(f"{kind} {size_of(kind) / 1e9:.2f} GB" for kind in kinds)
        context.console.print(
            f"  signal: {kind} ({sizes}; room for {room / 1e9:.2f} GB by reference.signal_limit_gb and the disk)",
            highlight=False,
        )
    write_json(note, {"kind": kind, "made_from": about})
    return kind


@contextmanager
def announced(
    context: StageContext, kind: Signal, what: str, key: str, size: int, tokens: int, seconds: Callable[[], float]
) -> Iterator[None]:
    """Tells the size of the target's values and the time they take, before they are made inside for the first time.

    Args:
        context: Settings, folder and console.
        kind: Of signal.
        what: What is kept.
        key: Fingerprint of what they are made from.
        size: Bytes on disk.
        tokens: Label tokens.
        seconds: Measures a few examples.

    Raises:
        UserError: It is above the limit.
    """
    settings, note = context.settings.reference, context.run.work / "signals" / "made.json"
    told = f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"
    if size > settings.signal_limit_gb * 1e9:
        instead = {
            "hidden": "set reference.signal to topk or online, or reference.signal_dtype to bfloat16",
            "topk": "lower reference.signal_k, or set reference.signal to online",
            "log_probs": "set reference.signal to hidden, topk or online",
        }[kind]
        raise UserError(
            f"the target's {what} ({kind}) of {tokens:,} label tokens needs {told} and "
            f"reference.signal_limit_gb is {settings.signal_limit_gb:g}: raise the limit, lower reference.examples, or "
            f"{instead}"
        )
    new = read_json(note).get("made_from") != key
    if new:
        sentence = f"{told} for {tokens:,} label tokens, about {duration(seconds())} to compute"
        context.console.print(f"  the target's {what} ({kind}): {sentence}", highlight=False)
    yield
    if new and ranks.is_first():
        write_json(note, {"made_from": key})
