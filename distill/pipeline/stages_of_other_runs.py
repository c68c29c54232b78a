"""Stages that another run has made already from the same inputs, taken over instead of made again."""

import json
import os
import shutil
from collections.abc import Collection, Iterable
from pathlib import Path

from distill.config.run_settings import Settings
from distill.core import ranks
from distill.core.run_dir import RunDir
from distill.pipeline.stage_fingerprint import data_key, stage_fingerprints

TEXTS = ("prompts", "responses", "original")  # folders of a run's work with what the target wrote


def siblings(run: RunDir) -> list[RunDir]:
    """The other runs in the same output folder."""
    folder = run.folder.parent
    return [RunDir(path) for path in sorted(folder.iterdir()) if path != run.folder] if folder.is_dir() else []


def adopt(
    run: RunDir, settings: Settings, others: Iterable[RunDir], only: Collection[str] | None = None
) -> dict[str, Path]:
    """Takes stages over from runs that made them from the same inputs; returns whose folder each one was.

    The target's signals come with them, and the target's texts from runs with the same data. Files are linked where the
    file system allows it, since nothing is ever changed in place; texts, to which a run adds lines, are copied.

    Args:
        run: takes over what it does not have.
        settings: its own.
        others: runs to look at.
        only: stages to take; None takes all.
    """
    taken, others, donors = {}, list(others), []
    for stage, (key, _) in stage_fingerprints(settings).items():
        if (only is not None and stage not in only) or run.finished(stage, key) is not None:
            continue
        found = ((donor, donor.finished(stage, key)) for donor in others)
        donor, record = next(((d, r) for d, r in found if r is not None), (None, None))
        if donor is not None and record is not None:
            source = donor.path(stage)
            run.put(stage, record, lambda path, source=source: _link(source, path))  # type: ignore[misc]
            taken[stage] = source
            donors.append(donor)
    if ranks.is_first():
        same = [other for other in others if _same_data(other, settings)]
        for donor in sorted([*donors, *same], key=lambda one: (one in same, one in donors), reverse=True):
            for folder in ("signals", *TEXTS) if donor in same else ("signals",):
                _take_over_files(donor, run, folder)
    return taken


def _same_data(donor: RunDir, settings: Settings) -> bool:
    """Whether a run has distilled on the same examples, with responses by the same rule."""
    noted = donor.noted("reference")
    if noted is None:
        return False
    ours = data_key(settings) | {"responses": settings.reference.responses.key()}
    theirs = noted.made_from | {"responses": noted.made_from.get("reference", {}).get("responses")}
    return all(theirs.get(name) == value for name, value in json.loads(json.dumps(ours)).items())


def _take_over_files(donor: RunDir, run: RunDir, folder: str) -> None:
    """Files of a run's work that are not there yet; each carries the fingerprint of what it is good for."""
    for file in sorted((donor.work / folder).glob("*")):
        place = run.work / folder / file.name
        if not file.name.startswith(".") and not place.exists():
            place.parent.mkdir(parents=True, exist_ok=True)
            if folder in TEXTS:
                shutil.copy2(file, place)
            else:
                _link_file(str(file), str(place))


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
