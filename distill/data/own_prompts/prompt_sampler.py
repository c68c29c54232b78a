"""The target writes prompts: sample after sample, each kept on disk, the same whenever it is asked."""

import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from decode.core.progress import current
from decode.core.sampling import Warp
from decode.models.batched_generation import GROUP, uniform_draws, write_texts
from decode.models.prompt_tokens import written_ids
from distill.config.own_prompts import PromptSettings
from distill.core import ranks
from distill.data.own_prompts.prompt_rows import Sample
from distill.data.own_prompts.user_turn import UserTurn
from distill.data.response_file import Response, ResponseFile


@dataclass
class PromptSampler:
    """Samples number 0, 1, 2, ...; which ones they are depends on the seed and the number alone."""

    tokenizer: PreTrainedTokenizerBase  # The target's
    turn: UserTurn  # where the user's text stands
    settings: PromptSettings  # Sampling
    seed: int  # Of the samples
    file: ResponseFile  # Where they are kept
    model: Callable[[], PreTrainedModel]  # Loads the target; asked once, when a sample is missing
    told: Callable[[str], None]  # Called with a line of progress after every batch

    def __iter__(self) -> Iterator[Sample]:
        """All samples, those on disk first; the target writes further ones as long as there is a next."""
        size, chunk, model = GROUP * self.settings.batch_size, 0, None
        if ranks.is_first():
            self.file.open()
        while True:
            numbers = range(chunk * size, (chunk + 1) * size)
            if ranks.is_first():
                if not all(number in self.file.found for number in numbers):
                    if model is None:
                        model = self.model()
                        current().begin(current().done)
                    began = time.monotonic()
                    lines = list(self.file.fill(self._written(model, numbers), self.tokenizer))
                    speed = sum(len(line.ids) for line in lines) / (time.monotonic() - began)
                    self.told(f"{len(self.file.found)} prompts written ({speed:.0f} tokens/s)")
            else:
                ranks.wait_for(lambda last=numbers[-1]: self.file.complete(last + 1) or None, "the target's prompts")  # type: ignore[misc]
            yield from (self._sample(number) for number in numbers)
            chunk += 1

    def _written(self, model: PreTrainedModel, numbers: Collection[int]) -> Iterator[Response]:
        chosen = list(numbers)
        openings = map(self.settings.opening, chosen)
        texts = write_texts(
            model,
            [written_ids(self.tokenizer, self.turn.text + words) if words else self.turn.before for words in openings],
            Warp(self.settings.temperature, top_p=self.settings.top_p),
            budgets=self.settings.max_tokens + 1,
            stop_ids=self.turn.ends,
            draws=lambda i, count: uniform_draws(self.seed, 5, chosen[i], count=count),
            batch_size=self.settings.batch_size,
            progress=self._count(),
        )
        return (Response(number, text) for number, text in zip(chosen, texts))

    def _count(self) -> Callable[[int], None]:
        work, written = current(), len(self.file.found)

        def count(texts: int) -> None:
            nonlocal written
            written += texts
            work.detail = f"kept, {written} written"

        return count

    def _sample(self, number: int) -> Sample:
        ids = self.file.found[number].ids
        ended = bool(ids) and ids[-1] in self.turn.ends
        words = ids[:-1] if ended else ids
        text = self.tokenizer.decode(words, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return Sample(str(text), len(words), ended, self.settings.opening(number))
