"""The target's responses by vLLM, started for as long as they are written, in an environment of its own."""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from decode.engines.launch.engine_settings import EngineSettings
from decode.engines.launch.start_engine import check_engine, opened
from distill.config.responses import ResponseSettings
from distill.generation.openai_client import answered_by_server
from distill.generation.response_store import Answer, Job, Response

LOADING = 3600.0  # seconds: a large target from a cold disk


@contextmanager
def answering_engine(
    settings: ResponseSettings,
    seed: int,
    tokenizer: PreTrainedTokenizerBase,
    ends: Collection[int],
    target: Path,
    longest: int,
    dtype: str,
    say: Callable[[str], None] = print,
) -> Iterator[Answer]:
    """Answers by an engine that starts when the first one is asked for, and ends with the block; tokens, not text.

    Args:
        settings: Sampling and engine.
        seed: Sent with every request, different for each.
        tokenizer: The target's.
        ends: End-of-text tokens.
        target: The target's folder.
        longest: Tokens of the longest prompt with its response.
        dtype: Number format of the weights in the engine.
        say: Told that the engine starts.
    """
    with ExitStack() as started:
        urls: list[str] = []

        def answers(jobs: Sequence[Job], missing: Collection[int]) -> Iterator[Response]:
            name = settings.server.engine
            assert name is not None
            if not urls:
                say(f"  {name} starts with {target} in {dtype}, and ends when the answers are written")
                wanted = _wanted(settings, str(target), longest, dtype)
                urls.append(f"{started.enter_context(opened(name, wanted, None)).url}/v1")
            asked = replace(settings, server=replace(settings.server, urls=urls))
            yield from answered_by_server(asked, seed, tokenizer, ends, target, say)(jobs, missing)

        yield answers


def check_answering_engine(settings: ResponseSettings) -> None:
    """Refuses an engine that is not installed.

    Raises:
        UserError: With the next step.
    """
    if settings.server.engine is not None:
        check_engine(settings.server.engine, _wanted(settings, "", 0, "auto"))


def _wanted(settings: ResponseSettings, target: str, context: int, dtype: str) -> EngineSettings:
    server = settings.server
    return EngineSettings(
        target, "", context=context, batch=server.concurrency, python=server.python, dtype=dtype, exact=False,
        arguments=server.arguments, python_option="reference.responses.server.python", seconds=LOADING,
    )  # fmt: skip
