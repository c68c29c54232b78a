"""Settings of ``draftsmith probe``: everything of a distillation run, plus the section ``probes``."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from jsonargparse.typing import NonNegativeFloat, PositiveInt, restricted_number_type
from rich.console import Console

from decode.errors import UserError
from decode.options import COLDEST, Share
from distill.config import Settings

if TYPE_CHECKING:
    SampledTemperature = float
else:
    SampledTemperature = restricted_number_type("SampledTemperature", float, (">=", COLDEST))


@dataclass
class ProbeSettings:
    """Probes for every exit layer, the choice of the exit, and the comparison of self-speculative methods."""

    modes: list[Literal["greedy", "sampled"]] = field(default_factory=lambda: ["greedy", "sampled"])
    """Decoding modes to train probes for and to run; each costs as much again."""
    layers: list[PositiveInt] = field(default_factory=list)
    """Exit layers (layers that run before the exit); empty: all but the last."""
    prompts: PositiveInt = 320
    """Training prompts. The target answers them itself, and its texts are what the probes learn from."""
    validation_prompts: PositiveInt = 100
    """Held-out prompts that choose the penalty, calibrate the probes and choose the exit."""
    test_prompts: PositiveInt = 120
    """Held-out prompts on which the probes are measured."""
    max_new_tokens: PositiveInt = 96
    """Longest text."""
    temperature: SampledTemperature = 0.6
    """Temperature of the sampled mode; LayerSkip's library uses 0.6."""
    top_p: Share = 0.9
    """Top-p of the sampled mode; LayerSkip's library uses 0.9. All else is as the target's generation_config says."""
    sampled_label: Literal["accept", "top-p"] = "accept"
    """Label that the probes for sampled decoding learn. accept: min(1, p/q) of the drafted token, which is the
    acceptance probability; top-p: whether the token is in the target's top-p set. Greedy decoding always uses match:
    both argmaxes agree."""
    l2: list[NonNegativeFloat] = field(default_factory=lambda: [1e-3, 1e-2, 1e-1, 1.0])
    """Strengths of the penalty λ/2·‖w‖² on the standardised hidden state, all tried at once; each probe takes the one
    with the best validation loss."""
    confirm: PositiveInt = 4
    """Settings of each method that decode a dozen validation prompts: the fastest of all, which decode three. The
    fastest of them decodes the test prompts."""
    bench_prompts: PositiveInt = 24
    """Test prompts decoded in real runs, once by each method at its fastest setting."""


@dataclass
class ProbesSettings(Settings):
    """A run as `draftsmith distill` reads it, and the section of this command."""

    probes: ProbeSettings = field(default_factory=ProbeSettings)
    """Acceptance probes and self-speculation."""

    def validate(self, *, drafts: bool = False) -> None:
        """Check what this command uses: data, target and probes."""
        super().validate(drafts=drafts)
        for key in ("modes", "l2"):
            if not getattr(self.probes, key):
                raise UserError(f"probes.{key} is empty: give at least one value")


def shrink(settings: ProbesSettings, console: Console | None = None) -> ProbesSettings:
    """Return settings of the same experiment in miniature, under ``<name>-dry-run``: see `distill.rehearse.shrink`."""
    from distill import rehearse

    small = rehearse.shrink(settings, console)
    assert isinstance(small, ProbesSettings)
    # a tied output head of a random model repeats the last token at every layer
    small.target.architecture.extra["tie_word_embeddings"] = False
    probes = small.probes
    probes.layers = []  # those of the tiny target
    probes.prompts, probes.validation_prompts, probes.test_prompts = 16, 8, 8
    probes.max_new_tokens, probes.confirm, probes.bench_prompts = 12, 1, 2
    return small
