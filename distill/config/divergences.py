"""Names of the losses per token; `distill.losses.divergences` holds what they compute."""

from typing import Literal, get_args

DivergenceName = Literal["forward_kl", "reverse_kl", "jsd", "tv", "neg_log_alpha", "lk_hybrid", "kl_tv"]

DIVERGENCES: tuple[str, ...] = get_args(DivergenceName)  # all of them
