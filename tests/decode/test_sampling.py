"""Logits become probabilities as in transformers' own generation, on drafted prefixes too."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from families import VOCAB
from scripted import Oracle
from torch import Tensor
from transformers import (
    PreTrainedModel,
    TopPLogitsWarper,
)

from decode.drafters.draft_model import ModelDrafter
from decode.errors import UserError
from decode.loop import Method, steps
from decode.methods import MethodInputs, build
from decode.models.choose_runner import open_runner
from decode.sampling import LogitsWarper, TopP, TorchRng, argmax, one_hot
from decode.stopping import StopRule
from decode.trace import Trace

PROMPT = [3, 7, 1, 9, 3, 7, 22, 3]
OFF = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "repetition_penalty": 1.0}
SETTINGS: list[dict[str, float | int]] = [
    {},
    {"temperature": 0.6},
    {"top_k": 5},
    {"top_p": 0.7},
    {"min_p": 0.1},
    {"repetition_penalty": 1.8},
    {"temperature": 1.7, "top_k": 12, "top_p": 0.85},
    {"temperature": 0.8, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 0.7},
    {"temperature": 1.4, "top_k": 20, "top_p": 0.95, "min_p": 0.02, "repetition_penalty": 1.3},
]


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
    p = warp(logits, [text[:i] for i in range(len(PROMPT), len(text))])
    assert torch.equal(p > 0, wanted > 0)
    assert torch.allclose(p, wanted, atol=1e-5)
    assert ((wanted > 0).sum(-1) < VOCAB).any() == bool({"top_k", "top_p", "min_p"} & settings.keys())


@pytest.mark.parametrize("way", ["perfect", "tree", "model"])
@pytest.mark.parametrize("settings", SETTINGS[-4:], ids=str)
def test_drafted_prefixes_are_warped_as_generate_would_warp_them(settings: dict, way: str, tiny) -> None:
    """Every row that verification looks at is what generate would compute after that node's own text."""
    model = tiny("llama")
    warp = LogitsWarper(**{"temperature": 1.0} | settings)
    text, _ = generated(model, settings, 16)
    drafter = ModelDrafter(open_runner(model), warp, VOCAB) if way == "model" else Oracle(text, way, VOCAB)
    ids = list(PROMPT)
    drafted = 0
    system = Method("", drafter, StopRule(4))
    for result in steps(open_runner(model), system, warp, PROMPT, max_new_tokens=16, rng=TorchRng(2)):
        drafted += result.drafted
        for node in range(-1, result.drafted):
            before = result.draft.text_before(ids, node)
            assert torch.allclose(
                result.probs[node + 1], warp(next_logits(model, before)[None], [before])[0], atol=1e-4
            )
        if result.draft.probs is not None:  # the draft's own distributions, of the same model, saw the same prefixes
            assert torch.allclose(result.draft.probs, result.probs[:-1], atol=1e-4)
        ids += result.new
    assert drafted > 10


@torch.inference_mode()
def next_logits(model: PreTrainedModel, ids: list[int]) -> Tensor:
    return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1]


def test_temperature_zero_is_one_hot_at_the_argmax() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0], [-1.0, -3.0, -0.5]])
    assert LogitsWarper().greedy
    assert LogitsWarper()(logits).tolist() == [[0, 1, 0], [0, 0, 1]]
    assert LogitsWarper(top_k=2, top_p=0.5)(logits).tolist() == [[0, 1, 0], [0, 0, 1]]
    assert LogitsWarper(repetition_penalty=4.0)(logits, [[1], [2, 0]]).tolist() == [[0, 0, 1], [0, 0, 1]]


def test_low_precision_logits_are_warped_in_float32_and_double_stays_double() -> None:
    logits = torch.randn(3, 8)
    for dtype in (torch.bfloat16, torch.float16):
        assert LogitsWarper(temperature=0.7)(logits.to(dtype)).dtype == torch.float32
    assert LogitsWarper(temperature=0.7)(logits.double()).dtype == torch.float64
    assert LogitsWarper()(logits.bfloat16()).dtype == torch.float32


def test_a_warp_leaves_the_logits_it_was_given_alone() -> None:
    logits = torch.randn(2, 8)
    before = logits.clone()
    LogitsWarper(temperature=0.5, top_k=3, top_p=0.8, min_p=0.1, repetition_penalty=2.0)(logits, [[1, 2], [3]])
    LogitsWarper(repetition_penalty=2.0)(logits, [[1, 2], [3]])
    assert torch.equal(logits, before)


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"temperature": 1e-40},
        {"top_k": -1},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"min_p": 1.5},
        {"repetition_penalty": 0.0},
    ],
    ids=str,
)
def test_settings_out_of_range_are_refused_by_name(settings: dict) -> None:
    (name,) = settings
    with pytest.raises(UserError, match=name):
        LogitsWarper(**settings)


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


@pytest.mark.parametrize("penalty", [1.0, 1.8])
def test_greedy_rounds_have_the_distributions_that_they_were_decided_without(penalty: float, tiny) -> None:
    model, warp = tiny("llama"), LogitsWarper(repetition_penalty=penalty)
    parts = MethodInputs(open_runner(model), warp, open_runner(tiny("llama", seed=2)))
    for rule, exact in (("exact", True), ("ears", False)):
        ids, overlaps = list(PROMPT), []
        trace = Trace()
        system = build("vanilla", parts, rule=rule)
        for result in steps(parts.target, system, warp, PROMPT, max_new_tokens=20, trace=trace):
            before = [result.draft.text_before(ids, i) for i in range(-1, len(result.draft))]
            assert torch.equal(result.probs, warp(result.logits, before))
            assert (result.draft.probs is None) == (exact and penalty == 1) or not len(result.draft)
            rows = result.probs[: result.tested].gather(1, result.draft.tokens[: result.tested, None])
            overlaps += rows.flatten().tolist()
            ids += result.new
        assert torch.cat([torch.as_tensor(part) for part in trace.overlap if part is not None]).tolist() == overlaps
        assert ids == model.generate(
            torch.tensor([PROMPT]), do_sample=False, max_new_tokens=20, pad_token_id=0, repetition_penalty=penalty
        )[0].tolist()  # fmt: skip


class Counting(LogitsWarper):
    """Counts the rows it is asked for."""

    rows = 0

    def __call__(self, logits: Tensor, prefixes: Sequence[Sequence[int]] | None = None) -> Tensor:
        self.rows += len(logits)
        return super().__call__(logits, prefixes)


@pytest.mark.parametrize("penalty", [1.0, 1.3])
def test_of_a_copy_only_the_rows_that_sampling_reaches_are_warped(penalty: float, tiny) -> None:
    warp = Counting(temperature=0.4, top_p=0.9, repetition_penalty=penalty)
    system = build("prompt-lookup", MethodInputs(open_runner(tiny("llama")), warp))
    ids, drafted = list(PROMPT), 0
    for result in steps(open_runner(tiny("llama")), system, warp, PROMPT * 3, max_new_tokens=30):
        assert warp.rows == result.accepted + 1
        before = [result.draft.text_before(PROMPT * 2 + ids, i) for i in range(-1, len(result.draft))]
        assert torch.equal(result.probs, warp(result.logits, before))
        ids, drafted, warp.rows = ids + result.new, drafted + result.drafted, 0
    assert drafted > 0


@pytest.mark.parametrize("top_p", [1e-9, 0.05, 0.5, 0.9, 0.999])
@pytest.mark.parametrize("rows", ["peaked", "flat", "equal", "one", "ruled out", "rounded", "nan"])
def test_the_nucleus_is_that_of_transformers_without_sorting_the_vocabulary(rows: str, top_p: float) -> None:
    logits = torch.randn(6, 500, generator=torch.Generator().manual_seed(1)).double()
    if rows == "peaked":
        logits *= 5
    elif rows == "equal":
        logits[:, ::2] = 1.0
    elif rows == "one":
        logits[:, 3] = 100.0
    elif rows == "ruled out":
        logits[:, 100:] = -torch.inf
    elif rows == "rounded":  # many of them equal
        logits = logits.bfloat16().double()
    elif rows == "nan":
        logits[2, 7] = torch.nan
    wanted, found = TopPLogitsWarper(top_p)(None, logits), TopP(top_p)(None, logits)
    if rows in ("equal", "rounded"):  # which of equal ones stay depends on transformers' unstable sort
        assert ((found == logits) | torch.isinf(found)).all()
        wanted, found = wanted.sort(-1).values, found.sort(-1).values
    assert torch.equal(found.nan_to_num(), wanted.nan_to_num())
    if rows not in ("nan", "one"):
        assert torch.isinf(wanted).any()
