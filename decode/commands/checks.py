"""Settings are checked before anything is loaded, and converted to warpers, method options, stores and suites."""

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from decode.bench.baselines import NEEDS_DRAFT, TRANSFORMERS_BASELINES
from decode.bench.session import BenchOptions
from decode.bench.suites import Suite, load_suite
from decode.commands.settings import (
    ChatSettings,
    LoadSettings,
    MethodSettings,
    SamplingSettings,
    SuiteSettings,
    required,
)
from decode.errors import UserError, choose, read_json
from decode.method_options import MethodOptions, split_spec
from decode.methods import DRAFTED, METHODS, PROBE_STOPS, PROBED, RULES, STOPS
from decode.models.loading import choose_device, choose_dtype
from decode.models.pair import NEUTRAL, Pair, load, own_warp
from decode.models.tokens import check_template
from decode.sampling import LogitsWarper
from decode.stopping import RoundCosts

Settings = TypeVar("Settings", bound=LoadSettings)

PLACED = {f.name for f in dataclasses.fields(LoadSettings)} - {"threads"}
"""Settings that are fixed once the models are open."""
STORES = {"rest": "datastore", "adaptix": "trigrams"}
"""Methods that draft from a store, and which one."""


def needs_draft(method: str) -> bool:
    """Whether a method drafts with a model."""
    return method in NEEDS_DRAFT or method in DRAFTED


def check_methods(
    settings: MethodSettings, methods: Sequence[str], *, has_draft: bool, has_corpus: bool = False
) -> None:
    """Refuse unknown methods and rules, and methods whose draft, probes or store is missing."""
    for spec in methods:
        method, own = split_spec(spec)
        choose("method", method, dict.fromkeys([*METHODS, *TRANSFORMERS_BASELINES]))
        if needs_draft(method) and not has_draft:
            raise UserError(f"{method} drafts with a model; give one with --draft (a folder or hub name)")
        if method in PROBED and own.get("probes", settings.probes) is None:
            raise UserError(f"{method} stops on a probe; train one with python -m probes, give --probes DIR")
        store = STORES.get(method)
        if store and not (has_corpus or settings.datastore or getattr(settings, store)):
            raise UserError(
                f"{method} drafts from a {store} folder; build one with python -m decode {store} build and give it "
                f"with --{store} DIR"
            )
    if settings.stop_rule is not None:
        choose("stop rule", settings.stop_rule, STOPS | PROBE_STOPS)
    if settings.rule is not None:
        choose("acceptance rule", settings.rule, RULES)


def check_models(settings: LoadSettings) -> None:
    """Refuse a missing target, and a device or number format that cannot be used."""
    required(settings, "target")
    device = choose_device(settings.device)
    choose_dtype(settings.dtype, device)


def use_chat(settings: ChatSettings, tokenizer: PreTrainedTokenizerBase, *, tell: bool = False) -> bool:
    """Whether prompts are put into the chat template: by the settings, else if the tokenizer has one.

    Args:
        settings: of the command.
        tokenizer: of the target.
        tell: print a notice where the template is used by default.

    Raises:
        UserError: the template is missing, or does not take a system message that is given.
    """
    if settings.chat is False or (settings.chat is None and not tokenizer.chat_template and settings.system is None):
        return False
    if not tokenizer.chat_template:
        raise UserError(
            "the target's tokenizer has no chat template; leave out --chat and --system, or take an instruct model"
        )
    check_template(tokenizer, settings.system)
    if tell and not settings.chat:
        said = "prompts are put into the tokenizer's chat template (--chat false continues them as plain text)"
        print(said, file=sys.stderr)
    return True


def make_warp(settings: SamplingSettings, target: PreTrainedModel, temperature: float = 0.0) -> LogitsWarper:
    """The sampling settings as one object; null settings take the target's generation_config."""
    return own_warp(target, temperature, {name: getattr(settings, name) for name in NEUTRAL})


def method_options(settings: MethodSettings) -> MethodOptions:
    """The options of the method, without those of models and sampling."""
    return MethodOptions(**{f.name: getattr(settings, f.name) for f in dataclasses.fields(MethodOptions)})


def store_folders(settings: MethodSettings) -> tuple[Path | None, Path | None]:
    """Folders of the datastore and of the tri-grams, which may be the same."""
    trigrams = settings.trigrams or settings.datastore
    return (Path(settings.datastore) if settings.datastore else None), (Path(trigrams) if trigrams else None)


def open_suites(settings: SuiteSettings) -> list[Suite]:
    """The suites of the settings (see `load_suite`); their names are the specs without paths where that is unique.

    Raises:
        UserError: there is no spec, or a suite cannot be read.
    """
    specs = settings.suite
    if not specs:
        raise UserError("no suite is given; --suite arithmetic needs no download")
    short = [Path(spec).stem if "=" not in spec and "/" in spec else spec.partition("=")[0] for spec in specs]
    found = [load_suite(spec, limit=settings.limit, seed=settings.seed, split=settings.split) for spec in specs]
    return [
        dataclasses.replace(suite, name=name if short.count(name) == 1 else suite.name)
        for suite, name in zip(found, short)
    ]


def open_pair(settings: LoadSettings, draft: str | None = None) -> Pair:
    """The target of the settings, and a draft for it."""
    return load(str(settings.target), draft, **{name: getattr(settings, name) for name in PLACED - {"target"}})


def api_settings(settings_class: type[Settings], pair: Pair, **options: Any) -> Settings:
    """Settings of a command for models that are open already.

    Raises:
        UserError: an unknown option, or a value out of range.
    """
    known = {f.name: f for f in dataclasses.fields(settings_class) if f.name not in PLACED}
    for name in options:
        choose("option", name, known)
    opened: dict[str, Any] = {"pack": pair.pack}
    return settings_class(target=pair.target_name or "the given model", **opened, **options)


def measure_options(settings: LoadSettings, **more: Any) -> BenchOptions:
    """`BenchOptions` from the settings of the same names, and from `more`."""
    shared = {f.name for f in dataclasses.fields(BenchOptions)} & vars(settings).keys()
    return BenchOptions(**{name: getattr(settings, name) for name in shared} | more)


def recorded_costs(draft: str | None) -> RoundCosts | None:
    """Costs that ``profile --batch-sizes`` wrote into the draft's speculation_profile.json, if it did."""
    found = read_json(Path(draft) / "speculation_profile.json").get("round_costs") if draft else None
    return RoundCosts.from_dict(found) if found else None
