"""A jet-flavour tagger trained and run on a real NanoAOD file."""
