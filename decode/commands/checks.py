"""Settings are checked before anything is loaded, and converted to warpers, method options, stores and suites."""

import dataclasses
import os
import sys
import typing
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from decode.commands.settings import (
    LoadSettings,
    MethodSettings,
    PromptSettings,
    SamplingSettings,
    SuiteSettings,
)
from decode.core.lengths import RoundCosts
from decode.core.sampling import LogitsWarper
from decode.drafters.probe import describe_probes
from decode.errors import UserError, choose
from decode.files import Fields, read_model_json
from decode.measure import machine
from decode.methods import Parts
from decode.models.heads.files import head_kind
from decode.models.huggingface import facts_of
from decode.models.open import NEUTRAL, Pair, load, own_warp, trained_prompts
from decode.models.tokens import check_template
from decode.options import ChatSettings, build

if TYPE_CHECKING:
    from decode.measure.session import BenchOptions
    from decode.measure.suites import Suite

Settings = TypeVar("Settings", bound=LoadSettings)

PLACED = {f.name for f in dataclasses.fields(LoadSettings)} - {"threads"}
"""Settings that are fixed once the models are open."""


def parts_of(settings: MethodSettings, draft: str | None, *, corpus: bool = False) -> Parts:
    """What the settings name to draft with, before it is opened.

    Raises:
        UserError: there are no such probes, or no such datastore.
    """
    if settings.probes is not None:
        describe_probes(settings.probes)
    if settings.datastore is not None and not Path(settings.datastore).is_dir():
        again = "build one with draftsmith decode datastore build"
        raise UserError(f"there is no datastore folder {settings.datastore!r}; {again}")
    kind, stores = "" if draft is None else head_kind(draft) or "model", corpus or settings.datastore is not None
    return Parts(settings, kind, str(draft), datastore=stores)


def use_chat(
    settings: PromptSettings, tokenizer: PreTrainedTokenizerBase, *, tell: bool = False
) -> ChatSettings | None:
    """What shapes the prompts: the settings, then the training of draft, probes or target; None: they are plain text.

    The tokenizer takes the chat template. With `tell` a line is printed that says what is in force, and one that names
    the draft that is followed where others were trained with other settings.

    Raises:
        UserError: the template is missing, or does not take the system message.
    """
    kept = {draft: own for draft in settings.drafts if (own := trained_prompts(draft))}
    others = filter(None, (getattr(settings, key, None) for key in ("probes", "target")))
    trained: Fields = next(filter(None, chain(kept.values(), map(trained_prompts, others))), {})
    asked = {key: value for key in vars(ChatSettings()) if (value := getattr(settings, key)) not in (None, {}, "auto")}
    asked = {"chat": True} | asked if asked else {}
    chat = ChatSettings(**trained | asked)
    if used := chat.use(tokenizer):
        check_template(tokenizer, chat.system)
    if tell:
        shape = f"in the chat template (--chat false: none), system {chat.system!r}, template_args {chat.args()}"
        print(f"prompts are {shape if used else 'plain text'}", file=sys.stderr)
        if unlike := [draft for draft, own in kept.items() if own | asked != trained | asked]:
            print(
                f"prompts follow the training of {next(iter(kept))}, not that of {', '.join(unlike)}", file=sys.stderr
            )
    return chat if used else None


def check_lengths(name: str, lengths: Iterable[int | None], target: PreTrainedModel) -> None:
    """Refuse drafts that are longer than the target's context."""
    limit = facts_of(target)["limit"]
    if long := [length for length in lengths if length and length > limit]:
        raise UserError(f"{name} is {long[0]}, and the target's context holds {limit} tokens; most drafts have 2 to 8")


def make_warp(settings: SamplingSettings, target: PreTrainedModel, temperature: float = 0.0) -> LogitsWarper:
    """The sampling settings as one object; null settings take the target's generation_config."""
    return own_warp(target, temperature, {name: getattr(settings, name) for name in NEUTRAL})


def session_options(settings: PromptSettings, pair: Pair) -> "BenchOptions":
    """How a pair is measured with these settings; without sampling settings from the target's whole distribution."""
    from decode.measure.session import BenchOptions

    names = {f.name for f in dataclasses.fields(BenchOptions)} & vars(settings).keys()
    options = BenchOptions(**{name: getattr(settings, name) for name in names})
    options.chat = use_chat(settings, pair.tokenizer)
    if isinstance(settings, SamplingSettings):
        options.warp = make_warp(settings, pair.target)
    return options


def open_suites(settings: SuiteSettings, *, chat: object) -> "list[Suite]":
    """The suites of the settings (see `load_suite`); their names are the specs without paths where that is unique.

    Where the settings have none, they get one: chat if prompts are put into the chat template, else arithmetic.

    Raises:
        UserError: a suite cannot be read.
    """
    from decode.measure.suites import load_suite

    settings.suite = settings.suite or ["chat" if chat else "arithmetic"]
    short = [Path(spec.partition("=")[0]).stem for spec in settings.suite]
    suites = []
    for name, spec in zip(short, settings.suite):
        suite = load_suite(spec, limit=settings.limit, seed=settings.seed, split=settings.split)
        suites.append(dataclasses.replace(suite, name=name if short.count(name) == 1 else spec))
    return suites


def open_pair(settings: LoadSettings, draft: str | None = None) -> Pair:
    """The target of the settings, and a draft for it."""
    return load(str(settings.target), draft, **{name: getattr(settings, name) for name in PLACED - {"target"}})


def api_settings(settings_class: type[Settings], pair: Pair, options: Fields, **fixed: Any) -> Settings:
    """Settings of a command for models that are open already: `options` of the user, and those that are `fixed`.

    Raises:
        UserError: an unknown option, or a value out of range.
    """
    hints = typing.get_type_hints(settings_class)
    # the chat template is that of the tokenizer, which is open
    free = {name: hint for name, hint in hints.items() if name not in PLACED | fixed.keys() | {"chat_template"}}
    for name in options:
        choose("option", name, free)
    values = {"target": pair.target_name or "the given model", "pack": pair.pack} | fixed | options
    for name, value in values.items():
        if isinstance(value, os.PathLike):
            values[name] = os.fspath(value)
        if typing.get_origin(hints[name]) is list:  # one word is no list of its letters
            values[name] = [value] if isinstance(value, str) else list(value)
    return build(settings_class, values)


def recorded_costs(draft: str | None, device: torch.device) -> RoundCosts | None:
    """Costs that ``profile --batch-sizes`` wrote into the draft's speculation_profile.json on this machine, if it did.

    Raises:
        UserError: the file is damaged.
    """
    profile = read_model_json(Path(draft or "") / "speculation_profile.json")
    if "round_costs" not in profile:
        return None
    try:
        costs, there = RoundCosts.from_dict(profile["round_costs"]), dict(profile["batch_size_conditions"])
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise UserError(
            f"the speculation_profile.json of {draft} is damaged ({type(error).__name__}: {error}); export it again"
        ) from error
    here = machine.describe(device)
    for key in machine.HARDWARE:
        if there.get(key) != here.get(key):
            print(
                f"the costs in the profile of {draft} are not used: they were measured on {there.get(key)}, not "
                f"{here.get(key)}; measure them here with draftsmith decode profile --batch-sizes",
                file=sys.stderr,
            )
            return None
    return costs
