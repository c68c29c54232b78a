"""Settings of ``python -m decode paper``; the texts below each key are its help."""

from dataclasses import dataclass, field

from jsonargparse.typing import PositiveInt

from decode.core.method_options import Checked


@dataclass
class PaperSettings(Checked):
    """Settings of python -m decode paper."""

    paper: str | None = None
    """adasd, adaptix, ears, adaspeed or adaspec; may stand without --paper. Required."""
    scale: str = "quickstart"
    """quickstart, gpu-small or full."""
    run: str | None = None
    """Folder of the target, draft and probes; null: runs/quickstart, or runs/gpu-small. Not for full."""
    configs: str = "configs/papers"
    """Where the papers' configurations lie."""
    only: list[str] = field(default_factory=list)
    """At full scale: these configurations alone, by their files' names without .yaml."""
    limit: PositiveInt | None = None
    """Prompts of each suite; null: as in the configuration."""
    repeats: PositiveInt | None = None
    """Times each prompt is given to each method; null: as in the configuration."""
    again: bool = False
    """Measure anew what was measured with the same settings and weights."""
    output: str | None = None
    """Folder of report.json and table.md; null: runs/papers/<paper>-<scale>."""
    dry_run: bool = False
    """Everything in miniature: tiny random models of the same families, few prompts, no network."""
