"""Invariant 1: the distribution of the production loop's output, enumerated, equals the target's."""

from collections.abc import Callable
from itertools import cycle, product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from enumeration import Clock, EnumerationNumbers, Experiment, ScriptedRunner, enumerate_runs, next_logits, random_table
from families import build_tiny, in_double
from scripted import RandomTree, corpus_drafters
from torch import Tensor

from decode import loop
from decode.core import verify
from decode.core.draft import Draft
from decode.core.lengths import DraftLengths, RoundCosts
from decode.core.sampling import LogitsWarper, Rng, TorchRng
from decode.core.stop import (
    CostOptimal,
    Fixed,
    StopRule,
    Threshold,
    max_probability,
    negative_entropy,
    token_probability,
)
from decode.core.verify import BlockVerification, Exact
from decode.drafters.hybrid import HybridDrafter
from decode.drafters.lookup import LookupDrafter
from decode.drafters.model import ModelDrafter, ParallelDrafter
from decode.drafters.probe import KINDS, AcceptanceProbe, save_probes
from decode.loop import Method
from decode.methods import STOPS, MethodInputs, build
from decode.models.check import open_draft_runner
from decode.models.fast.forward import fast_runner
from decode.options import MethodOptions

TOLERANCE = 1e-12
PROMPT = [0, 2, 1, 0, 2]
SAMPLE = LogitsWarper(temperature=0.7)


def scripted_pair(
    vocab: int = 3,
    *,
    tokens: int = 4,
    draft_vocab: int | None = None,
    warp: LogitsWarper = SAMPLE,
    draft_seed: int = 3,
    zeros: float = 0.15,
    clock: Clock | None = None,
    **options: tuple[int, ...],
) -> tuple[Experiment, ScriptedRunner]:
    clock = clock or Clock()
    target = ScriptedRunner(random_table(1, vocab, zeros=zeros), vocab, clock=clock)
    size = draft_vocab or vocab
    draft = ScriptedRunner(random_table(draft_seed, size, zeros=zeros), size, clock=clock, cost=0.2)
    return Experiment(target, warp, PROMPT, tokens, clock=clock, **options), draft


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Time is what the scripted models say it is."""
    made = Clock()
    monkeypatch.setattr(loop, "time", SimpleNamespace(perf_counter=made.perf_counter))
    return made


def stop_rule(name: str, experiment: Experiment, draft: ScriptedRunner, **options: Any) -> StopRule:
    return STOPS[name](MethodInputs(experiment.target, experiment.warp, draft, options=MethodOptions(**options)))


def warm_up(experiment: Experiment, system: Method, texts: int = 4) -> None:
    """Let the adaptive parts adapt, so that the enumeration starts in the middle of their life."""
    for seed in range(5, 5 + texts):
        loop.decode(
            experiment.target, system, experiment.warp, experiment.prompt, max_new_tokens=14, rng=TorchRng(seed)
        )


@pytest.mark.parametrize("warm", [False, True], ids=["cold", "warm"])
@pytest.mark.parametrize("name", STOPS)
def test_every_stop_rule_is_lossless_with_a_draft_model(name: str, warm: bool, clock) -> None:
    tokens = 4 if (name, warm) == ("entropy", True) else 3  # which drafts little
    experiment, draft = scripted_pair(tokens=tokens, clock=clock)
    stop = stop_rule(name, experiment, draft, threshold=0.5 if name == "unsure" else None)
    start = stop.threshold.value, stop.window
    system = Method(name, ModelDrafter(draft, SAMPLE, 3), stop)
    if warm:
        warm_up(experiment, system)
        adaptive = name not in ("length", "unsure", "copy", "suffix", "hf-constant")
        assert ((stop.threshold.value, stop.window) != start) == adaptive
    assert experiment.bias(system) < TOLERANCE
    if stop.confidence is not None and (name, warm) != ("entropy", False):
        assert len({trace[0].drafted for trace in experiment.traces}) > 1  # where it stops depends on chance


@pytest.mark.parametrize("cost", [0.1, 0.4, 0.9])
@pytest.mark.parametrize("name", ["length", "cost-optimal"])
def test_draft_lengths_that_what_was_accepted_decides_are_lossless(name: str, cost: float, clock) -> None:
    """Cheap drafts are long, dear ones are switched off but for probes; those between change within the text."""
    experiment, draft = scripted_pair(2, tokens=4, clock=clock)
    experiment.prompt = [0, 1, 1]
    lengths = DraftLengths(RoundCosts.of_ratios(cost, 0.02), 3)
    system = Method(name, ModelDrafter(draft, SAMPLE, 2), stop_rule(name, experiment, draft), lengths=lengths)
    assert experiment.bias(system) < TOLERANCE
    warm_up(experiment, system)
    assert experiment.bias(system) < TOLERANCE


@pytest.mark.parametrize(("name", "mask"), zip(STOPS, cycle([1, 3])))
def test_a_draft_in_one_forward_is_lossless_with_every_stop_rule(name: str, mask: int, clock) -> None:
    """The mask is a token of the target, or one that the draft alone has."""
    experiment, draft = scripted_pair(2, tokens=3, draft_vocab=4, clock=clock, **APART)
    experiment.prompt = [0, 1, 1, 0]
    stop = stop_rule(name, experiment, draft, threshold=0.3)
    system = Method(name, ParallelDrafter(draft, SAMPLE, 2, mask), stop)
    for rule in (Exact(), BlockVerification()):
        system.rule = rule
        assert experiment.bias(system) < TOLERANCE
        warm_up(experiment, system)
        assert experiment.bias(system) < TOLERANCE


@pytest.mark.parametrize("kind", KINDS)
def test_stop_rules_that_read_a_probe_are_lossless(kind: str, double, tmp_path) -> None:
    """A probe of an exit layer, through a real model and the probes' files."""
    warp = LogitsWarper(temperature=1.3, top_k=2)
    target = double("llama", vocab_size=8)
    weight = torch.linspace(-0.2, 0.2, target.config.hidden_size)
    extra = torch.empty(0) if kind == "probe" else torch.tensor([1.0, -0.5, 0.3])
    save_probes(tmp_path, target, [AcceptanceProbe(1, kind, "accept", weight, extra, 1.0)])
    options = MethodOptions(stop_rule=kind, exit_layer=1, probes=str(tmp_path), threshold=0.33)
    inputs = MethodInputs(fast_runner(target), warp, options=options)
    system = build("adaspeed-probe", inputs)
    experiment = Experiment(inputs.target, warp, [3, 1, 4, 1], 4)
    with torch.inference_mode():
        assert experiment.bias(system) < TOLERANCE
    assert system.stop.confidence.kind == kind
    assert len({trace[0].drafted for trace in experiment.traces}) > 1  # where a draft stops depends on chance


@pytest.mark.parametrize(
    ("confidence", "product", "threshold"),
    [
        (max_probability, False, Fixed(0.55)),
        (max_probability, True, Fixed(0.45)),
        (max_probability, True, CostOptimal(0.45, drafted=False, every=1)),
        (negative_entropy, False, Fixed(-1.2)),
    ],
)
def test_refusing_to_draw_by_the_distribution_alone_is_lossless(
    confidence, product: bool, threshold: Threshold
) -> None:
    experiment, draft = scripted_pair(4, tokens=3)
    stop = StopRule(5, confidence, product=product, threshold=threshold, refuse=True)
    assert experiment.bias(Method("refuse", ModelDrafter(draft, SAMPLE, 4), stop)) < TOLERANCE
    assert {trace[0].drafted for trace in experiment.traces} >= {1, 2}


WARPS = {
    "plain": LogitsWarper(temperature=1.0),
    "hot-top-k": LogitsWarper(temperature=1.5, top_k=2),
    "top-p": LogitsWarper(temperature=0.8, top_p=0.8),
    "min-p": LogitsWarper(temperature=1.2, min_p=0.2),
    "repetition": LogitsWarper(temperature=1.0, repetition_penalty=1.7),
    "repetition-top-p": LogitsWarper(temperature=0.7, repetition_penalty=0.6, top_p=0.9),
    "greedy": LogitsWarper(),
    "greedy-repetition": LogitsWarper(repetition_penalty=1.9),
}


@pytest.mark.parametrize("warp", WARPS.values(), ids=WARPS)
def test_every_warp_is_lossless(warp: LogitsWarper) -> None:
    experiment, draft = scripted_pair(tokens=3, warp=warp)
    experiment.prompt = [0, 1, 0]  # it lacks a token, whose penalty depends on the draft
    stop = StopRule(5, token_probability, threshold=Fixed(0.2))
    for drafter in (ModelDrafter(draft, warp, 3), ParallelDrafter(draft, warp, 3, 2), RandomTree(3)):
        assert experiment.bias(Method("", drafter, stop)) < TOLERANCE
    experiment, draft = scripted_pair(tokens=3, warp=warp, **APART)
    experiment.prompt = [0, 1, 0]
    assert experiment.bias(blocks(draft, warp=warp)) < TOLERANCE


@pytest.mark.parametrize(("family", "warp"), [("llama", "repetition-top-p"), ("gpt2", "greedy-repetition")])
def test_draft_models_of_some_tokens_are_lossless(family: str, warp: str, double) -> None:
    """q is 0 of all other ids and sums to 1 over these, in the hand-written forward and in transformers' own."""
    target = double("llama", vocab_size=6)
    draft = in_double(build_tiny(family, vocab_size=6, seed=3, dtype=torch.float64))
    draft.config.draft_ids = some = [1, 2, 4]
    runner = open_draft_runner(draft, target)
    assert next_logits(runner, [0, 5]).shape == (3,)
    experiment = Experiment(fast_runner(target), WARPS[warp], [3, 1, 4, 1], 3)
    for drafter in (ModelDrafter(runner, WARPS[warp], 6), ParallelDrafter(runner, WARPS[warp], 6, 5)):
        with torch.inference_mode():
            assert experiment.bias(Method("some", drafter, StopRule(3))) < TOLERANCE
        assert {token for trace in experiment.traces for round in trace for token in round.draft.ids} <= {*some}


@pytest.mark.parametrize("stop_ids", [(0,), (1, 2)])
def test_texts_that_end_early_are_lossless(stop_ids: tuple[int, ...]) -> None:
    experiment, draft = scripted_pair(4, tokens=3, stop_ids=stop_ids)
    for drafter in (ModelDrafter(draft, SAMPLE, 4), RandomTree(4), LookupDrafter()):
        assert experiment.bias(Method("eos", drafter, StopRule(5))) < TOLERANCE


def test_short_contexts_are_lossless() -> None:
    """The draft model's context ends before the target's, and the target's before the budget."""
    experiment, draft = scripted_pair(4, tokens=4)
    experiment.target.limit = len(PROMPT) + 2
    draft.limit = len(PROMPT) + 1
    distribution = experiment.distribution(Method("short", ModelDrafter(draft, SAMPLE, 4), StopRule(5)))
    assert {len(text) for text in distribution} == {3}
    experiment.tokens = 3
    assert experiment.bias(Method("short", ModelDrafter(draft, SAMPLE, 4), StopRule(5))) < TOLERANCE
    draft.limit = 2  # the prompt does not even fit
    assert experiment.bias(Method("short", ModelDrafter(draft, SAMPLE, 4), StopRule(5))) < TOLERANCE
    assert experiment.drafted == {0}


@pytest.fixture(scope="module")
def drafters(tmp_path_factory: pytest.TempPathFactory):
    return corpus_drafters(tmp_path_factory.mktemp("corpus"), 4, [PROMPT * 3])


@pytest.mark.parametrize("name", ["none", "prompt-lookup", "suffix", "rest", "adaptix", "lookahead", "random-tree"])
def test_every_deterministic_drafter_is_lossless_with_every_stop_rule(name: str, drafters, clock) -> None:
    experiment, draft = scripted_pair(4, tokens=3, clock=clock)
    system = Method(name, drafters[name](), StopRule())
    warm_up(experiment, system, texts=2)
    for rule in STOPS:
        system.stop = stop_rule(rule, experiment, draft)
        assert experiment.bias(system) < TOLERANCE
        assert (experiment.drafted == {0}) == (name == "none")


@pytest.mark.parametrize("match", [2, 9])
def test_a_hybrid_of_copies_and_a_draft_model_is_lossless(match: int, clock) -> None:
    experiment, draft = scripted_pair(3, tokens=3, clock=clock)
    system = Method("hybrid", HybridDrafter(ModelDrafter(draft, SAMPLE, 3), match=match, length=3), StopRule())
    for name in ("length", "unsure", "product", "entropy"):
        system.stop = stop_rule(name, experiment, draft)
        assert experiment.bias(system) < TOLERANCE
        assert experiment.drafted != {0}


class _DropsTheToken(ModelDrafter):
    """Biased: the token that made the rule stop is taken back."""

    def propose(self, requests, device):  # type: ignore[no-untyped-def]
        drafts = super().propose(requests, device)
        if drafts.confidence and drafts.confidence[0][-1] < requests[0].stop.threshold.value:
            drafts.lengths[0] -= 1
        return drafts


class _CorrectsFromP(Exact):
    """Biased: a rejected token is replaced by one from p instead of the residual."""

    def residual(self, p: Tensor, q: Tensor) -> Tensor:
        return p


Choose = Callable[[int, list[int]], int]


def _draw_per_path(draft: Draft, choose: Choose) -> tuple[list[int], int]:
    """Biased: the longest of independent draws along each path of the tree, then a fresh token (REST's code)."""
    best: list[int] = []
    for leaf, path in enumerate(draft.paths()[1:]):
        nodes = [at - 1 for at in path]
        if leaf in draft.parents:
            continue
        accepted: list[int] = []
        for node in nodes:
            if choose(draft.parents[node] + 1, accepted) != draft.ids[node]:
                break
            accepted = [*accepted, node]
        best = max(best, accepted, key=len)
    return best, choose(best[-1] + 1 if best else 0, best)


def test_biased_rules_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    experiment, draft = scripted_pair(3, tokens=3)
    model = ModelDrafter(draft, SAMPLE, 3)
    stop = StopRule(5, token_probability, threshold=Fixed(0.4))
    assert experiment.bias(Method("fine", model, stop)) < TOLERANCE
    assert experiment.bias(Method("drops", _DropsTheToken(draft, SAMPLE, 3), stop)) > 0.01
    estimate = StopRule(5, token_probability, product=True, threshold=CostOptimal(0.4, drafted=False))
    assert experiment.bias(Method("estimates", model, estimate)) < TOLERANCE
    assert experiment.bias(Method("drops", _DropsTheToken(draft, SAMPLE, 3), estimate)) > 0.01
    assert experiment.bias(Method("from p", model, StopRule(), _CorrectsFromP())) > 0.01

    assert experiment.bias(Method("copy", LookupDrafter(), StopRule())) < TOLERANCE
    assert experiment.bias(Method("copy from p", LookupDrafter(), StopRule(), _CorrectsFromP())) > 0.01

    tree = Method("tree", RandomTree(3, nodes=8, seed=3), StopRule())
    assert experiment.bias(tree) < TOLERANCE
    monkeypatch.setattr(verify, "follow", _draw_per_path)
    monkeypatch.setattr(EnumerationNumbers, "once", lambda *_: None)
    assert experiment.bias(tree) > 0.01


APART: dict[str, Any] = {"draft_seed": 8, "zeros": 0.0}
"""A pair in which what P has lost by one token is often regained by the next."""


def blocks(draft: ScriptedRunner, stop: StopRule | None = None, warp: LogitsWarper = SAMPLE, vocab: int = 3) -> Method:
    return Method("blocks", ModelDrafter(draft, warp, vocab), stop or StopRule(5), BlockVerification())


@pytest.mark.parametrize("draft_vocab", [2, 5])
@pytest.mark.parametrize("stop_ids", [(), (0,)])
def test_verification_is_lossless_over_other_vocabularies(draft_vocab: int, stop_ids: tuple[int, ...]) -> None:
    experiment, draft = scripted_pair(3, tokens=3, draft_vocab=draft_vocab, stop_ids=stop_ids, **APART)
    experiment.prompt = [0, 1, 1, 0]
    system = blocks(draft)
    hybrid = HybridDrafter(system.drafter, match=2)  # copies, which are point masses, between sampled chains
    for drafter, rule in product((system.drafter, hybrid), (Exact(), system.rule)):
        assert experiment.bias(Method("", drafter, system.stop, rule)) < TOLERANCE


def test_verification_by_blocks_is_lossless_in_single_precision() -> None:
    experiment, draft = scripted_pair(tokens=3, **APART)
    for model in (experiment.target, draft):
        model.logits = lambda context, logits=model.logits: logits(context).float()
    assert experiment.bias(blocks(draft)) < 1e-6


def accepted(experiment: Experiment, system: Method) -> float:
    """The expected number of tokens that the first round accepts."""

    def run(rng: Rng) -> tuple[int, ...]:
        experiment.run(system, rng)
        return (experiment.traces[-1][0].accepted,)

    return sum(count * weight for (count,), weight in enumerate_runs(run).items())


def test_verification_by_blocks_keeps_more_than_that_by_tokens() -> None:
    """Both positions have q = (2/3, 1/3) and p = (1/3, 2/3): 11/9 tokens of two, and 10/9 by tokens."""
    p, q = (torch.tensor(row, dtype=torch.float64).log() for row in ([1 / 3, 2 / 3], [2 / 3, 1 / 3]))
    warp = LogitsWarper(temperature=1.0)
    experiment = Experiment(ScriptedRunner(lambda c: p, 2), warp, [0], 3)
    system = blocks(ScriptedRunner(lambda c: q, 2), StopRule(2), warp, 2)
    assert experiment.bias(system) < TOLERANCE
    assert accepted(experiment, system) == pytest.approx(11 / 9, abs=1e-12)
    system.rule = Exact()
    assert accepted(experiment, system) == pytest.approx(10 / 9, abs=1e-12)


class _UnscaledResidual(BlockVerification):
    """Biased: what follows is drawn from [p − q]₊, not from [P p − q]₊."""

    def _after(self, p, q, m, lengths, scale=None):  # type: ignore[no-untyped-def]
        return super()._after(p, q, m, lengths)


def test_biased_verification_by_blocks_is_caught() -> None:
    experiment, draft = scripted_pair(tokens=3, **APART)
    system = blocks(draft)
    assert experiment.bias(system) < TOLERANCE
    system.rule = _UnscaledResidual()
    assert experiment.bias(system) > 0.01
