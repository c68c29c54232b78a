"""What a draft gains in a server that has several requests at a time."""

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle, islice
from typing import Any

from decode.core.draft import Ids
from decode.engines.check import ServedText, mean_length
from decode.engines.server import Server
from decode.files import Fields
from decode.measure.benchmark import FILLED
from decode.measure.machine import doubt
from decode.measure.report import Row, cell
from decode.measure.statistics import ratio_interval

COLUMNS = ("temperature", "draft_length", "requests", "tokens_per_second", "token_ms", "served_length", "speedup")


def under_load(
    server: Server, prompts: Sequence[Ids], requests: int, without: Sequence[ServedText] | None, **how: Any
) -> tuple[Fields, list[ServedText]]:
    """Texts after all prompts, so many requests at a time, and their `COLUMNS`; `without` are those without a draft.

    The prompts come again where there are fewer than two for each request at a time. The speedup is that of requests,
    Σ tokens / Σ seconds, with a prompt as one observation.
    """
    places = [*islice(cycle(range(len(prompts))), max(len(prompts), FILLED * requests))]
    before, began = server.settled(), time.perf_counter()
    with ThreadPoolExecutor(requests) as pool:
        texts = [*pool.map(lambda place: server.write(prompts[place], alone=False, **how), places)]
    seconds, tokens = time.perf_counter() - began, sum(len(text.ids) for text in texts)
    after = server.settled(before.tokens + tokens)
    decoding = sum(text.decode_seconds for text in texts) or after.decode_seconds - before.decode_seconds
    row: Fields = {
        "requests": requests,
        "texts": len(prompts),
        "tokens_per_second": tokens / seconds,
        "token_ms": 1e3 * decoding / max(1, tokens - len(texts)),
        "served_length": mean_length([after.drafts - before.drafts])[0],
    }
    if without:
        sums = [(len(a.ids), a.seconds, len(b.ids), b.seconds) for a, b in zip(texts, without)]
        row["speedup"], row["speedup_ci95"] = ratio_interval(places, sums)
    return row, texts


def paying_load(rows: Sequence[Row]) -> str:
    """Up to how many requests at a time, and at all smaller numbers tried, a draft is faster than none.

    That is where the interval of its speedup is above 1.
    """
    faster, slower = list[Row](), set[tuple[Any, ...]]()
    for row in sorted(rows, key=lambda row: row["requests"]):
        draft = row["temperature"], row["draft_length"]
        if draft not in slower and (row.get("speedup_ci95") or [0])[0] > 1 and not doubt(row):
            faster.append(row)
        else:
            slower.add(draft)
    if not faster:
        return "not surely faster than without a draft, of which six prompts or more have to show it"
    most = max(faster, key=lambda row: row["requests"])
    at = f"{cell(most, 'speedup')}, {most['draft_length']} drafted tokens, T = {most['temperature']:g}"
    return f"faster than without a draft up to a concurrency of {most['requests']} ({at})"
