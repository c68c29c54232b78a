"""EAGLE feature heads: the module, its files, its runner; imports models and core."""
