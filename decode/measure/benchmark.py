"""Benchmarks: methods × suites × temperatures × batch sizes on one machine, all methods side by side.

- `speedup` compares with this project's own loop without a drafter, on the same forward and cache, and
  `speedup_vs_generate` with `model.generate`. A slow baseline would overstate a method.
- At batch size 1 all methods decode a prompt (of a chat all turns) before the next prompt comes. At batch size B a
  method decodes all prompts with B texts at once, where a waiting prompt takes the place of a finished one; there are
  at least 2·B prompts. The order of the methods rotates with each repeat, so that a change in the machine's load
  affects all of them, and ratios are taken between runs of the same repeat.
- An adaptive method keeps what it learned from prompt to prompt, but every repeat has its own copy of it, so that no
  method has seen a prompt before.
- Time is wall time of the whole text, reading the prompt included; token ids are counted, not words.
- Texts end at their natural end, so that accuracy is meaningful.
"""

import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from itertools import chain, groupby, islice, product
from operator import add
from typing import NamedTuple

import numpy as np

from decode.core.draft import Ids
from decode.core.round import Round, acceptance_by_position, clustered_ratio, metrics
from decode.core.sampling import TorchRng
from decode.core.verify import JensenShannon
from decode.errors import UserError, first_line
from decode.files import Fields
from decode.loop import Method, decode, decode_texts
from decode.measure import machine
from decode.measure.acceptance import prompt_numbers
from decode.measure.baselines import generate
from decode.measure.session import Item, Session
from decode.measure.statistics import Interval, median_interval, plain, ratio_interval
from decode.measure.suites import Suite, by_category
from decode.methods import (
    BASELINES,
    METHODS,
    MethodInputs,
    Parts,
    build,
    exported_length,
    is_lossless,
    kind_of,
    refusal,
    with_options,
)
from decode.models.api import Model
from decode.models.open import DraftModel
from decode.models.sources import quiet
from decode.options import MethodOptions, split_spec
from decode.progress import current

BASELINE = "autoregressive"  # the loop without a drafter, the baseline of `speedup`
REFERENCE = "generate"  # the method of `speedup_vs_generate`, whose texts greedy ones have to equal
RATIOS = {"speedup": BASELINE, "speedup_vs_generate": REFERENCE}
"""The method that each ratio of a row divides by."""
FILLED = 2  # least number of prompts for each place of a batch
WARM_UP = 24  # most tokens of the text that every method writes before it is timed
MEASURED = (
    "prompts",
    "tokens_per_second", "speedup", "speedup_ci95", "speedup_vs_generate", "speedup_vs_generate_ci95",
    "accepted_length", "accepted_length_ci95", "alpha", "alpha_se",
    "accepted_per_tested", "accepted_per_drafted", "tv_spent", "js_distance", "accuracy", "accuracy_se",
    "identical_to_target", "identical_share", "drafted_per_round", "rounds", "tokens", "draft_lengths",
    "acceptance_by_position", "verification_threshold", "recommended", "categories",
)  # fmt: skip
"""Measured fields of a row; every row has all of them, null if they do not apply."""
Chat = Sequence[Item]  # the turns of one prompt

# -- what is measured -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BenchEntry:
    """One line of the table: a method with its draft, options and temperature."""

    method: str  # a name of `decode.methods.METHODS` or of `BASELINES` there
    draft: str | None = None  # name of a draft of the session
    options: MethodOptions = field(default_factory=MethodOptions)
    temperature: float = 0.0  # 0 is greedy
    name: str = ""  # name in rows; empty: the method's name

    @property
    def label(self) -> str:
        """The name in rows."""
        return self.name or self.method

    @property
    def is_baseline(self) -> bool:
        """Whether transformers' own generation runs."""
        return self.method in BASELINES

    @property
    def weighs_costs(self) -> bool:
        """Whether the method limits its drafts by the measured costs of rounds."""
        return not self.is_baseline and (
            self.options.never_slower or (self.options.stop_rule or METHODS[self.method][1]) == "cost-optimal"
        )


def plan(
    methods: Sequence[str],
    drafts: Mapping[str, DraftModel],
    temperatures: Sequence[float] = (0.0,),
    *,
    draft_lengths: Sequence[int] = (),
    options: MethodOptions | None = None,
    target: Model | None = None,
    needed: Iterable[str] = (),
) -> list[BenchEntry]:
    """Entries for all combinations that drafts and target allow (see `refusal`), with unique names.

    Methods may carry options of their own (`split_spec`). Methods of a fixed length get one entry for each of
    `draft_lengths`; without any, the length that the draft was exported with, or the method's own.

    Raises:
        UserError: one of the methods `needed` has no entry.
    """
    entries, planned, refused = [], set[str](), dict[str, str]()
    for temperature, spec in product(temperatures, methods):
        method, base = with_options(spec, options or MethodOptions())
        entry, kind = BenchEntry(method, None, base, temperature), kind_of(method)
        fixed = method in ("generate-assistant", "generate-prompt-lookup")
        fixed |= kind.priced and (base.stop_rule or METHODS[method][1]) == "length"
        by_length = draft_lengths and fixed and "draft_length" not in split_spec(spec)[1]
        lengths: Sequence[int | None] = draft_lengths if by_length else [base.draft_length]
        for draft, length in product(drafts if kind.drafts else [None], lengths):
            model = drafts[draft] if draft else None
            parts = Parts.of_draft(model, base, datastore=True, tree_error=target.tree_error if target else "")
            if why := refusal(method, parts):
                refused.setdefault(spec, why)
                continue
            name = spec.replace(":", " ") + (f" n={length}" if len(lengths) > 1 else "")
            name += f" ({draft})" if draft and len(drafts) > 1 else ""
            length = length or (exported_length(model) if model is not None and fixed else None)
            entries.append(replace(entry, draft=draft, options=replace(base, draft_length=length), name=name))
            planned.add(spec)
    for spec in needed:
        if spec in refused and spec not in planned:
            raise UserError(refused[spec])
    return entries


# -- what was measured ------------------------------------------------------------------------------------------------


class Written(NamedTuple):
    """One text (of a chat all turns) as one method wrote it once."""

    new_ids: Ids  # the generated tokens
    seconds: float  # from the prompt on; of texts decoded together, an equal share of each round
    forwards: int  # target forwards that gave the tokens
    rounds: list[Round]  # none of transformers' own generation


@dataclass
class Record:
    """All texts of one method in one suite at one temperature and batch size."""

    texts: list[list[Written]] = field(default_factory=list)  # by prompt and repeat
    batch_size: int = 1
    clusters: Sequence[int] = ()  # the number of each prompt among the distinct ones: its texts are one observation

    @property
    def rounds(self) -> list[list[Round]]:
        """The rounds of all texts of each prompt: repeats of a greedy text change no rate and no error."""
        return [[r for text in repeats for r in text.rounds] for repeats in self.texts]

    def part(self, places: Sequence[int]) -> "Record":
        """The record of some prompts."""
        return Record([self.texts[i] for i in places], self.batch_size, [self.clusters[i] for i in places])

    def numbers(self) -> np.ndarray:
        """Tokens, seconds and forwards: ``[3, prompts, repeats]``."""
        rows = [[(len(text.new_ids), *text[1:3]) for text in repeats] for repeats in self.texts]
        return np.moveaxis(np.array(rows), -1, 0)


def speed_ratio(record: Record, base: Record) -> tuple[float, Interval]:
    """The speed over another one of the same prompts, and its interval over prompts.

    At batch size 1 it is the median over prompts, for each of which the median over repeats of the ratio in the same
    repeat is taken; above, it is the ratio of throughputs Σ tokens / Σ seconds.
    """
    both = [each.numbers()[:2] for each in (record, base)]
    if record.batch_size > 1:
        return ratio_interval(record.clusters, np.concatenate([numbers.sum(-1) for numbers in both]).T)
    ours, theirs = (tokens / seconds for tokens, seconds in both)
    return median_interval(np.median(ours / theirs, 1).tolist())


def measured(record: Record, bases: Mapping[str, Record]) -> Fields:
    """The columns of a row that come from the timed texts: speeds, acceptance and counts.

    `bases` are records of the same block by method.
    """
    rounds, clusters, row = record.rounds, record.clusters, Fields()
    if any(rounds):
        row |= metrics(rounds, clusters)
        row["draft_lengths"] = dict(sorted(Counter(r.drafted for r in chain(*rounds)).items()))
        row["acceptance_by_position"] = acceptance_by_position(rounds)
    numbers = record.numbers()
    tokens, seconds, _ = numbers
    row["prompts"] = len(set(clusters))  # a batch may hold one several times
    row |= {"tokens": int(tokens.sum()), "tokens_per_second": np.median(tokens.sum(0) / seconds.sum(0))}
    row["accepted_length"], row["accepted_length_ci95"] = ratio_interval(clusters, numbers[::2].sum(-1).T)
    for key, method in RATIOS.items():
        if base := bases.get(method):
            row[key], row[f"{key}_ci95"] = speed_ratio(record, base)
    return row


def recommend(pairs: Sequence[tuple[Fields, Record]]) -> None:
    """Set ``recommended`` of the rows of one method: true of the shortest draft length that is as fast as the fastest.

    That is one whose paired interval to the fastest reaches 1. Without an interval it is the fastest itself. Rows of
    other texts than the target's, and speedups that are no results, count only if there are no others.
    """
    sound = [each for each in pairs if each[0]["identical_to_target"] is not False and not machine.doubt(each[0])]
    fastest, base = max(sound or pairs, key=lambda each: each[0]["speedup"])
    ends = [(row, speed_ratio(record, base)[1] or [0, 0]) for row, record in sound or pairs]
    alike = [row for row, (_, high) in ends if high >= 1 or row is fastest]
    shortest = min(alike, key=lambda row: row["draft_length"] or 0)
    for row, _ in pairs:
        row["recommended"] = row is shortest


# -- measuring --------------------------------------------------------------------------------------------------------


class EntryRun:
    """An entry ready to run: one copy of its method for each repeat, so that no repeat has learned from another.

    The last of the `methods` warms up. `draft_length` is the largest one at the start, if there is one; `note` says why
    transformers refused the entry.
    """

    def __init__(self, session: Session, entry: BenchEntry, batch_size: int = 1) -> None:
        self.entry, self.session, self.batch_size, self.note = entry, session, batch_size, ""
        self.warp, options = replace(session.options.warp, temperature=entry.temperature), entry.options
        self.record = Record(batch_size=batch_size)
        self.methods: list[Method] = []
        if entry.is_baseline:
            _, default = BASELINES[entry.method]
            self.draft_length = default and (options.draft_length or default)
            return
        costs, store = session.costs.get(entry.draft or ""), session.options.datastore
        draft = session.drafts[entry.draft] if entry.draft else None
        inputs = MethodInputs(
            session.runner, self.warp, draft, session.tokenizer, store, options, costs.rounds if costs else None
        )
        for _ in range(session.options.repeats + 1):
            self.methods.append(build(entry.method, inputs))
        self.draft_length = None if entry.method == BASELINE else self.methods[0].stop.window

    def write(self, chats: Sequence[Chat], repeat: int, first: int, budget: int) -> list[Written]:
        """Decode chats, whose first is number `first`, once with the method's copy of this repeat (-1 warms up)."""
        prompts = [item.ids for item in chain(*chats)]
        seed = self.session.options.seed + repeat
        seeds = [seed + 1009 * (first + i) + turn for i, chat in enumerate(chats) for turn in range(len(chat))]
        how = {"max_new_tokens": budget, "stop_ids": self.session.stop_ids}
        if self.entry.is_baseline:
            turns = iter(self._generate(prompts, seeds, how))
        else:
            turns = iter(self._decode(self.methods[repeat], prompts, seeds, how))
        return [Written(*(reduce(add, values) for values in zip(*islice(turns, len(chat))))) for chat in chats]

    def _decode(self, method: Method, prompts: Sequence[Ids], seeds: Sequence[int], how: Fields) -> list[Written]:
        """The prompts' texts by this project's loop."""
        models = self.session.runner, method, self.warp
        rngs = [TorchRng(seed) for seed in seeds]
        if self.batch_size == 1:  # what the method learns it keeps for the next prompt
            outs = [decode(*models, ids, rng=rng, **how) for ids, rng in zip(prompts, rngs)]
        else:
            outs = decode_texts(*models, prompts, rngs=rngs, batch_size=self.batch_size, **how)
        return [Written(o.new_ids, o.total_seconds, len(o.rounds), o.rounds) for o in outs]

    def _generate(self, prompts: Sequence[Ids], seeds: Sequence[int], how: Fields) -> list[Written]:
        """The prompts' texts by transformers, those of similar length together."""
        order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
        texts: dict[int, Written] = {}
        draft = self.session.draft_models.get(self.entry.draft or "")
        while batch := order[len(texts) : len(texts) + self.batch_size]:
            new, seconds, forwards = generate(
                self.entry.method, self.session.model, draft, self.warp, [prompts[i] for i in batch],
                seed=seeds[batch[0]], draft_length=self.draft_length, **how,
            )  # fmt: skip
            texts |= {i: Written(ids, seconds / len(batch), forwards, []) for i, ids in zip(batch, new)}
        return [texts[i] for i in range(len(prompts))]


def time_texts(runs: Sequence[EntryRun], groups: Sequence[Sequence[Chat]], name: str) -> None:
    """Time all entries on all prompts, entry beside entry; the texts are added to the entries' records.

    An entry decodes a group of chats before the next entry does; after a KeyboardInterrupt the records hold the groups
    that all entries had finished.
    """
    options, work = runs[0].session.options, current()
    for run in runs:
        warming = [chat[:1] for chat in groups[0][: run.batch_size]]
        try:
            run.write(warming, -1, 0, min(WARM_UP, options.max_new_tokens))
        except Exception as error:
            if not run.entry.is_baseline:
                raise
            run.note = f"transformers refused: {type(error).__name__}: {first_line(error)[:160]}"
    running = [run for run in runs if not run.note]
    for i, chats in enumerate(groups):
        written: list[list[list[Written]]] = [[] for _ in running]  # by entry and repeat
        for repeat in range(options.repeats):
            for turn in range(len(running)):
                place = (i * options.repeats + repeat + turn) % len(running)
                work.update(name=f"{name} {running[place].entry.label}")
                written[place].append(running[place].write(chats, repeat, i, options.max_new_tokens))
                work.advance()
        for run, repeats in zip(running, written):
            run.record.texts += map(list, zip(*repeats))


class Benchmark:
    """Measures entries on suites.

    `say` is told how many texts will be written, before the first.

    Attributes:
        rows: a row for each entry, suite, temperature and batch size, ready for JSON.
        records: the timed texts by suite, temperature, batch size and label.
        stopped: what an interrupt ended, whose rows then cover the prompts that all methods had finished.
    """

    def __init__(self, session: Session, say: Callable[[str], None] = lambda _: None) -> None:
        self.session, self.say, self.stopped = session, say, ""
        self.rows: list[Fields] = []
        self.records: dict[tuple[str, float, int, str], Record] = {}

    def run(
        self,
        suites: Iterable[Suite],
        entries: Iterable[BenchEntry],
        *,
        batch_sizes: Iterable[int] = (1,),
    ) -> list[Fields]:
        """Measure all entries on all suites at all batch sizes; the baselines are added at every temperature.

        A batch that needs more prompts takes them again from the start. Of transformers' methods only ``generate``
        decodes batches. Returns `rows`, in which entries keep their order.

        Raises:
            UserError: a store is missing, or no prompt fits the context.
            KeyboardInterrupt: passed on after `rows` has been brought up to date.
        """
        entries, session, sizes = list(entries), self.session, sorted(set(batch_sizes))
        for entry in entries:
            EntryRun(session, entry)
        items, blocks = [(suite, session.items(suite)) for suite in suites], []
        temperatures = dict.fromkeys(e.temperature for e in entries)
        for (suite, prompts), temperature, size in product(items, temperatures, sizes):
            groups = [[list(turns)] for _, turns in groupby(prompts, key=lambda item: id(item.prompt))]
            if size > 1:
                groups = [[[prompts[i % len(prompts)]] for i in range(max(len(prompts), FILLED * size))]]
            table = [e for e in entries if e.temperature == temperature]
            table = [e for e in table if size == 1 or not e.is_baseline or e.method == REFERENCE]
            first = [m for m in (BASELINE, REFERENCE) if all(e.method != m for e in table)]
            table += [BenchEntry(m, temperature=temperature) for m in first]
            table.sort(key=lambda e: (e.method not in (BASELINE, REFERENCE), e.method == REFERENCE))
            blocks.append((suite, size, table, groups))
        repeats, budget = session.options.repeats, session.options.max_new_tokens
        texts = repeats * sum(len(table) * sum(map(len, chain(*groups))) for *_, table, groups in blocks)
        labels = ", ".join(dict.fromkeys(entry.label for _, _, table, _ in blocks for entry in table))
        self.say(f"to write: {texts:,} texts of at most {budget} tokens, {texts * budget:,} in all, by {labels}")
        if priced := dict.fromkeys(e.draft for e in entries if e.weighs_costs and e.draft not in session.costs):
            current().update(name="costs of rounds")
            all_items, coldest = [item for _, prompts in items for item in prompts], min(temperatures)
            session.measure_costs(all_items, priced, batch_sizes=sizes, temperature=coldest)
        current().update(done=0, total=repeats * sum(len(table) * len(groups) for *_, table, groups in blocks))
        for suite, size, table, groups in blocks:
            runs = [EntryRun(session, entry, size) for entry in table]
            name = f"{suite.name} T={table[0].temperature:g}" + (f" batch {size}" if size > 1 else "")
            try:
                device = session.runner.device
                with quiet(), machine.using_threads(session.threads), machine.timed(device) as load:
                    time_texts(runs, groups, name)
            except KeyboardInterrupt:
                self.stopped = name
                raise
            finally:
                if runs[0].record.texts:
                    self._add_rows(suite, runs, [turns[0] for turns in chain(*groups)], load)
        return self.rows

    def _add_rows(self, suite: Suite, runs: Sequence[EntryRun], items: Sequence[Item], load: Fields) -> None:
        """Make the rows of one suite, temperature and batch size; its prompts begin with `items`."""
        session, generated = self.session, next(run.record.texts for run in runs if run.entry.method == REFERENCE)
        numbers = prompt_numbers([(item.ids, len(item.ids)) for item in items])
        timed = max(len(run.record.texts) for run in runs)  # none of a refused baseline
        categories = by_category(item.prompt for item in items[:timed])
        for run in runs:
            run.record.clusters = numbers[: len(run.record.texts)]
        for run in runs:
            entry, record = run.entry, run.record
            self.records[suite.name, entry.temperature, run.batch_size, entry.label] = record
            lossless = entry.is_baseline or is_lossless(entry.method, entry.options.rule)
            row: Fields = dict.fromkeys(MEASURED) | {
                "suite": suite.name,
                "temperature": entry.temperature,
                "batch_size": run.batch_size,
                "name": entry.label,
                "method": entry.method,
                "draft": entry.draft,
                "draft_length": run.draft_length,
                "kind": "baseline" if entry.is_baseline else "lossless" if lossless else "relaxed",
                "lossless": lossless,
                "baseline": entry.is_baseline,
                "repeats": session.options.repeats,
                "prompts": len({*numbers[:timed]}),
                "note": run.note,
                **load,
            }
            self.rows.append(row)
            if run.note:
                continue
            # of several assistants the last is the one most like this entry
            nearest = sorted(runs, key=lambda o: (o.entry.draft == entry.draft, o.draft_length == run.draft_length))
            bases = {other.entry.method: other.record for other in nearest if not other.note}
            row |= measured(record, bases)
            row["categories"] = [
                {"category": category}
                | measured(record.part(places), {name: base.part(places) for name, base in bases.items()})
                for category, places in categories.items()
            ]
            thetas = [method.rule.theta for method in run.methods[:-1] if isinstance(method.rule, JensenShannon)]
            if thetas:
                row["verification_threshold"] = statistics.fmean(thetas)
            if suite.score is not None:
                marks = [
                    statistics.fmean(suite.score(item.prompt, session.text(text.new_ids)) for text in repeats)
                    for item, repeats in zip(items, record.texts)
                ]
                row["accuracy"], row["accuracy_se"] = clustered_ratio(marks, [1] * len(marks), record.clusters)
            # where generate was refused there are none of its texts
            same = [
                text.new_ids == expected.new_ids
                for (expected, *_), repeats in zip(generated, record.texts)
                for text in repeats
            ]
            if same and not entry.temperature:
                row |= {"identical_share": statistics.fmean(same), "identical_to_target": all(same)}
        alike = defaultdict[str, list[tuple[Fields, Record]]](list)  # which differ in draft length alone
        for row, run in zip(self.rows[-len(runs) :], runs):
            if row["speedup"]:
                options = replace(run.entry.options, draft_length=None)
                alike[str(replace(run.entry, options=options, name=""))].append((row, run.record))
        for pairs in alike.values():
            recommend(pairs)
        self.rows[-len(runs) :] = map(plain, self.rows[-len(runs) :])
