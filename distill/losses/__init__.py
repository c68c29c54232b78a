"""The losses: divergences, token selection, chunks of logits."""
