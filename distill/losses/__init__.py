"""The losses: divergences, token selection, chunks of logits; imports models, data, config and core."""
