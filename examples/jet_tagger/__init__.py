"""A small jet tagger, trained here on generated jets."""
