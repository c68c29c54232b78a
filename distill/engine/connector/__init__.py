"""The file that vLLM imports; nothing else may lie beside it."""
