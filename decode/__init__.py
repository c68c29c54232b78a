"""The speculative decoder: one loop for every method, and its measurements."""
