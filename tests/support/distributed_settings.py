"""The runs by which one process and two are compared."""

from dataclasses import dataclass, field
from pathlib import Path

from tiny_run import tiny_settings

from distill.config.drafts import ComparisonSettings, EagleSettings, ResponseSettings, Scope, Signal
from distill.config.run import Settings
from distill.config.training import InitialDraftSettings, TargetSettings


@dataclass
class Way:
    """How two processes train, and in how many micro-batches; the first scope is the draft's."""

    strategy: str = "ddp"
    accumulate: int = 1
    scopes: tuple[Scope, ...] = ("global",)
    responses: ResponseSettings = field(default_factory=ResponseSettings)
    head: bool = False
    packing: int | None = None
    signal: Signal = "auto"
    sharded: bool = False
    background: bool = False


WAYS = {
    "ddp": Way(scopes=("microbatch", "global"), accumulate=2),
    "fsdp": Way("fsdp", background=True),
    "on-policy": Way(responses=ResponseSettings(source="mixed", max_new_tokens=6, refresh_every=2), signal="online"),
    "sharded": Way(signal="hidden", sharded=True),
}
SLOW = {
    "packed": Way(packing=400),
    "sharded-online": Way(signal="online", sharded=True),
    "heads": Way(head=True, signal="online"),
    "hsdp": Way("hsdp"),
}
"""Trained by four processes, for hsdp on two machines, beside the others, in `make test-slow`."""


def settings_of(way: str, folder: Path) -> Settings:
    """A short run with a draft for every scope; the one on its own texts starts from the models of the first."""
    chosen = (WAYS | SLOW)[way]
    first, *others = chosen.scopes
    comparisons = [ComparisonSettings(name=s, scope=s, normalisation="paper", iso="epochs") for s in others]
    settings = tiny_settings(folder, name=way, comparisons=comparisons)
    for training in (settings.target.training, settings.initial.training, settings.reference.training):
        training.steps, training.batch_size, training.optimizer = 4, 8, "adamw"
    settings.draft.scope, settings.draft.iso = first, "epochs"
    settings.trainer.validate_every, settings.trainer.accumulate = 2, chosen.accumulate
    if chosen.strategy == "ddp":  # rounding alone then never decides which token is selected
        settings.trainer.precision = "64-true"
    settings.reference.responses, settings.trainer.packing = chosen.responses, chosen.packing
    settings.reference.signal = chosen.signal
    settings.trainer.checkpoint_background = chosen.background
    if chosen.head:
        settings.target.architecture.layers = 4
        settings.eagle = EagleSettings(kind="eagle3", unroll=2, draft_vocab=64)
    if chosen.responses.from_draft or chosen.sharded:
        settings.target = TargetSettings(kind="as_is", model=str(folder / "ddp/target"))
        settings.initial = InitialDraftSettings(kind="as_is", model=str(folder / "ddp/initial"))
    return settings
