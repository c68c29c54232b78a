"""Models with a state beside keys and values: any rollback is possible, texts are those of `generate`, sampling is exact."""

from __future__ import annotations

import pytest
import torch
from architectures import RECURRENT, build_architecture
from enumeration import Experiment
from families import VOCAB, in_double, resembling
from greedy import GREEDY, PROMPTS, assert_decodes, generate, together
from heads import make_head
from torch import Tensor

from decode.core.sampling import LogitsWarper
from decode.methods import MethodInputs, build
from decode.models.api import Read
from decode.models.check import open_draft_runner, open_runner
from decode.models.huggingface import AGAIN, HuggingFaceRunner, RollbackCache
from decode.options import MethodOptions

IDS = (torch.arange(40) * 7919 + 1) % VOCAB


@pytest.mark.parametrize("name", sorted(RECURRENT))
@torch.inference_mode()
def test_a_rollback_to_any_position_gives_the_logits_of_a_fresh_forward(name: str) -> None:
    """Also several in a row, behind the copied states and before them, and with more to read again than `AGAIN`.

    Delta rules of random weights grow rounding to hundredths; a state of another position is wrong by whole units.
    """
    model = build_architecture(name)
    runner = open_runner(model)
    whole = model(input_ids=IDS[None], use_cache=False, output_hidden_states=True)
    fresh, states = whole.logits[0], whole.hidden_states[1][0]
    cache = runner.new_cache()
    runner.forward([Read(cache, IDS[:8])])
    pieces = [(3, 0), (5, 4), (5, 3), (1, 0), (6, 5), (7, 2), (9, 1), (2, 1), (9, 9), (4, 12), (6, 1), (1, 1)]
    for piece, back in pieces:
        start = cache.length
        out = runner.forward([Read(cache, IDS[start : start + piece])], capture=(1,))
        torch.testing.assert_close(out.logits, fresh[start : start + piece], rtol=0.05, atol=0.05)
        torch.testing.assert_close(out.captured, states[start : start + piece], rtol=0.05, atol=0.05)
        cache.truncate(start + piece - back)
        assert cache.length == start + piece - back
    cache.truncate(3 + AGAIN)
    assert len(cache.unread) > AGAIN
    start = cache.length
    out = runner.forward([Read(cache, IDS[start : start + 2])], capture=(1,), last=1)
    torch.testing.assert_close(out.logits, fresh[start + 1 : start + 2], rtol=0.05, atol=0.05)
    torch.testing.assert_close(out.captured, states[start : start + 2], rtol=0.05, atol=0.05)
    assert len(out.hidden) == 1


@pytest.mark.parametrize("name", ["LFM2", "Mamba-2"])
def test_sampled_drafts_are_exact_on_a_hybrid_and_on_a_recurrent_target(name: str, monkeypatch) -> None:
    """By enumeration of the production loop, whose draft keeps a state too; a state that is not put back is found."""
    monkeypatch.setattr(Tensor, "float", lambda self: self.double())  # these models compute parts of it in float32
    target = in_double(build_architecture(name, vocab_size=2)).double()
    warp, options = LogitsWarper(0.9), MethodOptions(draft_length=2)
    draft = HuggingFaceRunner(resembling(target, 0.15))
    inputs = MethodInputs(HuggingFaceRunner(target), warp, draft, options=options)
    experiment = Experiment(inputs.target, warp, [0, 1, 1, 0, 1], 3)
    with torch.inference_mode():
        assert experiment.bias(build("vanilla", inputs)) < 1e-12
        assert max(experiment.drafted) > 0

        def only_cut(cache: RollbackCache, length: int) -> None:
            cache.read = length
            cache._crop(length)

        monkeypatch.setattr(RollbackCache, "rewind", only_cut)
        assert experiment.bias(build("vanilla", inputs)) > 1e-4


@pytest.mark.parametrize("name", sorted(RECURRENT))
def test_texts_in_a_batch_are_those_of_generate(name: str) -> None:
    model = build_architecture(name)
    runner, draft = open_runner(model), open_runner(resembling(model, 0.1))
    wanted = [generate(model, prompt, 12) for prompt in PROMPTS]
    for method in ("prompt-lookup", "vanilla"):
        system = build(method, MethodInputs(runner, GREEDY, draft, options=MethodOptions(draft_length=3)))
        texts = together(runner, system, PROMPTS, batch_size=3, max_new_tokens=12)
        assert [text.ids for text in texts] == wanted
        assert sum(r.drafted for text in texts for r in text.rounds) > 0


@pytest.mark.parametrize("name", ["Mamba-2", "LFM2", "Gemma 4"])
def test_heads_are_made_for_targets_without_attention_heads_and_with_layers_of_several_shapes(name: str) -> None:
    model = build_architecture(name)
    runner = open_runner(model)
    head = open_draft_runner(make_head(model, 3), model)
    text = generate(model, PROMPTS[0])
    rounds = assert_decodes(runner, build("eagle", MethodInputs(runner, GREEDY, draft=head)), text, PROMPTS[0])
    assert sum(r.drafted for r in rounds) > 0
