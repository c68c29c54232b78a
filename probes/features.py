"""What probes see: the state at every exit layer with its confidence features, from one forward over the texts."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from decode.drafters.early_exit import Text
from decode.drafters.probe import FEATURES, confidence_features
from decode.errors import UserError
from decode.models.families import check_structure, final_norm
from decode.progress import current
from distill.models.lm_head import LMHead
from probes.labels import Mode, label_drafts, right_padded

EXTRAS = len(FEATURES)
BLOCK = 1 << 24  # logits held at once; positions are labelled in blocks of this size


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


def exit_layers(model: PreTrainedModel, layers: Sequence[int] = ()) -> list[int]:
    """The exits asked for, or all of them.

    Raises:
        UserError: a layer outside the model, or a model whose layers cannot be run one by one.
    """
    check_structure(model)
    depth = int(model.config.get_text_config().num_hidden_layers)
    if depth < 2:
        raise UserError("the model has one layer, so there is no early exit; probes need two layers or more")
    outside = [layer for layer in layers if not 1 <= layer < depth]
    if outside:
        raise UserError(f"probes.layers has {outside[0]}; the model has {depth} layers, so exits are 1 to {depth - 1}")
    return sorted(set(layers)) or list(range(1, depth))


@torch.no_grad()
def collect(
    target: PreTrainedModel,
    texts: Sequence[Text],
    mode: Mode,
    *,
    exits: Sequence[int] = (),
    draft: PreTrainedModel | None = None,
    positions: int | None = None,
    batch_size: int = 32,
    seed: int = 0,
) -> Features:
    """Read the texts once; record for every exit what it would draft and whether the target would accept it.

    Args:
        target: the model whose acceptance is predicted.
        texts: texts that the target wrote.
        mode: the decoding mode, which decides the labels.
        exits: exit layers; all of them are taken from one forward. Not used with a draft.
        draft: a separate draft model, whose last hidden state is then the only exit.
        positions: keep a random sample of this many response positions of each text.
        batch_size: texts read together.
        seed: seed of the drafted tokens, of their acceptance and of the sample.
    """
    layers = list(exits) if draft is None else [int(draft.config.get_text_config().num_hidden_layers)]
    target_head, exit_head = LMHead(target), LMHead(target if draft is None else draft)
    texts = [text for text in texts if len(text[0]) > text[1]]
    if not texts:
        raise UserError("the target wrote nothing for any prompt, so there is nothing to learn from; check the data")
    order = sorted(range(len(texts)), key=lambda i: len(texts[i][0]))
    parts: list[tuple[Tensor, ...]] = []
    for at in range(0, len(order), batch_size):
        chosen = order[at : at + batch_size]
        generator = torch.Generator().manual_seed((seed * 1_000_003 + at) % (1 << 63))
        ids, places = right_padded([texts[i] for i in chosen], positions, generator)
        rows = tuple(places.to(target.device))
        out = target.base_model(input_ids=ids.to(target.device), use_cache=False, output_hidden_states=draft is None)
        final = out.last_hidden_state[rows]
        if draft is None:
            norm = final_norm(target)
            states = [norm(out.hidden_states[layer][rows]) for layer in layers]
        else:
            states = [draft.base_model(input_ids=ids.to(draft.device), use_cache=False).last_hidden_state[rows]]
        text = torch.tensor(chosen)[places[0]]
        for some in torch.arange(len(final)).split(max(1, BLOCK // target_head.vocab)):
            p = mode.warp(target_head(final[some])).cpu()
            seen: list[tuple[Tensor, ...]] = []
            for state in states:
                logits = exit_head(state[some]).float().cpu()
                tokens, label, outcome = label_drafts(p, logits, mode, generator)
                inputs = torch.cat([state[some].float().cpu(), confidence_features(logits, tokens)], -1)
                seen.append((inputs, label, outcome))
            parts.append((*(torch.stack(values) for values in zip(*seen)), text[some]))
        current().advance(len(chosen))
    text = torch.cat([part[3] for part in parts])
    place = text.argsort(stable=True)
    inputs, labels, outcome = (torch.cat([part[i] for part in parts], 1)[:, place] for i in range(3))
    return Features(layers, inputs, labels, outcome, text[place])
