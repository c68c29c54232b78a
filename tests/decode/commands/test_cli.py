"""Settings from YAML files and the command line, errors by name, and how commands end."""

import errno
import os
import re
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest

from decode.commands.cli import STOPPED, merge, parse, run_main
from decode.errors import UserError

ROOT = Path(__file__).parents[3]


@dataclass
class Inner:
    """An inner section."""

    rate: float = 0.1
    """Step size. Larger is faster and less stable."""
    kind: Literal["adam", "sgd"] = "adam"
    """Which optimiser."""

    def __post_init__(self) -> None:
        if self.rate <= 0:
            raise UserError(f"inner.rate is {self.rate}, wanted a number above 0")


@dataclass
class Outer:
    """All settings."""

    name: str = "run"
    """Folder of the run."""
    inner: Inner = field(default_factory=Inner)
    """The optimiser."""
    depth_of_layers: int | None = None
    """Layers; null chooses."""
    sizes: list[int] = field(default_factory=list)
    """Sizes to try."""
    second: Inner | None = None
    """Another optimiser, if any."""
    third: Inner | Literal[False] = field(default_factory=Inner)
    """A section that false turns off."""
    stop: list[str] = field(default_factory=list)
    """Texts."""
    link: str | None = "a"
    """A name."""
    any: dict[str, Any] = field(default_factory=dict)
    """Plain data."""
    loud: bool = False
    """A switch."""
    named: dict[str, Inner] = field(default_factory=dict)
    """Optimisers by name."""


def read(tmp_path: Path, text: str, *overrides: str, foreign: tuple[str, ...] = ()) -> Outer:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    return parse(Outer, ["--config", str(path), *overrides], prog="prog", foreign=foreign)


def test_the_command_line_overrides_files_and_later_files_override_earlier_ones(tmp_path: Path) -> None:
    got = read(tmp_path, "name: a\ninner: {rate: 0.5, kind: sgd}\n", "--inner.rate", "0.25", "--depth-of-layers=3")
    assert got == Outer(name="a", inner=Inner(rate=0.25, kind="sgd"), depth_of_layers=3)
    (tmp_path / "d.yaml").write_text("inner: {kind: sgd}\n")
    got = read(tmp_path, "inner: {rate: 0.5}\n", f"--config={tmp_path / 'd.yaml'}")
    assert got.inner == Inner(rate=0.5, kind="sgd")
    assert parse(Outer, [], prog="prog") == read(tmp_path, "") == Outer()
    assert merge({"a": {"b": {"c": 1}, "d": 3}}, {"a": {"b": {}}}) == {"a": {"b": {}, "d": 3}}


def test_one_key_of_a_named_section_is_overridden_and_a_file_replaces_all_of_them(tmp_path: Path) -> None:
    file = "named: {a-b: {rate: 0.5}, c: {kind: sgd}}\n"
    got = read(tmp_path, file, "--named.a-b.kind", "sgd", "--named.c.rate=1e-3")
    assert got.named == {"a-b": Inner(0.5, "sgd"), "c": Inner(1e-3, "sgd")}
    (tmp_path / "d.yaml").write_text("base: c.yaml\nnamed: {d: {}}\n")
    assert parse(Outer, ["--config", str(tmp_path / "d.yaml")], prog="prog").named == {"d": Inner()}


def test_one_key_of_a_section_that_may_be_off_is_overridden(tmp_path: Path) -> None:
    file = "second: {rate: 0.5, kind: sgd}\nthird: {kind: sgd}\n"
    assert read(tmp_path, file, "--second.rate", "1e-3").second == Inner(rate=1e-3, kind="sgd")
    assert read(tmp_path, file, "--third.rate", "3").third == Inner(rate=3.0, kind="sgd")
    assert read(tmp_path, "second: null\n", "--second.kind=sgd").second == Inner(kind="sgd")
    assert read(tmp_path, file, "--second", "null", "--third", "false") == Outer(second=None, third=False)
    assert read(tmp_path, "third: false").third is False
    with pytest.raises(UserError, match=r"unknown option '--second.rat'; the nearest known key is 'second\.rate'"):
        read(tmp_path, file, "--second.rat", "1")


@pytest.mark.parametrize(
    "typed", [["--sizes", "4,8"], ["--sizes=4,8"], ["--sizes", "4", "8"], ["--sizes", "[4, 8]"], ["--sizes=[4,8]"]]
)
def test_a_list_is_typed_with_commas_spaces_or_brackets(tmp_path: Path, typed: list[str]) -> None:
    assert read(tmp_path, "sizes: [1]", *typed, "--name", "b") == Outer(name="b", sizes=[4, 8])
    got = read(tmp_path, "", "--named", "{a-b: {rate: 2.0, kind: sgd}, c: {}}", "--named.a-b.rate", "3", *typed)
    assert got.named == {"a-b": Inner(3.0, "sgd"), "c": Inner()}


def test_switches_need_no_value_and_texts_may_hold_commas_and_hyphens(tmp_path: Path) -> None:
    assert read(tmp_path, "", "--loud", "--name=--really, yes").loud
    assert not read(tmp_path, "loud: true", "--no-loud").loud
    assert not read(tmp_path, "loud: true", "--loud", "false").loud
    assert read(tmp_path, "", "--stop", "a, b", "\n\n", "--stop", "c").stop == ["a, b", "\n\n", "c"]
    assert read(tmp_path, "", "--stop", "[INST]", "---", "--name", "~").stop == ["[INST]", "---"]


@pytest.mark.parametrize("written", ["1.10", "007", "2020-01-01", "yes", "1e3", "# a", "~", "[INST]", "{a: 1}"])
def test_a_text_that_looks_like_another_value_stays_a_text(tmp_path: Path, written: str) -> None:
    got = read(tmp_path, f"name: '{written}'\nlink: '{written}'\nstop: ['{written}']\nany: {{a: [1e6, null]}}\n")
    assert (got.name, got.link, got.stop, got.any) == (written, written, [written], {"a": [1e6, None]})
    got = read(tmp_path, "", "--name", written, "--link", written, "--stop", written)
    assert (got.name, got.link, got.stop) == (written, written, [written])
    assert read(tmp_path, "", "--link", "null").link is None


@pytest.mark.parametrize(
    ("text", "overrides", "wanted"),
    [
        ("inner: {rat: 1}", (), r"c\.yaml: unknown key 'inner.rat'; the nearest known key is 'inner.rate'"),
        ("rate: 1.0", (), r"c\.yaml: unknown key 'rate'; the nearest known key is '\w+.rate'"),
        ("named: {b: {knd: a}}", (), r"c\.yaml: unknown key 'named.b.knd'; the nearest .* 'named.NAME.kind'"),
        ("named: [{rate: 1}]", (), r"c\.yaml: 'named' is \[{'rate': 1}\], expected sections by name"),
        ("named: {abc: {}}", ("--named.abd.rate", "1"), r"unknown name in --named.abd.rate 'abd'; did you mean 'abc'"),
        ("named: {c: {}}", ("--named.c.rat", "1"), r"unknown option '--named.c.rat'; .* is 'named.NAME.rate'"),
        ("bench: {anything: 1}", (), r"c\.yaml: unknown key 'bench'; known keys are name, inner"),
        ("inner: {kind: sdg}", (), r"c\.yaml: .*inner\.kind.* Expected a .*Literal\['adam', 'sgd'\]. Got value: sdg"),
        ("named: {a: {kind: adm}}", (), r"c\.yaml: .*named.*Literal\['adam', 'sgd'\]. Got value: adm"),
        ("name: 007", (), r"c\.yaml: .*name.*Expected a <class 'str'>. Got value: 7"),
        ("", ("--second.kind", "adm"), r"command line: .*second.*Literal\['adam', 'sgd'\]. Got value: adm"),
        ("inner: 3", (), r"c\.yaml: 'inner' is 3, expected a section"),
        ("inner: {rate: -1}", (), r"inner.rate is -1.0, wanted a number above 0"),
        ("", ("--inner.rate", "fast"), r"the command line: .*inner\.rate.* fast"),
        ("", ("--name",), r"--name has the values \[\], expected one; `prog --help`"),
        ("", ("--config", "no.yaml"), r"no configuration file 'no.yaml'; the package has ablation-heads.yaml, abl"),
        ("base: c.yaml", (), r"'base' is 'c.yaml', expected the path of another file"),
        ("", ("stray",), r"--config has the values .*'stray'\], expected one"),
        ("a: [1", (), r"is not valid YAML"),
    ],
)
def test_mistakes_are_told_in_one_line(tmp_path: Path, text: str, overrides: tuple[str, ...], wanted: str) -> None:
    with pytest.raises(UserError, match=wanted) as caught:
        read(tmp_path, text, *overrides)
    assert "\n" not in str(caught.value)
    assert read(tmp_path, "bench: {anything: 1}\nname: a", foreign=("bench",)).name == "a"


def test_help_explains_every_key_beside_wrong_arguments_too(capsys) -> None:
    keys = ["--depth-of-layers DEPTH", "--inner.rate RATE", "--named.NAME.rate RATE", "Layers; null chooses"]
    sections = ["Explain one section: inner,", "\n\nnamed: ", "examples:\n  prog"]
    for asked, texts in (("--help", keys + sections), ("--third.help", ["third: ", "--third.rate RATE", "Larger is"])):
        with pytest.raises(SystemExit):
            parse(Outer, ["--nonsense", asked], "prog", examples="  prog --loud")
        shown = capsys.readouterr().out
        assert all(text in shown for text in texts), shown


WRAPPED = RuntimeError("wrapped")
WRAPPED.__cause__ = OSError(errno.ENOSPC, "No space left on device", "/x/y")


@pytest.mark.parametrize(
    ("error", "status", "words"),
    [
        (UserError("mend me"), 2, "error: mend me"),
        (KeyboardInterrupt(), 130, "stopped; a training continues if the same command is run again"),
        (WRAPPED, 2, "error: /x/y cannot be written: No space left on device; free some space"),
        (OSError(errno.EOPNOTSUPP, "no links", "/x"), 2, "error: /x cannot be written: no links; choose another"),
    ],
)
def test_foreseeable_ends_give_one_line_and_others_pass(error: BaseException, status: int, words: str, capsys) -> None:
    def fail(with_error: BaseException) -> None:
        raise with_error

    assert run_main(lambda: fail(error)) == status
    shown = capsys.readouterr().err
    assert words in shown
    assert shown.count("\n") == 1
    with pytest.raises(ConnectionResetError):
        run_main(lambda: fail(ConnectionResetError(errno.ECONNRESET, "reset")))


def started(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """A Python process that runs this, with further variables of the environment."""
    options = {"cwd": ROOT, "env": {**os.environ, **variables}, "text": True, "capture_output": True, "timeout": 60}
    return subprocess.run([sys.executable, "-c", code], **options)


def test_a_file_that_cannot_be_written_is_one_line_whichever_library_writes(tmp_path: Path) -> None:
    writers = [
        "open(path, 'w').write('x' * 9000)",
        "import torch; torch.save({'w': torch.zeros(9000)}, path)",
        "import torch; from safetensors.torch import save_file; save_file({'w': torch.zeros(9000)}, path)",
    ]
    code = f"""
import resource
from decode.commands.cli import run_main
resource.setrlimit(resource.RLIMIT_FSIZE, (2000, resource.RLIM_INFINITY))
for number, write in enumerate({writers!r}):
    print(run_main(lambda: exec(write, {{"path": {str(tmp_path)!r} + f"/{{number}}"}})))
"""
    done = started(code)
    assert done.stdout.split() == ["2"] * len(writers), done.stderr
    lines = done.stderr.splitlines()
    assert len(lines) == len(writers)
    assert all(line.startswith("error: ") and "ulimit -f" in line for line in lines)


def test_sigterm_ends_a_command_as_ctrl_c_does_and_what_standard_output_cannot_show_is_replaced(tmp_path: Path) -> None:
    code = f"""
import os, signal, sys, tempfile
from decode.commands.cli import run_main
def work():
    print("α is 1")
    with tempfile.TemporaryDirectory(dir={str(tmp_path)!r}):
        os.kill(os.getpid(), signal.SIGTERM)
        signal.pause()
sys.exit(run_main(work))
"""
    done = started(code, PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stdout, done.stderr) == (143, "? is 1\n", STOPPED + "\n")
    assert not list(tmp_path.iterdir())


def test_an_interrupt_while_a_library_is_imported_ends_the_command_in_one_line(tmp_path: Path) -> None:
    body = "import os, signal\ntry:\n  os.kill(os.getpid(), signal.SIGINT)\nexcept KeyboardInterrupt:\n  raise OSError"
    (tmp_path / "numpy.py").write_text(body)  # as libraries turn the one into the other
    code = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); from decode.commands import cli; "
    code += f"sys.path.insert(0, {str(tmp_path)!r}); sys.exit(cli.run_main(lambda: __import__('numpy')))"
    ended = started(code)
    assert (ended.returncode, ended.stderr) == (130, STOPPED + "\n")


def test_a_file_of_the_working_directory_that_hides_a_module_is_named(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    Path("hidden_by_a_file.py").touch()
    monkeypatch.syspath_prepend(tmp_path)

    def command() -> None:
        from hidden_by_a_file import Dataset  # noqa: F401  # type: ignore[import-not-found]

    assert run_main(command) == 2
    assert re.search(r"hidden_by_a_file.py\): rename this file.*draftsmith", capsys.readouterr().err)
    monkeypatch.chdir(tmp_path.parent)
    with pytest.raises(ImportError):
        run_main(command)
