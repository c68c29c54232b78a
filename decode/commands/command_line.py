"""Settings for every command: typed dataclasses, read from YAML and overridden on the command line.

One YAML file serves several commands. Each command hands its settings class to `parse` together with the names
of the top-level sections that belong to the others (``foreign``); those are skipped, anything else that the
class does not know is an error that names the nearest known key. jsonargparse does the typing and the help,
whose texts are the docstrings below each attribute. A file may build on another one: ``base: other.yaml`` (relative to
itself) is read first, and the file says only what differs.
"""

from __future__ import annotations

import dataclasses
import difflib
import errno
import os
import re
import sys
import typing
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

from decode.core.errors import UserError

Settings = TypeVar("Settings")


def parse(
    settings_class: type[Settings],
    argv: Sequence[str] | None,
    *,
    prog: str,
    description: str,
    foreign: set[str] | None = None,
) -> Settings:
    """Read ``--config FILE`` and ``--key.subkey value`` overrides into an instance of a settings dataclass.

    Precedence: the class's defaults, then the configuration files in order, then the overrides.

    Args:
        settings_class: A dataclass whose fields are plain values, dataclasses or lists of dataclasses.
        argv: Arguments without the program's name; ``None`` reads ``sys.argv``.
        prog: The command as the user types it, for the usage line.
        description: One paragraph above the help.
        foreign: Top-level sections of a shared YAML file that belong to other commands; skipped.

    Raises:
        UserError: Missing file, malformed YAML, unknown key, wrong type, or a ``__post_init__`` that refused.
    """
    import jsonargparse

    argv = list(sys.argv[1:] if argv is None else argv)
    parser = _parser(settings_class, prog, description)
    if "-h" in argv or "--help" in argv:  # a help request must not fail on the arguments beside it
        parser.print_help()
        raise SystemExit(0)
    paths, overrides = _split(argv)
    source = "the command line"
    try:
        values = None
        for path, whole in [layer for given in paths for layer in read_layers(given)]:
            content = {k: v for k, v in whole.items() if k not in (foreign or set())}
            _check_keys(content, settings_class, "", str(path))
            source = str(path)
            values = parser.parse_object(content, cfg_base=values)
        source = "the command line"
        _check_options(overrides, settings_class, prog)
        values = parser.parse_args(_bracketed(overrides, settings_class), namespace=values)
        source = " and ".join([*map(str, paths), "the command line"] if overrides else map(str, paths)) or prog
        values.pop("config", None)
        return settings_class(**vars(parser.instantiate(values)))
    except UserError:
        raise
    except (jsonargparse.ArgumentError, ValueError, TypeError) as error:
        raise UserError(f"{source}: {_plain(str(error))}") from error


def run_main(function: Callable[[], object]) -> int:
    """Run a command and turn what a user can mend, stop or run out of into one clear line.

    Returns:
        0 on success, 2 after a `UserError` or a full disk, 130 after Ctrl-C. Other exceptions pass through.
    """
    try:
        function()
        sys.stdout.flush()
        return 0
    except UserError as error:
        return _fail(f"error: {error}", 2)
    except KeyboardInterrupt:
        return _fail("stopped; run the same command again to continue", 130)
    except BrokenPipeError:  # `... | head` closed the pipe: nothing is wrong
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        where = f" while writing {error.filename}" if error.filename else ""
        return _fail(
            f"error: the disk is full{where}; nothing half-written is kept. Free some space (`df -h .` shows it), "
            "then run the same command again to continue",
            2,
        )


def read_layers(path: Path, above: tuple[Path, ...] = ()) -> list[tuple[Path, dict[str, Any]]]:
    """A configuration file after those that it builds on (its key ``base``), each with its own content.

    Raises:
        UserError: a file is missing, is not valid YAML, or builds on itself.
    """
    content = _read_yaml(path)
    base = content.pop("base", None)
    if base is None:
        return [(path, content)]
    if not isinstance(base, str) or (path.parent / base).resolve() in {p.resolve() for p in (path, *above)}:
        raise UserError(f"{path}: 'base' is {base!r}, wanted the path of another configuration file, relative to this")
    return [*read_layers(path.parent / base, (path, *above)), (path, content)]


def merge(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """Two configurations as one: sections are merged key by key, everything else is the upper one's."""
    both = {
        k: merge(below[k], v) if isinstance(v, dict) and isinstance(below.get(k), dict) else v for k, v in above.items()
    }
    return below | both


def take_flag(argv: list[str], flag: str) -> bool:
    """Remove a switch that is no settings key (such as ``--dry-run``) from the arguments; was it there?"""
    found = flag in argv
    argv[:] = [item for item in argv if item != flag]
    return found


def known_keys(settings_class: type, prefix: str = "") -> Iterator[str]:
    """Every dotted key of a settings class, sections included, in order of definition."""
    return (name for name, _ in _typed_keys(settings_class, prefix))


def _typed_keys(settings_class: type, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, hint in _hints(settings_class).items():
        yield prefix + name, hint
        inner, _ = _dataclass_in(hint)
        if inner:
            yield from _typed_keys(inner, f"{prefix}{name}.")


def _parser(settings_class: type, prog: str, description: str) -> Any:
    import jsonargparse

    jsonargparse.set_parsing_settings(docstring_parse_attribute_docstrings=True)
    parser = jsonargparse.ArgumentParser(
        prog=prog,
        usage=f"{prog} [--config FILE] [--key value ...]",
        description=description,
        exit_on_error=False,
        allow_abbrev=False,
        default_env=False,
    )
    parser.add_argument("--config", help="YAML file with settings; a later file overrides an earlier one.")
    parser.add_class_arguments(settings_class, None)
    return parser


def _split(argv: list[str]) -> tuple[list[Path], list[str]]:
    """The configuration files, and everything else."""
    paths: list[Path] = []
    overrides: list[str] = []
    rest = iter(argv)
    for item in rest:
        name, _, value = item.partition("=")
        if name == "--config":
            value = value or next(rest, "")
            if not value:
                raise UserError(f"--config needs a file; {_listed_configs()}")
            paths.append(Path(value))
        else:
            overrides.append(item)
    return paths, overrides


def _read_yaml(path: Path) -> dict[str, Any]:
    import yaml

    if not path.is_file():
        raise UserError(f"there is no configuration file {str(path)!r}; {_listed_configs()}")
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise UserError(f"{path} is not valid YAML: {_plain(str(error))}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise UserError(f"{path} holds a {type(content).__name__}, wanted one 'key: value' a line")
    return content


def _listed_configs() -> str:
    found = sorted(str(path) for path in Path("configs").glob("*.yaml"))
    return "these exist: " + ", ".join(found) if found else f"no configs/*.yaml under {Path.cwd()} either"


def _check_keys(content: dict[str, Any], settings_class: type, prefix: str, source: str) -> None:
    """Refuse the first key of a nested mapping that the dataclass does not have."""
    hints = _hints(settings_class)
    for key, value in content.items():
        if key not in hints:
            raise UserError(
                f"{source}: unknown key '{prefix}{key}'; {_nearest(f'{prefix}{key}', settings_class, prefix)}"
            )
        inner, listed = _dataclass_in(hints[key])
        if inner is None:
            continue
        items = value if listed and isinstance(value, list) else [value]
        for index, item in enumerate(items):
            name = f"{prefix}{key}[{index}]" if listed else f"{prefix}{key}"
            if isinstance(item, dict):
                _check_keys(item, inner, f"{name}.", source)
            elif item is not None:
                raise UserError(f"{source}: '{name}' is {item!r}, wanted a section of 'key: value' lines")


def _check_options(overrides: list[str], settings_class: type, prog: str) -> None:
    known = set(known_keys(settings_class))
    for item in overrides:
        if item.startswith("--") and len(item) > 2:
            key = re.split(r"[=+]", item[2:], maxsplit=1)[0]
            if key not in known:
                raise UserError(
                    f"unknown option '--{key}'; {_nearest(key, settings_class)}. `{prog} --help` lists them all"
                )


def _bracketed(overrides: list[str], settings_class: type) -> list[str]:
    """Lists as people type them, ``--key 1,2`` or ``--key 1 2``, in the form that the parser reads: ``--key=[1,2]``."""
    lists = {f"--{name}" for name, hint in _typed_keys(settings_class) if typing.get_origin(hint) is list}
    rest, found = list(overrides), []
    while rest:
        item = rest.pop(0)
        name, equals, value = item.partition("=")
        if name in lists:
            given = [value] if equals else []
            while not equals and rest and not rest[0].startswith("--"):
                given.append(rest.pop(0))
            whole = ",".join(given)
            if given:
                item = f"{name}={whole if whole.startswith('[') else f'[{whole}]'}"
        found.append(item)
    return found


def _nearest(key: str, settings_class: type, prefix: str = "") -> str:
    """The known key that looks most like ``key``; ones with the right last part in another section count too."""
    prefix = re.sub(r"\[\d+\]", "", prefix)
    key = re.sub(r"\[\d+\]", "", key)
    known = [prefix + name for name in known_keys(settings_class)]
    close = difflib.get_close_matches(key, known, n=1, cutoff=0.6)
    last = key.rsplit(".", 1)[-1]
    close = close or [name for name in known if name.rsplit(".", 1)[-1] == last]
    close = close or difflib.get_close_matches(last, [name.rsplit(".", 1)[-1] for name in known], n=1)
    return f"the nearest known key is '{close[0]}'" if close else f"known are {', '.join(known[:40])}"


def _hints(settings_class: type) -> dict[str, Any]:
    """Name and type of every field that the constructor takes."""
    hints = typing.get_type_hints(settings_class)
    return {field.name: hints[field.name] for field in dataclasses.fields(settings_class) if field.init}


def _dataclass_in(hint: Any) -> tuple[type | None, bool]:
    """The dataclass behind ``C``, ``C | None`` or ``list[C]``, and whether it is a list."""
    if dataclasses.is_dataclass(hint):
        return cast(type, hint), False
    for argument in typing.get_args(hint):
        inner, listed = _dataclass_in(argument)
        if inner:
            return inner, listed or typing.get_origin(hint) is list
    return None, False


def _plain(message: str) -> str:
    """A parser's message on one line, with types spelled as a user writes them."""
    message = re.sub(r"^Parser key \"([^\"]+)\":", r"'\1':", message.strip())
    message = re.sub(r"<class '([\w.]+)'>", r"\1", message)
    message = re.sub(r"typing\.(Literal|Optional|Union)", r"\1", message)
    return re.sub(r"\s*\n\s*", " ", message)


def _fail(line: str, status: int) -> int:
    print(line, file=sys.stderr, flush=True)
    return status
