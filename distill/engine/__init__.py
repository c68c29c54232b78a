"""The target in a serving engine: its servers, the states that they give away, and whether these are the target's."""
