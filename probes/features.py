"""What probes see: the state at every exit layer with its confidence features, from one forward over the texts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from decode.core.draft import Ids
from decode.drafters.probe import FEATURES, confidence_features
from decode.errors import UserError
from decode.progress import current
from distill.engine.states import StateFiles
from distill.networks.layers import check_structure, final_norm
from distill.networks.lm_head import LMHead
from distill.results.evaluate import Text
from probes.labels import Mode, label_drafts

States = tuple[Tensor, dict[int, Tensor]]
"""Of texts: the last hidden states after the final norm ``[texts, time, width]``, and those after some layers."""
Read = Callable[[Sequence[Ids], Sequence[int]], States]
EXTRAS = len(FEATURES)
TOKENS = 1 << 13  # read in a forward, unless one text has more
BLOCK = 1 << 24  # logits held at once; positions are labelled in blocks of this size
MOST = 1 << 29  # numbers kept of a split; of longer or more texts a random sample of positions is kept


@dataclass
class Features:
    """Response positions of some texts, seen from every exit."""

    exits: list[int]  # number of layers before each exit
    inputs: Tensor  # ``[exits, n, width + 3]``: the state that the exit's head sees, then the `confidence_features`
    labels: Tensor  # ``[exits, n]`` in [0, 1], see `probes.labels`
    outcome: Tensor  # ``[exits, n]`` of 0 and 1: whether the drafted token is accepted
    text: Tensor  # ``[n]``, the text that each position belongs to, ascending

    def __len__(self) -> int:
        return len(self.text)

    @property
    def token_probability(self) -> Tensor:
        """Unwarped q(x) of the drafted tokens ``[exits, n]``: the score that a probe has to beat."""
        return self.inputs[..., -EXTRAS].exp()

    @property
    def entropy(self) -> Tensor:
        """Entropy of the exit's unwarped distribution in bits, ``[exits, n]``."""
        return self.inputs[..., 1 - EXTRAS]


def read_here(model: PreTrainedModel, texts: Sequence[Ids], layers: Sequence[int]) -> States:
    """Read texts by a forward pass of the model."""
    ids = pad_sequence([torch.tensor(text) for text in texts], batch_first=True)
    states = model.base_model(input_ids=ids.to(model.device), use_cache=False, output_hidden_states=True)
    return states.last_hidden_state, {layer: states.hidden_states[layer] for layer in layers}


def read_engine(files: StateFiles, parts: PreTrainedModel, texts: Sequence[Ids], layers: Sequence[int]) -> States:
    """Read texts by the engine that the target stands in; the last layer that it gives away is before the norm."""
    states = pad_sequence(files.take(texts), batch_first=True).to(parts.dtype)
    return final_norm(parts)(states[:, :, -1]), {layer: states[:, :, files.layers.index(layer)] for layer in layers}


def exit_layers(depth: int, layers: Sequence[int] = ()) -> list[int]:
    """Return the exits asked for, or all of them, of a model with so many layers.

    Raises:
        UserError: A layer outside the model.
    """
    if depth < 2:
        raise UserError("the model has one layer, so there is no early exit; probes need two layers or more")
    if outside := [layer for layer in layers if not 1 <= layer < depth]:
        raise UserError(f"probes.layers has {outside[0]}; the model has {depth} layers, so exits are 1 to {depth - 1}")
    return sorted(set(layers)) or list(range(1, depth))


@torch.no_grad()
def collect(
    model: PreTrainedModel,
    texts: Sequence[Text],
    mode: Mode,
    exits: Sequence[int],
    seed: int = 0,
    sample: bool = False,
    read: Read | None = None,
) -> Features:
    """Read the target's texts once; record for every exit what it would draft, and whether the target would accept it.

    Where all positions would take too much memory, ``sample`` keeps a random sample of each text's (`MOST`). Without
    ``read`` the model reads the texts.

    Raises:
        UserError: No text has a response, or the model's layers cannot be run one by one.
    """
    if read is None:
        check_structure(model)
    head, norm, read = LMHead(model), final_norm(model), read or partial(read_here, model)
    order = sorted((i for i, (ids, start) in enumerate(texts) if len(ids) > start), key=lambda i: len(texts[i][0]))
    if not order:
        raise UserError("the target wrote nothing for any prompt, so there is nothing to learn from; check the data")
    width = int(model.config.get_text_config().hidden_size)
    most = max(1, MOST // (len(order) * len(exits) * width)) if sample else None
    parts: list[tuple[Tensor, ...]] = []
    while order:
        chosen = order[: max(1, TOKENS // len(texts[order[-1]][0]))]
        generator = torch.Generator().manual_seed((seed * 1_000_003 + len(order)) % (1 << 63))
        order = order[len(chosen) :]
        last, states = read([texts[i][0][:-1] for i in chosen], exits)
        places = list[tuple[int, int]]()  # in the batch: the row and the position
        for row, i in enumerate(chosen):
            at = torch.arange(max(0, texts[i][1] - 1), len(texts[i][0]) - 1)
            at = at[torch.randperm(len(at), generator=generator)[:most].sort().values]
            places += [(row, position) for position in at.tolist()]
        size = max(1, BLOCK // head.vocab)
        for start in range(0, len(places), size):
            block = places[start : start + size]
            where = tuple(torch.tensor(block, device=last.device).T)
            prefixes = [(texts[chosen[row]], position) for row, position in block]
            p = mode.probabilities(head(last[where]), prefixes)
            exits_of_block: list[tuple[Tensor, ...]] = []
            for layer in exits:
                state = norm(states[layer][where])
                logits = head(state)
                tokens, label, outcome = label_drafts(p, mode.probabilities(logits, prefixes), mode, generator)
                inputs = torch.cat([state.float(), confidence_features(logits, tokens)], -1)
                exits_of_block.append((inputs.cpu(), label.cpu(), outcome.cpu()))
            parts.append((*map(torch.stack, zip(*exits_of_block)), torch.tensor([chosen[row] for row, _ in block])))
        current().advance(len(chosen))
    inputs, labels, outcome = (torch.cat([part[i] for part in parts], 1) for i in range(3))
    text, place = torch.cat([part[3] for part in parts]).sort(stable=True)
    return Features(list(exits), inputs[:, place], labels[:, place], outcome[:, place], text)
