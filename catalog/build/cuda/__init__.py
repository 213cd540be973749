"""Kernels for NVIDIA GPUs: CUDA C++ headers of our own, specialised per row."""
