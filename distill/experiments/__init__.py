"""Ablations, which draft to train, and training speed beside Hugging Face's Trainer; only the command imports it."""
