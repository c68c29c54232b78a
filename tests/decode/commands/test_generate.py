"""Streaming, stop strings and what ``generate`` prints."""

from __future__ import annotations

import dataclasses
import io
import json
import random

import pytest
import torch
from pairs import make_tokenizer, save_pair

from decode.commands.generate import run, start
from decode.commands.settings import GenerateSettings
from decode.errors import UserError
from decode.models.loading import load_model
from decode.models.tokens import Detokenizer, chat_ids, marked


@pytest.fixture(scope="module")
def folder(tiny, tmp_path_factory):
    return save_pair(tmp_path_factory.mktemp("pair"), tiny)


def settings_for(folder, **changes):
    base = {"target": str(folder / "target"), "draft": str(folder / "draft"), "max_new_tokens": 24, "threads": 1}
    return GenerateSettings(**(base | {"prompt": "Tom has 3 apples", "chat": False} | changes))


@pytest.mark.parametrize("seed", range(6))
def test_streamed_pieces_join_to_the_text_of_all_ids(seed):
    tokenizer, chance = make_tokenizer(), random.Random(seed)
    text = "".join(chance.choice("aé日🎉 \n.") for _ in range(60))
    ids = tokenizer(text).input_ids
    if seed % 2:  # any ids at all, whole characters or not
        ids = [chance.randrange(len(tokenizer)) for _ in range(200)]
    stream, pieces, rest = Detokenizer(tokenizer), [], list(ids)
    while rest:
        size = chance.randint(1, 4)
        pieces.append(stream.push(rest[:size]))
        rest = rest[size:]
    pieces.append(stream.finish())
    assert "".join(pieces) == stream.text(ids)
    if not seed % 2:
        assert "".join(pieces) == text
        assert not any("\ufffd" in piece for piece in pieces)  # no piece shows half a character


@pytest.mark.parametrize("method", ["autoregressive", "vanilla", "hf-constant"])
def test_a_stop_string_ends_the_text_where_transformers_ends_it(folder, method):
    tokenizer, target = make_tokenizer(), load_model(folder / "target", device="cpu", dtype="float32")
    whole = start(settings_for(folder, ignore_eos=True, max_new_tokens=40), "Tom has 3 apples")
    for _ in whole.pieces:
        pass
    clean = [i for i, token in enumerate(whole.ids) if tokenizer.decode([token]).isascii() and 5 < i < 30]
    strings = [tokenizer.decode([whole.ids[clean[0]]]), "never"]
    ids = torch.tensor([whole.prompt])
    wanted = target.generate(
        ids, max_new_tokens=40, do_sample=False, stop_strings=strings, tokenizer=tokenizer, eos_token_id=279
    )
    settings = settings_for(folder, method=method, stop=strings, ignore_eos=True, max_new_tokens=40)
    ours = start(settings, "Tom has 3 apples")
    for _ in ours.pieces:
        pass
    assert ours.ids == wanted[0, ids.shape[1] :].tolist()
    assert strings[0] in ours.text
    assert len(ours.ids) < 40


def test_json_holds_text_ids_metrics_and_who_wrote_what(folder, capsys):
    run(settings_for(folder, json=True, temperature=1.0, seed=7))
    found = json.loads(capsys.readouterr().out)
    keys = {"text", "ids", "prompt_ids", "method", "lossless", "seed", "finish_reason", "metrics", "tokens"}
    assert found.keys() == keys
    assert (found["method"], found["seed"]) == ("vanilla", 7)
    assert found["text"] == Detokenizer(make_tokenizer()).text(found["ids"])
    assert "".join(t["text"] for t in found["tokens"] if t["who"] != "rejected") == found["text"]
    assert found["metrics"]["tokens"] == len(found["ids"]) == 24
    assert {"accepted", "rejected", "corrected"} <= {t["who"] for t in found["tokens"]}
    run(settings_for(folder, json=True, temperature=1.0, seed=7))
    assert json.loads(capsys.readouterr().out)["ids"] == found["ids"]


def test_what_ended_the_text_is_said(folder, capsys):
    def reason(**changes):
        run(settings_for(folder, json=True, **changes))
        return json.loads(capsys.readouterr().out)["finish_reason"]

    assert reason(ignore_eos=True) == "length"
    whole = start(settings_for(folder, ignore_eos=True), "Tom has 3 apples")
    for _ in whole.pieces:
        assert whole.finish_reason is None
    clean = next(c for c in whole.text if c.isascii() and c.isprintable())
    assert reason(ignore_eos=True, stop=[clean]) == "stop"
    # the tiny models hold 256 positions
    assert reason(ignore_eos=True, max_new_tokens=1000) == "context"
    run(settings_for(folder, ignore_eos=True, max_new_tokens=1000))
    assert "the model's context is full: 257 tokens" in capsys.readouterr().err


def test_the_stream_is_the_text_and_show_adds_the_statistics(folder, capsys):
    run(settings_for(folder, json=True))
    text = json.loads(capsys.readouterr().out)["text"]
    run(settings_for(folder))
    assert capsys.readouterr().out == text + "\n"
    run(settings_for(folder, show=True))
    shown = capsys.readouterr().out
    assert "drafted and rejected" in shown
    assert "vanilla (lossless)" in shown
    assert "Σm / Σk" in shown
    run(settings_for(folder, show=True, method="ears", temperature=1.0, seed=1))
    assert "relaxed" in capsys.readouterr().out


def test_the_prompt_comes_from_standard_input_if_none_is_given(folder, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("Tom has 3 apples"))
    run(settings_for(folder, prompt=None))
    piped = capsys.readouterr().out
    run(settings_for(folder))
    assert capsys.readouterr().out == piped
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    with pytest.raises(UserError, match="the prompt is empty"):
        run(settings_for(folder, prompt=None))


def test_chat_puts_the_prompt_into_the_template(folder):
    generation = start(settings_for(folder, chat=True), "Hi")
    assert make_tokenizer().decode(generation.prompt) == "[user]Hi\n[assistant]"
    by_itself = start(settings_for(folder, chat=None), "Hi")
    assert by_itself.prompt == generation.prompt
    told = start(settings_for(folder, chat=None, system="Be brief."), "Hi")
    assert make_tokenizer().decode(told.prompt) == "[system]Be brief.\n[user]Hi\n[assistant]"
    with pytest.raises(UserError, match="no chat template"):
        chat_ids(make_tokenizer(), [{"role": "user", "content": "Hi"}])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"method": "vanila"}, "did you mean 'vanilla'"),
        ({"rule": "eras"}, "did you mean 'ears'"),
        ({"stop_rule": "entrpy"}, "did you mean 'entropy'"),
        ({"draft": None, "method": "adasd"}, "give one with --draft"),
        ({"method": "adaptix"}, "trigrams build"),
        ({"method": "generate"}, "only for comparison"),
        ({"draft_length": 0}, "draft_length is 0"),
        ({"stop": ["a", ""]}, "empty text"),
        ({"chat": False, "system": "Be brief."}, "without --chat false"),
    ],
)
def test_mistakes_are_told_before_any_model_is_loaded(folder, monkeypatch, changes, message):
    monkeypatch.setattr("decode.models.loading.load_model", lambda *_, **__: pytest.fail("loaded a model"))
    with pytest.raises(UserError, match=message):
        start(settings_for(folder, **changes), "Hi")


def test_marks_put_rejected_tokens_before_their_correction():
    tokenizer = make_tokenizer()
    a, b, c = tokenizer("abc").input_ids
    pieces = marked(Detokenizer(tokenizer), [a, b], ["draft", "correction"], [[], [c]])
    assert pieces == [
        {"text": "a", "who": "accepted"},
        {"text": "c", "who": "rejected"},
        {"text": "b", "who": "corrected"},
    ]
    assert marked(Detokenizer(tokenizer), [a], ["target"], [[]], alone=True)[0]["who"] == "target"


def test_a_text_that_a_special_token_stops_ends_with_it_and_counts_no_token_behind(folder):
    settings = settings_for(folder, ignore_eos=True, max_new_tokens=40, temperature=1.0, seed=3)
    for seed in range(50):  # until a text has the token
        generation = start(dataclasses.replace(settings, seed=seed, stop=["<eos>"]), "Tom has 3 apples")
        for _ in generation.pieces:
            pass
        if 0 in generation.ids:
            break
    assert generation.ids.index(0) == len(generation.ids) - 1
    assert generation.finish_reason == "stop"
    assert generation.trace.tokens == len(generation.ids)
