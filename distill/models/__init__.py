"""Models for training: made or loaded, head, adapters, LayerSkip, pruning, optimiser; imports data, config and core."""
