"""Opening models, tokenizers, drafts and pairs: the only place that decides device and number format.

Errors are `UserError`s with transformers' own message, and the next step where that message leaves it open.
"""

import warnings
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from pathlib import Path
from threading import RLock
from types import SimpleNamespace
from typing import Any, TypeAlias

import torch
from transformers import (
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    AutoTokenizer,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.generation.logits_process import (
    LogitsProcessor,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    SuppressTokensLogitsProcessor,
)
from transformers.models.auto.tokenization_auto import get_tokenizer_config
from transformers.quantizers.auto import AutoHfQuantizer

from decode.core.draft import Ids
from decode.core.sampling import LogitsWarper
from decode.errors import UserError
from decode.files import Fields
from decode.models.api import Model
from decode.models.check import open_draft_runner, open_runner
from decode.models.heads.eagle import DraftHead
from decode.models.heads.files import head_kind, load_head
from decode.models.heads.mtp import MTP, load_mtp
from decode.models.sources import (
    Name,
    in_parts,
    language_config,
    language_model,
    located,
    read_weights,
    reading,
    tensors_in,
)
from decode.models.tokens import TRAINED, added_ids, turn_end
from decode.options import ChatSettings

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in ("float32", "float64", "bfloat16", "float16")}
"""Number formats by their names in settings; `choose_dtype` decides ``auto``."""

SIXTEEN_BITS = (
    "in 16 bits a forward of several tokens rounds otherwise than one of a single token, so lossless means the "
    "distribution up to that rounding: where two tokens are nearly equally probable, greedy texts may differ from "
    "generate's; --dtype float32 makes them identical"
)


def choose_device(name: str | torch.device) -> torch.device:
    """The device for a setting: ``auto`` is the first CUDA device, without one the CPU.

    Raises:
        UserError: no such device here, or one that exact sampling cannot run on.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UserError(f"device is {name!r}; choose auto, cpu, cuda or cuda:1") from error
    if device.type == "mps":
        raise UserError("device is 'mps', which has no float64, and tokens are drawn in float64; choose cpu")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UserError(f"device is {str(name)!r}, which torch {torch.__version__} does not find; choose cpu or auto")
    return device


def choose_dtype(name: str, device: torch.device) -> str:
    """The number format for a setting: a key of `DTYPES`, or ``auto``.

    ``auto`` is float32 on a CPU; on a GPU it stays ``auto`` and `load_model` takes the format of the checkpoint.

    Raises:
        UserError: an unknown name.
    """
    if name not in (*DTYPES, "auto"):
        raise UserError(f"dtype is {name!r}; choose auto or one of {', '.join(DTYPES)}")
    return "float32" if name == "auto" and device.type == "cpu" else name


def placement(model: PreTrainedModel) -> str:
    """The device and number format of an opened model, in a sentence for the terminal; with what 16 bits mean."""
    device, name = model.get_input_embeddings().weight.device, str(model.dtype).removeprefix("torch.")
    where = f"{device} ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else str(device)
    return f"on {where}, {name}" + (f": {SIXTEEN_BITS}" if model.dtype.itemsize == 2 else "")


# -- files -------------------------------------------------------------------------------------------------------------


def load_model(
    name: Name,
    *,
    device: str | torch.device,
    dtype: str,
    device_map: str | None = None,
    trust_remote_code: bool = False,
    wanted: str | None = None,
    **options: Any,
) -> PreTrainedModel:
    """A causal language model in evaluation mode; of a model that reads images or audio too, the language model alone.

    Args:
        name: folder, Hub name or GGUF file.
        device: the model's device; ignored with a `device_map`.
        dtype: one of `DTYPES`, or ``auto`` (see `choose_dtype`).
        device_map: passed to transformers, to spread a model over several devices.
        trust_remote_code: run code of the Hub repository.
        wanted: pattern of the names in a folder's files of tensors that are read; the other ones are on the meta
            device, as are quantised ones. None: all are read.
        options: further arguments of transformers' ``from_pretrained``.

    Raises:
        UserError: the model cannot be found or read, its files do not fit each other, or the device or number format
            is unknown.
    """
    device, extra = choose_device(device), dict(options)
    number_format = choose_dtype(dtype, device)
    with reading(name, "model"):
        folder = located(name, weights=True)
        auto, config, quantised = _described(folder, trust_remote_code)
        tensors, at = tensors_in(folder), Fields()
        inside = auto is AutoModelForMultimodalLM and not (quantised and wanted is None)
        if wanted is not None:
            vars(config).pop("quantization_config", None)
            with torch.device("meta"):
                empty = auto.from_config(config, trust_remote_code=trust_remote_code)
            auto = type(empty)
            at = {"config": config, "state_dict": in_parts(tensors, empty, wanted, quantised=quantised)}
        # quantised weights do not move later; others go straight to a GPU, without a whole copy in the host's memory
        if device_map or quantised or "quantization_config" in options or (device.type != "cpu" and not inside):
            extra["device_map"] = device_map or {"": device}
        options = at | {"dtype": DTYPES.get(number_format, number_format), "trust_remote_code": trust_remote_code}
        model = read_weights(auto, folder, name, tensors, quantised=quantised, **options, **({} if inside else extra))
        if inside:
            model = language_model(model, **extra)
        if quantised and getattr(model, "hf_quantizer", None) is None:  # transformers made plain weights of them
            _made_plain(model, options["dtype"])
        model.config.name_or_path = model.name_or_path = str(folder)  # where its next-token layers are read
        if wanted is not None:
            model.generation_config = files_of(folder, trust_remote_code=trust_remote_code).generation_config
        elif "device_map" not in extra:
            model = model.to(device)
    if model.base_model is model and isinstance(getattr(model, "model", None), PreTrainedModel):
        model.base_model_prefix = "model"  # Llama 4's class names another
    head = model.get_output_embeddings()
    if model.config.tie_word_embeddings and getattr(head, "weight", None) is not model.get_input_embeddings().weight:
        model.config.tie_word_embeddings = False  # the file holds two: transformers keeps both, an engine would tie
    return model.eval()


def _made_plain(model: PreTrainedModel, dtype: torch.dtype | str) -> None:
    """Give weights that were unpacked one number format, and have them saved as they are; buffers stay exact."""
    model.config.dtype = dtype = dtype if isinstance(dtype, torch.dtype) else model.dtype
    for weight in model.parameters():
        weight.data = weight.data.to(dtype)
    changes = getattr(model, "_weight_conversions", None) or []  # which saving reverses
    packing = [each for each in changes if any(hasattr(op, "hf_quantizer") for op in getattr(each, "operations", ()))]
    model._weight_conversions = [each for each in changes if each not in packing] or None


def _described(folder: Path, trust_remote_code: bool) -> tuple[Any, PretrainedConfig, bool]:
    """The class that reads what a folder holds, its configuration, and whether it is quantised.

    Raises:
        UserError: it is quantised in a way that transformers would ignore.
    """
    config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    quantised, other = getattr(config, "quantization_config", None), folder / "hf_quant_config.json"
    if not AutoHfQuantizer.supports_quant_method(quantised) if quantised else other.exists():
        method = quantised["quant_method"] if quantised else f"that {other.name} describes"
        raise UserError(
            f"the model {str(folder)!r} is quantised by the method {method}, which transformers does not read: take "
            "its files in 16 bits, or by a method that transformers reads (fp8, compressed-tensors, gptq, awq)"
        )
    inside = language_config(config) is not config and type(config) in MODEL_FOR_MULTIMODAL_LM_MAPPING
    return AutoModelForMultimodalLM if inside else AutoModelForCausalLM, config, bool(quantised)


def load_tokenizer(name: Name, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The tokenizer of a folder or Hub name, or of a GGUF file.

    Raises:
        UserError: it cannot be found or read.
    """
    with reading(name, "tokenizer"):
        return AutoTokenizer.from_pretrained(located(name), trust_remote_code=trust_remote_code)


def trained_prompts(name: Name) -> Fields:
    """`TRAINED` of the files of a draft, or of a folder of probes; empty if there is none. Other fields are ignored."""
    with suppress(OSError, UserError):  # what is not there is refused where it is opened
        trained = get_tokenizer_config(located(name)).get(TRAINED) or {}
        return {key: trained[key] for key in vars(ChatSettings()) if key in trained}
    return {}


def load_config(name: Name, *, trust_remote_code: bool = False) -> PretrainedConfig:
    """The configuration of the model that `load_model` opens, without its weights.

    Raises:
        UserError: it cannot be found or read.
    """
    with reading(name, "model"):
        return language_config(_described(located(name), trust_remote_code)[1])


def files_of(name: Name, *, trust_remote_code: bool = False) -> Any:
    """The ``config`` of a model that is not loaded, and its ``generation_config``, as transformers reads them."""
    config = load_config(name, trust_remote_code=trust_remote_code)
    try:
        generation = GenerationConfig.from_pretrained(located(name))
    except OSError:  # it has none
        generation = GenerationConfig.from_model_config(config)
    return SimpleNamespace(generation_config=generation, config=config)


def stop_ids(model: Any, tokenizer: PreTrainedTokenizerBase) -> Ids:
    """Every token id that ends a text, by the files of a model (or `files_of` it; None: it has none) and its tokenizer.

    The generation config's come first, then the config's, the tokenizer's and the chat template's.
    """
    return list(chain(*_ends(model, tokenizer).values()))


def unnamed_ends(model: Any, tokenizer: PreTrainedTokenizerBase) -> str:
    """Which of the `stop_ids` are not in the generation config, and where they are; empty where all are."""
    first, *others = _ends(model, tokenizer).items()
    missing = [f"{tokenizer.convert_ids_to_tokens(i)!r} (id {i}, of {name})" for name, ids in others for i in ids]
    if not missing:
        return ""
    return (
        f"{first[0]} does not name {', '.join(missing)}: texts end there here; add it to eos_token_id there, so that "
        "model.generate and engines stop, too"
    )


def _ends(model: Any, tokenizer: PreTrainedTokenizerBase) -> dict[str, Ids]:
    """The ids that end a text, by the file that is the first to name them.

    One of the config's that the tokenizer keeps for no such use may be the default of the config's class.
    """
    generation, config = (_eos(getattr(model, name, None)) for name in ("generation_config", "config"))
    named = {"generation_config.json": generation, "config.json": [i for i in config if i in added_ids(tokenizer)]}
    named["the tokenizer"] = _eos(tokenizer)
    end = turn_end(tokenizer, [*chain(*named.values())])
    named["the chat template"] = [] if end is None else [end]
    first = {i: name for name in reversed(named) for i in named[name]}
    return {name: [i for i in dict.fromkeys(ids) if first[i] == name] for name, ids in named.items()}


def _eos(source: Any) -> Ids:
    eos = getattr(source, "eos_token_id", None)
    return [eos] if isinstance(eos, int) else list(eos or ())


# -- drafts ------------------------------------------------------------------------------------------------------------

DraftModel: TypeAlias = PreTrainedModel | DraftHead  # what can draft for a target, besides its own layers


def open_draft(
    name: Name,
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    trust_remote_code: bool = False,
) -> DraftModel:
    """A draft model, on the target's device and in its number format, after their tokenizers have been compared.

    The name is that of a language model or of a head of this target, or ``mtp``, the target's own next-token layers.

    Raises:
        UserError: it or its tokenizer cannot be read, or its token ids mean other strings.
    """
    if name == MTP:
        return load_mtp(target)
    if head_kind(name):
        return load_head(name, target)
    check_tokenizers(tokenizer, load_tokenizer(name, trust_remote_code=trust_remote_code))
    device, dtype = target.get_input_embeddings().weight.device, str(target.dtype).removeprefix("torch.")
    return load_model(name, device=device, dtype=dtype, trust_remote_code=trust_remote_code)


def check_tokenizers(target: PreTrainedTokenizerBase, draft: PreTrainedTokenizerBase) -> None:
    """Refuse a draft whose token ids mean other strings than the target's, and warn of tokens that were renamed.

    Padded vocabularies of one family pass: only ids that both tokenizers name are compared. So do those that name an
    added token otherwise, as a fine-tuned model does with a reserved one.

    Raises:
        UserError: with the first id that differs.
    """
    ours, theirs = ({i: token for token, i in each.get_vocab().items()} for each in (target, draft))
    added = added_ids(target) & added_ids(draft)
    other = sorted((i for i in ours.keys() & theirs.keys() if ours[i] != theirs[i]), key=added.__contains__)
    differ = [f"id {i} is {ours[i]!r} and {theirs[i]!r}" for i in other]  # plain tokens first
    if not added.issuperset(other) or min(len(ours), len(theirs)) < 0.9 * max(len(ours), len(theirs)):
        differ.append(f"they know {len(ours)} and {len(theirs)} tokens")
        raise UserError(
            f"the draft's tokenizer is not the target's: {differ[0]}; use a draft of the same model family, or train "
            "one with draftsmith distill; transformers' own assisted generation takes a draft of another tokenizer "
            "(generate with assistant_model and assistant_tokenizer)"
        )
    if differ:
        warnings.warn(f"the draft's tokenizer names added tokens otherwise: {'; '.join(differ)}", stacklevel=2)


# -- pairs -------------------------------------------------------------------------------------------------------------


@dataclass
class Pair:
    """A target and, where there is one, the draft model or feature head that drafts for it."""

    target: PreTrainedModel = field(repr=False)  # the target
    tokenizer: PreTrainedTokenizerBase = field(repr=False)  # the target's
    draft: DraftModel | None = field(default=None, repr=False)  # the draft
    target_name: str = ""  # the folder or Hub name that the target was loaded from
    draft_name: str | None = None  # the draft's
    pack: str = "auto"  # see `decode.models.check.open_runner`

    lock: Any = field(default_factory=RLock, init=False, repr=False)  # held while runners are opened

    @cached_property
    def _runners(self) -> tuple[Model, Model | None]:
        draft = None if self.draft is None else open_draft_runner(self.draft, self.target, self.pack)
        return open_runner(self.target, pack=self.pack), draft

    @property
    def runner(self) -> Model:
        """The target's forward with its cache."""
        with self.lock:
            return self._runners[0]

    @property
    def draft_runner(self) -> Model | None:
        """The draft's."""
        with self.lock:
            return self._runners[1]


def load(
    target: Name,
    draft: Name | None = None,
    *,
    device: str = "auto",
    dtype: str = "auto",
    device_map: str | None = None,
    trust_remote_code: bool = False,
    pack: str = "auto",
) -> Pair:
    """Open a target and, if given, a draft for it.

    Args:
        target: folder, Hub name or GGUF file.
        draft: the same of a draft model, or the folder of a feature head; ``None`` for methods without one.
        device: ``auto`` is the first GPU, without one the CPU.
        dtype: ``auto`` is the checkpoint's on a GPU, float32 on a CPU.
        device_map: passed to transformers, to spread the target over several devices.
        trust_remote_code: run the Python code that a Hub repository brings.
        pack: see `decode.models.check.open_runner`.

    Raises:
        UserError: a model that cannot be read, or two that do not fit each other.
    """
    tokenizer = load_tokenizer(target, trust_remote_code=trust_remote_code)
    model = load_model(target, device=device, dtype=dtype, device_map=device_map, trust_remote_code=trust_remote_code)
    if draft is None:
        return Pair(model, tokenizer, target_name=str(target), pack=pack)
    head = open_draft(draft, model, tokenizer, trust_remote_code=trust_remote_code)
    return Pair(model, tokenizer, head, str(target), str(draft), pack)


# -- sampling ----------------------------------------------------------------------------------------------------------

NEUTRAL: Fields = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
"""Sampling settings that change nothing."""

UNSUPPORTED: dict[Any, tuple[str, ...]] = {
    1: ("num_beams", "typical_p", "top_h", "encoder_repetition_penalty", "guidance_scale"),
    0: ("epsilon_cutoff", "eta_cutoff", "penalty_alpha", "min_length", "min_new_tokens",
        "encoder_no_repeat_ngram_size", "token_healing"),
    None: ("exponential_decay_length_penalty", "forced_bos_token_id", "forced_eos_token_id", "begin_suppress_tokens",
           "sequence_bias", "watermarking_config", "stop_strings", "dola_layers"),
}  # fmt: skip
"""Fields that change the texts of `generate` and are not followed here, by their neutral value besides None."""


def own_sampling(model: PreTrainedModel) -> Fields:
    """The settings of the model's ``generation_config`` that are in `NEUTRAL` and not neutral."""
    given = {name: getattr(model.generation_config, name, None) for name in NEUTRAL}
    return {name: value for name, value in given.items() if value not in (None, NEUTRAL[name])}


def own_processors(model: PreTrainedModel) -> list[LogitsProcessor]:
    """Further processors that the model's ``generation_config`` asks for, in the order of `generate`."""
    config, device = model.generation_config, model.get_input_embeddings().weight.device
    processors = []
    if size := getattr(config, "no_repeat_ngram_size", None):
        processors.append(NoRepeatNGramLogitsProcessor(size))
    if bad := getattr(config, "bad_words_ids", None):
        ends = None if config.eos_token_id is None else torch.tensor(config.eos_token_id, device=device).view(-1)
        processors.append(NoBadWordsLogitsProcessor(bad, ends))
    if suppressed := getattr(config, "suppress_tokens", None):
        processors.append(SuppressTokensLogitsProcessor(suppressed, device=device))
    return processors


def own_warp(model: PreTrainedModel, temperature: float, given: Fields) -> LogitsWarper:
    """The sampling of a target: settings given for names in `NEUTRAL` unless None, then its ``generation_config``."""
    settings = NEUTRAL | own_sampling(model) | {name: value for name, value in given.items() if value is not None}
    return LogitsWarper(temperature, **settings, processors=own_processors(model))


def described(model: PreTrainedModel, warp: LogitsWarper) -> str:
    """Which fields of the model's ``generation_config`` are followed and which are not; empty without any."""
    followed = [f"{name} {value:g}" for name, value in own_sampling(model).items() if getattr(warp, name) == value]
    followed += [type(processor).__name__.removesuffix("LogitsProcessor") for processor in own_processors(model)]
    config, parts = model.generation_config, [f"follows {', '.join(followed)}"] if followed else []
    if missing := [
        name
        for neutral, names in UNSUPPORTED.items()
        for name in names
        if getattr(config, name, None) not in (None, neutral)
    ]:
        parts.append(f"does not follow {', '.join(missing)}, so texts differ from the model's own generate")
    return f"the model's generation_config: decoding {'; '.join(parts)}" if parts else ""
