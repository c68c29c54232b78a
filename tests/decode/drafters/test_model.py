"""Drafts by the target's own first layers, which acceptance probes stop, and by a model that reads mask tokens."""

import copy
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import build_architecture
from enumeration import Experiment
from families import CONTEXT, VOCAB, resembling
from greedy import GREEDY, NEW, PROMPTS, generate, together
from reading import rounds_of, watched

from decode.core.sampling import LogitsWarper, TorchRng
from decode.core.stop import DraftedTokens, Fixed, StopRule, max_probability, token_probability
from decode.drafters.model import EarlyExitDrafter, ParallelDrafter
from decode.drafters.probe import (
    KINDS,
    AcceptanceProbe,
    advised,
    confidence_features,
    load_probe,
    same_weights,
    save_probes,
    weight_sample,
)
from decode.errors import UserError
from decode.loop import Method, decode, decode_texts
from decode.methods import MethodInputs, build, round_costs
from decode.models.check import open_draft_runner, open_runner
from decode.models.fast.forward import FastForward, FastRunner, fast_runner, self_speculating
from decode.models.fast.layout import FAMILIES
from decode.models.texts import teacher_forced
from decode.options import MethodOptions

WALKED = ["llama", "llama-mha", "qwen2-sliding", "qwen3", "gemma3", "phi", "gpt_neox-sequential"]
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
    runner, warp = open_deep(tiny, family), LogitsWarper()
    wanted = generate(tiny(family, num_hidden_layers=DEPTH), PROMPT, 24)
    for exit_layer in range(1, DEPTH):
        for stop in STOPS.values() if family == "llama" else [STOPS["product"]]:
            out = decode(runner, system_of(runner, exit_layer, stop(), warp), warp, PROMPT, max_new_tokens=24)
            assert out.ids == wanted, (family, exit_layer)


@pytest.mark.parametrize(("exit_layer", "stop"), [(1, "token"), (1, "refuse"), (3, "product")])
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


def test_exits_outside_the_model_and_families_whose_layers_cannot_be_walked_are_refused(tiny) -> None:
    runner = open_runner(tiny("llama", num_hidden_layers=DEPTH))
    assert self_speculating(runner).depth == DEPTH
    for layer in (0, DEPTH):
        with pytest.raises(UserError, match=rf"exit_layer is {layer}; .* 1 to {DEPTH - 1}"):
            EarlyExitDrafter(runner, LogitsWarper(), layer)
    with pytest.raises(UserError, match=rf"\(gpt2\) cannot draft with its own layers.*{FAMILIES[0]}"):
        build("layerskip", MethodInputs(open_runner(tiny("gpt2")), LogitsWarper()))


def probe_for(model, layer: int, kind: str = "probe", label: str = "match") -> AcceptanceProbe:
    width = model.config.hidden_size
    extra = torch.tensor([0.5, -0.1, 0.2]) if kind != "probe" else torch.empty(0)
    return AcceptanceProbe(layer, kind, label, torch.linspace(-0.1, 0.1, width), extra, 0.3, 1.5, {"auroc": 0.9})


@pytest.fixture
def folder(tiny, tmp_path: Path) -> Path:
    """Probes whose file advises a function, which is never called."""
    model = tiny("llama", num_hidden_layers=DEPTH)
    probes = [probe_for(model, e, k, label) for e in (1, 3) for k in KINDS for label in ("match", "accept")]
    best = {"greedy": {"adaspeed-probe": {"exit_layer": 3, "draft_length": 4, "threshold": 0.2, "rule": "os.abort"}}}
    save_probes(tmp_path / "probes", model, probes, best)
    return tmp_path / "probes"


def test_probes_come_back_from_their_folder_as_they_were(tiny, folder: Path) -> None:
    model = tiny("llama", num_hidden_layers=DEPTH)
    for kind in KINDS:
        loaded, expected = load_probe(folder, model, 3, kind, ["accept"]), probe_for(model, 3, kind, "accept")
        states, inputs = torch.randn(5, model.config.hidden_size), torch.randn(5, 3)
        torch.testing.assert_close(loaded.logit(states, inputs), expected.logit(states, inputs))
        assert loaded.metrics == {"auroc": 0.9}
    assert not list(folder.glob(".tmp*"))
    assert advised(folder, "adaspeed-probe", greedy=True)["exit_layer"] == 3


@pytest.mark.parametrize("kind", KINDS)
def test_one_step_gets_the_probability_that_a_batch_gets(tiny, kind: str) -> None:
    probe = probe_for(tiny("llama", num_hidden_layers=DEPTH), 1, kind)
    for seed in range(4):
        generator = torch.Generator().manual_seed(seed)
        hidden, scores = torch.randn(32, generator=generator), 9 * torch.randn(20, generator=generator)
        scores[:3] = -torch.inf
        scores, hidden, x = scores[None], hidden[None], torch.tensor([5 + seed])
        expected = probe.logit(hidden, confidence_features(scores, x)).sigmoid().item()
        assert probe(DraftedTokens(scores.softmax(-1), scores, hidden, x)).item() == pytest.approx(expected, rel=1e-4)


def test_probes_of_another_model_layer_or_nothing_are_refused(tiny, folder: Path, tmp_path: Path) -> None:
    model, other = tiny("llama", num_hidden_layers=DEPTH), tiny("llama", num_hidden_layers=DEPTH, seed=2)
    with pytest.raises(UserError, match="another model"):
        load_probe(folder, other, 1, "probe", ["match"])
    with pytest.raises(UserError, match=r"layers \[1, 3\], not for layer 2"):
        load_probe(folder, model, 2, "probe", ["match"])
    with pytest.raises(UserError, match="no probes"):
        load_probe(tmp_path, model, 1, "probe", ["match"])
    (folder / "probes.safetensors").write_bytes(b"x")
    with pytest.raises(UserError, match="damaged"):
        load_probe(folder, model, 1, "probe", ["match"])
    with pytest.raises(UserError, match="--probes DIR"):
        build("adaspeed-probe", MethodInputs(open_runner(model), LogitsWarper()))


def test_probes_know_their_model_in_every_precision_and_no_other(tiny) -> None:
    """Rounding twice, to float16 and then to bfloat16, may end elsewhere than rounding once."""
    model, trained = tiny("llama", num_hidden_layers=DEPTH), copy.deepcopy(tiny("llama", num_hidden_layers=DEPTH))
    with torch.no_grad():
        trained.get_input_embeddings().weight.mul_(1.02)
    dtypes = torch.float32, torch.float16, torch.bfloat16
    for first, second in itertools.permutations([weight_sample(copy.deepcopy(model).to(dtype)) for dtype in dtypes], 2):
        assert same_weights(first, json.loads(json.dumps(second)))
        for other in (
            weight_sample(tiny("llama", num_hidden_layers=DEPTH, seed=2)),
            weight_sample(trained),
            "of an earlier version",
        ):
            assert not same_weights(first, other)


@pytest.mark.parametrize("method", ["adaspeed-probe", "confidence-probe", "adaspeed"])
def test_probe_methods_decode_greedily_as_generate_does_and_take_advice(tiny, folder: Path, method: str) -> None:
    model = tiny("llama", num_hidden_layers=DEPTH)
    runner = open_runner(model)
    expected = generate(model, PROMPT, 20)
    given = MethodOptions(probes=str(folder), exit_layer=None if method == "adaspeed-probe" else 1)
    system = build(method, MethodInputs(runner, LogitsWarper(), options=given))
    if method == "adaspeed-probe":
        assert (system.drafter.exit_layer, system.stop.window, system.stop.threshold.value) == (3, 4, 0.2)
    assert decode(runner, system, LogitsWarper(), PROMPT, max_new_tokens=20).ids == expected


# -- drafts in one forward ---------------------------------------------------------------------------------------------

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
