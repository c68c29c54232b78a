"""The real source of chance: frequencies of the loop and of its draws against the exact distributions."""

from __future__ import annotations

from collections import Counter

import torch
from enumeration import Distribution, Experiment, ScriptedRunner, autoregressive_distribution, random_table
from scipy.stats import chi2
from scripted import RandomTree

from decode.core.sampling import LogitsWarper, TorchRng
from decode.core.stop import Fixed, StopRule, token_probability
from decode.core.verify import Ears
from decode.drafters.model import ModelDrafter
from decode.loop import Method, decode


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


def test_five_thousand_rounds_have_the_targets_distribution() -> None:
    warp = LogitsWarper(temperature=0.8)
    target = ScriptedRunner(random_table(1, 4), 4)
    draft = ScriptedRunner(random_table(3, 4), 4)
    experiment = Experiment(target, warp, [0, 2, 1], 3)
    distribution = autoregressive_distribution(experiment.next_distribution, experiment.prompt, 3)
    model = Method("model", ModelDrafter(draft, warp, 4), StopRule(3, token_probability, threshold=Fixed(0.3)))
    counts, rounds = sample(experiment, model, 3_000)
    assert rounds >= 5_000
    assert p_value(counts, distribution) > 1e-4
    assert p_value(sample(experiment, Method("tree", RandomTree(4), StopRule()), 600)[0], distribution) > 1e-4
    relaxed = Method("ears", ModelDrafter(draft, warp, 4), StopRule(3), Ears(0.3))
    assert p_value(sample(experiment, relaxed, 1500)[0], distribution) < 1e-4  # the test has the power to see a bias


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
