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
- Texts end at their natural end, so that accuracy is meaningful.
"""

import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, groupby, product
from typing import Any

from transformers import PreTrainedModel

from decode.bench.baselines import NEEDS_DRAFT, TRANSFORMERS_BASELINES, generate, quiet
from decode.bench.costs import round_costs
from decode.bench.offline_acceptance import prompt_numbers
from decode.bench.prediction import speedup_of_trace
from decode.bench.records import COLUMNS, Record, TimedText, analysis, by_category, measured
from decode.bench.session import Item, Session
from decode.bench.statistics import plain
from decode.bench.suites import Suite
from decode.errors import UserError
from decode.loop import decode, decode_texts
from decode.method_options import MethodOptions, split_spec
from decode.methods import (
    DRAFTED,
    HEADED,
    METHODS,
    SELF_SPECULATIVE,
    TREE_DRAFTERS,
    MethodInputs,
    build,
    is_lossless,
)
from decode.models.block_head import BlockHead
from decode.models.heads import DraftHead, FeatureHead
from decode.models.mtp import MtpHead
from decode.models.other_tokenizer import DraftModel
from decode.models.tokens import Detokenizer, marked
from decode.progress import current
from decode.sampling import TorchRng
from decode.verify import JensenShannon

BASELINE = "autoregressive"  # the loop without a drafter, the baseline of `speedup`
REFERENCE = "generate"  # the method of `speedup_vs_generate`, whose texts greedy ones have to equal
TREES = {name for name, (drafter, _, _) in METHODS.items() if drafter in TREE_DRAFTERS}
FILLED = 2  # least number of prompts for each place of a batch
WARM_UP = 24  # most tokens of the text that every method writes before it is timed
Chat = Sequence[Item]  # the turns of one prompt


@dataclass(frozen=True)
class BenchEntry:
    """One line of the table: a method with its draft, options and temperature."""

    method: str  # a name of `decode.methods.METHODS` or of `decode.bench.baselines.TRANSFORMERS_BASELINES`
    draft: str | None = None  # name of a draft of the session
    options: MethodOptions = field(default_factory=MethodOptions)
    stop: str | None = None  # another stop rule than the method's own
    rule: str | None = None  # another acceptance rule than the method's own
    temperature: float = 0.0  # 0 is greedy
    name: str = ""  # name in rows; empty: the method's name

    @property
    def label(self) -> str:
        """The name in rows."""
        return self.name or self.method

    @property
    def is_baseline(self) -> bool:
        """Whether transformers' own generation runs."""
        return self.method in TRANSFORMERS_BASELINES

    @property
    def needs_draft(self) -> bool:
        """Whether a draft model takes part."""
        return self.method in NEEDS_DRAFT or self.method in DRAFTED

    @property
    def stop_rule(self) -> str | None:
        """The name of the stop rule, if there is one."""
        return None if self.is_baseline else self.stop or METHODS[self.method][1]


def plan(
    methods: Sequence[str],
    drafts: Mapping[str, DraftModel],
    temperatures: Sequence[float] = (0.0,),
    *,
    draft_lengths: Sequence[int] = (),
    options: MethodOptions | None = None,
    stop: str | None = None,
    rule: str | None = None,
) -> list[BenchEntry]:
    """Entries for all combinations, with unique names.

    Methods may carry options of their own (`split_spec`). Methods of a fixed length get one entry for each of
    `draft_lengths`; without any, the length that the draft was exported with (``num_assistant_tokens`` of its
    generation config), or the method's own.
    """
    entries = []
    for temperature, spec in product(temperatures, methods):
        method, own = split_spec(spec)
        base = replace(options or MethodOptions(), **own)
        drafts_here = method in METHODS and method != BASELINE
        entry = BenchEntry(method, None, base, *((stop, rule) if drafts_here else (None, None)), temperature)
        fitting: list[str | None] = [None]
        if entry.needs_draft and drafts:  # transformers takes plain models only, trees of EAGLE need a head
            kind = PreTrainedModel if method in NEEDS_DRAFT else kind_of_draft(method)
            fitting = [name for name, draft in drafts.items() if isinstance(draft, kind)]
        fixed = method == "generate-assistant" or (entry.needs_draft and entry.stop_rule == "length")
        several = fixed and draft_lengths and "draft_length" not in own
        lengths: Sequence[int | None] = draft_lengths if several else [base.draft_length]
        for draft, length in product(fitting, lengths):
            name = spec.replace(":", " ") + (f" k={length}" if len(lengths) > 1 else "")
            name += f" ({draft})" if draft is not None and len(drafts) > 1 else ""
            if draft is not None and fixed and length is None:
                length = exported_length(drafts[draft])
            entries.append(replace(entry, draft=draft, options=replace(base, draft_length=length), name=name))
    return entries


def kind_of_draft(method: str) -> Any:
    """The kind of head that a method is for; any draft where it is for none in particular."""
    if method.startswith("block"):
        return BlockHead
    if method not in HEADED:
        return object
    fitting = {"eagle": FeatureHead | MtpHead, "hybrid-tree": FeatureHead | BlockHead}
    return fitting.get(method, FeatureHead)


def exported_length(draft: DraftModel) -> int | None:
    """The draft length in the draft's generation config (of a head, its configuration), if any."""
    source = draft.config if isinstance(draft, DraftHead) else draft.generation_config
    length = getattr(source, "num_assistant_tokens", None)
    return int(length) if length else None


class EntryRun:
    """An entry ready to run: one copy of its method for each repeat, so that no repeat has learned from another.

    Attributes:
        methods: the copies; the last one warms up.
        record: the timed sequences.
        samples: annotated outputs of the first prompts.
        note: why transformers refused the entry; empty if it ran.

    Raises:
        UserError: the draft or a file that the method needs is missing.
    """

    def __init__(self, session: Session, entry: BenchEntry, batch_size: int = 1) -> None:
        self.entry, self.session, self.batch_size, self.note = entry, session, batch_size, ""
        self.warp, options = replace(session.options.warp, temperature=entry.temperature), entry.options
        self.record = Record(greedy=self.warp.greedy, batch_size=batch_size)
        self.samples: list[Any] = []
        self.methods: list[Any] = []
        self.draft_length: int | None = None  # the largest draft length at the start, if there is one
        draft = session.drafts.get(entry.draft or "")
        if entry.needs_draft and draft is None:
            missing = f"no draft named {entry.draft!r}" if entry.draft else "no draft"
            raise UserError(f"{entry.label} drafts with a model, but there is {missing}; give one with --draft")
        if entry.is_baseline:
            default = TRANSFORMERS_BASELINES[entry.method]
            self.draft_length = default and (options.draft_length or default)
            return
        costs = session.costs.get(entry.draft) if entry.draft else None  # fixed from now on
        inputs = MethodInputs(
            session.runner,
            self.warp,
            draft if entry.needs_draft else None,
            session.tokenizer,
            session.options.datastore,
            session.options.trigrams,
            options,
            round_costs(costs.values()) if costs else None,
        )
        for _ in range(session.options.repeats + 1):
            self.methods.append(build(entry.method, inputs, stop=entry.stop, rule=entry.rule))
        if entry.needs_draft or entry.method in {"prompt-lookup", "suffix"} | SELF_SPECULATIVE:
            self.draft_length = int(self.methods[0].stop.window)

    def write(
        self, chats: Sequence[Chat], repeat: int, seeds: Sequence[int], budget: int, *, sample: bool = False
    ) -> list[TimedText]:
        """Decode chats once, `batch_size` at a time.

        Args:
            chats: the turns of each prompt; above batch size 1 one turn each.
            repeat: which copy of the method decodes; -1 warms up.
            seeds: of the sampling of each chat.
            budget: maximum number of new tokens of a turn.
            sample: keep annotated outputs (at batch size 1).
        """
        session, size, texts = self.session, self.batch_size, [TimedText() for _ in chats]
        runner, draft = session.runner, session.draft_models.get(self.entry.draft or "")
        how: dict[str, Any] = {"max_new_tokens": budget, "stop_ids": session.stop_ids}
        turns = [(t, item.ids, seed + n) for t, c, seed in zip(texts, chats, seeds) for n, item in enumerate(c)]
        rngs = [TorchRng(seed, runner.device) for *_, seed in turns]
        if self.entry.is_baseline:
            if size > 1:  # texts of similar length together
                turns.sort(key=lambda turn: len(turn[1]))
            for at in range(0, len(turns), size):
                some = turns[at : at + size]
                how |= {"seed": some[0][2], "draft_length": self.draft_length}
                prompts = [ids for _, ids, _ in some]
                new, seconds, forwards = generate(self.entry.method, session.model, draft, self.warp, prompts, **how)
                for (text, *_), ids in zip(some, new):
                    text.add(ids, seconds / len(some), None, forwards)
        elif size == 1:
            for (text, ids, _), rng in zip(turns, rngs):
                out = decode(runner, self.methods[repeat], self.warp, ids, annotate=sample, rng=rng, **how)
                text.add(out.new_ids, out.trace.total_seconds, out.trace)
                self.samples += [out] if sample else []
        else:
            began, prompts = time.perf_counter(), [ids for _, ids, _ in turns]
            outputs = decode_texts(runner, self.methods[repeat], self.warp, prompts, rngs=rngs, batch_size=size, **how)
            spent = (time.perf_counter() - began) / max(1e-12, sum(out.trace.total_seconds for out in outputs))
            for text, out in zip(texts, outputs):
                text.add(out.new_ids, spent * out.trace.total_seconds, out.trace)
        return texts


def time_texts(runs: Sequence[EntryRun], groups: Sequence[Sequence[Chat]], name: str) -> None:
    """Time all entries on all prompts, entry beside entry; the texts are added to the entries' records.

    Args:
        runs: the entries.
        groups: the chats that an entry decodes before the next entry does.
        name: of the work, for people.

    Raises:
        KeyboardInterrupt: the records then hold the groups that all entries had finished.
    """
    options, work = runs[0].session.options, current()
    for run in runs:
        some = [chat[:1] for chat in groups[0][: run.batch_size]]
        try:
            run.write(some, -1, [0] * len(some), min(WARM_UP, options.max_new_tokens))
        except Exception as error:
            if not run.entry.is_baseline:
                raise
            run.note = f"transformers refused: {type(error).__name__}: {str(error).splitlines()[0][:160]}"
    running = [run for run in runs if not run.note]
    for i, chats in enumerate(groups):
        written: list[list[list[TimedText]]] = [[] for _ in running]  # by entry and repeat
        for repeat in range(options.repeats):
            seeds = [options.seed + 1009 * (i + j) + repeat for j in range(len(chats))]
            for turn in range(len(running)):
                place = (i * options.repeats + repeat + turn) % len(running)
                run = running[place]
                work.update(name=f"{name} {run.entry.label}")
                sample = run.batch_size == 1 and i < options.samples and repeat == 0
                written[place].append(run.write(chats, repeat, seeds, options.max_new_tokens, sample=sample))
                work.advance()
        for run, repeats in zip(running, written):
            run.record.texts += map(list, zip(*repeats))


class Benchmark:
    """Measures entries on suites.

    Attributes:
        rows: a row for each entry, suite, temperature and batch size, ready for JSON.
        analysis: for each row acceptance by position, draft lengths and sample texts.
        records: the timed sequences by suite, temperature, batch size and label.
        stopped: what an interrupt ended, whose rows then cover the prompts that all methods had finished.
    """

    def __init__(self, session: Session) -> None:
        self.session, self.stopped = session, ""
        self.rows: list[dict[str, Any]] = []
        self.analysis: list[dict[str, Any]] = []
        self.records: dict[tuple[str, float, int, str], Record] = {}
        self._expected: dict[tuple[tuple[int, ...], ...], list[int]] = {}  # greedy texts of generate by prompt

    def run(
        self,
        suites: Iterable[Suite],
        entries: Iterable[BenchEntry],
        *,
        batch_sizes: Iterable[int] = (1,),
    ) -> list[dict[str, Any]]:
        """Measure all entries on all suites at all batch sizes; the baselines are added at every temperature.

        Args:
            suites: prompts with their scorers; a batch that needs more prompts takes them again from the start.
            entries: in the order of the table; of transformers' methods only ``generate`` decodes batches.
            batch_sizes: sequences at once.

        Returns:
            `rows`.

        Raises:
            UserError: a draft or a store is missing, or no prompt fits the context.
            KeyboardInterrupt: passed on after `rows` has been brought up to date.
        """
        entries, session, sizes = list(entries), self.session, sorted(set(batch_sizes))
        for entry in entries:
            EntryRun(session, entry)
        items = [(suite, session.items(suite)) for suite in suites]
        if session.options.costs:
            drafted = [e for e in entries if e.needs_draft and e.draft]
            session.measure_costs(
                list(chain(*(some for _, some in items))),
                dict.fromkeys(str(e.draft) for e in drafted),
                longest=max((e.options.draft_length or 0 for e in entries), default=0),
                trees=any(e.method in TREES for e in entries),
                batch_sizes=sizes,
                bookkeeping={str(e.draft) for e in drafted if e.options.never_slower or e.stop_rule == "cost-optimal"},
            )
        blocks = []
        temperatures = dict.fromkeys(e.temperature for e in entries)
        for (suite, some), temperature, size in product(items, temperatures, sizes):
            table = [e for e in entries if e.temperature == temperature]
            if size > 1:
                table = [e for e in table if not e.is_baseline or e.method == REFERENCE]
            given = {e.method: e for e in reversed(table)}
            first = [given.get(m, BenchEntry(m, temperature=temperature)) for m in (BASELINE, REFERENCE)]
            if size == 1:
                groups = [[list(turns)] for _, turns in groupby(some, key=lambda item: id(item.prompt))]
            else:
                groups = [[[some[i % len(some)]] for i in range(max(len(some), FILLED * size))]]
            blocks.append((suite, temperature, size, first + [e for e in table if e not in first], groups))
        rounds = sum(len(table) * len(groups) for *_, table, groups in blocks)
        current().update(done=0, total=session.options.repeats * rounds)
        for suite, temperature, size, table, groups in blocks:
            runs = [EntryRun(session, entry, size) for entry in table]
            name = f"{suite.name} T={temperature:g}" + (f" batch {size}" if size > 1 else "")
            try:
                with quiet():
                    time_texts(runs, groups, name)
            except KeyboardInterrupt:
                self.stopped = name
                raise
            finally:
                if runs[0].record.texts:
                    self._add_rows(suite, runs, list(chain(*groups)))
        return self.rows

    def _add_rows(self, suite: Suite, runs: Sequence[EntryRun], chats: Sequence[Chat]) -> None:
        """Make the rows of one suite, temperature and batch size."""
        session, temperature, size = self.session, runs[0].entry.temperature, runs[0].batch_size
        score: Any = suite.score
        keys = [tuple(tuple(item.ids) for item in chat) for chat in chats]
        numbers = prompt_numbers([(item.ids, len(item.ids)) for item, *_ in chats]) if size > 1 else ()
        for run in runs:
            run.record.prompts = numbers
            self.records[suite.name, temperature, size, run.entry.label] = run.record
            if run.entry.method == REFERENCE and temperature == 0:
                for key, texts in zip(keys, run.record.texts):
                    self._expected.setdefault(key, texts[0].new_ids)
        for run in runs:
            entry, record = run.entry, run.record
            draft = entry.draft if entry.needs_draft else None
            # of several assistants the one most like this entry
            alike = sorted((o.entry.draft == draft, o.draft_length == run.draft_length, i) for i, o in enumerate(runs))
            of = {runs[i].entry.method: runs[i].record for *_, i in alike if runs[i].record.texts}
            row: dict[str, Any] = dict.fromkeys(COLUMNS) | {
                "suite": suite.name,
                "temperature": temperature,
                "batch_size": size,
                "name": entry.label,
                "method": entry.method,
                "draft": draft,
                "draft_length": run.draft_length,
                "lossless": entry.is_baseline or is_lossless(entry.method, entry.rule),
                "baseline": entry.is_baseline,
                "repeats": session.options.repeats,
                "prompts": len(record.texts),
                "categories": [],
                "note": run.note,
            }
            self.rows.append(row)
            if run.note:
                continue
            categories, seed = [chat[0].prompt.category for chat in chats], session.options.seed
            row |= measured(record, of, seed) | {"categories": by_category(record, of, categories, seed)}
            if (cost := session.costs.get(draft, {}).get(size)) is not None:
                in_turn = entry.needs_draft and entry.method not in TREES | {"hybrid"}
                row["predicted_speedup"] = speedup_of_trace(record.trace(), cost, drafts_with_model=in_turn)
            if score is not None:
                marks = [
                    statistics.fmean(score(item.prompt, session.text(text.new_ids)) for text in texts)
                    for (item, *_), texts in zip(chats, record.texts)
                ]
                error = statistics.stdev(marks) / len(marks) ** 0.5 if len(marks) > 1 else None
                row |= {"accuracy": statistics.fmean(marks), "accuracy_se": error}
            if temperature == 0 and self._expected:
                known = [self._expected[key] for key, _ in zip(keys, record.texts)]
                same = [text.new_ids == ids for ids, texts in zip(known, record.texts) for text in texts]
                row |= {"identical_share": statistics.fmean(same), "identical_to_target": all(same)}
            self.rows[-1] = plain(row)
            detail: dict[str, Any] = {key: row[key] for key in ("suite", "temperature", "batch_size", "name")}
            detail |= analysis(record)
            rules = [method.rule for method in run.methods[:-1]]
            if rules and isinstance(rules[0], JensenShannon):  # the final threshold of an adaptive acceptance rule
                detail["verification_threshold"] = statistics.fmean(rule.theta for rule in rules)
            alone = not entry.is_baseline and METHODS[entry.method][0] == "none"
            detail["samples"] = [
                {
                    "prompt": item.said,
                    "text": session.text(out.new_ids),
                    "tokens": marked(Detokenizer(session.tokenizer), out.new_ids, out.written_by, out.rejected, alone),
                }
                for item, out in zip(chain(*chats), run.samples)
            ]
            self.analysis.append(plain(detail))
