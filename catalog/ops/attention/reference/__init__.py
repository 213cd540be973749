"""The answers that attention kernels are compared with: float64 NumPy."""
