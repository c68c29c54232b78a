"""Hidden states out of a serving engine: asked for ahead of use, and checked."""

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any
from typing import Protocol as Protocols

from torch import Tensor

from decode.core.draft import Ids
from decode.errors import UserError
from distill.engine.servers import KEPT, TRIES, Answer, Engine, Retry, answer_ids, attempts

LAST_WAIT = 10.0  # seconds for what is in flight at the end


class Protocol(Protocols):
    """What is particular to an engine that gives hidden states away."""

    def command(self, model: Path, layers: Sequence[int], length: int, arguments: Sequence[str]) -> str:
        """The command of a server, with further arguments, that gives the states that enter these layers away.

        Layer i is transformers' ``hidden_states[i]``, and the number of layers the last one's output before the norm.
        """

    def request(self, *, several: bool) -> dict[str, Any]:
        """What a request has to ask for; ``several``: the states of the answer's tokens too."""

    def take(self, answer: Answer, ids: Sequence[int], layers: Sequence[int]) -> Tensor:
        """The states ``[tokens, layers, width]`` that an answer names, of these tokens.

        Raises:
            Retry: They are not as they should be.
            UserError: Nor will they be another time.
        """

    def quantization(self, answer: Answer) -> str | None:
        """How the engine is quantised, as an answer says it."""


def layers_for(captured: Sequence[int], count: int) -> list[int]:
    """The layers to ask an engine for: those whose entering states a head reads, and the last one's output."""
    return sorted({*captured, count})


class StateFiles:
    """Texts' states out of an engine, with requests ahead of their use.

    Args:
        engine: Servers of the target.
        layers: Those that the engine gives away (see `layers_for`).
        protocol: How it does.
    """

    def __init__(self, engine: Engine, layers: Sequence[int], protocol: Protocol) -> None:
        self.engine, self.layers, self.protocol = engine, list(layers), protocol
        self.pool, self.number = ThreadPoolExecutor(engine.workers), 0
        self.waiting: dict[tuple[int, ...], Future[Tensor]] = {}
        self.asked = set[Future[Tensor]]()  # not answered yet
        self.coming: Iterator[Ids] = iter(())

    def close(self) -> None:
        """Ask for no more; what is in flight is waited for a little, so that no file is left."""
        self.pool.shutdown(wait=False, cancel_futures=True)
        wait(self.asked, timeout=LAST_WAIT)

    def expect(self, texts: Iterable[Ids]) -> None:
        """Ask for the states of these texts, in this order, as far ahead of their use as requests may be in flight."""
        for future in self.waiting.values():
            future.cancel()
        self.waiting.clear()
        self.coming = iter(texts)

    def take(self, texts: Sequence[Ids]) -> list[Tensor]:
        """The states ``[tokens, layers, width]`` of texts, in the engine's number format."""
        futures = []
        for key in map(tuple, texts):
            for _ in texts:  # what is expected comes in this order
                if key in self.waiting or not self._next():
                    break
            futures.append(self.waiting.pop(key) if key in self.waiting else self._submit(list(key)))
        while len(self.waiting) < self.engine.workers and self._next():
            pass
        return [future.result() for future in futures]

    def _next(self) -> bool:
        """Ask for the next text that is expected; whether there is one."""
        ids = next(self.coming, None)
        if ids is not None and tuple(ids) not in self.waiting:
            self.waiting[tuple(ids)] = self._submit(ids)
        return ids is not None

    def _submit(self, ids: Ids) -> Future[Tensor]:
        self.number += 1
        future = self.pool.submit(self._states, self.number, ids)
        self.asked.add(future)
        future.add_done_callback(self.asked.discard)
        return future

    def _states(self, number: int, ids: Ids) -> Tensor:
        return self.ask(number, ids)[1]

    def ask(self, number: int, ids: Ids, **how: Any) -> tuple[Answer, Tensor]:
        """An answer and its states, asked for again while a sample is not as it should be.

        States of an answer are of all its tokens but the last, from the same pass, so that no text is read twice.

        Raises:
            UserError: The engine names no file of states, gives those of other layers away, or fails.
        """
        why, how = "", {"max_tokens": 1, "temperature": 0.0} | how
        several = how["max_tokens"] > 1
        for again in attempts():
            try:
                answer = self.engine.complete(number + again, ids, **how, **self.protocol.request(several=several))
                read = [*ids, *(answer_ids(answer)[:-1] if several else [])]
                return answer, self.protocol.take(answer, read, self.layers)
            except Retry as error:
                why = str(error)
        raise UserError(f"the engine of the target {why}. It was asked {TRIES} times. {KEPT}")
