"""What a benchmark compares: entries, the baselines that every comparison needs, and how an entry runs."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

from transformers import PreTrainedModel

from decode.bench.baselines import NEEDS_DRAFT, TRANSFORMERS_BASELINES, TransformersBaseline
from decode.bench.costs import round_costs, time_forwards
from decode.bench.session import BASELINE, Session
from decode.bench.statistics import Record, TimedText
from decode.errors import UserError
from decode.loop import Method, Output, Target, decode
from decode.method_options import MethodOptions, split_spec
from decode.methods import DRAFTED, HEADED, METHODS, SELF_SPECULATIVE, MethodInputs, build, is_lossless
from decode.models.heads import FeatureHead
from decode.models.other_tokenizer import DraftModel
from decode.sampling import TorchRng
from decode.verify import JensenShannon

REFERENCE = "generate"  # what `speedup_vs_generate` is measured against, and what greedy texts have to equal


@dataclass(frozen=True)
class BenchEntry:
    """One line of the table: a method with its draft, options and temperature."""

    # a name of `decode.methods.METHODS` or of `decode.bench.baselines.TRANSFORMERS_BASELINES`
    method: str
    draft: str | None = None  # which of the session's drafts it uses
    options: MethodOptions = field(default_factory=MethodOptions)  # what the method leaves open
    stop: str | None = None  # another stop rule than the method's own
    rule: str | None = None  # another acceptance rule than the method's own
    temperature: float = 0.0  # 0 is greedy
    name: str = ""  # how rows call it; the method's name if left empty

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
        """Whether the lengths of its drafts depend on what they cost."""
        return self.options.never_slower or _stop_of(self.method, self.stop) == "cost-optimal"

    @property
    def lossless(self) -> bool:
        """Whether the output's distribution is the target's."""
        return self.method in TRANSFORMERS_BASELINES or is_lossless(self.method, self.rule)


def with_baselines(entries: list[BenchEntry], temperature: float) -> list[BenchEntry]:
    """The entries of one temperature, the baselines first."""
    given = {c.method: c for c in reversed(entries)}
    baselines = [given.get(m, BenchEntry(m, temperature=temperature)) for m in (BASELINE, REFERENCE)]
    return baselines + [c for c in entries if c not in baselines]


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
    """Entries for all combinations, with names that tell them apart.

    Methods may carry options of their own (`split_spec`). Methods of a fixed length get one entry for each of
    `draft_lengths`; without any, the length that the draft was exported with (``num_assistant_tokens`` of its
    generation config), or the method's own.
    """
    entries = []
    for temperature in temperatures:
        for spec in methods:
            method, own = split_spec(spec)
            base = replace(options or MethodOptions(), **own)
            probe = BenchEntry(method)
            fitting = [name for name in drafts if suits(method, drafts[name])]
            for draft in fitting if probe.needs_draft and drafts else [None]:
                fixed = method == "generate-assistant" or (probe.needs_draft and _stop_of(method, stop) == "length")
                several = fixed and draft_lengths and "draft_length" not in own
                lengths: Sequence[int | None] = draft_lengths if several else [base.draft_length]
                for length in lengths:
                    name = spec.replace(":", " ")
                    if len(lengths) > 1:
                        name += f" k={length}"
                    if len(drafts) > 1 and draft is not None:
                        name += f" ({draft})"
                    if fixed and length is None and draft is not None:
                        length = exported_length(drafts[draft])
                    ours = (
                        {} if method in TRANSFORMERS_BASELINES or method == BASELINE else {"stop": stop, "rule": rule}
                    )
                    entries.append(
                        BenchEntry(
                            method,
                            draft,
                            replace(base, draft_length=length),
                            temperature=temperature,
                            name=name,
                            **ours,
                        )
                    )
    return entries


def _stop_of(method: str, stop: str | None) -> str | None:
    return None if method in TRANSFORMERS_BASELINES else stop or METHODS[method][1]


def suits(method: str, draft: DraftModel) -> bool:
    """Whether a draft can take part in a method: transformers takes plain models only, EAGLE's trees need a head."""
    if method in NEEDS_DRAFT:
        return isinstance(draft, PreTrainedModel)
    return method not in HEADED or isinstance(draft, FeatureHead)


def exported_length(draft: DraftModel) -> int | None:
    """The draft length that the draft's generation config (a head's configuration) carries, if any."""
    source = draft.config if isinstance(draft, FeatureHead) else draft.generation_config
    length = getattr(source, "num_assistant_tokens", None)
    return int(length) if length else None


class EntryRun:
    """An entry put together: one system for each repeat, so that no repeat has learned from another."""

    def __init__(self, session: Session, entry: BenchEntry) -> None:
        self.entry = entry
        self.session = session
        self.samples: list[Output] = []  # annotated outputs of the first prompts
        self.note = ""  # why it could not run, if so
        self.warp = replace(session.options.warp, temperature=entry.temperature)
        self.draft = session.drafts[entry.draft] if entry.draft is not None else None
        self.record = Record(greedy=self.warp.greedy)  # its timed texts
        self.peer: TransformersBaseline | None = None
        self.systems: list[Method] = []
        if entry.method in TRANSFORMERS_BASELINES:
            draft = session.draft_models.get(entry.draft or "")
            assert draft is None or isinstance(draft, PreTrainedModel), "plan leaves all others out"
            length = entry.options.draft_length
            self.peer = TransformersBaseline(entry.method, session.model, draft, self.warp, session.stop_ids, length)
        else:
            self.systems = [self._build() for _ in range(session.options.repeats + 1)]  # the last one warms up

    def _build(self) -> Method:
        session, entry = self.session, self.entry
        costs = session.round_costs.get(entry.draft)  # measured before the first text, and fixed from then on
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
        return build(entry.method, inputs, stop=entry.stop, rule=entry.rule)

    def about(self) -> dict[str, Any]:
        """What a row says of the method before anything is measured."""
        entry = self.entry
        return {
            "method": entry.method,
            "draft": entry.draft if entry.needs_draft else None,
            "draft_length": self.draft_length,
            "lossless": entry.lossless,
            "peer": self.peer is not None,
            "repeats": self.session.options.repeats,
        }

    @property
    def draft_length(self) -> int | None:
        """The window that drafting starts with, where there is one."""
        if self.peer is not None:
            fixed = {"generate-assistant": 5, "generate-assistant-dynamic": 20, "generate-prompt-lookup": 10}
            default = fixed.get(self.entry.method)
            return default if self.entry.method.endswith("dynamic") else self.peer.draft_length or default
        if self.entry.needs_draft or self.entry.method in {"prompt-lookup"} | SELF_SPECULATIVE:
            return int(self.systems[0].stop.window)
        return None

    @property
    def learned(self) -> dict[str, float]:
        """Thresholds that the acceptance rule ended with, the mean over repeats."""
        ends = [system.rule.theta for system in self.systems[:-1] if isinstance(system.rule, JensenShannon)]
        return {"verification_threshold": sum(ends) / len(ends)} if ends else {}

    def write(self, ids: list[int], repeat: int, seed: int, budget: int, sample: bool = False) -> TimedText:
        """Write one text; repeat -1 warms up."""
        runner = self.session.runner
        if self.peer is not None:
            (new,), seconds, forwards = self.peer.run([ids], min(budget, runner.limit + 1 - len(ids)), seed)
            return TimedText(new, seconds, forwards=forwards)
        with ExitStack() as stack:
            timer = None
            if runner.device.type == "cpu":  # elsewhere, waiting for each forward would slow the loop down
                own = getattr(self.systems[repeat].drafter, "runner", None)  # of LayerSkip with a separate cache
                timer = stack.enter_context(time_forwards(*filter(None, (runner, self.draft, own))))
            out = decode(
                Target(runner),
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
        trace = out.trace
        inside = timer.seconds if timer is not None else None
        return TimedText(out.new_ids, trace.total_seconds, trace.prefill_seconds, trace.rounds, inside, trace)


def opponents(run: EntryRun, runs: Sequence[EntryRun]) -> dict[str, Record]:
    """The records that a row is compared with, by method; of several assistants the one most like this entry."""
    ours = run.entry
    ran = [e for e in runs if e.record.texts]

    def unlike(e: EntryRun) -> tuple[bool, bool]:
        theirs = e.entry
        return ours.draft not in (None, theirs.draft), e.draft_length != run.draft_length

    return {e.entry.method: e.record for e in sorted(ran, key=unlike, reverse=True)}


def check_entries(session: Session, entries: Sequence[BenchEntry]) -> None:
    """Refuse what is missing before anything is measured."""
    for entry in entries:
        if entry.needs_draft and entry.draft not in session.drafts:
            missing = f"no draft named {entry.draft!r}" if entry.draft else "no draft"
            raise UserError(f"{entry.label} drafts with a model, but there is {missing}; give one with --draft")
        if entry.method not in TRANSFORMERS_BASELINES:
            EntryRun(session, entry)
