"""The measurements of a finished run: acceptance on held-out prompts, real decoding, what the drafts learned."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import numpy as np
import torch
from torch import Tensor

from decode.bench.benchmark import Benchmark
from decode.bench.costs import CostModel
from decode.bench.entries import BenchEntry
from decode.bench.offline_acceptance import DEPTH, OfflineAlpha, offline_alphas, paired
from decode.bench.prediction import best_length, break_even, speedups_by_length, verdict
from decode.bench.session import BenchOptions, Session
from decode.bench.suites import Suite
from decode.method_options import MethodOptions
from decode.models.heads import FeatureHead
from decode.models.loading import open_draft
from decode.models.pair import described, own_warp
from decode.models.teacher_forcing import TeacherForcedLogits
from decode.progress import Progress, as_current
from decode.sampling import LogitsWarper
from distill.config.drafts import PLAIN
from distill.data.context import MEASUREMENT, StageContext
from distill.data.corpus import test_suite
from distill.files import account_of


def margins(p: Tensor, q: Tensor) -> Tensor:
    """Logit margin ``[n]``: the draft's logit of the target's most probable token minus its largest other logit."""
    best = p.argmax(-1, keepdim=True)
    own = q.gather(-1, best)
    others = q.scatter(-1, best, -torch.inf).amax(-1, keepdim=True)
    return (own - others).squeeze(-1)


def divergence(p: Tensor, q: Tensor) -> Tensor:
    """KL(p ‖ q) in nats ``[n]`` from logits ``[n, vocab]``."""
    log_p, log_q = p.float().log_softmax(-1), q.float().log_softmax(-1)
    return (log_p.exp() * (log_p - log_q)).sum(-1)


class Histograms:
    """Histograms of margins and divergences of each draft, on common edges."""

    def __init__(self) -> None:
        self._values: dict[str, dict[str, list[Tensor]]] = {"margins": {}, "kl": {}}

    def add(self, p: Tensor, drafts: Mapping[str, Tensor]) -> None:
        """One more text: the target's logits ``[n, vocab]``, and each draft's."""
        for name, q in drafts.items():
            shared = min(p.shape[-1], q.shape[-1])
            self._values["margins"].setdefault(name, []).append(margins(p[:, :shared].float(), q[:, :shared].float()))
            self._values["kl"].setdefault(name, []).append(divergence(p[:, :shared], q[:, :shared]))

    def report(self, bins: int = 40) -> dict[str, Any]:
        """``{"margins": {draft: {"edges", "counts"}}, "kl": {…}}``."""
        found: dict[str, Any] = {}
        for kind, series in self._values.items():
            flat = {name: torch.cat(parts).double().cpu().numpy() for name, parts in series.items()}
            if not flat:
                continue
            pooled = np.concatenate(list(flat.values()))
            low, high = (0.0, np.quantile(pooled, 0.999)) if kind == "kl" else np.quantile(pooled, [0.001, 0.999])
            edges = np.linspace(low, max(high, low + 1e-6), bins + 1)
            found[kind] = {
                name: {"edges": edges.tolist(), "counts": np.histogram(v.clip(edges[0], edges[-1]), edges)[0].tolist()}
                for name, v in flat.items()
            }
        return found


def lifts(
    selected: Iterable[tuple[str, int]], label_shares: Iterable[float], chosen: int, limit: int = 20
) -> list[dict[str, Any]]:
    """The tokens that AdaSPEC's selection prefers.

    Args:
        selected: token texts, and how often each was selected during training.
        label_shares: of each of them, its share of all label tokens trained on.
        chosen: tokens selected in all.
        limit: how many are listed.

    Returns:
        ``{token, count, share, lift}`` each, by falling lift: times selected, share of the selection, and that share
        over the token's share of all labels. Tokens below 1/1000 of the labels are left out: their lift is noise.
    """
    rows: list[dict[str, Any]] = [
        {"token": text, "count": count, "share": count / chosen, "lift": count / chosen / share}
        for (text, count), share in zip(selected, label_shares)
        if share >= 1e-3
    ]
    return sorted(rows, key=lambda row: -row["lift"])[:limit]


Text = tuple[list[int], int]  # token ids, and how many of them are the prompt
PROFILE_TURNS, COST_TURNS = 12, 8
"""Measurements of costs for the profile, and within a block of timed texts (one a prompt where there are more)."""


class Evaluation:
    """The measurements of a run whose drafts are language models, on the corpus's test prompts.

    Attributes:
        shown: drafts whose margins and divergences from the target are.
    """

    def __init__(self, context: StageContext) -> None:
        self.console, self.threads, self.histograms = context.console, torch.get_num_threads(), Histograms()
        self.timed = context.timed
        self.full, self.run, self.corpus = context.settings, context.run, context.corpus
        full, run, source, settings = self.full, self.run, self.full.data.source, self.full.evaluation
        self.settings, self.tokenizer = settings, context.corpus.tokenizer
        self.target, trust = context.load_target(settings.dtype), full.initial.trust_remote_code
        self.models = {
            name: open_draft(path, self.target, self.tokenizer, trust_remote_code=trust)
            for name, path in run.drafts.items()
        }
        self.comparisons = {c.name: c.method for c in full.comparisons}
        count = max(settings.prompts, settings.accuracy_prompts, settings.decode_prompts)
        whole = test_suite(self.corpus, source, count)
        self.prompts = list(whole.prompts)
        self.prompt_ids = [list(prompt.ids) for prompt in self.prompts]
        self.suite = Suite(source, self.prompts[: settings.decode_prompts], whole.score)
        options = BenchOptions(
            max_new_tokens=settings.max_new_tokens,
            repeats=settings.repeats,
            seed=full.seed,
            threads=settings.threads,
            samples=2,
            cost_turns=COST_TURNS,
            warp=self._warp(0.0),
        )
        self.session = Session(self.target, self.models, self.tokenizer, options)
        pair = [run.names[stage] for stage in ("reference", "draft")]
        self.shown = [name for name in pair if self._whole(name)]

    @property
    def best(self) -> str:
        """The draft that is exported."""
        return self.run.chosen(self.full.export.choose)

    def _whole(self, name: str) -> bool:
        """Whether a draft gives every token a probability, so that a divergence from it is finite."""
        return True

    def report(self) -> dict[str, Any]:
        """Measure everything.

        Returns:
            The run's report but for its name and settings: ``target``, ``drafts``, ``paired``, ``decoding``,
            ``profile``, ``analysis``, ``samples``, ``machine``, ``created``.
        """
        try:
            return self._report()
        finally:
            torch.set_num_threads(self.threads)

    def _report(self) -> dict[str, Any]:
        with Progress(self.console) as self.bar:
            if followed := described(self.target, self._warp(1.0)):
                self.bar.console.print(followed, soft_wrap=True)
            greedy = self._texts(0.0, max(self.settings.prompts, self.settings.accuracy_prompts))
            sampled = self._texts(1.0, self.settings.prompts)
            by_depth = self._alphas(sampled, 1.0)
            greedy_by_depth = self._alphas(greedy[: self.settings.prompts], 0.0)
            alphas, greedy_alphas = ({name: of[0] for name, of in each.items()} for each in (by_depth, greedy_by_depth))
            profile = self._profile(greedy_by_depth)
            with self.timed(f"{MEASUREMENT}: decoding", len(self.suite.prompts)):
                decoding, extra = self._decoding(profile)
            if warning := self.session.load.warning():
                self.bar.console.print(f"  {warning}", soft_wrap=True)
        return {
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "target": self._target(greedy),
            "drafts": [self._draft(name, alphas[name], greedy_alphas[name]) for name in self.models],
            "paired": self._pairs(alphas, "T = 1") + self._pairs(greedy_alphas, "greedy"),
            "decoding": decoding,
            "profile": profile,
            "analysis": extra["analysis"] | self._analysis(by_depth),
            "samples": extra["samples"],
            "machine": self.session.facts() | {"dtype": self.settings.dtype or self.full.target.dtype},
        }

    # -- texts and acceptance --------------------------------------------------------------------------------------

    def _warp(self, temperature: float) -> LogitsWarper:
        """Sampling at a temperature, as the target's own generation_config has it."""
        return own_warp(self.target, temperature, {})

    def _texts(self, temperature: float, count: int) -> list[Text]:
        """What the target writes for the first `count` test prompts, in batches."""
        name = "greedy texts of the target" if temperature == 0 else f"texts of the target, T = {temperature:g}"
        prompts = self.prompt_ids[:count]
        work = self.bar.add(name, len(prompts))
        with self._all_threads(), self.timed(f"{MEASUREMENT}: {name}", len(prompts)):
            texts = self.session.written(prompts, self._warp(temperature), self.settings.batch_size, work.advance)
        return [([*ids, *text], len(ids)) for ids, text in zip(prompts, texts)]

    def _alphas(self, texts: list[Text], temperature: float) -> dict[str, list[OfflineAlpha]]:
        """offline_alpha of every draft: as first drafted token, of feature heads up to the `DEPTH`-th."""
        name = "acceptance, greedy" if temperature == 0 else f"acceptance, T = {temperature:g}"
        work = self.bar.add(name, sum(len(ids) > start for ids, start in texts))

        def seen(forced: TeacherForcedLogits) -> None:
            if temperature == 1.0:
                self.histograms.add(forced.p, {draft: forced.q[draft][0] for draft in self.shown})
            work.advance()

        with self._all_threads(), self.timed(f"{MEASUREMENT}: {name}", len(texts) * len(self.models)):
            return offline_alphas(self.target, self.models, texts, self._warp(temperature), depth=DEPTH, seen=seen)

    @contextmanager
    def _all_threads(self) -> Iterator[None]:
        """The threads of training, where many texts are read at once and nothing is timed."""
        timed = torch.get_num_threads()
        torch.set_num_threads(self.full.threads or self.threads)
        try:
            yield
        finally:
            torch.set_num_threads(timed)

    def _target(self, greedy: list[Text]) -> dict[str, Any]:
        row: dict[str, Any] = {
            "parameters": sum(p.numel() for p in self.target.parameters()),
            "weight_bytes": self.session.runner.weight_bytes,
            "accuracy": None,
            "accuracy_n": None,
        }
        if self.suite.score is not None:
            scored = list(zip(self.prompts, greedy))[: self.settings.accuracy_prompts]
            marks = [self.suite.score(p, self.session.text(ids[start:])) for p, (ids, start) in scored]
            row |= {"accuracy": statistics.fmean(marks), "accuracy_n": len(marks)}
        return row

    def _draft(self, name: str, alpha: OfflineAlpha, greedy: OfflineAlpha) -> dict[str, Any]:
        record = self.run.draft_record(name)
        return {
            "name": name,
            "parameters": sum(p.numel() for p in self.models[name].parameters()),
            "weight_bytes": self.session.drafts[name].weight_bytes,
            "offline_alpha": alpha.mean,
            "offline_alpha_se": alpha.se,
            "offline_alpha_greedy": greedy.mean,
            "offline_alpha_greedy_se": greedy.se,
            "validation_alpha": self.run.validation_alpha(name),
            **vars(account_of(record)),
            "seconds": record.seconds,
        }

    def _pairs(self, alphas: dict[str, OfflineAlpha], mode: str) -> list[dict[str, Any]]:
        """The exported draft and AdaSPEC's against DistillSpec's, each with what they held equal, and against AdaSPEC.

        Then DistillSpec's own gain.
        """
        base, none, best = self.run.names["reference"], self.run.names["initial"], self.best
        plain = [base, *(name for name, method in self.comparisons.items() if method == "distillspec")]
        selective = [name for name, method in self.comparisons.items() if method == "adaspec"]
        selective = list(dict.fromkeys([best, self.run.names["draft"], *selective]))
        pairs = [(a, b) for a in selective for b in plain if b != best and (a == best or self._held(a, b))]
        pairs += [(best, PLAIN)] if PLAIN in self.models else []
        return [
            {"a": a, "b": b, "label": "; ".join(filter(None, [mode, self._held(a, b)])), **paired(alphas[b], alphas[a])}
            for a, b in dict.fromkeys([*pairs, (base, none)])
            if a != b
        ]

    def _held(self, a: str, b: str) -> str:
        """What the trainings of two drafts had in common."""
        one, other = (account_of(self.run.draft_record(name)) for name in (a, b))
        same = [
            words
            for words, x, y in (
                ("steps", one.optimiser_steps, other.optimiser_steps),
                ("teacher tokens", one.teacher_tokens, other.teacher_tokens),
            )
            if x == y
        ]
        return "equal " + " and ".join(same) if same else ""

    # -- decoding --------------------------------------------------------------------------------------------------

    def _profile(self, greedy: dict[str, list[OfflineAlpha]]) -> dict[str, Any]:
        """Costs of the pair, and the speedup they predict for every draft length; for other drafts the best length."""
        items, work = self.session.items(self.suite), self.bar.add("costs of forwards", 1)
        self.session.measure_costs(items, [self.best], longest=max(self.settings.draft_lengths), repeats=PROFILE_TURNS)
        work.advance()
        cost: CostModel = self.session.costs[self.best]
        widest = max(cost.verify_cost)
        predicted = {name: speedups_by_length(own, cost, widest - 1) for name, own in greedy.items()}
        alpha, speedups = greedy[self.best][0], predicted[self.best]
        needed = [b for k in speedups if (b := break_even(k, cost.cost_ratio, cost.v, cost.overhead)) is not None]
        return {
            "draft": self.best,
            "cost_ratio": cost.cost_ratio,
            "verify_cost": [cost.v(n) for n in range(1, widest + 1)],
            "target_seconds": cost.target_seconds,
            "draft_seconds": cost.draft_seconds,
            "context": cost.context,
            "alpha": alpha.mean,
            "best_draft_length": best_length(speedups),
            "best_draft_lengths": {name: best_length(found) for name, found in predicted.items()},
            "break_even_alpha": min(needed, default=None),
            "predicted_speedup": speedups,
            "verdict": verdict(alpha.mean, cost, speedups),
        }

    def _entries(self, profile: dict[str, Any]) -> list[BenchEntry]:
        """The exported draft at every length asked for, and the stages' at the length predicted best for each.

        Of the comparisons AdaSPEC itself is decoded with, where the section's draft is a variation of it.
        """
        best = {name: length or 1 for name, length in profile["best_draft_lengths"].items()}
        lengths = sorted({*self.settings.draft_lengths, best[self.best]})
        return [
            BenchEntry("vanilla", name, MethodOptions(draft_length=k), temperature=t, name=f"{name} {k}")
            for t in self.settings.temperatures
            for name in dict.fromkeys([*self.run.names.values(), self.best, *({PLAIN} & set(self.comparisons))])
            for k in (lengths if name == self.best else [best[name]])
        ]

    def _named(self, row: dict[str, Any]) -> dict[str, Any]:
        """A row with the name that its draft has in the report."""
        return row

    def _decoding(self, profile: dict[str, Any]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        benchmark = Benchmark(self.session)
        with as_current(self.bar.add("decoding: costs of forwards")):
            rows = [self._named(row) for row in benchmark.run([self.suite], self._entries(profile))]
        drafted = {(e["name"], e["temperature"]): e.get("draft_lengths") for e in benchmark.analysis}
        decoding = [
            row
            | {"draft": row["draft"] or row["name"], "draft_lengths": drafted.get((row["name"], row["temperature"]))}
            for row in rows
        ]
        greedy = [row for row in rows if row["temperature"] == 0 and row["draft"] and row["speedup"]]
        fastest = {
            draft: max((r for r in greedy if r["draft"] == draft), key=lambda r: r["speedup"])["name"]
            for draft in dict.fromkeys(row["draft"] for row in greedy)
        }
        details = {e["name"]: e for e in benchmark.analysis if e["temperature"] == 0}
        positions = {draft: details[name]["acceptance_by_position"] for draft, name in fastest.items()}
        samples = details[fastest[self.best]]["samples"] if self.best in fastest else []
        if greedy:
            best = max((r for r in greedy if r["draft"] == self.best), key=lambda r: r["speedup"])
            profile["measured_best_draft_length"] = best["draft_length"]
        costs = [{"suite": b.suite, "temperature": b.temperature, "costs": b.costs} for b in benchmark.blocks]
        return decoding, {"analysis": {"acceptance_by_position": positions, "costs": costs}, "samples": samples}

    # -- what the drafts learned -----------------------------------------------------------------------------------

    def _analysis(self, alphas: dict[str, list[OfflineAlpha]]) -> dict[str, Any]:
        found = self.histograms.report()
        records = {name: self.run.draft_record(name) for name in self.models}
        curves = {n: [[h["step"], h["alpha"]] for h in r.history if "alpha" in h] for n, r in records.items()}
        found["curves"] = {name: points for name, points in curves.items() if points}
        selective = next((r for n in (self.best, *records) if (r := records[n]).selected), None)
        if selective is not None and selective.label_shares:  # older records are without
            chosen = selective.account["selected_tokens"]
            found["selected_tokens"] = lifts(selective.selected, selective.label_shares, chosen)
        return found


class HeadEvaluation(Evaluation):
    """See the module's docstring."""

    def _whole(self, name: str) -> bool:
        head = self.models[name]
        return isinstance(head, FeatureHead) and head.draft_ids() is None

    def _entries(self, profile: dict[str, Any]) -> list[BenchEntry]:
        """The trained heads' chains as for draft models, and two heads' trees, as deep as the longest chain."""
        settings, names = self.full.eagle, self.run.names
        drafted = [c for c in super()._entries(profile) if c.draft != names["initial"]]  # it only costs time
        chains = [replace(entry, method="eagle") for entry in drafted]
        depth = max(entry.options.draft_length or 1 for entry in chains)
        trees = [
            BenchEntry(
                "eagle-tree",
                trained,
                MethodOptions(draft_length=depth, tree_width=width, tree_nodes=nodes),
                temperature=temperature,
                name=f"{trained}-tree {width}/{nodes}",
            )
            for temperature in self.settings.temperatures
            for trained in dict.fromkeys((names["reference"], self.best))
            for width, nodes in zip(settings.tree_widths, settings.tree_nodes)
        ]
        return chains + trees

    def _named(self, row: dict[str, Any]) -> dict[str, Any]:
        return row | {"draft": f"{row['draft']}-tree"} if row["method"] == "eagle-tree" else row

    def _analysis(self, alphas: dict[str, list[OfflineAlpha]]) -> dict[str, Any]:
        depths = {
            name: [{"depth": depth, "alpha": alpha.mean, "se": alpha.se} for depth, alpha in enumerate(by_depth, 1)]
            for name, by_depth in alphas.items()
        }
        return super()._analysis(alphas) | {"alpha_by_depth": depths}
