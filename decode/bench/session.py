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
from decode.bench.costs import LONGEST, CostModel, measure_costs, with_bookkeeping
from decode.bench.suites import Prompt, Suite
from decode.errors import UserError
from decode.models.choose_runner import open_draft_runner, open_runner
from decode.models.loading import stop_ids
from decode.models.other_tokenizer import DraftModel, ForeignDraft
from decode.models.tokens import Detokenizer, Message, chat_ids, control_token, prompt_ids, user_says
from decode.models.writing import draws_of_loop, write_texts
from decode.progress import current
from decode.sampling import LogitsWarper

ANSWERED_AT_ONCE = 16  # first turns of chats that the target answers in a batch
WIDE = (24, 32, 48, 64, 96)  # more n of v(n), for methods that verify trees
BATCH_WIDTHS = (2, 3, 4, 5, 6, 8, 11, 16, 24)  # n of v(n) for several sequences


@dataclass
class BenchOptions:
    """How a benchmark is run."""

    max_new_tokens: int = 128  # budget of each text
    repeats: int = 3  # runs of each method on each prompt
    seed: int = 0  # of sampling and of the bootstrap
    # put prompts into the chat template; later turns of a prompt follow the target's own greedy answers
    chat: bool = False
    system: str | None = None  # system message of the chats
    warp: LogitsWarper = field(default_factory=LogitsWarper)  # sampling settings except the temperature
    threads: int | None = None  # of torch; None measures one against all
    datastore: Path | None = None  # folder of a REST datastore
    trigrams: Path | None = None  # folder of an Adaptix table
    samples: int = 1  # prompts of each suite whose annotated texts are kept
    costs: bool = True  # measure c and v(n), which `predicted_speedup` needs
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
        runner: the target's runner.
        drafts: the drafts' runners by name.
        packing: the weight layouts of the target and of each draft, in sentences.
        threads: the number of threads and why it was chosen.
        costs: costs by draft name (None is the target alone) and batch size.
        notes: remarks on a suite's prompts, by suite.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        drafts: Mapping[str, DraftModel] | None,
        tokenizer: PreTrainedTokenizerBase,
        options: BenchOptions | None = None,
    ) -> None:
        self.options = options or BenchOptions()
        self.model, self.tokenizer = model, tokenizer
        self.draft_models: dict[str, DraftModel] = dict(drafts or {})
        if self.options.threads:  # the layout of weights is chosen by measurement
            torch.set_num_threads(self.options.threads)
        pack = self.options.pack
        self.runner = open_runner(model, pack=pack)
        self.drafts = {name: open_draft_runner(draft, model, pack) for name, draft in self.draft_models.items()}
        opened = {"target": self.runner} | self.drafts
        self.packing = [f"{name}: {runner.packing}" for name, runner in opened.items() if runner.packing]
        self.threads = machine.set_threads(self.runner, self.options.threads)
        self.stop_ids: Collection[int] = stop_ids(model, tokenizer)
        self.costs: dict[str | None, dict[int, CostModel]] = {}
        self.notes: dict[str, str] = {}

    def facts(self) -> dict[str, Any]:
        """The machine, the threads and the weight layouts, for reports."""
        return machine.describe(self.runner.device) | {"note": "; ".join([self.threads, *self.packing])}

    def text(self, ids: Sequence[int]) -> str:
        """The text of generated tokens."""
        return Detokenizer(self.tokenizer).text(ids)

    def items(self, suite: Suite) -> list[Item]:
        """All prompts (of chats, all turns) that fit the contexts together with their answers."""
        notes = [suite.note]
        if self.options.chat:
            texts = [[{"content": text} for text in prompt.turns or (prompt.text,)] for prompt in suite.prompts]
            asked = [p for p, said in zip(suite.prompts, texts) if not control_token(self.tokenizer, said)]
            if spelt := len(suite.prompts) - len(asked):
                notes.append(f"{spelt} prompts are left out, whose text spells a control token of the tokenizer")
            items = self._turns(asked)
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
        ids = [i for item in fitting for i in item.ids]
        if not self.options.chat and (several := sum(len(prompt.turns) > 1 for prompt in suite.prompts)):
            notes.append(f"of {several} prompts the first turn alone is asked, since later ones need a chat template")
        if len(fitting) < len(items):
            notes.append(f"{len(items) - len(fitting)} of {len(items)} prompts do not fit the context of {room} tokens")
        for name, draft in self.draft_models.items():
            if isinstance(draft, ForeignDraft):
                notes.append(f"{name}: {draft.vocabulary.sentence(ids)}")
        if any(notes):
            self.notes[suite.name] = "; ".join(filter(None, notes))
        return fitting

    def _turns(self, prompts: Sequence[Prompt]) -> list[Item]:
        """The turns of chats, each after the target's greedy answers to the earlier ones."""
        chats: list[list[Item]] = [[] for _ in prompts]
        histories: list[list[Message]] = [[] for _ in prompts]
        said = [prompt.turns or (prompt.text,) for prompt in prompts]
        greedy = replace(self.options.warp, temperature=0.0)
        for turn in range(max(map(len, said), default=0)):
            going = [i for i, texts in enumerate(said) if turn < len(texts)]
            for i in going:
                histories[i] += user_says(said[i][turn], None if turn else self.options.system)
                chats[i].append(Item(prompts[i], chat_ids(self.tokenizer, histories[i]), said[i][turn]))
            answered = [i for i in going if turn + 1 < len(said[i])]
            for i, answer in zip(answered, self.written([chats[i][-1].ids for i in answered], greedy)):
                histories[i].append({"role": "assistant", "content": self.text(answer)})
        return [item for chat in chats for item in chat]

    def written(
        self,
        prompts: Sequence[list[int]],
        warp: LogitsWarper,
        batch_size: int = ANSWERED_AT_ONCE,
        progress: Callable[[int], None] | None = None,
    ) -> list[list[int]]:
        """New tokens that the target writes after each prompt; none if the prompt fills the context."""
        longest, limit = self.options.max_new_tokens, self.runner.limit
        return write_texts(
            self.model,
            prompts,
            warp,
            budgets=[min(longest, limit - len(ids)) for ids in prompts],
            stop_ids=self.stop_ids,
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
        batch_sizes: Iterable[int] = (1,),
        bookkeeping: Collection[str] = (),
        warp: LogitsWarper | None = None,
    ) -> None:
        """Measure `costs` of the target alone and of each draft, in the middle of a typical text.

        Args:
            items: prompts, whose median length counts.
            drafts: names of the drafts in use.
            longest: the largest draft length in use.
            trees: also measure the widths of draft trees.
            batch_sizes: those of the drafts' costs; those of size 1 are always measured.
            bookkeeping: drafts whose bookkeeping is measured even if there is one batch size.
            warp: logits to probabilities, for the bookkeeping.
        """
        context = int(statistics.median(len(i.ids) for i in items)) + self.options.max_new_tokens // 2
        widths = [*range(1, LONGEST + 2), *range(20, longest + 5, 4), *(WIDE if trees else ())]
        larger = [n for n in BATCH_WIDTHS if n <= max(LONGEST, longest) + 1]
        several = sorted({size for size in batch_sizes if size > 1})
        alike: dict[Any, CostModel] = {}  # drafts of one shape cost the same, so one of them is timed
        self.costs = {}
        for name in (None, *drafts):
            draft = None if name is None else self.drafts[name]
            shape = None if name is None or draft is None else (_shape(self.draft_models[name]), draft.packing)
            if shape not in alike:
                alike[shape] = measure_costs(self.runner, draft, widths=widths, context=context)
            costs = self.costs[name] = {1: alike[shape]}
            if draft is None or not (several or name in bookkeeping):
                continue
            for size in several:
                current().update(name=f"costs of forwards at batch {size}")
                costs[size] = measure_costs(self.runner, draft, widths=larger, context=context, batch=size)
            for size, cost in costs.items():
                prompts = [item.ids for item in items]
                costs[size] = with_bookkeeping(cost, self.runner, draft, warp or self.options.warp, prompts)


def _shape(model: DraftModel) -> str:
    """A key that is equal for models that differ in their weights only."""
    if not isinstance(model, PreTrainedModel):
        return str(id(model))
    settings = model.config.to_dict() | {"_name_or_path": "", "dtype": str(model.dtype)}
    return json.dumps(settings, sort_keys=True, default=str)
