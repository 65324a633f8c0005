"""The gates of a promotion, one in each file: pure functions of the measurements.

A file defines `ORDER`, its place in the table, and `decide(found)`; `registry/promotion/decision.py`
finds it here. Gates use no files, no devices and no registry.
"""
