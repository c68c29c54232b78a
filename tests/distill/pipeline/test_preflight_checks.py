"""What is refused before the first step: settings that do not fit, what the machine lacks, a disk without room."""

from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_run import bench, tiny_settings

from decode.errors import UserError
from distill.checks import check_inputs
from distill.config import Settings, StudentSettings
from distill.pipeline import prepare_settings
from distill.run import Run

Usage = namedtuple("Usage", "total used free")


def changed(folder: Path, **values: Any) -> Settings:
    """Tiny settings with changes: ``a__b=1`` sets ``a.b``."""
    settings = tiny_settings(folder)
    for key, value in values.items():
        place: Any = settings
        *outer, last = key.split("__")
        for name in outer:
            place = getattr(place, name)
        setattr(place, last, value)
    return settings


def check(settings: Settings) -> None:
    settings.validate()
    check_inputs(bench(settings)[0])


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"training__optimizer": "muon"}, r"training.optimizer is 'muon' .*expected adamw or a class"),
        ({"training__optimizer": {"class_path": "torch.optim.Mu"}}, r"has no attribute 'Mu'"),
        ({"trainer__extra": {"max_steps": 3}}, r"trainer.extra.max_steps is not one of .*gradient_clip_val"),
        ({"trainer__strategy": "fsdp", "student__kind": "eagle"}, r"does not support student.kind eagle"),
        ({"target__sharded": True, "teacher__responses__source": "target"}, r"sharded target cannot generate text"),
        ({"student": StudentSettings(kind="mtp")}, r"set target.kind to as_is"),
        ({"student__kind": "dflash", "student__block__markov_rank": 8}, r"markov_rank is 8, and only dspark"),
        ({"data__source": "target"}, r"set teacher.responses.source to target"),
        ({"data__source": "target", "teacher__responses__source": "target"}, r"set target.kind to as_is"),
        ({"teacher__responses__server__urls": ["http://x/v1"]}, r"source is dataset: set it to target"),
        ({"data__chat_template": "none.jinja"}, r"neither a Jinja template .* nor a file"),
        ({"trainer__accelerator": "cuda"}, r"is cuda and PyTorch finds no GPU: set it to auto or cpu"),
        ({"trainer__attention": "flash_attention_2"}, r"is flash_attention_2, which \w+ cannot use here"),
        ({"target__sharded": True}, r"spreads the target over processes, and one was started"),
        ({"trainer__accumulate": 5}, r"target.training.batch_size is 4, expected at least 5"),
    ],
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_settings_that_contradict_each_other_or_the_machine(tmp_path: Path, values: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        check(changed(tmp_path, **values))


def test_a_gpu_without_bfloat16(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, _ = bench(changed(tmp_path, trainer__precision="bf16-mixed"))
    check_inputs(run)
    monkeypatch.setattr(Run, "device", torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Tesla V100")
    with pytest.raises(UserError, match=r"Tesla V100 has no bfloat16, and trainer.precision bf16-mixed asks for it"):
        check_inputs(run)


@pytest.mark.parametrize("can", [True, False])
def test_formats_that_are_auto_are_bfloat16_where_the_processor_multiplies_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, can: bool
) -> None:
    for module in ("pipeline", "checks"):
        monkeypatch.setattr(f"distill.{module}.multiplies_bfloat16", lambda device: can)
    settings = changed(tmp_path, trainer__precision="auto", target__dtype="auto")
    prepared = prepare_settings(settings)
    wanted = ("bf16-mixed", "bfloat16") if can else ("32-true", "float32")
    assert (prepared.trainer.precision, prepared.target.dtype) == wanted
    assert settings.target.dtype == "auto"  # the user's settings stay as they were given
    run, printed = bench(changed(tmp_path, trainer__precision="bf16-mixed"))  # asked for by name
    check_inputs(run)
    slower = "several times slower than in float32: trainer.precision bf16-mixed. Set these to auto"
    assert (slower in printed.getvalue().replace("\n", " ")) is not can


def test_servers_of_which_none_answers(tmp_path: Path) -> None:
    urls = ["http://127.0.0.1:9/v1", "http://127.0.0.1:1/v1"]
    run, _ = bench(changed(tmp_path, teacher__responses__source="target", teacher__responses__server__urls=urls))
    check_inputs(run)  # the target that they serve has to be trained first
    run.settings.target.kind = "as_is"
    with pytest.raises(UserError, match=r"http://127.0.0.1:9/v1"):
        check_inputs(run)


@pytest.mark.parametrize("kind", ["scratch", "eagle3"])
def test_a_disk_that_will_not_hold_the_signal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    settings = changed(tmp_path, target__architecture__layers=4)
    if kind != "scratch":
        settings.student = StudentSettings(kind=kind)  # type: ignore[arg-type]
    run, _ = bench(settings)
    check_inputs(run)
    monkeypatch.setattr("shutil.disk_usage", lambda _: Usage(1 << 50, 0, 1000))
    with pytest.raises(UserError, match=r"signal \(hidden\) will take .* GB, and 0.00 GB are free in .*auto"):
        check_inputs(run)
