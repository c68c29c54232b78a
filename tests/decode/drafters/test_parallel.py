"""Language models that draft in one forward with mask tokens: what they draft, of batches, by teacher forcing."""

from typing import Any

import pytest
import torch
from architectures import build_architecture
from families import CONTEXT, VOCAB, resembling
from greedy import GREEDY, NEW, PROMPTS, generate, together
from reading import watched

from decode.core.sampling import LogitsWarper, TorchRng
from decode.core.stop import StopRule
from decode.drafters.model import ParallelDrafter
from decode.errors import UserError
from decode.loop import Method, decode_texts
from decode.methods import MethodInputs, build, round_costs
from decode.models.check import open_draft_runner, open_runner
from decode.models.fast.forward import FastRunner
from decode.models.texts import teacher_forced
from decode.options import MethodOptions

MASK = 33
PATHS = [("llama", True), ("mistral", False), ("gpt2", False), ("gemma3", True)]
"""Families with their runners, among them such with attention windows."""


def parallel(model: Any, noise: float = 0.15) -> Any:
    draft = resembling(model, noise)
    draft.config.pard_token = MASK
    return draft


@torch.inference_mode()
def slots(draft: Any, ids: list[int], count: int) -> torch.Tensor:
    """Logits of the slots after a text, by one forward of transformers alone."""
    return draft(input_ids=torch.tensor([[*ids, *[MASK] * (count - 1)]]), use_cache=False).logits[0, -count:]


@pytest.mark.parametrize(("family", "fast"), PATHS)
def test_every_draft_is_that_of_a_fresh_forward_over_its_text_and_masks(family: str, fast: bool, tiny) -> None:
    """Round after round, for several texts at once, of which some end and one fills the context."""
    model, warp, drafted = tiny(family), LogitsWarper(1.0), 0
    draft, prompts = parallel(model), [*PROMPTS, [5], [(7 * i * i) % VOCAB for i in range(CONTEXT - 5)]]
    runner, small = open_runner(model, fast=fast), open_runner(draft, fast=fast)
    assert isinstance(small, FastRunner) == fast

    def look(requests: Any, drafts: Any) -> None:
        nonlocal drafted
        for request, probs, n in zip(requests, drafts.probs if max(drafts.lengths) else (), drafts.lengths):
            if n:
                assert request.state.cache.length == len(request.ids)
                wanted = slots(draft, request.ids, n).softmax(-1)
                torch.testing.assert_close(probs[:n], wanted, rtol=1e-3, atol=1e-4)
                drafted += n

    system = Method("", watched(ParallelDrafter(small, warp, VOCAB, MASK), look), StopRule(4))
    rngs = [TorchRng(i) for i in range(len(prompts))]
    written = decode_texts(runner, system, warp, prompts, rngs=rngs, max_new_tokens=16, batch_size=3)
    assert drafted > 30
    assert sum(r.accepted for text in written for r in text.rounds) > 0


@pytest.mark.parametrize(("family", "fast"), PATHS)
def test_methods_draft_so_by_the_draft_s_pard_token_and_write_what_generate_does(family: str, fast: bool, tiny) -> None:
    model = tiny(family)
    runner, draft = open_runner(model, fast=fast), open_runner(parallel(model), fast=fast)
    inputs = MethodInputs(runner, GREEDY, draft, options=MethodOptions(draft_length=4))
    token, block = round_costs(inputs).prices(1)
    assert (token, block > 0) == (0, True)
    wanted = [generate(model, prompt) for prompt in PROMPTS]
    for method in ("vanilla", "hf-dynamic", "hybrid"):
        system = build(method, inputs)
        assert isinstance(getattr(system.drafter, "head", system.drafter), ParallelDrafter)
        found = together(runner, system, PROMPTS, max_new_tokens=NEW, batch_size=2)
        assert [text.ids for text in found] == wanted


def test_a_recurrent_model_is_refused_as_such_a_draft() -> None:
    model = build_architecture("LFM2")
    model.config.pard_token = MASK
    with pytest.raises(UserError, match=r"Lfm2.*cannot draft several tokens in one forward: it keeps a recurrent"):
        open_draft_runner(model, model)


@pytest.mark.parametrize("family", ["llama", "mistral", "gpt2", "gemma3"])
def test_by_teacher_forcing_every_slot_gets_its_logits(family: str, tiny) -> None:
    target, forced = tiny(family), [([3, 7, 1, 9, 12, 40, 2, 5], 4), ([5, 6], 2), ([5, 6, 7], 1), ([9, 9, 4] * 6, 11)]
    draft = parallel(target)
    for each in teacher_forced(target, {"": draft}, forced, depth=3):
        ids, start = forced[each.number]
        assert len(each.q[""]) == 3
        for depth, rows in enumerate(each.q[""]):
            for at, row in zip(range(start, len(ids)), rows, strict=True):
                if at > depth:
                    wanted = slots(draft, ids[: at - depth], depth + 1)[-1]
                    torch.testing.assert_close(row, wanted, rtol=1e-3, atol=1e-4)
                else:  # no draft reaches it
                    assert row.isfinite().sum() == 1
