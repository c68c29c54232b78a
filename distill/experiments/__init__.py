"""Ablations and the benchmark against Hugging Face's Trainer; nothing imports it."""
