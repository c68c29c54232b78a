"""Files are complete or not there."""

import os
from pathlib import Path

import pytest

from decode.errors import UserError, write_text


def test_an_interrupted_write_keeps_the_old_file_and_leaves_nothing_behind(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    write_text(path, "old")
    with pytest.raises(UnicodeEncodeError):
        write_text(path, "x" * 100_000 + "\ud800")
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["page.html"]


def test_the_folder_is_made_and_everybody_may_read_the_file(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "page.html"
    write_text(path, "é")
    assert path.read_text(encoding="utf-8") == "é"
    assert path.stat().st_mode & 0o777 == 0o644


def test_folders_and_devices_are_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    for name in ("folder", "pipe"):
        with pytest.raises(UserError, match=name):
            write_text(tmp_path / name, "new")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["folder", "pipe"]
    assert (tmp_path / "pipe").is_fifo()
