"""Kernels of attention: headers of our own, and what writes a row's translation unit."""
