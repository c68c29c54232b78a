"""``python -m decode generate``: stream a text, and show who wrote which token."""

import json
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from decode.bench import machine
from decode.bench.benchmark import exported_length
from decode.bench.page import WRITERS
from decode.bench.statistics import plain
from decode.commands.checks import (
    api_settings,
    check_methods,
    check_models,
    make_warp,
    method_options,
    needs_draft,
    open_pair,
    recorded_costs,
    store_folders,
    use_chat,
)
from decode.commands.settings import GenerateSettings
from decode.errors import UserError
from decode.loop import steps
from decode.methods import METHODS, Method, MethodInputs, build, is_lossless
from decode.models.loading import placement, stop_ids
from decode.models.other_tokenizer import ForeignDraft
from decode.models.pair import Pair, described
from decode.models.tokens import Detokenizer, chat_ids, marked, prompt_ids, stop_at, user_says
from decode.sampling import LogitsWarper, TorchRng
from decode.trace import FORMULAS, Trace


@dataclass
class Generation:
    """A text with the record of its decoding."""

    prompt: list[int]  # token ids
    method: str
    lossless: bool  # whether the output distribution is the target's
    seed: int
    # steps as marked text (`decode.models.tokens.marked`); iterating over them generates the text, once
    pieces: Iterator[list[dict[str, str]]] = field(default_factory=lambda: iter(()), repr=False)
    ids: list[int] = field(default_factory=list)  # tokens generated so far
    trace: Trace = field(default_factory=Trace, repr=False)
    text: str = ""  # text so far
    tokens: list[dict[str, str]] = field(default_factory=list, repr=False)  # marked tokens so far
    # what ended the text: eos, stop (a stop string), length (max_new_tokens) or context (it is full); None before
    finish_reason: str | None = None

    @property
    def metrics(self) -> dict[str, Any]:
        """Acceptance, accepted length and times; their formulas are in `decode.trace.FORMULAS`."""
        return dict(plain(self.trace.metrics()))

    def to_dict(self) -> dict[str, Any]:
        """The object that ``--json`` prints."""
        names = ("text", "ids", "method", "lossless", "seed", "finish_reason", "metrics", "tokens")
        return {"prompt_ids": self.prompt} | {name: getattr(self, name) for name in names}


STYLES = {"accepted": "green", "rejected": "red strike", "corrected": "yellow", "bonus": "cyan", "target": "default"}
"""Colours of tokens in the terminal, by who wrote them."""
LEGEND = Text("  ").join(Text(WRITERS[who], STYLES[who]) for who in ("accepted", "rejected", "corrected", "bonus"))
STATISTICS = FORMULAS | {
    "tokens": "generated, the end-of-text token included",
    "rounds": "target forwards after the prompt was read",
    "tokens_per_second": "tokens / total_seconds, including the time for the prompt",
    "drafted_per_round": "Σk / rounds",
    "prefill_seconds": "time for the prompt, by target and draft",
    "draft_seconds": "time for drafting",
    "verify_seconds": "time for the target's forwards, verification and bookkeeping",
    "total_seconds": "wall time",
}
"""Formulas of the statistics that ``--show`` prints."""


def colored(pieces: Sequence[dict[str, str]]) -> Text:
    """Marked text in the colours of those who wrote it; a rejected line end is shown as a sign."""
    shown = ((p["text"].replace("\n", "⏎") if p["who"] == "rejected" else p["text"], p["who"]) for p in pieces)
    return Text.assemble(*((text, STYLES[who]) for text, who in shown))


def generate(
    pair: Pair,
    prompt: str,
    method: str | None = None,
    *,
    max_new_tokens: int = 64,
    temperature: float = 0.0,
    seed: int | None = 0,
    **options: Any,
) -> Generation:
    """Generate one text.

    Args:
        pair: from `decode.load`.
        prompt: the user's message where the tokenizer has a chat template, else the text to continue; ``chat=False``
            continues text in either case.
        method: a name that ``python -m decode methods`` lists; ``None``: vanilla with a draft, else autoregressive.
        max_new_tokens: most tokens to generate.
        temperature: 0 is greedy.
        seed: of sampling; ``None`` draws one.
        options: any other option of ``python -m decode generate``, such as ``top_p``, ``beta``, ``stop``.

    Raises:
        UserError: an unknown method or option, a value out of range, a prompt that cannot be decoded.
    """
    given = {"max_new_tokens": max_new_tokens, "temperature": temperature, "seed": seed}
    settings = api_settings(GenerateSettings, pair, draft=pair.draft_name, method=method, **given, **options)
    generation = start(settings, prompt, pair)
    for _ in generation.pieces:
        pass
    return generation


def start(settings: GenerateSettings, prompt: str, pair: Pair | None = None) -> Generation:
    """Load everything and prepare a generation; nothing is generated before ``pieces`` is iterated.

    Raises:
        UserError: an unknown or incomplete method, models that do not fit, a prompt that cannot be decoded.
    """
    method = settings.method or ("vanilla" if settings.draft else "autoregressive")
    check_models(settings)
    check_methods(settings, [method], has_draft=settings.draft is not None)
    if method not in METHODS:
        raise UserError(f"{method} is transformers' own and only for comparison in bench; choose another method")
    opened = pair is None
    if pair is None:
        pair = open_pair(settings, settings.draft if needs_draft(method) else None)
    tokenizer, warp = pair.tokenizer, make_warp(settings, pair.target, settings.temperature)
    chat = use_chat(settings, tokenizer, tell=opened)
    if settings.threads is not None:  # before the layout of weights is chosen by measurement
        torch.set_num_threads(settings.threads)
    if opened:
        machine.set_threads(pair.runner, settings.threads)
        notices = f"{settings.target} {placement(pair.target)}", described(pair.target, warp)
        print("\n".join(filter(None, notices)), file=sys.stderr)
    ids = chat_ids(tokenizer, user_says(prompt, settings.system)) if chat else prompt_ids(tokenizer, prompt)
    options, draft, costs = method_options(settings), None, None
    if needs_draft(method):
        draft, costs = pair.draft_runner, recorded_costs(pair.draft_name)
        if isinstance(pair.draft, ForeignDraft):
            print(pair.draft.vocabulary.sentence(ids), file=sys.stderr)
        if pair.draft and options.draft_length is None and (settings.stop_rule or METHODS[method][1]) == "length":
            options.draft_length = exported_length(pair.draft)
    inputs = MethodInputs(pair.runner, warp, draft, tokenizer, *store_folders(settings), options, costs)
    system = build(method, inputs, stop=settings.stop_rule, rule=settings.rule)
    seed = random.SystemRandom().randrange(1 << 31) if settings.seed is None else settings.seed
    generation = Generation(ids, method, is_lossless(method, settings.rule), seed)
    generation.pieces = _pieces(generation, settings, pair, system, warp)
    return generation


def _pieces(
    generation: Generation, settings: GenerateSettings, pair: Pair, system: Method, warp: LogitsWarper
) -> Iterator[list[dict[str, str]]]:
    """Generate the text and keep it in `generation`; yields the tokens of each step with those who wrote them."""
    tokenizer, rng = pair.tokenizer, TorchRng(generation.seed, pair.runner.device)
    ends = set() if settings.ignore_eos else stop_ids(pair.target, tokenizer)
    alone, detokenizer = METHODS[generation.method][0] == "none", Detokenizer(tokenizer)

    def stopped(dropped: int) -> None:
        generation.finish_reason = "stop"
        generation.trace.tokens -= dropped

    def noted(pieces: list[dict[str, str]]) -> list[dict[str, str]]:
        generation.tokens += pieces
        generation.text += "".join(piece["text"] for piece in pieces if piece["who"] != "rejected")
        return pieces

    source = steps(
        pair.runner, system, warp, generation.prompt, max_new_tokens=settings.max_new_tokens, stop_ids=ends, rng=rng,
        trace=generation.trace,
    )  # fmt: skip
    for step in stop_at(source, generation.prompt, tokenizer, settings.stop, stopped):
        generation.ids += step.new
        yield noted(marked(detokenizer, step.new, step.written_by, step.rejected, alone))
    if rest := detokenizer.finish():
        yield noted([{"text": rest, "who": generation.tokens[-1]["who"] if generation.tokens else "target"}])
    if generation.ids and generation.ids[-1] in ends:
        generation.finish_reason = "eos"
    elif generation.finish_reason != "stop":
        generation.finish_reason = "length" if len(generation.ids) >= settings.max_new_tokens else "context"


def run(settings: GenerateSettings) -> None:
    """Generate one text to standard output; without a prompt in the settings, from standard input.

    Raises:
        UserError: there is no prompt, or see `start`.
    """
    if (prompt := settings.prompt) is None:
        if sys.stdin.isatty():
            print("reading the prompt from the terminal; Ctrl-D ends it", file=sys.stderr)
        if not (prompt := sys.stdin.read()):
            raise UserError("the prompt is empty; give --prompt TEXT, or text on standard input")
    generation = start(settings, prompt)
    if settings.json:
        for _ in generation.pieces:
            pass
        print(json.dumps(generation.to_dict(), ensure_ascii=False))
        return
    console = Console(highlight=False, soft_wrap=True)
    try:
        for pieces in generation.pieces:
            if settings.show:
                console.print(colored(pieces), end="")
            else:
                print("".join(p["text"] for p in pieces if p["who"] != "rejected"), end="", flush=True)
    finally:
        print(flush=True)
        if generation.finish_reason == "context":
            used = len(generation.prompt) + len(generation.ids)
            print(f"the text ends here because the model's context is full: {used} tokens", file=sys.stderr)
        if settings.show and generation.trace.rounds:
            kind = "lossless" if generation.lossless else "relaxed: the output is not distributed as the target's"
            table = Table(title=f"{generation.method} ({kind})", title_justify="left", box=None, pad_edge=False)
            table.add_column("")
            table.add_column("", justify="right")
            table.add_column("formula", style="dim")
            for name, value in generation.trace.metrics().items():
                if name in STATISTICS and value == value:
                    table.add_row(name, f"{value:d}" if isinstance(value, int) else f"{value:.3f}", STATISTICS[name])
            console.print("", LEGEND, table, sep="\n")
