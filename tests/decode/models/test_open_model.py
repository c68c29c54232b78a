"""Opening a model: device and number format are decided once; what cannot be opened is refused with the next step."""

import json
import math
import re
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from heads import make_head
from huggingface_hub import constants, get_session
from pairs import edit, into_cache, make_tokenizer, save_pair
from safetensors.torch import load_file, save_file
from tokenizers_of_kinds import byte_level
from transformers.utils import logging as hf_logging

from decode.engines.check import weight_fingerprints
from decode.errors import UserError
from decode.models import open as opening
from decode.models import sources
from decode.models.heads.files import load_head, save_head
from decode.models.open import (
    check_tokenizers,
    choose_device,
    choose_dtype,
    load,
    load_config,
    load_model,
    load_tokenizer,
    open_draft,
)
from decode.models.sources import tensors_in

CPU = {"device": "cpu", "dtype": "float32"}


@pytest.fixture
def folder(tmp_path: Path, tiny: Any) -> Path:
    return save_pair(tmp_path, tiny)


def test_auto_is_the_gpu_and_the_checkpoints_format_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for there, device, dtype in ((True, "cuda", "auto"), (False, "cpu", "float32")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda there=there: there)
        assert choose_device("auto") == torch.device(device)
        assert choose_dtype("auto", choose_device("auto")) == dtype
    assert choose_dtype("bfloat16", torch.device("cpu")) == "bfloat16"


@pytest.mark.parametrize("device", ["mps", "cuda", "gpu", "cuda:3"])
def test_devices_that_are_not_here_are_refused(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: int(device == "cuda:3"))
    with pytest.raises(UserError, match=r"no float64|choose (auto, cpu|cpu or auto)|does not find"):
        choose_device(device)


def refusal(path: Path) -> str:
    with pytest.raises(UserError) as caught:
        load_model(path, **CPU)
    assert str(path) in str(caught.value)
    return str(caught.value)


def test_files_that_cannot_be_read_are_refused_with_the_reason(folder: Path, tmp_path: Path) -> None:
    target, config = folder / "target", folder / "target" / "config.json"
    weights, before = target / "model.safetensors", config.read_bytes()
    edit(config, intermediate_size=20)
    assert re.search(r"do not fit its configuration: .*mlp.* is \[.*\] instead of \[.*20", refusal(target))
    config.write_bytes(before)
    edit(config, quantization_config={"quant_method": "gptq", "bits": 4, "group_size": 128})
    assert "pip install" in refusal(target)
    config.write_bytes(before)
    state = load_file(weights)
    kept = {name: tensor for name, tensor in state.items() if ".layers.1." not in name}
    save_file(kept, weights, metadata={"format": "pt"})
    assert re.search(r"model\.layers\.1\.\S+ is missing", refusal(target))
    weights.write_bytes(weights.read_bytes()[:-1000])
    assert "model.safetensors is cut off or damaged (Error while deserializing header" in refusal(target)
    (tmp_path / "empty").mkdir()
    assert "model_type" in refusal(tmp_path / "empty")
    assert f"there is no folder '{tmp_path}/targt': train it first" in refusal(tmp_path / "targt")


def changed(folder: Path, tensors: dict[str, torch.Tensor], **fields: Any) -> str:
    """Why a model with further or other tensors, and fields of its configuration, is refused."""
    file, config = folder / "model.safetensors", folder / "config.json"
    old = file.read_bytes(), config.read_text()
    save_file(load_file(file) | tensors, file, metadata={"format": "pt"})
    edit(config, **fields)
    try:
        load_model(folder, **CPU)
    except UserError as error:
        with pytest.raises(UserError, match=re.escape(str(error))):  # by the headers alone as well
            load_model(folder, **CPU, wanted="$^")
        return str(error)
    finally:
        file.write_bytes(old[0])
        config.write_text(old[1])
    return ""


FP8, UP = torch.float8_e4m3fn, "model.layers.0.mlp.up_proj"


def test_nothing_in_a_models_files_is_left_unread(folder: Path) -> None:
    """Row by row: what is refused, with the tensor that it names, and what a language model does not read."""
    target = folder / "target"
    weight = load_file(target / "model.safetensors")[f"{UP}.weight"]
    small, scale = (weight * 100).to(FP8), torch.tensor(0.01)
    bias, layer = torch.ones(weight.shape[0]), {"model.layers.9.mlp.up_proj.weight": weight}
    for words, tensors, fields in (
        (f"{UP}.weight_scale has no place", {f"{UP}.weight": small, f"{UP}.weight_scale": scale}, {}),
        (f"F8_E4M3 {UP}.weight: a format that takes a scale", {f"{UP}.weight": small}, {}),
        (f"I8 {UP}.weight: a format that takes a scale", {f"{UP}.weight": small.to(torch.int8)}, {}),
        (f"{UP}.bias has no place", {f"{UP}.bias": bias}, {}),
        (r"layers\.1\.\S+ has no place", {}, {"num_hidden_layers": 1}),
        ("layers.9.mlp.up_proj.weight has no place", layer, {"num_nextn_predict_layers": 1}),
        ("v_head.weight has no place", {"v_head.weight": bias}, {}),
        ("the method modelopt, which transformers", {}, {"quantization_config": {"quant_method": "modelopt"}}),
        ("", {f"{UP}.bias": bias * 0}, {}),
        ("", {f"{UP}.input_scale": scale}, {}),
        ("", {"model.layers.0.self_attn.rotary_emb.inv_freq": bias}, {}),
        ("", {"mtp.fc.weight": weight, "model.visual.blocks.0.fc.weight": weight + 1}, {}),
        ("", {"model.layers.2.enorm.weight": bias}, {"num_nextn_predict_layers": 1}),
    ):
        refused = changed(target, tensors, **fields)
        assert re.search(words, refused) if words else not refused, (words, refused)


def test_a_folder_of_two_models_is_refused_and_an_index_without_shards_is_not(tmp_path: Path, tiny: Any) -> None:
    model = tiny("llama")
    model.save_pretrained(tmp_path, max_shard_size="10KB")
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    model.save_pretrained(tmp_path / "whole")
    (tmp_path / "whole/model.safetensors").rename(tmp_path / "model.safetensors")
    for read in (tensors_in, weight_fingerprints, partial(load_model, **CPU)):
        with pytest.raises(UserError, match=rf"holds {shards[0].name} and model\.safetensors"):
            read(tmp_path)
    for shard in shards:
        shard.unlink()
    assert (tmp_path / sources.INDEX).exists()
    assert load_model(tmp_path, **CPU).lm_head.weight.equal(model.lm_head.weight)
    assert {*weight_fingerprints(tmp_path)} == {"model.safetensors"}


def laid(file: Path, content: Any) -> None:
    """Put in the place of a file a cut of it, other content, a link to nowhere, or nothing."""
    old = file.read_bytes() if file.exists() else b""
    file.unlink(missing_ok=True)
    if isinstance(content, dict):
        save_file(content, file, metadata={"format": "pt"})
    elif isinstance(content, Path):
        file.symlink_to(content)
    elif content is not None:
        file.write_bytes(old[:content] if isinstance(content, int) else content)


NOWHERE, ZEROS = Path("nowhere"), {"x": torch.zeros(1)}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "is missing: download it again"),
        (-8, "is cut off or damaged .*: download it again"),
        (0, "is cut off or damaged .*: download it again"),
        (NOWHERE, "is a link that leads nowhere: download it again"),
        (b"version https://git-lfs.github.com/spec/v1\n", "is a pointer of Git LFS: run git lfs pull in its folder"),
    ],
    ids=str,
)
def test_a_shard_that_is_not_whole_is_named_with_what_to_do(content: Any, words: str, tmp_path: Path, tiny) -> None:
    tiny("llama").save_pretrained(tmp_path, max_shard_size="10KB")
    shard = sorted(tmp_path.glob("model-*.safetensors"))[1]
    laid(shard, content)
    for read in (tensors_in, partial(load_model, **CPU), partial(load_model, **CPU, wanted="$^")):
        with pytest.raises(UserError, match=f"{shard.name} {words}"):
            read(tmp_path)


OUTSIDE = json.dumps({"weight_map": {"x": "../model.safetensors"}}).encode()
GONE: dict[str, Any] = {"model.safetensors": None}
ADAPTER: dict[str, Any] = {"adapter_config.json": b"{}", "adapter_model.safetensors": ZEROS}


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"pytorch_model.bin": b"", "model.fp16.safetensors": ZEROS, "consolidated.safetensors": ZEROS}, ""),
        ({"original/consolidated.safetensors": ZEROS, "original/params.json": b"{}"}, ""),
        (GONE | {"pytorch_model.bin": b""}, r"no safetensors file.*but pytorch_model\.bin.*python"),
        (GONE | {"model.fp16.safetensors": ZEROS}, r"but model\.fp16.*of another name may be renamed"),
        (GONE | {"consolidated.safetensors": ZEROS}, r"but consolidated\.safetensors: "),
        (GONE, "no safetensors file that is read .*but no other weights: download it, unless"),
        ({"model.safetensors": NOWHERE}, "model.safetensors is a link that leads nowhere"),
        (GONE | {sources.INDEX: OUTSIDE}, r"names .*\.\./model\.safetensors, which is not in its fold"),
        (GONE | ADAPTER, "holds adapter_config.json: .*an adapter is not read: merge it .*merge_and_unload"),
        (ADAPTER, "holds adapter_config.json and model.safe"),
        ({"hf_quant_config.json": b"{}"}, "that hf_quant_config.json describes, .*: take its files in 16"),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, dict) else "",
)
def test_what_lies_beside_a_models_files_changes_nothing_or_is_refused(files: Any, words: str, tmp_path, tiny) -> None:
    model = tiny("llama")
    model.save_pretrained(tmp_path)
    (tmp_path / "original").mkdir()
    for name, content in files.items():
        laid(tmp_path / name, content)
    for wanted in (None, "$^") if words else ():
        with pytest.raises(UserError, match=words):
            load_model(tmp_path, **CPU, wanted=wanted)
    if not words:
        assert load_model(tmp_path, **CPU).lm_head.weight.equal(model.lm_head.weight)


def test_weights_of_the_name_that_the_configuration_gives_are_read_by_all(tmp_path: Path, tiny: Any) -> None:
    model = tiny("llama")
    model.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "other.safetensors")
    edit(tmp_path / "config.json", transformers_weights="other.safetensors")
    for wanted in (None, "lm_head"):
        assert load_model(tmp_path, **CPU, wanted=wanted).lm_head.weight.equal(model.lm_head.weight)
    assert {*weight_fingerprints(tmp_path)} == {"other.safetensors"}


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("", None, ""),
        (sources.INDEX, b'{"weight_map": {"x": "1.safetensors"}}', "holds 1.safetensors and model.safetensors"),
        ("hf_quant_config.json", b"{}", "that hf_quant_config.json describes"),
        ("model.safetensors", NOWHERE, "model.safetensors is a link that leads nowhere"),
    ],
    ids=str,
)
def test_a_name_on_the_hub_is_read_by_the_same_rules(
    file: str, content: Any, words: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = load_model(folder / "target", **CPU).lm_head.weight
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    snapshot = into_cache(folder / "hub", "org/model", folder / "target")
    if words:
        laid(snapshot / "1.safetensors", ZEROS)
        laid(snapshot / file, content)
    for name in ("org/model", "org/model@main"):
        if words:
            with pytest.raises(UserError, match=words):
                load_model(name, **CPU)
        else:
            model = load_model(name, **CPU)
            assert (model.lm_head.weight.equal(wanted), model.name_or_path) == (True, str(snapshot))
            assert load_tokenizer(name).get_vocab() == make_tokenizer(chat=True).get_vocab()
    for name in ("org/model@v2", "org/model@refs/pr/1"):
        with pytest.raises(UserError, match="not in the Hub's cache on this machine"):
            load_model(name, **CPU)


def test_weights_that_the_index_names_are_fetched_and_no_others(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(sources, "_silent", lambda _: False)
    asked = []

    def snapshot(name: str, *, allow_patterns: list[str], **options: Any) -> str:
        asked.append([file for file in allow_patterns if file.endswith(".safetensors")])
        assert (name, options) == ("org/model", {"local_files_only": False, "revision": "v1"})
        return str(folder / "target")

    monkeypatch.setattr(sources, "snapshot_download", snapshot)
    load_config("org/model@v1")
    load_tokenizer("org/model@v1")
    assert asked == [[], []]
    (folder / "target" / "model.safetensors").unlink()
    laid(folder / "target" / sources.INDEX, b'{"weight_map": {"x": "1.safetensors", "y": "2.safetensors"}}')
    with pytest.raises(UserError, match=r"1\.safetensors is missing"):
        load_model("org/model@v1", **CPU)
    assert ["1.safetensors", "2.safetensors"] in asked


def test_a_heads_files_are_read_by_the_same_rules(tmp_path: Path, tiny: Any) -> None:
    target, file = tiny("llama"), tmp_path / "model.safetensors"
    save_head(make_head(target, 3), tmp_path)
    tensors = load_file(file)
    save_file(tensors | {"fc.weight": tensors["fc.weight"].to(FP8)}, file)
    with pytest.raises(UserError, match=r"F8_E4M3 fc\.weight: a format that takes a scale"):
        load_head(tmp_path, target)
    save_file(tensors, tmp_path / "old.safetensors")  # of which nothing says that it belongs to the head
    save_file(tensors | {"fc.weight": tensors["fc.weight"] + 1}, file)
    assert load_head(tmp_path, target).state_dict()["fc.weight"].equal(tensors["fc.weight"] + 1)
    (tmp_path / sources.INDEX).write_text(json.dumps({"weight_map": {"fc.weight": "old.safetensors"}}))
    with pytest.raises(UserError, match=r"holds model\.safetensors and old\.safetensors"):
        load_head(tmp_path, target)


def test_a_hub_that_does_not_answer_is_asked_once_and_nothing_stays_switched_off(monkeypatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    sources._silent.cache_clear()
    asked = []
    session = SimpleNamespace(head=lambda url, timeout: asked.append(url) or get_session().head(url, timeout=timeout))
    monkeypatch.setattr(sources, "get_session", lambda: session)
    for reads in (partial(load_model, **CPU), load_tokenizer, load_config):
        with pytest.raises(UserError, match=r"^cannot load the \w+ 'some/name@v1': .*it is no folder .* not answer: "):
            reads("some/name@v1")
    assert len(asked) == 1
    assert constants.HF_HUB_OFFLINE is False
    sources._silent.cache_clear()
    session.head = lambda url, timeout: None
    assert not sources.hub_offline()
    sources._silent.cache_clear()


def test_loading_leaves_transformers_messages_as_they_were(folder: Path) -> None:
    """Two threads load at once; the settings are the process's."""
    before = hf_logging.get_verbosity(), hf_logging.is_progress_bar_enabled()
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda name: load_model(folder / name, **CPU), ("target", "draft") * 2))
    assert before == (hf_logging.get_verbosity(), hf_logging.is_progress_bar_enabled())


def test_quantised_weights_are_placed_while_loading_and_not_moved(folder: Path, monkeypatch: Any) -> None:
    asked = {}
    model = load_model(folder / "target", **CPU)
    monkeypatch.setattr(model, "to", lambda *_: pytest.fail("moved"))

    def from_pretrained(name: str, **options: Any) -> tuple[Any, dict[str, Any]]:
        asked.update(options)
        return model, {"missing_keys": set(), "mismatched_keys": set(), "unexpected_keys": set()}

    monkeypatch.setattr(opening, "AutoModelForCausalLM", SimpleNamespace(from_pretrained=from_pretrained))
    edit(folder / "target" / "config.json", quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True})
    load_model(folder / "target", **CPU)
    assert asked["device_map"] == {"": torch.device("cpu")}


def test_a_draft_goes_where_its_target_is_in_its_format_if_it_has_its_tokenizer(folder: Path) -> None:
    target = load_model(folder / "target", device="cpu", dtype="bfloat16", device_map="cpu")
    tokenizer = make_tokenizer()
    draft = open_draft(folder / "draft", target, tokenizer)
    assert (draft.dtype, draft.device) == (torch.bfloat16, target.device)
    byte_level().save_pretrained(folder / "draft")
    with pytest.raises(UserError, match=r"is not the target's: id .*assisted generation .*assistant_tokenizer"):
        open_draft(folder / "draft", target, tokenizer)
    (folder / "draft" / "tokenizer.json").write_text("{")
    with pytest.raises(UserError, match="cannot load the tokenizer"):
        open_draft(folder / "draft", target, tokenizer)


def test_renamed_added_tokens_open_with_a_line_and_plain_ones_are_refused() -> None:
    """As a fine-tuned model renames a reserved token."""
    target, draft = (byte_level(special=("<pad>", name, "</end>")) for name in ("<tool_call>", "<|reserved_0|>"))
    with pytest.warns(UserWarning, match=r"names added tokens otherwise: id 1 is '<tool_call>' and '<\|reserved_0\|>'"):
        check_tokenizers(target, draft)
    with pytest.raises(UserError, match="is not the target's: id 1 is '<tool_call>' and '!'"):
        check_tokenizers(target, byte_level(special=("</end>",)))


def test_a_draft_of_weights_that_are_not_numbers_is_named(folder: Path) -> None:
    model = load_model(folder / "draft", **CPU)
    torch.nn.init.constant_(model.get_input_embeddings().weight, math.nan)
    model.save_pretrained(folder / "draft")
    with pytest.raises(UserError, match=f"{folder}/draft gives logits that are not finite"):
        _ = load(folder / "target", folder / "draft", device="cpu").draft_runner
