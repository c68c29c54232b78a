"""Settings of every command: dataclasses, read from YAML files and overridden on the command line by jsonargparse.

One YAML file serves several commands, so that a command skips the sections of the others; any other unknown key is an
error that names the nearest known one. A file may build on another one: ``base: other.yaml`` (relative to itself) is
read first. A file that is not there is looked for among the configurations of the package.
"""

import dataclasses
import difflib
import functools
import inspect
import io
import itertools
import json
import os
import re
import signal
import sys
import tempfile
import typing
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jsonargparse

from decode.errors import UserError, choose
from decode.files import FULL, Fields, writing_error
from decode.incoming import read_yaml, text_lines, whole
from decode.options import MODE, Settings, build

PACKAGE = Path(__file__).parents[1]  # whose configs/ are those of the repository
NAME = "NAME"  # stands for every name of a mapping from names to sections
PROSE = {"stop", "input", "data.prompts.openings"}  # lists of texts that are not split at commas
SWITCHES = (bool, typing.Literal["auto"] | bool | None)


def parse(
    settings_class: type[Settings],
    argv: Sequence[str],
    prog: str = "",
    description: str = "",
    examples: str = "",
    *,
    foreign: Collection[str] = (),
    section: str | None = None,
) -> Settings:
    """Read ``--config FILE`` and ``--key.subkey value`` overrides into an instance of a settings dataclass.

    Later files override earlier ones key by key, and options override files. Names of options may be typed with hyphens
    or underscores; a switch needs no value (``--no-KEY`` turns it off); lists are ``1,2``, ``1 2`` or ``[1,2]``; a text
    that looks like an option follows an equals sign.

    Args:
        settings_class: A dataclass whose fields are plain values, dataclasses or mappings of names to dataclasses,
            where a file's mapping replaces that of the files below it.
        argv: Arguments without the program's name.
        prog: The command as the user types it, for the usage line.
        description: A paragraph above the help.
        examples: Command lines below the help.
        foreign: Top-level sections of a shared YAML file that belong to other commands; skipped.
        section: Section of the file that holds the settings; ``None``: they are at its top level.

    Raises:
        UserError: A missing file, malformed YAML, an unknown key, a wrong value, or a refusal by ``__post_init__``.
    """
    kind: Any = settings_class
    helps = [word for word in argv if re.fullmatch(r"--[\w.-]+\.help", word)]
    if helps or {"-h", "--help"} & set(argv):  # also beside arguments that are wrong
        _show_help(kind, prog, description, examples, helps)
    paths, keys = config_paths(argv), known_keys(kind)
    options, content = read_options(argv, keys, prog), read_config(paths, keys)
    source = " and ".join([*map(str, paths), *(["the command line"] if options else [])]) or prog
    if section is not None:
        if near := difflib.get_close_matches(section, content.keys() - {section}, 1, 0.75):
            raise UserError(f"{source}: unknown key '{near[0]}'; the nearest known key is '{section}'")
        content, source = content.get(section) or {}, f"{source}, section {section}"
    content = {key: value for key, value in content.items() if key not in foreign}
    content = json.loads(whole(json.dumps(content, ensure_ascii=False), "the configuration"))
    for key, value in options.items():
        _put(content, key, value, keys)
    _check_keys(content, keys, "", source)
    return build(settings_class, content, source)


def _show_help(kind: Any, prog: str, description: str, examples: str, asked: Sequence[str]) -> NoReturn:
    """Print the options by section, a command's own before those it shares, or those of one section, and exit."""
    jsonargparse.set_parsing_settings(docstring_parse_attribute_docstrings=True)
    usage, keys = " ".join([prog, *asked, "[options]"]), known_keys(kind)
    parser: Any = jsonargparse.ArgumentParser(prog, usage, description, default_env=False, parser_mode=MODE)
    parser.formatter_class = functools.partial(jsonargparse.DefaultHelpFormatter, max_help_position=6, width=100)
    parser.add_argument("--config", help="YAML file to read options from; may be repeated")
    hints = {key: typing.get_type_hints(kind)[key.split(".")[0]] for key in keys if dataclasses.is_dataclass(keys[key])}
    listed = [key for key, hint in hints.items() if not dataclasses.is_dataclass(hint)]  # by name, or false instead
    parser.add_class_arguments(kind, None, skip={key.split(".")[0] for key in listed})
    for key in listed:
        parser.add_class_arguments(keys[key], key)
    plain, *groups = parser._action_groups[2:]
    first = {"target", "draft", "temperature", *inspect.get_annotations(kind)}
    plain._group_actions.sort(key=lambda action: action.dest not in first)
    by_name = {group._group_actions.pop(0).dest.removesuffix(f".{NAME}"): group for group in groups}
    for name, group in by_name.items():
        group.title = f"{name}: {group.title}"
    if asked:
        parser.description, parser._action_groups = "", [choose("section", asked[0][2:-5].replace("-", "_"), by_name)]
    elif by_name:
        parser.add_argument("--SECTION.help", help=f"Explain one section: {', '.join(by_name)}", metavar="")
    # without jsonargparse's options that extend a list
    text = re.sub(r", --\S+\+ \S+|\s+\(default: null\)", "", parser.format_help())
    text = re.sub(r"--[\w.]+", lambda name: name[0].replace("_", "-"), text)
    print(text.replace("\noptions:", f"\nexamples:\n{examples}\n\noptions:") if examples else text)
    raise SystemExit(0)


# -- configuration files -----------------------------------------------------------------------------------------------


def config_paths(argv: Sequence[str]) -> list[Path]:
    """The files that ``--config`` names."""
    words = [word for item in argv for word in (item.split("=", 1) if item.startswith("--config=") else [item])]
    return [Path(value) for name, value in itertools.pairwise(words) if name == "--config"]


def read_config(paths: Sequence[Path], keys: Collection[str] = ()) -> Fields:
    """The content of configuration files and of those that they build on; later files override earlier ones.

    `keys` are the `known_keys` of the settings.

    Raises:
        UserError: A file that is missing, is not valid YAML, or builds on itself.
    """
    files = (_read_file(path, keys) for path in paths)
    return functools.reduce(lambda below, above: merge(below, above, keys), files, {})


def _read_file(path: Path, keys: Collection[str], above: tuple[Path, ...] = ()) -> Fields:
    places = path, PACKAGE / path, PACKAGE / "configs" / path
    if (path := next(filter(Path.is_file, places), PACKAGE)) is PACKAGE:
        names = ", ".join(sorted(os.listdir(PACKAGE / "configs")))
        raise UserError(f"{Path.cwd()} has no configuration file {str(places[0])!r}; the package has {names}")
    try:
        content = read_yaml("".join(text_lines(path))) or {}
    except ValueError as error:
        raise UserError(f"{path} is not valid YAML: {error}") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} holds a {type(content).__name__}, expected one 'key: value' a line")
    base, above = content.pop("base", None), (*above, path.resolve())
    if base is None:
        return content
    below = path.parent / str(base)
    if below.resolve() in above:
        raise UserError(f"{path}: 'base' is {base!r}, expected the path of another file, relative to this one")
    return merge(_read_file(below, keys, above), content, keys)


def merge(below: Fields, above: Fields, keys: Collection[str] = ()) -> Fields:
    """Two configurations as one: sections are merged key by key; any other value of `above` wins, as does ``{}``.

    So does a mapping of names to sections, which `keys` has.
    """
    sections = {k for k, v in above.items() if v and isinstance(v, dict) and f"{k}.{NAME}" not in keys}
    both = {k: merge(below[k], v) if k in sections and isinstance(below.get(k), dict) else v for k, v in above.items()}
    return below | both


# -- keys and options --------------------------------------------------------------------------------------------------


def _types(hint: Any) -> Iterator[Any]:
    """A type and those in it, such as list[C] | None, list[C], C, None."""
    yield hint
    for inner in typing.get_args(hint):
        yield from _types(inner)


@functools.cache
def known_keys(settings_class: type, prefix: str = "") -> Fields:
    """Dotted names and types of all fields, those of sections included; `NAME` stands for the names of a mapping."""
    keys = {}
    hints = typing.get_type_hints(settings_class)
    for name in (field.name for field in dataclasses.fields(settings_class) if field.init):
        keys[prefix + name] = hints[name]
        sections: Iterator[Any] = filter(dataclasses.is_dataclass, _types(hints[name]))
        for section in sections:
            place = f"{prefix}{name}{f'.{NAME}' * (typing.get_origin(hints[name]) is dict)}"
            keys |= {place: section} | known_keys(section, f"{place}.")
    return keys


def _as_known(name: str, keys: Collection[str]) -> str:
    """The dotted name of a setting as `known_keys` has it."""
    section, *rest = name.split(".")
    return ".".join([section, NAME, *rest[1:]]) if rest and f"{section}.{NAME}" in keys else name


def _is_section(name: str, keys: Collection[str]) -> bool:
    return any(other.startswith(f"{name}.") for other in keys)


def _check_keys(content: Fields, keys: Fields, prefix: str, source: str) -> None:
    """Refuse the first key of nested mappings that is not known, and a value in place of a section."""
    for key, value in content.items():
        shown = f"{prefix}{key}"
        name = _as_known(shown, keys)
        if name not in keys:
            raise UserError(f"{source}: unknown key '{shown}'; {_nearest(shown, keys)}")
        if _is_section(name, keys):
            if isinstance(value, dict):
                _check_keys(value, keys, f"{shown}.", source)
            elif value and f"{name}.{NAME}" in keys:
                raise UserError(f"{source}: '{shown}' is {value!r}, expected sections by name, as in {{{NAME}: {{}}}}")
            elif value:  # null and false turn a section off where its type allows them
                raise UserError(f"{source}: '{shown}' is {value!r}, expected a section of 'key: value' lines")


def _put(content: Fields, key: str, value: Any, keys: Fields) -> None:
    """Set the value of a dotted key, in a section that is made if need be, but for names that a mapping lacks."""
    *sections, name = key.split(".")
    if f"{sections[0] if sections else ''}.{NAME}" in keys and len(sections) > 1:
        choose(f"name in --{key}", sections[1], content.get(sections[0]) or {})
    for section in sections:
        if not isinstance(content.get(section), dict):
            content[section] = {}
        content = content[section]
    content[name] = value


def _nearest(key: str, keys: Collection[str]) -> str:
    """The known key that looks most like `key`."""
    close = difflib.get_close_matches(key, keys, n=1, cutoff=0.5)
    return f"the nearest known key is '{close[0]}'" if close else f"known keys are {', '.join(list(keys)[:40])}"


def read_options(argv: Sequence[str], keys: Fields, prog: str) -> Fields:
    """The values of the options but ``--config`` by dotted key, as texts and lists of texts.

    Raises:
        UserError: an option without a value or with several, or that is not among `keys`.
    """
    groups: list[tuple[str, list[str]]] = []  # options with their values
    for word in (whole(word, "the command line") for word in argv):
        if re.match("--[^-\\s]", word) or not groups:
            option, equals, text = word.partition("=")
            groups.append((option, [text] if equals else []))
        else:
            groups[-1][1].append(word)
    options = Fields()
    for option, texts in groups:
        key = option.lstrip("-").replace("-", "_")
        if key.startswith("no_") and keys.get(key[3:]) in SWITCHES:
            key, texts = key[3:], ["false", *texts]
        section, *rest = option[2:].split(".")
        if f"{section}.{NAME}" in keys and rest:  # whose names may have hyphens
            key = ".".join([section, rest[0], *key.split(".")[2:]])
        name = _as_known(key, keys)
        if not option.startswith("--") or name not in {*keys, "config"}:
            raise UserError(f"unknown option {option!r}; {_nearest(key, keys)}. `{prog} --help` lists them all")
        if not texts and keys.get(name) in SWITCHES:
            texts = ["true"]
        is_list = any(typing.get_origin(hint) is list for hint in _types(keys.get(name)))
        if not texts or (len(texts) > 1 and not is_list):
            raise UserError(f"{option} has the values {texts}, expected one; `{prog} --help` explains it")
        joined, choices = " ".join(texts), {*typing.get_args(keys.get(name)), type(None)}
        single = len(choices) > 2 and len(texts) == 1 and "," not in joined  # of a number or a list it is the number
        if _is_section(name, keys):
            options[key] = read_yaml(joined)
        elif not is_list or single or (key not in PROSE and re.fullmatch(r"null|\[.*\]|\{.*\}", joined, re.DOTALL)):
            options[key] = joined
        else:
            parts = texts if key in PROSE else [part.strip() for text in texts for part in text.split(",")]
            options[key] = [*options.get(key, []), *filter(None, parts)]
    options.pop("config", None)
    return options


def take_flag(argv: list[str], flag: str) -> bool:
    """Remove a switch that is no settings key, such as ``--dry-run``; returns whether it was there."""
    there = flag in argv
    argv[:] = [item for item in argv if item != flag]
    return there


# -- running -----------------------------------------------------------------------------------------------------------

NEXT = "choose another output folder, then run the same command again"


STOPPED = "stopped; a training continues if the same command is run again"


def _interrupted(number: int, _: object) -> None:
    """Ctrl-C or SIGTERM; in the import of a library an exception would come out as another or abort the process."""
    specs = (getattr(sys.modules.get(name), "__spec__", None) for name in ("numpy", "torch"))
    if any(getattr(spec, "_initializing", False) for spec in specs):
        os.write(2, f"{STOPPED}\n".encode())
        os._exit(128 + number)
    raise KeyboardInterrupt(number)


def run_main(function: Callable[[], object]) -> int:
    """Run a command; an error that the user can correct, an interrupt or a full disk is reported in one line.

    Returns:
        0 on success, 2 after a `UserError` or where files cannot be written, 130 after Ctrl-C, 143 after SIGTERM.
        Other exceptions pass through.
    """
    numbers = [signal.SIGTERM]
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # a shell's background jobs ignore it
        numbers.append(signal.SIGINT)
    before, form = {number: signal.signal(number, _interrupted) for number in numbers}, warnings.formatwarning
    warnings.formatwarning = lambda message, category, *_, **__: f"{category.__name__}: {message}\n"
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a locale without a character costs that character, not the run
    try:
        function()
        sys.stdout.flush()
        return 0
    except UserError as error:
        line, status = f"error: {error}", 2
    except SystemExit as error:  # after --help
        return int(error.code or 0)
    except KeyboardInterrupt as error:
        line, status = STOPPED, 128 + (*error.args, signal.SIGINT)[0]
    except BrokenPipeError:  # `... | head` closed the pipe
        _close_stdout()
        return 0
    except Exception as error:
        if isinstance(error, ImportError) and Path(error.path or "/").parent == Path.cwd():
            line = f"{error}: rename this file, which hides a module, or use the command draftsmith"
        elif (why := writing_error(error)) is None:
            raise
        else:
            try:
                sys.stdout.flush()
            except OSError:  # standard output itself cannot be written
                _close_stdout()
            file = why.filename2 or why.filename or "a file"
            room = "free some space (`df -h .`, `ulimit -f`) or " * (why.errno in FULL or not why.errno)
            line = f"{file} cannot be written{f': {why.strerror}' * bool(why.errno)}; {room}{NEXT}"
        line, status = f"error: {line}", 2
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        warnings.formatwarning = form
    print(line, file=sys.stderr, flush=True)
    return status


def check_writable(folder: str | Path) -> Path:
    """Refuse a folder that results cannot be written to, before hours are spent on them; it is not made yet.

    Raises:
        UserError: it cannot be made, or no file can be made in it.
    """
    place = Path(folder).absolute()
    try:
        with tempfile.TemporaryFile(dir=next(path for path in (place, *place.parents) if path.exists())):
            return Path(folder)
    except OSError as error:
        raise UserError(f"output {str(folder)!r}: {error.strerror}; choose another output folder") from error


def _close_stdout() -> None:
    """Discard what is still buffered, so that the interpreter does not fail on it at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
