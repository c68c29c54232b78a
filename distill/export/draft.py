"""Export of a trained draft as a plain Hugging Face folder that serving engines load without conversion.

The folder is built beside its destination, loaded again, compared with the source, and only then moved into place, so a
folder of that name is always complete.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
)

from decode.engines.llama_cpp import convert, find_converter
from decode.errors import UserError
from decode.files import replaced
from decode.models.heads.eagle import DraftHead
from decode.models.heads.files import head_kind, unserved
from decode.models.open import check_tokenizers, files_of, load_config, load_model, load_tokenizer
from distill.config import ExportSettings
from distill.export.card import Facts, describe, write_card
from distill.kinds.kind import Kind
from distill.kinds.language_model import LANGUAGE_MODEL

DRAFTED = 4  # tokens per round, until the best number is measured
NEVER = -1e4  # bias of padded ids: below any real logit, within the range of float16


def export_draft(
    draft_dir: str | Path,
    target_dir: str | Path,
    out_dir: str | Path,
    settings: ExportSettings,
    *,
    trust_remote_code: bool = False,
    trust_draft_code: bool = False,
    about: Facts | None = None,
    keep: Callable[[Path], object] | None = None,
    length: int | None = None,
) -> Path:
    """Exports the draft for use with transformers, vLLM and SGLang; `add_measurements` adds what is measured later.

    Args:
        draft_dir: Folder of the trained draft.
        target_dir: Folder or Hub name of its target, of which only configuration and tokenizer are read.
        out_dir: Destination. An earlier export there is replaced once the new one is complete. It may be
            ``draft_dir`` itself.
        settings: Number format.
        trust_remote_code: Run model code that comes with the folders.
        trust_draft_code: Run only the draft's.
        about: What the card says of the training; None: nothing.
        keep: Renames an earlier export; None: it is removed.
        length: Drafted tokens per round that a draft with mask tokens was trained for. None: any number.

    Returns:
        ``out_dir``.

    Raises:
        UserError: The path would be taken by vLLM for another method, the folder is no earlier export, or the
            tokenizers differ.
    """
    draft_dir, out_dir = Path(draft_dir), Path(out_dir)
    check_export_path(out_dir)
    trust_draft_code = trust_remote_code or trust_draft_code
    tokenizer = load_tokenizer(target_dir, trust_remote_code=trust_remote_code)
    if any((draft_dir / name).exists() for name in ("tokenizer.json", "tokenizer_config.json")):
        check_tokenizers(tokenizer, load_tokenizer(draft_dir, trust_remote_code=trust_draft_code))
    files = files_of(target_dir, trust_remote_code=trust_remote_code)
    target, generation = files.config, files.generation_config
    vocabulary = target.get_text_config().vocab_size

    # The number format is set at loading: model.to() would round the rope frequencies as well.
    trained = load_config(draft_dir, trust_remote_code=trust_draft_code).dtype or torch.float32
    dtype = str(trained).removeprefix("torch.") if settings.dtype == "keep" else settings.dtype
    model = load_model(draft_dir, device="cpu", dtype=dtype, trust_remote_code=trust_draft_code)
    check_gguf(settings, model=model)
    config: Any = model.config.get_text_config()
    longest = min(32, getattr(config, "max_position_embeddings", None) or 64)
    generator = torch.Generator().manual_seed(0)
    probe = torch.randint(min(vocabulary, config.vocab_size), (2, longest), generator=generator)
    source = _logits(model, probe)
    trained_vocabulary = fit_vocabulary(model, vocabulary)
    note = fit_context(config, target.get_text_config())

    with replaced(out_dir, keep) as partial:
        # No length or sampling rules: the target's generation settings govern both models.
        special = {key: getattr(generation, key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
        model.config.update(special)
        if config.model_type == "gpt_neox":  # the name under which llama.cpp's converter reads it
            config.rotary_pct = config.rope_parameters.get("partial_rotary_factor", 1.0)
        model.generation_config = GenerationConfig(
            **special,
            num_assistant_tokens=(drafted := min(DRAFTED, length or DRAFTED)),
            num_assistant_tokens_schedule="constant",
            assistant_confidence_threshold=0.0,
        )
        model.save_pretrained(partial, max_shard_size="1TB")
        tokenizer.save_pretrained(partial)
        facts = describe(model, target, str(target_dir), str(out_dir), settings.gguf)
        facts |= {"trained_vocabulary": trained_vocabulary, "notes": [note] if note else []}
        write_card(partial, facts | (about or {}) | {"trained_length": length}, drafted)
        del model, config
        _check_reload(partial, probe, source, trust_draft_code)
    return out_dir


def check_export_path(out_dir: str | Path, kind: Kind = LANGUAGE_MODEL) -> None:
    """Refuses a destination that vLLM would take for another method, or that holds something other than a model.

    It is cheap, so it is called before training starts. ``kind`` is the draft's.
    """
    path = Path(out_dir).resolve()
    if sniffed := [name for name in kind.sniffed if name in str(path).lower()]:
        raise UserError(
            f"The export folder {path} contains '{sniffed[0]}', which vLLM takes for another method. Choose a name of "
            "the run or the folder without it."
        )
    if path.exists() and not (path.is_dir() and ((path / "config.json").exists() or not any(path.iterdir()))):
        raise UserError(
            f"The export folder {path} is not empty and holds no config.json, so it is no earlier export. "
            "Choose another folder, or remove this one."
        )


def fit_vocabulary(model: PreTrainedModel, size: int) -> int:
    """Pads or cuts embedding and head to the target's vocabulary size, in place, and returns the old size.

    Padded ids must never be drafted. The logit of a zero row is 0, which is the largest where all real logits are
    negative. A head with a bias gets a large negative one. A head without gets the mean of the real rows, whose logit
    is the mean of the real logits, and so never above the largest of them.
    """
    old = int(model.get_input_embeddings().weight.shape[0])
    if old == size:
        return old
    model.resize_token_embeddings(size, mean_resizing=False)
    head = model.get_output_embeddings()
    with torch.no_grad():
        for weight in (model.get_input_embeddings().weight, head.weight) if size > old else ():
            weight[old:] = weight[:old].float().mean(0)
        if size > old and getattr(head, "bias", None) is not None:
            head.bias[old:] = NEVER
    return old


def fit_context(draft: PreTrainedConfig, target: PreTrainedConfig) -> str:
    """Sets a draft's context to its target's, in place, and returns a note for the card, or nothing.

    SGLang refuses a draft with a shorter context. Rotary positions can be extended; learned ones, and rotary ones that
    are scaled by the length of the context, cannot.
    """
    trained, wanted = (getattr(config, "max_position_embeddings", None) for config in (draft, target))
    if not trained or not wanted or trained >= wanted:
        return ""
    rope = dict(getattr(draft, "rope_parameters", None) or {})
    kinds = {rope.get("rope_type", "default")} if "rope_theta" in rope else {r.get("rope_type") for r in rope.values()}
    if not rope or not kinds <= {"default", "linear", "llama3"}:
        return (
            f"The draft's context of {trained:,} tokens is shorter than the target's of {wanted:,} and cannot be "
            "extended: SGLang needs SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN=1, vLLM takes the shorter one for both."
        )
    draft.max_position_embeddings = wanted
    return (
        f"`max_position_embeddings` is the target's ({wanted:,}), as SGLang requires; the draft was made for "
        f"{trained:,} tokens, and its acceptance beyond them was not measured."
    )


@torch.no_grad()
def _logits(model: PreTrainedModel, ids: Tensor) -> Tensor:
    return model.eval()(input_ids=ids.to(model.device)).logits.float().cpu()


def _check_reload(folder: Path, ids: Tensor, source: Tensor, trust: bool) -> None:
    """Loads the written folder as others will, and compares it with the model that was measured."""
    reloaded = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", trust_remote_code=trust)
    logits, common = _logits(reloaded, ids), source.shape[-1]
    gap = float((logits[..., :common] - source[..., : logits.shape[-1]]).abs().max())
    tied, why = reloaded.get_output_embeddings().weight is reloaded.get_input_embeddings().weight, ""
    if not gap <= 1e-4 * (1 + float(source.abs().max())):
        why = f"computes other logits than the draft that was measured (off by up to {gap:.3g}, wanted 1e-4)"
    elif int(logits.argmax(-1).max()) >= common:
        why = f"prefers a padded token id (of {common} and above)"
    elif reloaded.config.tie_word_embeddings != tied:
        matrices = "one" if tied else "two"
        why = f"has tie_word_embeddings {not tied} in its config.json, and embedding and head are {matrices}"
    if why:
        raise UserError(
            f"The exported draft, loaded again by transformers, {why}; it was not kept. Set export.dtype to "
            "float32, or serve the draft's own folder."
        )


def check_gguf(
    settings: ExportSettings, kind: Kind = LANGUAGE_MODEL, model: DraftHead | PreTrainedModel | None = None
) -> None:
    """Refuses GGUF files that cannot be written; cheap, so it is called before training starts.

    Raises:
        UserError: The converter is not installed, or does not support such drafts or their layout.
    """
    if settings.gguf:
        find_converter()
        if kind.no_gguf:
            raise UserError(kind.no_gguf)
        if model is not None and (why := unserved(model).get("llama.cpp")):
            raise UserError(f"llama.cpp does not run this draft as it is trained ({why}); leave export.gguf empty")


def export_gguf(export: Path, target: Path, settings: ExportSettings) -> list[Path]:
    """Writes ``gguf/target-<type>.gguf`` and ``gguf/draft-<type>.gguf`` into an export, for each of ``gguf``.

    Raises:
        UserError: The converter refuses a model.
    """
    return [
        convert(source, export / "gguf" / f"{name}-{kind}.gguf", kind, target=of)
        for kind in settings.gguf
        for name, source, of in (("target", target, None), ("draft", export, target if head_kind(export) else None))
    ]
