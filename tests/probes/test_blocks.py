"""Probes inside a block head: what they are asked, and how estimates are judged."""

from __future__ import annotations

import pytest
import torch
from blocks import make_block_head, plain_block

from probes.blocks import collect_blocks, judge
from probes.features import Features
from probes.settings import ProbeSettings

TEXTS = [([3, 7, 1, 9, 4, 4, 2, 8, 5], 3), ([1, 2, 3, 1, 2, 6], 2), ([5, 4], 1)]


def test_a_slot_is_asked_whether_its_likeliest_token_is_the_texts(tiny) -> None:
    target = tiny("llama", vocab_size=12)
    head = make_block_head(target, "dspark", block=3)
    head.temperatures = [2.0, 1.0, 0.5]
    found, odds = collect_blocks(target, head, TEXTS)
    markov, confidence = head.markov_head, head.confidence_head
    assert markov is not None
    assert confidence is not None
    assert found.exits == [1, 2, 3]
    assert found.text.tolist() == [0, 0, 0, 0, 1, 1]  # blocks that end within their text; the last text has none
    column = 0
    for ids, start in TEXTS[:2]:
        for at in range(start - 1, len(ids) - 3):
            logits, hidden = plain_block(head, target, ids[: at + 1], 3)
            for slot in range(3):
                row = markov.markov_w1(torch.tensor([ids[at + slot]]))
                hit = (logits[slot] + markov.markov_w2(row)[0]).argmax() == ids[at + slot + 1]
                assert found.labels[slot, column] == float(hit)
                torch.testing.assert_close(found.inputs[slot, column, :-3], hidden[slot], rtol=1e-4, atol=1e-4)
                wanted = confidence(torch.cat([hidden[slot], row[0]])) / head.temperatures[slot]
                torch.testing.assert_close(odds[slot, column], wanted.detach(), rtol=1e-4, atol=1e-4)
            column += 1


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
    rows, products = judge(head, seen, ProbeSettings())
    test = seen["test"][0].outcome
    assert [row["tokens"] for row in rows] == [6000, int(test[0].sum()), int(test[:2].prod(0).sum())]
    for row in rows:
        assert row["ece"] < 0.045 < row["ece_confidence_head"]
        assert row["auroc"] == pytest.approx(row["auroc_confidence_head"], abs=0.01)  # the same order
        assert row["auroc_token_probability"] == pytest.approx(0.5)
    by_name = {row["estimate"]: row for row in products}
    assert by_name["probe"]["ece"] < 0.045 < by_name["confidence head"]["ece"]
    assert by_name["confidence head"]["worst_slot_ece"] >= by_name["confidence head"]["ece"]
