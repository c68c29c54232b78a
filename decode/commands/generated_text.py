"""A generated text: what is known of it, and how a terminal shows who wrote each token."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from decode.core.trace_metrics import FORMULAS, Trace
from decode.measure.bootstrap_statistics import plain
from decode.report.html_page import WRITERS


@dataclass
class Generation:
    """A text, and how it came about."""

    prompt: list[int]  # token ids
    method: str  # the method's name
    lossless: bool  # whether the output distribution is the target's
    seed: int  # of sampling
    # rounds as marked text (`decode.models.streamed_text.marked`), to be iterated once while the text is generated
    pieces: Iterator[list[dict[str, str]]] = field(default_factory=lambda: iter(()), repr=False)
    ids: list[int] = field(default_factory=list)  # tokens generated so far
    trace: Trace = field(default_factory=Trace, repr=False)  # rounds so far
    text: str = ""  # text so far
    tokens: list[dict[str, str]] = field(default_factory=list, repr=False)  # marked tokens so far
    # once the text has ended, what ended it: eos, stop (a stop string), length (max_new_tokens) or context (it is full)
    finish_reason: str | None = None

    @property
    def metrics(self) -> dict[str, Any]:
        """Acceptance, block efficiency and times; `decode.core.trace_metrics.FORMULAS` says how they are computed."""
        return dict(plain(self.trace.metrics()))

    def to_dict(self) -> dict[str, Any]:
        """The object that ``--json`` prints."""
        return {
            "text": self.text,
            "ids": self.ids,
            "prompt_ids": self.prompt,
            "method": self.method,
            "lossless": self.lossless,
            "seed": self.seed,
            "finish_reason": self.finish_reason,
            "metrics": self.metrics,
            "tokens": self.tokens,
        }


STYLES = {
    "accepted": "green",
    "rejected": "red strike",
    "corrected": "yellow",
    "bonus": "cyan",
    "target": "default",
}
"""How ``--show`` marks who wrote a token."""

LEGEND = {who: WRITERS[who] for who in ("accepted", "rejected", "corrected", "bonus")}


def colored(pieces: Sequence[dict[str, str]]) -> Text:
    """Marked text in the colours of those who wrote it; a rejected line end is a sign, so that it breaks no line."""
    shown = ((p["text"].replace("\n", "⏎") if p["who"] == "rejected" else p["text"], p["who"]) for p in pieces)
    return Text.assemble(*((text, STYLES[who]) for text, who in shown))


def show_statistics(generation: Generation, console: Console) -> None:
    """The statistics of the rounds, each with its formula."""
    console.print()
    legend = Text("  ").join(Text(meaning, STYLES[who]) for who, meaning in LEGEND.items())
    console.print(legend)
    kind = "lossless" if generation.lossless else "relaxed: the output is not distributed as the target's"
    table = Table(title=f"{generation.method} ({kind})", title_justify="left", box=None, pad_edge=False)
    table.add_column("")
    table.add_column("", justify="right")
    table.add_column("formula", style="dim")
    metrics = generation.trace.metrics()
    for name, formula in STATISTICS.items():
        value = metrics[name]
        if value == value:
            number = f"{value:d}" if isinstance(value, int) else f"{value:.3f}"
            table.add_row(name, number, formula or FORMULAS[name])
    console.print(table)


STATISTICS = {
    "tokens": "generated, the end-of-text token included",
    "rounds": "target forwards after the prompt was read",
    "tokens_per_second": "tokens / total_seconds, the prompt's reading included",
    "block_efficiency": "",
    "drafted_per_round": "Σk / rounds",
    **dict.fromkeys(("alpha", "accepted_per_tested", "accepted_per_drafted", "tv_spent", "js_distance"), ""),
    "prefill_seconds": "reading the prompt, by target and draft",
    "draft_seconds": "proposing",
    "verify_seconds": "the target's forwards, verification and bookkeeping",
    "total_seconds": "wall time",
}
"""What ``--show`` prints of the rounds, with the formulas that `FORMULAS` does not have."""
