"""Measurements, each with a command; their results are in RESULTS.md."""
