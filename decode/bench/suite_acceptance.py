"""Offline acceptance of drafts on a suite's prompts: the number that compares drafts, at any temperature."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from decode.bench.offline_acceptance import OfflineAlpha, offline_alpha
from decode.bench.session import Item, Session
from decode.bench.statistics import plain, ratio_interval, sums_by
from decode.progress import current


def suite_alphas(session: Session, suite: str, items: Sequence[Item], temperature: float) -> list[dict[str, Any]]:
    """Offline α of every draft on texts that the target writes for the prompts, for all and for each category.

    The model's own repetition penalty and processors apply; top-k, top-p and min-p do not, whatever decoding uses.

    Returns:
        Rows with ``suite``, ``temperature``, ``draft``, ``category`` ("" is all), ``alpha``, ``alpha_se``,
        ``alpha_ci95`` (over prompts), ``positions`` and ``prompts``.
    """
    work = current()
    warp = replace(session.options.warp, temperature=temperature, top_k=0, top_p=1.0, min_p=0.0)
    work.update(name=f"{suite} texts of the target, T={temperature:g}")
    work.begin(0, len(items))
    written = session.written([item.ids for item in items], warp, progress=work.advance, ends=session.stop_ids)
    kept = [(item, [*item.ids, *text]) for item, text in zip(items, written) if text]
    rows = []
    for name, draft in session.draft_models.items():
        work.update(name=f"{suite} α of {name}, T={temperature:g}")
        alpha = offline_alpha(session.model, draft, [(ids, len(item.ids)) for item, ids in kept], warp)
        groups = {"": list(range(len(kept)))}
        for i, (item, _) in enumerate(kept):
            if item.prompt.category:
                groups.setdefault(item.prompt.category, []).append(i)
        for category, places in groups.items() if len(groups) > 2 else [("", groups[""])]:
            prompts = [id(kept[i][0].prompt) for i in places]
            numbers = [prompts.index(prompt) for prompt in prompts]
            part = OfflineAlpha([alpha.texts[i] for i in places], numbers)
            pairs = (pair for pair in sums_by(numbers, part.sums, part.counts) if pair[1])
            ends = list(ratio_interval(pairs, session.options.seed)[1:])
            row = {"suite": suite, "temperature": temperature, "draft": name, "category": category}
            row |= {"alpha": part.mean, "alpha_se": part.se, "alpha_ci95": ends}
            rows.append(plain(row | {"positions": sum(part.counts), "prompts": len(set(numbers))}))
    return rows
