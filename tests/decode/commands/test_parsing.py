"""Settings from YAML files and the command line, errors by name, and how commands end."""

import errno
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest

from decode.commands.parsing import merge, parse, run_main
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
    extra: list[Inner] = field(default_factory=list)
    """More optimisers."""
    depth: int | None = None
    """Layers; null chooses."""
    sizes: list[int] = field(default_factory=list)
    """Sizes to try."""
    second: Inner | None = None
    """Another optimiser, if any."""


def read(tmp_path: Path, text: str, *overrides: str, foreign: tuple[str, ...] = ()) -> Outer:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    return parse(Outer, ["--config", str(path), *overrides], prog="prog", foreign=foreign)


def test_the_command_line_overrides_files_and_later_files_override_earlier_ones(tmp_path: Path) -> None:
    got = read(tmp_path, "name: a\ninner: {rate: 0.5, kind: sgd}\n", "--inner.rate", "0.25", "--depth=3")
    assert got == Outer(name="a", inner=Inner(rate=0.25, kind="sgd"), depth=3)
    (tmp_path / "d.yaml").write_text("inner: {kind: sgd}\n")
    got = read(tmp_path, "inner: {rate: 0.5}\n", f"--config={tmp_path / 'd.yaml'}")
    assert got.inner == Inner(rate=0.5, kind="sgd")
    assert parse(Outer, [], prog="prog") == read(tmp_path, "") == Outer()
    below = {"data": {"template_args": {"enable_thinking": False}, "limit": 3}}
    assert merge(below, {"data": {"template_args": {}}}) == {"data": {"template_args": {}, "limit": 3}}


def test_one_key_of_a_section_that_may_be_null_is_overridden(tmp_path: Path) -> None:
    file = "second: {rate: 0.5, kind: sgd}\n"
    assert read(tmp_path, file, "--second.rate", "1e-3").second == Inner(rate=1e-3, kind="sgd")
    assert read(tmp_path, "second: null\n", "--second.kind=sgd").second == Inner(kind="sgd")
    assert read(tmp_path, file, "--second", "null").second is None
    assert parse(Outer, ["--second.rate", "2"]).second == Inner(rate=2.0)
    with pytest.raises(UserError, match=r"unknown option '--second.rat'; the nearest known key is 'second\.rate'"):
        read(tmp_path, file, "--second.rat", "1")


@pytest.mark.parametrize(
    "typed", [["--sizes", "4,8"], ["--sizes=4,8"], ["--sizes", "4", "8"], ["--sizes", "[4, 8]"], ["--sizes=[4,8]"]]
)
def test_a_list_is_typed_with_commas_spaces_or_brackets(tmp_path: Path, typed: list[str]) -> None:
    assert read(tmp_path, "sizes: [1]", *typed, "--name", "b") == Outer(name="b", sizes=[4, 8])
    got = read(tmp_path, "extra: [{rate: 1.0}, {kind: sgd}]", *typed)
    assert got.extra == [Inner(rate=1.0), Inner(kind="sgd")]
    got = read(tmp_path, "", "--extra", "[{rate: 2.0, kind: sgd}, {rate: 1.0}]", *typed)
    assert got.extra == [Inner(2.0, "sgd"), Inner(rate=1.0)]


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("innner: {rate: 1}", "unknown key 'innner'; the nearest known key is 'inner'"),
        ("inner: {rat: 1}", "unknown key 'inner.rat'; the nearest known key is 'inner.rate'"),
        ("rate: 1.0", "unknown key 'rate'; the nearest known key is 'inner.rate'"),
        ("extra: [{rate: 1.0}, {knd: sgd}]", "unknown key 'extra.knd'; the nearest known key is 'extra.kind'"),
        ("bench: {anything: 1}", "unknown key 'bench'; known keys are name, inner"),
    ],
)
def test_an_unknown_key_names_file_key_and_nearest(tmp_path: Path, text: str, wanted: str) -> None:
    with pytest.raises(UserError) as caught:
        read(tmp_path, text)
    assert str(caught.value).startswith(f"{tmp_path / 'c.yaml'}: {wanted}")
    assert read(tmp_path, "bench: {anything: 1}\nname: a", foreign=("bench",)).name == "a"


@pytest.mark.parametrize(
    ("text", "overrides", "wanted"),
    [
        ("inner: {rate: fast}", (), r"c\.yaml: .*inner\.rate.* fast"),
        ("inner: {kind: lion}", (), r"c\.yaml: .*inner\.kind.*'adam', 'sgd'.* lion"),
        ("inner: 3", (), r"c\.yaml: 'inner' is 3, expected a section"),
        ("inner: {rate: -1}", (), r"inner.rate is -1.0, wanted a number above 0"),
        ("depth: deep", (), r"c\.yaml: .*depth.*'int'.* deep"),
        ("", ("--inner.rate", "fast"), r"the command line: .*inner\.rate.* fast"),
        ("", ("--depth",), r"--depth needs a value"),
        ("", ("--config",), r"--config needs a value"),
        ("", ("--config", "no.yaml"), r"no configuration file 'no.yaml'; these exist: configs/"),
        ("base: c.yaml", (), r"'base' is 'c.yaml', expected the path of another file"),
        ("", ("stray",), r"unexpected argument 'stray'"),
        ("a: [1", (), r"is not valid YAML"),
    ],
)
def test_wrong_values_give_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, overrides: tuple[str, ...], wanted: str
) -> None:
    monkeypatch.chdir(ROOT)
    with pytest.raises(UserError, match=wanted) as caught:
        read(tmp_path, text, *overrides)
    assert "\n" not in str(caught.value)


def test_away_from_the_repository_a_missing_file_says_where_configurations_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"'configs/a.yaml'; copy one of the repository's folder configs to /"):
        read(tmp_path, "", "--config", "configs/a.yaml")


def test_keys_with_a_common_prefix_are_a_section_of_the_help(capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("decode.commands.parsing.HELP_LINES", 5)
    for asked, there, missing in (
        ([], ["  --depth             Layers\n", "  inner               The optimiser\n"], ["--inner.rate"]),
        (["options"], ["Layers; null chooses. (type: int | null, default: null)"], ["--inner.rate"]),
        (["inner"], ["--inner.rate RATE"], ["--depth"]),
        (["all"], ["--inner.rate RATE", "--depth DEPTH"], []),
    ):
        with pytest.raises(SystemExit):
            parse(Outer, ["--help", *asked], prog="prog", examples="  prog --depth 3")
        shown, _, examples = capsys.readouterr().out.partition("examples:")
        assert "prog --depth 3" in examples
        assert all(text in shown for text in there), shown
        assert not any(text in shown for text in missing), shown


WRAPPED = RuntimeError("wrapped")
WRAPPED.__cause__ = OSError(errno.ENOSPC, "No space left on device", "/x/y")


@pytest.mark.parametrize(
    ("error", "status", "words"),
    [
        (UserError("mend me"), 2, "error: mend me"),
        (KeyboardInterrupt(), 130, "stopped; a training continues if the same command is run again"),
        (WRAPPED, 2, "error: /x/y cannot be written: No space left on device; free some space"),
    ],
)
def test_foreseeable_ends_give_one_line(error: BaseException, status: int, words: str, capsys) -> None:
    def fail() -> None:
        raise error

    assert run_main(fail) == status
    shown = capsys.readouterr().err
    assert words in shown
    assert shown.count("\n") == 1


def test_other_errors_pass_through() -> None:
    with pytest.raises(ConnectionResetError):
        run_main(lambda: (_ for _ in ()).throw(ConnectionResetError(errno.ECONNRESET, "reset")))


LIBRARIES = {
    "python": "open(path, 'w').write('x' * 9000)",
    "torch": "import torch; torch.save({'w': torch.zeros(9000)}, path)",
    "safetensors": "import torch; from safetensors.torch import save_file; save_file({'w': torch.zeros(9000)}, path)",
}


def test_a_file_that_cannot_be_written_is_one_line_whichever_library_writes(tmp_path: Path) -> None:
    code = f"""
import resource
from decode.commands.parsing import run_main
resource.setrlimit(resource.RLIMIT_FSIZE, (2000, resource.RLIM_INFINITY))
for library, write in {LIBRARIES!r}.items():
    path = {str(tmp_path)!r} + "/" + library
    print(run_main(lambda: exec(write, {{"path": path}})))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, text=True, capture_output=True)
    assert done.stdout.split() == ["2"] * len(LIBRARIES), done.stderr
    lines = done.stderr.splitlines()
    assert len(lines) == len(LIBRARIES)
    assert all(line.startswith("error: ") and "ulimit -f" in line for line in lines)


def test_sigterm_ends_a_command_as_ctrl_c_does_and_removes_what_is_temporary(tmp_path: Path) -> None:
    code = f"""
import os, signal, sys, tempfile
from decode.commands.parsing import run_main
def work():
    with tempfile.TemporaryDirectory(dir={str(tmp_path)!r}):
        os.kill(os.getpid(), signal.SIGTERM)
        signal.pause()
sys.exit(run_main(work))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, text=True, capture_output=True, timeout=60)
    assert (done.returncode, done.stderr) == (130, "stopped; a training continues if the same command is run again\n")
    assert not list(tmp_path.iterdir())
