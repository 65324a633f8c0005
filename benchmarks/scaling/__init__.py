"""A simulation of a served model with measured service times, its check and its predictions."""
