"""Settings of ``python -m probes``: everything of a distillation run, plus the section ``probes``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from rich.console import Console

from decode.core.errors import UserError
from decode.core.options import COLDEST
from distill.config.settings import Settings as DistillSettings


@dataclass
class ProbeSettings:
    """Probes for every exit layer, the choice of the exit, and the comparison of self-speculative methods."""

    layers: list[int] = field(default_factory=list)
    """Exit layers (layers that run before the exit); empty: all but the last."""
    draft: str | None = None
    """Folder, Hub name or GGUF file of a separate draft model to train probes for as well; null: none."""
    prompts: int = 320
    """Training prompts. The target answers them itself, and its texts are what the probes learn from."""
    validation_prompts: int = 100
    """Held-out prompts that stop the training, calibrate the probes and choose the exit."""
    test_prompts: int = 120
    """Held-out prompts on which the probes are measured."""
    max_new_tokens: int = 96
    """Longest text."""
    positions: int | None = None
    """Response positions kept of each text, a random sample; null: all. Large models want this: a position takes
    4 x width bytes for every layer."""
    batch_size: int = 32
    """Texts read, and written, together."""
    temperature: float = 0.6
    """Of the sampled mode; LayerSkip's library uses 0.6."""
    top_p: float = 0.9
    """Of the sampled mode; LayerSkip's library uses 0.9."""
    sampled_label: Literal["accept", "top-p"] = "accept"
    """What probes for sampled decoding learn. accept: min(1, p/q) of the drafted token, which is the acceptance
    probability itself; top-p: whether the token is in the target's top-p set. Both are trained and measured; this one
    is used. Greedy decoding always uses match: both argmaxes agree."""
    l2: list[float] = field(default_factory=lambda: [1e-3, 1e-2, 1e-1, 1.0])
    """Strengths of the L2 penalty on the standardised hidden state, all tried at once; each probe takes the one with
    the best validation loss."""
    max_epochs: int = 20
    """Most epochs; one is a Newton step of every probe over all data."""
    patience: int = 2
    """Epochs without a better validation loss before training stops."""
    class_balance: bool = False
    """Weigh accepted and rejected tokens equally, and correct the bias afterwards. Helps ranking when one class is
    rare; probabilities stay calibrated either way."""
    bins: int = 15
    """Bins of the expected calibration error and of reliability diagrams."""
    check: bool = True
    """Fit scikit-learn's logistic regression layer by layer too: the check of our optimiser, and its time."""
    window: int = 24
    """Longest draft considered. Where nearly every token is accepted, a stop rule needs room to show what it saves."""
    thresholds: list[float] = field(
        default_factory=lambda: [0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98]
    )
    """Confidence thresholds considered."""
    confirm: int = 2
    """Settings of each method, the best predicted ones, that are run for real."""
    bench_prompts: int = 12
    """Test prompts decoded in real runs."""
    repeats: int = 2
    """Times each of them is decoded by each method."""
    subset_prompts: int = 6
    """Texts on which Draft & Verify's layer subset is searched; 0: no search."""
    threads: int | None = 1
    """CPU threads while decoding one text; null: measured."""

    def validate(self) -> None:
        """Check ranges.

        Raises:
            UserError: naming the key.
        """
        for key in (
            "prompts", "validation_prompts", "test_prompts", "max_new_tokens", "batch_size", "max_epochs", "patience",
            "bins", "window", "confirm", "bench_prompts", "repeats",
        ):  # fmt: skip
            if getattr(self, key) < 1:
                raise UserError(f"probes.{key} is {getattr(self, key)}, expected 1 or more")
        if self.threads is not None and self.threads < 1:
            raise UserError(f"probes.threads is {self.threads}, expected 1 or more, or null to have it measured")
        if not self.temperature >= COLDEST or not 0 < self.top_p <= 1:
            raise UserError(
                f"probes.temperature is {self.temperature} and probes.top_p {self.top_p}; expected a temperature of at "
                f"least {COLDEST} and a top_p in (0, 1] (the greedy mode is measured anyway)"
            )
        if not self.l2 or min(self.l2) < 0:
            raise UserError(f"probes.l2 is {self.l2}, expected strengths of 0 or more")
        if not self.thresholds or not all(0 < t < 1 for t in self.thresholds):
            raise UserError(f"probes.thresholds is {self.thresholds}, expected numbers between 0 and 1")


@dataclass
class ProbesSettings(DistillSettings):
    """A run as `python -m distill` reads it, and the section of this command."""

    probes: ProbeSettings = field(default_factory=ProbeSettings)
    """Acceptance probes and self-speculation."""

    def validate(self) -> None:
        """Check what this command uses: data, target and probes.

        Raises:
            UserError: naming the key, the value seen and the values expected.
        """
        self.validate_run()
        self.data.validate()
        self.target.validate("target")
        self.trainer.validate()
        self.probes.validate()


def shrink(settings: ProbesSettings, console: Console | None = None) -> ProbesSettings:
    """Settings of the same experiment in miniature, under ``<name>-dry-run`` (see `distill.pipeline.dry_run`).

    Raises:
        UserError: the settings are refused as they are.
    """
    from distill.pipeline.dry_run import shrink as shrink_run

    small = shrink_run(settings, console, untie=True)
    assert isinstance(small, ProbesSettings)
    probes = small.probes
    probes.layers = []  # those of the tiny target
    probes.draft = probes.draft and small.initial.model
    probes.prompts, probes.validation_prompts, probes.test_prompts = 16, 8, 8
    probes.max_new_tokens, probes.positions, probes.batch_size = 12, None, 8
    probes.max_epochs, probes.window, probes.thresholds = 2, 4, probes.thresholds[:2]
    probes.confirm, probes.bench_prompts, probes.repeats, probes.threads = 1, 2, 1, 1
    probes.subset_prompts = min(probes.subset_prompts, 2)
    return small
