"""A model's own generation_config is followed as its own `generate` follows it, or what differs is said."""

from __future__ import annotations

import copy
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks import run_benchmark
from pairs import make_pair, make_suite, make_tokenizer, save_pair

from decode.commands.generate import start
from decode.commands.settings import GenerateSettings
from decode.errors import UserError
from decode.measure.benchmark import plan
from decode.measure.session import BenchOptions
from decode.models.open import described, load_config, load_model, load_tokenizer, own_warp
from decode.models.tokens import prompt_ids

PROMPT = "Tom has 3 apples and 4 apples and"
OWN = [
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 1.2, "temperature": 0.6, "top_p": 0.8, "top_k": 20, "do_sample": True},
    {"no_repeat_ngram_size": 2},
    {"suppress_tokens": list(range(40, 140))},
    {"bad_words_ids": [[t] for t in range(60, 100)]},
    {"eos_token_id": list(range(0, 280, 9))},
]


@pytest.mark.parametrize("own", OWN, ids=lambda own: next(iter(own)))
def test_generate_writes_what_the_models_own_generate_writes(own: dict[str, Any], tmp_path: Path, tiny: Any) -> None:
    folder = save_pair(tmp_path, tiny)
    path = folder / "target" / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | own))
    model = load_model(folder / "target", device="cpu", dtype="float32")
    ids = torch.tensor([prompt_ids(make_tokenizer(), PROMPT)])
    wanted = model.generate(ids, do_sample=False, max_new_tokens=40, pad_token_id=0)[0, ids.shape[1] :].tolist()
    settings = GenerateSettings(
        target=str(folder / "target"),
        draft=str(folder / "draft"),
        max_new_tokens=40,
        threads=1,
        device="cpu",
        chat=False,
    )
    generation = start(settings, PROMPT)
    for _ in generation.pieces:
        pass
    assert generation.ids == wanted
    plain = copy.deepcopy(model)
    plain.generation_config = type(model.generation_config)(eos_token_id=0)
    assert wanted != plain.generate(ids, do_sample=False, max_new_tokens=40, pad_token_id=0)[0, ids.shape[1] :].tolist()


def test_bench_compares_with_the_models_own_generate(tiny: Any) -> None:
    target, draft = make_pair(tiny)
    target.generation_config.repetition_penalty = 1.3
    for given, identical in ({}, True), ({"repetition_penalty": 1.0}, True):
        options = BenchOptions(24, 1, warp=own_warp(target, 0.0, given), costs=False, threads=1)
        entries = plan(["vanilla"], {"d": draft}, [0.0])
        bench = run_benchmark(target, {"d": draft}, make_tokenizer(), [make_suite(2)], entries, options)
        assert all(row["identical_to_target"] is identical for row in bench.rows)


def test_what_is_given_goes_before_the_models_own(tiny: Any) -> None:
    model = make_pair(tiny)[0]
    model.generation_config.update(repetition_penalty=1.1, top_p=0.8, top_k=20, temperature=0.7, do_sample=True)
    warp = own_warp(model, 1.0, {"top_p": 0.5, "repetition_penalty": 1.0, "top_k": None})
    assert (warp.top_p, warp.top_k, warp.repetition_penalty) == (0.5, 20, 1.0)
    assert "follows top_k 20" in described(model, warp)


def test_what_is_not_followed_is_named(tiny: Any) -> None:
    model = make_pair(tiny)[0]
    assert described(model, own_warp(model, 0.0, {})) == ""
    model.generation_config.update(num_beams=4, typical_p=0.9)
    assert "does not follow num_beams, typical_p" in described(model, own_warp(model, 0.0, {}))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('{\n "eos_token_id": 0,\n}', "line 3 column 1"),
        ("", "line 1 column 1"),
        ("[0]", "line 1: a list instead of an object"),
        ('{"eos_token_id": ["0"]}', r"eos_token_id is \['0'\], expected a number"),
    ],
)
def test_a_damaged_one_is_refused_and_not_left_out(content: str, words: str, tmp_path: Path, tiny: Any) -> None:
    path = save_pair(tmp_path, tiny) / "target" / "generation_config.json"
    path.write_text(content)
    for opened in (load_config, load_tokenizer, partial(load_model, device="cpu", dtype="float32")):
        with pytest.raises(UserError, match=f"{path}.*{words}"):
            opened(path.parent)
