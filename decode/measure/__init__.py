"""Measuring: prompt suites, the benchmark, costs, statistics, reports."""
