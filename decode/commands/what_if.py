"""``python -m decode what-if``: what a draft of a shape would bring in an engine, before it is trained."""

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from decode.bench.report import TABLES, console_table
from decode.bench.session import Item
from decode.bench.statistics import plain
from decode.commands.checks import open_suites
from decode.commands.settings import WhatIfSettings, required
from decode.engines.settings import EngineSettings
from decode.engines.what_if import marginal_rates, parse_shape, what_if
from decode.errors import UserError, read_json
from decode.models.loading import load_tokenizer
from decode.models.tokens import prompt_ids
from decode.progress import output_console


def run(settings: WhatIfSettings) -> None:
    """Time a draft of assumed acceptance and print what it brings."""
    required(settings, "target", "draft_shape")
    parse_shape(str(settings.draft_shape))
    rates: dict[str, Callable[[int], Sequence[float]]]
    if settings.profile:
        known = profile_rates(Path(settings.profile), max(settings.draft_lengths))
        rates = {"profile": lambda length: known[:length]}
    else:
        rates = {f"{alpha:g}": partial(marginal_rates, alpha) for alpha in settings.acceptance}
    tokenizer = load_tokenizer(str(settings.target))
    suites = open_suites(settings.suite, limit=settings.limit, seed=settings.seed, split=settings.split)
    items = [Item(prompt, prompt_ids(tokenizer, prompt.text)) for suite in suites for prompt in suite.prompts]
    engine = EngineSettings(
        target=str(settings.target),
        draft="",
        python=settings.python,
        threads=settings.threads,
        seconds=settings.timeout,
        request_seconds=settings.request_timeout,
    )
    with Console(stderr=True).status("starting") as status:
        found = plain(
            what_if(
                engine,
                str(settings.draft_shape),
                rates,
                items,
                settings.draft_lengths,
                settings.max_new_tokens,
                settings.seed,
                status.update,
            )
        )
    print(json.dumps(found)) if settings.json else show(found)


def profile_rates(path: Path, length: int) -> list[float]:
    """The marginal rates of a profile.

    Raises:
        UserError: it has none, or fewer than the draft is long.
    """
    rates = read_json(path / "speculation_profile.json" if path.is_dir() else path).get("synthetic_acceptance_rates")
    if not rates or len(rates) < length:
        raise UserError(
            f"{path} holds {len(rates or [])} synthetic_acceptance_rates, {length} are wanted; give shorter "
            "--draft-lengths, or --acceptance"
        )
    return [float(rate) for rate in rates]


def show(found: dict[str, Any]) -> None:
    """The table for a terminal."""
    console = output_console(highlight=False)
    console.print(
        f"a draft of {found['shape']} ({found['parameters']:,} parameters); the target alone writes "
        f"{found['plain_tokens_per_second']:.1f} tokens/s"
    )
    console.print(console_table("", TABLES["what-if"], found["rows"]))
    console.print(
        "[dim]speedup: tokens a round (1 + Σ of the assumed marginal rates) / cost of a round in decoding steps of the "
        "target without a draft"
    )
