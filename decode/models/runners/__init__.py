"""Runners: forwards over a cache that rolls back, by hand-written code or by the ordinary model call; imports core."""
