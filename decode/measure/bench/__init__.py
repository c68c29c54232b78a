"""Benchmarks: methods compared, one text or several at a time; imports costs, predictions and statistics."""
