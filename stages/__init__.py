"""The stages of a build: capture, compile, validate, benchmark, package; a file or folder each."""
