"""The stages of a build: capture, compile, validate, benchmark, package; one file each."""
