"""C++ headers that host kernels of every operation may use: vectors, element types, matrix products."""
