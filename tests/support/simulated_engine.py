"""Rounds of vLLM or llama.cpp in plain forwards of two models, as a server of `decode.engines` answers and counts."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel

from decode.engines.check import Drafts, ServedText
from decode.engines.server import Metrics


class SimulatedEngine:
    """The prompt gives a token; then each round drafts greedily, accepts a token y with p(y) and adds one of the target.

    llama.cpp drafts no more than the budget leaves, less one, and adds nothing to an accepted end token, which it does
    not count, unless that is the last one drafted.
    """

    def __init__(
        self, target: PreTrainedModel, draft: PreTrainedModel | None, length: int, llama: bool = False
    ) -> None:
        self.target, self.draft, self.length, self.llama = target, draft, length, llama
        self.texts = list[ServedText]()

    def settled(self, tokens: float = 0.0) -> Metrics:
        """Counters of all texts so far."""
        counted = [text.drafts for text in self.texts]
        accepted = [sum(each) for each in zip([0.0] * self.length, *(drafts.accepted for drafts in counted))]
        written = sum(len(text.ids) for text in self.texts)
        return Metrics(Drafts(sum(drafts.rounds for drafts in counted), accepted), 0.01 * written, written)

    def differs_in_ids(self, text: str, ids: Sequence[int]) -> None:
        """Its tokenizer is ours."""

    @torch.inference_mode()
    def write(
        self,
        ids: Sequence[int],
        *,
        temperature: float,
        seed: int,
        max_new_tokens: int,
        stop_ids: Sequence[int] = (),
        alone: bool = True,
    ) -> ServedText:
        chance = torch.Generator().manual_seed(seed)

        def target(text: list[int]) -> torch.Tensor:
            logits = self.target(torch.tensor([text])).logits[0, -1].double()
            if not temperature:
                return torch.nn.functional.one_hot(logits.argmax(), len(logits)).double()
            return (logits / temperature).softmax(-1)

        def drawn(p: torch.Tensor) -> int:
            return int(torch.multinomial(p, 1, generator=chance))

        text, drafts = [*ids, drawn(target(list(ids)))], Drafts(accepted=[0.0] * self.length)
        new = text[len(ids) :]
        while len(new) < max_new_tokens and not set(new) & set(stop_ids):
            drafted: list[int] = []
            most = min(self.length, max_new_tokens - len(new) - 1) if self.llama else self.length
            for _ in range(most if self.draft is not None else 0):
                drafted.append(int(self.draft(torch.tensor([text + drafted])).logits[0, -1].argmax()))  # type: ignore[misc]
            accepted, added, p = 0, None, target(text)
            for i, token in enumerate(drafted, 1):
                if torch.rand((), generator=chance, dtype=torch.float64) >= p[token]:
                    p[token] = 0
                    break
                if self.llama and token in stop_ids and i < len(drafted):
                    added = token
                    break
                accepted, p = i, target([*text, *drafted[:i]])
            text = [*text, *drafted[:accepted], drawn(p) if added is None else added]
            if drafted:
                counts = [n + (accepted > i) for i, n in enumerate(drafts.accepted)]
                drafts = Drafts(drafts.rounds + 1, counts)
            new = text[len(ids) :]
        end = next((n for n, i in enumerate(new, 1) if i in stop_ids), len(new))
        new = new[: min(end, max_new_tokens)]
        self.texts.append(ServedText(new, 1.0, 0.0, drafts, self.llama and new[-1] in stop_ids))
        return self.texts[-1]


def simulated(target: PreTrainedModel, draft: PreTrainedModel, cls: type[SimulatedEngine] = SimulatedEngine) -> Any:
    """A stand-in for `decode.engines.server.opened`."""

    @contextmanager
    def opened(engine: Any, length: int | None) -> Any:
        yield cls(target, draft if length else None, length or 1)

    return opened
