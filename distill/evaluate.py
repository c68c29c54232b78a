"""The measurements of a finished run: acceptance on held-out prompts, decoding, what the drafts learned."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import torch

from decode.bench import machine
from decode.bench.benchmark import BenchEntry, Benchmark
from decode.bench.costs import LONGEST
from decode.bench.offline_acceptance import DEPTH, OfflineAlpha, offline_alphas, paired
from decode.bench.prediction import best_length, break_even, offline_accepted_length, speedups_by_length
from decode.bench.session import BenchOptions, Session
from decode.bench.suites import Suite
from decode.engines.gap_causes import serving_facts
from decode.method_options import MethodOptions
from decode.models.block_head import BlockHead
from decode.models.loading import open_draft
from decode.models.pair import described, own_warp
from decode.progress import Progress, as_current
from distill.config.drafts import START
from distill.data.context import MEASUREMENT, StageContext
from distill.data.corpus import test_suite

Text = tuple[list[int], int]  # token ids, and how many of them are the prompt


class Evaluation:
    """The measurements of a run on the corpus's test prompts.

    Attributes:
        best: Name of the draft that is exported.
    """

    def __init__(self, context: StageContext) -> None:
        self.context, self.full, self.run = context, context.settings, context.run
        self.settings = settings = self.full.evaluation
        self.threads = torch.get_num_threads()
        self.target = context.load_target()
        self.best = self.run.chosen(self.full.export.choose)
        tokenizer, trust = context.corpus.tokenizer, self.full.student.trust_remote_code
        self.models = {
            name: open_draft(path, self.target, tokenizer, trust_remote_code=trust)
            for name, path in self.run.drafts.items()
        }
        source, counts = self.full.data.source, (settings.prompts, settings.accuracy_prompts, settings.decode_prompts)
        whole = test_suite(context.corpus, source, max(counts))
        self.prompts = list(whole.prompts)
        self.suite = Suite(source, self.prompts[: settings.decode_prompts], whole.score)
        options = BenchOptions(
            max_new_tokens=settings.max_new_tokens,
            repeats=settings.repeats,
            seed=self.full.seed,
            threads=settings.threads,
            samples=2,
            costs=False,  # they are measured before, for the predictions
            warp=own_warp(self.target, 0.0, {}),
        )
        self.session = Session(self.target, self.models, tokenizer, options)

    def report(self) -> dict[str, Any]:
        """Measures everything.

        Returns:
            The run's report but for its name and settings: ``target``, ``drafts``, ``paired``, ``decoding``,
            ``profile``, ``analysis``, ``samples``, ``machine``, ``created``.
        """
        settings, alphas = self.settings, dict[float, dict[str, list[OfflineAlpha]]]()
        try:
            with Progress(self.context.console) as self.bar:
                if followed := described(self.target, own_warp(self.target, 1.0, {})):
                    self.bar.console.print(followed, soft_wrap=True)
                timed = torch.get_num_threads()  # of measured speeds; texts that are processed at once have more
                torch.set_num_threads(self.full.threads or self.threads)
                for temperature, count in ((1.0, 0), (0.0, settings.accuracy_prompts)):
                    texts = self._texts(temperature, max(settings.prompts, count))
                    alphas[temperature] = self._alphas(texts[: settings.prompts], temperature)
                torch.set_num_threads(timed)
                profile = self._profile(alphas[0.0])
                with self.context.timed(f"{MEASUREMENT}: decoding", len(self.suite.prompts)):
                    decoding, analysis, samples = self._decoding(profile)
                analysis["acceptance"] = self._acceptance(alphas[0.0], analysis["acceptance_by_position"])
                if warning := machine.load_warning():
                    self.bar.console.print(f"  {warning}", soft_wrap=True)
        finally:
            torch.set_num_threads(self.threads)
        histories = {name: self.run.draft_record(name).history for name in self.models}
        curves = {name: [[at["step"], at["alpha"]] for at in h if "alpha" in at] for name, h in histories.items()}
        marks = []
        if self.suite.score is not None:  # the texts are those of the last temperature, 0
            scored = list(zip(self.prompts, texts))[: settings.accuracy_prompts]
            marks = [self.suite.score(prompt, self.session.text(ids[start:])) for prompt, (ids, start) in scored]
        corpus = self.context.corpus
        return {
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "target": {
                "parameters": sum(p.numel() for p in self.target.parameters()),
                "weight_bytes": self.session.runner.weight_bytes,
                "accuracy": statistics.fmean(marks) if marks else None,
                "accuracy_n": len(marks) or None,
            },
            "drafts": [self._draft(name, alphas[1.0][name], alphas[0.0][name][0]) for name in self.models],
            "paired": self._pairs(alphas[1.0], "T = 1") + self._pairs(alphas[0.0], "greedy"),
            "decoding": decoding,
            "profile": profile,
            "analysis": analysis | {"curves": {name: points for name, points in curves.items() if points}},
            "samples": samples,
            "machine": self.session.facts() | {"dtype": self.full.target.dtype},
            "trained_with": serving_facts(self.target, self.run.target, corpus.tokenizer, chat=corpus.chat),
        }

    # -- texts and acceptance --------------------------------------------------------------------------------------

    def _texts(self, temperature: float, count: int) -> list[Text]:
        """Returns what the target generates for the first ``count`` test prompts."""
        name = f"texts of the target, T = {temperature:g}"
        prompts = [list(prompt.ids) for prompt in self.prompts[:count]]
        work, warp = self.bar.add(name, len(prompts)), own_warp(self.target, temperature, {})
        with self.context.timed(f"{MEASUREMENT}: {name}", len(prompts)):
            texts = self.session.written(prompts, warp, self.settings.batch_size, work.advance)
        return [([*ids, *text], len(ids)) for ids, text in zip(prompts, texts)]

    def _alphas(self, texts: list[Text], temperature: float) -> dict[str, list[OfflineAlpha]]:
        """Returns offline_alpha of every draft as first drafted token, of feature heads up to the `DEPTH`-th."""
        name = f"acceptance, T = {temperature:g}"
        work = self.bar.add(name, sum(len(ids) > start for ids, start in texts))
        warp = own_warp(self.target, temperature, {})
        with self.context.timed(f"{MEASUREMENT}: {name}", len(texts) * len(self.models)):
            depth = max((model.drafts for model in self.models.values() if isinstance(model, BlockHead)), default=DEPTH)
            return offline_alphas(self.target, self.models, texts, warp, depth=depth, seen=lambda _: work.advance())

    def _acceptance(self, greedy: dict[str, list[OfflineAlpha]], decoded: Mapping[str, Any]) -> dict[str, Any]:
        """Returns every draft's greedy acceptance at each position: on validation examples, offline, and decoded."""
        found: dict[str, list[dict[str, Any]]] = {}
        for name, depths in greedy.items():
            best, rows = self.run.best(name)[0], decoded.get(name, [])
            for i in range(max(len(depths), len(rows))):
                at = min(i, len(depths) - 1)  # a language model reads the text's own tokens, at every position alike
                validation = best.get(f"agreement_{i + 1}" if at else "agreement")
                accepted = {"validation": validation, "offline": depths[at].mean}
                accepted["decoded"] = rows[i]["conditional"] if i < len(rows) else None
                found.setdefault(name, []).append({"position": i + 1, **accepted})
        return found

    def _draft(self, name: str, sampled: list[OfflineAlpha], greedy: OfflineAlpha) -> dict[str, Any]:
        record, (best, _) = self.run.draft_record(name), self.run.best(name)
        return {
            "name": name,
            "parameters": sum(p.numel() for p in self.models[name].parameters()),
            "weight_bytes": self.session.drafts[name].weight_bytes,
            "offline_alpha": sampled[0].mean,
            "offline_alpha_se": sampled[0].se,
            "offline_accepted_length": offline_accepted_length(sampled),
            "offline_alpha_greedy": greedy.mean,
            "offline_alpha_greedy_se": greedy.se,
            **{f"validation_{key}": best.get(key) for key in ("alpha", "accepted_length")},
            **record.account,
            "seconds": record.seconds,
        }

    def _pairs(self, alphas: dict[str, list[OfflineAlpha]], mode: str) -> list[dict[str, Any]]:
        """Returns the differences of the exported draft from the others, and of each draft from its reference.

        The last row compares the first draft with the student before distillation. A row's label names what both
        trainings had in common.
        """
        pairs = [(self.best, name) for name in self.models]
        pairs += [(draft.name, draft.reference) for draft in self.full.drafts if draft.reference is not None]
        found = []
        for a, b in dict.fromkeys([*pairs, (self.run.trained[0], self.run.start)]):
            if a == b:
                continue
            one, other = (self.run.draft_record(name).account for name in (a, b))
            equal = ["steps"] if one["optimiser_steps"] == other["optimiser_steps"] else []
            equal += ["teacher tokens"] if one["teacher_tokens"] == other["teacher_tokens"] else []
            label = mode + ("; equal " + " and ".join(equal) if equal else "")
            found.append({"a": a, "b": b, "label": label, **paired(alphas[b][0], alphas[a][0])})
        return found

    # -- decoding --------------------------------------------------------------------------------------------------

    @property
    def decoded(self) -> list[str]:
        """The drafts that are decoded with: all but an untrained head."""
        return [name for name in self.models if name != START[1]]

    @property
    def _trees(self) -> bool:
        """Whether heads draft trees too, which a target with a recurrent state does not read."""
        return self.full.student.is_head and self.full.student.kind != "mtp" and self.session.runner.supports_trees

    def _profile(self, greedy: dict[str, list[OfflineAlpha]]) -> dict[str, Any]:
        """Returns the exported draft's costs, and the speedup that they predict for every draft length."""
        longest, trees = max(LONGEST, *self.settings.draft_lengths), self._trees
        if self.full.student.is_block:
            longest = self.full.student.steps
        with as_current(self.bar.add("costs of forwards")):
            self.session.measure_costs(self.session.items(self.suite), self.decoded, longest=longest, trees=trees)
        cost = self.session.costs[self.best][1]
        predicted = {name: speedups_by_length(own, cost, longest) for name, own in greedy.items()}
        speedups = predicted[self.best]
        needed = [least for k in speedups if (least := break_even(k, cost)) is not None]
        return {
            "draft": self.best,
            "cost_ratio": cost.cost_ratio,
            "alpha": greedy[self.best][0].mean,
            "best_draft_length": best_length(speedups),
            "best_draft_lengths": {name: best_length(found) for name, found in predicted.items()},
            "break_even_alpha": min(needed, default=None),
            "predicted_speedup": speedups,
        }

    def _entries(self, best: Mapping[str, int | None]) -> list[BenchEntry]:
        """Returns what is timed: the exported draft at every length asked for, others at their predicted best length.

        Trees of heads are as deep as the longest chain.
        """
        student, lengths = self.full.student, {*self.settings.draft_lengths, best[self.best] or 1}
        if student.is_block:  # a block drafts no more
            lengths = {min(k, student.steps) for k in lengths}
        own = "vanilla" if not student.is_head else "block" if student.is_block else "eagle"
        chains = [
            (name, k) for name in self.decoded for k in (sorted(lengths) if name == self.best else [best[name] or 1])
        ]
        depth, found = max(k for _, k in chains), []
        for temperature in self.settings.temperatures:
            for name, k in chains:
                options = MethodOptions(draft_length=k)
                found.append(BenchEntry(own, name, options, temperature=temperature, name=f"{name} {k}"))
            for name in dict.fromkeys((self.run.trained[0], self.best)) if self._trees else ():
                for width, nodes in self.settings.trees:
                    options = MethodOptions(draft_length=depth, tree_width=width, tree_nodes=nodes)
                    label = f"{name}-tree {width}/{nodes}"
                    found.append(BenchEntry(f"{own}-tree", name, options, temperature=temperature, name=label))
        return found

    def _decoding(self, profile: dict[str, Any]) -> tuple[list[dict[str, Any]], dict[str, Any], list[Any]]:
        """Returns the rows of the benchmark, its analysis, and samples of the exported draft."""
        benchmark, decoding = Benchmark(self.session), []
        with as_current(self.bar.add("decoding")):
            rows = benchmark.run([self.suite], self._entries(profile["best_draft_lengths"]))
        details = {(entry["name"], entry["temperature"]): entry for entry in benchmark.analysis}
        fastest: dict[str, dict[str, Any]] = {}
        for row in rows:
            draft = (row["draft"] or row["name"]) + "-tree" * row["method"].endswith("-tree")
            detail = details.get((row["name"], row["temperature"]), {})
            decoding.append(row | {"draft": draft, "draft_lengths": detail.get("draft_lengths")})
            if row["temperature"] == 0 and row["draft"] and row["speedup"]:
                fastest[draft] = max(fastest.get(draft, row), row, key=lambda row: row["speedup"])
        greedy = {draft: details[row["name"], 0] for draft, row in fastest.items()}
        if self.best in fastest:
            profile["measured_best_draft_length"] = fastest[self.best]["draft_length"]
        analysis = {
            "acceptance_by_position": {draft: detail["acceptance_by_position"] for draft, detail in greedy.items()},
            "costs": {name or "": of[1].to_dict() for name, of in self.session.costs.items()},
        }
        return decoding, analysis, greedy[self.best]["samples"] if self.best in greedy else []
