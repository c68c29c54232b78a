"""Labels: whether the target accepts the token that an exit layer would draft at a position.

Greedy decoding has one label, ``match``: the argmax of the exit equals the argmax of the target. Sampled decoding has
two: ``accept``, the acceptance probability min(1, p(x)/q(x)) of a drafted token x ~ q, and ``top-p``, whether x is in
the target's top-p set (AdaSPEED, section 3.2). p and q are warped as decoding warps them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from datasets import Dataset
from torch import Tensor
from transformers import PreTrainedModel

from decode.core.sampling import LogitsWarper, Prefixes
from decode.core.verify import pick, ratio
from decode.errors import UserError
from decode.models.huggingface import context_of
from decode.models.open import NEUTRAL, described, own_warp, stop_ids
from decode.writing import GROUP
from distill.data.dataset import Examples
from distill.data.writing import Write, written_here
from distill.files import fingerprint
from distill.fingerprints import inputs
from distill.kept import TEXT_IDS, Kept
from distill.responses.target import write_answers
from distill.results.evaluate import Text
from distill.run import Run
from probes.settings import ProbeSettings


@dataclass
class Mode:
    """A decoding mode, the texts that the target writes in it, and the label that its probes learn."""

    name: str  # ``greedy`` or ``sampled``
    warp: LogitsWarper
    label: str  # ``match``, ``accept`` or ``top-p``
    texts: dict[str, list[Text]] = field(default_factory=dict)  # by split

    def probabilities(self, logits: Tensor, places: Sequence[tuple[Text, int]]) -> Tensor:
        """Return warped probabilities ``[n, vocab]``; places are texts with the last position read."""
        prefixes = Prefixes.of(ids[: at + 1] for (ids, _), at in places) if self.warp.needs_prefix else None
        return self.warp(logits, prefixes)


def modes_of(options: ProbeSettings, target: PreTrainedModel) -> list[Mode]:
    """Return the decoding modes that the settings name, with the target's own generation settings beside these."""
    sampled = own_warp(target, options.temperature, {"top_p": options.top_p})
    modes = Mode("greedy", own_warp(target, 0.0, {}), "match"), Mode("sampled", sampled, options.sampled_label)
    return [mode for mode in modes if mode.name in options.modes]


def label_drafts(p: Tensor, q: Tensor, mode: Mode, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Draft a token at each position, by the exit's probabilities ``q [n, vocab]``, and label it by the target's ``p``.

    Random numbers are the CPU's, so that every device labels alike.

    Returns:
        The drafted tokens, their labels in [0, 1], and whether each is accepted (0 or 1), all ``[n]``. With ``accept``
        the outcome is a draw with the label's probability, otherwise it is the label.
    """
    drawn, kept = (torch.rand(len(q), 1, generator=generator).to(q.device) for _ in range(2))
    if mode.warp.greedy:
        tokens = q.argmax(-1)
    else:  # the first token up to which the probabilities sum to more than the number drawn
        reached = q.double().cumsum(-1)
        tokens = torch.searchsorted(reached, drawn * reached[:, -1:], right=True).squeeze(-1)
    label = (pick(p, tokens) > 0).float() if mode.label == "top-p" else ratio(p, q, tokens)
    return tokens, label, (kept[:, 0] < label).float() if mode.label == "accept" else label


def write_mode(run: Run, model: PreTrainedModel, mode: Mode, options: ProbeSettings) -> None:
    """Have the target answer the prompts of every split, into ``mode.texts``; a killed run keeps what it has written.

    Raises:
        UserError: A split has no prompt.
    """
    target, batch_size = run.record("target"), run.settings.teacher.responses.batch_size
    assert target is not None
    limit = context_of(model.config.get_text_config())
    made_from = {
        "target": target.fingerprint, "budget": options.max_new_tokens, "also": described(model, mode.warp),
        "frozen": inputs(run.settings, ["frozen"]),
        **{name: getattr(mode.warp, name) for name in ("temperature", *NEUTRAL)},
    }  # fmt: skip
    counts = {"train": options.prompts, "validation": options.validation_prompts, "test": options.test_prompts}
    for number, (split, count) in enumerate(counts.items()):
        rows, seed = Examples.of(getattr(run.corpus, split), count), run.settings.seed + number
        prompts = [ids for ids in map(rows.prompt, range(len(rows))) if ids]
        if not prompts:
            raise UserError(f"the {split} split has no prompts; plain texts need a longer data.max_length")
        ends = sorted(stop_ids(model, run.tokenizer))
        write: Write = partial(written_here, model, mode.warp, ends, (seed, 0), batch_size)
        rows = Examples.of(Dataset.from_dict({"input_ids": prompts, "labels": prompts}))
        numbers, budgets = np.arange(len(prompts)), np.clip(limit - rows.lengths, 0, options.max_new_tokens)
        about = made_from | {"prompts": fingerprint(prompts), "seed": seed}
        answers = Kept(TEXT_IDS, run.work / "probes" / f"{mode.name}-{split}-{fingerprint(about)[:16]}")
        title = f"{mode.name} texts, {split}"
        write_answers(run, answers, rows, numbers, budgets, lambda: write, title, GROUP * batch_size)  # noqa: B023
        written = [answers.get("ids", i).tolist() if budgets[i] else [] for i in range(len(prompts))]
        mode.texts[split] = [([*ids, *text], len(ids)) for ids, text in zip(prompts, written)]
