"""Runs on the workers of a Dask cluster, which may be on other machines."""
