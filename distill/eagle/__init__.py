"""Feature heads (EAGLE): trained on the target's hidden states, with or without AdaSPEC's selection."""
