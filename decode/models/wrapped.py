"""Language models in another form: inside a model that reads images or audio too, or as an adapter of a base."""

import copy
import json
import os
import re
from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModel,
    PretrainedConfig,
    PreTrainedModel,
    __version__,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import find_adapter_config_file

from decode.errors import UserError


def language_config(config: PretrainedConfig) -> PretrainedConfig:
    """The configuration of a causal language model: the model's own, or that of the decoder of one that also sees.

    The decoder of a model that reads images or audio may have no language model's class of its own. Then it is that of
    the family of text models with the beginning of its name whose parameters have the same names and shapes, as Qwen2
    for Qwen2.5-VL: positions in several dimensions are the ordinary ones where there is only text.

    Raises:
        UserError: transformers has no class of a causal language model for it.
    """
    text = config.get_text_config()
    inside = text is not config and not config.is_encoder_decoder
    if type(text) in MODEL_FOR_CAUSAL_LM_MAPPING and (inside or text is config):
        return text
    if getattr(config, "auto_map", None):
        return config
    fields = {key: value for key, value in text.to_dict().items() if key not in ("model_type", "architectures")}
    # what such decoders do where their configuration says nothing, and text models only where it does
    fields = {
        "head_dim": getattr(text, "hidden_size", 0) // getattr(text, "num_attention_heads", 1),
        "norm_topk_prob": True,
    } | fields
    if fields.get("rope_parameters"):
        fields["rope_parameters"] = {k: v for k, v in fields["rope_parameters"].items() if not k.startswith("mrope")}
    names = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, key=len, reverse=True)
    for name in names:
        if inside and re.match(name.replace("_", ".*_"), text.model_type):
            try:
                found = AutoConfig.for_model(name, **fields)
                if _shapes(found) == _shapes(text):
                    return found
            except Exception:  # fields or shapes that this family refuses in one of many ways
                continue
    raise UserError(
        f"{(config.architectures or [type(config).__name__])[0]} ({config.model_type}) cannot be opened: transformers "
        f"{__version__} has no causal language model for {text.model_type}. Take a text model, such as one of Llama, "
        "Qwen, Mistral, Gemma, Phi or GPT-NeoX, or a model that reads images around one"
    )


def _shapes(config: PretrainedConfig) -> dict[str, torch.Size]:
    """Names and shapes of the weights of a model without its head."""
    with torch.device("meta"):
        return {name: weight.shape for name, weight in AutoModel.from_config(config).state_dict().items()}


@torch.no_grad()
def language_model(model: PreTrainedModel, **options: Any) -> PreTrainedModel:
    """The language model in a model that reads images or audio too, as a model of its own; others are returned as is.

    Quantised models are returned whole: with text alone, they decode as they are.

    Args:
        model: a model.
        options: of transformers' ``from_pretrained``, such as ``device_map``.

    Raises:
        UserError: there is none, or its logits are not those of the whole.
    """
    if model.config.get_text_config() is model.config or getattr(model, "hf_quantizer", None) is not None:
        return model
    config = copy.deepcopy(language_config(model.config))
    decoder: Any = model.get_decoder()
    table: Any = model.get_input_embeddings()
    head: Any = model.get_output_embeddings()
    if decoder.get_output_embeddings() is not None:
        decoder = decoder.base_model
    config.tie_word_embeddings = head.weight is table.weight
    kind = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    with torch.device("meta"):
        empty = kind(config)
    name = next(name for name, module in empty.named_modules() if module is empty.get_output_embeddings())
    weights = {f"{kind.base_model_prefix}.{key}": weight for key, weight in decoder.state_dict().items()}
    weights |= {f"{name}.{key}": weight for key, weight in head.state_dict().items()}
    found: PreTrainedModel = kind.from_pretrained(None, config=config, state_dict=weights, dtype=model.dtype, **options)
    found.generation_config = copy.deepcopy(model.generation_config)
    ids, why = (torch.arange(8) * 7 % table.num_embeddings)[None], ""
    try:
        one, other = (m.eval()(input_ids=ids.to(m.device), use_cache=False).logits.float() for m in (model, found))
        gap = float((one - other.to(one)).abs().max() / one.abs().max().clamp_min(1e-6))
        if not gap < (1e-4 if model.dtype == torch.float32 else 5e-2):
            why = f"opened as {kind.__name__} it gives other logits than the whole model, by {gap:.2g} of the largest"
    except Exception as error:  # such as a forward that demands images
        why = f"the whole model cannot be compared with it on text alone ({type(error).__name__}: {error})"
    if why:
        raise UserError(
            f"the language model of {type(model).__name__} ({model.config.model_type}) cannot be used by itself: "
            f"{why}. Use model.generate for it, or take a text model"
        )
    return found


# -- adapters ---------------------------------------------------------------------------------------------------------


def pinned(name: str | os.PathLike[str]) -> tuple[str, dict[str, str]]:
    """A Hub name and the revision after its @, as arguments of transformers; folders stay as they are."""
    repository, at, revision = str(name).rpartition("@")
    return (repository, {"revision": revision}) if at and not Path(name).exists() else (str(name), {})


def adapter_base(name: str | os.PathLike[str]) -> str | None:
    """The model that an adapter (peft) was trained on, where the name is an adapter's; else None.

    Raises:
        UserError: the adapter does not name it.
    """
    folder, revision = pinned(name)
    if folder.lower().endswith(".gguf") or (Path(folder) / "config.json").exists():
        return None
    local = Path(folder) / "adapter_config.json"
    path = local if local.is_file() else None if Path(folder).is_dir() else _adapter_config(folder, **revision)
    base: str | None = json.loads(Path(path).read_text(encoding="utf-8")).get("base_model_name_or_path") if path else ""
    if base is None:
        raise UserError(
            f"{str(name)!r} holds an adapter, and its adapter_config.json names no base_model_name_or_path: write the "
            "model that it was trained on there"
        )
    return base or None


@cache
def _adapter_config(folder: str, revision: str | None = None) -> str | None:
    """The file of an adapter's configuration; the Hub is asked once."""
    try:
        found: str | None = find_adapter_config_file(folder, revision=revision)
    except OSError:  # no such model, which opening it will say
        found = None
    return found


def with_adapter(model: PreTrainedModel, name: str | os.PathLike[str]) -> PreTrainedModel:
    """A model with an adapter (peft) merged into its weights."""
    from peft import PeftModel, get_peft_model_state_dict, load_peft_weights

    folder, revision = pinned(name)
    own, why = set(model.state_dict()), ""
    try:
        adapted = PeftModel.from_pretrained(model, folder, **revision)
        seen = set(load_peft_weights(folder, device="cpu", **revision))
        known = set(get_peft_model_state_dict(adapted, save_embedding_layers=False))
        strange = {key for key in seen - known if key.removeprefix("base_model.model.") not in own} | known - seen
        if getattr(model, "hf_quantizer", None) is not None:
            why = "the base's weights are quantised, and the sum would be rounded"
        elif strange:
            why = f"{len(strange)} of its tensors do not fit, such as {min(strange)}"
        else:
            model = adapted.merge_and_unload()
    except Exception as error:  # kinds without a merge, other shapes, damaged files
        why = f"{type(error).__name__}: {str(error).strip() or 'no reason given'}".splitlines()[0]
    if why:
        raise UserError(
            f"the adapter {str(name)!r} cannot be merged into its base {type(model).__name__}: {why}. Check "
            "base_model_name_or_path in its adapter_config.json, or merge it where it was trained (merge_and_unload) "
            "and give the saved model"
        )
    return model
