"""Benchmarks of texts decoded together: methods × batch sizes, every batch size of all methods side by side.

At batch size B a method decodes prompts with B texts at once; a finished text's place is taken by a waiting one. As
many prompts are given as keep the batch filled for most of the time, at least twice B. A method's speedup is over the
same batch without a draft; transformers' ``generate`` gets the same prompts in batches of B, sorted by length.
"""

import statistics
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from decode.bench.baselines import TRANSFORMERS_BASELINES, quiet
from decode.bench.costs import round_costs
from decode.bench.entries import REFERENCE, BenchEntry, EntryRun, check_entries, with_baselines
from decode.bench.offline_acceptance import prompt_numbers
from decode.bench.pair_profile import batch_costs
from decode.bench.session import BASELINE, Item, Session
from decode.bench.statistics import RESAMPLES, bootstrap, median_interval, plain
from decode.bench.suites import Suite
from decode.loop import Target, decode_texts
from decode.progress import current
from decode.sampling import TorchRng
from decode.stopping import RoundCosts
from decode.trace import Trace

FILLED = 2  # prompts for each place of the batch, at least
LONGEST_LIMIT = 15  # costs are measured for drafts of this length, or of the longest to come
WARM = 8  # most new tokens of the texts that warm a method up
MEASURED = (
    "tokens_per_second", "tokens_per_second_ci95", "speedup", "speedup_ci95", "speedup_vs_generate",
    "speedup_vs_generate_ci95", "predicted_speedup", "seconds_per_text", "seconds_per_text_ci95", "seconds_per_token",
    "seconds_per_token_ci95", "mean_batch", "block_efficiency", "accepted_per_drafted", "drafted_per_round", "alpha",
    "identical_share", "tokens", "texts",
)  # fmt: skip
"""Measured fields of a row; each has all of them, null where they do not apply. Times are of decoding with all of a
batch: from reading a text's prompt to its end, and that by its tokens (medians over texts). `mean_batch` is how many
texts were being decoded on the average; `predicted_speedup` takes the measured costs of the rounds as they were, and
the prompts' reading; `identical_share` is over greedy texts, against those without a draft at the smallest size."""


@dataclass
class Written:
    """What a method wrote in one repeat at one batch size."""

    texts: list[list[int]]  # new tokens of each prompt
    share: list[float]  # seconds of each, which add up to the wall time
    wall: float  # seconds from the first prompt to the last text
    # seconds of each text from its prompt to its end; empty where it is not known
    latency: list[float] = field(default_factory=list)
    trace: Trace | None = None  # all rounds; None for transformers' own


class BatchBenchmark:
    """Measures entries at several batch sizes."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.rows: list[dict[str, Any]] = []  # results so far, of every batch size that is complete
        self._reference: dict[tuple[str, tuple[int, ...]], list[int]] = {}

    def run(
        self,
        suites: Iterable[Suite],
        entries: Iterable[BenchEntry],
        batch_sizes: Iterable[int],
        *,
        prompts: int | None = None,
    ) -> list[dict[str, Any]]:
        """Measure all entries on all suites at all batch sizes; the baselines are added.

        Args:
            suites: what the prompts are taken from, again from the start where they run out.
            entries: in the order of the table; of transformers' methods only ``generate`` decodes batches.
            batch_sizes: texts at once.
            prompts: so many of each suite where the batch needs no more; None: all.

        Returns:
            The rows: ``suite``, ``temperature``, ``batch_size``, those that say what was measured, and `MEASURED`.

        Raises:
            UserError: a draft is missing, no prompt fits, or a model decodes one text at a time only.
        """
        entries = [e for e in entries if e.method not in TRANSFORMERS_BASELINES or e.method == REFERENCE]
        tables = [
            with_baselines([e for e in entries if e.temperature == t], t)
            for t in dict.fromkeys(e.temperature for e in entries)
        ]
        check_entries(self.session, entries)
        items, sizes, repeats = {s.name: self.session.items(s) for s in suites}, sorted(set(batch_sizes)), self.repeats
        self._measure_costs([item for some in items.values() for item in some], tables, sizes)
        blocks = [(name, table, size) for name in items for table in tables for size in sizes]
        current().update(done=0, total=(1 + repeats) * sum(len(table) for _, table, _ in blocks))
        for name, table, size in blocks:
            some = items[name]
            needed = max(len(some) if prompts is None else prompts, FILLED * size)
            chosen = [some[i % len(some)] for i in range(needed)]
            self.rows += self._block(name, table, size, chosen)
        return self.rows

    def _measure_costs(self, items: Sequence[Item], tables: Sequence[list[BenchEntry]], sizes: Sequence[int]) -> None:
        """Fill the session's costs by batch size, which predictions and draft lengths that adapt are made from."""
        session, entries = self.session, [entry for table in tables for entry in table]
        if not session.options.costs:
            return
        context = int(statistics.median(len(item.ids) for item in items)) + session.options.max_new_tokens // 2
        longest = max([LONGEST_LIMIT, *(entry.options.draft_length or 0 for entry in entries)])
        for draft in dict.fromkeys(entry.draft for entry in entries if entry.needs_draft):
            assert draft is not None
            warp = replace(session.options.warp, temperature=entries[0].temperature)
            session.round_costs[draft] = round_costs(
                batch_costs(session, draft, items, warp, sizes, longest=longest, context=context)
            )

    @property
    def repeats(self) -> int:
        """Times that each method decodes the prompts at each batch size."""
        return self.session.options.repeats

    def _block(self, suite: str, table: Sequence[BenchEntry], size: int, items: Sequence[Item]) -> list[dict[str, Any]]:
        """All entries at one batch size: each warms up, then all decode the prompts in turn, repeat after repeat."""
        runs = [EntryRun(self.session, entry) for entry in table]
        written: list[list[Written]] = [[] for _ in runs]
        with quiet():
            for repeat in range(-1, self.repeats):
                for place in range(len(runs)):
                    i = (place + max(0, repeat)) % len(runs)
                    label = f"{suite} T={table[i].temperature:g} batch {size} {table[i].label}"
                    current().update(name=label if repeat >= 0 else f"{label}, warming up")
                    out = self._write(runs[i], items if repeat >= 0 else items[:size], size, repeat)
                    current().advance()
                    written[i] += [out] if repeat >= 0 else []
        opponents = {run.entry.method: some for run, some in reversed(list(zip(runs, written)))}
        if table[0].temperature == 0:
            for item, ids in zip(items, opponents[BASELINE][0].texts):
                self._reference.setdefault((suite, tuple(item.ids)), ids)
        where = {"suite": suite, "temperature": table[0].temperature, "batch_size": size}
        return [plain(where | self._row(run, some, opponents, items, suite)) for run, some in zip(runs, written)]

    def _write(self, run: EntryRun, items: Sequence[Item], size: int, repeat: int) -> Written:
        options, prompts = self.session.options, [item.ids for item in items]
        budget = options.max_new_tokens if repeat >= 0 else min(WARM, options.max_new_tokens)
        if run.peer is not None:
            return self._write_peer(run, prompts, size, budget)
        runner = self.session.runner
        seeds = [options.seed + 1009 * i + max(0, repeat) for i in range(len(prompts))]
        began = time.perf_counter()
        texts = decode_texts(
            Target(runner),
            run.systems[repeat],
            run.warp,
            prompts,
            rngs=[TorchRng(seed, runner.device) for seed in seeds],
            batch_size=size,
            max_new_tokens=budget,
            stop_ids=self.session.stop_ids,
        )
        wall, whole = time.perf_counter() - began, Trace()
        for i, text in enumerate(texts):
            whole.extend(text.trace, i)
        share = [wall * text.trace.total_seconds / max(1e-12, whole.total_seconds) for text in texts]
        latency = [text.trace.wall_seconds for text in texts]
        return Written([text.new_ids for text in texts], share, wall, latency, whole)

    def _write_peer(self, run: EntryRun, prompts: Sequence[list[int]], size: int, budget: int) -> Written:
        assert run.peer is not None
        order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
        out = Written([[] for _ in prompts], [0.0] * len(prompts), 0.0, [0.0] * len(prompts))
        for at in range(0, len(order), size):
            chosen = order[at : at + size]
            texts, seconds, _ = run.peer.run([prompts[i] for i in chosen], budget, self.session.options.seed)
            for i, text in zip(chosen, texts):
                out.texts[i], out.share[i], out.latency[i] = text, seconds / len(chosen), seconds
            out.wall += seconds
        return out

    def _row(
        self,
        run: EntryRun,
        written: Sequence[Written],
        opponents: dict[str, list[Written]],
        items: Sequence[Item],
        suite: str,
    ) -> dict[str, Any]:
        entry, seed = run.entry, self.session.options.seed
        row: dict[str, Any] = {"name": entry.label, **run.about(), **dict.fromkeys(MEASURED)}
        numbers = prompt_numbers([(item.ids, len(item.ids)) for item in items])
        row |= _interval("tokens_per_second", cells(written, numbers), seed)
        for key, method in (("speedup", BASELINE), ("speedup_vs_generate", REFERENCE)):
            if method in opponents:
                row |= _interval(
                    key, np.concatenate([cells(written, numbers), cells(opponents[method], numbers)], 2), seed
                )
        seconds = [statistics.median(out.latency[i] for out in written) for i in range(len(items))]
        tokens = [statistics.fmean(len(out.texts[i]) for out in written) for i in range(len(items))]
        per_token = [s / n for s, n in zip(seconds, tokens) if n]
        for key, values in (("seconds_per_text", seconds), ("seconds_per_token", per_token)):
            middle, low, high = median_interval(values, seed=seed)
            row |= {key: middle, f"{key}_ci95": [low, high]}
        row["mean_batch"] = sum(sum(out.latency) for out in written) / sum(out.wall for out in written)
        row |= {"tokens": sum(len(ids) for out in written for ids in out.texts), "texts": len(items) * self.repeats}
        whole, plainly = _together(written), _together(opponents.get(BASELINE, []))
        if whole.rounds:
            metrics = whole.metrics()
            row |= {key: metrics[key] for key in MEASURED if key in metrics and row[key] is None}
        costs = self.session.round_costs.get(row["draft"])
        if whole.rounds and plainly.rounds and costs is not None:
            row["predicted_speedup"] = predicted(whole, plainly, costs)
        if entry.temperature == 0 and entry.lossless:
            row["identical_share"] = statistics.fmean(
                ids == self._reference[suite, tuple(item.ids)] for out in written for item, ids in zip(items, out.texts)
            )
        return row


def _together(written: Sequence[Written]) -> Trace:
    whole = Trace()
    for out in written:
        whole.extend(out.trace or Trace())
    return whole


def predicted(trace: Trace, plain: Trace, costs: RoundCosts) -> float:
    """The speedup that rounds should have over those without a draft, by what their drafts' lengths and batches cost.

    Reading the prompts takes what it took; each round of a text is its part of the round of all texts.
    """
    return _seconds(plain, costs) / plain.tokens * trace.tokens / _seconds(trace, costs)


def _seconds(trace: Trace, costs: RoundCosts) -> float:
    return trace.prefill_seconds + sum(
        count * _round(drafted, costs) / len(drafted) for drafted, count in Counter(trace.together).items()
    )


def _round(drafted: Sequence[int], costs: RoundCosts) -> float:
    """A round of texts with drafts of these lengths: a draft forward reads the texts whose drafts are not done yet."""
    batch, longest = len(drafted), max(drafted)
    if not longest:
        return costs.plain(batch)
    drafting = sum(costs.drafting(sum(k > i for k in drafted)) for i in range(longest))
    return drafting + costs.verifying(batch, 1 + statistics.fmean(drafted))


def cells(written: Sequence[Written], prompts: Sequence[int]) -> np.ndarray:
    """Tokens and seconds of each prompt in each repeat, ``[prompts, repeats, 2]``."""
    table = np.zeros((max(prompts) + 1, len(written), 2))
    for repeat, out in enumerate(written):
        for prompt, ids, seconds in zip(prompts, out.texts, out.share):
            table[prompt, repeat] += len(ids), seconds
    return table


def _interval(key: str, table: np.ndarray, seed: int) -> dict[str, Any]:
    """Σ tokens / Σ seconds of the first pair of columns, over that of the second where there is one.

    The interval is over prompts and over repeats, which are both resampled: a disturbance of the machine in one repeat
    affects all its texts.
    """
    random = np.random.default_rng(seed)
    picks = random.integers(table.shape[1], size=(RESAMPLES, table.shape[1]))

    def rate(sums: np.ndarray) -> np.ndarray:
        rates = sums[..., 0::2] / sums[..., 1::2]
        return rates[..., 0] / rates[..., 1] if rates.shape[-1] > 1 else rates[..., 0]

    def statistic(drawn: np.ndarray) -> np.ndarray:  # [samples, prompts, repeats, columns]
        per_repeat = drawn.sum(1)
        if len(drawn) == 1:
            return rate(per_repeat.sum(1))
        return rate(np.take_along_axis(per_repeat, picks[:, :, None], 1).sum(1))

    middle, low, high = bootstrap(table, statistic, seed=seed)
    return {key: middle, f"{key}_ci95": [low, high]}
