"""GEMM kernels of CPUs."""
