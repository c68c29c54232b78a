"""Prompts that an instruct target writes itself (Magpie, arXiv 2406.08464), and those of a file beside them."""
