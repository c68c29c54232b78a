"""Labels: whether the target accepts the token that an exit layer (or a draft model) would draft at a position.

Greedy decoding has one label, ``match``: the argmax of the exit equals the argmax of the target. Sampled decoding has
two: ``accept``, the acceptance probability min(1, p(x)/q(x)) of a drafted token x ~ q, and ``top-p``, whether x is in
the target's top-p set (AdaSPEED, section 3.2). p and q are warped as decoding warps them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor
from transformers import PreTrainedModel

from decode.drafters.early_exit import Text
from decode.errors import UserError
from decode.models.loading import stop_ids
from decode.sampling import LogitsWarper
from decode.verify import pick, ratio
from distill.config.drafts import ResponseSettings
from distill.data.chat import prompt_part
from distill.data.context import StageContext
from distill.files import fingerprint
from distill.responses.server import Job
from distill.responses.texts import answered_by_all, answered_here
from probes.settings import ProbeSettings


@dataclass
class Mode:
    """A decoding mode, the texts that the target writes in it, and the label that its probes learn."""

    name: str  # ``greedy`` or ``sampled``
    warp: LogitsWarper
    label: str  # ``match``, ``accept`` or ``top-p``
    texts: dict[str, list[Text]] = field(default_factory=dict)  # by split


def modes_of(options: ProbeSettings) -> list[Mode]:
    """The decoding modes that the settings name."""
    sampled = LogitsWarper(options.temperature, top_p=options.top_p)
    modes = [Mode("greedy", LogitsWarper(), "match"), Mode("sampled", sampled, options.sampled_label)]
    return [mode for mode in modes if mode.name in options.modes]


def label_drafts(p: Tensor, logits: Tensor, mode: Mode, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Draft one token at each position and label it.

    Args:
        p: warped probabilities of the target ``[n, vocab]``.
        logits: logits of the exit or the draft model ``[n, vocab]``.
        mode: the decoding mode.
        generator: source of the drafted tokens and of their acceptance.

    Returns:
        The drafted tokens, their labels in [0, 1], and whether each is accepted (0 or 1), all ``[n]``. With ``accept``
        the outcome is a draw with the label's probability, otherwise it is the label.
    """
    q = mode.warp(logits)
    shared = min(p.shape[-1], q.shape[-1])
    p, q = p[:, :shared], q[:, :shared]
    tokens = q.argmax(-1) if mode.warp.greedy else torch.multinomial(q, 1, generator=generator).squeeze(-1)
    accepted = ratio(p, q, tokens)
    if mode.label == "match":
        return tokens, accepted, accepted
    if mode.label == "top-p":
        inside = (pick(p, tokens) > 0).float()
        return tokens, inside, inside
    return tokens, accepted, (torch.rand(len(tokens), generator=generator) < accepted).float()


def prompts_of(context: StageContext, options: ProbeSettings) -> dict[str, list[list[int]]]:
    """Prompts of the three splits as token ids; no text of one split is in another.

    Raises:
        UserError: a split has no prompt.
    """
    counts = {"train": options.prompts, "validation": options.validation_prompts, "test": options.test_prompts}
    found = {}
    for split, count in counts.items():
        rows = getattr(context.corpus, split)
        rows = rows.select(range(min(count, len(rows))))
        parts = (prompt_part(ids, labels) for ids, labels in zip(rows["input_ids"], rows["labels"]))
        found[split] = [ids for ids in parts if ids]
        if not found[split]:
            raise UserError(f"the {split} split has no prompts; plain texts need a longer data.max_length")
    return found


def write_texts(
    context: StageContext,
    model: PreTrainedModel,
    mode: Mode,
    prompts: dict[str, list[list[int]]],
    options: ProbeSettings,
) -> None:
    """Have the target answer the prompts of every split; a killed run continues with the texts that it has written."""
    tokenizer, record = context.corpus.tokenizer, context.run.record("target")
    assert record is not None
    limit = int(getattr(model.config.get_text_config(), "max_position_embeddings", 0) or 1 << 30)
    how = ResponseSettings(
        temperature=mode.warp.temperature,
        top_p=mode.warp.top_p,
        batch_size=options.batch_size,
        max_new_tokens=options.max_new_tokens,
    )
    for i, (split, some) in enumerate(prompts.items()):
        seed = context.settings.seed + i
        jobs = [Job(n, ids, "", max(0, min(options.max_new_tokens, limit - len(ids)))) for n, ids in enumerate(some)]
        written = answered_by_all(
            context,
            jobs,
            how,
            context.run.work / "probes" / f"{mode.name}-{split}.jsonl",
            {"target": record.fingerprint, "prompts": fingerprint(some), "seed": seed} | how.written(),
            partial(answered_here, model, how, seed, set(stop_ids(model, tokenizer))),
            f"{mode.name} texts, {split}",
        )
        mode.texts[split] = [([*ids, *text], len(ids)) for ids, text in zip(some, written)]


def right_padded(texts: Sequence[Text], positions: int | None, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Ids ``[texts, time]``, and the (row, column) ``[2, n]`` of every position that predicts a response token.

    Args:
        texts: tokens, and where the response begins.
        positions: keep a random sample of this many positions of each text; None keeps all.
        generator: source of the sample.
    """
    ids = torch.zeros(len(texts), max(len(tokens) for tokens, _ in texts), dtype=torch.long)
    places = []
    for row, (tokens, start) in enumerate(texts):
        ids[row, : len(tokens)] = torch.tensor(tokens)
        columns = torch.arange(max(0, start - 1), len(tokens) - 1)
        if positions is not None and len(columns) > positions:
            columns = columns[torch.randperm(len(columns), generator=generator)[:positions].sort().values]
        places.append(torch.stack([torch.full_like(columns, row), columns]))
    return ids, torch.cat(places, 1)
