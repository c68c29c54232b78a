"""What is refused before the first step: what the machine lacks, and a disk without room."""

from collections import namedtuple
from pathlib import Path

import pytest
import torch
from families import build_tiny
from tiny_run import bench, tiny_settings

from decode.errors import UserError
from distill.checks import check_inputs
from distill.config.training import StudentSettings
from distill.models.loading import choose_number_formats, use_attention
from distill.teacher.store import choose_signal

Usage = namedtuple("Usage", "total used free")


def with_free(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: Usage(1 << 50, 0, free))


def test_a_gpu_without_bfloat16(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = tiny_settings(tmp_path)
    settings.trainer.precision = "bf16-mixed"
    context, _ = bench(settings)
    check_inputs(context)
    monkeypatch.setattr(type(context), "device", torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Tesla V100")
    with pytest.raises(UserError, match=r"Tesla V100 has no bfloat16, and trainer.precision bf16-mixed asks for it"):
        check_inputs(context)


@pytest.mark.parametrize("can", [True, False])
def test_formats_that_are_auto_are_bfloat16_where_the_processor_multiplies_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, can: bool
) -> None:
    for module in ("models.loading", "checks"):
        monkeypatch.setattr(f"distill.{module}.multiplies_bfloat16", lambda device: can)
    settings = tiny_settings(tmp_path)
    settings.trainer.precision = "auto"
    settings.teacher.responses.dtype = settings.teacher.signal_autocast = "auto"
    choose_number_formats(settings, torch.device("cpu"))
    wanted = ("bf16-mixed", "bfloat16", True) if can else ("32-true", None, False)
    teacher = settings.teacher
    assert wanted == (settings.trainer.precision, teacher.responses.dtype, teacher.signal_autocast)
    settings.trainer.precision, teacher.signal_autocast = "bf16-mixed", True  # asked for by name
    context, printed = bench(settings)
    check_inputs(context)
    slower = "several times slower than in float32: trainer.precision bf16-mixed, teacher.signal_autocast"
    assert (slower in printed.getvalue().replace("\n", " ")) is not can


def test_an_attention_and_an_optimiser_that_are_not_here(tmp_path: Path) -> None:
    settings = tiny_settings(tmp_path)
    settings.trainer.attention = "flash_attention_2"
    with pytest.raises(UserError, match=r"is flash_attention_2, which \w+ cannot use here"):
        check_inputs(bench(settings)[0])
    with pytest.raises(UserError, match="which LlamaForCausalLM cannot use here"):
        use_attention(build_tiny("llama"), "flash_attention_2")
    settings.trainer.attention = "eager"
    settings.training.optimizer = "adamw_8bit"
    with pytest.raises(UserError, match="adamw_8bit, which runs on GPUs, and the training runs on cpu: choose adamw"):
        check_inputs(bench(settings)[0])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_here(tmp_path: Path) -> None:
    settings = tiny_settings(tmp_path)
    settings.trainer.accelerator = "cuda"
    with pytest.raises(UserError, match=r"is cuda and PyTorch finds no GPU: set it to auto or cpu"):
        check_inputs(bench(settings)[0])


def test_servers_of_which_none_answers(tmp_path: Path) -> None:
    settings = tiny_settings(tmp_path)
    settings.teacher.responses.source = "target"
    settings.teacher.responses.server.urls = ["http://127.0.0.1:9/v1", "http://127.0.0.1:1/v1"]
    context, _ = bench(settings)
    check_inputs(context)  # the target that they serve has to be trained first
    settings.target.kind = "as_is"
    with pytest.raises(UserError, match=r"http://127.0.0.1:9/v1"):
        check_inputs(context)


@pytest.mark.parametrize("kind", ["scratch", "eagle", "eagle3"])
def test_a_disk_that_will_not_hold_the_signal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    settings = tiny_settings(tmp_path)
    if kind != "scratch":
        settings.student = StudentSettings(kind=kind)  # type: ignore[arg-type]
    settings.teacher.signal, settings.target.architecture.layers = "hidden", 4
    context, _ = bench(settings)
    check_inputs(context)
    with_free(monkeypatch, 1000)
    with pytest.raises(UserError, match=r"signal \(hidden\) will take .* GB, and 0.00 GB are free in .*auto"):
        check_inputs(context)


def test_the_signal_is_the_first_that_there_is_room_for_and_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = tiny_settings(tmp_path)
    sizes = {"hidden": 8_000_000, "topk": 1_000_000}

    def chosen(free: int, key: str) -> str:
        with_free(monkeypatch, free)
        return choose_signal(bench(settings)[0], lambda kind: sizes[kind], key)

    assert [chosen(free, f"at {free}") for free in (10_000_000, 8_000_001, 1_000_000)] == [
        "hidden",
        "topk",
        "online",
    ]
    assert chosen(10_000_000, "a") == chosen(1000, "a") == "hidden"  # the disk is full of it by now
    settings.teacher.signal_limit_gb = 0.002
    assert chosen(10_000_000, "a") == "topk"
    settings.teacher.signal = "online"
    assert chosen(10_000_000, "a") == "online"
