"""The weights that the hand-written forward reads: their layout on this machine, products with them, norms."""
