"""The target in a serving engine: its servers, the states that they give away, and whether these are the target's."""

from distill.engine.vllm import VLLM

PROTOCOLS = {"vllm": VLLM()}
"""How each engine gives states away, by the name of its kind of signal (`distill.config.base.ENGINES`)."""
