"""REST: retrieval from a suffix array of a corpus; imports models and core."""
