"""``draftsmith decode generate``: stream a text, show who wrote which token, compare with decoding without a draft."""

import json
import random
import sys
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from rich.console import Console
from rich.text import Text as Coloured

from decode.commands.checks import (
    api_settings,
    check_lengths,
    make_warp,
    open_pair,
    parts_of,
    recorded_costs,
    use_chat,
)
from decode.commands.settings import GenerateSettings, required
from decode.core.draft import Ids
from decode.core.round import FORMULAS, metrics
from decode.core.sampling import TorchRng
from decode.errors import UserError
from decode.files import Fields
from decode.incoming import read_stdin, whole
from decode.loop import Method, Text
from decode.loop import run as decode_rounds
from decode.measure import machine
from decode.measure.statistics import plain
from decode.methods import (
    BASELINES,
    METHODS,
    MethodInputs,
    Parts,
    build,
    exported_length,
    is_lossless,
    kind_of,
    refusal,
)
from decode.models.open import Pair, described, placement, stop_ids, unnamed_ends
from decode.models.tokens import Detokenizer, StopStrings, chat_ids, marked, prompt_ids, user_says

Pieces = list[dict[str, str]]  # tokens as marked text (`decode.models.tokens.marked`)


@dataclass
class Generation:
    """A text with the record of its decoding."""

    prompt: Ids  # token ids
    method: str
    lossless: bool  # whether the output distribution is the target's
    seed: int
    decoded: Text = field(repr=False)  # its ``rounds`` are the trace
    pair: Pair = field(repr=False)
    system: Method = field(repr=False)
    tokens: Pieces = field(default_factory=list, repr=False)  # marked tokens so far

    @cached_property
    def pieces(self) -> Iterator[Pieces]:
        """The tokens of each round; iterating over them generates the text, once."""
        alone, detokenizer = METHODS[self.method][0] == "none", Detokenizer(self.pair.tokenizer)
        for _, r in decode_rounds(self.pair.runner, self.system, [self.decoded]):
            pieces = marked(detokenizer, r.new, r.written_by, r.rejected, alone)
            self.tokens += pieces
            yield pieces
        if rest := detokenizer.finish():
            self.tokens.append({"text": rest, "who": (self.tokens or [{"who": "target"}])[-1]["who"]})
            yield self.tokens[-1:]

    @property
    def text(self) -> str:
        """The text so far."""
        return written(self.tokens)

    @property
    def ids(self) -> Ids:
        """The tokens generated so far."""
        return self.decoded.new_ids

    @property
    def finish_reason(self) -> str | None:
        """What ended the text: eos, stop (a stop string), length (max_new_tokens) or context (full); None before."""
        return self.decoded.finish or None

    @property
    def metrics(self) -> Fields:
        """Acceptance, accepted length and times; their formulas are in `decode.core.round.FORMULAS`."""
        seconds = {"prefill_seconds": self.decoded.prefill_seconds, "total_seconds": self.decoded.total_seconds}
        speed = len(self.ids) / (self.decoded.total_seconds or float("nan"))
        return plain(metrics([self.decoded.rounds]) | seconds | {"tokens_per_second": speed})

    def to_dict(self) -> Fields:
        """The object that ``--json`` prints."""
        names = ("text", "ids", "method", "lossless", "seed", "finish_reason", "metrics", "tokens")
        return {"prompt_ids": self.prompt} | {name: getattr(self, name) for name in names}


STYLES = {"accepted": "green", "rejected": "red strike", "corrected": "yellow", "bonus": "cyan", "target": "default"}
"""Colours of tokens in the terminal, by who wrote them."""
WARM_UP = 8  # tokens of the text that is written before those that are compared


def written(pieces: Pieces) -> str:
    """Marked text without what was rejected."""
    return "".join(piece["text"] for piece in pieces if piece["who"] != "rejected")


def generate(
    pair: Pair,
    prompt: str,
    method: str | None = None,
    *,
    max_new_tokens: int = 256,
    temperature: float = 0.0,
    seed: int | None = 0,
    **options: Any,
) -> Generation:
    """Generate one text.

    Args:
        pair: from `decode.load`.
        prompt: the user's message where the tokenizer has a chat template, else the text to continue; ``chat=False``
            continues text in either case.
        method: a name that ``draftsmith decode methods`` lists; ``None``: vanilla with a draft, else autoregressive.
        max_new_tokens: most tokens to generate.
        temperature: 0 is greedy.
        seed: of sampling; ``None`` draws one.
        options: any other option of ``draftsmith decode generate``, such as ``top_p``, ``beta``, ``stop``.

    Raises:
        UserError: an unknown method or option, a value out of range, a prompt that cannot be decoded.
    """
    options |= {"max_new_tokens": max_new_tokens, "temperature": temperature, "seed": seed}
    settings = api_settings(GenerateSettings, pair, options, draft=pair.draft_name, method=method)
    with machine.using_threads(settings.threads):
        return finished(start(settings, prompt, pair))


def finished(generation: Generation) -> Generation:
    """The same after its text has been generated."""
    deque(generation.pieces, maxlen=0)
    return generation


def chosen_method(settings: GenerateSettings, pair: Pair | None = None) -> str:
    """The method of the settings; unknown ones, and those for which something is missing, are refused."""
    required(settings, "target")
    parts = parts_of(settings, settings.draft)
    if pair is not None:
        parts = Parts.of_draft(pair.draft, parts.options, datastore=parts.datastore)
    method = settings.method or ("vanilla" if parts.draft else "autoregressive")
    if why := refusal(method, parts):
        raise UserError(why)
    if method in BASELINES:
        raise UserError(f"{method} is transformers' own and only for comparison in bench; choose another method")
    return method


def start(settings: GenerateSettings, prompt: str, pair: Pair | None = None) -> Generation:
    """Load everything, unless it is open, and prepare a generation; iterating over its ``pieces`` generates the text.

    Raises:
        UserError: an unknown or incomplete method, models that do not fit, a prompt that cannot be decoded.
    """
    method = chosen_method(settings, pair)
    if not isinstance(prompt, str):
        raise UserError(f"the prompt is {prompt!r}, expected a text")
    prompt = whole(prompt, "the prompt")
    if pair is None:
        pair = opened(settings, settings.draft if kind_of(method).drafts else None)
    tokenizer, warp = pair.tokenizer, make_warp(settings, pair.target, settings.temperature)
    chat = use_chat(settings, tokenizer)
    ids = chat_ids(tokenizer, user_says(prompt, chat.system), chat.args()) if chat else prompt_ids(tokenizer, prompt)
    options, draft, costs = replace(settings), None, None
    check_lengths("draft_length", [options.draft_length], pair.target)
    stop = settings.stop_rule or METHODS[method][1]
    if kind_of(method).drafts:
        draft = pair.draft_runner
        if options.never_slower or stop == "cost-optimal":
            costs = recorded_costs(pair.draft_name, pair.runner.device)
        if options.draft_length is None and stop == "length":
            options.draft_length = exported_length(pair.draft)
    inputs = MethodInputs(pair.runner, warp, draft, tokenizer, settings.datastore, options, costs)
    system = build(method, inputs)
    seed = random.SystemRandom().randrange(1 << 31) if settings.seed is None else settings.seed
    ends = [] if settings.ignore_eos else stop_ids(pair.target, tokenizer)
    strings = StopStrings(tokenizer, settings.stop) if settings.stop else None
    text = Text(
        pair.runner, system, warp, ids, max_new_tokens=settings.max_new_tokens, stop_ids=ends, stop_strings=strings,
        rng=TorchRng(seed),
    )  # fmt: skip
    return Generation(ids, method, is_lossless(method, settings.rule), seed, text, pair, system)


def opened(settings: GenerateSettings, draft: str | None) -> Pair:
    """Load the models, choose the number of threads, and say on standard error how they are run."""
    pair = open_pair(settings, draft)
    torch.set_num_threads(machine.choose_threads(pair.runner, settings.threads)[0])
    use_chat(settings, pair.tokenizer, tell=True)
    warp = make_warp(settings, pair.target, settings.temperature)
    ends = unnamed_ends(pair.target, pair.tokenizer)
    notices = f"{settings.target} {placement(pair.target)}", described(pair.target, warp), ends
    print("\n".join(filter(None, notices)), file=sys.stderr)
    return pair


def run(settings: GenerateSettings) -> None:
    """Generate one text to standard output; without a prompt in the settings, from standard input.

    Raises:
        UserError: there is no prompt, or see `start`.
    """
    if (prompt := settings.prompt) is None:
        if sys.stdin.isatty():
            print("reading the prompt from the terminal; Ctrl-D ends it", file=sys.stderr)
        if not (prompt := read_stdin()):
            raise UserError("the prompt is empty; give --prompt TEXT, or text on standard input")
    if settings.compare:
        compare(settings, prompt)
    elif settings.json:
        print(json.dumps(finished(start(settings, prompt)).to_dict(), ensure_ascii=False))
    else:
        stream(start(settings, prompt), settings.show)


def stream(generation: Generation, show: bool) -> None:
    """Print a text while it is generated; with `show` in the colours of those who wrote it, and with statistics."""
    console = Console(highlight=False, soft_wrap=True)
    try:
        for pieces in generation.pieces:
            if show:
                console.print(coloured(pieces, marks=console.color_system is None), end="")
            else:
                print(written(pieces), end="", flush=True)
    finally:
        print(flush=True)
        if generation.finish_reason == "context":
            print(
                "the text ends here because the model's context is full: "
                f"{len(generation.prompt) + len(generation.ids)} tokens of {generation.pair.runner.limit}",
                file=sys.stderr,
            )
        if show and generation.ids:
            kind = "lossless" if generation.lossless else "relaxed: the output is not distributed as the target's"
            console.print("", Coloured("  ").join(Coloured(who, STYLES[who]) for who in list(STYLES)[:-1]), sep="\n")
            console.print(f"{generation.method} ({kind})")
            for name, value in generation.metrics.items():
                if value is not None:
                    console.print(f"{name:<20}{value:10.4g}  {FORMULAS.get(name, '')}", markup=False)


def coloured(pieces: Pieces, *, marks: bool) -> Coloured:
    """The text of ``pieces`` in the colours of those who wrote it; a rejected line end is shown as a sign.

    With ``marks``, for output without colours, rejected tokens stand in ``[-…-]``.
    """
    text = Coloured()
    for piece in pieces:
        shown = piece["text"]
        if piece["who"] == "rejected":
            shown = shown.replace("\n", "⏎")
            shown = f"[-{shown}-]" if marks else shown
        text.append(shown, STYLES[piece["who"]])
    return text


def compare(settings: GenerateSettings, prompt: str) -> None:
    """Write the text without a draft, then with it, and print how much faster that was, and whether it is the same."""
    if METHODS[chosen_method(settings)][0] == "none":
        raise UserError("--compare needs a method that drafts; give --draft D, or --method prompt-lookup")
    pair = opened(settings, settings.draft)
    without = replace(settings, draft=None, method="autoregressive", stop_rule=None, rule=None)
    finished(start(replace(settings, max_new_tokens=WARM_UP), prompt, pair))
    baseline, drafted = texts = [start(each, prompt, pair) for each in (without, settings)]
    with machine.timed(pair.target.device) as load:
        for text in texts:
            stream(text, show=True)
    same = "the same text, token by token" if baseline.ids == drafted.ids else "another text"
    faster = drafted.metrics["tokens_per_second"] / baseline.metrics["tokens_per_second"]
    row = {"speedup": faster, "accepted_length": drafted.metrics["accepted_length"], **load}
    line = f"{faster:.2f} times as fast as without a draft, of one text"
    if why := machine.doubt(row):
        line = f"no speedup reported: {why}"
    print(f"\n{line}; {same}")
