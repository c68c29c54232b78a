"""Stages that another run has made already from the same inputs, taken over instead of made again."""

import os
import shutil
from collections.abc import Callable, Collection, Iterable
from pathlib import Path

from distill.config.run_settings import Settings
from distill.core import ranks
from distill.core.run_dir import RunDir
from distill.pipeline.stage_fingerprint import stage_fingerprints


def siblings(run: RunDir) -> list[RunDir]:
    """The other runs in the same output folder."""
    folder = run.folder.parent
    return [RunDir(path) for path in sorted(folder.iterdir()) if path != run.folder] if folder.is_dir() else []


def adopt(
    run: RunDir, settings: Settings, others: Iterable[RunDir], only: Collection[str] | None = None
) -> dict[str, Path]:
    """Takes stages over from runs that made them from the same inputs; returns whose folder each one was.

    Files are linked, not copied, where the file system allows it: nothing is ever changed in place.

    Args:
        run: takes over what it does not have.
        settings: its own.
        others: runs to look at.
        only: stages to take; None takes all.
    """
    taken, others = {}, list(others)
    for stage, (key, _) in stage_fingerprints(settings).items():
        if (only is not None and stage not in only) or run.finished(stage, key) is not None:
            continue
        found = ((donor, donor.finished(stage, key)) for donor in others)
        donor, record = next(((d, r) for d, r in found if r is not None), (None, None))
        if donor is not None and record is not None:
            source = donor.path(stage)
            run.put(stage, record, lambda path, source=source: _link(source, path))  # type: ignore[misc]
            if ranks.is_first():
                _take_over_data(donor, run)
            taken[stage] = source
    return taken


def _take_over_data(donor: RunDir, run: RunDir) -> None:
    """Signals and texts of the target; each file carries the fingerprint of what it is good for."""
    for folder, take in TAKEN.items():
        for file in sorted((donor.work / folder).glob("*")):
            place = run.work / folder / file.name
            if not file.name.startswith(".") and not place.exists():
                place.parent.mkdir(parents=True, exist_ok=True)
                take(str(file), str(place))


def _link(source: Path, path: Path) -> None:
    """A folder of links to the files of another, or the same link where it is one."""
    if source.is_symlink():
        path.symlink_to(source.resolve(), target_is_directory=True)
    else:
        shutil.copytree(source, path, copy_function=_link_file)


def _link_file(source: str, path: str) -> None:
    try:
        os.link(source, path)
    except OSError:  # another file system, or one without links
        shutil.copy2(source, path)


# folders of a run's work, and how their files are taken over: a run adds lines to the texts, so it has its own
TAKEN: dict[str, Callable[[str, str], object]] = {
    "signals": _link_file,
    "prompts": shutil.copy2,
    "responses": shutil.copy2,
    "original": shutil.copy2,
}
