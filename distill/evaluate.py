"""The measurements of a finished run: acceptance on held-out prompts, decoding, what the drafts learned."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

import numpy as np
import torch
from torch import Tensor

from decode.bench import machine
from decode.bench.benchmark import BenchEntry, Benchmark
from decode.bench.offline_acceptance import DEPTH, OfflineAlpha, offline_alphas, paired
from decode.bench.prediction import best_length, break_even, speedups_by_length
from decode.bench.session import BenchOptions, Session
from decode.bench.suites import Suite
from decode.method_options import MethodOptions
from decode.models.heads import FeatureHead
from decode.models.loading import open_draft
from decode.models.pair import described, own_warp
from decode.models.teacher_forcing import TeacherForcedLogits
from decode.progress import Progress, as_current
from distill.data.context import MEASUREMENT, StageContext
from distill.data.corpus import test_suite
from distill.stages import account_of

Text = tuple[list[int], int]  # token ids, and how many of them are the prompt


class Histograms:
    """Histograms of logit margins and divergences of each draft, on common edges."""

    def __init__(self) -> None:
        self.values: dict[str, dict[str, list[Tensor]]] = {"margins": {}, "kl": {}}

    def add(self, p: Tensor, drafts: Mapping[str, Tensor]) -> None:
        """Adds a text, from the target's logits ``[n, vocab]`` and those of each draft.

        The margin is the draft's logit of the target's most probable token minus its largest other logit; the
        divergence is KL(p‖q) in nats.
        """
        for name, q in drafts.items():
            shared = min(p.shape[-1], q.shape[-1])
            own, other = p[:, :shared].float(), q[:, :shared].float()
            best = own.argmax(-1, keepdim=True)
            margin = other.gather(-1, best) - other.scatter(-1, best, -torch.inf).amax(-1, keepdim=True)
            log_p, log_q = own.log_softmax(-1), other.log_softmax(-1)
            self.values["margins"].setdefault(name, []).append(margin[:, 0])
            self.values["kl"].setdefault(name, []).append((log_p.exp() * (log_p - log_q)).sum(-1))

    def report(self, bins: int = 40) -> dict[str, Any]:
        """Returns ``{"margins": {draft: {"edges", "counts"}}, "kl": {…}}``."""
        found: dict[str, Any] = {}
        for kind, series in self.values.items():
            flat = {name: torch.cat(parts).double().cpu().numpy() for name, parts in series.items()}
            if flat:
                pooled = np.concatenate(list(flat.values()))
                low, high = (0.0, np.quantile(pooled, 0.999)) if kind == "kl" else np.quantile(pooled, [0.001, 0.999])
                edges = np.linspace(low, max(high, low + 1e-6), bins + 1)
                counts = {name: np.histogram(v.clip(edges[0], edges[-1]), edges)[0] for name, v in flat.items()}
                found[kind] = {name: {"edges": edges.tolist(), "counts": n.tolist()} for name, n in counts.items()}
        return found


def lifts(
    selected: Iterable[tuple[str, int]], label_shares: Iterable[float], chosen: int, limit: int = 20
) -> list[dict[str, Any]]:
    """Returns the tokens that AdaSPEC's selection prefers, by falling lift.

    Args:
        selected: Token texts, and how often each was selected during training.
        label_shares: Share of each of them among all label tokens trained on.
        chosen: Number of selected tokens.
        limit: Length of the list.

    Returns:
        ``{token, count, share, lift}`` each: times selected, share of the selection, and that share over the token's
        share of all labels. Tokens below 1/1000 of the labels are left out, since their lift is noise.
    """
    rows: list[dict[str, Any]] = [
        {"token": text, "count": count, "share": count / chosen, "lift": count / chosen / share}
        for (text, count), share in zip(selected, label_shares)
        if share >= 1e-3
    ]
    return sorted(rows, key=lambda row: -row["lift"])[:limit]


class Evaluation:
    """The measurements of a run on the corpus's test prompts.

    Attributes:
        best: Name of the draft that is exported.
        shown: Drafts whose margins and divergences are counted: those that give every token a probability.
    """

    def __init__(self, context: StageContext) -> None:
        self.context, self.full, self.run = context, context.settings, context.run
        self.settings, self.tokenizer = self.full.evaluation, context.corpus.tokenizer
        self.histograms, self.threads = Histograms(), torch.get_num_threads()
        self.target = context.load_target()
        self.best = self.run.chosen(self.full.export.choose)
        trust = self.full.student.trust_remote_code
        self.models = {
            name: open_draft(path, self.target, self.tokenizer, trust_remote_code=trust)
            for name, path in self.run.drafts.items()
        }
        reduced = {n for n, m in self.models.items() if isinstance(m, FeatureHead) and m.draft_ids() is not None}
        self.shown = [name for name in self.run.trained if name not in reduced]
        source, settings = self.full.data.source, self.settings
        whole = test_suite(
            context.corpus, source, max(settings.prompts, settings.accuracy_prompts, settings.decode_prompts)
        )
        self.prompts = list(whole.prompts)
        self.suite = Suite(source, self.prompts[: settings.decode_prompts], whole.score)
        options = BenchOptions(
            max_new_tokens=settings.max_new_tokens,
            repeats=settings.repeats,
            seed=self.full.seed,
            threads=settings.threads,
            samples=2,
            warp=own_warp(self.target, 0.0, {}),
        )
        self.session = Session(self.target, self.models, self.tokenizer, options)

    def report(self) -> dict[str, Any]:
        """Measures everything.

        Returns:
            The run's report but for its name and settings: ``target``, ``drafts``, ``paired``, ``decoding``,
            ``profile``, ``analysis``, ``samples``, ``machine``, ``created``.
        """
        settings = self.settings
        try:
            with Progress(self.context.console) as self.bar:
                if followed := described(self.target, own_warp(self.target, 1.0, {})):
                    self.bar.console.print(followed, soft_wrap=True)
                greedy = self._texts(0.0, max(settings.prompts, settings.accuracy_prompts))
                by_depth = self._alphas(self._texts(1.0, settings.prompts), 1.0)
                greedy_by_depth = self._alphas(greedy[: settings.prompts], 0.0)
                profile = self._profile(greedy_by_depth)
                with self.context.timed(f"{MEASUREMENT}: decoding", len(self.suite.prompts)):
                    decoding, analysis, samples = self._decoding(profile)
                if warning := machine.load_warning():
                    self.bar.console.print(f"  {warning}", soft_wrap=True)
        finally:
            torch.set_num_threads(self.threads)
        alphas, greedy_alphas = ({name: of[0] for name, of in each.items()} for each in (by_depth, greedy_by_depth))
        return {
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "target": self._target(greedy),
            "drafts": [self._draft(name, alphas[name], greedy_alphas[name]) for name in self.models],
            "paired": self._pairs(alphas, "T = 1") + self._pairs(greedy_alphas, "greedy"),
            "decoding": decoding,
            "profile": profile,
            "analysis": analysis | self._analysis(by_depth),
            "samples": samples,
            "machine": self.session.facts() | {"dtype": self.full.target.dtype},
        }

    # -- texts and acceptance --------------------------------------------------------------------------------------

    def _texts(self, temperature: float, count: int) -> list[Text]:
        """Returns what the target generates for the first ``count`` test prompts."""
        name = "greedy texts of the target" if temperature == 0 else f"texts of the target, T = {temperature:g}"
        prompts = [list(prompt.ids) for prompt in self.prompts[:count]]
        work, warp = self.bar.add(name, len(prompts)), own_warp(self.target, temperature, {})
        with self._all_threads(), self.context.timed(f"{MEASUREMENT}: {name}", len(prompts)):
            texts = self.session.written(prompts, warp, self.settings.batch_size, work.advance)
        return [([*ids, *text], len(ids)) for ids, text in zip(prompts, texts)]

    def _alphas(self, texts: list[Text], temperature: float) -> dict[str, list[OfflineAlpha]]:
        """Returns offline_alpha of every draft as first drafted token, of feature heads up to the `DEPTH`-th."""
        name = "acceptance, greedy" if temperature == 0 else f"acceptance, T = {temperature:g}"
        work = self.bar.add(name, sum(len(ids) > start for ids, start in texts))

        def seen(forced: TeacherForcedLogits) -> None:
            if temperature == 1.0:
                self.histograms.add(forced.p, {draft: forced.q[draft][0] for draft in self.shown})
            work.advance()

        warp = own_warp(self.target, temperature, {})
        with self._all_threads(), self.context.timed(f"{MEASUREMENT}: {name}", len(texts) * len(self.models)):
            return offline_alphas(self.target, self.models, texts, warp, depth=DEPTH, seen=seen)

    @contextmanager
    def _all_threads(self) -> Iterator[None]:
        """Uses the threads of training inside, where many texts are processed at once and nothing is timed."""
        timed = torch.get_num_threads()
        torch.set_num_threads(self.full.threads or self.threads)
        try:
            yield
        finally:
            torch.set_num_threads(timed)

    def _target(self, greedy: list[Text]) -> dict[str, Any]:
        parameters, marks = sum(p.numel() for p in self.target.parameters()), []
        if self.suite.score is not None:
            scored = list(zip(self.prompts, greedy))[: self.settings.accuracy_prompts]
            marks = [self.suite.score(prompt, self.session.text(ids[start:])) for prompt, (ids, start) in scored]
        return {
            "parameters": parameters,
            "weight_bytes": self.session.runner.weight_bytes,
            "accuracy": statistics.fmean(marks) if marks else None,
            "accuracy_n": len(marks) or None,
        }

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
        """Returns the differences of the exported draft from the others, and of each draft from its reference.

        The last row compares the first draft with the student before distillation. A row's label names what both
        trainings had in common.
        """
        pairs = [(self.best, name) for name in self.run.trained]
        pairs += [(draft.name, draft.reference) for draft in self.full.drafts if draft.reference is not None]
        found = []
        for a, b in dict.fromkeys([*pairs, (self.run.trained[0], self.run.start)]):
            if a == b:
                continue
            one, other = (account_of(self.run.draft_record(name)) for name in (a, b))
            equal = ["steps"] if one.optimiser_steps == other.optimiser_steps else []
            equal += ["teacher tokens"] if one.teacher_tokens == other.teacher_tokens else []
            label = mode + ("; equal " + " and ".join(equal) if equal else "")
            found.append({"a": a, "b": b, "label": label, **paired(alphas[b], alphas[a])})
        return found

    # -- decoding --------------------------------------------------------------------------------------------------

    def _profile(self, greedy: dict[str, list[OfflineAlpha]]) -> dict[str, Any]:
        """Returns the exported draft's costs, and the speedup that they predict for every draft length."""
        items, work = self.session.items(self.suite), self.bar.add("costs of forwards", 1)
        self.session.measure_costs(items, [self.best], longest=max(self.settings.draft_lengths))
        work.advance()
        cost = self.session.costs[self.best][1]
        widest = max(cost.verify_cost)
        predicted = {name: speedups_by_length(own, cost, widest - 1) for name, own in greedy.items()}
        speedups = predicted[self.best]
        needed = [least for k in speedups if (least := break_even(k, cost)) is not None]
        return {
            "draft": self.best,
            "cost_ratio": cost.cost_ratio,
            "verify_cost": [cost.v(n) for n in range(1, widest + 1)],
            "target_seconds": cost.target_seconds,
            "draft_seconds": cost.draft_seconds,
            "context": cost.context,
            "alpha": greedy[self.best][0].mean,
            "best_draft_length": best_length(speedups),
            "best_draft_lengths": {name: best_length(found) for name, found in predicted.items()},
            "break_even_alpha": min(needed, default=None),
            "predicted_speedup": speedups,
        }

    def _entries(self, best: Mapping[str, int | None]) -> list[BenchEntry]:
        """Returns what is timed: the exported draft at every length asked for, others at their predicted best length.

        An untrained head is left out. Trees of heads are as deep as the longest chain.
        """
        lengths = sorted({*self.settings.draft_lengths, best[self.best] or 1})
        heads = [name for name in self.models if isinstance(self.models[name], FeatureHead)]
        found = []
        for temperature in self.settings.temperatures:
            for name in self.models:
                if name in heads and name == self.run.start:
                    continue
                method = "eagle" if name in heads else "vanilla"
                for k in lengths if name == self.best else [best[name] or 1]:
                    options = MethodOptions(draft_length=k)
                    found.append(BenchEntry(method, name, options, temperature=temperature, name=f"{name} {k}"))
        depth = max(entry.options.draft_length or 1 for entry in found)
        trees = list(zip(self.settings.tree_widths, self.settings.tree_nodes))
        for temperature in self.settings.temperatures if heads else ():
            for name in dict.fromkeys((self.run.trained[0], self.best)):
                for width, nodes in trees:
                    options = MethodOptions(draft_length=depth, tree_width=width, tree_nodes=nodes)
                    label = f"{name}-tree {width}/{nodes}"
                    found.append(BenchEntry("eagle-tree", name, options, temperature=temperature, name=label))
        return found

    def _decoding(self, profile: dict[str, Any]) -> tuple[list[dict[str, Any]], dict[str, Any], list[Any]]:
        """Returns the rows of the benchmark, its analysis, and samples of the exported draft."""
        benchmark = Benchmark(self.session)
        with as_current(self.bar.add("decoding: costs of forwards")):
            rows = benchmark.run([self.suite], self._entries(profile["best_draft_lengths"]))
        for row in rows:
            if row["method"] == "eagle-tree":
                row["draft"] = f"{row['draft']}-tree"
        lengths = {(e["name"], e["temperature"]): e.get("draft_lengths") for e in benchmark.analysis}
        greedy = [row for row in rows if row["temperature"] == 0 and row["draft"] and row["speedup"]]
        fastest = {row["draft"]: row for row in sorted(greedy, key=lambda row: row["speedup"])}
        details = {e["name"]: e for e in benchmark.analysis if e["temperature"] == 0}
        positions = {draft: details[row["name"]]["acceptance_by_position"] for draft, row in fastest.items()}
        samples = []
        if self.best in fastest:
            profile["measured_best_draft_length"] = fastest[self.best]["draft_length"]
            samples = details[fastest[self.best]["name"]]["samples"]
        costs = {name or "": of[1].to_dict() for name, of in self.session.costs.items()}
        decoding = [
            row
            | {"draft": row["draft"] or row["name"], "draft_lengths": lengths.get((row["name"], row["temperature"]))}
            for row in rows
        ]
        return decoding, {"acceptance_by_position": positions, "costs": costs}, samples

    # -- what the drafts learned -----------------------------------------------------------------------------------

    def _analysis(self, alphas: dict[str, list[OfflineAlpha]]) -> dict[str, Any]:
        found = self.histograms.report()
        records = {name: self.run.draft_record(name) for name in self.models}
        curves = {n: [[h["step"], h["alpha"]] for h in r.history if "alpha" in h] for n, r in records.items()}
        found["curves"] = {name: points for name, points in curves.items() if points}
        selective = next((r for n in (self.best, *records) if (r := records[n]).selected), None)
        if selective is not None:
            chosen = selective.account["selected_tokens"]
            found["selected_tokens"] = lifts(selective.selected, selective.label_shares, chosen)
        depths = {
            name: [{"depth": depth, "alpha": alpha.mean, "se": alpha.se} for depth, alpha in enumerate(by_depth, 1)]
            for name, by_depth in alphas.items()
            if len(by_depth) > 1
        }
        return found | ({"alpha_by_depth": depths} if depths else {})
