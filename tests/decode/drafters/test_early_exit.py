"""Self-speculation is lossless, shares the target's cache, and reads no layer twice."""

from __future__ import annotations

import pytest
import torch
from enumeration import Experiment
from greedy import generate
from reading import rounds_of

from decode.core.sampling import LogitsWarper
from decode.core.stop import Fixed, StopRule, max_probability, token_probability
from decode.drafters.model import EarlyExitDrafter
from decode.errors import UserError
from decode.loop import Method, decode
from decode.methods import MethodInputs, build
from decode.models.api import Read
from decode.models.check import open_runner
from decode.models.fast.forward import FastForward, FastRunner, fast_runner, self_speculating
from decode.models.fast.layout import FAMILIES

WALKED = [
    "llama", "llama-mha", "llama-tied", "mistral", "qwen2-sliding", "qwen3", "gemma3", "phi", "gpt_neox",
    "gpt_neox-sequential",
]  # fmt: skip
DEPTH = 4
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
STOPS = {
    "length": lambda: StopRule(3),
    "token": lambda: StopRule(5, token_probability, threshold=Fixed(0.5)),
    "product": lambda: StopRule(5, token_probability, product=True, threshold=Fixed(0.3)),
    "refuse": lambda: StopRule(5, max_probability, threshold=Fixed(0.45), refuse=True),
}


def open_deep(tiny, family: str, **options) -> FastRunner:
    """Without `open_runner`'s comparison: transformers' norms compute in float32 even for float64 weights."""
    return fast_runner(tiny(family, num_hidden_layers=DEPTH, **options))


def system_of(runner: FastRunner, exit_layer: int, stop: StopRule, warp: LogitsWarper) -> Method:
    return Method("self", EarlyExitDrafter(runner, warp, exit_layer), stop)


@pytest.mark.parametrize("family", WALKED)
def test_greedy_text_is_that_of_generate_for_every_exit(tiny, family: str) -> None:
    model, warp = tiny(family, num_hidden_layers=DEPTH), LogitsWarper()
    runner = open_deep(tiny, family)
    wanted = generate(model, PROMPT, 24)
    for exit_layer in range(1, DEPTH):
        for stop in STOPS.values() if family == "llama" else [STOPS["product"]]:
            out = decode(runner, system_of(runner, exit_layer, stop(), warp), warp, PROMPT, max_new_tokens=24)
            assert out.ids == wanted, (family, exit_layer)


@pytest.mark.parametrize("stop", STOPS)
@pytest.mark.parametrize("exit_layer", [1, 2, 3])
@torch.inference_mode()
def test_the_output_has_the_targets_distribution_for_every_exit_and_stop_rule(tiny, exit_layer: int, stop: str) -> None:
    warp = LogitsWarper(temperature=1.3)
    runner = open_deep(tiny, "llama", vocab_size=3, dtype=torch.float64)
    experiment = Experiment(runner, warp, [0, 2, 1], tokens=3)
    assert experiment.bias(system_of(runner, exit_layer, STOPS[stop](), warp)) < 1e-12
    assert max(experiment.drafted) > 0


def test_verification_runs_the_early_layers_for_one_token_only(tiny, monkeypatch) -> None:
    runner = open_deep(tiny, "llama")
    seen = []
    run = FastForward.run

    def spy(self, x, first, last, *rest):
        seen.append((len(x), first, last))
        return run(self, x, first, last, *rest)

    monkeypatch.setattr(FastForward, "run", spy)
    next(iter(rounds_of(runner, system_of(runner, 2, StopRule(3), LogitsWarper()), LogitsWarper(), PROMPT)))
    assert seen == [(7, 0, 4), (1, 0, 2), (1, 0, 2), (1, 0, 2), (1, 0, 2), (4, 2, 4)]


def test_what_was_read_ahead_is_forgotten_with_a_rollback(tiny) -> None:
    runner = open_deep(tiny, "llama")
    other = torch.tensor([9, 2, 5])
    with torch.inference_mode():
        cache, fresh = runner.new_cache(), runner.new_cache()
        for held in (cache, fresh):
            runner.forward([Read(held, torch.tensor(PROMPT))])
        runner.forward([Read(cache, torch.tensor([4, 7]))], last=1, exit_layer=2)
        cache.truncate(len(PROMPT))
        logits, wanted = (runner.forward([Read(held, other)]).logits for held in (cache, fresh))
    torch.testing.assert_close(logits, wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("layer", [-1, 0, DEPTH, 99])
def test_an_exit_outside_the_model_is_refused_with_the_layers_there_are(tiny, layer: int) -> None:
    runner = open_deep(tiny, "llama")
    with pytest.raises(UserError, match=rf"exit_layer is {layer}; .* 1 to {DEPTH - 1}"):
        EarlyExitDrafter(runner, LogitsWarper(), layer)


@pytest.mark.parametrize("family", ["gpt2", "codegen", "opt", "gemma2"])
def test_families_whose_layers_cannot_be_walked_are_named(tiny, family: str) -> None:
    with pytest.raises(UserError, match=rf"\({family}\) cannot draft with its own layers.*{FAMILIES[0]}"):
        build("layerskip", MethodInputs(open_runner(tiny(family)), LogitsWarper()))
    assert self_speculating(open_runner(tiny("llama", num_hidden_layers=DEPTH))).depth == DEPTH
