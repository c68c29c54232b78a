"""Training by Lightning: modules, trainer, checkpoints, distribution."""
