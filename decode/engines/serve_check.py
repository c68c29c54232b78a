"""A draft in a real engine beside what is predicted of it: the measurement behind ``python -m decode serve-check``."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from decode.bench.costs import CostModel
from decode.bench.session import Item
from decode.bench.statistics import median_interval
from decode.engines.acceptance import (
    Acceptance,
    Drafts,
    Rounds,
    ServedText,
    acceptance,
    difference,
    mean_length,
    median,
    predicted_drafts,
    predicted_of,
    predicted_speedup,
    rates,
    round_cost,
    speedup,
    target_logprob,
    tokens_per_second,
)
from decode.engines.gap_causes import OFF_BY_ONE, Cause, as_recorded, causes_in_files, causes_in_numbers, fits
from decode.engines.launch import GREEDY_DRAFT, ROUNDS, opened
from decode.engines.server import Server
from decode.engines.settings import EngineSettings, Writer
from decode.engines.transformers_engine import AssistedGeneration
from decode.errors import read_json
from decode.models.heads import FeatureHead
from decode.models.other_tokenizer import DraftModel
from decode.sampling import LogitsWarper
from decode.stopping import RoundCosts

FILLED = 2
"""Prompts for each place of a batch, so that it is full for most of the time."""


@dataclass
class Together:
    """Greedy texts that were written so many at a time.

    Attributes:
        texts: new tokens of each.
        seconds: wall time of all.
        drafts: counted for all.
    """

    texts: list[list[int]]
    seconds: float
    drafts: Drafts

    @property
    def tokens_per_second(self) -> float:
        """Σ tokens / wall time, prompts included."""
        return sum(map(len, self.texts)) / self.seconds


def places(count: int, size: int) -> list[int]:
    """Which prompts are written at a batch size: all, again from the start until every place had `FILLED`."""
    return [i % count for i in range(max(count, FILLED * size))]


def written_together(
    server: Server, items: Sequence[Item], size: int, max_new_tokens: int, stop_ids: Sequence[int]
) -> Together:
    """Greedy texts, `size` requests under way at a time."""
    prompts = [items[i].ids for i in places(len(items), size)]
    server.write_together(prompts[:size], size, max_new_tokens=8, stop_ids=stop_ids)
    return Together(*server.write_together(prompts, size, max_new_tokens=max_new_tokens, stop_ids=stop_ids))


def together_row(
    size: int,
    length: int,
    served: Together,
    plain: Together,
    told: Acceptance,
    budget: int,
    rounds: Rounds,
    costs: RoundCosts | None,
) -> dict[str, Any]:
    """Served beside predicted at one batch size and draft length.

    The predicted speedup is of rounds in which every place of the batch is taken, without the reading of prompts:
    tokens a round and text · plain(B) / (k · drafting(B) + verifying(B, k + 1)).
    """
    chosen = places(len(told.texts), size)
    expected = [predicted_drafts(told.texts[i], told.lengths[i], budget, length, rounds) for i in chosen]
    forecast = None
    if costs is not None and (count := sum(drafts.rounds for drafts in expected)):
        drafted = sum(drafts.drafted for drafts in expected) / count
        tokens = sum(told.lengths[i] - rounds.first for i in chosen) / count
        spent = costs.drafting(size) * drafted + costs.verifying(size, drafted + 1)
        forecast = tokens * costs.plain(size) / spent
    return {
        "batch_size": size,
        "draft_length": length,
        "served_length": mean_length([served.drafts])[0],
        "predicted_length": mean_length(expected)[0],
        "tokens_per_second": served.tokens_per_second,
        "plain_tokens_per_second": plain.tokens_per_second,
        "speedup": served.tokens_per_second / plain.tokens_per_second,
        "predicted_speedup": forecast if forecast is None or math.isfinite(forecast) else None,
        "identical_share": sum(a == b for a, b in zip(served.texts, plain.texts)) / len(chosen),
        "texts": len(chosen),
    }


TIMED = 8  # texts by which the engine's steps are timed


@dataclass
class CheckOptions:
    """What is asked of the engine."""

    draft_lengths: Sequence[int] = (3, 5, 7)  # tokens drafted a round; the engine is started once for each
    temperatures: Sequence[float] = (0.0, 1.0)  # 0 is greedy
    max_new_tokens: int = 64  # budget of each text
    # those above 1 are measured too, greedily, with so many requests under way
    batch_sizes: Sequence[int] = (1,)
    seed: int = 0  # of sampling
    draft_sampling: str = "greedy"  # or probabilistic: what the engine drafts above temperature 0
    chat: bool = False  # the prompts stand in the chat template, which is not asked of the engine


@dataclass
class Check:
    """Everything that was found."""

    engine: str
    rows: list[dict[str, Any]] = field(default_factory=list)  # one for each temperature and draft length
    together: list[dict[str, Any]] = field(default_factory=list)  # one for each batch size above 1 and draft length
    causes: list[Cause] = field(default_factory=list)  # of differences


@dataclass
class Written:
    """What an engine wrote at one temperature."""

    texts: list[ServedText] = field(default_factory=list)  # of the prompts
    # of the first prompts with their tokens shuffled, each just before the prompt's own text: they tell what a round
    # costs in this engine, whatever is accepted of the texts that are checked
    timed: list[ServedText] = field(default_factory=list)


def serve_check(
    engine: str,
    settings: EngineSettings,
    target: PreTrainedModel,
    draft: DraftModel,
    items: Sequence[Item],
    stop_ids: Sequence[int],
    options: CheckOptions,
    cost: CostModel | None = None,
    progress: Callable[[str], None] | None = None,
    folders: tuple[str, str] | None = None,
    round_costs: RoundCosts | None = None,
) -> Check:
    """Run prompts through an engine, without and with the draft, and predict both.

    Args:
        engine: one of `decode.engines.launch.ENGINES`.
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
    if settings.draft_p_min:  # what a round drafts, and so what it costs, depends on the text
        cost = round_costs = None
    together: dict[tuple[int | None, int], Together] = {}
    checked, facts = Check(engine), dict[str, Any]()
    checked.causes = causes_in_files(*folders, context=context, engine=engine)

    def texts(writer: Writer, temperature: float) -> Written:
        out = Written()
        how: dict[str, Any] = {"temperature": temperature, "max_new_tokens": options.max_new_tokens}
        for i, item in enumerate(items):
            seed = options.seed + i
            if not i:  # the first request of a temperature meets compilers and cold caches
                writer.write(item.ids, temperature=temperature, seed=0, max_new_tokens=8, stop_ids=stop_ids)
            if i < TIMED and isinstance(writer, Server) and not settings.draft_p_min:
                shuffled = random.Random(seed).sample(item.ids, len(item.ids))
                out.timed.append(writer.write(shuffled, seed=seed, ignore_eos=True, **how))
            out.texts.append(writer.write(item.ids, seed=seed, stop_ids=stop_ids, **how))
        return out

    def written(length: int | None) -> dict[float, Written]:
        say(f"{engine}: starting {f'with {length} drafted tokens' if length else 'without a draft'}")
        with _writer(engine, settings, target, draft, length) as writer:
            if isinstance(writer, Server) and not options.chat and "tokenized" not in facts:
                apart = (writer.split_otherwise(item.prompt.text, item.ids) for item in items[:4])
                facts["tokenized"] = next(filter(None, apart), None)
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
    longest, rounds = max(options.draft_lengths), ROUNDS[engine]
    greedy_draft = GREEDY_DRAFT[engine] and options.draft_sampling == "greedy"

    def pairs(out: Written) -> list[tuple[Sequence[int], Sequence[int]]]:
        return [(item.ids, text.ids) for item, text in zip(items, out.texts)]

    def reading(temperature: float, greedy: bool) -> Acceptance:
        warp, tail = LogitsWarper(temperature), longest if rounds.past_end else 0
        texts = pairs(plain[temperature])
        how: dict[str, Any] = {"greedy_draft": greedy or not temperature, "p_min": settings.draft_p_min}
        return acceptance(target, draft, texts, warp, tail=tail, depth=longest, **how)

    told = {temperature: reading(temperature, greedy_draft) for temperature in plain}
    if 0.0 in told:
        facts["agreement"] = told[0.0].agreement
    last = told[options.temperatures[-1]]
    facts |= {"logprob": last.logprob, "vocabulary": target.config.get_text_config().vocab_size}
    profile = read_json(Path(folders[1]) / "speculation_profile.json")
    entropy = {t: target_logprob(target, pairs(out), t) for t, out in plain.items() if t}
    for length in options.draft_lengths:
        served = written(length)
        for temperature, out in served.items():
            row = _row(engine, temperature, length, out, plain[temperature], told[temperature], options, cost, profile)
            if settings.draft_p_min:
                row |= {"draft_p_min": settings.draft_p_min, "recorded_length": None}
            if settings.url is not None:  # the texts without a draft are transformers', and so is their time
                row |= dict.fromkeys(("speedup", "speedup_ci95", "plain_tokens_per_second"))
            if temperature:
                (mean, se), (own, own_se) = target_logprob(target, pairs(out), temperature), entropy[temperature]
                row |= {"target_logprob": mean, "plain_target_logprob": own}
                row["lossless"] = abs(mean - own) <= max(0.05, 4 * math.hypot(se, own_se))
            checked.rows.append(row)
        checked.together += [
            together_row(size, length, together[length, size], together[None, size], told[0.0], options.max_new_tokens,
                         rounds, round_costs)
            for size in sizes if (None, size) in together and 0.0 in told
        ]  # fmt: skip
    if any(not row["fits"] or not as_recorded(row) for row in checked.rows):
        say("looking for the cause")
        readings = _readings(draft, target, reading, options.temperatures, greedy_draft)
        facts["alternatives"] = {
            name: {
                (t, length): mean_length(predicted_of(read, options.max_new_tokens, length, rounds))[0]
                for t, read in of.items() for length in options.draft_lengths
            }
            for name, of in readings.items()
        }  # fmt: skip
    facts["together"] = checked.together
    facts["short"] = sum(row["cut"] for row in checked.rows)
    checked.causes += causes_in_numbers(checked.rows, facts)
    return checked


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


def _row(
    engine: str,
    temperature: float,
    length: int,
    wrote: Written,
    alone: Written,
    told: Acceptance,
    options: CheckOptions,
    cost: CostModel | None,
    profile: Mapping[str, Any],
) -> dict[str, Any]:
    """Served beside predicted at one temperature and draft length."""
    budget, out, plain = options.max_new_tokens, wrote.texts, alone.texts
    served, expected = [text.drafts for text in out], predicted_of(told, budget, length, ROUNDS[engine])
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
    middle, low, high = median_interval(speedup(out, plain))
    forecast = partial(predicted_speedup, told, budget, length, ROUNDS[engine])
    in_engine = median([round_cost(a, b) for a, b in zip(wrote.timed, alone.timed)]) if alone.timed else None
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
        "predicted_speedup": forecast(cost.of_round) if cost else None,
        "engine_round_cost": in_engine,
        "engine_predicted_speedup": forecast(lambda _: in_engine) if in_engine else None,
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


def _readings(
    draft: DraftModel,
    target: PreTrainedModel,
    reading: Callable[[float, bool], Acceptance],
    temperatures: Sequence[float],
    greedy_draft: bool,
) -> dict[str, dict[float, Acceptance]]:
    """Acceptance by temperature if the engine read the draft in other ways, by the ways' names."""
    found: dict[str, dict[float, Acceptance]] = {}
    if sampled := [t for t in temperatures if t]:
        name = "probabilistic drafting" if greedy_draft else "greedy drafting"
        found[name] = {t: reading(t, not greedy_draft) for t in sampled}
    if isinstance(draft, FeatureHead) and draft.version == 3:
        right, layers = draft.captured_layers, int(target.config.get_text_config().num_hidden_layers)
        for shift in (-1, 1):
            shifted = tuple(layer + shift for layer in right)
            if min(shifted) >= 0 and max(shifted) <= layers:
                draft.captured_layers = shifted
                try:
                    found[f"{OFF_BY_ONE} ({shift:+d})"] = {t: reading(t, greedy_draft) for t in temperatures}
                finally:
                    draft.captured_layers = right
    return found
