"""When drafting stops: confidences, thresholds, and the length for a batch of texts; imports core only."""
