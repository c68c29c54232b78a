"""Models for training: loading, output head, LoRA, layer pruning, LayerSkip, optimisers."""
