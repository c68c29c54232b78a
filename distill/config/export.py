"""Settings of the exported draft."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from jsonargparse.typing import ClosedUnitInterval, PositiveInt


@dataclass
class ExportSettings:
    """How the exported draft is written."""

    dtype: Literal["keep", "float32", "bfloat16", "float16"] = "keep"
    """Number format of the exported weights; keep: as trained."""
    draft_length: PositiveInt | None = None
    """Tokens drafted per round, written to generation_config.json; none: the best length measured."""
    confidence_threshold: ClosedUnitInterval = 0.0
    """Transformers' assistant_confidence_threshold: drafting stops below it; 0 always drafts the full length."""
