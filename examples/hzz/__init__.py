"""Whole events of a file with jagged jets and muons, scored where uproot left them."""
