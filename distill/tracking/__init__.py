"""Experiment tracking: W&B, CSV, TensorBoard."""
