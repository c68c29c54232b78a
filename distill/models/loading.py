"""Models for training: built from a shape, or loaded from a folder or the Hub."""

from pathlib import Path

import torch
from huggingface_hub import constants
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from decode.core.errors import UserError
from decode.models.config_from_shape import config_for
from decode.models.loading.loading_errors import OFFLINE
from decode.models.loading.open_model import load_config, load_model, pinned
from distill.config.language_models import Architecture, ModelSettings

HUB_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.py"]
"""What a model and its tokenizer need of a Hub repository."""


def build_config(shape: Architecture, vocab: int, tokenizer: PreTrainedTokenizerBase | None = None) -> PretrainedConfig:
    """The configuration of a model from scratch, its special tokens taken from the tokenizer.

    Raises:
        UserError: A family that transformers does not know, or fields that it refuses.
    """
    return config_for(**vars(shape), vocab=vocab, tokenizer=tokenizer)


def build_model(
    shape: Architecture, vocab: int, tokenizer: PreTrainedTokenizerBase | None, seed: int
) -> PreTrainedModel:
    """A model with random float32 weights that depend on the seed alone."""
    config = build_config(shape, vocab, tokenizer)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{shape.model_type} has no causal language model: {error}") from error
    return model


def load_or_build(
    settings: ModelSettings, tokenizer: PreTrainedTokenizerBase, vocab: int, seed: int
) -> PreTrainedModel:
    """The model that a stage trains, in float32: random weights, or a folder's or Hub repository's."""
    if settings.model is None:
        return build_model(settings.architecture, vocab, tokenizer, seed)
    return load_model(settings.model, device="cpu", dtype="float32", trust_remote_code=settings.trust_remote_code)


def source_folder(model: str) -> Path:
    """The folder of a model that is used as it is; a Hub repository is downloaded to the usual cache.

    Raises:
        UserError: there is no such model.
    """
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        name, revision = pinned(model)
        return Path(snapshot_download(name, allow_patterns=HUB_FILES, revision=revision.get("revision")))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise _unreachable(model, error) from error


def count_layers(settings: ModelSettings, vocab: int) -> int:
    """Layers of a model that is not there yet."""
    return int(config_of(settings, vocab).get_text_config().num_hidden_layers)


def max_positions(settings: ModelSettings, vocab: int) -> int | None:
    """Longest text of a model that is not there yet, in tokens; None where its family knows no limit."""
    limit = getattr(config_of(settings, vocab).get_text_config(), "max_position_embeddings", None)
    return None if limit is None else int(limit)


def count_parameters(settings: ModelSettings, vocab: int) -> int:
    """Parameters of a model that is not there yet, without allocating it."""
    config = config_of(settings, vocab)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=settings.trust_remote_code)
    return sum(parameter.numel() for parameter in model.parameters())


def config_of(settings: ModelSettings, vocab: int) -> PretrainedConfig:
    """The configuration of a model that is not there yet; ``vocab`` is for one from scratch."""
    if settings.model is None:
        return build_config(settings.architecture, vocab)
    return load_config(settings.model, trust_remote_code=settings.trust_remote_code)


def _unreachable(model: str, error: Exception) -> UserError:
    if constants.HF_HUB_OFFLINE:
        return UserError(f"no model can be found at {model!r}: {OFFLINE}")
    return UserError(
        f"no model can be found at {model!r}: give a folder with a config.json, or the name of a Hub repository that "
        f"can be reached from here ({str(error).strip().splitlines()[0]})"
    )


def checkpoint_layers(model: PreTrainedModel) -> None:
    """Lets the model compute its layers' activations again in the backward pass instead of keeping them.

    Raises:
        UserError: Its architecture cannot.
    """
    if not model.supports_gradient_checkpointing:
        raise UserError(
            f"{type(model).__name__} has no gradient checkpointing: set trainer.gradient_checkpointing to false"
        )
    if hasattr(model, "activation_checkpointing_enable"):  # its name from transformers 5.23 on
        model.activation_checkpointing_enable({"use_reentrant": False})
    else:
        model.gradient_checkpointing_enable({"use_reentrant": False})


def ready_to_save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """In evaluation mode on the CPU, with the special tokens that generation needs."""
    model = model.eval().requires_grad_(True).cpu()
    if model.generation_config is None or model.generation_config.eos_token_id is None:
        model.generation_config = GenerationConfig(
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            bos_token_id=tokenizer.bos_token_id,
        )
    return model
