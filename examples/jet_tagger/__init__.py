"""A small jet tagger, trained on generated jets."""
