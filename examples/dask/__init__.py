"""Models of the registry on Dask: in coffea, on batch systems."""
