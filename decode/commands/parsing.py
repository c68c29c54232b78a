"""Settings for every command: typed dataclasses, read from YAML and overridden on the command line.

One YAML file serves several commands. Each command hands its settings class to `parse` together with the names of the
top-level sections that belong to the others (``foreign``); those are skipped, anything else that the class does not
know is an error that names the nearest known key. jsonargparse does the typing and the help, whose texts are the
docstrings below each attribute. A file may build on another one: ``base: other.yaml`` (relative to itself) is read
first, and the file says only what differs.
"""

import contextlib
import dataclasses
import difflib
import errno
import functools
import io
import json
import os
import re
import signal
import sys
import tempfile
import threading
import typing
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar, cast

import jsonargparse
import yaml

from decode.errors import UserError
from decode.method_options import plain_message


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


Settings = TypeVar("Settings")

VERBATIM = {"stop", "input", "runs"}  # list options whose values are never cut at commas


def parse(
    settings_class: type[Settings],
    argv: Sequence[str] | None = None,
    *,
    prog: str = "",
    description: str = "",
    examples: str = "",
    foreign: Collection[str] | None = None,
    section: str | None = None,
    positional: str | None = None,
    aliases: Mapping[str, str] | None = None,
) -> Settings:
    """Read ``--config FILE`` and ``--key.subkey value`` overrides into an instance of a settings dataclass.

    Precedence: the class's defaults, then the configuration files in order, then the overrides. Names may be typed with
    hyphens or underscores; a switch needs no value (``--no-KEY`` turns it off); lists are ``1,2``, ``1 2``, ``[1,2]``.

    Args:
        settings_class: A dataclass whose fields are plain values, dataclasses or lists of dataclasses.
        argv: Arguments without the program's name; ``None`` reads ``sys.argv``.
        prog: The command as the user types it, for the usage line.
        description: A paragraph above the help.
        examples: Command lines below the help.
        foreign: Top-level sections of a shared YAML file that belong to other commands; skipped.
        section: Where the settings stand in the file; ``None``: at its top level.
        positional: The option that leading values without a name belong to.
        aliases: Short names of options.

    Raises:
        UserError: Missing file, malformed YAML, unknown key, wrong type, or a ``__post_init__`` that refused.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = _parser(cast(Any, settings_class), prog, description)
    if "-h" in argv or "--help" in argv:  # a help request must not fail on the arguments beside it
        print(_help(parser) + (f"\n\nexamples:\n{examples}" if examples else ""))
        raise SystemExit(0)
    paths, options = _read_options(argv, settings_class, prog, positional, aliases or {})
    source = "the command line"
    try:
        content = read_config(paths, foreign or (), settings_class, section)
        source = " and ".join(map(str, paths)) or source
        content, options = _with_optional_sections(content, options, settings_class)
        values = parser.parse_object(content) if content else None
        source = "the command line"
        if options or values is None:
            values = parser.parse_args(options, namespace=values)
        source = " and ".join([*map(str, paths), "the command line"] if options else map(str, paths)) or prog
        return settings_class(**vars(parser.instantiate(values)))
    except UserError:
        raise
    except (jsonargparse.ArgumentError, ValueError, TypeError) as error:
        raise UserError(f"{source}: {plain_message(str(error))}") from error


# -- configuration files -----------------------------------------------------------------------------------------------


def read_config(
    paths: Sequence[Path], foreign: Collection[str] = (), settings_class: type | None = None, section: str | None = None
) -> dict[str, Any]:
    """The content of configuration files, each above those that it builds on; the later one of two wins key by key.

    Args:
        paths: The files.
        foreign: Top-level sections to leave out.
        settings_class: What is checked for unknown keys.
        section: The section to return; other sections are skipped, unless their name looks like it mistyped.

    Raises:
        UserError: A file that is missing, is not valid YAML, builds on itself, or has an unknown key.
    """
    whole: dict[str, Any] = {}
    for path, content in [layer for given in paths for layer in config_layers(given)]:
        if section is not None:
            shared = (section, "name", "output_dir")
            for key in content.keys() - set(shared):
                if near := difflib.get_close_matches(str(key), shared, 1, 0.75):
                    raise UserError(f"{path}: unknown key '{key}'; the nearest known key is '{near[0]}'")
            content = {section: content.get(section) or {}}
            _check_keys({section: content[section]}, {section: settings_class}, "", str(path))
            content = content[section]
        content = {key: value for key, value in content.items() if key not in foreign}
        if settings_class is not None and section is None:
            _check_keys(content, _hints(settings_class), "", str(path))
        whole = merge(whole, content)
    return whole


# -- options -----------------------------------------------------------------------------------------------------------


def take_flag(argv: list[str], flag: str) -> bool:
    """Remove a switch that is no settings key (such as ``--dry-run``) from the arguments; was it there?"""
    found = flag in argv
    argv[:] = [item for item in argv if item != flag]
    return found


def _read_options(
    argv: list[str], settings_class: type, prog: str, positional: str | None, aliases: Mapping[str, str]
) -> tuple[list[Path], list[str]]:
    """The configuration files, and all options as ``--key=value``."""
    hints = dict(_typed_keys(settings_class))
    options: list[str] = []
    lists: dict[str, list[str]] = {}
    paths: list[Path] = []
    rest = list(argv)
    if positional and rest and not rest[0].startswith("-"):
        rest = [f"--{positional}", *rest]
    while rest:
        name, equals, value = rest.pop(0).partition("=")
        key = name[2:].replace("-", "_")
        key = aliases.get(key, key)
        negated = key.removeprefix("no_") if key.startswith("no_") and _is_switch(hints.get(key[3:])) else None
        if name == "--config":
            paths += config_paths(["--config", value or (rest.pop(0) if rest else "")])
        elif not name.startswith("--"):
            raise UserError(f"unexpected argument {name!r}; options start with --, `{prog} --help` lists them all")
        elif key not in hints and not negated:
            raise UserError(f"unknown option '{name}'; {_nearest(key, settings_class)}. `{prog} --help` lists them all")
        elif negated:
            options.append(f"--{negated}=false")
        elif _is_switch(hints[key]):
            follows = not equals and rest and rest[0].lower() in ("true", "false", "null")
            options.append(f"--{key}={value if equals else rest.pop(0) if follows else 'true'}")
        elif _is_list(hints[key]):
            given = [value] if equals else []
            while not equals and rest and not rest[0].startswith("--"):
                given.append(rest.pop(0))
            if not given:
                raise UserError(f"{name} needs a value; `{prog} --help` explains it")
            lists.setdefault(key, []).extend(given)
        elif equals or (rest and not (rest[0].startswith("--") and _key(rest[0]) in hints)):
            options.append(f"--{key}={value if equals else rest.pop(0)}")
        else:
            raise UserError(f"{name} needs a value; `{prog} --help` explains it")
    return paths, options + [f"--{key}={_list_value(key, given, hints[key])}" for key, given in lists.items()]


def _with_optional_sections(
    content: dict[str, Any], options: Sequence[str], settings_class: type
) -> tuple[dict[str, Any], list[str]]:
    """Options inside sections that may be null are put into the content: jsonargparse replaces such sections whole."""
    sections = tuple(f"{key}." for key, hint in _typed_keys(settings_class) if _may_be_null(hint))
    left = []
    for option in options:
        key, _, value = option[2:].partition("=")
        if key.startswith(sections):
            inside: Any = yaml.safe_load(value)
            for name in reversed(key.split(".")):
                inside = {name: inside}
            content = merge(content, inside)
        else:
            left.append(option)
    return content, left


def _may_be_null(hint: Any) -> bool:
    """Whether it is a section, or null."""
    return type(None) in typing.get_args(hint) and any(map(dataclasses.is_dataclass, typing.get_args(hint)))


def _key(option: str) -> str:
    return option.partition("=")[0][2:].replace("-", "_")


def _is_switch(hint: Any) -> bool:
    return hint is bool or set(typing.get_args(hint)) == {bool, type(None)}


def _is_list(hint: Any) -> bool:
    return typing.get_origin(hint) is list or any(typing.get_origin(kind) is list for kind in typing.get_args(hint))


def _list_value(key: str, given: list[str], hint: Any) -> str:
    """Values of a list option, given one by one, by commas or in brackets, as the parser reads them."""
    if len(given) == 1 and (given[0].startswith("[") or given[0] == "null"):
        return given[0]
    if key not in VERBATIM and not any("{" in item for item in given):
        given = [part.strip() for item in given for part in item.strip("[]").split(",") if part.strip()]
    texts = str in typing.get_args(hint)
    return "[" + ",".join(json.dumps(item, ensure_ascii=False) if texts else item for item in given) + "]"


@functools.cache
def _parser(settings_class: type, prog: str, description: str) -> Any:
    jsonargparse.set_parsing_settings(docstring_parse_attribute_docstrings=True)
    parser = jsonargparse.ArgumentParser(
        prog=prog, usage=f"{prog} [options]", description=description, exit_on_error=False, default_env=False
    )
    parser.add_class_arguments(settings_class, None)
    return parser


def _help(parser: Any) -> str:
    """The parser's help, with hyphens in the options and without jsonargparse's own way of extending lists."""
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        parser.print_help()
    text = re.sub(r", --[\w.]+\+(?: \S+)?", "", shown.getvalue())
    text = re.sub(r"--[a-z][\w.]*", lambda match: match[0].replace("_", "-"), text)
    configs = "Show this help message and exit. --config FILE reads options from YAML, and may be repeated."
    return text.replace("Show this help message and exit.", configs).rstrip()


def _typed_keys(settings_class: type | Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, hint in _hints(settings_class).items():
        yield prefix + name, hint
        inner, _ = _dataclass_in(hint)
        if inner:
            yield from _typed_keys(inner, f"{prefix}{name}.")


def _check_keys(content: dict[str, Any], hints: Mapping[str, Any], prefix: str, source: str) -> None:
    """Refuse the first key of a nested mapping that the dataclass does not have."""
    for key, value in content.items():
        if key not in hints:
            raise UserError(f"{source}: unknown key '{prefix}{key}'; {_nearest(f'{prefix}{key}', hints, prefix)}")
        inner, listed = _dataclass_in(hints[key])
        if inner is None:
            continue
        for index, item in enumerate(value if listed and isinstance(value, list) else [value]):
            name = f"{prefix}{key}[{index}]" if listed else f"{prefix}{key}"
            if isinstance(item, dict):
                _check_keys(item, _hints(inner), f"{name}.", source)
            elif item is not None:
                raise UserError(f"{source}: '{name}' is {item!r}, expected a section of 'key: value' lines")


def _nearest(key: str, settings_class: type | Mapping[str, Any], prefix: str = "") -> str:
    """The known key that looks most like ``key``; ones with the right last part in another section count too."""
    prefix, key = re.sub(r"\[\d+\]", "", prefix), re.sub(r"\[\d+\]", "", key)
    known = [prefix + name for name, _ in _typed_keys(settings_class)]
    close = difflib.get_close_matches(key, known, n=1, cutoff=0.6)
    last = key.rsplit(".", 1)[-1]
    close = close or [name for name in known if name.rsplit(".", 1)[-1] == last]
    close = close or difflib.get_close_matches(last, [name.rsplit(".", 1)[-1] for name in known], n=1)
    return f"the nearest known key is '{close[0]}'" if close else f"known are {', '.join(known[:40])}"


def _hints(settings_class: type | Mapping[str, Any]) -> dict[str, Any]:
    """Name and type of every field that the constructor takes."""
    if isinstance(settings_class, Mapping):
        return dict(settings_class)
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


NEXT = "Nothing half-written is kept; then run the same command again to continue"
WRITING = {
    errno.ENOSPC: "the disk is full; free some space (`df -h .` shows it)",
    errno.EDQUOT: "the disk quota is used up; free some space (`quota` shows it)",
    errno.EFBIG: "the file would be larger than allowed here; raise the limit (`ulimit -f` shows it)",
    errno.EROFS: "the file system is read-only; choose another output folder",
    errno.EACCES: "permission is denied; choose another output folder",
    errno.EPERM: "the operation is not permitted; choose another output folder",
    errno.ENOTDIR: "a file stands where a folder is needed; move it away, or choose another output folder",
    errno.EISDIR: "a folder stands where a file is needed; move it away, or choose another output folder",
    errno.EEXIST: "something stands where a folder is needed; move it away, or choose another output folder",
}
"""Reasons for which writing fails, and what to do."""


def run_main(function: Callable[[], object]) -> int:
    """Run a command; an error that the user can correct, an interrupt or a full disk is told in one line.

    Returns:
        0 on success, 2 after a `UserError` or where files cannot be written, 130 after Ctrl-C or SIGTERM. Other
        exceptions pass through.
    """
    try:
        with _sigterm_interrupts():
            function()
        sys.stdout.flush()
        return 0
    except UserError as error:
        return _fail(f"error: {error}", 2)
    except SystemExit as error:  # a help that was asked for
        return int(error.code or 0)
    except KeyboardInterrupt:
        return _fail("stopped; run the same command again to continue", 130)
    except BrokenPipeError:  # `... | head` closed the pipe: nothing is wrong
        _close_stdout()
        return 0
    except Exception as error:
        reason = writing_error(error)
        if reason is None:
            raise
        try:
            sys.stdout.flush()
        except OSError:  # it is standard output that cannot be written
            _close_stdout()
        return _fail(f"error: {reason}. {NEXT}", 2)


@contextmanager
def _sigterm_interrupts() -> Iterator[None]:
    """Within it, SIGTERM ends the main thread as Ctrl-C does, so that what is temporary is removed."""
    if threading.current_thread() is not threading.main_thread():  # only that one may
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def writing_error(error: BaseException) -> str | None:
    """Why a file could not be written, if that is what an exception says; libraries wrap it in errors of their own."""
    if isinstance(error, OSError) and error.errno in WRITING:
        where = f"{error.filename2 or error.filename} cannot be written: " if error.filename else ""
        return where + WRITING[error.errno]
    if number := re.search(r"\(os error (\d+)\)", str(error)):  # safetensors and tokenizers, from Rust
        return WRITING.get(int(number[1]))
    if "PytorchStreamWriter failed" in str(error) or "inline_container" in str(error):  # torch.save loses the number
        return "a file cannot be written; `df -h .` and `ulimit -f` show whether the disk is full or files are limited"
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
        raise UserError(f"output {str(folder)!r}: {WRITING.get(error.errno or 0, error.strerror)}") from error


def _close_stdout() -> None:
    """Let what is still buffered go nowhere, so that the interpreter does not fail on it at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _fail(line: str, status: int) -> int:
    print(line, file=sys.stderr, flush=True)
    return status
