"""Acceptance rules at one position against exact rational arithmetic, their neutral settings, what they learn."""

import math
import random
from collections.abc import Callable
from fractions import Fraction

import pytest
import torch
from enumeration import Experiment, ScriptedRunner, enumerate_runs, next_logits, random_table
from heads import make_block_head
from reading import watched
from scripted import RandomTree
from torch import Tensor

from decode.core.draft import Draft, Drafts
from decode.core.round import Round, metrics
from decode.core.sampling import History, LogitsWarper, Rng, TorchRng
from decode.core.stop import StopRule
from decode.core.verify import (
    AcceptanceRule,
    BlockVerification,
    Ears,
    Exact,
    Fuzzy,
    JensenShannon,
    Typical,
    Verification,
    js_distance,
)
from decode.drafters.model import ModelDrafter
from decode.errors import UserError
from decode.loop import Method, decode
from decode.methods import MethodInputs, build, is_lossless
from decode.models.check import open_draft_runner, open_runner
from decode.options import MethodOptions

Probs = list[Fraction]


def rational_distribution(generator: random.Random, vocab: int) -> Probs:
    weights = [generator.choice((0, 0, 1, 2, 3, 5, 8)) for _ in range(vocab)]
    weights[generator.randrange(vocab)] += 1
    return [Fraction(w, sum(weights)) for w in weights]


def exact(p: Probs, q: Probs, x: int) -> Fraction:
    return min(Fraction(1), p[x] / q[x])


def ears(beta: Fraction) -> Callable[[Probs, Probs, int], Fraction]:
    def accept(p: Probs, q: Probs, x: int) -> Fraction:
        return min(Fraction(1), p[x] / q[x] + beta * (1 - max(p))) if p[x] else Fraction(0)

    return accept


def bits_apart(p: Probs, q: Probs) -> float:
    def divergence(a: Probs) -> float:
        return sum(float(x) * math.log2(x / ((y + z) / 2)) for x, y, z in zip(a, p, q) if x)

    return (divergence(p) + divergence(q)) / 2


def adasd(theta: float) -> Callable[[Probs, Probs, int], Fraction]:
    return lambda p, q, x: Fraction(1) if math.sqrt(max(0.0, bits_apart(p, q))) < theta else exact(p, q, x)


def fuzzy(threshold: float) -> Callable[[Probs, Probs, int], Fraction]:
    return lambda p, q, x: Fraction(bits_apart(p, q) * math.log(2) <= threshold)


def typical(p: Probs, q: Probs, x: int) -> Fraction:
    nats = -sum(float(w) * math.log(w) for w in p if w)
    return Fraction(float(p[x]) > min(0.2, 0.3 * math.exp(-nats)))


def residual(p: Probs, q: Probs) -> Probs:
    rest = [max(a - b, Fraction(0)) for a, b in zip(p, q)]
    return [r / sum(rest) for r in rest] if sum(rest) else p


def emitted(
    accept: Callable[[Probs, Probs, int], Fraction], correct: Callable[[Probs, Probs], Probs], p: Probs, q: Probs
) -> Probs:
    kept = [q[x] * accept(p, q, x) if q[x] else Fraction(0) for x in range(len(p))]
    return [k + (1 - sum(kept)) * c for k, c in zip(kept, correct(p, q))]


RULES: dict[str, tuple[AcceptanceRule, Callable[[Probs, Probs, int], Fraction], Callable[[Probs, Probs], Probs]]] = {
    "exact": (Exact(), exact, residual),
    "block-verification": (BlockVerification(), exact, residual),  # of one token the same
    "ears": (Ears(0.25), ears(Fraction(1, 4)), residual),
    "ears-large": (Ears(1.5), ears(Fraction(3, 2)), residual),
    "adasd": (JensenShannon(threshold=0.5), adasd(0.5), residual),
    "fuzzy": (Fuzzy(0.2), fuzzy(0.2), lambda p, q: p),
    "typical": (Typical(epsilon=0.2), typical, lambda p, q: p),
}


def positions(count: int = 25, vocab: int = 5) -> list[tuple[Probs, Probs]]:
    generator = random.Random(7)
    return [(rational_distribution(generator, vocab), rational_distribution(generator, vocab)) for _ in range(count)]


def float_rows(*distributions: Probs) -> list[Tensor]:
    return [torch.tensor([[float(w) for w in distribution]], dtype=torch.float64) for distribution in distributions]


@pytest.mark.parametrize("name", RULES)
def test_acceptance_correction_and_spent_distance_agree_with_rational_arithmetic(name: str) -> None:
    rule, accept, correct = RULES[name]
    spent_somewhere = False
    for p, q in positions():
        tokens = [x for x in range(len(p)) if q[x]]
        rows_p, rows_q = (row.expand(len(tokens), -1) for row in float_rows(p, q))
        x = torch.tensor(tokens)
        a = rule.accept_prob(rows_p, rows_q, x, rule.distance(rows_p, rows_q, (rows_p.log(), rows_q.log())))
        assert a.tolist() == pytest.approx([float(accept(p, q, t)) for t in tokens], abs=1e-15)

        weights = rule.residual(rows_p[0], rows_q[0])
        if any(accept(p, q, t) < 1 for t in tokens):  # otherwise nothing is ever corrected
            assert (weights / weights.sum()).tolist() == pytest.approx([float(w) for w in correct(p, q)], abs=1e-15)

        out = emitted(accept, correct, p, q)
        assert sum(out) == 1
        variation = sum(abs(a - b) for a, b in zip(out, p)) / 2
        spent_somewhere |= variation > 0
        estimate = (rows_q[0, x] * rule.tv_spent(rows_p, rows_q, x, a)).sum().item()
        assert estimate == pytest.approx(float(variation), abs=1e-14)
        if correct is residual:  # total variation is the gain in acceptance, not one point less
            gain = sum(q[t] * (accept(p, q, t) - exact(p, q, t)) for t in tokens)
            assert variation == gain
    assert spent_somewhere == (not rule.exact)
    assert torch.equal(rule.residual(rows_p[0], rows_p[0]), rows_p[0])  # nothing is left of it


def tables() -> list[ScriptedRunner]:
    """A target and a draft of five tokens."""
    return [ScriptedRunner(random_table(seed, 5), 5) for seed in (1, 2)]


@pytest.mark.parametrize("drafter", ["model", "tree"])
@pytest.mark.parametrize(
    ("rule", "warp"),
    [
        *((rule, LogitsWarper(heat)) for rule in (Ears(0.0), JensenShannon(threshold=0.0)) for heat in (0.0, 0.8)),
        (BlockVerification(), LogitsWarper(repetition_penalty=1.6)),  # of greedy drafts the same as by tokens
    ],
    ids=lambda value: type(value).__name__,
)
def test_neutral_rules_are_the_exact_one_to_the_bit(rule: AcceptanceRule, drafter: str, warp: LogitsWarper) -> None:
    target, draft = tables()
    for seed in range(3):
        made = [ModelDrafter(draft, warp, 5) if drafter == "model" else RandomTree(5) for _ in range(2)]
        one, two = (
            decode(target, Method("", each, StopRule(), kept), warp, [0], max_new_tokens=40, rng=TorchRng(seed))
            for each, kept in zip(made, (Exact(), rule))
        )
        assert one.ids == two.ids
        assert [(r.path, r.overlap) for r in one.rounds] == [(r.path, r.overlap) for r in two.rounds]
        assert metrics([two.rounds])["tv_spent"] == 0


def test_adasd_thresholds_follow_from_the_mean_distances() -> None:
    wanted = {"midpoint": 0.32, "a": 0.15, "b": (30 * 0.15 + 10 * 0.49) / 40, "c": (3 * 0.15 + 2 * 0.49) / 5}
    for variant, theta in wanted.items():  # the first is the paper's example
        rule = JensenShannon(variant, accepted=[30 * 0.15, 30], rejected=[10 * 0.49, 10], sequences=[3, 2])
        assert rule.theta == pytest.approx(theta, abs=1e-15)


def test_adasd_records_the_accepted_distances_and_the_first_rejected_one() -> None:
    draft, distance = Draft([0, 1, 1]), [0.1, 0.4, 0.7]

    def observe(path: list[int]) -> None:
        rule.observe(Round(draft, path, 0, [0], distance=distance[: len(path) + 1]))

    rule = JensenShannon()
    rule.start()
    observe([0])
    assert rule.accepted == pytest.approx([0.1, 1])
    assert rule.rejected == pytest.approx([0.4, 1])  # the third was never tested
    observe([0, 1, 2])
    assert rule.accepted == pytest.approx([0.1 * 2 + 0.4 + 0.7, 4])
    assert rule.rejected == pytest.approx([0.4, 1])
    assert rule.sequences == [1, 1]
    rule.start()
    observe([0, 1, 2])
    assert rule.sequences == [2, 1]


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("copied", [False, True])
def test_the_loop_reports_what_a_rule_spends(name: str, copied: bool) -> None:
    """The expected `tv_spent` of the first position is its true total variation, over every run of the loop."""
    loose = {"adasd": JensenShannon(threshold=0.9), "fuzzy": Fuzzy(0.6), "typical": Typical(epsilon=0.05)}
    rule = loose.get(name, RULES[name][0])
    target = ScriptedRunner(random_table(1, 4, zeros=0), 4)
    draft = ScriptedRunner(random_table(2, 4), 4)
    warp = LogitsWarper(temperature=0.8)
    experiment = Experiment(target, warp, [0, 1, 2], 2)
    likely = experiment.next_distribution([0, 1, 2]).argsort(descending=True).tolist()
    drafter = _Copy(likely[0]) if copied else ModelDrafter(draft, warp, 4)
    system = Method(name, drafter, StopRule(1), rule)

    def run(rng: Rng) -> tuple[int, ...]:
        token = experiment.run(system, rng)[0]
        spent = experiment.traces[-1][0].spent
        return token, round(spent[0] * 1e15) if spent is not None else 0

    distribution = enumerate_runs(run)
    first = [sum(w for (t, _), w in distribution.items() if t == x) for x in range(4)]
    variation = sum(abs(a - b) for a, b in zip(first, experiment.next_distribution([0, 1, 2]).tolist())) / 2
    assert sum(w * spent for (_, spent), w in distribution.items()) / 1e15 == pytest.approx(variation, abs=1e-12)
    assert (variation > 1e-3) == (not rule.exact)


class _Copy(RandomTree):
    trees = False

    def draft(self, request):  # type: ignore[no-untyped-def]
        return Draft([self.vocab], [-1]) if request.max_depth else Draft(())


@pytest.mark.parametrize("theta", [None, 0.9])
def test_adasd_measures_a_copied_draft_against_the_targets_rows(theta: float | None) -> None:
    p = torch.tensor([[0.5, 0.5, 0.0], [0.2, 0.7, 0.1], [0.1, 0.1, 0.8]], dtype=torch.float64)
    drafts, tokens = Drafts.of([Draft([1, 0])], torch.device("cpu")), torch.tensor([2, 1, 0])
    warp, rule, rngs = LogitsWarper(temperature=1.0), JensenShannon(threshold=theta), [TorchRng(0)]
    _, (found,) = Verification(drafts, tokens, p.log(), warp, [rule], rngs, [History([2])]).read()
    wanted = js_distance(p[:2], torch.eye(3, dtype=torch.float64)[[1, 0]])[: min(len(found.path) + 1, 2)]
    assert found.distance == pytest.approx(wanted.tolist())
    assert any(spent > 0 for spent in found.spent or ()) == (theta is not None)  # without one the rule is exact


def test_greedy_adasd_learns_from_the_unwarped_distributions_before_its_first_threshold() -> None:
    target, draft = (ScriptedRunner(random_table(seed, 5, zeros=0.0), 5) for seed in (1, 2))
    system = Method("", ModelDrafter(draft, LogitsWarper(), 5), StopRule(3), JensenShannon(unwarped=True))
    text = decode(target, system, LogitsWarper(), [0], max_new_tokens=12)
    assert len(text.rounds) > 2
    length = 1  # of the prompt, and of what the rounds have written
    for r in text.rounds:
        texts = [text.ids[:length] + r.draft.ids[:i] for i in range(r.tested)]
        length += len(r.new)
        wanted = [
            js_distance(*(next_logits(runner, ids).float().softmax(-1) for runner in (target, draft))).item()
            for ids in texts
        ]
        assert (r.distance or []) == pytest.approx(wanted, abs=1e-5)


@pytest.mark.parametrize("unwarped", [False, True])
def test_drafts_keep_their_logits_only_for_a_rule_that_compares_them(unwarped: bool) -> None:
    kept: list[bool] = []
    target, draft = tables()
    warp = LogitsWarper(temperature=1.0)
    drafter = watched(ModelDrafter(draft, warp, 5), lambda _, drafts: kept.append(drafts.logits is not None))
    system = Method("", drafter, StopRule(3), JensenShannon(unwarped=unwarped))
    decode(target, system, warp, [0], max_new_tokens=3, rng=TorchRng(0))
    assert kept[0] == unwarped


@pytest.mark.parametrize("method", ["lookahead", "prompt-lookup", "autoregressive", "block"])
def test_verification_by_blocks_is_refused_where_it_would_change_nothing(method: str, tiny) -> None:
    target, draft = tables()
    options = MethodOptions(rule="block-verification")
    inputs = MethodInputs(target, LogitsWarper(temperature=1.0), draft, options=options)
    for chain in ("vanilla", "hybrid", "hf-dynamic"):
        assert isinstance(build(chain, inputs).rule, BlockVerification)
    if method == "block":  # which drafts the likeliest tokens by default
        model = tiny("llama", num_hidden_layers=4)
        target, draft = open_runner(model), open_draft_runner(make_block_head(model, "dflash"), model)
        inputs = MethodInputs(target, LogitsWarper(temperature=1.0), draft, options=options)
    others = {"block": "use exact, or --sample-block true", "autoregressive": "give --draft D, or leave it out"}
    instead = others.get(method, "use exact, or vanilla, eagle, layerskip")
    with pytest.raises(UserError, match=f"and {method} drafts none; {instead}"):
        build(method, inputs)
    assert is_lossless("vanilla", "block-verification")
