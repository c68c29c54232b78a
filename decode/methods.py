"""Every method by name: which drafter, which stop rule, which acceptance rule.

Any drafter × stop rule × acceptance rule combines: ``--method vanilla --rule ears``, and
``--methods vanilla:rule=ears,vanilla:rule=fuzzy`` compares them.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

from transformers import PreTrainedTokenizerBase

from decode.core.lengths import DraftLengths, RoundCosts
from decode.core.sampling import LogitsWarper
from decode.core.stop import (
    CostOptimal,
    Fixed,
    MeanOfRejected,
    Roc,
    StopRule,
    TargetAcceptance,
    max_probability,
    negative_entropy,
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
from decode.drafters.model import BlockDrafter, EarlyExitDrafter, FeatureDrafter, ModelDrafter, ParallelDrafter
from decode.drafters.probe import KINDS as PROBES
from decode.drafters.probe import MAKE_PROBES, advised, load_probe
from decode.drafters.rest import Datastore, RetrievalDrafter
from decode.drafters.trees import BlockTreeDrafter, FeatureTreeDrafter
from decode.errors import UserError, choose, named
from decode.files import Fields
from decode.loop import Method
from decode.models.api import Model
from decode.models.fast.forward import FastRunner, self_speculating
from decode.models.heads.block_runner import BlockRunner
from decode.models.heads.eagle import DraftHead
from decode.models.huggingface import mask_of
from decode.options import MethodOptions, split_spec

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
    "eagle":             ("head",                "length",           "exact"),
    "eagle-tree":        ("head-tree",           "length",           "exact"),
    "block":             ("block",               "length",           "exact"),
    "block-tree":        ("block-tree",          "length",           "exact"),
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


DRAFTS = {
    "model": "a language model",
    "eagle": "a feature head (EAGLE)",
    "mtp": "next-token layers of the target",
    "block": "a block head",
}
"""What a method may draft with, by the kinds of `draft_kind`."""
ANY = tuple(DRAFTS)


def draft_kind(draft: Any) -> str:
    """What a draft is, opened or as it was loaded: a key of `DRAFTS`; empty for None."""
    head = getattr(draft, "model", None) if isinstance(draft, Model) else draft
    return "" if draft is None else head.kind if isinstance(head, DraftHead) else "model"


@dataclass
class MethodInputs:
    """What a method is built from: the models with their tokenizer, the sampling settings, and the open options."""

    target: Model
    warp: LogitsWarper  # logits to probabilities, for target and draft
    draft: Model | None = None
    tokenizer: PreTrainedTokenizerBase | None = None  # of the target, for methods that draft from a datastore
    datastore: str | Path | None = None  # folder of the stores of rest and adaptix
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
        layer = self.options.exit_layer
        return max(1, round(self_speculating(self.target).depth / 4)) if layer is None else layer

    @property
    def parts(self) -> "Parts":
        """What `refusal` goes by."""
        return Parts.of_draft(
            self.draft, self.options, datastore=self.datastore is not None, tree_error=self.target.tree_error
        )


@dataclass
class Parts:
    """What there is to draft with, by which a method is refused or not, before anything is opened and after."""

    options: MethodOptions
    draft: str = ""  # kind of the draft (see `DRAFTS`); empty: there is none
    name: str = "it"  # of the draft, in messages
    datastore: bool = False  # there is a datastore, or a corpus that one is built from
    tree_error: str = ""  # why the target reads no trees; empty where it does, as far as that is known

    @classmethod
    def of_draft(cls, draft: Any, options: MethodOptions, **others: Any) -> "Parts":
        """Those with a draft that is open."""
        return cls(options, draft_kind(draft), getattr(draft, "name", type(draft).__name__), **others)


def in_one_forward(draft: Any) -> bool:
    """Whether a draft makes all its distributions before the first token is drawn."""
    return draft_kind(draft) == "block" or mask_of(draft) is not None


def round_costs(inputs: MethodInputs) -> RoundCosts:
    """Measured costs of rounds, else c from the weights that are read, or from the layers that draft."""
    if inputs.costs is not None:
        return inputs.costs
    target, draft, c = inputs.target, inputs.draft, CostOptimal.cost
    if draft is not None and draft.weight_bytes and target.weight_bytes:
        c = draft.weight_bytes / target.weight_bytes
    elif draft is None and isinstance(target, FastRunner):
        c = inputs.exit_layer / target.depth
    return RoundCosts.of_ratios(c, block=in_one_forward(draft))


def exported_length(draft: Any) -> int | None:
    """The draft length in the draft's generation config (of a head, its configuration), if any."""
    return getattr(getattr(draft, "generation_config", draft.config), "num_assistant_tokens", None) or None


def _chain(inputs: MethodInputs) -> ModelDrafter:
    """A draft model, or a head that drafts a chain."""
    target, draft, warp = inputs.target, inputs.draft, inputs.warp
    assert draft is not None  # by `refusal`
    if draft_kind(draft) == "model":
        mask, arguments = mask_of(draft), (draft, warp, target.vocab_size)
        return ModelDrafter(*arguments) if mask is None else ParallelDrafter(*arguments, mask)
    if isinstance(draft, BlockRunner):
        return BlockDrafter(draft, target, warp, sample=inputs.options.sample_block)
    return FeatureDrafter(cast(Any, draft), target, warp)


def _tree(inputs: MethodInputs) -> ModelDrafter:
    """A head that drafts a tree."""
    options, drafter = inputs.options, BlockTreeDrafter if draft_kind(inputs.draft) == "block" else FeatureTreeDrafter
    shape = {"width": options.tree_width, "nodes": options.tree_nodes, "threshold": options.tree_threshold}
    return drafter(cast(Any, inputs.draft), inputs.target, inputs.warp, **shape)


def _opened(store: Any, inputs: MethodInputs) -> Any:
    """A store in the datastore's folder."""
    return store(inputs.datastore, tokenizer_fingerprint(inputs.tokenizer))


def _adaptix(inputs: MethodInputs) -> Drafter:
    gain = TrigramDrafter.gain if inputs.options.adaptive else 0.0
    return TrigramDrafter(_opened(NgramTable, inputs), searches=inputs.options.searches, gain=gain)


@dataclass(frozen=True)
class Kind:
    """What a drafter is: how it is made, and all that decides which methods can be made with it."""

    make: Callable[[MethodInputs], Drafter] | None = None
    drafts: tuple[str, ...] = ()  # kinds of draft that it takes (see `DRAFTS`); empty: it needs none
    itself: bool = False  # the target's own first layers draft
    trees: bool = False  # drafts are, or may be, trees
    samples: bool = False  # drafted tokens are, or may be, drawn from a q
    priced: bool = False  # drafts are chains whose cost by length is known
    store: bool = False  # it needs a datastore


_priced: Fields = {"samples": True, "priced": True}
DRAFTERS = {
    "none": Kind(lambda i: NoDrafter()),
    "model": Kind(_chain, ANY, **_priced),
    "head": Kind(_chain, ("eagle", "mtp"), **_priced),
    "head-tree": Kind(_tree, ("eagle",), trees=True),
    "block": Kind(_chain, ("block",), **_priced),
    "block-tree": Kind(_tree, ("block",), trees=True),
    "hybrid": Kind(lambda i: HybridDrafter(_chain(i), length=i.options.copy_length), ANY, samples=True),
    "hybrid-tree": Kind(
        lambda i: HybridDrafter(_tree(i), length=i.options.copy_length, branch=i.options.copy_branch),
        ("eagle", "block"),
        trees=True,
    ),
    "prompt-lookup": Kind(lambda i: LookupDrafter(length=i.window(10))),
    "suffix": Kind(lambda i: SuffixDrafter()),
    "rest": Kind(lambda i: RetrievalDrafter(_opened(Datastore, i)), trees=True, store=True),
    "adaptix": Kind(_adaptix, trees=True, store=True),
    "lookahead": Kind(lambda i: LookaheadDrafter(), trees=True),
    "early-exit": Kind(lambda i: EarlyExitDrafter(i.target, i.warp, i.exit_layer), itself=True, **_priced),
}
USUAL = {
    "": ("prompt-lookup", "suffix"),
    "model": ("vanilla", "hybrid"),
    "eagle": ("eagle", "hybrid-tree"),
    "mtp": ("eagle", "hybrid"),
    "block": ("block", "hybrid"),
}
"""Methods that a benchmark compares where none is named, by the kind of the draft."""
BASELINES: dict[str, tuple[Kind, int | None]] = {
    "generate": (Kind(), None),
    "generate-assistant": (Kind(drafts=("model",)), 5),  # a fixed number of tokens, as vanilla
    "generate-prompt-lookup": (Kind(), 10),
}
"""Transformers' own generation, which benchmarks compare with, with the draft lengths where none is given."""
UNJUDGED = {"autoregressive", *BASELINES}
"""Methods whose texts no rule of this decoder judges."""


def kind_of(method: str) -> Kind:
    """The kind of a method's drafter.

    Raises:
        UserError: there is no such method.
    """
    if method in BASELINES:
        return BASELINES[method][0]
    return DRAFTERS[choose("method", method, METHODS | dict.fromkeys(BASELINES, ("", "", "")))[0]]


def _cost_optimal(inputs: MethodInputs) -> StopRule:
    """Costs are fixed before decoding, so that a seed gives one text.

    Where a token costs its verification alone, the rule decides before it is drawn. It does not read the token then:
    dropping what is unlikely to be accepted would bias the text.
    """
    refuse = in_one_forward(inputs.draft)
    threshold = CostOptimal(round_costs(inputs).prices(1)[0], drafted=not refuse)
    confidence = max_probability if refuse else token_probability
    return StopRule(inputs.window(20), confidence, product=True, threshold=threshold, refuse=refuse)


def _probed(inputs: MethodInputs, kind: str) -> StopRule:
    """AdaSPEED's rule on acceptances that a probe of the target's exit layer estimates."""
    labels, target = ("match",) if inputs.warp.greedy else ("accept", "top-p", "match"), inputs.target.model
    assert inputs.options.probes is not None  # by `refusal`
    probe = load_probe(inputs.options.probes, target, inputs.exit_layer, kind, labels)
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
PROBE_STOPS = {kind: partial(_probed, kind=kind) for kind in PROBES}
"""Stop rules that need a folder of probes."""


RULES: dict[str, Callable[[MethodOptions, bool], AcceptanceRule]] = {
    "exact": Exact,
    "block-verification": BlockVerification,
    "ears": lambda options, greedy: Ears(options.beta),
    "adasd": lambda options, greedy: JensenShannon(unwarped=greedy),
    "adasd-a": lambda options, greedy: JensenShannon("a", unwarped=greedy),
    "adasd-b": lambda options, greedy: JensenShannon("b", unwarped=greedy),
    "adasd-c": lambda options, greedy: JensenShannon("c", unwarped=greedy),
    "fuzzy": lambda options, greedy: Fuzzy(),
    "typical": lambda options, greedy: Typical(),
}
"""Acceptance rules, made from the options and whether decoding is greedy; so is ``module.Class`` of the user's."""


def is_lossless(method: str, rule: str | None = None) -> bool:
    """Whether the method's output is distributed as the target's."""
    return named("acceptance rule", rule or METHODS[method][2], RULES)(MethodOptions(), False).exact


def with_options(spec: str, options: MethodOptions) -> tuple[str, MethodOptions]:
    """A method of a benchmark (see `split_spec`), and its own options in place of those of all methods.

    What has no drafts of this decoder does without the rules of all.

    Raises:
        UserError: an unknown option, or a value that it does not take.
    """
    method, changes = split_spec(spec)
    if method in UNJUDGED:
        options = replace(options, stop_rule=None, rule=None)
    return method, replace(options, **changes)


def refusal(method: str, parts: Parts) -> str:
    """Why a method cannot be run with these parts, and what to do; empty where it can.

    The only place that refuses a combination: it is asked before anything is loaded, where a benchmark chooses its
    methods, and by `build`.

    Raises:
        UserError: there is no such method, stop rule or acceptance rule.
    """
    kind, options = kind_of(method), parts.options
    _, own_stop, own_rule = METHODS.get(method, ("", "length", "exact"))
    if kind.drafts and parts.draft not in kind.drafts:
        wanted = "a model or a head" if kind.drafts == ANY else " or ".join(map(DRAFTS.__getitem__, kind.drafts))
        config = {"eagle": "quickstart-eagle", "block": "quickstart-dspark"}.get(kind.drafts[0], "quickstart")
        other = f", and {parts.name} is {DRAFTS[parts.draft]}" if parts.draft else ""
        train = f"(a folder or hub name; train one: draftsmith distill --config configs/{config}.yaml)"
        return f"{method} drafts with {wanted}{other}; give one with --draft {train}"
    if kind.store and not parts.datastore:
        build_one = "build one with draftsmith decode datastore build"
        return f"{method} drafts from a datastore folder; {build_one} and give it with --datastore DIR"
    if (rule := options.stop_rule or options.rule) and method in UNJUDGED:
        return f"{rule} is a rule for drafts of this decoder, and {method} drafts none; give --draft D, or leave it out"
    if method in BASELINES:
        return ""
    stop, rule = options.stop_rule or own_stop, options.rule or own_rule
    choose("stop rule", stop, STOPS | PROBE_STOPS)
    acceptance = named("acceptance rule", rule, RULES)(options, True)
    if stop in PROBES and options.probes is None:
        return f"{method} needs a folder of acceptance probes, --probes DIR; {MAKE_PROBES}"
    if stop in PROBES and not kind.itself:
        return f"a {stop} reads the target's own layers, with which {method} does not draft; choose another stop rule"
    if kind.trees and parts.tree_error:
        return parts.tree_error
    if kind.trees and not acceptance.exact:
        return f"{method} drafts trees, which {rule} does not verify; use exact, or vanilla, eagle, block"
    argmax_block = parts.draft == "block" and not options.sample_block
    if isinstance(acceptance, BlockVerification) and (not kind.samples or argmax_block):
        instead = "--sample-block true" if kind.samples else "vanilla, eagle, layerskip"
        return (
            f"{rule} keeps more than exact only of chains whose tokens are drawn from the draft's distribution, and "
            f"{method} drafts none; use exact, or {instead}"
        )
    if options.never_slower and not kind.priced and kind is not DRAFTERS["none"]:
        names = ", ".join(name for name, (drafter, *_) in METHODS.items() if DRAFTERS[drafter].priced)
        return f"never_slower has no cost model for {method}: leave the option out, or use one of {names}"
    return ""


def build(method: str, inputs: MethodInputs) -> Method:
    """Build a method.

    Options of self-speculation and probes that are null take the values that were fastest when the probes were trained.

    Args:
        method: a name of `METHODS`.
        inputs: models, sampling settings, corpus files and options.

    Raises:
        UserError: there is a `refusal`, or a file that the method needs cannot be read.
    """
    if why := refusal(method, inputs.parts):
        raise UserError(why)
    (drafter, own_stop, own_rule), options = METHODS[method], inputs.options
    kind, stop = DRAFTERS[drafter], options.stop_rule or own_stop
    if options.probes is not None and kind.itself:
        advice = advised(options.probes, method, greedy=inputs.warp.greedy)
        if options.exit_layer in (None, advice.get("exit_layer")):  # thresholds belong to their layer
            taken = advice.keys() - {"rule", "stop_rule"}  # a file names no code, and no lossless text is relaxed
            missing = {key: advice[key] for key in taken if getattr(options, key) is None}
            inputs = replace(inputs, options=(options := replace(options, **missing)))
    stop_rule, lengths = (STOPS | PROBE_STOPS)[stop](inputs), None
    weighed = stop == "cost-optimal"
    if kind.priced and (options.never_slower or weighed):
        lengths = DraftLengths(round_costs(inputs), stop_rule.window, weighed=weighed)
    assert kind.make is not None
    acceptance = named("acceptance rule", options.rule or own_rule, RULES)(options, inputs.warp.greedy)
    return Method(method, kind.make(inputs), stop_rule, acceptance, lengths)
