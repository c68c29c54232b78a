"""Logits become probabilities as in transformers' own generation, on drafted prefixes too.

And the real source of chance: frequencies of the loop and of its draws against the exact distributions.
"""

from collections import Counter
from typing import Any

import pytest
import torch
from enumeration import Distribution, Experiment, ScriptedRunner, autoregressive_distribution, random_table
from families import VOCAB
from heads import make_head
from reading import rounds_of
from scipy.stats import chi2
from scripted import RandomTree
from torch import Tensor
from transformers import PreTrainedModel, TopPLogitsWarper

from decode.core import sampling
from decode.core.sampling import LogitsWarper, Prefixes, TopP, TorchRng, argmax, inverse, one_hot
from decode.core.stop import Fixed, StopRule, token_probability
from decode.core.verify import Ears
from decode.drafters.model import ModelDrafter
from decode.errors import UserError
from decode.loop import Method, decode
from decode.methods import MethodInputs, build
from decode.models.check import open_runner
from decode.models.heads.runner import HeadRunner

PROMPT = [3, 7, 1, 9, 3, 7, 22, 3]
OFF = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "repetition_penalty": 1.0}
SETTINGS: list[dict[str, float | int]] = [
    {"temperature": 0.6},
    {"top_k": 5},
    {"top_p": 0.7},
    {"min_p": 0.1},
    {"repetition_penalty": 1.8},
    {"temperature": 1.7, "top_k": 12, "top_p": 0.85},
    {"temperature": 0.8, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 0.7},
    {"temperature": 1.4, "top_k": 20, "top_p": 0.95, "min_p": 0.02, "repetition_penalty": 1.3},
]


@pytest.mark.parametrize(("u", "token"), [(0.0, 1), (0.2, 1), (0.25, 3), (1 - 2**-53, 3)])
def test_a_token_without_weight_is_never_drawn_not_even_where_the_share_ends_with_the_token_before(u, token) -> None:
    weights = torch.tensor([[0.0, 1.0, 0.0, 3.0]])
    assert inverse(weights, torch.tensor([[u]], dtype=torch.float64)).tolist() == [token]


def generated(model: PreTrainedModel, settings: dict[str, float | int], new: int) -> tuple[list[int], Tensor]:
    """A sampled text of transformers, and the probabilities ``[new, vocab]`` that it was drawn from."""
    torch.manual_seed(0)
    out = model.generate(
        torch.tensor([PROMPT]),
        do_sample=True,
        max_new_tokens=new,
        output_scores=True,
        return_dict_in_generate=True,
        pad_token_id=0,
        **{**OFF, **settings},
    )
    return out.sequences[0].tolist(), torch.cat(out.scores).softmax(-1)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_probabilities_are_those_of_generate(settings: dict, tiny) -> None:
    model = tiny("llama")
    text, wanted = generated(model, settings, 12)
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([text])).logits[0, len(PROMPT) - 1 : -1]
    warp = LogitsWarper(**{"temperature": 1.0} | settings)
    p = warp(logits, Prefixes.of(text[:i] for i in range(len(PROMPT), len(text))))
    assert torch.equal(p > 0, wanted > 0)
    assert torch.allclose(p, wanted, atol=1e-5)
    assert ((wanted > 0).sum(-1) < VOCAB).any() == bool({"top_k", "top_p", "min_p"} & settings.keys())


def test_low_precision_logits_are_warped_in_float32_and_double_stays_double() -> None:
    logits = torch.randn(3, 8)
    for dtype in (torch.bfloat16, torch.float16):
        assert LogitsWarper(temperature=0.7)(logits.to(dtype)).dtype == torch.float32
    assert LogitsWarper(temperature=0.7)(logits.double()).dtype == torch.float64
    assert LogitsWarper()(logits.bfloat16()).dtype == torch.float32


def test_a_warp_leaves_the_logits_it_was_given_alone() -> None:
    logits = torch.randn(2, 8)
    before = logits.clone()
    for others in ({}, {"temperature": 0.5, "top_k": 3, "top_p": 0.8, "min_p": 0.1}):
        LogitsWarper(repetition_penalty=2.0, **others)(logits, Prefixes.of([[1, 2], [3]]))
    assert torch.equal(logits, before)


def test_settings_out_of_range_are_refused_by_name() -> None:
    wrong = {"temperature": [-0.1, float("nan"), 1e-40], "top_k": [-1], "top_p": [0.0, 1.1], "min_p": [1.5]}
    for name, values in (wrong | {"repetition_penalty": [0.0]}).items():
        for value in values:
            with pytest.raises(UserError, match=name):
                LogitsWarper(**{name: value})


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_of_equally_probable_tokens_the_first_is_taken_in_every_precision(dtype: torch.dtype) -> None:
    rows = torch.randn(5, 40, generator=torch.Generator().manual_seed(0)).to(dtype)
    rows[0, 7] = rows[0, 31] = 9.0
    rows[1] = -torch.inf
    assert argmax(rows).tolist() == rows.double().argmax(-1).tolist()
    assert argmax(rows[0]).item() == 7
    distributions = one_hot(argmax(rows), rows)
    assert distributions.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert torch.equal(distributions, LogitsWarper()(rows))


@pytest.mark.parametrize("method", ["vanilla", "eagle-tree", "autoregressive"])
def test_a_repetition_penalty_takes_what_the_text_grew_by(method: str, tiny, monkeypatch) -> None:
    """After the first round no more ids of a text are looked at than it has written since."""
    target, looked = tiny("llama"), list[int]()
    upload = sampling.upload

    def noted(values: Any, *given: Any) -> Tensor:
        looked.append(len(values[1]) if isinstance(values, tuple) else 0)
        return upload(values, *given)

    monkeypatch.setattr(sampling, "upload", noted)
    runner, warp = open_runner(target), LogitsWarper(repetition_penalty=1.3)
    draft = HeadRunner(make_head(target, 3), target) if method == "eagle-tree" else open_runner(tiny("llama", seed=3))
    system = build(method, MethodInputs(runner, warp, None if method == "autoregressive" else draft))
    grown = 3 * len(PROMPT)
    for result in rounds_of(runner, system, warp, PROMPT * 3, max_new_tokens=20):
        assert sum(looked) == grown
        looked.clear()
        grown = len(result.new)


@pytest.mark.parametrize("top_p", [1e-9, 0.05, 0.5, 0.9, 0.999])
@pytest.mark.parametrize("rows", ["peaked", "flat", "equal", "one", "ruled out", "rounded", "nan"])
def test_the_nucleus_is_that_of_transformers_without_sorting_the_vocabulary(rows: str, top_p: float) -> None:
    logits = torch.randn(6, 500, generator=torch.Generator().manual_seed(1)).double()
    changed = {"equal": (slice(0, None, 2), 1.0), "one": (3, 100.0), "ruled out": (slice(100, None), -torch.inf)}
    if rows == "peaked":
        logits *= 5
    elif rows == "rounded":  # many of them equal
        logits = logits.bfloat16().double()
    elif rows == "nan":
        logits[2, 7] = torch.nan
    elif rows in changed:
        logits[:, changed[rows][0]] = changed[rows][1]
    wanted, found = TopPLogitsWarper(top_p)(None, logits), TopP(top_p)(None, logits)
    if rows in ("equal", "rounded"):  # which of equal ones stay depends on transformers' unstable sort
        assert ((found == logits) | torch.isinf(found)).all()
        wanted, found = wanted.sort(-1).values, found.sort(-1).values
    assert torch.equal(found.nan_to_num(), wanted.nan_to_num())
    if rows not in ("nan", "one"):
        assert torch.isinf(wanted).any()


def p_value(counts: Counter, distribution: Distribution) -> float:
    """Pearson's chi-square with cells of less than five expected texts merged."""
    total = sum(counts.values())
    cells = sorted((w * total, counts[text]) for text, w in distribution.items())
    assert sum(seen for _, seen in cells) == total, "a text that the target cannot write"
    merged: list[list[float]] = []
    expected = seen = 0.0
    for e, s in cells:
        expected, seen = expected + e, seen + s
        if expected >= 5:
            merged.append([expected, seen])
            expected = seen = 0.0
    merged[-1][0] += expected
    merged[-1][1] += seen
    statistic = sum((s - e) ** 2 / e for e, s in merged)
    assert len(merged) > 3
    return float(chi2.sf(statistic, len(merged) - 1))


def sample(experiment: Experiment, system: Method, texts: int) -> tuple[Counter, int]:
    """How often each text came out, and the rounds it took."""
    rng, target = TorchRng(0), experiment.target
    counts: Counter = Counter()
    rounds = 0
    for _ in range(texts):
        out = decode(target, system, experiment.warp, experiment.prompt, max_new_tokens=experiment.tokens, rng=rng)
        counts[tuple(out.new_ids)] += 1
        rounds += len(out.rounds)
    return counts, rounds


def test_two_thousand_rounds_have_the_targets_distribution() -> None:
    warp = LogitsWarper(temperature=0.8)
    target = ScriptedRunner(random_table(1, 4), 4)
    draft = ScriptedRunner(random_table(3, 4), 4)
    experiment = Experiment(target, warp, [0, 2, 1], 3)
    distribution = autoregressive_distribution(experiment.next_distribution, experiment.prompt, 3)
    model = Method("model", ModelDrafter(draft, warp, 4), StopRule(3, token_probability, threshold=Fixed(0.3)))
    counts, rounds = sample(experiment, model, 1_200)
    assert rounds >= 2_000
    assert p_value(counts, distribution) > 1e-4
    assert p_value(sample(experiment, Method("tree", RandomTree(4), StopRule()), 400)[0], distribution) > 1e-4
    relaxed = Method("ears", ModelDrafter(draft, warp, 4), StopRule(3), Ears(0.8))
    assert p_value(sample(experiment, relaxed, 600)[0], distribution) < 1e-4  # the test has the power to see a bias


def test_draws_have_the_weights_they_were_given() -> None:
    weights = torch.tensor([0.0, 3.0, 0.5, 0.0, 1.5, 0.0])
    rngs = [TorchRng(1), TorchRng(2)]
    numbers = TorchRng.together(rngs, [10_000, 10_000], torch.device("cpu"))
    distribution = {(i,): w / 5 for i, w in enumerate(weights.tolist()) if w}
    drawn = [numbers.draw(weights.expand(2, -1), step).tolist() for step in range(10_000)]
    for counts in (Counter((i,) for i in text) for text in zip(*drawn)):
        assert counts.keys() <= distribution.keys()
        expected = {key: w * sum(counts.values()) for key, w in distribution.items()}
        assert chi2.sf(sum((counts[k] - e) ** 2 / e for k, e in expected.items()), 2) > 1e-4


def test_first_rejections_are_geometric_in_the_acceptance_probabilities() -> None:
    accept = torch.tensor([0.9, 0.5, 1.0, 0.25])
    numbers = TorchRng.together([TorchRng(i) for i in range(8000)], [4] * 8000, torch.device("cpu"))
    counts = Counter((m,) for m in numbers.accepted(accept.expand(8000, -1), [4] * 8000).tolist())
    distribution = {(0,): 0.1, (1,): 0.45, (3,): 0.45 * 0.75, (4,): 0.45 * 0.25}
    assert p_value(counts, distribution) > 1e-4
