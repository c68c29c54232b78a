"""Block heads in training: the drafted tokens of many blocks of each text, all at once."""

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from typing_extensions import override

from decode.models.heads.block import BlockHead
from decode.models.heads.block_config import added, block_config, default_layers, mask_token
from decode.models.heads.eagle import captured_layers, output_head
from distill.config.base import Values, change
from distill.data.chat import IGNORE
from distill.data.dataset import Batch, Chance, Ints, label_mask, on_device
from distill.kinds.base import GROUPS, Draft, head_rows
from distill.kinds.kind import Differences, Kind, Rules
from distill.kinds.start import check_states
from distill.losses.chunked import Rows
from distill.losses.divergences import TargetRows
from distill.networks.lm_head import LMHead
from distill.networks.models import room, rows_at_once, seeded
from distill.signal.target import Signal

RANK = 64  # of a scorer, unless the settings say another one


class BlockDraft(Draft):
    """A block head: a row for each slot of blocks that begin at some label tokens.

    A block ends before the first token that is no label. The last token that was drafted is the text's own. The loss is
    a mean with the weights exp(−i/γ) of the slots. A selector is trained beside the divergence, which is that of the
    head without it, by a loss of its choice among the candidates; validation measures what is drafted with it.

    Attributes:
        anchors: Blocks of a text, drawn anew at each step, in validation spread evenly.
        depth: Tokens that a block drafts.
    """

    model: BlockHead
    accepted = "likeliest"

    def __init__(self, model: BlockHead, anchors: int) -> None:
        super().__init__(model, model.drafts, model.drafts)
        self.anchors = anchors
        self.weights = np.exp(-np.arange(self.depth) / gamma(self.depth))

    @override
    def index(self, batch: Batch, chance: Chance | None) -> Batch:
        labels = batch["labels"].numpy()
        parts = [anchors_of(row, self.anchors, chance[i] if chance else None) for i, row in enumerate(labels)]
        return self.blocks_at(labels, parts)

    @override
    def share(self, labels: NDArray[Any], chance: np.random.Generator) -> float:
        anchors = anchors_of(labels, self.anchors, chance)
        return float(np.concatenate([[0.0], self.weights.cumsum()])[lengths_of(labels, self.depth)[anchors]].sum())

    def blocks_at(self, labels: NDArray[Any], parts: list[Ints]) -> Batch:
        """The index of blocks at these positions of each of the texts ``labels [texts, time]``.

        Returns:
            ``anchors`` ``[texts, blocks]``, filled up with 0; of each row its place ``kept`` in ``[texts, blocks,
            drafts]``, its label token ``at`` and its ``step``; and ``mass``, the sum of their weights.
        """
        blocks = max(1, *map(len, parts))  # attention needs a block, also where there is no label
        anchors = np.zeros((len(labels), blocks), np.int64)
        lengths = np.zeros_like(anchors)
        for i, (row, chosen) in enumerate(zip(labels, parts)):
            anchors[i, : len(chosen)] = chosen
            lengths[i, : len(chosen)] = lengths_of(row, self.depth)[chosen]
        text, block, step = np.nonzero(np.arange(self.depth) < lengths[..., None])
        mask = label_mask(torch.from_numpy(labels)).numpy()
        number = mask.cumsum().reshape(mask.shape) - 1  # of each label token in the batch
        return {
            "anchors": torch.from_numpy(anchors),
            "kept": torch.from_numpy((text * blocks + block) * self.depth + step),
            "at": torch.from_numpy(number[text, anchors[text, block] + step]),
            "step": torch.from_numpy(step),
            "mass": float(self.weights[step].sum()),
            GROUPS: [len(step)],
        }

    @override
    def every_row(self, batch: Batch, signal: Signal) -> Iterator[Rows]:
        """The rows of blocks at every label token, in parts whose attention masks stay small."""
        labels = batch["labels"].cpu().numpy()
        every = [anchors_of(row, None, None) for row in labels]
        (texts, time), slots, blocks = labels.shape, self.model.block, 1
        device = batch["labels"].device
        while texts * 2 * blocks * slots * (time + 2 * blocks * slots) * 4 <= room(device):
            blocks *= 2
        target = signal.rows(batch)
        for start in range(0, max(1, *map(len, every)), blocks):
            index = self.blocks_at(labels, [anchors[start : start + blocks] for anchors in every])
            yield self._rows(batch | on_device(index, device), signal, target)

    @override
    def rows(self, batch: Batch, signal: Signal, *, training: bool = False) -> Rows:
        selected = not (training or self.model.training)
        return self._rows(batch, signal, signal.rows(batch), selected=selected)

    def _rows(self, batch: Batch, signal: Signal, read: tuple[TargetRows, Tensor], *, selected: bool = False) -> Rows:
        """The rows of a batch with the index of some blocks, by what the target says of it.

        ``selected``: the rows are what a selector makes of them.
        """
        head, ids, anchors, kept, step = self.model, batch["input_ids"], batch["anchors"], batch["kept"], batch["step"]
        (target, features), drafts, output = read, head.drafts, signal.head
        features = features.to(head.fc.weight.dtype)
        masked = functional.embedding(
            head.tokens(ids.gather(1, anchors), drafts), cast(Tensor, signal.embedding.weight)
        )
        after = anchors[..., None] + torch.arange(drafts, device=ids.device)  # the position that each token follows
        before = ids.gather(1, after.flatten(1).clamp_max(ids.shape[1] - 1)).view(-1, drafts)
        slots = head(masked.detach().to(features.dtype), features, anchors)
        conditioned, confidence = head.conditions(slots, before)
        hidden = states = conditioned.flatten(0, 1).index_select(0, kept)
        if confidence is not None:
            confidence = confidence.flatten().index_select(0, kept)
        if head.candidates and not selected:
            hidden = states[:, : head.config.hidden_size]
        elif head.markov_head is not None:
            second = head.markov_head.markov_w2.weight
            output = LMHead.of(output.linear, output.scale, output.cap, second, head.candidates)
        weight, at = torch.exp(-step / gamma(drafts)), batch["at"]
        rows = head_rows(hidden, output, target, batch, batch["mass"], at, step, weight, confidence=confidence)
        if head.candidates and torch.is_grad_enabled() and not selected:
            assert rows.weight is not None
            rows.distance = selector_loss(head, states, signal.head, rows.target, at) * rows.weight
        return rows

    @override
    def confidence_loss(self, rows: Rows, alpha: Tensor) -> Tensor:
        """The cross-entropy of the confidence head's estimates against the acceptance rates (DSpark, section 3)."""
        assert rows.confidence is not None
        odds, factors = rows.confidence.float(), torch.exp(-rows.step / gamma(self.depth))
        loss = functional.binary_cross_entropy_with_logits(odds, alpha.float(), factors, reduction="sum")
        return loss / (rows.mass or 1.0)


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

    for some, place in zip(*(rows.split(rows_at_once(vocab, states.device)) for rows in (states, at))):
        with torch.no_grad():
            wanted, hidden = target.at(place), some[:, : frozen.shape[1]].to(frozen.dtype)
            best = wanted.log_probs(vocab).argmax(-1) if wanted.ids is None else wanted.ids[:, 0].long()
            ids = output(hidden, vocab).topk(min(head.candidates, vocab)).indices
            there = ids == best[:, None]
            label = torch.where(there.any(1), there.int().argmax(1), ids.shape[1] - 1)
            ids.scatter_(1, label[:, None], best[:, None])
        # rows of the weights are gathered again in the backward pass, not kept for it
        part = checkpoint(loss, some, ids, label, use_reentrant=False, preserve_rng_state=False)
        losses.append(cast(Tensor, part))
    return torch.cat(losses)


def anchors_of(labels: NDArray[Any], count: int | None, chance: np.random.Generator | None) -> Ints:
    """Chooses positions of a text whose next token is a label, ascending.

    Args:
        labels: The text's, ``[time]``.
        count: Positions; None: all.
        chance: Draws them. None: they are spread evenly, for validation.
    """
    every = np.flatnonzero(labels[1:] != IGNORE)
    if count is None or len(every) <= count:
        return every
    if chance is None:
        return every[np.arange(count) * len(every) // count]
    return np.sort(chance.choice(every, count, replace=False))


def lengths_of(labels: NDArray[Any], most: int) -> Ints:
    """Returns how many tokens a draft at each position drafts, the labels that follow it without a gap, ``[time]``."""
    ends = np.flatnonzero(np.append(labels[1:] == IGNORE, True))
    position = np.arange(len(labels))
    return np.minimum(ends[np.searchsorted(ends, position)] - position, most)


def gamma(drafts: int) -> float:
    """Returns γ of the weights exp(−i/γ) of a block's slots, as published: 7 for blocks of 16, 5 of 10, 4 of 8."""
    return 7.0 if drafts >= 15 else 5.0 if drafts >= 9 else 4.0


# -- the kinds --------------------------------------------------------------------------------------------------------


@dataclass(kw_only=True, frozen=True)
class Block(Kind):
    """Kinds of block heads, with the ``rank`` of what scores tokens by those before, and ``confidence`` or not."""

    version: str
    rank: int = RANK
    confidence: bool = False
    served: str = "dflash"
    method: str = "block"
    settings: Sequence[str] = ("block",)
    from_target: bool = True

    @override
    def rules(self, settings: Any) -> Rules:
        student, block = settings.student, settings.student.block
        return [
            (not self.rank and block.markov_rank, "student.block.markov_rank", f"and a {self.name} head scores no "
             "token by those before: set it to null"),
            ((block.window or block.size) < block.size, "student.block.window", f"and a block of {block.size} slots "
             "has to fit into it"),
            (self.steps(student) < 1, "student.block.size", "which leaves no token to draft: raise it to 2 or more"),
        ]  # fmt: skip

    @override
    def steps(self, student: Any) -> int:
        return int(student.block.size) - (not self.confidence)

    @override
    def longest(self, student: Any, wanted: int) -> int:
        return self.steps(student)

    def config(self, target: Any, student: Any, mask_id: int) -> Any:
        """The configuration of a head for a target of this one."""
        block = student.block
        return block_config(
            target, self.name, layers=block.layers, block=block.size, mask_id=mask_id,
            target_layers=block.target_layers, draft_vocab=student.draft_vocab, window=block.window,
            causal=block.causal, **self.parts(student),
        )  # fmt: skip

    def parts(self, student: Any) -> Values:
        """What it has beside its layers: arguments of `decode.models.heads.block_config.added`."""
        return {"markov_rank": student.block.markov_rank or self.rank, "confidence": self.confidence}

    @override
    def captured(self, student: Any, config: Any) -> list[int]:
        return list(captured_layers(self.config(config, student, 0)))

    @override
    def layers(self, student: Any) -> int:
        return int(student.block.layers)

    @override
    def check_target(self, target: PreTrainedModel) -> None:
        check_states(target)
        output_head(target, block=True)

    @override
    def shrink(self, student: Any) -> None:
        super().shrink(student)
        change(student.block, layers=1, target_layers=[], markov_rank=8 if self.rank else None)

    @override
    def alike(self, student: Any) -> None:
        change(student.block, size=student.block.size - self.confidence)
        if not self.rank:
            student.block.markov_rank = None

    @override
    def create(self, target: PreTrainedModel, tokenizer: Any, student: Any, seed: int) -> BlockHead:
        mask_id = mask_token(tokenizer, target.get_input_embeddings().num_embeddings)
        config = self.config(target.config.get_text_config(), student, mask_id)
        with seeded(seed):
            return BlockHead(config)

    @override
    def check_given(self, model: BlockHead, student: Any) -> Differences:
        shape, has, told = student.block, vars(model.config), super().check_given(model, student)
        layers = shape.target_layers or list(default_layers(int(has["num_target_layers"]), max(3, shape.layers)))
        told |= {"block.layers": (shape.layers, len(model.layers)), "block.size": (shape.size, model.block)}
        told["block.target_layers"] = layers, [layer - 1 for layer in model.captured_layers]
        if len(set(model.kinds)) == 1:  # settings cannot say a mixture
            told["block.window"], told["block.causal"] = zip((shape.window, shape.causal), model.kinds[0])
        if model.version == self.version and self.rank and shape.markov_rank is not None:
            told["block.markov_rank"] = shape.markov_rank, model.rank
        return told

    @override
    def grow(self, model: BlockHead, student: Any, seed: int) -> tuple[BlockHead, list[str]]:
        """What is added changes nothing at first, but that a DFlash 2 head drafts among its candidates alone."""
        config = copy.deepcopy(model.config)
        config.update(added(self.name, config.hidden_size, **self.parts(student)))
        with torch.enable_grad(), seeded(seed):
            head = BlockHead(config)
        lacking = head.load_state_dict(model.state_dict(), strict=False).missing_keys
        return head, sorted({part for key in lacking for part in key.split(".") if part.endswith(("_head", "_conv"))})

    @override
    def draft(self, model: Any, student: Any, *, accepted_only: bool = False) -> BlockDraft:
        return BlockDraft(model, student.block.anchors)


DFLASH = Block(name="dflash", version="dflash", rank=0)
DSPARK = Block(
    name="dspark", version="dspark", confidence=True, served="dspark", grown=("dflash",),
    notes=["vLLM runs it on a GPU only: its CPU build refuses DSpark."],
)  # fmt: skip
DFLASH2 = Block(
    name="dflash2", version="dflash2", grown=("dflash",),
    notes=["It is a DFlash 2 head (convolutions, choice among candidates), which vLLM and SGLang run on a GPU only."],
)  # fmt: skip
