"""``--estimate``: every part of a run appears, and nothing is left but the tokenised data."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pairs import make_tokenizer
from rich.console import Console
from tiny_run import tiny_settings
from transformers import PreTrainedModel

from distill.config import DataSettings, TargetSettings
from distill.data import prompts
from distill.estimate import estimate
from distill.pipeline import show_example


def test_every_part_is_estimated_in_a_folder_that_is_removed(tmp_path: Path) -> None:
    settings = tiny_settings(tmp_path)
    settings.teacher.responses.source, settings.teacher.responses.max_new_tokens = "target", 4
    console = Console(record=True, width=120)
    parts = estimate(settings, console)
    assert list(parts) == ["the data", "target", "answers", "signal", "initial", "distillspec", "adaspec"]
    assert all(seconds > 0 for seconds, _ in parts.values())
    assert parts["distillspec"][1] == pytest.approx(12 * 4 * parts["answers"][1] / 20, rel=0.5)  # padding is counted
    assert "total" in console.export_text()
    assert [path.name for path in (tmp_path / "tiny").iterdir()] == ["work"]
    assert [path.name for path in (tmp_path / "tiny/work").iterdir()] == ["corpus"]


def test_of_prompts_that_the_target_writes_no_more_than_a_batch_is_written(
    tmp_path: Path, tiny: Callable[..., PreTrainedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    given, tokenizer, written = tmp_path / "given", make_tokenizer(chat=True), list[int]()
    tiny("llama", vocab_size=len(tokenizer), max_position_embeddings=256, eos_token_id=0).save_pretrained(given)
    tokenizer.save_pretrained(given)

    def sample(model: Any, asked: list[list[int]], *_: Any, **__: Any) -> list[list[int]]:
        written.append(len(asked))
        texts = (f"What is {sum(written)} plus {number}?" for number in range(len(asked)))
        return [[*tokenizer.encode(text), 0] for text in texts]

    monkeypatch.setattr(prompts, "write_texts", sample)
    settings = tiny_settings(tmp_path, target=TargetSettings(kind="as_is", model=str(given)))
    settings.data = DataSettings(source="target", train_examples=1000, max_length=128)
    settings.teacher.responses.source, settings.teacher.responses.max_new_tokens = "target", 4
    settings.student.architecture.hidden_size = 8
    console = Console(record=True, width=120)
    show_example(settings, console)
    assert "0 of them learned" not in console.export_text()
    assert written == [8]
    parts = estimate(settings, console)
    assert written == [8, 64]
    assert list(parts) == ["the data", "answers", "signal", "initial", "distillspec", "adaspec"]
