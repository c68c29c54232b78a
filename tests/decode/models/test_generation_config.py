"""A model's own generation_config is followed as its own `generate` follows it, or what differs is said."""

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from benchmarks import run_benchmark
from greedy import generate
from pairs import edit, make_pair, make_suite, make_tokenizer, save_pair
from tokenizers_of_kinds import byte_level

from decode.commands.generate import start
from decode.commands.settings import GenerateSettings
from decode.core.sampling import LogitsWarper
from decode.errors import UserError
from decode.measure.baselines import generate as generate_baseline
from decode.measure.benchmark import plan
from decode.measure.session import BenchOptions
from decode.models.open import (
    described,
    files_of,
    load_config,
    load_model,
    load_tokenizer,
    own_warp,
    stop_ids,
    unnamed_ends,
)
from decode.models.tokens import prompt_ids
from distill.networks.models import ready_to_save

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
    edit(folder / "target" / "generation_config.json", **own)
    model = load_model(folder / "target", device="cpu", dtype="float32")
    ids = prompt_ids(make_tokenizer(), PROMPT)
    wanted = generate(model, ids, 40)
    options: dict[str, Any] = {"max_new_tokens": 40, "threads": 1, "device": "cpu", "chat": False}
    generation = start(GenerateSettings(target=str(folder / "target"), draft=str(folder / "draft"), **options), PROMPT)
    for _ in generation.pieces:
        pass
    assert ids + generation.ids == wanted
    plain = copy.deepcopy(model)
    plain.generation_config = type(model.generation_config)(eos_token_id=0)
    assert wanted != generate(plain, ids, 40)


END = "<|im_end|>"


@pytest.mark.parametrize(
    ("generation", "config", "ending", "ends", "said"),
    [
        (2, 2, f"{END}\n", [2, 3], "'<|im_end|>' (id 3, of the chat template)"),
        (3, 2, f"{END}\n", [3, 2], "'<eos>' (id 2, of config.json)"),
        ([3, 2], 9, f"{END}\n", [3, 2], ""),  # 9 is no token for such use: the class's default
        # as in gpt-oss, where no token follows an answer both at the end and before a question
        (2, 2, f"{{{{ '{END}' if loop.last else '<|a|>' }}}}", [2, 3], "'<|im_end|>' (id 3, of the chat template)"),
        (2, 2, "<|a|><eos>", [2], ""),  # the template ends with a known one
        (None, None, END + "{{ '<eos>' if loop.last }}", [2, 3], "'<eos>' (id 2, of the tokenizer), '<|im"),
    ],
)
def test_texts_end_where_any_file_says_and_what_generation_config_lacks_is_named(
    generation: Any, config: int, ending: str, ends: list[int], said: str, tmp_path: Path, tiny: Any
) -> None:
    model, tokenizer = make_pair(tiny)[0], byte_level(size=280, special=("<|a|>", "<|b|>", "<eos>", "<|im_end|>"))
    tokenizer.eos_token = "<eos>"
    tokenizer.chat_template = "{% for m in messages %}<|b|>{{ m.content }}" + ending + "{% endfor %}"
    model.generation_config.eos_token_id, model.config.eos_token_id = generation, config
    model.save_pretrained(tmp_path)
    for files in (model, files_of(tmp_path)):
        assert stop_ids(files, tokenizer) == ends
        note = unnamed_ends(files, tokenizer)
        assert note.startswith(f"generation_config.json does not name {said}") if said else not note
    saved = ready_to_save(model, tokenizer).generation_config.eos_token_id
    assert ([saved] if isinstance(saved, int) else saved) == ends


def test_bench_compares_with_the_models_own_generate(tiny: Any) -> None:
    target, draft = make_pair(tiny)
    target.generation_config.repetition_penalty = 1.3
    for given in ({}, {"repetition_penalty": 1.0}):
        options = BenchOptions(24, 1, warp=own_warp(target, 0.0, given), threads=1)
        entries = plan(["vanilla"], {"d": draft}, [0.0])
        bench = run_benchmark(target, {"d": draft}, make_tokenizer(), [make_suite(2)], entries, options)
        assert all(row["identical_to_target"] is True for row in bench.rows)


def test_a_baseline_reads_each_token_once_whatever_a_models_own_configuration_says(tiny: Any) -> None:
    target, read = make_pair(tiny)[0], list[int]()
    own = {"use_cache": False, "num_beams": 2, "typical_p": 0.4, "return_dict_in_generate": True, "max_time": 0.0}
    own |= {"stop_strings": ["a"], "min_new_tokens": 24, "num_return_sequences": 2, "output_hidden_states": True}
    wanted = generate(target, [5, 9, 3], 24)
    target.generation_config.update(**own, cache_implementation="static", no_repeat_ngram_size=2)
    baseline = partial(
        generate_baseline, "generate", target, None, LogitsWarper(), [[5, 9, 3]], max_new_tokens=24, seed=0
    )
    assert baseline()[0] != [wanted[3:]]  # which is followed in decoding too
    target.generation_config.no_repeat_ngram_size = None
    target.register_forward_pre_hook(lambda _, args, named: read.append(named["input_ids"].numel()), with_kwargs=True)
    texts, _, forwards = baseline()
    assert (texts, sum(read), forwards) == ([wanted[3:]], 3 + 23, 24)


def test_what_is_given_goes_before_the_models_own_and_what_is_not_followed_is_named(tiny: Any) -> None:
    model = make_pair(tiny)[0]
    model.generation_config.update(repetition_penalty=1.1, top_p=0.8, top_k=20, temperature=0.7, do_sample=True)
    warp = own_warp(model, 1.0, {"top_p": 0.5, "repetition_penalty": 1.0, "top_k": None})
    assert (warp.top_p, warp.top_k, warp.repetition_penalty) == (0.5, 20, 1.0)
    assert "follows top_k 20" in described(model, warp)

    model.generation_config = type(model.generation_config)()
    assert described(model, own_warp(model, 0.0, {})) == ""
    model.generation_config.update(num_beams=4, typical_p=0.9)
    assert "does not follow num_beams, typical_p" in described(model, own_warp(model, 0.0, {}))


def test_a_damaged_one_is_refused_and_not_left_out(tmp_path: Path, tiny: Any) -> None:
    path = save_pair(tmp_path, tiny) / "target" / "generation_config.json"
    for content, words in (('{\n "eos_token_id": 0,\n}', "line 3 column 1"), ("[0]", "line 1: a list instead of an")):
        path.write_text(content)
        for opened in (load_config, load_tokenizer, partial(load_model, device="cpu", dtype="float32")):
            with pytest.raises(UserError, match=f"{path}.*{words}"):
                opened(path.parent)
