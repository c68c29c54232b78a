"""Self-speculation is lossless, shares the target's cache, and reads no layer twice."""

from __future__ import annotations

import pytest
import torch
from enumeration import Experiment
from reading import Reader

from decode.drafters.early_exit import EarlyExitDrafter
from decode.errors import UserError
from decode.loop import Method, Sequence, decode, run, steps
from decode.methods import MethodInputs, build
from decode.models.choose_runner import open_runner
from decode.models.families import FAMILIES
from decode.models.fast_forward import FastForward, LayerSubset
from decode.models.fast_runner import FastRunner, fast_runner, self_speculating
from decode.sampling import LogitsWarper, TorchRng
from decode.stopping import Fixed, StopRule, max_probability, token_probability

WALKED = [
    "llama",
    "llama-mha",
    "llama-tied",
    "mistral",
    "qwen2-sliding",
    "qwen3",
    "gemma3",
    "phi",
    "gpt_neox",
    "gpt_neox-sequential",
]
DEPTH = 4
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
STOPS = {
    "length": lambda: StopRule(3),
    "token": lambda: StopRule(5, token_probability, threshold=Fixed(0.5)),
    "product": lambda: StopRule(5, token_probability, product=True, threshold=Fixed(0.3)),
    "refuse": lambda: StopRule(5, max_probability, threshold=Fixed(0.45), refuse=True),
}
SUBSETS = {
    "mlp of the first": ([], [0]),
    "attention of the second": ([1], []),
    "mixed": ([1, 2], [2, 3]),
    "last layer": ([3], [3]),
}


def open_deep(tiny, family: str, **options) -> FastRunner:
    """Without `open_runner`'s comparison: transformers' norms compute in float32 even for float64 weights."""
    return fast_runner(tiny(family, num_hidden_layers=DEPTH, **options))


def system_of(runner: FastRunner, part: LayerSubset, stop: StopRule, warp: LogitsWarper) -> Method:
    return Method("self", EarlyExitDrafter(runner, warp, part), stop)


@pytest.mark.parametrize("family", WALKED)
def test_greedy_text_is_that_of_generate_for_every_exit_and_subset(tiny, family: str) -> None:
    model = tiny(family, num_hidden_layers=DEPTH)
    runner = open_deep(tiny, family)
    wanted = model.generate(torch.tensor([PROMPT]), max_new_tokens=24, do_sample=False)[0].tolist()
    parts = [LayerSubset(e) for e in range(1, DEPTH)] + [LayerSubset.skipping(DEPTH, *s) for s in SUBSETS.values()]
    for part in parts:
        for stop in STOPS.values() if family == "llama" else [STOPS["product"]]:
            out = decode(
                runner, system_of(runner, part, stop(), LogitsWarper()), LogitsWarper(), PROMPT, max_new_tokens=24
            )
            assert out.ids == wanted, (family, part)


@pytest.mark.parametrize("stop", STOPS)
@pytest.mark.parametrize("exit_layer", [1, 2, 3])
@torch.inference_mode()
def test_the_output_has_the_targets_distribution_for_every_exit_and_stop_rule(tiny, exit_layer: int, stop: str) -> None:
    warp = LogitsWarper(temperature=1.3)
    runner = open_deep(tiny, "llama", vocab_size=3, dtype=torch.float64)
    experiment = Experiment(runner, warp, [0, 2, 1], tokens=3)
    assert experiment.bias(system_of(runner, LayerSubset(exit_layer), STOPS[stop](), warp)) < 1e-12
    assert max(experiment.drafted) > 0


@pytest.mark.parametrize("subset", SUBSETS)
@torch.inference_mode()
def test_the_output_has_the_targets_distribution_for_layer_subsets(tiny, subset: str) -> None:
    warp = LogitsWarper(temperature=1.3)
    runner = open_deep(tiny, "gpt_neox", vocab_size=3, dtype=torch.float64)
    experiment = Experiment(runner, warp, [0, 2, 1], tokens=3)
    part = LayerSubset.skipping(DEPTH, *SUBSETS[subset])
    assert experiment.bias(system_of(runner, part, STOPS["token"](), warp)) < 1e-12


@pytest.mark.parametrize("family", ["llama", "mistral", "phi"])
@pytest.mark.parametrize(
    "part", [LayerSubset(1), LayerSubset(3), LayerSubset.skipping(DEPTH, [1], [2])], ids=["1", "3", "subset"]
)
def test_the_cache_is_the_texts_after_every_round_and_gives_the_same_logits(
    tiny, family: str, part: LayerSubset
) -> None:
    runner, warp = open_deep(tiny, family), LogitsWarper(temperature=1.5)
    ids, lengths = list(PROMPT), set()
    method = system_of(runner, part, StopRule(4, token_probability, threshold=Fixed(0.2)), warp)
    sequence = Sequence(runner, method, warp, PROMPT, max_new_tokens=30, rng=TorchRng(0))
    fresh = Reader(open_deep(tiny, family))
    for _, result in run(runner, method, [sequence]):
        ids += result.new
        lengths.add((result.drafted, result.accepted))
        cache = sequence.cache
        assert (cache.length, cache.ahead) == (len(ids) - 1, [])
        with torch.inference_mode():
            seen = runner.forward([cache], [torch.tensor(ids[-1:])]).logits[0]
        cache.truncate(len(ids) - 1)
        fresh.truncate(0)
        torch.testing.assert_close(seen, fresh.read(ids)[-1], atol=2e-4, rtol=1e-4)
    assert len(lengths) > 3


def test_verification_runs_the_early_layers_for_one_token_only(tiny, monkeypatch) -> None:
    runner = open_deep(tiny, "llama")
    seen: list[tuple[int, int, int]] = []
    run = FastForward.run

    def spy(self, x, first, last, *rest):
        seen.append((len(x), first, last))
        return run(self, x, first, last, *rest)

    monkeypatch.setattr(FastForward, "run", spy)
    next(iter(steps(runner, system_of(runner, LayerSubset(2), StopRule(3), LogitsWarper()), LogitsWarper(), PROMPT)))
    assert seen == [(7, 0, 4), (1, 0, 2), (1, 0, 2), (1, 0, 2), (1, 0, 2), (4, 2, 4)]


def test_the_stop_rule_sees_the_state_that_the_exits_head_saw(tiny) -> None:
    model = tiny("llama", num_hidden_layers=DEPTH)
    runner = open_deep(tiny, "llama")
    states: list[torch.Tensor] = []

    def watch(step) -> float:
        states.append(step.hidden)
        return 1.0

    draft = []
    for result in steps(
        runner, system_of(runner, LayerSubset(2), StopRule(3, watch), LogitsWarper()), LogitsWarper(), PROMPT
    ):
        draft = result.draft.tokens.tolist()
        break
    with torch.no_grad():
        out = model(torch.tensor([PROMPT + draft[:-1]]), output_hidden_states=True)
        wanted = model.model.norm(out.hidden_states[2])[0, len(PROMPT) - 1 :]
    torch.testing.assert_close(torch.stack(states), wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("layer", [-1, 0, DEPTH, 99])
def test_an_exit_outside_the_model_is_refused_with_the_layers_there_are(tiny, layer: int) -> None:
    runner = open_deep(tiny, "llama")
    with pytest.raises(UserError, match=rf"exit_layer is {layer}; .* 1 to {DEPTH - 1}"):
        LayerSubset.early_exit(runner.depth, layer)
    with pytest.raises(UserError, match="cannot be skipped"):
        LayerSubset.skipping(DEPTH, [0, DEPTH], [])


@pytest.mark.parametrize("family", ["gpt2", "codegen", "opt", "gemma2"])
def test_families_whose_layers_cannot_be_walked_are_named(tiny, family: str) -> None:
    with pytest.raises(UserError, match=rf"\({family}\) cannot draft with its own layers.*{FAMILIES[0]}"):
        build("layerskip", MethodInputs(open_runner(tiny(family)), LogitsWarper()))
    assert self_speculating(open_runner(tiny("llama", num_hidden_layers=DEPTH))).depth == DEPTH


def test_a_drafted_end_of_text_is_kept_and_ends_the_draft(tiny) -> None:
    runner = open_deep(tiny, "llama")
    plain = decode(
        runner, build("autoregressive", MethodInputs(runner, LogitsWarper())), LogitsWarper(), PROMPT, max_new_tokens=24
    )
    end = plain.new_ids[10]
    system = system_of(runner, LayerSubset(3), StopRule(12), LogitsWarper())
    out = decode(runner, system, LogitsWarper(), PROMPT, max_new_tokens=24, stop_ids={end})
    assert out.new_ids == plain.new_ids[: plain.new_ids.index(end) + 1]
    for result in steps(runner, system, LogitsWarper(), PROMPT, max_new_tokens=24, stop_ids={end}):
        assert end not in result.draft.tokens.tolist()[:-1]
