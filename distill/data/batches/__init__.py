"""Batches for Lightning: examples, their order, packing and padding; imports tokenization."""
