"""Block heads in training: rows and their plain twin, weights of slots, the selection, the confidence."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from blocks import make_block_head, plain_block
from families import in_double
from some_rows import TRAINING, attached, everything, from_lists
from torch.nn import functional
from transformers import PreTrainedModel

from distill.config import DraftSettings
from distill.data.dataset import Examples, label_mask
from distill.drafts import block
from distill.drafts.block import BlockDraft, anchors_of, calibration_error, decay, temperatures
from distill.drafts.reference import keep_reference
from distill.losses.chunked import Rows, compare
from distill.losses.divergences import Divergence
from distill.modules import DistillModule
from distill.signal.target import Signal


def texts() -> Examples:
    ids = [[3, 4, 5, 6, 7, 2, 9, 8], [2, 9, 5, 1], [4, 4, 3], [7, 1, 11, 0, 5, 10]]
    labels = [[-100, *ids[0][1:5], -100, 9, 8], [-100, -100, 5, 1], [-100] * 3, [-100, -100, *ids[3][2:]]]
    return from_lists(ids, labels)


def prepared(tiny: Any, version: str = "dspark", **shape: Any) -> tuple[PreTrainedModel, BlockDraft, Signal]:
    target = in_double(tiny("llama", vocab_size=12, num_hidden_layers=4, dtype=torch.float64))
    head = make_block_head(target, version, **{"layers": 1, "block": 3} | shape)
    return target, BlockDraft(head, 9), Signal(target, reader=head)


@pytest.mark.parametrize("version", ["dspark", "dflash"])
@pytest.mark.parametrize("vocab", [None, 6])
def test_rows_are_those_of_every_block_read_alone(tiny: Any, version: str, vocab: int | None) -> None:
    """Slot by slot, with the text's own tokens before it, up to the first token that is no label."""
    target, draft, signal = prepared(tiny, version, draft_vocab=vocab)
    batch, head = everything(texts()), draft.model
    rows = draft.rows(batch, signal)
    mask, ids, markov = label_mask(batch["labels"]), head.draft_ids(), head.markov_head
    logits = rows.head(rows.hidden)
    measured, number = compare(rows, Divergence("kl_tv")), 0
    for text in range(len(mask)):
        tokens = batch["input_ids"][text].tolist()
        p = target(input_ids=torch.tensor([tokens])).logits[0].softmax(-1).detach()
        for anchor in mask[text].nonzero()[:, 0].tolist():
            wanted, hidden = plain_block(head, target, tokens[: anchor + 1], head.drafts)
            for slot in range(head.drafts):
                at = anchor + slot
                if at >= mask.shape[1] or not mask[text, anchor : at + 1].all():
                    break
                plain = wanted[slot]
                if markov is not None:
                    m, _ = markov.step(hidden[slot : slot + 1], markov.markov_w1(torch.tensor([tokens[at]])), None)
                    plain = plain + markov.markov_w2(m)[0]
                torch.testing.assert_close(logits[number], plain, rtol=1e-6, atol=1e-7)
                q = plain.softmax(-1) if ids is None else torch.zeros(12).double().index_copy(0, ids, plain.softmax(-1))
                torch.testing.assert_close(
                    measured.alpha[number], torch.minimum(p[at], q).sum().detach(), rtol=1e-5, atol=1e-6
                )
                assert rows.step is not None
                assert rows.at is not None
                assert (rows.step[number], rows.at[number]) == (slot, mask[:text].sum() + mask[text, :at].sum())
                number += 1
    assert number == len(rows) == rows.count > 10


def test_every_row_in_parts_is_every_row_at_once(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference's losses do not depend on how many blocks a mask of attention holds, and no mask is larger."""
    _, draft, signal = prepared(tiny)
    cells, examples = list[int](), [texts(), texts()]
    attention = functional.scaled_dot_product_attention

    def counted(*given: Any, attn_mask: Any = None, **options: Any) -> torch.Tensor:
        cells.extend([] if attn_mask is None else [attn_mask.numel()])
        return attention(*given, attn_mask=attn_mask, **options)

    monkeypatch.setattr(functional, "scaled_dot_product_attention", counted)
    for made, most in zip(examples, (1 << 26, 4 * 2 * 3 * (8 + 6) - 1)):
        cells.clear()
        monkeypatch.setattr(block, "CELLS", most)
        keep_reference(draft, signal, made, Divergence("kl_tv"), "64-true")
        assert max(cells) <= most
    assert len(cells) > 2
    whole, parts = (np.concatenate([made.columns["reference_loss"][i] for i in range(4)]) for made in examples)
    assert whole.any(0).all()
    assert np.allclose(whole, parts, rtol=1e-6)
    rows = draft.rows(everything(texts()), signal)
    losses = torch.zeros(whole.shape, dtype=torch.float64)
    losses[rows.at, rows.step] = compare(rows, Divergence("kl_tv")).losses  # type: ignore[index]
    assert np.allclose(whole, losses.numpy(), rtol=1e-6)


def step(draft: BlockDraft, signal: Signal, **settings: Any) -> tuple[DistillModule, torch.Tensor, Rows]:
    """A training step with a block at every label token, and the reference's losses all alike."""
    examples = texts()
    module = attached(DistillModule(draft, signal, TRAINING, 1, settings=DraftSettings(name="x", **settings)))
    batch = everything(examples)
    batch["reference_loss"] = torch.full((examples.label_count, draft.depth), 0.25, dtype=torch.float64)
    loss, rows, _ = module(batch, training=True)
    return module, loss, rows


def confidence_loss(rows: Rows, alpha: torch.Tensor) -> float:
    assert rows.confidence is not None
    weights = decay(rows.step, 3)  # type: ignore[arg-type]
    log_c, log_rest = (functional.logsigmoid(sign * rows.confidence) for sign in (1, -1))
    return (-(weights * (alpha * log_c + (1 - alpha) * log_rest)).sum() / weights.sum()).item()


def test_the_loss_is_that_of_weighted_slots_and_of_the_confidence(tiny: Any) -> None:
    target, draft, signal = prepared(tiny, draft_vocab=6)
    _, loss, rows = step(draft, signal, divergence="dspark")
    measured = compare(rows, Divergence("dspark"))
    batch = everything(texts())
    tokens = batch["labels"].roll(-1, 1)[label_mask(batch["labels"])][rows.at]
    labels = torch.where(tokens % 2 == 0, tokens // 2, -1)  # the head drafts every second id
    assert rows.learnable is not None
    own = -rows.head(rows.hidden).log_softmax(-1).gather(1, labels.clamp_min(0)[:, None])[:, 0] * (labels >= 0)
    alone = compare(Rows(rows.hidden, rows.head, rows.target, rows.count, rows.at), Divergence())  # without mass
    torch.testing.assert_close(measured.losses, (0.1 * own + 1.8 * (1 - alone.alpha)).detach())
    weights = decay(rows.step, 3)  # type: ignore[arg-type]
    weights = weights / weights.mean() * rows.learnable  # what the head cannot draft teaches nothing
    wanted = (weights * measured.losses).sum().item() / rows.count + confidence_loss(rows, measured.alpha)
    assert loss.item() == pytest.approx(wanted, rel=1e-6)
    loss.backward()
    trained = {name for name, weight in draft.model.named_parameters() if weight.grad is not None and weight.grad.any()}
    assert trained == {name for name, _ in draft.model.named_parameters()}
    assert not any(weight.grad is not None for weight in target.parameters())


@pytest.mark.parametrize(("drafts", "gamma"), [(7, 4), (8, 4), (9, 5), (15, 7), (16, 7)])
def test_weights_fall_along_a_block_as_published(drafts: int, gamma: int) -> None:
    weights = decay(torch.arange(3), drafts)
    assert weights.log().tolist() == pytest.approx([0, -1 / gamma, -2 / gamma])


def test_blocks_begin_before_labels_each_once() -> None:
    mask = torch.tensor([[0, 1, 1, 0, 1, 1], [1, 0, 0, 0, 0, 0], [0] * 6]).bool()
    for generator in (None, torch.Generator().manual_seed(1)):
        for count in (1, 3, None):
            at, real = anchors_of(mask, count, generator)
            for row in range(3):
                chosen = at[row][real[row]].tolist()
                assert len(chosen) == len(set(chosen)) == min(count or 9, int(mask[row].sum()))
                assert bool(mask[row, chosen].all())
    assert anchors_of(mask, None, None)[0][0].tolist() == [1, 2, 4, 5]
    drawn = [anchors_of(mask, 2, torch.Generator().manual_seed(seed))[0][0].tolist() for seed in (1, 1, 2, 3, 4)]
    assert drawn[0] == drawn[1]  # of the seed alone
    assert len(set(map(tuple, drawn))) > 1


# -- the confidence ---------------------------------------------------------------------------------------------------


def test_temperatures_calibrate_the_product_of_the_confidences() -> None:
    generator = torch.Generator().manual_seed(0)
    true = torch.randn(4000, 3, generator=generator)
    hits = (torch.rand(true.shape, generator=generator) < true.sigmoid()).float()
    odds, counts = true * torch.tensor([2.0, 0.5, 3.0]), torch.full((4000,), 3)  # each off by a factor of its own
    made = temperatures(odds, hits, counts)
    assert made == pytest.approx([2.0, 0.5, 3.0], rel=0.25)
    product = (odds / torch.tensor(made)).sigmoid().cumprod(1)
    for slot in range(3):
        after = calibration_error(product[:, slot], hits.cumprod(1)[:, slot])
        assert after < 0.03
        assert after < calibration_error(odds.sigmoid().cumprod(1)[:, slot], hits.cumprod(1)[:, slot])
    counts[2000:] = 1  # of blocks that a text's end cut short only the slots within it count
    odds[2000:, 1:] = 100.0
    assert temperatures(odds, hits, counts) == pytest.approx([2.0, 0.5, 3.0], rel=0.3)
