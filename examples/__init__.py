"""Models to try the pipeline on; run their scripts from the repository root with `python -m`."""
