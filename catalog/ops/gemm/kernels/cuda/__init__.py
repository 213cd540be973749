"""GEMM kernels of NVIDIA GPUs: CUDA C++ headers, specialised for each row."""
