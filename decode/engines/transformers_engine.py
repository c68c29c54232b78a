"""Transformers' assisted generation as an engine, in this process."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel

from decode.bench.baselines import using_config
from decode.engines.acceptance import Drafts, ServedText


@dataclass
class AssistedGeneration:
    """``target.generate(assistant_model=draft)`` at a fixed draft length; without a draft, plain generation."""

    target: PreTrainedModel
    draft: PreTrainedModel | None = None
    draft_length: int = 5

    def write(
        self, ids: Sequence[int], *, temperature: float, seed: int, max_new_tokens: int, stop_ids: Sequence[int] = ()
    ) -> ServedText:
        """Write one text (see `decode.engines.server.Server.write`); only rounds that no end cuts are counted."""
        prompt = torch.tensor([list(ids)], device=self.target.device)
        pad = next(iter(stop_ids), 0)
        sampling = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
        config = GenerationConfig(
            max_new_tokens=max_new_tokens, eos_token_id=list(stop_ids) or None, pad_token_id=pad, **sampling
        )
        fixed = GenerationConfig(
            num_assistant_tokens=self.draft_length, num_assistant_tokens_schedule="constant",
            assistant_confidence_threshold=0.0, pad_token_id=pad,
        )  # fmt: skip
        extra = {} if self.draft is None else {"assistant_model": self.draft}
        drafting = nullcontext() if self.draft is None else using_config(self.draft, fixed)
        with using_config(self.target, config), drafting, _counted(self.target, len(ids)) as rounds:
            torch.manual_seed(seed)
            began = time.perf_counter()
            out = self.target.generate(prompt, attention_mask=torch.ones_like(prompt), **extra)
            seconds = time.perf_counter() - began
        new = out[0, len(ids) :].tolist()
        # a draft that was shorter held a stop token that the text does not have, which was rejected
        whole = [accepted for start, accepted in rounds if start + self.draft_length < len(new)]
        counts = [float(sum(accepted > i for accepted in whole)) for i in range(self.draft_length)]
        return ServedText(new, seconds, None, Drafts(len(whole), len(whole) * self.draft_length, counts))


@contextmanager
def _counted(model: Any, prompt: int) -> Iterator[list[tuple[int, int]]]:
    """Yields a list that gets (new tokens before it, tokens accepted) of every round of assisted generation."""
    rounds: list[tuple[int, int]] = []
    make = model._get_candidate_generator

    def counting(*args: Any, **options: Any) -> Any:
        generator = make(*args, **options)
        update = generator.update_candidate_strategy

        def note(ids: torch.Tensor, scores: torch.Tensor, matches: Any) -> None:
            rounds.append((ids.shape[1] - int(matches) - 1 - prompt, int(matches)))
            update(ids, scores, matches)

        generator.update_candidate_strategy = note
        return generator

    model._get_candidate_generator = counting
    try:
        yield rounds
    finally:
        del model._get_candidate_generator
