"""Measurements: benchmarks, costs, offline acceptance, baselines; imports the loop and everything below it."""
