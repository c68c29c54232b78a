"""What trials learn from: the target's signals, computed once for all shapes of a kind and kept in a folder of it."""

import shutil
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich.console import Console
from transformers import PretrainedConfig

from decode.models.heads import FeatureHead
from distill import run_stages as eagle_heads
from distill.config.run import Settings
from distill.data.context import StageContext
from distill.experiments.design.draft_shapes import Shape, default_shape
from distill.files import RunDir, remove
from distill.losses.objective import Objective, divergence_of
from distill.teacher.heads import prepare_head
from distill.teacher.signals import DistillData, prepare


class TrialSignals:
    """The target's signals by kind of drafts.

    A large target takes long for all examples, and most kinds are out after a few hundred: a trial has those of the
    examples that it reads. Those of the configuration's own kind are made at once, since its training will want them.

    Args:
        base: the run's own settings, data and folder.
        folder: of the design.
        config: the target's text configuration.
    """

    def __init__(self, base: StageContext, folder: Path, config: PretrainedConfig) -> None:
        self.base, self.folder, self.vocab = base, folder, int(config.vocab_size)
        self._made: dict[str, DistillData[Any]] = {}
        self._seconds: dict[str, float] = {}  # of each example, by group
        own = default_shape(base.settings, int(config.num_hidden_layers))
        changed = own.is_head and base.settings.reference.signal == "log_probs"
        self._own_group = "" if changed else self.group(own)

    def group(self, shape: Shape) -> str:
        """Shapes that learn from the same signals."""
        return f"{shape.family}-{shape.vocab or 'all'}" if shape.is_head else "models"

    def examples_of(self, steps: int, examples: int | None = None) -> int:
        """How many examples so many steps read, of so many; each once before any is read again."""
        wanted = steps * self.base.settings.reference.training.batch_size
        return min(wanted, examples or wanted, len(self.base.examples))

    def of(self, shape: Shape, context: StageContext, count: int) -> DistillData[Any]:
        """Signals of the first examples, at least so many, under a trial's settings."""
        group = self.group(shape)
        count = len(self.base.examples) if group == self._own_group else count
        known = self._made.get(group)
        if known is not None and len(known.train) >= count:
            return known
        began, divergence = time.monotonic(), Objective(divergence_of(context.settings.reference))
        data: DistillData[Any]
        if shape.is_head:
            made = eagle_heads.initial(context, "").model
            assert isinstance(made, FeatureHead)
            data = prepare_head(context, made, divergence, first=count)
        else:
            data = prepare(context, divergence, draft_vocab=self.vocab, first=count)
        texts = count + (len(data.validation) if known is None else 0)
        self._made[group], self._seconds[group] = data, (time.monotonic() - began) / texts
        return data

    def seconds(self, shapes: Iterable[Shape], steps: int) -> float:
        """What the signals that trials of so many steps lack will take, where some of the kind were made before."""
        count = self.examples_of(steps)
        groups = {self.group(shape) for shape in shapes}
        lacking = [group for group in groups if group in self._made and len(self._made[group].train) < count]
        return sum(count * self._seconds[group] for group in lacking)

    def forget(self, group: str) -> None:
        """Remove the signals of a kind of drafts of which none is left, unless they are the run's own."""
        self._made.pop(group, None)
        signals = self._area(group).work / "signals"
        if signals.is_dir() and not signals.is_symlink():
            shutil.rmtree(signals)

    def context(self, settings: Settings, shape: Shape, console: Console | None = None) -> StageContext:
        """A context whose folder is that of the shape's kind and whose data are the run's; silent without a console."""
        made = StageContext(settings, self._area(self.group(shape)), console or Console(quiet=True))
        for name in ("corpus", "validation", "examples"):  # read once
            vars(made)[name] = getattr(self.base, name)
        return made

    def _area(self, group: str) -> RunDir:
        """A folder for signals and checkpoints that has the run's target."""
        area, run = RunDir(self.folder / "work" / group), self.base.run
        if not area.target.exists():
            area.work.mkdir(parents=True, exist_ok=True)
            for name in ("responses", "original", *(["signals"] if group == self._own_group else [])):
                (run.work / name).mkdir(parents=True, exist_ok=True)
                remove(area.work / name)
                (area.work / name).symlink_to((run.work / name).resolve(), target_is_directory=True)
            shutil.copy2(run.work / "target.json", area.work / "target.json")
            remove(area.target)
            area.target.symlink_to(run.target.resolve(), target_is_directory=True)
        return area
