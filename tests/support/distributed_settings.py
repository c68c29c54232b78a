"""The runs by which one process and two are compared."""

from dataclasses import dataclass, field
from pathlib import Path

from tiny_run import tiny_settings

from distill.config.drafts import DraftSettings, ResponseSettings, Scope, Signal
from distill.config.run import Settings
from distill.config.training import StudentSettings, TargetSettings


@dataclass
class Way:
    """How two processes train, and in how many micro-batches; a draft for every scope."""

    strategy: str = "ddp"
    accumulate: int = 1
    scopes: tuple[Scope, ...] = ("global",)
    responses: ResponseSettings = field(default_factory=ResponseSettings)
    on_policy: float = 0.0
    head: bool = False
    packing: int | None = None
    signal: Signal = "auto"
    sharded: bool = False


WAYS = {
    "ddp": Way(scopes=("microbatch", "global"), accumulate=2),
    "fsdp": Way("fsdp"),
    "on-policy": Way(on_policy=0.5, responses=ResponseSettings(max_new_tokens=6, refresh_every=2), signal="online"),
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
    drafts = [DraftSettings(name="distillspec", on_policy=chosen.on_policy)]
    for scope in chosen.scopes:
        adaspec = DraftSettings(name=scope, reference="distillspec", scope=scope, on_policy=chosen.on_policy)
        drafts.append(adaspec)
    settings = tiny_settings(folder, name=way, drafts=drafts)
    for training in (settings.target.training, settings.student.training, settings.training):
        training.steps, training.batch_size, training.optimizer = 4, 8, "adamw"
    settings.trainer.validate_every, settings.trainer.accumulate = 2, chosen.accumulate
    if chosen.strategy == "ddp":  # rounding alone then never decides which token is selected
        settings.trainer.precision = "64-true"
    settings.teacher.responses, settings.trainer.packing = chosen.responses, chosen.packing
    settings.teacher.signal = chosen.signal
    if chosen.head:
        settings.target.architecture.layers = 4
        settings.student = StudentSettings(kind="eagle3", unroll=2, draft_vocab=64)
    if chosen.on_policy or chosen.sharded:
        settings.target = TargetSettings(kind="as_is", model=str(folder / "ddp/target"))
        settings.student = StudentSettings(kind="as_is", model=str(folder / "ddp/initial"))
    return settings
