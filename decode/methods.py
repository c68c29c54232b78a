"""Every method by name: which drafter, which stop rule, which acceptance rule.

The table of systems is `METHODS`; each part has its paper's defaults below. Any drafter × stop rule × acceptance rule
combines: ``build("vanilla", parts, rule="ears")`` or ``--method vanilla --rule ears``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from decode.core.acceptance import AcceptanceRule, Ears, Exact, Fuzzy, JensenShannon, Typical
from decode.core.drafter import Drafter, NoDrafter
from decode.core.errors import UserError, unknown
from decode.core.options import Parts
from decode.core.stopping import StopRule, negative_entropy, token_probability, warped_token_probability
from decode.core.thresholds import CostOptimal, Fixed, MeanOfRejected, Roc, TargetAcceptance
from decode.drafters.draft_model import ModelDrafter
from decode.drafters.eagle import FeatureDrafter, FeatureTreeDrafter, head_of
from decode.drafters.early_exit import EarlyExitDrafter
from decode.loop import System
from decode.models.eagle.runner import HeadRunner
from decode.models.partial import Part, early_exit, separate_copy, walkable


def _model(parts: Parts) -> Drafter:
    if parts.draft is None:
        raise UserError("this method drafts with a model; give one with --draft (a folder or hub name)")
    if isinstance(parts.draft, HeadRunner):
        return FeatureDrafter(parts.draft, parts.target, parts.warp)
    return ModelDrafter(parts.draft, parts.warp, parts.target.vocab_size)


def _feature_tree(parts: Parts) -> Drafter:
    options = parts.options
    head = head_of(parts.draft)
    return FeatureTreeDrafter(head, parts.target, parts.warp, width=options.tree_width, nodes=options.tree_nodes)


def _lookup(parts: Parts) -> Drafter:
    from decode.drafters.prompt_lookup import LookupDrafter

    return LookupDrafter(length=parts.window(10))


def _rest(parts: Parts) -> Drafter:
    from decode.drafters.rest.drafter import open_rest

    if parts.datastore is None:
        raise UserError("rest needs a datastore; build one with python -m decode datastore build, give --datastore DIR")
    return open_rest(parts.datastore, parts.tokenizer)


def _adaptix(best_first: bool) -> Callable[[Parts], Drafter]:
    def make(parts: Parts) -> Drafter:
        from decode.drafters.adaptix.drafter import open_adaptix

        if parts.trigrams is None:
            raise UserError(
                "adaptix needs a tri-gram table; build one with python -m decode trigrams build, give --trigrams DIR"
            )
        options = parts.options
        folder = smaller_store(parts.trigrams, options.texts)
        drafter = open_adaptix(folder, parts.tokenizer, order=options.order, best_first=best_first)
        return replace(drafter, searches=options.searches, gain=drafter.gain if options.adaptive else 0.0)

    return make


def smaller_store(folder: Path, texts: int | None) -> Path:
    """Where the tables of a part of the corpus lie, below those of all of it."""
    return folder if texts is None else folder / f"texts-{texts}"


def _lookahead(parts: Parts) -> Drafter:
    from decode.drafters.lookahead import LookaheadDrafter

    return LookaheadDrafter()


def exit_layer(parts: Parts) -> int:
    """The exit layer asked for, or a quarter of the model's layers."""
    if parts.options.exit_layer is not None:
        return parts.options.exit_layer
    return max(1, round(walkable(parts.target).depth / 4))


def _early_exit(parts: Parts) -> Drafter:
    runner = walkable(parts.target)
    return EarlyExitDrafter(runner, parts.warp, early_exit(runner, exit_layer(parts)))


def _separate(parts: Parts) -> Drafter:
    runner = walkable(parts.target)
    return ModelDrafter(separate_copy(runner, exit_layer(parts)), parts.warp, runner.vocab_size)


def _layer_subset(parts: Parts) -> Drafter:
    options = parts.options
    if not options.skip_attention and not options.skip_mlp:
        return _early_exit(parts)
    runner = walkable(parts.target)
    part = Part.skipping(runner.depth, options.skip_attention, options.skip_mlp)
    return EarlyExitDrafter(runner, parts.warp, part)


DRAFTERS: dict[str, Callable[[Parts], Drafter]] = {
    "none": lambda parts: NoDrafter(),
    "model": _model,
    "feature": lambda parts: FeatureDrafter(head_of(parts.draft), parts.target, parts.warp),
    "feature-tree": _feature_tree,
    "prompt-lookup": _lookup,
    "rest": _rest,
    "adaptix": _adaptix(best_first=False),
    "adaptix-best-first": _adaptix(best_first=True),
    "lookahead": _lookahead,
    "early-exit": _early_exit,
    "early-exit-separate": _separate,
    "layer-subset": _layer_subset,
}
MODEL_DRAFTERS = {"model", "feature", "feature-tree"}
SELF_DRAFTERS = {"early-exit", "early-exit-separate", "layer-subset"}


def _dynamic(schedule: str, roc: bool) -> Callable[[Parts], StopRule]:
    def make(parts: Parts) -> StopRule:
        start = 0.4 if parts.options.threshold is None else parts.options.threshold
        threshold = Roc(start) if roc else Fixed(start)
        return StopRule(parts.window(20), warped_token_probability, threshold=threshold, schedule=schedule)

    return make


def _controlled(product: bool, default: float) -> Callable[[Parts], StopRule]:
    def make(parts: Parts) -> StopRule:
        window = parts.window(12)
        return StopRule(window, token_probability, product=product, threshold=_controller(parts, default, not product))

    return make


def _controller(parts: Parts, default: float, keep_at_cap: bool) -> TargetAcceptance:
    start = default if parts.options.threshold is None else parts.options.threshold
    rate = 0.9 if parts.options.target_acceptance is None else parts.options.target_acceptance
    return TargetAcceptance(start, rate, keep_at_cap=keep_at_cap, window=parts.window(12))


def _probed(kind: str) -> Callable[[Parts], StopRule]:
    """AdaSPEED with a probe: the product of estimated acceptances instead of token probabilities."""

    def make(parts: Parts) -> StopRule:
        from decode.drafters.acceptance_probe import load_probe

        if parts.options.probes is None:
            raise UserError(f"stopping on a {kind} needs one; train it with python -m probes, give --probes DIR")
        drafting = parts.draft if parts.draft is not None else parts.target
        layer = drafting.config.num_hidden_layers if parts.draft is not None else exit_layer(parts)
        labels = ("match",) if parts.warp.greedy else ("accept", "top-p", "match")
        probe = load_probe(parts.options.probes, drafting.model, layer, kind, labels)
        return StopRule(parts.window(12), probe, product=True, threshold=_controller(parts, 0.8, False))

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

PROBE_STOPS: dict[str, Callable[[Parts], StopRule]] = {kind: _probed(kind) for kind in ("probe", "confidence-probe")}
"""Stop rules that need a folder of probes."""

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
    "eagle":                  ("feature",            "length",       "exact"),
    "eagle-tree":             ("feature-tree",       "length",       "exact"),
    "prompt-lookup":          ("prompt-lookup",      "copy",         "exact"),
    "rest":                   ("rest",               "length",       "exact"),
    "adaptix":                ("adaptix",            "length",       "exact"),
    "adaptix-best-first":     ("adaptix-best-first", "length",       "exact"),
    "lookahead":              ("lookahead",          "length",       "exact"),
    "layerskip":              ("early-exit",         "length",       "exact"),
    "layerskip-separate":     ("early-exit-separate", "length",      "exact"),
    "draft-verify":           ("layer-subset",       "draft-verify", "exact"),
    "adaspeed":               ("early-exit",         "product",      "exact"),
    "adaspeed-probe":         ("early-exit",         "probe",        "exact"),
    "confidence-probe":       ("early-exit",         "confidence-probe", "exact"),
    "draft-probe":            ("model",              "probe",        "exact"),
}  # fmt: skip

DRAFTED = {name for name, parts in METHODS.items() if parts[0] in MODEL_DRAFTERS}
"""Methods that a draft model or a feature head takes part in."""
HEADED = {name for name, parts in METHODS.items() if parts[0] in ("feature", "feature-tree")}
"""Methods that only a feature head can draft for."""
SELF_SPECULATIVE = {name for name, parts in METHODS.items() if parts[0] in SELF_DRAFTERS}
"""Methods that draft with the target's own layers."""
PROBED = {name for name, parts in METHODS.items() if parts[1] in PROBE_STOPS}
"""Methods that need a folder of probes."""


def _find(kind: str, name: str, table: dict) -> object:
    if name not in table:
        raise UserError(unknown(kind, name, table))
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
    parts = _advised(method, parts)
    stop_rule = _find("stop rule", stop or stop_name, STOPS | PROBE_STOPS)(parts)  # type: ignore[operator]
    acceptance = _find("acceptance rule", rule or rule_name, RULES)(parts)  # type: ignore[operator]
    drafter = DRAFTERS[drafter_name](parts)
    if isinstance(drafter, ModelDrafter):
        drafter.keep_logits, drafter.keep_laws = acceptance.needs_raw, not acceptance.exact
    return System(method, drafter, stop_rule, acceptance)


def _advised(method: str, parts: Parts) -> Parts:
    """The parts with options left open filled in as measured when the probes were trained."""
    options = parts.options
    if options.probes is None or (method not in SELF_SPECULATIVE and method not in PROBED):
        return parts
    from decode.drafters.acceptance_probe import advised

    advice = advised(options.probes, method, greedy=parts.warp.greedy)
    if options.exit_layer is not None and options.exit_layer != advice.get("exit_layer"):
        return parts  # thresholds belong to their layer
    missing = {key: value for key, value in advice.items() if getattr(options, key) in (None, [])}
    return replace(parts, options=replace(options, **missing))
