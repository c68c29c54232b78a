"""Configuration files: YAML that may build on another file by its key ``base``."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from decode.core.errors import UserError
from decode.core.method_options import plain_message


def config_paths(argv: Sequence[str]) -> list[Path]:
    """The files that ``--config`` names."""
    items = iter(argv)
    named = (item.partition("=") for item in items if item == "--config" or item.startswith("--config="))
    paths = [value or next(items, "") for _, _, value in named]
    if "" in paths:
        raise UserError(f"--config needs a file; {_listed_configs()}")
    return [Path(path) for path in paths]


def config_layers(path: Path, above: tuple[Path, ...] = ()) -> list[tuple[Path, dict[str, Any]]]:
    """A configuration file after those that it builds on (its key ``base``), each with its own content."""
    content = _read_yaml(path)
    base = content.pop("base", None)
    if base is None:
        return [(path, content)]
    if not isinstance(base, str) or (path.parent / base).resolve() in {p.resolve() for p in (path, *above)}:
        raise UserError(f"{path}: 'base' is {base!r}, expected the path of another file, relative to this one")
    return [*config_layers(path.parent / base, (path, *above)), (path, content)]


def _read_yaml(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise UserError(f"there is no configuration file {str(path)!r}; {_listed_configs()}")
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not valid YAML: {plain_message(str(error))}") from error
    if not isinstance(content, dict | None):
        raise UserError(f"{path} holds a {type(content).__name__}, expected one 'key: value' a line")
    return content or {}


def merge(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """Two configurations as one: sections are merged key by key, everything else is the upper one's, as is ``{}``."""
    both = {
        k: merge(below[k], v) if v and isinstance(v, dict) and isinstance(below.get(k), dict) else v
        for k, v in above.items()
    }
    return below | both


def _listed_configs() -> str:
    found = sorted(str(path) for path in Path("configs").glob("*.yaml"))
    return "these exist: " + ", ".join(found) if found else f"no configs/*.yaml under {Path.cwd()} either"
