"""``python -m decode serve-check``: a draft in a real engine, its acceptance as counted beside the predicted one."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers import AutoConfig, AutoModelForCausalLM

from decode.bench import machine
from decode.bench.page import console_table, markdown
from decode.bench.session import Item, Session
from decode.bench.statistics import median_interval, plain
from decode.commands.checks import check_models, measure_options, open_pair, open_suites, use_chat
from decode.commands.settings import ServeCheckSettings, required
from decode.engines.acceptance import (
    Acceptance,
    ServedText,
    acceptance,
    difference_error,
    marginal_rates,
    mean_length,
    predicted_drafts,
    target_logprob,
)
from decode.engines.gap_causes import Cause, causes_in_files, causes_in_numbers, serving_facts
from decode.engines.gguf import convert
from decode.engines.server import ENGINES, Engine, check_engine, opened
from decode.errors import UserError, choose, read_json, scratch_folder, write_section, write_text
from decode.models.block_head import BlockHead
from decode.models.head_configs import unserved
from decode.models.heads import DraftHead
from decode.models.loading import config_for, load_tokenizer
from decode.models.mtp import MtpHead
from decode.models.other_tokenizer import DraftModel
from decode.progress import output_console
from decode.sampling import LogitsWarper

Row = dict[str, Any]

METHODS: dict[int | str | None, str] = {
    None: "draft_model", 1: "eagle", 3: "eagle3", "dflash": "dflash", "dspark": "dspark",
}  # fmt: skip
"""vLLM's names of methods, by the version of a head."""
ASSUMED = (0.5, 0.6, 0.7, 0.8, 0.9)
"""Acceptance rates for which the speedup of an untrained draft is computed, the same at every position."""
SERVED = (
    "engine", "temperature", "draft_length", "served_length", "predicted_length", "tokens_per_second",
    "plain_tokens_per_second", "speedup", "identical_share", "texts",
)  # fmt: skip
UNTRAINED = ("draft_length", "acceptance", "tokens_per_round", "speedup")
POSITIONS = (*SERVED[:3], "position", "validation", "offline", "decoded", "predicted", "served")
"""Columns of the tables, the second one of an untrained draft, the third one by position."""
FORMULA = "accepted length: 1 + Σ accepted / Σ rounds, one request at a time, as the engine counts it and as predicted"
BY_POSITION = "Accepted ÷ reached at each position of the draft; columns are explained in docs/troubleshooting.md"


def run(settings: ServeCheckSettings) -> None:
    """Check the pair of the settings in the engine, print what was found, and record it in the draft's folder.

    Raises:
        UserError: before anything is loaded, if the engine, the draft or the target is missing.
    """
    check_models(settings)
    if settings.draft_shape is None:
        required(settings, "draft")
    choose("engine", settings.engine, ENGINES)
    program = settings.python if settings.engine == "vllm" else settings.binary
    if settings.url is None:
        program = check_engine(settings.engine, program)
    elif len(settings.draft_lengths) != 1 or settings.draft_shape:
        raise UserError("a server that runs already drafts one length; give it alone, such as --draft-lengths 5")
    console = Console(stderr=True)
    with scratch_folder() as scratch, console.status("loading") as status:
        target, draft = str(settings.target), Path(str(settings.draft))
        if settings.draft_shape:
            draft = scratch / "untrained"
            write_untrained_draft(draft, target, settings.draft_shape, settings.seed)
        pair = open_pair(settings, str(draft))
        chat = use_chat(settings, pair.tokenizer, tell=True)
        session = Session(pair.target, {"draft": pair.draft}, pair.tokenizer, measure_options(settings, chat=chat))
        items = [item for suite in open_suites(settings) for item in session.items(suite)]
        for name, note in session.notes.items():
            console.print(f"{name}: {note}", soft_wrap=True)
        head = pair.draft if isinstance(pair.draft, DraftHead) else None
        if isinstance(head, MtpHead):
            raise UserError(
                "serve-check has no engine for next-token layers outside of a target's own files; use bench"
            )
        method = METHODS[head.version if head else None]
        check_block(pair.draft, settings.engine, settings.draft_lengths)
        context = max(len(item.ids) for item in items) + settings.max_new_tokens + max(settings.draft_lengths) + 1
        dtype = str(pair.target.dtype).removeprefix("torch.")  # as in the prediction
        engine = Engine(
            settings.engine, target, str(draft), method, context, dtype, program, settings.url, settings.threads,
            settings.timeout,
        )  # fmt: skip
        profile = read_json(draft / "speculation_profile.json")
        causes: list[Cause] = []
        if not settings.draft_shape:
            told = "trained_with" in profile
            facts = serving_facts(pair.target, target, pair.tokenizer, chat=chat) if told else None
            causes = causes_in_files(target, draft, context=context, facts=facts)
        if engine.name == "llama.cpp" and settings.url is None:
            status.update("converting to GGUF")
            for name, path, of in (("target", target, None), ("draft", str(draft), target if head else None)):
                if not path.endswith(".gguf"):
                    made = f"{name}-{settings.gguf_type}.gguf"
                    exported = draft / "gguf" / made
                    if not exported.is_file():
                        exported = convert(path, scratch / made, settings.gguf_type, target=of)
                    setattr(engine, name, str(exported))
        rows, more = serve_check(engine, session, items, settings, status.update, profile.get("acceptance") or [])
        causes += more
    result = plain({"engine": engine.name, "rows": rows, "causes": [vars(cause) for cause in causes]})
    result |= {"suite": settings.suite, "machine": machine.describe(session.runner.device)}
    for file in [] if settings.draft_shape else record(result, draft):
        console.print(f"[dim]wrote {file}")
    print(json.dumps(result, ensure_ascii=False)) if settings.json else show(result["rows"], causes)


def check_block(draft: DraftModel, engine: str, lengths: Sequence[int]) -> None:
    """Refuse a block head that an engine would run otherwise than it was trained, or longer drafts than it makes.

    Raises:
        UserError: with the reason.
    """
    if not isinstance(draft, BlockHead):
        return
    if why := unserved(draft).get(engine):
        raise UserError(f"{engine} does not run this head as it was trained ({why}); check it in another engine")
    if max(lengths) > draft.drafts:
        raise UserError(
            f"draft_lengths are {list(lengths)}, and a block of this head drafts {draft.drafts} tokens at most; give "
            f"lengths up to {draft.drafts}"
        )


def serve_check(
    engine: Engine,
    session: Session,
    items: Sequence[Item],
    settings: ServeCheckSettings,
    progress: Callable[[str], None],
    known: Sequence[Row],
) -> tuple[list[Row], list[Cause]]:
    """Run prompts through an engine, without and with the draft, and predict the acceptance.

    An untrained draft (``draft_shape``) is only timed: a round takes the same time whatever is accepted of its draft,
    so the speedup at a conditional acceptance rate a is (1 + a + a² + … + aᵏ) / cost of a round of k drafted tokens in
    steps of the target without a draft.

    Args:
        engine: what is started for every draft length.
        session: target and draft as transformers loads them.
        items: prompts.
        settings: draft lengths, temperatures, budget and seed.
        progress: called with the name of each step.
        known: the draft's greedy acceptance at each position, on the validation examples and offline.

    Returns:
        A row for each temperature and draft length (of an untrained draft for each assumed acceptance rate), and the
        causes of differences that the numbers show.

    Raises:
        UserError: the engine does not start, or does not answer.
    """
    target, (draft,) = session.model, session.draft_models.values()
    untrained = settings.draft_shape is not None
    temperatures = [0.0] if untrained else settings.temperatures
    ends, budget = sorted(session.stop_ids), settings.max_new_tokens
    rows: list[Row] = []
    other_ids: list[str] = []

    def written(length: int | None) -> dict[float, list[ServedText]]:
        progress(f"{engine.name}: {len(items)} texts, {f'{length} drafted tokens' if length else 'no draft'}")
        found = {}
        with opened(engine, length) as server:
            if not (session.options.chat or other_ids):  # a chat's text is in no template there
                differences = (server.differs_in_ids(item.prompt.text, item.ids) for item in items[:4])
                other_ids.extend(filter(None, differences))
            for t in temperatures:
                how: dict[str, Any] = {"temperature": t, "stop_ids": ends, "ignore_eos": untrained}
                # the first request of a temperature compiles kernels and fills caches
                server.write(items[0].ids, seed=0, max_new_tokens=8, **how)
                found[t] = [
                    server.write(item.ids, seed=settings.seed + i, max_new_tokens=budget, **how)
                    for i, item in enumerate(items)
                ]
        return found

    def read(texts: Sequence[ServedText]) -> list[tuple[list[int], list[int]]]:
        return [(item.ids, text.ids) for item, text in zip(items, texts)]

    if settings.url is None:
        alone = written(None)
    else:  # the server has the draft: texts by transformers' weights here, whose speed says nothing
        prompts = [item.ids for item in items]
        answers = {t: session.written(prompts, LogitsWarper(t)) for t in temperatures}
        alone = {t: [ServedText(ids, math.nan) for ids in texts] for t, texts in answers.items()}
    if untrained:
        for length in settings.draft_lengths:
            costs = []  # of a round, in steps without a draft; the first token belongs to neither
            for text, other in zip(written(length)[0.0], alone[0.0]):
                ours, theirs = (one.decode_seconds or one.seconds for one in (text, other))
                costs.append(ours / max(1, text.drafts.rounds) / (theirs / max(1, len(other.ids) - 1)))
            for rate in ASSUMED:
                tokens = sum(rate**i for i in range(length + 1))
                middle, *interval = median_interval([tokens / cost for cost in costs])
                rows.append(
                    {"acceptance": rate, "draft_length": length, "tokens_per_round": tokens, "speedup": middle,
                     "speedup_ci95": interval}
                )  # fmt: skip
        return rows, []
    progress("predicting acceptance from the texts")
    longest = max(settings.draft_lengths)
    predicted = {t: acceptance(target, draft, read(texts), longest) for t, texts in alone.items()}
    entropy = {t: target_logprob(target, read(texts), t) for t, texts in alone.items() if t}
    for length in settings.draft_lengths:
        for t, texts in written(length).items():
            row = {"engine": engine.name, "temperature": t, "draft_length": length}
            row |= compared(texts, alone[t], predicted[t], length, budget if engine.name == "llama.cpp" else None)
            if not t:
                for at, before in zip(row["positions"], known):
                    at.update(before)
            else:
                (mean, se), (own, own_se) = target_logprob(target, read(texts), t), entropy[t]
                row |= {"identical_share": None, "target_logprob": mean, "plain_target_logprob": own}
                row["lossless"] = abs(mean - own) <= max(0.05, 4 * math.hypot(se, own_se))
            rows.append(row)
    agreement = predicted[0.0].agreement if 0.0 in predicted else None
    return rows, causes_in_numbers(rows, other_ids=next(iter(other_ids), None), agreement=agreement)


def compared(
    texts: Sequence[ServedText], alone: Sequence[ServedText], kept: Acceptance, length: int, budget: int | None
) -> Row:
    """Served beside predicted at one temperature and draft length.

    Args:
        texts: with the draft.
        alone: without it.
        kept: the predicted acceptance.
        length: tokens drafted per round.
        budget: see `predicted_drafts`.
    """
    served = [text.drafts for text in texts]
    expected = [predicted_drafts(accept, n, length, budget=budget) for accept, n in zip(kept.texts, kept.lengths)]
    (mean, mean_se), (expected_mean, expected_se) = mean_length(served), mean_length(expected)
    same = [a.ids == b.ids for a, b in zip(texts, alone)]
    # of the same texts the errors are those of the differences
    error = difference_error(served, expected) if all(same) else math.hypot(mean_se, expected_se)
    positions: list[Row] = []
    marginal = {"served": marginal_rates(served, length), "predicted": marginal_rates(expected, length)}
    for i in range(length):
        positions.append({"position": i + 1})
        for name, rates in marginal.items():
            before = rates[i - 1] if i else 1.0
            positions[i] |= {f"{name}_marginal": rates[i], name: rates[i] / before if before else None}
    ratios = [a.tokens_per_second / b.tokens_per_second for a, b in zip(texts, alone) if a.ids and b.ids]
    middle, *interval = median_interval(ratios)
    speeds = [sum(len(text.ids) for text in of) / sum(text.seconds for text in of) for of in (texts, alone)]
    return {
        "positions": positions,
        "served_length": mean,
        "served_length_se": mean_se,
        "predicted_length": expected_mean,
        "predicted_length_se": expected_se,
        "difference_se": error,
        # 0.02: where there is no error, which is nan then
        "fits": abs(mean - expected_mean) <= max(0.02, 2 * error),
        "tokens_per_second": speeds[0],
        "plain_tokens_per_second": speeds[1],
        "speedup": middle,
        "speedup_ci95": interval,
        "identical_share": sum(same) / len(same),
        "texts": len(texts),
    }


def write_untrained_draft(folder: Path, target: str, shape: str, seed: int) -> None:
    """Write a Llama of a shape with random weights, and the target's tokenizer.

    Raises:
        UserError: the shape is not width x layers x heads, or the heads do not divide the width into even parts.
    """
    parts = [int(part) if part.isdigit() else 0 for part in shape.lower().split("x")]
    if len(parts) != 3 or not all(parts) or parts[0] % (2 * parts[2]):
        raise UserError(
            f"draft_shape is {shape!r}; give width x layers x heads, such as 192x2x3, where the heads divide the width "
            "into even parts"
        )
    ours = AutoConfig.from_pretrained(target).get_text_config()
    config = config_for(
        "llama", hidden_size=parts[0], layers=parts[1], heads=parts[2], vocab=ours.vocab_size,
        positions=ours.max_position_embeddings,
        extra={key: getattr(ours, key, None) for key in ("bos_token_id", "eos_token_id")},
    )  # fmt: skip
    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    load_tokenizer(target).save_pretrained(folder)


def show(rows: Sequence[Mapping[str, Any]], causes: Sequence[Cause]) -> None:
    """Print the tables and the causes."""
    console = output_console(width=150, highlight=False)
    if "acceptance" in rows[0]:
        return console.print(console_table("", UNTRAINED, rows))
    console.print(
        console_table("", SERVED, rows), f"[dim]{FORMULA}", "", console_table(BY_POSITION, POSITIONS, by_position(rows))
    )
    apart = sum(not row["fits"] for row in rows)
    if not causes:
        verdict = f"differ in {apart} rows, for no known cause" if apart else "agree"
        console.print(f"\nServed and predicted accepted lengths {verdict}.", style="yellow" if apart else "green")
    for cause in causes:
        console.print(f"\n[bold yellow]{cause.name}[/]: {cause.evidence}.\n  Next: {cause.remedy}.", soft_wrap=True)


def by_position(rows: Sequence[Mapping[str, Any]]) -> list[Row]:
    """A row for each temperature, draft length and position."""
    return [{key: row[key] for key in SERVED[:3]} | dict(at) for row in rows for at in row["positions"]]


def record(result: Mapping[str, Any], draft: Path) -> list[Path]:
    """Put a check in place of earlier ones of its engine, into a draft's speculation_profile.json and model card.

    Args:
        result: engine, rows and causes, ready for JSON.
        draft: the draft's folder; one without a profile is left as it is.

    Returns:
        The files written.
    """
    profile, card = draft / "speculation_profile.json", draft / "README.md"
    if not (content := read_json(profile)):
        return []
    served = [other for other in content.get("served") or [] if other.get("engine") != result["engine"]]
    content["served"] = [*served, dict(result)]
    write_text(profile, json.dumps(content, indent=2, ensure_ascii=False) + "\n")
    if not card.is_file():
        return [profile]
    rows = [row for of in content["served"] for row in of["rows"]]
    tables = [markdown(keys, some) for keys, some in ((SERVED, rows), (POSITIONS, by_position(rows)))]
    write_section(card, "served", f"## Served\n\n{tables[0]}\n\n{FORMULA}.\n\n{tables[1]}\n\n{BY_POSITION}.")
    return [profile, card]
