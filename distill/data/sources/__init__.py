"""Rows from wherever the settings point, in one of three plain shapes; imports tokenization."""
