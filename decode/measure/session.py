"""The models, prompts and costs that a benchmark works with."""

import statistics
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from decode.core.draft import Ids, foreign
from decode.core.sampling import LogitsWarper
from decode.errors import UserError
from decode.files import Fields
from decode.measure import machine
from decode.measure.costs import LENGTHS, WIDE, Costs, measure_costs
from decode.measure.suites import Prompt, Suite
from decode.models.check import open_draft_runner, open_runner
from decode.models.open import DraftModel, stop_ids
from decode.models.tokens import Detokenizer, Message, chat_ids, check_template, control_token, prompt_ids, user_says
from decode.options import ChatSettings
from decode.writing import draws_of_loop, write_texts

ANSWERED_AT_ONCE = 16  # first turns of chats that the target answers in a batch
TIMED = 6  # prompts of middle length whose texts costs are timed in, unless a batch needs more


@dataclass
class BenchOptions:
    """How a benchmark is run."""

    max_new_tokens: int = 128  # budget of each text
    repeats: int = 1  # runs of each method on each prompt
    seed: int = 0  # of sampling
    # put prompts into the chat template; later turns of a prompt follow the target's own greedy answers
    chat: ChatSettings | None = None
    warp: LogitsWarper = field(default_factory=LogitsWarper)  # sampling settings except the temperature
    threads: int | None = None  # of torch while speed is measured; None measures one against all
    datastore: str | Path | None = None  # folder of the stores of rest and adaptix
    pack: str = "auto"  # see `decode.models.check.open_runner`
    beyond: int = 0  # tokens drafted behind the longest text that contexts have to hold too


@dataclass
class Item:
    """One prompt, or one turn of a chat, as token ids."""

    prompt: Prompt
    ids: Ids


class Session:
    """A target and its drafts, opened for measurement on this machine.

    Attributes:
        runner: the target's runner.
        drafts: the drafts' runners by name.
        threads: the number of threads while speed is measured; torch's own stays as it was.
        costs: costs by draft name; None is the target alone.
        notes: remarks on a suite's prompts, by suite.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        drafts: Mapping[str, DraftModel] | None,
        tokenizer: PreTrainedTokenizerBase,
        options: BenchOptions,
    ) -> None:
        self.options, self.model, self.tokenizer = options, model, tokenizer
        self.draft_models = dict(drafts or {})
        pack = self.options.pack
        self.runner = open_runner(model, pack=pack)
        self.threads, reason = machine.choose_threads(self.runner, self.options.threads)
        self.drafts = {name: open_draft_runner(draft, model, pack) for name, draft in self.draft_models.items()}
        opened = {"target": self.runner} | self.drafts
        self.how = [reason, *(f"{name}: {runner.packing}" for name, runner in opened.items() if runner.packing)]
        self.stop_ids = stop_ids(model, tokenizer)
        self.costs: dict[str | None, Costs] = {}
        self.notes: dict[str, str] = {}

    def facts(self) -> Fields:
        """The machine, the threads and the weight layouts, for reports."""
        return machine.describe(self.runner.device) | {"threads": self.threads, "note": "; ".join(self.how)}

    def text(self, ids: Ids) -> str:
        """The text of generated tokens."""
        return Detokenizer(self.tokenizer).text(ids)

    def items(self, suite: Suite) -> list[Item]:
        """All prompts (of chats, all turns) that fit the contexts together with their answers."""
        notes, prompts = [], suite.prompts
        if self.options.chat:
            asked = [
                p
                for p in prompts
                if not control_token(self.tokenizer, [{"content": text} for text in (p.system, *p.said)])
            ]
            if spelt := len(prompts) - len(asked):
                notes.append(f"{spelt} prompts are left out, whose text spells a control token of the tokenizer")
            items = self._turns(asked, self.options.chat)
        else:
            plain = [p for p in prompts if not (p.system or p.variables)]
            if lost := len(prompts) - len(plain):
                notes.append(f"{lost} prompts are left out, whose system message or variables need a chat template")
            items = [Item(p, list(p.ids) or prompt_ids(self.tokenizer, p.text)) for p in plain]
            if several := sum(len(prompt.turns) > 1 for prompt in prompts):
                notes.append(f"of {several} prompts the first turn alone is asked, since later ones need a template")
        if unknown := foreign(chain(*(item.ids for item in items)), self.runner.vocab_size, "a prompt holds"):
            raise UserError(f"{suite.name}: {unknown}")
        opened = {"the target": self.runner} | {f"the draft {name}": runner for name, runner in self.drafts.items()}
        whose, room = min(((who, runner.limit) for who, runner in opened.items()), key=lambda pair: pair[1])
        new = self.options.max_new_tokens + self.options.beyond
        fitting = [
            item
            for item in items  # the last token is never read
            if (end := len(item.ids) + new - 1) <= room and not len(item.ids) <= self.runner.boundary < end
        ]
        missing = len(items) - len(fitting)
        left_out = (
            f"{missing} of {len(items)} prompts do not fit the context of {whose}, {room} tokens, "
            f"together with {new} new ones"
        )
        if not fitting:
            raise UserError(f"{suite.name}: {left_out}; lower max_new_tokens or take another suite")
        if missing:
            notes.append(left_out)
        if notes:
            self.notes[suite.name] = "; ".join(notes)
        return fitting

    def _turns(self, prompts: Sequence[Prompt], shape: ChatSettings) -> list[Item]:
        """The turns of chats, each after the target's greedy answers to the earlier ones."""
        for system in filter(None, {prompt.system for prompt in prompts}):
            check_template(self.tokenizer, system)
        chats = [(prompt, list[Message](), list[Item]()) for prompt in prompts]
        for turn in range(max((len(prompt.said) for prompt in prompts), default=0)):
            going = [chat for chat in chats if turn < len(chat[0].said)]
            if turn:
                asked = [items[-1].ids for *_, items in going]
                answers = self.written(asked, replace(self.options.warp, temperature=0.0))
                for (_, history, _), answer in zip(going, answers):
                    history.append({"role": "assistant", "content": self.text(answer)})
            for prompt, history, items in going:
                history += user_says(prompt.said[turn], None if turn else prompt.system or shape.system)
                items.append(Item(prompt, chat_ids(self.tokenizer, history, shape.args() | prompt.variables)))
        return [item for *_, items in chats for item in items]

    def written(
        self,
        prompts: Sequence[Ids],
        warp: LogitsWarper,
        batch_size: int = ANSWERED_AT_ONCE,
        progress: Callable[[int], None] | None = None,
    ) -> list[Ids]:
        """New tokens that the target writes after each prompt; none if the prompt fills the context."""
        longest, limit = self.options.max_new_tokens, self.runner.limit
        return write_texts(
            self.runner,
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
        drafts: Iterable[str | None],
        *,
        longest: int = 1,
        batch_sizes: Collection[int] = (1,),
        temperature: float = 0.0,
    ) -> None:
        """Measure `costs` of drafts (None: of a target that is given drafts for nothing).

        Rounds are timed in the middle of the target's texts for the items of middle length; `longest` is the largest
        draft length in use.
        """
        count, warp = max(TIMED, *batch_sizes), replace(self.options.warp, temperature=temperature)
        middle = statistics.median(len(item.ids) for item in items)
        ids = sorted((item.ids for item in items), key=lambda ids: abs(len(ids) - middle))[:count]
        half, draws = max(1, self.options.max_new_tokens // 2), draws_of_loop(self.options.seed)
        with machine.using_threads(self.threads):
            begun = write_texts(self.runner, ids, warp, budgets=half, stop_ids=(), draws=draws)
            texts = [prompt + new for prompt, new in zip(ids, begun)]
            for name in drafts:
                draft = self.drafts[name] if name else None
                lengths = {*LENGTHS, longest} if draft else WIDE
                self.costs[name] = measure_costs(self.runner, draft, warp, texts, lengths, batch_sizes)
