"""``python -m decode demo``: a text written without and with the draft, side by side.

Both decode in turn in one process, the one that has spent less time first, so that the longer text is the faster one.
"""

import math
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from rich.columns import Columns
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.text import Text

from decode.commands.checks import open_pair, use_chat
from decode.commands.generate import LEGEND, Generation, colored, start
from decode.commands.settings import DemoSettings, GenerateSettings
from decode.errors import UserError
from decode.methods import METHODS
from decode.models.pair import Pair
from decode.progress import output_console

OTHER_ROWS = 8  # rows of the terminal for frames, legend and result


@dataclass
class Side:
    """One of the texts that are being written."""

    title: str
    generation: Generation
    seconds: float = 0.0  # spent so far, including the time for the prompt
    done: bool = False

    def advance(self) -> None:
        """One step."""
        began = time.perf_counter()
        self.done = next(self.generation.pieces, None) is None
        self.seconds += time.perf_counter() - began

    @property
    def speed(self) -> float:
        """Tokens per second so far."""
        return len(self.generation.ids) / self.seconds if self.seconds else math.nan

    def panel(self, console: Console) -> Panel:
        """The end of the text that fits the terminal, with the speed below."""
        width, count = console.width // 2 - 1, len(self.generation.ids)
        pieces = [piece for piece in self.generation.tokens if piece["who"] != "rejected"]
        lines = colored(pieces).wrap(console, max(10, width - 4))
        shown = Text("\n").join(lines[-max(3, console.height - OTHER_ROWS) :])
        forwards = count / max(1, self.generation.trace.rounds)
        below = f"{count} tokens, {self.speed:.1f}/s, {forwards:.2f} a forward"
        style = "green" if self.done else "dim"
        return Panel(shown, title=self.title, subtitle=below, border_style=style, width=width)


def race(sides: Sequence[Side]) -> Iterator[None]:
    """Advance the side that has spent the least time, until all have ended."""
    while going := [side for side in sides if not side.done]:
        min(going, key=lambda side: side.seconds).advance()
        yield


def result(plain: Side, drafted: Side, greedy: bool) -> str:
    """How much faster decoding is with the draft, and whether the text is the same."""
    text = "another text at a near tie" if greedy else "another draw from the same distribution"
    if plain.generation.ids == drafted.generation.ids:
        text = "the same text, token by token"
    elif not drafted.generation.lossless:
        text = "a relaxed method: the text is not distributed as the target's"
    return f"{drafted.speed / plain.speed:.2f} times as fast; {text}"


def show(sides: Sequence[Side], console: Console, greedy: bool) -> None:
    """Write the texts, on a terminal while they grow."""

    def view() -> Group:
        return Group(Columns([side.panel(console) for side in sides]), LEGEND)

    with Live(view(), console=console, auto_refresh=False) as live:
        refreshed = time.monotonic()
        for _ in race(sides):
            if console.is_terminal and time.monotonic() - refreshed > 1 / 12:
                live.update(view(), refresh=True)
                refreshed = time.monotonic()
        live.update(view(), refresh=True)
    if not console.is_terminal:  # on a terminal Live itself begins a new line
        console.print()
    console.print(result(sides[0], sides[1], greedy), style="bold", highlight=False)


def prompts(settings: DemoSettings, console: Console, end: str) -> Iterator[str]:
    """The prompt of the settings, or what is typed, line by line and each with this end, until an empty one."""
    if settings.prompt is not None:
        yield settings.prompt
        return
    if terminal := sys.stdin.isatty():
        console.print("Type a prompt; an empty line ends.", style="dim")
    while line := (console.input("[bold]> ") if terminal else sys.stdin.readline()).strip():
        yield line + end


def run(settings: DemoSettings) -> None:
    """Open the models once, then write a pair of texts for every prompt.

    Raises:
        UserError: no draft, or models that do not fit each other.
    """
    console = output_console(highlight=False)
    if settings.draft is None and METHODS.get(settings.method or "vanilla", ("model",))[0] == "model":
        raise UserError("demo compares decoding without and with a draft; give --draft D, or --method prompt-lookup")
    drafted = open_pair(settings, settings.draft)
    plain = Pair(drafted.target, drafted.tokenizer, target_name=drafted.target_name, pack=settings.pack)
    method = settings.method or getattr(drafted.draft, "method", "vanilla")
    with_draft = GenerateSettings(**vars(settings) | {"method": method})
    without = replace(with_draft, draft=None, method="autoregressive", stop_rule=None, rule=None)
    about = f"with {method}" + (f", {settings.draft}" if settings.draft else "")
    end = "" if use_chat(settings, drafted.tokenizer) else "\n"  # plain text goes on behind the whole line
    try:
        for prompt in prompts(settings, console, end):
            sides = [
                Side("without a draft", start(without, prompt, plain)),
                Side(about, start(with_draft, prompt, drafted)),
            ]
            show(sides, console, greedy=settings.temperature == 0)
    except (KeyboardInterrupt, EOFError):
        console.print()
