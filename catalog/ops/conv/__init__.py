"""Grouped convolution: traits, names, problems and rows; kernels that run are not part of it yet."""
