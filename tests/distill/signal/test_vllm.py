"""States out of a serving engine: those of the target's own forward, whatever fails on the way, and bounded."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from functools import partial
from importlib import util
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import pytest
import torch
from families import build_architecture
from safetensors.torch import load_file
from serving import StatesServer, serving
from some_rows import everything, scratch, some_rows
from tiny_run import begun, bench, check_killed_ends_alike, given, run_tiny, tiny_settings
from tokenizers_of_kinds import with_start
from transformers import PreTrainedModel

from decode.errors import UserError
from decode.models.heads.eagle import FeatureHead, head_config
from distill.config import Settings
from distill.config.teacher import EngineSettings, ResponseSettings
from distill.data.dataset import FEATURES, Expect, label_mask
from distill.engine.check import refuse_differences
from distill.engine.servers import Engine
from distill.engine.states import StateFiles
from distill.engine.vllm import CONNECTOR
from distill.networks import models
from distill.networks.lm_head import LMHead
from distill.responses.target import answered_texts
from distill.run import Run
from distill.signal.engine import EngineStates, Packed, texts_of
from distill.signal.kept import keep_columns
from distill.signal.target import HIDDEN, INSIDE, TOPK, Signal, packed, unpacked
from distill.stages import shards

NORMS = "Llama, tied head", "Gemma 2", "Phi", "GPT-2", "OLMo", "Granite", "Cohere", "Qwen3-Next"
"""Families of all kinds of final norms and output heads: RMSNorm, 1 + w, LayerNorm, caps, scales, tied or not."""


@pytest.fixture(autouse=True)
def short_waits(monkeypatch) -> None:
    monkeypatch.setattr("distill.engine.servers.PAUSE", 0.005)
    monkeypatch.setattr("distill.engine.servers.AGAIN", 0.02)
    monkeypatch.setattr("distill.engine.vllm.WAIT", 60)
    monkeypatch.setattr("distill.engine.vllm.FOLDER_WAIT", 0.1)


@contextmanager
def states_of(
    model: PreTrainedModel, captured: list[int], folder: Path, parts: PreTrainedModel | None = None, **options: Any
) -> Any:
    """The source of a model's states out of a server, and the server."""
    layers = sorted({*captured, model.config.get_text_config().num_hidden_layers})
    server = StatesServer(model, layers, folder, **options)
    with serving(server) as (url, bodies):
        files = StateFiles(Engine([url], EngineSettings(in_flight=3)), layers)
        yield EngineStates(files, parts or model, captured, torch.device("cpu")), server, bodies
        files.close()


def expecting(source: EngineStates) -> Expect:
    return lambda coming: source.files.expect(texts_of(coming))


@pytest.mark.parametrize("family", NORMS)
def test_the_engines_last_state_gives_the_targets_logits_through_its_own_files(tmp_path, family: str) -> None:
    model, batch = build_architecture(family), everything(some_rows(4, empty=[2]))
    model.save_pretrained(tmp_path / "model")
    parts = models.hollow_target(tmp_path / "model")
    with states_of(model, [], tmp_path, parts=parts) as (source, _, _):
        logits = LMHead(parts)(source(batch)[0])
    wanted = model(batch["input_ids"]).logits[label_mask(batch["labels"])]
    assert torch.allclose(logits, wanted, atol=1e-4)


@pytest.mark.parametrize("kind", ["hidden", "topk", "eagle", "eagle3"])
def test_the_engines_states_are_kept_as_those_of_a_forward_pass(tiny, tmp_path, kind: str) -> None:
    model, examples = tiny("qwen3", seed=3), [some_rows(7, empty=[2]) for _ in range(2)]
    head, captured = None, list[int]()
    if kind.startswith("eagle"):
        version = 3 if kind == "eagle3" else 1
        head = FeatureHead(head_config(model.config, version, draft_vocab=30))
        if head.reduced:
            head.set_vocabulary(torch.arange(5, 35))
        captured = list(head.captured_layers)
    with states_of(model, captured, tmp_path) as (source, _, _):
        for each, its in zip(examples, (None, source)):
            signal = Signal(model, "topk" if kind == "topk" else "hidden", head, its, k=6)
            keep_columns(scratch(signal.columns), [each], signal.kept, expecting(its) if its else None)
    ours, theirs = (everything(each) for each in examples)
    names = {HIDDEN, TOPK, FEATURES, INSIDE}
    assert names & ours.keys() == names & theirs.keys()
    for name in {HIDDEN, INSIDE} & ours.keys():
        assert torch.allclose(ours[name], theirs[name], atol=1e-4)
    if TOPK in ours:
        values = [batch[TOPK][:, 1].contiguous().view(torch.float32) for batch in (ours, theirs)]
        assert torch.allclose(*values, atol=1e-4)
    if FEATURES in ours:
        read = label_mask(ours["labels"])
        assert torch.allclose(ours[FEATURES][read], theirs[FEATURES][read], atol=1e-4)


def test_a_float8_state_has_a_scale_for_each_plane() -> None:
    states = torch.randn(50, 3, 16, generator=torch.Generator().manual_seed(0))
    states *= torch.tensor([1.0, 1e-3, 1e3])[:, None]
    kept = packed(states.flatten(1), 3, "float8")
    assert kept.shape == (50, 3 * (16 + 4))
    assert kept.dtype == torch.uint8
    again = unpacked(kept, 3).view_as(states)
    largest = states.abs().amax(-1, keepdim=True)
    assert ((again - states).abs() <= states.abs() / 16 + largest / 448 / 2).all()  # three bits, and subnormal numbers


FAULTS: dict[str, Callable[..., object]] = {  # what is wrong with an answer and its tensors
    "status": lambda answer, _: answer.update(status=503),
    "other tokens": lambda _, tensors: tensors["token_ids"].add_(1),
    "fewer rows": lambda _, tensors: tensors.update(hidden_states=tensors["hidden_states"][1:].contiguous()),
    "not finite": lambda _, tensors: tensors["hidden_states"][0, 0, 0].fill_(torch.nan),
    "no space": lambda answer, _: Path(answer["kv_transfer_params"]["hidden_states_path"] + ".failed").write_text(
        "No space left on device"
    ),
    "no file": lambda *_: None,
    "no params": lambda answer, _: answer.pop("kv_transfer_params"),
    "other layers": lambda answer, _: answer["kv_transfer_params"].update(layers=[1, 0, 2]),
    "elsewhere": lambda answer, _: answer["kv_transfer_params"].update(hidden_states_path="/else/where/1.safetensors"),
}


def spoiled(fault: str, times: int) -> Callable[..., bool]:
    """Has the fault in the first answers."""

    def spoil(number: int, *answered: Any) -> bool:
        if number <= times:
            FAULTS[fault](*answered)
        return number > times or fault not in ("no space", "no file", "status", "elsewhere")

    return spoil


WORDS = {
    "status": "status 503", "other tokens": "are not the", "fewer rows": "--no-enable-prefix-caching",
    "not finite": "--dtype", "no space": "No space left.*lower teacher.engine.in_flight", "no file": "another machine",
}  # fmt: skip


@pytest.mark.parametrize("fault", WORDS)
def test_a_sample_that_fails_is_asked_for_again_and_in_the_end_named(tiny, tmp_path, fault: str, monkeypatch) -> None:
    model, batch = tiny("llama"), everything(some_rows(4))
    if fault == "no file":
        monkeypatch.setattr("distill.engine.vllm.WAIT", 0.5)
    wanted = Signal(model).source(batch)[0]
    with states_of(model, [], tmp_path, spoil=spoiled(fault, 2)) as (source, _, bodies):
        assert torch.allclose(source(batch)[0], wanted, atol=1e-4)
        assert len(bodies) == 4 + 2 or (fault == "no file" and len(bodies) > 6)  # on a busy machine files are late
    assert not list(tmp_path.glob("*.safetensors*"))
    always = states_of(model, [], tmp_path, spoil=spoiled(fault, 99))
    with always as (source, _, _), pytest.raises(UserError, match=WORDS[fault]):
        source(batch)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("no params", "SGLang"),
        ("other layers", r"\[1, 0, 2\] away, and \[2\]"),
        ("elsewhere", "where, which is not on this machine: .*shared_storage_path"),
    ],
)
def test_an_engine_that_cannot_give_the_states_is_refused_at_once(tiny, tmp_path, fault: str, words: str) -> None:
    with states_of(tiny("llama"), [], tmp_path, spoil=spoiled(fault, 99)) as (source, _, bodies):
        with pytest.raises(UserError, match=words):
            source(everything(some_rows(1)))
        assert len(bodies) == 1


def test_no_more_files_wait_than_requests_are_in_flight(tiny, tmp_path) -> None:
    examples = some_rows(30)
    with states_of(tiny("llama"), [], tmp_path) as (source, server, bodies):
        signal = Signal(tiny("llama"), "hidden", None, source)
        keep_columns(scratch(signal.columns), [examples], signal.kept, expecting(source))
        assert len(bodies) == 30
        assert 0 < server.most <= 3


# -- a whole run ------------------------------------------------------------------------------------------------------


def short(folder: Path) -> Settings:
    settings = tiny_settings(folder)
    settings.training.steps, settings.trainer.validate_every = 6, 3
    return settings


def standing(folder: Path, url: str, **engine: Any) -> Settings:
    settings = short(folder)
    settings.teacher.signal = "vllm"
    settings.teacher.engine = EngineSettings(urls=[url], in_flight=4, **engine)
    return settings


def without_target(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any, **__: Any) -> None:
        raise AssertionError("the target is in the process")

    monkeypatch.setattr("distill.run.load_model", refused)
    monkeypatch.setattr("distill.run.holds", lambda *_: False)


@pytest.fixture(scope="module")
def here(tmp_path_factory) -> Run:
    return run_tiny(begun(short(tmp_path_factory.mktemp("here"))))[1]


@pytest.mark.parametrize("keep", ["float32", False])
def test_a_run_learns_from_an_engine_what_it_learns_from_the_target(here, tmp_path, monkeypatch, keep) -> None:
    server = StatesServer(here.load_target().eval(), [2], tmp_path)
    without_target(monkeypatch)
    with serving(server) as (url, bodies):
        settings = begun(standing(tmp_path / "there", url, keep=keep))
        there = run_tiny(settings)[1]
        assert all(body["max_tokens"] == 1 for body in bodies)
        for stage in ("distillspec", "adaspec"):
            ours, theirs = (load_file(run.path(stage) / "model.safetensors") for run in (there, here))
            assert all(torch.allclose(ours[name], theirs[name], atol=1e-4) for name in ours), stage
        if keep is False:
            check_killed_ends_alike(settings, tmp_path / "again", {"distillspec": 4})
    assert not list(tmp_path.glob("*.safetensors"))


@pytest.mark.parametrize("keep", ["topk", "float8"])
def test_states_of_answers_are_packed_as_they_come_and_no_text_is_read_twice(tmp_path, monkeypatch, keep: str) -> None:
    target = bench(begun(tiny_settings(tmp_path / "first")))[0].load_target().eval()
    server, lying = StatesServer(target, [2], tmp_path), []
    without_target(monkeypatch)
    with serving(server) as (url, bodies):
        settings = standing(tmp_path, url, keep=keep)
        settings.teacher.responses = ResponseSettings(source="target", max_new_tokens=6, temperature=0.0)
        put = Packed.put

        def counted(self: Packed, *example: Any) -> None:
            lying.append(len(list(tmp_path.rglob("[0-9].safetensors"))) + len(list(tmp_path.rglob("??.safetensors"))))
            put(self, *example)

        monkeypatch.setattr(Packed, "put", counted)
        _, run, printed = run_tiny(begun(settings))
    answers = [body for body in bodies if body["kv_transfer_params"]["include_output_tokens"]]
    assert len(answers) == len(lying) == 20 + 8
    assert max(lying) <= 4  # raw states of no more texts than requests are in flight
    assert len(bodies) == 20 + 8 + 8 + 20  # the last ones are of the checks of states and of the first answers
    assert "log-probabilities from the engine's last state" in printed
    width = int(target.config.hidden_size)
    (folder,) = (run.work / "signals").glob(f"{settings.student.kind}-*")
    a_label = {"topk": 8 * settings.teacher.signal_k, "float8": width + 4}[keep]
    kept = sum(path.stat().st_size for path in folder.iterdir())
    labels = sum(len([i for i in row["labels"] if i >= 0]) for row in answered_texts(run)[0])
    assert kept < 1.5 * labels * a_label + 20_000


def test_a_server_with_too_short_a_context_is_refused_before_the_training(tmp_path) -> None:
    for context, good in ((255, False), (256, True)):
        with serving(lambda body, number: (200, {}), context) as (url, _):
            run, printed = bench(begun(standing(tmp_path, url)))
            words = r"texts of 255 tokens.*--max-model-len 256"
            with nullcontext() if good else pytest.raises(UserError, match=words):
                _ = run.engine
            assert not printed.getvalue()


@pytest.mark.parametrize(
    ("away", "words"),
    [
        ([1, 1, 1], r"at layer 0 .*all layers differ"),
        ([0, 1, 1], r"at layer 3 .*the layers before it are right"),
        ([0, 0, 1], r"at layer 6 .*after the final norm"),
        ([0, 0, 0], ""),
    ],
)
def test_a_layer_that_differs_is_named_with_the_known_causes(away: list[float], words: str) -> None:
    with pytest.raises(UserError, match=words) if words else nullcontext():
        refuse_differences(dict(zip((0, 3, 6), away)), 1e-3, "T")


def test_an_engine_with_other_weights_is_refused(tiny, tmp_path) -> None:
    tokenizer = with_start()
    model, other = (tiny("llama", vocab_size=len(tokenizer), max_position_embeddings=256, seed=n) for n in (1, 9))
    with serving(StatesServer(other, [model.config.num_hidden_layers], tmp_path)) as (url, _):
        settings = standing(tmp_path, url)
        settings.target = given(tmp_path / "model", model, tokenizer)
        with pytest.raises(UserError, match=r"at layer 2 by .* expected less than 0.001"):
            run_tiny(settings)


def test_an_engine_whose_answers_are_no_samples_is_refused_before_any_is_kept(tmp_path, monkeypatch) -> None:
    """Its states are the target's, and it answers at another temperature."""
    monkeypatch.setattr("distill.data.writing.FIRST", 8)
    monkeypatch.setattr("distill.signal.target.FIRST", 8)
    settings = begun(standing(tmp_path, "", keep="float32"))
    settings.teacher.responses = ResponseSettings(source="target", max_new_tokens=16, temperature=1.0)
    target, temperature = Run(settings).load_target().eval(), 0.05
    with serving(StatesServer(target, [2], tmp_path, spoil_logits=lambda _, logits: logits / temperature)) as (url, _):
        settings.teacher.engine.urls = [url]
        with pytest.raises(UserError, match=r"no samples of the target: of \d+ answers .*--generation-config vllm"):
            run_tiny(settings)
        assert not list((Run(settings).work / "responses").rglob("*.safetensors"))
        temperature = 1.0
        assert run_tiny(settings)[0] == ["distillspec", "adaspec"]
    settings.training.steps, settings.teacher.engine.urls = 5, ["http://127.0.0.1:9/v1"]  # everything is there
    assert run_tiny(settings)[0] == ["distillspec", "adaspec"]


# -- the engine's side ------------------------------------------------------------------------------------------------


@pytest.fixture
def connector(monkeypatch) -> Any:
    """The class that vLLM loads, on a base class that does what is used of vLLM's."""

    class Base:
        def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
            self.use_lock = True

        def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, Any]:
            return (True, {"hidden_states_path": "x"}) if block_ids else (False, None)

    name = "vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector"
    module = ModuleType(name)
    module.ExampleHiddenStatesConnector, module.extract_from_kv_cache = Base, None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, name, module)
    sampler, platforms = ModuleType("vllm.v1.sample"), ModuleType("vllm.platforms")
    sampler.rejection_sampler = SimpleNamespace()  # type: ignore[attr-defined]
    platforms.current_platform = SimpleNamespace(is_cpu=lambda: True)  # type: ignore[attr-defined]
    for other in (sampler, platforms):
        monkeypatch.setitem(sys.modules, other.__name__, other)
    spec = util.spec_from_file_location("draftsmith_connector", CONNECTOR / "draftsmith_connector.py")
    assert spec is not None
    assert spec.loader is not None
    loaded = util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


def test_the_connector_writes_whole_files_marks_failures_and_clears_what_nobody_fetched(connector, tmp_path) -> None:
    hf_config = SimpleNamespace(eagle_aux_hidden_state_layer_ids=[1, 4])
    draft = SimpleNamespace(draft_model_config=SimpleNamespace(hf_config=hf_config))
    config = SimpleNamespace(speculative_config=draft, model_config=SimpleNamespace(quantization="fp8"))
    made = connector.DraftsmithConnector(config, None, None)
    assert not made.use_lock
    spread = connector.rejection_sampler.expand_batch_to_tokens(torch.tensor([0.5, 0.0]), torch.tensor([2, 5]), 5, 0, 1)
    assert spread.tolist() == [0.5, 0.5, 1, 1, 1]
    told = {"hidden_states_path": "x", "layers": [1, 4], "quantization": "fp8"}
    asked = SimpleNamespace(request_id="a", kv_transfer_params={"include_output_tokens": False})
    assert made.request_finished(asked, [3]) == (True, told)
    assert made.request_finished(asked, []) == (False, None)
    made._request_filenames = {"b": "b.safetensors"}
    assert made.request_finished(SimpleNamespace(request_id="b", kv_transfer_params=None), [3]) == (False, None)
    assert not made._request_filenames  # nothing is written for an answer alone
    tensors, path = {"hidden_states": torch.ones(2, 1, 3)}, tmp_path / "a.safetensors"
    old, other = tmp_path / "old.safetensors", tmp_path / "notes.txt"
    for file in (old, other):
        file.touch()
        os.utime(file, (time.time() - 1000,) * 2)
    write = partial(connector.DraftsmithConnector._write_tensors, event=connector.Happened(), lock_fd=None)
    write(tensors, filename=str(path))
    assert torch.equal(load_file(path)["hidden_states"], tensors["hidden_states"])
    assert path.stat().st_mode & 0o777 == 0o644
    assert {file.name for file in tmp_path.iterdir()} == {"a.safetensors", "notes.txt"}
    with pytest.raises(ValueError, match=r"expected torch\.Tensor"):
        write({"hidden_states": "no tensor"}, filename=str(tmp_path / "b.safetensors"))
    assert (tmp_path / "b.safetensors.failed").exists()
    assert not list(tmp_path.glob(".*"))


def test_what_is_kept_of_an_engine_with_other_arguments_is_not_read(tmp_path: Path) -> None:
    """Such as the states of a quantised target, for texts of the data set, which do not depend on the engine."""
    folders = set()
    for arguments in ([], ["--quantization=fp8"], ["--tensor-parallel-size=2"]):
        settings = tiny_settings(tmp_path)
        settings.teacher.signal, settings.teacher.engine.arguments = "vllm", arguments
        run: Any = SimpleNamespace(settings=settings, work=tmp_path)
        folders.add(shards(run, "texts", cast(Signal, SimpleNamespace(key=())), "states", {}).folder)
    assert len(folders) == 2  # where an engine computes changes nothing
