"""The draft's own texts: written by its weights of the moment, the same ones again after a kill, mixed by sample."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from some_rows import some_rows
from tiny_run import begun, killed, run_tiny, tiny_settings
from transformers import PreTrainedModel

from decode.errors import UserError
from decode.models.writing import write_texts
from distill.config import ResponseSettings
from distill.data.dataset import Examples, Picks, Schedule
from distill.responses.on_policy import OnPolicy

Tiny = Callable[..., PreTrainedModel]


def policy(model: PreTrainedModel, rows: Examples, share: float = 1.0, **settings: Any) -> OnPolicy:
    responses = ResponseSettings(**{"max_new_tokens": 5, "refresh_every": 3, "batch_size": 4} | settings)
    schedule, write = Schedule(rows.lengths, 4, seed=1), partial(write_texts, model)
    return OnPolicy(write, rows, schedule, 12, responses, share, 7, 64, {1}, lambda made: None)


def picks(written_texts: OnPolicy, step: int) -> Picks:
    return [(written_texts.prompts, int(example)) for example in written_texts.schedule.batch(step)]


def content(picked: Picks) -> list[list[int]]:
    return [rows.ids[rows.offsets[i] : rows.offsets[i + 1]].tolist() for rows, i in picked]


def test_every_prompt_of_a_step_is_answered_by_the_draft_and_no_other_chance_is_drawn(tiny: Tiny) -> None:
    rows, written = some_rows(10, prompt=2), 0
    written_texts = policy(tiny("llama"), rows)
    torch.manual_seed(3)
    wanted_chance = torch.rand(2)
    torch.manual_seed(3)
    for step in range(4):
        wanted = picks(written_texts, step)
        picked = written_texts(step, wanted)
        for (_, example), text, (made, i) in zip(wanted, content(picked), picked):
            prompt = rows.prompt(example)
            assert text[: len(prompt)] == prompt
            assert 1 <= len(text) - len(prompt) <= 5
            assert made.labels_of(np.array([i])) == len(text) - len(prompt)
            written += len(text) - len(prompt)
    assert written_texts.label_tokens == written
    assert torch.equal(torch.rand(2), wanted_chance)


def test_texts_are_written_again_with_the_weights_of_the_refresh_and_not_between(tiny: Tiny) -> None:
    first, second, rows = tiny("llama"), tiny("llama", seed=5), some_rows(10, prompt=2)
    written_texts, changed = policy(first, rows, temperature=0.0), policy(first, rows, temperature=0.0)
    written_texts(0, picks(written_texts, 0))
    changed(0, picks(changed, 0))
    changed.write = partial(write_texts, second)
    assert content(written_texts(2, picks(written_texts, 2))) == content(changed(2, picks(changed, 2)))
    assert content(written_texts(3, picks(written_texts, 3))) != content(changed(3, picks(changed, 3)))


def test_what_a_checkpoint_holds_gives_the_same_texts_from_other_weights(tiny: Tiny) -> None:
    rows = some_rows(10, prompt=2)
    written_texts, continued = policy(tiny("llama"), rows), policy(tiny("llama", seed=5), rows)
    written_texts(3, picks(written_texts, 3))
    continued.load_state_dict(written_texts.state_dict())
    assert content(written_texts(4, picks(written_texts, 4))) == content(continued(4, picks(continued, 4)))
    assert written_texts.label_tokens == continued.label_tokens
    state = written_texts.state_dict()
    with pytest.raises(UserError, match="holds texts of 2 processes and this run has 1"):
        written_texts.load_state_dict(state | {"texts": state["texts"] * 2})


def test_mixing_is_by_sample_in_the_share_asked_for(tiny: Tiny) -> None:
    rows = some_rows(10, prompt=2)
    texts = policy(tiny("llama"), rows, 0.3, refresh_every=200, max_new_tokens=1)
    texts.steps = 200
    counts = [sum(made is not rows for made, _ in texts(step, picks(texts, step))) for step in range(200)]
    assert {0, 1, 2, 3} <= set(counts)  # within a step, some and some
    assert sum(counts) / 800 == pytest.approx(0.3, abs=0.05)


@pytest.mark.parametrize(("share", "source", "signal"), [(1.0, "dataset", "hidden"), (0.5, "target", "online")])
def test_a_killed_run_trains_on_the_same_texts_and_ends_with_the_same_weights(
    tmp_path: Path, share: float, source: Any, signal: Any
) -> None:
    undisturbed, cut = (begun(tiny_settings(tmp_path / name)) for name in ("undisturbed", "cut"))
    for settings in (undisturbed, cut):
        responses = {"source": source, "max_new_tokens": 8, "refresh_every": 4, "batch_size": 8}
        settings.teacher.responses, settings.teacher.signal = ResponseSettings(**responses), signal
        for draft in settings.drafts:
            draft.on_policy = share
    _, wanted, _ = run_tiny(undisturbed)
    names = [draft.name for draft in undisturbed.drafts[:2]]
    for stage, step in zip(names, (7, 11)):  # between two refreshes, and after the last one
        with killed(stage, step):
            run_tiny(cut)
    _, got, _ = run_tiny(cut)
    for stage in names:
        ours, theirs = (load_file(run.path(stage) / "model.safetensors") for run in (got, wanted))
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs), stage
        account, other = (run.record(stage).account for run in (got, wanted))
        assert account == other
