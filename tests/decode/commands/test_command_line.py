"""Settings: YAML and command line to dataclasses, and the messages for what goes wrong."""

import errno
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest

from decode.commands.parsing import _typed_keys, parse, run_main, take_flag
from decode.errors import UserError


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


def read(tmp_path: Path, text: str, *overrides: str, foreign: set[str] | None = None) -> Outer:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    return parse(Outer, ["--config", str(path), *overrides], prog="prog", description="", foreign=foreign)


def test_file_overrides_defaults_and_command_line_overrides_the_file(tmp_path: Path) -> None:
    got = read(tmp_path, "name: a\ninner: {rate: 0.5, kind: sgd}\n", "--inner.rate", "0.25", "--depth=3")
    assert got == Outer(name="a", inner=Inner(rate=0.25, kind="sgd"), depth=3)


def test_a_later_file_overrides_an_earlier_one_key_by_key(tmp_path: Path) -> None:
    (tmp_path / "d.yaml").write_text("inner: {kind: sgd}\n")
    got = read(tmp_path, "inner: {rate: 0.5}\n", f"--config={tmp_path / 'd.yaml'}")
    assert got.inner == Inner(rate=0.5, kind="sgd")


def test_one_key_of_a_section_that_may_be_null_is_overridden(tmp_path: Path) -> None:
    file = "second: {rate: 0.5, kind: sgd}\n"
    assert read(tmp_path, file, "--second.rate", "1e-3").second == Inner(rate=1e-3, kind="sgd")
    assert read(tmp_path, "name: a\n", "--second.kind=sgd").second == Inner(kind="sgd")
    assert read(tmp_path, "second: null\n", "--second.kind=sgd").second == Inner(kind="sgd")
    assert read(tmp_path, file, "--second", "null").second is None
    assert parse(Outer, ["--second.rate", "2"]).second == Inner(rate=2.0)
    with pytest.raises(UserError, match=r"'second'.*'rate': 'fast'"):
        read(tmp_path, file, "--second.rate", "fast")
    with pytest.raises(UserError, match=r"the nearest known key is 'second\.rate'"):
        read(tmp_path, file, "--second.rat", "1")


def test_lists_of_sections_become_dataclasses(tmp_path: Path) -> None:
    assert read(tmp_path, "extra: [{rate: 2.0}, {kind: sgd}]").extra == [Inner(rate=2.0), Inner(kind="sgd")]


@pytest.mark.parametrize(
    "typed", [["--sizes", "4,8"], ["--sizes=4,8"], ["--sizes", "4", "8"], ["--sizes", "[4, 8]"], ["--sizes=[4,8]"]]
)
def test_a_list_is_typed_with_commas_spaces_or_brackets(tmp_path: Path, typed: list[str]) -> None:
    assert read(tmp_path, "", *typed, "--name", "b") == Outer(name="b", sizes=[4, 8])
    assert read(tmp_path, "", "--extra", "[{rate: 2.0}]", *typed).extra == [Inner(rate=2.0)]
    with pytest.raises(UserError, match="sizes"):
        read(tmp_path, "", "--sizes")


def test_no_arguments_give_the_defaults_and_an_empty_file_is_fine(tmp_path: Path) -> None:
    assert parse(Outer, [], prog="prog", description="") == Outer()
    assert read(tmp_path, "") == Outer()


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("innner: {rate: 1}", "unknown key 'innner'; the nearest known key is 'inner'"),
        ("inner: {rat: 1}", "unknown key 'inner.rat'; the nearest known key is 'inner.rate'"),
        ("rate: 1.0", "unknown key 'rate'; the nearest known key is 'inner.rate'"),
        ("extra: [{rate: 1.0}, {knd: sgd}]", "unknown key 'extra[1].knd'; the nearest known key is 'extra.kind'"),
        ("zzz: 1", "unknown key 'zzz'; known are name, inner"),
    ],
)
def test_an_unknown_key_names_file_key_and_nearest(tmp_path: Path, text: str, wanted: str) -> None:
    with pytest.raises(UserError) as caught:
        read(tmp_path, text)
    assert str(caught.value).startswith(f"{tmp_path / 'c.yaml'}: ")
    assert wanted in str(caught.value)


def test_an_unknown_option_names_the_nearest() -> None:
    with pytest.raises(UserError, match=r"unknown option '--inner.rat'; the nearest known key is 'inner.rate'"):
        parse(Outer, ["--inner.rat", "1"], prog="prog", description="")


def test_sections_of_other_commands_are_skipped_only_where_named(tmp_path: Path) -> None:
    assert read(tmp_path, "bench: {anything: 1}\nname: a", foreign={"bench"}).name == "a"
    with pytest.raises(UserError, match="unknown key 'bench'"):
        read(tmp_path, "bench: {anything: 1}")


@pytest.mark.parametrize(
    ("text", "overrides", "wanted"),
    [
        ("inner: {rate: fast}", (), r"c\.yaml: 'inner.rate': Expected a float"),
        ("inner: {kind: lion}", (), r"c\.yaml: 'inner.kind': Expected a Literal\['adam', 'sgd'\]. Got value: lion"),
        ("inner: 3", (), r"'inner' is 3, expected a section"),
        ("", ("--inner.rate", "fast"), r"the command line: 'inner.rate': Expected a float"),
        ("depth: deep", (), r"c\.yaml: 'depth': Expected a int. Got value: deep"),
        ("", ("--depth",), r"--depth needs a value"),
        ("", ("stray",), r"unexpected argument 'stray'"),
        ("- 1\n- 2", (), r"holds a list, expected one 'key: value' a line"),
        ("a: [1", (), r"is not valid YAML"),
    ],
)
def test_wrong_values_give_one_clear_line(tmp_path: Path, text: str, overrides: tuple[str, ...], wanted: str) -> None:
    with pytest.raises(UserError, match=wanted) as caught:
        read(tmp_path, text, *overrides)
    assert "\n" not in str(caught.value)


def test_what_a_section_refuses_itself_keeps_its_own_words(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"inner.rate is -1.0, wanted a number above 0"):
        read(tmp_path, "inner: {rate: -1}")


def test_a_missing_file_lists_the_configs_that_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "small.yaml").touch()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"no configuration file 'no.yaml'; these exist: configs/small.yaml"):
        parse(Outer, ["--config", "no.yaml"], prog="prog", description="")
    with pytest.raises(UserError, match=r"--config needs a file; these exist"):
        parse(Outer, ["--config"], prog="prog", description="")


def test_help_shows_every_key_with_its_docstring(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse(Outer, ["--bad", "--help"], prog="prog", description="What it does.")
    text = " ".join(capsys.readouterr().out.split())
    assert caught.value.code == 0
    assert "What it does." in text
    assert "Step size. Larger is faster and less stable." in text
    assert all(f"--{key}" in text for key in ("name", "inner.rate", "inner.kind", "depth"))


def test_known_keys_walks_nested_sections() -> None:
    assert [name for name, _ in _typed_keys(Outer)] == [
        "name", "inner", "inner.rate", "inner.kind", "extra", "extra.rate", "extra.kind", "depth", "sizes",
        "second", "second.rate", "second.kind",
    ]  # fmt: skip


def test_take_flag_removes_the_switch() -> None:
    argv = ["--a", "--dry-run", "--b"]
    assert take_flag(argv, "--dry-run")
    assert argv == ["--a", "--b"]
    assert not take_flag(argv, "--dry-run")


@pytest.mark.parametrize(
    ("error", "status", "words"),
    [
        (UserError("mend me"), 2, "error: mend me"),
        (KeyboardInterrupt(), 130, "stopped; run the same command again to continue"),
        (OSError(errno.ENOSPC, "No space left on device", "/x/y"), 2, "/x/y cannot be written: the disk is full"),
    ],
)
def test_run_main_turns_foreseeable_ends_into_a_line(
    error: BaseException, status: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise error

    assert run_main(fail) == status
    captured = capsys.readouterr()
    assert words in captured.err
    assert "Traceback" not in captured.err


def test_run_main_passes_real_bugs_on() -> None:
    def fail() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run_main(fail)
    assert run_main(lambda: None) == 0
