"""Settings of a draft that is distilled after the reference: AdaSPEC, its variations, and drafts for comparison."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

from jsonargparse.typing import ClosedUnitInterval, PositiveFloat, PositiveInt

from decode.core.errors import UserError
from decode.core.method_options import Seed, Share
from distill.config.distillation import DivergenceName
from distill.config.number_ranges import ShareBelowOne

Iso = Literal["steps", "epochs", "teacher_tokens"]
Scope = Literal["microbatch", "sequence", "global"]
Normalisation = Literal["paper", "response", "official"]
SelectBy = Literal["delta", "acceptance_gain"]
WeighBy = Literal["none", "tested", "rounds", "accepted"]

PLAIN = "adaspec"  # the name of AdaSPEC as published; a variation has to bear another one

TAKEN = ("target", "initial", "reference", "draft", "undistilled", "distillspec", "untrained", "eagle", "eagle-adaspec")
"""Names of stages and of the other standard drafts in reports."""

FILES = ("signals", "responses", "prompts", "original", "corpus", "ablation", "probes", "report", "taken", "lock")
"""What else lies in ``work/``, where drafts for comparison have their folders."""

EVER = ("k", "scope", "normalisation", "iso", "epochs", "lr", "method")
"""Settings that are always part of a draft's fingerprint; the others are where they are not the defaults, so that
folders made before there were such settings stay valid."""


@dataclass
class AdaSpecSettings:
    """AdaSPEC: distillation on the share k of tokens where the draft can still learn most; and variations of it."""

    name: str = PLAIN
    """What reports call the draft. With any of select_by, divergence, kl_first, k_start, on_policy and weigh_by it is
    not AdaSPEC as published any more and needs a name of its own."""
    k: Share = 0.4
    """Share of response tokens selected by the largest loss difference to the reference; the paper's best is 0.2
    to 0.4. 1.0 selects all, which is DistillSpec."""
    scope: Scope = "microbatch"
    """Where the top k are chosen. microbatch: among all tokens of a device's batch (official code). sequence: within
    each example. global: among all tokens of the optimiser step, over all devices and trainer.accumulate batches, so
    that the result does not depend on how many there are; with accumulate the draft reads every batch twice."""
    normalisation: Normalisation = "official"
    """What the sum over selected tokens is divided by. paper: the number of tokens selected in the step (their mean).
    response: k times each response's length, and the mean over the step's responses is taken: 1/(k*|y|) as in the
    paper's objective, so a long response counts no more than a short one. official: the number of all label tokens, so
    the loss, and under a plain optimiser the step, is k times as large. All three select exactly ceil(k*n) of n tokens;
    the official code's quantile was found to select one token more or less in 105 of 1,197 pairs of n and k."""
    iso: Iso = "steps"
    """What is held equal to the reference's training (S steps of B examples). steps: S steps of B/k examples, the
    official scripts' choice, with 1/k times the data and teacher tokens. epochs: S steps of B examples.
    teacher_tokens: k*S steps of B/k examples, the same data, the same selected tokens a step."""
    epochs: PositiveFloat | None = None
    """Length in epochs of the reference's batches, before iso is applied; null: as long as the reference."""
    lr: PositiveFloat | None = None
    """Peak learning rate; null: the reference's."""
    select_by: SelectBy = "delta"
    """Score by which tokens are ranked. delta: AdaSPEC's dL, the draft's loss minus the reference's. acceptance_gain:
    alpha of the reference minus alpha of the draft, whatever the loss is."""
    divergence: DivergenceName | None = None
    """Loss per token, as in reference.divergence; null: that one. dL is measured in it."""
    kl_first: ShareBelowOne = 0.0
    """Share of the steps, from the first, that use forward KL before divergence takes over: tv, neg_log_alpha and other
    acceptance losses have small gradients while p and q hardly overlap."""
    k_start: Share | None = None
    """Share of tokens selected at the first step, from where it goes linearly to k; null: k throughout."""
    k_ramp: Share = 1.0
    """Of k_start: share of the steps after which k is reached."""
    on_policy: ClosedUnitInterval | None = None
    """Chance of each training example to be one whose response the draft writes itself, by the sampling and at the
    intervals of reference.responses; null: as there. The reference's training stays as it is."""
    seed: Seed | None = None
    """Seed of the order of examples; null: the run's. The weights that training starts from do not depend on it."""

    weigh_by: WeighBy = "none"
    """Weight of each token's loss, computed at every step from the draft's current acceptance rates. none: 1. tested:
    the probability that decoding tests a drafted token at this position. rounds: the expected number of rounds
    that accepting the token saves; with divergence tv, the gradient is then that of the expected number of
    rounds, so the block efficiency itself is optimised. Weights of tested and rounds are normalised to mean 1
    per device batch. In feature heads each drafting step has its own weights, which replace eagle.decay.
    accepted (feature heads only): a chain of drafting steps continues after a token with the probability that
    the token is accepted, as in decoding; rejected chains cost nothing more, so a head far from its target
    trains about twice as fast."""
    block: PositiveInt = 7
    """Of weigh_by tested and rounds: drafted tokens in a round."""

    @property
    def variations(self) -> list[str]:
        """The settings by which this is not AdaSPEC as published."""
        own = ("select_by", "divergence", "kl_first", "k_start", "on_policy", "weigh_by")
        return [name for name in own if getattr(self, name) != DEFAULTS[name]]

    @property
    def selects_all(self) -> bool:
        """Whether every token counts, so that no reference is asked."""
        return self.k == 1 and self.k_start is None and self.normalisation != "response"

    def key(self) -> dict[str, Any]:
        """What decides the draft, beside the reference."""
        return {n: value for n, value in asdict(self).items() if n in EVER or value != DEFAULTS[n]}

    def validate(self, where: str) -> None:
        """Check the name and the variations."""
        if not self.name or not self.name.replace("-", "").replace("_", "").isalnum():
            raise UserError(f"{where}.name is {self.name!r}, wanted letters, digits, '-' and '_'")
        if self.name == PLAIN and self.variations:
            raise UserError(
                f"{where}.name is {self.name!r}, but with {', '.join(self.variations)} set this is not AdaSPEC as "
                "published: give it a name of its own, such as tv-after-kl"
            )
        if self.weigh_by == "accepted" and not self.selects_all:
            raise UserError(
                f"{where}.weigh_by is accepted and {where}.k is {self.k}: acceptance decides which tokens count, not a "
                f"selection; set {where}.k to 1 and {where}.normalisation to paper, or weigh_by to tested"
            )


DEFAULTS = {field.name: field.default for field in fields(AdaSpecSettings)}


@dataclass
class ComparisonSettings(AdaSpecSettings):
    """One more draft for the report, trained from the same initial draft."""

    name: str = ""
    """Its name in the report and of its folder under work/."""
    method: Literal["adaspec", "distillspec"] = "adaspec"
    """adaspec, or distillspec: the same batches and steps (k and iso decide them) without selection."""

    @property
    def selects_all(self) -> bool:
        """Whether every token counts."""
        return self.method == "distillspec" or super().selects_all

    def validate(self, where: str) -> None:
        """Check as for `AdaSpecSettings`, and that what is set of the selection is used."""
        super().validate(where)
        unused = [name for name in ("select_by", "k_start") if name in self.variations]
        if self.method == "distillspec" and unused:
            raise UserError(f"{where}.{unused[0]} is set, but method distillspec selects no tokens: remove one of them")


def check_names(draft: AdaSpecSettings, comparisons: Sequence[ComparisonSettings]) -> None:
    """Refuse names that would stand for two drafts, or for a folder that is something else."""
    if draft.name in TAKEN:
        raise UserError(f"draft.name is {draft.name!r}, which is taken: choose another, or {PLAIN} for AdaSPEC")
    names = [comparison.name for comparison in comparisons]
    for index, name in enumerate(names):
        if name in (*TAKEN, draft.name):
            raise UserError(f"comparisons[{index}].name is {name!r}, which names a standard draft: choose another")
        if name in FILES or name.startswith("checkpoints-"):
            raise UserError(f"comparisons[{index}].name is {name!r}, the name of a file under work/: choose another")
        if names.count(name) > 1:
            raise UserError(f"comparisons: the name {name!r} is used twice: give each comparison its own")
