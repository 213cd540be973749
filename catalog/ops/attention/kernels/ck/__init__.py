"""Attention kernels of CK Tile: upstream's sources behind our entry points."""
