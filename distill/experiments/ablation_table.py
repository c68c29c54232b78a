"""The ablation's numbers: mean gain over seeds with its errors, as a table on the terminal, in Markdown and in JSON."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console

from decode.core.atomic_files import write_text
from decode.measure.costs import machine
from decode.measure.offline_acceptance import OfflineAlpha, paired
from decode.measure.predicted_speedup import replay
from decode.report.bench_tables import markdown_table, plain_table
from distill.core.file_fingerprints import write_json
from distill.report.run_summary import display, signed

Row = dict[str, Any]

FORMULAS = {
    "α": "offline_alpha: mean of Σₓ min(p(x), q(x)) over response positions of texts sampled from the target at T = 1; "
    "mean over seeds",
    "± α": "its standard error over prompts: of the texts measured on, not of the trainings",
    "gain": "α minus that of the first variant with the same seed, on the same texts; mean over seeds",
    "± seeds": "standard error of the gain over seeds: standard deviation / √seeds",
    "± texts": "standard error of the mean gain over prompts, paired by text",
    "greedy gain": "the same gain at temperature 0: agreement of the argmax on the target's greedy texts",
    "over the 2nd": "gain over the second variant, AdaSPEC unless `draft` is another; both errors added in quadrature",
    "τ": "block efficiency at 7 drafted tokens: tokens / expected rounds, replayed over the sampled texts",
    "τ over the 2nd": "its gain over the second variant's, with the same errors",
}

DRAFTED = 7  # drafted tokens of the block efficiency


@dataclass
class Measured:
    """What is known so far."""

    names: list[str]  # Variants in order; the first is the baseline, the second the one that others would have to beat
    alphas: dict[str, dict[str, dict[int, OfflineAlpha]]] = field(default_factory=dict)  # By variant, mode and seed
    # By variant and seed: the sampled acceptance of a feature head as second, third, … drafted token
    deeper: dict[str, dict[int, list[OfflineAlpha]]] = field(default_factory=dict)
    # By variant: its settings, and of each seed steps, teacher tokens and seconds
    about: dict[str, Row] = field(default_factory=dict)

    def add(self, name: str, settings: Row, seed: int, alphas: dict[str, list[OfflineAlpha]], used: Row) -> None:
        """Takes in a draft: in each mode its acceptance as first, second, … drafted token."""
        for mode, by_depth in alphas.items():
            self.alphas.setdefault(name, {}).setdefault(mode, {})[seed] = by_depth[0]
        self.deeper.setdefault(name, {})[seed] = alphas["sampled"][1:]
        self.about.setdefault(name, {"settings": settings, "used": {}})["used"][seed] = used

    def gain(self, name: str, over: str, mode: str = "sampled") -> Row:
        """Mean difference of α over the seeds that both have, with its errors; empty without any."""
        mine, theirs = (self.alphas.get(n, {}).get(mode, {}) for n in (name, over))
        return _gain(mine, theirs) if mine.keys() & theirs.keys() else {}

    def longer(self, name: str, over: str) -> Row:
        """Mean difference of the block efficiency, as `gain`: that of rounds a token, at the middle of both."""
        mine, theirs = self._per_token(name), self._per_token(over)
        if not mine.keys() & theirs.keys():
            return {}
        fewer = _gain(mine, theirs)
        middle = statistics.fmean(alpha.mean for alpha in (*mine.values(), *theirs.values()))
        slope = 1 / middle**2  # tokens a round, by rounds a token
        return {key: None if fewer[key] is None else sign * slope * fewer[key] for key, sign in SIGNS.items()}

    def _per_token(self, name: str) -> dict[int, OfflineAlpha]:
        """By seed, the rounds of each text spread over its tokens."""
        found = {}
        for seed, alpha in self.alphas.get(name, {}).get("sampled", {}).items():
            deeper = [of.texts for of in self.deeper[name][seed]]
            rounds = [replay(text, DRAFTED, [of[i] for of in deeper])[0] for i, text in enumerate(alpha.texts)]
            texts = [[count / len(text)] * len(text) for count, text in zip(rounds, alpha.texts)]
            found[seed] = OfflineAlpha(texts, alpha.prompts)
        return found

    def rows(self) -> list[Row]:
        """One a variant that has a draft."""
        found = []
        for name in self.names:
            if name not in self.alphas:
                continue
            used = list(self.about[name]["used"].values())
            alpha = _mean(list(self.alphas[name]["sampled"].values()))
            row: Row = {
                "name": name,
                "seeds": len(used),
                "offline_alpha": alpha.mean,
                "offline_alpha_se": None if math.isnan(alpha.se) else alpha.se,
            }
            if name != self.names[0]:
                row |= self.gain(name, self.names[0]) | {"greedy": self.gain(name, self.names[0], "greedy")}
            if name not in self.names[:2]:
                row["over_adaspec"] = self.gain(name, self.names[1])
                row["block_efficiency_over"] = self.longer(name, self.names[1])
            row["block_efficiency"] = 1 / statistics.fmean(alpha.mean for alpha in self._per_token(name).values())
            for key in ("optimiser_steps", "teacher_tokens", "selected_tokens", "seconds"):
                row[key] = statistics.fmean(one[key] for one in used)
            found.append(row | {"settings": self.about[name]["settings"]})
        return found


SIGNS = {"gain": -1, "se_seeds": 1, "se_texts": 1, "se": 1}  # fewer rounds a token are a gain


def _gain(mine: Mapping[int, OfflineAlpha], theirs: Mapping[int, OfflineAlpha]) -> Row:
    """Mean difference over the seeds that both have, with its errors."""
    seeds = sorted(mine.keys() & theirs.keys())
    by_seed = [paired(theirs[seed], mine[seed])["difference"] for seed in seeds]
    texts = paired(_mean([theirs[s] for s in seeds]), _mean([mine[s] for s in seeds]))
    spread = statistics.stdev(by_seed) / math.sqrt(len(seeds)) if len(seeds) > 1 else None
    return {
        "gain": statistics.fmean(by_seed),
        "se_seeds": spread,
        "se_texts": texts["se"],
        "se": math.hypot(spread or 0.0, texts["se"]),
        "by_seed": dict(zip(map(str, seeds), by_seed)),
    }


def _mean(alphas: Sequence[OfflineAlpha]) -> OfflineAlpha:
    """Position by position over drafts measured on the same texts."""
    texts = [[statistics.fmean(place) for place in zip(*text)] for text in zip(*(a.texts for a in alphas))]
    return OfflineAlpha(texts, alphas[0].prompts)


def verdict(rows: Sequence[Row]) -> str:
    """What the second variant (AdaSPEC) gains, and whether any other beats it by more than twice its error."""
    if len(rows) < 2:
        return ""
    second = display(rows[1]["name"])
    sentence = f"{second} − {display(rows[0]['name'])}: {_number(rows[1])}."
    return f"{sentence} {_of_rivals([row for row in rows if row.get('over_adaspec')], second)}".strip()


def _of_rivals(rivals: Sequence[Row], second: str) -> str:
    if not rivals:
        return ""
    best = max(rivals, key=lambda row: row["over_adaspec"]["gain"])
    over = best["over_adaspec"]
    number = _number(over | {"seeds": best["seeds"]})
    if best["seeds"] == 1:
        return f"One seed is not enough for a verdict; the highest so far is {best['name']}: {number}."
    if over["gain"] > 2 * over["se"]:
        chosen = f" It is the best of {len(rivals)}, so its gain is overestimated." if len(rivals) > 1 else ""
        return f"{best['name']} beats {second}: {number}.{chosen}"
    return f"No variant beats {second} by more than twice its error; the nearest is {best['name']}: {number}."


def _number(row: Row) -> str:
    return f"{signed(row['gain'])} ± {row['se']:.4f} over {row['seeds']} seed{'s' * (row['seeds'] > 1)}"


def write_table(folder: Path, measured: Measured, console: Console) -> None:
    """Shows the table, and writes ``ablation.json`` and ``ablation.md``."""
    rows = measured.rows()
    seeds = sorted({seed for row in measured.about.values() for seed in row["used"]})
    sentence = verdict(rows)
    content = {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "seeds": seeds,
        "verdict": sentence,
        "formulas": FORMULAS,
        "variants": rows,
        "machine": machine.describe(),
    }
    write_json(folder / "ablation.json", content)
    cells = [_cells(row) for row in rows]
    legend = "\n".join(f"- **{name}**: {formula}." for name, formula in FORMULAS.items())
    write_text(folder / "ablation.md", f"{markdown_table(HEADINGS, cells)}\n\n{sentence}\n\n{legend}\n")
    console.print(plain_table("", HEADINGS, cells))
    console.print(f"{content['verdict']}\n{folder / 'ablation.md'}", highlight=False)


HEADINGS = ("variant", "seeds", *FORMULAS, "teacher tokens", "s")


def _cells(row: Row) -> list[str]:
    greedy, over = row.get("greedy") or {}, row.get("over_adaspec") or {}
    longer = row.get("block_efficiency_over") or {}
    return [
        display(row["name"]),
        str(row["seeds"]),
        f"{row['offline_alpha']:.4f}",
        _error(row["offline_alpha_se"]),
        signed(row["gain"]) if "gain" in row else "–",
        _error(row.get("se_seeds")),
        _error(row.get("se_texts")),
        f"{signed(greedy['gain'])} ± {greedy['se']:.4f}" if greedy else "–",
        f"{signed(over['gain'])} ± {over['se']:.4f}" if over else "–",
        f"{row['block_efficiency']:.3f}",
        f"{signed(longer['gain'])} ± {longer['se']:.4f}" if longer else "–",
        f"{row['teacher_tokens']:,.0f}",
        f"{row['seconds']:.0f}",
    ]


def _error(value: float | None) -> str:
    return "–" if value is None else f"{value:.4f}"
