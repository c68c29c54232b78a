"""What the corpus is made of: one dataclass, one key a line in the YAML's ``data`` section."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from jsonargparse.typing import ClosedUnitInterval, NonNegativeInt, PositiveInt, restricted_number_type

from decode.errors import UserError
from decode.method_options import Share, Temperature, check_numbers


@dataclass
class PromptSettings:
    """How an instruct target writes prompts (Magpie, arXiv 2406.08464), and which of them are kept."""

    file: str | None = None
    """Prompts of one's own beside those that the target writes (json, jsonl, csv or parquet, with the columns
    instruction and input, question, prompt, messages or turns); answers in it are not read."""
    file_share: Share = 0.5
    """With a file: share of the examples of each split that come from it, as far as it goes. 1: the target writes no
    prompts."""
    openings: list[str] = field(default_factory=list)
    """First words of prompts, which the target continues, in turn: what it is asked for where it is used, such as
    "Translate German to English: Der". Left alone, a small model hardly writes such prompts."""
    openings_share: Share = 0.5
    """With openings: share of the samples that begin with one."""
    temperature: Temperature = 1.0
    """Sampling temperature of the prompts."""
    top_p: Share = 0.95
    """Prompts are sampled from the smallest set of tokens with this probability; 1 leaves in what is hardly ever
    said."""
    min_tokens: PositiveInt = 4
    """Shortest prompt kept."""
    max_tokens: PositiveInt = 160
    """Longest prompt; a sample that has not ended by then is dropped."""
    ascii_letters: ClosedUnitInterval = 0.9
    """Least share of the letters of a prompt that are ASCII: a cheap rule for English. 0 keeps every language."""
    same_start: PositiveInt = 10
    """A prompt is dropped as a near duplicate if its first same_start words (after the opening) equal an earlier
    prompt's. See also overlap."""
    overlap: Share = 0.6
    """A prompt is also dropped as a near duplicate if at least this share of its word trigrams occurs in one earlier
    prompt; 1 requires all of them."""
    tries: PositiveInt = 8
    """Samples at most for each prompt that is wanted; the run stops if too few of them can be used."""
    batch_size: PositiveInt = 64
    """Prompts written together."""

    def opening(self, number: int) -> str:
        """What the sample of this number begins with; the samples with an opening are spread evenly."""
        before, after = (int(self.openings_share * n + 1e-9) for n in (number, number + 1))
        return self.openings[before % len(self.openings)] if self.openings and after > before else ""

    @property
    def writes(self) -> bool:
        """Whether the target has to write prompts."""
        return self.file is None or self.file_share < 1

    def validate(self) -> None:
        """Checks the file and that the limits leave something."""
        if self.file is not None and not Path(self.file).is_file():
            raise UserError(
                f"data.prompts.file: there is no file {self.file!r}; check the path (it is relative to {Path.cwd()})"
            )
        if any(not opening.strip() for opening in self.openings):
            raise UserError(
                f"data.prompts.openings holds an empty text, {self.openings!r}: leave it out, and lower openings_share "
                "for more prompts without an opening"
            )
        if self.min_tokens > self.max_tokens:
            raise UserError(
                f"data.prompts.min_tokens is {self.min_tokens} and max_tokens {self.max_tokens}: no prompt could be "
                "kept; raise the one or lower the other"
            )


if TYPE_CHECKING:
    ContextLength = int
    MinorShare = float
    ShareBelowOne = float
else:
    ContextLength = restricted_number_type("ContextLength", int, (">=", 8))
    MinorShare = restricted_number_type("MinorShare", float, [(">", 0), ("<", 0.5)])
    ShareBelowOne = restricted_number_type("ShareBelowOne", float, [(">=", 0), ("<", 1)])


Kind = Literal["auto", "pairs", "chat", "text"]
Overlong = Literal["drop", "cut"]


@dataclass
class DataSettings:
    """The corpus: where its rows come from, how they become texts, how many and how long they are."""

    source: str = "arithmetic"
    """`arithmetic` (built in, no download), a preset (gsm8k, alpaca, mbpp, ...), a file or folder, a data set's name
    on the Hugging Face Hub, or `target`: an instruct target writes its own prompts, and answers them (see prompts;
    teacher.responses says how it answers)."""
    prompts: PromptSettings = field(default_factory=PromptSettings)
    """With source target: how prompts are written, chosen and mixed with those of a file."""
    hub_config: str | None = None
    """Configuration of the Hub data set, where it has several; null: the preset's, or the only one."""
    revision: str | None = None
    """Branch, tag or commit of the Hub data set; null: as it is at the time."""
    train_file: str | None = None
    """Local training rows (json, jsonl, csv, parquet or txt); with a preset as source its template is used."""
    validation_file: str | None = None
    """Local validation rows; null: a share of the training rows is split off (see validation_fraction)."""
    test_file: str | None = None
    """Local test rows, used for the final measurement only; null: split off like the validation rows."""
    kind: Kind = "auto"
    """pairs (prompt, response), chat (a list of messages), text (no prompt); auto: by the columns."""
    prompt_template: str | None = None
    """How a row becomes a prompt: a format string over its columns, such as '{question}\\n' (there a line break, on the
    command line too); null: the preset's template, or the usual column names."""
    response_template: str | None = None
    """How a row becomes a response, such as '{answer}'; null: as for prompt_template."""
    messages_column: str = "messages"
    """Column of a chat: a list of {role, content}, or of ShareGPT's {from, value}."""
    chat_template: str | None = None
    """Jinja template of chats, for models whose tokenizer has none; null: the tokenizer's."""
    chat: Literal["auto"] | bool = "auto"
    """Whether pairs are put into the chat template, as instruct models are served: the prompt is what the user says,
    the response what the assistant answers. auto: where the target's tokenizer has a template. See --show-example."""
    system: str | None = None
    """System message of chats that have none, and of pairs in the chat template; null: what the template writes."""
    template_args: dict[str, Any] = field(default_factory=dict)
    """Further variables of the chat template, such as {enable_thinking: false}."""
    text_column: str = "text"
    """Column of plain text."""
    train_examples: int | Literal["all"] | None = 20_000
    """Training examples at most (a sample chosen by the seed), all or null: every one; arithmetic makes exactly as
    many."""
    validation_examples: PositiveInt = 512
    """Validation examples at most: they choose the best checkpoint."""
    test_examples: PositiveInt = 512
    """Test examples at most: they are measured once, at the end."""
    validation_fraction: MinorShare = 0.05
    """Share of the training rows split off for validation, and again for test, where the source has none. A hash of
    the prompt decides, so equal prompts stay in one split."""
    max_length: ContextLength = 512
    """Longest example in tokens, prompt and response together; the block length of plain text."""
    overlong: Overlong = "drop"
    """What happens to longer examples: drop them, or cut the end of the response."""
    difficulty: int = 1
    """Arithmetic only: 1 (one or two calculations, results below 100), 2 (two or three, below 1000) or 3 (two to four,
    below 10000)."""
    tokenizer: str | None = None
    """Folder, Hub name (its revision behind an @) or GGUF file of the tokenizer; null: the target's, or one trained
    on the texts."""
    tokenizer_vocab_size: PositiveInt = 1024
    """Largest vocabulary of a tokenizer that is trained here."""
    workers: PositiveInt | None = None
    """Processes that tokenise; null: as many as cores where there are many rows. The result is kept in the run's
    work/corpus, and read from there by all processes of a training and by later runs of it."""
    streaming: bool = False
    """Read rows of the Hub, or of json lines, csv and parquet files, one by one and no more than may be needed (four
    times the examples asked for). The examples are then the first of the source, not a sample of all of it: not for
    sources sorted by topic."""
    loader_workers: NonNegativeInt = 0
    """Processes that prepare training batches ahead of the steps: useful where signals come from a slow disk or steps
    are short. The batches are the same. Not used (0) with texts that the draft writes itself."""
    trust_remote_code: bool = False
    """Whether the tokenizer's repository may run its own Python code here."""

    @property
    def from_target(self) -> bool:
        """Whether the rows are prompts that the target writes, or that a file holds, for the target to answer."""
        return self.source == "target"

    @property
    def train_limit(self) -> int | None:
        """Training examples at most; None: all."""
        return self.train_examples if isinstance(self.train_examples, int) else None

    def key(self) -> dict[str, Any]:
        """The settings that decide what the examples are, not how they are made and read."""
        return {name: value for name, value in asdict(self).items() if name not in ("workers", "loader_workers")}

    def templates(self) -> tuple[str, str] | None:
        """The templates of one's own; line breaks and tabs that a shell or YAML left as two characters are made one."""
        if self.prompt_template is None or self.response_template is None:
            return None
        return _unescaped(self.prompt_template), _unescaped(self.response_template)

    def validate(self) -> None:
        """Checks every value that can be judged without reading data."""
        check_numbers(self, "data.")
        if self.train_limit is None and self.source == "arithmetic" and self.train_file is None:
            raise UserError(
                "data.train_examples is all, but arithmetic makes as many problems as are asked for: give a number"
            )
        if self.from_target:
            self._validate_prompts()
        if self.train_limit is not None and self.train_limit < 1:
            raise UserError(f"data.train_examples is {self.train_limit}: give at least 1")
        for key in ("train_file", "validation_file", "test_file"):
            path = getattr(self, key)
            if path is not None and not Path(path).is_file():
                raise UserError(
                    f"data.{key}: there is no file {path!r}; check the path (it is relative to {Path.cwd()})"
                )
        if (self.prompt_template is None) != (self.response_template is None):
            raise UserError("data.prompt_template and data.response_template go together: give both or neither")

    def _validate_prompts(self) -> None:
        """What holds for prompts that the target writes."""
        self.prompts.validate()
        if self.train_limit is None:
            raise UserError(
                "data.train_examples is all, but with data.source target as many prompts are made as are asked for: "
                "give a number"
            )
        if self.chat is False or self.kind not in ("auto", "chat"):
            raise UserError(
                f"data.source is target, whose prompts are chats, and data.chat is {self.chat}, data.kind {self.kind}: "
                "leave both at auto"
            )
        for key in ("train_file", "validation_file", "test_file"):
            if getattr(self, key) is not None:
                raise UserError(
                    f"data.source is target and data.{key} is {getattr(self, key)!r}: prompts of one's own are given "
                    "with data.prompts.file, or name the file as data.source with teacher.responses.source target"
                )


def _unescaped(template: str) -> str:
    """Line breaks and tabs in place of backslash n and backslash t; a doubled backslash is left alone."""
    return re.sub(r"(?<!\\)\\([nt])", lambda found: "\n" if found[1] == "n" else "\t", template)
