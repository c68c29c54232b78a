"""Trains draft models: data, target, DistillSpec, AdaSPEC, measurement, export, report."""
