"""GEMM kernels: headers and the emitters of their sources."""
