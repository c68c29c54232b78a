"""The frozen target: its distributions on training examples, computed once and kept; imports losses and below."""
