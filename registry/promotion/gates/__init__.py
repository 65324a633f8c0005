"""The gates between a version and an alias, one a file: pure functions over what was measured.

A file has `ORDER`, its place in the table, and `decide(found)`; `registry/promotion/decision.py`
finds it here. Nothing in a gate touches a file, a device or the registry.
"""
