"""Acceptance probes: a linear map from the exit's hidden state to the probability that the drafted token is accepted.

`draftsmith probe` trains them. A folder holds their weights (``probes.safetensors``) and ``probes.json``: a sample of
the weights of the model they are for, for each probe its kind, label, layer, calibration and metrics, and the settings
that were fastest.
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from decode.core.stop import DraftedTokens
from decode.core.verify import LN2, pick
from decode.errors import UserError
from decode.files import Fields, read_model_json, write_json, write_safely

KINDS = ("probe", "confidence-probe")
"""`probe` sees the hidden state alone (AdaSPEED); `confidence-probe` also the exit's `confidence_features`."""
MAKE_PROBES = "make them with `make probe` (draftsmith probe --config FILE, which writes runs/<name>/probes)"
FEATURES = ("log_probability", "entropy", "margin")
INPUT = "the hidden state after `layer` layers, through the model's final norm: what the exit's output head reads"
FORMULA = "sigmoid((weight · input + extra · features + bias) / temperature)"
LEAST = -30.0  # smallest log-probability, and negative of the largest margin, that a feature can take
SAMPLES = 4  # values kept of each weight of the model that probes belong to


def confidence_features(logits: Tensor, tokens: Tensor) -> Tensor:
    """What an exit's unwarped distributions, of ``logits [n, vocab]``, say of drafted ``tokens [n]``.

    Returns:
        ``[n, 3]``: log q(x), the entropy of q in bits, and the difference of the two largest logits.
    """
    known = logits.float().log_softmax(-1).clamp_min(-1e30)  # excluded tokens: probability 0 times a finite number
    top = known.topk(2, -1).values
    log_q = pick(known, tokens)
    margin = (top[:, 0] - top[:, 1]).clamp_max(-LEAST)
    return torch.stack([log_q.clamp_min(LEAST), -(known.exp() * known).sum(-1) / LN2, margin], -1)


@dataclass
class AcceptanceProbe:
    """sigmoid((w·h + u·features + b) / T): the probability that the token drafted from this state is accepted."""

    layer: int  # layers that ran before the state
    kind: str  # one of `KINDS`
    label: str  # what it was trained to predict
    weight: Tensor  # w ``[width]``
    extra: Tensor  # u ``[3]`` of a confidence probe, else empty
    bias: float  # b
    temperature: float = 1.0  # T, from calibration on held-out prompts
    metrics: Fields = field(default_factory=dict)  # its judgement on test prompts

    def logit(self, hidden: Tensor, features: Tensor | None = None) -> Tensor:
        """Log-odds ``[n]`` for states ``[n, width]`` and, for a confidence probe, features ``[n, 3]``."""
        z = hidden.float() @ self.weight.to(hidden.device)
        if len(self.extra):
            assert features is not None
            z = z + features @ self.extra.to(hidden.device)
        return (z + self.bias) / self.temperature

    def __call__(self, drafted: DraftedTokens) -> Tensor:
        """Confidence of drafted tokens, for `decode.core.stop.StopRule`."""
        # themselves after the first time
        self.weight, self.extra = (x.to(drafted.hidden.device) for x in (self.weight, self.extra))
        features = None
        if len(self.extra):
            assert drafted.tokens is not None
            features = confidence_features(drafted.logits, drafted.tokens)
        return self.logit(drafted.hidden, features).sigmoid()


def weight_sample(model: PreTrainedModel) -> Fields:
    """What tells one model from another: a hash of its weights' names and shapes, and a few values of each.

    Weights on the meta device, of a target that stands in an engine, have NaN for values.
    """
    digest = hashlib.sha256()
    values: list[float] = []
    for name, weight in sorted(model.named_parameters()):
        digest.update(f"{name} {tuple(weight.shape)}".encode())
        flat = (torch.full((weight.numel(),), math.nan) if weight.is_meta else weight.detach()).flatten()
        values += flat[:: max(1, flat.numel() // SAMPLES)][:SAMPLES].tolist()
    return {"shapes": digest.hexdigest()[:32], "values": values}


def same_weights(a: Any, b: Any) -> bool:
    """Whether two `weight_sample`s are of one model; float32, float16 and bfloat16 copies of it count as the same."""
    if not (isinstance(a, dict) and isinstance(b, dict)) or a.get("shapes") != b.get("shapes"):
        return False
    # bfloat16 rounds by a share of up to 2^-9, float16 below its normal numbers by up to 3e-8
    pairs = zip(a["values"], b["values"], strict=True)
    return all(math.isclose(*both, rel_tol=2**-8, abs_tol=1e-7) or any(map(math.isnan, both)) for both in pairs)


def save_probes(
    folder: Path, model: PreTrainedModel, probes: Sequence[AcceptanceProbe], best: Fields | None = None
) -> None:
    """Write a folder of probes; the description is replaced last, so that it never describes older weights.

    `best` holds for ``greedy`` and ``sampled`` the fastest `decode.methods.MethodOptions` of each method.
    """
    tensors = {}
    for p in probes:
        for name, values in (("weight", p.weight), ("extra", p.extra), ("bias", torch.tensor([p.bias]))):
            tensors[f"{p.label}/{p.kind}/{p.layer}/{name}"] = values.contiguous().clone()
    fields = ("label", "kind", "layer", "temperature", "metrics")
    described = [{key: getattr(p, key) for key in fields} for p in probes]
    note: Fields = {"model": weight_sample(model), "class": type(model).__name__}
    note |= {"input": INPUT, "features": FEATURES, "probability": FORMULA}
    note |= {"best": dict(best or {}), "probes": described}
    write_safely(folder / "probes.safetensors", lambda path: save_file(tensors, path))
    write_json(folder / "probes.json", note)


def describe_probes(folder: str | Path) -> Fields:
    """The description of a folder of probes.

    Raises:
        UserError: there is none, or it cannot be read.
    """
    if note := read_model_json(Path(folder) / "probes.json"):
        return note
    raise UserError(f"there are no probes in {str(folder)!r}; {MAKE_PROBES}")


def load_probe(
    folder: str | Path, model: PreTrainedModel, layer: int, kind: str, labels: Sequence[str]
) -> AcceptanceProbe:
    """The probe of a folder for one layer of a model that will draft; of several labels the preferred one first.

    Raises:
        UserError: no probes there, probes of another model, or none for this layer, kind and label.
    """
    note = describe_probes(folder)
    if not same_weights(note["model"], weight_sample(model)):
        raise UserError(
            f"the probes in {str(folder)!r} were trained on another model (a {note['class']} with other weights); "
            "train probes for this one with draftsmith probe"
        )
    fitting = [p for p in note["probes"] if p["kind"] == kind and p["label"] in labels]
    here = sorted((p for p in fitting if p["layer"] == layer), key=lambda p: labels.index(p["label"]))
    if not here:
        raise UserError(
            f"the folder {str(folder)!r} has a {kind} with label {' or '.join(labels)} for layers "
            f"{sorted({p['layer'] for p in fitting})}, not for layer {layer}; choose another exit_layer, or train one "
            "with draftsmith probe"
        )
    name = "{label}/{kind}/{layer}".format_map(here[0])
    try:
        tensors = load_file(Path(folder) / "probes.safetensors")
        weight, extra, bias = (tensors[f"{name}/{part}"] for part in ("weight", "extra", "bias"))
        return AcceptanceProbe(**here[0], weight=weight, extra=extra, bias=float(bias))
    except (OSError, KeyError, SafetensorError) as error:
        raise UserError(
            f"the weights of the probes in {str(folder)!r} are damaged or missing ({type(error).__name__}); train them "
            "again with draftsmith probe"
        ) from error


def advised(folder: str | Path, method: str, *, greedy: bool) -> Fields:
    """The options that were fastest for a method when the probes were trained; empty if it was not measured."""
    return describe_probes(folder).get("best", {}).get("greedy" if greedy else "sampled", {}).get(method, {})
