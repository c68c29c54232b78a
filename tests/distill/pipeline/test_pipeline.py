"""What makes a stage run again, and what does not; bad settings; what a failure leaves behind."""

import errno
import gc
import shutil
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from tiny_run import bench, run_tiny, tiny_settings
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from decode.errors import UserError
from decode.models.loading import load_model
from distill.config.run import Settings
from distill.config.training import TargetSettings
from distill.files import only_one
from distill.losses.objective import Objective, Selection
from distill.models.loading import checkpoint_layers
from distill.pipeline import run_pipeline
from distill.run_stages import StageResult, language_model
from distill.stages import RunDir, StageRecord, stage_fingerprints
from distill.teacher.store import prepare

STAGES = ["target", "initial", "distillspec", "adaspec"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, RunDir]:
    folder = tmp_path_factory.mktemp("finished")
    ran, run, _ = run_tiny(tiny_settings(folder))
    assert ran == STAGES
    return folder, run


def changed_stages(folder: Path, change: Any) -> list[str]:
    before, settings = stage_fingerprints(tiny_settings(folder)), tiny_settings(folder)
    change(settings)
    after = stage_fingerprints(settings)
    return [stage for stage in STAGES if stage in after and before[stage][0] != after[stage][0]]


def setting(path: str, value: Any) -> Any:
    def change(settings: Settings) -> None:
        *sections, name = path.split(".")
        place: Any = settings
        for section in sections:
            place = getattr(place, section)
        assert hasattr(place, name)
        setattr(place, name, value)

    return change


def draft(number: int, **values: Any) -> Any:
    def change(settings: Settings) -> None:
        settings.drafts[number] = replace(settings.drafts[number], **values)

    return change


def test_nothing_runs_again_when_nothing_changed(finished: tuple[Path, RunDir]) -> None:
    folder, run = finished
    times = {stage: (run.path(stage) / "model.safetensors").stat().st_mtime_ns for stage in STAGES}
    ran, _, printed = run_tiny(tiny_settings(folder))
    assert ran == []
    assert printed.count("up to date") == len(STAGES)
    assert times == {stage: (run.path(stage) / "model.safetensors").stat().st_mtime_ns for stage in STAGES}


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        (draft(1, k=0.5), ["adaspec"]),
        (draft(1, training={"lr": 1e-4}), ["adaspec"]),
        (draft(0, divergence="tv"), ["distillspec", "adaspec"]),
        (setting("training.lr", 1e-4), ["distillspec", "adaspec"]),
        (setting("student.architecture.hidden_size", 8), ["initial", "distillspec", "adaspec"]),
        (setting("target.dtype", "bfloat16"), ["distillspec", "adaspec"]),
        (setting("target.training.steps", 9), STAGES),
        (setting("data.difficulty", 2), STAGES),
        (setting("seed", 5), STAGES),
        (setting("trainer.precision", "bf16-mixed"), STAGES),
        (setting("trainer.tf32", True), STAGES),
        (setting("trainer.accumulate", 2), ["adaspec"]),  # each part of a step selects its own tokens
        (setting("trainer.devices", 2), ["adaspec"]),
        (setting("data.test_examples", 3), []),
        (setting("evaluation.prompts", 3), []),
        (setting("trainer.gradient_checkpointing", True), []),
        (setting("target.lora.rank", 3), []),  # not used by a target from scratch
        (setting("teacher.signal_limit_gb", 5.0), []),
    ],
)
def test_a_changed_setting_makes_its_stage_and_the_later_ones_run_again(
    tmp_path: Path, change: Any, wanted: list[str]
) -> None:
    assert changed_stages(tmp_path, change) == wanted


def test_gradient_checkpointing_trains_the_same_models(
    finished: tuple[Path, RunDir], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed: list[str] = []

    def checkpoint(model: PreTrainedModel) -> None:
        changed.append(type(model).__name__)
        checkpoint_layers(model)

    monkeypatch.setattr("distill.trainer.checkpoint_layers", checkpoint)
    settings = tiny_settings(tmp_path)
    settings.trainer.gradient_checkpointing = True
    ran, run, _ = run_tiny(settings)
    assert changed == ["LlamaForCausalLM"] * 4
    for stage in ran:
        ours, theirs = (load_file(made.path(stage) / "model.safetensors") for made in (run, finished[1]))
        assert all(torch.allclose(ours[name], theirs[name], atol=2e-3) for name in theirs), stage


def test_a_changed_data_file_makes_every_stage_run_again(tmp_path: Path) -> None:
    file = tmp_path / "train.jsonl"
    file.write_text("{}")
    settings = tiny_settings(tmp_path)
    settings.data.train_file = str(file)
    before = stage_fingerprints(settings)
    file.write_text("{} ")
    assert all(before[stage][0] != stage_fingerprints(settings)[stage][0] for stage in STAGES)


def test_a_damaged_folder_is_made_again(finished: tuple[Path, RunDir]) -> None:
    folder, run = finished
    weights = run.path("adaspec") / "model.safetensors"
    sound = {name: tensor.clone() for name, tensor in load_file(weights).items()}
    weights.write_bytes(weights.read_bytes()[:-10])
    assert run_tiny(tiny_settings(folder))[0] == ["adaspec"]
    again = load_file(weights)
    assert all((again[name] == sound[name]).all() for name in sound)


def test_the_best_draft_on_the_validation_examples_is_chosen_for_export(finished: tuple[Path, RunDir]) -> None:
    _, run = finished
    assert run.chosen("adaspec") == "adaspec"
    trained = ("distillspec", "adaspec")
    curves = {name: [entry["alpha"] for entry in run.draft_record(name).history] for name in trained}
    assert run.chosen("best") == max(trained, key=lambda name: max(curves[name]))
    settings = tiny_settings(run.folder.parent)
    settings.export.choose = "adaspek"
    with pytest.raises(UserError, match=r"export.choose is 'adaspek'.*adaspec"):
        run_pipeline(settings)


def test_every_stage_is_a_plain_folder_that_transformers_loads(finished: tuple[Path, RunDir]) -> None:
    _, run = finished
    for stage in STAGES:
        folder = run.path(stage)
        model = AutoModelForCausalLM.from_pretrained(folder)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        ids = tokenizer("Mia has 3 pens.", return_tensors="pt")["input_ids"]
        out = model.generate(ids, max_new_tokens=3, min_new_tokens=3, do_sample=False)
        assert out.shape[1] == ids.shape[1] + 3
        assert model.generation_config.eos_token_id == tokenizer.eos_token_id
        assert not [path for path in folder.iterdir() if path.suffix in (".bin", ".pt", ".ckpt")]


def test_records_hold_the_account_of_every_draft(finished: tuple[Path, RunDir]) -> None:
    _, run = finished
    reference, draft = (run.record(stage) for stage in ("distillspec", "adaspec"))
    assert reference is not None
    assert draft is not None
    assert reference.account["optimiser_steps"] == draft.account["optimiser_steps"] == 12
    assert draft.account["examples"] == 12 * 4
    tokens = draft.account["teacher_tokens"]
    assert 0.4 * tokens <= draft.account["selected_tokens"] <= 0.4 * tokens + 12
    assert draft.account["cumulative_teacher_tokens"] == tokens + reference.account["teacher_tokens"]
    assert list(run.drafts) == ["undistilled", "distillspec", "adaspec"]
    assert run.draft_record("undistilled").account["teacher_tokens"] == 0


def test_a_full_disk_leaves_no_half_written_folder(finished: tuple[Path, RunDir], tmp_path: Path) -> None:
    _, run = finished
    other = RunDir(tmp_path)

    def fail(folder: Path) -> None:
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        other.put("adaspec", StageRecord("key"), fail)
    assert other.record("adaspec") is None
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    kept = run.record("target")
    with pytest.raises(OSError, match="No space left"):
        run.put("target", StageRecord("other"), fail)
    assert run.record("target") == kept


def test_a_model_taken_as_it_is_becomes_a_link_and_may_be_shared(finished: tuple[Path, RunDir], tmp_path: Path) -> None:
    _, run = finished
    settings = tiny_settings(tmp_path)
    settings.target = TargetSettings(kind="as_is", model=str(run.target))
    made, _ = bench(settings)
    result = language_model(made, "target", "key")
    assert result.source == run.target
    made.run.put("target", result.record, result.save)
    assert made.run.target.is_symlink()
    assert made.run.record("target") is not None
    made.run.put("target", StageRecord("new"), StageResult(StageRecord("new"), source=run.path("initial")).save)
    assert (run.target / "model.safetensors").exists()  # replacing the link leaves what it points to


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (draft(1, k=0.0), r"drafts\[1\].k is 0.0, expected a number >0 and <=1"),
        (setting("target.training.steps", None), r"target.training.steps and target.training.epochs: neither is set"),
        (setting("target.kind", "finetune"), r"target.kind is finetune and target.model is None"),
        (setting("target.kind", "eagle"), r"target.kind is eagle, which is made from the target"),
        (setting("student.model", "somewhere"), r"student.kind is scratch and student.model is 'somewhere'"),
        (setting("drafts", []), r"drafts is empty"),
        (setting("evaluation.temperatures", []), r"evaluation.temperatures"),
        (setting("training.batch_size", 21), r"drafts.distillspec.training.batch_size is 21, .*at most 20"),
        (setting("student.architecture.positions", 16), r"student.architecture.positions is 16"),
        (setting("student.architecture.model_type", "lama"), r"architecture.model_type 'lama' cannot be built"),
        (setting("student.architecture.layers", 9), r"the draft has [\d,]+ parameters and the target [\d,]+"),
    ],
)
def test_settings_that_cannot_work_are_refused_before_anything_is_trained(
    tmp_path: Path, change: Any, words: str
) -> None:
    settings = tiny_settings(tmp_path)
    change(settings)
    with pytest.raises(UserError, match=words):
        run_pipeline(settings, Console(quiet=True))
    assert not list(tmp_path.rglob("*.safetensors"))


def test_two_processes_cannot_work_in_one_folder(tmp_path: Path) -> None:
    with (
        only_one(tmp_path / "run/work/lock"),
        pytest.raises(UserError, match="another process is working in"),
        only_one(tmp_path / "run/work/lock"),
    ):
        pass
    with only_one(tmp_path / "run/work/lock"):
        pass  # free again


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK])
def test_a_file_system_without_locks_is_no_other_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(number, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", refuse)
    entered = False
    with only_one(tmp_path / "run/work/lock"):
        entered = True
    assert entered


@pytest.mark.parametrize("signal", ["online", "topk", "log_probs"])
def test_every_signal_trains_and_the_frozen_models_leave_memory(
    finished: tuple[Path, RunDir], signal: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    shutil.copytree(finished[1].folder, tmp_path / "tiny")
    loaded: list[weakref.ref[Any]] = []

    def load(*args: Any, **options: Any) -> Any:
        model = load_model(*args, **options)
        loaded.append(weakref.ref(model))
        return model

    settings = tiny_settings(tmp_path)
    settings.teacher.signal = signal  # type: ignore[assignment]
    made, text = bench(settings)
    for module in ("data.target", "teacher.store"):
        monkeypatch.setattr(f"distill.{module}.load_model", load)
    material = prepare(made, Objective(selection=Selection()), selector="distillspec")
    gc.collect()
    target, reference = (ref() for ref in loaded)
    assert reference is None
    assert (target is None) == (signal != "online")
    kept = set() if signal == "online" else {f"target_{signal}"}
    assert set(material.train.signals) == {"reference_loss"} | kept
    assert (f"the target's signal ({signal}): " in text.getvalue()) == bool(kept)
    assert ("alpha is off by at most that" in text.getvalue()) == (signal == "topk")


def test_a_training_that_a_callback_ended_is_accounted_as_long_as_it_was(tmp_path: Path) -> None:
    settings = tiny_settings(tmp_path)
    settings.training.steps = 40
    stop = {"class_path": "EarlyStopping", "init_args": {"monitor": "validation_loss", "patience": 1, "min_delta": 9.0}}
    settings.trainer.callbacks = [stop]
    record = run_tiny(settings)[1].record("distillspec")
    assert record is not None
    assert record.account["optimiser_steps"] == record.history[-1]["step"] == 10
    assert record.account["examples"] == 40
