"""What every stage of a run works with: settings, data, the run's folder, the device, a console and a logger."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from lightning.pytorch.loggers import Logger
from rich.console import Console
from transformers import PreTrainedModel
from transformers.quantizers import AutoQuantizationConfig

from decode.models.loading import load_model, load_tokenizer
from decode.progress import working
from distill import ranks
from distill.config.run import Settings
from distill.config.training import TargetSettings
from distill.data.batches import Seen, TokenDataset
from distill.data.chat import ChatFormat
from distill.data.corpus import Corpus, kept_corpus, load_corpus
from distill.data.own_prompts import PromptSampler, user_turn
from distill.data.response_file import ResponseFile
from distill.files import RunDir, files_state

Item = TypeVar("Item")


def open_placed(
    settings: TargetSettings, path: str | Path, device: torch.device, dtype: str | None = None
) -> PreTrainedModel:
    """The frozen target in evaluation mode: in its own place and bits if the settings give it some, else on the CPU.

    Args:
        settings: The target's.
        path: Its folder, Hub name or file.
        device: The draft's, where a quantised target without a place of its own is read to.
        dtype: Another number format than ``target.dtype``.

    Raises:
        UserError: It cannot be read or placed.
    """
    local, world = (int(os.environ.get(name) or other) for name, other in (("LOCAL_RANK", 0), ("LOCAL_WORLD_SIZE", 1)))
    own, more = share_of(settings.devices, local, world), dict[str, Any]()
    if len(own) > 1:
        more = {"device_map": "balanced", "max_memory": _room(own)}
    if settings.quantization:
        more["quantization_config"] = AutoQuantizationConfig.from_dict(settings.quantization)
    place = own[0] if own else device if settings.quantization else "cpu"
    trust, format = settings.trust_remote_code, dtype or settings.dtype
    return load_model(path, device=place, dtype=format, trust_remote_code=trust, **more)


def share_of(items: Sequence[Item], rank: int, world: int) -> list[Item]:
    """One process's part of what a machine has: a run of them, or one that several processes share."""
    if len(items) < world:
        return [items[rank % len(items)]] if items else []
    return list(items[rank * len(items) // world : (rank + 1) * len(items) // world])


def _room(devices: Sequence[str]) -> dict[int | str, int]:
    """Free bytes of each of the devices, by the numbers by which accelerate knows them."""
    places = [torch.device(name) for name in devices]
    return {place.index or 0: torch.cuda.mem_get_info(place)[0] for place in places if place.type == "cuda"}


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
            made_from: list[Any] = [self.settings.seed, {}]
            if own is not None and self.settings.data.from_target:
                made_from = [self.settings.seed, files_state([str(target.model)]) or target.model]
                made_from += [target.quantization] if target.quantization else []
            data = self.settings.data
            if self.keep_corpus:
                corpus = kept_corpus(data, tokenizer, self.run.work / "corpus", made_from, load)
            else:
                corpus = load(data, tokenizer=tokenizer)
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

        While drafts are trained it may be elsewhere: `distill.teacher.signals.open_target`.
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
