"""GEMM: traits, names, problems, rows, and kernels of our own."""
