"""Transformers' assisted generation as an engine, in this process."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel

from decode.bench.baselines import using_config
from decode.engines.acceptance import Drafts, ServedText


@dataclass
class AssistedGeneration:
    """``target.generate(assistant_model=draft)`` at a fixed draft length."""

    target: PreTrainedModel  # the target
    draft: PreTrainedModel | None = None  # the draft; None generates without one
    draft_length: int = 5  # tokens drafted a round

    def write(
        self, ids: Sequence[int], *, temperature: float, seed: int, max_new_tokens: int, stop_ids: Sequence[int] = ()
    ) -> ServedText:
        """One text; only rounds that no end cut short are counted (see `engine_settings.Writer`)."""
        model: Any = self.target
        prompt = torch.tensor([list(ids)], device=model.device)
        sampling = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
        config = GenerationConfig(
            max_new_tokens=max_new_tokens,
            eos_token_id=list(stop_ids) or None,
            pad_token_id=next(iter(stop_ids), 0),
            **sampling,
        )
        extra: dict[str, Any] = {}
        rounds: list[tuple[int, int]] = []
        with using_config(model, config), _counted(model, rounds, len(ids)):
            torch.manual_seed(seed)
            began = time.perf_counter()
            if self.draft is None:
                out = model.generate(prompt, attention_mask=torch.ones_like(prompt))
            else:
                fixed = GenerationConfig(
                    num_assistant_tokens=self.draft_length,
                    num_assistant_tokens_schedule="constant",
                    assistant_confidence_threshold=0.0,
                    pad_token_id=config.pad_token_id,
                )
                with using_config(self.draft, fixed):
                    extra["assistant_model"] = self.draft
                    out = model.generate(prompt, attention_mask=torch.ones_like(prompt), **extra)
            seconds = time.perf_counter() - began
        new = out[0, len(ids) :].tolist()
        drafts = Drafts(accepted=[0.0] * self.draft_length)
        for start, accepted in rounds:
            # a draft that was shorter here held an end-of-text token that the text has not: it was rejected
            if start + self.draft_length < len(new):
                drafts.rounds += 1
                drafts.drafted += self.draft_length
                for i in range(accepted):
                    drafts.accepted[i] += 1
        return ServedText(new, seconds, None, drafts)


@contextmanager
def _counted(model: Any, rounds: list[tuple[int, int]], prompt: int) -> Iterator[None]:
    """Note (new tokens before it, tokens accepted) of every round of assisted generation."""
    make = model._get_candidate_generator

    def counting(*args: Any, **options: Any) -> Any:
        generator = make(*args, **options)
        update = generator.update_candidate_strategy

        def note(ids: torch.Tensor, scores: torch.Tensor, matches: Any) -> None:
            accepted = int(matches)
            rounds.append((ids.shape[1] - accepted - 1 - prompt, accepted))
            update(ids, scores, matches)

        generator.update_candidate_strategy = note
        return generator

    model._get_candidate_generator = counting
    try:
        yield
    finally:
        del model._get_candidate_generator
