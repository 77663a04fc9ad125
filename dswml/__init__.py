"""Sparsity-weighted multi-label classification on a Dask cluster."""
