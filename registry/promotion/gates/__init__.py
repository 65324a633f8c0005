"""The gates of a promotion, one in each file: pure functions of the measurements.

A file defines `ORDER`, its place in the table, and `decide(found)`. The functions in
`registry/promotion/decision.py` find the files. Gates use no files, devices or registry.
"""
