"""Models of the registry on Dask: in coffea, and on batch systems."""
