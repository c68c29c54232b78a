"""GGUF files stand wherever a model or tokenizer is named; those that cannot be read are refused with the next step."""

import copy
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from gguf_files import unpacked, write_gguf
from huggingface_hub import constants
from pairs import make_tokenizer
from transformers import AutoModelForCausalLM, PreTrainedModel

from decode.errors import UserError
from decode.models.open import load_config, load_model, load_tokenizer

CPU = {"device": "cpu", "dtype": "float32"}


@pytest.fixture
def model(tiny: Callable[..., PreTrainedModel]) -> PreTrainedModel:
    made = copy.deepcopy(tiny("llama-tied", vocab_size=280, intermediate_size=64, max_position_embeddings=256))
    made.generation_config.eos_token_id = made.config.eos_token_id = 0
    return made


@pytest.fixture
def file(tmp_path: Path, model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path / "cache"))
    (tmp_path / "given").mkdir()
    return write_gguf(tmp_path / "given" / "model.gguf", model, make_tokenizer(chat=True))


@pytest.mark.parametrize("kind", ["F32", "F16", "Q8_0", "Q4_1"])
def test_logits_are_those_of_the_unpacked_weights(kind: str, model: PreTrainedModel, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", model, make_tokenizer(), kind)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 2:
                weight.copy_(unpacked(weight, kind))
    ids = load_tokenizer(path)("Tom has 3 apples")["input_ids"]
    assert ids == make_tokenizer()("Tom has 3 apples")["input_ids"]
    with torch.no_grad():
        logits = [each(torch.tensor([ids])).logits for each in (load_model(path, **CPU), model)]
    torch.testing.assert_close(*logits, atol=1e-5, rtol=1e-5)


def test_digits_are_read_one_by_one_where_the_header_says_so(model: PreTrainedModel, tmp_path: Path) -> None:
    texts = ["one 12 12\n\n"] * 9
    plain = make_tokenizer().train_new_from_iterator(texts, vocab_size=280)
    split = [load_tokenizer(write_gguf(tmp_path / f"{pre}.gguf", model, plain, pre=pre)) for pre in ("gpt-2", "smollm")]
    assert [tokenizer.tokenize("a 12") for tokenizer in split] == [["a", "Ġ12"], ["a", "Ġ", "1", "2"]]
    assert [tokenizer.tokenize("a\n\n1")[1:] for tokenizer in split] == [["Ċ", "Ċ", "1"], ["ĊĊ", "1"]]


def test_a_file_is_converted_once_until_it_changes(file: Path, model: PreTrainedModel, tmp_path, capsys) -> None:
    for change in (0, 1):
        with torch.no_grad():
            model.lm_head.weight[0] += change
        write_gguf(file, model, make_tokenizer(chat=True))
        for _ in range(2):
            tokenizer, config, opened = load_tokenizer(file), load_config(file), load_model(file, **CPU)
            torch.testing.assert_close(opened.lm_head.weight, model.lm_head.weight)
            assert (tokenizer.eos_token_id, config.num_hidden_layers) == (0, 2)
            assert "[assistant]" in tokenizer.chat_template
        assert capsys.readouterr().err.count("is converted once") == 1
    opened.train()(torch.tensor([[1, 2, 3]]), labels=torch.tensor([[1, 2, 3]])).loss.backward()
    opened.save_pretrained(tmp_path / "plain")  # trained and saved like any other
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "plain")
    assert all(torch.equal(a, b) for a, b in zip(opened.parameters(), again.parameters(), strict=True))
    shutil.rmtree(tmp_path / "cache")
    (tmp_path / "cache").write_text("a file, where nothing can be put into")
    with pytest.raises(UserError, match=r"cannot be converted to .*; set HF_HOME to a disk"):
        load_config(file)


def test_files_that_cannot_be_read_are_refused(file: Path, model: PreTrainedModel) -> None:
    content = file.read_bytes()
    at = content.index(b"blk.0.ffn_up.weight") + len("blk.0.ffn_up.weight") + 4 + 2 * 8
    unknown = content[:at] + (250).to_bytes(4, "little") + content[at + 4 :]
    for broken in (content[:-5000], content[:300], b"no such thing" * 100, unknown):
        file.write_bytes(broken)
        with pytest.raises(UserError, match=f"cannot load the model '{file}': .*download it again"):
            load_model(file, **CPU)
    write_gguf(file, model, make_tokenizer(), arch="starfish")
    with pytest.raises(UserError, match=r"starfish.*take the model's safetensors files"):
        load_tokenizer(file)
    with pytest.raises(UserError, match="there is no file"):
        load_model(file.with_name("absent.gguf"), **CPU)
