"""Every method by name: which drafter, which stop rule, which acceptance rule.

Any drafter × stop rule × acceptance rule combines: ``build("vanilla", inputs, rule="ears")`` or ``--method vanilla
--rule ears``.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from decode.drafters.adaptix import NgramTable, TrigramDrafter
from decode.drafters.base import Drafter, NoDrafter
from decode.drafters.block import BlockDrafter, BlockTreeDrafter
from decode.drafters.corpus_files import tokenizer_fingerprint
from decode.drafters.draft_model import ModelDrafter
from decode.drafters.eagle import FeatureDrafter, FeatureTreeDrafter, head_of
from decode.drafters.early_exit import EarlyExitDrafter
from decode.drafters.hybrid import HybridDrafter
from decode.drafters.lookahead import LookaheadDrafter
from decode.drafters.probe import advised, load_probe
from decode.drafters.prompt_lookup import LookupDrafter
from decode.drafters.rest import Datastore, RetrievalDrafter
from decode.drafters.suffix import SuffixDrafter
from decode.errors import UserError, choose
from decode.loop import Method, tree_error
from decode.method_options import MethodOptions
from decode.models.block_runner import BlockRunner
from decode.models.fast_forward import LayerSubset
from decode.models.fast_runner import FastRunner, self_speculating
from decode.models.head_runner import HeadRunner
from decode.models.mtp import MtpRunner
from decode.models.runner import Runner
from decode.sampling import LogitsWarper
from decode.stopping import (
    Confidence,
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
    own_estimate,
    token_probability,
    warped_token_probability,
)
from decode.verify import AcceptanceRule, Ears, Exact, Fuzzy, JensenShannon, Typical

METHODS: dict[str, tuple[str, str, str]] = {
    # name               drafter                stop rule           acceptance rule
    "autoregressive":    ("none",                "length",           "exact"),
    "vanilla":           ("model",               "length",           "exact"),
    "hf-dynamic":        ("model",               "hf-dynamic",       "exact"),
    "hf-constant":       ("model",               "hf-constant",      "exact"),
    "hf-heuristic":      ("model",               "hf-heuristic",     "exact"),
    "cost-optimal":      ("model",               "cost-optimal",     "exact"),
    "adasd":             ("model",               "entropy",          "adasd"),
    "adasd-gen-only":    ("model",               "entropy",          "exact"),
    "adasd-verify-only": ("model",               "length",           "adasd"),
    "adasd-a":           ("model",               "entropy",          "adasd-a"),
    "adasd-b":           ("model",               "entropy",          "adasd-b"),
    "adasd-c":           ("model",               "entropy",          "adasd-c"),
    "ears":              ("model",               "length",           "ears"),
    "fuzzy":             ("model",               "length",           "fuzzy"),
    "typical":           ("model",               "length",           "typical"),
    "eagle":             ("feature",             "length",           "exact"),
    "eagle-tree":        ("feature-tree",        "length",           "exact"),
    "block":             ("feature",             "length",           "exact"),
    "block-tree":        ("feature-tree",        "length",           "exact"),
    "block-confidence":  ("feature",             "confidence-head",  "exact"),
    "hybrid":            ("hybrid",              "unsure",           "exact"),
    "hybrid-tree":       ("hybrid-tree",         "length",           "exact"),
    "prompt-lookup":     ("prompt-lookup",       "copy",             "exact"),
    "suffix":            ("suffix",              "suffix",           "exact"),
    "rest":              ("rest",                "length",           "exact"),
    "adaptix":           ("adaptix",             "length",           "exact"),
    "lookahead":         ("lookahead",           "length",           "exact"),
    "layerskip":         ("early-exit",          "length",           "exact"),
    "draft-verify":      ("layer-subset",        "draft-verify",     "exact"),
    "adaspeed":          ("early-exit",          "product",          "exact"),
    "adaspeed-probe":    ("early-exit",          "probe",            "exact"),
    "confidence-probe":  ("early-exit",          "confidence-probe", "exact"),
    "draft-probe":       ("model",               "probe",            "exact"),
}  # fmt: skip


def _drafting_with(*drafters: str) -> set[str]:
    return {name for name, (drafter, _, _) in METHODS.items() if drafter in drafters}


HEADED = _drafting_with("feature", "feature-tree", "hybrid-tree")  # methods that only a feature head can draft for
DRAFTED = HEADED | _drafting_with("model", "hybrid")  # methods in which a draft model or a feature head takes part
SELF_SPECULATIVE = _drafting_with("early-exit", "layer-subset")
CHAINS_BY_MODEL = SELF_SPECULATIVE | _drafting_with("model", "feature")  # methods whose drafts have a cost model
PROBED = {name for name, (_, stop, _) in METHODS.items() if stop.endswith("probe")}  # methods that need a probe folder
TREE_DRAFTERS = {"feature-tree", "hybrid-tree", "rest", "adaptix", "lookahead"}


@dataclass
class MethodInputs:
    """What a method is built from: the models with their tokenizer, the sampling settings, and the open options."""

    target: Runner
    warp: LogitsWarper  # logits to probabilities, for target and draft
    draft: Runner | None = None
    tokenizer: PreTrainedTokenizerBase | None = None  # of the target, for methods that read text files
    datastore: Path | None = None  # folder of a REST datastore
    trigrams: Path | None = None  # folder of an Adaptix table
    options: MethodOptions = field(default_factory=MethodOptions)
    costs: RoundCosts | None = None  # measured costs of rounds by batch size

    def window(self, default: int) -> int:
        """The draft length of the options, or the method's own."""
        return default if self.options.draft_length is None else self.options.draft_length

    def start(self, default: float) -> float:
        """The threshold of the options, or the method's own."""
        return default if self.options.threshold is None else self.options.threshold

    def controller(self, default: float, keep_at: int | None = None) -> TargetAcceptance:
        """The threshold that is steered to a target acceptance."""
        rate = self.options.target_acceptance
        return TargetAcceptance(self.start(default), 0.9 if rate is None else rate, keep_at=keep_at)

    @property
    def exit_layer(self) -> int:
        """The exit layer of the options, or a quarter of the model's layers."""
        given = self.options.exit_layer
        return max(1, round(self_speculating(self.target).depth / 4)) if given is None else given


def round_costs(inputs: MethodInputs) -> RoundCosts:
    """Measured costs of rounds, else c from the weights that are read, or from the layers that draft."""
    if inputs.costs is not None:
        return inputs.costs
    target, draft, skipped = inputs.target, inputs.draft, (inputs.options.skip_attention, inputs.options.skip_mlp)
    c = CostOptimal.cost
    if draft is not None and draft.weight_bytes and target.weight_bytes:
        c = draft.weight_bytes / target.weight_bytes
    elif draft is None and isinstance(target, FastRunner):
        part = LayerSubset.skipping(target.depth, *skipped) if any(skipped) else LayerSubset(inputs.exit_layer)
        c = part.sublayers / (2 * target.depth)
    return RoundCosts.of_ratios(c, block=isinstance(draft, BlockRunner))


def smaller_store(folder: Path, texts: int | None) -> Path:
    """The folder of the tables made from a part of the corpus, below that of all of it."""
    return folder if texts is None else folder / f"texts-{texts}"


def store_of(inputs: MethodInputs) -> Datastore | None:
    """The datastore of the inputs, whose tokenizer has to be the target's."""
    return None if inputs.datastore is None else Datastore(inputs.datastore, tokenizer_fingerprint(inputs.tokenizer))


def make_drafter(name: str, inputs: MethodInputs) -> Drafter:
    """The drafter of a line of `METHODS`.

    Raises:
        UserError: a model or file that it needs is missing.
    """
    target, draft, warp, options = inputs.target, inputs.draft, inputs.warp, inputs.options
    if name in ("feature-tree", "hybrid-tree"):
        shape = {"width": options.tree_width, "nodes": options.tree_nodes}
        if isinstance(draft, BlockRunner):
            drafter: ModelDrafter = BlockTreeDrafter(draft, target, warp, **shape, threshold=options.tree_threshold)
        else:
            drafter = FeatureTreeDrafter(head_of(draft), target, warp, **shape, threshold=options.tree_threshold)
    elif isinstance(draft, BlockRunner) and name in ("feature", "model", "hybrid"):
        drafter = BlockDrafter(draft, target, warp, sample=options.sample_block)
    elif name == "feature" or (name in ("model", "hybrid") and isinstance(draft, HeadRunner | MtpRunner)):
        drafter = FeatureDrafter(draft if isinstance(draft, MtpRunner) else head_of(draft), target, warp)
    elif name in ("model", "hybrid"):
        assert draft is not None  # `decode.commands.checks.check_methods` refuses missing models and stores by name
        drafter = ModelDrafter(draft, warp, target.vocab_size)
    elif name == "prompt-lookup":
        return LookupDrafter(length=inputs.window(10))
    elif name == "suffix":
        return SuffixDrafter()
    elif name == "lookahead":
        return LookaheadDrafter()
    elif name == "rest":
        store = store_of(inputs)
        assert store is not None
        return RetrievalDrafter(store)
    elif name == "adaptix":
        assert inputs.trigrams is not None
        folder = smaller_store(inputs.trigrams, options.texts)
        table = NgramTable(folder, tokenizer_fingerprint(inputs.tokenizer), order=options.order)
        return TrigramDrafter(table, searches=options.searches, gain=TrigramDrafter.gain if options.adaptive else 0.0)
    elif name == "none":
        return NoDrafter()
    else:  # the target's own layers
        assert name in ("early-exit", "layer-subset"), name
        runner, skipped = self_speculating(target), (options.skip_attention, options.skip_mlp)
        if name == "layer-subset" and any(skipped):
            return EarlyExitDrafter(runner, warp, LayerSubset.skipping(runner.depth, *skipped))
        return EarlyExitDrafter(runner, warp, LayerSubset.early_exit(runner.depth, inputs.exit_layer))
    if name.startswith("hybrid"):
        branch = options.copy_branch if name == "hybrid-tree" else 0  # chains stay chains
        return HybridDrafter(drafter, store_of(inputs), length=options.copy_length, branch=branch)
    return drafter


def _cost_optimal(
    inputs: MethodInputs, confidence: Confidence = token_probability, *, refuse: bool = False
) -> StopRule:
    """Costs are fixed before decoding, so that a seed gives one text."""
    costs = round_costs(inputs)
    threshold = CostOptimal(costs.drafting(1) / costs.plain(1))
    return StopRule(inputs.window(20), confidence, product=True, threshold=threshold, refuse=refuse)


def _probed(inputs: MethodInputs, kind: str) -> StopRule:
    """AdaSPEED's rule on acceptances that a probe estimates instead of token probabilities."""
    if inputs.options.probes is None:
        raise UserError(f"stopping on a {kind} needs one; train it with python -m probes, give --probes DIR")
    drafting = inputs.target if inputs.draft is None else inputs.draft
    if drafting.model is None:
        raise UserError(f"{drafting.name} drafts without the layers that a {kind} reads; choose another stop rule")
    last = int(drafting.model.config.get_text_config().num_hidden_layers)
    layer = inputs.exit_layer if inputs.draft is None else last
    labels = ("match",) if inputs.warp.greedy else ("accept", "top-p", "match")
    probe = load_probe(inputs.options.probes, drafting.model, layer, kind, labels)
    return StopRule(inputs.window(12), probe, product=True, threshold=inputs.controller(0.8))


STOPS: dict[str, Callable[[MethodInputs], StopRule]] = {
    "length": lambda i: StopRule(i.window(5)),
    "copy": lambda i: StopRule(i.window(10)),
    "suffix": lambda i: StopRule(i.window(24)),
    # compares before a token is drawn: where the head is unsure nothing is drafted
    "unsure": lambda i: StopRule(i.window(8), max_probability, True, Fixed(i.start(0.2)), refuse=True),
    "hf-dynamic": lambda i: StopRule(i.window(20), warped_token_probability, False, Roc(i.start(0.4))),
    "hf-constant": lambda i: StopRule(i.window(20), warped_token_probability, False, Fixed(i.start(0.4))),
    "hf-heuristic": lambda i: StopRule(
        i.window(20), warped_token_probability, False, Roc(i.start(0.4)), heuristic=True
    ),
    "draft-verify": lambda i: StopRule(i.window(12), token_probability, False, i.controller(0.6, i.window(12))),
    "product": lambda i: StopRule(i.window(12), token_probability, True, i.controller(0.8)),
    "entropy": lambda i: StopRule(i.window(20), negative_entropy, threshold=MeanOfRejected()),
    "cost-optimal": _cost_optimal,
}
PROBE_STOPS: dict[str, Callable[[MethodInputs], StopRule]] = {
    "probe": partial(_probed, kind="probe"),
    "confidence-probe": partial(_probed, kind="confidence-probe"),
    # the head says it before a token is drawn; a slot that is not verified costs nothing
    "confidence-head": partial(_cost_optimal, confidence=own_estimate, refuse=True),
}
"""Stop rules that need a folder of probes, or a block head that has a confidence head."""

RULES: dict[str, Callable[[MethodInputs], AcceptanceRule]] = {
    "exact": lambda i: Exact(),
    "ears": lambda i: Ears(i.options.beta),
    "adasd": lambda i: JensenShannon(unwarped=i.warp.greedy),
    "adasd-a": lambda i: JensenShannon("a", unwarped=i.warp.greedy),
    "adasd-b": lambda i: JensenShannon("b", unwarped=i.warp.greedy),
    "adasd-c": lambda i: JensenShannon("c", unwarped=i.warp.greedy),
    "fuzzy": lambda i: Fuzzy(i.options.fuzzy_threshold),
    "typical": lambda i: Typical(i.options.typical_epsilon, i.options.typical_delta),
}


def is_lossless(method: str, rule: str | None = None) -> bool:
    """Whether the method's output is distributed as the target's."""
    return (rule or METHODS[method][2]) == "exact"


def build(method: str, inputs: MethodInputs, *, stop: str | None = None, rule: str | None = None) -> Method:
    """Build a method.

    Options of self-speculation and probes that are null take the values that were fastest when the probes were trained.

    Args:
        method: a name of `METHODS`.
        inputs: models, sampling settings, corpus files and options.
        stop: another stop rule of `STOPS` in place of the method's own.
        rule: another acceptance rule of `RULES` in place of the method's own.

    Raises:
        UserError: unknown names, a model or file that the method needs is missing, or a target that reads no trees.
    """
    drafter_name, stop_name, rule_name = choose("method", method, METHODS)
    stop_name, rule_name, options = stop or stop_name, rule or rule_name, inputs.options
    if options.probes is not None and method in SELF_SPECULATIVE | PROBED:
        advice = advised(options.probes, method, greedy=inputs.warp.greedy)
        if options.exit_layer in (None, advice.get("exit_layer")):  # thresholds belong to their layer
            missing = {key: value for key, value in advice.items() if getattr(options, key) is None}
            options = replace(options, **missing)
            inputs = replace(inputs, options=options)
    stop_rule = choose("stop rule", stop_name, STOPS | PROBE_STOPS)(inputs)
    acceptance = choose("acceptance rule", rule_name, RULES)(inputs)
    if drafter_name in TREE_DRAFTERS and not inputs.target.supports_trees:
        raise tree_error(inputs.target)
    drafter = make_drafter(drafter_name, inputs)
    drawing = drafter.head if isinstance(drafter, HybridDrafter) else drafter
    if isinstance(drawing, ModelDrafter):
        drawing.keep_logits, drawing.keep_probs = acceptance.needs_raw, not acceptance.exact
    lengths = None
    if method in CHAINS_BY_MODEL and (options.never_slower or stop_name in ("cost-optimal", "confidence-head")):
        lengths = DraftLengths(round_costs(inputs), stop_rule.window)
    elif options.never_slower and drafter_name != "none":
        known = ", ".join(name for name in METHODS if name in CHAINS_BY_MODEL)
        raise UserError(f"never_slower has no cost model for {method}: leave the option out, or use one of {known}")
    return Method(method, drafter, stop_rule, acceptance, lengths)
