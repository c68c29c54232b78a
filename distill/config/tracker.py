"""Settings of experiment tracking."""

from dataclasses import dataclass, field
from typing import Literal


@dataclass
class TrackerSettings:
    """Where settings, losses, tables and plots are recorded while a pipeline runs."""

    kind: Literal["wandb", "csv", "tensorboard", "none"] = "wandb"
    """Tracker: Weights & Biases, CSV files, TensorBoard, or none."""
    mode: Literal["auto", "online", "offline"] = "auto"
    """W&B only. auto: online when logged in and the server answers, else offline (upload: `wandb sync`)."""
    project: str = "draftsmith"
    """W&B only: project name."""
    entity: str | None = None
    """W&B only: user or team; none means the account's default."""
    tags: list[str] = field(default_factory=list)
    """W&B only: tags of the run."""
    log_draft: bool = True
    """W&B only: record the exported draft as an artifact (its files are read in place, not copied)."""
