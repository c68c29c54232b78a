"""Experiment tracking by Lightning's loggers: W&B, CSV files, TensorBoard; imports config and core."""
