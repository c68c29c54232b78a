"""The options that decoding methods leave open, defined once for Python, the command line and configurations.

`MethodOptions` is what a method gets; the settings of ``generate`` and ``bench`` extend it, and a method of a
benchmark may have options of its own, ``ears:beta=0.2`` (`split_spec`). Ranges are part of the types, and are checked
where settings are read (`build`). This module imports neither torch nor transformers, so that ``--help`` answers at
once.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from jsonargparse import ArgumentError, ArgumentParser, Namespace, set_loader
from jsonargparse.typing import (
    ClosedUnitInterval,
    NonNegativeFloat,
    NonNegativeInt,
    OpenUnitInterval,
    PositiveInt,
    restricted_number_type,
)

from decode.errors import UserError, choose
from decode.files import Fields
from decode.incoming import read_yaml, text_lines

COLDEST = 1e-3  # the smallest temperature that is not 0 (greedy): below, logits divided by it leave float32's range

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    Seed = int
    Share = float
    Temperature = float
else:
    Seed = restricted_number_type("Seed", int, [(">=", 0), ("<", 2**32)])
    """What random number generators of Python, NumPy and torch all take."""
    Share = restricted_number_type("Share", float, [(">", 0), ("<=", 1)])
    Temperature = restricted_number_type("Temperature", float, [("==", 0), (">=", COLDEST)], join="or")

Settings = TypeVar("Settings")

OUT_OF_RANGE = re.compile(
    r"Not of type \w+: (?P<value>\S+) does not conform to restriction (?P<range>v\S+(?: \w+ v\S+)*)"
)
NO_TYPE_FITS = re.compile(r"Errors: - (?P<errors>.+) Given value type: .+ Given value: (?P<value>.+)")
"""What jsonargparse says of a value out of range, and of one that fits none of its key's types."""
MODE = "draftsmith"  # how jsonargparse reads values that are texts, see `_load`


def _load(text: str) -> Any:
    """A value of an option or a configuration; what means nothing in YAML, such as #, is a text but for ``null``."""
    try:
        return json.loads(text)
    except ValueError:
        value = read_yaml(text)
        return text if value is None else value


set_loader(MODE, _load, exceptions=(ValueError,))


@cache
def parser_of(settings_class: Any) -> ArgumentParser:
    """A parser of a dataclass's fields, sections included."""
    parser = ArgumentParser(exit_on_error=False, default_env=False, parser_mode=MODE)
    parser.add_class_arguments(settings_class, None)
    return parser


def in_a_line(error: str) -> str:
    """An error of jsonargparse: the key, the value seen and what was expected."""
    message = " ".join(error.split())
    key = ".".join(re.findall('Parser key "([^"]+)"', message))
    if found := OUT_OF_RANGE.search(message):
        return f"{key} is {found['value']}, expected a value v with {found['range']}"
    if found := NO_TYPE_FITS.search(message):
        return f"{key} is {found['value']}: {found['errors'].replace(' - ', '; ')}"
    return message


def nulls(settings_class: Any, values: Fields) -> Iterator[str]:
    """The keys, those of sections included, whose value is null where it may not be; jsonargparse takes it anywhere."""
    for key, hint in get_type_hints(settings_class).items():
        value, types = values.get(key, ""), get_args(hint) or (hint,)
        if value is None and not {type(None), Any} & {*types}:
            yield key
        for kind in filter(is_dataclass, types) if isinstance(value, dict) else ():
            sections = value if get_origin(hint) is dict else {"": value}
            for name, section in sections.items():
                if isinstance(section, dict):
                    yield from (".".join(filter(None, (key, name, inner))) for inner in nulls(kind, section))


def check(settings_class: Any, values: Fields, source: str = "") -> Namespace:
    """The fields of a dataclass of settings as jsonargparse reads them, which checks their types and ranges.

    `source` is put before errors.

    Raises:
        UserError: an unknown key or a wrong value, with the type or range expected.
    """
    if null := next(nulls(settings_class, values), ""):
        raise UserError(
            f"{f'{source}: ' if source else ''}{null} is null, expected a value; leave it out for the default"
        )
    try:
        return parser_of(settings_class).parse_object(dict(values))
    except UserError:
        raise
    except (ArgumentError, ValueError, TypeError) as error:
        message = in_a_line(str(error))
        raise UserError(f"{source}: {message}" if source else message) from error


def build(settings_class: type[Settings], values: Fields, source: str = "") -> Settings:
    """An instance of a dataclass of settings from plain data, sections included; raises as `check` does."""
    kind: Any = settings_class
    return with_plain_numbers(kind(**vars(parser_of(kind).instantiate(check(kind, values, source)))))


def with_plain_numbers(value: Any) -> Any:
    """The value, in whose sections numbers of restricted types have become plain ones, which YAML files can hold."""
    if is_dataclass(value):
        for field in fields(value):
            setattr(value, field.name, with_plain_numbers(getattr(value, field.name)))
    elif isinstance(value, dict):
        return {key: with_plain_numbers(item) for key, item in value.items()}
    elif isinstance(value, list):
        return [with_plain_numbers(item) for item in value]
    elif isinstance(value, int | float) and not isinstance(value, bool):
        return int(value) if isinstance(value, int) else float(value)
    return value


def in_turn(value: Any, number: int) -> Any:
    """The value of a setting for the prompt of this number: of a list each prompt takes one, in turn."""
    return value[number % len(value)] if isinstance(value, list) else value


@dataclass
class ChatSettings:
    """What shapes a prompt besides its words. A draft keeps that of its training, and commands follow it."""

    chat: Literal["auto"] | bool | None = None
    """Put prompts and pairs into the chat template; in suites with several turns, later ones follow the target's own
    greedy answers. auto or null: in commands as the draft was trained, else where the tokenizer has one; false: plain
    text."""
    chat_template: str | None = None
    """Jinja template of chats, or a file with one. null: in commands that of the draft's training, else the
    tokenizer's."""
    system: str | None = None
    """System message of chats without one. null: in commands that of the draft's training, else what the template
    writes."""
    template_args: Fields | list[Fields] = field(default_factory=dict)
    """Variables of the chat template, such as {enable_thinking: false}. Of a list each prompt of a training takes one,
    in turn, and commands take the first. {}: in commands those of the draft's training."""

    def template(self) -> str | None:
        """The chat template, which may be in a file.

        Raises:
            UserError: it is neither a template nor a file.
        """
        text = self.chat_template
        if text is None or "{{" in text or "{%" in text:
            return text
        try:
            return "".join(text_lines(text))
        except UserError as error:
            wanted = f"expected a Jinja template (with {{{{ or {{%) or a file that can be read ({error})"
            raise UserError(f"chat_template is {text!r}, {wanted}") from error

    def use(self, tokenizer: "PreTrainedTokenizerBase") -> bool:
        """Give a tokenizer the chat template of these settings; whether prompts are put into its template."""
        tokenizer.chat_template = self.template() or tokenizer.chat_template
        return self.chat if isinstance(self.chat, bool) else bool(tokenizer.chat_template)

    def args(self, number: int = 0) -> Fields:
        """The template's variables of the prompt of this number."""
        return in_turn(self.template_args or {}, number)


@dataclass
class MethodOptions:
    """What a method leaves open; null takes the paper's value."""

    stop_rule: str | None = None
    """Another stop rule than the method's own; `draftsmith decode methods` lists them."""
    rule: str | None = None
    """Another acceptance rule than the method's own; `draftsmith decode methods` lists them; or module.Class of your
    own. All but exact and block-verification are relaxed: the output is no longer distributed as the target's, and
    drafts may not be trees."""
    draft_length: PositiveInt | None = None
    """Tokens drafted per round; for adaptive stop rules the longest draft. null: the length stored in the exported
    draft (fixed lengths only), else 5; AdaSD, Hugging Face and cost-optimal 20; Draft & Verify and AdaSPEED 12;
    prompt lookup 10; suffix 24; hybrid 8."""
    beta: NonNegativeFloat = 0.1
    """EARS: tolerance β(1 − max p); the paper uses 0.05 to 0.2, 0 is the exact rule."""
    threshold: ClosedUnitInterval | None = None
    """Start of an adaptive confidence threshold; null: Draft & Verify 0.6, AdaSPEED 0.8, Hugging Face 0.4.
    Hybrid: the head drafts on while the product of its largest probabilities is above this; null: 0.2."""
    target_acceptance: OpenUnitInterval | None = None
    """Acceptance rate that Draft & Verify's and AdaSPEED's controllers steer to; null: 0.9."""
    never_slower: bool = False
    """Limit each round's draft to the length with the highest expected tokens per second, and draft nothing where no
    length is expected to gain (a round is still drafted occasionally, to test this). For methods that draft chains with
    a model or with the target's own layers; always on for cost-optimal. Costs are those that bench measures or that
    draftsmith decode profile --batch-sizes wrote into the draft's folder; without them, weights that are read are
    counted. In a batch, a sampled text then depends on the other texts of the batch."""
    copy_length: PositiveInt = 10
    """Hybrid: maximum number of tokens copied after a match of four tokens or more of the text's end, in the text or
    the datastore (of two or more where the draft is unsure), and at most twice as many as matched."""
    copy_branch: NonNegativeInt = 0
    """Hybrid-tree: most tokens copied after a shorter match, of two tokens at least, as a branch of the head's tree."""
    exit_layer: PositiveInt | None = None
    """Self-speculation (layerskip, draft-verify, adaspeed, ...): layers that the draft runs; null: what the probes
    advise, else a quarter of the model's."""
    sample_block: bool = False
    """Block heads: draw drafted tokens from the head's distribution instead of taking the likeliest, as engines do;
    as exact, and usually accepted less often."""
    tree_width: PositiveInt = 10
    """EAGLE-2: nodes expanded at each level of the tree, and children tried of each; of block heads children."""
    tree_nodes: PositiveInt = 60
    """Trees of heads: nodes of the drafted tree, the most probable ones; its depth is the draft length."""
    tree_threshold: ClosedUnitInterval = 0.0
    """Trees of heads: nodes whose cumulative probability (temperature 1) is below this are not drafted."""
    probes: str | None = None
    """Folder of acceptance probes, made by `draftsmith probe`: runs/<name>/probes. Options left at null (such as
    exit_layer and threshold) take the values that were fastest when the probes were trained."""
    searches: PositiveInt = 150
    """Adaptix: Monte Carlo iterations a round."""
    adaptive: bool = True
    """Adaptix: learn from the text; the paper's ablation does not."""


def split_spec(spec: str) -> tuple[str, Fields]:
    """Split a method as settings name it, ``NAME`` or ``NAME:option=value:...``, such as ``ears:beta=0.2``.

    Returns:
        The method, and the `MethodOptions` given for it alone.

    Raises:
        UserError: an unknown option, or a value that the option does not take.
    """
    method, *options = spec.split(":")
    values = {key: value for key, _, value in (option.partition("=") for option in options)}
    by_name = vars(MethodOptions())
    for key in values:
        choose("option", key, by_name)
    parsed = build(MethodOptions, dict(values), repr(spec))
    return method, {key: getattr(parsed, key) for key in values}
