"""Heads in training: rows and their plain twins, losses, selections, confidence, how heads begin."""

from operator import attrgetter
from typing import Any

import numpy as np
import pytest
import torch
from families import NEEDED, in_double, with_layers
from heads import draft_of, drafted, filed_head, make_head, plain_block, plain_scores
from plain_logits import head_logits
from some_rows import TRAINING, add_losses, attached, everything, from_lists, scratch, some_rows
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

from decode.errors import UserError
from decode.models.heads.block import BlockHead
from decode.models.heads.block_config import BLOCK_ARCHITECTURES
from decode.models.heads.eagle import FeatureHead, head_config
from decode.models.heads.files import save_head
from decode.models.heads.mtp import load_mtp
from distill.config import DraftSettings
from distill.config.models import BlockSettings, StudentSettings
from distill.data.dataset import label_mask
from distill.kinds import block
from distill.kinds.block import anchors_of, gamma
from distill.kinds.eagle import FeatureDraft
from distill.kinds.start import frequent, start_from_head, start_from_target
from distill.losses.chunked import compare
from distill.losses.divergences import Divergence
from distill.signal.kept import keep_columns
from distill.signal.target import Signal
from distill.training.modules import DistillModule

Made = tuple[PreTrainedModel, Any, Signal]

UNROLLED = ["eagle", "eagle3", pytest.param("mtp", marks=NEEDED)]


@pytest.fixture
def make(tiny, tmp_path, monkeypatch) -> Any:
    """Makes a draft of a kind on a target in float64; an output head of its own and blocks have half of the ids."""

    def made(kind: str, steps: int = 3, *, target: PreTrainedModel | None = None, **shape: Any) -> Made:
        if not kind.startswith("mtp"):
            opened = target or in_double(tiny("llama", num_hidden_layers=4, dtype=torch.float64))
            return opened, *draft_of(kind, opened, steps, **shape)
        opened = with_layers(tmp_path, monkeypatch, "Mellum")
        head = load_mtp(opened)
        return opened, FeatureDraft(head.train(), steps, steps, 0.6), Signal(opened, reader=head)

    return made


def texts() -> Any:
    """With labels that a prompt interrupts, and a text without one."""
    ids = [[3, 4, 5, 6, 7, 2, 9, 8], [2, 9, 5, 1], [4, 4, 3], [7, 1, 11, 0, 5, 10]]
    labels = [[-100, *ids[0][1:5], -100, 9, 8], [-100, -100, 5, 1], [-100] * 3, [-100, -100, *ids[3][2:]]]
    return from_lists(ids, labels)


@pytest.mark.parametrize("kind", UNROLLED)
def test_rows_are_what_the_head_drafts_when_each_step_is_read_after_the_other(make, kind: str) -> None:
    """Of each text alone, with the target's true features: states, the target's distribution, and what both give."""
    target, draft, signal = make(kind)
    head, examples = draft.model, some_rows(4, empty=[2])
    batch = everything(examples)
    rows, mask = draft.rows(draft.indexed(batch), signal), label_mask(batch["labels"])
    assert rows.mass == int(mask.sum())
    assert rows.groups == rows.step.bincount().tolist()
    rows.weight = rows.weight / (0.1 if kind == "eagle" else 1.0)
    exact = rows.hidden.dtype == torch.float64
    close = {"rtol": 1e-6, "atol": 1e-8} if exact else {"rtol": 1e-4, "atol": 1e-5}
    measured, starts = compare(rows, Divergence()), (mask.sum(1).cumsum(0) - mask.sum(1)).tolist()
    steps, ids_of_head, seen = min(3, head.drafts or 3), head.draft_ids(), 0
    for step in range(steps):
        mine = (rows.step == step).nonzero()[:, 0]
        for text, (ids, places) in enumerate(zip(batch["input_ids"].tolist(), mask)):
            positions = [at for at in places.nonzero()[:, 0].tolist() if at > step]
            if not positions:
                continue
            logits = head_logits(head, target, ids, positions[0] + 1, step + 1)
            out = target(input_ids=torch.tensor([ids]), output_hidden_states=True)
            q, p, states = logits.softmax(-1), out.logits[0].softmax(-1).detach(), out.hidden_states[-1][0].detach()
            for at in positions:
                number = starts[text] + int(places[:at].sum())
                (row,) = mine[rows.at[mine] == number].tolist()
                same = q[at - positions[0]]
                torch.testing.assert_close(measured.alpha[row], torch.minimum(p[at], same).sum(), **close)
                own = rows.head(rows.hidden[row : row + 1]).softmax(-1)[0]
                torch.testing.assert_close(own.detach(), same if ids_of_head is None else same[ids_of_head], **close)
                learnable = True if ids_of_head is None else bool((ids_of_head == p[at].argmax()).any())
                wanted = (0.6 if kind.startswith("mtp") else 0.8) ** step * learnable
                assert float(rows.weight[row]) == pytest.approx(wanted)
                if kind == "eagle":  # it learns the state that the next step reads, and a tenth of the divergence
                    distance = 0.8**step * functional.smooth_l1_loss(rows.hidden[row], states[at])
                    assert rows.distance[row].item() == pytest.approx(distance.item(), rel=1e-4)
                seen += 1
    assert seen == len(rows) > 20


@pytest.mark.parametrize(
    ("kind", "shape", "vocab"),
    [
        ("dspark", {}, None),
        ("dflash", {}, 24),
        ("dflash", {"window": 4}, None),
        ("dspark", {"window": 3, "causal": True}, 24),
        ("dflash2", {"block": 4}, None),
        ("dflash2", {"block": 4}, 24),
        ("dflash2 measured", {"is_causal": None, "window": 3}, None),
        ("dflash2 measured", {"block": 4, "candidates": 20}, 24),  # texts' tokens are often among them
    ],
)
def test_rows_are_those_of_every_block_read_alone(make, kind: str, shape, vocab: int | None, monkeypatch) -> None:
    """Slot by slot, with the text's own tokens before it, up to the first token that is no label."""
    monkeypatch.setattr(block, "rows_at_once", lambda *_: 3)  # of logits
    target, draft, signal = make(kind.split()[0], draft_vocab=vocab, **shape)
    batch, head = everything(texts()), draft.model
    chooses = bool(head.candidates)
    head.train(not kind.endswith("measured"))
    rows = draft.rows(draft.indexed(batch), signal)
    choices = list[float]()
    mask, ids = label_mask(batch["labels"]), head.draft_ids()
    logits, measured, number = rows.head(rows.hidden), compare(rows, Divergence("kl_tv")), 0
    learnable, following = torch.ones(len(rows)), batch["labels"].roll(-1, 1)[mask][rows.at]
    for text in range(len(mask)):
        tokens = batch["input_ids"][text].tolist()
        p = target(input_ids=torch.tensor([tokens])).logits[0].softmax(-1).detach()
        for anchor in mask[text].nonzero()[:, 0].tolist():
            length = int(mask[text, anchor : anchor + head.drafts].cumprod(0).sum())
            wanted, inside, _ = plain_block(head, target, tokens[: anchor + 1], head.drafts)
            path = tokens[anchor + 1 : anchor + length]
            scored = plain_scores(head, target, tokens[: anchor + 1], path, head.drafts).detach()
            for slot in range(length):
                at = anchor + slot
                plain = wanted[slot] if chooses and head.training else scored[slot]
                drafted = plain.isfinite()
                torch.testing.assert_close(logits[number][drafted], plain[drafted], rtol=1e-5, atol=1e-6)
                q, mine = plain.softmax(-1), p[at] if ids is None else p[at][ids]
                if kind.startswith("dflash2"):  # the last candidate is replaced where the target's token is none
                    best, order = int(mine.argmax()), wanted[slot].argsort(descending=True)[: head.candidates].tolist()
                    order = order if best in order else [*order[:-1], best]
                    before = head.markov_head.markov_w1.weight[tokens[at]]
                    m = head.markov_head(inside[slot], before)
                    scores = (wanted[slot] + head.markov_head.markov_w2(m))[order].detach()
                    choices.append(float(scores.logsumexp(0) - scores[order.index(best)]))
                if ids is not None:  # the head drafts every second id
                    q, learnable[number] = torch.zeros_like(p[at]).index_copy(0, ids, q), 1 - p[at].argmax() % 2
                overlap = torch.minimum(p[at], q).sum().detach()
                torch.testing.assert_close(measured.alpha[number], overlap, rtol=1e-5, atol=1e-6)
                assert (rows.step[number], rows.at[number]) == (slot, mask[:text].sum() + mask[text, :at].sum())
                number += 1
    assert number == len(rows) > 10
    if chooses and head.training:
        chosen = rows.distance / rows.weight.where(rows.weight > 0, 1.0)
        torch.testing.assert_close(chosen.detach(), torch.tensor(choices).to(chosen) * (rows.weight > 0))
    else:
        assert rows.distance is None
    weights = torch.exp(-rows.step / 4)
    assert rows.mass == pytest.approx(float(weights.sum()))
    torch.testing.assert_close(rows.weight, weights * learnable)  # what cannot be drafted is not learnt
    labels = following if ids is None else torch.where(following % 2 == 0, following // 2, -1)
    assert rows.target.labels[rows.at].tolist() == labels.tolist()


def test_every_row_in_parts_is_every_row_at_once(make, monkeypatch) -> None:
    """The reference's losses do not depend on how many blocks a mask of attention holds, and no mask is larger."""
    _, draft, signal = make("dspark")
    cells, attention, kept = [], functional.scaled_dot_product_attention, []
    read, reads = signal.rows, []
    monkeypatch.setattr(signal, "rows", lambda batch: reads.append(batch) or read(batch))

    def counted(*given: Any, attn_mask: Any = None, **options: Any) -> torch.Tensor:
        cells.extend([] if attn_mask is None else [attn_mask.numel()])
        return attention(*given, attn_mask=attn_mask, **options)

    monkeypatch.setattr(functional, "scaled_dot_product_attention", counted)
    for most in (1 << 26, 4 * 2 * 3 * (8 + 6) - 1):
        cells.clear()
        monkeypatch.setattr(block, "room", lambda _, most=most: 4 * most)
        reads.clear()
        add_losses(draft, signal, made := texts(), Divergence("kl_tv"), "64-true")
        kept.append(np.concatenate([made.values("reference_loss", i) for i in range(4)]))
    assert max(cells) <= most
    assert len(reads) == 1  # of the target, however many parts there are
    assert len(cells) > 2
    assert np.allclose(*kept, rtol=1e-6)
    rows = draft.rows(draft.indexed(everything(texts())), signal)
    assert np.allclose(kept[0][rows.at, rows.step], compare(rows, Divergence("kl_tv")).losses.numpy(), rtol=1e-6)


def test_blocks_begin_before_labels_each_once_and_weights_fall_along_them_as_published() -> None:
    labels = [np.array(row) for row in ([9, -100, 1, 2, -100, 3, 4], [-100, 5, *[-100] * 5], [9, *[-100] * 6])]
    assert anchors_of(labels[0], None, None).tolist() == [1, 2, 4, 5]
    assert anchors_of(labels[0], 2, None).tolist() == [1, 4]
    drawn = []
    for seed in (1, 1, 2, 3, 4):
        drawn.append([anchors_of(row, 3, np.random.default_rng(seed)).tolist() for row in labels])
        assert [len(set(places)) for places in drawn[-1]] == [3, 1, 0] == [len(places) for places in drawn[-1]]
        assert all((row[np.array(places, dtype=int) + 1] >= 0).all() for row, places in zip(labels, drawn[-1]))
    assert drawn[0] == drawn[1]  # of the seed alone
    assert len(set(map(str, drawn))) > 1
    assert [gamma(drafts) for drafts in (7, 8, 9, 15, 16)] == [4, 4, 5, 7, 7]


def test_noise_is_a_function_of_the_seed_and_absent_without_one(make, monkeypatch) -> None:
    """ΔL is ranked under the noise that is trained: the rows are made once."""
    _, draft, signal = make("eagle")
    draft.noise, batch = 0.2, draft.indexed(everything(some_rows(3)))
    torch.manual_seed(1)
    first = draft.rows(batch, signal, training=True)
    torch.manual_seed(1)
    assert torch.equal(draft.rows(batch, signal, training=True).hidden, first.hidden)
    plain = draft.rows(batch, signal).hidden
    assert torch.equal(plain, draft.rows(batch, signal).hidden)
    assert not torch.equal(first.hidden, plain)
    settings = DraftSettings(reference="y", k=0.4)
    module = attached(DistillModule(draft, signal, TRAINING, 1, settings=settings))
    batch["reference_loss"], ranked, choose = torch.zeros(int(first.mass), 3), [], draft.chosen
    monkeypatch.setattr(draft, "chosen", lambda rows, *rest: ranked.append(rows) or choose(rows, *rest))
    assert module(batch, training=True)[1] is ranked[0]


@pytest.mark.parametrize("kind", ["dspark", "dflash2", *UNROLLED])
def test_every_weight_learns_and_one_gradient_of_the_output_head_is_kept_for_all_steps(make, kind: str) -> None:
    """Seven copies of it are 17 GB for a vocabulary of 150,000 ids. The target learns nothing."""
    eagle3 = kind == "eagle3"
    for steps in (1, 4):
        target, draft, signal = make(kind, steps)
        batch = draft.indexed(everything(some_rows(8)))
        module = attached(DistillModule(draft, signal, TRAINING, 1))
        weight, sizes = draft.rows(batch, signal).head.linear.weight, {}

        def keep(values: Tensor, sizes: Any = sizes) -> Tensor:
            sizes[values.data_ptr()] = values.shape
            return values

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda values: values):
            loss = module(batch, training=True)[0]
        gradients = sum(shape == weight.shape for at, shape in sizes.items() if at != weight.data_ptr())
        # the layer of an EAGLE-1 head has a matrix of this shape
        assert kind in (*BLOCK_ARCHITECTURES, "eagle") or gradients == int(eagle3)
        loss.backward()
        assert weight.requires_grad == eagle3
        assert dict(module.named_parameters()).keys() == {f"model.{n}" for n, _ in draft.model.named_parameters()}
        idle = [name for name, w in draft.model.named_parameters() if w.grad is None or not w.grad.any()]
        assert all(any(part in name for part in ("experts", "gate.", "bias")) for name in idle)
        assert not any(w.grad is not None or w.requires_grad for w in target.parameters())


@pytest.mark.parametrize("kind", ["language model", "parallel", "dspark", "dflash2", *UNROLLED])
@pytest.mark.parametrize("selects", [False, True])
def test_a_part_without_a_label_leaves_a_zero_a_whole_graph_and_all_measures(make, kind: str, selects: bool) -> None:
    """DDP waits for a gradient of every weight from every process, and validation for the same sums."""
    _, draft, signal = make(kind)
    batch, whole = everything(some_rows(2, empty=[0, 1])), everything(some_rows(2))
    settings, measured = DraftSettings(reference="y" if selects else None), []
    module = attached(DistillModule(draft, signal, TRAINING, 1, settings=settings), 2)
    batch["reference_loss"] = torch.zeros(0, 3)
    loss = module.training_step(batch, 0)
    assert loss.item() == 0.0
    loss.backward()
    trained = [weight for weight in module.parameters() if weight.requires_grad]
    assert all(weight.grad is not None and not weight.grad.any() for weight in trained)
    for each in (batch, whole):
        module.on_validation_epoch_start()
        module.validation_step(each, 0)
        measured.append([*module.sums])
    assert measured[0] == measured[1]


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
@pytest.mark.parametrize("form", ["hidden", "topk"])
def test_kept_signals_give_the_rows_of_the_target_beside_the_head(make, kind: str, form, tiny) -> None:
    target = tiny("llama", num_hidden_layers=4)
    _, draft, online = make(kind, target=target)
    examples, kept = some_rows(5), Signal(target, form, draft.model, k=99)
    add_losses(draft, online, examples, Divergence("tv"), "32-true")
    wanted = draft.rows(draft.indexed(everything(examples)), online)
    keep_columns(scratch(kept.columns), [examples], kept.kept)
    found = draft.rows(draft.indexed(everything(examples)), kept)
    for name in ("hidden", "at", "step", "weight", "reference", "target.mass", "target.learnable", "distance"):
        ours, theirs = (attrgetter(name)(rows) for rows in (found, wanted))
        assert (ours is None and theirs is None) or torch.allclose(ours, theirs, atol=1e-5), name
    ours, theirs = (compare(rows, Divergence("tv")) for rows in (found, wanted))
    assert torch.allclose(ours.losses, theirs.losses, atol=1e-5)
    assert torch.allclose(ours.alpha, theirs.alpha, atol=1e-5)
    assert torch.allclose(wanted.reference, theirs.losses, atol=1e-5)


# -- how a head begins ------------------------------------------------------------------------------------------------

WIDE = {  # the width of a head is not the model's width over its heads
    "qwen3": {"hidden_size": 60, "num_key_value_heads": 2, "head_dim": 32, "num_hidden_layers": 4},
    "gpt2": {"n_embd": 30, "n_head": 2, "n_layer": 4},  # 15, which cannot be rotated
}


@pytest.mark.parametrize(("family", "head_dim"), [("qwen3", 32), ("gpt2", 16)])
def test_a_head_starts_from_its_target_s_last_layer(family: str, head_dim: int, tiny) -> None:
    target = tiny(family, **WIDE[family])
    head = FeatureHead(head_config(target.config, 3, draft_vocab=24)).eval()
    head.set_vocabulary(torch.arange(0, 48, 2))
    assert head.config.head_dim == head_dim
    left, width = start_from_target(head, target), head.config.hidden_size
    assert torch.equal(head.lm_head.weight, target.get_output_embeddings().weight[::2])
    assert torch.equal(head.fc.weight[:, -width:], torch.eye(width))
    assert not head.fc.weight[:, :-width].any()
    assert bool(left) == (family == "gpt2")
    if not left:
        last = target.model.layers[-1]
        assert torch.equal(head.norm.weight, target.model.norm.weight)
        assert torch.equal(head.layer.mlp.down_proj.weight, last.mlp.down_proj.weight)
        for name in ("q_proj", "k_proj", "v_proj"):  # attention reads the embedding before the state
            weight, own = (getattr(layer.self_attn, name).weight for layer in (last, head.layer))
            assert torch.equal(own[:, weight.shape[1] :], weight)


def test_the_reduced_vocabulary_is_the_most_frequent_label_tokens() -> None:
    rows = from_lists([[1, 2, 3, 3], [4, 3, 2, 9]], [[-100, 2, 3, 3], [-100, 3, 2, 9]])
    ids, covered = frequent(rows, 3, 12)
    assert (ids.tolist(), covered) == ([2, 3, 9], 1.0)
    assert frequent(rows, 2, 12)[1] == 5 / 6
    assert frequent(rows, 5, 12)[0].tolist() == [0, 1, 2, 3, 9]  # never seen: the lowest ids


STARTS = {
    "dflash": ("dflash", {"draft_vocab": 24}, {"draft_vocab": 24}),
    "dspark": ("dspark", {"from_anchor": False}, {}),
    "dspark from dflash": ("dflash", {"draft_vocab": 24}, {"draft_vocab": 24}),
    "dspark from dflash, in slot 0": ("dflash", {"from_anchor": True, "causal": True}, {"causal": True}),
    "dflash2": ("dflash2", {"candidates": 5}, {"markov_rank": 8}),
    "dflash2 from dflash": ("dflash", {"window": 6, "is_causal": None}, {"window": 6, "causal": True}),
}


@pytest.mark.parametrize("name", STARTS)
def test_a_head_that_starts_from_another_one_drafts_what_that_drafts(name: str, tiny, tmp_path) -> None:
    target, (version, shape, told) = tiny("llama", num_hidden_layers=6), STARTS[name]
    given, kind = filed_head(target, version, **shape), name.split()[0]
    save_head(given, tmp_path)
    vocab = {"draft_vocab": told.pop("draft_vocab")} if "draft_vocab" in told else {}
    block = BlockSettings(**{"size": 5, "target_layers": [1, 2, 4]} | told)
    settings = StudentSettings(kind=kind, model=str(tmp_path), block=block, **vocab)  # type: ignore[arg-type]
    head, new = start_from_head(settings, target, given.captured_layers, 0)
    assert isinstance(head, BlockHead)
    assert (head.version, head.drafts, head.mask_id) == (kind, given.drafts, given.mask_id)
    added = {"dspark": ["confidence_head", "markov_head"], "dflash2": ["attention_conv", "markov_head", "mlp_conv"]}
    assert new == (added[kind] if kind != version else [])
    found, wanted = (drafted(each, target) for each in (head, given))
    kept = found.isfinite() if kind != version and kind == "dflash2" else torch.ones_like(found, dtype=torch.bool)
    torch.testing.assert_close(found[kept], wanted[kept], rtol=1e-5, atol=1e-5)
    assert found.argmax(-1).equal(wanted.argmax(-1))


def test_what_does_not_fit_the_head_that_is_started_from_is_named(tiny, tmp_path) -> None:
    target, folder = tiny("llama", num_hidden_layers=6), str(tmp_path)

    def start(given: Any, kind: Any, vocab: int | None = None, captured: Any = None, **block: Any) -> Any:
        save_head(given, tmp_path)
        shape = BlockSettings(**{"size": 5, "target_layers": [1, 2, 4]} | block)
        settings = StudentSettings(kind=kind, model=folder, draft_vocab=vocab, block=shape)
        return start_from_head(settings, target, captured or given.captured_layers, 0)[0]

    eagle, flash, spark = make_head(target, 3), filed_head(target, "dflash"), filed_head(target, "dspark")
    again = start(eagle, "eagle3", 24).state_dict()
    assert all(torch.equal(value, again[key]) for key, value in eagle.state_dict().items())
    wrong: list[tuple[Any, ...]] = [
        (eagle, "dflash", {}, "is of kind eagle3, from which student.kind dflash cannot be started"),
        (spark, "dflash2", {}, "is of kind dspark, from which student.kind dflash2"),
        (flash, "eagle3", {}, "is of kind dflash, from which"),
        (flash, "dspark", {"size": 8}, r"student.block.size is 8, and the head in .* has 5: set it to 5"),
        (flash, "dspark", {"layers": 3}, r"student.block.layers is 3, and .* has 2"),
        (flash, "dflash", {"target_layers": []}, r"student.block.target_layers is \[.*set it to \[1, 2, 4\]"),
        (flash, "dflash2", {"window": 9}, r"student.block.window is 9, and .* has None"),
        (spark, "dspark", {"markov_rank": 4}, r"student.block.markov_rank is 4, and .* has 8"),
        (flash, "dflash", {"vocab": 24}, "student.draft_vocab is 24"),
        (eagle, "eagle3", {"vocab": 24, "captured": [2, 3, 4]}, r"reads the states that enter layers"),
    ]
    for given, kind, options, told in wrong:
        with pytest.raises(UserError, match=told):
            start(given, kind, **options)
