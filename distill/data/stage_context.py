"""What every stage of a run works with: settings, data, the run's folder, the device, a console and a logger."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from lightning.pytorch.loggers import Logger
from rich.console import Console

from decode.models.open import load_tokenizer
from distill.config.settings import Settings
from distill.core import ranks
from distill.core.run_dir import RunDir
from distill.data.corpus import Corpus, load_corpus
from distill.data.token_dataset import TokenDataset


@dataclass
class StageContext:
    """Settings, folder and console of a run, with its data, which is read at its first use.

    Attributes:
        settings: of the run.
        run: its folder.
        console: where progress is shown.
        logger: where losses and results are recorded; None: nowhere.
    """

    settings: Settings
    run: RunDir
    console: Console
    logger: Logger | None = None

    @cached_property
    def corpus(self) -> Corpus:
        """The examples, tokenised as the target does."""
        target, tokenizer = self.settings.target, None
        if target.model is not None and self.settings.data.tokenizer is None:
            tokenizer = load_tokenizer(target.model, trust_remote_code=target.trust_remote_code)
        with self.console.status("  reading the data"):
            corpus = load_corpus(self.settings.data, seed=self.settings.seed, tokenizer=tokenizer)
        for note in corpus.notes:
            self.console.print(f"  {note}", highlight=False)
        return corpus

    @cached_property
    def validation(self) -> TokenDataset:
        """The examples by which checkpoints are compared."""
        return TokenDataset.of(self.corpus.validation, self.settings.trainer.validation_examples)

    @cached_property
    def examples(self) -> TokenDataset:
        """The examples for distillation."""
        return TokenDataset.of(self.corpus.train, self.settings.reference.examples)

    @property
    def pad_id(self) -> int:
        """Fills up batches; no loss is taken there, so any id would do."""
        pad = self.corpus.tokenizer.pad_token_id
        return pad if isinstance(pad, int) else 0

    @property
    def device(self) -> torch.device:
        """Where this process trains, and frozen models compute what is kept of them."""
        return ranks.local_device(self.settings.trainer.accelerator, self.settings.trainer.devices)
