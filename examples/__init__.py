"""Example models; run their scripts from the repository root with `python -m`."""
