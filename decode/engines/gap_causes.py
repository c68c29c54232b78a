"""Known causes for which a served draft is accepted otherwise than predicted, found in the files and in the numbers."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from decode.errors import UserError, read_json
from decode.models.loading import check_tokenizers, load_tokenizer, stop_ids

EXPORT_AGAIN = "export the draft again"
SHAPE = (
    "model_type", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "vocab_size", "rope_parameters", "rms_norm_eps", "sliding_window", "tie_word_embeddings",
)  # fmt: skip
"""Settings of a target that its drafts depend on."""
STAGES = {
    ("validation", "offline"): ("trained on other texts than the target writes", "train on the target's answers"),
    ("offline", "predicted"): ("other prompts than those of training", "train on prompts of this kind"),
}
"""Measurements of a draft in their order, with the cause and remedy where the second is 0.1 or more below the first."""


@dataclass(frozen=True)
class Cause:
    """A known cause."""

    name: str  # in a few words
    evidence: str
    remedy: str


def weight_fingerprints(folder: str | Path) -> dict[str, str]:
    """Hashes of a folder's safetensors files, by name."""
    found = {}
    for path in sorted(Path(folder).glob("*.safetensors")):
        with path.open("rb") as file:
            found[path.name] = hashlib.file_digest(file, "blake2b").hexdigest()[:16]
    return found


def serving_facts(
    target: PreTrainedModel, folder: str | Path, tokenizer: PreTrainedTokenizerBase, *, chat: bool
) -> dict[str, Any]:
    """What a draft is trained with and has to be served with: noted in its profile, compared by `causes_in_files`.

    It is about a loaded target, the folder of its files, and its tokenizer's template if texts are chats.
    """

    def short(value: object) -> str:
        return hashlib.blake2b(str(value).encode(), digest_size=8).hexdigest()

    weights, config = weight_fingerprints(folder), target.config.get_text_config().to_dict()
    facts = {
        "chat template": short(tokenizer.chat_template) if chat else "none (plain text)",
        "stop ids": sorted(stop_ids(target, tokenizer)),
        "number format": str(target.dtype).removeprefix("torch."),
        "weights of the target": short(weights) if weights else None,
        **{f"{key} of the target": config[key] for key in SHAPE if key in config},
    }
    return dict(json.loads(json.dumps(facts, default=str)))


def causes_in_files(
    target: str | Path, draft: str | Path, *, context: int, facts: Mapping[str, Any] | None = None
) -> list[Cause]:
    """Causes that the folders show before anything is started.

    Args:
        target: folder of the target.
        draft: folder of the draft or head.
        context: tokens of the longest text, prompt and answer.
        facts: `serving_facts` of the target, for a draft whose profile has those of its training.
    """
    target, draft = Path(target), Path(draft)
    ours, theirs = read_json(target / "config.json"), read_json(draft / "config.json")
    found: list[Cause] = []
    if (draft / "tokenizer.json").exists() and target.is_dir():
        try:
            check_tokenizers(load_tokenizer(target), load_tokenizer(draft))
        except UserError as error:
            remedy = "train or export the draft with the target's tokenizer"
            found.append(Cause("another tokenizer", str(error).split("; ")[0], remedy))
    profile = read_json(draft / "speculation_profile.json")
    trained = profile.get("trained_with") or {}
    for name, value in (facts or {}).items():
        before = trained.get(name)
        if None not in (before, value) and before != value:
            remedy = "serve the draft with what it was trained with, or train it for what is served"
            found.append(Cause(f"other {name}", f"training had {before}, served is {value}", remedy))
    measured = profile.get("weights")
    if measured and measured != weight_fingerprints(draft):
        evidence = "the safetensors files differ from those that speculation_profile.json was measured on"
        found.append(Cause("other weights than measured", evidence, EXPORT_AGAIN))
    own, wanted = (config.get("max_position_embeddings") or math.inf for config in (theirs, ours))
    if own < wanted and own < context:
        evidence = (
            f"the draft's max_position_embeddings is {own:,}, the target's {wanted:,}, and texts here have up to "
            f"{context:,} tokens; vLLM takes the smaller for both, SGLang refuses the draft"
        )
        found.append(Cause("cut context", evidence, EXPORT_AGAIN))
    if "Eagle3" in (theirs.get("architectures") or [""])[0]:
        captured = theirs.get("eagle_aux_hidden_state_layer_ids")
        trained, layers = theirs.get("captured_layers") or captured, ours.get("num_hidden_layers")
        if trained and max(trained) == layers:
            evidence = f"the head reads state {layers} of {layers} layers, which engines give before the last norm"
            found.append(Cause("last state captured", evidence, f"train it on three states below {layers}"))
        if trained and captured and captured != trained:
            evidence = (
                f"the head was trained on the states that enter layers {trained}; eagle_aux_hidden_state_layer_ids is "
                f"{captured} (expected the same)"
            )
            found.append(Cause("captured layers off by one", evidence, EXPORT_AGAIN))
    elif ours and theirs and ours.get("vocab_size") != theirs.get("vocab_size"):
        evidence = f"config.json has {theirs.get('vocab_size')} tokens, the target's {ours.get('vocab_size')}"
        found.append(Cause("vocabulary", evidence, EXPORT_AGAIN))
    for name, config in (("target", ours), ("draft", theirs)):
        if quantised := config.get("quantization_config"):
            evidence = f"the {name}'s config.json has {quantised}; the prediction is for the weights in transformers"
            found.append(Cause("quantisation", evidence, "compare with the weights that it was made from"))
    return found


def causes_in_numbers(
    rows: Sequence[Mapping[str, Any]], *, other_ids: str | None = None, agreement: float | None = None
) -> list[Cause]:
    """Causes that the measured rows show.

    Args:
        rows: of `decode.commands.serve_check.serve_check`.
        other_ids: the first prompt that the engine splits into other token ids, if any.
        agreement: share of the tokens of the engine's greedy texts that are the argmax of the target here.
    """
    found: list[Cause] = []
    first: Mapping[str, Any] = next(
        (row["positions"][0] for row in rows if row["temperature"] == 0 and row.get("positions")), {}
    )
    for (before, after), (name, remedy) in STAGES.items():
        a, b = first.get(before), first.get(after)
        if a is not None and b is not None and a - b >= 0.1:
            evidence = f"{a:.1%} of the first drafted tokens are accepted in the column {before}, {b:.1%} in {after}"
            found.append(Cause(name, evidence, remedy))
    if other_ids:
        evidence = f"the engine makes other token ids of a prompt than this project: {other_ids}"
        remedy = "give the engine the target's own tokenizer files"
        found.append(Cause("another template or start token", evidence, remedy))
    if agreement is not None and agreement < 0.98:
        evidence = (
            f"{agreement:.1%} of the tokens that the engine writes greedily are the most probable ones of the target "
            "in transformers (more than 98 % where both are the same model in float32)"
        )
        remedy = "compare the target's files; a quantised target needs a prediction of its own"
        found.append(Cause("another target", evidence, remedy))
    if wrong := next((row for row in rows if row.get("lossless") is False), None):
        evidence = (
            f"at T = {wrong['temperature']:g} its texts with a draft have a mean log-probability of "
            f"{wrong['target_logprob']:.2f} under the target, without one {wrong['plain_target_logprob']:.2f}"
        )
        remedy = (
            "decode greedily in this build of the engine (vLLM 0.32 on a CPU divides the logits of drafted tokens by "
            "memory that was never filled), or take another one"
        )
        found.append(Cause("the engine's sampling with a draft is not the target's", evidence, remedy))
    return found
