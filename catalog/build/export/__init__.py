"""Exports of kernels as sources for another build: rows of the catalog, or a folder of generated headers."""
