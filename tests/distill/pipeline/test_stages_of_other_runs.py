"""Stages made by another run from the same inputs are taken over instead of made again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tiny_run import begun, bench, run_tiny, tiny_settings

from distill.config.run import Settings
from distill.config.training import TargetSettings
from distill.files import RunDir
from distill.pipeline import run_of
from distill.run_stages import adopt, run_stages, siblings


def test_stages_made_from_other_inputs_are_not_taken_over_and_a_donor_made_anew_changes_nothing(tmp_path: Path) -> None:
    settings = begun(tiny_settings(tmp_path / "a"))
    donor = run_of(settings)
    other = tiny_settings(tmp_path / "b", comparisons=[])
    other.initial.training.lr = 1e-3
    taker = RunDir(tmp_path / "b/tiny")
    assert adopt(taker, other, [donor]) == {"target": donor.target}
    assert adopt(taker, other, [donor]) == {}  # it is there now
    kept = (taker.target / "model.safetensors").read_bytes()
    settings.seed = 5
    run_stages(bench(settings)[0], only=("target",))
    assert (donor.target / "model.safetensors").read_bytes() != kept
    assert (taker.target / "model.safetensors").read_bytes() == kept
    record = taker.record("target")
    assert record is not None


def test_the_targets_answers_are_taken_over_as_a_copy_that_the_donor_does_not_share(tmp_path: Path) -> None:
    settings = begun(tiny_settings(tmp_path / "a", comparisons=[]))
    settings.reference.responses.source = "target"
    _, donor, _ = run_tiny(settings)
    written = donor.work / "responses/train.jsonl"
    kept = written.read_bytes()
    other = tiny_settings(tmp_path / "b", comparisons=[])
    other.reference = replace(settings.reference, signal="topk")
    taker = RunDir(tmp_path / "b/tiny")
    adopt(taker, other, [donor])
    own = taker.work / "responses/train.jsonl"
    assert own.read_bytes() == kept
    _, _, printed = run_tiny(other)
    assert "the target's responses" not in printed
    own.write_bytes(kept + b"more")
    assert written.read_bytes() == kept


def test_answers_to_other_prompts_stay_where_they_are(tmp_path: Path) -> None:
    settings = begun(tiny_settings(tmp_path / "a", comparisons=[]))
    settings.reference.responses.source = "target"
    _, donor, _ = run_tiny(settings)
    other = tiny_settings(tmp_path / "b", comparisons=[])
    other.reference = replace(settings.reference)
    other.data = replace(settings.data, max_length=40)
    taker = RunDir(tmp_path / "b/tiny")
    adopt(taker, other, [donor])
    assert not (taker.work / "responses").exists()


def test_signals_of_a_run_with_the_same_data_come_before_those_of_one_with_the_same_target(tmp_path: Path) -> None:
    first = run_of(begun(tiny_settings(tmp_path / "a")))

    def settings_of(name: str, examples: int = 48) -> Settings:
        settings = tiny_settings(tmp_path / "runs", name=name, comparisons=[])
        settings.target = TargetSettings(kind="as_is", model=str(first.target))
        settings.data = replace(settings.data, tokenizer=str(first.target), train_examples=examples)
        return settings

    for name, examples in (("a-others", 40), ("b-same", 48)):
        settings = settings_of(name, examples)
        _, donor, _ = run_tiny(settings)
    taker = RunDir(tmp_path / "runs/c")
    taken = adopt(taker, settings_of("c"), siblings(taker), only=("target",))
    assert taken == {"target": tmp_path / "runs/a-others/target"}
    (kept,) = (taker.work / "signals").glob("target_*_train.npy")
    assert kept.samefile(donor.work / "signals" / kept.name)
