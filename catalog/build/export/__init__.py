"""Kernels as sources for somebody else's build: rows of the catalog, or a folder of generated headers."""
