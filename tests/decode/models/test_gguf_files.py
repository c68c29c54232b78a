"""GGUF files stand wherever a model or tokenizer is named; those that cannot be read are refused with the next step."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from gguf_files import unpacked, write_gguf
from huggingface_hub import constants
from pairs import make_tokenizer
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from decode.errors import UserError
from decode.models import gguf_files
from decode.models.loading import load_config, load_model, load_tokenizer, open_draft

CPU = {"device": "cpu", "dtype": "float32"}


@pytest.fixture
def model(tiny: Callable[..., PreTrainedModel]) -> PreTrainedModel:
    made = copy.deepcopy(tiny("llama-tied", vocab_size=280, intermediate_size=64, max_position_embeddings=256))
    made.generation_config.eos_token_id = made.config.eos_token_id = 0
    return made


@pytest.fixture
def file(tmp_path: Path, model: PreTrainedModel) -> Path:
    return write_gguf(tmp_path / "model.gguf", model, make_tokenizer(chat=True))


@pytest.mark.parametrize("kind", ["F32", "F16", "Q8_0", "Q4_1"])
def test_logits_are_those_of_the_unpacked_weights(kind: str, model: PreTrainedModel, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", model, make_tokenizer(), kind)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 2:
                weight.copy_(unpacked(weight, kind))
    found, tokenizer = load_model(path, **CPU), load_tokenizer(path)
    ids = torch.tensor([tokenizer("Tom has 3 apples")["input_ids"]])
    assert torch.equal(ids, torch.tensor([make_tokenizer()("Tom has 3 apples")["input_ids"]]))
    with torch.no_grad():
        assert torch.allclose(found(ids).logits, model(ids).logits, atol=1e-5)


def test_digits_are_read_one_by_one_where_the_header_says_so(model: PreTrainedModel, tmp_path: Path) -> None:
    texts = ["one 12 12\n\n"] * 9
    plain = make_tokenizer().train_new_from_iterator(texts, vocab_size=280)
    split = [load_tokenizer(write_gguf(tmp_path / f"{pre}.gguf", model, plain, pre=pre)) for pre in ("gpt-2", "smollm")]
    assert [tokenizer.tokenize("a 12") for tokenizer in split] == [["a", "Ġ12"], ["a", "Ġ", "1", "2"]]
    assert [tokenizer.tokenize("a\n\n1")[1:] for tokenizer in split] == [["Ċ", "Ċ", "1"], ["ĊĊ", "1"]]
    split[1].save_pretrained(tmp_path / "plain")
    assert load_tokenizer(tmp_path / "plain").tokenize("a 12") == ["a", "Ġ", "1", "2"]


@pytest.fixture
def readings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """What was read of GGUF files since the last call; what is kept lies in the test's folder."""
    read: list[str] = []
    shown = gguf_files.working
    monkeypatch.setattr(gguf_files, "working", lambda console, name: read.append(name) or shown(console, name))
    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path / "cache"))
    return read


def test_what_was_read_of_a_file_is_kept_until_it_changes(file: Path, model: PreTrainedModel, readings) -> None:
    def opened() -> tuple[list[str], str, str, Tensor]:
        readings.clear()
        tokenizer, config, found = load_tokenizer(file), load_config(file), load_model(file, **CPU)
        return list(readings), tokenizer.backend_tokenizer.to_str(), config.to_json_string(), found.lm_head.weight

    all_parts = [f"model.gguf: reading its {part}" for part in ("tokenizer", "config", "weights-float32")]
    first, again = opened(), opened()
    assert first[0] == all_parts
    assert (again[0], *again[1:3]) == ([], *first[1:3])
    assert torch.equal(first[3], again[3])
    with torch.no_grad():
        model.lm_head.weight[0] += 1
    write_gguf(file, model, make_tokenizer(chat=True))
    read, *_, weight = opened()
    assert read == all_parts
    torch.testing.assert_close(weight, model.lm_head.weight)
    (folder,) = (file.parent / "cache" / "gguf").iterdir()
    assert sorted(path.name for path in folder.iterdir()) == ["config", "tokenizer", "weights-float32"]
    (folder / "weights-float32" / "model.safetensors").write_bytes(b"cut off")
    assert opened()[0] == all_parts[2:]


def test_where_nothing_can_be_kept_the_file_is_read_each_time_and_said_so(file: Path, readings) -> None:
    (file.parent / "cache").write_text("a file, where nothing can be put into")
    for _ in range(2):
        with pytest.warns(UserWarning, match=r"model.gguf will be read anew the next time: .*cannot be kept \("):
            assert load_tokenizer(file).eos_token_id == 0
    assert len(readings) == 2


def test_a_folder_with_one_file_is_that_file_and_its_tokenizer_is_read(file: Path, model: PreTrainedModel) -> None:
    target, tokenizer = load_model(file.parent, **CPU), load_tokenizer(file.parent)
    assert tokenizer.eos_token_id == 0
    assert "[assistant]" in tokenizer.chat_template
    assert load_config(file.parent).num_hidden_layers == 2
    draft = open_draft(file.parent, target, tokenizer)
    assert isinstance(draft, PreTrainedModel)
    other = make_tokenizer().train_new_from_iterator(["other words"], vocab_size=280)
    write_gguf(file, model, other)
    with pytest.raises(UserError, match="the draft's tokenizer is not the target's"):
        open_draft(file.parent, target, tokenizer)


def test_a_model_from_a_file_is_trained_and_saved_like_any_other(file: Path, tmp_path: Path) -> None:
    found = load_model(file, **CPU)
    found.train()(torch.tensor([[1, 2, 3]]), labels=torch.tensor([[1, 2, 3]])).loss.backward()
    assert found.model.embed_tokens.weight.grad is not None
    found.save_pretrained(tmp_path / "plain")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "plain")
    assert all(torch.equal(a, b) for a, b in zip(found.parameters(), again.parameters(), strict=True))


def test_files_that_cannot_be_read_are_refused(file: Path, model: PreTrainedModel) -> None:
    whole = file.read_bytes()
    at = whole.index(b"blk.0.ffn_up.weight") + len("blk.0.ffn_up.weight") + 4 + 2 * 8
    unknown = whole[:at] + (250).to_bytes(4, "little") + whole[at + 4 :]
    for broken in (whole[:-5000], whole[:300], b"no such thing" * 100, unknown):
        file.write_bytes(broken)
        with pytest.raises(UserError, match=f"cannot load the model '{file}': .*download it again"):
            load_model(file, **CPU)
    write_gguf(file, model, make_tokenizer(), arch="starfish")
    with pytest.raises(UserError, match=r"starfish.*take the model's safetensors files"):
        load_model(file, **CPU)
    with pytest.raises(UserError, match="cannot load the tokenizer"):
        load_tokenizer(file)
    write_gguf(file.with_name("other.gguf"), model, make_tokenizer())
    with pytest.raises(UserError, match=f"holds 2 GGUF files; give one of them, such as {file}"):
        load_model(file.parent, **CPU)
    with pytest.raises(UserError, match="there is no file"):
        load_model(file.with_name("absent.gguf"), **CPU)
