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
import re
import shutil
import signal
import sys
import tempfile
import textwrap
import threading
import typing
from argparse import Action
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import jsonargparse
import yaml

from decode.errors import UserError, choose

Settings = TypeVar("Settings")

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
        section: Section of the file that holds the settings, of which others than it are skipped; ``None``: they are at
            its top level.
        aliases: Short names of options.

    Raises:
        UserError: A missing file, malformed YAML, an unknown key, a wrong value, or a refusal by ``__post_init__``.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    keys: type = settings_class
    parser, known = _parser(keys, prog, description), known_keys(keys)
    if "-h" in argv or "--help" in argv:  # also beside arguments that are wrong
        print(_help(parser, settings_class, argv) + (f"\nexamples:\n{examples}" if examples else ""))
        raise SystemExit(0)
    paths = config_paths(argv)
    given = _read_options(argv, known, prog, aliases or {})
    content = read_config(paths)
    source = " and ".join([*map(str, paths), *(["the command line"] if given else [])]) or prog
    if section is not None:
        if near := difflib.get_close_matches(section, content.keys() - {section}, 1, 0.75):
            raise UserError(f"{source}: unknown key '{near[0]}'; the nearest known key is '{section}'")
        content, source = content.get(section) or {}, f"{source}, section {section}"
    content = {key: value for key, value in content.items() if key not in foreign}
    optional, values = _optional_sections(keys), merge(content, given)
    off = [key for key in optional if values.get(key) in (False, "false")]
    _check_keys({k: v for k, v in content.items() if k not in optional or v is not False}, known, "", source)
    values = {key: value for key, value in values.items() if key not in off}
    try:
        return settings_class(**vars(parser.instantiate(parser.parse_object(values))) | dict.fromkeys(off, False))
    except UserError:
        raise
    except (jsonargparse.ArgumentError, ValueError, TypeError) as error:
        raise UserError(f"{source}: {' '.join(str(error).split())}") from error


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
    optional = _optional_sections(settings_class)
    parser.add_class_arguments(settings_class, None, skip=set(optional))
    for key, section in optional.items():
        parser.add_class_arguments(section, key)
    return parser


def _optional_sections(settings_class: type) -> dict[str, type]:
    """The classes of the sections that ``false`` turns off, by key."""
    hints = {key: typing.get_args(hint) for key, hint in typing.get_type_hints(settings_class).items()}
    false = typing.Literal[False]
    return {key: kind for key, kinds in hints.items() if false in kinds for kind in kinds if isinstance(kind, type)}


class HyphenFormatter(jsonargparse.DefaultHelpFormatter):
    """Help with hyphens in the names of options, without jsonargparse's options that extend a list."""

    def _format_action_invocation(self, action: Action) -> str:
        names = ", ".join(name.replace("_", "-") for name in action.option_strings if not name.endswith("+"))
        return f"{names} {self._format_args(action, action.dest.rpartition('.')[2].upper())}".rstrip()


# -- help --------------------------------------------------------------------------------------------------------------

HELP_LINES = 60
"""Longest help that is printed whole."""


def _help(parser: jsonargparse.ArgumentParser, settings_class: type, argv: list[str]) -> str:
    """The help: all of it where it is short, else the command's own options in a line each, and the sections.

    The word after ``--help`` is ``all``, or names a section whose options are explained in full.

    Raises:
        UserError: There is no such section.
    """
    whole, sections = parser.format_help(), _sections(parser, settings_class)
    asked = next((word for flag, word in itertools.pairwise(argv) if flag in ("-h", "--help")), "-").replace("-", "_")
    if asked == "all" or (asked.startswith("_") and whole.count("\n") <= HELP_LINES):
        return whole
    if not asked.startswith("_"):
        choose("section", asked, sections | {"all": []})
        formatter = parser._get_formatter()
        for name, (title, *options) in sections.items():
            if f"{name}.".startswith(f"{asked}."):
                formatter.start_section(title)
                formatter.add_arguments(options)
                formatter.end_section()
        return str(formatter.format_help())
    rows = [(f"--{option.dest.replace('_', '-')}", option.help) for option in sections["options"][1:]]
    others = [(name, of[0]) for name, of in sections.items() if name != "options" and "." not in name]
    lines, room = [whole[: whole.index("\noptions:")], "options:"], shutil.get_terminal_size().columns - 22
    for name, text in [*rows, ("", ""), *others]:
        first = textwrap.shorten(re.split(r"[.;] ", str(text))[0].rstrip("."), room, placeholder=" ...")
        lines.append(f"  {name:<19} {first}" if name else f"\nsections; {parser.prog} --help SECTION explains one:")
    return "\n".join([*lines, f"  {'all':<19} All options\n"])


def _sections(parser: jsonargparse.ArgumentParser, settings_class: type) -> dict[str, list[Any]]:
    """The title and the options of every section.

    Keys with a common prefix are a section. Others are ``options``, but those of classes that several commands share,
    the bases of a class with more than one, are sections with the names of the classes.
    """
    lines, found = [settings_class], dict[str, list[Any]]()
    while len(lines[-1].__bases__) == 1:
        lines += lines[-1].__bases__
    for group in parser._action_groups[2:]:
        head = str(group._group_actions[0].dest)
        for option in group._group_actions:
            name, title = head, group.title
            if option.dest.endswith(".help"):
                continue
            if not group._group_actions[-1].dest.startswith(f"{head}."):
                owner = next(kind for kind in settings_class.__mro__ if option.dest in kind.__annotations__)
                name = "options" if owner in lines else re.sub("Settings|Options", "", owner.__name__).lower()
                title = title if owner in lines else str(owner.__doc__).rstrip(".")
            found.setdefault(name, [title]).append(option)
    return found


# -- configuration files -----------------------------------------------------------------------------------------------


def read_config(paths: Sequence[Path]) -> dict[str, Any]:
    """The content of configuration files and of those that they build on; later files override earlier ones.

    Raises:
        UserError: A file that is missing, is not valid YAML, or builds on itself.
    """
    return functools.reduce(merge, map(_read_file, paths), {})


def _read_file(path: Path, above: tuple[Path, ...] = ()) -> dict[str, Any]:
    if not path.is_file():
        found = ", ".join(sorted(map(str, Path("configs").glob("*.yaml"))))
        copied = f"copy one of the repository's folder configs to {Path.cwd()}, or give your own with --config"
        raise UserError(f"there is no configuration file {str(path)!r}; {f'these exist: {found}' if found else copied}")
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} holds a {type(content).__name__}, expected one 'key: value' a line")
    base, above = content.pop("base", None), (*above, path.resolve())
    if base is None:
        return content
    below = path.parent / str(base)
    if below.resolve() in above:
        raise UserError(f"{path}: 'base' is {base!r}, expected the path of another file, relative to this one")
    return merge(_read_file(below, above), content)


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
    """Refuse the first key of nested mappings that is not known, and a value in place of a section."""
    for key, value in content.items():
        name = f"{prefix}{key}"
        if name not in known:
            raise UserError(f"{source}: unknown key '{name}'; {_nearest(name, known)}")
        if any(other.startswith(f"{name}.") for other in known):
            for item in value if isinstance(value, list) else [value]:
                if not isinstance(item, dict | None):
                    raise UserError(f"{source}: '{name}' is {item!r}, expected a section of 'key: value' lines")
                _check_keys(item or {}, known, f"{name}.", source)


def _nearest(key: str, known: Collection[str]) -> str:
    """The known key that looks most like `key`, or has the same last part in another section."""
    last = key.rsplit(".", 1)[-1]
    close = difflib.get_close_matches(key, known, n=1, cutoff=0.6)
    close = close or [name for name in known if name.rsplit(".", 1)[-1] == last]
    return f"the nearest known key is '{close[0]}'" if close else f"known keys are {', '.join(list(known)[:40])}"


def _read_options(argv: list[str], known: Mapping[str, Any], prog: str, aliases: Mapping[str, str]) -> dict[str, Any]:
    """The options but ``--config`` as a nested mapping of texts and lists of texts; consumes the arguments."""
    found: dict[str, Any] = {}
    while argv:
        name, equals, value = argv.pop(0).partition("=")
        if not name.startswith("--"):
            raise UserError(f"unexpected argument {name!r}; options start with --, `{prog} --help all` lists them all")
        key = name[2:].replace("-", "_")
        key = aliases.get(key, key)
        off = key.startswith("no_") and _is_switch(known.get(key[3:]))
        key = key[3:] if off else key
        if key not in known and key != "config":
            raise UserError(f"unknown option '{name}'; {_nearest(key, known)}. `{prog} --help all` lists them all")
        is_list = list in (typing.get_origin(hint) for hint in (known.get(key), *typing.get_args(known.get(key))))
        values = ["false"] if off else [value] if equals else []
        if not values and _is_switch(known.get(key)):
            values = [argv.pop(0) if argv and argv[0].lower() in ("true", "false", "null") else "true"]
        while not (equals or off) and argv and (is_list or not values):
            # a text may begin with hyphens unless it is an option; an item of a list may not
            if argv[0].startswith("--") and (is_list or argv[0].partition("=")[0][2:].replace("-", "_") in known):
                break
            values.append(argv.pop(0))
        if not values:
            raise UserError(f"{name} needs a value; `{prog} --help` explains it")
        if key == "config":
            continue
        *outer, last = key.split(".")
        place = functools.reduce(lambda section, part: section.setdefault(part, {}), outer, found)
        if not is_list or (len(values) == 1 and (values[0].startswith("[") or values[0] == "null")):
            place[last] = values[0]
            continue
        if key not in VERBATIM:
            values = [part.strip() for item in values for part in item.strip("[]").split(",") if part.strip()]
        place[last] = [*place.get(last, []), *values]
    return found


def _is_switch(hint: Any) -> bool:
    return hint is bool or set(typing.get_args(hint)) == {bool, type(None)}


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
        line, status = "stopped; a training continues if the same command is run again", 130
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


def writing_error(error: BaseException | None) -> str | None:
    """Why a file could not be written, if that is the cause of an exception; libraries wrap it in their own errors."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in WRITING:
            return f"{error.filename2 or error.filename or 'a file'} cannot be written: {error.strerror}"
        # safetensors and tokenizers, which are written in Rust, name the number; torch.save does not
        number = next((number for number in WRITING if f"(os error {number})" in str(error)), None)
        if number or "PytorchStreamWriter failed" in str(error) or "inline_container" in str(error):
            return f"a file cannot be written{f': {os.strerror(number)}' if number else ''}"
        error = error.__cause__ or error.__context__
    return None


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
