"""The models, prompts and costs that a benchmark works with."""

import json
import statistics
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from decode.bench import machine
from decode.bench.costs import LONGEST, CostMeter, CostModel, round_costs, time_forwards
from decode.bench.suites import Prompt, Suite
from decode.errors import UserError
from decode.loop import decode_texts
from decode.method_options import MethodOptions
from decode.methods import MethodInputs, build
from decode.models.choose_runner import open_draft_runner, open_runner
from decode.models.loading import stop_ids
from decode.models.other_tokenizer import DraftModel, ForeignDraft
from decode.models.tokens import Detokenizer, Message, chat_ids, prompt_ids, user_says
from decode.models.writing import draws_of_loop, write_texts
from decode.progress import current
from decode.sampling import LogitsWarper, TorchRng
from decode.stopping import RoundCosts

BASELINE = "autoregressive"  # the loop without a drafter, the baseline of `speedup`
ANSWERED_AT_ONCE = 16  # first turns of chats that the target answers in a batch
WIDE = (24, 32, 48, 64, 96)  # more n of v(n), for methods that verify trees
BATCH_WIDTHS = (2, 3, 4, 5, 6, 8, 11, 16, 24)  # n of v(n) for several sequences
OVERHEAD_PROMPTS, OVERHEAD_TOKENS = 4, 24  # least prompts, and most new tokens of a batch, that bookkeeping is timed on


@dataclass
class BenchOptions:
    """How a benchmark is run."""

    max_new_tokens: int = 128  # budget of each text
    repeats: int = 3  # runs of each method on each prompt
    seed: int = 0  # of sampling and of the bootstrap
    ignore_eos: bool = False  # generate the full budget, so that all texts have one length
    # put prompts into the chat template; later turns of a prompt follow the target's own greedy answers
    chat: bool = False
    system: str | None = None  # system message of the chats
    warp: LogitsWarper = field(default_factory=LogitsWarper)  # sampling settings except the temperature
    threads: int | None = None  # of torch; None measures one against all
    datastore: Path | None = None  # folder of a REST datastore
    trigrams: Path | None = None  # folder of an Adaptix table
    samples: int = 1  # prompts of each suite whose annotated texts are kept
    costs: bool = True  # measure c and v(n), which `predicted_speedup` needs
    cost_turns: int = 24  # measurements of the costs, spread over a block's prompts
    pack: str = "auto"  # see `decode.models.choose_runner.open_runner`


@dataclass
class Item:
    """One prompt, or one turn of a chat, as token ids; `said` is the user's last text."""

    prompt: Prompt
    ids: list[int]
    said: str = ""


class Session:
    """A target and its drafts, opened for measurement on this machine.

    Attributes:
        drafts: the drafts' runners by name.
        packing: the weight layouts of the target and of each draft, in sentences.
        threads: why this number of threads is used.
        costs: costs at batch size 1 by draft name; None is the target alone.
        costs_at: costs with bookkeeping by draft name and batch size, above batch size 1.
        round_costs: costs of rounds by draft name, if several batch sizes or bookkeeping were measured.
        left_out: by suite, a remark on prompts that were too long.
        vocabularies: by suite, a remark on drafts with another vocabulary.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        drafts: Mapping[str, DraftModel] | None,
        tokenizer: PreTrainedTokenizerBase,
        options: BenchOptions | None = None,
    ) -> None:
        self.options, self.load = options or BenchOptions(), machine.Load()
        self.model = model
        self.tokenizer = tokenizer
        self.draft_models: dict[str, DraftModel] = dict(drafts or {})
        if self.options.threads:  # the layout of weights is chosen by measurement
            torch.set_num_threads(self.options.threads)
        how: dict[str, Any] = {"pack": self.options.pack}
        self.runner = open_runner(model, **how)  # the target's
        self.drafts = {name: open_draft_runner(draft, model, **how) for name, draft in self.draft_models.items()}
        opened = {"target": self.runner} | self.drafts
        self.packing = [f"{name}: {runner.packing}" for name, runner in opened.items() if runner.packing]
        self.threads = machine.set_threads(self.runner, self.options.threads)[1]
        self.stop_ids: Collection[int] = set() if self.options.ignore_eos else stop_ids(model, tokenizer)
        self.costs: dict[str | None, CostModel] = {}
        self.costs_at: dict[tuple[str | None, int], CostModel] = {}
        self.meters: dict[str | None, CostMeter] = {}
        self.round_costs: dict[str | None, RoundCosts] = {}
        self.left_out: dict[str, str] = {}
        self.vocabularies: dict[str, str] = {}

    def facts(self) -> dict[str, Any]:
        """The machine, its load and the weight layouts, for reports."""
        note = "; ".join([self.threads, *self.packing])
        share = round(self.load.others(), 3)
        return machine.describe(self.runner.device) | {"note": note, "other_processes_share": share}

    def notes(self, suites: Iterable[Suite]) -> dict[str, str]:
        """Remarks on each suite's prompts, for suites that have any."""
        parts = {s.name: [s.note, *(of.get(s.name, "") for of in (self.left_out, self.vocabularies))] for s in suites}
        return {name: "; ".join(filter(None, texts)) for name, texts in parts.items() if any(texts)}

    def items(self, suite: Suite) -> list[Item]:
        """All prompts (of chats, all turns) that fit the contexts together with their answers."""
        if self.options.chat:
            items = self._turns(suite.prompts)
        else:
            items = [Item(p, list(p.ids) or prompt_ids(self.tokenizer, p.text), p.text) for p in suite.prompts]
        room = min(r.limit for r in [self.runner, *self.drafts.values()])
        fitting = [item for item in items if len(item.ids) + self.options.max_new_tokens <= room + 1]
        if not fitting:
            shortest = min((len(item.ids) for item in items), default=0)
            raise UserError(
                f"no prompt of {suite.name} fits: the shortest of {len(items)} has {shortest} tokens, the context "
                f"holds {room}, {self.options.max_new_tokens} new ones among them; lower max_new_tokens or take "
                "another suite"
            )
        if len(fitting) < len(items):
            self.left_out[suite.name] = (
                f"{len(items) - len(fitting)} of {len(items)} prompts do not fit the context of {room} tokens"
            )
        ids = [i for item in fitting for i in item.ids]
        foreign = {name: draft for name, draft in self.draft_models.items() if isinstance(draft, ForeignDraft)}
        if foreign:
            sentences = (f"{name}: {draft.vocabulary.sentence(ids)}" for name, draft in foreign.items())
            self.vocabularies[suite.name] = "; ".join(sentences)
        return fitting

    def _turns(self, prompts: Sequence[Prompt]) -> list[Item]:
        """The turns of chats, each after the target's greedy answers to the earlier ones."""
        chats: list[list[Item]] = [[] for _ in prompts]
        histories: list[list[Message]] = [[] for _ in prompts]
        said = [prompt.turns or (prompt.text,) for prompt in prompts]
        for turn in range(max(map(len, said))):
            going = [i for i, texts in enumerate(said) if turn < len(texts)]
            for i in going:
                histories[i] += user_says(said[i][turn], None if turn else self.options.system)
                chats[i].append(Item(prompts[i], chat_ids(self.tokenizer, histories[i]), said[i][turn]))
            answered = [i for i in going if turn + 1 < len(said[i])]
            greedy = replace(self.options.warp, temperature=0.0)
            for i, answer in zip(answered, self.written([chats[i][-1].ids for i in answered], greedy)):
                histories[i].append({"role": "assistant", "content": self.text(answer)})
        return [item for chat in chats for item in chat]

    def written(
        self,
        prompts: Sequence[list[int]],
        warp: LogitsWarper,
        batch_size: int = ANSWERED_AT_ONCE,
        progress: Callable[[int], None] | None = None,
        ends: Collection[int] | None = None,
    ) -> list[list[int]]:
        """New tokens that the target writes after each prompt; none if the prompt fills the context."""
        longest, limit = self.options.max_new_tokens, self.runner.limit
        return write_texts(
            self.model,
            prompts,
            warp,
            budgets=[min(longest, limit - len(ids)) for ids in prompts],
            stop_ids=stop_ids(self.model, self.tokenizer) if ends is None else ends,
            draws=draws_of_loop(self.options.seed),
            batch_size=batch_size,
            progress=progress,
        )

    def measure_costs(
        self,
        items: Sequence[Item],
        drafts: Iterable[str],
        *,
        longest: int = 0,
        trees: bool = False,
        repeats: int = 21,
        batch_sizes: Iterable[int] = (1,),
        adapting: Collection[str] = (),
    ) -> None:
        """Measure `costs` of the target alone and of each draft, in the middle of a typical text.

        Args:
            items: prompts, whose median length counts.
            drafts: names of the drafts in use.
            longest: the largest draft length in use.
            trees: also measure the widths of draft trees.
            repeats: most turns of measurements.
            batch_sizes: `round_costs` of each draft are measured at these sizes, unless it is batch size 1 alone.
            adapting: drafts whose `round_costs` are measured in any case.
        """
        context = int(statistics.median(len(i.ids) for i in items)) + self.options.max_new_tokens // 2
        widths = [*range(1, LONGEST + 2), *range(20, longest + 5, 4), *(WIDE if trees else ())]
        self.meters, alike = {}, dict[Any, CostMeter]()
        for name in (None, *drafts):
            # drafts of one shape cost the same, so one of them is timed
            shape = None if name is None else (_shape(self.draft_models[name]), self.drafts[name].packing)
            if shape not in alike:
                draft = None if name is None else self.drafts[name]
                alike[shape] = CostMeter(self.runner, draft, widths=widths, context=context)
                alike[shape].run(repeats)
            self.meters[name] = alike[shape]
        self.costs = {name: meter.cost() for name, meter in self.meters.items()}
        several = [size for size in sorted(set(batch_sizes)) if size > 1]
        for name in (name for name in self.meters if name is not None and (several or name in adapting)):
            costs = self.batch_costs(name, items, self.options.warp, [1, *several], longest=longest, context=context)
            self.costs_at |= {(name, cost.batch): cost for cost in costs[1:]}
            self.round_costs[name] = round_costs(costs)

    def batch_costs(
        self, draft: str, items: Sequence[Item], warp: LogitsWarper, sizes: Iterable[int], *, longest: int, context: int
    ) -> list[CostModel]:
        """Costs of a pair with bookkeeping at several batch sizes; those of size 1 are already in `costs`."""
        found: list[CostModel] = []
        widths = [n for n in BATCH_WIDTHS if n <= max(LONGEST, longest) + 1]
        for size in sorted(set(sizes)):
            cost = replace(self.costs[draft])
            if size > 1:
                current().update(name=f"costs of forwards at batch {size}")
                meter = CostMeter(self.runner, self.drafts[draft], widths=widths, context=context, batch=size)
                cost = meter.run(9)
            found.append(self.with_overhead(draft, items, warp, cost))
        return found

    def with_overhead(self, draft: str, items: Sequence[Item], warp: LogitsWarper, cost: CostModel) -> CostModel:
        """The costs with the bookkeeping of a plain step, of a round beyond it, and of a drafted token.

        Bookkeeping is the time of a round outside the models' forwards; two draft lengths separate its parts. It is
        measured on the CPU only, where a forward has ended when its call returns, and 0 elsewhere.
        """
        if self.runner.device.type != "cpu":
            return cost
        batch, budget = cost.batch, self.options.max_new_tokens
        if batch > 1:
            items, budget = [items[i % len(items)] for i in range(batch)], min(budget, OVERHEAD_TOKENS)
        items = items[: max(batch, OVERHEAD_PROMPTS)]
        seconds, drafted = [], []  # of a round, of lengths 0, 2 and 8
        for length in (0, 2, 8):
            inputs = MethodInputs(
                self.runner, warp, self.drafts[draft] if length else None,
                options=MethodOptions(draft_length=length or None),
            )  # fmt: skip
            with time_forwards(self.runner, *self.drafts.values()) as timer:
                outputs = decode_texts(
                    self.runner,
                    build("vanilla" if length else BASELINE, inputs),
                    warp,
                    [item.ids for item in items],
                    rngs=[TorchRng(i, self.runner.device) for i in range(len(items))],
                    batch_size=batch,
                    max_new_tokens=budget,
                    stop_ids=self.stop_ids,
                )
            spent = sum(out.trace.total_seconds - out.trace.prefill_seconds for out in outputs)
            rounds = max(1, timer.forwards)
            seconds.append((spent - timer.seconds + timer.prompt_seconds) / rounds / cost.target_seconds)
            drafted.append(sum(sum(out.trace.drafted) for out in outputs) / rounds / batch)
        plain, short, long = seconds
        slope = max(0.0, (long - short) / (drafted[2] - drafted[1])) if drafted[2] > drafted[1] else 0.0
        rest = max(0.0, short - slope * drafted[1] - plain)
        return replace(cost, overhead=rest, draft_overhead=slope, step_overhead=plain)

    def text(self, ids: Sequence[int]) -> str:
        """The text of generated tokens."""
        return Detokenizer(self.tokenizer).text(ids)


def _shape(model: DraftModel) -> str:
    """A key that is equal for models that differ in their weights only."""
    if not isinstance(model, PreTrainedModel):
        return str(id(model))
    settings = model.config.to_dict() | {"_name_or_path": "", "dtype": str(model.dtype)}
    return json.dumps(settings, sort_keys=True, default=str)
