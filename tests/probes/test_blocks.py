"""Probes inside a block head: what they are asked, and how estimates are judged."""

import pytest
import torch
from heads import make_block_head, plain_block, plain_scores

from decode.core.sampling import LogitsWarper
from decode.models.heads.block_config import BLOCK_ARCHITECTURES
from probes.blocks import collect_blocks, judge
from probes.features import Features
from probes.labels import Mode

TEXTS = [([3, 7, 1, 9, 4, 4, 2, 8, 5], 3), ([1, 2, 3, 1, 2, 6], 2), ([5, 4], 1)]


@pytest.mark.parametrize("version", BLOCK_ARCHITECTURES)
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a_slot_is_asked_whether_the_texts_token_would_have_been_drafted(
    tiny, temperature: float, version: str
) -> None:
    target = tiny("llama", vocab_size=12)
    head = make_block_head(target, version, block=3 + (version != "dspark"))
    head.temperatures, head.sampled_temperatures = [2.0, 1.0, 0.5], [3.0, 4.0, 5.0]
    warp = LogitsWarper(temperature)
    seen, odds = collect_blocks(target, head, TEXTS, Mode("", warp, "match"))
    assert seen.exits == [1, 2, 3]
    assert seen.text.tolist() == [0, 0, 0, 0, 1, 1]  # blocks that end within their text; the last text has none
    column = 0
    for ids, start in TEXTS[:2]:
        p = warp(target(torch.tensor([ids])).logits[0].detach())
        for at in range(start - 1, len(ids) - 3):
            _, hidden, *_ = plain_block(head, target, ids[: at + 1], 3)
            for slot in range(3):
                token = ids[at + slot + 1]
                torch.testing.assert_close(seen.inputs[slot, column, :-3], hidden[slot], rtol=1e-4, atol=1e-4)
                try:
                    q = warp(plain_scores(head, target, ids[: at + 1], ids[at + 1 : at + slot + 1], 3))[slot]
                except ValueError:  # no draft of a lattice holds the token before
                    continue
                chance = float(q[token] / max(q[token], p[at + slot, token], 1e-30))
                assert seen.labels[slot, column] == pytest.approx(chance, abs=1e-4)
                if head.confidence_head is None:
                    continue
                row = head.markov_head.markov_w1(torch.tensor([ids[at + slot]]))
                scale = (head.sampled_temperatures if temperature else head.temperatures)[slot]
                expected = head.confidence_head(torch.cat([hidden[slot], row[0]])) / scale
                torch.testing.assert_close(odds[slot, column], expected.detach(), rtol=1e-4, atol=1e-4)
            column += 1
    assert set(seen.outcome.unique().tolist()) <= {0.0, 1.0}
    assert (seen.outcome <= (seen.labels > 0)).all()


def test_the_mean_over_texts_of_the_target_is_the_overlap_and_rejected_tokens_are_too_likely_ones(tiny) -> None:
    target, warp = tiny("llama", vocab_size=12), LogitsWarper(1.0)
    head = make_block_head(target, "dspark", block=2)
    texts = [([3, 7, token, 5], 2) for token in range(12)]
    seen, _ = collect_blocks(target, head, texts, Mode("", warp, "accept"))
    with torch.no_grad():
        p = warp(target(torch.tensor([[3, 7]])).logits[0, -1:])[0]
        q = warp(plain_scores(head, target, [3, 7], [], 2))[0]
    assert float(p @ seen.labels[0]) == pytest.approx(float(torch.minimum(p, q).sum()), abs=1e-4)
    for token, (hit, drafted) in enumerate(zip(seen.outcome[0], seen.token_probability[0])):
        likely = q[token : token + 1] if hit else q[q > p]
        assert (likely - drafted).abs().min() < 1e-4


def test_estimates_are_judged_where_the_block_was_right_before(tiny) -> None:
    head, generator = make_block_head(tiny("llama"), "dspark", block=3), torch.Generator().manual_seed(0)
    seen = {}
    for split, n in (("train", 3000), ("validation", 1500), ("test", 6000)):
        states = torch.randn(3, n, 4, generator=generator)
        true = 1.5 * states[..., 0] + 0.5
        hits = (torch.rand(true.shape, generator=generator) < true.sigmoid()).float()
        blind = torch.tensor([0.7]).log().expand(3, n, 1)  # a token probability that knows nothing
        inputs = torch.cat([states, blind, torch.randn(3, n, 2, generator=generator)], -1)
        seen[split] = Features([1, 2, 3], inputs, hits, hits, torch.arange(n)), 3 * true  # an overconfident head
    rows, products = judge(head, seen, "match", [1e-3, 1e-1])
    test = seen["test"][0].outcome
    assert [row["tokens"] for row in rows] == [6000, int(test[0].sum()), int(test[:2].prod(0).sum())]
    for row in rows:
        assert row["ece"] < 0.045 < row["ece_confidence_head"]
        assert row["auroc"] == pytest.approx(row["auroc_confidence_head"], abs=0.01)  # the same order
        assert row["auroc_token_probability"] == pytest.approx(0.5)
    by_name = {row["estimate"]: row for row in products}
    assert by_name["probe"]["ece"] < 0.045 < by_name["confidence head"]["ece"]
    assert by_name["confidence head"]["worst_slot_ece"] >= by_name["confidence head"]["ece"]
