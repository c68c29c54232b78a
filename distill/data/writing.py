"""Texts that the target writes, by itself here or in an engine, each kept as soon as it is there."""

from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor
from transformers import PreTrainedModel

from decode.core.draft import Ids
from decode.core.sampling import LogitsWarper
from decode.progress import current
from decode.writing import uniform_draws, write_texts
from distill.engine.servers import Engine, answer_ids, in_flight, request_seed
from distill.engine.states import StateFiles
from distill.kept import Kept


class Job(NamedTuple):
    """A text that is to be continued."""

    number: int  # with the seed it decides the continuation
    ids: Ids  # its token ids
    budget: int  # longest continuation in tokens


Write = Callable[[Iterable[Job]], Iterator[tuple[int, Ids]]]
"""Continues texts in any order, and gives the number and the new ids of each as soon as it is finished."""


def written_here(
    model: PreTrainedModel,
    warp: LogitsWarper,
    ends: Collection[int],
    seeds: tuple[int, int],
    batch_size: int,
    jobs: Iterable[Job],
) -> Iterator[tuple[int, Ids]]:
    """Continues texts by the model itself, all jobs together: see `Write`. The seeds and a job's number decide it."""
    together = list(jobs)
    texts = write_texts(
        model,
        [job.ids for job in together],
        warp,
        budgets=[job.budget for job in together],
        stop_ids=ends,
        draws=lambda i, count: uniform_draws(*seeds, together[i].number, count=count),
        batch_size=batch_size,
        progress=current().advance,
    )
    return zip((job.number for job in together), texts)


def written_by(
    engine: Engine,
    warp: LogitsWarper,
    ends: Collection[int],
    end: int,
    seed: int,
    jobs: Iterable[Job],
    *,
    files: StateFiles | None = None,
    take: Callable[[Job, Ids, Tensor], None] | None = None,
) -> Iterator[tuple[int, Ids]]:
    """Continues texts by an engine, each as soon as it comes: see `Write`.

    A seed, whose effect depends on the engine, is sent with every request. Texts end with ``end``, which an engine may
    leave out. With ``files`` the engine gives the states of what it writes too, which are taken as they come: no more
    of them are there than requests may be in flight.
    """
    how: dict[str, Any] = {"temperature": warp.temperature, "top_p": warp.top_p, "stop_token_ids": sorted(ends)}

    def answer(job: Job) -> tuple[int, Ids]:
        request = how | {"max_tokens": job.budget, "seed": request_seed(seed, job.number)}
        if files is None:
            given, states = engine.complete(job.number, job.ids, **request), None
        else:
            given, states = files.ask(job.number, job.ids, **request)
        ids = answer_ids(given)
        if given.get("finish_reason") == "stop" and ids and not any(token in ends for token in ids):
            ids = [*ids, end]
        ids = ids[: job.budget]
        if take is not None and states is not None:
            take(job, ids, states)
        return job.number, ids

    for written in in_flight(answer, jobs, engine.workers):
        current().advance()
        yield written


def keep_texts(kept: Kept, jobs: Iterable[Job], write: Write) -> None:
    """Have jobs written; what is finished when one fails is kept."""
    try:
        for number, ids in write(jobs):
            kept.put(number, {"ids": np.array(ids, np.int32)})
    finally:
        kept.flush()
