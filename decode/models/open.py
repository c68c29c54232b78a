"""Models and tokenizers from folders or the hub, with errors that say what to do next."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as hf_logging

from decode.core.errors import UserError

DTYPES = {
    "float32": torch.float32,
    "float64": torch.float64,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def _explain(name: str, what: str, error: Exception) -> UserError:
    folder = Path(name)
    if folder.exists():
        hint = f"the folder exists but holds no {what} that transformers can read"
    elif name.startswith((".", "/", "~")) or name.startswith("runs/") or name.count("/") != 1:
        hint = "there is no such folder; train it first (make distill) or give the path of one"
    else:
        hint = "it is neither a folder nor reachable on the hub; without network, give a local folder"
    return UserError(f"cannot load the {what} {name!r}: {hint} ({type(error).__name__}: {str(error).splitlines()[0]})")


def load_model(
    name: str | os.PathLike[str],
    *,
    dtype: str = "float32",
    device: str = "cpu",
    device_map: str | None = None,
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """A causal language model in evaluation mode.

    Args:
        name: folder or hub name.
        dtype: one of `DTYPES`.
        device: where it goes; ignored with a `device_map`.
        device_map: passed to transformers, to spread a model over several devices.
        trust_remote_code: run code that the hub repository brings.

    Raises:
        UserError: the model cannot be found or read, or the dtype is unknown.
    """
    if dtype not in DTYPES:
        raise UserError(f"dtype is {dtype!r}; choose one of {', '.join(DTYPES)}")
    extra: dict[str, Any] = {"device_map": device_map} if device_map else {}
    bars = hf_logging.is_progress_bar_enabled()
    hf_logging.disable_progress_bar()
    try:
        model = AutoModelForCausalLM.from_pretrained(
            str(name),
            dtype=DTYPES[dtype],
            use_safetensors=True,
            trust_remote_code=trust_remote_code,
            **extra,
        )
    except (OSError, ValueError, KeyError) as error:
        raise _explain(str(name), "model", error) from error
    finally:
        if bars:
            hf_logging.enable_progress_bar()
    if device_map is None:
        model = model.to(device)
    return model.eval()


def load_tokenizer(name: str | os.PathLike[str], *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The tokenizer of a folder or hub name.

    Raises:
        UserError: it cannot be found or read.
    """
    try:
        return AutoTokenizer.from_pretrained(str(name), trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        raise _explain(str(name), "tokenizer", error) from error


def check_tokenizers(target: PreTrainedTokenizerBase, draft: PreTrainedTokenizerBase) -> None:
    """Refuse a draft whose token ids mean other strings than the target's.

    Padded vocabularies of one family pass: only ids that both tokenizers name are compared.

    Raises:
        UserError: with the first id that differs.
    """
    ours = {i: t for t, i in target.get_vocab().items()}
    theirs = {i: t for t, i in draft.get_vocab().items()}
    for i in sorted(ours.keys() & theirs.keys()):
        if ours[i] != theirs[i]:
            raise UserError(
                f"the draft's tokenizer is not the target's: id {i} is {ours[i]!r} for the target and "
                f"{theirs[i]!r} for the draft; use a draft of the same model family, or train one with "
                "python -m distill"
            )
    if min(len(ours), len(theirs)) < 0.9 * max(len(ours), len(theirs)):
        raise UserError(
            f"the tokenizers know {len(ours)} (target) and {len(theirs)} (draft) tokens; they have to be the same "
            "but for padding; use a draft of the same model family"
        )


def stop_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None) -> set[int]:
    """Every token id that ends a text: generation config first, then config, then tokenizer."""
    for source in (model.generation_config, model.config, tokenizer):
        eos = getattr(source, "eos_token_id", None)
        if eos is not None:
            return set(eos) if isinstance(eos, (list, tuple)) else {int(eos)}
    return set()
