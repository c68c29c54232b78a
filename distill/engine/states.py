"""Files of hidden states that a serving engine writes: asked for ahead of use, read, checked, and deleted."""

import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from decode.core.draft import Ids
from decode.errors import UserError
from decode.files import write_safely
from distill.engine.servers import KEPT, TRIES, Answer, Engine, Retry, answer_ids, attempts
from distill.files import fingerprint

WAIT, POLL = 120.0, 0.002  # seconds until a file has to be there after its answer, and between two looks for it
LAST_WAIT = 10.0  # seconds for what is in flight at the end


def layers_for(captured: Sequence[int], count: int) -> list[int]:
    """The layers to ask an engine for: those whose entering states a head reads, and the last one's output."""
    return sorted({*captured, count})


def take_file(path: Path, ids: Sequence[int], layers: Sequence[int]) -> Tensor:
    """The states ``[tokens, layers, width]`` of a file that is being written, which is deleted.

    Raises:
        Retry: It was not written, or is not of these tokens.
        UserError: It has other layers.
    """
    problems = {
        "full": f"found no space in {path.parent}: lower teacher.engine.in_flight, or give another folder",
        "failed": f"could not write {path}: see its log",
    }
    end = time.monotonic() + WAIT
    while not path.exists():
        for kind, words in problems.items():
            with suppress(FileNotFoundError):
                path.with_name(f"{path.name}.{kind}").unlink()
                raise Retry(words)
        if time.monotonic() > end:
            raise Retry(f"wrote no {path} within {WAIT:.0f} s, or it is on another machine")
        time.sleep(POLL)
    try:
        tensors = load_file(path)
    finally:
        path.unlink(missing_ok=True)
    states, written = tensors["hidden_states"], tensors["token_ids"].tolist()
    if written != list(ids):
        raise Retry(f"wrote states of {len(written)} tokens that are not the {len(ids)} of the request")
    if states.shape[1] != len(layers):
        raise UserError(f"the engine gives {states.shape[1]} layers away, and {list(layers)} are needed: start it anew")
    if len(states) != len(ids):
        raise Retry(f"wrote {len(states)} states of {len(ids)} tokens: start it with --no-enable-prefix-caching")
    if not torch.isfinite(states).all():
        raise Retry("wrote states that are not finite: give it another --dtype")
    return states


class StateFiles:
    """Texts' states out of an engine, with requests ahead of their use.

    Args:
        engine: Servers of the target.
        layers: Those that the engine gives away (see `layers_for`).
        folder: Where states of texts that the target has just written wait (see `answered`).
    """

    def __init__(self, engine: Engine, layers: Sequence[int], folder: Path) -> None:
        self.engine, self.layers, self.folder = engine, list(layers), folder
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
        future = self.pool.submit(self._of, self.number, ids)
        self.asked.add(future)
        future.add_done_callback(self.asked.discard)
        return future

    def _of(self, number: int, ids: Ids) -> Tensor:
        """The states of a text: those that wait in the folder, else the engine's."""
        with suppress(OSError, SafetensorError):
            path = self._path(ids)
            states = load_file(path)["hidden_states"]
            path.unlink()
            return states
        return self.ask(number, ids)[1]

    def answered(self, number: int, prompt: Ids, **how: Any) -> Answer:
        """The target's answer to a prompt, whose states wait in the folder until they are asked for.

        They are of all tokens but the last, from the same pass, so that a text is not read a second time.
        """
        answer, states = self.ask(number, prompt, **how)
        path = self._path([*prompt, *answer_ids(answer)][:-1])
        write_safely(path, lambda file: save_file({"hidden_states": states}, file))
        return answer

    def _path(self, ids: Sequence[int]) -> Path:
        return self.folder / f"{fingerprint(list(ids), self.layers)}.safetensors"

    def ask(self, number: int, ids: Ids, **how: Any) -> tuple[Answer, Tensor]:
        """An answer and its states, asked for again while a sample is not as it should be.

        Raises:
            UserError: The engine names no file of states, gives those of other layers away, or fails.
        """
        why, how = "", {"max_tokens": 1, "temperature": 0.0} | how
        several = how["max_tokens"] > 1
        for again in attempts():
            try:
                params = {"include_output_tokens": several}
                answer = self.engine.complete(number + again, ids, **how, kv_transfer_params=params)
                told = answer["kv_transfer_params"] or {}
                if not (path := told.get("hidden_states_path")):
                    raise UserError(
                        f"{self.engine.models[0].url} names no file of hidden states: start vLLM with the arguments "
                        "that python -m distill check-engine prints, without a proxy that drops kv_transfer_params. "
                        "SGLang gives no states of the last layer away, so that it can only answer (teacher.signal "
                        "hidden, topk or online)"
                    )
                read = [*ids, *(answer_ids(answer)[:-1] if several else [])]
                if (layers := told.get("layers", self.layers)) != self.layers:
                    with suppress(Retry, UserError):
                        take_file(Path(path), read, layers)  # which deletes it
                    raise UserError(
                        f"the engine gives the states of layers {layers} away, and {self.layers} are needed, ascending "
                        "and each once: start it with the arguments that python -m distill check-engine prints"
                    )
                return answer, take_file(Path(path), read, self.layers)
            except Retry as error:
                why = str(error)
        raise UserError(f"the engine of the target {why}. It was asked {TRIES} times. {KEPT}")
