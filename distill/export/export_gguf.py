"""GGUF files of a finished draft and its target, for llama.cpp."""

from pathlib import Path

from decode.core.errors import UserError
from decode.engines.launch.gguf_conversion import convert, find_converter
from decode.models.eagle.head_files import is_head
from distill.config.export import ExportSettings


def check_gguf(settings: ExportSettings, head: int | None = None) -> None:
    """Refuse GGUF files that cannot be written; cheap: call it before training starts.

    Args:
        settings: of the export.
        head: 1 or 3 where the draft is an EAGLE head of that version.

    Raises:
        UserError: the converter is not installed, or takes no heads of this version.
    """
    if "gguf" in settings.formats:
        find_converter()
        if head == 1:
            raise UserError("llama.cpp has no EAGLE-1 heads; train eagle.kind eagle3, or leave gguf out of formats")


def export_gguf(export: Path, target: Path, settings: ExportSettings) -> list[Path]:
    """Write ``gguf/target-<type>.gguf`` and ``gguf/draft-<type>.gguf`` into an export, if its formats ask for them.

    Raises:
        UserError: the converter refuses a model.
    """
    if "gguf" not in settings.formats:
        return []
    folder, of = export / "gguf", target if is_head(export) else None
    return [
        convert(source, folder / f"{name}-{kind}.gguf", kind, target=of if name == "draft" else None)
        for kind in settings.gguf_types
        for name, source in (("target", target), ("draft", export))
    ]
