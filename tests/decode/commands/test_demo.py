"""The demo: both texts are written to their ends, in turn by their own time, and compared."""

from __future__ import annotations

import io

import pytest
from pairs import save_pair

from decode.commands import demo
from decode.commands.settings import DemoSettings
from decode.errors import UserError


@pytest.fixture(scope="module")
def folder(tiny, tmp_path_factory):
    return save_pair(tmp_path_factory.mktemp("pair"), tiny)


def settings_for(folder, **changes):
    base = {"target": str(folder / "target"), "draft": str(folder / "draft"), "max_new_tokens": 12, "threads": 1}
    return DemoSettings(**(base | {"prompt": "Tom has 3 apples", "chat": False} | changes))


def test_both_texts_are_shown_with_their_speeds_and_found_to_be_the_same(folder, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")  # a long speed cuts nothing off
    demo.run(settings_for(folder, ignore_eos=True))
    out = capsys.readouterr().out
    assert "without a draft" in out
    assert "with vanilla" in out
    assert out.count("12 tokens, ") == 2
    assert "1.00 a forward" in out
    assert "times as fast; the same text, token by token" in out


def test_prompts_are_read_line_by_line_until_an_empty_one(folder, capsys, monkeypatch):
    begun, starts = [], demo.start
    monkeypatch.setattr(
        demo, "start", lambda settings, prompt, pair: begun.append(prompt) or starts(settings, prompt, pair)
    )
    monkeypatch.setattr("sys.stdin", io.StringIO("one\ntwo\n\nthree\n"))
    demo.run(settings_for(folder, prompt=None, max_new_tokens=2))
    assert capsys.readouterr().out.count("times as fast") == 2
    assert begun == ["one\n"] * 2 + ["two\n"] * 2  # plain text: a question ends where its line does


def test_the_side_that_computed_least_goes_on():
    class Slow(demo.Side):
        def advance(self):
            self.seconds += float(self.title)
            self.done = self.seconds >= 6

    sides = [Slow("1", None), Slow("3", None)]
    order = []
    for _ in demo.race(sides):
        order.append(tuple(side.seconds for side in sides))
    assert order[-1] == (6.0, 6.0)
    assert all(abs(a - b) <= 3 for a, b in order)


def test_a_demo_without_a_draft_is_refused_unless_the_method_needs_none(folder):
    with pytest.raises(UserError, match="--draft"):
        demo.run(settings_for(folder, draft=None))
    demo.run(settings_for(folder, draft=None, method="prompt-lookup", max_new_tokens=2))
