"""Feature heads in the formats of other projects: each computes what a plain twin does, or is refused by its format."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from greedy import GREEDY, PROMPTS, assert_decodes, generate
from huggingface_hub import constants
from pairs import edit, into_cache
from plain_logits import head_logits
from reading import Reader
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from decode.core.stop import StopRule
from decode.drafters.model import FeatureDrafter
from decode.drafters.trees import FeatureTreeDrafter
from decode.errors import UserError
from decode.loop import Method
from decode.models.check import open_runner
from decode.models.heads.files import head_kind, load_head
from decode.models.heads.runner import HeadRunner
from decode.models.huggingface import mask_of
from decode.models.open import load_model
from decode.models.sources import INDEX

DRAFTED = 24  # tokens of a reduced vocabulary
WINDOW = 32  # behind which a head with sliding layers drafts nothing
SHAPE = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 64,
    "vocab_size": 48,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
SCALED = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SLIDING = {"layer_types": ["sliding_attention"], "sliding_window": WINDOW, "use_sliding_window": True}
THREE = {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}
NVIDIA = {"use_aux_hidden_state": False, "parallel_draft_step": 1, "parallel_draft_heads_num_layers": 1,
          "use_input_layernorm_in_first_layer": True, "use_last_layernorm": True, "use_mtp_layernorm": False,
          "next_layer_regular": True}  # fmt: skip


def of(architecture: str, **fields: Any) -> dict[str, Any]:
    return {"architectures": [architecture], **fields}


def by_speculators(layer: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """Every key that its version 0.9 writes."""
    verifier = {"architectures": ["LlamaForCausalLM"], "name_or_path": "target"}
    proposed = {"proposal_type": "greedy", "speculative_tokens": 3, "verifier_accept_k": 1}
    methods = {"algorithm": "eagle3", "default_proposal_method": "greedy", "proposal_methods": [proposed]}
    written = {"speculators_model_type": "eagle3", "speculators_version": "0.9.0", "transformers_version": "5.19.0"}
    off = dict.fromkeys(
        ["norm_before_fc", "fc_norm", "norm_output", "embed_requires_grad", "tie_word_embeddings"], False
    )
    absent = {"target_hidden_size": None, "eagle_aux_hidden_state_layer_ids": None}
    written |= (
        off | absent | {"dtype": "bfloat16", "draft_vocab_size": DRAFTED, "transformer_layer_config": SHAPE | layer}
    )
    return of("Eagle3Speculator", **written | {"speculators_config": methods | {"verifier": verifier}} | fields)


def by_specforge(**fields: Any) -> dict[str, Any]:
    """What its templates hold, which its exports keep, and what transformers adds."""
    zeros = {"attention_dropout": 0.0, "pad_token_id": 0}
    written = {"bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.02, "max_window_layers": 36}
    written |= {"attention_bias": False, "mlp_bias": False, "use_sliding_window": False, "sliding_window": 512}
    written |= {"decoder_sparse_step": 1, "pretraining_tp": 1, "target_model_type": "gemma3_text", "use_cache": True}
    written |= {"torch_dtype": "bfloat16", "dtype": "bfloat16", "transformers_version": "5.3.0"}
    return of("LlamaForCausalLMEagle3", **zeros | written | {"draft_vocab_size": DRAFTED} | fields)


FORMATS = {
    # the authors' own: the architecture of the target, any number of layers
    "EAGLE": of("LlamaForCausalLM", num_hidden_layers=40, draft_vocab_size=DRAFTED),
    "SGLang": of("LlamaForCausalLMEagle3", eagle_config=THREE, head_dim=12, hidden_act="gelu_pytorch_tanh"),
    "SpecForge": by_specforge(eagle_config=THREE, rope_scaling={}),
    "SpecForge 3.1": by_specforge(
        fc_norm=True, norm_output=True, rope_theta=5e5, rope_scaling=SCALED | {"original_max_position_embeddings": 16}
    ),
    "vLLM": of(
        "Eagle3LlamaForCausalLM",
        eagle_aux_hidden_state_layer_ids=[1, 3],
        eagle_config={"norm_before_fc": True},
        rope_scaling={"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    ),
    "Automodel": of("LlamaEagle3DraftModel", model_type="phi3", attention_bias=True),
    "speculators": by_speculators(
        of("LlamaForCausalLM", layer_types=["full_attention"]),
        norm_before_residual=True,
        eagle_aux_hidden_state_layer_ids=[1, 2, 3],
    ),
    "speculators, norm before fc": by_speculators(
        {"layer_types": ["full_attention"], "sliding_window": 2048},
        norm_before_residual=False,
        norm_before_fc=True,
        norm_output=True,
    ),
    "speculators, Qwen3": by_speculators(  # without norm_before_residual, for which vLLM takes true
        {"model_type": "qwen3", "head_dim": 16} | SLIDING, fc_norm=True, norm_output=True
    ),
    "Qwen2.5-VL": of("Eagle3Qwen2_5vlForCausalLM", rope_scaling={"type": "mrope", "mrope_section": [1, 1, 2]}),
    "NVIDIA, last state": of("LlamaForCausalLMEagle3", eagle_config=NVIDIA),
    "narrow": of("LlamaForCausalLMEagle3", hidden_size=24, target_hidden_size=32, fc_norm=True),
    "EAGLE-1": of("LlamaForCausalLM"),
    "EAGLE-1, Qwen2": of("Qwen2ForCausalLM", model_type="qwen2"),
    "EAGLE-1, vLLM": of("EagleLlamaForCausalLM", model_type="eagle", model=SHAPE),
}
PREFIX = {"Automodel": "model."}
LAYER = dict.fromkeys([*(name for name in FORMATS if "speculators" in name), "vLLM", "Automodel"], "layers.0.")
OWN_EMBEDDING = ("EAGLE", "SpecForge", "speculators", "speculators, Qwen3", "narrow", "EAGLE-1")
SHARED_HEAD = ("Qwen2.5-VL",)


def flat(format: str) -> dict[str, Any]:
    fields = FORMATS[format]
    return SHAPE | fields | fields.get("transformer_layer_config", {})


def head_dim(fields: dict[str, Any]) -> int:
    return fields.get("head_dim") or fields["hidden_size"] // 4


def captured_of(format: str) -> list[int]:
    """The states that a format reads of a target of four layers."""
    if format.startswith("EAGLE-1") or "last state" in format:
        return [4]
    return {"vLLM": [1, 3]}.get(format, [1, 2, 3])


def indexed(folder: Path) -> None:
    """Writes the index of a folder's shards."""
    names = {name: file.name for file in sorted(folder.glob("*.safetensors")) for name in load_file(file)}
    (folder / INDEX).write_text(json.dumps({"weight_map": names}))


def publish(folder: Path, target: PreTrainedModel, format: str) -> dict[str, Tensor]:
    """Write a random head in a format; returns its tensors without prefixes, the layer's without its name."""
    fields, first, generator = flat(format), format.startswith("EAGLE-1"), torch.Generator().manual_seed(4)
    width, d = fields["hidden_size"], head_dim(fields)
    rows, read = len(captured_of(format)) * 32, width if first else 2 * width
    norms = ["post_attention_layernorm", *([] if first else ["input_layernorm", "hidden_norm"])]
    qkv = {"q": 4 * d, "k": 2 * d, "v": 2 * d}
    shapes = {f"self_attn.{name}_proj.weight": (n, read) for name, n in qkv.items()}
    shapes |= {f"{name}.weight": (width,) for name in norms} | {"self_attn.o_proj.weight": (width, 4 * d)}
    shapes |= {f"mlp.{name}_proj.weight": (48, width) for name in ("gate", "up")}
    shapes["mlp.down_proj.weight"] = (width, 48)
    if format in ("Automodel", "EAGLE-1, Qwen2"):
        shapes |= {f"self_attn.{name}_proj.bias": (n,) for name, n in qkv.items()}
    if format == "Automodel":
        shapes["self_attn.o_proj.bias"] = (width,)
    if fields["model_type"] == "qwen3":
        shapes |= {"self_attn.q_norm.weight": (d,), "self_attn.k_norm.weight": (d,)}
    outside = {"fc.weight": (width, 2 * width if first else rows)}
    if format == "EAGLE-1":
        outside["fc.bias"] = (width,)
    if not first:
        outside |= {"norm.weight": (width,)}
        if format not in SHARED_HEAD:
            outside["lm_head.weight"] = (fields.get("draft_vocab_size") or 48, width)
    if "last state" in format:
        del outside["fc.weight"]
    if fields.get("fc_norm"):
        outside |= {f"fc_norm.{i}.weight": (32,) for i in range(len(captured_of(format)))}
    if (fields | fields.get("eagle_config", {})).get("norm_before_fc"):
        outside["input_norm.weight"] = (rows,)
    if format in OWN_EMBEDDING:
        outside["embed_tokens.weight"] = (48, width)
    state = {}
    for name, shape in (shapes | outside).items():
        noise = torch.randn(shape, generator=generator, dtype=target.dtype)
        spread = 0.1 if first else 0.4  # EAGLE-1's states have no norm
        state[name] = 1 + 0.1 * noise if "norm" in name else spread * noise
    if fields.get("draft_vocab_size") == DRAFTED:
        ids = torch.randperm(48, generator=generator)[:DRAFTED].sort()[0]
        state["d2t"] = ids - torch.arange(DRAFTED)
        state["t2d"] = torch.zeros(48, dtype=torch.bool).index_fill(0, ids, True)
    files = {}
    for name, tensor in state.items():
        layer = (LAYER.get(format, "layers.0." if first else "midlayer.")) if name in shapes else ""
        files[("" if name in ("lm_head.weight", "d2t", "t2d") else PREFIX.get(format, "")) + layer + name] = tensor
    if format == "EAGLE-1, vLLM":
        files["lm_head.weight"] = target.get_output_embeddings().weight.detach().clone()
    if format == "speculators":
        files["verifier_norm.weight"] = torch.ones(width)
    folder.mkdir(exist_ok=True)
    half = len(files) // 2  # two shards
    for i, part in enumerate((list(files)[:half], list(files)[half:])):
        save_file({name: files[name] for name in part}, folder / f"model-0000{i + 1}-of-00002.safetensors")
    indexed(folder)
    nested = {"transformer_layer_config", "model"} & FORMATS[format].keys()
    (folder / "config.json").write_text(json.dumps(FORMATS[format] if nested else SHAPE | FORMATS[format]))
    return state


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * weight


@torch.no_grad()
def twin(state: dict[str, Tensor], format: str, target: PreTrainedModel, ids: list[int], true: int) -> list[Tensor]:
    """Logits in the target's vocabulary behind each token from number `true` on, as vLLM computes them.

    The first `true - 1` pairs have features of the target, the others the head's own states.
    """
    fields, first = flat(format), format.startswith("EAGLE-1")
    d, eagle = head_dim(fields), fields.get("eagle_config", {})
    out = target(input_ids=torch.tensor([ids]), output_hidden_states=True)
    parts = [out.hidden_states[layer][0] for layer in captured_of(format)]
    table = state.get("embed_tokens.weight", target.get_input_embeddings().weight)
    if fields.get("fc_norm"):
        parts = [rms(part, state[f"fc_norm.{i}.weight"]) for i, part in enumerate(parts)]
    x = torch.cat(parts, -1)
    if (fields | eagle).get("norm_before_fc"):
        x = rms(x, state["input_norm.weight"])
    if not first and "last state" not in format:
        x = x @ state["fc.weight"].T
    hidden, found = list(x[: true - 1]), []
    config = {key: fields[key] for key in ("rope_theta", "rope_scaling", "max_position_embeddings") if key in fields}
    if fields.get("rope_scaling", {}).get("type") == "mrope":
        del config["rope_scaling"]
    rotary = LlamaRotaryEmbedding(LlamaConfig(num_attention_heads=4, head_dim=d, **config))

    def product(name: str, x: Tensor) -> Tensor:
        return F.linear(x, state[f"{name}.weight"], state.get(f"{name}.bias"))

    while True:
        h, e = torch.stack(hidden), F.embedding(torch.tensor(ids[1 : len(hidden) + 1]), table)
        n = len(h)
        if first:
            residual = y = product("fc", torch.cat([e, h], -1))
        else:
            normed = rms(h, state["hidden_norm.weight"])
            before = fields.get("norm_before_residual", "speculators" in format)
            residual, y = normed if before else h, torch.cat([rms(e, state["input_layernorm.weight"]), normed], -1)
        cos, sin = (part[0].to(h.dtype) for part in rotary(h, position_ids=torch.arange(n)[None]))
        heads = {}
        for name, count in (("q", 4), ("k", 2), ("v", 2)):
            part = product(f"self_attn.{name}_proj", y).view(n, count, d).transpose(0, 1)
            if f"self_attn.{name}_norm.weight" in state:
                part = rms(part, state[f"self_attn.{name}_norm.weight"])
            if name != "v":
                part = part * cos + torch.cat([-part[..., d // 2 :], part[..., : d // 2]], -1) * sin
            heads[name] = part.repeat_interleave(4 // count, 0)
        scores = (heads["q"] @ heads["k"].mT / d**0.5).masked_fill(~torch.ones(n, n).tril().bool(), -torch.inf)
        attended = (scores.softmax(-1) @ heads["v"]).transpose(0, 1).reshape(n, -1)
        z = residual + product("self_attn.o_proj", attended)
        y = rms(z, state["post_attention_layernorm.weight"])
        act = F.silu if fields["hidden_act"] == "silu" else lambda x: F.gelu(x, approximate="tanh")
        z = (z + product("mlp.down_proj", act(product("mlp.gate_proj", y)) * product("mlp.up_proj", y)))[-1]
        final = z if first else rms(z, state["norm.weight"])
        logits = final @ state.get("lm_head.weight", target.get_output_embeddings().weight).T
        if "d2t" in state:
            place = torch.arange(DRAFTED) + state["d2t"]
            logits = logits.new_full((48,), -torch.inf).index_copy(0, place, logits)
        found.append(logits)
        if len(hidden) + 1 == len(ids):
            return found
        hidden.append(final if fields.get("norm_output") else z)


@pytest.fixture
def target(tiny) -> PreTrainedModel:
    return tiny("llama", num_hidden_layers=4)


@pytest.mark.parametrize(
    ("family", "format"),
    # engines give a head Gemma's embedding without its scale
    [*(("llama", format) for format in FORMATS), ("gemma2", "vLLM"), ("qwen3", "SpecForge 3.1")],
)
def test_a_published_head_drafts_what_its_network_says(family: str, format: str, tiny, tmp_path: Path) -> None:
    more = {"final_logit_softcapping": None} if family == "gemma2" else {}
    target = tiny(family, num_hidden_layers=4, **more)
    state = publish(tmp_path, target, format)
    assert head_kind(tmp_path)
    runner = HeadRunner(load_head(tmp_path, target), target, "on" if format in ("EAGLE", "EAGLE-1") else "off")
    ids = PROMPTS[1] + [5, 6, 2, 7]
    start = len(PROMPTS[1])
    assert runner.limit == (WINDOW if format == "speculators, Qwen3" else 64)
    wanted = torch.stack(twin(state, format, target, ids, start))
    source, head = Reader(open_runner(target)), Reader(runner)
    assert list(runner.head.captured_layers) == captured_of(format)
    source.read(ids[: start - 1], head=0, capture=runner.head.captured_layers)
    head.cache.settle(source.out.captured)
    head.read(ids[: start - 1], head=0)
    rows = torch.cat([head.read([token], head=1) for token in ids[start - 1 :]])
    torch.testing.assert_close(rows, wanted, rtol=1e-3, atol=1e-3)
    for depth in (1, 3):  # teacher forcing, which offline acceptance reads
        row = head_logits(runner.head, target, [*ids[: start + depth - 1], 0], start + depth - 1, depth)[0]
        torch.testing.assert_close(row, wanted[depth - 1], rtol=1e-3, atol=1e-3)
    if format not in ("SpecForge 3.1", "EAGLE-1", "narrow"):
        return
    source = open_runner(target)
    drafters = FeatureDrafter(runner, source, GREEDY), FeatureTreeDrafter(runner, source, GREEDY, width=3, nodes=8)
    for drafter in drafters:
        trace = assert_decodes(source, Method("", drafter, StopRule(4)), generate(target, PROMPTS[0]), PROMPTS[0])
        assert sum(r.drafted for r in trace) > 0


OTHER_FORMATS = [
    ({"architectures": ["PEagleDraftModel"]}, "P-EAGLE"),
    ({"architectures": ["PeagleSpeculator"], "speculators_model_type": "peagle"}, "P-EAGLE"),
    ({"architectures": ["DFlashDraftModel"], "dflash_config": {"projector_type": "domino"}}, "Domino"),
    ({"medusa_num_heads": 3, "base_model_name_or_path": "target"}, "Medusa"),
    ({"architectures": ["DeepSeekMTPModel"], "model_type": "deepseek_mtp"}, "MTP"),
    ({"architectures": ["MTPDraftModel"], "speculators_model_type": "mtp"}, "MTP"),
    ({"architectures": ["XPressSpeculator"], "speculators_model_type": "xpress", "xpress_rank": 256}, "XPress"),
    ({"architectures": ["LlamaForCausalLM"], "pard_token": 47, "spd_type": "pard2"}, "PARD-2"),
    ({"architectures": ["MLPSpeculatorPreTrainedModel"], "model_type": "mlp_speculator"}, "MLPSpeculator"),
    ({"architectures": ["Eagle2_5_VLForConditionalGeneration"]}, ""),  # models of their own
    ({"model_type": "qwen3"}, ""),
]


def test_another_format_of_drafts_is_refused_by_its_name(target, tmp_path) -> None:
    for fields, told in OTHER_FORMATS:
        (tmp_path / "config.json").write_text(json.dumps(fields))
        assert bool(head_kind(tmp_path)) == bool(told)
        with pytest.raises(UserError, match=f"in the format of {told} .*train one" if told else "no safetensors file"):
            load_head(tmp_path, target)


UNREAD = [
    ({"architectures": ["Eagle3DeepseekV2ForCausalLM"]}, {"midlayer.self_attn.kv_b_proj.weight": (4, 4)}, "kv_b_proj"),
    ({"num_hidden_layers": 2}, {"layers.1.mlp.up_proj.weight": (48, 32)}, r"layers\.1\."),
    ({}, {"mask_hidden": (1, 96)}, r"(?s)Unexpected key.*mask_hidden"),
    ({}, {"fc.weight": (32, 64)}, "size mismatch"),
    ({"eagle_config": {"parallel_draft_step": 4}}, {}, "parallel_draft_step 4"),
    ({"layer_types": ["sliding_attention"]}, {}, "a sliding layer without a window"),
    ({"layer_types": ["chunked_attention"]}, {}, "layer_types {'chunked_attention'}, with which"),
    ({"residual_multiplier": 0.5}, {}, r"residual_multiplier 0\.5, with which.*can be removed"),
    ({"eagle_config": {"use_mtp_layernorm": True}}, {}, "use_mtp_layernorm True, with which"),
    ({"eagle_config": {"use_last_layernorm": False}}, {}, "use_last_layernorm False, with which"),
    ({"is_causal": True}, {}, "is_causal True, with which"),
    ({"eagle_aux_hidden_state_layer_ids": [1, 2, 4]}, {}, r"layers \[1, 2, 4\] of a target of 4"),
    ({"hidden_size": 64}, {}, "width 64 and 48 tokens"),
    ({"fc_norm": True}, {}, r"(?s)Missing key.*fc_norm\.0\.weight"),
    ({"vocab_size": None}, {}, "does not say its vocab_size"),
]


def test_what_a_head_has_beside_the_network_is_refused(target, tmp_path) -> None:
    publish(tmp_path, target, "SGLang")
    config = json.loads((tmp_path / "config.json").read_text())
    for fields, tensors, told in UNREAD:
        (tmp_path / "config.json").write_text(json.dumps(config | fields))
        save_file({name: torch.zeros(shape) for name, shape in tensors.items()}, tmp_path / "more.safetensors")
        indexed(tmp_path)
        with pytest.raises(UserError, match=told):
            load_head(tmp_path, target)


def test_a_published_pard_draft_is_a_language_model_that_drafts_in_one_forward(tiny, tmp_path: Path) -> None:
    model = tiny("llama")
    model.save_pretrained(tmp_path)
    edit(tmp_path / "config.json", pard_token=47, spd_type="pard")
    assert not head_kind(tmp_path)
    again = load_model(tmp_path, device="cpu", dtype="auto")
    assert (mask_of(again), mask_of(open_runner(again)), mask_of(model)) == (47, 47, None)
    assert all(torch.equal(weight, again.state_dict()[name]) for name, weight in model.state_dict().items())


def test_an_embedding_of_the_masked_slots_alone_is_refused(target, tmp_path: Path) -> None:
    publish(tmp_path, target, "vLLM")
    torch.save({"embedding": torch.zeros(32)}, tmp_path / "mask_embedding.pt")
    with pytest.raises(UserError, match=r"mask_embedding\.pt.*train one"):
        load_head(tmp_path, target)


def test_a_copy_of_the_target_s_embedding_is_not_kept(target, tmp_path: Path) -> None:
    publish(tmp_path, target, "SpecForge")
    assert load_head(tmp_path, target).owns_embedding
    table = target.get_input_embeddings().weight.detach().half()
    save_file({"embed_tokens.weight": table}, tmp_path / "model-00003.safetensors")
    indexed(tmp_path)
    head = load_head(tmp_path, target)
    assert (head.embed_tokens, head.owns_embedding) == (None, False)


def test_a_table_of_tokens_that_leads_elsewhere_is_refused(target, tmp_path) -> None:
    """Of ids instead of distances, of fractions, to one token twice, and out of the vocabulary."""
    table = publish(tmp_path, target, "SpecForge 3.1")["d2t"]
    file = next(file for file in tmp_path.glob("*.safetensors") if "d2t" in load_file(file))
    for other in (table + torch.arange(DRAFTED), table.float(), -torch.arange(DRAFTED), table + 40):
        save_file(load_file(file) | {"d2t": other}, file)
        with pytest.raises(UserError, match=r"d2t|bincount"):
            load_head(tmp_path, target)


def test_a_head_on_the_hub_is_opened_by_its_name(target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    publish(tmp_path / "head", target, "speculators")
    into_cache(tmp_path / "hub", "org/head", tmp_path / "head")
    assert head_kind("org/head")
    assert load_head("org/head", target).normed_residual
    assert not head_kind("org/other")
