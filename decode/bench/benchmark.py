"""Benchmarks: methods × suites × temperatures on one machine, every prompt given to all methods in turn.

What is compared with what, and why it is fair:

- The baseline of `speedup` is this project's own loop without a drafter, on the same forward and cache;
  `model.generate` is the baseline of `speedup_vs_generate`. Speedups over a slow baseline overstate a method.
- All methods see a prompt (of a chat all turns) before the next prompt comes, in an order that turns from one repeat to
  the next, so that a change in the machine's load affects all of them. Ratios are taken between runs side by side.
- An adaptive method keeps what it learned from prompt to prompt, but every repeat has its own copy of it, so that no
  method has seen a prompt before.
- Time is wall time of the whole text, reading the prompt included; token ids are counted, not words.
- Texts end at their natural end, so that accuracy means something. Lossless methods under greedy decoding then write
  the same tokens. Where lengths may differ (sampling, relaxed rules), `ignore_eos` gives all texts the full length.
"""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import torch

from decode.bench.baselines import quiet
from decode.bench.costs import round_costs
from decode.bench.entries import REFERENCE, BenchEntry, EntryRun, check_entries, opponents, with_baselines
from decode.bench.pair_profile import add_overhead
from decode.bench.session import Item, Session
from decode.bench.statistics import (
    COLUMNS,
    Record,
    TimedText,
    accuracy,
    analysis,
    by_prompt,
    counts,
    identical_share,
    plain,
    ratio_interval,
    speeds,
    sums_by,
)
from decode.bench.suites import Suite
from decode.errors import UserError
from decode.methods import METHODS, TREE_DRAFTERS
from decode.models.tokens import Detokenizer, marked
from decode.progress import current


def category_rows(
    record: Record, of: Mapping[str, Record], categories: Sequence[str], seed: int
) -> list[dict[str, Any]]:
    """One row for each category: speeds, block efficiency and α with their bootstrap intervals over prompts.

    Args:
        record: a method's texts.
        of: the records that it is compared with (`speeds`).
        categories: of each prompt.
        seed: of the bootstrap.

    Returns:
        The rows; empty where all prompts are of one category.
    """
    names = list(dict.fromkeys(categories[: len(record.texts)]))
    if len(names) < 2:
        return []
    rows = []
    for name in names:
        kept = [i for i in range(len(record.texts)) if categories[i] == name]
        part, base = _part(record, kept), {method: _part(theirs, kept) for method, theirs in of.items()}
        rows.append({"category": name, "prompts": len(kept), **speeds(part, base, seed), **acceptance(part, seed)})
    return rows


def _part(record: Record, kept: Sequence[int]) -> Record:
    return Record([record.texts[i] for i in kept], record.greedy)


def acceptance(record: Record, seed: int) -> dict[str, Any]:
    """Block efficiency, and for our own methods that draft α, each with its bootstrap interval over prompts."""
    if not record.texts or not record.texts[0]:
        return {}
    if record.texts[0][0].trace is None:
        pairs = [(sum(len(t.new_ids) for t in texts), sum(t.forwards for t in texts)) for texts in record.texts]
        return _ratio("block_efficiency", pairs, seed)
    trace = record.trace()
    rounds = [1.0] * trace.rounds
    found = _ratio("block_efficiency", sums_by(trace.text, [m + 1 for m in trace.accepted], rounds), seed)
    distinct = record.trace(distinct=True)
    measured = [None if part is None else torch.as_tensor(part).double() for part in distinct.overlap]
    if any(part is not None and part.numel() for part in measured):
        sums = [0.0 if part is None else part.sum().item() for part in measured]
        counts = [0.0 if part is None else float(part.numel()) for part in measured]
        found |= _ratio("alpha", sums_by(distinct.text, sums, counts), seed)
    return found


def _ratio(name: str, pairs: Iterable[tuple[float, float]], seed: int) -> dict[str, Any]:
    middle, low, high = ratio_interval(pairs, seed)
    return {name: middle, f"{name}_ci95": [low, high]}


TREES = {name for name, (drafter, _, _) in METHODS.items() if drafter in TREE_DRAFTERS}
TURN_SEED = 101  # distance of the seeds of a chat's turns
Chat = Sequence[Item]  # the turns of one prompt


@dataclass
class ResultBlock:
    """The results of one suite at one temperature."""

    suite: str
    temperature: float
    rows: list[dict[str, Any]]  # one an entry, of `COLUMNS`
    # for every row acceptance by position, draft lengths, seconds by phase, sample texts
    analysis: list[dict[str, Any]]
    # `CostModel.to_dict` by draft, which this block's `predicted_speedup` was computed from; "" is the target
    costs: dict[str, dict[str, Any]]
    complete: bool = True  # every prompt was measured


class Benchmark:
    """Measures entries on suites.

    Attributes:
        blocks: results so far; after an interrupt the last one holds the prompts that all methods had finished.
        records: the timed texts of what was measured here, by suite, temperature and label.
    """

    def __init__(self, session: Session) -> None:
        self.session = session
        self.blocks: list[ResultBlock] = []
        self.items: dict[str, list[Item]] = {}  # the prompts of each suite that fit the contexts
        self.records: dict[tuple[str, float, str], Record] = {}
        self._scores: dict[tuple[int, str], float] = {}

    # -- what callers use ------------------------------------------------------------------------------------------

    def run(
        self,
        suites: Iterable[Suite],
        entries: Iterable[BenchEntry],
        *,
        finished: Iterable[ResultBlock] = (),
        on_block: Callable[[ResultBlock], None] | None = None,
    ) -> list[dict[str, Any]]:
        """Measure all entries on all suites; the baselines are added at every temperature.

        Args:
            suites: prompts with their scorers.
            entries: in the order of the table.
            finished: blocks of an earlier run that need not be measured again.
            on_block: called with every block that is complete.

        Returns:
            The rows of all blocks.

        Raises:
            UserError: a draft or a store is missing, or no prompt fits the context.
            KeyboardInterrupt: passed on after `blocks` has been brought up to date.
        """
        suites, entries = list(suites), list(entries)
        check_entries(self.session, entries)
        temperatures = list(dict.fromkeys(c.temperature for c in entries))
        table = {t: with_baselines([c for c in entries if c.temperature == t], t) for t in temperatures}
        self.blocks = list(finished)
        done = {(block.suite, block.temperature) for block in self.blocks}
        session, options = self.session, self.session.options
        self.items = items = {suite.name: session.items(suite) for suite in suites}
        chats: dict[str, list[Chat]] = {
            name: [list(turns) for _, turns in groupby(some, key=lambda item: id(item.prompt))]
            for name, some in items.items()
        }
        if options.costs:
            session.measure_costs(
                [item for some in items.values() for item in some],
                dict.fromkeys(c.draft for c in entries if c.needs_draft and c.draft is not None),
                longest=max((c.options.draft_length or 0 for c in entries), default=0),
                trees=any(c.method in TREES for c in entries),
                repeats=max(1, options.cost_turns // 4),
            )
            for name in dict.fromkeys(c.draft for c in entries if c.needs_draft and c.adapts_to_costs):
                assert name is not None
                cost = replace(session.costs[name])
                add_overhead(session, name, [item for some in items.values() for item in some], options.warp, cost)
                session.round_costs[name] = round_costs([cost])
        jobs = [(s, t) for s in suites for t in temperatures if (s.name, t) not in done]
        current().update(done=0, total=sum(len(chats[s.name]) * len(table[t]) for s, t in jobs) * options.repeats)
        for suite, temperature in jobs:
            runs = [EntryRun(session, entry) for entry in table[temperature]]
            try:
                with quiet():
                    self._block(chats[suite.name], runs, suite.name)
            except KeyboardInterrupt:
                if any(run.record.texts for run in runs):
                    self.blocks.append(self._report(suite, chats[suite.name], runs, complete=False))
                raise
            self.blocks.append(self._report(suite, chats[suite.name], runs))
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

    # -- measurement -----------------------------------------------------------------------------------------------

    def _block(self, chats: Sequence[Chat], runs: list[EntryRun], suite: str) -> None:
        options, work = self.session.options, current()
        for run in runs:
            self._warm_up(run, chats[0][0].ids)
        running = [e for e in runs if not e.note]
        for i, chat in enumerate(chats):
            texts: dict[int, list[TimedText]] = {id(e): [] for e in running}
            for repeat in range(options.repeats):
                first = (i * options.repeats + repeat) % len(running)
                for run in running[first:] + running[:first]:
                    seed = options.seed + 1009 * i + repeat
                    sample = i < options.samples and repeat == 0
                    turns = [
                        run.write(item.ids, repeat, seed + TURN_SEED * turn, options.max_new_tokens, sample)
                        for turn, item in enumerate(chat)
                    ]
                    texts[id(run)].append(TimedText.joined(turns))
                    work.update(name=f"{suite} T={run.entry.temperature:g} {run.entry.label}", done=work.done + 1)
            for run in running:
                run.record.texts.append(texts[id(run)])
            for meter in dict.fromkeys(self.session.meters.values()):  # costs too, under the same load of the machine
                meter.run(1 + options.cost_turns // len(chats), seconds=1.0)

    def _warm_up(self, run: EntryRun, ids: list[int]) -> None:
        """A short text, then every verification shape of a fixed length."""
        try:
            run.write(ids, -1, 0, min(24, self.session.options.max_new_tokens))
        except UserError:
            raise
        except (ValueError, RuntimeError, NotImplementedError, AttributeError, TypeError) as error:
            if run.peer is None:
                raise
            run.note = f"transformers refused: {type(error).__name__}: {str(error).splitlines()[0][:160]}"
            return
        if run.peer is None and run.draft_length and run.entry.needs_draft:
            runner = self.session.runner
            with torch.inference_mode():
                for n in range(1, min(run.draft_length + 1, runner.limit) + 1):
                    runner.truncate(0)
                    runner.read(torch.zeros(n, dtype=torch.long, device=runner.device))
                runner.truncate(0)

    # -- results ---------------------------------------------------------------------------------------------------

    def _report(self, suite: Suite, chats: Sequence[Chat], runs: list[EntryRun], complete: bool = True) -> ResultBlock:
        session = self.session
        session.costs = {name: meter.cost() for name, meter in session.meters.items()}
        rows, details = [], []
        for run in runs:
            where = {"name": run.entry.label, "suite": suite.name, "temperature": run.entry.temperature}
            self.records[suite.name, run.entry.temperature, run.entry.label] = run.record
            rows.append(plain(where | self._row(run, suite, chats, opponents(run, runs))))
            if run.record.texts:
                prompts = by_prompt(run.record, self._marks(run.record, suite, chats))
                kept = {"samples": self._samples(run, chats), "prompts": prompts}
                details.append(plain(where | analysis(run.record) | run.learned | kept))
        costs = {name or "": cost.to_dict() for name, cost in session.costs.items()}
        return ResultBlock(suite.name, runs[0].entry.temperature, rows, details, costs, complete)

    def _row(self, run: EntryRun, suite: Suite, chats: Sequence[Chat], of: dict[str, Record]) -> dict[str, Any]:
        entry, record = run.entry, run.record
        row: dict[str, Any] = dict.fromkeys(COLUMNS)
        row |= run.about() | {"note": run.note, "prompts": len(record.texts)}
        if not record.texts:
            return row
        row |= speeds(record, of, self.session.options.seed)
        in_turn = entry.needs_draft and entry.method not in TREES | {"hybrid"}  # one draft forward for each token
        row |= counts(record, self.session.costs.get(row["draft"]), in_turn)
        row |= acceptance(record, self.session.options.seed)
        row["categories"] = category_rows(record, of, [c[0].prompt.category for c in chats], self.session.options.seed)
        row |= accuracy(self._marks(record, suite, chats))
        if entry.temperature == 0 and REFERENCE in of:
            row["identical_share"] = identical_share(record, of[REFERENCE])
            row["identical_to_target"] = row["identical_share"] == 1.0
        return row

    def _marks(self, record: Record, suite: Suite, chats: Sequence[Chat]) -> list[float]:
        """The mean score of each prompt's texts; empty where the suite has no scorer."""
        means = []
        for (item, *_), texts in zip(chats, record.texts) if suite.score is not None else ():
            marks = []
            for written in texts:
                text = self.session.text(written.new_ids)
                key = (id(item), text)
                if key not in self._scores:
                    self._scores[key] = float(suite.score(item.prompt, text))  # type: ignore[misc]
                marks.append(self._scores[key])
            means.append(statistics.fmean(marks))
        return means

    def _samples(self, run: EntryRun, chats: Sequence[Chat]) -> list[dict[str, Any]]:
        if run.peer is not None:
            return []
        alone = METHODS[run.entry.method][0] == "none"
        return [
            {
                "prompt": item.said,
                "text": self.session.text(out.new_ids),
                "tokens": marked(Detokenizer(self.session.tokenizer), out.new_ids, out.written_by, out.rejected, alone),
            }
            for item, out in zip((item for chat in chats for item in chat), run.samples)
        ]
