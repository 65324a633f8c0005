"""Models of the registry on Dask: in coffea, in dask-awkward, on batch systems."""
