"""Settings of the data."""

from dataclasses import asdict, dataclass, field, replace
from glob import glob
from pathlib import Path
from typing import Literal, get_args

from jsonargparse.typing import NonNegativeInt, PositiveInt

from decode.errors import UserError
from decode.measure.suites import PRESETS
from decode.options import ChatSettings
from distill.config.base import Split, Values, refuse


@dataclass
class PromptSettings:
    """How an instruct target writes prompts of its own (Magpie, arXiv 2406.08464)."""

    file: str | None = None
    """File of prompts for all splits (columns: question, prompt, messages, ...); the target writes the rest."""
    openings: list[str] = field(default_factory=list)
    """First words of every second prompt, in turn, such as "Translate German to English: Der", for small models."""

    def opening(self, number: int) -> str:
        """Return the beginning of the prompt of this number: every second one has an opening, in turn."""
        return self.openings[number // 2 % len(self.openings)] if self.openings and number % 2 else ""


@dataclass
class DataSettings(ChatSettings):
    """The corpus: where its rows come from, how they become texts, how many there are and how long they may be."""

    source: str = "arithmetic"
    """`arithmetic` (built in), a preset (gsm8k, alpaca, ...), a file, a pattern such as data/*.parquet, a data set
    on the Hub (name@revision), or `target`: an instruct target writes the prompts. By its columns a row is a pair, a
    chat or a text."""
    files: dict[Split, str] = field(default_factory=dict)
    """Local files of the splits, or patterns: {train: a-*.jsonl, test: b.csv}. A missing one is 5 % of the training
    rows."""
    prompts: PromptSettings = field(default_factory=PromptSettings)
    prompt_template: str | None = None
    """A text with columns in braces, such as '{question}\\n'; {{ is a brace. null: the preset's, or usual ones."""
    response_template: str | None = None
    """How a row becomes a response, such as '{answer}'. null: as for prompt_template."""
    chat: Literal["auto"] | bool | None = "auto"
    train_examples: PositiveInt | Literal["all"] | None = 20_000
    """Training examples at most, a sample chosen by the seed; all or null: every one."""
    validation_examples: PositiveInt = 512
    """Validation examples at most: they choose the best checkpoint."""
    test_examples: PositiveInt = 512
    """Test examples at most: they are measured once, at the end."""
    max_length: PositiveInt = 512
    """Longest example in tokens, prompt and response together. Memory and time of a step grow with it."""
    overlong: Literal["drop", "cut"] = "drop"
    """What happens to longer examples: they are dropped, or the end of the response is cut off."""
    tokenizer: str | None = None
    """Folder, Hub name or GGUF file of the tokenizer. null: the target's, or 1,024 ids trained on the texts."""
    loader_workers: NonNegativeInt = 0
    """Processes that prepare batches ahead of the steps, for slow disks or short steps; 0: two where states are read
    from disk for a GPU. Not used with on_policy."""

    @property
    def from_target(self) -> bool:
        """Whether the rows are prompts that the target writes, or that a file holds, for the target to answer."""
        return self.source == "target"

    @property
    def limits(self) -> dict[str, int]:
        """Examples of each split at most; 0: all."""
        train = self.train_examples if isinstance(self.train_examples, int) else 0
        return {"train": train, "validation": self.validation_examples, "test": self.test_examples}

    def key(self) -> Values:
        """Return the settings that decide what the examples are, not how they are made and read."""
        return asdict(replace(self, chat_template=self.template(), loader_workers=0))

    def templates(self) -> tuple[str, str] | None:
        """Return the templates of these settings, with line breaks and tabs that a shell or YAML left escaped."""
        if self.prompt_template is None or self.response_template is None:
            return None
        prompt, response = (
            text.replace("\\n", "\n").replace("\\t", "\t") for text in (self.prompt_template, self.response_template)
        )
        return prompt, response

    def validate(self) -> None:
        """Check every value that can be judged without reading data."""
        self.template()
        endless = self.from_target or (self.source == "arithmetic" and "train" not in self.files)
        preset = PRESETS.get(self.source)
        untrained = preset is not None and "train" not in preset.splits and "train" not in self.files
        unpaired = (self.prompt_template is None) != (self.response_template is None)
        target = "and data.source is target"
        for split, path in self.files.items():
            if not (Path(path).is_file() or glob(path)):
                raise UserError(f"data.files.{split}: there is no file {path!r}; check the path (below {Path.cwd()})")
        refuse(
            self,
            (self.files.keys() - {*get_args(Split)}, "files", "expected files for train, validation and test"),
            (untrained, "source", "and has no training rows on the Hub: give some with data.files.train"),
            (endless and not self.limits["train"], "train_examples", f"and {self.source} has no end: give a number"),
            (unpaired, "prompt_template", "and goes with data.response_template: give both or neither"),
            (self.from_target and self.chat is False, "chat", f"{target}, whose prompts are chats: set it to auto"),
            (self.from_target and self.files, "files", f"{target}: give prompts with data.prompts.file, or name "
             "the file as data.source with teacher.responses.source target"),
            where="data.",
        )  # fmt: skip
