"""Compiles `kernels.cpp` once for each version of the file, of PyTorch and of Python, outside the project's folder."""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from typing import Any

import torch

NAME = "pretended_cuda_kernels"
SOURCE = Path(__file__).with_name("kernels.cpp")
FLAGS = ["-std=c++20", "-O1", "-w", "-fPIC", "-shared", "-fvisibility=hidden"]
LIBRARIES = ["-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python"]


def compiler() -> str | None:
    """The path of ``$CXX``, or of the system's C++ compiler."""
    return next(filter(None, map(shutil.which, (os.environ.get("CXX") or "c++", "g++", "clang++"))), None)


def missing() -> str | None:
    """What this machine lacks to pretend a device, or None."""
    if torch.version.hip or (torch.version.cuda and not torch.__version__.endswith("+cpu")):
        return f"the CPU-only build of PyTorch (this one is {torch.__version__})"
    if sys.platform != "linux":
        return "Linux"
    if not Path(sysconfig.get_path("include"), "Python.h").is_file():
        return "the headers of Python"
    return None if compiler() else "a C++ compiler"


def cache_folder() -> Path:
    """A folder into which this user alone can have written, in the user's cache or among the temporary files."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser())
    for folder in (home / "draftsmith", Path(tempfile.gettempdir(), f"draftsmith-{os.getuid()}")):
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError:
            continue
        if folder.stat().st_uid == os.getuid() and os.access(folder, os.W_OK):
            return folder
    return Path(tempfile.mkdtemp())


def load_kernels() -> Any:
    """The compiled module. A process that finds another one compiling waits for it."""
    include = [Path(torch.__file__).parent / "include" / part for part in ("", "torch/csrc/api/include")]
    options = [*FLAGS, *(f"-I{path}" for path in (*include, sysconfig.get_path("include")))]
    key = hashlib.sha256(SOURCE.read_bytes() + repr((torch.__version__, sys.version, options)).encode()).hexdigest()
    folder = cache_folder()
    library = folder / f"{NAME}-{key[:16]}.so"
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.is_file():
            part = library.with_suffix(f".{os.getpid()}")
            link = [f"-L{include[0].with_name('lib')}", *LIBRARIES, "-o", str(part)]
            done = subprocess.run([compiler() or "c++", *options, str(SOURCE), *link], capture_output=True, text=True)
            if done.returncode:
                raise RuntimeError(f"{SOURCE} was not compiled:\n{done.stderr[-4000:]}")
            part.replace(library)
    loader = ExtensionFileLoader(NAME, str(library))
    spec = spec_from_loader(NAME, loader)
    assert spec is not None
    module = module_from_spec(spec)
    loader.exec_module(module)
    return module
