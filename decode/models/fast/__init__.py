"""A hand-written forward of the common families."""
