"""A benchmark run once, and a look at how far one is."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from decode.measure.benchmark import BenchEntry, Benchmark
from decode.measure.session import BenchOptions, Session
from decode.measure.suites import Suite
from decode.models.open import DraftModel
from decode.progress import Work


def run_benchmark(
    target: PreTrainedModel,
    drafts: Mapping[str, DraftModel] | None,
    tokenizer: PreTrainedTokenizerBase,
    suites: Iterable[Suite],
    entries: Iterable[BenchEntry],
    options: BenchOptions | None = None,
) -> Benchmark:
    benchmark = Benchmark(Session(target, drafts, tokenizer, options))
    benchmark.run(suites, entries)
    return benchmark


class Watched(Work):
    """A piece of work that tells a function how far it is: done, total, name."""

    def __init__(self, tell: Callable[[float, float | None, str], object]) -> None:
        super().__init__()
        self.tell = tell

    def update(self, **what: Any) -> None:
        super().update(**what)
        self.tell(self.done, self.total, self.name)
