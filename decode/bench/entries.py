"""What a benchmark compares: entries, the baselines of every comparison, and how an entry runs."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from transformers import PreTrainedModel

from decode.bench.baselines import NEEDS_DRAFT, TRANSFORMERS_BASELINES, TransformersBaseline
from decode.bench.costs import round_costs
from decode.bench.records import Record, TimedText
from decode.bench.session import BASELINE, Item, Session
from decode.errors import UserError
from decode.loop import Method, decode, decode_texts
from decode.method_options import MethodOptions, split_spec
from decode.methods import DRAFTED, HEADED, METHODS, SELF_SPECULATIVE, MethodInputs, build, is_lossless
from decode.models.heads import FeatureHead
from decode.models.other_tokenizer import DraftModel
from decode.sampling import TorchRng
from decode.verify import JensenShannon

REFERENCE = "generate"  # the method of `speedup_vs_generate`, whose texts greedy ones have to equal
TURN_SEED = 101  # distance of the seeds of a chat's turns
Chat = Sequence[Item]  # the turns of one prompt


@dataclass(frozen=True)
class BenchEntry:
    """One line of the table: a method with its draft, options and temperature."""

    # a name of `decode.methods.METHODS` or of `decode.bench.baselines.TRANSFORMERS_BASELINES`
    method: str
    draft: str | None = None  # name of a draft of the session
    options: MethodOptions = field(default_factory=MethodOptions)
    stop: str | None = None  # another stop rule than the method's own
    rule: str | None = None  # another acceptance rule than the method's own
    temperature: float = 0.0  # 0 is greedy
    name: str = ""  # name in rows; empty: the method's name

    @property
    def label(self) -> str:
        """The name in rows."""
        return self.name or self.method

    @property
    def needs_draft(self) -> bool:
        """Whether a draft model takes part."""
        return self.method in NEEDS_DRAFT or self.method in DRAFTED

    @property
    def adapts_to_costs(self) -> bool:
        """Whether the draft lengths depend on measured costs."""
        return self.options.never_slower or _stop_of(self.method, self.stop) == "cost-optimal"

    @property
    def lossless(self) -> bool:
        """Whether the output's distribution is the target's."""
        return self.method in TRANSFORMERS_BASELINES or is_lossless(self.method, self.rule)


def plan(
    methods: Sequence[str],
    drafts: Mapping[str, DraftModel],
    temperatures: Sequence[float] = (0.0,),
    *,
    draft_lengths: Sequence[int] = (),
    options: MethodOptions | None = None,
    stop: str | None = None,
    rule: str | None = None,
) -> list[BenchEntry]:
    """Entries for all combinations, with unique names.

    Methods may carry options of their own (`split_spec`). Methods of a fixed length get one entry for each of
    `draft_lengths`; without any, the length that the draft was exported with (``num_assistant_tokens`` of its
    generation config), or the method's own.
    """
    entries = []
    for temperature in temperatures:
        for spec in methods:
            method, own = split_spec(spec)
            base, needs_draft = replace(options or MethodOptions(), **own), BenchEntry(method).needs_draft
            fitting = [name for name, draft in drafts.items() if suits(method, draft)]
            fixed = method == "generate-assistant" or (needs_draft and _stop_of(method, stop) == "length")
            several = fixed and draft_lengths and "draft_length" not in own
            lengths: Sequence[int | None] = draft_lengths if several else [base.draft_length]
            ours = method not in TRANSFORMERS_BASELINES and method != BASELINE
            for draft in fitting if needs_draft and drafts else [None]:
                for length in lengths:
                    name = spec.replace(":", " ") + (f" k={length}" if len(lengths) > 1 else "")
                    if draft is not None:
                        name += f" ({draft})" if len(drafts) > 1 else ""
                        length = exported_length(drafts[draft]) if fixed and length is None else length
                    entries.append(
                        BenchEntry(
                            method,
                            draft,
                            replace(base, draft_length=length),
                            stop if ours else None,
                            rule if ours else None,
                            temperature,
                            name,
                        )
                    )
    return entries


def _stop_of(method: str, stop: str | None) -> str | None:
    return None if method in TRANSFORMERS_BASELINES else stop or METHODS[method][1]


def suits(method: str, draft: DraftModel) -> bool:
    """Whether a method takes a draft: transformers takes plain models only, EAGLE's trees need a head."""
    if method in NEEDS_DRAFT:
        return isinstance(draft, PreTrainedModel)
    return method not in HEADED or isinstance(draft, FeatureHead)


def exported_length(draft: DraftModel) -> int | None:
    """The draft length in the draft's generation config (of a head, its configuration), if any."""
    source = draft.config if isinstance(draft, FeatureHead) else draft.generation_config
    length = getattr(source, "num_assistant_tokens", None)
    return int(length) if length else None


class EntryRun:
    """An entry ready to run: one copy of its method for each repeat, so that no repeat has learned from another.

    Attributes:
        record: the timed sequences.
        samples: annotated outputs of the first prompts.
        note: why transformers refused the entry; empty if it ran.
    """

    def __init__(self, session: Session, entry: BenchEntry, batch_size: int = 1) -> None:
        self.entry, self.session, self.batch_size = entry, session, batch_size
        self.samples: list[Any] = []
        self.note = ""
        self.warp = replace(session.options.warp, temperature=entry.temperature)
        self.draft = session.drafts[entry.draft] if entry.draft is not None else None
        self.record = Record(greedy=self.warp.greedy, batch_size=batch_size)
        self.baseline: TransformersBaseline | None = None
        self.systems: list[Method] = []
        if entry.method in TRANSFORMERS_BASELINES:
            draft = session.draft_models.get(entry.draft or "")
            assert draft is None or isinstance(draft, PreTrainedModel), "plan leaves all others out"
            length = entry.options.draft_length
            self.baseline = TransformersBaseline(
                entry.method, session.model, draft, self.warp, session.stop_ids, length
            )
            return
        costs = session.round_costs.get(entry.draft)  # measured before the first text and fixed from then on
        if costs is None and entry.draft is not None and entry.draft in session.costs:
            costs = round_costs([session.costs[entry.draft]])
        inputs = MethodInputs(
            session.runner,
            self.warp,
            self.draft if entry.needs_draft else None,
            session.tokenizer,
            session.options.datastore,
            session.options.trigrams,
            entry.options,
            costs,
        )
        for _ in range(session.options.repeats + 1):  # the last one warms up
            self.systems.append(build(entry.method, inputs, stop=entry.stop, rule=entry.rule))

    def about(self) -> dict[str, Any]:
        """The fields of a row that are known before anything is measured."""
        return {
            "name": self.entry.label,
            "method": self.entry.method,
            "draft": self.entry.draft if self.entry.needs_draft else None,
            "draft_length": self.draft_length,
            "batch_size": self.batch_size,
            "lossless": self.entry.lossless,
            "baseline": self.baseline is not None,
            "repeats": self.session.options.repeats,
        }

    @property
    def draft_length(self) -> int | None:
        """The largest draft length at the start, if there is one."""
        if self.baseline is not None:
            fixed = {"generate-assistant": 5, "generate-assistant-dynamic": 20, "generate-prompt-lookup": 10}
            default = fixed.get(self.entry.method)
            return default if self.entry.method.endswith("dynamic") else self.baseline.draft_length or default
        if self.entry.needs_draft or self.entry.method in {"prompt-lookup"} | SELF_SPECULATIVE:
            return int(self.systems[0].stop.window)
        return None

    @property
    def learned(self) -> dict[str, float]:
        """Final thresholds of an adaptive acceptance rule, mean over repeats."""
        ends = [system.rule.theta for system in self.systems[:-1] if isinstance(system.rule, JensenShannon)]
        return {"verification_threshold": sum(ends) / len(ends)} if ends else {}

    def write(
        self, chats: Sequence[Chat], repeat: int, seeds: Sequence[int], budget: int, sample: bool = False
    ) -> list[TimedText]:
        """Decode chats once, `batch_size` at a time; of a batch, only first turns.

        Args:
            chats: the turns of each prompt.
            repeat: which copy of the method decodes; -1 warms up.
            seeds: of the sampling of each chat.
            budget: maximum number of new tokens of a turn.
            sample: keep annotated outputs (at batch size 1).
        """
        if self.batch_size == 1:
            return [
                TimedText.joined(
                    [
                        self._write_one(item.ids, repeat, seed + TURN_SEED * i, budget, sample)
                        for i, item in enumerate(chat)
                    ]
                )
                for chat, seed in zip(chats, seeds)
            ]
        prompts, runner = [chat[0].ids for chat in chats], self.session.runner
        if self.baseline is not None:
            order, texts = sorted(range(len(prompts)), key=lambda i: len(prompts[i])), dict[int, TimedText]()
            for at in range(0, len(order), self.batch_size):
                chosen = order[at : at + self.batch_size]
                new, seconds, forwards = self.baseline.run([prompts[i] for i in chosen], budget, seeds[0])
                share = seconds / len(chosen)
                texts |= {i: TimedText(ids, share, forwards=forwards, latency=seconds) for i, ids in zip(chosen, new)}
            return [texts[i] for i in range(len(prompts))]
        began = time.perf_counter()
        outputs = decode_texts(
            runner,
            self.systems[repeat],
            self.warp,
            prompts,
            rngs=[TorchRng(seed, runner.device) for seed in seeds],
            batch_size=self.batch_size,
            max_new_tokens=budget,
            stop_ids=self.session.stop_ids,
        )
        scale = (time.perf_counter() - began) / max(1e-12, sum(out.trace.total_seconds for out in outputs))
        return [
            TimedText(
                out.new_ids,
                scale * out.trace.total_seconds,
                out.trace.prefill_seconds,
                out.trace.rounds,
                out.trace,
                out.trace.wall_seconds,
            )
            for out in outputs
        ]

    def _write_one(self, ids: list[int], repeat: int, seed: int, budget: int, sample: bool) -> TimedText:
        runner = self.session.runner
        if self.baseline is not None:
            (new,), seconds, forwards = self.baseline.run([ids], min(budget, runner.limit + 1 - len(ids)), seed)
            return TimedText(new, seconds, forwards=forwards, latency=seconds)
        out = decode(
            runner,
            self.systems[repeat],
            self.warp,
            ids,
            annotate=sample,
            max_new_tokens=budget,
            stop_ids=self.session.stop_ids,
            rng=TorchRng(seed, runner.device),
        )
        if sample:
            self.samples.append(out)
        trace, total = out.trace, out.trace.total_seconds
        return TimedText(out.new_ids, total, trace.prefill_seconds, trace.rounds, trace, total)


def check_entries(session: Session, entries: Sequence[BenchEntry]) -> None:
    """Refuse missing drafts and files before anything is measured."""
    for entry in entries:
        if entry.needs_draft and entry.draft not in session.drafts:
            missing = f"no draft named {entry.draft!r}" if entry.draft else "no draft"
            raise UserError(f"{entry.label} drafts with a model, but there is {missing}; give one with --draft")
        if entry.method not in TRANSFORMERS_BASELINES:
            EntryRun(session, entry)
