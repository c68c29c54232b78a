"""Settings of DistillSpec, which makes the reference."""

from dataclasses import dataclass, field
from typing import Literal

from jsonargparse.typing import NonNegativeFloat, OpenUnitInterval, PositiveFloat, PositiveInt

from distill.config.language_models import LoraSettings
from distill.config.responses import ResponseSettings
from distill.config.training import TrainingSettings

DivergenceName = Literal["forward_kl", "reverse_kl", "jsd", "tv", "neg_log_alpha", "lk_hybrid", "kl_tv"]
"""Losses per token; `distill.losses.divergences` holds what they compute."""
Signal = Literal["auto", "hidden", "topk", "log_probs", "online"]


@dataclass
class DistillSettings:
    """DistillSpec: the draft learns the target's next-token distributions on response tokens.

    Its result is the baseline, and the reference by which AdaSPEC selects tokens.
    """

    examples: PositiveInt | None = None
    """Training examples used for distillation (the first ones); null: all. The target reads each once, whatever the
    number of passes. At equal steps, more examples can raise alpha more than the choice of the loss: a draft
    overfits a small set."""
    divergence: DivergenceName = "forward_kl"
    """Loss per token between target p and draft q; alpha = sum_x min(p(x), q(x)) is the acceptance rate. forward_kl:
    KL(p || q), as in the papers; the safe choice. reverse_kl: KL(q || p). jsd: Jensen-Shannon, see jsd_beta. tv:
    total variation 1 - alpha, the rejection rate; slow from a cold start. neg_log_alpha: -log alpha. lk_hybrid:
    w*KL + (1 - w)*tv with w = exp(-3*alpha). kl_tv: KL + tv_weight*tv. AdaSPEC's loss differences use the same
    divergence."""
    jsd_beta: OpenUnitInterval = 0.5
    """Of jsd: the target's share in the mixture it compares both with; near 0 it behaves as forward_kl."""
    tv_weight: NonNegativeFloat = 2.0
    """Of kl_tv: how much total variation counts beside the KL."""
    temperature: PositiveFloat = 1.0
    """Both models' logits are divided by it in the loss: the temperature at which the draft will be used. Training
    and validation alpha are those at this temperature."""
    signal: Signal = "auto"
    """What is kept of the target on disk, so that it runs over the examples once. auto: the first of hidden, topk and
    online that signal_limit_gb and the disk have room for; the run stays with it. hidden: its last hidden states at
    label positions (exact; hidden_size x 4 bytes a token). topk: its signal_k largest log-probabilities (8 bytes each a
    token; for targets whose hidden states would be larger, and exact but for the tail, which is printed). log_probs:
    all of them (exact; vocabulary x 4 bytes a token; for vocabularies of some thousand ids, where the product with the
    target's head takes longer than reading them). online: nothing; the target runs beside the draft, on its device or
    on target.devices, for the same losses. That costs a forward pass of the target every step instead of one for each
    example, two with draft.scope global and trainer.accumulate, and memory for its weights as long as the draft trains:
    for targets whose signal fits no disk, and examples read about once. The reference's losses, 4 bytes a token, are
    kept all the same."""
    signal_dtype: Literal["float32", "bfloat16"] = "float32"
    """Number format of a hidden signal. bfloat16 halves the file; nothing is lost where the target itself runs in
    bfloat16 (target.dtype)."""
    signal_autocast: bool | Literal["auto"] = False
    """Compute the signal under bfloat16 autocast, in half the time on a CPU with AVX512-BF16 or AMX; auto: there and on
    GPUs. It then differs from the float32 target's: on SmolLM2-135M by 0.01 in total variation. The target decodes in
    its own format."""
    signal_k: PositiveInt = 64
    """Number of log-probabilities kept per token for signal topk; a larger k leaves less probability to the tail."""
    signal_limit_gb: PositiveFloat = 100.0
    """Largest size of the kept signal in GB. What it needs is told before it is made."""
    responses: ResponseSettings = field(default_factory=ResponseSettings)
    """Who writes the responses, for the reference and for AdaSPEC alike (but see draft.on_policy). What frozen models
    say of the draft's own texts, the reference's loss too, is computed anew each time they are written."""
    lora: LoraSettings | None = None
    """Train a low-rank adapter instead of all weights of the drafts, and merge it at the end: less memory for the
    optimiser, less forgetting, less to learn with. null: all weights."""
    training: TrainingSettings = field(default_factory=TrainingSettings)
    """Length, batches and optimiser of the reference; AdaSPEC's follow from them and draft.iso."""

    def validate(self) -> None:
        """Check the training and the responses."""
        self.training.validate("reference.training")
        self.responses.validate("reference.responses")
