"""Prompts that the target writes for itself (``data.source: target``), and prompts from a file beside them."""

from dataclasses import dataclass, field
from pathlib import Path

from jsonargparse.typing import ClosedUnitInterval, PositiveInt

from decode.core.errors import UserError
from decode.core.method_options import Share, Temperature


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
