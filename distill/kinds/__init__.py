"""Kinds of drafts. Each is made for a target, and turns a batch and the target's signal into rows for the loss."""
