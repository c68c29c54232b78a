"""Where a model is read: a folder, a name on the Hub, a GGUF file; or inside a model that reads images or audio too."""

import copy
import hashlib
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from threading import RLock
from typing import Any

import torch
import transformers
from huggingface_hub import constants, get_session, snapshot_download, try_to_load_from_cache
from safetensors import SafetensorError, safe_open
from tokenizers.pre_tokenizers import Digits, Sequence
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging as hf_logging
from transformers.utils import quantization_config

from decode.errors import UserError, first_line
from decode.files import Fields, read_model_json, replaced

# -- names -------------------------------------------------------------------------------------------------------------

Name = str | os.PathLike[str]  # a folder, a name on the Hub (with its revision after an @) or a GGUF file
SINGLE, INDEX, ADAPTER = "model.safetensors", "model.safetensors.index.json", "adapter_config.json"
JSON_FILES = (
    "config.json", "generation_config.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    INDEX,
)  # fmt: skip

NUMBERS = ("eos_token_id", "temperature", "top_k", "top_p", "min_p", "repetition_penalty")

MODEL_FILES = (
    "*config.json", "*.safetensors.index.json", "*token*", "*vocab*", "*merges*", "*.model", "*.tiktoken", "*.spm",
    "tekken.json", "bpe.codes", "dict.txt", "emoji.json", "normalizer.json", "*.jinja", "chat_template*",
    "additional_chat_templates/*", "*.py", "mask_embedding.pt",
)  # fmt: skip
"""Files that a model, its tokenizer and a head are read from, besides weights."""


def located(name: Name, *, weights: bool = False) -> Path:
    """The folder that a model is read from: itself, the snapshot of a Hub name, or what a GGUF file is converted to.

    Args:
        name: folder, Hub name or GGUF file.
        weights: download the weights of a Hub name, too. Without the Hub the cache is read as it is.

    Raises:
        UserError: there is none, or a GGUF or JSON file cannot be read. transformers would ignore some of these.
    """
    gguf, folder = gguf_file(name), Path(name)
    if gguf:
        return unpacked(gguf)
    if not folder.is_dir():
        with reading(name, "model"):
            folder = _snapshot(name)
            if weights and not hub_offline():
                single = read_model_json(folder / "config.json").get("transformers_weights") or SINGLE
                folder = _snapshot(name, *([file.name for file in weight_files(folder)] or [single]))
    for path in (folder / file for file in JSON_FILES):
        for key, value in read_model_json(path).items():
            numbers = value if isinstance(value, list) else [value]
            if key in NUMBERS and not all(isinstance(each, (int, float, type(None))) for each in numbers):
                raise UserError(f"{path}: {key} is {value!r}, expected a number; correct it or download it again")
    return folder


def pinned(name: Name) -> tuple[str, Fields]:
    """A Hub name, and the revision after its @ as an argument of the Hub's libraries; folders stay as they are."""
    repository, at, revision = str(name).rpartition("@")
    return (repository, {"revision": revision}) if at and not Path(name).exists() else (str(name), {})


def is_path(name: Name) -> bool:
    """Whether a name is that of a file or folder, there or not, and none on the Hub."""
    return Path(name).exists() or str(name).startswith((".", "/", "~", "runs/")) or pinned(name)[0].count("/") > 1


def _snapshot(name: Name, *weights: str) -> Path:
    """The folder of a Hub name in the cache, with these files of weights where the Hub answers."""
    (repository, at), offline = pinned(name), hub_offline()
    if offline and isinstance(file := try_to_load_from_cache(repository, "config.json", **at), str):
        return Path(file).parent  # a file that is not there is refused by who reads it
    files = [*MODEL_FILES, *weights]
    return Path(snapshot_download(repository, allow_patterns=files, local_files_only=offline, **at))


@contextmanager
def offline() -> Iterator[None]:
    """Within it, names on the Hub are read from the cache alone."""
    before, constants.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE, True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


def hub_offline() -> bool:
    """Whether the Hub is switched off, or did not answer within five seconds when it was first asked.

    Asked here, because the Hub's libraries would repeat each request for 20 seconds.
    """
    return constants.HF_HUB_OFFLINE or _silent(constants.ENDPOINT)


@lru_cache
def _silent(endpoint: str) -> bool:
    try:
        get_session().head(endpoint, timeout=5)
    except Exception:  # the layers of the network have many
        return True
    return False


@contextmanager
def reading(name: Name, what: str) -> Iterator[None]:
    """Within it, whatever transformers raises over a model or tokenizer becomes a `UserError`."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # damaged files raise whatever the bytes lead to
        raise unreadable(name, what, error) from error


def unreadable(name: Name, what: str, error: Exception) -> UserError:
    """The error of a model or tokenizer that transformers could not open."""
    path, hint = Path(name), ""
    if is_path(name) and not path.exists():
        return UserError(
            f"cannot load the {what}: there is no folder {str(name)!r}: train it first (make distill), or give the "
            "path of one"
        )
    if path.suffix.lower() == ".gguf":
        hint = "; download it again, or take the model's safetensors files"
    elif not is_path(name) and hub_offline():
        hint = (
            "; it is no folder and not in the Hub's cache on this machine, and the Hub is switched off "
            "(HF_HUB_OFFLINE) or does not answer: fetch the model with `hf download` where there is a network"
        )
    return UserError(f"cannot load the {what} {str(name)!r}: {type(error).__name__}: {first_line(error)}{hint}")


# -- files of weights --------------------------------------------------------------------------------------------------


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files that a folder's model or head is read from, whether they are there or not.

    These are transformers' choice: the single file, or the shards of the index, which an earlier save may have left
    without its shards. None where there is neither.

    Raises:
        UserError: a single file beside shards, an adapter, or an index that names files elsewhere.
    """
    config, index = (read_model_json(folder / file) for file in ("config.json", INDEX))
    single, index = folder / (config.get("transformers_weights") or SINGLE), index.get("weight_map") or {}
    shards = [folder / str(file) for file in sorted({*index.values()})]
    if outside := [file for file in shards if file.parent != folder]:
        raise UserError(f"{folder / INDEX} names {outside[0]}, which is not in its folder: download the index again")
    kinds = [folder / ADAPTER], [single], shards
    sets = sorted({file.name for kind in kinds for file in [*filter(os.path.lexists, kind)][:1]})
    if len(sets) > 1 or ADAPTER in sets:
        raise UserError(
            f"{folder} holds {' and '.join(sets)}: leave the files of one model there (shards with their index), and "
            "move others to a folder of their own; an adapter is not read: merge it into its base (peft: "
            "PeftModel.from_pretrained(base, folder).merge_and_unload().save_pretrained(path)) and give the result"
        )
    return [single] if os.path.lexists(single) else shards


def tensors_in(folder: Path) -> Fields:
    """The tensors in a folder's `weight_files` by name, as slices of safetensors: headers are read, and they are not.

    Raises:
        UserError: a file that is not there, not whole, or a pointer of Git LFS; or no such file.
    """
    found: Fields = {}
    files = weight_files(folder)
    if not files:
        beside = [file.name for file in folder.glob("*") if file.suffix in (".safetensors", ".bin", ".pth", ".gguf")]
        raise UserError(
            f"{folder} has no safetensors file that is read ({SINGLE}, or the shards of {INDEX}), but "
            f"{', '.join(sorted(beside)[:3]) or 'no other weights'}: download it, unless the repository has none; a "
            "file of another name may be renamed; a pickle (pytorch_model.bin) is neither downloaded nor read, since "
            "that can run code. If you trust it: python -c "
            "\"import torch, safetensors.torch as s; s.save_file(torch.load('pytorch_model.bin', weights_only=True), "
            "'model.safetensors')\""
        )
    for file in files:
        try:
            with safe_open(file, "pt") as opened:
                found |= {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            what = f"cut off or damaged ({first_line(error)})"
            if not file.exists():
                what = "a link that leads nowhere" if file.is_symlink() else "missing"
            elif file.stat().st_size < 999 and b"git-lfs" in file.read_bytes():
                what = "a pointer of Git LFS: run git lfs pull in its folder, or"
            raise UserError(f"{file} is {what}: download it again, with all files of the model") from error
    return found


PLAIN = ("F64", "F32", "F16", "BF16")


@dataclass
class MetaSlice:
    """A tensor that stays on the meta device, wherever its model is put, in the place of a slice of safetensors."""

    shape: list[int]

    def __getitem__(self, place: Any) -> "MetaSlice":
        return self

    def to(self, *, dtype: torch.dtype, **_: Any) -> torch.Tensor:
        """The tensor."""
        return torch.empty(self.shape, dtype=dtype, device="meta")


def in_parts(tensors: Fields, empty: PreTrainedModel, wanted: str, *, quantised: bool) -> Fields:
    """The tensors of `tensors_in`; those that are not ``wanted`` are `MetaSlice`s, as are a quantised model's.

    Such a one gets what an ordinary one has, ``empty``: the packages of its method may be there for an engine alone.
    """
    shapes = {name: part.get_shape() for name, part in tensors.items()}
    if quantised:
        shapes = {name: [*x.shape] for name, x in empty.state_dict().items() if name not in empty.all_tied_weights_keys}
    read = {name for name, part in tensors.items() if part.get_dtype() in PLAIN and re.search(wanted, name)}
    return {name: tensors[name] if name in read else MetaSlice(shape) for name, shape in shapes.items()}


PACKED = re.compile(r"F[468][_ ]|[IU]\d+ .*(weight|bias|proj)$")


def packed(tensors: Fields) -> list[str]:
    """Which tensors of `tensors_in` are in a format that takes scales."""
    formats = [f"{part.get_dtype()} {key}" for key, part in tensors.items()]
    return [f"{each}: a format that takes a scale, and none is read" for each in formats if PACKED.match(each)]


# -- weights -----------------------------------------------------------------------------------------------------------

_LOADING = RLock()


@contextmanager
def quiet() -> Iterator[None]:
    """No progress bars and warnings of transformers, whose settings are the process's: one load at a time."""
    with _LOADING:
        bars, level = hf_logging.is_progress_bar_enabled(), hf_logging.get_verbosity()
        hf_logging.disable_progress_bar()
        hf_logging.set_verbosity_error()
        try:
            yield
        finally:
            hf_logging.set_verbosity(level)
            if bars:
                hf_logging.enable_progress_bar()


UNREAD = (
    r"(^|\.)mtp|inv_freq$|position_ids$|(attn|attention)\.(masked_bias|bias|causal_mask)$"  # layers; old files' buffers
    r"|(^|\.)(mm_|multi_?modal|(embed_)?(vis|image|video|audio|speech))\w*(\.|$)"  # towers
    r"|\.(input|output|activation|[qkv]|kv)_(scale|zero_point)$"  # of engines that compute in 8 bits
)
"""Names of tensors that a language model may leave unread, besides those that transformers' class of it names."""


def read_weights(
    auto: Any, folder: Path, name: Name, tensors: Fields, *, quantised: bool = False, **options: Any
) -> PreTrainedModel:
    """A model by transformers' ``from_pretrained`` of a class, and what `tensors_in` finds in its folder.

    Raises:
        UserError: weights that are missing, have another shape than the configuration says, are read by nothing, or
            take scales where the configuration does not call the model ``quantised``.
    """
    with quiet():  # sizes that differ are refused below, by name
        model: PreTrainedModel
        model, info = auto.from_pretrained(
            None if "state_dict" in options else str(folder),
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            use_safetensors=True,
            **options,
        )
    text = model.config.get_text_config()
    ahead = range(getattr(text, "num_nextn_predict_layers", None) or 0)
    layers = [str(text.num_hidden_layers + number) for number in ahead]
    unread = rf"{UNREAD}|\blayers\.({'|'.join(layers) or 'none'})\."
    unexpected = {key for key in info["unexpected_keys"] if not re.search(unread, key)}
    unexpected -= {key for key in unexpected & tensors.keys() if not tensors[key][...].any()}  # GPTQ adds biases of 0
    wrong = [f"{key} is missing" for key in sorted(info["missing_keys"])]
    wrong += [
        f"{key} is {list(seen)} instead of {list(wanted)}" for key, seen, wanted in sorted(info["mismatched_keys"])
    ]
    wrong += [f"{key} has no place in it" for key in sorted(unexpected)]
    if wrong := wrong + ([] if quantised else packed(tensors)):
        raise UserError(
            f"the weights of the model {str(name)!r} do not fit its configuration: {', '.join(wrong[:3])} "
            f"({len(wrong)} in all); take both from one model, or download or save it again"
        )
    return model


# -- GGUF files --------------------------------------------------------------------------------------------------------

DIGIT_BY_DIGIT = {"starcoder", "refact", "command-r", "smollm", "codeshell", "exaone", "minerva-7b", "mellum2"}
"""Names of ``tokenizer.ggml.pre`` whose tokenizers split off every digit before anything else (llama.cpp's table)."""
PRE = b"\x12\0\0\0\0\0\0\0tokenizer.ggml.pre\x08\0\0\0"  # that key in a header: its length, its name, "a text follows"


def gguf_file(name: Name) -> Path | None:
    """The path of a GGUF file; None for other names.

    Raises:
        UserError: there is no such file.
    """
    path = Path(name)
    if path.suffix.lower() != ".gguf":
        return None
    if not path.is_file():
        raise UserError(f"there is no file {str(name)!r}; check the path (it is relative to {Path.cwd()})")
    return path


def unpacked(file: Path) -> Path:
    """The folder below ``$HF_HOME/gguf`` that transformers has converted a GGUF file to, in float32.

    Raises:
        UserError: a file that transformers cannot read, or a folder that cannot be written.
    """
    state = f"{file.resolve()} {file.stat().st_size} {file.stat().st_mtime_ns} {transformers.__version__}"
    folder = Path(constants.HF_HOME) / "gguf" / f"{file.stem}-{hashlib.sha256(state.encode()).hexdigest()[:12]}"
    if folder.exists():
        return folder
    print(f"{file.name} is converted once, to {folder}", file=sys.stderr)
    with reading(file, "model"):
        tokenizer = _gguf_tokenizer(file)
        options: Fields = {"gguf_file": file.name, "dtype": torch.float32}
        if hasattr(quantization_config, "GgufConfig"):  # from transformers 5.23 on weights may stay packed
            options["quantization_config"] = quantization_config.GgufConfig(dequantize=True)
        model = read_weights(AutoModelForCausalLM, file.parent, file, {}, **options)
    for attribute in ("hf_quantizer", "is_quantized", "quantization_method"):  # the weights are plain ones now
        vars(model).pop(attribute, None)
    vars(model.config).pop("quantization_config", None)
    try:
        with replaced(folder) as made, quiet():
            model.save_pretrained(made)
            tokenizer.save_pretrained(made)
    except OSError as error:
        raise UserError(f"{file} cannot be converted to {folder}: {error}; set HF_HOME to a disk with room") from error
    return folder


def _gguf_tokenizer(file: Path) -> PreTrainedTokenizerBase:
    """The tokenizer in a file's header.

    transformers builds it from tokens and merges alone, and would read digits otherwise than the model's own.
    """
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    with file.open("rb") as opened:
        after = opened.read(1 << 26).partition(PRE)[2]
    if after[8 : 8 + int.from_bytes(after[:8], "little")].decode() in DIGIT_BY_DIGIT:
        backend = tokenizer.backend_tokenizer
        backend.pre_tokenizer = Sequence([Digits(individual_digits=True), backend.pre_tokenizer])
    return tokenizer


# -- language models inside others -------------------------------------------------------------------------------------


def language_config(config: PretrainedConfig) -> PretrainedConfig:
    """The configuration of a causal language model: the given one, or that of the decoder of a model with more inputs.

    A decoder without a causal class of its own takes that of the text family with the beginning of its name and with
    weights of the same names and shapes, as Qwen2.5-VL's takes Qwen2's: where all is text, positions in several
    dimensions are the ordinary ones.

    Raises:
        UserError: transformers has no such class.
    """
    text = config.get_text_config()
    if text is config or config.is_encoder_decoder:
        if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING or getattr(config, "auto_map", None):  # code of a Hub repository
            return config
    elif type(text) in MODEL_FOR_CAUSAL_LM_MAPPING:
        return text
    elif getattr(config, "auto_map", None):
        return config
    else:
        for name in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, key=len, reverse=True):
            if re.match(name.replace("_", ".*_"), text.model_type) and (made := _alike(name, text)):
                return made
    raise UserError(
        f"{(config.architectures or [type(config).__name__])[0]} ({config.model_type}) cannot be opened: transformers "
        f"{transformers.__version__} has no causal language model for {text.model_type}. Take a text model (Llama, "
        "Qwen, Mistral, Gemma, Phi, GPT-NeoX, …), or a model with images around one"
    )


def _alike(name: str, text: Any) -> PretrainedConfig | None:
    """The configuration of another family with weights of the same names and shapes as a decoder's; None: it has none.

    Fields that such decoders follow unasked come first.
    """
    with suppress(Exception), torch.device("meta"):  # a family refuses fields in many ways
        fields = {"head_dim": text.hidden_size // text.num_attention_heads, "norm_topk_prob": True}
        fields |= {k: v for k, v in text.to_dict().items() if k not in ("model_type", "architectures")}
        rope = fields["rope_parameters"].items()
        fields["rope_parameters"] = {key: value for key, value in rope if not key.startswith("mrope")}
        made = AutoConfig.for_model(name, **fields)
        ours, theirs = (AutoModel.from_config(each).state_dict() for each in (made, text))
        if {key: x.shape for key, x in ours.items()} == {key: x.shape for key, x in theirs.items()}:
            return made
    return None


def decoder_of(model: PreTrainedModel) -> Any:
    """The model inside a causal one, without the output head, which one family calls its decoder (ModernBERT)."""
    inner = model.get_decoder()
    return inner if isinstance(inner, PreTrainedModel) else model.base_model


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
    decoder = decoder_of(model)
    head = model.get_output_embeddings()
    config.tie_word_embeddings = head.weight is decoder.get_input_embeddings().weight
    with torch.device("meta"):
        empty = kind(config)
    name = next(name for name, module in empty.named_modules() if module is empty.get_output_embeddings())
    base = decoder if decoder.get_output_embeddings() is None else decoder.base_model
    weights = {f"{kind.base_model_prefix}.{key}": weight for key, weight in base.state_dict().items()}
    weights |= {f"{name}.{key}": weight for key, weight in head.state_dict().items()}
    weights = {key: MetaSlice([*weight.shape]) if weight.is_meta else weight for key, weight in weights.items()}
    made = kind.from_pretrained(None, config=config, state_dict=weights, dtype=model.dtype, **options)
    made.generation_config = copy.deepcopy(model.generation_config)
    if any(weight.is_meta for weight in made.parameters()):  # it was read in parts
        return made
    ids = (torch.arange(8) * 7 % len(head.weight))[None]
    wanted, logits = (m.eval()(input_ids=ids.to(m.device), use_cache=False).logits.float() for m in (model, made))
    gap = float((wanted - logits.to(wanted)).abs().max() / wanted.abs().max().clamp_min(1e-6))
    if not gap < (1e-4 if model.dtype == torch.float32 else 5e-2):
        raise UserError(
            f"the language model of {type(model).__name__} ({model.config.model_type}) cannot be used by itself: as "
            f"{kind.__name__} it gives other logits than the whole model, by {gap:.2g} of the largest. Use "
            "model.generate for it, or take a text model"
        )
    return made
