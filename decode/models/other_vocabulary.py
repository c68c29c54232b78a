"""A draft model of another vocabulary, in the role of one of the target's own."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel

from decode.core.proposal import Draft
from decode.core.runner import Runner, WrappedRunner
from decode.models.eagle.head import FeatureHead
from decode.models.vocabulary import Intersection


@dataclass
class ForeignDraft:
    """A draft model with what its vocabulary shares with the target's."""

    model: PreTrainedModel
    vocabulary: Intersection

    def parameters(self) -> Iterator[nn.Parameter]:
        """Of the model."""
        return self.model.parameters()

    @property
    def generation_config(self) -> GenerationConfig | None:
        """Of the model."""
        return self.model.generation_config


DraftModel = PreTrainedModel | FeatureHead | ForeignDraft  # what can draft for a target, besides its own layers


class ForeignRunner(WrappedRunner):
    """Reads the target's ids and gives logits over them, while the cache holds the translated text.

    Drafters need not know: `length`, `truncate` and the ids are the target's throughout.

    Attributes:
        limit: tokens of the target that fit if every one is a single token for the draft; `room` knows better.
    """

    def __init__(self, runner: Runner, vocabulary: Intersection) -> None:
        super().__init__(runner, "a draft of another vocabulary reads chains only", vocabulary.target.size)
        self.vocabulary = vocabulary
        self._ends: list[int] = []  # positions of the cache that the text takes up to each token

    @property
    def length(self) -> int:
        """Tokens of the target that have been read."""
        return len(self._ends)

    def fork(self, count: int) -> list[Runner]:
        """See `Runner.fork`."""
        return [ForeignRunner(inner, self.vocabulary) for inner in self.inner.fork(count)]

    def room(self, ids: Sequence[int]) -> int:
        """See `Runner.room`; each token to come is one that the vocabularies share."""
        unread = sum(len(self.vocabulary.translate(token)) for token in ids[self.length :])
        return self.inner.limit - self._position(self.length) - unread

    def read(self, tokens: Tensor, tree: Draft | None = None, head: int | None = None) -> Tensor:
        """See `Runner.read`: a row follows the last of a token's translations."""
        assert tree is None, self.tree_refusal
        pieces = [self.vocabulary.translate(token) for token in tokens.tolist()]
        feed = torch.tensor([i for piece in pieces for i in piece], dtype=torch.long, device=self.device)
        ends = list(accumulate(map(len, pieces)))
        needed = ends if head is None else ends[len(ends) - head :]
        before = self._position(self.length)
        logits = self.inner.read(feed, head=len(feed) - needed[0] + 1 if needed else 0)
        self._ends += [before + end for end in ends]
        if not needed:
            return logits.new_empty(0, self.vocab_size)
        rows = [end - needed[0] for end in needed]
        self.hidden = self.inner.hidden[-len(logits) :]
        if len(rows) < len(logits):
            self.hidden, logits = self.hidden[rows], logits[rows]
        return self.vocabulary.to_target(logits)

    def truncate(self, length: int) -> None:
        """See `Runner.truncate`."""
        if length <= self.length:
            self.inner.truncate(self._position(length))
            del self._ends[length:]

    def _position(self, length: int) -> int:
        return self._ends[length - 1] if length else 0


@torch.inference_mode()
def foreign_logits(draft: ForeignDraft, ids: Sequence[int], prompt_length: int) -> Tensor:
    """What a draft of another vocabulary would draft at each response position of one text, by teacher forcing.

    Returns:
        Logits ``[response, vocab]`` over the target's ids. Behind the end of the draft's context a row is impossible
        (all −inf but the first id).
    """
    vocabulary = draft.vocabulary
    pieces = [vocabulary.translate(token) for token in ids[:-1]]
    limit = int(getattr(draft.model.config.get_text_config(), "max_position_embeddings", 0) or 1 << 30)
    feed = [i for piece in pieces for i in piece][:limit]
    needed = [end - 1 for end in accumulate(map(len, pieces))][prompt_length - 1 :]
    seen = [row for row in needed if row < len(feed)]
    tokens = torch.tensor([feed], device=draft.model.device)
    keep = len(feed) - seen[0] if seen else 1
    logits = draft.model(input_ids=tokens, use_cache=False, logits_to_keep=keep).logits[0]
    found = vocabulary.to_target(logits[[row - seen[0] for row in seen]])
    rows = found.new_full((len(needed), found.shape[-1]), -torch.inf)
    rows[:, 0] = 0.0
    rows[: len(seen)] = found
    return rows
