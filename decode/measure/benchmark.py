"""Benchmarks: methods × suites × temperatures on one machine, every prompt given to all methods in turn.

What is compared with what, and why it is fair:

- The baseline of `speedup` is this project's own loop without a drafter, on the same forward and cache;
  `model.generate` is the baseline of `speedup_vs_generate`. A speedup over a slow baseline says little.
- All methods see a prompt before the next prompt comes, in an order that turns from one repeat to the next, so that a
  change in the machine's load meets all of them. Ratios are taken between runs side by side.
- An adaptive method keeps what it learned from prompt to prompt, but every repeat has its own copy of it, so that no
  method has seen a prompt before.
- Time is wall time of the whole text, reading the prompt included; token ids are counted, not words.
- Texts end at their natural end, so that accuracy means something. Lossless methods under greedy decoding then write
  the same tokens. Where lengths may differ (sampling, relaxed rules), `ignore_eos` gives all texts the full length.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from decode.core.errors import UserError
from decode.measure.entries import REFERENCE, Contender, Entrant, with_baselines
from decode.measure.session import BenchOptions, Item, Workbench
from decode.measure.statistics import (
    Record,
    Take,
    accuracy,
    analysis,
    by_prompt,
    counts,
    identical_share,
    plain,
    speeds,
)
from decode.measure.transformers_baselines import PEERS, quiet
from decode.methods import METHODS
from decode.models.foreign import DraftModel
from decode.models.text import Detokenizer, marked
from decode.prompts.suites import Suite

TREES = {"rest", "adaptix", "adaptix-best-first", "lookahead", "eagle-tree"}
Progress = Callable[[int, int, str], None]
"""Called with texts done, texts in all, and what is being done."""


@dataclass
class Block:
    """The results of one suite at one temperature."""

    suite: str
    temperature: float
    rows: list[dict[str, Any]]
    analysis: list[dict[str, Any]]
    complete: bool = True


class Bench(Workbench):
    """A workbench with contenders on it.

    Attributes:
        blocks: results so far; after an interrupt the last one holds the prompts that all methods had finished.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        drafts: Mapping[str, DraftModel] | None,
        tokenizer: PreTrainedTokenizerBase,
        options: BenchOptions | None = None,
    ) -> None:
        super().__init__(model, drafts, tokenizer, options)
        self.blocks: list[Block] = []
        self._scores: dict[tuple[int, str], float] = {}

    # -- what callers use ------------------------------------------------------------------------------------------

    def run(
        self,
        suites: Iterable[Suite],
        contenders: Iterable[Contender],
        progress: Progress | None = None,
        *,
        finished: Iterable[Block] = (),
        on_block: Callable[[Block], None] | None = None,
    ) -> list[dict[str, Any]]:
        """Measure all contenders on all suites; the baselines are added at every temperature.

        Args:
            suites: prompts with their scorers.
            contenders: in the order of the table.
            progress: told of every text.
            finished: blocks of an earlier run that need not be measured again.
            on_block: told of every block that is complete.

        Returns:
            The rows of all blocks.

        Raises:
            UserError: a part is missing, or no prompt fits the context.
            KeyboardInterrupt: passed on after `blocks` has been brought up to date.
        """
        suites, contenders = list(suites), list(contenders)
        self._check(contenders)
        temperatures = list(dict.fromkeys(c.temperature for c in contenders))
        table = {t: with_baselines([c for c in contenders if c.temperature == t], t) for t in temperatures}
        self.blocks = list(finished)
        done = {(block.suite, block.temperature) for block in self.blocks}
        items = {suite.name: self.items(suite) for suite in suites}
        if self.options.costs:
            self.measure_costs(
                [item for some in items.values() for item in some],
                dict.fromkeys(c.draft for c in contenders if c.needs_draft and c.draft is not None),
                longest=max((c.options.draft_length or 0 for c in contenders), default=0),
                trees=any(c.method in TREES for c in contenders),
                repeats=max(1, self.options.cost_turns // 4),
            )
        jobs = [(s, t) for s in suites for t in temperatures if (s.name, t) not in done]
        total = sum(len(items[s.name]) * len(table[t]) for s, t in jobs) * self.options.repeats
        count = 0

        def tell(label: str) -> None:
            nonlocal count
            count += 1
            if progress is not None:
                progress(count, total, label)

        for suite, temperature in jobs:
            entrants = [Entrant(self, contender) for contender in table[temperature]]
            try:
                with quiet():
                    self._block(items[suite.name], entrants, tell, suite.name)
            except KeyboardInterrupt:
                if any(entrant.record.takes for entrant in entrants):
                    self.blocks.append(self._report(suite, items[suite.name], entrants, complete=False))
                raise
            self.blocks.append(self._report(suite, items[suite.name], entrants))
            if on_block is not None:
                on_block(self.blocks[-1])
        return self.rows

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The rows of all blocks, ready for JSON."""
        return [row for block in self.blocks for row in block.rows]

    @property
    def analysis(self) -> list[dict[str, Any]]:
        """For every row: acceptance by position, draft lengths, seconds by phase, sample texts."""
        return [entry for block in self.blocks for entry in block.analysis]

    def _check(self, contenders: Sequence[Contender]) -> None:
        for c in contenders:
            if c.needs_draft and c.draft not in self.drafts:
                wanted = f"no draft named {c.draft!r}" if c.draft else "no draft"
                raise UserError(f"{c.label} drafts with a model, but there is {wanted}; give one with --draft")
            if c.method not in PEERS:
                Entrant(self, c)  # refuses what is missing before anything is measured

    # -- measurement -----------------------------------------------------------------------------------------------

    def _block(self, items: Sequence[Item], entrants: list[Entrant], tell: Callable[[str], None], suite: str) -> None:
        options = self.options
        for entrant in entrants:
            self._warm_up(entrant, items[0].ids)
        running = [e for e in entrants if not e.note]
        for i, item in enumerate(items):
            takes: dict[int, list[Take]] = {id(e): [] for e in running}
            for repeat in range(options.repeats):
                turn = (i * options.repeats + repeat) % len(running)
                for entrant in running[turn:] + running[:turn]:
                    seed = options.seed + 1009 * i + repeat
                    sample = i < options.samples and repeat == 0
                    take = entrant.take(item.ids, repeat, seed, options.max_new_tokens, sample)
                    takes[id(entrant)].append(take)
                    tell(f"{suite} T={entrant.contender.temperature:g} {entrant.contender.label}")
            for entrant in running:
                entrant.record.takes.append(takes[id(entrant)])
            for meter in self.meters.values():  # costs too, under the load that the methods meet
                meter.run(1 + options.cost_turns // len(items), seconds=1.0)

    def _warm_up(self, entrant: Entrant, ids: list[int]) -> None:
        """A short text, then every verification shape of a fixed length."""
        try:
            entrant.take(ids, -1, 0, min(24, self.options.max_new_tokens))
        except UserError:
            raise
        except (ValueError, RuntimeError, NotImplementedError, AttributeError, TypeError) as error:
            if entrant.peer is None:
                raise
            entrant.note = f"transformers refused: {type(error).__name__}: {str(error).splitlines()[0][:160]}"
            return
        if entrant.peer is None and entrant.draft_length and entrant.contender.needs_draft:
            with torch.inference_mode():
                for n in range(1, min(entrant.draft_length + 1, self.runner.limit) + 1):
                    self.runner.truncate(0)
                    self.runner.read(torch.zeros(n, dtype=torch.long, device=self.runner.device))
                self.runner.truncate(0)

    # -- results ---------------------------------------------------------------------------------------------------

    def _report(self, suite: Suite, items: Sequence[Item], entrants: list[Entrant], complete: bool = True) -> Block:
        self.costs = {name: meter.cost() for name, meter in self.meters.items()}
        rows, details = [], []
        for entrant in entrants:
            where = {
                "name": entrant.contender.label,
                "suite": suite.name,
                "temperature": entrant.contender.temperature,
            }
            rows.append(plain(where | self._row(entrant, suite, items, _opponents(entrant, entrants))))
            if entrant.record.takes:
                prompts = by_prompt(entrant.record, self._marks(entrant.record, suite, items))
                kept = {"samples": self._samples(entrant, items), "prompts": prompts}
                details.append(plain(where | analysis(entrant.record) | entrant.learned | kept))
        return Block(suite.name, entrants[0].contender.temperature, rows, details, complete)

    def _row(self, entrant: Entrant, suite: Suite, items: Sequence[Item], of: dict[str, Record]) -> dict[str, Any]:
        contender, record = entrant.contender, entrant.record
        row: dict[str, Any] = dict.fromkeys(COLUMNS)
        row |= {
            "method": contender.method,
            "draft": contender.draft if contender.needs_draft else None,
            "draft_length": entrant.draft_length,
            "lossless": contender.lossless,
            "peer": entrant.peer is not None,
            "note": entrant.note,
            "prompts": len(record.takes),
            "repeats": self.options.repeats,
        }
        if not record.takes:
            return row
        row |= speeds(record, of, self.options.seed)
        in_turn = contender.needs_draft and contender.method not in TREES  # one draft forward for each token
        row |= counts(record, self.costs.get(row["draft"]), in_turn)
        row |= accuracy(self._marks(record, suite, items))
        if contender.temperature == 0 and REFERENCE in of:
            row["identical_share"] = identical_share(record, of[REFERENCE])
            row["identical_to_target"] = row["identical_share"] == 1.0
        return row

    def _marks(self, record: Record, suite: Suite, items: Sequence[Item]) -> list[float]:
        """The mean score of each prompt's texts; empty where the suite has no scorer."""
        means = []
        for item, takes in zip(items, record.takes) if suite.score is not None else ():
            marks = []
            for take in takes:
                text = self.text(take.new_ids)
                key = (id(item), text)
                if key not in self._scores:
                    self._scores[key] = float(suite.score(item.prompt, text))  # type: ignore[misc]
                marks.append(self._scores[key])
            means.append(statistics.fmean(marks))
        return means

    def _samples(self, entrant: Entrant, items: Sequence[Item]) -> list[dict[str, Any]]:
        if entrant.peer is not None:
            return []
        alone = METHODS[entrant.contender.method][0] == "none"
        return [
            {
                "prompt": item.prompt.text,
                "text": self.text(out.new_ids),
                "tokens": marked(Detokenizer(self.tokenizer), out.new_ids, out.written_by, out.rejected, alone),
            }
            for item, out in zip(items, entrant.samples)
        ]


COLUMNS = (
    "tokens_per_second", "speedup", "speedup_ci95", "speedup_micro", "speedup_without_prefill", "speedup_vs_generate",
    "speedup_vs_generate_ci95", "speedup_vs_assistant", "speedup_vs_assistant_ci95", "predicted_speedup",
    "block_efficiency", "alpha", "alpha_se", "accepted_per_tested", "accepted_per_drafted", "tv_spent", "js_distance",
    "accuracy", "accuracy_se", "identical_to_target", "identical_share", "drafted_per_round", "bookkeeping_share",
    "rounds", "tokens",
)  # fmt: skip
"""Measured columns; every row has all of them, null where they do not apply."""


def _opponents(entrant: Entrant, entrants: Sequence[Entrant]) -> dict[str, Record]:
    """The records that a row is compared with, by method; of several assistants the one most like this contender."""
    ours = entrant.contender
    ran = [e for e in entrants if e.record.takes]

    def unlike(e: Entrant) -> tuple[bool, bool]:
        theirs = e.contender
        return ours.draft not in (None, theirs.draft), e.draft_length != entrant.draft_length

    return {e.contender.method: e.record for e in sorted(ran, key=unlike, reverse=True)}


def run_bench(
    target: PreTrainedModel,
    drafts: Mapping[str, DraftModel] | None,
    tokenizer: PreTrainedTokenizerBase,
    suites: Iterable[Suite],
    contenders: Iterable[Contender],
    options: BenchOptions | None = None,
    progress: Progress | None = None,
) -> Bench:
    """Measure once; the result has ``rows``, ``analysis`` and ``costs`` (see `Bench`)."""
    bench = Bench(target, drafts, tokenizer, options)
    bench.run(suites, contenders, progress)
    return bench
