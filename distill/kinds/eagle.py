"""EAGLE-1, EAGLE-3 and a target's own next-token layers (MTP) in training, unrolled over several drafting steps."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel
from typing_extensions import override

from decode.measure.acceptance import DEPTH
from decode.models.heads.eagle import FeatureHead, captured_layers, head_config, output_head
from decode.models.heads.mtp import MTP, MtpHead, load_mtp
from distill.data.dataset import PLACES, Batch, Chance, places
from distill.kinds.base import GROUPS, Draft, head_rows
from distill.kinds.kind import Differences, Kind, Rules
from distill.kinds.start import check_states
from distill.losses.chunked import Rows
from distill.networks.lm_head import LMHead
from distill.networks.models import seeded
from distill.signal.target import Signal

NOISE = 0.2  # EAGLE-1: width of the uniform noise on the features, times 512 / length
DIVERGENCE = 0.1  # EAGLE-1: weight of the divergence from the target


class FeatureDraft(Draft):
    """A head in training-time test: step s predicts the label tokens that s + 1 tokens of the text precede.

    EAGLE-1's loss is the smooth L1 distance of its states from the target's and a tenth of the divergence.

    Attributes:
        steps: Drafting steps that are trained.
        depth: Drafting steps that validation measures, whether they are trained or not.
        decay: Weight of each further drafting step's loss against the one before.
        noise: Width of the uniform noise on EAGLE-1's features, times 512 / length, as published.
    """

    def __init__(self, model: FeatureHead | MtpHead, steps: int, depth: int, decay: float) -> None:
        super().__init__(model, depth, steps)
        self.decay, self.noise = decay, NOISE if model.version == 1 else 0.0

    @override
    def index(self, batch: Batch, chance: Chance | None) -> Batch:
        """The positions that drafts start from, which of them each row's does, and each row's label token and step."""
        steps = self.depth if chance is None else self.steps
        place = batch[PLACES]
        position = place % batch["input_ids"].shape[1]
        reached = [places(position > step) for step in range(steps)]
        begins = [place[at] - step - 1 for step, at in enumerate(reached)]
        starts = torch.cat(begins).unique()
        return {
            "starts": starts,
            "begun": torch.searchsorted(starts, torch.cat(begins)),
            "at": torch.cat(reached),
            "step": torch.cat([torch.full_like(at, step) for step, at in enumerate(reached)]),
            GROUPS: [len(at) for at in reached],
        }

    @override
    def rows(self, batch: Batch, signal: Signal, *, training: bool = False) -> Rows:
        """The rows of all drafting steps, one step after the other."""
        head, place, at, step = self.model, batch[PLACES], batch["at"], batch["step"]
        target, states = signal.rows(batch)
        true = states.to(next(head.parameters()).dtype)
        features = true
        if self.noise and training:
            features = true + (torch.rand_like(true) - 0.5) * self.noise * 512 / true.shape[1]
        embeds = signal.embedding(functional.pad(batch["input_ids"][:, 1:], (0, 1))).detach().to(features.dtype)
        unrolled = head.unroll(embeds, features, len(batch[GROUPS]), batch["starts"])
        parts = zip(unrolled, batch["begun"].split(batch[GROUPS]))
        state = torch.cat([states.index_select(0, begun) for states, begun in parts])
        weight: Tensor = self.decay ** step.to(torch.float32)
        distance = None
        if head.version == 1:
            wanted = true.flatten(0, 1).index_select(0, place[at])
            distance = functional.smooth_l1_loss(state.float(), wanted.float(), reduction="none").mean(-1) * weight
            weight = weight * DIVERGENCE
        output = LMHead.of(head.lm_head) if isinstance(head, FeatureHead) and head.version == 3 else signal.head
        return head_rows(head.output(state), output, target, batch, len(place), at, step, weight, distance=distance)


@dataclass(kw_only=True, frozen=True)
class Unrolled(Kind):
    """Heads that are unrolled: ``usual`` steps, the loss of each further one weighed by ``decay``."""

    usual: int
    decay: float = 0.8

    @override
    def steps(self, student: Any) -> int:
        return int(student.unroll or self.usual)

    @override
    def draft(self, model: Any, student: Any, *, accepted_only: bool = False) -> FeatureDraft:
        return FeatureDraft(model, self.steps(student), DEPTH, 1.0 if accepted_only else self.decay)


@dataclass(kw_only=True, frozen=True)
class Eagle(Unrolled):
    """EAGLE (on the target's last state) and EAGLE-3 (on three)."""

    version: int

    @override
    def rules(self, settings: Any) -> Rules:
        normed = self.version == 3 and settings.student.model is None and settings.student.norms
        some = self.version == 1 and settings.student.draft_vocab
        return [
            (normed and settings.export.gguf, "student.norms", "and llama.cpp, for which export.gguf asks, reads no "
             "such heads: set it to false"),
            (some, "student.draft_vocab", "and EAGLE-1 heads draft all tokens: set it to null, or take eagle3"),
        ]  # fmt: skip

    @override
    def captured(self, student: Any, config: Any) -> list[int]:
        return list(captured_layers(head_config(config, self.version)))

    @override
    def check_target(self, target: PreTrainedModel) -> None:
        check_states(target)
        if self.version == 1:
            output_head(target)

    @override
    def create(self, target: PreTrainedModel, tokenizer: Any, student: Any, seed: int) -> FeatureHead:
        config = head_config(
            target.config.get_text_config(), self.version, draft_vocab=student.draft_vocab, norms=student.norms
        )
        with seeded(seed):
            return FeatureHead(config)


class NextLayers(Unrolled):
    """A target's own next-token layers (MTP), as FastMTP tunes them."""

    @override
    def rules(self, settings: Any) -> Rules:
        target = settings.target
        return [
            (settings.student.draft_vocab, "student.draft_vocab", "and mtp drafts all tokens: set it to null"),
            (target.kind != "as_is" or target.round_to, "student.kind", "and reads the target's files: set target.kind "
             "to as_is, target.round_to to null"),
        ]  # fmt: skip

    @override
    def create(self, target: PreTrainedModel, tokenizer: Any, student: Any, seed: int) -> Any:
        return load_mtp(target)

    @override
    def check_given(self, model: Any, student: Any) -> Differences:
        return {}


EAGLE = Eagle(
    name="eagle", version=1, served="eagle", usual=1, sniffed=["eagle3"],
    no_gguf="llama.cpp has no EAGLE-1 heads; train student.kind eagle3, or leave export.gguf empty",
)  # fmt: skip
EAGLE3 = Eagle(name="eagle3", version=3, served="eagle3", usual=7, from_target=True)
NEXT_LAYERS = NextLayers(
    name=MTP, version=MTP, served=MTP, usual=3, decay=0.6, start="untuned", decodable=True, of_target=True,
    no_gguf="llama.cpp reads next-token layers from the target's own file; leave export.gguf empty",
)  # fmt: skip
