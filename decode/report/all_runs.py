"""``python -m decode report runs/*``: one page for all runs, to choose a method by."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from decode.report.all_runs_style import SCRIPT, STYLE
from decode.report.all_runs_table import fastest, filters, interval, methods, part, tags
from decode.report.figures import figures, speed
from decode.report.markup import present, text, unique_ids
from decode.report.page import WRITERS, Page, token_spans, writers_key
from decode.report.read_runs import Comparison, find_reports, read_runs
from decode.report.tables import FAIRNESS

Row = Mapping[str, Any]

FIGURE_BYTES, SAMPLE_BYTES = 400_000, 150_000
"""What plots and samples may take of the page; the rest stays on the runs' own pages, and the page says so."""
PLOTS = {"tv_spent", "accuracy", "predicted", "positions"}
CARDS = 12
"""Answers that are open from the start."""
SAMPLED = 4
"""Methods whose texts are laid side by side."""


def write_overview(runs: Sequence[str] = (), output: str | None = None) -> None:
    """Write the page of all runs, and print where.

    Args:
        runs: folders; none: ``runs``.
        output: the page; None: index.html in the folder that holds the runs.

    Raises:
        UserError: no run, or no report in any of them.
    """
    comparisons, notes = read_runs(find_reports(list(runs) or ["runs"]))
    first = Path((*runs, "runs")[0]).resolve()
    file = Path(output) if output else (first.parent if runs else first) / "index.html"
    overview(comparisons, notes, file.resolve().parent).write(file)
    found = len({c.run for c in comparisons})
    print(
        f"wrote {file}: {found} runs, {len(comparisons)} comparisons, {sum(len(c.rows) for c in comparisons)} results"
    )
    for note in notes:
        print(note)


def overview(comparisons: Sequence[Comparison], notes: Sequence[str], folder: Path) -> Page:
    """The page of these comparisons; links are relative to `folder`, where it will lie."""
    page = Page("Which decoding method?", _lead(comparisons), "draftsmith · all runs", style=STYLE, script=SCRIPT)
    for note in notes:
        page.note(note, "warn")
    page.add(filters(comparisons))
    page.add(part("", _answers(comparisons), "answers"))
    page.add(methods(comparisons, folder))
    plots = "".join(_plots(comparisons))
    page.add(part("Plots", f'<div class="plots">{plots}</div>' if plots else ""))
    page.add(part("Who wrote each token", _samples(comparisons)))
    page.section("How this was measured", FAIRNESS + "Compare speedups only within one run: machines and texts differ.")
    return page


# -- the answer ------------------------------------------------------------------------------------------------------


def _lead(comparisons: Sequence[Comparison]) -> str:
    best = [(row, c) for c in comparisons if (row := fastest(c.rows, True))]
    if not best:
        return "No lossless method that drafts was measured against the same loop without a draft."
    row, where = max(best, key=lambda item: speed(item[0]))
    return (
        f"Fastest without changing the output: {row['name']}, {row['speedup']:.2f}× the same loop without a draft "
        f"({where.suite}, {where.mode}, {where.run})."
    )


def _answers(comparisons: Sequence[Comparison]) -> str:
    cards = list(filter(None, map(_answer, comparisons)))
    more = f"<details><summary>{len(cards) - CARDS} more</summary>{''.join(cards[CARDS:])}</details>"
    return "".join(cards[:CARDS]) + (more if cards[CARDS:] else "")


def _answer(c: Comparison) -> str:
    """A card: the fastest lossless method, and what a relaxed one would add at which cost."""
    exact, relaxed = fastest(c.rows, True), fastest(c.rows, False)
    told, tone = [], "plain"
    if exact is not None:
        low = (exact.get("speedup_ci95") or [exact["speedup"]])[0] or 0.0
        tone, word = ("good", "lossless") if low > 1 else ("warn", "lossless, but not surely faster than no draft")
        tone, word = (tone, word) if exact["speedup"] > 1 else ("bad", "slower than no draft: use none here")
        told.append(f'<p class="pick"><span>{text(exact["name"])}</span><b>{exact["speedup"]:.2f}×</b></p>')
        facts = [interval(exact), word]
        if exact.get("speedup_vs_generate"):
            facts.append(f"{exact['speedup_vs_generate']:.2f}× model.generate")
        told.append(f"<p><small>{text('; '.join(filter(None, facts)))}</small></p>")
    if relaxed is not None and relaxed["speedup"] > (exact["speedup"] if exact else 0):
        cost = [f"TV spent {relaxed['tv_spent']:.3f}"] if present(relaxed.get("tv_spent")) else []
        plain = next((r for r in c.rows if r["method"] == "autoregressive"), {})
        if present(relaxed.get("accuracy")) and present(plain.get("accuracy")):
            cost.append(f"accuracy {relaxed['accuracy']:.2f}, the target's {plain['accuracy']:.2f}")
        told.append(f"<p>{text(relaxed['name'])} {relaxed['speedup']:.2f}×, relaxed: {text(', '.join(cost))}</p>")
    elif relaxed is not None:
        told.append("<p><small>no relaxed rule is faster</small></p>")
    heading = f"<h3>{text(c.suite)}, {text(c.mode)} · {text(c.run)} <small>{c.part}</small></h3>"
    return f'<article class="{tone}"{tags(c)}>{heading}{"".join(told)}</article>' if told else ""


# -- plots and samples -----------------------------------------------------------------------------------------------


def _plots(comparisons: Sequence[Comparison]) -> Iterable[str]:
    room, left_out = FIGURE_BYTES, 0
    for i, c in enumerate(comparisons):
        if room <= 0:
            left_out += 1
            continue
        cells = [
            f"<figure>{unique_ids(svg, f'{name}{i}-')}<figcaption>{text(caption)}</figcaption></figure>"
            for name, (svg, caption) in figures(c.rows, c.details).items()
            if name in PLOTS
        ]
        room -= sum(map(len, cells))
        if cells:
            yield _block(c, f'<div class="gallery">{"".join(cells)}</div>', "wide" if len(cells) > 1 else "")
    if left_out:
        yield f"<p>{_LEFT.format('plots', left_out)}</p>"


_LEFT = "The {} of {} older comparisons are on the pages of their runs."


def _block(c: Comparison, content: str, kind: str = "") -> str:
    heading = f"<h3>{text(c.suite)}, {text(c.mode)} · {text(c.run)} <small>{c.part}</small></h3>"
    return f'<section class="block {kind}"{tags(c)}>{heading}{content}</section>'


def _samples(comparisons: Sequence[Comparison]) -> str:
    """For each comparison the texts of its fastest methods on one prompt."""
    room, left_out = SAMPLE_BYTES, 0
    used: set[str] = set()
    parts: list[str] = []
    for c in comparisons:
        names = [row["name"] for row in sorted(c.rows, key=speed, reverse=True)]
        texts = {d["name"]: d["samples"][0] for d in c.details if d.get("samples") and _drafted(d["samples"][0])}
        chosen = [name for name in names if name in texts][:SAMPLED]
        if not chosen or room <= 0:
            left_out += bool(chosen)
            continue
        used |= {token["who"] for name in chosen for token in texts[name]["tokens"]}
        shown = "".join(_sample(name, texts[name]) for name in chosen)
        opened = " open" if not parts else ""  # the first one shows what is to be seen here
        room -= len(shown)
        said = f"<p>{text(texts[chosen[0]]['prompt'].strip()[:600])}</p>"
        folded = f"<details{opened}><summary>{text(', '.join(chosen))}</summary>{said}"
        parts.append(_block(c, f'{folded}<div class="samples">{shown}</div></details>'))
    rest = f"<p>{_LEFT.format('texts', left_out)}</p>" if left_out else ""
    return (writers_key(used) if used else "") + "".join(parts) + rest


def _drafted(sample: Row) -> bool:
    return any(token["who"] in ("accepted", "corrected", "bonus") for token in sample["tokens"])


def _sample(name: str, sample: Row) -> str:
    """One text, with the share of its tokens that each writer gave."""
    counts = Counter(token["who"] for token in sample["tokens"] if token["who"] != "rejected")
    total = sum(counts.values())
    shares = {who: counts[who] / total for who in WRITERS if counts[who]}
    strip = "".join(f'<i class="w-{who}" style="width:{100 * share:.1f}%"></i>' for who, share in shares.items())
    told = ", ".join(f"{share:.0%} {who}" for who, share in shares.items())
    caption = f"<figcaption><b>{text(name)}</b>: {total} tokens, {told}</figcaption>"
    spans = token_spans(sample["tokens"], titles=False)
    return f'<figure class="text">{caption}<div class="share">{strip}</div><pre>{spans}</pre></figure>'
