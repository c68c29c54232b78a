"""The sources of these tests have few rows, of which larger shares are held out."""

import pytest


@pytest.fixture(autouse=True)
def larger_splits(monkeypatch) -> None:
    monkeypatch.setattr("distill.data.sources.HELD_OUT", 0.2)
