"""Engines started and questioned: their commands, processes, servers and metrics, and models as GGUF files."""
