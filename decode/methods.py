"""Every method by name: which drafter, which stop rule, which acceptance rule.

Any drafter × stop rule × acceptance rule combines: ``build("vanilla", inputs, rule="ears")`` or ``--method vanilla
--rule ears``.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from decode.core.lengths import DraftLengths, RoundCosts
from decode.core.sampling import LogitsWarper
from decode.core.stop import (
    Confidence,
    CostOptimal,
    Fixed,
    MeanOfRejected,
    Roc,
    StopRule,
    TargetAcceptance,
    max_probability,
    negative_entropy,
    own_estimate,
    token_probability,
    warped_token_probability,
)
from decode.core.verify import AcceptanceRule, BlockVerification, Ears, Exact, Fuzzy, JensenShannon, Typical
from decode.drafters.adaptix import NgramTable, TrigramDrafter
from decode.drafters.base import Drafter, NoDrafter
from decode.drafters.corpus import tokenizer_fingerprint
from decode.drafters.hybrid import HybridDrafter
from decode.drafters.lookahead import LookaheadDrafter
from decode.drafters.lookup import LookupDrafter, SuffixDrafter
from decode.drafters.model import BlockDrafter, EarlyExitDrafter, FeatureDrafter, ModelDrafter
from decode.drafters.probe import advised, load_probe
from decode.drafters.rest import Datastore, RetrievalDrafter
from decode.drafters.trees import BlockTreeDrafter, FeatureTreeDrafter
from decode.errors import UserError, choose
from decode.loop import Method, tree_error
from decode.models.api import Model
from decode.models.fast.forward import FastRunner, self_speculating
from decode.models.heads.block_runner import BlockRunner
from decode.models.heads.eagle import DraftHead
from decode.models.heads.mtp import MtpRunner
from decode.models.heads.runner import HeadRunner
from decode.options import MethodOptions

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
    "draft-verify":      ("early-exit",          "draft-verify",     "exact"),
    "adaspeed":          ("early-exit",          "product",          "exact"),
    "adaspeed-probe":    ("early-exit",          "probe",            "exact"),
    "confidence-probe":  ("early-exit",          "confidence-probe", "exact"),
}  # fmt: skip


def _drafting_with(*drafters: str) -> set[str]:
    return {name for name, (drafter, _, _) in METHODS.items() if drafter in drafters}


HEADED = _drafting_with("feature", "feature-tree", "hybrid-tree")  # methods that only a feature head can draft for
DRAFTED = HEADED | _drafting_with("model", "hybrid")  # methods in which a draft model or a feature head takes part
SELF_SPECULATIVE = _drafting_with("early-exit")
CHAINS_BY_MODEL = SELF_SPECULATIVE | _drafting_with("model", "feature")  # methods whose drafts have a cost model
PROBED = {name for name, (_, stop, _) in METHODS.items() if stop.endswith("probe")}  # methods that need a probe folder
PRICED = {"cost-optimal", "confidence-head"}  # stop rules that weigh a token against its cost
SAMPLING_DRAFTERS = {"model", "feature", "hybrid", "early-exit"}  # their drafts are, or may be, drawn from a q
TREE_DRAFTERS = {"feature-tree", "hybrid-tree", "rest", "adaptix", "lookahead"}


@dataclass
class MethodInputs:
    """What a method is built from: the models with their tokenizer, the sampling settings, and the open options."""

    target: Model
    warp: LogitsWarper  # logits to probabilities, for target and draft
    draft: Model | None = None
    tokenizer: PreTrainedTokenizerBase | None = None  # of the target, for methods that draft from a datastore
    datastore: str | Path | None = None  # folder of the stores of rest, adaptix and hybrid
    options: MethodOptions = field(default_factory=MethodOptions)
    costs: RoundCosts | None = None  # measured seconds of rounds

    def window(self, default: int) -> int:
        """The draft length of the options, or the method's own."""
        return self.options.draft_length or default

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
    target, draft, c = inputs.target, inputs.draft, CostOptimal.cost
    if draft is not None and draft.weight_bytes and target.weight_bytes:
        c = draft.weight_bytes / target.weight_bytes
    elif draft is None and isinstance(target, FastRunner):
        c = inputs.exit_layer / target.depth
    return RoundCosts.of_ratios(c, block=isinstance(draft, BlockRunner))


def exported_length(draft: Any) -> int | None:
    """The draft length in the draft's generation config (of a head, its configuration), if any."""
    source = draft.config if isinstance(draft, DraftHead) else draft.generation_config
    return getattr(source, "num_assistant_tokens", None) or None


def store_of(inputs: MethodInputs) -> Datastore | None:
    """The datastore of the inputs, whose tokenizer has to be the target's."""
    return None if inputs.datastore is None else Datastore(inputs.datastore, tokenizer_fingerprint(inputs.tokenizer))


def _chain(inputs: MethodInputs) -> ModelDrafter:
    """A draft model, or a head that drafts a chain."""
    target, draft, warp = inputs.target, inputs.draft, inputs.warp
    if isinstance(draft, BlockRunner):
        return BlockDrafter(draft, target, warp, sample=inputs.options.sample_block)
    if isinstance(draft, HeadRunner | MtpRunner):
        return FeatureDrafter(draft, target, warp)
    assert draft is not None  # `decode.commands.checks.check_methods` refuses missing models and stores by name
    return ModelDrafter(draft, warp, target.vocab_size)


def _tree(inputs: MethodInputs) -> ModelDrafter:
    """A head that drafts a tree."""
    target, draft, warp, options = inputs.target, inputs.draft, inputs.warp, inputs.options
    shape = {"width": options.tree_width, "nodes": options.tree_nodes, "threshold": options.tree_threshold}
    if isinstance(draft, BlockRunner):
        return BlockTreeDrafter(draft, target, warp, **shape)
    assert isinstance(draft, HeadRunner)  # `build` refuses others
    return FeatureTreeDrafter(draft, target, warp, **shape)


def _rest(inputs: MethodInputs) -> Drafter:
    store = store_of(inputs)
    assert store is not None
    return RetrievalDrafter(store)


def _adaptix(inputs: MethodInputs) -> Drafter:
    assert inputs.datastore is not None
    table, options = NgramTable(inputs.datastore, tokenizer_fingerprint(inputs.tokenizer)), inputs.options
    return TrigramDrafter(table, searches=options.searches, gain=TrigramDrafter.gain if options.adaptive else 0.0)


def _hybrid(inputs: MethodInputs, head: ModelDrafter, branch: int) -> Drafter:
    return HybridDrafter(head, store_of(inputs), length=inputs.options.copy_length, branch=branch)


DRAFTERS: dict[str, Callable[[MethodInputs], Drafter]] = {
    "none": lambda i: NoDrafter(),
    "model": _chain,
    "feature": _chain,
    "feature-tree": _tree,
    "hybrid": lambda i: _hybrid(i, _chain(i), 0),  # chains stay chains
    "hybrid-tree": lambda i: _hybrid(i, _tree(i), i.options.copy_branch),
    "prompt-lookup": lambda i: LookupDrafter(length=i.window(10)),
    "suffix": lambda i: SuffixDrafter(),
    "rest": _rest,
    "adaptix": _adaptix,
    "lookahead": lambda i: LookaheadDrafter(),
    "early-exit": lambda i: EarlyExitDrafter(i.target, i.warp, i.exit_layer),
}


def _cost_optimal(
    inputs: MethodInputs, confidence: Confidence = token_probability, *, refuse: bool = False
) -> StopRule:
    """Costs are fixed before decoding, so that a seed gives one text."""
    threshold = CostOptimal(round_costs(inputs).prices(1)[0])
    return StopRule(inputs.window(20), confidence, product=True, threshold=threshold, refuse=refuse)


def _probed(inputs: MethodInputs, kind: str) -> StopRule:
    """AdaSPEED's rule on acceptances that a probe of the target's exit layer estimates."""
    if inputs.options.probes is None:
        raise UserError(f"stopping on a {kind} needs one; train it with python -m probes, give --probes DIR")
    if inputs.draft is not None or inputs.target.model is None:
        who = (inputs.draft or inputs.target).name
        raise UserError(f"a {kind} reads the target's own layers, not those of {who}; choose another stop rule")
    labels = ("match",) if inputs.warp.greedy else ("accept", "top-p", "match")
    probe = load_probe(inputs.options.probes, inputs.target.model, inputs.exit_layer, kind, labels)
    return StopRule(inputs.window(12), probe, product=True, threshold=inputs.controller(0.8))


def _hugging_face(inputs: MethodInputs, threshold: Callable[[float], Any], *, heuristic: bool = False) -> StopRule:
    """A threshold for single tokens, as transformers has them."""
    start = threshold(inputs.start(0.4))
    return StopRule(inputs.window(20), warped_token_probability, False, start, heuristic=heuristic)


STOPS: dict[str, Callable[[MethodInputs], StopRule]] = {
    "length": lambda i: StopRule(i.window(5)),
    "copy": lambda i: StopRule(i.window(10)),
    "suffix": lambda i: StopRule(i.window(24)),
    # compares before a token is drawn: where the head is unsure nothing is drafted
    "unsure": lambda i: StopRule(i.window(8), max_probability, True, Fixed(i.start(0.2)), refuse=True),
    "hf-dynamic": lambda i: _hugging_face(i, Roc),
    "hf-constant": lambda i: _hugging_face(i, Fixed),
    "hf-heuristic": lambda i: _hugging_face(i, Roc, heuristic=True),
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


def _adasd(inputs: MethodInputs, variant: str = JensenShannon.variant) -> AcceptanceRule:
    return JensenShannon(variant, unwarped=inputs.warp.greedy)


RULES: dict[str, Callable[[MethodInputs], AcceptanceRule]] = {
    "exact": lambda i: Exact(),
    "block-verification": lambda i: BlockVerification(),
    "ears": lambda i: Ears(i.options.beta),
    "adasd": _adasd,
    **{f"adasd-{variant}": partial(_adasd, variant=variant) for variant in "abc"},
    "fuzzy": lambda i: Fuzzy(i.options.fuzzy_threshold),
    "typical": lambda i: Typical(i.options.typical_epsilon, i.options.typical_delta),
}


def is_lossless(method: str, rule: str | None = None) -> bool:
    """Whether the method's output is distributed as the target's."""
    return (rule or METHODS[method][2]) in ("exact", "block-verification")


def build(method: str, inputs: MethodInputs, *, stop: str | None = None, rule: str | None = None) -> Method:
    """Build a method.

    Options of self-speculation and probes that are null take the values that were fastest when the probes were trained.

    Args:
        method: a name of `METHODS`.
        inputs: models, sampling settings, corpus files and options.
        stop: another stop rule of `STOPS` in place of the method's own.
        rule: another acceptance rule of `RULES` in place of the method's own.

    Raises:
        UserError: unknown names, a model or file that the method needs is missing, a target that reads no trees, a
            relaxed rule on trees, or verification by blocks of drafts that are not sampled chains.
    """
    drafter, stop_name, rule_name = choose("method", method, METHODS)
    stop_name, rule_name, options = stop or stop_name, rule or rule_name, inputs.options
    if options.probes is not None and method in SELF_SPECULATIVE | PROBED:
        advice = advised(options.probes, method, greedy=inputs.warp.greedy)
        if options.exit_layer in (None, advice.get("exit_layer")):  # thresholds belong to their layer
            missing = {key: value for key, value in advice.items() if getattr(options, key) is None}
            options = replace(options, **missing)
            inputs = replace(inputs, options=options)
    draft, heads = inputs.draft, (HeadRunner, BlockRunner, *([MtpRunner] if drafter == "feature" else []))
    if method in HEADED and not isinstance(draft, heads):
        kind, name = ("block head", "dspark") if method.startswith("block") else ("feature head (EAGLE)", "eagle")
        given = "no draft is given" if draft is None else f"the draft given is {draft.name}, for vanilla"
        raise UserError(
            f"{method} drafts with a {kind}, and {given}; give a head's folder with --draft (train one: "
            f"python -m distill --config configs/quickstart-{name}.yaml)"
        )
    stop_rule = choose("stop rule", stop_name, STOPS | PROBE_STOPS)(inputs)
    acceptance = choose("acceptance rule", rule_name, RULES)(inputs)
    if drafter in TREE_DRAFTERS and not inputs.target.supports_trees:
        raise tree_error(inputs.target)
    if drafter in TREE_DRAFTERS and not acceptance.exact:
        raise UserError(
            f"{method} drafts trees, which {rule_name} does not verify; use exact, or vanilla, eagle, block"
        )
    argmax_block = isinstance(draft, BlockRunner) and not options.sample_block
    if isinstance(acceptance, BlockVerification) and (drafter not in SAMPLING_DRAFTERS or argmax_block):
        instead = "--sample-block true" if argmax_block else "vanilla, eagle, layerskip"
        raise UserError(
            f"{rule_name} keeps more than exact only of chains whose tokens are drawn from the draft's distribution, "
            f"and {method} drafts none; use exact, or {instead}"
        )
    lengths = None
    if method in CHAINS_BY_MODEL and (options.never_slower or stop_name in PRICED):
        lengths = DraftLengths(round_costs(inputs), stop_rule.window, weighed=stop_name in PRICED)
    elif options.never_slower and drafter != "none":
        known = ", ".join(name for name in METHODS if name in CHAINS_BY_MODEL)
        raise UserError(f"never_slower has no cost model for {method}: leave the option out, or use one of {known}")
    return Method(method, DRAFTERS[drafter](inputs), stop_rule, acceptance, lengths)
