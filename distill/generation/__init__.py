"""Responses to train on: of the target, of a server, of the draft itself."""
