"""Convolution kernels of CPUs."""
