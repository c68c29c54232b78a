"""What the steps of the command share: the target, the decoding modes, the texts it writes and their features."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from transformers import PreTrainedModel

from decode.core.errors import UserError
from decode.core.sampling import Warp
from decode.models.batched import draws_named, write_texts
from decode.models.open import stop_ids
from distill.data.stage_context import StageContext
from distill.data.tokenize import prompt_part
from probes.features import Features, Text, collect
from probes.settings import Settings


@dataclass
class Mode:
    """One decoding mode: its warp, the label its decoder's probes use, and features by split."""

    name: str
    warp: Warp
    label: str
    labels: tuple[str, ...]
    features: dict[str, Features] = field(default_factory=dict)
    texts: dict[str, list[Text]] = field(default_factory=dict)


@dataclass
class Lab:
    """What the steps work with."""

    settings: Settings
    bench: StageContext
    model: PreTrainedModel
    exits: list[int]
    console: Console
    logger: Any = None
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def step(self, name: str, title: str) -> Iterator[None]:
        """Says what is being done, and times it."""
        began = time.perf_counter()
        with self.console.status(f"  {title}"):
            yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - began
        self.console.print(f"  {title} [dim]{self.seconds[name]:.1f} s[/dim]", highlight=False)

    @property
    def stops(self) -> set[int]:
        """Tokens that end a text."""
        return set(stop_ids(self.model, self.bench.corpus.tokenizer))


def read_prompts(lab: Lab) -> dict[str, list[list[int]]]:
    """Prompts of the three splits as token ids; no text of one is in another."""
    settings, corpus = lab.settings.probes, lab.bench.corpus
    counts = {"train": settings.prompts, "validation": settings.validation_prompts, "test": settings.test_prompts}
    found = {}
    for split, count in counts.items():
        rows = getattr(corpus, split)
        rows = rows.select(range(min(count, len(rows))))
        found[split] = [prompt_part(ids, labels) for ids, labels in zip(rows["input_ids"], rows["labels"])]
        found[split] = [ids for ids in found[split] if ids]
        if not found[split]:
            raise UserError(f"the {split} split has no prompts; plain texts need a longer data.max_length")
    return found


def add_features(lab: Lab, mode: Mode, prompts: dict[str, list[list[int]]]) -> None:
    """Has the target write its texts, and reads them once."""
    settings, seed = lab.settings.probes, lab.settings.seed
    limit = int(getattr(lab.model.config.get_text_config(), "max_position_embeddings", 0) or 1 << 30)
    with lab.step("texts", f"{mode.name} texts of the target"):
        for i, (split, some) in enumerate(prompts.items()):
            written = write_texts(
                lab.model, some, mode.warp, budgets=[min(settings.max_new_tokens, limit - len(ids)) for ids in some],
                stop_ids=lab.stops, draws=draws_named(seed + i), batch_size=settings.batch_size,
            )  # fmt: skip
            mode.texts[split] = [([*ids, *text], len(ids)) for ids, text in zip(some, written)]
    with lab.step("features", f"{mode.name} texts read once, {len(lab.exits)} exits"):
        for i, (split, texts) in enumerate(mode.texts.items()):
            mode.features[split] = collect(
                lab.model, texts, mode.warp, exits=lab.exits, positions=settings.positions,
                batch_size=settings.batch_size, seed=seed + i,
            )  # fmt: skip
