"""Streaming, stop strings and what ``generate`` prints."""

import dataclasses
import io
import json
import random
import re
import shutil

import pytest
import torch
from greedy import generate
from pairs import make_tokenizer, save_pair

from decode.commands.checks import recorded_costs
from decode.commands.generate import run, start
from decode.commands.settings import GenerateSettings
from decode.core.lengths import RoundCosts
from decode.errors import UserError
from decode.measure import machine
from decode.models.open import load_model
from decode.models.tokens import Detokenizer, marked


@pytest.fixture(scope="module")
def folder(tiny, tmp_path_factory):
    return save_pair(tmp_path_factory.mktemp("pair"), tiny)


def settings_for(folder, **changes):
    base = {"target": str(folder / "target"), "draft": str(folder / "draft"), "max_new_tokens": 24, "threads": 1}
    return GenerateSettings(**(base | {"prompt": "Tom has 3 apples", "chat": False} | changes))


def written(settings):
    generation = start(settings, "Tom has 3 apples")
    for _ in generation.pieces:
        assert generation.finish_reason is None or generation.ids
    return generation


@pytest.mark.parametrize("seed", range(2))
def test_streamed_pieces_join_to_the_text_of_all_ids(seed) -> None:
    tokenizer, chance = make_tokenizer(), random.Random(seed)
    text = "".join(chance.choice("aé日🎉 \n.") for _ in range(60))
    ids = tokenizer(text).input_ids
    if seed % 2:  # any ids at all, whole characters or not
        ids = [chance.randrange(len(tokenizer)) for _ in range(200)]
    stream, pieces, rest = Detokenizer(tokenizer), [], list(ids)
    while rest:
        pieces.append(stream.push([rest.pop(0) for _ in range(min(len(rest), chance.randint(1, 4)))]))
    pieces.append(stream.finish())
    assert "".join(pieces) == stream.text(ids)
    if not seed % 2:
        assert "".join(pieces) == text
        assert not any("\ufffd" in piece for piece in pieces)  # no piece shows half a character


@pytest.mark.parametrize("method", ["autoregressive", "vanilla"])
def test_a_stop_string_ends_the_text_where_transformers_ends_it(folder, method) -> None:
    tokenizer, target = make_tokenizer(), load_model(folder / "target", device="cpu", dtype="float32")
    full = written(settings_for(folder, ignore_eos=True, max_new_tokens=40))
    clean = [i for i, token in enumerate(full.ids) if tokenizer.decode([token]).isascii() and 5 < i < 30]
    strings = [tokenizer.decode([full.ids[clean[0]]]), "never"]
    wanted = generate(target, full.prompt, 40, stop_strings=strings, tokenizer=tokenizer, eos_token_id=279)
    ours = written(settings_for(folder, method=method, stop=strings, ignore_eos=True, max_new_tokens=40))
    assert ours.ids == wanted[len(full.prompt) :]
    assert strings[0] in ours.text
    assert len(ours.ids) < 40
    assert ours.metrics["tokens"] == len(ours.ids)


def test_json_holds_text_ids_metrics_and_who_wrote_what(folder, capsys) -> None:
    run(settings_for(folder, json=True, temperature=1.0, seed=7))
    found = json.loads(capsys.readouterr().out)
    assert found.keys() >= {"prompt_ids", "lossless", "finish_reason"}
    assert (found["method"], found["seed"]) == ("vanilla", 7)
    assert found["text"] == Detokenizer(make_tokenizer()).text(found["ids"])
    assert "".join(t["text"] for t in found["tokens"] if t["who"] != "rejected") == found["text"]
    assert found["metrics"]["tokens"] == len(found["ids"]) == 24
    assert {"accepted", "rejected", "corrected"} <= {t["who"] for t in found["tokens"]}
    run(settings_for(folder, json=True, temperature=1.0, seed=7))
    assert json.loads(capsys.readouterr().out)["ids"] == found["ids"]


def test_what_ended_the_text_is_said(folder, capsys) -> None:
    def reason(**changes):
        run(settings_for(folder, json=True, ignore_eos=True, **changes))
        return json.loads(capsys.readouterr().out)["finish_reason"]

    assert reason() == "length"
    text = written(settings_for(folder, ignore_eos=True)).text
    assert reason(stop=[next(c for c in text if c.isascii() and c.isprintable())]) == "stop"
    assert reason(max_new_tokens=1000) == "context"  # the tiny models hold 256 positions
    run(settings_for(folder, ignore_eos=True, max_new_tokens=1000))
    assert "the model's context is full: 257 tokens" in capsys.readouterr().err
    with pytest.raises(UserError, match="draft_length is 257, and the target's context holds 256 tokens"):
        run(settings_for(folder, draft_length=257))


def test_the_stream_is_the_text_and_show_adds_the_statistics(folder, capsys) -> None:
    text = written(settings_for(folder)).text
    capsys.readouterr()
    run(settings_for(folder))
    assert capsys.readouterr().out == text + "\n"
    run(settings_for(folder, show=True, method="ears", temperature=1.0, seed=1))
    shown = capsys.readouterr().out
    assert "ears (relaxed" in shown
    assert "accepted  rejected  corrected  bonus" in shown
    assert "[-" in shown  # without colours, rejected tokens are marked
    assert "Σm / Σn" in shown


def test_a_comparison_writes_the_text_without_and_with_the_draft(folder, capsys) -> None:
    run(settings_for(folder, compare=True, ignore_eos=True, max_new_tokens=12))
    shown = capsys.readouterr().out
    assert shown.index("autoregressive (lossless)") < shown.index("vanilla (lossless)")
    said = shown.splitlines()[-1]  # tiny models are timed badly
    assert re.match(r"\d+\.\d\d times as fast as without a draft, of one text|no speedup reported: ", said)
    assert said.endswith("; the same text, token by token")
    with pytest.raises(UserError, match="--compare needs a method that drafts"):
        run(settings_for(folder, compare=True, draft=None))


def test_costs_of_another_machine_are_not_used_and_a_damaged_profile_is_told(folder, tmp_path, capsys) -> None:
    shutil.copytree(folder / "draft", tmp_path / "draft")
    profile, costs = tmp_path / "draft/speculation_profile.json", RoundCosts.of_ratios(0.1)
    here = machine.describe("cpu")
    for conditions, used in ((here, True), (here | {"cpu": "another"}, False), ({}, False)):
        profile.write_text(json.dumps({"round_costs": costs.to_dict(), "batch_size_conditions": conditions}))
        assert recorded_costs(str(tmp_path / "draft"), torch.device("cpu")) == (costs if used else None)
        assert ("are not used: they were measured on" in capsys.readouterr().err) != used
    settings = settings_for(folder, draft=str(tmp_path / "draft"), max_new_tokens=2)
    profile.write_text("{")
    run(settings)  # costs nothing to a method that has no use for them
    with pytest.raises(UserError, match=r"speculation_profile.json cannot be read as JSON"):
        run(dataclasses.replace(settings, method="cost-optimal"))


def test_the_prompt_comes_from_standard_input_if_none_is_given(folder, capsys, monkeypatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("Tom has 3 apples"))
    run(settings_for(folder, prompt=None))
    piped = capsys.readouterr().out
    run(settings_for(folder))
    assert capsys.readouterr().out == piped
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    with pytest.raises(UserError, match="the prompt is empty"):
        run(settings_for(folder, prompt=None))


@pytest.mark.parametrize(("system", "before"), [(None, ""), ("Be brief.", "[system]Be brief.\n")])
def test_chat_puts_the_prompt_into_the_template(folder, system, before) -> None:
    generation = start(settings_for(folder, chat=None, system=system), "Hi")
    assert make_tokenizer().decode(generation.prompt) == f"{before}[user]Hi\n[assistant]"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rule": "eras"}, "unknown acceptance rule 'eras'; did you mean 'ears'"),
        ({"draft": None, "method": "adasd"}, "give one with --draft"),
        ({"method": "adaptix"}, "datastore build"),
        ({"method": "generate"}, "only for comparison"),
        ({"stop": ["a", ""]}, "empty text"),
        ({"chat": False, "system": "Be brief."}, "without --chat false"),
        ({"compare": True, "json": True}, "give one of the two options"),
        ({"draft": None, "stop_rule": "hf-dynamic"}, "autoregressive drafts none; give --draft D"),
    ],
)
def test_mistakes_are_told_before_any_model_is_loaded(folder, monkeypatch, changes, message) -> None:
    monkeypatch.setattr("decode.models.open.load_model", lambda *_, **__: pytest.fail("loaded a model"))
    with pytest.raises(UserError, match=message):
        start(settings_for(folder, **changes), "Hi")


def test_marks_put_rejected_tokens_before_their_correction() -> None:
    tokenizer = make_tokenizer()
    a, b, c = tokenizer("abc").input_ids
    pieces = marked(Detokenizer(tokenizer), [a, b], ["draft", "correction"], [[], [c]])
    shown = [("a", "accepted"), ("c", "rejected"), ("b", "corrected")]
    assert pieces == [{"text": text, "who": who} for text, who in shown]
    assert marked(Detokenizer(tokenizer), [a], ["target"], [[]], alone=True)[0]["who"] == "target"


def test_a_text_that_a_special_token_stops_ends_with_it_and_counts_no_token_behind(folder) -> None:
    settings = settings_for(folder, ignore_eos=True, max_new_tokens=40, temperature=1.0, seed=3, stop=["<eos>"])
    texts = (written(dataclasses.replace(settings, seed=seed)) for seed in range(50))
    generation = next(text for text in texts if 0 in text.ids)
    assert generation.ids.index(0) == len(generation.ids) - 1
    assert generation.finish_reason == "stop"
    assert generation.metrics["tokens"] == len(generation.ids)
