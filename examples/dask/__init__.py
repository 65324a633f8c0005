"""Models of the registry on batch systems, by Dask."""
