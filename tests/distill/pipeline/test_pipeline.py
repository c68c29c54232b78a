"""A run's stages and folders; a killed run started again; what a failure leaves behind; targets that are given, of every kind; export without evaluation."""

import copy
import errno
import json
import shutil
import weakref
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from families import WRAPPERS, build_wrapper
from gguf_files import write_gguf
from pairs import make_tokenizer
from rich.console import Console
from safetensors.torch import load_file
from tiny_run import STAGES, altered, begun, bench, given, killed, run_tiny, tiny_settings
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from decode.errors import UserError
from decode.models.open import load_model
from distill import pipeline, stages
from distill import run as run_module
from distill.config import DraftSettings, EvaluationSettings, Settings
from distill.config.base import change
from distill.config.models import LayerSkipSettings, StudentSettings, TargetSettings, TrainingSettings
from distill.files import only_one
from distill.fingerprints import stage_fingerprints
from distill.networks.models import checkpoint_layers
from distill.pipeline import measure, run_pipeline
from distill.run import Run, StageRecord
from distill.stages import run_stages


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> tuple[Path, Run]:
    folder = tmp_path_factory.mktemp("finished")
    made, run, _ = run_tiny(tiny_settings(folder))
    assert made == STAGES
    return folder, run


def test_nothing_runs_again_but_a_folder_that_was_cut_short(finished) -> None:
    folder, run = finished
    files = {stage: run.path(stage) / "model.safetensors" for stage in STAGES}
    times = {stage: file.stat().st_mtime_ns for stage, file in files.items()}
    made, _, printed = run_tiny(tiny_settings(folder))
    assert (made, printed.count("up to date"), "stage 1 of 5" in printed) == ([], len(STAGES), True)
    assert times == {stage: file.stat().st_mtime_ns for stage, file in files.items()}
    sound = files["adaspec"].read_bytes()
    files["adaspec"].write_bytes(sound[:-10])
    made, _, printed = run_tiny(tiny_settings(folder))
    assert made == ["adaspec"]
    assert f"{run.path('adaspec')} is not as it was written, and is made again" in printed
    assert files["adaspec"].read_bytes() == sound


def weights_of(run: Run, stage: str = "target") -> dict[str, torch.Tensor]:
    return load_file(run.path(stage) / "model.safetensors")


def same(weights: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> bool:
    return weights.keys() == others.keys() and all(torch.equal(weights[name], others[name]) for name in weights)


def test_every_stage_continues_from_its_checkpoint_and_ends_alike_bit_by_bit(finished, tmp_path) -> None:
    settings, (_, wanted) = tiny_settings(tmp_path), finished
    for stage, step in {"target": 7, "initial": 11, "distillspec": 5, "adaspec": 9}.items():
        with killed(stage, step):
            run_tiny(settings)
    whole = tmp_path / "tiny/work/checkpoints-adaspec/last-step=5.ckpt"
    whole.with_stem("last-step=9").write_bytes(whole.read_bytes()[:-1000])
    made, run, printed = run_tiny(settings)
    assert made == ["adaspec"]
    assert "continuing from step 5" in printed
    for stage in STAGES:
        assert same(weights_of(run, stage), weights_of(wanted, stage)), stage
        assert [row["step"] for row in run.record(stage).history] == [0, 5, 10, 12], stage
    assert not list(run.work.glob("checkpoints-*"))


def target_of(folder: Path, **training: Any) -> Settings:
    """The settings of a run whose target is trained with a constant learning rate, on summed batches."""
    settings = altered(tiny_settings(folder), target__training__schedule="constant", trainer__accumulate=2)
    return altered(settings, **{f"target__training__{key}": value for key, value in training.items()})


def longer_of(folder: Path) -> Settings:
    return altered(target_of(folder, steps=16), trainer__validate_every=4)


def make_target(settings: Settings, *, kill: int = 0) -> str:
    """Makes the target, or ends as by a kill after so many steps; returns what was printed."""
    run, text = bench(settings)
    with killed("target", kill) if kill else nullcontext():
        run_stages(run, ("target",), check=False)
    return text.getvalue()


@pytest.fixture(scope="module")
def longer(tmp_path_factory) -> dict[str, torch.Tensor]:
    """The weights of a target whose longer training was not interrupted."""
    settings = longer_of(tmp_path_factory.mktemp("longer"))
    make_target(settings)
    return weights_of(Run(settings))


def test_a_training_goes_on_where_no_step_changes_and_checkpoints_of_others_are_kept_beside(longer, tmp_path) -> None:
    work = tmp_path / "tiny/work"
    make_target(target_of(tmp_path), kill=7)
    other = target_of(tmp_path, lr=1e-3)
    assert "continuing" not in make_target(other, kill=6)
    assert list((work / "checkpoints-target.old-1").glob("last-step=5.ckpt"))
    fewer = target_of(tmp_path, steps=4)  # than the checkpoint has
    assert "continuing" not in make_target(fewer)
    assert "continuing from step 5" in make_target(longer_of(tmp_path))
    run = Run(longer_of(tmp_path))
    assert same(weights_of(run), longer)
    assert [row["step"] for row in run.record("target").history] == [0, 5, 8, 12, 16]
    assert "continuing from step 5" in make_target(other)
    assert not list(work.glob("checkpoints-*"))


def test_a_training_that_was_killed_at_its_end_goes_on_with_more_steps(longer, tmp_path, monkeypatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Run, "put", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            make_target(target_of(tmp_path))
    assert "continuing from step 10" in make_target(longer_of(tmp_path))
    run = Run(longer_of(tmp_path))
    assert same(weights_of(run), longer)
    assert [row["step"] for row in run.record("target").history] == [0, 5, 10, 12, 16]


def test_a_finished_stage_of_other_settings_is_kept_beside_and_found_again(tmp_path) -> None:
    first, second = (target_of(tmp_path, steps=2, warmup_steps=0, lr=lr) for lr in (3e-3, 1e-3))
    make_target(first)
    before = weights_of(Run(first))
    assert "target.old-1 is the target that was there" in make_target(second)
    assert "up to date" in make_target(first)
    assert same(weights_of(Run(first)), before)
    assert {path.name for path in (tmp_path / "tiny").glob("target*")} == {"target", "target.old-2"}
    (tmp_path / "tiny/work/target.json").replace(tmp_path / "tiny/target/record.json")  # by a kill between two renames
    assert "up to date" in make_target(first)
    second.overwrite = True
    make_target(altered(second, target__training__lr=1e-4))
    assert {path.name for path in (tmp_path / "tiny").glob("target*")} == {"target", "target.old-2"}


def test_every_stage_is_a_plain_folder_that_a_full_disk_leaves(finished, tmp_path) -> None:
    _, run = finished
    for stage in STAGES:
        folder = run.path(stage)
        model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
        assert model(**tokenizer("Mia has 3 pens.", return_tensors="pt")).logits.isfinite().all()
        assert model.generation_config.eos_token_id == tokenizer.eos_token_id
        assert not [path for path in folder.iterdir() if path.suffix in (".bin", ".pt", ".ckpt")]

    def fail(folder: Path) -> None:
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    kept = run.record("target")
    for each, stage in ((Run(tiny_settings(tmp_path)), "adaspec"), (run, "target")):
        with pytest.raises(OSError, match="No space left"):
            each.put(stage, StageRecord("other"), fail)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    assert run.record("target") == kept


def test_a_kill_after_new_files_leaves_no_record_of_the_old_ones(tmp_path, monkeypatch) -> None:
    def make(folder: Path) -> None:
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"of one size")

    run = Run(tiny_settings(tmp_path))
    run.put("target", StageRecord("old"), make)
    assert run.record("target", "old") is not None
    monkeypatch.setattr("distill.run.write_json", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        run.put("target", StageRecord("new"), make)
    assert run.record("target") is None


def test_records_hold_the_account_of_every_draft_and_the_best_validation_is_chosen(finished) -> None:
    _, run = finished
    assert run.chosen("adaspec") == "adaspec"
    curves = {name: [row["alpha"] for row in run.draft_record(name).history if row["step"]] for name in run.trained}
    assert run.chosen("best") == max(run.trained, key=lambda name: max(curves[name]))
    reference, selective = (run.draft_record(name).account for name in run.trained)
    assert reference["optimiser_steps"] == selective["optimiser_steps"] == 12
    assert selective["examples"] == 12 * 4
    tokens = selective["teacher_tokens"]
    assert 0.4 * tokens - 12 <= selective["selected_tokens"] <= 0.4 * tokens + 12
    assert selective["cumulative_teacher_tokens"] == tokens + reference["teacher_tokens"]
    assert list(run.drafts) == ["undistilled", "distillspec", "adaspec"]
    assert run.draft_record("undistilled").account["teacher_tokens"] == 0


def test_a_draft_may_have_its_own_training_texts_and_order(finished, tmp_path) -> None:
    drafts = {"own": DraftSettings(on_policy=1.0), "seeded": DraftSettings(seeds=[7])}
    settings = tiny_settings(tmp_path, drafts=drafts | {"short": DraftSettings(training={"epochs": 1.0})})
    settings.teacher.responses.max_new_tokens = 4
    _, run, _ = run_tiny(begun(settings))
    accounts = {name: run.draft_record(name).account for name in run.trained}
    assert accounts["own"]["teacher_tokens"] <= 4 * accounts["own"]["examples"] < accounts["seeded"]["teacher_tokens"]
    assert accounts["short"]["optimiser_steps"] == 5  # of 20 examples in batches of 4
    paths = [*map(run.path, run.trained), finished[1].path("distillspec")]
    assert len({(path / "model.safetensors").read_bytes() for path in paths}) == 4


@pytest.mark.parametrize("links", [True, False])
def test_what_lies_beside_a_given_models_files_says_nothing_about_it(finished, tmp_path, monkeypatch, links) -> None:
    if not links:
        monkeypatch.setattr(Path, "symlink_to", Mock(side_effect=OSError(errno.EOPNOTSUPP, "no links here")))
    folder = tmp_path / "model"
    shutil.copytree(finished[1].target, folder)
    settings = tiny_settings(folder, target=TargetSettings(kind="as_is", model=str(folder)))  # the run lies inside
    run, _ = bench(settings)
    before = stage_fingerprints(settings)
    assert run_stages(run, ("target",)) == ["target"]
    assert run.target.is_symlink() is links
    assert links or not (run.target / "tiny").exists()
    (folder / "NOTES.md").write_text("tried with a temperature of 1")
    (folder / "trainer_state.json").write_text("{}")
    assert run_stages(run, ("target",)) == []
    assert stage_fingerprints(settings) == before
    (folder / "config.json").write_text((folder / "config.json").read_text() + " ")
    assert stage_fingerprints(settings) != before
    if links:  # replacing the link leaves what it points to
        run.put("target", StageRecord("new"), lambda place: place.symlink_to(finished[1].path("initial")))
        assert run.record("target", "new") is not None
        assert (folder / "model.safetensors").exists()


def test_two_processes_cannot_work_in_one_folder(tmp_path, monkeypatch) -> None:
    lock = tmp_path / "run/work/lock"
    with only_one(lock), pytest.raises(UserError, match="another process is working in"), only_one(lock):
        pass
    with only_one(lock):
        pass  # free again
    refused = Mock(side_effect=OSError(errno.ENOLCK, "Function not implemented"))
    monkeypatch.setattr("fcntl.flock", refused)  # a file system without locks is no other process
    with only_one(lock):
        pass


@pytest.mark.parametrize("signal", ["topk", "online"])
def test_a_run_holds_one_target_and_frees_it_where_it_is_not_needed(signal, monkeypatch, tmp_path) -> None:
    """Counted without a garbage collection, which may not come for hours: drafts and evaluation share it."""
    settings = begun(altered(tiny_settings(tmp_path), teacher__signal=signal, training__steps=3))
    del settings.drafts["adaspec"]
    opened, present, train = [], [], stages.fit
    load = run_module.load_model

    def watched(*arguments: Any, **options: Any) -> PreTrainedModel:
        model = load(*arguments, **options)
        opened.append(weakref.ref(model))
        return model

    def fit(*arguments: Any, **options: Any) -> Any:
        present.append(sum(reference() is not None for reference in opened))
        return train(*arguments, **options)

    monkeypatch.setattr(run_module, "load_model", watched)
    monkeypatch.setattr(stages, "fit", fit)
    change(settings.evaluation, prompts=2, accuracy_prompts=2, decode_prompts=1, max_new_tokens=4, draft_lengths=[2])
    run, printed = bench(settings)
    run_stages(run)
    measure(run)
    assert present == [signal == "online"]
    assert len(opened) == (1 if signal == "online" else 2)  # for the signal, and for the evaluation
    assert ("α is off by at most" in printed.getvalue()) == (signal == "topk")


def test_a_training_that_a_callback_ended_is_accounted_as_long_as_it_was(tmp_path, monkeypatch) -> None:
    """With gradient checkpointing, which a setting asks for."""
    settings = tiny_settings(tmp_path, drafts={"distillspec": DraftSettings()})
    checkpoint = Mock(side_effect=checkpoint_layers)
    monkeypatch.setattr("distill.training.trainer.checkpoint_layers", checkpoint)
    settings.training.steps, settings.trainer.gradient_checkpointing = 20, True
    stop = {"class_path": "EarlyStopping", "init_args": {"monitor": "validation_loss", "patience": 1, "min_delta": 9.0}}
    settings.trainer.callbacks = [stop]
    record = run_tiny(settings)[1].draft_record("distillspec")
    assert record.account["optimiser_steps"] == record.history[-1]["step"] == 10
    assert record.account["examples"] == 40
    assert checkpoint.called


def test_without_evaluation_the_draft_is_exported_and_once(tmp_path) -> None:
    settings = tiny_settings(tmp_path, evaluation=False, drafts={"distillspec": DraftSettings()})
    console = Console(record=True, width=150)
    run = run_pipeline(begun(settings), console)
    assert not (run.folder / "report.json").exists()
    assert AutoModelForCausalLM.from_pretrained(run.export).num_parameters() > 0
    card = (run.export / "README.md").read_text()
    assert "# Draft model for tiny\n" in card
    recipe = (
        "In draftsmith's settings: texts 20, max_length 256, divergence forward_kl, steps 12, batch_size 4, optimizer"
    )
    assert f"## Training\n\n{recipe} adamw, lr 0.003, schedule" in card
    weights = run.export / "model.safetensors"
    assert measure(run) == {}
    assert "up to date" in console.export_text()
    weights.write_bytes(weights.read_bytes()[:-10])
    (run.export / "README.md").write_text("mine")
    measure(run)
    assert "is made again" in console.export_text()
    assert load_file(weights)
    assert json.loads((run.work / "report.json").read_text())["export"]["model.safetensors"] == weights.stat().st_size
    changed = replace(settings, evaluation=tiny_settings(tmp_path).evaluation)
    assert pipeline.measurement_fingerprint(changed) != pipeline.measurement_fingerprint(settings)


@pytest.mark.parametrize("round_to", [None, "float16"])
def test_a_gguf_file_becomes_a_plain_folder(round_to, tmp_path, tiny) -> None:
    model = copy.deepcopy(tiny("llama-tied", vocab_size=280, intermediate_size=64, max_position_embeddings=256))
    model.generation_config.eos_token_id = model.config.eos_token_id = 0
    file = write_gguf(tmp_path / "model.gguf", model, make_tokenizer(chat=True), "Q8_0")
    target = TargetSettings(kind="as_is", model=str(file), round_to=round_to)
    settings = tiny_settings(tmp_path, target=target, drafts={"distillspec": DraftSettings()})
    settings.student.architecture.hidden_size = 8
    settings.student.training.steps = settings.training.steps = 3
    run = bench(settings)[0]
    made = run_stages(run, ("target",) if round_to else None)
    assert made == ["target", "initial", "distillspec"][: 1 if round_to else 3]
    saved, whole = (load_model(path, device="cpu", dtype="float32") for path in (run.target, file))
    assert not run.target.is_symlink()
    assert "quantization_config" not in saved.config.to_dict()
    pairs = list(zip(saved.parameters(), whole.parameters(), strict=True))
    assert all(torch.equal(a, b.half().float() if round_to else b) for a, b in pairs)
    assert all(torch.equal(a, b) for a, b in pairs) == (not round_to)
    assert AutoTokenizer.from_pretrained(run.target).chat_template == make_tokenizer(chat=True).chat_template
    assert round_to or run_tiny(settings)[0] == []


def test_drafts_are_trained_for_the_language_model_of_one_that_sees(tmp_path) -> None:
    """Cut from its layers where it is trained by LayerSkip's recipe, and as a head for the model as it is."""
    model = build_wrapper("qwen2_5_vl", vocab=280)
    model.generation_config.eos_token_id = 0
    frozen, text = given(tmp_path / "given", model, make_tokenizer(chat=True)), WRAPPERS["qwen2_5_vl"][2]
    few = TrainingSettings(steps=2, batch_size=4)
    recipe = replace(frozen, kind="finetune", training=few, layerskip=LayerSkipSettings(enabled=True))
    for target, student, made in (
        (recipe, StudentSettings(kind="cut"), text),
        (frozen, StudentSettings(kind="eagle3"), "LlamaForCausalLMEagle3"),
    ):
        settings = tiny_settings(tmp_path, target=target, student=student, drafts={"distillspec": DraftSettings()})
        settings.training = few
        names, run, _ = run_tiny(settings)
        assert names[-2:] == ["initial", "distillspec"]
        for stage in ("initial", "distillspec"):
            assert json.loads((run.path(stage) / "config.json").read_text())["architectures"] == [made]


def test_the_export_of_a_finished_run_is_uploaded_where_that_is_asked_for(finished, monkeypatch) -> None:
    uploads, settings = Mock(), copy.deepcopy(finished[1].settings)
    settings.evaluation = EvaluationSettings(prompts=2, accuracy_prompts=1, decode_prompts=0, max_new_tokens=4)
    monkeypatch.setattr(pipeline, "log_report", uploads)
    for upload in (False, False, True):
        settings.upload = upload
        run, _ = bench(settings)
        assert pipeline.measure(run)["decoding"] == []
    assert [call.kwargs["upload"] for call in uploads.call_args_list] == [False, True]  # the second is up to date
