"""The options that decoding methods leave open, defined once for Python, the command line and configurations.

`MethodOptions` is what a method gets; the settings of ``generate`` and ``bench`` extend it, and a benchmark's method
may carry options of its own, ``ears:beta=0.2`` (`split_spec`). Ranges stand in the types and hold however an instance
is made. This module loads neither torch nor transformers, so that ``--help`` answers at once. Annotations are types,
not strings: the parser reads those of classes that other modules extend.
"""

import re
import typing
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

from jsonargparse import ArgumentError, ArgumentParser
from jsonargparse.typing import (
    ClosedUnitInterval,
    NonNegativeFloat,
    NonNegativeInt,
    OpenUnitInterval,
    PositiveFloat,
    PositiveInt,
    restricted_number_type,
)

from decode.errors import UserError, unknown

COLDEST = 1e-3  # the smallest temperature that is not 0 (greedy): below, logits divided by it leave float32's range

if TYPE_CHECKING:
    NgramOrder = int
    Seed = int
    Share = float
    Temperature = float
else:
    NgramOrder = restricted_number_type("NgramOrder", int, [(">=", 2), ("<=", 4)])
    Seed = restricted_number_type("Seed", int, [(">=", 0), ("<", 2**32)])
    """What random number generators of Python, NumPy and torch all take."""
    Share = restricted_number_type("Share", float, [(">", 0), ("<=", 1)])
    Temperature = restricted_number_type("Temperature", float, [("==", 0), (">=", COLDEST)], join="or")


class Checked:
    """Base of settings: numbers are checked against their constrained types on construction.

    Raises:
        UserError: naming the option, its value and the values allowed.
    """

    def __post_init__(self) -> None:
        check_numbers(self)


def check_numbers(settings: Any, where: str = "", *, nested: bool = False) -> None:
    """Checks the fields of a constrained number type, whose values become plain numbers, and those of a few values.

    Args:
        settings: an instance of a dataclass.
        where: put before the fields' names in errors.
        nested: check the dataclasses in its fields too, under their dotted names.
    """
    settings_class: type = type(settings)
    for name, (number, is_list) in _constrained(settings_class).items():
        value = getattr(settings, name)
        if value is not None:
            checked = [_number(where + name, item, number) for item in (value if is_list else [value])]
            setattr(settings, name, checked if is_list else checked[0])
    for name in [f.name for f in fields(settings)] if nested else []:
        value = getattr(settings, name)
        for index, item in enumerate(value if isinstance(value, list) else [value]):
            if is_dataclass(item):
                place = f"{name}[{index}]" if isinstance(value, list) else name
                check_numbers(item, f"{where}{place}.", nested=True)


def _number(name: str, value: Any, number: Any) -> Any:
    """The value, if its type takes it; of a constrained number as a plain int or float."""
    if typing.get_origin(number) is Literal:
        if value not in typing.get_args(number):
            raise UserError(f"{name} is {value!r}, expected {' or '.join(map(str, typing.get_args(number)))}")
        return value
    try:
        return number._type(number(value))
    except (ValueError, TypeError, OverflowError):
        kind = "a whole number" if number._type is int else "a number"
        limits = re.sub(r"\bv|\.0\b", "", number._expression)  # such as >=0 and <4294967296
        raise UserError(f"{name} is {value!r}, expected {kind} {limits}") from None


@cache
def _constrained(settings_class: type) -> dict[str, tuple[Any, bool]]:
    """The fields of a constrained number type or a `Literal`: that type, and whether the field is a list of them."""
    found = {}
    for name, hint in typing.get_type_hints(settings_class).items():
        kinds = [hint] if typing.get_origin(hint) is Literal else [hint, *typing.get_args(hint)]
        for kind in kinds:
            alone = len(set(kinds[1:]) - {kind, type(None)}) == 0
            if hasattr(kind, "_restrictions") or (typing.get_origin(kind) is Literal and alone):
                found[name] = (kind, typing.get_origin(hint) is list)
    return found


@dataclass
class MethodOptions(Checked):
    """What a method leaves open; null takes the paper's value."""

    draft_length: PositiveInt | None = None
    """Tokens drafted per round; for adaptive stop rules the longest draft. null: the length stored in the exported
    draft (fixed lengths only), else 5; AdaSD, Hugging Face and cost-optimal 20; Draft & Verify and AdaSPEED 12;
    prompt lookup 10; hybrid 8."""
    beta: NonNegativeFloat = 0.1
    """EARS: tolerance β(1 − max p); the paper uses 0.05 to 0.2, 0 is the exact rule."""
    threshold: ClosedUnitInterval | None = None
    """Start of an adaptive confidence threshold; null: Draft & Verify 0.6, AdaSPEED 0.8, Hugging Face 0.4.
    Hybrid: the head drafts on while the product of its largest probabilities is above this; null: 0.2."""
    target_acceptance: OpenUnitInterval | None = None
    """Acceptance rate that Draft & Verify's and AdaSPEED's controllers steer to; null: 0.9."""
    cost_ratio: PositiveFloat | None = None
    """Cost-optimal stopping: c, the time of one drafted token in one-token target forwards. null: c from measured costs
    (bench measures them; otherwise python -m decode profile --batch-sizes writes them into the draft's folder);
    without them, the draft's weight bytes over the target's, or for self-speculation the share of the layers
    that run."""
    verify_growth: NonNegativeFloat = 0.0
    """Cost-optimal stopping: growth of the target's forward by one more token, in one-token target forwards."""
    never_slower: bool = False
    """Limit each round's draft to the length with the highest expected tokens per second, and draft nothing where no
    length is expected to gain (a round is still drafted occasionally, to test this). For methods that draft
    chains with a model or with the target's own layers; always on for cost-optimal. Costs: cost_ratio and
    verify_growth if cost_ratio is given, else those that bench measures or that python -m decode profile
    --batch-sizes wrote into the draft's folder. In a batch, a sampled text then depends on the other texts of
    the batch."""
    match_length: PositiveInt = 4
    """Hybrid: tokens of the text's end that have to occur before, in the text or the datastore, for their continuation
    to be copied instead of asking the draft; where the draft is unsure from the start, two suffice."""
    copy_length: PositiveInt = 10
    """Hybrid: maximum number of copied tokens, and at most twice as many as matched."""
    copy_branch: NonNegativeInt = 0
    """Hybrid-tree: most tokens copied after a shorter match, of two tokens at least, as a branch of the head's tree."""
    fuzzy_threshold: NonNegativeFloat = 0.4
    """Fuzzy: largest Jensen–Shannon divergence (nats) between target and draft at which a token is kept."""
    typical_epsilon: ClosedUnitInterval = 0.09
    """Typical acceptance: a token above this probability is always kept."""
    typical_delta: NonNegativeFloat = 0.3
    """Typical acceptance: factor of exp(−H(p))."""
    exit_layer: PositiveInt | None = None
    """Self-speculation (layerskip, adaspeed, ...): layers that the draft runs; null: what the probes advise, else a
    quarter of the model's."""
    skip_attention: list[NonNegativeInt] = field(default_factory=list)
    """Draft & Verify: layers whose attention the draft skips. If this and skip_mlp are both empty, the draft exits
    early at exit_layer, as in AdaSPEED."""
    skip_mlp: list[NonNegativeInt] = field(default_factory=list)
    """Draft & Verify: layers whose MLP the draft skips."""
    tree_width: PositiveInt = 10
    """EAGLE-2: nodes expanded at each level of the tree, and children tried of each."""
    tree_nodes: PositiveInt = 60
    """EAGLE-2: nodes of the drafted tree, the most probable ones; its depth is the draft length."""
    tree_threshold: ClosedUnitInterval = 0.0
    """EAGLE-2: nodes whose cumulative probability (temperature 1) is below this are not drafted."""
    probes: str | None = None
    """Folder of acceptance probes, made by `python -m probes`: runs/<name>/probes, or its draft/ for draft-probe.
    Options left at null (such as exit_layer and threshold) take the values that were fastest when the probes
    were trained."""
    searches: PositiveInt = 150
    """Adaptix: Monte Carlo iterations a round."""
    adaptive: bool = True
    """Adaptix: learn from the text; the paper's ablation does not."""
    order: NgramOrder = 3
    """Adaptix: n of the n-grams, 2 to 4."""
    texts: PositiveInt | None = None
    """Adaptix: use a table of so many texts of the benchmark's corpus only."""


def split_spec(spec: str) -> tuple[str, dict[str, Any]]:
    """A method as settings name it, ``NAME`` or ``NAME:option=value:...``, such as ``ears:beta=0.2``.

    Returns:
        The method, and the `MethodOptions` given for it alone.

    Raises:
        UserError: an unknown option, or a value that the option does not take.
    """
    method, *given = spec.split(":")
    values = dict(item.partition("=")[::2] for item in given)
    for key in values:
        if key not in (known := [f.name for f in fields(MethodOptions)]):
            raise UserError(f"{spec!r}: {unknown('option', key, known)}")
    try:
        parsed = MethodOptions(**vars(_parser().parse_args([f"--{key}={text}" for key, text in values.items()])))
    except ArgumentError as error:
        raise UserError(f"{spec!r}: {' '.join(str(error).split())}") from None
    return method, {key: getattr(parsed, key) for key in values}


@cache
def _parser() -> ArgumentParser:
    parser = ArgumentParser(exit_on_error=False, default_env=False)
    parser.add_class_arguments(MethodOptions, None)
    return parser
