"""``python -m distill ablate``: variations of AdaSPEC against DistillSpec, or on EAGLE heads, over several seeds.

A draft for every variant and seed is trained as any other draft for comparison, from one target, one initial draft and
one reference; the seed decides the order of the training examples. Acceptance is measured on one set of texts, so all
drafts can be compared text by text. Nothing is decoded.
"""

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from jsonargparse.typing import PositiveInt
from rich.console import Console

from decode.bench import machine
from decode.bench.offline_acceptance import OfflineAlpha, offline_alphas, paired, prompt_numbers
from decode.bench.prediction import replay
from decode.bench.report import markdown_table, plain_table
from decode.errors import UserError, write_text
from decode.method_options import Seed
from decode.models.loading import open_draft
from decode.models.pair import own_warp
from decode.progress import output_console, working
from distill.config.drafts import ResponseSettings
from distill.config.run import ExportSettings, Settings
from distill.data.context import StageContext
from distill.experiments.target_texts import Text, target_texts
from distill.files import fingerprint, write_json
from distill.pipeline import alone_in
from distill.report import display, signed
from distill.run_stages import run_stages
from distill.stages import account_of, run_of, stage_fingerprints
from distill.teacher.store import Array, Kept, cached

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


MODES = {"sampled": 1.0, "greedy": 0.0}  # decoding modes and their temperatures


@dataclass
class AblationSettings:
    """How often each variant is trained."""

    seeds: list[Seed] = field(default_factory=lambda: [1, 2, 3])
    """Seeds of the order of the training examples. Every variant is trained once with each; the target, the initial
    draft, the reference and the texts measured on are the same for all."""
    batch_size: PositiveInt = 32
    """Test prompts (evaluation.prompts of them) that the target answers at a time."""

    def validate(self) -> None:
        """Check the seeds."""
        if not self.seeds or len(set(self.seeds)) < len(self.seeds):
            raise UserError(f"ablation.seeds is {self.seeds}, expected different numbers from 0 up, such as [1, 2, 3]")


@dataclass
class AblateSettings(Settings):
    """A run's settings, of which `drafts` are the variants."""

    ablation: AblationSettings = field(default_factory=AblationSettings)
    """Over which seeds."""


def ablate(settings: AblateSettings, console: Console | None = None) -> Path:
    """Train and measure what is not there yet; the table is written after each draft.

    Returns:
        The folder of ``ablation.json`` and ``ablation.md``.

    Raises:
        UserError: Settings that cannot be used.
    """
    settings.validate()
    settings.ablation.validate()
    console, made = console or output_console(), {draft.name: draft for draft in settings.drafts}
    references = [name for name in made if any(draft.selects and draft.reference == name for draft in made.values())]
    drafts = [
        replace(variant, name=drafted(name, seed), seed=seed)
        for seed in settings.ablation.seeds
        for name, variant in made.items()
    ]
    full = replace(settings, drafts=[*(made[name] for name in references), *drafts], export=ExportSettings())
    full.validate()
    run = run_of(full)
    bench = StageContext(full, run, console)
    with alone_in(run, full, console):
        run_stages(bench, ("target", "initial", *references))
        meter, measured = Meter(bench, settings.ablation.batch_size), Measured(list(made))
        for seed in settings.ablation.seeds:
            for name, variant in made.items():
                draft = drafted(name, seed)
                run_stages(bench, (draft,))
                record = run.draft_record(draft)
                used = {**vars(account_of(record)), "seconds": record.seconds}
                measured.add(name, asdict(variant), seed, meter.measure(draft), used)
                write_table(run.folder, measured, console)
    return run.folder


def drafted(name: str, seed: int) -> str:
    """Name of the draft of a variant and seed."""
    return f"{name}-seed{seed}"


class Meter:
    """Measures drafts on texts that the target wrote once."""

    def __init__(self, bench: StageContext, batch_size: int) -> None:
        self.bench, self.folder = bench, bench.run.work / "ablation"
        self.target = bench.load_target(bench.settings.evaluation.dtype)
        self.keys = {stage: key for stage, (key, _) in stage_fingerprints(bench.settings).items()}
        self.made_from: dict[str, str] = {}  # of each mode's texts
        self.texts = {mode: self._texts(mode, temperature, batch_size) for mode, temperature in MODES.items()}

    def _texts(self, mode: str, temperature: float, batch_size: int) -> list[Text]:
        """What the target answers to the test prompts."""
        settings, corpus = self.bench.settings.evaluation, self.bench.corpus
        how = ResponseSettings(temperature=temperature, max_new_tokens=settings.max_new_tokens, batch_size=batch_size)
        made_from = {"target": self.keys["target"], "corpus": corpus.fingerprint}
        texts, self.made_from[mode] = target_texts(
            self.bench, self.target, corpus.test, settings.prompts, how, self.folder / f"{mode}.jsonl", made_from
        )
        return texts

    def measure(self, draft: str) -> dict[str, list[OfflineAlpha]]:
        """Acceptance of a draft in every mode, of a feature head's sampled one as first, second, … drafted token."""
        depth = DRAFTED if self.bench.settings.student.is_head else 1
        return {mode: self._alphas(draft, mode, depth if mode == "sampled" else 1) for mode in MODES}

    def _alphas(self, draft: str, mode: str, depth: int) -> list[OfflineAlpha]:
        texts = [text for text in self.texts[mode] if len(text[0]) > text[1]]
        ends = np.cumsum([len(ids) - start for ids, start in texts])

        def parts() -> Iterator[tuple[slice, Array]]:
            bench, trust = self.bench, self.bench.settings.student.trust_remote_code
            model = open_draft(bench.run.path(draft), self.target, bench.corpus.tokenizer, trust_remote_code=trust)
            warp = own_warp(self.target, MODES[mode], {})
            with working(self.bench.console, f"  acceptance of {draft}, {mode}"):
                found = offline_alphas(self.target, {draft: model}, texts, warp, depth=depth)[draft]
            yield slice(None), np.stack([np.concatenate([np.asarray(text) for text in of.texts]) for of in found], 1)

        made_from = fingerprint(self.keys[draft], self.made_from[mode], depth)
        shape = (int(ends[-1]), depth)
        kept = Kept(self.folder / f"{draft}-{mode}.npy", made_from, shape, "float64")
        values: Any = cached([kept], ([part] for part in parts()))[0]
        prompts = prompt_numbers(texts)
        return [OfflineAlpha([part.tolist() for part in np.split(of, ends[:-1])], prompts) for of in values.T]
