"""``draftsmith decode serve-check``: a draft in a real engine, its acceptance as counted beside the predicted one."""

import json
import math
import re
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from decode.commands.checks import check_lengths, open_pair, open_suites, session_options, use_chat
from decode.commands.settings import ServeCheckSettings, required
from decode.core.sampling import LogitsWarper
from decode.engines.base import room_for
from decode.engines.check import (
    UNEXPLAINED,
    Accepted,
    Cause,
    Drafts,
    ServedText,
    acceptance,
    acceptance_rates,
    causes_in_counts,
    causes_in_files,
    causes_in_numbers,
    mean_length,
    predicted_drafts,
    serving_facts,
    within,
)
from decode.engines.load import COLUMNS, paying_load, under_load
from decode.engines.server import ENGINES, Engine, check_engine, opened
from decode.errors import UserError, choose
from decode.files import Fields, read_json, scratch_folder, write_json, write_text
from decode.measure import machine
from decode.measure.report import console_table
from decode.measure.session import Item, Session
from decode.measure.statistics import median_interval, plain
from decode.measure.suites import by_category
from decode.models.heads.eagle import DraftHead
from decode.models.heads.files import HEADS, head_format, unserved
from decode.models.open import DraftModel
from decode.progress import current, output_console, working

SERVED = (
    "engine", "temperature", "draft_length", "category", "served_length", "predicted_length", "speedup",
    "identical_share", "texts",
)  # fmt: skip
FORMULA = "accepted length: 1 + Σ accepted / Σ rounds, one request at a time, as the engine counts it and as predicted"


def run(settings: ServeCheckSettings) -> None:
    """Check the pair of the settings in the engine, print the result, and record it in the draft's folder.

    Raises:
        UserError: before anything is loaded, if the engine, the draft or the target is missing, the engine does not
            run such a draft, or the server at `url` does not answer or serves other models.
        SystemExit: with status 1, if counts differ for no known cause.
    """
    required(settings, "target", "draft")
    choose("engine", settings.engine, ENGINES)
    if settings.url is None:
        kind = head_format(read_json(Path(str(settings.draft)) / "config.json"))
        settings.program = check_engine(settings.engine, settings.program, kind)
    elif len(settings.draft_lengths) != 1:
        raise UserError("a server that runs already drafts one length; give it alone, such as --draft-lengths 5")
    else:
        with opened(Engine(settings.engine, str(settings.target), url=settings.url), None):
            pass  # it answers and has this target
    console, target, draft = Console(stderr=True), str(settings.target), Path(str(settings.draft))
    with scratch_folder() as scratch, working(console, "loading") as work:
        pair = open_pair(settings, str(draft))
        assert pair.draft is not None
        check_lengths("draft_lengths", settings.draft_lengths, pair.target)
        check_head(pair.draft, settings.engine, settings.draft_lengths)
        chat = use_chat(settings, pair.tokenizer, tell=True)
        options = session_options(settings, pair)
        options.beyond = room_for(max(settings.draft_lengths))
        session = Session(pair.target, {"draft": pair.draft}, pair.tokenizer, options)
        items = [item for suite in open_suites(settings, chat=chat) for item in session.items(suite)]
        for name, note in session.notes.items():
            console.print(f"{name}: {note}", soft_wrap=True)
        head = pair.draft if isinstance(pair.draft, DraftHead) else None
        engine = Engine(
            settings.engine, target, str(draft), HEADS[head.version].served if head else "draft_model",
            max(len(item.ids) for item in items) + settings.max_new_tokens + options.beyond,
            str(pair.target.dtype).removeprefix("torch."),  # as in the prediction
            settings.program, settings.url, settings.threads, max([1, *settings.concurrency]), settings.timeout,
        )  # fmt: skip
        profile = read_json(draft / "speculation_profile.json")
        facts = (
            serving_facts(pair.target, target, pair.tokenizer, chat=bool(chat)) if "trained_with" in profile else None
        )
        causes = causes_in_files(Path(target), draft, facts)
        numbers = engine.dtype
        if settings.url is None:
            work.update(name="preparing the models")
            numbers = ENGINES[engine.name].prepare(engine, draft, scratch, settings.gguf_type, head=head is not None)
        rows, load, causes = serve_check(engine, session, items, settings, causes, numbers)
    result = plain({"engine": engine.name, "rows": rows, "load": load, "causes": [vars(cause) for cause in causes]})
    result |= {"suite": settings.suite, "machine": machine.describe(session.runner.device)}
    told = any("speedup" in row for row in load)  # a server that runs already is not asked without its draft
    result["pays"] = f"Under load, {engine.name}: {paying_load(result['load'])}" if told else ""
    if profile:  # in place of the engine's earlier check
        earlier = [other for other in profile.get("served") or [] if other.get("engine") != engine.name]
        write_json(draft / "speculation_profile.json", profile | {"served": [*earlier, result]})
        if told and (card := draft / "README.md").is_file():
            text = re.sub(rf"\n+Under load, {engine.name}: .*", "", card.read_text(encoding="utf-8"))
            write_text(card, f"{text.rstrip()}\n\n{result['pays']}\n")
    print(json.dumps(result, ensure_ascii=False)) if settings.json else show(result, causes)
    if any(cause.name == UNEXPLAINED for cause in causes):
        raise SystemExit(1)


def check_head(draft: DraftModel, engine: str, lengths: Sequence[int]) -> None:
    """Refuse a head that an engine would run otherwise than it was trained, or longer drafts than it makes."""
    if isinstance(draft, DraftHead) and not HEADS[draft.version].served:
        raise UserError("serve-check has no engine for next-token layers outside of a target's own files; use bench")
    if why := unserved(draft).get(engine):
        raise UserError(f"{engine} does not run this draft as it was trained ({why}); check it in another engine")
    if max(lengths) > (most := getattr(draft, "drafts", None) or max(lengths)):
        raise UserError(f"draft_lengths are {list(lengths)}, and a block of this head drafts {most} at most")


def serve_check(
    engine: Engine,
    session: Session,
    items: Sequence[Item],
    settings: ServeCheckSettings,
    causes: Sequence[Cause],
    numbers: str,
) -> tuple[list[Fields], list[Fields], list[Cause]]:
    """Run prompts through an engine that is started for every draft length, and predict the acceptance.

    `causes` of differences were found before; the engine computes in the format `numbers`.

    Returns:
        A row for each temperature and draft length, a row for each number of requests at a time besides (see
        `under_load`), and all causes of differences. A row's ``equal_texts`` have the counts that follow from their own
        tokens, at every position of the draft; with ``other_texts`` the tokens are the target's most probable ones more
        or less often than without the draft.

    Raises:
        UserError: the engine does not start, or does not answer.
    """
    (draft,) = session.draft_models.values()
    ends, budget = sorted(session.stop_ids), settings.max_new_tokens
    past_end = ENGINES[engine.name].drafts_past_end
    limit = math.inf if past_end else budget
    rows = []
    other_ids: list[str] = []

    def written(length: int | None) -> dict[float, list[ServedText]]:
        work, of = current(), f"{length} drafted tokens" if length else "no draft"
        work.update(name=f"{engine.name}: texts, {of}", done=0, total=len(items) * len(settings.temperatures))
        with opened(engine, length) as server:
            if not (session.options.chat or other_ids):  # a chat's text is in no template there
                differences = (server.differs_in_ids(item.prompt.text, item.ids) for item in items[:4])
                other_ids.extend(filter(None, differences))
            texts: dict[float, list[ServedText]] = {t: [] for t in settings.temperatures}
            for t in texts:
                how: Fields = {"temperature": t, "max_new_tokens": budget, "stop_ids": ends}
                server.write(prompts[0], seed=0, **how | {"max_new_tokens": 8})  # compiles kernels, fills caches
                for number, ids in enumerate(prompts, settings.seed):
                    texts[t].append(server.write(ids, seed=number, **how))
                    work.advance()
                for n in settings.concurrency:
                    row, together = under_load(server, prompts, n, undrafted.get((t, n)), seed=settings.seed, **how)
                    load.append({"temperature": t, "draft_length": length, **row})
                    if length is None:
                        undrafted[t, n] = together
            return texts

    prompts, load, undrafted = [item.ids for item in items], list[Fields](), dict[tuple[float, int], list[ServedText]]()
    if settings.url is None:
        alone = written(None)
    else:  # the server has the draft: texts by transformers' weights here, whose speed says nothing
        answers = {t: session.written(prompts, LogitsWarper(t)) for t in settings.temperatures}
        alone = {
            t: [ServedText(ids, math.nan, ended=not past_end and set(ids[-1:]) <= set(ends)) for ids in texts]
            for t, texts in answers.items()
        }

    def proposed(texts: Sequence[ServedText], length: int) -> tuple[Accepted, float]:
        return acceptance(session.model, draft, [(ids, text.ids) for ids, text in zip(prompts, texts)], length)

    def counts(accepted: Accepted, texts: Sequence[ServedText], length: int, beyond: bool | None) -> list[Drafts]:
        return [
            predicted_drafts(at, len(text.ids), length, budget=limit, ended=text.ended, beyond=beyond)
            for at, text in zip(accepted, texts)
        ]

    agreement, categories = None, by_category(item.prompt for item in items)
    for length in settings.draft_lengths:
        for t, texts in written(length).items():
            current().update(name="predicting acceptance from the texts")
            accepted, share = proposed(alone[t], length)
            agreement = share if t == 0 else agreement
            row = {"engine": engine.name, "temperature": t, "draft_length": length, "other_texts": False}
            unlike = {"identical_share": None} if t else {}  # sampled texts differ
            parts = [*zip(texts, alone[t], counts(accepted, alone[t], length, None))]
            row |= compared(parts, length)
            row["categories"] = [
                {"category": category, **compared([parts[i] for i in places], length), **unlike}
                for category, places in categories.items()
            ]
            if row["identical_share"] < 1:
                accepted, ours = proposed(texts, length)
                tokens = sum(1 / max(1, sum(len(text.ids) for text in each)) for each in (texts, alone[t]))
                # the error is that of a share of independent observations: of each token, given those before it,
                # whether it is the target's most probable one
                row["other_texts"] = abs(ours - share) > 4 * math.sqrt(share * (1 - share) * tokens) + 0.02
            # sampled tokens behind the end of a text are not known
            chance = (False, True) if t and past_end else (None, None)
            bounds = zip(*(counts(accepted, texts, length, beyond) for beyond in chance))
            apart = [
                f"text {i} has {text.drafts.accepted} in {text.drafts.rounds:g} rounds, expected {low.accepted} in "
                f"{low.rounds:g}"
                for i, (text, (low, high)) in enumerate(zip(texts, bounds), 1)
                if not within(text.drafts, low, high)
            ]
            row |= {"equal_texts": len(texts) - len(apart), "unequal": next(iter(apart), None)}
            rows.append(row | unlike)
    causes = [*causes, *causes_in_numbers(next(iter(other_ids), None), agreement)]
    return rows, load, causes + causes_in_counts(rows, numbers=numbers, explained=bool(causes))


def compared(parts: Sequence[tuple[ServedText, ServedText, Drafts]], length: int) -> Fields:
    """Texts with drafts of one length beside those without, and counted drafts beside the expected ones."""
    texts, alone, expected = zip(*parts)
    served = [text.drafts for text in texts]
    rates = zip(acceptance_rates(served, length), acceptance_rates(expected, length))
    mean, error = mean_length(served)
    speedup, interval = median_interval(
        a.tokens_per_second / b.tokens_per_second for a, b in zip(texts, alone) if a.ids and b.ids
    )
    return {
        "positions": [
            {"position": i, "served": ours, "predicted": theirs} for i, (ours, theirs) in enumerate(rates, 1)
        ],
        "served_length": mean,
        "served_length_se": error,
        "predicted_length": mean_length(expected)[0],
        "speedup": speedup,
        "speedup_ci95": interval,
        "identical_share": sum(a.ids == b.ids for a, b in zip(texts, alone)) / len(texts),
        "texts": len(texts),
    }


def show(result: Fields, causes: Sequence[Cause]) -> None:
    """Print the tables and the causes."""
    console, rows, load = output_console(highlight=False), result["rows"], result["load"]
    parts = [row | part for row in rows for part in ({}, *row["categories"])]
    console.print(console_table("", SERVED, parts), f"[dim]{FORMULA}", "")
    if load:
        console.print(console_table("Requests at a time", COLUMNS, load), result["pays"], "")
    for row in rows:
        line = f"T = {row['temperature']:g}, {row['draft_length']} drafted: {row['equal_texts']} of {row['texts']}"
        console.print(f"\n{line} texts have the predicted counts.", style="yellow" if row["unequal"] else "green")
        if row["unequal"]:
            console.print(f"  The first other one: {row['unequal']}.", soft_wrap=True)
    for cause in causes:
        console.print(f"\n[bold yellow]{cause.name}[/]: {cause.evidence}.\n  Next: {cause.remedy}.", soft_wrap=True)
