"""What every stage of a run works with: settings, data, the run's folder, the device, a console and a logger."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
from lightning.pytorch.loggers import Logger
from rich.console import Console
from transformers import PreTrainedModel

from decode.core.progress import working
from decode.models.loading.open_model import load_model, load_tokenizer
from distill.config.run_settings import Settings
from distill.core import ranks
from distill.core.file_fingerprints import files_state
from distill.core.run_dir import RunDir
from distill.data.batches.datamodule import Seen
from distill.data.batches.token_dataset import TokenDataset
from distill.data.corpus import Corpus, load_corpus
from distill.data.corpus_cache import kept_corpus
from distill.data.own_prompts.prompt_sampler import PromptSampler
from distill.data.own_prompts.user_turn import user_turn
from distill.data.placed_target import open_placed
from distill.data.response_file import ResponseFile
from distill.data.tokenization.chat_masks import ChatFormat

DATA = "the data"
"""What the reading of the data is called in `StageContext.measured`."""
MEASUREMENT = "measurement and export"
"""The same of the end of a run; its parts are called this and what they are."""


@dataclass(frozen=True)
class Measured:
    """What a part of a run took: seconds for so many tokens, or texts."""

    seconds: float
    count: int


@dataclass
class StageContext:
    """Settings, folder and console of a run, with its data, which is read at its first use.

    Attributes:
        settings: of the run.
        run: its folder.
        console: where progress is shown.
        logger: where losses and results are recorded; None: nowhere.
        keep_corpus: whether the tokenised data are kept in the run's folder.
        measured: what its preparations took.
        seen: what its trainings read, by stage.
    """

    settings: Settings
    run: RunDir
    console: Console
    logger: Logger | None = None
    keep_corpus: bool = True
    measured: dict[str, Measured] = field(default_factory=dict)
    seen: dict[str, Seen] = field(default_factory=dict)

    @contextmanager
    def timed(self, name: str, count: int) -> Iterator[None]:
        """Measures what is done inside for so many tokens, the first time; later on it may be there already."""
        began = time.perf_counter()
        yield
        self.measured.setdefault(name, Measured(time.perf_counter() - began, count))

    @cached_property
    def corpus(self) -> Corpus:
        """The examples, tokenised as the target does."""
        target, tokenizer = self.settings.target, None
        with working(self.console, "reading the data"), self.timed(DATA, 1):
            if target.model is not None and self.settings.data.tokenizer is None:
                tokenizer = load_tokenizer(target.model, trust_remote_code=target.trust_remote_code)
            own = self._sampler if target.model is not None else None
            load = partial(load_corpus, seed=self.settings.seed, sampler=own)
            folder = self.run.work / "corpus" if self.keep_corpus else None
            made_from: list[Any] = [self.settings.seed, {}]
            if own is not None and self.settings.data.from_target:
                made_from = [self.settings.seed, files_state([str(target.model)]) or target.model]
                made_from += [target.quantization] if target.quantization else []
            corpus = kept_corpus(self.settings.data, tokenizer, folder, made_from, load)
        for note in corpus.notes:
            self.console.print(f"  {note}", highlight=False)
        return corpus

    def _sampler(self, chat: ChatFormat) -> PromptSampler:
        """The prompts that the target writes."""
        target, settings, tokenizer = self.settings.target, self.settings.data.prompts, chat.tokenizer
        assert target.model is not None
        ends = set() if tokenizer.eos_token_id is None else {int(tokenizer.eos_token_id)}
        turn, dtype = user_turn(chat, ends), self.settings.reference.responses.dtype or target.dtype
        made_from = {
            "target": files_state([target.model]) or target.model,
            "dtype": dtype,
            "before": turn.before,
            "ends": sorted(turn.ends),
            "seed": self.settings.seed,
            **{key: getattr(settings, key) for key in ("temperature", "top_p", "max_tokens", "batch_size")},
        }
        if settings.openings:
            made_from |= {"openings": settings.openings, "share": settings.openings_share}
        if target.quantization:
            made_from["quantization"] = target.quantization
        file = ResponseFile(self.run.work / "prompts" / "samples.jsonl", made_from)

        def model() -> PreTrainedModel:
            self.console.print("  the target writes prompts", highlight=False)
            model = open_placed(target, str(target.model), self.device, dtype)
            return model if target.placed else model.to(self.device)

        return PromptSampler(tokenizer, turn, settings, self.settings.seed, file, model, self.line)

    def line(self, text: str) -> None:
        """Prints what happened."""
        self.console.print(f"  {text}", highlight=False, soft_wrap=True)

    @cached_property
    def validation(self) -> TokenDataset:
        """The examples by which checkpoints are compared."""
        return TokenDataset.of(self.corpus.validation, self.settings.trainer.validation_examples)

    @cached_property
    def examples(self) -> TokenDataset:
        """The examples for distillation."""
        return TokenDataset.of(self.corpus.train, self.settings.reference.examples)

    def load_target(self, dtype: str | None = None, device: str | torch.device | None = None) -> PreTrainedModel:
        """The run's target, whole on one device; None: in its own number format, where this process trains.

        While drafts are trained it may be elsewhere: `distill.teacher.target_model.open_target`.
        """
        own = self.settings.target
        how: dict[str, Any] = {"dtype": dtype or own.dtype, "trust_remote_code": own.trust_remote_code}
        return load_model(self.run.target, device=self.device if device is None else device, **how)

    @property
    def pad_id(self) -> int:
        """Fills up batches; no loss is taken there, so any id would do."""
        pad = self.corpus.tokenizer.pad_token_id
        return pad if isinstance(pad, int) else 0

    @property
    def device(self) -> torch.device:
        """Where this process trains, and frozen models compute what is kept of them."""
        return ranks.local_device(self.settings.trainer.accelerator, self.settings.trainer.devices)
