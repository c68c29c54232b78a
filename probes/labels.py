"""What the steps of ``python -m probes`` share: the target, the decoding modes, the texts it writes, their features."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

from rich.console import Console
from transformers import PreTrainedModel

from decode.bench.suites import Suite
from decode.drafters.early_exit import Text
from decode.errors import UserError
from decode.models.loading import stop_ids
from decode.progress import working
from decode.sampling import LogitsWarper
from distill.config.drafts import ResponseSettings
from distill.data.chat import prompt_part
from distill.data.context import StageContext
from distill.data.corpus import test_suite
from distill.files import fingerprint
from distill.responses.store import Job, answered_by_all, answered_here
from probes.features import Features, collect_together
from probes.settings import ProbeSettings, ProbesSettings


@dataclass
class Mode:
    """One decoding mode."""

    name: str  # ``greedy`` or ``sampled``
    warp: LogitsWarper  # its sampling settings
    label: str  # what the probes that decoding uses in this mode predict
    labels: tuple[str, ...]  # of all probes that are trained for it
    texts: dict[str, list[Text]] = field(default_factory=dict)  # what the target wrote, by split
    features: dict[str, Features] = field(default_factory=dict)  # of these texts, by split


@dataclass
class ProbeContext:
    """What every step works with; the run's folder, data, logger and console are those of `stages`."""

    settings: ProbesSettings
    stages: StageContext
    model: PreTrainedModel
    exits: list[int]
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def options(self) -> ProbeSettings:
        """The settings of this command."""
        return self.settings.probes

    @property
    def console(self) -> Console:
        """Where progress is shown."""
        return self.stages.console

    def say(self, sentence: str) -> None:
        """Prints a line below the step that it belongs to."""
        self.console.print(f"  {sentence}", highlight=False)

    @property
    def folder(self) -> Path:
        """Where texts are kept."""
        return self.stages.run.work / "probes"

    @property
    def target(self) -> str:
        """What the target was made from."""
        record = self.stages.run.record("target")
        assert record is not None
        return record.fingerprint

    @contextmanager
    def step(self, name: str, title: str, *, bars: bool = True) -> Iterator[None]:
        """Prints what is being done and adds its time to `seconds`; without bars, where its parts draw their own."""
        began = time.perf_counter()
        with working(self.console, title, bars=bars):
            yield
        spent = time.perf_counter() - began
        self.seconds[name] = self.seconds.get(name, 0.0) + spent
        self.say(f"{title} [dim]{spent:.1f} s[/dim]")

    def suite(self) -> Suite:
        """The test prompts of the real runs, with the scorer of their task."""
        return test_suite(self.stages.corpus, self.settings.data.source, self.options.bench_prompts)

    def prompts(self) -> dict[str, list[list[int]]]:
        """Prompts of the three splits as token ids; no text of one is in another."""
        options, corpus = self.options, self.stages.corpus
        counts = {"train": options.prompts, "validation": options.validation_prompts, "test": options.test_prompts}
        found = {}
        for split, count in counts.items():
            rows = getattr(corpus, split)
            rows = rows.select(range(min(count, len(rows))))
            parts = (prompt_part(ids, labels) for ids, labels in zip(rows["input_ids"], rows["labels"]))
            found[split] = [ids for ids in parts if ids]
            if not found[split]:
                raise UserError(f"the {split} split has no prompts; plain texts need a longer data.max_length")
        return found

    def add_features(self, mode: Mode, prompts: dict[str, list[list[int]]]) -> None:
        """Has the target answer the prompts, and reads the texts once for all exits."""
        with self.step("texts", f"{mode.name} texts of the target", bars=False):
            for i, (split, some) in enumerate(prompts.items()):
                written = self._written(mode, split, some, self.settings.seed + i)
                mode.texts[split] = [([*ids, *text], len(ids)) for ids, text in zip(some, written)]
        with self.step("features", f"{mode.name} texts read once, {len(self.exits)} exits", bars=False):
            mode.features = self.read(mode)

    def _written(self, mode: Mode, split: str, prompts: list[list[int]], seed: int) -> list[list[int]]:
        """The target's texts for the prompts of a split; an interrupted run goes on with those that it has written."""
        options, tokenizer = self.options, self.stages.corpus.tokenizer
        limit = int(getattr(self.model.config.get_text_config(), "max_position_embeddings", 0) or 1 << 30)
        budgets = [max(0, min(options.max_new_tokens, limit - len(ids))) for ids in prompts]
        how = ResponseSettings(
            temperature=mode.warp.temperature, top_p=mode.warp.top_p, batch_size=options.batch_size,
            max_new_tokens=options.max_new_tokens,
        )  # fmt: skip
        return answered_by_all(
            [Job(i, ids, "", budget) for i, (ids, budget) in enumerate(zip(prompts, budgets))],
            how,
            self.folder,
            f"{mode.name}-{split}",
            {"target": self.target, "prompts": fingerprint(prompts), "seed": seed} | how.written(),
            writer=lambda: answered_here(self.model, how, seed, set(stop_ids(self.model, tokenizer))),
            tokenizer=tokenizer,
            around=partial(working, self.console, f"{mode.name} texts, {split}"),
        )

    def read(self, mode: Mode, draft: PreTrainedModel | None = None) -> dict[str, Features]:
        """Features of a mode's texts by split, at every exit or at a draft model's last layer.

        They are in the first process alone.
        """
        found = {}
        for i, (split, texts) in enumerate(mode.texts.items()):
            with working(self.console, f"{mode.name} texts read, {split}", len(texts)):
                features = collect_together(
                    self.folder,
                    [self.target, asdict(self.options), self.settings.seed, mode.name, split, draft is not None],
                    texts,
                    target=self.model,
                    warp=mode.warp,
                    exits=self.exits,
                    draft=draft,
                    seed=self.settings.seed + i,
                    positions=None if split == "validation" else self.options.positions,
                    batch_size=self.options.batch_size,
                )
            if features is not None:
                found[split] = features
        return found
