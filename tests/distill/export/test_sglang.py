"""Exported heads in SGLang's own model classes: every tensor of the file is read, and nothing stays unfilled."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from families import build_tiny
from pairs import make_tokenizer
from safetensors.torch import load_file
from sglang_classes import sglang_classes
from transformers import LlamaConfig

from decode.engines.base import CHECKOUT
from decode.models.heads.eagle import FeatureHead, head_config
from distill.export.head import write_head

WHEEL = next(
    (file for root in (Path.cwd(), CHECKOUT) for file in (root / ".engines/sglang").glob("sglang-*.whl")), None
)
pytestmark = [pytest.mark.engine, pytest.mark.skipif(WHEEL is None, reason="SGLang's wheel is not here (make engines)")]


@pytest.fixture(scope="module")
def classes():
    with sglang_classes(WHEEL) as found:
        yield found


def unfilled(model: torch.nn.Module) -> dict[str, int]:
    """Numbers that nothing was loaded into, by parameter."""
    return {name: n for name, tensor in model.named_parameters() if (n := int(tensor.isnan().sum()))}


@pytest.mark.parametrize(("family", "version", "drafted"), [("llama", 1, None), ("qwen3", 3, None), ("llama", 3, 64)])
def test_every_tensor_finds_its_place_in_sglang(classes, tmp_path, family, version, drafted) -> None:
    target = build_tiny(family, vocab_size=280, num_hidden_layers=4, eos_token_id=0)
    head = FeatureHead(head_config(target.config, version, draft_vocab=drafted))
    if drafted:
        head.set_vocabulary(torch.arange(0, 2 * drafted, 2))
    write_head(head, tmp_path, make_tokenizer(), 3, torch.float32)
    model = classes[2 if version == 3 else 1](LlamaConfig.from_pretrained(tmp_path))
    for parameter in model.parameters():
        parameter.requires_grad_(False).fill_(torch.nan)
    for name, tensor in load_file(tmp_path / "model.safetensors").items():
        before = unfilled(model)
        model.load_weights([(name, tensor)])
        filled = sum(before.values()) - sum(unfilled(model).values())
        assert filled == (0 if name in ("d2t", "t2d") else tensor.numel()), name
    assert unfilled(model).keys() == {"model.embed_tokens.weight", *(["lm_head.weight"] if version == 1 else [])}
    ids = getattr(model, "hot_token_id", None)
    assert (ids is None) if not drafted else torch.equal(ids, head.draft_ids())


def test_sglang_captures_the_layers_that_the_head_was_trained_on(classes, tmp_path) -> None:
    target = build_tiny("llama", num_hidden_layers=6)
    head = FeatureHead(head_config(target.config, 3, captured_layers=(1, 3, 6)))
    write_head(head, tmp_path, make_tokenizer(), 3, torch.float32)
    ids = LlamaConfig.from_pretrained(tmp_path).eagle_config["eagle_aux_hidden_state_layer_ids"]
    served = SimpleNamespace(pp_group=SimpleNamespace(is_last_rank=True), model=SimpleNamespace(), config=target.config)
    classes[0].set_eagle3_layers_to_capture(served, ids)
    assert tuple(served.model.layers_to_capture) == head.captured_layers
