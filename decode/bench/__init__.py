"""Measuring: prompt suites, the benchmark, costs and predictions, statistics, reports."""
