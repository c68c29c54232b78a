"""The measurements of a finished run: acceptance on held-out prompts, decoding, what the drafts learned."""

import statistics
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

from transformers import PreTrainedModel

from decode.core.draft import Ids
from decode.engines.check import serving_facts
from decode.measure.acceptance import DEPTH, ByDraft, OfflineAlpha, offline_accepted_length, offline_alphas, paired
from decode.measure.benchmark import BenchEntry, Benchmark, paired_ratios
from decode.measure.costs import LONGEST, best_length, break_even, speedups_by_length
from decode.measure.session import BenchOptions, Session
from decode.measure.statistics import median_interval
from decode.measure.suites import Prompt, Row, Suite
from decode.models.heads.block import BlockHead
from decode.models.open import DraftModel, described, open_draft, own_warp
from decode.options import MethodOptions
from decode.progress import Progress, as_current, current
from distill.config import EvaluationSettings
from distill.config.base import START
from distill.data.corpus import test_suite
from distill.export.card import fastest_row
from distill.run import Run

Text = tuple[Ids, int]  # token ids, and how many of them are the prompt
TREE_WIDTH, TREE_NODES = 4, 8  # tried with heads: nodes expanded a level, and nodes of the tree
BATCH = 32  # test prompts that the target answers at a time, before anything is timed


def target_texts(session: Session, prompts: Sequence[Prompt], temperature: float) -> list[Text]:
    """Returns what the session's target generates for prompts; each advances the current piece of work."""
    asked, warp = [list(prompt.ids) for prompt in prompts], own_warp(session.model, temperature, {})
    texts = session.written(asked, warp, BATCH, current().advance)
    return [([*ids, *text], len(ids)) for ids, text in zip(asked, texts)]


def acceptance(
    target: PreTrainedModel, drafts: Mapping[str, DraftModel], texts: Sequence[Text], temperature: float
) -> ByDraft:
    """Returns offline_alpha of every draft on texts of the target; each text advances the current piece of work.

    Of a feature head `DEPTH` drafted tokens are measured, of block heads all.
    """
    depth = max((model.drafts for model in drafts.values() if isinstance(model, BlockHead)), default=DEPTH)
    work, warp = current(), own_warp(target, temperature, {})
    return offline_alphas(target, drafts, texts, warp, depth=depth, seen=lambda _: work.advance())


class Evaluation:
    """The measurements of a run on the corpus's test prompts, by one process.

    Attributes:
        best: Name of the draft that is exported.
        decoded: The drafts that are decoded with: all but an untrained head.
        trees: Whether heads draft trees too, which a target with a recurrent state does not read.
    """

    def __init__(self, run: Run) -> None:
        measured, student = run.settings.evaluation, run.settings.student
        assert isinstance(measured, EvaluationSettings)
        self.run, self.settings, self.measured = run, run.settings, measured
        self.target = run.load_target("float32" if run.device.type == "cpu" else None)  # in which a CPU decodes
        self.best = run.chosen(self.settings.export.choose)
        self.models = {
            name: open_draft(path, self.target, run.tokenizer, trust_remote_code=student.trust_remote_code)
            for name, path in run.drafts.items()
        }
        count = max(measured.prompts, measured.accuracy_prompts, measured.decode_prompts)
        suite = test_suite(run.corpus, self.settings.data.source, count)
        self.prompts = list(suite.prompts)
        self.suite = Suite(suite.name, self.prompts[: measured.decode_prompts], suite.score)
        options = BenchOptions(
            max_new_tokens=measured.max_new_tokens,
            repeats=1,
            seed=self.settings.seed,
            threads=self.settings.threads,
            warp=own_warp(self.target, 0.0, {}),
        )
        self.session = Session(self.target, self.models, run.tokenizer, options)
        self.decoded = [name for name in self.models if name != START[1]]
        self.trees = student.is_head and student.kind != "mtp" and self.session.runner.supports_trees

    def report(self) -> Row:
        """Measures everything.

        Returns:
            The run's report but for its name and settings: ``target``, ``drafts``, ``paired``, ``decoding``,
            ``profile``, ``analysis``, ``machine``, ``created``, ``trained_with``.
        """
        run, measured = self.run, self.measured
        with Progress(run.console) as self.bar:
            if followed := described(self.target, own_warp(self.target, 1.0, {})):
                self.bar.console.print(followed, soft_wrap=True)
            _, sampled = self._offline(1.0, measured.prompts)
            texts, greedy = self._offline(0.0, max(measured.prompts, measured.accuracy_prompts))
            profile, lengths = self._profile(greedy)
            decoding, analysis = self._decoding(lengths)
        curves = {name: [row for row in run.draft_record(name).history if "alpha" in row] for name in self.models}
        analysis["curves"] = {name: [[row["step"], row["alpha"]] for row in h] for name, h in curves.items() if h}
        analysis["acceptance"] = self._acceptance(greedy, analysis["acceptance_by_position"])
        accuracy, score = None, self.suite.score
        if score is not None:
            answers = [self.session.text(ids[start:]) for ids, start in texts[: measured.accuracy_prompts]]
            accuracy = statistics.fmean(map(score, self.prompts, answers))
        return {
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "target": {"parameters": self.target.num_parameters(), "accuracy": accuracy},
            "drafts": [self._draft(name, sampled[name], greedy[name][0]) for name in self.models],
            "paired": self._pairs(sampled, "T = 1") + self._pairs(greedy, "greedy"),
            "decoding": decoding,
            "profile": profile,
            "analysis": analysis,
            "machine": self.session.facts() | {"dtype": str(self.target.dtype).removeprefix("torch.")},
            "trained_with": serving_facts(self.target, run.target, run.tokenizer, chat=run.corpus.chat),
        }

    def _offline(self, temperature: float, count: int) -> tuple[list[Text], ByDraft]:
        """Returns the target's texts for the first test prompts, and every draft's acceptance on some of them."""
        prompts = self.prompts[:count]
        with as_current(self.bar.add(f"texts of the target, T = {temperature:g}", len(prompts))):
            texts = target_texts(self.session, prompts, temperature)
        judged = texts[: self.measured.prompts]
        with as_current(self.bar.add(f"acceptance, T = {temperature:g}", sum(len(ids) > n for ids, n in judged))):
            return texts, acceptance(self.target, self.models, judged, temperature)

    def _acceptance(self, greedy: ByDraft, decoded: Row) -> dict[str, list[Row]]:
        """Returns every draft's greedy acceptance at each position: on validation examples, offline, and decoded."""
        positions: dict[str, list[Row]] = {}
        for name, depths in greedy.items():
            best, rows, positions[name] = self.run.best(name)[0], decoded.get(name, []), []
            for i in range(max(len(depths), len(rows))):
                depth = min(i, len(depths) - 1)  # a language model reads the text's tokens, at every position alike
                positions[name].append({
                    "position": i + 1,
                    "validation": best.get(f"agreement_{i + 1}" if depth else "agreement"),
                    "offline": depths[depth].mean,
                    "decoded": rows[i]["conditional"] if i < len(rows) else None,
                })  # fmt: skip
        return positions

    def _draft(self, name: str, sampled: list[OfflineAlpha], greedy: OfflineAlpha) -> Row:
        record, (best, _) = self.run.draft_record(name), self.run.best(name)
        return {
            "name": name,
            "parameters": sum(p.numel() for p in self.models[name].parameters()),
            "offline_alpha": sampled[0].mean,
            "offline_alpha_se": sampled[0].se,
            "offline_accepted_length": offline_accepted_length(sampled),
            "offline_alpha_greedy": greedy.mean,
            "offline_alpha_greedy_se": greedy.se,
            **{f"validation_{key}": best.get(key) for key in ("alpha", "accepted_length")},
            **record.account,
            "seconds": record.seconds,
        }

    def _pairs(self, alphas: ByDraft, label: str) -> list[Row]:
        """Returns the differences of the exported draft from the others, and of each draft from its reference.

        The last row compares the first draft with the student before distillation.
        """
        pairs = [(self.best, name) for name in self.models if name != self.best]
        pairs += [(draft.name, draft.reference) for draft in self.settings.drafts if draft.reference is not None]
        pairs.append((self.run.trained[0], self.run.start))
        return [{"a": a, "b": b, "label": label} | paired(alphas[b][0], alphas[a][0]) for a, b in dict.fromkeys(pairs)]

    def _profile(self, greedy: ByDraft) -> tuple[Row, dict[str, int]]:
        """Returns the exported draft's costs with the speedups that they predict, and the best length of each draft."""
        student = self.settings.student
        longest = student.steps if student.is_block else max(LONGEST, *self.measured.draft_lengths)
        with as_current(self.bar.add("costs of rounds")):
            items = self.session.items(self.suite)
            self.session.measure_costs(items, [*self.decoded, *[None] * self.trees], longest=longest)
        costs = self.session.costs[self.best]
        predicted = {name: speedups_by_length(alphas, costs.rounds, longest) for name, alphas in greedy.items()}
        lengths = {name: best_length(speedups) for name, speedups in predicted.items()}
        needed = [least for k in predicted[self.best] if (least := break_even(k, costs.rounds)) is not None]
        profile = {
            "draft": self.best,
            "cost_ratio": costs.cost_ratio,
            "alpha": greedy[self.best][0].mean,
            "best_draft_length": lengths[self.best],
            "break_even_alpha": min(needed, default=None),
            "predicted_speedup": predicted[self.best],
        }
        return profile, lengths

    def _entries(self, best: Mapping[str, int]) -> list[BenchEntry]:
        """Returns what is timed: the exported draft at every length asked for, others at their predicted best length.

        Trees of heads are as deep as the longest chain.
        """
        student = self.settings.student
        method = "vanilla" if not student.is_head else "block" if student.is_block else "eagle"
        longest = student.steps if student.is_block else max(self.measured.draft_lengths)  # a block drafts no more
        asked = {min(k, longest) for k in self.measured.draft_lengths}
        lengths = {name: {best[name] or 1} | (asked if name == self.best else set()) for name in self.decoded}
        chains = [(name, k) for name, several in lengths.items() for k in sorted(several)]
        timed = [(method, name, MethodOptions(draft_length=k), f"{name} {k}") for name, k in chains]
        if self.trees:
            tree = MethodOptions(draft_length=max(k for _, k in chains), tree_width=TREE_WIDTH, tree_nodes=TREE_NODES)
            names = dict.fromkeys((self.run.trained[0], self.best))
            timed += [(f"{method}-tree", name, tree, f"{name}-tree {TREE_WIDTH}/{TREE_NODES}") for name in names]
        return [
            BenchEntry(method, name, options, temperature=temperature, name=label)
            for temperature in self.measured.temperatures
            for method, name, options, label in timed
        ]

    def _decoding(self, lengths: Mapping[str, int]) -> tuple[list[Row], Row]:
        """Returns the rows of the benchmark, and its analysis."""
        benchmark = Benchmark(self.session)
        with as_current(self.bar.add("decoding")):
            rows = benchmark.run([self.suite], self._entries(lengths))
        for row in rows:
            row["draft"] = (row["draft"] or row["name"]) + "-tree" * row["method"].endswith("-tree")
        self._compare(rows, benchmark)
        greedy = {"decoding": [row for row in rows if row["temperature"] == 0]}
        names = [name + form for form in ("", "-tree") for name in self.decoded]
        fastest = {name: row for name in names if (row := fastest_row(greedy, name))}
        analysis = {
            "acceptance_by_position": {name: row["acceptance_by_position"] for name, row in fastest.items()},
            "costs": {name or "": costs.to_dict() for name, costs in self.session.costs.items()},
        }
        return rows, analysis

    def _compare(self, rows: Sequence[Row], benchmark: Benchmark) -> None:
        """Adds the speed over the exported draft at its fastest, prompt by prompt, to the rows of each temperature."""
        records = {(row["temperature"], row["name"]): record for row, record in zip(rows, benchmark.records.values())}
        for row in rows:
            alike = [other for other in rows if other["temperature"] == row["temperature"]]
            base = fastest_row({"decoding": alike}, self.best, f"{self.best}-tree")
            record = records[row["temperature"], row["name"]]
            if base and record.texts:
                ratios = paired_ratios(record, records[base["temperature"], base["name"]])
                row["speedup_vs_exported"], row["speedup_vs_exported_ci95"] = median_interval(ratios)
