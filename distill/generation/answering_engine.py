"""vLLM, started with the target for as long as its responses are written, in an environment of its own."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path

from decode.engines.launch.engine_settings import EngineSettings
from decode.engines.launch.start_engine import check_engine, opened
from distill.config.responses import ResponseSettings, ServerSettings

LOADING = 3600.0  # seconds: a large target from a cold disk


@contextmanager
def answering_engine(
    settings: ResponseSettings, target: str | Path, longest: int, dtype: str, say: Callable[[str], None] = print
) -> Iterator[Callable[[], ResponseSettings]]:
    """Yields a function that starts the engine when it is first called; the engine ends with the block.

    The function returns the settings with the engine's address, those for `answered_by_server`.

    Args:
        settings: Sampling and engine.
        target: The target's folder or name.
        longest: Tokens of the longest prompt with its response.
        dtype: Number format of the weights in the engine.
        say: Told that the engine starts.
    """
    with ExitStack() as started:

        @cache
        def start() -> ResponseSettings:
            name = settings.server.engine
            assert name is not None
            say(f"  {name} starts with {target} in {dtype}, and ends when the answers are written")
            server = started.enter_context(opened(name, _wanted(settings.server, str(target), longest, dtype), None))
            return replace(settings, server=replace(settings.server, urls=[f"{server.url}/v1"]))

        yield start


def check_answering_engine(settings: ResponseSettings) -> None:
    """Refuses an engine that is not installed.

    Raises:
        UserError: With the next step.
    """
    if settings.server.engine is not None:
        check_engine(settings.server.engine, _wanted(settings.server, "", 0, "auto"))


def _wanted(server: ServerSettings, target: str, context: int, dtype: str) -> EngineSettings:
    return EngineSettings(
        target, "", context=context, batch=server.concurrency, python=server.python, dtype=dtype, exact=False,
        arguments=server.arguments, python_option="reference.responses.server.python", seconds=LOADING,
    )  # fmt: skip
