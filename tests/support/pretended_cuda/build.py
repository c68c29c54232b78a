"""Compiles `kernels.cpp` once for each version of PyTorch, Python and the file, outside the project's folder."""

import fcntl
import hashlib
import importlib.machinery
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

import torch

NAME = "pretended_cuda_kernels"
SOURCE = Path(__file__).with_name("kernels.cpp")


def compiler() -> str | None:
    """The C++ compiler: ``$CXX``, or what the system has."""
    return next(filter(None, map(shutil.which, (os.environ.get("CXX") or "c++", "g++", "clang++"))), None)


def missing() -> str | None:
    """What this machine lacks to pretend a device, or None."""
    if torch.version.cuda or torch.version.hip:
        return f"the CPU-only build of PyTorch (torch {torch.__version__} is built for GPUs)"
    if sys.platform != "linux":
        return "Linux"
    if not (Path(sysconfig.get_paths()["include"]) / "Python.h").is_file():
        return "the headers of Python (python3-dev)"
    return None if compiler() else "a C++ compiler (g++)"


def cache_folder() -> Path:
    """A folder of the user's own, which others cannot have written into."""
    user = os.getuid()
    home = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    for folder in (home / "draftsmith" / "pretended_cuda", Path(tempfile.gettempdir()) / f"pretended_cuda-{user}"):
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError:
            continue
        if folder.stat().st_uid == user and os.access(folder, os.W_OK):
            return folder
    return Path(tempfile.mkdtemp())


def kernels() -> Any:
    """The compiled module; a second process waits for the one that compiles."""
    flags = ["-std=c++20", "-O1", "-w", "-fPIC", "-shared", "-fvisibility=hidden"]
    home = Path(torch.__file__).parent
    include = [f"-I{home}/include", f"-I{home}/include/torch/csrc/api/include", f"-I{sysconfig.get_paths()['include']}"]
    link = [f"-L{home}/lib", *(f"-l{name}" for name in ("c10", "torch_cpu", "torch", "torch_python"))]
    key = hashlib.sha256(SOURCE.read_bytes() + repr((torch.__version__, sys.version, flags)).encode()).hexdigest()[:16]
    folder = cache_folder()
    library = folder / f"{NAME}-{key}.so"
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.is_file():
            part = library.with_suffix(f".{os.getpid()}")
            command = [str(compiler()), *flags, *include, str(SOURCE), *link, "-o", str(part)]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                raise RuntimeError(f"{SOURCE} was not compiled:\n{done.stderr[-4000:]}")
            part.replace(library)
    loader = importlib.machinery.ExtensionFileLoader(NAME, str(library))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader(NAME, loader))
    loader.exec_module(module)
    return module
