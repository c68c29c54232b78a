"""Every method by name: which drafter, which stop rule, which acceptance rule.

The table of systems is `METHODS`; each part has its paper's defaults below. Any drafter × stop rule × acceptance rule
combines: ``build("vanilla", parts, rule="ears")`` or ``--method vanilla --rule ears``.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from .drafters import Drafter, NoDrafter
from .drafters.model import ModelDrafter
from .errors import UserError
from .loop import System
from .rules import AcceptanceRule, Ears, Exact, Fuzzy, JensenShannon, Typical
from .runner import Runner
from .stop import (
    CostOptimal,
    Fixed,
    MeanOfRejected,
    Roc,
    StopRule,
    TargetAcceptance,
    negative_entropy,
    token_probability,
    warped_token_probability,
)
from .warp import Warp


@dataclass
class MethodOptions:
    """What a method leaves open; null takes the paper's value."""

    draft_length: int | None = None
    """Tokens drafted a round, or the window of an adaptive stop rule (vanilla and EARS 5, AdaSD and Hugging Face 20,
    Draft & Verify and AdaSPEED 12, prompt lookup 10)."""
    beta: float = 0.1
    """EARS: tolerance β(1 − max p); the paper uses 0.05 to 0.2, 0 is the exact rule."""
    threshold: float | None = None
    """Start of an adaptive confidence threshold (Draft & Verify 0.6, AdaSPEED 0.8, Hugging Face 0.4)."""
    target_acceptance: float = 0.9
    """Acceptance rate that Draft & Verify's and AdaSPEED's controller steers to."""
    fuzzy_threshold: float = 0.4
    """Fuzzy: largest Jensen–Shannon divergence (nats) between target and draft at which a token is kept."""
    typical_epsilon: float = 0.09
    """Typical acceptance: a token above this probability is always kept."""
    typical_delta: float = 0.3
    """Typical acceptance: factor of exp(−H(p))."""


@dataclass
class Parts:
    """What methods are put together from.

    Attributes:
        target: the target's runner.
        warp: logits to probabilities, for both sides.
        draft: a draft model's runner, where there is one.
        tokenizer: the target's tokenizer, for methods that read text files.
        datastore: folder of a REST datastore.
        trigrams: folder of an Adaptix table.
        options: what the methods leave open.
    """

    target: Runner
    warp: Warp
    draft: Runner | None = None
    tokenizer: PreTrainedTokenizerBase | None = None
    datastore: Path | None = None
    trigrams: Path | None = None
    options: MethodOptions = field(default_factory=MethodOptions)

    def window(self, default: int) -> int:
        """The draft length asked for, or the method's own."""
        return self.options.draft_length if self.options.draft_length is not None else default


def _model(parts: Parts) -> Drafter:
    if parts.draft is None:
        raise UserError("this method drafts with a model; give one with --draft (a folder or hub name)")
    return ModelDrafter(parts.draft, parts.warp, parts.target.vocab_size)


def _lookup(parts: Parts) -> Drafter:
    from .drafters.lookup import LookupDrafter

    return LookupDrafter(length=parts.window(10))


def _rest(parts: Parts) -> Drafter:
    from .drafters.retrieval import open_rest

    if parts.datastore is None:
        raise UserError("rest needs a datastore; build one with python -m decode datastore build, give --datastore DIR")
    return open_rest(parts.datastore, parts.tokenizer)


def _adaptix(best_first: bool) -> Callable[[Parts], Drafter]:
    def make(parts: Parts) -> Drafter:
        from .drafters.trigram import open_adaptix

        if parts.trigrams is None:
            raise UserError(
                "adaptix needs a tri-gram table; build one with python -m decode trigrams build, give --trigrams DIR"
            )
        return open_adaptix(parts.trigrams, parts.tokenizer, best_first=best_first)

    return make


def _lookahead(parts: Parts) -> Drafter:
    from .drafters.lookahead import Lookahead

    return Lookahead()


DRAFTERS: dict[str, Callable[[Parts], Drafter]] = {
    "none": lambda parts: NoDrafter(),
    "model": _model,
    "prompt-lookup": _lookup,
    "rest": _rest,
    "adaptix": _adaptix(best_first=False),
    "adaptix-best-first": _adaptix(best_first=True),
    "lookahead": _lookahead,
}


def _dynamic(schedule: str, roc: bool) -> Callable[[Parts], StopRule]:
    def make(parts: Parts) -> StopRule:
        start = 0.4 if parts.options.threshold is None else parts.options.threshold
        threshold = Roc(start) if roc else Fixed(start)
        return StopRule(parts.window(20), warped_token_probability, threshold=threshold, schedule=schedule)

    return make


def _controlled(product: bool, default: float) -> Callable[[Parts], StopRule]:
    def make(parts: Parts) -> StopRule:
        window = parts.window(12)
        start = default if parts.options.threshold is None else parts.options.threshold
        threshold = TargetAcceptance(start, parts.options.target_acceptance, keep_at_cap=not product, window=window)
        return StopRule(window, token_probability, product=product, threshold=threshold)

    return make


STOPS: dict[str, Callable[[Parts], StopRule]] = {
    "length": lambda parts: StopRule(parts.window(5)),
    "copy": lambda parts: StopRule(parts.window(10)),
    "hf-dynamic": _dynamic("constant", roc=True),
    "hf-constant": _dynamic("constant", roc=False),
    "hf-heuristic": _dynamic("heuristic", roc=True),
    "draft-verify": _controlled(product=False, default=0.6),
    "product": _controlled(product=True, default=0.8),
    "entropy": lambda parts: StopRule(parts.window(20), negative_entropy, threshold=MeanOfRejected()),
    "cost-optimal": lambda parts: StopRule(parts.window(20), token_probability, product=True, threshold=CostOptimal()),
}

RULES: dict[str, Callable[[Parts], AcceptanceRule]] = {
    "exact": lambda parts: Exact(),
    "ears": lambda parts: Ears(parts.options.beta),
    "adasd": lambda parts: JensenShannon(unwarped=parts.warp.greedy),
    "adasd-a": lambda parts: JensenShannon("a", unwarped=parts.warp.greedy),
    "adasd-b": lambda parts: JensenShannon("b", unwarped=parts.warp.greedy),
    "adasd-c": lambda parts: JensenShannon("c", unwarped=parts.warp.greedy),
    "fuzzy": lambda parts: Fuzzy(parts.options.fuzzy_threshold),
    "typical": lambda parts: Typical(parts.options.typical_epsilon, parts.options.typical_delta),
}

METHODS: dict[str, tuple[str, str, str]] = {
    # name                    drafter               stop rule       acceptance rule
    "autoregressive":         ("none",               "length",       "exact"),
    "vanilla":                ("model",              "length",       "exact"),
    "hf-dynamic":             ("model",              "hf-dynamic",   "exact"),
    "hf-constant":            ("model",              "hf-constant",  "exact"),
    "hf-heuristic":           ("model",              "hf-heuristic", "exact"),
    "draft-verify-threshold": ("model",              "draft-verify", "exact"),
    "product":                ("model",              "product",      "exact"),
    "cost-optimal":           ("model",              "cost-optimal", "exact"),
    "adasd":                  ("model",              "entropy",      "adasd"),
    "adasd-gen-only":         ("model",              "entropy",      "exact"),
    "adasd-verify-only":      ("model",              "length",       "adasd"),
    "adasd-a":                ("model",              "entropy",      "adasd-a"),
    "adasd-b":                ("model",              "entropy",      "adasd-b"),
    "adasd-c":                ("model",              "entropy",      "adasd-c"),
    "ears":                   ("model",              "length",       "ears"),
    "fuzzy":                  ("model",              "length",       "fuzzy"),
    "typical":                ("model",              "length",       "typical"),
    "prompt-lookup":          ("prompt-lookup",      "copy",         "exact"),
    "rest":                   ("rest",               "length",       "exact"),
    "adaptix":                ("adaptix",            "length",       "exact"),
    "adaptix-best-first":     ("adaptix-best-first", "length",       "exact"),
    "lookahead":              ("lookahead",          "length",       "exact"),
}  # fmt: skip


def _find(kind: str, name: str, table: dict) -> object:
    if name not in table:
        near = difflib.get_close_matches(name, table, 1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise UserError(f"unknown {kind} {name!r}; {hint}choose one of {', '.join(table)}")
    return table[name]


def check_method(method: str) -> None:
    """Refuse an unknown method before any model is loaded.

    Raises:
        UserError: naming the nearest method.
    """
    _find("method", method, METHODS)


def is_lossless(method: str, rule: str | None = None) -> bool:
    """Whether the method's output law is the target's."""
    return (rule or METHODS[method][2]) == "exact"


def build(method: str, parts: Parts, *, stop: str | None = None, rule: str | None = None) -> System:
    """Put a method together.

    Args:
        method: a name of `METHODS`.
        parts: models, warp, tables and options.
        stop: another stop rule of `STOPS` in place of the method's own.
        rule: another acceptance rule of `RULES` in place of the method's own.

    Raises:
        UserError: unknown names, or a part that the method needs is missing.
    """
    check_method(method)
    drafter_name, stop_name, rule_name = METHODS[method]
    stop_rule = _find("stop rule", stop or stop_name, STOPS)(parts)  # type: ignore[operator]
    acceptance = _find("acceptance rule", rule or rule_name, RULES)(parts)  # type: ignore[operator]
    drafter = DRAFTERS[drafter_name](parts)
    if isinstance(drafter, ModelDrafter):
        drafter.keep_logits = acceptance.needs_raw
    return System(method, drafter, stop_rule, acceptance)
