"""The exact output distribution of the production loop: an `Rng` that enumerates, and models that are tables."""

from __future__ import annotations

import copy
import random
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from decode.core.round import Round
from decode.core.sampling import LogitsWarper, Prefixes, Rng
from decode.core.stop import StopRule
from decode.core.verify import AcceptanceRule
from decode.drafters.model import ModelDrafter
from decode.loop import Method, decode, decode_texts
from decode.models.api import Cache, Model, Out, Read

Distribution = dict[tuple[int, ...], float]
NEGLIGIBLE = 1e-17  # branches of less mass are rounding noise; ten thousand of them stay below the tolerance


@dataclass
class Question:
    """One random choice: its possible outcomes with their probabilities, and the one being tried."""

    outcomes: list[tuple[int, float]]
    at: int = 0


class EnumerationRng:
    """Replays the choices in `questions`, then answers every new one with its first outcome and appends it."""

    def __init__(self, questions: list[Question]) -> None:
        self.questions = questions
        self.asked = 0
        self.weight = 1.0

    def choose(self, weights: Tensor) -> int:
        values = weights.double()
        assert (values >= 0).all(), weights
        if self.asked == len(self.questions):
            table = list(enumerate((values / values.sum()).tolist()))
            kept = [(i, w) for i, w in table if w * self.weight > NEGLIGIBLE]
            self.questions.append(Question(kept or [max(table, key=lambda pair: pair[1])]))
        question = self.questions[self.asked]
        self.asked += 1
        outcome, probability = question.outcomes[question.at]
        self.weight *= probability
        return outcome

    @staticmethod
    def together(rngs: Sequence[EnumerationRng], counts: Sequence[int], device: torch.device) -> EnumerationNumbers:
        return EnumerationNumbers(rngs, counts)


class EnumerationNumbers:
    """The choices of a round; each of those that a text was promised is made once at most."""

    def __init__(self, rngs: Sequence[EnumerationRng], counts: Sequence[int]) -> None:
        self.rngs, self.counts, self.made = rngs, counts, set[tuple[int, int]]()

    def once(self, text: int, step: int) -> None:
        assert step < self.counts[text], f"choice {step} of {self.counts[text]}"
        assert (text, step) not in self.made, f"choice {step} is made twice"
        self.made.add((text, step))

    def draw(self, weights: Tensor, step: int | Sequence[int] = 0, rows: Sequence[int] | None = None) -> Tensor:
        texts = range(len(self.rngs)) if rows is None else rows
        steps = [step] * len(weights) if isinstance(step, int) else step
        for text, at in zip(texts, steps, strict=True):
            self.once(text, at)
        return torch.tensor([self.rngs[text].choose(row) for text, row in zip(texts, weights, strict=True)])

    def accepted(self, rates: Tensor, lengths: Sequence[int], step: int = 0) -> Tensor:
        found = []
        for text, (row, n) in enumerate(zip(rates, lengths, strict=True)):
            a = row[:n].double()
            assert ((a >= 0) & (a <= 1)).all(), a
            for at in range(n):
                self.once(text, step + at)
            reach = torch.cat([torch.ones(1, dtype=a.dtype), a.cumprod(0)])
            found.append(self.rngs[text].choose(reach * torch.cat([1 - a, torch.ones(1, dtype=a.dtype)])))
        return torch.tensor(found)


def enumerate_runs(run: Callable[[Rng], tuple[int, ...]]) -> Distribution:
    """The exact distribution of what `run` returns, over every sequence of random outcomes."""
    distribution: Distribution = defaultdict(float)
    questions: list[Question] = []
    while True:
        rng = EnumerationRng(questions)
        distribution[run(rng)] += rng.weight
        assert rng.asked == len(questions), "the run is not a function of its random choices"
        while questions and questions[-1].at + 1 == len(questions[-1].outcomes):
            questions.pop()
        if not questions:
            return dict(distribution)
        questions[-1].at += 1


def autoregressive_distribution(
    probabilities: Callable[[list[int]], Tensor], prompt: list[int], length: int, stop_ids: Collection[int] = ()
) -> Distribution:
    """The distribution of plain sampling: what every lossless method has to reproduce."""
    distribution: Distribution = {}
    open_texts: Distribution = {(): 1.0}
    for _ in range(length):
        grown: Distribution = {}
        for text, weight in open_texts.items():
            for token, p in enumerate(probabilities(prompt + list(text)).double().tolist()):
                if p > 0:
                    into = distribution if token in stop_ids or len(text) + 1 == length else grown
                    into[(*text, token)] = weight * p
        open_texts = grown
    return distribution


def total_variation(a: Distribution, b: Distribution) -> float:
    """Half the L1 distance of two distributions."""
    return sum(abs(a.get(text, 0.0) - b.get(text, 0.0)) for text in {*a, *b}) / 2


@dataclass
class Clock:
    """A clock that only the scripted models advance, so that measured times repeat."""

    now: float = 0.0

    def perf_counter(self) -> float:
        return self.now


def random_table(seed: int, vocab: int, *, zeros: float = 0.15) -> Callable[[tuple[int, ...]], Tensor]:
    """Random float64 logits ``[vocab]`` for every context (its last three tokens and its length), some of them −inf."""
    cache: dict[tuple[int, ...], Tensor] = {}

    def logits(context: tuple[int, ...]) -> Tensor:
        key = (len(context), *context[-3:])
        if key not in cache:
            generator = random.Random(f"{seed} {key}")
            row = [generator.gauss(0, 1.2) for _ in range(vocab)]
            sure = generator.randrange(vocab)
            cache[key] = torch.tensor(
                [x if i == sure or generator.random() > zeros else -torch.inf for i, x in enumerate(row)],
                dtype=torch.float64,
            )
        return cache[key]

    return logits


class ScriptedCache(Cache):
    """The tokens held."""

    def __init__(self) -> None:
        self.held: list[int] = []

    @property
    def length(self) -> int:
        return len(self.held)

    def truncate(self, length: int) -> None:
        del self.held[length:]

    def gather(self, base: int, slots: list[int]) -> None:
        assert slots == sorted(set(slots)), slots
        self.held[base : base + len(slots)] = [self.held[i] for i in slots]


class ScriptedRunner(Model):
    """A model that is a table of logits by context; everything else behaves as `Model` does."""

    def __init__(
        self,
        logits: Callable[[tuple[int, ...]], Tensor],
        vocab: int,
        *,
        limit: int = 1 << 30,
        clock: Clock | None = None,
        cost: float = 1.0,
    ) -> None:
        super().__init__("a table", device=torch.device("cpu"), dtype=torch.float64, vocab_size=vocab, limit=limit)
        self.logits, self.clock, self.cost = logits, clock or Clock(), cost
        self.weight_bytes = int(1000 * cost)

    def new_cache(self) -> ScriptedCache:
        return ScriptedCache()

    def _read(self, read: Read, capture: tuple[int, ...], last: int | None) -> Out:
        new = read.tokens.tolist()
        past = tuple(read.cache.held)
        if read.tree is None:
            contexts = [past + tuple(new[: i + 1]) for i in range(len(new))]
        else:
            contexts = [(*past, new[0], *(new[i] for i in path)) for path in read.tree.paths()]
        read.cache.held += new
        assert self.limit >= max(map(len, contexts)), "read beyond the context"
        self.clock.now += self.cost * (0.9 + 0.1 * len(new))
        wanted = contexts if last is None else contexts[len(contexts) - last :]
        hidden = torch.tensor([[len(c), c[-1]] for c in wanted], dtype=torch.float64).view(-1, 2)
        rows = [self.logits(c) for c in wanted]
        logits = torch.stack(rows) if rows else torch.empty(0, self.vocab_size, dtype=torch.float64)
        return Out(logits, hidden)


@torch.inference_mode()
def next_logits(runner: Model, text: list[int]) -> Tensor:
    """Logits ``[vocab]`` after a text, which a fresh cache reads whole."""
    cache = runner.new_cache()
    logits = runner.forward([Read(cache, torch.tensor(text))], last=1).logits[0]
    cache.close()
    return logits


@dataclass
class Experiment:
    """A target, a warp and a prompt, whose distribution under any system is compared with plain sampling."""

    target: Model
    warp: LogitsWarper
    prompt: list[int]
    tokens: int
    stop_ids: tuple[int, ...] = ()
    forward: Callable[[list[int]], Tensor] | None = None
    clock: Clock = field(default_factory=Clock)
    traces: list[list[Round]] = field(default_factory=list)

    def run(self, system: Method, rng: Rng) -> tuple[int, ...]:
        """Decode once from the system's present state, leaving that state as it is."""
        self.clock.now = 0.0
        # models and corpora stay, everything learned is copied
        parts = [self.target, *(getattr(system.drafter, name, None) for name in ("runner", "store", "table"))]
        system = copy.deepcopy(system, {id(part): part for part in parts if part is not None})
        out = decode(
            self.target, system, self.warp, self.prompt, max_new_tokens=self.tokens, stop_ids=self.stop_ids, rng=rng
        )
        self.traces.append(out.rounds)
        return tuple(out.new_ids)

    def distribution(self, system: Method) -> Distribution:
        self.traces.clear()
        return enumerate_runs(lambda rng: self.run(system, rng))

    def bias(self, system: Method) -> float:
        """Total variation between the system's distribution and the target's own."""
        found = self.distribution(system)
        assert abs(sum(found.values()) - 1) < 1e-12
        expected = autoregressive_distribution(self.next_distribution, self.prompt, self.tokens, self.stop_ids)
        return total_variation(found, expected)

    def next_distribution(self, text: list[int]) -> Tensor:
        """The target's warped distribution after `text`, from a forward over the whole of it."""
        logits = next_logits(self.target, text) if self.forward is None else self.forward(text)
        return self.warp(logits[None], Prefixes.of([text]))[0]

    @property
    def drafted(self) -> set[int]:
        return {r.drafted for rounds in self.traces for r in rounds}


def bias_of(rule: AcceptanceRule) -> float:
    """The bias of an acceptance rule: three tokens of an alphabet of three, two of them drafted by another random table."""
    warp = LogitsWarper(temperature=0.7)
    target, draft = (ScriptedRunner(random_table(seed, 3), 3) for seed in (1, 3))
    system = Method("vanilla", ModelDrafter(draft, warp, 3), StopRule(2), rule)
    return Experiment(target, warp, [0, 2, 1], 3).bias(system)


def joint_bias(
    target: Model, system: Method, warp: LogitsWarper, prompts: list[list[int]], tokens: int, **options
) -> float:  # type: ignore[no-untyped-def]
    """Total variation between the joint distribution of texts decoded together and the product of their own."""

    def run(rng: Rng) -> tuple[int, ...]:
        if system.lengths is not None:  # the one part that texts share
            system.lengths.reset()
        rngs = [rng] * len(prompts)
        texts = decode_texts(target, system, warp, prompts, rngs=rngs, max_new_tokens=tokens, **options)
        return tuple(token for text in texts for token in [*text.new_ids, -1])

    found = enumerate_runs(run)
    assert abs(sum(found.values()) - 1) < 1e-12
    next_distribution = Experiment(target, warp, [], tokens).next_distribution
    wanted: Distribution = {(): 1.0}
    for prompt in prompts:
        own = autoregressive_distribution(next_distribution, prompt, tokens, options.get("stop_ids", ()))
        wanted = {(*a, *b, -1): p * q for a, p in wanted.items() for b, q in own.items()}
    return total_variation(found, wanted)
