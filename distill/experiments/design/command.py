"""``python -m distill design``: costs, then methods without training, then rounds of training, then the page."""

from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from rich.console import Console
from transformers import PreTrainedModel

from decode.bench.costs import LONGEST
from decode.bench.offline_acceptance import OfflineAlpha, offline_alphas, paired
from decode.bench.report import console_table
from decode.bench.session import ANSWERED_AT_ONCE
from decode.bench.statistics import plain
from decode.errors import UserError
from decode.models.choose_runner import open_runner
from decode.models.pair import own_warp
from decode.progress import output_console, working
from distill.config.drafts import ResponseSettings
from distill.config.run import Settings
from distill.data.context import StageContext
from distill.data.datasets import TokenDataset
from distill.experiments.design import methods_without_training as untrained
from distill.experiments.design.design_page import VERIFIED, Results
from distill.experiments.design.draft_shapes import Shape, default_shape, space
from distill.experiments.design.predicted_speedup import best_of, forecast, slope_of
from distill.experiments.design.settings import DesignRunSettings
from distill.experiments.design.shape_costs import Pricing, price_all, threads
from distill.experiments.design.shape_table import Entry, show
from distill.experiments.design.successive_halving import Clock, Race
from distill.experiments.design.training_trials import Trials
from distill.experiments.design.verify_predictions import rank_correlation, verified, verify
from distill.experiments.target_texts import Text, target_texts
from distill.files import RunDir, fingerprint, write_json
from distill.pipeline import alone_in, run_of, write_settings
from distill.run_stages import run_stages
from distill.stages import stage_fingerprints


def design(settings: DesignRunSettings, console: Console | None = None) -> Path:
    """Everything that ``python -m distill design`` does.

    Returns:
        The folder of ``design.json``, ``design.html`` and ``winner.yaml``.

    Raises:
        UserError: settings that cannot be used, or a budget too small for one round.
    """
    settings.validate()
    settings.design.validate()
    console = console or output_console()
    full = Settings(**{name: getattr(settings, name) for name in Settings.__dataclass_fields__})
    run = run_of(full)
    with alone_in(run, full, console):
        context = StageContext(full, run, console)
        run_stages(context, ("target",))
        return Design(context, settings).run()


@dataclass
class Design:
    """One design: the target's run, the settings, and what is found out."""

    context: StageContext  # settings, data and folder of the run whose target is designed for
    settings: DesignRunSettings  # the design's
    entries: list[Entry] = field(default_factory=list)

    def __post_init__(self) -> None:
        full, own = self.context.settings, self.settings.design
        self.folder = self.context.run.folder / "design"
        self.work = RunDir(self.folder).work
        self.temperature = full.evaluation.temperatures[0] if own.temperature is None else own.temperature
        self.longest = own.longest or max(LONGEST, *full.evaluation.draft_lengths)
        keys = stage_fingerprints(full)
        self.target_key, self.start_key, recipe_key = (keys[stage][0] for stage in ("target", "initial", "reference"))
        self.clock = Clock(self.work / "spent.json", recipe_key, own.seconds)
        self.texts_key = ""

    @cached_property
    def target(self) -> PreTrainedModel:
        """The target as it decodes."""
        return self.context.load_target(self.context.settings.evaluation.dtype).eval()

    @cached_property
    def shapes(self) -> list[Shape]:
        """All shapes."""
        return space(self.context.settings, self.settings.design, self.target.config.get_text_config())

    @cached_property
    def default(self) -> Shape:
        """The configuration's own."""
        return default_shape(self.context.settings, int(self.target.config.get_text_config().num_hidden_layers))

    @cached_property
    def texts(self) -> list[Text]:
        """What the target answers to validation prompts."""
        full, corpus = self.context.settings, self.context.corpus
        longest = full.evaluation.max_new_tokens
        how = ResponseSettings(
            temperature=self.temperature, max_new_tokens=longest, batch_size=min(32, 2 * ANSWERED_AT_ONCE)
        )
        made_from = {"target": self.target_key, "corpus": corpus.fingerprint}
        path = self.work / "texts" / f"validation-T{self.temperature:g}.jsonl"
        texts, self.texts_key = target_texts(
            self.context, self.target, corpus.validation, self.settings.design.texts, how, path, made_from
        )
        return [text for text in texts if len(text[0]) > text[1]]

    @cached_property
    def trials(self) -> Trials:
        """Trains and measures shapes."""
        warp = own_warp(self.target, self.temperature, {})
        return Trials(self.context, self.folder, self.target, self.texts, self.texts_key, warp)

    def run(self) -> Path:
        """All of it."""
        own, console = self.settings.design, self.context.console
        console.print(f"[bold]design[/bold]: {self.clock}", highlight=False)
        with self.clock.counting():
            self.price()
            self.measure_untrained()
        self.prune()
        trained = [entry for entry in self.entries if entry.shape.trained]
        race = Race(self.trials, trained, self.default, own, self.longest, self.clock, self.work, console)
        counts = [sum(e.status == status for e in self.entries) for status in ("no training", "pruned")]
        console.print(
            f"  {len(self.entries)} shapes: {len(self.entries) - sum(counts)} to be trained, {counts[0]} need no "
            f"training, {counts[1]} cannot win; {self.clock}", highlight=False, soft_wrap=True,
        )  # fmt: skip
        if not own.costs_only:
            race.run()
        left = [entry for entry in trained if entry.full is not None and entry.status == "left"]
        # where the budget ended within a round, one tried for longer goes before a better guess from fewer steps
        winner = max(left, key=lambda entry: (entry.steps, entry.forecast), default=None)
        results = Results(
            self.context.run.folder.name, self.entries, self.default, winner, self.trials.full_steps, self.longest,
            self.clock.spent, self.clock.budget, self.facts(), datetime.now(UTC).isoformat(timespec="seconds"),
            race.common, race.rounds,
        )  # fmt: skip
        if winner is not None:
            winner.status = "winner"
            self.write_winner(winner)
            results.more = self.more(race, winner)
        self.write(results)
        if own.verify and winner is not None:
            self.verify(results, winner)
        console.print(show(self.entries, self.default))
        for line in (results.headline(), results.verdict(), *results.more):
            console.print(line, highlight=False, soft_wrap=True)
        console.print(f"\npage    {self.folder / 'design.html'}", highlight=False)
        if winner is not None:
            console.print(f"train   python -m distill --config {self.folder / 'winner.yaml'}", highlight=False)
        return self.folder

    # -- before anything is trained ------------------------------------------------------------------------------------

    def price(self) -> None:
        """Costs of every shape, and the acceptance each needs to break even."""
        own, full, console = self.settings.design, self.context.settings, self.context.console
        count = full.evaluation.threads if own.threads is None else own.threads or None
        how = own.batch_size, self.longest, count, str(self.target.dtype), full.evaluation.max_new_tokens
        made_from = fingerprint(self.start_key, *how)

        def begin() -> Pricing:
            prompts = [self.texts[i][0][: self.texts[i][1]] for i in range(len(self.texts))]
            return Pricing(
                self.target, self.context.corpus.tokenizer, prompts, full,
                batch_size=own.batch_size, longest=self.longest, count=count,
            )  # fmt: skip

        if not self.texts:
            raise UserError(
                "the target wrote nothing for the validation prompts, so acceptance cannot be measured: give other "
                "data, or check the chat template and the target's end-of-text tokens"
            )
        with threads(count), working(console, "costs of the shapes"):
            prices = price_all(self.work / "costs.json", made_from, self.shapes, begin, own.costs)
        for shape in self.shapes:
            if (reason := prices.refused.get(shape)) is not None:
                if shape == self.default:
                    raise UserError(f"{shape.name}, the configuration's own shape, has no costs: {reason}")
                self.entries.append(Entry(shape, None, status="pruned", reason=reason))
                continue
            price = prices.by_shape[shape]
            entry = Entry(shape, price, price.needed(1.0, self.longest), price.best(own.ceiling, self.longest))
            self.entries.append(entry)

    def measure_untrained(self) -> None:
        """Speedups of what needs no training."""
        warp = own_warp(self.target, self.temperature, {})
        entries = [entry for entry in self.entries if not entry.shape.trained and entry.price is not None]
        if not entries:
            return
        runner = open_runner(self.target)
        exits = {entry.shape.name: entry.shape.random(self.context.settings, self.target) for entry in entries
                 if entry.shape.family == "exit"}  # fmt: skip
        alphas: dict[str, list[OfflineAlpha]] = offline_alphas(self.target, exits, self.texts, warp) if exits else {}
        for entry in entries:
            price = entry.price
            assert price is not None
            if entry.shape.family == "exit":
                entry.alpha, entry.alpha_se = alphas[entry.shape.name][0].mean, alphas[entry.shape.name][0].se
                entry.speedup, entry.length = best_of(alphas[entry.shape.name], price, self.longest)
            elif entry.shape.family == "lookup":
                entry.speedup, entry.length, entry.alpha = untrained.lookup(runner, warp, self.texts, price)
            else:
                rows = TokenDataset.of(self.context.corpus.train)
                found = untrained.rest(self.work, self.context.corpus.tokenizer, runner, warp, rows, self.texts, price)
                entry.speedup, entry.length, entry.alpha = found
            entry.status = "no training"

    def prune(self) -> None:
        """Leave out shapes that would not win even at the ceiling, before they are trained."""
        ceiling = self.settings.design.ceiling
        best = max((entry for entry in self.entries if entry.speedup), key=lambda e: e.speedup or 0, default=None)
        limit, name = (best.speedup or 1.0, best.shape.name) if best is not None else (1.0, "no draft")
        limit, name = max((limit, name), (1.0, "no draft"))
        whole = self.target.num_parameters()
        for entry in self.entries:
            price = entry.price
            if price is None or not entry.shape.trained or entry.status == "pruned":
                continue
            entry.needed_for_best = price.needed(limit, self.longest)
            if entry.shape == self.default:  # what everything is compared with
                continue
            if price.parameters >= whole:
                entry.prune(f"{price.parameters:,} parameters, and the target has {whole:,}")
            elif (entry.at_ceiling or 0) <= limit:
                entry.prune(f"at α = {ceiling:g} its speedup would be {entry.at_ceiling:.2f}; {name} has {limit:.2f}")

    # -- afterwards ----------------------------------------------------------------------------------------------------

    def more(self, race: Race, winner: Entry) -> list[str]:
        """What a longer training, and more data, would bring to the winner."""
        full, steps = self.trials.full_steps, winner.steps
        assert winner.price is not None
        found = race.found[winner.shape]
        slope = slope_of({n: trial.alpha for n, trial in found.items()}, race.common)
        twice = forecast(found[steps].alphas, steps, 2 * full, slope, winner.price, self.longest)
        lines = [
            f"Twice the steps ({2 * full}): α {winner.full.alpha:.3f} → {twice.alpha:.3f}, speedup "  # type: ignore[union-attr]
            f"{winner.forecast:.2f} → {twice.speedup:.2f} (95 %: {twice.speedup_low:.2f} to {twice.speedup_high:.2f}), "
            "by the same law."
        ]
        examples = len(self.context.examples)
        seen = steps * self.context.settings.reference.training.batch_size
        if seen <= examples:
            lines.append(
                f"More data: not measured; the longest trial saw {seen:,} of the {examples:,} examples, each once."
            )
            return lines
        half = self.trials.find(winner.shape, steps, examples // 2)
        if half is None and race.seconds(winner, steps) < self.clock.left:
            with self.clock.counting():
                half = self.trials.run(winner.shape, steps, examples // 2)
        if half is None:
            lines.append("More data: no time was left to train the winner on half of it.")
            return lines
        gain = paired(half.alpha, found[steps].alpha)
        lines.append(
            f"More data: with {examples:,} examples in place of {examples // 2:,}, α after {steps} steps is "
            f"{gain['difference']:+.4f} ± {gain['se']:.4f} higher; doubling the data again is expected to gain "
            "at most about as much."
        )
        return lines

    def write_winner(self, winner: Entry) -> None:
        """The configuration with the winner in place of its own draft."""
        full = winner.shape.settings(self.context.settings)
        lengths = {*full.evaluation.draft_lengths, winner.full.length if winner.full else 1}
        evaluation = replace(full.evaluation, draft_lengths=sorted(lengths))
        write_settings(replace(full, name=f"{full.name}-designed", evaluation=evaluation), self.folder / "winner.yaml")

    def verify(self, results: Results, winner: Entry) -> None:
        """Train the winner and two other shapes in full, and decode."""
        chosen = verified(self.entries, winner, self.default)
        results.verified = verify(
            chosen, self.trials, self.context, self.trials.warp, self.longest, RunDir(self.folder)
        )
        rows = results.verified
        again = [entry for entry in self.entries if len(entry.history) > 1]
        results.correlations = {
            "predicted and measured speedup of those trained in full": rank_correlation(
                [row["predicted"] for row in rows], [row["speedup_without_prefill"] or 0.0 for row in rows]
            ),
            f"speedup after the first and the last trial of {len(again)} shapes": rank_correlation(
                [entry.history[0][2] for entry in again], [entry.history[-1][2] for entry in again]
            ),
        }
        self.write(results)
        self.context.console.print(console_table("Predicted and measured", VERIFIED, rows))

    def write(self, results: Results) -> None:
        """design.json and design.html."""
        write_json(self.folder / "design.json", plain(results.to_dict()))
        results.page().write(self.folder / "design.html")

    def facts(self) -> dict[str, Any]:
        """How it was measured."""
        own, full = self.settings.design, self.context.settings
        return {
            "target": f"{self.target.num_parameters():,} parameters",
            "mode": "greedy" if self.temperature == 0 else f"T = {self.temperature:g}",
            "texts at once": own.batch_size,
            "acceptance on": f"{len(self.texts)} validation prompts answered by the target",
            "trained on": f"{len(self.context.examples):,} examples, {full.reference.divergence}",
            "a full training": f"{self.trials.full_steps} steps of distillation, and what comes before it",
        }
