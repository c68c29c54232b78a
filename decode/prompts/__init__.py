"""Prompt suites: data-set presets, the built-in arithmetic problems, scorers; imports core only."""
