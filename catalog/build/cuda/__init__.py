"""nvcc and its facts, and CUDA C++ headers that kernels of every operation may use: Hopper's instructions."""
