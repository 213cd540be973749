"""Attention kernels for NVIDIA GPUs: CUDA C++ headers, specialised for each row."""
