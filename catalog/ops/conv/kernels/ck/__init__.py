"""Convolution kernels of CK Tile: instances of upstream's templates behind our entry points."""
