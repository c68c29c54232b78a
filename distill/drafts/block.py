"""Block heads in training: the drafted tokens of many blocks of each text, all at once; and their calibration."""

from collections.abc import Iterator
from typing import cast

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from decode.models.heads.block import BlockHead
from decode.models.heads.block_config import block_config, mask_token
from distill.config.base import Values
from distill.config.models import StudentSettings
from distill.data.dataset import Batch, Examples, label_mask
from distill.drafts.eagle import head_rows
from distill.losses.chunked import Rows, compare
from distill.losses.divergences import Divergence, TargetRows
from distill.networks.lm_head import LMHead, places
from distill.networks.models import seeded
from distill.signal.target import Signal

CELLS = 1 << 26
"""Most entries of an attention mask, of which each takes some ten bytes while a mask is made on a CPU."""


RANK = 64  # of a scorer, unless the settings say another one
CHUNK = 1 << 26  # most bytes of logits of all ids from which candidates are chosen at once
IMPOSSIBLE = 40.0  # what logits of other ids are lowered by where q is measured, so that divergences stay finite


class CandidateHead(LMHead):
    """An output head for measuring a choice among candidates: other ids are not drafted."""

    count: int  # of candidates

    def products(self, hidden: Tensor, vocab: int) -> Tensor:
        """See `LMHead.products`."""
        width = self.linear.in_features
        unary, scores = LMHead.of(self.linear).products(hidden[:, :width], vocab), hidden[:, width:]
        best, kept = unary.topk(min(self.count, vocab), -1)
        assert self.markov is not None
        scores = best + (self.markov[kept].to(scores.dtype) @ scores[..., None])[..., 0]
        return (unary - IMPOSSIBLE).scatter(1, kept, scores.to(unary.dtype))


class BlockDraft:
    """A block head: a row for each slot of blocks that begin at some label tokens.

    A selector is trained beside the divergence, which is that of the head without it, by a loss of its choice among
    the candidates; validation measures what is drafted with it.

    Attributes:
        model: Is trained.
        anchors: Blocks of a text, drawn anew at each step, in validation spread evenly.
        depth: Tokens that a block drafts.
    """

    monitor = "validation_accepted_length"
    blocks = True

    def __init__(self, model: BlockHead, anchors: int) -> None:
        self.model, self.anchors, self.depth = model, anchors, model.drafts

    def rows(self, batch: Batch, signal: Signal, seed: int | None = None) -> Rows:
        """The rows of the batch's blocks: see `LanguageModelDraft.rows`."""
        generator, measured = None if seed is None else torch.Generator().manual_seed(seed), not self.model.training
        blocks = anchors_of(label_mask(batch["labels"]), self.anchors, generator)
        return self.blocks_at(batch, signal, signal.rows(batch), *blocks, selected=measured and seed is None)

    def every_row(self, batch: Batch, signal: Signal) -> Iterator[Rows]:
        """The rows of blocks at every label token, in parts whose attention masks stay small."""
        anchors, chosen = anchors_of(label_mask(batch["labels"]), None, None)
        read, (texts, time) = signal.rows(batch), batch["input_ids"].shape
        slots, blocks = self.model.block, 1
        while texts * 2 * blocks * slots * (time + 2 * blocks * slots) <= CELLS:
            blocks *= 2
        for some, real in zip(anchors.split(blocks, 1), chosen.split(blocks, 1)):
            yield self.blocks_at(batch, signal, read, some, real)

    def blocks_at(
        self, batch: Batch, signal: Signal, read: tuple[TargetRows, Tensor], anchors: Tensor, real: Tensor, *,
        selected: bool = False,
    ) -> Rows:  # fmt: skip
        """The rows of blocks at these positions.

        A block ends before the first token that is no label. The last token that was drafted is the text's own.

        Args:
            batch: Of `Examples`.
            signal: The target.
            read: What it says of the batch.
            anchors: Positions whose next token is a label, ``[batch, blocks]``.
            real: Which of them count, ``[batch, blocks]``; the others fill up.
            selected: The rows are what a selector makes of them.
        """
        head, mask, ids = self.model, label_mask(batch["labels"]), batch["input_ids"]
        (target, features), time, drafts = read, mask.shape[1], head.drafts
        after = anchors[..., None] + torch.arange(drafts, device=ids.device)  # the position that each token follows
        inside = (after < time) & real[..., None]
        place = torch.arange(len(ids), device=ids.device)[:, None, None], after.clamp_max(time - 1)
        live = (mask[place] & inside).cumprod(2).bool()
        features = features.to(head.fc.weight.dtype)
        table = cast(Tensor, signal.embedding.weight)
        embeds = functional.embedding(head.tokens(ids.gather(1, anchors), drafts), table)
        slots, known = head(embeds.detach().to(features.dtype), features, anchors), ids[place].flatten(0, 1)
        states, confidence = head.conditions(slots, known)
        kept = places(live)
        at, step = (mask.flatten().cumsum(0) - 1).view_as(mask)[place][live], kept % drafts
        weight = decay(step, drafts)
        weight = weight / weight.mean()
        output, chooses = signal.head, head.candidates > 0
        markov = None if head.markov_head is None else head.markov_head.markov_w2.weight
        states = states.flatten(0, 1).index_select(0, kept)
        hidden = states
        if chooses and not selected:
            hidden = states[:, : head.config.hidden_size]
        elif chooses or markov is not None:
            kind = CandidateHead if chooses else LMHead
            output = kind.of(output.linear, output.scale, output.cap, markov)
            if isinstance(output, CandidateHead):
                output.count = head.candidates
        if confidence is not None:
            confidence = confidence.flatten().index_select(0, kept)
        rows = head_rows(hidden, output, target, batch, len(kept), at, step, weight, confidence=confidence)
        if selected or not torch.is_grad_enabled():
            return rows
        assert rows.weight is not None
        if chooses:
            rows.distance = selector_loss(head, states, output, rows.target, at) * rows.weight
        return rows


def rows_at_once(vocab: int) -> int:
    """Returns of how many rows logits of all ids may be in memory."""
    return max(64, CHUNK // (4 * vocab))


def selector_loss(head: BlockHead, states: Tensor, output: LMHead, target: TargetRows, at: Tensor) -> Tensor:
    """Returns −log of the selector's probability of the target's likeliest token among its candidates, ``[rows]``.

    That token stands in for the last candidate where it is none. Only the candidates' scores have a gradient.

    Args:
        head: The head.
        states: What `BlockHead.conditions` returns, ``[rows, ..]``.
        output: The target's output head, of the ids that are drafted.
        target: The target's distributions of the batch's label tokens.
        at: The label token of each row.
    """
    assert head.markov_head is not None
    vocab, losses, second = min(output.vocab, target.vocab), list[Tensor](), head.markov_head.markov_w2.weight
    frozen, bias = output.linear.weight.detach(), output.linear.bias

    def loss(states: Tensor, ids: Tensor, label: Tensor) -> Tensor:
        weight = torch.cat([frozen[ids].to(second.dtype), second[ids]], -1)
        scores = (weight @ states[..., None].to(second.dtype))[..., 0]
        scores = output.finish(scores if bias is None else scores + bias[ids]).float()
        return functional.cross_entropy(scores, label, reduction="none")

    for some, place in zip(*(rows.split(rows_at_once(vocab)) for rows in (states, at))):
        with torch.no_grad():
            wanted, hidden = target.at(place), some[:, : frozen.shape[1]].to(frozen.dtype)
            best = wanted.log_probs(vocab).argmax(-1) if wanted.ids is None else wanted.ids[:, 0].long()
            ids = output(hidden, vocab).topk(min(head.candidates, vocab)).indices
            there = ids == best[:, None]
            label = torch.where(there.any(1), there.int().argmax(1), ids.shape[1] - 1)
            ids.scatter_(1, label[:, None], best[:, None])
        # rows of the weights are gathered again in the backward pass, not kept for it
        losses.append(cast(Tensor, checkpoint(loss, some, ids, label, use_reentrant=False)))
    return torch.cat(losses)


def create(
    target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, settings: StudentSettings, seed: int
) -> BlockHead:
    """Returns a head with random weights that depend on the seed alone."""
    block, rows = settings.block, target.get_input_embeddings().num_embeddings
    config = block_config(
        target.config.get_text_config(),
        settings.kind,
        layers=block.layers,
        block=block.size,
        mask_id=mask_token(tokenizer, rows),
        target_layers=block.target_layers,
        draft_vocab=settings.draft_vocab,
        window=block.window,
        causal=block.causal,
        **parts(settings),
    )
    with seeded(seed):
        return BlockHead(config)


def parts(settings: StudentSettings) -> Values:
    """Returns what this kind of head has beside its layers: arguments of `decode.models.heads.block.added`."""
    rank = settings.block.markov_rank or (0 if settings.kind == "dflash" else RANK)
    return {"markov_rank": rank, "confidence": settings.kind == "dspark"}


def anchors_of(mask: Tensor, count: int | None, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
    """Chooses positions whose next token is a label.

    Args:
        mask: Where the next token is a label, ``[batch, time]``.
        count: Positions of a text; None: all.
        generator: Draws them. None: they are spread evenly, for validation.

    Returns:
        Positions ``[batch, blocks]``, ascending, and which of them are chosen ones, bool; the others fill up texts that
        have fewer labels.
    """
    labels, time = mask.sum(1, keepdim=True), mask.shape[1]
    most = max(1, int(labels.max()))  # attention needs a block, also where there is no label
    most = most if count is None else min(count, most)
    number, keys = torch.arange(most, device=mask.device).expand(len(mask), -1), torch.zeros(mask.shape)
    if generator is not None:
        keys = torch.rand(mask.shape, generator=generator)
    else:
        number = torch.where(labels > most, number * labels // most, number)
    order = keys.to(mask.device).masked_fill(~mask, 2.0).sort(dim=1, stable=True).indices  # labels come first
    chosen = order.gather(1, number.clamp_max(time - 1)).masked_fill(number >= labels, time).sort(1).values
    return chosen.clamp_max(time - 1), chosen < time


def decay(slots: Tensor, drafts: int) -> Tensor:
    """Returns exp(−i/γ) of every row, ``[rows]``, γ as published: 7 for blocks of 16, 5 of 10, 4 of 8."""
    gamma = 7.0 if drafts >= 15 else 5.0 if drafts >= 9 else 4.0
    return torch.exp(-slots / gamma)


# -- the confidence head's calibration --------------------------------------------------------------------------------

BINS = 15  # of the calibration error
GRID = torch.logspace(-2, 2, 81, base=2.0)  # temperatures that are tried


def calibration_error(probability: Tensor, outcome: Tensor) -> float:
    """Returns the expected calibration error of probabilities ``[n]`` against outcomes in [0, 1], in equal bins."""
    place = (probability * BINS).long().clamp_max(BINS - 1)
    gaps = torch.zeros(BINS, dtype=torch.float64).index_add_(0, place, (probability - outcome).double())
    return float(gaps.abs().sum()) / max(1, len(outcome))


@torch.no_grad()
def block_outcomes(draft: BlockDraft, signal: Signal, examples: Examples, device: torch.device) -> tuple[Tensor, ...]:
    """Returns how the tokens of a block at every label token fare.

    Returns:
        The confidences' log-odds, greedy agreement and acceptance rates, each ``[blocks, drafts]``; and how many of a
        block's tokens lie within its text, ``[blocks]``.
    """
    parts = list[tuple[Tensor, ...]]()
    for numbers in examples.batches(8):
        batch = {name: values.to(device) for name, values in examples.batch(numbers).items()}
        for rows in draft.every_row(batch, signal):
            measured = compare(rows, Divergence())
            assert rows.confidence is not None
            block, step = ((rows.step == 0).cumsum(0) - 1).cpu(), rows.step.cpu()
            filled = torch.zeros(3, int(block[-1:].sum()) + 1, draft.depth)
            for table, values in zip(filled, (rows.confidence, measured.agreement, measured.alpha)):
                table[block, step] = values.float().cpu()
            parts.append((*filled, torch.bincount(block, minlength=1)))
    return tuple(map(torch.cat, zip(*parts)))


def temperatures(odds: Tensor, accepted: Tensor, counts: Tensor) -> list[float]:
    """Returns a temperature for each position of a block, from left to right (STS; DSpark, section 3).

    Each one minimises the calibration error of the product of the confidences up to its position, which is the
    probability that the draft is accepted that far.

    Args:
        odds: The confidences' log-odds, ``[blocks, drafts]``.
        accepted: Whether the tokens are accepted, or at which rate.
        counts: Tokens of each block.
    """
    chosen, before, so_far = list[float](), torch.ones(len(odds)), accepted.cumprod(1)
    for slot in range(odds.shape[1]):
        there = counts > slot
        if not there.any():
            chosen.append(1.0)
            continue
        tried = [calibration_error((before * (odds[:, slot] / t).sigmoid())[there], so_far[there, slot]) for t in GRID]
        chosen.append(float(GRID[min(range(len(GRID)), key=tried.__getitem__)]))
        before = before * (odds[:, slot] / chosen[-1]).sigmoid()
    return chosen
