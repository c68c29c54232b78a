"""Benchmarks: methods × suites × temperatures × batch sizes on one machine, all methods side by side.

- `speedup` compares with this project's own loop without a drafter, on the same forward and cache, and
  `speedup_vs_generate` with `model.generate`. A slow baseline would overstate a method.
- At batch size 1 all methods decode a prompt (of a chat all turns) before the next prompt comes. At batch size B a
  method decodes all prompts with B sequences at once, where a waiting prompt takes the place of a finished one; there
  are at least 2·B prompts. The order of the methods rotates with each repeat, so that a change in the machine's load
  affects all of them, and ratios are taken between runs of the same repeat.
- An adaptive method keeps what it learned from prompt to prompt, but every repeat has its own copy of it, so that no
  method has seen a prompt before.
- Time is wall time of the whole text, reading the prompt included; token ids are counted, not words.
- Texts end at their natural end, so that accuracy is meaningful. Where lengths may differ (sampling, relaxed rules),
  `ignore_eos` gives all texts the full length.
"""

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch

from decode.bench.baselines import TRANSFORMERS_BASELINES, quiet
from decode.bench.costs import CostModel
from decode.bench.entries import REFERENCE, BenchEntry, Chat, EntryRun, check_entries
from decode.bench.offline_acceptance import prompt_numbers
from decode.bench.prediction import speedup_of_trace
from decode.bench.records import (
    COLUMNS,
    Record,
    TimedText,
    acceptance,
    analysis,
    by_category,
    counts,
    speeds,
)
from decode.bench.session import BASELINE, Item, Session
from decode.bench.statistics import plain
from decode.bench.suites import Suite
from decode.errors import UserError
from decode.methods import METHODS, TREE_DRAFTERS
from decode.models.tokens import Detokenizer, marked
from decode.progress import current

TREES = {name for name, (drafter, _, _) in METHODS.items() if drafter in TREE_DRAFTERS}
FILLED = 2  # least number of prompts for each place of a batch


@dataclass
class ResultBlock:
    """The results of one suite at one temperature and batch size."""

    suite: str
    temperature: float
    rows: list[dict[str, Any]]  # one for each entry, with the fields `COLUMNS`
    analysis: list[dict[str, Any]]  # for each row acceptance by position, draft lengths, seconds by phase, sample texts
    # `CostModel.to_dict` by draft, from which this block's `predicted_speedup` was computed; "" is the target alone
    costs: dict[str, dict[str, Any]]
    complete: bool = True  # every prompt was measured
    batch_size: int = 1


class Benchmark:
    """Measures entries on suites.

    Attributes:
        blocks: results so far; after an interrupt the last one holds the prompts that all methods had finished.
        items: the prompts of each suite that fit the contexts.
        records: the timed sequences of what was measured here, by suite, temperature, batch size and label.
    """

    def __init__(self, session: Session) -> None:
        self.session = session
        self.blocks: list[ResultBlock] = []
        self.items: dict[str, list[Item]] = {}
        self.records: dict[tuple[str, float, int, str], Record] = {}
        self._reference: dict[tuple[Any, ...], list[int]] = {}  # greedy texts of generate by `_key`
        self._scores: dict[tuple[int, str], float] = {}

    def run(
        self,
        suites: Iterable[Suite],
        entries: Iterable[BenchEntry],
        *,
        batch_sizes: Iterable[int] = (1,),
        prompts: int | None = None,
        finished: Iterable[ResultBlock] = (),
        on_block: Callable[[ResultBlock], None] | None = None,
    ) -> list[dict[str, Any]]:
        """Measure all entries on all suites at all batch sizes; the baselines are added at every temperature.

        Args:
            suites: prompts with their scorers; batches that need more prompts take them again from the start.
            entries: in the order of the table; of transformers' methods only ``generate`` decodes batches.
            batch_sizes: sequences at once.
            prompts: number of prompts of each suite at batch sizes that need no more; None: all.
            finished: blocks of an earlier run that need not be measured again.
            on_block: called with every block that is complete.

        Returns:
            The rows of all blocks.

        Raises:
            UserError: a draft or a store is missing, no prompt fits the context, or a model decodes one text at a time.
            KeyboardInterrupt: passed on after `blocks` has been brought up to date.
        """
        suites, entries, session = list(suites), list(entries), self.session
        sizes = sorted(set(batch_sizes)) or [1]
        check_entries(session, entries)
        self.blocks = list(finished)
        self.items = {suite.name: session.items(suite) for suite in suites}
        if session.options.costs:
            used = [c for c in entries if c.needs_draft and c.draft is not None]
            session.measure_costs(
                [item for items in self.items.values() for item in items],
                dict.fromkeys(c.draft for c in used if c.draft),
                longest=max((c.options.draft_length or 0 for c in entries), default=0),
                trees=any(c.method in TREES for c in entries),
                repeats=max(1, session.options.cost_turns // 4),
                batch_sizes=sizes,
                adapting={c.draft for c in used if c.adapts_to_costs and c.draft},
            )
        done = {(block.suite, block.temperature, block.batch_size) for block in self.blocks}
        temperatures = dict.fromkeys(c.temperature for c in entries)
        jobs = [(s, t, size) for s in suites for t in temperatures for size in sizes if (s.name, t, size) not in done]
        work, repeats = current(), session.options.repeats
        tables = [self._table(entries, t, size) for _, t, size in jobs]
        groups = [self._groups(suite.name, size, prompts) for suite, _, size in jobs]
        work.update(done=0, total=repeats * sum(len(table) * len(some) for table, some in zip(tables, groups)))
        for (suite, temperature, size), table, some in zip(jobs, tables, groups):
            runs = [EntryRun(session, entry, size) for entry in table]
            try:
                with quiet():
                    self._measure(
                        some, runs, f"{suite.name} T={temperature:g}" + (f" batch {size}" if size > 1 else "")
                    )
            except KeyboardInterrupt:
                if any(run.record.texts for run in runs):
                    self.blocks.append(self._report(suite, some, runs, complete=False))
                raise
            self.blocks.append(self._report(suite, some, runs))
            if on_block is not None:
                on_block(self.blocks[-1])
        return self.rows

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The rows of all blocks, ready for JSON."""
        return [row for block in self.blocks for row in block.rows]

    @property
    def analysis(self) -> list[dict[str, Any]]:
        """For every row acceptance by position, draft lengths, seconds by phase, sample texts."""
        return [entry for block in self.blocks for entry in block.analysis]

    def _table(self, entries: Sequence[BenchEntry], temperature: float, size: int) -> list[BenchEntry]:
        """The entries of one temperature, the baselines first; of transformers' methods only generate batches."""
        some = [c for c in entries if c.temperature == temperature]
        if size > 1:
            some = [c for c in some if c.method not in TRANSFORMERS_BASELINES or c.method == REFERENCE]
        given = {c.method: c for c in reversed(some)}
        first = [given.get(m, BenchEntry(m, temperature=temperature)) for m in (BASELINE, REFERENCE)]
        return first + [c for c in some if c not in first]

    def _groups(self, suite: str, size: int, prompts: int | None) -> Sequence[Sequence[Chat]]:
        """The chats that a method decodes before the next method does: one chat, or all prompts of a batch."""
        items = self.items[suite]
        if size == 1:
            return [[list(turns)] for _, turns in groupby(items, key=lambda item: id(item.prompt))][:prompts]
        count = max(len(items) if prompts is None else prompts, FILLED * size)
        return [[[items[i % len(items)]] for i in range(count)]]

    def _measure(self, groups: Sequence[Sequence[Chat]], runs: list[EntryRun], label: str) -> None:
        options, work = self.session.options, current()
        for run in runs:
            self._warm_up(run, groups[0][: run.batch_size])
        running = [run for run in runs if not run.note]
        for i, chats in enumerate(groups):
            texts: dict[int, list[list[TimedText]]] = {id(run): [[] for _ in chats] for run in running}
            for repeat in range(options.repeats):
                first = (i * options.repeats + repeat) % len(running)
                for run in running[first:] + running[:first]:
                    work.update(name=f"{label} {run.entry.label}")
                    seeds = [options.seed + 1009 * (i + j) + repeat for j in range(len(chats))]
                    sample = run.batch_size == 1 and i < options.samples and repeat == 0
                    written = run.write(chats, repeat, seeds, options.max_new_tokens, sample)
                    for own, text in zip(texts[id(run)], written):
                        own.append(text)
                    work.advance()
            for run in running:
                run.record.texts += texts[id(run)]
            if runs[0].batch_size == 1:
                for meter in dict.fromkeys(self.session.meters.values()):  # under the same load of the machine
                    meter.run(1 + options.cost_turns // len(groups), seconds=1.0)

    def _warm_up(self, run: EntryRun, chats: Sequence[Chat]) -> None:
        """Decode short texts; at batch size 1 also run a forward of every width of a fixed draft length."""
        try:
            run.write([chat[:1] for chat in chats], -1, [0] * len(chats), min(24, self.session.options.max_new_tokens))
        except UserError:
            raise
        except (ValueError, RuntimeError, NotImplementedError, AttributeError, TypeError) as error:
            if run.baseline is None:
                raise
            run.note = f"transformers refused: {type(error).__name__}: {str(error).splitlines()[0][:160]}"
            return
        if run.batch_size == 1 and run.baseline is None and run.draft_length and run.entry.needs_draft:
            runner = self.session.runner
            with torch.inference_mode():
                for n in range(1, min(run.draft_length + 1, runner.limit) + 1):
                    cache = runner.new_cache()
                    runner.forward([cache], [torch.zeros(n, dtype=torch.long, device=runner.device)])
                    cache.close()

    def _report(
        self, suite: Suite, groups: Sequence[Sequence[Chat]], runs: Sequence[EntryRun], complete: bool = True
    ) -> ResultBlock:
        session, chats, rows, details = self.session, [chat for group in groups for chat in group], [], []
        size, temperature = runs[0].batch_size, runs[0].entry.temperature
        session.costs = {name: meter.cost() for name, meter in session.meters.items()}
        for run in runs:
            self.records[suite.name, temperature, size, run.entry.label] = run.record
            if size > 1:
                run.record.clusters = prompt_numbers([(item.ids, len(item.ids)) for item, *_ in chats])
            if run.entry.method == REFERENCE and temperature == 0:
                for chat, texts in zip(chats, run.record.texts):
                    self._reference.setdefault(_key(suite.name, chat), texts[0].new_ids)
        for run in runs:
            where = {"suite": suite.name, "temperature": temperature}
            marks = self._marks(run.record, suite, chats)
            rows.append(plain(where | self._row(run, runs, suite.name, chats, marks)))
            if run.record.texts:
                alone = run.baseline is None and METHODS[run.entry.method][0] == "none"
                prompts = [item for chat in chats for item in chat]
                samples = [
                    {
                        "prompt": item.said,
                        "text": session.text(out.new_ids),
                        "tokens": marked(
                            Detokenizer(session.tokenizer), out.new_ids, out.written_by, out.rejected, alone
                        ),
                    }
                    for item, out in zip(prompts, run.samples)
                ]
                kept = {"name": run.entry.label, "samples": samples}
                details.append(plain(where | {"batch_size": size} | analysis(run.record) | run.learned | kept))
        costs = {name or "": cost.to_dict() for name, cost in self._costs(size).items()}
        return ResultBlock(suite.name, temperature, rows, details, costs, complete, size)

    def _costs(self, size: int) -> dict[str | None, CostModel]:
        at = self.session.costs_at.items()
        return self.session.costs if size == 1 else {name: cost for (name, batch), cost in at if batch == size}

    def _row(
        self, run: EntryRun, runs: Sequence[EntryRun], suite: str, chats: Sequence[Chat], marks: Sequence[float]
    ) -> dict[str, Any]:
        entry, record, seed = run.entry, run.record, self.session.options.seed
        row = dict.fromkeys(COLUMNS) | run.about() | {"note": run.note, "prompts": len(record.texts)}
        if not record.texts:
            return row

        def unlike(other: EntryRun) -> tuple[bool, bool]:  # of several assistants the one most like this entry
            return entry.draft not in (None, other.entry.draft), other.draft_length != run.draft_length

        of = {
            other.entry.method: other.record for other in sorted(runs, key=unlike, reverse=True) if other.record.texts
        }
        in_turn = entry.needs_draft and entry.method not in TREES | {"hybrid"}  # one draft forward for each token
        row |= speeds(record, of, seed) | counts(record) | acceptance(record, seed)
        if (cost := self._costs(run.batch_size).get(row["draft"])) is not None:
            row["predicted_speedup"] = speedup_of_trace(record.trace(), cost, drafts_with_model=in_turn)
        row["categories"] = by_category(record, of, [chat[0].prompt.category for chat in chats], seed)
        if marks:
            error = statistics.stdev(marks) / len(marks) ** 0.5 if len(marks) > 1 else None
            row |= {"accuracy": statistics.fmean(marks), "accuracy_se": error}
        if entry.temperature == 0 and self._reference:
            known = [self._reference[_key(suite, chat)] for chat, _ in zip(chats, record.texts)]
            same = [text.new_ids == ids for ids, own in zip(known, record.texts) for text in own]
            row |= {"identical_share": statistics.fmean(same), "identical_to_target": all(same)}
        return row

    def _marks(self, record: Record, suite: Suite, chats: Sequence[Chat]) -> list[float]:
        """The mean score of each prompt's texts; empty if the suite has no scorer."""
        means = []
        for (item, *_), texts in zip(chats, record.texts) if suite.score is not None else ():
            marks = []
            for written in texts:
                text = self.session.text(written.new_ids)
                key = (id(item.prompt), text)
                if key not in self._scores:
                    self._scores[key] = float(suite.score(item.prompt, text))  # type: ignore[misc]
                marks.append(self._scores[key])
            means.append(statistics.fmean(marks))
        return means


def _key(suite: str, chat: Chat) -> tuple[Any, ...]:
    return (suite, *(tuple(item.ids) for item in chat))
