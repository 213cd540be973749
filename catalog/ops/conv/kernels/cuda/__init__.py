"""Convolution kernels of NVIDIA GPUs."""
