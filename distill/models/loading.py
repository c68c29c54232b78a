"""Models for training: built from a shape or loaded, and run without computing logits that no loss needs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from decode.core.errors import UserError
from decode.models.open import load_model
from decode.models.structure import decoder_layers
from decode.models.tiny import config_for
from distill.config.settings import Architecture, LoraSettings, ModelSettings

MIXTURE = "experts", "gate", "router"
"""Parts of an MLP that is a mixture of experts: what it returns depends on the family, and on all tokens."""

HUB_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
"""What a model and its tokenizer need of a Hub repository."""


def build_config(shape: Architecture, vocab: int, tokenizer: PreTrainedTokenizerBase | None = None) -> PretrainedConfig:
    """The configuration of a model from scratch, its special tokens taken from the tokenizer.

    Raises:
        UserError: A family that transformers does not know, or fields that it refuses.
    """
    return config_for(
        shape.model_type,
        width=shape.hidden_size,
        layers=shape.layers,
        heads=shape.heads,
        vocab=vocab,
        kv_heads=shape.kv_heads,
        inner=shape.intermediate_size,
        positions=shape.positions,
        tied=shape.tie_embeddings,
        tokenizer=tokenizer,
        extra=shape.extra,
    )


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


def obtain(settings: ModelSettings, tokenizer: PreTrainedTokenizerBase, vocab: int, seed: int) -> PreTrainedModel:
    """The model that a stage trains, in float32: random weights, or a folder's or Hub repository's."""
    if settings.model is None:
        return build_model(settings.architecture, vocab, tokenizer, seed)
    return load_model(settings.model, dtype="float32", trust_remote_code=settings.trust_remote_code)


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
        return Path(snapshot_download(model, allow_patterns=HUB_FILES))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise _unreachable(model, error) from error


def count_layers(settings: ModelSettings, vocab: int) -> int:
    """Layers of a model that is not there yet."""
    return int(_config_of(settings, vocab).get_text_config().num_hidden_layers)


def count_parameters(settings: ModelSettings, vocab: int) -> int:
    """Parameters of a model that is not there yet, without allocating it."""
    config = _config_of(settings, vocab)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=settings.trust_remote_code)
    return sum(parameter.numel() for parameter in model.parameters())


def _config_of(settings: ModelSettings, vocab: int) -> PretrainedConfig:
    if settings.model is None:
        return build_config(settings.architecture, vocab)
    try:
        return AutoConfig.from_pretrained(settings.model, trust_remote_code=settings.trust_remote_code)
    except (OSError, ValueError) as error:
        raise _unreachable(settings.model, error) from error


def _unreachable(model: str, error: Exception) -> UserError:
    return UserError(
        f"no model can be found at {model!r}: give a folder with a config.json, or the name of a Hub repository that "
        f"can be reached from here ({str(error).strip().splitlines()[0]})"
    )


class Head(nn.Module):
    """Last hidden states to logits, for rows gathered beforehand, as the model's own forward does it.

    Honours a bias, a multiplier (Cohere), a divisor (Granite) and soft-capping (Gemma). Shares the model's weights.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        linear = model.get_output_embeddings()
        if linear is None:
            raise UserError(f"{type(model).__name__} has no output head, so it is no causal language model")
        config = model.config.get_text_config()
        self.linear = linear
        self.scale = float(getattr(config, "logit_scale", None) or 1.0) / float(
            getattr(config, "logits_scaling", None) or 1.0
        )
        self.cap = getattr(config, "final_logit_softcapping", None)

    @classmethod
    def of(cls, linear: nn.Linear, scale: float = 1.0, cap: float | None = None) -> Head:
        """A head without a model."""
        head = cls.__new__(cls)
        nn.Module.__init__(head)
        head.linear, head.scale, head.cap = linear, scale, cap
        return head

    @property
    def vocab(self) -> int:
        """Ids that have a logit."""
        return int(self.linear.weight.shape[0])

    def forward(self, hidden: Tensor) -> Tensor:
        """``[rows, hidden] -> [rows, vocab]``."""
        return self.finish(self.linear(hidden))

    def first(self, hidden: Tensor, vocab: int) -> Tensor:
        """The logits of the first ``vocab`` ids only, ``[rows, vocab]``."""
        if vocab == self.vocab:
            return self(hidden)
        bias = self.linear.bias
        return self.finish(
            functional.linear(hidden, self.linear.weight[:vocab], None if bias is None else bias[:vocab])
        )

    def finish(self, products: Tensor) -> Tensor:
        """Multiplier and soft-capping, on the linear layer's output."""
        logits = products if self.scale == 1.0 else products * self.scale
        return torch.tanh(logits / self.cap) * self.cap if self.cap else logits

    def slope(self, logits: Tensor) -> Tensor | float:
        """Derivative of `finish` where it gave these logits: one number, or as many."""
        return self.scale * (1 - (logits / self.cap).square()) if self.cap else self.scale


def last_hidden(model: PreTrainedModel, input_ids: Tensor, mask: Tensor) -> Tensor:
    """Last hidden states, after the final norm, at the positions ``mask [batch, time]``: ``[rows, hidden]``."""
    rows = mask.flatten().nonzero()[:, 0]
    with _last_mlp_at(model, rows, mask.shape):
        output = model.base_model(input_ids=input_ids, use_cache=False)
    return output.last_hidden_state.flatten(0, 1).index_select(0, rows)


@contextmanager
def _last_mlp_at(model: PreTrainedModel, rows: Tensor, shape: torch.Size) -> Iterator[None]:
    """Inside, the last layer's MLP works on these rows alone: nothing reads what it would make of the others.

    On a one-layer draft that saves a tenth of forward and backward. Models whose layers have no module ``mlp``, and
    calls with other shapes, go on as they are.
    """
    mlp = _last_mlp(model)
    if mlp is None or len(rows) in (0, shape.numel()):
        yield
        return
    entered: list[bool] = []

    def gather(_: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...]:
        entered.append(len(given) == 1 and given[0].ndim == 3 and given[0].shape[:2] == shape)
        return (given[0].flatten(0, 1).index_select(0, rows)[None],) if entered[-1] else given

    def scatter(_: nn.Module, __: tuple[Any, ...], made: Tensor) -> Tensor:
        if not entered.pop():
            return made
        return made.new_zeros(shape.numel(), made.shape[-1]).index_copy(0, rows, made[0]).unflatten(0, shape)

    hooks = mlp.register_forward_pre_hook(gather), mlp.register_forward_hook(scatter)
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _last_mlp(model: PreTrainedModel) -> nn.Module | None:
    """The MLP of the last layer, where the family calls it so and it is no mixture of experts."""
    try:
        layer = decoder_layers(model)[-1]
    except UserError:
        return None
    if layer.training and getattr(layer, "gradient_checkpointing", False):
        return None  # it would be computed again without the hooks
    mlp = getattr(layer, "mlp", None)
    return mlp if isinstance(mlp, nn.Module) and not any(hasattr(mlp, name) for name in MIXTURE) else None


@torch.no_grad()
def check_head(model: PreTrainedModel, head: Head) -> None:
    """Make sure that ``head(last_hidden)`` is what the model's own forward computes.

    Raises:
        UserError: An architecture whose logits come from somewhere else too.
    """
    was_training = model.training
    model.eval()
    vocab = model.get_input_embeddings().num_embeddings
    ids = (torch.arange(8, device=model.device) * 7 % vocab)[None]
    wanted = model(input_ids=ids, use_cache=False).logits[0].float()
    got = head(last_hidden(model, ids, torch.ones_like(ids, dtype=torch.bool))).float()
    model.train(was_training)
    tolerance = 1e-4 if model.dtype == torch.float32 else 5e-2
    off = (got - wanted).abs().max() / wanted.abs().max().clamp_min(1.0)
    if not off <= tolerance:
        raise UserError(
            f"{type(model).__name__} does not compute its logits as head(last hidden state) (relative difference "
            f"{off:.1e}), so it cannot be distilled here; please report the model's name"
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


def with_adapter(model: PreTrainedModel, lora: LoraSettings, seed: int) -> Any:
    """Puts a low-rank adapter into the model; only the adapter is trained. Its first weights depend on the seed."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=lora.modules or "all-linear",
        task_type="CAUSAL_LM",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            return get_peft_model(model, config)
        except ValueError as error:
            raise UserError(f"lora.modules is {lora.modules}: {error}") from error


def ready(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """In evaluation mode on the CPU, with the special tokens that generation needs."""
    model = model.eval().requires_grad_(True).cpu()
    if model.generation_config is None or model.generation_config.eos_token_id is None:
        model.generation_config = GenerationConfig(
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            bos_token_id=tokenizer.bos_token_id,
        )
    return model
