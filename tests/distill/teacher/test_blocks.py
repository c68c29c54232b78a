"""Block heads in training: what a step sees, the weights of slots, the selection, the stages of a run, resuming."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from blocks import make_block_head, plain_block
from families import in_double
from tiny_run import begun, bench, check_killed_ends_alike, run_tiny, tiny_settings

from decode.models.block_head import BlockHead
from decode.models.head_files import load_head
from decode.models.loading import load_model
from distill.config.drafts import DraftSettings
from distill.config.training import BlockSettings, StudentSettings, TrainingSettings
from distill.data.batches import TokenDataset, label_mask
from distill.losses import slots
from distill.losses.chunked import LossRequest, fused_loss
from distill.losses.divergences import Divergence
from distill.losses.objective import Objective, Selection
from distill.modules import BlockModule
from distill.stages import run_of
from distill.teacher.blocks import anchors_of, block_rows, calibration_error, temperatures
from distill.teacher.signals import TargetSignal, Teacher
from distill.teacher.store import reference_loss

STAGES = ["target", "initial", "dspark", "adaspec"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):  # type: ignore[no-untyped-def]
    """A finished run of block heads, with its settings."""
    settings = tiny_settings(tmp_path_factory.mktemp("blocks"))
    settings.target.architecture.layers = 4
    block = BlockSettings(size=3, anchors=6, markov_rank=4)
    settings.student = StudentSettings(kind="dspark", draft_vocab=64, block=block)
    settings.drafts = [
        DraftSettings(name="dspark", divergence="dspark"),
        DraftSettings(name="adaspec", divergence="dspark", reference="dspark"),
    ]
    run_tiny(begun(settings))
    return settings, run_of(settings)


def test_a_run_makes_every_head_and_learns(run) -> None:
    settings, folder = run
    heads = {stage: load_head(folder.path(stage)) for stage in STAGES[1:]}
    first = heads["initial"].state_dict()
    for stage in STAGES[2:]:
        weights, history = heads[stage].state_dict(), folder.record(stage).history
        for part in ("fc.weight", "markov_head.markov_w2.weight", "confidence_head.proj.weight"):
            assert not torch.equal(weights[part], first[part]), (stage, part)
        assert history[-1]["loss"] < history[0]["loss"], stage
        assert {"alpha", "alpha_2", "alpha_3"} <= history[-1].keys()
        assert "alpha_4" not in history[-1]  # a block drafts three tokens
    assert folder.record("adaspec").account["selected_tokens"] > 0
    assert run_tiny(settings)[0] == []  # nothing has changed


def test_a_killed_training_ends_with_the_weights_of_an_undisturbed_one(run, tmp_path: Path) -> None:
    check_killed_ends_alike(run[0], tmp_path, {"dspark": 7, "adaspec": 9})


def test_training_sees_what_decoding_will_draft(run) -> None:
    """A slot's acceptance is that of a block which stands alone, with the text's own tokens before it (each fifth)."""
    settings, folder = run
    made, _ = bench(settings)
    target = load_model(folder.target, device="cpu", dtype="float32")
    head = load_head(folder.path("dspark"), target)
    assert isinstance(head, BlockHead)
    rows = replace(made.examples, signals={}, tokens={})
    example, teacher = rows.batch(torch.arange(3).numpy()), Teacher(target, TargetSignal(), head)
    drafted, mask, kept = block_rows(head, teacher, example, None), label_mask(example["labels"]), head.draft_ids()
    request = LossRequest(Divergence(), mass=drafted.mass)
    found = fused_loss(drafted.hidden, drafted.head, drafted.target, request)
    markov, seen, alphas = head.markov_head, [], iter(found.alpha)
    assert kept is not None
    assert markov is not None
    for i, ids in enumerate(example["input_ids"].tolist()):
        with torch.no_grad():
            p = target(input_ids=torch.tensor([ids])).logits[0].softmax(-1)
        for at in mask[i].nonzero()[:, 0].tolist():
            there = [slot for slot in range(head.drafts) if mask[i, at : at + slot + 1].sum() == slot + 1]
            trained = [next(alphas) for _ in there]
            if at % 5:
                continue
            logits, hidden = plain_block(head, target, ids[: at + 1], head.drafts)
            for slot in there:
                before = torch.tensor([ids[at + slot]])
                m, _ = markov.step(hidden[slot : slot + 1], markov.markov_w1(before), None)
                q = torch.zeros_like(p[0]).index_copy(0, kept, (logits[slot] + markov.markov_w2(m)[0]).softmax(-1))
                seen.append(torch.minimum(p[at + slot], q).sum())
                torch.testing.assert_close(trained[slot], seen[-1].detach(), rtol=1e-4, atol=1e-5)
    assert len(seen) > 50
    assert next(alphas, None) is None
    losses = torch.as_tensor(reference_loss(head, teacher, rows.part(0, 3), Divergence(), head.drafts))
    assert drafted.slots is not None
    torch.testing.assert_close(losses[drafted.rows, drafted.slots], found.losses, rtol=1e-4, atol=1e-5)


def in_training(tiny, **objective: Any) -> tuple[BlockModule, dict[str, Any]]:  # type: ignore[no-untyped-def]
    target = in_double(tiny("llama", vocab_size=12, dtype=torch.float64))
    head = make_block_head(target, "dspark", layers=1, block=3)
    rows = TokenDataset.from_lists([[3, 4, 5, 6, 7, 2], [2, 9, 5, 1]], [[-100, 4, 5, 6, 7, 2], [-100, -100, 5, 1]])
    given = {"target": Teacher(target, TargetSignal(), head), "objective": Objective(**objective)}
    module = BlockModule(head, TrainingSettings(), 1, anchors=9, **given)
    return module, rows.batch(torch.arange(2).numpy())


def test_the_confidence_learns_the_acceptance_and_a_slot_left_out_still_counts(tiny) -> None:
    module, batch = in_training(tiny, divergence=Divergence("dspark"))
    ((drafted, rows),) = module(batch)
    assert drafted.confidence is not None
    decay = torch.exp(-drafted.slots / 4)
    log_c, log_rest = (torch.nn.functional.logsigmoid(sign * drafted.confidence) for sign in (1, -1))
    wanted = -(decay * (rows.alpha * log_c + (1 - rows.alpha) * log_rest)).sum() / decay.sum()
    assert drafted.extra is not None
    assert drafted.extra.item() == pytest.approx(wanted.item(), rel=1e-6)
    # the loss is 0.1 CE + 0.9 |p - q|, and |p - q| is 2 (1 - alpha)
    labels = drafted.target.labels
    logits = drafted.head(drafted.hidden).log_softmax(-1)
    wanted = 0.1 * -logits.gather(1, labels[:, None])[:, 0] + 1.8 * (1 - rows.alpha)
    torch.testing.assert_close(rows.losses, wanted.detach())


def test_weights_of_slots() -> None:
    places = torch.tensor([0, 1, 2, 0, 0, 1])
    a = torch.tensor([0.5, 0.4, 0.8, 0.9, 0.3, 0.6], dtype=torch.float64)
    assert slots.reached(a, places).tolist() == pytest.approx([1, 0.5, 0.2, 1, 1, 0.3])
    assert not len(slots.reached(a[:0], places[:0]))
    for drafts, gamma in ((7, 4), (8, 4), (9, 5), (15, 7), (16, 7)):
        decayed = slots.decay(places, drafts)
        assert (decayed[1] / decayed[0]).log().item() == pytest.approx(-1 / gamma)


def test_rows_that_the_head_cannot_draft_have_no_weight(tiny) -> None:
    module, batch = in_training(tiny, divergence=Divergence("dspark"))
    ((drafted, rows),) = module(batch)
    drafted.learnable = (torch.arange(len(rows.losses)) % 2).to(rows.losses)
    factors = module.factors(drafted)
    assert not factors[::2].any()
    assert factors[1::2].gt(0).all()
    (total,) = [found.total for _, found in module(batch)]
    decayed = slots.decay(drafted.slots, module.model.drafts)
    assert total.item() == pytest.approx((rows.losses * decayed / decayed.mean()).sum().item())


def test_a_selection_ranks_slots_by_the_loss_difference_where_they_are_reached(tiny) -> None:
    module, batch = in_training(tiny, divergence=Divergence("dspark"), selection=Selection(0.5))
    ((drafted, rows),) = module(batch, training=False)
    drafted.reference = torch.zeros_like(rows.losses)
    ranked = module.rank(drafted, rows.losses, rows.alpha)
    torch.testing.assert_close(ranked, rows.losses * slots.reached(rows.alpha, drafted.slots))


def test_blocks_begin_before_labels_each_once() -> None:
    mask = torch.tensor([[0, 1, 1, 0, 1, 1], [1, 0, 0, 0, 0, 0]]).bool()
    for generator in (None, torch.Generator().manual_seed(1)):
        for count in (1, 3, None):
            at, real = anchors_of(mask, count, generator)
            for row in range(2):
                chosen = at[row][real[row]].tolist()
                assert len(chosen) == len(set(chosen)) == min(count or 9, int(mask[row].sum()))
                assert bool(mask[row, chosen].all())
    assert anchors_of(mask, None, None)[0][0].tolist() == [1, 2, 4, 5]


def test_temperatures_calibrate_the_product_of_the_confidences(run) -> None:
    generator = torch.Generator().manual_seed(0)
    true = torch.randn(4000, 3, generator=generator)
    hits = (torch.rand(true.shape, generator=generator) < true.sigmoid()).float()
    odds, counts = true * torch.tensor([2.0, 0.5, 3.0]), torch.full((4000,), 3)  # each off by a factor of its own
    found = temperatures(odds, hits, counts)
    assert found == pytest.approx([2.0, 0.5, 3.0], rel=0.25)
    product = (odds / torch.tensor(found)).sigmoid().cumprod(1)
    for slot in range(3):
        after = calibration_error(product[:, slot], hits.cumprod(1)[:, slot])
        assert after < 0.03
        assert after < calibration_error(odds.sigmoid().cumprod(1)[:, slot], hits.cumprod(1)[:, slot])
    _, folder = run
    head = load_head(folder.path("dspark"))
    assert isinstance(head, BlockHead)
    assert len(head.temperatures) == head.drafts
