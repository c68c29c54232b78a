"""Settings of the corpus."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from jsonargparse.typing import NonNegativeInt, PositiveInt, restricted_number_type

from decode.errors import UserError
from decode.method_options import Share, check_numbers

if TYPE_CHECKING:
    ContextLength = int
    ShareBelowOne = float
else:
    ContextLength = restricted_number_type("ContextLength", int, (">=", 8))
    ShareBelowOne = restricted_number_type("ShareBelowOne", float, [(">=", 0), ("<", 1)])

Kind = Literal["auto", "pairs", "chat", "text"]
Overlong = Literal["drop", "cut"]


@dataclass
class PromptSettings:
    """How an instruct target writes prompts (Magpie, arXiv 2406.08464), and which of them are kept."""

    file: str | None = None
    """Prompts of your own beside those that the target writes (json, jsonl, csv or parquet, with the columns
    instruction and input, question, prompt, messages or turns); answers in it are not read."""
    file_share: Share = 0.5
    """With a file: share of the examples of each split that come from it, as far as it goes. 1: the target writes no
    prompts."""
    openings: list[str] = field(default_factory=list)
    """First words of prompts, which the target continues, in turn: what it is asked for where it is used, such as
    "Translate German to English: Der". A small model alone hardly writes such prompts."""
    openings_share: Share = 0.5
    """With openings: share of the samples that begin with one."""
    max_tokens: PositiveInt = 160
    """Longest prompt; a sample that has not ended by then is dropped."""
    batch_size: PositiveInt = 64
    """Prompts written together."""

    def opening(self, number: int) -> str:
        """Return the beginning of the sample of this number; samples with an opening are spread evenly."""
        before, after = (int(self.openings_share * n + 1e-9) for n in (number, number + 1))
        return self.openings[before % len(self.openings)] if self.openings and after > before else ""

    @property
    def writes(self) -> bool:
        """Whether the target has to write prompts."""
        return self.file is None or self.file_share < 1


@dataclass
class DataSettings:
    """The corpus: where its rows come from, how they become texts, how many and how long they are."""

    source: str = "arithmetic"
    """`arithmetic` (built in, no download), a preset (gsm8k, alpaca, mbpp, ...), a file or folder, a data set's name
    on the Hugging Face Hub (its branch, tag or commit behind an @), or `target`: an instruct target writes its own
    prompts, and answers them (see prompts; teacher.responses says how it answers)."""
    prompts: PromptSettings = field(default_factory=PromptSettings)
    """With source target: how prompts are written, chosen and mixed with those of a file."""
    train_file: str | None = None
    """Local training rows (json, jsonl, csv, tsv, parquet, arrow or txt; text also compressed, as .jsonl.gz); with a
    preset as source its template is used."""
    validation_file: str | None = None
    """Local validation rows; null: 5 % of the training rows are split off where the source has none. A hash of the
    prompt, or of a whole chat, decides, so equal prompts and chats stay in one split."""
    test_file: str | None = None
    """Local test rows, used for the final measurement only; null: split off like the validation rows."""
    kind: Kind = "auto"
    """pairs (prompt, response), chat (a list of {role, content} in the column messages or conversations, or prompt and
    chosen or completion), text (in the column text, no prompt); auto: by the columns."""
    prompt_template: str | None = None
    """How a row becomes a prompt: a format string over its columns, such as '{question}\\n' (there a line break, on the
    command line too); null: the preset's template, or the usual column names."""
    response_template: str | None = None
    """How a row becomes a response, such as '{answer}'; null: as for prompt_template."""
    chat_template: str | None = None
    """Jinja template of chats or a file with one, for models whose tokenizer has none; null: the tokenizer's."""
    chat: Literal["auto"] | bool = "auto"
    """Whether pairs are put into the chat template, as instruct models are served: the prompt is what the user says,
    the response what the assistant answers. auto: where the target's tokenizer has a template. See --show-example."""
    system: str | None = None
    """System message of chats that have none, and of pairs in the chat template; null: what the template writes."""
    template_args: dict[str, Any] = field(default_factory=dict)
    """Further variables of the chat template, such as {enable_thinking: false}."""
    train_examples: int | Literal["all"] | None = 20_000
    """Training examples at most (a sample chosen by the seed), all or null: every one; arithmetic makes exactly as
    many."""
    validation_examples: PositiveInt = 512
    """Validation examples at most: they choose the best checkpoint."""
    test_examples: PositiveInt = 512
    """Test examples at most: they are measured once, at the end."""
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
    streaming: bool = False
    """Read rows of the Hub, or of json lines, csv and parquet files, one by one and no more than may be needed (four
    times the examples asked for). The examples are then the first of the source, not a sample of all of it: not for
    sources sorted by topic."""
    loader_workers: NonNegativeInt = 0
    """Processes that prepare training batches ahead of the steps: useful where signals come from a slow disk or steps
    are short. The batches are the same. Not used (0) with texts that the draft writes itself."""

    @property
    def from_target(self) -> bool:
        """Whether the rows are prompts that the target writes, or that a file holds, for the target to answer."""
        return self.source == "target"

    @property
    def train_limit(self) -> int | None:
        """Training examples at most; None: all."""
        return self.train_examples if isinstance(self.train_examples, int) else None

    def key(self) -> dict[str, Any]:
        """Return the settings that decide what the examples are, not how they are made and read."""
        values = asdict(self) | {"chat_template": self.template()}
        return {name: value for name, value in values.items() if name != "loader_workers"}

    def template(self) -> str | None:
        """Return the text of the chat template, which may be in a file."""
        if self.chat_template is None or "{{" in self.chat_template or "{%" in self.chat_template:
            return self.chat_template
        try:
            return Path(self.chat_template).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise UserError(
                f"data.chat_template is {self.chat_template!r}, which is neither a Jinja template (it has no {{{{ or "
                f"{{%) nor a file that can be read ({error}; the path is relative to {Path.cwd()})"
            ) from error

    def templates(self) -> tuple[str, str] | None:
        """Return the templates of these settings, with line breaks and tabs that a shell or YAML left escaped."""
        if self.prompt_template is None or self.response_template is None:
            return None
        prompt, response = (
            re.sub(r"(?<!\\)\\([nt])", lambda found: "\n" if found[1] == "n" else "\t", template)
            for template in (self.prompt_template, self.response_template)
        )
        return prompt, response

    def validate(self) -> None:
        """Check every value that can be judged without reading data."""
        check_numbers(self, "data.")
        self.template()
        if self.train_limit is None and (self.from_target or (self.source == "arithmetic" and self.train_file is None)):
            raise UserError(
                f"data.train_examples is {self.train_examples}, but data.source {self.source} makes as many examples "
                "as are asked for: give a number"
            )
        if self.train_limit is not None and self.train_limit < 1:
            raise UserError(f"data.train_examples is {self.train_limit}: give at least 1")
        if (self.prompt_template is None) != (self.response_template is None):
            raise UserError("data.prompt_template and data.response_template go together: give both or neither")
        files = {f"data.{split}_file": getattr(self, f"{split}_file") for split in ("train", "validation", "test")}
        for key, path in (files | {"data.prompts.file": self.prompts.file}).items():
            if path is not None and not Path(path).is_file():
                raise UserError(f"{key}: there is no file {path!r}; check the path (it is relative to {Path.cwd()})")
        if not self.from_target:
            return
        if self.chat is False or self.kind not in ("auto", "chat"):
            raise UserError(
                f"data.source is target, whose prompts are chats, and data.chat is {self.chat}, data.kind {self.kind}: "
                "leave both at auto"
            )
        if given := [key for key, path in files.items() if path is not None]:
            raise UserError(
                f"data.source is target and {given[0]} is set: give prompts of your own with data.prompts.file, or "
                "name the file as data.source with teacher.responses.source target"
            )
        if any(not opening.strip() for opening in self.prompts.openings):
            raise UserError(
                "data.prompts.openings holds an empty text: leave it out, and lower openings_share for more prompts "
                "without an opening"
            )
