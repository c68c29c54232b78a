"""Every method by name: which drafter, which stop rule, which acceptance rule.

The components that the columns of `METHODS` name are in `decode.methods`. Any drafter × stop rule × acceptance
rule combines: ``build("vanilla", inputs, rule="ears")`` or ``--method vanilla --rule ears``.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from decode.drafters.adaptix import open_adaptix
from decode.drafters.base import Drafter, NoDrafter
from decode.drafters.draft_model import ModelDrafter
from decode.drafters.eagle import FeatureDrafter, FeatureTreeDrafter, head_of
from decode.drafters.early_exit import EarlyExitDrafter
from decode.drafters.hybrid import HybridDrafter
from decode.drafters.lookahead import LookaheadDrafter
from decode.drafters.probe import advised, load_probe
from decode.drafters.prompt_lookup import LookupDrafter
from decode.drafters.rest import open_rest
from decode.errors import UserError, choose
from decode.loop import Method, tree_error
from decode.method_options import MethodOptions
from decode.models.fast_forward import LayerSubset
from decode.models.fast_runner import FastRunner, self_speculating
from decode.models.head_runner import HeadRunner
from decode.models.runner import Runner
from decode.sampling import LogitsWarper
from decode.stopping import (
    CostOptimal,
    DraftLengths,
    Fixed,
    MeanOfRejected,
    Roc,
    RoundCosts,
    StopRule,
    TargetAcceptance,
    max_probability,
    negative_entropy,
    token_probability,
    warped_token_probability,
)
from decode.verify import AcceptanceRule, Ears, Exact, Fuzzy, JensenShannon, Typical


@dataclass
class MethodInputs:
    """What a method is built from: the models with their tokenizer, the sampling settings, and the open options."""

    target: Runner  # the target's runner
    warp: LogitsWarper  # logits to probabilities, for both sides
    draft: Runner | None = None  # a draft model's runner, where there is one
    tokenizer: PreTrainedTokenizerBase | None = None  # the target's tokenizer, for methods that read text files
    datastore: Path | None = None  # folder of a REST datastore
    trigrams: Path | None = None  # folder of an Adaptix table
    options: MethodOptions = field(default_factory=MethodOptions)  # what the methods leave open
    costs: RoundCosts | None = None  # of rounds by batch size, where they were measured

    def window(self, default: int) -> int:
        """The draft length asked for, or the method's own."""
        return self.options.draft_length if self.options.draft_length is not None else default


def _model(inputs: MethodInputs) -> Drafter:
    if inputs.draft is None:
        raise UserError("this method drafts with a model; give one with --draft (a folder or hub name)")
    if isinstance(inputs.draft, HeadRunner):
        return FeatureDrafter(inputs.draft, inputs.target, inputs.warp)
    return ModelDrafter(inputs.draft, inputs.warp, inputs.target.vocab_size)


def _feature_tree(inputs: MethodInputs) -> Drafter:
    options = inputs.options
    return FeatureTreeDrafter(
        head_of(inputs.draft), inputs.target, inputs.warp,
        width=options.tree_width, nodes=options.tree_nodes, threshold=options.tree_threshold,
    )  # fmt: skip


def _rest(inputs: MethodInputs) -> Drafter:
    if inputs.datastore is None:
        raise UserError("rest needs a datastore; build one with python -m decode datastore build, give --datastore DIR")
    return open_rest(inputs.datastore, inputs.tokenizer)


def _hybrid(inputs: MethodInputs, make_head: Callable[[MethodInputs], Drafter] = _model) -> Drafter:
    head, options = make_head(inputs), inputs.options
    assert isinstance(head, ModelDrafter)
    store = open_rest(inputs.datastore, inputs.tokenizer).store if inputs.datastore is not None else None
    branch = options.copy_branch if isinstance(head, FeatureTreeDrafter) else 0  # chains stay chains
    return HybridDrafter(head, store, match=options.match_length, length=options.copy_length, branch=branch)


def _adaptix(best_first: bool) -> Callable[[MethodInputs], Drafter]:
    def make(inputs: MethodInputs) -> Drafter:
        if inputs.trigrams is None:
            raise UserError(
                "adaptix needs a tri-gram table; build one with python -m decode trigrams build, give --trigrams DIR"
            )
        options = inputs.options
        folder = smaller_store(inputs.trigrams, options.texts)
        drafter = open_adaptix(folder, inputs.tokenizer, order=options.order, best_first=best_first)
        return replace(drafter, searches=options.searches, gain=drafter.gain if options.adaptive else 0.0)

    return make


def smaller_store(folder: Path, texts: int | None) -> Path:
    """Where the tables of a part of the corpus lie, below those of all of it."""
    return folder if texts is None else folder / f"texts-{texts}"


def exit_layer(inputs: MethodInputs) -> int:
    """The exit layer asked for, or a quarter of the model's layers."""
    if inputs.options.exit_layer is not None:
        return inputs.options.exit_layer
    return max(1, round(self_speculating(inputs.target).depth / 4))


def _early_exit(inputs: MethodInputs) -> Drafter:
    runner = self_speculating(inputs.target)
    return EarlyExitDrafter(runner, inputs.warp, LayerSubset.early_exit(runner.depth, exit_layer(inputs)))


def _separate(inputs: MethodInputs) -> Drafter:
    runner = self_speculating(inputs.target)
    return ModelDrafter(runner.first_layers(exit_layer(inputs)), inputs.warp, runner.vocab_size)


def _layer_subset(inputs: MethodInputs) -> Drafter:
    attention, mlp, runner = inputs.options.skip_attention, inputs.options.skip_mlp, self_speculating(inputs.target)
    if not attention and not mlp:
        return _early_exit(inputs)
    return EarlyExitDrafter(runner, inputs.warp, LayerSubset.skipping(runner.depth, attention, mlp))


DRAFTERS: dict[str, Callable[[MethodInputs], Drafter]] = {
    "none": lambda inputs: NoDrafter(),
    "model": _model,
    "feature": lambda inputs: FeatureDrafter(head_of(inputs.draft), inputs.target, inputs.warp),
    "feature-tree": _feature_tree,
    "hybrid": _hybrid,
    "hybrid-tree": lambda inputs: _hybrid(inputs, _feature_tree),
    "prompt-lookup": lambda inputs: LookupDrafter(length=inputs.window(10)),
    "rest": _rest,
    "adaptix": _adaptix(best_first=False),
    "adaptix-best-first": _adaptix(best_first=True),
    "lookahead": lambda inputs: LookaheadDrafter(),
    "early-exit": _early_exit,
    "early-exit-separate": _separate,
    "layer-subset": _layer_subset,
}
MODEL_DRAFTERS = {"model", "feature", "feature-tree", "hybrid", "hybrid-tree"}
TREE_DRAFTERS = {"feature-tree", "hybrid-tree", "rest", "adaptix", "adaptix-best-first", "lookahead"}
CHAINS_BY_MODEL = {"model", "feature", "early-exit", "early-exit-separate", "layer-subset"}
SELF_DRAFTERS = {"early-exit", "early-exit-separate", "layer-subset"}


MakeStop = Callable[[MethodInputs], StopRule]


def _dynamic(schedule: str, roc: bool) -> MakeStop:
    def make(inputs: MethodInputs) -> StopRule:
        start = 0.4 if inputs.options.threshold is None else inputs.options.threshold
        threshold = Roc(start) if roc else Fixed(start)
        return StopRule(inputs.window(20), warped_token_probability, threshold=threshold, schedule=schedule)

    return make


def _controlled(product: bool, default: float) -> MakeStop:
    return lambda inputs: StopRule(
        inputs.window(12), token_probability, product=product, threshold=_controller(inputs, default, not product)
    )


def _controller(inputs: MethodInputs, default: float, keep_at_cap: bool) -> TargetAcceptance:
    start = default if inputs.options.threshold is None else inputs.options.threshold
    rate = 0.9 if inputs.options.target_acceptance is None else inputs.options.target_acceptance
    return TargetAcceptance(start, rate, keep_at_cap=keep_at_cap, window=inputs.window(12))


def _probed(kind: str) -> MakeStop:
    """AdaSPEED with a probe: the product of estimated acceptances instead of token probabilities."""

    def make(inputs: MethodInputs) -> StopRule:
        if inputs.options.probes is None:
            raise UserError(f"stopping on a {kind} needs one; train it with python -m probes, give --probes DIR")
        drafting = inputs.draft if inputs.draft is not None else inputs.target
        if drafting.model is None:
            raise UserError(f"{drafting.name} drafts without the layers that a {kind} reads; choose another stop rule")
        last = int(drafting.model.config.get_text_config().num_hidden_layers)
        layer = last if inputs.draft is not None else exit_layer(inputs)
        labels = ("match",) if inputs.warp.greedy else ("accept", "top-p", "match")
        probe = load_probe(inputs.options.probes, drafting.model, layer, kind, labels)
        return StopRule(inputs.window(12), probe, product=True, threshold=_controller(inputs, 0.8, False))

    return make


def _cost_optimal(inputs: MethodInputs) -> StopRule:
    """The costs are fixed before decoding, so that a seed gives one text."""
    threshold = CostOptimal(cost_ratio(inputs), inputs.options.verify_growth)
    return StopRule(inputs.window(20), token_probability, product=True, threshold=threshold)


def cost_ratio(inputs: MethodInputs) -> float:
    """c as it is given, else from the weights that are read, or the layers that draft."""
    c, target = inputs.options.cost_ratio, inputs.target
    if c is None and inputs.costs is not None:
        c = inputs.costs.drafting(1) / inputs.costs.plain(1)
    elif c is None and inputs.draft is not None and inputs.draft.weight_bytes and target.weight_bytes:
        c = inputs.draft.weight_bytes / target.weight_bytes
    elif c is None and inputs.draft is None and isinstance(target, FastRunner):
        skipped = inputs.options.skip_attention, inputs.options.skip_mlp
        part = LayerSubset.skipping(target.depth, *skipped) if any(skipped) else LayerSubset(exit_layer(inputs))
        c = part.sublayers / (2 * target.depth)
    return CostOptimal.cost_ratio if c is None else c


def round_costs(inputs: MethodInputs) -> RoundCosts:
    """Costs of rounds: those of c where it is given, else as measured, else those of `cost_ratio`."""
    if inputs.costs is not None and inputs.options.cost_ratio is None:
        return inputs.costs
    return RoundCosts.of_ratios(cost_ratio(inputs), inputs.options.verify_growth)


def _unsure(inputs: MethodInputs) -> StopRule:
    """DraftRequest before a token is drawn, so that what an unsure head would draft is not drafted at all."""
    start = 0.2 if inputs.options.threshold is None else inputs.options.threshold
    return StopRule(inputs.window(8), max_probability, product=True, threshold=Fixed(start), refuse=True)


STOPS: dict[str, MakeStop] = {
    "length": lambda inputs: StopRule(inputs.window(5)),
    "unsure": _unsure,
    "copy": lambda inputs: StopRule(inputs.window(10)),
    "hf-dynamic": _dynamic("constant", roc=True),
    "hf-constant": _dynamic("constant", roc=False),
    "hf-heuristic": _dynamic("heuristic", roc=True),
    "draft-verify": _controlled(product=False, default=0.6),
    "product": _controlled(product=True, default=0.8),
    "entropy": lambda inputs: StopRule(inputs.window(20), negative_entropy, threshold=MeanOfRejected()),
    "cost-optimal": _cost_optimal,
}

PROBE_STOPS: dict[str, MakeStop] = {kind: _probed(kind) for kind in ("probe", "confidence-probe")}
"""Stop rules that need a folder of probes."""

RULES: dict[str, Callable[[MethodInputs], AcceptanceRule]] = {
    "exact": lambda inputs: Exact(),
    "ears": lambda inputs: Ears(inputs.options.beta),
    "adasd": lambda inputs: JensenShannon(unwarped=inputs.warp.greedy),
    "adasd-a": lambda inputs: JensenShannon("a", unwarped=inputs.warp.greedy),
    "adasd-b": lambda inputs: JensenShannon("b", unwarped=inputs.warp.greedy),
    "adasd-c": lambda inputs: JensenShannon("c", unwarped=inputs.warp.greedy),
    "fuzzy": lambda inputs: Fuzzy(inputs.options.fuzzy_threshold),
    "typical": lambda inputs: Typical(inputs.options.typical_epsilon, inputs.options.typical_delta),
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
    "hybrid":                 ("hybrid",             "unsure",       "exact"),
    "hybrid-tree":            ("hybrid-tree",        "length",       "exact"),
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

DRAFTED = {name for name, (drafter, _, _) in METHODS.items() if drafter in MODEL_DRAFTERS}
"""Methods that a draft model or a feature head takes part in."""
HEADED = {name for name, (drafter, _, _) in METHODS.items() if drafter in ("feature", "feature-tree", "hybrid-tree")}
"""Methods that only a feature head can draft for."""
SELF_SPECULATIVE = {name for name, (drafter, _, _) in METHODS.items() if drafter in SELF_DRAFTERS}
"""Methods that draft with the target's own layers."""
PROBED = {name for name, (_, stop, _) in METHODS.items() if stop in PROBE_STOPS}  # methods that need a folder of probes


def is_lossless(method: str, rule: str | None = None) -> bool:
    """Whether the method's output is distributed as the target's."""
    return (rule or METHODS[method][2]) == "exact"


def build(method: str, inputs: MethodInputs, *, stop: str | None = None, rule: str | None = None) -> Method:
    """Put a method together.

    Args:
        method: a name of `METHODS`.
        inputs: models, sampling settings, corpus files and options.
        stop: another stop rule of `STOPS` in place of the method's own.
        rule: another acceptance rule of `RULES` in place of the method's own.

    Raises:
        UserError: unknown names, a model or file that the method needs is missing, or a target that reads no trees.
    """
    drafter_name, stop_name, rule_name = choose("method", method, METHODS)
    inputs = _advised(method, inputs)
    stop_rule = choose("stop rule", stop or stop_name, STOPS | PROBE_STOPS)(inputs)
    acceptance = choose("acceptance rule", rule or rule_name, RULES)(inputs)
    if drafter_name in TREE_DRAFTERS and not inputs.target.supports_trees:
        raise tree_error(inputs.target)
    drafter = DRAFTERS[drafter_name](inputs)
    drawing = drafter.head if isinstance(drafter, HybridDrafter) else drafter
    if isinstance(drawing, ModelDrafter):
        drawing.keep_logits, drawing.keep_probs = acceptance.needs_raw, not acceptance.exact
    lengths = _lengths(method, drafter_name, stop or stop_name, stop_rule, inputs)
    return Method(method, drafter, stop_rule, acceptance, lengths)


def _advised(method: str, inputs: MethodInputs) -> MethodInputs:
    """The inputs, with the options that were left open set to what was measured when the probes were trained."""
    options = inputs.options
    if options.probes is None or (method not in SELF_SPECULATIVE and method not in PROBED):
        return inputs
    advice = advised(options.probes, method, greedy=inputs.warp.greedy)
    if options.exit_layer is not None and options.exit_layer != advice.get("exit_layer"):
        return inputs  # thresholds belong to their layer
    missing = {key: value for key, value in advice.items() if getattr(options, key) in (None, [])}
    return replace(inputs, options=replace(options, **missing))


def _lengths(method: str, drafter: str, stop: str, rule: StopRule, inputs: MethodInputs) -> DraftLengths | None:
    """The limit of drafts to what pays, where it is asked for."""
    options = inputs.options
    if not options.never_slower and stop != "cost-optimal":
        return None
    if drafter not in CHAINS_BY_MODEL:
        if not options.never_slower or drafter == "none":
            return None
        known = ", ".join(name for name, (drafter, _, _) in METHODS.items() if drafter in CHAINS_BY_MODEL)
        raise UserError(f"never_slower has no cost model for {method}: leave the option out, or use one of {known}")
    return DraftLengths(round_costs(inputs), rule.window)
