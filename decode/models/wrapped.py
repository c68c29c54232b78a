"""Language models in another form: inside a model that reads images or audio too, or as an adapter of a base.

Names on the Hub are split into name and revision here.
"""

import copy
import json
import os
import re
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import constants, get_session, try_to_load_from_cache
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
    """The configuration of a causal language model: the given one, or that of the decoder of a model with more inputs.

    A decoder without a causal class of its own takes that of the text family with the beginning of its name and with
    weights of the same names and shapes, as Qwen2.5-VL's takes Qwen2's: where all is text, positions in several
    dimensions are the ordinary ones.

    Raises:
        UserError: transformers has no such class.
    """
    text = config.get_text_config()
    inside = text is not config and not config.is_encoder_decoder
    if type(text) in MODEL_FOR_CAUSAL_LM_MAPPING and (inside or text is config):
        return text
    if getattr(config, "auto_map", None):  # code of a Hub repository
        return config
    for name in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, key=len, reverse=True) if inside else ():
        if re.match(name.replace("_", ".*_"), text.model_type):
            with suppress(Exception), torch.device("meta"):  # a family refuses fields in many ways
                # what such decoders do unasked comes first
                fields = {"head_dim": text.hidden_size // text.num_attention_heads, "norm_topk_prob": True}
                fields |= {
                    key: value for key, value in text.to_dict().items() if key not in ("model_type", "architectures")
                }
                rope = fields["rope_parameters"]
                fields["rope_parameters"] = {key: rope[key] for key in rope if not key.startswith("mrope")}
                found = AutoConfig.for_model(name, **fields)
                one, other = (AutoModel.from_config(each).state_dict().items() for each in (found, text))
                if {key: weight.shape for key, weight in one} == {key: weight.shape for key, weight in other}:
                    return found
    raise UserError(
        f"{(config.architectures or [type(config).__name__])[0]} ({config.model_type}) cannot be opened: transformers "
        f"{__version__} has no causal language model for {text.model_type}. Take a text model (Llama, Qwen, Mistral, "
        "Gemma, Phi, GPT-NeoX, …), or a model with images around one"
    )


@torch.no_grad()
def language_model(model: PreTrainedModel, **options: Any) -> PreTrainedModel:
    """The language model inside a model with more inputs, sharing its weights; any other model is returned as it is.

    So are quantised ones, which decode as a whole. The options are those of transformers' ``from_pretrained``.

    Raises:
        UserError: there is none, or its logits are not those of the whole.
    """
    if model.config.get_text_config() is model.config or getattr(model, "hf_quantizer", None) is not None:
        return model
    config = copy.deepcopy(language_config(model.config))
    kind = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    decoder: Any = model.get_decoder()
    head: Any = model.get_output_embeddings()
    config.tie_word_embeddings = head.weight is decoder.get_input_embeddings().weight
    with torch.device("meta"):
        empty = kind(config)
    name = next(name for name, module in empty.named_modules() if module is empty.get_output_embeddings())
    base = decoder if decoder.get_output_embeddings() is None else decoder.base_model
    weights = {f"{kind.base_model_prefix}.{key}": weight for key, weight in base.state_dict().items()}
    weights |= {f"{name}.{key}": weight for key, weight in head.state_dict().items()}
    found: PreTrainedModel = kind.from_pretrained(None, config=config, state_dict=weights, dtype=model.dtype, **options)
    found.generation_config = copy.deepcopy(model.generation_config)
    found.config.name_or_path = model.config.name_or_path  # where its next-token layers are read
    ids = (torch.arange(8) * 7 % len(head.weight))[None]
    try:
        one, other = (m.eval()(input_ids=ids.to(m.device), use_cache=False).logits.float() for m in (model, found))
        gap = float((one - other.to(one)).abs().max() / one.abs().max().clamp_min(1e-6))
        why = f"opened as {kind.__name__} it gives other logits than the whole model, by {gap:.2g} of the largest"
    except Exception as error:  # such as a forward that demands images
        gap, why = torch.inf, f"the whole reads no text alone to compare it with ({type(error).__name__}: {error})"
    if not gap < (1e-4 if model.dtype == torch.float32 else 5e-2):
        raise UserError(
            f"the language model of {type(model).__name__} ({model.config.model_type}) cannot be used by itself: "
            f"{why}. Use model.generate for it, or take a text model"
        )
    return found


# -- names on the Hub --------------------------------------------------------------------------------------------------


def pinned(name: str | os.PathLike[str]) -> tuple[str, dict[str, str]]:
    """A Hub name and the revision after its @, as arguments of transformers; folders stay as they are.

    A Hub that does not answer is switched off for this process, whose libraries would repeat each request for 20 s.
    """
    if Path(name).exists():
        return str(name), {}
    constants.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE or not _answers(constants.ENDPOINT)
    repository, at, revision = str(name).rpartition("@")
    return (repository, {"revision": revision}) if at else (str(name), {})


@cache
def _answers(endpoint: str) -> bool:
    """Whether the Hub sends any answer within five seconds."""
    try:
        get_session().head(endpoint, timeout=5)
    except Exception:  # the layers of the network have many
        return False
    return True


# -- adapters ---------------------------------------------------------------------------------------------------------


def adapter_base(name: str | os.PathLike[str]) -> str | None:
    """The model that an adapter (peft) was trained on, where the name is an adapter's; else None.

    Raises:
        UserError: the adapter does not name it.
    """
    folder, revision = pinned(name)
    file: str | None = None
    with suppress(OSError, ValueError):  # nothing of this name, which opening it will say
        cached = None if Path(folder).exists() else try_to_load_from_cache(folder, "config.json", **revision)
        if not isinstance(cached, str) and not (Path(folder) / "config.json").exists():
            file = find_adapter_config_file(folder, **revision)
    base: str | None = json.loads(Path(file).read_text(encoding="utf-8")).get("base_model_name_or_path") if file else ""
    if base is None:
        raise UserError(
            f"{file} has base_model_name_or_path null: name the model there that the adapter was trained on"
        )
    return base or None


def with_adapter(model: PreTrainedModel, name: str | os.PathLike[str]) -> PreTrainedModel:
    """A model with an adapter (peft) merged into its weights."""
    from peft import PeftModel, get_peft_model_state_dict, load_peft_weights

    folder, revision = pinned(name)
    own, why = {f"base_model.model.{key}" for key in model.state_dict()}, "the base's weights are quantised"
    try:
        adapted = PeftModel.from_pretrained(model, folder, **revision)
        known = set(get_peft_model_state_dict(adapted, save_embedding_layers=False))
        if strange := (set(load_peft_weights(folder, "cpu", **revision)) - own) ^ known:
            why = f"{len(strange)} of its tensors do not fit, such as {min(strange)}"
        elif getattr(model, "hf_quantizer", None) is None:
            return adapted.merge_and_unload()
    except Exception as error:  # kinds without a merge, other shapes, damaged files
        why = f"{type(error).__name__}: {error}".splitlines()[0]
    raise UserError(
        f"the adapter {str(name)!r} cannot be merged into its base {type(model).__name__}: {why}. Check "
        "base_model_name_or_path in its adapter_config.json, or merge it where it was trained (merge_and_unload) and "
        "give the saved model"
    )
