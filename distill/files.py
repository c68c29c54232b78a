"""Files that are either complete or not there, and fingerprints of what they were made from."""

import hashlib
import json
import shutil
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from decode.errors import UserError, read_json, write_text
from distill import ranks

BLOCK = 1 << 24


def write_json(path: Path, value: object) -> None:
    """Writes JSON safely."""
    write_text(path, json.dumps(value, indent=2) + "\n")


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Writes a tokenizer's files under the class name that transformers 4, and engines built on it, know too."""
    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    if config.get("tokenizer_class") == "TokenizersBackend":  # transformers 5's name for the same class
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
        for name in ("backend", "is_local", "local_files_only"):
            config.pop(name, None)
        path.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def checksum(path: Path) -> int:
    """CRC-32 of a file."""
    value = 0
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            value = zlib.crc32(block, value)
    return value


_CHECKSUMS: dict[tuple[str, int, int, int], int] = {}


def checksum_once(path: Path) -> int:
    """CRC-32 of a file, computed again in this process only if the file was replaced or written to."""
    state = path.stat()
    key = (str(path), state.st_ino, state.st_size, state.st_mtime_ns)
    if key not in _CHECKSUMS:
        _CHECKSUMS[key] = checksum(path)
    return _CHECKSUMS[key]


LARGE = 256_000_000
"""Files of more bytes than this are not read to tell whether they changed; checking 256 MB takes a quarter second."""


def files_state(paths: Iterable[str]) -> dict[str, list[int]]:
    """Size and content (of large files the time) of every file at, or directly below, those of the paths that exist."""
    found = [Path(path) for path in paths if Path(path).exists()]
    files = [file for path in found for file in ([path] if path.is_file() else sorted(path.iterdir()))]
    return {str(file): _content(file) for file in files if file.is_file()}


def _content(file: Path) -> list[int]:
    """A copy that only got a new time, by a checkout or a download, is the same file."""
    size = file.stat().st_size
    return [size, checksum_once(file) if size <= LARGE else file.stat().st_mtime_ns]


def sealed(value: Mapping[str, Any]) -> dict[str, Any]:
    """Plain data with a hash of itself, for a file that is not used once it was altered."""
    return {**value, "seal": fingerprint(dict(value))}


def read_sealed(path: Path) -> dict[str, Any] | None:
    """What was `sealed` and written as JSON; None if it is not there or was altered. Without a seal it passes."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        seal = content.pop("seal", None)
    except (OSError, ValueError, AttributeError, TypeError):
        return None
    return content if seal in (None, fingerprint(content)) else None


def remove(path: Path) -> None:
    """Removes a file, a folder with all that is in it, or a link (but not what it points to); absent is fine."""
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)


@contextmanager
def replaced(out_dir: Path) -> Iterator[Path]:
    """An empty folder to write to, which takes the place of `out_dir` at the end; whatever fails, the old one stays."""
    out_dir.parent.mkdir(parents=True, exist_ok=True)
    for stale in out_dir.parent.glob(f".{out_dir.name}.partial-*"):
        shutil.rmtree(stale)
    with tempfile.TemporaryDirectory(prefix=f".{out_dir.name}.partial-", dir=out_dir.parent) as scratch:
        partial, old = Path(scratch) / "new", Path(scratch) / "old"
        partial.mkdir()
        yield partial
        if out_dir.exists():
            out_dir.rename(old)
        try:
            partial.rename(out_dir)
        except OSError:
            if old.exists():
                old.rename(out_dir)
            raise


def fingerprint(*parts: object) -> str:
    """A hash of plain data: dicts, lists, strings, numbers."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:32]


@contextmanager
def only_one(path: Path) -> Iterator[None]:
    """Keeps a second process out of a run's folder. The lock ends with the process, however it ends.

    Raises:
        UserError: Another process holds it.
    """
    try:
        import fcntl
    except ImportError:  # Windows has no such lock
        yield
        return
    folder = path.parent.parent
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = path.open("w")
    except OSError as error:
        raise UserError(
            f"nothing can be written to {folder} ({error.strerror}): choose another --output-dir or --name, or make "
            "room for a folder there"
        ) from error
    with lock as file:
        if ranks.is_first():  # further ranks belong to the first one's run
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise UserError(
                    f"another process is working in {folder}: wait for it, stop it, or choose another --name"
                ) from error
        yield


FOLDERS = ("target", "initial", "reference", "draft")
"""Stages with a folder of their own in the run; further drafts live under ``work/``."""

NAMES = {"initial": "undistilled", "reference": "distillspec", "draft": "adaspec"}
"""How reports call the drafts that the stages make."""

HEAD_NAMES = {"initial": "untrained", "reference": "eagle", "draft": "eagle-adaspec"}  # how they call feature heads


@dataclass(frozen=True)
class Account:
    """What a draft's training used."""

    optimiser_steps: int = 0  # Updates of the weights
    examples: int = 0  # Examples seen, counted every time
    teacher_tokens: int = 0  # Label tokens whose target distribution was used, counted every time
    selected_tokens: int = 0  # Label tokens that entered the loss
    cumulative_teacher_tokens: int = 0  # With those of the reference, where the training needs one


@dataclass
class StageRecord:
    """What is known of a finished stage."""

    fingerprint: str  # Of everything that the folder was made from
    made_from: dict[str, Any] = field(default_factory=dict)  # That, readable
    parameters: int = 0  # Number of the model's parameters
    seconds: float = 0.0  # Time the stage took, without interruptions
    account: dict[str, int] = field(default_factory=dict)  # Steps, examples and teacher tokens of a distillation
    # The learning curve, ``{"step", "loss", ...}`` for every validation
    history: list[dict[str, float]] = field(default_factory=list)
    # The tokens that AdaSPEC selected most, as (text, times)
    selected: list[tuple[str, int]] = field(default_factory=list)
    # Of each of them, its share of all label tokens trained on
    label_shares: list[float] = field(default_factory=list)
    files: dict[str, int] = field(default_factory=dict)  # Sizes of the folder's files in bytes, to notice a damaged one
    # Their CRC-32; none for links, whose files belong to somebody else, and in folders made before
    checksums: dict[str, int] = field(default_factory=dict)


@dataclass
class RunDir:
    """The folder ``<output_dir>/<name>`` of a run."""

    folder: Path  # The folder
    comparisons: list[str] = field(default_factory=list)  # Names of the further drafts
    # How reports call the drafts of the stages initial, reference and draft
    names: dict[str, str] = field(default_factory=lambda: dict(NAMES))

    @property
    def work(self) -> Path:
        """Checkpoints, cached signals, descriptions of the stages, further drafts."""
        return self.folder / "work"

    @property
    def target(self) -> Path:
        """The target's folder."""
        return self.folder / "target"

    @property
    def draft(self) -> Path:
        """The final draft's folder: AdaSPEC's, or of a variation under its own name."""
        return self.folder / "draft"

    @property
    def export(self) -> Path:
        """The final draft as exported for other engines."""
        return self.folder / "export"

    def path(self, stage: str) -> Path:
        """Folder of a stage."""
        return self.folder / stage if stage in FOLDERS else self.work / stage

    @property
    def drafts(self) -> dict[str, Path]:
        """Every draft by its name in reports: those of the stages, then the comparisons."""
        named = {name: self.path(stage) for stage, name in self.names.items()}
        return named | {name: self.path(name) for name in self.comparisons}

    def draft_record(self, name: str) -> StageRecord:
        """What is known of a draft, by its name in reports."""
        stage = next((stage for stage, known in self.names.items() if known == name), name)
        found = self.record(stage)
        if found is None:
            raise FileNotFoundError(f"{self.path(stage)} is not finished")
        return found

    def chosen(self, choose: str) -> str:
        """Name of the draft that is exported: see `distill.config.run.ExportSettings.choose`."""
        if choose != "best":
            return self.names["draft"] if choose == "draft" else choose
        trained = [name for name in self.drafts if name != self.names["initial"]]
        return max(trained, key=self.validation_alpha)

    def validation_alpha(self, name: str) -> float:
        """The highest acceptance rate that a draft's training had on the validation examples: its weights' own."""
        return max((entry["alpha"] for entry in self.draft_record(name).history if "alpha" in entry), default=0.0)

    def record(self, stage: str) -> StageRecord | None:
        """What is known of a stage; None if it is not finished, or its folder is not as it was written."""
        found = self.noted(stage)
        return found if found is not None and self._as_written(stage, found) else None

    def finished(self, stage: str, key: str) -> StageRecord | None:
        """The same of a stage that was made from the inputs of this fingerprint; no other folder is read."""
        found = self.noted(stage)
        return found if found is not None and found.fingerprint == key and self._as_written(stage, found) else None

    def noted(self, stage: str) -> StageRecord | None:
        """What was noted of a stage, whatever its folder looks like now."""
        try:
            return StageRecord(**(read_sealed(self._note(stage)) or {}))
        except TypeError:
            return None

    def _as_written(self, stage: str, record: StageRecord) -> bool:
        folder = self.path(stage)
        if not record.files or sizes(folder) != record.files:
            return False
        return all(checksum_once(folder / name) == value for name, value in record.checksums.items())

    def put(self, stage: str, record: StageRecord, make: Callable[[Path], None]) -> None:
        """Has ``make`` fill a new folder, then puts it in the stage's place together with its description.

        The first process of a distributed run does so, the others wait.
        """
        if not ranks.is_first():
            ranks.wait_for(lambda: self.finished(stage, record.fingerprint), f"the stage {stage}")
            return
        path, temporary = self.path(stage), self.work / f".tmp-{stage}"
        self.work.mkdir(parents=True, exist_ok=True)
        remove(temporary)
        try:
            make(temporary)
            record.files = sizes(temporary)
            if not temporary.is_symlink():
                record.checksums = {name: checksum(temporary / name) for name in record.files}
            self._note(stage).unlink(missing_ok=True)
            remove(path)
            temporary.rename(path)
            write_json(self._note(stage), sealed(vars(record)))
            remove(self.work / f"checkpoints-{stage}")
        finally:
            remove(temporary)

    def checkpoints(self, stage: str, key: str) -> Path:
        """Folder for a stage's checkpoints, emptied of those that were made under another fingerprint."""
        folder = self.work / f"checkpoints-{stage}"
        note = folder / "fingerprint.json"
        if not ranks.is_first():
            ranks.wait_for(lambda: read_json(note).get("stage") == key or None, f"the checkpoints' folder of {stage}")
        elif read_json(note).get("stage") != key:
            remove(folder)
            folder.mkdir(parents=True)
            write_json(note, {"stage": key})
        return folder

    def _note(self, stage: str) -> Path:
        return self.work / f"{stage}.json"


def sizes(folder: Path) -> dict[str, int]:
    """Sizes in bytes of the files of a folder, links followed."""
    return {str(p.relative_to(folder)): p.stat().st_size for p in sorted(folder.rglob("*")) if p.is_file()}


def account_of(record: StageRecord) -> Account:
    """The account of a distillation; zeros for a draft that was not distilled."""
    return Account(**record.account)
