"""Feature heads that have learned a few texts by heart, so that their drafts are accepted often, but not always."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from decode.models.eagle.files import head_config
from decode.models.eagle.head import FeatureHead


def learned_head(
    target: PreTrainedModel, prompts: Sequence[Sequence[int]], *, captured_layers: tuple[int, ...], steps: int = 80
) -> FeatureHead:
    """An EAGLE-3 head trained on the target's greedy answers to these prompts."""
    torch.manual_seed(0)
    head = FeatureHead(head_config(target.config, 3, captured_layers=captured_layers))
    examples = []
    with torch.no_grad():
        for prompt in prompts:
            ids = torch.tensor([list(prompt)])
            tokens = target.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False)
            states = target(tokens, output_hidden_states=True).hidden_states
            features = torch.cat([states[layer] for layer in captured_layers], -1)
            examples.append((tokens, target.get_input_embeddings()(tokens[:, 1:]), features[:, :-1]))
    optimiser = torch.optim.Adam(head.parameters(), 5e-3)
    for _ in range(steps):
        loss = torch.zeros(())
        for tokens, embeds, features in examples:
            for depth, states in enumerate(head.unroll(embeds, features, 3)):
                count = tokens.shape[1] - 2 - depth
                loss = loss + F.cross_entropy(head.logits(states[0, :count], None), tokens[0, 2 + depth :])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return head.eval().requires_grad_(False)
