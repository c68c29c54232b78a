"""Files are complete or not there."""

import errno
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from decode.errors import UserError
from decode.files import replaced, unused, write_safely, write_text


def test_an_interrupted_write_keeps_the_old_file_and_leaves_nothing_behind(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    write_text(path, "old")
    with pytest.raises(UnicodeEncodeError):
        write_text(path, "x" * 100_000 + "\ud800")
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["page.html"]


def test_a_folder_that_is_to_be_kept_stands_beside_the_one_that_replaces_it(tmp_path: Path) -> None:
    def keep(path: Path) -> None:
        path.rename(unused(path))

    for number in range(3):
        with replaced(tmp_path / "export", keep) as made:
            write_text(made / "file", str(number))
    found = {path.parent.name: path.read_text() for path in tmp_path.rglob("file")}
    assert found == {"export": "2", "export.old-1": "0", "export.old-2": "1"}
    with pytest.raises(RuntimeError), replaced(tmp_path / "export", keep):
        raise RuntimeError
    assert {path.name for path in tmp_path.iterdir()} == set(found)


def test_a_link_to_nowhere_stays_where_the_new_folder_cannot_take_its_place(tmp_path: Path, monkeypatch) -> None:
    def replace(new: Path, path: Path) -> None:
        raise OSError(errno.EIO, "no")

    (place := tmp_path / "export").symlink_to(tmp_path / "nowhere")
    monkeypatch.setattr(Path, "replace", replace)
    with pytest.raises(OSError, match="export"), replaced(place) as made:
        made.mkdir()
    assert place.is_symlink()


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


@pytest.mark.parametrize("umask", [0o022, 0o002, 0o077])
def test_files_may_be_read_by_whom_the_umask_says_whatever_wrote_them(tmp_path: Path, umask: int) -> None:
    def write(file: Path) -> None:
        os.close(os.open(file, os.O_WRONLY | os.O_CREAT, 0o600))  # as safetensors does

    before = os.umask(umask)
    try:
        write_safely(tmp_path / "file", write)
        with replaced(tmp_path / "folder") as made:
            (made / "inner").mkdir(parents=True)
            write(made / "inner" / "file")
    finally:
        os.umask(before)
    for path in (tmp_path / "file", tmp_path / "folder/inner/file"):
        assert path.stat().st_mode & 0o777 == 0o666 & ~umask


def test_an_error_names_the_file_and_what_a_library_began_beside_it_goes(tmp_path: Path) -> None:
    def write(file: Path) -> None:
        file.with_name("tmp8x2k").write_text("begun")
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    with pytest.raises(OSError, match=rf"exceeded: '{tmp_path}/states'") as caught:
        write_safely(tmp_path / "states", write)
    assert caught.value.errno == errno.EDQUOT
    assert not list(tmp_path.iterdir())
    with pytest.raises(PermissionError, match="'/elsewhere/file'"), replaced(tmp_path / "folder"):  # of another place
        raise PermissionError(errno.EACCES, "Permission denied", "/elsewhere/file")


def test_the_old_folder_stands_again_where_the_new_one_cannot_take_its_place(tmp_path: Path, monkeypatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    (tmp_path / "folder" / "old").mkdir(parents=True)
    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(OSError, match=rf"error: '{tmp_path}/folder'"), replaced(tmp_path / "folder") as made:
        made.mkdir()
    assert [str(path.relative_to(tmp_path)) for path in sorted(tmp_path.rglob("*"))] == ["folder", "folder/old"]


def test_a_link_is_replaced_and_takes_a_place_and_what_it_leads_to_stays_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "folder").symlink_to(tmp_path / "gone")
    with replaced(tmp_path / "folder") as made:
        (made / "new").mkdir(parents=True)
    assert [path.name for path in tmp_path.rglob("*")] == ["folder", "new"]
    (tmp_path / "kept").touch(0o600)
    with replaced(tmp_path / "link") as made:
        made.symlink_to(tmp_path / "kept")
    assert (tmp_path / "link").readlink() == tmp_path / "kept"
    assert (tmp_path / "kept").stat().st_mode & 0o777 == 0o600
