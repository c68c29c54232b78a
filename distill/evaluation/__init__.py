"""Measurements of a finished run; imports decode's measurements and everything below it."""
