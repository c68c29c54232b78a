"""What probes see and what they are to predict, for every exit layer, from one forward pass over the texts."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from decode.drafters.early_exit import Text
from decode.drafters.probe import FEATURES, confidence_features
from decode.errors import UserError, write_safely
from decode.models.families import check_structure, final_norm
from decode.progress import current
from decode.sampling import LogitsWarper
from decode.verify import pick, ratio
from distill import ranks
from distill.files import fingerprint
from distill.models.lm_head import LMHead

EXTRAS = len(FEATURES)
BLOCK = 1 << 24  # numbers in a block of logits: positions are judged a block at a time


@dataclass
class Features:
    """Response positions of some texts, seen from every exit."""

    exits: list[int]  # number of layers before each exit
    inputs: Tensor  # ``[exits, n, width + 3]``: the state that the exit's head sees, then the `confidence_features`
    # by name ``[exits, n]`` in [0, 1]; greedy: ``match``; sampled: ``accept`` (min(1, p/q)) and ``top-p``
    labels: dict[str, Tensor]
    outcome: Tensor  # ``[exits, n]`` of 0 and 1: was the drafted token accepted, where that is a draw by that draw
    text: Tensor  # ``[n]``, the text that each position belongs to, ascending

    def __len__(self) -> int:
        return len(self.text)

    @property
    def width(self) -> int:
        """Width of the hidden states."""
        return self.inputs.shape[-1] - EXTRAS

    @property
    def token_probability(self) -> Tensor:
        """q(x) of the drafted tokens, unwarped, ``[exits, n]``: what a probe has to beat."""
        return self.inputs[..., -EXTRAS].exp()

    @property
    def entropy(self) -> Tensor:
        """Entropy of the exit's unwarped distribution in bits, ``[exits, n]``."""
        return self.inputs[..., 1 - EXTRAS]

    def outcome_of(self, label: str) -> Tensor:
        """What probes of a label are judged by, ``[exits, n]``: the draw for ``accept``, else the label itself."""
        return self.outcome if label == "accept" else self.labels[label]


def exit_layers(model: PreTrainedModel, layers: Sequence[int] = ()) -> list[int]:
    """The exits asked for, or all.

    Raises:
        UserError: a layer outside the model, or layers that cannot be reached.
    """
    check_structure(model)
    depth = int(model.config.get_text_config().num_hidden_layers)
    outside = [layer for layer in layers if not 1 <= layer < depth]
    if outside:
        raise UserError(
            f"probes.layers has {outside[0]}; the model has {depth} layers, so exits are 1 to {depth - 1} "
            "(the number of layers that run)"
        )
    if depth < 2:
        raise UserError("the model has one layer, so there is no early exit; probes need two layers or more")
    return sorted(set(layers)) or list(range(1, depth))


@torch.no_grad()
def collect(
    target: PreTrainedModel,
    texts: Sequence[Text],
    warp: LogitsWarper,
    *,
    exits: Sequence[int] = (),
    draft: PreTrainedModel | None = None,
    positions: int | None = None,
    batch_size: int = 32,
    seed: int = 0,
    share: tuple[int, int] = (0, 1),
) -> Features:
    """Read the texts once, and note for every exit what it would draft and whether the target would accept it.

    Args:
        target: the model whose acceptance is predicted.
        texts: what it wrote.
        warp: the decoding mode.
        exits: exit layers, all of them taken from one pass; ignored with a draft.
        draft: a separate draft model, whose last hidden state is then the only exit.
        positions: keep a random sample of this many response positions of each text.
        batch_size: texts read together.
        seed: of the drafted tokens, of their acceptance and of the sample.
        share: which part of the batches is read, and of how many parts.
    """
    layers = [int(draft.config.get_text_config().num_hidden_layers)] if draft is not None else list(exits)
    heads = LMHead(target), LMHead(draft if draft is not None else target)
    texts = [text for text in texts if len(text[0]) > text[1]]
    if not texts:
        raise UserError("the target wrote nothing for any prompt, so there is nothing to learn from; check the data")
    order = sorted(range(len(texts)), key=lambda i: len(texts[i][0]))
    parts: list[Features] = []
    for at in range(batch_size * share[0], len(order), batch_size * share[1]):
        chosen = order[at : at + batch_size]
        generator = torch.Generator().manual_seed((seed * 1_000_003 + at) % (1 << 63))
        ids, rows = _rows([texts[i] for i in chosen], positions, generator)
        final, states = _states(target, draft, ids.to(target.device), layers, rows)
        text, block = torch.tensor(chosen)[rows[0]], max(1, BLOCK // heads[0].vocab)
        for some in torch.arange(len(final)).split(block):
            values = _observe(heads, final[some], [s[some] for s in states], warp, generator)
            parts.append(Features(layers, values.pop("inputs"), values, values.pop("outcome"), text[some]))
        current().advance(len(chosen))
    return join(parts)


def join(parts: Sequence[Features]) -> Features:
    """Features of whole texts, put in the order of the texts."""
    text = torch.cat([part.text for part in parts])
    place = text.argsort(stable=True)

    def joined(values: Iterable[Tensor]) -> Tensor:
        return torch.cat(list(values), 1)[:, place]

    labels = {name: joined(part.labels[name] for part in parts) for name in parts[0].labels}
    inputs, outcome = joined(part.inputs for part in parts), joined(part.outcome for part in parts)
    return Features(parts[0].exits, inputs, labels, outcome, text[place])


def _rows(texts: Sequence[Text], positions: int | None, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Right-padded ids, and the (row, column) ``[2, n]`` of every position that predicts a response token."""
    ids = torch.zeros(len(texts), max(len(t) for t, _ in texts), dtype=torch.long)
    places = []
    for row, (tokens, start) in enumerate(texts):
        ids[row, : len(tokens)] = torch.tensor(tokens)
        columns = torch.arange(max(0, start - 1), len(tokens) - 1)
        if positions is not None and len(columns) > positions:
            columns = columns[torch.randperm(len(columns), generator=generator)[:positions].sort().values]
        places.append(torch.stack([torch.full_like(columns, row), columns]))
    return ids, torch.cat(places, 1)


def _states(
    target: PreTrainedModel, draft: PreTrainedModel | None, ids: Tensor, layers: Sequence[int], rows: Tensor
) -> tuple[Tensor, list[Tensor]]:
    """LMHead inputs at the rows: the full target's ``[n, width]``, and those of every exit."""
    at = tuple(rows.to(ids.device))
    out = target.base_model(input_ids=ids, use_cache=False, output_hidden_states=draft is None)
    final = out.last_hidden_state[at]
    if draft is not None:
        return final, [draft.base_model(input_ids=ids.to(draft.device), use_cache=False).last_hidden_state[at]]
    norm = final_norm(target)
    return final, [norm(out.hidden_states[layer][at]) for layer in layers]


def _observe(
    heads: tuple[LMHead, LMHead],
    final: Tensor,
    states: Sequence[Tensor],
    warp: LogitsWarper,
    generator: torch.Generator,
) -> dict[str, Tensor]:
    """Inputs, labels by name, and outcome at every exit, ``[exits, n, ...]``, on the CPU."""
    p = warp(heads[0](final)).cpu()
    made: dict[str, list[Tensor]] = {}
    for state in states:
        logits = heads[1](state).float().cpu()
        q = warp(logits)
        shared = min(p.shape[-1], q.shape[-1])
        q, p_shared = q[:, :shared], p[:, :shared]
        x = q.argmax(-1) if warp.greedy else torch.multinomial(q, 1, generator=generator).squeeze(-1)
        accept = ratio(p_shared, q, x)
        values = {"inputs": torch.cat([state.float().cpu(), confidence_features(logits, x)], -1)}
        if warp.greedy:
            values |= {"match": accept, "outcome": accept}
        else:
            values |= {
                "accept": accept,
                "top-p": (pick(p_shared, x) > 0).float(),
                "outcome": (torch.rand(len(x), generator=generator) < accept).float(),
            }
        for name, value in values.items():
            made.setdefault(name, []).append(value)
    return {name: torch.stack(value) for name, value in made.items()}


FILES = "features-*.safetensors"


def collect_together(folder: Path, made_from: Any, texts: Sequence[Text], **how: Any) -> Features | None:
    """Features of the texts in the first process, whose others leave their shares as files; None in those.

    Args:
        folder: for these files, which the first process removes.
        made_from: what decides the features beside the texts.
        texts: see `collect`.
        how: the other arguments of `collect`.
    """
    batches = math.ceil(sum(len(ids) > start for ids, start in texts) / how["batch_size"])
    rank, world = ranks.rank(), max(1, min(ranks.started(), batches))
    if rank >= world:
        return None
    own = collect(texts=texts, **how, share=(rank, world))
    key = fingerprint(made_from, texts, world)
    paths = [folder / FILES.replace("*", f"{key}-{number}") for number in range(world)]
    if rank:
        tensors = {"inputs": own.inputs, "outcome": own.outcome, "text": own.text}
        tensors |= {f"label {name}": label for name, label in own.labels.items()}
        write_safely(paths[rank], lambda file: save_file(tensors, file))
        return None
    others = [ranks.wait_for(lambda path=path: _read(path, own.exits), f"the features in {path}") for path in paths[1:]]  # type: ignore[misc]
    for path in paths[1:]:
        path.unlink()
    return join([own, *others])


def _read(path: Path, exits: list[int]) -> Features | None:
    """The features in a file; None where it is not there yet."""
    if not path.exists():
        return None
    tensors = load_file(path)
    labels = {name.removeprefix("label "): value for name, value in tensors.items() if name.startswith("label ")}
    return Features(exits, tensors["inputs"], labels, tensors["outcome"], tensors["text"])
