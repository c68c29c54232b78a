"""What every stage of a run works with: settings, data, the run's folder, the device, a console and a logger."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.loggers import Logger
from rich.console import Console
from transformers import PreTrainedModel

from decode.models.head_files import load_head
from decode.models.heads import DraftHead
from decode.models.loading import load_model, load_tokenizer, stop_ids_of
from decode.progress import working
from distill import ranks
from distill.config.run import Settings
from distill.data.batches import TokenDataset
from distill.data.chat import ChatFormat
from distill.data.corpus import Corpus, kept_corpus, load_corpus
from distill.data.loader import Seen
from distill.data.own_prompts import Sample, user_turn, written_samples
from distill.data.response_file import ResponseFile
from distill.data.target import open_placed, shard_layers
from distill.files import files_state
from distill.stages import RunDir

DATA, MEASUREMENT = "the data", "measurement and export"
"""Names in `StageContext.measured`: the reading of the data, and the end of a run, before the names of its parts."""


@dataclass
class StageContext:
    """Settings, folder and console of a run, with its data, which are read at their first use.

    Attributes:
        settings: Of the run.
        run: Its folder.
        console: Where progress is shown.
        logger: Where losses and results are recorded; None: nowhere.
        keep_corpus: Whether the tokenised data are kept in the run's folder.
        measured: Seconds of its preparations, and the number of tokens or texts.
        seen: What its trainings read, by stage.
        started: When the run began.
    """

    settings: Settings
    run: RunDir
    console: Console
    logger: Logger | None = None
    keep_corpus: bool = True
    measured: dict[str, tuple[float, int]] = field(default_factory=dict)
    seen: dict[str, Seen] = field(default_factory=dict)
    started: float = field(default_factory=time.monotonic)

    @contextmanager
    def timed(self, name: str, count: int) -> Iterator[None]:
        """Measures the block, the first time only: later the results may be there already."""
        began = time.perf_counter()
        yield
        self.measured.setdefault(name, (time.perf_counter() - began, count))

    def line(self, text: str) -> None:
        """Prints what happened."""
        self.console.print(f"  {text}", highlight=False, soft_wrap=True)

    @cached_property
    def corpus(self) -> Corpus:
        """The examples, tokenised as the target does."""
        target, data, seed = self.settings.target, self.settings.data, self.settings.seed
        tokenizer, ends = None, list[int]()
        with working(self.console, "reading the data"), self.timed(DATA, 1):
            if target.model is not None and data.tokenizer is None:
                tokenizer = load_tokenizer(target.model, trust_remote_code=target.trust_remote_code)
                ends = stop_ids_of(target.model, tokenizer, target.trust_remote_code)
            sampler = self._sampler if target.model is not None else None
            load = partial(load_corpus, data, seed=seed, tokenizer=tokenizer, sampler=sampler, ends=ends)
            made_from: list[Any] = [seed, ends]
            if target.model is not None and data.from_target:
                made_from += [files_state([target.model]) or target.model, target.quantization]
            if self.keep_corpus:
                corpus = kept_corpus(data, tokenizer, self.run.work / "corpus", made_from, load)
            else:
                corpus = load()
        for note in corpus.notes:
            self.console.print(f"  {note}", highlight=False)
        return corpus

    def _sampler(self, chat: ChatFormat) -> tuple[Iterator[Sample], Collection[str]]:
        """The prompts that the target writes, and texts that none of them may contain."""
        target, settings, turn = self.settings.target, self.settings.data.prompts, user_turn(chat)
        dtype, seed = self.settings.teacher.responses.dtype or target.dtype, self.settings.seed
        names = "max_tokens", "batch_size", "openings", "openings_share"
        made_from = {
            "target": files_state([str(target.model)]) or target.model,
            "dtype": dtype,
            "quantization": target.quantization,
            "before": turn.before,
            "ends": sorted(turn.ends),
            "seed": seed,
            **{name: getattr(settings, name) for name in names},
        }

        def model() -> PreTrainedModel:
            self.line("the target writes prompts")
            return self.at_work(open_placed(target, str(target.model), self.device, dtype))

        file = ResponseFile(self.run.work / "prompts" / "samples.jsonl", made_from)
        return written_samples(chat.tokenizer, turn, settings, seed, file, model, self.line), turn.markers

    @cached_property
    def validation(self) -> TokenDataset:
        """The examples by which checkpoints are compared."""
        return TokenDataset.of(self.corpus.validation, self.settings.trainer.validation_examples)

    @cached_property
    def examples(self) -> TokenDataset:
        """The examples for distillation."""
        return TokenDataset.of(self.corpus.train, self.settings.teacher.examples)

    def load_target(self, dtype: str | None = None, device: str | torch.device | None = None) -> PreTrainedModel:
        """The run's target, whole on one device; None: in its own number format, where this process trains.

        While drafts are trained it may be elsewhere: `open_target`.
        """
        own = self.settings.target
        how: dict[str, Any] = {"dtype": dtype or own.dtype, "trust_remote_code": own.trust_remote_code}
        return load_model(self.run.target, device=self.device if device is None else device, **how)

    def load_head(self, path: str | Path) -> DraftHead:
        """A head in float32; next-token layers are built as the target's."""
        return load_head(path, self.load_target("float32", "cpu") if self.settings.student.kind == "mtp" else None)

    def open_target(self, path: str | Path | None = None, dtype: str | None = None) -> PreTrainedModel:
        """The frozen target: on its own devices if the settings give it some, over all processes, or on the CPU.

        Args:
            path: Of another target; None: the run's.
            dtype: Another number format than ``target.dtype``.

        Raises:
            UserError: It cannot be read or placed.
        """
        model = open_placed(self.settings.target, path or self.run.target, self.device, dtype)
        if self.settings.target.sharded:
            shard_layers(model, self.device)
        return model

    def at_work(self, model: PreTrainedModel) -> PreTrainedModel:
        """The target where it computes: on its own devices, or the draft's."""
        return model if self.settings.target.placed else model.to(self.device)

    @property
    def device(self) -> torch.device:
        """Where this process trains, and frozen models compute what is kept of them."""
        return ranks.local_device(self.settings.trainer.accelerator, self.settings.trainer.devices)
