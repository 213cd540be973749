"""Convolution kernels of our own."""
