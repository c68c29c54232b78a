"""The stages of a run in order, each skipped if its inputs have not changed."""
