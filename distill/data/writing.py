"""Texts that the target writes, by itself here or in an engine, each kept as soon as it is there."""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from decode.core.draft import Ids, foreign
from decode.core.sampling import LogitsWarper
from decode.errors import UserError
from decode.models.tokens import continuation_ids
from decode.progress import current
from decode.writing import uniform_draws, write_texts
from distill.engine.check import FIRST
from distill.engine.servers import Answer, Engine, in_flight
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


Check = Callable[[Sequence[tuple[Ids, Ids]]], None]
"""Refuses answers, of which each has the ids of its prompt and its own."""


def first_checked(write: Write, check: Check | None, jobs: Iterable[Job]) -> Iterator[tuple[int, Ids]]:
    """Continues texts as ``write`` does, but gives the first `FIRST` away once they have been checked."""
    coming, written, failure = iter(jobs), list[tuple[int, Ids]](), None
    first = {job.number: job for job in islice(coming, FIRST)}
    try:
        for text in write(first.values()):
            written.append(text)
    except UserError as error:
        failure = error
    if check is not None:
        check([(first[number].ids, ids) for number, ids in written if ids])
    yield from written
    if failure is not None:
        raise failure
    yield from write(coming)


@dataclass
class Served:
    """Servers that continue texts.

    A seed, whose effect depends on the engine, is sent with every request.

    Args:
        engine: The servers.
        tokenizer: Of texts that come without their ids.
        ends: Ids that end a text.
        end: The one that is put behind a text whose own end a server leaves out.
        vocab: Ids that the target has.
        seed: Of the run.
    """

    engine: Engine
    tokenizer: PreTrainedTokenizerBase
    ends: Collection[int]
    end: int
    vocab: int
    seed: int
    inexact: int = 0  # answers that have no ids, and whose text is not that of its own ids

    def write(
        self,
        warp: LogitsWarper,
        jobs: Iterable[Job],
        *,
        files: StateFiles | None = None,
        take: Callable[[Job, Ids, Tensor], None] | None = None,
    ) -> Iterator[tuple[int, Ids]]:
        """Continues texts, each as soon as it comes: see `Write`.

        With ``files`` the engine gives the states of what it writes too, which are taken as they come: no more of them
        are there than requests may be in flight.
        """
        how: dict[str, Any] = {
            "temperature": warp.temperature,
            "top_p": warp.top_p,
            "stop_token_ids": sorted(self.ends),
        }

        def answer(job: Job) -> tuple[int, Ids]:
            seed = (self.seed * 1_000_003 + job.number) % (1 << 31)
            request = how | {"max_tokens": job.budget, "seed": seed}
            if files is None:
                given, states = self.engine.complete(job.ids, **request), None
            else:
                given, states = files.ask(job.ids, **request)
            ids = self.ids(given)[: job.budget]
            if take is not None and states is not None:
                take(job, ids, states)
            return job.number, ids

        for written in in_flight(answer, jobs, self.engine.workers):
            current().advance()
            yield written
        if self.inexact:
            self.engine.say(
                f"{self.inexact} answers came without token ids, and their texts as ids are of another number than the "
                "server counted: nothing is learned of them"
            )

    def ids(self, answer: Answer) -> Ids:
        """The token ids of an answer; none where it has a text alone, whose ids are not known for certain.

        A text is taken that its ids write again, and that has as many of them as the server counted.

        Raises:
            UserError: It has neither ids nor a text with their number, or ids that the target does not have.
        """
        ids, stopped = answer.get("token_ids"), answer.get("finish_reason") == "stop"
        if not isinstance(ids, list):
            text, count = answer.get("text"), (answer.get("usage") or {}).get("completion_tokens")
            if not (isinstance(text, str) and isinstance(count, int)):
                raise UserError(
                    f"{answer['url']} returned neither token ids nor a text with the number of its tokens: serve the "
                    "target by vLLM (0.10.2 or later), SGLang or llama.cpp, or leave teacher.engine.urls out"
                )
            (ids,) = continuation_ids(self.tokenizer, [text])
            again = str(self.tokenizer.decode(ids, clean_up_tokenization_spaces=False))
            if count - len(ids) not in (0, int(stopped)) or again.strip(" ") != text.strip(" "):
                self.inexact += 1
                return []
        if unknown := foreign(ids, self.vocab, f"an answer of {answer['url']} holds"):
            raise UserError(unknown)
        return [*ids, self.end] if stopped and ids and not any(token in self.ends for token in ids) else ids


def keep_texts(kept: Kept, jobs: Iterable[Job], write: Write) -> None:
    """Have jobs written; what is finished when one fails is kept."""
    try:
        for number, ids in write(jobs):
            kept.put(number, {"ids": np.array(ids, np.int32)})
    finally:
        kept.flush()
