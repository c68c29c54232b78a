"""Draws a round of a draft model, an EAGLE head and a block head, at the same place of a text that each of them drafts.

``python tests/support/round_picture.py TARGET DRAFT EAGLE BLOCK FILE.svg [--prompt TEXT]``
"""

import argparse
from collections.abc import Iterable
from html import escape
from pathlib import Path
from typing import Any

from torch import Tensor

from decode import loop
from decode.commands.generate import Generation, finished, start
from decode.commands.settings import GenerateSettings
from decode.core.round import Round
from decode.core.verify import Verification
from decode.measure.suites import load_suite

KINDS = {  # the method, and what the first forward of a draft reads and what the others do
    "draft model": ("vanilla", "reads the text", "reads its token"),
    "EAGLE head": ("eagle", "target's states", "its own state"),
    "block head": ("block", "reads the target's states and fills all places", ""),
}
LENGTH = 5  # drafted tokens; with those before and after them, seven columns
LEFT, COLUMN, KIND, TOP = 100, 116, 196, 48  # pixels: the names' width, a token's, a kind's height, the title's
GREEN, RED, BLUE, GREY = "#2e9e4f", "#d64545", "#3b82d6", "#8a8a8a"
OPENING = f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {LEFT + 7 * COLUMN} {TOP + 3 * KIND - 20}"><style>
svg{{color:#1c1c1c;font:12px 'DejaVu Sans',sans-serif}}text{{fill:currentColor;text-anchor:middle}}
.name{{text-anchor:start}}.struck{{text-decoration:line-through}}.small{{font-size:10px}}
@media(prefers-color-scheme:dark){{svg{{color:#e4e4e4}}}}</style>
"""
Seen = tuple[int, Tensor, Tensor]  # forwards of the draft, and the rows of q and of p, which a trace leaves out


def watch(generation: Generation) -> Iterable[tuple[Round, Seen]]:
    """Decodes a text; returns its rounds and what was seen of each."""
    text, drafter, seen, reads = generation.decoded, generation.system.drafter, list[Seen](), list[int]()
    text.rule.unwarped = True  # drafts keep their logits until they are verified
    read = drafter.read

    def counted(caches: Any, feeds: Any) -> Any:
        reads.append(1)
        return read(caches, feeds)

    class Watched(Verification):
        def __init__(self, drafts: Any, tokens: Tensor, logits: Tensor, *given: Any) -> None:
            p = logits.softmax(-1)
            seen.append((max(1, len(reads)), p if drafts.logits is None else drafts.logits[0].softmax(-1), p))
            reads.clear()
            super().__init__(drafts, tokens, logits, *given)

    vars(loop)["Verification"], drafter.read = Watched, counted
    return zip(finished(generation).decoded.rounds, seen)


def words(x: float, y: int, text: str, kind: str = "") -> str:
    """A line of text."""
    return f'<text x="{x:g}" y="{y}" class="{kind}">{escape(text)}</text>\n'


def box(column: float, y: int, columns: float, text: str, colour: str, below: str = "", kind: str = "") -> str:
    """A rectangle over some columns, with a line of text or two."""
    x, width, height = LEFT + COLUMN * column, COLUMN * columns - 6, 38 if below else 24
    shape = f'x="{x:g}" y="{y}" width="{width:g}" height="{height}" rx="3"'
    rect = f'<rect {shape} stroke="{colour}" fill="{colour}" fill-opacity="0.18"/>'
    return rect + words(x + width / 2, y + 16, text, kind) + words(x + width / 2, y + 32, below, "small")


def drawn(y: int, kind: str, r: Round, seen: Seen, texts: list[str]) -> str:
    """A round, with the texts of the last token before it, of the drafted ones and of the target's own."""
    (forwards, q, p), (_, first, later), m, k = seen, KINDS[kind], r.accepted, r.drafted
    heights = {f"{kind}, forwards: {forwards}": 16, "drafted": 60, "target": 104, "written": 146}
    svg = "".join(words(4, y + at, text, "name") for text, at in heights.items())
    svg += "".join(box(1 + i * k / forwards, y, k / forwards, later if i else first, GREY) for i in range(forwards))
    svg += box(0, y + 36, 1, texts[0], GREY, "last token")
    for i, (token, text) in enumerate(zip(r.draft.ids, texts[1:])):
        colour, struck = (GREEN, "") if i < m else (RED if i == m else GREY, "struck")
        svg += box(1 + i, y + 36, 1, text, colour, f"q {q[i, token]:.2f} · p {p[i, token]:.2f}", struck)
    svg += box(0, y + 88, 1 + k, "one forward gives p after each of these tokens", GREY)
    svg += "".join(box(1 + i, y + 122, 1, text, GREEN, "accepted") for i, text in enumerate(texts[1 : m + 1]))
    return svg + box(1 + m, y + 122, 1, texts[-1], BLUE, f"{'corrected' if m < k else 'bonus'} · p {p[m, r.token]:.2f}")


def main(target: str, drafts: list[str], file: str, prompt: str) -> None:
    """Draws the place where the drafts differ most in what is accepted, of several the one where least is."""
    rounds: dict[str, dict[int, tuple[Round, Seen]]] = {}
    for (kind, (method, *_)), draft in zip(KINDS.items(), drafts):
        generation = start(GenerateSettings(target=target, draft=draft, method=method, draft_length=LENGTH), prompt)
        rounds[kind], begin = {}, len(generation.prompt)
        for r, seen in watch(generation):
            rounds[kind] |= {} if r.cut else {begin: (r, seen)}
            begin += len(r.new)
    common = set.intersection(*map(set, rounds.values()))
    accepted = {place: [made[place][0].accepted for made in rounds.values()] for place in sorted(common)}
    shown = {place: (max(m) - min(m), -sum(m)) for place, m in accepted.items() if min(m) < LENGTH}
    if not shown:
        raise SystemExit("no round of all three begins at the same place and rejects a token; give another --prompt")
    place, ids, tokenizer = max(shown, key=shown.__getitem__), generation.decoded.ids, generation.pair.tokenizer
    before = " ".join(tokenizer.decode(ids[:place]).split()[-9:])
    svg = words(4, 20, f"Greedy, after “… {before}”", "name")
    for row, (kind, made) in enumerate(rounds.items()):
        r, one = made[place]
        texts = [tokenizer.decode([i]).replace("\n", "⏎") for i in (ids[place - 1], *r.draft.ids, r.token)]
        svg += drawn(TOP + KIND * row, kind, r, one, texts)
    Path(file).write_text(f"{OPENING}{svg}</svg>\n", encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target")
    parser.add_argument("drafts", nargs=3)
    parser.add_argument("file")
    parser.add_argument("--prompt", default=load_suite("arithmetic", limit=1).prompts[0].text, help="a word problem")
    main(**vars(parser.parse_args()))
