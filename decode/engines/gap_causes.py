"""Why a served draft is accepted otherwise than predicted: known causes, and how each was told."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from decode.errors import UserError, read_json
from decode.models.loading import check_tokenizers, load_tokenizer

ROWS_OF_TOKENS = ("embed", "wte", "lm_head")  # parts of the names of tensors that have a row for each token


def weight_fingerprints(folder: str | Path) -> dict[str, str]:
    """For each tensor of a folder's safetensors files ``hash``, or ``hash/rows`` where its rows are tokens.

    ``rows`` does not depend on the order of the rows, so that a permuted embedding is told from another one.

    Raises:
        UserError: a file cannot be read.
    """
    found: dict[str, str] = {}
    for file in sorted(Path(folder).glob("*.safetensors")):
        try:
            with safe_open(file, "pt") as content:
                for name in content.keys():  # noqa: SIM118
                    found[name] = _fingerprint(name, content.get_tensor(name))
        except (OSError, SafetensorError) as error:
            raise UserError(f"{file} cannot be read: {error}; export the draft again") from error
    return found


def _fingerprint(name: str, tensor: Tensor) -> str:
    raw = tensor.contiguous().flatten().view(torch.uint8).numpy()
    whole = hashlib.blake2b(raw.tobytes(), digest_size=6).hexdigest()
    if tensor.ndim != 2 or not any(part in name for part in ROWS_OF_TOKENS):
        return whole
    rows = raw.reshape(len(tensor), -1)
    total = sum(int.from_bytes(hashlib.blake2b(row.tobytes(), digest_size=6).digest(), "big") for row in rows)
    return f"{whole}/{total % (1 << 48):012x}"


def changed_weights(measured: Mapping[str, str], now: Mapping[str, str]) -> tuple[list[str], list[str]]:
    """Names of tensors that are not as measured, and of those among them whose rows only stand in another order."""
    changed = sorted(name for name in measured.keys() | now.keys() if measured.get(name) != now.get(name))
    rows = {name: (one.get(name, "").partition("/")[2]) for one in (measured,) for name in changed}
    permuted = [name for name in changed if rows[name] and rows[name] == now.get(name, "").partition("/")[2]]
    return changed, permuted


SNIFFED = ("eagle-", "eagle3", "dflash", "dspark")
"""Parts of a draft's path from which vLLM concludes on a method."""


@dataclass(frozen=True)
class Cause:
    """A known cause.

    Attributes:
        name: of the cause, in a few words.
        told_by: the evidence.
        remedy: what to do.
    """

    name: str
    told_by: str
    remedy: str


class Found(list[Cause]):
    """Causes that were found so far."""

    def tell(self, name: str, told_by: str, remedy: str) -> None:
        """Add one (see `Cause`)."""
        self.append(Cause(name, told_by, remedy))


def causes_in_files(target: str | Path, draft: str | Path, *, context: int, engine: str) -> list[Cause]:
    """What the folders alone show, before anything is started.

    Args:
        target: folder of the target.
        draft: folder of the draft or head.
        context: tokens of the longest text, prompt and answer.
        engine: that is to load them.
    """
    target, draft = Path(target), Path(draft)
    ours, theirs = read_json(target / "config.json"), read_json(draft / "config.json")
    profile = read_json(draft / "speculation_profile.json")
    found = Found([*_tokenizers(target, draft), *_weights(draft, profile), *_context(ours, theirs, context)])
    if "Eagle3" in (theirs.get("architectures") or [""])[0]:
        found += _eagle3(draft, theirs, ours.get("num_hidden_layers"))
    elif ours and theirs and ours.get("vocab_size") != theirs.get("vocab_size"):
        found.tell(
            "vocabulary",
            f"config.json has {theirs.get('vocab_size')} tokens, the target's {ours.get('vocab_size')}",
            "export the draft again: python -m distill pads or cuts it to the target's size",
        )
    for name, config in (("target", ours), ("draft", theirs)):
        if how := config.get("quantization_config"):
            kind = how.get("quant_method", "an unnamed method") if isinstance(how, Mapping) else how
            found.tell(
                "quantisation",
                f"the {name}'s config.json names {kind}; the prediction is of the weights as transformers reads it",
                "compare with the weights that it was made from",
            )
    if engine == "vllm" and "Eagle" not in (theirs.get("architectures") or [""])[0]:
        path = str(draft.resolve()).lower()
        found += [
            Cause("name of the folder", f"vLLM reads another method from {part!r} in {path}", "rename the folder")
            for part in SNIFFED
            if part in path
        ]
    return found


def _tokenizers(target: Path, draft: Path) -> list[Cause]:
    if not (draft / "tokenizer.json").exists() or not target.is_dir():
        return []
    try:
        check_tokenizers(load_tokenizer(target), load_tokenizer(draft))
    except UserError as error:
        sentence = str(error).split("; ")[0]
        return [Cause("another tokenizer", sentence, "train or export the draft with the target's tokenizer")]
    return []


def _weights(draft: Path, profile: Mapping[str, Any]) -> list[Cause]:
    """Weights that are not those which speculation_profile.json was measured on."""
    measured = profile.get("weights")
    if not measured:
        return []
    changed, permuted = changed_weights(measured, now := weight_fingerprints(draft))
    if not changed:
        return []
    again = "export the run again, so that weights and speculation_profile.json belong together"
    if permuted and len(permuted) == len(changed):
        return [
            Cause(
                "embeddings permuted",
                f"{', '.join(permuted)} has the measured rows in another order: ids and embeddings are of different "
                "tokenizers",
                again,
            )
        ]
    if measured.keys() != now.keys():
        names = sorted(measured.keys() ^ now.keys())
        return [Cause("other tensors", f"the file and its measurement differ in {', '.join(names[:3])}", again)]
    return [
        Cause(
            "weights of another step",
            f"{len(changed)} of {len(now)} tensors are not those that speculation_profile.json was measured on "
            f"({changed[0]} the first)",
            again,
        )
    ]


def _context(ours: Mapping[str, Any], theirs: Mapping[str, Any], context: int) -> list[Cause]:
    own, wanted = theirs.get("max_position_embeddings"), ours.get("max_position_embeddings")
    if not own or not wanted or own >= min(wanted, max(context, own + 1)) or own >= wanted:
        return []
    return [
        Cause(
            "cut context",
            f"the draft's max_position_embeddings is {own:,}, the target's {wanted:,}, and texts here have up to "
            f"{context:,} tokens; vLLM takes the smaller for both, SGLang refuses the draft",
            "export the draft again: rotary positions are extended to the target's context",
        )
    ]


def _eagle3(draft: Path, config: Mapping[str, Any], layers: int | None) -> list[Cause]:
    found, names = Found(), set()
    for file in draft.glob("*.safetensors"):
        with safe_open(file, "pt") as content:
            names |= set(content.keys())
    if config.get("bias") or config.get("attention_bias"):
        unfilled = "o_proj.bias and fc.bias" if not any(name.endswith(".bias") for name in names) else "some biases"
        found.tell(
            "bias in an EAGLE-3 head",
            f"config.json has bias set and no tensor fills {unfilled}: vLLM and SGLang leave random values there",
            "remove the key from config.json, or export the head again",
        )
    tables = sorted(names & {"d2t", "t2d"})
    if tables and config.get("draft_vocab_size") == config.get("vocab_size"):
        found.tell(
            "vocabulary",
            f"{', '.join(tables)} stands in a head that drafts every token, for which vLLM makes no parameter",
            "export the head again",
        )
    captured = config.get("eagle_aux_hidden_state_layer_ids")
    sglang = (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    trained = config.get("captured_layers") or captured
    if trained and max(trained) == layers:
        found.tell(
            "last state captured",
            f"the head reads state {layers} of {layers} layers, which is behind the target's last norm; vLLM and "
            "llama.cpp give the one before it, SGLang none",
            f"train it on three states below {layers} (eagle.layers)",
        )
    if trained and ((captured and captured != trained) or (sglang and [i + 1 for i in sglang] != list(trained))):
        found.tell(
            "captured layers off by one",
            f"the head was trained on the states that enter layers {trained}; eagle_aux_hidden_state_layer_ids "
            f"says {captured} to vLLM and llama.cpp (the same are wanted) and {sglang} to SGLang (one less)",
            "export the head again",
        )
    return found


def fits(served: float, predicted: float, error: float, slack: float = 0.02) -> bool:
    """Whether two mean accepted lengths agree within two standard errors, or within rounding where there is none."""
    return abs(served - predicted) <= max(2 * error if math.isfinite(error) else 0.0, slack)


def as_recorded(row: Mapping[str, Any]) -> bool:
    """Whether the prediction of a row is what the draft's profile measured, where it did."""
    if (recorded := row["recorded_length"]) is None:
        return True
    return fits(
        row["predicted_length"], recorded, math.hypot(row["predicted_length_se"], row["recorded_length_se"]), 0.1
    )


HARDLY = 1.2
"""Tokens a round below which a draft is accepted hardly ever."""
OFF_BY_ONE = "captured layers off by one"


def causes_in_numbers(rows: Sequence[Mapping[str, Any]], facts: Mapping[str, Any]) -> list[Cause]:
    """What the measured rows show.

    Args:
        rows: of `decode.engines.serve_check`, one for each temperature and draft length.
        facts: `agreement` of the engine's greedy texts with our target's argmax; `logprob` of the texts under the
            draft; `vocabulary`; `alternatives` by name: rows of mean lengths predicted under another reading;
            `tokenized` (first text that the engine splits otherwise, or None); `short` texts that ended early;
            `together`: rows of several texts at a time.
    """
    found = Found()
    if facts.get("tokenized"):
        found.tell(
            "another template or start token",
            f"the engine makes other ids of a prompt than we do: {facts['tokenized']}",
            "give the engine the target's own tokenizer files",
        )
    if (agreement := facts.get("agreement")) is not None and agreement < 0.98:
        found.tell(
            "another target",
            f"{agreement:.1%} of the tokens that the engine writes greedily are the most probable ones of the "
            "target as transformers reads it (more than 98 % where it is the same in 32 bits)",
            "compare the target's files; a quantised target needs a prediction of its own",
        )
    hardly = all(row["predicted_length"] < HARDLY for row in rows)
    if hardly and facts.get("logprob") is not None and facts["logprob"] < -math.log(facts["vocabulary"]):
        found.tell(
            "embeddings or head of another tokenizer",
            f"the draft gives the target's tokens a mean log-probability of {facts['logprob']:.1f}, less than "
            f"guessing among {facts['vocabulary']:,} would ({-math.log(facts['vocabulary']):.1f})",
            "export the draft again from the trained weights",
        )
    for row in rows:
        recorded = row["recorded_length"]
        if not as_recorded(row):
            key = row["temperature"], row["draft_length"]
            shifted = {
                name: told[key] for name, told in facts.get("alternatives", {}).items() if name.startswith(OFF_BY_ONE)
            }
            best = max(shifted, key=lambda name: shifted[name], default="")
            if best and shifted[best] > row["predicted_length"] + 2 * row["predicted_length_se"]:
                found.tell(
                    best,
                    f"speculation_profile.json has a mean accepted length of {recorded:.2f}; with the layers that "
                    f"config.json names it is {row['predicted_length']:.2f}, read so it is {shifted[best]:.2f}",
                    REMEDIES[OFF_BY_ONE],
                )
                break
            found.tell(
                "another draft than the measured one, or other prompts",
                f"speculation_profile.json has a mean accepted length of {recorded:.2f} at {row['draft_length']} "
                f"tokens; these weights on these prompts give {row['predicted_length']:.2f} in transformers",
                "give the suite that the profile names; if it is, export the run again",
            )
            break
    if wrong := next((row for row in rows if row.get("lossless") is False), None):
        found.tell(
            "the engine's sampling with a draft is not the target's",
            f"at T = {wrong['temperature']:g} its texts with a draft have a mean log-probability of "
            f"{wrong['target_logprob']:.2f} under the target, without one {wrong['plain_target_logprob']:.2f}",
            "decode greedily in this build of the engine (vLLM 0.32 on a CPU divides the logits of drafted tokens "
            "by memory that was never filled), or take another one",
        )
    apart = [row for row in rows if not row["fits"] and row.get("lossless") is not False]
    for row in apart:
        for name, told in facts.get("alternatives", {}).items():
            other = told.get((row["temperature"], row["draft_length"]))
            if other is not None and fits(row["served_length"], other, row["difference_se"]):
                found.tell(
                    name,
                    f"at T = {row['temperature']:g} and {row['draft_length']} tokens the engine accepts "
                    f"{row['served_length']:.2f} a round, predicted {row['predicted_length']:.2f}; read so it "
                    f"would be {other:.2f}",
                    REMEDIES.get(name.partition(" (")[0], "compare the engine's configuration with the draft's"),
                )
    alone = {row["draft_length"]: row["served_length"] for row in rows if not row["temperature"]}
    for row in facts.get("together", []):
        one, many = alone[row["draft_length"]], row["served_length"]
        if one - many > max(0.05, 0.1 * (one - 1)):
            found.tell(
                "batch",
                f"with {row['batch_size']} texts at a time the engine accepts {many:.2f} a round, one at a time "
                f"{one:.2f}; a text's drafts should not depend on the texts beside it",
                "serve one text at a time with this draft, or in another engine",
            )
    if short := facts.get("short"):
        found.tell(
            "cut context",
            f"{short} texts end before their budget with a draft that go on without one",
            "give the draft the target's max_position_embeddings",
        )
    return list({cause.name: cause for cause in reversed(found)}.values())[::-1]


REMEDIES = {
    "greedy drafting": "above T = 0 give --draft-sampling probabilistic (vLLM: draft_sample_method), or expect this",
    OFF_BY_ONE: "compare eagle_aux_hidden_state_layer_ids with the layers of the training",
}
