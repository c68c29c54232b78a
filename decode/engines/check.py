"""A draft in a real engine beside what is predicted of it: the measurement behind ``python -m decode serve-check``."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from decode.core.files import read_json
from decode.core.round_costs import RoundCosts
from decode.core.sampling import Warp
from decode.engines.causes import Cause, as_recorded, causes_in_files, causes_in_numbers, fits
from decode.engines.counts import Drafts, ServedText, difference, mean_length, rates, speedup, tokens_per_second
from decode.engines.engine import GREEDY_DRAFT, ROUNDS, EngineSettings, Writer, opened
from decode.engines.predicted import Acceptance, acceptance, predicted_drafts, predicted_seconds, target_logprob
from decode.engines.server import Server
from decode.engines.together import Together, together_row, written_together
from decode.engines.transformers_engine import AssistedGeneration
from decode.measure.bench_session import Item
from decode.measure.cost import CostModel
from decode.measure.statistics import median_interval
from decode.models.eagle.head import FeatureHead
from decode.models.other_vocabulary import DraftModel

Progress = Callable[[str], None]


@dataclass
class CheckOptions:
    """What is asked of the engine.

    Attributes:
        draft_lengths: drafted tokens a round; the engine is started once for each.
        temperatures: 0 is greedy.
        max_new_tokens: budget of each text.
        batch_sizes: those above 1 are measured too, greedily, with so many requests under way.
        seed: of sampling.
        draft_sampling: greedy or probabilistic; what the engine drafts above temperature 0.
        chat: the prompts stand in the chat template, which is not asked of the engine.
    """

    draft_lengths: Sequence[int] = (3, 5, 7)
    temperatures: Sequence[float] = (0.0, 1.0)
    max_new_tokens: int = 64
    batch_sizes: Sequence[int] = (1,)
    seed: int = 0
    draft_sampling: str = "greedy"
    chat: bool = False


@dataclass
class Check:
    """Everything that was found.

    Attributes:
        rows: one for each temperature and draft length.
        causes: of differences.
        engine: its name.
        together: one row for each batch size above 1 and draft length.
    """

    engine: str
    rows: list[dict[str, Any]] = field(default_factory=list)
    together: list[dict[str, Any]] = field(default_factory=list)
    causes: list[Cause] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """For reports."""
        return {
            "engine": self.engine,
            "rows": self.rows,
            "together": self.together,
            "causes": [dataclasses.asdict(cause) for cause in self.causes],
        }


def serve_check(
    engine: str,
    settings: EngineSettings,
    target: PreTrainedModel,
    draft: DraftModel,
    items: Sequence[Item],
    stop_ids: Sequence[int],
    options: CheckOptions,
    cost: CostModel | None = None,
    progress: Progress | None = None,
    folders: tuple[str, str] | None = None,
    round_costs: RoundCosts | None = None,
) -> Check:
    """Run prompts through an engine, without and with the draft, and predict both.

    Args:
        engine: one of `decode.engines.engine.ENGINES`.
        settings: how it is started.
        target: as transformers reads it.
        draft: the same.
        items: prompts.
        stop_ids: tokens that end a text.
        options: lengths, temperatures, budget.
        cost: of the pair on this machine, for the predicted speedup.
        progress: told what is being done.
        folders: of target and draft, where the engine reads other files.
        round_costs: of the pair by batch size, for the predicted speedup of several texts at a time.

    Raises:
        UserError: the engine is missing, does not start, or does not answer.
    """
    say = progress or (lambda _: None)
    folders = folders or (settings.target, settings.draft)
    context = max(len(item.ids) for item in items) + options.max_new_tokens + max(options.draft_lengths) + 1
    sizes = sorted(size for size in set(options.batch_sizes) if size > 1)
    settings = dataclasses.replace(settings, context=context, batch=max([1, *sizes]))
    together: dict[tuple[int | None, int], Together] = {}
    checked, facts = Check(engine), dict[str, Any]()
    checked.causes = causes_in_files(*folders, context=context, engine=engine)

    def texts(writer: Writer, temperature: float) -> list[ServedText]:
        budget = options.max_new_tokens
        if items:  # the first request of a temperature meets compilers and cold caches
            writer.write(items[0].ids, temperature=temperature, seed=0, max_new_tokens=8, stop_ids=stop_ids)
        return [
            writer.write(
                item.ids, temperature=temperature, seed=options.seed + i, max_new_tokens=budget, stop_ids=stop_ids
            )
            for i, item in enumerate(items)
        ]

    def written(length: int | None) -> dict[float, list[ServedText]]:
        say(f"{engine}: starting {f'with {length} drafted tokens' if length else 'without a draft'}")
        with _writer(engine, settings, target, draft, length) as writer:
            if isinstance(writer, Server) and not options.chat and "tokenized" not in facts:
                facts["tokenized"] = _split_otherwise(writer, items)
            found = {}
            for temperature in options.temperatures:
                say(f"{engine}: {len(items)} texts at T = {temperature:g}, {length or 'no'} drafted tokens")
                found[temperature] = texts(writer, temperature)
            if isinstance(writer, Server):
                for size in sizes:
                    say(f"{engine}: {size} texts at a time, {length or 'no'} drafted tokens")
                    together[length, size] = written_together(writer, items, size, options.max_new_tokens, stop_ids)
            return found

    plain = written(None)
    say("predicting acceptance from the texts")
    tail = max(options.draft_lengths) if ROUNDS[engine].past_end else 0
    greedy_draft = GREEDY_DRAFT[engine] and options.draft_sampling == "greedy"
    told: dict[float, Acceptance] = {}
    for temperature, out in plain.items():
        pairs = [(item.ids, text.ids) for item, text in zip(items, out)]
        told[temperature] = acceptance(
            target,
            draft,
            pairs,
            Warp(temperature),
            tail=tail,
            depth=max(options.draft_lengths),
            greedy_draft=greedy_draft or temperature == 0,
        )
        if temperature == 0:
            facts |= {"agreement": told[0.0].agreement}
        facts |= {"logprob": told[temperature].logprob, "vocabulary": target.config.get_text_config().vocab_size}
    profile = read_json(Path(folders[1]) / "speculation_profile.json")
    entropy = {t: _logprob(target, items, out, t) for t, out in plain.items() if t}
    for length in options.draft_lengths:
        served = written(length)
        for temperature, out in served.items():
            row = _row(engine, temperature, length, out, plain[temperature], told[temperature], options, cost, profile)
            if settings.url is not None:  # the texts without a draft are transformers', and so is their time
                row |= dict.fromkeys(("speedup", "speedup_ci95", "plain_tokens_per_second"))
            if temperature:
                (mean, se), (own, own_se) = _logprob(target, items, out, temperature), entropy[temperature]
                row |= {"target_logprob": mean, "plain_target_logprob": own}
                row["lossless"] = abs(mean - own) <= max(0.05, 4 * math.hypot(se, own_se))
            checked.rows.append(row)
        checked.together += [
            together_row(size, length, together[length, size], together[None, size], told[0.0], options.max_new_tokens,
                         ROUNDS[engine], round_costs)
            for size in sizes if (None, size) in together and 0.0 in told
        ]  # fmt: skip
    if any(not row["fits"] or not as_recorded(row) for row in checked.rows):
        say("looking for the cause")
        facts["alternatives"] = _alternatives(engine, target, draft, items, plain, options, greedy_draft, tail)
    facts["short"] = sum(row["cut"] for row in checked.rows)
    checked.causes += causes_in_numbers(checked.rows, facts)
    return checked


def _logprob(
    target: PreTrainedModel, items: Sequence[Item], out: Sequence[ServedText], temperature: float
) -> tuple[float, float]:
    """Mean log-probability of the served tokens under our target, with its error."""
    return target_logprob(target, [(item.ids, text.ids) for item, text in zip(items, out)], temperature)


@contextmanager
def _writer(
    engine: str, settings: EngineSettings, target: PreTrainedModel, draft: DraftModel, length: int | None
) -> Iterator[Writer]:
    if engine != "transformers" and not (settings.url is not None and length is None):
        with opened(engine, settings, length) as server:
            yield server
    else:
        model = draft if isinstance(draft, PreTrainedModel) else None
        yield AssistedGeneration(target, model if length else None, length or 1)


def _split_otherwise(server: Server, items: Sequence[Item]) -> str | None:
    """A prompt that the engine makes other ids of; None where all are ours."""
    for item in items[:4]:
        text = item.prompt.text
        theirs = server.tokenize(text)
        if theirs != item.ids and len(theirs):
            at = next((i for i, (a, b) in enumerate(zip(theirs, item.ids)) if a != b), min(len(theirs), len(item.ids)))
            return f"of {text[:40]!r}, token {at} is {theirs[at : at + 3]} there and {item.ids[at : at + 3]} here"
    return None


def predicted(told: Acceptance, engine: str, length: int, budget: int) -> list[Drafts]:
    """Expected drafts of each text."""
    return [predicted_drafts(accept, n, budget, length, ROUNDS[engine]) for accept, n in zip(told.texts, told.lengths)]


def _row(
    engine: str,
    temperature: float,
    length: int,
    out: Sequence[ServedText],
    plain: Sequence[ServedText],
    told: Acceptance,
    options: CheckOptions,
    cost: CostModel | None,
    profile: Mapping[str, Any],
) -> dict[str, Any]:
    """Served beside predicted at one temperature and draft length."""
    budget = options.max_new_tokens
    served, expected = [text.drafts for text in out], predicted(told, engine, length, budget)
    same = [a.ids == b.ids for a, b in zip(out, plain)]
    _, error = difference(served, expected, paired=temperature == 0)
    rows = [
        {f"served_{key}" if key not in ("position",) else key: value for key, value in ours.items()}
        | {f"predicted_{key}": value for key, value in theirs.items() if key != "position"}
        for ours, theirs in zip(rates(served, length), rates(expected, length))
    ]
    for row in rows:
        spread = math.hypot(row["served_marginal_se"] or 0.0, row["predicted_marginal_se"] or 0.0)
        row["within"] = fits(row["served_marginal"], row["predicted_marginal"], spread)
    (mean, mean_se), (expected_mean, expected_se) = mean_length(served), mean_length(expected)
    ratios = speedup(out, plain)
    middle, low, high = median_interval(ratios)
    forecast = None
    if cost is not None:
        spent = [
            predicted_seconds(accept, n, budget, length, ROUNDS[engine], cost)
            for accept, n in zip(told.texts, told.lengths)
        ]
        forecast = median_interval([b / a for a, b in spent if a])[0]
    recorded, recorded_se = _recorded(profile, temperature, length)
    return {
        "engine": engine,
        "temperature": temperature,
        "draft_length": length,
        "positions": rows,
        "served_length": mean,
        "served_length_se": mean_se,
        "predicted_length": expected_mean,
        "predicted_length_se": expected_se,
        "difference_se": error,
        "fits": fits(mean, expected_mean, error),
        "recorded_length": recorded,
        "recorded_length_se": recorded_se,
        "tokens_per_second": tokens_per_second(out),
        "plain_tokens_per_second": tokens_per_second(plain),
        "speedup": middle,
        "speedup_ci95": [low, high],
        "predicted_speedup": forecast,
        "identical_share": sum(same) / len(same) if temperature == 0 and same else None,
        "texts": len(out),
        "tokens": sum(len(text.ids) for text in out),
        "cut": sum(
            len(a.ids) < len(b.ids) and a.ids == b.ids[: len(a.ids)] for a, b in zip(out, plain) if temperature == 0
        ),
    }


def _recorded(profile: Mapping[str, Any], temperature: float, length: int) -> tuple[float | None, float | None]:
    """Mean accepted length that the profile measured, of its first positions, and a bound of its standard error."""
    marginal, errors = profile.get("marginal_accept_rates") or [], profile.get("marginal_accept_rates_se") or []
    if len(marginal) < length or (profile.get("measurement_conditions") or {}).get("temperature", 0.0) != temperature:
        return None, None
    # the positions' errors add up as if they were one: a text that rejects early rejects all later ones too
    return 1 + float(sum(marginal[:length])), float(sum(error or 0.0 for error in errors[:length]))


def _alternatives(
    engine: str,
    target: PreTrainedModel,
    draft: DraftModel,
    items: Sequence[Item],
    plain: Mapping[float, Sequence[ServedText]],
    options: CheckOptions,
    greedy_draft: bool,
    tail: int,
) -> dict[str, dict[tuple[float, int], float]]:
    """Mean accepted lengths predicted if the engine read the draft in another way."""
    found: dict[str, dict[tuple[float, int], float]] = {}

    def add(name: str, greedy: bool, temperatures: Sequence[float]) -> None:
        for temperature in temperatures:
            pairs = [(item.ids, text.ids) for item, text in zip(items, plain[temperature])]
            depth = max(options.draft_lengths)
            told = acceptance(target, draft, pairs, Warp(temperature), tail=tail, depth=depth, greedy_draft=greedy)
            for length in options.draft_lengths:
                mean = mean_length(predicted(told, engine, length, options.max_new_tokens))[0]
                found.setdefault(name, {})[temperature, length] = mean

    sampled = [t for t in options.temperatures if t]
    if sampled:
        add("probabilistic drafting" if greedy_draft else "greedy drafting", not greedy_draft, sampled)
    if isinstance(draft, FeatureHead) and draft.version == 3:
        right, layers = draft.captured_layers, int(target.config.get_text_config().num_hidden_layers)
        for shift in (-1, 1):
            shifted = tuple(layer + shift for layer in right)
            if min(shifted) >= 0 and max(shifted) <= layers:
                draft.captured_layers = shifted
                try:
                    add(f"captured layers off by one ({shift:+d})", greedy_draft, list(plain))
                finally:
                    draft.captured_layers = right
    return found
