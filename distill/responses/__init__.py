"""Answers that drafts learn from: written by the target, by servers, or by the draft itself."""
