"""Successive halving: all shapes few steps, the better ones twice as many, until one is left or time is over."""

import math
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

from decode.errors import UserError, read_json
from decode.progress import duration, working
from distill.experiments.design.draft_shapes import Shape
from distill.experiments.design.predicted_speedup import UNKNOWN, Slope, best_of, common_slope, forecast, slope_of
from distill.experiments.design.settings import DesignSettings
from distill.experiments.design.shape_table import Entry
from distill.experiments.design.training_trials import Trial, Trials
from distill.files import write_json


class Clock:
    """Counts time on disk, so that a run that is continued has what is left.

    Args:
        path: the file.
        made_from: fingerprint of what the time is spent on; for something else it begins at 0.
        budget: seconds in all.
    """

    def __init__(self, path: Path, made_from: str, budget: float) -> None:
        self.path, self.made_from, self.budget = path, made_from, budget
        known = read_json(path)
        self.spent = float(known.get("seconds", 0.0)) if known.get("made_from") == made_from else 0.0

    @property
    def left(self) -> float:
        """Seconds left; below 0 where the last piece of work took longer than foreseen."""
        return self.budget - self.spent

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Counts what is done inside, once it is done."""
        began = time.monotonic()
        try:
            yield
        finally:
            self.spent += time.monotonic() - began
            write_json(self.path, {"made_from": self.made_from, "seconds": self.spent})

    def __str__(self) -> str:
        return f"{duration(max(0.0, self.left))} of {duration(self.budget)} left"


LEFT = 2  # shapes, beside the configuration's own, that are trained to the full length if there is time
FIXED = 3.0  # seconds of a trial beside its steps, before one is known


@dataclass
class Race:
    """The rounds of a design."""

    trials: Trials  # trains and measures
    entries: Sequence[Entry]  # the shapes to be trained, with their prices
    default: Shape  # the configuration's own shape, which takes part in every round
    settings: DesignSettings  # of the design
    longest: int  # longest draft
    clock: Clock  # the budget
    folder: Path  # keeps the plan and the times of steps
    console: Console  # where progress is shown
    found: dict[Shape, dict[int, Trial]] = field(default_factory=dict)  # by shape its trials by steps
    rounds: list[str] = field(default_factory=list)  # what happened in each round, in sentences
    common: Slope = field(default_factory=lambda: Slope(*UNKNOWN))  # exponent of all shapes' curves

    def run(self) -> None:
        """All rounds that there is time for; the entries then know their results.

        Raises:
            UserError: the budget is too small for the first round.
        """
        alive = [entry for entry in self.entries if entry.shape.trained and not entry.status]
        if not alive:
            return
        alive.sort(key=lambda entry: (entry.shape != self.default, -(entry.at_ceiling or 0.0)))
        alive, steps = self._plan(alive)
        full = self.trials.full_steps
        while True:
            self.console.print(
                f"[bold]round {len(self.rounds) + 1}[/bold]: {len(alive)} shapes, {steps} steps each of {full}; "
                f"{self.clock}", highlight=False, soft_wrap=True,
            )  # fmt: skip
            complete = self._round(alive, steps)
            self._prune(alive)
            self._rank()
            alive = [entry for entry in alive if not entry.status]
            over = "" if complete else ", of which the last were not reached: the budget is spent"
            self.rounds.append(f"{len(alive)} shapes for {steps} steps{over}")
            if not complete or steps >= full:
                break
            kept = max(LEFT, math.ceil(self.settings.keep * len(alive)))
            best = sorted(alive, key=lambda entry: -entry.forecast)
            for entry in best[kept:]:
                if entry.shape != self.default:
                    entry.status = "out"
            alive = [entry for entry in best if not entry.status]
            groups = {self.trials.signals.group(entry.shape) for entry in self.entries if entry.shape.trained}
            for group in groups - {self.trials.signals.group(entry.shape) for entry in alive}:
                self.trials.signals.forget(group)
            steps = min(2 * steps, full)
        self._recall()
        for entry in alive:
            entry.status = entry.status or ("left" if entry.history else "not reached")

    def _recall(self) -> None:
        """Longer trials of a design that had a smaller budget, hence fewer shapes, count in the last ranking too."""
        full = self.trials.full_steps
        for entry in self.entries:
            while entry.steps and entry.steps < full:
                trial = self.trials.find(entry.shape, min(2 * entry.steps, full))
                if trial is None:
                    break
                self._know(entry, trial)
        self._rank()

    # -- time ----------------------------------------------------------------------------------------------------------

    def _plan(self, alive: Sequence[Entry]) -> tuple[list[Entry], int]:
        """Who takes part and for how many steps first: the same when a run is continued, more with a larger budget.

        Raises:
            UserError: there is no time for the fewest steps that say anything.
        """
        path = self.folder / "plan.json"
        made_from = [self.clock.made_from, sorted(entry.shape.name for entry in alive), self.settings.least_steps]
        known = read_json(path) if read_json(path).get("made_from") == made_from else {}
        larger, steps = self.clock.budget > known.get("budget", 0), int(known.get("steps", 0))
        taken = self._timed(alive, known.get("shapes", []), steps or self._least, more=larger)
        steps = steps or self._first_steps(taken)
        names, budget = [entry.shape.name for entry in taken], self.clock.budget
        write_json(path, {"made_from": made_from, "steps": steps, "shapes": names, "budget": budget})
        for entry in alive:
            if entry.shape.name not in names:
                entry.status, entry.reason = "not reached", "slower than the others at an equal acceptance rate"
        if len(taken) < len(alive):
            self.console.print(
                f"  there is time for {len(taken)} shapes; the other {len(alive) - len(taken)}, slower at an equal "
                "acceptance rate, need a larger budget", highlight=False, soft_wrap=True,
            )  # fmt: skip
        return taken, steps

    def _timed(self, alive: Sequence[Entry], certain: Collection[str], steps: int, more: bool) -> list[Entry]:
        """Those of certain names, and as many more as half of what is left of the budget trains for so many steps.

        How long their steps take is measured, and kept; what was trained before takes no more time.
        """
        path = self.folder / "steps.json"
        content = read_json(path)
        known: dict[str, float] = content.get("seconds", {}) if content.get("of") == self.clock.made_from else {}
        taken: list[Entry] = []
        untried: list[Entry] = []
        with working(self.console, "signals, and the time of training steps", len(alive)) as work:
            for entry in alive:
                name = entry.shape.name
                work.advance()
                if not more and name not in certain:
                    continue
                if name not in known:
                    with self.clock.counting():
                        known[name] = self.trials.step_seconds(entry.shape)
                    write_json(path, {"of": self.clock.made_from, "seconds": known})
                entry.step_seconds = known[name]
                lacking = [entry] if self.trials.find(entry.shape, steps) is None else []
                whole = 2 * self._seconds_of_round(untried + lacking, steps)
                if name not in certain and len(taken) > LEFT and whole > self.clock.left:
                    more = False
                else:
                    taken.append(entry)
                    untried += lacking
        return taken

    @property
    def _least(self) -> int:
        return min(self.settings.least_steps, self.trials.full_steps)

    def _seconds_of_round(self, entries: Sequence[Entry], steps: int) -> float:
        """What trials of so many steps will take, before any was run."""
        signals = self.trials.signals.seconds([entry.shape for entry in entries], steps)
        return signals + sum(steps * (entry.step_seconds or 0.0) + FIXED for entry in entries)

    def _first_steps(self, alive: Sequence[Entry]) -> int:
        """Steps of the first round, so that all rounds take about the budget."""
        least, full = self._least, self.trials.full_steps
        needed = self._seconds_of_round(alive, least)
        if needed > self.clock.left:
            whole = self.clock.spent + needed
            raise UserError(
                f"design.budget is {self.settings.budget}, and one round needs about {duration(1.1 * whole)}: "
                f"{duration(self.clock.spent)} were spent on costs and signals, {len(alive)} shapes at {least} steps "
                f"take {duration(needed)}. Raise it, or name fewer shapes (design.layers, design.widths, design.heads, "
                "…); what was measured is kept"
            )
        rounds = max(1, math.ceil(math.log(max(1.0, len(alive) / LEFT), 1 / self.settings.keep)) + 1)
        most = math.ceil(full / 2 ** (rounds - 1))
        for count in range(rounds, 0, -1):  # every round takes about as long as the first
            fitting = [n for n in range(least, most + 1) if self._seconds_of_round(alive, n) <= self.clock.left / count]
            if fitting:
                return fitting[-1]
        return least

    def seconds(self, entry: Entry, steps: int) -> float:
        """What a trial will take."""
        fixed = [
            trial.seconds + trial.measuring - trial.steps * (other.step_seconds or 0.0)
            for other in self.entries
            for trial in self.found.get(other.shape, {}).values()
        ]
        spare = sorted(fixed)[len(fixed) // 2] if fixed else FIXED
        signals = self.trials.signals.seconds([entry.shape], steps)
        return signals + steps * (entry.step_seconds or 0.0) + max(0.0, spare)

    # -- rounds --------------------------------------------------------------------------------------------------------

    def _round(self, alive: Sequence[Entry], steps: int) -> bool:
        """Train and measure every shape; False where the budget ends it."""
        for number, entry in enumerate(alive, 1):
            self._prune(alive)
            if entry.status:
                continue
            trial = self.trials.find(entry.shape, steps)
            if trial is None:
                if self.seconds(entry, steps) > self.clock.left:
                    return False
                with self.clock.counting():
                    trial = self.trials.run(entry.shape, steps)
            self._know(entry, trial)
            self.console.print(
                f"  {number}/{len(alive)}  {entry.shape.name}: α {entry.alpha:.3f}, speedup {entry.speedup:.2f} at "
                f"k = {entry.length}; {self.clock}",
                highlight=False,
                soft_wrap=True,
            )
        return True

    def _know(self, entry: Entry, trial: Trial) -> None:
        """A trial of a shape that is longer than those before."""
        assert entry.price is not None
        self.found.setdefault(entry.shape, {})[trial.steps] = trial
        speedup, length = best_of(trial.alphas, entry.price, self.longest)
        entry.steps, entry.alpha, entry.alpha_se = trial.steps, trial.alpha.mean, trial.alpha.se
        entry.speedup, entry.length, entry.seconds = speedup, length, trial.seconds
        entry.history.append((trial.steps, trial.alpha.mean, speedup))

    def _rank(self) -> None:
        """Extrapolate every shape's curve to the full training."""
        curves = {shape: {n: t.alpha for n, t in trials.items()} for shape, trials in self.found.items()}
        self.common = common_slope(list(curves.values()))
        for entry in self.entries:
            if entry.shape in curves and entry.price is not None:
                steps = max(curves[entry.shape])
                alphas = self.found[entry.shape][steps].alphas
                slope = slope_of(curves[entry.shape], self.common)
                entry.full = forecast(alphas, steps, self.trials.full_steps, slope, entry.price, self.longest)

    def _prune(self, alive: Sequence[Entry]) -> None:
        """Leave out what could not beat the best, as it is now, even at the ceiling."""
        best = max((e for e in self.entries if e.speedup), key=lambda e: e.speedup or 0.0, default=None)
        for entry in alive:
            if best is None or entry is best or entry.status or entry.shape == self.default:
                continue
            if (entry.at_ceiling or 0.0) < (best.speedup or 0.0):
                entry.prune(
                    f"at α = {self.settings.ceiling:g} its speedup would be {entry.at_ceiling:.2f}; after {best.steps} "
                    f"steps {best.shape.name} has {best.speedup:.2f}"
                )
