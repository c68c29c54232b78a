"""Adaptix: an n-gram model of a corpus, searched for the draft tree; imports models and core."""
