"""What an engine accepts of drafts, as it counts it and as predicted for the same texts, and why the two differ."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise, zip_longest
from pathlib import Path

import torch
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from decode.core.draft import Ids
from decode.core.round import clustered_ratio
from decode.core.sampling import LogitsWarper
from decode.files import Fields, read_json
from decode.measure.acceptance import offline_alphas
from decode.measure.baselines import using_config
from decode.models.huggingface import context_of
from decode.models.open import DraftModel, stop_ids
from decode.models.sources import weight_files

Accepted = Sequence[Sequence[Sequence[float]]]  # 1 where a drafted token is accepted, by text, depth and position
Text = tuple[Sequence[int], Sequence[int]]  # ids of a prompt, and of the tokens that follow it


# -- what an engine counts ---------------------------------------------------------------------------------------------


@dataclass
class Drafts:
    """Counts of verified drafts."""

    rounds: float = 0  # target forwards that verified a draft
    accepted: list[float] = field(default_factory=list)  # [i]: rounds that accepted at least i + 1 tokens

    def __sub__(self, earlier: Drafts) -> Drafts:
        pairs = zip_longest(self.accepted, earlier.accepted, fillvalue=0.0)
        return Drafts(self.rounds - earlier.rounds, [now - then for now, then in pairs])


@dataclass
class ServedText:
    """One text that an engine wrote."""

    ids: Ids  # new tokens, including the stop token
    seconds: float  # wall time of the request
    decode_seconds: float = 0.0  # time after the first token by the engine's clock; 0 if it reports none
    drafts: Drafts = field(default_factory=Drafts)
    ended: bool = False  # with one of llama.cpp's own end tokens

    @property
    def tokens_per_second(self) -> float:
        """After the first token, if the engine reports that time."""
        if self.decode_seconds and len(self.ids) > 1:
            return (len(self.ids) - 1) / self.decode_seconds
        return len(self.ids) / (self.seconds or math.nan)


def acceptance_rates(texts: Sequence[Drafts], length: int) -> list[float | None]:
    """Accepted ÷ reached at each of `length` positions of the drafts; None where none was reached."""
    reached = [sum(text.rounds for text in texts)]
    reached += [sum(sum(text.accepted[i : i + 1]) for text in texts) for i in range(length)]
    return [accepted / before if before else None for before, accepted in pairwise(reached)]


def mean_length(texts: Sequence[Drafts]) -> tuple[float, float]:
    """Accepted length 1 + Σ accepted / Σ rounds, which includes the target's own token, and its standard error."""
    mean, se = clustered_ratio([sum(text.accepted) for text in texts], [text.rounds for text in texts])
    return 1 + mean, se


# -- what is predicted -------------------------------------------------------------------------------------------------


@torch.inference_mode()
def acceptance(target: PreTrainedModel, draft: DraftModel, texts: Sequence[Text], depth: int) -> tuple[Accepted, float]:
    """Which tokens of texts that the target wrote a draft proposes, by teacher forcing.

    vLLM and llama.cpp draft the most probable token x of q at every temperature. Exact verification accepts it with
    probability p(x), which is the probability that the target itself writes x there: so in a text that is known, a
    drafted token is accepted exactly where the text has it. A round drafts `depth` tokens, which are the slots of a
    block; as many greedy tokens of the target are appended to each text, since drafts reach beyond its end.

    Returns:
        By text, depth and position whether a drafted token is accepted, the last depth standing for all deeper ones
        (heads have several: their first token is drafted from the target's states, others from their own); and the
        share of the texts' tokens that are the target's argmax, which is 1 for greedy texts of this target.
    """
    limit, answered = context_of(target.config.get_text_config()), [text for text in texts if text[1]]
    forced = []
    for prompt, new in answered:
        ids = [*prompt, *new]
        if len(ids) + depth <= limit:
            batch = torch.tensor([ids], device=target.device)
            with using_config(target, GenerationConfig(max_new_tokens=depth, do_sample=False, pad_token_id=0)):
                ids = target.generate(batch, attention_mask=torch.ones_like(batch))[0].tolist()
        forced.append((ids, len(prompt)))
    alphas = offline_alphas(target, {"draft": draft, "target": target}, forced, LogitsWarper(0.0), depth=depth)
    found = iter(zip(*(alpha.kept for alpha in alphas["draft"][0].shorter.get(depth, alphas["draft"]))))
    right = sum(sum(kept[: len(new)]) for kept, (_, new) in zip(alphas["target"][0].kept, answered))
    return [next(found) if new else [[]] for _, new in texts], right / max(1, sum(len(new) for _, new in texts))


def predicted_drafts(
    accept: Sequence[Sequence[float]],
    length: int,
    draft_length: int,
    *,
    budget: float = math.inf,
    ended: bool = False,
    beyond: bool | None = None,
) -> Drafts:
    """Counts of drafts in one text of `length` tokens, the first of which came from the prompt.

    Tokens accepted after the end of the text count too.

    Args:
        accept: whether a drafted token is accepted, by depth and position (see `acceptance`).
        length: tokens of the text.
        draft_length: tokens drafted per round.
        budget: most tokens that the text could have had, for an engine that drafts no more than what is left of it,
            less one.
        ended: the text ends with a token of llama.cpp's own, which it does not count unless it is the last one of its
            draft.
        beyond: whether drafted tokens after the end of the text are accepted; None: as `accept` says.
    """
    counted, start = Drafts(0, [0] * draft_length), 1
    while start < length:
        k, n = min(draft_length, len(accept[0]) - start, budget - start - 1), 0
        while n < k and not (ended and n + 1 < k and start + n == length - 1):
            in_text = beyond is None or start + n < length
            if not (accept[min(n, len(accept) - 1)][start + n] if in_text else beyond):
                break
            counted.accepted[n] += 1
            n += 1
        counted.rounds += k > 0
        start += n + 1
    return counted


def within(served: Drafts, least: Drafts, most: Drafts) -> bool:
    """Whether counts of one text are possible; least and most are the same where nothing is left to chance."""
    places = zip_longest(least.accepted, served.accepted, most.accepted, fillvalue=0.0)
    return served.rounds == least.rounds and all(low <= n <= high for low, n, high in places)


# -- why they differ ---------------------------------------------------------------------------------------------------

SHAPE = (
    "model_type", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "vocab_size", "rope_parameters", "rms_norm_eps", "sliding_window", "tie_word_embeddings",
)  # fmt: skip
"""Settings of a target that its drafts depend on."""


@dataclass(frozen=True)
class Cause:
    """A known cause of a difference between served and predicted acceptance."""

    name: str  # in a few words
    evidence: str
    remedy: str


def weight_fingerprints(folder: str | Path) -> dict[str, str]:
    """Hashes of a folder's safetensors files, by name."""
    hashes = {}
    for path in weight_files(Path(folder)):
        with path.open("rb") as file:
            hashes[path.name] = hashlib.file_digest(file, "blake2b").hexdigest()[:16]
    return hashes


def serving_facts(
    target: PreTrainedModel, folder: str | Path, tokenizer: PreTrainedTokenizerBase, *, chat: bool
) -> Fields:
    """What a draft is trained with and has to be served with: noted in its profile, compared by `causes_in_files`.

    The target is loaded from `folder`; its tokenizer's template counts only where texts are chats.
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
    return json.loads(json.dumps(facts, default=str))


def causes_in_files(target: Path, draft: Path, facts: Fields | None = None) -> list[Cause]:
    """Causes that the folders of target and draft show before anything is started.

    `facts` are `serving_facts` of the target, which are compared with those of the draft's training.
    """
    profile, config = read_json(draft / "speculation_profile.json"), read_json(draft / "config.json")
    trained = profile.get("trained_with") or {}
    remedy = "serve the draft with what it was trained with, or train it for what is served"
    causes = [
        Cause(f"other {name}", f"training had {trained[name]}, served is {value}", remedy)
        for name, value in (facts or {}).items()
        if trained.get(name, value) not in (None, value) and value is not None
    ]
    if profile.get("weights") not in (None, weight_fingerprints(draft)):
        evidence = "the safetensors files differ from those that speculation_profile.json was measured on"
        causes.append(Cause("other weights than measured", evidence, "export the draft again"))
    states = config.get("eagle_aux_hidden_state_layer_ids")
    layers = read_json(target / "config.json").get("num_hidden_layers")
    if states and max(states) == layers:
        evidence = f"the head reads state {layers} of {layers} layers, which engines give before the last norm"
        causes.append(Cause("last state captured", evidence, f"train it on three states below {layers}"))
    return causes


def causes_in_numbers(other_ids: str | None, agreement: float | None) -> list[Cause]:
    """Causes that the engine's answers show.

    `other_ids` tells the first prompt that it splits into other token ids, if any; `agreement` is the share of the
    tokens of its greedy texts that are the argmax of the target here.
    """
    causes = []
    if other_ids:
        remedy = "give the engine the target's own tokenizer files"
        causes.append(Cause("another template or start token", f"the engine makes other ids: {other_ids}", remedy))
    if agreement is not None and agreement < 0.98:
        evidence = (
            f"{agreement:.1%} of the tokens that the engine writes greedily are the most probable ones of the target "
            "in transformers, expected more than 98 %"
        )
        remedy = "compare the target's files; a quantised target needs a prediction of its own"
        causes.append(Cause("another target", evidence, remedy))
    return causes


UNEXPLAINED = "unexplained difference"  # the cause by which a check fails


def causes_in_counts(rows: Sequence[Fields], *, numbers: str, explained: bool) -> list[Cause]:
    """Why counts of texts in rows of `serve_check` differ from the prediction, or texts are not the target's.

    `numbers` is the number format that the engine computes in; `explained`: there are causes of other kinds.
    """
    wrong = [row for row in rows if row["unequal"] or row["other_texts"]]
    if wrong and numbers not in ("float32", "f32"):
        evidence = f"the engine computes in {numbers}, which decides near ties otherwise than the prediction"
        return [Cause("rounding", evidence, "check in float32 (--dtype float32, --gguf-type f32)")]
    if not wrong or explained:
        return []
    reasons = [row["unequal"] or "the texts are not the target's" for row in wrong]
    places = [f"T = {row['temperature']:g}, n = {row['draft_length']}" for row in wrong]
    remedy = "the engine reads the draft otherwise than draftsmith: look for a fault of its version, or report it"
    return [Cause(UNEXPLAINED, "; ".join(map(": ".join, zip(places, reasons))), remedy)]
