"""Files are complete or not there."""

import os
from concurrent.futures import ThreadPoolExecutor
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


def test_folders_and_devices_are_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    for name in ("folder", "pipe"):
        with pytest.raises(UserError, match=name):
            write_text(tmp_path / name, "new")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["folder", "pipe"]
    assert (tmp_path / "pipe").is_fifo()


def test_threads_that_write_the_same_file_do_not_disturb_one_another(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: write_text(path, "text"), range(64)))
    assert [file.name for file in tmp_path.iterdir()] == ["a.txt"]
    assert path.read_text() == "text"
