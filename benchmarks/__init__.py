"""Measurements, one command each; what was measured is in RESULTS.md."""
