"""What is refused before the first step: settings that do not fit, what the machine lacks, a disk without room."""

import os
from collections import namedtuple
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from pairs import into_cache, make_pair, make_tokenizer
from rich.console import Console
from safetensors.torch import load_file, save_file
from tiny_run import altered, begun, bench, given, random_target, tiny_settings

from decode.errors import UserError
from decode.files import write_json
from decode.models import sources
from decode.options import check
from distill import train
from distill.checks import check_inputs
from distill.config import DraftSettings
from distill.config.models import StudentSettings
from distill.networks.models import multiplies_bfloat16
from distill.pipeline import run_pipeline, with_formats
from distill.rehearse import shrink
from distill.run import Run
from distill.stages import run_stages
from probes.pipeline import run_probes
from probes.settings import ProbesSettings

Usage = namedtuple("Usage", "total used free")


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"1__reference": "b"}, r"reference is 'b', expected an earlier draft, one of \['distillspec'\]"),
        ({"1__training": {"epoch": 2}}, r"drafts.adaspec.training: Option 'epoch' is not accepted"),
        ({"drafts": {"export": DraftSettings()}}, r"'export', which is a file or folder of every run"),
        ({"drafts": {}}, r"drafts is {}, expected at least one"),
        ({"upload": True}, r"upload is True, which needs tracker wandb and an evaluation"),
        ({"export__choose": "adaspek"}, r"export.choose is 'adaspek'.*adaspec"),
        ({"target__training__steps": None}, r"target.training.steps is None, .*give exactly one"),
        ({"target__training__warmup_steps": 12}, r"target.training.warmup_steps is 12, and the training has 12 steps"),
        ({"1__training": {"steps": 2}}, r"drafts.adaspec.training.warmup_steps is 2, and the training has 2 steps"),
        (
            {"student__training__steps": None, "student__training__epochs": 0.1},  # of 48 examples in batches of 4
            r"student.training.warmup_steps is 2, and the training has 1 steps",
        ),
        ({"target__kind": "finetune"}, r"target.model is None, and kind is finetune"),
        ({"target__round_to": "float16"}, r"target.round_to is 'float16', for kind as_is"),
        ({"training__optimizer": "lion"}, r"training.optimizer is 'lion', expected adamw, muon or {class_path"),
        ({"training__optimizer": {"class_path": "torch.optim.Mu"}}, r"has no attribute 'Mu'"),
        ({"trainer__extra": {"max_steps": 3}}, r"trainer.extra is {'max_steps': 3}, .*leave those keys out"),
        ({"trainer__extra": {"devices": 2}}, r"trainer.extra is {'devices': 2}, .*leave those keys out"),
        ({"data__files": {"train": "x"}}, r"data.files.train: there is no file 'x'"),
        ({"teacher__engine__urls": ["http://h/v1"]}, r"engine.urls is .*asked for nothing"),
        ({"teacher__signal": "vllm"}, r"urls is empty.*start a server with the command that .* check-engine prints"),
        ({"trainer__extra": {"max_step": 3}}, r"Lightning refuses .*unexpected keyword argument 'max_step'"),
        ({"trainer__strategy": "fsdp", "student__kind": "eagle"}, r"strategy is 'fsdp', .*supports no heads"),
        ({"trainer__accelerator": "cuda"}, r"is cuda and PyTorch finds no GPU: set it to auto or cpu"),
        ({"trainer__attention": "flash_attention_2"}, r"is flash_attention_2, which \w+ cannot use here"),
        ({"trainer__accumulate": 5}, r"target.training.batch_size is 4, expected at least 5"),
        ({"training__batch_size": 21}, r"drafts.distillspec.training.batch_size is 21, .*at most 20"),
        ({"student__kind": "eagle", "0__on_policy": 0.5}, r"kind is 'eagle', and heads learn from texts of the target"),
        (
            {"teacher__signal": "vllm", "teacher__engine__keep": "topk", "student__kind": "eagle3"},
            r"keep is 'topk', and h",
        ),
        ({"target__architecture__heads": 5}, r"llama' cannot be built.* multiple of the number of attention heads"),
        ({"student": StudentSettings(kind="mtp")}, r"set target.kind to as_is"),
        ({"student__kind": "dflash", "student__block__markov_rank": 8}, r"markov_rank is 8, and a dflash head scores"),
        (
            {"student__kind": "eagle3", "student__norms": True, "export__gguf": ["f32"]},
            r"student.norms is True, and llama.cpp",
        ),
        ({"student__kind": "dflash", "student__block__size": 1}, r"student.block.size is 1, which leaves no token"),
        (
            {
                "student__kind": "eagle",
                "target__architecture__model_type": "granite",
                "target__architecture__extra": {"logits_scaling": 2.0},
            },
            r"GraniteForCausalLM changes its logits .* an EAGLE-1 head cannot share it; use EAGLE-3 or a block head",
        ),
        ({"student__architecture__positions": 16}, r"student.architecture.positions is 16"),
        ({"student__architecture__model_type": "lama"}, r"architecture.model_type 'lama' cannot be built"),
        ({"student__architecture__layers": 9}, r"the draft has [\d,]+ parameters and the target [\d,]+"),
        ({"data__source": "target"}, r"set teacher.responses.source to target"),
        ({"data__source": "target", "teacher__responses__source": "target"}, r"set target.kind to as_is"),
        ({"data__source": "spec_bench"}, r"data.files.train"),
        ({"data__prompt_template": "{question}"}, r"give both or neither"),
        ({"data__source": "humaneval"}, r"no training rows on the Hub: give some with data.files.train"),
        ({"data__chat_template": "none.jinja"}, r"expected a Jinja template .* or a file"),
    ],
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_settings_that_cannot_work_are_refused_at_once(tmp_path, values: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        run_pipeline(altered(tiny_settings(tmp_path), **values), Console(quiet=True))
    assert not list(tmp_path.rglob("*.safetensors"))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"1__k": 0.0}, "drafts.k is 0.0, expected a value v with v>0 and v<=1"),
        ({"trainer__accelerator": "mps"}, r"trainer.accelerator.*Expected a typing.Literal.*Got value: mps"),
        ({"1__training": {"epochs": -2}}, r"drafts.adaspec.training: .*epochs.* -2"),
    ],
)
def test_settings_of_python_have_the_ranges_of_the_command_line(tmp_path, values: dict[str, Any], words: str) -> None:
    settings = tiny_settings(tmp_path)
    check(type(settings), asdict(settings))
    with pytest.raises(UserError, match=words):
        train(altered(settings, **values))


def test_a_run_whose_data_are_refused_leaves_no_folder(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("os.environ", os.environ.copy())  # which W&B's logger adds to
    (tmp_path / "rows.jsonl").write_text('{"a": "b"}\n')
    settings = altered(tiny_settings(tmp_path / "runs"), data__source=str(tmp_path / "rows.jsonl"), tracker="wandb")
    with pytest.raises(UserError, match="has the columns 'a'"):
        run_pipeline(settings, Console(quiet=True))
    assert not list((tmp_path / "runs").iterdir())


@pytest.mark.parametrize("source", ["chats", "target"])
def test_a_token_whose_row_the_target_lacks_is_refused(tmp_path, tiny, source: str) -> None:
    tokenizer, model = make_tokenizer(chat=True), make_pair(tiny)[0]
    tokenizer.add_tokens(["<|new|>"])
    tokenizer.chat_template = "<|new|>" + tokenizer.chat_template
    run, _ = bench(tiny_settings(tmp_path, target=given(tmp_path / "model", model, tokenizer)))
    if source == "target":
        altered(run.settings, data__source="target", teacher__responses__source="target", target__dtype="float32")
    words = {
        "chats": "data: the examples hold token id 280, but the target model's",
        "target": "id 280, but the target's",
    }
    with pytest.raises(UserError, match=words[source] + " ids are 0 to 279; .*resize_token_embeddings"):
        assert run.corpus


@pytest.mark.parametrize("can", [True, False])
def test_auto_is_bfloat16_where_that_is_fast(tmp_path, monkeypatch, can: bool) -> None:
    for module in ("pipeline", "checks"):
        monkeypatch.setattr(f"distill.{module}.multiplies_bfloat16", lambda device: can)
    settings = altered(tiny_settings(tmp_path), trainer__precision="auto", target__dtype="auto")
    run = Run(with_formats(settings))
    prepared = run.settings
    wanted = ("bf16-mixed", "bfloat16") if can else ("32-true", "float32")
    assert (prepared.trainer.precision, prepared.target.dtype) == wanted
    assert settings.target.dtype == "auto"  # the user's settings stay as they were given
    run, printed = bench(altered(settings, trainer__precision="bf16-mixed"))  # asked for by name
    check_inputs(run)
    assert ("slower in bfloat16" in printed.getvalue()) is not can
    monkeypatch.setattr(Run, "device", torch.device("cuda"))
    monkeypatch.setattr("distill.checks.multiplies_bfloat16", lambda device: False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Tesla V100")
    with pytest.raises(UserError, match=r"Tesla V100 has no bfloat16: set trainer.precision to 16-mixed"):
        check_inputs(run)


@pytest.mark.parametrize(
    ("cpu", "avx512", "amx", "fast"),
    [
        ("AMD EPYC", True, False, True),
        ("Intel Xeon", True, False, False),
        ("Intel Xeon", True, True, True),
        ("", False, False, False),
    ],
)
def test_bfloat16_of_intel_processors_needs_amx(monkeypatch, cpu: str, avx512: bool, amx: bool, fast: bool) -> None:
    monkeypatch.setattr("distill.networks.models.describe", lambda: {"cpu": cpu})
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: avx512)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    assert multiplies_bfloat16(torch.device("cpu")) is fast


def test_servers_of_which_none_answers(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("distill.engine.servers.PAUSE", 0.005)
    settings = altered(tiny_settings(tmp_path), teacher__responses__source="target")
    settings.teacher.engine.urls = ["http://127.0.0.1:9/v1", "http://127.0.0.1:1/v1"]
    run, _ = bench(settings)
    check_inputs(run)  # the target that they serve has to be trained first
    begun(settings)
    with pytest.raises(UserError, match=r"http://127.0.0.1:9/v1"):
        check_inputs(run)


def test_the_limit_of_a_dynamic_rope_is_given_with_its_reason(tmp_path, tiny) -> None:
    model, tokenizer = make_pair(tiny)[0], make_tokenizer(chat=True)
    model.config.rope_parameters |= {"rope_type": "dynamic", "factor": 2.0}
    model.config.max_position_embeddings = 16
    run, _ = bench(tiny_settings(tmp_path, target=given(tmp_path / "model", tokenizer, model)))
    with pytest.raises(UserError, match=r"target.model is 16 \(behind them its rope_type dynamic .* set data.max_len"):
        check_inputs(run)


BIAS = "model.layers.0.self_attn.q_proj.bias"


def damaged(folder: Path, damage: str) -> str:
    """Damages the files of a model; returns how it is refused."""
    file = folder / "model.safetensors"
    match damage:
        case "cut":
            file.write_bytes(file.read_bytes()[:-8])
            return "is cut off or damaged"
        case "bias":
            save_file(load_file(file) | {BIAS: torch.ones(32)}, file, metadata={"format": "pt"})
            return "q_proj.bias has no place"
        case "two":
            write_json(folder / "model.safetensors.index.json", {"weight_map": {BIAS: "other.safetensors"}})
            (folder / "other.safetensors").write_bytes(file.read_bytes())
            return "holds model.safetensors and other"
    file.unlink()
    return "has no safetensors file"


@pytest.mark.parametrize(
    ("damage", "hub"), [("cut", False), ("bias", False), ("two", False), ("none", False), ("cut", True), ("none", True)]
)
def test_a_models_files_are_checked_before_the_first_stage_and_by_a_dry_run(
    damage: str, hub: bool, tmp_path, monkeypatch
) -> None:
    """In a folder and in the Hub's cache, by distill and probe; a dry run leaves alone what would be downloaded."""
    settings = tiny_settings(tmp_path, target=random_target(tmp_path / "model", make_tokenizer(chat=True)))
    settings.student.architecture.hidden_size = 8
    words, quiet = damaged(tmp_path / "model", damage), Console(quiet=True)
    if hub:
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
        snapshot, asked = into_cache(tmp_path / "hub", "org/model", tmp_path / "model"), set[str]()
        settings.target.model = "org/model"
    if elsewhere := hub and damage == "none":
        download = lambda *_, **how: asked.update(how["allow_patterns"]) or snapshot  # noqa: E731
        with monkeypatch.context() as online:
            online.setattr(sources, "hub_offline", lambda: constants.HF_HUB_OFFLINE)
            online.setattr(constants, "HF_HUB_OFFLINE", False)
            online.setattr(sources, "snapshot_download", download)
            shrink(settings, quiet)
        assert "tekken.json" in asked
        assert not [file for file in asked if file.endswith(".safetensors")]
    refused = [partial(run_stages, bench(settings)[0]), partial(run_probes, ProbesSettings(**vars(settings)), quiet)]
    for each in refused if elsewhere else [partial(shrink, settings, quiet), *refused]:
        with pytest.raises(UserError, match=words):
            each()
    assert not (tmp_path / settings.name / "target").exists()
