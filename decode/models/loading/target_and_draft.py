"""A target with its tokenizer and its draft, opened once and used for any number of texts and measurements."""

import os
from dataclasses import dataclass
from functools import cached_property

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from decode.core.runner_protocol import Runner
from decode.models.loading.choose_runner import open_draft_runner, open_runner
from decode.models.loading.open_model import load_model, load_tokenizer, open_draft
from decode.models.other_tokenizer import DraftModel


@dataclass
class Pair:
    """A target and, where there is one, the draft model or feature head that drafts for it."""

    target: PreTrainedModel  # the target
    tokenizer: PreTrainedTokenizerBase  # the target's
    draft: DraftModel | None = None  # the draft
    target_name: str = ""  # the folder or Hub name that the target was loaded from
    draft_name: str | None = None  # the draft's
    compile: str = "none"  # see `decode.models.loading.choose_runner.open_runner`
    pack: str = "auto"  # see `decode.models.loading.choose_runner.open_runner`

    @cached_property
    def runner(self) -> Runner:
        """The target's forward with its cache."""
        return open_runner(self.target, compile=self.compile, pack=self.pack)

    @cached_property
    def draft_runner(self) -> Runner | None:
        """The draft's."""
        return None if self.draft is None else open_draft_runner(self.draft, self.target, self.compile, self.pack)


def load(
    target: str | os.PathLike[str],
    draft: str | os.PathLike[str] | None = None,
    *,
    device: str = "auto",
    dtype: str = "auto",
    device_map: str | None = None,
    trust_remote_code: bool = False,
    draft_vocabulary: str = "same",
    compile: str = "none",
    pack: str = "auto",
) -> Pair:
    """Open a target and, if given, a draft for it.

    Args:
        target: folder, Hub name or GGUF file.
        draft: the same of a draft model, or the folder of a feature head; ``None`` for methods without one.
        device: ``auto`` is the first GPU, without one the CPU.
        dtype: ``auto`` is the checkpoint's on a GPU, float32 on a CPU.
        device_map: passed to transformers, to spread the target over several devices.
        trust_remote_code: run the Python code that a Hub repository brings.
        draft_vocabulary: ``intersection`` takes a draft whose tokenizer differs from the target's; ``same`` refuses it.
        compile: see `decode.models.loading.choose_runner.open_runner`.
        pack: see `decode.models.loading.choose_runner.open_runner`.

    Raises:
        UserError: a model that cannot be read, or two that do not fit each other.
    """
    tokenizer = load_tokenizer(target, trust_remote_code=trust_remote_code)
    model = load_model(target, device=device, dtype=dtype, device_map=device_map, trust_remote_code=trust_remote_code)
    pair = Pair(model, tokenizer, target_name=str(target), compile=compile, pack=pack)
    if draft is not None:
        pair.draft_name = str(draft)
        pair.draft = open_draft(
            draft, model, tokenizer, vocabulary=draft_vocabulary, trust_remote_code=trust_remote_code
        )
    return pair
