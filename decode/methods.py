"""Every method by name: which drafter, which stop rule, which acceptance rule.

The components that the columns of `METHODS` name are in `decode.method_parts`. Any drafter × stop rule × acceptance
rule combines: ``build("vanilla", inputs, rule="ears")`` or ``--method vanilla --rule ears``.
"""

from dataclasses import replace

from decode.core.errors import UserError, choose
from decode.core.stopping.batch_draft_length import DraftLengths
from decode.core.stopping.stop_rules import StopRule
from decode.core.system import System
from decode.core.target import tree_error
from decode.drafters.acceptance_probe import advised
from decode.drafters.draft_model import ModelDrafter
from decode.drafters.hybrid import HybridDrafter
from decode.method_parts import (
    CHAINS_BY_MODEL,
    DRAFTERS,
    MODEL_DRAFTERS,
    PROBE_STOPS,
    RULES,
    SELF_DRAFTERS,
    STOPS,
    TREE_DRAFTERS,
    MethodInputs,
    round_costs,
)

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
HEAD_TREES = {name for name, (drafter, _, _) in METHODS.items() if drafter in ("feature-tree", "hybrid-tree")}
"""Methods that draft trees of a feature head."""
HEADED = HEAD_TREES | {name for name, (drafter, _, _) in METHODS.items() if drafter == "feature"}
"""Methods that only a feature head can draft for."""
SELF_SPECULATIVE = {name for name, (drafter, _, _) in METHODS.items() if drafter in SELF_DRAFTERS}
"""Methods that draft with the target's own layers."""
PROBED = {name for name, (_, stop, _) in METHODS.items() if stop in PROBE_STOPS}  # methods that need a folder of probes


def is_lossless(method: str, rule: str | None = None) -> bool:
    """Whether the method's output is distributed as the target's."""
    return (rule or METHODS[method][2]) == "exact"


def build(method: str, inputs: MethodInputs, *, stop: str | None = None, rule: str | None = None) -> System:
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
    return System(method, drafter, stop_rule, acceptance, lengths)


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
