"""Settings of every command: dataclasses, read from YAML files and overridden on the command line.

jsonargparse converts and checks the values, and its help shows the texts below each attribute. A setting that is text
takes what was written. One YAML file serves several commands, so that a command skips the sections of the others; any
other unknown key is an error that names the nearest known one. A file may build on another one: ``base: other.yaml``
(relative to itself) is read first.
"""

import dataclasses
import difflib
import functools
import io
import itertools
import os
import re
import signal
import sys
import tempfile
import typing
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import jsonargparse

from decode.errors import UserError
from decode.files import FULL, Fields, writing_error
from decode.incoming import read_yaml, text_lines, whole
from decode.options import check_choice, is_choice

Settings = TypeVar("Settings")

NAME = "NAME"
"""Stands for every name of a mapping from names to sections, among the dotted names of all settings."""
VERBATIM = {
    "stop", "input", "prompt", "system", "data.system", "data.chat_template", "data.prompt_template",
    "data.response_template", "data.prompts.openings",
}  # fmt: skip
"""Options that are prose: not split at commas, no lists, and null is a word. Other texts are names, and may be null."""
SWITCHES = (bool, bool | None)


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
    parser = _parser(kind, prog, description)
    if {"-h", "--help"} & set(argv):  # also beside arguments that are wrong
        text = re.sub(r", --\S+\+ \S+", "", parser.format_help())  # jsonargparse's options that extend a list
        text = re.sub(r"--[\w.]+", lambda name: name[0].replace("_", "-"), text)
        print(text + (f"\nexamples:\n{examples}" if examples else ""))
        raise SystemExit(0)
    for word in argv:
        if word.startswith("--") and word.endswith(".help"):  # of a section
            sys.argv[0] = f"{prog} {word}"  # which jsonargparse names
            parser.parse_args(["--" + word[2:].replace("-", "_")])
    paths, known = config_paths(argv), known_keys(kind)
    given = _read_options(known, argv, prog)
    content = read_config(paths, text_keys(known, f"{section}." if section else ""), known)
    source = " and ".join([*map(str, paths), *(["the command line"] if given else [])])
    if section is not None:
        if near := difflib.get_close_matches(section, content.keys() - {section}, 1, 0.75):
            raise UserError(f"{source}: unknown key '{near[0]}'; the nearest known key is '{section}'")
        content, source = content.get(section) or {}, f"{source}, section {section}"
    content = {key: value for key, value in content.items() if key not in foreign}
    _check_keys(content, known, "", source)
    _check_keys(given, known, "", source)
    for key, value in given.items():
        _put(content, key, value, known)
    read = known.keys() - text_keys(known)  # numbers, switches and the like, in which jsonargparse reads texts too
    kinds = lambda name: str if as_known(name, known) in read else _Written  # noqa: E731
    content = _each_text(content, lambda text, name: kinds(name)(whole(text, f"the setting {name}")))
    try:
        settings = settings_class(**vars(parser.instantiate(parser.parse_object(content))))
        return _each_text(settings, lambda text, name: str(text))
    except UserError:
        raise
    except (jsonargparse.ArgumentError, ValueError, TypeError) as error:
        raise UserError(f"{source or prog}: {' '.join(str(error).split())}") from error


class _Written(str):
    """A text that stays as it is: jsonargparse reads plain strings as YAML, and no others."""


def _each_text(value: Any, change: Callable[[str, str], str], name: str = "") -> Any:
    """Plain data, or settings, with every text changed by a function of it and its dotted name."""
    if isinstance(value, str):
        return change(value, name)
    if isinstance(value, list):
        return [_each_text(item, change, name) for item in value]
    fields = vars(value) if dataclasses.is_dataclass(value) else value if isinstance(value, dict) else {}
    for key, item in fields.items():
        fields[key] = _each_text(item, change, f"{name}.{key}".removeprefix("."))
    return value


@functools.cache
def _parser(settings_class: type, prog: str, description: str) -> jsonargparse.ArgumentParser:
    jsonargparse.set_parsing_settings(docstring_parse_attribute_docstrings=True)
    parser = jsonargparse.ArgumentParser(
        prog=prog,
        usage=f"{prog} [options]",
        description=f"{description} --config FILE reads options from YAML and may be repeated.",
        exit_on_error=False,
        default_env=False,
    )
    parser.add_class_arguments(settings_class, None)
    return parser


# -- configuration files -----------------------------------------------------------------------------------------------


def config_paths(argv: Sequence[str]) -> list[Path]:
    """The files that ``--config`` names."""
    words = [word for item in argv for word in (item.split("=", 1) if item.startswith("--config=") else [item])]
    return [Path(value) for name, value in itertools.pairwise(words) if name == "--config"]


def read_config(paths: Sequence[Path], texts: Collection[str] = (), known: Collection[str] = ()) -> Fields:
    """The content of configuration files and of those that they build on; later files override earlier ones.

    Values of the keys `texts` are read as they are written. `known` are the names of all settings.

    Raises:
        UserError: A file that is missing, is not valid YAML, or builds on itself.
    """
    files = (_read_file(path, {*texts, "base"}, known) for path in paths)
    return functools.reduce(lambda below, above: merge(below, above, known), files, {})


def _read_file(path: Path, texts: Collection[str], known: Collection[str], above: tuple[Path, ...] = ()) -> Fields:
    if not path.is_file():
        raise UserError(f"{Path.cwd()} has no configuration file {str(path)!r}; the repository's configs/ has some")
    text = "".join(text_lines(path))
    try:
        content = read_yaml(text, texts, known=lambda name: as_known(name, known)) or {}
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
    return merge(_read_file(below, texts, known, above), content, known)


def merge(below: Fields, above: Fields, known: Collection[str] = ()) -> Fields:
    """Two configurations as one: sections are merged key by key; any other value of `above` wins, as does ``{}``.

    So does a mapping of names to sections, of which there is one where `known` says so.
    """
    both = {
        k: merge(below[k], v)
        if v and isinstance(v, dict) and isinstance(below.get(k), dict) and f"{k}.{NAME}" not in known
        else v
        for k, v in above.items()
    }
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
            place = f"{prefix}{name}"
            if typing.get_origin(hints[name]) is dict:
                keys[place := f"{place}.{NAME}"] = section
            keys |= known_keys(section, f"{place}.")
    return keys


def as_known(name: str, known: Collection[str]) -> str:
    """The dotted name of a setting as `known_keys` has it."""
    section, *rest = name.split(".")
    return ".".join([section, NAME, *rest[1:]]) if rest and f"{section}.{NAME}" in known else name


def text_keys(known: Fields, prefix: str = "") -> set[str]:
    """Dotted names of the settings that are texts, choices of texts, or lists or mappings of them."""

    def is_text(hint: Any) -> bool:
        leaves = (inner for inner in _types(hint) if not typing.get_args(inner) and inner is not type(None))
        return all(inner is str or isinstance(inner, str) for inner in leaves)

    return {prefix + key for key, hint in known.items() if is_text(hint)}


def _check_keys(content: Fields, known: Fields, prefix: str, source: str) -> None:
    """Refuse the first key of nested mappings that is not known, a value in place of a section, and unknown choices."""
    for key, value in content.items():
        shown = f"{prefix}{key}"
        name = as_known(shown, known)
        if name not in known:
            raise UserError(f"{source}: unknown key '{shown}'; {_nearest(shown, known)}")
        if any(other.startswith(f"{name}.") for other in known):
            if isinstance(value, dict):
                _check_keys(value, known, f"{shown}.", source)
            elif value and f"{name}.{NAME}" in known:
                raise UserError(
                    f"{source}: '{shown}' is {value!r}, expected names with a section each: {{{NAME}: {{}}}}"
                )
            elif value:  # null and false turn a section off where its type allows them
                raise UserError(f"{source}: '{shown}' is {value!r}, expected a section of 'key: value' lines")
        kinds = [kind for kind in _types(known[name]) if not typing.get_args(kind) or is_choice(kind)]
        choices = [choice for kind in filter(is_choice, kinds) for choice in typing.get_args(kind)]
        if choices and all(is_choice(kind) or kind in (*choices, bool, type(None)) for kind in kinds):
            choices += ["true", "false", "yes", "no"] * (bool in kinds)
            for item in (item for item in (value if isinstance(value, list) else [value]) if isinstance(item, str)):
                check_choice(f"{source}: {shown}", item, choices)


def _nearest(key: str, known: Collection[str]) -> str:
    """The known key that looks most like `key`."""
    close = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    return f"the nearest known key is '{close[0]}'" if close else f"known keys are {', '.join(list(known)[:40])}"


def _read_options(known: Fields, argv: Sequence[str], prog: str) -> Fields:
    """The options but ``--config``, by their dotted keys."""
    groups: list[tuple[str, list[str]]] = []  # options with their values
    for word in argv:
        if re.match("--[^-\\s]", word) or not groups:
            option, equals, text = word.partition("=")
            groups.append((option, [text] if equals else []))
        else:
            groups[-1][1].append(word)
    given: Fields = {}
    for option, texts in groups:
        key = option.lstrip("-").replace("-", "_")
        if key.startswith("no_") and known.get(key[3:]) in SWITCHES:
            key, texts = key[3:], ["false", *texts]
        if (parts := option[2:].split("."))[1:] and f"{parts[0]}.{NAME}" in known:  # whose names may have hyphens
            key = ".".join([*parts[:2], *key.split(".")[2:]])
        if not option.startswith("--") or as_known(key, known) not in {*known, "config"}:
            raise UserError(f"unknown option {option!r}; {_nearest(key, known)}. `{prog} --help` lists them all")
        if not texts and known.get(as_known(key, known)) in SWITCHES:
            texts = ["true"]
        is_list = any(typing.get_origin(inner) is list for inner in _types(known.get(as_known(key, known))))
        if not texts or (len(texts) > 1 and not is_list):
            raise UserError(f"{option} has the values {texts}, expected one; `{prog} --help` explains it")
        joined = " ".join(texts)
        if not is_list or (key not in VERBATIM and re.fullmatch(r"null|\[.*\]", joined, re.DOTALL)):
            given[key] = read_option(key, joined, known)
            continue
        if key not in VERBATIM:
            texts = [part.strip() for text in texts for part in text.split(",") if part.strip()]
        given[key] = [*(given.get(key) or []), *texts]
    given.pop("config", None)
    return given


def read_option(key: str, text: str, known: Fields) -> Any:
    """The value of an option: a text as it was written, but for the null of a name; all else as YAML."""
    key, texts = as_known(key, known), text_keys(known)
    hint = known.get(key)
    if key in texts and typing.get_origin(hint) not in (list, dict):
        return None if text == "null" and key not in VERBATIM and type(None) in typing.get_args(hint) else text
    try:
        return read_yaml(text, texts, key, lambda name: as_known(name, known))
    except ValueError:
        return text


def _put(content: Fields, key: str, value: Any, known: Fields) -> None:
    """Set a value of nested sections by its dotted key; a mapping has to have the name that is given there."""
    *sections, name = key.split(".")
    if as_known(key, known) != key and len(sections) > 1:
        check_choice(f"--{key}: the name", sections[1], list(content.get(sections[0]) or ()))
    for section in sections:
        if not isinstance(content.get(section), dict):
            content[section] = {}
        content = content[section]
    content[name] = value


def take_flag(argv: list[str], flag: str) -> bool:
    """Remove a switch that is no settings key, such as ``--dry-run``; returns whether it was there."""
    given = flag in argv
    argv[:] = [item for item in argv if item != flag]
    return given


# -- running -----------------------------------------------------------------------------------------------------------

NEXT = "choose another output folder, then run the same command again"


STOPPED = "stopped; a training continues if the same command is run again"


def _interrupted(*_: object) -> None:
    """Ctrl-C or SIGTERM; in the import of a library an exception would come out as another or abort the process."""
    specs = (getattr(sys.modules.get(name), "__spec__", None) for name in ("numpy", "torch"))
    if any(getattr(spec, "_initializing", False) for spec in specs):
        os.write(2, f"{STOPPED}\n".encode())
        os._exit(130)
    raise KeyboardInterrupt


def run_main(function: Callable[[], object]) -> int:
    """Run a command; an error that the user can correct, an interrupt or a full disk is reported in one line.

    Returns:
        0 on success, 2 after a `UserError` or where files cannot be written, 130 after Ctrl-C or SIGTERM. Other
        exceptions pass through.
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
    except KeyboardInterrupt:
        line, status = STOPPED, 130
    except BrokenPipeError:  # `... | head` closed the pipe
        _close_stdout()
        return 0
    except Exception as error:
        if (why := writing_error(error)) is None:
            raise
        try:
            sys.stdout.flush()
        except OSError:  # standard output itself cannot be written
            _close_stdout()
        reason = f"{why.filename2 or why.filename or 'a file'} cannot be written{f': {why.strerror}' * bool(why.errno)}"
        room = "free some space (`df -h .`, `ulimit -f`) or " * (why.errno in FULL or not why.errno)
        line, status = f"error: {reason}; {room}{NEXT}", 2
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
