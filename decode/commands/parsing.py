"""Settings of every command: dataclasses, read from YAML files and overridden on the command line.

jsonargparse converts and checks the values, and its help shows the texts below each attribute. One YAML file serves
several commands, so that a command skips the sections of the others; any other unknown key is an error that names the
nearest known one. A file may build on another one: ``base: other.yaml`` (relative to itself) is read first.
"""

import dataclasses
import difflib
import errno
import functools
import itertools
import os
import signal
import sys
import tempfile
import threading
import typing
from argparse import Action
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import jsonargparse
import yaml

from decode.errors import UserError

Settings = TypeVar("Settings")

UNION = ("Does not validate against any", "Subtypes:", "Errors:", "Given value type:")
"""Lines of jsonargparse's errors for optional values that do not help a user."""
VERBATIM = {"stop", "input", "runs"}  # list options whose values are not split at commas


def parse(
    settings_class: type[Settings],
    argv: Sequence[str] | None = None,
    *,
    prog: str = "",
    description: str = "",
    examples: str = "",
    foreign: Collection[str] = (),
    section: str | None = None,
    aliases: Mapping[str, str] | None = None,
) -> Settings:
    """Read ``--config FILE`` and ``--key.subkey value`` overrides into an instance of a settings dataclass.

    Later files override earlier ones key by key, and options override files. Names of options may be typed with hyphens
    or underscores; a switch needs no value (``--no-KEY`` turns it off); lists are ``1,2``, ``1 2`` or ``[1,2]``.

    Args:
        settings_class: A dataclass whose fields are plain values, dataclasses or lists of dataclasses.
        argv: Arguments without the program's name; ``None`` reads ``sys.argv``.
        prog: The command as the user types it, for the usage line.
        description: A paragraph above the help.
        examples: Command lines below the help.
        foreign: Top-level sections of a shared YAML file that belong to other commands; skipped.
        section: Section of the file that holds the settings; ``None``: they are at its top level.
        aliases: Short names of options.

    Raises:
        UserError: A missing file, malformed YAML, an unknown key, a wrong value, or a refusal by ``__post_init__``.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    keys: type = settings_class
    parser = _parser(keys, prog, description)
    if "-h" in argv or "--help" in argv:  # also beside arguments that are wrong
        parser.print_help()
        print(f"\nexamples:\n{examples}" if examples else "")
        raise SystemExit(0)
    paths, given = _read_options(argv, known_keys(keys), prog, aliases or {})
    content = merge(read_config(paths, foreign, settings_class, section), given)
    try:
        return settings_class(**vars(parser.instantiate(parser.parse_object(content))))
    except UserError:
        raise
    except (jsonargparse.ArgumentError, ValueError, TypeError) as error:
        source = " and ".join([*map(str, paths), *(["the command line"] if given else [])]) or prog
        lines = (line.strip() for line in str(error).splitlines())  # of optional values, one for each type tried
        message = " ".join(line for line in lines if "NoneType" not in line and not line.startswith(UNION))
        raise UserError(f"{source}: {message}") from error


@functools.cache
def _parser(settings_class: type, prog: str, description: str) -> jsonargparse.ArgumentParser:
    jsonargparse.set_parsing_settings(docstring_parse_attribute_docstrings=True)
    parser = jsonargparse.ArgumentParser(
        prog=prog,
        usage=f"{prog} [options]",
        description=f"{description} --config FILE reads options from YAML and may be repeated.",
        exit_on_error=False,
        default_env=False,
        formatter_class=HyphenFormatter,
    )
    parser.add_class_arguments(settings_class, None)
    return parser


class HyphenFormatter(jsonargparse.DefaultHelpFormatter):
    """Help with hyphens in the names of options, without jsonargparse's options that extend a list."""

    def _format_action_invocation(self, action: Action) -> str:
        names = ", ".join(name.replace("_", "-") for name in action.option_strings if not name.endswith("+"))
        return f"{names} {self._format_args(action, action.dest.rpartition('.')[2].upper())}".rstrip()


# -- configuration files -----------------------------------------------------------------------------------------------


def read_config(
    paths: Sequence[Path], foreign: Collection[str] = (), settings_class: type | None = None, section: str | None = None
) -> dict[str, Any]:
    """The content of configuration files and of those that they build on; later files override earlier ones.

    Args:
        paths: The files.
        foreign: Top-level sections to leave out.
        settings_class: Dataclass whose fields are the known keys; ``None``: keys are not checked.
        section: The section to return; other sections are skipped, unless their name resembles it.

    Raises:
        UserError: A file that is missing, is not valid YAML, builds on itself, or has an unknown key.
    """
    whole: dict[str, Any] = {}
    for path, content in [layer for given in paths for layer in _layers(given)]:
        content = {key: value for key, value in content.items() if key not in foreign}
        if section is not None:
            shared = {section, "name", "output_dir"}
            for key in content.keys() - shared:
                if near := difflib.get_close_matches(str(key), shared, 1, 0.75):
                    raise UserError(f"{path}: unknown key '{key}'; the nearest known key is '{near[0]}'")
            content = content.get(section) or {}
        if settings_class is not None:
            _check_keys(content, known_keys(settings_class), "", f"{path}, section {section}" if section else str(path))
        whole = merge(whole, content)
    return whole


def _layers(path: Path, above: tuple[Path, ...] = ()) -> list[tuple[Path, dict[str, Any]]]:
    """A configuration file after those that it builds on (its key ``base``), each with its own content."""
    if not path.is_file():
        found = ", ".join(sorted(map(str, Path("configs").glob("*.yaml")))) or f"none under {Path.cwd()}/configs"
        raise UserError(f"there is no configuration file {str(path)!r}; these exist: {found}")
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} holds a {type(content).__name__}, expected one 'key: value' a line")
    base = content.pop("base", None)
    if base is None:
        return [(path, content)]
    if not isinstance(base, str) or (path.parent / base).resolve() in {p.resolve() for p in (path, *above)}:
        raise UserError(f"{path}: 'base' is {base!r}, expected the path of another file, relative to this one")
    return [*_layers(path.parent / base, (path, *above)), (path, content)]


def merge(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """Two configurations as one: sections are merged key by key; any other value of `above` wins, as does ``{}``."""
    both = {
        k: merge(below[k], v) if v and isinstance(v, dict) and isinstance(below.get(k), dict) else v
        for k, v in above.items()
    }
    return below | both


# -- keys --------------------------------------------------------------------------------------------------------------


@functools.cache
def known_keys(settings_class: type, prefix: str = "") -> dict[str, Any]:
    """Dotted names and types of all fields, those of sections and of lists of sections included."""
    found: dict[str, Any] = {}
    hints = typing.get_type_hints(settings_class)
    for name in (field.name for field in dataclasses.fields(settings_class) if field.init):
        found[prefix + name] = hints[name]
        kinds = [hints[name], *typing.get_args(hints[name])]  # such as list[C] | None, list[C], None, C
        kinds += [inner for kind in kinds[1:] for inner in typing.get_args(kind)]
        section: Any = next(filter(dataclasses.is_dataclass, kinds), None)
        if section is not None:
            found |= known_keys(section, f"{prefix}{name}.")
    return found


def _check_keys(content: Mapping[str, Any], known: Mapping[str, Any], prefix: str, source: str) -> None:
    """Refuse the first key of nested mappings that is not known."""
    for key, value in content.items():
        name = f"{prefix}{key}"
        if name not in known:
            raise UserError(f"{source}: unknown key '{name}'; {_nearest(name, known)}")
        if any(other.startswith(f"{name}.") for other in known):
            for item in value if isinstance(value, list) else [value]:
                if isinstance(item, dict):
                    _check_keys(item, known, f"{name}.", source)
                elif item is not None:
                    raise UserError(f"{source}: '{name}' is {item!r}, expected a section of 'key: value' lines")


def _nearest(key: str, known: Collection[str]) -> str:
    """The known key that looks most like `key`, or has the same last part in another section."""
    close = difflib.get_close_matches(key, known, n=1, cutoff=0.6)
    last = key.rsplit(".", 1)[-1]
    close = close or [name for name in known if name.rsplit(".", 1)[-1] == last]
    close = close or difflib.get_close_matches(last, [name.rsplit(".", 1)[-1] for name in known], n=1)
    return f"the nearest known key is '{close[0]}'" if close else f"known keys are {', '.join(list(known)[:40])}"


def _read_options(
    argv: list[str], known: Mapping[str, Any], prog: str, aliases: Mapping[str, str]
) -> tuple[list[Path], dict[str, Any]]:
    """The configuration files, and the options as a nested mapping of texts and lists of texts."""
    paths: list[Path] = []
    found: dict[str, Any] = {}
    while argv:
        name, equals, value = argv.pop(0).partition("=")
        key = name[2:].replace("-", "_")
        key = aliases.get(key, key)
        switched_off = key.startswith("no_") and _is_switch(known.get(key[3:]))
        if not name.startswith("--"):
            raise UserError(f"unexpected argument {name!r}; options start with --, `{prog} --help` lists them all")
        if key not in known and key != "config" and not switched_off:
            raise UserError(f"unknown option '{name}'; {_nearest(key, known)}. `{prog} --help` lists them all")
        values = [value] if equals else []
        if switched_off:
            key, values = key[3:], ["false"]
        elif _is_switch(known.get(key)):
            if not equals:
                values = [argv.pop(0) if argv and argv[0].lower() in ("true", "false", "null") else "true"]
        elif _is_list(known.get(key)):
            while not equals and argv and not argv[0].startswith("--"):
                values.append(argv.pop(0))
        elif not equals and argv and argv[0].partition("=")[0][2:].replace("-", "_") not in known:
            values = [argv.pop(0)]
        if not values or (key == "config" and not values[0]):
            raise UserError(f"{name} needs a value; `{prog} --help` explains it")
        if key == "config":
            paths.append(Path(values[0]))
            continue
        section = found
        *outer, last = key.split(".")
        for part in outer:
            section[part] = section[part] if isinstance(section.get(part), dict) else {}
            section = section[part]
        if not _is_list(known[key]) or (len(values) == 1 and (values[0].startswith("[") or values[0] == "null")):
            section[last] = values[0]
        elif key not in VERBATIM and any("{" in item for item in values):  # sections
            section[last] = f"[{','.join(values)}]"
        else:
            if key not in VERBATIM:
                values = [part.strip() for item in values for part in item.strip("[]").split(",") if part.strip()]
            earlier = section.get(last)
            section[last] = [*(earlier if isinstance(earlier, list) else []), *values]
    return paths, found


def _is_switch(hint: Any) -> bool:
    return hint is bool or set(typing.get_args(hint)) == {bool, type(None)}


def _is_list(hint: Any) -> bool:
    return list in (typing.get_origin(hint), *map(typing.get_origin, typing.get_args(hint)))


def config_paths(argv: Sequence[str]) -> list[Path]:
    """The files that ``--config`` names."""
    words = [word for item in argv for word in (item.split("=", 1) if item.startswith("--config=") else [item])]
    return [Path(value) for name, value in itertools.pairwise(words) if name == "--config"]


def take_flag(argv: list[str], flag: str) -> bool:
    """Remove a switch that is no settings key, such as ``--dry-run``; returns whether it was there."""
    found = flag in argv
    argv[:] = [item for item in argv if item != flag]
    return found


# -- running -----------------------------------------------------------------------------------------------------------

WRITING = (
    errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EISDIR,
    errno.EEXIST,
)  # fmt: skip
"""Errors of the system by which writing a file fails."""
NEXT = "free some space (`df -h .`, `ulimit -f`) or choose another output folder, then run the same command again"


def run_main(function: Callable[[], object]) -> int:
    """Run a command; an error that the user can correct, an interrupt or a full disk is reported in one line.

    Returns:
        0 on success, 2 after a `UserError` or where files cannot be written, 130 after Ctrl-C or SIGTERM. Other
        exceptions pass through.
    """
    in_main_thread = threading.current_thread() is threading.main_thread()  # only it may handle signals
    before = signal.signal(signal.SIGTERM, signal.default_int_handler) if in_main_thread else None
    try:
        function()
        sys.stdout.flush()
        return 0
    except UserError as error:
        line, status = f"error: {error}", 2
    except SystemExit as error:  # after --help
        return int(error.code or 0)
    except KeyboardInterrupt:
        line, status = "stopped; run the same command again to continue", 130
    except BrokenPipeError:  # `... | head` closed the pipe
        _close_stdout()
        return 0
    except Exception as error:
        reason = writing_error(error)
        if reason is None:
            raise
        try:
            sys.stdout.flush()
        except OSError:  # standard output itself cannot be written
            _close_stdout()
        line, status = f"error: {reason}; {NEXT}", 2
    finally:
        if in_main_thread:
            signal.signal(signal.SIGTERM, before)
    print(line, file=sys.stderr, flush=True)
    return status


def writing_error(error: BaseException) -> str | None:
    """Why a file could not be written, if that is the cause of an exception; libraries wrap it in their own errors."""
    if isinstance(error, OSError) and error.errno in WRITING:
        name = error.filename2 or error.filename
        return f"{name} cannot be written: {error.strerror}" if name else error.strerror
    for number in WRITING:  # safetensors and tokenizers, which are written in Rust
        if f"(os error {number})" in str(error):
            return os.strerror(number)
    if "PytorchStreamWriter failed" in str(error) or "inline_container" in str(error):  # torch.save loses the number
        return "a file cannot be written"
    below = error.__cause__ or error.__context__
    return writing_error(below) if below is not None else None


def check_writable(folder: str | Path) -> Path:
    """Refuse a folder that results cannot be written to, before hours are spent on them.

    Raises:
        UserError: it cannot be made, or no file can be made in it.
    """
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return Path(folder)
    except OSError as error:
        raise UserError(f"output {str(folder)!r}: {error.strerror}; choose another output folder") from error


def _close_stdout() -> None:
    """Discard what is still buffered, so that the interpreter does not fail on it at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
