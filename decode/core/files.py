"""Writes files that are either complete or not there: a temporary file in the same folder, then a rename."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def write_text(path: str | Path, content: str) -> None:
    """Write a UTF-8 text file, and its folder where that is missing; a file already there is replaced whole or not.

    Args:
        path: where the file is to stand.
        content: all of its text.

    Raises:
        OSError: the folder cannot be written to, or the disk is full; a file already there is unchanged.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(content)
        os.chmod(name, 0o644)  # mkstemp's files are readable by their owner only
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
