"""vLLM's rounds in plain forwards of two models, as a server of `decode.engines` answers and counts them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel

from decode.engines.check import Drafts, ServedText


class SimulatedEngine:
    """The prompt gives a token; then each round drafts greedily, accepts a token y with p(y) and adds one of the target."""

    def __init__(self, target: PreTrainedModel, draft: PreTrainedModel | None, length: int) -> None:
        self.target, self.draft, self.length = target, draft, length

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
            for _ in range(self.length if self.draft is not None else 0):
                drafted.append(int(self.draft(torch.tensor([text + drafted])).logits[0, -1].argmax()))  # type: ignore[misc]
            accepted, p = 0, target(text)
            for token in drafted:
                if torch.rand((), generator=chance, dtype=torch.float64) >= p[token]:
                    p[token] = 0
                    break
                accepted, p = accepted + 1, target([*text, *drafted[: accepted + 1]])
            text = [*text, *drafted[:accepted], drawn(p)]
            if drafted:
                counts = [n + (accepted > i) for i, n in enumerate(drafts.accepted)]
                drafts = Drafts(drafts.rounds + 1, counts)
            new = text[len(ids) :]
        end = next((n for n, i in enumerate(new, 1) if i in stop_ids), len(new))
        return ServedText(new[: min(end, max_new_tokens)], 1.0, 0.0, drafts)


def simulated(target: PreTrainedModel, draft: PreTrainedModel) -> Any:
    """A stand-in for `decode.engines.server.opened`."""

    @contextmanager
    def opened(engine: Any, length: int | None) -> Any:
        yield SimulatedEngine(target, draft if length else None, length or 1)

    return opened
