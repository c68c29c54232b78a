"""Measured costs of forwards, of early exits and of bookkeeping, and the machine they were measured on."""
