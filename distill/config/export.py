"""Settings of the exported draft."""

from dataclasses import dataclass, field
from typing import Literal

from jsonargparse.typing import ClosedUnitInterval, PositiveInt


@dataclass
class HubSettings:
    """Where the export is uploaded at the end of a run."""

    repository: str | None = None
    """Repository of the Hugging Face Hub, such as me/my-draft, made if it is not there; null: none. It gets the draft,
    its card and its profile, with a token from `hf auth login` or HF_TOKEN."""
    private: bool = True
    """Whether a repository that is made is private."""
    revision: str | None = None
    """Branch, made if it is not there; null: main."""


@dataclass
class ExportSettings:
    """How the exported draft is written."""

    choose: str = "draft"
    """Draft that is exported and leads the report: draft (the section draft's), the name of a trained draft in the
    report's table (such as distillspec, or a comparison's), or best: the trained draft with the highest
    acceptance rate on the validation examples. Reported figures are measured on the test examples in each case."""
    dtype: Literal["keep", "float32", "bfloat16", "float16"] = "keep"
    """Number format of the exported weights; keep: as trained."""
    draft_length: PositiveInt | None = None
    """Tokens drafted per round, written to generation_config.json; null: the best length measured."""
    formats: list[Literal["hf", "gguf"]] = field(default_factory=lambda: ["hf"])
    """hf is always written; gguf adds target and draft for llama.cpp, by its own converter (make engines)."""
    gguf_types: list[Literal["f32", "f16", "bf16", "q8_0"]] = field(default_factory=lambda: ["f32"])
    """Number formats of the GGUF files."""
    hub: HubSettings = field(default_factory=HubSettings)
    """Upload to the Hugging Face Hub."""
    confidence_threshold: ClosedUnitInterval = 0.0
    """Transformers' assistant_confidence_threshold: drafting stops below it; 0 always drafts the full length."""
