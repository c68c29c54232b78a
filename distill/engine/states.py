"""Hidden states out of a serving engine: asked for ahead of use, and checked."""

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from itertools import islice
from typing import Any

from torch import Tensor

from decode.core.draft import Ids
from distill.engine.servers import TRIES, Answer, Engine
from distill.engine.vllm import take_states

LAST_WAIT = 10.0  # seconds for what is in flight at the end


class StateFiles:
    """Texts' states out of an engine, with requests ahead of their use.

    Args:
        engine: Servers of the target.
        layers: Those that the engine gives away, ascending.
    """

    def __init__(self, engine: Engine, layers: Sequence[int]) -> None:
        self.engine, self.layers = engine, list(layers)
        self.pool = ThreadPoolExecutor(engine.workers)
        self.waiting: dict[tuple[int, ...], Future[Tensor]] = {}
        self.coming: Iterator[Ids] = iter(())

    def close(self) -> None:
        """Ask for no more; what is in flight is waited for a little, so that no file is left."""
        self.pool.shutdown(wait=False, cancel_futures=True)
        wait([future for future in self.waiting.values() if not future.cancelled()], timeout=LAST_WAIT)

    def expect(self, texts: Iterable[Ids]) -> None:
        """Ask for the states of these texts, in this order, as far ahead of their use as requests may be in flight."""
        for future in self.waiting.values():
            future.cancel()
        self.waiting, self.coming = {}, iter(texts)
        self._ask_ahead(self.engine.workers)

    def take(self, texts: Sequence[Ids]) -> list[Tensor]:
        """The states ``[tokens, layers, width]`` of texts, in the engine's number format."""
        self._ask_ahead(len(texts))
        keys = map(tuple, texts)
        futures = [self.waiting.pop(key) if key in self.waiting else self._submit(list(key)) for key in keys]
        return [future.result() for future in futures]

    def _ask_ahead(self, texts: int) -> None:
        for ids in islice(self.coming, texts):
            if tuple(ids) not in self.waiting:
                self.waiting[tuple(ids)] = self._submit(ids)

    def _submit(self, ids: Ids) -> Future[Tensor]:
        return self.pool.submit(lambda: self.ask(ids)[1])

    def ask(self, ids: Ids, tries: int = TRIES, **how: Any) -> tuple[Answer, Tensor]:
        """An answer and its states, asked for again while they are not as they should be.

        States of an answer are of all its tokens but the last, from the same pass, so that no text is read twice.

        Raises:
            UserError: The engine names no file of states, gives those of other layers away, or fails.
        """
        how = {"max_tokens": 1, "temperature": 0.0} | how
        several = how["max_tokens"] > 1
        how["kv_transfer_params"] = {"include_output_tokens": several}

        def taken(answer: Answer) -> tuple[Answer, Tensor]:
            written = (answer.get("token_ids") or [])[:-1] if several else []
            return answer, take_states(answer, [*ids, *written], self.layers)

        asked: tuple[Answer, Tensor] = self.engine.complete(ids, taken, tries, **how)
        return asked
