"""Finished drafts as folders that serving engines load, and what was measured on them."""
