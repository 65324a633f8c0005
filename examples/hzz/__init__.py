"""Score whole events of a file with jagged jets and muons, in the memory that uproot filled."""
