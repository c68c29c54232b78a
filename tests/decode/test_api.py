"""The public names: `decode.load`, `generate`, `bench` and `profile`, as a program uses them."""

import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from pairs import save_pair

import decode
from decode import Generation, Pair, UserError, bench, generate, load, profile

PROMPT = "Tom has 3 apples"


@pytest.fixture(scope="module")
def pair(tiny, tmp_path_factory) -> Pair:
    folder = save_pair(tmp_path_factory.mktemp("pair"), tiny)
    return load(folder / "target", folder / "draft")


def test_every_public_name_is_there_and_no_other() -> None:
    assert all(getattr(decode, name) for name in decode.__all__)
    with pytest.raises(AttributeError, match="no attribute 'generat'"):
        _ = decode.generat


def test_greedy_texts_do_not_depend_on_the_method_and_runners_are_opened_once(pair) -> None:
    runner = pair.runner
    texts = [generate(pair, PROMPT, method, max_new_tokens=16) for method in (None, "autoregressive", "prompt-lookup")]
    assert all(isinstance(text, Generation) for text in texts)
    assert [text.method for text in texts] == ["vanilla", "autoregressive", "prompt-lookup"]
    assert len({tuple(text.ids) for text in texts}) == 1
    assert pair.runner is runner
    assert texts[0].metrics["tokens"] == len(texts[0].ids)
    assert texts[0].finish_reason in ("length", "eos")


def test_threads_that_share_a_pair_write_the_texts_that_each_writes_alone(pair, monkeypatch) -> None:
    asked = [(PROMPT + " more" * i, method) for i in range(4) for method in ("vanilla", "autoregressive", "layerskip")]

    def write(prompt: str, method: str) -> list[int]:
        return generate(pair, prompt, method, max_new_tokens=24, chat=False).ids

    alone = [write(*each) for each in asked]
    shared = load(pair.target_name, pair.draft_name)
    threads, interval = torch.get_num_threads(), sys.getswitchinterval()
    changed = []
    monkeypatch.setattr(torch, "set_num_threads", changed.append)
    try:
        sys.setswitchinterval(1e-6)  # threads take turns at every operation
        with ThreadPoolExecutor(8) as pool:
            together = list(pool.map(lambda each: generate(shared, *each, max_new_tokens=24, chat=False).ids, asked))
    finally:
        sys.setswitchinterval(interval)
    assert together == alone
    assert (changed, torch.get_num_threads()) == ([], threads)


def test_sampling_follows_the_seed_and_options_are_those_of_the_command(pair) -> None:
    def sample(**options):
        return generate(pair, PROMPT, max_new_tokens=16, temperature=1.0, **options).ids

    assert sample(seed=3) == sample(seed=3)
    assert len({tuple(sample(seed=seed)) for seed in range(4)}) > 1
    assert sample(seed=3, top_k=1) == generate(pair, PROMPT, max_new_tokens=16).ids
    assert not generate(pair, PROMPT, "ears", beta=0.3, max_new_tokens=4).lossless


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "vanila"}, "did you mean 'vanilla'"),
        ({"method": "lookahead", "rule": "ears"}, "lookahead drafts trees, which ears does not verify"),
        ({"bta": 0.1}, "unknown option 'bta'; did you mean 'beta'"),
        ({"temperature": None}, "temperature is null, expected a value"),
        ({"beta": -1}, "beta is -1, expected a value v with v>=0"),
        ({"draft": "other"}, "unknown option 'draft'"),  # the pair has it
        ({"prompt": None}, "the prompt is None, expected a text"),
    ],
)
def test_mistakes_are_user_errors(pair, options, message) -> None:
    assert len(repr(pair).replace(pair.target_name, "")) < 200
    with pytest.raises(UserError, match=message):
        generate(pair, **{"prompt": PROMPT} | options)


def test_bench_returns_the_rows_of_the_report_and_writes_nothing(pair, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    rows = bench(pair, ["vanilla:draft_length=2"], ["open"], limit=1, repeats=1, max_new_tokens=6, threads=1)
    assert [row["name"] for row in rows] == ["autoregressive", "generate", "vanilla draft_length=2"]
    assert all(row["identical_to_target"] for row in rows)
    assert not list(tmp_path.iterdir())
    assert capsys.readouterr().out == ""


def test_profile_predicts_every_draft_length_and_needs_a_draft(pair) -> None:
    found = profile(pair, ["open"], limit=1, max_new_tokens=8, longest=2, threads=1)
    assert [row["draft_length"] for row in found.lengths] == [1, 2]
    with pytest.raises(UserError, match="draft"):
        profile(load(pair.target_name))


def test_one_string_where_several_are_taken_is_no_list_of_its_letters(pair) -> None:
    piece = generate(pair, PROMPT, max_new_tokens=24, ignore_eos=True).text[3:7]
    texts = [generate(pair, PROMPT, max_new_tokens=24, ignore_eos=True, stop=stop).text for stop in (piece, [piece])]
    assert texts[0] == texts[1]
    with pytest.raises(UserError, match="unknown suite 'nonsense'"):
        bench(pair, suite="nonsense")
