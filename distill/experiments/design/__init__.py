"""``python -m distill design``: which draft to train for a target; nothing imports it but the command."""
